"""How fast is this here, against what one would use instead, and what bounds it?

    python benchmark.py --checkpoint_path F --draft_checkpoint_path D --out results/
    python benchmark.py --roofline rtx3090

Every method decodes the same prompts with the same budget and stop ids, in one process, in turns:
all methods on a prompt, then the next prompt, then the next repetition; on a CPU, methods of the
same target in step, round by round. A method's speed is tokens over seconds, both summed over the
prompts; of a prompt's repetitions the median counts, and the spread is that of whole repetitions.
Tokens of the first forward count as time to first token, not as decoding.

Leaves out: what is compared (methods.py, peers.py), the physics (roofline.py), the plots
(plots.py), the check of a GPU (gpu_check.py).
"""

if __name__ == "__main__":  # before the imports that take seconds
    from talon.cli import guard_imports

    guard_imports()

import itertools
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from talon.cli import DEMO, Parser, check_output, note, run
from talon.decoder import Decoder
from talon.loading import DTYPES, device_name, fit_context, open_files, pick_device
from talon.measuring.methods import (
    NAMES,
    TREES,
    Loaded,
    Run,
    TalonMethod,
    load_all,
    missing,
    open_peer,
    open_peers,
    our_methods,
)
from talon.measuring.report import (
    Cell,
    compare_ids,
    complete,
    curve_table,
    find_section,
    heading,
    readme_section,
    summarize,
    table,
    update_readme,
    versions,
    write_reports,
)
from talon.measuring.roofline import (
    bound,
    linear_parameters,
    machine_rates,
    mode_rate,
    pick_card,
    predict,
    roofline_table,
)
from talon.prompts import BUILT_IN, encode_question, made_up_prompts, read_questions, spread
from talon.records import bytes_per_round, project_commit
from talon.sampling import SamplingConfig
from talon.tuning.costs import head_costs, row_costs, take_turns

ROWS = (1, 2, 4, 8, 16, 24, 26, 32, 48, 64)

BEAMS = (1, 4, 8, 10)


# ---------------------------------------------------------------- measuring


def measure(
    methods: list,
    prompts: list[list[int]],
    args: Namespace,
    stop_ids: frozenset[int],
    log: Path | None,
) -> Iterator[Cell]:
    """All cells, in turns. Every finished cell is on disk before the next turn begins."""
    for method in methods:  # compile, and touch every page once
        for temperature in args.temperature:
            note(f"warming up {method.name} at temperature {temperature:g} ...")
            sampling = SamplingConfig(temperature, seed=args.seed)
            if isinstance(method, TalonMethod):  # the rounds of a fallback too
                method.decoders[temperature].warm_up(sampling)
            run_in_turns([method], prompts[0], sampling, min(8, args.max_new_tokens), stop_ids)
    for repeat in range(args.repeats):
        for number, ids in enumerate(prompts):
            turn = (number + repeat) % len(methods)
            groups: dict[str, list] = {}
            for method in methods[turn:] + methods[:turn]:
                groups.setdefault(getattr(method, "group", method.name), []).append(method)
            for temperature, group in itertools.product(args.temperature, groups.values()):
                sampling = SamplingConfig(temperature, seed=args.seed + number)
                runs = run_in_turns(group, ids, sampling, args.max_new_tokens, stop_ids)
                for method, run_ in zip(group, runs, strict=True):
                    cell = Cell(method.name, temperature, repeat, number, run_)
                    if log is not None:
                        with log.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(asdict(cell)) + "\n")
                    yield cell
        note(f"repetition {repeat + 1} of {args.repeats} done")


def run_in_turns(
    group: list, ids: list[int], sampling: SamplingConfig, budget: int, stop_ids: frozenset[int]
) -> list[Run]:
    """A peer alone, or our methods of one target. On a CPU, whose speed varies from second to
    second, these go through the text in step; on a GPU, where a round is queued while the one
    before runs, one after another. Different targets never go in step: each would find the caches
    full of other weights.
    """
    if not isinstance(group[0], TalonMethod):
        return [peer.run(ids, sampling, budget, stop_ids) for peer in group]
    if len(group) > 1 and group[0].decoders[sampling.temperature].device.type == "cuda":
        return [run_in_turns([one], ids, sampling, budget, stop_ids)[0] for one in group]
    texts = [method.start(ids, sampling, budget, stop_ids) for method in group]
    for _ in take_turns(texts):
        pass
    return [method.finish(text) for method, text in zip(group, texts, strict=True)]


def results(
    methods: list, cells: list[Cell], prompts: list[list[int]], args: Namespace
) -> list[dict]:
    """The summary of every method at every temperature, in the order of the methods."""
    kept, rows = complete(cells, methods), []
    plain = {m.group: m for m in methods if isinstance(m, TalonMethod) and m.is_plain}
    for temperature in args.temperature:
        for method in methods:
            group = getattr(method, "group", next(iter(plain)))
            of = [c for c in kept if c.temperature == temperature]
            mine = [c for c in of if c.method == method.name]
            base = [c for c in of if c.method == plain[group].name]
            if not mine:
                continue
            row = summarize(method, mine, base)
            ours = isinstance(method, TalonMethod)
            if (ours or temperature == 0) and method is not plain[group]:
                row["ids"] = compare_ids(
                    mine, base, plain[group].decoders[temperature], prompts, args.seed
                )
            rows.append(row)
    return rows


# ---------------------------------------------------------------- the row-cost curve


def cost_curves(args: Namespace, loaded: list[Loaded], context: int, machine: dict) -> list[dict]:
    """Milliseconds of a target forward by rows and of a draft level by width, with what the machine
    allows at best.
    """
    decoders = [Decoder(target.model, context, compile=args.compile) for target in loaded]
    committed = min(256, context // 2)
    note("measuring what rows cost ...")
    curves = []
    for target, decoder, rows in zip(
        loaded, decoders, row_costs(decoders, ROWS, committed), strict=True
    ):
        moved = bytes_per_round(decoder, committed)
        operations = 2 * linear_parameters(target.model.config)
        rate = mode_rate(target.precision.split("/")[0], decoder.device, machine)
        best = {
            n: bound(moved, operations * n, machine["copy_bytes_per_s"], rate) * 1e3 for n in rows
        }
        heads = {}
        for name, head in target.heads.items():
            beams = [beam for beam in BEAMS if beam <= head.config.draft_vocab_size]
            heads[name] = {
                b: s * 1e3
                for b, s in head_costs(decoder, head, beams, committed, args.compile).level.items()
            }
        curves.append(
            {
                "target": target.name,
                "committed": committed,
                "rows_ms": {n: s * 1e3 for n, s in rows.items()},
                "bound_ms": best,
                "bytes": moved,
                "head_level_ms": heads,
            }
        )
    return curves


# ---------------------------------------------------------------- the command line


def parse_args(argv: list[str] | None) -> Namespace:
    parser = Parser(
        prog="benchmark.py", description="Measure decoding against its alternatives and its bounds."
    )
    add = parser.add_argument
    add("--checkpoint_path", type=Path, action="append", help="target file; may be repeated")
    add("--draft_checkpoint_path", type=Path, action="append", help="head file; may be repeated")
    add("--tree", action="append", help=f"tree of every head; may be repeated ({', '.join(TREES)})")
    add("--lookup", type=int, default=5, help="tokens that prompt lookup guesses; 0 leaves it out")
    add("--peers", default="auto", help=f"auto, none or some of {', '.join(NAMES)}, with commas")
    add("--gguf", type=Path, help="file for llama.cpp (default: the one beside the checkpoint)")
    add("--questions", type=Path, default=BUILT_IN, help="FastChat-style question.jsonl")
    add("--num_prompts", type=int, default=32, help="prompts to use, from all categories in turn")
    add("--bad_questions", default="refuse", help="what to do about unusable lines: refuse or skip")
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
    add("--readme", type=Path, help="Markdown file whose marked section is to show the results")
    add("--roofline", metavar="CARD", help="print predictions for a card (rtx3090) and stop")
    return parser.parse_args(argv)


def check_args(args: Namespace) -> None:
    for name, least in (("num_prompts", 1), ("max_new_tokens", 2), ("repeats", 1), ("lookup", 0)):
        value = getattr(args, name)
        if value < least:
            raise ValueError(f"{name} {value} is not allowed: give at least {least}")
    cores = os.cpu_count() or 1
    if args.threads is not None and not 1 <= args.threads <= cores:
        raise ValueError(f"threads {args.threads} is not allowed: give 1 to {cores}, or none")
    if args.lookup > 64:
        raise ValueError(f"lookup {args.lookup} is not allowed: give 1 to 64 tokens, or 0")
    for paths in (args.checkpoint_path or [], args.draft_checkpoint_path or []):
        if len({path.resolve() for path in paths}) < len(paths):
            raise ValueError(f"{paths[-1]} or another file is given twice: give each one once")
    if args.bad_questions not in ("refuse", "skip"):
        raise ValueError(f"bad_questions {args.bad_questions!r} is not known: give refuse or skip")
    args.temperature = args.temperature or [0.0, 1.0]
    for temperature in args.temperature:
        for seed in (args.seed, args.seed + args.num_prompts - 1):
            SamplingConfig(temperature, seed=seed)
    if not args.decoding and not args.row_costs:
        raise ValueError("--no_decoding and --no_row_costs leave nothing to measure: give one")
    if not args.decoding and args.tree:
        raise ValueError("--no_decoding runs no tree: leave out --tree")
    if args.readme is not None:  # refuse before measuring
        find_section(args.readme)
        check_output("--readme", args.readme.resolve(), [])
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out} is a file: give the name of a directory")
    if args.gguf is not None and not args.gguf.is_file():
        raise ValueError(f"--gguf {args.gguf} is no file: give one, or leave it out")
    if args.retune and "auto" not in (args.tree or ()):
        raise ValueError("--retune measures for --tree auto: give that too")
    if args.tree and not args.draft_checkpoint_path:
        raise ValueError("--tree needs a head: give --draft_checkpoint_path")


def read_prompts(args: Namespace) -> tuple[list[list[int]], list[str]]:
    """The prompts as ids, and what was skipped. A bad line is refused or skipped, as
    --bad_questions says.
    """
    path = (args.checkpoint_path or [DEMO])[0]
    files = open_files(path)
    config, tokenizer = files.config, files.tokenizer
    limit = fit_context(args.max_seq_length, config, 10**9) - args.max_new_tokens
    if tokenizer is None and args.questions == BUILT_IN:
        note("note: no tokenizer beside the checkpoint: made-up ids stand in for the prompts")
        return made_up_prompts(config.vocab_size, args.num_prompts, max(limit, 1)), []
    if tokenizer is None:
        raise ValueError(
            f"--questions needs a tokenizer beside {path}: copy tokenizer.json or "
            "tokenizer.model there"
        )
    questions, problems = read_questions(args.questions)
    prompts = []
    for question in spread(questions, args.num_prompts):
        ids = encode_question(question, tokenizer)
        if len(ids) > limit:
            problems.append(
                f"{args.questions}, line {question.line}: {len(ids)} tokens and "
                f"{args.max_new_tokens} new ones do not "
                f"fit into the context of {limit + args.max_new_tokens}"
            )
        else:
            prompts.append(ids)
    for problem in problems:
        if args.bad_questions == "refuse":
            raise ValueError(f"{problem}: repair the line or give --bad_questions skip")
        note(f"skipped: {problem}")
    if not prompts:
        raise ValueError(f"{args.questions}: no usable question is left")
    return prompts, problems


def wanted_peers(args: Namespace) -> list[str]:
    if args.peers == "none":
        return []
    if args.peers == "auto":
        return list(NAMES)
    names = list(dict.fromkeys(args.peers.split(",")))
    for name in names:
        reason = missing(name)
        if reason:
            raise ValueError(reason)
    return names


def compare(args: Namespace, argv: list[str]) -> int:
    """The side-by-side measurement. Returns the exit code."""
    names = wanted_peers(args) if args.decoding else []
    prompts, skipped = read_prompts(args) if args.decoding else ([], [])
    loaded = load_all(args)
    device, model = pick_device(args.device), loaded[0].model
    need = max(map(len, prompts)) + args.max_new_tokens + 1 if prompts else 256
    context = fit_context(
        args.max_seq_length or min(need, model.config.max_seq_length), model.config
    )
    stop_ids = frozenset() if args.ignore_eos else frozenset(model.config.eos_ids)
    machine = machine_rates(device, model.norm.weight.dtype)
    methods: list = list(our_methods(args, loaded, context)) if args.decoding else []
    threads = torch.get_num_threads()
    shared: dict = {}
    methods += open_peers(
        names,
        lambda name: open_peer(name, loaded[0].path, args.gguf, context, threads, shared),
        note,
        args.peers != "auto",
    )
    cells, interrupted, curves = [], False, []
    if args.out is not None:  # only now: until here anything may still be refused
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "cells.jsonl").write_text("", encoding="utf-8")
    try:
        log = args.out / "cells.jsonl" if args.out else None
        for cell in measure(methods, prompts, args, stop_ids, log) if args.decoding else ():
            cells.append(cell)
        if args.row_costs:
            curves = cost_curves(args, loaded, context, machine)
    except KeyboardInterrupt:
        interrupted = True
        note("interrupted: reporting what was measured")
    questions = {
        "file": args.questions.name,
        "count": len(prompts),
        "tokens": sum(map(len, prompts)),
        "skipped": skipped,
    }
    measured = {"methods": results(methods, cells, prompts, args), "row_costs": curves}
    finish(args, conditions(args, argv, device, machine, questions, interrupted) | measured)
    return 130 if interrupted else 0


def conditions(
    args: Namespace,
    argv: list[str],
    device: torch.device,
    machine: dict,
    questions: dict,
    interrupted: bool,
) -> dict:
    """Everything about a run but its results: without it they mean nothing."""
    return {
        "argv": argv,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "commit": project_commit(),
        "machine": machine,
        "interrupted": interrupted,
        "prompts": questions,
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
        "ignore_eos": args.ignore_eos,
    }


def finish(args: Namespace, report: dict) -> None:
    """The table for people, then one line for machines, then the files."""
    print(f"{heading(report)}\n\n{table(report['methods'])}\n")
    print(curve_table(report["row_costs"]))
    print(json.dumps(report), flush=True)
    if args.out is not None:
        write_reports(args.out, report)
    if args.readme is not None and not report["interrupted"]:
        update_readme(args.readme, readme_section(report))


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    check_args(args)
    argv = argv if argv is not None else sys.argv[1:]
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.roofline is not None:
        card = pick_card(args.roofline)
        print(
            roofline_table(card),
            json.dumps({"card": asdict(card), "predictions": predict(card)}),
            sep="\n\n",
        )
        return 0
    return compare(args, argv)


if __name__ == "__main__":
    run(main)
