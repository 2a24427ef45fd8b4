"""What may stand between the last layer's result and the output projection."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from nanoinfer.kernels.adapters.pairs import AdapterRows
from nanoinfer.kernels.linear.activation import Function, activate
from nanoinfer.kernels.norm.norm import normalize
from nanoinfer.layers.norm import NormKind, NormLayer
from nanoinfer.weights.formats.formats import Formats
from nanoinfer.weights.formats.matrix import LinearMap
from nanoinfer.weights.shards import Section


@dataclass(frozen=True)
class HeadTransform:
    """A projection, and what follows it.

    name: the projection's, in the checkpoint
    size: numbers that it gives, which the output projection takes
    has_bias: the projection has one
    activation: that of its result; None: none
    norm: the name of the norm behind it; None: there is none
    """

    name: str
    size: int
    has_bias: bool = False
    activation: Function | None = None
    norm: str | None = None


class TransformBeforeHead(nn.Module):
    """Such a transform, whole on each rank: every rank's part of the vocabulary needs all of its numbers."""

    def __init__(self, sizes: HeadTransform, hidden_size: int, eps: float, kind: NormKind, formats: Formats) -> None:
        """eps, kind: the norm's; formats: as for linear layers"""
        super().__init__()
        section = Section(sizes.name, sizes.size, (sizes.size, hidden_size), 0)
        self.projection: LinearMap = formats.make_matrix([section], hidden_size, sizes.has_bias)
        self.activation = sizes.activation
        self.norm = None if sizes.norm is None else NormLayer(sizes.norm, sizes.size, eps, kind)

    def forward(self, hidden: Tensor, adapters: AdapterRows | None) -> Tensor:
        """Transform [rows, hidden_size] to [rows, size]. adapters: those that the rows name; None: no row names one"""
        x = self.projection.beside(adapters).product(hidden)
        if self.activation is not None:
            x = activate(x, self.activation)
        return x if self.norm is None else normalize(x, self.norm.norm)
