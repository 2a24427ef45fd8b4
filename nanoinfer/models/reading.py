"""What families read from a config.json alike."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from nanoinfer.models.description import Description
from nanoinfer.models.rope import read_rope
from nanoinfer.models.settings import head_dim_of, of_layers, positive_or_none, refuse

ACTIVATION_NAMES = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # by their names in configs


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
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
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


def same_windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    """One window for all layers, if any."""
    return (positive_or_none("sliding_window", config.sliding_window),) * config.num_hidden_layers


def refuse_windows(config: PretrainedConfig) -> None:
    """Raise ValueError when layers have windows, in a family that has none."""
    read_windows(config, None)


def read_windows(config: PretrainedConfig, window: int | None) -> tuple[int | None, ...]:
    """A window a layer, by its layer_types. Raises ValueError for a type that is not here."""
    has_kinds = getattr(config, "layer_types", None) is not None
    kinds = of_layers(config, "layer_types") if has_kinds else ["full_attention"] * config.num_hidden_layers
    positive_or_none("sliding_window", window)
    supported = ("full_attention", "sliding_attention") if window else ("full_attention",)
    for kind in kinds:
        if kind not in supported:
            raise ValueError(
                f"model: layer_types={kind!r} in its config is not supported; supported here: {', '.join(supported)}"
            )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
