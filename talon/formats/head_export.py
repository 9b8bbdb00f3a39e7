"""A head file back into a directory that other engines load.

`eagle` is flat and is read by SafeAILab, SpecForge, SGLang, vLLM and llama.cpp; `speculators` is
nested, states every norm variant and is read by vLLM. What is written is read back and compared.
Leaves out: variants that the layout cannot express, which are refused by name.

    python convert_hf_checkpoint.py --export F --out DIR [--format eagle|speculators]"""

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from eagle_draft import DraftConfig
from talon.checkpoint import Checkpoint, TensorSpec, read_checkpoint
from talon.formats.head_import import LAYER_IDS, NORM_FLAGS, head_outputs, plan_head
from talon.formats.hf_config import SPEEDS
from talon.formats.hf_folder import HFFolder, Output, check_finite, new_directory
from talon.settings import listed
from talon.writing import replacing, write_safetensors

EXPORT_FORMATS = ("eagle", "speculators")


def export_head(path: Path | str, out: Path | str, layout: str = "eagle") -> str:
    """Write a head file back as a directory and return one line about it. The directory is read
    back through the importer and compared before it appears under its name."""
    checkpoint = read_checkpoint(path)
    config = check_expressible(checkpoint, layout)
    out = Path(os.path.realpath(out))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty directory; give another --out")
    dtype = str(checkpoint.specs["fc.weight"].dtype).removeprefix("torch.")
    content = (flat_config if layout == "eagle" else nested_config)(config, dtype)
    outputs = published_outputs(checkpoint, config, layout)
    specs = published_specs(checkpoint, outputs)
    with new_directory(out.parent), replacing(out, directory=True) as temporary:
        (temporary / "config.json").write_text(json.dumps(content, indent=2) + "\n")
        tensors = published_tensors(checkpoint, outputs)
        write_safetensors(temporary / "model.safetensors", {"format": "pt"}, specs, tensors)
        verify_export(checkpoint, temporary, [output.name for output in outputs])
    size = sum(spec.nbytes for spec in specs.values()) / 1e6
    what = f"{config.family} head, {layout} layout, {size:.1f} MB, read back and equal"
    if config.family == "eagle1" and config.draft_vocab_size < config.vocab_size:
        what += f", for the whole lm_head (drafting over {config.draft_vocab_size} ids is ours)"
    if layout == "eagle" and config.feature_layers:
        what += f", features {config.feature_layers} left out as the default"
    return f"{what}: {out}"


def check_expressible(checkpoint: Checkpoint, layout: str) -> DraftConfig:
    """The head's config; ValueError naming what the layout, or its readers, cannot express."""
    medusa = checkpoint.config.get("family") == "medusa"
    if checkpoint.kind != "draft" or checkpoint.quantization or medusa:
        what = "Medusa heads" if medusa else "a quantised head"
        what = "a target" if checkpoint.kind != "draft" else what
        raise ValueError(f"{checkpoint.path} is {what}; --export takes an unquantised EAGLE head")
    c = DraftConfig.from_dict(checkpoint.config)
    if c.family == "eagle1":
        lacks = {flag: getattr(c, flag) for flag in ("qk_norm", "o_bias", "mlp_bias")}
        lacks |= {"its own lm_head": c.own_output, "an EAGLE-1 head": layout == "speculators"}
    else:
        lacks = {"a borrowed lm_head": not c.own_output, "fc_bias": c.fc_bias}
        if layout == "eagle":
            flags = (*NORM_FLAGS, "qk_norm", "qkv_bias", "o_bias", "mlp_bias")
            lacks |= {flag: getattr(c, flag) for flag in flags}
            lacks[f"feature_layers {c.feature_layers}"] = stated_layers(c) is not None
        else:
            lacks["a bias on only some of q, k, v, o"] = c.qkv_bias != c.o_bias
    found = [name for name, has in lacks.items() if has]
    if found:
        other = "speculators" if layout == "eagle" else "eagle"
        other = f"; try --format {other}" if (other == "eagle") == (c.family == "eagle1") else ""
        raise ValueError(f"{checkpoint.path}: {layout} cannot express {', '.join(found)}{other}")
    return c


def stated_layers(c: DraftConfig) -> tuple[int, ...] | None:
    """feature_layers unless they are the default (2, n/2, n-3) of a target of some depth n."""
    if c.feature_layers is None or len(c.feature_layers) != 3:
        return c.feature_layers
    depth = c.feature_layers[2] + 3
    return None if c.feature_layers == (2, depth // 2, depth - 3) else c.feature_layers


def layer_config(c: DraftConfig, dtype: str) -> dict:
    """The keys of a one-layer LLaMA config.json that both layouts share."""
    scaling, s = None, c.rope_scaling
    if s is not None:
        scaling = {"rope_type": s.kind, "factor": s.factor}
        if s.kind in SPEEDS:
            low, high = SPEEDS[s.kind]
            scaling |= {low: s.low_freq_factor, high: s.high_freq_factor}
            scaling["original_max_position_embeddings"] = s.original_max_position
        if s.kind == "yarn":
            scaling |= {"attention_factor": s.attention_factor, "truncate": s.truncate}
    return {
        "model_type": "qwen3" if c.qk_norm else "llama", "num_hidden_layers": 1,
        "hidden_size": c.dim, "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.n_head, "num_key_value_heads": c.n_kv_head,
        "head_dim": c.head_dim, "hidden_act": "silu", "rms_norm_eps": c.norm_eps,
        "vocab_size": c.vocab_size, "max_position_embeddings": c.max_seq_length,
        "rope_theta": c.rope_theta, "rope_scaling": scaling,
        "attention_bias": c.family == "eagle3" and c.qkv_bias, "mlp_bias": c.mlp_bias,
        "tie_word_embeddings": False, "torch_dtype": dtype,
    }  # fmt: skip


def flat_config(c: DraftConfig, dtype: str) -> dict:
    """config.json as SafeAILab, SpecForge, SGLang, vLLM and llama.cpp all read it."""
    content = layer_config(c, dtype)
    if c.family == "eagle1":
        if c.qkv_bias:
            content |= {"qkv_bias": True, "attention_bias": True}
        return {"architectures": ["LlamaForCausalLM"], **content, "bias": c.fc_bias}
    content = {"architectures": ["LlamaForCausalLMEagle3"], **content}
    content["draft_vocab_size"] = c.draft_vocab_size
    return content | ({"target_hidden_size": c.target_dim} if c.target_dim != c.dim else {})


def nested_config(c: DraftConfig, dtype: str) -> dict:
    """config.json as the speculators library and vLLM read it, every norm variant stated."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_dim if c.target_dim != c.dim else None,
        **{flag: getattr(c, flag) for flag in NORM_FLAGS},
        **({LAYER_IDS: list(c.feature_layers)} if c.feature_layers else {}),
        "transformer_layer_config": layer_config(c, dtype),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": None, "architectures": ["LlamaForCausalLM"]},
        },
    }


def published_outputs(checkpoint: Checkpoint, c: DraftConfig, layout: str) -> list[Output]:
    """Our tensors that the layout has, and the published ones that each falls into. An EAGLE-1 head
    guesses with the target's lm_head: which rows of it are worth computing (d2t) stays ours."""
    has_map = "d2t" in checkpoint.specs and c.family == "eagle3"
    outputs = head_outputs(c, checkpoint.specs["fc.weight"].shape[1], has_map)
    if layout == "speculators" or c.family == "eagle1":
        return outputs
    return [
        Output(o.name, {n.replace("layers.0.", "midlayer."): shape for n, shape in o.parts.items()})
        for o in outputs
    ]


def published_specs(checkpoint: Checkpoint, outputs: list[Output]) -> dict[str, TensorSpec]:
    specs = {}
    for output in outputs:
        dtype = checkpoint.specs[output.name].dtype
        specs |= {name: TensorSpec(dtype, shape) for name, shape in output.parts.items()}
    if "d2t" in specs:
        specs["t2d"] = TensorSpec(torch.bool, (checkpoint.config["vocab_size"],))
    return specs


def published_tensors(
    checkpoint: Checkpoint, outputs: list[Output]
) -> Iterator[tuple[str, Tensor]]:
    """The published tensors: fused ones taken apart, t2d rebuilt from d2t."""
    for output in outputs:
        tensor = checkpoint.tensor(output.name)
        check_finite(tensor, f"{checkpoint.path}: {output.name}")
        sizes = [shape[0] for shape in output.parts.values()]
        yield from zip(output.parts, tensor.split(sizes), strict=True)
        if output.name == "d2t":
            mask = torch.zeros(checkpoint.config["vocab_size"], dtype=torch.bool)
            mask[torch.arange(len(tensor)) + tensor] = True
            yield "t2d", mask


def verify_export(checkpoint: Checkpoint, directory: Path, names: list[str]) -> None:
    """Read a directory back through the importer; compare the configuration and named tensors."""
    try:
        conversion = plan_head(HFFolder(directory))
        specs = conversion.specs(None)
    except ValueError as error:
        raise ValueError(f"nothing was written: the export does not read back: {error}") from None
    wanted, found = DraftConfig.from_dict(checkpoint.config), conversion.config
    if wanted.family == "eagle1":
        wanted = replace(wanted, draft_vocab_size=wanted.vocab_size)
    # Where a value was found, and whether a default was spelled out, is all that may change.
    free = {"rope_source": "", "source_format": ""}
    wanted = asdict(wanted) | free | {"feature_layers": stated_layers(wanted)}
    found = asdict(found) | free | {"feature_layers": stated_layers(found)}
    different = [key for key in wanted if wanted[key] != found[key]]
    if specs != {name: checkpoint.specs[name] for name in names}:
        different.append("tensors")
    else:
        for name, pieces in itertools.groupby(conversion.tensors(specs), lambda pair: pair[0]):
            if not torch.equal(torch.cat([rows for _, rows in pieces]), checkpoint.tensor(name)):
                different.append(name)
    if different:
        raise ValueError(f"nothing was written: {listed(different)} would read back differently")
