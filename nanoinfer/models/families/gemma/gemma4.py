"""Gemma 4 (Gemma Team, 2026): larger heads in layers without a window, normalised values, a scale behind each layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.checks import as_int
from nanoinfer.layers.experts_beside_mlp import BesideMLP
from nanoinfer.layers.layer_inputs import LayerInputSizes
from nanoinfer.models.attention.heads import KVHeads
from nanoinfer.models.description import Description
from nanoinfer.models.families.gemma import gemma
from nanoinfer.models.reading.experts import MoEConfig, read_experts
from nanoinfer.models.reading.rope import read_rope
from nanoinfer.models.reading.settings import head_dim_of, kv_count_of, of_layers, positive_or_none, refuse, size_of
from nanoinfer.models.reading.shared import describe_common, read_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = replace(
    gemma.NAMES,
    layer_scale="layer_scalar",
    routers=("router.proj",),
    expert_factors=("router.per_expert_scale",),
    expert="experts.{}",
    expert_stacks=(("experts.gate_up_proj", "experts.down_proj"),),
)
INPUTS = LayerInputSizes(
    size=0,
    embedding="model.embed_tokens_per_layer",
    projection="model.per_layer_model_projection",
    norm="model.per_layer_projection_norm",
    gate="per_layer_input_gate",
    output="per_layer_projection",
    post_norm="post_per_layer_input_norm",
)
BESIDE = BesideMLP(
    mlp_post_norm="post_feedforward_layernorm_1",
    experts_norm="pre_feedforward_layernorm_2",
    experts_post_norm="post_feedforward_layernorm_2",
    router_scale="router.scale",
)
ROPES = ("default", "proportional")


def describe(config: PretrainedConfig) -> Description:
    """Describe a Gemma 4 model, with experts or without."""
    if config.use_bidirectional_attention != "vision":  # text does not notice it
        refuse(config, use_bidirectional_attention=None)
    windows = read_windows(config, config.sliding_window)
    kinds = of_layers(config, "layer_types")
    of_kind = {kind: config.per_layer_config[kind] for kind in kinds}
    ropes = {kind: read_rope(own, head_dim_of(own), kind, ROPES) for kind, own in of_kind.items()}
    heads = {kind: _read_heads(own, kind) for kind, own in of_kind.items()}
    first_shared = config.num_hidden_layers - _read_shared(config, kinds)
    return describe_common(
        of_kind[kinds[0]],
        "hidden_activation",
        names=NAMES,
        windows=windows,
        ropes=tuple(ropes[kind] for kind in kinds),
        kv_heads=(*(heads[kind] for kind in kinds[:first_shared]), *_sharing(heads, kinds, first_shared)),
        qk_norm="head",
        value_norm=True,
        attention_scale=1.0,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        embedding_scale=config.hidden_size**0.5,
        experts=_read_experts(config),
        double_from=first_shared if config.use_double_wide_mlp else None,
        layer_inputs=_read_layer_inputs(config),
        logit_cap=positive_or_none("final_logit_softcapping", config.final_logit_softcapping),
    )


def _read_heads(config: PretrainedConfig, kind: str) -> KVHeads:
    """Read the heads of the layers of one kind; config: as it holds for these."""
    return KVHeads(kv_count_of(config), head_dim_of(config), config.attention_k_eq_v and kind == "full_attention")


def _read_shared(config: PretrainedConfig, kinds: list[str]) -> int:
    """Read how many layers, the last ones, use the keys and values of an earlier layer of their kind."""
    shared = config.num_kv_shared_layers
    if as_int(shared) is None or shared < 0 or not set(kinds) <= set(kinds[: max(len(kinds) - shared, 0)]):
        raise ValueError(
            f"model: num_kv_shared_layers={shared!r} in its config: must be an integer of at least 0, and leave a layer"
            " of each of layer_types"
        )
    return int(shared)


def _sharing(heads: dict[str, KVHeads], kinds: list[str], first_shared: int) -> list[KVHeads]:
    """Return the heads of the layers from first_shared on: the last layer of its kind before these is the source."""
    sources = {kind: layer for layer, kind in enumerate(kinds[:first_shared])}
    return [replace(heads[kind], source=sources[kind]) for kind in kinds[first_shared:]]


def _read_layer_inputs(config: PretrainedConfig) -> LayerInputSizes | None:
    if not getattr(config, "hidden_size_per_layer_input", None):
        return None
    if config.vocab_size_per_layer_input != config.vocab_size:
        raise ValueError(
            f"model: vocab_size_per_layer_input={config.vocab_size_per_layer_input!r} in its config: must be"
            f" vocab_size={config.vocab_size}"
        )
    size = size_of(config, "hidden_size_per_layer_input")
    return replace(INPUTS, size=size, image_token=config.pad_token_id or 0)


def _read_experts(config: PretrainedConfig) -> MoEConfig | None:
    if not getattr(config, "enable_moe_block", False):
        return None
    layers = (True,) * config.num_hidden_layers
    experts = read_experts(config, layers, "moe_intermediate_size", normalised=True, used_field="top_k_experts")
    if experts is None:
        return None
    return replace(experts, routing=replace(experts.routing, logit_scale=config.hidden_size**-0.5), beside=BESIDE)
