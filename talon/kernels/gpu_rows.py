"""Rows made ready for the matrix multiplication that follows them, RMSNorm included: one launch.

    rows, beside = torch.ops.talon.ready(x, weight, eps, "norm", "int8", 0)

Importing this file registers the operator. What a multiplication takes depends on its weights:

    "plain"  rows as they are, fp16 or bf16                   for 16-bit and int8 weights
    "int8"   rows int8 [T, C], with a scale fp32 [T] each     for int8-dynamic
    "sums"   rows as they are, with sums fp32 [T, groups]     for int4: of the inputs of each group

One program handles a row, in a shape that its length alone decides: its numbers do not depend on
the rows next to it. Leaves out gradients, and fp32 models, which need none of this.
"""

import triton
import triton.language as tl
from torch import Tensor, float32, int8, library

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it leaves no bits behind the point


@triton.jit
def last_to_arrive(arrived, programs):
    """Whether all other programs have stored what they found. arrived: int32, zero for the next."""
    tl.debug_barrier()  # all of this one is stored before it says so
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(arrived, 0)
    return last


@triton.jit
def write_row(
    values, row, y, beside, C, groups, MODE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """Write a row in the form MODE. values: fp32 [BLOCK], zero from C on."""
    c = tl.arange(0, BLOCK)
    at = y + row.to(tl.int64) * C + c
    if MODE == "int8":
        most = tl.maximum(tl.max(tl.abs(values), 0), 1e-30)
        tl.store(at, (values * (127 / most) + ROUND - ROUND).to(tl.int8), mask=c < C)
        tl.store(beside + row, most / 127)
    else:
        rounded = values.to(y.dtype.element_ty)
        tl.store(at, rounded, mask=c < C)
        if MODE == "sums":
            sums = tl.sum(tl.reshape(rounded.to(tl.float32), (BLOCK // GROUP, GROUP)), 1)
            g = tl.arange(0, BLOCK // GROUP)
            tl.store(beside + row * groups + g, sums, mask=g < groups)


@triton.jit
def ready_kernel(
    x, weight, y, beside, C, groups, eps,
    OP: tl.constexpr, MODE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    at = x + row.to(tl.int64) * (2 * C if OP == "silu" else C) + c
    values = tl.load(at, mask=c < C, other=0).to(tl.float32)
    if OP == "norm":
        values *= tl.rsqrt(tl.sum(values * values, 0) / C + eps)
        values = values.to(x.dtype.element_ty).to(tl.float32)
    if OP == "silu":
        values *= tl.sigmoid(values) * tl.load(at + C, mask=c < C, other=0).to(tl.float32)
    if weight is not None:
        values *= tl.load(weight + c, mask=c < C, other=0).to(tl.float32)
    write_row(values, row, y, beside, C, groups, MODE, GROUP, BLOCK)


def padded(inputs: int, group: int) -> int:
    """Inputs of int4 weights on a GPU: whole steps of the multiplication's loop."""
    return inputs + -inputs % (64 if group == 32 else 128)


def new_rows(x: Tensor, rows: int, width: int, mode: str, group: int) -> tuple[Tensor, Tensor]:
    """Room for rows in the form `mode`: the rows, and what goes with them."""
    y = x.new_empty(rows, width, dtype=int8 if mode == "int8" else x.dtype)
    groups = {"plain": 0, "int8": 1, "sums": padded(width, group) // max(group, 1)}[mode]
    return y, x.new_empty(rows, groups, dtype=float32)


@library.custom_op("talon::ready", mutates_args=())
def ready(
    x: Tensor, weight: Tensor | None, eps: float, op: str, mode: str, group: int
) -> tuple[Tensor, Tensor]:
    """Rows in the form `mode`, and what goes with them.

    op: "norm" (RMSNorm of x [T, C]), "silu" (SiLU(gate) * up of x [T, 2C]) or "none"; weight [C]:
    factors of the result, the norm's times what int8 weights ask for, or None."""
    rows, width = x.shape[0], x.shape[1] // (2 if op == "silu" else 1)
    y, beside = new_rows(x, rows, width, mode, group)
    block = triton.next_power_of_2(max(width, padded(width, group)))
    ready_kernel[(rows,)](
        x.contiguous(), weight, y, beside, width, beside.shape[1], eps,
        OP=op, MODE=mode, GROUP=group, BLOCK=block, num_warps=8 if block > 2048 else 4,
    )  # fmt: skip
    return y, beside


@ready.register_fake
def _(x, weight, eps, op, mode, group):
    return new_rows(x, x.shape[0], x.shape[1] // (2 if op == "silu" else 1), mode, group)
