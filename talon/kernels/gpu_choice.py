"""Choosing tokens on a GPU, by the rules of talon/sampling.py over rows of logits: one launch.

    tokens, scores = torch.ops.talon.best(logits, arrived, None, None, None, None, ids, above, 10)

Importing this file registers the operator, for the target's choice and for a head's guesses alike.
It adds the noise, whose words are those of `sampling.gumbel` bit for bit, and finds the best of
each block of columns, of equal values the lower; the program that arrives last, the best of all.
What top_k and top_p keep is found before (gpu_picks.py). Leaves out gradients.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from talon.kernels.gpu_rows import last_to_arrive

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
    """`sampling.gumbel`. log1p(-u) is log(1 - u), set right for what that rounds off (Kahan)."""
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
def best_of_all(
    found, sums, ids, above, tokens, scores, row, blocks,
    TOP: tl.constexpr, BLOCKS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The TOP best of a row's blocks. BLOCKS, COUNT: blocks and blocks * TOP, padded."""
    total, b, i = 0.0, tl.arange(0, BLOCKS), tl.arange(0, COUNT)
    found, sums, at = found + row * blocks * TOP, sums + 2 * row * blocks, row * TOP
    pairs = tl.load(found + i, mask=i < blocks * TOP, other=LEAST, cache_modifier=".cg")
    if ids is not None:
        most = tl.load(sums + 2 * b, mask=b < blocks, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(sums + 2 * b + 1, mask=b < blocks, other=0, cache_modifier=".cg")
        total = tl.log(tl.sum(total * tl.exp(most - tl.max(most, 0)), 0)) + tl.max(most, 0)
    for i in range(TOP):
        best = tl.max(pairs, 0)
        pairs = tl.where(pairs == best, LEAST, pairs)
        column, bits = 0x7FFFFFFF - (best & 0x7FFFFFFF), (best >> 32).to(tl.int32)
        if ids is None:
            tl.store(tokens + at + i, tl.where(bits == NAN, -1, column))
        else:
            bits ^= (bits >> 31) & 0x7FFFFFFF
            score = bits.to(tl.float32, bitcast=True) - total
            score = tl.where(score == score, tl.minimum(score, 0.0), float("-inf"))
            tl.store(tokens + at + i, tl.load(ids + column))
            score += 0.0 if above is None else tl.load(above + row)
            tl.store(scores + at + i, score)


@triton.jit
def best_kernel(
    logits, arrived, positions, temperature, seed, limits, ids, above, found, sums, tokens, scores,
    V, TOP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """found: int64 [T, blocks, TOP], key of a value above, 2**31 - 1 minus its column below; sums:
    fp32 [T, blocks, 2], highest value and sum of exp(value - highest)."""
    row, blocks = tl.program_id(0), tl.num_programs(1)
    at, c = row * blocks + tl.program_id(1), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * V + c, mask=c < V, other=float("-inf")).to(tl.float32)
    values = x
    if positions is not None:
        values = tl.div_rn(values, tl.load(temperature))
        if limits is not None:
            lowest, last, it = tl.load(limits + 2 * row), tl.load(limits + 2 * row + 1), key(x)
            values = tl.where((it > lowest) | ((it == lowest) & (c <= last)), values, float("-inf"))
        token = c if ids is None else tl.load(ids + c, mask=c < V, other=0)
        values += gumbel(tl.load(seed), tl.load(positions + row), token)
    keys = tl.where(x == x, key(values), NAN)
    if ids is not None:
        values = tl.where(x == x, values, float("-inf"))
        keys, most = key(values), tl.max(values, 0)
        tl.store(sums + 2 * at, most)
        most = tl.where(most == float("-inf"), 0.0, most)
        tl.store(sums + 2 * at + 1, tl.sum(tl.exp(values - most), 0))
    pairs = tl.where(c < V, (keys.to(tl.int64) << 32) | (0x7FFFFFFF - c), LEAST)
    for i in range(TOP):
        best = tl.max(pairs, 0)
        tl.store(found + at * TOP + i, best)
        pairs = tl.where(pairs == best, LEAST, pairs)
    if last_to_arrive(arrived + row, blocks):
        best_of_all(found, sums, ids, above, tokens, scores, row, blocks, TOP, BLOCKS, COUNT)


@library.custom_op("talon::best", mutates_args=())
def best(
    logits: Tensor, arrived: Tensor, positions: Tensor | None, temperature: Tensor | None,
    seed: Tensor | None, limits: Tensor | None, ids: Tensor | None, above: Tensor | None, top: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The `top` best tokens of each row of logits [T, V], best first: int64 [T, top].

    arrived: int32 [T], zero; positions: int64 [T] of the token to choose, or None: greedy;
    temperature fp32 [1], seed int64 [1]; limits: int32 [T, 2] or None. For a head: ids int64 [V],
    the token of each column, and above fp32 [T] or None, added to the log-probabilities fp32 [T,
    top], which are never above 0; NaN ranks last. Else a row with NaN has no token, which is -1."""
    tokens, scores = new_best(logits, arrived, None, None, None, None, ids, above, top)
    (rows, columns), blocks = logits.shape, -(-logits.shape[1] // BLOCK)
    found = tokens.new_empty(rows, blocks, top)
    sums = scores.new_empty(rows, blocks, 2)
    pad = triton.next_power_of_2
    best_kernel[(rows, blocks)](
        logits.contiguous(), arrived, positions, temperature, seed, limits, ids, above, found, sums,
        tokens, scores, columns, TOP=top, BLOCK=BLOCK, BLOCKS=pad(blocks), COUNT=pad(blocks * top),
        num_warps=8,
    )  # fmt: skip
    return tokens, scores


@best.register_fake
def new_best(logits, arrived, positions, temperature, seed, limits, ids, above, top):
    rows, scored = len(logits), top if ids is not None else 0
    tokens = logits.new_empty(rows, top, dtype=torch.int64)
    return tokens, logits.new_empty(rows, scored, dtype=torch.float32)
