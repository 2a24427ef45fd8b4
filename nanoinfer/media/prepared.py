"""What a prompt needs to know of an image or of audio before it is queued."""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.media.pixels import COUNT, FEATURES, PIXEL_VALUES, Pixels, PixelsOnDemand, TowerInput, bytes_of


@dataclass(frozen=True)
class Prepared:
    """An image, or audio, of which a tower makes embeddings by itself.

    key: as MediaSpan has it
    text, token_ids: what stands for it in a prompt
    count: how many of these tokens are placeholders
    pixels: what the tower takes, made when it is read
    """

    key: bytes
    text: str
    token_ids: list[int]
    count: int
    pixels: PixelsOnDemand

    @property
    def num_bytes(self) -> int:
        """How much memory its pixels take."""
        return bytes_of(self.pixels)

    @property
    def parts(self) -> tuple[TowerInput, ...]:
        """Itself."""
        return (TowerInput(self.key, self.count, self.pixels),)

    @property
    def shapes(self) -> Pixels:
        """What its positions depend on, by transformers' names."""
        return {name: self.pixels[name] for name in self.pixels if name not in (PIXEL_VALUES, FEATURES, COUNT)}
