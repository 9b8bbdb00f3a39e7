"""The decoder's CUDA branch on a stand-in for a GPU (cuda_standin.py): capture, replay, rounds
launched ahead, times, through the modules of a GPU, whose operators are plain torch (gpu_plain.py).
The ids equal those of plain eager decoding, and planted faults show."""

import copy
import gc
import inspect
import re
from collections.abc import Callable
from functools import cache

import gpu_plain
import pytest
import torch
from cuda_standin import Gpu, WrongUse
from tiny import (
    SAMPLINGS,
    TREES,
    cycle_table,
    decode,
    eager,
    random_head,
    random_model,
    table_head,
    table_model,
)
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_draft import DraftHead
from model import At, Transformer
from talon.decoder import Decoder, Generation
from talon.graphs import Launched, PhaseClock, Recorder
from talon.kernels.gpu_layers import GpuLinear, put_on_gpu
from talon.operators import choose_operators
from talon.sampling import SamplingConfig
from talon.trees import parse_tree

gpu_plain.register()
CONTEXT, HALF = 320, torch.float16
LOOKUPS = ("lookup:3", "chain:5+lookup:3", "dynamic:nodes=8,levels=3,top_k=4+lookup:5")
ALL_TREES = ("none", *TREES, *LOOKUPS)
SMALL = "dynamic:nodes=8,levels=3,top_k=4"
LONG = torch.randint(128, (244,), generator=torch.Generator().manual_seed(1)).tolist()


@cache
def pair(family: str) -> tuple[Transformer, DraftHead]:
    """A random target, whose attention matters, and a head, both in fp16."""
    model = random_model(max_seq_length=CONTEXT)
    extra = {"draft_vocab_size": 96} if family == "eagle3" else {}
    return model.half(), random_head(model, family, **extra).half()


@cache
def table_pair() -> tuple[Transformer, DraftHead]:
    """A target that counts to 24 over and over, and a head that knows every other step."""
    model = table_model(cycle_table(24, gap=3.0), max_seq_length=CONTEXT)
    head = table_head(model, wrong_after=tuple(range(0, 24, 2)))
    return model.half(), head.half()


@cache
def with_operators(model: Transformer) -> Transformer:
    """The target as a GPU has it, on the CPU."""
    model = copy.deepcopy(model)
    put_on_gpu(model, HALF)
    return model


@cache
def plainly(model: Transformer, ids: tuple[int, ...], count: int, sampling: SamplingConfig) -> list:
    """What plain eager decoding on the CPU gives, by the same operators."""
    return decode(eager(with_operators(model), context=CONTEXT), list(ids), count, sampling).tokens


def on_gpu(pair: tuple[Transformer, DraftHead], tree: str, context: int = CONTEXT) -> Decoder:
    """A decoder on the stand-in, with the operators of a GPU where the model has 16 bits."""
    model, head = (module.to("cuda") for module in copy.deepcopy(pair))
    shape, dtype = parse_tree(tree), model.norm.weight.dtype
    for module in (model, head):
        choose_operators(module, torch.device("cuda"), dtype)
    assert isinstance(model.output, GpuLinear) == (dtype == HALF)
    return Decoder(model, context, head if shape.needs_head else None, shape, compile=False)


# ---------------------------------------------------------------- the ids


def check_ids(family: str, tree: str, sampling: SamplingConfig, fast: bool = False) -> None:
    """A long prompt, one that begins like it, a short one: all as plain decoding has it, all from
    the one graph that was captured at warm-up."""
    model, _ = pair(family)
    prompts = (LONG, 24), (LONG[:90] + [5, 6], 8), ([3, 17], 8)
    wanted = [plainly(model, tuple(ids), count, sampling) for ids, count in prompts]
    with Gpu(fast) as gpu:
        decoder = on_gpu(pair(family), tree)
        decoder.warm_up(sampling)
        found = [decode(decoder, ids, count, sampling).tokens for ids, count in prompts]
    assert found == wanted
    assert len(gpu.captures) == 1 < gpu.captures[0].replays


@pytest.mark.parametrize("tree", ALL_TREES)
def test_ids_from_captured_rounds_equal_plain_ids(tree):
    """Every family and sampling with every other tree; all of them in the slow test below."""
    turn = ALL_TREES.index(tree)
    check_ids(("eagle1", "eagle3")[turn % 2], tree, list(SAMPLINGS.values())[turn % 3])


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("tree", ALL_TREES)
@pytest.mark.parametrize("family", ["eagle1", "eagle3"])
def test_ids_from_captured_rounds_equal_plain_ids_for_all(family, tree, sampling):
    """A replay is done at once for one family, late for the other, in turns."""
    turn = ALL_TREES.index(tree) + list(SAMPLINGS).index(sampling) + (family == "eagle3")
    check_ids(family, tree, SAMPLINGS[sampling], fast=bool(turn % 2))


@pytest.mark.parametrize("tree", ["chain:5", SMALL, "chain:5+lookup:3"])
def test_as_many_drafts_are_accepted_as_in_eager_rounds(tree):
    """What the head learnt must reach the next replay: ids alone would not show that it did not."""
    model, head = copy.deepcopy(table_pair())
    for module in (model, head):
        put_on_gpu(module, HALF)
    eagerly = decode(eager(model, head, parse_tree(tree), CONTEXT), [1, 2, 3], 40).stats
    with Gpu():
        stats = decode(on_gpu(table_pair(), tree), [1, 2, 3], 40).stats
    assert stats.accepted_by_depth == eagerly.accepted_by_depth and sum(stats.accepted_by_depth) > 9
    assert stats.rounds == eagerly.rounds


@pytest.mark.parametrize("tree", ["none", SMALL])
def test_a_model_in_fp32_is_decoded_with_masks_from_one_graph_too(tree):
    model, head = copy.deepcopy(pair("eagle3"))
    model, head = model.float(), head.float()
    wanted = decode(eager(model, context=CONTEXT), LONG, 12).tokens
    with Gpu() as gpu:
        assert decode(on_gpu((model, head), tree), LONG, 12).tokens == wanted
    assert len(gpu.captures) == 1


def test_a_prompt_is_read_in_chunks_of_the_fitting_size():
    with Gpu():
        decoder, sizes = on_gpu(pair("eagle1"), "chain:5"), []
        read = decoder.prefill_chunk
        decoder.prefill_chunk = lambda tokens, *rest: (
            sizes.append(len(tokens) - 1),
            read(tokens, *rest),
        )
        for count in (1, 16, 17, 64, 65, 256, 257, 300):
            decoder.prefill([3] * count, 0, decoder.picks.set(SAMPLINGS["greedy"]))
    assert sizes == [16, 16, 64, 64, 256, 256, 256, 16, 256, 64]


def test_a_round_begins_no_later_than_the_host_reckons():
    """The host does not know yet how far the round before it came."""
    model = table_pair()[0]
    with Gpu():
        decoder = on_gpu((model, table_head(model).half()), "chain:5")
        launch, launched = decoder.launch, []

        def watch(needed, pick):
            launched.append((needed, launch(needed, pick)))
            return launched[-1][1]

        decoder.launch, length = watch, 60
        decode(decoder, [i % 24 for i in range(length)], 40)
        for needed, round_ in launched:
            assert length + decoder.tree.reach <= needed
            length += len(round_.tokens())


@pytest.mark.parametrize("tree", ["none", "chain:5", "chain:5+lookup:3"])
def test_ids_equal_plain_ids_to_the_end_of_the_context(tree):
    """Where the round that was launched ahead begins past the last position."""
    model, _ = table_pair()
    wanted = decode(eager(model, context=60), [1, 2, 3], 100)
    with Gpu():
        run = decode(on_gpu(table_pair(), tree, context=60), [1, 2, 3], 100)
    assert run.tokens == wanted.tokens and run.stop_reason == wanted.stop_reason == "context"


def test_a_stop_id_ends_a_text_with_a_round_under_way_and_the_next_one_is_right():
    model, _ = table_pair()
    with Gpu():
        decoder = on_gpu(table_pair(), "chain:5")
        for stop in (5, 6, 9):
            run = decode(decoder, [1, 2, 3], 40, stop_ids=frozenset([stop]))
            assert run.tokens == list(range(4, stop + 1)) and run.stop_reason == "eos"
            again = [1, 2, 3, *run.tokens, 9]
            assert decode(decoder, again, 6).tokens == plainly(
                model, tuple(again), 6, SAMPLINGS["greedy"]
            )


@pytest.mark.parametrize("fast", [False, True], ids=["late", "at once"])
def test_a_text_left_with_a_round_under_way_harms_no_other(fast):
    """Another sampling, too: what it fills in may not reach the round that is under way."""
    model, _ = pair("eagle3")
    with Gpu(fast) as gpu:
        decoder = on_gpu(pair("eagle3"), SMALL)
        for name in ("sample", "filter"):
            decoder.warm_up(SAMPLINGS[name])
        for name in ("sample", "filter", "sample"):
            left = iter(Generation(decoder, LONG[:50], SAMPLINGS[name], 60))
            for _ in range(7):
                next(left)
            assert fast or gpu.stream.work
            left.close()
            other = SAMPLINGS["filter" if name == "sample" else "sample"]
            wanted = plainly(model, tuple(LONG[:40]), 12, other)
            assert decode(decoder, LONG[:40], 12, other).tokens == wanted


@pytest.mark.parametrize("tree", ["none", "chain:5", "lookup:3"])
def test_logits_of_nan_end_a_text_and_the_round_after_them_harms_no_other(tree):
    """A round that was launched ahead of them begins without a token."""
    model = copy.deepcopy(table_pair()[0])
    model.tok_embeddings.weight[20] = float("nan")
    wanted = plainly(table_pair()[0], (1, 2), 12, SAMPLINGS["greedy"])
    with Gpu():
        decoder = on_gpu((model, table_head(model).half()), tree)
        with pytest.raises(FloatingPointError, match="NaN after"):
            decode(decoder, [9, 10], 30)
        decoder.forget()
        assert decode(decoder, [1, 2], 12).tokens == wanted


def test_another_seed_or_temperature_captures_nothing():
    model, _ = pair("eagle1")
    with Gpu() as gpu:
        decoder = on_gpu(pair("eagle1"), "chain:5")
        decoder.warm_up(SAMPLINGS["sample"])
        captured = len(gpu.captures)
        for sampling in (SamplingConfig(0.7, seed=8), SamplingConfig(1.3, seed=9)):
            wanted = plainly(model, tuple(LONG[:20]), 10, sampling)
            assert decode(decoder, LONG[:20], 10, sampling).tokens == wanted
        assert len(gpu.captures) == captured


# ---------------------------------------------------------------- how it comes about


def test_a_round_is_under_way_whenever_the_host_has_tokens_of_the_one_before():
    with Gpu() as gpu:
        decoder = on_gpu(table_pair(), "chain:5")
        decoder.warm_up(SAMPLINGS["greedy"])
        steps = iter(Generation(decoder, [1, 2, 3], SAMPLINGS["greedy"], 40))
        next(steps)  # from the prefill
        under_way = [bool(gpu.stream.work) for _ in steps]
        assert all(under_way[:-6]) and not gpu.stream.work


def test_all_graphs_of_a_decoder_share_one_pool():
    with Gpu() as gpu:
        decoder = on_gpu(pair("eagle1"), SMALL)
        for sampling in SAMPLINGS.values():
            decoder.warm_up(sampling)
        assert list(gpu.pools) == [decoder.recorder.pool] and len(gpu.captures) == 3
        on_gpu(pair("eagle1"), SMALL).warm_up(SAMPLINGS["greedy"])
        assert len(gpu.pools) == 2


def test_phases_take_the_time_between_the_marks_inside_the_graph():
    """The stand-in's clock counts calls: a millisecond each."""
    with Gpu() as gpu:
        decoder = on_gpu(table_pair(), "chain:5")
        stats = decode(decoder, [1, 2, 3], 40).stats
        used = next(graph for graph in gpu.captures if graph.replays)
    calls = sum(not isinstance(call[0], type(used.tape.events[0])) for call in used.tape.calls)
    assert stats.draft_s > 0 and stats.verify_s > 0
    assert stats.draft_s + stats.verify_s == pytest.approx(stats.rounds * calls / 1e3)


def test_no_graph_is_destroyed_while_another_one_is_captured():
    """A dead decoder whose graphs are garbage by then: they go before or after."""
    thresholds = gc.get_threshold()
    with Gpu() as gpu:
        recorder = Recorder(PhaseClock(torch.device("cuda")), compiled=False)

        def step() -> None:
            dead = [torch.cuda.CUDAGraph()]
            dead.append(dead)
            del dead
            _ = [[i] for i in range(2000)]  # enough for a collection, where there may be one

        try:
            gc.set_threshold(10, 2, 2)
            recorder.capture(step, ())
            assert gc.isenabled()
            with pytest.raises(WrongUse, match="destroyed"):
                with torch.cuda.graph(torch.cuda.CUDAGraph()):
                    step()
        finally:
            gc.set_threshold(*thresholds)
            gpu.tape = None


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_inputs_are_watched_in_eager_captures_only_since_compiled_regions_would_not_run():
    with Gpu():
        clock = PhaseClock(torch.device("cuda"))
        known = "check_input_liveness" in inspect.signature(torch.cuda.graph).parameters
        assert Recorder(clock, compiled=True).options == {}
        assert bool(Recorder(clock, compiled=False).options) == known
    region = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)
    region(torch.ones(2))
    with pytest.raises(RuntimeError, match="dispatch mode"), Watching():
        region(torch.ones(2))


# ---------------------------------------------------------------- planted faults


def a_python_number(decoder: Decoder) -> None:
    """The committed length, as the host knew it when it captured."""
    verify = decoder.verify
    decoder.verify = lambda target, nodes, at, *rest: verify(
        target, nodes, At(at.length * 0 + 21, at.slots), *rest
    )


def a_wait_inside(decoder: Decoder) -> None:
    verify = decoder.verify
    decoder.verify = lambda target, nodes, at, *rest: verify(
        target, nodes, At(torch.full((1,), int(at.length), device="cuda"), at.slots), *rest
    )


def a_buffer_replaced(decoder: Decoder) -> None:
    learn = decoder.drafter.learn

    def replace(*args) -> None:
        learn(*args)
        decoder.root = decoder.root.clone()

    decoder.drafter.learn = replace


def state_in_the_pool(decoder: Decoder) -> None:
    drafter = decoder.drafter

    def learn(entries, at) -> None:
        drafter.hidden = drafter.absorb(drafter.stage, entries, at)

    drafter.learn = learn


def no_event(decoder: Decoder) -> None:
    launch = decoder.launch
    decoder.launch = lambda *args: Launched(launch(*args).result)


def one_buffer_for_all_results(decoder: Decoder) -> None:
    launch, host = decoder.launch, torch.empty_like(decoder.result, device="cpu", pin_memory=True)

    def into_it(*args) -> Launched:
        launch(*args)
        host.copy_(decoder.result, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Launched(host, done)

    decoder.launch = into_it


def no_state_given_back(decoder: Decoder) -> None:
    capture = decoder.recorder.capture
    decoder.recorder.capture = lambda step, state: capture(step, ())


def a_constant_of_the_host(decoder: Decoder) -> None:
    decoder.numbers = torch.arange(len(decoder.numbers))


def an_input_freed(decoder: Decoder) -> None:
    decoder.warm_up(SAMPLINGS["greedy"])
    decoder.drafter.unseen = decoder.drafter.unseen.clone()


FAULTS: dict[Callable, str] = {
    a_python_number: "other ids",
    a_wait_inside: "waited for in a capture",
    a_buffer_replaced: "freed",
    state_in_the_pool: "freed|other ids|out of (range|bounds)",
    no_event: "other ids|out of (range|bounds)",
    one_buffer_for_all_results: "other ids",
    no_state_given_back: "other ids",
    a_constant_of_the_host: "tensors on the device and others",
    an_input_freed: "freed",
}


def outcome(fault: Callable | None, fast: bool) -> str:
    model, _ = pair("eagle1")
    wanted = plainly(model, tuple(LONG[:20]), 16, SAMPLINGS["greedy"])
    with Gpu(fast):
        decoder = on_gpu(pair("eagle1"), SMALL)
        try:
            if fault:
                fault(decoder)
            found = decode(decoder, LONG[:20], 16).tokens
        except (RuntimeError, IndexError, ArithmeticError) as error:
            return str(error)
    return "the same ids" if found == wanted else f"other ids: {found}"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_noticed(fault):
    fast = fault is one_buffer_for_all_results  # what is overwritten early shows on a fast device
    assert re.search(FAULTS[fault], found := outcome(fault, fast)), found


@pytest.mark.parametrize("fast", [False, True])
def test_without_a_fault_there_is_nothing_to_notice(fast):
    assert outcome(None, fast) == "the same ids"
