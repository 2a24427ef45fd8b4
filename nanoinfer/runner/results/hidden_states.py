"""Hidden states on a rank's device: slots for those of a step, and their way to the host beside the next steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from nanoinfer.runner.transfer import to_host

Span = tuple[int, int]  # the first of some neighbouring tokens of a step, and the one behind the last


class HiddenStateSlots:
    """Room for the hidden states of all tokens of a step, into which the model copies those of some layers.

    The model runs in captured steps, too, so that the slots stay where they are.

    slots: [layers, tokens, hidden_size]
    """

    def __init__(self, layers: Sequence[int], most: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """layers: their numbers, from 0 on; most: tokens in a step, at most; size: hidden_size"""
        self.slots = torch.zeros(len(layers), most, size, dtype=dtype, device=device)
        self._places = {layer: place for place, layer in enumerate(layers)}
        # Copies to the host need no multiprocessor, and so cost a step nothing that runs meanwhile.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def by_layer(self) -> dict[int, Tensor]:
        """The slots of each layer, [tokens, hidden_size]."""
        return {layer: self.slots[place] for layer, place in self._places.items()}

    def taken(self, num_tokens: int) -> Tensor:
        """Return those of the last step's tokens, [layers, tokens, hidden_size], where the next step writes its own."""
        return self.slots[:, :num_tokens]

    def of_spans(self, taken: Tensor, layers: Sequence[int], spans: Sequence[Span]) -> SentStates | None:
        """Return those of some of a step's tokens, ready for their way; taken: of all tokens, as `taken` returns it."""
        if not layers or not spans:
            return None
        parts = [taken[self._places[layer], begin:end] for layer in layers for begin, end in spans]
        return SentStates(layers, torch.cat(parts).unflatten(0, (len(layers), -1)), self._stream)

    def of_lines(self, taken: Tensor, layers: Sequence[int], lines: Tensor | slice) -> SentStates | None:
        """Return those of some of a step's tokens, by their places; taken: as for of_spans"""
        if not layers:
            return None
        return SentStates(layers, torch.stack([taken[self._places[layer]][lines] for layer in layers]), self._stream)


class SentStates:
    """Hidden states on their way to the host. Another stream copies them, while the next steps run."""

    def __init__(self, layers: Sequence[int], states: Tensor, stream: torch.cuda.Stream | None) -> None:
        """states: [layers, tokens, hidden_size], which nothing writes any more; stream: None on the CPU"""
        self.layers, self._states, self._stream = layers, states, stream
        self._event: torch.cuda.Event | None = None

    def to_host(self) -> SentStates:
        """Return the copy in host memory, which is complete behind `wait`."""
        sent = SentStates(self.layers, self._states, self._stream)
        if (stream := self._stream) is not None:
            stream.wait_stream(torch.cuda.current_stream(self._states.device))
            self._states.record_stream(stream)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            sent._states = to_host(self._states)
            if stream is not None:
                sent._event = torch.cuda.Event()
                sent._event.record(stream)
        return sent

    def wait(self) -> Mapping[int, npt.NDArray[Any]]:
        """Wait for the copy; returns the bytes of each layer, [tokens, bytes]."""
        if self._event is not None:
            self._event.synchronize()
        return dict(self._by_layer())

    def _by_layer(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        for layer, states in zip(self.layers, self._states.view(torch.uint8), strict=True):
            yield layer, states.numpy()
