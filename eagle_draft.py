"""The draft head (EAGLE-1 and EAGLE-3 in one class) and the trees it can grow.

Two axes, not three copies: the head (eagle1 | eagle3) and the tree (none | chain | static |
dynamic). EAGLE-2 is the EAGLE-1 head with the dynamic tree. Leaves out: verification, acceptance
and the loop (engine.py).

A head entry at position i is the pair (feature of token i, token i+1). Its cache keeps only entries
made of true target features; nodes of the tree being grown sit behind them and are overwritten by
the next round."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import (
    Attention,
    FeedForward,
    KVCache,
    RMSNorm,
    RopeScaling,
    causal_mask,
    rope_table,
    tree_mask,
)
from sampling import SamplingState, guess


@dataclass(frozen=True)
class DraftConfig:
    """Everything a head's forward depends on, as its checkpoint states it.

    EAGLE-1 heads (arXiv 2401.15077) also serve EAGLE-2 (2406.16858); EAGLE-3 is arXiv 2503.01840.
    """

    family: str  # "eagle1" | "eagle3"
    dim: int
    n_head: int
    n_kv_head: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    vocab_size: int  # the target's
    draft_vocab_size: int
    target_dim: int
    max_seq_length: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_source: str = "default 10000"  # where rope_theta was found, for the head card
    # Layers whose residual INPUT is the feature (HF hidden_states numbering); None: the default of
    # the target's depth.
    feature_layers: tuple[int, ...] | None = None
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norm_before_residual: bool = False  # eagle3: the residual is the normed hidden, not the raw one
    norm_before_fc: bool = (
        False  # eagle3: one RMSNorm over the concatenated features (tensor input_norm)
    )
    fc_norm: bool = False  # eagle3: one RMSNorm per feature level (tensors fc_norm.i)
    norm_output: bool = False  # eagle3: the hidden fed to the next level is the normed one
    own_embedding: bool = False
    own_output: bool = True  # eagle1 borrows the target's lm_head
    source_format: str = "eagle"

    @classmethod
    def from_dict(cls, values: dict) -> "DraftConfig":
        values = dict(values)
        scaling = values.get("rope_scaling")
        values["rope_scaling"] = RopeScaling(**scaling) if scaling else None
        layers = values.get("feature_layers")
        values["feature_layers"] = tuple(layers) if layers else None
        return cls(**values)


def default_feature_layers(n_layer: int) -> tuple[int, ...]:
    """Layers whose residual input EAGLE-3 reads unless its checkpoint names others (HF
    hidden_states numbering).

    The published rule is (2, n/2, n-3); a target of fewer than 7 layers cannot give three different
    ones."""
    layers = (2, n_layer // 2, n_layer - 3)
    if not layers[0] < layers[1] < layers[2]:
        raise ValueError(
            f"a target of {n_layer} layers has no default EAGLE-3 features (2, n/2, n-3 must "
            "differ): "
            "use a head whose config names its layers"
        )
    return layers


class DraftLayer(nn.Module):
    """The one decoder layer. EAGLE-1: no norm before attention. EAGLE-3: attention reads
    [embedding, hidden].
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        c = config
        wide = c.family == "eagle3"
        self.attention = Attention(
            c.dim * (1 + wide), c.dim, c.n_head, c.n_kv_head, c.head_dim, c.qkv_bias, c.o_bias
        )
        self.feed_forward = FeedForward(c.dim, c.intermediate_size, c.mlp_bias)
        self.ffn_norm = RMSNorm(c.dim, c.norm_eps)
        self.embed_norm = RMSNorm(c.dim, c.norm_eps) if wide else None
        self.hidden_norm = RMSNorm(c.dim, c.norm_eps) if wide else None


class DraftHead(nn.Module):
    """An EAGLE head: guesses the target's next features, and from them its next tokens.

    `output` and `tok_embeddings` may be the target's own modules (borrowed at load). `d2t` is an
    OFFSET, int64 [Vd]: target id = draft id + d2t[draft id]."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = c = config
        levels = len(c.feature_layers or (0, 0, 0))
        inputs = 2 * c.dim if c.family == "eagle1" else levels * c.target_dim
        self.fc = nn.Linear(inputs, c.dim, bias=c.fc_bias)
        self.layer = DraftLayer(c)
        self.input_norm = RMSNorm(inputs, c.norm_eps) if c.norm_before_fc else None
        norms = [RMSNorm(c.target_dim, c.norm_eps) for _ in range(levels)] if c.fc_norm else None
        self.fc_norm = nn.ModuleList(norms) if norms else None
        self.norm = RMSNorm(c.dim, c.norm_eps) if c.family == "eagle3" else None
        self.output = nn.Linear(c.dim, c.draft_vocab_size, bias=False) if c.own_output else None
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.dim) if c.own_embedding else None
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64))

    @property
    def target_ids(self) -> Tensor:
        """int64 [Vd]: the target's token id of each draft id."""
        return torch.arange(self.config.draft_vocab_size, device=self.d2t.device) + self.d2t

    def fuse(self, features: list[Tensor]) -> Tensor:
        """The target's features of T rows, as the hidden input of those rows: [T, C].

        EAGLE-1: the state after the final norm, as it is. EAGLE-3: `fc` over the captured levels,
        low to high."""
        dtype = self.layer.ffn_norm.weight.dtype
        if self.config.family == "eagle1":
            return features[0].to(dtype)
        if self.fc_norm is not None:
            features = [norm(x.to(dtype)) for norm, x in zip(self.fc_norm, features, strict=True)]
        x = torch.cat([x.to(dtype) for x in features], dim=-1)
        return self.fc(x if self.input_norm is None else self.input_norm(x))

    def forward(
        self, tokens: Tensor, hidden: Tensor, rope: Tensor, slots: Tensor, mask: Tensor, kv: Tensor
    ) -> Tensor:
        """tokens: int64 [T]; hidden: [T, C] from `fuse` or from the parent nodes; the rest as in
        Attention. Returns the hidden state [T, C] that the next level takes.
        """
        layer = self.layer
        embedded = self.tok_embeddings(tokens).to(hidden.dtype)
        if self.config.family == "eagle1":
            residual = x = self.fc(torch.cat((embedded, hidden), dim=-1))
        else:
            normed = layer.hidden_norm(hidden)
            residual = normed if self.config.norm_before_residual else hidden
            x = torch.cat((layer.embed_norm(embedded), normed), dim=-1)
        x = residual + layer.attention(x, rope, slots, mask, kv)
        x = x + layer.feed_forward(layer.ffn_norm(x))
        return self.norm(x) if self.config.norm_output else x

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, Vd] from `forward`'s hidden states [T, C]."""
        if self.norm is not None and not self.config.norm_output:
            hidden = self.norm(hidden)
        return self.output(hidden)


@dataclass(frozen=True)
class Tree:
    """What to grow and what to keep. `nodes` counts the root and all below it; `levels` every level
    that a head drafts.

    Growing records candidates in one flat order: the root's `top_k` children, then for each further
    level the `top_k` children of each of its `beam` expanded nodes. Static trees (chains too) say
    by flat index which candidates to expand and to keep; the dynamic tree (EAGLE-2, section 4)
    decides by cumulative score."""

    name: str
    nodes: int
    levels: int
    top_k: int
    beam: int
    expand: tuple[tuple[int, ...], ...] | None = None  # static: [levels - 1][beam] flat indices
    keep: tuple[int, ...] | None = None  # static: [grown - 1] flat indices, ascending
    lookup: int = 0  # a chain below the root that comes from the text itself: its tokens

    @property
    def candidates(self) -> int:
        return self.top_k + (self.levels - 1) * self.beam * self.top_k if self.levels else 0

    @property
    def needs_head(self) -> bool:
        return self.levels > 0

    @property
    def grown(self) -> int:
        """Nodes of the part that the head grows, the root included."""
        return self.nodes - self.lookup

    @property
    def depth(self) -> int:
        """Drafted tokens that one round can accept at most."""
        return max(min(self.levels, self.grown - 1), self.lookup)

    @property
    def reach(self) -> int:
        """Slots past the committed ones that a round writes at most, of target or head."""
        return max(self.nodes, self.draft_slots)

    def cache_rows(self, max_seq_length: int, chunk: int) -> int:
        """Rows of a KV cache: a tree or a padded chunk of the prompt may run past the last legal
        position, which a round launched ahead passes by depth + 1 before it starts. Nothing past it
        is ever kept. One row more than any length bucket: a bucket as long as the cache would
        compile as a constant.
        """
        return max_seq_length + max(chunk, self.reach) + self.depth + 2

    @property
    def draft_slots(self) -> int:
        """Head cache slots that growing needs behind the committed ones."""
        return max((self.levels - 1) * self.beam, self.levels + 1)

    def block(self, level: int) -> int:
        """Flat index of the first candidate of `level` (1 is the root's children)."""
        return 0 if level == 1 else self.top_k + (level - 2) * self.beam * self.top_k


NO_TREE = Tree("none", nodes=1, levels=0, top_k=0, beam=0)

# The 26-node tree of the EAGLE-1 paper (root included), as paths of child ranks.
EAGLE1_PATHS = [
    [0], [1], [2], [3],
    [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [2, 1], [3, 0],
    [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 2, 0], [0, 2, 1], [1, 0, 0],
    [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2],
    [0, 0, 0, 0, 0], [0, 0, 0, 0, 1],
]  # fmt: skip


def chain(length: int) -> Tree:
    return static_tree([[0] * depth for depth in range(1, length + 1)], f"chain:{length}")


def static_tree(paths: list[list[int]], name: str) -> Tree:
    """A fixed tree from the rank paths of its nodes; every prefix of a path must be a path too."""
    ordered = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
    known = set(ordered)
    if not ordered or any(
        not path or min(path) < 0 or max(*path, len(path)) > 64 for path in ordered
    ):
        raise ValueError(
            f"tree {name}: needs non-empty paths of child ranks 0 to 64, 64 levels at most, such "
            "as [[0], [0, 0]]"
        )
    for path in ordered:
        if len(path) > 1 and path[:-1] not in known:
            raise ValueError(
                f"tree {name}: path {list(path)} is given without its parent {list(path[:-1])}"
            )
    levels = len(ordered[-1])
    top_k = 1 + max(rank for path in ordered for rank in path)
    inner = [sorted({p[:-1] for p in ordered if len(p) == level + 1}) for level in range(1, levels)]
    beam = max((len(nodes) for nodes in inner), default=1)
    flat: dict[tuple[int, ...], int] = {(rank,): rank for rank in range(top_k)}
    expand = []
    for level, nodes in enumerate(inner):
        start = top_k + level * beam * top_k
        expand.append(tuple(flat[node] for node in nodes) + (flat[nodes[0]],) * (beam - len(nodes)))
        flat |= {
            (*node, k): start + row * top_k + k
            for row, node in enumerate(nodes)
            for k in range(top_k)
        }
    keep = tuple(sorted(flat[path] for path in ordered))
    return Tree(name, len(ordered) + 1, levels, top_k, beam, tuple(expand), keep)


def dynamic_tree(nodes: int = 60, levels: int = 6, top_k: int = 10) -> Tree:
    """EAGLE-2 (arXiv 2406.16858): expand the `top_k` best nodes of each level, keep the nodes - 1
    best of all.
    """
    name = f"dynamic:nodes={nodes},levels={levels},top_k={top_k}"
    if nodes < 1 or levels < 1 or top_k < 1:
        raise ValueError(f"tree {name}: nodes, levels and top_k must all be at least 1")
    if nodes == 1:
        return NO_TREE
    tree = Tree(name, nodes, levels, top_k, top_k)
    if nodes - 1 > tree.candidates:
        raise ValueError(
            f"tree {name}: {nodes} nodes are asked for but only {tree.candidates + 1} can be "
            "grown; "
            f"lower nodes to {tree.candidates + 1} or raise levels or top_k"
        )
    return tree


# As in the papers (EAGLE-1 section 4, EAGLE-2 section 5, EAGLE-3 section 5).
PRESETS = {
    "eagle1": "static",
    "eagle2": "dynamic:nodes=60,levels=6,top_k=10",
    "eagle3": "dynamic:nodes=60,levels=8,top_k=10",
}


def with_lookup(tree: Tree, count: int) -> Tree:
    """The tree with a chain of `count` looked-up tokens below its root."""
    name = f"lookup:{count}" if tree == NO_TREE else f"{tree.name}+lookup:{count}"
    return replace(tree, name=name, nodes=tree.nodes + count, lookup=count)


def parse_tree(text: str) -> Tree:
    """The tree that `--tree TEXT` names: none, lookup:K, or chain:K, static,
    dynamic:nodes=,levels=,top_k=, FILE.json, each of these also with +lookup:K.
    """
    grown, _, count = text.partition("+lookup:")
    if is_length(count) and grown.partition(":")[0] not in ("auto", "none", "lookup"):
        return with_lookup(parse_tree(grown), int(count))
    kind, _, rest = text.partition(":")
    if text == "none":
        return NO_TREE
    if kind == "lookup" and is_length(rest):
        return with_lookup(NO_TREE, int(rest))
    if kind == "chain" and is_length(rest):
        return chain(int(rest))
    if text == "static":
        return static_tree(EAGLE1_PATHS, "static")
    if kind == "dynamic":
        pairs = [item.partition("=")[::2] for item in rest.split(",") if rest]
        known = all(key in ("nodes", "levels", "top_k") and is_count(value) for key, value in pairs)
        if known and len(dict(pairs)) == len(pairs):
            return dynamic_tree(**{key: int(value) for key, value in pairs})
    if text.endswith(".json"):
        return static_tree(read_paths(Path(text)), text)
    shown = text if len(text) < 60 else f"{text[:60]}..."
    raise ValueError(
        f"tree {shown!r} is not known: give auto, none, lookup:K (1 to 64), or chain:K (1 to 64), "
        "static, dynamic:nodes=60,levels=8,top_k=10, a FILE.json with a list of paths, each of "
        "these also with +lookup:K"
    )


def is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def is_length(text: str) -> bool:
    return is_count(text) and 1 <= int(text) <= 64


def read_paths(path: Path) -> list[list[int]]:
    try:
        paths = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"tree file {path} cannot be read as JSON ({error}): give a list of paths"
        ) from None
    if not isinstance(paths, list) or not all(
        isinstance(p, list) and all(type(rank) is int for rank in p) for p in paths
    ):
        raise ValueError(
            f"tree file {path} must be a list of rank paths, such as [[0], [1], [0, 0]]"
        )
    return paths


def ancestor_mask(parents: Tensor, levels: int) -> Tensor:
    """[N, N] bool: entry (v, u) says that u is v or an ancestor of v. parents: int64 [N], the
    root's is itself.
    """
    mask = torch.eye(parents.shape[0], dtype=torch.bool, device=parents.device)
    for _ in range(levels.bit_length()):  # each step doubles the distance that is covered
        mask = mask | mask[parents]
        parents = parents[parents]
    return mask


def node_parents(kept: Tensor, candidate_parents: Tensor) -> Tensor:
    """int64 [N]: the parent node of every node, from the kept flat indices (ascending, parents
    always kept).
    """
    flat = candidate_parents[kept]
    parents = torch.where(flat < 0, 0, torch.searchsorted(kept, flat) + 1)
    return torch.cat((parents.new_zeros(1), parents))


def best(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores, best first; of equal ones the lower index first."""
    return scores.sort(descending=True, stable=True).indices[:count]


def select(
    tokens: Tensor, scores: Tensor, parents: Tensor, count: int, levels: int
) -> tuple[Tensor, ...]:
    """Keep the `count` best candidates. Their tokens [count], node parents [N] and ancestor mask
    [N, N].

    A child never outscores its parent and comes later in flat order, so no child is kept without
    its parent."""
    kept = best(scores, count).sort().values
    node_parent = node_parents(kept, parents)
    return tokens[kept], node_parent, ancestor_mask(node_parent, levels)


def root_children(
    head: DraftHead,
    hidden: Tensor,
    length: Tensor,
    sampling: SamplingState,
    kind: str,
    sizes: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """The root's children in the form in which `grow_level` takes a level, so that one compilation
    serves all levels: scores and tokens [B * K], of which the first K count, and the hidden states
    [B, C]. hidden: [1, C], the head's state at the last entry. sizes: B and K.
    """
    beam, top_k = sizes
    scores, tokens = guess(head.logits(hidden), length + 1, head.target_ids, sampling, kind, top_k)
    more = (0, (beam - 1) * top_k)
    scores = F.pad(scores[0], more, value=float("-inf"))
    return scores, F.pad(tokens[0], more), hidden.repeat(beam, 1)


def grow_level(
    head: DraftHead,
    rows: Tensor | None,
    above: tuple[Tensor, Tensor, Tensor, Tensor],
    step: Tensor,
    length: Tensor,
    slots: Tensor,
    rope_table: Tensor,
    kv: Tensor,
    sampling: SamplingState,
    kind: str,
    sizes: tuple[int, int],
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Run some children of the last level through the head and list their children.

    rows: int64 [B], which children; None for those of the highest scores. above: the last level's
    cumulative scores and tokens [B * K], its nodes' hidden states [B, C] and the slots they see,
    bool [B, M] (which of this round's draft slots hold ancestors). step: int64 [1], depth of the
    nodes minus one. sizes: B and K. Returns `rows`, and the same four of this level."""
    scores, tokens, hidden, seen = above
    beam, top_k = sizes
    rows = best(scores, beam) if rows is None else rows
    parent = rows // top_k
    tokens, hidden, scores, seen = tokens[rows], hidden[parent], scores[rows], seen[parent]
    own = step * beam + torch.arange(beam, device=tokens.device)
    seen = seen | (torch.arange(seen.shape[1], device=tokens.device) == own[:, None])
    position = (length + step).expand(beam)  # of the pair: one less than the token's own
    mask = tree_mask(length, seen, slots)
    hidden = head(tokens, hidden, rope_table[:, position], length + own, mask, kv)
    child_scores, child_tokens = guess(
        head.logits(hidden), position + 2, head.target_ids, sampling, kind, top_k
    )
    child_scores = (scores[:, None] + child_scores).flatten()
    return rows, (child_scores, child_tokens.flatten(), hidden, seen)


def absorb(
    head: DraftHead,
    features: list[Tensor],
    path: Tensor,
    tokens: Tensor,
    start: Tensor,
    last: Tensor,
    slots: Tensor,
    rope_table: Tensor,
    kv: Tensor,
) -> Tensor:
    """Append true entries from position `start` int64 [1] on: the features of rows `path` int64
    [T], each with the token int64 [T] that follows it. Rows past `last` int64 [1] are padding:
    masked now, overwritten next time. Returns the head's state [1, C] at `last`, from which the
    next tree grows.
    """
    entries = start + torch.arange(tokens.shape[0], device=start.device)
    mask = causal_mask(start, tokens.shape[0], slots)
    hidden = head.fuse([feature[path] for feature in features])
    hidden = head(tokens, hidden, rope_table[:, entries], entries, mask, kv)
    return hidden[last]


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
