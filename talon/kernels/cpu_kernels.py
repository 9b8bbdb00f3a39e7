"""Few rows on a CPU: compiles cpu_kernels.cpp once and registers its operators.

The operators are those of the library `talon`: matrix multiplications fp32 [T, K] -> fp32 [T, O],
and attention. A row's result does not depend on the rows next to it. TALON_CPU_LEVEL names a lesser
CPU to compile for. Leaves out many rows of floats, for which torch's own operators are right."""

import functools
import hashlib
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from talon.graphs import remove_broken_libraries

SOURCE = Path(__file__).with_suffix(".cpp")

# They follow those of torch.compile, made for other code. Not fusing is part of the arithmetic.
FLAGS = ("-O2", "-g0", "-ffp-contract=off")
GCC_FLAGS = ("-ftree-loop-vectorize",)
# How quantised layers multiply, and what makes a better CPU do as that one.
ROUTES = ("floats", "avx2", "avxvnni", "vnni", "amx")
LESSER = "-mno-avx2", "-mno-avx512f -mno-avxvnni", "-DTALON_NARROW", "-mno-amx-int8", ""
MOST_ROWS = {torch.float32: 256, torch.bfloat16: 64}  # beyond that torch's library is faster
MOST_INPUTS = 65793  # 255 * 128 * inputs must fit 32 bits


def compile_operators(level: str) -> None:
    """Compile the source, or take what an earlier run compiled, which may be damaged."""
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.cpp_builder import is_gcc

    remove_broken_libraries()
    # What is kept on disk belongs to this kind of CPU: -march=native says nothing about it.
    cpu = hashlib.sha256(repr(sorted(torch.cpu.get_capabilities().items())).encode())
    flags = (*FLAGS, *LESSER[ROUTES.index(level)].split(), *(GCC_FLAGS if is_gcc() else ()))
    flags = (f"-DTALON_CPU=0x{cpu.hexdigest()[:8]}", *flags)
    CppCodeCache.load(SOURCE.read_text("utf-8"), extra_flags=flags, needs_vec_isa=False)
    for name in ("float_rows", "int8_rows", "int4_rows"):
        library.register_fake(f"talon::{name}", lambda x, w, *_: x.new_empty(len(x), len(w)))
    library.register_fake("talon::integer_rows", lambda x, w, s, *_: x.new_empty(len(x), len(s)))
    library.register_fake("talon::grouped_rows", lambda x, w, *_: x.new_empty(len(x), 16 * len(w)))
    library.register_fake("talon::attend", lambda q, *_: q.new_empty(len(q), q[0].numel()))


@functools.cache
def load_or_reason(level: str) -> int | str:
    """`load`, tried once in a process, which returns why the operators cannot be had."""
    from torch import _dynamo  # noqa: F401  fails where torch has no cache: its own error

    try:
        compile_operators(level)
    except Exception as error:  # torch has many kinds, and some hold pages of a compiler's output
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return next((x for x in lines if "error:" in x), lines[-1] if lines else repr(error))
    return torch.ops.talon.integer_level()


def load() -> int:
    """Make the operators available, or ValueError. Returns the index in ROUTES of what they use."""
    level, known = os.environ.get("TALON_CPU_LEVEL", "amx"), ", ".join(ROUTES)
    if level not in ROUTES:  # no ValueError: it is no reason to do without operators
        raise OSError(f"TALON_CPU_LEVEL {level!r} is not known: unset it or give one of {known}")
    found = load_or_reason(level)
    if isinstance(found, str):
        raise ValueError(
            f"{SOURCE.name} cannot be compiled here ({found}): it needs a C++ compiler such as g++ "
            "(CXX names another one) and a cache that can be written and executed from; delete the "
            f"cache {os.environ.get('TORCHINDUCTOR_CACHE_DIR')} if it is damaged"
        )
    return found


def integer_route() -> str:
    """How quantised layers multiply, one of ROUTES. ValueError where nothing can be compiled."""
    try:
        return ROUTES[load()]
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


def deinterleave_groups(
    weight: Tensor, scales: Tensor, zeros: Tensor, outputs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `interleave_groups`: the first `outputs` rows of each tensor."""
    padded, groups = 16 * weight.shape[0], weight.shape[1]
    by_row = weight.permute(0, 3, 1, 2, 4).reshape(padded, -1)
    scales, zeros = (t.transpose(1, 2).reshape(padded, groups) for t in (scales, zeros))
    return by_row[:outputs], scales[:outputs], zeros[:outputs]


class RowsLinear(nn.Linear):
    """The tensors of an fp32 or bf16 linear layer, in one that is fast for a few rows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.most_rows = MOST_ROWS[linear.weight.dtype]

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > self.most_rows:
            return F.linear(x, self.weight, self.bias)
        y = torch.ops.talon.float_rows(x.float().contiguous(), self.weight)
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)


def attend_rows(q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
    """`model.attend` for fp32 and bf16: no key is read past the last that some token sees."""
    return torch.ops.talon.attend(q.float().contiguous(), kv, mask.contiguous()).to(q.dtype)
