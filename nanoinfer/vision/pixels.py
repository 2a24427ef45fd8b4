"""What the tower takes of images."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.vision.opening import Opener

if TYPE_CHECKING:
    from PIL.Image import Image

PIXEL_VALUES = "pixel_values"  # the one input of a tower whose numbers depend on more than an image's size
KEY_BYTES = 16
Pixels = Mapping[str, Tensor]


class PixelReader:
    """Opens images, and makes pixels of them, in any number of threads; pickled, in another process, too.

    processor: transformers' image processor; options: as it names them
    """

    def __init__(self, processor: Any, options: Mapping[str, Any], opener: Opener) -> None:
        self._processor, self._options, self._opener = processor, options, opener
        self._settings = f"{processor.to_json_string()} {sorted(options.items())}".encode()

    def open(self, name: str, source: Any) -> tuple[Image, bytes]:
        """Return an image in RGB and its key, the digest of its pixels and of the settings; as Opener.open does."""
        image = self._opener.open(name, source)
        digest = hashlib.blake2b(self._settings, digest_size=KEY_BYTES)
        digest.update(b"%d %d " % image.size)
        digest.update(image.tobytes())
        return image, digest.digest()

    def process(self, name: str, image: Image) -> Pixels:
        """Let the image processor make pixels, and what else it makes. Raises ValueError, which `name` begins."""
        try:
            made: Pixels = self._processor([image], return_tensors="pt", **self._options)
        except Exception as error:
            raise ValueError(f"{name}, {image.width} x {image.height} pixels: cannot be processed: {error}") from error
        return made

    def read(self, name: str, source: Any, key: bytes) -> Tensor:
        """Return the pixel values of an image that had this key. Raises ValueError if it has changed."""
        image, found = self.open(name, source)
        if found != key:
            raise ValueError(f"{name} has changed since it was first read: must not before its prompt begins")
        return self.process(name, image)[PIXEL_VALUES]


class PixelsOnDemand(Pixels):
    """Pixels that are made whenever they are read, so that a prompt that waits holds none.

    Pickled, they are made where they are read, if `load` is a method of a PixelReader.

    others: the inputs that are known by the image's size; num_bytes: what all take together
    load: returns the pixel values
    """

    def __init__(self, others: Pixels, num_bytes: int, load: Callable[[], Tensor]) -> None:
        self.num_bytes = num_bytes
        self._others, self._load = others, load

    def __getitem__(self, name: str) -> Tensor:
        return self._load() if name == PIXEL_VALUES else self._others[name]

    def __iter__(self) -> Iterator[str]:
        return iter((PIXEL_VALUES, *self._others))

    def __len__(self) -> int:
        return 1 + len(self._others)


def bytes_of(pixels: Pixels) -> int:
    """Return how many bytes an image's pixels have, and what comes with them."""
    if isinstance(pixels, PixelsOnDemand):
        return pixels.num_bytes
    return sum(tensor.nbytes for tensor in pixels.values())


def join(tensors: list[Tensor]) -> Tensor:
    """Concatenate along the first axis; zeros behind the ends of the other axes make these equally long."""
    longest = [max(lengths) for lengths in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    return torch.cat([_pad(tensor, longest) for tensor in tensors])


def _pad(tensor: Tensor, lengths: list[int]) -> Tensor:
    missing = [length - own for length, own in zip(lengths, tensor.shape[1:], strict=True)]
    return F.pad(tensor, [end for axis in reversed(missing) for end in (0, axis)]) if any(missing) else tensor
