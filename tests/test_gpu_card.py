"""The GPU operators on a real card: numbers in bf16 and fp16, rows bit for bit, capture, speed.
Skipped where there is none."""

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

# ruff: noqa: E402
from gpu_numbers import attend_in_fp64, error, make_linear, tree_of, weight_of

from model import At, tree_mask
from talon.kernels.gpu_layers import GpuLinear

ops = torch.ops.talon
MODES = ("", "int8", "int8-dynamic", "int4")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def on_card(
    mode: str, inputs: int, outputs: int, dtype: torch.dtype
) -> tuple[nn.Module, GpuLinear]:
    linear = make_linear(mode, inputs, outputs)
    if not mode:
        linear = linear.to(dtype)
    return linear, GpuLinear(linear.cuda(), dtype)


@DTYPES
@pytest.mark.parametrize("mode", MODES)
def test_rows_multiply_right_and_do_not_depend_on_those_next_to_them(mode, dtype):
    linear, layer = on_card(mode, 4096, 1000, dtype)
    x = torch.randn(70, 4096, device="cuda", dtype=dtype)
    rows, beside = layer.ready(x)
    wanted = rows.double() * (beside.double() if mode == "int8-dynamic" else 1)
    wanted = wanted @ weight_of(linear).t() + linear.bias.double()
    together = layer(x)
    assert error(together, wanted) < 4e-3
    for few in (slice(0, 1), slice(60, 67), slice(3, 19), slice(10, 40), slice(1, 61)):
        assert torch.equal(layer(x[few]), together[few])
    assert not layer.arrived.any()


@DTYPES
@pytest.mark.parametrize("size, heads, groups", [(128, 32, 8), (128, 8, 8), (64, 9, 3), (96, 4, 4)])
@pytest.mark.parametrize("length", [0, 189, 575, 3000])
def test_a_node_gets_what_plain_decoding_computes(dtype, size, heads, groups, length):
    nodes, slots = 60, length + 100
    q = torch.randn(nodes, heads, size, device="cuda", dtype=dtype)
    kv = torch.randn(2, groups, slots, size, device="cuda", dtype=dtype)
    tree, arrived = tree_of(nodes, 10).cuda(), torch.zeros(256, dtype=torch.int32, device="cuda")

    def attend(q: Tensor, kv: Tensor, length: int, ancestors: Tensor | None) -> Tensor:
        at = torch.tensor([length], device="cuda")
        return ops.attend_tree(q, kv, at, ancestors, None, arrived, "plain", 0)[0]

    found = attend(q, kv, length, tree)
    at = At(torch.tensor([length], device="cuda"), torch.arange(slots, device="cuda"))
    assert error(found, attend_in_fp64(q, kv, tree_mask(at, tree))) < 6e-3
    for node in range(0, nodes, 7):
        path = tree[node].nonzero()[:, 0]
        plain = torch.randn_like(kv)
        plain[:, :, :length] = kv[:, :, :length]
        plain[:, :, length : length + len(path)] = kv[:, :, length + path]
        alone = attend(q[node : node + 1], plain, length + len(path) - 1, None)
        assert torch.equal(alone[0], found[node])


def test_captured_operators_repeat_exactly():
    _, layer = on_card("int8", 4096, 4096, torch.bfloat16)
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    wanted, graph = layer(x), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layer(x)
    for _ in range(3):
        got.zero_()
        graph.replay()
        assert torch.equal(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("mode, rows", [("", 60), ("int8", 26), ("int8-dynamic", 60), ("int4", 16)])
def test_a_tree_costs_little_more_than_a_row(mode, rows):
    """In one graph of calls over weights that no cache holds."""
    layers = [on_card(mode, 4096, 22016, torch.bfloat16)[1] for _ in range(8)]
    times = {}
    for count in (1, rows):
        x = torch.randn(count, 4096, device="cuda", dtype=torch.bfloat16)
        ready, graph = [layer.ready(x) for layer in layers], torch.cuda.CUDAGraph()
        for layer, given in zip(layers, ready, strict=True):
            layer.multiply(given)
        with torch.cuda.graph(graph):
            for layer, given in zip(layers, ready, strict=True):
                layer.multiply(given)
        found = []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end))
        times[count] = sorted(found)[10]
    assert times[rows] < 1.35 * times[1], times
