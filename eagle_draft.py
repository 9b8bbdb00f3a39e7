"""The draft head (EAGLE-1 and EAGLE-3 in one class), and what a round computes: draft, select,
verify, accept, catch up, as functions of tensors.

Two axes, not three copies: the head (eagle1 | eagle3) and the tree (none | chain | static |
dynamic). EAGLE-2 is the EAGLE-1 head with the dynamic tree. Leaves out: what trees there are
(talon/trees.py), how a token is chosen (talon/sampling.py), and the loop (talon/decoder.py).

A head's entry at position i is the pair (feature of token i, token i+1). Its cache keeps only
entries made of true target features; nodes of the tree being grown sit behind them and are
overwritten by the next round."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import At, Attention, FeedForward, KVCache, Place, RMSNorm, RopeScaling, place


@dataclass(frozen=True)
class DraftConfig:
    """Everything a head's forward depends on, as its checkpoint states it.

    EAGLE-1 heads (arXiv 2401.15077) also serve EAGLE-2 (2406.16858); EAGLE-3 is arXiv
    2503.01840."""

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
    # Layers whose residual INPUT is the feature, in the numbering of Hugging Face's hidden_states;
    # None: the default of the target's depth.
    feature_layers: tuple[int, ...] | None = None
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    # Variants of EAGLE-3 heads:
    norm_before_residual: bool = False  # the residual is the normed hidden state, not the raw one
    norm_before_fc: bool = False  # one RMSNorm over the joined features (tensor input_norm)
    fc_norm: bool = False  # one RMSNorm per feature (tensors fc_norm.i)
    norm_output: bool = False  # the hidden state fed to the next level is the normed one
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
    """Layers whose residual input EAGLE-3 reads unless its checkpoint names others: the published
    rule is (2, n/2, n-3), which takes a target of 7 layers."""
    layers = (2, n_layer // 2, n_layer - 3)
    if not layers[0] < layers[1] < layers[2]:
        raise ValueError(
            f"a target of {n_layer} layers has no default EAGLE-3 features (2, n/2 and n-3 must "
            "differ): use a head whose config names its layers"
        )
    return layers


class DraftLayer(nn.Module):
    """The one decoder layer. EAGLE-1: no norm before attention. EAGLE-3: attention reads the
    normed embedding and the normed hidden state, joined."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        c, eagle3 = config, config.family == "eagle3"
        self.attention = Attention(c, 2 * c.dim if eagle3 else c.dim)
        self.feed_forward = FeedForward(c)
        self.ffn_norm = RMSNorm(c.dim, c.norm_eps)
        self.embed_norm = RMSNorm(c.dim, c.norm_eps) if eagle3 else None
        self.hidden_norm = RMSNorm(c.dim, c.norm_eps) if eagle3 else None


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
        self.place = place  # as the target's

    @property
    def target_ids(self) -> Tensor:
        """int64 [Vd]: the target's token id of each draft id."""
        return torch.arange(self.config.draft_vocab_size, device=self.d2t.device) + self.d2t

    def fuse(self, features: list[Tensor]) -> Tensor:
        """The hidden input [T, C] of entries, from the target's features of T tokens: EAGLE-1 takes
        the state after the final norm as it is, EAGLE-3 puts the layers named through `fc`."""
        dtype = self.layer.ffn_norm.weight.dtype
        features = [x.to(dtype) for x in features]
        if self.config.family == "eagle1":
            return features[0]
        if self.fc_norm is not None:
            features = [norm(x) for norm, x in zip(self.fc_norm, features, strict=True)]
        x = torch.cat(features, dim=-1)
        return self.fc(x if self.input_norm is None else self.input_norm(x))

    def forward(self, tokens: Tensor, hidden: Tensor, place: Place, kv: Tensor) -> Tensor:
        """tokens: int64 [T]; hidden: [T, C] from `fuse` or from the parent nodes; kv: [2, G, R, D].
        Returns the hidden state [T, C] that the next level takes."""
        layer = self.layer
        embedded = self.tok_embeddings(tokens).to(hidden.dtype)
        if self.config.family == "eagle1":
            residual = x = self.fc(torch.cat((embedded, hidden), dim=-1))
        else:
            normed = layer.hidden_norm(hidden)
            residual = normed if self.config.norm_before_residual else hidden
            x = torch.cat((layer.embed_norm(embedded), normed), dim=-1)
        x = layer.attention(x, place, kv, residual)
        x = layer.feed_forward(layer.ffn_norm(x), x)
        return self.norm(x) if self.config.norm_output else x

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, Vd] from `forward`'s hidden states [T, C]."""
        if self.norm is not None and not self.config.norm_output:
            hidden = self.norm(hidden)
        return self.output(hidden)


# ---------------------------------------------------------------- what a round hands on


class Pick(Protocol):
    """How a token is chosen, and how a head guesses that choice (talon/sampling.py)."""

    def choose(self, logits: Tensor, positions: Tensor) -> Tensor: ...

    def guess(
        self,
        logits: Tensor,
        positions: Tensor,
        tokens: Tensor,
        top_k: int,
        above: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class Stage(NamedTuple):
    """A target or a head with what its forward needs."""

    module: nn.Module
    cache: KVCache
    rope: Tensor  # fp32 [2, R, D], the table of its positions
    feature_layers: tuple[int, ...] = ()  # of the target: what the draft source reads
    ahead: int = 1  # of a head: its entry at position i holds token i + ahead
    ids: Tensor | None = None  # int64 [Vd], of a head: the target's token of each column


class Nodes(NamedTuple):
    """A tree below the root, which is node 0. A parent comes before its children."""

    tokens: Tensor  # int64 [N]
    parents: Tensor  # int64 [N], node indices; the root's is itself
    ancestors: Tensor  # bool [N, N]: entry (v, u) says that u is v or an ancestor of v


class Level(NamedTuple):
    """B nodes of one depth and their K children each, as the next level takes them."""

    scores: Tensor  # fp32 [B * K], cumulative log-probabilities of the children
    tokens: Tensor  # int64 [B * K]
    hidden: Tensor  # [B, C], the nodes' hidden states
    seen: Tensor  # bool [B, M], which of this round's draft slots hold the nodes or their ancestors


class Verdict(NamedTuple):
    """What the target says of a tree. Rows past `count` are padding."""

    tokens: Tensor  # int64 [rows], the target's choices along the accepted path
    path: Tensor  # int64 [rows], the path's nodes
    count: Tensor  # int64 [1], nodes on the path, the root counted
    features: list[Tensor]  # [N, C] each, of all nodes
    choice: Tensor  # int64 [N], what the target chose after each


class Entries(NamedTuple):
    """True entries from position `start` on. Rows past `last` are padding: masked now, overwritten
    next time."""

    features: list[Tensor]  # [N, C] each
    path: Tensor  # int64 [T], which of the N
    tokens: Tensor  # int64 [T], the token that follows each
    start: Tensor  # int64 [1]
    last: Tensor  # int64 [1], the last row that counts
    root: Tensor | None = None  # int64 [1], the token at `start` itself
    choice: Tensor | None = None  # int64 [N], of a round: the target's after every node


# ---------------------------------------------------------------- draft


def root_children(
    head: Stage, hidden: Tensor, at: At, pick: Pick, sizes: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """The root's children in the form in which `grow_level` takes a level, so that one compilation
    serves all levels: scores and tokens [B * K], of which the first K count, and hidden states
    [B, C]. hidden: [1, C], the head's state at the last entry. sizes: B and K."""
    beam, top_k = sizes
    logits = head.module.logits(hidden)
    scores, tokens = pick.guess(logits, at.length + 1, head.ids, top_k)
    more = (0, (beam - 1) * top_k)
    scores = F.pad(scores[0], more, value=float("-inf"))
    return scores, F.pad(tokens[0], more), hidden.repeat(beam, 1)


def grow_level(
    head: Stage, chosen: Tensor | None, above: Level, step: Tensor, at: At, pick: Pick
) -> tuple[Tensor, Level]:
    """Run B children of the level above through the head and list their children.

    chosen: int64 [B], which children; None for those of the highest scores. step: int64 [1], the
    nodes' depth minus one. Returns the children that were chosen, and their level."""
    scores, tokens, hidden, seen = above
    beam = hidden.shape[0]
    top_k = scores.shape[0] // beam
    chosen = best(scores, beam) if chosen is None else chosen
    parent = chosen // top_k
    tokens, hidden, scores, seen = tokens[chosen], hidden[parent], scores[chosen], seen[parent]
    own = step * beam + torch.arange(beam, device=tokens.device)
    seen = seen | (torch.arange(seen.shape[1], device=tokens.device) == own[:, None])
    position = (at.length + step).repeat(beam)  # of the entry
    place = head.module.place(head.rope, position, at.length + own, at, seen)
    hidden = head.module(tokens, hidden, place, head.cache.layer(0))
    logits = head.module.logits(hidden)
    scores, tokens = pick.guess(logits, position + head.ahead + 1, head.ids, top_k, scores)
    return chosen, Level(scores.flatten(), tokens.flatten(), hidden, seen)


def best(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores, best first; of equal ones the lower index first."""
    return scores.sort(descending=True, stable=True).indices[:count]


# ---------------------------------------------------------------- select


def select(
    tokens: Tensor, scores: Tensor, parents: Tensor, count: int, levels: int
) -> tuple[Tensor, ...]:
    """Keep the `count` best candidates (EAGLE-2, section 4.2). Their tokens [count], node parents
    [N] and ancestor mask [N, N]. A child never outscores its parent and comes later in flat order,
    so no child is kept without its parent."""
    kept = best(scores, count).sort().values
    node_parent = node_parents(kept, parents)
    return tokens[kept], node_parent, ancestor_mask(node_parent, levels)


def node_parents(kept: Tensor, candidate_parents: Tensor) -> Tensor:
    """int64 [N]: the parent node of every node. kept: flat indices, ascending, int64 [N - 1]."""
    flat = candidate_parents[kept]
    parents = torch.where(flat < 0, 0, torch.searchsorted(kept, flat) + 1)
    return torch.cat((parents.new_zeros(1), parents))


def ancestor_mask(parents: Tensor, levels: int) -> Tensor:
    """bool [N, N], as in Nodes."""
    mask = torch.eye(parents.shape[0], dtype=torch.bool, device=parents.device)
    for _ in range(levels.bit_length()):  # each step doubles the distance that is covered
        mask = mask | mask[parents]
        parents = parents[parents]
    return mask


# ---------------------------------------------------------------- verify, accept


def verify(target: Stage, nodes: Nodes, at: At, pick: Pick, rows: int) -> Verdict:
    """One forward over a tree's nodes, and how far the tree is right. Writes the cache slots
    length .. length + N - 1."""
    tokens, parents, ancestors = nodes
    depth = ancestors.sum(1) - 1  # a node's depth is its number of proper ancestors
    own = at.length + torch.arange(tokens.shape[0], device=tokens.device)
    place = target.module.place(target.rope, at.length + depth, own, at, ancestors)
    # A round launched ahead of a choice that could not be made begins with no token, which is -1.
    known = tokens.clamp(min=0)
    hidden, features = target.module(known, place, target.cache, target.feature_layers)
    choice = pick.choose(target.module.output(hidden), at.length + depth + 1)
    path, count = accept(choice, nodes, rows)
    return Verdict(choice[path], path, count, features, choice)


def accept(choice: Tensor, nodes: Nodes, rows: int) -> tuple[Tensor, Tensor]:
    """The path of right nodes: their indices int64 [rows], padded, and its length int64 [1].

    A node is right if its token is what the target chose after its parent; it is accepted if all
    its ancestors are right too. The path leads to the deepest accepted node: there are several only
    where a token was both grown and looked up."""
    tokens, parents, ancestors = nodes
    index = torch.arange(tokens.shape[0], device=tokens.device)
    right = (tokens == choice[parents]) | (index == 0)
    accepted = ~(ancestors & ~right).any(1)
    deepest = torch.where(accepted, ancestors.sum(1), 0).argmax(0, keepdim=True)
    path = ancestors[deepest][0]
    order = torch.where(path, index, index + tokens.shape[0])  # the path first, in node order
    return order.sort().indices[:rows], path.sum(0, keepdim=True)


def read_chunk(
    target: Stage, tokens: Tensor, last: Tensor, at: At, pick: Pick
) -> tuple[Tensor, list[Tensor]]:
    """One forward over a chunk of the prompt, tokens int64 [T] from position length on. Returns the
    token chosen after row `last` int64 [1], whose logits alone are computed, and the features."""
    own = at.length + torch.arange(tokens.shape[0], device=tokens.device)
    place = target.module.place(target.rope, own, own, at)
    hidden, features = target.module(tokens, place, target.cache, target.feature_layers)
    choice = pick.choose(target.module.output(hidden[last]), at.length + last + 1)
    return choice, features


# ---------------------------------------------------------------- catch up


def absorb(head: Stage, entries: Entries, at: At) -> Tensor:
    """Append true entries to the head's cache. Returns its state [1, C] at the last one, from which
    the next tree grows."""
    features, path, tokens, start, last, *_ = entries
    own = start + torch.arange(tokens.shape[0], device=start.device)
    place = head.module.place(head.rope, own, own, At(start, at.slots))
    hidden = head.module.fuse([feature[path] for feature in features])
    return head.module(tokens.clamp(min=0), hidden, place, head.cache.layer(0))[last]
