"""Several ranks share out new images: each encodes some, and all get the embeddings of all."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist

from nanoinfer.media.pixels import COUNT, PIXEL_VALUES, Pixels
from nanoinfer.media.spans import Encoded
from nanoinfer.parallel.tensor_parallel import CPU, TensorParallel
from nanoinfer.runner.media import MediaEmbeddings
from nanoinfer.runner.media_messages import ChunkMedia, MediaPart, NewMedia
from nanoinfer.runner.message import ChunkMessage

HIDDEN = 3
T = TypeVar("T")


class Standin:
    """A tower whose numbers tell the image, the layer and the place; calls: of how many images each one was."""

    num_deep = 2

    def __init__(self) -> None:
        self.calls: list[int] = []

    def encode(self, pixels: Sequence[Pixels]) -> list[Encoded]:
        self.calls.append(len(pixels))
        return [self._encode(image) for image in pixels]

    def _encode(self, image: Pixels) -> Encoded:
        generator = torch.Generator().manual_seed(int(image[PIXEL_VALUES]))
        shape = 1 + self.num_deep, int(image[COUNT]), HIDDEN
        embeddings, *deep = torch.randn(shape, generator=generator).bfloat16()
        return Encoded(embeddings, tuple(deep))


def make(tp: TensorParallel) -> tuple[MediaEmbeddings, Standin]:
    tower = Standin()
    return MediaEmbeddings(tower, tp, CPU, torch.bfloat16, HIDDEN), tower


def media_of(counts: Sequence[int]) -> NewMedia:
    """Return images of which so many embeddings are made."""
    return {
        b"%d" % number: {PIXEL_VALUES: torch.tensor(number), COUNT: torch.tensor(count)}
        for number, count in enumerate(counts)
    }


def tensors(encoded: dict[bytes, Encoded]) -> list[torch.Tensor]:
    return [tensor for image in encoded.values() for tensor in (image.embeddings, *image.deep)]


def on_ranks(count: int, function: Callable[[TensorParallel], T]) -> list[T]:
    """Let ranks in threads call a function; returns what it returns on each."""
    store = dist.HashStore()

    def live(rank: int) -> T:
        tp = TensorParallel(rank, count, store)
        tp.connect()
        try:
            return function(tp)
        finally:
            tp.close()

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(live, range(count)))


@pytest.mark.parametrize(
    ("counts", "encoded"),
    [
        ([5], [1, 0]),
        ([1, 1], [1, 1]),
        ([1, 6, 2, 1, 1], [1, 4]),
        ([3, 3, 3], [2, 1]),
        ([2, 9, 4, 4, 5, 1], [1, 3, 2]),
        ([4, 4], [1, 1, 0]),
    ],
)
def test_each_rank_encodes_a_share_and_gets_all(counts: list[int], encoded: list[int]) -> None:
    alone, _ = make(TensorParallel())
    wanted = tensors(alone.encode(media_of(counts)))

    def encode(tp: TensorParallel) -> tuple[list[torch.Tensor], list[int]]:
        images, tower = make(tp)
        made = images.encode(media_of(counts))
        assert all(images.keeps(key) for key in made)
        return tensors(made), tower.calls

    for rank, (made, calls) in enumerate(on_ranks(len(encoded), encode)):
        assert calls == [encoded[rank]]
        assert all(map(torch.equal, made, wanted))


def test_what_ranks_keep_is_encoded_by_none() -> None:
    parts = [MediaPart(b"0", 1, 0, 2), MediaPart(b"1", 0, 2, 1)]
    chunk = ChunkMessage(array("i", [0] * 3), 0, [], media=ChunkMedia(parts, None))

    def gather(tp: TensorParallel) -> tuple[list[torch.Tensor], list[int]]:
        images, tower = make(tp)
        images.encode(media_of([3, 1]))
        context = images.gather({}, [chunk])
        assert context is not None
        return [context.embeddings, *context.deep], tower.calls

    (wanted, alone), (first, one), (second, other) = *on_ranks(1, gather), *on_ranks(2, gather)
    assert (alone, one, other) == ([2, 0], [1, 0], [1, 0])
    for found in (first, second):
        assert all(map(torch.equal, found, wanted))
