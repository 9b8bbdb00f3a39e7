"""Hugging Face directories made for the tests, and the converter run on them as from a shell."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from convert_hf_checkpoint import main
from talon.checkpoint import Checkpoint, read_checkpoint
from talon.cli import run

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "data" / "golden"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def tokenizer_json(size: int, added: tuple[str, ...] = (), special: bool = False) -> str:
    """A tokenizer.json of `size` words w0, w1, ..., and the added tokens after them."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokens = [
        {"id": size + i, "content": token, **flags, "special": special}
        for i, token in enumerate(added)
    ]
    vocab = {f"w{i}": i for i in range(size)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}
    split = {"type": "WhitespaceSplit"}
    return json.dumps({"added_tokens": tokens, "pre_tokenizer": split, "model": model})


def command(*arguments: object) -> int:
    """The exit code of convert_hf_checkpoint.py."""
    with pytest.raises(SystemExit) as ended:
        run(lambda: main([*map(str, arguments)]))
    return ended.value.code


def tiny_tensors(config: dict, biases: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Random weights in Hugging Face names, fp32; `biases` are the linears that get one."""
    c, rand = config, torch.Generator().manual_seed(1)
    heads = c["num_attention_heads"]
    kv = c.get("num_key_value_heads") or heads
    head_dim = c.get("head_dim") or c["hidden_size"] // heads
    dim, inner = c["hidden_size"], c["intermediate_size"]
    linears = {
        "self_attn.q_proj": (heads * head_dim, dim),
        "self_attn.k_proj": (kv * head_dim, dim),
        "self_attn.v_proj": (kv * head_dim, dim),
        "self_attn.o_proj": (dim, heads * head_dim),
        "mlp.gate_proj": (inner, dim),
        "mlp.up_proj": (inner, dim),
        "mlp.down_proj": (dim, inner),
    }
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], dim), "model.norm.weight": (dim,)}
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, shape in linears.items():
            shapes[f"{layer}.{name}.weight"] = shape
            if name.split(".")[1] in biases:
                shapes[f"{layer}.{name}.bias"] = shape[:1]
        shapes[f"{layer}.input_layernorm.weight"] = (dim,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (dim,)
    if not c.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (c["vocab_size"], dim)
    return {name: torch.randn(shape, generator=rand) for name, shape in shapes.items()}


def make(path: Path, changes=None, tensors=None, drop=(), biases=(), save=True) -> Path:
    """A directory with config.json (CONFIG with `changes`, without `drop`) and one weight file."""
    path.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in (CONFIG | (changes or {})).items() if k not in drop}
    (path / "config.json").write_text(json.dumps(config))
    if save:
        sizes = CONFIG | config
        tensors = tiny_tensors(sizes, biases) if tensors is None else tensors
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def shard(path: Path, tensors: dict[str, Tensor], parts: int = 3, pickled: bool = False) -> None:
    """The tensors dealt out over `parts` files, so that q, k and v lie in different ones."""
    stem, suffix = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    weight_map = {}
    for i in range(parts):
        name = f"{stem}-{i + 1:05}-of-{parts:05}.{suffix}"
        part = dict(list(tensors.items())[i::parts])
        torch.save(part, path / name) if pickled else save_file(part, path / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


def hollow(path: Path, config: dict, shapes: dict) -> Path:
    """A directory whose weights take no room on the disk: zeros, but for t2d."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in shapes.items():
        dtype, bytes_each = {"d2t": ("I64", 8), "t2d": ("BOOL", 1)}.get(name, ("BF16", 2))
        start, end = end, end + torch.Size(shape).numel() * bytes_each
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
        if "t2d" in header:
            file.seek(8 + len(raw) + header["t2d"]["data_offsets"][0])
            file.write(b"\1" * shapes["d2t"][0])
    return path


def convert(path: Path, *flags: str) -> Checkpoint:
    assert command("--checkpoint_dir", path, "--out", path / "talon.out", *flags) == 0
    return read_checkpoint(path / "talon.out")


def tensors_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in checkpoint.tensors()}


def refusal(capsys, path: Path, *words: str, flags: tuple[str, ...] = ()) -> str:
    """Conversion ends with code 2 and one line that holds every word, and leaves no new file."""
    capsys.readouterr()
    before = sorted(path.rglob("*")) if path.is_dir() else None
    assert command("--checkpoint_dir", path, *flags) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert captured.out == "" and len(lines) == 1 and lines[0].startswith("error: "), captured.err
    line = lines[0].replace(str(path), "DIR")  # a word must not be found in the test's own name
    for word in words:
        assert str(word) in line, line
    assert before == (sorted(path.rglob("*")) if path.is_dir() else None)
    return lines[0]
