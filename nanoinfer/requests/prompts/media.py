"""Images and videos of prompts: what stands beside a prompt, and what becomes of both before an engine takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from nanoinfer.checks import short
from nanoinfer.config import Config
from nanoinfer.engine.media import check_whole
from nanoinfer.media.ahead import MediaThreads
from nanoinfer.media.audio.processor import AudioProcessor
from nanoinfer.media.images.processor import ImageProcessor
from nanoinfer.media.messages import AUDIO, IMAGE, NO_MEDIA, VIDEO, Media
from nanoinfer.media.pixels import PixelsOnDemand
from nanoinfer.media.processor import MediaProcessor
from nanoinfer.media.spans import MediaPrompt
from nanoinfer.media.videos.clip import listed, with_rate
from nanoinfer.media.videos.processor import VideoProcessor
from nanoinfer.process.torch_state import fresh_torch_state

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATA, PROCESSING, NAMES = "multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids"  # vLLM's keys beside a prompt
OF_VIDEOS = ("fps", "do_sample_frames")  # of a processor's arguments: those that change no image
MOST_SHOWN = 60  # characters of a value in an error message


def take_beside(name: str, prompt: dict[str, Any]) -> Media:
    """Take what vLLM's callers write beside a prompt's text or tokens out of a mapping; returns images and videos.

    Raises ValueError for what changes how images are processed, and for other media.
    """
    prompt.pop(NAMES, None)  # an image's pixels tell it from others
    processing, data = prompt.pop(PROCESSING, None), prompt.pop(DATA, None)
    changes = processing
    if isinstance(processing, Mapping):
        changes = {name: value for name, value in processing.items() if name not in OF_VIDEOS}
    if changes is not None and changes != {}:
        raise ValueError(
            f"{name}[{PROCESSING!r}] is {short(changes, MOST_SHOWN)}: must be left out: LLM(image_options=...) says"
            " for all prompts how large images become"
        )
    if data is None:
        return NO_MEDIA
    if not isinstance(data, Mapping):
        raise ValueError(
            f"{name}[{DATA!r}] is {short(data, MOST_SHOWN)}: must be a mapping with {IMAGE!r} or {VIDEO!r}"
        )
    for kind, value in data.items():
        if kind not in (IMAGE, VIDEO, AUDIO) and value is not None:
            raise ValueError(f"{name}[{DATA!r}] has {kind!r}: must have {IMAGE!r}, {VIDEO!r} and {AUDIO!r} alone")
    videos = _with_rates(f"{name}[{PROCESSING!r}]", listed(data.get(VIDEO)), processing)
    audio = data.get(AUDIO)
    sounds = [] if audio is None else audio if isinstance(audio, list) else [audio]
    return Media(_listed(data.get(IMAGE)), videos, sounds)


def _listed(images: Any) -> list[Any]:
    if images is None:
        return []
    return list(images) if isinstance(images, (list, tuple)) else [images]


def _with_rates(name: str, videos: list[Any], processing: Any) -> list[Any]:
    """Return videos with the frames per second that stand beside a prompt: one number, or one for each video."""
    rates = None if processing is None else processing.get("fps")
    if isinstance(rates, (list, tuple)):
        if len(rates) != len(videos):
            raise ValueError(
                f"{name} has fps={short(rates, MOST_SHOWN)}: must have one for each of {len(videos)} videos"
            )
        return [with_rate(video, rate) for video, rate in zip(videos, rates, strict=True)]
    return [with_rate(video, rates) for video in videos]


class WithMedia(NamedTuple):
    """A prompt with images, videos or audio, as a user gave it.

    name, prompt, images, videos, audio, add_special_tokens: as for MediaProcessor.prepare
    """

    name: str
    prompt: str | list[int]
    images: Sequence[Any]
    add_special_tokens: bool
    videos: Sequence[Any] = ()
    audio: Sequence[Any] = ()


class MediaInputs:
    """Makes prompts with images ready to run. Raises ValueError for what cannot work, as MediaProcessor does."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """config: of an LLM that sees. Raises ValueError if its largest image fits no step."""
        assert config.hf_config is not None
        assert tokenizer is not None  # or it would not see
        self._threads = MediaThreads()
        with fresh_torch_state():
            self._processor = MediaProcessor(
                config.model,
                config.hf_config,
                tokenizer,
                config.image_options,
                config.limit_images_per_prompt,
                config.image_folder,
                config.limit_videos_per_prompt,
            )
            check_whole(self._processor.longest_span(), config)

    def open(self, name: str, media: Media) -> Media:
        """Return images, videos and audio that several prompts will have; name: begins the messages of errors."""
        self.check_kinds(name, media)
        own = self._processor
        opening = [
            self._open(noun, processor, name, media.of(noun))
            for noun, processor in ((IMAGE, own.images), (VIDEO, own.videos), (AUDIO, own.audio))
        ]
        return Media(*([future.result() for future in futures] for futures in opening))

    def _open(
        self,
        noun: str,
        processor: ImageProcessor | VideoProcessor | AudioProcessor | None,
        name: str,
        sources: Sequence[Any],
    ) -> list[Future[Any]]:
        """Let threads prepare what is of one kind; processor: None: there is none of it"""
        if processor is None:
            return []
        names = (f"{noun} {index} of {name}" for index in range(len(sources)))
        return [self._threads.submit(processor.prepare, *each) for each in zip(names, sources, strict=True)]

    def adopt(self, prompt: MediaPrompt) -> None:
        """Let a prompt of another process have its pixels made in this one."""
        for pixels in prompt.pixels:
            if isinstance(pixels, PixelsOnDemand):  # else embeddings that a caller gave
                pixels.load = self._processor.load

    def begin(self, prompt: WithMedia) -> Future[MediaPrompt]:
        """Let a thread make a prompt ready to run: to decode an image takes no turn of the interpreter."""
        return self._threads.submit(self._prepare, prompt)

    def close(self) -> None:
        """Cancel what no thread has begun."""
        self._threads.close()

    def _prepare(self, given: WithMedia) -> MediaPrompt:
        with fresh_torch_state():
            return self._processor.prepare(*given)

    def check_text(self, name: str, text: str) -> None:
        """Raise ValueError if a text without images has placeholders. Token ids are their caller's."""
        self._processor.check_text(name, text)

    def check_kinds(self, name: str, media: Media) -> None:
        """Raise ValueError for images, videos or audio of a prompt whose model takes none of these."""
        self._processor.check_kinds(name, media)
