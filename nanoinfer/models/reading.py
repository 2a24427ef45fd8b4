"""What families read from a config.json alike."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from nanoinfer.models.description import Description
from nanoinfer.models.rope import read_rope

ACTIVATION_NAMES = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # what configs call them, and what we do


def positive(name: str, value: Any) -> Any:
    """A setting's value. Raises ValueError, naming it, when that is no number above 0."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"model: {name}={value!r} in its config: must be a number above 0")
    return value


def head_dim_of(config: PretrainedConfig) -> int:
    """The size of a head: as the config has it, or what the hidden size leaves each."""
    heads = positive("num_attention_heads", config.num_attention_heads)
    given = getattr(config, "head_dim", None)
    return config.hidden_size // heads if given is None else positive("head_dim", given)


def describe_common(config: PretrainedConfig, activation_field: str = "hidden_act", **own: Any) -> Description:
    """A Description of the fields that all families share, and a family's own, which come first.

    Where a family says nothing of ropes or windows, all layers are rotated alike, and none has a window.

    Raises ValueError, naming the setting, for what no family of ours implements.
    """
    refuse(config, quantization_config=None, is_causal=True)
    activation = getattr(config, activation_field)
    if activation not in ACTIVATION_NAMES:
        raise ValueError(
            f"model: {activation_field}={activation!r} in its config is not supported; supported:"
            f" {', '.join(ACTIVATION_NAMES)}"
        )
    head_dim = head_dim_of(config)
    heads = config.num_attention_heads
    kv_heads = heads if config.num_key_value_heads is None else config.num_key_value_heads
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"):
        positive(name, getattr(config, name))
    if heads % positive("num_key_value_heads", kv_heads):
        raise ValueError(
            f"model: num_key_value_heads={kv_heads} in its config does not divide num_attention_heads={heads}"
        )
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_position": config.max_position_embeddings,
        "norm_eps": config.rms_norm_eps,
        "tied": bool(getattr(config, "tie_word_embeddings", False)),
        "activation": ACTIVATION_NAMES[activation],
        "attention_scale": head_dim**-0.5,
        "windows": (None,) * config.num_hidden_layers,
    }
    if "ropes" not in own:
        fields["ropes"] = (read_rope(config, head_dim),) * config.num_hidden_layers
    return Description(**{**fields, **own})


def refuse(config: PretrainedConfig, **supported: Any) -> None:
    """Raise ValueError when the config has one of these settings, and another value than the supported one."""
    for name, allowed in supported.items():
        value = getattr(config, name, allowed)
        if value not in (None, allowed):
            raise ValueError(f"model: {name}={value!r} in its config is not supported")


def refuse_windows(config: PretrainedConfig) -> None:
    """Raise ValueError when layers have windows, in a family that has none."""
    read_windows(config, None)


def same_window(config: PretrainedConfig) -> tuple[int | None, ...]:
    """The same window for every layer, if any."""
    window = config.sliding_window
    return (window if window is None else positive("sliding_window", window),) * config.num_hidden_layers


def read_windows(config: PretrainedConfig, window: int | None) -> tuple[int | None, ...]:
    """A window a layer, by its layer_types. Raises ValueError for a type that is not here."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    supported = ("full_attention", "sliding_attention") if window else ("full_attention",)
    for kind in kinds:
        if kind not in supported:
            raise ValueError(
                f"model: layer_types={kind!r} in its config is not supported; supported here: {', '.join(supported)}"
            )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
