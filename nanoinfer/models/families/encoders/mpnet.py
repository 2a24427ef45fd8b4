"""MPNet (Song et al., 2020): BERT with biases of scores by the distance of a key, and without token types."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.layers.text_attention import DistanceBiases
from nanoinfer.models.description import Description
from nanoinfer.models.families.encoders.bert import PAIR_HEAD, describe_kin
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.settings import size_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    attention_norm="attention.LayerNorm",
    mlp_norm="output.LayerNorm",
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    o="attention.attn.o",
    gate_up=("intermediate.dense",),
    down="output.dense",
)
FIRST = 2  # the row of position 0


def describe(config: PretrainedConfig) -> Description:
    """Describe an MPNet."""
    biases = DistanceBiases("model.encoder.relative_attention_bias", size_of(config, "relative_attention_num_buckets"))
    own = {"names": NAMES, "token_types": None, "distance_biases": biases, "text_head": PAIR_HEAD}
    return describe_kin(config, "mpnet", FIRST, **own)
