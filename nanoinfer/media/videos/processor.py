"""The processor of videos: what a prompt and a tower get of one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoinfer.checks import check_int, short
from nanoinfer.media.images.largest import largest_shape
from nanoinfer.media.images.opening import Opener
from nanoinfer.media.images.processor import CHANNELS, FLOAT_BYTES, KEY_BYTES, scales_of
from nanoinfer.media.pixels import GRIDS, PixelsOnDemand, PixelSource, TowerInput
from nanoinfer.media.videos.clip import check_fps, read_clip
from nanoinfer.media.videos.kinds import VideoKind
from nanoinfer.media.videos.settings import EDGES, VideoSettings

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

OF_VIDEOS = FPS, SIZES = "fps", "videos_kwargs"  # of image_options
BLANK = "a blank video"


class Group(NamedTuple):
    """Neighbouring frames for which the same tokens stand: a tower sees them together, and no others.

    begin: the first one's number
    frames: as Opener takes them; behind the last of a video, that one again
    size: the height and the width that they get
    interval: the seconds from one group to the next, on which their tokens' positions may depend
    """

    begin: int
    frames: tuple[Any, ...]
    size: tuple[int, int]
    interval: float


@dataclass(frozen=True)
class PreparedVideo:
    """What a prompt needs to know of a video before it is queued.

    text, token_ids: what stands for it
    parts: its groups of frames
    grid: how many groups there are, and how many rows and columns of patches in each
    interval: as Group has it
    """

    text: str
    token_ids: list[int]
    parts: tuple[TowerInput, ...]
    grid: tuple[int, int, int]
    interval: float

    @property
    def count(self) -> int:
        """How many of the tokens are placeholders."""
        return sum(part.count for part in self.parts)

    @property
    def shapes(self) -> dict[str, Tensor]:
        """Return what its positions depend on, by transformers' names."""
        return {"video_grid_thw": torch.tensor([self.grid]), "second_per_grid_ts": torch.tensor([self.interval])}


class VideoProcessor:
    """Prepares videos, in any number of threads. A video's groups of frames are as images to a tower and an engine."""

    def __init__(
        self,
        kind: VideoKind,
        tokenizer: PreTrainedTokenizerBase,
        options: Mapping[str, Any],
        opener: Opener,
    ) -> None:
        """kind: the checkpoint's; options: image_options, of which OF_VIDEOS are read.

        Raises ValueError for options that cannot be.
        """
        self._kind, self._tokenizer, self._opener = kind, tokenizer, opener
        self._settings = _with_options(kind.settings, options.get(SIZES))
        self._fps = options.get(FPS)
        if self._fps is not None:
            self._fps = check_fps(f"image_options[{FPS!r}]", self._fps)
        self._scales = scales_of(self._settings)[..., :1].contiguous()  # alike for all frames

    def prepare(self, name: str, source: Any) -> PreparedVideo:
        """Return what a prompt needs to know of a video.

        Its pixels are made of the frames each time that they are read: then ValueError is raised if they have changed.
        name: begins the messages of errors; source: as read_clip takes it, or what this has returned before
        Raises ValueError for what is no video, for a frame that cannot be opened, and for frames of several sizes.
        """
        if isinstance(source, PreparedVideo):
            return source
        settings, clip = self._settings, read_clip(name, source, self._fps)
        at_once = settings.temporal_patch_size
        first = self._opener.open(f"frame 0 of {name}", clip.frames[0]).size
        interval = at_once / clip.rate
        size = self._fit(name, len(clip.frames), *reversed(first))
        padding = -len(clip.frames) % at_once
        frames = clip.frames + clip.frames[-1:] * padding
        indices = clip.indices + clip.indices[-1:] * padding
        parts, seconds = [], []
        for begin in range(0, len(frames), at_once):
            group = Group(begin, tuple(frames[begin : begin + at_once]), size, interval)
            parts.append(self._part(name, group, first))
            first_index, last_index = indices[begin], indices[begin + at_once - 1]
            seconds.append((first_index / clip.fps + last_index / clip.fps) / 2)  # in transformers' order
        rows, columns = (length // settings.patch_size for length in size)
        text = self._kind.expand(seconds, parts[0].count)
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return PreparedVideo(text, token_ids, tuple(parts), (len(parts), rows, columns), interval)

    def largest(self) -> TowerInput:
        """Return what is made of blank frames so large that of no more frames at once more is made."""
        settings = self._settings
        height, width = largest_shape(settings.most_pixels // settings.side**2, settings.side)
        blank = np.zeros((height, width, CHANNELS), np.uint8)
        return self._part(
            BLANK, Group(0, (blank,) * settings.temporal_patch_size, (height, width), 0.0), (width, height)
        )

    def load(self, source: PixelSource) -> Tensor:
        """Return the pixel values, in bytes, of frames that were prepared before, here or in another process."""
        name, group, key = source
        images = self._open(name, group)
        if self._key(images, group) != key:
            raise ValueError(
                f"frame {group.begin} of {name}, or one beside it, has changed since it was first read: must not before"
                " its prompt begins"
            )
        height, width = group.size
        resized = [image.resize((width, height), self._settings.resample) for image in images]
        return self._patches(torch.from_numpy(np.stack([np.asarray(image) for image in resized])))

    def _patches(self, frames: Tensor) -> Tensor:
        """Cut frames into patches: [frames, height, width, channels] becomes [patches, channels * frames * ...]."""
        patch, merge = self._settings.patch_size, self._settings.merge_size
        count, height, width, channels = frames.shape
        shape = count, height // patch // merge, merge, patch, width // patch // merge, merge, patch, channels
        cut = frames.view(shape).permute(1, 4, 2, 5, 7, 0, 3, 6)
        return cut.reshape(height // patch * (width // patch), channels * count * patch**2)

    def _fit(self, name: str, frames: int, height: int, width: int) -> tuple[int, int]:
        try:
            return self._settings.fit(frames, height, width)
        except ValueError as error:
            raise ValueError(f"{name} has {frames} frames of {width} x {height} pixels: {error}") from None

    def _part(self, name: str, group: Group, size: tuple[int, int]) -> TowerInput:
        """Return what a tower is told of a group of frames, each of which must have a size, width and height."""
        images = self._open(name, group)
        for place, image in enumerate(images, group.begin):
            if image.size != size:
                shown = " x ".join(map(str, image.size))
                raise ValueError(
                    f"frame {place} of {name} has {shown} pixels: must have {size[0]} x {size[1]}, as frame 0"
                )
        settings, (height, width) = self._settings, group.size
        rows, columns = height // settings.patch_size, width // settings.patch_size
        others = {GRIDS: torch.tensor([[1, rows, columns]])}
        num_bytes = FLOAT_BYTES * CHANNELS * len(images) * height * width + others[GRIDS].nbytes
        count = rows * columns // settings.merge_size**2
        own = PixelSource(name, group, self._key(images, group))
        return TowerInput(own.key, count, PixelsOnDemand(others, num_bytes, self._scales, count, own, self.load))

    def _open(self, name: str, group: Group) -> list[Image]:
        frames = enumerate(group.frames, group.begin)
        return [self._opener.open(f"frame {place} of {name}", frame) for place, frame in frames]

    def _key(self, images: list[Image], group: Group) -> bytes:
        """Return the digest of frames and of all that their pixels and positions depend on."""
        digest = hashlib.blake2b(
            f"video {self._settings} {group.size} {group.interval}".encode(), digest_size=KEY_BYTES
        )
        for image in images:
            digest.update(b"%d %d " % image.size)
            digest.update(np.asarray(image).data)
        return digest.digest()


def _with_options(settings: VideoSettings, options: Any) -> VideoSettings:
    """Return settings with numbers of pixels that a user gives; raises ValueError for others."""
    if options is None:
        return settings
    name = f"image_options[{SIZES!r}]"
    if not isinstance(options, Mapping):
        raise ValueError(f"{name}={short(options)}: must be a mapping, such as {{'max_pixels': 1048576}}")
    size = dict(settings.size)
    for key, value in options.items():
        if key not in EDGES:
            raise ValueError(f"{name} has {short(key)}: {short(value)}: those of videos are {', '.join(EDGES)}")
        size[EDGES[key]] = check_int(f"{name}[{key!r}]", value, 1)
    return replace(settings, size=size)
