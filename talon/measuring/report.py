"""What the benchmark says: sums and medians of its measurements, tables for people, three plots.

Leaves out: measuring (benchmark.py)."""

import importlib.util
import itertools
import json
import math
import platform
import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from talon.cli import note
from talon.measuring.methods import Decoded, Peer, TalonMethod
from talon.prompts import Question
from talon.records import markdown_table, short_commit
from talon.writing import atomic_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# ---------------------------------------------------------------- sums and medians


@dataclass(frozen=True)
class Cell:
    """One measurement and where it belongs."""

    method: str
    temperature: float
    repeat: int
    prompt: int
    run: Decoded


def complete(cells: list[Cell], methods: int) -> list[Cell]:
    """The cells of prompts that every method has finished: an interruption leaves others, too."""
    done = Counter((cell.temperature, cell.repeat, cell.prompt) for cell in cells)
    return [cell for cell in cells if done[cell.temperature, cell.repeat, cell.prompt] == methods]


def grouped(cells: list[Cell], name: str) -> list[list[Decoded]]:
    """The runs of each repetition or of each prompt."""
    groups: dict[int, list[Decoded]] = {}
    for cell in cells:
        groups.setdefault(getattr(cell, name), []).append(cell.run)
    return list(groups.values())


def speeds(cells: list[Cell]) -> list[float]:
    """Tokens per second of each repetition."""
    return [speed(runs) for runs in grouped(cells, "repeat")]


def typical(cells: list[Cell]) -> list[Decoded]:
    """Of every prompt the repetition of median speed: a machine that others use too is slow for
    seconds at a time, which is a prompt, not all of them."""
    decoded = [cell for cell in cells if cell.run.stats.emitted]
    return [
        sorted(runs, key=lambda run: run.stats.decode_s / run.stats.emitted)[len(runs) // 2]
        for runs in grouped(decoded, "prompt")
    ]


def speed(runs: list[Decoded]) -> float:
    """Tokens per second: sum of tokens over sum of seconds."""
    return ratio(sum(run.stats.emitted for run in runs), sum(run.stats.decode_s for run in runs))


def ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


def summarize(method: TalonMethod | Peer, cells: list[Cell], plain: list[Cell]) -> dict:
    """One method at one temperature, from the typical repetition of every prompt; the spreads are
    those of whole repetitions, as a share of their median. `plain` holds the cells of its target's
    plain decoding."""
    runs, repeats = typical(cells), speeds(cells)
    stats = [run.stats for run in runs]
    rounds, decoded = sum(s.rounds for s in stats), sum(s.emitted for s in stats)
    decode_s = sum(s.decode_s for s in stats)
    draft_s, verify_s = sum(s.draft_s for s in stats), sum(s.verify_s for s in stats)
    moved = sum(run.moved_bytes for run in runs)
    by_depth = map(sum, itertools.zip_longest(*(s.accepted_by_depth for s in stats), fillvalue=0))

    def per_round(seconds: float) -> float | None:
        return seconds / rounds * 1e3 if verify_s and rounds else None

    return {
        "method": method.name,
        "target": method.target,
        "tree": method.trees.get(cells[0].temperature),
        "temperature": cells[0].temperature,
        "tokens_per_s": speed(runs),
        "tokens_per_s_spread": ratio(max(repeats) - min(repeats), statistics.median(repeats)),
        "times_plain": ratio(speed(runs), speed(typical(plain))) or None,
        "first_token_s": statistics.median(cell.run.stats.prefill_s for cell in cells),
        "tokens": decoded,
        "rounds": rounds,
        "acceptance_length": ratio(decoded, rounds),
        "accepted_by_depth": [count / rounds for count in by_depth] if rounds else [],
        "draft_ms": per_round(draft_s),
        "verify_ms": per_round(verify_s),
        "rest_ms": per_round(decode_s - draft_s - verify_s),
        "bytes_per_token": ratio(moved, decoded) or None,
        "bandwidth_bytes_per_s": ratio(moved, decode_s) or None,
        "memory_bytes": method.memory_bytes,
        "peak_memory_bytes": max(cell.run.peak_memory_bytes for cell in cells) or None,
    }


def by_category(cells: list[Cell], questions: list[Question]) -> dict[str, dict]:
    """Acceptance length and speed of a method on the prompts of each category."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(questions[cell.prompt].category or "all", []).append(cell)
    found = {}
    for category, group in sorted(groups.items()):
        stats = [run.stats for run in typical(group)]
        length = ratio(sum(s.emitted for s in stats), sum(s.rounds for s in stats))
        found[category] = {"acceptance_length": length, "tokens_per_s": speed(typical(group))}
    return found


# ---------------------------------------------------------------- tables


# Heading, field, format, and the factor that the heading's unit asks for. What is not known is left
# empty.
COLUMNS = (
    ("T", "temperature", "g", 1),
    ("tokens/s", "tokens_per_s", ".1f", 1),
    ("spread", "tokens_per_s_spread", ".1%", 1),
    ("x plain", "times_plain", ".2f", 1),
    ("first token ms", "first_token_s", ".0f", 1e3),
    ("accept.", "acceptance_length", ".2f", 1),
    ("draft ms", "draft_ms", ".2f", 1),
    ("verify ms", "verify_ms", ".2f", 1),
    ("rest ms", "rest_ms", ".2f", 1),
    ("GB/s", "bandwidth_bytes_per_s", ".1f", 1e-9),
    ("MB/token", "bytes_per_token", ".0f", 1e-6),
    ("memory GB", "memory_bytes", ".2f", 1e-9),
)


def is_auto(row: dict) -> bool:
    return row["method"].endswith(" auto")


def same_text(ids: dict | None) -> str:
    if ids is None:
        return ""
    if ids["identical"] == ids["prompts"]:
        return "all"
    gap = f", gap {ids['gap']:.2g}" if ids["gap"] is not None else ""
    return f"{ids['identical']} of {ids['prompts']}{gap}"


def method_table(rows: list[dict]) -> str:
    """Markdown for people: one line a method and temperature."""
    lines = [["method", *(name for name, *_ in COLUMNS), "ids as plain"]]
    for row in rows:
        name = f"{row['method']} ({row['tree']})" if is_auto(row) else row["method"]
        cells = [(row[key], form, factor) for _, key, form, factor in COLUMNS]
        shown = ["" if value is None else format(value * f, form) for value, form, f in cells]
        lines.append([name, *shown, same_text(row.get("ids"))])
    return markdown_table(lines) if rows else ""


def category_table(rows: list[dict]) -> str:
    """Markdown: acceptance length, and tokens per second, by category; what an RTX 3090 is
    predicted to do with an 8B of this acceptance (roofline.py). Empty for one category."""
    names = list(rows[0].get("categories", ())) if rows else []
    if len(names) < 2:
        return ""
    lines = [["acceptance (tokens/s)", "T", *names, "8B on a 3090, predicted"]]
    for row in rows:
        found = (row["categories"].get(name) for name in names)
        shown = [
            f"{c['acceptance_length']:.2f} ({c['tokens_per_s']:.0f})" if c else "" for c in found
        ]
        card = f"{row['rtx3090']:.0f}" if "rtx3090" in row else ""
        lines.append([row["method"], f"{row['temperature']:g}", *shown, card])
    return markdown_table(lines)


def curve_table(curves: list[dict]) -> str:
    """Markdown: milliseconds of a forward by its rows and of reading alone, and of draft levels."""
    if not curves:
        return ""
    counts = list(curves[0]["rows_ms"])
    lines = [["rows of a forward, ms", *map(str, counts), "reading alone"]]
    for curve in curves:
        values = [*(curve["rows_ms"][n] for n in counts), curve["reading_ms"]]
        lines.append([curve["target"], *(f"{ms:.1f}" for ms in values)])
    found = [markdown_table(lines)]
    for curve in curves:
        for name, levels in curve["head_level_ms"].items():
            costs = ", ".join(f"{ms:.2f} at {width}" for width, ms in levels.items())
            found.append(f"{name} on {curve['target']}, ms of a draft level by its width: {costs}")
    return "\n\n".join(found)


def heading(report: dict) -> str:
    """What was measured, where and with what: a table without it means nothing."""
    prompts, versions = report["prompts"], report["versions"]
    parts = [f"{report['device']}, torch {versions['torch']}, commit {short_commit(report)}"]
    if prompts["count"]:
        parts.append(
            f"{prompts['count']} prompts of {prompts['file']}, {report['max_new_tokens']} tokens "
            f"at most, {report['repeats']} repetitions"
        )
    if report["row_costs"]:
        committed, rate = report["row_costs"][0]["committed"], report["read_bytes_per_s"] / 1e9
        parts.append(f"row costs behind {committed} cached tokens, reading at {rate:.1f} GB/s")
    return "; ".join([*parts, "interrupted"] if report["interrupted"] else parts)


def page(report: dict) -> str:
    """All of it for people."""
    rows = report["methods"]
    parts = heading(report), method_table(rows), category_table(rows)
    parts = *parts, curve_table(report["row_costs"])
    return "\n\n".join(filter(None, parts))


def versions() -> dict:
    """Of everything whose speed shows in the table."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    peers = {name: sys.modules.get(name) for name in ("transformers", "llama_cpp")}
    return found | {name: module.__version__ for name, module in peers.items() if module}


def write_reports(out: Path, report: dict) -> None:
    """results.json (one line), results.md and, where matplotlib is installed, the plots."""
    with atomic_file(out / "results.json") as file:
        file.write(json.dumps(report).encode() + b"\n")
    with atomic_file(out / "results.md") as file:
        file.write(f"{page(report)}\n".encode(errors="backslashreplace"))
    if importlib.util.find_spec("matplotlib") is None:
        note("without plots: matplotlib is not installed: pip install matplotlib")
        return
    for name, plot in PLOTS.items():
        figure = plot(report)
        if figure is not None:
            with atomic_file(out / f"{name}.png") as file:
                figure.savefig(file, format="png", dpi=120, bbox_inches="tight")
            note(f"wrote {out / name}.png")


# ---------------------------------------------------------------- plots

# Told apart by colour-blind readers too.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GRAY = "#999999"


def new_figure(report: dict, title: str) -> "tuple[Figure, Axes]":
    """Without pyplot, which would want a display and keep every figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4))
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    caption = f"{report['device']}, commit {short_commit(report)}"
    figure.text(0.9, -0.02, caption, ha="right", va="top", fontsize=8, color="#555555")
    return figure, axes


def draw_lines(axes: "Axes", lines: list[tuple[str, list, list]], side: int) -> None:
    """Draw lines (name, x, y) and write every name at its line's right end (side 1) or left end
    (-1); names that would overlap are moved up."""
    ends = []
    for color, (name, x, y) in zip(itertools.cycle(COLORS), lines, strict=False):
        axes.plot(x, y, marker="o", ms=4, color=color)
        end = -1 if side > 0 else 0
        ends.append((y[end], x[end], name, color))
    axes.autoscale_view()
    points, lowest = 72 / axes.figure.dpi, -math.inf
    for y, x, name, color in sorted(ends):
        height = axes.transData.transform((x, y))[1] * points
        lowest = max(height, lowest + 11)
        away = {"xytext": (8 * side, lowest - height), "textcoords": "offset points"}
        places = {"ha": "left" if side > 0 else "right", "va": "center"}
        axes.annotate(name, (x, y), **away, **places, fontsize=9, color=color)


def first_temperature(report: dict) -> list[dict]:
    """What was measured at the first temperature, the methods of ours and of others."""
    rows = report["methods"]
    return [row for row in rows if row["temperature"] == rows[0]["temperature"]]


def speed_plot(report: dict) -> "Figure | None":
    """A bar for every other program, one for our first target, and two for the target of the
    fastest head: without and with it."""
    rows = first_temperature(report)
    ours = [row for row in rows if row["tree"]]
    if not ours:
        return None
    heads = [row for row in ours if not row["tree"].startswith(("none", "lookup"))]
    best = max(heads, key=lambda row: row["tokens_per_s"], default=ours[0])
    bars = {row["method"]: row for row in rows if not row["tree"] and "lookup" not in row["method"]}
    for row in ours:
        named = row["target"] in (ours[0]["target"], best["target"])
        if named and row["method"] == f"{row['target']} plain":
            bars[f"Talon {row['target']}"] = row
    if heads:
        bars[f"Talon {best['target']} with a head\n{best['tree']}"] = best
    title = f"Decoded tokens per second at temperature {best['temperature']:g}"
    figure, axes = new_figure(report, title)
    values = [row["tokens_per_s"] for row in bars.values()]
    margins = [row["tokens_per_s_spread"] * row["tokens_per_s"] / 2 for row in bars.values()]
    colors = [COLORS[0] if row["tree"] else GRAY for row in bars.values()]
    drawn = axes.barh(list(bars), values, xerr=margins, color=colors, error_kw={"lw": 1})
    axes.bar_label(drawn, [f"{value:.0f}" for value in values], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    return figure


def rows_plot(report: dict) -> "Figure | None":
    """Milliseconds of a target forward by its rows; dashed: of reading the same bytes."""
    if not report["row_costs"]:
        return None
    figure, axes = new_figure(report, "Milliseconds of a target forward by its rows (tree nodes)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    lines = []
    for color, curve in zip(itertools.cycle(COLORS), report["row_costs"], strict=False):
        counts, values = [int(n) for n in curve["rows_ms"]], list(curve["rows_ms"].values())
        axes.plot(counts[:: len(counts) - 1], [curve["reading_ms"]] * 2, "--", color=color, lw=1)
        lines.append((curve["target"], counts, values))
    axes.plot([], [], "--", color=GRAY, lw=1, label="reading weights and cache once")
    axes.legend(fontsize=9, frameon=False)
    draw_lines(axes, lines, 1)
    return figure


def acceptance_plot(report: dict) -> "Figure | None":
    """Share of rounds that accepted a node at each depth, of the first target's trees."""
    rows = first_temperature(report)
    rows = [row for row in rows if row["accepted_by_depth"] and row["target"] == rows[0]["target"]]
    if not rows:
        return None
    title = "Share of rounds that accept a token at each depth of the tree, "
    figure, axes = new_figure(report, f"{title}temperature {rows[0]['temperature']:g}")
    lines = []
    for row in rows:
        name, shares = row["tree"] + " (auto)" * is_auto(row), row["accepted_by_depth"]
        lines.append((name, list(range(1, len(shares) + 1)), shares))
    axes.set_xticks(max((depths for _, depths, _ in lines), key=len))
    axes.set_ylim(0, 1)
    axes.yaxis.tick_right()  # on the left stand the names
    axes.spines[:].set_visible(False)
    axes.grid(alpha=0.3)
    draw_lines(axes, lines, -1)
    return figure


PLOTS = {"tokens_per_s": speed_plot, "row_costs": rows_plot, "acceptance": acceptance_plot}
