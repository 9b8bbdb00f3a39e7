"""The memory plan: what it counts, that it is refused in time, and what fits 24 GB. And how a GPU
is made ready."""

import weakref
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from cuda_standin import Gpu, tensors
from tiny import eager, random_head, random_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_draft import DraftConfig, DraftHead
from model import ModelConfig, Transformer
from talon.checkpoint import Checkpoint, TensorSpec
from talon.kernels.linear import LINEARS
from talon.loading import Files, fit_tree, pick_device
from talon.memory import MemoryPlan, available_memory, plan_memory
from talon.sampling import SamplingConfig
from talon.trees import parse_tree

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RTX_3090 = 24 * 2**30 - 600 * 2**20  # what a display-free card leaves to a program
LLAMA2_13B = ModelConfig(32000, 5120, 40, 40, 40, 128, 13824, 1e-5, 4096)
HEAD_13B = DraftConfig(
    "eagle3", 5120, 40, 40, 128, 13824, 1e-5, 32000, 32000, 5120, 4096, feature_layers=(2, 20, 37)
)
LLAMA3_8B = ModelConfig(128256, 4096, 32, 32, 8, 128, 14336, 1e-5, 8192, 500000.0)
HEAD_8B = DraftConfig(
    "eagle3", 4096, 32, 8, 128, 14336, 1e-5, 128256, 32000, 4096, 8192, feature_layers=(2, 16, 29)
)
TREE = "dynamic:nodes=60,levels=8,top_k=10"


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


def plan(
    target: ModelConfig, head: DraftConfig, modes: tuple[str | None, str | None], context: int
) -> MemoryPlan:
    """modes: of target and head."""
    with torch.device("meta"):
        file = headers(Transformer(target), "target", target, modes[0])
        head_file = headers(DraftHead(head), "draft", head, modes[1])
    files = Files(file, target, None, head_file, head)
    return plan_memory(files, context, parse_tree(TREE), torch.bfloat16, CUDA, RTX_3090)


def plan_13b(mode: str | None, head_mode: str | None, context: int) -> MemoryPlan:
    return plan(LLAMA2_13B, HEAD_13B, (mode, head_mode), context)


@pytest.mark.parametrize("head_mode", [None, "int8"])
def test_llama2_13b_in_int8_with_its_head_and_2048_positions_fits_24_gb(head_mode):
    needed = plan_13b("int8", head_mode, 2048)
    assert 13e9 < needed.target < 13.4e9  # 12.9 billion int8 weights and the embedding in bf16
    assert 1.6e9 < needed.caches < 2.1e9  # 2 * 40 layers * 5120 * 2304 rows * 2 bytes, and the head
    needed.check()


def test_llama2_13b_in_int8_with_its_head_and_its_whole_context_fits_24_gb():
    needed = plan_13b("int8", None, 4096)
    needed.check()
    assert needed.total < 20e9


def test_llama3_8b_in_bf16_with_its_head_and_8192_positions_fits_24_gb():
    needed = plan(LLAMA3_8B, HEAD_8B, (None, None), 8192)
    needed.check()
    assert 16e9 < needed.target < 16.1e9 and 1.1e9 < needed.caches < 1.2e9
    assert needed.total < 21e9


def test_the_captured_rounds_are_counted_on_a_gpu_once():
    """One pool: as much as the largest round, and each graph's own description."""
    short, long = (plan(LLAMA3_8B, HEAD_8B, (None, None), context) for context in (2048, 8192))
    assert 0.5e9 < short.graphs < long.graphs < 1.2e9
    with torch.device("meta"):
        file = headers(Transformer(LLAMA3_8B), "target", LLAMA3_8B, None)
    on_cpu = plan_memory(
        Files(file, LLAMA3_8B, None), 8192, parse_tree(TREE), torch.bfloat16, CPU, 1
    )
    assert on_cpu.graphs == 0 and on_cpu.head == 0
    with pytest.raises(ValueError, match="but the device has 0.00 GB free"):
        on_cpu.check()


def test_on_a_gpu_the_tree_fits_the_way_in_which_the_target_multiplies():
    """docs/gpu.md: bf16 and int8-dynamic bear 60 nodes, int8 32, int4 16."""
    eagle1, eagle3 = replace(HEAD_13B, family="eagle1"), HEAD_8B
    nodes = {mode: fit_tree(None, eagle3, mode).nodes for mode in ("16 bits", *LINEARS)}
    assert nodes == {"16 bits": 60, "int8": 32, "int8-dynamic": 60, "int4": 16}
    assert fit_tree(None, eagle1).nodes == 26 and fit_tree(None, eagle1, "16 bits").nodes == 60
    large = parse_tree("dynamic:nodes=300,levels=8,top_k=10")
    assert fit_tree(large, eagle3) == large
    with pytest.raises(ValueError, match="give 256 nodes"):
        fit_tree(large, eagle3, "int8-dynamic")
    window = parse_tree("lookahead:100,3,50")
    assert fit_tree(window, None) == window
    with pytest.raises(ValueError, match="give 256 nodes"):
        fit_tree(window, None, "16 bits")


def test_llama2_13b_in_half_precision_is_refused_with_what_would_fit():
    with pytest.raises(ValueError, match=r"needs .* GB .* free: quantise .* --max_seq_length"):
        plan_13b(None, None, 2048).check()


def test_int4_leaves_room_for_the_whole_context():
    plan_13b("int4", "int4", 4096).check()


def test_without_knowing_the_devices_memory_nothing_is_refused():
    MemoryPlan(10**15, 0, 0, 0).check()


class Allocated(TorchDispatchMode):
    """The most bytes that were in use at once of what was made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tensors((args, *(kwargs or {}).values()))}
        result = func(*args, **(kwargs or {}))
        made = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors(result)}
        for storage in (made[key] for key in made.keys() - given):
            self.now += storage.nbytes()
            weakref.finalize(storage, self.free, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def free(self, count: int) -> None:
        self.now -= count


@pytest.mark.parametrize("tree", ["none", "chain:5", TREE])
@pytest.mark.parametrize("vocab_size", [128, 8000])
def test_a_round_and_a_prefill_take_no_more_than_is_planned_and_not_much_less(
    vocab_size, tree, monkeypatch
):
    """Eagerly, in fp32 and by torch's own attention, where most is held at once."""
    monkeypatch.setattr("talon.memory.has_cpu_operators", lambda: False)
    model, shape = random_model(vocab_size=vocab_size, max_seq_length=1500), parse_tree(tree)
    decoder = eager(model, random_head(model), shape, 1500)
    files = Files(headers(model, "target", model.config, None), model.config, None)
    planned = plan_memory(files, 1500, shape, torch.float32, CPU, None).workspace
    tokens, at, held = torch.zeros(257, dtype=torch.int64), decoder.at(1500), []
    for sampling in (SamplingConfig(), SamplingConfig(0.8, top_k=20, top_p=0.9)):
        pick = decoder.picks.set(sampling)
        with torch.inference_mode():
            with Allocated() as in_prefill:
                decoder.prefill_chunk(tokens, 256, True, at, pick)
            with Allocated() as in_round:
                decoder.round(at, pick)
        held += in_prefill.peak, in_round.peak
    assert 0.5 * planned < max(held) <= planned


def test_a_gpu_is_made_ready_in_one_place():
    """Sums of 16-bit matrix multiplications are not rounded on their way, whatever stood before."""
    settings = torch.backends.cuda.matmul
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
    before = [getattr(settings, name) for name in names]
    try:
        for name in names:
            setattr(settings, name, True)
        pick_device("cpu")
        assert all(getattr(settings, name) for name in names)
        for asked in ("auto", "cuda", "cuda:0"):
            with Gpu() as gpu:
                assert pick_device(asked).type == "cuda" and gpu.chosen == (asked == "cuda:0")
        assert not any(getattr(settings, name) for name in names)
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(settings, name, value)


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
