"""The best tokens of each block of a vocabulary: what choosing takes of logits on a GPU.

    found, sums = torch.ops.talon.best(logits, positions, temperature, seed, limits, ids, top, True)

Importing this file registers the operator, for the target's choice and for a head's guesses alike.
It adds the noise, whose words are those of `sampling.gumbel` bit for bit, and keeps the best of
each block, of equal values the lower column; the rest is gpu_picks.py. Leaves out gradients.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, library

LEAST, NAN = tl.constexpr(-(2**63)), tl.constexpr(2**31 - 1)

BLOCK = 4096  # columns of one program


@triton.jit
def mix(x):
    """`sampling.mix` in 32 bits, whose products wrap around as its masks do."""
    x = (x ^ (x >> 15)) * 0x2C1B3C6D
    x = (x ^ (x >> 12)) * 0x297A2D39
    return x ^ (x >> 15)


@triton.jit
def gumbel(seed, position, tokens):
    """Noise of tokens int64 [M] at a position: `sampling.gumbel`. log1p(-u) is log(1 - u), set
    right for what the subtraction rounds off (Kahan)."""
    low = mix(seed.to(tl.uint32) ^ 0x5BD1E995)
    high = mix((seed >> 32).to(tl.uint32) ^ 0x1B873593)
    first = mix(position.to(tl.uint32) + low)
    words = mix(mix(tokens.to(tl.uint32) ^ first) ^ mix(first ^ high))
    u = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)
    rest = 1 - u
    e = tl.where(rest == 1, u, -tl.log(rest) * (u / tl.where(rest == 1, 1.0, 1 - rest)))
    return -tl.log(e)


@triton.jit
def key(values):
    """int32 keys in the order of fp32 values; the same twice gives the values back."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0 is 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def best_kernel(
    logits, positions, temperature, seed, limits, ids, found, sums, V,
    TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0), tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * V + c, mask=c < V, other=float("-inf")).to(tl.float32)
    values = x
    if positions is not None:
        values = tl.div_rn(values, tl.load(temperature))
        if limits is not None:
            lowest, last, it = tl.load(limits + 2 * row), tl.load(limits + 2 * row + 1), key(x)
            values = tl.where((it > lowest) | ((it == lowest) & (c <= last)), values, float("-inf"))
        tokens = c if ids is None else tl.load(ids + c, mask=c < V, other=0)
        values += gumbel(tl.load(seed), tl.load(positions + row), tokens)
    keys = tl.where(x == x, key(values), NAN)
    if sums is not None:
        values = tl.where(x == x, values, float("-inf"))
        keys, most = key(values), tl.max(values, 0)
        total = tl.sum(tl.exp(values - tl.where(most == float("-inf"), 0.0, most)), 0)
        tl.store(sums + at, most)
        tl.store(sums + tl.num_programs(0) * tl.num_programs(1) + at, total)
    pairs = tl.where(c < V, (keys.to(tl.int64) << 32) | (0x7FFFFFFF - c), LEAST)
    for i in range(TOP):
        best = tl.max(pairs, 0)
        tl.store(found + at * TOP + i, best)
        pairs = tl.where(pairs == best, LEAST, pairs)


@library.custom_op("talon::best", mutates_args=())
def best(
    logits: Tensor, positions: Tensor | None, temperature: Tensor | None, seed: Tensor | None,
    limits: Tensor | None, ids: Tensor | None, top: int, summed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The `top` best columns of each block of each row of logits [T, V], int64 [T, blocks, top]:
    the key of the value above, 2**31 - 1 minus the column below.

    positions: int64 [T] of the token to choose, or None: greedy; temperature fp32 [1], seed int64
    [1]; limits: int32 [T, 2], what top_k and top_p keep (gpu_picks.py), or None; ids: int64 [V],
    the token of each column, or None. summed: also each block's highest value and sum of exp(value
    - highest), fp32 [2, T, blocks], and NaN ranks last; else it has the highest key of all."""
    found, sums = new_best(logits, positions, temperature, seed, limits, ids, top, summed)
    best_kernel[found.shape[:2]](
        logits.contiguous(), positions, temperature, seed, limits, ids, found,
        sums if summed else None, logits.shape[1], TOP=top, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return found, sums


@best.register_fake
def new_best(logits, positions, temperature, seed, limits, ids, top, summed):
    rows, blocks = len(logits), -(-logits.shape[1] // BLOCK)
    found = logits.new_empty(rows, blocks, top, dtype=torch.int64)
    return found, logits.new_empty(2 * summed, rows, blocks, dtype=torch.float32)
