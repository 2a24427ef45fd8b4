"""GPT-2 (Radford et al., 2019): vectors for positions; and GPT-BigCode (Li et al., 2023), with one head of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoinfer.layers.norm import NormKind
from nanoinfer.layers.positions import PositionTable
from nanoinfer.models.attention.heads import KVHeads
from nanoinfer.models.description import Description
from nanoinfer.models.families.classics.spelling import spelling
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.settings import head_dim_of, refuse, size_of
from nanoinfer.models.reading.shared import describe_common, heads_of_their_own

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    attention_norm="ln_1",
    mlp_norm="ln_2",
    last_norm="model.ln_f",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
)
MATRICES = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def describe_gpt2(config: PretrainedConfig) -> Description:
    """Describe a GPT-2, whose matrices are stored as [in, out]."""
    refuse(config, scale_attn_by_inverse_layer_idx=False)
    return _describe(config, MATRICES)


def describe_gpt_bigcode(config: PretrainedConfig) -> Description:
    """Describe a GPT-BigCode: all heads share the keys and values of one, or each has its own beside its queries."""
    if not config.multi_query:
        return _describe(config, (), qkv_layout="groups")
    return _describe(config, (), kv_heads=(KVHeads(1, head_dim_of(config)),) * config.num_hidden_layers)


def _describe(config: PretrainedConfig, turned: tuple[str, ...], **own: Any) -> Description:
    refuse(config, scale_attn_weights=True, add_cross_attention=False)
    rows = size_of(config, "max_position_embeddings")
    fields = {
        "names": NAMES,
        "spelling": spelling(("transformer",), "wte", "h", ("wpe", "ln_f"), turned=turned),
        "norm": NormKind(centred=True, has_bias=True),
        "positions": PositionTable("model.wpe", rows),
        "max_position": rows,
        "kv_heads": heads_of_their_own(config),
        "ropes": (None,) * config.num_hidden_layers,
        "intermediate_size": 4 * config.hidden_size if config.n_inner is None else size_of(config, "n_inner"),
        "is_gated": False,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
    }
    return describe_common(config, "activation_function", "layer_norm_epsilon", **(fields | own))
