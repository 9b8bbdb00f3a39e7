"""The memory plan: what it counts, what there is, and that LLaMA-2-13B fits 24 GB."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from eagle_draft import DraftConfig, DraftHead
from model import ModelConfig, Transformer
from talon.checkpoint import Checkpoint, TensorSpec
from talon.kernels.linear import LINEARS
from talon.loading import Files, MemoryPlan, available_memory, plan_memory
from talon.trees import parse_tree

CPU = torch.device("cpu")
CPU = torch.device("cpu")
RTX_3090 = 24 * 2**30 - 600 * 2**20  # what a display-free card leaves to a program
LLAMA2_13B = ModelConfig(32000, 5120, 40, 40, 40, 128, 13824, 1e-5, 4096)
HEAD_13B = DraftConfig(
    "eagle3", 5120, 40, 40, 128, 13824, 1e-5, 32000, 32000, 5120, 4096, feature_layers=(2, 20, 37)
)


def headers(module: nn.Module, kind: str, config: object, mode: str | None) -> Checkpoint:
    """The file that a model of this shape would have, by its header alone."""
    specs = {n: TensorSpec(torch.float16, tuple(t.shape)) for n, t in module.state_dict().items()}
    quantization = None
    if mode:
        linears = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
        quantization = {"mode": mode, "groupsize": 128, "layers": dict.fromkeys(linears, mode)}
        for name, linear in linears.items():
            stored = LINEARS[mode].specs(linear.in_features, linear.out_features, 128)
            specs |= {f"{name}.{part}": spec for part, spec in stored.items()}
    return Checkpoint(Path("x"), kind, asdict(config), quantization, {}, specs)


def plan_13b(mode: str | None, head_mode: str | None, context: int) -> MemoryPlan:
    with torch.device("meta"):
        target = headers(Transformer(LLAMA2_13B), "target", LLAMA2_13B, mode)
        head = headers(DraftHead(HEAD_13B), "draft", HEAD_13B, head_mode)
    files = Files(target, LLAMA2_13B, None, head, HEAD_13B)
    tree = parse_tree("dynamic:nodes=60,levels=8,top_k=10")
    return plan_memory(files, context, tree, torch.bfloat16, RTX_3090)


@pytest.mark.parametrize("head_mode", [None, "int8"])
def test_llama2_13b_in_int8_with_its_head_and_2048_positions_fits_24_gb(head_mode):
    plan = plan_13b("int8", head_mode, 2048)
    assert 13e9 < plan.target < 13.4e9  # 12.9 billion int8 weights and the half-precision embedding
    assert 1.6e9 < plan.caches < 2.1e9  # 2 * 40 layers * 5120 * 2304 rows * 2 bytes, and the head's
    plan.check()


def test_llama2_13b_in_half_precision_is_refused_with_what_would_fit():
    with pytest.raises(ValueError, match=r"needs .* GB .* free: quantise .* --max_seq_length"):
        plan_13b(None, None, 2048).check()


def test_int4_leaves_room_for_the_whole_context():
    plan_13b("int4", "int4", 4096).check()


def test_without_knowing_the_devices_memory_nothing_is_refused():
    MemoryPlan(10**15, 0, 0, 0).check()


MEMINFO = "MemTotal: 16000000 kB\nMemFree: 100 kB\nMemAvailable: 8000000 kB\n"
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
V2 = ("memory.max", "memory.current", "")


def container(root: Path, group: str, names: tuple[str, str, str], limit: object, used: int):
    """One group's files; 10^6 bytes of what is used are cached files."""
    folder = root / "sys/fs/cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    cached = f"{names[2]}inactive_file 400000\n{names[2]}active_file 600000\n"
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file 7\n{cached}")


def machine(root: Path, groups: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO)
    (root / "proc/self/cgroup").write_text(groups)
    return root


def test_the_memory_of_a_machine_without_a_container_is_what_it_says(tmp_path):
    root = machine(tmp_path, "0::/user.slice\n")
    container(root, "user.slice", V2, "max", 10**6)
    assert available_memory(CPU, root) == 8_192_000_000
    assert available_memory(CPU, root / "nowhere") is None


@pytest.mark.parametrize("limited", ["", "pod", "pod/box"])
def test_the_least_of_all_limits_around_a_container_counts(tmp_path, limited):
    root = machine(tmp_path, "0::/pod/box\n")
    for group in ("", "pod", "pod/box"):
        container(root, group, V2, 2 * 10**9 if group == limited else "max", 5 * 10**8)
    assert available_memory(CPU, root) == 1_501_000_000


def test_a_container_of_version_1_counts_even_where_its_own_path_is_hidden(tmp_path):
    root = machine(tmp_path, "9:name=systemd:/docker/1\n4:cpu,memory:/docker/1\n0::/\n")
    container(root, "memory", V1, 3 * 10**9, 10**9)
    assert available_memory(CPU, root) == 2_001_000_000


def test_a_container_that_is_full_leaves_nothing(tmp_path):
    root = machine(tmp_path, "0::/\n")
    container(root, "", V2, 10**6, 10**9)
    assert available_memory(CPU, root) == 0
