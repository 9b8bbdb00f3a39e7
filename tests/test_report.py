"""Sums, medians, tables and plots of the benchmark, from measurements that are known."""

import importlib.util
import json

import pytest
from tiny import random_model

from benchmark import compare_all, results
from talon.decoder import Decoder, RoundStats
from talon.measuring.methods import Decoded
from talon.measuring.report import (
    Cell,
    complete,
    curve_table,
    heading,
    method_table,
    speed,
    speeds,
    summarize,
    typical,
    write_reports,
)


class Method:
    """A method of ours, or a peer that names no tree."""

    own_sampler, plain, memory_bytes = False, False, 1

    def __init__(self, name: str, target: str = "fp32", tree: str | None = "none") -> None:
        self.name, self.target = name, target
        self.trees = {0.0: tree} if tree else {}


def cell(method: str, repeat: int, prompt: int, decoded: int, seconds: float, tokens=()) -> Cell:
    stats = RoundStats(prefill_s=0.5, decode_s=seconds, accepted_by_depth=[decoded // 4])
    stats.emitted, stats.rounds = decoded, max(decoded // 2, 1)
    return Cell(method, 0.0, repeat, prompt, Decoded(list(tokens), stats))


def test_speed_is_the_sum_of_tokens_over_the_sum_of_seconds():
    cells = [cell("m", 0, 0, 100, 1.0), cell("m", 0, 1, 10, 1.0), cell("m", 1, 0, 110, 4.0)]
    assert speeds(cells) == [55.0, 27.5]  # not the mean of 100 and 10


def test_a_slow_moment_of_the_machine_does_not_count():
    """Each repetition has another prompt at a tenth of the speed."""
    cells = [cell("m", r, p, 100, 10.0 if r == p else 1.0) for r in range(3) for p in range(3)]
    assert speed(typical(cells)) == 100.0
    assert speeds(cells) == [25.0] * 3
    assert speed(typical([cell("m", 0, 0, 0, 0.0)])) == 0.0
    row = summarize(Method("m"), cells, cells)
    assert row["tokens_per_s"] == 100.0 and row["times_plain"] == 1.0
    assert row["tokens"] == 300  # of one repetition


def test_a_machine_that_slows_down_does_not_change_a_ratio():
    mine = [cell("m", r, 0, 100, s) for r, s in enumerate((1.0, 2.0, 4.0))]
    plain = [cell("p", r, 0, 100, s) for r, s in enumerate((2.0, 4.0, 8.0))]
    row = summarize(Method("m"), mine, plain)
    assert row["times_plain"] == 2.0
    assert row["tokens_per_s"] == 50.0 and row["tokens_per_s_spread"] == pytest.approx(1.5)
    assert row["acceptance_length"] == 2.0


def test_only_prompts_that_every_method_finished_are_compared():
    cells = [cell("a", 0, 0, 1, 1), cell("b", 0, 0, 1, 1), cell("a", 0, 1, 1, 1)]
    assert complete(cells, 2) == cells[:2]


def test_differing_ids_are_located_with_their_gap():
    decoder = Decoder(random_model(), 64, compile=False)
    plain = [cell("p", 0, 0, 3, 1, [7, 8, 9])]
    found = compare_all([cell("m", 0, 0, 3, 1, [7, 5, 9])], plain, decoder, [[1, 2]], 0)
    assert found["identical"] == 0 and found["prompts"] == 1
    assert found["first_prompt"] == 0 and found["first_difference"] == 1
    assert isinstance(found["gap"], float)
    short = compare_all([cell("m", 0, 0, 2, 1, [7, 8])], plain, decoder, [[1, 2]], 0)
    assert short["first_difference"] == 2 and short["gap"] is None
    same = compare_all(plain, plain, decoder, [[1, 2]], 0)
    assert same["identical"] == 1 and same["first_difference"] is None


# ---------------------------------------------------------------- tables and plots


def known_report() -> dict:
    """Two targets and two other programs; the fastest head is the one of int8-dynamic."""
    rows = []
    for method, speed_ in (
        (Method("fp32 plain"), 40.0),
        (Method("fp32 head chain:2", tree="chain:2"), 50.0),
        (Method("fp32 lookup:5", tree="lookup:5"), 500.0),
        (Method("int8-dynamic plain", "int8-dynamic"), 110.0),
        (Method("int8-dynamic head auto", "int8-dynamic", "chain:3"), 150.0),
        (Method("transformers", "transformers", None), 25.0),
        (Method("transformers-lookup", "transformers-lookup", None), 26.0),
        (Method("llama.cpp Q4_1", "llama.cpp Q4_1", None), 100.0),
    ):
        cells = [cell(method.name, 0, 0, 100, 100 / speed_)]
        row = summarize(method, cells, cells)
        row["accepted_by_depth"] = [0.5, 0.25] if row["tree"] and row["tree"] != "none" else []
        rows.append(row)
    curve = {
        "target": "fp32",
        "committed": 128,
        "rows_ms": {"1": 20.0, "64": 90.0},
        "bytes": 4e8,
        "reading_ms": 10.0,
        "head_level_ms": {"head": {"1": 0.5, "4": 0.75}},
    }
    return {
        "device": "cpu",
        "versions": {"torch": "2"},
        "commit": "0123456789abcdef",
        "prompts": {"file": "q.jsonl", "count": 8},
        "max_new_tokens": 48,
        "repeats": 3,
        "interrupted": False,
        "methods": rows,
        "row_costs": [curve, curve | {"target": "int8-dynamic"}],
        "read_bytes_per_s": 40e9,
    }


def test_a_table_names_the_tree_that_auto_chose():
    table = method_table(known_report()["methods"])
    assert "| int8-dynamic head auto (chain:3) | 0 | 150.0 |" in table
    assert "| fp32 head chain:2 | 0 | 50.0 |" in table
    assert method_table([]) == curve_table([]) == ""


def test_row_costs_stand_next_to_what_reading_alone_takes():
    table = curve_table(known_report()["row_costs"])
    assert "| rows of a forward, ms | 1 | 64 | reading alone |" in table
    assert "| fp32 | 20.0 | 90.0 | 10.0 |" in table
    assert "head on fp32, ms of a draft level by its width: 0.50 at 1, 0.75 at 4" in table


def test_the_heading_says_the_conditions():
    said = heading(known_report() | {"interrupted": True})
    for part in ("cpu", "commit 0123456789", "8 prompts of q.jsonl", "40.0 GB/s", "interrupted"):
        assert part in said
    alone = heading(known_report() | {"row_costs": []})
    assert "GB/s" not in alone


def bars(report: dict) -> list[str]:
    from talon.measuring.report import speed_plot

    figure = speed_plot(report)
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_the_chart_has_five_bars():
    pytest.importorskip("matplotlib")
    assert bars(known_report()) == [
        "transformers",
        "llama.cpp Q4_1",
        "Talon fp32",
        "Talon int8-dynamic",
        "Talon int8-dynamic with a head\nchain:3",
    ]
    report = known_report()
    report["methods"] = report["methods"][:2]
    assert bars(report) == ["Talon fp32", "Talon fp32 with a head\nchain:2"]
    report["methods"] = report["methods"][:1]
    assert bars(report) == ["Talon fp32"]


def test_the_plot_of_acceptance_shows_the_first_target_with_a_label_at_every_line():
    pytest.importorskip("matplotlib")
    from talon.measuring.report import acceptance_plot

    figure = acceptance_plot(known_report())
    assert [text.get_text() for text in figure.axes[0].texts] == ["chain:2", "lookup:5"]


def test_one_run_writes_tables_and_all_plots(tmp_path):
    report = known_report()
    write_reports(tmp_path, report)
    assert json.loads((tmp_path / "results.json").read_text()) == report
    page = (tmp_path / "results.md").read_text()
    assert page.startswith(heading(report)) and curve_table(report["row_costs"]) in page
    drawn = {path.name for path in tmp_path.glob("*.png")}
    has_plots = importlib.util.find_spec("matplotlib") is not None
    assert drawn == (
        {"tokens_per_s.png", "row_costs.png", "acceptance.png"} if has_plots else set()
    )
    for name in drawn:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_run_that_measured_nothing_draws_nothing(tmp_path):
    empty = known_report() | {"methods": [], "row_costs": []}
    write_reports(tmp_path, empty)
    assert not list(tmp_path.glob("*.png"))
    assert results([], [], [], type("Args", (), {"temperature": [0.0]})) == []
