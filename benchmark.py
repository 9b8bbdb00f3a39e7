"""How fast is this here, against what one would use instead, and what bounds it?

    python benchmark.py --checkpoint_path F --draft_checkpoint_path D --out results/
    python benchmark.py --roofline rtx3090
    python benchmark.py --gpu_check --out results/

Every method decodes the same prompts with the same budget and stop ids, in one process, in turns: all methods on a
prompt, then the next prompt, then the next repetition. A method's speed is tokens over seconds, both summed over the
prompts of a repetition; reported are the median of the repetitions and their spread. Tokens of the first forward
count as time to first token, not as decoding.

Leaves out: the physics (roofline.py), peers (peers.py), the plots (plots.py), the check of a GPU (gpu_check.py).
"""

import json
import os
import platform
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from cli import Parser, run
from eagle_draft import DraftConfig, Tree
from engine import Decoder, Generation
from generate import (
    DEMO,
    DTYPES,
    bytes_per_round,
    choice_gap,
    device_name,
    find_tokenizer,
    fit_context,
    fit_tree,
    load_head,
    load_target,
    module_bytes,
    note,
    peak_memory,
    pick_device,
    pick_dtype,
    precision_name,
    project_commit,
    read_kind,
)
from model import ModelConfig, Transformer
from peers import NAMES, Run, missing, open_peer, open_peers
from questions import BUILT_IN, encode_question, prompts_for, read_questions, spread
from roofline import bound, copy_bandwidth, pick_card, predict, product_rate, roofline_table
from sampling import SamplingConfig
from tuning import head_costs, row_costs, settle

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
BEAMS = (1, 4, 8, 10)
TREES = ("chain:3", "static", "dynamic:nodes=24,levels=5,top_k=8")


# ---------------------------------------------------------------- methods


class TalonMethod:
    """One target, draft source and tree of ours."""

    def __init__(self, name: str, group: str, decoder: Decoder) -> None:
        self.name, self.group, self.decoder = name, group, decoder
        tree, model = decoder.tree, decoder.model
        self.tree = tree.name
        held = [model, decoder.cache, *([decoder.drafter.head.layer, decoder.drafter.cache] if tree.needs_head else [])]
        self.memory_bytes = sum(module_bytes(module) for module in held)

    def run(self, ids: list[int], sampling: SamplingConfig, budget: int, stop_ids: frozenset[int]) -> Run:
        decoder = self.decoder
        decoder.cached = []  # every prompt is timed with its own prefill
        if decoder.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(decoder.device)
        generation = Generation(decoder, ids, sampling, budget, stop_ids)
        for _ in generation:
            pass
        stats = generation.stats
        moved = bytes_per_round(decoder, len(ids) + len(generation.tokens) / 2) * stats.rounds
        return Run(
            generation.tokens, stats.prefill_s, stats.decode_s, stats.emitted, stats.rounds, stats.accepted_by_depth,
            stats.draft_s, stats.verify_s, stats.plain_rounds, moved, peak_memory(decoder.device),
        )  # fmt: skip


@dataclass(frozen=True)
class Loaded:
    """A target in memory with the heads that belong to it."""

    name: str
    model: Transformer
    heads: dict[str, object]
    path: Path
    precision: str


def load_all(args: Namespace) -> list[Loaded]:
    """Every target with every head, each loaded once."""
    where, loaded = pick_device(args.device), []
    precision = pick_dtype(args.dtype, where)
    for path in args.checkpoint_path or [DEMO]:
        file = read_kind(path, "target")
        model = load_target(file, where, precision)
        heads = {}
        for head_path in args.draft_checkpoint_path or []:
            head_file = read_kind(head_path, "draft")
            heads[head_name(head_path, heads)] = load_head(head_file, model, where, precision)
        name = precision_name(file, precision)
        name = name if all(name != other.name for other in loaded) else f"{name} ({file.path.stem})"
        loaded.append(Loaded(name, model, heads, file.path, name))
    return loaded


def head_name(path: Path, taken: dict) -> str:
    """A short name for a head: its file's, or its folder's where the file's says nothing or is taken."""
    name = path.parent.name if path.stem == "talon" or path.stem in taken else path.stem
    return name if name not in taken else str(path)


def our_methods(args: Namespace, loaded: list[Loaded], context: int, prompts: list[list[int]]) -> list[TalonMethod]:
    """Plain decoding of every target, every head with every tree, and lookup."""
    methods = []
    for target in loaded:
        compiling = {"compile": args.compile}
        methods.append(TalonMethod(f"{target.name} plain", target.name, Decoder(target.model, context, **compiling)))
        for name, head in target.heads.items():
            for text in args.tree or TREES:
                decoder = make_decoder(args, target, name, head, text, context, prompts)
                methods.append(TalonMethod(f"{target.name} {name} {text}", target.name, decoder))
        if args.lookup:
            tree = fit_tree(f"lookup:{args.lookup}", None)
            decoder = Decoder(target.model, context, None, tree, **compiling)
            methods.append(TalonMethod(f"{target.name} {tree.name}", target.name, decoder))
    return methods


def make_decoder(
    args: Namespace, target: Loaded, name: str, head: object, text: str, context: int, prompts: list[list[int]]
) -> Decoder:
    config: DraftConfig = head.config
    if text != "auto":
        tree: Tree = fit_tree(text, config)
        return Decoder(target.model, context, head, tree, compile=args.compile)
    index = list(target.heads).index(name)
    choice = settle(
        (target.path, Path(args.draft_checkpoint_path[index])), (device_name(pick_device(args.device)), target.precision),
        target.model, head, lambda: prompts, SamplingConfig(), args.compile, "again" if args.retune else "once", note,
    )  # fmt: skip
    decoder = Decoder(target.model, context, head if choice.tree.needs_head else None, choice.tree, args.compile)
    decoder.fall_back_below(choice.break_even)
    return decoder


# ---------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Cell:
    """One measurement and where it belongs."""

    method: str
    temperature: float
    repeat: int
    prompt: int
    run: Run


def measure(
    methods: list, prompts: list[list[int]], args: Namespace, stop_ids: frozenset[int], log: Path | None
) -> Iterator[Cell]:
    """All cells, in turns. Every finished cell is on disk before the next begins."""
    for method in methods:  # compile, and touch every page once
        for temperature in args.temperature:
            note(f"warming up {method.name} at temperature {temperature:g} ...")
            method.run(prompts[0], SamplingConfig(temperature, seed=args.seed), min(8, args.max_new_tokens), stop_ids)
    for repeat in range(args.repeats):
        for number, ids in enumerate(prompts):
            turn = (number + repeat) % len(methods)
            for temperature in args.temperature:
                for method in methods[turn:] + methods[:turn]:
                    sampling = SamplingConfig(temperature, seed=args.seed + number)
                    cell = Cell(
                        method.name, temperature, repeat, number, method.run(ids, sampling, args.max_new_tokens, stop_ids)
                    )
                    if log is not None:
                        with log.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(asdict(cell)) + "\n")
                    yield cell
        note(f"repetition {repeat + 1} of {args.repeats} done")


def complete(cells: list[Cell], methods: list) -> list[Cell]:
    """The cells of prompts that every method has finished: what an interruption leaves is compared like with like."""
    done: dict[tuple, set[str]] = {}
    for cell in cells:
        done.setdefault((cell.temperature, cell.repeat, cell.prompt), set()).add(cell.method)
    full = {key for key, names in done.items() if len(names) == len(methods)}
    return [cell for cell in cells if (cell.temperature, cell.repeat, cell.prompt) in full]


def speeds(cells: list[Cell]) -> list[float]:
    """Tokens per second of each repetition: sum of tokens over sum of seconds."""
    repeats: dict[int, list[Run]] = {}
    for cell in cells:
        repeats.setdefault(cell.repeat, []).append(cell.run)
    totals = [(sum(r.decoded for r in runs), sum(r.decode_s for r in runs)) for runs in repeats.values()]
    return [tokens / seconds if seconds else 0.0 for tokens, seconds in totals]


def spread_of(values: list[float]) -> float:
    """Distance of the extremes as a share of the median."""
    middle = statistics.median(values) if values else 0.0
    return (max(values) - min(values)) / middle if middle else 0.0


def summarize(method: object, cells: list[Cell], plain: list[Cell]) -> dict:
    """One method at one temperature. `plain` holds the cells of its target's plain decoding, or none."""
    runs = [cell.run for cell in cells]
    own, base = speeds(cells), speeds(plain)
    ratios = [a / b for a, b in zip(own, base, strict=False) if b]
    rounds, decoded = sum(r.rounds for r in runs), sum(r.decoded for r in runs)
    decode_s = sum(r.decode_s for r in runs)
    draft_s, verify_s = sum(r.draft_s for r in runs), sum(r.verify_s for r in runs)
    moved = sum(r.moved_bytes for r in runs)
    depth = max((len(r.accepted_by_depth) for r in runs), default=0)
    by_depth = [sum((r.accepted_by_depth + [0] * depth)[d] for r in runs) for d in range(depth)]
    known = bool(verify_s)
    return {
        "method": method.name,
        "tree": getattr(method, "tree", None),
        "temperature": cells[0].temperature,
        "tokens_per_s": statistics.median(own),
        "tokens_per_s_spread": spread_of(own),
        "times_plain": statistics.median(ratios) if ratios else None,
        "times_plain_spread": spread_of(ratios) if ratios else None,
        "first_token_s": statistics.median(r.prefill_s for r in runs),
        "tokens": decoded,
        "rounds": rounds,
        "plain_rounds": sum(r.plain_rounds for r in runs),
        "acceptance_length": decoded / rounds if rounds else 0.0,
        "accepted_by_depth": [count / rounds for count in by_depth] if rounds else [],
        "draft_ms": draft_s / rounds * 1e3 if known and rounds else None,
        "verify_ms": verify_s / rounds * 1e3 if known and rounds else None,
        "rest_ms": (decode_s - draft_s - verify_s) / rounds * 1e3 if known and rounds else None,
        "rest_share": (decode_s - draft_s - verify_s) / decode_s if known and decode_s else None,
        "bytes_per_token": moved / decoded if moved and decoded else None,
        "bandwidth_bytes_per_s": moved / decode_s if moved and decode_s else None,
        "memory_bytes": method.memory_bytes,
        "peak_memory_bytes": max((r.peak_memory_bytes for r in runs), default=0) or None,
    }


def compare_ids(cells: list[Cell], plain: list[Cell], decoder: Decoder, prompts: list[list[int]], seed: int) -> dict:
    """Whether a method's ids are those of plain decoding on every prompt, else the first difference and its gap."""
    wanted = {cell.prompt: cell.run.tokens for cell in plain if cell.repeat == 0}
    mine = {cell.prompt: cell.run.tokens for cell in cells if cell.repeat == 0}
    differing = [number for number in sorted(mine) if mine[number] != wanted.get(number)]
    result = {"prompts": len(mine), "identical": len(mine) - len(differing), "first_difference": None, "gap": None}
    if differing:
        number = differing[0]
        ours, theirs = mine[number], wanted[number]
        shorter = min(len(ours), len(theirs))
        at = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
        result |= {"first_prompt": number, "first_difference": at}
        if at < shorter:
            sampling = SamplingConfig(cells[0].temperature, seed=seed + number)
            result["gap"] = choice_gap(decoder, prompts[number] + theirs[:at], theirs[at], ours[at], sampling)
    return result


def results(methods: list, cells: list[Cell], prompts: list[list[int]], args: Namespace) -> list[dict]:
    """The summary of every method at every temperature, in the order of the methods."""
    kept, rows = complete(cells, methods), []
    plain = {m.group: m for m in methods if isinstance(m, TalonMethod) and m.decoder.tree.nodes == 1}
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
                row["ids"] = compare_ids(mine, base, plain[group].decoder, prompts, args.seed)
            rows.append(row)
    return rows


# ---------------------------------------------------------------- the row-cost curve


def cost_curves(args: Namespace, loaded: list[Loaded], context: int, machine: dict) -> list[dict]:
    """Milliseconds of a target forward by rows and of a draft level by width, with what the machine allows at best."""
    curves = []
    for target in loaded:
        decoder = Decoder(target.model, context, compile=args.compile)
        committed = min(256, context // 2)
        note(f"measuring rows of {target.name} ...")
        rows = row_costs(decoder, ROWS, committed)
        moved = bytes_per_round(decoder, committed)
        c = target.model.config
        linears = c.n_layer * (
            c.dim * (2 * c.n_head + 2 * c.n_kv_head) * c.head_dim + 3 * c.dim * c.intermediate_size
        ) + c.vocab_size * c.dim  # fmt: skip
        best = {
            n: bound(moved, 2 * linears * n, machine["copy_bytes_per_s"], machine["product_ops_per_s"]) * 1e3 for n in rows
        }
        heads = {}
        for name, head in target.heads.items():
            beams = [beam for beam in BEAMS if beam <= head.config.draft_vocab_size]
            heads[name] = {b: s * 1e3 for b, s in head_costs(decoder, head, beams, committed, args.compile).level.items()}
        curves.append(
            {"target": target.name, "committed": committed, "rows_ms": {n: s * 1e3 for n, s in rows.items()},
             "bound_ms": best, "bytes": moved, "head_level_ms": heads}
        )  # fmt: skip
    return curves


# ---------------------------------------------------------------- reports


def cell_text(value: float | None, form: str, scale: float = 1.0) -> str:
    return "" if value is None else format(value * scale, form)


def table(rows: list[dict]) -> str:
    """Markdown for people: one line a method and temperature."""
    lines = [
        "| method | T | tokens/s | spread | x plain | first token ms | accept. | draft ms | verify ms | rest ms "
        "| GB/s | MB/token | memory GB | ids as plain |",
        "|---|" + "---|" * 13,
    ]
    for row in rows:
        ids = row.get("ids")
        same = "" if ids is None else "all" if ids["identical"] == ids["prompts"] else (
            f"{ids['identical']} of {ids['prompts']}" + (f", gap {ids['gap']:.2g}" if ids["gap"] is not None else "")
        )  # fmt: skip
        columns = [
            row["method"], f"{row['temperature']:g}", f"{row['tokens_per_s']:.1f}", f"{row['tokens_per_s_spread']:.1%}",
            cell_text(row["times_plain"], ".2f"), cell_text(row["first_token_s"], ".0f", 1e3),
            f"{row['acceptance_length']:.2f}", cell_text(row["draft_ms"], ".2f"), cell_text(row["verify_ms"], ".2f"),
            cell_text(row["rest_ms"], ".2f"), cell_text(row["bandwidth_bytes_per_s"], ".1f", 1e-9),
            cell_text(row["bytes_per_token"], ".0f", 1e-6), cell_text(row["memory_bytes"], ".2f", 1e-9), same,
        ]  # fmt: skip
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join(lines)


def curve_table(curves: list[dict]) -> str:
    lines = []
    for curve in curves:
        counts = list(curve["rows_ms"])
        lines += [
            f"| {curve['target']}, rows | " + " | ".join(map(str, counts)) + " |",
            "|---|" + "---|" * len(counts),
            "| forward ms | " + " | ".join(f"{curve['rows_ms'][n]:.2f}" for n in counts) + " |",
            "| bound ms | " + " | ".join(f"{curve['bound_ms'][n]:.2f}" for n in counts) + " |",
        ]
        for name, levels in curve["head_level_ms"].items():
            lines.append(f"{name}, ms a level: " + ", ".join(f"{ms:.2f} at {b}" for b, ms in levels.items()))
        lines.append("")
    return "\n".join(lines)


def heading(report: dict) -> str:
    """What was measured, where and with what: a table without it means nothing."""
    machine = report["machine"]
    return (
        f"{report['device']}, {report['threads']} threads, torch {report['versions']['torch']}, commit "
        f"{(report['commit'] or 'unknown')[:10]}; {report['prompts']['count']} prompts of {report['prompts']['file']}, "
        f"{report['max_new_tokens']} tokens at most, {report['repeats']} repetitions"
        f"{' (interrupted)' if report['interrupted'] else ''}; copy {machine['copy_bytes_per_s'] / 1e9:.1f} GB/s, "
        f"products {machine['product_ops_per_s'] / 1e9:.0f} GFLOP/s"
    )


def versions() -> dict:
    """Of everything whose speed shows in the table."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("transformers", "llama_cpp"):
        module = sys.modules.get(name)
        if module is not None:
            found[name] = module.__version__
    return found


def write_reports(out: Path, report: dict) -> None:
    """results.json (one line), results.md and, where matplotlib is installed, the plots."""
    (out / "results.json").write_text(json.dumps(report) + "\n", encoding="utf-8")
    text = f"{heading(report)}\n\n{table(report['methods'])}\n\n{curve_table(report['row_costs'])}"
    (out / "results.md").write_text(text, encoding="utf-8")
    try:
        import plots
    except ImportError:
        note("without plots: matplotlib is not installed: pip install matplotlib")
        return
    for path in plots.draw(report, out):
        note(f"wrote {path}")


# ---------------------------------------------------------------- the command line


def parse_args(argv: list[str] | None) -> Namespace:
    parser = Parser(prog="benchmark.py", description="Measure decoding against its alternatives and its bounds.")
    add = parser.add_argument
    add("--checkpoint_path", type=Path, action="append", help=f"target file; may be repeated (default: {DEMO})")
    add("--draft_checkpoint_path", type=Path, action="append", help="head file; may be repeated")
    add("--tree", action="append", help=f"tree for every head; may be repeated (default: {', '.join(TREES)})")
    add("--lookup", type=int, default=5, help="tokens that prompt lookup guesses; 0 leaves it out")
    add("--peers", default="auto", help=f"auto, none or some of {', '.join(NAMES)}, separated by commas")
    add("--gguf", type=Path, help="file for llama.cpp (default: the one beside the checkpoint)")
    add("--questions", type=Path, default=BUILT_IN, help="FastChat-style question.jsonl")
    add("--num_prompts", type=int, default=32, help="prompts to use at most, taken from all categories in turn")
    add("--bad_questions", default="refuse", choices=["refuse", "skip"], help="what to do about unusable lines")
    add("--max_new_tokens", type=int, default=128, help="tokens to generate at most for every prompt")
    add("--ignore_eos", action="store_true", help="go on past the model's stop tokens")
    add("--repeats", type=int, default=3, help="repetitions of everything")
    add("--temperature", type=float, action="append", help="may be repeated (default: 0 and 1)")
    add("--seed", type=int, default=0, help="of the first prompt; the next has the next")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="precision of computing")
    add("--threads", type=int, help="CPU threads for everything (default: torch's choice)")
    add("--max_seq_length", type=int, help="context to provide for (default: what the prompts need)")
    add("--no_compile", dest="compile", action="store_false", help="run eagerly")
    add("--no_row_costs", dest="row_costs", action="store_false", help="leave out the row-cost curve")
    add("--retune", action="store_true", help="let --tree auto measure again")
    add("--out", type=Path, help="directory for results.json, results.md, cells.jsonl and plots")
    add("--roofline", metavar="CARD", help="print predictions for a card (rtx3090) and stop")
    add("--gpu_check", action="store_true", help="run the whole check of a GPU and stop")
    return parser.parse_args(argv)


def check_args(args: Namespace) -> None:
    for name, least in (("num_prompts", 1), ("max_new_tokens", 2), ("repeats", 1), ("lookup", 0)):
        value = getattr(args, name)
        if value < least:
            raise ValueError(f"{name} {value} is not allowed: give at least {least}")
    if args.threads is not None and not 1 <= args.threads <= (os.cpu_count() or 1):
        raise ValueError(f"threads {args.threads} is not allowed: this machine has {os.cpu_count()}")
    args.temperature = args.temperature or [0.0, 1.0]
    for temperature in args.temperature:
        SamplingConfig(temperature, seed=args.seed)
    if args.tree and not args.draft_checkpoint_path:
        raise ValueError("--tree needs a head: give --draft_checkpoint_path")


def read_prompts(args: Namespace) -> tuple[list[list[int]], list[str]]:
    """The prompts as ids, and what was skipped. A bad line is refused or skipped, as --bad_questions says."""
    path = (args.checkpoint_path or [DEMO])[0]
    config = ModelConfig.from_dict(read_kind(path, "target").config)
    tokenizer = find_tokenizer(path.parent, config)
    limit = fit_context(args.max_seq_length, config, 10**9) - args.max_new_tokens
    if tokenizer is None and args.questions == BUILT_IN:
        note("note: no tokenizer beside the checkpoint: made-up ids stand in for the prompts")
        return prompts_for(None, config.vocab_size, args.num_prompts, max(limit, 1)), []
    if tokenizer is None:
        raise ValueError(f"--questions needs a tokenizer beside {path}: copy tokenizer.json or tokenizer.model there")
    questions, problems = read_questions(args.questions)
    prompts = []
    for question in spread(questions, args.num_prompts):
        ids = encode_question(question, tokenizer)
        if len(ids) > limit:
            problems.append(
                f"{args.questions}, line {question.line}: {len(ids)} tokens and {args.max_new_tokens} new ones do not "
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
    names = args.peers.split(",")
    for name in names:
        reason = missing(name)
        if reason:
            raise ValueError(reason)
    return names


def compare(args: Namespace, argv: list[str]) -> int:
    """The side-by-side measurement. Returns the exit code."""
    names = wanted_peers(args)
    prompts, skipped = read_prompts(args)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "cells.jsonl").write_text("", encoding="utf-8")
    loaded = load_all(args)
    device, model = pick_device(args.device), loaded[0].model
    need = max(map(len, prompts)) + args.max_new_tokens + 1
    context = fit_context(args.max_seq_length or min(need, model.config.max_seq_length), model.config)
    stop_ids = frozenset() if args.ignore_eos else frozenset(model.config.eos_ids)
    dtype = model.norm.weight.dtype
    machine = {"copy_bytes_per_s": copy_bandwidth(device), "product_ops_per_s": product_rate(device, dtype)}
    methods: list = list(our_methods(args, loaded, context, prompts[:6]))
    threads = torch.get_num_threads()
    shared: dict = {}
    methods += open_peers(
        names, lambda name: open_peer(name, loaded[0].path, args.gguf, context, threads, shared), note,
        args.peers != "auto",
    )  # fmt: skip
    cells, interrupted, curves = [], False, []
    try:
        for cell in measure(methods, prompts, args, stop_ids, args.out / "cells.jsonl" if args.out else None):
            cells.append(cell)
        if args.row_costs:
            curves = cost_curves(args, loaded, context, machine)
    except KeyboardInterrupt:
        interrupted = True
        note("interrupted: reporting what was measured")
    report = {
        "argv": argv, "device": device_name(device), "threads": threads, "versions": versions(),
        "commit": project_commit(), "machine": machine, "interrupted": interrupted,
        "prompts": {"file": args.questions.name, "count": len(prompts), "tokens": sum(map(len, prompts)), "skipped": skipped},
        "max_new_tokens": args.max_new_tokens, "repeats": args.repeats, "ignore_eos": args.ignore_eos,
        "methods": results(methods, cells, prompts, args), "row_costs": curves,
    }  # fmt: skip
    finish(args, report)
    return 130 if interrupted else 0


def finish(args: Namespace, report: dict) -> None:
    """The table for people, then one line for machines, then the files."""
    print(f"{heading(report)}\n\n{table(report['methods'])}\n")
    if report["row_costs"]:
        print(curve_table(report["row_costs"]))
    print(json.dumps(report), flush=True)
    if args.out is not None:
        write_reports(args.out, report)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    check_args(args)
    argv = argv if argv is not None else sys.argv[1:]
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.roofline:
        card = pick_card(args.roofline)
        print(f"{roofline_table(card)}\n\n{json.dumps({'card': asdict(card), 'predictions': predict(card)})}")
        return 0
    if args.gpu_check:
        import gpu_check  # imports pytest's runner and the kernels only here

        return gpu_check.check(pick_device(args.device), args.out or Path("results"))
    return compare(args, argv)


if __name__ == "__main__":
    run(main)
