"""What targets and heads share of config.json; two places that state the same thing must agree.

For convert_hf_checkpoint.py and head_import.py. Leaves out: what only one of the two has, and the
tensors, but for their names."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from model import RopeScaling
from talon.settings import REQUIRED, Settings

# Keys that change the forward, with the values at which they do not.
NEUTRAL_VALUES = {
    "hidden_act": ("silu",),
    "sliding_window": (),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (),
    "logit_scale": (1.0,),
}


# Scalings that leave fast frequencies alone: where they say what is slow and fast, and if not.
SPEEDS = {
    "llama3": {"low_freq_factor": REQUIRED, "high_freq_factor": REQUIRED},
    "yarn": {"beta_slow": 1.0, "beta_fast": 32.0},
}


def check_neutral(config: Settings, neutral: Mapping[str, tuple]) -> None:
    """Refuse by name the first key that asks for a forward which plain LLaMA does not have."""
    for key, values in neutral.items():
        if key in config and config.values[key] not in values:
            config.refuse(key, ", ".join(map(str, values)) or "null or absent")
    if any(layer != "full_attention" for layer in config.items("layer_types")):
        config.refuse("layer_types", "full_attention in every layer")


def read_rope(config: Settings) -> tuple[float, RopeScaling | None, str]:
    """(theta, scaling, where theta was found), from the old keys (rope_theta next to rope_scaling),
    the new one (rope_parameters, of transformers 5), or both."""
    sections = {key: config.section(key) for key in ("rope_parameters", "rope_scaling")}
    places = {"rope_theta": config, **sections}
    thetas = {k: place.number("rope_theta") for k, place in places.items() if "rope_theta" in place}
    scalings = {key: _read_scaling(section) for key, section in sections.items() if section.values}
    for what, found in (("theta", thetas), ("scaling", scalings)):
        if any(value != next(iter(found.values())) for value in found.values()):
            stated = "; ".join(f"{key} says {value}" for key, value in found.items())
            raise ValueError(f"{config.where}: two rope {what}s ({stated}); keep the right one")
    source, theta = next(iter(thetas.items()), ("default 10000", 10000.0))
    return theta, next(iter(scalings.values()), None), source


def _read_scaling(section: Settings) -> RopeScaling | None:
    types = {section.string(key) for key in ("rope_type", "type") if key in section}
    if len(types) > 1:
        raise ValueError(f"{section.where}: type and rope_type disagree; keep the right one")
    if section.values.get("partial_rotary_factor") not in (None, 1.0):
        section.refuse("partial_rotary_factor", "1.0")
    kind = next(iter(types), "default" if set(section.values) == {"rope_theta"} else None)
    if kind == "default":
        return None
    if kind != "linear" and kind not in SPEEDS:  # dynamic would turn keys that are cached
        allowed = "default, linear, llama3, yarn: keys are rotated once, for good"
        raise ValueError(f"{section.where}: rope type {kind!r}; supported: {allowed}")
    if (factor := section.number("factor")) < 1:
        section.refuse("factor", "a number of at least 1")
    if kind == "linear":
        return RopeScaling(kind, factor)
    (slow, low), (fast, high) = ((k, section.number(k, d)) for k, d in SPEEDS[kind].items())
    if high <= low:
        section.refuse(fast, f"more than {slow} {low}")
    trained, sharper = section.integer("original_max_position_embeddings"), 1.0
    if kind == "yarn":  # as transformers computes it
        both = [key for key in ("mscale", "mscale_all_dim") if section.values.get(key)]
        weights = [section.number(key) for key in both] if len(both) == 2 else [1, 0]
        above, below = (0.1 * weight * math.log(factor) + 1 for weight in weights)
        sharper = section.number("attention_factor", above / below)
    return RopeScaling(kind, factor, low, high, trained, sharper, section.flag("truncate", True))


def read_layer(config: Settings, names: Iterable[str], notes: list[str]) -> dict[str, Any]:
    """What ModelConfig and DraftConfig both say of a layer; `names` are those of its tensors."""
    dim, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        config.refuse("num_key_value_heads", f"divisors of num_attention_heads {heads}")
    if "head_dim" not in config and dim % heads:
        config.refuse("num_attention_heads", f"divisors of hidden_size {dim}, or give a head_dim")
    head_dim = config.integer("head_dim", dim // heads)
    if head_dim % 2:
        config.refuse("head_dim", "an even number, for rotary positions work on pairs")
    # Old Vicuna configurations have another name for the context.
    contexts = ("max_position_embeddings", "max_sequence_length")
    length = config.integer(next((key for key in contexts if key in config), contexts[0]), 2048)
    theta, scaling, _ = read_rope(config)
    if scaling and scaling.kind == "yarn":  # often switched on next to the old length
        length = max(length, int(scaling.factor * scaling.original_max_position))
    return {
        "dim": dim, "n_head": heads, "n_kv_head": kv_heads, "head_dim": head_dim,
        "intermediate_size": config.integer("intermediate_size"),
        "norm_eps": config.number("rms_norm_eps", 1e-6), "max_seq_length": length,
        "rope_theta": theta, "rope_scaling": scaling,
        "qk_norm": any(name.endswith(".q_norm.weight") for name in names),
        **read_biases(names, config, notes),
    }  # fmt: skip


def read_biases(names: Iterable[str], config: Settings, notes: list[str]) -> dict[str, bool]:
    """Which linears have a bias: as the tensors say, unless config.json says otherwise."""

    def present(*linears: str) -> bool:
        endings = tuple(f".{linear}.bias" for linear in linears)
        return any(name.endswith(endings) for name in names)

    found = {
        "qkv_bias": present("q_proj", "k_proj", "v_proj"),
        "o_bias": present("o_proj"),
        "mlp_bias": present("gate_proj", "up_proj", "down_proj"),
    }
    attention = found["qkv_bias"] or found["o_bias"]
    for key, has in (("attention_bias", attention), ("mlp_bias", found["mlp_bias"])):
        stated = config.flag(key, None)
        if stated is not None and stated != has:
            config.refuse(key, f"{has}, for the weights have {'' if has else 'no '}such biases")
    if attention and config.flag("attention_bias") and not found["o_bias"]:
        notes.append("attention_bias is true and o_proj has no bias: none, as in transformers")
    return found
