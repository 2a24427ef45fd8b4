"""The largest image: of which the most is made, for plans of memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import exp, isqrt, log, prod, sqrt
from typing import Any

EDGES = {"max_pixels": "longest_edge", "min_pixels": "shortest_edge"}  # sizes that have both edges count pixels
ASPECT = 200  # no longer image is taken where sizes count pixels
SHAPES = 400  # how many, from the highest to the widest, are tried where slices are cut
SIDE = 256  # of a blank image, where the size of what is made of an image does not depend on it


def largest_size(processor: Any, options: Mapping[str, Any]) -> tuple[int, int]:
    """Return the height and the width of an image of which the most tokens are made.

    processor: transformers' image processor
    options: what is said in place of its settings; "size" is whole
    """

    setting = partial(_setting, processor, options)
    size = options["size"]
    if setting("do_pan_and_scan"):
        height = setting("pan_and_scan_min_crop_size")
        return height, height * setting("pan_and_scan_max_num_crops")
    if setting("crop_to_patches"):
        return _fill(max(setting("max_patches"), setting("dense_max_patches") or 0), size["height"])
    if grids := setting("image_grid_pinpoints"):
        return max(map(tuple, grids), key=prod)  # the most tiles; of fewer, up to a fifth more tokens may be left
    if most := setting("max_slice_nums"):
        return _largest_in_slices(processor, most)
    if setting("tile_size"):
        splits = setting("do_image_splitting")
        side = setting("encoder_patch_size") * setting("downsample_factor")
        return _fill(setting("max_tiles"), setting("tile_size")) if splits else _fill(setting("max_image_tokens"), side)
    if counts_pixels(size):
        side = setting("patch_size") * setting("merge_size")
        return largest_shape(size["longest_edge"] // side**2, side)
    if most := setting("max_soft_tokens"):
        return _fill(most, setting("patch_size") * setting("pooling_kernel_size"))
    return (size.get("longest_edge", SIDE),) * 2


def _setting(processor: Any, options: Mapping[str, Any], name: str) -> Any:
    return options.get(name, getattr(processor, name, None))


def counts_pixels(size: Mapping[str, int]) -> bool:
    """Whether the edges in an image processor's size are numbers of pixels."""
    return size.keys() >= set(EDGES.values())


def largest_shape(most: int, side: int) -> tuple[int, int]:
    """Return the height and the width of at most so many squares, as what is made of an image, or a few more."""
    return _fill(most, side) if most > ASPECT else (side, ASPECT * side)  # of a long image, few become more


def _fill(most: int, side: int) -> tuple[int, int]:
    """Return the height and the width, alike, of a rectangle that has as many squares as can be, of at most so many."""
    rows = max(range(isqrt(most) // 2 + 1, isqrt(most) + 1), key=lambda rows: rows * (most // rows))
    return rows * side, most // rows * side


def _largest_in_slices(processor: Any, most: int) -> tuple[int, int]:
    """Return the shape, among many, of which MiniCPM-V's processor makes the most of at most so many slices."""
    scale = processor.scale_resolution
    how = scale, processor.patch_size, processor.downsample_mode

    def pixels(shape: tuple[int, int]) -> int:
        grid = processor.get_sliced_grid(shape, most, scale) if processor.slice_mode else None
        height, width = processor.find_best_resize(shape, *how, allow_upscale=grid is None)
        if grid is None:
            return int(height * width)
        rows, columns = processor.get_refine_size(shape, grid, *how, allow_upscale=True)
        return int(height * width + rows * columns)

    aspects = (exp(log(ASPECT) * (2 * step / SHAPES - 1)) for step in range(SHAPES + 1))
    side = scale * sqrt(most)
    return max(((round(side / sqrt(aspect)), round(side * sqrt(aspect))) for aspect in aspects), key=pixels)
