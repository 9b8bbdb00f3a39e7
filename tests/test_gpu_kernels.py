"""The GPU operators: numbers in Triton's interpreter, budgets of their code for sm_86, a real GPU
where there is one."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

# ruff: noqa: E402
from gpu_code import (
    BYTES_A_CLOCK,
    best_code,
    heads_code,
    linear_code,
    parts_code,
    ready_code,
    rest_code,
)

from talon.kernels.gpu_linear import COLUMNS, split_of

HERE = Path(__file__).resolve().parent
slow = pytest.mark.slow
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def interpret(which: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-m",
        which,
        str(HERE / "gpu_numbers.py"),
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parent)
    assert done.returncode == 0, done.stdout[-3000:]


def test_numbers_in_the_interpreter():
    interpret("not slow")


@slow
def test_all_numbers_in_the_interpreter():
    interpret("slow")


# ---------------------------------------------------------------- matrix multiplication

# Of a weight in a turn of the loop: instructions of a thread at 8 or 16 rows, at most.
INSTRUCTIONS = {"16": 1.4, "int8": 4.4, "int8-dynamic": 1.2, "int4": 3.5}
BYTES = {"16": 2, "int8": 1, "int8-dynamic": 1, "int4": 0.53}


def check_linear(form: str, rows: int, code) -> None:
    columns, inner = (64 if form == "int4" and rows == 64 else 128), 128 if form == "int4" else 64
    weights = columns * inner
    # Nothing spilled; or a word that is parked across the loop.
    assert code.stack <= 8 * (form == "int4" and rows == 64) and not code.count("(LDL|STL)")
    assert code.programs >= (1 if form == "int4" and rows == 32 else 2)
    assert code.layouts == {"[4, 1]"}  # each warp has outputs of its own: nothing is unpacked twice
    assert code.count("LDG") == 0  # every load of the loop runs ahead of it
    assert code.count("LDGSTS") >= 4
    assert code.issue <= max(code.tensor, 1.15 * BYTES[form] * weights / BYTES_A_CLOCK)
    if rows <= 16:
        assert len(code.loop) <= INSTRUCTIONS[form] * weights / 128
        assert max(code.issue, code.tensor) < BYTES[form] * weights / BYTES_A_CLOCK
    if form == "int4":  # three instructions a weight: and, byte permutation, fused multiplication
        assert code.count("I2F") == 0
        assert code.count("PRMT") + code.count("HFMA2") <= 1.1 * weights / 128
    if form == "int8":
        assert code.count("I2F") <= weights / 128  # one for each weight, whatever the rows


@pytest.mark.parametrize("form", BYTES)
def test_sixteen_rows_are_bound_by_memory(form):
    check_linear(form, 16, linear_code(form, 16))


def both_in_turns(*values: Iterable) -> list[tuple]:
    """All cases, bf16 and fp16 in turns: the last values are of an odd number, so that each value
    comes with both."""
    precisions = itertools.cycle(("bf16", "fp16"))
    return [(*case, next(precisions)) for case in itertools.product(*values)]


@slow
@pytest.mark.parametrize(
    "form, rows, end, dtype", both_in_turns(BYTES, [8, 32, 64], ["plain", "silu", "qkv"])
)
def test_every_block_of_rows_keeps_its_budget(form, rows, end, dtype):
    if not (form == "int8-dynamic" and rows == 8):
        check_linear(form, rows, linear_code(form, rows, dtype, end))


@slow
@pytest.mark.parametrize("options", [{"group": 64}, {"group": 32}, {"even": False}], ids=str)
@pytest.mark.parametrize("form", BYTES)
def test_odd_sizes_and_small_groups_do_not_spill(form, options):
    code = linear_code(form, 16, **options)
    assert code.stack == 0 and code.layouts == {"[4, 1]"} and code.count("LDG") == 0


MODELS = {
    "LLaMA-2-7B": [(12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008), (32000, 4096)],
    "LLaMA-2-13B": [(15360, 5120), (5120, 5120), (27648, 5120), (5120, 13824), (32000, 5120)],
    "LLaMA-3-8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
    "Qwen3-8B": [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)],
    "Qwen3-14B": [(7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408), (151936, 5120)],
    "Qwen3-32B": [(10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600), (151936, 5120)],
}


@pytest.mark.parametrize("shapes", MODELS.values(), ids=MODELS)
def test_the_inner_dimension_is_split_so_that_the_card_is_full(shapes):
    for outputs, inputs in shapes:
        split = split_of(outputs, inputs, torch.device("cpu"))
        programs = -(-outputs // COLUMNS) * split
        assert programs >= 82 and (split == 1 or programs <= 2.5 * 82) and split <= 5


# ---------------------------------------------------------------- attention and the rest


@pytest.mark.parametrize("rows, causal", [(64, False), (16, True)])
def test_attention_is_bound_by_the_tensor_cores_and_not_by_what_is_around_them(rows, causal):
    code = parts_code(rows, 128, causal)
    assert code.stack == 0 and code.programs >= 2 and code.count("LDG") == 0
    assert code.issue < 0.3 * code.tensor if rows == 64 else code.issue < code.tensor
    keys = 32 * 2 * 128 * 2  # bytes of keys and values of a block
    assert rows == 64 or code.tensor < keys / BYTES_A_CLOCK


@slow
@pytest.mark.parametrize(
    "size, rows, causal, heads, dtype",
    both_in_turns([64, 80, 96, 128], [16, 64], [False, True], [1, 4, 8]),
)
def test_attention_of_every_head_size_does_not_spill(size, rows, causal, heads, dtype):
    code = parts_code(rows, size, causal, dtype, heads=heads)
    assert code.stack <= 16 and code.programs >= 2 and not code.count("(LDL|STL|LDG)")


def test_the_rest_of_a_tree_fits_three_times():
    code = rest_code(True, "int8")
    assert code.stack == 0 and code.programs >= 3 and code.count("HMMA") == 16


@slow
@pytest.mark.parametrize("mode", ["plain", "int8", "sums"])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("tree, nodes", [(False, 1), (True, 32), (True, 128)])
def test_the_rest_of_attention_does_not_spill(mode, heads, tree, nodes):
    code = rest_code(tree, mode, 128, heads, nodes)
    assert code.stack <= 16 and code.programs >= 3


@slow
@pytest.mark.parametrize("op", ["norm", "silu", "none"])
@pytest.mark.parametrize("mode", ["plain", "int8", "sums"])
@pytest.mark.parametrize("block", [4096, 16384])
def test_rows_are_made_ready_in_registers(op, mode, block):
    assert ready_code(op, mode, block).stack == 0


@pytest.mark.parametrize("size", [64, 128])
def test_a_head_is_normed_and_rotated_in_registers(size):
    code = heads_code(size)
    assert code.stack == 0 and code.registers <= 64


@pytest.mark.parametrize("kind", ["greedy", pytest.param("sample", marks=slow), "filter"])
@pytest.mark.parametrize("top", [1, 10])
def test_choosing_does_not_spill_and_takes_exact_logarithms(kind, top):
    code = best_code(kind, top)
    assert code.stack == 0 and "lg2.approx" not in code.ptx


@slow
@pytest.mark.parametrize("target", [80, 89, 90])
def test_other_cards_compile_too(target):
    for form in BYTES:
        for rows in (16, 64):
            assert linear_code(form, rows, target=target).stack <= 8
    for causal in (False, True):
        parts_code(64, 128, causal, target=target)
    rest_code(True, "int8", target=target)
    ready_code("norm", "int8", target=target)
    best_code("sample", 10, target=target)


def test_the_page_shows_what_the_script_predicts():
    import predict_gpu

    page = (HERE.parent / "docs" / "gpu.md").read_text(encoding="utf-8")
    for table in (predict_gpu.speed_table, predict_gpu.parts_table, predict_gpu.attention_table):
        assert table() in page
