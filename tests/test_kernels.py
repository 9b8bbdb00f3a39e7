"""The Triton kernels: numbers in the interpreter, code for sm_86, speed where there is a GPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import unpack_int4

triton = pytest.importorskip("triton")

# ruff: noqa: E402
from talon.kernels import triton_kernels as kernels
from talon.kernels.linear import quantize_int4, quantize_int8

ROOT = Path(__file__).resolve().parent.parent
SHARED_MEMORY = 99 * 1024  # of one block on sm_86
# (outputs, inputs) of wqkv, wo, w13, w2, lm_head
MODELS = {
    "LLaMA-2-7B": [(12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008), (32000, 4096)],
    "LLaMA-2-13B": [(15360, 5120), (5120, 5120), (27648, 5120), (5120, 13824), (32000, 5120)],
    "LLaMA-3-8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
}
SHAPES = sorted({shape for shapes in MODELS.values() for shape in shapes})
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

# (rows, inputs, outputs): one row, every padding, odd sizes, several parts, more than 64 rows
CASES = [
    (1, 72, 100), (1, 2048, 64), (2, 576, 96), (7, 100, 33), (16, 256, 64), (17, 576, 130),
    (26, 1536, 80), (32, 288, 64), (33, 1024, 130), (64, 512, 64), (70, 200, 65),
]  # fmt: skip


def interpreted() -> dict[str, float]:
    """The worst relative error of each kernel over the cases. Needs TRITON_INTERPRET=1."""
    torch.manual_seed(0)
    worst: dict[str, float] = {}

    def note(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        error = float((got.double() - expected).norm() / expected.norm())
        worst[name] = max(worst.get(name, 0.0), error)

    for rows, inputs, outputs in CASES:
        x = torch.randn(rows, inputs, dtype=torch.float16)
        weight = torch.randn(outputs, inputs)
        steps, scales = quantize_int8(weight)
        plain = steps.double() * scales.double()[:, None]
        got = kernels.int8_parts(kernels.int8_kernel, x, steps).sum(0) * scales
        note("w8a16", got, x.double() @ plain.t())
        whole = torch.randint(-127, 128, x.shape, dtype=torch.int8)
        got = kernels.int8_parts(kernels.int8_kernel, whole, steps).sum(0)
        note("w8a8", got, whole.double() @ steps.double().t())
        for groupsize in (32, 64, 128, 256):
            packed, scale, zero = quantize_int4(weight, groupsize)
            padded = torch.nn.functional.pad(x, (0, -inputs % groupsize))
            by_group = (unpack_int4(packed, groupsize).double() - 8).view(outputs, -1, groupsize)
            plain = (by_group * scale.double()[..., None] + zero.double()[..., None]).flatten(1)
            layer = (packed, scale.t().contiguous(), zero.t().contiguous(), groupsize)
            got = kernels.int4_parts(kernels.int4_kernel, padded, *layer).sum(0)
            note(f"w4a16 g{groupsize}", got, padded.double() @ plain.t())
    return worst


def test_interpreted_kernels_equal_the_dequantised_product() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    code = "import json, test_kernels; print(json.dumps(test_kernels.interpreted()))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    worst = json.loads(done.stdout.splitlines()[-1])
    assert len(worst) == 6
    assert worst.pop("w8a8") == 0.0
    assert max(worst.values()) < 1e-5, worst


def compile_for_sm86(
    kernel, pointers: dict[str, str], constants: dict[str, object], launch
) -> dict:
    """Shared memory, PTX, registers and spilled bytes of a kernel compiled without a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names
    }
    # What the launcher would find out by itself: sizes that are multiples of 16, aligned pointers.
    aligned = set(pointers) | {"N", "K", "part"} if "K" in names else set(pointers) | {"N"}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 86, 32), options=options)
    return {"shared": compiled.metadata.shared, "ptx": compiled.asm["ptx"]} | assemble(
        compiled.asm["ptx"]
    )


def assemble(ptx: str) -> dict:
    """What the assembler that comes with Triton says about registers and spills."""
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    done = subprocess.run(
        [str(assembler), "-v", "--gpu-name", "sm_86", "-o", os.devnull, "/dev/stdin"],
        input=ptx,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill", done.stderr)
    assert len(spills) == 2, done.stderr
    registers = int(re.search(r"Used (\d+) registers", done.stderr)[1])
    return {"spilled": sum(map(int, spills)), "registers": registers}


def check(found: dict, instruction: str) -> None:
    assert found["spilled"] == 0
    assert found["registers"] <= 255
    assert found["shared"] <= SHARED_MEMORY
    assert instruction in found["ptx"]
    assert "cp.async" in found["ptx"]  # loads run ahead of the products


@pytest.mark.slow
@pytest.mark.parametrize("rows", sorted(kernels.INT8_LAUNCHES))
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "i8"])
def test_int8_kernel_compiles_for_sm86(dtype: str, rows: int) -> None:
    launch = kernels.INT8_LAUNCHES[rows]
    pointers = {"x": f"*{dtype}", "weight": "*i8", "out": "*i32" if dtype == "i8" else "*fp32"}
    constants = {
        "ROWS": launch.rows, "COLUMNS": kernels.COLUMNS, "INNER": launch.inner, "EVEN": True
    }  # fmt: skip
    instruction = {"fp16": "f32.f16.f16.f32", "bf16": "f32.bf16.bf16.f32", "i8": "s32.s8.s8.s32"}
    check(compile_for_sm86(kernels.int8_kernel, pointers, constants, launch), instruction[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("rows", sorted(kernels.INT4_LAUNCHES))
@pytest.mark.parametrize("groupsize", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_int4_kernel_compiles_for_sm86(dtype: str, groupsize: int, rows: int) -> None:
    launch = kernels.INT4_LAUNCHES[rows]
    pointers = {
        "x": f"*{dtype}", "x_sums": "*fp32", "weight": "*u8", "scales": "*bf16", "zeros": "*bf16",
        "out": "*fp32",
    }  # fmt: skip
    constants = {"ROWS": launch.rows, "COLUMNS": kernels.COLUMNS, "HALF": groupsize // 2}
    instruction = {"fp16": "f32.f16.f16.f32", "bf16": "f32.bf16.bf16.f32"}
    check(compile_for_sm86(kernels.int4_kernel, pointers, constants, launch), instruction[dtype])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_split_fills_the_gpu_and_meets_the_assumptions_of_the_compiled_kernels(shape) -> None:
    outputs, inputs = shape
    for steps in (inputs // 128, inputs // 32):
        split = kernels.split_of(outputs, steps)
        programs = -(-outputs // kernels.COLUMNS) * split
        assert programs >= 3 * kernels.SMS or steps // (2 * split) < 4
        assert split <= 16
    assert all(inputs % launch.inner == 0 for launch in kernels.INT8_LAUNCHES.values())
    assert outputs % 16 == 0 and inputs % 16 == 0


def test_fp32_rows_are_split_into_two_halves_that_add_up() -> None:
    weight = torch.randn(8, 40, dtype=torch.float64)
    x = torch.randn(3, 40)
    got = kernels.with_halves(lambda rows: (rows.double() @ weight.t())[None], x)
    assert (got - x.double() @ weight.t()).norm() < 1e-4 * got.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_operators_keep_a_compiled_graph_whole(dtype: torch.dtype) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def layers(x, w8, scales, w4, scale, zero) -> torch.Tensor:
        eight = torch.ops.talon.w8a16(x, w8, scales)
        dynamic = torch.ops.talon.w8a8(x.char(), w8, scales)
        return eight + dynamic + torch.ops.talon.w4a16(x, w4, scale, zero, 64)

    torch._dynamo.reset()
    compiled = torch.compile(layers, fullgraph=True, backend="eager")
    with FakeTensorMode():  # shapes and dtypes of a GPU's tensors, without the GPU
        new = torch.empty
        w8, scales = new(640, 1024, dtype=torch.int8, device="cuda"), new(640, device="cuda")
        w4 = new(640, 512, dtype=torch.uint8, device="cuda")
        pair = [new(16, 640, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        for rows in (1, 26, 100):
            y = compiled(new(rows, 1024, dtype=dtype, device="cuda"), w8, scales, w4, *pair)
            assert y.shape == (rows, 640) and y.dtype == torch.float32


# ---------------------------------------------------------------- on a GPU


def milliseconds(call, repeats: int = 50) -> float:
    """Median time of a call, each on weights that the cache has forgotten."""
    flush = torch.empty(1 << 25, dtype=torch.int32, device="cuda")
    times = []
    for _ in range(repeats):
        flush.zero_()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def gpu_layer(shape: tuple[int, int], bits: int) -> tuple:
    """Random stored tensors of a layer on the GPU, for the operator of that many bits."""
    outputs, inputs = shape
    if bits == 8:
        weight = torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda")
        return weight, torch.rand(outputs, device="cuda") * 1e-3
    weight = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device="cuda")
    pairs = torch.rand(2, inputs // 128, outputs, device="cuda").mul_(1e-3).bfloat16()
    return weight, pairs[0], pairs[1], 128


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_gpu_kernels_equal_the_dequantised_product(bits: int, dtype: torch.dtype) -> None:
    layer = gpu_layer((640, 1024), bits)
    operator = torch.compile(getattr(torch.ops.talon, f"w{bits}a16"), fullgraph=True)
    plain = dequantised(layer, bits)
    for rows in (1, 5, 16, 17, 32, 64, 100):
        x = torch.randn(rows, 1024, device="cuda").to(dtype)
        expected = x.double() @ plain.t()
        assert (operator(x, *layer) - expected).norm() < 1e-2 * expected.norm()


def dequantised(layer: tuple, bits: int) -> torch.Tensor:
    if bits == 8:
        return layer[0].double() * layer[1].double()[:, None]
    weight, scales, zeros, groupsize = layer
    steps = unpack_int4(weight, groupsize).double().view(len(weight), -1, groupsize) - 8
    return (steps * scales.t().double()[..., None] + zeros.t().double()[..., None]).flatten(1)


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("bits, flat_rows, factor", [(8, 32, 1.25), (4, 16, 1.3)])
def test_gpu_kernels_reach_the_bandwidth_of_a_copy(
    bits: int, flat_rows: int, factor: float
) -> None:
    shape = (22016, 4096)
    layer = gpu_layer(shape, bits)
    read = sum(part.nbytes for part in layer if isinstance(part, torch.Tensor))
    source, target = (torch.empty(1 << 28, dtype=torch.uint8, device="cuda") for _ in range(2))
    copied = 2 * source.nbytes / milliseconds(lambda: target.copy_(source))
    times = {}
    for rows in (1, 4, 16, 32):
        x = torch.randn(rows, shape[1], dtype=torch.float16, device="cuda")
        operator = torch.compile(getattr(torch.ops.talon, f"w{bits}a16"), fullgraph=True)
        operator(x, *layer)
        times[rows] = milliseconds(lambda x=x, run=operator: run(x, *layer))
    assert all(read / times[rows] >= 0.8 * copied for rows in (1, 4, 16)), (times, copied)
    assert times[flat_rows] <= factor * times[1], times


@needs_gpu
def test_gpu_kernels_can_be_captured_and_repeat_exactly() -> None:
    layer = gpu_layer((1024, 2048), 8)
    x = torch.randn(16, 2048, dtype=torch.float16, device="cuda")
    expected = torch.ops.talon.w8a16(x, *layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = torch.ops.talon.w8a16(x, *layer)
    for _ in range(3):
        got.zero_()
        graph.replay()
        assert torch.equal(got, expected)
