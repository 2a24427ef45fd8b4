"""MediaEmbeddings: those that one rank makes of images and of videos' frames, and keeps for those that come again."""

from __future__ import annotations

from array import array
from contextlib import nullcontext

import torch
from torch import Tensor

from nanoinfer.attention.context import MediaContext
from nanoinfer.media.kept import Kept
from nanoinfer.media.pixels import GIVEN, Pixels, count_embeddings
from nanoinfer.media.spans import Encoded, Tower
from nanoinfer.parallel.shares import deal
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.media_messages import NewMedia
from nanoinfer.runner.message import ChunkMessage
from nanoinfer.runner.transfer import to_host, upload

# Of host memory: twice the embeddings of a step of 16,384 tokens of Qwen3-VL-8B, which are four for each token. They
# are there for the next chunk of a prompt, for one that was preempted, and for prompts that share an image.
KEPT_BYTES = 1 << 30


class MediaEmbeddings:
    """Every rank is told of the same images in the same order, so that all keep those of the same ones."""

    def __init__(
        self,
        tower: Tower,
        tp: TensorParallel,
        device: torch.device,
        dtype: torch.dtype,
        hidden_size: int,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """dtype, hidden_size: the decoder's."""
        self._tower, self._tp = tower, tp
        self._device, self._dtype, self._hidden_size = device, dtype, hidden_size
        self._kept: Kept[Encoded] = Kept(kept_bytes)
        # Copies to host memory run beside the step: those of Qwen3-VL's embeddings would take 2% of the time.
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def keeps(self, key: bytes) -> bool:
        """Whether an image's embeddings are kept."""
        return key in self._kept

    def encode(self, new: NewMedia) -> dict[bytes, Encoded]:
        """Encode images, keep their embeddings, and return them on the tower's device. All ranks call this together.

        What a caller gave as embeddings is not kept: its prompt holds it, and it would push out what towers have made.
        """
        pixels = list(new.values())
        made = self._tower.encode(pixels) if self._tp.size == 1 or not new else self._encode_share(pixels)
        encoded = dict(zip(new, made, strict=True))
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream(self._device))
        with nullcontext() if self._copies is None else torch.cuda.stream(self._copies):
            for key, own in encoded.items():
                if GIVEN not in new[key]:
                    self._kept.keep(key, own.moved(self._to_host))
        return encoded

    def _encode_share(self, pixels: list[Pixels]) -> list[Encoded]:
        """Encode some of the images, while other ranks encode the others; returns those of all."""
        counts = list(map(count_embeddings, pixels))
        own = deal(counts, self._tp.size)[self._tp.rank]
        made = self._tower.encode([pixels[index] for index in own])
        shape = 1 + self._tower.num_deep, sum(counts), self._hidden_size
        whole = torch.zeros(shape, dtype=self._dtype, device=self._device)
        images = whole.split(counts, dim=1)
        for index, encoded in zip(own, made, strict=True):
            images[index].copy_(torch.stack((encoded.embeddings, *encoded.deep)))
        self._tp.all_reduce(whole)  # which is exact: of each number, all ranks but one have zero
        return [Encoded(image[0], tuple(image[1:])) for image in images]

    def forget(self) -> None:
        """Keep nothing of what the tower has made: it changes."""
        self._kept.clear()

    def gather(self, new: NewMedia, chunks: list[ChunkMessage]) -> MediaContext | None:
        """Encode the new images; returns what the decoder gets of all in a step's chunks, None if it gets nothing."""
        found = self._find(new, chunks) | self.encode(new)  # in this order: new ones may push out others
        places, rows, begin = array("q"), list[tuple[Tensor, ...]](), 0
        for chunk in chunks:
            for part in [] if chunk.media is None else chunk.media.parts:
                own, some = found[part.key], slice(part.first, part.first + part.length)
                places.extend(range(begin + part.place, begin + part.place + part.length))
                rows.append(tuple(x[some] for x in (own.embeddings, *own.deep)))
            begin += len(chunk.token_ids)
        if not rows:
            return None
        embeddings, *deep = (torch.cat(x).to(self._device, self._dtype) for x in zip(*rows, strict=True))
        return MediaContext(upload(places, self._device), embeddings, deep)

    def _find(self, new: NewMedia, chunks: list[ChunkMessage]) -> dict[bytes, Encoded]:
        """Return the kept embeddings of a step's images, on the device."""
        parts = [part for chunk in chunks if chunk.media is not None for part in chunk.media.parts]
        found = {key: self._kept.find(key) for key in dict.fromkeys(part.key for part in parts) if key not in new}
        if found and self._copies is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._copies)
        return {key: own.moved(self._to_device) for key, own in found.items() if own is not None}

    def _to_host(self, x: Tensor) -> Tensor:
        """Copy what shares memory with other images of its batch, which may then be used again."""
        if self._copies is not None:
            x.record_stream(self._copies)
        return to_host(x)

    def _to_device(self, x: Tensor) -> Tensor:
        return x.to(self._device, non_blocking=True)
