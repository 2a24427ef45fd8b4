"""Matrix products of the CPU whose bits do not depend on how many ranks share the outputs.

The CPU's libraries choose by the shape of a weight how to add up. They also compute a vector's last few numbers in
another way. So parts of the outputs are multiplied, whose shape is the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.groups import GroupWeight
from nanoinfer.kernels.linear.activation import Activation, gate_mul
from nanoinfer.kernels.linear.groups.cpu import cpu_linear
from nanoinfer.kernels.linear.operands.weight import Weight

PARTS = 8  # of all ranks' outputs
ALIGNMENT = 16  # numbers of a weight's sides: MKL adds up in another order behind addresses that are not aligned
AT_ONCE = 32  # numbers that an activation takes at a time; it computes a vector's last few in another way


class WeightInParts(Weight):
    """A weight, [out_features, in_features], cut into parts of its outputs.

    sizes: how many outputs each part has
    """

    def __init__(self, weight: Tensor | GroupWeight, sections: list[tuple[int, int]]) -> None:
        """sections: of the weight's rows, in their order: how many rows, and how many of its kind all ranks hold."""
        self.sizes: list[int] = []
        for rows, total in sections:
            part = -(-total // PARTS)
            self.sizes += [min(part, rows - first) for first in range(0, rows, part)]
        self._parts = list(weight.split(self.sizes))

    @classmethod
    def side_by_side(cls, weights: Sequence[WeightInParts]) -> WeightInParts:
        """Return the weight that has the parts of several."""
        joined = copy(weights[0])
        joined.sizes = [size for weight in weights for size in weight.sizes]
        joined._parts = [part for weight in weights for part in weight._parts]
        return joined

    def product(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        activation: Activation | None = None,
        may_split: bool = False,
        out: Tensor | None = None,
        added: Tensor | None = None,
    ) -> Tensor:
        """Compute kernels.linear.dispatch.linear, into `out` if given.

        added: [tokens, out_features], if given added before the activation
        """
        biases = [None] * len(self._parts) if bias is None else bias.split(self.sizes)
        products = [_multiply(x, *part) for part in zip(self._parts, biases, strict=True)]
        if added is not None:
            products = [part.add_(more) for part, more in zip(products, added.split(self.sizes, dim=1), strict=True)]
        if activation is not None:
            half = len(products) // 2
            gates_and_ups = zip(products[:half], products[half:], strict=True)
            products = [gate_mul(torch.cat(both, dim=1), activation) for both in gates_and_ups]
        return torch.cat(products, dim=1, out=out)


def _multiply(x: Tensor, part: Tensor | GroupWeight, bias: Tensor | None) -> Tensor:
    return cpu_linear(x, part, bias) if isinstance(part, GroupWeight) else F.linear(x, part, bias)
