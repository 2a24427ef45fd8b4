"""What the configs of these families say of Mamba2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.checks import as_list, as_number
from nanoinfer.layers.mamba import Mamba2
from nanoinfer.models.reading.settings import refuse, size_of
from nanoinfer.models.reading.shared import read_width

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MAMBA = "linear_attention"  # transformers' name in layer_types, which it gives "mamba", too


def read_mamba(config: PretrainedConfig) -> Mamba2:
    """Read the sizes of Mamba2 layers. Raises ValueError, naming the setting, for sizes that no model can have."""
    refuse(config, hidden_act="silu")
    return Mamba2(
        *read_heads(config, "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups"),
        read_width(config, "mamba_d_conv"),
        read_limits(config),
        bool(config.mamba_conv_bias),
        (bool(config.mamba_proj_bias),) * 2,
    )


def read_heads(config: PretrainedConfig, heads: str, dim: str, numbers: str, groups: str) -> tuple[int, int, int, int]:
    """Read the settings of these names, as Mamba2 has them."""
    counts = size_of(config, heads), size_of(config, groups)
    if counts[0] % counts[1]:
        raise ValueError(f"model: {groups}={counts[1]} in its config: must be a divisor of {heads}={counts[0]}")
    return counts[0], size_of(config, dim), size_of(config, numbers), counts[1]


def read_limits(config: PretrainedConfig) -> tuple[float, float]:
    """Return the least and the largest step."""
    limits = [as_number(limit) for limit in as_list(config.time_step_limit) or []]
    match limits:
        case [float() as least, float() as most] if 0 <= least < most:
            return least, most
    raise ValueError(
        f"model: time_step_limit={config.time_step_limit!r} in its config: must be two numbers, the first at least 0,"
        " and less than the second"
    )
