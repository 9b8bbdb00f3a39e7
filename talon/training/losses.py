"""The head as it is trained, its losses, and the teacher's side of them.

The teacher is the target itself, run by the code that decodes. The head is the DraftHead that
decodes: only its attention is another, one that unrolls the levels of drafting over whole
conversations (training-time test, EAGLE-3, arXiv 2503.01840, section 3.2; used here for EAGLE-1
heads too). Leaves out: data (conversations.py, self_talk.py), the run and its files (run.py).
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pad_sequence

from eagle_draft import DraftConfig, DraftHead
from model import Attention, KVCache, Place, Transformer, rope_table, rotate
from talon.checking import forwards
from talon.training.conversations import Conversation


@dataclass(frozen=True)
class TrainingConfig:
    """What decides the numbers of a run: all of it must be the same to resume one."""

    head: str = "eagle1"
    draft_vocab_size: int | None = None
    init: str | None = None
    max_length: int = 2048
    validation: float = 0.02
    epochs: int = 3
    batch_tokens: int = 512
    lr: float = 1.5e-3
    warmup: float = 0.04
    unroll: int = 3
    unroll_from: float = 0.5
    feature_weight: float = 1.0
    seed: int = 0
    dtype: str = "fp32"
    # Constants of the recipe, which no flag changes.
    level_decay: float = 0.8  # weight of a level against the one before
    feature_noise: float = 0.5  # in units of the features' usual size


class UnrolledAttention(Attention):
    """The head's attention over B sequences of T entries, level after level of drafting.

    At the first level an entry sees its predecessors and itself. An entry of a later level stands
    for a drafted node: it sees the same true entries and its own ancestors, which are the entries
    of the same position at the earlier levels. `kv` is the list of the levels' keys and values;
    this call appends its own."""

    def forward(self, x: Tensor, place: Place, kv: list, residual: Tensor) -> Tensor:
        """x: [B * T, in_dim]; place: rope [2, B * T, D], no slots, and mask bool [T, T], causal."""
        rope, _, mask = place
        length = mask.shape[0]
        heads, groups, size = self.n_head, self.n_kv_head, self.head_dim
        q, k, v = self.project(x)
        # [B, G, H/G, T, D] for queries, [B, G, T, D] for keys and values
        q = rotate(q, rope).view(-1, length, groups, heads // groups, size).permute(0, 2, 3, 1, 4)
        k = rotate(k, rope).view(-1, length, groups, size).transpose(1, 2)
        v = v.view(-1, length, groups, size).transpose(1, 2)
        kv.append((k, v))
        keys, values = kv[0]
        scores = (q @ keys[:, :, None].transpose(-1, -2)).float().masked_fill(~mask, float("-inf"))
        own = [(q * key[:, :, None]).sum(-1, keepdim=True).float() for key, _ in kv[1:]]
        weights = (torch.cat((scores, *own), dim=-1) * size**-0.5).softmax(-1).to(v.dtype)
        y = weights[..., :length] @ values[:, :, None]
        for level, (_, value) in enumerate(kv[1:]):
            y = y + weights[..., length + level, None] * value[:, :, None]
        return residual + self.wo(y.permute(0, 3, 1, 2, 4).reshape(x.shape[0], heads * size))


class ColumnScale(nn.Module):
    """fc sees every input in units of its usual size; folded into the weight when it is written."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, weight: Tensor) -> Tensor:
        return weight / self.scale

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight * self.scale


class Batch(NamedTuple):
    """B conversations, padded at the end.

    What entry i of a conversation learns at level s (0 is the first): its token is i+1+s, its
    position i+s, and what it has to guess is the target's choice after that token."""

    ids: Tensor  # int64 [B, T]
    answer: Tensor  # bool [B, T], the token belongs to an answer
    features: list[Tensor]  # [B, T, C] each: what the head reads
    final: Tensor  # [B, T, C], after the target's final norm
    choice: Tensor  # int64 [B, T], the target's choice after each token

    def counted(self, level: int) -> Tensor:
        """bool [B, T]: entries whose guess is an answer token. The mask moves with its labels."""
        return ahead(self.answer, level + 2)


def ahead(x: Tensor, by: int) -> Tensor:
    """x moved `by` places to the left along dimension 1; zeros come in."""
    return torch.cat((x[:, by:], torch.zeros_like(x[:, :by])), dim=1)


class Unrolled(nn.Module):
    """The head with its training losses. The forward is one batch; DDP wraps this."""

    def __init__(self, head: DraftHead, target_output: Tensor, config: TrainingConfig) -> None:
        """target_output: [Vd, C], the target's lm_head for the draft vocabulary."""
        super().__init__()
        self.head, self.config, c = head, config, head.config
        length, device, table = config.max_length + config.unroll, target_output.device, None
        if c.family != "medusa":
            table = rope_table(length, c.head_dim, c.rope_theta, c.rope_scaling).to(device)
        known = torch.zeros(c.vocab_size, dtype=torch.bool, device=device)
        known[head.target_ids] = True
        self.register_buffer("target_output", target_output, persistent=False)
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("known", known, persistent=False)

    def levels(self, batch: Batch, levels: int, noise: Tensor | None = None) -> Iterator[Tensor]:
        """The head's hidden states [B * T, C] of level after level, fed as drafting feeds them. A
        level of Medusa is a head, and all read the same."""
        count, length = batch.ids.shape
        features = [x.flatten(0, 1) for x in batch.features]
        if self.head.config.family == "medusa":
            yield from self.head(features[0].to(self.head.blocks[0][0].bias.dtype))[:levels]
            return
        if noise is not None:
            parts = noise.chunk(len(features), dim=1)
            features = [x + part for x, part in zip(features, parts, strict=True)]
        hidden, memory = self.head.fuse(features), []
        mask = torch.ones(length, length, dtype=torch.bool, device=batch.ids.device).tril()
        for level in range(levels):
            rope = self.table[:, level : level + length].repeat(1, count, 1)
            tokens = ahead(batch.ids, level + 1).flatten()
            hidden = self.head(tokens, hidden, Place(rope, None, mask), memory)
            yield hidden

    def teach(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The target's distributions over the draft vocabulary, fp32 [n, Vd], once for all levels;
        int64 [B, T]: in which row that of the state at each position is, if an answer follows."""
        used, output = ahead(batch.answer, 1), self.target_output
        teacher = F.linear(batch.final[used].to(output.dtype), output).float().softmax(-1)
        return teacher, used.flatten().cumsum(0).view_as(batch.ids) - 1

    def forward(
        self, batch: Batch, levels: int, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The loss, and a table [levels, 4] of sums over the counted entries: their number, right
        guesses, cross-entropy and feature loss."""
        loss, table = 0.0, []
        teacher, rows = self.teach(batch)
        for level, hidden in enumerate(self.levels(batch, levels, noise)):
            at = batch.counted(level).flatten()
            wanted = ahead(batch.final, level + 1).flatten(0, 1)[at]
            choice = ahead(batch.choice, level + 1).flatten()[at]
            probabilities = teacher[ahead(rows, level + 1).flatten()[at]]
            ce, feature, right = self.level_loss(hidden[at], wanted, probabilities, choice)
            weight = self.config.level_decay**level
            loss = loss + weight * (ce + self.config.feature_weight * feature)
            count = at.sum().float()
            table.append(torch.stack((count, right, ce.detach() * count, feature.detach() * count)))
        return loss, torch.stack(table)

    def level_loss(
        self, hidden: Tensor, wanted: Tensor, teacher: Tensor, choice: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Soft cross-entropy over the draft vocabulary, feature loss, number of right guesses."""
        if not hidden.shape[0]:
            zero = hidden.sum() * 0
            return zero, zero, zero.detach().float()
        logits = self.head.logits(hidden).float()
        ce = -(teacher * logits.log_softmax(-1)).sum(-1)
        # Where the choice is outside the draft vocabulary, the rest of the distribution is noise.
        known = self.known[choice]
        ce = (ce * known).sum() / known.sum().clamp(min=1)
        feature = ce * 0
        if self.head.config.family == "eagle1":
            feature = F.smooth_l1_loss(hidden.float(), wanted.float())
        right = (self.head.target_ids[logits.argmax(-1)] == choice).sum().float()
        return ce, feature, right


# ---------------------------------------------------------------- the teacher


def read_by_head(features: Tensor, dim: int) -> tuple[list[Tensor], Tensor]:
    """What the head reads of what Teacher.run gives, and the state after the final norm."""
    *captured, final = features.split(dim, dim=-1)
    return captured or [final], final


class Teacher:
    """The target's features and choices for whole conversations, by the forward that decodes.

    One conversation a forward keeps its numbers independent of its neighbours, so a resumed run
    meets the same ones. What fits in `cache_bytes` is kept for the next epoch."""

    def __init__(
        self, model: Transformer, head: DraftConfig, length: int, cache_bytes: int = 0
    ) -> None:
        """length: tokens of the longest conversation."""
        self.model, self.head, c, weight = model, head, model.config, model.norm.weight
        kv = KVCache(c.n_layer, c.n_kv_head, length, c.head_dim, weight.dtype)
        self.kv = kv.to(weight.device)
        self.table = rope_table(length, c.head_dim, c.rope_theta, c.rope_scaling).to(weight.device)
        self.cache: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self.cache_room = cache_bytes

    @torch.no_grad()
    def run(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Features [T, levels * C + C], the one after the final norm last; choices int64 [T]."""
        parts, layers = [], self.head.feature_layers or ()
        for final, features in forwards(self.model, ids, self.kv, self.table, layers):
            read = torch.cat((*features, final), dim=-1) if layers else final
            parts.append((read, self.model.output(final).max(-1).indices))
        read, choice = map(torch.cat, zip(*parts, strict=True))
        return read, choice

    def __call__(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """`run`, or what it gave for these ids before."""
        key = tuple(ids)
        if key in self.cache:
            return self.cache[key]
        result = self.run(ids)
        size = sum(x.numel() * x.element_size() for x in result)
        if size <= self.cache_room:
            self.cache_room -= size
            self.cache[key] = result
        return result

    def batch(self, data: list[Conversation]) -> Batch:
        """Some conversations, padded to the longest."""
        device = self.table.device
        ids = pad_sequence([torch.tensor(row.ids) for row in data], batch_first=True)
        answer = torch.zeros_like(ids, dtype=torch.bool)
        for index, row in enumerate(data):
            for start, end in row.spans:
                answer[index, start:end] = True
        parts = [self(row.ids) for row in data]
        features, choice = (pad_sequence(part, True) for part in zip(*parts, strict=True))
        read, final = read_by_head(features, self.head.target_dim)
        return Batch(ids.to(device), answer.to(device), read, final, choice)


def scale_inputs(
    head: DraftHead, teacher: Teacher, data: list[Conversation], sample: int = 16
) -> None:
    """Measure the usual size of fc's inputs on a few texts, but for the first token's huge ones."""
    squares, count = 0.0, 0
    for row in random.Random(0).sample(data, min(sample, len(data))):
        read, final = read_by_head(teacher(row.ids)[0][1:].float(), head.config.target_dim)
        if head.config.family == "eagle1":
            tokens = torch.tensor(row.ids[1:], device=final.device)
            read = [teacher.model.tok_embeddings(tokens).float(), final]
        squares = squares + torch.cat(read, dim=-1).square().sum(0)
        count += len(final)
    scale = (squares / max(count, 1)).sqrt().clamp(min=1e-3)
    parametrize.register_parametrization(head.fc, "weight", ColumnScale(scale))
