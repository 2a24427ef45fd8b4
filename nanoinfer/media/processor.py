"""The processor: it makes room in prompts for the embeddings of images and videos."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nanoinfer.checks import check_settings
from nanoinfer.hub import reason_of
from nanoinfer.media.images.opening import Opener
from nanoinfer.media.images.placeholders import CLASSES, Placeholder
from nanoinfer.media.images.processor import ImageProcessor, PreparedImage
from nanoinfer.media.pixels import Pixels, PixelSource
from nanoinfer.media.positions import MropePositions, Positions
from nanoinfer.media.spans import MediaPrompt, MediaSpan
from nanoinfer.media.videos.kinds import CLASSES as VIDEO_CLASSES
from nanoinfer.media.videos.kinds import kind_of
from nanoinfer.media.videos.processor import OF_VIDEOS, Group, PreparedVideo, VideoProcessor

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

Prepared = PreparedImage | PreparedVideo
FILES = OF_IMAGES, OF_ALL = "preprocessor_config.json", "processor_config.json"  # may say how images are processed
PARTS = ("image_processor", "video_processor", "feature_extractor", "tokenizer", "chat_template")  # others read these
NAMES = ("processor_class", "auto_map")
MOST_SHOWN = 300  # characters of transformers' reason


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
    prepare: Callable[[str, Any], Prepared]

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
    """Makes MediaPrompts by the image processor of a checkpoint, in any number of threads.

    folder: the checkpoint's; config: its config.json; tokenizer: its own, or another
    options: how large images become: "max_pixels" and "min_pixels" for Qwen, "max_soft_tokens" for Gemma 4, or "size"
        as its image processor has it; with "do_pan_and_scan", Gemma 3 also sees crops of long images. Where videos are
        taken, "fps" and "videos_kwargs" are for these
    most_images, most_videos: so many may be in a prompt; None: any number
    image_folder: as for Opener

    images: prepares each image; videos: each video; None: the model takes none

    Raises ValueError if the class is none of CLASSES, the folder has no image processor, or that takes no such option.
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
        maker = _maker_of(config)
        with _named_errors(folder):
            placeholder, of_videos = maker(config, tokenizer), kind_of(folder, config, tokenizer)
            processor = _read_processor(folder, placeholder.image_processor)
            _check_whole(Path(folder) / OF_ALL, placeholder)
            _check_required(processor, placeholder)
        self._tokenizer, opener, options = tokenizer, Opener(image_folder), options or {}
        self._positions = MropePositions.of(config)
        self._image_id: int = config.image_token_id
        for_images = {name: value for name, value in options.items() if of_videos is None or name not in OF_VIDEOS}
        self.images = ImageProcessor(processor, tokenizer, placeholder, self._image_id, for_images, opener)
        self.videos = None if of_videos is None else VideoProcessor(of_videos, tokenizer, options, opener)
        ids = tokenizer.convert_tokens_to_ids(placeholder.text), self._image_id
        self._kinds = [Modality("image", 1, placeholder.text, *ids, most_images, self.images.prepare)]
        if of_videos is not None and self.videos is not None:
            ids = (config.video_token_id,) * 2
            self._kinds.append(Modality("video", 2, of_videos.text, *ids, most_videos, self.videos.prepare))
        self._splitter = re.compile("|".join(re.escape(kind.text) for kind in self._kinds))

    def prepare(
        self,
        name: str,
        prompt: str | Sequence[int],
        images: Sequence[Any],
        add_special_tokens: bool = True,
        videos: Sequence[Any] = (),
    ) -> MediaPrompt:
        """Return a prompt ready to run.

        name: the prompt's, which begins the messages of errors
        prompt: its text, or its tokens, with one placeholder for each image and each video
        images: as Opener takes them, in the order of the placeholders
        add_special_tokens: the tokenizer adds those that begin a text
        videos: as read_clip takes them

        Raises ValueError for too many images or videos, if the placeholders are not as many as these, and for what
        cannot be opened or the processor does not take. All are read again for their pixels: they must not change
        before.
        """
        assert images or videos
        self.check_videos(name, videos)
        prepared: dict[str, Prepared] = {}
        for kind, given in zip(self._kinds, (images, videos), strict=False):
            kind.check_count(name, prompt, len(given))
            prepared |= {
                f"{kind.noun} {index}": kind.prepare(f"{kind.noun} {index} of {name}", source)
                for index, source in enumerate(given)
            }
        ordered = {own: prepared[own] for own in self._order(prompt)}
        token_ids = self._expand(prompt, self._numbered(ordered), add_special_tokens)
        return self._assemble(name, token_ids, ordered)

    def check_videos(self, name: str, videos: Sequence[Any]) -> None:
        """Raise ValueError for videos of a prompt whose model takes none."""
        if videos and self.videos is None:
            raise ValueError(
                f"{name} has {len(videos)} videos: must have images alone, such as their frames: of the classes that"
                f" see, those that take videos are {', '.join(VIDEO_CLASSES)}, with a token for these"
            )

    def check_text(self, name: str, text: str) -> None:
        """Raise ValueError if a text without images or videos has placeholders."""
        for kind in self._kinds:
            if count := text.count(kind.text):
                raise ValueError(f"{name} has {count} placeholders, {kind.text!r}, and no {kind.noun}: must not")

    def load(self, source: PixelSource) -> Tensor:
        """Return the pixel values, in bytes, of what was prepared before, here or in another process."""
        if isinstance(source.given, Group):
            assert self.videos is not None
            return self.videos.load(source)
        return self.images.load(source)

    def largest(self) -> Pixels:
        """Return the pixels of an image, or of a video's frames at once, so large that of none more is made."""
        image = self.images.largest()
        frames = None if self.videos is None else self.videos.largest()
        return image.pixels if frames is None or frames.count <= image.count else frames.pixels

    def longest_span(self) -> int:
        """Return how many neighbouring placeholders an image can have at most; those of crops are no neighbours."""
        is_placeholder = np.asarray(self.images.largest().token_ids) == self._image_id
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

    def _numbered(self, seen: Mapping[str, Prepared]) -> list[Prepared]:
        """Return images and videos in their order, each image with its number where the class writes such."""
        return [
            self.images.numbered(own, int(name.split()[1])) if isinstance(own, PreparedImage) else own
            for name, own in seen.items()
        ]

    def _expand(self, prompt: str | Sequence[int], seen: Sequence[Prepared], add_special_tokens: bool) -> list[int]:
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

    def _assemble(self, name: str, token_ids: list[int], seen: Mapping[str, Prepared]) -> MediaPrompt:
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
        self, name: str, types: np.ndarray, seen: Mapping[str, Prepared], places: Sequence[np.ndarray]
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


def _maker_of(config: PretrainedConfig) -> Callable[[PretrainedConfig, PreTrainedTokenizerBase], Placeholder]:
    name = (config.architectures or [""])[0]
    if name not in CLASSES:
        raise ValueError(f"model: architecture {name!r} takes no images here; those that do: {', '.join(CLASSES)}")
    return CLASSES[name]


@contextmanager
def _named_errors(folder: str) -> Iterator[None]:
    """Say what is wrong with a checkpoint's files, or missing."""
    if not any((Path(folder) / name).is_file() for name in FILES):
        raise ValueError(f"model={folder!r}: must have a {OF_IMAGES}, which says how images are processed")
    try:
        yield
    except Exception as error:
        reason = reason_of(error)[:MOST_SHOWN]
        raise ValueError(
            f"model={folder!r}: cannot read how images are processed, without which images=False works: {reason}"
        ) from error


def _check_whole(file: Path, placeholder: Placeholder) -> None:
    """Raise ValueError for settings of the class's processor by which a prompt would be another."""
    said = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    check_settings(str(file), said, (*PARTS, *NAMES, *placeholder.ignored), placeholder.fixed)


def _check_required(image_processor: Any, placeholder: Placeholder) -> None:
    """Raise ValueError for settings of an image processor by which a prompt, or a tower's input, would be another."""
    for name, allowed in placeholder.required.items():
        value = getattr(image_processor, name)
        if value not in allowed:
            raise ValueError(f"{OF_IMAGES} has {name}={value!r}: must be {' or '.join(map(repr, allowed))}")


def _read_processor(folder: str, name: str) -> Any:
    """Return transformers' image processor of a class, by torchvision if there is one, for it is faster than PIL."""
    import transformers
    from transformers.utils import is_torchvision_available

    name = name if is_torchvision_available() else f"{name}Pil"
    try:
        return getattr(transformers, name).from_pretrained(folder)
    except ImportError as error:
        raise ValueError("images need pillow: pip install 'nanoinfer[images]'") from error
