"""Prompt lookup: a draft source without a head, which continues the text as it went on before.

The longest of the last 3, 2 or 1 tokens that occurs earlier in prompt or answer is looked up, and
what followed there last time is proposed as a chain (`--tree lookup:K`). Summaries, edits, code and
answers that loop profit. Beside a head's tree (`chain:2+lookup:3`) it costs a few rows more and
wins where the text repeats itself, while the head wins elsewhere. Everything stays on the device in
static shapes, as the round demands: no search on the host, nothing to wait for.

Leaves out: several continuations at once, and matches across texts.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_draft import (
    DraftHead,
    absorb,
    ancestor_mask,
    grow_level,
    node_parents,
    root_children,
    select,
)
from model import KVCache, rope_table
from talon.sampling import SamplingState
from talon.trees import NO_TREE, Tree, with_lookup


class RootOnly:
    """The draft source of plain decoding: a tree of one node, nothing to learn."""

    tree = NO_TREE
    feature_layers: tuple[int, ...] = ()
    state: tuple[Tensor, ...] = ()

    def __init__(self, device: torch.device) -> None:
        self.parents = torch.zeros(1, dtype=torch.int64, device=device)
        self.ancestors = torch.ones(1, 1, dtype=torch.bool, device=device)

    def propose(
        self, root: Tensor, length: Tensor, slots: Tensor, sampling: SamplingState, kind: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        return root, self.parents, self.ancestors

    def learn(self, *_: object) -> None:
        pass

    read = learn


class EagleDrafter:
    """A head, the tree it grows, and the static buffers of both.

    A draft source has `propose` (a tree below the root), `learn` (what turned out true) and `read`
    (a chunk of the prompt); the round knows no more."""

    def __init__(
        self, head: DraftHead, tree: Tree, rows: int, compiled: Callable[[Callable], Callable]
    ) -> None:
        self.head, self.tree = head, tree
        c, device, dtype = head.config, head.d2t.device, head.layer.ffn_norm.weight.dtype
        self.feature_layers = c.feature_layers or ()
        self.cache = KVCache(1, c.n_kv_head, rows, c.head_dim, dtype).to(device)
        self.table = rope_table(rows, c.head_dim, c.rope_theta, c.rope_scaling).to(device)
        self.hidden = torch.zeros(1, c.dim, dtype=dtype, device=device)
        self.state = (self.hidden,)  # what a round writes and a rehearsed one must give back
        self.steps = torch.arange(tree.levels, device=device)
        self.unseen = torch.zeros(
            tree.beam, (tree.levels - 1) * tree.beam, dtype=torch.bool, device=device
        )
        self.all_rows = torch.arange(rows, device=device)
        self.static = tree.keep is not None
        if self.static:
            self.keep = torch.tensor(tree.keep, device=device)
            expand = torch.tensor(tree.expand, device=device).view(tree.levels - 1, tree.beam)
            blocks = [tree.block(level) for level in range(1, tree.levels)]
            self.expand = expand - torch.tensor(blocks, device=device)[:, None]  # in their level
            flat_parents = self.candidate_parents(list(expand))
            self.parents = node_parents(self.keep, flat_parents)
            self.ancestors = ancestor_mask(self.parents, tree.levels)
        self.root_children, self.grow_level = compiled(root_children), compiled(grow_level)
        self.select, self.absorb = compiled(select), compiled(absorb)
        # As in the engine's prefill.
        self.absorb_chunk = self.absorb if device.type == "cuda" else absorb

    def candidate_parents(self, beams: list[Tensor]) -> Tensor:
        """int64 [M]: flat index of every candidate's parent, -1 for the root; `beams` as flat
        indices per level.
        """
        children = [beam.repeat_interleave(self.tree.top_k) for beam in beams]
        first = torch.full((self.tree.top_k,), -1, device=self.hidden.device)
        return torch.cat([first, *children])

    def propose(
        self, root: Tensor, length: Tensor, slots: Tensor, sampling: SamplingState, kind: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Grow and select. Returns tokens int64 [N], node parents int64 [N] and ancestor mask bool
        [N, N].
        """
        tree = self.tree
        sizes = tree.beam, tree.top_k
        scores, tokens, hidden = self.root_children(
            self.head, self.hidden, length, sampling, kind, sizes
        )
        all_scores, all_tokens, beams = [scores[: tree.top_k]], [tokens[: tree.top_k]], []
        above = scores, tokens, hidden, self.unseen
        for level in range(1, tree.levels):
            rows, above = self.grow_level(
                self.head, self.expand[level - 1] if self.static else None, above,
                self.steps[level - 1 : level], length, slots, self.table, self.cache.layer(0),
                sampling, kind, sizes,
            )  # fmt: skip
            all_scores.append(above[0])
            all_tokens.append(above[1])
            if not self.static:  # a static tree's parents are known
                beams.append(rows + tree.block(level))
        if self.static:
            drafted = torch.cat(all_tokens)[self.keep]
            return torch.cat((root, drafted)), self.parents, self.ancestors
        drafted, parents, ancestors = self.select(
            torch.cat(all_tokens), torch.cat(all_scores), self.candidate_parents(beams),
            tree.grown - 1, tree.levels,
        )  # fmt: skip
        return torch.cat((root, drafted)), parents, ancestors

    def learn(self, *entries: list[Tensor] | Tensor) -> None:
        """Catch up after a round, with the arguments of `absorb` from `features` to `slots`."""
        self.take_in(self.absorb, *entries)

    def read(self, *entries: list[Tensor] | Tensor) -> None:
        """The same for a chunk of the prompt."""
        self.take_in(self.absorb_chunk, *entries)

    def take_in(self, region: Callable, *entries: list[Tensor] | Tensor) -> None:
        """The head's state at the last true entry starts the next tree."""
        self.hidden.copy_(region(self.head, *entries, self.table, self.cache.layer(0)))


NGRAM = 3  # tokens that a match has at most; longer ones are rarer and hardly better


def look_up(history: Tensor, length: Tensor, slots: Tensor, count: int) -> Tensor:
    """The `count` tokens that followed the best earlier match of the text's end: int64 [count].

    history: int64 [R], token of every position, valid up to position `length` int64 [1] (the
    root's); slots: int64 [S], positions 0 to S-1, S > length. The longest match wins, of equal ones
    the latest. A match that ends close to the root goes on into its own copy, as a loop does.
    Without any match the guess is the text's beginning.
    """
    text = history[slots]
    matching = slots < length
    score = torch.zeros_like(slots)
    for back in range(NGRAM):
        position = (length - back).clamp(min=0)
        shifted = torch.cat((text.new_full((back,), -1), text[: text.shape[0] - back]))
        matching = matching & (shifted == history[position]) & (length > back)
        score = score + matching
    best = torch.where(score > 0, score * text.shape[0] + slots, 0).argmax(0, keepdim=True)
    period = length - best
    steps = torch.arange(count, device=history.device) % period.clamp(min=1)
    return history[best + 1 + steps].clamp(min=0)


def remember(history: Tensor, start: Tensor, tokens: Tensor) -> None:
    """Write the tokens int64 [T] that follow positions start, start + 1, ... (start: int64 [1])."""
    positions = start + 1 + torch.arange(tokens.shape[0], device=history.device)
    history.index_copy_(0, positions, tokens)


class LookupDrafter:
    """The draft source of `lookup:K`; it learns from the tokens alone and keeps its own copy of the
    text.
    """

    feature_layers: tuple[int, ...] = ()
    state: tuple[
        Tensor, ...
    ] = ()  # nothing that a rehearsed round would spoil: it writes only past `length`

    def __init__(
        self, tree: Tree, rows: int, device: torch.device, compiled: Callable[[Callable], Callable]
    ) -> None:
        self.tree = tree
        # Position 0 is never told (`learn` hears of followers only), so it must match nothing: -1
        # is no token.
        self.history = torch.full((rows + 1,), -1, dtype=torch.int64, device=device)
        self.parents = (torch.arange(tree.nodes, device=device) - 1).clamp(min=0)
        self.ancestors = torch.ones(tree.nodes, tree.nodes, dtype=torch.bool, device=device).tril()
        self.look_up, self.remember = compiled(look_up), compiled(remember)

    def propose(
        self, root: Tensor, length: Tensor, slots: Tensor, sampling: SamplingState, kind: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens int64 [N], node parents int64 [N] and ancestor mask bool [N, N] of the chain below
        the root.
        """
        guesses = self.look_up(self.history, length, slots, self.tree.lookup)
        return torch.cat((root, guesses)), self.parents, self.ancestors

    def learn(
        self,
        features: list[Tensor],
        path: Tensor,
        tokens: Tensor,
        start: Tensor,
        last: Tensor,
        slots: Tensor,
    ) -> None:
        """Rows past `last` hold padding: they lie behind the new root, where nothing looks."""
        self.remember(self.history, start, tokens)

    def read(
        self,
        features: list[Tensor],
        path: Tensor,
        tokens: Tensor,
        start: Tensor,
        last: Tensor,
        slots: Tensor,
    ) -> None:
        """The same for a chunk, too rare to be worth compiling."""
        remember(self.history, start, tokens)


class EagleWithLookup(EagleDrafter):
    """A head's tree with a looked-up chain beside it, below the same root. The same token may
    follow the root in both: the longer path counts (`accept` in engine.py).
    """

    def __init__(
        self, head: DraftHead, tree: Tree, rows: int, compiled: Callable[[Callable], Callable]
    ) -> None:
        super().__init__(head, tree, rows, compiled)
        device, grown = self.hidden.device, tree.grown
        self.lookup = LookupDrafter(with_lookup(NO_TREE, tree.lookup), rows, device, compiled)
        self.chain_parents = torch.arange(grown - 1, tree.nodes - 1, device=device)
        self.chain_parents[0] = 0
        node = torch.arange(tree.nodes, device=device)
        in_chain = (node == 0) | (node >= grown)
        below = (node[:, None] >= grown) & (node[:, None] >= node)
        self.chain_ancestors = below & in_chain
        if self.static:
            self.parents, self.ancestors = self.add_chain(self.parents, self.ancestors)

    def add_chain(self, parents: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
        """Node parents int64 [N] and ancestor mask bool [N, N] of both parts, from those of what is
        grown.
        """
        more = (0, self.tree.lookup)
        parents = torch.cat((parents, self.chain_parents))
        return parents, F.pad(ancestors, more + more) | self.chain_ancestors

    def propose(
        self, root: Tensor, length: Tensor, slots: Tensor, sampling: SamplingState, kind: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, *shape = super().propose(root, length, slots, sampling, kind)
        guesses = self.lookup.look_up(self.lookup.history, length, slots, self.tree.lookup)
        parents, ancestors = shape if self.static else self.add_chain(*shape)
        return torch.cat((tokens, guesses)), parents, ancestors

    def learn(self, *entries: list[Tensor] | Tensor) -> None:
        super().learn(*entries)
        self.lookup.learn(*entries)

    def read(self, *entries: list[Tensor] | Tensor) -> None:
        super().read(*entries)
        self.lookup.read(*entries)
