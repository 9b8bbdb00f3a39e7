"""Everything that only a GPU can show, in one command and within minutes.

    python scripts/gpu_check.py [--only decoding] [--budget_s 480] [--out results/]

Sections: the CUDA tests; the linear layers of every mode, by rows; plain and drafted decoding of a
LLaMA-2-7B shape in every mode; the demo model. What a row of the tables is expected to take, the
time of reading its bytes once, is written before it is measured, and the row as soon as it is: a
check that is killed keeps what it has.

The weights are random, and attention decides what is said. Each drafted round runs a random head,
whose guesses an oracle replaces: told what plain decoding said, it is right with probability RIGHT.
Every token is then held against the slow path. Leaves out: the quality of real models, comparisons
with other programs (benchmark.py), and what a card is bound by (talon/measuring/roofline.py).
"""

import copy
import functools
import gc
import itertools
import json
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the modules of this checkout, wherever it is called from

# ruff: noqa: E402
from eagle_draft import DraftConfig, DraftHead, Nodes, Pick
from model import At, ModelConfig, Transformer
from talon.checking import full_logits
from talon.checkpoint import atomic_file
from talon.cli import DEMO, Parser, note, run
from talon.decoder import Decoder, Generation
from talon.drafters import EagleDrafter
from talon.graphs import compile_region
from talon.kernels.linear import LINEARS, pack, quantize_int4, quantize_int8, swap_linears
from talon.loading import device_name, pick_device, pick_dtype
from talon.measuring.roofline import MODELS, reading
from talon.records import bytes_per_round, markdown_table, module_bytes, project_commit
from talon.sampling import GREEDY
from talon.text import load
from talon.trees import parse_tree
from talon.tuning.costs import medians, times

ROWS = (1, 4, 8, 16, 32, 64)
RIGHT = 0.85  # how often the oracle is right
NEAR = 0.25  # standard deviations of the logits by which rounding may turn a choice
PROMPT = [1, 2, 3, 4, 5]
GROUPSIZE = 128
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


@dataclass(frozen=True)
class Scope:
    """What to check and at what size; the tests have a smaller one."""

    config: ModelConfig = MODELS["LLaMA-2-7B"]
    # Every mode with the largest tree that its matrix multiplications bear.
    trees: tuple[tuple[str | None, str], ...] = (
        (None, "dynamic:nodes=60,levels=6,top_k=10"),
        ("int8", "static"),
        ("int8-dynamic", "dynamic:nodes=60,levels=6,top_k=10"),
        ("int4", "dynamic:nodes=16,levels=4,top_k=4"),
    )
    shapes: tuple[tuple[int, int], ...] = ((4096, 4096), (22016, 4096), (4096, 11008))
    copies: int = 20  # of every layer that is timed: more bytes than a cache holds
    stream: int = 0  # bytes whose reading is timed; 0: more than a cache holds
    tokens: int = 128
    context: int = 1024
    compile: bool = True
    tests: bool = True
    demo: Path = DEMO


class TimeIsUp(Exception):
    pass


class Report:
    """What is known so far, on disk at every moment."""

    def __init__(self, out: Path, facts: dict, budget_s: float) -> None:
        self.out, self.facts, self.ends = out, facts, time.monotonic() + budget_s
        self.rows: dict[str, list[dict]] = {}
        self.failures: dict[str, str] = {}
        out.mkdir(parents=True, exist_ok=True)

    def expect(self, section: str, **known: object) -> dict:
        """A row that is about to be measured. Raises TimeIsUp if it is too late for that."""
        if time.monotonic() > self.ends:
            raise TimeIsUp("the budget is used up: give more with --budget_s, or less with --only")
        self.rows.setdefault(section, []).append(known)
        self.write()
        return known

    def measured(self, row: dict, **found: object) -> None:
        row |= found
        self.write()

    def failed(self, what: str, why: str) -> None:
        self.failures[what] = why
        note(f"FAILED {what}: {why}")
        self.write()

    def write(self) -> None:
        found = {**self.facts, "rows": self.rows, "failures": self.failures}
        for name, text in (("json", json.dumps(found, indent=1)), ("md", self.page())):
            with atomic_file(self.out / f"gpu_check.{name}") as file:
                file.write(f"{text}\n".encode(errors="backslashreplace"))

    def page(self) -> str:
        """One page for people."""
        lines = [f"# {', '.join(f'{name} {value}' for name, value in self.facts.items())}"]
        lines += [f"- FAILED {what}: {why}" for what, why in self.failures.items()]
        for section, rows in self.rows.items():
            names = list(dict.fromkeys(name for row in rows for name in row))
            cells = [[shown(row.get(name)) for name in names] for row in rows]
            lines += ["", f"## {section}", "", markdown_table([names, *cells])]
        return "\n".join(lines)


def shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {shown(part)}" for name, part in value.items())
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------- a model of the right shape


def stored(weight: Tensor, mode: str | None) -> dict[str, Tensor]:
    """What a file would hold of a linear layer in a mode, without calibration."""
    if mode is None:
        return {"weight": weight}
    if mode == "int4":
        return dict(
            zip(("weight", "scales", "zeros"), quantize_int4(weight, GROUPSIZE), strict=True)
        )
    state = dict(zip(("weight", "scales"), quantize_int8(weight), strict=True))
    return state | {"smoothing": torch.ones(weight.shape[1], device=weight.device)}


def mode_name(mode: str | None, dtype: torch.dtype) -> str:
    return mode or str(dtype).removeprefix("torch.")


def in_mode(module: nn.Module, mode: str | None) -> dict[str, tuple[int, int]]:
    """Swap every linear layer of a module on the meta device; returns their shapes [out, in]."""
    shapes = {
        name: tuple(layer.weight.shape)
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
    }
    if mode is not None:
        swap_linears(module, {"groupsize": GROUPSIZE, "layers": dict.fromkeys(shapes, mode)})
    return shapes


def random_target(
    config: ModelConfig, mode: str | None, device: torch.device, dtype: torch.dtype
) -> Transformer:
    """A target whose next token depends on all before it. Its logits have a standard deviation of
    about 1."""
    with torch.device("meta"):
        model = Transformer(config)
    made: dict[tuple, dict[str, Tensor]] = {}
    for name, shape in in_mode(model, mode).items():
        role = name.rpartition(".")[2]
        scale = {"wo": 0.02 / math.sqrt(2 * config.n_layer), "output": config.dim**-0.5}
        scale["w2"] = scale["wo"]
        if (role, shape) not in made:  # rounded once, the same in every layer
            weight = torch.randn(shape, dtype=dtype, device=device) * scale.get(role, 0.02)
            made[role, shape] = stored(weight, mode)
        state = {part: tensor.clone() for part, tensor in made[role, shape].items()}
        model.get_submodule(name).load_state_dict(state, assign=True)
    embedding = torch.randn(config.vocab_size, config.dim, dtype=dtype, device=device) * 0.02
    model.tok_embeddings.weight = nn.Parameter(embedding)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is not None and weight.is_meta:  # what is left are norms
            module.weight = nn.Parameter(torch.ones(weight.shape, dtype=dtype, device=device))
    pack(model, device, dtype)
    return model.requires_grad_(False).eval()


def random_head(model: Transformer) -> DraftHead:
    """An EAGLE-1 head of the target's shape."""
    c, weight = model.config, model.norm.weight
    same = ("dim", "n_head", "n_kv_head", "head_dim", "intermediate_size", "norm_eps", "vocab_size")
    config = DraftConfig(
        family="eagle1",
        draft_vocab_size=c.vocab_size,
        target_dim=c.dim,
        max_seq_length=c.max_seq_length,
        own_output=False,
        own_embedding=False,
        **{name: getattr(c, name) for name in same},
    )
    with torch.device(weight.device):
        head = DraftHead(config).to(weight.dtype)
    head.tok_embeddings, head.output = model.tok_embeddings, model.output
    return head.requires_grad_(False).eval()


class Oracle:
    """A draft source that knows what comes: on the way to the deepest node of another source's tree
    it puts the true tokens, each with probability RIGHT. Next to them stand wrong ones."""

    def __init__(self, source: EagleDrafter, positions: int) -> None:
        self.source, self.tree, self.stage = source, source.tree, source.stage
        self.feature_layers, self.state = source.feature_layers, source.state
        self.learn, self.read = source.learn, source.read
        device, random = source.hidden.device, torch.Generator().manual_seed(0)
        self.future = torch.zeros(positions, dtype=torch.int64, device=device)
        self.right = (torch.rand(positions, generator=random) < RIGHT).to(device)

    def propose(self, root: Tensor, at: At, pick: Pick) -> Nodes:
        nodes = self.source.propose(root, at, pick)
        depth = nodes.ancestors.sum(1) - 1
        path = nodes.ancestors.index_select(0, depth.argmax(0, keepdim=True))[0]
        position = at.length + depth
        true = path & (depth > 0) & self.right[position]
        return nodes._replace(tokens=torch.where(true, self.future[position], nodes.tokens))


class OracleDecoder(Decoder):
    """A decoder whose draft is right as often as RIGHT says, at the cost of a head."""

    def __init__(self, *given: object, **options: object) -> None:
        super().__init__(*given, **options)
        if self.tree.needs_head:
            self.drafter = Oracle(self.drafter, self.cache.rows)

    def tell(self, ids: list[int]) -> None:
        """The whole text, the prompt included."""
        if self.tree.needs_head:
            self.drafter.future[: len(ids)] = torch.tensor(ids, device=self.device)


# ---------------------------------------------------------------- the sections


def check_tests(report: Report) -> None:
    """The tests that need CUDA, in a process of their own."""
    row = report.expect("tests", command="pytest -k 'cuda or gpu'")
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-k", "cuda or gpu", "tests"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    lines = result.stdout.strip().splitlines()
    report.measured(row, summary=lines[-1] if lines else "")
    if result.returncode:
        report.failed("tests", " / ".join(lines[-5:]))


def multiply(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x)


def check_kernels(scope: Scope, device: torch.device, dtype: torch.dtype, report: Report) -> None:
    """Microseconds of one linear layer by its rows, in turn over copies that no cache holds."""
    for mode, (outputs, inputs) in itertools.product((None, *LINEARS), scope.shapes):
        with torch.device("meta"):
            parent = nn.Sequential(nn.Linear(inputs, outputs, bias=False))
        in_mode(parent, mode)
        weight = torch.randn(outputs, inputs, dtype=dtype, device=device) * 0.02
        parent[0].load_state_dict(stored(weight, mode), assign=True)
        pack(parent, device, dtype)
        layers = [copy.deepcopy(parent[0]) for _ in range(scope.copies)]
        read_us = module_bytes(layers[0]) / report.facts["read_bytes_per_s"] * 1e6
        shape = f"{outputs} x {inputs}"
        row = report.expect("kernels", mode=mode_name(mode, dtype), shape=shape, read_us=read_us)
        region = compile_region(multiply) if scope.compile else multiply
        calls = {}
        for count in ROWS:
            x = torch.randn(count, inputs, dtype=dtype, device=device)
            calls[count] = lambda x=x, f=region, all=layers: [f(layer, x) for layer in all]
        us = {n: s / scope.copies * 1e6 for n, s in medians(calls, device).items()}
        report.measured(row, us=us, share_of_reading={n: read_us / t for n, t in us.items()})


def check_decoding(
    mode: str | None, tree: str, scope: Scope, device: torch.device, report: Report
) -> None:
    """Plain and drafted decoding of the shape in one mode."""
    dtype = pick_dtype("auto", device)
    model = random_target(scope.config, mode, device, dtype)
    head, section = random_head(model), f"decoding {mode_name(mode, dtype)}"
    plain: list[int] = []
    for name in ("none", tree):
        decoder = OracleDecoder(model, scope.context, head, parse_tree(name), scope.compile)
        moved = bytes_per_round(decoder, len(PROMPT) + scope.tokens / 2)
        read_ms = moved / report.facts["read_bytes_per_s"] * 1e3
        row = report.expect(section, tree=name, read_ms=read_ms)
        compile_s = decoder.warm_up(GREEDY)
        decoder.tell(PROMPT + plain)
        tokens = decode(decoder, scope.tokens).tokens
        decoder.tell(PROMPT + tokens)  # where rounding turned a choice, what is timed follows it
        plain, timed = plain or tokens, decode(decoder, scope.tokens)
        measured = measurements(timed) | count_launches(decoder, scope.tokens)
        gap = worst_gap(model, timed.tokens)
        measured |= {"worst_gap": gap, "ids_as_plain": tokens == plain, "compile_s": compile_s}
        report.measured(row, share_of_reading=read_ms / measured["round_ms"], **measured)
        if not gap <= NEAR:  # NaN fails too
            report.failed(f"{section}, {name}", f"a token stands {gap:.2f} below the slow path's")
        if (measured["replays_per_round"] or 0) > 1.05:
            many = f"{measured['replays_per_round']:.2f} graph replays a round"
            report.failed(f"{section}, {name}, replays", many)
        del decoder
        release(device)


def measurements(run: Generation) -> dict:
    stats = run.stats
    rounds = max(stats.rounds, 1)
    return {
        "round_ms": stats.decode_s / rounds * 1e3,
        "draft_ms": stats.draft_s / rounds * 1e3,
        "verify_ms": stats.verify_s / rounds * 1e3,
        "acceptance_length": stats.acceptance_length,
        "tokens_per_s": stats.emitted / max(stats.decode_s, 1e-9),
    }


def decode(decoder: Decoder, count: int) -> Generation:
    decoder.forget()
    generation = Generation(decoder, PROMPT, GREEDY, count)
    for _ in generation:
        pass
    return generation


@torch.inference_mode()
def worst_gap(model: Transformer, tokens: list[int]) -> float:
    """How far a token's logit is below the best of the slow path at its place, at worst, in standard
    deviations of the logits. Rounding makes it a little more than 0; a wrong mask, cache
    slot or position much more."""
    logits = full_logits(model, PROMPT + tokens)[len(PROMPT) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    return float(((logits.amax(1, keepdim=True) - chosen) / logits.std()).max())


def count_launches(decoder: Decoder, count: int) -> dict:
    """Graph replays, single kernel launches and waiting calls per round, from the profiler; None
    without a GPU."""
    if decoder.device.type != "cuda":
        return launches({}, 0)
    decoder.forget()
    generation = Generation(decoder, PROMPT, GREEDY, count)
    steps = iter(generation)
    next(steps)  # the prefill
    with torch.profiler.profile() as profile:
        for _ in steps:
            pass
    calls = {event.key: event.count for event in profile.key_averages()}
    return launches(calls, generation.stats.rounds)


def launches(calls: dict[str, int], rounds: int) -> dict:
    """Calls of the CUDA runtime by name, as counts per round; None where there was no round."""
    single = sum(count for name, count in calls.items() if name.startswith("cudaLaunchKernel"))
    counts = {
        "replays_per_round": calls.get("cudaGraphLaunch", 0),
        "launches_per_round": single,
        "waits_per_round": sum(calls.get(name, 0) for name in WAITS),
    }
    return {name: count / rounds if rounds else None for name, count in counts.items()}


def check_demo(scope: Scope, device: torch.device, report: Report) -> None:
    """The demo model with its head, if both are there, against its plain decoding."""
    if not scope.demo.exists():
        report.expect("demo", skipped=f"{scope.demo} is not there: run `make demo`")
        return
    texts, heads = [], sorted((ROOT / "assets").glob("*.safetensors"))
    for head, tree in ((None, "none"), *((head, "chain:2+lookup:3") for head in heads[:1])):
        row = report.expect("demo", tree=tree)
        options = {"device": str(device), "max_seq_length": scope.context}
        engine = load(scope.demo, head, tree=tree, compile=scope.compile, **options)
        engine.warm_up(GREEDY)
        prompt = PROMPT if engine.tokenizer is None else "The sea is"
        text = engine.generate(prompt, max_new_tokens=scope.tokens)
        texts.append(text.tokens)
        for _ in text:
            pass
        report.measured(row, **measurements(text.generation), ids_as_plain=texts[0] == texts[-1])


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- the whole


def sections(
    scope: Scope, device: torch.device, report: Report
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Name and work of every section, in order."""
    dtype = pick_dtype("auto", device)
    if scope.tests:
        yield "tests", lambda: check_tests(report)
    yield "kernels", lambda: check_kernels(scope, device, dtype, report)
    for mode, tree in scope.trees:
        work = functools.partial(check_decoding, mode, tree, scope, device, report)
        yield f"decoding {mode_name(mode, dtype)}", work
    yield "demo", lambda: check_demo(scope, device, report)


def check(
    device: torch.device, out: Path, only: str = "", budget_s: float = 480.0, scope: Scope = Scope()
) -> int:
    """Run the sections whose names begin with `only`. A failure in one is written down and the next
    runs. Exit code 1 if anything failed."""
    stream = reading(device, scope.stream)
    facts = {
        "device": device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": project_commit(),
        "read_bytes_per_s": stream.bytes_per_s(times(stream.calls, device).values()),
    }
    report = Report(out, facts, budget_s)
    work = {name: do for name, do in sections(scope, device, report) if name.startswith(only)}
    if not work:
        names = ", ".join(name for name, _ in sections(scope, device, report))
        raise ValueError(f"--only {only} is no section: give the beginning of one of {names}")
    for name, do in work.items():
        note(f"{name} ...")
        try:
            do()
        except TimeIsUp as end:
            report.failed(name, str(end))
        except Exception as error:  # whatever it is, the minutes on a GPU must not be lost
            traceback.print_exc()
            report.failed(name, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
        release(device)
    print(report.page())
    return 1 if report.failures else 0


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="gpu_check.py", description="Check a GPU.")
    add = parser.add_argument
    add("--device", default="auto", help="auto or cuda")
    add("--out", type=Path, default=Path("results"), help="directory for the tables")
    add("--only", default="", help="the sections that begin like this: tests, kernels, decoding")
    add("--budget_s", type=float, default=480.0, help="nothing is begun after so many seconds")
    args = parser.parse_args(argv)
    device = pick_device(args.device)
    if device.type != "cuda":
        raise ValueError("gpu_check.py needs a GPU and torch finds none: run it where there is one")
    return check(device, args.out, args.only, args.budget_s)


if __name__ == "__main__":
    run(main)
