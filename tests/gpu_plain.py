"""The GPU operators in plain torch, in float64: what they compute wherever no kernel can run.

gpu_numbers.py holds them against the kernels themselves; with them test_cuda_branch.py decodes by
the modules of a GPU.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from model import At, causal_mask, rotate, tree_mask
from talon.kernels.gpu_attention import attend
from talon.kernels.gpu_choice import best
from talon.kernels.gpu_linear import linear
from talon.kernels.gpu_picks import keys_of
from talon.kernels.gpu_rows import new_rows, padded, ready
from talon.sampling import NO_TOKEN, gumbel


def in_form(values: Tensor, x: Tensor, mode: str, group: int) -> tuple[Tensor, Tensor]:
    """Rows [T, C] as `write_row` has them."""
    rows, width = values.shape
    y, beside = new_rows(x, rows, width, mode, group)
    if mode == "int8":
        most = values.abs().amax(1, keepdim=True).clamp(min=1e-30)
        return (values * 127 / most).round().to(torch.int8), (most / 127).float()
    y = values.to(x.dtype)
    if mode == "sums":
        sums = F.pad(y.double(), (0, padded(width, group) - width)).view(rows, -1, group).sum(2)
        beside = sums[:, : beside.shape[1]].float()
    return y, beside


def plain_ready(
    x: Tensor, weight: Tensor | None, eps: float, op: str, mode: str, group: int
) -> tuple[Tensor, Tensor]:
    values = x.double()
    if op == "norm":
        values = values * torch.rsqrt(values.square().mean(1, keepdim=True) + eps)
        values = values.to(x.dtype).double()
    if op == "silu":
        gate, up = values.chunk(2, 1)
        values = F.silu(gate) * up
    return in_form(values if weight is None else values * weight.double(), x, mode, group)


def untiled(weight: Tensor) -> Tensor:
    """[outputs, bytes], both padded, of [N/128, bytes/width, 128, width]."""
    return weight.transpose(1, 2).reshape(128 * len(weight), -1)


def weights_of(weight: Tensor, scales: Tensor | None, inputs: int, outputs: int) -> Tensor:
    """float64 [outputs, inputs] of a packed layer."""
    if weight.dtype == torch.uint8:
        steps = torch.stack((weight & 15, weight >> 4), 3).flatten(3)
        steps = untiled(steps).double() - 8
        pairs = scales.t().repeat_interleave(steps.shape[1] // len(scales), 1)
        low, high = (pairs << 16).view(torch.float32), (pairs >> 16 << 16).view(torch.float32)
        return (steps * low.double() + high.double())[:outputs, :inputs]
    if scales is None:
        return weight.double()
    return untiled(weight)[:outputs, :inputs].double() * scales.double()[:, None]


def plain_linear(
    x, beside, weight, scales, bias, arrived, outputs, end, dtype, residual=None, rope=None,
    length=None, ancestors=None, kv=None,
) -> Tensor:  # fmt: skip
    y = x.double() @ weights_of(weight, scales, x.shape[1], outputs).t()
    if x.dtype == torch.int8:
        y = y * beside.double()
    if bias is not None:
        y = y + bias.double()
    if end == "silu":
        gate, up = y.chunk(2, 1)
        return (F.silu(gate) * up).to(dtype)
    if end == "plain":
        return (y if residual is None else y + residual.double()).to(dtype)
    groups, size = kv.shape[1], kv.shape[3]
    q, k, v = y.view(len(y), -1, size).split((outputs // size - 2 * groups, groups, groups), 1)
    positions = slots = length + torch.arange(len(y), device=y.device)
    if ancestors is not None:
        index = torch.arange(ancestors.shape[1], device=y.device)
        positions, slots = length + ancestors.sum(1) - 1, length + (ancestors * index).amax(1)
    turned = rope[:, positions].double()
    new = torch.stack((rotate(k, turned), v)).transpose(1, 2)
    kv.index_copy_(2, slots, new.to(kv.dtype))
    return rotate(q, turned).to(dtype)


def plain_attend(
    q, kv, length, ancestors, factors, arrived, mode, group
) -> tuple[Tensor, Tensor]:  # fmt: skip
    at = At(length, torch.arange(kv.shape[2], device=q.device))
    if ancestors is None:
        mask = causal_mask(length, len(q), at.slots)
    else:
        mask = tree_mask(at, ancestors)
    seen = mask.any(0)
    keys, values = kv[:, :, seen].double().repeat_interleave(q.shape[1] // kv.shape[1], 1)
    scores = torch.einsum("thd,hsd->hts", q.double(), keys) * q.shape[2] ** -0.5
    weights = scores.masked_fill(~mask[:, seen], float("-inf")).softmax(-1)
    y = torch.einsum("hts,hsd->thd", weights, values).flatten(1)
    return in_form(y if factors is None else y * factors.double(), q, mode, group)


def plain_best(
    logits, arrived, positions, temperature, seed, limits, ids, above, top
) -> tuple[Tensor, Tensor]:  # fmt: skip
    columns = torch.arange(logits.shape[1], device=logits.device)
    values = logits.float()
    if positions is not None:
        values = values / temperature
        if limits is not None:
            (lowest, last), keys = limits.split(1, 1), keys_of(logits)
            kept = (keys > lowest) | ((keys == lowest) & (columns <= last))
            values = values.masked_fill(~kept, float("-inf"))
        values = values + gumbel(seed, positions, columns if ids is None else ids)
    values = values.masked_fill(logits.isnan(), float("-inf" if ids is not None else "nan"))
    found, index = values.sort(dim=1, descending=True, stable=True)
    found, index = found[:, :top], index[:, :top]
    if ids is None:
        return torch.where(found.isnan(), NO_TOKEN, index), logits.new_empty(len(logits), 0).float()
    scores = (found - values.logsumexp(1, keepdim=True)).nan_to_num(float("-inf")).clamp(max=0)
    return ids[index], scores if above is None else above[:, None] + scores


@cache
def register() -> None:
    """Let the operators run on a CPU, in this process."""
    functions = {ready: plain_ready, linear: plain_linear, attend: plain_attend, best: plain_best}
    for operator, function in functions.items():
        operator.register_kernel("cpu", function)
