"""How fast is this here, against what one would use instead, and what bounds it?

    python benchmark.py --checkpoint_path F --draft_checkpoint_path D --out docs
    python benchmark.py --roofline rtx3090

Every method decodes the same prompts with the same budget and stop ids, in one process, in turns:
all methods on a prompt, then the next prompt, then the next repetition; on a CPU, methods of the
same target round by round. A method's speed is tokens over seconds, both summed over the prompts;
of a prompt's repetitions the median counts, and the spread is that of whole repetitions. Tokens of
the first forward count as time to first token, not as decoding.

Leaves out: what is compared (talon/measuring/methods.py), tables and plots (report.py), the physics
(roofline.py), choosing a tree (talon/tuning), the check of a GPU (scripts/gpu_check.py)."""

if __name__ == "__main__":  # what follows is imported, which takes seconds, and its main is run
    from talon.cli import start

    start("benchmark", shared=True)

import itertools
import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TextIO

import torch

from eagle_draft import DraftHead
from talon.checking import compare_ids
from talon.cli import DEMO, Parser, note
from talon.decoder import Decoder, Generation
from talon.loading import DTYPES, Files, device_name, fit_context, open_files, pick_device, shared
from talon.measuring.answers import write_answers
from talon.measuring.methods import (
    PEERS,
    TREES,
    Decoded,
    Peer,
    TalonMethod,
    Target,
    Task,
    load_all,
    open_peers,
    our_methods,
    peer_names,
)
from talon.measuring.report import (
    Cell,
    by_category,
    complete,
    page,
    summarize,
    versions,
    write_reports,
)
from talon.measuring.roofline import (
    CARDS,
    STREAM,
    predict,
    readers,
    roofline_table,
    same_acceptance,
)
from talon.prompts import (
    BUILT_IN,
    Question,
    encode_question,
    made_up_prompts,
    read_questions,
    spread,
)
from talon.records import bytes_per_round, project_commit
from talon.sampling import SamplingConfig
from talon.trees import parse_tree
from talon.tuning.choice import forget_choices
from talon.tuning.costs import head_costs, take_turns, target_pass, times

ROWS = (1, 2, 4, 8, 16, 24, 26, 32, 48, 64)

BEAMS = (1, 4, 8, 10)


# ---------------------------------------------------------------- measuring


def measure(
    methods: list[TalonMethod | Peer],
    prompts: list[list[int]],
    args: Namespace,
    stop_ids: frozenset[int],
) -> Iterator[Cell]:
    """All cells, in turns."""
    on_gpu, budget = pick_device(args.device).type == "cuda", min(8, args.max_new_tokens)
    for method, temperature in itertools.product(methods, args.temperature):
        note(f"warming up {method.name} at temperature {temperature:g} ...")
        task = Task(prompts[0], SamplingConfig(temperature, seed=args.seed), budget, stop_ids)
        measure_prompt([method], task, on_gpu)
    started, total = time.perf_counter(), args.repeats * len(prompts)
    for repeat, (number, ids) in itertools.product(range(args.repeats), enumerate(prompts)):
        turn = (number + repeat) % len(methods)
        groups: dict[str, list[TalonMethod | Peer]] = {}
        for method in methods[turn:] + methods[:turn]:
            groups.setdefault(method.target, []).append(method)
        for temperature, group in itertools.product(args.temperature, groups.values()):
            sampling = SamplingConfig(temperature, seed=args.seed + number)
            task = Task(ids, sampling, args.max_new_tokens, stop_ids)
            for method, decoded in zip(group, measure_prompt(group, task, on_gpu), strict=True):
                yield Cell(method.name, temperature, repeat, number, decoded)
        done = repeat * len(prompts) + number + 1
        if done * 10 // total > (done - 1) * 10 // total or done == 1:
            left = (time.perf_counter() - started) * (total - done) / done
            note(f"prompt {number + 1} of repetition {repeat + 1} done, about {left:.0f} s left")


def measure_prompt(group: list[TalonMethod | Peer], task: Task, on_gpu: bool) -> list[Decoded]:
    """The methods of one target on one prompt. Different targets never take turns by rounds: each
    would find the caches full of other weights."""
    texts = [method.start(task) for method in group]
    for _ in take_turns(texts, on_gpu):
        pass
    return [text.result() for text in texts]


def results(
    methods: list[TalonMethod | Peer],
    cells: list[Cell],
    prompts: list[list[int]],
    args: Namespace,
    questions: Sequence[Question] = (),
) -> list[dict]:
    """The summary of every method at every temperature, in the order of the methods."""
    kept, rows = complete(cells, len(methods)), []
    plain = {method.target: method for method in methods if method.plain}
    for temperature, method in itertools.product(args.temperature, methods):
        base = plain.get(method.target, methods[0])
        wanted = (method.name, temperature), (base.name, temperature)
        mine, others = ([c for c in kept if (c.method, c.temperature) == w] for w in wanted)
        if mine:
            rows.append(summarize(method, mine, others))
            rows[-1]["categories"] = by_category(mine, questions) if questions else {}
            if not method.own_sampler:
                tree, length = method.decoders[temperature].tree, rows[-1]["acceptance_length"]
                rows[-1]["rtx3090"] = same_acceptance(tree, method.family, length)
            if method is not base and (temperature == 0 or not method.own_sampler):
                decoder = base.decoders[temperature]
                rows[-1]["ids"] = compare_all(mine, others, decoder, prompts, args.seed)
    return rows


def compare_all(
    cells: list[Cell], plain: list[Cell], decoder: Decoder, prompts: list[list[int]], seed: int
) -> dict:
    """On how many prompts a method's ids are those of plain decoding, and the first difference."""
    wanted = {cell.prompt: cell.run.tokens for cell in plain if cell.repeat == 0}
    mine = {cell.prompt: cell.run.tokens for cell in cells if cell.repeat == 0}
    differing = [number for number in sorted(mine) if mine[number] != wanted[number]]
    found = {"prompts": len(mine), "identical": len(mine) - len(differing)}
    if not differing:
        return found | dict.fromkeys(("first_prompt", "first_difference", "gap"))
    number = differing[0]
    sampling = SamplingConfig(cells[0].temperature, seed=seed + number)
    first = compare_ids(decoder, prompts[number], mine[number], wanted[number], sampling)
    return first | found | {"first_prompt": number}


# ---------------------------------------------------------------- the row-cost curve


def cost_curves(args: Namespace, targets: list[Target], context: int) -> dict:
    """Milliseconds of a target forward by rows and of a draft level by width, and what reading the
    same bytes takes, all of them in turns."""
    note("measuring what rows cost ...")
    decoders = [Decoder(target.model, context, compile=args.compile) for target in targets]
    committed, device = min(256, context // 2), decoders[0].device
    size = STREAM[device.type]
    reads = readers(device, size)
    calls = {
        (index, count): target_pass(decoder, count, committed)
        for (index, decoder), count in itertools.product(enumerate(decoders), ROWS)
    }
    taken = times(calls | reads, device)
    rate = size / min(min(taken[name]) for name in reads)
    curves = []
    for index, (target, decoder) in enumerate(zip(targets, decoders, strict=True)):
        heads, moved = {}, bytes_per_round(decoder, committed)
        for head in (head for head in target.heads if isinstance(head.module, DraftHead)):
            beams = [beam for beam in BEAMS if beam <= head.module.config.draft_vocab_size]
            costs = head_costs(decoder, head.module, beams, committed, args.compile)
            heads[head.name] = {beam: s * 1e3 for beam, s in costs.level.items()}
        rows_ms = {count: median(taken[index, count]) * 1e3 for count in ROWS}
        curve = {"target": target.name, "committed": committed, "rows_ms": rows_ms}
        reading = {"bytes": moved, "reading_ms": moved / rate * 1e3}
        curves.append(curve | reading | {"head_level_ms": heads})
    return {"row_costs": curves, "read_bytes_per_s": rate}


# ---------------------------------------------------------------- the command line


def parse_args(argv: list[str] | None) -> Namespace:
    parser = Parser(
        prog="benchmark.py", description="Measure decoding against its alternatives and its bounds."
    )
    add = parser.add_argument
    add("--checkpoint_path", type=Path, action="append", help="target file; may be repeated")
    add("--draft_checkpoint_path", type=Path, action="append", help="head file; may be repeated")
    add(
        "--tree",
        action="append",
        help=f"of every head, or preset; may be repeated ({', '.join(TREES)})",
    )
    add("--lookup", type=int, default=5, help="tokens that prompt lookup guesses; 0 leaves it out")
    add("--lookahead", default="", metavar="W,N,G", help="Lookahead decoding too, such as 5,3,5")
    add("--peers", default="auto", help=f"auto, none or some of {', '.join(PEERS)}, with commas")
    add("--gguf", type=Path, help="file for llama.cpp (default: the one next to the checkpoint)")
    add("--questions", type=Path, default=BUILT_IN, help="FastChat-style question.jsonl")
    add("--turns", type=int, default=1, choices=[1, 2], help="2: their second turns too")
    add("--num_prompts", type=int, default=32, help="prompts to use, from all categories in turn")
    bad = "what to do about unusable lines"
    add("--bad_questions", default="refuse", choices=["refuse", "skip"], help=bad)
    add("--max_new_tokens", type=int, default=128, help="tokens to generate at most per prompt")
    add("--ignore_eos", action="store_true", help="go on past the model's stop tokens")
    add("--repeats", type=int, default=3, help="repetitions of everything")
    add("--temperature", type=float, action="append", help="may be repeated (default: 0 and 1)")
    add("--seed", type=int, default=0, help="of the first prompt; the next has the next")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="precision of computing")
    add("--threads", type=int, help="CPU threads for everything (default: torch's choice)")
    add("--max_seq_length", type=int, help="context to provide for (what the prompts need)")
    add("--no_compile", dest="compile", action="store_false", help="run eagerly")
    add("--no_decoding", dest="decoding", action="store_false", help="the row-cost curve only")
    add("--no_row_costs", dest="row_costs", action="store_false", help="no row-cost curve")
    add("--retune", action="store_true", help="let --tree auto measure again")
    add("--out", type=Path, help="directory for results.json, results.md, cells.jsonl and plots")
    add("--roofline", choices=list(CARDS), help="print predictions for this card and stop")
    args = parser.parse_args(argv)
    # Defaults of what may be repeated: argparse would append to them.
    args.checkpoint_path = args.checkpoint_path or [DEMO]
    args.draft_checkpoint_path = args.draft_checkpoint_path or []
    args.temperature = args.temperature or [0.0, 1.0]
    return args


def check_args(args: Namespace) -> None:
    limits = {"num_prompts": (1, 10**6), "max_new_tokens": (2, 10**6), "repeats": (1, 10**6)}
    limits |= {"lookup": (0, 64), "threads": (1, os.cpu_count() or 1)}
    for name, (least, most) in limits.items():
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            raise ValueError(f"{name} {value} is not allowed: give {least} to {most}")
    for paths in (args.checkpoint_path, args.draft_checkpoint_path):
        if len({path.resolve() for path in paths}) < len(paths):
            raise ValueError(f"{paths[-1]} or another file is given twice: give each one once")
    for temperature in args.temperature:
        for seed in (args.seed, args.seed + args.num_prompts - 1):
            SamplingConfig(temperature, seed=seed)
    if not args.decoding and not args.row_costs:
        raise ValueError("--no_decoding and --no_row_costs leave nothing to measure: give one")
    if not args.decoding and args.tree:
        raise ValueError("--no_decoding runs no tree: leave out --tree")
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out} is a file: give the name of a directory")
    if args.gguf is not None and not args.gguf.is_file():
        raise ValueError(f"--gguf {args.gguf} is no file: give one, or leave it out")
    if args.retune and "auto" not in (args.tree or ()):
        raise ValueError("--retune measures for --tree auto: give that too")
    if args.lookahead:
        parse_tree(f"lookahead:{args.lookahead}")  # refused before anything is loaded
    if args.tree and not args.draft_checkpoint_path:
        raise ValueError("--tree needs a head: give --draft_checkpoint_path")
    if args.decoding:
        peer_names(args.peers)


def read_prompts(
    args: Namespace, files: Files
) -> tuple[list[list[int]], list[Question], list[str]]:
    """The prompts as ids, their questions, and what was left out. A bad line of a file of the
    user's is refused or skipped, as --bad_questions says; a prompt of our own is only too long for
    a small context."""
    own, config, tokenizer = args.questions == BUILT_IN, files.config, files.tokenizer
    context = fit_context(args.max_seq_length, config, 10**9)
    limit = context - args.max_new_tokens
    if tokenizer is None and own:
        note("note: no tokenizer next to the checkpoint: made-up ids stand in for the prompts")
        prompts = made_up_prompts(config.vocab_size, args.num_prompts, max(limit, 1))
        return prompts, [Question(n, n, "", "") for n in range(len(prompts))], []
    if tokenizer is None:
        place = args.checkpoint_path[0]
        raise ValueError(f"--questions needs a tokenizer: copy tokenizer.json next to {place}")
    questions, problems = read_questions(args.questions)
    prompts, used = [], []
    for question in spread(questions, args.num_prompts):
        ids = encode_question(question, tokenizer)
        if len(ids) <= limit:
            prompts.append(ids)
            used.append(question)
        else:
            problems.append(
                f"{args.questions}, line {question.line}: {len(ids)} tokens and "
                f"{args.max_new_tokens} new ones do not fit into the context of {context}"
            )
    for problem in problems:
        if args.bad_questions == "refuse" and not own:
            raise ValueError(f"{problem}: repair the line or give --bad_questions skip")
        note(f"skipped: {problem}")
    if not prompts:
        advice = "lower --max_new_tokens or raise --max_seq_length" if own else "repair a line"
        raise ValueError(f"{args.questions}: no usable question is left: {advice}")
    return prompts, used, problems


def second_turns(
    args: Namespace, target: Target, prompts: list[list[int]], questions: list[Question]
) -> None:
    """Append the second turns, each behind the target's own greedy answer to the first."""
    tokenizer, config = target.files.tokenizer, target.files.config
    longest = fit_context(args.max_seq_length, config, 10**9)
    context = min(longest, max(map(len, prompts)) + args.max_new_tokens + 1)
    decoder = Decoder(target.model, context, compile=args.compile)
    for ids, question in list(zip(prompts, questions, strict=True)):
        if tokenizer is None or not question.later:
            continue
        stop_ids = frozenset(config.eos_ids)
        run = Generation(decoder, ids, SamplingConfig(), args.max_new_tokens, stop_ids)
        answer = tokenizer.decode(token for token, _ in run)
        both = encode_question(question, tokenizer, answer or " ")
        if len(both) + args.max_new_tokens <= longest:
            prompts.append(both)
            questions.append(replace(question, turn=2))


def compare(args: Namespace, argv: list[str]) -> int:
    """The side-by-side measurement. Returns the exit code."""
    opened = [shared(open_files(path)) for path in args.checkpoint_path]
    config = opened[0].config
    prompts, questions, skipped = read_prompts(args, opened[0]) if args.decoding else ([], [], [])
    targets = load_all(args, opened)
    if args.turns == 2 and prompts:
        second_turns(args, targets[0], prompts, questions)
    need = max(map(len, prompts)) + args.max_new_tokens + 1 if prompts else 256
    context = fit_context(args.max_seq_length or min(need, config.max_seq_length), config)
    stop_ids = frozenset() if args.ignore_eos else frozenset(config.eos_ids)
    methods: list[TalonMethod | Peer] = []
    if args.decoding:
        for target in targets if args.retune else ():
            forget_choices(target.files)
        methods += our_methods(args, targets, context)
        methods += open_peers(args, targets[0], context)
    report = conditions(args, argv, prompts, skipped)
    cells: list[Cell] = []
    try:
        # Only here is an old file of cells replaced: before, anything may still be refused.
        with open_cells(args.out) as file:
            for cell in measure(methods, prompts, args, stop_ids) if args.decoding else ():
                cells.append(cell)
                file.write(json.dumps(asdict(cell)) + "\n")
        if args.row_costs:
            report |= cost_curves(args, targets, context)
    except KeyboardInterrupt:
        report["interrupted"] = True
        note("interrupted: reporting what was measured")
    report["methods"] = results(methods, cells, prompts, args, questions)
    # The table for people, then one line for machines, then the files.
    print(f"{page(report)}\n\n{json.dumps(report)}", flush=True)
    if args.out is not None:
        write_reports(args.out, report)
        if targets[0].files.tokenizer is not None:
            write_answers(args.out, cells, questions, targets[0].files.tokenizer)
    return 130 if report["interrupted"] else 0


def open_cells(out: Path | None) -> TextIO:
    """Where every measurement is written before the next one begins, a line at a time."""
    if out is None:
        return open(os.devnull, "w")
    out.mkdir(parents=True, exist_ok=True)
    return (out / "cells.jsonl").open("w", buffering=1, encoding="utf-8")


def conditions(
    args: Namespace, argv: list[str], prompts: list[list[int]], skipped: list[str]
) -> dict:
    """Everything about a run but its results: without it they mean nothing."""
    tokens = sum(map(len, prompts))
    return {
        "argv": argv,
        "device": device_name(pick_device(args.device)),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "commit": project_commit(),
        "interrupted": False,
        "prompts": {"file": args.questions.name, "count": len(prompts), "tokens": tokens}
        | {"skipped": skipped},
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
        "ignore_eos": args.ignore_eos,
        "row_costs": [],
    }


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    check_args(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.roofline is None:
        return compare(args, argv if argv is not None else sys.argv[1:])
    card = CARDS[args.roofline]
    found = {"card": asdict(card), "predictions": predict(card)}
    print(roofline_table(card), json.dumps(found), sep="\n\n")
    return 0
