"""StableLM (Stability AI, 2023): Llama with LayerNorms, which rotates a quarter of each head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.layers.head_norm import HeadNorms
from nanoinfer.layers.norm import NormKind
from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.rope import read_rope, read_rotary_dim
from nanoinfer.models.reading.shared import describe_common

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HEAD_NORMS = HeadNorms("self_attn.q_layernorm.norms", "self_attn.k_layernorm.norms", "tensors")


def describe(config: PretrainedConfig) -> Description:
    """Describe a StableLM; in some, the branches stand side by side, behind one norm."""
    return describe_common(
        config,
        eps_field="layer_norm_eps",
        names=ModuleNames(mlp_norm=None) if config.use_parallel_residual else ModuleNames(),
        norm=NormKind(centred=True, has_bias=True),
        is_parallel=config.use_parallel_residual,
        head_norms=HEAD_NORMS if config.qk_layernorm else None,
        ropes=(read_rope(config, read_rotary_dim(config)),) * config.num_hidden_layers,
        qkv_bias=config.use_qkv_bias,
    )
