"""The memory plan: what decoding will hold, from the files' headers alone, and what there is."""

from dataclasses import dataclass
from pathlib import Path

import torch

from model import ModelConfig
from talon.checkpoint import Checkpoint
from talon.decoder import PREFILL_CHUNK
from talon.loading import Files
from talon.trees import Tree, bucket_widths

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
            f"{gigabytes(self.available)} free: quantise with quantize.py --mode int8 or int4, or "
            "lower --max_seq_length"
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
    """What decoding will need, from the files' headers alone."""
    c, d, chunk = files.config, files.head_config, PREFILL_CHUNK[device.type]
    rows = tree.cache_rows(max_seq_length, chunk)
    slot = c.n_layer * c.n_kv_head * c.head_dim + (d.n_kv_head * d.head_dim if d else 0)
    prefill = forward_bytes(c, chunk, 1, rows, dtype)
    drafted = forward_bytes(c, tree.nodes, max(tree.nodes, tree.beam), rows, dtype)
    workspace, graphs = max(prefill, drafted), 0
    if device.type == "cuda":  # captured rounds, of three kinds of sampling, have their own memory
        workspace, graphs = prefill, drafted + 3 * len(bucket_widths(rows)) * GRAPH_BYTES
    target, head = loaded_bytes(files.target, dtype), loaded_bytes(files.head, dtype)
    caches = 2 * rows * slot * dtype.itemsize
    return MemoryPlan(target, head, caches, workspace, graphs, available)


def loaded_bytes(checkpoint: Checkpoint | None, dtype: torch.dtype) -> int:
    """Bytes of a file's tensors once loaded: floating point ones outside quantised layers in the
    compute dtype."""
    if checkpoint is None:
        return 0
    quantized = tuple(f"{layer}." for layer in (checkpoint.quantization or {}).get("layers", {}))
    total = 0
    for name, spec in checkpoint.specs.items():
        cast = spec.dtype.is_floating_point and not name.startswith(quantized)
        size = dtype.itemsize if cast else spec.dtype.itemsize
        total += size * torch.Size(spec.shape).numel()
    return total


def forward_bytes(c: ModelConfig, tokens: int, choices: int, rows: int, dtype: torch.dtype) -> int:
    """What a target forward over `tokens` takes at most, with so many `choices` of what follows."""
    scores = 3 * c.n_head * tokens * rows * 4  # before, while and after they become weights, fp32
    states = tokens * (8 * c.intermediate_size + c.n_layer * c.dim) * dtype.itemsize
    logits = 64 * choices * c.vocab_size  # with noise, and a filter that sorts them
    return scores + states + logits


def available_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
