"""Conversations to train a draft head on: read from a file, or made by the target itself.

A head learns to guess one target, so the best text is the target's own. `generate` invents user turns (sampled from
the model after its own chat template, from openers, or filled from a bank of prompts) and lets the model answer them,
many conversations at a time: the target's usual forward with one row per conversation. Answers that loop are cut,
degenerate and repeated conversations dropped. Leaves out: training (train_draft.py), tools, several answers a turn.

A line of the file it writes is one conversation: {"ids": [...], "spans": [[start, end], ...], "temperature": t}, the
spans being the answers' tokens. Any file of {"conversations"} (ShareGPT) or {"messages"} is read too.

    python train_draft.py --checkpoint_path F --head eagle1 --data self --out DIR
"""

import json
import random
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from model import KVCache, Transformer, TransformerBlock, rope_table, rotate
from sampling import SamplingState, perturb

SAMPLING_POOL = 64  # sampled tokens come from this many best ones
LOOP_LENGTH, LOOP_LIMIT = 4, 6  # an answer ends when one 4-gram has come this often
USER_TOP_P, USER_LIMIT = 0.95, 160  # sampled user turns
PASSAGE_TOKENS = 120


@dataclass
class Slot:
    """One conversation under way: forced tokens wait in `queue`, and what follows them is chosen by the model."""

    number: int
    queue: deque[int]
    phase: str  # "user" while the user turn is being sampled, then "answer"
    temperature: float
    ids: list[int] = field(default_factory=list)
    user_start: int = 0
    start: int = 0  # of the answer
    seen: Counter = field(default_factory=Counter)
    looped: bool = False


def batched_block(
    layer: TransformerBlock, x: Tensor, rope: Tensor, slots: Tensor, mask: Tensor, kv: Tensor
) -> Tensor:
    """TransformerBlock.forward for one row of each of B sequences. x: [B, C]; mask: [B, R]; kv: [2, B * G, R, D]."""
    attention, batch, width = layer.attention, *mask.shape
    heads, groups, size = attention.n_head, attention.n_kv_head, attention.head_dim
    qkv = attention.wqkv(layer.attention_norm(x)).view(batch, heads + 2 * groups, size)
    q, k, v = qkv.split((heads, groups, groups), dim=1)
    row = torch.arange(batch, device=x.device)
    # Keys lie transposed, and products read the whole cache: anything strided would be copied first.
    keys, values = kv[0].view(batch * groups, size, -1), kv[1]
    keys.view(batch, groups, size, -1)[row, :, :, slots] = rotate(k, rope).to(keys.dtype)
    values.view(batch, groups, -1, size)[row, :, slots] = v
    scores = torch.bmm(rotate(q, rope).view(batch * groups, -1, size), keys)
    scores = scores.view(batch, heads, width).float() * size**-0.5
    weights = scores.masked_fill_(~mask[:, None], float("-inf")).softmax(-1).to(x.dtype)
    y = torch.bmm(weights.view(batch * groups, -1, width), values)
    x = x + attention.wo(y.view(batch, -1))
    return x + layer.feed_forward(layer.ffn_norm(x))


class BatchedDecoder:
    """B conversations in one batch, a row each; a finished one gives its row to the next at once."""

    def __init__(self, model: Transformer, batch: int, rows: int, seed: int) -> None:
        self.model, self.batch, self.rows, c = model, batch, rows, model.config
        weight = model.norm.weight
        self.device = weight.device
        self.cache = KVCache(c.n_layer, batch * c.n_kv_head, rows, c.head_dim, weight.dtype)
        self.cache.to(self.device)
        self.table = rope_table(rows, c.head_dim, c.rope_theta, c.rope_scaling).to(self.device)
        self.sampling = SamplingState(self.device)
        self.sampling.seed.fill_(seed)
        self.sampling.top_k.fill_(SAMPLING_POOL)
        self.slots = torch.arange(rows, device=self.device)
        self.tokens = torch.arange(c.vocab_size, device=self.device)

    @torch.inference_mode()
    def step(self, tokens: list[int], positions: list[int]) -> Tensor:
        """Run one token of every conversation; logits [B, V]."""
        at = torch.tensor(positions, device=self.device)
        mask = self.slots <= at[:, None]
        x = self.model.tok_embeddings(torch.tensor(tokens, device=self.device))
        x, _ = self.model(x, self.table[:, at], at, mask, self.cache, (), batched_block)
        return self.model.output(self.model.norm(x))

    @torch.inference_mode()
    def choose(self, logits: Tensor, wanted: list[tuple[int, float, float, int]]) -> list[int]:
        """One token for each (row, temperature, top_p, noise counter); temperature 0 is greedy."""
        chosen = logits.max(dim=1).indices.tolist()
        result = {row: chosen[row] for row, *_ in wanted}
        sampled = [item for item in wanted if item[1] > 0]
        if sampled:
            rows, temperatures, top_ps, counters = zip(*sampled, strict=True)
            self.sampling.temperature = torch.tensor(temperatures, device=self.device)[:, None]
            self.sampling.top_p = torch.tensor(top_ps, device=self.device)[:, None]
            values, columns = perturb(
                logits[list(rows)], torch.tensor(counters, device=self.device), self.tokens,
                self.sampling, "filter", SAMPLING_POOL,
            )  # fmt: skip
            best = columns.gather(1, values.argmax(1, keepdim=True))[:, 0].tolist()
            result |= dict(zip(rows, best, strict=True))
        return [result[row] for row, *_ in wanted]
