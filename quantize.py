"""Quantise a checkpoint, target or head, and measure what that costs in quality.

    python quantize.py --checkpoint_path F --mode int8|int8-dynamic|int4 [--groupsize 128] [--out G]
    python quantize.py --evaluate F [--against G]

All linear layers are quantised, lm_head included; embeddings, norms and biases stay as they are. A
tied lm_head is quantised on its own, next to the embedding table. For a target, a plan is made from
the inputs that its layers have on a short text that ships with the project, one block in memory at
a time. Then the file is written, one tensor in memory at a time; its metadata names each layer's
mode. The modes, the stored form and the layers that run it are in talon/kernels/linear.py. Leaves
out GPTQ and AWQ."""

if __name__ == "__main__":  # what follows is imported, which takes seconds, and its main is run
    from talon.cli import start

    start("quantize")

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from model import KVCache, ModelConfig, Place, Transformer, causal_mask, rope_table
from talon.checkpoint import Checkpoint, TensorSpec, read_checkpoint
from talon.cli import Parser, announce, check_output, note
from talon.kernels.linear import (
    GROUPSIZE,
    GROUPSIZES,
    LINEARS,
    TINY,
    quantize_int4,
    quantize_int8,
    round_rows,
)
from talon.loading import empty_module, fill, find_tokenizer
from talon.operators import choose_operators
from talon.prompts import DATA
from talon.tokenizer import Tokenizer, load_tokenizer
from talon.writing import write_checkpoint

WINDOW = 512  # tokens that calibration and evaluation read at once

EMBEDDING = "tok_embeddings.weight"

CPU = torch.device("cpu")

# int8-dynamic: where int8 activations put the outputs of layers of one role (all feed_forward.w2,
# say) off by more on average, these layers stay in int8.
MOST_ERROR = 0.0175


# ---------------------------------------------------------------- a target, block by block

Watch = Callable[[str, nn.Linear, Tensor], None]  # sees a layer's name, the layer and its inputs


def read_ids(tokenizer: Tokenizer, name: str) -> list[int]:
    """Token ids of a text that ships with the project."""
    return tokenizer.encode((DATA / name).read_text(encoding="utf-8"))


def load_output(checkpoint: Checkpoint) -> nn.Module:
    """lm_head alone, quantised or not, in fp32."""
    config = ModelConfig.from_dict(checkpoint.config)
    part = nn.Sequential(empty_module(Transformer, config, checkpoint).output)
    if "output.weight" in checkpoint.specs:
        fill(part[0], checkpoint, CPU, torch.float32, "output.")
    else:
        embedding = checkpoint.tensor(EMBEDDING).float()
        part[0].weight = nn.Parameter(embedding, requires_grad=False)
    choose_operators(part, CPU, torch.float32)
    return part[0]


@torch.inference_mode()
def run_blocks(checkpoint: Checkpoint, windows: list[Tensor], watch: Watch | None) -> list[Tensor]:
    """States after the final norm [T, C] of each window of token ids, in fp32."""
    c, size = ModelConfig.from_dict(checkpoint.config), max(map(len, windows))
    model = empty_module(Transformer, c, checkpoint)
    table = rope_table(size, c.head_dim, c.rope_theta, c.rope_scaling)
    kv = KVCache(1, c.n_kv_head, size, c.head_dim, torch.float32).layer(0)
    embedding = checkpoint.tensor(EMBEDDING)
    states = [embedding[window].float() for window in windows]
    for index, block in enumerate(tqdm(model.layers, "blocks", disable=None, leave=False)):
        fill(block, checkpoint, CPU, torch.float32, f"layers.{index}.")
        choose_operators(block, CPU, torch.float32)
        watch_linears(block, f"layers.{index}.", watch)
        for number, x in enumerate(states):
            slots = torch.arange(len(x))
            mask = causal_mask(torch.zeros(1, dtype=torch.int64), len(x), slots)
            states[number] = block(x, Place(table[:, : len(x)], slots, mask), kv)
        block.to("meta")  # its memory is free for the next one
    fill(model.norm, checkpoint, CPU, torch.float32, "norm.")
    return [model.norm(x) for x in states]


def watch_linears(block: nn.Module, prefix: str, watch: Watch | None) -> None:
    for name, module in block.named_modules() if watch else ():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(
                lambda linear, inputs, layer=prefix + name: watch(layer, linear, inputs[0])
            )


# ---------------------------------------------------------------- plan: how each layer is quantised


class Plan(NamedTuple):
    mode: str
    smoothing: Tensor | None = None  # fp32 [in], int8 and int8-dynamic
    importance: Tensor | None = None  # fp32 [in], int4: how much an error in each column matters


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


def plan_layers(checkpoint: Checkpoint, mode: str) -> dict[str, Plan]:
    """A plan for every linear, made from its inputs on a short text where the file is a target."""
    plans = dict.fromkeys(layers_of(checkpoint), Plan(mode))
    if checkpoint.kind != "target":
        return plans
    errors: dict[str, list[float]] = {}  # of int8-dynamic, by role
    in_int8: dict[str, Plan] = {}  # what a layer gets where int8-dynamic is too coarse for it

    def watch(layer: str, linear: nn.Linear, inputs: Tensor) -> None:
        check_finite(linear.weight, f"{layer}.weight", checkpoint.path)
        # The first token's activations are a class of their own, and only one row.
        inputs = check_finite(inputs[1:], f"the input of {layer}", checkpoint.path)
        if mode == "int4":
            plans[layer] = Plan(mode, importance=inputs.square().mean(0))
            return
        plans[layer] = in_int8[layer] = Plan("int8", smooth(linear.weight, inputs, False)[0])
        if mode == "int8-dynamic":
            smoothing, error = smooth(linear.weight, inputs, True)
            plans[layer] = Plan(mode, smoothing)
            errors.setdefault(role_of(layer), []).append(error)

    states = run_blocks(checkpoint, [calibration_ids(checkpoint)], watch)[0]
    with torch.inference_mode():
        watch("output", load_output(checkpoint), states)
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


def calibration_ids(checkpoint: Checkpoint) -> Tensor:
    """Token ids of the calibration text, or ids from all over the vocabulary and a notice."""
    config = ModelConfig.from_dict(checkpoint.config)
    size = min(WINDOW, config.max_seq_length)
    tokenizer = find_tokenizer(checkpoint.path.parent, config)
    if tokenizer is not None:
        return torch.tensor(read_ids(tokenizer, "calibration.txt")[:size])
    note(f"note: no tokenizer next to {checkpoint.path}: calibrating with arbitrary ids, not text")
    return torch.arange(size) * 7919 % config.vocab_size


def check_finite(tensor: Tensor, name: str, path: Path) -> Tensor:
    if not tensor.isfinite().all():
        raise ValueError(
            f"{name} in {path} holds NaN or infinity and cannot be quantised; fetch the model again"
        )
    return tensor


# ---------------------------------------------------------------- write


def quantize_weight(weight: Tensor, plan: Plan, groupsize: int) -> dict[str, Tensor]:
    """The stored tensors of one layer, by their short names."""
    if plan.mode == "int4":
        names = ("weight", "scales", "zeros")
        return dict(zip(names, quantize_int4(weight, groupsize, plan.importance), strict=True))
    smoothing = torch.ones(weight.shape[1]) if plan.smoothing is None else plan.smoothing
    steps, scales = quantize_int8(weight.float() * smoothing)
    return {"weight": steps, "scales": scales, "smoothing": smoothing}


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


def quantized_tensors(
    checkpoint: Checkpoint, plans: dict[str, Plan], groupsize: int
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the quantised file, with a progress bar over the input's bytes."""
    layers = {source: layer for layer, source in layers_of(checkpoint).items()}
    total = sum(spec.nbytes for spec in checkpoint.specs.values())
    with tqdm(None, "quantising", total, unit="B", unit_scale=True, disable=None) as bar:
        for name, tensor in checkpoint.tensors():
            layer = layers.get(name)
            if layer is not None:
                check_finite(tensor, name, checkpoint.path)
                parts = quantize_weight(tensor, plans[layer], groupsize)
                yield from ((f"{layer}.{part}", value) for part, value in parts.items())
            if name != f"{layer}.weight":  # a tied embedding stays next to the lm_head made of it
                yield name, tensor
            bar.update(tensor.nbytes)


def quantize_checkpoint(
    path: Path, mode: str, groupsize: int = GROUPSIZE, out: Path | None = None
) -> Path:
    """Write the quantised form of a checkpoint and return its path.

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
    plans = plan_layers(checkpoint, mode)
    write_checkpoint(
        out,
        kind=checkpoint.kind,
        config=checkpoint.config,
        specs=quantized_specs(checkpoint, plans, groupsize),
        tensors=quantized_tensors(checkpoint, plans, groupsize),
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


@torch.inference_mode()
def predictions(checkpoint: Checkpoint, ids: list[int]) -> tuple[float, Tensor]:
    """Perplexity of the ids, and the greedy choice int64 after each of them."""
    windows, output = list(torch.tensor(ids).split(WINDOW)), load_output(checkpoint)
    loss, choices = torch.zeros((), dtype=torch.float64), []
    for window, states in zip(windows, run_blocks(checkpoint, windows, None), strict=True):
        logits = torch.cat([output(some) for some in states.split(64)])
        choices.append(logits.argmax(-1))
        loss += F.cross_entropy(logits[:-1], window[1:], reduction="sum")
    return float((loss / (len(ids) - len(windows))).exp()), torch.cat(choices)


def evaluate(path: Path, against: Path | None) -> Iterator[str]:
    """Lines: perplexity on the text that ships with the project, and greedy tokens kept."""
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
    ids = read_ids(load_tokenizer(original.path.parent), "evaluation.txt")
    before, expected = predictions(original, ids)
    yield f"{original.path}: perplexity {before:.3f} on {len(ids)} tokens"
    after, choices = predictions(checkpoint, ids)
    same = (choices == expected).double().mean()
    change = f"{after / before - 1:+.2%}"
    yield f"{path}: perplexity {after:.3f} ({change}), greedy tokens equal {same:.2%}"


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
    args = parser.parse_args()
    if args.evaluate is not None:
        if args.mode or args.groupsize or args.out:
            parser.error("--evaluate writes nothing: leave out --mode, --groupsize and --out")
        for line in evaluate(args.evaluate, args.against):
            print(line, flush=True)
        return 0
    if args.against is not None:
        parser.error("--against belongs to --evaluate: give both")
    if args.mode is None:
        parser.error(f"give --mode: {', '.join(LINEARS)}")
    if args.groupsize is not None and args.mode in LINEARS and args.mode != "int4":
        parser.error(f"--groupsize belongs to int4, and the mode is {args.mode}: leave it out")
    groupsize = GROUPSIZE if args.groupsize is None else args.groupsize
    out = quantize_checkpoint(args.checkpoint_path, args.mode, groupsize, args.out)
    announce(describe(args.checkpoint_path, out, args.mode))
    return 0
