"""Positions of three parts (mrope), by the rules of transformers' own models."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from nanoinfer.vision.pixels import PIXEL_VALUES, Pixels, join

if TYPE_CHECKING:
    from transformers import PretrainedConfig

IMAGE_TOKEN = 1  # the type of a placeholder, as transformers numbers types


class MropePositions:
    """Computes the positions of the tokens of prompts with images."""

    def __init__(self, model: Any) -> None:
        """model: one of transformers' that has get_rope_index, which reads nothing but its config"""
        self._model = model

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

    def compute(self, is_placeholder: np.ndarray, images: Sequence[Pixels]) -> tuple[array[int], int]:
        """Return the positions and the delta, as VisionPrompt has them.

        is_placeholder: for each token whether it is an image's placeholder, [tokens] bool
        images: each of the prompt's, in their order
        """
        types = torch.from_numpy(is_placeholder.astype(np.int64) * IMAGE_TOKEN)[None]
        shapes = {name: join([image[name] for image in images]) for name in images[0] if name != PIXEL_VALUES}
        positions, deltas = self._model.get_rope_index(input_ids=types, mm_token_type_ids=types, **shapes)
        return array("i", positions.to(torch.int32).numpy().tobytes()), int(deltas)
