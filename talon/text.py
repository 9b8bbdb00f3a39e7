"""Text in, text out: a loaded target with its decoder and tokenizer, for programs and for the
command line.

    from generate import load  # or from text

    engine = load("talon.safetensors", draft_checkpoint_path="head.safetensors")
    for piece in engine.generate("Why is the sky blue?", max_new_tokens=100):
        print(piece, end="", flush=True)

Leaves out: how a round works (engine.py), how a file becomes a module (loading.py).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle_draft import DraftConfig
from model import ModelConfig
from talon.cli import note
from talon.decoder import Decoder, Generation
from talon.loading import (
    DTYPES,
    available_memory,
    device_name,
    find_tokenizer,
    fit_context,
    fit_head,
    fit_tree,
    head_card,
    load_head,
    load_target,
    pick_device,
    pick_dtype,
    plan_memory,
    precision_name,
    read_kind,
)
from talon.prompts import tuning_prompts
from talon.sampling import GREEDY, SamplingConfig
from talon.tokenizer import StreamDecoder, Tokenizer, is_text
from talon.tuning.choice import settle


def encode(tokenizer: Tokenizer | None, prompt: str | list[dict] | list[int]) -> list[int]:
    """Token ids of a plain text, of chat messages ({"role", "content"}), or of ids that are already
    there.
    """
    if isinstance(prompt, list | tuple) and all(isinstance(token, int) for token in prompt):
        return list(prompt)
    if tokenizer is None:
        raise ValueError(
            "the checkpoint has no tokenizer beside it: copy one there, or give the prompt as ids"
        )
    if isinstance(prompt, str):
        check_text("the prompt", prompt)
        return tokenizer.encode(prompt)
    if not isinstance(prompt, list) or not all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt
    ):
        raise ValueError(
            "the prompt is neither a text, nor a list of token ids, nor a list of chat messages: "
            "give one of them, "
            'such as [{"role": "user", "content": "Hello"}]'
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
        raise ValueError(
            "an empty stop text would end everything at once: give at least one character"
        )


@contextmanager
def compiler_errors() -> Iterator[None]:
    """What torch.compile lacks on this machine is the user's to mend: one line instead of its
    traceback.
    """
    try:
        yield
    except Exception as error:
        from torch._dynamo.exc import TorchDynamoException  # its import may already fail

        if not isinstance(error, (TorchDynamoException, OSError)):
            raise
        reason = next(
            (line for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        raise ValueError(
            f"torch.compile does not work here ({reason.strip()}): it needs a C++ compiler such "
            "as g++ (CXX names "
            "another one), and on a GPU Triton too: install it, or run with --no_compile"
        ) from error


class Engine:
    """A loaded model, perhaps with a head: text in, pieces of text out. Made by `load`."""

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer | None, eos_ids: tuple[int, ...], card: dict
    ) -> None:
        self.decoder, self.tokenizer, self.eos_ids = decoder, tokenizer, frozenset(eos_ids)
        self.current: TextGeneration | None = None  # whose text the decoder's caches hold
        self.card = card  # what was loaded, for reports

    def encode(self, prompt: str | list[dict] | list[int]) -> list[int]:
        """Token ids of a plain text, of chat messages ({"role", "content"}), or of ids that are
        already there.
        """
        return encode(self.tokenizer, prompt)

    def warm_up(self, sampling: SamplingConfig) -> float:
        """Compile now what the first generation would compile. Returns seconds."""
        with compiler_errors():
            return self.decoder.warm_up(sampling.kind)

    def generate(
        self,
        prompt: str | list[dict] | list[int],
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
        measurements.
        """
        for name, value in (("max_new_tokens", max_new_tokens), ("top_k", top_k), ("seed", seed)):
            if not isinstance(value, int):
                raise ValueError(f"{name} {value!r} is not allowed: give a whole number")
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        check_ends(max_new_tokens, stop)
        if stop and self.tokenizer is None:
            raise ValueError("stop texts need a tokenizer, and the checkpoint has none beside it")
        sampling = SamplingConfig(temperature, top_k, top_p, seed)
        stop_ids = frozenset() if ignore_eos else self.eos_ids
        return TextGeneration(self, self.encode(prompt), sampling, max_new_tokens, stop_ids, stop)


class TextGeneration:
    """One text under way: iterate for its pieces, which never split a character."""

    def __init__(
        self,
        engine: Engine,
        ids: list[int],
        sampling: SamplingConfig,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        stop: tuple[str, ...],
    ) -> None:
        self.engine, self.stop, self.stop_ids = engine, stop, stop_ids
        self.stream = StreamDecoder(engine.tokenizer) if engine.tokenizer else None
        self.held = ""  # text that may turn out to be the beginning of a stop text
        self.text = ""
        self.pieces: list[
            tuple[str, bool]
        ] = []  # ready to be yielded, and whether a draft guessed them
        self.generation = Generation(
            engine.decoder,
            ids,
            sampling,
            max_new_tokens,
            stop_ids,
            self.hear if self.stream else None,
        )
        self.run = self.decode()

    @property
    def tokens(self) -> list[int]:
        return self.generation.tokens

    def hear(self, token: int) -> bool:
        """Take in one token; True if it completes a stop text, which is cut off together with what
        follows.
        """
        drafted = self.generation.drafted[-1]
        self.held += "" if token in self.stop_ids else self.stream.push([token])
        found = [at for at in (self.held.find(text) for text in self.stop) if at >= 0]
        if found:
            self.emit(self.held[: min(found)], drafted)
            self.held = ""
            return True
        keep = max((overlap(self.held, text) for text in self.stop), default=0)
        self.emit(self.held[: len(self.held) - keep], drafted)
        self.held = self.held[len(self.held) - keep :]
        return False

    def emit(self, text: str, drafted: bool) -> None:
        if text:
            self.text += text
            self.pieces.append((text, drafted))

    def marked(self) -> Iterator[tuple[str, bool]]:
        """The pieces with the mark whether their last token came from the draft. Iterating again
        goes on.
        """
        return self.run

    def decode(self) -> Iterator[tuple[str, bool]]:
        self.engine.current = self
        with compiler_errors():
            for _ in self.generation:
                yield from self.pieces
                self.pieces.clear()
                if self.engine.current is not self and self.generation.stop_reason is None:
                    raise ValueError(
                        "another generation began on this engine before this one ended: take one "
                        "at a time, or load "
                        "a second engine"
                    )
        if self.stream and self.generation.stop_reason != "stop":
            self.emit(self.held + self.stream.flush(), False)
            yield from self.pieces

    def __iter__(self) -> Iterator[str]:
        for piece, _ in self.marked():
            yield piece


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )


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
    (measure anew)."""
    started = time.perf_counter()
    where = pick_device(device)
    precision = pick_dtype(dtype, where)
    file = read_kind(checkpoint_path, "target")
    head_file = (
        read_kind(draft_checkpoint_path, "draft") if draft_checkpoint_path is not None else None
    )
    config = ModelConfig.from_dict(file.config)
    context = fit_context(max_seq_length, config)
    tokenizer = find_tokenizer(file.path.parent, config)
    if head_file is not None:
        fit_head(head_file, config)
    shape = fit_tree(tree, DraftConfig.from_dict(head_file.config) if head_file else None)
    plan_memory(file, head_file, context, shape, precision, available_memory(where)).check()
    model = load_target(file, where, precision)
    head = load_head(head_file, model, where, precision) if head_file and shape.needs_head else None
    choice = None
    if tree == "auto" and head is not None:
        choice = settle(
            (file.path, head_file.path), (device_name(where), precision_name(file, precision)),
            model, head,
            lambda: tuning_prompts(tokenizer, config.vocab_size, config.max_seq_length),
            sampling, compile, tune, note,
        )  # fmt: skip
        shape = choice.tree if choice else shape
    decoder = Decoder(model, context, head if shape.needs_head else None, shape, compile)
    if choice is not None:
        decoder.fall_back_below(choice.break_even)
    card = {
        "device": device_name(where),
        "dtype": next(name for name, value in DTYPES.items() if value == precision),
        "quantization": (file.quantization or {}).get("mode"),
        "tree": decoder.tree.name,
        "head": head_card(head_file, head) if head else None,
        "expected_gain": choice.gain if choice else None,
        "load_s": time.perf_counter() - started,
    }
    return Engine(decoder, tokenizer, config.eos_ids, card)
