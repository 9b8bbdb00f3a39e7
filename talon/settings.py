"""Other people's JSON files, read with types: every wrong value is refused by its file and key.

Here are the settings next to a vocabulary; what config.json says is read in talon/formats. Leaves
out: the vocabulary itself (tokenizer.py)."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from talon.checkpoint import check_file

REQUIRED: Any = object()


def listed(names: list[str]) -> str:
    """The first few names and how many more: an error message stays one readable line."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def read_text(path: Path) -> str:
    """A file's text, with or without a byte order mark in front of it."""
    check_file(path)
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); download it again") from None


class Settings:
    """A configuration dictionary read with types: every wrong value is refused by its key."""

    def __init__(self, values: dict, where: str) -> None:
        self.values, self.where = values, where

    @classmethod
    def read(cls, path: Path, optional: bool = False) -> "Settings":
        """A file's JSON object; where the file is optional and absent, one that states nothing."""
        if optional and not os.path.lexists(path):  # a link that leads nowhere is not absent
            return cls({}, str(path))
        content = read_text(path)
        try:
            values = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON ({error}); download it again") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path} holds no JSON object; download it again")
        return cls(values, str(path))

    def __contains__(self, key: str) -> bool:
        """Whether the key states anything; null counts as not stated."""
        return self.values.get(key) is not None

    def _get(self, key: str, default: Any, types: tuple[type, ...], wanted: str) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is REQUIRED:
                raise ValueError(f"{self.where} has no {key}; it must be {wanted}")
            return default
        # bool is an int to Python, but `true` is no width.
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ValueError(f"{self.where}: {key} is {value!r:.80}; it must be {wanted}")
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

    def string(self, key: str, default: Any = REQUIRED) -> str:
        return self._get(key, default, (str,), "a string")

    def items(self, key: str) -> list:
        """A list; an empty one when the key is absent or null."""
        return self._get(key, [], (list,), "a list")

    def section(self, key: str) -> "Settings":
        """A nested object; an empty one when the key is absent or null."""
        values = self._get(key, {}, (dict,), "an object")
        return Settings(values, f"{self.where}: {key}")

    def numbered(self, key: str) -> "Settings":
        """A list as a section whose keys count its entries."""
        return Settings(dict(enumerate(self.items(key))), f"{self.where}: {key}")

    def refuse(self, key: str, allowed: str) -> None:
        raise ValueError(f"{self.where}: {key} is {self.values.get(key)!r}; supported: {allowed}")


@dataclass(frozen=True)
class TokenizerConfig:
    """What the files around a vocabulary say."""

    named: dict[str, str]  # "bos_token" -> "<s>", ...
    special: tuple[str, ...]  # every string declared special, the named ones included
    added: dict[int, AddedToken]
    add_bos: bool | None  # None: not said, the tokenizer file's own rule holds
    legacy: bool  # sentencepiece: a dummy space before each text between special tokens
    add_prefix_space: bool  # sentencepiece: that space at all
    templates: dict[str, str]  # chat templates by name


def read_tokenizer_config(directory: Path) -> TokenizerConfig:
    """The settings in a directory; ValueError that names the file and the key of an odd one."""
    config = Settings.read(directory / "tokenizer_config.json", optional=True)
    older = Settings.read(directory / "special_tokens_map.json", optional=True)
    # An empty string states as little as null does.
    stated = [{k: v for k, v in s.values.items() if v not in (None, "")} for s in (older, config)]
    both = Settings(stated[0] | stated[1], f"{config.where} or special_tokens_map.json")
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    named = {name: content_of(both, name) for name in names if name in both}
    extra = both.numbered("additional_special_tokens")
    special = [*named.values(), *(content_of(extra, i) for i in extra.values)]
    return TokenizerConfig(
        named=named,
        special=tuple(special),
        added=read_added_tokens(directory, config, special),
        add_bos=config.flag("add_bos_token", None),
        legacy=config.flag("legacy", True),
        add_prefix_space=config.flag("add_prefix_space", True),
        templates=read_templates(directory, config),
    )


def content_of(settings: Settings, key: str | int) -> str:
    """Special tokens are written as strings or as objects with flags."""
    if isinstance(settings.values.get(key), dict):
        return settings.section(key).string("content")
    return settings.string(key)


def read_added_tokens(
    directory: Path, config: Settings, special: list[str]
) -> dict[int, AddedToken]:
    """Added tokens by id: from added_tokens.json, then tokenizer_config.json, which has flags."""
    older, added = Settings.read(directory / "added_tokens.json", optional=True), {}
    for content in older.values:
        flags = {"normalized": False, "special": content in special}
        added[older.integer(content, least=0)] = AddedToken(content, **flags)
    newer = config.section("added_tokens_decoder")
    for key in newer.values:
        if not key.isdecimal():
            raise ValueError(f"{newer.where}: {key!r} is no id; correct it or download it again")
        token = newer.section(key)
        names = ("lstrip", "rstrip", "normalized", "single_word", "special")
        flags = {name: token.flag(name) for name in names}
        if content := token.string("content"):  # an empty one would stand at every place
            added[int(key)] = AddedToken(content, **flags)
    return added


def read_templates(directory: Path, config: Settings) -> dict[str, str]:
    """Chat templates by name; a file chat_template.jinja wins over tokenizer_config.json."""
    if os.path.lexists(path := directory / "chat_template.jinja"):
        return {"default": read_text(path)}
    found = config.values.get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list):
        numbered = config.numbered("chat_template")
        entries = [numbered.section(i) for i in numbered.values]
        return {entry.string("name"): entry.string("template") for entry in entries}
    by_name = config.section("chat_template")
    return {name: by_name.string(name) for name in by_name.values}
