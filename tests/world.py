"""A small world for the command line's tests: tiny targets, heads and tokenizers, and the ways to
run a command."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny import table_head, table_model
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as JsonTokenizer

from talon.checkpoint import TensorSpec
from talon.decoder import Decoder
from talon.loading import fit_tree
from talon.text import Engine
from talon.trees import NO_TREE, parse_tree
from talon.writing import write_checkpoint

ROOT = Path(__file__).resolve().parent.parent
BOS, START, END, STOP = SPECIAL = ("<|bos|>", "<|start|>", "<|end|>", "<|stop|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
VOCAB = 264
LIMIT = 512
TREES = (
    "chain:1",
    "chain:5",
    "static",
    "dynamic:nodes=8,levels=3,top_k=4",
    "dynamic:nodes=60,levels=8,top_k=10",
    "lookup:5",
)

# --- tiny models ----------------------------------------------------------------------------------


def save_tokenizer(directory: Path, template: str | None = TEMPLATE) -> None:
    """Byte-level BPE: 4 special tokens, the 256 bytes, 4 merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("Ġ", "t"), ("Ġt", "he")]
    pieces = [*SPECIAL, *letters, *(left + right for left, right in merges)]
    model = JsonTokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    assert model.get_vocab_size() == VOCAB
    model.save(str(directory / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": END, "add_bos_token": True}
    config |= {"chat_template": template} if template else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def save(path: Path, module: torch.nn.Module, kind: str, **changes) -> Path:
    """One of our files from a module; what a head borrows is left out."""
    own = {"tok_embeddings.weight", "output.weight", "d2t"} if kind == "draft" else set()
    if kind == "draft" and module.config.own_output:
        own.discard("output.weight")
    tensors = {name: tensor for name, tensor in module.state_dict().items() if name not in own}
    specs = {
        name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    config = asdict(module.config) | changes
    write_checkpoint(path, kind=kind, config=config, specs=specs, tensors=tensors.items())
    return path


def save_hf(directory: Path, model: torch.nn.Module) -> None:
    """The same model as a Hugging Face directory."""
    c, state = model.config, model.state_dict()
    q, kv = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    names = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
    tensors = {f"{new}.weight": state[f"{old}.weight"] for old, new in names.items()}
    for i in range(c.n_layer):
        mine, theirs = f"layers.{i}", f"model.layers.{i}"
        parts = state[f"{mine}.attention.wqkv.weight"].split([q, kv, kv])
        tensors |= {
            f"{theirs}.self_attn.{x}_proj.weight": part
            for x, part in zip("qkv", parts, strict=True)
        }
        gate, up = state[f"{mine}.feed_forward.w13.weight"].chunk(2)
        tensors |= {f"{theirs}.mlp.gate_proj.weight": gate, f"{theirs}.mlp.up_proj.weight": up}
        tensors[f"{theirs}.mlp.down_proj.weight"] = state[f"{mine}.feed_forward.w2.weight"]
        tensors[f"{theirs}.self_attn.o_proj.weight"] = state[f"{mine}.attention.wo.weight"]
        tensors[f"{theirs}.input_layernorm.weight"] = state[f"{mine}.attention_norm.weight"]
        tensors[f"{theirs}.post_attention_layernorm.weight"] = state[f"{mine}.ffn_norm.weight"]
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": c.vocab_size,
        "hidden_size": c.dim,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.n_layer,
        "num_attention_heads": c.n_head,
        "num_key_value_heads": c.n_kv_head,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.norm_eps,
        "max_position_embeddings": c.max_seq_length,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))


def say(*pieces: bytes) -> list[int]:
    """Token ids of single bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letter = {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + n) for n, byte in enumerate(others)
    }
    return [4 + letters.index(letter[byte]) for piece in pieces for byte in piece]


def cycle_of(tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of a cycle through `tokens`; every other token leads to its start."""
    assert len(set(tokens)) == len(tokens)
    following = torch.full((VOCAB,), tokens[0])
    following[torch.tensor(tokens)] = torch.tensor([*tokens[1:], tokens[0]])
    logits = torch.zeros(VOCAB, VOCAB)
    logits[torch.arange(VOCAB), following] = 10.0
    return logits.log_softmax(-1)


def speaker(
    tokenizer, text: bytes, tree: str | None = None, eos: tuple[int, ...] = (2,), wrong: tuple = ()
) -> Engine:
    """An engine that repeats `text` (distinct bytes); its head is right except after `wrong`."""
    model = table_model(cycle_of(say(text)), max_seq_length=LIMIT)
    head = table_head(model, wrong) if tree else None
    shape = fit_tree(parse_tree(tree), head.config) if tree else NO_TREE
    return Engine(Decoder(model, LIMIT, head, shape, compile=False), tokenizer, eos, {})


def record(path: Path) -> dict:
    """The JSON file, read strictly: no NaN or Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def shell(
    world: Path, *argv: object, env: dict | None = None, **options
) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        str(ROOT / "generate.py"),
        "--checkpoint_path",
        str(world / "talon.safetensors"),
    ]
    return subprocess.run(
        [*command, *map(str, argv)],
        capture_output=True,
        timeout=300,
        cwd=world,
        env={**os.environ, **(env or {})},
        **options,
    )
