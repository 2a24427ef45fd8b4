"""What checkpoints call the modules of layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModuleNames:
    """The names that a checkpoint gives to a layer's modules. If a norm's name is None, the model has no such norm.

    attention_norm, mlp_norm: the norm of a branch's input
    attention_post_norm, mlp_post_norm: the norm of a branch's result, before the joint adds it
    last_norm: that of the decoder's result, without a layer's prefix
    layer_scale: a number that multiplies the residual stream behind a layer; None: the model has none
    qkv, gate_up: one name for each projection, or a single name if one tensor holds them; gate_up of an MLP without
        gates: the name of its first projection
    o, down: the projection of attention's result, and of the MLP's
    xielu: what has the numbers of an MLP's xIELU, which stands for Description.activation; None: no MLP has one
    q_norm, k_norm: the norm of queries, and of keys
    output_gate: the projection of attention's output gate; None: the queries' tensor holds it, head by head
    routers: the matrix that scores the experts, by each name that a checkpoint may give it
    corrections: the correction of its scores, by each name; correction_is_row: as for RouterTensors
    expert_factors: a factor of each expert's weights, by each name; empty: the model has none
    shared_experts: the module of the shared expert, by each name; shared_projections: in it, as gate_up and down are
    sinks: the learned scores of Description.sinks in attention's module, by each name
    expert: the module of an expert; "{}" stands for its number
    expert_gate, expert_up, expert_down: an expert's projections; without gates, the last two alone are there
    expert_stacks: tensors that may hold those of all experts instead: gates above ups, or ups alone, and downs
    paired_experts: such tensors always do, with each gate beside its up: see weights.plain_experts.ExpertTensors
    expert_latents: the projections of MoEConfig.latent_size: to it, and back
    flat_experts: three tensors that may hold all gates, all ups, and all downs instead, or none: see Shard.is_flat
    are_of_halves: each two layers are one in the checkpoint
    layers: what has the layers, by their numbers; first: the number that the checkpoint gives to the first layer
    """

    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    last_norm: str | None = "model.norm"
    layer_scale: str | None = None
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    output_gate: str | None = None
    o: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    xielu: str | None = None
    routers: tuple[str, ...] = ("mlp.gate",)
    corrections: tuple[str, ...] = ("mlp.gate.e_score_correction_bias",)
    correction_is_row: bool = False
    expert_factors: tuple[str, ...] = ()
    shared_experts: tuple[str, ...] = ("mlp.shared_expert",)
    shared_projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    sinks: tuple[str, ...] = ("sinks",)
    expert: str = "mlp.experts.{}"
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    expert_stacks: tuple[tuple[str, str], ...] = (("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),)
    paired_experts: bool = False
    expert_latents: tuple[str, str] = ("", "")
    flat_experts: tuple[str, ...] = ()
    are_of_halves: bool = False
    layers: str = "model.layers"
    first: int = 0

    def prefix(self, layer: int) -> str:
        """Return how the names of a layer's tensors begin."""
        return f"{self.layers}.{self.first + (layer // 2 if self.are_of_halves else layer)}."


@dataclass(frozen=True)
class PredictionLayers:
    """Layers of a checkpoint that predict further tokens, as models/prediction_head.py has them. All are alike.

    layers, first: as ModuleNames has them
    count: how many there are to be run: several, each for another distance, or one, again and again
    like: the number of the model's layer whose attention they have
    has_experts: in place of an MLP
    mlp_norm: as ModuleNames has it; None: as in the model's layers
    The others are modules beside the layer's own; "{}" stands for how the names of its tensors begin.
    embedding_norm, hidden_norm: the norms of what the projection takes
    norm: the norm behind the layer
    """

    first: int
    layers: str = "model.layers"
    count: int = 1
    like: int = -1
    has_experts: bool = True
    mlp_norm: str | None = None
    embedding_norm: str = "{}enorm"
    hidden_norm: str = "{}hnorm"
    projection: str = "{}eh_proj"
    norm: str = "{}shared_head.norm"

    def modules(self, prefix: str) -> tuple[str, ...]:
        """Return the names of the modules beside a layer. prefix: how the names of its tensors begin"""
        names = self.embedding_norm, self.hidden_norm, self.projection, self.norm
        return tuple(name.format(prefix) for name in names)


USUAL_NAMES = ModuleNames()
