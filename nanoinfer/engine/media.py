"""Images and videos of prompts, as the host meets them: in the prefix tree, in chunks, and on the ranks."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from nanoinfer.config import Config
from nanoinfer.media.ahead import PixelsAhead
from nanoinfer.media.pixels import GIVEN
from nanoinfer.media.spans import MediaPrompt
from nanoinfer.runner.media_messages import ChunkMedia, MediaPart, NewMedia

if TYPE_CHECKING:
    from nanoinfer.engine.sequence import Sequence
    from nanoinfer.media.pixels import Pixels


class PromptMedia:
    """The images and videos of one prompt, which its samples share.

    delta: of MediaPrompt
    fault: why an image cannot be computed: then the ranks are told of none, and the request ends
    """

    def __init__(self, prompt: MediaPrompt, whole: bool = False) -> None:
        """whole: no chunk may cut an image, because its tokens see each other"""
        assert prompt.delta <= 0  # rotary tables have as many rows as a sequence may have tokens
        self._prompt = prompt
        self._whole = [span for span in prompt.spans if whole and not span.is_given]
        self.delta = prompt.delta
        self.fault: str | None = None

    @property
    def largest(self) -> int:
        """The most tokens that one chunk must have."""
        return max((span.count for span in self._whole), default=1)

    def content(self, start: int, end: int) -> bytes:
        """Return what tells the placeholders between two places from those of other images, or elsewhere in them."""
        return b"".join(
            span.key + array("i", [span.start - start, span.count, span.first]).tobytes()
            for span in self._prompt.spans
            if span.start < end and span.start + span.count > start
        )

    def last_end(self, end: int) -> int:
        """Return where a chunk may end that could end at `end`."""
        return next((span.start for span in self._whole if span.start < end < span.start + span.count), end)

    def chunk(self, start: int, end: int) -> ChunkMedia | None:
        """Describe the tokens between two places to the ranks; None: they are those of a prompt without images."""
        parts = []
        for span in self._prompt.spans if self.fault is None else ():
            first, behind = max(span.start, start), min(span.start + span.count, end)
            if first < behind:
                own = span.first + first - span.start, first - start, behind - first
                parts.append(MediaPart(span.key, *own, span.is_given))
        positions = self._positions(start, end)
        return ChunkMedia(parts, positions) if parts or positions is not None else None

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


def media_of(prompt: MediaPrompt, config: Config) -> PromptMedia:
    """Return a prompt's images and videos."""
    media = PromptMedia(prompt, any(config.description.whole_images))
    assert media.largest <= config.max_num_batched_tokens  # see check_whole
    return media


def check_whole(largest: int, config: Config) -> None:
    """Raise ValueError if an engine of these options cannot compute so many tokens of an image, which see each other.

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


class MediaFeed:
    """Brings to the ranks the images whose embeddings they do not keep."""

    def __init__(self, keeps: Callable[[bytes], bool], is_pinned: bool) -> None:
        """keeps: whether the ranks keep an image's embeddings, behind the newest step; is_pinned: of PixelsAhead"""
        self._keeps, self._ahead = keeps, PixelsAhead(is_pinned)
        self._encoded: set[bytes] = set()  # ahead, of those that wait; once, for the ranks may lack room to keep them

    def look_ahead(self, waiting: Iterable[Sequence], room: int) -> None:
        """Let threads make the pixels that the next step of so many tokens wants, and hold those of no other."""
        wanted: dict[bytes, Pixels] = {}
        for seq in waiting:
            if room <= 0:
                break
            start = seq.num_scheduled
            if seq.media is not None:
                ahead = seq.media.pixels(start, start + room).items()  # of a long video, not all
                wanted |= {key: pixels for key, pixels in ahead if GIVEN not in pixels}  # embeddings are made already
            room -= len(seq) - start
        self._encoded &= wanted.keys()
        self._ahead.look({key: pixels for key, pixels in self._not_kept(wanted).items() if key not in self._encoded})

    def take_made(self, most_values: int) -> NewMedia:
        """Return images that the ranks can encode before a step wants them, at most so many values or one image."""
        made = self._ahead.take_made(most_values)
        self._encoded |= made.keys()
        return made

    def take(self, chunks: Iterable[tuple[PromptMedia, int, int]]) -> NewMedia:
        """Return the new images of a prefill step; chunks: those of prompts with media, from a place to another.

        An image that cannot be made is the fault of its prompts.
        """
        chunks = list(chunks)
        wanted: dict[bytes, Pixels] = {}
        for media, start, end in chunks:
            wanted |= media.pixels(start, end)
        taken = self._ahead.take(self._not_kept(wanted))
        for media, _, _ in chunks:
            for key in media.pixels(0):  # what another chunk of the step computes of an image, it may share
                if isinstance(fault := taken.get(key), ValueError):
                    media.fault = str(fault)
        return {key: pixels for key, pixels in taken.items() if not isinstance(pixels, ValueError)}

    def _not_kept(self, wanted: dict[bytes, Pixels]) -> dict[bytes, Pixels]:
        return {key: pixels for key, pixels in wanted.items() if not self._keeps(key)}
