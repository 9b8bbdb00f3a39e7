"""What the parts of a round cost on this machine, each timed by itself.

A target forward at several rows, a draft level at several widths, what every drafted round has
besides, and a lookup. Whatever is timed takes turns; on a GPU it is the replay of a CUDA graph.
Leaves out: what the parts are worth (acceptance.py), and the choice (tuning.py).
"""

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from eagle_draft import DraftHead, Entries, Nodes
from model import At
from talon.decoder import Decoder, Generation
from talon.drafters import EagleDrafter, LookupDrafter
from talon.graphs import as_it_is, compile_region
from talon.sampling import Greedy
from talon.trees import NO_TREE, Tree, chain, dynamic_tree, with_lookup


@dataclass(frozen=True)
class Costs:
    """Seconds on this machine. rows: one target forward by row count; level: one draft level by
    beam width.
    """

    rows: dict[int, float]
    level: dict[int, float] = field(default_factory=dict)
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


def medians(
    calls: dict[Hashable, Callable[[], object]], device: torch.device, repeats: int = 11
) -> dict[Hashable, float]:
    """Median seconds of every call after it has compiled; on a GPU of the replay of its CUDA graph.

    They take turns, so that a slow moment of the machine falls on all of them."""
    with torch.inference_mode():
        timers = {key: timer(call, device) for key, call in calls.items()}
        turns = [{key: measure() for key, measure in timers.items()} for _ in range(repeats)]
    return {key: statistics.median(turn[key] for turn in turns) for key in calls}


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


def target_pass(decoder: Decoder, rows: int, committed: int) -> Callable[[], object]:
    """A target forward over `rows` nodes behind `committed` tokens, down to the accepted path."""
    device, model = decoder.device, decoder.model
    tokens = torch.arange(rows, device=device) % model.config.vocab_size
    parents = (torch.arange(rows, device=device) - 1).clamp(min=0)
    ancestors = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
    nodes, pick = Nodes(tokens, parents, ancestors), Greedy()
    at = At(decoder.length.clone().fill_(committed), decoder.at(committed + rows).slots)

    def run() -> object:
        return decoder.verify(decoder.target, nodes, at, pick, 1)

    return run


@torch.inference_mode()
def row_costs(
    decoders: Sequence[Decoder], rows: Sequence[int], committed: int
) -> list[dict[int, float]]:
    """Seconds of every decoder's target forward by rows; all of them take turns."""
    calls = {
        (index, n): target_pass(decoder, n, committed)
        for index, decoder in enumerate(decoders)
        for n in rows
    }
    taken = medians(calls, decoders[0].device)
    return [{n: taken[index, n] for n in rows} for index in range(len(decoders))]


@torch.inference_mode()
def head_costs(
    decoder: Decoder, head: DraftHead, beams: Iterable[int], committed: int, compile: bool
) -> Costs:
    """Costs without `rows`: levels by beam width, the two parts that every round has, and those of
    a lookup.
    """
    device, beams = decoder.device, sorted(set(beams))
    compiled = compile_region if compile else as_it_is
    root, pick = decoder.root, Greedy()
    at = At(decoder.length.clone().fill_(committed), decoder.at(committed + 64).slots)
    calls = {}
    for beam, depth in itertools.product(beams, (2, 4)):
        tree = chain(depth) if beam == 1 else dynamic_tree(min(16, beam + 1), depth, beam)
        drafter = EagleDrafter(head, tree, decoder.cache.rows, compiled)
        calls[beam, depth] = lambda d=drafter: d.propose(root, at, pick)
    count = len(drafter.feature_layers) or 1
    features = [
        torch.zeros(6, head.config.target_dim, dtype=drafter.hidden.dtype, device=device)
    ] * count
    path, last = torch.arange(6, device=device), torch.tensor([2], device=device)
    entries = Entries(features, path, path, at.length, last)
    calls["learn"] = lambda: drafter.learn(entries, at)
    source = LookupDrafter(with_lookup(NO_TREE, 5), decoder.cache.rows, device, compiled)

    def lookup() -> None:
        source.propose(root, at, pick)
        source.learn(entries, at)

    calls["lookup"] = lookup
    taken = medians(calls, device)
    levels = {beam: max((taken[beam, 4] - taken[beam, 2]) / 2, 1e-9) for beam in beams}
    first = max(taken[beams[-1], 2] - levels[beams[-1]], 0.0)
    return Costs({}, levels, first, taken["learn"], taken["lookup"])


def take_turns(texts: Sequence[Generation]) -> Iterator[int]:
    """Run all of them, yielding after every token whose it was. On a CPU, whose speed varies from
    second to second, it is always the turn of the text with the fewest tokens, so that equal texts
    end together; on a GPU, where a round is queued while the one before runs, one text follows the
    other."""
    running = {index: iter(text) for index, text in enumerate(texts)}
    on_gpu = texts[0].decoder.device.type == "cuda"
    while running:
        index = min(running, key=lambda i: 0 if on_gpu else len(texts[i].tokens))
        if next(running[index], None) is None:
            del running[index]
        else:
            yield index
