"""Pictures of noise, and videos of such."""

from __future__ import annotations

import numpy as np
from PIL import Image


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a picture that differs from others in each pixel."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def film(frames: int, width: int, height: int, seed: int = 0) -> list[Image.Image]:
    """Return the frames of a video, all of which differ."""
    return [picture(width, height, 100 * (seed + 1) + frame) for frame in range(frames)]
