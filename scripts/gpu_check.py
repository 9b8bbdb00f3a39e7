"""Everything that only a GPU can show, in one command and within minutes.

    python scripts/gpu_check.py [--device cuda] [--out results/]

Sections, each written as soon as it is done: the CUDA tests; the quantised kernels against copied
bandwidth; plain and drafted decoding of a LLaMA-2-7B shape in every precision, with replays and
waits per round and each round's bound; the demo model. The weights are made up: attention and MLP
add nothing, the last token alone decides the next, and the head is right after three tokens of
four, so acceptance is known while every weight is still read and multiplied.

Leaves out: the quality of real models; comparisons with other programs (benchmark.py).
"""

import gc
import json
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the modules of this checkout, wherever it is called from

# ruff: noqa: E402
from eagle_draft import DraftConfig, DraftHead
from model import ModelConfig, Transformer
from talon.checkpoint import atomic_file
from talon.cli import DEMO, Parser, note, run
from talon.decoder import Decoder, Generation
from talon.kernels.linear import LINEARS, pack, quantize_int4, quantize_int8, swap_linears
from talon.loading import device_name, pick_device, pick_dtype
from talon.measuring.roofline import bound, linear_parameters, machine_rates, mode_rate
from talon.records import bytes_per_round, project_commit
from talon.sampling import SamplingConfig
from talon.text import load
from talon.trees import parse_tree
from talon.tuning.costs import medians

LLAMA_2_7B = ModelConfig(
    vocab_size=32000,
    dim=4096,
    n_layer=32,
    n_head=32,
    n_kv_head=32,
    head_dim=128,
    intermediate_size=11008,
    norm_eps=1e-5,
    max_seq_length=4096,
)

MODES = (None, "int8", "int4")

TREES = (
    "none",
    "chain:4",
    "dynamic:nodes=16,levels=4,top_k=4",
    "dynamic:nodes=16,levels=4,top_k=4+lookup:4",
    "dynamic:nodes=48,levels=5,top_k=8",
)

KERNEL_ROWS = (1, 4, 8, 16, 32, 64)

WRONG_EVERY = (
    4  # the head is wrong after every fourth token: a round that may go deeper gives four tokens
)

GROUPSIZE = 128


@dataclass(frozen=True)
class Plan:
    """What to check and at what size; the tests shrink it."""

    config: ModelConfig = LLAMA_2_7B
    modes: tuple[str | None, ...] = MODES
    trees: tuple[str, ...] = TREES
    kernel_shapes: tuple[tuple[int, int], ...] = ((4096, 4096), (22016, 4096), (4096, 11008))
    tokens: int = 128
    context: int = 1024
    compile: bool = True
    tests: bool = True
    demo: Path = DEMO
    deadline_s: float = 440.0  # no section begins after this


# ---------------------------------------------------------------- a model of the right shape


def linear_weight(
    name: str, shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """The weight [out, in] of a linear of the target by its role; see the head of this file."""
    if name.endswith(("wo", "w2")):
        return torch.zeros(shape, dtype=dtype, device=device)
    if name == "output":  # after token t (below C) comes t + 1
        rows, columns = shape
        weight = torch.zeros(shape, dtype=dtype, device=device)
        cycle = torch.arange(min(rows, columns), device=device)
        weight[(cycle + 1) % len(cycle), cycle] = 10.0 / math.sqrt(columns)
        return weight
    return torch.randn(shape, dtype=dtype, device=device) * 0.02


def shaped_target(
    config: ModelConfig, mode: str | None, device: torch.device, dtype: torch.dtype
) -> Transformer:
    """A target of the given shape in a quantisation mode (None: as `dtype`)."""
    with torch.device("meta"):
        model = Transformer(config)
    shapes = {
        n: tuple(m.weight.shape) for n, m in model.named_modules() if isinstance(m, nn.Linear)
    }
    if mode is not None:
        layers = dict.fromkeys(shapes, mode)
        swap_linears(
            model,
            {"mode": mode, "groupsize": GROUPSIZE if mode == "int4" else None, "layers": layers},
        )
    made: dict[tuple, dict[str, torch.Tensor]] = {}
    for name, shape in shapes.items():
        key = (name.rpartition(".")[2], shape)  # quantised once, copied to every layer
        if key not in made:
            weight = linear_weight(name, shape, device, dtype)
            made[key] = {"weight": weight} if mode is None else quantized(weight, mode)
        module = model.get_submodule(name)
        state = {part: tensor.clone() for part, tensor in made[key].items()}
        module.load_state_dict(state, assign=True)
        pack(module, device, dtype)
    embedding = torch.zeros(config.vocab_size, config.dim, dtype=dtype, device=device)
    tokens = torch.arange(config.vocab_size, device=device)
    embedding[tokens, tokens % config.dim] = 8.0
    model.tok_embeddings.weight = nn.Parameter(embedding)
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:  # what is left are norms
            model.get_submodule(name.rpartition(".")[0]).weight = nn.Parameter(
                torch.ones(parameter.shape, dtype=dtype, device=device)
            )
    return model.requires_grad_(False).eval()


def quantized(weight: torch.Tensor, mode: str) -> dict[str, torch.Tensor]:
    """The stored tensors of a quantised linear, on the weight's device, without calibration."""
    if mode == "int4":
        return dict(
            zip(("weight", "scales", "zeros"), quantize_int4(weight, GROUPSIZE), strict=True)
        )
    state = dict(zip(("weight", "scales"), quantize_int8(weight), strict=True))
    return state | {"smoothing": torch.ones(weight.shape[1], device=weight.device)}


def shaped_head(model: Transformer, device: torch.device, dtype: torch.dtype) -> DraftHead:
    """An EAGLE-1 head of the target's shape, wrong after every WRONG_EVERY-th token."""
    c = model.config
    config = DraftConfig(
        family="eagle1",
        dim=c.dim,
        n_head=c.n_head,
        n_kv_head=c.n_kv_head,
        head_dim=c.head_dim,
        intermediate_size=c.intermediate_size,
        norm_eps=c.norm_eps,
        vocab_size=c.vocab_size,
        draft_vocab_size=c.vocab_size,
        target_dim=c.dim,
        max_seq_length=c.max_seq_length,
        own_output=False,
    )
    with torch.device(device):
        head = DraftHead(config).to(dtype)
    head.requires_grad_(False).eval()
    head.layer.attention.wo.weight.zero_()
    head.layer.feed_forward.w2.weight.zero_()
    guess = torch.arange(
        c.dim, device=device
    )  # the token whose follower is guessed after each token
    wrong = guess % WRONG_EVERY == 0
    guess = torch.where(wrong, (guess + c.dim // 2 + 1) % c.dim, guess)
    head.fc.weight.zero_()
    # The embedding is 8 * one-hot; the feature, which the fc ignores, sqrt(C) * one-hot.
    head.fc.weight[guess, torch.arange(c.dim, device=device)] = math.sqrt(c.dim) / 8
    head.tok_embeddings, head.output = model.tok_embeddings, model.output
    return head


# ---------------------------------------------------------------- the sections


def run_tests() -> dict:
    """The tests that need CUDA, in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-k", "cuda or gpu", "tests"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    lines = result.stdout.strip().splitlines()
    return {
        "passed": result.returncode == 0,
        "summary": lines[-1] if lines else "",
        "tail": lines[-30:],
    }


def check_kernels(
    plan: Plan, device: torch.device, dtype: torch.dtype, copied: float
) -> list[dict]:
    """Seconds of one quantised product by rows, and the share of copied bandwidth at which it reads
    its weight.
    """
    rows = []
    for mode in (None, *LINEARS):
        for outputs, inputs in plan.kernel_shapes:
            weight = torch.randn(outputs, inputs, dtype=dtype, device=device) * 0.02
            linear = make_linear(mode, weight, device, dtype)
            held = sum(t.numel() * t.itemsize for t in [*linear.parameters(), *linear.buffers()])
            calls = {}
            for count in KERNEL_ROWS:
                x = torch.randn(count, inputs, dtype=dtype, device=device)
                calls[count] = lambda x=x, linear=linear: linear(x)
            times = medians(calls, device)
            rows.append(
                {
                    "mode": mode or "plain",
                    "shape": [outputs, inputs],
                    "bytes": held,
                    "us": {n: s * 1e6 for n, s in times.items()},
                    "share_of_copy": {n: held / s / copied for n, s in times.items()},
                }
            )
    return rows


def make_linear(
    mode: str | None, weight: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """One linear without bias, quantised where a mode is given."""
    wrapped = nn.Sequential(nn.Linear(*weight.shape[::-1], bias=False, device="meta"))
    if mode is None:
        wrapped[0].weight = nn.Parameter(weight)
    else:
        layers = {"0": mode}
        swap_linears(
            wrapped,
            {"mode": mode, "groupsize": GROUPSIZE if mode == "int4" else None, "layers": layers},
        )
        wrapped[0].load_state_dict(quantized(weight, mode), assign=True)
        pack(wrapped, device, dtype)
    return wrapped[0].requires_grad_(False)


def check_decoding(
    plan: Plan, mode: str | None, device: torch.device, dtype: torch.dtype, machine: dict
) -> list[dict]:
    """Plain and drafted decoding of the shape in one precision."""
    model = shaped_target(plan.config, mode, device, dtype)
    head = shaped_head(model, device, dtype)
    rows, wanted = [], None
    for text in plan.trees:
        tree = parse_tree(text)
        started = time.perf_counter()
        decoder = Decoder(
            model, plan.context, head if tree.needs_head else None, tree, compile=plan.compile
        )
        decoder.warm_up(SamplingConfig())
        compile_s = time.perf_counter() - started
        row = {
            "mode": mode or str(dtype).removeprefix("torch."),
            "tree": text,
            "compile_s": compile_s,
        }
        tokens = decode(decoder, plan.tokens, row)
        wanted = tokens if wanted is None else wanted
        row["ids_as_plain"] = tokens == wanted
        row["ids_as_made"] = tokens == [
            (3 + i) % min(model.config.dim, model.config.vocab_size) for i in range(plan.tokens)
        ]
        moved = bytes_per_round(decoder, 3 + plan.tokens / 2)
        operations = 2 * linear_parameters(plan.config) * tree.nodes
        rate = mode_rate(mode or "", device, machine)
        row["bound_ms"] = bound(moved, operations, machine["copy_bytes_per_s"], rate) * 1e3
        row["share_of_bound"] = row["bound_ms"] / row["round_ms"]
        row |= count_launches(decoder, plan.tokens)
        rows.append(row)
        del decoder
        release(device)
    return rows


def decode(decoder: Decoder, count: int, row: dict) -> list[int]:
    """Decode twice, keep the second run's numbers in `row`."""
    for _ in range(2):
        decoder.forget()
        generation = Generation(decoder, [0, 1, 2], SamplingConfig(), count)
        for _ in generation:
            pass
    stats = generation.stats
    row |= {
        "tokens_per_s": stats.emitted / stats.decode_s,
        "acceptance_length": stats.acceptance_length,
        "rounds": stats.rounds,
        "round_ms": stats.decode_s / stats.rounds * 1e3,
        "draft_ms": stats.draft_s / stats.rounds * 1e3,
        "verify_ms": stats.verify_s / stats.rounds * 1e3,
    }
    return generation.tokens


WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def count_launches(decoder: Decoder, count: int) -> dict:
    """Graph replays, single kernel launches and waiting calls per round, from the profiler; None
    without a GPU.
    """
    if decoder.device.type != "cuda":
        return {"replays_per_round": None, "launches_per_round": None, "waits_per_round": None}
    decoder.forget()
    generation = Generation(decoder, [0, 1, 2], SamplingConfig(), count)
    steps = iter(generation)
    next(steps)  # the prefill
    with torch.profiler.profile() as profile:
        for _ in steps:
            pass
    calls = {event.key: event.count for event in profile.key_averages()}
    return launches(calls, generation.stats.rounds)


def launches(calls: dict[str, int], rounds: int) -> dict:
    """Calls of the CUDA runtime by name, as counts per round."""
    return {
        "replays_per_round": calls.get("cudaGraphLaunch", 0) / rounds,
        "launches_per_round": sum(
            n for key, n in calls.items() if key.startswith("cudaLaunchKernel")
        )
        / rounds,
        "waits_per_round": sum(calls.get(name, 0) for name in WAITS) / rounds,
    }


def check_demo(plan: Plan, device: torch.device) -> dict:
    """The demo model with its head, if both are there: speed, acceptance, ids against plain
    decoding.
    """
    if not plan.demo.exists():
        return {"skipped": f"{plan.demo} is not there: run `make demo`"}
    heads = sorted((ROOT / "assets").glob("*.safetensors"))
    found = {}
    for head in (None, *heads[:1]):
        options = {
            "tree": "auto" if head else "none",
            "device": str(device),
            "max_seq_length": plan.context,
        }
        engine = load(plan.demo, head, compile=plan.compile, **options)
        engine.warm_up(SamplingConfig())
        text = engine.generate(
            [1, 2, 3] if engine.tokenizer is None else "The sea is", max_new_tokens=plan.tokens
        )
        for _ in text:
            pass
        stats = text.generation.stats
        found[head.name if head else "plain"] = {
            "tree": engine.card["tree"],
            "tokens_per_s": stats.emitted / max(stats.decode_s, 1e-9),
            "acceptance_length": stats.acceptance_length,
            "tokens": text.tokens,
        }
    texts = [entry.pop("tokens") for entry in found.values()]
    return {"runs": found, "ids_as_plain": all(tokens == texts[0] for tokens in texts)}


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- the whole


def sections(
    plan: Plan, device: torch.device, report: dict
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name and work of every section, in order. The machine's numbers are in the report before the
    rest needs them.
    """
    dtype = pick_dtype("auto", device)
    machine = report["machine"]
    if plan.tests:
        yield "tests", run_tests
    yield "kernels", lambda: check_kernels(plan, device, dtype, machine["copy_bytes_per_s"])
    for mode in plan.modes:
        yield (
            f"decoding {mode or 'unquantised'}",
            lambda m=mode: check_decoding(plan, m, device, dtype, machine),
        )
    yield "demo", lambda: check_demo(plan, device)


def check(device: torch.device, out: Path, plan: Plan = Plan()) -> int:
    """Run every section; a failure in one is recorded and the next runs. Exit code 1 if anything
    failed.
    """
    if device.type != "cuda" and plan == Plan():
        raise ValueError(
            "--gpu_check needs a GPU and torch finds none: run it on a machine with one"
        )
    out.mkdir(parents=True, exist_ok=True)
    started, dtype = time.perf_counter(), pick_dtype("auto", device)
    report = {
        "device": device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": project_commit(),
        "dtype": str(dtype).removeprefix("torch."),
        "sections": {},
        "seconds": {},
        "failures": {},
        "machine": machine_rates(device, dtype),
    }
    for name, work in sections(plan, device, report):
        begun = time.perf_counter()
        if begun - started > plan.deadline_s:
            report["failures"][name] = f"not begun: {plan.deadline_s:.0f} s were over"
            continue
        note(f"{name} ...")
        try:
            report["sections"][name] = work()
        except Exception as error:  # whatever it is, the minutes on a GPU must not be lost
            traceback.print_exc()
            report["failures"][name] = (
                f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            )
            note(f"failed: {report['failures'][name]}")
        report["seconds"][name] = time.perf_counter() - begun
        release(device)
        write(out, report)
    report["failures"] |= verdicts(report["sections"])
    write(out, report)
    print(markdown(report))
    return 1 if report["failures"] else 0


def verdicts(done: dict) -> dict[str, str]:
    """What ran but is wrong."""
    wrong = {}
    if "tests" in done and not done["tests"]["passed"]:
        wrong["tests"] = done["tests"]["summary"]
    for name, rows in done.items():
        if name.startswith("decoding"):
            for row in rows:
                if not row["ids_as_plain"]:
                    wrong[f"{name}, {row['tree']}"] = "ids differ from plain decoding"
                if row["replays_per_round"] is not None and row["replays_per_round"] > 1.05:
                    wrong[f"{name}, {row['tree']}, replays"] = (
                        f"{row['replays_per_round']:.2f} graph replays per round"
                    )
    if done.get("demo", {}).get("ids_as_plain") is False:
        wrong["demo"] = "ids differ from plain decoding (in 16 bit a near tie may flip)"
    return wrong


def write(out: Path, report: dict) -> None:
    with atomic_file(out / "gpu_check.json") as file:
        file.write((json.dumps(report, indent=1) + "\n").encode())
    with atomic_file(out / "gpu_check.md") as file:
        file.write((markdown(report) + "\n").encode())


def markdown(report: dict) -> str:
    """One page for people."""
    machine = report["machine"]
    lines = [
        f"# {report['device']}: torch {report['torch']}, CUDA {report['cuda']}, "
        f"commit {report['commit']}",
        f"copy {machine['copy_bytes_per_s'] / 1e9:.0f} GB/s, products "
        f"{machine['product_ops_per_s'] / 1e12:.1f} TFLOP/s in {report['dtype']}",
        *(f"- FAILED {name}: {what}" for name, what in report["failures"].items()),
    ]
    if "tests" in report["sections"]:
        lines.append(f"- tests: {report['sections']['tests']['summary']}")
    if report["sections"].get("kernels"):
        lines += ["", *kernel_lines(report["sections"]["kernels"])]
    rows = [
        row
        for name, part in report["sections"].items()
        if name.startswith("decoding")
        for row in part
    ]
    if rows:
        lines += ["", *decoding_lines(rows)]
    if "demo" in report["sections"]:
        lines += ["", f"demo: {json.dumps(report['sections']['demo'])}"]
    return "\n".join(lines)


def kernel_lines(rows: list[dict]) -> list[str]:
    lines = [
        "| kernel | shape | " + " | ".join(f"{n} rows, us (of copy)" for n in KERNEL_ROWS) + " |",
        "|---|---|" + "---|" * len(KERNEL_ROWS),
    ]
    for row in rows:
        cells = [f"{row['us'][n]:.0f} ({row['share_of_copy'][n]:.0%})" for n in KERNEL_ROWS]
        lines.append(
            f"| {row['mode']} | {row['shape'][0]} x {row['shape'][1]} | " + " | ".join(cells) + " |"
        )
    return lines


def decoding_lines(rows: list[dict]) -> list[str]:
    lines = [
        "| mode | tree | tokens/s | accept. | round ms | draft | verify | bound ms | of bound "
        "| replays | waits | ids |",
        "|---|" + "---|" * 11,
    ]
    for row in rows:
        counts = [
            "" if row[k] is None else f"{row[k]:.2f}"
            for k in ("replays_per_round", "waits_per_round")
        ]
        cells = [
            row["mode"],
            row["tree"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['acceptance_length']:.2f}",
            f"{row['round_ms']:.2f}",
            f"{row['draft_ms']:.2f}",
            f"{row['verify_ms']:.2f}",
            f"{row['bound_ms']:.2f}",
            f"{row['share_of_bound']:.0%}",
            *counts,
            "as plain" if row["ids_as_plain"] else "DIFFER",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def smaller(plan: Plan, **changes: object) -> Plan:
    """The same check at another size, for tests."""
    return replace(plan, **changes)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="gpu_check.py", description="Run the whole check of a GPU.")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--out", type=Path, default=Path("results"), help="directory for the tables"
    )
    args = parser.parse_args(argv)
    return check(pick_device(args.device), args.out)


if __name__ == "__main__":
    run(main)
