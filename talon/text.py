"""Text in, text out: a loaded target with its decoder and tokenizer, for programs and for the
command line.

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
    available_memory,
    device_name,
    dtype_name,
    fit_context,
    fit_tree,
    head_card,
    load_head,
    load_target,
    open_files,
    pick_device,
    pick_dtype,
    plan_memory,
    precision_name,
)
from talon.prompts import tuning_prompts
from talon.sampling import GREEDY, SamplingConfig
from talon.tokenizer import StreamDecoder, Tokenizer, is_text
from talon.trees import Tree, parse_tree

Prompt = str | list[dict] | list[int]  # a text, chat messages ({"role", "content"}), or token ids


def encode(tokenizer: Tokenizer | None, prompt: Prompt) -> list[int]:
    """The token ids of a prompt."""
    if isinstance(prompt, list | tuple) and all(isinstance(token, int) for token in prompt):
        return list(prompt)
    if tokenizer is None:
        raise ValueError(
            "there is no tokenizer next to the checkpoint: copy one there, or give the prompt as "
            "ids"
        )
    if isinstance(prompt, str):
        check_text("the prompt", prompt)
        return tokenizer.encode(prompt)
    if not isinstance(prompt, list) or not all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt
    ):
        raise ValueError(
            "the prompt is neither a text, nor a list of token ids, nor a list of chat messages: "
            'give one of them, such as [{"role": "user", "content": "Hello"}]'
        )
    for message in prompt:
        check_text("a message", str(message["content"]))
    return tokenizer.encode_chat(prompt)


def check_text(what: str, text: str) -> None:
    """Bytes that are no text come from the shell as lone surrogates, which no tokenizer takes."""
    if not is_text(text):
        raise ValueError(f"{what} holds bytes that are not UTF-8: give UTF-8 text")


def check_ends(max_new_tokens: int, stop: tuple[str, ...]) -> None:
    if max_new_tokens < 0:
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

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt."""
        return encode(self.tokenizer, prompt)

    def warm_up(self, sampling: SamplingConfig) -> float:
        """Compile now what the first generation would compile. Returns seconds."""
        return self.decoder.warm_up(sampling)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | tuple[str, ...] = (),
        ignore_eos: bool = False,
    ) -> "TextGeneration":
        """Start a generation. Iterate over it for the pieces of text; its fields hold ids and
        measurements. Raises ValueError for a value that is not allowed."""
        for name, value in (("max_new_tokens", max_new_tokens), ("top_k", top_k), ("seed", seed)):
            if not isinstance(value, int):
                raise ValueError(f"{name} {value!r} is not allowed: give a whole number")
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        check_ends(max_new_tokens, stop)
        if stop and self.tokenizer is None:
            raise ValueError("stop texts need a tokenizer: copy one next to the checkpoint")
        sampling = SamplingConfig(temperature, top_k, top_p, seed)
        stop_ids = frozenset() if ignore_eos else self.eos_ids
        ids = self.encode(prompt)
        return TextGeneration(
            self, Generation(self.decoder, ids, sampling, max_new_tokens, stop_ids), stop
        )


class TextGeneration:
    """One text under way: iterate for its pieces, which never split a character."""

    def __init__(self, engine: Engine, generation: Generation, stop: tuple[str, ...]) -> None:
        self.engine, self.generation, self.stop = engine, generation, stop
        self.stream = StreamDecoder(engine.tokenizer) if engine.tokenizer else None
        self.held = ""  # text that may turn out to be the beginning of a stop text
        self.text = ""
        self.pieces = self.decode()

    @property
    def tokens(self) -> list[int]:
        return self.generation.tokens

    def marked(self) -> Iterator[tuple[str, bool]]:
        """The pieces with the mark whether their last token came from the draft. Iterating again
        goes on."""
        return self.pieces

    def __iter__(self) -> Iterator[str]:
        for piece, _ in self.pieces:
            yield piece

    def decode(self) -> Iterator[tuple[str, bool]]:
        generation = self.generation
        self.engine.current = self
        for token, drafted in generation:
            if piece := self.piece_of(token):
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
        self.held += self.stream.push([token])
        found = [at for at in (self.held.find(text) for text in self.stop) if at >= 0]
        if found:
            self.generation.end("stop")
            certain, self.held = min(found), self.held[: min(found)]
        else:
            certain = len(self.held) - max((overlap(self.held, s) for s in self.stop), default=0)
        piece, self.held = self.held[:certain], self.held[certain:]
        return piece


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )


# ---------------------------------------------------------------- loading


@dataclass(frozen=True)
class Options:
    """How to run what the files hold."""

    device: torch.device
    dtype: torch.dtype
    tree: Tree | None = None  # None: --tree auto
    max_seq_length: int | None = None
    compile: bool = True
    tune: str = "stored"  # what --tree auto does, see `load`
    sampling: SamplingConfig = GREEDY  # what it is tuned for


def read_options(
    tree: str, device: str, dtype: str, max_seq_length: int | None, compile: bool, **tuning: object
) -> Options:
    """Options from what a command line gives."""
    where = pick_device(device)
    shape = None if tree == "auto" else parse_tree(tree)
    return Options(where, pick_dtype(dtype, where), shape, max_seq_length, compile, **tuning)


def load(
    checkpoint_path: str | Path,
    draft_checkpoint_path: str | Path | None = None,
    *,
    tree: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    max_seq_length: int | None = None,
    compile: bool = True,
    tune: str = "stored",
    sampling: SamplingConfig = GREEDY,
) -> Engine:
    """Load a target, and a head if one is given, and make the decoder. Raises ValueError or OSError
    for the user.

    tune says what tree `auto` does for this head and `sampling`: stored (what was measured before,
    else the preset of the head's family) | once (measure if that was never done here) | again
    (measure again)."""
    more = {"tune": tune, "sampling": sampling}
    options = read_options(tree, device, dtype, max_seq_length, compile, **more)
    return load_files(open_files(checkpoint_path, draft_checkpoint_path), options)


def load_files(files: Files, options: Options) -> Engine:
    """Plan the memory, make the modules, choose the tree, and make the decoder."""
    started = time.perf_counter()
    o, config = options, files.config
    context, tree = fit_context(o.max_seq_length, config), fit_tree(o.tree, files.head_config)
    plan_memory(files, context, tree, o.dtype, available_memory(o.device)).check()
    model = load_target(files, o.device, o.dtype)
    head, choice = None, None
    if files.head and tree.needs_head:
        head = load_head(files, model, o.device, o.dtype)
        if o.tree is None:
            from talon.tuning.choice import settle  # here only: it is large, and seldom needed

            choice = settle(
                (files.target.path, files.head.path),
                (device_name(o.device), precision_name(files.target, o.dtype)),
                model, head, lambda: tuning_prompts(files.tokenizer, config),
                o.sampling, o.compile, o.tune, note,
            )  # fmt: skip
            tree = choice.tree if choice else tree
    decoder = Decoder(model, context, head if tree.needs_head else None, tree, o.compile)
    card = {
        "device": device_name(o.device),
        "dtype": dtype_name(o.dtype),
        "quantization": (files.target.quantization or {}).get("mode"),
        "tree": tree.name,
        "head": head_card(head.config) if head else None,
        "expected_gain": choice.gain if choice else None,
        "load_s": time.perf_counter() - started,
    }
    return Engine(decoder, files.tokenizer, config.eos_ids, card)
