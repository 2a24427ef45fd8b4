"""The images of prompts, as the host meets them: in the prefix tree, in chunks, and on the ranks."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from nanoinfer.config import Config
from nanoinfer.runner.message import ChunkImages, ImagePart, ImagesMessage
from nanoinfer.vision.spans import ImageSpan, VisionPrompt

if TYPE_CHECKING:
    from torch import Tensor

Pixels = Mapping[str, "Tensor"]


class PromptImages:
    """The images of one prompt, which its samples share.

    delta: of VisionPrompt
    """

    def __init__(self, prompt: VisionPrompt, whole: bool = False) -> None:
        """whole: no chunk may cut an image, because its tokens see each other"""
        self._whole = whole
        self._positions, self._length, self.delta = prompt.positions, len(prompt.token_ids), prompt.delta
        self._images = [
            (span, _places(prompt.token_ids, span), pixels)
            for span, pixels in zip(prompt.spans, prompt.pixels, strict=True)
        ]

    def content(self, start: int, end: int) -> bytes:
        """Return what tells the placeholders between two places from those of other images, or elsewhere in them."""
        return b"".join(
            span.key + array("i", [span.start - start, span.count]).tobytes()
            for span, places, _ in self._images
            if places[0] < end and places[-1] >= start
        )

    @property
    def largest(self) -> int:
        """The most tokens that one chunk must have."""
        return max((places[-1] - places[0] + 1 for _, places, _ in self._images if self._whole), default=1)

    def last_end(self, end: int) -> int:
        """Return where a chunk may end that could end at `end`."""
        cut = (places[0] for _, places, _ in self._images if self._whole and places[0] < end <= places[-1])
        return next(cut, end)

    def chunk(self, start: int, end: int) -> ChunkImages | None:
        """Describe the tokens between two places to the ranks; None: they are those of a prompt without images."""
        parts = []
        for span, places, _ in self._images:
            first, stop = bisect_left(places, start), bisect_left(places, end)
            if first < stop:
                parts.append(ImagePart(span.key, first, array("i", [place - start for place in places[first:stop]])))
        positions = self._positions_of(start, end)
        return ChunkImages(parts, positions) if parts or positions is not None else None

    def _positions_of(self, start: int, end: int) -> array[int] | None:
        if self._positions is None:
            return None
        count, positions = self._length, array("i")
        behind = range(max(start, count) + self.delta, end + self.delta)  # generated before a preemption
        for part in range(3):
            positions.extend(self._positions[part * count + min(start, count) : part * count + min(end, count)])
            positions.extend(behind)
        return positions

    def within(self, start: int, end: int) -> Iterable[tuple[bytes, Pixels, bool]]:
        """Yield the images between two places: key, pixels, and whether the image goes on behind the second."""
        for span, places, pixels in self._images:
            if bisect_left(places, start) < bisect_left(places, end):
                yield span.key, pixels, places[-1] >= end


def _places(token_ids: list[int], span: ImageSpan) -> array[int]:
    """Return where an image's placeholders stand."""
    places, placeholder = array("i"), token_ids[span.start]
    for place in range(span.start, len(token_ids)):
        if token_ids[place] == placeholder:
            places.append(place)
            if len(places) == span.count:
                return places
    raise AssertionError(f"{span.count} placeholders from {span.start} on: found {len(places)}")


def take_images(prompt: VisionPrompt, config: Config) -> PromptImages:
    """Return a prompt's images; raises ValueError if an engine of these options cannot compute them."""
    whole = any(config.description.whole_images)
    images, most = PromptImages(prompt, whole), config.max_num_batched_tokens
    if config.deterministic:
        raise ValueError("deterministic=True: must be False for a prompt with images")
    if whole and config.attention_backend == "flash_attn":
        raise ValueError(
            "attention_backend='flash_attn': cannot let the tokens of an image see each other, as this model does;"
            " 'triton' and 'torch' can"
        )
    if images.largest > most:
        raise ValueError(
            f"max_num_batched_tokens={most}: must be at least {images.largest} for a prompt with an image of so many"
            " tokens: they see each other, so that one step computes them all"
        )
    return images


class HeldImages:
    """Whose embeddings the ranks hold behind the newest step: those of images that it has cut.

    Ranks hold what the newest message with images said. An image that is dropped too early, as when another prompt
    passes, is encoded again: so nobody has to tell of sequences that end or start again.
    """

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def plan(self, chunks: Iterable[tuple[PromptImages, int, int]]) -> ImagesMessage | None:
        """Tell the ranks what a prefill step wants; chunks: those of prompts with images, from a place to another."""
        wanted: dict[bytes, Pixels] = {}
        cut: set[bytes] = set()
        for images, start, end in chunks:
            for key, pixels, goes_on in images.within(start, end):
                wanted[key] = pixels
                if goes_on:
                    cut.add(key)
        if not wanted and not self._keys:
            return None
        new = [(key, pixels) for key, pixels in wanted.items() if key not in self._keys]
        self._keys = cut
        return ImagesMessage(new, sorted(cut))

    def clear(self) -> None:
        """Let the ranks encode all anew."""
        self._keys.clear()
