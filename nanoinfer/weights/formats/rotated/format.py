"""RotatedFormat: matrices of some format whose inputs, or outputs, are rotated when they multiply."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from nanoinfer.weights.formats.configs.settings import EXPRESSION
from nanoinfer.weights.formats.experts import Experts, ExpertSizes, ExpertTensors, OutputShare
from nanoinfer.weights.formats.format import Format
from nanoinfer.weights.formats.rotated.matrix import RotatedMatrix, Side
from nanoinfer.weights.shards import Section


@dataclass(frozen=True)
class Rotation:
    """What a config says of one side of some matrices.

    targets, ignored: patterns of modules' names: a name, the end of one, or with "re:" a regular expression
    of_outputs: outputs are rotated, and not inputs
    """

    targets: tuple[str, ...]
    ignored: tuple[str, ...]
    of_outputs: bool
    side: Side

    def holds(self, module: str) -> bool:
        """Return whether the matrix of a module is rotated so."""
        return _is_among(self.targets, module) and not _is_among(self.ignored, module)

    def renamed(self, rename: Callable[[str], str]) -> Rotation:
        """Return what holds for other names of the same modules."""
        targets, ignored = (tuple(map(rename, patterns)) for patterns in (self.targets, self.ignored))
        return replace(self, targets=targets, ignored=ignored)


def _is_among(patterns: Sequence[str], module: str) -> bool:
    return any(
        re.match(pattern.removeprefix(EXPRESSION), module) is not None
        if pattern.startswith(EXPRESSION)
        else f".{module}".endswith(f".{pattern}")
        for pattern in patterns
    )


def rotated(format: Format, rotations: Sequence[Rotation], module: str) -> Format:
    """Return the format of a module's matrix with those of the rotations that hold for it.

    Raises ValueError if two hold for one side.
    """
    own = [rotation for rotation in rotations if rotation.holds(module)]
    inputs = [rotation.side for rotation in own if not rotation.of_outputs]
    outputs = [rotation.side for rotation in own if rotation.of_outputs]
    if len(inputs) > 1 or len(outputs) > 1:
        raise ValueError(
            f"model: quantization_config has a transform_config that rotates a side of {module} twice: must be once"
        )
    return RotatedFormat(format, next(iter(inputs), None), next(iter(outputs), None)) if own else format


@dataclass(frozen=True)
class RotatedFormat(Format):
    """inner: how the numbers are stored; inputs, outputs: how these are rotated; None: they are not"""

    inner: Format
    inputs: Side | None
    outputs: Side | None

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.inner.name} with rotations"

    @property
    def details(self) -> str:
        """Those of the numbers, and the rotations."""
        return f"{self.inner.details} with inputs rotated by {self.inputs} and outputs by {self.outputs}"

    def make_matrix(self, sections: list[Section], in_features: int, bias: bool) -> RotatedMatrix:
        """Make the matrix; raises ValueError, naming its module, if the blocks do not fit it."""
        return RotatedMatrix(self.inner.make_matrix(sections, in_features, bias), self.inputs, self.outputs)

    def make_experts(
        self, tensors: ExpertTensors, sizes: ExpertSizes, output_share: OutputShare | None, biases: bool
    ) -> Experts:
        """Raise ValueError: experts have no such products."""
        first = tensors.module(tensors.above[0], 0)
        raise ValueError(
            f"model: quantization_config has a transform_config that rotates {first}: must leave out experts: nothing"
            " rotates them here"
        )

    @property
    def takes_expert_biases(self) -> bool:
        """Whether experts may have biases."""
        return self.inner.takes_expert_biases

    @property
    def outputs_together(self) -> int:
        """Those of the numbers' format."""
        return self.inner.outputs_together

    def weight_bytes(self, itemsize: int) -> float:
        """Return the bytes of the numbers' format."""
        return self.inner.weight_bytes(itemsize)

    def multiplied_in(self, dtype: torch.dtype, device: str) -> torch.dtype:
        """Return the type of the numbers' format."""
        return self.inner.multiplied_in(dtype, device)
