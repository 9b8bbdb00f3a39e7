"""The GPU check: its whole logic on a CPU, on a tiny shape, and that it sees what is wrong."""

import json
import math
from dataclasses import replace
from pathlib import Path

import gpu_plain
import pytest
import torch
from cuda_standin import Gpu
from tiny import random_model

import gpu_check
from gpu_check import Check, Scope
from model import KVCache
from talon.trees import parse_tree

CPU = torch.device("cpu")
TINY = random_model(
    vocab_size=160, dim=128, n_layer=2, n_kv_head=4, head_dim=32, max_seq_length=256
).config
SCOPE = Scope(
    config=TINY,
    trees=((None, "dynamic:nodes=16,levels=4,top_k=4"), ("int4", "static")),
    shapes=((128, 128),),
    stream=1 << 16,
    tokens=40,
    context=128,
    compile=False,
    tests=False,
    demo=Path("absent"),
)


def check(out: Path, only: str = "", budget_s: float = 480.0, scope: Scope = SCOPE) -> int:
    return Check(CPU, out, budget_s, scope).run(only)


def found(out: Path) -> dict:
    return json.loads((out / "gpu_check.json").read_text())


def test_every_section_writes_its_rows(tmp_path, capsys):
    assert check(tmp_path) == 0
    report = found(tmp_path)
    assert list(report["rows"]) == ["kernels", "decoding float32", "decoding int4", "demo"]
    assert [row["mode"] for row in report["rows"]["kernels"]] == [
        "float32", "int8", "int8-dynamic", "int4",
    ]  # fmt: skip
    for section in ("decoding float32", "decoding int4"):
        plain, drafted = report["rows"][section]
        assert plain["acceptance_length"] == 1 and drafted["acceptance_length"] > 2
        assert drafted["read_ms"] > 0 and "replays_per_round" not in drafted
        assert drafted["worst_gap"] <= gpu_check.NEAR
    page = (tmp_path / "gpu_check.md").read_text()
    assert "| int8-dynamic | 128 x 128 |" in page and capsys.readouterr().out == page


@pytest.mark.slow
def test_the_whole_check_runs_by_the_operators_of_a_gpu(tmp_path, monkeypatch):
    gpu_plain.register()
    monkeypatch.setattr(gpu_check, "copies", lambda size, device: 2)
    with Gpu() as gpu:
        assert Check(torch.device("cuda"), tmp_path, 480.0, SCOPE).run() == 0
    rows = found(tmp_path)["rows"]
    assert len(rows["kernels"]) == 4 and gpu.captures
    for section in ("decoding bfloat16", "decoding int4"):
        plain, drafted = rows[section]
        assert plain["ids_as_plain"] and drafted["ids_as_plain"]
        assert drafted["acceptance_length"] > 2 > drafted["worst_gap"]


def test_what_is_expected_is_on_disk_before_it_is_measured(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(gpu_check, "medians", lambda calls, _: seen.append(found(tmp_path)) or {})
    check(tmp_path, only="kernels")
    last = [report["rows"]["kernels"][-1] for report in seen]
    assert len(last) == 4 and all(row["read_us"] > 0 and "us" not in row for row in last)
    assert "us" in seen[1]["rows"]["kernels"][0]


def test_only_some_sections_run_and_unknown_ones_are_refused(tmp_path):
    check(tmp_path, only="decoding int")
    assert list(found(tmp_path)["rows"]) == ["decoding int4"]
    with pytest.raises(ValueError, match="--only oak.*kernels, decoding float32"):
        check(tmp_path, only="oak")


def test_a_failing_section_is_written_down_and_the_next_one_runs(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel\nat all")

    monkeypatch.setattr(Check, "kernels", broken)
    assert check(tmp_path) == 1
    report = found(tmp_path)
    assert report["failures"] == {"kernels": "RuntimeError: no such kernel at all"}
    assert "decoding float32" in report["rows"]
    assert "FAILED kernels" in (tmp_path / "gpu_check.md").read_text()


def test_nothing_is_begun_when_the_budget_is_used_up(tmp_path):
    assert check(tmp_path, budget_s=-1.0) == 1
    report = found(tmp_path)
    assert not report["rows"] and len(report["failures"]) == 4
    assert "--budget_s" in report["failures"]["kernels"]


def test_launches_are_counted_per_round():
    calls = {
        "cudaGraphLaunch": 40,
        "cudaEventSynchronize": 40,
        "cudaMemcpyAsync": 40,
        "cudaLaunchKernel": 4,
        "aten::mm": 9,
    }
    counts = {"replays_per_round": 1.0, "launches_per_round": 0.1, "waits_per_round": 1.0}
    assert gpu_check.launches(calls, 40) == counts


def test_the_gpu_check_needs_a_gpu(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(ValueError, match="needs a GPU"):
        gpu_check.main(["--out", str(tmp_path)])


def oracle_decoder(tree: str = "chain:4") -> gpu_check.OracleDecoder:
    torch.manual_seed(1)
    model = gpu_check.random_target(TINY, None, CPU, torch.float32)
    head = gpu_check.random_head(model)
    return gpu_check.OracleDecoder(model, 128, head, parse_tree(tree), compile=False)


def test_the_oracle_is_right_as_often_as_it_says():
    decoder = oracle_decoder()
    plain = gpu_check.Decoder(decoder.model, 128, compile=False)
    wanted = gpu_check.decode(plain, 100).tokens
    decoder.tell(gpu_check.PROMPT + wanted)
    drafted = gpu_check.decode(decoder, 100)
    assert drafted.tokens == wanted
    expected = sum(gpu_check.RIGHT**depth for depth in range(5))
    assert drafted.stats.acceptance_length == pytest.approx(expected, abs=0.8)
    assert not decoder.drafter.right.all()


def test_the_check_sees_tokens_that_were_not_moved(monkeypatch):
    """Attention decides what is said: a wrong cache is far from the slow path."""
    decoder = oracle_decoder("static")
    plain = gpu_check.Decoder(decoder.model, 128, compile=False)
    decoder.tell(gpu_check.PROMPT + gpu_check.decode(plain, 60).tokens)
    assert gpu_check.worst_gap(decoder.model, gpu_check.decode(decoder, 60).tokens) < 1e-3
    monkeypatch.setattr(KVCache, "move", lambda *_: None)
    assert gpu_check.worst_gap(decoder.model, gpu_check.decode(decoder, 60).tokens) > gpu_check.NEAR


def test_a_token_far_from_the_slow_path_fails_the_check(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "worst_gap", lambda *_: math.nan)
    assert check(tmp_path, only="decoding float32", scope=replace(SCOPE, tokens=4)) == 1
    assert len(found(tmp_path)["failures"]) == 2
