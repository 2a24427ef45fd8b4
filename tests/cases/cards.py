"""The cards for which tests compile kernels, by their names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """A GPU. shared_bytes: of shared memory that a program can have"""

    capability: tuple[int, int]
    shared_bytes: int
    multiprocessors: int


CARDS = {
    "H100": Card((9, 0), 227 << 10, 132),
    "A100": Card((8, 0), 163 << 10, 108),
    "RTX 3090": Card((8, 6), 99 << 10, 82),
    "RTX 4090": Card((8, 9), 99 << 10, 128),
    "RTX 5090": Card((12, 0), 99 << 10, 170),
}
