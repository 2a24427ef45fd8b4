"""What a checkpoint's files say of videos, and how large frames become by that: the rules of transformers' classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import ceil, floor, inf, sqrt
from pathlib import Path
from typing import Any

from nanoinfer.checks import as_list, as_number, check_flag, check_int, check_number, check_settings, short

# Of a checkpoint, in the order in which transformers looks: the first that is there says how videos are processed.
NESTED, OWN, OF_IMAGES = "processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json"
KEY = "video_processor"  # in the nested file
EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # older names of numbers of pixels
SAMPLING = ("do_sample_frames", "fps", "num_frames", "min_frames", "max_frames", "max_duration")  # users give frames
NAMES = ("processor_class", "video_processor_type", "image_processor_type", "feature_extractor_type", "auto_map")
IN_MEMORY = (
    "default_to_square", "input_data_format", "device", "disable_grouping", "model_input_names", "return_tensors",
    "return_metadata", "video_metadata",
)  # fmt: skip
RGB, CROP = "do_convert_rgb", "crop_size"  # frames are in RGB; none is cropped
RESIZES = "do_resize"
FIXED = {RESIZES: (True,), "do_center_crop": (False,), "do_pad": (False,), "data_format": ("channels_first",)}
RESAMPLE = 0, 5  # PIL's numbers
ASPECT = 200  # no frame is longer
SHARE, ABOVE = 0.9, 1.05  # of all pixels that a video's frames may have; of the least that a frame has


@dataclass(frozen=True)
class VideoSettings:
    """What transformers' video processor of a class reads of its files, by its names.

    counts_all: size counts the pixels of all frames together (Qwen3-VL, Qwen3.5), or of each (Qwen2-VL, Qwen2.5-VL)
    size: the least and the most pixels, by that
    patch_size, merge_size: a token stands for merge_size x merge_size patches of patch_size x patch_size pixels
    temporal_patch_size: and for so many frames
    cap_pixels_per_frame, max_video_tokens: whether a long video's frames become smaller, and the number that says when
    """

    counts_all: bool
    size: Mapping[str, int]
    patch_size: int
    image_mean: tuple[float, ...] | float
    image_std: tuple[float, ...] | float
    max_video_tokens: int
    merge_size: int = 2
    temporal_patch_size: int = 2
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    resample: int = 3  # bicubic, as PIL numbers it
    cap_pixels_per_frame: bool = False

    @property
    def side(self) -> int:
        """Of how many pixels a token's square has a side."""
        return self.patch_size * self.merge_size

    @property
    def most_pixels(self) -> int:
        """How many pixels a frame can have: those of a token's frames may be all that there are."""
        return self.size["longest_edge"] // (self.temporal_patch_size if self.counts_all else 1)

    def fit(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the height and the width that a video's frames get.

        frames: how many there are; height, width: of each
        Raises ValueError for fewer frames than a token must stand for, and for too long ones.
        """
        return self._fit_all(frames, height, width) if self.counts_all else self._fit_each(frames, height, width)

    def _fit_each(self, frames: int, height: int, width: int) -> tuple[int, int]:
        least, most = self.size["shortest_edge"], self.size["longest_edge"]
        if self.cap_pixels_per_frame:
            total = int(self.max_video_tokens * self.side**2 * SHARE)
            most = max(min(most, total * self.temporal_patch_size // frames), int(least * ABOVE))
        return _fit(self.side, (height, width), 1, 1, (least, most))

    def _fit_all(self, frames: int, height: int, width: int) -> tuple[int, int]:
        least, most = self.size["shortest_edge"], self.size["longest_edge"]
        if frames < self.temporal_patch_size:
            raise ValueError(f"must be at least {self.temporal_patch_size} frames, for which a token stands")
        if self.cap_pixels_per_frame:
            by_frame = min(self.max_video_tokens * self.side**2, most // frames)
            most = max(by_frame, int(least * ABOVE)) * frames
        if min(height, width) < self.side:
            scale = max(self.side / height, self.side / width)
            height, width = int(height * scale), int(width * scale)
        counted = round(frames / self.temporal_patch_size) * self.temporal_patch_size
        return _fit(self.side, (height, width), frames, counted, (least, most))

    def read(self, folder: str) -> VideoSettings:
        """Return these with what a checkpoint's files say in their place; raises ValueError for what is not known."""
        where, said = _find(Path(folder))
        own = {field.name for field in fields(self)} - {"counts_all"}
        check_settings(where, said, (*own, *EDGES, *SAMPLING, *NAMES, *IN_MEMORY, RGB, CROP), FIXED)
        given = {name: value for name, value in said.items() if value is not None}
        if given.get(RESIZES) is False:
            raise ValueError(f"{where}: {RESIZES}=False: must be True")
        size = given.get("size", {})
        if not isinstance(size, Mapping):
            raise ValueError(f"{where}: size={short(size)}: must be a mapping of {', '.join(EDGES.values())}")
        check_settings(f"{where}: size", size, [*EDGES.values()])
        size = {**self.size, **{edge: value for edge, value in size.items() if value is not None}}
        size.update({edge: given[name] for name, edge in EDGES.items() if name in given})
        size = {edge: check_int(f"{where}: size: {edge}", value, 1) for edge, value in size.items()}
        others = {name: self._check(where, name, given[name]) for name in own & given.keys() - {"size"}}
        return replace(self, **others, size=size)

    def _check(self, where: str, name: str, value: Any) -> Any:
        """Return a setting of a file. Raises ValueError for what it cannot be; where: begins the message"""
        shown, default = f"{where}: {name}", getattr(self, name)
        if name in ("image_mean", "image_std"):
            listed = [value] if as_number(value) is not None else as_list(value) or []
            numbers = [number for number in map(as_number, listed) if number is not None]
            if len(numbers) != len(listed) or len(numbers) not in (1, 3):
                raise ValueError(f"{shown}={short(value)}: must be a number, or one for each of three channels")
            return numbers[0] if len(numbers) == 1 else tuple(numbers)
        if isinstance(default, bool):
            return check_flag(shown, value)
        if name == "rescale_factor":
            return check_number(shown, value, 0, inf, "of at least 0")
        return check_int(shown, value, *(RESAMPLE if name == "resample" else (1, None)))


def _find(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """Return where settings of videos are, and these."""
    for name in (NESTED, OWN, OF_IMAGES):
        file = folder / name
        said: Mapping[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        if said := said.get(KEY, {}) if name == NESTED else said:
            return f"{file}: {KEY}" if name == NESTED else str(file), said
    return str(folder / OWN), {}


def _fit(side: int, size: tuple[int, int], frames: int, counted: int, pixels: tuple[int, int]) -> tuple[int, int]:
    """Return the nearest multiples of a side, or near the same shape those that have pixels in a range.

    frames, counted: by how many frames a shape is scaled, and by how many its pixels are counted
    """
    height, width = size
    least, most = pixels
    if max(size) > ASPECT * min(size):
        raise ValueError(f"must be at most {ASPECT} times as long as wide")
    fitted = round(height / side) * side, round(width / side) * side
    count = counted * fitted[0] * fitted[1]
    if count > most:
        shrink = sqrt(frames * height * width / most)
        return max(side, floor(height / shrink / side) * side), max(side, floor(width / shrink / side) * side)
    if count < least:
        grow = sqrt(least / (frames * height * width))
        return ceil(height * grow / side) * side, ceil(width * grow / side) * side
    return fitted
