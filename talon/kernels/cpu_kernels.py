"""Products of a few rows on a CPU: compiles cpu_kernels.cpp once and registers its operators.

Operators of the library `talon`, fp32 [T, K] -> fp32 [T, O], and attention. A row's result does not
depend on the rows beside it. Leaves out: many rows, for which torch's own products are right."""

import functools
import hashlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from model import Attention, attend
from talon.cli import note

SOURCE = Path(__file__).with_suffix(".cpp")

# After those of torch.compile, which are made for other code. Not fusing is part of the arithmetic.
FLAGS = ("-O2", "-g0", "-ffp-contract=off")

GCC_FLAGS = ("-ftree-loop-vectorize",)

MOST_ROWS = 64  # beyond that a product is bound by arithmetic, and torch's library is faster

MOST_INPUTS = 65793  # 255 * 128 * inputs must fit 32 bits


@functools.cache
def attempt() -> int | str:
    """Compile and register the operators: what integers may use (2 AMX, 1 VNNI, 0 neither), or why
    there are none."""
    try:
        from torch._inductor.codecache import CppCodeCache
        from torch._inductor.cpp_builder import is_gcc

        source = SOURCE.read_text(encoding="utf-8")
        # What is kept on disk belongs to this kind of CPU: -march=native says nothing about it.
        cpu = hashlib.sha256(repr(sorted(torch.cpu.get_capabilities().items())).encode())
        flags = (f"-DTALON_CPU=0x{cpu.hexdigest()[:8]}", *FLAGS, *(GCC_FLAGS if is_gcc() else ()))
        CppCodeCache.load(source, extra_flags=flags, needs_vec_isa=False)
    except Exception as error:  # torch has many kinds, and some hold pages of a compiler's output
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return next((x for x in lines if "error:" in x), lines[-1] if lines else repr(error))
    for name in ("fp32_rows", "int8_rows", "int4_rows"):
        library.register_fake(f"talon::{name}", lambda x, w, *_: shape(x, w.shape[0]))
    library.register_fake("talon::integer_rows", lambda x, w, s, *_: shape(x, s.shape[0]))
    library.register_fake("talon::grouped_rows", lambda x, w, *_: shape(x, 16 * w.shape[0]))
    library.register_fake("talon::attend", lambda q, *_: shape(q, q.shape[1] * q.shape[2]))
    return torch.ops.talon.integer_level()


def shape(x: Tensor, outputs: int) -> Tensor:
    return x.new_empty((x.shape[0], outputs))


def load() -> int:
    """What integer operators may use, once all are there: 2 AMX, 1 VNNI, 0 neither.

    ValueError where they cannot be compiled."""
    found = attempt()
    if isinstance(found, str):
        raise ValueError(
            f"{SOURCE.name} cannot be compiled here ({found}): it needs a C++ compiler such as g++ "
            "(CXX names another one) and a cache directory that can be written and executed from"
        )
    return found


def integer_route() -> str:
    """How quantised layers multiply: with "amx", "vnni", or as "floats" where the CPU has neither.

    ValueError where nothing can be compiled."""
    try:
        return ("floats", "vnni", "amx")[load()]
    except ValueError as error:
        raise ValueError(f"{error}; without it, use the checkpoint that is not quantised") from None


def interleave(weight: Tensor) -> Tensor:
    """uint8 [Op/16, Kp/4, 16, 4] of int8 [O, K]: + 128, padded to 64 outputs and 64 inputs."""
    if weight.shape[1] > MOST_INPUTS:
        raise ValueError(f"{weight.shape[1]} inputs are too many for int8 on a CPU: use int4")
    padding = (0, -weight.shape[1] % 64, 0, -weight.shape[0] % 64)
    padded = F.pad(weight, padding).view(torch.uint8) ^ 128  # + 128 is another sign bit
    outputs, inputs = padded.shape
    return padded.view(outputs // 16, 16, inputs // 4, 4).transpose(1, 2).contiguous()


def deinterleave(weight: Tensor) -> Tensor:
    """The inverse of `interleave`: int8 [Op, Kp], the padding kept."""
    blocks, fours = weight.shape[:2]
    return (weight.transpose(1, 2).reshape(16 * blocks, 4 * fours) ^ 128).view(torch.int8)


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
    """An fp32 linear layer [T, in] -> [T, out] that is fast for a few rows."""

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
        tell_once(f"note: {error}; torch's own products are used, which are slower for a few rows")
        return
    for parent in list(module.modules()):
        if isinstance(parent, Attention):
            parent.attend = attend_rows
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.float32:
                fast = RowsLinear(
                    child.in_features, child.out_features, child.bias is not None, device="meta"
                )
                fast.weight, fast.bias = child.weight, child.bias
                setattr(parent, name, fast)


tell_once = functools.cache(note)
