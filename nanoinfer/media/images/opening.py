"""Opens what a user gives as an image."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from nanoinfer.checks import short

if TYPE_CHECKING:
    from PIL.Image import Image

FILE, DATA = "file://", "data:"
A_SOURCE = "a PIL image, a path, a data: URL, the bytes of a file, or an array of uint8, [height, width, 3]"
AN_IMAGE = "an image"
CHANNELS = (1, 3, 4)  # that an array may have
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # of files; PIL runs a program for some others
RGB = "RGB"
# How an image becomes upright, as PIL names it, by the orientation that a camera noted (EXIF 2.3)
TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
LOCKS = [Lock() for _ in range(1021)]  # of images; so many that two which are decoded at once seldom have the same
MOST_SHOWN = 60  # characters of a URL or a path in an error message


class Opener:
    """Makes RGB images of whatever users give, each turned as its camera noted.

    folder: files are read from it alone, and relative paths begin in it; None: no file is read
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = None if folder is None else Path(folder).expanduser().resolve()

    def open(self, name: str, source: Any) -> Image:
        """Return an image in RGB, on white where it is transparent.

        name: begins the messages of errors
        source: a PIL image; a path or a file: URL, in the folder; a data: URL; the bytes of an image's file; an array
            of uint8, [height, width] or [height, width, 1, 3 or 4]; or a mapping with "bytes" or a "path", as tables
            of the library datasets hold images

        Raises ValueError for another source, for one that does not decode or is no file of FORMATS, and for one without
        a pixel, or of more than PIL.Image.MAX_IMAGE_PIXELS, before it is decoded.
        """
        from PIL import Image  # here, for it comes with an extra

        found = self._find(name, source)
        with _named_errors(name):
            image = found if isinstance(found, Image.Image) else Image.open(found, formats=FORMATS)
        count, most = image.width * image.height, Image.MAX_IMAGE_PIXELS
        if not count or (most is not None and count > most):
            room = "one or more" if most is None else f"1 to {most}"
            raise ValueError(f"{name} has {image.width} x {image.height} pixels: must have {room}")
        with _named_errors(name), LOCKS[id(image) % len(LOCKS)]:  # threads that decode one image get wrong pixels
            return _turned(image)

    def _find(self, name: str, source: Any) -> Image | BytesIO | Path:
        """Return an image, or where to read one."""
        from PIL import Image

        if isinstance(source, Mapping):
            source = next((source[key] for key in ("bytes", "path") if source.get(key) is not None), source)
        if isinstance(source, Image.Image):
            return source
        if isinstance(source, np.ndarray):
            return Image.fromarray(_check_array(name, source))
        if isinstance(source, (bytes, bytearray, memoryview)):
            return BytesIO(bytes(source))
        if isinstance(source, str) and source.startswith(DATA):
            return BytesIO(_decode_url(name, source))
        if isinstance(source, (str, Path)):
            return self.find_file(name, str(source))
        raise ValueError(f"{name} is {short(source, MOST_SHOWN)}: must be {A_SOURCE}")

    def find_file(self, name: str, source: str, what: str = AN_IMAGE, known: str = A_SOURCE) -> Path:
        """Return the file of a path or a file: URL; raises ValueError if it is not in the folder.

        what, known: what it shall be, and all that it may be, for the message
        """
        path = source.removeprefix(FILE)
        if "://" in path:
            raise ValueError(f"{name} is {short(source, MOST_SHOWN)}: nothing is fetched; must be {known}")
        if self._folder is None:
            raise ValueError(
                f"{name} is {short(source, MOST_SHOWN)}: no file is read unless image_folder names the folder of images"
            )
        with _unreadable(name, what):  # a NUL in it, a circle of links
            file = (self._folder / (path if path == source else unquote(path))).resolve()
        if not file.is_relative_to(self._folder):
            raise ValueError(
                f"{name} is {short(source, MOST_SHOWN)}: must be in image_folder={str(self._folder)!r}, links followed"
            )
        with _unreadable(name, what):  # a name that is too long
            is_file = file.is_file()
        if not is_file:  # to open a pipe would wait for whoever writes into it
            raise ValueError(f"{name} is {short(source, MOST_SHOWN)}: no such file in {str(self._folder)!r}")
        return file


def _turned(image: Image) -> Image:
    """Return an image in RGB, turned as its camera noted; one that is so already is not copied."""
    from PIL.Image import Transpose

    image.load()
    if (turn := TURNS.get(_orientation(image))) is not None:
        image = image.transpose(getattr(Transpose, turn))
    return image if image.mode == RGB else _on_white(image).convert(RGB)


def _orientation(image: Image) -> Any:
    """Return what a camera noted; None: nothing that can be read, though the pixels can."""
    from PIL import ExifTags

    with suppress(Exception):  # PIL raises anything
        return image.getexif().get(ExifTags.Base.Orientation)
    return None


def _on_white(image: Image) -> Image:
    """Lay what is transparent on white, as transformers and vLLM do."""
    from PIL import Image

    if not image.has_transparency_data:
        return image
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)


@contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """PIL raises anything for what does not decode."""
    from PIL import UnidentifiedImageError

    with _unreadable(name, AN_IMAGE):
        try:
            yield
        except UnidentifiedImageError as error:
            raise ValueError(f"must be a file of {', '.join(FORMATS)}") from error


@contextmanager
def _unreadable(name: str, what: str) -> Iterator[None]:
    """Say what cannot be read, and as what, whatever is raised."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name} cannot be read as {what}: {str(error) or repr(error)}") from error


def _check_array(name: str, array: np.ndarray) -> np.ndarray:
    """Return an array as PIL takes it: one channel has no axis."""
    is_known = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in CHANNELS)
    if array.dtype != np.uint8 or not is_known or not array.size:
        raise ValueError(
            f"{name} is an array of {array.dtype}, {list(array.shape)}: must be of uint8, [height, width] or"
            " [height, width, 1, 3 or 4], with a pixel"
        )
    return array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array


def _decode_url(name: str, url: str) -> bytes:
    """Return the bytes in a data: URL (RFC 2397) of base64."""
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ValueError(f"{name} is {short(url, MOST_SHOWN)}: a data: URL must be data:image/...;base64,...")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise ValueError(f"{name} is {short(url, MOST_SHOWN)}: must be base64: {error}") from None
