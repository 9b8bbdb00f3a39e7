"""A training under way: its optimisers, batches, steps, validation, log and checkpoints.

Everything random follows from the seed and the step's number, so a run that was interrupted goes on
to the same numbers. Leaves out: the command line (train_draft.py), the losses (losses.py).
"""

import json
import math
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from eagle_draft import DraftHead
from model import Transformer
from talon.cli import note
from talon.training.conversations import Conversation
from talon.training.head import borrow, write_head
from talon.training.losses import Batch, Teacher, TrainingConfig, Unrolled, scale_inputs
from talon.writing import atomic_file

HEAD_FILE, STATE_FILE, LOG_FILE = "talon_draft.safetensors", "train_state.pt", "log.jsonl"
STATE_KEYS = {"settings", "source", "step", "tokens", "data", "head", "optimizers", "cpu_s"}
LENGTH_POOL = 32  # batches that are sorted by length together, so that little padding is computed
SAVE_EVERY = 500  # steps, as often as the held-out conversations are looked at
CACHE_BYTES = 2 * 2**30  # features that epochs share
FORWARD_TOKENS = 512  # answer tokens of a forward, for which a card has room next to the target
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Processes(NamedTuple):
    """This process among those that train together."""

    rank: int = 0
    count: int = 1
    sharded: bool = False  # the target is spread over all of them


ALONE = Processes()


class TrainingRun:
    """A training under way: what it steps on, and what it writes."""

    def __init__(
        self,
        model: Transformer,
        head: DraftHead,
        data: list[Conversation],
        config: TrainingConfig,
        out: Path,
        processes: Processes = ALONE,
    ) -> None:
        self.model, self.head, self.config, self.out = model, head, config, out
        self.processes, self.device = processes, model.norm.weight.device
        held = max(1, round(len(data) * config.validation))
        held = held if len(data) > 1 and config.validation else 0
        self.data, self.held = data[held:], data[:held]
        cache_bytes = 0 if processes.sharded else CACHE_BYTES
        self.teacher = Teacher(model, head.config, config.max_length, cache_bytes)
        if hasattr(head, "fc"):
            scale_inputs(head, self.teacher, self.data)
        self.unrolled = Unrolled(head, borrow(head, model), config).to(self.device)
        self.parallel = self.unrolled
        if processes.count > 1:  # its buffers never change
            self.parallel = nn.parallel.DistributedDataParallel(
                self.unrolled, find_unused_parameters=True, broadcast_buffers=False
            )
        self.trained = {n: p for n, p in head.named_parameters() if p.requires_grad}
        self.optimizers = build_optimizers(self.trained)
        self.planned = 0, plan_epoch(self.data, config, 0)
        self.steps_per_epoch = len(self.planned[1]) // processes.count
        self.total = config.epochs * self.steps_per_epoch
        if not self.steps_per_epoch:
            few = f"{len(self.data)} conversations are fewer batches than processes"
            raise ValueError(f"{few}: lower --batch_tokens, or start less than {processes.count}")
        self.step, self.tokens = 0, 0
        self.stop: tuple[int, float] | None = None  # the signal that asked to, and when
        self.started = time.process_time()

    @property
    def progress(self) -> dict:
        return {"step": self.step, "tokens": self.tokens}

    @property
    def marks(self) -> dict:
        """What must be the same to resume, by name; sums tell data or targets of one size apart."""
        c, norm = self.model.config, float(self.model.norm.weight.double().sum())
        size = f"{c.n_layer} layers of {c.dim}, vocabulary {c.vocab_size}"
        rows = self.held + self.data
        tokens, ids = sum(len(row.ids) for row in rows), sum(sum(row.ids) for row in rows)
        data = f"{len(rows)} conversations, {tokens} tokens, ids sum {ids}"
        return asdict(self.config) | {"data": data, "target": f"{size}, final norm {norm:.6f}"}

    def autocast(self) -> torch.autocast:
        enabled = self.config.dtype == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    def lr(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a twentieth."""
        warm = max(1, round(self.config.warmup * self.total))
        if step < warm:
            return self.config.lr * (step + 1) / warm
        done = (step - warm) / max(1, self.total - warm)
        return self.config.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))

    def levels(self, step: int) -> int:
        """One level at first, which is cheap, then all of them, which is what drafting needs."""
        return self.config.unroll if step >= self.config.unroll_from * self.total else 1

    def noise(self, batch: Batch, generator: torch.Generator) -> Tensor | None:
        """Uniform noise on the features, for drafted ones are never exact; Medusa drafts none."""
        if not hasattr(self.head, "fc"):
            return None
        width = sum(x.shape[-1] for x in batch.features)
        noise = torch.rand(batch.ids.numel(), width, generator=generator).sub_(0.5).mul_(2)
        scale = self.head.fc.parametrizations.weight[0].scale[-width:]
        return noise.to(self.device) * scale * self.config.feature_noise

    def rows(self, step: int, rank: int) -> list[Conversation]:
        """The conversations of a process at a step."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if self.planned[0] != epoch:
            self.planned = epoch, plan_epoch(self.data, self.config, epoch)
        return [self.data[n] for n in self.planned[1][index * self.processes.count + rank]]

    def batches(self, step: int) -> list[Batch]:
        """This process's part of a step, as batches that fit into a forward."""
        rank, count, sharded = self.processes
        rows = self.rows(step, rank)
        size = math.ceil(len(rows) / max(1, round(self.config.batch_tokens / FORWARD_TOKENS)))
        batches = [self.teacher.batch(rows[i : i + size]) for i in range(0, len(rows), size)]
        if sharded:
            # Its forwards are common work: who has fewer than another process repeats one.
            most = max(len(self.rows(step, other)) for other in range(count))
            for _ in range(most - len(rows)):
                self.teacher.run(rows[0].ids)
        return batches

    def accumulate(self, step: int) -> tuple[float, Tensor]:
        """Add up the gradients of a step; its loss and its table, as Unrolled.forward gives it."""
        levels, batches = self.levels(step), self.batches(step)
        number = step * self.processes.count + self.processes.rank
        generator = torch.Generator().manual_seed((self.config.seed << 32) + number)
        loss, table = 0.0, torch.zeros(levels, 4, device=self.device)
        self.head.zero_grad()
        for left, batch in enumerate(batches, start=1 - len(batches)):
            alone = self.processes.count == 1
            # The processes add up their gradients once, in the last backward.
            with nullcontext() if alone or not left else self.parallel.no_sync():
                with self.autocast():
                    part, counts = self.parallel(batch, levels, self.noise(batch, generator))
                (part / len(batches)).backward()
            loss, table = loss + float(part.detach()) / len(batches), table + counts
        return loss, table

    def train_step(self) -> dict:
        """One update. ValueError, before anything is changed, if the loss is not a number."""
        step = self.step
        loss, table = self.accumulate(step)
        norm = float(nn.utils.clip_grad_norm_(self.trained.values(), 1.0))
        if not math.isfinite(loss + norm):
            raise ValueError(
                f"the loss is not finite at step {step} (loss {loss}, gradient {norm}): lower --lr "
                f"or try --dtype fp32; the last checkpoint in {self.out} is intact"
            )
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr(step) * group["share"]
            optimizer.step()
        self.step += 1
        self.tokens += int(table[0, 0]) * self.processes.count
        entry = {"lr": rounded(self.lr(step)), "levels": len(table), "loss": rounded(loss)}
        return entry | averages(table)

    @torch.no_grad()
    def validate(self) -> None:
        """Log the numbers of every level on conversations that are never trained on."""
        batches = (self.teacher.batch(self.held[i : i + 4]) for i in range(0, len(self.held), 4))
        with self.autocast():
            table = sum(self.unrolled(batch, self.config.unroll)[1] for batch in batches)
        self.log({f"validation_{name}": values for name, values in averages(table).items()})

    def log(self, entry: dict) -> None:
        if self.processes.rank == 0:
            cpu_s = {"cpu_s": round(time.process_time() - self.started, 1)}
            with writing(self.out), (self.out / LOG_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.progress | entry | cpu_s) + "\n")

    def save(self) -> None:
        """The head, and what --resume needs; each file appears whole or not at all."""
        if self.processes.rank:
            return
        settings, marks = asdict(self.config), self.marks
        source = {"trained_by": "train_draft.py", "target": marks["target"], "settings": settings}
        state = self.progress | {
            "settings": settings,
            "source": source,
            "data": marks["data"],
            "head": {name: parameter.detach() for name, parameter in self.trained.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "log_bytes": (self.out / LOG_FILE).stat().st_size,
            "cpu_s": time.process_time() - self.started,
        }
        with writing(self.out):
            write_head(self.out / HEAD_FILE, self.head, source | self.progress)
            with atomic_file(self.out / STATE_FILE) as file:
                torch.save(state, file)

    def restore(self) -> None:
        """Go on where `save` was called last, if nothing that decides the numbers has changed."""
        path = self.out / STATE_FILE
        state = read_state(path, self.device)
        was = state["settings"] | {"data": state["data"], "target": state["source"]["target"]}
        now = self.marks
        changed = [name for name in now if now[name] != was.get(name)]
        if changed:
            raise ValueError(
                f"{path} was made with another {', '.join(changed)} ({was.get(changed[0])}, now "
                f"{now[changed[0]]}): give the same, or --init to start from the head alone"
            )
        shapes = {name: value.shape for name, value in state["head"].items()}
        if shapes != {name: parameter.shape for name, parameter in self.trained.items()}:
            raise ValueError(f"{path} holds another head: start without --resume")
        if not 0 <= state["step"] < self.total:
            at = f"{self.out} is at step {state['step']} of {self.total}"
            raise ValueError(f"{at}: nothing is left to do; go on from its head with --init")
        try:
            for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(values)
        except (ValueError, KeyError, TypeError) as error:
            fault = f"{path} does not fit this run ({error})"
            raise ValueError(f"{fault}: start without --resume") from None
        with torch.no_grad():
            for name, value in state["head"].items():
                self.trained[name].copy_(value)
        self.step, self.tokens = state["step"], state["tokens"]
        self.started = time.process_time() - state["cpu_s"]
        log = self.out / LOG_FILE
        # What was logged after the checkpoint comes again.
        if self.processes.rank == 0 and log.exists() and "log_bytes" in state:
            os.truncate(log, min(state["log_bytes"], log.stat().st_size))

    def train(self) -> None:
        """Train to the end, or until Ctrl-C, SIGTERM or SIGHUP, which save first."""
        rank = self.processes.rank
        if not self.step and not rank:  # the log of a run that never came to a checkpoint
            (self.out / LOG_FILE).write_bytes(b"")
        bar = tqdm(total=self.total, initial=self.step, unit="step", disable=rank > 0)
        # What nohup has ignored stays so.
        stops = [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, self.ask_to_stop) for number in stops}
        try:
            while self.step < self.total and not self.is_to_stop():
                entry = self.train_step()
                self.log(entry)
                bar.update()
                loss, accuracy = f"{entry['loss']:.2f}", f"{entry['accuracy'][0]:.3f}"
                bar.set_postfix(loss=loss, accuracy=accuracy, refresh=False)
                if self.step % SAVE_EVERY == 0 or self.step == self.total:
                    if self.held:
                        self.validate()
                    self.save()
            if self.step < self.total:
                self.save()
                raise KeyboardInterrupt(*(self.stop or ())[:1])
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            bar.close()

    def ask_to_stop(self, number: int, _: object) -> None:
        """The first Ctrl-C ends the run after this step; a second one ends it at once, the last
        checkpoint intact. Within a moment torchrun repeats the first."""
        if self.stop is None:
            self.stop = number, time.monotonic()
            note("stopping after this step; press Ctrl-C again to stop at once")
        elif time.monotonic() - self.stop[1] > 1:
            raise KeyboardInterrupt(number)

    def is_to_stop(self) -> bool:
        """Was any process asked to stop? All of them answer alike, so they stop at one step."""
        if self.processes.count == 1:
            return self.stop is not None
        votes = torch.tensor(int(self.stop is not None), device=self.device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return bool(votes)


def build_optimizers(trained: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the matrices of fc and the layer, AdamW for everything else.

    `share` scales the learning rate, which every step sets."""
    inner = [
        n for n, p in trained.items() if p.dim() == 2 and n.startswith(("fc.", "layer.", "blocks."))
    ]
    matrices = {"params": [trained[n] for n in inner], "share": 1.0}
    others = {"params": [p for n, p in trained.items() if n not in inner], "share": 0.25}
    return [
        torch.optim.Muon([matrices], weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([others], betas=(0.9, 0.95), weight_decay=0.0),
    ]


def plan_epoch(data: list[Conversation], config: TrainingConfig, epoch: int) -> list[list[int]]:
    """The epoch's batches of about `batch_tokens` answer tokens: lists of conversation numbers."""
    rng = random.Random(f"{config.seed}/{epoch}")
    order = list(range(len(data)))
    rng.shuffle(order)
    tokens = sum(row.answer_tokens for row in data)
    per_batch = max(1, round(config.batch_tokens * len(data) / tokens))
    size, batches = per_batch * LENGTH_POOL, []
    for start in range(0, len(order), size):
        pool = sorted(order[start : start + size], key=lambda n: len(data[n].ids))
        batches += [pool[i : i + per_batch] for i in range(0, len(pool), per_batch)]
    rng.shuffle(batches)
    return batches


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn what a full disk brings into a ValueError that says how to go on."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch tells of a short write by the place in its own source.
        short = "inline_container" in str(error) and "the disk took only a part"
        if not (reason := getattr(error, "strerror", None) or short):
            raise
        failed = f"the training cannot be written to {out} ({reason})"
        raise ValueError(f"{failed}: make room, then --resume the last checkpoint") from None


def read_state(path: Path, device: torch.device) -> dict:
    """What `save` wrote, every part of it there."""
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        fault = f"{path} cannot be read ({type(error).__name__})"
        raise ValueError(f"{fault}: start without --resume") from None
    if not isinstance(state, dict) or not state.keys() >= STATE_KEYS:
        raise ValueError(f"{path} is not the state of a run: use --init to start from its head")
    return state


def averages(table: Tensor) -> dict[str, list[float]]:
    """The table of Unrolled.forward by name, per counted entry, level by level."""
    count = table[:, 0].clamp(min=1)
    names = ("accuracy", "cross_entropy", "feature_loss")
    means = [(column / count).tolist() for column in table.T[1:]]
    return {n: [rounded(x) for x in mean] for n, mean in zip(names, means, strict=True)}


def rounded(value: float) -> float:
    return float(f"{value:.5g}")
