"""Machine code of the GPU kernels, compiled without a GPU: what test_gpu_kernels.py budgets.

What a multiprocessor of an RTX 3090 (sm_86) does in a clock: four schedulers issue one instruction
of a warp each; a tensor core of each needs 32 clocks for m16n8k16 in 16 bits, with fp32 sums, and
16 for m16n8k32 in 8 bits; the memory gives 6.7 bytes (936 GB/s, 82 multiprocessors, 1.7 GHz).
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED, REGISTERS = 100 << 10, 64 << 10  # of one multiprocessor
BYTES_A_CLOCK = 936e9 / 82 / 1.7e9


@dataclass
class Code:
    """One compiled kernel. `loop` is its largest loop with tensor cores, or else its largest."""

    registers: int
    stack: int
    shared: int
    warps: int
    loop: list[str]
    layouts: set[str]  # warps of a program over the outputs of a matrix multiplication
    ptx: str

    @property
    def programs(self) -> int:
        """How many fit one multiprocessor."""
        return min(SHARED // (self.shared + 1024), REGISTERS // (32 * self.warps * self.registers))

    def count(self, name: str) -> int:
        return sum(bool(re.match(rf"(@!?U?P\d+ )?{name}\b", line)) for line in self.loop)

    @property
    def issue(self) -> float:
        """Clocks that one program's turn of the loop takes to issue."""
        return len(self.loop) * self.warps / 4

    @property
    def tensor(self) -> float:
        """Clocks that its tensor cores take, at least."""
        return (32 * self.count("HMMA") + 16 * self.count("IMMA")) * self.warps / 4


def machine_code(kernel, types: dict, constants: dict, aligned=(), warps=4, target=86) -> Code:
    """Compile a kernel for pointers that are aligned and sizes named in `aligned` that are
    multiples of 16. An argument without a type is None."""
    names = kernel.arg_names
    given = {n: constants.get(n) for n in names if n not in types}
    source = ASTSource(
        fn=kernel,
        signature={n: types.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): value for n, value in given.items()},
        attrs={
            (names.index(n),): [["tt.divisibility", 16]]
            for n, kind in types.items()
            if kind.startswith("*") or n in aligned
        },
    )
    options = {"num_warps": warps, "num_stages": constants.get("STAGES", 2)}
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        listing = run(TOOLS / "nvdisasm", "-c", file.name)
        usage = run(TOOLS / "cuobjdump", "-res-usage", file.name)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return Code(
        registers, stack, compiled.metadata.shared, warps, largest_loop(listing),
        set(re.findall(r"#mma\d* = .*?warpsPerCTA = (\[.*?\])", compiled.asm["ttgir"])),
        compiled.asm["ptx"],
    )  # fmt: skip


def run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def largest_loop(listing: str) -> list[str]:
    """The instructions from a label to the last jump back to it, of the loop that matters."""
    lines = []
    for line in listing.splitlines():
        found = re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line) or re.match(r"(\.L_x_\d+):", line)
        if found:
            lines.append(found[1].strip())
    labels = {line: i for i, line in enumerate(lines) if line.startswith(".L_x_")}
    loops = []
    for i, line in enumerate(lines):
        jump = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        if jump and labels.get(jump[1], i) < i:
            loops.append([x for x in lines[labels[jump[1]] : i + 1] if not x.startswith(".L_x_")])
    return max(loops, key=lambda body: (sum("MMA" in x for x in body), len(body)), default=[])


# ---------------------------------------------------------------- the kernels as they are launched


def linear_code(form: str, rows: int, dtype: str = "bf16", end: str = "plain", **options) -> Code:
    """form: 16, int8, int8-dynamic or int4, of groups of 128 (group=64, 32)."""
    from talon.kernels.gpu_linear import linear_kernel

    group, even, target = (
        options.get(k, v) for k, v in (("group", 128), ("even", True), ("target", 86))
    )
    rounded, int4 = form == "int8-dynamic", form == "int4"
    weight = {"16": f"*{dtype}", "int4": "*u8"}.get(form, "*i8")
    types = {"x": "*i8" if rounded else f"*{dtype}", "weight": weight, "out": f"*{dtype}"}
    types |= {"parts": "*i32" if rounded else "*fp32", "arrived": "*i32", "bias": f"*{dtype}"}
    types |= {"beside": "*fp32"} if rounded or int4 else {}
    types |= {} if form == "16" else {"scales": "*i32" if int4 else "*fp32"}
    types |= {"residual": f"*{dtype}"} if end == "plain" else {}
    if end == "qkv":
        types |= {"rope": "*fp32", "length": "*i64", "ancestors": "*i1", "kv": f"*{dtype}"}
    types |= dict.fromkeys(
        ("turns", "nodes", "T", "N", "K", "part", "groups", "apart", "G", "R"), "i32"
    )
    constants = {
        "FORM": "int8" if rounded else form, "END": end, "ROWS": rows,
        "COLUMNS": 64 if int4 and rows == 64 else 128, "INNER": 128 if int4 and group > 32 else 64,
        "TWO": int4 and group < 128, "EVEN": even, "STAGES": 3 if form == "16" or rows > 16 else 4,
        "NODES": 64,
    }  # fmt: skip
    return machine_code(linear_kernel, types, constants, ("N", "K", "apart"), target=target)


def parts_code(rows: int, size: int, causal: bool, dtype="bf16", target=86, heads=4) -> Code:
    from talon.kernels.gpu_attention import parts_kernel

    types = {"q": f"*{dtype}", "kv": f"*{dtype}", "length": "*i64", "states": "*fp32"}
    types |= dict.fromkeys(("T", "H", "G", "R"), "i32") | {"scale": "fp32"}
    constants = {"M": rows, "D": size, "HEADS": heads, "CAUSAL": causal, "STAGES": 3}
    return machine_code(parts_kernel, types, constants, target=target)


def rest_code(tree: bool, mode: str, size=128, heads=4, nodes=64, dtype="bf16", target=86) -> Code:
    from talon.kernels.gpu_attention import rest_kernel

    types = {"q": f"*{dtype}", "kv": f"*{dtype}", "length": "*i64", "states": "*fp32"}
    types |= {"ancestors": "*i1"} if tree else {}
    types |= {"factors": "*fp32", "y": f"*{dtype}", "beside": "*fp32", "arrived": "*i32"}
    types |= {"out": "*i8" if mode == "int8" else f"*{dtype}", "scale": "fp32"}
    types |= dict.fromkeys(("H", "G", "R", "N", "parts", "padded", "groups"), "i32")
    constants = {
        "M": 16 if tree else heads, "D": size, "HEADS": heads, "NODES": nodes, "MODE": mode,
        "GROUP": 128, "ROW": 4096,
    }  # fmt: skip
    return machine_code(rest_kernel, types, constants, target=target)


def ready_code(op: str, mode: str, block: int = 4096, dtype: str = "bf16", target=86) -> Code:
    from talon.kernels.gpu_rows import ready_kernel

    types = {"x": f"*{dtype}", "weight": "*fp32", "beside": "*fp32", "eps": "fp32"}
    types |= {"y": "*i8" if mode == "int8" else f"*{dtype}", "C": "i32", "groups": "i32"}
    constants = {"OP": op, "MODE": mode, "GROUP": 128, "BLOCK": block}
    return machine_code(ready_kernel, types, constants, ("C",), warps=8, target=target)


def heads_code(size: int, dtype: str = "bf16", target=86) -> Code:
    from talon.kernels.gpu_linear import heads_kernel

    types = dict.fromkeys(("qkv", "norms", "out", "kv"), f"*{dtype}")
    types |= {"rope": "*fp32", "length": "*i64", "ancestors": "*i1", "eps": "fp32"}
    types |= dict.fromkeys(("turns", "nodes", "T", "HEADS", "G", "R", "HALF"), "i32")
    constants = {"BLOCK": size // 2, "NODES": 64}
    return machine_code(heads_kernel, types, constants, warps=1, target=target)


def best_code(kind: str, top: int, dtype: str = "bf16", target=86) -> Code:
    from talon.kernels.gpu_choice import best_kernel

    types = {"logits": f"*{dtype}", "arrived": "*i32", "found": "*i64", "sums": "*fp32"}
    types |= {"tokens": "*i64", "scores": "*fp32", "V": "i32"}
    if kind != "greedy":
        types |= {"positions": "*i64", "temperature": "*fp32", "seed": "*i64"}
    types |= {"limits": "*i32"} if kind == "filter" else {}
    types |= {"ids": "*i64", "above": "*fp32"} if top > 1 else {}
    constants = {"TOP": top, "BLOCK": 4096, "BLOCKS": 32, "COUNT": 512 if top > 1 else 32}
    return machine_code(best_kernel, types, constants, ("V",), 8, target)
