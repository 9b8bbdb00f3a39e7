"""Prompt lookup: a draft source without a head, which continues the text as it went on before.

The longest of the last 3, 2 or 1 tokens that occurs earlier in prompt or answer is looked up, and
what followed there last time is proposed as a chain (`--tree lookup:K`). Next to a head's tree
(`chain:2+lookup:3`) it wins where the text repeats itself, while the head wins elsewhere. Leaves
out: several continuations at once, and matches across texts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_draft import Entries, Nodes, Pick
from model import At
from talon.drafters.eagle import EagleDrafter
from talon.drafters.source import Compile
from talon.trees import Tree

NGRAM = 3  # tokens that a match has at most; longer ones are rarer and hardly better


def look_up(history: Tensor, at: At, count: int) -> Tensor:
    """The `count` tokens that followed the best earlier match of the text's end: int64 [count].

    history: int64 [R], token of every position, valid up to position length, the root's; S must be
    greater than length. The longest match wins, of equal ones the latest. A match that ends close
    to the root goes on into its own copy, as a loop does. Without one, the text's start counts."""
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
    """The draft source of `lookup:K`: it keeps its own copy of the text."""

    feature_layers: tuple[int, ...] = ()
    held: tuple[nn.Module, ...] = ()
    state: tuple[Tensor, ...] = ()  # a rehearsed round writes only past `length`

    def __init__(self, tree: Tree, rows: int, device: torch.device, compiled: Compile) -> None:
        self.tree = tree
        # Position 0 is never written (`learn` gets followers), so it must match nothing: no token.
        self.history = torch.full((rows + 1,), -1, dtype=torch.int64, device=device)
        node = torch.arange(tree.lookup + 1, device=device)
        self.parents, self.ancestors = (node - 1).clamp(min=0), node[:, None] >= node
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

    def bytes_read(self, committed: float) -> float:
        return 0.0


class WithLookup:
    """A head's tree and a looked-up chain below the same root. The same token may follow the root
    in both: the longer path counts (`accept` in eagle_draft.py)."""

    def __init__(self, source: EagleDrafter, tree: Tree, rows: int, compiled: Compile) -> None:
        self.source, self.tree = source, tree
        self.feature_layers, self.held = source.feature_layers, source.held
        self.state, self.bytes_read = source.state, source.bytes_read
        device, grown = source.hidden.device, tree.grown
        self.text = LookupDrafter(tree, rows, device, compiled)
        self.parents = torch.arange(grown - 1, tree.nodes - 1, device=device)
        self.parents[0] = 0
        node = torch.arange(tree.nodes, device=device)
        in_chain = (node == 0) | (node >= grown)
        self.ancestors = (node[:, None] >= grown) & (node[:, None] >= node) & in_chain
        # Parents and ancestors of the whole, where they are always the same.
        self.joined = self.join(source.parents, source.ancestors) if source.static else None

    def join(self, parents: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
        """Node parents int64 [N] and ancestor mask bool [N, N] of both parts, from the grown."""
        more = (0, self.tree.lookup)
        parents = torch.cat((parents, self.parents))
        return parents, F.pad(ancestors, more + more) | self.ancestors

    def propose(self, root: Tensor, at: At, pick: Pick) -> Nodes:
        tokens, parents, ancestors = self.source.propose(root, at, pick)
        guesses = self.text.look_up(self.text.history, at, self.tree.lookup)
        parents, ancestors = self.joined or self.join(parents, ancestors)
        return Nodes(torch.cat((tokens, guesses)), parents, ancestors)

    def learn(self, entries: Entries, at: At) -> None:
        self.source.learn(entries, at)
        self.text.learn(entries, at)

    def read(self, entries: Entries, at: At) -> None:
        self.source.read(entries, at)
        self.text.read(entries, at)
