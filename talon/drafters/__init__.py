"""Where guesses come from: the draft source that a tree wants (source.py says what one is)."""

import torch
from torch import nn

from model import Transformer
from talon.drafters.source import Compile, DraftSource, RootOnly
from talon.trees import Tree


def make_source(
    tree: Tree, head: nn.Module | None, rows: int, device: torch.device, compiled: Compile
) -> DraftSource:
    """The draft source of a tree. rows: of the caches."""
    if tree.nodes == 1:
        return RootOnly(device)
    # Imported where they are wanted: plain decoding reads and loads none.
    if tree.lookahead:
        from talon.drafters.lookahead import LookaheadDrafter

        return LookaheadDrafter(tree, device, compiled)
    from talon.drafters.eagle import EagleDrafter, head_stage
    from talon.drafters.lookup import LookupDrafter, WithLookup

    if not tree.needs_head:
        return LookupDrafter(tree, rows, device, compiled)
    assert head is not None, f"tree {tree.name} needs a head"
    if isinstance(head, Transformer):
        from talon.drafters.small_model import ModelDrafter

        source = ModelDrafter(head, tree, rows, compiled)
    elif head.config.family == "medusa":
        from talon.drafters.medusa import MedusaDrafter

        source = MedusaDrafter(head, tree, compiled)
    else:
        source = EagleDrafter(head_stage(head, rows), head.config.dim, tree, compiled)
    return WithLookup(source, tree, rows, compiled) if tree.lookup else source
