"""The draft source of a head: it grows a chain, a static or a dynamic tree level by level.

Leaves out: what trees there are (talon/trees.py), the forwards themselves (eagle_draft.py)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
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
from talon.drafters.source import Compile, module_bytes
from talon.trees import Tree


class Grown(NamedTuple):
    """All that a head has grown below the root, level by level."""

    tokens: list[Tensor]  # int64 [K], then [B * K] each
    scores: list[Tensor]  # fp32, cumulative log-probabilities
    chosen: list[Tensor]  # int64 [B] each, which of the level above


class Candidates(NamedTuple):
    """The same in the flat order of Tree."""

    tokens: Tensor  # int64 [M]
    scores: Tensor  # fp32 [M]
    parents: Tensor  # int64 [M], flat; -1 is the root


def flat(grown: Grown) -> Candidates:
    """All levels as one."""
    tokens, block, beams = torch.cat(grown.tokens), 0, []
    for chosen, above in zip(grown.chosen, grown.tokens, strict=False):
        beams.append(chosen + block)
        block += len(above)
    parents = candidate_parents(len(grown.tokens[0]), beams, tokens.device)
    return Candidates(tokens, torch.cat(grown.scores), parents)


def keep_best(root: Tensor, grown: Grown, count: int, levels: int) -> Nodes:
    """The root and the `count` best candidates below it."""
    kept, parents, ancestors = select(*flat(grown), count, levels)
    return Nodes(torch.cat((root, kept)), parents, ancestors)


def candidate_parents(top_k: int, beams: Sequence[Tensor], device: torch.device) -> Tensor:
    """int64 [M]: flat index of every candidate's parent, -1 the root. beams: expanded nodes."""
    children = [beam.repeat_interleave(top_k) for beam in beams]
    return torch.cat([torch.full((top_k,), -1, device=device), *children])


def static_nodes(tree: Tree, device: torch.device) -> tuple[Tensor, Tensor]:
    """Node parents int64 [N] and ancestor mask bool [N, N] of a static tree."""
    keep, expand = (torch.tensor(x, device=device) for x in (tree.keep, tree.expand))
    parents = node_parents(keep, candidate_parents(tree.top_k, expand, device))
    return parents, ancestor_mask(parents, tree.levels)


def head_stage(head: DraftHead, rows: int) -> Stage:
    """A head with its cache of `rows`."""
    c, device, dtype = head.config, head.d2t.device, head.layer.ffn_norm.weight.dtype
    cache = KVCache(1, c.n_kv_head, rows, c.head_dim, dtype).to(device)
    table = rope_table(rows, c.head_dim, c.rope_theta, c.rope_scaling).to(device)
    return Stage(head, cache, table, c.feature_layers or (), ids=head.target_ids)


class EagleDrafter:
    """A head, the part of a tree that it grows, and the static buffers of both."""

    def __init__(self, stage: Stage, dim: int, tree: Tree, compiled: Compile) -> None:
        """dim: of the states that a level hands to the next."""
        self.stage, self.tree, self.feature_layers = stage, tree, stage.feature_layers
        device, dtype = stage.rope.device, stage.cache.data.dtype
        self.held = stage.module.layer, stage.cache
        self.hidden = torch.zeros(1, dim, dtype=dtype, device=device)
        self.state = (self.hidden,)
        self.steps = [torch.full((1,), level, device=device) for level in range(tree.levels)]
        slots = (tree.levels - 1) * tree.beam
        self.unseen = torch.zeros(tree.beam, slots, dtype=torch.bool, device=device)
        self.static = tree.keep is not None
        if self.static:
            self.keep = torch.tensor(tree.keep, device=device)
            expand = torch.tensor(tree.expand, device=device).view(tree.levels - 1, tree.beam)
            blocks = [tree.block(level) for level in range(1, tree.levels)]
            self.expand = expand - torch.tensor(blocks, device=device)[:, None]  # in their level
            self.parents, self.ancestors = static_nodes(tree, device)
        self.root_children, self.grow_level = compiled(root_children), compiled(grow_level)
        self.keep_best, self.absorb = compiled(keep_best), compiled(absorb)
        # As in the decoder's prefill: a chunk of the prompt is compiled on a GPU only.
        self.absorb_chunk = self.absorb if device.type == "cuda" else absorb

    def levels_at(self, at: At) -> At:
        """Where the head's own entries end: those of the tree stand behind them."""
        return at

    def grow(self, at: At, pick: Pick) -> Grown:
        """Run the head level by level. EAGLE-2, section 4.1, for a dynamic tree."""
        tree, head, behind = self.tree, self.stage, self.levels_at(at)
        sizes = tree.beam, tree.top_k
        first = self.root_children(head, self.hidden, at, pick, sizes)
        above = Level(*first, self.unseen)
        tokens, scores, beams = [above.tokens[: tree.top_k]], [above.scores[: tree.top_k]], []
        for level in range(1, tree.levels):
            chosen = self.expand[level - 1] if self.static else None
            step = self.steps[level - 1]
            chosen, above = self.grow_level(head, chosen, above, step, behind, pick)
            tokens.append(above.tokens)
            scores.append(above.scores)
            beams.append(chosen)
        return Grown(tokens, scores, beams)

    def propose(self, root: Tensor, at: At, pick: Pick) -> Nodes:
        """Grow and select."""
        grown = self.grow(at, pick)
        if self.static:
            tokens = torch.cat(grown.tokens)[self.keep]
            return Nodes(torch.cat((root, tokens)), self.parents, self.ancestors)
        return self.keep_best(root, grown, self.tree.grown - 1, self.tree.levels)

    def learn(self, entries: Entries, at: At) -> None:
        """Catch up after a round: the head's state at the last true entry starts the next tree."""
        self.hidden.copy_(self.absorb(self.stage, entries, at))

    def read(self, entries: Entries, at: At) -> None:
        """The same for a chunk of the prompt."""
        self.hidden.copy_(self.absorb_chunk(self.stage, entries, at))

    def bytes_read(self, committed: float) -> float:
        """The weights and the cached rows, once a level."""
        head, cache = self.stage.module, self.stage.cache
        parts = head.layer, head.output, *([head.fc] if hasattr(head, "fc") else [])
        rows = committed * cache.data[:, :, :, 0].nbytes
        return self.tree.levels * (sum(map(module_bytes, parts)) + rows)
