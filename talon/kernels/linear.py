"""Linear layers with int8 or 4-bit weights: how they are stored, rounded and run.

    swap_linears(model, checkpoint.quantization)   # meta device: nn.Linear -> quantised linear
    model.load_state_dict(..., assign=True)        # the tensors as they are in the file
    linear.pack(device, dtype)                     # each, once, on the device that runs it

A file holds plain tensors that suit every device; `pack` gives them a device's own form. A linear X
with weight [out, in] is stored as (Ip = in, padded with zeros to whole groups of g)

    int8, int8-dynamic   X.weight int8 [out, in]     X.scales fp32 [out], X.smoothing fp32 [in]
    int4                 X.weight uint8 [out, Ip/2]  X.scales, X.zeros bf16 [out, Ip/g]

int8: weight = step * scale / smoothing, and it is the inputs that are divided by the smoothing.
int4: weight = (step - 8) * scale + zero; byte j of a group holds step j in its low half and step
j + g/2 in its high half. Scales and zeros are fp32 where another program rounded the weights, so
that they keep their values; on a GPU they are bf16. Biases stay as they are. quantize.py writes
such files; cpu_kernels.py multiplies with them on a CPU, and gpu_layers.py puts them on a GPU.
Leaves out training: nothing has a gradient."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from talon.checkpoint import TensorSpec
from talon.kernels import cpu_kernels

GROUPSIZES = (32, 64, 128, 256)
GROUPSIZE = 128  # where none is given
TINY = 1e-30  # a row of activations smaller than this counts as zero
INTEGERS = cpu_kernels.ROUTES[1:]  # routes of a CPU that multiply integers
AMX_ROWS = 4  # from which tiles were measured to be faster; the numbers are the same either way

# ---------------------------------------------------------------- rounding


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [out, in] and scales fp32 [out], symmetric; a row of zeros gets scale 0."""
    weight = weight.float()
    scales = weight.abs().amax(1, keepdim=True) / 127
    steps = torch.where(scales > 0, weight / scales, 0)
    return steps.round().clamp(-127, 127).to(torch.int8), scales.flatten()


def quantize_int4(weight: Tensor, groupsize: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed uint8 [out, Ip/2], scales and zeros bf16 [out, Ip/groupsize]."""
    out, width = weight.shape
    padding = -width % groupsize
    share = F.pad(torch.ones(width, device=weight.device), (0, padding)).view(1, -1, groupsize)
    size = max(1, (1 << 18) // (width + padding))  # parts that stay in a CPU's cache
    parts = [
        fit_groups(part.view(len(part), -1, groupsize), share)
        for part in F.pad(weight.float(), (0, padding)).split(size)
    ]
    steps, scales, zeros = (torch.cat(column) for column in zip(*parts, strict=True))
    packed = pack_int4(steps.to(torch.uint8).view(out, -1), groupsize)
    return packed, scales.bfloat16().view(out, -1), zeros.bfloat16().view(out, -1)


class Grid(NamedTuple):
    """A 4-bit grid of each group: weight = (step - 8) * scale + zero. All fp32 [..., g or 1]."""

    steps: Tensor
    scale: Tensor
    zero: Tensor


def fit_groups(groups: Tensor, share: Tensor) -> Grid:
    """The grids with the least weighted squared error of several.

    groups: fp32 [..., g]; share: the weights of the errors, fp32, broadcast over it. The candidates
    shrink the range by up to a quarter, since a few clipped weights cost less than a coarse grid;
    the best of them is then refined by least squares."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    middle, half = (low + high) / 2, (high - low) / 2
    unit = torch.where(half > 0, half, 1)  # squares of very small or large weights would not fit
    best, least = None, groups.new_full((), math.inf)
    for shrink in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, None, None):
        if shrink is None:
            scale, zero = regress(groups, best.steps, share)
        else:
            scale, zero = shrink * half / 7.5, middle + shrink * half / 15
        grid = round_groups(groups, low == high, scale, zero)
        error = (grid.steps - 8).mul_(grid.scale).add_(grid.zero).sub_(groups)
        error = error.div_(unit).square_().mul_(share).sum(-1, keepdim=True)
        closer, known = error < least, best or grid
        best = Grid(*(torch.where(closer, new, old) for new, old in zip(grid, known, strict=True)))
        least = torch.minimum(least, error)
    return best


def round_groups(groups: Tensor, flat: Tensor, scale: Tensor, zero: Tensor) -> Grid:
    """Round to the nearest step, with scale and zero as bf16 can hold them."""
    zero = zero.bfloat16().float()
    # Where all weights are equal the scale is free: let it carry what bf16 cuts off the zero.
    scale = torch.where(flat, groups.narrow(-1, 0, 1) - zero, scale).bfloat16().float()
    steps = torch.where(scale == 0, 0, (groups - zero) / scale).round_().add_(8).clamp_(0, 15)
    return Grid(steps, scale, zero)


def regress(groups: Tensor, steps: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero that minimise the weighted squared error for given steps."""
    share = share / share.sum(-1, keepdim=True).clamp_min(TINY)
    x = steps - 8
    x_mean, w_mean = ((t * share).sum(-1, keepdim=True) for t in (x, groups))
    x = x - x_mean
    spread = (x.square() * share).sum(-1, keepdim=True)
    scale = (x * (groups - w_mean) * share).sum(-1, keepdim=True) / spread.clamp_min(1e-12)
    return scale, w_mean - scale * x_mean


def pack_int4(steps: Tensor, groupsize: int) -> Tensor:
    """uint8 [out, Ip/2], as a file has them, of steps 0..15, uint8 [out, Ip]."""
    low, high = steps.view(steps.shape[0], -1, 2, groupsize // 2).unbind(2)
    return (low | high << 4).view(steps.shape[0], -1)


def round_rows(x: Tensor, limit: int = 127) -> tuple[Tensor, Tensor]:
    """Steps -limit..limit (fp32) and scales [T, 1] of each row of x fp32 [T, in]."""
    scales = x.abs().amax(-1, keepdim=True).clamp_min(TINY) / limit
    return (x / scales).round(), scales


# ---------------------------------------------------------------- layers


class QuantizedLinear(nn.Module):
    """What all modes share: stored tensors on the meta device, a bias, packing once.

    A mode adds `specs`: its stored tensors, by their short names; `packed`: these in the form that
    `route` multiplies with; `stored`: the inverse; `multiply`: fp32 [T, out], the bias not yet
    added, of x [T, in] in any dtype."""

    mode: str
    specs: Callable[[int, int, int], dict[str, TensorSpec]]
    packed: Callable[[], dict[str, Tensor]]
    stored: Callable[[], dict[str, Tensor]]
    multiply: Callable[[Tensor], Tensor]

    def __init__(
        self, in_features: int, out_features: int, bias: Tensor | None = None, groupsize: int = 128
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.bias, self.groupsize = bias, groupsize
        self.dtype: torch.dtype | None = None  # of the activations, known once packed
        self.route = ""  # how the device multiplies, as cpu_kernels says
        for name, spec in self.specs(in_features, out_features, groupsize).items():
            self.register_buffer(name, torch.empty(spec.shape, dtype=spec.dtype, device="meta"))

    def pack(self, device: torch.device, dtype: torch.dtype) -> None:
        """Replace the stored tensors by packed ones, which are no part of a state dict.

        dtype: of the activations, and of what `unpacked` returns. Once is enough."""
        if self.route:
            return
        self.dtype, self.route = dtype, route_on(device)
        for name, tensor in self.packed().items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out] in the dtype of x."""
        y = self.multiply(x)
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)

    def rows_of(self, ids: Tensor) -> "QuantizedLinear":
        """A layer of its own, packed alike, with the outputs `ids` (int64) only; without a bias."""
        reduced = type(self)(self.in_features, len(ids), None, self.groupsize)
        for name, tensor in self.stored().items():
            reduced.register_buffer(name, tensor if name == "smoothing" else tensor[ids])
        reduced.pack(ids.device, self.dtype)
        return reduced


def route_on(device: torch.device) -> str:
    """How quantised layers multiply on a device; ValueError where its operators cannot be had."""
    if device.type != "cuda":
        return cpu_kernels.integer_route()
    raise ValueError(
        "quantised layers on a GPU need Triton, compute capability 8.0, heads of at most 128 and "
        "16 bits: give --dtype bf16 or fp16, or use the checkpoint that is not quantised"
    )


class Int8Linear(QuantizedLinear):
    """int8 weights, one scale per output. Activations are rounded to 16 bits on a CPU that
    multiplies integers, and stay as they are elsewhere."""

    mode = "int8"
    planes = 2  # of 8 bits each, to which such a CPU rounds the activations

    @staticmethod
    def specs(in_features: int, out_features: int, groupsize: int) -> dict[str, TensorSpec]:
        return {
            "weight": TensorSpec(torch.int8, (out_features, in_features)),
            "scales": TensorSpec(torch.float32, (out_features,)),
            "smoothing": TensorSpec(torch.float32, (in_features,)),
        }

    def packed(self) -> dict[str, Tensor]:
        weight = self.weight
        if self.route in INTEGERS:
            weight = cpu_kernels.interleave(weight)
        return {"weight": weight, "scales": self.scales, "smoothing": 1 / self.smoothing}

    def stored(self) -> dict[str, Tensor]:
        weight = self.weight
        if self.route in INTEGERS:
            weight = cpu_kernels.deinterleave(weight)[: self.out_features, : self.in_features]
        return {"weight": weight, "scales": self.scales, "smoothing": 1 / self.smoothing}

    def multiply(self, x: Tensor) -> Tensor:
        smooth = (x.float() * self.smoothing).contiguous()
        if self.route == "floats":
            return self.multiply_floats(smooth)
        amx = self.route == "amx" and x.shape[0] * self.planes >= AMX_ROWS
        return torch.ops.talon.integer_rows(smooth, self.weight, self.scales, self.planes, amx)

    def multiply_floats(self, x: Tensor) -> Tensor:
        return torch.ops.talon.int8_rows(x, self.weight, self.scales)


class Int8DynamicLinear(Int8Linear):
    """int8 weights times int8 activations, which are rounded row by row."""

    mode = "int8-dynamic"
    planes = 1

    def multiply_floats(self, x: Tensor) -> Tensor:
        steps, scales = round_rows(x)
        return super().multiply_floats(steps) * scales


class Int4Linear(QuantizedLinear):
    """4-bit weights in groups along the inputs, each group with a scale and a zero. Activations as
    for int8."""

    mode = "int4"

    @staticmethod
    def specs(in_features: int, out_features: int, groupsize: int) -> dict[str, TensorSpec]:
        groups = -(-in_features // groupsize)
        return {
            "weight": TensorSpec(torch.uint8, (out_features, groups * groupsize // 2)),
            "scales": TensorSpec(torch.bfloat16, (out_features, groups)),
            "zeros": TensorSpec(torch.bfloat16, (out_features, groups)),
        }

    def packed(self) -> dict[str, Tensor]:
        tensors = self.weight, self.scales, self.zeros
        if self.route in INTEGERS:
            tensors = cpu_kernels.interleave_groups(*tensors, self.groupsize)
        return dict(zip(("weight", "scales", "zeros"), tensors, strict=True))

    def stored(self) -> dict[str, Tensor]:
        tensors = self.weight, self.scales, self.zeros
        if self.route in INTEGERS:
            tensors = cpu_kernels.deinterleave_groups(*tensors, self.out_features)
        return dict(zip(("weight", "scales", "zeros"), tensors, strict=True))

    def multiply(self, x: Tensor) -> Tensor:
        padding = -self.in_features % self.groupsize
        padded = F.pad(x, (0, padding)) if padding else x
        tensors = self.weight, self.scales, self.zeros
        padded = padded.float().contiguous()
        if self.route == "floats":
            return torch.ops.talon.int4_rows(padded, *tensors, self.groupsize)
        amx = self.route == "amx" and x.shape[0] >= AMX_ROWS
        return torch.ops.talon.grouped_rows(padded, *tensors, amx)[:, : self.out_features]


def round_linears(module: nn.Module) -> None:
    """All plain linear layers of a module in int8, as of a file written without calibration."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                layer = Int8Linear(child.in_features, child.out_features, child.bias)
                layer.weight, layer.scales = quantize_int8(child.weight.detach())
                layer.smoothing = torch.ones_like(layer.scales[:1]).repeat(child.in_features)
                setattr(parent, name, layer)


LINEARS: dict[str, type[QuantizedLinear]] = {
    layer.mode: layer for layer in (Int8Linear, Int8DynamicLinear, Int4Linear)
}


def swap_linears(module: nn.Module, quantization: dict | None) -> None:
    """Replace, on the meta device, each linear that `quantization` names by its quantised form.

    Raises ValueError for a mode, a group size or a layer that this program does not know."""
    quantization = quantization or {"layers": {}}
    groupsize = quantization.get("groupsize") or GROUPSIZES[0]
    modes = ", ".join(LINEARS)
    if groupsize not in GROUPSIZES:
        raise ValueError(f"group size {groupsize} is not one of {GROUPSIZES}; quantise again")
    for name, mode in quantization["layers"].items():
        if mode not in LINEARS:
            raise ValueError(f"{name} has the mode {mode!r}, none of {modes}; quantise again")
        parent, _, child = name.rpartition(".")
        try:
            linear = module.get_submodule(name)
        except AttributeError:
            raise ValueError(f"{name} is quantised but no layer of this model") from None
        swapped = LINEARS[mode](linear.in_features, linear.out_features, linear.bias, groupsize)
        setattr(module.get_submodule(parent), child, swapped)


@torch.no_grad()
def unpacked(linear: QuantizedLinear) -> nn.Linear:
    """A plain linear with the weights of a packed one, in the dtype that it was packed for."""
    identity = torch.eye(linear.in_features, device=linear.scales.device)
    weight = torch.cat([linear.multiply(columns) for columns in identity.split(64)]).t()
    plain = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(weight.to(linear.dtype).contiguous(), requires_grad=False)
    plain.bias = linear.bias
    return plain
