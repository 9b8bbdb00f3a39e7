"""A model's layers on a GPU: the modules of model.py, made of the operators of gpu_*.py.

    put_on_gpu(model, dtype)       once, when all weights are loaded: in place, a target or a head

Eight launches a layer, one more where w2 wants its rows rounded or summed up, one where queries and
keys are normed. A forward takes a GpuPlace instead of model.py's Place: no mask, since these
operators read the length on the device. What a file holds is said in linear.py, and the layouts
here in gpu_linear.py. Leaves out fp32 models, and training.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_draft import DraftHead, DraftLayer
from model import At, Attention, FeedForward, RMSNorm, Transformer, TransformerBlock
from talon.kernels import gpu_attention  # noqa: F401
from talon.kernels.gpu_linear import MOST_BLOCKS
from talon.kernels.gpu_rows import padded
from talon.kernels.linear import QuantizedLinear

ops = torch.ops.talon

FORMS = {"int8-dynamic": "int8", "int4": "sums"}  # of rows; those of other modes stay as they are

Rows = tuple[Tensor, Tensor | None]  # in the form that a layer takes, and what goes with them


class GpuPlace(NamedTuple):
    """What the T tokens of a forward see: the committed slots, and behind them those of their
    ancestors and of themselves, or where there are none of all tokens up to them. That says
    their slots and their positions too."""

    rope: Tensor  # fp32 [2, R, D], of all positions
    length: Tensor  # int64 [1]
    ancestors: Tensor | None  # bool [T, N]


def place(
    rope: Tensor, positions: Tensor, slots: Tensor, at: At, ancestors: Tensor | None = None
) -> GpuPlace:
    """As `model.place`."""
    return GpuPlace(rope, at.length, ancestors)


def tiled(weight: Tensor, width: int) -> Tensor:
    """[N/128, bytes/width, 128, width] of [N, bytes], padded with zeros: what a program reads in
    one step lies together in memory."""
    outputs, inputs = weight.shape
    weight = F.pad(weight, (0, -inputs % width, 0, -outputs % 128))
    return weight.view(-1, 128, weight.shape[1] // width, width).transpose(1, 2).contiguous()


def packed_int4(linear: QuantizedLinear) -> tuple[Tensor, Tensor]:
    """uint8 [N/128, K/128, 128, 64] and pairs int32 [groups, Np], scale below and zero above.

    A tile's low halves are its first inputs, its high halves the others. Groups of 256 become two
    of 128 each; with groups of 32 a step has 64 inputs. The inputs are padded to whole steps."""
    outputs, whole = linear.out_features, linear.groupsize
    group, half = min(whole, 128), 32 if whole == 32 else 64
    width = padded(linear.in_features, group)
    halves = linear.weight.view(outputs, -1, whole // 2)
    steps = torch.cat((halves & 15, halves >> 4), 2).view(outputs, -1)[:, :width]
    low, high = F.pad(steps, (0, width - steps.shape[1])).view(outputs, -1, 2, half).unbind(2)
    pairs = []
    for tensor in (linear.scales, linear.zeros):
        tensor = tensor.repeat_interleave(whole // group, 1)[:, : width // group]
        more = (0, width // group - tensor.shape[1], 0, -outputs % 128)
        pairs.append(F.pad(tensor.bfloat16(), more).view(torch.int16).int())
    weight = tiled((low | high << 4).view(outputs, -1), half)
    return weight, (pairs[0] & 0xFFFF | pairs[1] << 16).t().contiguous()


def factors_of(linear: QuantizedLinear) -> Tensor | None:
    """fp32 [K]: what int8 weights want their inputs multiplied with, if anything."""
    return None if (linear.smoothing == 1).all() else 1 / linear.smoothing


class GpuLinear(nn.Module):
    """A linear layer, plain or quantised, from the form in which a file holds it."""

    def __init__(self, linear: nn.Linear | QuantizedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.inputs, self.outputs, self.dtype = linear.in_features, linear.out_features, dtype
        mode = getattr(linear, "mode", "")
        self.form, self.group = FORMS.get(mode, "plain"), 0
        weight, scales, factors = linear.weight.detach(), None, None
        if mode == "int4":
            self.group = min(linear.groupsize, 128)
            weight, scales = packed_int4(linear)
        elif mode:
            weight, scales, factors = tiled(weight, 64), linear.scales, factors_of(linear)
        arrived = torch.zeros(-(-self.outputs // 64) * MOST_BLOCKS, dtype=torch.int32)
        tensors = {"weight": weight, "scales": scales, "factors": factors, "bias": linear.bias}
        for name, tensor in (tensors | {"arrived": arrived.to(weight.device)}).items():
            self.register_buffer(name, tensor, persistent=False)

    def ready(self, x: Tensor) -> Rows:
        """Rows x [T, K] in the form that this layer takes."""
        if self.factors is None and self.form == "plain":
            return x, None
        return ops.ready(x, self.factors, 0.0, "none", self.form, self.group)

    def multiply(self, rows: Rows, end: str = "plain", *more: Tensor | None) -> Tensor:
        """The operator on ready rows; more: the residual, or for qkv None, rope, slots, kv."""
        layer = self.weight, self.scales, self.bias, self.arrived, self.outputs
        return ops.linear(*rows, *layer, end, self.dtype, *more)

    def forward(self, x: Tensor | Rows) -> Tensor:
        return self.multiply(x if isinstance(x, tuple) else self.ready(x))

    def rows_of(self, ids: Tensor) -> nn.Linear:
        """A plain layer with the outputs `ids` (int64) only, without a bias."""
        if self.scales is None:
            weight = self.weight[ids]
        else:
            units = torch.eye(self.inputs, dtype=self.dtype, device=ids.device)
            bias = 0 if self.bias is None else self.bias[ids]
            weight = torch.cat([self(x)[:, ids] - bias for x in units.split(64 * MOST_BLOCKS)]).t()
        plain = nn.Linear(self.inputs, len(ids), bias=False, device="meta")
        plain.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        return plain


class GpuNorm(nn.Module):
    """`model.RMSNorm`: rows as they are, or where `layer` alone reads them, in its form."""

    def __init__(self, norm: RMSNorm, layer: GpuLinear | None = None) -> None:
        super().__init__()
        self.weight, self.eps, self.layer = norm.weight, norm.eps, layer
        factors = None if layer is None else layer.factors
        scaled = norm.weight if factors is None else norm.weight.detach().float() * factors
        self.register_buffer("scaled", scaled.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor | Rows:
        if self.layer is None:
            return ops.ready(x, self.scaled, self.eps, "norm", "plain", 0)[0]
        return ops.ready(x, self.scaled, self.eps, "norm", self.layer.form, self.layer.group)


class GpuAttention(nn.Module):
    """`model.Attention`."""

    project = Attention.project

    def __init__(self, attention: Attention, dtype: torch.dtype) -> None:
        super().__init__()
        self.n_head, self.n_kv_head = attention.n_head, attention.n_kv_head
        self.head_dim = attention.head_dim
        self.wqkv, self.wo = GpuLinear(attention.wqkv, dtype), GpuLinear(attention.wo, dtype)
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        norms = self.q_norm and torch.stack((self.q_norm.weight, self.k_norm.weight)).detach()
        self.register_buffer("norms", norms, persistent=False)
        arrived = torch.zeros(64 * MOST_BLOCKS, dtype=torch.int32, device=self.wo.weight.device)
        self.register_buffer("arrived", arrived, persistent=False)

    def forward(self, x: Tensor | Rows, place: GpuPlace, kv: Tensor, residual: Tensor) -> Tensor:
        rows, wo = x if isinstance(x, tuple) else self.wqkv.ready(x), self.wo
        rope, *seen = place
        if self.norms is None:
            q = self.wqkv.multiply(rows, "qkv", None, rope, *seen, kv)
        else:
            q = ops.heads(self.wqkv.multiply(rows), self.norms, self.q_norm.eps, rope, *seen, kv)
        rows = ops.attend_tree(q, kv, *seen, wo.factors, self.arrived, wo.form, wo.group)
        return wo.multiply(rows, "plain", residual)


class GpuFeedForward(nn.Module):
    """`model.FeedForward`."""

    def __init__(self, feed_forward: FeedForward, dtype: torch.dtype) -> None:
        super().__init__()
        self.w13, self.w2 = GpuLinear(feed_forward.w13, dtype), GpuLinear(feed_forward.w2, dtype)
        w13, factors = self.w13, self.w2.factors
        alone = factors is not None and w13.outputs == 2 * len(factors)  # holds all that w2 reads
        if alone and w13.weight.dtype == torch.int8:  # up may as well come out scaled
            both = torch.cat((torch.ones_like(factors), factors))
            w13.scales, self.w2.factors = w13.scales * both, None
            w13.bias = None if w13.bias is None else w13.bias.float() * both
        self.fused = self.w2.form == "plain" and self.w2.factors is None

    def forward(self, rows: Rows, residual: Tensor) -> Tensor:
        w2 = self.w2
        if self.fused:
            return w2.multiply((self.w13.multiply(rows, "silu"), None), "plain", residual)
        both = self.w13.multiply(rows)
        rows = ops.ready(both, w2.factors, 0.0, "silu", w2.form, w2.group)
        return w2.multiply(rows, "plain", residual)


def put_on_gpu(module: Transformer | DraftHead, dtype: torch.dtype) -> None:
    """Replace the layers of a target or a head, whose weights are on the GPU in a file's form.

    What a head borrows of its target is replaced with the target."""
    for layer in [m for m in module.modules() if isinstance(m, TransformerBlock | DraftLayer)]:
        layer.attention = GpuAttention(layer.attention, dtype)
        layer.feed_forward = GpuFeedForward(layer.feed_forward, dtype)
        layer.ffn_norm = GpuNorm(layer.ffn_norm, layer.feed_forward.w13)
        if isinstance(layer, TransformerBlock):
            layer.attention_norm = GpuNorm(layer.attention_norm, layer.attention.wqkv)
    for name in ("fc", "output"):
        linear = getattr(module, name, None)
        if isinstance(linear, nn.Linear | QuantizedLinear):
            setattr(module, name, GpuLinear(linear, dtype))
    for parts in [m for m in module.modules() if isinstance(m, nn.ModuleList)]:  # Medusa's
        for name, linear in list(parts.named_children()):
            if isinstance(linear, nn.Linear | QuantizedLinear):
                setattr(parts, name, GpuLinear(linear, dtype))
    if getattr(module, "norm", None) is not None:
        # What a head or its next level reads are rows as they are.
        alone = isinstance(module, DraftHead) and not module.config.norm_output
        module.norm = GpuNorm(module.norm, module.output if alone else None)
    module.place = place
