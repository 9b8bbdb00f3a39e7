"""What bounds decoding: bytes over bandwidth, operations over rate, for this machine and for named
cards.

    python benchmark.py --roofline rtx3090

A pass over N rows reads every linear's weights once and the cached keys and values once, and
multiplies every weight with N rows:

    seconds(N) = max((weights + context * kv_row) / bandwidth, 2 * parameters * N / rate)
    round = seconds(target, nodes) + (levels - 1) * seconds(head, beam) + seconds(head, levels + 1)
    tokens per second = acceptance length / round

Leaves out: launches, norms, softmax, sampling; `EFFICIENCY` stands for all of it and for the
distance between a data sheet and a kernel. The README holds the same formulas and constants.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from model import ModelConfig

EFFICIENCY = 0.90  # of the data sheet's bandwidth and rate that a good kernel reaches

CONTEXT = 1024  # tokens in the cache


@dataclass(frozen=True)
class Card:
    """Data sheet: bytes per second, operations per second with fp32 accumulation and with int8,
    bytes of memory.
    """

    name: str
    bandwidth: float
    rate16: float
    rate8: float
    memory: float


# GA102: 328 tensor cores at 1.695 GHz; fp16 with fp32 accumulation runs at half of the fp16 rate.
CARDS = {"rtx3090": Card("RTX 3090", 936e9, 71.2e12, 284e12, 24e9)}


@dataclass(frozen=True)
class Shape:
    """What a model's cost depends on."""

    name: str
    n_layer: int
    dim: int
    n_head: int
    n_kv_head: int
    intermediate_size: int
    vocab_size: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_head

    def layer(self, inputs: int) -> int:
        """Parameters of one layer's linears; attention reads `inputs` columns (2 * dim in an
        EAGLE-3 head).
        """
        attention = (
            inputs * (self.n_head + 2 * self.n_kv_head) * self.head_dim + self.dim * self.dim
        )
        return attention + 3 * self.dim * self.intermediate_size

    @property
    def parameters(self) -> int:
        """Of all linears, lm_head included; the embedding is looked up, not read."""
        return self.n_layer * self.layer(self.dim) + self.vocab_size * self.dim

    def kv_row(self, layers: int) -> int:
        """Bytes of keys and values of one token in 16 bit."""
        return 2 * layers * self.n_kv_head * self.head_dim * 2

    def head_parameters(self, family: str, draft_vocab: int) -> int:
        """One pass of a head: fc or the wide layer, and the lm_head over the draft vocabulary."""
        wide = family == "eagle3"
        layer = self.layer(self.dim * (1 + wide)) + (0 if wide else 2 * self.dim * self.dim)
        return layer + draft_vocab * self.dim


SHAPES = {
    "LLaMA-2-7B": Shape("LLaMA-2-7B", 32, 4096, 32, 32, 11008, 32000),
    "LLaMA-2-13B": Shape("LLaMA-2-13B", 40, 5120, 40, 40, 13824, 32000),
    "LLaMA-3.1-8B": Shape("LLaMA-3.1-8B", 32, 4096, 32, 8, 14336, 128256),
    "Vicuna-13B": Shape("Vicuna-13B", 40, 5120, 40, 40, 13824, 32000),
}

# Bytes a weight: int8 has a scale a row (too little to count), int4 a scale and a zero of 2 bytes
# for 128 weights.
PRECISIONS = {"bf16": 2.0, "int8": 1.0, "int8-dynamic": 1.0, "int4": 0.5 + 4 / 128}


@dataclass(frozen=True)
class Published:
    """An acceptance length (tokens per target forward, MT-bench, greedy) that its authors report,
    and the tree.
    """

    model: str
    head: str
    family: str
    draft_vocab: int
    nodes: int
    levels: int
    beam: int
    acceptance_length: float


PUBLISHED = [
    Published("LLaMA-2-7B", "EAGLE-1", "eagle1", 32000, 26, 5, 4, 3.62),
    Published("LLaMA-2-13B", "EAGLE-1", "eagle1", 32000, 26, 5, 4, 3.90),
    Published("LLaMA-3.1-8B", "EAGLE-2", "eagle1", 128256, 60, 6, 10, 4.05),
    Published("LLaMA-3.1-8B", "EAGLE-3", "eagle3", 32000, 60, 8, 10, 6.13),
    Published("Vicuna-13B", "EAGLE-1", "eagle1", 32000, 26, 5, 4, 3.98),
    Published("Vicuna-13B", "EAGLE-2", "eagle1", 32000, 60, 6, 10, 4.83),
    Published("Vicuna-13B", "EAGLE-3", "eagle3", 32000, 60, 8, 10, 6.65),
]


def linear_parameters(config: ModelConfig) -> int:
    """Of a target's linears, lm_head included."""
    c = config
    attention = c.dim * (2 * c.n_head + 2 * c.n_kv_head) * c.head_dim
    return c.n_layer * (attention + 3 * c.dim * c.intermediate_size) + c.vocab_size * c.dim


def bound(moved: float, operations: float, bandwidth: float, rate: float) -> float:
    """Seconds that a pass takes at least."""
    return max(moved / bandwidth, operations / rate)


def target_seconds(shape: Shape, precision: str, rows: int, card: Card) -> float:
    moved = shape.parameters * PRECISIONS[precision] + CONTEXT * shape.kv_row(shape.n_layer)
    rate = card.rate8 if precision == "int8-dynamic" else card.rate16
    return bound(moved, 2 * shape.parameters * rows, card.bandwidth * EFFICIENCY, rate * EFFICIENCY)


def head_seconds(shape: Shape, precision: str, source: Published, rows: int, card: Card) -> float:
    """One pass of the head, in the target's precision."""
    parameters = shape.head_parameters(source.family, source.draft_vocab)
    moved = parameters * PRECISIONS[precision] + CONTEXT * shape.kv_row(1)
    rate = card.rate8 if precision == "int8-dynamic" else card.rate16
    return bound(moved, 2 * parameters * rows, card.bandwidth * EFFICIENCY, rate * EFFICIENCY)


def fits(shape: Shape, precision: str, card: Card) -> bool:
    """Whether weights, embedding and caches leave a little of the card's memory free."""
    embedding = 2 * shape.vocab_size * shape.dim
    needed = (
        shape.parameters * PRECISIONS[precision]
        + embedding
        + 4096 * shape.kv_row(shape.n_layer + 1)
    )
    return needed < 0.95 * card.memory


def predict(card: Card) -> list[dict]:
    """One row for every model, precision and draft: milliseconds and tokens per second."""
    rows = []
    for shape in SHAPES.values():
        for precision in PRECISIONS:
            alone = target_seconds(shape, precision, 1, card)
            base = {
                "model": shape.name,
                "precision": precision,
                "fits": fits(shape, precision, card),
            }
            plain = {
                "draft": "none",
                "nodes": 1,
                "acceptance_length": 1.0,
                "draft_ms": 0.0,
                "verify_ms": alone * 1e3,
            }
            rows.append({**base, **plain, "round_ms": alone * 1e3, "tokens_per_s": 1 / alone})
            for source in (p for p in PUBLISHED if p.model == shape.name):
                verify = target_seconds(shape, precision, source.nodes, card)
                draft = (source.levels - 1) * head_seconds(
                    shape, precision, source, source.beam, card
                )
                draft += head_seconds(shape, precision, source, source.levels + 1, card)
                drafted = {
                    "draft": source.head,
                    "nodes": source.nodes,
                    "draft_ms": draft * 1e3,
                    "acceptance_length": source.acceptance_length,
                    "verify_ms": verify * 1e3,
                }
                speed = source.acceptance_length / (verify + draft)
                rows.append(
                    {**base, **drafted, "round_ms": (verify + draft) * 1e3, "tokens_per_s": speed}
                )
    return rows


def roofline_table(card: Card) -> str:
    lines = [
        f"Bounds for one {card.name}: {card.bandwidth / 1e9:.0f} GB/s, "
        f"{card.rate16 / 1e12:.1f} TFLOP/s in 16 bit, {card.rate8 / 1e12:.0f} TOP/s in int8, "
        f"{EFFICIENCY:.0%} of each, {CONTEXT} tokens cached, batch 1",
        "",
        "| model | precision | draft | nodes | acceptance length "
        "| draft ms | verify ms | round ms | tokens/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in predict(card):
        speed = f"{row['tokens_per_s']:.0f}" if row["fits"] else "does not fit"
        lines.append(
            f"| {row['model']} | {row['precision']} | {row['draft']} | {row['nodes']} | "
            f"{row['acceptance_length']:.2f} | {row['draft_ms']:.2f} | {row['verify_ms']:.2f} | "
            f"{row['round_ms']:.2f} | {speed} |"
        )
    return "\n".join(lines)


def pick_card(name: str) -> Card:
    if name not in CARDS:
        raise ValueError(f"card {name!r} is not known: give one of {', '.join(CARDS)}")
    return CARDS[name]


# ---------------------------------------------------------------- what this machine reaches


def best_seconds(call: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def copy_bandwidth(device: torch.device, size: int = 0) -> float:
    """Bytes per second, read and written, of copying a buffer that no cache holds."""
    size = size or (1 << 30 if device.type == "cuda" else 1 << 28)
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / best_seconds(lambda: target.copy_(source), device)


def product_rate(device: torch.device, dtype: torch.dtype, size: int = 0) -> float:
    """Operations per second of a large matrix product; int8 sums in int32."""
    size = size or (8192 if device.type == "cuda" else 1024)
    a = torch.ones(size, size, dtype=dtype, device=device)
    product = torch._int_mm if dtype == torch.int8 else torch.mm
    return 2 * size**3 / best_seconds(lambda: product(a, a.t()), device)


def machine_rates(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """What bounds this machine: bytes per second of a copy, operations per second by dtype."""
    return {
        "copy_bytes_per_s": copy_bandwidth(device),
        "product_ops_per_s": product_rate(device, dtype),
        "int8_ops_per_s": product_rate(device, torch.int8),
    }


def mode_rate(mode: str, device: torch.device, machine: dict[str, float]) -> float:
    """Operations per second that bound the products of a quantised mode, or of none.

    On a CPU integers do them all, activations of 16 bits in two passes."""
    passes = {"int8-dynamic": 1} | ({} if device.type == "cuda" else {"int8": 2, "int4": 2})
    plain = machine["product_ops_per_s"]
    return max(plain, machine["int8_ops_per_s"] / passes[mode]) if mode in passes else plain
