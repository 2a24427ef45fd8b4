"""TextHead: a classifier's scores of a text, behind a layer of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.kernels.linear.activation import Function, activate
from nanoinfer.kernels.norm.norm import Norm, normalize_reference
from nanoinfer.layers.embedding import Head
from nanoinfer.pooling.read import LabelsOf
from nanoinfer.weights.shards import Shard


@dataclass(frozen=True)
class TextHeadNames:
    """The names that a checkpoint gives to such a head's modules.

    dense: the layer before the scores; activation: behind it
    reads: what of a text comes here
    out: the scores'
    norm: behind the activation, without a bias; None: there is none
    has_bias: whether the dense layer has a bias; the scores always do
    """

    dense: str
    out: str
    activation: Function | Literal["tanh"] = "tanh"
    reads: LabelsOf = "first"
    norm: str | None = None
    has_bias: bool = True

    @property
    def modules(self) -> tuple[str, ...]:
        """How the names of the tensors begin."""
        return tuple(f"{name}." for name in (self.dense, self.out, self.norm) if name is not None)


class TextHead(Head):
    """Float32 matrices, whole on each rank: they are small. Scores have the labels' places as token ids have."""

    def __init__(self, names: TextHeadNames, hidden_size: int, labels: int, eps: float) -> None:
        super().__init__()
        self.names, self.eps = names, eps
        self.first_id, self.num_ids = 0, labels

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=torch.float32), requires_grad=False)

        self.dense = empty(hidden_size, hidden_size)
        self.dense_bias = empty(hidden_size) if names.has_bias else None
        self.norm = None if names.norm is None else empty(hidden_size)
        self.out, self.out_bias = empty(labels, hidden_size), empty(labels)

    def fix_order(self, sizes: list[int]) -> None:
        """Leave it: encoders have no fixed order."""

    def fix_parts(self) -> None:
        """Leave it: encoders have no fixed order."""

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Score [rows, hidden_size]; returns [rows, labels] float32."""
        x = F.linear(hidden.float(), self.dense, self.dense_bias)
        x = torch.tanh(x) if self.names.activation == "tanh" else activate(x, self.names.activation)
        if self.norm is not None:
            x = normalize_reference(x, Norm(self.norm, self.eps, centred=True))
        scores = F.linear(x, self.out, self.out_bias)
        return scores if out is None else out.copy_(scores)

    def shards(self) -> Iterator[Shard]:
        """Yield the shards of the matrices, the biases and the norm."""
        names = self.names
        parts = {
            f"{names.dense}.weight": self.dense,
            f"{names.dense}.bias": self.dense_bias,
            f"{names.norm}.weight": self.norm,
            f"{names.out}.weight": self.out,
            f"{names.out}.bias": self.out_bias,
        }
        for name, part in parts.items():
            if part is not None:
                yield Shard(name, part, tuple(part.shape), random="ones" if part is self.norm else "noise")
