"""The images of prompts: what stands beside a prompt, and what becomes of both before an engine takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from nanoinfer.checks import short
from nanoinfer.config import Config
from nanoinfer.engine.images import check_whole
from nanoinfer.process.torch_state import fresh_torch_state
from nanoinfer.vision.ahead import ImageThreads
from nanoinfer.vision.image_processor import PreparedImage
from nanoinfer.vision.pixels import PixelsOnDemand
from nanoinfer.vision.processor import VisionProcessor
from nanoinfer.vision.spans import VisionPrompt
from nanoinfer.vllm_spellings import of_images

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATA, PROCESSING, NAMES = "multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids"  # vLLM's keys beside a prompt
IMAGE = "image"
MOST_SHOWN = 60  # characters of a value in an error message


def take_beside(name: str, prompt: dict[str, Any]) -> list[Any]:
    """Take what vLLM's callers write beside a prompt's text or tokens out of a mapping; returns the images.

    Raises ValueError for what changes how images are processed, and for other media.
    """
    prompt.pop(NAMES, None)  # an image's pixels tell it from others
    if (processing := of_images(prompt.pop(PROCESSING, None))) is not None and processing != {}:
        raise ValueError(
            f"{name}[{PROCESSING!r}] is {short(processing, MOST_SHOWN)}: must be left out: LLM(image_options=...) says"
            " for all prompts how large images become"
        )
    data = prompt.pop(DATA, None)
    if data is None:
        return []
    if not isinstance(data, Mapping):
        raise ValueError(f"{name}[{DATA!r}] is {short(data, MOST_SHOWN)}: must be a mapping with {IMAGE!r}")
    for kind, value in data.items():
        if kind != IMAGE and value is not None:
            raise ValueError(
                f"{name}[{DATA!r}] has {kind!r}: must have {IMAGE!r} alone; give frames of a video as images"
            )
    images = data.get(IMAGE)
    if images is None:
        return []
    return list(images) if isinstance(images, (list, tuple)) else [images]


class WithImages(NamedTuple):
    """A prompt with images, as a user gave it.

    name, prompt, images, add_special_tokens: as for VisionProcessor.prepare
    """

    name: str
    prompt: str | list[int]
    images: Sequence[Any]
    add_special_tokens: bool


class ImageInputs:
    """Makes prompts with images ready to run. Raises ValueError for what cannot work, as VisionProcessor does."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """config: of an LLM that sees. Raises ValueError if its largest image fits no step."""
        assert config.hf_config is not None
        assert tokenizer is not None  # or it would not see
        self._threads = ImageThreads()
        with fresh_torch_state():
            self._processor = VisionProcessor(
                config.model,
                config.hf_config,
                tokenizer,
                config.image_options,
                config.limit_images_per_prompt,
                config.image_folder,
            )
            check_whole(self._processor.longest_span(), config)

    def open(self, name: str, images: Sequence[Any]) -> list[PreparedImage]:
        """Return images that several prompts will have; name: begins the messages of errors."""
        names = (f"image {index} of {name}" for index in range(len(images)))
        prepare = self._processor.images.prepare
        opened = [self._threads.submit(prepare, *each) for each in zip(names, images, strict=True)]
        return [image.result() for image in opened]

    def adopt(self, prompt: VisionPrompt) -> None:
        """Let a prompt of another process have its pixels made in this one."""
        for pixels in prompt.pixels:
            assert isinstance(pixels, PixelsOnDemand)
            pixels.load = self._processor.images.load

    def begin(self, prompt: WithImages) -> Future[VisionPrompt]:
        """Let a thread make a prompt ready to run: to decode an image takes no turn of the interpreter."""
        return self._threads.submit(self._prepare, prompt)

    def close(self) -> None:
        """Cancel what no thread has begun."""
        self._threads.close()

    def _prepare(self, given: WithImages) -> VisionPrompt:
        with fresh_torch_state():
            return self._processor.prepare(*given)

    def check_text(self, name: str, text: str) -> None:
        """Raise ValueError if a text without images has placeholders. Token ids are their caller's."""
        if count := text.count(self._processor.placeholder):
            raise ValueError(
                f"{name} has {count} placeholders, {self._processor.placeholder!r}, and no image: must not"
            )
