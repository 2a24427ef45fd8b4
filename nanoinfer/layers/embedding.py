"""Token embedding and output projection, split over the vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.kernels.adapters.pairs import AdapterRows
from nanoinfer.kernels.linear.cpu.in_parts import WeightInParts
from nanoinfer.kernels.linear.in_order.weight import InOrderWeight
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.formats.formats import Formats
from nanoinfer.weights.formats.matrix import LookedUp
from nanoinfer.weights.shards import Section, Shard


def _share_of_ids(vocab_size: int, tp: TensorParallel) -> tuple[int, int]:
    """Return the first of a rank's token ids, and how many it has."""
    share = -(-vocab_size // tp.size)
    first = min(tp.rank * share, vocab_size)
    return first, min(first + share, vocab_size) - first


class Head(nn.Module, ABC):
    """An output projection. Each rank holds the rows of `num_ids` token ids, from `first_id` on."""

    first_id: int
    num_ids: int

    @abstractmethod
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Project [rows, hidden_size] to [rows, this rank's token ids], into `out` if given."""

    def beside(self, adapters: AdapterRows | None) -> Callable[[Tensor, Tensor | None], Tensor]:
        """Return `logits`, in a step whose rows name these adapters; None: no row names one."""
        return self.logits

    @abstractmethod
    def fix_order(self, sizes: list[int]) -> None:
        """Let a GPU's products for logits add up in the order of the inputs; sizes: as for InOrderWeight"""

    @abstractmethod
    def fix_parts(self) -> None:
        """Let the CPU compute logits by parts, whose shapes do not depend on the number of ranks."""


def _look_up(head: Head, token_ids: Tensor, tp: TensorParallel, rows_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return this rank's part of embeddings, zeros for other ranks' ids. rows_of: looks up rows of this rank"""
    if tp.size == 1:
        return rows_of(token_ids)
    local = token_ids - head.first_id
    ours = (local >= 0) & (local < head.num_ids)
    return rows_of(local.where(ours, 0)) * ours.unsqueeze(1)


class VocabParallelEmbedding(Head):
    """One vector for each token id. Each rank holds a range of ids from `first_id` on; the last rank's may be shorter.

    A model's output projection is such a matrix too, often the very same one.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        tp: TensorParallel,
        other_name: str | None = None,
        dtype: torch.dtype | None = None,
        bias: bool = False,
    ) -> None:
        """name: the tensor's name without ".weight"; other_name: a second name that a checkpoint may store it under

        dtype: the matrix's; None: torch's default
        bias: the matrix is an output projection, too, with a bias of the other name, if it has one
        """
        super().__init__()
        self.name, self.other_name = name, other_name
        self.tp = tp
        self.vocab_size = vocab_size
        self.first_id, self.num_ids = _share_of_ids(vocab_size, tp)
        self.weight = nn.Parameter(torch.empty(self.num_ids, hidden_size, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(self.num_ids, dtype=dtype), requires_grad=False) if bias else None
        self._in_order: InOrderWeight | WeightInParts | None = None

    def fix_order(self, sizes: list[int]) -> None:
        """Let a GPU's products for logits add up in the order of the inputs; sizes: as for InOrderWeight"""
        self._in_order = InOrderWeight(self.weight, self.weight.dtype, False, sizes)

    def fix_parts(self) -> None:
        """Let the CPU compute logits by parts, whose shapes do not depend on the number of ranks."""
        self._in_order = WeightInParts(self.weight, [(len(self.weight), self.vocab_size)])

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up [tokens] int32 ids; returns this rank's part, [tokens, hidden_size], zeros for other ranks' ids."""
        return _look_up(self, token_ids, self.tp, lambda rows: F.embedding(rows, self.weight))

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Use the matrix as output projection. The product and the result have the matrix's dtype."""
        hidden = hidden.to(self.weight.dtype)
        if self._in_order is not None:
            logits = self._in_order.product(hidden, out=out)
        else:
            logits = torch.mm(hidden, self.weight.t(), out=out)
        return logits if self.bias is None else logits.add_(self.bias)

    def shards(self) -> Iterator[Shard]:
        """Yield this rank's rows of the matrix, once for each name that they may have."""
        shape = self.vocab_size, self.weight.shape[1]
        yield Shard(f"{self.name}.weight", self.weight, shape, self.first_id)
        if self.bias is not None:
            yield Shard(f"{self.other_name or self.name}.bias", self.bias, shape[:1], self.first_id, random="zeros")
        if self.other_name is not None:
            yield Shard(
                f"{self.other_name}.weight", self.weight, shape, self.first_id, replaces=(f"{self.name}.weight",)
            )


class QuantizedHead(Head):
    """An output projection whose matrix has a format of its own; each rank holds the ids that it would embed."""

    def __init__(
        self, name: str, vocab_size: int, hidden_size: int, tp: TensorParallel, formats: Formats, bias: bool = False
    ) -> None:
        """name: the tensor's name without ".weight\""""
        super().__init__()
        self.first_id, self.num_ids = _share_of_ids(vocab_size, tp)
        section = Section(name, self.num_ids, (vocab_size, hidden_size), self.first_id)
        self.matrix = formats.make_matrix([section], hidden_size, bias)

    def fix_order(self, sizes: list[int]) -> None:
        """Leave it to the matrix, as a layer does."""

    def fix_parts(self) -> None:
        """Leave it to the matrix, as a layer does."""

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Project in hidden's dtype."""
        logits = self.matrix.product(hidden)
        return logits if out is None else out.copy_(logits)


class QuantizedEmbedding(QuantizedHead):
    """An embedding whose matrix has a format of its own. It may be the output projection, too."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        tp: TensorParallel,
        formats: Formats,
        other_name: str | None = None,
    ) -> None:
        """name, other_name: as for VocabParallelEmbedding"""
        super().__init__(name, vocab_size, hidden_size, tp, formats)
        self.tp, self.name, self.other_name = tp, name, other_name
        self.matrix.takes_adapters = False

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up ids, as VocabParallelEmbedding does."""
        assert isinstance(self.matrix, LookedUp)
        return _look_up(self, token_ids, self.tp, self.matrix.look_up)

    def shards(self) -> Iterator[Shard]:
        """Yield the shard of a plain matrix under the other name, which is rounded as under the first."""
        first = f"{self.name}.weight"
        for shard in self.matrix.shards() if self.other_name is not None else ():
            if shard.name == first:
                yield replace(shard, name=f"{self.other_name}.weight", replaces=(*shard.replaces, first))
