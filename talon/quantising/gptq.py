"""GPTQ (Frantar et al., arXiv 2210.17323): weights rounded so that a layer's outputs stay.

Rounding W to Q costs |X (W - Q)|^2 = tr(D' H D) over inputs X, with D = W - Q and H = X'X. Inputs
(columns, in the paper) are rounded one after another, and what one loses is made good by those
still to come, group by group, by a Cholesky factor of the inverse of H (section 3.3). Then follows
what the paper has not, PASSES times: scale and zero of each group by least squares, and every step
to its best value with all others fixed. Each of these only lowers the cost.

Weights are [in, out] here, so that what is rounded together is contiguous, and outputs do not
depend on each other: OUTPUTS at a time. All is fp32 on the device of the weights. Leaves out: an
order of inputs by importance, which the passes make needless."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from talon.kernels.linear import TINY, fit_groups, pack_int4

OUTPUTS = 4096
DAMPING = 0.05  # of the mean of H's diagonal, added to it
PASSES = 2
LONGEST = 2.0  # in medians of their length: inputs that are longer count as if of this length
FIRST = 32  # how often the first token of a window counts, to which all others attend


class Hessian:
    """H = X'X of one layer, fp32 [in, in].

    A text's first token has activations up to a thousand times as long as the others'. Unbounded it
    would be all that H knows; as one token of many, what all attend to would be lost."""

    def __init__(self, inputs: int, device: torch.device) -> None:
        self.sum = torch.zeros(inputs, inputs, device=device)

    def add(self, x: Tensor) -> None:
        """x: [T, in], of a window"""
        length = x.norm(dim=1, keepdim=True)
        share = (LONGEST * length.median() / length.clamp_min(TINY)).clamp_max(1)
        share[0] *= FIRST**0.5
        x = x * share
        self.sum.addmm_(x.t(), x)

    def damped(self) -> Tensor:
        """With a mean of 1 on its diagonal, and an inverse."""
        h = self.sum / self.sum.diagonal().mean().clamp_min(TINY)
        h.diagonal().add_(DAMPING)
        return h


class Grid(NamedTuple):
    """Weights [in, out] = step * scale + zero, `size` inputs with the same scale and zero."""

    steps: Tensor  # -8..7, fp32 [in, out]
    scales: Tensor  # fp32 [groups, out]
    zeros: Tensor
    size: int

    def round(self, group: int, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Steps and values of weights [.., out] of a group."""
        scale, zero = self.scales[group], self.zeros[group]
        steps = torch.where(scale == 0, 0, (weight - zero) / scale).round_().clamp_(-8, 7)
        return steps, steps * scale + zero

    def values(self) -> Tensor:
        scales, zeros = (t.repeat_interleave(self.size, 0) for t in (self.scales, self.zeros))
        return self.steps * scales + zeros


def gptq_int4(weight: Tensor, hessian: Hessian, groupsize: int) -> tuple[Tensor, ...]:
    """Of a weight [out, in]: packed uint8 [out, Ip/2], scales and zeros bf16 [out, groups] as a
    file has them, and the weight fp32 [out, in] that these stand for."""
    inputs, padding = weight.shape[1], -weight.shape[1] % groupsize
    h = F.pad(hessian.damped(), (0, padding, 0, padding))
    h.diagonal()[inputs:] = 1
    wide = F.pad(weight.float(), (0, padding))
    grids = round_outputs(wide, h, groupsize)
    steps, scales, zeros = (torch.cat([grid[i].t() for grid in grids]) for i in range(3))
    packed = pack_int4((steps + 8).to(torch.uint8), groupsize)
    values = torch.cat([grid.values().t() for grid in grids])[:, :inputs]
    return packed, scales.bfloat16(), zeros.bfloat16(), values


def fit(group: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero [out] of weights [g, out], as bf16 can hold them; share [g]: how much a
    squared error of each input matters."""
    parts = group.t().contiguous().split(512)  # parts that stay in a CPU's cache
    grids = [fit_groups(part, share) for part in parts]
    return torch.cat([g.scale for g in grids])[:, 0], torch.cat([g.zero for g in grids])[:, 0]


def round_outputs(weight: Tensor, h: Tensor, size: int) -> list[Grid]:
    """The grids of a weight [out, in], OUTPUTS each."""
    factor = torch.cholesky_inverse(torch.linalg.cholesky(h))
    factor = torch.linalg.cholesky(factor, upper=True)
    grids = []
    for part in weight.split(OUTPUTS):
        part = part.t().contiguous()
        grid = round_in_order(part, factor, size)
        for _ in range(PASSES):
            improve(grid, part, h)
        grids.append(grid)
    return grids


def round_in_order(weight: Tensor, factor: Tensor, size: int) -> Grid:
    """The paper's algorithm 1 for weights [in, out] and the upper factor of the inverse of H."""
    inputs, outputs = weight.shape
    pairs = weight.new_empty(2, inputs // size, outputs)
    grid = Grid(torch.empty_like(weight), *pairs, size)
    left = weight.clone()
    for group, start in enumerate(range(0, inputs, size)):
        end = start + size
        block, own = left[start:end], factor[start:end, start:end]
        pairs[:, group] = torch.stack(fit(block, own.diagonal().pow(-2)))
        errors = torch.empty_like(block)
        for i, row in enumerate(block):
            grid.steps[start + i], value = grid.round(group, row)
            errors[i] = (row - value) / own[i, i]
            block[i + 1 :].addr_(own[i, i + 1 :], errors[i], alpha=-1)
        left[end:].addmm_(factor[start:end, end:].t(), errors, alpha=-1)
    return grid


def improve(grid: Grid, weight: Tensor, h: Tensor) -> None:
    """One pass over all groups, in place: of each its scales and zeros, then its steps."""
    values = grid.values()
    slope = h @ (weight - values)  # half of what a larger value gains, per unit
    for group, start in enumerate(range(0, len(weight), grid.size)):
        rows = slice(start, start + grid.size)
        own, steps, before = h[rows, rows], grid.steps[rows], values[rows].clone()
        push = slope[rows].clone()
        refit(grid, group, steps, values[rows], push, own)
        for i in range(len(steps)):
            old = values[start + i].clone()
            wanted = old + push[i] / own[i, i]
            steps[i], values[start + i] = grid.round(group, wanted)
            push.addr_(own[i], values[start + i] - old, alpha=-1)
        slope.addmm_(h[:, rows], values[rows] - before, alpha=-1)


def refit(grid: Grid, group: int, steps: Tensor, values: Tensor, push: Tensor, own: Tensor) -> None:
    """Scale and zero by least squares where that lowers the cost, as bf16 can hold them."""
    bent = own @ steps
    a, b, c = (bent * steps).sum(0), bent.sum(0), own.sum()
    by_scale, by_zero = (push * steps).sum(0), push.sum(0)
    det = (a * c - b * b).clamp_min(1e-12 * a * c + TINY)
    scale = grid.scales[group] + (c * by_scale - b * by_zero) / det
    zero = grid.zeros[group] + (a * by_zero - b * by_scale) / det
    scale, zero = scale.bfloat16().float(), zero.bfloat16().float()
    change = steps * scale + zero - values
    bent = own @ change
    better = (change * bent).sum(0) < 2 * (change * push).sum(0)
    grid.scales[group] = torch.where(better, scale, grid.scales[group])
    grid.zeros[group] = torch.where(better, zero, grid.zeros[group])
    values += torch.where(better, change, 0)
    push -= torch.where(better, bent, 0)
