"""The target: logits and greedy ids of the reference through the real converter, RoPE tables,
masks, the cache.
"""

import math

import pytest
import torch
from safetensors.torch import load_file
from tiny import GOLDEN, converted, decode, eager, random_model

from model import (
    At,
    KVCache,
    Place,
    RopeScaling,
    causal_mask,
    rope_frequencies,
    rope_table,
    rotate,
    tree_mask,
)
from talon.checking import full_logits, slow_greedy
from talon.text import load

PARITY = ["gqa_llama3rope_sharded_eoslist", "headdim_bias_ropeparams", "tied_linear_binonly"]


@pytest.fixture(scope="module", params=PARITY)
def parity(request, tmp_path_factory):
    directory = GOLDEN / "llama_parity" / request.param
    out = tmp_path_factory.getbasetemp() / "parity" / request.param / "talon.safetensors"
    engine = load(converted(directory / "model", out), compile=False, max_seq_length=128)
    return engine, load_file(directory / "golden.safetensors")


@pytest.mark.parametrize("prompt", ["p20", "p70"])
def test_logits_equal_hugging_face(parity, prompt):
    engine, golden = parity
    logits = full_logits(engine.decoder.model, golden[f"{prompt}.prompt_ids"].tolist())
    wanted = golden[f"{prompt}.logits_last8"]
    assert (logits[-8:] - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("prompt", ["p20", "p70"])
def test_greedy_ids_equal_hugging_face(parity, prompt):
    engine, golden = parity
    ids, wanted = golden[f"{prompt}.prompt_ids"].tolist(), golden[f"{prompt}.greedy_ids"].tolist()
    assert decode(engine.decoder, ids, len(wanted)).tokens == wanted
    assert slow_greedy(engine.decoder.model, ids, len(wanted)) == wanted


def test_every_configured_eos_stops(parity):
    engine, golden = parity
    ids, greedy = golden["p20.prompt_ids"].tolist(), golden["p20.greedy_ids"].tolist()
    wanted = greedy
    for index, token in enumerate(greedy):
        if token in engine.eos_ids:
            wanted = greedy[: index + 1]
            break
    text = engine.generate(ids, max_new_tokens=len(greedy))
    list(text)
    assert text.tokens == wanted


@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (4, 1), (6, 2), (8, 2)])
@pytest.mark.parametrize("size", [4, 16, 20])
def test_fast_path_equals_slow_path_for_every_grouping(heads, groups, size):
    model = random_model(n_head=heads, n_kv_head=groups, head_dim=size)
    ids = [3, 17, 99, 4, 4, 50]
    assert decode(eager(model), ids, 12).tokens == slow_greedy(model, ids, 12)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 90])
def test_chunked_prefill_equals_the_slow_path_at_every_length(length):
    model = random_model()
    ids = torch.randint(128, (length,)).tolist()
    assert decode(eager(model), ids, 5).tokens == slow_greedy(model, ids, 5)


def test_rope_tables_are_exact_in_fp32_far_out():
    table = rope_table(2048, 16, 10000.0, None)
    for position in (255, 256, 257, 1000):
        for pair in range(8):
            angle = position * 10000.0 ** (-2 * pair / 16)
            assert abs(table[0, position, pair].item() - math.cos(angle)) < 1e-7
            assert abs(table[1, position, pair + 8].item() - math.sin(angle)) < 1e-7


def test_rope_table_is_not_rounded_to_the_models_dtype():
    decoder = eager(random_model().bfloat16())
    assert decoder.target.rope.dtype == torch.float32


def test_llama3_scaling_leaves_fast_frequencies_and_divides_slow_ones():
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    plain, scaled = rope_frequencies(128, 5e5, None), rope_frequencies(128, 5e5, scaling)
    turns = 8192 * plain / (2 * math.pi)
    assert torch.equal(scaled[turns > 4], plain[turns > 4])
    torch.testing.assert_close(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert ((scaled < plain) & (scaled > plain / 8))[between].all() and between.any()


def test_linear_scaling_divides_positions():
    scaled = rope_table(40, 8, 10000.0, RopeScaling("linear", 4.0))
    torch.testing.assert_close(scaled[:, 4::4], rope_table(10, 8, 10000.0, None)[:, 1:])


def test_unknown_scaling_is_refused_by_name():
    with pytest.raises(ValueError, match="dynamic"):
        RopeScaling("dynamic", 2.0)


def test_rotation_keeps_relative_positions():
    table, q, k = rope_table(64, 16, 10000.0, None), torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(i, j):
        return (rotate(q, table[:, i : i + 1]) * rotate(k, table[:, j : j + 1])).sum()

    torch.testing.assert_close(score(5, 2), score(43, 40), atol=1e-5, rtol=1e-5)


def test_causal_mask_begins_at_the_start():
    mask = causal_mask(torch.tensor([2]), 2, torch.arange(6))
    assert mask.int().tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]]


def test_tree_mask_shows_committed_slots_ancestors_and_self():
    ancestors = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    mask = tree_mask(At(torch.tensor([2]), torch.arange(7)), ancestors)
    assert mask.int().tolist() == [
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 1, 0, 0],
    ]


def test_cache_moves_rows_that_overlap():
    cache = KVCache(2, 1, 6, 1, torch.float32)
    cache.data.copy_(torch.arange(6.0)[:, None].expand(2, 2, 1, 6, 1))
    cache.move(torch.tensor([3, 5]), torch.tensor([2, 3]))
    assert cache.data[1, 1, 0, :, 0].tolist() == [0, 1, 3, 5, 4, 5]


def test_features_are_the_inputs_of_the_named_layers():
    model, tokens = random_model(n_layer=4), torch.arange(3)
    cache = KVCache(4, 2, 8, 16, torch.float32)
    place = Place(rope_table(3, 16, 1e4, None), tokens, causal_mask(tokens[:1], 3, tokens))
    hidden, features = model(tokens, place, cache, (0, 2, 4))
    assert torch.equal(features[0], model.tok_embeddings(tokens))
    assert torch.equal(model.norm(features[2]), hidden)
    (alone,) = model(tokens, place, cache)[1]
    assert torch.equal(alone, hidden)  # what an EAGLE-1 head reads
    model.layers = model.layers[:2]
    torch.testing.assert_close(model.norm(features[1]), model(tokens, place, cache)[0])


def test_decoding_speed_does_not_depend_on_the_caches_size():
    """The slots attended to come from the length bucket, not from the cache that was made."""
    large = eager(random_model(max_seq_length=4096), context=4096)
    assert large.at(200).slots.shape == (256,) and large.at(257).slots.shape == (512,)
    assert large.at(5000).slots.shape == (large.cache.rows - 1,)
