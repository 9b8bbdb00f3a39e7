"""Every draft source on the same round: ids stay those of plain decoding, whatever guesses."""

import copy
import functools
import itertools
import json
from dataclasses import replace

import gpu_plain
import pytest
import torch
from cuda_standin import Gpu
from test_engine import NoWaiting
from tiny import (
    GOLDEN,
    SAMPLINGS,
    converted,
    cycle_table,
    decode,
    eager,
    random_head,
    random_model,
    table_model,
)
from tiny_training import read_log, tiny_target, train, write_lines, write_target

from convert_hf_checkpoint import convert
from eagle_draft import ancestor_mask
from quantize import quantize_checkpoint
from talon.checking import full_logits
from talon.checkpoint import read_checkpoint
from talon.decoder import Decoder, Generation
from talon.drafters.lookahead import window_parents
from talon.drafters.medusa import MedusaConfig, MedusaHeads
from talon.formats.head_export import export_head
from talon.kernels.gpu_layers import put_on_gpu
from talon.loading import fit_head, fit_tree, open_files
from talon.operators import choose_operators
from talon.sampling import SamplingConfig
from talon.text import load
from talon.training.head import read_head, write_head
from talon.training.losses import TrainingConfig
from talon.trees import MEDUSA_PATHS, parse_tree
from talon.tuning.choice import auto_tree, cache_path, forget_choices

gpu_plain.register()
CONTEXT = 320
TABLE = (cycle_table(24, gap=3.0) + torch.linspace(0, 1, 24)).log_softmax(-1)


def small_model(model):
    """A smaller model of the same vocabulary, mostly wrong; of a table model one that is right."""
    size = model.config.vocab_size
    if size == 24:
        return table_model(TABLE, n_layer=1)
    changes = {"dim": 32, "n_layer": 2, "n_head": 2, "n_kv_head": 1}
    return random_model(3, vocab_size=size, max_seq_length=64, **changes)


def medusa_heads(model, own_output=True, heads=4):
    """Random Medusa heads, mostly wrong; of the table model ones that are right."""
    c = model.config
    shape = (c.dim, heads, 2, c.vocab_size, c.vocab_size, own_output)
    torch.manual_seed(7)
    made = MedusaHeads(MedusaConfig("medusa", *shape)).requires_grad_(False).eval()
    if not own_output:
        made.output = model.output
    elif c.vocab_size == 24:
        for blocks in made.blocks:
            for block in blocks:
                block.weight.zero_(), block.bias.zero_()
        for k, output in enumerate(made.outputs):
            output.weight.copy_(model.output.weight.roll(1 + k, 0))
    return made


# Name -> (tree, what makes the head of a target).
SOURCES = {
    "lookup": ("lookup:9", None),
    "lookahead": ("lookahead:4,4,3", None),
    "lookahead of pairs": ("lookahead:1,2,1", None),
    "head and lookup": ("chain:2+lookup:3", random_head),
    "model chain": ("chain:4", small_model),
    "model dynamic": ("dynamic:nodes=8,levels=3,top_k=4", small_model),
    "model static": ("static", small_model),
    "model and lookup": ("chain:2+lookup:3", small_model),
    "medusa": ("medusa", medusa_heads),
    "medusa chain": ("chain:3", lambda model: medusa_heads(model, own_output=False)),
    "medusa and lookup": ("chain:2+lookup:3", medusa_heads),
}
MODELS = {
    "random": lambda: random_model(max_seq_length=CONTEXT),
    "table": lambda: table_model(TABLE, max_seq_length=CONTEXT),
}
MADE = {name: make() for name, make in MODELS.items()}


def drafting(source: str, model, context: int = 100) -> Decoder:
    tree, head = SOURCES[source]
    return eager(model, head and head(model), parse_tree(tree), context)


@functools.cache
def plain_run(model, sampling: str, ids: tuple[int, ...], count: int, context: int) -> Generation:
    """What plain decoding says of these modules."""
    return decode(eager(model, context=context), list(ids), count, SAMPLINGS[sampling])


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("source", SOURCES)
def test_ids_equal_plain_ids_to_the_end_of_the_context(source, sampling):
    for model in MADE.values():
        ids = tuple(token % model.config.vocab_size for token in (3, 17, 99, 4))
        plain = plain_run(model, sampling, ids, 200, 70)
        drafted = decode(drafting(source, model, 70), list(ids), 200, SAMPLINGS[sampling])
        assert drafted.tokens == plain.tokens and len(plain.tokens) == 66
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
    monkeypatch.setattr(decoder, "chunks", (64,))
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
    """On the stand-in for a GPU and by its operators, to the end of the context."""
    samplings, lengths = itertools.cycle(SAMPLINGS.values()), {"random": 250, "table": 20}
    half, (tree, head) = torch.float16, SOURCES[source]
    for name, model in MADE.items():
        size, sampling = model.config.vocab_size, next(samplings)
        text = torch.randint(size, (lengths[name],), generator=torch.Generator().manual_seed(2))
        parts = [
            copy.deepcopy(model).half(),
            *([copy.deepcopy(head(model)).half()] if head else []),
        ]
        here = copy.deepcopy(parts)
        for part in here:
            put_on_gpu(part, half)
        plain = decode(eager(here[0], context=290), text.tolist(), 60, sampling)
        eager_one = Decoder(here[0], 290, *here[1:], tree=parse_tree(tree), compile=False)
        eagerly = decode(eager_one, text.tolist(), 60, sampling)
        with Gpu():
            parts = [part.to("cuda") for part in parts]
            for part in parts:
                choose_operators(part, torch.device("cuda"), half)
            there = Decoder(parts[0], 290, *parts[1:], tree=parse_tree(tree), compile=False)
            run = decode(there, text.tolist(), 60, sampling)
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


@pytest.fixture(scope="module")
def quantised_models(quantised):
    return {m: load(quantised[m], tree="none", compile=False).decoder.model for m in MODES}


MODES = ("int8", "int8-dynamic", "int4")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", SOURCES)
def test_ids_of_quantised_targets_equal_their_plain_ids(quantised_models, source, mode):
    model, ids = quantised_models[mode], (5, 6, 7, 5, 6)
    name = list(SAMPLINGS)[(list(SOURCES).index(source) + MODES.index(mode)) % 3]
    plain = plain_run(model, name, ids, 30, 200)
    run = decode(drafting(source, model, 200), list(ids), 30, SAMPLINGS[name])
    assert run.tokens == plain.tokens


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
        fit_tree(parse_tree("dynamic:nodes=3,levels=1,top_k=1000"), files.head_config)


def test_of_a_small_model_and_of_medusa_no_tree_is_measured_and_that_is_said(quantised, capsys):
    kept = cache_path(quantised["int8"])
    kept.write_text("measured for a head")
    files = open_files(quantised["int8"], quantised["fp32"])
    with pytest.raises(ValueError, match="--retune is for EAGLE heads"):
        forget_choices(files)
    assert kept.read_text() == "measured for a head"
    kept.unlink()
    model = MADE["random"]
    for head in (small_model(model), medusa_heads(model)):
        assert auto_tree(files, model, head, SAMPLINGS["greedy"], False, measure=True) is None
        assert "the usual one" in capsys.readouterr().err


# ---------------------------------------------------------------- Medusa


def slow_state(model, ids):
    """The state after the final norm at the last of these tokens, with nothing cached."""
    seen = []
    hook = model.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    full_logits(model, ids)
    hook.remove()
    return seen[0][-1]


def slow_medusa(heads, paths, state, root):
    """Section 2.1 of the paper: p(k) = softmax(W2 (SiLU(W1 h) + h)), and of each node the token
    whose rank its path names."""
    ranked = []
    for blocks, output in zip(heads.blocks, heads.outputs or [heads.output] * 9, strict=False):
        x = state
        for block in blocks:
            inner = block.weight @ x + block.bias
            x = x + inner * torch.sigmoid(inner)
        ranked.append((output.weight @ x).softmax(0).argsort(descending=True).tolist())
    ordered = sorted(paths, key=lambda path: (len(path), path))
    return [root] + [ranked[len(path) - 1][path[-1]] for path in ordered]


@pytest.mark.parametrize("own_output", [True, False])
def test_medusas_nodes_equal_the_papers_at_every_round(own_output):
    model = MADE["random"]
    heads = medusa_heads(model, own_output)
    decoder = eager(model, heads, parse_tree("medusa"))
    text, pick = [3, 17, 99, 4], decoder.picks.set(SamplingConfig())
    text.append(decoder.prefill(text, 0, pick))
    for _ in range(10):
        with torch.inference_mode():
            nodes = decoder.drafter.propose(decoder.root, decoder.at(90), pick)
        wanted = slow_medusa(heads, MEDUSA_PATHS, slow_state(model, text[:-1]), text[-1])
        assert nodes.tokens.tolist() == wanted and len(wanted) == 64
        text += decoder.launch(90, pick).tokens()


def test_heads_that_are_right_fill_their_chain_and_share_the_targets_noise():
    for sampling in SAMPLINGS.values():
        decoder = drafting("medusa", MADE["table"])
        assert decode(decoder, [1, 2, 3], 60, sampling).stats.acceptance_length > 2
    chain = eager(MADE["table"], medusa_heads(MADE["table"]), parse_tree("chain:4"))
    assert decode(chain, [1, 2, 3], 61).stats.acceptance_length == 5


def planted(tmp_path, prefix="", heads=3, blocks=2, stated=2, **changes):
    """A directory as FasterDecoding publishes one; its config.json states too few heads."""
    folder = tmp_path / f"medusa{prefix}{len(changes)}"
    folder.mkdir()
    tensors = {}
    for k in range(heads):
        for j in range(blocks):
            tensors[f"{prefix}{k}.{j}.linear.weight"] = torch.randn(16, 16)
            tensors[f"{prefix}{k}.{j}.linear.bias"] = torch.randn(16)
        tensors[f"{prefix}{k}.{blocks}.weight"] = torch.randn(50, 16)
    tensors = {name: value for name, value in (tensors | changes).items() if value is not None}
    torch.save(tensors, folder / "medusa_lm_head.pt")
    stated = {"medusa_num_heads": stated, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    (folder / "config.json").write_text(json.dumps(stated))
    return folder, tensors


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_published_medusa_files_load_with_every_tensor_in_its_place(tmp_path, prefix, capsys):
    folder, tensors = planted(tmp_path, prefix)
    assert "medusa head" in convert(folder)
    assert "medusa_num_heads is 2 in config.json, the weights have 3" in capsys.readouterr().err
    file = read_checkpoint(folder / "talon.safetensors")
    assert file.config["heads"] == 3 and file.config["blocks"] == 2
    with pytest.raises(ValueError, match="is Medusa heads; --export takes"):
        export_head(file.path, tmp_path / "out")
    assert sum(spec.nbytes for spec in file.specs.values()) == sum(
        t.nbytes for t in tensors.values()
    )
    for k, j in itertools.product(range(3), range(2)):
        source = tensors[f"{prefix}{k}.{j}.linear.weight"]
        assert torch.equal(file.tensor(f"blocks.{k}.{j}.weight"), source)
    assert torch.equal(file.tensor("outputs.2.weight"), tensors[f"{prefix}2.2.weight"])
    target = converted(GOLDEN / "eagle1_static_seed0" / "target", tmp_path / "talon.safetensors")
    with pytest.raises(ValueError, match="made for a target with hidden size 16"):
        open_files(target, folder / "talon.safetensors")


@pytest.mark.parametrize(
    "changes, words",
    [({"1.0.linear.bias": None}, "lacks 1.0.linear.bias"),
     ({"2.2.weight": torch.randn(50, 8)}, "2.2.weight has shape"),
     ({"0.2.bias": torch.randn(50)}, "no use for: 0.2.bias"),
     ({"0.2.weight": None}, "no 0.2.weight"),
     ({"0.2.weight": torch.tensor(1.0)}, r"0.2.weight has shape \[\]"),
     ({"0.0.linear.weight": torch.tensor(1.0)}, r"0.0.linear.weight has shape \[\]"),
     ({"99999999.0.linear.weight": torch.randn(16, 16)}, "100000000 heads of 2 .* has 7 blocks")],
)  # fmt: skip
def test_medusa_files_that_do_not_add_up_are_refused_by_name(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        convert(planted(tmp_path, **changes)[0])


def test_trees_that_medusa_cannot_fill_are_refused_and_the_preset_fits_its_heads():
    config = medusa_heads(MADE["random"], heads=2).config
    assert fit_tree(None, config).levels == 2
    for tree, words in (("chain:3", "has 3 levels"), ("dynamic:nodes=4,levels=2", "is dynamic")):
        with pytest.raises(ValueError, match=f"{words}, but these are 2 Medusa heads: give chain"):
            fit_tree(parse_tree(tree), config)


def write_head_of(path, model, own_output):
    write_head(path, medusa_heads(model, own_output, heads=2), {})
    return path


def test_medusa_heads_are_trained_written_and_drafted_with(tmp_path):
    """On a target whose answers count in steps: what is learnt is guessed."""
    target = write_target(tmp_path / "target", tiny_target())
    ids = [[2 + (7 * n + i) % 9 for i in range(40)] for n in range(24)]
    rows = [{"ids": row, "spans": [[6, 40]]} for row in ids]
    data = write_lines(tmp_path / "data.jsonl", rows)
    options = "--head", "medusa", "--unroll", 2, "--epochs", 4, "--lr", 0.01
    head = train(target, data, tmp_path / "out", *options)
    log = [entry for entry in read_log(tmp_path / "out") if "loss" in entry]
    assert log[0]["levels"] == 2
    first, last = ([e["cross_entropy"] for e in part] for part in (log[:3], log[-3:]))
    assert sum(map(sum, last)) < sum(map(sum, first))
    model = tiny_target()
    for unroll, own in ((3, False), (2, True)):
        other = write_head_of(tmp_path / f"{own}.safetensors", model, own)
        with pytest.raises(ValueError, match=f"holds 2 Medusa heads.* --unroll {unroll} that"):
            read_head(other, model, TrainingConfig("medusa", unroll=unroll), None)
    engine = load(target, head, tree="chain:2", compile=False)
    assert "2 heads of 1 residual blocks" in engine.card["head"]
    plain = load(target, tree="none", compile=False)
    texts = [e.generate(ids[0][:10], max_new_tokens=30, ignore_eos=True) for e in (engine, plain)]
    for text in texts:
        list(text)
    assert texts[0].tokens == texts[1].tokens


# ---------------------------------------------------------------- Lookahead


class SlowLookahead:
    """Algorithm 2 of the paper with lists, a dictionary and forwards over whole texts: window and
    pool by token, where an n-gram that comes again becomes the newest of its token."""

    def __init__(self, model, size, prompt, root):
        self.model, (self.width, self.length, self.count) = model, size
        known = [*prompt[1:], root]
        cells = self.width * (self.length - 1)
        backwards = [known[max(len(known) - 1 - n, 0)] for n in range(cells)]
        self.window = [backwards[i : i + self.width] for i in range(0, cells, self.width)]
        self.pool = {}

    def guesses(self, root):
        newest = self.pool.get(root, [])[::-1][: self.count]
        return newest + [(-1,) * (self.length - 1)] * (self.count - len(newest))

    def tokens(self, root):
        window = [token for level in self.window for token in level]
        return [root, *window[1:], *itertools.chain(*self.guesses(root))]

    def slide(self, text):
        """After a round that began with the last token of `text`."""
        window = [[text[-1], *self.window[0][1:]], *self.window[1:]]
        chosen = []
        for j in range(self.width):
            seen = text + window[0][1 : j + 1] + [level[j] for level in window[1:]]
            chosen.append(int(full_logits(self.model, seen)[-1].argmax()))
        for j in range(self.width):
            first, *rest = [level[j] for level in window] + [chosen[j]]
            entries = self.pool.setdefault(first, [])
            if tuple(rest) in entries:
                entries.remove(tuple(rest))
            entries.append(tuple(rest))
        self.window = [*window[1:], chosen]


@pytest.mark.parametrize("size", [(4, 3, 2), (1, 2, 1), (3, 4, 3), (5, 2, 4)])
def test_lookaheads_nodes_equal_the_papers_at_every_round(size):
    guessed = 0
    for model in MADE.values():
        decoder = eager(model, None, parse_tree("lookahead:{},{},{}".format(*size)))
        text, pick = [token % 24 for token in (3, 17, 9, 4)], decoder.picks.set(SamplingConfig())
        text.append(decoder.prefill(text, 0, pick))
        slow = SlowLookahead(model, size, text[:-1], text[-1])
        for _ in range(16):
            with torch.inference_mode():
                nodes = decoder.drafter.propose(decoder.root, decoder.at(90), pick)
            assert nodes.tokens.tolist() == slow.tokens(text[-1])
            slow.slide(text)
            found = decoder.launch(90, pick).tokens()
            guessed += len(found) - 1
            text += found
    assert guessed >= 5


def test_a_window_token_sees_its_row_and_its_column():
    """Figure 2 of the paper: positions are 0 to 3, 1 to 4 and 2 to 5, all under the root."""
    width, size, guesses = 4, 4, 2
    parents = torch.tensor(window_parents(width, size, guesses))
    ancestors = ancestor_mask(parents, 16)
    depth = (ancestors.sum(1) - 1).tolist()
    assert depth[:12] == [0, 1, 2, 3, 1, 2, 3, 4, 2, 3, 4, 5] and depth[12:] == [1, 2, 3] * 2
    for level, column in itertools.product(range(3), range(4)):
        seen = [*range(column + 1), *(n * width + column for n in range(1, level + 1))]
        assert ancestors[level * width + column].nonzero().flatten().tolist() == seen
    assert parse_tree("lookahead:4,4,2").depth == max(depth)


def test_a_text_that_loops_fills_the_pool_and_is_guessed():
    model = table_model(cycle_table(12), max_seq_length=256)
    run = decode(eager(model, None, parse_tree("lookahead:5,4,2"), 200), [1, 2], 150)
    assert run.tokens == [(3 + i) % 12 for i in range(150)]
    assert run.stats.acceptance_length > 3
    again = decode(eager(model, None, parse_tree("lookahead:5,4,2"), 200), [1, 2], 150)
    assert again.stats.rounds == run.stats.rounds


@pytest.mark.parametrize(
    "text", ["0,3,2", "4,1,2", "4,3,0", "500,5,500", "4,3", "4,3,x", "4,3,2+lookup:3"]
)
def test_windows_that_cannot_be_are_refused(text):
    with pytest.raises(ValueError, match=r"lookahead:.*(\(W \+ G\) \* \(N - 1\)|is not known)"):
        parse_tree(f"lookahead:{text}")
