"""Attention of a tree's nodes over a KV cache: two launches, the same numbers whatever the tree.

    y, beside = torch.ops.talon.attend_tree(q, kv, length, ancestors, factors, arrived, "plain", 0)

Importing this file registers the operator. The committed length is read on the device, so one graph
serves every length. Without `ancestors` row t sees the positions up to length + t: plain decoding,
a chain, a chunk of a prompt. With them it sees the committed positions and its own path behind.

A row's sums have one shape, which the position of each key decides and nothing else. The tensor
cores add up blocks of 32 positions (scores, weights, weighted values), blocks are folded into
parts, which grow with the position, and parts into the result. `parts_kernel` takes the whole
committed blocks, for all rows at once; the broken block at their end and the tree's path are
gathered row by row, in order of position, by `rest_kernel`, which folds them in where they belong.
A node therefore gets, bit for bit, what plain decoding computes for its text. Leaves out gradients,
fp32, and heads of more than 128.
"""

import triton
import triton.language as tl
from torch import Tensor, float32, library

from talon.kernels.gpu_rows import ROUND, last_to_arrive, new_rows, write_row

BLOCK = tl.constexpr(32)  # keys that are weighed against each other at once
HALF = tl.constexpr(64)  # of a head's values: what one accumulator holds


@triton.jit
def shares(best, best2, scale):
    """The better of two best scores, and what is left at it of the sums of either side."""
    top = tl.maximum(best, best2)
    seen = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.exp2((best - seen) * scale), tl.exp2((best2 - seen) * scale)


@triton.jit
def mix(a, sums, b, sums2):
    """a * sums + b * sums2 row by row, rounded in the same places wherever it is compiled."""
    a, b = tl.broadcast_to(a[:, None], sums.shape), tl.broadcast_to(b[:, None], sums.shape)
    return tl.fma(a, sums, b * sums2)


@triton.jit
def fold(state, state2, scale):
    """Two sets of keys as one. A state: best score, sum of the weights [M], and the weighted values
    in two halves [M, HALF]."""
    best, a, b = shares(state[0], state2[0], scale)
    total = tl.fma(a, state[1], b * state2[1])
    return best, total, mix(a, state[2], b, state2[2]), mix(a, state[3], b, state2[3])


@triton.jit
def nothing(M: tl.constexpr):
    """The state of no keys: folding it in changes nothing."""
    zero = tl.zeros((M, HALF), tl.float32)
    return tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32), zero, zero


@triton.jit
def fold_block(state, x, at, values, there, last, scale, D: tl.constexpr):
    """Fold a block of keys into the state of rows x [M, D]. at: where each lies, its value `values`
    further; there: which to read; last: the last that each row sees. The weights are summed up as
    whole numbers (of 2**-21), since the order of adding depends on where a row lies."""
    d, h = tl.arange(0, x.shape[1]), tl.arange(0, HALF)
    k = tl.load(at[None, :] + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0)
    seen = tl.arange(0, BLOCK)[None, :] <= last[:, None]
    scores = tl.where(seen, tl.dot(x, k), float("-inf"))
    best = tl.max(scores, 1)
    offset = tl.where(best == float("-inf"), 0.0, best)
    weights = tl.exp2((scores - offset[:, None]) * scale).to(x.dtype)
    parts = (weights.to(tl.float32) * 2097152.0 + ROUND).to(tl.int32, bitcast=True)
    total = tl.sum(parts - 0x4B400000, 1).to(tl.float32) * 4.76837158203125e-07
    best, a, b = shares(state[0], best, scale)
    total, more = tl.fma(a, state[1], b * total), state[3]
    at = at[:, None] + values + h[None, :]
    v = tl.load(at, mask=there[:, None] & (h < D)[None, :], other=0)
    acc = mix(a, state[2], b, tl.dot(weights, v))
    if D > HALF:
        v = tl.load(at + HALF, mask=there[:, None] & (h + HALF < D)[None, :], other=0)
        more = mix(a, more, b, tl.dot(weights, v))
    return best, total, acc, more


@triton.jit
def part_start(i):
    """Position of the first key of part i. Parts grow: each costs room for its state."""
    return 96 * i * (i + 1)


@triton.jit(do_not_specialize=["T"])
def parts_kernel(
    q, kv, length, states, T, H, G, R, scale, M: tl.constexpr, D: tl.constexpr,
    HEADS: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One part of the committed keys (CAUSAL: of all) for M rows: HEADS heads of several queries.
    states: fp32, best scores and sums of weights [2, parts, G, rows of all programs], then weighted
    values [parts, G, rows of all programs, D]."""
    g, parts = tl.program_id(1), tl.num_programs(2)
    part = parts - 1 - tl.program_id(2)  # the long ones first
    m = tl.program_id(0) * M + tl.arange(0, M)
    row, head, n = m // HEADS, g * HEADS + m % HEADS, tl.arange(0, BLOCK)
    done = tl.load(length).to(tl.int32)
    end = done // BLOCK * BLOCK
    if CAUSAL:
        end = done + tl.minimum(T, ((tl.program_id(0) + 1) * M - 1) // HEADS + 1)
    first = part_start(part)
    if first < end:
        d, h = tl.arange(0, HALF if D <= HALF else 2 * HALF), tl.arange(0, HALF)
        x_at = q + (row * H + head)[:, None] * D + d[None, :]
        x = tl.load(x_at, mask=(row < T)[:, None] & (d < D)[None, :], other=0)
        at = kv + ((g * R + first).to(tl.int64) + n) * D
        state = nothing(M)
        last = tl.minimum(part_start(part + 1), end)
        for start in tl.range(first, last, BLOCK, num_stages=STAGES):
            seen = tl.where(CAUSAL, done + row - start, BLOCK)
            state = fold_block(state, x, at, G * R * D, start + n < end, seen, scale, D)
            at += BLOCK * D
        best, total, acc, more = state
        all = parts * tl.num_programs(1) * tl.num_programs(0) * M
        base = ((part * tl.num_programs(1) + g) * tl.num_programs(0) + tl.program_id(0)) * M
        at = states + base + tl.arange(0, M)
        tl.store(at, best)
        tl.store(at + all, total)
        at = states + 2 * all + base.to(tl.int64) * D + tl.arange(0, M)[:, None] * D + h[None, :]
        tl.store(at, acc, mask=(h < D)[None, :])
        tl.store(at + HALF, more, mask=(h + HALF < D)[None, :])


@triton.jit
def load_state(scalars, sums, between, live, D: tl.constexpr):
    """What `parts_kernel` found for some rows in one part."""
    h, both = tl.arange(0, HALF)[None, :], live[:, None]
    best = tl.load(scalars, mask=live, other=float("-inf"))
    total = tl.load(scalars + between, mask=live, other=0)
    acc = tl.load(sums, mask=both & (h < D), other=0)
    return best, total, acc, tl.load(sums + HALF, mask=both & (h + HALF < D), other=0)


@triton.jit(do_not_specialize=["N"])
def rest_kernel(
    q, kv, length, states, ancestors, factors, y, out, beside, arrived,
    H, G, R, N, parts, padded, groups, scale, M: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
    NODES: tl.constexpr, MODE: tl.constexpr, GROUP: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """The heads of one group of one row: what is left of its keys, and the row in its form MODE.
    y: [T, H * D] in the dtype of q, `out` itself where rows stay as they are; NODES and ROW: N and
    H * D, padded."""
    row, g = tl.program_id(0), tl.program_id(1)
    m, h, n = tl.arange(0, M), tl.arange(0, HALF), tl.arange(0, BLOCK)
    head, live = g * HEADS + m, m < HEADS
    done = tl.load(length).to(tl.int32)
    end = done // BLOCK * BLOCK if ancestors is not None else done + row + 1
    count = 0  # parts that start before `end`
    while part_start(count) < end:
        count += 1
    at, all = g * padded + row * HEADS + m, parts * G * padded
    scalars, sums = states + at, states + 2 * all + at[:, None] * D + h[None, :]
    state = nothing(M)
    for _ in tl.range(0, count - 1, num_stages=3):
        state = fold(state, load_state(scalars, sums, all, live, D), scale)
        scalars += G * padded
        sums += G * padded * D
    part = load_state(scalars, sums, all, m < tl.where(count > 0, HEADS, 0), D)
    if ancestors is not None:
        d, u = tl.arange(0, HALF if D <= HALF else 2 * HALF), tl.arange(0, NODES)
        x_at = q + (row * H + head)[:, None] * D + d[None, :]
        x = tl.load(x_at, mask=live[:, None] & (d < D)[None, :], other=0)
        mine = tl.load(ancestors + row * N + u, mask=u < N, other=0).to(tl.int32)
        rank = tl.cumsum(mine, 0) * mine  # 1 for the root, 2 for its child on the path, ...
        stop = done + tl.sum(mine, 0)
        for start in range(end, stop, BLOCK):
            if start == part_start(count):  # another part begins
                state, part, count = fold(state, part, scale), nothing(M), count + 1
            position = start + n
            rank_wanted = tl.maximum(position - done + 1, 0)[:, None]
            there = (rank_wanted > 0) & (rank_wanted == rank[None, :])
            node = tl.sum(tl.where(there, u[None, :], 0), 1)
            slot = tl.where(position < done, position, done + node)
            key, last = kv + ((g * R).to(tl.int64) + slot) * D, m * 0 + stop - 1 - start
            part = fold_block(part, x, key, G * R * D, position < stop, last, scale, D)
    best, total, acc, more = fold(state, part, scale)
    acc, more, at = acc / total[:, None], more / total[:, None], head[:, None] * D + h[None, :]
    inside, inside2 = live[:, None] & (h < D)[None, :], live[:, None] & (h + HALF < D)[None, :]
    if factors is not None:
        acc *= tl.load(factors + at, mask=inside, other=0)
        more *= tl.load(factors + at + HALF, mask=inside2, other=0)
    at += row * H * D
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=inside)
    tl.store(y + at + HALF, more.to(y.dtype.element_ty), mask=inside2)
    if MODE != "plain":
        if last_to_arrive(arrived + row, G):
            c = tl.arange(0, ROW)
            values = tl.load(y + row * H * D + c, mask=c < H * D, other=0, cache_modifier=".cg")
            write_row(values.to(tl.float32), row, out, beside, H * D, groups, MODE, GROUP, ROW)


@library.custom_op("talon::attend_tree", mutates_args=())
def attend(
    q: Tensor, kv: Tensor, length: Tensor, ancestors: Tensor | None, factors: Tensor | None,
    arrived: Tensor, mode: str, group: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of q [T, H, D] over kv [2, G, R, D], as rows [T, H * D] in the form `mode`.

    length: int64 [1], the committed positions; ancestors: bool [T, N] or None; factors: fp32
    [H * D] of the result, as int8 weights may ask for, or None; arrived: int32 [T], zero. The rows'
    own keys and values are in kv already. Takes T * H * (D + 2) * 4 bytes for each part."""
    q, (rows, heads, size), (_, groups, slots, _) = q.contiguous(), q.shape, kv.shape
    parts = next(i for i in range(slots) if 96 * i * (i + 1) >= slots)
    per_group = heads // groups
    block = 16 if rows * per_group <= 16 else 64
    blocks = -(-rows * per_group // block)
    states = q.new_empty(parts * groups * blocks * block * (size + 2), dtype=float32)
    scale = size**-0.5 * 1.4426950408889634  # weights are powers of 2, not of e
    parts_kernel[(blocks, groups, parts)](
        q, kv, length, states, rows, heads, groups, slots, scale, M=block, D=size,
        HEADS=per_group, CAUSAL=ancestors is None, STAGES=3, num_warps=4,
    )  # fmt: skip
    out, beside = new_rows(q, rows, heads * size, mode, group)
    y = q.new_empty(rows, heads * size) if mode == "int8" else out
    nodes, least = (1, 1) if ancestors is None else (ancestors.shape[1], 16)
    pad = triton.next_power_of_2
    rest_kernel[(rows, groups)](
        q, kv, length, states, ancestors, factors, y, out, beside, arrived, heads, groups, slots,
        nodes, parts, blocks * block, beside.shape[1], scale, M=max(least, pad(per_group)), D=size,
        HEADS=per_group, NODES=pad(nodes), MODE=mode, GROUP=group, ROW=pad(heads * size),
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out, beside


@attend.register_fake
def _(q, kv, length, ancestors, factors, arrived, mode, group):
    return new_rows(q, q.shape[0], q.shape[1] * q.shape[2], mode, group)
