"""Medusa heads as FasterDecoding publishes them: `medusa_lm_head.pt` and a config.json beside it.

Tensors are named `K.J.linear.weight` and `.bias`, block J of head K, and `K.B.weight`, its lm_head
behind B blocks; version 1.0 may put `medusa_head.` before each. The tensors decide: published
configurations state two heads where the file has five."""

import re

from talon.drafters.medusa import MedusaConfig
from talon.formats.hf_folder import Conversion, HFFolder, Output

BLOCK = r"(?:medusa_head\.)?([0-9]+)\.([0-9]+)\.linear\.weight"


def is_medusa(folder: HFFolder) -> bool:
    """Whether the tensors are Medusa heads without a target."""
    named = any(re.fullmatch(BLOCK, name) for name in folder.specs)
    return named and "model.embed_tokens.weight" not in folder.specs


def plan_medusa(folder: HFFolder) -> Conversion:
    """Decide everything about the heads; `Conversion.check` does the strict accounting."""
    names = {name.removeprefix("medusa_head."): name for name in folder.specs}
    if len(names) < len(folder.specs):
        raise ValueError(f"{folder.path} holds tensors twice, with and without medusa_head.")
    found = [match for match in (re.fullmatch(BLOCK, name) for name in names) if match]
    heads, blocks = (1 + max(int(match[part]) for match in found) for part in (1, 2))
    if heads * blocks > len(found):
        raise ValueError(
            f"{folder.path} names {heads} heads of {blocks} blocks, but has {len(found)} blocks: "
            "download it again"
        )
    lm_head = names.get(f"0.{blocks}.weight")
    if lm_head is None:
        raise ValueError(f"{folder.path} has no 0.{blocks}.weight, the first head's lm_head")
    shape = folder.specs[lm_head].shape
    if len(shape) != 2:
        raise ValueError(
            f"{folder.path}: {lm_head} has shape {list(shape)}, not that of an lm_head"
        )
    vocab, dim = shape
    notes = []
    for key, count in (("medusa_num_heads", heads), ("medusa_num_layers", blocks)):
        stated = folder.config.integer(key, None)
        if stated not in (None, count):
            notes.append(f"{key} is {stated} in config.json, the weights have {count}: used those")
    config = MedusaConfig("medusa", dim, heads, blocks, vocab, vocab)
    outputs = []
    for k in range(heads):
        for j in range(blocks):
            for part, shape in (("weight", (dim, dim)), ("bias", (dim,))):
                source = f"{k}.{j}.linear.{part}"
                outputs.append(Output(f"blocks.{k}.{j}.{part}", {names.get(source, source): shape}))
        source = f"{k}.{blocks}.weight"
        outputs.append(Output(f"outputs.{k}.weight", {names.get(source, source): (vocab, dim)}))
    return Conversion(folder, "draft", config, "medusa", outputs, notes)
