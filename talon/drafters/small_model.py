"""The draft source of a small model: speculative sampling (arXiv 2211.17192, 2302.01318).

Any target of the same vocabulary guesses for a larger one, level by level as a head does. Its cache
holds token i at position i, where a head's entry pairs feature i with token i + 1: everything
stands one slot further. The papers' rejection rule is not needed, see talon/sampling.py: target and
small model meet the same noise, and a guess is right or wrong. Leaves out: trees (talon/trees.py),
the levels themselves (talon/drafters/eagle.py)."""

import torch
from torch import Tensor, nn

from eagle_draft import Entries, Stage
from model import At, KVCache, ModelConfig, Place, Transformer, rope_table
from talon.drafters.eagle import EagleDrafter
from talon.drafters.source import Compile
from talon.trees import Tree


def fit_model(path: object, small: ModelConfig, target: ModelConfig) -> ModelConfig:
    """The small model's configuration, if its tokens are the target's."""
    if small.vocab_size != target.vocab_size:
        raise ValueError(
            f"{path} is a model with a vocabulary of {small.vocab_size}, but this target's has "
            f"{target.vocab_size}: draft with a model of the same tokenizer"
        )
    return small


class SmallModel(nn.Module):
    """A target with the face of a head, as `grow_level` runs one. All of its layers' keys and
    values lie in a cache of its own; what a level hands on is the state after its final norm."""

    def __init__(self, model: Transformer, rows: int) -> None:
        super().__init__()
        c, weight = model.config, model.norm.weight
        self.model, self.layer, self.output = model, model.layers, model.output
        self.place = model.place
        cache = KVCache(c.n_layer, c.n_kv_head, rows, c.head_dim, weight.dtype)
        self.cache = cache.to(weight.device)

    def forward(self, tokens: Tensor, hidden: Tensor | None, place: Place, kv: Tensor) -> Tensor:
        """tokens: int64 [T]. Returns the states after the final norm [T, C]."""
        return self.model(tokens, place, self.cache)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.output(hidden)


def append(small: Stage, tokens: Tensor, start: Tensor, last: Tensor, at: At) -> Tensor:
    """Run true tokens int64 [T] from position `start` on, padded behind row `last`; the state
    [1, C] there, from which the next tree grows."""
    own = start + torch.arange(tokens.shape[0], device=start.device)
    place = small.module.place(small.rope, own, own, At(start, at.slots))
    hidden = small.module(tokens.clamp(min=0), None, place, small.cache.layer(0))
    return hidden.index_select(0, last)


class ModelDrafter(EagleDrafter):
    """A small model, the tree that it grows, and the static buffers of both."""

    def __init__(self, model: Transformer, tree: Tree, rows: int, compiled: Compile) -> None:
        c, small = model.config, SmallModel(model, rows)
        table = rope_table(rows, c.head_dim, c.rope_theta, c.rope_scaling)
        table = table.to(small.cache.data.device)
        stage = Stage(small, small.cache, table, (), 0, torch.arange(c.vocab_size).to(table.device))
        super().__init__(stage, c.dim, tree, compiled)
        self.append = compiled(append)
        self.append_chunk = self.append if table.device.type == "cuda" else append

    def levels_at(self, at: At) -> At:
        return At(at.length + 1, at.slots)  # the root is in the cache too

    def learn(self, entries: Entries, at: At) -> None:
        """The root is there since the round before; what follows it is new."""
        tokens, start, last = entries.tokens, entries.start + 1, entries.last
        self.hidden.copy_(self.append(self.stage, tokens, start, last, at))

    def read(self, entries: Entries, at: At) -> None:
        """The same for a chunk of the prompt, with its first token, which nothing came before."""
        tokens = torch.cat((entries.root, entries.tokens))
        hidden = self.append_chunk(self.stage, tokens, entries.start, entries.last + 1, at)
        self.hidden.copy_(hidden)
