"""Captured: what a model has kept of each token of a step, and what of that the host gets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.runner.memory.holdings import Holdings
from nanoinfer.runner.message import ChunkMessage, PrefillMessage
from nanoinfer.runner.results.extras import Extras


class Captured(NamedTuple):
    """Of each token of a step whose model has run.

    experts: [tokens, layers, used], those that it took; None: outputs do not have them
    hidden: [layers, tokens, hidden_size], of the layers that outputs may have; None: they have none
    """

    experts: Tensor | None
    hidden: Tensor | None

    @classmethod
    def of_step(cls, holdings: Holdings, num_tokens: int) -> Captured:
        """Return what the last step has kept, where the next one keeps its own."""
        routing, hidden = holdings.routing, holdings.hidden_states
        return cls(
            None if routing is None else routing.taken(num_tokens),
            None if hidden is None else hidden.taken(num_tokens),
        )

    @classmethod
    def joined(cls, parts: Sequence[Captured]) -> Captured:
        """Return what several runs of the model have kept, one after another."""
        experts = [part.experts for part in parts if part.experts is not None]
        hidden = [part.hidden for part in parts if part.hidden is not None]
        return cls(torch.cat(experts) if experts else None, torch.cat(hidden, dim=1) if hidden else None)

    def of_prompts(self, message: PrefillMessage, holdings: Holdings) -> Extras:
        """Return the extras of a step of prompts: experts of all tokens, hidden states of those that want some."""
        extras = Extras(experts=self.experts)
        if self.hidden is not None and holdings.hidden_states is not None:
            how = message.hidden_layers, _hidden_spans(message.chunks)
            extras.hidden = holdings.hidden_states.of_spans(self.hidden, *how)
        return extras

    def of_lines(self, lines: Tensor | slice, hidden_layers: list[int], holdings: Holdings) -> Extras:
        """Return the extras of some places of a decode step; hidden_layers: those that some row wants"""
        extras = Extras(experts=None if self.experts is None else self.experts[lines])
        if self.hidden is not None and holdings.hidden_states is not None:
            extras.hidden = holdings.hidden_states.of_lines(self.hidden, hidden_layers, lines)
        return extras


def _hidden_spans(chunks: list[ChunkMessage]) -> list[tuple[int, int]]:
    """Return where those of a step's tokens begin, and end, whose hidden states the host gets."""
    ends = accumulate(len(chunk.token_ids) for chunk in chunks)
    return [
        (end - len(chunk.token_ids) + chunk.hidden_from, end)
        for chunk, end in zip(chunks, ends, strict=True)
        if chunk.hidden_from is not None
    ]
