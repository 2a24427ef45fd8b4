"""Reads the rotary settings of a config.json. A rope_type that is not implemented here raises ValueError.

The arithmetic is that of transformers, in float32, so that angles agree to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanoinfer.checks import as_int
from nanoinfer.layers.rotary import Rope
from nanoinfer.models.reading.settings import above_one, head_dim_of, positive

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Parameters = Mapping[str, Any]
ANY_LENGTH = ("default", "linear", "llama3", "yarn")
STRETCHED = ("llama3", "yarn", "longrope")  # types that stretch the rotation beyond the original length


def read_rope(
    config: PretrainedConfig,
    dim: int,
    kind: str | None = None,
    types: tuple[str, ...] = ANY_LENGTH,
    interleaved: bool = False,
) -> Rope:
    """Read a config's rotary embedding, over the first `dim` numbers of a head.

    kind: the layer's type, as in layer_types, if the types differ in their rotary settings
    types: the rope_types that the family supports
    interleaved: as in Rope
    Raises ValueError for another type, and for a setting that no model can have.
    """
    outer: Parameters = config.rope_parameters
    parameters = outer
    if kind is not None and kind in outer:
        parameters = outer[kind]
    elif kind is not None and "rope_theta" in outer:
        # The first releases of transformers 5 keep one mapping. Layers with a window do not use its scaling.
        parameters = outer if kind == "full_attention" else {"rope_theta": outer["rope_theta"]}
    elif kind is not None:
        raise ValueError(f"model: layer_types={kind!r} in its config: rope_parameters has only {', '.join(outer)}")
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in types:
        raise ValueError(
            f"model: rope_type={rope_type!r} in its config is not supported; supported: {', '.join(types)}"
        )
    if rope_type not in (
        "default",
        "proportional",
    ):  # the default type ignores a partial_rotary_factor, in transformers too
        _check_share(config, dim, parameters)
    theta = float(_number(parameters, "rope_theta"))
    plain = 1 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if 2 * len(plain) > head_dim_of(config):
        raise ValueError(
            f"model: head_dim={head_dim_of(config)} in its config: must be even, as its numbers turn in pairs"
        )
    if rope_type == "proportional":
        return Rope(_proportional(config, plain, parameters), interleaved=interleaved)
    if rope_type == "linear":
        return Rope(_floats(plain / _number(parameters, "factor")), interleaved=interleaved)
    if rope_type == "llama3":
        return Rope(_llama3(config, plain, parameters), interleaved=interleaved)
    if rope_type == "yarn":
        return _yarn(config, plain, parameters, outer.get("truncate", True), interleaved)
    if rope_type == "dynamic":
        return plain_rope(dim, _stretched_theta(theta, dim, parameters), interleaved)
    if rope_type == "longrope":
        return _longrope(config, plain, parameters)
    return Rope(_floats(plain), interleaved=interleaved)


def plain_rope(dim: int, theta: float, interleaved: bool = False) -> Rope:
    """Return the rotary embedding of a base, over the first `dim` numbers of a head, which nothing stretches."""
    return Rope(_floats(1 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)), interleaved=interleaved)


def in_sections(config: PretrainedConfig, rope: Rope | None, default: list[int], interleaved: bool) -> Rope | None:
    """Let each pair of a rope turn by one of three positions (Qwen2-VL, Wang et al., 2024); None stays None.

    default: mrope_section, if the config has none: how many pairs have each position
    interleaved: pairs 0, 3, 6 ... have the first position, 1, 4 ... the second, 2, 5 ... the third, as far as each has
        pairs left; the first position has the rest. Otherwise the first pairs have the first position, and so on
    """
    if rope is None:
        return None
    counts, pairs = config.rope_parameters.get("mrope_section", default), len(rope.frequencies)
    are_counts = isinstance(counts, list) and all(as_int(count) is not None and count >= 0 for count in counts)
    if not are_counts or len(counts) != 3 or not (interleaved or sum(counts) == pairs):
        wanted = "three counts" if interleaved else f"three counts that add up to {pairs}"
        raise ValueError(f"model: mrope_section={counts!r} in its config: must be {wanted}")
    if interleaved:
        return replace(rope, sections=tuple(i % 3 if i < 3 * counts[i % 3] else 0 for i in range(pairs)))
    return replace(rope, sections=tuple(part for part, count in enumerate(counts) for _ in range(count)))


def read_rotary_dim(config: PretrainedConfig, kind: str | None = None, usual: float = 1.0) -> int:
    """Return how many of a head's numbers are rotated: the share that partial_rotary_factor says, or else `usual`.

    kind: as for read_rope
    """
    outer: Parameters = config.rope_parameters
    return int(head_dim_of(config) * _share_of(config, outer if kind is None else outer.get(kind, outer), usual))


def _share_of(config: PretrainedConfig, parameters: Parameters, usual: float = 1.0) -> float:
    share = _number(parameters, "partial_rotary_factor", usual)
    if share > 1 or int(head_dim_of(config) * share) < 1:
        raise ValueError(f"model: partial_rotary_factor={share!r} in its config: must be above 0, at most 1")
    return share


def _check_share(config: PretrainedConfig, dim: int, parameters: Parameters) -> None:
    share = parameters.get("partial_rotary_factor")
    if share is not None and int(head_dim_of(config) * positive("partial_rotary_factor", share)) != dim:
        raise ValueError(f"model: partial_rotary_factor={share!r} in its config is not supported here")


def read_original_length(config: PretrainedConfig, parameters: Parameters) -> int:
    """Return the length that the model was trained on, before its rotation was stretched.

    If the type is a stretched one and all layers share their rotary settings, the config's own
    original_max_position_embeddings overrides the one in these settings.
    """
    name = "original_max_position_embeddings"
    is_stretched = parameters.get("rope_type") in STRETCHED
    outside = getattr(config, name, None) if is_stretched and parameters is config.rope_parameters else None
    return int(above_one(name, outside or parameters.get(name)))


def read_max_position(config: PretrainedConfig) -> int:
    """Return the most tokens that a sequence may have: max_position_embeddings, or more where YaRN stretches further.

    Configs of the other types that stretch the rotation have the stretched length as max_position_embeddings. Those of
    YaRN often keep the original one, or a number of their own. No layer's stretch makes the limit smaller.
    """
    outer: Parameters = config.rope_parameters
    stretched = [
        int(original * _stretch(config, parameters, original))
        for parameters in (outer, *outer.values())  # all layers may share their settings, or the kinds have their own
        if isinstance(parameters, Mapping) and parameters.get("rope_type") == "yarn"
        for original in [read_original_length(config, parameters)]
    ]
    return max([config.max_position_embeddings, *stretched])


def _number(parameters: Parameters, name: str, default: float | None = None) -> float:
    return positive(name, parameters.get(name, default))


def _llama3(config: PretrainedConfig, plain: Tensor, parameters: Parameters) -> tuple[float, ...]:
    """Llama 3.1 (Llama Team, 2024): stretches long waves, keeps short ones, and mixes both for those in between."""
    factor, low, high = (_number(parameters, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = read_original_length(config, parameters)
    if low >= high:
        raise ValueError(f"model: low_freq_factor={low!r} in its config: must be less than high_freq_factor={high!r}")
    waves = 2 * math.pi / plain
    mixed = (original / waves - low) / (high - low)
    between = (1 - mixed) * (plain / factor) + mixed * plain
    stretched = torch.where(waves > original / low, plain / factor, plain)
    is_between = ~(waves < original / high) & ~(waves > original / low)
    return _floats(torch.where(is_between, between, stretched))


def _proportional(config: PretrainedConfig, plain: Tensor, parameters: Parameters) -> tuple[float, ...]:
    """Gemma 4 (Gemma Team, 2026): turns the first pairs of a head, and leaves the others where they are."""
    turning = int(_share_of(config, parameters) * head_dim_of(config) // 2)
    plain = plain / _number(parameters, "factor", 1.0)
    return _floats(plain.where(torch.arange(len(plain)) < turning, 0.0))


def _yarn(config: PretrainedConfig, plain: Tensor, parameters: Parameters, truncate: bool, interleaved: bool) -> Rope:
    """YaRN (Peng et al., 2023): keeps waves that turn often within the original length, and stretches the others."""
    dim, theta = 2 * len(plain), above_one("rope_theta", parameters["rope_theta"])
    original = read_original_length(config, parameters)
    factor = _stretch(config, parameters, original)

    def pair_that_turns(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_that_turns(positive("beta_fast", parameters.get("beta_fast") or 32))
    high = pair_that_turns(positive("beta_slow", parameters.get("beta_slow") or 1))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    stretch = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - stretch
    frequencies = plain / factor * (1 - keep) + plain * keep
    return Rope(_floats(frequencies), _yarn_factor(factor, parameters), interleaved)


def _yarn_factor(factor: float, parameters: Parameters) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(positive("attention_factor", given))
    scale, scale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")

    def of(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if not scale or not scale_all:
        return of(1)
    return of(positive("mscale", scale)) / of(positive("mscale_all_dim", scale_all))


def _stretched_theta(theta: float, dim: int, parameters: Parameters) -> float:
    """HunYuan (Tencent, 2025): the base that a fixed factor stretches, whatever the length."""
    return theta * float(_number(parameters, "alpha")) ** (dim / (dim - 2))


def _longrope(config: PretrainedConfig, plain: Tensor, parameters: Parameters) -> Rope:
    """LongRoPE (Ding et al., 2024): a divisor for each pair, and another in sequences beyond the original length."""
    original = read_original_length(config, parameters)
    stretch = _stretch(config, parameters, original)
    factor = parameters.get("attention_factor")
    if factor is None:
        factor = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    dim, theta = 2 * len(plain), float(parameters["rope_theta"])
    for name in ("short_factor", "long_factor"):
        divisors = parameters.get(name)
        if not isinstance(divisors, list) or len(divisors) != len(plain):
            raise ValueError(f"model: {name}={divisors!r} in its config: must be a list of {len(plain)} numbers")
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    short, long = (
        _floats(1 / (torch.tensor([float(positive(name, divisor)) for divisor in parameters[name]]) * theta**exponents))
        for name in ("short_factor", "long_factor")
    )
    return Rope(short, float(factor), long_frequencies=long, long_from=original)


def _stretch(config: PretrainedConfig, parameters: Parameters, original: int) -> float:
    given = parameters.get("factor")
    return config.max_position_embeddings / original if given is None else positive("factor", given)


def _floats(x: Tensor) -> tuple[float, ...]:
    return tuple(x.tolist())
