"""The decoder: prefill, and the round that drafts, verifies, accepts, commits and catches up.

Token ids in, token ids out; text lives in talon/text.py. Every tensor of a round has a static shape
and a static address, so the round is one plain call on a CPU and one CUDA graph on a GPU, with one
device-to-host copy at its end. Plain decoding is the round whose tree has only a root."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from os.path import commonprefix

import torch
from torch import Tensor, nn

from eagle_draft import Entries, Pick, Stage, read_chunk, verify
from model import At, KVCache, Transformer, rope_table
from talon.drafters import make_source
from talon.graphs import Graph, Launched, PhaseClock, Recorder, as_it_is, compile_region, replay
from talon.operators import choose_picks
from talon.sampling import NO_TOKEN, Picks, SamplingConfig
from talon.trees import NO_TREE, Tree, bucket_widths

CHUNKS = {"cpu": range(1, 257), "cuda": (16, 64, 256)}  # tokens of a forward over the prompt


class Decoder:
    """One target, perhaps one head, one tree: static buffers and compiled regions over them."""

    def __init__(
        self,
        model: Transformer,
        max_seq_length: int,
        head: nn.Module | None = None,  # what its draft source runs
        tree: Tree = NO_TREE,
        compile: bool = True,
    ) -> None:
        self.model, self.max_seq_length, self.tree = model, max_seq_length, tree
        weight, c = model.norm.weight, model.config
        self.device = weight.device
        self.on_gpu = self.device.type == "cuda"
        self.chunks = CHUNKS[self.device.type]
        rows = tree.cache_rows(max_seq_length, self.chunks[-1])
        compiled = compile_region if compile else as_it_is
        self.drafter = make_source(tree, head, rows, self.device, compiled)
        self.cache = KVCache(c.n_layer, c.n_kv_head, rows, c.head_dim, weight.dtype).to(self.device)
        table = rope_table(rows, c.head_dim, c.rope_theta, c.rope_scaling).to(self.device)
        self.target = Stage(model, self.cache, table, self.drafter.feature_layers)
        self.picks = choose_picks(Picks(self.device), self.device)
        self.length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.root = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.result = torch.zeros(tree.depth + 2, dtype=torch.int64, device=self.device)
        self.numbers = torch.arange(self.chunks[-1] + tree.depth + 1, device=self.device)
        # A GPU's attention reads the length by itself, so that one graph serves every length.
        widths = [rows - 1] if self.on_gpu else bucket_widths(rows)
        self.buckets = [torch.arange(n, device=self.device) for n in widths]
        for slots in () if self.on_gpu else self.buckets:
            torch._dynamo.mark_dynamic(slots, 0)
        self.graphs: dict[Pick, Graph] = {}
        self.cached: list[int] = []  # the ids whose keys and values are valid, for the next prompt
        self.clock = PhaseClock(self.device)
        self.recorder = Recorder(self.clock, compile) if self.on_gpu else None
        self.confirm = getattr(model, "confirm", list)  # of tokens, by all that share the model
        self.verify = compiled(verify)
        # On a CPU the matrix multiplications of a chunk dwarf what compiling it would save.
        self.read_chunk = compiled(read_chunk) if self.on_gpu else read_chunk

    # ---------------------------------------------------------------- prefill

    def at(self, needed: int) -> At:
        """The committed length, and the slots of the smallest bucket that holds `needed` of them,
        or of the largest."""
        fitting = (slots for slots in self.buckets if len(slots) >= needed)
        return At(self.length, next(fitting, self.buckets[-1]))

    @torch.inference_mode()
    def prefill(self, ids: list[int], start: int, pick: Pick) -> int:
        """Run ids[start:] through target and draft source; returns the token chosen to follow.

        ids[:start] must already be cached. A chunk has the fitting size, and is padded."""
        self.length.fill_(start)
        self.cached = self.cached[:start]  # should this be interrupted, no more than that is right
        largest, done = self.chunks[-1], start
        tokens = torch.tensor(ids[start:] + [0] * (largest + 1), device=self.device)
        while (left := len(ids) - done) > 0:
            size = next((chunk for chunk in self.chunks if chunk >= left), largest)
            chunk = tokens[done - start : done - start + size + 1]
            at = self.at(done + size + 1)  # a small model's entries stand one further
            self.prefill_chunk(chunk, min(size, left), left <= size, at, pick)
            done += size
        self.cached = list(ids)
        return self.confirm([int(self.root)])[0]

    def prefill_chunk(self, tokens: Tensor, count: int, final: bool, at: At, pick: Pick) -> None:
        """One chunk: tokens int64 [chunk + 1], the last one only to follow its neighbour; `count`
        of them are real."""
        last = self.numbers[count - 1 : count]
        choice, features = self.read_chunk(self.target, tokens[:-1], last, at, pick)
        # Inside the prompt the token that follows is known; after its last one it is the choice.
        following = tokens[1:].index_copy(0, last, choice) if final else tokens[1:]
        path = self.numbers[: len(tokens) - 1]
        self.drafter.read(Entries(features, path, following, self.length, last, tokens[:1]), at)
        self.root.copy_(choice)
        self.length.add_(count)

    # ---------------------------------------------------------------- the round

    def round(self, at: At, pick: Pick) -> None:
        """Draft, verify, accept, commit, catch up. What came of it waits in `result`: a count, then
        that many tokens.

        Only tensors change between rounds, all of them in place: that is what lets a CUDA graph
        hold a round."""
        depth, start = self.tree.depth, at.length
        self.clock.start()
        nodes = self.drafter.propose(self.root, at, pick)
        self.clock.mark("draft")
        verdict = self.verify(self.target, nodes, at, pick, depth + 1)
        tokens, path, count, features, choice = verdict
        self.clock.mark("verify")
        if depth:
            self.cache.move(start + path[1:], start + self.numbers[1 : depth + 1])
        true = Entries(features, path, tokens, start, count - 1, self.root, choice)
        self.drafter.learn(true, at)
        self.root.copy_(tokens.index_select(0, count - 1))
        self.result.copy_(torch.cat((count, tokens)))
        self.length.add_(count)
        self.clock.mark("draft")

    @torch.inference_mode()
    def launch(self, needed: int, pick: Pick) -> Launched:
        """Start one round whose slots stay below `needed`. On a GPU it returns before the round is
        done."""
        at = self.at(needed)
        if not self.on_gpu:
            self.round(at, pick)
            return Launched(self.result)
        if pick not in self.graphs:
            state = self.length, self.root, *self.drafter.state
            self.graphs[pick] = self.recorder.capture(partial(self.round, at, pick), state)
        return replay(self.graphs[pick], self.result)

    @torch.inference_mode()
    def warm_up(self, sampling: SamplingConfig) -> float:
        """Compile everything that such decoding runs, and on a GPU capture it. Returns the seconds
        it took; keeps nothing cached."""
        started = time.perf_counter()
        pick = self.picks.set(sampling)
        for chunk in self.chunks if self.on_gpu else (1,):
            self.prefill([0] * chunk, 0, pick)
        for _ in range(2):
            self.launch(2 + 2 * (self.tree.depth + 1) + self.tree.reach, pick).tokens()
        self.forget()
        return time.perf_counter() - started

    # ---------------------------------------------------------------- what is cached

    def forget(self) -> None:
        """Reuse nothing of what is cached for the next prompt."""
        self.cached = []

    def commit(self, ids: list[int]) -> None:
        """Say that these ids follow in the caches."""
        self.cached += ids

    def reusable(self, ids: list[int]) -> int:
        """How many leading tokens need no prefill. The last common one runs again: the head's entry
        there pairs it with the token that follows, which may differ, and some forward must give the
        next logits."""
        return max(len(commonprefix([self.cached, ids])) - 1, 0)


# ---------------------------------------------------------------- the loop


@dataclass
class RoundStats:
    """What a generation did. Times are seconds; phases cover the rounds, not the prefill."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    rounds: int = 0
    emitted: int = 0  # tokens that came out of rounds
    accepted_by_depth: list[int] = field(default_factory=list)  # rounds that got to depth 1, 2, ...

    def count(self, index: int) -> None:
        """One token more, number `index` (0 is the first) of its round: what came before it was
        accepted."""
        self.emitted += 1
        if index > len(self.accepted_by_depth):
            self.accepted_by_depth.append(0)
        if index:
            self.accepted_by_depth[index - 1] += 1

    @property
    def acceptance_length(self) -> float:
        """Tokens of a round, the bonus counted."""
        return self.emitted / self.rounds if self.rounds else 0.0


class Generation:
    """One text under way. Iterating runs it and yields each new id, with the mark whether a draft
    guessed it.

    Ends are cut per token on the host: a stop id, `end` (the token yielded last is the last one),
    the token budget, the end of the context. What a round found past the end is neither yielded,
    counted nor kept for the next prompt."""

    def __init__(
        self,
        decoder: Decoder,
        ids: list[int],
        sampling: SamplingConfig,
        max_new_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        limit, vocab_size = decoder.max_seq_length, decoder.model.config.vocab_size
        if not ids:
            raise ValueError("the prompt is empty: give at least one token")
        if len(ids) >= limit:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and the context {limit}: shorten it to "
                f"{limit - 1} or less, or raise --max_seq_length up to the model's own limit"
            )
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ValueError(
                f"the prompt holds ids outside 0 to {vocab_size - 1}, the model's vocabulary"
            )
        self.decoder, self.ids, self.sampling, self.stop_ids = decoder, ids, sampling, stop_ids
        room = limit - len(ids)
        self.budget = min(max_new_tokens, room)
        self.at_budget = "context" if room < max_new_tokens else "length"
        self.tokens: list[int] = []
        self.stop_reason: str | None = None
        self.stats = RoundStats()

    def end(self, reason: str) -> None:
        """Nothing follows the token that was yielded last."""
        self.stop_reason = reason

    def __iter__(self) -> Iterator[tuple[int, bool]]:
        if self.budget == 0:
            return self.end(self.at_budget)
        pick = self.decoder.picks.set(self.sampling)
        started = time.perf_counter()
        start = self.decoder.reusable(self.ids)
        first = self.decoder.prefill(self.ids, start, pick)
        self.stats.prefill_s = time.perf_counter() - started
        yield self.take(first), False
        yield from self.rounds(pick)

    def rounds(self, pick: Pick) -> Iterator[tuple[int, bool]]:
        decoder, stats = self.decoder, self.stats
        decoder.clock.reset()
        launched: Launched | None = None
        waiting: list[Launched] = []
        while self.stop_reason is None:
            started = time.perf_counter()
            self.launch_ahead(waiting, pick)
            launched = waiting.pop(0)
            found, root = decoder.confirm(launched.tokens()), self.tokens[-1]
            stats.rounds += 1
            stats.decode_s += time.perf_counter() - started  # not what is done with the tokens
            kept = []
            for index, token in enumerate(found):
                kept.append(token)
                stats.count(index)
                yield self.take(token), index < len(found) - 1
                if self.stop_reason:
                    break
            # The root has been run, and the accepted nodes; the bonus has not.
            decoder.commit([root, *(kept if len(kept) < len(found) else kept[:-1])])
        if decoder.clock.on_gpu and launched is not None:
            for later in waiting:
                later.tokens()
            decoder.clock.read(launched.events, stats.rounds)
        stats.draft_s, stats.verify_s = (decoder.clock.seconds[p] for p in ("draft", "verify"))

    def launch_ahead(self, waiting: list[Launched], pick: Pick) -> None:
        """Start the next round, and on a GPU the one after it before the first is read."""
        decoder, ahead = self.decoder, int(self.decoder.on_gpu)
        while len(waiting) <= ahead and len(self.tokens) + len(waiting) < self.budget:
            longest = (decoder.tree.depth + 1) * len(waiting)
            committed = len(self.ids) + len(self.tokens) - 1 + longest
            waiting.append(decoder.launch(committed + decoder.tree.reach, pick))

    def take(self, token: int) -> int:
        """Append a token, and see whether it is the last. FloatingPointError if there is none."""
        if token == NO_TOKEN:
            raise FloatingPointError(
                f"the model's logits are NaN after {len(self.ids) + len(self.tokens)} tokens: "
                "damaged weights, or too large for this --dtype: try fp32, or convert again"
            )
        self.tokens.append(token)
        if token in self.stop_ids:
            self.end("eos")
        elif len(self.tokens) == self.budget:
            self.end(self.at_budget)
        return token
