"""Falcon-H1 (TII, 2025): each layer has attention and Mamba2 side by side, and factors stand at nearly every matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.checks import as_list
from nanoinfer.kernels.linear.activation import ScaledGate
from nanoinfer.layers.mamba import Mamba2, NormPlace
from nanoinfer.layers.mamba_beside_attention import BesideAttention
from nanoinfer.models.description import Description
from nanoinfer.models.families.hybrids.bamba import NAMES
from nanoinfer.models.families.hybrids.settings import read_mamba
from nanoinfer.models.reading.settings import head_dim_of, positive
from nanoinfer.models.reading.shared import describe_common, read_activation

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe(config: PretrainedConfig) -> Description:
    """Describe a Falcon-H1 model. The factor of its keys is one of the scores."""
    of_gates, of_mlps = _read_factors(config, "mlp_multipliers", 2)
    attention_in, attention_out, key, ssm_out, embeddings, logits = (
        positive(f"{name}_multiplier", getattr(config, f"{name}_multiplier"))
        for name in ("attention_in", "attention_out", "key", "ssm_out", "embedding", "lm_head")
    )
    mamba, ssm_in = _read_mamba(config)
    beside = BesideAttention(mamba, (attention_in, ssm_in), (attention_out, ssm_out))
    return describe_common(
        config,
        names=NAMES,
        mixers=(beside,) * config.num_hidden_layers,
        activation=ScaledGate(read_activation(config, "hidden_act"), of_gates),
        attention_scale=head_dim_of(config) ** -0.5 * key,
        embedding_scale=embeddings,
        logit_scale=logits,
        mlp_scale=of_mlps,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


def _read_mamba(config: PretrainedConfig) -> tuple[Mamba2, float]:
    """Return the sizes of Mamba2, and the factor of what it reads, which without biases is one of its projections."""
    mamba, given = read_mamba(config), positive("ssm_in_multiplier", config.ssm_in_multiplier)
    z, x, b, c, dt = _read_factors(config, "ssm_multipliers", 5)
    if not mamba.biases[0]:
        z, x, b, c, dt, given = z * given, x * given, b * given, c * given, dt * given, 1.0
    place: NormPlace = "before" if config.mamba_norm_before_gate else "behind"
    norm, biases = place if config.mamba_rms_norm else None, (mamba.biases[0], bool(config.projectors_bias))
    return replace(mamba, norm=norm, biases=biases, factors=(z, x, b, c, dt)), given


def _read_factors(config: PretrainedConfig, name: str, count: int) -> list[float]:
    """Read a setting that is a list of so many factors."""
    factors = as_list(getattr(config, name)) or []
    if len(factors) != count:
        raise ValueError(f"model: {name}={getattr(config, name)!r} in its config: must have {count} numbers")
    return [positive(name, factor) for factor in factors]
