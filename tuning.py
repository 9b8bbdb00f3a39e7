"""Which tree pays on this machine with this head: what `--tree auto` measures, decides and
remembers.

Three steps. Costs: a target forward at 1 to 64 rows, a draft level at several widths. Acceptance:
one decoding of prompts made for it, beside which the head grows a wide tree at every position; what
any chain, static or dynamic tree accepts follows by counting, and what lookup adds from the texts
themselves. Race: the best of each kind decode a few of the prompts beside plain decoding, in turns,
which says what their rounds cost. The most counted tokens per raced second win if they beat plain
decoding: counting is cheap, so it takes many prompts, whose acceptance varies; seconds vary little
between prompts, but only real rounds show them. The answer is kept beside the checkpoint, for the
device, the precision and the files it was measured with.

Leaves out: the command lines (generate.py, benchmark.py), falling back within a text (fallback.py).
"""

import hashlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from acceptance import (
    Recording,
    depth_and_rank,
    dynamic_accepted,
    likely_paths,
    paths_accepted,
    record,
)
from checkpoint import atomic_file
from eagle_draft import (
    EAGLE1_PATHS,
    NO_TREE,
    DraftHead,
    EagleDrafter,
    Tree,
    chain,
    dynamic_tree,
    parse_tree,
    static_tree,
    with_lookup,
)
from engine import Decoder, Generation, compile_region
from lookup_draft import LookupDrafter
from model import Transformer
from sampling import SamplingConfig

ROWS = (1, 3, 6, 8, 16, 32, 64)  # of a target forward; other counts are interpolated
BEAMS = (1, 4, 10)  # of a draft level
LOOKUPS, BESIDE = (2, 3, 5, 7, 10, 15), (2, 3, 5)  # tokens looked up: alone, beside a head's tree
NODES = (4, 8, 16, 24, 32, 48, 64)  # of the static and dynamic trees that are considered
PROBE = {"nodes": 32, "levels": 8, "top_k": 10}  # the tree whose candidates are recorded
TOKENS = 48  # decoded of every prompt
RECORDING_S = 90  # so many prompts are recorded as take about this long, but no fewer than race
RACED = 5  # prompts whose rounds are timed
LEAST_GAIN = 1.02  # over plain decoding; less is noise, and plain is simpler
VERSION = 4  # a stored choice counts for the kernels it was measured with
SHORTEST = 64  # a context below this leaves nothing to measure: the preset stays
GREEDY = SamplingConfig()


# ---------------------------------------------------------------- costs


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
    slots, length = decoder.slots(committed + rows), decoder.length.clone().fill_(committed)

    def run() -> object:
        return decoder.run_target((tokens, parents, ancestors), length, slots, "greedy", 1)

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
    compiled = compile_region if compile else lambda function: function
    length = decoder.length.clone().fill_(committed)
    root, slots = decoder.root, decoder.slots(committed + 64)
    calls = {}
    for beam, depth in itertools.product(beams, (2, 4)):
        tree = chain(depth) if beam == 1 else dynamic_tree(min(16, beam + 1), depth, beam)
        drafter = EagleDrafter(head, tree, decoder.cache.rows, compiled)
        calls[beam, depth] = lambda d=drafter: d.propose(
            root, length, slots, decoder.sampling, "greedy"
        )
    count = len(drafter.feature_layers) or 1
    features = [
        torch.zeros(6, head.config.target_dim, dtype=drafter.hidden.dtype, device=device)
    ] * count
    path, last = torch.arange(6, device=device), torch.tensor([2], device=device)
    calls["learn"] = lambda: drafter.learn(features, path, path, length, last, slots)
    source = LookupDrafter(with_lookup(NO_TREE, 5), decoder.cache.rows, device, compiled)

    def lookup() -> None:
        source.propose(root, length, slots, decoder.sampling, "greedy")
        source.learn(features, path, path, length, last, slots)

    calls["lookup"] = lookup
    taken = medians(calls, device)
    levels = {beam: max((taken[beam, 4] - taken[beam, 2]) / 2, 1e-9) for beam in beams}
    first = max(taken[beams[-1], 2] - levels[beams[-1]], 0.0)
    return Costs({}, levels, first, taken["learn"], taken["lookup"])


# ---------------------------------------------------------------- the choice


Paths = Sequence[Sequence[int]] | None  # rank paths of a static tree that is made here


@dataclass(frozen=True)
class Candidate:
    tree: Tree
    kind: str  # chain | static | dynamic | lookup | both, a head's tree and a lookup
    tokens: float  # expected per round, the bonus included
    seconds: float  # expected per round
    paths: Paths = None

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def candidates(recording: Recording, costs: Costs) -> list[Candidate]:
    """Every tree that is considered, with what the measurements promise."""
    levels, width = recording.tree.levels, recording.tree.top_k
    found = []

    def add(kind: str, tree: Tree, accepted: np.ndarray, paths: Paths = None) -> None:
        tokens = 1 + recording.accepted_per_round(accepted)
        found.append(Candidate(tree, kind, tokens, costs.round(tree), paths))

    def grow(kind: str, tree: Tree, accepted: np.ndarray, paths: Paths = None) -> None:
        add(kind, tree, accepted, paths)
        for count in BESIDE:
            longer = np.maximum(accepted, np.minimum(recording.looked_up, count))
            add("both", with_lookup(tree, count), longer, paths)

    for length in range(1, min(7, levels) + 1):
        tree = chain(length)
        grow("chain", tree, paths_accepted(recording, [[0] * d for d in range(1, length + 1)]))
    if max(rank for path in EAGLE1_PATHS for rank in path) < width:
        grow("static", parse_tree("static"), paths_accepted(recording, EAGLE1_PATHS))
    for nodes, depth in itertools.product(NODES, (2, 3, 4, 6)):
        paths = likely_paths(recording, nodes, min(depth, levels))
        if paths:
            tree = static_tree(paths, f"static:nodes={len(paths) + 1} (tuned)")
            grow("static", tree, paths_accepted(recording, paths), paths)
    for top_k, depth in itertools.product(
        sorted({min(k, width) for k in (2, 4, 6, 10)}), range(1, levels + 1)
    ):
        fitting = [n for n in NODES if n - 1 <= top_k + (depth - 1) * top_k * top_k]
        for nodes, accepted in dynamic_accepted(recording, top_k, depth, fitting).items():
            grow("dynamic", dynamic_tree(nodes, depth, top_k), accepted)
    for count in LOOKUPS:
        add("lookup", parse_tree(f"lookup:{count}"), np.minimum(recording.looked_up, count))
    return found


def finalists(found: list[Candidate], plain_speed: float) -> list[Candidate]:
    """The best of each kind, and the best of at most half or at least twice the nodes of the best
    of all, as far as they may win; at most four. The race decides among them."""
    best = [
        max((c for c in found if c.kind == kind), key=lambda c: c.speed)
        for kind in ("chain", "static", "dynamic", "lookup", "both")
        if any(c.kind == kind for c in found)
    ]
    top = max(best, key=lambda c: c.speed)
    nodes = top.tree.nodes
    others = [c for c in found if c.tree.nodes <= nodes // 2 or c.tree.nodes >= 2 * nodes]
    other = max(others, key=lambda c: c.speed, default=top)
    chosen = [c for c in best if c.speed > 0.8 * max(top.speed, plain_speed)]
    if other not in best and other.speed > 0.8 * max(top.speed, plain_speed):
        chosen.append(other)
    return sorted(chosen, key=lambda c: -c.speed)[:4]


@dataclass(frozen=True)
class Choice:
    """The answer. gain: speed over plain decoding; break_even: a round's cost in plain rounds."""

    tree: Tree
    gain: float
    break_even: float
    report: dict

    def to_json(self) -> dict:
        paths = self.report["paths"]
        return {
            "tree": self.tree.name,
            "paths": paths,
            "gain": self.gain,
            "break_even": self.break_even,
            "report": {k: v for k, v in self.report.items() if k != "paths"},
        }

    @classmethod
    def from_json(cls, values: dict) -> "Choice":
        paths = values["paths"]
        name, _, lookup = values["tree"].partition("+lookup:")
        tree = static_tree(paths, name) if paths else parse_tree(name)
        tree = with_lookup(tree, int(lookup)) if lookup else tree
        report = {**values["report"], "paths": paths}
        return cls(tree, float(values["gain"]), float(values["break_even"]), report)

    def describe(self) -> str:
        if self.tree == NO_TREE:
            return (
                "tree auto: plain decoding, since nothing beats it here "
                f"(best: {self.gain:.2f} of plain)"
            )
        return (
            f"tree auto: {self.tree.name}, {self.gain:.2f} times plain decoding "
            "on the tuning prompts"
        )


class Racer:
    """One decoder in the race, and how long its rounds took."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.round_times: list[float] = []

    @property
    def round_s(self) -> float:
        """The median leaves out the moments that the machine gave to others."""
        return statistics.median(self.round_times)


def in_step(texts: Sequence[Generation]) -> Iterator[int]:
    """Run all of them, yielding after every forward whose it was. On a CPU, whose speed varies from
    second to second, it is always the turn of the text with the fewest tokens, so that equal texts
    end together; on a GPU, where a round is queued while the one before runs, one text follows the
    other.
    """
    running = {index: iter(text) for index, text in enumerate(texts)}
    on_gpu = texts[0].decoder.device.type == "cuda"
    while running:
        index = min(running, key=lambda i: 0 if on_gpu else len(texts[i].tokens))
        if next(running[index], None) is None:
            del running[index]
        else:
            yield index


def race(
    racers: list[Racer], prompts: list[list[int]], budget: int, sampling: SamplingConfig
) -> None:
    """All of them on every prompt, past any stop token, in an order that changes from prompt to
    prompt. The first round after a prefill does not count.
    """
    for racer in racers:
        racer.decoder.warm_up(sampling.kind)
    for number, ids in enumerate(prompts):
        turn = number % len(racers)
        order = racers[turn:] + racers[:turn]
        texts = []
        for racer in order:
            racer.decoder.cached = []
            texts.append(Generation(racer.decoder, ids, sampling, budget))
        before = [0.0] * len(texts)
        for index in in_step(texts):
            stats = texts[index].stats
            if stats.rounds > 1:
                order[index].round_times.append(stats.decode_s - before[index])
            before[index] = stats.decode_s


def tune(
    model: Transformer,
    head: DraftHead,
    prompts: list[list[int]],
    sampling: SamplingConfig = GREEDY,
    compile: bool = True,
    budget: int = TOKENS,
    say: Callable[[str], None] = lambda text: None,
) -> Choice | None:
    """Measure and choose; None where the texts leave nothing to measure. `prompts` are token ids.
    The demo model takes two to four minutes.
    """
    context = min(model.config.max_seq_length, max(map(len, prompts)) + budget + 80)
    plain = Decoder(model, context, compile=compile)
    committed = int(statistics.mean(map(len, prompts))) + budget // 2  # as the race will have it
    say("tuning: measuring what rows and draft levels cost here ...")
    (rows,) = row_costs([plain], ROWS, committed)
    width = min(PROBE["top_k"], head.config.draft_vocab_size)
    levels = min(PROBE["levels"], max(context // 4, 1))
    beams = [beam for beam in BEAMS if beam <= width]
    costs = replace(head_costs(plain, head, beams, committed, compile), rows=rows)
    probe = dynamic_tree(min(PROBE["nodes"], width + (levels - 1) * width**2 + 1), levels, width)
    # A position takes about two plain rounds.
    affordable = int(RECORDING_S / (2 * budget * rows[1]))
    prompts = prompts[: max(affordable, RACED)]
    say(f"tuning: recording what the head guesses on {len(prompts)} prompts ...")
    recording = record(Decoder(model, context, head, probe, compile), prompts, budget, sampling)
    if not len(recording.truth):  # every answer ended at once, or the context left no room
        return None
    found = candidates(recording, costs)
    chosen = finalists(found, 1 / costs.round(NO_TREE))
    names = ", ".join(c.tree.name for c in chosen)
    say(f"tuning: racing {names or 'nothing'} against plain decoding ...")
    racers = [
        Racer(plain),
        *(Racer(Decoder(model, context, head, c.tree, compile)) for c in chosen),
    ]
    race(racers, prompts[:RACED], budget, sampling)
    return decide(racers, chosen, costs, recording, found)


def decide(
    racers: list[Racer],
    chosen: list[Candidate],
    costs: Costs,
    recording: Recording,
    found: list[Candidate],
) -> Choice:
    """The most counted tokens per raced second, if they beat plain decoding (the first of `racers`)
    by more than noise.
    """
    plain_s = racers[0].round_s
    raced = [
        {
            "tree": c.tree.name,
            "acceptance_length": c.tokens,
            "round_s": r.round_s,
            "gain": c.tokens * plain_s / r.round_s,
            "predicted_gain": c.speed * costs.round(NO_TREE),
        }
        for c, r in zip(chosen, racers[1:], strict=True)
    ]
    considered = sorted(found, key=lambda c: -c.speed)[:10]
    report = {
        "plain_round_s": plain_s,
        "race": raced,
        "costs": asdict(costs),
        "best_predictions": [(c.tree.name, c.speed * costs.round(NO_TREE)) for c in considered],
        "accepted_by_depth_and_rank": depth_and_rank(recording),
        "paths": None,
    }
    best = max(range(len(raced)), key=lambda i: raced[i]["gain"], default=None)
    if best is None or raced[best]["gain"] < LEAST_GAIN:
        gain = raced[best]["gain"] if raced else considered[0].speed * costs.round(NO_TREE)
        return Choice(NO_TREE, gain, 1.0, report)
    paths = chosen[best].paths
    report["paths"] = [list(path) for path in paths] if paths else None
    break_even = max(racers[best + 1].round_s / plain_s, 1.0)
    return Choice(chosen[best].tree, raced[best]["gain"], break_even, report)


# ---------------------------------------------------------------- remembering


def settle(
    files: tuple[Path, Path],
    setting: tuple[str, str],
    model: Transformer,
    head: DraftHead,
    prompts: Callable[[], list[list[int]]],
    sampling: SamplingConfig,
    compile: bool,
    mode: str,
    say: Callable[[str], None],
) -> Choice | None:
    """The choice for target and head `files` on a device and precision (`setting`): remembered or
    measured.

    mode: stored (None where nothing is remembered) | once (measure if need be) | again (measure
    anew).
    """
    key = cache_key(*files, *setting, sampling.kind, compile)
    choice = None if mode == "again" else recall(files[0], key)
    if model.config.max_seq_length < SHORTEST:
        return None
    if choice is None and mode != "stored":
        say(
            "tuning: choosing the tree, once for this device, precision and head "
            "(--tree TREE skips it)"
        )
        choice = tune(model, head, prompts(), sampling, compile, say=say)
        if choice is None:
            say("tuning: the answers were too short to measure anything: the preset stays")
            return None
        try:
            keep(files[0], key, choice)
        except OSError as error:
            say(f"note: the choice cannot be kept ({error}): it will be measured again")
    if choice is not None:
        say(choice.describe())
    return choice


def fingerprint(path: Path) -> str:
    """A hash of a weight file that does not read all of it: size, first MiB and 64 blocks spread
    over the rest.
    """
    size, block = path.stat().st_size, 1 << 16
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        for index in range(64):
            file.seek(max(size - block, 0) * index // 63)
            digest.update(file.read(block))
    return digest.hexdigest()[:16]


def cache_path(checkpoint: Path) -> Path:
    return checkpoint.with_suffix(".tuning.json")


def cache_key(
    checkpoint: Path, head: Path, device: str, precision: str, kind: str, compile: bool
) -> str:
    """Everything the answer depends on."""
    parts = [
        device,
        precision,
        kind,
        "compiled" if compile else "eager",
        f"torch {torch.__version__}",
    ]
    return " | ".join([*parts, fingerprint(checkpoint), fingerprint(head)])


def recall(checkpoint: Path, key: str) -> Choice | None:
    """The remembered choice; None if there is none, or the file is not one of ours."""
    try:
        stored = json.loads(cache_path(checkpoint).read_text(encoding="utf-8"))
        return Choice.from_json(stored["choices"][key]) if stored["version"] == VERSION else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep(checkpoint: Path, key: str, choice: Choice) -> None:
    """Add a choice to the file beside the checkpoint; OSError where nothing can be written."""
    path = cache_path(checkpoint)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        choices = dict(stored["choices"]) if stored["version"] == VERSION else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        choices = {}
    value = {"version": VERSION, "choices": {**choices, key: choice.to_json()}}
    with atomic_file(path) as file:
        file.write((json.dumps(value, indent=1) + "\n").encode())
