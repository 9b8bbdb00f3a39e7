"""Train a draft head for a target, in process and from nothing but the target.

The data is the target's own talk or a file of conversations (draft_data.py), the losses are in
draft_unroll.py, the measurement of what was trained in draft_eval.py; here are the settings, the
head's beginning and end, and the run. Everything random follows from --seed and the step's number,
so a run that was interrupted goes on to the same numbers. Leaves out: decoding (engine.py),
training the target.

    python train_draft.py --checkpoint_path F --head eagle1 --data self --out DIR
    torchrun --nproc_per_node 2 train_draft.py ...
"""

import argparse
import json
import math
import os
import random
import signal
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm

import cli
from checkpoint import TensorSpec, atomic_file, write_checkpoint
from cli import note
from draft_data import Conversation, Recipe, prepare_data
from draft_eval import answer_greedily, read_questions, replay, summarise
from draft_unroll import Batch, Settings, Teacher, Unrolled, UnrolledAttention, scale_inputs
from eagle_draft import DraftConfig, DraftHead, default_feature_layers, parse_tree
from loading import (
    find_tokenizer,
    fit_head,
    load_head,
    load_target,
    pick_device,
    read_kind,
    rows_of,
)
from model import ModelConfig, Transformer
from quantized_linear import unpacked
from tokenizer import Tokenizer

HEAD_FILE, STATE_FILE, LOG_FILE = "talon_draft.safetensors", "train_state.pt", "log.jsonl"
PLOT_FILE, EVALUATION_FILE = "training.png", "evaluation.json"
RANK_PRIOR = 30000  # weight of a token's rank against its count when the draft vocabulary is chosen
LENGTH_POOL = 32  # batches that are sorted by length together, so that little padding is computed


# --- settings, head and batches -------------------------------------------------------------------


def draft_vocabulary(data: list[Conversation], vocab_size: int, size: int) -> Tensor:
    """The `size` ids the head may guess, ascending int64: frequent in the answers, or low in the
    tokenizer's own order, which for BPE is an order of frequency and fills up what little data
    leaves open."""
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
        raise ValueError(
            f"draft_vocab_size {size} is not allowed: give 1 to {t.vocab_size}, "
            "the target's vocabulary"
        )
    return DraftConfig(
        family=settings.head, dim=t.dim, n_head=t.n_head, n_kv_head=t.n_kv_head,
        head_dim=t.head_dim, intermediate_size=t.intermediate_size, norm_eps=t.norm_eps,
        vocab_size=t.vocab_size, draft_vocab_size=size, target_dim=t.dim,
        max_seq_length=t.max_seq_length, rope_theta=t.rope_theta, rope_scaling=t.rope_scaling,
        rope_source="the target's, by training",
        feature_layers=default_feature_layers(t.n_layer) if eagle3 else None, own_output=eagle3,
    )  # fmt: skip


def build_head(
    config: DraftConfig, model: Transformer, ids: Tensor, settings: Settings
) -> DraftHead:
    """A fresh head in fp32 that at first repeats the newest feature: fc passes it on, the layer
    adds little."""
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
            head.output.weight.copy_(output_rows(model, ids).weight)
    head.d2t.copy_(ids - torch.arange(len(ids)))
    return head.to(device)


def output_rows(model: Transformer, ids: Tensor) -> nn.Linear:
    """The target's lm_head for a draft vocabulary, as a plain layer that gradients pass."""
    rows = rows_of(model.output, ids.to(model.norm.weight.device))
    return rows if isinstance(rows, nn.Linear) else unpacked(rows)


def borrow(head: DraftHead, model: Transformer) -> Tensor:
    """Give the head what it shares with the target, frozen; returns the target's output rows [Vd,
    C]."""
    shared = output_rows(model, head.target_ids)
    if not head.config.own_embedding:
        head.tok_embeddings = model.tok_embeddings.requires_grad_(False)
    if not head.config.own_output:
        head.output = shared.requires_grad_(False)
    return shared.weight.detach()


def own_state(head: DraftHead) -> dict[str, Tensor]:
    """The head's own tensors, the scale folded into fc, without what it borrows."""
    state = {n: value for n, value in head.state_dict().items() if "parametrizations" not in n}
    state["fc.weight"] = head.fc.weight
    if not head.config.own_embedding:
        del state["tok_embeddings.weight"]
    if not head.config.own_output:
        del state["output.weight"]
    if head.config.draft_vocab_size == head.config.vocab_size:
        del state["d2t"]
    return {name: value.detach().cpu().contiguous() for name, value in state.items()}


def write_head(
    path: Path, head: DraftHead, source: dict, dtype: torch.dtype = torch.float32
) -> None:
    """The head as generate.py loads it."""
    state = {n: v.to(dtype) if v.is_floating_point() else v for n, v in own_state(head).items()}
    specs = {name: TensorSpec(value.dtype, tuple(value.shape)) for name, value in state.items()}
    write_checkpoint(
        path,
        kind="draft",
        config=asdict(head.config),
        specs=specs,
        tensors=state.items(),
        source=source,
    )


def read_head(path: Path, model: Transformer, settings: Settings, ids: Tensor | None) -> DraftHead:
    """A head to go on from. Its draft vocabulary stays, unless it borrows its output and another
    one is asked for."""
    file = read_kind(path, "draft")
    config = fit_head(file, model.config)
    if config.family != settings.head:
        raise ValueError(
            f"{path} is an {config.family} head, not {settings.head}: give --head {config.family}"
        )
    if file.quantization:
        raise ValueError(
            f"{path} is quantised and cannot be trained: give the head it was made from"
        )
    kept = (
        file.tensor("d2t")
        if "d2t" in file.specs
        else torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    )
    kept = kept + torch.arange(config.draft_vocab_size)
    if ids is None or config.own_output:
        ids = kept
    head = build_head(replace(config, draft_vocab_size=len(ids)), model, ids, settings)
    loaded = {name: value.float() for name, value in file.tensors() if name != "d2t"}
    missing, unexpected = head.load_state_dict(loaded, strict=False)
    missing = [name for name in missing if name != "d2t"]
    if missing or unexpected:
        raise ValueError(
            f"{path} does not fit its own config ({[*missing, *unexpected][:3]}): convert it again"
        )
    return head


def build_optimizers(head: DraftHead, lr: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the layer's matrices, AdamW for the norms and an lm_head.

    On SmolLM2, in 124 steps on the same 130,000 tokens, Muon (lr 2e-3) came to 37.1 % right guesses
    on held-out text where AdamW (lr 1e-3) came to 33.8 %, in as much time."""
    trained = [(name, p) for name, p in head.named_parameters() if p.requires_grad]
    matrices = [p for name, p in trained if p.dim() == 2 and not name.startswith("output.")]
    rest = [p for name, p in trained if p.dim() != 2 or name.startswith("output.")]
    muon = torch.optim.Muon(
        [{"params": matrices, "share": 1.0}], lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(
        [{"params": rest, "share": 0.25}], lr, betas=(0.9, 0.95), weight_decay=0.0
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


# --- the run --------------------------------------------------------------------------------------


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
        self.optimizers = build_optimizers(head, settings.lr)
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
        own = dict(self.head.named_parameters())
        with torch.no_grad():
            for name, value in state["head"].items():
                own[name].copy_(value)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
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
        kept = [line for line in lines if line and json.loads(line)["step"] <= step]
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
        import matplotlib
    except ImportError:
        note("no plot: matplotlib is not installed (the numbers are in " + LOG_FILE + ")")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    entries = [
        json.loads(line) for line in (out / LOG_FILE).read_text(encoding="utf-8").splitlines()
    ]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
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
    figure.savefig(out / PLOT_FILE, dpi=100, bbox_inches="tight", metadata={"Software": None})


# --- the command line -----------------------------------------------------------------------------


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add(
        "--checkpoint_path",
        type=Path,
        default=Path("checkpoints/SmolLM2-135M-Instruct/talon.safetensors"),
    )
    add("--head", choices=("eagle1", "eagle3"), default="eagle1")
    add(
        "--out",
        type=Path,
        required=True,
        help="directory for the head, its log and what --resume needs",
    )
    add("--data", default="self", help="self, or a JSON lines file of conversations")
    add(
        "--regenerate",
        action="store_true",
        help="let the target answer the user turns of --data anew",
    )
    add(
        "--answer_tokens",
        type=int,
        default=1_000_000,
        help="how many --data self or --regenerate makes",
    )
    add(
        "--data_batch",
        type=int,
        default=128,
        help="conversations that the target answers at a time",
    )
    add("--epochs", type=int, default=3)
    add("--batch_tokens", type=int, default=512, help="answer tokens of a step")
    add("--lr", type=float, default=1.5e-3, help="of the matrices; norms and lm_head: a quarter")
    add("--warmup", type=float, default=0.04, help="share of the steps")
    add("--unroll", type=int, default=3, help="levels of drafting that are trained")
    add("--unroll_from", type=float, default=0.5, help="share of the steps after which they are")
    add("--level_decay", type=float, default=0.8, help="weight of a level against the one before")
    add("--feature_weight", type=float, default=1.0, help="weight of the feature loss (eagle1)")
    add(
        "--feature_noise",
        type=float,
        default=0.5,
        help="noise on the features, in units of their usual size",
    )
    add("--draft_vocab_size", type=int, help="default: the target's, at most 32000")
    add(
        "--max_length",
        type=int,
        help="tokens of a conversation, longer ones are left out; default 2048",
    )
    add("--validation", type=float, default=0.02, help="share of conversations held out")
    add("--device", default="auto")
    add(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="of the target, and autocast of the head",
    )
    add(
        "--cache_gib",
        type=float,
        default=2.0,
        help="memory for the target's features, which epochs share",
    )
    add(
        "--shard_target",
        action="store_true",
        help="under torchrun: spread the target's layers over the processes (FSDP)",
    )
    add("--seed", type=int, default=0)
    add("--log_every", type=int, default=20)
    add("--validate_every", type=int, default=500)
    add("--save_every", type=int, default=500)
    add("--init", type=Path, help="a talon_draft.safetensors to go on from, with a new schedule")
    add(
        "--evaluate",
        type=Path,
        metavar="QUESTIONS",
        help="do not train: measure the head in --out on these questions",
    )
    add(
        "--trees",
        nargs="+",
        default=["chain:4", "dynamic:nodes=32,levels=6,top_k=8"],
        help="for --evaluate",
    )
    add("--new_tokens", type=int, default=128, help="of an answer, for --evaluate")
    add("--resume", action="store_true", help="go on with the run in --out")
    return parser.parse_args(argv)


ALLOWED = {
    "epochs": (1, 10**6),
    "batch_tokens": (1, 10**9),
    "answer_tokens": (1, 10**12),
    "data_batch": (1, 10**4),
    "lr": (0, 1),
    "warmup": (0, 1),
    "unroll": (1, 16),
    "unroll_from": (0, 1),
    "level_decay": (0, 1),
    "feature_weight": (0, 10**6),
    "feature_noise": (0, 10),
    "validation": (0, 0.5),
    "cache_gib": (0, 10**6),
    "new_tokens": (2, 10**5),
    "seed": (0, 2**31 - 1),
    "log_every": (1, 10**9),
    "validate_every": (1, 10**9),
    "save_every": (1, 10**9),
}


def check_args(args: argparse.Namespace, target: ModelConfig) -> Settings:
    """The settings of the run; ValueError for a value that cannot be meant."""
    limit = min(target.max_seq_length, 2048)
    args.max_length = args.max_length or limit
    for name, (low, high) in (ALLOWED | {"max_length": (8, target.max_seq_length)}).items():
        if not low <= getattr(args, name) <= high:
            raise ValueError(
                f"{name} {getattr(args, name)} is not allowed: give a value from {low} to {high}"
            )
    names = set(Settings.__dataclass_fields__) - {"init"}
    return Settings(
        **{name: getattr(args, name) for name in names}, init=args.init.name if args.init else None
    )


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


def load_data(
    args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer | None
) -> list[Conversation]:
    rows = min(Recipe.rows, args.max_length)
    recipe = Recipe(args.seed, args.data_batch, min(Recipe.answer, rows // 2), rows)
    return prepare_data(
        args.data,
        args.out,
        model,
        tokenizer,
        recipe,
        args.answer_tokens,
        args.max_length,
        args.regenerate,
    )


def shard(model: Transformer, device: torch.device) -> Transformer:
    """Spread the layers' weights over all processes; each layer is put together while it runs
    (FSDP, arXiv 2304.11277). `model` comes in on the CPU."""
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    return model.to(device)


def prepare(args: argparse.Namespace, rank: int, world: int, device: torch.device) -> Run:
    """Load, make or read the data, and set up the run."""
    file = read_kind(args.checkpoint_path, "target")
    settings = check_args(args, ModelConfig.from_dict(file.config))
    config = head_config(ModelConfig.from_dict(file.config), settings)
    if (args.out / STATE_FILE).exists() and not args.resume:
        raise ValueError(
            f"{args.out} holds a run already: give --resume to go on with it, or another --out"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    if args.shard_target and (world == 1 or file.quantization or args.data == "self"):
        raise ValueError(
            "--shard_target needs several processes (torchrun), a target that is not quantised, "
            "and --data FILE: make the conversations in a run without it first"
        )
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    model = load_target(file, torch.device("cpu") if args.shard_target else device, dtype)
    model.requires_grad_(False)
    if args.shard_target:
        model, args.cache_gib = shard(model, device), 0.0
    tokenizer = find_tokenizer(file.path.parent, ModelConfig.from_dict(file.config))
    data = rank == 0 and load_data(
        args, model, tokenizer
    )  # one process makes what all of them read
    if world > 1:
        dist.barrier()
    data = data or load_data(args, model, tokenizer)
    if args.init:
        wanted = args.draft_vocab_size and draft_vocabulary(
            data, config.vocab_size, config.draft_vocab_size
        )
        head = read_head(args.init, model, settings, wanted)
    else:
        ids = draft_vocabulary(data, config.vocab_size, config.draft_vocab_size)
        head = build_head(config, model, ids, settings)
    source = {
        "trained_by": "train_draft.py",
        "target": target_mark(model),
        "settings": asdict(settings),
    }
    run = Run(
        model, head, data, settings, args.out, source, int(args.cache_gib * 2**30), rank, world,
        args.shard_target,
    )  # fmt: skip
    if args.resume:
        run.restore()
    return run


def evaluate(args: argparse.Namespace, device: torch.device) -> int:
    """Measure the head in --out on questions, for each tree of --trees; writes evaluation.json
    beside it."""
    trees = [parse_tree(text) for text in args.trees]
    file, head_file = (
        read_kind(args.checkpoint_path, "target"),
        read_kind(args.out / HEAD_FILE, "draft"),
    )
    model = load_target(file, device, torch.float32)
    head = load_head(head_file, model, device, torch.float32)
    tokenizer = find_tokenizer(file.path.parent, model.config)
    if tokenizer is None:
        raise ValueError(
            f"no tokenizer lies beside {file.path}: questions are text, copy tokenizer.json there"
        )
    texts = answer_greedily(model, read_questions(args.evaluate, tokenizer), args.new_tokens)
    c = head.config
    teacher = Teacher(model, c.family, c.feature_layers, max(len(text.ids) for text in texts), 0)
    differing = 0
    for text in tqdm(texts, desc="features"):
        text.features, choice = teacher.run(text.ids)
        differing += int(
            (choice[len(text.prompt) - 1 : -1] != torch.tensor(text.answer, device=device)).sum()
        )
    results = [
        summarise(tree, [replay(head, tree, text) for text in tqdm(texts, desc=tree.name)])
        for tree in trees
    ]
    report = {
        "questions": args.evaluate.name,
        "new_tokens": args.new_tokens,
        "head": head_file.source,
        "answer_tokens": sum(len(text.answer) for text in texts),
        "not_the_choice_again": differing,
        "trees": results,
    }
    with atomic_file(args.out / EVALUATION_FILE) as target:
        target.write(json.dumps(rounded(report), indent=1).encode() + b"\n")
    for result in results:
        note(
            f"{result['tree']}: acceptance length {result['acceptance_length']}, "
            f"by depth {result['accepted_by_depth']}"
        )
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.evaluate:
        return evaluate(args, pick_device(args.device))
    rank, world, device = join_group(pick_device(args.device))
    try:
        run = prepare(args, rank, world, device)
        answers = sum(row.answer_tokens for row in run.data)
        if rank == 0:
            note(
                f"{len(run.data)} conversations with {answers} answer tokens, {len(run.held)} held "
                f"out; {run.total} steps; {sum(p.numel() for p in run.trained)} parameters"
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
