"""Positions of three parts (mrope), by the rules of transformers' own models."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from nanoinfer.media.kept import Kept
from nanoinfer.media.pixels import Pixels, join

if TYPE_CHECKING:
    from transformers import PretrainedConfig

KEPT_BYTES = 16 << 20  # of positions: those of a prompt with a large image have 50,000


class Positions(NamedTuple):
    """The positions of a prompt's tokens, and the delta of those behind them, as MediaPrompt has both."""

    positions: array[int]
    delta: int

    @property
    def num_bytes(self) -> int:
        """How much memory they take."""
        return self.positions.itemsize * len(self.positions)


class MropePositions:
    """Computes the positions of prompts with images and videos. Many prompts have the same, which threads share."""

    def __init__(self, model: Any) -> None:
        """model: one of transformers' that has get_rope_index, which reads nothing but its config"""
        self._model = model
        self._kept: Kept[Positions] = Kept(KEPT_BYTES)

    @classmethod
    def of(cls, config: PretrainedConfig) -> MropePositions | None:
        """Return those of a checkpoint's model; None if its positions have one part."""
        from transformers import MODEL_MAPPING

        kind = MODEL_MAPPING[type(config)]
        # EXAONE 4.5 inherits the method, and refuses whatever it gets.
        if "input_ids" not in signature(getattr(kind, "get_rope_index", len)).parameters:
            return None
        model = kind.__new__(kind)  # without its layers
        nn.Module.__init__(model)
        model.config = config
        return cls(model)

    def compute(self, types: np.ndarray, shapes: Sequence[Pixels]) -> Positions:
        """Return the positions.

        types: for each token whose placeholder it is, as transformers numbers these, [tokens] int: 0: none, 1: an
            image's, 2: a video's
        shapes: what positions depend on of each of the prompt's images and videos, in their order, by transformers'
            names
        """
        names = sorted({name for own in shapes for name in own})
        joined = {name: join([own[name] for own in shapes if name in own]) for name in names}
        key = b"".join([types.tobytes(), *(name.encode() + joined[name].numpy().tobytes() for name in names)])
        known = self._kept.find(key)
        if known is None:
            known = self._compute(types, joined)
            self._kept.keep(key, known)
        return known

    def _compute(self, types: np.ndarray, shapes: dict[str, Tensor]) -> Positions:
        of_tokens = torch.from_numpy(types.astype(np.int64))[None]
        positions, deltas = self._model.get_rope_index(input_ids=of_tokens, mm_token_type_ids=of_tokens, **shapes)
        return Positions(array("i", positions.to(torch.int32).numpy().tobytes()), int(deltas))
