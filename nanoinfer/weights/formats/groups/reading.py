"""Reads settings that the configs of many tools have, and says which matrices they hold for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

WILD = re.compile(r"[*+?^$\\(\[|]")  # what no name has


def read_bits(config: Mapping[str, Any], allowed: tuple[int, ...] = (4, 8)) -> int:
    """Return the bits of a number; raises ValueError, naming the setting, for others than are allowed."""
    bits = config.get("bits")
    if type(bits) is not int or bits not in allowed:
        raise ValueError(f"model: quantization_config has bits={bits!r}: must be {' or '.join(map(str, allowed))}")
    return bits


def read_group(config: Mapping[str, Any]) -> int:
    """Return how many inputs share a scale; 0: all. Raises ValueError, naming the setting, for what is no such number.

    Configs have -1 for all.
    """
    group = config.get("group_size")
    if type(group) is not int or (group < 1 and group != -1):
        raise ValueError(f"model: quantization_config has group_size={group!r}: must be an integer above 0, or -1")
    return max(group, 0)


def read_choice(config: Mapping[str, Any], name: str, default: str, allowed: Iterable[str]) -> str:
    """Return a setting; raises ValueError, naming it, for others than are allowed."""
    value = config.get(name, default)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"model: quantization_config has {name}={value!r}: must be one of {', '.join(allowed)}")
    return value


def pattern_of(entry: str) -> str:
    """Return a name, or a regular expression, as Formats takes it."""
    return f"re:{entry}" if WILD.search(entry) else entry


def containing(entry: str) -> str:
    """Return the pattern of the names that contain this."""
    return f"re:.*{re.escape(entry)}"


def beginning(entry: str) -> str:
    """Return the pattern of what this names, and of all in it; a "*" stands for any letters."""
    return "re:" + ".*".join(map(re.escape, entry.split("*"))) + r"(\.|$)"


def with_wildcards(entry: str) -> str:
    """Return the pattern of the names that have any letters where this has a "*"."""
    if "*" not in entry:
        return entry
    return "re:" + ".*".join(map(re.escape, entry.split("*"))) + "$"
