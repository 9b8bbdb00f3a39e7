"""Numbers of the GPU operators, in Triton's interpreter: run by test_gpu_kernels.py, which sets
TRITON_INTERPRET=1, or by hand:

    TRITON_INTERPRET=1 python -m pytest tests/gpu_numbers.py

In fp16, since the interpreter's bf16 is another. Where rows are compared bit for bit, its matrix
multiplication is replaced by sums of fixed order, as the tensor cores have them.
"""

import re

import gpu_plain
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import random_head, random_model
from torch import Tensor, nn
from triton.runtime import interpreter

from eagle_draft import ancestor_mask
from model import At, KVCache, RMSNorm, Transformer, rope_table, rotate, tree_mask
from talon.kernels.gpu_layers import GpuLinear, GpuNorm, put_on_gpu
from talon.kernels.gpu_picks import GpuPick, keys_of, limits
from talon.kernels.linear import LINEARS, quantize_int4, quantize_int8, round_rows
from talon.sampling import NO_TOKEN, Picks, SamplingConfig, gumbel

MODES = ("", "int8", "int8-dynamic", "int4")
# (rows, inputs, outputs): one row, every block, odd sizes, several parts, more than 64 rows
CASES = [(1, 72, 100), (3, 1100, 96), (9, 200, 130), (26, 640, 66), (64, 128, 64), (70, 200, 66)]

ops = torch.ops.talon
slow = pytest.mark.slow


@pytest.fixture
def fixed_order(monkeypatch) -> None:
    """Matrix multiplications of the interpreter add 16 products at a time, in order."""

    def create_dot(self, a, b, sums, *_):
        x, y, out = a.data.astype(sums.data.dtype), b.data.astype(sums.data.dtype), sums.data.copy()
        for start in range(0, x.shape[1], 16):
            part = np.zeros_like(out)
            for k in range(start, min(start + 16, x.shape[1])):
                part += x[:, k : k + 1] * y[k : k + 1]
            out += part
        return interpreter.TensorHandle(out, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def make_linear(mode: str, inputs: int, outputs: int, group: int = 128) -> nn.Module:
    """A random linear as a file holds it, with a bias; in fp16 if it is not quantised."""
    plain = nn.Linear(inputs, outputs).requires_grad_(False)
    plain.weight.normal_()
    return quantised(plain, mode, group) if mode else plain.half()


def quantised(plain: nn.Linear, mode: str, group: int = 128) -> nn.Module:
    bias = None if plain.bias is None else nn.Parameter(plain.bias.half(), requires_grad=False)
    linear = LINEARS[mode](plain.in_features, plain.out_features, bias, group)
    if mode == "int4":
        tensors = zip(
            ("weight", "scales", "zeros"), quantize_int4(plain.weight, group), strict=True
        )
    else:
        smoothing = torch.rand(plain.in_features) + 0.5
        steps, scales = quantize_int8(plain.weight * smoothing)
        tensors = {"weight": steps, "scales": scales, "smoothing": smoothing}.items()
    for name, tensor in tensors:
        linear.register_buffer(name, tensor)
    return linear


def weight_of(linear: nn.Module) -> Tensor:
    """float64 [outputs, inputs]: what a linear multiplies with, smoothed inputs included."""
    weight = linear.weight.double()
    if hasattr(linear, "zeros"):
        halves = linear.weight.view(len(weight), -1, linear.groupsize // 2)
        steps = torch.cat((halves & 15, halves >> 4), 2).double() - 8
        weight = steps * linear.scales.double()[..., None] + linear.zeros.double()[..., None]
        return weight.flatten(1)[:, : linear.in_features]
    return weight * linear.scales.double()[:, None] if hasattr(linear, "scales") else weight


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


# ---------------------------------------------------------------- matrix multiplication


def check_linear(mode: str, case: tuple[int, int, int], group: int = 128) -> None:
    rows, inputs, outputs = case
    linear = make_linear(mode, inputs, outputs, group)
    layer, x = GpuLinear(linear, torch.float32), torch.randn(rows, inputs).half()
    residual = torch.randn(rows, outputs).half()
    ready, beside = layer.ready(x)
    y = ready.double() * (beside.double() if mode == "int8-dynamic" else 1)
    y = y @ weight_of(linear).t() + linear.bias.double()
    both = layer.multiply((ready, beside), "plain", residual)
    assert error(both, y + residual.double()) < 3e-7
    gate, up = y.chunk(2, 1)
    assert error(layer.multiply((ready, beside), "silu"), F.silu(gate) * up) < 2e-6
    assert not layer.arrived.any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_a_linear_multiplies_with_its_dequantised_weights(mode, case):
    check_linear(mode, case)


@slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [2, 8, 16, 17, 32, 33, 64, 70, 256])
@pytest.mark.parametrize("sizes", [(576, 64), (2048, 130), (1111, 2)], ids=str)
def test_any_number_of_rows_and_any_size_multiply(mode, rows, sizes):
    check_linear(mode, (rows, *sizes))


@pytest.mark.parametrize("group", [32, 64, 256])
@pytest.mark.parametrize("case", CASES[1:3] + CASES[5:], ids=str)
def test_int4_groups_of_every_size_multiply(group, case):
    check_linear("int4", case, group)


@pytest.mark.parametrize("mode", MODES)
def test_a_row_of_a_linear_does_not_depend_on_the_rows_next_to_it(mode, fixed_order):
    layer, x = GpuLinear(make_linear(mode, 1100, 34), torch.float16), torch.randn(70, 1100).half()
    together = layer(x)
    for rows in (slice(0, 1), slice(61, 70), slice(3, 20), slice(10, 43)):
        assert torch.equal(layer(x[rows]), together[rows])


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("size", [16, 64, 80, 96, 128])
def test_queries_and_keys_are_rotated_and_keys_and_values_cached(size, tree):
    rows, heads, groups, length = 5, 4, 2, 20
    linear = make_linear("", 96, (heads + 2 * groups) * size)
    x, tree = torch.randn(rows, 96).half(), tree_of(9)[4:] if tree else None
    slots = length + torch.arange(rows) + (4 if tree is not None else 0)
    positions = slots if tree is None else length + tree.sum(1) - 1
    table = rope_table(50, size, 10000.0, None)
    rope, kv = table[:, positions], torch.zeros(2, groups, 30, size).half()
    layer, place = GpuLinear(linear, torch.float16), (table, torch.tensor([length]), tree)
    queries = layer.multiply((x, None), "qkv", None, *place, kv)
    y = (x.float() @ linear.weight.float().t() + linear.bias.float()).view(rows, -1, size)
    q, k, v = y.split((heads, groups, groups), 1)
    cached = torch.zeros(kv.shape)
    cached.index_copy_(2, slots, torch.stack((rotate(k, rope), v)).transpose(1, 2))
    assert error(queries, rotate(q, rope)) < 5e-4 and error(kv, cached) < 5e-4


@pytest.mark.parametrize("tree", [None, ancestor_mask(torch.tensor([0, 0, 0, 1, 1]), 5)])
@pytest.mark.parametrize("size", [16, 24, 80, 128])
def test_heads_are_normed_rotated_and_cached_whatever_rows_are_next_to_them(size, tree):
    rows, heads, groups, length = 5, 4, 2, torch.tensor([20])
    model = random_model(n_layer=1, head_dim=size, qk_norm=True, norm_eps=1e-5)
    attention = model.layers[0].attention.half()
    slots = length + torch.arange(rows)
    positions = slots if tree is None else length + tree.sum(1) - 1
    table = rope_table(50, size, 10000.0, None)
    rope, kv = table[:, positions], torch.zeros(2, groups, 30, size).half()
    qkv = attention.wqkv(torch.randn(rows, 64).half())
    norms = torch.stack((attention.q_norm.weight, attention.k_norm.weight)), 1e-5
    queries = ops.heads(qkv, *norms, table, length, tree, kv)
    q, k, v = qkv.view(rows, -1, size).split((heads, groups, groups), 1)
    q, k = attention.q_norm(q), attention.k_norm(k)
    cached = torch.zeros(kv.shape).half()
    cached.index_copy_(2, slots, torch.stack((rotate(k, rope), v)).transpose(1, 2))
    assert queries.shape == (rows, heads, size)
    assert error(queries, rotate(q, rope)) < 5e-4 and error(kv, cached) < 5e-4
    alone, again = (length, None) if tree is None else (length, tree[3:4]), torch.zeros_like(kv)
    row = 0 if tree is None else 3
    assert torch.equal(ops.heads(qkv[row : row + 1], *norms, table, *alone, again)[0], queries[row])
    assert torch.equal(again[:, :, 20 + row], kv[:, :, 20 + row])


# ---------------------------------------------------------------- rows made ready


@pytest.mark.parametrize("width", [72, 1024, 5000])
def test_rows_are_normed_rounded_and_summed_up(width):
    x, norm = torch.randn(5, width).half(), RMSNorm(width, 1e-5).requires_grad_(False).half()
    norm.weight.uniform_(0.5, 1.5)
    normed = norm(x)
    plain, _ = ops.ready(x, norm.weight, norm.eps, "norm", "plain", 0)
    assert error(plain, normed) < 5e-4
    steps, scales = ops.ready(x, None, 0.0, "none", "int8", 0)
    wanted, wanted_scales = round_rows(x.float())
    assert torch.allclose(scales, wanted_scales) and (steps - wanted).abs().max() <= 1
    assert (steps != wanted).float().mean() < 1e-3  # halves may round either way
    rows, sums = ops.ready(x, norm.weight, norm.eps, "norm", "sums", 64)
    padded = F.pad(rows.float(), (0, sums.shape[1] * 64 - width))
    assert torch.allclose(sums, padded.view(5, -1, 64).sum(2), atol=1e-3)


def test_gate_and_up_are_joined_and_a_row_is_not_changed_by_others():
    x, factors = torch.randn(9, 2 * 500).half(), torch.rand(500)
    gate, up = x.float().chunk(2, 1)
    for form in ("plain", "int8", "sums"):
        rows, beside = ops.ready(x, factors, 0.0, "silu", form, 32)
        if form != "int8":
            assert error(rows, F.silu(gate) * up * factors) < 5e-4
        alone = ops.ready(x[4:5], factors, 0.0, "silu", form, 32)
        assert torch.equal(alone[0], rows[4:5]) and torch.equal(alone[1], beside[4:5])


# ---------------------------------------------------------------- attention


def tree_of(nodes: int, width: int = 4) -> Tensor:
    """bool [N, N]: the ancestors in a random tree, whose nodes hang on one of the last `width`."""
    parents = [0] + [int(torch.randint(max(0, i - width), i, ())) for i in range(1, nodes)]
    return ancestor_mask(torch.tensor(parents), nodes)


def attend(q: Tensor, kv: Tensor, length: int, ancestors: Tensor | None, *form) -> tuple:
    arrived = torch.zeros(256, dtype=torch.int32)
    form = form or (None, "plain", 0)
    found = ops.attend_tree(q, kv, torch.tensor([length]), ancestors, form[0], arrived, *form[1:])
    assert not arrived.any()
    return found


def attend_in_fp64(q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
    per_group = q.shape[1] // kv.shape[1]
    keys, values = kv.double().repeat_interleave(per_group, 1)
    scores = torch.einsum("thd,hsd->hts", q.double(), keys) * q.shape[2] ** -0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hts,hsd->thd", weights, values).flatten(1)


def check_attention(nodes: int, heads: int, groups: int, size: int, length: int) -> None:
    slots = length + nodes + 40
    q, kv = torch.randn(nodes, heads, size).half(), torch.randn(2, groups, slots, size).half()
    kv[:, :, length + nodes :] = float("nan")  # leftovers that nothing may read
    at, tree = At(torch.tensor([length]), torch.arange(slots)), tree_of(nodes)
    for ancestors in (None, tree):
        mask = tree_mask(at, torch.ones_like(tree).tril() if ancestors is None else tree)
        got, _ = attend(q, kv, length, ancestors)
        assert error(got, attend_in_fp64(q, kv.nan_to_num(), mask)) < 5e-4


@pytest.mark.parametrize(
    "shape", [(1, 8, 2, 64, 0), (1, 4, 1, 128, 33), (5, 4, 4, 80, 130), (7, 7, 1, 96, 390)], ids=str
)
def test_attention_sees_what_the_mask_allows(shape):
    check_attention(*shape)


@slow
@pytest.mark.parametrize("nodes", [1, 2, 16, 17, 60])
@pytest.mark.parametrize("size, heads, groups", [(16, 4, 2), (64, 6, 2), (128, 2, 2)])
@pytest.mark.parametrize("length", [0, 1, 31, 192, 777, 5000])
def test_attention_over_trees_and_lengths_of_every_size(nodes, size, heads, groups, length):
    check_attention(nodes, heads, groups, size, length)


def check_nodes(nodes: int, length: int, size: int = 64, width: int = 4) -> None:
    """Every node of a tree against plain decoding of its text, and a path against a chunk."""
    slots = length + nodes + 40
    q, kv, tree = torch.randn(nodes, 2, size).half(), torch.randn(2, 1, slots, size).half(), None
    tree = tree_of(nodes, width)
    found, _ = attend(q, kv, length, tree)
    for node in range(nodes):
        path = tree[node].nonzero()[:, 0]
        plain = torch.randn_like(kv)
        plain[:, :, :length] = kv[:, :, :length]
        plain[:, :, length : length + len(path)] = kv[:, :, length + path]
        alone, _ = attend(q[node : node + 1], plain, length + len(path) - 1, None)
        assert torch.equal(alone[0], found[node])
    chunk, _ = attend(q[path].contiguous(), plain, length, None)
    assert torch.equal(chunk, found[path])


@pytest.mark.parametrize("nodes, length", [(5, 0), (6, 189), (4, 64)])
def test_a_node_gets_what_plain_decoding_computes(nodes, length, fixed_order):
    check_nodes(nodes, length)


@slow
@pytest.mark.parametrize("nodes", [8, 40, 60])
@pytest.mark.parametrize("length", [0, 29, 32, 186, 575, 760])
@pytest.mark.parametrize("width", [1, 6, 60])
def test_a_node_of_any_tree_gets_what_plain_decoding_computes(nodes, length, width, fixed_order):
    check_nodes(nodes, length, size=16, width=width)


@slow
def test_a_node_far_into_a_text_gets_what_plain_decoding_computes(fixed_order):
    check_nodes(3, 4990, size=128)


def test_attention_hands_on_rows_that_are_rounded_or_summed_up():
    q, kv, factors = torch.randn(3, 4, 64).half(), torch.randn(2, 2, 90, 64).half(), torch.rand(256)
    plain, _ = attend(q, kv, 40, None)
    smooth = (plain.float() * factors).half().float()
    steps, scales = attend(q, kv, 40, None, factors, "int8", 0)
    assert (steps * scales - smooth).abs().max() <= scales.max() * 0.6
    rows, sums = attend(q, kv, 40, None, None, "sums", 128)
    assert torch.equal(rows, plain)
    assert torch.allclose(sums, plain.float().view(3, -1, 128).sum(2), atol=1e-3)


# ---------------------------------------------------------------- choosing


def picks_for(kind: str):
    picks = Picks(torch.device("cpu"))
    settings = {"sample": (0.8, 0, 1.0), "filter": (0.8, 20, 0.9), "greedy": (0.0, 0, 1.0)}[kind]
    return picks.set(SamplingConfig(*settings, seed=12345678901234567))


@pytest.mark.parametrize("kind", ["greedy", "sample", "filter"])
@pytest.mark.parametrize("columns", [100, 5000])
def test_choices_and_guesses_are_those_of_sampling(kind, columns):
    pick, logits = picks_for(kind), (torch.randn(5, columns) * 3).half()
    logits[0, 3] = logits[0, 7] = logits[0].max() + 1  # of equal ones the lower
    positions, ids = torch.arange(5) + 100000, torch.randperm(columns) + 5
    ours = GpuPick(pick, torch.device("cpu"))
    assert torch.equal(ours.choose(logits, positions), pick.choose(logits, positions))
    above = -torch.rand(5)
    scores, tokens = ours.guess(logits, positions, ids, 10, above)
    wanted, wanted_tokens = pick.guess(logits, positions, ids, 10, above)
    there = wanted.isfinite()
    assert torch.equal(tokens[there], wanted_tokens[there])
    assert torch.allclose(scores[there], wanted[there], atol=1e-5)


@pytest.mark.parametrize("kind", ["greedy", "sample", "filter"])
def test_a_row_with_nan_has_no_choice_and_guesses_it_last(kind):
    pick = GpuPick(picks_for(kind), torch.device("cpu"))
    logits = torch.randn(2, 50).half()
    logits[1, 20] = float("nan")
    choice = pick.choose(logits, torch.arange(2))
    assert choice[0] >= 0 and choice[1] == NO_TOKEN
    if kind != "filter":
        _, tokens = pick.guess(logits, torch.arange(2), torch.arange(50), 5)
        assert 20 not in tokens[1]


def test_the_noise_is_that_of_sampling():
    ids, arrived = torch.arange(5000), torch.zeros(1, dtype=torch.int32)
    for seed in (0, 7, 2**63 - 1):
        for position in (0, 2**31 + 5):
            state = torch.tensor([seed]), torch.tensor([position])
            settings = state[1], torch.ones(1), state[0], None
            found = ops.best(torch.zeros(1, 5000), arrived, *settings, ids, None, 300)
            values, tokens = gumbel(*state, ids).sort(descending=True)
            assert torch.equal(found[0], tokens[:, :300])
            values = values - values.logsumexp(1, keepdim=True)
            assert torch.allclose(found[1], values[:, :300], rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_limits_keep_what_a_stable_sort_keeps(dtype):
    for step in (0.0, 0.5, 2.0):  # with many ties and with few
        logits = torch.randn(8, 3000) * 3
        logits = ((logits / step).round() * step if step else logits).to(dtype)
        for temperature, top_k, top_p in [(0.3, 2**31, 0.9173), (1.0, 50, 1.0), (1.7, 1999, 0.377)]:
            settings = torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p])
            lowest, last = limits(logits, *settings).split(1, 1)
            keys, ids = keys_of(logits), torch.arange(3000)
            kept = (keys > lowest) | ((keys == lowest) & (ids <= last))
            order = logits.double().sort(dim=1, descending=True, stable=True).indices
            rank, mass = order.argsort(1), (logits.double() / settings[0].double()).exp()
            mass = mass.gather(1, order).masked_fill(ids >= top_k, 0)
            before = (mass.cumsum(1) - mass) / mass.sum(1, keepdim=True)
            wanted = (rank < top_k) & ((before.gather(1, rank) < top_p) | (rank == 0))
            near = (before.gather(1, rank) - top_p).abs() < 1e-5  # left to how sums are rounded
            assert torch.equal(kept | near, wanted | near)


# ---------------------------------------------------------------- the same in plain torch


@pytest.mark.parametrize("mode", MODES)
def test_what_other_tests_run_instead_of_the_kernels_computes_the_same(mode):
    layer, x = GpuLinear(make_linear(mode, 200, 96, 32), torch.float16), torch.randn(9, 200).half()
    form = layer.factors, 0.0, "none", layer.form, layer.group
    rows = ops.ready(x, *form)
    for ours, plain in zip(rows, gpu_plain.plain_ready(x, *form), strict=True):
        assert ours.numel() == 0 or error(ours, plain) < 1e-3
    tree, length, caches = tree_of(9), torch.tensor([20]), torch.zeros(2, 2, 1, 40, 16).half()
    table = rope_table(40, 16, 1e4, None)
    ends = {"plain": (), "silu": (), "qkv": (None, table, length, tree)}
    for end, more in ends.items():
        given = *rows, layer.weight, layer.scales, layer.bias, layer.arrived, 96, end, x.dtype
        kv = [(cache,) if more else () for cache in caches]
        ours = ops.linear(*given, *more, *kv[0])
        assert error(ours, gpu_plain.plain_linear(*given, *more, *kv[1])) < 1e-3
    assert error(caches[0], caches[1]) < 1e-3 and caches[0].any()
    given = ours, torch.randn(2, 1, 40, 16).half(), length, tree, None, layer.arrived, "plain", 0
    assert error(ops.attend_tree(*given)[0], gpu_plain.plain_attend(*given)[0]) < 1e-3


@pytest.mark.parametrize("kind", ["greedy", "sample"])
def test_choices_in_plain_torch_are_those_of_the_kernel(kind):
    pick, logits = picks_for(kind), torch.randn(3, 700).half()
    noise = (torch.arange(3), pick.temperature, pick.seed) if kind == "sample" else (None,) * 3
    for ids, above, top in ((None, None, 1), (torch.randperm(700), -torch.rand(3), 10)):
        given = logits, torch.zeros(3, dtype=torch.int32), *noise, None, ids, above, top
        ours, plain = ops.best(*given), gpu_plain.plain_best(*given)
        assert torch.equal(ours[0], plain[0]) and torch.allclose(ours[1], plain[1], atol=1e-5)


# ---------------------------------------------------------------- modules


def in_file_form(model: nn.Module, mode: str) -> nn.Module:
    """The same model with quantised layers, or in fp16."""
    model = model.half()
    for parent in [m for m in model.modules() if mode]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, quantised(child.float(), mode, 32))
    return model


def dequantised(model: nn.Module) -> nn.Module:
    """In fp32, with plain layers that multiply with what the quantised ones do."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "mode"):
                plain = nn.Linear(child.in_features, child.out_features, child.bias is not None)
                plain.weight.data = weight_of(child) / getattr(child, "smoothing", 1)
                plain.bias = nn.Parameter(child.bias) if child.bias is not None else None
                setattr(parent, name, plain)
    return model.float()


def forward(model: Transformer, tree, dtype: torch.dtype, run=lambda f, *x: f(*x)) -> tuple:
    """Logits of five tokens behind 40 random keys, and the cache that they leave."""
    c, tokens = model.config, torch.arange(5)
    cache = KVCache(c.n_layer, c.n_kv_head, 64, c.head_dim, dtype)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(3)))
    table, at = rope_table(64, c.head_dim, 1e4, None), At(torch.tensor([40]), torch.arange(64))
    place = model.place(table, tree.sum(1) + 39, tokens + 40, at, tree)
    return run(lambda *given: model.output(model(*given)[0]), tokens, place, cache), cache.data


QWEN = {"qk_norm": True, "qkv_bias": True, "head_dim": 24}


@pytest.mark.parametrize("changes", [{}, QWEN], ids=["llama", "qwen"])
@pytest.mark.parametrize("mode", MODES)
def test_a_model_on_a_gpu_computes_what_it_does_elsewhere(mode, changes):
    ours, plain = (in_file_form(random_model(n_layer=2, **changes), mode) for _ in range(2))
    torch.manual_seed(0)
    for a, b in zip(ours.modules(), plain.modules(), strict=True):
        for name, buffer in b.named_buffers(recurse=False):
            a.register_buffer(name, buffer.clone())
    put_on_gpu(ours, torch.float16)
    tree = tree_of(5)
    with torch.no_grad():
        wanted = forward(dequantised(plain), tree, torch.float32)
        got = forward(ours, tree, torch.float16)
    limit = 0.03 if mode == "int8-dynamic" else 2e-3
    assert error(got[0], wanted[0]) < limit and error(got[1], wanted[1]) < limit


@pytest.mark.parametrize("changes", [{}, QWEN | {"head_dim": 16}], ids=["llama", "qwen"])
@pytest.mark.parametrize("family", ["eagle1", "eagle3"])
def test_a_head_on_a_gpu_computes_what_it_does_elsewhere(family, changes):
    dtypes, model = (torch.float16, torch.float32), random_model()
    heads = [random_head(model, family, **changes).to(dtype) for dtype in dtypes]
    put_on_gpu(heads[0], torch.float16)
    features, tokens = [torch.randn(3, 64) for _ in range(3)], torch.tensor([1, 2, 3])
    at, own = At(torch.tensor([6]), torch.arange(16)), torch.arange(6, 9)
    tree = torch.ones(3, 3, dtype=torch.bool).tril()
    cached, results = torch.randn(2, 2, 16, 16), []
    for head, dtype in zip(heads, (torch.float16, torch.float32), strict=True):
        place = head.place(rope_table(16, 16, 1e4, None), own, own, at, tree)
        with torch.no_grad():
            hidden = head.fuse([x.to(dtype) for x in features])
            hidden = head(tokens, hidden, place, cached.to(dtype, copy=True))
            results.append((hidden, head.logits(hidden)))
    assert error(results[0][0], results[1][0]) < 3e-3
    assert error(results[0][1], results[1][1]) < 3e-3


def test_a_norm_hands_on_rows_in_the_form_of_the_layer_that_reads_them():
    norm, x = RMSNorm(96, 1e-5).requires_grad_(False).half(), torch.randn(3, 96).half()
    for mode in MODES:
        layer = GpuLinear(make_linear(mode, 96, 32), torch.float16)
        together, apart = layer(GpuNorm(norm, layer)(x)), layer(GpuNorm(norm)(x))
        assert error(together, apart) < (0.03 if mode == "int8-dynamic" else 2e-3)


@slow
def test_a_compiled_block_is_one_graph_of_seven_operators_and_writes_the_cache():
    from torch._inductor.utils import run_and_get_code

    model = random_model(n_layer=3).half()
    put_on_gpu(model, torch.float16)
    tree = tree_of(5)
    with torch.inference_mode():
        wanted = forward(model, tree, torch.float16)
        torch._dynamo.reset()
        compiled, code = [], []

        def run(function, *given):
            compiled.append(torch.compile(function, fullgraph=True))
            logits, found = run_and_get_code(compiled[0], *given)
            code.extend(found)
            return logits

        got = forward(model, tree, torch.float16, run)
    assert all(map(torch.equal, got, wanted))
    functions = re.split(r"\n(?=\s*(?:def|class) )", code[0])
    block = next(text for text in functions if "def repeated_subgraph0" in text)
    counts = {
        name: block.count(f" = torch.ops.talon.{name}.default(")
        for name in ("ready", "linear", "attend_tree")
    }
    assert counts == {"ready": 2, "linear": 4, "attend_tree": 1}
