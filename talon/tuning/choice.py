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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from eagle_draft import DraftHead
from model import Transformer
from talon.checkpoint import atomic_file
from talon.decoder import Decoder, Generation
from talon.sampling import SamplingConfig
from talon.trees import (
    EAGLE1_PATHS,
    NO_TREE,
    Tree,
    chain,
    dynamic_tree,
    parse_tree,
    static_tree,
    with_lookup,
)
from talon.tuning.acceptance import (
    Recording,
    depth_and_rank,
    dynamic_accepted,
    likely_paths,
    paths_accepted,
    record,
)
from talon.tuning.costs import Costs, head_costs, row_costs, take_turns

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


def race(
    racers: list[Racer], prompts: list[list[int]], budget: int, sampling: SamplingConfig
) -> None:
    """All of them on every prompt, past any stop token, in an order that changes from prompt to
    prompt. The first round after a prefill does not count.
    """
    for racer in racers:
        racer.decoder.warm_up(sampling)
    for number, ids in enumerate(prompts):
        turn = number % len(racers)
        order = racers[turn:] + racers[:turn]
        texts = []
        for racer in order:
            racer.decoder.forget()
            texts.append(Generation(racer.decoder, ids, sampling, budget))
        before = [(0, 0.0)] * len(texts)
        for index in take_turns(texts):
            stats, (rounds, seconds) = texts[index].stats, before[index]
            if stats.rounds > max(rounds, 1):
                order[index].round_times.append(stats.decode_s - seconds)
            before[index] = stats.rounds, stats.decode_s


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
    key = cache_key(*files, *setting, sampling.pick, compile)
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
