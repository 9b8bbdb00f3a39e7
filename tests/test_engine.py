"""The round: drafted ids equal plain ids, nodes equal sequences, caches equal prefills, nothing
waits or is rebuilt.
"""

import functools
import itertools
from typing import NamedTuple

import pytest
import torch
from tiny import (
    TREES,
    cycle_table,
    decode,
    eager,
    random_head,
    random_model,
    table_head,
    table_model,
)
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_draft import Nodes, ancestor_mask
from model import RMSNorm
from talon.checking import full_logits, slow_greedy
from talon.decoder import Decoder, Generation
from talon.graphs import compile_region
from talon.sampling import GREEDY, Greedy, Sampled, SamplingConfig
from talon.trees import Tree, parse_tree, static_tree

PROMPT = [3, 17, 99, 4]
SAMPLINGS = {
    "greedy": SamplingConfig(),
    "low": SamplingConfig(0.7, seed=3),
    "full": SamplingConfig(1.0, seed=4),
    "filter": SamplingConfig(0.8, top_k=20, top_p=0.9, seed=5),
}
CYCLE = 24


def perturbed_cycle() -> torch.Tensor:
    """A table that is mostly a cycle but leaves sampling something to choose."""
    torch.manual_seed(5)
    return (cycle_table(CYCLE, gap=3.0) + 0.5 * torch.randn(CYCLE, CYCLE)).log_softmax(-1)


def heads() -> dict:
    """Name -> (model, head): random, always right, always wrong, right about half of the time."""
    random = random_model()
    table = table_model(perturbed_cycle())
    return {
        "random eagle1": (random, random_head(random)),
        "random eagle3": (random, random_head(random, "eagle3", draft_vocab_size=96)),
        "right": (table, table_head(table)),
        "wrong": (table, table_head(table, wrong_after=tuple(range(CYCLE)))),
        "half": (table, table_head(table, wrong_after=tuple(range(0, CYCLE, 2)))),
    }


HEADS = heads()


@functools.cache
def plain_run(name: str, sampling: str, context: int) -> Generation:
    """What plain decoding says after PROMPT, to the end of the context."""
    model, _ = HEADS[name]
    ids = [token % model.config.vocab_size for token in PROMPT]
    return decode(eager(model, context=context), ids, 200, SAMPLINGS[sampling])


@pytest.mark.parametrize("sampling", ["greedy", "full", "filter"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", HEADS)
def test_drafted_ids_equal_plain_ids_to_the_end_of_the_context(name, tree, sampling):
    (model, head), context = HEADS[name], 60
    plain = plain_run(name, sampling, context)
    decoder = eager(model, head, parse_tree(tree), context)
    drafted = decode(decoder, plain.ids, 200, SAMPLINGS[sampling])
    assert drafted.tokens == plain.tokens and len(plain.tokens) == 56
    assert drafted.stop_reason == plain.stop_reason == "context"


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", ["right", "half", "random eagle3"])
def test_every_token_budget_gives_the_beginning_of_the_plain_text(name, tree):
    model, head = HEADS[name]
    longest = parse_tree(tree).depth + 5  # the first token, and more than a round
    plain = decode(eager(model), [1, 2, 3], longest).tokens
    decoder = eager(model, head, parse_tree(tree))
    for budget in range(longest + 1):
        generation = decode(decoder, [1, 2, 3], budget)
        assert generation.tokens == plain[:budget]
        assert generation.stop_reason == "length"


@pytest.mark.parametrize("tree", TREES)
def test_a_stop_id_anywhere_in_an_accepted_run_ends_the_text_there(tree):
    model, head = table_model(cycle_table(CYCLE)), None
    head = table_head(model)
    decoder = eager(model, head, parse_tree(tree))
    for distance in range(1, 14):
        stop = (3 + distance) % CYCLE
        generation = decode(decoder, [1, 2, 3], 40, stop_ids=frozenset([stop]))
        assert generation.tokens == list(range(4, 4 + distance))
        assert generation.stop_reason == "eos"
        assert generation.stats.emitted == len(generation.tokens) - 1
        # Nothing past the end is kept for the next turn.
        assert decoder.cached == ([1, 2, 3] + generation.tokens)[: len(decoder.cached)]
        again = decode(decoder, [1, 2, 3, *generation.tokens, 9, 9], 10)
        assert again.tokens == decode(eager(model), [1, 2, 3, *generation.tokens, 9, 9], 10).tokens


@pytest.mark.parametrize("nodes", [2, 8, 26, 60])
@pytest.mark.parametrize("length", [60, 61, 62, 63])
def test_trees_larger_than_the_room_that_is_left_change_nothing(nodes, length):
    model, head = random_model(max_seq_length=64), None
    head = random_head(model)
    tree = parse_tree(f"dynamic:nodes={nodes},levels=6,top_k=10")
    ids = torch.randint(128, (length,)).tolist()
    plain = decode(eager(model, context=64), ids, 50)
    drafted = decode(eager(model, head, tree, context=64), ids, 50)
    assert drafted.tokens == plain.tokens == slow_greedy(model, ids, 64 - length)
    assert drafted.stop_reason == "context"


def test_prompts_that_leave_no_room_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="64 tokens and the context 64"):
        decode(eager(random_model(), context=64), [1] * 64, 5)


@pytest.mark.parametrize("ids", [[], [128], [-1, 3]])
def test_empty_prompts_and_ids_outside_the_vocabulary_are_refused(ids):
    with pytest.raises(ValueError, match="prompt"):
        decode(eager(random_model()), ids, 5)


@pytest.mark.parametrize("tree, compile, sampling", [
    *itertools.product(("none", "chain:3", "lookup:3"), (False,), SAMPLINGS),
    pytest.param("chain:3", True, "greedy", marks=pytest.mark.slow),
    pytest.param("chain:3", True, "filter", marks=pytest.mark.slow),
])  # fmt: skip
def test_logits_of_nan_end_the_text_with_one_line(tree, compile, sampling):
    """NaN behind one token: the text is right as far as it goes, and no token is made up."""
    model = table_model(cycle_table(CYCLE))
    shape = parse_tree(tree)
    head = table_head(model) if shape.needs_head else None
    model.tok_embeddings.weight[9] = float("nan")
    decoder = Decoder(model, 100, head, shape, compile=compile)
    cold = SamplingConfig(0.01, top_p=0.9 if sampling == "filter" else 1.0)
    run = Generation(decoder, [1, 2, 3], cold if SAMPLINGS[sampling].temperature else GREEDY, 30)
    with pytest.raises(FloatingPointError, match="NaN after"):
        list(run)
    if tree == "none":
        assert run.tokens == [4, 5, 6, 7, 8, 9]
    assert run.tokens == [4, 5, 6, 7, 8, 9][: len(run.tokens)]  # a draft may meet it early
    with pytest.raises(FloatingPointError, match="NaN after 2 tokens"):
        decode(decoder, [8, 9], 5)


def test_a_text_of_one_token_has_no_round_whose_times_could_be_read():
    decoder = eager(random_model())
    decoder.clock.on_gpu = True  # where times are read after the last round
    run = decode(decoder, [3, 1], 1)
    assert len(run.tokens) == 1 and run.stats.rounds == 0 and run.stats.draft_s == 0.0


def test_a_head_that_is_always_right_fills_its_tree_every_round():
    model = table_model(cycle_table(CYCLE))
    decoder = eager(model, table_head(model), parse_tree("chain:5"))
    generation = Generation(decoder, [1, 2, 3], SamplingConfig(), 61)
    marks = list(generation)
    assert [token for token, _ in marks] == generation.tokens
    assert generation.stats.acceptance_length == 6
    assert generation.stats.accepted_by_depth == [10] * 5
    assert [drafted for _, drafted in marks] == [False] + ([True] * 5 + [False]) * 10


@pytest.mark.parametrize("short", [40, 1])
def test_a_head_trained_for_a_shorter_context_changes_nothing(short):
    """Rows of the head's RoPE table and cache follow the target's context (C35)."""
    model = random_model()
    head = random_head(model, "eagle3", max_seq_length=short)
    for length in (30, 39, 40, 41, 90):
        ids = torch.randint(128, (length,)).tolist()
        wanted = decode(eager(model), ids, 100).tokens
        assert decode(eager(model, head, parse_tree("static")), ids, 100).tokens == wanted


# ---------------------------------------------------------------- nodes and caches

STAR = static_tree([[0], [1], [2], [3], [4]], "star")
FORK = static_tree([[0], [1], [0, 0], [1, 0], [0, 0, 0], [1, 0, 0]], "fork")


def random_paths(seed: int) -> list[list[int]]:
    torch.manual_seed(seed)
    paths = [[0], [1], [2]]
    while len(paths) < 20:
        parent = paths[int(torch.randint(len(paths), (1,)))]
        rank = sum(path[:-1] == parent for path in paths)
        paths.append([*parent, rank])
    return paths


class Fixed:
    """A draft source with tokens of our choice on a static tree, for checks of the verify pass."""

    feature_layers, state = (), ()

    def __init__(self, tree: Tree, paths: list[list[int]], tokens: list[int]) -> None:
        ordered = [[]] + sorted(paths, key=lambda path: (len(path), path))
        self.tree, self.tokens = tree, torch.tensor(tokens)
        self.parents = torch.tensor([0] + [ordered.index(path[:-1]) for path in ordered[1:]])
        self.ancestors = ancestor_mask(self.parents, tree.levels)

    def propose(self, root, *_):
        return Nodes(torch.cat((root, self.tokens)), self.parents, self.ancestors)

    def learn(self, *_):
        pass

    read = learn


@pytest.mark.parametrize(
    "paths",
    [[[0] * n for n in range(1, 6)], [[i] for i in range(5)],
     [[0], [1], [0, 0], [1, 0], [0, 0, 0], [1, 0, 0]],
     random_paths(1), random_paths(2), random_paths(3)],
    ids=["chain", "star", "fork", "random1", "random2", "random3"],
)  # fmt: skip
def test_logits_of_every_node_equal_those_of_the_plain_sequence(paths):
    model = random_model()
    decoder = eager(model)
    tokens = torch.randint(128, (len(paths),)).tolist()
    source = Fixed(static_tree(paths, "fixed"), paths, tokens)
    root = decoder.prefill(PROMPT, 0, Greedy())
    seen = []
    hook = model.output.register_forward_hook(lambda module, args, output: seen.append(output))
    nodes = source.propose(torch.tensor([root]))
    with torch.inference_mode():
        decoder.verify(decoder.target, nodes, decoder.at(60), Greedy(), 1)
    hook.remove()
    logits = seen[0]
    for node in range(len(nodes.tokens)):
        path = [u for u in range(node + 1) if nodes.ancestors[node, u]]
        alone = full_logits(model, PROMPT + nodes.tokens[path].tolist())[-1]
        torch.testing.assert_close(logits[node], alone, atol=1e-5, rtol=1e-5)


def test_the_accepted_path_may_be_the_last_branch():
    """Only the last leaf is right: the committed rows must be the ones of its path (C04, C05)."""
    model = random_model()
    plain = slow_greedy(model, PROMPT, 12)
    paths = [[0], [1], [0, 0], [1, 0], [0, 0, 0], [1, 0, 0]]
    wrong = [(token + 1) % 128 for token in plain]
    tokens = [wrong[1], plain[1], wrong[2], plain[2], wrong[3], plain[3]]
    decoder = eager(model)
    tree = static_tree(paths, "fork")
    decoder = Decoder(model, 100, random_head(model), tree, compile=False)
    decoder.drafter = Fixed(tree, paths, tokens)
    decoder.prefill(PROMPT, 0, Greedy())
    assert decoder.launch(60, Greedy()).tokens() == plain[1:5]
    fresh = eager(model)
    fresh.prefill(PROMPT + plain[:4], 0, Greedy())
    torch.testing.assert_close(
        decoder.cache.data[:, :, :, :8], fresh.cache.data[:, :, :, :8], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", HEADS)
def test_after_every_round_both_caches_equal_a_fresh_prefill(name, tree):
    model, head = HEADS[name]
    ids = [token % model.config.vocab_size for token in PROMPT]
    decoder, pick = eager(model, head, parse_tree(tree)), Greedy()
    text = [*ids, decoder.prefill(ids, 0, pick)]
    for _ in range(12):
        text += decoder.launch(len(text) + 70, pick).tokens()
        fresh = eager(model, head, parse_tree(tree))
        root, rows = fresh.prefill(text[:-1], 0, pick), len(text) - 1
        assert root == text[-1] and int(decoder.length) == rows and int(decoder.root) == root
        close = {"atol": 1e-4, "rtol": 1e-4}
        torch.testing.assert_close(
            decoder.cache.data[..., :rows, :], fresh.cache.data[..., :rows, :], **close
        )
        mine, theirs = decoder.drafter, fresh.drafter
        torch.testing.assert_close(
            mine.stage.cache.data[..., :rows, :], theirs.stage.cache.data[..., :rows, :], **close
        )
        torch.testing.assert_close(mine.hidden, theirs.hidden, **close)


@pytest.mark.parametrize("tree", ["none", "chain:5", "dynamic:nodes=8,levels=3,top_k=4"])
def test_a_second_prompt_equals_a_fresh_run_whatever_came_before(tree):
    model, head = HEADS["random eagle3"]
    shape = parse_tree(tree)
    decoder = eager(model, head, shape)
    long, short = list(range(60)), [5, 6]
    prompts = [PROMPT, long, short, PROMPT, [*PROMPT, 7, 7], PROMPT[:2], [*PROMPT, 7, 8]]
    for sampling, ids in itertools.product(
        (SamplingConfig(), SamplingConfig(1.0, seed=9)), prompts
    ):
        fresh = decode(eager(model), ids, 15, sampling)
        assert decode(decoder, ids, 15, sampling).tokens == fresh.tokens


def test_a_conversation_continues_its_cached_prefix():
    model, head = HEADS["half"]
    decoder = eager(model, head, parse_tree("chain:5"))
    first = decode(decoder, [1, 2, 3], 20)
    longer = [1, 2, 3, *first.tokens, 5, 6]
    assert decoder.reusable(longer) >= len(longer) - 4
    assert decode(decoder, longer, 20).tokens == decode(eager(model), longer, 20).tokens


def test_seeds_repeat_and_differ():
    model, _ = HEADS["random eagle1"]
    decoder = eager(model)
    texts = [
        tuple(decode(decoder, PROMPT, 20, SamplingConfig(1.0, seed=seed)).tokens)
        for seed in range(20)
    ]
    assert len(set(texts)) == 20
    assert tuple(decode(decoder, PROMPT, 20, SamplingConfig(1.0, seed=3)).tokens) == texts[3]


def test_shared_noise_raises_the_acceptance_of_sampled_text():
    """The head that meets the target's noise guesses better than the same head without it."""
    model, head = HEADS["right"]
    sampling = SamplingConfig(1.0, seed=1)
    decoder = eager(model, head, parse_tree("chain:4"))
    shared = decode(decoder, [1, 2, 3], 90, sampling).stats.acceptance_length
    noise_free = eager(model, head, parse_tree("chain:4"))
    propose = noise_free.drafter.propose
    noise_free.drafter.propose = lambda root, at, pick: propose(root, at, Greedy())
    alone = decode(noise_free, [1, 2, 3], 90, sampling).stats.acceptance_length
    print(
        f"acceptance length at temperature 1: {shared:.2f} with the target's noise, {alone:.2f} "
        "without"
    )
    assert shared > 4.5 > alone + 1


# ---------------------------------------------------------------- what a capture would refuse


class NoWaiting(TorchDispatchMode):
    """Fails on operations whose result the host must wait for, or whose shape depends on data."""

    FORBIDDEN = (
        "_local_scalar_dense",
        "nonzero",
        "item",
        "is_nonzero",
        "masked_select",
        "unique",
        "equal",
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert not any(name == word or name.startswith(f"_{word}") for word in self.FORBIDDEN), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("tree", ("none", *TREES))
def test_a_round_never_waits_for_the_device(tree, sampling):
    model, head = HEADS["random eagle3"]
    decoder = eager(model, head, parse_tree(tree))
    pick = decoder.picks.set(SAMPLINGS[sampling])
    decoder.prefill(PROMPT, 0, pick)
    with torch.inference_mode(), NoWaiting():
        decoder.round(decoder.at(100), pick)


def test_the_check_for_waiting_notices_one():
    with NoWaiting(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        torch.tensor([1]).item()


# ---------------------------------------------------------------- compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, tree, kinds",
    [
        ("eagle3", "none", ("greedy", "full", "filter")),
        ("eagle3", "dynamic:nodes=8,levels=3,top_k=4", ("greedy", "filter")),
        ("eagle1", "static", ("full",)),
    ],
)
def test_compiled_ids_equal_eager_ids_and_nothing_recompiles(family, tree, kinds):
    model = random_model(max_seq_length=1024, n_layer=8)
    extra = {"draft_vocab_size": 96, "feature_layers": (2, 4, 5)} if family == "eagle3" else {}
    decoder = Decoder(model, 1000, random_head(model, family, **extra), parse_tree(tree))
    for name in kinds:
        decoder.warm_up(SAMPLINGS[name])
    before = counters["stats"]["unique_graphs"]
    for length in (1, 17, 63, 64, 65, 500):
        ids = torch.randint(128, (length,)).tolist()
        for name in kinds:
            plain = decode(eager(model, context=1000), ids, 24, SAMPLINGS[name]).tokens
            assert decode(decoder, ids, 24, SAMPLINGS[name]).tokens == plain, (name, length)
    assert counters["stats"]["unique_graphs"] == before


@pytest.mark.slow
def test_compiling_changes_no_near_tie_rule():
    """argmax inside a compiled region takes the lowest id of equal logits, as eager does."""
    model = random_model()
    model.output.weight[64:] = model.output.weight[:64]  # every logit twice
    compiled = Decoder(model, 100, compile=True)
    tokens = decode(compiled, PROMPT, 30).tokens
    assert tokens == decode(eager(model), PROMPT, 30).tokens
    assert max(tokens) < 64


def test_a_wide_row_is_normed_alike_alone_and_among_others():
    """Compiled code may split one long sum over threads, but not each of many."""
    norm, x, before = RMSNorm(8192, 1e-5), torch.randn(5, 8192), torch.get_num_threads()

    def region(norm, rows):
        return norm(rows)

    torch.set_num_threads(2)
    try:
        with torch.inference_mode():
            compiled = compile_region(region)
            alone = torch.cat([compiled(norm, row) for row in x.split(1)])
            assert torch.equal(compiled(norm, x), alone)
    finally:
        torch.set_num_threads(before)


class Pair(NamedTuple):
    x: torch.Tensor
    sizes: tuple[int, ...]


@pytest.mark.slow
def test_a_region_sees_every_change_of_its_arguments():
    """Guards of modules and globals are dropped, those of arguments and of the members of tuples
    are not; a Pick is its own kind."""

    def region(norm, pick, pair, extra, parts):
        x = pair.x if extra is None else pair.x + extra
        x = norm(x)[:, : pair.sizes[0]] + sum(parts)
        return x + pick.choose(x, torch.arange(len(x)))[:, None]

    one, two, seed = torch.ones(1, 8), torch.randn(2, 8), torch.zeros(1, dtype=torch.int64)
    norms = [RMSNorm(8, 1e-5), RMSNorm(8, 1e-5).double()]
    warm = Sampled(torch.tensor([2.0]), seed)
    calls = [
        (norms[0], Greedy(), Pair(one, (3, 1)), None, [one[:, :3]]),
        (norms[0], warm, Pair(one, (3, 1)), None, [one[:, :3]]),
        (norms[0], warm, Pair(two, (3, 1)), None, [one[:, :3]]),
        (norms[0], warm, Pair(two, (4, 1)), None, [one[:, :4]]),
        (norms[0], warm, Pair(two, (4, 1)), two, [one[:, :4]]),
        (norms[0], warm, Pair(two, (4, 1)), two, [one[:, :4], one[:, :4]]),
        (norms[1], Greedy(), Pair(one.double(), (3, 1)), None, [one[:, :3]]),
    ]
    with torch.inference_mode():
        compiled = compile_region(region)
        for _ in range(2):
            for arguments in calls:
                torch.testing.assert_close(compiled(*arguments), region(*arguments))
        for value in (1.0, 30.0):  # another value in the same tensor compiles nothing
            warm.temperature.fill_(value)
            before = counters["stats"]["unique_graphs"]
            torch.testing.assert_close(compiled(*calls[2]), region(*calls[2]))
            assert counters["stats"]["unique_graphs"] == before
