"""Takes images, videos and audio out of chat messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from nanoinfer.checks import as_list, short
from nanoinfer.media.videos.clip import RATES, with_rate

IMAGE, VIDEO, AUDIO = "image", "video", "audio"
SOURCES = {
    IMAGE: (IMAGE, "url", "path"),
    "image_url": ("image_url",),
    "image_pil": ("image_pil",),
    VIDEO: (VIDEO, "url", "path"),
    "video_url": ("video_url",),
    AUDIO: (AUDIO, "url", "path"),
}
"""Maps a kind of part to the keys that may hold what it is of: transformers', OpenAI's, vLLM's."""
BARE = {kind: {"type": kind} for kind in (IMAGE, VIDEO, AUDIO)}  # parts of which the image, video or audio was taken


class Media(NamedTuple):
    """What a prompt has beside its text, as users give it: images, videos and audio, each in their own order."""

    images: Sequence[Any]
    videos: Sequence[Any]
    audio: Sequence[Any] = ()

    def of(self, kind: str) -> Sequence[Any]:
        """Return those of one kind: "image", "video" or "audio"."""
        return dict(zip(BARE, self, strict=True))[kind]


NO_MEDIA = Media((), ())


def is_bare(part: Any) -> bool:
    """Whether a part of a message stands for an image, a video or a sound that was taken."""
    return any(part is bare for bare in BARE.values())


def take_media(name: str, messages: Iterable[Any]) -> tuple[list[Any], Media]:
    """Return messages with a bare {"type": "image"} for each image, as chat templates take it, and what was taken.

    A part with an image is {"type": "image", "image": ...}, with "url" or "path" in place of "image" too, or
    {"type": "image_url", "image_url": {"url": ...}}, whose inner mapping may be the URL itself, or {"type":
    "image_pil", "image_pil": ...}. One with a video is {"type": "video", "video": [frame, ...]}, beside which "fps"
    may stand, one with a sound {"type": "audio", "audio": (array, rate)}. A part without a text may leave the type out.
    The given messages stay as they are.
    name: begins the messages of errors. Raises ValueError for a part of these kinds without an image or a video.
    """
    taken = Taken([], [], [])
    bare = [_take(f"{name}[{index}]", message, taken) for index, message in enumerate(messages)]
    return bare, Media(*taken)


class Taken(NamedTuple):
    """What has been taken out of messages so far."""

    images: list[Any]
    videos: list[Any]
    audio: list[Any]


def _take(name: str, message: Any, taken: Taken) -> Any:
    """Return a message without its images, videos and sounds, which are appended to those taken."""
    content = as_list(message.get("content")) if isinstance(message, Mapping) else None
    if content is None or not any(_kind_of(part) for part in content):
        return message
    return {**message, "content": [_take_part(name, part, taken) for part in content]}


def _take_part(name: str, part: Any, taken: Taken) -> Any:
    kind = _kind_of(part)
    if kind is None:
        return part
    medium, source = kind.partition("_")[0], _source_of(name, part, kind)
    if medium == VIDEO:
        rate = next((part[key] for key in RATES if part.get(key) is not None), None)
        taken.videos.append(with_rate(source, rate))
    elif medium == AUDIO:
        taken.audio.append(source)
    else:
        taken.images.append(source)
    return BARE[medium]


def _kind_of(part: Any) -> str | None:
    """Return the kind of a part with an image, a video or a sound; None: it is another part."""
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type")
    if kind is None and part.get("text") is None:
        return next((known for known in SOURCES if part.get(known) is not None), None)
    return kind if isinstance(kind, str) and kind in SOURCES else None


def _source_of(name: str, part: Mapping[str, Any], kind: str) -> Any:
    source = next((part[key] for key in SOURCES[kind] if part.get(key) is not None), None)
    if kind.endswith("_url") and isinstance(source, Mapping):
        source = source.get("url")
    if source is None:
        a_medium = "a video" if kind.startswith(VIDEO) else "a sound" if kind == AUDIO else "an image"
        raise ValueError(f"{name} has the part {short(part, 60)}: must have {a_medium} under {kind!r}")
    return source
