"""What an image is in a prompt, and what a tower makes of it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MediaSpan:
    """Neighbouring placeholders of an image in a prompt: all that it has, or one row of it where tokens end rows.

    A video is as many images as there are groups of frames for which the same tokens stand; audio is one, too.

    key: 16 bytes, the digest of its pixels and of the settings that made them; equal images have equal keys
    start: the first of the placeholders in the prompt
    count: how many they are
    first: which of the image's embeddings the first of them takes; the others take those that follow
    is_given: these are embeddings that a caller gave in place of tokens, and no image's
    """

    key: bytes
    start: int
    count: int
    first: int = 0
    is_given: bool = False


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt with images, videos or audio.

    token_ids: its tokens, in which each image has its placeholders
    spans: the images' placeholders, in the order of the prompt
    positions: three numbers for each token, [3, tokens], part after part, for rotary embeddings in three parts (mrope);
        None: a token's position is its place
    delta: what to add to a later token's place to have its position
    pixels: for each span what the tower takes, which may be made when it is read; spans of one image have the same
        object
    counts: how many placeholders each image and each video has, by its name in the prompt, such as "image 0"; empty
        where embeddings stand that a caller gave
    """

    token_ids: list[int]
    spans: tuple[MediaSpan, ...]
    positions: array[int] | None
    delta: int
    pixels: tuple[Mapping[str, Tensor], ...]
    counts: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.token_ids)

    def followed_by(self, token_ids: list[int]) -> MediaPrompt:
        """Return this prompt with further tokens, which are no image's."""
        count, positions = len(self.token_ids), self.positions
        if positions is not None:
            added = array("i", range(count + self.delta, count + self.delta + len(token_ids)))
            parts = (positions[part * count : (part + 1) * count] + added for part in range(3))
            positions = sum(parts, array("i"))
        return replace(self, token_ids=self.token_ids + token_ids, positions=positions)

    @property
    def given_end(self) -> int:
        """Where the last of the embeddings ends that a caller gave; 0: there are none."""
        return max((span.start + span.count for span in self.spans if span.is_given), default=0)

    @property
    def largest(self) -> tuple[str, int]:
        """Which of its images and videos has the most placeholders, and how many."""
        return max(self.counts.items(), key=itemgetter(1))


@dataclass(frozen=True)
class Encoded:
    """What a tower makes of an image.

    embeddings: [placeholders, hidden_size]; they are hidden states already, which no family scales
    deep: what is added to the hidden states of these places behind the first layers, [placeholders, hidden_size] for
        each of these layers (deepstack)
    """

    embeddings: Tensor
    deep: tuple[Tensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        """How much memory they take."""
        return sum(tensor.nbytes for tensor in (self.embeddings, *self.deep))

    def moved(self, move: Callable[[Tensor], Tensor]) -> Encoded:
        """Return what `move` makes of each tensor."""
        return Encoded(move(self.embeddings), tuple(map(move, self.deep)))


class Tower(Protocol):
    """Makes embeddings of images.

    num_deep: how many tensors Encoded.deep has
    """

    num_deep: int

    def encode(self, pixels: Sequence[Mapping[str, Tensor]]) -> list[Encoded]:
        """Return what the decoder gets for each image; pixels: as MediaPrompt has them, of any prompts."""
        ...
