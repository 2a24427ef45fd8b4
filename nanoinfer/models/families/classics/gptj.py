"""GPT-J (Wang and Komatsuzaki, 2021) and CodeGen (Nijkamp et al., 2022): branches side by side, behind one norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoinfer.layers.norm import NormKind
from nanoinfer.models.description import Description
from nanoinfer.models.families.classics.spelling import spelling
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.rope import plain_rope
from nanoinfer.models.reading.settings import head_dim_of, refuse, size_of
from nanoinfer.models.reading.shared import describe_common, heads_of_their_own

if TYPE_CHECKING:
    from transformers import PretrainedConfig

QKV = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
BLOCKS = 4  # of heads, whose queries, values and keys lie together in a CodeGen's tensor


def describe_gptj(config: PretrainedConfig) -> Description:
    """Describe a GPT-J."""
    return _describe(config, QKV)


def describe_codegen(config: PretrainedConfig) -> Description:
    """Describe a CodeGen, which has queries, keys and values in one tensor."""
    if config.num_attention_heads % BLOCKS:
        raise ValueError(
            f"model: n_head={config.num_attention_heads} in its config: must be a multiple of {BLOCKS} for a CodeGen"
        )
    return _describe(config, ("attn.qkv_proj",), qkv_layout="quarters")


def _describe(config: PretrainedConfig, qkv: tuple[str, ...], **own: Any) -> Description:
    refuse(config, add_cross_attention=False)
    head_dim, turned = head_dim_of(config), size_of(config, "rotary_dim")
    if turned > head_dim or turned % 2:
        raise ValueError(f"model: rotary_dim={turned} in its config: must be even, and at most {head_dim}, a head's")
    return describe_common(
        config,
        "activation_function",
        "layer_norm_epsilon",
        names=ModuleNames(
            attention_norm="ln_1",
            mlp_norm=None,
            last_norm="model.ln_f",
            qkv=qkv,
            o="attn.out_proj",
            gate_up=("mlp.fc_in",),
            down="mlp.fc_out",
        ),
        spelling=spelling(("transformer",), "wte", "h", ("ln_f",)),
        norm=NormKind(centred=True, has_bias=True),
        is_parallel=True,
        kv_heads=heads_of_their_own(config),
        max_position=size_of(config, "max_position_embeddings"),
        ropes=(plain_rope(turned, 10000.0, interleaved=True),) * config.num_hidden_layers,
        intermediate_size=4 * config.hidden_size if config.n_inner is None else size_of(config, "n_inner"),
        is_gated=False,
        mlp_bias=True,
        head_bias=True,
        **own,
    )
