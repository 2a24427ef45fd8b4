"""Images: the embeddings that one rank has of images whose prompts are being computed."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from nanoinfer.attention.context import ImageContext
from nanoinfer.runner.image_messages import ImagesMessage
from nanoinfer.runner.message import ChunkMessage
from nanoinfer.runner.transfer import upload
from nanoinfer.vision.spans import Encoded, Tower


class Images:
    """They come with the first prefill step that wants them, and go with the last: as ImagesMessage says."""

    def __init__(self, tower: Tower, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: the decoder's."""
        self._tower, self._device, self._dtype = tower, device, dtype
        self._held: dict[bytes, Encoded] = {}

    def forget(self) -> None:
        """Keep nothing of what the tower has made: it changes."""
        self._held.clear()

    def take(self, message: ImagesMessage, chunks: list[ChunkMessage]) -> ImageContext | None:
        """Encode the new images; returns what the decoder gets of all in a step's chunks, None if it gets nothing."""
        if message.new:
            keys, pixels = zip(*message.new, strict=True)
            self._held.update(zip(keys, self._tower.encode(pixels), strict=True))
        context = self._gather(chunks)
        self._held = {key: self._held[key] for key in message.kept}
        return context

    def _gather(self, chunks: list[ChunkMessage]) -> ImageContext | None:
        places, rows, begin = array("q"), list[tuple[Tensor, ...]](), 0
        for chunk in chunks:
            for part in [] if chunk.images is None else chunk.images.parts:
                own, some = self._held[part.key], slice(part.first, part.first + part.length)
                places.extend(range(begin + part.place, begin + part.place + part.length))
                rows.append(tuple(x[some] for x in (own.embeddings, *own.deep)))
            begin += len(chunk.token_ids)
        if not rows:
            return None
        embeddings, *deep = (torch.cat(x).to(self._device, self._dtype) for x in zip(*rows, strict=True))
        return ImageContext(upload(places, self._device), embeddings, deep)
