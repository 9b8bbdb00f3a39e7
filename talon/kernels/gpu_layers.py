"""Weights of a file in the form that a GPU multiplies with, once, when a model is loaded.

    layer = int4_layer(weight, scales, zeros, groupsize, inputs, bias)
    y = torch.ops.talon.linear(rows, beside, *layer, "plain", dtype, residual)

What a file holds is said in linear.py; the operator and the layouts in gpu_linear.py. Leaves out
the way back: what needs single rows of a layer (a smaller vocabulary) takes them before packing.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from talon.kernels.gpu_linear import MOST_BLOCKS
from talon.kernels.gpu_rows import padded


class Layer(NamedTuple):
    """A layer's weights on a GPU, as `talon::linear` takes them."""

    weight: Tensor
    scales: Tensor | None
    bias: Tensor | None
    arrived: Tensor
    outputs: int


def new_layer(weight: Tensor, scales: Tensor | None, bias: Tensor | None, outputs: int) -> Layer:
    """fp16 and bf16: scales None, weight [N, K] as it is."""
    tiles = -(-outputs // 64) * MOST_BLOCKS
    arrived = torch.zeros(tiles, dtype=torch.int32, device=weight.device)
    return Layer(weight.contiguous(), scales, bias, arrived, outputs)


def tiled(weight: Tensor, width: int) -> Tensor:
    """[N/128, bytes/width, 128, width] of [N, bytes], padded with zeros: what a program reads in
    one step lies together in memory."""
    outputs, inputs = weight.shape
    weight = F.pad(weight, (0, -inputs % width, 0, -outputs % 128))
    return weight.view(-1, 128, weight.shape[1] // width, width).transpose(1, 2)


def int8_layer(weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Layer:
    """Of a file's int8 [N, K] and fp32 [N], for int8 and for int8-dynamic."""
    return new_layer(tiled(weight, 64), scales, bias, len(weight))


def int4_layer(
    weight: Tensor, scales: Tensor, zeros: Tensor, groupsize: int, inputs: int,
    bias: Tensor | None = None,
) -> Layer:  # fmt: skip
    """Of a file's uint8 [N, Ip/2], bf16 [N, Ip/g] and bf16 [N, Ip/g].

    A tile's low halves are its first inputs and its high halves the others. Groups of 256 become
    two of 128 each; with groups of 32 a step has 64 inputs. The inputs are padded to whole steps.
    pairs int32 [groups, Np]: scale below, zero above."""
    outputs, group = len(weight), min(groupsize, 128)
    width, half = padded(inputs, group), 32 if groupsize == 32 else 64
    halves = weight.view(outputs, -1, groupsize // 2)
    steps = torch.cat((halves & 15, halves >> 4), 2).view(outputs, -1)[:, :width]
    low, high = F.pad(steps, (0, width - steps.shape[1])).view(outputs, -1, 2, half).unbind(2)
    pairs = []
    for tensor in (scales, zeros):
        tensor = tensor.repeat_interleave(groupsize // group, 1)[:, : width // group]
        more = (0, width // group - tensor.shape[1], 0, -outputs % 128)
        pairs.append(F.pad(tensor, more).view(torch.int16).int())
    packed = tiled((low | high << 4).view(outputs, -1), half)
    return new_layer(packed, (pairs[0] & 0xFFFF | pairs[1] << 16).t().contiguous(), bias, outputs)
