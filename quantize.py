"""Quantise a checkpoint, target or head, and measure what that costs in quality.

    python quantize.py --checkpoint_path F --mode int8|int8-dynamic|int4 [--groupsize 128] [--out G]
    python quantize.py --evaluate F [--against G]

All linear layers are quantised, lm_head included; embeddings, norms and biases stay as they are. A
tied lm_head is quantised on its own, next to the embedding table. A target's int4 weights are
rounded by GPTQ on a text, one block in memory at a time, and written as they come; int8 takes its
smoothing from the first tokens of that text. The file's metadata names each layer's mode. The
modes, the stored form and the layers that run it are in talon/kernels/linear.py, GPTQ in
talon/quantising/gptq.py. Leaves out AWQ, and GPTQ for int8, which loses nothing that it could
win back."""

if __name__ == "__main__":  # what follows is imported, which takes seconds, and its main is run
    from talon.cli import start

    start("quantize")

import math
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from talon.checkpoint import Checkpoint, TensorSpec, read_checkpoint
from talon.cli import Parser, announce, check_output
from talon.kernels.linear import (
    GROUPSIZE,
    GROUPSIZES,
    LINEARS,
    TINY,
    quantize_int4,
    quantize_int8,
    round_rows,
)
from talon.loading import pick_device
from talon.prompts import DATA
from talon.quantising.blocks import EMBEDDING, Blocks, linears_of, read_windows, watch_linears
from talon.quantising.gptq import Hessian, gptq_int4
from talon.quantising.judging import judge
from talon.writing import write_checkpoint

CPU = torch.device("cpu")

# int8-dynamic: where int8 activations put the outputs of layers of one role (all feed_forward.w2,
# say) off by more on average, these layers stay in int8.
MOST_ERROR = 0.0175

TOKENS = 6144  # of the calibration text, at most


# ---------------------------------------------------------------- plan: how each layer is quantised


class Plan(NamedTuple):
    mode: str
    smoothing: Tensor | None = None  # fp32 [in], int8 and int8-dynamic


def layers_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Layer -> tensor with its weights, for every linear; a tied lm_head has the embedding's."""
    layers = {
        name.removesuffix(".weight"): name
        for name, spec in checkpoint.specs.items()
        if name.endswith(".weight") and len(spec.shape) == 2 and name != EMBEDDING
    }
    if checkpoint.config.get("tied") and "output" not in layers:
        layers["output"] = EMBEDDING
    return layers


def role_of(layer: str) -> str:
    """`attention.wo` of `layers.7.attention.wo`."""
    return re.sub(r"^layers\.\d+\.", "", layer)


@torch.inference_mode()
def plan_layers(
    checkpoint: Checkpoint, mode: str, windows: list[Tensor], device: torch.device
) -> dict[str, Plan]:
    """A plan for every linear; for int8, of a target, made from its inputs on the first window."""
    plans = dict.fromkeys(layers_of(checkpoint), Plan(mode))
    if mode == "int4" or not windows:
        return plans
    errors: dict[str, list[float]] = {}  # of int8-dynamic, by role
    in_int8: dict[str, Plan] = {}  # what a layer gets where int8-dynamic is too coarse for it

    def watch(layer: str, linear: nn.Linear, inputs: Tensor) -> None:
        check_finite(linear.weight, f"{layer}.weight", checkpoint.path)
        # The first token's activations are a class of their own, and only one row.
        inputs = check_finite(inputs[1:], f"the input of {layer}", checkpoint.path)
        plans[layer] = in_int8[layer] = Plan("int8", smooth(linear.weight, inputs, False)[0])
        if mode == "int8-dynamic":
            smoothing, error = smooth(linear.weight, inputs, True)
            plans[layer] = Plan(mode, smoothing)
            errors.setdefault(role_of(layer), []).append(error)

    blocks = Blocks(checkpoint, windows[:1], device)
    for prefix, block in blocks.run("planning"):
        watch_linears(linears_of(block, prefix), watch)
    watch("output", blocks.output(), blocks.states[0])
    # By role, not by layer: blocks that are alike share one compilation.
    coarse = {role for role, each in errors.items() if sum(each) / len(each) > MOST_ERROR}
    return plans | {layer: plan for layer, plan in in_int8.items() if role_of(layer) in coarse}


def smooth(weight: Tensor, inputs: Tensor, dynamic: bool) -> tuple[Tensor, float]:
    """The best smoothing fp32 [in] for int8, and the relative error of the outputs with it.

    Dividing the inputs' columns by a power of their size, and multiplying those of the weights,
    spreads the rounding error over both (SmoothQuant, arXiv 2211.10438, with one fixed power).
    Where only the weights are rounded, it moves the finer steps to the columns that matter."""
    size = inputs.square().mean(0).sqrt()
    size = size.clamp_min(float(size.max()) * 1e-4 + TINY)
    sample = inputs[:: -(-len(inputs) // 64)]
    expected = sample @ weight.t()
    best, least = torch.ones_like(size), math.inf
    for power in (0.0, 0.25, 0.5, 0.75):
        smoothing = size**power
        smoothing = smoothing / smoothing.log().mean().exp()
        input_steps, input_scales = round_rows(sample / smoothing, 127 if dynamic else 127 * 256)
        steps, scales = quantize_int8(weight * smoothing)
        outputs = (input_steps @ steps.float().t()) * scales * input_scales
        errors = (outputs - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(TINY)
        error = float(errors.square().mean().sqrt())
        if error < least:
            best, least = smoothing, error
    return best, least


def check_finite(tensor: Tensor, name: str, path: Path) -> Tensor:
    if not tensor.isfinite().all():
        raise ValueError(
            f"{name} in {path} holds NaN or infinity and cannot be quantised; fetch the model again"
        )
    return tensor


# ---------------------------------------------------------------- write


def quantize_weight(weight: Tensor, plan: Plan, groupsize: int) -> dict[str, Tensor]:
    """The stored tensors of one layer by their short names, each weight rounded by itself."""
    if plan.mode == "int4":
        names = ("weight", "scales", "zeros")
        return dict(zip(names, quantize_int4(weight, groupsize), strict=True))
    smoothing = torch.ones(weight.shape[1]) if plan.smoothing is None else plan.smoothing.cpu()
    steps, scales = quantize_int8(weight.float() * smoothing)
    return {"weight": steps, "scales": scales, "smoothing": smoothing}


@torch.inference_mode()
def calibrated_tensors(
    checkpoint: Checkpoint, groupsize: int, windows: list[Tensor], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """The int4 tensors of all linears, block by block, on the inputs that quantised blocks give."""
    blocks = Blocks(checkpoint, windows, device)

    def rounded(layers: dict[str, nn.Linear], run: Iterator) -> Iterator[tuple[str, Tensor]]:
        hessians = {layer: Hessian(linear.in_features, device) for layer, linear in layers.items()}
        hooks = watch_linears(layers, lambda layer, _, inputs: hessians[layer].add(inputs))
        for _ in run:
            pass
        for hook in hooks:
            hook.remove()
        for layer, linear in layers.items():
            check_finite(linear.weight, f"{layer}.weight", checkpoint.path)
            check_finite(hessians[layer].sum, f"the input of {layer}", checkpoint.path)
            *parts, values = gptq_int4(linear.weight, hessians.pop(layer), groupsize)
            linear.weight = nn.Parameter(values.contiguous(), requires_grad=False)
            names = (f"{layer}.weight", f"{layer}.scales", f"{layer}.zeros")
            yield from zip(names, parts, strict=True)

    for prefix, block in blocks.run("GPTQ"):
        yield from rounded(linears_of(block, prefix), blocks.through(block))
    output = blocks.output()
    yield from rounded({"output": output}, (output(x) for x in blocks.states))


def quantized_specs(
    checkpoint: Checkpoint, plans: dict[str, Plan], groupsize: int
) -> dict[str, TensorSpec]:
    """Every tensor of the quantised file, without its numbers."""
    sources = layers_of(checkpoint)
    gone = {f"{layer}.weight" for layer in sources}
    specs = {name: spec for name, spec in checkpoint.specs.items() if name not in gone}
    for layer, source in sources.items():
        outputs, inputs = checkpoint.specs[source].shape
        stored = LINEARS[plans[layer].mode].specs(inputs, outputs, groupsize)
        specs |= {f"{layer}.{part}": spec for part, spec in stored.items()}
    return specs


def rounded_tensors(
    checkpoint: Checkpoint, plans: dict[str, Plan], groupsize: int, known: bool
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the quantised file, with a progress bar over the input's bytes; those of the
    linears only if they are not `known` already."""
    layers = {source: layer for layer, source in layers_of(checkpoint).items()}
    total = sum(spec.nbytes for spec in checkpoint.specs.values())
    with tqdm(None, "writing", total, unit="B", unit_scale=True, disable=None) as bar:
        for name, tensor in checkpoint.tensors():
            layer = layers.get(name)
            if layer is not None and not known:
                check_finite(tensor, name, checkpoint.path)
                parts = quantize_weight(tensor, plans[layer], groupsize)
                yield from ((f"{layer}.{part}", value) for part, value in parts.items())
            if name != f"{layer}.weight":  # a tied embedding stays next to the lm_head made of it
                yield name, tensor
            bar.update(tensor.nbytes)


def quantize_checkpoint(
    path: Path,
    mode: str,
    groupsize: int = GROUPSIZE,
    out: Path | None = None,
    text: Path | None = None,
    device: torch.device = CPU,
) -> Path:
    """Write the quantised form of a checkpoint and return its path. text: to calibrate on, in place
    of the one that ships with the project.

    Raises ValueError for what cannot be quantised; nothing is left behind then."""
    if mode not in LINEARS:
        raise ValueError(f"mode {mode!r} is not known: give one of {', '.join(LINEARS)}")
    if groupsize not in GROUPSIZES:
        allowed = ", ".join(map(str, GROUPSIZES))
        raise ValueError(f"group size {groupsize} is not allowed: give one of {allowed}")
    checkpoint = read_checkpoint(path)
    if checkpoint.quantization is not None:
        done = checkpoint.quantization.get("mode")
        raise ValueError(f"{path} is already quantised ({done}); give the file it was made from")
    suffix = f"int4_g{groupsize}" if mode == "int4" else mode
    out = out or checkpoint.path.with_name(f"{checkpoint.path.stem}_{suffix}.safetensors")
    check_output("--out", out, [checkpoint.path])
    windows = []
    if checkpoint.kind == "target":
        windows = read_windows(checkpoint, text or DATA / "calibration.txt", TOKENS)
    plans = plan_layers(checkpoint, mode, windows, device)
    calibrated = mode == "int4" and bool(windows)
    tensors = rounded_tensors(checkpoint, plans, groupsize, known=calibrated)
    if calibrated:
        tensors = chain(calibrated_tensors(checkpoint, groupsize, windows, device), tensors)
    write_checkpoint(
        out,
        kind=checkpoint.kind,
        config=checkpoint.config,
        specs=quantized_specs(checkpoint, plans, groupsize),
        tensors=tensors,
        quantization={
            "mode": mode,
            "groupsize": groupsize if mode == "int4" else None,
            "layers": {layer: plan.mode for layer, plan in plans.items()},
        },
        source=checkpoint.source,
    )
    return out


def describe(before: Path, after: Path, mode: str) -> str:
    """Sizes, and which layers are not in the mode that was asked for."""
    layers = read_checkpoint(after).quantization["layers"]
    sizes = f"{before.stat().st_size / 1e6:.0f} MB -> {after.stat().st_size / 1e6:.0f} MB"
    line = f"{after}: {sizes}, {len(layers)} linear layers in {mode}"
    others = sorted({role_of(layer) for layer, other in layers.items() if other != mode})
    if others:
        line += f"; but in int8, where int8 activations cost over {MOST_ERROR:.2%} of the outputs: "
        line += ", ".join(others)
    return line


# ---------------------------------------------------------------- judge


def evaluate(path: Path, against: Path | None = None, text: Path | None = None) -> list[str]:
    """Lines: perplexity on a text, KL divergence to the original, and greedy tokens kept."""
    checkpoint = read_checkpoint(path)
    original = read_checkpoint(against or checkpoint.path.with_name("talon.safetensors"))
    for each in (checkpoint, original):
        if each.kind != "target":
            raise ValueError(f"{each.path} is a head, which has no perplexity; give a target")
    sizes = [each.config["vocab_size"] for each in (checkpoint, original)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{path} has a vocabulary of {sizes[0]} and {original.path} one of {sizes[1]}: "
            "give the file it was made from as --against"
        )
    windows = read_windows(original, text or DATA / "evaluation.txt", 1 << 30)
    found = judge(original, checkpoint, windows)
    count = sum(map(len, windows))
    return [
        f"{original.path}: perplexity {found.before:.3f} on {count} tokens",
        f"{path}: perplexity {found.after:.3f} ({found.after / found.before - 1:+.2%}), KL "
        f"divergence {found.divergence:.4f}, greedy tokens equal {found.same:.2%}",
    ]


def main() -> int:
    parser = Parser(prog="quantize.py", description="Quantise a checkpoint, target or head.")
    given = parser.add_mutually_exclusive_group(required=True).add_argument
    given("--checkpoint_path", type=Path, help="the file to quantise (convert_hf_checkpoint.py)")
    given("--evaluate", type=Path, help="the file to judge: its perplexity, and tokens it keeps")
    add = parser.add_argument
    add("--mode", help=" | ".join(LINEARS))
    sharing = f"int4: weights that share a scale and a zero (default: {GROUPSIZE})"
    add("--groupsize", type=int, help=sharing)
    add("--out", type=Path, help="the file to write; default: its name with _MODE, next to it")
    add("--against", type=Path, help="the original; default: talon.safetensors next to --evaluate")
    add("--text", type=Path, help="to calibrate on, or to judge by; default: those that ship here")
    add("--device", help="that quantises: auto (default), cpu or cuda; --evaluate is for the CPU")
    args = parser.parse_args()
    if args.evaluate is not None:
        if args.mode or args.groupsize or args.out or args.device:
            given = "--mode, --groupsize, --out and --device"
            parser.error(f"--evaluate writes nothing: leave out {given}")
        for line in evaluate(args.evaluate, args.against, args.text):
            print(line, flush=True)
        return 0
    if args.against is not None:
        parser.error("--against belongs to --evaluate: give both")
    if args.mode is None:
        parser.error(f"give --mode: {', '.join(LINEARS)}")
    if args.groupsize is not None and args.mode in LINEARS and args.mode != "int4":
        parser.error(f"--groupsize belongs to int4, and the mode is {args.mode}: leave it out")
    groupsize = GROUPSIZE if args.groupsize is None else args.groupsize
    device = pick_device(args.device or "auto")
    given = (args.checkpoint_path, args.mode, groupsize, args.out, args.text, device)
    out = quantize_checkpoint(*given)
    announce(describe(args.checkpoint_path, out, args.mode))
    return 0
