"""The decoder: prefill, and the round that drafts, verifies, accepts, commits and catches up.

Token ids in, token ids out; text lives in text.py. Every tensor of a round has a static shape and a
static address, so the round is one plain call on a CPU and one CUDA graph on a GPU, with one
device-to-host copy at its end. Plain decoding is the round whose tree has only a root."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle_draft import DraftHead, read_chunk, verify
from model import KVCache, Transformer, rope_table
from talon.drafters import EagleDrafter, EagleWithLookup, LookupDrafter, RootOnly
from talon.fallback import Backlog, Pace
from talon.graphs import Graph, Launched, PhaseClock, compile_region
from talon.sampling import SamplingConfig, SamplingState
from talon.trees import NO_TREE, Tree

SMALLEST_BUCKET = 256  # cache slots that attention reads at least


@dataclass
class RoundStats:
    """What a generation did, for the report. Times are seconds; phases cover the rounds, not the
    prefill.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    rounds: int = 0
    plain_rounds: int = 0  # of these, the ones that did not draft because drafting had lost
    emitted: int = 0  # tokens that came out of rounds
    accepted_by_depth: list[int] = field(
        default_factory=list
    )  # rounds whose node at depth 1, 2, ... was emitted

    def count(self, tokens: int, plain: bool = False) -> None:
        """One round gave `tokens` tokens, the bonus included."""
        self.rounds += 1
        self.plain_rounds += plain
        self.emitted += tokens
        drafted = tokens - 1
        self.accepted_by_depth += [0] * (drafted - len(self.accepted_by_depth))
        for depth in range(drafted):
            self.accepted_by_depth[depth] += 1

    @property
    def acceptance_length(self) -> float:
        return self.emitted / self.rounds if self.rounds else 0.0


class Decoder:
    """One target, perhaps one head, one tree: static buffers and the compiled regions that work on
    them.
    """

    def __init__(
        self,
        model: Transformer,
        max_seq_length: int,
        head: DraftHead | None = None,
        tree: Tree = NO_TREE,
        compile: bool = True,
    ) -> None:
        self.model, self.max_seq_length = model, max_seq_length
        weight = model.norm.weight
        self.device, c = weight.device, model.config
        self.chunk = 256 if self.device.type == "cuda" else 64  # rows of a prefill forward
        tree = NO_TREE if head is None and tree.needs_head else tree
        self.reach, rows = tree.reach, tree.cache_rows(max_seq_length, self.chunk)
        compiled = compile_region if compile else lambda function: function
        self.plain = RootOnly(self.device)
        self.drafter = self.plain
        if tree.needs_head:
            source = EagleWithLookup if tree.lookup else EagleDrafter
            self.drafter = source(head, tree, rows, compiled)
        elif tree.lookup:
            self.drafter = LookupDrafter(tree, rows, self.device, compiled)
        self.tree = self.drafter.tree
        self.cache = KVCache(c.n_layer, c.n_kv_head, rows, c.head_dim, weight.dtype).to(self.device)
        self.table = rope_table(rows, c.head_dim, c.rope_theta, c.rope_scaling).to(self.device)
        self.sampling = SamplingState(self.device)
        self.length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.root = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.report = torch.zeros(self.tree.depth + 2, dtype=torch.int64, device=self.device)
        self.offsets = torch.arange(self.chunk + self.tree.depth + 1, device=self.device)
        self.slot_views: dict[int, Tensor] = {}
        self.graphs: dict[tuple[str, int, str], Graph] = {}
        self.pace: Pace | None = None  # set by fall_back_below
        self.backlog: Backlog | None = None
        self.behind = 0  # plain rounds that the drafter has not learned
        self.cached: list[int] = []  # the ids whose keys and values are valid, for the next prompt
        self.clock = PhaseClock(self.device)
        self.verify = compiled(verify)
        # On a CPU a chunk's products dwarf what compiling would save, so it runs eagerly and
        # nothing is compiled.
        self.read_chunk = compiled(read_chunk) if self.device.type == "cuda" else read_chunk

    def slots(self, needed: int) -> Tensor:
        """Slot numbers 0.. of the smallest power-of-two bucket that holds `needed` cache slots."""
        width = min(max(SMALLEST_BUCKET, 1 << (needed - 1).bit_length()), self.cache.rows - 1)
        if width not in self.slot_views:
            view = torch.arange(width, device=self.device)
            torch._dynamo.mark_dynamic(view, 0)
            self.slot_views[width] = view
        return self.slot_views[width]

    @torch.inference_mode()
    def prefill(self, ids: list[int], start: int, kind: str) -> int:
        """Run ids[start:] through target and head and choose the token that follows. Returns that
        token.

        ids[:start] must already be cached, in the head's cache too. Chunks have one size, the last
        is padded."""
        self.catch_up(len(self.cached) + 1)
        self.length.fill_(start)
        self.cached = self.cached[:start]  # should this be interrupted, no more than that is right
        padding = [0] * (-(len(ids) - start) % self.chunk + 1)
        tokens = torch.tensor(ids[start:] + padding, device=self.device)
        for offset in range(0, len(ids) - start, self.chunk):
            rows = min(self.chunk, len(ids) - start - offset)
            final = start + offset + rows == len(ids)
            slots = self.slots(start + offset + self.chunk)
            self.prefill_chunk(tokens[offset : offset + self.chunk + 1], rows, final, slots, kind)
        self.cached = list(ids)
        return int(self.root)

    def prefill_chunk(
        self, tokens: Tensor, rows: int, final: bool, slots: Tensor, kind: str
    ) -> None:
        """One chunk: tokens int64 [chunk + 1], the last one only to follow its neighbour; `rows` of
        them are real.
        """
        last = self.offsets[rows - 1 : rows]
        choice, features = self.read_chunk(
            self.model, self.cache, self.table, tokens[:-1], self.length, last, slots,
            self.sampling, kind, self.drafter.feature_layers,
        )  # fmt: skip
        # Inside the prompt the token that follows a row is known; after the prompt's last row it is
        # the choice.
        following = tokens[1:].index_copy(0, last, choice) if final else tokens[1:]
        path = self.offsets[: self.chunk]
        self.drafter.read(features, path, following, self.length, last, slots)
        self.root.copy_(choice)
        self.length.add_(rows)

    def round(self, slots: Tensor, kind: str) -> None:
        """Draft, verify, accept, commit, catch up. The result waits in `report`: a count, then that
        many tokens.

        Only tensors change between rounds, all of them in place: that is what lets a CUDA graph
        hold a round."""
        depth, start = self.tree.depth, self.length
        self.clock.start()
        nodes = self.drafter.propose(self.root, start, slots, self.sampling, kind)
        self.clock.mark("draft")
        emitted, path, count, features = self.run_target(nodes, start, slots, kind, depth + 1)
        self.clock.mark("verify")
        if depth:
            self.cache.move(start + path[1:], start + self.offsets[1 : depth + 1])
        self.drafter.learn(features, path, emitted, start, count - 1, slots)
        self.root.copy_(emitted.index_select(0, count - 1))
        self.report.copy_(torch.cat((count, emitted)))
        self.length.add_(count)
        self.clock.mark("draft")

    def run_target(
        self,
        nodes: tuple[Tensor, Tensor, Tensor],
        length: Tensor,
        slots: Tensor,
        kind: str,
        rows: int,
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """`verify` on this decoder's model and buffers."""
        return self.verify(
            self.model, self.cache, self.table, nodes, length, slots, self.sampling, kind, rows,
            self.drafter.feature_layers,
        )  # fmt: skip

    def fall_back_below(self, break_even: float) -> None:
        """Decode plainly while drafted rounds give fewer tokens than `break_even`, their cost in
        plain rounds.
        """
        if self.tree.nodes > 1:
            dtype, dim = self.model.norm.weight.dtype, self.model.config.dim
            levels = len(self.drafter.feature_layers) or 1
            self.pace = Pace(break_even)
            self.backlog = Backlog(levels, dim, self.chunk, dtype, self.device)

    def plain_round(self, slots: Tensor, kind: str) -> None:
        """A round without a draft, on the same buffers; what the drafter should learn waits in the
        backlog.
        """
        self.clock.start()
        nodes = self.plain.propose(self.root, self.length, slots, self.sampling, kind)
        emitted, _, count, features = self.run_target(nodes, self.length, slots, kind, 1)
        self.clock.mark("verify")
        self.backlog.add(features, emitted)
        self.root.copy_(emitted)
        self.report[:2].copy_(torch.cat((count, emitted)))
        self.length.add_(count)
        self.clock.mark("draft")

    def catch_up(self, needed: int) -> None:
        """Let the drafter learn the backlog: one pass in the shape of a prompt's chunk."""
        if self.behind:
            start = self.length - self.behind
            last, rows = self.offsets[self.behind - 1 : self.behind], self.offsets[: self.chunk]
            backlog = self.backlog
            self.drafter.read(
                backlog.features, rows, backlog.tokens, start, last, self.slots(needed)
            )
            backlog.count.zero_()
            self.behind = 0

    def capture(self, step: Callable[[Tensor, str], None], slots: Tensor, kind: str) -> Graph:
        """Record a round as a CUDA graph. Its rehearsal, which compiles, writes only slots that are
        not committed.
        """
        counts = [self.backlog.count] if self.backlog else []
        state = [self.length, self.root, *self.drafter.state, *counts]
        before = [tensor.clone() for tensor in state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(slots, kind)
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(slots, kind)
        return Graph(graph, self.clock.events)

    @torch.inference_mode()
    def launch(self, needed: int, kind: str) -> "Launched":
        """Start one round whose slots stay below `needed`. On a GPU it returns before the round is
        done.
        """
        self.catch_up(needed)
        return self.start(self.round, needed, kind)

    @torch.inference_mode()
    def launch_plain(self, needed: int, kind: str) -> "Launched":
        """The same for a round that does not draft."""
        if self.behind == self.chunk:
            self.catch_up(needed)
        self.behind += 1
        return self.start(self.plain_round, needed, kind)

    def start(self, step: Callable[[Tensor, str], None], needed: int, kind: str) -> "Launched":
        slots = self.slots(needed)
        if self.device.type != "cuda":
            step(slots, kind)
            return Launched(self.report)
        key = (step.__name__, slots.shape[0], kind)
        if key not in self.graphs:
            self.graphs[key] = self.capture(step, slots, kind)
        graph = self.graphs[key]
        graph.cuda.replay()
        host = torch.empty(self.report.shape, dtype=self.report.dtype, pin_memory=True)
        host.copy_(self.report, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Launched(host, done, graph.events)

    @torch.inference_mode()
    def warm_up(self, kind: str) -> float:
        """Compile everything that decoding with `kind` runs. Returns the seconds it took; keeps
        nothing cached.
        """
        started = time.perf_counter()
        self.prefill([0], 0, kind)
        needed = 2 + 2 * (self.tree.depth + 1) + self.reach
        if self.pace:  # first, so that what follows also compiles the catching up after it
            self.launch_plain(needed, kind).tokens()
        for _ in range(2):
            self.launch(needed, kind).tokens()
        self.cached = []
        return time.perf_counter() - started

    def reusable(self, ids: list[int]) -> int:
        """How many leading tokens need no prefill. The last common one runs again: the head's entry
        there pairs it with the token that follows, which may differ, and some row must give the
        next logits.
        """
        common = 0
        for mine, wanted in zip(self.cached, ids, strict=False):
            if mine != wanted:
                break
            common += 1
        return max(common - 1, 0)


class Generation:
    """One text under way. Iterating runs it and yields the new ids of every forward, cut at the
    end.

    Ends are cut per token on the host: a stop id or `stop(token)` (that token is the last), the
    token budget, the end of the context. What a round found past the end is neither yielded,
    counted nor kept for the next prompt."""

    def __init__(
        self,
        decoder: Decoder,
        ids: list[int],
        sampling: SamplingConfig,
        max_new_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
        stop: Callable[[int], bool] | None = None,
    ) -> None:
        limit = decoder.max_seq_length
        if not ids:
            raise ValueError("the prompt is empty: give at least one token")
        if len(ids) >= limit:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and the context {limit}: shorten it to "
                f"{limit - 1} or less, "
                "or raise --max_seq_length up to the model's own limit"
            )
        vocab_size = decoder.model.config.vocab_size
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ValueError(
                f"the prompt holds ids outside 0 to {vocab_size - 1}, the model's vocabulary"
            )
        self.decoder, self.ids, self.sampling = decoder, ids, sampling
        self.stop_ids, self.stop = stop_ids, stop
        self.room = limit - len(ids)
        self.budget = min(max_new_tokens, self.room)
        self.length_reason = "context" if self.room < max_new_tokens else "length"
        self.tokens: list[int] = []
        self.drafted: list[bool] = []
        self.stop_reason: str | None = None
        self.stats = RoundStats()

    def __iter__(self) -> Iterator[list[int]]:
        decoder = self.decoder
        if self.budget == 0:
            self.stop_reason = self.length_reason
            return
        decoder.sampling.set(self.sampling)
        started = time.perf_counter()
        start = decoder.reusable(self.ids)
        first = decoder.prefill(self.ids, start, self.sampling.kind)
        self.stats.prefill_s = time.perf_counter() - started
        yield self.take([first])
        yield from self.rounds()

    def rounds(self) -> Iterator[list[int]]:
        decoder, stats = self.decoder, self.stats
        decoder.clock.seconds = {"draft": 0.0, "verify": 0.0}
        longest = decoder.tree.depth + 1
        if decoder.pace is not None:
            decoder.pace.new_text()
        started, waiting = time.perf_counter(), []
        # Rounds that the host may run ahead of what it has read.
        ahead = 1 if decoder.device.type == "cuda" else 0
        while self.stop_reason is None:
            while len(waiting) <= ahead and len(self.tokens) + len(waiting) < self.budget:
                committed = len(self.ids) + len(self.tokens) - 1 + longest * len(waiting)
                plain = decoder.pace is not None and decoder.pace.plain
                launch = decoder.launch_plain if plain else decoder.launch
                waiting.append((launch(committed + decoder.reach, self.sampling.kind), plain))
            launched, plain = waiting.pop(0)
            found = launched.tokens()
            if decoder.pace is not None:
                decoder.pace.count(len(found), plain)
            decoder.cached.append(self.tokens[-1])  # the root has been run
            kept = self.take(found)
            decoder.cached += kept if len(kept) < len(found) else kept[:-1]
            stats.count(len(kept), plain)
            stats.decode_s += time.perf_counter() - started
            yield kept
            started = time.perf_counter()  # what the reader does with the tokens is not decoding
        rounds = 1
        # The last round's split stands for all: reading each would wait.
        if decoder.clock.on_gpu and stats.rounds:
            for launched, _ in waiting:
                launched.tokens()
            decoder.clock.read(launched.events)
            rounds = stats.rounds
        stats.draft_s = decoder.clock.seconds["draft"] * rounds
        stats.verify_s = decoder.clock.seconds["verify"] * rounds

    def take(self, found: list[int]) -> list[int]:
        """Append tokens up to the end of the text; returns those that belong to it."""
        for index, token in enumerate(found):
            self.tokens.append(token)
            self.drafted.append(index < len(found) - 1)
            if token in self.stop_ids:
                self.stop_reason = "eos"
            elif self.stop is not None and self.stop(token):
                self.stop_reason = "stop"
            elif len(self.tokens) == self.budget:
                self.stop_reason = self.length_reason
            if self.stop_reason:
                return found[: index + 1]
        return found
