"""The processor: transformers' own, which makes pixels of images and placeholders for them in prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoinfer.checks import short
from nanoinfer.hub import reason_of
from nanoinfer.vision.opening import Opener
from nanoinfer.vision.positions import MropePositions
from nanoinfer.vision.spans import ImageSpan, VisionPrompt
from nanoinfer.vision.tower import Pixels

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PretrainedConfig

KEY_BYTES = 16
OPTIONS = ("max_pixels", "max_soft_tokens", "min_pixels", "size")  # how large an image becomes, in this or that class


@dataclass(frozen=True)
class PreparedImage:
    """What the processor makes of an image.

    key: as ImageSpan has it
    text, token_ids: what stands for it in a prompt
    count: how many of these tokens are placeholders
    pixels: what the tower takes
    """

    key: bytes
    text: str
    token_ids: list[int]
    count: int
    pixels: Pixels


class VisionProcessor:
    """Makes VisionPrompts by the processor of a checkpoint.

    folder: the checkpoint's; config: its config.json
    options: those of OPTIONS that its image processor knows
    most_images: so many may be in a prompt; None: any number
    image_folder: as for Opener

    placeholder: what stands for an image in a prompt's text, before it is made as long as the image's embeddings

    Raises ValueError if the folder has no processor, or the processor does not know an option.
    """

    def __init__(
        self,
        folder: str,
        config: PretrainedConfig,
        options: Mapping[str, Any] | None = None,
        most_images: int | None = None,
        image_folder: str | Path | None = None,
    ) -> None:
        self._processor = _load(folder)
        self._options = dict(options or {})
        _check_options(self._processor.image_processor, self._options)
        self._most_images = most_images
        self._opener = Opener(image_folder)
        self._positions = MropePositions.of(config)
        self._image_id: int = config.image_token_id  # embeddings are put in its place
        self.placeholder: str = self._processor.image_token
        self._placeholder_id: int = self._processor.tokenizer.convert_tokens_to_ids(self.placeholder)
        settings = f"{self._processor.image_processor.to_json_string()} {sorted(self._options.items())}"
        self._settings = settings.encode()

    def prepare(
        self, name: str, prompt: str | Sequence[int], images: Sequence[Any], add_special_tokens: bool = True
    ) -> VisionPrompt:
        """Return a prompt ready to run.

        name: the prompt's, which begins the messages of errors
        prompt: its text, or its tokens, with one placeholder for each image
        images: as Opener takes them, in the order of the placeholders
        add_special_tokens: the tokenizer adds those that begin a text

        Raises ValueError for too many images, if the placeholders are not as many as the images, and for an image that
        cannot be opened or that the processor does not take.
        """
        if not images or (self._most_images is not None and len(images) > self._most_images):
            most = "" if self._most_images is None else f" to limit_images_per_prompt={self._most_images}"
            raise ValueError(f"{name} has {len(images)} images: must have 1{most or ' or more'}")
        self._check_count(name, prompt, len(images))
        prepared = [self._prepare_image(f"image {index} of {name}", image) for index, image in enumerate(images)]
        token_ids = self._expand(prompt, prepared, add_special_tokens)
        return self._assemble(name, token_ids, prepared)

    def _check_count(self, name: str, prompt: str | Sequence[int], images: int) -> None:
        """Raise ValueError if a prompt has more placeholders than images, or fewer."""
        count = prompt.count(self.placeholder if isinstance(prompt, str) else self._placeholder_id)  # type: ignore[arg-type]
        if count != images:
            what = f"{self.placeholder!r}" if isinstance(prompt, str) else f"token {self._placeholder_id}"
            raise ValueError(f"{name} has {count} placeholders, {what}, for {images} images: must have one for each")

    def _prepare_image(self, name: str, source: Any) -> PreparedImage:
        image = self._opener.open(name, source)
        try:
            made = self._processor(
                text=self.placeholder,
                images=[image],
                return_tensors="pt",
                images_kwargs=self._options,
                text_kwargs={"add_special_tokens": False, "return_text_replacement_offsets": True},
            )
        except Exception as error:
            raise ValueError(f"{name}, {image.width} x {image.height} pixels: cannot be processed: {error}") from error
        token_ids: list[int] = made["input_ids"][0].tolist()
        ((replacement,),) = made["text_replacement_offsets"]
        names = self._processor.image_processor.model_input_names
        pixels = {key: made[key] for key in names if key in made}
        return PreparedImage(
            self._key(image), replacement["replacement"], token_ids, token_ids.count(self._image_id), pixels
        )

    def _key(self, image: Image) -> bytes:
        """Return the digest of an image in RGB and of the settings."""
        digest = hashlib.blake2b(self._settings, digest_size=KEY_BYTES)
        digest.update(b"%d %d " % image.size)
        digest.update(image.tobytes())
        return digest.digest()

    def _expand(self, prompt: str | Sequence[int], images: list[PreparedImage], add_special_tokens: bool) -> list[int]:
        """Return the tokens of a prompt in which each placeholder became those of an image."""
        rest = iter(images)
        if isinstance(prompt, str):
            first, *others = prompt.split(self.placeholder)
            text = first + "".join(next(rest).text + other for other in others)
            ids: list[int] = self._processor.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return ids
        expanded: list[int] = []
        for token in prompt:
            expanded.extend(next(rest).token_ids if token == self._placeholder_id else (token,))
        return expanded

    def _assemble(self, name: str, token_ids: list[int], images: list[PreparedImage]) -> VisionPrompt:
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
            positions, delta = self._positions.compute(is_placeholder, [image.pixels for image in images])
        return VisionPrompt(token_ids, tuple(spans), positions, delta, tuple(pixels))


def _runs(places: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield each run of neighbours among growing numbers: the index of its first, that number, how many they are."""
    ends = np.flatnonzero(np.diff(places) != 1) + 1
    for begin, run in zip([0, *ends.tolist()], np.split(places, ends), strict=True):
        yield begin, int(run[0]), len(run)


def _load(folder: str) -> Any:
    """Return transformers' processor of a checkpoint."""
    from transformers import AutoProcessor  # here, for a model that cannot see does without

    try:
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    except ImportError as error:
        raise ValueError(f"model={folder!r}: images need pip install 'nanoinfer[images]': {error}") from error
    except Exception as error:
        raise ValueError(f"model={folder!r}: cannot read its processor: {reason_of(error)}") from error
    if not hasattr(processor, "image_processor"):
        raise ValueError(f"model={folder!r}: must have a preprocessor_config.json, which says how images are processed")
    return processor


def _check_options(image_processor: Any, options: Mapping[str, Any]) -> None:
    known = [name for name in OPTIONS if name in image_processor.valid_kwargs.__annotations__]
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"image_options has {short(name)}: {short(value)}: this model's are {', '.join(known)}")
