"""MiMo-V2-Flash (Xiaomi, 2025): values that are smaller than keys, and sinks in the layers that have a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.models.attention.heads import KVHeads
from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames, PredictionLayers
from nanoinfer.models.reading.experts import listed_layers, read_corrected_experts
from nanoinfer.models.reading.rope import read_rope, read_rotary_dim
from nanoinfer.models.reading.settings import count_of, head_dim_of, kv_count_of, positive_or_none, refuse, size_of
from nanoinfer.models.reading.shared import describe_common, read_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(sinks=("sinks", "attention_sink_bias"))
SHARE = 0.334  # of a head that is rotated, if the config has no other
PREDICTION = "model.mtp.layers"  # has the layers that predict further tokens
PREDICTING = 3  # so many are in the published files, of which not each config tells


def describe(config: PretrainedConfig) -> Description:
    """Describe a MiMo-V2-Flash model: layers with a window have twice the heads of keys, and their own rotation."""
    windows = read_windows(config, config.sliding_window)
    has_window = tuple(window is not None for window in windows)
    kinds = {kind: _read_heads(config, 1 + kind) for kind in set(has_window)}
    ropes = {name: read_rope(config, read_rotary_dim(config, name, SHARE), name) for name in set(config.layer_types)}
    sparse = listed_layers(config)
    _refuse_other_layers(config, has_window, sparse)
    return describe_common(
        config,
        names=NAMES,
        windows=windows,
        ropes=tuple(ropes[name] for name in config.layer_types),
        kv_heads=tuple(kinds[kind] for kind in has_window),
        sinks=has_window,
        qkv_bias=config.attention_bias,
        value_scale=float(positive_or_none("attention_value_scale", config.attention_value_scale) or 1.0),
        experts=read_corrected_experts(config, sparse, shared_field=None),
        skipped=(f"{PREDICTION}.",),
        prediction=_read_prediction(config, has_window),
    )


def _read_prediction(config: PretrainedConfig, has_window: tuple[bool, ...]) -> PredictionLayers | None:
    """Read the layers that predict further tokens: each has a window, an MLP, and norms of its own.

    The structure is that of SGLang's (sglang/srt/models/mimo_v2_flash_nextn.py, 2025).
    """
    count = PREDICTING
    if getattr(config, "num_nextn_predict_layers", None) is not None:
        count = count_of(config, "num_nextn_predict_layers")
    if not count or True not in has_window:
        return None
    like, norms = has_window.index(True), {"norm": "{}final_layernorm", "mlp_norm": "pre_mlp_layernorm"}
    return PredictionLayers(0, PREDICTION, count, like, has_experts=False, **norms)


def _read_heads(config: PretrainedConfig, times: int) -> KVHeads:
    """Read the heads of layers that have so many times those that the config says."""
    heads, count, dim = config.num_attention_heads, times * kv_count_of(config), head_dim_of(config)
    if heads % count:
        raise ValueError(
            f"model: num_key_value_heads={kv_count_of(config)} in its config: {count}, as many as a layer has, must be"
            f" a divisor of num_attention_heads={heads}"
        )
    value_dim = size_of(config, "v_head_dim")
    if value_dim % 2:
        raise ValueError(f"model: v_head_dim={value_dim} in its config: must be even")
    return KVHeads(count, dim, value_dim=None if value_dim == dim else value_dim)


def _refuse_other_layers(config: PretrainedConfig, has_window: tuple[bool, ...], sparse: tuple[bool, ...]) -> None:
    """Raise ValueError if settings of published configs, which transformers does not read, say something else."""
    parameters = config.rope_parameters
    refuse(
        config,
        hybrid_layer_pattern=[int(own) for own in has_window],
        moe_layer_freq=[int(own) for own in sparse],
        swa_num_attention_heads=config.num_attention_heads,
        swa_num_key_value_heads=2 * kv_count_of(config),
        swa_head_dim=head_dim_of(config),
        swa_v_head_dim=config.v_head_dim,
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        n_shared_experts=0,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        layernorm_epsilon=config.rms_norm_eps,
        **{
            name: parameters[kind]["rope_theta"]
            for name, kind in (("rope_theta", "full_attention"), ("swa_rope_theta", "sliding_attention"))
            if kind in parameters
        },
    )
