"""Linear layers whose weights are split over the ranks (Megatron-LM, Shoeybi et al., 2019)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor, nn

from nanoinfer.kernels.adapters.pairs import AdapterRows
from nanoinfer.kernels.linear.activation import Activation, AnyActivation
from nanoinfer.kernels.ranks.gather import gather_features
from nanoinfer.layers.norm import Joint
from nanoinfer.parallel.shares import share_of
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.formats.formats import PLAIN_FORMATS, Formats
from nanoinfer.weights.formats.matrix import LinearMap, Product
from nanoinfer.weights.shards import Section


def gather(x: Tensor, tp: TensorParallel) -> Tensor:
    """Put the ranks' shares side by side: [rows, share] to [rows, ranks * share]."""
    assert x.is_contiguous()
    inbox = tp.inbox
    if inbox is None or not inbox.can_gather(x):
        return tp.gather_features(x)
    return gather_features(x, inbox.layer_lane(), inbox.rank, inbox.stop)


@dataclass(frozen=True)
class Projection:
    """Where a tensor of the checkpoint has the rows of a projection.

    name: the tensor's, without ".weight"; other projections may have rows in it, too
    units: how many units the projection has over all ranks; the rows of one, such as a head's, stay together on a rank
    size: a unit's rows
    start: the row where the first unit begins; stride: from there to the next unit's first row
    tensor_rows: of the whole tensor
    """

    name: str
    units: int
    size: int
    start: int
    stride: int
    tensor_rows: int

    def sections(self, rank: int, ranks: int, in_features: int) -> Iterator[Section]:
        """Yield the rows of a rank's share of the units."""
        shape, outputs = (self.tensor_rows, in_features), self.units * self.size
        share = share_of(outputs, rank, ranks, self.size)
        together = len(share) if self.stride == self.size else self.size  # neighbours are one section
        for row in share[::together]:
            yield Section(self.name, together, shape, self.start + row // self.size * self.stride, fused=outputs)


def stacked(name: str, *parts: tuple[int, int]) -> list[Projection]:
    """Return the projections that one tensor holds, one after another; parts: the units and their size of each."""
    rows = [units * size for units, size in parts]
    starts = accumulate(rows[:-1], initial=0)
    return [Projection(name, *part, start, part[1], sum(rows)) for part, start in zip(parts, starts, strict=True)]


def side_by_side(names: tuple[str, ...], sizes: tuple[int, ...], head_dim: int = 1) -> list[Projection]:
    """Return projections of units of head_dim rows; names: one for each, or a single one if one tensor holds them."""
    if len(names) == 1:
        return stacked(names[0], *((size, head_dim) for size in sizes))
    return [
        Projection(name, size, head_dim, 0, head_dim, size * head_dim) for name, size in zip(names, sizes, strict=True)
    ]


def unit_by_unit(name: str, units: int, sizes: tuple[int, ...]) -> list[Projection]:
    """Return the projections that one tensor holds as a unit of each, of these sizes, then the next unit of each."""
    stride = sum(sizes)
    starts = accumulate(sizes[:-1], initial=0)
    return [
        Projection(name, units, size, start, stride, units * stride) for size, start in zip(sizes, starts, strict=True)
    ]


class ColumnParallelLinear(nn.Module):
    """Several projections of one input as one matrix product; each rank holds a share of each projection's outputs.

    formats: those of the model's matrices
    """

    def __init__(
        self,
        projections: list[Projection],
        in_features: int,
        tp: TensorParallel,
        bias: bool = False,
        formats: Formats = PLAIN_FORMATS,
    ) -> None:
        super().__init__()
        self.tp = tp
        sections = [
            section for projection in projections for section in projection.sections(tp.rank, tp.size, in_features)
        ]
        self.matrix: LinearMap = formats.make_matrix(sections, in_features, bias)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        joint: Joint,
        activation: AnyActivation | None = None,
        adapters: AdapterRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Let the joint add x to residual and normalise the sum; then project. x, residual: as for Joint.forward.

        activation: applied to two projections, gate and up: the output is act(gate) * up (kernels.linear.activation);
            Ungated: to all
        adapters: those that the tokens name; None: no token names one
        Returns this rank's share of each projection, side by side in [tokens, share], and the residual stream. With an
        activation of gates, the share is that of act(gate) * up alone.
        """
        matrix = self.matrix.beside(adapters)
        lane = joint.lane(x) if matrix.takes_lanes else None
        if lane is not None or (self.tp.size == 1 and not joint.replaces):
            return matrix.norm_product(x, residual, joint.pre_norm, joint.post_norm, activation, lane)
        joined, residual = joint(x, residual)
        return matrix.product(joined, activation), residual

    def project(
        self, joined: Tensor, activation: AnyActivation | None = None, adapters: AdapterRows | None = None
    ) -> Tensor:
        """Project a joint's output, [tokens, in_features]; returns the first of forward's results."""
        return self.matrix.beside(adapters).product(joined, activation)


class RowParallelLinear(nn.Module):
    """A projection whose input is split over the ranks. Each rank computes its part: the parts add up to the output.

    The next joint adds them. The first rank's part includes the bias.

    Such a sum depends on the number of ranks. Ranks that keep the order split the outputs instead. Each gathers the
    whole input, and then the whole output.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        tp: TensorParallel,
        bias: bool = False,
        formats: Formats = PLAIN_FORMATS,
        unit: int = 1,
    ) -> None:
        """formats: as for ColumnParallelLinear; unit: so many neighbouring inputs stay on one rank"""
        super().__init__()
        self.tp = tp
        self.matrix: LinearMap
        shape = out_features, in_features
        if tp.splits_outputs:
            share = share_of(out_features, tp.rank, tp.size)
            self.matrix = formats.make_matrix([Section(name, len(share), shape, share.start)], in_features, bias)
        else:
            share = share_of(in_features, tp.rank, tp.size, unit)
            section = Section(name, out_features, shape, share.start, dim=1)
            self.matrix = formats.make_matrix([section], len(share), bias)

    def can_apply_activation(self, tokens: int, adapters: AdapterRows | None = None) -> bool:
        """Return whether a launch that prepares so many tokens for this product can apply an activation, too."""
        return self.matrix.beside(adapters).can_apply_activation(tokens)

    def forward(self, x: Tensor, before: Activation | None = None, adapters: AdapterRows | None = None) -> Tensor:
        """Multiply [tokens, this rank's share of in_features]; returns [tokens, out_features].

        The result is this rank's part, or if the rank splits outputs, the whole sum.
        before: if given, x is twice as wide, gates before ups, and act(gate) * up is multiplied
        adapters: those that the tokens name; None: no token names one
        A single rank may return pieces, [pieces, tokens, out_features] float32, which the next joint adds.
        """
        return self._product(self.matrix.beside(adapters), x, before, may_split=self.tp.size == 1)

    def project(self, x: Tensor, before: Activation | None = None, adapters: AdapterRows | None = None) -> Tensor:
        """Multiply as forward does, but return no pieces."""
        return self._product(self.matrix.beside(adapters), x, before)

    def _product(self, matrix: Product, x: Tensor, before: Activation | None, may_split: bool = False) -> Tensor:
        if not self.tp.splits_outputs:
            return matrix.product(x, may_split=may_split, with_bias=self.tp.rank == 0, before=before)
        assert before is None
        return gather(matrix.product(gather(x, self.tp)), self.tp)
