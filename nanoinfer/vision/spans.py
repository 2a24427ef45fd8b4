"""What an image is in a prompt, and what a tower makes of it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ImageSpan:
    """An image's place in a prompt.

    key: 16 bytes, the digest of its pixels and of the settings that made them; equal images have equal keys
    start: the first of its placeholders in the prompt
    count: how many placeholders it has, which is how many embeddings the tower makes of it; other tokens, such as ends
        of rows, may stand between them
    """

    key: bytes
    start: int
    count: int


@dataclass(frozen=True)
class VisionPrompt:
    """A prompt with images.

    token_ids: its tokens, in which each image has its placeholders
    spans: the images, in the order of the prompt
    positions: three numbers for each token, [3, tokens], part after part, for rotary embeddings in three parts (mrope);
        None: a token's position is its place
    delta: what to add to a later token's place to have its position
    pixels: for each span what the tower takes
    """

    token_ids: list[int]
    spans: tuple[ImageSpan, ...]
    positions: array[int] | None
    delta: int
    pixels: tuple[Mapping[str, Tensor], ...]


@dataclass(frozen=True)
class Encoded:
    """What a tower makes of an image.

    embeddings: in place of its placeholders' own, [count, hidden_size]
    deep: what is added to the hidden states of these places behind the first layers, [count, hidden_size] for each
        of these layers (deepstack)
    """

    embeddings: Tensor
    deep: tuple[Tensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        """How much memory they take."""
        return sum(tensor.nbytes for tensor in (self.embeddings, *self.deep))


class Tower(Protocol):
    """Makes embeddings of images."""

    def encode(self, pixels: Sequence[Mapping[str, Tensor]]) -> list[Encoded]:
        """Return what the decoder gets for each image; pixels: as VisionPrompt has them, of any prompts."""
        ...
