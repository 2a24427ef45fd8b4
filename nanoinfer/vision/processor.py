"""The processor: it makes room in prompts for the embeddings of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoinfer.hub import reason_of
from nanoinfer.vision.image_processor import ImageProcessor, PreparedImage
from nanoinfer.vision.placeholders import CLASSES, Placeholder
from nanoinfer.vision.positions import MropePositions
from nanoinfer.vision.spans import ImageSpan, VisionPrompt

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

FILES = ("preprocessor_config.json", "processor_config.json")  # that may say how images are processed
MOST_SHOWN = 300  # characters of transformers' reason


class VisionProcessor:
    """Makes VisionPrompts by the image processor of a checkpoint, in any number of threads.

    folder: the checkpoint's; config: its config.json; tokenizer: its own, or another
    options: how large images become: "max_pixels" and "min_pixels" for Qwen, "max_soft_tokens" for Gemma 4, or "size"
        as its image processor has it; with "do_pan_and_scan", Gemma 3 also sees crops of long images
    most_images: so many may be in a prompt; None: any number
    image_folder: as for Opener

    images: prepares each image
    placeholder: what stands for an image in a prompt's text, before it is made as long as the image's embeddings

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
    ) -> None:
        maker = _maker_of(config)
        with _named_errors(folder):
            placeholder = maker(config, tokenizer)
            processor = _read_processor(folder, placeholder.image_processor)
        self._tokenizer, self._most_images = tokenizer, most_images
        self._positions = MropePositions.of(config)
        self._image_id: int = config.image_token_id  # embeddings are put in its place
        self.images = ImageProcessor(
            processor, self._tokenizer, placeholder, self._image_id, options or {}, image_folder
        )
        self.placeholder = placeholder.text
        self._placeholder_id: int = self._tokenizer.convert_tokens_to_ids(self.placeholder)

    def prepare(
        self, name: str, prompt: str | Sequence[int], images: Sequence[Any], add_special_tokens: bool = True
    ) -> VisionPrompt:
        """Return a prompt ready to run.

        name: the prompt's, which begins the messages of errors
        prompt: its text, or its tokens, with one placeholder for each image
        images: as Opener takes them, in the order of the placeholders
        add_special_tokens: the tokenizer adds those that begin a text

        Raises ValueError for too many images, if the placeholders are not as many as the images, and for an image that
        cannot be opened or that the processor does not take. The images are read again for their pixels: they must not
        change before.
        """
        if not images or (self._most_images is not None and len(images) > self._most_images):
            most = "" if self._most_images is None else f" to limit_images_per_prompt={self._most_images}"
            raise ValueError(f"{name} has {len(images)} images: must have 1{most or ' or more'}")
        self._check_count(name, prompt, len(images))
        names = [f"image {index} of {name}" for index in range(len(images))]
        prepared = [self.images.prepare(*each) for each in zip(names, images, strict=True)]
        token_ids = self._expand(prompt, prepared, add_special_tokens)
        return self._assemble(name, token_ids, prepared)

    def longest_span(self) -> int:
        """Return how many neighbouring placeholders an image can have at most; those of crops are no neighbours."""
        is_placeholder = np.asarray(self.images.largest().token_ids) == self._image_id
        return max(count for _, _, count in _runs(np.flatnonzero(is_placeholder)))

    def _check_count(self, name: str, prompt: str | Sequence[int], images: int) -> None:
        """Raise ValueError if a prompt has more placeholders than images, or fewer."""
        if isinstance(prompt, str):
            count, what = prompt.count(self.placeholder), repr(self.placeholder)
        else:
            count, what = prompt.count(self._placeholder_id), f"token {self._placeholder_id}"
        if count != images:
            raise ValueError(f"{name} has {count} placeholders, {what}, for {images} images: must have one for each")

    def _expand(self, prompt: str | Sequence[int], images: list[PreparedImage], add_special_tokens: bool) -> list[int]:
        """Return the tokens of a prompt in which each placeholder became those of an image."""
        rest = iter(images)
        if isinstance(prompt, str):
            first, *others = prompt.split(self.placeholder)
            text = first + "".join(next(rest).text + other for other in others)
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return ids
        expanded: list[int] = []
        for token in prompt:
            expanded.extend(next(rest).token_ids if token == self._placeholder_id else (token,))
        return expanded

    def _assemble(self, name: str, token_ids: list[int], images: list[PreparedImage]) -> VisionPrompt:
        """Return a prompt with these images."""
        is_placeholder = np.asarray(token_ids) == self._image_id
        places = np.flatnonzero(is_placeholder)
        counts = [image.count for image in images]
        if len(places) != sum(counts):
            raise ValueError(f"{name} has token {self._image_id}, an image's, where no image is: must not")
        spans, pixels = [], []
        for image, own in zip(images, np.split(places, np.cumsum(counts)[:-1]), strict=True):
            for first, start, count in _runs(own):
                spans.append(ImageSpan(image.key, start, count, first))
                pixels.append(image.pixels)
        positions, delta = None, 0
        if self._positions is not None:
            if any(before.start + before.count == after.start for before, after in pairwise(spans)):
                raise ValueError(f"{name} has two images side by side: this model needs a token between them")
            positions, delta = self._positions.compute(is_placeholder, [image.pixels for image in images])
        return VisionPrompt(token_ids, tuple(spans), positions, delta, tuple(pixels))


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
        raise ValueError(f"model={folder!r}: must have a {FILES[0]}, which says how images are processed")
    try:
        yield
    except Exception as error:
        reason = reason_of(error)[:MOST_SHOWN]
        raise ValueError(
            f"model={folder!r}: cannot read how images are processed, without which images=False works: {reason}"
        ) from error


def _read_processor(folder: str, name: str) -> Any:
    """Return transformers' image processor of a class, by torchvision if there is one, for it is faster than PIL."""
    import transformers
    from transformers.utils import is_torchvision_available

    name = name if is_torchvision_available() else f"{name}Pil"
    try:
        return getattr(transformers, name).from_pretrained(folder)
    except ImportError as error:
        raise ValueError("images need pillow: pip install 'nanoinfer[images]'") from error
