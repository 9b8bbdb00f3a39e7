"""A Hugging Face directory, target or EAGLE head, into one self-describing safetensors file.

    python convert_hf_checkpoint.py --checkpoint_dir DIR [--out F] [--dtype keep|fp32|fp16|bf16]
    python convert_hf_checkpoint.py --export F --out DIR [--format eagle|speculators]

The architecture comes from config.json, the ends of a text from generation_config.json and the
tokenizer as well; a folder's name means nothing. Every tensor of the source is used or refused by
name. Targets are of the types llama, qwen2, qwen3 (dense), and mistral without a sliding window:
docs/models.md lists them. Heads are the business of talon/formats/head_import.py and
medusa_import.py, targets in 4 bits (GPTQ, AWQ, compressed-tensors) that of
talon/formats/four_bit.py. Leaves out other architectures, mixtures of experts, other
quantised sources and adapters."""

if __name__ == "__main__":  # what follows is imported, which takes seconds, and its main is run
    from talon.cli import start

    start("convert_hf_checkpoint")

import argparse
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from model import ModelConfig
from talon.checkpoint import DTYPE_NAMES, DTYPES, TensorSpec
from talon.cli import Parser, announce, note
from talon.formats.four_bit import PackedFolder
from talon.formats.head_export import EXPORT_FORMATS, export_head
from talon.formats.head_import import is_head, plan_head
from talon.formats.hf_config import NEUTRAL_VALUES, check_neutral, read_layer
from talon.formats.hf_folder import (
    INDEX_FILES,
    Conversion,
    HFFolder,
    Output,
    layer_outputs,
    new_directory,
)
from talon.formats.medusa_import import is_medusa, plan_medusa
from talon.settings import Settings, read_tokenizer_config
from talon.tokenizer import TOKENIZER_FILES, Tokenizer, find_vocabulary, load_tokenizer
from talon.writing import atomic_file, write_checkpoint

ARCHITECTURES = {f"{n}ForCausalLM": n.lower() for n in "Llama LLaMA Mistral Qwen2 Qwen3".split()}

# Keys of other architectures, with the values that mean plain LLaMA. pretraining_tp is not here: it
# splits the matrix multiplications of a training run and leaves weights and results as they are.
PLAIN_LLAMA = NEUTRAL_VALUES | {
    "compression_config": (), "num_local_experts": (), "num_experts": (), "alibi": (False,),
    "attn_logit_softcapping": (), "final_logit_softcapping": (), "clip_qkv": (),
    "logits_scaling": (1.0,), "embedding_multiplier": (1.0,), "residual_multiplier": (1.0,),
    "attention_multiplier": (), "use_qk_norm": (False,),
}  # fmt: skip

# Qwen states the size of a window that it does not use.
PLAIN_QWEN = {k: v for k, v in PLAIN_LLAMA.items() if k != "sliding_window"}
PLAIN_QWEN |= {"use_sliding_window": (False,)}


def convert(checkpoint_dir: Path | str, out: Path | str | None = None, dtype: str = "keep") -> str:
    """Convert a directory to one file (DIR/talon.safetensors); returns a line about it. A failure
    is a ValueError or OSError of one line and leaves nothing behind."""
    folder = HFFolder(checkpoint_dir)
    out = Path(out) if out else folder.path / "talon.safetensors"
    others = [folder.path / name for name in ("config.json", *INDEX_FILES, *TOKENIZER_FILES)]
    sources = [file for file in (*folder.files, *others) if file.exists()]
    if out.exists() and any(os.path.samefile(out, file) for file in sources):
        raise ValueError(f"--out {out} is a file of the source; choose another name")
    head = is_head(folder) or is_medusa(folder)
    if not head and "quantization_config" in folder.config:
        folder = PackedFolder(checkpoint_dir)
    conversion = plan(folder)
    if isinstance(folder, PackedFolder):
        folder.arrange(conversion)
    conversion.check()
    specs = conversion.specs(DTYPES.get(dtype))
    source = {
        "directory": Path(os.path.abspath(folder.path)).name,
        "files": [file.name for file in folder.files],
        "architecture": conversion.architecture,
        "format": getattr(conversion.config, "source_format", "hf"),
    }
    tokenizer = folder.path if conversion.kind == "target" else None
    with new_directory(out.parent), copied_tokenizer(tokenizer, out.parent):
        write_checkpoint(
            out, kind=conversion.kind, config=asdict(conversion.config), specs=specs,
            tensors=with_progress(conversion.tensors(specs), specs), source=source,
            quantization=conversion.quantization,
        )  # fmt: skip
    for line in folder.notes + conversion.notes:
        note(f"note: {line}")
    return summary(conversion, specs, out)


def plan(folder: HFFolder) -> Conversion:
    """Decide everything about a directory, of whichever kind its tensors are."""
    if is_medusa(folder):
        return plan_medusa(folder)
    return plan_head(folder) if is_head(folder) else plan_target(folder)


def summary(conversion: Conversion, specs: dict[str, TensorSpec], out: Path) -> str:
    """What was written: one line."""
    config = conversion.config
    size = sum(spec.nbytes for spec in specs.values())
    dtypes = sorted({DTYPE_NAMES[s.dtype] for s in specs.values() if s.dtype.is_floating_point})
    if conversion.kind == "target":
        what = f"target {conversion.architecture}, {config.n_layer} layers, dim {config.dim}"
        what += f", vocabulary {config.vocab_size}"
    else:
        what = f"{config.family} head ({config.source_format}), dim {config.dim}"
        what += f", draft vocabulary {config.draft_vocab_size} of {config.vocab_size}"
    return f"{what}, {size / 1e6:.1f} MB, {' and '.join(dtypes)}: {out}"


def with_progress(
    tensors: Iterator[tuple[str, Tensor]], specs: dict[str, TensorSpec]
) -> Iterator[tuple[str, Tensor]]:
    """The same stream, with a bar on standard error when that is a terminal."""
    total = sum(spec.nbytes for spec in specs.values())
    with tqdm(total=total, unit="B", unit_scale=True, disable=None, file=sys.stderr) as bar:
        for name, tensor in tensors:
            yield name, tensor
            bar.update(tensor.nbytes)


@contextmanager
def copied_tokenizer(source: Path | None, target: Path) -> Iterator[None]:
    """The tokenizer's files next to the output; those written go again when the body fails."""
    names = [name for name in TOKENIZER_FILES if source is not None and (source / name).exists()]
    with ExitStack() as undo:
        for name in names:
            content, copy = (source / name).read_bytes(), target / name
            if not copy.exists():
                with atomic_file(copy) as file:
                    file.write(content)
                undo.callback(copy.unlink)
            elif copy.read_bytes() != content:
                raise ValueError(f"{copy} is another model's; give --out a directory of its own")
        yield
        undo.pop_all()


def plan_target(folder: HFFolder) -> Conversion:
    """Decide everything about a LLaMA target: its config and the origin of every tensor."""
    config, notes, names = folder.config, [], folder.specs
    architecture = check_supported(config)
    if "model.embed_tokens.weight" not in names:
        raise ValueError(
            f"{folder.path} holds no LLaMA target (no model.embed_tokens.weight) and no EAGLE head "
            "(no fc.weight); give the directory of one of them"
        )
    layer, kind = read_layer(config, names, notes), ARCHITECTURES[architecture]
    layer["qk_norm"] = kind == "qwen3"
    layer["qkv_bias"] |= kind == "qwen2"
    vocab_size = config.integer("vocab_size")
    model = ModelConfig(
        **layer, vocab_size=vocab_size, n_layer=count_layers(folder),
        bos_id=config.integer("bos_token_id", None, least=0),
        tied=config.flag("tie_word_embeddings"), eos_ids=read_stop_ids(folder, vocab_size, notes),
    )  # fmt: skip
    conversion = Conversion(folder, "target", model, architecture, target_outputs(model), notes)
    if not model.tied and "lm_head.weight" not in names:
        raise ValueError(
            f"{folder.path} has no lm_head.weight and no tie_word_embeddings that is true: set it "
            "if the model is tied, or download the weights again"
        )
    # Tied weights win over an lm_head that is there as well, as in transformers.
    if model.tied and "lm_head.weight" in names:
        conversion.ignored.add("lm_head.weight")
        if not torch.equal(folder.read("lm_head.weight"), folder.read("model.embed_tokens.weight")):
            notes.append("tie_word_embeddings is true: ignored an lm_head.weight of its own")
        folder.close()
    return conversion


def check_supported(config: Settings) -> str:
    """The architecture's name; ValueError naming the first thing that we do not have."""
    names = [str(name) for name in config.items("architectures")]
    model_type = config.string("model_type", None)
    if not names and model_type is None:
        raise ValueError(f"{config.where} has neither architectures nor model_type; add model_type")
    fitting = [name for name, kind in ARCHITECTURES.items() if model_type in (None, kind)]
    if not fitting:
        config.refuse("model_type", ", ".join(sorted(set(ARCHITECTURES.values()))))
    if names and not set(names) & set(fitting):
        config.refuse("architectures", ", ".join(fitting))
    name = next(name for name in names or fitting if name in fitting)
    kind = ARCHITECTURES[name]
    check_neutral(config, PLAIN_QWEN if kind in ("qwen2", "qwen3") else PLAIN_LLAMA)
    if kind == "mistral" and "sliding_window" not in config.values:
        raise ValueError(f"{config.where}: no sliding_window means Mistral's 4096; only null fits")
    return name


def count_layers(folder: HFFolder) -> int:
    """num_hidden_layers, which must be the number of layers in the weights."""
    stated = folder.config.integer("num_hidden_layers")
    found = (re.match(r"model\.layers\.(\d+)\.", name) for name in folder.specs)
    layers = {int(match[1]) for match in found if match}
    if len(layers) != stated or max(layers, default=-1) != stated - 1:
        raise ValueError(
            f"{folder.path}: num_hidden_layers is {stated}, the weights hold {len(layers)} layers; "
            "weights and config.json do not belong together"
        )
    return stated


def target_outputs(c: ModelConfig) -> list[Output]:
    """Every tensor of our file in the order of the forward, with the parts it is made of."""
    embedding = {"model.embed_tokens.weight": (c.vocab_size, c.dim)}
    outputs = [Output("tok_embeddings.weight", embedding)]
    norms = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    for i in range(c.n_layer):
        here, there = f"layers.{i}", f"model.layers.{i}"
        outputs += layer_outputs(here, there, c, c.dim)
        for name, source in norms.items():
            outputs.append(Output(f"{here}.{name}.weight", {f"{there}.{source}.weight": (c.dim,)}))
    outputs.append(Output("norm.weight", {"model.norm.weight": (c.dim,)}))
    if not c.tied:
        outputs.append(Output("output.weight", {"lm_head.weight": (c.vocab_size, c.dim)}))
    return outputs


def read_stop_ids(folder: HFFolder, vocab_size: int, notes: list[str]) -> tuple[int, ...]:
    """Every id that ends a text, sorted: of generation_config.json, config.json and the tokenizer,
    for chat models state their end of turn in only one of the three."""
    found: set[int] = set()
    generation = Settings.read(folder.path / "generation_config.json", optional=True)
    for settings in (generation, folder.config):
        stated = settings.values.get("eos_token_id")
        for token in stated if isinstance(stated, list) else [stated] if stated is not None else []:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                settings.refuse("eos_token_id", f"ids from 0 to {vocab_size - 1}")
            found.add(token)
    tokenizer = read_tokenizer(folder.path, vocab_size, notes)
    config = tokenizer.settings if tokenizer else read_tokenizer_config(folder.path)
    if end := config.named.get("eos_token"):
        ids = {token.content: i for i, token in config.added.items()}
        token = tokenizer.token_id(end) if tokenizer else ids.get(end)
        if token is None:
            notes.append(f"the tokenizer's eos_token {end!r} has no id in its files: not used")
        else:
            found.add(token)
    own = tokenizer.file.eos_id if tokenizer else None
    if own is not None and own not in found:
        notes.append(f"tokenizer.model ends texts with id {own}, as no other file says: used")
        found.add(own)
    return tuple(sorted(found))


def read_tokenizer(path: Path, vocab_size: int, notes: list[str]) -> Tokenizer | None:
    """The tokenizer in a directory, if any; refuses one that outgrows the embedding."""
    if find_vocabulary(path) is None:
        notes.append(f"{path} has no tokenizer.json or tokenizer.model: only --prompt_ids works")
        return None
    tokenizer = load_tokenizer(path)
    if (top := tokenizer.vocab_size - 1) >= vocab_size:
        token = tokenizer.file.piece(top).decode(errors="replace")
        raise ValueError(
            f"{path}: the tokenizer gives {token!r} the id {top}, but the embedding has only "
            f"{vocab_size} rows; tokenizer and weights do not belong together"
        )
    return tokenizer


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        description="Convert a Hugging Face directory (target, EAGLE or Medusa head) to one file, "
        "or export an EAGLE head's file back to a directory.",
        epilog="Exported EAGLE-1 heads have fc.bias only if the head has one. vLLM wants none; "
        "SGLang wants one (zeros do), and architectures [LlamaForCausalLMEagle].",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    add = source.add_argument
    add("--checkpoint_dir", metavar="DIR", help="directory with config.json and weights")
    add("--export", metavar="F", help="a head file of ours, to write as a directory")
    add = parser.add_argument
    add("--out", help="file to write (DIR/talon.safetensors); with --export a directory")
    add("--dtype", choices=("keep", *DTYPES), help="of the floating-point tensors (keep)")
    add("--format", choices=EXPORT_FORMATS, help="of the exported directory (eagle)")
    args = parser.parse_args(argv)
    if args.export is not None and not args.out:
        parser.error("--export needs --out DIR")
    if args.export is not None and args.dtype:
        parser.error("--dtype belongs to --checkpoint_dir; an export keeps the head's dtype")
    if args.checkpoint_dir is not None and args.format:
        parser.error("--format belongs to --export; the format of a source is recognised")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.export is not None:
        announce(export_head(args.export, args.out, args.format or "eagle"))
    else:
        announce(convert(args.checkpoint_dir, args.out, args.dtype or "keep"))
    return 0
