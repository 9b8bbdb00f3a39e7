"""Where guesses come from: draft sources, which one a tree wants, and the one of plain decoding.

A draft source has `propose` (a tree below the root), `learn` (what turned out true) and `read` (a
chunk of the prompt); the round knows no more. Everything stays on the device in static shapes."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from eagle_draft import Entries, Nodes, Pick
from model import At
from talon.trees import NO_TREE, Tree

Compile = Callable[[Callable], Callable]  # makes a compiled region of a function, or leaves it


class DraftSource(Protocol):
    tree: Tree
    feature_layers: tuple[int, ...]  # of the target, which `learn` and `read` want
    held: tuple[nn.Module, ...]  # weights and caches of its own
    state: tuple[Tensor, ...]  # what a round writes and a rehearsed one must give back

    def propose(self, root: Tensor, at: At, pick: Pick) -> Nodes: ...

    def learn(self, entries: Entries, at: At) -> None: ...

    def read(self, entries: Entries, at: At) -> None: ...

    def bytes_read(self, committed: float) -> float: ...  # by a proposal


def module_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


class RootOnly:
    """The draft source of plain decoding: a tree of one node, nothing to learn."""

    tree = NO_TREE
    feature_layers: tuple[int, ...] = ()
    held: tuple[nn.Module, ...] = ()
    state: tuple[Tensor, ...] = ()

    def __init__(self, device: torch.device) -> None:
        self.parents = torch.zeros(1, dtype=torch.int64, device=device)
        self.ancestors = torch.ones(1, 1, dtype=torch.bool, device=device)

    def propose(self, root: Tensor, at: At, pick: Pick) -> Nodes:
        return Nodes(root, self.parents, self.ancestors)

    def learn(self, entries: Entries, at: At) -> None:
        pass

    read = learn

    def bytes_read(self, committed: float) -> float:
        return 0.0
