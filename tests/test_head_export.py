"""Export of heads: the directory reads back to the same file, or nothing is written."""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from hf_folders import command
from safetensors.torch import load_file
from test_head_formats import (
    CONFIG,
    CONFIG3,
    DIM,
    GOLDEN,
    KEY,
    VARIANTS,
    VOCAB,
    convert,
    eagle1,
    eagle3,
    make,
    nested,
)

from talon.checkpoint import Checkpoint, TensorSpec, read_checkpoint
from talon.formats import head_export
from talon.writing import write_checkpoint


def export(head: Checkpoint, out: Path, *flags: str) -> Path:
    assert command("--export", head.path, "--out", out, *flags) == 0
    return out


def refusal(capsys, head: Path, out: Path, *words: str, flags: tuple[str, ...] = ()) -> None:
    capsys.readouterr()
    before = sorted(out.parent.rglob("*"))
    assert command("--export", head, "--out", out, *flags) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.strip().splitlines()) == 1
    for word in words:
        assert word in captured.err, captured.err
    assert sorted(out.parent.rglob("*")) == before


def same(a: Checkpoint, b: Checkpoint) -> bool:
    origin = {"rope_source": None, "source_format": None}
    return (
        a.config | origin == b.config | origin
        and a.specs == b.specs
        and all(torch.equal(tensor, b.tensor(name)) for name, tensor in a.tensors())
    )


@pytest.mark.parametrize("layout", ["eagle", "speculators"])
@pytest.mark.parametrize("name", sorted(path.parent.name for path in GOLDEN.glob("*/head")))
def test_golden_heads_come_back_equal(tmp_path, capsys, name, layout):
    shutil.copytree(GOLDEN / name / "head", tmp_path / "head")
    head = convert(tmp_path / "head")
    out = tmp_path / "exported"
    if layout == "speculators" and not name.startswith("eagle3"):
        refusal(capsys, head.path, out, "EAGLE-1", "--format eagle", flags=("--format", layout))
        return
    capsys.readouterr()
    export(head, out, "--format", layout)
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert sorted(os.listdir(out)) == ["config.json", "model.safetensors"]
    assert same(convert(out), head)
    theirs = load_file(GOLDEN / name / "head" / "model.safetensors")
    if layout == "eagle":  # the published directory itself, tensor for tensor
        ours = load_file(out / "model.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_the_flat_layout_is_what_the_engines_ask_for(tmp_path, capsys):
    source = CONFIG3 | {KEY: [2, 16, 29], "rope_theta": 500000.0}
    out = export(convert(make(tmp_path / "head", source, eagle3())), tmp_path / "out")
    assert "(2, 16, 29)" in capsys.readouterr().out  # said, because the directory does not say it
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["num_hidden_layers"], config["draft_vocab_size"]) == (1, 12)
    assert (config["rope_theta"], config["rope_scaling"]) == (500000.0, None)
    assert "eagle" not in json.dumps([*config])  # no layer ids, no eagle_config
    tensors = load_file(out / "model.safetensors")
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert torch.equal(tensors["t2d"], eagle3()["t2d"])
    assert not any(name.startswith(("layers.", "embed_tokens")) for name in tensors)


def test_the_nested_layout_states_every_variant(tmp_path):
    out = export(
        convert(make(tmp_path / "head", CONFIG3, eagle3())),
        tmp_path / "out",
        "--format",
        "speculators",
    )
    config = json.loads((out / "config.json").read_text())
    assert config["norm_before_residual"] is False
    assert config["speculators_config"]["algorithm"] == "eagle3"
    names = load_file(out / "model.safetensors").keys()
    assert any(name.startswith("layers.0.") for name in names)


SCALINGS = [
    {"rope_type": "linear", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


@pytest.mark.parametrize("layout", ["eagle", "speculators"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_scaling_survives(tmp_path, scaling, layout):
    head = convert(make(tmp_path / "head", CONFIG3 | {"rope_scaling": scaling}, eagle3()))
    assert same(convert(export(head, tmp_path / "out", "--format", layout)), head)


FLAGS = ["norm_before_residual", "norm_output", *VARIANTS]


@pytest.mark.parametrize("flag", FLAGS)
def test_variants_survive_nested_and_are_refused_flat(tmp_path, capsys, flag):
    config = nested(norm_before_residual=False) | {flag: True}
    head = convert(make(tmp_path / "head", config, eagle3() | VARIANTS.get(flag, {})))
    assert head.config[flag]
    refusal(capsys, head.path, tmp_path / "out", flag, "--format speculators")
    exported = export(head, tmp_path / "out", "--format", "speculators")
    assert same(convert(exported), head)


def test_unusual_layers_survive_nested_and_are_refused_flat(tmp_path, capsys):
    head = convert(make(tmp_path / "head", CONFIG3 | {KEY: [2, 3, 9]}, eagle3()))
    refusal(capsys, head.path, tmp_path / "out", "(2, 3, 9)", "--format speculators")
    assert same(convert(export(head, tmp_path / "out", "--format", "speculators")), head)


def test_layers_that_would_read_back_differently_are_refused(tmp_path, capsys):
    config = CONFIG3 | {"eagle_config": {KEY: [0, 3, 5]}}  # ours: 1, 4, 6
    head = convert(make(tmp_path / "head", config, eagle3()))
    refusal(
        capsys, head.path, tmp_path / "out", "feature_layers", flags=("--format", "speculators")
    )


def test_own_embeddings_and_full_vocabularies_survive(tmp_path):
    tensors = eagle3(draft=VOCAB) | {"embed_tokens.weight": torch.randn(VOCAB, DIM)}
    tensors["fc.weight"] = torch.randn(DIM, 3 * 40)
    head = convert(make(tmp_path / "head", CONFIG | {"target_hidden_size": 40}, tensors))
    for layout in ("eagle", "speculators"):
        assert same(convert(export(head, tmp_path / layout, "--format", layout)), head)


def test_an_eagle1_head_of_few_words_is_exported_for_all(tmp_path, capsys):
    ids = torch.arange(0, VOCAB, 3)
    whole = convert(make(tmp_path / "head", CONFIG, eagle1()))
    tensors = dict(whole.tensors()) | {"d2t": ids - torch.arange(len(ids))}
    write_checkpoint(
        tmp_path / "few",
        kind="draft",
        config=whole.config | {"draft_vocab_size": len(ids)},
        specs=whole.specs | {"d2t": TensorSpec(torch.int64, (len(ids),))},
        tensors=tensors.items(),
    )
    back = convert(export(read_checkpoint(tmp_path / "few"), tmp_path / "out"))
    assert f"drafting over {len(ids)} ids is ours" in capsys.readouterr().out
    assert same(back, whole)


def test_what_no_layout_has_is_refused(tmp_path, capsys):
    tensors = eagle3(draft=VOCAB)
    tensors.pop("lm_head.weight")
    head = convert(make(tmp_path / "a", CONFIG, tensors))
    refusal(capsys, head.path, tmp_path / "out", "lm_head")
    tensors = eagle1() | {"lm_head.weight": torch.randn(VOCAB, DIM)}
    head = convert(make(tmp_path / "b", CONFIG, tensors))
    refusal(capsys, head.path, tmp_path / "out", "lm_head")


def test_targets_and_quantised_heads_are_refused(tmp_path, capsys):
    head = convert(make(tmp_path / "head", CONFIG3, eagle3()))
    shutil.copytree(GOLDEN / "eagle1_static_seed0" / "target", tmp_path / "target")
    target = convert(tmp_path / "target")
    refusal(capsys, target.path, tmp_path / "out", "target")
    write_checkpoint(
        tmp_path / "int8",
        kind="draft",
        config=head.config,
        specs=head.specs,
        tensors=head.tensors(),
        quantization={"mode": "int8"},
    )
    refusal(capsys, tmp_path / "int8", tmp_path / "out", "quantised")
    refusal(capsys, tmp_path / "none", tmp_path / "out", "does not exist")


def test_only_an_empty_directory_is_filled(tmp_path, capsys):
    head = convert(make(tmp_path / "head", CONFIG3, eagle3()))
    out = tmp_path / "out"
    out.mkdir()
    export(head, out)
    refusal(capsys, head.path, out, "not an empty directory")
    (tmp_path / "file").write_text("x")
    refusal(capsys, head.path, tmp_path / "file", "not an empty directory")


def test_exporting_twice_gives_identical_bytes(tmp_path):
    head = convert(make(tmp_path / "head", CONFIG3, eagle3()))
    for name in ("config.json", "model.safetensors"):
        first, second = (export(head, tmp_path / f"{name}{i}") / name for i in range(2))
        assert first.read_bytes() == second.read_bytes()


def test_an_export_that_reads_back_differently_leaves_nothing(tmp_path, capsys, monkeypatch):
    head = convert(make(tmp_path / "head", CONFIG3, eagle3()))
    original = head_export.published_tensors

    def damaged(*args):
        for name, tensor in original(*args):
            yield name, tensor + 1 if name == "norm.weight" else tensor

    monkeypatch.setattr(head_export, "published_tensors", damaged)
    refusal(capsys, head.path, tmp_path / "new" / "out", "norm.weight", "nothing was written")
    assert not (tmp_path / "new").exists()


def test_a_head_with_a_number_that_is_none_is_not_exported(tmp_path, capsys):
    tensors = eagle3()
    tensors["norm.weight"][0] = 2.0
    head = convert(make(tmp_path / "head", CONFIG3, tensors))
    data = head.path.read_bytes()
    head.path.write_bytes(data.replace(struct.pack("<f", 2.0), struct.pack("<f", float("nan"))))
    refusal(capsys, head.path, tmp_path / "new" / "out", "norm.weight", "NaN")
