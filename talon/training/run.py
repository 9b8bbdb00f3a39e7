"""A training under way: its optimisers, batches, steps, validation, log and checkpoints.

Everything random follows from the seed and the step's number, so a run that was interrupted goes on
to the same numbers. Leaves out: the command line and its settings (train_draft.py), the losses
(draft_unroll.py), data (draft_data.py).
"""

import json
import math
import random
import signal
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from eagle_draft import DraftHead
from model import Transformer
from talon.checkpoint import atomic_file
from talon.cli import note
from talon.training.conversations import Conversation
from talon.training.head import borrow, write_head
from talon.training.losses import Batch, Settings, Teacher, Unrolled, scale_inputs

HEAD_FILE, STATE_FILE, LOG_FILE = "talon_draft.safetensors", "train_state.pt", "log.jsonl"

PLOT_FILE = "training.png"

STATE_KEYS = {"settings", "source", "step", "tokens", "data", "head", "optimizers", "cpu_s"}

LENGTH_POOL = 32  # batches that are sorted by length together, so that little padding is computed


def build_optimizers(head: DraftHead) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the matrices of fc and the layer, AdamW for everything else.

    `share` scales the learning rate, which every step sets anew. On SmolLM2, in 124 steps on the
    same 130,000 tokens, Muon (lr 2e-3) came to 37.1 % right guesses on held-out text where AdamW
    (lr 1e-3) came to 33.8 %, in as much time."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            inner = parameter.dim() == 2 and name.startswith(("fc.", "layer."))
            groups[inner].append(parameter)
    muon = torch.optim.Muon(
        [{"params": groups[True], "share": 1.0}],
        weight_decay=0.0,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(
        [{"params": groups[False], "share": 0.25}], betas=(0.9, 0.95), weight_decay=0.0
    )
    return [muon, adamw]


def plan(data: list[Conversation], settings: Settings, epoch: int) -> list[list[int]]:
    """The epoch's batches as lists of conversation numbers, about `batch_tokens` answer tokens
    each."""
    rng = random.Random(f"{settings.seed}/{epoch}")
    order = list(range(len(data)))
    rng.shuffle(order)
    per_batch = max(
        1, round(settings.batch_tokens * len(data) / sum(row.answer_tokens for row in data))
    )
    pool = per_batch * LENGTH_POOL
    batches = []
    for start in range(0, len(order), pool):
        part = sorted(order[start : start + pool], key=lambda n: len(data[n].ids))
        batches += [part[i : i + per_batch] for i in range(0, len(part), per_batch)]
    rng.shuffle(batches)
    return batches


class Run:
    """A training under way: what it steps on, and what it writes."""

    def __init__(
        self,
        model: Transformer,
        head: DraftHead,
        data: list[Conversation],
        settings: Settings,
        out: Path,
        source: dict,
        cache_bytes: int,
        rank: int = 0,
        world: int = 1,
        sharded: bool = False,
    ) -> None:
        self.model, self.head, self.settings, self.out, self.source = (
            model,
            head,
            settings,
            out,
            source,
        )
        self.rank, self.world, self.device = rank, world, model.norm.weight.device
        self.sharded = sharded
        held = (
            max(1, round(len(data) * settings.validation))
            if len(data) > 1 and settings.validation
            else 0
        )
        self.data, self.held = data[held:], data[:held]
        layers = head.config.feature_layers
        self.teacher = Teacher(model, head.config.family, layers, settings.max_length, cache_bytes)
        self.judge = Teacher(model, head.config.family, layers, settings.max_length, 0)
        scale_inputs(head, self.teacher, self.data)
        self.unrolled = Unrolled(head, borrow(head, model), settings).to(self.device)
        self.parallel = self.unrolled
        if world > 1:
            self.parallel = nn.parallel.DistributedDataParallel(
                self.unrolled, find_unused_parameters=True
            )
        self.trained = [p for p in head.parameters() if p.requires_grad]
        self.optimizers = build_optimizers(head)
        self.steps_per_epoch = len(plan(self.data, settings, 0)) // world
        self.total = settings.epochs * self.steps_per_epoch
        self.step, self.tokens, self.stopping = 0, 0, False
        self.started = time.process_time()

    def autocast(self) -> torch.autocast:
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.settings.dtype == "bf16"
        )

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
        """Uniform noise on the features: a drafted feature is never exact, and too little data is
        soon learnt by heart."""
        if not self.settings.feature_noise:
            return None
        generator = torch.Generator().manual_seed(
            (self.settings.seed << 32) + step * self.world + self.rank
        )
        width = sum(x.shape[-1] for x in batch.features)
        noise = torch.rand(batch.ids.numel(), width, generator=generator).sub_(0.5).mul_(2)
        return noise.to(self.device) * self.scale * self.settings.feature_noise

    @property
    def scale(self) -> Tensor:
        scale = self.head.fc.parametrizations.weight[0].scale
        return scale[-self.head.config.dim :] if self.head.config.family == "eagle1" else scale

    def numbers(self, step: int, rank: int) -> list[int]:
        epoch, index = divmod(step, self.steps_per_epoch)
        if getattr(self, "planned", (None,))[0] != epoch:
            self.planned = epoch, plan(self.data, self.settings, epoch)
        return self.planned[1][index * self.world + rank]

    def batch(self, step: int) -> Batch:
        """This process's batch of a step. The forwards of a sharded target are common work: who has
        fewer conversations than another process repeats one."""
        numbers = self.numbers(step, self.rank)
        batch = self.teacher.batch(numbers, self.data)
        if self.sharded:
            most = max(len(self.numbers(step, rank)) for rank in range(self.world))
            for _ in range(most - len(numbers)):
                self.teacher.run(self.data[numbers[0]].ids)
        return batch

    def train_step(self) -> dict:
        """One update. ValueError, before anything is changed, if the loss is not a number."""
        step, levels = self.step, self.levels(self.step)
        batch = self.batch(step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr(step) * group["share"]
        with self.autocast():
            loss, table = self.parallel(batch, levels, self.noise(batch, step))
        for parameter in self.trained:
            parameter.grad = None
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.trained, 1.0)
        if not math.isfinite(float(loss.detach()) + float(norm)):
            raise ValueError(
                f"the loss is not finite at step {step} (loss {float(loss.detach())}, gradient "
                f"{float(norm)}): the last checkpoint in {self.out} is intact; lower --lr, or try "
                "--dtype fp32 and check the data"
            )
        for optimizer in self.optimizers:
            optimizer.step()
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
        source = self.source | {"step": self.step, "tokens": self.tokens}
        write_head(self.out / HEAD_FILE, self.head, source)
        state = {
            "settings": asdict(self.settings),
            "source": self.source,
            "step": self.step,
            "tokens": self.tokens,
            "data": data_mark(self.data + self.held),
            "head": {n: p.detach() for n, p in self.head.named_parameters() if p.requires_grad},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "cpu_s": time.process_time() - self.started,
        }
        with atomic_file(self.out / STATE_FILE) as file:
            torch.save(state, file)

    def restore(self) -> None:
        """Go on where `save` was called last. ValueError if anything that decides the numbers has
        changed."""
        path = self.out / STATE_FILE
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
        except FileNotFoundError:
            raise ValueError(f"{path} does not exist: start without --resume") from None
        except Exception as error:  # torch raises many kinds for a damaged file
            raise ValueError(
                f"{path} cannot be read ({type(error).__name__}): start without --resume"
            ) from None
        if not isinstance(state, dict) or not state.keys() >= STATE_KEYS:
            raise ValueError(
                f"{path} is not the state of a run of this version: use --init to start from its "
                "head"
            )
        now = asdict(self.settings) | {
            "data": data_mark(self.data + self.held),
            "target": self.source["target"],
        }
        was = state["settings"] | {"data": state["data"], "target": state["source"]["target"]}
        changed = [name for name in now if now[name] != was.get(name)]
        if changed:
            raise ValueError(
                f"{path} was made with another {', '.join(changed)} "
                f"({was.get(changed[0])}, now {now[changed[0]]}): give the same "
                "options and data, or use --init to start from the head alone"
            )
        own = {n: p for n, p in self.head.named_parameters() if p.requires_grad}
        saved = state["head"]
        if saved.keys() != own.keys() or any(saved[n].shape != own[n].shape for n in own):
            raise ValueError(f"{path} holds another head: start without --resume")
        if not 0 <= state["step"] < self.total:
            raise ValueError(
                f"{self.out} is at step {state['step']} of {self.total}: nothing is left to do; "
                "use --init to go on from its head with a new schedule"
            )
        try:
            for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(values)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} does not fit this run ({error}): start without --resume"
            ) from None
        with torch.no_grad():
            for name, value in saved.items():
                own[name].copy_(value)
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
                bar.set_postfix(
                    loss=f"{recent[-1]['loss']:.2f}",
                    accuracy=f"{recent[-1]['accuracy'][0]:.3f}",
                    refresh=False,
                )
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
        """The first Ctrl-C ends the run after this step; a second one ends it at once, the last
        checkpoint intact."""
        if self.stopping:
            raise KeyboardInterrupt
        self.stopping = True
        note("stopping after this step; press Ctrl-C again to stop at once")


def averaged(entries: list[dict]) -> dict:
    """The last entry, its measurements averaged over all entries that have as many levels."""
    last = dict(entries[-1])
    same = [e for e in entries if e["levels"] == last["levels"]]
    last["loss"] = sum(e["loss"] for e in same) / len(same)
    for name in ("accuracy", "cross_entropy", "feature_loss"):
        last[name] = [
            sum(values) / len(same) for values in zip(*(e[name] for e in same), strict=True)
        ]
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
        try:
            kept = [line for line in lines if line and json.loads(line)["step"] <= step]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}): remove it to go on") from None
        with atomic_file(path) as file:
            file.write("".join(line + "\n" for line in kept).encode())


def data_mark(data: list[Conversation]) -> str:
    """Tells one data set from another, for --resume."""
    tokens = sum(len(row.ids) for row in data)
    return (
        f"{len(data)} conversations, {tokens} tokens, ids sum {sum(sum(row.ids) for row in data)}"
    )


def target_mark(model: Transformer) -> str:
    """Tells one target from another of the same shape."""
    c, norm = model.config, model.norm.weight.double()
    total = float(norm.sum())
    return f"{c.n_layer} layers of {c.dim}, vocabulary {c.vocab_size}, final norm {total:.6f}"


def plot(out: Path) -> None:
    """Loss and accuracy against tokens seen, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        note("no plot: matplotlib is not installed (the numbers are in " + LOG_FILE + ")")
        return
    try:
        lines = (out / LOG_FILE).read_text(encoding="utf-8").splitlines()
        entries = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        note(f"no plot: {out / LOG_FILE} cannot be read ({error})")
        return
    figure = Figure(figsize=(11, 4))
    left, right = figure.subplots(1, 2)
    train = [e for e in entries if "loss" in e]
    left.plot([e["tokens"] for e in train], [e["cross_entropy"][0] for e in train])
    left.set(title="cross-entropy at level 1, training", xlabel="answer tokens seen")
    held = [e for e in entries if "validation_accuracy" in e]
    for level in range(max((len(e["validation_accuracy"]) for e in held), default=0)):
        right.plot(
            [e["tokens"] for e in held],
            [e["validation_accuracy"][level] for e in held],
            label=f"level {level + 1}",
        )
    right.plot(
        [e["tokens"] for e in train],
        [e["accuracy"][0] for e in train],
        alpha=0.3,
        label="level 1, training",
    )
    right.set(title="right guesses, held-out", xlabel="answer tokens seen")
    right.legend()
    with atomic_file(out / PLOT_FILE) as file:
        figure.savefig(
            file, format="png", dpi=100, bbox_inches="tight", metadata={"Software": None}
        )
