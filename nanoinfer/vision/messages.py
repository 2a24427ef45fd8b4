"""Takes the images out of chat messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nanoinfer.checks import as_list, short

IMAGE = "image"
SOURCES = {IMAGE: (IMAGE, "url", "path"), "image_url": ("image_url",), "image_pil": ("image_pil",)}
"""Maps a kind of part to the keys that may hold its image: transformers', OpenAI's, vLLM's."""
BARE = {"type": IMAGE}  # a part whose image was taken


def take_images(name: str, messages: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return messages with a bare {"type": "image"} for each image, as chat templates take it, and the images.

    A part with an image is {"type": "image", "image": ...}, with "url" or "path" in place of "image" too, or
    {"type": "image_url", "image_url": {"url": ...}}, whose inner mapping may be the URL itself, or {"type":
    "image_pil", "image_pil": ...}. A part without a text may leave the type out. The given messages stay as they are.
    name: begins the messages of errors. Raises ValueError for a part of these kinds without an image.
    """
    images: list[Any] = []
    return [_take(f"{name}[{index}]", message, images) for index, message in enumerate(messages)], images


def _take(name: str, message: Any, images: list[Any]) -> Any:
    """Return a message without its images, which are appended to `images`."""
    content = as_list(message.get("content")) if isinstance(message, Mapping) else None
    if content is None or not any(_kind_of(part) for part in content):
        return message
    parts = []
    for part in content:
        if kind := _kind_of(part):
            images.append(_image_of(name, part, kind))
            part = BARE
        parts.append(part)
    return {**message, "content": parts}


def _kind_of(part: Any) -> str | None:
    """Return the kind of a part with an image; None: it is another part."""
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type")
    if kind is None and part.get("text") is None:
        return next((known for known in SOURCES if part.get(known) is not None), None)
    return kind if isinstance(kind, str) and kind in SOURCES else None


def _image_of(name: str, part: Mapping[str, Any], kind: str) -> Any:
    image = next((part[key] for key in SOURCES[kind] if part.get(key) is not None), None)
    if kind == "image_url" and isinstance(image, Mapping):
        image = image.get("url")
    if image is None:
        raise ValueError(f"{name} has the part {short(part, 60)}: must have an image under {kind!r}")
    return image
