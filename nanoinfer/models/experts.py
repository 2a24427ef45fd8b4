"""Reads the settings of a config.json that say which layers have experts, and what these are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.checks import as_int
from nanoinfer.models.description import Experts
from nanoinfer.models.settings import of_layers, size_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def read_experts(
    config: PretrainedConfig,
    layers: tuple[bool, ...],
    size_field: str,
    normalised: bool | None = None,
    shared_size: int | None = None,
    count_field: str = "num_experts",
    used_field: str = "num_experts_per_tok",
) -> Experts | None:
    """Read the experts of the given layers; returns None if no layer has any.

    layers: for each layer, whether it has experts
    size_field: the setting with an expert's intermediate size
    normalised: whether a token's weights add up to 1; None: as norm_topk_prob says
    count_field, used_field: the settings with the number of experts, and of those that a token uses
    Raises ValueError, naming the setting, for sizes that no model can have.
    """
    if not any(layers):
        return None
    count, used = size_of(config, count_field), size_of(config, used_field)
    if used > count:
        raise ValueError(f"model: {used_field}={used} in its config: must be at most the number of experts, {count}")
    if normalised is None:
        normalised = bool(config.norm_topk_prob)
    return Experts(layers, count, used, size_of(config, size_field), normalised, shared_size=shared_size)


def sparse_layers(config: PretrainedConfig) -> tuple[bool, ...]:
    """Return which layers have experts: those that decoder_sparse_step counts and mlp_only_layers does not name."""
    layers, dense = config.num_hidden_layers, config.mlp_only_layers or []
    if as_int(config.num_experts) == 0:
        return (False,) * layers
    step = size_of(config, "decoder_sparse_step")
    if any(as_int(layer) not in range(layers) for layer in dense):
        raise ValueError(f"model: mlp_only_layers={dense!r} in its config: must be layers from 0 to {layers - 1}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def listed_layers(config: PretrainedConfig) -> tuple[bool, ...]:
    """Return which layers have experts: those that mlp_layer_types calls "sparse"; the others must be "dense"."""
    kinds = of_layers(config, "mlp_layer_types")
    for kind in kinds:
        if kind not in ("sparse", "dense"):
            raise ValueError(f"model: mlp_layer_types={kind!r} in its config: must be 'sparse' or 'dense'")
    return tuple(kind == "sparse" for kind in kinds)
