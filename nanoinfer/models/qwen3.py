"""Qwen3, dense (Qwen3 Technical Report, 2025): pre-norm blocks of grouped-query attention and a SwiGLU MLP."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from nanoinfer.attention import AttentionBackend
from nanoinfer.attention.context import Context
from nanoinfer.layers.attention import Attention
from nanoinfer.layers.embedding import VocabParallelEmbedding
from nanoinfer.layers.linear import ColumnParallelLinear, RowParallelLinear, share_of_heads
from nanoinfer.layers.norm import RMSNorm
from nanoinfer.layers.rotary import RotaryEmbedding
from nanoinfer.parallel.tensor_parallel import TensorParallel


class Qwen3Attention(nn.Module):
    """Grouped-query attention with a norm on every query and key head."""

    def __init__(
        self,
        config: PretrainedConfig,
        layer: int,
        rotary: RotaryEmbedding,
        backend: AttentionBackend,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.qkv_proj = ColumnParallelLinear(
            config.hidden_size, {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}, tp, self.head_dim
        )
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, tp)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, tp)
        self.attention = Attention(layer, rotary, backend)
        self.o_proj = RowParallelLinear(heads * self.head_dim, config.hidden_size, tp)

    def forward(self, x: Tensor, residual: Tensor | None, norm: RMSNorm, context: Context) -> tuple[Tensor, Tensor]:
        """Returns the attention over norm(x + residual), and x + residual; see Qwen3DecoderLayer for their shapes."""
        qkv, residual = self.qkv_proj(x, residual, norm)
        heads = self.attention(qkv.unflatten(-1, (-1, self.head_dim)), self.q_norm, self.k_norm, context)
        return self.o_proj(heads.flatten(1)), residual


class Qwen3MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: PretrainedConfig, tp: TensorParallel) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up_proj = ColumnParallelLinear(
            config.hidden_size, {"gate_proj": size, "up_proj": size}, tp, gated=True
        )
        self.down_proj = RowParallelLinear(size, config.hidden_size, tp)

    def forward(self, x: Tensor, residual: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Returns the MLP of norm(x + residual), and x + residual; see Qwen3DecoderLayer for their shapes."""
        gated, residual = self.gate_up_proj(x, residual, norm)
        return self.down_proj(gated), residual


class Qwen3DecoderLayer(nn.Module):
    """One block. The residual stream is carried beside the branch: what norms their sum adds them too, in one pass.

    Both are [tokens, hidden_size]; of a branch a rank has what RowParallelLinear leaves it.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        layer: int,
        rotary: RotaryEmbedding,
        backend: AttentionBackend,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, tp)
        self.self_attn = Qwen3Attention(config, layer, rotary, backend, tp)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, tp)
        self.mlp = Qwen3MLP(config, tp)

    def forward(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        """x is the last block's branch, not yet added to residual; returns this block's, and the sum before it."""
        x, residual = self.self_attn(x, residual, self.input_layernorm, context)
        return self.mlp(x, residual, self.post_attention_layernorm)


class Qwen3Model(nn.Module):
    """Embedding, blocks and final norm."""

    def __init__(
        self, config: PretrainedConfig, max_model_len: int, backend: AttentionBackend, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        rotary = RotaryEmbedding(config.head_dim, max_model_len, rope_theta(config))
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, layer, rotary, backend, tp) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, tp)

    def forward(self, token_ids: Tensor, context: Context) -> Tensor:
        """[tokens] to [tokens, hidden_size]."""
        x, residual = self.embed_tokens(token_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, context)
        return self.norm(x, residual)[0]


class Qwen3ForCausalLM(nn.Module):
    """The model and its projection to logits, which may share the embedding's weight."""

    def __init__(
        self, config: PretrainedConfig, max_model_len: int, backend: AttentionBackend, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.num_layers = config.num_hidden_layers
        self.num_kv_heads = share_of_heads(config.num_key_value_heads, tp.size)
        self.head_dim = config.head_dim
        self.model = Qwen3Model(config, max_model_len, backend, tp)
        tied = config.tie_word_embeddings
        self.lm_head = (
            self.model.embed_tokens if tied else VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        )
        # A tied checkpoint may store the shared matrix twice.
        self.ignored_weights = ("lm_head.weight",) if tied else ()

    def forward(self, token_ids: Tensor, context: Context) -> Tensor:
        """[tokens] int32 to hidden states, [tokens, hidden_size]."""
        return self.model(token_ids, context)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, hidden_size] to [rows, this rank's token ids]."""
        return self.lm_head.logits(hidden, out)

    @staticmethod
    def check(config: PretrainedConfig, tensor_parallel_size: int) -> None:
        """Raise ValueError, naming the setting, when this file does not implement what config asks for."""
        ranks = tensor_parallel_size
        for name in ("num_attention_heads", "intermediate_size"):
            size = getattr(config, name)
            if size % ranks:
                raise ValueError(f"tensor_parallel_size={ranks}: {name}={size} is not divisible by it; use a divisor")
        kv_heads = config.num_key_value_heads
        if kv_heads % ranks and ranks % kv_heads:
            raise ValueError(
                f"tensor_parallel_size={ranks}: num_key_value_heads={kv_heads} neither divides it nor is divided by it;"
                " use a divisor or a multiple"
            )
        if config.vocab_size < ranks**2:
            raise ValueError(f"tensor_parallel_size={ranks}: vocab_size={config.vocab_size} is too small; use fewer")
        rope = rope_parameters(config)
        unsupported = {
            "attention_bias": getattr(config, "attention_bias", False),
            "use_sliding_window": getattr(config, "use_sliding_window", False),
            "layer_types": [kind for kind in getattr(config, "layer_types", None) or [] if kind != "full_attention"],
            "quantization_config": getattr(config, "quantization_config", None),
            "hidden_act": config.hidden_act != "silu" and config.hidden_act,
            "rope_type": rope.get("rope_type", rope.get("type", "default")) != "default" and rope,
        }
        for name, value in unsupported.items():
            if value:
                raise ValueError(f"model: {name}={value!r} in its config is not supported for Qwen3")


def rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """The rotary settings; transformers 4 called them rope_scaling, and kept rope_theta outside."""
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def rope_theta(config: PretrainedConfig) -> float:
    """The rotary base."""
    return float(rope_parameters(config).get("rope_theta") or config.rope_theta)
