"""CausalLM: what the runner uses of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch
from torch import Tensor, nn

from nanoinfer.attention import AttentionBackend
from nanoinfer.attention.context import Context
from nanoinfer.kernels.adapters.pairs import AdapterRows
from nanoinfer.layers.embedding import Head
from nanoinfer.models.description import Description
from nanoinfer.parallel.tensor_parallel import TensorParallel

Place: TypeAlias = Callable[[int], AbstractContextManager[object]]
"""Takes a layer's number; returns the context in which it is built, whose memory its parameters get."""


def anywhere(layer: int) -> AbstractContextManager[object]:
    """Let a layer's parameters have memory as all others."""
    return nullcontext()


class CausalLM(nn.Module, ABC):
    """One rank's share of a model. Its weights are those of its modules that have shards (weights/shards.py).

    lm_head: what computes the logits before their scale; another may take its place
    pass_over: takes the layers that a forward pass runs, and yields them when their weights are there; another may take
        its place
    """

    lm_head: Head
    pass_over: Callable[[nn.ModuleList], Iterable[nn.Module]]

    @abstractmethod
    def __init__(
        self,
        model: Description,
        max_model_len: int,
        backend: AttentionBackend,
        tp: TensorParallel,
        head_dtype: torch.dtype,
        place: Place = anywhere,
    ) -> None:
        """head_dtype: the logits', and that of the matrix that computes them; place: where layers are built."""
        super().__init__()
        self.pass_over = iter

    @property
    @abstractmethod
    def each_layer(self) -> Sequence[nn.Module]:
        """The layers, numbered as `place` numbers them."""

    @property
    @abstractmethod
    def first_id(self) -> int:
        """The first of this rank's token ids, whose logits it computes."""

    @property
    @abstractmethod
    def num_ids(self) -> int:
        """How many token ids this rank has."""

    @abstractmethod
    def forward(self, token_ids: Tensor, context: Context) -> Tensor:
        """Compute hidden states, [tokens, hidden_size], from token ids, [tokens] int32."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor, out: Tensor | None = None, adapters: AdapterRows | None = None) -> Tensor:
        """Compute logits, [rows, this rank's token ids], from [rows, hidden_size], into `out` if given.

        adapters: those of the head that the rows name; None: no row names one
        """

    @abstractmethod
    def keep_hidden_states(self, slots: Mapping[int, Tensor]) -> None:
        """Copy the hidden states of each step's tokens into slots, from now on. Graphs captured before do not.

        slots: for the numbers of some hidden states (nanoinfer.hidden_layers), [most tokens, hidden_size]
        All ranks call this together; those whose hidden states nobody wants give no slots.
        """

    @abstractmethod
    def one_of_each(self) -> AbstractContextManager[None]:
        """Let a forward pass run one layer of each kind: it launches every kernel, and its result means nothing."""

    @abstractmethod
    def fix_order(self, sizes: list[int], tokens: int) -> None:
        """Let a GPU's products add up in the order of the inputs; raises ValueError if they cannot.

        sizes: the rows of decode steps whose bits are compared; tokens: those of a full step, which are compared too
        """

    @abstractmethod
    def fix_parts(self) -> None:
        """Let the CPU multiply by parts of the matrices, whose shapes do not depend on the number of ranks."""
