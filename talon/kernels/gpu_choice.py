"""Choosing tokens on a GPU, by the rules of talon/sampling.py over rows of logits: two launches.

    tokens, scores = torch.ops.talon.best(logits, positions, temperature, seed, limits, ids, ...)

Importing this file registers the operator, for the target's choice and for a head's guesses alike.
It adds the noise, keeps the best of each block of the vocabulary, then the best of all blocks. The
words of noise are those of `sampling.gumbel` bit for bit, and of equal values the lower column
wins. What top_k and top_p keep is found before, by limits.py. Leaves out gradients.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, library

LEAST, NAN = tl.constexpr(-(2**63)), tl.constexpr(2**31 - 1)

BLOCK = 2048  # columns of one program


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
def blocks_kernel(
    logits, positions, temperature, seed, limits, ids, found, sums, V,
    TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The TOP best columns of one block of a row, and its log-sum-exp in two parts.

    positions: int64 [T], or None: greedy; limits: int32 [T, 2] or None; ids: int64 [V], the token
    of each column, or None; found: int64 [T, blocks, TOP], value above, column below; sums: fp32
    [2, T, blocks], or None."""
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


@triton.jit
def best_kernel(
    found, sums, ids, above, tokens, scores, blocks, TOP: tl.constexpr, BLOCKS: tl.constexpr
):
    """The TOP best of all blocks of a row: tokens, and log-probabilities on top of `above`."""
    row, b = tl.program_id(0), tl.arange(0, BLOCKS)
    i = tl.arange(0, BLOCKS * triton.next_power_of_2(TOP))
    count = blocks * TOP
    pairs = tl.load(found + row * count + i, mask=i < count, other=LEAST)
    if sums is not None:
        most = tl.load(sums + row * blocks + b, mask=b < blocks, other=float("-inf"))
        total = tl.load(sums + (tl.num_programs(0) + row) * blocks + b, mask=b < blocks, other=0)
        top = tl.max(most, 0)
        total = top + tl.log(tl.sum(total * tl.exp(most - top), 0))
    for i in range(TOP):
        best = tl.max(pairs, 0)
        pairs = tl.where(pairs == best, LEAST, pairs)
        token = 0x7FFFFFFF - (best & 0x7FFFFFFF)
        if ids is not None:
            token = tl.load(ids + token)
        if sums is None:
            token = tl.where(best >> 32 == NAN, -1, token)
        tl.store(tokens + row * TOP + i, token)
        if sums is not None:
            bits = (best >> 32).to(tl.int32)
            bits ^= (bits >> 31) & 0x7FFFFFFF
            score = bits.to(tl.float32, bitcast=True) - total
            score = tl.where(score == score, tl.minimum(score, 0.0), float("-inf"))
            if above is not None:
                score += tl.load(above + row)
            tl.store(scores + row * TOP + i, score)


@library.custom_op("talon::best", mutates_args=())
def best(
    logits: Tensor, positions: Tensor | None, temperature: Tensor, seed: Tensor,
    limits: Tensor | None, ids: Tensor | None, above: Tensor | None, top: int, scored: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The `top` best tokens of each row of logits [T, V], best first: int64 [T, top].

    positions: int64 [T] of the token to choose, or None: greedy; temperature fp32 [1], seed int64
    [1]; limits: of limits.py, or None; ids: int64 [V], the token of each column, or None. scored:
    with log-probabilities fp32 [T, top], never above 0, plus above fp32 [T]; NaN ranks last there.
    Else a row that has NaN has no best token, which is -1."""
    (rows, columns), blocks = logits.shape, -(-logits.shape[1] // BLOCK)
    found = logits.new_empty(rows, blocks, top, dtype=torch.int64)
    sums = logits.new_empty(2, rows, blocks, dtype=torch.float32) if scored else None
    tokens, scores = new_best(logits, top, scored)
    blocks_kernel[(rows, blocks)](
        logits.contiguous(), positions, temperature, seed, limits, ids, found, sums, columns,
        TOP=top, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    best_kernel[(rows,)](
        found, sums, ids, above, tokens, scores, blocks, TOP=top,
        BLOCKS=triton.next_power_of_2(blocks), num_warps=4,
    )  # fmt: skip
    return tokens, scores


def new_best(logits: Tensor, top: int, scored: bool) -> tuple[Tensor, Tensor]:
    tokens = logits.new_empty(len(logits), top, dtype=torch.int64)
    return tokens, logits.new_empty(len(logits), top if scored else 0, dtype=torch.float32)


@best.register_fake
def _(logits, positions, temperature, seed, limits, ids, above, top, scored):
    return new_best(logits, top, scored)
