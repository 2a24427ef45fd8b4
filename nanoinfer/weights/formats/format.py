"""Format: how a checkpoint stores matrices, and what the rest of nanoinfer may ask of it.

A format makes matrices and experts, and these do the work: matrix.py and experts.py declare what each must do. Outside
this room and the kernels, a file asks at most whether two formats are alike. docs/tour.md has the recipe for a new one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from nanoinfer.weights.formats.experts import Experts, ExpertSizes, ExpertTensors, OutputShare
from nanoinfer.weights.formats.matrix import Matrix
from nanoinfer.weights.shards import Section


class Format(ABC):
    """How some matrices of a checkpoint are stored: a frozen dataclass, which is compared, and sent to ranks."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What messages call it, such as "FP8"."""

    @property
    def details(self) -> str:
        """What sets it apart from others of its name, such as "int4 in groups of 32"."""
        return self.name

    @abstractmethod
    def make_matrix(self, sections: list[Section], in_features: int, bias: bool) -> Matrix:
        """Make the matrix of neighbouring rows, in their order; in_features: of this rank."""

    @abstractmethod
    def make_experts(
        self, tensors: ExpertTensors, sizes: ExpertSizes, output_share: OutputShare | None, biases: bool
    ) -> Experts:
        """Make a layer's experts.

        output_share: given if ranks split outputs; None: this rank computes its part of all
        biases: the products have biases; only where takes_expert_biases
        """

    def with_downs(self, other: Format) -> Format | None:
        """Return the format of experts whose downs have another one; None: no kernels multiply these."""
        return self if self == other else None

    @property
    def takes_expert_biases(self) -> bool:
        """Whether experts may have biases."""
        return False

    @property
    def outputs_together(self) -> int:
        """With deterministic=True, a GPU's share of a matrix's outputs must be a multiple of so many; not of experts'.

        Else a rank's products have other bits than those of one rank alone.
        """
        return 1

    def inputs_together(self, size: int, ranks: int) -> int:
        """Return how many neighbouring inputs of a product stay on one of the ranks that share so many inputs.

        Ranks have equal shares if that is 1, and else shares of whole units, some one unit more than others.
        """
        return 1

    def stores_parts(self, size: int, count: int) -> bool:
        """Return whether a matrix of `count` times `size` outputs, or inputs, is stored as so many matrices would be.

        Then these are slices of its tensors.
        """
        return False

    @abstractmethod
    def weight_bytes(self, itemsize: int) -> float:
        """Return the bytes that a product reads for a weight, with its part of the scales.

        itemsize: of the model's dtype
        """

    def multiplied_in(self, dtype: torch.dtype, device: str) -> torch.dtype:
        """Return the type in which a device multiplies many tokens. dtype: the model's; device: "cuda" or "cpu" """
        return dtype
