"""Many texts of one target in a batch, a token of each a step: to make data, never to decode.

The layers are the target's own; attention is written out for one row of each of B texts. Leaves
out: who says what (self_talk.py, evaluation.py), drafting.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model import KVCache, ModelConfig, Transformer, TransformerBlock, rope_table, rotate
from talon.cli import note
from talon.decoder import CHUNKS
from talon.memory import available_memory, gigabytes
from talon.sampling import Filtered

SAMPLING_POOL = 64  # sampled tokens come from this many best ones
USER_TOP_P = 0.95


@dataclass
class Slot:
    """A text under way in one row: ids in `queue` are forced, the next ones the model chooses."""

    number: int
    queue: deque[int]
    temperature: float = 0.0  # of the answer
    start: int | None = None  # where the answer begins; None while the user turn is being sampled
    turn: int = 0  # where the sampled part of the user turn begins
    ids: list[int] = field(default_factory=list)
    messages: list[dict] = field(default_factory=list)  # what was said before this turn
    spans: list[list[int]] = field(default_factory=list)  # of the answers that are whole
    seen: Counter = field(default_factory=Counter)  # n-grams of the answer

    @property
    def sampling(self) -> tuple[float, float]:
        """Temperature and top_p of the next token."""
        return (1.0, USER_TOP_P) if self.start is None else (self.temperature, 1.0)


def batched_block(
    layer: TransformerBlock, x: Tensor, rope: Tensor, slots: Tensor, mask: Tensor, kv: Tensor
) -> Tensor:
    """TransformerBlock.forward for one row of each of B texts.

    x: [B, C]; mask: [B, R]; kv: [2, B * G, R, D]."""
    attention, batch, width = layer.attention, *mask.shape
    heads, groups, size = attention.n_head, attention.n_kv_head, attention.head_dim
    q, k, v = attention.project(layer.attention_norm(x))
    row = torch.arange(batch, device=x.device)
    # Keys lie transposed, and the matrix multiplications read the whole cache: anything strided
    # would be copied first.
    keys, values = kv[0].view(batch * groups, size, -1), kv[1]
    keys.view(batch, groups, size, -1)[row, :, :, slots] = rotate(k, rope).to(keys.dtype)
    values.view(batch, groups, -1, size)[row, :, slots] = v
    q = rotate(q, rope * size**-0.5).view(batch * groups, -1, size)
    scores = torch.bmm(q, keys).view(batch, heads, width)
    scores = scores.masked_fill_(~mask[:, None], float("-inf"))
    weights = scores.softmax(-1, dtype=torch.float32).to(x.dtype)
    y = torch.bmm(weights.view(batch * groups, -1, width), values)
    x = x + attention.wo(y.view(batch, -1))
    return layer.feed_forward(layer.ffn_norm(x), x)


def fit_batch(
    config: ModelConfig, length: int, wanted: int, dtype: torch.dtype, available: int | None
) -> int:
    """How many texts of `length` tokens have room in the available bytes; ValueError if none."""
    c = config
    cache = 2 * c.n_layer * c.n_kv_head * c.head_dim * length * dtype.itemsize
    # Attention's scores of a layer, and the logits with what sampling makes of them, in fp32.
    each = cache + 4 * (3 * c.n_head * length + 8 * c.vocab_size)
    batch = wanted if available is None else min(wanted, int(0.9 * available) // each)
    if batch < 1:
        raise ValueError(
            f"a text of {length} tokens needs {gigabytes(each)}, but next to the target the device "
            f"has {gigabytes(available)} free: take a quantised target, or another --device"
        )
    if batch < wanted:
        note(f"memory for {batch} texts at a time instead of {wanted}: {gigabytes(each)} each")
    return batch


class BatchedDecoder:
    """B texts in one batch, a row each; a finished one gives its row to the next at once."""

    def __init__(self, model: Transformer, wanted: int, length: int, seed: int = 0) -> None:
        """wanted: texts at a time, if there is room for them; length: tokens of the longest."""
        self.model, c, weight = model, model.config, model.norm.weight
        self.device = weight.device
        if self.device.type == "cuda":
            wanted = min(wanted, CHUNKS["cuda"][-1])  # rows that the operators of a GPU take
        self.batch = fit_batch(c, length, wanted, weight.dtype, available_memory(self.device))
        cache = KVCache(c.n_layer, self.batch * c.n_kv_head, length, c.head_dim, weight.dtype)
        self.cache = cache.to(self.device)
        self.table = rope_table(length, c.head_dim, c.rope_theta, c.rope_scaling).to(self.device)
        self.seed = torch.tensor([seed], device=self.device)
        self.top_k = torch.tensor([SAMPLING_POOL], device=self.device)
        self.slots = torch.arange(length, device=self.device)
        self.tokens = torch.arange(c.vocab_size, device=self.device)

    def step(self, slots: list[Slot | None]) -> list[tuple[int, int]]:
        """Run one token of every text; (row, token) where the next one is the model's to choose."""
        for slot in slots:
            if slot and slot.queue:
                slot.ids.append(slot.queue.popleft())
        last = [(slot.ids[-1], len(slot.ids) - 1) if slot else (0, 0) for slot in slots]
        logits = self.forward(*zip(*last, strict=True))
        free = [row for row, slot in enumerate(slots) if slot and not slot.queue]
        chosen = self.choose(logits, {row: slots[row] for row in free}).tolist()
        return [(row, chosen[row]) for row in free]

    @torch.inference_mode()
    def forward(self, tokens: list[int], positions: list[int]) -> Tensor:
        """Logits [B, V] after one token of every text."""
        at = torch.tensor(positions, device=self.device)
        mask = self.slots <= at[:, None]
        x = self.model.tok_embeddings(torch.tensor(tokens, device=self.device))
        for index, layer in enumerate(self.model.layers):
            x = batched_block(layer, x, self.table[:, at], at, mask, self.cache.layer(index))
        return self.model.output(self.model.norm(x))

    @torch.inference_mode()
    def choose(self, logits: Tensor, slots: dict[int, Slot]) -> Tensor:
        """int64 [B]: the best token of every row, or a sampled one where its slot says so."""
        chosen = logits.max(dim=1).indices
        rows = [row for row, slot in slots.items() if slot.sampling[0] > 0]
        if rows:
            sampling = torch.tensor([slots[row].sampling for row in rows], device=self.device)
            length = len(self.slots)
            counters = [slots[row].number * length + len(slots[row].ids) for row in rows]
            temperature, top_p = sampling.split(1, dim=1)
            pick = Filtered(temperature, self.seed, self.top_k, top_p)
            positions = torch.tensor(counters, device=self.device)
            values, columns = pick.values(logits[rows], positions, self.tokens, SAMPLING_POOL)
            chosen[rows] = columns.gather(1, values.argmax(1, keepdim=True))[:, 0]
        return chosen
