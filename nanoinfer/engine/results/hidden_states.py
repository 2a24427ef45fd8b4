"""HiddenStates: the hidden states of a sequence's tokens that its request asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from nanoinfer.config import Config
from nanoinfer.engine.results.token_record import TokenRecord
from nanoinfer.hidden_layers import resolve_layer
from nanoinfer.sampling_params import SamplingParams


class HiddenStateRecord(TokenRecord):
    """Those of one layer, as bytes: numpy knows no bfloat16."""

    __slots__ = ()

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """Return them, [tokens, hidden_size], in the record's own memory: nothing may be put into it from now on."""
        size = self._token_bytes // dtype.itemsize
        return torch.frombuffer(self._bytes, dtype=dtype).view(-1, size) if self._bytes else torch.empty(0, size)


class HiddenStates:
    """Those of a sequence's tokens from `first` on, in some layers.

    layers: the numbers that the request gives -> the same from 0 on
    """

    __slots__ = ("_dtype", "_records", "first", "layers")

    def __init__(self, layers: Mapping[int, int], size: int, dtype: torch.dtype, first: int) -> None:
        """size: numbers of a token in a layer; first: the position of the first token whose hidden states are kept"""
        self.layers, self.first, self._dtype = layers, first, dtype
        self._records = {layer: HiddenStateRecord(size * dtype.itemsize) for layer in set(layers.values())}

    @property
    def num_known(self) -> int:
        """How many of the sequence's first tokens need not be computed for them."""
        return self.first + len(next(iter(self._records.values())))

    def put(self, position: int, states: Mapping[int, npt.NDArray[Any]]) -> None:
        """Take the hidden states of the tokens from `position` on, and forget those of later tokens.

        states: for each layer, the bytes of one token or of several
        """
        for layer, record in self._records.items():
            record.put(position - self.first, states[layer])

    def take_over(self, other: HiddenStates) -> None:
        """Copy those of a sequence with the same tokens and layers."""
        for layer, record in self._records.items():
            record.take_over(other._records[layer])

    def clear(self) -> None:
        """Forget all of them."""
        for record in self._records.values():
            record.clear()

    def tensors(self) -> dict[int, Tensor]:
        """Return them, [tokens, hidden_size] for each number of the request; equal layers share one tensor."""
        made = {layer: record.tensor(self._dtype) for layer, record in self._records.items()}
        return {number: made[layer] for number, layer in self.layers.items()}


def hidden_states_for(params: SamplingParams, num_prompt_tokens: int, config: Config) -> HiddenStates | None:
    """Return room for the hidden states that a new sequence is to have; None if its request asks for none."""
    if not params.hidden_states:
        return None
    model, name = config.description, "hidden_states"
    layers = {layer: resolve_layer(name, layer, model.last_hidden_layer) for layer in params.hidden_states}
    first = 0 if params.prompt_hidden_states else num_prompt_tokens - 1
    return HiddenStates(layers, model.hidden_size, config.torch_dtype, first)
