"""Text in, text out: a loaded target with its decoder and tokenizer.

    from generate import load  # or from talon.text

    engine = load("talon.safetensors", draft_checkpoint_path="head.safetensors")
    for piece in engine.generate("Why is the sky blue?", max_new_tokens=100):
        print(piece, end="", flush=True)

Leaves out: how a round works (talon/decoder.py), how a file becomes a module (talon/loading.py)."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from talon.cli import note
from talon.decoder import Decoder, Generation
from talon.loading import (
    Files,
    device_name,
    dtype_name,
    fit_context,
    fit_tree,
    gpu_weights,
    head_card,
    head_mode,
    load_head,
    load_target,
    open_files,
    pick_device,
    pick_dtype,
)
from talon.memory import available_memory, plan_memory
from talon.sampling import GREEDY, SamplingConfig
from talon.tokenizer import StreamDecoder, Tokenizer
from talon.trees import Tree, parse_tree

Prompt = str | list[dict] | list[int]  # a text, chat messages ({"role", "content"}), or token ids


def encode(tokenizer: Tokenizer | None, prompt: Prompt, options: dict | None = None) -> list[int]:
    """The token ids of a prompt; options are those of a chat's template."""
    if isinstance(prompt, list | tuple) and all(isinstance(token, int) for token in prompt):
        return list(prompt)
    if tokenizer is None:
        raise ValueError("no tokenizer next to the checkpoint: copy one there, or give ids")
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if not isinstance(prompt, list) or not all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt
    ):
        raise ValueError(
            "the prompt is not allowed: give a text, a list of token ids, or a list of chat "
            'messages such as {"role": "user", "content": "Hello"}'
        )
    return tokenizer.encode_chat(prompt, options)


def check_ends(max_new_tokens: int, stop: tuple[str, ...]) -> None:
    if not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens {max_new_tokens} is not allowed: give a count >= 0")
    if any(not text for text in stop):
        raise ValueError("an empty stop text would end everything: give at least one character")


class Engine:
    """A loaded model, perhaps with a head: text in, pieces of text out. Made by `load`."""

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer | None, eos_ids: tuple[int, ...], card: dict
    ) -> None:
        self.decoder, self.tokenizer, self.eos_ids = decoder, tokenizer, frozenset(eos_ids)
        self.current: TextGeneration | None = None  # whose text the decoder's caches hold
        self.card = card  # what was loaded, for reports
        self.template_options: dict = {}  # more variables for the chat template

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt."""
        return encode(self.tokenizer, prompt, self.template_options)

    def warm_up(self, sampling: SamplingConfig) -> float:
        """Compile now what the first generation would compile. Returns seconds."""
        return self.decoder.warm_up(sampling)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        stop: str | tuple[str, ...] = (),
        ignore_eos: bool = False,
        **sampling: float,
    ) -> "TextGeneration":
        """Start a generation: iterate over it for the pieces of text; its fields hold ids and
        measurements. sampling: temperature, top_k, top_p and seed, as in SamplingConfig."""
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        check_ends(max_new_tokens, stop)
        stop_ids = frozenset() if ignore_eos else self.eos_ids
        ids, chosen = self.encode(prompt), SamplingConfig(**sampling)
        generation = Generation(self.decoder, ids, chosen, max_new_tokens, stop_ids)
        return TextGeneration(self, generation, stop)


class TextGeneration:
    """One text under way: iterate for its pieces, which never split a character."""

    def __init__(self, engine: Engine, generation: Generation, stop: tuple[str, ...]) -> None:
        self.engine, self.generation, self.stop = engine, generation, stop
        self.stop_tokens, self.stop_texts = split_stops(engine.tokenizer, stop)
        self.stream = StreamDecoder(engine.tokenizer) if engine.tokenizer else None
        self.held = ""  # text that may turn out to be the beginning of a stop text
        self.text = ""
        # The piece of every token, perhaps empty, and whether a draft guessed the token.
        self.marked = self.decode()

    @property
    def tokens(self) -> list[int]:
        return self.generation.tokens

    def __iter__(self) -> Iterator[str]:
        return (piece for piece, _ in self.marked if piece)

    def decode(self) -> Iterator[tuple[str, bool]]:
        generation = self.generation
        self.engine.current = self
        for token, drafted in generation:
            piece = self.piece_of(token)
            self.text += piece
            yield piece, drafted
            if self.engine.current is not self and generation.stop_reason is None:
                raise ValueError(
                    "another generation began on this engine before this one ended: take one at a "
                    "time, or load a second engine"
                )
        if self.stream and generation.stop_reason != "stop":
            if piece := self.held + self.stream.flush():
                self.text += piece
                yield piece, False

    def piece_of(self, token: int) -> str:
        """The text that is certain now. A stop text is cut off, together with what follows."""
        if self.stream is None or self.generation.stop_reason == "eos":
            return ""
        if token in self.stop_tokens:
            self.held += self.stream.flush()
            ends = [len(self.held)]
        else:
            self.held += self.stream.push([token])
            ends = [at for at in (self.held.find(text) for text in self.stop_texts) if at >= 0]
        if ends:
            self.generation.end("stop")
            certain, self.held = min(ends), self.held[: min(ends)]
        else:
            open_ends = (overlap(self.held, text) for text in self.stop_texts)
            certain = len(self.held) - max(open_ends, default=0)
        piece, self.held = self.held[:certain], self.held[certain:]
        return piece


def split_stops(
    tokenizer: Tokenizer | None, stop: tuple[str, ...]
) -> tuple[frozenset[int], tuple[str, ...]]:
    """The ids of stop texts that are special tokens, never seen in a text; and the other ones."""
    if stop and tokenizer is None:
        raise ValueError("stop texts need a tokenizer: copy one next to the checkpoint")
    ids = {text: tokenizer.special_id(text) for text in stop}
    texts = tuple(text for text, special in ids.items() if special is None)
    for text in texts:
        if tokenizer.holds_special(text):
            raise ValueError(
                f"stop text {text!r} holds a special token next to other text, never seen "
                "together: give the special token alone"
            )
    return frozenset(ids.values()) - {None}, texts


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)


# ---------------------------------------------------------------- loading


@dataclass(frozen=True)
class Options:
    """How to run what the files hold."""

    device: torch.device
    dtype: torch.dtype
    tree: Tree | None = None  # None: --tree auto
    max_seq_length: int | None = None
    compile: bool = True
    keep_head: bool = False  # as its file has it, though a GPU drafts faster with int8
    tune: str = "stored"  # what --tree auto does, see `load`
    sampling: SamplingConfig = GREEDY  # what it is tuned for


def read_options(tree: str, device: str, dtype: str, **more: object) -> Options:
    """Options from what a command line gives."""
    where, parsed = pick_device(device), None if tree == "auto" else parse_tree(tree)
    return Options(where, pick_dtype(dtype, where), parsed, **more)


def load(
    checkpoint_path: str | Path,
    draft_checkpoint_path: str | Path | None = None,
    *,
    tree: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    max_seq_length: int | None = None,
    compile: bool = True,
    keep_head: bool = False,
    tune: str = "stored",
    sampling: SamplingConfig = GREEDY,
) -> Engine:
    """Load a target, perhaps with a head, and make the decoder. ValueError or OSError for the user.

    keep_head: on a GPU a head is rounded to int8, which only its guesses show, unless this is set.
    tune says what tree `auto` does for this head and `sampling` where nothing was measured before:
    stored (the preset of the head's family) | measure."""
    more = {"max_seq_length": max_seq_length, "compile": compile, "keep_head": keep_head}
    options = read_options(tree, device, dtype, tune=tune, sampling=sampling, **more)
    return load_files(open_files(checkpoint_path, draft_checkpoint_path), options)


def load_files(files: Files, options: Options) -> Engine:
    """Plan the memory, make the modules, choose the tree, and make the decoder."""
    started = time.perf_counter()
    o, config = options, files.config
    context = fit_context(o.max_seq_length, config)
    tree = fit_tree(o.tree, files.head_config, gpu_weights(files, o.device, o.dtype))
    available, processes = available_memory(o.device), files.target.processes
    if available is not None and o.device.type == "cpu":
        available //= processes
    plan_memory(files, context, tree, o.dtype, o.device, available).check()
    model = load_target(files, o.device, o.dtype)
    head, choice = None, None
    if files.head and tree.needs_head:
        head = load_head(files, model, o.device, o.dtype, o.keep_head)
        if o.tree is None:
            from talon.tuning.choice import auto_tree  # here only: it is large, and seldom needed

            measure = o.tune == "measure" and processes == 1
            if processes > 1:
                note(
                    "note: several processes measure no trees: --tree auto takes what one has "
                    "measured, or the head's usual tree"
                )
            choice = auto_tree(files, model, head, o.sampling, o.compile, measure)
            tree = choice.tree if choice else tree
    decoder = Decoder(model, context, head if tree.needs_head else None, tree, o.compile)
    card = {
        "device": device_name(o.device),
        "dtype": dtype_name(o.dtype),
        "world_size": processes,
        "quantization": (files.target.quantization or {}).get("mode"),
        "tree": tree.name,
        "head": head_card(head.config) if head else None,
        "head_quantization": head and head_mode(files, o.device, o.dtype, o.keep_head),
        "expected_gain": choice.gain if choice else None,
        "load_s": time.perf_counter() - started,
    }
    return Engine(decoder, files.tokenizer, config.eos_ids, card)
