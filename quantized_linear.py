"""Linear layers with int8 or 4-bit weights: how they are stored, and how CPU and GPU run them.

    swap_linears(model, checkpoint.quantization)   # meta device: nn.Linear -> quantised linear
    model.load_state_dict(..., assign=True)        # the tensors as they are in the file
    pack(model, device, dtype)                     # in place, once, on the device that runs it

A file holds plain tensors that suit every device; `pack` gives them a device's own form. A linear X
with weight [out, in] is stored as (Ip = in, padded with zeros to whole groups of g)

    int8, int8-dynamic   X.weight int8 [out, in]     X.scales fp32 [out], X.smoothing fp32 [in]
    int4                 X.weight uint8 [out, Ip/2]  X.scales, X.zeros bf16 [out, Ip/g]

int8: weight = step * scale / smoothing, and it is the inputs that are divided by the smoothing.
int4: weight = (step - 8) * scale + zero; byte j of a group holds step j in its low half and step
j + g/2 in its high half. Biases stay as they are. quantize.py writes such files; kernels.py has the
Triton kernels of a GPU. Leaves out training: nothing here has a gradient.
"""

import functools
import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpoint import TensorSpec

GROUPSIZES = (32, 64, 128, 256)
TINY = 1e-30  # a row of activations smaller than this counts as zero


def unpack_int4(packed: Tensor, groupsize: int) -> Tensor:
    """uint8 [out, Ip] steps 0..15 of packed uint8 [out, Ip/2]."""
    halves = packed.view(packed.shape[0], -1, groupsize // 2)
    return torch.cat((halves & 15, halves >> 4), dim=2).view(packed.shape[0], -1)


def pack_int4(steps: Tensor, groupsize: int) -> Tensor:
    """The inverse of `unpack_int4`."""
    low, high = steps.view(steps.shape[0], -1, 2, groupsize // 2).unbind(2)
    return (low | high << 4).view(steps.shape[0], -1)


def round_rows(x: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Steps -limit..limit (fp32) and scales [T, 1] of each row of x fp32 [T, in]."""
    scales = x.abs().amax(-1, keepdim=True).clamp_min(TINY) / limit
    return (x / scales).round(), scales


def split_planes(steps: Tensor) -> Tensor:
    """int8 [2T, in]: steps [T, in] of 16 bits as 256 * the first T rows + the second T rows."""
    high = ((steps + 128) / 256).floor()
    return torch.cat((high, steps - 256 * high)).to(torch.int8)


# ---------------------------------------------------------------- products on a CPU
# Operators of our own hide those of torch from Inductor. It takes oneDNN's packed weights for
# constants only, so would compile each layer anew, and it rewrites the 4-bit product into one that
# fails inside a nested region.

NOTHING: list = []  # no operation after the product
library = torch.library.Library("talon", "FRAGMENT")
library.define("int8_rows(Tensor rows, Tensor weight, Tensor scales, Tensor offsets) -> Tensor")
library.define("int4_rows(Tensor rows, Tensor weight, int groupsize, Tensor pairs) -> Tensor")


def int8_rows(rows: Tensor, weight: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    """fp32 [T, out]: integer products of int8 rows [T, in] with a packed weight, times its scales.

    The sums are integers and exact: a row's result does not depend on the rows beside it.
    """
    if weight.is_mkldnn:
        return torch.ops.onednn.qlinear_pointwise.default(
            rows, 1.0, 0, weight, scales, offsets, None, 1.0, 0, torch.float32, "none", NOTHING, ""
        )
    return torch._int_mm(rows, weight.t()) * scales


def int8_rows_shape(rows: Tensor, weight: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], scales.shape[0]), dtype=torch.float32)


def int4_rows(rows: Tensor, weight: Tensor, groupsize: int, pairs: Tensor) -> Tensor:
    """bf16 [T, out] of bf16 rows [T, Ip], the only dtype for which this kernel has vector code.

    pairs: bf16 [Ip/g, out, 2], scale and zero.
    """
    return torch.ops.aten._weight_int4pack_mm_for_cpu(rows, weight, groupsize, pairs)


def int4_rows_shape(rows: Tensor, weight: Tensor, groupsize: int, pairs: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], pairs.shape[1]))


for key in ("CPU", "MkldnnCPU"):
    library.impl("int8_rows", int8_rows, key)
library.impl("int8_rows", int8_rows_shape, "Meta")
library.impl("int4_rows", int4_rows, "CPU")
library.impl("int4_rows", int4_rows_shape, "Meta")


@functools.cache
def cpu_product() -> str:
    """How this CPU multiplies int8: "onednn" (packed weights), "int_mm", or "float" if both fail.

    Found by trying. oneDNN's packed form is the best where there is AMX and falls to a slow
    reference loop elsewhere; without VNNI both add products in pairs in 16 bits, which overflows.
    """
    rows, weight = extreme_int8(16, 256), extreme_int8(256, 256)
    expected = rows.double() @ weight.double().t()
    scales, offsets = torch.ones(256), torch.zeros(256, dtype=torch.int32)
    seconds = {}
    for name in ("int_mm", "onednn"):
        try:
            packed = torch.ops.onednn.qlinear_prepack(weight, None) if name == "onednn" else weight
            if torch.equal(int8_rows(rows, packed, scales, offsets).double(), expected):
                seconds[name] = shortest(lambda w=packed: int8_rows(rows, w, scales, offsets))
        except (RuntimeError, AttributeError):  # this build of torch lacks it
            continue
    if "onednn" in seconds and seconds["onednn"] < 10 * seconds.get("int_mm", math.inf):
        return "onednn"
    return "int_mm" if "int_mm" in seconds else "float"


def extreme_int8(rows: int, columns: int) -> Tensor:
    """A matrix of 127 and -127 in runs, to provoke an overflow wherever there can be one."""
    index = torch.arange(rows * columns).view(rows, columns)
    return torch.where(index // 7 % 5 == 0, -127, 127).to(torch.int8)


def shortest(call: Callable[[], object], repeats: int = 3) -> float:
    """Seconds of the fastest of a few calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


# ---------------------------------------------------------------- modules


class QuantizedLinear(nn.Module):
    """What the three kinds share: stored tensors on the meta device, a bias, packing once."""

    mode: str

    def __init__(
        self, in_features: int, out_features: int, bias: Tensor | None = None, groupsize: int = 128
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.bias, self.groupsize = bias, groupsize
        self.dtype: torch.dtype | None = None  # of the activations, known once packed
        self.route = ""  # how the device multiplies
        for name, spec in self.specs(in_features, out_features, groupsize).items():
            self.register_buffer(name, torch.empty(spec.shape, dtype=spec.dtype, device="meta"))

    @staticmethod
    def specs(in_features: int, out_features: int, groupsize: int) -> dict[str, TensorSpec]:
        """The stored tensors, by their short names."""
        raise NotImplementedError

    def pack(self, device: torch.device, dtype: torch.dtype) -> None:
        raise NotImplementedError

    def replace(self, **tensors: Tensor) -> None:
        """Put packed tensors in the place of stored ones; they are no part of a state dict."""
        for name, tensor in tensors.items():
            self._buffers.pop(name, None)
            self.register_buffer(name, tensor, persistent=False)

    def finish(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Add the bias to fp32 [T, out] and round to the dtype of the activations."""
        return (y if self.bias is None else y + self.bias.float()).to(dtype)


class Int8Linear(QuantizedLinear):
    """int8 weights, one scale per output. Activations: 16 bits on a CPU, their dtype on a GPU."""

    mode = "int8"

    @staticmethod
    def specs(in_features: int, out_features: int, groupsize: int) -> dict[str, TensorSpec]:
        return {
            "weight": TensorSpec(torch.int8, (out_features, in_features)),
            "scales": TensorSpec(torch.float32, (out_features,)),
            "smoothing": TensorSpec(torch.float32, (in_features,)),
        }

    def pack(self, device: torch.device, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.route = "triton" if device.type == "cuda" else cpu_product()
        weight = self.weight
        if self.route == "onednn":
            weight = torch.ops.onednn.qlinear_prepack(weight, None)
        if self.route == "float":
            weight = weight * self.scales[:, None]
        offsets = torch.zeros(self.out_features, dtype=torch.int32, device=device)
        self.replace(weight=weight, offsets=offsets, smoothing=1 / self.smoothing)

    def multiply(self, rows: Tensor) -> Tensor:
        """fp32 [T, out] of int8 rows [T, in] on a CPU."""
        return torch.ops.talon.int8_rows(rows, self.weight, self.scales, self.offsets)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out] in the dtype of x."""
        smooth = x.float() * self.smoothing
        if self.route == "triton":
            y = torch.ops.talon.w8a16(smooth.to(x.dtype), self.weight, self.scales)
        elif self.route == "float":
            y = F.linear(smooth, self.weight)
        else:
            # A second plane of int8 rows costs less than any kernel that widens the weights.
            steps, scales = round_rows(smooth, 127 * 256)
            high, low = self.multiply(split_planes(steps)).chunk(2)
            y = (high * 256 + low) * scales
        return self.finish(y, x.dtype)


class Int8DynamicLinear(Int8Linear):
    """int8 weights times int8 activations, which are rounded row by row."""

    mode = "int8-dynamic"

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out] in the dtype of x."""
        steps, scales = round_rows(x.float() * self.smoothing, 127)
        if self.route == "triton":
            y = torch.ops.talon.w8a8(steps.to(torch.int8), self.weight, self.scales)
        elif self.route == "float":
            y = F.linear(steps, self.weight)
        else:
            y = self.multiply(steps.to(torch.int8))
        return self.finish(y * scales, x.dtype)


class Int4Linear(QuantizedLinear):
    """4-bit weights in groups along the inputs, each group with a scale and a zero."""

    mode = "int4"

    @staticmethod
    def specs(in_features: int, out_features: int, groupsize: int) -> dict[str, TensorSpec]:
        groups = -(-in_features // groupsize)
        return {
            "weight": TensorSpec(torch.uint8, (out_features, groups * groupsize // 2)),
            "scales": TensorSpec(torch.bfloat16, (out_features, groups)),
            "zeros": TensorSpec(torch.bfloat16, (out_features, groups)),
        }

    def pack(self, device: torch.device, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.route = "triton" if device.type == "cuda" else "tinygemm"
        if self.route == "triton":
            by_group = {name: getattr(self, name).t().contiguous() for name in ("scales", "zeros")}
            self.replace(**by_group, weight=self.weight)
            return
        more = -self.out_features % 16  # the CPU's kernel wants outputs in sixteens
        steps = F.pad(unpack_int4(self.weight, self.groupsize), (0, 0, 0, more)).int()
        pairs = F.pad(torch.stack((self.scales, self.zeros), 2), (0, 0, 0, 0, 0, more))
        del self._buffers["zeros"]
        self.replace(
            weight=torch.ops.aten._convert_weight_to_int4pack_for_cpu(steps, 2),
            scales=pairs.transpose(0, 1).contiguous(),  # [Ip/g, out, 2]
        )

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out] in the dtype of x."""
        padding = -self.in_features % self.groupsize
        rows = F.pad(x, (0, padding)) if padding else x
        if self.route == "triton":
            y = torch.ops.talon.w4a16(rows, self.weight, self.scales, self.zeros, self.groupsize)
        else:
            y = torch.ops.talon.int4_rows(rows.bfloat16(), self.weight, self.groupsize, self.scales)
            y = y[:, : self.out_features].float()
        return self.finish(y, x.dtype)


LINEARS: dict[str, type[QuantizedLinear]] = {
    kind.mode: kind for kind in (Int8Linear, Int8DynamicLinear, Int4Linear)
}


# ---------------------------------------------------------------- whole models


def swap_linears(module: nn.Module, quantization: dict | None) -> None:
    """Replace, on the meta device, each linear that `quantization` names by its quantised form.

    Raises ValueError for a mode, a group size or a layer that this program does not know.
    """
    quantization = quantization or {"layers": {}}
    groupsize = quantization.get("groupsize") or GROUPSIZES[0]
    if groupsize not in GROUPSIZES:
        raise ValueError(f"group size {groupsize} is not one of {GROUPSIZES}; quantise again")
    for name, mode in quantization["layers"].items():
        if mode not in LINEARS:
            known = ", ".join(LINEARS)
            raise ValueError(
                f"{name} has the unknown mode {mode!r}; known: {known}; quantise again"
            )
        parent, _, child = name.rpartition(".")
        try:
            linear = module.get_submodule(name)
        except AttributeError:
            raise ValueError(f"{name} is quantised but no layer of this model") from None
        swapped = LINEARS[mode](linear.in_features, linear.out_features, linear.bias, groupsize)
        setattr(module.get_submodule(parent), child, swapped)


def pack(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give each quantised linear that has it not yet the form that `device` multiplies with.

    dtype: of the activations, and of what `unpacked` returns.
    """
    linears = [m for m in module.modules() if isinstance(m, QuantizedLinear) and not m.route]
    if linears and device.type == "cuda":
        register_kernels()
    for linear in linears:
        linear.pack(device, dtype)


def register_kernels() -> None:
    """Import the Triton kernels, which registers them; ValueError where Triton is missing."""
    try:
        import kernels  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"quantised layers on a GPU need Triton ({error}): pip install triton"
        ) from None


@torch.no_grad()
def unpacked(linear: QuantizedLinear) -> nn.Linear:
    """A plain linear with the weights of a packed one, in the dtype that it was packed for."""
    identity = torch.eye(linear.in_features, device=linear.scales.device)
    bias, linear.bias = linear.bias, None
    weight = torch.cat([linear(rows) for rows in identity.split(64)]).t()
    linear.bias = bias
    plain = nn.Linear(linear.in_features, linear.out_features, bias is not None, device="meta")
    plain.weight = nn.Parameter(weight.to(linear.dtype).contiguous(), requires_grad=False)
    plain.bias = bias
    return plain
