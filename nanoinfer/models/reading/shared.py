"""Reads the settings of a config.json that several families share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanoinfer.kernels.delta.chunks import CHUNK
from nanoinfer.kernels.linear.activation import Function
from nanoinfer.models.attention.heads import KVHeads
from nanoinfer.models.description import Description, MixerSizes
from nanoinfer.models.module_names import PredictionLayers
from nanoinfer.models.reading.rope import read_max_position, read_rope
from nanoinfer.models.reading.settings import head_dim_of, kv_count_of, of_layers, positive_or_none, refuse, size_of
from nanoinfer.weights.formats.table import read_formats
from nanoinfer.weights.names import AS_STORED

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ACTIVATION_NAMES: dict[str, Function] = {
    "silu": "silu",
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}  # a config's name: ours


def describe_common(
    config: PretrainedConfig, activation_field: str | None = "hidden_act", eps_field: str = "rms_norm_eps", **own: Any
) -> Description:
    """Build a Description from the settings that all families share; `own`, the family's fields, override these.

    If `own` has no kv_heads or ropes, all layers have the same; if it has no windows, no layer has one; without mixers
    all attend; without max_position, the rotary settings count, too.
    activation_field: the setting that names the activation; None: it is SiLU
    eps_field: the setting with the number that norms add
    Raises ValueError, naming the setting, for a setting that no family here implements.
    """
    refuse(config, is_causal=True)
    head_dim = own["kv_heads"][0].dim if "kv_heads" in own else head_dim_of(config)
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", 0),
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "norm_eps": own.get("norm_eps") or getattr(config, eps_field),
        "tied": bool(getattr(config, "tie_word_embeddings", False)),
        "activation": "silu" if activation_field is None else read_activation(config, activation_field),
        "attention_scale": head_dim**-0.5,
        "windows": (None,) * config.num_hidden_layers,
        "mixers": (None,) * config.num_hidden_layers,
        "formats": replace(read_formats(config), spelling=own.get("spelling", AS_STORED)),
    }
    if "kv_heads" not in own:
        fields["kv_heads"] = (KVHeads(kv_count_of(config), head_dim),) * config.num_hidden_layers
    if "max_position" not in own:
        fields["max_position"] = read_max_position(config)
    if "ropes" not in own:
        fields["ropes"] = (read_rope(config, head_dim),) * config.num_hidden_layers
    return Description(**{**fields, **own})


def read_activation(config: PretrainedConfig, name: str) -> Function:
    """Return the function that a setting names; raises ValueError if there is none of that name here."""
    activation = getattr(config, name)
    if activation not in ACTIVATION_NAMES:
        raise ValueError(
            f"model: {name}={activation!r} in its config is not supported; supported: {', '.join(ACTIVATION_NAMES)}"
        )
    return ACTIVATION_NAMES[activation]


def heads_of_their_own(config: PretrainedConfig) -> tuple[KVHeads, ...]:
    """Return each layer's heads of keys where each query head has its own; a config may say otherwise, unread."""
    heads = KVHeads(config.num_attention_heads, config.hidden_size // config.num_attention_heads)
    return (heads,) * config.num_hidden_layers


def same_windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    """Return each layer's window: sliding_window for all layers, or None if the config has none."""
    return (positive_or_none("sliding_window", config.sliding_window),) * config.num_hidden_layers


def refuse_windows(config: PretrainedConfig) -> None:
    """Raise ValueError if layer_types gives a layer a window; for families that implement none."""
    read_windows(config, None)


def read_windows(config: PretrainedConfig, window: int | None) -> tuple[int | None, ...]:
    """Return each layer's window: `window` where layer_types says "sliding_attention", else None.

    Raises ValueError for a type other than "full_attention" and, if `window` is set, "sliding_attention".
    """
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


def read_mixers(config: PretrainedConfig, kinds: dict[str, MixerSizes]) -> tuple[MixerSizes | None, ...]:
    """Return each layer's mixer: that of the kind that layer_types says, and None, attention, for "full_attention".

    Raises ValueError for another type, and if no layer attends: then nothing would be in the KV cache.
    """
    types, known = of_layers(config, "layer_types"), (*kinds, "full_attention")
    for kind in types:
        if kind not in known:
            raise ValueError(
                f"model: layer_types={kind!r} in its config is not supported; supported here: {', '.join(known)}"
            )
    if "full_attention" not in types:
        raise ValueError("model: layer_types in its config: some layer must be 'full_attention'")
    return tuple(kinds.get(kind) for kind in types)


def read_width(config: PretrainedConfig, name: str) -> int:
    """Return how many tokens a convolution sees, its own the last; raises ValueError if prompts are cut into fewer."""
    width = size_of(config, name)
    if width > CHUNK:
        raise ValueError(f"model: {name}={width} in its config: must be at most {CHUNK}")
    return width


def guessing_layers(config: PretrainedConfig, count: int | None) -> tuple[str, ...]:
    """Return how the names of the layers begin that guess further tokens: so many, which follow the model's own."""
    first = config.num_hidden_layers
    return tuple(f"model.layers.{layer}." for layer in range(first, first + (count or 0)))


def predicting_layers(config: PretrainedConfig, count: int | None) -> dict[str, Any]:
    """Return the fields of a Description of which so many layers behind the model's own predict further tokens.

    Each is a prediction head, of which nanoinfer runs the first.
    """
    layers = PredictionLayers(config.num_hidden_layers) if count else None
    return {"skipped": guessing_layers(config, count), "prediction": layers}
