"""What messages say of images and videos. A step of prompts without any says nothing."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from nanoinfer.media.pixels import Pixels

NewMedia = dict[bytes, "Pixels"]  # those whose embeddings the ranks do not keep, by their keys


class MediaPart(NamedTuple):
    """Neighbouring placeholders of an image, or of a video's frames, in a chunk."""

    key: bytes
    first: int  # which of the image's embeddings the first of them takes
    place: int  # of that one, among the chunk's tokens
    length: int
    is_given: bool = False  # as MediaSpan says


@dataclass(slots=True)
class ChunkMedia:
    """What a chunk of a prompt with images or videos has beside its tokens."""

    parts: list[MediaPart]
    positions: array[int] | None  # the tokens' rotary ones, [3, tokens]; None: they are their places

    @property
    def images(self) -> list[MediaPart]:
        """The parts that are images', and not a caller's embeddings."""
        return [part for part in self.parts if not part.is_given]
