"""What a round should take on an RTX 3090 with the kernels of talon/kernels, before it is measured.

    python scripts/predict_gpu.py            prints the tables of docs/gpu.md

From sizes, the card's data sheet and the compiled code (tests/gpu_code.py counts it): each launch
takes the longest of its bytes, its tensor cores and its instructions, and a fixed time to begin and
end. Leaves out: acceptance lengths, which are the published ones, and the host.
"""

import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from model import ModelConfig
from talon.measuring.roofline import CARDS, MODELS
from talon.records import markdown_table

CARD, SMS, CLOCK = CARDS["rtx3090"], 82, 1.695e9
# Of the data sheet, what a reader of the memory gets (as llama.cpp does on this card with an 8B in
# bf16, all else included), and a kernel that keeps its tensor cores busy.
STREAM, WORK = 0.93, 0.90
L2 = 2.0e12  # bytes per second, of what was written just before
BIG, SMALL = 2.7e-6, 2.3e-6  # seconds to begin and end a launch in a graph; a small launch at all
# Instructions that the four schedulers issue for 8192 weights, by rows of a block.
ISSUE = {
    "bf16": {8: 71, 16: 80, 32: 111, 64: 159}, "int8": {8: 232, 16: 250, 32: 285, 64: 380},
    "int8-dynamic": {16: 65, 32: 73, 64: 94}, "int4": {8: 169, 16: 213, 32: 272, 64: 498},
}  # fmt: skip
BYTES = {"bf16": 2.0, "int8": 1.0, "int8-dynamic": 1.0, "int4": 0.5 + 4 / 128}


class Draft(NamedTuple):
    """A head, its tree, and what it accepts: published for MT-bench, or assumed."""

    name: str
    family: str
    vocab: int
    nodes: int
    levels: int
    beam: int
    tau: float
    source: str


class Round(NamedTuple):
    model: str
    mode: str
    head_mode: str
    draft: Draft | None


EAGLE2_7B = Draft("EAGLE-2", "eagle1", 32000, 60, 6, 10, 4.70, "published")
EAGLE2_7B_16 = Draft("EAGLE-2", "eagle1", 32000, 16, 4, 4, 3.60, "assumed")
EAGLE1_7B = Draft("EAGLE-1", "eagle1", 32000, 26, 5, 4, 3.62, "published")
EAGLE3_8B = Draft("EAGLE-3", "eagle3", 32000, 60, 8, 10, 6.13, "published")
EAGLE3_13B = Draft("EAGLE-3", "eagle3", 32000, 60, 8, 10, 6.65, "published")
ROUNDS = [
    *(Round("LLaMA-2-7B", mode, "", None) for mode in BYTES),
    Round("LLaMA-2-7B", "bf16", "int8", EAGLE2_7B),
    Round("LLaMA-2-7B", "int8", "int8", EAGLE1_7B),
    Round("LLaMA-2-7B", "int8-dynamic", "int8", EAGLE2_7B),
    Round("LLaMA-2-7B", "int4", "int8", EAGLE2_7B_16),
    *(Round("LLaMA-3.1-8B", mode, "", None) for mode in BYTES),
    Round("LLaMA-3.1-8B", "bf16", "bf16", EAGLE3_8B),
    Round("LLaMA-3.1-8B", "bf16", "int8", EAGLE3_8B),
    Round("LLaMA-3.1-8B", "int8-dynamic", "int8", EAGLE3_8B),
    *(Round("Vicuna-13B", mode, "", None) for mode in ("int8", "int8-dynamic", "int4")),
    Round("Vicuna-13B", "int8-dynamic", "int8", EAGLE3_13B),
]
CONTEXTS = (1024, 8192, 32768)


def linear(outputs: int, inputs: int, rows: int, mode: str) -> float:
    """Seconds of one matrix multiplication."""
    block = next(b for b in (8, 16, 32, 64) if b in ISSUE[mode] and (b >= rows or b == 64))
    weights, tiles = outputs * inputs, -(-outputs // 128)
    split = max(1, min(8, inputs // 512, round(2 * SMS / tiles)))
    turns = -(-tiles * split // SMS) * SMS / (tiles * split)  # the fullest processor's share
    rate = CARD.rate8 if mode == "int8-dynamic" else CARD.rate16
    tensor = 2 * weights * block * -(-rows // block) / rate
    issue = weights / 8192 * ISSUE[mode][block] / SMS / CLOCK
    parts = (
        4 * (2 * split - 1) * rows * outputs / L2 if split > 1 else 0
    )  # written, all others read
    memory = weights * BYTES[mode] / CARD.bandwidth
    return max(memory / STREAM, turns * max(tensor, issue) / WORK) + parts + BIG


def attention(c: ModelConfig, rows: int, context: int, tree: bool) -> float:
    """Seconds of both launches in one layer."""
    heads, size = c.n_head // c.n_kv_head, c.head_dim
    block, mma = (16, 16) if rows * heads <= 16 else (64, 64)
    blocks = c.n_kv_head * -(-rows * heads // block)
    starts = [96 * i * (i + 1) for i in range(200) if 96 * i * (i + 1) < context]
    sizes = [end - start for start, end in zip(starts, [*starts[1:], context], strict=True)]
    clocks = mma * 32 + (800 if block == 16 else 0)  # few rows: the chain of steps, not their rate
    longest = max(sizes) / 32 * clocks / CLOCK
    tensor = blocks * context / 32 * mma * 32 / SMS / CLOCK / WORK
    states = len(sizes) * rows * c.n_head * (size + 2) * 4
    keys = context * c.n_kv_head * size * 4
    parts = max(longest, tensor, (keys + states) / CARD.bandwidth / STREAM) + BIG
    own = rows * c.n_kv_head * 21 * size * 4 / L2 if tree else 0
    own += rows * c.n_kv_head * 1.6 * 16 * 32 / SMS / CLOCK / WORK if tree else 0
    rest = states / (L2 if states < 4e6 else CARD.bandwidth * STREAM) + own + BIG
    return parts + rest


def layer(c: ModelConfig, inputs: int, rows: int, mode: str, context: int, tree: bool) -> float:
    """Seconds of a layer; `inputs` columns are read by its attention."""
    qkv = (c.n_head + 2 * c.n_kv_head) * c.head_dim
    shapes = (qkv, inputs), (c.dim, c.n_head * c.head_dim), (2 * c.intermediate_size, c.dim)
    shapes = *shapes, (c.dim, c.intermediate_size)
    small = 3 if mode in ("int8-dynamic", "int4") else 2  # norms; SiLU * up where it is apart
    moved = 4 * rows * (2 * c.dim + (small - 2) * 1.5 * c.intermediate_size) / L2
    linears = sum(linear(*shape, rows, mode) for shape in shapes)
    return linears + attention(c, rows, context, tree) + small * SMALL + moved


def target(c: ModelConfig, rows: int, mode: str, context: int) -> float:
    """Seconds of one forward with the choice of a token after each row."""
    layers = c.n_layer * layer(c, c.dim, rows, mode, context, rows > 1)
    choice = linear(c.vocab_size, c.dim, rows, mode) + rows * c.vocab_size * 2 / L2
    return layers + choice + 6 * SMALL  # embedding, positions, the norm, accept


def draft(c: ModelConfig, d: Draft, mode: str, context: int) -> float:
    """Seconds of growing, selecting and catching up. Small launches as scripts/count_kernels.py
    counts them, of which `layer` has two."""
    wide = d.family == "eagle3"

    def one(rows: int, tree: bool) -> float:
        fc = 0 if wide and tree else linear(c.dim, (3 if wide else 2) * c.dim, rows, mode)
        return layer(c, c.dim * (1 + wide), rows, mode, context, tree) + fc

    lm_head = [linear(d.vocab, c.dim, rows, mode) for rows in (1, d.beam)]
    level = one(d.beam, True) + lm_head[1] + 4 * SMALL  # 3 of Inductor's, the best
    selecting = 8 + 4 + 12  # with what ATen's sort launches, and what lies between regions
    catching_up = one(d.levels + 1, False) + 3 * SMALL
    return lm_head[0] + (d.levels - 1) * level + catching_up + (5 + selecting) * SMALL


def predict(run: Round, context: int) -> tuple[float, float]:
    """Milliseconds of a round, and tokens per second."""
    c, d = MODELS[run.model], run.draft
    nodes, tau = (d.nodes, d.tau) if d else (1, 1.0)
    seconds = target(c, nodes, run.mode, context)
    seconds += draft(c, d, run.head_mode, context) if d else 7 * SMALL
    return seconds * 1e3, tau / seconds


def gigabytes(run: Round, context: int) -> float:
    """Weights, embedding and cache; a head's weights, but not what it borrows."""
    c, d = MODELS[run.model], run.draft
    size = c.n_layer * (c.dim * (2 * c.n_head + 2 * c.n_kv_head) * c.head_dim)
    size += c.n_layer * 3 * c.dim * c.intermediate_size + c.vocab_size * c.dim
    extra = 0.0
    if d:
        own = (
            c.dim * (2 * c.n_head + 2 * c.n_kv_head) * c.head_dim + 3 * c.dim * c.intermediate_size
        )
        own += 3 * c.dim * c.dim + (d.vocab * c.dim if d.family == "eagle3" else 0)
        extra = own * BYTES[run.head_mode]
    cache = 4 * c.n_kv_head * c.head_dim * (c.n_layer + bool(d)) * context
    return (size * BYTES[run.mode] + 2 * c.vocab_size * c.dim + extra + cache) / 1e9


def speed_table() -> str:
    lines = [["model", "mode", "draft", "head", "nodes", "tau"]]
    lines[0] += [f"{context // 1024}k: ms, tok/s" for context in CONTEXTS]
    for run in ROUNDS:
        d = run.draft
        tau = f"{d.tau:.2f} ({d.source})" if d else "1"
        line = [run.model, run.mode, d.name if d else "none", run.head_mode or "-"]
        line += [str(d.nodes if d else 1), tau]
        for context in CONTEXTS:
            room = gigabytes(run, context)
            found = "%.1f, **%.0f**" % predict(run, context)  # noqa: UP031
            line.append(found if room < 22.5 else f"{room:.0f} GB")
        lines.append(line)
    return markdown_table(lines)


def parts_table() -> str:
    """Microseconds of the launches of one layer, at 1k."""
    lines = [["model", "mode", "rows", "qkv", "attention", "wo", "w13", "w2", "rest", "layer"]]
    for name in ("LLaMA-2-7B", "LLaMA-3.1-8B", "Vicuna-13B"):
        c = MODELS[name]
        qkv = (c.n_head + 2 * c.n_kv_head) * c.head_dim
        shapes = [(qkv, c.dim), (c.dim, c.dim), (2 * c.intermediate_size, c.dim)]
        shapes.append((c.dim, c.intermediate_size))
        for mode, rows in (
            ("bf16", 1),
            ("bf16", 60),
            ("int8", 1),
            ("int8-dynamic", 60),
            ("int4", 1),
            ("int4", 16),
        ):
            whole = layer(c, c.dim, rows, mode, 1024, rows > 1)
            each = [linear(*shape, rows, mode) for shape in shapes]
            each.insert(1, attention(c, rows, 1024, rows > 1))
            each += [whole - sum(each), whole]
            lines.append([name, mode, str(rows), *(f"{seconds * 1e6:.0f}" for seconds in each)])
    return markdown_table(lines)


def attention_table() -> str:
    """Milliseconds of attention in all layers of a forward."""
    lines = [["model", "rows", *(f"{context // 1024}k" for context in CONTEXTS)]]
    for name, rows in (
        ("LLaMA-2-7B", 1),
        ("LLaMA-2-7B", 60),
        ("LLaMA-3.1-8B", 1),
        ("LLaMA-3.1-8B", 16),
        ("LLaMA-3.1-8B", 60),
    ):
        c = MODELS[name]
        found = [c.n_layer * attention(c, rows, context, rows > 1) for context in CONTEXTS]
        lines.append([name, str(rows), *(f"{seconds * 1e3:.2f}" for seconds in found)])
    return markdown_table(lines)


if __name__ == "__main__":
    print(speed_table(), parts_table(), attention_table(), sep="\n\n")
