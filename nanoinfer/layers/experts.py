"""Layers of experts: a router chooses some of them for each token (Shazeer et al., 2017)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.kernels.adapters.pairs import AdapterRows
from nanoinfer.kernels.experts.identities import add_identities
from nanoinfer.kernels.experts.route import Routes, Routing, route
from nanoinfer.kernels.linear.activation import AnyActivation, rows_per_output, split_activation
from nanoinfer.kernels.linear.dispatch import linear, norm_and_linear
from nanoinfer.kernels.linear.in_order.weight import InOrderWeight
from nanoinfer.layers.linear import ColumnParallelLinear, RowParallelLinear, side_by_side
from nanoinfer.layers.norm import Joint
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.formats.experts import ExpertMap
from nanoinfer.weights.formats.formats import PLAIN_FORMATS, Formats
from nanoinfer.weights.formats.matrix import LinearMap
from nanoinfer.weights.shards import Fill, Section, Shard, table_of


@dataclass(frozen=True)
class RouterTensors:
    """The tensors of a router. Each has several names, if checkpoints may store it under one or another.

    weights: the names of the matrix, without ".weight"
    corrections: those of the correction of the scores; empty: the model corrects none
    correction_is_row: the correction has two dimensions, [1, experts]
    factors: those of a factor of each expert's weights; empty: the model has none
    in_float32: the matrix and its product are in float32, whatever the model's dtype
    """

    weights: tuple[str, ...]
    corrections: tuple[str, ...] = ()
    correction_is_row: bool = False
    factors: tuple[str, ...] = ()
    in_float32: bool = False


class Router(nn.Module):
    """The matrix that scores the experts, and the scores' correction; every rank holds all of it."""

    def __init__(
        self, tensors: RouterTensors, hidden_size: int, count: int, routing: Routing, bias: bool = False
    ) -> None:
        """count: experts, and identities (Routing); bias: the logits have a bias"""
        super().__init__()
        self.tensors = tensors
        self.routing = routing
        dtype = torch.float32 if tensors.in_float32 else None
        self.weight = nn.Parameter(torch.empty(count, hidden_size, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(count, dtype=dtype), requires_grad=False) if bias else None
        self.correction: nn.Parameter | None = None
        if tensors.corrections:
            self.correction = nn.Parameter(torch.empty(count, dtype=torch.float32), requires_grad=False)
        self.factors = nn.Parameter(torch.empty(count), requires_grad=False) if tensors.factors else None
        self._in_order: InOrderWeight | None = None

    def fix_order(self, sizes: list[int]) -> None:
        """Let a GPU's products add up in the order of the inputs; sizes: as for InOrderWeight"""
        self._in_order = InOrderWeight(self.weight, self.weight.dtype, self.bias is not None, sizes)

    def forward(self, x: Tensor, residual: Tensor | None, joint: Joint) -> tuple[Routes, Tensor, Tensor]:
        """Let the joint add x to residual and normalise the sum; then choose the experts of each token.

        Returns also the joint's results: the experts' input and the residual stream.
        """
        lane = joint.lane(x)
        if joint.tp.size == 1 or lane is not None:
            norm, post = joint.pre_norm, joint.post_norm
            weight = self._in_order or self.weight
            logits, joined, residual = norm_and_linear(x, residual, norm, weight, post, lane, self.bias)
        else:
            joined, residual = joint(x, residual)
            logits = self.score(joined)
        return self.choose(logits), joined, residual

    def score(self, x: Tensor) -> Tensor:
        """Return the logits of the experts, [tokens, experts], or pieces of them; x: [tokens, hidden_size]"""
        return linear(x.to(self.weight.dtype), self._in_order or self.weight, self.bias, may_split=True)

    def choose(self, logits: Tensor) -> Routes:
        """Choose the experts of each token; logits: as from `score`"""
        return route(logits, self.routing, self.correction, self.factors)

    def skew(self) -> None:
        """Scale a random matrix so that the experts' shares of the choices follow Zipf's law: share i is about 1 / i.

        The larger an expert's scale, the likelier its score is above 1. No share is above 0.45, whatever the law says.
        """
        ranks = torch.arange(1, len(self.weight) + 1, dtype=torch.float64)
        low, high = 0.0, float(len(ranks))
        for _ in range(60):  # bisects the factor that makes the shares add up to the experts that a token uses
            factor = (low + high) / 2
            shares = (factor / ranks).clamp(max=0.45)
            low, high = (factor, high) if shares.sum() < self.routing.used else (low, factor)
        self.weight.mul_((1 / torch.special.ndtri(1 - shares)).to(self.weight).unsqueeze(1))

    def shards(self) -> Iterator[Shard]:
        """Yield the shards of matrix, bias, correction and factors under each of their names."""
        yield from _under_names([f"{name}.weight" for name in self.tensors.weights], self.weight)
        if self.bias is not None:
            yield from _under_names([f"{name}.bias" for name in self.tensors.weights], self.bias, "zeros")
        if self.correction is not None:
            correction = self.correction.unsqueeze(0) if self.tensors.correction_is_row else self.correction
            yield from _under_names(self.tensors.corrections, correction, "zeros")
        if self.factors is not None:
            yield from _under_names(self.tensors.factors, self.factors, "ones")


def _under_names(names: Sequence[str], target: Tensor, random: Fill = "noise") -> Iterator[Shard]:
    """Yield the shard of a tensor that a checkpoint stores under one of these names."""
    for number, name in enumerate(names):
        yield Shard(name, target, tuple(target.shape), random=random, replaces=tuple(names[: min(number, 1)]))


class SharedExpert(nn.Module):
    """One more expert, which every token uses (Dai et al., 2024)."""

    def __init__(
        self,
        modules: tuple[str, ...],
        hidden_size: int,
        size: int,
        activation: AnyActivation,
        tp: TensorParallel,
        bias: bool = False,
        formats: Formats = PLAIN_FORMATS,
        unit: int = 1,
        projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        """modules: the expert's module, and others that a checkpoint may name instead; projections: those in it

        activation: Ungated: the expert has no gates
        bias, formats: as for linear layers; unit: so many neighbours of the size stay on one rank
        """
        super().__init__()
        self.module_names = modules
        *above, down = (f"{modules[0]}.{name}" for name in projections)
        gate_up = side_by_side(tuple(above), (size // unit,) * rows_per_output(activation), unit)
        self.gate_up_proj = ColumnParallelLinear(gate_up, hidden_size, tp, bias, formats)
        self.activation = activation
        self.down_proj = RowParallelLinear(down, size, hidden_size, tp, bias, formats, unit)

    def forward(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Return this rank's part of the result, or all of it if ranks split outputs: [tokens, hidden_size]."""
        gates, _ = split_activation(self.activation)
        later = gates is not None and self.down_proj.can_apply_activation(len(x), adapters)
        gated = self.gate_up_proj.project(x, None if later else self.activation, adapters)
        return self.down_proj.project(gated, gates if later else None, adapters)

    def shards(self) -> Iterator[Shard]:
        """Yield the projections' shards once more for each of the other modules: the matrices yield the first's."""
        for projection in (self.gate_up_proj, self.down_proj):
            yield from _under_others(self.module_names, projection)


def _under_others(modules: tuple[str, ...], holder: nn.Module) -> Iterator[Shard]:
    """Yield what fills a module of the checkpoint under its other names; holder: what has the shards of its first."""
    if len(modules) < 2:
        return
    first, *others = modules
    for shards in table_of(holder).values():
        if shards[0].name.startswith(f"{first}."):
            yield from (shard.under(first, other) for other in others for shard in shards)


class GatedSharedExpert(nn.Module):
    """A shared expert whose result is weighted by the sigmoid of a gate (Qwen1.5-MoE, 2024)."""

    def __init__(self, expert: SharedExpert, hidden_size: int) -> None:
        super().__init__()
        self.expert = expert
        self.gate = nn.Parameter(torch.empty(1, hidden_size), requires_grad=False)
        self._in_order: InOrderWeight | None = None

    def fix_order(self, sizes: list[int]) -> None:
        """Let a GPU's products with the gate add up in the order of the inputs; sizes: as for InOrderWeight"""
        self._in_order = InOrderWeight(self.gate, self.gate.dtype, False, sizes)

    def forward(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Return what SharedExpert.forward does, weighted."""
        out = self.expert(x, adapters)
        gate = F.linear(x, self.gate) if self._in_order is None else self._in_order.product(x)
        return gate.sigmoid() * out

    def shards(self) -> Iterator[Shard]:
        """Yield the gate's shard."""
        yield from _under_names([f"{module}_gate.weight" for module in self.expert.module_names], self.gate)


class ExpertLatents(nn.Module):
    """What projects the input of routed experts to fewer numbers, and their sum back (Nemotron 3, NVIDIA, 2025).

    Every rank holds all of both matrices. As the second is linear, the ranks' parts of its results add up, too.
    """

    def __init__(
        self, names: tuple[str, str], hidden_size: int, size: int, tp: TensorParallel, bias: bool, formats: Formats
    ) -> None:
        """names: of the two projections; size: of a latent; bias, formats: as for linear layers"""
        super().__init__()
        above, below = names
        self.above: LinearMap = formats.make_matrix([Section(above, size, (size, hidden_size), 0)], hidden_size, bias)
        self.below: LinearMap = formats.make_matrix([Section(below, hidden_size, (hidden_size, size), 0)], size, bias)
        self._adds_bias = tp.rank == 0 or tp.splits_outputs

    def enter(self, x: Tensor, adapters: AdapterRows | None) -> Tensor:
        """Project [tokens, hidden_size] to [tokens, size]."""
        return self.above.beside(adapters).product(x)

    def leave(self, latents: Tensor, adapters: AdapterRows | None) -> Tensor:
        """Project this rank's part of the experts' sum, [tokens, size], to its part of the result."""
        return self.below.beside(adapters).product(latents, with_bias=self._adds_bias)


class MixtureOfExperts(nn.Module):
    """In place of an MLP: a router, the experts, and for some models a shared expert.

    taken: if `keep_taken` was called, [tokens, used] int32: its first rows are the experts that the last step's tokens
        took, the likeliest first, without those that all take
    """

    taken: Tensor | None = None

    def __init__(
        self,
        router: Router,
        experts: ExpertMap,
        shared: SharedExpert | GatedSharedExpert | None,
        activation: AnyActivation,
        latents: ExpertLatents | None = None,
        in_stack: tuple[str, ...] = (),
    ) -> None:
        """latents: what stands around the experts, but not around the shared one; None: nothing

        in_stack: the modules, as SharedExpert has them, of a shared expert whose parts are among the experts
        """
        super().__init__()
        self._in_stack = in_stack
        self.router, self.experts, self.shared, self.latents = router, experts, shared, latents
        self.activation = activation

    def fix_order(self, sizes: list[int]) -> None:
        """Let a GPU's products with router and experts add up in one order; sizes: as for InOrderWeight"""
        self.router.fix_order(sizes)
        self.experts.fix_order(self.router.routing.taken, self.activation)

    def forward(
        self, x: Tensor, residual: Tensor, joint: Joint, adapters: AdapterRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the branch's result, and the residual stream; the next joint adds the two.

        The result is this rank's part of it, or all of it if ranks split outputs. A single rank may return pieces,
        which the next joint adds.
        """
        routes, joined, residual = self.router(x, residual, joint)
        return self.mix(joined, routes, joint.tp, adapters), residual

    def mix(self, x: Tensor, routes: Routes, tp: TensorParallel, adapters: AdapterRows | None = None) -> Tensor:
        """Return the sum of what a token's experts make of it, as forward does; x: their input"""
        if self.taken is not None:
            self.taken[: len(x)] = routes.experts[:, : self.router.routing.used]
        identities = self.router.routing.identities
        may_split = self.shared is None and self.latents is None and tp.size == 1 and not identities
        inputs = x if self.latents is None else self.latents.enter(x, adapters)
        out = self.experts.beside(adapters)(inputs, routes, self.activation, may_split)
        out = out if self.latents is None else self.latents.leave(out, adapters)
        if identities and (tp.rank == 0 or tp.splits_outputs):
            out = add_identities(out, x, routes, len(self.router.weight) - identities)
        return out if self.shared is None else out + self.shared(x, adapters)

    def shards(self) -> Iterator[Shard]:
        """Yield the shards of a shared expert among the experts once more, for each of the other modules."""
        yield from _under_others(self._in_stack, self.experts)

    def keep_taken(self, most: int) -> None:
        """From now on, keep the experts that the tokens of each step take. CUDA graphs captured before do not.

        most: tokens in a step, at most
        """
        weight = self.router.weight
        self.taken = torch.full((most, self.router.routing.used), -1, dtype=torch.int32, device=weight.device)


def skew_routers(modules: Iterable[nn.Module]) -> None:
    """Skew the routers among the modules of a model with random weights, see Router.skew."""
    for module in modules:
        if isinstance(module, Router):
            module.skew()
