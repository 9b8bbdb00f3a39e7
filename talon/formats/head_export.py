"""A head file back into a directory that other engines load.

`eagle` is flat and is read by SafeAILab, SpecForge, SGLang, vLLM and llama.cpp; `speculators` is
nested, states every norm variant and is read by vLLM. A head with a variant that the layout cannot
express is refused by name. Command: convert_hf_checkpoint.py --export F --out DIR [--format ...].
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from eagle_draft import DraftConfig, DraftHead
from model import Place, causal_mask, rope_table
from talon.checkpoint import Checkpoint, TensorSpec, read_checkpoint, write_safetensors
from talon.formats.head_import import LAYER_IDS, NORM_FLAGS, plan_head
from talon.formats.hf_config import listed
from talon.formats.hf_folder import HFFolder, new_directory

EXPORT_FORMATS = ("eagle", "speculators")


def export_head(path: Path | str, out: Path | str, layout: str = "eagle") -> str:
    """Write a head file back as a directory and return one line about it.

    The directory is read back through the importer and compared before it appears under its name.
    Raises ValueError for a head that the layout cannot express, and then leaves nothing behind.
    """
    checkpoint = read_checkpoint(path)
    config = check_expressible(checkpoint, layout)
    out = Path(os.path.abspath(out))
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty directory; give another --out")
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    with new_directory(out.parent):
        try:
            temporary.mkdir()
            content = flat_config(checkpoint) if layout == "eagle" else nested_config(checkpoint)
            (temporary / "config.json").write_text(json.dumps(content, indent=2) + "\n")
            specs = export_specs(checkpoint, config, layout)
            tensors = export_tensors(checkpoint, config, layout)
            write_safetensors(temporary / "model.safetensors", {"format": "pt"}, specs, tensors)
            verify_export(checkpoint, temporary)
            os.replace(temporary, out)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    size = sum(spec.nbytes for spec in specs.values()) / 1e6
    what = f"{config.family} head, {layout} layout, {size:.1f} MB, read back and equal"
    if config.family == "eagle1" and config.draft_vocab_size < config.vocab_size:
        what += f", for the whole lm_head (drafting over {config.draft_vocab_size} ids is ours)"
    if layout == "eagle" and config.feature_layers:
        what += f", features {config.feature_layers} left out as the default"
    return f"{what}: {out}"


def check_expressible(checkpoint: Checkpoint, layout: str) -> DraftConfig:
    """The head's config; ValueError naming what the layout, or its readers, cannot express."""
    if checkpoint.kind != "draft" or checkpoint.quantization:
        what = "a target" if checkpoint.kind != "draft" else "a quantised head"
        raise ValueError(f"{checkpoint.path} is {what}; --export takes an unquantised head")
    c = DraftConfig.from_dict(checkpoint.config)
    if c.family == "eagle1":
        lacks = {"its own lm_head": c.own_output}
        lacks |= {"o_bias": c.o_bias, "mlp_bias": c.mlp_bias}
        lacks["an EAGLE-1 head"] = layout == "speculators"
    else:
        lacks = {"a borrowed lm_head": not c.own_output, "fc_bias": c.fc_bias}
        if layout == "eagle":
            lacks |= {
                name: getattr(c, name) for name in (*NORM_FLAGS, "qkv_bias", "o_bias", "mlp_bias")
            }
            lacks[f"feature_layers {c.feature_layers}"] = stated_layers(c) is not None
        else:
            lacks["a bias on only some of q, k, v, o"] = c.qkv_bias != c.o_bias
    found = [name for name, has in lacks.items() if has]
    if found:
        other = "speculators" if layout == "eagle" else "eagle"
        other = f"; try --format {other}" if (other == "eagle") == (c.family == "eagle1") else ""
        raise ValueError(
            f"{checkpoint.path}: the {layout} layout cannot express {', '.join(found)}{other}"
        )
    return c


def stated_layers(c: DraftConfig) -> tuple[int, ...] | None:
    """feature_layers unless they are the default (2, n/2, n-3) of a target of some depth n."""
    if c.feature_layers is None or len(c.feature_layers) != 3:
        return c.feature_layers
    depth = c.feature_layers[2] + 3
    return None if c.feature_layers == (2, depth // 2, depth - 3) else c.feature_layers


def layer_config(checkpoint: Checkpoint) -> dict:
    """The keys of a one-layer LLaMA config.json that both layouts share."""
    c = DraftConfig.from_dict(checkpoint.config)
    scaling = None
    if c.rope_scaling is not None:
        scaling = {"rope_type": c.rope_scaling.kind, "factor": c.rope_scaling.factor}
        if c.rope_scaling.kind == "llama3":
            scaling["low_freq_factor"] = c.rope_scaling.low_freq_factor
            scaling["high_freq_factor"] = c.rope_scaling.high_freq_factor
            scaling["original_max_position_embeddings"] = c.rope_scaling.original_max_position
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": c.dim,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.n_head,
        "num_key_value_heads": c.n_kv_head,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_seq_length,
        "rope_theta": c.rope_theta,
        "rope_scaling": scaling,
        "attention_bias": c.family == "eagle3" and c.qkv_bias,
        "mlp_bias": c.mlp_bias,
        "tie_word_embeddings": False,
        "torch_dtype": str(checkpoint.specs["fc.weight"].dtype).removeprefix("torch."),
    }


def flat_config(checkpoint: Checkpoint) -> dict:
    """config.json as SafeAILab, SpecForge, SGLang, vLLM and llama.cpp all read it."""
    c = DraftConfig.from_dict(checkpoint.config)
    content = layer_config(checkpoint)
    if c.family == "eagle1":
        if c.qkv_bias:
            content |= {"qkv_bias": True, "attention_bias": True}
        return {"architectures": ["LlamaForCausalLM"], **content, "bias": c.fc_bias}
    content = {"architectures": ["LlamaForCausalLMEagle3"], **content}
    content["draft_vocab_size"] = c.draft_vocab_size
    return content | ({"target_hidden_size": c.target_dim} if c.target_dim != c.dim else {})


def nested_config(checkpoint: Checkpoint) -> dict:
    """config.json as the speculators library and vLLM read it, every norm variant stated."""
    c = DraftConfig.from_dict(checkpoint.config)
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_dim if c.target_dim != c.dim else None,
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        **({LAYER_IDS: list(c.feature_layers)} if c.feature_layers else {}),
        "transformer_layer_config": layer_config(checkpoint),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": None, "architectures": ["LlamaForCausalLM"]},
        },
    }


def exported_parts(c: DraftConfig, layout: str, name: str) -> dict[str, int | None]:
    """{published name: rows, None for all} of one tensor of ours, in the order of its rows."""
    block = "midlayer" if layout == "eagle" and c.family == "eagle3" else "layers.0"
    q, kv, inner = c.n_head * c.head_dim, c.n_kv_head * c.head_dim, c.intermediate_size
    table: dict[str, dict[str, int | None]] = {
        "layer.attention.wqkv": {
            f"{block}.self_attn.q_proj": q,
            f"{block}.self_attn.k_proj": kv,
            f"{block}.self_attn.v_proj": kv,
        },
        "layer.attention.wo": {f"{block}.self_attn.o_proj": None},
        "layer.feed_forward.w13": {f"{block}.mlp.gate_proj": inner, f"{block}.mlp.up_proj": inner},
        "layer.feed_forward.w2": {f"{block}.mlp.down_proj": None},
        "layer.ffn_norm": {f"{block}.post_attention_layernorm": None},
        "layer.embed_norm": {f"{block}.input_layernorm": None},
        "layer.hidden_norm": {f"{block}.hidden_norm": None},
        "output": {"lm_head": None},
        "tok_embeddings": {"embed_tokens": None},
    }
    base, dot, ending = name.rpartition(".")
    return {part + dot + ending: rows for part, rows in table.get(base, {base: None}).items()}


def exported(checkpoint: Checkpoint) -> dict[str, TensorSpec]:
    """Our tensors that the layouts have. An EAGLE-1 head guesses with the target's lm_head: which
    rows of it are worth computing is no part of the published form; the layer is the same."""
    eagle1 = checkpoint.config["family"] == "eagle1"
    return {n: spec for n, spec in checkpoint.specs.items() if not (eagle1 and n == "d2t")}


def export_specs(checkpoint: Checkpoint, c: DraftConfig, layout: str) -> dict[str, TensorSpec]:
    """Specs of the published tensors."""
    specs = {}
    for name, spec in exported(checkpoint).items():
        for part, rows in exported_parts(c, layout, name).items():
            specs[part] = spec if rows is None else TensorSpec(spec.dtype, (rows, *spec.shape[1:]))
    if "d2t" in specs:
        specs["t2d"] = TensorSpec(torch.bool, (c.vocab_size,))
    return specs


def export_tensors(
    checkpoint: Checkpoint, c: DraftConfig, layout: str
) -> Iterator[tuple[str, Tensor]]:
    """The published tensors: fused ones taken apart, t2d rebuilt from d2t."""
    kept = exported(checkpoint)
    for name, tensor in checkpoint.tensors():
        if name not in kept:
            continue
        row = 0
        for part, rows in exported_parts(c, layout, name).items():
            yield part, tensor if rows is None else tensor[row : row + rows]
            row += rows or 0
        if name == "d2t":
            mask = torch.zeros(c.vocab_size, dtype=torch.bool)
            mask[torch.arange(c.draft_vocab_size) + tensor] = True
            yield "t2d", mask


def verify_export(checkpoint: Checkpoint, directory: Path) -> None:
    """Read a directory back through the importer; compare configuration, tensors and logits."""
    try:
        conversion = plan_head(HFFolder(directory))
        specs = conversion.specs(None)
    except ValueError as error:
        raise ValueError(
            f"the export does not read back, so nothing was written: {error}"
        ) from None
    wanted, found = DraftConfig.from_dict(checkpoint.config), conversion.config
    wanted = replace(wanted, feature_layers=stated_layers(wanted))
    if wanted.family == "eagle1":
        wanted = replace(wanted, draft_vocab_size=wanted.vocab_size)
    # where a value was found, and whether a default was spelled out, is all that may change
    found = replace(
        found,
        feature_layers=stated_layers(found),
        rope_source=wanted.rope_source,
        source_format=wanted.source_format,
    )
    different = [k for k in vars(wanted) if getattr(wanted, k) != getattr(found, k)]
    kept = exported(checkpoint)
    if specs != kept:
        different.append("tensors")
    else:
        new = dict(conversion.tensors(specs))
        old = {name: tensor for name, tensor in checkpoint.tensors() if name in kept}
        different += [name for name in kept if not same_bytes(new[name], old[name])]
        if not different and not same_bytes(sample_logits(found, new), sample_logits(wanted, old)):
            different.append("logits")
    if different:
        raise ValueError(
            f"the export reads back differently ({listed(different)}); nothing was written"
        )


@torch.no_grad()
def sample_logits(c: DraftConfig, tensors: dict[str, Tensor], rows: int = 8) -> Tensor:
    """fp32 [rows, .] of a head on random features; what it borrows from a target is random too."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    with torch.device("meta"):
        head = DraftHead(c)
    state = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    state.setdefault("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64))
    head.load_state_dict(state, assign=True)
    if not c.own_embedding:
        head.tok_embeddings = nn.Embedding.from_pretrained(random(rows, c.dim))
    if not c.own_output:
        head.output = nn.Linear(c.dim, rows, bias=False, device="meta")
        head.output.weight = nn.Parameter(random(rows, c.dim), requires_grad=False)
    width = c.dim if c.family == "eagle1" else c.target_dim
    features = [random(rows, width) for _ in c.feature_layers or (0, 0, 0)]
    slots = torch.arange(rows)
    kv = torch.zeros(2, c.n_kv_head, rows, c.head_dim)
    table = rope_table(rows, c.head_dim, c.rope_theta, c.rope_scaling)
    mask = causal_mask(slots[:1], rows, slots)
    place = Place(table, slots, mask)
    return head.logits(head(slots % c.vocab_size, head.fuse(features), place, kv))


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equality that holds for NaN too."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
