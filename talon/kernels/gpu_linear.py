"""Matrix multiplication of a few rows with one layer's weights: one launch, which finishes the job.

    y = torch.ops.talon.linear(rows, beside, *layer, "plain", torch.bfloat16, residual)

Importing this file registers the operator. It ends "plain" with bias and residual stream, "silu"
with SiLU(gate) * up, "qkv" with queries and keys rotated, keys and values in the cache. Where
queries and keys are normed, `talon::heads` does the latter: outputs of two programs may be a head.

    weights          rows (gpu_rows.py)         in memory (gpu_layers.py)
    fp16, bf16       plain                      [N, K] as they are stored
    int8             plain                      [N/128, K/64, 128, 64]
    int8-dynamic     int8, with their scales    the same
    int4             plain, with group sums     [N/128, K/128, 128, 64] bytes, and pairs

Weights are the left operand and rows the right one, so that each warp owns outputs of its own and
dequantises them once, however many rows there are. The inner dimension is split over programs,
since one layer's outputs are too few to fill a GPU; the program that arrives last adds the parts in
fixed order. Neither the split nor the order of any sum depends on the number of rows: a row's
result is the same bit for bit whichever rows are next to it. More than 64 rows run in blocks of 64,
next to each other in time, so that they share the weights in L2. Leaves out gradients and fp32
rows. Made for sm_86 (RTX 3090); runs from sm_80 on.
"""

import functools
import os

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from talon.kernels.gpu_rows import last_to_arrive

PLAIN = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # where machine code cannot run
COLUMNS = 128  # outputs of one program
MOST_BLOCKS = 5  # of 64 rows: the longest chunk of a prompt, and the token before it


def nibbles(shift: int, kind: str, magic: str, one: str, offset: str) -> tl.constexpr:
    """Machine code for half of each of 4 bytes -> 4 numbers -8..7: a step becomes the last bits of
    a number that begins with `magic`; what that adds is taken away, which is exact."""
    return tl.constexpr(f"""{{
        .reg .b32 steps, magic, one, offset;
        mov.b32 magic, {magic}; mov.b32 one, {one}; mov.b32 offset, {offset};
        shr.b32 steps, $2, {shift};
        and.b32 steps, steps, 0x0f0f0f0f;
        prmt.b32 $0, steps, magic, 0x4140;
        prmt.b32 $1, steps, magic, 0x4342;
        fma.rn.{kind}x2 $0, $0, one, offset;
        fma.rn.{kind}x2 $1, $1, one, offset;
    }}""")


FP16 = "f16", "0x64646464", "0x3c003c00", "0xe408e408"  # 1024 + step - 1032
BF16 = "bf16", "0x43434343", "0x3f803f80", "0xc308c308"  # 128 + step - 136
LOW_FP16, HIGH_FP16, LOW_BF16, HIGH_BF16 = (nibbles(s, *k) for k in (FP16, BF16) for s in (0, 4))


@triton.jit
def unpacked(both, dtype: tl.constexpr, HIGH: tl.constexpr):
    """The low or the high halves of bytes, as numbers -8..7 of `dtype`."""
    if PLAIN:
        return ((both >> (4 * HIGH) & 15).to(tl.int8) - 8).to(dtype)
    elif dtype == tl.float16:
        code: tl.constexpr = HIGH_FP16 if HIGH else LOW_FP16
        return tl.inline_asm_elementwise(code, "=r,=r,r", [both], tl.float16, True, 4)
    else:
        code: tl.constexpr = HIGH_BF16 if HIGH else LOW_BF16
        return tl.inline_asm_elementwise(code, "=r,=r,r", [both], tl.bfloat16, True, 4)


@triton.jit
def add_group(acc, steps, pair, sums):
    """acc + steps * scale + sums * zero, in one order. pair: int32, scale and zero as bf16 [N]."""
    scale = (pair << 16).to(tl.float32, bitcast=True)
    zero, sums = tl.broadcast((pair >> 16 << 16).to(tl.float32, bitcast=True)[:, None], sums)
    return tl.fma(steps, tl.broadcast_to(scale[:, None], acc.shape), tl.fma(zero, sums, acc))


@triton.jit
def add_groups(acc, both, x1, x2, pair_at, sums_at, live, wide, TWO: tl.constexpr):
    """A step of int4: low halves times x1, high halves times x2; TWO: of a group each, not of one.
    pair_at, sums_at: scales and zeros [N], and sums of the inputs [1, T], of the first."""
    sums = tl.dot(unpacked(both, x1.dtype, False), x1)
    if TWO:
        acc = add_group(acc, sums, tl.load(pair_at), tl.load(sums_at, mask=live, other=0))
        sums = tl.dot(unpacked(both, x1.dtype, True), x2)
    else:
        sums = tl.dot(unpacked(both, x1.dtype, True), x2, sums)
    inputs = tl.load(sums_at + TWO, mask=live, other=0)
    return add_group(acc, sums, tl.load(pair_at + TWO * wide), inputs)


@triton.jit
def write_qkv(
    low, high, row, pair, out, rope, turns, length, ancestors, nodes, kv, T, HEADS, G, R, HALF,
    NODES: tl.constexpr,
):  # fmt: skip
    """Rotate pairs (of head pair // HALF) of queries and keys. Queries go out, the rest to kv."""
    head, i = pair // HALF, pair % HALF
    slot = tl.load(length) + row
    position = slot
    if ancestors is not None:  # a node stands behind the ones above it, in the slot of the last bit
        u = tl.arange(0, NODES)[:, None]
        mine = tl.load(ancestors + row * nodes + u, mask=(row < T) & (u < nodes), other=0)
        mine = mine.to(tl.int32)
        position += (tl.sum(mine, 0) - 1)[None, :] - row
        slot += tl.max(mine * u, 0)[None, :] - row
    at, turned = rope + position * 2 * HALF + i, (row < T) & (head < HEADS + G)
    cos = tl.load(at, mask=turned, other=1)
    sin = tl.load(at + turns * 2 * HALF, mask=turned, other=0)
    a = tl.fma(low, cos, -(high * sin)).to(out.dtype.element_ty)
    b = tl.fma(high, cos, low * sin).to(out.dtype.element_ty)
    q_at = out + ((row * HEADS + head) * 2 * HALF + i).to(tl.int64)
    kv_at = kv + ((head - HEADS) * R + slot) * 2 * HALF + i  # the groups' keys, then their values
    at, live = tl.where(head < HEADS, q_at, kv_at), (row < T) & (head < HEADS + 2 * G)
    tl.store(at, a, mask=live)
    tl.store(at + HALF, b, mask=live)


@triton.jit
def all_parts(acc, parts, arrived, live, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """The sum of a tile's parts in fixed order for the program that arrives last, which has its own
    at hand; if it is that. live: which rows there are."""
    split, last, own = tl.num_programs(1), tl.num_programs(1) == 1, acc
    if split > 1:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        i = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        at = parts + tile.to(tl.int64) * split * COLUMNS * ROWS + i
        tl.store(at + tl.program_id(1) * COLUMNS * ROWS, acc, mask=live)
        last = last_to_arrive(arrived + tile, split)
        if last:
            acc, mine = tl.zeros_like(acc), tl.zeros_like(i) + tl.program_id(1)
            for part in range(split):
                found = tl.load(at, mask=live & (mine != part), other=0, cache_modifier=".cg")
                acc += tl.where(mine == part, own, found)
                at += COLUMNS * ROWS
    return acc, last


@triton.jit
def finish(
    y, row, n, kept, beside, scales, bias, residual, out, rope, turns, length, ancestors, nodes, kv,
    T, N, apart, G, R,
    FORM: tl.constexpr, END: tl.constexpr, ROUNDED: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """Scale, bias and END. Where a product is added to it says so, or compilers join some only."""
    y, live = y.to(tl.float32), row < T
    if ROUNDED:
        y *= tl.load(beside + row, mask=live, other=0)
    if FORM == "int8":
        y = tl.fma(y, tl.broadcast_to(tl.load(scales + n)[:, None], y.shape), tl.zeros_like(y))
    if bias is not None:
        y += tl.load(bias + n)[:, None].to(tl.float32)
    if END == "plain":
        at, live = row.to(tl.int64) * N + n[:, None], live & kept[:, None]
        if residual is not None:
            y += tl.load(residual + at, mask=live, other=0).to(tl.float32)
        tl.store(out + at, y.to(out.dtype.element_ty), mask=live)
    else:
        PAIRS: tl.constexpr = y.shape[0] // 2
        y = tl.permute(tl.reshape(y, (PAIRS, 2, y.shape[1])), (0, 2, 1))
        low, high = tl.split(y)
        pair = (tl.program_id(2) * PAIRS + tl.arange(0, PAIRS))[:, None]
        if END == "silu":
            y = (low * tl.sigmoid(low) * high).to(out.dtype.element_ty)
            tl.store(out + row.to(tl.int64) * (N // 2) + pair, y, mask=live & (pair < N // 2))
        else:
            heads = N // (2 * apart) - 2 * G
            place = rope, turns, length, ancestors, nodes, kv
            write_qkv(low, high, row, pair, out, *place, T, heads, G, R, apart, NODES)


@triton.jit(do_not_specialize=["T"])
def linear_kernel(
    x, beside, weight, scales, bias, residual, out, parts, arrived, rope, turns, length, ancestors,
    nodes, kv, T, N, K, part, groups, apart, G, R,
    FORM: tl.constexpr, END: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr, TWO: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    NODES: tl.constexpr,
):  # fmt: skip
    """A block of ROWS rows, a part (of so many steps of INNER inputs), COLUMNS outputs. apart: from
    one output of a pair to the other, where END wants pairs; parts: room for the parts' sums."""
    HALF: tl.constexpr = INNER // 2
    BYTES: tl.constexpr = HALF if FORM == "int4" else INNER
    dtype: tl.constexpr = x.dtype.element_ty
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    if END != "plain":  # the outputs of a pair next to each other
        n = n // 2 // apart * 2 * apart + n // 2 % apart + n % 2 * apart
    row, kept, live = m[None, :], n < N, m[None, :] < T
    n = tl.minimum(n, N - 1)
    steps, first = tl.cdiv(K, INNER), tl.program_id(1) * part
    k = first * INNER + tl.arange(0, HALF)
    x_at = x + row * K + k[:, None]
    if FORM == "16":
        w_at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    else:
        line = (n // 128 * steps + first) * 128 + n % 128
        w_at = weight + line.to(tl.int64)[:, None] * BYTES + tl.arange(0, HALF)[None, :]
    if FORM == "int4":
        wide = tl.cdiv(N, 128) * 128
        pair_at = scales + first * (1 + TWO) * wide + n
        sums_at = beside + row * groups + first * (1 + TWO)
    acc = tl.zeros((COLUMNS, ROWS), tl.int32 if dtype == tl.int8 else tl.float32)
    for _ in tl.range(first, tl.minimum(first + part, steps), num_stages=STAGES):
        # Two dots after each other: the compiler then gives each warp outputs of its own.
        there, there2 = (k < K) | EVEN, (k + HALF < K) | EVEN
        x1 = tl.load(x_at, mask=live & there[:, None], other=0)
        x2 = tl.load(x_at + HALF, mask=live & there2[:, None], other=0)
        w = tl.load(w_at, mask=there[None, :] | (FORM != "16"), other=0)
        if FORM == "int4":
            acc = add_groups(acc, w, x1, x2, pair_at, sums_at, live, wide, TWO)
            pair_at += (1 + TWO) * wide
            sums_at += 1 + TWO
        else:
            acc = tl.dot(w.to(dtype), x1, acc, out_dtype=acc.dtype)
            w = tl.load(w_at + HALF, mask=there2[None, :] | (FORM != "16"), other=0)
            acc = tl.dot(w.to(dtype), x2, acc, out_dtype=acc.dtype)
        w_at += INNER if FORM == "16" else 128 * BYTES
        x_at += INNER
        k += INNER
    acc, last = all_parts(acc, parts, arrived, live, COLUMNS, ROWS)
    if last:
        finish(
            acc, row, n, kept, beside, scales, bias, residual, out, rope, turns, length, ancestors,
            nodes, kv, T, N, apart, G, R, FORM, END, dtype == tl.int8, NODES,
        )  # fmt: skip


@functools.cache
def split_of(outputs: int, inputs: int, device: torch.device) -> int:
    """Into how many parts the inner dimension is cut: for two programs on each processor, at most 8
    parts, of at least 512 inputs."""
    cuda = device.type == "cuda"
    sms = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 82
    return max(1, min(8, inputs // 512, round(2 * sms / -(-outputs // COLUMNS))))


@library.custom_op("talon::linear", mutates_args=())
def linear(
    x: Tensor, beside: Tensor | None, weight: Tensor, scales: Tensor | None, bias: Tensor | None,
    arrived: Tensor, outputs: int, end: str, dtype: torch.dtype, residual: Tensor | None = None,
    rope: Tensor | None = None, length: Tensor | None = None, ancestors: Tensor | None = None,
    kv: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Rows x [T, K] times a layer's weights, in `dtype`: [T, outputs], half of it if `end` is silu.

    arrived: int32, zero; residual: [T, outputs]. For qkv: rope fp32 [2, P, D], kv [2, G, R, D],
    length and ancestors as in gpu_attention.py, which also say the rows' positions and slots;
    returns queries [T, H, D]. That kv is written is not told to torch.compile, whose regions until
    2.13 bear no operator that both writes and returns; order is safe all the same, since whoever
    reads kv takes the queries too."""
    (rows, inputs), short = x.shape, x.dtype == torch.int8
    form = {torch.int8: "int8", torch.uint8: "int4"}.get(weight.dtype, "16")
    block = next((size for size in (8, 16, 32) if size >= rows and size >= 16 * short), 64)
    columns = 64 if form == "int4" and block == 64 else COLUMNS  # it holds two sets of sums
    inner = 2 * weight.shape[3] if form == "int4" else 64
    blocks, steps, tiles = -(-rows // block), -(-inputs // inner), -(-outputs // columns)
    assert blocks <= MOST_BLOCKS, f"{rows} rows: at most {64 * MOST_BLOCKS} at a time"
    part = -(-steps // split_of(outputs, inputs, x.device))
    split, groups = -(-steps // part), len(scales) if form == "int4" else 0
    room = tiles * blocks * split * columns * block if split > 1 else 0
    parts = x.new_empty(room, dtype=torch.int32 if short else torch.float32)
    x, residual = (t if t is None else t.contiguous() for t in (x, residual))
    out = new_out(x, beside, weight, scales, bias, arrived, outputs, end, dtype, kv=kv)
    _, group, there, width = (2, 0, 0, outputs) if kv is None else kv.shape
    turns = 0 if rope is None else rope.shape[1]
    nodes = 0 if ancestors is None else ancestors.shape[1]
    linear_kernel[(blocks, split, tiles)](
        x, beside, weight, scales, bias, residual, out, parts, arrived, rope, turns, length,
        ancestors, nodes, kv, rows, outputs, inputs, part, groups, width // 2, group, there,
        FORM=form, END=end, ROWS=block, COLUMNS=columns, INNER=inner, EVEN=inputs % inner == 0,
        TWO=form == "int4" and groups == 2 * weight.shape[1], num_warps=4,
        STAGES=3 if form == "16" or block > 16 else 4, NODES=triton.next_power_of_2(nodes),
    )  # fmt: skip
    return out


@linear.register_fake
def new_out(
    x, beside, weight, scales, bias, arrived, outputs, end, dtype, residual=None, rope=None,
    length=None, ancestors=None, kv=None,
):  # fmt: skip
    shape = [outputs // 2 if end == "silu" else outputs]
    if end == "qkv":
        shape = [outputs // kv.shape[3] - 2 * kv.shape[1], kv.shape[3]]
    return x.new_empty(x.shape[0], *shape, dtype=dtype)


@triton.jit
def heads_kernel(
    qkv, norms, out, rope, turns, length, ancestors, nodes, kv, T, HEADS, G, R, HALF, eps,
    NODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one row, whose numbers no other row changes. BLOCK: at least HALF of a head."""
    i, row = tl.arange(0, BLOCK)[:, None], tl.program_id(0) + tl.zeros((1, 1), tl.int32)
    head, live = tl.program_id(1) + 0 * i, i < HALF
    at = qkv + (row * tl.num_programs(1) + head).to(tl.int64) * 2 * HALF + i
    low = tl.load(at, mask=live, other=0).to(tl.float32)
    high = tl.load(at + HALF, mask=live, other=0).to(tl.float32)
    at, normed = norms + tl.where(head < HEADS, 0, 2 * HALF) + i, live & (head < HEADS + G)
    scale = tl.rsqrt(tl.sum(low * low + high * high, 0) / (2 * HALF) + eps)
    scale = tl.where(normed, scale[None, :], 1.0)
    low = (low * scale).to(out.dtype.element_ty) * tl.load(at, mask=normed, other=1)
    high = (high * scale).to(out.dtype.element_ty) * tl.load(at + HALF, mask=normed, other=1)
    pair = tl.where(live, head * HALF + i, tl.num_programs(1) * HALF)  # behind all: not written
    write_qkv(
        low.to(tl.float32), high.to(tl.float32), row, pair, out, rope, turns, length, ancestors,
        nodes, kv, T, HEADS, G, R, HALF, NODES,
    )  # fmt: skip


@library.custom_op("talon::heads", mutates_args=())
def heads(
    qkv: Tensor, norms: Tensor, eps: float, rope: Tensor, length: Tensor,
    ancestors: Tensor | None, kv: Tensor,
) -> Tensor:  # fmt: skip
    """What `linear` ends with for qkv, of rows qkv [T, (H + 2G) * D], queries and keys normed first
    (RMSNorm). norms: weights [2, D]; the other arguments and the result are as there."""
    out = new_queries(qkv, norms, eps, rope, length, ancestors, kv)
    (rows, queries, size), (_, groups, there, _) = out.shape, kv.shape
    nodes = 1 if ancestors is None else ancestors.shape[1]
    heads_kernel[(rows, queries + 2 * groups)](
        qkv, norms, out, rope, rope.shape[1], length, ancestors, nodes, kv, rows, queries, groups,
        there, size // 2, eps, NODES=triton.next_power_of_2(nodes),
        BLOCK=triton.next_power_of_2(size // 2), num_warps=1,
    )  # fmt: skip
    return out


@heads.register_fake
def new_queries(qkv, norms, eps, rope, length, ancestors, kv):
    _, groups, _, size = kv.shape
    return qkv.new_empty(len(qkv), qkv.shape[1] // size - 2 * groups, size)
