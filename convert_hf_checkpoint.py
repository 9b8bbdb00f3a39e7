"""A Hugging Face directory, target or EAGLE head, into one self-describing safetensors file.

    python convert_hf_checkpoint.py --checkpoint_dir DIR [--out F] [--dtype keep|fp32|fp16|bf16]
    python convert_hf_checkpoint.py --export F --out DIR [--format eagle|speculators]

The architecture comes from config.json alone, never from a folder's name. Every tensor of the
source is used or refused by name. Targets are plain LLaMA: LLaMA 1 to 3.3, Vicuna, CodeLlama,
TinyLlama, SmolLM2, DeepSeek-R1-Distill-Llama, and Mistral without a sliding window. Leaves out
other architectures, quantised sources and adapters. Heads are the business of head_formats.py.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from talon.cli import guard_imports

    guard_imports()

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import sentencepiece
import torch
from torch import Tensor
from tqdm import tqdm

from model import ModelConfig
from talon.checkpoint import (
    DTYPE_NAMES,
    TensorSpec,
    atomic_file,
    check_weight_file,
    write_checkpoint,
)
from talon.formats.head_export import EXPORT_FORMATS, export_head
from talon.formats.head_import import is_head, plan_head
from talon.formats.hf_config import (
    Settings,
    listed,
    read_biases,
    read_head_dim,
    read_json,
    read_max_length,
    read_rope,
)
from talon.formats.hf_folder import (
    DTYPES,
    INDEX_FILES,
    Conversion,
    HFFolder,
    Output,
    linear_outputs,
    new_directory,
)

ARCHITECTURES = ("LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM")

MODEL_TYPES = ("llama", "mistral")

# Keys that change the forward, with the values at which they do not. pretraining_tp is not here: it
# splits the products of a training run and leaves weights and results as they are.
NEUTRAL_VALUES: dict[str, tuple] = {
    "hidden_act": ("silu",),
    "sliding_window": (),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (),
    "compression_config": (),
    "num_local_experts": (),
    "num_experts": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "attention_multiplier": (),
    "clip_qkv": (),
    "use_qk_norm": (False,),
    "alibi": (False,),
}

TOKENIZER_FILES = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def convert(checkpoint_dir: Path | str, out: Path | str | None = None, dtype: str = "keep") -> str:
    """Convert a directory to one file (DIR/talon.safetensors); returns a line about it.

    Raises ValueError or FileNotFoundError, one line each, and then leaves nothing behind.
    """
    folder = HFFolder(checkpoint_dir)
    out = Path(out) if out else folder.path / "talon.safetensors"
    others = [folder.path / name for name in ("config.json", *INDEX_FILES, *TOKENIZER_FILES)]
    sources = [file for file in (*folder.files, *others) if file.exists()]
    if out.exists() and any(os.path.samefile(out, file) for file in sources):
        raise ValueError(f"--out {out} is a file of the source; choose another name")
    conversion = plan_head(folder) if is_head(folder) else plan_target(folder)
    conversion.check()
    specs = conversion.specs(DTYPES.get(dtype))
    source = {
        "directory": folder.name,
        "files": [file.name for file in folder.files],
        "architecture": conversion.architecture,
        "format": conversion.source_format,
    }
    tokenizer = folder.path if conversion.kind == "target" else None
    with new_directory(out.parent), copied_tokenizer(tokenizer, out.parent):
        write_checkpoint(
            out,
            kind=conversion.kind,
            config=asdict(conversion.config),
            specs=specs,
            tensors=with_progress(conversion.tensors(specs), specs),
            source=source,
        )
    for note in folder.notes + conversion.notes:
        print(f"note: {note}", file=sys.stderr)
    return summary(conversion, specs, out)


def summary(conversion: Conversion, specs: dict[str, TensorSpec], out: Path) -> str:
    """What was written: one line."""
    config = conversion.config
    size = sum(spec.nbytes for spec in specs.values())
    dtypes = sorted({DTYPE_NAMES[s.dtype] for s in specs.values() if s.dtype.is_floating_point})
    if conversion.kind == "target":
        what = f"target {conversion.architecture}, {config.n_layer} layers, dim {config.dim}"
        what += f", vocabulary {config.vocab_size}"
    else:
        what = f"{config.family} head ({conversion.source_format}), dim {config.dim}"
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
            bar.update(specs[name].nbytes)


@contextmanager
def copied_tokenizer(source: Path | None, target: Path) -> Iterator[None]:
    """The tokenizer's files beside the output; they go again when the body fails."""
    copied: list[Path] = []
    try:
        if source is not None and not os.path.samefile(source, target):
            for name in TOKENIZER_FILES:
                if (source / name).exists() and _copy_tokenizer_file(source / name, target / name):
                    copied.append(target / name)
        yield
    except BaseException:
        for path in copied:
            path.unlink(missing_ok=True)
        raise


def _copy_tokenizer_file(source: Path, target: Path) -> bool:
    """Whether a file had to be written; a different one that is there belongs to another model."""
    content = source.read_bytes()
    if target.exists():
        if target.read_bytes() == content:
            return False
        raise ValueError(f"{target} is another model's; give --out a directory of its own")
    with atomic_file(target) as file:
        file.write(content)
    return True


def plan_target(folder: HFFolder) -> Conversion:
    """Decide everything about a LLaMA target: its config and the origin of every tensor."""
    config, notes = folder.config, []
    architecture = check_supported(config)
    if "model.embed_tokens.weight" not in folder.specs:
        raise ValueError(
            f"{folder.path} holds no LLaMA target (no model.embed_tokens.weight) and no EAGLE head "
            "(no fc.weight); give the directory of one of them"
        )
    heads = config.integer("num_attention_heads")
    dim, kv_heads = config.integer("hidden_size"), config.integer("num_key_value_heads", heads)
    theta, scaling, _ = read_rope(config)
    vocab_size = config.integer("vocab_size")
    model = ModelConfig(
        vocab_size=vocab_size,
        dim=dim,
        n_layer=count_layers(folder),
        n_head=heads,
        n_kv_head=kv_heads,
        head_dim=read_head_dim(config, dim, heads, kv_heads),
        intermediate_size=config.integer("intermediate_size"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        max_seq_length=read_max_length(config),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=config.flag("tie_word_embeddings"),
        **read_biases(folder.specs, config, notes),
        bos_id=config.integer("bos_token_id", None, least=0),
        eos_ids=read_stop_ids(folder, vocab_size, notes),
    )
    conversion = Conversion(folder, "target", model, architecture, target_outputs(model))
    conversion.notes = notes
    check_output_matrix(conversion)
    return conversion


def check_supported(config: Settings) -> str:
    """The architecture's name; ValueError naming the first thing that plain LLaMA does not have."""
    names = [str(name) for name in config.items("architectures")]
    kind = config.text("model_type", None)
    if not names and kind is None:
        raise ValueError(f"{config.where} has neither architectures nor model_type; add model_type")
    if kind is not None and kind not in MODEL_TYPES:
        config.refuse("model_type", ", ".join(MODEL_TYPES))
    if names and not set(names) & set(ARCHITECTURES):
        config.refuse("architectures", ", ".join(ARCHITECTURES))
    for key, neutral in NEUTRAL_VALUES.items():
        if key in config and config.values[key] not in neutral:
            config.refuse(key, ", ".join(map(str, neutral)) or "null or absent")
    mistral = kind == "mistral" or "MistralForCausalLM" in names
    if mistral and "sliding_window" not in config.values:
        raise ValueError(
            f"{config.where}: sliding_window is missing, which means 4096 for Mistral; "
            "supported: null"
        )
    if any(layer != "full_attention" for layer in config.items("layer_types")):
        config.refuse("layer_types", "full_attention in every layer")
    return names[0] if names else ("MistralForCausalLM" if mistral else "LlamaForCausalLM")


def count_layers(folder: HFFolder) -> int:
    """num_hidden_layers, which must be the number of layers in the weights."""
    stated = folder.config.integer("num_hidden_layers")
    layers = {
        int(m[1]) for name in folder.specs if (m := re.match(r"model\.layers\.(\d+)\.", name))
    }
    if len(layers) != stated or max(layers, default=-1) != stated - 1:
        raise ValueError(
            f"{folder.path}: num_hidden_layers is {stated}, the weights hold {len(layers)} layers; "
            "weights and config.json do not belong together"
        )
    return stated


def target_outputs(c: ModelConfig) -> list[Output]:
    """Every tensor of our file in the order of the forward, with the parts it is made of."""
    q, kv = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    outputs = [
        Output("tok_embeddings.weight", (("model.embed_tokens.weight", (c.vocab_size, c.dim)),))
    ]
    for i in range(c.n_layer):
        here, there = f"layers.{i}", f"model.layers.{i}"
        linears = {
            "attention.wqkv": ({"q_proj": q, "k_proj": kv, "v_proj": kv}, c.dim, c.qkv_bias),
            "attention.wo": ({"o_proj": c.dim}, q, c.o_bias),
            "feed_forward.w13": (
                {"gate_proj": c.intermediate_size, "up_proj": c.intermediate_size},
                c.dim,
                c.mlp_bias,
            ),
            "feed_forward.w2": ({"down_proj": c.dim}, c.intermediate_size, c.mlp_bias),
        }
        for name, (parts, width, bias) in linears.items():
            block = f"{there}.{'self_attn' if name.startswith('attention') else 'mlp'}"
            outputs += linear_outputs(f"{here}.{name}", block, parts, width, bias)
        norms = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
        for name, source in norms.items():
            outputs.append(
                Output(f"{here}.{name}.weight", ((f"{there}.{source}.weight", (c.dim,)),))
            )
    outputs.append(Output("norm.weight", (("model.norm.weight", (c.dim,)),)))
    if not c.tied:
        outputs.append(Output("output.weight", (("lm_head.weight", (c.vocab_size, c.dim)),)))
    return outputs


def check_output_matrix(conversion: Conversion) -> None:
    """Tied weights win over an lm_head that is there as well, as in transformers."""
    folder, tied = conversion.folder, conversion.config.tied
    if not tied and "lm_head.weight" not in folder.specs:
        raise ValueError(
            f"{folder.path} has no lm_head.weight, and tie_word_embeddings is false or missing; "
            "set it to true if the model is tied, or download the weights again"
        )
    if tied and "lm_head.weight" in folder.specs:
        conversion.ignored.add("lm_head.weight")
        if not torch.equal(folder.read("lm_head.weight"), folder.read("model.embed_tokens.weight")):
            conversion.notes.append(
                "tie_word_embeddings is true: ignored lm_head.weight, which is not the embedding"
            )
        folder.close()


def read_stop_ids(folder: HFFolder, vocab_size: int, notes: list[str]) -> tuple[int, ...]:
    """Every id that ends a text: of generation_config.json, config.json and the tokenizer, sorted.

    Chat models state their end of turn in only one of the three, and 0 is an id like any other.
    """
    found: set[int] = set()
    path = folder.path / "generation_config.json"
    generation = Settings(read_json(path), str(path)) if path.exists() else None
    for settings in (generation, folder.config):
        stated = settings.values.get("eos_token_id") if settings else None
        for token in stated if isinstance(stated, list) else [stated] if stated is not None else []:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                settings.refuse("eos_token_id", f"ids from 0 to {vocab_size - 1}")
            found.add(token)
    end, ids = read_tokenizer(folder.path, vocab_size, notes)
    if end is not None and end in ids:
        found.add(ids[end])
    elif end is not None:
        notes.append(
            f"the tokenizer's eos_token {end!r} has no id in the tokenizer files: not used"
        )
    return tuple(sorted(found))


def read_tokenizer(
    path: Path, vocab_size: int, notes: list[str]
) -> tuple[str | None, dict[str, int]]:
    """(eos_token, id of each token); refuses a tokenizer that outgrows the embedding."""
    ids: dict[str, int] = {}
    for name, read in TOKENIZER_READERS.items():
        if os.path.lexists(path / name):
            ids |= _read_ids(path / name, read)
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        notes.append(f"{path} has no tokenizer.json or tokenizer.model: only --prompt_ids works")
    if ids and max(ids.values()) >= vocab_size:
        token = max(ids, key=ids.__getitem__)
        raise ValueError(
            f"{path}: the tokenizer gives {token!r} the id {ids[token]}, but the embedding "
            f"has only {vocab_size} rows; tokenizer and weights do not belong together"
        )
    config = path / "tokenizer_config.json"
    eos = read_json(config).get("eos_token") if config.exists() else None
    eos = eos.get("content") if isinstance(eos, dict) else eos
    return (eos if isinstance(eos, str) else None), ids


def _read_ids(path: Path, read: Callable[[Path], dict[str, int]]) -> dict[str, int]:
    check_weight_file(path)
    try:
        ids = read(path)
        wrong = [token for token, index in ids.items() if not isinstance(index, int)]
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); download it again") from None
    if wrong:
        raise ValueError(f"{path} is damaged (no id for {listed(wrong)}); download it again")
    return ids


def _read_fast_tokenizer(path: Path) -> dict[str, int]:
    content = read_json(path)
    vocab = content["model"]["vocab"]  # an object, or [piece, score] pairs of a unigram model
    ids = dict(vocab) if isinstance(vocab, dict) else {pair[0]: i for i, pair in enumerate(vocab)}
    return ids | {added["content"]: added["id"] for added in content.get("added_tokens", ())}


def _read_sentencepiece(path: Path) -> dict[str, int]:
    """Pieces of a sentencepiece model, or ranks of Meta's tiktoken file of the same name."""
    content = path.read_bytes()
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", content):
        ranks = re.findall(rb"^([A-Za-z0-9+/]+=*) (\d+)", content, re.MULTILINE)
        return {token.decode(): int(rank) for token, rank in ranks}
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return {processor.id_to_piece(i): i for i in range(processor.get_piece_size())}


def _read_added_tokens(path: Path) -> dict[str, int]:
    added = read_json(path).get("added_tokens_decoder") or {}
    if not all(index.isdecimal() for index in added):
        raise TypeError("added_tokens_decoder has a key that is no id")
    return {token["content"]: int(index) for index, token in added.items()}


TOKENIZER_READERS = {
    "tokenizer.model": _read_sentencepiece,
    "tokenizer.json": _read_fast_tokenizer,
    "tokenizer_config.json": _read_added_tokens,
}


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line, like every other error of ours."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see --help\n")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        description="Convert a Hugging Face directory (LLaMA target or EAGLE head) to one file, "
        "or export a head file back to a directory.",
        epilog="Exported EAGLE-1 heads have fc.bias only if the head has one. vLLM wants none; "
        "SGLang wants one (zeros do), and architectures [LlamaForCausalLMEagle].",
        allow_abbrev=False,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--checkpoint_dir", metavar="DIR", help="directory with config.json and weights"
    )
    source.add_argument(
        "--export", metavar="F", help="a head file of ours, to write as a directory"
    )
    parser.add_argument(
        "--out", help="file to write (DIR/talon.safetensors); with --export a directory"
    )
    parser.add_argument(
        "--dtype", choices=("keep", *DTYPES), help="of the floating-point tensors (keep)"
    )
    parser.add_argument(
        "--format", choices=EXPORT_FORMATS, help="of the exported directory (eagle)"
    )
    args = parser.parse_args(argv)
    if args.export is not None and not args.out:
        parser.error("--export needs --out DIR")
    if args.export is not None and args.dtype:
        parser.error("--dtype belongs to --checkpoint_dir; an export keeps the head's dtype")
    if args.checkpoint_dir and args.format:
        parser.error("--format belongs to --export; the format of a source is recognised")
    return args


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, 2 for bad input (one line on standard error), 130 when interrupted."""
    args = parse_args(argv)
    try:
        if args.export is not None:
            print(export_head(args.export, args.out, args.format or "eagle"))
        else:
            print(convert(args.checkpoint_dir, args.out, args.dtype or "keep"))
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
