"""Positions of three parts (mrope), by the rules of transformers' own models."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from nanoinfer.vision.kept import Kept
from nanoinfer.vision.pixels import PIXEL_VALUES, Pixels, join

if TYPE_CHECKING:
    from transformers import PretrainedConfig

IMAGE_TOKEN = 1  # the type of a placeholder, as transformers numbers types
KEPT_BYTES = 16 << 20  # of positions: those of a prompt with a large image have 50,000


class Positions(NamedTuple):
    """The positions of a prompt's tokens, and the delta of those behind them, as VisionPrompt has both."""

    positions: array[int]
    delta: int

    @property
    def num_bytes(self) -> int:
        """How much memory they take."""
        return self.positions.itemsize * len(self.positions)


class MropePositions:
    """Computes the positions of the tokens of prompts with images. Many prompts have the same, which threads share."""

    def __init__(self, model: Any) -> None:
        """model: one of transformers' that has get_rope_index, which reads nothing but its config"""
        self._model = model
        self._kept: Kept[Positions] = Kept(KEPT_BYTES)

    @classmethod
    def of(cls, config: PretrainedConfig) -> MropePositions | None:
        """Return those of a checkpoint's model; None if its positions have one part."""
        from transformers import MODEL_MAPPING

        kind = MODEL_MAPPING[type(config)]
        if not hasattr(kind, "get_rope_index"):
            return None
        model = kind.__new__(kind)  # without its layers
        nn.Module.__init__(model)
        model.config = config
        return cls(model)

    def compute(self, is_placeholder: np.ndarray, images: Sequence[Pixels]) -> Positions:
        """Return the positions.

        is_placeholder: for each token whether it is an image's placeholder, [tokens] bool
        images: each of the prompt's, in their order
        """
        shapes = {name: join([image[name] for image in images]) for name in images[0] if name != PIXEL_VALUES}
        key = b"".join([is_placeholder.tobytes(), *(shape.numpy().tobytes() for shape in shapes.values())])
        known = self._kept.find(key)
        if known is None:
            known = self._compute(is_placeholder, shapes)
            self._kept.keep(key, known)
        return known

    def _compute(self, is_placeholder: np.ndarray, shapes: dict[str, Tensor]) -> Positions:
        types = torch.from_numpy(is_placeholder.astype(np.int64) * IMAGE_TOKEN)[None]
        positions, deltas = self._model.get_rope_index(input_ids=types, mm_token_type_ids=types, **shapes)
        return Positions(array("i", positions.to(torch.int32).numpy().tobytes()), int(deltas))
