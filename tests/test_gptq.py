"""GPTQ: it costs less than rounding each weight by itself, and what it promises, a file holds."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from cuda_standin import CUDA, Gpu
from test_quantize import states, tiny_file
from tiny import save_byte_tokenizer, unpack_int4

import quantize
from quantize import quantize_checkpoint
from talon.checkpoint import read_checkpoint
from talon.kernels.linear import quantize_int4
from talon.quantising import gptq
from talon.quantising.gptq import Grid, Hessian, gptq_int4

CPU = torch.device("cpu")


def inputs_like_a_model(count=400, width=96, seed=0):
    """Inputs that depend on each other, one of them far longer than all others."""
    rand = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=rand) @ torch.randn(width, width, generator=rand) ** 3
    x[0] *= 1000
    return x


def layer(outputs=40, width=96, device=CPU):
    weight = torch.randn(outputs, width, generator=torch.Generator().manual_seed(1))
    hessian = Hessian(width, device)
    hessian.add(inputs_like_a_model(width=width).to(device))
    return weight.to(device), hessian


def dequantised(packed, scales, zeros, groupsize, width):
    steps = unpack_int4(packed, groupsize).float().view(len(packed), -1, groupsize) - 8
    return (steps * scales.float()[..., None] + zeros.float()[..., None]).flatten(1)[:, :width]


def cost(weight, values, hessian):
    lost = weight - values
    return float(((lost @ hessian.damped()) * lost).sum())


@pytest.mark.parametrize("groupsize, width", [(32, 96), (64, 96), (128, 96), (32, 80)])
def test_int4_costs_less_than_plain_rounding_and_is_what_the_file_says(groupsize, width):
    weight, hessian = layer(width=width)
    *parts, values = gptq_int4(weight, hessian, groupsize)
    assert torch.equal(values, dequantised(*parts, groupsize, width))
    plain = dequantised(*quantize_int4(weight, groupsize), groupsize, width)
    assert cost(weight, values, hessian) < 0.6 * cost(weight, plain, hessian)


def test_a_pass_never_raises_the_cost():
    weight, hessian = layer()
    turned, h = weight.t().contiguous(), hessian.damped()
    pairs = [torch.stack(gptq.fit(part, torch.ones(32))) for part in turned.split(32)]
    scales, zeros = torch.stack(pairs, 1)
    grid = Grid(torch.empty_like(turned), scales, zeros, 32)
    for i, row in enumerate(turned):
        grid.steps[i] = grid.round(i // 32, row)[0]
    costs = [cost(weight, grid.values().t(), hessian)]
    for _ in range(4):
        gptq.improve(grid, turned, h)
        costs.append(cost(weight, grid.values().t(), hessian))
    assert costs[1] < 0.9 * costs[0]
    assert all(b <= a * (1 + 1e-6) for a, b in zip(costs, costs[1:], strict=False))


def test_outputs_do_not_depend_on_each_other(monkeypatch):
    weight, hessian = layer(outputs=48)
    whole = gptq_int4(weight, hessian, 32)
    monkeypatch.setattr(gptq, "OUTPUTS", 16)
    for part, expected in zip(gptq_int4(weight, hessian, 32), whole, strict=True):
        torch.testing.assert_close(part, expected)


def test_one_long_input_does_not_hide_the_others():
    x = inputs_like_a_model()
    known, others = Hessian(96, CPU), Hessian(96, CPU)
    known.add(x)
    others.add(x[1:])
    assert known.sum.trace() < 1.5 * others.sum.trace()
    assert not torch.equal(known.sum, others.sum)


def test_inputs_that_are_always_zero_and_rows_of_zeros_are_rounded_too():
    weight, hessian = layer()
    x = inputs_like_a_model()
    x[:, 5] = 0
    hessian = Hessian(96, CPU)
    hessian.add(x)
    weight[3] = 0
    values = gptq_int4(weight, hessian, 32)[-1]
    assert values.isfinite().all() and (values[3] == 0).all()
    nothing = Hessian(96, CPU)
    nothing.add(torch.zeros(8, 96))
    assert F.mse_loss(gptq_int4(weight, nothing, 32)[-1], weight) < 0.02


def test_a_gpu_rounds_where_the_weights_are():
    expected = gptq_int4(*layer(), 32)
    with Gpu():
        found = gptq_int4(*layer(device=CUDA), 32)
        assert all(part.device.type == "cuda" for part in found)
        found = [part.cpu() for part in found]
    assert all(torch.equal(part, wanted) for part, wanted in zip(found, expected, strict=True))


def test_a_calibrated_target_is_nearer_than_one_rounded_weight_by_weight(tmp_path, monkeypatch):
    source = tiny_file(tmp_path / "talon.safetensors")
    calibrated = quantize_checkpoint(source, "int4", 32, tmp_path / "a")
    monkeypatch.setattr(quantize, "read_windows", lambda *_: [])
    plain = quantize_checkpoint(source, "int4", 32, tmp_path / "b")
    wanted = states(source)
    lost = [float((states(path) - wanted).norm()) for path in (calibrated, plain)]
    assert lost[0] < lost[1]
    specs = [read_checkpoint(path).specs for path in (calibrated, plain)]
    assert specs[0] == specs[1]


def test_one_block_of_hessians_is_held_at_a_time(tmp_path, monkeypatch):
    alive, most = weakref.WeakSet(), []

    class Counted(Hessian):
        def __init__(self, *given):
            super().__init__(*given)
            alive.add(self)
            most.append(len(alive))

    monkeypatch.setattr(quantize, "Hessian", Counted)
    quantize_checkpoint(tiny_file(tmp_path / "talon.safetensors"), "int4", 32)
    assert max(most) == 4 and len(most) == 4 * 4 + 1


def test_the_text_is_the_one_given(tmp_path):
    save_byte_tokenizer(tmp_path)
    source = tiny_file(tmp_path / "talon.safetensors", vocab_size=256)
    outs = []
    for number, words in enumerate(("one two three four ", "ABCDEFGHIJKL ")):
        (tmp_path / "text").write_text(words * 40)
        out = tmp_path / str(number)
        outs.append(quantize_checkpoint(source, "int4", 32, out, tmp_path / "text").read_bytes())
    assert outs[0] != outs[1]
