"""The benchmark: a run on tiny models gives a report of known shape, sums and medians are right,
nothing is lost.
"""

import importlib.util
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import GOLDEN, converted, cycle_table, random_model, table_head, table_model

import benchmark
import gpu_check
from model import ModelConfig
from talon import loading
from talon.decoder import Decoder
from talon.measuring import methods as peers
from talon.measuring import roofline
from talon.measuring.methods import Run, TalonMethod
from talon.measuring.report import (
    BEGIN,
    END,
    Cell,
    compare_ids,
    complete,
    read_report,
    readme_section,
    speed,
    speeds,
    summarize,
    typical,
    update_readme,
)
from talon.measuring.roofline import CARDS, PRECISIONS, SHAPES
from talon.prompts import (
    BUILT_IN,
    TUNING,
    Question,
    encode_question,
    made_up_prompts,
    read_questions,
    spread,
    tuning_prompts,
)
from talon.sampling import SamplingConfig
from talon.trees import parse_tree
from talon.tuning import choice as tuning
from talon.tuning.choice import Choice
from talon.tuning.costs import row_costs

ROOT = Path(benchmark.__file__).parent
METHOD = {
    "method": str,
    "tree": str | None,
    "temperature": float,
    "tokens_per_s": float,
    "tokens_per_s_spread": float,
    "times_plain": float | None,
    "times_plain_spread": float | None,
    "first_token_s": float,
    "tokens": int,
    "rounds": int,
    "acceptance_length": float,
    "accepted_by_depth": list,
    "draft_ms": float | None,
    "verify_ms": float | None,
    "rest_ms": float | None,
    "rest_share": float | None,
    "bytes_per_token": float | None,
    "bandwidth_bytes_per_s": float | None,
    "memory_bytes": int,
    "peak_memory_bytes": int | None,
}
REPORT = {
    "argv": list,
    "device": str,
    "threads": int,
    "versions": dict,
    "commit": str | None,
    "machine": dict,
    "interrupted": bool,
    "prompts": dict,
    "max_new_tokens": int,
    "repeats": int,
    "ignore_eos": bool,
    "methods": list,
    "row_costs": list,
}
CURVE = {
    "target": str,
    "committed": int,
    "rows_ms": dict,
    "bound_ms": dict,
    "bytes": float | int,
    "head_level_ms": dict,
}


def check_schema(value: dict, schema: dict, also: tuple[str, ...] = ()) -> None:
    assert set(schema) <= set(value) <= set(schema) | set(also)
    for name, kind in schema.items():
        assert isinstance(value[name], kind), f"{name}: {value[name]!r}"


def check_report(report: dict) -> None:
    check_schema(report, REPORT)
    for row in report["methods"]:
        check_schema(row, METHOD, ("ids",))
    for curve in report["row_costs"]:
        check_schema(curve, CURVE)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    base, out = GOLDEN / "eagle2_tiny_seed0", tmp_path_factory.mktemp("benchmark")
    target, head = out / "target.safetensors", out / "head.safetensors"
    converted.__wrapped__(base / "target", target)
    converted.__wrapped__(base / "head", head)
    return target, head


QUICK = [
    "--num_prompts",
    "2",
    "--max_new_tokens",
    "10",
    "--repeats",
    "2",
    "--no_compile",
    "--peers",
    "none",
]


def run(files, *extra: str) -> int:
    given = ["--checkpoint_path", str(files[0]), "--draft_checkpoint_path", str(files[1])]
    return benchmark.main([*given, *QUICK, *extra])


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory):
    """One run with everything, and what it printed."""
    out = tmp_path_factory.mktemp("out")
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "builtins.print",
            lambda text="", **options: lines.append(text) if "file" not in options else None,
        )
        code = run(
            files, "--tree", "chain:2", "--tree", "static", "--out", str(out), "--ignore_eos"
        )
    return code, "\n".join(lines), out


def test_a_run_prints_a_table_and_ends_with_one_json_line_of_the_known_shape(finished):
    code, printed, out = finished
    assert code == 0
    report = json.loads(printed.splitlines()[-1])
    check_report(report)
    assert report == json.loads((out / "results.json").read_text())
    names = [row["method"] for row in report["methods"]]
    assert names == 2 * ["fp32 plain", "fp32 head chain:2", "fp32 head static", "fp32 lookup:5"]
    assert [row["temperature"] for row in report["methods"]] == [0.0] * 4 + [1.0] * 4
    for name in names:
        assert re.search(rf"^\| {name} \|", printed, re.M)
    assert "| fp32 plain | 0 |" in (out / "results.md").read_text()


def test_every_method_decoded_the_same_and_drafts_kept_the_ids_at_both_temperatures(finished):
    report = json.loads((finished[2] / "results.json").read_text())
    assert len({row["tokens"] for row in report["methods"]}) == 1
    for row in report["methods"]:
        if row["tree"] != "none":
            assert row["ids"]["identical"] == row["ids"]["prompts"] == 2
        assert row["acceptance_length"] == pytest.approx(1 + sum(row["accepted_by_depth"]), abs=0.2)


def test_the_row_cost_curve_covers_the_rows_and_widths(finished):
    (curve,) = json.loads((finished[2] / "results.json").read_text())["row_costs"]
    assert [int(n) for n in curve["rows_ms"]] == [1, 2, 4, 8, 16, 24, 26, 32, 48, 64]
    assert all(ms > 0 for ms in curve["rows_ms"].values())
    assert list(curve["head_level_ms"]["head"]) == ["1", "4", "8", "10"]


def test_plots_are_written_where_matplotlib_is_installed(finished):
    pytest.importorskip("matplotlib")
    for name in ("tokens_per_s.png", "row_costs.png", "acceptance.png"):
        assert (finished[2] / name).read_bytes().startswith(b"\x89PNG")


def test_every_cell_is_on_disk_as_soon_as_it_is_measured(finished):
    cells = [json.loads(line) for line in (finished[2] / "cells.jsonl").read_text().splitlines()]
    assert len(cells) == 4 * 2 * 2 * 2
    turns = [cell["method"] for cell in cells[:4]], [cell["method"] for cell in cells[8:12]]
    assert turns[0] != turns[1], "the order changes from prompt to prompt"


def test_an_interruption_reports_what_was_measured(files, tmp_path, monkeypatch, capsys):
    ran, original = [], TalonMethod.start

    def interrupted(self, *args):
        ran.append(self.name)
        if len(ran) == 2 * 3 + 2 * 3 * 2 + 2:  # in the second repetition
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(TalonMethod, "start", interrupted)
    assert run(files, "--tree", "chain:2", "--out", str(tmp_path)) == 130
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    check_report(report)
    assert report["interrupted"] and report["methods"]
    assert {row["tokens"] for row in report["methods"] if row["temperature"] == 0} != {0}
    turns = (len(ran) - 2 * 3) // 3  # finished ones, after the warm-up; three methods in each
    assert len((tmp_path / "cells.jsonl").read_text().splitlines()) == 3 * turns


def test_results_go_into_the_marked_section_of_a_readme(finished, files, tmp_path):
    report = json.loads((finished[2] / "results.json").read_text())
    page = tmp_path / "README.md"
    page.write_text(f"# A\n{BEGIN}\nold\n{END}\nafter\n")
    update_readme(page, readme_section(report))
    update_readme(page, readme_section(report))
    text = page.read_text()
    assert text.startswith(f"# A\n{BEGIN}\n{report['device']}") and text.endswith(
        f"\n{END}\nafter\n"
    )
    assert "old" not in text and text.count("| fp32 plain |") == 1
    assert re.search(r"^\| method .* tokens/s at T 1 \| ids as plain \|$", text, re.M)
    assert "python benchmark.py --checkpoint_path" in text and "| fp32, ms |" in text
    for text in ("", f"{END}\n{BEGIN}", f"{BEGIN}\n{BEGIN}\n{END}", f"{BEGIN}{END}{BEGIN}{END}"):
        page.write_text(text)
        with pytest.raises(ValueError, match=f"add the lines {BEGIN} and {END}, each once"):
            run(files, "--readme", str(page))
        assert page.read_text() == text


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": 1}', "[" * 10**5, "\xff"])
def test_what_is_no_report_is_refused_by_name(tmp_path, text):
    (tmp_path / "r.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"r\.json is no results\.json"):
        read_report(tmp_path / "r.json")


def test_targets_of_one_name_are_told_apart(files, tmp_path, capsys):
    copies = [tmp_path / name / files[0].name for name in "ab"]
    for copy in copies:
        copy.parent.mkdir()
        shutil.copy(files[0], copy)
    given = [word for copy in copies for word in ("--checkpoint_path", str(copy))]
    assert run(files, *given, "--tree", "chain:2", "--no_row_costs", "--ignore_eos") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["methods"]
    assert len({row["method"] for row in found}) == 9 and len(found) == 18
    with pytest.raises(ValueError, match="given twice"):
        run(files, "--checkpoint_path", str(files[0]))


def test_the_row_cost_curve_can_be_measured_alone(files, tmp_path, capsys):
    assert run(files, "--no_decoding", "--out", str(tmp_path)) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    check_report(report)
    assert report["methods"] == [] and len(report["row_costs"]) == 1
    assert "128 cached tokens" in (tmp_path / "results.md").read_text()


# ---------------------------------------------------------------- arithmetic


class Method:
    name, memory_bytes, trees = "m", 1, {0.0: "none"}


def cell(method: str, repeat: int, prompt: int, decoded: int, seconds: float, tokens=()) -> Cell:
    run_ = Run(list(tokens), 0.5, seconds, decoded, max(decoded // 2, 1), [decoded // 4])
    return Cell(method, 0.0, repeat, prompt, run_)


def test_speed_is_the_sum_of_tokens_over_the_sum_of_seconds():
    cells = [cell("m", 0, 0, 100, 1.0), cell("m", 0, 1, 10, 1.0), cell("m", 1, 0, 110, 4.0)]
    assert speeds(cells) == [55.0, 27.5]  # not the mean of 100 and 10


def test_a_slow_moment_of_the_machine_does_not_count():
    """Each repetition has another prompt at a tenth of the speed."""
    cells = [cell("m", r, p, 100, 10.0 if r == p else 1.0) for r in range(3) for p in range(3)]
    assert speed(typical(cells)) == 100.0
    assert speeds(cells) == [25.0] * 3
    assert speed(typical([cell("m", 0, 0, 0, 0.0)])) == 0.0
    row = summarize(Method(), cells, cells)
    assert row["tokens_per_s"] == 100.0 and row["times_plain"] == 1.0
    assert row["tokens"] == 300  # of one repetition


def test_a_machine_that_slows_down_does_not_change_a_ratio():
    mine = [cell("m", r, 0, 100, s) for r, s in enumerate((1.0, 2.0, 4.0))]
    plain = [
        cell("p", r, 0, 100, s) for r, s in enumerate((2.0, 4.0, 8.0))
    ]  # the machine slowed down: ratio 2
    row = summarize(Method(), mine, plain)
    assert row["times_plain"] == 2.0 and row["times_plain_spread"] == 0.0
    assert row["tokens_per_s"] == 50.0 and row["tokens_per_s_spread"] == pytest.approx(1.5)
    assert row["acceptance_length"] == 2.0


def test_only_prompts_that_every_method_finished_are_compared():
    methods = [type("A", (), {"name": "a"}), type("B", (), {"name": "b"})]
    cells = [cell("a", 0, 0, 1, 1), cell("b", 0, 0, 1, 1), cell("a", 0, 1, 1, 1)]
    assert complete(cells, methods) == cells[:2]


def test_differing_ids_are_located_with_their_gap():
    model = random_model()
    decoder = Decoder(model, 64, compile=False)
    plain = [cell("p", 0, 0, 3, 1, [7, 8, 9])]
    found = compare_ids([cell("m", 0, 0, 3, 1, [7, 5, 9])], plain, decoder, [[1, 2]], 0)
    assert (
        found["identical"] == 0
        and found["first_difference"] == 1
        and isinstance(found["gap"], float)
    )
    short = compare_ids([cell("m", 0, 0, 2, 1, [7, 8])], plain, decoder, [[1, 2]], 0)
    assert short["first_difference"] == 2 and short["gap"] is None


# ---------------------------------------------------------------- questions


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


GOOD = '{"question_id": 1, "category": "a", "turns": ["Hello", "And then?"]}'


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"question_id": 1, "turns": ["x"]}', "category is missing"),
        ('{"category": "a"}', "question_id, turns is missing"),
        ('{"question_id": 1, "category": "a", "turns": []}', "at least one text"),
        ('{"question_id": 1, "category": "a", "turns": "x"}', "at least one text"),
        ('{"question_id": 1, "category": "a", "turns": [5]}', "at least one text"),
        ('{"question_id": 1, "category": "a", "turns": ["  "]}', "first turn is empty"),
        ('{"question_id": null, "category": "a", "turns": ["x"]}', "question_id must be"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line, problem):
    questions, problems = read_questions(write_lines(tmp_path / "q.jsonl", GOOD, "", line, GOOD))
    assert [q.line for q in questions] == [1, 4] and questions[0].text == "Hello"
    assert len(problems) == 1 and "line 3" in problems[0] and problem in problems[0]


def test_unreadable_question_files_are_one_line(tmp_path):
    with pytest.raises(ValueError, match="empty"):
        read_questions(write_lines(tmp_path / "e.jsonl", ""))
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="UTF-8"):
        read_questions(tmp_path / "b.jsonl")
    with pytest.raises(OSError):
        read_questions(tmp_path / "absent.jsonl")


class Words:
    """A tokenizer stand-in: one id a word."""

    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return [1] * len(text.split())

    def encode_chat(self, messages: list[dict]) -> list[int]:
        return [0, *self.encode(messages[0]["content"])]


def prompts_from(files, path, monkeypatch, *extra):
    monkeypatch.setattr(loading, "find_tokenizer", lambda *_: Words())
    args = benchmark.parse_args(
        ["--checkpoint_path", str(files[0]), "--questions", str(path), *extra]
    )
    return benchmark.read_prompts(args)


def test_bad_and_too_long_questions_are_refused_or_skipped_as_the_flag_says(
    files, tmp_path, monkeypatch, capsys
):
    long = json.dumps({"question_id": 2, "category": "b", "turns": ["word " * 600]})
    for bad, said in (
        ("{", "line 2: not JSON"),
        (long, "line 2: 601 tokens and 10 new ones do not fit"),
    ):
        path = write_lines(tmp_path / "q.jsonl", GOOD, bad)
        with pytest.raises(ValueError, match=f"{said}.*--bad_questions skip"):
            prompts_from(files, path, monkeypatch, "--max_new_tokens", "10")
        prompts, skipped = prompts_from(
            files, path, monkeypatch, "--max_new_tokens", "10", "--bad_questions", "skip"
        )
        assert prompts == [[0, 1]] and len(skipped) == 1
        assert said in capsys.readouterr().err
    path = write_lines(tmp_path / "q.jsonl", "{")
    with pytest.raises(ValueError, match="no usable question"):
        prompts_from(files, path, monkeypatch, "--bad_questions", "skip")


def test_the_built_in_set_has_32_prompts_of_six_categories():
    questions, problems = read_questions(BUILT_IN)
    assert len(questions) == 32 and not problems
    assert {q.category for q in questions} == {
        "chat",
        "code",
        "maths",
        "summary",
        "translation",
        "retrieval",
    }
    assert len({q.text for q in questions}) == len({q.question_id for q in questions}) == 32
    assert {q.category for q in spread(questions, 6)} == {q.category for q in questions}


def test_spread_takes_from_every_category_in_turn_and_keeps_the_order():
    questions = [Question(i, i, category, "x") for i, category in enumerate("aaabbc")]
    assert [q.question_id for q in spread(questions, 4)] == [0, 1, 3, 5]
    assert spread(questions, 99) == questions


def test_prompts_without_a_tokenizer_stay_inside_vocabulary_and_length():
    prompts = made_up_prompts(50, 3, 10)
    assert (
        len(prompts) == 3
        and all(0 <= i < 50 for p in prompts for i in p)
        and max(map(len, prompts)) <= 10
    )
    assert encode_question(Question(1, 1, "a", "one two"), Words()) == [0, 1, 1]


# ---------------------------------------------------------------- peers


def test_a_peer_that_is_not_installed_is_named_with_the_command_that_installs_it(
    files, monkeypatch, capsys
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="llama.cpp is not installed: pip install"):
        run(files, "--peers", "llama.cpp")
    said = []
    assert peers.open_peers(list(peers.NAMES), pytest.fail, said.append, strict=False) == []
    assert len(said) == 3 and all("pip install" in line for line in said)


def test_unknown_and_impossible_peers_are_one_line(files, monkeypatch):
    with pytest.raises(ValueError, match="vllm.*is not known.*llama.cpp"):
        run(files, "--peers", "vllm")
    with pytest.raises(ValueError, match="GGUF"):
        peers.open_peer("llama.cpp", files[0], None, 64, 1, {})
    with pytest.raises(ValueError, match="config.json"):
        peers.open_peer("transformers", files[0], None, 64, 1, {})


class Peer:
    """A peer whose answers are known."""

    name, memory_bytes = "peer", 7

    def run(self, ids, sampling, budget, stop_ids) -> Run:
        return Run([1] * budget, 0.1, 0.5, budget - 1, budget - 1)


def test_a_peer_stands_in_the_table_beside_ours(files, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "open_peers", lambda *_: [Peer()])
    assert run(files, "--tree", "chain:2", "--no_row_costs", "--ignore_eos", "--lookup", "0") == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    check_report(report)
    row = next(
        row for row in report["methods"] if row["method"] == "peer" and row["temperature"] == 0
    )
    assert (
        row["tokens_per_s"] == 18.0
        and row["draft_ms"] is None
        and row["bandwidth_bytes_per_s"] is None
    )
    assert row["times_plain"] > 0 and row["ids"]["identical"] == 0
    other = next(
        row for row in report["methods"] if row["method"] == "peer" and row["temperature"] == 1
    )
    assert "ids" not in other, "another sampler: its ids mean nothing"


@pytest.mark.slow
def test_transformers_gives_our_greedy_ids_and_counts_its_forwards():
    pytest.importorskip("transformers")
    base = GOLDEN / "eagle2_tiny_seed0" / "target"
    shared: dict = {}
    plain, lookup = (
        peers.open_peer(n, base / "x", None, 64, 1, shared)
        for n in ("transformers", "transformers-lookup")
    )
    assert plain.model is lookup.model
    ids, budget = [1, 2, 3, 1, 2, 3], 20
    first = plain.run(ids, SamplingConfig(), budget, frozenset())
    second = lookup.run(ids, SamplingConfig(), budget, frozenset())
    assert first.tokens == second.tokens and len(first.tokens) == budget
    assert first.rounds == first.decoded == budget - 1
    assert second.rounds <= second.decoded


# ---------------------------------------------------------------- bounds


def test_predictions_follow_the_stated_formulas():
    card, shape = CARDS["rtx3090"], SHAPES["LLaMA-2-7B"]
    assert shape.parameters == 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096 == 6_607_077_376
    alone = roofline.target_seconds(shape, "bf16", 1, card)
    assert alone == pytest.approx((2 * shape.parameters + 1024 * 524288) / (0.9 * 936e9))
    many = roofline.target_seconds(shape, "int4", 64, card)
    assert many == pytest.approx(2 * shape.parameters * 64 / (0.9 * 71.2e12)), (
        "int4 at 64 rows is bound by products"
    )
    rows = roofline.predict(card)
    assert len(rows) == len(PRECISIONS) * (4 + len(roofline.PUBLISHED))
    drafted = next(
        r
        for r in rows
        if r["model"] == "LLaMA-3.1-8B" and r["precision"] == "bf16" and r["draft"] == "EAGLE-3"
    )
    assert drafted["tokens_per_s"] == pytest.approx(6.13 / (drafted["round_ms"] / 1e3))
    assert not next(r for r in rows if r["model"] == "Vicuna-13B" and r["precision"] == "bf16")[
        "fits"
    ]


def test_the_roofline_needs_no_model_and_knows_its_cards(capsys):
    assert benchmark.main(["--roofline", "rtx3090"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(json.loads(lines[-1])["predictions"]) == len(roofline.predict(CARDS["rtx3090"]))
    with pytest.raises(ValueError, match="rtx9999.*rtx3090"):
        benchmark.main(["--roofline", "rtx9999"])


def test_bounds_of_this_machine_are_positive_and_a_bound_is_the_larger_of_two():
    device = torch.device("cpu")
    assert roofline.copy_bandwidth(device, 1 << 20) > 0
    assert roofline.product_rate(device, torch.float32, 64) > 0
    assert (
        roofline.bound(100.0, 10.0, 10.0, 10.0) == 10.0
        and roofline.bound(10.0, 100.0, 10.0, 10.0) == 10.0
    )


def test_integers_bound_the_products_of_quantised_modes_where_they_do_them():
    machine = {"product_ops_per_s": 3.0, "int8_ops_per_s": 12.0}
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    modes = ("", "fp32", "int8", "int8-dynamic", "int4")
    assert [roofline.mode_rate(mode, cpu, machine) for mode in modes] == [3, 3, 6, 12, 6]
    assert [roofline.mode_rate(mode, gpu, machine) for mode in modes] == [3, 3, 3, 12, 3]
    slow = machine | {"int8_ops_per_s": 1.0}
    assert roofline.mode_rate("int8-dynamic", cpu, slow) == 3


def test_row_costs_leave_the_decoder_as_it_was():
    decoder = Decoder(random_model(), 64, compile=False)
    before = decoder.length.clone()
    assert [set(rows) for rows in row_costs([decoder], (1, 3), 20)] == [{1, 3}]
    assert torch.equal(decoder.length, before)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (("--repeats", "0"), "repeats 0"),
        (("--max_new_tokens", "1"), "max_new_tokens 1"),
        (("--num_prompts", "0"), "num_prompts 0"),
        (("--threads", "9999"), "threads 9999"),
        (("--retune", "--tree", "chain:2"), "--tree auto"),
        (("--no_decoding", "--no_row_costs"), "leave nothing to measure"),
        (("--no_decoding", "--tree", "chain:2"), "leave out --tree"),
        (("--lookup", "65"), "lookup 65"),
        (("--gguf", "no.gguf"), "no.gguf is no file"),
        (("--seed", str(2**63 - 1)), "seed"),
        (("--out", __file__), "is a file"),
        (("--readme", __file__), "each once"),
        (("--temperature", "-1"), "temperature -1"),
        (("--tree", "oak"), "oak"),
        (("--questions", "/nowhere/q.jsonl"), "tokenizer"),
    ],
)
def test_bad_flags_are_refused_in_one_line(files, extra, said):
    with pytest.raises((ValueError, OSError), match=re.escape(said)) as caught:
        run(files, *extra)
    assert "\n" not in str(caught.value)


def test_a_refused_run_leaves_earlier_results_alone(files, tmp_path):
    (tmp_path / "cells.jsonl").write_text("kept\n")
    with pytest.raises((ValueError, OSError)):
        run(files, "--draft_checkpoint_path", "/nowhere/h.safetensors", "--out", str(tmp_path))
    assert (tmp_path / "cells.jsonl").read_text() == "kept\n"


def test_a_tree_without_a_head_is_refused(files):
    with pytest.raises(ValueError, match="--draft_checkpoint_path"):
        benchmark.main(["--checkpoint_path", str(files[0]), "--tree", "static"])


# ---------------------------------------------------------------- the GPU check, its logic on a CPU

TINY = ModelConfig(
    vocab_size=160,
    dim=128,
    n_layer=2,
    n_head=4,
    n_kv_head=4,
    head_dim=32,
    intermediate_size=256,
    norm_eps=1e-5,
    max_seq_length=256,
)
PLAN = gpu_check.Plan(
    config=TINY,
    modes=(None, "int4"),
    trees=("none", "chain:4"),
    kernel_shapes=((128, 128),),
    tokens=33,
    context=128,
    compile=False,
    tests=False,
    demo=Path("absent"),
)


def test_the_gpu_check_runs_every_section_and_writes_both_files(tmp_path, capsys):
    assert gpu_check.check(torch.device("cpu"), tmp_path, PLAN) == 0
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert list(report["sections"]) == ["kernels", "decoding unquantised", "decoding int4", "demo"]
    for name in ("decoding unquantised", "decoding int4"):
        plain, drafted = report["sections"][name]
        assert plain["ids_as_made"] and drafted["ids_as_made"] and drafted["ids_as_plain"]
        assert plain["acceptance_length"] == 1 and drafted["acceptance_length"] > 3
        assert drafted["bound_ms"] > 0 and drafted["replays_per_round"] is None
    text = (tmp_path / "gpu_check.md").read_text()
    assert (
        "chain:4" in text
        and "int8-dynamic | 128 x 128" in text
        and capsys.readouterr().out.strip() == text.strip()
    )


def test_a_failing_section_is_recorded_and_the_next_one_runs(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel\nat all")

    monkeypatch.setattr(gpu_check, "check_kernels", broken)
    assert (
        gpu_check.check(torch.device("cpu"), tmp_path, gpu_check.smaller(PLAN, modes=(None,))) == 1
    )
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["failures"] == {"kernels": "RuntimeError: no such kernel at all"}
    assert "decoding unquantised" in report["sections"]
    assert "FAILED kernels" in (tmp_path / "gpu_check.md").read_text()


def test_no_section_begins_after_the_deadline(tmp_path):
    assert (
        gpu_check.check(torch.device("cpu"), tmp_path, gpu_check.smaller(PLAN, deadline_s=-1.0))
        == 1
    )
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert not report["sections"] and len(report["failures"]) == 4


def test_launches_are_counted_per_round():
    calls = {
        "cudaGraphLaunch": 40,
        "cudaEventSynchronize": 40,
        "cudaMemcpyAsync": 40,
        "cudaLaunchKernel": 4,
        "aten::mm": 9,
    }
    assert gpu_check.launches(calls, 40) == {
        "replays_per_round": 1.0,
        "launches_per_round": 0.1,
        "waits_per_round": 1.0,
    }


def test_wrong_ids_and_extra_replays_fail_the_check():
    row = {"tree": "chain:4", "ids_as_plain": False, "replays_per_round": 2.0}
    wrong = gpu_check.verdicts(
        {"decoding int8": [row], "tests": {"passed": False, "summary": "1 failed"}, "demo": {}}
    )
    assert len(wrong) == 3
    assert not gpu_check.verdicts(
        {"decoding int8": [row | {"ids_as_plain": True, "replays_per_round": 1.0}]}
    )


def test_the_gpu_check_needs_a_gpu(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(ValueError, match="needs a GPU"):
        gpu_check.main(["--out", str(tmp_path)])


def test_the_made_up_head_is_wrong_exactly_after_every_fourth_token():
    model = gpu_check.shaped_target(TINY, None, torch.device("cpu"), torch.float32)
    head = gpu_check.shaped_head(model, torch.device("cpu"), torch.float32)
    tokens = torch.arange(20)
    features = torch.zeros(20, TINY.dim)
    hidden = head.fc(torch.cat((model.tok_embeddings(tokens), features), -1))
    guesses = head.output(hidden).argmax(-1)
    right = guesses == (tokens + 1) % TINY.dim
    assert torch.equal(right, tokens % 4 != 0)


def chain_method(name: str, tree: str) -> TalonMethod:
    model = table_model(cycle_table(24))
    decoder = Decoder(model, 64, table_head(model), parse_tree(tree), compile=False)
    return TalonMethod(name, "g", {0.0: decoder})


def test_a_method_reports_its_own_tree_and_memory():
    method = chain_method("m", "chain:3")
    (run_,) = benchmark.run_in_turns([method], [1, 2], SamplingConfig(), 20, frozenset())
    assert run_.tokens == [(3 + i) % 24 for i in range(20)]
    assert run_.rounds == 5 and run_.decoded == 19 and run_.accepted_by_depth[0] == 5
    assert method.trees == {0.0: "chain:3"}
    layers = method.decoders[0.0].model.layers
    assert method.memory_bytes > sum(p.numel() * 4 for p in layers.parameters())


def test_methods_of_one_target_take_turns_in_a_text(monkeypatch):
    order, launch = [], Decoder.launch
    methods = [chain_method("a", "chain:3"), chain_method("b", "chain:1")]
    names = {id(method.decoders[0.0]): method.name for method in methods}

    def seen(self, *args):
        order.append(names[id(self)])
        return launch(self, *args)

    monkeypatch.setattr(Decoder, "launch", seen)
    long, short = benchmark.run_in_turns(methods, [1, 2], SamplingConfig(), 9, frozenset())
    assert long.tokens == short.tokens and (long.rounds, short.rounds) == (2, 4)
    assert order == list("abbabb")


def test_a_table_names_every_tree_that_auto_chose(finished):
    report = json.loads((finished[2] / "results.json").read_text())
    rows = [row | {"method": "fp32 head auto"} for row in report["methods"][1::4]]
    assert "| fp32 head auto (chain:2) |" in readme_section(report | {"methods": rows})
    rows[1]["tree"] = "none"
    assert "| fp32 head auto (chain:2; T 1: none) |" in readme_section(report | {"methods": rows})


def test_the_tuning_prompts_are_not_those_of_the_benchmark():
    tuning_set, problems = read_questions(TUNING)
    assert len(tuning_set) == 24 and not problems
    measured, _ = read_questions(BUILT_IN)
    assert not {q.text for q in tuning_set} & {q.text for q in measured}
    prompts = tuning_prompts(None, replace(TINY, max_seq_length=20))
    assert len(prompts) == 24 and {len(ids) for ids in prompts} == {10}


def test_auto_has_a_tree_for_every_temperature_and_plain_stays_the_reference(files, monkeypatch):
    def tune(model, head, prompts, sampling, *_, **__):
        tree = "chain:2" if sampling.temperature == 0 else "none"
        return Choice(parse_tree(tree), 1.5, 1.2, {"paths": None})

    monkeypatch.setattr(tuning, "tune", tune)
    lines = []
    monkeypatch.setattr("builtins.print", lambda text="", **_: lines.append(text))
    assert run(files, "--tree", "auto", "--retune", "--ignore_eos", "--no_row_costs") == 0
    rows = json.loads(lines[-1])["methods"]
    trees = {row["temperature"]: row["tree"] for row in rows if row["method"].endswith("auto")}
    assert trees == {0.0: "chain:2", 1.0: "none"}
    for row in rows:
        assert ("ids" in row) is not row["method"].endswith(" plain")
        assert row["times_plain"] == 1.0 or not row["method"].endswith(" plain")
