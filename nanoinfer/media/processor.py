"""The processor: it makes room in prompts for the embeddings of images, videos and audio."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nanoinfer.media.audio.processor import CLASSES as AUDIO_CLASSES
from nanoinfer.media.audio.processor import AudioProcessor, read_extractor
from nanoinfer.media.files import named_errors
from nanoinfer.media.images.opening import Opener
from nanoinfer.media.images.placeholders import CLASSES
from nanoinfer.media.images.processor import ImageProcessor
from nanoinfer.media.images.reading import read_images
from nanoinfer.media.messages import Media
from nanoinfer.media.pixels import Pixels, PixelSource
from nanoinfer.media.positions import MropePositions, Positions
from nanoinfer.media.prepared import Prepared
from nanoinfer.media.spans import MediaPrompt, MediaSpan
from nanoinfer.media.videos.kinds import CLASSES as VIDEO_CLASSES
from nanoinfer.media.videos.kinds import kind_of
from nanoinfer.media.videos.processor import OF_VIDEOS, Group, PreparedVideo, VideoProcessor

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

AnyPrepared = Prepared | PreparedVideo


class Modality(NamedTuple):
    """A kind of what a prompt may have beside text.

    noun: its name
    type: transformers' number of its placeholders
    text, id: what stands for one in a prompt's text and in its tokens, before that is as long as its embeddings
    token_id: in whose place an embedding is put
    most: so many may be in a prompt; None: any number
    prepare: returns what is known of one; it takes a name and what a user gave
    """

    noun: str
    type: int
    text: str
    id: int
    token_id: int
    most: int | None
    prepare: Callable[[str, Any], AnyPrepared]

    def check_count(self, name: str, prompt: str | Sequence[int], given: int) -> None:
        """Raise ValueError if more of them are given than may be, or if a prompt has not a placeholder for each."""
        if self.most is not None and given > self.most:
            limit = f"limit_{self.noun}s_per_prompt={self.most}"
            raise ValueError(f"{name} has {given} {self.noun}s: must have {f'1 to {limit}' if self.most else limit}")
        if isinstance(prompt, str):
            count, what = prompt.count(self.text), repr(self.text)
        else:
            count, what = prompt.count(self.id), f"token {self.id}"
        if count != given:
            raise ValueError(
                f"{name} has {count} placeholders, {what}, for {given} {self.noun}s: must have one for each"
            )

    def check_places(self, name: str, types: np.ndarray, expected: int) -> None:
        """Raise ValueError if a prompt has more tokens in whose place an embedding is put than there are of these."""
        if np.count_nonzero(types == self.type) != expected:
            raise ValueError(f"{name} has token {self.token_id}, for {self.noun}s, where no {self.noun} is: must not")


class MediaProcessor:
    """Makes MediaPrompts by the processors of a checkpoint, in any number of threads.

    folder: the checkpoint's; config: its config.json; tokenizer: its own, or another
    options: how large images become: "max_pixels" and "min_pixels" for Qwen, "max_soft_tokens" for Gemma 4, or "size"
        as its image processor has it; with "do_pan_and_scan", Gemma 3 also sees crops of long images. Where videos are
        taken, "fps" and "videos_kwargs" are for these
    most_images, most_videos: so many may be in a prompt; None: any number
    image_folder: as for Opener

    images: prepares each image; videos: each video; audio: each sound; None: the model takes none

    Raises ValueError if the class neither sees nor hears, the folder has no processor, or that takes no such option.
    """

    def __init__(
        self,
        folder: str,
        config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        options: Mapping[str, Any] | None = None,
        most_images: int | None = None,
        image_folder: str | Path | None = None,
        most_videos: int | None = None,
    ) -> None:
        _check_class(config)
        self._tokenizer, self._positions = tokenizer, MropePositions.of(config)
        self.images: ImageProcessor | None = None
        self.videos: VideoProcessor | None = None
        self.audio: AudioProcessor | None = None
        opener = Opener(image_folder)
        if _class_of(config) in AUDIO_CLASSES:
            if options:
                raise ValueError(f"image_options={options}: must be left out: this model hears, and sees no images")
            with named_errors(folder):
                own = self.audio = AudioProcessor(read_extractor(folder), config, tokenizer, opener)
            self._kinds = [Modality("audio", 3, own.text, own.token_id, own.token_id, None, own.prepare)]
        else:
            self._kinds = self._see(folder, config, options or {}, opener, most_images, most_videos)
        self._splitter = re.compile("|".join(re.escape(kind.text) for kind in self._kinds))

    def _see(
        self,
        folder: str,
        config: PretrainedConfig,
        options: Mapping[str, Any],
        opener: Opener,
        most_images: int | None,
        most_videos: int | None,
    ) -> list[Modality]:
        """Read how images and videos are processed; returns what a prompt may have."""
        with named_errors(folder):
            of_videos = kind_of(folder, config, self._tokenizer)
            placeholder, processor = read_images(folder, config, self._tokenizer)
        token_id: int = config.image_token_id
        for_images = {name: value for name, value in options.items() if of_videos is None or name not in OF_VIDEOS}
        own = self.images = ImageProcessor(processor, self._tokenizer, placeholder, token_id, for_images, opener)
        ids = self._tokenizer.convert_tokens_to_ids(placeholder.text), token_id
        kinds = [Modality("image", 1, placeholder.text, *ids, most_images, own.prepare)]
        if of_videos is not None:
            self.videos = VideoProcessor(of_videos, self._tokenizer, options, opener)
            ids = (config.video_token_id,) * 2
            kinds.append(Modality("video", 2, of_videos.text, *ids, most_videos, self.videos.prepare))
        return kinds

    def prepare(
        self,
        name: str,
        prompt: str | Sequence[int],
        images: Sequence[Any] = (),
        add_special_tokens: bool = True,
        videos: Sequence[Any] = (),
        audio: Sequence[Any] = (),
    ) -> MediaPrompt:
        """Return a prompt ready to run.

        name: the prompt's, which begins the messages of errors
        prompt: its text, or its tokens, with one placeholder for each image, each video and each sound
        images: as Opener takes them, in the order of the placeholders
        add_special_tokens: the tokenizer adds those that begin a text
        videos: as read_clip takes them; audio: as read_audio takes them

        Raises ValueError for too many of a kind, for one that the model does not take, if the placeholders are not as
        many as these, and for what cannot be opened or the processor does not take. All are read again for their
        pixels: they must not change before.
        """
        media = Media(images, videos, audio)
        assert any(media)
        self.check_kinds(name, media)
        prepared: dict[str, AnyPrepared] = {}
        for kind in self._kinds:
            given = media.of(kind.noun)
            kind.check_count(name, prompt, len(given))
            prepared |= {
                f"{kind.noun} {index}": kind.prepare(f"{kind.noun} {index} of {name}", source)
                for index, source in enumerate(given)
            }
        ordered = {own: prepared[own] for own in self._order(prompt)}
        token_ids = self._expand(prompt, self._numbered(ordered), add_special_tokens)
        return self._assemble(name, token_ids, ordered)

    def check_kinds(self, name: str, media: Media) -> None:
        """Raise ValueError for images, videos or audio of a prompt whose model takes none of these."""
        if media.videos and self.videos is None:
            raise ValueError(
                f"{name} has {len(media.videos)} videos: must have images alone, such as their frames: of the classes"
                f" that see, those that take videos are {', '.join(VIDEO_CLASSES)}, with a token for these"
            )
        if media.images and self.images is None:
            raise ValueError(f"{name} has {len(media.images)} images: must have audio alone, which this model hears")
        if media.audio and self.audio is None:
            hearing = ", ".join(AUDIO_CLASSES)
            raise ValueError(f"{name} has {len(media.audio)} sounds: must have none: classes that hear are {hearing}")

    def check_text(self, name: str, text: str) -> None:
        """Raise ValueError if a text without images, videos and audio has placeholders."""
        for kind in self._kinds:
            if count := text.count(kind.text):
                raise ValueError(f"{name} has {count} placeholders, {kind.text!r}, and no {kind.noun}: must not")

    def load(self, source: PixelSource) -> Tensor:
        """Return the pixel values, in bytes, of what was prepared before, here or in another process; or features."""
        processor = self.videos if isinstance(source.given, Group) else self.images or self.audio
        assert processor is not None
        return processor.load(source)

    def largest(self) -> Pixels:
        """Return the pixels of so large an image, frames of a video, or audio that of none more is made."""
        found = [own.largest() for own in (self.images, self.videos, self.audio) if own is not None]
        return max(found, key=lambda own: own.count).pixels

    def longest_span(self) -> int:
        """Return how many neighbouring placeholders an image can have at most; those of crops are no neighbours."""
        own = self.images or self.audio
        assert own is not None
        is_placeholder = np.asarray(own.largest().token_ids) == self._kinds[0].token_id
        return max(count for _, _, count in _runs(np.flatnonzero(is_placeholder)))

    def _order(self, prompt: str | Sequence[int]) -> Iterator[str]:
        """Yield the names of a prompt's images and videos, as their placeholders come."""
        by_text, by_id = ({getattr(kind, of): kind.noun for kind in self._kinds} for of in ("text", "id"))
        found = (
            (by_text[own] for own in self._splitter.findall(prompt))
            if isinstance(prompt, str)
            else (by_id[token] for token in prompt if token in by_id)
        )
        counts = Counter[str]()
        for noun in found:
            yield f"{noun} {counts[noun]}"
            counts[noun] += 1

    def _numbered(self, seen: Mapping[str, AnyPrepared]) -> list[AnyPrepared]:
        """Return images and videos in their order, each image with its number where the class writes such."""
        images = self.images
        return [
            images.numbered(own, int(name.split()[1])) if images and isinstance(own, Prepared) else own
            for name, own in seen.items()
        ]

    def _expand(self, prompt: str | Sequence[int], seen: Sequence[AnyPrepared], add_special_tokens: bool) -> list[int]:
        """Return the tokens of a prompt in which each placeholder became those of an image or a video."""
        rest = iter(seen)
        if isinstance(prompt, str):
            text = self._splitter.sub(lambda _: next(rest).text, prompt)
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return ids
        placeholders = {kind.id for kind in self._kinds}
        expanded: list[int] = []
        for token in prompt:
            expanded.extend(next(rest).token_ids if token in placeholders else (token,))
        return expanded

    def _assemble(self, name: str, token_ids: list[int], seen: Mapping[str, AnyPrepared]) -> MediaPrompt:
        """Return a prompt with these images and videos."""
        tokens, types = np.asarray(token_ids), np.zeros(len(token_ids), np.int8)
        for kind in self._kinds:
            types[tokens == kind.token_id] = kind.type
            kind.check_places(name, types, sum(own.count for key, own in seen.items() if key.startswith(kind.noun)))
        counts = {key: own.count for key, own in seen.items()}
        places = _split(np.flatnonzero(types), list(counts.values()))
        spans, pixels = [], []
        for prepared, own in zip(seen.values(), places, strict=True):
            parts = prepared.parts
            for part, among in zip(parts, _split(own, [part.count for part in parts]), strict=True):
                for first, start, count in _runs(among):
                    spans.append(MediaSpan(part.key, start, count, first))
                    pixels.append(part.pixels)
        positions, delta = None, 0
        if self._positions is not None:
            positions, delta = self._place(name, types, seen, places)
        return MediaPrompt(token_ids, tuple(spans), positions, delta, tuple(pixels), counts)

    def _place(
        self, name: str, types: np.ndarray, seen: Mapping[str, AnyPrepared], places: Sequence[np.ndarray]
    ) -> Positions:
        """Return the positions of a prompt's tokens; places: those of each image and each video."""
        assert self._positions is not None
        for before, behind in pairwise(zip(seen, places, strict=True)):
            if before[1][-1] + 1 == behind[1][0]:
                raise ValueError(
                    f"{name} has {before[0]} and {behind[0]} side by side: this model needs a token between them"
                )
        found = self._positions.compute(types, [prepared.shapes for prepared in seen.values()])
        if found.delta > 0:
            raise ValueError(
                f"{name} has videos whose seconds reach {found.delta} positions past its {len(types)} tokens: must have"
                " more frames a second"
            )
        return found


def _split(places: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    """Cut places into runs of so many."""
    return [places] if len(counts) == 1 else np.split(places, np.cumsum(counts)[:-1])  # mostly


def _runs(places: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield each run of neighbours among growing numbers: the index of its first, that number, how many they are."""
    ends = np.flatnonzero(np.diff(places) != 1) + 1
    for begin, run in zip([0, *ends.tolist()], np.split(places, ends), strict=True):
        yield begin, int(run[0]), len(run)


def _class_of(config: PretrainedConfig) -> str:
    return (config.architectures or [""])[0]


def _check_class(config: PretrainedConfig) -> None:
    if (name := _class_of(config)) not in (*CLASSES, *AUDIO_CLASSES):
        known = ", ".join(CLASSES)
        raise ValueError(f"model: architecture {name!r} takes no images here; those that do: {known}")
