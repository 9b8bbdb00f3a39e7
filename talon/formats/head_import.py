"""EAGLE heads as others publish them: recognised by their tensors and read strictly.

SafeAILab (EAGLE-1, -2, -3), SpecForge, speculators, NVIDIA ModelOpt and AngelSlim directories. A
head that is misread still decodes, only slowly, so nothing is guessed: a flag without its tensor, a
tensor without its flag and two statements that disagree are errors that name both. Leaves out heads
of several layers, q/k norms, sliding windows and quantised heads. Used by convert_hf_checkpoint.py;
head_export.py is the way back.
"""

import re

import torch
from torch import Tensor

from eagle_draft import DraftConfig
from talon.formats.hf_config import (
    Settings,
    listed,
    read_biases,
    read_head_dim,
    read_max_length,
    read_rope,
)
from talon.formats.hf_folder import Conversion, HFFolder, Output, linear_outputs

NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

# Prefixes under which the formats store the same things; ours is the second.
ALIASES = {
    "midlayer.": "layers.0.",
    "fusion_fc.": "fc.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
    "draft_id_to_target_id": "d2t",
}

UNSUPPORTED_TENSORS = {
    r"layers\.[1-9]": "a head of several layers",
    r"[qk]_norm\.": "a head with norms on q and k (q_norm, k_norm)",
    r"scale|qweight|qzeros|zero_point|g_idx": "a quantised head",
    r"lora_": "an adapter",
    r"_a_proj|_b_proj": "a head with latent attention (MLA)",
    r"experts": "a head with a mixture of experts",
}

EAGLE1_NORMS = (
    r"^layers\.0\.(input_layernorm|hidden_norm)\.|^(input_norm|norm|[^.]*_layernorm|fc_norm\.\d+)\."
)


def canonical(name: str) -> str:
    """A published tensor name in the one spelling used below."""
    name = name.removeprefix("model.")
    for published, ours in ALIASES.items():
        if name.startswith(published):
            return ours + name[len(published) :]
    return name


def is_head(folder: HFFolder) -> bool:
    """Whether the tensors are a head's, whatever config.json calls the architecture."""
    names = {canonical(name) for name in folder.specs}
    return bool(names & {"fc.weight", "d2t", "layers.0.hidden_norm.weight"}) or any(
        name.startswith("midlayer.") for name in folder.specs
    )


class HeadConfig:
    """config.json of a head, flat or nested: the same key may be stated in up to three places."""

    def __init__(self, config: Settings) -> None:
        self.config = config
        self.nested = "transformer_layer_config" in config or "speculators_model_type" in config
        self.layer = config.section("transformer_layer_config") if self.nested else config
        self.eagle = config.section("eagle_config")
        self.places = [config, self.eagle] + [self.layer] * self.nested
        self.architectures = config.items("architectures")

    def agreed(self, key: str, values: list, default: object) -> object:
        if any(value != values[0] for value in values):
            stated = " and ".join(map(str, values))
            raise ValueError(
                f"{self.config.where}: {key} is stated as {stated}; keep the right one"
            )
        return values[0] if values else default

    def flag(self, key: str, default: bool = False) -> bool:
        return self.agreed(key, [p.flag(key) for p in self.places if key in p], default)

    def integer(self, key: str, default: int | None = None) -> int | None:
        return self.agreed(key, [p.integer(key) for p in self.places if key in p], default)

    def check_supported(self) -> None:
        """Refuse by name whatever in the configuration changes the forward in a way we lack."""
        kind = self.config.text("speculators_model_type", "eagle3")
        if kind not in ("eagle", "eagle3"):
            self.config.refuse("speculators_model_type", "eagle, eagle3")
        for place in self.places:
            act = place.text("hidden_act", "silu")
            if act != "silu":
                place.refuse("hidden_act", "silu")
            if "sliding_window" in place and place.flag("use_sliding_window", True):
                place.refuse("sliding_window", "null or absent")
            if any(layer != "full_attention" for layer in place.items("layer_types")):
                place.refuse("layer_types", "full_attention")
            if place.values.get("logit_scale") not in (None, 1.0):
                place.refuse("logit_scale", "1.0")
            for key in ("quantization_config", "partial_rotary_factor"):
                if key in place and place.values[key] != 1.0:
                    place.refuse(key, "null or absent")
            for key in ("eh_proj_before_attn", "return_hidden_post_norm"):
                if place.flag(key):
                    place.refuse(key, "false")
        if not self.eagle.flag("use_aux_hidden_state", True):
            self.eagle.refuse("use_aux_hidden_state", "true")


def plan_head(folder: HFFolder) -> Conversion:
    """Decide everything about a head: its family, its config and the origin of every tensor."""
    names = canonical_names(folder)
    head = HeadConfig(folder.config)
    head.check_supported()
    notes: list[str] = []
    family, target_dim, layers = read_features(folder, head, names)
    vocab = read_vocabulary(folder, head, names, family)
    dim, heads = head.layer.integer("hidden_size"), head.layer.integer("num_attention_heads")
    kv_heads = head.layer.integer("num_key_value_heads", heads)
    theta, scaling, source = read_rope(head.layer)
    if head.nested and source in head.layer.values:
        source = f"transformer_layer_config.{source}"
    config = DraftConfig(
        family=family,
        dim=dim,
        n_head=heads,
        n_kv_head=kv_heads,
        head_dim=read_head_dim(head.layer, dim, heads, kv_heads),
        intermediate_size=head.layer.integer("intermediate_size"),
        norm_eps=head.layer.number("rms_norm_eps", 1e-6),
        vocab_size=head.integer("vocab_size"),
        draft_vocab_size=vocab,
        target_dim=target_dim,
        max_seq_length=read_max_length(head.layer),
        rope_theta=theta,
        rope_scaling=scaling,
        rope_source=source,
        feature_layers=layers,
        fc_bias=read_fc_bias(head, names, family, notes),
        **read_biases(names, head.layer, notes),
        **read_norms(folder, head, names, family, notes),
        own_embedding="embed_tokens.weight" in names,
        own_output="lm_head.weight" in names,
        source_format=recognise_format(head, folder, family),
    )
    check_borrowed(folder, config, notes)
    fc_width = folder.specs[names["fc.weight"]].shape[1]
    has_map = "d2t" in names and vocab < config.vocab_size
    outputs = [
        Output(o.name, tuple((names.get(name, name), shape) for name, shape in o.parts))
        for o in head_outputs(config, fc_width, has_map)
    ]
    architecture = ", ".join(map(str, head.architectures)) or "unnamed"
    ignored = {names[key] for key in ("d2t", "t2d") if key in names}
    conversion = Conversion(folder, "draft", config, architecture, outputs, ignored, notes)
    conversion.source_format = config.source_format
    conversion.check()
    if has_map:
        check_draft_vocabulary(folder, names, config.vocab_size, notes)
    elif "d2t" in names and bool(folder.read(names["d2t"]).any()):
        notes.append("d2t is not zero, but the draft vocabulary is the whole one: ignored it")
    return conversion


def canonical_names(folder: HFFolder) -> dict[str, str]:
    """Name in the folder of each canonical tensor; refuses names that say "not supported"."""
    names: dict[str, str] = {}
    for name in folder.specs:
        short = canonical(name)
        if short in names:
            raise ValueError(
                f"{folder.path} holds both {names[short]} and {name}; keep one of them"
            )
        for pattern, what in UNSUPPORTED_TENSORS.items():
            if re.search(pattern, short):
                raise ValueError(f"{folder.path} is {what} ({name}); that is not supported")
        names[short] = name
    if "fc.weight" not in names:
        raise ValueError(f"{folder.path} has no fc.weight, so it is no complete EAGLE head")
    return names


def recognise_format(head: HeadConfig, folder: HFFolder, family: str) -> str:
    """Whose layout it is, for the head card; decisions are taken from keys and tensors instead."""
    if head.nested:
        return "speculators"
    if family == "eagle1":
        return "eagle"
    if "eagle_config" in head.config and any(n.startswith("layers.0.") for n in folder.specs):
        return "modelopt"
    if "Eagle3LlamaForCausalLM" in head.architectures:
        return "angelslim"
    return "specforge" if "LlamaForCausalLMEagle3" in head.architectures else "eagle"


def read_features(
    folder: HFFolder, head: HeadConfig, names: dict[str, str]
) -> tuple[str, int, tuple[int, ...] | None]:
    """(family, width of one target feature, layers if stated), from the width of fc.weight."""
    shape, dim = folder.specs[names["fc.weight"]].shape, head.layer.integer("hidden_size")
    if len(shape) != 2 or shape[0] != dim:
        raise ValueError(
            f"{folder.path}: fc.weight is {list(shape)}, but hidden_size is {dim}; "
            "weights and config.json do not belong together"
        )
    stated = head.integer("target_hidden_size", dim)
    if shape[1] == 2 * dim and "layers.0.hidden_norm.weight" not in names:
        bad = [name for name in names if re.search(EAGLE1_NORMS, name)]
        if bad:
            raise ValueError(
                f"{folder.path} is an EAGLE-1 head with extra norms ({listed(bad)}); not supported"
            )
        if stated != dim or head.config.values.get("speculators_model_type") == "eagle3":
            raise ValueError(
                f"{folder.path}: fc.weight [{dim}, 2 x {dim}] is an EAGLE-1 head's, but "
                "config.json describes an EAGLE-3 head; they do not belong together"
            )
        return "eagle1", dim, None
    layers = read_layer_ids(head)
    levels = len(layers) if layers else 3
    if shape[1] != levels * stated:
        raise ValueError(
            f"{folder.path}: fc.weight takes {shape[1]} inputs; an EAGLE-1 head of hidden_size "
            f"{dim} has {2 * dim}, an EAGLE-3 head with {levels} features of {stated} has "
            f"{levels * stated}: check target_hidden_size and {LAYER_IDS}"
        )
    return "eagle3", stated, layers


def read_layer_ids(head: HeadConfig) -> tuple[int, ...] | None:
    """Stated feature layers as HF hidden_states indices (a layer's residual INPUT), or None.

    SpecForge and ModelOpt number a layer's OUTPUT and keep the list in eagle_config; so does, by
    the rule SGLang uses, any list that starts with 1. Both are one less than ours.
    """
    found = []
    for place in (head.config, head.eagle):
        ids = place.values.get(LAYER_IDS)
        if ids is None:
            continue
        good = isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)
        if not good or len(set(ids)) < len(ids):
            place.refuse(LAYER_IDS, "a list of different layers, each at least 0")
        is_output = ids[0] == 1 or (place is head.eagle and not head.nested)
        found.append(tuple(i + is_output for i in ids))
    return head.agreed(LAYER_IDS, found, None)


def read_vocabulary(folder: HFFolder, head: HeadConfig, names: dict[str, str], family: str) -> int:
    """draft_vocab_size, stated or read off the tensors, which must all agree."""
    vocab = head.integer("vocab_size")
    if vocab is None:
        raise ValueError(f"{folder.config.where} has no vocab_size; it must be the target's")
    sizes = {"draft_vocab_size": head.integer("draft_vocab_size")}
    for name in ("lm_head.weight", "d2t"):
        # EAGLE-1 and full-vocabulary EAGLE-3 heads may carry an unused map of any length
        if name in names and not (name == "d2t" and vocab in sizes.values()):
            sizes[name] = next(iter(folder.specs[names[name]].shape), 0)
    stated = {key: size for key, size in sizes.items() if size is not None}
    size = next(iter(stated.values()), vocab)
    if any(other != size for other in stated.values()):
        counts = ", ".join(f"{key}: {count}" for key, count in stated.items())
        raise ValueError(f"{folder.path}: draft vocabulary sizes disagree ({counts})")
    if size > vocab:
        raise ValueError(
            f"{folder.path}: draft vocabulary {size} is larger than vocab_size {vocab}"
        )
    if size < vocab and "d2t" not in names:
        raise ValueError(
            f"{folder.path}: the draft vocabulary has {size} of {vocab} tokens and d2t is missing, "
            "so its ids mean nothing; get the complete head"
        )
    if "t2d" in names and folder.specs[names["t2d"]].shape != (vocab,):
        shape = list(folder.specs[names["t2d"]].shape)
        raise ValueError(f"{folder.path}: t2d has shape {shape}, but vocab_size is {vocab}")
    return size


def read_fc_bias(head: HeadConfig, names: dict[str, str], family: str, notes: list[str]) -> bool:
    """Whether fc has a bias: the tensor decides, for the key `bias` is often absent or wrong."""
    present = "fc.bias" in names
    if family == "eagle1":
        for key in ("bias", "fusion_bias"):
            stated = head.config.flag(key, None)
            if stated and not present:
                raise ValueError(
                    f"{head.config.where}: {key} is true, but there is no tensor fc.bias"
                )
            if stated is False and present:
                notes.append(f"{key} is false in config.json, but fc.bias is there: used it")
    return present


def read_norms(
    folder: HFFolder, head: HeadConfig, names: dict[str, str], family: str, notes: list[str]
) -> dict[str, bool]:
    """The EAGLE-3 norm variants; a flag needs its tensor and a tensor its flag."""
    if family == "eagle1":
        for flag in (*NORM_FLAGS, "layernorms", "add_para_norm"):
            if head.flag(flag):
                raise ValueError(
                    f"{head.config.where}: {flag} is true; an EAGLE-1 head has no such norm"
                )
        return {}
    flags = {
        "norm_before_residual": head.flag("norm_before_residual", head.nested),  # as vLLM reads it
        "norm_before_fc": head.flag("norm_before_fc"),
        "fc_norm": head.flag("fc_norm") or head.flag("use_aux_norm"),
        "norm_output": head.flag("norm_output") and head.nested,
    }
    # The same key, another meaning: flat (SpecForge) it says that lm_head reads the normed hidden,
    # which every head here does; nested (speculators) that the next level does.
    if not head.nested and not head.flag("norm_output", True):
        raise ValueError(
            f"{head.config.where}: norm_output is false, which in this layout drops the final "
            "norm; not supported (remove the key if the head has its norm)"
        )
    if not head.nested and head.flag("norm_output"):
        notes.append("norm_output is true: read as in SpecForge, the final norm before lm_head")
    for flag, tensor in (("norm_before_fc", "input_norm."), ("fc_norm", "fc_norm.")):
        present = [name for name in names if name.startswith(tensor)]
        if flags[flag] != bool(present):
            raise ValueError(
                f"{folder.path}: {flag} is {str(flags[flag]).lower()} in config.json, but the "
                f"tensor {tensor}* is {'there' if present else 'missing'}; one of them is wrong"
            )
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise ValueError(f"{head.config.where}: norm_before_fc and fc_norm exclude each other")
    return flags


def check_borrowed(folder: HFFolder, config: DraftConfig, notes: list[str]) -> None:
    """What the head lacks must be something that the target can lend it."""
    if not config.own_embedding and config.dim != config.target_dim:
        raise ValueError(
            f"{folder.path} has no embed_tokens.weight and cannot borrow the target's: hidden_size "
            f"is {config.dim}, target_hidden_size {config.target_dim}"
        )
    if config.family == "eagle3" and not config.own_output:
        if config.draft_vocab_size < config.vocab_size or config.dim != config.target_dim:
            raise ValueError(
                f"{folder.path} has no lm_head.weight and cannot borrow the target's: the head is "
                f"{config.dim} wide with {config.draft_vocab_size} tokens, the target "
                f"{config.target_dim} with {config.vocab_size}"
            )
        notes.append("the head has no lm_head: it borrows the target's")
    if not config.own_embedding:
        notes.append("the head has no embedding: it borrows the target's")


def head_outputs(c: DraftConfig, fc_width: int, has_map: bool) -> list[Output]:
    """Every tensor of our file, in the order of the forward, by canonical source names."""
    q, kv, wide = c.n_head * c.head_dim, c.n_kv_head * c.head_dim, c.family == "eagle3"
    width = 2 * c.dim if wide else c.dim
    attention, mlp = "layers.0.self_attn", "layers.0.mlp"
    qkv = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    gate_up = {"gate_proj": c.intermediate_size, "up_proj": c.intermediate_size}
    down = {"down_proj": c.dim}
    outputs = [
        Output("fc.weight", (("fc.weight", (c.dim, fc_width)),)),
        *([Output("fc.bias", (("fc.bias", (c.dim,)),))] if c.fc_bias else []),
        *linear_outputs("layer.attention.wqkv", attention, qkv, width, c.qkv_bias),
        *linear_outputs("layer.attention.wo", attention, {"o_proj": c.dim}, q, c.o_bias),
        *linear_outputs("layer.feed_forward.w13", mlp, gate_up, c.dim, c.mlp_bias),
        *linear_outputs("layer.feed_forward.w2", mlp, down, c.intermediate_size, c.mlp_bias),
    ]
    norms = {"layer.ffn_norm": ("layers.0.post_attention_layernorm", c.dim)}
    if wide:
        norms["layer.embed_norm"] = ("layers.0.input_layernorm", c.dim)
        norms["layer.hidden_norm"] = ("layers.0.hidden_norm", c.dim)
        norms["norm"] = ("norm", c.dim)
    if c.norm_before_fc:
        norms["input_norm"] = ("input_norm", fc_width)
    for i in range(fc_width // c.target_dim if c.fc_norm else 0):
        norms[f"fc_norm.{i}"] = (f"fc_norm.{i}", c.target_dim)
    outputs += [
        Output(f"{o}.weight", ((f"{n}.weight", (size,)),)) for o, (n, size) in norms.items()
    ]
    if c.own_output:
        shape = (c.draft_vocab_size, c.dim)
        outputs.append(Output("output.weight", (("lm_head.weight", shape),)))
    if has_map:
        outputs.append(Output("d2t", (("d2t", (c.draft_vocab_size,)),)))
    if c.own_embedding:
        shape = (c.vocab_size, c.dim)
        outputs.append(Output("tok_embeddings.weight", (("embed_tokens.weight", shape),)))
    return outputs


def check_draft_vocabulary(
    folder: HFFolder, names: dict[str, str], vocab: int, notes: list[str]
) -> None:
    """d2t must be offsets that lead to different ids of the vocabulary, the same that t2d marks."""
    raw = folder.read(names["d2t"])
    if raw.dtype.is_floating_point or raw.dtype == torch.bool:
        raise ValueError(f"{folder.path}: d2t is {raw.dtype}; it must hold integers")
    d2t = raw.to(torch.int64)
    mask = folder.read(names["t2d"]) != 0 if "t2d" in names else None

    def fits(ids: Tensor) -> bool:
        inside = bool(((ids >= 0) & (ids < vocab)).all()) and len(ids.unique()) == len(ids)
        return inside and (mask is None or bool(mask[ids].all()) and int(mask.sum()) == len(ids))

    as_offsets, as_ids = fits(torch.arange(len(d2t)) + d2t), fits(d2t)
    if as_offsets:
        if as_ids and mask is None and len(d2t) > 1:
            notes.append("d2t could also be read as absolute ids; it was read as offsets")
        return
    if as_ids:
        raise ValueError(
            f"{folder.path}: d2t looks like absolute token ids; it must hold offsets (id - index): "
            "subtract its index from each entry"
        )
    raise ValueError(
        f"{folder.path}: d2t is no map into the vocabulary: draft id + d2t must give different ids "
        f"from 0 to {vocab - 1}" + (", the ones that t2d marks" if mask is not None else "")
    )
