"""Choosing a tree: recorded acceptance is real acceptance, costs decide, and the choice is kept."""

import json
from dataclasses import replace

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
from talon.loading import open_files
from talon.sampling import SamplingConfig
from talon.text import load
from talon.trees import EAGLE1_PATHS, NO_TREE, dynamic_tree, parse_tree, static_tree, with_lookup
from talon.tuning import acceptance
from talon.tuning import choice as tuning
from talon.tuning.acceptance import Recording
from talon.tuning.choice import Candidate, Choice
from talon.tuning.costs import Costs, interpolate, medians, take_turns, target_pass, times

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
    longer = np.maximum(accepted, np.minimum(recording.looked_up, accepted + tree.lookup))
    if not tree.needs_head:
        longer = recording.alone[:, acceptance.LOOKUPS.index(tree.lookup)]
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
    assert recording.alone[50:].tolist() == [list(acceptance.LOOKUPS)] * 50


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
    recording = Recording(NO_TREE, empty, empty, empty, empty, empty, [4, 0, 3])
    assert recording.accepted_per_round(np.array([2, 9, 9, 0, 1, 9, 0])) == (2 + 0 + 1 + 0) / 4
    assert recording.accepted_per_round(np.zeros(7, dtype=int)) == 0


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
    assert len(both) == len(grown) * len(tuning.ADDED_LOOKUPS) and {
        c.tree.lookup for c in both
    } == {
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


@pytest.mark.parametrize(
    ("gain", "drafts"), [(0.7, False), (1.0, False), (1.01, False), (1.1, True), (2.0, True)]
)
def test_drafting_is_chosen_only_when_the_race_says_it_wins(gain, drafts):
    raced = Candidate(parse_tree("chain:3"), "chain", tokens=2 * gain, seconds=1.5)
    worse = Candidate(parse_tree("chain:1"), "chain", tokens=gain, seconds=0.1)
    choice = tuning.decide([0.1, 0.2, 0.2], [raced, worse], promised=9.0)
    assert choice.gain == pytest.approx(gain)
    assert choice.tree == (raced.tree if drafts else NO_TREE)
    assert ("plain decoding, since nothing beats it" in choice.describe()) is not drafts


def test_no_finalist_means_plain_decoding(recording):
    costs = Costs({1: 1.0, 64: 640.0}, {1: 9.0, 10: 9.0})
    found = [c for c in tuning.candidates(recording, costs) if c.tree.nodes > 8]
    assert tuning.finalists(found, 1 / costs.round(NO_TREE)) == []
    assert tuning.decide([0.1], [], promised=0.5) == Choice(NO_TREE, 0.5)
    assert tuning.decide([0.1], [], promised=1.5).tree == NO_TREE


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


class Known:
    """A text of single tokens but for every round of `leap` tokens."""

    def __init__(self, name: str, tokens: int, leap: int, seen: list[str]) -> None:
        self.name, self.wanted, self.leap, self.seen = name, tokens, leap, seen
        self.tokens: list[int] = []

    def __iter__(self):
        while len(self.tokens) < self.wanted:
            self.seen.append(self.name)
            self.tokens += [0] * min(self.leap, self.wanted - len(self.tokens))
            yield self.tokens


def test_texts_take_turns_on_a_cpu_and_follow_one_another_on_a_gpu():
    for on_gpu, order in ((False, "abaabaaba"), (True, "aaaaaabbb")):
        seen: list[str] = []
        turns = list(take_turns([Known("a", 6, 1, seen), Known("b", 6, 2, seen)], on_gpu))
        assert "".join(seen) == order and "".join("ab"[i] for i in turns) == order


def test_timing_a_forward_leaves_the_decoder_as_it_was():
    decoder = Decoder(random_model(), 64, compile=False)
    before = decoder.length.clone()
    assert set(medians({n: target_pass(decoder, n, 20) for n in (1, 3)}, decoder.device)) == {1, 3}
    assert torch.equal(decoder.length, before)


def test_a_race_times_every_round_but_the_first_of_a_text():
    model = table_model(cycle_table(24), max_seq_length=256)
    decoders = [
        Decoder(model, 200, table_head(model), parse_tree(tree), compile=False)
        for tree in ("none", "chain:3")
    ]
    prompts = [[1, 2], [3], [4]]
    taken = tuning.race(decoders, prompts, 13, GREEDY)  # twelve rounds and three, after prefill
    assert [len(seconds) for seconds in taken] == [3 * 11, 3 * 2]
    assert all(value > 0 for seconds in taken for value in seconds)


def test_a_slow_machine_records_fewer_prompts_but_no_fewer_than_race():
    assert tuning.affordable(plain_s=0.001, budget=48) > 24
    assert tuning.affordable(plain_s=0.1, budget=48) == 9
    assert tuning.affordable(plain_s=10.0, budget=48) == tuning.RACED


def test_what_is_measured_takes_turns():
    seen = []
    calls = {name: lambda n=name: seen.append(n) for name in "xyz"}
    taken = times(calls, torch.device("cpu"), repeats=3)
    assert set(taken) == set("xyz") and all(len(seconds) == 3 for seconds in taken.values())
    assert seen == list("xxyyzz") + 3 * list("xyz")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_whole_tuning_names_a_tree_that_decodes_the_same_ids(temperature):
    model, head = noisy_pair()
    sampling = SamplingConfig(temperature)
    choice = tuning.tune(model, head, PROMPTS, sampling, compile=False, budget=24)
    assert choice.gain > 0
    decoder = Decoder(model, 300, head, choice.tree, compile=False)
    assert decode(decoder, [4, 4], 150, sampling).tokens == (
        decode(Decoder(model, 300, compile=False), [4, 4], 150, sampling).tokens
    )


def test_a_small_draft_vocabulary_bounds_the_trees():
    model = random_model(max_seq_length=256)
    head = random_head(model, "eagle3", draft_vocab_size=5)
    choice = tuning.tune(model, head, [[1, 2], [3]], GREEDY, compile=False, budget=12)
    assert choice.tree.top_k <= 5


# ---------------------------------------------------------------- what is kept


@pytest.fixture
def files(tmp_path):
    base = GOLDEN / "eagle2_tiny_seed0"
    target, head = tmp_path / "target.safetensors", tmp_path / "head.safetensors"
    converted.__wrapped__(base / "target", target)
    converted.__wrapped__(base / "head", head)
    return target, head


def test_a_choice_survives_the_file(files):
    opened = open_files(*files)
    kept = {"a": parse_tree("chain:2+lookup:5"), "b": NO_TREE, "c": parse_tree("lookup:3")}
    for key, tree in kept.items():
        tuning.store_choice(files[0], key, Choice(tree, 1.5))
    for key, tree in kept.items():
        assert tuning.stored_choice(opened, key) == Choice(tree, 1.5)
    assert tuning.stored_choice(opened, "d") is None


@pytest.mark.parametrize("lookup", [0, 3])
def test_a_tuned_static_tree_has_a_name_that_tree_takes(files, tmp_path, lookup):
    paths = [[0], [1], [0, 0]]
    tree = static_tree(paths, "made while tuning")
    tree = with_lookup(tree, lookup) if lookup else tree
    choice = tuning.store_choice(files[0], "a", Choice(tree, 1.5, paths))
    again = parse_tree(choice.tree.name)
    assert again == choice.tree and replace(again, name=tree.name) == tree
    assert tuning.stored_choice(open_files(*files), "a").tree == again
    assert load(*files, tree=again.name, compile=False, max_seq_length=64).decoder.tree == again
    elsewhere = tmp_path / "moved"
    elsewhere.mkdir()
    for path in tmp_path.glob("*.*"):
        path.rename(elsewhere / path.name)
    moved = tuning.stored_choice(open_files(*(elsewhere / path.name for path in files)), "a")
    assert replace(moved.tree, name=again.name) == again and str(elsewhere) in moved.tree.name


UNUSABLE = {
    "empty": "",
    "no JSON": "{",
    "a list": "[]",
    "nested deeply": "[" * 100_000,
    "no tree": '{"version": 6, "choices": {"a": {"tree": "oak", "gain": 2}}}',
    "a number": '{"version": 6, "choices": {"a": {"tree": 7, "gain": 2}}}',
    "wider than the head": '{"version": 6, "choices": {"a": {"tree": '
    '"dynamic:nodes=400,levels=1,top_k=400", "gain": 2}}}',
    "larger than trees may be": '{"version": 6, "choices": {"a": {"tree": '
    '"dynamic:nodes=2000,levels=60,top_k=60", "gain": 2}}}',
    "a file that is gone": '{"version": 6, "choices": {"a": {"tree": "x.json", "gain": 2}}}',
    "no gain": '{"version": 6, "choices": {"a": {"tree": "none"}}}',
}


@pytest.mark.parametrize("content", UNUSABLE.values(), ids=UNUSABLE)
def test_a_choice_that_cannot_be_used_is_said_once_and_replaced(files, capsys, content):
    tuning.cache_path(files[0]).write_text(content)
    opened = open_files(*files)
    assert tuning.stored_choice(opened, "a") is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "target.tuning.json holds no usable choice" in line and len(line) < 400
    tuning.store_choice(files[0], "a", Choice(NO_TREE, 1.0))
    assert tuning.stored_choice(opened, "a").tree == NO_TREE
    assert not capsys.readouterr().err


def test_choices_of_another_version_count_as_none_without_a_word(files, capsys):
    old = {"tree": "static:nodes=4 (tuned)", "paths": [[0]], "gain": 1.2, "break_even": 1.1}
    stored = {"version": 4, "choices": {"a": old}}
    tuning.cache_path(files[0]).write_text(json.dumps(stored))
    assert tuning.stored_choice(open_files(*files), "a") is None
    assert not capsys.readouterr().err


def test_the_key_changes_with_everything_the_answer_depends_on(files):
    opened, model = open_files(*files), random_model()
    keys = {
        tuning.cache_key(opened, model, sampling, compile)
        for sampling in (GREEDY, SamplingConfig(1.0), SamplingConfig(1.0, top_k=5))
        for compile in (False, True)
    }
    model.to(torch.bfloat16)
    keys.add(tuning.cache_key(opened, model, GREEDY, True))
    for file in files:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        keys.add(tuning.cache_key(opened, model, GREEDY, True))
    assert len(keys) == 9


def test_a_model_that_stops_at_once_leaves_the_preset_and_nothing_is_kept(files, capsys):
    model, head = ending_pair(*range(24))
    opened = replace(open_files(*files), tokenizer=None, config=model.config)
    assert tuning.auto_tree(opened, model, head, GREEDY, compile=False, measure=True) is None
    assert capsys.readouterr().err.splitlines()[-1].endswith("the preset stays")
    assert not tuning.cache_path(files[0]).exists()


# ---------------------------------------------------------------- the command line


def generate(files, *extra: str) -> int:
    given = ["--checkpoint_path", str(files[0]), "--draft_checkpoint_path", str(files[1])]
    quick = "--no_compile --prompt_ids 1,2,3 --max_new_tokens 12 --ignore_eos".split()
    return main([*given, *quick, *extra])


def fixed_choice(monkeypatch, tree: str) -> list[int]:
    """Replace the measuring; returns a list that grows with every call."""
    calls = []

    def tune(*_, **__):
        calls.append(1)
        return Choice(parse_tree(tree), 1.4)

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


def test_a_head_that_the_tree_does_not_take_is_named(files, capsys):
    for tree in ("none", "lookup:3"):
        assert generate(files, "--tree", tree) == 0
        said = f"--tree {tree} takes no head: --draft_checkpoint_path has no effect"
        assert said in capsys.readouterr().err
    assert generate(files, "--tree", "chain:1") == 0
    assert "takes no head" not in capsys.readouterr().err


def test_auto_decodes_plainly_and_says_so_where_drafting_loses(files, monkeypatch, capsys):
    fixed_choice(monkeypatch, "none")
    assert generate(files, "--check") == 0
    assert "plain decoding, since nothing beats it" in capsys.readouterr().err


def test_a_stored_tree_that_the_head_cannot_fill_is_measured_again(files, monkeypatch, capsys):
    calls = fixed_choice(monkeypatch, "chain:2")
    assert generate(files) == 0
    path = tuning.cache_path(files[0])
    wide = "dynamic:nodes=400,levels=1,top_k=400"
    path.write_text(path.read_text().replace("chain:2", wide))
    capsys.readouterr()
    assert generate(files) == 0 and len(calls) == 2
    said = capsys.readouterr().err
    assert said.count("holds no usable choice") == 1 and "tree auto: chain:2" in said
    path.write_text("[" * 100_000)
    assert generate(files) == 0 and len(calls) == 3


def test_a_library_load_uses_the_preset_and_then_what_was_measured(files, monkeypatch):
    calls, options = fixed_choice(monkeypatch, "chain:2"), {"compile": False, "max_seq_length": 64}
    assert load(*files, **options).card["tree"] == "static" and not calls
    engine = load(*files, **options, tune="measure")
    assert engine.decoder.tree == parse_tree("chain:2")
    assert load(*files, **options).card["tree"] == "chain:2" and len(calls) == 1
    assert load(*files, tree="chain:1", **options).card["tree"] == "chain:1"


def test_a_directory_that_cannot_be_written_is_a_note_not_an_error(files, monkeypatch, capsys):
    fixed_choice(monkeypatch, "chain:2")
    tuning.cache_path(files[0]).mkdir()  # which no file can replace
    assert generate(files) == 0
    said = capsys.readouterr().err
    assert "cannot be kept" in said and "tree auto: chain:2" in said
