"""Train a draft head for a target, in process and from nothing but the target.

This is the command and its settings. The data is the target's own talk or a file of conversations
(draft_data.py); draft_run.py is the run, draft_unroll.py has the losses, draft_build.py the head's
beginning and end, draft_eval.py the measurement of what was trained. Leaves out: decoding
(engine.py), training the target.

    python train_draft.py --checkpoint_path F --head eagle1 --data self --out DIR
    torchrun --nproc_per_node 2 train_draft.py ...
"""

if __name__ == "__main__":  # before the imports that take seconds
    from talon.cli import guard_imports

    guard_imports()

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm

from model import ModelConfig, Transformer
from talon import cli
from talon.checkpoint import Checkpoint, atomic_file
from talon.cli import note
from talon.loading import (
    fit_tree,
    load_head,
    load_target,
    open_files,
    pick_device,
    read_file,
)
from talon.prompts import read_prompts
from talon.tokenizer import Tokenizer
from talon.training.batched import answer_greedily
from talon.training.conversations import Conversation
from talon.training.evaluation import replay, summarise
from talon.training.head import build_head, draft_vocabulary, head_config, read_head
from talon.training.losses import Settings, Teacher
from talon.training.run import HEAD_FILE, STATE_FILE, Run, plot, rounded, target_mark
from talon.training.self_talk import Recipe, prepare_data
from talon.trees import parse_tree

EVALUATION_FILE = "evaluation.json"

BOTH = {"checkpoint_path", "out", "device"}  # what training and measuring read

MEASURING = {"evaluate", "trees", "new_tokens"}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__.partition("\n\n")[0])
    add_head_options(parser.add_argument_group("the head").add_argument)
    add_data_options(parser.add_argument_group("the data").add_argument)
    add_training_options(parser.add_argument_group("the training").add_argument)
    add_run_options(parser.add_argument_group("the run").add_argument)
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


def add_head_options(add: Callable) -> None:
    add("--checkpoint_path", type=Path, default=cli.DEMO, help="the target file")
    add("--head", choices=("eagle1", "eagle3"), default="eagle1", help="its family")
    add("--out", type=Path, required=True, help="directory: head, log and what --resume needs")
    add("--draft_vocab_size", type=int, help="tokens it can guess (default: all, at most 32000)")
    add("--init", type=Path, help="a talon_draft.safetensors to go on from, with a new schedule")


def add_data_options(add: Callable) -> None:
    add("--data", default="self", help="self, or a JSON lines file of conversations")
    add("--regenerate", action="store_true", help="let the target answer the turns of --data anew")
    add("--answer_tokens", type=int, default=10**6, help="how many self or --regenerate makes")
    add("--data_batch", type=int, default=128, help="conversations answered at a time")
    add("--max_length", type=int, help="tokens; longer conversations are left out (default: 2048)")
    add("--validation", type=float, default=0.02, help="share of conversations held out")


def add_training_options(add: Callable) -> None:
    add("--epochs", type=int, default=3, help="times that every answer is seen")
    add("--batch_tokens", type=int, default=512, help="answer tokens of a step")
    add("--lr", type=float, default=1.5e-3, help="of the matrices; norms and lm_head: a quarter")
    add("--warmup", type=float, default=0.04, help="share of the steps")
    add("--unroll", type=int, default=3, help="levels of drafting that are trained")
    add("--unroll_from", type=float, default=0.5, help="share of the steps after which they are")
    add("--level_decay", type=float, default=0.8, help="weight of a level against the one before")
    add("--feature_weight", type=float, default=1.0, help="weight of the feature loss (eagle1)")
    add("--feature_noise", type=float, default=0.5, help="in units of the features' usual size")
    add("--seed", type=int, default=0, help="of the order, the noise and the weights at the start")


def add_run_options(add: Callable) -> None:
    add("--device", default="auto", help="auto, cpu or cuda")
    precision = "of the target; in bf16 the head trains under autocast"
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help=precision)
    add("--cache_gib", type=float, default=2.0, help="memory for features that epochs share")
    sharding = "under torchrun: spread the target over the GPUs (FSDP); each loads it whole first"
    add("--shard_target", action="store_true", help=sharding)
    add("--log_every", type=int, default=20, help="steps")
    add("--validate_every", type=int, default=500, help="steps")
    add("--save_every", type=int, default=500, help="steps")
    add("--resume", action="store_true", help="go on with the run in --out")
    measuring = "do not train: measure the head in --out on these questions"
    add("--evaluate", type=Path, metavar="QUESTIONS", help=measuring)
    trees = ["chain:4", "dynamic:nodes=32,levels=6,top_k=8"]
    add("--trees", nargs="+", default=trees, help="for --evaluate")
    add("--new_tokens", type=int, default=128, help="of an answer, for --evaluate")


ALLOWED = {
    "epochs": (1, 10**6),
    "batch_tokens": (1, 10**9),
    "answer_tokens": (1, 10**12),
    "data_batch": (1, 10**4),
    "lr": (1e-9, 1),
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


def check_range(args: argparse.Namespace, name: str, low: float, high: float) -> None:
    if not low <= getattr(args, name) <= high:
        raise ValueError(
            f"{name} {getattr(args, name)} is not allowed: give a value from {low} to {high}"
        )


def check_args(args: argparse.Namespace, target: ModelConfig) -> Settings:
    """The settings of the run; ValueError for a value that cannot be meant."""
    limit = min(target.max_seq_length, 2048)
    args.max_length = limit if args.max_length is None else args.max_length
    for name, (low, high) in (ALLOWED | {"max_length": (8, target.max_seq_length)}).items():
        check_range(args, name, low, high)
    names = set(Settings.__dataclass_fields__) - {"init"}
    return Settings(
        **{name: getattr(args, name) for name in names}, init=args.init.name if args.init else None
    )


def join_group(device: torch.device) -> tuple[int, int, torch.device]:
    """Rank, number of processes and this one's device; more than one process under torchrun."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return 0, 1, device
    if "RANK" not in os.environ:
        raise ValueError("WORLD_SIZE is set but RANK is not: start several processes with torchrun")
    world = int(os.environ["WORLD_SIZE"])
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


def check_run(args: argparse.Namespace, file: Checkpoint, world: int) -> None:
    """Refuse what does not go together, before anything is written, loaded or made."""
    if (args.out / STATE_FILE).exists() and not args.resume:
        raise ValueError(
            f"{args.out} holds a run already: give --resume to go on with it, or another --out"
        )
    if args.resume and not (args.out / STATE_FILE).exists():
        raise ValueError(f"{args.out / STATE_FILE} does not exist: start without --resume")
    makes_data = args.data == "self" or args.regenerate
    for wrong, what in (
        (world == 1, "needs several processes: start it with torchrun"),
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


def prepare(args: argparse.Namespace, rank: int, world: int, device: torch.device) -> Run:
    """Load, make or read the data, and set up the run."""
    files = open_files(args.checkpoint_path)
    settings = check_args(args, files.config)
    config = head_config(files.config, settings)
    check_run(args, files.target, world)
    args.out.mkdir(parents=True, exist_ok=True)
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    start = torch.device("cpu") if args.shard_target else device
    model = load_target(files, start, dtype, pack_for=device)
    model.requires_grad_(False)
    if args.shard_target:
        model, args.cache_gib = shard(model, device), 0.0
    tokenizer = files.tokenizer
    # One process makes what all of them read.
    data = rank == 0 and load_data(args, model, tokenizer)
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
    check_range(args, "new_tokens", *ALLOWED["new_tokens"])
    files = open_files(args.checkpoint_path, args.out / HEAD_FILE)
    trees = [fit_tree(parse_tree(text), files.head_config) for text in args.trees]
    if any(not tree.needs_head or tree.lookup for tree in trees):
        raise ValueError("--trees measures the head: give chains, static and dynamic trees alone")
    if not args.evaluate.is_file():
        raise ValueError(f"{args.evaluate} is no file: give --evaluate a question.jsonl")
    config, tokenizer = files.config, files.tokenizer
    if tokenizer is None:
        raise ValueError(
            f"no tokenizer lies next to {args.checkpoint_path}: questions are text, copy "
            "tokenizer.json there"
        )
    questions = read_prompts(args.evaluate, tokenizer)
    room = config.max_seq_length - max(map(len, questions))
    if args.new_tokens > room:
        raise ValueError(
            f"new_tokens {args.new_tokens} do not fit behind the longest question: the context of "
            f"{config.max_seq_length} leaves {max(room, 0)}"
        )
    model = load_target(files, device, torch.float32)
    head = load_head(files, model, device, torch.float32)
    texts = answer_greedily(model, questions, args.new_tokens)
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
        "head": files.head.source,
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
