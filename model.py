"""The target: a LLaMA-family decoder written for batch size 1 and a static KV cache.

Leaves out: batching, training, mixture of experts, parallelism, and every choice of a token. One
forward runs T rows of one sequence. A row has three separate coordinates, because a draft tree
needs them apart: its RoPE position, its cache slot, and its line of the attention mask.

Shape legend, used by every file:
    T  rows of this forward (1, a prefill chunk, or the N nodes of a tree)    N  nodes verified,
    root included S  cache slots that attention reads (a length bucket)                     R  cache
    slots that exist H  query heads     G  key/value heads     D  head_dim     C  dim (model width)
    V  vocabulary      Vd draft vocabulary    K  children kept of a node      L  draft levels
Weights keep the names of Meta's release and gpt-fast, with q, k, v fused to `wqkv` and gate, up to
`w13`."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class RopeScaling:
    """RoPE frequency scaling: `linear` divides every frequency, `llama3` only the slow ones (Llama
    3.1, section 3.2).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(
                f"rope scaling {self.kind!r} is not supported; supported: linear, llama3"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Everything the target's forward depends on, as the checkpoint states it."""

    vocab_size: int
    dim: int
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_seq_length: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = False  # lm_head is the embedding table
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def from_dict(cls, values: dict) -> "ModelConfig":
        values = dict(values)
        scaling = values.get("rope_scaling")
        values["rope_scaling"] = RopeScaling(**scaling) if scaling else None
        values["eos_ids"] = tuple(values.get("eos_ids", ()))
        return cls(**values)


class KVCache(nn.Module):
    """Keys and values of all layers in one buffer, so that moving accepted rows is one gather and
    one scatter.

    Slots at or past the committed length hold leftovers of rejected nodes and padding: the mask
    hides them and the next forward overwrites them, so nothing is ever cleared."""

    def __init__(
        self, n_layer: int, n_kv_head: int, rows: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        shape = (n_layer, 2, n_kv_head, rows, head_dim)  # [layer, k|v, G, R, D]
        self.register_buffer("data", torch.zeros(shape, dtype=dtype), persistent=False)

    @property
    def rows(self) -> int:
        return self.data.shape[3]

    def layer(self, index: int) -> Tensor:
        """The view [2, G, R, D] that layer `index` reads and writes."""
        return self.data[index]

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy slots `source` to slots `destination` (int64, equal length; they may overlap) in
        every layer.
        """
        self.data.index_copy_(3, destination, self.data.index_select(3, source))


def causal_mask(start: Tensor, rows: int, slots: Tensor) -> Tensor:
    """[rows, S] bool: row t sees slots 0..start+t. start: int64 [1]; slots: int64 [S], 0 to S-1.

    The slot numbers come as a tensor, not as a count, so that compiled code takes any length
    bucket."""
    return slots <= (start + torch.arange(rows, device=start.device))[:, None]


def tree_mask(committed: Tensor, ancestors: Tensor, slots: Tensor) -> Tensor:
    """[N, S] bool: node v sees the committed slots and those of its ancestors and itself.

    committed: int64 [1]; ancestors: bool [N, M], column u stands for slot committed + u; slots:
    int64 [S]."""
    relative = slots - committed
    inside = (relative >= 0) & (relative < ancestors.shape[1])
    tree = ancestors[:, relative.clamp(0, ancestors.shape[1] - 1)]
    return (relative < 0) | (inside & tree)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """[D/2] float64 radians per position (RoFormer, arXiv 2104.09864; llama3 scaling as in Llama
    3.1).
    """
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_max_position * frequencies / (2 * math.pi)  # in the trained context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(
        0, 1
    )  # 1: fast, untouched; 0: slow, divided by the factor
    return frequencies * (keep + (1 - keep) / scaling.factor)


def rope_table(rows: int, head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """[2, rows, D] fp32: cosines, then sines; computed in float64 and kept in fp32 whatever the
    model's dtype.
    """
    positions = torch.arange(rows, dtype=torch.float64)
    angles = torch.outer(positions, rope_frequencies(head_dim, theta, scaling)).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin())).float()


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Apply RoPE in fp32. x: [T, heads, D], halves rotated against each other (HF layout); rope:
    [2, T, D].
    """
    cos, sin = rope[:, :, None]  # [T, 1, D] each
    low, high = x.float().chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


def attend(q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
    """[T, H * D]: attention of q [T, H, D] over the cache kv [2, G, R, D], as mask bool [T, S]
    allows.
    """
    (rows, width), groups, size = mask.shape, kv.shape[1], q.shape[2]
    keys, values = kv[:, :, :width]  # [G, S, D] each
    # The H/G query heads of a group stack as rows over its keys: GQA without copies of keys and
    # values.
    x = q.view(rows, groups, -1, size).permute(1, 2, 0, 3).reshape(groups, -1, size)
    scores = (x @ keys.transpose(1, 2)).view(groups, -1, rows, width).float() * size**-0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(q.dtype)
    y = weights.view(groups, -1, width) @ values  # [G, H/G * T, D]
    return y.view(groups, -1, rows, size).permute(2, 0, 1, 3).reshape(rows, -1)


class Attention(nn.Module):
    """Grouped-query attention over a static cache. `in_dim` differs from `dim` in an EAGLE-3 head
    only.
    """

    def __init__(
        self,
        in_dim: int,
        dim: int,
        n_head: int,
        n_kv_head: int,
        head_dim: int,
        qkv_bias: bool,
        o_bias: bool,
    ) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = n_head, n_kv_head, head_dim
        self.wqkv = nn.Linear(in_dim, (n_head + 2 * n_kv_head) * head_dim, bias=qkv_bias)
        self.wo = nn.Linear(n_head * head_dim, dim, bias=o_bias)
        self.attend = attend  # a device may have a faster one

    def forward(self, x: Tensor, rope: Tensor, slots: Tensor, mask: Tensor, kv: Tensor) -> Tensor:
        """x: [T, in_dim]; rope: [2, T, D]; slots: int64 [T]; mask: bool [T, S]; kv: [2, G, R, D],
        written.
        """
        heads, groups, size = self.n_head, self.n_kv_head, self.head_dim
        qkv = self.wqkv(x).view(-1, heads + 2 * groups, size)
        q, k, v = qkv.split((heads, groups, groups), dim=1)
        kv.index_copy_(2, slots, torch.stack((rotate(k, rope), v)).transpose(1, 2).to(kv.dtype))
        return self.wo(self.attend(rotate(q, rope), kv, mask))


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, dim: int, intermediate_size: int, bias: bool) -> None:
        super().__init__()
        self.w13 = nn.Linear(dim, 2 * intermediate_size, bias=bias)
        self.w2 = nn.Linear(intermediate_size, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


class TransformerBlock(nn.Module):
    """One layer. Inside a compiled forward it is a region of its own, compiled once and called for
    every layer.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = config
        self.attention = Attention(
            c.dim, c.dim, c.n_head, c.n_kv_head, c.head_dim, c.qkv_bias, c.o_bias
        )
        self.feed_forward = FeedForward(c.dim, c.intermediate_size, c.mlp_bias)
        self.attention_norm = RMSNorm(c.dim, c.norm_eps)
        self.ffn_norm = RMSNorm(c.dim, c.norm_eps)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, rope: Tensor, slots: Tensor, mask: Tensor, kv: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, slots, mask, kv)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """The target. `forward` stops at the residual stream; `norm` and `output` belong to the
    caller's last region.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(
        self,
        x: Tensor,
        rope: Tensor,
        slots: Tensor,
        mask: Tensor,
        cache: KVCache,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Run T embedded rows. Returns the residual stream [T, C] after the last layer, before the
        final norm, and the streams that ENTER the layers named in `feature_layers` (n_layer names
        the last layer's output).
        """
        captured = {}
        for index, layer in enumerate(self.layers):
            captured[index] = x
            x = layer(x, rope, slots, mask, cache.layer(index))
        captured[len(self.layers)] = x
        return x, [captured[index] for index in feature_layers]
