"""Reads single settings of a config.json, and raises ValueError for values that no model can have."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from nanoinfer.checks import as_int, as_number

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip
OWN_SIZES = ("num_key_value_heads", "head_dim")  # a config may leave these out


def check_sizes(config: PretrainedConfig) -> None:
    """Raise ValueError if one of the sizes that all families read is impossible."""
    for name in SIZES:
        # A class of configs lacks what its models have not, such as intermediate_size if all layers have experts.
        if hasattr(config, name):
            size_of(config, name)
    for layer in layer_configs(config):
        for name in OWN_SIZES:
            if getattr(layer, name, None) is not None:
                size_of(layer, name)
        heads, kv_heads = config.num_attention_heads, kv_count_of(layer)
        if heads % kv_heads:
            raise ValueError(
                f"model: num_key_value_heads={kv_heads} in its config: must be a divisor of num_attention_heads={heads}"
            )


def layer_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Return the config as it holds for each layer, if layers differ; else the config alone."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def size_of(config: PretrainedConfig, name: str) -> int:
    """Return a setting; raises ValueError unless it is an integer of at least 1."""
    size = getattr(config, name, None)
    number = as_int(size)
    if number is None or number < 1:
        raise ValueError(f"model: {name}={size!r} in its config: must be an integer of at least 1")
    return number


def count_of(config: PretrainedConfig, name: str) -> int:
    """Return a setting; raises ValueError unless it is an integer of at least 0."""
    count = getattr(config, name)
    number = as_int(count)
    if number is None or number < 0:
        raise ValueError(f"model: {name}={count!r} in its config: must be an integer of at least 0")
    return number


def positive(name: str, value: Any) -> Any:
    """Return `value`; raises ValueError unless it is a finite number above 0. name: the setting in the config"""
    if as_number(value) is None or not 0 < value < math.inf:
        raise ValueError(f"model: {name}={value!r} in its config: must be a number above 0")
    return value


def positive_or_none(name: str, value: Any) -> Any:
    """Return `value` as `positive` does, but allow None, which turns the setting off."""
    return None if value is None else positive(name, value)


def above_one(name: str, value: Any) -> Any:
    """Return `value`; raises ValueError unless it is above 1, so that one can divide by its logarithm."""
    if positive(name, value) <= 1:
        raise ValueError(f"model: {name}={value!r} in its config: must be above 1")
    return value


def of_layers(config: PretrainedConfig, name: str) -> list[Any]:
    """Return the entries of a list setting, one for each layer; raises ValueError if it has fewer or more."""
    entries, layers = getattr(config, name) or [], config.num_hidden_layers
    if len(entries) != layers:
        raise ValueError(
            f"model: {name} in its config has {len(entries)} entries: must have one a layer, num_hidden_layers={layers}"
        )
    return list(entries)


def head_dim_of(config: PretrainedConfig) -> int:
    """Return the size of a head: head_dim if the config has it, else hidden_size / num_attention_heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def kv_count_of(config: PretrainedConfig) -> int:
    """Return how many heads of keys there are: num_key_value_heads if the config has it, else as many as of queries."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def refuse(config: PretrainedConfig, **supported: Any) -> None:
    """Raise ValueError if a setting in the config has a value other than the supported one, given here, or None."""
    for name, allowed in supported.items():
        value = getattr(config, name, allowed)
        if value not in (None, allowed):
            raise ValueError(f"model: {name}={value!r} in its config is not supported")


def find_uneven(sizes: list[tuple[str, int]], divisor: int, where: str) -> str | None:
    """Return what is wrong with the first size that is no multiple of `divisor`; None: all are."""
    uneven = next((f"{name}={size}" for name, size in sizes if size % divisor), None)
    return None if uneven is None else f"{where}, {uneven} must be a multiple of {divisor}"
