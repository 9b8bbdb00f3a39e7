"""The draft head (EAGLE-1 and EAGLE-3 in one class) and the trees it can grow.

Two axes, not three copies: the head (eagle1 | eagle3) and the tree (none | chain | static |
dynamic). EAGLE-2 is the EAGLE-1 head with the dynamic tree. Leaves out: verification, acceptance
and the loop (engine.py).

A head entry at position i is the pair (feature of token i, token i+1). Its cache keeps only entries
made of true target features; nodes of the tree being grown sit behind them and are overwritten by
the next round."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import (
    Attention,
    FeedForward,
    KVCache,
    RMSNorm,
    RopeScaling,
    Transformer,
    causal_mask,
    tree_mask,
)
from talon.sampling import SamplingState, choose, guess


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


def accept(
    choice: Tensor, tokens: Tensor, parents: Tensor, ancestors: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    """The path of right nodes: its node indices int64 [rows], padded, and its length [1], the root
    counted.

    A node is right if its token is what the target chose after its parent; it is accepted if all
    its ancestors are right too. The path leads to the deepest accepted node: there are several only
    where a token was both grown and looked up."""
    index = torch.arange(tokens.shape[0], device=tokens.device)
    right = (tokens == choice[parents]) | (index == 0)
    accepted = ~(ancestors & ~right).any(1)
    deepest = torch.where(accepted, ancestors.sum(1), 0).argmax(0, keepdim=True)
    path = ancestors[deepest][0]
    order = torch.where(path, index, index + tokens.shape[0])  # the path first, in node order
    return order.sort().indices[:rows], path.sum(0, keepdim=True)


def verify(
    model: Transformer,
    cache: KVCache,
    table: Tensor,
    nodes: tuple[Tensor, Tensor, Tensor],
    length: Tensor,
    slots: Tensor,
    sampling: SamplingState,
    kind: str,
    rows: int,
    feature_layers: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """One forward over a tree's nodes, and what of the tree is right.

    nodes: tokens int64 [N], parents int64 [N], ancestor mask bool [N, N]; table: RoPE table [2, R,
    D]; length: int64 [1], the committed tokens; slots: int64 [S]. Writes cache slots length ..
    length + N - 1. Returns the target's choices along the accepted path int64 [rows], the path's
    node indices int64 [rows], its length int64 [1] (rows past it are padding), and the features [N,
    C] that a head reads."""
    tokens, parents, ancestors = nodes
    depth = ancestors.sum(1) - 1  # a node's depth is its number of proper ancestors
    own = length + torch.arange(tokens.shape[0], device=tokens.device)
    mask = tree_mask(length, ancestors, slots)
    x, features = model(
        model.tok_embeddings(tokens), table[:, length + depth], own, mask, cache, feature_layers
    )
    hidden = model.norm(x)
    choice = choose(model.output(hidden), length + depth + 1, sampling, kind)
    path, count = accept(choice, tokens, parents, ancestors, rows)
    return choice[path], path, count, features or [hidden]


def read_chunk(
    model: Transformer,
    cache: KVCache,
    table: Tensor,
    tokens: Tensor,
    start: Tensor,
    last: Tensor,
    slots: Tensor,
    sampling: SamplingState,
    kind: str,
    feature_layers: tuple[int, ...],
) -> tuple[Tensor, list[Tensor]]:
    """One forward over a chunk of the prompt, tokens int64 [T] from position `start` int64 [1] on.

    Returns the token chosen after row `last` int64 [1], whose logits are the only ones computed,
    and the features."""
    own = start + torch.arange(tokens.shape[0], device=tokens.device)
    mask = causal_mask(start, tokens.shape[0], slots)
    x, features = model(
        model.tok_embeddings(tokens), table[:, own], own, mask, cache, feature_layers
    )
    hidden = model.norm(x)
    choice = choose(model.output(hidden[last]), start + last + 1, sampling, kind)
    return choice, features or [hidden]
