"""Every draft source on the same round: ids stay those of plain decoding, whatever guesses."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from cuda_standin import Gpu
from test_engine import NoWaiting
from tiny import GOLDEN, converted, cycle_table, decode, eager, random_model, table_model

from quantize import quantize_checkpoint
from talon.checking import full_logits
from talon.decoder import Decoder, Generation
from talon.loading import fit_head, fit_tree, open_files
from talon.sampling import SamplingConfig
from talon.text import load
from talon.trees import parse_tree

SAMPLINGS = {
    "greedy": SamplingConfig(),
    "sample": SamplingConfig(1.0, seed=4),
    "filter": SamplingConfig(0.8, top_k=20, top_p=0.9, seed=5),
}
CONTEXT = 320
TABLE = (cycle_table(24, gap=3.0) + torch.linspace(0, 1, 24)).log_softmax(-1)


def small_model(model):
    """A smaller model of the same vocabulary, mostly wrong; of a table model one that is right."""
    size = model.config.vocab_size
    if size == 24:
        return table_model(TABLE, n_layer=1)
    changes = {"dim": 32, "n_layer": 2, "n_head": 2, "n_kv_head": 1}
    return random_model(3, vocab_size=size, max_seq_length=64, **changes)


# Name -> (tree, what makes the head of a target).
SOURCES = {
    "model chain": ("chain:4", small_model),
    "model dynamic": ("dynamic:nodes=8,levels=3,top_k=4", small_model),
    "model static": ("static", small_model),
    "model and lookup": ("chain:2+lookup:3", small_model),
}
MODELS = {
    "random": lambda: random_model(max_seq_length=CONTEXT),
    "table": lambda: table_model(TABLE, max_seq_length=CONTEXT),
}
MADE = {name: make() for name, make in MODELS.items()}


def drafting(source: str, model, context: int = 100) -> Decoder:
    tree, head = SOURCES[source]
    return eager(model, head and head(model), parse_tree(tree), context)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("source", SOURCES)
def test_ids_equal_plain_ids_to_the_end_of_the_context(source, sampling):
    for model in MADE.values():
        ids = [token % model.config.vocab_size for token in (3, 17, 99, 4)]
        plain = decode(eager(model), ids, 200, SAMPLINGS[sampling])
        drafted = decode(drafting(source, model), ids, 200, SAMPLINGS[sampling])
        assert drafted.tokens == plain.tokens and len(plain.tokens) == 96
        assert drafted.stop_reason == plain.stop_reason == "context"


@pytest.mark.parametrize("source", SOURCES)
def test_every_budget_and_prompts_that_share_a_beginning(source):
    for model in MADE.values():
        decoder, plain = drafting(source, model), eager(model)
        for budget, ids in itertools.product((0, 1, 2, 5, 11), ([5], [5, 6, 5, 6], [5, 6, 5, 7])):
            assert decode(decoder, ids, budget).tokens == decode(plain, ids, budget).tokens


@pytest.mark.parametrize("source", SOURCES)
def test_a_text_that_is_left_or_whose_prompt_is_interrupted_harms_no_other(source, monkeypatch):
    model = MADE["random"]
    decoder, sampling = drafting(source, model, CONTEXT), SAMPLINGS["sample"]
    ids = torch.randint(128, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    left = iter(Generation(decoder, ids[:20], sampling, 60))
    for _ in range(7):
        next(left)
    left.close()
    chunks, prefill_chunk = iter(range(2)), decoder.prefill_chunk

    def interrupted(*args):
        if next(chunks, None) is None:
            raise KeyboardInterrupt
        prefill_chunk(*args)

    monkeypatch.setattr(decoder, "prefill_chunk", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decode(decoder, ids, 5, sampling)
    monkeypatch.undo()
    wanted = decode(eager(model, context=CONTEXT), ids, 30, sampling).tokens
    assert decode(decoder, ids, 30, sampling).tokens == wanted


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_round_never_waits_for_the_device(source, sampling):
    decoder = drafting(source, MADE["table"])
    pick = decoder.picks.set(SAMPLINGS[sampling])
    decoder.prefill([1, 2, 3], 0, pick)
    with torch.inference_mode(), NoWaiting():
        decoder.round(decoder.at(100), pick)


@pytest.mark.parametrize("source", SOURCES)
def test_replayed_rounds_launched_ahead_give_plain_ids_and_accept_as_eager_rounds_do(source):
    """On the stand-in for a GPU: captured, replayed, one round ahead; past a length bucket and to
    the end of the context."""
    samplings, lengths = itertools.cycle(SAMPLINGS.values()), {"random": 250, "table": 20}
    for name, model in MADE.items():
        size, sampling = model.config.vocab_size, next(samplings)
        text = torch.randint(size, (lengths[name],), generator=torch.Generator().manual_seed(2))
        plain = decode(eager(model, context=290), text.tolist(), 60, sampling)
        eagerly = decode(drafting(source, model, 290), text.tolist(), 60, sampling)
        tree, head = SOURCES[source]
        head = head and copy.deepcopy(head(model))
        with Gpu():
            on_gpu = copy.deepcopy(model).to("cuda")
            shape = parse_tree(tree)
            decoder = Decoder(on_gpu, 290, head and head.to("cuda"), shape, compile=False)
            run = decode(decoder, text.tolist(), 60, sampling)
        assert run.tokens == plain.tokens == eagerly.tokens
        assert run.stats.accepted_by_depth == eagerly.stats.accepted_by_depth


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_compiled_ids_equal_plain_ids_and_nothing_recompiles(source):
    from torch._dynamo.utils import counters

    model = MADE["random"]
    tree, head = SOURCES[source]
    decoder = Decoder(model, 300, head and head(model), parse_tree(tree), compile=True)
    decoder.warm_up(SamplingConfig())
    before = counters["stats"]["unique_graphs"]
    for length in (1, 64, 230):
        ids = torch.randint(128, (length,)).tolist()
        plain = decode(eager(model, context=300), ids, 60).tokens
        assert decode(decoder, ids, 60).tokens == plain
    assert counters["stats"]["unique_graphs"] == before


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """A golden target in every stored form."""
    base = tmp_path_factory.mktemp("quantised")
    plain = converted(GOLDEN / "eagle1_static_seed0" / "target", base / "talon.safetensors")
    modes = {m: quantize_checkpoint(plain, m, 32, base / f"{m}.safetensors") for m in MODES}
    return {"fp32": plain, **modes}


MODES = ("int8", "int8-dynamic", "int4")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", SOURCES)
def test_ids_of_quantised_targets_equal_their_plain_ids(quantised, source, mode):
    tree, head = SOURCES[source]
    model = load(quantised[mode], tree="none", compile=False).decoder.model
    decoder = eager(model, head and head(model), parse_tree(tree), 200)
    for sampling in SAMPLINGS.values():
        plain = decode(eager(model, context=200), [5, 6, 7, 5, 6], 40, sampling).tokens
        assert decode(decoder, [5, 6, 7, 5, 6], 40, sampling).tokens == plain


# ---------------------------------------------------------------- a small draft model


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("tree", ["chain:4", "dynamic:nodes=8,levels=4,top_k=2"])
def test_a_model_that_drafts_for_itself_is_always_right(tree, sampling):
    """Its first token and every position count: one that is off would show in a random model."""
    model = MADE["random"]
    decoder = eager(model, model, parse_tree(tree), CONTEXT)
    ids = torch.randint(128, (70,), generator=torch.Generator().manual_seed(3)).tolist()
    stats = decode(decoder, ids, 101, SAMPLINGS[sampling]).stats
    assert stats.acceptance_length >= (5 if tree == "chain:4" else 4.7)


def test_the_small_model_guesses_what_it_would_say_alone():
    """Greedily, its chain is its own continuation of the whole text, at every round."""
    model = MADE["random"]
    small = small_model(model)
    decoder = eager(model, small, parse_tree("chain:3"))
    text, pick = [3, 17, 99, 4], decoder.picks.set(SamplingConfig())
    text.append(decoder.prefill(text, 0, pick))
    for _ in range(8):
        with torch.inference_mode():
            guessed = decoder.drafter.propose(decoder.root, decoder.at(90), pick).tokens.tolist()
        alone = list(text)
        for _ in range(3):
            alone.append(int(full_logits(small, alone)[-1].argmax()))
        assert guessed == alone[-4:]
        text += decoder.launch(90, pick).tokens()


def test_a_small_model_of_another_vocabulary_is_refused_with_both_numbers():
    config = MADE["random"].config
    with pytest.raises(ValueError, match=r"vocabulary of 7, .* target's has 128"):
        fit_head("F", replace(config, vocab_size=7), config)


def test_a_small_model_comes_from_its_file_with_its_own_preset(quantised):
    engine = load(quantised["int8"], quantised["fp32"], compile=False)
    assert engine.card["tree"] == "chain:4" and "draft model" in engine.card["head"]
    plain = load(quantised["int8"], compile=False)
    texts = [e.generate([5, 6, 7], max_new_tokens=30, ignore_eos=True) for e in (engine, plain)]
    assert all(list(text) == [] for text in texts) and texts[0].tokens == texts[1].tokens
    assert engine.decoder.drafter.stage.cache.data.shape[0] > 1
    files = open_files(quantised["fp32"], quantised["fp32"])
    with pytest.raises(ValueError, match="lower top_k"):
        fit_tree(parse_tree("dynamic:nodes=3,levels=1,top_k=100000"), files.head_config)
