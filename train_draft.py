"""Train a draft head for a target, in process and from nothing but the target.

This is the command; the rest is in talon/training/: conversations.py and self_talk.py have the
data, head.py the head's beginning and end, losses.py the losses, run.py the run, evaluation.py the
measurement of what was trained. Leaves out: decoding (generate.py), training the target.

    python train_draft.py --checkpoint_path F --head eagle1 --data self --out DIR
    torchrun --nproc_per_node 2 train_draft.py ...
"""

if __name__ == "__main__":  # what follows is imported, which takes seconds, and its main is run
    from talon.cli import start

    start("train_draft")

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from model import ModelConfig, Transformer
from talon import cli
from talon.checkpoint import Checkpoint
from talon.cli import note
from talon.loading import (
    DTYPES,
    fit_tree,
    load_head,
    load_target,
    open_files,
    pick_device,
    read_file,
)
from talon.prompts import encode_question, read_questions
from talon.tokenizer import Tokenizer
from talon.training.conversations import Conversation, read_conversations
from talon.training.evaluation import measure_acceptance
from talon.training.head import build_head, draft_vocabulary, head_config, read_head
from talon.training.losses import TrainingConfig
from talon.training.run import HEAD_FILE, LOG_FILE, STATE_FILE, Processes, TrainingRun
from talon.training.self_talk import TalkConfig, make_conversations
from talon.trees import parse_tree
from talon.writing import atomic_file, locked

# On a GPU, updating the head takes longer than reading a few hundred tokens.
BATCH_TOKENS = {"cpu": 512, "cuda": 4096}
EVALUATION_FILE, PLOT_FILE = "evaluation.json", "training.png"
GROUPS = ("the head", "the data", "the training", "the run", "measuring instead")
BOTH = {"checkpoint_path", "out", "device", "dtype"}  # what training and measuring read
MEASURING = {"evaluate", "trees", "new_tokens"}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__.partition("\n\n")[0])
    add_options(parser)
    args = parser.parse_args(argv)
    unused = [
        name
        for name, value in vars(args).items()
        if value != parser.get_default(name)
        and name not in BOTH
        and (name in MEASURING) != bool(args.evaluate)
    ]
    if unused:
        does = "does not train" if args.evaluate else "is not given, which alone measures"
        raise ValueError(f"--evaluate {does}: leave out --{unused[0]}")
    return args


def add_options(parser: cli.Parser) -> None:
    groups = [parser.add_argument_group(name).add_argument for name in GROUPS]
    head, data, training, run, measuring = groups
    c = TrainingConfig
    head("--checkpoint_path", type=Path, default=cli.DEMO, help="the target file")
    head("--head", choices=("eagle1", "eagle3", "medusa"), default=c.head, help="its family")
    head("--out", type=Path, required=True, help="directory: head, log and what --resume needs")
    head("--draft_vocab_size", type=int, help="tokens it can guess (default: all, at most 32000)")
    head("--init", type=Path, help="a talon_draft.safetensors to go on from, with a new schedule")
    data("--data", default="self", help="self, or a JSON lines file of conversations")
    again = "let the target answer the turns of --data again"
    data("--regenerate", action="store_true", help=again)
    instead = "do not train: measure the head in --out on these questions"
    measuring("--evaluate", type=Path, metavar="QUESTIONS", help=instead)
    step = " or ".join(f"{count} on {device}" for device, count in BATCH_TOKENS.items())
    for add, name, default, low, high, meaning in (
        (data, "answer_tokens", 10**6, 1, 10**12, "how many self or --regenerate makes"),
        (data, "data_batch", TalkConfig.batch, 1, 10**4, "conversations answered at a time"),
        (data, "max_length", None, 8, 10**9, "tokens of a conversation at most (default: 2048)"),
        (data, "validation", c.validation, 0.0, 0.5, "share of conversations held out"),
        (training, "epochs", c.epochs, 1, 10**6, "times that every answer is seen"),
        (training, "batch_tokens", None, 1, 10**9, f"answer tokens of a step (default: {step})"),
        (training, "lr", c.lr, 1e-9, 1.0, "of the matrices; norms and lm_head: a quarter"),
        (training, "warmup", c.warmup, 0.0, 1.0, "share of the steps"),
        (training, "unroll", c.unroll, 1, 16, "levels of drafting that are trained; Medusa heads"),
        (training, "unroll_from", c.unroll_from, 0.0, 1.0, "share of the steps with only one"),
        (training, "feature_weight", c.feature_weight, 0.0, 1e6, "of the feature loss (eagle1)"),
        (training, "seed", c.seed, 0, 2**31 - 1, "of the order, the noise and the first weights"),
        (measuring, "new_tokens", 128, 2, 10**5, "of an answer"),
    ):
        add(f"--{name}", type=number(low, high), default=default, help=meaning)
    run("--device", default="auto", help="auto, cpu or cuda")
    precision = "of the target; in bf16 the head trains under autocast"
    run("--dtype", choices=("fp32", "bf16"), default=c.dtype, help=precision)
    sharding = "under torchrun: spread the target over the GPUs (FSDP); each loads it whole first"
    run("--shard_target", action="store_true", help=sharding)
    run("--resume", action="store_true", help="go on with the run in --out")
    trees = ["chain:4", "dynamic:nodes=32,levels=6,top_k=8"]
    measuring("--trees", nargs="+", default=trees, help="what the head grows")


def number(low: float, high: float) -> Callable[[str], float]:
    """An argparse type: a number like `low`, from `low` to `high`."""

    def parse(given: str) -> float:
        value = type(low)(given)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{given} is not allowed: give {low} to {high}")
        return value

    parse.__name__ = type(low).__name__
    return parse


def training_config(
    args: argparse.Namespace, target: ModelConfig, device: torch.device
) -> TrainingConfig:
    """The settings of the run: what was not given as it fits the target and the device."""
    longest = target.max_seq_length
    if args.max_length and args.max_length > longest:
        raise ValueError(f"max_length {args.max_length} is not allowed: give 8 to {longest}")
    given = {f.name: getattr(args, f.name) for f in fields(TrainingConfig) if f.name in args}
    given["batch_tokens"] = args.batch_tokens or BATCH_TOKENS[device.type]
    given["max_length"] = args.max_length or min(longest, TrainingConfig.max_length)
    given["init"] = args.init.name if args.init else None
    if args.head == "medusa":  # a level is a head, and all learn from the start
        given["unroll_from"] = 0.0
    return TrainingConfig(**given)


def check_run(args: argparse.Namespace, file: Checkpoint, processes: Processes) -> None:
    """Refuse what does not go together, before anything is written, loaded or made."""
    state = args.out / STATE_FILE
    if state.exists() and not args.resume:
        raise ValueError(f"{args.out} holds a run already: give --resume, or another --out")
    if args.resume and not state.exists():
        raise ValueError(f"{state} does not exist: start without --resume")
    makes_data = args.data == "self" or args.regenerate
    for wrong, what in (
        (processes.count == 1, "needs several processes: start it with torchrun"),
        (bool(file.quantization), "takes a target that is not quantised"),
        (makes_data, "takes ready conversations: make them in a run of its own, then --data FILE"),
    ):
        if args.shard_target and wrong:
            raise ValueError(f"--shard_target {what}")
    if args.out == Path():
        raise ValueError("--out is the current directory: give one of its own")
    if args.init is not None:
        read_file(args.init, "draft")
    if args.data == "self" and args.regenerate:
        raise ValueError("--regenerate answers the turns of a file: give it as --data FILE")
    if args.data != "self" and not Path(args.data).is_file():
        raise ValueError(f"{args.data!r} is no file: give --data self or a JSON lines file")


def join_group(args: argparse.Namespace) -> tuple[Processes, torch.device]:
    """This process among those that torchrun started, and its device."""
    device = pick_device(args.device)
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return Processes(sharded=args.shard_target), device
    if "RANK" not in os.environ:
        raise ValueError("WORLD_SIZE is set but RANK is not: start several processes with torchrun")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}")
    return Processes(dist.get_rank(), dist.get_world_size(), args.shard_target), device


def load_data(
    args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer | None, max_length: int
) -> list[Conversation]:
    """The conversations of --data, made by the target first where it is to."""
    path = Path(args.data)
    if args.data == "self" or args.regenerate:
        length = min(TalkConfig.length, max_length)
        config = TalkConfig(args.answer_tokens, args.data_batch, args.seed, length)
        turns = path if args.regenerate else None
        path = make_conversations(model, tokenizer, config, args.out, turns)
    return read_conversations(path, tokenizer, model.config, max_length)


@contextmanager
def run_folder(out: Path) -> Iterator[None]:
    """The folder of a run, for one training at a time; if nothing came of it, it goes again."""
    made = [path for path in (out, *out.parents) if not path.exists()]
    out.mkdir(parents=True, exist_ok=True)
    try:
        with locked(out) as alone:
            if not alone:
                raise ValueError(f"another training is under way in {out}: give another --out")
            yield
    finally:
        with suppress(OSError):  # the first that is not empty
            for path in made:
                path.rmdir()


def start_run(args: argparse.Namespace, processes: Processes, device: torch.device) -> TrainingRun:
    """Load, make or read the data, and set up the run."""
    files = open_files(args.checkpoint_path)
    config = training_config(args, files.config, device)
    sizes = head_config(files.config, config)
    check_run(args, files.target, processes)
    start = torch.device("cpu") if args.shard_target else device
    model = load_target(files, start, DTYPES[args.dtype], plain=args.shard_target)
    if args.shard_target:
        # Each layer is put together while it runs (FSDP, arXiv 2304.11277).
        mesh = dist.init_device_mesh(device.type, (processes.count,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        model = model.to(device)
    # One process makes what all of them read; the others wait, however long that takes.
    several = processes.count > 1
    waiting = dist.new_group(backend="gloo", timeout=timedelta(days=30)) if several else None
    source = args, model, files.tokenizer, config.max_length
    data = processes.rank == 0 and load_data(*source)
    if several:
        dist.barrier(waiting)
    data = data or load_data(*source)
    ids = draft_vocabulary(data, sizes.vocab_size, sizes.draft_vocab_size)
    if args.init:
        head = read_head(args.init, model, config, ids if args.draft_vocab_size else None)
    else:
        head = build_head(sizes, model, ids, config.seed)
    run = TrainingRun(model, head, data, config, args.out, processes)
    if args.resume:
        run.restore()
    return run


def train(args: argparse.Namespace) -> int:
    processes, device = join_group(args)
    first = processes.rank == 0
    try:
        with run_folder(args.out) if first else nullcontext():
            run = start_run(args, processes, device)
            if first:
                answers = sum(row.answer_tokens for row in run.data)
                parameters = sum(p.numel() for p in run.trained.values())
                note(
                    f"{len(run.data)} conversations with {answers} answer tokens, {len(run.held)} "
                    f"held out; {run.total} steps; {parameters} parameters"
                )
            run.train()
            if first:
                plot_log(args.out)
                note(f"wrote {args.out / HEAD_FILE}")
    finally:
        if processes.count > 1:
            dist.destroy_process_group()
    return 0


def plot_log(out: Path) -> None:
    """Cross-entropy and right guesses against tokens seen, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        note(f"no plot: matplotlib is not installed (the numbers are in {LOG_FILE})")
        return
    entries = [json.loads(line) for line in (out / LOG_FILE).read_text("utf-8").splitlines()]
    trained = [entry for entry in entries if "loss" in entry]
    held = [entry for entry in entries if "validation_accuracy" in entry]
    figure = Figure(figsize=(11, 4))
    left, right = figure.subplots(1, 2)
    seen = [entry["tokens"] for entry in trained]
    left.plot(seen, [entry["cross_entropy"][0] for entry in trained])
    left.set(title="cross-entropy at level 1, training", xlabel="answer tokens seen")
    right.plot(seen, [entry["accuracy"][0] for entry in trained], alpha=0.3, label="training")
    seen = [entry["tokens"] for entry in held]
    for level, values in enumerate(zip(*(e["validation_accuracy"] for e in held), strict=True), 1):
        right.plot(seen, values, marker="o", label=f"level {level}")
    right.set(title="right guesses, held-out", xlabel="answer tokens seen")
    right.legend()
    with atomic_file(out / PLOT_FILE) as file:
        figure.savefig(file, format="png", dpi=100, bbox_inches="tight")


def evaluate(args: argparse.Namespace) -> int:
    """Measure the head in --out on questions with each of --trees; written next to the head."""
    device = pick_device(args.device)
    files = open_files(args.checkpoint_path, args.out / HEAD_FILE)
    trees = [fit_tree(parse_tree(text), files.head_config) for text in args.trees]
    if any(not tree.needs_head or tree.lookup for tree in trees):
        raise ValueError("--trees measures the head: give chains, static and dynamic trees alone")
    if not args.evaluate.is_file():
        raise ValueError(f"{args.evaluate} is no file: give --evaluate a question.jsonl")
    if files.tokenizer is None:
        raise ValueError(f"no tokenizer next to {args.checkpoint_path}: copy tokenizer.json there")
    questions, problems = read_questions(args.evaluate)
    if problems:
        raise ValueError(f"{problems[0]}: repair the line")
    prompts = [encode_question(question, files.tokenizer) for question in questions]
    room = files.config.max_seq_length - max(map(len, prompts))
    if args.new_tokens > room:
        most = f"the context of {files.config.max_seq_length} leaves {max(room, 0)}"
        raise ValueError(f"new_tokens {args.new_tokens}: behind the longest question {most}")
    model = load_target(files, device, DTYPES[args.dtype])
    head = load_head(files, model, device, DTYPES[args.dtype], keep=True)
    measured = {
        "questions": args.evaluate.name,
        "new_tokens": args.new_tokens,
        "head": files.head.source,
    } | measure_acceptance(model, head, prompts, args.new_tokens, trees)
    with atomic_file(args.out / EVALUATION_FILE) as target:
        target.write(json.dumps(measured, indent=1).encode() + b"\n")
    for result in measured["trees"]:
        length, by_depth = result["acceptance_length"], result["accepted_by_depth"]
        note(f"{result['tree']}: acceptance length {length}, by depth {by_depth}")
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return evaluate(args) if args.evaluate else train(args)
