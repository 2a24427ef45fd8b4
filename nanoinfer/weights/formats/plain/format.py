"""PLAIN: the format of most checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.weights.formats.experts import ExpertSizes, ExpertTensors, OutputShare
from nanoinfer.weights.formats.format import Format
from nanoinfer.weights.formats.plain.experts import PlainExperts
from nanoinfer.weights.formats.plain.matrix import PlainMatrix
from nanoinfer.weights.shards import Section


@dataclass(frozen=True)
class PlainFormat(Format):
    """Matrices of the model's dtype."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return "the model's dtype"

    def make_matrix(self, sections: list[Section], in_features: int, bias: bool) -> PlainMatrix:
        """Make the matrix."""
        return PlainMatrix(sections, in_features, bias)

    def make_experts(
        self, tensors: ExpertTensors, sizes: ExpertSizes, output_share: OutputShare | None, biases: bool
    ) -> PlainExperts:
        """Make a layer's experts."""
        return PlainExperts(tensors, sizes, output_share, biases)

    @property
    def takes_expert_biases(self) -> bool:
        """Yes."""
        return True

    def stores_parts(self, size: int, count: int) -> bool:
        """Return whether parts are slices: always."""
        return True

    def weight_bytes(self, itemsize: int) -> float:
        """Return the dtype's."""
        return itemsize


PLAIN = PlainFormat()
