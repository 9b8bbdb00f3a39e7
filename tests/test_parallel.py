"""Several processes that share a target (talon/parallel.py): their numbers are those of one."""

import itertools
from pathlib import Path

import pytest
import torch
from processes import on_processes
from tiny import decode, random_head, random_model
from world import save

from model import KVCache, Place, causal_mask, rope_table
from quantize import quantize_checkpoint
from talon.decoder import Decoder
from talon.loading import fit_tree, load_head, load_target, open_files, shared
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
