"""Few rows on a CPU: right on every instruction set, whatever the number of rows."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model import attend
from talon.kernels import cpu_kernels
from talon.operators import choose_operators, has_cpu_operators

ROOT = Path(__file__).resolve().parent.parent
SIZES = [(576, 960), (1536, 576), (64, 48), (37, 19), (100, 65), (7, 3), (1, 1)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 26, 33, 64]
SHAPES = [  # of attention: rows, heads, groups, size of a head, slots read, slots there
    (1, 9, 3, 64, 256, 600), (26, 9, 3, 64, 256, 600), (64, 4, 1, 64, 512, 513),
    (5, 4, 4, 8, 16, 17), (3, 2, 1, 48, 33, 34), (7, 8, 2, 128, 300, 301), (2, 2, 2, 20, 3, 4),
]  # fmt: skip
CONTRACTED = 1e-6  # relative error of fp32 sums
AMX = (False, True)[: 2 if cpu_kernels.integer_route() == "amx" else 1]


def setup_module():
    cpu_kernels.load()
    torch.manual_seed(0)


def error(got, expected):
    return float((got.double() - expected).norm() / expected.norm())


def random_int8(outputs, inputs):
    return torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)


def round_to(x, limit):
    """fp64 rows of x, rounded to whole steps of which the largest value has `limit`."""
    step = x.abs().amax(1, keepdim=True) / limit
    return (x / step).round().double() * step


def multiplications(inputs, outputs):
    """Each operator on one random weight of this size: (name, what it computes, its exact twin)."""
    ops = torch.ops.talon
    weight, steps = torch.randn(outputs, inputs), random_int8(outputs, inputs)
    scales = torch.rand(outputs) + 0.1
    stretched = steps.double() * scales.double()[:, None]
    yield "fp32", lambda x: ops.float_rows(x, weight), lambda x: x.double() @ weight.double().t()
    yield "int8", lambda x: ops.int8_rows(x, steps, scales), lambda x: x.double() @ stretched.t()
    if cpu_kernels.load():
        packed = cpu_kernels.interleave(steps)

        for planes, limit in ((1, 127), (2, 127 * 256)):
            for amx in AMX:
                yield (
                    f"{planes} planes, amx {amx}",
                    lambda x, p=planes, a=amx: ops.integer_rows(x, packed, scales, p, a),
                    lambda x, limit=limit: round_to(x, limit) @ stretched.t(),
                )
    for groupsize, dtype in itertools.product((32, 64, 128, 256), (torch.bfloat16, torch.float32)):
        padded = -(-inputs // groupsize) * groupsize
        halves = torch.randint(0, 256, (outputs, padded // 2), dtype=torch.uint8)
        pairs = [torch.randn(outputs, padded // groupsize).to(dtype) for _ in range(2)]
        grouped = halves.view(outputs, -1, groupsize // 2)
        values = torch.cat((grouped & 15, grouped >> 4), 2).double() - 8
        plain = values * pairs[0].double()[..., None] + pairs[1].double()[..., None]
        plain, padding = plain.flatten(1), (0, padded - inputs)
        yield (
            f"int4, groups of {groupsize}, {dtype}",
            lambda x, h=halves, p=pairs, g=groupsize, more=padding: ops.int4_rows(
                F.pad(x, more), h, *p, g
            ),
            lambda x, plain=plain, more=padding: F.pad(x, more).double() @ plain.t(),
        )
        if cpu_kernels.load():
            packed = cpu_kernels.interleave_groups(halves, *pairs, groupsize)
            for amx in AMX:
                yield (
                    f"int4 as integers, groups of {groupsize}, {dtype}, amx {amx}",
                    lambda x, p=packed, a=amx, more=padding: ops.grouped_rows(
                        F.pad(x, more), *p, a
                    )[:, :outputs],
                    lambda x, plain=plain, more=padding: (
                        F.pad(round_to(x, 127 * 256), more) @ plain.t()
                    ),
                )


@pytest.mark.parametrize("inputs, outputs", SIZES)
def test_multiplications_are_exact_to_rounding_and_do_not_depend_on_other_rows(inputs, outputs):
    x = torch.randn(max(ROWS), inputs)
    for name, multiply, exact in multiplications(inputs, outputs):
        expected = exact(x)
        alone = torch.cat([multiply(row) for row in x.split(1)])
        assert error(alone, expected) < CONTRACTED, name
        for rows in ROWS:
            assert torch.equal(multiply(x[:rows].contiguous()), alone[:rows]), (name, rows)


@pytest.mark.skipif(len(AMX) < 2, reason="a CPU without AMX")
@pytest.mark.parametrize("inputs, outputs", SIZES)
def test_vnni_and_amx_give_the_same_bits(inputs, outputs):
    x, found = torch.randn(max(ROWS), inputs), {}
    for name, multiply, _ in multiplications(inputs, outputs):
        kind, _, amx = name.partition(", amx ")
        if amx:
            found.setdefault(kind, []).append(multiply(x))
    assert found and all(torch.equal(vnni, amx) for vnni, amx in found.values())


@pytest.mark.parametrize("rows, heads, groups, size, width, slots", SHAPES)
def test_attention_is_exact_to_rounding_and_does_not_depend_on_other_rows(
    rows, heads, groups, size, width, slots
):
    q, cache = torch.randn(rows, heads, size), torch.randn(3, 2, groups, slots, size)
    mask = torch.rand(rows, width) < 0.4
    mask[:, width // 2 :] = False  # slots that are not in use yet
    mask[torch.arange(rows), torch.arange(rows) % max(width // 2, 1)] = True
    if rows == 64:
        mask[:] = True
    got = torch.ops.talon.attend(q, cache[1], mask)
    assert error(got, attend(q.double(), cache[1].double(), mask)) < CONTRACTED
    alone = [
        torch.ops.talon.attend(q[i : i + 1].contiguous(), cache[1], mask[i : i + 1].contiguous())
        for i in range(rows)
    ]
    assert torch.equal(torch.cat(alone), got)


def test_a_node_of_a_tree_gets_the_numbers_of_its_place_in_the_text():
    """The same keys and values with gaps between them, as in a tree before it is committed."""
    q, text = torch.randn(1, 9, 64), torch.randn(2, 3, 300, 64)
    for committed, places in ((37, [0, 5, 11]), (250, [2, 3, 30])):
        plain = torch.ones(1, committed + 3, dtype=torch.bool)
        spread = torch.zeros(1, committed + 40, dtype=torch.bool)
        spread[:, :committed] = True
        tree = torch.randn(2, 3, 300, 64)
        tree[:, :, :committed] = text[:, :, :committed]
        for index, place in enumerate(places):
            spread[0, committed + place] = True
            tree[:, :, committed + place] = text[:, :, committed + index]
        expected = torch.ops.talon.attend(q, text, plain)
        assert torch.equal(torch.ops.talon.attend(q, tree, spread), expected)


def test_threads_change_no_number():
    x, before = torch.randn(26, 576), torch.get_num_threads()
    try:
        for name, multiply, _ in multiplications(576, 960):
            results = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(multiply(x))
            assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2]), name
    finally:
        torch.set_num_threads(before)


def test_extreme_integers_do_not_overflow():
    if not cpu_kernels.load():
        return
    steps = torch.full((64, 14336), -127, dtype=torch.int8)
    x = torch.full((2, 14336), 127.0)
    for amx in AMX:
        packed, scales = cpu_kernels.interleave(steps), torch.ones(64)
        y = torch.ops.talon.integer_rows(x, packed, scales, 1, amx)
        assert torch.equal(y, torch.full((2, 64), -127.0 * 127 * 14336))
    # Both halves of 16 bits at their ends, and nibbles at theirs.
    x = torch.tensor([[127 * 256.0, 126.5 * 256, -126.5 * 256, -(126 * 256.0 + 127)]]).repeat(1, 64)
    y = torch.ops.talon.integer_rows(x, cpu_kernels.interleave(steps[:, :256]), scales, 2, False)
    assert torch.equal(y[0], (x.double() @ steps[:, :256].double().t())[0].float())
    halves = torch.full((16, 128), 255, dtype=torch.uint8)
    units, bases = torch.ones(16, 8).bfloat16(), torch.zeros(16, 8).bfloat16()
    y = torch.ops.talon.grouped_rows(
        x, *cpu_kernels.interleave_groups(halves, units, bases, 32), False
    )
    assert torch.equal(y, 7 * x.sum(1, keepdim=True).expand(1, 16))


def test_rows_of_zeros_and_no_rows_at_all():
    for name, multiply, _ in multiplications(64, 48):
        assert (multiply(torch.zeros(3, 64)) == 0).all(), name
        assert multiply(torch.zeros(0, 64)).shape == (0, 48), name


def test_fast_linears_share_the_weights_and_keep_the_numbers():
    plain = nn.Sequential(nn.Linear(40, 24), nn.Linear(24, 8, bias=False)).requires_grad_(False)
    fast = nn.Sequential(*plain)
    expected = {rows: plain(torch.ones(rows, 40)) for rows in (1, 100)}
    weights = [layer.weight for layer in plain]
    choose_operators(fast, torch.device("cpu"), torch.float32)
    assert all(isinstance(layer, cpu_kernels.RowsLinear) for layer in fast)
    assert all(a.weight is b for a, b in zip(fast, weights, strict=True))
    for rows, value in expected.items():
        torch.testing.assert_close(fast(torch.ones(rows, 40)), value)
    half = nn.Sequential(nn.Linear(4, 4)).half()
    choose_operators(half, torch.device("cpu"), torch.float16)
    assert type(half[0]) is nn.Linear


def integer_results():
    """What the operators for integers give, by size and name."""
    torch.manual_seed(1)
    found = {}
    for inputs, outputs in SIZES:
        x = torch.randn(max(ROWS), inputs)
        for name, multiply, _ in multiplications(inputs, outputs):
            if "integers" in name or "planes" in name:
                found[inputs, outputs, name.partition(", amx")[0]] = multiply(x)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("level", ["floats", "avx2", "avxvnni", "vnni"])
def test_every_level_gives_right_numbers_and_the_same_bits_of_integers(level, tmp_path):
    """Compiled for a lesser CPU than this one, in a process of its own."""
    code = f"""
import torch, test_cpu_kernels as t
t.setup_module()
torch.save((t.cpu_kernels.integer_route(), t.integer_results()), {str(tmp_path / "results")!r})
for size in t.SIZES:
    t.test_multiplications_are_exact_to_rounding_and_do_not_depend_on_other_rows(*size)
for shape in t.SHAPES:
    t.test_attention_is_exact_to_rounding_and_does_not_depend_on_other_rows(*shape)
t.test_extreme_integers_do_not_overflow()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TALON_CPU_LEVEL": level},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    route, found = torch.load(tmp_path / "results")
    if route != level:
        pytest.skip(f"a CPU without {level}: {route} ran")
    best = integer_results()
    assert level == "floats" or found.keys() == best.keys() != set()
    assert all(torch.equal(found[key], best[key]) for key in found)


def test_a_level_that_is_none_is_refused_and_not_taken_for_a_missing_compiler(monkeypatch):
    monkeypatch.setenv("TALON_CPU_LEVEL", "bogus")
    choose = has_cpu_operators.__wrapped__
    for ask in (choose, cpu_kernels.integer_route):
        with pytest.raises(OSError, match="LEVEL 'bogus' is not known: unset it or give one of fl"):
            ask()
