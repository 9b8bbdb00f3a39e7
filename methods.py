"""What of ours the benchmark compares: every target, plain, with every head and tree, and lookup.

Leaves out: the others (peers.py), the measuring (benchmark.py).
"""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch

from cli import DEMO, note
from engine import Decoder, Generation
from loading import (
    device_name,
    find_tokenizer,
    fit_tree,
    load_head,
    load_target,
    pick_device,
    pick_dtype,
    precision_name,
    read_kind,
)
from model import Transformer
from peers import Run
from questions import tuning_prompts
from records import bytes_per_round, module_bytes, peak_memory
from sampling import SamplingConfig
from tokenizer import Tokenizer
from tuning import settle

TREES = ("chain:3", "static", "dynamic:nodes=24,levels=5,top_k=8")


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
        decoder.cached = []  # every prompt is timed with its own prefill
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
            stats.plain_rounds,
            bytes_per_round(decoder, middle) * stats.rounds,
            peak_memory(decoder.device),
        )


def held_bytes(decoder: Decoder) -> int:
    """Of the weights and caches that a decoder holds."""
    held = [decoder.model, decoder.cache]
    if decoder.tree.needs_head:
        held += [decoder.drafter.head.layer, decoder.drafter.cache]
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
        file = read_kind(path, "target")
        model = load_target(file, where, precision)
        heads = {}
        for head_path in args.draft_checkpoint_path or []:
            head_file = read_kind(head_path, "draft")
            heads[head_name(head_path, heads)] = load_head(head_file, model, where, precision)
        name = numbers = precision_name(file, precision)
        if any(name == other.name for other in loaded):
            name = f"{name} ({file.path})"
        tokenizer = find_tokenizer(file.path.parent, model.config)
        loaded.append(Loaded(name, model, heads, file.path, numbers, tokenizer))
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
    tree = fit_tree(text, head and head.config)
    decoder = Decoder(target.model, context, head if tree.needs_head else None, tree, args.compile)
    return dict.fromkeys(args.temperature, decoder)


def auto_decoder(
    args: Namespace, target: Loaded, index: int, temperature: float, context: int
) -> Decoder:
    """With the tree that `--tree auto` chooses at this temperature, and its fallback."""
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
    tree = choice.tree if choice else fit_tree("auto", head.config)
    decoder = Decoder(model, context, head if tree.needs_head else None, tree, args.compile)
    if choice is not None:
        decoder.fall_back_below(choice.break_even)
    return decoder
