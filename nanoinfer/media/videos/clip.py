"""A video as users give it: its frames, and when each one is seen."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoinfer.checks import as_list, check_int, check_number, short

log = logging.getLogger("nanoinfer")

DEFAULT_FPS = 24.0  # transformers' own, where nobody says it
LEAST_FPS, MOST_FPS = 1e-6, 1e6
RATES = ("fps", "sample_fps")  # as a message's part and qwen-vl-utils name it
MOST_FRAMES = 2**31 - 1  # of a whole video
VIDEO_AXES, MANY_AXES = 4, 5  # of arrays, and of tensors
CHANNELS = 3
FILES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm")
A_VIDEO = (
    "a list of frames, each of which is what an image may be, an array of uint8, [frames, height, width, 3], or a"
    " tensor, [frames, 3, height, width]; a pair of these and a mapping says frames per second: ([...], {'fps': 2})"
)
UNDECODED = f"no file of a video is decoded here: must be {A_VIDEO}"
MOST_SHOWN = 60  # characters of a value in an error message


class Clip(NamedTuple):
    """A video's frames, in their order.

    frames: each as Opener takes it
    fps: so many frames of the whole video are seen in a second
    indices: the number of each frame in the whole video, from 0
    total: how many frames that has; None: nobody says
    """

    frames: list[Any]
    fps: float
    indices: list[int]
    total: int | None

    @property
    def rate(self) -> float:
        """How many of these frames are seen in a second."""
        return self.fps if self.total is None else len(self.frames) / self.total * self.fps


def listed(value: Any) -> list[Any]:
    """Return the videos that a prompt has, each as read_clip takes it.

    value: one video or several of them, as vLLM's callers write them; None: none
    """
    if value is None:
        return []
    if isinstance(value, (np.ndarray, Tensor)):
        return list(value) if value.ndim == MANY_AXES else [value]
    if not isinstance(value, (list, tuple)) or _is_pair(value):
        return [value]
    return list(value) if all(_is_clip(entry) for entry in value) else [value]


def with_rate(video: Any, rate: Any) -> Any:
    """Return a video with frames per second beside it, unless it has some or nobody says them."""
    frames, said = video if _is_pair(video) else (video, {})
    is_said = any(said.get(key) is not None for key in RATES)
    return video if is_said or rate is None else (frames, {**said, RATES[0]: rate})


def read_clip(name: str, video: Any, fps: float | None) -> Clip:
    """Return the frames of a video, and when they are seen.

    name: begins the messages of errors
    video: frames, in a list, an array of uint8, [frames, height, width, 3], or a tensor of numbers from 0 to 255,
        [frames, 3, height, width], as qwen-vl-utils makes it; or a pair of these and a mapping, as vLLM has it: "fps"
        is how many frames of the whole video are seen in a second, "frames_indices" which of them these are, and
        "total_num_frames" how many it has
    fps: that of a video that does not say its own; None: DEFAULT_FPS

    Raises ValueError for another video, for the name of a file, for one without a frame, and for a mapping that does
    not fit the frames or asks to choose among them.
    """
    given, said = video if _is_pair(video) else (video, {})
    frames = _frames(name, given)
    if said.get("do_sample_frames"):
        raise ValueError(f"{name} has do_sample_frames={short(said['do_sample_frames'])}: must be False: all are taken")
    rate = next((said[key] for key in RATES if said.get(key) is not None), fps)
    if rate is None:
        _warn_of_rate()
        rate = DEFAULT_FPS
    clip = Clip(frames, check_fps(f"{name} has fps", rate), _indices(name, said, len(frames)), _total(name, said))
    if clip.rate < LEAST_FPS:
        shown = f"fps={clip.fps:g} and total_num_frames={clip.total}"
        raise ValueError(f"{name} has {shown}, for {len(frames)} frames: must be {LEAST_FPS:g} a second or more")
    return clip


def check_fps(name: str, value: Any) -> float:
    """Return a number of frames per second; raises ValueError if it is none, or out of range."""
    return check_number(name, value, LEAST_FPS, MOST_FPS, f"from {LEAST_FPS:g} to {MOST_FPS:g}")


def _is_pair(video: Any) -> bool:
    """Whether frames have a mapping beside them; a frame may be a mapping, too."""
    is_two = isinstance(video, (list, tuple)) and len(video) == 2
    return (
        is_two and isinstance(video[1], Mapping) and isinstance(video[0], (list, tuple, np.ndarray, Tensor, str, Path))
    )


def _is_clip(entry: Any) -> bool:
    """Whether an entry of a list is a video, not a frame."""
    if isinstance(entry, (np.ndarray, Tensor)):
        return entry.ndim >= VIDEO_AXES
    return isinstance(entry, (list, tuple)) or _is_file(entry)


def _is_file(source: Any) -> bool:
    return isinstance(source, (str, Path)) and str(source).lower().endswith(FILES)


def _frames(name: str, given: Any) -> list[Any]:
    if isinstance(given, (str, bytes, Path)):
        raise ValueError(f"{name} is {short(given, MOST_SHOWN)}: {UNDECODED}")
    if isinstance(given, Tensor):
        given = _as_array(name, given)
    if isinstance(given, np.ndarray):
        if given.ndim != VIDEO_AXES or given.dtype != np.uint8:
            raise ValueError(f"{name} is an array of {given.dtype}, {list(given.shape)}: must be {A_VIDEO}")
        frames = list(given)
    elif isinstance(given, Sequence):
        frames = list(given)
    else:
        raise ValueError(f"{name} is {short(given, MOST_SHOWN)}: must be {A_VIDEO}")
    if not frames:
        raise ValueError(f"{name} has no frames: must be {A_VIDEO}")
    if any(map(_is_file, frames)):
        raise ValueError(f"{name} is {short(given, MOST_SHOWN)}: {UNDECODED}")
    return [bytes(frame) if isinstance(frame, memoryview) else frame for frame in frames]  # which may be pickled


def _as_array(name: str, given: Tensor) -> np.ndarray:
    """Return a tensor's frames as an array has them."""
    if given.ndim != VIDEO_AXES or given.shape[1] != CHANNELS:
        raise ValueError(f"{name} is a tensor of {list(given.shape)}: must be {A_VIDEO}")
    frames: np.ndarray = given.permute(0, 2, 3, 1).round().clamp(0, 255).to("cpu", torch.uint8).numpy()
    return frames


def _indices(name: str, said: Mapping[str, Any], count: int) -> list[int]:
    indices = said.get("frames_indices")
    if indices is None:
        return list(range(count))
    entries = as_list(indices)
    if entries is None or len(entries) != count:
        shown = short(indices, MOST_SHOWN)
        raise ValueError(f"{name} has frames_indices={shown}: must be a list of {count} numbers, one for each frame")
    return [
        check_int(f"{name} has frames_indices[{place}]", index, 0, MOST_FRAMES) for place, index in enumerate(entries)
    ]


def _total(name: str, said: Mapping[str, Any]) -> int | None:
    """Return how many frames the whole video has, if that is another number than that of its frames here."""
    if said.get("frames_indices") is None or said.get("total_num_frames") is None:
        return None
    return check_int(f"{name} has total_num_frames", said["total_num_frames"], 1, MOST_FRAMES)


@cache
def _warn_of_rate() -> None:
    """Warn once: the model is told when each frame is seen."""
    log.warning("a video does not say its fps: %g frames in a second are taken, as transformers does", DEFAULT_FPS)
