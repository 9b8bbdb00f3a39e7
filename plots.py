"""The benchmark's plots: speed by method, the row-cost curve, acceptance by depth. Needs matplotlib
(extra `bench`).
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from checkpoint import atomic_file
from report import short_commit

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


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Without pyplot, which would want a display and keep every figure."""
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots()


def caption(report: dict) -> str:
    count = report["prompts"]["count"]
    prompts = f"{count} prompts, " if count else ""
    return f"{report['device']}, {prompts}commit {short_commit(report)}"


def speed_plot(report: dict) -> Figure:
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


def rows_plot(report: dict) -> Figure:
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


def depth_plot(report: dict) -> Figure:
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
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("depth below the root")
    axes.set_ylabel("share of rounds that accept it")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.set_title(caption(report), fontsize=9)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure
