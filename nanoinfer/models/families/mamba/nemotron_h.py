"""Nemotron-H (NVIDIA, 2025): each layer has one branch, attention, Mamba2 or an MLP; nothing is rotated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.layers.mamba import Mamba2
from nanoinfer.models.description import Description, ModuleNames, NoMixer
from nanoinfer.models.families.mamba.settings import MAMBA, read_heads, read_limits
from nanoinfer.models.reading import describe_common, read_mixers, read_width
from nanoinfer.models.settings import of_layers, refuse, size_of
from nanoinfer.weights.names import Spelling

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    attention_norm="norm",
    mlp_norm="norm",
    last_norm="model.norm_f",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    o="mixer.o_proj",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
)
EMBEDDINGS = "model.embed_tokens."
SPELLING = Spelling(
    (("backbone.embeddings.", EMBEDDINGS), ("model.embeddings.", EMBEDDINGS), ("backbone.", "model.")),
)


def describe(config: PretrainedConfig) -> Description:
    """Describe a Nemotron-H model without experts."""
    if "moe" in of_layers(config, "layer_types"):
        raise ValueError(
            "model: layer_types in its config has 'moe': nanoinfer has no experts without gates, as these are"
        )
    refuse(config, mamba_hidden_act="silu", residual_in_fp32=False, sliding_window=None)
    heads = read_heads(config, "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups")
    width, limits, biases = read_width(config, "conv_kernel"), read_limits(config), bool(config.use_bias)
    mamba = Mamba2(*heads, width, limits, bool(config.use_conv_bias), biases, "mixer", "n_groups")
    return describe_common(
        config,
        activation_field="mlp_hidden_act",
        eps_field="layer_norm_epsilon",
        names=NAMES,
        mixers=read_mixers(config, {MAMBA: mamba, "mlp": NoMixer()}),
        has_one_branch=True,
        ropes=(None,) * config.num_hidden_layers,
        max_position=size_of(config, "max_position_embeddings"),
        mlp_bias=config.mlp_bias,
        is_gated=False,
        skipped=("mtp.",),
        spelling=SPELLING,
    )
