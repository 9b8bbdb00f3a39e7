"""Where guesses come from: nowhere, a head, the text itself, or the last two together.

A draft source has `propose` (a tree below the root), `learn` (what turned out true) and `read` (a
chunk of the prompt); the round knows no more. Everything stays on the device in static shapes, as
the round demands: no search on the host, nothing to wait for.

Prompt lookup (`--tree lookup:K`) continues the text as it went on before: the longest of the last
3, 2 or 1 tokens that occurs earlier in prompt or answer is looked up, and what followed there last
time is proposed as a chain. Summaries, edits, code and answers that loop profit. Next to a head's
tree (`chain:2+lookup:3`) it costs a few tokens more and wins where the text repeats itself, while
the head wins elsewhere.

Leaves out: what trees there are (talon/trees.py), the forwards themselves (eagle_draft.py), several
continuations at once, and matches across texts."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_draft import (
    DraftHead,
    Entries,
    Level,
    Nodes,
    Pick,
    Stage,
    absorb,
    ancestor_mask,
    grow_level,
    node_parents,
    root_children,
    select,
)
from model import At, KVCache, rope_table
from talon.trees import NO_TREE, Tree, with_lookup

Compile = Callable[[Callable], Callable]  # makes a compiled region of a function, or leaves it

NGRAM = 3  # tokens that a match has at most; longer ones are rarer and hardly better


class DraftSource(Protocol):
    tree: Tree
    feature_layers: tuple[int, ...]  # of the target, which `learn` and `read` want
    stage: Stage | None  # the head, if there is one
    state: tuple[Tensor, ...]  # what a round writes and a rehearsed one must give back

    def propose(self, root: Tensor, at: At, pick: Pick) -> Nodes: ...

    def learn(self, entries: Entries, at: At) -> None: ...

    def read(self, entries: Entries, at: At) -> None: ...


def make_source(
    tree: Tree, head: DraftHead | None, rows: int, device: torch.device, compiled: Compile
) -> DraftSource:
    """The draft source of a tree. rows: of the caches."""
    if not tree.needs_head:
        return LookupDrafter(tree, rows, device, compiled) if tree.lookup else RootOnly(device)
    assert head is not None, f"tree {tree.name} needs a head"
    source = EagleDrafter(head, tree.without_lookup(), rows, compiled)
    return WithLookup(source, tree, rows, compiled) if tree.lookup else source


class RootOnly:
    """The draft source of plain decoding: a tree of one node, nothing to learn."""

    tree = NO_TREE
    feature_layers: tuple[int, ...] = ()
    stage = None
    state: tuple[Tensor, ...] = ()

    def __init__(self, device: torch.device) -> None:
        self.parents = torch.zeros(1, dtype=torch.int64, device=device)
        self.ancestors = torch.ones(1, 1, dtype=torch.bool, device=device)

    def propose(self, root: Tensor, at: At, pick: Pick) -> Nodes:
        return Nodes(root, self.parents, self.ancestors)

    def learn(self, entries: Entries, at: At) -> None:
        pass

    read = learn


# ---------------------------------------------------------------- a head


class Candidates(NamedTuple):
    """All that a head has grown below the root, in the flat order of Tree."""

    tokens: Tensor  # int64 [M]
    scores: Tensor  # fp32 [M], cumulative log-probabilities
    parents: Tensor | None  # int64 [M], flat; -1 is the root; None where the tree is static


class EagleDrafter:
    """A head, the tree it grows, and the static buffers of both."""

    def __init__(self, head: DraftHead, tree: Tree, rows: int, compiled: Compile) -> None:
        self.tree = tree
        c, device, dtype = head.config, head.d2t.device, head.layer.ffn_norm.weight.dtype
        self.feature_layers = c.feature_layers or ()
        cache = KVCache(1, c.n_kv_head, rows, c.head_dim, dtype).to(device)
        table = rope_table(rows, c.head_dim, c.rope_theta, c.rope_scaling).to(device)
        self.stage = Stage(head, cache, table)
        self.hidden = torch.zeros(1, c.dim, dtype=dtype, device=device)
        self.state = (self.hidden,)
        self.steps = torch.arange(tree.levels, device=device)
        slots = (tree.levels - 1) * tree.beam
        self.unseen = torch.zeros(tree.beam, slots, dtype=torch.bool, device=device)
        self.static = tree.keep is not None
        if self.static:
            self.keep = torch.tensor(tree.keep, device=device)
            expand = torch.tensor(tree.expand, device=device).view(tree.levels - 1, tree.beam)
            blocks = [tree.block(level) for level in range(1, tree.levels)]
            self.expand = expand - torch.tensor(blocks, device=device)[:, None]  # in their level
            self.parents = node_parents(self.keep, self.candidate_parents(list(expand)))
            self.ancestors = ancestor_mask(self.parents, tree.levels)
        self.root_children, self.grow_level = compiled(root_children), compiled(grow_level)
        self.select, self.absorb = compiled(select), compiled(absorb)
        # As in the decoder's prefill: a chunk of the prompt is compiled on a GPU only.
        self.absorb_chunk = self.absorb if device.type == "cuda" else absorb

    def candidate_parents(self, beams: list[Tensor]) -> Tensor:
        """int64 [M]: flat index of every candidate's parent, -1 for the root. beams: the nodes of
        every level as flat indices."""
        children = [beam.repeat_interleave(self.tree.top_k) for beam in beams]
        first = torch.full((self.tree.top_k,), -1, device=self.hidden.device)
        return torch.cat([first, *children])

    def grow(self, at: At, pick: Pick) -> Candidates:
        """Run the head level by level. EAGLE-2, section 4.1, for a dynamic tree."""
        tree, head = self.tree, self.stage
        sizes = tree.beam, tree.top_k
        first = self.root_children(head.module, self.hidden, at, pick, sizes)
        above = Level(*first, self.unseen)
        scores, tokens, beams = [above.scores[: tree.top_k]], [above.tokens[: tree.top_k]], []
        for level in range(1, tree.levels):
            chosen = self.expand[level - 1] if self.static else None
            step = self.steps[level - 1 : level]
            chosen, above = self.grow_level(head, chosen, above, step, at, pick)
            scores.append(above.scores)
            tokens.append(above.tokens)
            if not self.static:  # a static tree's parents are known
                beams.append(chosen + tree.block(level))
        parents = None if self.static else self.candidate_parents(beams)
        return Candidates(torch.cat(tokens), torch.cat(scores), parents)

    def propose(self, root: Tensor, at: At, pick: Pick) -> Nodes:
        """Grow and select."""
        tokens, scores, parents = self.grow(at, pick)
        if self.static:
            return Nodes(torch.cat((root, tokens[self.keep])), self.parents, self.ancestors)
        count, levels = self.tree.nodes - 1, self.tree.levels
        kept, parents, ancestors = self.select(tokens, scores, parents, count, levels)
        return Nodes(torch.cat((root, kept)), parents, ancestors)

    def learn(self, entries: Entries, at: At) -> None:
        """Catch up after a round: the head's state at the last true entry starts the next tree."""
        self.hidden.copy_(self.absorb(self.stage, entries, at))

    def read(self, entries: Entries, at: At) -> None:
        """The same for a chunk of the prompt."""
        self.hidden.copy_(self.absorb_chunk(self.stage, entries, at))


# ---------------------------------------------------------------- the text itself


def look_up(history: Tensor, at: At, count: int) -> Tensor:
    """The `count` tokens that followed the best earlier match of the text's end: int64 [count].

    history: int64 [R], token of every position, valid up to position length, the root's; S must be
    greater than length. The longest match wins, of equal ones the latest. A match that ends close
    to the root goes on into its own copy, as a loop does. Without any match the guess is the text's
    beginning."""
    length, slots = at
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
    text."""

    feature_layers: tuple[int, ...] = ()
    stage = None
    state: tuple[Tensor, ...] = ()  # a rehearsed round writes only past `length`

    def __init__(self, tree: Tree, rows: int, device: torch.device, compiled: Compile) -> None:
        self.tree = tree
        # Position 0 is never told (`learn` hears of followers only), so it must match nothing: -1
        # is no token.
        self.history = torch.full((rows + 1,), -1, dtype=torch.int64, device=device)
        self.parents = (torch.arange(tree.nodes, device=device) - 1).clamp(min=0)
        self.ancestors = torch.ones(tree.nodes, tree.nodes, dtype=torch.bool, device=device).tril()
        self.look_up, self.remember = compiled(look_up), compiled(remember)

    def propose(self, root: Tensor, at: At, pick: Pick) -> Nodes:
        guesses = self.look_up(self.history, at, self.tree.lookup)
        return Nodes(torch.cat((root, guesses)), self.parents, self.ancestors)

    def learn(self, entries: Entries, at: At) -> None:
        """Padding behind the last entry lies behind the new root, where nothing looks."""
        self.remember(self.history, entries.start, entries.tokens)

    def read(self, entries: Entries, at: At) -> None:
        """The same for a chunk of the prompt, too rare to be worth compiling."""
        remember(self.history, entries.start, entries.tokens)


class WithLookup:
    """A head's tree and a looked-up chain below the same root. The same token may follow the root
    in both: the longer path counts (`accept` in eagle_draft.py)."""

    def __init__(self, source: EagleDrafter, tree: Tree, rows: int, compiled: Compile) -> None:
        self.source, self.tree = source, tree
        self.feature_layers, self.stage = source.feature_layers, source.stage
        self.state = source.state
        device, grown = source.hidden.device, source.tree.nodes
        self.text = LookupDrafter(with_lookup(NO_TREE, tree.lookup), rows, device, compiled)
        self.parents = torch.arange(grown - 1, tree.nodes - 1, device=device)
        self.parents[0] = 0
        node = torch.arange(tree.nodes, device=device)
        in_chain = (node == 0) | (node >= grown)
        below = (node[:, None] >= grown) & (node[:, None] >= node)
        self.ancestors = below & in_chain
        self.shape: tuple[Tensor, Tensor] | None = None  # of the whole, where it is always the same
        if source.static:
            self.shape = self.join(source.parents, source.ancestors)

    def join(self, parents: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
        """Node parents int64 [N] and ancestor mask bool [N, N] of both parts, from those of what is
        grown."""
        more = (0, self.tree.lookup)
        parents = torch.cat((parents, self.parents))
        return parents, F.pad(ancestors, more + more) | self.ancestors

    def propose(self, root: Tensor, at: At, pick: Pick) -> Nodes:
        tokens, parents, ancestors = self.source.propose(root, at, pick)
        guesses = self.text.look_up(self.text.history, at, self.tree.lookup)
        parents, ancestors = self.shape or self.join(parents, ancestors)
        return Nodes(torch.cat((tokens, guesses)), parents, ancestors)

    def learn(self, entries: Entries, at: At) -> None:
        self.source.learn(entries, at)
        self.text.learn(entries, at)

    def read(self, entries: Entries, at: At) -> None:
        self.source.read(entries, at)
        self.text.read(entries, at)
