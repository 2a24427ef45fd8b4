"""Takes the images out of chat messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nanoinfer.checks import as_list, short

IMAGE, IMAGE_URL = "image", "image_url"  # kinds of parts: transformers', OpenAI's
KINDS = (IMAGE, IMAGE_URL)


def take_images(name: str, messages: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return messages with a bare {"type": "image"} for each image, as chat templates take it, and the images.

    A part with an image is {"type": "image", "image": ...} or {"type": "image_url", "image_url": {"url": ...}}, whose
    inner mapping may be the URL itself. The given messages stay as they are.
    name: begins the messages of errors. Raises ValueError for a part of these kinds without an image.
    """
    images: list[Any] = []
    return [_take(f"{name}[{index}]", message, images) for index, message in enumerate(messages)], images


def _take(name: str, message: Any, images: list[Any]) -> Any:
    """Return a message without its images, which are appended to `images`."""
    content = as_list(message.get("content")) if isinstance(message, Mapping) else None
    if content is None or not any(_is_image(part) for part in content):
        return message
    parts = []
    for part in content:
        if _is_image(part):
            images.append(_image_of(name, part))
            part = {"type": IMAGE}
        parts.append(part)
    return {**message, "content": parts}


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in KINDS


def _image_of(name: str, part: Mapping[str, Any]) -> Any:
    kind = part["type"]
    image = part.get(kind)
    if kind == IMAGE_URL and isinstance(image, Mapping):
        image = image.get("url")
    if image is None:
        raise ValueError(f"{name} has the part {short(part, 60)}: must have an image under {kind!r}")
    return image
