"""Other people's JSON: typed settings, and what targets and heads share of config.json.

Every value has a type and a range and is refused by its key; two places that state the same thing
must agree. Knows no tensors but their names. For convert_hf_checkpoint.py and head_formats.py.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from model import RopeScaling
from talon.checkpoint import check_weight_file

REQUIRED: Any = object()


def listed(names: list[str]) -> str:
    """The first few names and how many more: an error message stays one readable line."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def read_json(path: Path) -> dict:
    """A JSON object from a file; ValueError naming the file for anything else."""
    check_weight_file(path)
    try:
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; download it again")
    return content


class Settings:
    """A configuration dictionary read with types: every wrong value is refused by its key."""

    def __init__(self, values: dict, where: str) -> None:
        self.values, self.where = values, where

    def __contains__(self, key: str) -> bool:
        """Whether the key states anything; null counts as not stated."""
        return self.values.get(key) is not None

    def _get(self, key: str, default: Any, types: tuple[type, ...], wanted: str) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is REQUIRED:
                raise ValueError(f"{self.where} has no {key}; it must be {wanted}")
            return default
        # bool is an int to Python, but `true` is no width
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ValueError(f"{self.where}: {key} is {value!r}; it must be {wanted}")
        return value

    def integer(self, key: str, default: Any = REQUIRED, least: int = 1) -> int:
        value = self._get(key, default, (int,), f"an integer of at least {least}")
        if value is not None and value < least:
            raise ValueError(f"{self.where}: {key} is {value}; it must be at least {least}")
        return value

    def number(self, key: str, default: Any = REQUIRED) -> float:
        value = self._get(key, default, (int, float), "a positive number")
        if not 0 < value < 1e38:  # false for NaN, and safe for integers beyond a float
            raise ValueError(f"{self.where}: {key} is {value}; it must be a positive number")
        return float(value)

    def flag(self, key: str, default: Any = False) -> bool:
        return self._get(key, default, (bool,), "true or false")

    def text(self, key: str, default: Any = REQUIRED) -> str:
        return self._get(key, default, (str,), "a string")

    def items(self, key: str) -> list:
        """A list; an empty one when the key is absent or null."""
        return self._get(key, [], (list,), "a list")

    def section(self, key: str) -> "Settings":
        """A nested object; an empty one when the key is absent or null."""
        values = self._get(key, {}, (dict,), "an object")
        return Settings(values, f"{self.where}: {key}")

    def refuse(self, key: str, allowed: str) -> None:
        raise ValueError(f"{self.where}: {key} is {self.values.get(key)!r}; supported: {allowed}")


def read_rope(config: Settings) -> tuple[float, RopeScaling | None, str]:
    """(theta, scaling, where theta was found), from the old keys, the new one, or both.

    Old: rope_theta beside rope_scaling {type or rope_type, factor, ...}. New (transformers 5):
    everything in rope_parameters. ValueError where two places disagree or a kind is not supported.
    """
    sections = {key: config.section(key) for key in ("rope_parameters", "rope_scaling")}
    places = {"rope_theta": config, **sections}
    thetas = {
        key: place.number("rope_theta") for key, place in places.items() if "rope_theta" in place
    }
    scalings = {key: _read_scaling(section) for key, section in sections.items() if section.values}
    for what, found in (("theta", thetas), ("scaling", scalings)):
        if any(value != next(iter(found.values())) for value in found.values()):
            stated = "; ".join(f"{key} says {value}" for key, value in found.items())
            raise ValueError(
                f"{config.where}: two different rope {what}s ({stated}); keep the right one"
            )
    source, theta = next(iter(thetas.items()), ("default 10000", 10000.0))
    return theta, next(iter(scalings.values()), None), source


def _read_scaling(section: Settings) -> RopeScaling | None:
    kinds = {section.text(key) for key in ("rope_type", "type") if key in section}
    if len(kinds) > 1:
        raise ValueError(f"{section.where}: type and rope_type disagree; keep the right one")
    if section.values.get("partial_rotary_factor") not in (None, 1.0):
        section.refuse("partial_rotary_factor", "1.0")
    if kinds == {"default"} or (not kinds and set(section.values) == {"rope_theta"}):
        return None
    if kinds == {"linear"}:
        return RopeScaling("linear", _factor(section))
    if kinds == {"llama3"}:
        low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
        if high <= low:
            section.refuse("high_freq_factor", f"more than low_freq_factor {low}")
        original = section.integer("original_max_position_embeddings")
        return RopeScaling("llama3", _factor(section), low, high, original)
    raise ValueError(
        f"{section.where}: rope type {next(iter(kinds), None)!r} is not supported; "
        "supported: default, linear, llama3"
    )


def _factor(section: Settings) -> float:
    factor = section.number("factor")
    if factor < 1:
        section.refuse("factor", "a number of at least 1")
    return factor


def read_head_dim(config: Settings, dim: int, heads: int, kv_heads: int) -> int:
    """head_dim, stated or hidden_size / num_attention_heads; the head counts must divide."""
    if heads % kv_heads:
        raise ValueError(
            f"{config.where}: num_attention_heads {heads} is no multiple of num_key_value_heads "
            f"{kv_heads}; correct config.json"
        )
    if "head_dim" not in config and dim % heads:
        raise ValueError(
            f"{config.where}: hidden_size {dim} is no multiple of num_attention_heads {heads} and "
            "there is no head_dim; correct config.json"
        )
    head_dim = config.integer("head_dim", dim // heads)
    if head_dim % 2:
        config.refuse("head_dim", "an even number, for rotary positions work on pairs")
    return head_dim


def read_max_length(config: Settings) -> int:
    """The context length; old Vicuna configurations call it max_sequence_length."""
    key = "max_position_embeddings"
    return config.integer(key if key in config else "max_sequence_length", 2048)


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
            raise ValueError(
                f"{config.where}: {key} is {str(stated).lower()}, but the weights have "
                f"{'such' if has else 'no such'} bias tensors; correct config.json or the weights"
            )
    if attention and config.flag("attention_bias") and not found["o_bias"]:
        notes.append("attention_bias is true and o_proj has no bias: none, as in transformers")
    return found
