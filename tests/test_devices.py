"""Whatever makes tensors for a device makes them there: no constant is born on the CPU.

Each job runs on the stand-in for a GPU (cuda_standin.py), with real numbers, or on fake tensors of
device cuda, which takes a CUDA build of torch but no GPU. Leaves out: whole texts of all trees
(test_cuda_branch.py)."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import gpu_plain
import pytest
import tiny_training
import torch
from cuda_standin import Gpu
from tiny import GOLDEN, TREES, converted, random_head, random_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import train_draft
from eagle_draft import DraftHead
from model import Transformer
from talon import operators
from talon.checkpoint import Checkpoint, TensorSpec, read_checkpoint
from talon.decoder import Decoder
from talon.kernels import gpu_layers
from talon.kernels.linear import LINEARS, quantize_int4, quantize_int8
from talon.loading import Files, load_target
from talon.text import load
from talon.training.batched import BatchedDecoder, Slot
from talon.training.conversations import Conversation
from talon.training.head import borrow, build_head, head_config, output_rows
from talon.training.losses import Teacher, Unrolled
from talon.trees import Tree, parse_tree

gpu_plain.register()
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LOOKUPS = ("lookup:3", "chain:5+lookup:3", "dynamic:nodes=8,levels=3,top_k=4+lookup:5")
MODES = (None, *LINEARS)


class Hollow(Checkpoint):
    """A file whose numbers are all one."""

    def tensor(self, name: str) -> Tensor:
        return torch.ones(self.specs[name].shape, dtype=self.specs[name].dtype)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.tensor(name)) for name in self.specs)


def hollow_files(mode: str | None) -> Files:
    """A target's file, its linears quantised where there is a mode."""
    with torch.device("meta"):
        model = random_model()
    specs = {n: TensorSpec(t.dtype, tuple(t.shape)) for n, t in model.state_dict().items()}
    layers = {n: m for n, m in model.named_modules() if mode and isinstance(m, nn.Linear)}
    for name, linear in layers.items():
        del specs[f"{name}.weight"]
        stored = LINEARS[mode].specs(linear.in_features, linear.out_features, 32)
        specs |= {f"{name}.{part}": spec for part, spec in stored.items()}
    quantization = {"mode": mode, "groupsize": 32, "layers": dict.fromkeys(layers, mode)}
    target = Hollow(Path("x"), "target", {}, quantization if mode else None, {}, specs)
    return Files(target, model.config, None)


# ---------------------------------------------------------------- the jobs


def quantise() -> None:
    weight = torch.ones(6, 70, device=CUDA)
    parts = [*quantize_int8(weight), *quantize_int4(weight, 32)]
    assert all(part.device.type == "cuda" for part in parts)


def load_model(mode: str | None) -> Transformer:
    model = load_target(hollow_files(mode), CUDA, torch.bfloat16)
    tensors = (*model.parameters(), *model.buffers())
    assert tensors and all(tensor.device.type == "cuda" for tensor in tensors)
    return model


def run_rounds(model: Transformer, head: DraftHead | None, tree: Tree) -> None:
    """A chunk of a prompt and a round, in every kind of sampling."""
    decoder = Decoder(model, 100, head, tree, compile=False)
    tokens = torch.zeros(decoder.chunks[0] + 1, dtype=torch.int64, device=CUDA)
    with torch.inference_mode():
        for pick in decoder.picks.by_name.values():
            decoder.prefill_chunk(tokens, 5, True, decoder.at(decoder.chunks[0]), pick)
            decoder.round(decoder.at(120), pick)


def run_quantised(mode: str | None) -> None:
    run_rounds(load_model(mode), None, parse_tree("none"))


def run_drafted(family: str, tree: str) -> None:
    model, shape = random_model().to(CUDA), parse_tree(tree)
    head = random_head(model, family).to(CUDA) if shape.needs_head else None
    run_rounds(model, head, shape)


def train(family: str) -> None:
    """The teacher, and the levels of a fresh head over two conversations of it."""
    model, settings = tiny_training.tiny_target().to(CUDA), tiny_training.training_config(family)
    config = head_config(model.config, settings)
    head = build_head(config, model, torch.arange(config.draft_vocab_size) + 3, seed=0)
    unrolled = Unrolled(head, borrow(head, model), settings)
    data = [Conversation(list(range(length)), [(6, length)]) for length in (30, 40)]
    batch = Teacher(model, config, 64).batch(data)
    *_, hidden = unrolled.levels(batch, 3)
    final, output = batch.final.flatten(0, 1)[:7], unrolled.target_output
    teacher = (final.to(output.dtype) @ output.t()).float().softmax(-1)
    loss = unrolled.level_loss(hidden[:7], final, teacher, batch.choice.flatten()[:7])
    assert all(part.device.type == "cuda" for part in loss)


def talk() -> None:
    """A step of two texts in a batch, one of them sampled."""
    decoder = BatchedDecoder(tiny_training.tiny_target().to(CUDA), 2, 32)
    texts = {row: Slot(row, deque(), temperature=0.8 * row, start=0) for row in range(2)}
    chosen = decoder.choose(decoder.forward([5, 6], [0, 3]), texts)
    assert chosen.device.type == "cuda" and chosen.shape == (2,)


# ---------------------------------------------------------------- fake tensors


def move(module: nn.Module, device: torch.device) -> nn.Module:
    """`nn.Module.to`, which fake tensors do not support. What is shared stays shared."""
    moved = {id(p): nn.Parameter(p.to(device), p.requires_grad) for p in module.parameters()}
    for part in module.modules():
        own = part._parameters
        own.update({name: moved[id(p)] for name, p in own.items() if p is not None})
        part._buffers.update({n: b.to(device) for n, b in part._buffers.items() if b is not None})
    return module


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Fake tensors on a GPU, without a driver; what of torch.cuda a decoder asks says nothing."""
    torch._C._ensureCUDADeviceGuardSet()
    ours = {"get_device_capability": lambda device=None: (8, 6)}
    with (
        patch.multiple(torch.cuda, Stream=Mock(), Event=Mock(), graph_pool_handle=Mock(), **ours),
        patch.object(gpu_layers, "factors_of", lambda linear: 1 / linear.smoothing),
        patch.object(FakeTensorMode, "avoid_device_init", True),
        patch.object(nn.Module, "to", move),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


JOBS = {
    "quantise": quantise,
    **{f"{mode}, loaded and run": partial(run_quantised, mode) for mode in MODES},
    **{
        f"{family}, {tree}": partial(run_drafted, family, tree)
        for family in ("eagle1", "eagle3")
        for tree in (*TREES, *LOOKUPS)
    },
    "train eagle1": partial(train, "eagle1"),
    "train eagle3": partial(train, "eagle3"),
}


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")
@pytest.mark.parametrize("job", JOBS)
def test_a_job_runs_on_fake_tensors_of_a_gpu(job):
    with fake_gpu():
        JOBS[job]()


# ---------------------------------------------------------------- the stand-in


@pytest.mark.parametrize("mode", MODES)
def test_a_loaded_model_is_on_the_gpu(mode):
    with Gpu():
        load_model(mode)


def test_quantising_stays_on_the_gpu():
    with Gpu():
        quantise()


def test_self_talk_runs_on_the_gpu():
    with Gpu():
        talk()


@pytest.mark.parametrize("family", ["eagle1", "eagle3"])
def test_a_training_on_the_gpu_writes_the_head_that_one_on_the_cpu_writes(family, tmp_path):
    target = tiny_training.write_target(tmp_path / "target", tiny_training.tiny_target())
    rows = [{"ids": row.ids, "spans": row.spans} for row in tiny_training.random_data(8)]
    data = tiny_training.write_lines(tmp_path / "rows.jsonl", rows)
    written = []
    for device in ("cpu", "cuda"):
        more = ("--head", family, "--device", device, "--epochs", 1)
        argv = tiny_training.arguments(target, data, tmp_path / device, *more)
        with Gpu():
            assert train_draft.main(argv) == 0
        written.append(dict(read_checkpoint(tmp_path / device / train_draft.HEAD_FILE).tensors()))
    assert written[0].keys() == written[1].keys()
    for name, tensor in written[0].items():
        torch.testing.assert_close(tensor, written[1][name], rtol=0, atol=1e-3)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A target and its head, converted."""
    base, out = GOLDEN / "eagle3_tiny_seed0", tmp_path_factory.mktemp("golden")
    return [converted(base / part, out / f"{part}.safetensors") for part in ("target", "head")]


@pytest.mark.parametrize("family", ["eagle1", "eagle3"])
def test_a_target_on_the_operators_of_a_gpu_teaches_and_lends(family):
    """In bf16, a text of more rows than they take at a time."""
    model, settings = tiny_training.tiny_target(), tiny_training.training_config(family)
    config = head_config(model.config, settings)
    wanted = Teacher(model, config, 600).run(ids := [3 + i % 40 for i in range(600)])
    with Gpu():
        model = model.to(CUDA, torch.bfloat16)
        operators.choose_operators(model, CUDA, torch.bfloat16)
        vocabulary = torch.arange(config.draft_vocab_size, device=CUDA) + 3
        found = [part.cpu() for part in Teacher(model, config, 600).run(ids)]
        rows, decoder = output_rows(model, vocabulary), BatchedDecoder(model, 300, 32)
        assert decoder.batch == 256 and isinstance(rows, nn.Linear)
        assert torch.equal(rows.weight, model.output.weight[vocabulary])
        assert decoder.forward([5] * 256, [0] * 256).shape[0] == 256
    assert (found[0] - wanted[0]).norm() < 0.04 * wanted[0].norm()  # bf16
    assert (found[1] == wanted[1]).float().mean() > 0.9


@pytest.mark.parametrize("pair", ["eagle2_tiny_seed0", "eagle3_tiny_seed0"])
def test_a_gpu_drafts_with_an_int8_head_unless_it_is_kept_and_says_the_same(pair, tmp_path):
    parts = ("target", "head")
    files = [converted(GOLDEN / pair / part, tmp_path / f"{part}.safetensors") for part in parts]
    tokens, held = [], []
    for tree, keep in (("none", False), (TREES[3], False), (TREES[3], True)):
        with Gpu():
            more = {"dtype": "fp16", "compile": False, "max_seq_length": 200, "keep_head": keep}
            engine = load(*files, tree=tree, device="cuda", **more)
            text = engine.generate([1, 2, 3], max_new_tokens=20)
            assert list(text) == []
            tokens.append(text.tokens)
            held.append([engine.card["head_quantization"]])
            if stage := getattr(engine.decoder.drafter, "stage", None):
                layers = stage.module.layer.attention.wqkv, stage.module.output
                held[-1] += [layer.weight.dtype for layer in layers]
    assert tokens[0] == tokens[1] == tokens[2]
    assert held == [[None], ["int8"] + [torch.int8] * 2, [None] + [torch.float16] * 2]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 20, "seed": 3}])
def test_the_library_gives_the_same_text_on_the_gpu(golden, sampling):
    tokens = []
    for device in ("cpu", "cuda"):
        with Gpu() as gpu:
            options = {"dtype": "fp32", "compile": False, "max_seq_length": 200}
            engine = load(*golden, tree=TREES[3], device=device, **options)
            text = engine.generate([1, 2, 3], max_new_tokens=20, **sampling)
            assert list(text) == []  # there is no tokenizer
            tokens.append(text.tokens)
    assert gpu.captures and tokens[0] == tokens[1]
