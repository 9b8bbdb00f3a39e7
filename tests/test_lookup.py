"""Prompt lookup: ids stay those of plain decoding, guesses are what followed
before, nothing waits.
"""

import functools
import itertools

import pytest
import torch
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
    table_head,
    table_model,
)

from eagle_draft import Nodes, accept, ancestor_mask
from model import At
from talon.decoder import Decoder, Generation
from talon.drafters.lookup import extend, look_up, look_up_tree, remember
from talon.loading import fit_tree
from talon.sampling import Greedy, SamplingConfig
from talon.text import load
from talon.trees import NO_TREE, parse_tree


def continuation(text: list[int], count: int, rows: int = 32) -> list[int]:
    """What lookup proposes after `text`, whose first token it never heard of."""
    history = torch.full((rows + 1,), -1)
    remember(history, torch.tensor([0]), torch.tensor([*text[1:], *[77] * 5]))  # 77: padding
    slots = torch.arange(rows)
    return look_up(history, At(torch.tensor([len(text) - 1]), slots), count).tolist()


def slow_continuation(text: list[int], count: int) -> list[int] | None:
    """The same by plain search: None where nothing matches."""
    known = [None, *text[1:]]
    for size in range(16, 0, -1):
        end = known[-size:]
        if len(known) <= size or None in end:
            continue
        for at in range(len(known) - 2, size - 2, -1):
            if known[at - size + 1 : at + 1] == end:
                period = len(text) - 1 - at
                return [known[at + 1 + step % period] for step in range(count)]
    return None


def slow_tree(text: list[int], count: int) -> list[list[int]]:
    """The branches of lookup:K by plain search: each as long as its match earns."""
    known, matches = [None, *text[1:]], []
    for at in range(1, len(text) - 1):
        size = 0
        while size < 16 and at - size > 0 and known[at - size] == known[-1 - size]:
            size += 1
        matches.append((size, at))
    branches, left = [], count
    for _ in range(3):
        size, at = max(matches, default=(0, 0))
        if not size:
            break
        matches = [m for m in matches if known[m[1] + 1] != known[at + 1]]
        another = max(matches, default=(0, 0))[0] and len(branches) < 2
        earned = min(left, (1 if size == 1 else 2 * size) if another else left)
        period = len(text) - 1 - at
        branches.append([known[at + 1 + step % period] for step in range(earned)])
        left -= earned
    return [branch for branch in branches if branch]


def tree_of(text: list[int], count: int, rows: int = 64) -> Nodes:
    history = torch.full((rows + 1,), -1)
    remember(history, torch.tensor([0]), torch.tensor([*text[1:], *[77] * 5]))
    at = At(torch.tensor([len(text) - 1]), torch.arange(rows))
    return look_up_tree(torch.tensor(text[-1:]), history, at, count)


def test_branches_equal_a_plain_search_and_are_a_tree():
    torch.manual_seed(2)
    several = 0
    for length in range(2, 50):
        for _ in range(4):
            text = torch.randint(3, (length,)).tolist()
            wanted = slow_tree(text, 9)
            if not wanted:
                continue
            tokens, parents, ancestors = tree_of(text, 9)
            assert tokens.tolist() == [text[-1], *itertools.chain(*wanted)]
            roots = list(itertools.accumulate((len(branch) for branch in wanted), initial=1))[:-1]
            assert parents.tolist() == [0] + [0 if v in roots else v - 1 for v in range(1, 10)]
            assert torch.equal(ancestors, ancestor_mask(parents, 9))
            several += len(wanted) > 1
    assert several > 50


def test_a_long_match_earns_all_tokens_and_a_short_one_shares_them():
    copied = [9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4]
    assert tree_of(copied, 7).tokens.tolist() == [4, 5, 6, 7, 8, 1, 2, 3]
    assert tree_of([9, 4, 5, 4, 6, 6, 7, 4], 3).parents.tolist() == [0, 0, 0, 2]


def test_the_chain_goes_on_where_the_tree_stops_agreeing_with_it():
    """Behind 1 2 3 came 4 5 6 7. The tree holds 4 with 5 and 8 below it, and 9."""
    text = [9, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    history = torch.full((33,), -1)
    remember(history, torch.tensor([0]), torch.tensor(text[1:]))
    at, parents = At(torch.tensor([11]), torch.arange(32)), torch.tensor([0, 0, 0, 1, 1])
    for tokens, last, chain in (
        ([3, 4, 9, 8, 5], 4, [6, 7]),
        ([3, 4, 9, 8, 1], 1, [5, 6]),
        ([3, 2, 9, 8, 5], 0, [4, 5]),
    ):
        nodes = Nodes(torch.tensor(tokens), parents, ancestor_mask(parents, 3))
        found = extend(nodes, history, at, (2, 2))
        assert found.tokens.tolist() == tokens + chain
        assert found.parents.tolist() == [*parents.tolist(), last, 5]
        assert torch.equal(found.ancestors, ancestor_mask(found.parents, 5))


def test_the_longest_and_then_the_latest_match_is_continued():
    assert continuation([9, 1, 2, 3, 4, 5, 8, 3, 6, 1, 2, 3], 2) == [4, 5]  # three beat one
    assert continuation([9, 1, 2, 4, 1, 2, 5, 1, 2], 1) == [5]  # the later of two equal ones


def test_a_match_near_the_end_goes_on_into_its_own_copy():
    assert continuation([9, 9, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert continuation([9, 4, 4], 4) == [4, 4, 4, 4]


def test_without_a_match_the_guesses_are_still_tokens():
    assert min(continuation([5], 4)) >= 0
    assert min(continuation([5, 6, 7, 8], 4)) >= 0


def test_lookup_equals_a_plain_search_on_random_texts():
    torch.manual_seed(1)
    for length in range(1, 28):
        for _ in range(8):
            text = torch.randint(3, (length,)).tolist()
            wanted = slow_continuation(text, 6)
            if wanted is not None:
                assert continuation(text, 6) == wanted, text


MODELS = {"random": random_model(), "cycle": table_model(cycle_table(24, gap=3.0))}


@functools.cache
def plain_run(name: str, sampling: str) -> Generation:
    """What plain decoding says to the end of its context."""
    model = MODELS[name]
    ids = [token % model.config.vocab_size for token in (3, 17, 99, 4)]
    return decode(eager(model, context=70), ids, 200, SAMPLINGS[sampling])


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("tree", ["lookup:1", "lookup:5", "lookup:64"])
def test_ids_equal_plain_ids_to_the_end_of_the_context(tree, sampling):
    for name in MODELS:
        plain = plain_run(name, sampling)
        decoder = eager(MODELS[name], None, parse_tree(tree), plain.decoder.max_seq_length)
        drafted = decode(decoder, plain.ids, 200, SAMPLINGS[sampling])
        assert drafted.tokens == plain.tokens
        assert drafted.stop_reason == plain.stop_reason == "context"


@pytest.mark.parametrize("tree", ["lookup:1", "lookup:4"])
def test_every_budget_and_prompts_that_share_a_beginning(tree):
    model = random_model()
    decoder, plain = eager(model, None, parse_tree(tree)), eager(model)
    for budget in range(12):
        for ids in ([5], [5, 6, 5, 6], [5, 6, 5, 7, 1]):
            assert decode(decoder, ids, budget).tokens == decode(plain, ids, budget).tokens


def test_a_text_that_loops_is_guessed_in_full_once_it_has_looped():
    model = table_model(cycle_table(12))
    run = decode(eager(model, None, parse_tree("lookup:6")), [1, 2], 80)
    assert run.tokens == [(3 + i) % 12 for i in range(80)]
    # The first cycle knows nothing; after it every round gives the six guesses and the bonus.
    assert run.stats.accepted_by_depth[5] >= (80 - 14) // 7 - 1
    assert run.stats.rounds < 26


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["lookup:5", "dynamic:nodes=8,levels=3,top_k=4+lookup:3"])
def test_compiled_ids_equal_eager_ids_and_nothing_recompiles(tree):
    from torch._dynamo.utils import counters

    model = random_model(max_seq_length=1024)
    decoder = Decoder(model, 1000, random_head(model), parse_tree(tree), compile=True)
    decoder.warm_up(SamplingConfig())
    before = counters["stats"]["unique_graphs"]
    for length in (1, 64, 300):
        ids = torch.randint(128, (length,)).tolist()
        plain = decode(eager(model, context=1000), ids, 150).tokens
        assert decode(decoder, ids, 150).tokens == plain
    assert counters["stats"]["unique_graphs"] == before


def test_lookup_needs_no_head_and_is_named_where_one_is_missing(tmp_path):
    assert fit_tree(None, None) == NO_TREE
    assert fit_tree(parse_tree("lookup:3"), None).nodes == 4
    with pytest.raises(ValueError, match="lookup:5"):
        fit_tree(parse_tree("chain:3"), None)
    for text in ("lookup", "lookup:", "lookup:0", "lookup:65", "lookup:x", "lookup:-1"):
        with pytest.raises(ValueError, match=r"lookup:K \(1 to 64\)"):
            parse_tree(text)


def test_lookup_loads_no_head_and_falls_in_with_the_rest(tmp_path):
    base = GOLDEN / "eagle1_static_seed0"
    target = converted(base / "target", tmp_path / "target.safetensors")
    head = converted(base / "head", tmp_path / "head.safetensors")
    plain = load(target, tree="none", compile=False, max_seq_length=64)
    for draft in (None, head):
        engine = load(target, draft, tree="lookup:3", compile=False, max_seq_length=64)
        assert engine.card["tree"] == "lookup:3" and engine.card["head"] is None
        texts = [text_ids(engine), text_ids(plain)]
        assert texts[0] == texts[1]


def text_ids(engine) -> list[int]:
    text = engine.generate([1, 2, 3], max_new_tokens=30, ignore_eos=True)
    list(text)
    return text.tokens


# ---------------------------------------------------------------- beside a head's tree


def test_of_a_token_that_was_grown_and_looked_up_the_longer_path_is_accepted():
    """Below root 7 grow 1 and 2, with 9 below 1; looked up are 1, 5 and 6. Right are 7 1 5 6."""
    tokens = torch.tensor([7, 1, 2, 9, 1, 5, 6])
    parents = torch.tensor([0, 0, 0, 1, 0, 4, 5])
    nodes = Nodes(tokens, parents, ancestor_mask(parents, 4))
    choice = torch.tensor([1, 5, 3, 3, 5, 6, 8])  # after 7 comes 1, after it 5, and so on
    path, count = accept(choice, nodes, 4)
    assert path.tolist() == [0, 4, 5, 6] and int(count) == 4
    choice = torch.tensor([1, 9, 3, 3, 9, 6, 8])  # now 7 1 9 are right
    path, count = accept(choice, nodes, 4)
    assert path[: int(count)].tolist() == [0, 1, 3]


def test_both_sources_lie_below_one_root():
    model = random_model(max_seq_length=128)
    grown = "dynamic:nodes=6,levels=3,top_k=3"
    nodes = {}
    for tree in (grown, "lookup:3", f"{grown}+lookup:3"):
        decoder = eager(model, random_head(model), parse_tree(tree))
        with torch.inference_mode():
            decoder.prefill([3, 5, 7, 3, 5], 0, Greedy())
            nodes[tree] = decoder.drafter.propose(decoder.root, decoder.at(64), Greedy())
    tokens, parents, ancestors = nodes[f"{grown}+lookup:3"]
    assert tokens[:6].tolist() == nodes[grown][0].tolist()
    assert tokens[6:].tolist() == nodes["lookup:3"][0].tolist()[1:]  # the head says otherwise
    assert parents[:6].tolist() == nodes[grown][1].tolist() and parents[7:].tolist() == [6, 7]
    assert torch.equal(ancestors, ancestor_mask(parents, 6))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("family", ["eagle1", "eagle3"])
@pytest.mark.parametrize(
    "tree", ["chain:1+lookup:1", "chain:2+lookup:64", "static+lookup:3",
             "dynamic:nodes=8,levels=3,top_k=4+lookup:5"],
)  # fmt: skip
def test_ids_with_both_sources_equal_plain_ids_to_the_end_of_the_context(tree, family, sampling):
    model, plain = MODELS["random"], plain_run("random", sampling)
    context, head = plain.decoder.max_seq_length, random_head(model, family)
    decoder = eager(model, head, parse_tree(tree), context)
    drafted = decode(decoder, plain.ids, 200, SAMPLINGS[sampling])
    assert drafted.tokens == plain.tokens
    assert drafted.stop_reason == plain.stop_reason == "context"


def test_either_source_may_win_a_round():
    """A head that knows every other token and a text that loops: together more than each alone."""
    model = table_model(cycle_table(16), max_seq_length=256)
    head = table_head(model, tuple(range(0, 16, 2)))
    lengths = {}
    for tree in ("chain:3", "lookup:3", "chain:3+lookup:3"):
        run = decode(eager(model, head, parse_tree(tree)), [1, 2], 48)
        assert run.tokens == [(3 + i) % 16 for i in range(48)]
        lengths[tree] = run.stats.acceptance_length
    assert lengths["chain:3+lookup:3"] > max(lengths["chain:3"], lengths["lookup:3"])


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("tree", ["lookup:5", "dynamic:nodes=8,levels=3,top_k=4+lookup:3"])
def test_a_round_never_waits_for_the_device(tree, sampling):
    model = table_model(cycle_table(24, gap=3.0))
    decoder = eager(model, table_head(model), parse_tree(tree))
    pick = decoder.picks.set(SAMPLINGS[sampling])
    decoder.prefill([1, 2, 3], 0, pick)
    with torch.inference_mode(), NoWaiting():
        decoder.round(decoder.at(100), pick)


def test_a_round_launched_ahead_of_the_last_one_fits_into_the_caches():
    """On a GPU a round starts before the host has read that the one before reached the end."""
    model = table_model(cycle_table(24), max_seq_length=512)
    tree = parse_tree("dynamic:nodes=100,levels=3,top_k=10+lookup:64")
    decoder = eager(model, table_head(model), tree, context=200)
    with torch.inference_mode():
        decoder.prefill([i % 24 for i in range(198)], 0, Greedy())
        for start in (198, 198 + 68):
            decoder.round(decoder.at(start + tree.reach), Greedy())
            count, *tokens = decoder.result.tolist()
            assert count == 68 and tokens == [(start + 1 + i) % 24 for i in range(68)]


def test_a_tree_with_a_lookup_is_named_and_counted():
    tree = parse_tree("dynamic:nodes=8,levels=2,top_k=4+lookup:5")
    assert tree.name == "dynamic:nodes=8,levels=2,top_k=4+lookup:5"
    assert (tree.nodes, tree.grown, tree.levels, tree.depth) == (13, 8, 2, 7)
    wrong = (
        "+lookup:3", "auto+lookup:3", "none+lookup:3", "lookup:2+lookup:3", "chain:2lookup:3",
        "chain:2+", "chain:2+lookup:0", "chain:2+lookup:3+lookup:3", "chain:2 + lookup:3",
    )  # fmt: skip
    for text in wrong:
        with pytest.raises(
            ValueError, match=r"is not known: give auto, .* head also with \+lookup:K"
        ):
            parse_tree(text)
    with pytest.raises(ValueError, match="needs a head"):
        fit_tree(parse_tree("chain:2+lookup:3"), None)


# ---------------------------------------------------------------- falling back
