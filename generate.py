"""Load a checkpoint and generate text with it: the engine that other programs import, and the command line.

    python generate.py --checkpoint_path checkpoints/SmolLM2-135M-Instruct/talon.safetensors --prompt "Hello"

As a library:

    engine = load("talon.safetensors", draft_checkpoint_path="head.safetensors")
    for piece in engine.generate("Why is the sky blue?", max_new_tokens=100):
        print(piece, end="", flush=True)

Leaves out: how a round works (engine.py), what a checkpoint may hold (convert_hf_checkpoint.py).
"""

import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from checkpoint import Checkpoint, atomic_file, read_checkpoint
from cli import Parser, run
from eagle_draft import (
    NO_TREE,
    PRESETS,
    DraftConfig,
    DraftHead,
    Tree,
    default_feature_layers,
    parse_tree,
)
from engine import Decoder, Generation, full_logits
from model import ModelConfig, Transformer
from quantize import pack, swap_linears, unpacked
from questions import prompts_for
from sampling import SamplingConfig, perturb
from tokenizer import TOKENIZER_FILES, StreamDecoder, Tokenizer, load_tokenizer
from tuning import settle

DEMO = Path("checkpoints/SmolLM2-135M-Instruct/talon.safetensors")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def note(text: str) -> None:
    """Everything but the generated text goes to standard error."""
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- loading


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device {name!r} is not known: give auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for but torch finds no GPU: give --device cpu or auto")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported: give auto, cpu or cuda")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: fp32 on a CPU, where it is exact and not slower; on a GPU bf16, or fp16 where bf16 is emulated."""
    if name not in ("auto", *DTYPES):
        raise ValueError(f"dtype {name!r} is not known: give auto, {', '.join(DTYPES)}")
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16


def fill(module: nn.Module, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
    """Give every parameter of a module on the meta device its tensor: each exactly one, none left over."""
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    missing, unused = wanted.keys() - checkpoint.specs.keys(), checkpoint.specs.keys() - wanted.keys()
    if missing or unused:
        raise ValueError(
            f"{checkpoint.path}: the file does not match its own configuration (missing: "
            f"{sorted(missing)[:3] or 'none'}, unused: {sorted(unused)[:3] or 'none'}): convert it again"
        )
    for name, shape in wanted.items():
        if checkpoint.specs[name].shape != shape:
            raise ValueError(
                f"{checkpoint.path}: {name} has shape {list(checkpoint.specs[name].shape)}, but the file's "
                f"configuration says {list(shape)}: convert it again"
            )
    quantized = tuple(f"{layer}." for layer in (checkpoint.quantization or {}).get("layers", {}))
    state = {}
    for name, tensor in checkpoint.tensors():
        # The numbers of a quantised layer stay as they are stored; packing gives them the device's form.
        cast = tensor.is_floating_point() and not name.startswith(quantized or ("\0",))
        state[name] = tensor.to(device=device, dtype=dtype if cast else tensor.dtype)
    module.load_state_dict(state, strict=True, assign=True)
    module.requires_grad_(False).eval()


def load_target(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Transformer:
    """The model of a target file, its quantised linears swapped in and packed for the device."""
    config = ModelConfig.from_dict(checkpoint.config)
    with torch.device("meta"):
        model = Transformer(config)
    swap_linears(model, checkpoint.quantization)
    tied = config.tied and "output.weight" not in checkpoint.specs
    if tied:
        model.output = None
    fill(model, checkpoint, device, dtype)
    if tied:
        model.output = nn.Linear(config.dim, config.vocab_size, bias=False, device="meta")
        model.output.weight = model.tok_embeddings.weight
    pack(model, device, dtype)
    return model


def fit_head(checkpoint: Checkpoint, target: ModelConfig) -> DraftConfig:
    """The head's configuration with its feature layers resolved, refused if it cannot belong to this target."""
    c = DraftConfig.from_dict(checkpoint.config)
    hidden = c.dim if c.family == "eagle1" else c.target_dim
    for what, mine, theirs in (
        ("hidden size", hidden, target.dim),
        ("vocabulary", c.vocab_size, target.vocab_size),
    ):
        if mine != theirs:
            raise ValueError(
                f"{checkpoint.path} was made for a target with {what} {mine}, but this target has {theirs}: "
                "use the head that was trained for it"
            )
    if not c.own_embedding and c.dim != target.dim:
        raise ValueError(
            f"{checkpoint.path} has hidden size {c.dim} and no embedding of its own, but the target's has "
            f"{target.dim}: the head file is incomplete"
        )
    if c.family == "eagle3":
        layers = c.feature_layers or default_feature_layers(target.n_layer)
        if min(layers) < 0 or max(layers) > target.n_layer:
            raise ValueError(
                f"{checkpoint.path} reads layers {list(layers)}, but this target has only {target.n_layer}"
            )
        c = replace(c, feature_layers=layers)
    return c


def load_head(checkpoint: Checkpoint, model: Transformer, device: torch.device, dtype: torch.dtype) -> DraftHead:
    """A head in the target's compute dtype, with what its file leaves out borrowed from the target."""
    config = fit_head(checkpoint, model.config)
    with torch.device("meta"):
        head = DraftHead(config)
    swap_linears(head, checkpoint.quantization)
    identity = "d2t" not in checkpoint.specs
    if identity and config.draft_vocab_size != config.vocab_size:
        raise ValueError(f"{checkpoint.path}: a reduced draft vocabulary needs d2t: convert the head again")
    if identity:
        del head.d2t
    fill(head, checkpoint, device, dtype)
    if identity:
        head.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64, device=device))
    ids = head.target_ids
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise ValueError(f"{checkpoint.path}: d2t leads outside the vocabulary of {config.vocab_size}")
    if not config.own_embedding:
        head.tok_embeddings = model.tok_embeddings
    if not config.own_output:
        head.output = model.output if identity else rows_of(model.output, ids)
    pack(head, device, dtype)
    return head


def rows_of(linear: nn.Module, ids: Tensor) -> nn.Linear:
    """The target's lm_head reduced to the rows of a draft vocabulary."""
    if not isinstance(linear, nn.Linear):
        linear = unpacked(linear)
    reduced = nn.Linear(linear.in_features, ids.shape[0], bias=False, device="meta")
    reduced.weight = nn.Parameter(linear.weight[ids], requires_grad=False)
    return reduced


def head_card(checkpoint: Checkpoint, head: DraftHead) -> str:
    """What a user needs to see to know that the right head was read in the right way."""
    c = head.config
    levels = c.feature_layers or ()
    captured = (
        f"inputs of layers {list(levels)} = outputs of layers {[i - 1 for i in levels]}"
        if levels
        else "state after the final norm"
    )
    switches = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "fc_bias", "qkv_bias")
    borrowed = [
        name for name, own in (("embedding", c.own_embedding), ("lm_head", c.own_output)) if not own
    ]
    return (
        f"head: {c.family} ({c.source_format} format), features: {captured}, "
        f"variants: {', '.join(s for s in switches if getattr(c, s)) or 'none'}, "
        f"RoPE base {c.rope_theta:g} ({c.rope_source}), draft vocabulary {c.draft_vocab_size} of {c.vocab_size}, "
        f"trained to {c.max_seq_length} positions, from the target: {', '.join(borrowed) or 'nothing'}"
    )


def fit_tree(text: str, head: DraftConfig | None) -> Tree:
    """The tree to use; `auto` takes the preset of the head's family, cut to what its vocabulary can fill."""
    if head is None:
        tree = NO_TREE if text == "auto" else parse_tree(text)
        if tree.needs_head:
            raise ValueError(
                f"tree {text!r} needs a head: give --draft_checkpoint_path, or --tree none or lookup:5"
            )
        return tree
    tree = parse_tree(PRESETS[head.family] if text == "auto" else text)
    if tree.levels > 64 or tree.nodes > 1024:
        raise ValueError(
            f"tree {tree.name} has {tree.nodes} nodes and {tree.levels} levels: give 1024 and 64 at most"
        )
    size = head.draft_vocab_size
    if tree.top_k > size:
        raise ValueError(
            f"tree {tree.name} asks for {tree.top_k} children of a node, but the head's vocabulary has {size}: "
            f"lower top_k to {size} or less"
        )
    return tree


# ---------------------------------------------------------------- the memory plan


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a decoder will hold. `available` is None where the system does not say."""

    target: int
    head: int
    caches: int
    workspace: int
    available: int | None = None

    @property
    def total(self) -> int:
        return self.target + self.head + self.caches + self.workspace

    def check(self) -> None:
        if self.available is None or self.total <= self.available:
            return
        raise ValueError(
            f"this needs {gigabytes(self.total)} (target {gigabytes(self.target)}, head {gigabytes(self.head)}, "
            f"caches {gigabytes(self.caches)}, workspace {gigabytes(self.workspace)}) but the device has "
            f"{gigabytes(self.available)} free: quantise with quantize.py --mode int8 or int4, or lower "
            "--max_seq_length"
        )


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def loaded_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Bytes of a file's tensors once loaded: floating point ones outside quantised layers in the compute dtype."""
    quantized = tuple(f"{layer}." for layer in (checkpoint.quantization or {}).get("layers", {}))
    total = 0
    for name, spec in checkpoint.specs.items():
        cast = spec.dtype.is_floating_point and not name.startswith(quantized or ("\0",))
        size = dtype.itemsize if cast else spec.dtype.itemsize
        total += size * torch.Size(spec.shape).numel()
    return total


def plan_memory(
    target: Checkpoint,
    head: Checkpoint | None,
    max_seq_length: int,
    tree: Tree,
    dtype: torch.dtype,
    available: int | None,
    chunk: int = 256,
) -> MemoryPlan:
    """What decoding will need, from the files' headers alone."""
    c = ModelConfig.from_dict(target.config)
    rows = max_seq_length + max(chunk, tree.nodes, tree.draft_slots)
    caches = 2 * c.n_layer * c.n_kv_head * c.head_dim * rows * dtype.itemsize
    if head is not None:
        d = DraftConfig.from_dict(head.config)
        caches += 2 * d.n_kv_head * d.head_dim * rows * dtype.itemsize
    scores = 2 * c.n_head * chunk * rows * 4  # attention of one prefill chunk, scores and weights in fp32
    logits = 3 * tree.nodes * c.vocab_size * 4  # of a tree, with noise and filter beside them
    hidden = 8 * chunk * c.intermediate_size * dtype.itemsize
    return MemoryPlan(
        loaded_bytes(target, dtype),
        loaded_bytes(head, dtype) if head else 0,
        caches,
        scores + logits + hidden,
        available,
    )


def available_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


# ---------------------------------------------------------------- the engine


def encode(tokenizer: Tokenizer | None, prompt: str | list[dict] | list[int]) -> list[int]:
    """Token ids of a plain text, of chat messages ({"role", "content"}), or of ids that are already there."""
    if isinstance(prompt, list | tuple) and all(isinstance(token, int) for token in prompt):
        return list(prompt)
    if tokenizer is None:
        raise ValueError("the checkpoint has no tokenizer beside it: copy one there, or give the prompt as ids")
    if isinstance(prompt, str):
        check_text("the prompt", prompt)
        return tokenizer.encode(prompt)
    if not isinstance(prompt, list) or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt):
        raise ValueError(
            "the prompt is neither a text, nor a list of token ids, nor a list of chat messages: give one of them, "
            'such as [{"role": "user", "content": "Hello"}]'
        )
    for message in prompt:
        check_text("a message", str(message["content"]))
    return tokenizer.encode_chat(prompt)


def check_text(what: str, text: str) -> None:
    """Bytes that are no text come from the shell as lone surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} holds bytes that are not UTF-8: give UTF-8 text") from None


def check_ends(max_new_tokens: int, stop: tuple[str, ...]) -> None:
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens {max_new_tokens} is not allowed: give a count >= 0")
    if any(not text for text in stop):
        raise ValueError("an empty stop text would end everything at once: give at least one character")


@contextmanager
def compiler_errors() -> Iterator[None]:
    """What torch.compile lacks on this machine is the user's to mend: one line instead of its traceback."""
    try:
        yield
    except TorchDynamoException as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(
            f"torch.compile does not work here ({reason.strip()}): it needs a C++ compiler such as g++ (CXX names "
            "another one), and on a GPU Triton too: install it, or run with --no_compile"
        ) from error


class Engine:
    """A loaded model, perhaps with a head: text in, pieces of text out. Made by `load`."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer | None, eos_ids: tuple[int, ...], card: dict) -> None:
        self.decoder, self.tokenizer, self.eos_ids = decoder, tokenizer, frozenset(eos_ids)
        self.current: TextGeneration | None = None  # whose text the decoder's caches hold
        self.card = card  # what was loaded, for reports

    def encode(self, prompt: str | list[dict] | list[int]) -> list[int]:
        """Token ids of a plain text, of chat messages ({"role", "content"}), or of ids that are already there."""
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
        """Start a generation. Iterate over it for the pieces of text; its fields hold ids and measurements."""
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
        self.pieces: list[tuple[str, bool]] = []  # ready to be yielded, and whether a draft guessed them
        self.generation = Generation(
            engine.decoder, ids, sampling, max_new_tokens, stop_ids, self.hear if self.stream else None
        )
        self.run = self.decode()

    @property
    def tokens(self) -> list[int]:
        return self.generation.tokens

    def hear(self, token: int) -> bool:
        """Take in one token; True if it completes a stop text, which is cut off together with what follows."""
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
        """The pieces with the mark whether their last token came from the draft. Iterating again goes on."""
        return self.run

    def decode(self) -> Iterator[tuple[str, bool]]:
        self.engine.current = self
        with compiler_errors():
            for _ in self.generation:
                yield from self.pieces
                self.pieces.clear()
                if self.engine.current is not self and self.generation.stop_reason is None:
                    raise ValueError(
                        "another generation began on this engine before this one ended: take one at a time, or load "
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
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


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
    sampling: SamplingConfig = SamplingConfig(),
) -> Engine:
    """Load a target, and a head if one is given, and make the decoder. Raises ValueError or OSError for the user.

    tune says what tree `auto` does for this head and `sampling`: stored (what was measured before, else the preset
    of the head's family) | once (measure if that was never done here) | again (measure anew).
    """
    started = time.perf_counter()
    where = pick_device(device)
    precision = pick_dtype(dtype, where)
    file = read_kind(checkpoint_path, "target")
    head_file = read_kind(draft_checkpoint_path, "draft") if draft_checkpoint_path is not None else None
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
            (file.path, head_file.path), (device_name(where), precision_name(file, precision)), model, head,
            lambda: prompts_for(tokenizer, config.vocab_size, 6, min(512, config.max_seq_length // 2)),
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


def precision_name(file: Checkpoint, precision: torch.dtype) -> str:
    mode = (file.quantization or {}).get("mode")
    return "/".join(filter(None, (mode, next(name for name, value in DTYPES.items() if value == precision))))


def read_kind(path: str | Path, kind: str) -> Checkpoint:
    """Read a file's header and refuse a head where a target belongs, and the reverse."""
    checkpoint = read_checkpoint(path)
    if checkpoint.kind != kind:
        flag = {"target": "--draft_checkpoint_path", "draft": "--checkpoint_path"}[kind]
        dim, vocab = checkpoint.config.get("dim"), checkpoint.config.get("vocab_size")
        raise ValueError(
            f"{path} is a {checkpoint.kind} (hidden size {dim}, vocabulary {vocab}) where a {kind} is needed: "
            f"give it as {flag}"
        )
    check_config(checkpoint)
    return checkpoint


def check_config(checkpoint: Checkpoint) -> None:
    """Refuse metadata that the converter does not write, before anything is built from it."""
    kind = {"target": ModelConfig, "draft": DraftConfig}[checkpoint.kind]
    try:
        config = kind.from_dict(checkpoint.config)
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{checkpoint.path} has a damaged configuration ({error}): convert it again") from None
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type is int and not (type(value) is int and value > 0):
            raise ValueError(
                f"{checkpoint.path} has a damaged configuration ({field.name} is {value!r}): convert it again"
            )


def fit_context(asked: int | None, config: ModelConfig, default: int = 4096) -> int:
    """The context to provide for, which the model's own limit bounds."""
    if asked is not None and not 2 <= asked <= config.max_seq_length:
        raise ValueError(
            f"max_seq_length {asked} is not allowed: the model was made for 2 to {config.max_seq_length}"
        )
    return asked or min(config.max_seq_length, default)


def find_tokenizer(directory: Path, config: ModelConfig) -> Tokenizer | None:
    """The tokenizer beside a checkpoint; None if there is none at all, for use with ids."""
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        return None
    tokenizer = load_tokenizer(directory)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer in {directory} has ids up to {tokenizer.vocab_size - 1}, but the model's embedding "
            f"only {config.vocab_size} rows: put the tokenizer of this very model there"
        )
    return tokenizer


# ---------------------------------------------------------------- reports


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()})"


def peak_memory(device: torch.device) -> int:
    """Bytes: on a GPU what torch allocated at most, on a CPU the process's peak resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def compilations() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def bytes_per_round(decoder: Decoder, committed: float) -> float:
    """Weights and cache rows that one round reads: the target once, the head once per level and once to catch up."""
    model, tree = decoder.model, decoder.tree
    weights = sum(module_bytes(module) for module in (model.layers, model.output))
    row = decoder.cache.data[:, :, :, 0].numel() * decoder.cache.data.itemsize
    total = weights + committed * row
    if tree.needs_head:
        head, cache = decoder.drafter.head, decoder.drafter.cache
        row = cache.data[:, :, :, 0].numel() * cache.data.itemsize
        layer = sum(module_bytes(module) for module in (head.fc, head.layer))
        total += tree.levels * (layer + module_bytes(head.output) + committed * row)
    return total


def module_bytes(module: nn.Module) -> int:
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def sample_record(text: TextGeneration) -> dict:
    """What --json says of one sample; seconds, bytes and tokens."""
    run, decoder = text.generation, text.engine.decoder
    stats = run.stats
    speed = stats.emitted / stats.decode_s if stats.decode_s else 0.0
    middle = len(run.ids) + len(run.tokens) / 2
    moved = bytes_per_round(decoder, middle) * stats.rounds
    return {
        "seed": run.sampling.seed,
        "prompt_tokens": len(run.ids),
        "tokens": run.tokens,
        "text": text.text if text.stream else None,
        "stop_reason": run.stop_reason,
        "prefill_s": stats.prefill_s,
        "decode_s": stats.decode_s,
        "tokens_per_s": speed,
        "rounds": stats.rounds,
        "plain_rounds": stats.plain_rounds,
        "acceptance_length": stats.acceptance_length,
        "accepted_by_depth": stats.accepted_by_depth,
        "draft_s": stats.draft_s,
        "verify_s": stats.verify_s,
        "bandwidth_bytes_per_s": moved / stats.decode_s if stats.decode_s else 0.0,
        "peak_memory_bytes": peak_memory(decoder.device),
    }


def describe(record: dict, drafting: bool) -> str:
    """One sample's measurements as a line for people."""
    line = (
        f"{len(record['tokens'])} tokens ({record['stop_reason']}), "
        f"first token after {record['prefill_s']:.2f} s, then {record['tokens_per_s']:.1f} tokens/s, "
        f"{record['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s, peak memory {gigabytes(record['peak_memory_bytes'])}"
    )
    if not drafting or not record["rounds"]:
        return line
    rest = record["decode_s"] - record["draft_s"] - record["verify_s"]
    by_depth = " ".join(f"{count / record['rounds']:.2f}" for count in record["accepted_by_depth"])
    return (
        f"{line}\nacceptance length {record['acceptance_length']:.2f} over {record['rounds']} rounds "
        f"(share accepted by depth: {by_depth or 'none'}); draft {record['draft_s']:.2f} s, "
        f"verify {record['verify_s']:.2f} s, rest {rest:.2f} s"
    )


def project_commit() -> str | None:
    """The commit of a checkout of this project; None where it is not one."""
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def write_json(path: str, value: dict) -> None:
    with atomic_file(Path(path)) as file:
        # A file name from the shell may hold bytes that are no text: JSON has an escape for them.
        file.write((json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode(errors="backslashreplace"))


def check_output(flag: str, path: Path, inputs: list[Path]) -> None:
    """Refuse an output that cannot be written before the work is done, not after."""
    given = f"{flag} {path}"
    try:
        if path.is_dir():
            raise ValueError(f"{given} is a directory: give the name of a file")
        if not path.parent.is_dir():
            raise ValueError(f"{given}: directory {path.parent} does not exist: create it first")
        if path.exists() and not path.is_file():
            raise ValueError(f"{given} is no ordinary file: give the name of a file to write")
        if any(path.exists() and other.exists() and path.samefile(other) for other in inputs):
            raise ValueError(f"{given} is an input of this run and would be overwritten: choose another name")
        probe = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"{given} cannot be written ({error.strerror}): choose a place that can") from None


# ---------------------------------------------------------------- the check against plain decoding


def check_sample(plain: Decoder, text: TextGeneration) -> dict:
    """Decode the same prompt plainly, to the same end, and compare ids. `gap`: how much higher the plain token's value
    is than the drafted one's where they first differ, in the logits (or noisy logits) that plain decoding chose by;
    None where one text only ends earlier or a filter excludes the drafted token."""
    run, engine = text.generation, text.engine
    alone = Engine(plain, engine.tokenizer, tuple(engine.eos_ids), engine.card)
    again = TextGeneration(alone, run.ids, run.sampling, run.budget, text.stop_ids, text.stop)
    for _ in again:
        pass
    again = again.generation
    if run.tokens == again.tokens:
        return {"identical": True, "first_difference": None, "gap": None}
    shorter = min(len(run.tokens), len(again.tokens))
    first = next((i for i in range(shorter) if run.tokens[i] != again.tokens[i]), shorter)
    if first == shorter:
        return {"identical": False, "first_difference": first, "gap": None}
    ids = run.ids + again.tokens[:first]
    gap = choice_gap(plain, ids, again.tokens[first], run.tokens[first], run.sampling)
    return {"identical": False, "first_difference": first, "gap": gap}


def choice_gap(plain: Decoder, ids: list[int], chosen: int, other: int, sampling: SamplingConfig) -> float | None:
    """How much higher `chosen` stands than `other` after `ids`, in the values that are chosen by; None: infinitely."""
    logits = full_logits(plain.model, ids)[-1:]
    tokens, position = torch.arange(logits.shape[1]), torch.tensor([len(ids)])
    if sampling.kind != "greedy":
        plain.sampling.set(sampling)
        values, columns = perturb(
            logits, position.to(logits.device), tokens.to(logits.device), plain.sampling,
            sampling.kind, logits.shape[1],
        )  # fmt: skip
        logits = torch.empty_like(values).scatter_(1, columns, values)
    gap = float(logits[0, chosen] - logits[0, other])
    return gap if math.isfinite(gap) else None


# ---------------------------------------------------------------- the command line


def parse_args(argv: list[str] | None) -> Namespace:
    parser = Parser(prog="generate.py", description="Generate text with a converted checkpoint.")
    add = parser.add_argument
    add("--checkpoint_path", type=Path, default=DEMO, help="target file from convert_hf_checkpoint.py")
    add("--draft_checkpoint_path", default="none", help="head file, or none")
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--prompt", help="text; - reads standard input")
    given.add_argument("--prompt_file", type=Path, help="file with the prompt, UTF-8")
    given.add_argument("--prompt_ids", help='token ids, such as "1 2 3"; needs no tokenizer')
    given.add_argument("--interactive", action="store_true", help="converse, one line a turn, until end of file")
    chat = parser.add_mutually_exclusive_group()
    chat.add_argument("--chat", action="store_true", default=None, help="use the chat template")
    chat.add_argument("--no_chat", dest="chat", action="store_false", default=None, help="give the text as it is")
    add("--system", help="system message of the chat")
    add("--max_new_tokens", type=int, default=256, help="tokens to generate at most")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top_k", type=int, default=0, help="choose among this many best tokens; 0: all")
    add("--top_p", type=float, default=1.0, help="choose among the best tokens of this total probability")
    add("--seed", type=int, default=0, help="the text is a function of prompt and seed")
    add("--stop", action="append", default=[], help="text that ends the answer; may be repeated")
    add("--ignore_eos", action="store_true", help="go on past the model's stop tokens")
    add("--tree", default="auto", help="none, chain:K, static, dynamic:nodes=N,levels=L,top_k=K, lookup:K, FILE.json")
    add("--retune", action="store_true", help="let --tree auto measure again, instead of using what it remembers")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="precision of computing")
    add("--max_seq_length", type=int, help="context to provide for (default: what the prompt needs)")
    compiling = parser.add_mutually_exclusive_group()
    compiling.add_argument("--compile", action="store_true", default=True, help="compile")
    compiling.add_argument("--no_compile", dest="compile", action="store_false", help="run eagerly")
    add("--num_samples", type=int, default=1, help="texts to generate, with seeds seed, seed+1, ...")
    add("--check", action="store_true", help="decode plainly too and compare the ids; exit code 1 if they differ")
    add("--highlight", action="store_true", help="colour the tokens that the draft guessed")
    add("--json", help="write measurements and ids to this file")
    add("--profile", help="write a Chrome trace of the last sample to this file")
    return parser.parse_args(argv)


def read_prompt(args: Namespace) -> str | list[int] | None:
    """The prompt as text or as ids; None when conversing."""
    if args.interactive:
        return None
    if args.prompt_ids is not None:
        words = args.prompt_ids.replace(",", " ").split()
        if not words:
            raise ValueError('prompt_ids is empty: give at least one token id, such as "1 2 3"')
        if not all(word.isascii() and word.isdigit() and len(word) < 19 for word in words):
            raise ValueError(f'prompt_ids {args.prompt_ids[:60]!r} must be whole numbers, such as "1 2 3"')
        return [int(word) for word in words]
    text = read_text(args)
    if text is None:
        raise ValueError("no prompt: give --prompt TEXT, --prompt_file FILE, --prompt_ids or --interactive")
    check_text("the prompt", text)
    if not text.strip():
        raise ValueError("the prompt is empty: give at least one character that is not a space")
    return text


def read_text(args: Namespace) -> str | None:
    """What --prompt or --prompt_file gives; None if neither does."""
    if args.prompt_file is None:
        return sys.stdin.read() if args.prompt == "-" else args.prompt
    try:
        return args.prompt_file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"prompt file {args.prompt_file} is not UTF-8 text: save it as UTF-8") from None
    except OSError as error:
        raise ValueError(
            f"prompt file {args.prompt_file} cannot be read ({error.strerror}): check its name, or give --prompt"
        ) from None


def messages_of(args: Namespace, text: str) -> list[dict]:
    system = [{"role": "system", "content": args.system}] if args.system is not None else []
    return [*system, {"role": "user", "content": text}]


def wants_chat(args: Namespace, tokenizer: Tokenizer | None) -> bool:
    has = tokenizer is not None and tokenizer.has_chat_template
    if args.chat and not has:
        raise ValueError("--chat needs a chat template and the checkpoint has none: use --no_chat")
    if args.system is not None and (args.chat is False or not has):
        raise ValueError("--system needs the chat template: leave out --no_chat, or put it into the prompt")
    return has if args.chat is None else args.chat


def check_args(args: Namespace) -> None:
    """Refuse bad values, and flags that would have no effect, before anything is loaded."""
    if args.num_samples < 1:
        raise ValueError(f"num_samples {args.num_samples} is not allowed: give at least 1")
    check_ends(args.max_new_tokens, tuple(args.stop))
    for what, text in (("--system", args.system or ""), *(("--stop", stop) for stop in args.stop)):
        check_text(what, text)
    for seed in (args.seed, args.seed + args.num_samples - 1):
        SamplingConfig(args.temperature, args.top_k, args.top_p, seed)
    alone = {"--check": args.check, "--num_samples": args.num_samples > 1, "--profile": args.profile is not None}
    idle = [flag for flag, given in alone.items() if given]
    if args.interactive and idle:
        raise ValueError(f"{', '.join(idle)} cannot be used with --interactive: give --prompt instead")
    if args.prompt_ids is not None and (args.chat or args.system is not None):
        raise ValueError("--chat and --system cannot be used with --prompt_ids: give --prompt instead")


def check_outputs(args: Namespace) -> None:
    inputs = [args.checkpoint_path, Path(args.draft_checkpoint_path), Path(args.tree)]
    inputs += [args.prompt_file] if args.prompt_file else []
    inputs += [args.checkpoint_path.with_name(name) for name in TOKENIZER_FILES]
    for flag in ("json", "profile"):
        if getattr(args, flag) is not None:
            check_output(f"--{flag}", Path(getattr(args, flag)), inputs)
    if args.json is not None and args.profile is not None and Path(args.json) == Path(args.profile):
        raise ValueError(f"--json and --profile are both {args.json}: give each a file of its own")


def default_context(args: Namespace, config: ModelConfig, ids: list[int] | None) -> int:
    """The context for this run: by default enough for the prompt and its answer, as a smaller cache loads faster.
    Refuses a prompt that does not fit, before anything is loaded for it."""
    if ids is None:
        return fit_context(args.max_seq_length, config)
    limit = config.max_seq_length
    context = fit_context(args.max_seq_length, config, max(2048, len(ids) + args.max_new_tokens))
    if len(ids) >= context:
        more = f", or raise --max_seq_length (this model allows {limit})" if context < limit else ""
        raise ValueError(
            f"the prompt has {len(ids)} tokens, but the context holds {context} with the answer: shorten the prompt "
            f"to {context - 1} or less{more}"
        )
    wrong = [i for i in ids if i >= config.vocab_size]
    if wrong:
        raise ValueError(f"prompt id {wrong[0]} is not in the model's vocabulary: give ids 0 to {config.vocab_size - 1}")
    return context


def show(text: TextGeneration, highlight: bool) -> None:
    """Stream a text to standard output."""
    for piece, drafted in text.marked():
        sys.stdout.write(f"\033[32m{piece}\033[0m" if highlight and drafted else piece)
        sys.stdout.flush()
    sys.stdout.write("\n" if text.stream else f"{' '.join(map(str, text.tokens))}\n")
    sys.stdout.flush()


def warn_if_useless(record: dict) -> None:
    if record["rounds"] >= 32 and record["acceptance_length"] < 1.2:
        note(
            f"warning: acceptance length {record['acceptance_length']:.2f} over {record['rounds']} rounds: the head "
            "hardly ever guesses right. Check that it was trained for this very target, that the chat template is "
            "on, and the head line above (features, norms, RoPE base)"
        )


def prepare(args: Namespace, prompt: str | list[int] | None) -> tuple[Engine, list[int] | None, bool]:
    """Load everything. Returns the engine, the prompt's ids (None when conversing) and whether to use the chat."""
    sampling = SamplingConfig(args.temperature, args.top_k, args.top_p, args.seed)
    head = None if args.draft_checkpoint_path == "none" else args.draft_checkpoint_path
    if not args.checkpoint_path.exists() and args.checkpoint_path == DEMO:
        raise ValueError(f"the demo model {DEMO} is not there yet: run `make demo`, or give --checkpoint_path")
    config = ModelConfig.from_dict(read_kind(args.checkpoint_path, "target").config)
    tokenizer = find_tokenizer(args.checkpoint_path.parent, config)
    if tokenizer is None and (args.stop or not isinstance(prompt, list)):
        raise ValueError(
            f"no tokenizer beside {args.checkpoint_path}, which text needs: copy tokenizer.json or tokenizer.model "
            "there, or give --prompt_ids without --stop"
        )
    chat = not isinstance(prompt, list) and wants_chat(args, tokenizer)
    ids = None if prompt is None else encode(tokenizer, messages_of(args, prompt) if chat else prompt)
    engine = load(
        args.checkpoint_path, head, tree=args.tree, device=args.device, dtype=args.dtype,
        max_seq_length=default_context(args, config, ids), compile=args.compile,
        tune="again" if args.retune else "once", sampling=sampling,
    )  # fmt: skip
    card = engine.card
    note(
        f"{args.checkpoint_path.name}: {card['quantization'] or card['dtype']} on {card['device']}, tree "
        f"{card['tree']}, loaded in {card['load_s']:.1f} s"
    )
    if card["head"]:
        note(card["head"])
    remark(args, sampling, engine.decoder.tree)
    if args.compile:
        note("compiling (kept in torch's cache for the next run) ...")
    card["compile_s"] = engine.warm_up(sampling) if args.compile else 0.0
    if args.compile:
        note(f"compiled in {card['compile_s']:.1f} s")
    return engine, ids, chat


def remark(args: Namespace, sampling: SamplingConfig, tree: Tree) -> None:
    """Say which of the given flags have no effect in this run."""
    if sampling.kind == "greedy" and (args.top_k > 0 or args.top_p < 1 or args.seed or args.num_samples > 1):
        note(
            f"note: temperature {args.temperature:g} is greedy: --top_k, --top_p and --seed have no effect and all "
            "samples are equal; give --temperature 1 to sample"
        )
    if args.highlight and tree.nodes == 1:
        note("note: --highlight colours drafted tokens, and without a draft there are none")


def start(engine: Engine, args: Namespace, prompt: list[dict] | list[int], seed: int) -> TextGeneration:
    return engine.generate(
        prompt, max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_k=args.top_k,
        top_p=args.top_p, seed=seed, stop=tuple(args.stop), ignore_eos=args.ignore_eos,
    )  # fmt: skip


def converse(engine: Engine, args: Namespace, chat: bool, records: list[dict]) -> int:
    """Turns from standard input until its end. The conversation is kept, and its cached prefix is not run again.

    A line that cannot be answered is refused and forgotten. Appends to `records`; returns the exit code."""
    history = [{"role": "system", "content": args.system}] if args.system is not None else []
    ids: list[int] = []
    code = 0
    note("type a line and press enter; end of file or Ctrl-C leaves")
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return code
        if not line.strip():
            continue
        turn = {"role": "user", "content": line.rstrip("\n")}
        try:
            check_text("the line", line)
            prompt = [*history, turn] if chat else ids + engine.tokenizer.encode(line, add_bos=not ids)
            text = start(engine, args, prompt, args.seed)
        except ValueError as error:
            note(f"error: {error}")
            code = 2
            continue
        show(text, args.highlight)
        history += [turn, {"role": "assistant", "content": text.text}]
        ids = text.generation.ids + text.tokens
        records.append(sample_record(text))
        note(describe(records[-1], engine.decoder.tree.nodes > 1))


def sample_all(engine: Engine, args: Namespace, ids: list[int]) -> tuple[list[dict], list[dict]]:
    """Generate --num_samples texts. Returns their records and, with --check, the comparisons."""
    drafting = engine.decoder.tree.nodes > 1
    plain = None
    if args.check:
        plain = Decoder(engine.decoder.model, engine.decoder.max_seq_length, compile=args.compile)
    records, checks = [], []
    for index in range(args.num_samples):
        engine.decoder.cached = []  # every sample is timed with its own prefill
        text = start(engine, args, ids, args.seed + index)
        with profiled(args.profile if index == args.num_samples - 1 else None):
            show(text, args.highlight)
        records.append(sample_record(text))
        note(describe(records[-1], drafting))
        if engine.decoder.tree.needs_head:
            warn_if_useless(records[-1])
        if plain is not None:
            checks.append(check_sample(plain, text))
            note(f"check: {'identical to plain decoding' if checks[-1]['identical'] else checks[-1]}")
    return records, checks


@contextmanager
def profiled(path: str | None) -> Iterator[None]:
    if path is None:
        yield
        return
    with torch.profiler.profile() as profile:
        yield
    whole = Path(path)
    partial = whole.with_name(f".{os.getpid()}.{whole.name}")  # the same suffix: .gz would compress
    try:
        profile.export_chrome_trace(str(partial))
        os.replace(partial, whole)
    finally:
        partial.unlink(missing_ok=True)
    note(f"trace written to {path}")


def report(engine: Engine, argv: list[str], recompiles: int, records: list[dict], checks: list[dict]) -> dict:
    """What --json writes."""
    top = {"argv": argv, **engine.card, "recompiles": recompiles, "commit": project_commit()}
    top["versions"] = {"torch": torch.__version__, "python": platform.python_version()}
    if checks:
        top["check"] = next((check for check in checks if not check["identical"]), checks[0])
    return {**top, "samples": records}


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    check_args(args)
    check_outputs(args)
    engine, ids, chat = prepare(args, read_prompt(args))
    compiled = compilations()
    records: list[dict] = []
    checks: list[dict] = []
    try:
        if ids is None:
            code = converse(engine, args, chat, records)
        else:
            records, checks = sample_all(engine, args, ids)
            code = 1 if any(not check["identical"] for check in checks) else 0
    except KeyboardInterrupt:
        if ids is not None:
            raise
        code = 130  # the usual way to leave a conversation: its finished turns are reported
        print(file=sys.stderr)
    except BrokenPipeError:
        if args.json is None:
            raise
        raise ValueError("standard output was closed before the end: --json was not written") from None
    if args.json is not None:
        argv = argv if argv is not None else sys.argv[1:]
        write_json(args.json, report(engine, argv, compilations() - compiled, records, checks))
    return code


if __name__ == "__main__":
    run(main)
