"""Files that appear whole or not at all, and the writer of ours: one tensor in memory at a time.

Leaves out: what our files hold, and reading them (talon/checkpoint.py)."""

import ctypes
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from talon.checkpoint import DTYPE_NAMES, FORMAT, KINDS, VERSION, TensorSpec
from talon.cli import check_place

TEMPORARY = ".talon-tmp"  # how the names of files end that are being written


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
    check_place(str(path), real)
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
    every tensor is aligned. Tensors may come in any order, each in pieces of its rows in order."""
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
    described = {"config": config, "quantization": quantization, "source": source or {}}
    metadata = {"format": FORMAT, "version": VERSION, "kind": kind}
    metadata |= {name: json.dumps(value) for name, value in described.items()}
    write_safetensors(Path(path), metadata, specs, tensors)
