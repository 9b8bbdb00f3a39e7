"""What the parts of a round cost on this machine, each timed by itself.

A target forward over several rows, a draft level at several widths, what else every drafted round
has, and a lookup. Whatever is timed takes turns; on a GPU it is the replay of a CUDA graph.
Leaves out: what the parts are worth (acceptance.py), and the choice (choice.py)."""

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from eagle_draft import DraftHead, Entries, Nodes
from model import At
from talon.decoder import Decoder
from talon.drafters import make_source
from talon.drafters.lookup import LookupDrafter
from talon.graphs import as_it_is, compile_region
from talon.sampling import GREEDY
from talon.trees import NO_TREE, Tree, chain, dynamic_tree, with_lookup


@dataclass(frozen=True)
class Costs:
    """Seconds on this machine."""

    rows: dict[int, float]  # a target forward by its rows
    level: dict[int, float] = field(default_factory=dict)  # a draft level by its width
    first: float = 0.0  # the root's children and the selection
    learn: float = 0.0  # the head's pass over what was accepted
    lookup: float = 0.0  # looking up and remembering

    def draft(self, tree: Tree) -> float:
        found = self.lookup if tree.lookup else 0.0
        if not tree.needs_head:
            return found
        levels = (tree.levels - 1) * interpolate(self.level, tree.beam)
        return found + self.first + self.learn + levels

    def round(self, tree: Tree) -> float:
        return interpolate(self.rows, tree.nodes) + self.draft(tree)


def interpolate(points: dict[int, float], at: int) -> float:
    """Piecewise linear between the measured counts, constant outside them."""
    known = sorted(points)
    return float(np.interp(at, known, [points[count] for count in known]))


# ---------------------------------------------------------------- timing


def times(
    calls: dict[Hashable, Callable[[], object]], device: torch.device, repeats: int = 11
) -> dict[Hashable, list[float]]:
    """Seconds of every call after it has compiled; on a GPU of the replay of its CUDA graph.

    They take turns, so that a slow moment of the machine falls on all of them."""
    with torch.inference_mode():
        timers = {key: timer(call, device) for key, call in calls.items()}
        turns = [{key: measure() for key, measure in timers.items()} for _ in range(repeats)]
    return {key: [turn[key] for turn in turns] for key in calls}


def medians(
    calls: dict[Hashable, Callable[[], object]], device: torch.device
) -> dict[Hashable, float]:
    return {key: statistics.median(taken) for key, taken in times(calls, device).items()}


def timer(call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """What runs `call`, compiled by now, and returns its seconds."""
    call()
    call()
    if device.type != "cuda":
        return lambda: timed(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return lambda: timed_replay(graph)


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def timed_replay(graph: torch.cuda.CUDAGraph) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    graph.replay()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


class Text(Protocol):
    """A text that is being decoded; every step adds to `tokens`."""

    tokens: list[int]

    def __iter__(self) -> Iterator: ...


def take_turns(texts: Sequence[Text], on_gpu: bool) -> Iterator[int]:
    """Decode all of them, yielding after every step whose it was.

    On a CPU, whose speed varies from second to second, it is always the turn of the text with the
    fewest tokens, so that equal texts end together. On a GPU, where a round is queued while the one
    before runs, one text follows the other."""
    running = {index: iter(text) for index, text in enumerate(texts)}
    while running:
        index = min(running, key=lambda i: 0 if on_gpu else len(texts[i].tokens))
        if next(running[index], None) is None:
            del running[index]
        else:
            yield index


# ---------------------------------------------------------------- the parts of a round


@torch.inference_mode()
def target_pass(decoder: Decoder, rows: int, committed: int) -> Callable[[], object]:
    """A target forward over `rows` nodes behind `committed` tokens, down to the accepted path."""
    node = torch.arange(rows, device=decoder.device)
    chain_below = node[:, None] >= node
    nodes = Nodes(node % decoder.model.config.vocab_size, (node - 1).clamp(min=0), chain_below)
    at = after(decoder, committed, rows)
    pick = decoder.picks.set(GREEDY)
    return lambda: decoder.verify(decoder.target, nodes, at, pick, 1)


def after(decoder: Decoder, committed: int, more: int) -> At:
    """A place behind `committed` tokens, whatever the decoder's own length is."""
    length = decoder.length.clone().fill_(committed)
    return At(length, decoder.at(committed + more).slots)


@torch.inference_mode()
def head_costs(
    decoder: Decoder, head: DraftHead, beams: Iterable[int], committed: int, compile: bool
) -> Costs:
    """Costs without `rows`: levels by width, the two parts that every round has, and a lookup."""
    device, root, pick = decoder.device, decoder.root, decoder.picks.set(GREEDY)
    compiled = compile_region if compile else as_it_is
    at, calls = after(decoder, committed, 64), {}
    for beam, depth in itertools.product(beams, (2, 4)):
        tree = chain(depth) if beam == 1 else dynamic_tree(min(16, beam + 1), depth, beam)
        drafter = make_source(tree, head, decoder.cache.rows, device, compiled)
        calls[beam, depth] = lambda d=drafter: d.propose(root, at, pick)
    # What a round of six rows, three of them true, would have a head learn.
    features = [drafter.hidden.new_zeros(6, head.config.target_dim)]
    row = torch.arange(6, device=device)
    entries = Entries(features * (len(drafter.feature_layers) or 1), row, row, at.length, row[2:3])
    calls["learn"] = lambda: drafter.learn(entries, at)
    text = LookupDrafter(with_lookup(NO_TREE, 5), decoder.cache.rows, device, compiled)
    calls["lookup"] = lambda: (text.propose(root, at, pick), text.learn(entries, at))
    taken = medians(calls, device)
    levels = {beam: max((taken[beam, 4] - taken[beam, 2]) / 2, 1e-9) for beam in beams}
    widest = max(beams)
    first = max(taken[widest, 2] - levels[widest], 0.0)
    return Costs({}, levels, first, taken["learn"], taken["lookup"])
