"""Which tree pays on this machine with this head: what `--tree auto` measures, decides and
remembers.

Three steps. Costs: a target forward over 1 to 64 rows, a draft level at several widths. Acceptance:
one decoding of prompts made for it, next to which the head grows a wide tree at every position;
what any chain, static or dynamic tree accepts follows by counting, and what lookup adds from the
texts themselves. Race: the best of each kind decode a few of the prompts next to plain decoding, in
turns, which says what their rounds cost. The most counted tokens per raced second win if they beat
plain decoding: counting is cheap, so it takes many prompts, whose acceptance varies; seconds vary
little between prompts, but only real rounds show them. The answer is kept next to the checkpoint,
for the device, the precision and the files it was measured with.

Leaves out: the command lines (generate.py, benchmark.py)."""

import hashlib
import itertools
import json
import statistics
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from eagle_draft import DraftConfig, DraftHead
from model import Transformer
from talon.cli import note
from talon.decoder import Decoder, Generation
from talon.loading import Files, device_name, fit_tree, precision_name
from talon.prompts import tuning_prompts
from talon.sampling import GREEDY, SamplingConfig
from talon.trees import EAGLE1_PATHS, NO_TREE, Tree, parse_tree, static_tree, with_lookup
from talon.tuning import acceptance
from talon.tuning.acceptance import LOOKUPS, Recording, paths_accepted
from talon.tuning.costs import Costs, head_costs, medians, take_turns, target_pass
from talon.writing import atomic_file

ROWS = (1, 3, 6, 8, 16, 32, 64)  # of a target forward; other counts are interpolated
BEAMS = (1, 4, 10)  # of a draft level
ADDED_LOOKUPS = (2, 3, 5)  # next to a head's tree
NODES = (4, 8, 16, 24, 32, 48, 64)  # of the static and dynamic trees that are considered
PROBE_LEVELS, PROBE_WIDTH = 8, 10  # of the tree whose candidates are recorded
TOKENS = 48  # decoded of every prompt
RECORDING_S = 90  # so many prompts are recorded as take about this long, but no fewer than race
RACED = 5  # prompts whose rounds are timed
LEAST_GAIN = 1.02  # over plain decoding; less is noise, and plain is simpler
SHORTEST = 64  # a context below this leaves nothing to measure: the preset stays
VERSION = 6  # of the file; a stored choice counts for the kernels it was measured with
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # of such a file

Paths = Sequence[Sequence[int]] | None  # rank paths of a static tree that is made here


# ---------------------------------------------------------------- what is considered


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
    return [
        Candidate(tree, kind, 1 + recording.accepted_per_round(accepted), costs.round(tree), paths)
        for kind, tree, accepted, paths in all_trees(recording)
    ]


def all_trees(recording: Recording) -> Iterator[tuple[str, Tree, np.ndarray, Paths]]:
    """What a head may grow, without and with a lookup, and a lookup alone."""
    right = recording.looked_up
    for kind, tree, accepted, paths in grown_trees(recording):
        yield kind, tree, accepted, paths
        for count in ADDED_LOOKUPS:
            # Where more was looked up rightly than the tree has, it goes on behind the tree.
            both = np.maximum(accepted, np.minimum(right, accepted + count))
            yield "both", with_lookup(tree, count), both, paths
    for count, alone in zip(LOOKUPS, recording.alone.T, strict=True):
        yield "lookup", with_lookup(NO_TREE, count), alone, None


def grown_trees(recording: Recording) -> Iterator[tuple[str, Tree, np.ndarray, Paths]]:
    """Kind and tree of all that a head may grow, with the tokens that it accepts at each position;
    and the paths of those that have no name yet."""
    levels, width = recording.tree.levels, recording.tree.top_k
    for length in range(1, min(7, levels) + 1):
        paths = [[0] * depth for depth in range(1, length + 1)]
        yield "chain", parse_tree(f"chain:{length}"), paths_accepted(recording, paths), None
    if max(rank for path in EAGLE1_PATHS for rank in path) < width:
        yield "static", parse_tree("static"), paths_accepted(recording, EAGLE1_PATHS), None
    for nodes, depth in itertools.product(NODES, (2, 3, 4, 6)):
        paths = acceptance.likely_paths(recording, nodes, min(depth, levels))
        if paths:
            tree = static_tree(paths, f"tuned static tree of {len(paths) + 1} nodes")
            yield "static", tree, paths_accepted(recording, paths), paths
    widths = sorted({min(top_k, width) for top_k in (2, 4, 6, 10)})
    for top_k, depth in itertools.product(widths, range(1, levels + 1)):
        fitting = [n for n in NODES if n - 1 <= top_k + (depth - 1) * top_k * top_k]
        counted = acceptance.dynamic_accepted(recording, top_k, depth, fitting)
        for nodes, accepted in counted.items():
            name = f"dynamic:nodes={nodes},levels={depth},top_k={top_k}"
            yield "dynamic", parse_tree(name), accepted, None


def finalists(found: list[Candidate], plain_speed: float) -> list[Candidate]:
    """The best of each kind, and the best of at most half or at least twice the nodes of the best
    of all, as far as they may win; at most four. The race decides among them."""
    ranked = sorted(found, key=lambda c: -c.speed)
    best = list({c.kind: c for c in reversed(ranked)}.values())
    nodes = ranked[0].tree.nodes
    others = [c for c in ranked if c.tree.nodes <= nodes // 2 or c.tree.nodes >= 2 * nodes]
    chosen = best + [c for c in others[:1] if c not in best]
    least = 0.8 * max(ranked[0].speed, plain_speed)
    return sorted((c for c in chosen if c.speed > least), key=lambda c: -c.speed)[:4]


# ---------------------------------------------------------------- the race and the choice


@dataclass(frozen=True)
class Choice:
    """The answer. gain: speed over plain decoding; where that is the answer, of the next best."""

    tree: Tree
    gain: float
    paths: Paths = None

    def describe(self) -> str:
        if self.tree != NO_TREE:
            return f"tree auto: {self.tree.name}, {self.gain:.2f} times plain decoding when tuned"
        return f"tree auto: plain decoding, since nothing beats it (best: {self.gain:.2f} of it)"


def race(
    decoders: list[Decoder], prompts: list[list[int]], budget: int, sampling: SamplingConfig
) -> list[list[float]]:
    """Seconds of each decoder's rounds. All of them decode every prompt, past any stop token, in an
    order that changes from prompt to prompt. The first round after a prefill does not count."""
    taken: list[list[float]] = [[] for _ in decoders]
    for decoder in decoders:
        decoder.warm_up(sampling)
    for number, ids in enumerate(prompts):
        order = [(number + i) % len(decoders) for i in range(len(decoders))]
        for decoder in decoders:
            decoder.forget()
        texts = [Generation(decoders[index], ids, sampling, budget) for index in order]
        before = [(0, 0.0)] * len(texts)
        for place in take_turns(texts, decoders[0].device.type == "cuda"):
            stats, (rounds, seconds) = texts[place].stats, before[place]
            if stats.rounds > max(rounds, 1):
                taken[order[place]].append(stats.decode_s - seconds)
            before[place] = stats.rounds, stats.decode_s
    return taken


def tune(
    model: Transformer,
    head: DraftHead,
    prompts: list[list[int]],
    sampling: SamplingConfig = GREEDY,
    compile: bool = True,
    budget: int = TOKENS,
) -> Choice | None:
    """Measure and choose; None where the texts leave nothing to measure. `prompts` are token ids.
    The demo model takes two to four minutes."""
    context = min(model.config.max_seq_length, max(map(len, prompts)) + budget + 80)
    plain = Decoder(model, context, compile=compile)
    committed = int(statistics.mean(map(len, prompts))) + budget // 2  # as the race will have it
    note("tuning: measuring what rows and draft levels cost here ...")
    rows = medians({n: target_pass(plain, n, committed) for n in ROWS}, plain.device)
    width = min(PROBE_WIDTH, head.config.draft_vocab_size)
    levels = min(PROBE_LEVELS, max(context // 4, 1))
    beams = [beam for beam in BEAMS if beam <= width]
    costs = replace(head_costs(plain, head, beams, committed, compile), rows=rows)
    # Every candidate is recorded, however few are kept.
    probe = parse_tree(f"dynamic:nodes=2,levels={levels},top_k={width}")
    prompts = prompts[: affordable(rows[1], budget)]
    note(f"tuning: recording what the head guesses on {len(prompts)} prompts ...")
    wide = Decoder(model, context, head, probe, compile)
    recording = acceptance.record(wide, prompts, budget, sampling)
    if not len(recording.truth):  # every answer ended at once, or the context left no room
        return None
    found = candidates(recording, costs)
    chosen = finalists(found, 1 / costs.round(NO_TREE))
    names = ", ".join(c.tree.name for c in chosen)
    note(f"tuning: racing {names or 'nothing'} against plain decoding ...")
    decoders = [plain, *(Decoder(model, context, head, c.tree, compile) for c in chosen)]
    taken = race(decoders, prompts[:RACED], budget, sampling)
    promised = max(c.speed for c in found) * costs.round(NO_TREE)
    return decide([statistics.median(seconds) for seconds in taken], chosen, promised)


def affordable(plain_s: float, budget: int) -> int:
    """How many prompts are recorded: a position takes about two plain rounds."""
    return max(int(RECORDING_S / (2 * budget * plain_s)), RACED)


def decide(round_s: list[float], chosen: list[Candidate], promised: float) -> Choice:
    """The most counted tokens per raced second, if they beat plain decoding by more than noise.

    round_s: the median round of plain decoding, then of each of `chosen`: a median leaves out the
    moments that the machine gave to others. promised: the gain of the best tree by the measured
    costs, for the record where none of them was worth a race."""
    best = Choice(NO_TREE, promised)
    for index, (candidate, seconds) in enumerate(zip(chosen, round_s[1:], strict=True)):
        gain = candidate.tokens * round_s[0] / seconds
        note(f"tuning: {candidate.tree.name}: {gain:.2f} times plain decoding")
        if index == 0 or gain > best.gain:
            best = Choice(candidate.tree, gain, candidate.paths)
    return best if best.gain >= LEAST_GAIN else Choice(NO_TREE, best.gain)


# ---------------------------------------------------------------- remembering


def auto_tree(
    files: Files,
    model: Transformer,
    head: DraftHead,
    sampling: SamplingConfig,
    compile: bool,
    measure: bool,
) -> Choice | None:
    """What `--tree auto` says for these files: what was measured before, else, with `measure`, what
    is measured now. None: there is no answer, and the preset of the head's family must do."""
    if not isinstance(head, DraftHead):
        note("tree auto: the usual one, for trees are measured for EAGLE heads only")
        return None
    key = cache_key(files, model, sampling, compile)
    choice = stored_choice(files, key)
    if choice is None and measure and files.config.max_seq_length >= SHORTEST:
        note("tuning: choosing the tree, once for this device, precision and head (or give --tree)")
        limits = files.config.vocab_size, files.config.max_seq_length
        prompts = tuning_prompts(files.tokenizer, *limits)
        choice = tune(model, head, prompts, sampling, compile)
        if choice is None:
            note("tuning: the answers were too short to measure anything: the preset stays")
        else:
            choice = store_choice(files.target.path, key, choice)
    if choice is not None:
        note(choice.describe())
    return choice


def fingerprint(path: Path) -> str:
    """A hash of a weight file that does not read all of it: its size, first and last MiB."""
    size, part = path.stat().st_size, 1 << 20
    with path.open("rb") as file:
        start = file.read(part)
        file.seek(max(size - part, 0))
        return hashlib.sha256(b"%d %b %b" % (size, start, file.read(part))).hexdigest()[:16]


def cache_key(files: Files, model: Transformer, sampling: SamplingConfig, compile: bool) -> str:
    """Everything the answer depends on."""
    weight, compiled = model.norm.weight, "compiled" if compile else "eager"
    parts = [device_name(weight.device), precision_name(files.target, weight.dtype), sampling.pick]
    parts += [compiled, f"torch {torch.__version__}"]
    return " | ".join([*parts, *map(fingerprint, (files.target.path, files.head.path))])


def cache_path(checkpoint: Path) -> Path:
    return checkpoint.with_suffix(".tuning.json")


def read_choices(checkpoint: Path) -> dict:
    """What is remembered, by key; nothing of another version. Raises one of DAMAGE, or OSError."""
    stored = json.loads(cache_path(checkpoint).read_text(encoding="utf-8"))
    return dict(stored["choices"]) if stored["version"] == VERSION else {}


def stored_choice(files: Files, key: str) -> Choice | None:
    """The remembered choice; None if there is none, or none that this head can serve."""
    directory = files.target.path.parent
    try:
        choices = read_choices(files.target.path)
        if key not in choices:
            return None
        name = choices[key]["tree"]
        tree = parse_tree(str(directory / name) if ".json" in name else name)
        return Choice(fit_tree(tree, files.head_config), float(choices[key]["gain"]))
    except FileNotFoundError:
        return None
    except (*DAMAGE, OSError) as error:
        place = cache_path(files.target.path)
        reason = " ".join(str(error).split())[:200]
        note(f"note: {place} holds no usable choice ({reason}): it counts as not measured")
        return None


def store_choice(checkpoint: Path, key: str, choice: Choice) -> Choice:
    """Add a choice to the file next to the checkpoint. Returns it with a tree whose name --tree
    takes; where nothing can be written, that is said, and the choice is returned as it is."""
    try:
        if choice.paths:
            choice = replace(choice, tree=write_tree(checkpoint, choice))
        try:
            choices = read_choices(checkpoint)
        except (*DAMAGE, FileNotFoundError):
            choices = {}
        name = choice.tree.name.rpartition("/")[2]  # the directory may be moved
        choices[key] = {"tree": name, "gain": choice.gain}
        with atomic_file(cache_path(checkpoint)) as file:
            text = json.dumps({"version": VERSION, "choices": choices}, indent=1)
            file.write(f"{text}\n".encode())
    except OSError as error:
        note(f"note: the choice cannot be kept ({error}): it will be measured again")
    return choice


def write_tree(checkpoint: Path, choice: Choice) -> Tree:
    """The same tree as a file next to the checkpoint, and named by it."""
    text = f"{json.dumps([list(path) for path in choice.paths])}\n".encode()
    path = checkpoint.with_suffix(f".tree-{zlib.crc32(text):08x}.json")
    with atomic_file(path) as file:
        file.write(text)
    tree = static_tree(choice.paths, str(path))
    return with_lookup(tree, choice.tree.lookup) if choice.tree.lookup else tree


def forget_choices(files: Files) -> None:
    """What `--retune` asks for: everything about this target is to be measured again. ValueError
    for a head of which nothing ever is."""
    if not isinstance(files.head_config, DraftConfig | None):
        raise ValueError("--retune is for EAGLE heads, whose trees are measured: leave it out")
    cache_path(files.target.path).unlink(missing_ok=True)
