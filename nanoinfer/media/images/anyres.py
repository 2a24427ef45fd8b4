"""How many embeddings LLaVA-OneVision makes of an image in tiles: those of padding are cut off, and too many shrink."""

from __future__ import annotations

from math import sqrt

SHRINK = 1.1  # more embeddings than allowed are left if there are so many times as many in each direction


def count_anyres(size: tuple[int, int], best: tuple[int, int], tile: int, side: int, most_tiles: int) -> int:
    """Return how many embeddings there are: of the whole image, of its tiles, and one at the end of each row of these.

    size: the image's height and width
    best: the height and the width of all tiles; tile: those of one
    side: each tile has side * side embeddings; most_tiles: those of so many tiles are not too many
    """
    rows, columns = (length // tile * side for length in best)
    height, width = size
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    ratio = sqrt(rows * columns / (most_tiles * side**2))
    if ratio > SHRINK:
        rows, columns = int(rows // ratio), int(columns // ratio)
    return side**2 + rows * (columns + 1)
