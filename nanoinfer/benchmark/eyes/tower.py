"""What a vision tower multiplies, for the floor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tower:
    """The products that a tower needs for an image: those of its matrices, and of attention within each tile.

    size, inner, layers: of hidden states, of the MLPs, and how many layers there are
    pixels: numbers in a patch
    tiles, patches: an image becomes so many tiles, each of which has so many patches
    others: tokens of a tile beside its patches
    embeddings: that the decoder gets of an image
    projector: numbers in the matrices that make one embedding each
    """

    size: int
    inner: int
    layers: int
    pixels: int
    tiles: int
    patches: int
    embeddings: int
    projector: int
    others: int = 0

    @property
    def weights(self) -> int:
        """The numbers in its matrices."""
        return self._of_patches + self._of_layers + self.projector

    @property
    def operations(self) -> int:
        """Its operations for an image."""
        tokens = self.patches + self.others
        attention = 4 * tokens**2 * self.size * self.layers
        rows = self.patches * self._of_patches + tokens * self._of_layers
        return self.tiles * (2 * rows + attention) + 2 * self.embeddings * self.projector

    @property
    def _of_patches(self) -> int:
        return self.pixels * self.size

    @property
    def _of_layers(self) -> int:
        return self.layers * (4 * self.size**2 + 2 * self.size * self.inner)
