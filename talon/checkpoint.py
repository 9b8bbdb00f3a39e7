"""One self-describing safetensors file: tensors, with configuration and origin as metadata.

Knows tensors and dictionaries, no modules: generate.py turns the one into the other. Every program
reads and writes weight files here, so that a damaged, foreign or half-downloaded file is refused
with one line, and a failed write leaves nothing behind. Written by convert_hf_checkpoint.py,
quantize.py and train_draft.py; opened by `read_checkpoint(path)`.
"""

import ctypes
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

FORMAT, VERSION, KINDS = "talon", "1", ("target", "draft")

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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
    specs: dict[str, TensorSpec]  # in the order they were written

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


def check_weight_file(path: Path) -> int:
    """Size in bytes of a weight file; raises if it is missing, empty or a Git LFS pointer."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; check the path")
    if not path.is_file():
        raise ValueError(f"{path} is not a file; give the path of a weight file")
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path} is empty (0 bytes); download it again")
    with path.open("rb") as file:
        if file.read(20).startswith(b"version https://git-"):
            raise ValueError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull`")
    return size


def read_header(path: Path) -> tuple[dict[str, str], dict[str, TensorSpec]]:
    """(metadata, specs in header order) of any safetensors file, every size checked."""
    size = check_weight_file(path)
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
            if start.startswith((b"PK\x03\x04", b"\x80\x02")):
                raise ValueError(
                    f"{path} is a PyTorch pickle; convert its folder with convert_hf_checkpoint.py"
                )
            raise ValueError(
                f"{path} is truncated or not a safetensors file ({size} bytes); download it again"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw)
        metadata = dict(header.pop("__metadata__", {}))
        specs = {}
        end = 0
        for name, entry in header.items():
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"{name} has the unknown dtype {entry['dtype']}")
            specs[name] = TensorSpec(DTYPES[entry["dtype"]], tuple(entry["shape"]))
            first, last = entry["data_offsets"]
            if last - first != specs[name].nbytes or first < 0:
                raise ValueError(f"{name} does not fill its bytes")
            end = max(end, last)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} has a damaged safetensors header ({error}); download it again"
        ) from None
    if 8 + length + end != size:
        raise ValueError(
            f"{path} is truncated: {size} bytes instead of {8 + length + end}; download it again"
        )
    return metadata, specs


def open_safetensors(path: Path) -> safe_open:
    """`safe_open` on the CPU, its errors turned into one line that names the file."""
    check_weight_file(path)
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(
            f"{path} cannot be read as safetensors ({error}); download it again"
        ) from None


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Open one of our files, header only.

    Raises ValueError or FileNotFoundError, one line, for anything else.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(
            f"{path} is a directory; give the file that convert_hf_checkpoint.py wrote"
        )
    metadata, specs = read_header(path)
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path} was not written by Talon; convert its directory with convert_hf_checkpoint.py"
        )
    if metadata.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {metadata.get('version')}; this program reads {VERSION}: "
            "convert the source again"
        )
    if metadata.get("kind") not in KINDS:
        raise ValueError(
            f"{path} has kind {metadata.get('kind')!r}; allowed: {', '.join(KINDS)}: convert again"
        )
    try:
        config, quantization, source = (
            json.loads(metadata[key]) for key in ("config", "quantization", "source")
        )
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} has damaged metadata ({error}); convert again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} has damaged metadata (config is no object); convert again")
    return Checkpoint(path, metadata["kind"], config, quantization, source, specs)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under `path` complete or not at all: written beside it, then renamed."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"directory {path.parent} does not exist; create it first")
    if path.is_dir():
        raise ValueError(f"{path} is a directory; give the name of a file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_safetensors(
    path: Path,
    metadata: Mapping[str, str],
    specs: Mapping[str, TensorSpec],
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Write any safetensors file, one tensor in memory at a time; equal inputs give equal bytes.

    The header keeps the order of `specs`. The data is laid out by falling element size, so that
    every tensor is aligned however odd the size of an int8 one; tensors may come in any order.
    """
    end, offsets = 0, {}
    for name in sorted(specs, key=lambda name: -specs[name].dtype.itemsize):
        offsets[name] = end
        end += specs[name].nbytes
    header: dict = {"__metadata__": dict(metadata)}
    for name, spec in specs.items():
        span = [offsets[name], offsets[name] + spec.nbytes]
        header[name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": span,
        }
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    missing = set(specs)
    with atomic_file(path) as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name, tensor in tensors:
            assert TensorSpec(tensor.dtype, tuple(tensor.shape)) == specs[name], (
                name,
                tensor.dtype,
                tensor.shape,
            )
            file.seek(8 + len(raw) + offsets[name])
            _write_bytes(file, tensor)
            missing.remove(name)
        assert not missing, f"no tensor came for {sorted(missing)}"


def _write_bytes(file: BinaryIO, tensor: Tensor) -> None:
    """The tensor's bytes without a copy (and without numpy, which has no bfloat16)."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.numel():
        file.write(
            (ctypes.c_char * (tensor.numel() * tensor.itemsize)).from_address(tensor.data_ptr())
        )


def write_checkpoint(
    path: Path | str,
    *,
    kind: str,
    config: dict,
    specs: Mapping[str, TensorSpec],
    tensors: Iterable[tuple[str, Tensor]],
    quantization: dict | None = None,
    source: dict | None = None,
) -> None:
    """Write one of our files from a stream of (name, tensor); a failure leaves nothing behind."""
    assert kind in KINDS, kind
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "kind": kind,
        "config": json.dumps(config),
        "quantization": json.dumps(quantization),
        "source": json.dumps(source or {}),
    }
    write_safetensors(Path(path), metadata, specs, tensors)
