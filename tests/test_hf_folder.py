"""A Hugging Face directory's weight files: shards, index, links; damaged and hostile ones."""

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from hf_folders import CONFIG, LFS, command, convert, make, refusal, shard, tiny_tensors
from safetensors.torch import load_file, save_file

from talon.checkpoint import read_checkpoint


def test_no_weights_names_what_was_looked_for(tmp_path, capsys):
    path = make(tmp_path, save=False)
    (path / "consolidated.00.pth").write_bytes(b"x")
    refusal(capsys, path, "model.safetensors", "pytorch_model.bin", "consolidated.00.pth")


def test_an_incomplete_download_names_the_file(tmp_path, capsys):
    path = make(tmp_path, save=False)
    shard(path, tiny_tensors(CONFIG))
    (path / "model-00002-of-00003.safetensors").unlink()
    refusal(capsys, path, "model-00002-of-00003.safetensors")
    (path / "model.safetensors").symlink_to(path / "gone")
    refusal(capsys, path, "model.safetensors", "does not exist")


def edit_index(path: Path, change) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def test_index_and_shards_must_belong_together(tmp_path, capsys):
    path = make(tmp_path, save=False)
    shard(path, tiny_tensors(CONFIG))
    index = (path / "model.safetensors.index.json").read_text()
    first, second = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2))
    name = next(name for name, file in json.loads(index)["weight_map"].items() if file == first)
    edit_index(path, lambda m: m.update({name: second}))
    refusal(capsys, path, name, first, second)
    (path / "model.safetensors.index.json").write_text(index)
    edit_index(path, lambda m: m.pop(name))
    refusal(capsys, path, name, first, "index")
    (path / "model.safetensors.index.json").write_text(index)
    edit_index(path, lambda m: m.update({"model.ghost": second}))
    refusal(capsys, path, "model.ghost", second)


def test_a_tensor_in_two_shards_is_refused(tmp_path, capsys):
    path = make(tmp_path, save=False)
    shard(path, tiny_tensors(CONFIG))
    file = path / "model-00003-of-00003.safetensors"
    save_file(load_file(file) | {"model.embed_tokens.weight": torch.zeros(32, 16)}, file)
    refusal(capsys, path, "model.embed_tokens.weight", file.name)


def test_an_extra_shard_is_ignored_with_a_note(tmp_path, capsys):
    path = make(tmp_path, save=False)
    shard(path, tiny_tensors(CONFIG))
    save_file({"x": torch.zeros(2)}, path / "model-00009-of-00009.safetensors")
    convert(path)
    assert "model-00009-of-00009.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_a_damaged_index_is_one_line(tmp_path, capsys, content):
    path = make(tmp_path, save=False)
    (path / "model.safetensors.index.json").write_text(content)
    refusal(capsys, path, "model.safetensors.index.json")


@pytest.mark.parametrize(
    "entry",
    [
        "../other/model.safetensors",
        "/etc/hostname",
        "sub/../../other/model.safetensors",
        "sub/model.safetensors",
        "..",
        "",
        "a\0b",
        "sub",
        "link.safetensors",
        7,
        None,
    ],
)
def test_an_index_may_not_lead_out_of_the_directory(tmp_path, capsys, entry):
    path = make(tmp_path / "model", save=False)
    make(tmp_path / "other")
    (path / "sub").mkdir()
    (path / "link.safetensors").symlink_to(tmp_path / "other" / "model.safetensors")
    shard(path, tiny_tensors(CONFIG))
    edit_index(path, lambda m: m.update({"model.norm.weight": entry}))
    refusal(capsys, path, repr(entry))


@pytest.mark.parametrize("sharded", [False, True])
def test_links_of_the_hub_cache_are_followed(tmp_path, sharded):
    cache = tmp_path / "models--org--name"
    snapshot = make(cache / "snapshots" / "abc", save=not sharded)
    if sharded:
        shard(snapshot, tiny_tensors(CONFIG))
    (cache / "blobs").mkdir()
    for i, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(cache / "blobs" / f"{i:064x}")
        file.symlink_to(Path("..", "..", "blobs", f"{i:064x}"))
    out = tmp_path / "out.safetensors"
    assert command("--checkpoint_dir", snapshot, "--out", out) == 0
    assert read_checkpoint(out).config["dim"] == 16


ONE = {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]}
DAMAGES = {
    "lfs": LFS,
    "zero": b"",
    "huge header": struct.pack("<Q", 2**60) + b"{}",
    "past the end": struct.pack("<Q", len(json.dumps({"x": ONE})))
    + json.dumps({"x": ONE}).encode(),
    "html": b"<html>Sign in to continue</html>",
}


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("damage", [*DAMAGES, "half"])
def test_damaged_weight_files_are_named(tmp_path, capsys, name, damage):
    path = make(tmp_path, save=False)
    if damage == "half":
        tensors = tiny_tensors(CONFIG)
        save = torch.save if name.endswith("bin") else save_file
        save(tensors, path / name)
        raw = (path / name).read_bytes()
        (path / name).write_bytes(raw[: len(raw) // 2])
    else:
        (path / name).write_bytes(DAMAGES[damage])
    refusal(capsys, path, name)


class Hostile:
    """An object whose unpickling would run a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("what", ["value", "whole"])
def test_a_hostile_pickle_is_refused_and_not_run(tmp_path, capsys, new, what):
    path, marker = make(tmp_path / "model", save=False), tmp_path / "marker"
    content = Hostile(marker) if what == "whole" else {"x": Hostile(marker)}
    torch.save(content, path / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    refusal(capsys, path, "pytorch_model.bin", "refused")
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(content))
    refusal(capsys, path, "pytorch_model.bin", "refused")
    assert not marker.exists()


@pytest.mark.parametrize("content", [[1, 2], {"a": 1}, {"state_dict": {}}, {1: torch.zeros(1)}])
def test_a_pickle_that_is_no_flat_state_is_refused(tmp_path, capsys, content):
    path = make(tmp_path, save=False)
    torch.save(content, path / "pytorch_model.bin")
    refusal(capsys, path, "pytorch_model.bin")
