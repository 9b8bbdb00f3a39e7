"""One self-describing safetensors file: tensors, with configuration and origin as metadata.

Knows tensors and dictionaries, no modules: talon/loading.py turns the one into the other. Every
program reads its files here, so that a damaged, foreign or half-downloaded file is refused with one
line. Leaves out: writing them (talon/writing.py), and other people's configurations."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

FORMAT, VERSION, KINDS = "talon", "1", ("target", "draft")

# The precisions that flags name.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# Everything that a file may hold, under the names that safetensors gives it.
STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

DTYPE_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}


class TensorSpec(NamedTuple):
    """What a tensor is, without its numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Checkpoint:
    """An opened file: metadata and specs in memory, tensors still on disk."""

    path: Path
    kind: str  # "target" | "draft"
    config: dict
    quantization: dict | None
    source: dict
    specs: dict[str, TensorSpec]  # in the order of the header
    processes = 1  # that share a target's file (talon/parallel.py)

    @cached_property
    def mapped(self) -> safe_open:
        """The file, mapped into memory once, however many of its tensors are read."""
        return open_safetensors(self.path)

    def tensor(self, name: str) -> Tensor:
        """One tensor on the CPU; KeyError for an unknown name."""
        if name not in self.specs:
            raise KeyError(name)
        return self.mapped.get_tensor(name)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every (name, tensor) in file order, one at a time."""
        return ((name, self.tensor(name)) for name in self.specs)


def check_file(path: Path) -> int:
    """Size in bytes of a file of a checkpoint; raises if missing, empty or a Git LFS pointer."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; check the path, or download it")
    if not path.is_file():
        raise ValueError(f"{path} is not a file; give the path of a file")
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path} is empty (0 bytes); download it again")
    with path.open("rb") as file:
        if file.read(20).startswith(b"version https://git-"):
            raise ValueError(f"{path} is a Git LFS pointer, not the file; run `git lfs pull`")
    return size


def open_safetensors(path: Path) -> safe_open:
    """`safe_open` on the CPU, its errors turned into one line that names the file."""
    size = check_file(path)
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{path} {damage(path, size, str(error))}") from None


def damage(path: Path, size: int, complaint: str) -> str:
    """What is wrong with a file that the library refuses, and what to do."""
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if length > size - 8:
            if start.startswith((b"PK\x03\x04", b"\x80\x02")):
                return "is a PyTorch pickle; convert its folder with convert_hf_checkpoint.py"
            return f"is truncated or not a safetensors file ({size} bytes); download it again"
        if "not fully covered" not in complaint:
            return f"cannot be read as safetensors ({complaint}); download it again"
        entries = json.loads(file.read(length)).items()
    ends = [entry["data_offsets"][1] for name, entry in entries if name != "__metadata__"]
    wanted = 8 + length + max(ends, default=0)
    fault = "truncated" if size < wanted else "longer than its header says"
    return f"is {fault}: {size} bytes instead of {wanted}; download it again"


def read_header(path: Path) -> tuple[dict[str, str], dict[str, TensorSpec]]:
    """(metadata, specs in header order) of any safetensors file, checked by the library."""
    open_safetensors(path)  # forgets the order
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    metadata, specs = header.pop("__metadata__", {}), {}
    for name, entry in header.items():
        if entry["dtype"] not in STORED_DTYPES:
            raise ValueError(
                f"{path}: {name} has the dtype {entry['dtype']}; supported: "
                f"{', '.join(STORED_DTYPES)} (a checkpoint quantised elsewhere is not)"
            )
        specs[name] = TensorSpec(STORED_DTYPES[entry["dtype"]], tuple(entry["shape"]))
    return metadata, specs


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Open one of our files, header only; ValueError or FileNotFoundError for anything else."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a directory; give a file of convert_hf_checkpoint.py")
    metadata, specs = read_header(path)
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path} was not written by Talon; convert its directory with convert_hf_checkpoint.py"
        )
    for key, allowed in (("version", (VERSION,)), ("kind", KINDS)):
        if metadata.get(key) not in allowed:
            raise ValueError(
                f"{path} has {key} {metadata.get(key)}; this program reads {', '.join(allowed)}: "
                "convert the source again"
            )
    try:
        fields = {key: json.loads(metadata[key]) for key in ("config", "quantization", "source")}
        if not isinstance(fields["config"], dict):
            raise ValueError("config is no object")
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} has damaged metadata ({error}); convert again") from None
    return Checkpoint(path, metadata["kind"], specs=specs, **fields)
