"""Other people's JSON files, read with types: every wrong value is refused by its file and key.

For the files around a tokenizer and, in a conversion, config.json. Leaves out: what the keys mean.
"""

import json
import os
from pathlib import Path
from typing import Any

from talon.checkpoint import check_file

REQUIRED: Any = object()


def listed(names: list[str]) -> str:
    """The first few names and how many more: an error message stays one readable line."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


class Settings:
    """A configuration dictionary read with types: every wrong value is refused by its key."""

    def __init__(self, values: dict, where: str) -> None:
        self.values, self.where = values, where

    @classmethod
    def read(cls, path: Path, optional: bool = False) -> "Settings":
        """A file's JSON object; where the file is optional and absent, one that states nothing."""
        if optional and not os.path.lexists(path):  # a link that leads nowhere is not absent
            return cls({}, str(path))
        check_file(path)
        try:
            values = json.loads(path.read_bytes().decode("utf-8-sig"))
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

    def refuse(self, key: str, allowed: str) -> None:
        raise ValueError(f"{self.where}: {key} is {self.values.get(key)!r}; supported: {allowed}")
