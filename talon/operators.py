"""Which operators of talon/kernels a device runs: the only place that rewires modules."""

import functools
import importlib.util

import torch
from torch import nn

from model import Attention
from talon.cli import note
from talon.kernels import cpu_kernels
from talon.sampling import Picks

tell_once = functools.cache(note)


@functools.cache
def has_cpu_operators() -> bool:
    """Whether the CPU operators for a few rows can be compiled here; why not is said once."""
    try:
        cpu_kernels.load()
    except ValueError as error:
        note(f"note: {error}; torch's own operators are used, which are slower for a few rows")
        return False
    return True


def has_gpu_operators(device: torch.device, dtype: torch.dtype, head_dim: int = 0) -> bool:
    """Whether the operators of talon/kernels/gpu_*.py run there; why not on a GPU is said once."""
    if device.type != "cuda" or dtype == torch.float32:
        return False
    old = torch.cuda.get_device_capability(device) < (8, 0)
    missing, wide = importlib.util.find_spec("triton") is None, head_dim > 128
    if missing or old or wide:
        why = "Triton" if missing else "compute capability 8.0" if old else "heads of at most 128"
        tell_once(f"note: Talon's GPU operators need {why}; torch's own are used, which are slower")
    return not (missing or old or wide)


def choose_operators(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Let a module run, in place, by what `device` has for few rows. dtype: of the activations."""
    sizes = (part.head_dim for part in module.modules() if isinstance(part, Attention))
    if has_gpu_operators(device, dtype, max(sizes, default=0)):
        from talon.kernels.gpu_layers import put_on_gpu  # which needs Triton

        return put_on_gpu(module, dtype)
    for layer in module.modules():
        if hasattr(layer, "pack"):  # a quantised one
            layer.pack(device, dtype)
    if device.type != "cpu" or dtype not in cpu_kernels.MOST_ROWS or not has_cpu_operators():
        return
    for parent in list(module.modules()):
        if isinstance(parent, Attention):
            parent.attend = cpu_kernels.attend_rows
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype in cpu_kernels.MOST_ROWS:
                setattr(parent, name, cpu_kernels.RowsLinear(child))


def choose_picks(picks: Picks, device: torch.device) -> Picks:
    """The same for the choice of tokens."""
    if has_gpu_operators(device, torch.bfloat16):
        from talon.kernels.gpu_picks import GpuPick

        picks.by_name = {name: GpuPick(pick, device) for name, pick in picks.by_name.items()}
    return picks
