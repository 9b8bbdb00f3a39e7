"""Where guesses come from: the draft source that a tree wants (source.py says what one is)."""

import torch

from eagle_draft import DraftHead
from talon.drafters.source import Compile, DraftSource, RootOnly
from talon.trees import Tree


def make_source(
    tree: Tree, head: DraftHead | None, rows: int, device: torch.device, compiled: Compile
) -> DraftSource:
    """The draft source of a tree. rows: of the caches."""
    if tree.nodes == 1:
        return RootOnly(device)
    # Imported where they are wanted: plain decoding reads and loads neither.
    from talon.drafters.eagle import EagleDrafter
    from talon.drafters.lookup import LookupDrafter, WithLookup

    if not tree.needs_head:
        return LookupDrafter(tree, rows, device, compiled)
    assert head is not None, f"tree {tree.name} needs a head"
    source = EagleDrafter(head, tree, rows, compiled)
    return WithLookup(source, tree, rows, compiled) if tree.lookup else source
