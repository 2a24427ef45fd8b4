"""Takes settings out of a quantization_config, which anybody may have written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoinfer.checks import short


def names_in(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return a list of names, or none if the setting is missing; raises ValueError, naming it, for what is no list."""
    value = config.get(name)
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(entry, str) for entry in value):
        raise _wrong(name, value, "a list of names")
    return tuple(value)


def mapping_in(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a mapping, or an empty one if the setting is missing; raises ValueError, naming it, for what is none."""
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(name, value, "a mapping")
    return value


def mappings_in(config: Mapping[str, Any], name: str) -> dict[str, Mapping[str, Any]]:
    """Return the mappings of a mapping, by their names; raises ValueError as mapping_in does."""
    entries = mapping_in(config, name)
    for entry, value in entries.items():
        if not isinstance(value, dict):
            raise _wrong(f"{name}[{entry!r}]", value, "a mapping")
    return dict(entries)


def _wrong(name: str, value: Any, needed: str) -> ValueError:
    return ValueError(f"model: quantization_config has {name}={short(value)}: must be {needed}")
