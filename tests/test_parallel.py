"""Several processes that share a target (talon/parallel.py): their numbers are those of one."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import on_processes
from tiny import decode, random_head, random_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from world import save

from model import KVCache, Place, causal_mask, rope_table
from quantize import quantize_checkpoint
from talon.decoder import Decoder
from talon.loading import fit_tree, load_head, load_target, open_files, shared
from talon.memory import loaded_bytes, numbers_in
from talon.sampling import GREEDY, SamplingConfig
from talon.trees import parse_tree

CPU = torch.device("cpu")
MODES = ("int8", "int8-dynamic", "int4")
TREES = ("none", "chain:3", "static", "dynamic:nodes=8,levels=3,top_k=4", "lookup:3",
         "chain:2+lookup:3")  # fmt: skip
SAMPLED = SamplingConfig(6.0, top_k=40, top_p=0.95, seed=3)
PROMPT = [3, 17, 99, 4, 17, 99, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Targets of every precision, and of 3 key/value heads, which two processes share unevenly;
    heads of both families. The shares are multiples of 32: at the end of a row eager torch
    computes SiLU otherwise."""
    folder = tmp_path_factory.mktemp("parallel")
    sizes = {"n_head": 8, "n_kv_head": 4, "n_layer": 3, "intermediate_size": 256}
    sizes |= {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
    model = random_model(**sizes)
    for layer in model.layers:
        for linear in (layer.attention.wo, layer.feed_forward.w2):
            linear.bias.normal_()
    save(folder / "fp32.safetensors", model, "target")
    for mode in MODES:
        out = folder / f"{mode}.safetensors"
        quantize_checkpoint(folder / "fp32.safetensors", mode, 32, out)
    save(
        folder / "uneven.safetensors",
        random_model(n_head=6, n_kv_head=3, intermediate_size=192),
        "target",
    )
    save(folder / "qwen.safetensors", random_model(qk_norm=True, intermediate_size=128), "target")
    for family in ("eagle1", "eagle3"):
        save(folder / f"{family}.safetensors", random_head(model, family), "draft")
    return folder


def opened(target: Path, head: Path | None = None, dtype: torch.dtype = torch.float32) -> tuple:
    files = shared(open_files(target, head))
    model = load_target(files, CPU, dtype)
    return files, model, head and load_head(files, model, CPU, dtype)


def hidden(target: Path, dtype: torch.dtype = torch.float32) -> bytes:
    """The states of a forward over 40 tokens, and those of single rows."""
    _, model, _ = opened(target, dtype=dtype)
    c, slots, rows = model.config, torch.arange(64), torch.arange(40)
    rope = rope_table(64, c.head_dim, c.rope_theta, None)
    cache, found = KVCache(c.n_layer, c.n_kv_head, 64, c.head_dim, dtype), []
    for part in (rows, rows[:1], rows[1:9]):
        mask = causal_mask(part[:1], len(part), slots)
        found += model(part * 7 % 128, Place(rope[:, part], part, mask), cache)[0]
    return torch.cat(found).view(torch.uint8).numpy().tobytes()


def all_ids(folder: Path, names: tuple[str, ...], heads=("eagle1", "eagle3")) -> dict:
    """What every tree says on every target, greedily and sampled."""
    found = {}
    for name, family in itertools.product(names, heads):
        files, model, head = opened(
            folder / f"{name}.safetensors", folder / f"{family}.safetensors"
        )
        for words in TREES:
            tree = fit_tree(parse_tree(words), files.head_config)
            decoder = Decoder(model, 100, head if tree.needs_head else None, tree, compile=False)
            for sampling in (GREEDY, SAMPLED):
                decoder.forget()
                tokens = decode(decoder, PROMPT, 12, sampling).tokens
                found[name, family, words, sampling.greedy] = tokens
    return found


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ids_are_those_of_one_process(folder, tmp_path, count):
    """All trees, both families, greedy and sampled, every precision."""
    names = ("fp32", *MODES)
    alone = all_ids(folder, names)
    assert max(len(set(ids)) for ids in alone.values()) > 6
    for ids in on_processes(count, tmp_path / "meeting", lambda: all_ids(folder, names)):
        assert ids == alone


@pytest.mark.parametrize("name", ["fp32", *MODES, "uneven", "qwen", "bf16"])
def test_bits_are_those_of_one_process(folder, tmp_path, name):
    """Not only ids: each number is computed by one process, as one alone computes it."""
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    path = folder / f"{name.replace('bf16', 'fp32')}.safetensors"
    alone = hidden(path, dtype)
    for count in (2,) if name in ("uneven", "qwen") else (2, 4):
        for states in on_processes(count, tmp_path / f"{count}", lambda: hidden(path, dtype)):
            assert states == alone


class Calls(TorchDispatchMode):
    """The ATen calls of a round, exchanges among them, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        made = call(*args, **(kwargs or {}))
        self.made.append((call, args, kwargs or {}, made))
        return made

    def again(self) -> None:
        """The same calls on the same buffers, as a captured graph repeats them."""
        known = {}
        for call, args, kwargs, made in self.made:
            args, kwargs = tree_map(
                lambda value, known=known: known.get(id(value), value), (args, kwargs)
            )
            values = tree_leaves(call(*args, **kwargs))
            known |= {id(old): new for old, new in zip(tree_leaves(made), values, strict=True)}


@torch.inference_mode()
def replayed(folder: Path, rounds: int = 6) -> list[int]:
    """The ids of a text whose first round is recorded, and repeated from then on."""
    files, model, head = opened(folder / "fp32.safetensors", folder / "eagle1.safetensors")
    tree = fit_tree(parse_tree("dynamic:nodes=8,levels=3,top_k=4"), files.head_config)
    decoder = Decoder(model, 100, head, tree, compile=False)
    pick = decoder.picks.set(GREEDY)
    found, at = [decoder.prefill(PROMPT, 0, pick)], decoder.at(100)
    with Calls() as calls:
        decoder.round(at, pick)
    if dist.is_initialized():
        assert (
            sum("talon.gather" in str(call[0]) for call in calls.made) == 4 * model.config.n_layer
        )
    for index in range(rounds):
        if index:
            calls.again()
        count, *tokens = decoder.result.tolist()
        found += tokens[:count]
    return found


def test_a_recorded_round_with_its_exchanges_gives_the_same_text(folder, tmp_path):
    _, model, _ = opened(folder / "fp32.safetensors")
    alone = decode(Decoder(model, 100, compile=False), PROMPT, 30).tokens
    for ids in on_processes(2, tmp_path / "meeting", lambda: replayed(folder)):
        assert len(ids) > 6 and ids == alone[: len(ids)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp32", "int8"])
def test_a_process_holds_its_share(folder, tmp_path, mode):
    """500 MB: at its peak less than its part of the layers and what is whole, and a tenth more."""
    sizes = {"dim": 1024, "n_layer": 19, "n_head": 16, "n_kv_head": 8, "head_dim": 64}
    path = save(tmp_path / "fp32.safetensors",
                random_model(**sizes, intermediate_size=1280), "target")  # fmt: skip
    if mode != "fp32":
        path = quantize_checkpoint(path, mode, 32)

    def peak() -> tuple[int, int]:
        opened(folder / f"{mode}.safetensors")  # what is imported is no part of a share
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before = numbers_in(Path("/proc/self/status"))["VmRSS"]
        files, model, _ = opened(path)
        after = numbers_in(Path("/proc/self/status"))["VmHWM"]
        assert model.config.n_head == 8
        return (after - before) * 1024, loaded_bytes(files.target, torch.float32)

    whole = path.stat().st_size
    for used, share in on_processes(2, tmp_path / "meeting", peak):
        print(f"{mode}: file {whole / 1e6:.0f} MB, share {share / 1e6:.0f}, peak {used / 1e6:.0f}")
        assert share < 0.52 * whole and used < 1.1 * share


@pytest.mark.slow
def test_the_operators_of_a_gpu_are_shared_too():
    """In Triton's interpreter, whose sums depend on shapes: equal but for rounding."""
    script, modes = Path(__file__).with_name("gpu_parallel.py"), ["plain", *MODES]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, script, *modes], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines()]
    assert [mode for mode, _ in found] == [mode for mode in modes for _ in range(2)]
    for mode, error in found:
        assert float(error) < (0.03 if mode == "int8-dynamic" else 2e-3), found
