"""Everything that only a GPU can show, in one command and within minutes.

    python scripts/gpu_check.py [--only decoding] [--budget_s 480] [--out results/]

Sections: the CUDA tests; the linear layers of every mode, by rows; plain and drafted decoding of a
LLaMA-2-7B shape in every mode; the demo model. What a row of the tables is expected to take, the
time of reading its bytes once, is written before it is measured, and the row as soon as it is: a
check that is killed keeps what it has.

The weights are random, and attention decides what is said. Each drafted round runs a random head,
whose guesses an oracle replaces: told what plain decoding said, it is right with probability RIGHT.
Every token is then held against the slow path. Leaves out: the quality of real models, comparisons
with other programs (benchmark.py), and what a card is bound by (talon/measuring/roofline.py)."""

import copy
import gc
import itertools
import json
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the modules of this checkout, wherever it is called from

# ruff: noqa: E402
from eagle_draft import DraftConfig, DraftHead, Nodes, Pick
from model import At, ModelConfig, RMSNorm, Transformer
from talon.checking import full_logits
from talon.cli import DEMO, Parser, note, run
from talon.decoder import Decoder, Generation
from talon.drafters.eagle import EagleDrafter
from talon.graphs import compile_region
from talon.kernels.linear import LINEARS, quantize_int4, quantize_int8, swap_linears
from talon.loading import device_name, pick_device, pick_dtype
from talon.measuring.roofline import MODELS, STREAM, readers
from talon.operators import choose_operators
from talon.records import bytes_per_round, markdown_table, module_bytes, project_commit
from talon.sampling import GREEDY
from talon.text import load
from talon.trees import parse_tree
from talon.tuning.costs import medians, times
from talon.writing import atomic_file

ROWS = (1, 4, 8, 16, 32, 64)
RIGHT = 0.85  # how often the oracle is right
NEAR = 0.25  # standard deviations of the logits by which rounding may turn a choice
PROMPT = [1, 2, 3, 4, 5]
GROUPSIZE = 128
# Calls of the CUDA runtime that are counted.
CALLS = {
    "replays": ("cudaGraphLaunch",),
    "launches": ("cudaLaunchKernel", "cudaLaunchKernelExC"),
    "waits": (*(f"cuda{what}Synchronize" for what in ("Stream", "Device", "Event")), "cudaMemcpy"),
}


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
    stream: int = STREAM["cuda"]  # bytes whose reading is timed
    tokens: int = 128
    context: int = 1024
    compile: bool = True
    tests: bool = True
    demo: Path = DEMO


# ---------------------------------------------------------------- a model of the right shape


def stored(weight: Tensor, mode: str | None) -> dict[str, Tensor]:
    """What a file would hold of a linear layer in a mode, without calibration."""
    if mode is None:
        return {"weight": weight}
    if mode == "int4":
        return dict(
            zip(("weight", "scales", "zeros"), quantize_int4(weight, GROUPSIZE), strict=True)
        )
    rounded, scales = quantize_int8(weight)
    return {"weight": rounded, "scales": scales, "smoothing": torch.ones_like(weight[0]).float()}


def fill_linears(
    module: nn.Module, mode: str | None, device: torch.device, dtype: torch.dtype, scales: dict
) -> None:
    """Give every linear layer of a module on the meta device random weights in a mode. scales: the
    standard deviation by the layer's name, otherwise 0.02."""
    layers = dict(module.named_modules()).items()
    shapes = {name: m.weight.shape for name, m in layers if isinstance(m, nn.Linear)}
    if mode is not None:
        swap_linears(module, {"groupsize": GROUPSIZE, "layers": dict.fromkeys(shapes, mode)})
    made: dict[tuple, dict[str, Tensor]] = {}
    for name, shape in shapes.items():
        role = name.rpartition(".")[2]
        if (role, shape) not in made:  # rounded once, the same in every block
            weight = torch.randn(shape, dtype=dtype, device=device) * scales.get(role, 0.02)
            made[role, shape] = stored(weight, mode)
        state = {part: tensor.clone() for part, tensor in made[role, shape].items()}
        module.get_submodule(name).load_state_dict(state, assign=True)
    choose_operators(module, device, dtype)
    module.requires_grad_(False).eval()


def random_target(
    config: ModelConfig, mode: str | None, device: torch.device, dtype: torch.dtype
) -> Transformer:
    """A target whose next token depends on all before it, with logits that spread by about 1."""
    with torch.device("meta"):
        model = Transformer(config)
    embedding = torch.randn(config.vocab_size, config.dim, dtype=dtype, device=device) * 0.02
    model.tok_embeddings.weight = nn.Parameter(embedding, requires_grad=False)
    for norm in (module for module in model.modules() if isinstance(module, RMSNorm)):
        ones = torch.ones(config.dim, dtype=dtype, device=device)
        norm.weight = nn.Parameter(ones, requires_grad=False)
    last = 0.02 / math.sqrt(2 * config.n_layer)
    fill_linears(model, mode, device, dtype, {"wo": last, "w2": last, "output": config.dim**-0.5})
    return model


def random_head(model: Transformer) -> DraftHead:
    """An EAGLE-1 head of the target's shape, which borrows embedding and lm_head."""
    c, weight = model.config, model.norm.weight
    same = {f.name: getattr(c, f.name) for f in fields(DraftConfig) if hasattr(c, f.name)}
    same |= {"draft_vocab_size": c.vocab_size, "target_dim": c.dim}
    config = DraftConfig("eagle1", **same, own_output=False, own_embedding=False)
    with torch.device(weight.device):
        head = DraftHead(config).to(weight.dtype)
    head.tok_embeddings, head.output = model.tok_embeddings, model.output
    choose_operators(head.requires_grad_(False).eval(), weight.device, weight.dtype)
    return head


class Oracle:
    """A draft source that knows what comes: on the way to the deepest node of another source's tree
    it puts the true tokens, each with probability RIGHT. Next to them stand wrong ones."""

    def __init__(self, source: EagleDrafter, positions: int) -> None:
        self.source, self.tree, self.held = source, source.tree, source.held
        self.bytes_read = source.bytes_read
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


# ---------------------------------------------------------------- what is measured


def multiply(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x)


def copies(size: int, device: torch.device) -> int:
    """How many layers of `size` bytes are timed in turn: a few calls for each start of a graph, and
    four times what the second cache holds."""
    on_gpu = device.type == "cuda"
    cache = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else 0
    return max(20, math.ceil(4 * cache / size))


def decode(decoder: Decoder, count: int) -> Generation:
    decoder.forget()
    generation = Generation(decoder, PROMPT, GREEDY, count)
    for _ in generation:
        pass
    return generation


def measurements(run: Generation) -> dict:
    stats, rounds = run.stats, max(run.stats.rounds, 1)
    parts = {"round_ms": stats.decode_s, "draft_ms": stats.draft_s, "verify_ms": stats.verify_s}
    found = {name: seconds / rounds * 1e3 for name, seconds in parts.items()}
    speed = stats.emitted / max(stats.decode_s, 1e-9)
    return found | {"acceptance_length": stats.acceptance_length, "tokens_per_s": speed}


@torch.inference_mode()
def worst_gap(model: Transformer, tokens: list[int]) -> float:
    """How far a token's logit is below the best of the slow path at its place, at worst, in
    standard deviations of the logits. Rounding gives a little; a wrong mask, cache slot or
    position gives much."""
    logits = full_logits(model, PROMPT + tokens)[len(PROMPT) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    return float(((logits.amax(1, keepdim=True) - chosen) / logits.std()).max())


def count_launches(decoder: Decoder, count: int) -> dict:
    """What the profiler counts of a generation; nothing without a GPU."""
    if decoder.device.type != "cuda":
        return {}
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
    """Graph replays, single kernel launches and waiting calls per round, of all calls by name."""
    counts = {kind: sum(calls.get(name, 0) for name in names) for kind, names in CALLS.items()}
    return {f"{kind}_per_round": count / rounds for kind, count in counts.items()}


# ---------------------------------------------------------------- the check


class Check:
    """The sections, and what is known so far, on disk at every moment."""

    def __init__(self, device: torch.device, out: Path, budget_s: float, scope: Scope) -> None:
        self.device, self.dtype = device, pick_dtype("auto", device)
        self.scope, self.out, self.ends = scope, out, time.monotonic() + budget_s
        self.rows: dict[str, list[dict]] = {}
        self.failures: dict[str, str] = {}
        taken = times(readers(device, scope.stream), device)
        self.read_bytes_per_s = scope.stream / min(map(min, taken.values()))
        self.facts = {"device": device_name(device), "torch": torch.__version__}
        self.facts |= {"cuda": torch.version.cuda, "commit": project_commit()}
        self.facts |= {"read_bytes_per_s": self.read_bytes_per_s}
        self.sections: dict[str, Callable[[], None]] = {"tests": self.tests} if scope.tests else {}
        self.sections["kernels"] = self.kernels
        for mode, tree in scope.trees:
            self.sections[f"decoding {self.name_of(mode)}"] = partial(self.decoding, mode, tree)
        self.sections["demo"] = self.demo

    def name_of(self, mode: str | None) -> str:
        return mode or str(self.dtype).removeprefix("torch.")

    def run(self, only: str = "") -> int:
        """Run the sections whose names begin with `only`. A failure in one is written down and the
        next runs. Exit code 1 if anything failed."""
        work = {name: do for name, do in self.sections.items() if name.startswith(only)}
        if not work:
            names = ", ".join(self.sections)
            raise ValueError(f"--only {only} is no section: give the beginning of one of {names}")
        self.out.mkdir(parents=True, exist_ok=True)
        for name, do in work.items():
            note(f"{name} ...")
            try:
                do()
            except Exception as error:  # whatever it is, the minutes on a GPU must not be lost
                if not isinstance(error, TimeoutError):
                    traceback.print_exc()
                self.failed(name, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
            self.release()
        print(self.page())
        return 1 if self.failures else 0

    def expect(self, section: str, **known: object) -> dict:
        """A row that is about to be measured. Raises TimeoutError if it is too late for that."""
        if time.monotonic() > self.ends:
            raise TimeoutError("give more seconds with --budget_s, or less to do with --only")
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

    def release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ------------------------------------------------------------ the sections

    def tests(self) -> None:
        """The tests that need CUDA, in a process of their own."""
        row = self.expect("tests", command="pytest -k 'cuda or gpu'")
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "-k", "cuda or gpu", "tests"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
        lines = result.stdout.strip().splitlines()
        self.measured(row, summary=lines[-1] if lines else "")
        if result.returncode:
            self.failed("tests", " / ".join(lines[-5:]))

    def kernels(self) -> None:
        """Microseconds of one linear layer by its rows, in turn over copies that no cache holds."""
        for mode, shape in itertools.product((None, *LINEARS), self.scope.shapes):
            with torch.device("meta"):
                holder = nn.Sequential()
                holder.output = nn.Linear(*reversed(shape), bias=False)
            fill_linears(holder, mode, self.device, self.dtype, {})
            linear = holder.output
            held, size = module_bytes(linear), "{} x {}".format(*shape)
            read_us = held / self.read_bytes_per_s * 1e6
            row = self.expect("kernels", mode=self.name_of(mode), shape=size, read_us=read_us)
            region = compile_region(multiply) if self.scope.compile else multiply
            layers = [copy.deepcopy(linear) for _ in range(copies(held, self.device))]
            calls = {}
            for count in ROWS:
                x = torch.randn(count, shape[1], dtype=self.dtype, device=self.device)
                calls[count] = lambda x=x, f=region, each=layers: [f(layer, x) for layer in each]
            us = {n: s / len(layers) * 1e6 for n, s in medians(calls, self.device).items()}
            self.measured(row, us=us, share_of_reading={n: read_us / t for n, t in us.items()})

    def decoding(self, mode: str | None, tree: str) -> None:
        """Plain and drafted decoding of the shape in one mode."""
        scope, section = self.scope, f"decoding {self.name_of(mode)}"
        model = random_target(scope.config, mode, self.device, self.dtype)
        head, plain = random_head(model), []
        for name in ("none", tree):
            decoder = OracleDecoder(model, scope.context, head, parse_tree(name), scope.compile)
            moved = bytes_per_round(decoder, len(PROMPT) + scope.tokens / 2)
            read_ms = moved / self.read_bytes_per_s * 1e3
            row = self.expect(section, tree=name, read_ms=read_ms)
            compile_s = decoder.warm_up(GREEDY)
            decoder.tell(PROMPT + plain)
            tokens = decode(decoder, scope.tokens).tokens
            decoder.tell(PROMPT + tokens)  # where rounding turned a choice, the timed text follows
            plain, timed = plain or tokens, decode(decoder, scope.tokens)
            found, gap = measurements(timed), worst_gap(model, timed.tokens)
            found |= {"worst_gap": gap, "ids_as_plain": tokens == plain, "compile_s": compile_s}
            found |= count_launches(decoder, scope.tokens)
            self.measured(row, share_of_reading=read_ms / found["round_ms"], **found)
            if not gap <= NEAR:  # NaN fails too
                self.failed(f"{section}, {name}", f"a token stands {gap:.2f} below the slow path's")
            if found.get("replays_per_round", 1) > 1.05:
                self.failed(f"{section}, {name}, replays", "more than one graph replay a round")
            del decoder
            self.release()

    def demo(self) -> None:
        """The demo model with its head, if both are there, against its plain decoding."""
        scope = self.scope
        if not scope.demo.exists():
            self.expect("demo", skipped=f"{scope.demo} is not there: run `make demo`")
            return
        texts, heads = [], sorted((ROOT / "assets").glob("*.safetensors"))
        for head, tree in ((None, "none"), *((head, "chain:2+lookup:3") for head in heads[:1])):
            row = self.expect("demo", tree=tree)
            options = {"device": str(self.device), "max_seq_length": scope.context}
            engine = load(scope.demo, head, tree=tree, compile=scope.compile, **options)
            engine.warm_up(GREEDY)
            prompt = PROMPT if engine.tokenizer is None else "The sea is"
            text = engine.generate(prompt, max_new_tokens=scope.tokens)
            texts.append(text.tokens)
            for _ in text:
                pass
            self.measured(row, **measurements(text.generation), ids_as_plain=texts[0] == texts[-1])


def shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {shown(part)}" for name, part in value.items())
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


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
    return Check(device, args.out, args.budget_s, Scope()).run(args.only)


if __name__ == "__main__":
    run(main)
