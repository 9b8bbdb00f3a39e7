"""What the benchmark says: sums and medians of its measurements, tables, one JSON object, plots.

Leaves out: measuring (benchmark.py) and drawing (plots.py).
"""

import importlib.util
import itertools
import json
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from talon.checking import choice_gap
from talon.checkpoint import atomic_file
from talon.cli import Parser, note, run
from talon.decoder import Decoder
from talon.measuring.methods import Run
from talon.records import short_commit
from talon.sampling import SamplingConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#3b6ea5", "#c9733a")  # temperature 0, the next one


def draw(report: dict, out: Path) -> list[Path]:
    """Write the plots that the report has numbers for; returns their paths."""
    plans = [
        ("tokens_per_s.png", speed_plot, bool(report["methods"])),
        ("row_costs.png", rows_plot, bool(report["row_costs"])),
        ("acceptance.png", depth_plot, any(row["accepted_by_depth"] for row in report["methods"])),
    ]
    written = []
    for name, plot, possible in plans:
        if possible:
            with atomic_file(out / name) as file:
                plot(report).savefig(file, format="png", dpi=120, bbox_inches="tight")
            written.append(out / name)
    return written


def new_figure(width: float, height: float) -> "tuple[Figure, Axes]":
    """Without pyplot, which would want a display and keep every figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, figure.subplots()


def caption(report: dict) -> str:
    count = report["prompts"]["count"]
    prompts = f"{count} prompts, " if count else ""
    return f"{report['device']}, {prompts}commit {short_commit(report)}"


def speed_plot(report: dict) -> "Figure":
    """Horizontal bars, one group a method, one bar a temperature; whiskers as wide as the
    repetitions lie apart.
    """
    rows = report["methods"]
    names = list(dict.fromkeys(row["method"] for row in rows))
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    figure, axes = new_figure(9, 0.6 + 0.28 * len(names) * len(temperatures))
    height = 0.8 / len(temperatures)
    for index, temperature in enumerate(temperatures):
        mine = {row["method"]: row for row in rows if row["temperature"] == temperature}
        places = [p + index * height for p, name in enumerate(names) if name in mine]
        values = [mine[name]["tokens_per_s"] for name in names if name in mine]
        spread = [
            mine[name]["tokens_per_s_spread"] * mine[name]["tokens_per_s"] / 2
            for name in names
            if name in mine
        ]
        axes.barh(
            places,
            values,
            height,
            xerr=spread,
            label=f"temperature {temperature:g}",
            color=COLORS[index % 2],
            error_kw={"lw": 1},
        )
        for place, value, error in zip(places, values, spread, strict=True):
            axes.text(value + error, place, f" {value:.1f}", va="center", fontsize=8)
    axes.set_yticks(
        [p + height * (len(temperatures) - 1) / 2 for p in range(len(names))], names, fontsize=8
    )
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("decoded tokens per second, of each prompt the median repetition")
    axes.set_title(caption(report), fontsize=9)
    axes.legend(fontsize=8)
    return figure


def rows_plot(report: dict) -> "Figure":
    """Milliseconds of a target forward over the number of rows; dashed: what bandwidth and rate
    allow at best.
    """
    figure, axes = new_figure(7, 4.5)
    for curve in report["row_costs"]:
        rows = [int(n) for n in curve["rows_ms"]]
        (line,) = axes.plot(
            rows, list(curve["rows_ms"].values()), marker="o", label=curve["target"]
        )
        axes.plot(rows, list(curve["bound_ms"].values()), "--", color=line.get_color(), lw=1)
    axes.plot([], [], "--", color="gray", lw=1, label="bound by copy bandwidth and product rate")
    axes.set_xlabel("rows of the forward (tree nodes)")
    axes.set_ylabel("milliseconds")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.set_title(caption(report), fontsize=9)
    axes.legend(fontsize=8)
    return figure


def depth_plot(report: dict) -> "Figure":
    """Share of rounds whose node at each depth was accepted; of the first target that ran a tree,
    since its precision changes little.
    """
    figure, axes = new_figure(7, 4.5)
    lines: dict[tuple[str, float], list[float]] = {}
    for row in report["methods"]:
        if row["accepted_by_depth"]:
            lines.setdefault((row["tree"], row["temperature"]), row["accepted_by_depth"])
    trees = list(dict.fromkeys(tree for tree, _ in lines))
    temperatures = list(dict.fromkeys(temperature for _, temperature in lines))
    for (tree, temperature), shares in lines.items():
        axes.plot(
            range(1, len(shares) + 1),
            shares,
            ("-", ":", "--", "-.")[temperatures.index(temperature) % 4],
            color=f"C{trees.index(tree) % 10}",
            marker=".",
            label=f"{tree}, T {temperature:g}",
        )
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("depth below the root")
    axes.set_ylabel("share of rounds that accept it")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.set_title(caption(report), fontsize=9)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


@dataclass(frozen=True)
class Cell:
    """One measurement and where it belongs."""

    method: str
    temperature: float
    repeat: int
    prompt: int
    run: Run


def complete(cells: list[Cell], methods: list) -> list[Cell]:
    """The cells of prompts that every method has finished: what an interruption leaves is compared
    like with like.
    """
    done: dict[tuple, set[str]] = {}
    for cell in cells:
        done.setdefault((cell.temperature, cell.repeat, cell.prompt), set()).add(cell.method)
    full = {key for key, names in done.items() if len(names) == len(methods)}
    return [cell for cell in cells if (cell.temperature, cell.repeat, cell.prompt) in full]


def speeds(cells: list[Cell]) -> list[float]:
    """Tokens per second of each repetition."""
    repeats: dict[int, list[Run]] = {}
    for cell in cells:
        repeats.setdefault(cell.repeat, []).append(cell.run)
    return [speed(runs) for runs in repeats.values()]


def typical(cells: list[Cell]) -> list[Run]:
    """Of every prompt the repetition of median speed: a machine that others use too is slow for
    seconds at a time, which is a prompt, not all of them."""
    prompts: dict[int, list[Run]] = {}
    for cell in cells:
        if cell.run.decoded:
            prompts.setdefault(cell.prompt, []).append(cell.run)
    return [
        sorted(runs, key=lambda run: run.decode_s / run.decoded)[len(runs) // 2]
        for runs in prompts.values()
    ]


def speed(runs: list[Run]) -> float:
    """Tokens per second: sum of tokens over sum of seconds."""
    seconds = sum(run.decode_s for run in runs)
    return sum(run.decoded for run in runs) / seconds if seconds else 0.0


def spread_of(values: list[float]) -> float:
    """Distance of the extremes as a share of the median."""
    middle = statistics.median(values) if values else 0.0
    return (max(values) - min(values)) / middle if middle else 0.0


def summarize(method: object, cells: list[Cell], plain: list[Cell]) -> dict:
    """One method at one temperature, from the typical repetition of every prompt; the spreads are
    those of whole repetitions. `plain` holds the cells of its target's plain decoding, or none.
    """
    runs, own, base = typical(cells), speeds(cells), speeds(plain)
    ratios = [a / b for a, b in zip(own, base, strict=False) if b]
    rounds, decoded = sum(r.rounds for r in runs), sum(r.decoded for r in runs)
    decode_s = sum(r.decode_s for r in runs)
    draft_s, verify_s = sum(r.draft_s for r in runs), sum(r.verify_s for r in runs)
    moved = sum(r.moved_bytes for r in runs)
    depth = max((len(r.accepted_by_depth) for r in runs), default=0)
    by_depth = [sum((r.accepted_by_depth + [0] * depth)[d] for r in runs) for d in range(depth)]
    known = bool(verify_s)
    return {
        "method": method.name,
        "tree": getattr(method, "trees", {}).get(cells[0].temperature),
        "temperature": cells[0].temperature,
        "tokens_per_s": speed(runs),
        "tokens_per_s_spread": spread_of(own),
        "times_plain": speed(runs) / speed(typical(plain)) if ratios else None,
        "times_plain_spread": spread_of(ratios) if ratios else None,
        "first_token_s": statistics.median(cell.run.prefill_s for cell in cells),
        "tokens": decoded,
        "rounds": rounds,
        "acceptance_length": decoded / rounds if rounds else 0.0,
        "accepted_by_depth": [count / rounds for count in by_depth] if rounds else [],
        "draft_ms": draft_s / rounds * 1e3 if known and rounds else None,
        "verify_ms": verify_s / rounds * 1e3 if known and rounds else None,
        "rest_ms": (decode_s - draft_s - verify_s) / rounds * 1e3 if known and rounds else None,
        "rest_share": (decode_s - draft_s - verify_s) / decode_s if known and decode_s else None,
        "bytes_per_token": moved / decoded if moved and decoded else None,
        "bandwidth_bytes_per_s": moved / decode_s if moved and decode_s else None,
        "memory_bytes": method.memory_bytes,
        "peak_memory_bytes": max((c.run.peak_memory_bytes for c in cells), default=0) or None,
    }


def compare_ids(
    cells: list[Cell], plain: list[Cell], decoder: Decoder, prompts: list[list[int]], seed: int
) -> dict:
    """Whether a method's ids are those of plain decoding on every prompt, else the first difference
    and its gap.
    """
    wanted = {cell.prompt: cell.run.tokens for cell in plain if cell.repeat == 0}
    mine = {cell.prompt: cell.run.tokens for cell in cells if cell.repeat == 0}
    differing = [number for number in sorted(mine) if mine[number] != wanted.get(number)]
    result = {
        "prompts": len(mine),
        "identical": len(mine) - len(differing),
        "first_difference": None,
        "gap": None,
    }
    if differing:
        number = differing[0]
        ours, theirs = mine[number], wanted[number]
        shorter = min(len(ours), len(theirs))
        at = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
        result |= {"first_prompt": number, "first_difference": at}
        if at < shorter:
            sampling = SamplingConfig(cells[0].temperature, seed=seed + number)
            result["gap"] = choice_gap(
                decoder, prompts[number] + theirs[:at], theirs[at], ours[at], sampling
            )
    return result


# ---------------------------------------------------------------- for people and for machines


def cell_text(value: float | None, form: str, scale: float = 1.0) -> str:
    return "" if value is None else format(value * scale, form)


COLUMNS: dict[str, Callable[[dict], str]] = {
    "method": lambda row: method_text(row),
    "T": lambda row: f"{row['temperature']:g}",
    "tokens/s": lambda row: f"{row['tokens_per_s']:.1f}",
    "spread": lambda row: f"{row['tokens_per_s_spread']:.1%}",
    "x plain": lambda row: cell_text(row["times_plain"], ".2f"),
    "first token ms": lambda row: cell_text(row["first_token_s"], ".0f", 1e3),
    "accept.": lambda row: f"{row['acceptance_length']:.2f}",
    "draft ms": lambda row: cell_text(row["draft_ms"], ".2f"),
    "verify ms": lambda row: cell_text(row["verify_ms"], ".2f"),
    "rest ms": lambda row: cell_text(row["rest_ms"], ".2f"),
    "GB/s": lambda row: cell_text(row["bandwidth_bytes_per_s"], ".1f", 1e-9),
    "MB/token": lambda row: cell_text(row["bytes_per_token"], ".0f", 1e-6),
    "memory GB": lambda row: cell_text(row["memory_bytes"], ".2f", 1e-9),
    "ids as plain": lambda row: same_text(row.get("ids")),
}

FEW = ("method", "tokens/s", "spread", "x plain", "accept.", "draft ms", "verify ms")


def method_text(row: dict, others: Sequence[dict] = ()) -> str:
    """The method's name; of `auto` also the tree that it chose, and what the rows at `others`
    chose where they differ.
    """
    if not row["method"].endswith(" auto"):
        return row["method"]
    chosen = [row["tree"]]
    for other in others:
        if other["tree"] != row["tree"]:
            chosen.append(f"T {other['temperature']:g}: {other['tree']}")
    return f"{row['method']} ({'; '.join(chosen)})"


def same_text(ids: dict | None) -> str:
    if ids is None:
        return ""
    if ids["identical"] == ids["prompts"]:
        return "all"
    gap = f", gap {ids['gap']:.2g}" if ids["gap"] is not None else ""
    return f"{ids['identical']} of {ids['prompts']}{gap}"


def table(rows: list[dict]) -> str:
    """Markdown for people: one line a method and temperature."""
    if not rows:
        return ""
    return markdown([list(COLUMNS), *([form(row) for form in COLUMNS.values()] for row in rows)])


def short_table(rows: list[dict]) -> str:
    """One line a method: a few columns at the first temperature, speeds and ids at the others."""
    if not rows:
        return ""
    first = [row for row in rows if row["temperature"] == rows[0]["temperature"]]
    others = sorted({row["temperature"] for row in rows} - {rows[0]["temperature"]})
    by_method = {(row["method"], row["temperature"]): row for row in rows}
    lines = [[*FEW, *(f"tokens/s at T {value:g}" for value in others), "ids as plain"]]
    for row in first:
        more = [by_method.get((row["method"], value)) for value in others]
        name = method_text(row, [other for other in more if other])
        ids = dict.fromkeys(same_text(r["ids"]) for r in (row, *more) if r and "ids" in r)
        speeds_ = [COLUMNS["tokens/s"](r) if r else "" for r in more]
        few = [COLUMNS[column](row) for column in FEW[1:]]
        lines.append([name, *few, *speeds_, "; ".join(ids)])
    return markdown(lines)


def markdown(lines: list[list[str]]) -> str:
    """A table whose first line is the heading."""
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def curve_table(curves: list[dict], everything: bool = True) -> str:
    """Markdown: milliseconds of a forward by its rows; with `everything` also what the machine
    would allow, and draft levels.
    """
    if not curves:
        return ""
    counts = list(curves[0]["rows_ms"])
    kinds = {"ms": "rows_ms"} | ({"bound, ms": "bound_ms"} if everything else {})
    lines = [["rows of a forward", *map(str, counts)]]
    for curve, (name, values) in itertools.product(curves, kinds.items()):
        numbers = [f"{curve[values][n]:.1f}" for n in counts]
        lines.append([f"{curve['target']}, {name}", *numbers])
    found = [markdown(lines)]
    for curve in curves if everything else ():
        for name, levels in curve["head_level_ms"].items():
            costs = ", ".join(f"{ms:.2f} at {width}" for width, ms in levels.items())
            found.append(
                f"\n{name} on {curve['target']}, ms of a draft level by its width: {costs}"
            )
    return "\n".join(found)


def heading(report: dict) -> str:
    """What was measured, where and with what: a table without it means nothing."""
    machine, prompts = report["machine"], report["prompts"]
    parts = [
        f"{report['device']}, torch {report['versions']['torch']}, commit {short_commit(report)}"
    ]
    if prompts["count"]:
        parts.append(
            f"{prompts['count']} prompts of {prompts['file']}, {report['max_new_tokens']} tokens "
            f"at most, {report['repeats']} repetitions"
        )
    if report["row_costs"]:
        parts.append(f"row costs behind {report['row_costs'][0]['committed']} cached tokens")
    if report["interrupted"]:
        parts.append("interrupted")
    parts.append(
        f"copy {machine['copy_bytes_per_s'] / 1e9:.1f} GB/s, "
        f"products {machine['product_ops_per_s'] / 1e9:.0f} GFLOP/s, "
        f"in int8 {machine['int8_ops_per_s'] / 1e9:.0f} GOP/s"
    )
    return "; ".join(parts)


BEGIN, END = "<!-- benchmark.py --readme writes this -->", "<!-- up to here -->"


def readme_section(*reports: dict) -> str:
    """What stands between BEGIN and END in a README: each run's conditions, command and tables."""
    parts = []
    for report in reports:
        parts += [
            f"{heading(report)}:",
            f"```console\npython benchmark.py {shlex.join(report['argv'])}\n```",
            short_table(report["methods"]),
            curve_table(report["row_costs"], everything=False),
        ]
    return "\n\n".join(part for part in parts if part)


def find_section(path: Path) -> tuple[str, str]:
    """What stands before and after the section. ValueError if the file has no place for one."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text: save it as UTF-8") from None
    if not text.count(BEGIN) == text.count(END) == 1 or text.index(END) < text.index(BEGIN):
        raise ValueError(
            f"{path} has no single place for results: add the lines {BEGIN} and {END}, each once "
            "and in this order"
        )
    before, begin, rest = text.partition(BEGIN)
    return before + begin, END + rest.partition(END)[2]


def update_readme(path: Path, section: str) -> None:
    """Replace the section in the file."""
    before, after = find_section(path)
    with atomic_file(path.resolve()) as file:
        file.write(f"{before}\n{section}\n{after}".encode(errors="backslashreplace"))


def versions() -> dict:
    """Of everything whose speed shows in the table."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("transformers", "llama_cpp"):
        module = sys.modules.get(name)
        if module is not None:
            found[name] = module.__version__
    return found


def write_reports(out: Path, report: dict) -> None:
    """results.json (one line), results.md and, where matplotlib is installed, the plots."""
    with atomic_file(out / "results.json") as file:
        file.write(json.dumps(report).encode() + b"\n")
    tables = table(report["methods"]), curve_table(report["row_costs"])
    text = "\n\n".join(part for part in (heading(report), *tables) if part)
    with atomic_file(out / "results.md") as file:
        file.write(f"{text}\n".encode(errors="backslashreplace"))
    if importlib.util.find_spec("matplotlib") is None:
        note("without plots: matplotlib is not installed: pip install matplotlib")
        return
    for path in draw(report, out):
        note(f"wrote {path}")


def read_report(path: Path) -> dict:
    """What a run of the benchmark wrote. ValueError if the file holds anything else."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        readme_section(report)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise ValueError(
            f"{path} is no results.json of benchmark.py: give the one it wrote with --out"
        ) from None
    return report


def main() -> int:
    parser = Parser(prog="report.py", description="Write a README's section of results anew.")
    parser.add_argument("results", type=Path, nargs="+", help="results.json of one run or several")
    parser.add_argument("readme", type=Path, help="Markdown file with the marked section")
    args = parser.parse_args()
    update_readme(args.readme, readme_section(*map(read_report, args.results)))
    return 0


if __name__ == "__main__":
    run(main)
