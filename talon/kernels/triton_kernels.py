"""Triton kernels for quantised linear layers on an NVIDIA GPU: few rows, weights read once.

    w8a16  int8 weights, rows in fp16, bf16 or fp32
    w8a8   int8 weights, rows in int8
    w4a16  4-bit weights in groups, rows in fp16, bf16 or fp32

Importing this file registers them as operators `talon::...`, which compiled code and CUDA graphs
may hold. Rows are padded to 16, 32 or 64 and go to the tensor cores; more rows run in blocks of 64.
The inner dimension is split over programs, since the outputs of one layer alone are too few to fill
a GPU, and the parts are added in a second step in fixed order: no atomics, so equal inputs give
equal outputs. How a layer is split does not depend on the number of rows, so neither does a row's
result. Chosen for sm_86 (RTX 3090: 82 SMs, 99 KB of shared memory for a block). Leaves out other
GPUs' tuning and gradients. Imported by quantized_linear.py when a model moves to a GPU.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, library

SMS = 82

COLUMNS = 64  # outputs of one program


class Launch(NamedTuple):
    """Sizes of one launch: rows and inner block of a program, warps, pipeline depth."""

    rows: int
    inner: int
    num_warps: int
    num_stages: int


# By padded rows. The deeper pipelines belong to the small ones, which live off memory alone.
INT8_LAUNCHES = {16: Launch(16, 128, 4, 4), 32: Launch(32, 128, 4, 3), 64: Launch(64, 128, 4, 3)}

INT4_LAUNCHES = {16: Launch(16, 0, 4, 4), 32: Launch(32, 0, 4, 3), 64: Launch(64, 0, 4, 2)}


def padded_rows(rows: int) -> int:
    """The block that holds this many rows: the least of 16, 32, 64 that does, else 64."""
    return next((size for size in (16, 32) if rows <= size), 64)


def split_of(columns: int, steps: int) -> int:
    """Into how many parts the inner dimension is cut: enough programs for three on each SM.

    columns: outputs of the layer; steps: blocks of 128 inputs, or groups. A part keeps four steps.
    """
    split = 1
    while -(-columns // COLUMNS) * split < 3 * SMS and steps // (2 * split) >= 4:
        split *= 2
    return split


def with_halves(multiply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Multiply fp32 rows as the sum of two bf16 rows, for want of fp32 tensor cores.

    Rows of other dtypes go as they are.
    multiply: rows [T, K] -> [split, T, N]. Returns [T, N], the parts added in order.
    """
    if x.dtype != torch.float32:
        return multiply(x).sum(0)
    high = x.bfloat16()
    both = torch.cat((high, (x - high.float()).bfloat16()))
    high, low = multiply(both).sum(0).chunk(2)
    return high + low


# ---------------------------------------------------------------- int8 weights


@triton.jit
def int8_kernel(
    x,  # [T, K] fp16, bf16 or int8
    weight,  # [N, K] int8
    out,  # [split, T, N] fp32, or int32 for int8 rows
    T,
    N,
    K,
    part,  # inputs of one part, a multiple of INNER
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    EVEN: tl.constexpr,  # INNER divides K
):
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.program_id(1) * part + tl.arange(0, INNER)
    x_at = x + m[:, None] * K + k[None, :]
    w_at = weight + n[None, :].to(tl.int64) * K + k[:, None]
    rows, columns = m[:, None] < T, n[None, :] < N
    acc = tl.zeros((ROWS, COLUMNS), dtype=out.dtype.element_ty)
    for start in range(0, tl.minimum(part, K - tl.program_id(1) * part), INNER):
        if EVEN:
            a = tl.load(x_at, mask=rows, other=0)
            b = tl.load(w_at, mask=columns, other=0)
        else:
            inside = k + start < K
            a = tl.load(x_at, mask=rows & inside[None, :], other=0)
            b = tl.load(w_at, mask=columns & inside[:, None], other=0)
        acc = tl.dot(a, b.to(a.dtype), acc, out_dtype=acc.dtype)
        x_at += INNER
        w_at += INNER
    at = (tl.program_id(1) * T + m[:, None]) * N + n[None, :]
    tl.store(out + at, acc, mask=rows & columns)


def int8_parts(kernel: Callable, x: Tensor, weight: Tensor) -> Tensor:
    """[split, T, N] sums of products of rows x [T, K] and weight int8 [N, K], not yet scaled."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    launch = INT8_LAUNCHES[padded_rows(rows)]
    steps = -(-inputs // 128)
    split = split_of(outputs, steps)
    part = -(-steps // split) * 128
    sums = torch.int32 if x.dtype == torch.int8 else torch.float32
    out = torch.empty((split, rows, outputs), dtype=sums, device=x.device)
    grid = (-(-outputs // COLUMNS), split, -(-rows // launch.rows))
    kernel[grid](
        x.contiguous(),
        weight,
        out,
        rows,
        outputs,
        inputs,
        part,
        ROWS=launch.rows,
        COLUMNS=COLUMNS,
        INNER=launch.inner,
        EVEN=inputs % launch.inner == 0,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return out


@library.triton_op("talon::w8a16", mutates_args=())
def w8a16(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """fp32 [T, N] = x [T, K] @ (weight int8 [N, K] * scales fp32 [N]).T"""
    kernel = library.wrap_triton(int8_kernel)
    return with_halves(lambda rows: int8_parts(kernel, rows, weight), x) * scales


@library.triton_op("talon::w8a8", mutates_args=())
def w8a8(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """The same for rows x int8 [T, K]; the sums are exact."""
    if x.shape[0] > 64 and x.shape[1] % 8 == 0 and weight.shape[0] % 8 == 0:
        return torch._int_mm(x, weight.t()) * scales
    kernel = library.wrap_triton(int8_kernel)
    return int8_parts(kernel, x, weight).sum(0, dtype=torch.int32) * scales


# ---------------------------------------------------------------- 4-bit weights


@triton.jit
def int4_kernel(
    x,  # [T, K] fp16 or bf16
    x_sums,  # [T, groups] fp32, of the inputs of each group
    weight,  # [N, K/2] uint8
    scales,  # [groups, N] bf16
    zeros,  # [groups, N] bf16
    out,  # [split, T, N] fp32
    T,
    N,
    groups,
    part,  # groups of one part
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HALF: tl.constexpr,  # bytes of a group
):
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, HALF)
    first = tl.program_id(1) * part
    rows, columns = m[:, None] < T, n[None, :] < N
    x_at = x + m[:, None] * (groups * 2 * HALF) + first * 2 * HALF + k[None, :]
    w_at = weight + n[None, :].to(tl.int64) * (groups * HALF) + first * HALF + k[:, None]
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for group in range(first, tl.minimum(first + part, groups)):
        low = tl.load(x_at, mask=rows, other=0)
        high = tl.load(x_at + HALF, mask=rows, other=0)
        both = tl.load(w_at, mask=columns, other=0)
        # Steps go to the tensor cores as small whole numbers, exact in every dtype; scale and zero
        # are applied to the sums, of which there are far fewer than weights.
        steps = tl.dot(low, ((both & 15).to(tl.int8) - 8).to(low.dtype))
        steps = tl.dot(high, ((both >> 4).to(tl.int8) - 8).to(low.dtype), steps)
        scale = tl.load(scales + group * N + n, mask=n < N, other=0).to(tl.float32)
        zero = tl.load(zeros + group * N + n, mask=n < N, other=0).to(tl.float32)
        sums = tl.load(x_sums + m * groups + group, mask=m < T, other=0)
        acc += steps * scale[None, :] + sums[:, None] * zero[None, :]
        x_at += 2 * HALF
        w_at += HALF
    at = (tl.program_id(1) * T + m[:, None]) * N + n[None, :]
    tl.store(out + at, acc, mask=rows & columns)


def int4_parts(
    kernel: Callable, x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor, groupsize: int
) -> Tensor:
    """[split, T, N] parts of the product of rows x [T, K] and packed weights uint8 [N, K/2]."""
    rows, (groups, outputs) = x.shape[0], scales.shape
    launch = INT4_LAUNCHES[padded_rows(rows)]
    split = split_of(outputs, groups)
    out = torch.empty((split, rows, outputs), dtype=torch.float32, device=x.device)
    grid = (-(-outputs // COLUMNS), split, -(-rows // launch.rows))
    kernel[grid](
        x.contiguous(),
        x.view(rows, groups, groupsize).float().sum(2),
        weight,
        scales,
        zeros,
        out,
        rows,
        outputs,
        groups,
        -(-groups // split),
        ROWS=launch.rows,
        COLUMNS=COLUMNS,
        HALF=groupsize // 2,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return out


@library.triton_op("talon::w4a16", mutates_args=())
def w4a16(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor, groupsize: int) -> Tensor:
    """fp32 [T, N] of rows x [T, K], weight uint8 [N, K/2], scales and zeros bf16 [groups, N]."""
    kernel, layer = library.wrap_triton(int4_kernel), (weight, scales, zeros, groupsize)
    return with_halves(lambda rows: int4_parts(kernel, rows, *layer), x)
