"""One self-describing safetensors file: tensors, with configuration and origin as metadata.

Knows tensors and dictionaries, no modules: loading.py turns the one into the other. Every program
reads and writes its files here, so that a damaged, foreign or half-downloaded file is refused with
one line, and a failed write leaves nothing behind. Written by convert_hf_checkpoint.py, quantize.py
and train_draft.py; opened by `read_checkpoint(path)`. Leaves out: other people's configurations.
"""

import ctypes
import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

FORMAT, VERSION, KINDS = "talon", "1", ("target", "draft")

# How the names of files end that are being written.
TEMPORARY = ".talon-tmp"

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


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Whether this process alone holds a file or directory inside; a lock dies with its process."""
    handle, alone = os.open(path, os.O_RDONLY), True
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held by another, or a file system without locks
            alone = False
        yield alone
    finally:
        os.close(handle)


def remove_abandoned(directory: Path) -> None:
    """Remove what killed runs left in a directory: temporaries of theirs that nobody holds."""
    for path in directory.glob(f".*{TEMPORARY}"):
        with suppress(OSError), locked(path) as abandoned:
            # A younger one may be about to be locked.
            if abandoned and time.time() - path.stat().st_mtime > 1:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def replacing(path: Path, directory: bool = False) -> Iterator[Path]:
    """A temporary file or directory next to `path` that takes its place when all went well."""
    remove_abandoned(path.parent)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}{TEMPORARY}")
    try:
        temporary.mkdir() if directory else temporary.touch()
        with locked(temporary):
            yield temporary
            os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            shutil.rmtree(temporary) if directory else temporary.unlink()


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under `path` complete or not at all; of a link, under its target."""
    real = Path(os.path.realpath(path))
    if not real.parent.is_dir():
        raise FileNotFoundError(f"directory {real.parent} does not exist; create it first")
    if real.exists() and not real.is_file():
        what = "a directory" if real.is_dir() else "no ordinary file"
        raise ValueError(f"{path} is {what}; give the name of a file")
    try:
        with replacing(real) as temporary, temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # Python names no file of a full disk, and nobody knows the temporary one.
        if error.filename is None or str(error.filename).endswith(TEMPORARY):
            error.filename = str(path)
        raise


def write_safetensors(
    path: Path,
    metadata: Mapping[str, str],
    specs: Mapping[str, TensorSpec],
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Write any safetensors file, one tensor in memory at a time; equal inputs give equal bytes.

    The header keeps the order of `specs`. The data is laid out by falling element size, so that
    every tensor is aligned however odd the size of an int8 one. Tensors may come in any order, and
    each in pieces of its rows, one after the other.
    """
    end, offsets = 0, {}
    for name in sorted(specs, key=lambda name: -specs[name].dtype.itemsize):
        offsets[name] = end
        end += specs[name].nbytes
    header: dict = {"__metadata__": dict(metadata)}
    for name, spec in specs.items():
        header[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape)}
        header[name]["data_offsets"] = [offsets[name], offsets[name] + spec.nbytes]
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    written = dict.fromkeys(specs, 0)
    with atomic_file(path) as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name, rows in tensors:
            promised = (specs[name].dtype, specs[name].shape[1:])
            assert (rows.dtype, tuple(rows.shape[1:])) == promised, f"{name} is not {promised}"
            file.seek(8 + len(raw) + offsets[name] + written[name])
            _write_bytes(file, rows)
            written[name] += rows.nbytes
        for name, spec in specs.items():
            assert written[name] == spec.nbytes, f"{written[name]} bytes came for {name}, {spec}"


def _write_bytes(file: BinaryIO, tensor: Tensor) -> None:
    """The tensor's bytes without a copy (and without numpy, which has no bfloat16)."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.numel():
        file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


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
