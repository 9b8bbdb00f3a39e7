"""The head as it is trained: many entries at once, several levels of drafting, and the teacher's
side of the losses.

The teacher is the target itself, run by the code that decodes, so its features are those that
decoding reads. The head is the DraftHead that decodes: only its attention is another, one that
unrolls the levels of drafting over whole conversations (training-time test, EAGLE-3, arXiv
2503.01840, section 3.2; used here for EAGLE-1 heads too). Leaves out: data (draft_data.py), the run
and its files (train_draft.py, which is the command).
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from eagle_draft import DraftHead
from model import Attention, KVCache, Place, Transformer, causal_mask, rope_table, rotate
from talon.training.conversations import Conversation


@dataclass(frozen=True)
class Settings:
    """What decides the numbers of a run: all of it must be the same to resume one."""

    head: str
    epochs: int
    batch_tokens: int
    lr: float
    warmup: float
    unroll: int
    unroll_from: float
    level_decay: float
    feature_weight: float
    feature_noise: float
    draft_vocab_size: int | None
    max_length: int
    validation: float
    dtype: str
    seed: int
    init: str | None


class UnrolledAttention(Attention):
    """The head's attention over B sequences of T entries, level after level of drafting.

    At the first level an entry sees its predecessors and itself. An entry of a later level stands
    for a drafted node: it sees the same true entries and, besides, its own ancestors, which are the
    entries of the same row at the earlier levels. `kv` is the list of the levels' keys and values;
    this call appends its own.
    """

    def forward(self, x: Tensor, place: Place, kv: list) -> Tensor:
        """x: [B * T, in_dim]; place: rope [2, B * T, D], no slots, and mask bool [T, T], causal."""
        rope, _, mask = place
        length = mask.shape[0]
        heads, groups, size = self.n_head, self.n_kv_head, self.head_dim
        q, k, v = self.wqkv(x).view(-1, heads + 2 * groups, size).split((heads, groups, groups), 1)
        # [B, G, T, H/G, D] for queries, [B, G, T, D] for keys and values
        q = rotate(q, rope).view(-1, length, groups, heads // groups, size).transpose(1, 2)
        k = rotate(k, rope).view(-1, length, groups, size).transpose(1, 2)
        v = v.view(-1, length, groups, size).transpose(1, 2)
        kv.append((k, v))
        q = q.transpose(2, 3)  # [B, G, H/G, T, D]
        keys, values = kv[0]
        scores = (q @ keys[:, :, None].transpose(-1, -2)).float().masked_fill(~mask, float("-inf"))
        own = [(q * key[:, :, None]).sum(-1, keepdim=True).float() for key, _ in kv[1:]]
        weights = (torch.cat((scores, *own), dim=-1) * size**-0.5).softmax(-1).to(v.dtype)
        y = weights[..., :length] @ values[:, :, None]
        for level, (_, value) in enumerate(kv[1:]):
            y = y + weights[..., length + level, None] * value[:, :, None]
        return self.wo(y.permute(0, 3, 1, 2, 4).reshape(x.shape[0], heads * size))


class ColumnScale(nn.Module):
    """fc sees every input in units of that input's usual size. Folded into the weight when the head
    is written."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, weight: Tensor) -> Tensor:
        return weight / self.scale

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight * self.scale


@dataclass
class Batch:
    """B conversations, padded at the end. What entry i of a row learns at level s (0 is the first):
    its token is i+1+s, its position i+s, and what it has to guess is the target's choice after that
    token."""

    ids: Tensor  # int64 [B, T]
    answer: Tensor  # bool [B, T], the token belongs to an answer
    features: list[Tensor]  # [B, T, C] each: what the head reads
    final: Tensor  # [B, T, C], after the target's final norm
    choice: Tensor  # int64 [B, T], the target's choice after each token

    def counted(self, level: int) -> Tensor:
        """bool [B, T]: entries whose guess is an answer token. The mask moves along with its
        labels."""
        return ahead(self.answer, level + 2)


def ahead(x: Tensor, by: int) -> Tensor:
    """x moved `by` places to the left along dimension 1; zeros come in."""
    return torch.cat((x[:, by:], torch.zeros_like(x[:, :by])), dim=1)


class Unrolled(nn.Module):
    """The head with its training losses. The forward is one batch; DDP wraps this."""

    def __init__(self, head: DraftHead, rows: Tensor, settings: Settings) -> None:
        super().__init__()
        self.head, self.settings = head, settings
        c = head.config
        self.register_buffer("rows", rows, persistent=False)  # [Vd, C], the target's output rows
        table = rope_table(
            settings.max_length + settings.unroll, c.head_dim, c.rope_theta, c.rope_scaling
        )
        self.register_buffer("table", table.to(rows.device), persistent=False)
        known = torch.zeros(c.vocab_size, dtype=torch.bool, device=rows.device)
        known[head.target_ids] = True
        self.register_buffer("known", known, persistent=False)

    def levels(self, batch: Batch, levels: int, noise: Tensor | None = None) -> Iterator[Tensor]:
        """The head's hidden states [B * T, C] of level after level, fed as drafting feeds them."""
        count, length = batch.ids.shape
        features = [x.flatten(0, 1) for x in batch.features]
        if noise is not None:
            features = [
                x + noise_part
                for x, noise_part in zip(
                    features, noise.split([x.shape[1] for x in features], 1), strict=True
                )
            ]
        hidden, memory = self.head.fuse(features), []
        mask = torch.ones(length, length, dtype=torch.bool, device=batch.ids.device).tril()
        for level in range(levels):
            rope = self.table[:, level : level + length].repeat(1, count, 1)
            tokens = ahead(batch.ids, level + 1).flatten()
            hidden = self.head(tokens, hidden, Place(rope, None, mask), memory)
            yield hidden

    def forward(
        self, batch: Batch, levels: int, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The loss, and a table [levels, 4]: counted entries, right guesses, cross-entropy and
        feature loss."""
        loss, table = 0.0, []
        for level, hidden in enumerate(self.levels(batch, levels, noise)):
            at = batch.counted(level).flatten()
            wanted = ahead(batch.final, level + 1).flatten(0, 1)[at]
            choice = ahead(batch.choice, level + 1).flatten()[at]
            ce, feature, right = self.level_loss(hidden[at], wanted, choice)
            loss = loss + self.settings.level_decay**level * (
                ce + self.settings.feature_weight * feature
            )
            table.append(
                torch.stack(
                    (at.sum().float(), right, ce.detach().float(), feature.detach().float())
                )
            )
        return loss, torch.stack(table)

    def level_loss(
        self, hidden: Tensor, wanted: Tensor, choice: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Soft cross-entropy over the draft vocabulary, feature loss, number of right guesses."""
        if not hidden.shape[0]:
            zero = hidden.sum() * 0
            return zero, zero, zero.detach().float()
        logits = self.head.logits(hidden).float()
        teacher = F.linear(wanted.to(self.rows.dtype), self.rows).float().softmax(-1)
        ce = -(teacher * logits.log_softmax(-1)).sum(-1)
        # Where the target's choice is outside the draft vocabulary, the rest of its distribution is
        # noise.
        known = self.known[choice]
        ce = (ce * known).sum() / known.sum().clamp(min=1)
        feature = (
            F.smooth_l1_loss(hidden.float(), wanted.float())
            if self.head.config.family == "eagle1"
            else ce * 0
        )
        right = (self.head.target_ids[logits.argmax(-1)] == choice).sum().float()
        return ce, feature, right


# --- the teacher ----------------------------------------------------------------------------------


class Teacher:
    """The target's features and choices for whole conversations, one at a time, by the forward that
    decodes.

    One conversation a forward keeps its numbers independent of its neighbours, so a resumed run
    meets the same ones. What fits in `cache_bytes` is kept for the next epoch.
    """

    def __init__(
        self,
        model: Transformer,
        family: str,
        layers: tuple[int, ...] | None,
        rows: int,
        cache_bytes: int,
    ) -> None:
        self.model, self.layers = model, layers or ()
        self.family, c, weight = family, model.config, model.norm.weight
        self.kv = KVCache(c.n_layer, c.n_kv_head, rows, c.head_dim, weight.dtype).to(weight.device)
        self.table = rope_table(rows, c.head_dim, c.rope_theta, c.rope_scaling).to(weight.device)
        self.slots = torch.arange(rows, device=weight.device)
        self.start = torch.zeros(1, dtype=torch.int64, device=weight.device)
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.room = cache_bytes

    @torch.no_grad()
    def run(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Features [T, levels * C + C], the state after the final norm last, and choices int64
        [T]."""
        rows, model = len(ids), self.model
        slots = self.slots[:rows]
        mask = causal_mask(self.start, rows, slots)
        tokens, place = (
            torch.tensor(ids, device=slots.device),
            Place(self.table[:, :rows], slots, mask),
        )
        final, features = model(tokens, place, self.kv, self.layers)
        captured = features if self.layers else []
        return torch.cat((*captured, final), dim=-1), model.output(final).max(-1).indices

    def __call__(self, number: int, ids: list[int]) -> tuple[Tensor, Tensor]:
        if number in self.cache:
            return self.cache[number]
        features, choice = self.run(ids)
        size = features.numel() * features.element_size() + choice.numel() * 8
        if size <= self.room:
            self.room -= size
            self.cache[number] = features, choice
        return features, choice

    def batch(self, numbers: list[int], data: list[Conversation]) -> Batch:
        """The conversations `numbers` of `data`, padded to the longest."""
        length, device = max(len(data[n].ids) for n in numbers), self.slots.device
        ids = torch.zeros(len(numbers), length, dtype=torch.int64)
        answer = torch.zeros(len(numbers), length, dtype=torch.bool)
        parts = [self(n, data[n].ids) for n in numbers]
        for row, n in enumerate(numbers):
            ids[row, : len(data[n].ids)] = torch.tensor(data[n].ids)
            for start, end in data[n].spans:
                answer[row, start:end] = True
        features = nn.utils.rnn.pad_sequence([f for f, _ in parts], batch_first=True)
        choice = nn.utils.rnn.pad_sequence([c for _, c in parts], batch_first=True)
        *captured, final = features.split(self.model.config.dim, dim=-1)
        read = captured if self.family == "eagle3" else [final]
        return Batch(ids.to(device), answer.to(device), read, final, choice)


def scale_inputs(
    head: DraftHead, teacher: Teacher, data: list[Conversation], sample: int = 16
) -> None:
    """Measure the usual size of fc's inputs on a few conversations; the first token's, which is
    huge, left out."""
    rows = random.Random(0).sample(range(len(data)), min(sample, len(data)))
    squares, count = 0.0, 0
    for n in rows:
        features, _ = teacher(n, data[n].ids)
        *captured, final = features[1:].float().split(teacher.model.config.dim, dim=-1)
        read = captured
        if head.config.family == "eagle1":
            read = [
                teacher.model.tok_embeddings.weight[
                    torch.tensor(data[n].ids[1:], device=final.device)
                ].float(),
                final,
            ]
        squares = squares + torch.cat(read, dim=-1).square().sum(0)
        count += len(final)
    scale = (squares / max(count, 1)).sqrt().clamp(min=1e-3)
    parametrize.register_parametrization(head.fc, "weight", ColumnScale(scale))
