"""The file format: what goes in comes out, and nothing half-written or foreign is accepted."""

import errno
import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from talon.checkpoint import TensorSpec, read_checkpoint, read_header
from talon.cli import check_output
from talon.writing import TEMPORARY, atomic_file, write_checkpoint

TENSORS = {
    "odd": torch.arange(15, dtype=torch.int8).reshape(3, 5),
    "half": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "single": torch.tensor([1.5, float("nan"), -0.0]),
    "long": torch.tensor([2**40, -1]),
    "mask": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(3.0),
}


def specs_of(tensors: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in tensors.items()}


def write(path: Path, tensors=None, **changes) -> Path:
    tensors = TENSORS if tensors is None else tensors
    values = dict(
        kind="target", config={"dim": 4}, specs=specs_of(tensors), tensors=tensors.items()
    )
    write_checkpoint(path, **(values | changes))
    return path


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).contiguous().view(torch.uint8).tolist()


def refused(path: Path, error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as caught:
        read_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    return message


def test_every_tensor_and_all_metadata_come_back(tmp_path):
    source, quantization = {"directory": "x"}, {"mode": "int8"}
    path = write(tmp_path / "a", kind="draft", source=source, quantization=quantization)
    opened = read_checkpoint(path)
    assert (opened.kind, opened.config) == ("draft", {"dim": 4})
    assert (opened.source, opened.quantization) == (source, quantization)
    assert list(opened.specs.items()) == list(specs_of(TENSORS).items())
    for name, tensor in opened.tensors():
        assert tensor.dtype == TENSORS[name].dtype and bits(tensor) == bits(TENSORS[name])
        assert bits(opened.tensor(name)) == bits(TENSORS[name])
    with pytest.raises(KeyError):
        opened.tensor("other")


def test_the_file_is_ordinary_safetensors_with_aligned_tensors(tmp_path):
    path = write(tmp_path / "a.safetensors")
    loaded = load_file(path)
    assert {name: bits(t) for name, t in loaded.items()} == {n: bits(t) for n, t in TENSORS.items()}
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    assert length % 8 == 0
    assert all(isinstance(value, str) for value in header["__metadata__"].values())
    for name, tensor in TENSORS.items():
        assert header[name]["data_offsets"][0] % tensor.itemsize == 0, name


def test_writing_twice_gives_the_same_bytes_in_any_order_of_arrival(tmp_path):
    first = write(tmp_path / "a").read_bytes()
    backwards = reversed(list(TENSORS.items()))
    assert write(tmp_path / "b", tensors=TENSORS).read_bytes() == first
    write_checkpoint(
        tmp_path / "c",
        kind="target",
        config={"dim": 4},
        specs=specs_of(TENSORS),
        tensors=backwards,
    )
    assert (tmp_path / "c").read_bytes() == first


def test_a_tensor_may_come_in_pieces_of_its_rows(tmp_path):
    first = write(tmp_path / "a").read_bytes()
    pieces = []
    for name, tensor in TENSORS.items():
        rows = (tensor[:1], tensor[1:]) if tensor.ndim else (tensor,)
        pieces += [(name, part) for part in rows]
    write_checkpoint(
        tmp_path / "b", kind="target", config={"dim": 4}, specs=specs_of(TENSORS), tensors=pieces
    )
    assert (tmp_path / "b").read_bytes() == first


def test_a_strided_tensor_is_written_in_its_logical_order(tmp_path):
    tensor = torch.arange(6.0).reshape(2, 3).t()
    path = write(tmp_path / "a", {"x": tensor})
    assert torch.equal(read_checkpoint(path).tensor("x"), tensor)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_a_failure_while_writing_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = write(tmp_path / "a")
    before = path.read_bytes()

    def stream():
        yield "odd", TENSORS["odd"]
        raise error("stop")

    with pytest.raises(error):
        write_checkpoint(path, kind="target", config={}, specs=specs_of(TENSORS), tensors=stream())
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a"]


def test_a_missing_or_misshapen_tensor_is_our_bug_and_leaves_no_file(tmp_path):
    with pytest.raises(AssertionError):
        write(tmp_path / "a", tensors={}, specs=specs_of(TENSORS))
    with pytest.raises(AssertionError):
        write(tmp_path / "a", tensors={"odd": torch.zeros(2)}, specs=specs_of(TENSORS))
    assert os.listdir(tmp_path) == []


def test_writing_needs_an_existing_directory_and_a_file_name(tmp_path):
    with pytest.raises(ValueError, match="create it first"):
        write(tmp_path / "no" / "a")
    with pytest.raises(ValueError, match="is a directory"):
        write(tmp_path)


def test_an_error_of_the_system_names_the_file_and_not_the_temporary_one(tmp_path):
    with pytest.raises(OSError, match="No space") as caught, atomic_file(tmp_path / "a"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(tmp_path / "a")
    long = tmp_path / ("a" * 250)
    with pytest.raises(OSError, match="too long") as caught, atomic_file(long):
        pass
    assert caught.value.filename == str(long)


def test_atomic_file_keeps_ordinary_permissions(tmp_path):
    with atomic_file(tmp_path / "a") as file:
        file.write(b"x")
    (tmp_path / "b").write_bytes(b"x")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_a_link_is_written_through_to_its_target(tmp_path):
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link", tmp_path / "there" / "a"
    link.symlink_to(target)
    for content in (b"first", b"second"):
        with atomic_file(link) as file:
            file.write(content)
        assert link.is_symlink() and target.read_bytes() == content
    link.unlink()
    link.symlink_to(tmp_path / "none" / "a")
    with pytest.raises(ValueError, match="none does not exist"), atomic_file(link):
        pass


def test_an_output_that_is_a_link_is_judged_by_its_target(tmp_path):
    (tmp_path / "input").touch()
    for target, word in (("none/a", "none does not exist"), ("input", "is an input")):
        link = tmp_path / f"{target[:4]}.link"
        link.symlink_to(tmp_path / target)
        with pytest.raises(ValueError, match=word):
            check_output("--json", link, [tmp_path / "input"])


def test_what_nobody_holds_any_more_is_removed_and_what_is_being_written_is_not(tmp_path):
    left, young = (tmp_path / f".{name}.0123{TEMPORARY}" for name in ("a", "b"))
    directory = tmp_path / f".c.0123{TEMPORARY}"
    directory.mkdir()
    (directory / "x").touch()
    foreign = tmp_path / ".a.123.tmp"
    for path in (left, young, foreign):
        path.touch()
    os.utime(left, (0, 0))
    os.utime(directory, (0, 0))
    with atomic_file(tmp_path / "first"):
        held = {path.name for path in tmp_path.iterdir()} - {young.name, foreign.name}
        assert len(held) == 1
        os.utime(tmp_path / held.pop(), (0, 0))
        with atomic_file(tmp_path / "second"):
            pass
    assert sorted(os.listdir(tmp_path)) == sorted([foreign.name, young.name, "first", "second"])


def test_missing_empty_and_directory_are_named(tmp_path):
    assert "does not exist" in refused(tmp_path / "no", FileNotFoundError)
    (tmp_path / "zero").write_bytes(b"")
    assert "0 bytes" in refused(tmp_path / "zero")
    assert "convert_hf_checkpoint.py" in refused(tmp_path)


def test_a_git_lfs_pointer_is_recognised(tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"
    (tmp_path / "a").write_bytes(pointer)
    assert "git lfs pull" in refused(tmp_path / "a")


@pytest.mark.parametrize("keep", [3, 8, 40, 0.5, -1])
def test_a_file_cut_anywhere_is_refused(tmp_path, keep):
    raw = write(tmp_path / "a").read_bytes()
    (tmp_path / "b").write_bytes(raw[: int(len(raw) * keep) if keep == 0.5 else keep])
    assert "truncated" in refused(tmp_path / "b")


def test_a_file_with_bytes_after_its_end_is_refused(tmp_path):
    raw = write(tmp_path / "a").read_bytes()
    (tmp_path / "b").write_bytes(raw + b"xx")
    message = refused(tmp_path / "b")
    assert "longer than its header says" in message and "truncated" not in message
    assert f"{len(raw) + 2} bytes instead of {len(raw)}" in message


def raw_file(path: Path, header: object, body: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + body)
    return path


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"\xff\xfe{}",
        [1, 2],
        {"x": 3},
        {"x": {"dtype": "F32", "shape": [2]}},
        {"x": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}},
        {"x": {"dtype": "F32", "shape": "ab", "data_offsets": [0, 4]}},
        b"[" * 100_000,
    ],
)
def test_a_damaged_header_is_one_line(tmp_path, header):
    refused(raw_file(tmp_path / "a", header, b"\0" * 4))


def test_a_header_length_of_2_to_the_60_allocates_nothing(tmp_path):
    assert "truncated or not" in refused(raw_file(tmp_path / "a", {}, length=2**60))


def test_offsets_past_the_end_are_truncation(tmp_path):
    header = {"x": {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]}}
    assert "truncated" in refused(raw_file(tmp_path / "a", header, b"\0" * 100))


@pytest.mark.parametrize("dtype", ["F4", "F8_E8M0", "F8_E4M3", "F6_E2M3"])
def test_numbers_of_other_quantisers_are_named_not_called_damaged(tmp_path, dtype):
    size = {"F4": 4, "F6_E2M3": 6}.get(dtype, 8)
    header = {"x": {"dtype": dtype, "shape": [8], "data_offsets": [0, size]}}
    message = refused(raw_file(tmp_path / "a", header, b"\0" * size))
    assert f"x has the dtype {dtype}" in message and "quantised elsewhere" in message
    assert "damaged" not in message and "download" not in message


def test_overlapping_tensors_are_refused_when_read(tmp_path):
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    meta = {key: "{}" for key in ("config", "source")} | {"quantization": "null"}
    meta |= {"format": "talon", "version": "1", "kind": "target"}
    path = raw_file(tmp_path / "a", {"__metadata__": meta, "x": entry, "y": entry}, b"\0" * 4)
    with pytest.raises(ValueError, match="cannot be read"):
        read_checkpoint(path).tensor("x")


@pytest.mark.parametrize("name", ["a.bin", "a.pth", "a.safetensors"])
def test_a_pickle_is_recognised_by_content(tmp_path, name):
    torch.save({"x": torch.zeros(2)}, tmp_path / name)
    assert "pickle" in refused(tmp_path / name)


def test_foreign_newer_and_broken_metadata_are_refused(tmp_path):
    save_file({"x": torch.zeros(2)}, tmp_path / "hf", metadata={"format": "pt"})
    assert "convert" in refused(tmp_path / "hf")
    save_file({"x": torch.zeros(2)}, tmp_path / "none")
    assert "convert" in refused(tmp_path / "none")
    good = {"format": "talon", "version": "1", "kind": "target", "config": "{}", "source": "{}"}
    good["quantization"] = "null"
    for key, value, word in [
        ("version", "2", "version 2"),
        ("kind", "tokenizer", "kind"),
        ("config", "{", "metadata"),
        ("config", "[]", "metadata"),
        ("source", None, "metadata"),
    ]:
        metadata = {k: v for k, v in (good | {key: value}).items() if v is not None}
        save_file({"x": torch.zeros(2)}, tmp_path / "x", metadata=metadata)
        assert word in refused(tmp_path / "x")


def test_read_header_reads_any_safetensors_file(tmp_path):
    save_file({"x": torch.zeros(2, 3)}, tmp_path / "a", metadata={"format": "pt"})
    metadata, specs = read_header(tmp_path / "a")
    assert metadata == {"format": "pt"} and specs == {"x": TensorSpec(torch.float32, (2, 3))}
