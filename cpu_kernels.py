"""Products of a few rows on a CPU: compiles cpu_kernels.cpp once and registers its operators.

Operators of the library `talon`, all fp32 [T, K] -> fp32 [T, O]. A row's result does not depend on
the rows beside it. Leaves out: many rows, for which torch's own products are right."""

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cli import note
from model import Attention, attend

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-ftree-loop-vectorize",)  # what torch.compile's own flags, which are used, leave out
MOST_ROWS = 64  # beyond that a product is bound by arithmetic, and torch's library is faster


@functools.cache
def load() -> int:
    """Compile and register the operators. Returns what int8 rows may use: 2 AMX, 1 VNNI, 0 none.

    ValueError where there is no C++ compiler that does it."""
    from torch._inductor.codecache import CppCodeCache

    source = SOURCE.read_text(encoding="utf-8")
    try:
        CppCodeCache.load(source, extra_flags=FLAGS, needs_vec_isa=False)
    except Exception as error:  # torch has many kinds, and some hold pages of a compiler's output
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = next(
            (line for line in lines if "error" in line), (lines or ["no reason given"])[0]
        )
        raise ValueError(
            f"{SOURCE.name} cannot be compiled here ({reason.strip()}): it needs a C++ compiler "
            "such as g++ (CXX names another one)"
        ) from error
    for name in ("fp32_rows", "int8_rows", "int4_rows", "integer_rows", "grouped_rows"):
        torch.library.register_fake(f"talon::{name}", shape_of)
    torch.library.register_fake("talon::attend", lambda q, *_: q.new_empty((len(q), q[0].numel())))
    return torch.ops.talon.integer_level()


def integer_route() -> str:
    """How int8 layers multiply: with "amx" or "vnni", or as "floats" where the CPU has neither."""
    return ("floats", "vnni", "amx")[load()]


def shape_of(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
    """The result's shape, for tracing: a packed weight has its number of outputs elsewhere."""
    outputs = {2: weight.shape[0], 4: rest and rest[0].shape[0], 5: 16 * weight.shape[0]}
    return x.new_empty((x.shape[0], outputs[weight.dim()]))


def interleave(weight: Tensor) -> Tensor:
    """uint8 [Op/16, Kp/4, 16, 4] of int8 [O, K]: + 128, padded to 64 outputs and 64 inputs."""
    padding = (0, -weight.shape[1] % 64, 0, -weight.shape[0] % 64)
    shifted = F.pad((weight.to(torch.int16) + 128).to(torch.uint8), padding, value=128)
    outputs, inputs = shifted.shape
    return shifted.view(outputs // 16, 16, inputs // 4, 4).transpose(1, 2).contiguous()


def deinterleave(weight: Tensor) -> Tensor:
    """The inverse of `interleave`: int8 [Op, Kp], the padding kept."""
    blocks, fours = weight.shape[:2]
    flat = weight.transpose(1, 2).reshape(16 * blocks, 4 * fours)
    return (flat.to(torch.int16) - 128).to(torch.int8)


def interleave_groups(
    weight: Tensor, scales: Tensor, zeros: Tensor, groupsize: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The three tensors of `grouped_rows` from those of `int4_rows`, outputs padded to 16."""
    more = (0, 0, 0, -weight.shape[0] % 16)
    weight, scales, zeros = (F.pad(t, more) for t in (weight, scales, zeros))
    blocks, groups = weight.shape[0] // 16, scales.shape[1]
    weight = weight.view(blocks, 16, groups, groupsize // 8, 4).permute(0, 2, 3, 1, 4)
    scales, zeros = (t.view(blocks, 16, groups).transpose(1, 2) for t in (scales, zeros))
    return weight.contiguous(), scales.contiguous(), zeros.contiguous()


def deinterleave_groups(weight: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, ...]:
    """The inverse of `interleave_groups`, the padding kept."""
    outputs, groups = 16 * weight.shape[0], weight.shape[1]
    by_row = weight.permute(0, 3, 1, 2, 4).reshape(outputs, -1)
    return by_row, *(t.transpose(1, 2).reshape(outputs, groups) for t in (scales, zeros))


class RowsLinear(nn.Linear):
    """An fp32 linear layer that is fast for a few rows."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > MOST_ROWS:
            return F.linear(x, self.weight, self.bias)
        y = torch.ops.talon.fp32_rows(x.contiguous(), self.weight)
        return y if self.bias is None else y + self.bias


def attend_rows(q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
    """`model.attend` for fp32, fast for a few rows."""
    if q.shape[0] > MOST_ROWS:
        return attend(q, kv, mask)
    return torch.ops.talon.attend(q.contiguous(), kv, mask.contiguous())


def speed_up(module: nn.Module) -> None:
    """Let the fp32 products of a module on a CPU, attention's too, run by the operators above."""
    try:
        load()
    except ValueError as error:
        note(f"note: {error}; torch's own products are used, which are slower for a few rows")
        return
    for parent in list(module.modules()):
        if isinstance(parent, Attention):
            parent.attend = attend_rows
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.float32:
                fast = RowsLinear(1, 1, bias=False, device="meta")
                fast.in_features, fast.out_features = child.in_features, child.out_features
                fast.weight, fast.bias = child.weight, child.bias
                setattr(parent, name, fast)
