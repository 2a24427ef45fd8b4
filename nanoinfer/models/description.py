"""Description: what a model is, said once. The decoder is built from it, and nothing asks for a family's name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from nanoinfer.kernels.linear.activation import Activation
from nanoinfer.layers.rotary import Rope

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"  # what all checkpoints call the two

Width = Literal["head", "full"]  # of a query or key norm: each head by itself, or all heads of a token at once


@dataclass(frozen=True)
class QueryScaling:
    """A rotated query of position p is multiplied by 1 + beta * log(1 + floor(p / length)), as in Ministral 3."""

    beta: float
    length: int


@dataclass(frozen=True)
class Names:
    """What a checkpoint calls the parts of a layer; a norm without a name is not there.

    attention_norm, mlp_norm: before a branch; attention_post_norm, mlp_post_norm: of its result, before that is added
    qkv, gate_up: one tensor each, or one in which they stand one after another
    """

    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True)
class Description:
    """A decoder-only transformer whose parts are here.

    max_position: the most tokens of a sequence
    tied: the embedding is the output projection too
    norm_plus_one: norm weights are stored less one
    qk_norm: of queries and keys, before they are rotated
    activation: of the gated MLP, see kernels.linear.activation
    attention_scale: of a query's product with a key; score_cap: c, for c * tanh(score / c); logit_cap likewise
    residual_scale: of a branch's result, before it is added
    windows: a layer, how many tokens a query sees, its own the last; None: all
    ropes: a layer; None: its queries and keys are not rotated
    is_multimodal: the checkpoint has other parts, which are not read
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    tied: bool
    activation: Activation
    attention_scale: float
    windows: tuple[int | None, ...]
    ropes: tuple[Rope | None, ...]
    names: Names = Names()
    norm_plus_one: bool = False
    qk_norm: Width | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    score_cap: float | None = None
    logit_cap: float | None = None
    query_scaling: QueryScaling | None = None
    is_multimodal: bool = False

    @property
    def window(self) -> int | None:
        """The largest window, if every layer has one: what lies behind it is never read again."""
        return max(window or 0 for window in self.windows) if all(self.windows) else None

    @property
    def long_from(self) -> int | None:
        """Sequences of more tokens are rotated by other frequencies."""
        return next((rope.long_from for rope in self.ropes if rope is not None and rope.long_from), None)

    def within(self, max_len: int) -> Description:
        """The same model where no sequence has more than so many tokens: without what only longer ones would see."""

        def shortened(rope: Rope | None) -> Rope | None:
            if rope is None or rope.long_from is None or rope.long_from < max_len:
                return rope
            return replace(rope, long_frequencies=None, long_from=None)

        windows = tuple(window if window and window < max_len else None for window in self.windows)
        return replace(self, windows=windows, ropes=tuple(map(shortened, self.ropes)))

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError when so many ranks cannot share the model."""
        for name, size in (("num_attention_heads", self.num_heads), ("intermediate_size", self.intermediate_size)):
            if size % ranks:
                raise ValueError(f"tensor_parallel_size={ranks}: {name}={size} is not divisible by it; use a divisor")
        if self.num_kv_heads % ranks and ranks % self.num_kv_heads:
            raise ValueError(
                f"tensor_parallel_size={ranks}: num_key_value_heads={self.num_kv_heads} neither divides it nor is"
                " divided by it; use a divisor or a multiple"
            )
        if self.vocab_size < ranks**2:
            raise ValueError(f"tensor_parallel_size={ranks}: vocab_size={self.vocab_size} is too small; use fewer")
