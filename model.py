"""The target: a LLaMA-family decoder written for batch size 1 and a static KV cache.

Leaves out: batching, training, mixture of experts, parallelism, and every choice of a token. One
forward runs T tokens of one sequence. A token's place has three separate coordinates, because a
draft tree needs them apart: its RoPE position, its cache slot, and its line of the attention mask.

Shape legend, used by every file:

    T   tokens of this forward: 1, a chunk of the prompt, or the N nodes of a tree
    N   nodes that are verified, the root included
    R   cache slots that exist
    S   cache slots that attention reads (a length bucket)
    H   query heads             G   key/value heads         D   head_dim
    C   dim, the model's width  V   vocabulary              Vd  draft vocabulary
    L   draft levels            B   nodes of a level        K   children of a node

Weights keep the names of Meta's release and gpt-fast, with q, k and v fused to `wqkv`, and gate
and up to `w13`."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class RopeScaling:
    """RoPE frequency scaling: `linear` divides every frequency, `llama3` (Llama 3.1, section 3.2)
    and `yarn` (arXiv 2309.00071, section 3.2) only the slow ones."""

    kind: str
    factor: float
    # Turns in the trained context of what is slow and of what is fast; yarn: beta_slow, beta_fast.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    attention_factor: float = 1.0  # of cosines and sines
    truncate: bool = True  # yarn begins and ends at whole pairs

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3", "yarn"):
            raise ValueError(f"rope scaling {self.kind!r}: linear, llama3 and yarn are supported")


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
    qk_norm: bool = False  # queries and keys are normed, each head by itself
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
    """Keys and values of all layers in one buffer, so that moving accepted tokens is one gather
    and one scatter.

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
        """Copy slots `source` to slots `destination` in every layer. Both int64, of equal length;
        they may overlap."""
        self.data.index_copy_(3, destination, self.data.index_select(3, source))


class At(NamedTuple):
    """How far the text has come, on the device."""

    length: Tensor  # int64 [1], committed tokens
    slots: Tensor  # int64 [S], 0 to S-1: a tensor, so that compiled code takes any length bucket


class Place(NamedTuple):
    """Where the T tokens of a forward stand."""

    rope: Tensor  # fp32 [2, T, D], cosines and sines of their positions
    slots: Tensor  # int64 [T], where their keys and values are written
    mask: Tensor  # bool [T, S], the slots that they see


def place(
    rope: Tensor, positions: Tensor, slots: Tensor, at: At, ancestors: Tensor | None = None
) -> Place:
    """Tokens at `positions` and `slots`, both int64 [T], who see what is committed and their
    ancestors, or without those all slots up to their own. rope: fp32 [2, R, D]."""
    chain = ancestors is None
    mask = causal_mask(at.length, len(slots), at.slots) if chain else tree_mask(at, ancestors)
    return Place(rope[:, positions], slots, mask)


def causal_mask(start: Tensor, count: int, slots: Tensor) -> Tensor:
    """bool [count, S]: token t sees slots 0 to start + t. start: int64 [1]; slots: int64 [S]."""
    return slots <= (start + torch.arange(count, device=start.device))[:, None]


def tree_mask(at: At, ancestors: Tensor) -> Tensor:
    """bool [N, S]: node v sees the committed slots and those of its ancestors and itself.

    ancestors: bool [N, M], column u stands for slot length + u."""
    relative = at.slots - at.length
    inside = (relative >= 0) & (relative < ancestors.shape[1])
    tree = ancestors[:, relative.clamp(0, ancestors.shape[1] - 1)]
    return (relative < 0) | (inside & tree)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """float64 [D/2], radians per position (RoFormer, arXiv 2104.09864)."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if scaling.kind == "llama3":
        turns = scaling.original_max_position * frequencies / (2 * math.pi)
        fast = ((turns - low) / (high - low)).clamp(0, 1)
    else:  # not over the turns, but over the pairs, from the one that turns `high` times
        ends = (scaling.original_max_position / (2 * math.pi * turns) for turns in (high, low))
        first, last = (head_dim / 2 * math.log(end, theta) for end in ends)
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        pairs = torch.arange(head_dim // 2, dtype=torch.float64)
        fast = 1 - ((pairs - first) / (last - first or 0.001)).clamp(0, 1)
    return frequencies * (fast + (1 - fast) / scaling.factor)  # 1 stays as it is, 0 is divided


def rope_table(rows: int, head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """fp32 [2, rows, D], cosines and then sines: computed in float64, and fp32 in every model."""
    positions = torch.arange(rows, dtype=torch.float64)
    angles = torch.outer(positions, rope_frequencies(head_dim, theta, scaling)).repeat(1, 2)
    factor = scaling.attention_factor if scaling else 1.0
    return (torch.stack((angles.cos(), angles.sin())) * factor).float()


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Apply RoPE in fp32, halves rotated against each other as in Hugging Face's layout.

    x: [T, heads, D]; rope: [2, T, D]."""
    cos, sin = rope[:, :, None]  # [T, 1, D] each
    low, high = x.float().chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension, in fp32 (arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


def attend(q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
    """[T, H * D]: attention of q [T, H, D] over the cache kv [2, G, R, D], as mask bool [T, S]
    allows."""
    (count, width), groups, size = mask.shape, kv.shape[1], q.shape[2]
    keys, values = kv[:, :, :width]  # [G, S, D] each
    # GQA without copies of keys and values: a group's H/G query heads stack as rows over its keys.
    x = q.view(count, groups, -1, size).permute(1, 2, 0, 3).reshape(groups, -1, size)
    scores = (x @ keys.transpose(1, 2)).view(groups, -1, count, width).float() * size**-0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(q.dtype)
    y = weights.view(groups, -1, width) @ values  # [G, H/G * T, D]
    return y.view(groups, -1, count, size).permute(2, 0, 1, 3).reshape(count, -1)


class Attention(nn.Module):
    """Grouped-query attention over a static cache (arXiv 2305.13245). `config` is a target's or a
    head's; `in_dim` differs from its `dim` in an EAGLE-3 head only."""

    def __init__(self, config: ModelConfig, in_dim: int) -> None:
        super().__init__()
        c = config
        self.n_head, self.n_kv_head, self.head_dim = c.n_head, c.n_kv_head, c.head_dim
        self.wqkv = nn.Linear(in_dim, (c.n_head + 2 * c.n_kv_head) * c.head_dim, bias=c.qkv_bias)
        self.wo = nn.Linear(c.n_head * c.head_dim, c.dim, bias=c.o_bias)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.attend = attend  # a device may have a faster one (talon/operators.py)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, D], keys and values [T, G, D] of x [T, in_dim], not rotated yet."""
        heads, groups = self.n_head, self.n_kv_head
        qkv = self.wqkv(x).view(-1, heads + 2 * groups, self.head_dim)
        q, k, v = qkv.split((heads, groups, groups), dim=1)
        return (q, k, v) if self.q_norm is None else (self.q_norm(q), self.k_norm(k), v)

    def forward(self, x: Tensor, place: Place, kv: Tensor, residual: Tensor) -> Tensor:
        """[T, C] of x [T, in_dim], added to the residual stream [T, C]. kv: [2, G, R, D], written
        at the tokens' slots, then read."""
        q, k, v = self.project(x)
        new = torch.stack((rotate(k, place.rope), v)).transpose(1, 2)  # [2, G, T, D]
        kv.index_copy_(2, place.slots, new.to(kv.dtype))
        return residual + self.wo(self.attend(rotate(q, place.rope), kv, place.mask))


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim, inner, bias = config.dim, config.intermediate_size, config.mlp_bias
        self.w13 = nn.Linear(dim, 2 * inner, bias=bias)
        self.w2 = nn.Linear(inner, dim, bias=bias)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, dim=-1)
        return residual + self.w2(F.silu(gate) * up)


class TransformerBlock(nn.Module):
    """One layer. Inside a compiled forward it is a region of its own: compiled once, called for
    every layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config, config.dim)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, place: Place, kv: Tensor) -> Tensor:
        x = self.attention(self.attention_norm(x), place, kv, x)
        return self.feed_forward(self.ffn_norm(x), x)


class Transformer(nn.Module):
    """The target. `output`, the lm_head, belongs to the caller, who needs it for few tokens."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.place = place  # attention may want no mask on a device (talon/operators.py)

    def forward(
        self, tokens: Tensor, place: Place, cache: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Run tokens int64 [T]. Returns the state after the final norm [T, C], and the features
        [T, C] that a head reads: the residual streams that ENTER the layers named (n_layer names
        the last one's output), or where none are named that state itself (EAGLE-1)."""
        x, streams = self.tok_embeddings(tokens), []
        for index, layer in enumerate(self.layers):
            streams.append(x)
            x = layer(x, place, cache.layer(index))
        streams.append(x)
        hidden = self.norm(x)
        return hidden, [streams[index] for index in feature_layers] or [hidden]
