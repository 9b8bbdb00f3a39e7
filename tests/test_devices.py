"""Everything that makes tensors for a device makes them there: no constant is born on the CPU.

Each job runs on the stand-in for a GPU (cuda_standin.py), with real numbers, and on fake tensors of
device cuda, which a CUDA build of torch knows entirely and the CPU build in part."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tiny import GOLDEN, converted, random_head, random_model
from torch import nn

from talon.checkpoint import TensorSpec, write_checkpoint
from talon.decoder import Decoder
from talon.kernels.linear import LINEARS, quantize_int4, quantize_int8
from talon.trees import parse_tree

CUDA = torch.device("cuda")
PICKS = ("greedy", "sample", "filter")
LOOKUPS = ("lookup:3", "chain:5+lookup:3", "dynamic:nodes=8,levels=3,top_k=4+lookup:5")


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and an EAGLE-3 head, converted."""
    out = tmp_path_factory.mktemp("golden")
    base = GOLDEN / "eagle3_tiny_seed0"
    return tuple(converted(base / part, out / f"{part}.safetensors") for part in ("target", "head"))


def write_quantized(path: Path, mode: str) -> Path:
    """A target file whose linears are quantised: random numbers in the form of `mode`."""
    model = random_model()
    state = {name: value for name, value in model.state_dict().items()}
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name in layers:
        linear = model.get_submodule(name)
        del state[f"{name}.weight"]
        specs = LINEARS[mode].specs(linear.in_features, linear.out_features, 32)
        state |= {f"{name}.{part}": torch.ones(s.shape, dtype=s.dtype) for part, s in specs.items()}
    specs = {name: TensorSpec(value.dtype, tuple(value.shape)) for name, value in state.items()}
    write_checkpoint(
        path, kind="target", config=asdict(model.config), specs=specs, tensors=state.items(),
        quantization={"mode": mode, "groupsize": 32, "layers": dict.fromkeys(layers, mode)},
    )  # fmt: skip
    return path


def on_device(module: nn.Module, device: torch.device) -> nn.Module:
    """`module.to(device)`, which fake tensors do not support; what is shared stays shared."""
    moved = {id(p): nn.Parameter(p.to(device), p.requires_grad) for p in module.parameters()}
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None:
                part._parameters[name] = moved[id(value)]
        part._buffers.update({n: b.to(device) for n, b in part._buffers.items() if b is not None})
    return module


def assert_there(module: nn.Module) -> None:
    tensors = (*module.parameters(), *module.buffers())
    assert tensors and all(tensor.device.type == "cuda" for tensor in tensors)


# ---------------------------------------------------------------- the jobs


def quantise(*_: object) -> None:
    weight = torch.ones(6, 70, device=CUDA)
    assert all(part.device.type == "cuda" for part in quantize_int8(weight))
    for importance in (torch.ones(70, device=CUDA), None):
        assert all(x.device.type == "cuda" for x in quantize_int4(weight, 32, importance))


def round_and_prefill(family: str, tree: str) -> None:
    """Both, in every kind of sampling; only the prompt's last token is waited for, in `prefill`."""
    model = on_device(random_model(), CUDA)
    head = on_device(random_head(model, family), CUDA)
    shape = parse_tree(tree)
    run_rounds(Decoder(model, 100, head if shape.needs_head else None, shape, compile=False))


def run_rounds(decoder: Decoder) -> None:
    tokens = torch.zeros(decoder.chunk + 1, dtype=torch.int64, device=CUDA)
    with torch.inference_mode():
        for name in PICKS:
            pick = decoder.picks.by_name[name]
            decoder.prefill_chunk(tokens, 5, True, decoder.at(decoder.chunk), pick)
            decoder.round(decoder.at(120), pick)


class FakeGpu(ExitStack):
    """Fake tensors on a device cuda, without a driver."""

    def __enter__(self) -> "FakeGpu": ...
