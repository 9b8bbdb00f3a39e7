"""What of ours the benchmark compares: every target, plain, with every head and tree, and lookup.

Leaves out: the others (peers.py), the measuring (benchmark.py).
"""

import importlib.util
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from model import Transformer
from talon.cli import DEMO, note
from talon.decoder import Decoder, Generation
from talon.loading import (
    device_name,
    fit_tree,
    load_head,
    load_target,
    open_files,
    pick_device,
    pick_dtype,
    precision_name,
)
from talon.prompts import tuning_prompts
from talon.records import bytes_per_round, module_bytes, peak_memory
from talon.sampling import SamplingConfig
from talon.tokenizer import Tokenizer
from talon.trees import parse_tree
from talon.tuning.choice import settle

TREES = ("chain:3", "static", "dynamic:nodes=24,levels=5,top_k=8")


@dataclass
class Run:
    """One method on one prompt. `decode_s` and `decoded` cover what came after the first forward's
    token(s).
    """

    tokens: list[int]
    prefill_s: float
    decode_s: float
    decoded: int
    rounds: int
    accepted_by_depth: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    verify_s: float = 0.0
    moved_bytes: float = 0.0  # read by all rounds together, as far as known
    peak_memory_bytes: int = 0


class TalonMethod:
    """One target and draft source of ours, with the decoder of every temperature: `auto` chooses
    one tree for temperature 0 and one for those above.
    """

    def __init__(
        self, name: str, group: str, decoders: dict[float, Decoder], is_plain: bool = False
    ) -> None:
        self.name, self.group, self.decoders, self.is_plain = name, group, decoders, is_plain
        self.trees = {temperature: decoder.tree.name for temperature, decoder in decoders.items()}
        self.memory_bytes = max(map(held_bytes, decoders.values()))

    def start(
        self, ids: list[int], sampling: SamplingConfig, budget: int, stop_ids: frozenset[int]
    ) -> Generation:
        decoder = self.decoders[sampling.temperature]
        decoder.forget()  # every prompt is timed with its own prefill
        if decoder.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(decoder.device)
        return Generation(decoder, ids, sampling, budget, stop_ids)

    def finish(self, generation: Generation) -> Run:
        decoder, stats = generation.decoder, generation.stats
        middle = len(generation.ids) + len(generation.tokens) / 2
        return Run(
            generation.tokens,
            stats.prefill_s,
            stats.decode_s,
            stats.emitted,
            stats.rounds,
            stats.accepted_by_depth,
            stats.draft_s,
            stats.verify_s,
            bytes_per_round(decoder, middle) * stats.rounds,
            peak_memory(decoder.device),
        )


def held_bytes(decoder: Decoder) -> int:
    """Of the weights and caches that a decoder holds."""
    held = [decoder.model, decoder.cache]
    if decoder.drafter.stage is not None:
        head, cache, *_ = decoder.drafter.stage
        held += [head.layer, cache]
    return sum(map(module_bytes, held))


@dataclass(frozen=True)
class Loaded:
    """A target in memory with the heads that belong to it."""

    name: str
    model: Transformer
    heads: dict[str, object]
    path: Path
    precision: str
    tokenizer: Tokenizer | None


def load_all(args: Namespace) -> list[Loaded]:
    """Every target with every head, each loaded once."""
    where, loaded = pick_device(args.device), []
    precision = pick_dtype(args.dtype, where)
    for path in args.checkpoint_path or [DEMO]:
        files = open_files(path)
        model = load_target(files, where, precision)
        heads = {}
        for head_path in args.draft_checkpoint_path or []:
            head = load_head(files.with_head(head_path), model, where, precision)
            heads[head_name(head_path, heads)] = head
        name = numbers = precision_name(files.target, precision)
        if any(name == other.name for other in loaded):
            name = f"{name} ({path})"
        loaded.append(Loaded(name, model, heads, path, numbers, files.tokenizer))
    return loaded


def head_name(path: Path, taken: dict) -> str:
    """A short name for a head: its file's, or its folder's where the file's says nothing or is
    taken.
    """
    name = path.parent.name if path.stem == "talon" or path.stem in taken else path.stem
    return name if name not in taken else str(path)


def our_methods(args: Namespace, loaded: list[Loaded], context: int) -> list[TalonMethod]:
    """Plain decoding of every target, every head with every tree, and lookup."""
    methods = []
    for target in loaded:
        sources = {"plain": (None, "none")}
        for index, name in enumerate(target.heads):
            sources |= {f"{name} {text}": (index, text) for text in args.tree or TREES}
        if args.lookup:
            sources[f"lookup:{args.lookup}"] = (None, f"lookup:{args.lookup}")
        for name, (index, text) in sources.items():
            decoders = make_decoders(args, target, index, text, context)
            full = f"{target.name} {name}"
            methods.append(TalonMethod(full, target.name, decoders, name == "plain"))
    return methods


def make_decoders(
    args: Namespace, target: Loaded, index: int | None, text: str, context: int
) -> dict[float, Decoder]:
    """The decoder of every temperature with the tree that `text` names and a head, by its place on
    the command line. Only `auto` makes more than one.
    """
    if text == "auto":
        return {t: auto_decoder(args, target, index, t, context) for t in args.temperature}
    head = None if index is None else list(target.heads.values())[index]
    tree = fit_tree(parse_tree(text), head and head.config)
    decoder = Decoder(target.model, context, head if tree.needs_head else None, tree, args.compile)
    return dict.fromkeys(args.temperature, decoder)


def auto_decoder(
    args: Namespace, target: Loaded, index: int, temperature: float, context: int
) -> Decoder:
    """With the tree that `--tree auto` chooses at this temperature."""
    model, head = target.model, list(target.heads.values())[index]
    choice = settle(
        (target.path, args.draft_checkpoint_path[index]),
        (device_name(pick_device(args.device)), target.precision),
        model,
        head,
        lambda: tuning_prompts(target.tokenizer, model.config),
        SamplingConfig(temperature),
        args.compile,
        "again" if args.retune else "once",
        note,
    )
    tree = choice.tree if choice else fit_tree(None, head.config)
    return Decoder(model, context, head if tree.needs_head else None, tree, args.compile)


NAMES = ("transformers", "transformers-lookup", "llama.cpp")

PACKAGES = {
    "transformers": "transformers",
    "transformers-lookup": "transformers",
    "llama.cpp": "llama_cpp",
}

INSTALL = "pip install 'transformers' 'llama-cpp-python'   (the extra: pip install -e '.[bench]')"


def missing(name: str) -> str | None:
    """Why a peer cannot run here at all; None if its package is installed."""
    if name not in NAMES:
        raise ValueError(
            f"peer {name!r} is not known: give one of {', '.join(NAMES)}, auto or none"
        )
    if importlib.util.find_spec(PACKAGES[name]) is None:
        return f"{name} is not installed: {INSTALL}"
    return None


class TransformersPeer:
    """transformers' own generate, eager and in fp32, optionally with its prompt lookup."""

    def __init__(self, name: str, model: torch.nn.Module) -> None:
        self.name, self.model = name, model
        self.lookup = name.endswith("lookup")
        self.memory_bytes = sum(p.numel() * p.itemsize for p in model.parameters())

    def run(
        self, ids: list[int], sampling: SamplingConfig, budget: int, stop_ids: frozenset[int]
    ) -> Run:
        marks: list[tuple[float, int]] = []

        def watch(input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            """A stopping criterion that never stops: called once a forward."""
            marks.append((time.perf_counter(), input_ids.shape[1]))
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        options = {"do_sample": not sampling.greedy, "top_k": 0, "top_p": 1.0}
        if options["do_sample"]:
            options["temperature"] = sampling.temperature
            torch.manual_seed(sampling.seed)
        else:
            options |= {"top_k": None, "top_p": None, "temperature": None}
        if self.lookup:
            options["prompt_lookup_num_tokens"] = 10
        prompt = torch.tensor([ids])
        started = time.perf_counter()
        with torch.inference_mode():
            found = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=budget,
                stopping_criteria=[watch],
                eos_token_id=sorted(stop_ids) or None,
                pad_token_id=0,
                **options,
            )
        tokens = found[0, len(ids) :].tolist()[:budget]
        first, length = marks[0]
        decoded = max(len(ids) + len(tokens) - length, 0)
        return Run(tokens, first - started, marks[-1][0] - first, decoded, len(marks) - 1)


def load_transformers(directory: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )


class LlamaCppPeer:
    """llama.cpp through llama-cpp-python, on a GGUF file of the same model."""

    def __init__(self, name: str, path: Path, context: int, threads: int) -> None:
        from llama_cpp import Llama

        self.name = name
        self.llama = Llama(
            str(path),
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=-1,
            verbose=False,
        )
        self.memory_bytes = path.stat().st_size

    def run(
        self, ids: list[int], sampling: SamplingConfig, budget: int, stop_ids: frozenset[int]
    ) -> Run:
        greedy = sampling.greedy
        self.llama.reset()
        self.llama.set_seed(sampling.seed % 2**31)
        tokens: list[int] = []
        started = first = time.perf_counter()
        stream = self.llama.generate(
            ids,
            temp=0.0 if greedy else sampling.temperature,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repeat_penalty=1.0,
        )
        for token in stream:
            if not tokens:
                first = time.perf_counter()
            tokens.append(int(token))
            if len(tokens) == budget or token in stop_ids:
                break
        ended = time.perf_counter()
        stream.close()
        return Run(tokens, first - started, ended - first, len(tokens) - 1, len(tokens) - 1)


def open_peer(
    name: str, checkpoint: Path, gguf: Path | None, context: int, threads: int, shared: dict
) -> object:
    """The peer on the model files beside a checkpoint. ValueError says what is not there.

    shared: a model that an earlier call has loaded, for the peers that differ in nothing else.
    """
    directory = checkpoint.parent
    if name == "llama.cpp":
        found = [gguf] if gguf else sorted(directory.glob("*.gguf"))
        if not found or not found[0].is_file():
            raise ValueError(
                f"llama.cpp needs a GGUF file: give --gguf FILE or put one beside {checkpoint}"
            )
        return LlamaCppPeer(name, found[0], context, threads)
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"{name} needs the model's own config.json and weights beside {checkpoint}"
        )
    if "transformers" not in shared:
        shared["transformers"] = load_transformers(directory)
    return TransformersPeer(name, shared["transformers"])


def open_peers(
    wanted: list[str], open_one: Callable[[str], object], say: Callable[[str], None], strict: bool
) -> list[object]:
    """Every peer that can run; those that cannot are named, or refused where they were asked for by
    name.
    """
    peers = []
    for name in wanted:
        reason = missing(name)
        if reason is None:
            try:
                peers.append(open_one(name))
                continue
            except (ValueError, OSError) as error:
                reason = " ".join(str(error).split())
        if strict:
            raise ValueError(reason)
        say(f"without {name}: {reason}")
    return peers
