"""Takes settings out of a quantization_config, which anybody may have written."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from nanoinfer.checks import as_flag, as_int, check_settings, short

EXPRESSION = "re:"  # begins a pattern that is a regular expression
WHERE = "model: quantization_config"  # begins the messages
FOUND_BY = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")  # tensors tell the types of scales and zeros
OF_ROUNDING = (
    "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder", *FOUND_BY
)  # fmt: skip
KINDS = ("FP8", "NVFP4", "INT8", "static")  # which some tools write in place of these settings
ROUNDED = ("input_activations", "output_activations", "kv_cache_scheme")  # what compressed-tensors may round as well


def check_known(
    config: Mapping[str, Any],
    read: Collection[str],
    idle: Mapping[str, Collection[Any]] | None = None,
    inside: str = "",
) -> None:
    """Raise ValueError for a setting that nobody reads and that may change results; read, idle: as in check_settings.

    inside: which part of the config this is, such as "config_groups['group_0']"
    """
    check_settings(f"{WHERE}{inside and ': '}{inside}", config, ("quant_method", *read), idle)


def check_rounded(config: Mapping[str, Any], inside: str = "") -> None:
    """Raise ValueError for an unknown setting of activations, keys or values.

    nanoinfer rounds none of them as a checkpoint says: README.md, limits. inside: as for check_known
    """
    for name in ROUNDED:
        if config.get(name) not in KINDS:
            check_known(mapping_in(config, name), OF_ROUNDING, inside=f"{inside}{inside and '.'}{name}")


def flag_in(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a flag, which some tools write as 0 or 1; raises ValueError, naming it, for what is none."""
    value = config.get(name)
    if value is None:
        return default
    if as_flag(value) is None and as_int(value) not in (0, 1):
        raise wrong(name, value, "true or false")
    return bool(value)


def names_in(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return a list of names, or none if the setting is missing; raises ValueError, naming it, for what is no list."""
    value = config.get(name)
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(entry, str) for entry in value):
        raise wrong(name, value, "a list of names")
    return tuple(value)


def mapping_in(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a mapping, or an empty one if the setting is missing; raises ValueError, naming it, for what is none."""
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong(name, value, "a mapping")
    return value


def mappings_in(config: Mapping[str, Any], name: str) -> dict[str, Mapping[str, Any]]:
    """Return the mappings of a mapping, by their names; raises ValueError as mapping_in does."""
    entries = mapping_in(config, name)
    for entry, value in entries.items():
        if not isinstance(value, dict):
            raise wrong(f"{name}[{entry!r}]", value, "a mapping")
    return dict(entries)


def check_patterns(patterns: Iterable[str]) -> None:
    """Raise ValueError, naming it, for a regular expression that is none."""
    for pattern in (pattern.removeprefix(EXPRESSION) for pattern in patterns if pattern.startswith(EXPRESSION)):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{WHERE} names modules by {pattern!r}, which is no regular expression: {error}"
            ) from error


def wrong(name: str, value: Any, needed: str) -> ValueError:
    """Return the error for a setting that must be something else."""
    return ValueError(f"{WHERE} has {name}={short(value)}: must be {needed}")
