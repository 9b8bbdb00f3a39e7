"""A target over many windows of text, one block in memory at a time, in fp32.

What looks at a block, or changes its weights, does so before the windows go through it. Leaves out
decoding: a window is one forward, and no keys and values are kept."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from model import KVCache, ModelConfig, Place, Transformer, causal_mask, rope_table
from talon.checkpoint import Checkpoint
from talon.cli import note
from talon.loading import empty_module, fill, find_tokenizer
from talon.operators import choose_operators
from talon.settings import read_text

WINDOW = 512  # tokens of a forward

EMBEDDING = "tok_embeddings.weight"

Watch = Callable[[str, nn.Linear, Tensor], None]  # sees a layer's name, the layer and its inputs


def read_windows(checkpoint: Checkpoint, text: Path, most: int) -> list[Tensor]:
    """Token ids of a text in windows, at most so many, from all over the text; without a tokenizer,
    ids from all over the vocabulary and a notice."""
    config = ModelConfig.from_dict(checkpoint.config)
    size = min(WINDOW, config.max_seq_length)
    tokenizer = find_tokenizer(checkpoint.path.parent, config)
    if tokenizer is None:
        note(f"note: no tokenizer next to {checkpoint.path}: arbitrary ids stand for {text.name}")
        return [torch.arange(size) * 7919 % config.vocab_size]
    ids = torch.tensor(tokenizer.encode(read_text(text)))
    if len(ids) < 2:
        raise ValueError(f"{text} has {len(ids)} tokens; give a text of some thousand")
    windows = [window for window in ids.split(size) if len(window) == size] or [ids]
    count = min(len(windows), most // WINDOW)
    return [windows[i * len(windows) // count] for i in range(count)]


class Blocks:
    """The states [T, C] of every window, which `run` takes through all blocks."""

    def __init__(self, checkpoint: Checkpoint, windows: list[Tensor], device: torch.device) -> None:
        self.checkpoint, self.device = checkpoint, device
        self.config = c = ModelConfig.from_dict(checkpoint.config)
        size = max(map(len, windows))
        self.table = rope_table(size, c.head_dim, c.rope_theta, c.rope_scaling).to(device)
        self.kv = KVCache(1, c.n_kv_head, size, c.head_dim, torch.float32).to(device).layer(0)
        embedding = checkpoint.tensor(EMBEDDING)
        self.states = [embedding[window].float().to(device) for window in windows]

    @torch.inference_mode()
    def run(self, what: str) -> Iterator[tuple[str, nn.Module]]:
        """Each block with its prefix, before the states go through it; ends with the final norm."""
        model = empty_module(Transformer, self.config, self.checkpoint)
        for index, block in enumerate(tqdm(model.layers, what, disable=None, leave=False)):
            self.load(block, prefix := f"layers.{index}.")
            yield prefix, block
            for number, after in enumerate(self.through(block)):
                self.states[number] = after
            block.to("meta")  # its memory is free for the next one
        self.load(model.norm, "norm.")
        self.states = [model.norm(x) for x in self.states]

    def load(self, module: nn.Module, prefix: str) -> None:
        fill(module, self.checkpoint, self.device, torch.float32, prefix)
        choose_operators(module, self.device, torch.float32)

    def through(self, block: nn.Module) -> Iterator[Tensor]:
        """The states behind a block."""
        for x in self.states:
            slots = torch.arange(len(x), device=self.device)
            mask = causal_mask(torch.zeros_like(slots[:1]), len(x), slots)
            yield block(x, Place(self.table[:, : len(x)], slots, mask), self.kv)

    def output(self) -> nn.Module:
        """lm_head alone, quantised or not."""
        part = nn.Sequential(empty_module(Transformer, self.config, self.checkpoint).output)
        if "output.weight" in self.checkpoint.specs:
            self.load(part[0], "output.")
        else:
            embedding = self.checkpoint.tensor(EMBEDDING).float().to(self.device)
            part[0].weight = nn.Parameter(embedding, requires_grad=False)
        choose_operators(part, self.device, torch.float32)
        return part[0]


def linears_of(module: nn.Module, prefix: str = "") -> dict[str, nn.Linear]:
    found = module.named_modules()
    return {prefix + name: part for name, part in found if isinstance(part, nn.Linear)}


def watch_linears(linears: dict[str, nn.Linear], watch: Watch) -> list:
    """Handles of hooks by which `watch` sees the inputs of every linear."""

    def seen(layer: str, linear: nn.Module, inputs: tuple[Tensor]) -> None:
        watch(layer, linear, inputs[0])

    return [
        linear.register_forward_pre_hook(partial(seen, layer)) for layer, linear in linears.items()
    ]
