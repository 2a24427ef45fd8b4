"""The processor: transformers' own, which makes pixels of images and placeholders for them in prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoinfer.checks import check_int, short
from nanoinfer.hub import reason_of
from nanoinfer.vision.kept import Kept
from nanoinfer.vision.opening import Opener
from nanoinfer.vision.pixels import Pixels, PixelsOnDemand, bytes_of
from nanoinfer.vision.positions import MropePositions
from nanoinfer.vision.spans import ImageSpan, VisionPrompt

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PretrainedConfig

CLASSES = (
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)  # that see
KEY_BYTES = 16
KEPT_BYTES = 1 << 30  # of pixels: a megapixel has up to 25 MB, and very many prompts may wait
EDGES = {"max_pixels": "longest_edge", "min_pixels": "shortest_edge"}  # sizes that have both edges count pixels
OPTIONS = ("max_soft_tokens", "size")  # that say how large an image becomes in other classes
BLANK = 256, 256  # pixels of an image that tries the options


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

    @property
    def num_bytes(self) -> int:
        """How much memory its pixels take."""
        return bytes_of(self.pixels)


class VisionProcessor:
    """Makes VisionPrompts by the processor of a checkpoint, in any number of threads.

    folder: the checkpoint's; config: its config.json
    options: how large images become: "max_pixels" and "min_pixels" for Qwen, "max_soft_tokens" for Gemma 4, or "size"
        as its image processor has it
    most_images: so many may be in a prompt; None: any number
    image_folder: as for Opener

    placeholder: what stands for an image in a prompt's text, before it is made as long as the image's embeddings

    Raises ValueError if the class is none of CLASSES, the folder has no processor, or that does not take an option.
    """

    def __init__(
        self,
        folder: str,
        config: PretrainedConfig,
        options: Mapping[str, Any] | None = None,
        most_images: int | None = None,
        image_folder: str | Path | None = None,
    ) -> None:
        _check_class(config)
        self._processor = _read_processor(folder)
        image_processor = self._processor.image_processor
        self._options = _resolve_options(image_processor, options or {})
        self._settings = f"{image_processor.to_json_string()} {sorted(self._options.items())}".encode()
        self._most_images = most_images
        self._opener = Opener(image_folder)
        self._prepared: Kept[PreparedImage] = Kept(KEPT_BYTES)
        self._positions = MropePositions.of(config)
        self._image_id: int = config.image_token_id  # embeddings are put in its place
        self.placeholder: str = self._processor.image_token
        self._placeholder_id: int = self._processor.tokenizer.convert_tokens_to_ids(self.placeholder)
        self._prepare_image(f"image_options={dict(options or {})}: a blank image", np.zeros((*BLANK, 3), np.uint8))

    def prepare(
        self, name: str, prompt: str | Sequence[int], images: Sequence[Any], add_special_tokens: bool = True
    ) -> VisionPrompt:
        """Return a prompt ready to run.

        name: the prompt's, which begins the messages of errors
        prompt: its text, or its tokens, with one placeholder for each image
        images: as Opener takes them, in the order of the placeholders
        add_special_tokens: the tokenizer adds those that begin a text

        Raises ValueError for too many images, if the placeholders are not as many as the images, and for an image that
        cannot be opened or that the processor does not take. The images are read again for pixels that are not kept:
        they must not change before.
        """
        if not images or (self._most_images is not None and len(images) > self._most_images):
            most = "" if self._most_images is None else f" to limit_images_per_prompt={self._most_images}"
            raise ValueError(f"{name} has {len(images)} images: must have 1{most or ' or more'}")
        self._check_count(name, prompt, len(images))
        names = [f"image {index} of {name}" for index in range(len(images))]
        prepared = [self._prepare_image(*pair) for pair in zip(names, images, strict=True)]
        token_ids = self._expand(prompt, prepared, add_special_tokens)
        loads = [
            partial(self._load, *each) for each in zip(names, images, (image.key for image in prepared), strict=True)
        ]
        return self._assemble(name, token_ids, prepared, [PixelsOnDemand(load) for load in loads])

    def _check_count(self, name: str, prompt: str | Sequence[int], images: int) -> None:
        """Raise ValueError if a prompt has more placeholders than images, or fewer."""
        count = prompt.count(self.placeholder if isinstance(prompt, str) else self._placeholder_id)  # type: ignore[arg-type]
        if count != images:
            what = f"{self.placeholder!r}" if isinstance(prompt, str) else f"token {self._placeholder_id}"
            raise ValueError(f"{name} has {count} placeholders, {what}, for {images} images: must have one for each")

    def _prepare_image(self, name: str, source: Any) -> PreparedImage:
        image = self._opener.open(name, source)
        key = self._key(image)
        prepared = self._prepared.find(key)
        if prepared is None:
            prepared = self._process(name, key, image)
            self._prepared.keep(key, prepared)
        return prepared

    def _load(self, name: str, source: Any, key: bytes) -> Pixels:
        """Return the pixels of an image that was prepared before."""
        prepared = self._prepared.find(key) or self._prepare_image(name, source)
        if prepared.key != key:
            raise ValueError(f"{name} has changed since it was first read: must not before its prompt begins")
        return prepared.pixels

    def _process(self, name: str, key: bytes, image: Image) -> PreparedImage:
        """Let the processor process an image, and write what stands for it in a prompt."""
        text_kwargs = {
            "add_special_tokens": False,
            "padding": False,  # if it were on here and off elsewhere, threads could not share the tokenizer
        }
        try:
            made = self._processor(
                text=self.placeholder,
                images=[image],
                return_tensors="pt",
                images_kwargs=self._options,
                text_kwargs=text_kwargs,
                return_text_replacement_offsets=True,
            )
        except Exception as error:
            raise ValueError(f"{name}, {image.width} x {image.height} pixels: cannot be processed: {error}") from error
        token_ids: list[int] = made["input_ids"][0].tolist()
        ((replacement,),) = made["text_replacement_offsets"]
        names = self._processor.image_processor.model_input_names
        pixels = {name: made[name] for name in names if name in made}
        return PreparedImage(key, replacement["replacement"], token_ids, token_ids.count(self._image_id), pixels)

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

    def _assemble(
        self, name: str, token_ids: list[int], images: list[PreparedImage], pixels: list[Pixels]
    ) -> VisionPrompt:
        """Return a prompt, of which each image has pixels."""
        is_placeholder = np.asarray(token_ids) == self._image_id
        places = np.flatnonzero(is_placeholder)
        counts = [image.count for image in images]
        if len(places) != sum(counts):
            raise ValueError(f"{name} has token {self._image_id}, an image's, where no image is: must not")
        spans, pixels_of_spans = [], []
        for image, own, given in zip(images, np.split(places, np.cumsum(counts)[:-1]), pixels, strict=True):
            for first, start, count in _runs(own):
                spans.append(ImageSpan(image.key, start, count, first))
                pixels_of_spans.append(given)
        positions, delta = None, 0
        if self._positions is not None:
            if any(before.start + before.count == after.start for before, after in pairwise(spans)):
                raise ValueError(f"{name} has two images side by side: this model needs a token between them")
            positions, delta = self._positions.compute(is_placeholder, [image.pixels for image in images])
        return VisionPrompt(token_ids, tuple(spans), positions, delta, tuple(pixels_of_spans))


def _runs(places: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield each run of neighbours among growing numbers: the index of its first, that number, how many they are."""
    ends = np.flatnonzero(np.diff(places) != 1) + 1
    for begin, run in zip([0, *ends.tolist()], np.split(places, ends), strict=True):
        yield begin, int(run[0]), len(run)


def _check_class(config: PretrainedConfig) -> None:
    name = (config.architectures or [""])[0]
    if name not in CLASSES:
        raise ValueError(f"model: architecture {name!r} takes no images here; those that do: {', '.join(CLASSES)}")


def _read_processor(folder: str) -> Any:
    """Return transformers' processor of a checkpoint."""
    from transformers import AutoProcessor  # here, for a model that cannot see does without

    try:
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    except ImportError as error:
        raise ValueError("images need pillow and torchvision: pip install 'nanoinfer[images]'") from error
    except Exception as error:
        raise ValueError(f"model={folder!r}: cannot read its processor: {reason_of(error)}") from error
    if not hasattr(processor, "image_processor"):
        raise ValueError(f"model={folder!r}: must have a preprocessor_config.json, which says how images are processed")
    return processor


def _resolve_options(image_processor: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as the image processor names them."""
    size = dict(getattr(image_processor, "size", None) or {})
    edges = EDGES if size.keys() >= set(EDGES.values()) else {}
    known = [*edges, *(name for name in OPTIONS if name in image_processor.valid_kwargs.__annotations__)]
    resolved: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"image_options has {short(name)}: {short(value)}: this model's are {', '.join(known)}")
        if name in edges:
            size[edges[name]] = check_int(f"image_options[{name!r}]", value, 1)
            resolved["size"] = size
        else:
            resolved[name] = value
    return resolved
