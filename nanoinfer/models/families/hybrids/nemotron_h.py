"""Nemotron-H (NVIDIA, 2025): each layer has one branch, attention, Mamba2, an MLP or experts; nothing is rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.layers.mamba import Mamba2
from nanoinfer.models.description import Description, NoMixer
from nanoinfer.models.families.hybrids.settings import MAMBA, read_heads, read_limits
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.experts import MoEConfig, read_corrected_experts
from nanoinfer.models.reading.settings import of_layers, refuse, size_of
from nanoinfer.models.reading.shared import describe_common, read_mixers, read_width
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
    routers=("mixer.gate",),
    corrections=("mixer.gate.e_score_correction_bias",),
    shared_experts=("mixer.shared_experts",),
    shared_projections=("up_proj", "down_proj"),
    expert="mixer.experts.{}",
    expert_stacks=(("mixer.experts.up_proj", "mixer.experts.down_proj"),),
    expert_latents=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
)
EMBEDDINGS = "model.embed_tokens."
SPELLING = Spelling(
    (("backbone.embeddings.", EMBEDDINGS), ("model.embeddings.", EMBEDDINGS), ("backbone.", "model.")),
)


def describe(config: PretrainedConfig) -> Description:
    """Describe a Nemotron-H, such as Nemotron 3, whose MLPs and experts have no gates."""
    refuse(config, mamba_hidden_act="silu", residual_in_fp32=False, sliding_window=None)
    heads = read_heads(config, "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups")
    width, limits, biases = read_width(config, "conv_kernel"), read_limits(config), (bool(config.use_bias),) * 2
    mamba = Mamba2(*heads, width, limits, bool(config.use_conv_bias), biases, "mixer", "n_groups", "mamba_num_heads")
    return describe_common(
        config,
        activation_field="mlp_hidden_act",
        eps_field="layer_norm_epsilon",
        names=NAMES,
        mixers=read_mixers(config, {MAMBA: mamba, "mlp": NoMixer(), "moe": NoMixer()}),
        has_one_branch=True,
        ropes=(None,) * config.num_hidden_layers,
        max_position=size_of(config, "max_position_embeddings"),
        mlp_bias=config.mlp_bias,
        is_gated=False,
        experts=_read_experts(config),
        skipped=("mtp.",),
        spelling=SPELLING,
    )


def _read_experts(config: PretrainedConfig) -> MoEConfig | None:
    """Read the experts of the layers that have some; their shared expert's size is a setting of its own."""
    layers = tuple(kind == "moe" for kind in of_layers(config, "layer_types"))
    experts = read_corrected_experts(config, layers)
    if experts is None:
        return None
    latent_size = None if config.moe_latent_size is None else size_of(config, "moe_latent_size")
    shared_size = size_of(config, "moe_shared_expert_intermediate_size")
    return replace(experts, shared_size=shared_size, latent_size=latent_size)
