"""Every precision of the target with every one of the head (C39): drafted equals plain."""

import functools
from pathlib import Path

import pytest
from tiny import GOLDEN, converted, decode

from quantize import quantize_checkpoint
from talon.decoder import Decoder
from talon.text import load
from talon.trees import parse_tree

SETS = {"eagle1": "eagle1_static_seed0", "eagle3": "eagle3_tiny_seed0"}
TARGETS = ("fp32", "bf16", "fp16", "int8", "int8-dynamic", "int4")


@pytest.fixture(scope="module", params=SETS.values(), ids=SETS)
def files(request, tmp_path_factory):
    """A golden target and its head, in every stored form, by name."""
    base = tmp_path_factory.mktemp(request.param)
    made = {}
    for part in ("target", "head"):
        plain = converted(GOLDEN / request.param / part, base / part / "talon.safetensors")
        for mode in ("int8", "int8-dynamic", "int4"):
            out = base / part / f"{mode}.safetensors"
            made[part, mode] = quantize_checkpoint(plain, mode, 32, out)
        made[part, "fp32"] = plain
    return made


@pytest.fixture(scope="module")
def said(files):
    """What plain decoding of a target says, by its file and precision."""

    @functools.cache
    def call(path: Path, computed: str) -> list[int]:
        engine = load(path, tree="none", dtype=computed, compile=False)
        return decode(engine.decoder, list(range(3, 15)), 30).tokens

    return call


@pytest.mark.parametrize("head", ["fp32", "int8", "int8-dynamic", "int4"])
@pytest.mark.parametrize("target", TARGETS)
def test_drafted_ids_equal_plain_ids_of_the_same_target(files, said, target, head):
    computed = target if target in ("bf16", "fp16") else "fp32"
    path = files["target", "fp32" if target in ("bf16", "fp16") else target]
    engine = load(
        path,
        files["head", head],
        tree="dynamic:nodes=8,levels=3,top_k=4",
        dtype=computed,
        compile=False,
    )
    drafted, plain = decode(engine.decoder, list(range(3, 15)), 30), said(path, computed)
    assert len(drafted.tokens) == 30 and drafted.stats.rounds > 1
    if computed != "fp16":
        assert drafted.tokens == plain
    else:  # torch's own operators may flip a near tie somewhere: the beginning must agree
        assert drafted.tokens[:8] == plain[:8]


def test_trees_of_every_kind_run_with_a_quantised_pair(files):
    for text in ("chain:2", "static"):
        engine = load(
            files["target", "int8-dynamic"], files["head", "int4"], tree=text, compile=False
        )
        plain = decode(Decoder(engine.decoder.model, 200, compile=False), [5, 6, 7], 30)
        assert decode(engine.decoder, [5, 6, 7], 30).tokens == plain.tokens
        assert engine.decoder.tree == parse_tree(text)
