"""The GPU check: its whole logic on a CPU, on a tiny shape."""

import json
from pathlib import Path

import pytest
import torch

import gpu_check
from model import ModelConfig

TINY = ModelConfig(
    vocab_size=160,
    dim=128,
    n_layer=2,
    n_head=4,
    n_kv_head=4,
    head_dim=32,
    intermediate_size=256,
    norm_eps=1e-5,
    max_seq_length=256,
)
PLAN = gpu_check.Plan(
    config=TINY,
    modes=(None, "int4"),
    trees=("none", "chain:4"),
    kernel_shapes=((128, 128),),
    tokens=33,
    context=128,
    compile=False,
    tests=False,
    demo=Path("absent"),
    stream=1 << 16,
)


def test_the_gpu_check_runs_every_section_and_writes_both_files(tmp_path, capsys):
    assert gpu_check.check(torch.device("cpu"), tmp_path, PLAN) == 0
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert list(report["sections"]) == ["kernels", "decoding unquantised", "decoding int4", "demo"]
    for name in ("decoding unquantised", "decoding int4"):
        plain, drafted = report["sections"][name]
        assert plain["ids_as_made"] and drafted["ids_as_made"] and drafted["ids_as_plain"]
        assert plain["acceptance_length"] == 1 and drafted["acceptance_length"] > 3
        assert drafted["bound_ms"] > 0 and drafted["replays_per_round"] is None
    text = (tmp_path / "gpu_check.md").read_text()
    assert (
        "chain:4" in text
        and "int8-dynamic | 128 x 128" in text
        and capsys.readouterr().out.strip() == text.strip()
    )


def test_a_failing_section_is_recorded_and_the_next_one_runs(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel\nat all")

    monkeypatch.setattr(gpu_check, "check_kernels", broken)
    assert (
        gpu_check.check(torch.device("cpu"), tmp_path, gpu_check.smaller(PLAN, modes=(None,))) == 1
    )
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["failures"] == {"kernels": "RuntimeError: no such kernel at all"}
    assert "decoding unquantised" in report["sections"]
    assert "FAILED kernels" in (tmp_path / "gpu_check.md").read_text()


def test_no_section_begins_after_the_deadline(tmp_path):
    assert (
        gpu_check.check(torch.device("cpu"), tmp_path, gpu_check.smaller(PLAN, deadline_s=-1.0))
        == 1
    )
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert not report["sections"] and len(report["failures"]) == 4


def test_launches_are_counted_per_round():
    calls = {
        "cudaGraphLaunch": 40,
        "cudaEventSynchronize": 40,
        "cudaMemcpyAsync": 40,
        "cudaLaunchKernel": 4,
        "aten::mm": 9,
    }
    assert gpu_check.launches(calls, 40) == {
        "replays_per_round": 1.0,
        "launches_per_round": 0.1,
        "waits_per_round": 1.0,
    }


def test_wrong_ids_and_extra_replays_fail_the_check():
    row = {"tree": "chain:4", "ids_as_plain": False, "replays_per_round": 2.0}
    wrong = gpu_check.verdicts(
        {"decoding int8": [row], "tests": {"passed": False, "summary": "1 failed"}, "demo": {}}
    )
    assert len(wrong) == 3
    assert not gpu_check.verdicts(
        {"decoding int8": [row | {"ids_as_plain": True, "replays_per_round": 1.0}]}
    )


def test_the_gpu_check_needs_a_gpu(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(ValueError, match="needs a GPU"):
        gpu_check.main(["--out", str(tmp_path)])


def test_the_made_up_head_is_wrong_exactly_after_every_fourth_token():
    model = gpu_check.shaped_target(TINY, None, torch.device("cpu"), torch.float32)
    head = gpu_check.shaped_head(model, torch.device("cpu"), torch.float32)
    tokens = torch.arange(20)
    features = torch.zeros(20, TINY.dim)
    hidden = head.fc(torch.cat((model.tok_embeddings(tokens), features), -1))
    guesses = head.output(hidden).argmax(-1)
    right = guesses == (tokens + 1) % TINY.dim
    assert torch.equal(right, tokens % 4 != 0)
