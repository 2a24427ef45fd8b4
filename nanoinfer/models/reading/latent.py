"""Reads the settings of a config.json whose model has latent attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from nanoinfer.layers.latent_attention import LatentSizes
from nanoinfer.models.attention.heads import KVHeads
from nanoinfer.models.description import Description
from nanoinfer.models.reading.rope import ANY_LENGTH, read_rope
from nanoinfer.models.reading.settings import positive, size_of
from nanoinfer.models.reading.shared import describe_common

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe_latent(
    config: PretrainedConfig, interleaved: bool, types: tuple[str, ...] = ANY_LENGTH, **own: Any
) -> Description:
    """Build a Description whose layers have latent attention; `own`, the family's fields, override the others.

    interleaved, types: as for read_rope. Raises ValueError, naming the setting, for sizes that no model can have.
    """
    layers = config.num_hidden_layers
    sizes = LatentSizes(
        config.num_attention_heads,
        size_of(config, "kv_lora_rank"),
        size_of(config, "qk_nope_head_dim"),
        size_of(config, "qk_rope_head_dim"),
        size_of(config, "v_head_dim"),
        None if config.q_lora_rank is None else size_of(config, "q_lora_rank"),
        bool(config.attention_bias),
    )
    if sizes.turning % 2:
        raise ValueError(
            f"model: qk_rope_head_dim={sizes.turning} in its config: must be even, as numbers turn in pairs"
        )
    rope = read_rope(config, sizes.turning, types=types, interleaved=interleaved)
    fields: dict[str, Any] = {
        "latent": sizes,
        "kv_heads": (KVHeads(1, sizes.cached),) * layers,
        "ropes": (rope,) * layers,
        "attention_scale": _attention_scale(config, sizes),
    }
    return describe_common(config, **{**fields, **own})


def _attention_scale(config: PretrainedConfig, sizes: LatentSizes) -> float:
    """Return the factor of scores, which a stretched rotation enlarges (YaRN, Peng et al., 2023, by DeepSeek-V2)."""
    scale, parameters = float((sizes.plain + sizes.turning) ** -0.5), config.rope_parameters
    of_all = parameters.get("mscale_all_dim")
    if parameters.get("rope_type", "default") == "default" or not of_all:
        return scale
    factor = positive("factor", parameters.get("factor"))
    enlarged = 1.0 if factor <= 1 else 0.1 * positive("mscale_all_dim", of_all) * math.log(factor) + 1.0
    return scale * enlarged**2
