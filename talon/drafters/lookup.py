"""Prompt lookup: a draft source without a head, which continues the text as it went on before.

The longest end of the text, up to 16 tokens, that occurs earlier in prompt or answer is looked up,
and what followed there is proposed (`--tree lookup:K`, K tokens in all): as much as the match
earns, then what followed other matches, as further branches. Behind a head's tree
(`chain:2+lookup:3`) it goes on where the tree stops agreeing with it. Leaves out: matches across
texts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_draft import Entries, Nodes, Pick
from model import At
from talon.drafters.source import Compile, DraftSource
from talon.trees import Tree

NGRAM = 16  # tokens that a match has at most
BRANCHES = 3  # continuations of `lookup:K`


def matches(history: Tensor, at: At) -> Tensor:
    """int64 [S]: how many tokens up to each slot, at most NGRAM, are those that end the text.

    history: int64 [R], token of every position, valid up to position length, the root's; S must be
    greater than length. The first token of a text is not known and matches nothing."""
    length, slots = at
    back = torch.arange(NGRAM, device=history.device)
    position = slots[:, None] - back
    equal = history[position.clamp(min=0)] == history[(length - back).clamp(min=0)]
    equal = equal & (position > 0) & (length > back)
    return torch.where(slots < length, equal.long().cumprod(1).sum(1), 0)


def best_match(matched: Tensor, at: At) -> Tensor:
    """int64 [1]: the slot of the longest match, of equal ones the latest; without one the first."""
    order = matched * at.slots.shape[0] + at.slots
    return torch.where(matched > 0, order, 0).argmax(0, keepdim=True)


def follow(history: Tensor, at: At, match: Tensor, steps: Tensor) -> Tensor:
    """The tokens that followed a match, `steps` int64 [count] behind it. One that ends close to the
    root goes on into its own copy, as a loop does."""
    period = (at.length - match).clamp(min=1)
    return history[match + 1 + steps % period].clamp(min=0)


def look_up(history: Tensor, at: At, count: int) -> Tensor:
    """The `count` tokens that followed the best earlier match of the text's end: int64 [count].
    Without one, the text's start counts."""
    steps = torch.arange(count, device=history.device)
    return follow(history, at, best_match(matches(history, at), at), steps)


def look_up_tree(root: Tensor, history: Tensor, at: At, count: int) -> Nodes:
    """`count` tokens below the root: those that followed the best match, then those of the best
    ones that go on differently.

    A match of one token earns one, a longer one twice its length, the last what is left: on
    conversations of a 135M model matches of 1, 2, 4, 8 and 16 tokens were followed by .5, 1.7, 3.0,
    5.4 and 8.8 true ones, and the first of another continuation was true in 14, 11, 10, 6 and 5 of
    100 places."""
    matched, following = matches(history, at), history[at.slots + 1]
    found = []
    for _ in range(BRANCHES):
        match = best_match(matched, at)
        found.append((match, matched[match]))
        matched = torch.where(following == following[match], 0, matched)
    match, size = (torch.cat(part) for part in zip(*found, strict=True))
    earned = torch.where(size == 1, 1, 2 * size)
    another = F.pad(size[1:] > 0, (0, 1))
    ends = torch.where(another, earned, count).cumsum(0).clamp(max=count)
    node = torch.arange(count, device=history.device)
    branch = (node[:, None] >= ends).sum(1)
    steps = node - F.pad(ends[:-1], (1, 0))[branch]
    tokens = follow(history, at, match[branch], steps)
    parents = F.pad(torch.where(steps == 0, 0, node), (1, 0))  # node v is row v + 1 of the tree
    branch, node = F.pad(branch, (1, 0), value=-1), torch.arange(count + 1, device=node.device)
    ancestors = (node == 0) | (branch[:, None] == branch) & (node[:, None] >= node)
    return Nodes(torch.cat((root, tokens)), parents, ancestors)


def extend(nodes: Nodes, history: Tensor, at: At, sizes: tuple[int, int]) -> Nodes:
    """A tree with a looked-up chain behind the deepest node up to which both say the same; behind
    the root if they differ at once. sizes: tokens of the chain, levels of the tree."""
    (tokens, parents, ancestors), (count, levels) = nodes, sizes
    guesses = look_up(history, at, count + levels)
    depth = ancestors.sum(1) - 1
    right = (tokens == guesses[depth - 1]) | (depth == 0)
    agreed = ~(ancestors & ~right).any(1)
    last = torch.where(agreed, depth + 1, 0).argmax(0, keepdim=True)
    chain = torch.arange(count, device=tokens.device)
    tokens = torch.cat((tokens, guesses[depth[last] + chain]))
    parents = torch.cat((parents, last, parents.shape[0] + chain[: count - 1]))
    above = torch.cat((ancestors[last].expand(count, -1), chain[:, None] >= chain), 1)
    return Nodes(tokens, parents, torch.cat((F.pad(ancestors, (0, count)), above)))


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
        self.look_up, self.remember = compiled(look_up_tree), compiled(remember)

    def propose(self, root: Tensor, at: At, pick: Pick) -> Nodes:
        return self.look_up(root, self.history, at, self.tree.lookup)

    def learn(self, entries: Entries, at: At) -> None:
        """Padding behind the last entry lies behind the new root, where nothing looks."""
        self.remember(self.history, entries.start, entries.tokens)

    def read(self, entries: Entries, at: At) -> None:
        """The same for a chunk of the prompt, too rare to be worth compiling."""
        remember(self.history, entries.start, entries.tokens)

    def bytes_read(self, committed: float) -> float:
        return 0.0


class WithLookup:
    """A head's tree and a looked-up chain behind it. The same token may follow a node in both: the
    longer path counts (`accept` in eagle_draft.py)."""

    def __init__(self, source: DraftSource, tree: Tree, rows: int, compiled: Compile) -> None:
        self.source, self.tree = source, tree
        self.feature_layers, self.held = source.feature_layers, source.held
        self.state, self.bytes_read = source.state, source.bytes_read
        self.text = LookupDrafter(tree, rows, source.state[0].device, compiled)
        self.extend = compiled(extend)

    def propose(self, root: Tensor, at: At, pick: Pick) -> Nodes:
        nodes = self.source.propose(root, at, pick)
        return self.extend(nodes, self.text.history, at, (self.tree.lookup, self.tree.levels))

    def learn(self, entries: Entries, at: At) -> None:
        self.source.learn(entries, at)
        self.text.learn(entries, at)

    def read(self, entries: Entries, at: At) -> None:
        self.source.read(entries, at)
        self.text.read(entries, at)
