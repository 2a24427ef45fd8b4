"""MPT (MosaicML, 2023): ALiBi in place of positions, and no bias anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.layers.norm import NormKind
from nanoinfer.models.attention.alibi import alibi_slopes
from nanoinfer.models.description import Description
from nanoinfer.models.families.classics.spelling import spelling
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.settings import positive, positive_or_none, refuse, size_of
from nanoinfer.models.reading.shared import describe_common, heads_of_their_own

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    attention_norm="norm_1",
    mlp_norm="norm_2",
    last_norm="model.norm_f",
    qkv=("attn.Wqkv",),
    o="attn.out_proj",
    gate_up=("ffn.up_proj",),
    down="ffn.down_proj",
)


def describe(config: PretrainedConfig) -> Description:
    """Describe an MPT, as transformers computes it: what other settings of its config say has no effect there."""
    attention = config.attn_config
    refuse(config, no_bias=True, logit_scale=None, expansion_ratio=4, embedding_fraction=1.0)
    refuse(attention, alibi=True, alibi_bias_max=8, qk_ln=False, prefix_lm=False, attn_type="multihead_attention")
    scale = attention.softmax_scale
    return describe_common(
        config,
        None,
        "layer_norm_epsilon",
        names=NAMES,
        spelling=spelling(("transformer",), "wte", "blocks", ("norm_f",)),
        norm=NormKind(centred=True),
        alibi=alibi_slopes(config.num_attention_heads),
        max_position=size_of(config, "max_seq_len"),
        kv_heads=heads_of_their_own(config),
        ropes=(None,) * config.num_hidden_layers,
        qkv_limit=positive_or_none("clip_qkv", attention.clip_qkv),
        **({} if scale is None else {"attention_scale": positive("softmax_scale", scale)}),
        intermediate_size=4 * config.hidden_size,
        activation="gelu",
        is_gated=False,
    )
