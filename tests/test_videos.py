"""Videos: what one may be, how large its frames become, and what stands for it in a prompt."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import of_each_kind

pytest.importorskip("PIL")

import transformers
from cases.multimodal import MULTIMODAL
from cases.pictures import film, picture
from cases.vision import BEGIN, END, SEEING, VIDEO, VIDEO_PROMPT, VIDEO_SETTINGS, processor_of
from PIL import Image
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import is_torchvision_available

from nanoinfer.media.messages import take_media
from nanoinfer.media.pixels import bytes_of
from nanoinfer.media.videos import clip
from nanoinfer.media.videos.clip import listed, read_clip, with_rate
from nanoinfer.media.videos.kinds import CLASSES
from nanoinfer.media.videos.settings import VideoSettings

FRAMES = film(3, 8, 6)
ARRAY = np.stack([np.asarray(frame) for frame in FRAMES])
TENSOR = torch.from_numpy(ARRAY).permute(0, 3, 1, 2).float()  # as qwen-vl-utils makes it
TAKING = [name for name, seeing in SEEING.items() if seeing.takes_videos]
each_class = pytest.mark.parametrize("name", of_each_kind(TAKING, TAKING.index("qwen2.5-vl"), TAKING.index("qwen3-vl")))


class Checkpoint:
    """A small checkpoint that takes videos."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder, self.seeing = str(folder), SEEING[name]
        self.model: PreTrainedModel = self.seeing.build(folder)
        self.config = AutoConfig.from_pretrained(folder)
        self.processor = processor_of(self.folder, self.config)
        assert self.processor.videos is not None
        self.videos = self.processor.videos


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    return cache(lambda name: Checkpoint(name, tmp_path_factory.mktemp("seeing")))


class TestWhatAVideoMayBe:
    @pytest.mark.parametrize(
        ("value", "count"),
        [
            (None, 0),
            ([], 0),
            (FRAMES, 1),
            (ARRAY, 1),
            (ARRAY[None], 1),
            (TENSOR, 1),
            ([(TENSOR, {"fps": 2}), TENSOR], 2),
            ([ARRAY, ARRAY], 2),
            ([FRAMES, tuple(FRAMES)], 2),
            ((FRAMES, {"fps": 2}), 1),
            ([(ARRAY, {"fps": 2}), FRAMES], 2),
            ([[FRAMES, {"fps": 2}]], 1),
            (["a.png", "b.png"], 1),
            (["a.mp4", "b.MOV"], 2),
            ("a.mp4", 1),
            ([{"bytes": b""}, {"bytes": b""}], 1),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_one_or_several(self, value: Any, count: int) -> None:
        """As vLLM's callers write them."""
        assert len(listed(value)) == count

    def test_frames_of_lists_arrays_and_tensors(self) -> None:
        of_list, *others = (read_clip("video", video, 2) for video in (tuple(FRAMES), ARRAY, TENSOR, TENSOR.byte()))
        assert of_list.frames == FRAMES
        for other in others:
            assert all(map(np.array_equal, other.frames, map(np.asarray, FRAMES)))
            assert of_list[1:] == other[1:] == (2, [0, 1, 2], None)

    def test_what_stands_beside_frames_says_when_they_are_seen(self) -> None:
        said = {"fps": 30, "total_num_frames": 90, "frames_indices": np.array([0, 30, 60]), "video_backend": "opencv"}
        seen = read_clip("video", (FRAMES, {**said, "do_sample_frames": False}), 2)
        assert seen[1:] == (30, [0, 30, 60], 90)
        assert seen.rate == 1
        assert read_clip("video", (FRAMES, {"fps": 30, "total_num_frames": 90}), 2).rate == 30

    def test_a_rate_of_its_own_goes_before_others(self) -> None:
        own = with_rate((FRAMES, {"fps": 3}), 4)
        assert [read_clip("video", video, 2).fps for video in (own, with_rate(FRAMES, 4), with_rate(FRAMES, None))] == [
            3,
            4,
            2,
        ]

    def test_a_rate_that_nobody_says_is_transformers_own(self, caplog: pytest.LogCaptureFixture) -> None:
        clip._warn_of_rate.cache_clear()
        assert [read_clip("video", FRAMES, None).fps for _ in range(2)] == [24, 24]
        (warning,) = caplog.records
        assert warning.levelno == logging.WARNING
        assert "does not say its fps: 24 frames in a second are taken" in warning.getMessage()

    @pytest.mark.parametrize(
        ("video", "message"),
        [
            ("a.mp4", "video is 'a.mp4': no file of a video is decoded here: must be a list of frames"),
            (Path("a.webm"), r"video is .*: no file of a video is decoded here"),
            (b"\0\0\0 ftypisom", "video is b.*: no file of a video is decoded here"),
            ("data:video/mp4;base64,AA", "no file of a video is decoded here"),
            (["a.mp4"], r"video is \['a.mp4'\]: no file of a video is decoded here"),
            ([], "video has no frames: must be a list of frames"),
            (ARRAY[:0], "video has no frames: must be a list of frames"),
            (ARRAY[0], r"video is an array of uint8, \[6, 8, 3\]: must be .* \[frames, height, width, 3\]"),
            (ARRAY / 255, r"video is an array of float64, \[3, 6, 8, 3\]: must be"),
            (3, "video is 3: must be a list of frames"),
            (picture(4, 4), "video is <PIL.*: must be a list of frames"),
            ((FRAMES, {"fps": 0}), r"video has fps=0: must be a number from 1e-06 to 1e\+06"),
            ((FRAMES, {"fps": "fast"}), "video has fps='fast': must be a number from"),
            ((FRAMES, {"fps": float("inf")}), "video has fps=inf: must be a number from"),
            ((FRAMES, {"frames_indices": [0, 1]}), r"video has frames_indices=\[0, 1\]: must be a list of 3 numbers"),
            (
                (FRAMES, {"frames_indices": [0, 1, -2]}),
                r"video has frames_indices\[2\]=-2: must be an integer from 0 to",
            ),
            ((FRAMES, {"do_sample_frames": True}), "video has do_sample_frames=True: must be False: all are taken"),
            (
                (FRAMES, {"frames_indices": [0, 1, 2], "total_num_frames": 0}),
                "video has total_num_frames=0: must be an integer from 1 to",
            ),
            (
                (FRAMES, {"fps": 1e-3, "frames_indices": [0, 1, 2], "total_num_frames": 10**9}),
                "video has fps=0.001 and total_num_frames=1000000000, for 3 frames: must be 1e-06 a second or more",
            ),
            (torch.zeros(3, 6, 8, 3), r"video is a tensor of \[3, 6, 8, 3\]: must be .* \[frames, 3, height, width\]"),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_what_is_no_video(self, video: Any, message: str) -> None:
        with pytest.raises(ValueError, match=f"^{message}" if message.startswith("video") else message):
            read_clip("video", video, 24)

    def test_videos_are_taken_out_of_messages(self) -> None:
        image = picture(2, 2)
        parts = [
            {"type": "video", "video": FRAMES, "fps": 2},
            {"type": "image", "image": image},
            {"type": "text", "text": "what?"},
            {"video": ARRAY},
            {"type": "video", "video": FRAMES, "sample_fps": 1},
            {"type": "video_url", "video_url": {"url": "a.mp4"}},
        ]
        (message,), (images, videos, _) = take_media("messages", [{"role": "user", "content": parts}])
        assert message["content"] == [{"type": "video"}, {"type": "image"}, parts[2], *[{"type": "video"}] * 3]
        assert images == [image]
        assert videos[0] == (FRAMES, {"fps": 2})
        assert videos[1] is ARRAY
        assert videos[2:] == [(FRAMES, {"fps": 1}), "a.mp4"]
        with pytest.raises(ValueError, match=r"messages\[0\] has the part .*: must have a video under 'video'"):
            take_media("messages", [{"role": "user", "content": [{"type": "video"}]}])


EACH = VideoSettings(False, {"shortest_edge": 4000, "longest_edge": 40000}, 14, 0.5, 0.5, max_video_tokens=40)
ALL = VideoSettings(True, {"shortest_edge": 4096, "longest_edge": 40960}, 16, 0.5, 0.5, max_video_tokens=4)


class TestSizes:
    """Those of transformers' own processors, computed with torchvision 0.28."""

    @pytest.mark.parametrize(
        ("settings", "frames", "size", "fitted"),
        [
            (EACH, 7, (100, 150), (112, 140)),
            (EACH, 7, (1000, 150), (504, 56)),
            (EACH, 1, (5, 9), (56, 112)),
            (ALL, 2, (100, 150), (96, 160)),
            (ALL, 5, (100, 150), (64, 96)),
            (ALL, 8, (100, 150), (32, 64)),
            (ALL, 2, (5, 9), (32, 64)),
        ],
    )
    def test_frames_have_pixels_in_a_range(
        self, settings: VideoSettings, frames: int, size: tuple[int, int], fitted: tuple[int, int]
    ) -> None:
        assert settings.fit(frames, *size) == fitted

    def test_too_long_and_too_few_frames(self) -> None:
        for settings in (EACH, ALL):
            with pytest.raises(ValueError, match="must be at most 200 times as long as wide"):
                settings.fit(2, 900, 4)
        with pytest.raises(ValueError, match="must be at least 2 frames, for which a token stands"):
            ALL.fit(1, 90, 40)

    @pytest.mark.parametrize("settings", [EACH, ALL])
    def test_no_frame_has_more_pixels(self, settings: VideoSettings) -> None:
        generator = np.random.default_rng(0)
        for frames, height, width in generator.integers(2, 300, (500, 3)).tolist():
            if max(height, width) <= 20 * min(height, width):
                rows, columns = settings.fit(frames, height, width)
                assert rows * columns <= settings.most_pixels
                assert rows % settings.side == columns % settings.side == 0


OWN: dict[str, Any] = {
    "size": {"shortest_edge": 1, "longest_edge": 2},
    "patch_size": 8,
    "resample": None,
    "fps": 2,
}


WRITTEN: dict[str, Any] = {
    "crop_size": None,
    "data_format": "channels_first",
    "default_to_square": True,
    "device": None,
    "do_center_crop": None,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_pad": None,
    "do_rescale": True,
    "do_resize": True,
    "do_sample_frames": True,
    "fps": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "input_data_format": None,
    "max_frames": 768,
    "max_pixels": None,
    "merge_size": 2,
    "min_frames": 4,
    "num_frames": None,
    "patch_size": 16,
    "processor_class": "Qwen3VLProcessor",
    "resample": 3,
    "rescale_factor": 1 / 255,
    "return_metadata": False,
    "size": {"longest_edge": 25165824, "shortest_edge": 4096},
    "temporal_patch_size": 2,
    "video_metadata": None,
    "video_processor_type": "Qwen3VLVideoProcessor",
}


class TestFiles:
    @pytest.mark.parametrize(
        ("files", "size"),
        [
            ({}, {"shortest_edge": 4000, "longest_edge": 40000}),
            ({"video_preprocessor_config.json": OWN}, OWN["size"]),
            ({"processor_config.json": {"video_processor": OWN}}, OWN["size"]),
            ({"processor_config.json": {"image_processor": {}}, "preprocessor_config.json": OWN}, OWN["size"]),
            (
                {"preprocessor_config.json": {**OWN, "max_pixels": 9}, "processor_config.json": {}},
                {"shortest_edge": 1, "longest_edge": 9},
            ),
        ],
    )
    def test_the_first_that_is_there_is_read(self, files: dict, size: dict[str, int], tmp_path: Path) -> None:
        for name, content in files.items():
            (tmp_path / name).write_text(json.dumps(content))
        settings = EACH.read(str(tmp_path))
        assert settings.size == size
        assert (settings.patch_size, settings.resample) == (8 if files else 14, 3)

    def test_all_that_transformers_writes_is_known(self, tmp_path: Path) -> None:
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(WRITTEN))
        settings = EACH.read(str(tmp_path))
        assert (settings.patch_size, settings.image_mean, settings.size) == (16, (0.5, 0.5, 0.5), WRITTEN["size"])

    @pytest.mark.parametrize(
        "name", ["video_preprocessor_config.json", "preprocessor_config.json", "processor_config.json"]
    )
    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"brand_new": 7}, " has brand_new=7: nothing reads it here"),
            ({"counts_all": True}, " has counts_all=True: nothing reads it here"),
            ({"do_center_crop": True}, " has do_center_crop=True: must be False"),
            ({"do_resize": False}, ": do_resize=False: must be True"),
            ({"size": {"height": 7}}, ": size has height=7"),
            ({"patch_size": "16"}, ": patch_size='16': must be an integer of at least 1"),
            ({"do_normalize": 2}, ": do_normalize=2: must be True or False"),
            ({"image_mean": [0.5, 0.5]}, r": image_mean=\[0.5, 0.5\]: must be a number, or one for each"),
            ({"resample": 9}, ": resample=9: must be an integer from 0 to 5"),
        ],
        ids=str,
    )
    def test_settings_that_nobody_knows(self, settings: dict, said: str, name: str, tmp_path: Path) -> None:
        nested = {"video_processor": settings} if name == "processor_config.json" else settings
        (tmp_path / name).write_text(json.dumps(nested))
        with pytest.raises(ValueError, match=f"{name}.*{said}"):
            EACH.read(str(tmp_path))


class TestPrompts:
    def test_qwen3_is_told_when_frames_are_seen(self, checkpoint: Callable[[str], Checkpoint]) -> None:
        """In the middle of two frames; the last one of an odd number is seen twice."""
        own = checkpoint("qwen3-vl")
        video = own.videos.prepare("video", (film(5, 64, 64), {"fps": 2}))
        seen = f"{BEGIN}{VIDEO * 4}{END}"
        assert video.text == f"<0.2 seconds>{seen}<1.2 seconds>{seen}<2.0 seconds>{seen}"
        assert (video.grid, video.count) == ((3, 4, 4), 12)
        assert [part.count for part in video.parts] == [4, 4, 4]

    def test_qwen2_5_places_frames_by_their_seconds(self, checkpoint: Callable[[str], Checkpoint]) -> None:
        """Two positions a second. The text behind a video begins at its largest row or column."""
        own = checkpoint("qwen2.5-vl")
        prompt = own.processor.prepare("prompt", f"a{VIDEO_PROMPT}b", [], videos=[(film(4, 84, 56), {"fps": 1})])
        start = prompt.spans[0].start
        assert [(span.start, span.count) for span in prompt.spans] == [(start, 6), (start + 6, 6)]
        count = len(prompt.token_ids)
        assert prompt.positions is not None
        seconds = prompt.positions[:count][start : start + 12].tolist()
        assert seconds == [start] * 6 + [start + 4] * 6
        assert prompt.positions[start + 12] == start + 3

    @each_class
    def test_tokens_of_texts_and_of_tokens(self, name: str, checkpoint: Callable[[str], Checkpoint]) -> None:
        """Images and videos come in the order of their own kind."""
        own = checkpoint(name)
        text = f"See {VIDEO_PROMPT}, {own.seeing.prompt} and {VIDEO_PROMPT}."
        images, videos = [picture(64, 64)], [film(2, 64, 64), film(4, 64, 90)]
        of_text = own.processor.prepare("prompt", text, images, videos=videos)
        ids = own.processor._tokenizer.encode(text)
        of_ids = own.processor.prepare("prompt", ids, images, videos=videos)
        assert (of_text.token_ids, of_text.spans, of_text.counts) == (of_ids.token_ids, of_ids.spans, of_ids.counts)
        assert [*of_text.counts] == ["video 0", "image 0", "video 1"]

    def test_keys_tell_frames_and_rates_apart(self, checkpoint: Callable[[str], Checkpoint]) -> None:
        prepare, frames = checkpoint("qwen2.5-vl").videos.prepare, film(4, 64, 64)

        def keys(*video: Any) -> list[bytes]:
            return [part.key for part in prepare("video", *video).parts]

        first = keys((frames, {"fps": 2}))
        assert keys((np.stack([np.asarray(frame) for frame in frames]), {"fps": 2})) == first
        assert keys(([*frames[2:], *frames[:2]], {"fps": 2})) == first[::-1]
        assert not {*keys((frames, {"fps": 1}))} & {*first}
        assert keys(([*frames[:3], frames[0]], {"fps": 2}))[1] != first[1]

    @each_class
    def test_pixels_are_made_when_they_are_read(self, name: str, checkpoint: Callable[[str], Checkpoint]) -> None:
        own = checkpoint(name)
        frames = np.zeros((4, 64, 64, 3), np.uint8)
        (_, second) = own.processor.prepare("prompt", VIDEO_PROMPT, [], videos=[frames]).pixels
        first = dict(second)
        assert bytes_of(second) == bytes_of(first)
        sent = pickle.loads(pickle.dumps(second))
        sent.load = processor_of(own.folder, own.config).load  # that of another process
        torch.testing.assert_close(dict(sent), first, atol=0, rtol=0)
        frames[3, 0, 0] ^= 1
        with pytest.raises(ValueError, match="frame 2 of video 0 of prompt, or one beside it, has changed since"):
            dict(second)

    @each_class
    def test_no_frames_have_more_tokens_at_once(self, name: str, checkpoint: Callable[[str], Checkpoint]) -> None:
        own = checkpoint(name)
        largest = own.videos.largest()
        for width, height in ((300, 200), (96, 192), (20, 400)):
            (part,) = own.videos.prepare("video", film(2, width, height)).parts
            assert part.count <= largest.count
        assert bytes_of(own.processor.largest()) == max(
            bytes_of(largest.pixels), own.processor.images.largest().num_bytes
        )

    @pytest.mark.parametrize(
        ("text", "videos", "message"),
        [
            ("none", [FRAMES], r"prompts\[3\] has 0 placeholders, '<video>', for 1 videos: must have one for each"),
            (f"{VIDEO} {VIDEO}", [FRAMES], "has 2 placeholders, '<video>', for 1 videos"),
            ([5, 6], [FRAMES], r"has 0 placeholders, token \d+, for 1 videos"),
            (f"{VIDEO}" * 3, [FRAMES] * 3, "has 3 videos: must have 1 to limit_videos_per_prompt=2"),
            (VIDEO, [[]], r"video 0 of prompts\[3\] has no frames"),
            (VIDEO, ["a.mp4"], r"video 0 of prompts\[3\] is 'a.mp4': no file of a video is decoded here"),
            (
                VIDEO,
                [[*film(3, 64, 64), picture(64, 60)]],
                r"frame 3 of video 0 of prompts\[3\] has 64 x 60 pixels: must have 64 x 64, as frame 0",
            ),
            (VIDEO, [[*FRAMES, b"no image"]], r"frame 3 of video 0 of prompts\[3\] cannot be read as an image"),
            (VIDEO, [film(1, 64, 64)], r"video 0 of prompts\[3\] has 1 frames of 64 x 64 pixels: must be at least 2"),
            (VIDEO, [film(2, 900, 4)], r"video 0 of prompts\[3\] has 2 frames of 900 x 4 pixels: must be at most 200"),
        ],
    )
    def test_errors_name_the_prompt_and_the_video(
        self, text: str | list[int], videos: list[Any], message: str, checkpoint: Callable[[str], Checkpoint]
    ) -> None:
        own = checkpoint("qwen3-vl")
        processor = processor_of(own.folder, own.config, most_videos=2)
        with pytest.raises(ValueError, match=message):
            processor.prepare("prompts[3]", text, [], videos=videos)

    def test_frames_too_far_apart_have_no_positions(self, checkpoint: Callable[[str], Checkpoint]) -> None:
        """Of models that place frames by their seconds: others are told of these."""
        video = film(4, 64, 64), {"fps": 0.01}
        with pytest.raises(ValueError, match=r"prompt has videos whose seconds reach \d+ positions past its 10 tokens"):
            checkpoint("qwen2.5-vl").processor.prepare("prompt", VIDEO_PROMPT, [], videos=[video])
        assert checkpoint("qwen3-vl").processor.prepare("prompt", VIDEO_PROMPT, [], videos=[video]).delta <= 0

    def test_no_video_is_let_in(self, checkpoint: Callable[[str], Checkpoint]) -> None:
        own = checkpoint("qwen3-vl")
        processor = processor_of(own.folder, own.config, most_videos=0)
        with pytest.raises(ValueError, match="prompt has 1 videos: must have limit_videos_per_prompt=0"):
            processor.prepare("prompt", VIDEO_PROMPT, [], videos=[FRAMES])


class TestClasses:
    def test_each_class_that_takes_videos_has_a_case(self) -> None:
        assert sorted({MULTIMODAL[SEEING[name].case].architecture for name in TAKING}) == sorted(CLASSES)

    @pytest.mark.parametrize("name", ["gemma3", "mistral3"])
    def test_others_are_refused(self, name: str, tmp_path: Path) -> None:
        seeing = SEEING[name]
        processor = processor_of(str(tmp_path), seeing.build(tmp_path).config)
        with pytest.raises(ValueError, match=r"prompt has 1 videos: must have images alone.*: of the .* are Qwen2VL"):
            processor.prepare("prompt", VIDEO, [], videos=[FRAMES])

    def test_a_tokenizer_without_the_token_takes_none(self, tmp_path: Path) -> None:
        config = SEEING["qwen3-vl"].build(tmp_path).config
        config.video_token_id = 2079
        assert processor_of(str(tmp_path), config).videos is None


class TestOptions:
    def test_sizes_and_rates_of_videos_alone(self, checkpoint: Callable[[str], Checkpoint]) -> None:
        own = checkpoint("qwen3-vl")
        options = {"max_pixels": 32 * 32, "fps": 4, "videos_kwargs": {"max_pixels": 2 * 64 * 64, "min_pixels": 1}}
        processor = processor_of(own.folder, own.config, options)
        assert processor.videos is not None
        video = processor.videos.prepare("video", film(2, 200, 200))
        assert (video.grid, video.interval) == ((1, 4, 4), 0.5)
        assert processor.images.prepare("image", picture(200, 200)).count == 1

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"fps": 0}, r"image_options\['fps'\]=0: must be a number from"),
            ({"videos_kwargs": 3}, r"image_options\['videos_kwargs'\]=3: must be a mapping, such as"),
            ({"videos_kwargs": {"size": 3}}, "has 'size': 3: those of videos are min_pixels, max_pixels"),
            ({"videos_kwargs": {"max_pixels": 0}}, r"\['max_pixels'\]=0: must be an integer of at least 1"),
        ],
    )
    def test_what_cannot_be(self, options: dict, message: str, checkpoint: Callable[[str], Checkpoint]) -> None:
        own = checkpoint("qwen3-vl")
        with pytest.raises(ValueError, match=message):
            processor_of(own.folder, own.config, options)

    def test_other_models_have_none(self, tmp_path: Path) -> None:
        config = SEEING["gemma3"].build(tmp_path).config
        with pytest.raises(ValueError, match=r"image_options has 'fps': 2: this model's are do_pan_and_scan, size"):
            processor_of(str(tmp_path), config, {"fps": 2})


@pytest.mark.skipif(not is_torchvision_available(), reason="transformers' video processors need torchvision")
@each_class
@pytest.mark.parametrize("cap", [False, True])
def test_transformers_own_processor_makes_the_same(
    name: str, cap: bool, checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    """But for the last digits of resized pixels."""
    own = checkpoint(name)
    images = own.seeing.make_processor()
    kind = "Qwen2VLVideoProcessor" if "qwen2" in name else "Qwen3VLVideoProcessor"
    videos = getattr(transformers, kind)(**VIDEO_SETTINGS, cap_pixels_per_frame=cap)
    images.image_processor.save_pretrained(tmp_path)
    videos.save_pretrained(tmp_path)
    images.tokenizer.save_pretrained(tmp_path)
    oracle = type(images)(images.image_processor, images.tokenizer, videos)
    ours = processor_of(str(tmp_path), own.config)
    assert ours.videos is not None
    for count, width, height, fps in ((2, 61, 97, 24), (5, 150, 40, 2), (3, 20, 30, 29.97), (4, 64, 64, 1)):
        frames = [
            np.asarray(Image.fromarray(np.asarray(frame)[::9, ::9]).resize((width, height)))
            for frame in film(count, width, height)
        ]
        metadata = {"fps": fps, "total_num_frames": count, "frames_indices": [*range(count)]}
        how = {"do_sample_frames": False, "video_metadata": [metadata], "input_data_format": "channels_last"}
        theirs = oracle(text=f"See {VIDEO_PROMPT}.", videos=[np.stack(frames)], return_tensors="pt", **how)
        prompt = ours.prepare("prompt", f"See {VIDEO_PROMPT}.", [], videos=[(frames, {"fps": fps})])
        assert prompt.token_ids == theirs["input_ids"][0].tolist()
        video = ours.videos.prepare("video", (frames, {"fps": fps}))
        assert [[*video.grid]] == theirs["video_grid_thw"].tolist()
        if "second_per_grid_ts" in theirs:
            assert video.interval == pytest.approx(float(theirs["second_per_grid_ts"][0]))
        pixels = torch.cat([part.pixels["pixel_values"] for part in video.parts])
        torch.testing.assert_close(pixels, theirs["pixel_values_videos"], atol=0.05, rtol=0)
