"""The benchmark: a run on tiny models gives a report of known shape, and nothing is lost."""

import json
import re
import shutil

import pytest
from tiny import GOLDEN, converted
from tiny_training import tiny_target, train, write_lines, write_target

import benchmark
from talon.measuring.methods import TalonMethod
from talon.measuring.roofline import same_acceptance
from talon.trees import parse_tree
from talon.tuning import choice as tuning
from talon.tuning.choice import Choice

METHOD = {
    "method": str,
    "target": str,
    "tree": str | None,
    "temperature": float,
    "tokens_per_s": float,
    "tokens_per_s_spread": float,
    "times_plain": float | None,
    "first_token_s": float,
    "tokens": int,
    "rounds": int,
    "acceptance_length": float,
    "accepted_by_depth": list,
    "draft_ms": float | None,
    "verify_ms": float | None,
    "rest_ms": float | None,
    "bytes_per_token": float | None,
    "bandwidth_bytes_per_s": float | None,
    "memory_bytes": int,
    "peak_memory_bytes": int | None,
    "categories": dict,
}
REPORT = {
    "argv": list,
    "device": str,
    "threads": int,
    "versions": dict,
    "commit": str | None,
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
    "bytes": float | int,
    "reading_ms": float,
    "head_level_ms": dict,
}


def check_schema(value: dict, schema: dict, also: tuple[str, ...] = ()) -> None:
    assert set(schema) <= set(value) <= set(schema) | set(also)
    for name, kind in schema.items():
        assert isinstance(value[name], kind), f"{name}: {value[name]!r}"


def check_report(report: dict) -> None:
    check_schema(report, REPORT, ("read_bytes_per_s",))
    for row in report["methods"]:
        check_schema(row, METHOD, ("ids", "rtx3090"))
    for curve in report["row_costs"]:
        check_schema(curve, CURVE)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    base, out = GOLDEN / "eagle2_tiny_seed0", tmp_path_factory.mktemp("benchmark")
    target, head = out / "target.safetensors", out / "head.safetensors"
    converted.__wrapped__(base / "target", target)
    converted.__wrapped__(base / "head", head)
    return target, head


QUICK = "--num_prompts 2 --max_new_tokens 10 --repeats 2 --no_compile --peers none".split()


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
        trees = "--tree chain:2 --tree static --ignore_eos".split()
        code = run(files, *trees, "--out", str(out))
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


def test_the_row_cost_curve_covers_the_rows_and_widths_and_reading(finished):
    report = json.loads((finished[2] / "results.json").read_text())
    (curve,) = report["row_costs"]
    assert [int(n) for n in curve["rows_ms"]] == [1, 2, 4, 8, 16, 24, 26, 32, 48, 64]
    assert all(ms > 0 for ms in curve["rows_ms"].values())
    assert list(curve["head_level_ms"]["head"]) == ["1", "4", "8", "10"]
    assert curve["reading_ms"] == pytest.approx(curve["bytes"] / report["read_bytes_per_s"] * 1e3)


def test_every_cell_is_on_disk_as_soon_as_it_is_measured(finished):
    cells = [json.loads(line) for line in (finished[2] / "cells.jsonl").read_text().splitlines()]
    assert len(cells) == 4 * 2 * 2 * 2
    turns = [cell["method"] for cell in cells[:4]], [cell["method"] for cell in cells[8:12]]
    assert turns[0] != turns[1], "the order changes from prompt to prompt"


def test_an_interruption_reports_what_was_measured(files, tmp_path, monkeypatch, capsys):
    ran, original = [], TalonMethod.start

    def interrupted(self, task):
        ran.append(self.name)
        if len(ran) == 2 * 3 + 2 * 3 * 2 + 2:  # in the second repetition
            raise KeyboardInterrupt
        return original(self, task)

    monkeypatch.setattr(TalonMethod, "start", interrupted)
    assert run(files, "--tree", "chain:2", "--out", str(tmp_path)) == 130
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    check_report(report)
    assert report["interrupted"] and report["methods"]
    assert " of repetition 1 done, about " in printed.err and " s left" in printed.err
    assert {row["tokens"] for row in report["methods"] if row["temperature"] == 0} != {0}
    turns = (len(ran) - 2 * 3) // 3  # finished ones, after the warm-up; three methods in each
    assert len((tmp_path / "cells.jsonl").read_text().splitlines()) == 3 * turns


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


def test_auto_has_a_tree_for_every_temperature_and_plain_stays_the_reference(files, monkeypatch):
    def tune(model, head, prompts, sampling, *_, **__):
        tree = "chain:2" if sampling.temperature == 0 else "none"
        return Choice(parse_tree(tree), 1.5)

    monkeypatch.setattr(tuning, "tune", tune)
    lines = []
    monkeypatch.setattr("builtins.print", lambda text="", **_: lines.append(text))
    assert run(files, "--tree", "auto", "--retune", "--ignore_eos", "--no_row_costs") == 0
    rows = json.loads(lines[-1].splitlines()[-1])["methods"]
    trees = {row["temperature"]: row["tree"] for row in rows if row["method"].endswith("auto")}
    assert trees == {0.0: "chain:2", 1.0: "none"}
    for row in rows:
        assert ("ids" in row) is not row["method"].endswith(" plain")
        assert row["times_plain"] == 1.0 or not row["method"].endswith(" plain")


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
        (("--lookahead", "5,3"), "lookahead:5,3"),
        (("--gguf", "no.gguf"), "no.gguf is no file"),
        (("--seed", str(2**63 - 1)), "seed"),
        (("--out", __file__), "is a file"),
        (("--peers", "vllm"), "vllm"),
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


# ---------------------------------------------------------------- turns, categories, answer files


@pytest.fixture(scope="module")
def with_text(tmp_path_factory):
    """A target with a tokenizer, a smaller one and Medusa heads for it, questions of two turns."""
    base = tmp_path_factory.mktemp("text")
    target = write_target(base / "target", tiny_target())
    small = write_target(base / "small", tiny_target(1, dim=16, n_layer=1, n_head=2, n_kv_head=1))
    ids = [[2 + (7 * n + i) % 9 for i in range(40)] for n in range(8)]
    data = write_lines(base / "data.jsonl", [{"ids": row, "spans": [[6, 40]]} for row in ids])
    heads = train(target, data, base / "out", "--head", "medusa", "--unroll", 2, "--epochs", 1)
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["one one", "and two"]},
        {"question_id": 82, "category": "maths", "turns": ["three"]},
        {"task_id": "HumanEval/0", "prompt": "def f(x):", "entry_point": "f", "test": ""},
    ]
    return target, small, heads, write_lines(base / "question.jsonl", rows)


def test_both_turns_categories_every_source_and_answer_files(with_text, tmp_path, capsys):
    target, small, heads, questions = with_text
    argv = ["--checkpoint_path", target, "--draft_checkpoint_path", small]
    argv += ["--draft_checkpoint_path", heads, "--tree", "preset", "--tree", "chain:3"]
    argv += ["--questions", questions, "--turns", 2, "--lookahead", "3,3,2", "--out", tmp_path]
    argv += "--num_prompts 9 --max_new_tokens 12 --repeats 1 --no_compile --peers none".split()
    argv += ["--temperature", 0, "--no_row_costs", "--ignore_eos"]
    assert benchmark.main([str(word) for word in argv]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    check_report(report)
    rows = {row["method"]: row for row in report["methods"]}
    assert "without" in printed.err and "are 2 Medusa heads" in printed.err
    assert len(rows) == 6 and rows["fp32 talon_draft preset"]["tree"] == "medusa"
    assert report["prompts"]["count"] == 4  # three, and a second turn
    for row in rows.values():
        assert set(row["categories"]) == {"all", "maths", "writing"} and row["rtx3090"] > 0
        assert row.get("ids", {}).get("identical", 4) == 4
    assert "| acceptance (tokens/s) | T | all | maths | writing |" in printed.out
    files = sorted(path.name for path in (tmp_path / "answers").iterdir())
    assert len(files) == 6 and "fp32_lookahead_3_3_2-0.jsonl" in files
    for name in files:
        check_answers(tmp_path / "answers" / name)


def check_answers(path):
    """What EAGLE's and Spec-Bench's scripts read: tokens over seconds, tokens of a round."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["question_id"] for row in rows] == [81, 82, 3]
    for row, turns in zip(rows, (2, 1, 1), strict=True):
        choice = row["choices"][0]
        assert {"index", "turns", "idxs", "new_tokens", "wall_time"} <= set(choice)
        for key in ("turns", "idxs", "new_tokens", "wall_time"):
            assert len(choice[key]) == turns
        assert choice["new_tokens"] == [12] * turns and min(choice["wall_time"]) > 0
        assert len(choice["accept_lengths"]) == sum(choice["idxs"])
        assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) - turns  # of the prompts


def test_the_same_acceptance_on_a_card_costs_what_its_source_drafts():
    fast = same_acceptance(parse_tree("lookup:4"), "", 3.0)
    found = [same_acceptance(parse_tree("chain:4"), kind, 3.0) for kind in ("medusa", "eagle1")]
    assert fast > found[0] > found[1] > same_acceptance(parse_tree("chain:4"), "model", 3.0)
