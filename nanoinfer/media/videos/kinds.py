"""What stands for a video in a prompt, by the rules of each model's own processor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanoinfer.media.videos.settings import VideoSettings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BEGIN, END = "<|vision_start|>", "<|vision_end|>"  # Qwen's, around what is seen


@dataclass(frozen=True)
class VideoKind:
    """What the processor of a class makes of a video.

    text: what a prompt has in the video's place
    settings: those of transformers' video processor
    expand: returns what the text becomes; it takes the seconds at which each group of frames is seen, and how many
        embeddings a group has
    """

    text: str
    settings: VideoSettings
    expand: Callable[[Sequence[float], int], str]


def _qwen2(video: str, tokenizer: Any) -> VideoKind:
    from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD  # here: what cannot see does without

    pixels = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
    numbers = tuple(OPENAI_CLIP_MEAN), tuple(OPENAI_CLIP_STD)
    settings = VideoSettings(False, pixels, 14, *numbers, max_video_tokens=128000)
    return VideoKind(video, settings, lambda seconds, count: video * (len(seconds) * count))


def _qwen3(video: str, tokenizer: Any) -> VideoKind:
    begin, end = getattr(tokenizer, "vision_start_token", BEGIN), getattr(tokenizer, "vision_end_token", END)

    def expand(seconds: Sequence[float], count: int) -> str:
        seen = f"{begin}{video * count}{end}"
        return "".join(f"<{second:.1f} seconds>{seen}" for second in seconds)

    pixels = {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}
    return VideoKind(video, VideoSettings(True, pixels, 16, 0.5, 0.5, max_video_tokens=768), expand)


CLASSES: dict[str, Callable[[str, Any], VideoKind]] = {
    "Qwen2VLForConditionalGeneration": _qwen2,
    "Qwen2_5_VLForConditionalGeneration": _qwen2,
    "Qwen3VLForConditionalGeneration": _qwen3,
    "Qwen3VLMoeForConditionalGeneration": _qwen3,
    "Qwen3_5ForConditionalGeneration": _qwen3,
    "Qwen3_5MoeForConditionalGeneration": _qwen3,
}  # that take videos


def kind_of(folder: str, config: PretrainedConfig, tokenizer: Any) -> VideoKind | None:
    """Return what a checkpoint makes of a video, whose files lie in a folder.

    Returns None if it takes none, by its class or for want of a token.
    """
    make = CLASSES.get((config.architectures or [""])[0])
    token = None if make is None else tokenizer.convert_ids_to_tokens(config.video_token_id)
    if make is None or token is None:
        return None
    kind = make(token, tokenizer)
    return replace(kind, settings=kind.settings.read(folder))
