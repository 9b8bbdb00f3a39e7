"""Choosing a tree: recorded acceptance equals real acceptance, the choice follows from the costs,
and it is kept.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import (
    GOLDEN,
    converted,
    cycle_table,
    decode,
    random_head,
    random_model,
    table_head,
    table_model,
)

from generate import main
from talon.decoder import Decoder
from talon.sampling import SamplingConfig
from talon.text import load
from talon.trees import EAGLE1_PATHS, NO_TREE, dynamic_tree, parse_tree, static_tree, with_lookup
from talon.tuning import acceptance
from talon.tuning import choice as tuning
from talon.tuning.acceptance import Recording
from talon.tuning.choice import Candidate, Choice, Racer
from talon.tuning.costs import Costs, interpolate, medians, take_turns

PROMPTS = [[1, 2, 3], [5, 6, 9, 2], [7, 3]]
GREEDY = SamplingConfig()


def noisy_pair():
    """A target with two likely followers of every token, and a head that mixes up some."""
    torch.manual_seed(5)
    table = (cycle_table(24, gap=3.0) + torch.randn(24, 24)).log_softmax(-1)
    model = table_model(table, max_seq_length=512)
    return model, table_head(model, tuple(range(0, 24, 3)))


@pytest.fixture(scope="module")
def recording() -> Recording:
    model, head = noisy_pair()
    decoder = Decoder(model, 400, head, dynamic_tree(24, 5, 6), compile=False)
    return acceptance.record(decoder, PROMPTS, 100, SamplingConfig(1.0, seed=3))


def measured(tree, sampling) -> float:
    """Mean accepted nodes of the rounds that really decode the same texts."""
    model, head = noisy_pair()
    decoder = Decoder(model, 400, head, tree, compile=False)
    pick = decoder.picks.set(sampling)
    accepted = []
    for ids in PROMPTS:
        with torch.inference_mode():
            decoder.prefill(ids, 0, pick)
            at = 0
            while at < 100:
                decoder.round(decoder.at(len(ids) + at + 80), pick)
                accepted.append(int(decoder.result[0]) - 1)
                at += accepted[-1] + 1
    return float(np.mean(accepted))


@pytest.mark.parametrize(
    "text",
    [
        "chain:3", "static", "dynamic:nodes=8,levels=3,top_k=3",
        "dynamic:nodes=16,levels=5,top_k=6",
        "lookup:3", "chain:2+lookup:3", "dynamic:nodes=8,levels=3,top_k=4+lookup:5",
    ],
)  # fmt: skip
def test_counted_acceptance_is_exactly_that_of_decoding(recording, text):
    tree = parse_tree(text)
    accepted = np.zeros(len(recording.truth), dtype=np.int64)
    if text.startswith("dynamic"):
        (accepted,) = acceptance.dynamic_accepted(
            recording, tree.top_k, tree.levels, [tree.grown]
        ).values()
    elif tree.needs_head:
        paths = EAGLE1_PATHS if text == "static" else [[0] * d for d in range(1, tree.levels + 1)]
        accepted = acceptance.paths_accepted(recording, paths)
    longer = np.maximum(accepted, np.minimum(recording.looked_up, tree.lookup))
    real = measured(tree, SamplingConfig(1.0, seed=3))
    assert recording.accepted_per_round(longer) == pytest.approx(real)


def ending_pair(*stop_ids: int):
    """A target that counts to 23 and begins again, with its stop tokens, and a perfect head."""
    model = table_model(cycle_table(24), max_seq_length=512)
    model.config = replace(model.config, eos_ids=stop_ids)
    return model, table_head(model)


def test_nothing_behind_a_stop_token_is_counted():
    model, head = ending_pair(9)
    decoder = Decoder(model, 400, head, dynamic_tree(2, 4, 2), compile=False)
    recording = acceptance.record(decoder, [[1, 2, 3]], 100, GREEDY)
    assert recording.counts == [5]  # the roots 4 to 8
    assert (recording.truth >= 0).sum(1).tolist() == [4, 3, 2, 1, 0]
    assert recording.looked_up.tolist() == [0] * 5  # the second time round would be right
    endless = Decoder(ending_pair()[0], 400, head, dynamic_tree(2, 4, 2), compile=False)
    recording = acceptance.record(endless, [[1, 2, 3]], 100, GREEDY)
    assert recording.counts == [100]
    assert recording.looked_up[30:].tolist() == [acceptance.LOOKED_AHEAD] * 70  # to the last one


def test_what_the_wide_tree_does_not_cover_is_counted_as_wrong(recording):
    """A narrow recording foretells less than a wide one, never more."""
    model, head = noisy_pair()
    narrow = acceptance.record(
        Decoder(model, 400, head, dynamic_tree(3, 5, 2), compile=False), PROMPTS, 100,
        SamplingConfig(1.0, seed=3),
    )  # fmt: skip
    accepted = [acceptance.paths_accepted(r, EAGLE1_PATHS) for r in (narrow, recording)]
    assert (accepted[0] <= accepted[1]).all() and accepted[0].sum() < accepted[1].sum()


def test_rounds_go_on_behind_what_they_accepted():
    empty = np.zeros((0, 0))
    recording = Recording(NO_TREE, empty, empty, empty, empty, [4, 0, 3])
    assert recording.accepted_per_round(np.array([2, 9, 9, 0, 1, 9, 0])) == (2 + 0 + 1 + 0) / 4
    assert recording.accepted_per_round(np.zeros(7, dtype=int)) == 0


def test_a_model_that_stops_at_once_leaves_the_preset_and_nothing_is_kept(tmp_path):
    model, head = ending_pair(*range(24))
    files, said = (tmp_path / "t.safetensors", tmp_path / "h.safetensors"), []
    for file in files:
        file.write_bytes(b"x")
    choice = tuning.settle(
        files, ("cpu", "fp32"), model, head, lambda: PROMPTS, GREEDY, False, "once", said.append
    )
    assert choice is None and said[-1].endswith("the preset stays")
    assert not tuning.cache_path(files[0]).exists()


def test_likely_paths_are_a_tree_of_the_most_frequent_ranks(recording):
    paths = acceptance.likely_paths(recording, 12, 4)
    known = {tuple(path) for path in paths}
    assert len(paths) <= 11 and [0] in paths
    assert all(path[:-1] in known for path in known if len(path) > 1)
    shares = [
        acceptance.paths_accepted(recording, acceptance.likely_paths(recording, n, 4)).mean()
        for n in (2, 4, 8, 16)
    ]
    assert shares == sorted(shares)


def test_every_tree_of_a_head_is_also_considered_with_a_lookup(recording):
    costs = Costs({1: 1.0, 64: 1.0}, {1: 0.1, 10: 0.1})
    found = tuning.candidates(recording, costs)
    grown = [c for c in found if c.kind in ("chain", "static", "dynamic")]
    both = [c for c in found if c.kind == "both"]
    assert len(both) == len(grown) * len(tuning.BESIDE) and {c.tree.lookup for c in both} == {
        2,
        3,
        5,
    }
    alone = {c.tree.name: c.tokens for c in grown}
    assert all(c.tokens >= alone[c.tree.name.partition("+")[0]] for c in both if not c.paths)


def test_cheap_rows_choose_a_large_tree_and_dear_rows_a_small_one(recording):
    flat = Costs({1: 1.0, 64: 1.0}, {1: 0.001, 10: 0.001})
    steep = Costs({1: 1.0, 64: 64.0}, {1: 0.5, 10: 0.5}, 0.1, 0.1)
    best = {
        name: max(tuning.candidates(recording, c), key=lambda c: c.speed)
        for name, c in (("flat", flat), ("steep", steep))
    }
    assert best["flat"].tree.nodes > best["steep"].tree.nodes
    assert best["flat"].tokens > best["steep"].tokens


def test_costs_interpolate_between_what_was_measured():
    costs = Costs({1: 1.0, 3: 2.0, 9: 5.0}, {1: 0.1, 5: 0.5}, first=0.01, learn=0.02)
    assert [interpolate(costs.rows, n) for n in (1, 2, 3, 6, 9, 50)] == [
        1,
        1.5,
        2,
        3.5,
        5,
        5,
    ]
    assert costs.round(NO_TREE) == 1.0
    assert costs.round(parse_tree("chain:2")) == pytest.approx(2.0 + 0.03 + 0.1)
    assert costs.round(parse_tree("lookup:2")) == 2.0
    costs = replace(costs, lookup=0.25)
    assert costs.round(parse_tree("lookup:2")) == 2.25
    assert costs.round(parse_tree("chain:2+lookup:6")) == pytest.approx(5.0 + 0.25 + 0.03 + 0.1)
    assert costs.round(parse_tree("chain:2")) == pytest.approx(2.0 + 0.03 + 0.1)


def racer(*round_times: float) -> Racer:
    """A racer whose rounds took these seconds."""
    known = Racer(None)
    known.round_times = list(round_times)
    return known


@pytest.mark.parametrize(
    ("gain", "drafts"), [(0.7, False), (1.0, False), (1.01, False), (1.1, True), (2.0, True)]
)
def test_drafting_is_chosen_only_when_the_race_says_it_wins(recording, gain, drafts):
    costs = Costs({1: 1.0, 64: 1.0}, {1: 0.1, 10: 0.1})
    candidate = Candidate(parse_tree("chain:3"), "chain", tokens=2 * gain, seconds=1.5)
    racers = [racer(0.1, 0.1, 0.7), racer(0.2, 0.2, 0.1)]
    choice = tuning.decide(racers, [candidate], costs, recording, [candidate])
    assert choice.report["race"][0]["gain"] == pytest.approx(gain)
    assert (choice.tree != NO_TREE) is drafts
    assert choice.break_even == (pytest.approx(2.0) if drafts else 1.0)
    assert ("plain decoding, since nothing beats it" in choice.describe()) is not drafts


def test_no_finalist_means_plain_decoding(recording):
    costs = Costs({1: 1.0, 64: 640.0}, {1: 9.0, 10: 9.0})
    found = [c for c in tuning.candidates(recording, costs) if c.tree.nodes > 8]
    assert tuning.finalists(found, 1 / costs.round(NO_TREE)) == []
    assert tuning.decide([racer(0.1)], [], costs, recording, found).tree == NO_TREE


def candidate(text: str, kind: str, speed: float) -> Candidate:
    return Candidate(parse_tree(text), kind, speed, 1.0)


def test_the_finalists_are_the_best_of_each_kind_and_one_of_another_size():
    found = [
        candidate("chain:7", "chain", 2.0),
        candidate("chain:6", "chain", 1.99),
        candidate("dynamic:nodes=8,levels=2,top_k=4", "dynamic", 1.9),
        candidate("lookup:7", "lookup", 1.5),  # not within 0.8 of the best
        candidate("lookup:3", "lookup", 1.2),
        candidate("chain:2", "chain", 1.7),
        candidate("dynamic:nodes=16,levels=4,top_k=4", "dynamic", 1.8),
    ]
    chosen = [c.tree.name for c in tuning.finalists(found, 1.0)]
    assert chosen == [found[i].tree.name for i in (0, 2, 6)]
    assert [c.speed for c in tuning.finalists(found, 2.4)] == [2.0]
    kinds = ("chain", "static", "dynamic", "lookup", "both")
    crowd = [candidate("chain:7", kind, 2.0 + i / 10) for i, kind in enumerate(kinds)]
    chosen = tuning.finalists([*crowd, candidate("chain:2", "chain", 1.9)], 1.0)
    assert [c.kind for c in chosen] == ["both", "lookup", "dynamic", "static"]


class Slow:
    """A text of single tokens but for every `leap`-th round, which gives more."""

    def __init__(self, name: str, tokens: int, leap: int, seen: list[str], device: str) -> None:
        self.name, self.wanted, self.leap, self.seen = name, tokens, leap, seen
        self.decoder = SimpleNamespace(device=torch.device(device))
        self.tokens: list[int] = []

    def __iter__(self):
        while len(self.tokens) < self.wanted:
            self.seen.append(self.name)
            self.tokens += [0] * min(self.leap, self.wanted - len(self.tokens))
            yield self.tokens


def test_texts_take_turns_on_a_cpu_and_one_after_another_on_a_gpu():
    for device, order in (("cpu", "abaabaaba"), ("cuda", "aaaaaabbb")):
        seen: list[str] = []
        texts = [Slow("a", 6, 1, seen, device), Slow("b", 6, 2, seen, device)]
        turns = list(take_turns(texts))
        assert "".join(seen) == order and "".join("ab"[i] for i in turns) == order


def test_a_race_times_every_round_but_the_first_of_a_text():
    model = table_model(cycle_table(24), max_seq_length=256)
    racers = [
        Racer(Decoder(model, 200, table_head(model), parse_tree(tree), compile=False))
        for tree in ("none", "chain:3")
    ]
    tuning.race(racers, [[1, 2], [3], [4]], 13, GREEDY)  # twelve rounds and three, after prefill
    assert [len(racer.round_times) for racer in racers] == [3 * 11, 3 * 2]
    assert all(seconds > 0 for racer in racers for seconds in racer.round_times)


def test_a_slow_machine_records_fewer_prompts(monkeypatch):
    model, head = noisy_pair()
    recorded, raced = [], []
    real_record, real_race = tuning.record, tuning.race

    def record(decoder, prompts, *rest):
        recorded.append(len(prompts))
        return real_record(decoder, prompts, *rest)

    def race(racers, prompts, *rest):
        raced.append(len(prompts))
        return real_race(racers, prompts, *rest)

    monkeypatch.setattr(tuning, "record", record)
    monkeypatch.setattr(tuning, "race", race)
    prompts = [[n % 24, 3] for n in range(12)]
    for second in (0.001, 10.0):
        costs = [dict.fromkeys(tuning.ROWS, second)]
        monkeypatch.setattr(tuning, "row_costs", lambda *_, costs=costs: costs)
        tuning.tune(model, head, prompts, GREEDY, compile=False, budget=8)
    assert recorded == [12, tuning.RACED] and raced == [tuning.RACED] * 2


def test_what_is_measured_takes_turns():
    seen = []
    calls = {name: lambda n=name: seen.append(n) for name in "xyz"}
    taken = medians(calls, torch.device("cpu"), repeats=3)
    assert set(taken) == set("xyz") and all(seconds >= 0 for seconds in taken.values())
    assert seen == list("xxyyzz") + 3 * list("xyz")


@pytest.mark.parametrize("kind", ["sampled", "greedy"])
def test_a_whole_tuning_names_a_tree_that_decodes_the_same_ids(kind):
    model, head = noisy_pair()
    sampling = SamplingConfig(1.0) if kind == "sampled" else GREEDY
    choice = tuning.tune(model, head, PROMPTS, sampling, compile=False, budget=24)
    assert choice.gain > 0 and choice.break_even >= 1
    draft = head if choice.tree.needs_head else None
    decoder = Decoder(model, 300, draft, choice.tree, compile=False)
    assert decode(decoder, [4, 4], 150, sampling).tokens == (
        decode(Decoder(model, 300, compile=False), [4, 4], 150, sampling).tokens
    )
    again = Choice.from_json(json.loads(json.dumps(choice.to_json())))
    assert (again.tree, again.gain, again.break_even) == (
        choice.tree,
        choice.gain,
        choice.break_even,
    )


def test_a_small_draft_vocabulary_bounds_the_trees():
    model = random_model(max_seq_length=256)
    head = random_head(model, "eagle3", draft_vocab_size=5)
    choice = tuning.tune(model, head, [[1, 2], [3]], GREEDY, compile=False, budget=12)
    assert choice.tree.top_k <= 5


def test_a_tuned_static_tree_survives_the_file(tmp_path):
    paths = [[0], [1], [0, 0]]
    tree = with_lookup(static_tree(paths, "static:nodes=4 (tuned)"), 3)
    choice = Choice(tree, 1.5, 1.2, {"race": [], "paths": paths})
    checkpoint = tmp_path / "t.safetensors"
    tuning.keep(checkpoint, "a", choice)
    tuning.keep(checkpoint, "b", Choice(NO_TREE, 0.9, 1.0, {"paths": None}))
    both = parse_tree("chain:2+lookup:5")
    tuning.keep(checkpoint, "d", Choice(both, 1.4, 1.0, {"paths": None}))
    assert tuning.recall(checkpoint, "d").tree == both
    assert tuning.recall(checkpoint, "a").tree == tree
    assert tuning.recall(checkpoint, "b").tree == NO_TREE
    assert tuning.recall(checkpoint, "c") is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"version": 9, "choices": {}}',
        '{"version": 1, "choices": {"a": {"tree": "oak"}}}',
    ],
)
def test_a_damaged_cache_is_measured_again_and_replaced(tmp_path, content):
    checkpoint = tmp_path / "t.safetensors"
    tuning.cache_path(checkpoint).write_text(content)
    assert tuning.recall(checkpoint, "a") is None
    tuning.keep(checkpoint, "a", Choice(NO_TREE, 1.0, 1.0, {"paths": None}))
    assert tuning.recall(checkpoint, "a").tree == NO_TREE


def test_the_key_changes_with_everything_the_answer_depends_on(tmp_path):
    files = []
    for name in "abc":
        files.append(tmp_path / name)
        files[-1].write_bytes(name.encode() * 5000)
    base = (files[0], files[1], "cpu", "fp32", "greedy", True)
    keys = {tuning.cache_key(*base)}
    for index, value in enumerate((files[2], files[2], "gpu", "int8", "sample", False)):
        keys.add(tuning.cache_key(*base[:index], value, *base[index + 1 :]))
    assert len(keys) == 7
    files[0].write_bytes(b"a" * 4999 + b"x")
    assert tuning.cache_key(*base) not in keys


# ---------------------------------------------------------------- the command line


@pytest.fixture
def files(tmp_path):
    base = GOLDEN / "eagle2_tiny_seed0"
    target, head = tmp_path / "target.safetensors", tmp_path / "head.safetensors"
    converted.__wrapped__(base / "target", target)
    converted.__wrapped__(base / "head", head)
    return target, head


def generate(files, *extra: str) -> int:
    arguments = [
        "--checkpoint_path",
        str(files[0]),
        "--draft_checkpoint_path",
        str(files[1]),
        "--no_compile",
    ]
    return main(
        [*arguments, "--prompt_ids", "1 2 3", "--max_new_tokens", "12", "--ignore_eos", *extra]
    )


def fixed_choice(monkeypatch, tree: str) -> list[int]:
    """Replace the measuring; returns a list that grows with every call."""
    calls = []

    def tune(*_, **__):
        calls.append(1)
        return Choice(parse_tree(tree), 1.4, 1.3, {"paths": None})

    monkeypatch.setattr(tuning, "tune", tune)
    return calls


def test_auto_measures_once_and_retune_measures_again(files, monkeypatch, capsys):
    calls = fixed_choice(monkeypatch, "chain:2")
    assert generate(files) == generate(files) == 0
    assert len(calls) == 1
    assert "tree auto: chain:2, 1.40 times plain" in capsys.readouterr().err
    assert generate(files, "--retune") == 0
    assert len(calls) == 2
    generate(files, "--temperature", "1")  # another acceptance: another measurement
    assert len(calls) == 3


def test_auto_decodes_plainly_and_says_so_where_drafting_loses(files, monkeypatch, capsys):
    fixed_choice(monkeypatch, "none")
    assert generate(files, "--check") == 0
    assert "plain decoding, since nothing beats it" in capsys.readouterr().err


def test_a_library_load_uses_the_preset_and_then_what_was_measured(files, monkeypatch):
    calls = fixed_choice(monkeypatch, "chain:2")
    assert load(*files, compile=False, max_seq_length=64).card["tree"] == "static" and not calls
    engine = load(*files, compile=False, max_seq_length=64, tune="once")
    assert engine.decoder.tree == parse_tree("chain:2")
    assert (
        load(*files, compile=False, max_seq_length=64).card["tree"] == "chain:2" and len(calls) == 1
    )
    assert load(*files, tree="chain:1", compile=False, max_seq_length=64).card["tree"] == "chain:1"


def test_a_directory_that_cannot_be_written_is_a_note_not_an_error(files, monkeypatch, capsys):
    fixed_choice(monkeypatch, "chain:2")

    def refuse(*_):
        raise PermissionError("read-only file system")

    monkeypatch.setattr(tuning, "keep", refuse)
    assert generate(files) == 0
    assert "cannot be kept" in capsys.readouterr().err
