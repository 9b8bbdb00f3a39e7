"""The engine as a library and the command line: every flag, ends, streams, bad input.

Models are tiny: a random one with a chat template, and table models whose every choice is known.
"""

import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import random_head, random_model, table_head, table_model
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as JsonTokenizer

from convert_hf_checkpoint import convert
from generate import main
from talon import decoder as decoder_module
from talon import text as text_module
from talon.checkpoint import TensorSpec, read_checkpoint, write_checkpoint
from talon.cli import run
from talon.decoder import Decoder
from talon.loading import fit_tree
from talon.text import Engine, load
from talon.tokenizer import load_tokenizer
from talon.trees import NO_TREE, parse_tree

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


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> Path:
    """A converted random target with tokenizer and template, heads for it and for others."""
    directory = tmp_path_factory.mktemp("world")
    model = random_model(vocab_size=VOCAB, max_seq_length=LIMIT)
    save_hf(directory, model)
    save_tokenizer(directory)
    convert(directory)
    save(directory / "head.safetensors", random_head(model), "draft")
    save(directory / "head3.safetensors", random_head(model, "eagle3"), "draft")
    other = random_model(vocab_size=VOCAB, dim=32, max_seq_length=LIMIT)
    save(directory / "other_head.safetensors", random_head(other), "draft")
    small = random_model(vocab_size=100, max_seq_length=LIMIT)
    save(directory / "small_vocab_head.safetensors", random_head(small), "draft")
    bare = directory / "bare"
    bare.mkdir()
    save(bare / "talon.safetensors", model, "target", eos_ids=[2])
    return directory


@pytest.fixture(scope="session")
def plain(world) -> Engine:
    return load(world / "talon.safetensors", compile=False)


@pytest.fixture(scope="session")
def tokenizer(world):
    return load_tokenizer(world)


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


# --- running the command line ---------------------------------------------------------------------


@pytest.fixture
def cli(world, capfd, monkeypatch):
    """Run the command line in this process: (exit code, standard output, standard error)."""

    def call(
        *argv: object, stdin: str = "", target: Path | None = None, eager: bool = True
    ) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        path = world / "talon.safetensors" if target is None else target
        words = ["--checkpoint_path", path, *argv, *(["--no_compile"] if eager else [])]
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            run(lambda: main([str(word) for word in words]))
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return ended.value.code, out, err

    return call


@pytest.fixture
def refused(cli, tmp_path):
    """The command line ends with code 2 and one line that holds every word, and writes nothing."""

    def call(words: tuple[str, ...], *argv: object, **options) -> str:
        before = sorted(tmp_path.rglob("*"))
        code, out, err = cli(*argv, **options)
        assert (code, out) == (2, ""), (code, out, err)
        lines = err.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), err
        for word in words:
            assert word in lines[0], (word, lines[0])
        assert len(lines[0]) < 600
        assert sorted(tmp_path.rglob("*")) == before
        return lines[0]

    return call


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


# --- the library ----------------------------------------------------------------------------------


def test_pieces_joined_are_the_text_and_the_decoded_ids(plain, tokenizer):
    for prompt in ("Hello", [{"role": "user", "content": "Hi"}], [5, 6, 7]):
        text = plain.generate(prompt, max_new_tokens=60, ignore_eos=True)
        pieces = list(text)
        assert len(pieces) > 5
        assert "".join(pieces) == text.text == tokenizer.decode(text.tokens)


@pytest.mark.parametrize("tree", [None, *TREES])
@pytest.mark.parametrize("text", ["😀é日", "e\u0301x", "a\udcffb\udce2\udc82c", "\udc98\udca5"])
def test_characters_split_over_tokens_are_streamed_whole(tokenizer, tree, text):
    data = text.encode(errors="surrogateescape")
    engine = speaker(tokenizer, data, tree)
    for count in range(0, 3 * len(data)):
        generation = engine.generate([4], max_new_tokens=count)
        assert len(generation.tokens) == 0
        pieces = list(generation)
        assert generation.tokens == (say(data) * 4)[:count]
        assert "".join(pieces) == generation.text == tokenizer.decode(generation.tokens)
        assert generation.text == (data * 4)[:count].decode(errors="replace")


@pytest.mark.parametrize("tree", [None, *TREES])
@pytest.mark.parametrize(
    ("stops", "kept"),
    [
        (("d",), "abc"),
        (("cd",), "ab"),
        (("fgh",), "abcde"),
        (("a",), ""),
        (("ab",), ""),
        (("ga",), None),  # never said: h follows g
        (("mz",), None),
        (("kl", "de"), "abc"),
        (("de", "def", "cde"), "ab"),
        (("jkx", "jkl"), "abcdefghi"),
        (("ma",), "abcdefghijkl"),  # over the seam of the cycle
    ],
)
def test_a_stop_text_is_cut_off_with_all_that_follows(tokenizer, tree, stops, kept):
    engine = speaker(tokenizer, b"abcdefghijklm", tree)
    generation = engine.generate([4], max_new_tokens=20, stop=stops)
    pieces = list(generation)
    whole = "abcdefghijklm" * 2
    assert "".join(pieces) == generation.text == (whole[:20] if kept is None else kept)
    assert generation.generation.stop_reason == ("length" if kept is None else "stop")
    if kept is not None:  # the ids end with the token that completes the stop text
        end = min(whole.find(stop) + len(stop) for stop in stops if stop in whole)
        assert generation.tokens == (say(b"abcdefghijklm") * 2)[:end]


def test_a_stop_text_that_ends_with_the_budget_is_a_stop(tokenizer):
    engine = speaker(tokenizer, b"abcdef", "chain:5")
    generation = engine.generate([4], max_new_tokens=4, stop=("cd",))
    assert "".join(generation) == "ab" and generation.generation.stop_reason == "stop"


def test_a_beginning_of_a_stop_text_is_shown_when_the_text_ends_there(tokenizer):
    engine = speaker(tokenizer, b"abcdef", "chain:5")
    generation = engine.generate([4], max_new_tokens=4, stop=("cdx", "dx"))
    assert "".join(generation) == "abcd" and generation.generation.stop_reason == "length"


def test_one_stop_text_may_be_given_as_a_string(tokenizer):
    engine = speaker(tokenizer, b"abcdef")
    assert "".join(engine.generate([4], max_new_tokens=9, stop="cd")) == "ab"


@pytest.mark.parametrize("tree", [None, *TREES])
@pytest.mark.parametrize("at", range(8))
def test_every_declared_end_token_ends_an_accepted_run_where_it_stands(tokenizer, tree, at):
    """C01, C09: anywhere inside a run; the first of several wins; the next prompt is clean."""
    cycle = say(b"abcdefgh")
    engine = speaker(tokenizer, b"abcdefgh", tree, eos=(cycle[at], cycle[-1], 3))
    generation = engine.generate([4], max_new_tokens=30)
    assert "".join(generation) == "abcdefgh"[:at]
    assert generation.tokens == cycle[: at + 1]
    assert generation.generation.stop_reason == "eos"
    ahead = engine.generate([4], max_new_tokens=30, ignore_eos=True)
    assert "".join(ahead) == ("abcdefgh" * 4)[:30] and ahead.generation.stop_reason == "length"
    again = engine.generate([4, *generation.tokens, 4], max_new_tokens=30)
    assert "".join(again) == "abcdefgh"[:at]


@pytest.mark.parametrize("tree", [None, *TREES])
def test_the_budget_is_exact(tokenizer, tree):
    for wrong in ((), tuple(say(b"cf"))):
        engine = speaker(tokenizer, b"abcdefgh", tree, wrong=wrong)
        for count in range(25):
            generation = engine.generate([4], max_new_tokens=count)
            assert "".join(generation) == ("abcdefgh" * 4)[:count]
            assert generation.tokens == (say(b"abcdefgh") * 4)[:count]
            assert generation.generation.stop_reason == "length"


@pytest.mark.parametrize("head", [None, "head.safetensors", "head3.safetensors"])
def test_prompts_fit_up_to_the_last_position(world, plain, head):
    tree = (
        {"tree": "dynamic:nodes=60,levels=8,top_k=10"}
        if head == "head.safetensors"
        else {"tree": "chain:5"}
    )
    head_options = {"draft_checkpoint_path": world / head, **tree} if head else {}
    if head == "head3.safetensors":
        head_options["tree"] = "chain:5"
    engine = load(world / "talon.safetensors", compile=False, max_seq_length=64, **head_options)
    ids = [(7 * i) % VOCAB for i in range(70)]
    for length in (1, 50, 62, 63):
        mine = engine.generate(ids[:length], max_new_tokens=100, ignore_eos=True)
        theirs = plain.generate(ids[:length], max_new_tokens=64 - length, ignore_eos=True)
        list(mine), list(theirs)
        assert mine.tokens == theirs.tokens and len(mine.tokens) == 64 - length
        assert mine.generation.stop_reason == "context"
    for length in (64, 65, 70):
        with pytest.raises(ValueError, match=f"{length} tokens"):
            engine.generate(ids[:length])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("head", [None, "head.safetensors"])
def test_a_prompt_again_gives_the_same_text_whatever_came_between(world, head, temperature):
    """C11: A, B, A, and a long one before a short one, each equal to a run in a fresh engine."""

    def fresh():
        path = world / head if head else None
        return load(
            world / "talon.safetensors", path, tree="chain:3" if head else "none", compile=False
        )

    def ids(engine, prompt):
        text = engine.generate(
            prompt, max_new_tokens=24, temperature=temperature, seed=3, ignore_eos=True
        )
        list(text)
        return text.tokens

    prompts = ["first prompt", "another one " * 8, "first prompt", "first", "first prompt"]
    wanted = [ids(fresh(), prompt) for prompt in prompts]
    engine = fresh()
    assert [ids(engine, prompt) for prompt in prompts] == wanted


def test_iterating_again_goes_on_and_never_starts_over(plain):
    whole = plain.generate("Hello", max_new_tokens=30, ignore_eos=True)
    wanted = list(whole)
    assert list(whole) == [] and len(whole.tokens) == 30
    text = plain.generate("Hello", max_new_tokens=30, ignore_eos=True)
    first = next(iter(text))
    assert [first, *text] == wanted and text.tokens == whole.tokens


def test_a_text_that_is_left_early_does_not_change_the_next(world, plain):
    for head in (None, world / "head.safetensors"):
        engine = load(
            world / "talon.safetensors", head, tree="chain:3" if head else "none", compile=False
        )
        for _ in engine.generate("Hello there", max_new_tokens=50, ignore_eos=True):
            break
        text, wanted = (
            e.generate("Hello", max_new_tokens=30, ignore_eos=True) for e in (engine, plain)
        )
        assert "".join(text) == "".join(wanted) and text.tokens == wanted.tokens


def test_an_interrupted_prompt_leaves_no_false_memory(world, monkeypatch):
    """Ctrl-C in a notebook while a long prompt is read; the engine is then used again."""
    engine = load(world / "talon.safetensors", compile=False, max_seq_length=LIMIT)

    def ids():
        text = engine.generate([5] * 200, max_new_tokens=8, ignore_eos=True)
        list(text)
        return text.tokens

    wanted = ids()
    real = Decoder.prefill_chunk

    def interrupted(self, tokens, rows, final, *rest):
        real(self, tokens, rows, final, *rest)
        if final:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "prefill_chunk", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(engine.generate([5, *range(6, 205)], max_new_tokens=8))
    assert ids() == wanted


def test_two_texts_at_once_are_refused_not_mixed_up(plain):
    one = plain.generate("one", max_new_tokens=30, ignore_eos=True)
    next(iter(one))
    list(plain.generate("two", max_new_tokens=30, ignore_eos=True))
    with pytest.raises(ValueError, match="another generation"):
        list(one)


def test_texts_that_are_made_first_and_run_later_are_right(plain):
    wanted = [
        "".join(plain.generate(p, max_new_tokens=20, ignore_eos=True)) for p in ("one", "two")
    ]
    texts = [plain.generate(p, max_new_tokens=20, ignore_eos=True) for p in ("one", "two")]
    assert ["".join(text) for text in texts] == wanted


def test_the_prompt_is_copied_not_kept(plain):
    ids = [5, 6, 7]
    text = plain.generate(ids, max_new_tokens=3)
    ids.append(999999)
    list(text)
    assert text.generation.ids == [5, 6, 7]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"max_new_tokens": None}, "max_new_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"stop": ("a", "")}, "stop"),
        ({"stop": ""}, "stop"),
    ],
)
def test_library_options_out_of_range_raise_at_the_call(plain, options, word):
    with pytest.raises(ValueError, match=word):
        plain.generate("Hello", **options)


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        ["text"],
        [1.5],
        {},
        None,
        5,
        [{"role": "user"}],
        [{"content": "x"}],
        "a\udcffb",
        [-1],
        [VOCAB],
        [{"role": "user", "content": "\udcff"}],
    ],
)
def test_library_prompts_that_are_none_raise_at_the_call(plain, prompt):
    with pytest.raises(ValueError):
        plain.generate(prompt)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"dtype": "float32"}, "fp32"),
        ({"device": "gpu"}, "device"),
        ({"device": "mps"}, "device"),
        ({"tree": "chain:5"}, "head"),
        ({"tree": "what"}, "tree"),
        ({"max_seq_length": 0}, "max_seq_length"),
        ({"max_seq_length": 1}, "max_seq_length"),
        ({"max_seq_length": LIMIT + 1}, str(LIMIT)),
        ({"max_seq_length": -5}, "max_seq_length"),
        ({"draft_checkpoint_path": ""}, "directory"),
    ],
)
def test_load_options_out_of_range_raise(world, options, word):
    with pytest.raises((ValueError, OSError), match=word):
        load(world / "talon.safetensors", compile=False, **options)


def test_top_k_beyond_the_vocabulary_is_no_limit(plain):
    """C51."""

    def ids(top_k):
        text = plain.generate(
            "Hello", max_new_tokens=20, temperature=1.0, top_k=top_k, seed=5, ignore_eos=True
        )
        list(text)
        return text.tokens

    assert ids(0) == ids(-1) == ids(VOCAB) == ids(VOCAB + 1) == ids(10**6) == ids(2**62)


@pytest.mark.parametrize("tree", [None, "chain:5", "static"])
def test_filters_hold_with_a_head(tokenizer, tree):
    """C13, C14: no excluded id in 600 sampled tokens, and the drafted ids are the plain ids."""
    table = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]).log()
    log_probs = torch.full((VOCAB, VOCAB), -30.0)
    log_probs[:, 10:15] = table
    model = table_model(log_probs, max_seq_length=LIMIT)
    head = table_head(model) if tree else None
    shape = fit_tree(parse_tree(tree), head.config) if tree else NO_TREE
    engine = Engine(Decoder(model, LIMIT, head, shape, compile=False), tokenizer, (2,), {})
    for options, allowed in (
        ({"top_k": 2}, {10, 11}),
        ({"top_p": 0.6}, {10, 11}),
        ({"top_k": 1}, {10}),
        ({}, set(range(10, 15))),
    ):
        text = engine.generate([4], max_new_tokens=300, temperature=1.0, **options)
        list(text)
        assert set(text.tokens) == allowed
        alone = Engine(Decoder(model, LIMIT, compile=False), tokenizer, (2,), {})
        theirs = alone.generate([4], max_new_tokens=300, temperature=1.0, **options)
        list(theirs)
        assert text.tokens == theirs.tokens


# --- the command line: what a run gives -----------------------------------------------------------


def test_text_alone_goes_to_standard_output(cli, plain):
    code, out, err = cli("--prompt", "Hello", "--no_chat", "--max_new_tokens", 12, "--ignore_eos")
    text = plain.generate("Hello", max_new_tokens=12, ignore_eos=True)
    assert (code, out) == (0, "".join(text) + "\n")
    assert "tokens/s" in err and "loaded" in err and "12 tokens (length)" in err


def test_the_template_is_on_by_default_and_knows_the_system_message(cli, plain, tmp_path):
    wanted = {
        (): [{"role": "user", "content": "Hi"}],
        ("--chat",): [{"role": "user", "content": "Hi"}],
        ("--no_chat",): "Hi",
        ("--system", "Be brief"): [
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": "Hi"},
        ],
    }
    for flags, prompt in wanted.items():
        assert (
            cli("--prompt", "Hi", *flags, "--max_new_tokens", 6, "--json", tmp_path / "o.json")[0]
            == 0
        )
        sample = record(tmp_path / "o.json")["samples"][0]
        text = plain.generate(prompt, max_new_tokens=6)
        list(text)
        assert sample["tokens"] == text.tokens and sample["prompt_tokens"] == len(
            plain.encode(prompt)
        )


def test_the_prompt_may_come_from_a_file_from_standard_input_or_as_ids(cli, plain, tmp_path):
    (tmp_path / "p.txt").write_text("Grüße 😀\n", encoding="utf-8")
    (tmp_path / "bom.txt").write_text("Grüße 😀\n", encoding="utf-8-sig")
    options = ("--no_chat", "--max_new_tokens", 8, "--ignore_eos")
    wanted = "".join(plain.generate("Grüße 😀\n", max_new_tokens=8, ignore_eos=True)) + "\n"
    assert cli("--prompt_file", tmp_path / "p.txt", *options)[:2] == (0, wanted)
    assert cli("--prompt_file", tmp_path / "bom.txt", *options)[:2] == (0, wanted)
    assert cli("--prompt", "-", *options, stdin="Grüße 😀\n")[:2] == (0, wanted)
    ids = plain.encode("Grüße 😀\n")
    for words in (" ".join(map(str, ids)), ", ".join(map(str, ids))):
        assert cli("--prompt_ids", words, "--max_new_tokens", 8, "--ignore_eos")[:2] == (0, wanted)


def test_ids_need_no_tokenizer_and_answer_in_ids(cli, plain, world, tmp_path):
    bare = world / "bare" / "talon.safetensors"
    json_path = tmp_path / "o.json"
    code, out, _ = cli(
        "--prompt_ids",
        "5 6 7",
        "--max_new_tokens",
        5,
        "--ignore_eos",
        "--json",
        json_path,
        target=bare,
    )
    text = plain.generate([5, 6, 7], max_new_tokens=5, ignore_eos=True)
    list(text)
    assert code == 0 and [int(word) for word in out.split()] == text.tokens
    assert record(json_path)["samples"][0]["tokens"] == text.tokens
    assert record(json_path)["samples"][0]["text"] is None


def test_json_holds_every_promised_key_with_a_sane_value(cli, world, tmp_path):
    path = tmp_path / "o.json"
    argv = [
        "--prompt",
        "Hello",
        "--draft_checkpoint_path",
        world / "head.safetensors",
        "--tree",
        "chain:3",
    ]
    argv += [
        "--max_new_tokens",
        30,
        "--ignore_eos",
        "--num_samples",
        2,
        "--temperature",
        0.8,
        "--json",
        path,
        "--check",
    ]
    assert cli(*argv)[0] == 0
    top = record(path)
    assert top["argv"] == [
        "--checkpoint_path",
        str(world / "talon.safetensors"),
        *map(str, argv),
        "--no_compile",
    ]
    assert (
        top["device"].startswith("cpu") and top["dtype"] == "fp32" and top["quantization"] is None
    )
    assert top["tree"] == "chain:3" and "eagle1" in top["head"]
    assert top["compile_s"] == 0 and top["recompiles"] == 0 and top["load_s"] > 0
    assert top["versions"]["torch"] == torch.__version__ and top["versions"]["python"]
    assert top["commit"] is None or re.fullmatch("[0-9a-f]{40}(-dirty)?", top["commit"])
    assert top["check"] == {"identical": True, "first_difference": None, "gap": None}
    assert len(top["samples"]) == 2
    for index, sample in enumerate(top["samples"]):
        assert (
            sample["seed"] == index
            and len(sample["tokens"]) == 30
            and sample["stop_reason"] == "length"
        )
        assert sample["prompt_tokens"] > 5 and isinstance(sample["text"], str)
        assert sample["prefill_s"] > 0 and sample["decode_s"] > 0
        assert 0 < sample["draft_s"] + sample["verify_s"] <= sample["decode_s"]
        assert 1 <= sample["rounds"] <= 29
        assert sample["acceptance_length"] == pytest.approx(29 / sample["rounds"])
        assert sum(sample["accepted_by_depth"]) == 29 - sample["rounds"]
        assert sample["tokens_per_s"] == pytest.approx(
            29 / sample["decode_s"]
        )  # decoding alone: not the first token
        assert sample["peak_memory_bytes"] > 10**7 and sample["bandwidth_bytes_per_s"] > 0
    assert top["samples"][0]["tokens"] != top["samples"][1]["tokens"]


def test_nothing_generated_is_reported_without_a_division_by_zero(cli, tmp_path):
    for count in (0, 1):
        code, out, err = cli(
            "--prompt",
            "Hi",
            "--max_new_tokens",
            count,
            "--ignore_eos",
            "--json",
            tmp_path / "o.json",
        )
        sample = record(tmp_path / "o.json")["samples"][0]
        assert code == 0 and len(sample["tokens"]) == count and sample["tokens_per_s"] == 0
        assert (
            sample["rounds"] == 0
            and sample["acceptance_length"] == 0
            and sample["stop_reason"] == "length"
        )
        assert f"{count} tokens (length)" in err and (count or out == "\n")


def test_json_is_written_over_an_old_file_as_a_whole(cli, tmp_path):
    path = tmp_path / "o.json"
    path.write_text("x" * 100_000)
    assert cli("--prompt", "Hi", "--max_new_tokens", 2, "--json", path)[0] == 0
    assert len(record(path)["samples"]) == 1 and os.listdir(tmp_path) == ["o.json"]


def test_argv_that_is_no_text_still_makes_valid_json(cli, tmp_path):
    path = tmp_path / "o.json"
    code, *_ = cli("--prompt_ids", "5", "--max_new_tokens", 2, "--json", tmp_path / "\udcff.json")
    assert code == 0
    [path] = tmp_path.iterdir()
    assert json.loads(path.read_bytes())["argv"][-2].endswith("\udcff.json")


def test_seeds_decide_and_samples_count_up_from_the_seed(cli, tmp_path):
    """C15."""

    def texts(*flags):
        argv = (
            "--prompt",
            "Hi",
            "--temperature",
            1,
            "--max_new_tokens",
            12,
            "--ignore_eos",
            "--json",
            tmp_path / "o",
        )
        assert cli(*argv, *flags)[0] == 0
        return [tuple(sample["tokens"]) for sample in record(tmp_path / "o")["samples"]]

    four = texts("--num_samples", 4, "--seed", 7)
    assert len(set(four)) == 4
    assert [texts("--seed", seed)[0] for seed in (7, 8, 9, 10)] == four
    assert texts("--num_samples", 2, "--seed", 2**63 - 2)


@pytest.mark.parametrize("temperature", ["0", "1e-8", "0.0", "1e-30", "-0.0"])
def test_a_tiny_temperature_is_greedy(cli, temperature):
    """C50."""
    argv = ("--prompt", "Hi", "--max_new_tokens", 12, "--ignore_eos")
    greedy = cli(*argv)[1]
    assert cli(*argv, "--temperature", temperature, "--top_k", 3, "--top_p", 0.5)[1] == greedy


def test_flags_without_effect_are_pointed_out(cli):
    _, _, err = cli("--prompt", "Hi", "--top_k", 5, "--max_new_tokens", 2)
    assert "note: temperature 0 is greedy" in err
    _, _, err = cli("--prompt", "Hi", "--highlight", "--max_new_tokens", 2)
    assert "note: --highlight" in err
    _, _, err = cli("--prompt", "Hi", "--top_k", 5, "--temperature", 1, "--max_new_tokens", 2)
    assert "note:" not in err


def test_stop_texts_repeat_on_the_command_line(cli, plain, tmp_path):
    text = "".join(plain.generate("Hello", max_new_tokens=40, ignore_eos=True))
    stop = text[15:18]
    argv = (
        "--prompt",
        "Hello",
        "--no_chat",
        "--max_new_tokens",
        40,
        "--ignore_eos",
        "--json",
        tmp_path / "o",
    )
    code, out, err = cli(*argv, "--stop", "never said", "--stop", stop)
    assert code == 0 and out == text[: text.find(stop)] + "\n" and "(stop)" in err
    assert record(tmp_path / "o")["samples"][0]["stop_reason"] == "stop"


@pytest.mark.parametrize("tree", ["none", pytest.param("auto", marks=pytest.mark.slow), *TREES])
@pytest.mark.parametrize("head", ["head.safetensors", "head3.safetensors"])
def test_every_tree_gives_the_plain_text(cli, world, tree, head):
    argv = (
        "--prompt",
        "Hello",
        "--max_new_tokens",
        16,
        "--ignore_eos",
        "--temperature",
        0.7,
        "--top_p",
        0.9,
    )
    wanted = cli(*argv)[1]
    if head == "head3.safetensors" and tree == "auto":
        pytest.skip("one EAGLE-3 preset is among the trees")
    code, out, err = cli(*argv, "--draft_checkpoint_path", world / head, "--tree", tree, "--check")
    assert (code, out) == (0, wanted) and "identical to plain decoding" in err


def test_a_tree_may_come_from_a_file(cli, world, tmp_path):
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0], [0, 1], [0, 0, 0]]")
    argv = ("--prompt", "Hello", "--max_new_tokens", 16, "--ignore_eos")
    head = ("--draft_checkpoint_path", world / "head.safetensors", "--tree", tmp_path / "tree.json")
    code, out, err = cli(*argv, *head)
    assert code == 0 and out == cli(*argv)[1] and "tree.json" in err


def test_the_head_is_described_and_a_useless_one_flagged(cli, world):
    argv = ("--prompt", "Hello", "--max_new_tokens", 60, "--ignore_eos", "--tree", "chain:2")
    _, _, err = cli(*argv, "--draft_checkpoint_path", world / "head.safetensors")
    for word in (
        "head: eagle1",
        "RoPE base",
        "draft vocabulary 264 of 264",
        "from the target: embedding, lm_head",
    ):
        assert word in err
    assert "acceptance length 1.0" in err and "warning: acceptance length" in err


def write_speaker(directory: Path, text: bytes) -> tuple[Path, Path]:
    model = table_model(cycle_of(say(text)), max_seq_length=LIMIT)
    save_tokenizer(directory)
    target = save(directory / "talon.safetensors", model, "target", eos_ids=[2])
    return target, save(directory / "head.safetensors", table_head(model), "draft")


def test_highlight_colours_what_the_draft_guessed_and_changes_no_character(cli, tmp_path):
    target, head = write_speaker(tmp_path, b"abcdefgh")
    argv = (
        "--prompt",
        "x",
        "--max_new_tokens",
        8,
        "--draft_checkpoint_path",
        head,
        "--tree",
        "chain:2",
    )
    assert cli(*argv, target=target)[1] == "abcdefgh\n"
    code, out, _ = cli(*argv, "--highlight", target=target)
    green, end = "\033[32m", "\033[0m"
    # The prefill gives a; then every round two drafted tokens and the bonus.
    assert out == f"a{green}b{end}{green}c{end}d{green}e{end}{green}f{end}g{green}h{end}\n"


def test_a_failed_check_is_reported_and_ends_with_code_1(cli, tmp_path, monkeypatch):
    target, head = write_speaker(tmp_path, b"abcdefgh")
    honest = decoder_module.verify

    def corrupt(target, nodes, *rest):
        verdict = honest(target, nodes, *rest)
        return verdict._replace(tokens=(verdict.tokens + (len(nodes.tokens) > 1)) % VOCAB)

    monkeypatch.setattr(decoder_module, "verify", corrupt)
    argv = (
        "--prompt",
        "x",
        "--max_new_tokens",
        8,
        "--draft_checkpoint_path",
        head,
        "--tree",
        "chain:2",
    )
    for more in ((), ("--temperature", 1), ("--temperature", 1, "--top_k", 2)):
        code, _, err = cli(*argv, "--check", "--json", tmp_path / "o.json", *more, target=target)
        check = record(tmp_path / "o.json")["check"]
        assert code == 1 and check["identical"] is False and check["first_difference"] == 1
        assert check["gap"] is None or check["gap"] > 0
        assert "first_difference" in err
    assert cli(*argv, target=target)[0] == 0


def test_a_check_sees_a_text_that_only_ends_too_early(cli, tmp_path, monkeypatch):
    target, head = write_speaker(tmp_path, b"abcdefgh")
    real = decoder_module.Generation.take

    def hasty(self, token):
        real(self, token)
        if self.decoder.tree.nodes > 1 and len(self.tokens) >= 4:
            self.end("length")
        return token

    monkeypatch.setattr(decoder_module.Generation, "take", hasty)
    argv = (
        "--prompt",
        "x",
        "--max_new_tokens",
        20,
        "--draft_checkpoint_path",
        head,
        "--tree",
        "chain:2",
        "--check",
    )
    code, _, _ = cli(*argv, "--json", tmp_path / "o.json", target=target)
    check = record(tmp_path / "o.json")["check"]
    assert code == 1 and check["identical"] is False and check["first_difference"] == 4


def test_a_profile_is_a_whole_trace_and_the_only_file(cli, tmp_path):
    code, _, err = cli("--prompt", "Hi", "--max_new_tokens", 3, "--profile", tmp_path / "t.json")
    assert code == 0 and "trace written" in err and os.listdir(tmp_path) == ["t.json"]
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_low_precision_runs(cli, tmp_path):
    for dtype in ("bf16", "fp16", "fp32"):
        code, _, err = cli(
            "--prompt", "Hi", "--max_new_tokens", 4, "--dtype", dtype, "--json", tmp_path / "o"
        )
        assert code == 0 and dtype in err and record(tmp_path / "o")["dtype"] == dtype


# --- conversations --------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [None, "head.safetensors"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_turn_equals_a_fresh_run_with_the_same_history(
    cli, world, plain, tmp_path, head, temperature
):
    """C11 and C59: A, B, A as turns; also blank lines, and a last line without its end."""
    draft = ("--draft_checkpoint_path", world / head, "--tree", "chain:4") if head else ()
    argv = (
        "--interactive",
        "--system",
        "S",
        "--max_new_tokens",
        9,
        "--temperature",
        temperature,
        "--seed",
        4,
        "--json",
        tmp_path / "o",
    )
    lines = ["first", "second, longer", "first"]
    code, out, err = cli(*argv, *draft, stdin="first\n\n  \nsecond, longer\nfirst")
    assert code == 0
    history = [{"role": "system", "content": "S"}]
    samples = record(tmp_path / "o")["samples"]
    assert len(samples) == 3
    texts = []
    for line, sample in zip(lines, samples, strict=True):
        history.append({"role": "user", "content": line})
        plain.decoder.forget()
        text = plain.generate(history, max_new_tokens=9, temperature=temperature, seed=4)
        texts.append("".join(text))
        assert sample["tokens"] == text.tokens and sample["text"] == texts[-1]
        assert sample["prompt_tokens"] == len(plain.encode(history))
        history.append({"role": "assistant", "content": texts[-1]})
    assert out == "".join(f"{text}\n" for text in texts)
    assert err.count("> ") == 6


def test_without_a_template_turns_continue_one_text(cli, plain, tmp_path):
    argv = (
        "--interactive",
        "--no_chat",
        "--max_new_tokens",
        6,
        "--ignore_eos",
        "--json",
        tmp_path / "o",
    )
    assert cli(*argv, stdin="one\ntwo\n")[0] == 0
    first, second = record(tmp_path / "o")["samples"]
    ids = plain.encode("one\n")
    assert ids[0] == 0 and first["prompt_tokens"] == len(ids)
    ids = [*ids, *first["tokens"], *plain.tokenizer.encode("two\n", add_bos=False)]
    text = plain.generate(ids, max_new_tokens=6, ignore_eos=True)
    list(text)
    assert second["prompt_tokens"] == len(ids) and second["tokens"] == text.tokens


def test_a_line_that_does_not_fit_is_refused_and_forgotten(cli, plain, tmp_path):
    argv = (
        "--interactive",
        "--max_new_tokens",
        4,
        "--max_seq_length",
        100,
        "--json",
        tmp_path / "o",
    )
    code, out, err = cli(*argv, stdin="hi\n" + "x" * 200 + "\n\udcff\nhi\n")
    samples = record(tmp_path / "o")["samples"]
    assert code == 2 and len(samples) == 2
    assert (
        err.count("error: ") == 2
        and "error: the prompt has" in err
        and "error: the line holds bytes" in err
    )
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": samples[0]["text"]},
    ]
    history.append({"role": "user", "content": "hi"})
    assert samples[1]["prompt_tokens"] == len(plain.encode(history))


def test_an_end_at_once_is_no_error(cli, tmp_path):
    code, out, _ = cli("--interactive", "--json", tmp_path / "o", stdin="")
    assert (code, out) == (0, "") and record(tmp_path / "o")["samples"] == []


def hear_ctrl_c():
    """A test run in the background inherits a SIGINT that is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_leaves_a_conversation_quietly_and_keeps_its_turns(world, tmp_path):
    command = [
        sys.executable,
        str(ROOT / "generate.py"),
        "--checkpoint_path",
        str(world / "talon.safetensors"),
    ]
    command += [
        "--no_compile",
        "--interactive",
        "--max_new_tokens",
        "4",
        "--json",
        str(tmp_path / "o"),
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, preexec_fn=hear_ctrl_c
    ) as process:
        process.stdin.write("hello\n")
        process.stdin.flush()
        process.stdout.readline()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err and "error" not in err
    assert len(record(tmp_path / "o")["samples"]) == 1


def test_ctrl_c_while_decoding_leaves_quietly_and_writes_nothing(world, tmp_path):
    command = [
        sys.executable,
        str(ROOT / "generate.py"),
        "--checkpoint_path",
        str(world / "talon.safetensors"),
    ]
    command += ["--no_compile", "--prompt", "x", "--ignore_eos", "--num_samples", "100000"]
    command += [
        "--temperature",
        "1",
        "--json",
        str(tmp_path / "o"),
        "--profile",
        str(tmp_path / "p"),
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_ctrl_c,
    ) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err and "error" not in err
    assert list(tmp_path.iterdir()) == []


# --- bad input ------------------------------------------------------------------------------------

MISUSES = [
    ((), ("no prompt", "--prompt")),
    (("--prompt", ""), ("prompt is empty",)),
    (("--prompt", "  \n"), ("prompt is empty",)),
    (("--prompt", "-"), ("prompt is empty",)),
    (("--prompt", "a\udcff"), ("not UTF-8",)),
    (("--prompt", "a", "--system", "\udcff"), ("--system", "not UTF-8")),
    (("--prompt", "a", "--stop", "\udcff"), ("--stop", "not UTF-8")),
    (("--prompt", "a", "--prompt_ids", "1"), ("--prompt_ids", "not allowed with")),
    (("--prompt", "a", "--interactive"), ("not allowed with",)),
    (("--prompt", "a", "--chat", "--no_chat"), ("not allowed with",)),
    (("--prompt_ids", ""), ("at least one",)),
    (("--prompt_ids", "1 x"), ("whole numbers",)),
    (("--prompt_ids", "1.5"), ("whole numbers",)),
    (("--prompt_ids", "-1"), ("whole numbers",)),
    (("--prompt_ids", "\u00b2"), ("whole numbers",)),
    (("--prompt_ids", "9" * 5000), ("whole numbers",)),
    (("--prompt_ids", "1 264"), ("264", "0 to 263")),
    (("--prompt_ids", "1", "--chat"), ("--chat", "--prompt")),
    (("--prompt_ids", "1", "--system", "x"), ("--system", "--prompt")),
    (("--prompt_file", "no_such_file"), ("no_such_file", "No such file")),
    (("--prompt_file", "/"), ("cannot be read", "directory")),
    (("--prompt", "a", "--system", "x", "--no_chat"), ("--system", "--no_chat")),
    (("--prompt", "a", "--max_new_tokens", "-1"), ("max_new_tokens -1", ">= 0")),
    (("--prompt", "a", "--max_new_tokens", "many"), ("--max_new_tokens", "many")),
    (("--prompt", "a", "--temperature", "-1"), ("temperature", ">= 0")),
    (("--prompt", "a", "--temperature", "nan"), ("temperature",)),
    (("--prompt", "a", "--temperature", "inf"), ("temperature",)),
    (("--prompt", "a", "--temperature", "1e300"), ("temperature",)),
    (("--prompt", "a", "--top_k", "-2"), ("top_k",)),
    (("--prompt", "a", "--top_k", "9" * 30), ("top_k",)),
    (("--prompt", "a", "--top_p", "0"), ("top_p",)),
    (("--prompt", "a", "--top_p", "1.5"), ("top_p",)),
    (("--prompt", "a", "--top_p", "nan"), ("top_p",)),
    (("--prompt", "a", "--seed", "-1"), ("seed",)),
    (("--prompt", "a", "--seed", str(2**63)), ("seed",)),
    (("--prompt", "a", "--seed", str(2**63 - 1), "--num_samples", "2"), ("seed",)),
    (("--prompt", "a", "--num_samples", "0"), ("num_samples", "at least 1")),
    (("--prompt", "a", "--stop", ""), ("stop",)),
    (("--prompt", "a", "--tree", "bush"), ("bush", "chain:K")),
    (("--prompt", "a", "--tree", "chain:5"), ("head", "--draft_checkpoint_path")),
    (("--prompt", "a", "--device", "gpu"), ("gpu", "cpu or cuda")),
    (("--prompt", "a", "--device", "mps"), ("mps",)),
    (("--prompt", "a", "--dtype", "float32"), ("float32", "fp32")),
    (("--prompt", "a", "--max_seq_length", "1"), ("max_seq_length", "2 to 512")),
    (("--prompt", "a", "--max_seq_length", "513"), ("max_seq_length", "2 to 512")),
    (("--prompt", "a", "--max_seq_length", "0"), ("max_seq_length", "2 to 512")),
    (("--prompt", "a", "--draft_checkpoint_path", ""), ("directory",)),
    (
        ("--prompt", "a", "--draft_checkpoint_path", "no_such_head"),
        ("no_such_head", "does not exist"),
    ),
    (("--prompt", "a", "--temprature", "1"), ("--temprature", "--help")),
    (("--prompt", "a", "b\nc"), ("b c", "--help")),
    (("--prompt", "a", "--top"), ("--top", "--help")),
    (("--prompt", "a", "--json", ""), ("--json", "directory")),
    (("--prompt", "a", "--json", "/dev/null"), ("--json", "no ordinary file")),
    (("--prompt", "a", "--json", "no_such_directory/o.json"), ("--json", "does not exist")),
    (("--prompt", "a", "--profile", "no_such_directory/o.json"), ("--profile", "does not exist")),
    (("--prompt", "a", "--json", "x" * 300), ("--json", "cannot be written")),
    (("--prompt", "a", "--json", "/proc/o.json"), ("--json", "cannot be written")),
    (("--prompt", "a", "--profile", "/proc/o.json"), ("--profile", "cannot be written")),
    (("--prompt", "a", "--retune"), ("--retune", "--draft_checkpoint_path")),
    (("--interactive", "--check"), ("--check", "--interactive")),
    (("--interactive", "--num_samples", "2"), ("--num_samples", "--interactive")),
    (("--interactive", "--profile", "p"), ("--profile", "--interactive")),
    (("--interactive", "--stop", ""), ("stop",)),
    (("--interactive", "--max_new_tokens", "-1"), ("max_new_tokens",)),
]


@pytest.mark.parametrize(("argv", "words"), MISUSES, ids=str)
def test_misuse_is_one_line_before_anything_is_loaded(refused, monkeypatch, tmp_path, argv, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(text_module, "load_target", None)
    refused(words, *argv)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_named(refused):
    refused(("cuda", "--device cpu"), "--prompt", "a", "--device", "cuda")
    refused(("cuda", "--device cpu"), "--prompt", "a", "--device", "cuda:3")


def test_a_prompt_file_that_is_not_utf8_is_refused(refused, tmp_path):
    (tmp_path / "p").write_bytes("Grüße".encode("latin-1"))
    refused(("not UTF-8", "save it as UTF-8"), "--prompt_file", tmp_path / "p")


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(refused, cli, monkeypatch):
    """C62: limit - 1 gives one token, limit is refused."""
    ids = " ".join(["5"] * LIMIT)
    for words, argv in (
        (("512 tokens", "511 or less"), ("--prompt_ids", ids)),
        (("5120 tokens", "511 or less"), ("--prompt_ids", " ".join([ids] * 10))),
        (
            ("512 tokens", "--max_seq_length", "allows 512"),
            ("--prompt_ids", ids, "--max_seq_length", 100),
        ),
    ):
        line = refused(words, *argv)
        assert ("or raise" in line) == ("allows 512" in words)
    code, _, err = cli("--prompt_ids", ids[:-2], "--ignore_eos")
    assert code == 0 and "1 tokens (context)" in err


def test_outputs_never_overwrite_an_input_or_each_other(refused, world, tmp_path):
    (tmp_path / "p").write_text("hello")
    (tmp_path / "link").symlink_to(world / "talon.safetensors")
    (tmp_path / "t.json").write_text("[[0]]")
    head = ("--draft_checkpoint_path", world / "head.safetensors", "--tree", tmp_path / "t.json")
    argv = ("--prompt_file", tmp_path / "p", *head)
    inputs = [tmp_path / "p", tmp_path / "t.json", world / "talon.safetensors", tmp_path / "link"]
    inputs += [world / "head.safetensors", world / "tokenizer.json"]
    for path in inputs:
        before = path.read_bytes()
        refused(("input", "choose another name"), *argv, "--json", path)
        refused(("input", "choose another name"), *argv, "--profile", path)
        assert path.read_bytes() == before
    refused(("--json and --profile",), *argv, "--json", tmp_path / "x", "--profile", tmp_path / "x")
    both = (*argv[:-1], f"{tmp_path / 't.json'}+lookup:2")
    refused(("input", "choose another name"), *both, "--json", tmp_path / "t.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_in_a_closed_directory_is_refused(refused, tmp_path):
    tmp_path.chmod(0o500)
    refused(
        ("--json", "cannot be written", "Permission denied"),
        "--prompt",
        "a",
        "--json",
        tmp_path / "o",
    )


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (open, (str(self.marker), "w"))


def wrong_files(world: Path, directory: Path) -> dict[str, tuple[Path, tuple[str, ...]]]:
    """Files that are no target, each with the words its refusal must hold."""
    good = (world / "talon.safetensors").read_bytes()
    contents = {
        "truncated": (good[:-100], ("truncated",)),
        "header_only": (good[:100], ("truncated",)),
        "longer": (good + b"x", ("bytes",)),
        "empty": (b"", ("empty",)),
        "lfs": (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
            ("LFS", "git lfs pull"),
        ),
        "text": (b"hello, this is not a model\n" * 9, ("not a safetensors file",)),
        "zeros": (bytes(1000), ("safetensors",)),
        "html": (b"<!DOCTYPE html><html>" + b" " * 500, ("safetensors",)),
    }
    files = {}
    for name, (data, words) in contents.items():
        (directory / name).write_bytes(data)
        files[name] = (directory / name, words)
    torch.save(
        {"weight": torch.zeros(2), "bomb": Bomb(directory / "marker")},
        directory / "pytorch_model.bin",
    )
    files["pickle"] = (directory / "pytorch_model.bin", ("pickle", "convert_hf_checkpoint.py"))
    with (directory / "old.bin").open("wb") as file:
        pickle.dump(Bomb(directory / "marker"), file)
    files["old pickle"] = (directory / "old.bin", ("convert", "safetensors"))
    files["directory"] = (world, ("directory", "convert_hf_checkpoint.py"))
    files["hf file"] = (world / "model.safetensors", ("convert_hf_checkpoint.py",))
    files["json"] = (world / "tokenizer.json", ("safetensors",))
    files["missing"] = (directory / "missing", ("does not exist",))
    files["device"] = (Path("/dev/null"), ("not a file",))
    return files


KINDS = (
    "truncated",
    "header_only",
    "longer",
    "empty",
    "lfs",
    "text",
    "zeros",
    "html",
    "pickle",
    "directory",
    "hf file",
    "json",
    "missing",
    "device",
)


@pytest.mark.parametrize("name", KINDS)
def test_files_of_the_wrong_kind_are_refused_as_target_and_as_head(refused, world, tmp_path, name):
    """C40, C46, C74: neither is any code of a pickle run."""
    path, words = wrong_files(world, tmp_path)[name]
    refused(words, "--prompt_ids", "5", target=path)
    refused(words, "--prompt_ids", "5", "--draft_checkpoint_path", path)
    assert not (tmp_path / "marker").exists()
    for arguments in ((path,), (world / "talon.safetensors", path)):
        with pytest.raises((ValueError, OSError)) as error:
            load(*arguments, compile=False)
        assert "\n" not in str(error.value)


def test_target_and_head_exchanged_are_refused_with_the_right_flag(refused, world):
    head, target = world / "head.safetensors", world / "talon.safetensors"
    refused(("is a draft", "--draft_checkpoint_path"), "--prompt_ids", "5", target=head)
    refused(
        ("is a target", "--checkpoint_path"), "--prompt_ids", "5", "--draft_checkpoint_path", target
    )


def test_a_head_of_another_target_is_refused_with_both_numbers(refused, world):
    """C32."""
    for name, words in (
        ("other_head", ("hidden size 32", "64")),
        ("small_vocab_head", ("vocabulary 100", "264")),
    ):
        refused(
            words, "--prompt_ids", "5", "--draft_checkpoint_path", world / f"{name}.safetensors"
        )
    deep = (
        "--draft_checkpoint_path",
        world / "head.safetensors",
        "--tree",
        "dynamic:nodes=5,levels=2,top_k=265",
    )
    refused(("265", "264", "top_k"), "--prompt_ids", "5", *deep)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "[[]]",
        "[[0], [2, 0]]",
        "[[0], [1, -1]]",
        "[[0], [0.5]]",
        "[[0], 3]",
        '[["0"]]',
        "[[true]]",
        "[[0], [1000000000000]]",
        "not json",
        "\x00",
        "null",
        "[" * 100_000,
        "[[0]" + ",[0]" * 10 + "]x",
    ],
)
def test_a_tree_file_that_is_no_tree_is_refused(refused, world, tmp_path, text):
    path = tmp_path / "tree.json"
    path.write_text(text)
    argv = ("--prompt_ids", "5", "--draft_checkpoint_path", world / "head.safetensors", "--tree")
    refused(("tree", "tree.json"), *argv, path)
    refused(("tree", "missing.json"), *argv, tmp_path / "missing.json")
    path.write_bytes(b"\xff\xfe[[0]]")
    refused(("tree", "tree.json"), *argv, path)


@pytest.mark.parametrize(
    "tree",
    [
        "",
        "chain",
        "chain:",
        "chain:0",
        "chain:-1",
        "chain:65",
        "chain:x",
        "chain:\u00b2",
        "chain:" + "9" * 5000,
        "static:3",
        "dynamic:nodes=0",
        "dynamic:levels=0",
        "dynamic:top_k=0",
        "dynamic:nodes=x",
        "dynamic:depth=3",
        "dynamic:nodes",
        "dynamic:nodes=\u00b2",
        "dynamic:nodes=9,levels=1,top_k=4",
        "dynamic:nodes=2,levels=1000000000,top_k=1",
        "dynamic:nodes=1000000,levels=1000,top_k=200",
        "lookup:0",
        "lookup:",
        "lookup:65",
        "lookup:\u00b2",
        "no_such.json",
        "None",
        "chain:5 ",
    ],
)
def test_a_tree_that_is_none_is_refused(refused, world, tree):
    refused(
        ("tree",),
        "--prompt_ids",
        "5",
        "--draft_checkpoint_path",
        world / "head.safetensors",
        "--tree",
        tree,
    )


def damaged(world: Path, out: Path, config=None, specs=None, quantization=None) -> Path:
    good = read_checkpoint(world / "bare" / "talon.safetensors")
    tensors = {name: tensor for name, tensor in good.tensors()}
    tensors = specs(tensors) if specs else tensors
    described = {
        name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    changed = config(dict(good.config)) if config else good.config
    write_checkpoint(
        out,
        kind="target",
        config=changed,
        specs=described,
        tensors=tensors.items(),
        quantization=quantization,
    )
    return out


@pytest.mark.parametrize(
    "config",
    [
        lambda c: {},
        lambda c: c | {"dim": "64"},
        lambda c: c | {"dim": None},
        lambda c: c | {"n_layer": 0},
        lambda c: c | {"n_layer": -1},
        lambda c: c | {"n_layer": 3},
        lambda c: c | {"n_head": 2.5},
        lambda c: c | {"new_field": 1},
        lambda c: c | {"rope_scaling": {"kind": "yarn", "factor": 2}},
        lambda c: c | {"rope_scaling": {"what": 1}},
        lambda c: c | {"rope_scaling": 5},
        lambda c: c | {"dim": 128},
        lambda c: c | {"vocab_size": 100},
        lambda c: c | {"intermediate_size": 7},
        lambda c: c | {"eos_ids": None},
        lambda c: c | {"eos_ids": 5},
    ],
)
def test_a_file_whose_configuration_is_damaged_is_refused(refused, world, tmp_path, config):
    path = damaged(world, tmp_path / "x.safetensors", config)
    refused(("x.safetensors", "convert"), "--prompt_ids", "5", target=path)


def test_a_file_with_missing_or_foreign_tensors_is_refused(refused, world, tmp_path):
    def without(tensors):
        return {name: tensor for name, tensor in tensors.items() if name != "norm.weight"}

    path = damaged(world, tmp_path / "x.safetensors", specs=without)
    refused(("norm.weight", "missing", "convert"), "--prompt_ids", "5", target=path)
    path = damaged(
        world, tmp_path / "x.safetensors", specs=lambda t: t | {"extra.weight": torch.zeros(3)}
    )
    refused(("extra.weight", "unused", "convert"), "--prompt_ids", "5", target=path)


def test_text_without_a_tokenizer_is_refused_with_the_way_out(refused, world):
    bare = world / "bare" / "talon.safetensors"
    for argv in (("--prompt", "a"), ("--interactive",), ("--prompt_ids", "5", "--stop", "x")):
        refused(("no tokenizer", "tokenizer.json", "--prompt_ids"), *argv, target=bare)
    engine = load(bare, compile=False)
    for prompt in ("a", [{"role": "user", "content": "a"}]):
        with pytest.raises(ValueError, match="no tokenizer"):
            engine.generate(prompt)


def test_a_tokenizer_of_another_model_is_refused(refused, tmp_path):
    save(tmp_path / "talon.safetensors", random_model(vocab_size=100, max_seq_length=64), "target")
    save_tokenizer(tmp_path)
    refused(("263", "100", "tokenizer"), "--prompt", "a", target=tmp_path / "talon.safetensors")


def test_a_broken_tokenizer_or_template_is_refused(refused, world, tmp_path):
    save(
        tmp_path / "talon.safetensors", random_model(vocab_size=VOCAB, max_seq_length=64), "target"
    )
    target = tmp_path / "talon.safetensors"
    (tmp_path / "tokenizer.json").write_text("{")
    refused(("tokenizer.json",), "--prompt", "a", target=target)
    save_tokenizer(tmp_path, None)
    refused(("--chat", "--no_chat"), "--prompt", "a", "--chat", target=target)
    refused(("--system",), "--prompt", "a", "--system", "x", target=target)
    for template in (
        "{{ 1 / 0 }}",
        "{% if",
        "{{ raise_exception('no') }}",
        "{{ ''.__class__.__mro__ }}",
    ):
        save_tokenizer(tmp_path, template)
        refused(("template", "--no_chat"), "--prompt", "a", target=target)


def test_the_missing_demo_model_names_its_command(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run(lambda: main(["--prompt", "a"]))
    assert ended.value.code == 2
    assert "make demo" in capfd.readouterr().err


def test_what_does_not_fit_in_memory_is_refused_before_it_is_loaded(refused, monkeypatch):
    monkeypatch.setattr(text_module, "available_memory", lambda device: 10**6)
    refused(("GB", "quantize.py", "--max_seq_length"), "--prompt_ids", "5")


# --- as a program ---------------------------------------------------------------------------------


def test_the_program_prints_text_in_any_locale(world, plain):
    ids = " ".join(str(i) for i in range(90, 200))
    text = plain.generate([int(i) for i in ids.split()], max_new_tokens=60, ignore_eos=True)
    wanted = "".join(text)
    assert not wanted.isascii()
    for encoding in ("utf-8", "ascii"):
        argv = ("--prompt_ids", ids, "--max_new_tokens", 60, "--ignore_eos", "--no_compile")
        done = shell(world, *argv, env={"PYTHONIOENCODING": encoding})
        assert done.returncode == 0, done.stderr
        assert (
            done.stdout.decode(encoding)
            == wanted.encode(encoding, "replace").decode(encoding) + "\n"
        )


def test_bytes_on_standard_input_that_are_no_text_are_refused(world):
    for argv in (("--prompt", "-"), ("--interactive",)):
        done = shell(
            world,
            *argv,
            "--no_compile",
            env={"PYTHONIOENCODING": "utf-8:strict"},
            input=b"\xff\xfe\n",
        )
        assert done.returncode == 2 and b"error: " in done.stderr and b"UTF-8" in done.stderr
        assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("close", ["<&-", ">&-", "2>&-", ">/dev/full"])
def test_closed_and_full_streams_end_without_a_traceback(world, close):
    command = f'"$0" "$1" --checkpoint_path "$2" --prompt - --no_compile --max_new_tokens 3 {close}'
    argv = [
        "bash",
        "-c",
        command,
        sys.executable,
        str(ROOT / "generate.py"),
        str(world / "talon.safetensors"),
    ]
    done = subprocess.run(argv, capture_output=True, input=b"hello", timeout=300)
    assert b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr
    wanted = {
        "<&-": (2, b"empty"),
        ">&-": (0, b"3 tokens"),
        "2>&-": (0, b""),
        ">/dev/full": (2, b"No space left"),
    }
    assert (done.returncode, wanted[close][1] in done.stderr) == (wanted[close][0], True), (
        done.stderr
    )


def test_a_reader_that_leaves_ends_the_program_quietly(world, tmp_path):
    command = '"$0" "$1" --checkpoint_path "$2" --prompt x --no_compile --ignore_eos '
    command += "--num_samples 500 --temperature 1"
    argv = ["bash", "-c", f"set -o pipefail; {command} | head -n 1 >/dev/null"]
    argv += [sys.executable, str(ROOT / "generate.py"), str(world / "talon.safetensors")]
    done = subprocess.run(argv, capture_output=True, timeout=300)
    assert done.returncode == 0 and b"error" not in done.stderr and b"Traceback" not in done.stderr
    argv[2] = f"set -o pipefail; {command} --json {tmp_path / 'o'} | head -n 1 >/dev/null"
    done = subprocess.run(argv, capture_output=True, timeout=300)
    assert done.returncode == 2 and b"error: " in done.stderr and b"--json" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_program_help_names_every_flag_of_the_contract(world):
    text = shell(world, "--help").stdout.decode()
    for flag in (
        "checkpoint_path",
        "draft_checkpoint_path",
        "prompt",
        "prompt_file",
        "prompt_ids",
        "chat",
        "no_chat",
        "system",
        "interactive",
        "max_new_tokens",
        "temperature",
        "top_k",
        "top_p",
        "seed",
        "stop",
        "ignore_eos",
        "tree",
        "device",
        "dtype",
        "max_seq_length",
        "compile",
        "no_compile",
        "num_samples",
        "check",
        "highlight",
        "json",
        "profile",
    ):
        assert f"--{flag}" in text
    assert "default: True" not in text.split("--no_chat", 1)[1].split("--system", 1)[0]


@pytest.mark.parametrize("compiled", ["--compile", "--no_compile"])
def test_an_unusable_cache_directory_is_named_in_one_line(world, tmp_path, compiled):
    """torch itself cannot be used without it, eager or not."""
    path = tmp_path / "file"
    path.write_text("")
    done = shell(world, "--prompt", "Hi", compiled, env={"TORCHINDUCTOR_CACHE_DIR": str(path)})
    last = done.stderr.decode().strip().splitlines()[-1]
    assert done.returncode == 2 and b"Traceback" not in done.stderr
    assert last.startswith("error: ") and str(path) in last


@pytest.mark.parametrize("missing", ["CXX", pytest.param("PATH", marks=pytest.mark.slow)])
def test_a_missing_compiler_is_named_with_the_way_out(world, tmp_path, missing):
    """C67."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    env |= {"PATH": str(tmp_path)} if missing == "PATH" else {"CXX": "/bin/false"}
    done = shell(world, "--prompt", "Hi", "--compile", env=env)
    last = done.stderr.decode().strip().splitlines()[-1]
    assert done.returncode == 2 and b"Traceback" not in done.stderr and done.stdout == b""
    assert last.startswith("error: ") and "C++ compiler" in last and "--no_compile" in last
    assert (
        shell(world, "--prompt", "Hi", "--no_compile", "--max_new_tokens", 2, env=env).returncode
        == 0
    )


@pytest.mark.slow
def test_compiled_runs_give_the_eager_text_and_do_not_recompile(cli, world, tmp_path):
    argv = ("--prompt", "Hello", "--max_new_tokens", 20, "--ignore_eos", "--json", tmp_path / "o")
    wanted = cli(*argv)[1]
    for draft in ((), ("--draft_checkpoint_path", world / "head.safetensors", "--tree", "chain:3")):
        code, out, err = cli(*argv, *draft, eager=False)
        top = record(tmp_path / "o")
        assert (code, out) == (0, wanted) and top["compile_s"] > 0 and top["recompiles"] == 0
        assert "compiled in" in err
