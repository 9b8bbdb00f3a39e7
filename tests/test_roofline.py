"""Bounds: predictions follow the stated formulas, and this machine's reading is measured."""

import json

import pytest
import torch

import benchmark
from talon.measuring import roofline
from talon.measuring.roofline import CARDS, MODELS, PRECISIONS


def test_predictions_follow_the_stated_formulas():
    card, config = CARDS["rtx3090"], MODELS["LLaMA-2-7B"]
    parameters = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096
    assert roofline.linear_parameters(config) == parameters == 6_607_077_376
    alone = roofline.target_seconds(config, "bf16", 1, card)
    assert alone == pytest.approx((2 * parameters + 1024 * 524288) / (0.9 * 936e9))
    many = roofline.target_seconds(config, "int4", 64, card)  # bound by multiplying
    assert many == pytest.approx(2 * parameters * 64 / (0.9 * 71.2e12))
    found = roofline.predict(card)
    assert len(found) == len(PRECISIONS) * (len(MODELS) + len(roofline.PUBLISHED))
    by_name = {(row["model"], row["precision"], row["draft"]): row for row in found}
    drafted = by_name["LLaMA-3.1-8B", "bf16", "EAGLE-3"]
    assert drafted["tokens_per_s"] == pytest.approx(6.13 / (drafted["round_ms"] / 1e3))
    assert not by_name["Vicuna-13B", "bf16", "none"]["fits"]


def test_the_roofline_needs_no_model_and_knows_its_cards(capsys):
    assert benchmark.main(["--roofline", "rtx3090"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| LLaMA-3.1-8B | bf16 | EAGLE-3 | 60 | 6.13 |" in "\n".join(lines)
    assert json.loads(lines[-1])["predictions"] == roofline.predict(CARDS["rtx3090"])
    with pytest.raises(SystemExit):
        benchmark.main(["--roofline", "rtx9999"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "rtx9999" in line and "rtx3090" in line


def test_a_bound_by_reading_reads_every_byte_of_random_data_and_writes_none():
    readers = roofline.readers(torch.device("cpu"), 1 << 16)
    read = {name: call() for name, call in readers.items()}
    # Numbers between 0 and 1, neither all zeros nor all ones.
    assert 0 < read["sum"].item() < (1 << 14)
    assert all(result.numel() <= 1 << 8 for result in read.values())
    assert min(roofline.STREAM.values()) >= 1 << 28
