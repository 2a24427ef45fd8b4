"""The images of prompts, as the host meets them: in the prefix tree, in chunks, and on the ranks."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nanoinfer.config import Config
from nanoinfer.runner.image_messages import ChunkImages, ImagePart, ImagesMessage
from nanoinfer.vision.spans import VisionPrompt

if TYPE_CHECKING:
    from nanoinfer.vision.pixels import Pixels


class PromptImages:
    """The images of one prompt, which its samples share.

    delta: of VisionPrompt
    """

    def __init__(self, prompt: VisionPrompt, whole: bool = False) -> None:
        """whole: no chunk may cut an image, because its tokens see each other"""
        assert prompt.delta <= 0  # rotary tables have as many rows as a sequence may have tokens
        self._prompt, self._whole = prompt, whole
        self.delta = prompt.delta

    @property
    def largest(self) -> int:
        """The most tokens that one chunk must have."""
        return max((span.count for span in self._prompt.spans if self._whole), default=1)

    def content(self, start: int, end: int) -> bytes:
        """Return what tells the placeholders between two places from those of other images, or elsewhere in them."""
        return b"".join(
            span.key + array("i", [span.start - start, span.count, span.first]).tobytes()
            for span in self._prompt.spans
            if span.start < end and span.start + span.count > start
        )

    def last_end(self, end: int) -> int:
        """Return where a chunk may end that could end at `end`."""
        spans = self._prompt.spans if self._whole else ()
        return next((span.start for span in spans if span.start < end < span.start + span.count), end)

    def chunk(self, start: int, end: int) -> ChunkImages | None:
        """Describe the tokens between two places to the ranks; None: they are those of a prompt without images."""
        parts = []
        for span in self._prompt.spans:
            first, behind = max(span.start, start), min(span.start + span.count, end)
            if first < behind:
                parts.append(ImagePart(span.key, span.first + first - span.start, first - start, behind - first))
        positions = self._positions(start, end)
        return ChunkImages(parts, positions) if parts or positions is not None else None

    def _positions(self, start: int, end: int) -> array[int] | None:
        given, count, positions = self._prompt.positions, len(self._prompt.token_ids), array("i")
        if given is None:
            return None
        generated = range(max(start, count) + self.delta, end + self.delta)  # before a preemption
        for part in range(3):
            positions.extend(given[part * count + min(start, count) : part * count + min(end, count)])
            positions.extend(generated)
        return positions

    def pixels(self, start: int, end: int | None = None) -> dict[bytes, Pixels]:
        """Return the pixels of the images between two places, by their keys; end: None: the prompt's end"""
        prompt = self._prompt
        return {
            span.key: pixels
            for span, pixels in zip(prompt.spans, prompt.pixels, strict=True)
            if span.start + span.count > start and (end is None or span.start < end)
        }


def take_images(prompt: VisionPrompt, config: Config) -> PromptImages:
    """Return a prompt's images; raises ValueError as check_whole does."""
    images = PromptImages(prompt, any(config.description.whole_images))
    check_whole(images.largest, config)
    return images


def check_whole(largest: int, config: Config) -> None:
    """Raise ValueError if an engine of these options cannot compute an image of so many tokens, which see each other.

    Nothing is raised for a model whose tokens see only what is before them.
    """
    if not any(config.description.whole_images):
        return
    most = config.max_num_batched_tokens
    if config.attention_backend == "flash_attn":
        raise ValueError(
            "attention_backend='flash_attn': cannot let the tokens of an image see each other, as this model does;"
            " 'triton' and 'torch' can, and images=False needs no such thing"
        )
    if largest > most:
        raise ValueError(
            f"max_num_batched_tokens={most}: must be at least {largest}, the tokens of an image: they see each other,"
            " so that one step computes them all; raise it, make images smaller by image_options, or set images=False"
        )


class HeldImages:
    """Whose embeddings the ranks hold behind the newest step: those that its prompts want again.

    Ranks hold what the newest message with images said. An image that is dropped too early, as when another prompt
    passes, is encoded again: so nobody has to tell of sequences that end or start again.
    """

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def plan(self, chunks: Iterable[tuple[PromptImages, int, int]]) -> ImagesMessage | None:
        """Tell the ranks what a prefill step wants; chunks: those of prompts with images, from a place to another."""
        wanted: dict[bytes, Pixels] = {}
        kept: set[bytes] = set()
        for images, start, end in chunks:
            own = images.pixels(start, end)
            wanted |= own
            kept |= own.keys() & images.pixels(end).keys()
        if not wanted and not self._keys:
            return None
        new = [(key, pixels) for key, pixels in wanted.items() if key not in self._keys]
        self._keys = kept
        return ImagesMessage(new, sorted(kept))

    def clear(self) -> None:
        """Let the ranks encode all anew."""
        self._keys.clear()
