"""Medusa heads (arXiv 2401.10774) and their draft source.

Head k of K reads the target's state after the final norm at the newest token that was run, and
guesses the token k + 2 places on: residual blocks x + SiLU(W x + b), then an lm_head of its own or
the target's. The root is the target's own choice. No head sees what another guesses: a node's token
depends on its depth and its rank there alone, so every tree is one of rank paths. Leaves out: the
published files (talon/formats/medusa_import.py), training (talon/training)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_draft import Entries, Nodes, Pick
from model import At
from talon.drafters.eagle import static_nodes
from talon.drafters.source import Compile, module_bytes
from talon.trees import MEDUSA_PATHS, Tree, static_tree


@dataclass(frozen=True)
class MedusaConfig:
    """Everything the heads' forward depends on, as their checkpoint states it."""

    family: str  # "medusa"
    dim: int
    heads: int
    blocks: int  # of a head
    vocab_size: int  # the target's
    draft_vocab_size: int
    own_output: bool = True  # or all heads borrow the target's lm_head
    source_format: str = "medusa"
    feature_layers = ()  # the state after the final norm
    own_embedding = True  # there is none to borrow

    @classmethod
    def from_dict(cls, values: dict) -> "MedusaConfig":
        return cls(**values)

    @property
    def target_dim(self) -> int:
        return self.dim

    def __str__(self) -> str:
        """The head card."""
        output = "lm_heads of their own" if self.own_output else "the target's lm_head"
        return (
            f"head: medusa ({self.source_format} format), {self.heads} heads of {self.blocks} "
            f"residual blocks, features: state after the final norm, draft vocabulary "
            f"{self.draft_vocab_size} of {self.vocab_size}, {output}"
        )


def medusa_tree(asked: Tree | None, c: MedusaConfig) -> Tree:
    """The tree to fill; for None the published one, as deep as there are heads."""
    paths = [path for path in MEDUSA_PATHS if len(path) <= c.heads]
    tree = asked or static_tree(paths, "medusa")
    fault = f"tree {tree.name} has {tree.levels} levels" if tree.levels > c.heads else ""
    if tree.levels and tree.keep is None:
        fault = f"tree {tree.name} is dynamic"
    if fault:
        trees = f"chain:K of up to {c.heads}, or a FILE.json of rank paths as deep"
        raise ValueError(f"{fault}, but these are {c.heads} Medusa heads: give {trees}")
    return tree


class MedusaHeads(nn.Module):
    """K heads. `output` is the target's lm_head, reduced to the draft vocabulary, where they have
    none; `d2t` as in DraftHead."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = c = config
        blocks = [[nn.Linear(c.dim, c.dim) for _ in range(c.blocks)] for _ in range(c.heads)]
        self.blocks = nn.ModuleList(map(nn.ModuleList, blocks))
        own = [nn.Linear(c.dim, c.draft_vocab_size, bias=False) for _ in range(c.heads)]
        self.outputs = nn.ModuleList(own) if c.own_output else None
        self.output: nn.Module | None = None
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64))

    @property
    def target_ids(self) -> Tensor:
        """int64 [Vd]: the target's token id of each draft id."""
        return torch.arange(self.config.draft_vocab_size, device=self.d2t.device) + self.d2t

    def forward(self, hidden: Tensor) -> list[Tensor]:
        """The state [T, C] of every head behind its blocks, from the target's [T, C]."""
        states = []
        for blocks in self.blocks:
            x = hidden
            for block in blocks:
                x = x + F.silu(block(x))
            states.append(x)
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, Vd] by the lm_head that they share."""
        return self.output(hidden)

    def all_logits(self, hidden: Tensor) -> Tensor:
        """[K, Vd] of all heads, from the target's state [1, C]."""
        states = self(hidden)
        if self.outputs is None:
            return self.output(torch.cat(states))
        return torch.cat([out(x) for out, x in zip(self.outputs, states, strict=True)])


def guess_all(
    heads: MedusaHeads, ids: Tensor, hidden: Tensor, at: At, pick: Pick, top_k: int
) -> Tensor:
    """int64 [K, top_k]: every head's likeliest choices of the target, best first. ids: as in
    Stage."""
    logits = heads.all_logits(hidden)
    positions = at.length + 1 + torch.arange(logits.shape[0], device=hidden.device)
    return pick.guess(logits, positions, ids, top_k)[1]


class MedusaDrafter:
    """Medusa heads, a static tree, and the state that the next tree comes from."""

    static = True

    def __init__(self, heads: MedusaHeads, tree: Tree, compiled: Compile) -> None:
        c, device = heads.config, heads.d2t.device
        self.heads, self.tree, self.feature_layers = heads, tree, c.feature_layers
        self.ids = heads.target_ids
        self.hidden = torch.zeros(1, c.dim, dtype=heads.blocks[0][0].bias.dtype, device=device)
        self.state, self.held = (self.hidden,), (heads.blocks, heads.outputs or nn.Module())
        self.parents, self.ancestors = static_nodes(tree, device)
        rank, head = torch.tensor(tree.keep, device=device) % tree.top_k, self.ancestors.sum(1) - 2
        self.kept = head[1:] * tree.top_k + rank  # among the guesses of all heads
        self.guess_all = compiled(guess_all)

    def propose(self, root: Tensor, at: At, pick: Pick) -> Nodes:
        guesses = self.guess_all(self.heads, self.ids, self.hidden, at, pick, self.tree.top_k)
        tokens = torch.cat((root, guesses.flatten()[self.kept]))
        return Nodes(tokens, self.parents, self.ancestors)

    def learn(self, entries: Entries, at: At) -> None:
        """The newest token that was run is the last on the path: the root was only chosen."""
        row = entries.path.index_select(0, entries.last)
        self.hidden.copy_(entries.features[0].index_select(0, row))

    read = learn

    def bytes_read(self, committed: float) -> float:
        heads = self.heads
        return float(sum(map(module_bytes, (heads.blocks, heads.outputs or heads.output))))
