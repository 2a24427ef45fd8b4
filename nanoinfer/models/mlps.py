"""MLPs: what computes on each token by itself: a gated MLP, experts, or both."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TypeAlias

from torch import Tensor, nn

from nanoinfer.kernels.adapters.pairs import AdapterRows
from nanoinfer.layers.experts import (
    ExpertLatents,
    GatedSharedExpert,
    MixtureOfExperts,
    Router,
    RouterTensors,
    SharedExpert,
)
from nanoinfer.layers.experts_beside_mlp import ExpertsBesideMLP
from nanoinfer.layers.linear import ColumnParallelLinear, RowParallelLinear, gather, side_by_side
from nanoinfer.layers.norm import Joint, scaled
from nanoinfer.layers.xielu import XIELU
from nanoinfer.models.description import Description
from nanoinfer.models.reading.experts import MoEConfig
from nanoinfer.models.shared_experts import parts_in_stack, shared_modules, shared_projections
from nanoinfer.parallel.shares import share_of
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.formats.experts import ExpertSizes, ExpertTensors, OutputShare

AnyMLP: TypeAlias = "MLP | UngatedMLP | MixtureOfExperts | ExpertsBesideMLP"


class MLP(nn.Module):
    """The gated MLP (Shazeer, 2020): computes activation(gate) * up and projects back."""

    def __init__(self, model: Description, layer: int, tp: TensorParallel) -> None:
        super().__init__()
        prefix, size, names = model.names.prefix(layer), model.mlp_sizes[layer], model.names_of(layer)
        unit = _unit_of(size, model, tp)
        gate_up = side_by_side(tuple(prefix + name for name in names.gate_up), (size // unit, size // unit), unit)
        self.gate_up_proj = ColumnParallelLinear(gate_up, model.hidden_size, tp, model.mlp_bias, model.formats)
        self.activation, self.scale = model.activation, model.mlp_scale
        how = tp, model.mlp_bias, model.formats, unit
        self.down_proj = RowParallelLinear(prefix + names.down, size, model.hidden_size, *how)

    def forward(
        self, x: Tensor, residual: Tensor | None, joint: Joint, adapters: AdapterRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the branch's result, and the residual stream; the next joint adds the two."""
        later = self.down_proj.can_apply_activation(x.shape[-2], adapters)
        gated, residual = self.gate_up_proj(x, residual, joint, None if later else self.activation, adapters)
        out = self.down_proj(gated, self.activation if later else None, adapters)
        return scaled(out, self.scale), residual


class UngatedMLP(nn.Module):
    """The MLP without gates: computes activation(up) and projects back."""

    def __init__(self, model: Description, layer: int, tp: TensorParallel) -> None:
        super().__init__()
        prefix, size, names = model.names.prefix(layer), model.mlp_sizes[layer], model.names_of(layer)
        unit = _unit_of(size, model, tp)
        up = side_by_side((prefix + names.gate_up[0],), (size // unit,), unit)
        self.up_proj = ColumnParallelLinear(up, model.hidden_size, tp, model.mlp_bias, model.formats)
        self.activation = model.mlp_activation if names.xielu is None else None
        self.xielu = None if names.xielu is None else XIELU(prefix + names.xielu)
        how = tp, model.mlp_bias, model.formats, unit
        self.down_proj = RowParallelLinear(prefix + names.down, size, model.hidden_size, *how)

    def forward(
        self, x: Tensor, residual: Tensor | None, joint: Joint, adapters: AdapterRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the branch's result, and the residual stream; the next joint adds the two."""
        up, residual = self.up_proj(x, residual, joint, self.activation, adapters)
        return self.down_proj(up if self.xielu is None else self.xielu(up), adapters=adapters), residual


def make_mlp(model: Description, layer: int, tp: TensorParallel) -> AnyMLP:
    """Make the layer's MLP, or the experts that it has instead, or both; of a half, the MLP alone."""
    experts = model.experts
    if experts is None or not experts.layers[layer] or experts.beside == "halves":
        return MLP(model, layer, tp) if model.is_gated else UngatedMLP(model, layer, tp)
    made = make_experts(model, experts, layer, tp)
    if experts.beside is None:
        return made
    return ExpertsBesideMLP(model.names.prefix(layer), experts.beside, MLP(model, layer, tp), made, model.norm_eps, tp)


def make_experts(model: Description, experts: MoEConfig, layer: int, tp: TensorParallel) -> MixtureOfExperts:
    """Make the layer's experts. experts: the model's"""
    names, prefix = model.names_of(layer), model.names.prefix(layer)
    share = share_of(experts.size, tp.rank, tp.size, _unit_of(experts.size, model, tp))
    width, own = experts.latent_size or model.hidden_size, (experts.size, share.start, len(share))
    always = parts_in_stack(model, experts, layer)
    sizes = ExpertSizes(experts.count, width, *own, experts.routing.identities, always)
    stacks = tuple((prefix + gate_up, prefix + down) for gate_up, down in names.expert_stacks)
    flat = tuple(prefix + name for name in names.flat_experts)
    projections = names.expert_gate if model.is_gated else None, names.expert_up, names.expert_down
    in_stack = shared_projections(model, layer) if always else ()
    tensors = ExpertTensors(prefix + names.expert, *projections, stacks, names.paired_experts, flat, in_stack)
    router = RouterTensors(
        tuple(prefix + name for name in names.routers),
        tuple(prefix + name for name in names.corrections) if experts.corrected else (),
        names.correction_is_row,
        tuple(prefix + name for name in names.expert_factors),
        experts.float32_router,
    )
    outputs = _output_share(width, tp) if tp.splits_outputs else None
    return MixtureOfExperts(
        Router(router, model.hidden_size, experts.choices, replace(experts.routing, always=always), experts.biases),
        model.formats.make_experts(tensors, sizes, outputs, experts.biases),
        None if always or experts.shared_size is None else _make_shared(model, layer, experts, experts.shared_size, tp),
        model.mlp_activation,
        None if experts.latent_size is None else _make_latents(model, prefix, experts.latent_size, tp),
        shared_modules(model, layer) if always else (),
    )


def _make_shared(
    model: Description, layer: int, experts: MoEConfig, size: int, tp: TensorParallel
) -> SharedExpert | GatedSharedExpert:
    modules, unit = shared_modules(model, layer), _unit_of(size, model, tp)
    how = tp, model.mlp_bias, model.formats, unit, model.names.shared_projections
    shared = SharedExpert(modules, model.hidden_size, size, model.mlp_activation, *how)
    return GatedSharedExpert(shared, model.hidden_size) if experts.shared_gate else shared


def _make_latents(model: Description, prefix: str, size: int, tp: TensorParallel) -> ExpertLatents:
    above, below = model.names.expert_latents
    return ExpertLatents((prefix + above, prefix + below), model.hidden_size, size, tp, model.mlp_bias, model.formats)


def _output_share(width: int, tp: TensorParallel) -> OutputShare:
    return OutputShare(share_of(width, tp.rank, tp.size), partial(gather, tp=tp))


def _unit_of(size: int, model: Description, tp: TensorParallel) -> int:
    """Return how many neighbours of an intermediate size stay on one rank. Ranks that gather have equal shares."""
    return 1 if tp.splits_outputs else model.unit_of(size, tp.size)
