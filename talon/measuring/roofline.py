"""What bounds decoding: bytes over bandwidth and operations over rate, for named cards; and how
fast this machine reads.

    python benchmark.py --roofline rtx3090

A pass over N rows reads every weight of the linears once and the cached keys and values once, and
multiplies every weight with N rows:

    seconds(N) = max((weights + context * kv_row) / bandwidth, 2 * parameters * N / rate)
    round = seconds(target, nodes) + (levels - 1) * seconds(head, beam) + seconds(head, levels + 1)
    tokens per second = acceptance length / round

Leaves out: launches, norms, softmax, sampling; `EFFICIENCY` stands for all of it and for the
distance between a data sheet and a kernel."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from model import ModelConfig
from talon.records import markdown_table
from talon.trees import Tree

EFFICIENCY = 0.90  # of the data sheet's bandwidth and rate that a good kernel reaches

CONTEXT = 1024  # tokens in the cache

STREAM = {"cpu": 1 << 28, "cuda": 1 << 30}  # bytes that are read to time it: no cache holds them

# ---------------------------------------------------------------- cards, models, published heads


@dataclass(frozen=True)
class Card:
    """What its data sheet says."""

    name: str
    bandwidth: float  # bytes per second
    rate16: float  # operations per second in 16 bit with fp32 accumulation
    rate8: float  # and in int8
    memory: float  # bytes


# GA102: 328 tensor cores at 1.695 GHz; fp16 with fp32 accumulation runs at half of the fp16 rate.
CARDS = {"rtx3090": Card("RTX 3090", 936e9, 71.2e12, 284e12, 24e9)}


def llama(
    n_layer: int, dim: int, n_kv_head: int, intermediate_size: int, vocab_size: int, n_head: int = 0
) -> ModelConfig:
    """The shape of a model whose attention heads have 128 dimensions, with a context of 4096."""
    sizes = {"n_layer": n_layer, "dim": dim, "n_kv_head": n_kv_head, "vocab_size": vocab_size}
    sizes |= {"n_head": n_head or dim // 128, "intermediate_size": intermediate_size}
    return ModelConfig(**sizes, head_dim=128, norm_eps=1e-5, max_seq_length=4096)


MODELS = {
    "LLaMA-2-7B": llama(32, 4096, 32, 11008, 32000),
    "LLaMA-2-13B": llama(40, 5120, 40, 13824, 32000),
    "LLaMA-3.1-8B": llama(32, 4096, 8, 14336, 128256),
    "Vicuna-13B": llama(40, 5120, 40, 13824, 32000),
    "Qwen3-8B": llama(36, 4096, 8, 12288, 151936),
    "Qwen3-14B": llama(40, 5120, 8, 17408, 151936),
    "Qwen3-32B": llama(64, 5120, 8, 25600, 151936, n_head=64),
}

# Bytes a weight: int8 has a scale a row (too little to count), int4 a scale and a zero of 2 bytes
# for 128 weights.
PRECISIONS = {"bf16": 2.0, "int8": 1.0, "int8-dynamic": 1.0, "int4": 0.5 + 4 / 128}


@dataclass(frozen=True)
class Published:
    """What the authors of a head report for MT-bench, greedy, and their tree."""

    model: str
    head: str
    family: str
    draft_vocab: int
    nodes: int
    levels: int
    beam: int
    acceptance_length: float  # tokens per target forward


PUBLISHED = [
    Published("LLaMA-2-7B", "EAGLE-1", "eagle1", 32000, 26, 5, 4, 3.62),
    Published("LLaMA-2-13B", "EAGLE-1", "eagle1", 32000, 26, 5, 4, 3.90),
    Published("LLaMA-3.1-8B", "EAGLE-2", "eagle1", 128256, 60, 6, 10, 4.05),
    Published("LLaMA-3.1-8B", "EAGLE-3", "eagle3", 32000, 60, 8, 10, 6.13),
    Published("Vicuna-13B", "EAGLE-1", "eagle1", 32000, 26, 5, 4, 3.98),
    Published("Vicuna-13B", "EAGLE-2", "eagle1", 32000, 60, 6, 10, 4.83),
    Published("Vicuna-13B", "EAGLE-3", "eagle3", 32000, 60, 8, 10, 6.65),
    Published("Qwen3-8B", "EAGLE-3", "eagle3", 32000, 3, 2, 1, 1.97),
    Published("Qwen3-14B", "EAGLE-3", "eagle3", 32000, 3, 2, 1, 1.74),
    Published("Qwen3-32B", "EAGLE-3", "eagle3", 32000, 3, 2, 1, 1.86),
]


# ---------------------------------------------------------------- what a card allows


def layer_parameters(c: ModelConfig, inputs: int) -> int:
    """Of one layer's linears; attention reads `inputs` columns, 2 * dim in an EAGLE-3 head."""
    attention = inputs * (c.n_head + 2 * c.n_kv_head) * c.head_dim + c.dim * c.n_head * c.head_dim
    return attention + 3 * c.dim * c.intermediate_size


def linear_parameters(c: ModelConfig) -> int:
    """Of all linears, lm_head included; the embedding is looked up, not read."""
    return c.n_layer * layer_parameters(c, c.dim) + c.vocab_size * c.dim


def head_parameters(c: ModelConfig, head: Published) -> int:
    """One pass of a head: fc or the wide layer, and the lm_head over the draft vocabulary."""
    wide = head.family == "eagle3"
    fc = 0 if wide else 2 * c.dim * c.dim
    return layer_parameters(c, c.dim * (1 + wide)) + fc + head.draft_vocab * c.dim


def kv_row(c: ModelConfig, layers: int) -> int:
    """Bytes of keys and values of one token in 16 bit."""
    return 2 * layers * c.n_kv_head * c.head_dim * 2


def pass_seconds(parameters: int, row_bytes: int, precision: str, rows: int, card: Card) -> float:
    """One pass of a target or a head over `rows` rows."""
    moved = parameters * PRECISIONS[precision] + CONTEXT * row_bytes
    rate = card.rate8 if precision == "int8-dynamic" else card.rate16
    return max(moved / card.bandwidth, 2 * parameters * rows / rate) / EFFICIENCY


def target_seconds(c: ModelConfig, precision: str, rows: int, card: Card) -> float:
    return pass_seconds(linear_parameters(c), kv_row(c, c.n_layer), precision, rows, card)


def draft_seconds(c: ModelConfig, precision: str, head: Published, card: Card) -> float:
    """All passes of a round's draft, the head in the target's precision."""

    def one(rows: int) -> float:
        return pass_seconds(head_parameters(c, head), kv_row(c, 1), precision, rows, card)

    return (head.levels - 1) * one(head.beam) + one(head.levels + 1)


def fits(c: ModelConfig, precision: str, card: Card) -> bool:
    """Whether weights, embedding and caches leave a little of the card's memory free."""
    weights = linear_parameters(c) * PRECISIONS[precision] + 2 * c.vocab_size * c.dim
    return weights + c.max_seq_length * kv_row(c, c.n_layer + 1) < 0.95 * card.memory


def predict(card: Card) -> list[dict]:
    """One entry for every model, precision and draft: milliseconds and tokens per second."""
    return [
        {"model": name, "precision": precision, "fits": fits(c, precision, card)}
        | prediction(c, precision, head, card)
        for name, c in MODELS.items()
        for precision in PRECISIONS
        for head in (None, *(head for head in PUBLISHED if head.model == name))
    ]


def prediction(c: ModelConfig, precision: str, head: Published | None, card: Card) -> dict:
    nodes, length = (head.nodes, head.acceptance_length) if head else (1, 1.0)
    verify = target_seconds(c, precision, nodes, card)
    draft = draft_seconds(c, precision, head, card) if head else 0.0
    return {
        "draft": head.head if head else "none",
        "nodes": nodes,
        "acceptance_length": length,
        "draft_ms": draft * 1e3,
        "verify_ms": verify * 1e3,
        "round_ms": (draft + verify) * 1e3,
        "tokens_per_s": length / (draft + verify),
    }


def same_acceptance(tree: Tree, family: str, length: float) -> float:
    """Tokens per second of LLaMA-3.1-8B in int8 on an RTX 3090, drafted as `tree` says by a head of
    this family, a model as large as LLaMA-3.2-1B ("model") or the text alone (""), of this
    acceptance length."""
    c, card = MODELS["LLaMA-3.1-8B"], CARDS["rtx3090"]
    draft = 0.0
    if family == "model":
        small = llama(16, 2048, 4, 8192, c.vocab_size)
        draft = tree.levels * target_seconds(small, "int8", tree.beam, card)
    elif family == "medusa":
        read = tree.levels * c.dim**2 + c.vocab_size * c.dim
        draft = pass_seconds(read, 0, "int8", tree.levels, card)
    elif family:
        words = c.vocab_size if family == "eagle1" else 32000
        head = Published("", "", family, words, tree.nodes, tree.levels, tree.beam, length)
        draft = draft_seconds(c, "int8", head, card)
    return length / (draft + target_seconds(c, "int8", tree.nodes, card))


def roofline_table(card: Card) -> str:
    heading = (
        f"Bounds for one {card.name}: {card.bandwidth / 1e9:.0f} GB/s, "
        f"{card.rate16 / 1e12:.1f} TFLOP/s in 16 bit, {card.rate8 / 1e12:.0f} TOP/s in int8, "
        f"{EFFICIENCY:.0%} of each, {CONTEXT} tokens cached, batch 1"
    )
    names = ("model", "precision", "draft", "nodes")
    numbers = ("acceptance_length", "draft_ms", "verify_ms", "round_ms")
    lines = [[name.replace("_", " ") for name in (*names, *numbers, "tokens/s")]]
    for found in predict(card):
        speed = f"{found['tokens_per_s']:.0f}" if found["fits"] else "does not fit"
        shown = [str(found[name]) for name in names], [f"{found[name]:.2f}" for name in numbers]
        lines.append([*shown[0], *shown[1], speed])
    return f"{heading}\n\n{markdown_table(lines)}"


# ---------------------------------------------------------------- how fast this machine reads


def readers(device: torch.device, size: int) -> dict[str, Callable[[], object]]:
    """Calls that each read `size` bytes of random numbers once, with all threads. No one reduction
    is the fastest on every machine: the best of them counts. A copy would not do: it also writes,
    and may read what it writes."""
    numbers, vector = torch.rand(size // 4, device=device), torch.rand(1024, device=device)
    matrix = numbers.view(-1, 1024)
    return {"sum": numbers.sum, "norm": numbers.norm, "mv": lambda: torch.mv(matrix, vector)}
