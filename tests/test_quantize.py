"""Quantised layers and files: error bounds, exactness, odd weights and sizes, refusals."""

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny import random_head, random_model, save_byte_tokenizer, unpack_int4
from tiny_training import tiny_target, write_target
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import quantize
from model import Transformer
from quantize import Plan, quantize_checkpoint, quantize_weight
from talon.checking import full_logits
from talon.checkpoint import TensorSpec, read_checkpoint
from talon.kernels.linear import (
    LINEARS,
    fit_groups,
    pack_int4,
    quantize_int4,
    quantize_int8,
    swap_linears,
    unpacked,
)
from talon.loading import load_target, open_files
from talon.operators import choose_operators
from talon.quantising.blocks import Blocks
from talon.quantising.judging import judge
from talon.writing import write_checkpoint

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
MODES = list(LINEARS)
# Relative error of a layer's outputs on random normal weights and inputs.
BOUNDS = {"int8": 0.01, "int8-dynamic": 0.02, "int4": 0.08}


def layer_of(weight, mode, groupsize=32, bias=None, smoothing=None, dtype=torch.float32):
    """A packed layer as loading would make it."""
    holder = nn.Module()
    with torch.device("meta"):
        holder.one = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    swap_linears(holder, {"mode": mode, "groupsize": groupsize, "layers": {"one": mode}})
    parts = quantize_weight(weight, Plan(mode, smoothing), groupsize)
    state = {f"one.{name}": tensor for name, tensor in parts.items()}
    if bias is not None:
        state["one.bias"] = bias
    holder.load_state_dict(state, assign=True)
    choose_operators(holder.requires_grad_(False), CPU, dtype)
    return holder.one


def error(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def dequantised_int4(weight, groupsize):
    packed, scales, zeros = quantize_int4(weight, groupsize)
    steps = unpack_int4(packed, groupsize).float().view(len(weight), -1, groupsize) - 8
    plain = steps * scales.float()[..., None] + zeros.float()[..., None]
    return plain.flatten(1)[:, : weight.shape[1]]


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("inputs", [576, 1536, 4096])
@pytest.mark.parametrize("mode", MODES)
def test_errors_of_outputs_stay_in_bounds(mode, inputs):
    weight, x = torch.randn(256, inputs), torch.randn(16, inputs)
    got = layer_of(weight, mode)(x)
    assert error(got, x @ weight.t()) < BOUNDS[mode]


def test_int4_groups_of_128_stay_under_ten_percent_and_beat_plain_rounding():
    weight = torch.randn(256, 4096)
    groups = weight.view(-1, 128)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = (high - low) / 15
    plain = ((groups - low) / step).round() * step + low
    mine = error(dequantised_int4(weight, 128), weight)
    assert mine < 0.095 < error(plain, groups)


def test_int4_of_weights_on_a_4_bit_grid_is_nearly_exact():
    steps = torch.randint(0, 16, (8, 4, 32)).float()
    steps[..., 0], steps[..., 1] = 0, 15
    weight = (steps * torch.rand(8, 4, 1) - torch.rand(8, 4, 1)).flatten(1)
    assert error(dequantised_int4(weight, 32), weight) < 5e-3


def test_important_columns_get_the_smaller_errors():
    groups, importance = torch.randn(128, 64), torch.ones(64)
    importance[::8] = 100
    errors = []
    for share in (importance, torch.ones(64)):
        steps, scale, zero = fit_groups(groups, share)
        plain = (steps - 8) * scale + zero
        errors.append(float(((plain - groups).square() * importance).sum()))
    assert errors[0] < errors[1]


def test_weights_on_a_gpu_are_quantised_there():
    with FakeTensorMode():  # shapes and devices of a GPU's tensors, without the GPU
        weight = torch.empty(48, 72, device="cuda")
        parts = [*quantize_int8(weight), *quantize_int4(weight, 32)]
    assert {part.device.type for part in parts} == {"cuda"}


def test_packing_keeps_every_step():
    steps = torch.randint(0, 16, (5, 96), dtype=torch.uint8)
    assert torch.equal(unpack_int4(pack_int4(steps, 32), 32), steps)


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_zeros_stay_zero(mode):
    weight = torch.randn(32, 64)
    weight[3] = 0
    got = layer_of(weight, mode)(torch.randn(4, 64))
    assert got.isfinite().all() and (got[:, 3] == 0).all()


@pytest.mark.parametrize("value", [1.0, -0.3, 1e-30, 1e30])
def test_rows_of_one_constant_come_back(value):
    weight = torch.full((4, 96), value)
    steps, scales = quantize_int8(weight)
    torch.testing.assert_close(steps * scales[:, None], weight, rtol=1e-6, atol=0)
    torch.testing.assert_close(dequantised_int4(weight, 32), weight, rtol=1e-4, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_a_tiny_row_and_a_huge_outlier_give_finite_outputs(mode):
    weight = torch.randn(32, 64)
    weight[0] *= 1e-30
    weight[1, 5] = 1e20
    x = torch.randn(4, 64)
    x[:, 5] = 1
    got = layer_of(weight, mode)(x)
    assert got.isfinite().all()
    torch.testing.assert_close(got[:, 1], torch.full((4,), 1e20), rtol=2e-2, atol=0)
    assert error(got[:, 0], x @ weight[0]) < 0.4  # of four numbers
    assert error(got[:, 2:], x @ weight[2:].t()) < 0.1


@pytest.mark.parametrize("mode", MODES)
def test_inputs_of_zero_give_the_bias(mode):
    bias = torch.randn(32)
    layer = layer_of(torch.randn(32, 64), mode, bias=bias)
    torch.testing.assert_close(layer(torch.zeros(2, 64)), bias.expand(2, 32), rtol=0, atol=1e-6)


# ---------------------------------------------------------------- layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(100, 72), (7, 33), (64, 288)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_any_size_any_dtype_and_a_bias(mode, shape, dtype):
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    layer = layer_of(weight, mode, bias=bias, dtype=dtype)
    for rows in (1, 3, 26, 64):
        x = torch.randn(rows, shape[1]).to(dtype)
        got = layer(x)
        assert got.dtype == dtype and got.shape == (rows, shape[0])
        assert error(got, x.float() @ weight.t() + bias) < BOUNDS[mode] + 0.05  # few outputs


@pytest.mark.parametrize("mode", MODES)
def test_a_row_does_not_depend_on_the_rows_next_to_it(mode):
    layer = layer_of(torch.randn(96, 576), mode)
    x = torch.randn(40, 576)
    together = layer(x)
    for rows in (1, 2, 16, 26):
        assert torch.equal(layer(x[:rows]), together[:rows])


@pytest.mark.parametrize("mode", MODES)
def test_compiled_layers_equal_eager_ones_in_one_graph_for_all(mode):
    layers = [layer_of(torch.randn(48, 64), mode) for _ in range(4)]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda layer, x: layer(x), fullgraph=True, dynamic=False)
    with torch.inference_mode():
        for rows in (1, 26):
            x = torch.randn(rows, 64)
            for layer in layers:
                assert torch.equal(compiled(layer, x), layer(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("mode", MODES)
def test_unpacked_gives_the_weights_that_a_layer_multiplies_with(mode):
    weight, bias, x = torch.randn(48, 64), torch.randn(48), torch.randn(5, 64)
    smoothing = torch.rand(64) + 0.5
    layer = layer_of(weight, mode, bias=bias, smoothing=smoothing, dtype=torch.bfloat16)
    plain = unpacked(layer)
    assert plain.weight.dtype == torch.bfloat16
    assert error(plain.weight, weight) < BOUNDS[mode]
    assert error(F.linear(x, plain.weight.float(), plain.bias), layer(x)) < 0.015


@pytest.mark.parametrize("mode", MODES)
def test_some_rows_of_a_packed_layer_are_a_packed_layer(mode):
    weight, x, ids = torch.randn(50, 72), torch.randn(5, 72), torch.tensor([0, 3, 7, 49])
    layer = layer_of(weight, mode, smoothing=torch.rand(72) + 0.5)
    reduced = layer.rows_of(ids)
    assert torch.equal(reduced(x), layer(x)[:, ids])
    assert torch.equal(reduced.rows_of(torch.tensor([2]))(x), layer(x)[:, 7:8])


def test_smoothing_changes_nothing_but_the_rounding():
    weight, x = torch.randn(32, 64), torch.randn(6, 64)
    x[:, 7] *= 100
    smoothing, promised = quantize.smooth(weight, x, dynamic=True)
    naive = layer_of(weight, "int8-dynamic")(x)
    smooth = layer_of(weight, "int8-dynamic", smoothing=smoothing)(x)
    expected = x @ weight.t()
    assert error(smooth, expected) < 0.4 * error(naive, expected)
    assert promised < 0.4 * error(naive[:, :], expected) * 4


# ---------------------------------------------------------------- files


def write_module(path, module, kind, config):
    tensors = {name: t for name, t in module.state_dict().items()}
    if kind == "target" and config.tied:
        tensors.pop("output.weight")
    specs = {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    write_checkpoint(path, kind=kind, config=asdict(config), specs=specs, tensors=tensors.items())
    return path


def tiny_file(path, **changes):
    model = random_model(**changes)
    return write_module(path, model, "target", model.config)


def load(path):
    return load_target(open_files(path), CPU, torch.float32)


def states(path):
    ids = torch.arange(40) * 7 % 128
    blocks = Blocks(read_checkpoint(path), [ids], CPU)
    for _ in blocks.run("test"):
        pass
    return blocks.states[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_quantised_target_is_complete_and_close(tmp_path, mode, tied):
    source = tiny_file(tmp_path / "talon.safetensors", tied=tied, qkv_bias=True)
    out = quantize_checkpoint(source, mode, 32)
    name = "talon_int4_g32" if mode == "int4" else f"talon_{mode}"
    assert out == tmp_path / f"{name}.safetensors"
    model = load(out)
    opened = read_checkpoint(out)
    assert opened.quantization["mode"] == mode
    assert set(opened.quantization["layers"]) >= {"output", "layers.3.feed_forward.w2"}
    assert "tok_embeddings.weight" in opened.specs
    assert model.output.in_features == 64
    assert error(states(out), states(source)) < 0.3
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([source.name, out.name])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["eagle1", "eagle3"])
def test_heads_can_be_quantised(tmp_path, family, mode):
    head = random_head(random_model(), family)
    head.tok_embeddings = head.output if not head.config.own_output else None
    if not head.config.own_output:
        head.tok_embeddings = head.output = None
    source = write_module(tmp_path / "head.safetensors", head, "draft", head.config)
    out = quantize_checkpoint(source, mode, 32, tmp_path / "out.safetensors")
    opened = read_checkpoint(out)
    assert opened.kind == "draft" and "fc" in opened.quantization["layers"]
    assert ("output" in opened.quantization["layers"]) == (family == "eagle3")


def test_the_source_is_never_overwritten_and_a_head_keeps_its_name(tmp_path):
    head = random_head(random_model(), "eagle1")
    head.tok_embeddings = head.output = None
    source = write_module(tmp_path / "head.safetensors", head, "draft", head.config)
    before = source.read_bytes()
    with pytest.raises(ValueError, match="is an input of this run"):
        quantize_checkpoint(source, "int8", out=source)
    assert source.read_bytes() == before
    assert quantize_checkpoint(source, "int8") == tmp_path / "head_int8.safetensors"


def test_vocabularies_that_differ_are_refused_before_the_long_work(tmp_path):
    one = tiny_file(tmp_path / "talon.safetensors")
    other = tiny_file(tmp_path / "other.safetensors", vocab_size=80)
    with pytest.raises(ValueError, match="vocabulary of 80"):
        quantize.evaluate(other, one)


@pytest.mark.parametrize("mode", MODES)
def test_equal_inputs_give_equal_bytes(tmp_path, mode):
    source = tiny_file(tmp_path / "talon.safetensors")
    outs = [quantize_checkpoint(source, mode, 32, tmp_path / name) for name in "ab"]
    assert outs[0].read_bytes() == outs[1].read_bytes()


def test_a_mode_is_read_from_the_file_not_from_its_name(tmp_path):
    source = tiny_file(tmp_path / "talon.safetensors")
    out = quantize_checkpoint(source, "int8", out=tmp_path / "talon_int4.safetensors")
    assert isinstance(load(out).output, LINEARS["int8"])


def cli(*arguments):
    done = subprocess.run(
        [sys.executable, str(ROOT / "quantize.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


def refused(tmp_path, path, mode="int8", groupsize=32):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError) as caught:
        quantize_checkpoint(path, mode, groupsize, tmp_path / "out.safetensors")
    assert sorted(tmp_path.iterdir()) == before
    message = str(caught.value)
    assert "\n" not in message
    return message


def refused_text(tmp_path, source):
    """The line for a text without a word in it; the tokenizer goes again."""
    (tmp_path / "empty.txt").write_text("a")
    save_byte_tokenizer(tmp_path)
    model = tiny_file(tmp_path / "bytes.safetensors", vocab_size=256)
    with pytest.raises(ValueError) as caught:
        quantize_checkpoint(model, "int4", text=tmp_path / "empty.txt")
    (tmp_path / "tokenizer.json").unlink()
    return str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", MODES)
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, mode, value):
    model = random_model()
    model.layers[2].feed_forward.w2.weight[1, 2] = value
    path = write_module(tmp_path / "talon.safetensors", model, "target", model.config)
    assert "layers.2.feed_forward.w2.weight" in refused(tmp_path, path, mode)


def test_what_cannot_be_asked_for_is_refused_in_one_line(tmp_path):
    source = tiny_file(tmp_path / "talon.safetensors")
    assert "int8-dynamic" in refused(tmp_path, source, "int3")
    assert "32, 64, 128, 256" in refused(tmp_path, source, "int4", 48)
    done = quantize_checkpoint(source, "int8")
    assert "1 tokens" in refused_text(tmp_path, source)
    assert "already quantised (int8)" in refused(tmp_path, done, "int4")


def test_unknown_modes_and_layers_in_a_file_are_refused():
    with torch.device("meta"):
        model = Transformer(random_model().config)
    for wrong in ({"output": "int3"}, {"layers.99.attention.wo": "int8"}):
        with pytest.raises(ValueError):
            swap_linears(model, {"mode": "int8", "groupsize": None, "layers": wrong})
    with pytest.raises(ValueError, match="group size 48"):
        swap_linears(model, {"mode": "int4", "groupsize": 48, "layers": {"output": "int4"}})


@pytest.mark.slow
def test_the_command_line_quantises_and_refuses(tmp_path):
    source = tiny_file(tmp_path / "talon.safetensors")
    code, out, err = cli("--checkpoint_path", source, "--mode", "int4", "--groupsize", 64)
    assert code == 0 and "talon_int4_g64.safetensors" in out and "no tokenizer" in err
    for wrong in (
        ["--checkpoint_path", source],
        ["--checkpoint_path", source, "--mode", "int9"],
        ["--checkpoint_path", tmp_path / "missing", "--mode", "int8"],
        ["--checkpoint_path", tmp_path, "--mode", "int8"],
        ["--checkpoint_path", tmp_path / "talon_int4_g64.safetensors", "--mode", "int8"],
        ["--checkpoint_path", source, "--mode", "int8", "--out", tmp_path / "no" / "x"],
        ["--checkpoint_path", source, "--mode", "int8", "--groupsize", 32],
        ["--checkpoint_path", source, "--mode", "int8", "--against", source],
        ["--evaluate", source, "--groupsize", 32],
        ["--evaluate", source, "--device", "cpu"],
        ["--checkpoint_path", source, "--mode", "int8", "--out", tmp_path],
    ):
        code, out, err = cli(*wrong)
        assert code == 2 and out == "" and "Traceback" not in err
        assert err.strip().splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize("mode, name", [("int4", "gptq_int4"), ("int8-dynamic", "quantize_weight")])
def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch, mode, name):
    source = tiny_file(tmp_path / "talon.safetensors")
    calls = []

    whole = getattr(quantize, name)

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(quantize, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, mode)
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


def test_evaluation_compares_with_the_original(tmp_path):
    source = tiny_file(tmp_path / "talon.safetensors", vocab_size=256)
    save_byte_tokenizer(tmp_path)
    out = quantize_checkpoint(source, "int8")
    same = quantize.evaluate(source, source)
    assert same[1].endswith("(+0.00%), KL divergence 0.0000, greedy tokens equal 100.00%")
    assert "greedy tokens equal 9" in quantize.evaluate(out)[1]


def test_a_loss_that_no_float_can_raise_e_to_is_an_infinite_perplexity(tmp_path):
    model = tiny_target()
    model.output.weight *= 1e4
    path = write_target(tmp_path, model)
    found = judge(*[read_checkpoint(path)] * 2, [torch.arange(40)])
    assert found == (float("inf"), float("inf"), 0, 1)


def test_the_divergence_is_that_of_the_two_distributions(tmp_path):
    source = tiny_file(tmp_path / "talon.safetensors")
    other = tiny_file(tmp_path / "other.safetensors", seed=1)
    windows = [torch.arange(90) * 7 % 128, torch.arange(40)]
    found = judge(read_checkpoint(source), read_checkpoint(other), windows)
    divergence, losses, same = [], [], []
    for window in windows:
        before, after = (full_logits(load(path), window.tolist()) for path in (source, other))
        p, q = before.double().log_softmax(-1), after.double().log_softmax(-1)
        divergence.append(F.kl_div(q, p, log_target=True, reduction="none").sum(-1))
        losses.append(F.cross_entropy(q[:-1], window[1:], reduction="none"))
        same.append(before.argmax(-1) == after.argmax(-1))
    assert found.after == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-4)
    assert found.divergence == pytest.approx(float(torch.cat(divergence).mean()), rel=1e-4)
    assert found.same == float(torch.cat(same).double().mean())
