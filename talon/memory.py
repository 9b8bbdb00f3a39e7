"""The memory plan: what decoding will hold, from the files' headers alone, and what there is."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle_draft import DraftConfig
from model import ModelConfig
from talon.checkpoint import Checkpoint
from talon.decoder import CHUNKS
from talon.loading import Files, loaded_dtype
from talon.operators import has_cpu_operators
from talon.trees import Tree

GRAPH_BYTES = 10**7  # of a captured round by itself: about 900 kernels of 10 KB each (estimated)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a decoder will hold. `available` is None where the system does not say."""

    target: int
    head: int
    caches: int
    workspace: int  # of a forward at a time
    graphs: int = 0  # the pool of all captured rounds, and they themselves
    available: int | None = None

    @property
    def total(self) -> int:
        return self.target + self.head + self.caches + self.workspace + self.graphs

    def check(self) -> None:
        if self.available is None or self.total <= self.available:
            return
        raise ValueError(
            f"this needs {gigabytes(self.total)} (target {gigabytes(self.target)}, head "
            f"{gigabytes(self.head)}, caches {gigabytes(self.caches)}, workspace "
            f"{gigabytes(self.workspace + self.graphs)}) but the device has "
            f"{gigabytes(self.available)} free: quantise (quantize.py), or lower --max_seq_length"
        )


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def plan_memory(
    files: Files,
    max_seq_length: int,
    tree: Tree,
    dtype: torch.dtype,
    device: torch.device,
    available: int | None,
) -> MemoryPlan:
    """What decoding will need."""
    c, d, chunk = files.config, files.head_config, CHUNKS[device.type][-1]
    rows = tree.cache_rows(max_seq_length, chunk)
    slot = cached(c) + (cached(d) if d else 0)
    in_parts = device.type == "cuda" and dtype != torch.float32
    parts = math.ceil(math.sqrt(rows / 96))  # see talon/kernels/gpu_attention.py; else all scores
    score = 4 * (parts * (c.head_dim + 2) if in_parts else 3 * rows)
    if device.type == "cpu" and dtype != torch.float16 and has_cpu_operators():
        score = 2048 * rows // (c.n_head * chunk)  # of 512 tokens and heads at a time
    prefill = forward_bytes(c, chunk, 1, score, dtype)
    drafted = forward_bytes(c, tree.nodes, max(tree.nodes, tree.beam), score, dtype)
    workspace, graphs = max(prefill, drafted), 0
    if device.type == "cuda":  # captured rounds, of three kinds of sampling, have their own memory
        workspace, graphs = prefill, drafted + 3 * GRAPH_BYTES
    target, head = loaded_bytes(files.target, dtype), loaded_bytes(files.head, dtype)
    if in_parts and d and not getattr(d, "own_output", True) and not files.target.quantization:
        head += d.draft_vocab_size * c.dim  # the lm_head that it borrows, once more in int8
    caches = 2 * rows * slot * dtype.itemsize
    return MemoryPlan(target, head, caches, workspace, graphs, available)


def cached(c: ModelConfig | DraftConfig) -> int:
    """Numbers of a token's keys, or of its values, in all layers; Medusa heads keep none."""
    return getattr(c, "n_layer", 1) * c.n_kv_head * c.head_dim if hasattr(c, "n_kv_head") else 0


def loaded_bytes(checkpoint: Checkpoint | None, dtype: torch.dtype) -> int:
    """Bytes of a file's tensors once loaded."""
    specs = checkpoint.specs if checkpoint else {}
    return sum(
        loaded_dtype(checkpoint, name, dtype).itemsize * math.prod(spec.shape)
        for name, spec in specs.items()
    )


def forward_bytes(c: ModelConfig, tokens: int, choices: int, score: int, dtype: torch.dtype) -> int:
    """What a target forward over `tokens` takes at most, with so many `choices` of what follows.
    score: bytes of attention for each token and head."""
    states = tokens * (8 * c.intermediate_size + c.n_layer * c.dim) * dtype.itemsize
    logits = 64 * choices * c.vocab_size  # with noise, and a filter that sorts them
    return c.n_head * tokens * score + states + logits


CGROUP_FILES = (  # of version 2 and 1: the limit, what is in use, how its statistics are named
    ("sys/fs/cgroup", "memory.max", "memory.current", "{}_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_{}_file"),
)


def numbers_in(path: Path) -> dict[str, int]:
    """`name 1` or `name: 1 kB` a line of a file of the kernel; one number alone is named ''."""
    text = path.read_text(encoding="ascii") if path.is_file() else ""
    found = re.findall(r"^(?:(\w+):?\s+)?(\d+)(?: kB)?$", text, re.MULTILINE)
    return {name: int(number) for name, number in found}


def cgroup_memory(root: Path) -> Iterator[int]:
    """What each limit around this process leaves, as a container has one. The system drops cached
    files where memory is wanted."""
    groups = root / "proc/self/cgroup"
    lines = groups.read_text().splitlines() if groups.is_file() else []
    paths = {Path(line.split(":", 2)[2]).relative_to("/") for line in lines}
    for group in {parent for path in paths for parent in (path, *path.parents)}:
        for folder, limit, used, cached in CGROUP_FILES:
            folder = root / folder / group
            if most := numbers_in(folder / limit).get(""):
                stat = numbers_in(folder / "memory.stat")
                files = sum(stat.get(cached.format(kind), 0) for kind in ("active", "inactive"))
                yield max(0, most - numbers_in(folder / used).get("", 0) + files)


def available_memory(device: torch.device, root: Path = Path("/")) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    machine = numbers_in(root / "proc/meminfo").get("MemAvailable")
    left = [1024 * machine] if machine else []
    return min([*left, *cgroup_memory(root)], default=None)
