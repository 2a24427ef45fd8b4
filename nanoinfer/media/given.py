"""Embeddings that a caller gives in place of a prompt's tokens. They come to the decoder as those of images do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nanoinfer.media.pixels import COUNT, GIVEN, Pixels
from nanoinfer.media.spans import Encoded, MediaSpan, Tower

KEY_BYTES = 16  # of a MediaSpan
PIECE = 64  # rows with a key of their own: prompts share the cache up to the piece in which they part


def pieces_of(embeddings: Tensor, start: int) -> Iterator[tuple[MediaSpan, Pixels]]:
    """Yield a tensor's pieces, and what stands for pixels of each.

    embeddings: [n, hidden_size], of which nothing is kept; start: the place of the first row in the prompt
    """
    for first in range(0, len(embeddings), PIECE):
        rows = embeddings[first : first + PIECE].clone()  # a view would be pickled with the whole
        key = hashlib.blake2b(rows.view(torch.uint8).numpy().data, digest_size=KEY_BYTES).digest()
        yield MediaSpan(key, start + first, len(rows), is_given=True), {GIVEN: rows, COUNT: torch.tensor(len(rows))}


class GivenTower:
    """A Tower that returns embeddings as they were given, and lets another one encode images.

    num_deep: as Tower has it
    """

    def __init__(self, tower: Tower | None, device: torch.device, dtype: torch.dtype, scale: float) -> None:
        """tower: None: there are no images; scale: factor of what is given"""
        self._tower, self._device, self._dtype, self._scale = tower, device, dtype, scale
        self.num_deep = 0 if tower is None else tower.num_deep

    def encode(self, pixels: Sequence[Pixels]) -> list[Encoded]:
        """Return what the decoder gets for each image, and for each piece of given embeddings."""
        images = [own for own in pixels if GIVEN not in own]
        assert self._tower is not None or not images
        made = iter(self._tower.encode(images) if self._tower is not None and images else ())
        return [self._as_given(own[GIVEN]) if GIVEN in own else next(made) for own in pixels]

    def _as_given(self, rows: Tensor) -> Encoded:
        embeddings = rows.to(self._device, self._dtype, non_blocking=True)
        if self._scale != 1:
            embeddings = embeddings * self._scale
        return Encoded(embeddings, (torch.zeros_like(embeddings),) * self.num_deep)
