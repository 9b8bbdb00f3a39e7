"""Lookahead decoding (arXiv 2402.02057): a draft source without a head.

Next to the root the target runs a window of guesses about the coming tokens, W columns of N - 1
levels (`--tree lookahead:W,N,G`). Token (l, j) stands l + j places behind the root and sees the
tokens of level 0 up to column j and those of column j up to itself. What the target chooses behind
the last level is the newest level, and each column with it an n-gram of N tokens: they go into a
pool, and those that begin with the root are guesses, G of them at most. Window and n-grams are one
tree below the root, so the round needs to know nothing of it; a window token that turns out right
counts too. Leaves out: n-grams of the prompt, and moving the window by what was accepted."""

import torch
from torch import Tensor, nn

from eagle_draft import Entries, Nodes, Pick, ancestor_mask
from model import At
from talon.drafters.source import Compile
from talon.trees import Tree

POOL = 4096  # n-grams that are kept, the newest


def window_parents(width: int, size: int, guesses: int) -> list[int]:
    """The parent of every node: the window level by level, then the n-grams one after another."""
    above = [max(j - 1, 0) for j in range(width)] + list(range(width * (size - 2)))
    first = width * (size - 1)
    chain = [0 if step == 0 else -1 for step in range(size - 1)] * guesses
    return above + [0 if top == 0 else first + n - 1 for n, top in enumerate(chain)]


def guess(root: Tensor, window: Tensor, pool: Tensor, count: int) -> Tensor:
    """int64 [N]: the tokens of the tree. window: int64 [n - 1, W]; pool: int64 [P, n], the newest
    last; count: of n-grams below the root, the newest first. What is missing is no token, -1."""
    newest = torch.arange(1, pool.shape[0] + 1, device=pool.device)
    found, index = torch.where(pool[:, 0] == root, newest, 0).topk(count)
    guesses = torch.where(found[:, None] > 0, pool[index, 1:], -1)
    return torch.cat((root, window.flatten()[1:], guesses.flatten()))


def slide(root: Tensor, window: Tensor, pool: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
    """The next window and pool. choice: int64 [W], the target's behind the window's last level. An
    n-gram that is there already becomes the newest."""
    levels = torch.cat((root, window.flatten()[1:], choice)).view(-1, choice.shape[0])
    grams = levels.t()  # [W, n]
    again = (grams[:, None] == grams).all(-1).triu(1).any(1)  # comes once more, further right
    known = (pool[:, None] == grams).all(-1).any(1)
    pool, grams = (
        torch.cat((torch.where(gone, -1, x[:, 0])[:, None], x[:, 1:]), 1)
        for x, gone in ((pool, known), (grams, again))
    )
    return levels[1:], torch.cat((pool[grams.shape[0] :], grams))


class LookaheadDrafter:
    """The draft source of `lookahead:W,N,G`."""

    feature_layers: tuple[int, ...] = ()
    held: tuple[nn.Module, ...] = ()

    def __init__(self, tree: Tree, device: torch.device, compiled: Compile) -> None:
        self.tree = tree
        width, size, self.guesses = tree.lookahead
        self.window = torch.zeros(size - 1, width, dtype=torch.int64, device=device)
        self.pool = torch.full((POOL, size), -1, dtype=torch.int64, device=device)
        self.state = self.window, self.pool
        self.parents = torch.tensor(window_parents(*tree.lookahead), device=device)
        self.ancestors = ancestor_mask(self.parents, tree.depth)
        self.last = slice(width * (size - 2), width * (size - 1))  # nodes of the last level
        self.guess, self.slide = compiled(guess), compiled(slide)

    def propose(self, root: Tensor, at: At, pick: Pick) -> Nodes:
        tokens = self.guess(root, self.window, self.pool, self.guesses)
        return Nodes(tokens, self.parents, self.ancestors)

    def learn(self, entries: Entries, at: At) -> None:
        choice = entries.choice[self.last]
        window, pool = self.slide(entries.root, self.window, self.pool, choice)
        self.window.copy_(window)
        self.pool.copy_(pool)

    def read(self, entries: Entries, at: At) -> None:
        """Another text: an empty pool, and a window of the prompt's last tokens, backwards, where
        the paper takes random ones."""
        back = torch.arange(self.window.numel(), device=self.window.device)
        tokens = entries.tokens[(entries.last - back).clamp(min=0)]
        self.window.copy_(tokens.view(self.window.shape))
        self.pool.fill_(-1)

    def bytes_read(self, committed: float) -> float:
        return 0.0
