"""What messages say of images. A step of prompts without any says nothing."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from nanoinfer.vision.pixels import Pixels

NewImages = dict[bytes, "Pixels"]  # those whose embeddings the ranks do not keep, by their keys


class ImagePart(NamedTuple):
    """Neighbouring placeholders of an image in a chunk."""

    key: bytes
    first: int  # which of the image's embeddings the first of them takes
    place: int  # of that one, among the chunk's tokens
    length: int


@dataclass(slots=True)
class ChunkImages:
    """What a chunk of a prompt with images has beside its tokens."""

    parts: list[ImagePart]
    positions: array[int] | None  # the tokens' rotary ones, [3, tokens]; None: they are their places
