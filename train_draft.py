"""Train a draft head for a target, in process and from nothing but the target.

The teacher is the target itself, run by the code that decodes (its features are captured where decoding captures
them), and the head is the DraftHead that decodes: only its attention is another, one that sees many rows at once and
unrolls several levels, as drafting does (training-time test, EAGLE-3, arXiv 2503.01840, section 3.2; used here for
EAGLE-1 heads too). Everything random follows from --seed and the step's number, so a resumed run repeats itself.

Leaves out: making the data (draft_data.py), decoding (engine.py), training the target.

    python train_draft.py --checkpoint_path F --head eagle1 --data self --out DIR
    torchrun --nproc_per_node 2 train_draft.py ...
"""

import argparse
import json
import math
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from tqdm import tqdm

import cli
from checkpoint import TensorSpec, atomic_file, read_checkpoint, write_checkpoint
from draft_data import Conversation, Recipe, prepare_data
from eagle_draft import DraftConfig, DraftHead, default_feature_layers
from generate import find_tokenizer, fit_head, load_target, note, pick_device, read_kind, rows_of
from model import Attention, KVCache, ModelConfig, Transformer, causal_mask, rope_table, rotate
from tokenizer import Tokenizer

HEAD_FILE, STATE_FILE, LOG_FILE, PLOT_FILE = "talon_draft.safetensors", "train_state.pt", "log.jsonl", "training.png"
RANK_PRIOR = 30000  # weight of a token's rank against its count when the draft vocabulary is chosen
LENGTH_POOL = 32  # batches that are sorted by length together, so that little padding is computed


# --- the head, unrolled ---------------------------------------------------------------------------


class UnrolledAttention(Attention):
    """The head's attention over B sequences of T entries, level after level of drafting.

    At the first level an entry sees its predecessors and itself. An entry of a later level stands for a drafted
    node: it sees the same true entries and, besides, its own ancestors, which are the entries of the same row at
    the earlier levels. `kv` is the list of the levels' keys and values; this call appends its own.
    """

    def forward(self, x: Tensor, rope: Tensor, slots: Tensor, mask: Tensor, kv: list) -> Tensor:
        """x: [B * T, in_dim]; rope: [2, B * T, D]; slots: unused; mask: bool [T, T], causal."""
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
    """fc sees every input in units of that input's usual size. Folded into the weight when the head is written."""

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
    its token is i+1+s, its position i+s, and what it has to guess is the target's choice after that token."""

    ids: Tensor  # int64 [B, T]
    answer: Tensor  # bool [B, T], the token belongs to an answer
    features: list[Tensor]  # [B, T, C] each: what the head reads
    final: Tensor  # [B, T, C], after the target's final norm
    choice: Tensor  # int64 [B, T], the target's choice after each token

    def counted(self, level: int) -> Tensor:
        """bool [B, T]: entries whose guess is an answer token. The mask moves along with its labels."""
        return ahead(self.answer, level + 2)


def ahead(x: Tensor, by: int) -> Tensor:
    """x moved `by` places to the left along dimension 1; zeros come in."""
    return torch.cat((x[:, by:], torch.zeros_like(x[:, :by])), dim=1)


class Unrolled(nn.Module):
    """The head with its training losses. The forward is one batch; DDP wraps this."""

    def __init__(self, head: DraftHead, rows: Tensor, settings: "Settings") -> None:
        super().__init__()
        self.head, self.settings = head, settings
        c = head.config
        self.register_buffer("rows", rows, persistent=False)  # [Vd, C], the target's output rows
        table = rope_table(settings.max_length + settings.unroll, c.head_dim, c.rope_theta, c.rope_scaling)
        self.register_buffer("table", table.to(rows.device), persistent=False)
        known = torch.zeros(c.vocab_size, dtype=torch.bool, device=rows.device)
        known[head.target_ids] = True
        self.register_buffer("known", known, persistent=False)

    def levels(self, batch: Batch, levels: int, noise: Tensor | None = None) -> Iterator[Tensor]:
        """The head's hidden states [B * T, C] of level after level, fed as drafting feeds them."""
        count, length = batch.ids.shape
        features = [x.flatten(0, 1) for x in batch.features]
        if noise is not None:
            features = [x + noise_part for x, noise_part in zip(features, noise.split([x.shape[1] for x in features], 1), strict=True)]
        hidden, memory = self.head.fuse(features), []
        mask = torch.ones(length, length, dtype=torch.bool, device=batch.ids.device).tril()
        for level in range(levels):
            rope = self.table[:, level : level + length].repeat(1, count, 1)
            tokens = ahead(batch.ids, level + 1).flatten()
            hidden = self.head(tokens, hidden, rope, None, mask, memory)
            yield hidden

    def forward(self, batch: Batch, levels: int, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The loss, and a table [levels, 4]: counted entries, right guesses, cross-entropy and feature loss."""
        loss, table = 0.0, []
        for level, hidden in enumerate(self.levels(batch, levels, noise)):
            at = batch.counted(level).flatten()
            wanted = ahead(batch.final, level + 1).flatten(0, 1)[at]
            choice = ahead(batch.choice, level + 1).flatten()[at]
            ce, feature, right = self.level_loss(hidden[at], wanted, choice)
            loss = loss + self.settings.level_decay**level * (ce + self.settings.feature_weight * feature)
            table.append(torch.stack((at.sum().float(), right, ce.detach().float(), feature.detach().float())))
        return loss, torch.stack(table)

    def level_loss(self, hidden: Tensor, wanted: Tensor, choice: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Soft cross-entropy over the draft vocabulary, feature loss, number of right guesses."""
        if not hidden.shape[0]:
            zero = hidden.sum() * 0
            return zero, zero, zero.detach().float()
        logits = self.head.logits(hidden).float()
        teacher = F.linear(wanted.to(self.rows.dtype), self.rows).float().softmax(-1)
        ce = -(teacher * logits.log_softmax(-1)).sum(-1)
        # Where the target's choice is outside the draft vocabulary, the rest of its distribution is noise.
        known = self.known[choice]
        ce = (ce * known).sum() / known.sum().clamp(min=1)
        feature = F.smooth_l1_loss(hidden.float(), wanted.float()) if self.head.config.family == "eagle1" else ce * 0
        right = (self.head.target_ids[logits.argmax(-1)] == choice).sum().float()
        return ce, feature, right


# --- the teacher ----------------------------------------------------------------------------------


class Teacher:
    """The target's features and choices for whole conversations, one at a time, by the forward that decodes.

    One conversation a forward keeps its numbers independent of its neighbours, so a resumed run meets the same ones.
    What fits in `cache_bytes` is kept for the next epoch.
    """

    def __init__(self, model: Transformer, family: str, layers: tuple[int, ...] | None, rows: int, cache_bytes: int) -> None:
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
        """Features [T, levels * C + C], the state after the final norm last, and choices int64 [T]."""
        rows, model = len(ids), self.model
        slots = self.slots[:rows]
        mask = causal_mask(self.start, rows, slots)
        x = model.tok_embeddings(torch.tensor(ids, device=slots.device))
        x, captured = model(x, self.table[:, :rows], slots, mask, self.kv, self.layers)
        final = model.norm(x)
        return torch.cat((*captured, final), dim=-1), model.output(final).argmax(-1)

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


# --- settings, head and batches -------------------------------------------------------------------


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


def draft_vocabulary(data: list[Conversation], vocab_size: int, size: int) -> Tensor:
    """The `size` ids the head may guess, ascending int64: frequent in the answers, or low in the tokenizer's own
    order, which for BPE is an order of frequency and fills up what little data leaves open."""
    counts: Counter[int] = Counter()
    for row in data:
        for start, end in row.spans:
            counts.update(row.ids[start:end])
    weight = [counts[i] + RANK_PRIOR / (i + 300) for i in range(vocab_size)]
    return torch.tensor(sorted(sorted(range(vocab_size), key=lambda i: -weight[i])[:size]))


def head_config(target: ModelConfig, settings: Settings) -> DraftConfig:
    """A head of the target's own sizes; layers and RoPE as decoding finds them."""
    t, eagle3 = target, settings.head == "eagle3"
    size = settings.draft_vocab_size or (t.vocab_size if t.vocab_size <= 32768 else 32000)
    if not 1 <= size <= t.vocab_size:
        raise ValueError(f"draft_vocab_size {size} is not allowed: give 1 to {t.vocab_size}, the target's vocabulary")
    return DraftConfig(
        family=settings.head, dim=t.dim, n_head=t.n_head, n_kv_head=t.n_kv_head, head_dim=t.head_dim,
        intermediate_size=t.intermediate_size, norm_eps=t.norm_eps, vocab_size=t.vocab_size,
        draft_vocab_size=size, target_dim=t.dim, max_seq_length=t.max_seq_length, rope_theta=t.rope_theta,
        rope_scaling=t.rope_scaling, rope_source="the target's, by training",
        feature_layers=default_feature_layers(t.n_layer) if eagle3 else None, own_output=eagle3,
    )  # fmt: skip


def build_head(config: DraftConfig, model: Transformer, ids: Tensor, settings: Settings) -> DraftHead:
    """A fresh head in fp32 that at first repeats the newest feature: fc passes it on, the layer adds little."""
    generator = torch.Generator().manual_seed(settings.seed)
    head = DraftHead(config)
    c, old, device = config, head.layer.attention, model.norm.weight.device
    head.layer.attention = UnrolledAttention(
        old.wqkv.in_features, c.dim, c.n_head, c.n_kv_head, c.head_dim, c.qkv_bias, c.o_bias
    )
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02, generator=generator)
        head.fc.weight[:, -c.dim :] += torch.eye(c.dim)
        if c.family == "eagle3":
            head.norm.weight.copy_(model.norm.weight)
            head.output.weight.copy_(rows_of(model.output, ids.to(device)).weight)
    head.d2t.copy_(ids - torch.arange(len(ids)))
    return head.to(device)


def borrow(head: DraftHead, model: Transformer) -> Tensor:
    """Give the head what it shares with the target, frozen; returns the target's output rows [Vd, C]."""
    shared = rows_of(model.output, head.target_ids)
    head.tok_embeddings = model.tok_embeddings.requires_grad_(False)
    if not head.config.own_output:
        head.output = shared.requires_grad_(False)
    return shared.weight.detach()


def own_state(head: DraftHead) -> dict[str, Tensor]:
    """The head's own tensors, the scale folded into fc, without what it borrows."""
    state = {name: value for name, value in head.state_dict().items() if not name.startswith("tok_embeddings.")}
    if not head.config.own_output:
        del state["output.weight"]
    state = {name: value for name, value in state.items() if ".parametrizations." not in f".{name}"}
    state["fc.weight"] = head.fc.weight
    if head.config.draft_vocab_size == head.config.vocab_size:
        del state["d2t"]
    return {name: value.detach().cpu().contiguous() for name, value in state.items()}


def write_head(path: Path, head: DraftHead, source: dict, dtype: torch.dtype = torch.float32) -> None:
    """The head as generate.py loads it."""
    state = {n: v.to(dtype) if v.is_floating_point() else v for n, v in own_state(head).items()}
    specs = {name: TensorSpec(value.dtype, tuple(value.shape)) for name, value in state.items()}
    write_checkpoint(path, kind="draft", config=asdict(head.config), specs=specs, tensors=state.items(), source=source)


def read_head(path: Path, model: Transformer, settings: Settings, ids: Tensor | None) -> DraftHead:
    """A head to go on from. Its draft vocabulary stays, unless it borrows its output and another one is asked for."""
    file = read_kind(path, "draft")
    config = fit_head(file, model.config)
    if config.family != settings.head:
        raise ValueError(f"{path} is an {config.family} head, not {settings.head}: give --head {config.family}")
    if file.quantization:
        raise ValueError(f"{path} is quantised and cannot be trained: give the head it was made from")
    kept = file.tensor("d2t") if "d2t" in file.specs else torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    kept = kept + torch.arange(config.draft_vocab_size)
    if ids is None or config.own_output:
        ids = kept
    head = build_head(replace(config, draft_vocab_size=len(ids)), model, ids, settings)
    loaded = {name: value.float() for name, value in file.tensors() if name != "d2t"}
    missing, unexpected = head.load_state_dict(loaded, strict=False)
    missing = [name for name in missing if name not in ("d2t", "output.weight" * (not config.own_output))]
    if missing or unexpected:
        raise ValueError(f"{path} does not fit its own config ({[*missing, *unexpected][:3]}): convert it again")
    return head


def plan(data: list[Conversation], settings: Settings, epoch: int) -> list[list[int]]:
    """The epoch's batches as lists of conversation numbers, about `batch_tokens` answer tokens each."""
    rng = random.Random(f"{settings.seed}/{epoch}")
    order = list(range(len(data)))
    rng.shuffle(order)
    per_batch = max(1, round(settings.batch_tokens * len(data) / sum(row.answer_tokens for row in data)))
    pool = per_batch * LENGTH_POOL
    batches = []
    for start in range(0, len(order), pool):
        part = sorted(order[start : start + pool], key=lambda n: len(data[n].ids))
        batches += [part[i : i + per_batch] for i in range(0, len(part), per_batch)]
    rng.shuffle(batches)
    return batches


# --- the run --------------------------------------------------------------------------------------


class Run:
    """A training under way: what it steps on, and what it writes."""

    def __init__(
        self, model: Transformer, head: DraftHead, data: list[Conversation], settings: Settings, out: Path,
        source: dict, cache_bytes: int, rank: int = 0, world: int = 1,
    ) -> None:  # fmt: skip
        self.model, self.head, self.settings, self.out, self.source = model, head, settings, out, source
        self.rank, self.world, self.device = rank, world, model.norm.weight.device
        held = max(1, round(len(data) * settings.validation)) if len(data) > 1 and settings.validation else 0
        self.data, self.held = data[held:], data[:held]
        layers = head.config.feature_layers
        self.teacher = Teacher(model, head.config.family, layers, settings.max_length, cache_bytes)
        self.judge = Teacher(model, head.config.family, layers, settings.max_length, 0)
        scale_inputs(head, self.teacher, self.data)
        self.unrolled = Unrolled(head, borrow(head, model), settings).to(self.device)
        self.parallel = self.unrolled
        if world > 1:
            self.parallel = nn.parallel.DistributedDataParallel(self.unrolled, find_unused_parameters=True)
        self.trained = [p for p in head.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.steps_per_epoch = len(plan(self.data, settings, 0)) // world
        self.total = settings.epochs * self.steps_per_epoch
        self.step, self.tokens, self.stopping = 0, 0, False
        self.started = time.process_time()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.dtype == "bf16")

    def lr(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a twentieth."""
        warm = max(1, round(self.settings.warmup * self.total))
        if step < warm:
            return self.settings.lr * (step + 1) / warm
        done = (step - warm) / max(1, self.total - warm)
        return self.settings.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))

    def levels(self, step: int) -> int:
        """One level at first, which is cheap, then all of them, which is what drafting needs."""
        return self.settings.unroll if step >= self.settings.unroll_from * self.total else 1

    def noise(self, batch: Batch, step: int) -> Tensor | None:
        """Uniform noise on the features: a drafted feature is never exact, and too little data is soon learnt by heart."""
        if not self.settings.feature_noise:
            return None
        generator = torch.Generator().manual_seed((self.settings.seed << 32) + step * self.world + self.rank)
        width = sum(x.shape[-1] for x in batch.features)
        noise = torch.rand(batch.ids.numel(), width, generator=generator).sub_(0.5).mul_(2)
        return noise.to(self.device) * self.scale * self.settings.feature_noise

    @property
    def scale(self) -> Tensor:
        scale = self.head.fc.parametrizations.weight[0].scale
        return scale[-self.head.config.dim :] if self.head.config.family == "eagle1" else scale

    def numbers(self, step: int) -> list[int]:
        epoch, index = divmod(step, self.steps_per_epoch)
        if getattr(self, "planned", (None,))[0] != epoch:
            self.planned = epoch, plan(self.data, self.settings, epoch)
        return self.planned[1][index * self.world + self.rank]

    def train_step(self) -> dict:
        """One update. ValueError, before anything is changed, if the loss is not a number."""
        step, levels = self.step, self.levels(self.step)
        batch = self.teacher.batch(self.numbers(step), self.data)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr(step)
        with self.autocast():
            loss, table = self.parallel(batch, levels, self.noise(batch, step))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.trained, 1.0)
        if not math.isfinite(float(loss.detach()) + float(norm)):
            raise ValueError(
                f"the loss is not finite at step {step} (loss {float(loss.detach())}, gradient {float(norm)}): the last "
                f"checkpoint in {self.out} is intact; lower --lr, or try --dtype fp32 and check the data"
            )
        self.optimizer.step()
        self.step += 1
        counted = table[:, 0].clamp(min=1)
        self.tokens += int(table[0, 0]) * self.world
        return {
            "step": self.step, "tokens": self.tokens, "lr": self.lr(step), "levels": levels,
            "loss": float(loss.detach()), "accuracy": (table[:, 1] / counted).tolist(),
            "cross_entropy": table[:, 2].tolist(), "feature_loss": table[:, 3].tolist(),
        }  # fmt: skip

    @torch.no_grad()
    def validate(self) -> dict:
        """Accuracy at every level on conversations that are never trained on."""
        total = torch.zeros(self.settings.unroll, 4)
        for start in range(0, len(self.held), 4):
            batch = self.judge.batch(list(range(start, min(start + 4, len(self.held)))), self.held)
            with self.autocast():
                _, table = self.unrolled(batch, self.settings.unroll)
            weight = torch.cat((torch.ones(len(table), 2), table[:, :1].cpu().expand(-1, 2)), 1)
            total += table.cpu() * weight
        count = total[:, 0].clamp(min=1)
        return {
            "step": self.step, "tokens": self.tokens,
            "validation_accuracy": (total[:, 1] / count).tolist(),
            "validation_cross_entropy": (total[:, 2] / count).tolist(),
            "validation_tokens": int(total[0, 0]),
        }  # fmt: skip

    def log(self, entry: dict) -> None:
        entry["cpu_s"] = round(time.process_time() - self.started, 1)
        if self.rank == 0:
            with (self.out / LOG_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(rounded(entry)) + "\n")

    def save(self) -> None:
        """The head, and what --resume needs; each file appears whole or not at all."""
        if self.rank:
            return
        write_head(self.out / HEAD_FILE, self.head, self.source | {"step": self.step, "tokens": self.tokens})
        trained = {n: p.detach() for n, p in self.head.named_parameters() if p.requires_grad}
        state = {
            "settings": asdict(self.settings), "source": self.source, "step": self.step, "tokens": self.tokens,
            "data": data_mark(self.data + self.held), "head": trained, "optimizer": self.optimizer.state_dict(),
            "cpu_s": time.process_time() - self.started,
        }  # fmt: skip
        with atomic_file(self.out / STATE_FILE) as file:
            torch.save(state, file)

    def restore(self) -> None:
        """Go on where `save` was called last. ValueError if anything that decides the numbers has changed."""
        path = self.out / STATE_FILE
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
        except FileNotFoundError:
            raise ValueError(f"{path} does not exist: start without --resume") from None
        except Exception as error:  # torch raises many kinds for a damaged file
            raise ValueError(f"{path} cannot be read ({type(error).__name__}): start without --resume") from None
        now = asdict(self.settings) | {"data": data_mark(self.data + self.held), "target": self.source["target"]}
        was = state["settings"] | {"data": state["data"], "target": state["source"]["target"]}
        changed = [name for name in now if now[name] != was.get(name)]
        if changed:
            raise ValueError(
                f"{path} was made with another {', '.join(changed)} ({was.get(changed[0])}, now {now[changed[0]]}): "
                "give the same options and data, or use --init to start from the head alone"
            )
        own = dict(self.head.named_parameters())
        with torch.no_grad():
            for name, value in state["head"].items():
                own[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens = state["step"], state["tokens"]
        self.started = time.process_time() - state["cpu_s"]
        trim_log(self.out / LOG_FILE, self.step)

    def go(self, log_every: int, validate_every: int, save_every: int) -> None:
        """Train to the end, or until Ctrl-C, which saves first."""
        bar = tqdm(total=self.total, initial=self.step, unit="step", disable=self.rank > 0)
        previous = signal.signal(signal.SIGINT, self.ask_to_stop)
        recent: list[dict] = []
        try:
            while self.step < self.total and not self.stopping:
                recent.append(self.train_step())
                bar.update()
                bar.set_postfix(loss=f"{recent[-1]['loss']:.2f}", accuracy=f"{recent[-1]['accuracy'][0]:.3f}", refresh=False)
                if self.step % log_every == 0 or self.step == self.total:
                    self.log(averaged(recent))
                    recent = []
                if self.held and (self.step % validate_every == 0 or self.step == self.total):
                    self.log(self.validate())
                if self.step % save_every == 0 or self.step == self.total:
                    self.save()
        finally:
            signal.signal(signal.SIGINT, previous)
            bar.close()
        if self.stopping:
            self.save()
            raise KeyboardInterrupt

    def ask_to_stop(self, *_: object) -> None:
        """The first Ctrl-C ends the run after this step; a second one ends it at once, the last checkpoint intact."""
        if self.stopping:
            raise KeyboardInterrupt
        self.stopping = True
        note("stopping after this step; press Ctrl-C again to stop at once")


def scale_inputs(head: DraftHead, teacher: Teacher, data: list[Conversation], sample: int = 16) -> None:
    """Measure the usual size of fc's inputs on a few conversations; the first token's, which is huge, left out."""
    rows = random.Random(0).sample(range(len(data)), min(sample, len(data)))
    squares, count = 0.0, 0
    for n in rows:
        features, _ = teacher(n, data[n].ids)
        *captured, final = features[1:].float().split(teacher.model.config.dim, dim=-1)
        read = captured
        if head.config.family == "eagle1":
            read = [teacher.model.tok_embeddings.weight[torch.tensor(data[n].ids[1:], device=final.device)].float(), final]
        squares = squares + torch.cat(read, dim=-1).square().sum(0)
        count += len(final)
    scale = (squares / max(count, 1)).sqrt().clamp(min=1e-3)
    parametrize.register_parametrization(head.fc, "weight", ColumnScale(scale))


def averaged(entries: list[dict]) -> dict:
    """The last entry, its measurements averaged over all entries that have as many levels."""
    last = dict(entries[-1])
    same = [e for e in entries if e["levels"] == last["levels"]]
    last["loss"] = sum(e["loss"] for e in same) / len(same)
    for name in ("accuracy", "cross_entropy", "feature_loss"):
        last[name] = [sum(values) / len(same) for values in zip(*(e[name] for e in same), strict=True)]
    return last


def rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return {k: rounded(v) for k, v in value.items()} if isinstance(value, dict) else value


def trim_log(path: Path, step: int) -> None:
    """Drop what a run logged after its last checkpoint: it will be logged again."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if line and json.loads(line)["step"] <= step]
        with atomic_file(path) as file:
            file.write("".join(line + "\n" for line in kept).encode())


def data_mark(data: list[Conversation]) -> str:
    """Tells one data set from another, for --resume."""
    tokens = sum(len(row.ids) for row in data)
    return f"{len(data)} conversations, {tokens} tokens, ids sum {sum(sum(row.ids) for row in data)}"


def target_mark(model: Transformer) -> str:
    """Tells one target from another of the same shape."""
    c, norm = model.config, model.norm.weight.double()
    return f"{c.n_layer} layers of {c.dim}, vocabulary {c.vocab_size}, final norm {float(norm.sum()):.6f}"


def plot(out: Path) -> None:
    """Loss and accuracy against tokens seen, where matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        note("no plot: matplotlib is not installed (the numbers are in " + LOG_FILE + ")")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    entries = [json.loads(line) for line in (out / LOG_FILE).read_text(encoding="utf-8").splitlines()]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    train = [e for e in entries if "loss" in e]
    left.plot([e["tokens"] for e in train], [e["cross_entropy"][0] for e in train])
    left.set(title="cross-entropy at level 1, training", xlabel="answer tokens seen")
    held = [e for e in entries if "validation_accuracy" in e]
    for level in range(max((len(e["validation_accuracy"]) for e in held), default=0)):
        right.plot([e["tokens"] for e in held], [e["validation_accuracy"][level] for e in held], label=f"level {level + 1}")
    right.plot([e["tokens"] for e in train], [e["accuracy"][0] for e in train], alpha=0.3, label="level 1, training")
    right.set(title="right guesses, held-out", xlabel="answer tokens seen")
    right.legend()
    figure.savefig(out / PLOT_FILE, dpi=100, bbox_inches="tight", metadata={"Software": None})


# --- the command line -----------------------------------------------------------------------------


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("--checkpoint_path", type=Path, default=Path("checkpoints/SmolLM2-135M-Instruct/talon.safetensors"))
    add("--head", choices=("eagle1", "eagle3"), default="eagle1")
    add("--out", type=Path, required=True, help="directory for the head, its log and what --resume needs")
    add("--data", default="self", help="self, or a JSON lines file of conversations")
    add("--regenerate", action="store_true", help="let the target answer the user turns of --data anew")
    add("--answer_tokens", type=int, default=1_000_000, help="how many --data self or --regenerate makes")
    add("--data_batch", type=int, default=128, help="conversations that the target answers at a time")
    add("--epochs", type=int, default=3)
    add("--batch_tokens", type=int, default=1024, help="answer tokens of a step")
    add("--lr", type=float, default=1e-3)
    add("--warmup", type=float, default=0.04, help="share of the steps")
    add("--unroll", type=int, default=3, help="levels of drafting that are trained")
    add("--unroll_from", type=float, default=0.5, help="share of the steps after which they are")
    add("--level_decay", type=float, default=0.8, help="weight of a level against the one before")
    add("--feature_weight", type=float, default=1.0, help="weight of the feature loss (eagle1)")
    add("--feature_noise", type=float, default=0.5, help="noise on the features, in units of their usual size")
    add("--draft_vocab_size", type=int, help="default: the target's, at most 32000")
    add("--max_length", type=int, help="tokens of a conversation, longer ones are left out; default 2048")
    add("--validation", type=float, default=0.02, help="share of conversations held out")
    add("--device", default="auto")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the target, and autocast of the head")
    add("--cache_gib", type=float, default=2.0, help="memory for the target's features, which epochs share")
    add("--seed", type=int, default=0)
    add("--log_every", type=int, default=20)
    add("--validate_every", type=int, default=500)
    add("--save_every", type=int, default=500)
    add("--init", type=Path, help="a talon_draft.safetensors to go on from, with a new schedule")
    add("--resume", action="store_true", help="go on with the run in --out")
    return parser.parse_args(argv)


def check_args(args: argparse.Namespace, target: ModelConfig) -> Settings:
    """The settings of the run; ValueError for a value that cannot be meant."""
    limit = min(target.max_seq_length, 2048)
    args.max_length = args.max_length or limit
    allowed = {
        "epochs": (1, 10**6), "batch_tokens": (1, 10**9), "answer_tokens": (1, 10**12), "data_batch": (1, 10**4),
        "lr": (0, 1), "warmup": (0, 1), "unroll": (1, 16), "unroll_from": (0, 1), "level_decay": (0, 1),
        "feature_weight": (0, 10**6), "feature_noise": (0, 10), "max_length": (8, target.max_seq_length),
        "validation": (0, 0.5), "cache_gib": (0, 10**6), "seed": (0, 2**31 - 1), "log_every": (1, 10**9),
        "validate_every": (1, 10**9), "save_every": (1, 10**9),
    }  # fmt: skip
    for name, (low, high) in allowed.items():
        if not low <= getattr(args, name) <= high:
            raise ValueError(f"{name} {getattr(args, name)} is not allowed: give a value from {low} to {high}")
    names = set(Settings.__dataclass_fields__) - {"init"}
    return Settings(**{name: getattr(args, name) for name in names}, init=args.init.name if args.init else None)


def join_group(device: torch.device) -> tuple[int, int, torch.device]:
    """Rank, number of processes and this one's device; more than one process under torchrun."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        return 0, 1, device
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    return dist.get_rank(), world, device


def load_data(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer | None) -> list[Conversation]:
    rows = min(Recipe.rows, args.max_length)
    recipe = Recipe(args.seed, args.data_batch, min(Recipe.answer, rows // 2), rows)
    return prepare_data(
        args.data, args.out, model, tokenizer, recipe, args.answer_tokens, args.max_length, args.regenerate
    )


def prepare(args: argparse.Namespace, rank: int, world: int, device: torch.device) -> Run:
    """Load, make or read the data, and set up the run."""
    file = read_kind(args.checkpoint_path, "target")
    settings = check_args(args, ModelConfig.from_dict(file.config))
    config = head_config(ModelConfig.from_dict(file.config), settings)
    if (args.out / STATE_FILE).exists() and not args.resume:
        raise ValueError(f"{args.out} holds a run already: give --resume to go on with it, or another --out")
    args.out.mkdir(parents=True, exist_ok=True)
    model = load_target(file, device, torch.bfloat16 if args.dtype == "bf16" else torch.float32)
    model.requires_grad_(False)
    tokenizer = find_tokenizer(file.path.parent)
    data = rank == 0 and load_data(args, model, tokenizer)  # one process makes what all of them read
    if world > 1:
        dist.barrier()
    data = data or load_data(args, model, tokenizer)
    if args.init:
        wanted = args.draft_vocab_size and draft_vocabulary(data, config.vocab_size, config.draft_vocab_size)
        head = read_head(args.init, model, settings, wanted)
    else:
        ids = draft_vocabulary(data, config.vocab_size, config.draft_vocab_size)
        head = build_head(config, model, ids, settings)
    source = {"trained_by": "train_draft.py", "target": target_mark(model), "settings": asdict(settings)}
    run = Run(model, head, data, settings, args.out, source, int(args.cache_gib * 2**30), rank, world)
    if args.resume:
        run.restore()
    return run


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    rank, world, device = join_group(pick_device(args.device))
    try:
        run = prepare(args, rank, world, device)
        answers = sum(row.answer_tokens for row in run.data)
        if rank == 0:
            note(
                f"{len(run.data)} conversations with {answers} answer tokens, {len(run.held)} held out; "
                f"{run.total} steps; {sum(p.numel() for p in run.trained)} parameters are trained"
            )
        run.go(args.log_every, args.validate_every, args.save_every)
        if rank == 0:
            plot(args.out)
            note(f"wrote {args.out / HEAD_FILE}")
    finally:
        if world > 1:
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    cli.run(main)
