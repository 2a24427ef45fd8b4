"""What callers write of videos, in chats and beside prompts, compared with transformers."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import greedy, whole_only

pytest.importorskip("PIL")

from cases.pictures import film, picture
from cases.vision import IMAGE, SEEING, VIDEO, VIDEO_PROMPT
from test_asking_with_images import url, user, written
from test_prompts_with_videos import Checkpoint as TakingVideos

from nanoinfer import LLM, RequestOutput, SamplingParams, batch

MAX_TOKENS = 5
FILM, OTHER, ONE = film(4, 61, 97), film(3, 120, 40, 1), picture(61, 97)
ARRAY = np.stack([np.asarray(frame) for frame in FILM])
FPS = 2


class Checkpoint(TakingVideos):
    """One with an LLM, whose texts have one image or video after another."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        self.llm = self.make_llm()

    def make_llm(self, **options: Any) -> LLM:
        return LLM(self.folder, device="cpu", **{**self.case.small, **options})

    def params(self, **settings: Any) -> SamplingParams:
        banned = dict.fromkeys(self.placeholders, -100)
        return greedy(**{"max_tokens": MAX_TOKENS, "ignore_eos": True, "logit_bias": banned, **settings})

    def expected(self, text: str, *videos: Any, images: tuple[Any, ...] = ()) -> tuple[list[int], list[int]]:
        """Return a prompt's tokens, and those that transformers finds likeliest behind it."""
        prompt, generated = self.processor.prepare("prompt", text, images, videos=videos), list[int]()
        for _ in range(MAX_TOKENS):
            row = self.logprobs(prompt, generated)[-1]
            generated.append(int(row.index_fill(0, torch.tensor(self.placeholders), -torch.inf).argmax()))
        return prompt.token_ids, generated


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Return a function that makes a case's checkpoint, once each."""
    return functools.cache(lambda name: Checkpoint(name, tmp_path_factory.mktemp("seeing")))


@pytest.fixture(scope="module")
def qwen(checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoint("qwen3-vl")


def tokens(output: RequestOutput) -> tuple[list[int], list[int]]:
    return output.prompt_token_ids, output.token_ids


def part(video: Any, **beside: Any) -> dict[str, Any]:
    return {"type": "video", "video": video, **beside}


@pytest.mark.parametrize("name", ["qwen3-vl", *whole_only(["qwen2.5-vl", "qwen3.5"])])
def test_chats(name: str, checkpoint: Callable[[str], Checkpoint]) -> None:
    """One video, several, and an image between them."""
    own = checkpoint(name)
    image = own._seeing.prompt
    chats = [[user(part(FILM, fps=FPS), "What is it?")], [user(part(OTHER), " or ", ONE, " or ", part(ARRAY, fps=FPS))]]
    given = repr(chats)
    outputs = own.llm.chat(chats, own.params(), use_tqdm=False)
    assert repr(chats) == given
    assert [tokens(output) for output in outputs] == [
        own.expected(f"user:{VIDEO_PROMPT}What is it?", (FILM, {"fps": FPS})),
        own.expected(f"user:{VIDEO_PROMPT} or {image} or {VIDEO_PROMPT}", OTHER, (ARRAY, {"fps": FPS}), images=(ONE,)),
    ]


def test_prompts(qwen: Checkpoint) -> None:
    """As vLLM's callers write them."""
    one, two = f"See {VIDEO_PROMPT}.", f"See {VIDEO_PROMPT} and {IMAGE} and {VIDEO_PROMPT}."
    metadata = {"fps": 30.0, "total_num_frames": 60, "frames_indices": [0, 15, 30, 45], "do_sample_frames": False}
    ids = qwen.processor._tokenizer.encode(two)
    beside = {"image": ONE, "video": [FILM, OTHER]}
    prompts = [
        {"prompt": one, "multi_modal_data": {"video": ARRAY}, "mm_processor_kwargs": {"fps": FPS}},
        {"prompt": one, "multi_modal_data": {"video": [FILM]}, "mm_processor_kwargs": {"fps": [FPS]}},
        {"prompt": one, "multi_modal_data": {"video": [(ARRAY, metadata)]}},
        {
            "prompt": two,
            "multi_modal_data": beside,
            "mm_processor_kwargs": {"fps": [FPS, 1], "do_sample_frames": False},
        },
        {"prompt_token_ids": ids, "multi_modal_data": beside, "mm_processor_kwargs": {"fps": [FPS, 1]}},
        {"prompt": "But, soft!", "multi_modal_data": {"image": [], "video": []}},
    ]
    outputs = qwen.llm.generate(prompts, qwen.params(), use_tqdm=False)
    first = qwen.expected(one, (FILM, {"fps": FPS}))
    second = qwen.expected(two, (FILM, {"fps": FPS}), (OTHER, {"fps": 1}), images=(ONE,))
    assert [tokens(output) for output in outputs[:5]] == [first, first, first, second, second]
    assert outputs[0].prompt == one


def test_an_option_says_frames_per_second(qwen: Checkpoint) -> None:
    """Of videos that do not say their own."""
    prompts = [{"prompt": VIDEO_PROMPT, "multi_modal_data": {"video": video}} for video in (FILM, (FILM, {"fps": 4}))]
    for option in ({"image_options": {"fps": FPS}}, {"mm_processor_kwargs": {"fps": FPS}}):
        with qwen.make_llm(**option) as llm:
            outputs = llm.generate(prompts, qwen.params(), use_tqdm=False)
        assert [tokens(output) for output in outputs] == [
            qwen.expected(VIDEO_PROMPT, (FILM, {"fps": fps})) for fps in (FPS, 4)
        ]


def test_scores_open_a_video_once(qwen: Checkpoint) -> None:
    given, rest = f"See {VIDEO_PROMPT}:", [" it is noise", " nothing"]
    prompt = qwen.processor.prepare("prompt", given, [], videos=[(FILM, {"fps": FPS})])
    scores = qwen.llm.score({"prompt": given, "multi_modal_data": {"video": (FILM, {"fps": FPS})}}, rest)
    for score, text in zip(scores, rest, strict=True):
        ids = qwen.processor._tokenizer.encode(text)
        rows = qwen.logprobs(prompt, ids)[len(prompt.token_ids) - 1 : -1]
        expected = rows[range(len(ids)), ids].tolist()
        assert [float(value) for value in score.logprobs] == pytest.approx(expected, abs=1e-4)


def test_replicas(qwen: Checkpoint) -> None:
    """Frames cross to them, and pixels are made there."""
    chats = [[user(part(video, fps=FPS), f"{index}?")] for index, video in enumerate((FILM, ARRAY, OTHER))]
    with qwen.make_llm(data_parallel_size=2) as llm:
        outputs = llm.chat(chats, qwen.params(), use_tqdm=False)
    assert [tokens(output) for output in outputs] == [
        qwen.expected(f"user:{VIDEO_PROMPT}{index}?", (video, {"fps": FPS}))
        for index, video in enumerate((FILM, FILM, OTHER))
    ]


def test_batch_files(qwen: Checkpoint, tmp_path: Path) -> None:
    """Frames by data: URLs and by files in the folder."""
    for index, frame in enumerate(FILM):
        (tmp_path / f"{index}.png").write_bytes(written(frame))
    paths, urls, text = [f"{index}.png" for index in range(4)], [*map(url, FILM)], f"See {VIDEO_PROMPT}."
    chat = {"messages": [user(part(urls, fps=FPS), "?")]}
    lines: list[dict[str, Any]] = [
        {"custom_id": "openai", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"id": "chat", "messages": [user(part(paths, fps=FPS), "?")]},
        {"id": "paths", "prompt": text, "video": paths},
        {"id": "pair", "prompt": text, "video": [paths, {"fps": FPS}]},
        {"id": "file", "prompt": text, "video": "0.mp4"},
        {"id": "both", "messages": [user("?")], "video": paths},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {
        name: getattr(qwen.params(), name) for name in ("temperature", "max_tokens", "ignore_eos", "logit_bias")
    }
    options = {"device": "cpu", "image_folder": str(tmp_path), "keep_order": True, **qwen.case.small, **settings}
    summary = batch.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", qwen.folder, **options)
    assert (summary.done, summary.errors) == (4, 2)
    openai, *rows, file, both = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    chatted = qwen.expected(f"user:{VIDEO_PROMPT}?", (FILM, {"fps": FPS}))
    assert openai["response"]["body"]["usage"]["prompt_tokens"] == len(chatted[0])
    assert [row["token_ids"] for row in rows] == [
        chatted[1],
        qwen.expected(text, FILM)[1],
        qwen.expected(text, (FILM, {"fps": FPS}))[1],
    ]
    assert file["error"]["message"].startswith("video 0 of prompt['prompt'] is '0.mp4': no file of a video is decoded")
    assert both["error"]["message"].startswith("has 'video' beside 'messages'")


def test_columns_of_ray_data(qwen: Checkpoint) -> None:
    pytest.importorskip("ray.data")
    import pyarrow as pa

    from nanoinfer.integrations.ray_data import Generator

    text, frames = f"See {VIDEO_PROMPT}.", [*map(written, FILM)]
    tables = [
        pa.Table.from_pylist([{"prompt": text, "video": frames}, {"prompt": "But, soft!", "video": None}]),
        pa.Table.from_pylist([{"prompt": f"{text}{text}", "video": [frames, [*map(written, OTHER)]]}]),
        pa.Table.from_pylist([{"messages": [user(part(frames, fps=2.0), "?")]}]),
    ]
    expected = [
        [qwen.expected(text, FILM)[1]],
        [qwen.expected(f"{text}{text}", FILM, OTHER)[1]],
        [qwen.expected(f"user:{VIDEO_PROMPT}?", (FILM, {"fps": FPS}))[1]],
    ]
    generator = Generator(qwen.folder, vars(qwen.params()), device="cpu", **qwen.case.small)

    async def make(table: pa.Table) -> list[dict[str, Any]]:
        return (await anext(generator(table))).to_pylist()

    for table, (wanted,) in zip(tables, expected, strict=True):
        row, *_ = asyncio.run(make(table))
        assert (row["error"], row["token_ids"]) == (None, wanted)


class TestErrors:
    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            (
                {"prompt": f"{VIDEO} {VIDEO}", "multi_modal_data": {"video": [FILM]}},
                r"prompts\[1\]\['prompt'\] has 2 placeholders, '<video>', for 1 videos: must have one for each",
            ),
            (f"{VIDEO}?", r"prompts\[1\] has 1 placeholders, '<video>', and no video: must not"),
            (
                {"prompt": VIDEO, "multi_modal_data": {"video": "a.mp4"}},
                r"video 0 of prompts\[1\]\['prompt'\] is 'a.mp4': no file of a video is decoded here",
            ),
            (
                {"prompt": VIDEO, "multi_modal_data": {"video": FILM}, "mm_processor_kwargs": {"fps": [1, 2]}},
                r"prompts\[1\]\['mm_processor_kwargs'\] has fps=\[1, 2\]: must have one for each of 1 videos",
            ),
            (
                {"prompt": VIDEO, "multi_modal_data": {"video": FILM}, "mm_processor_kwargs": {"fps": -1}},
                r"video 0 of prompts\[1\]\['prompt'\] has fps=-1: must be a number from",
            ),
            (
                {"prompt": VIDEO, "multi_modal_data": {"video": [FILM[:1]]}},
                r"video 0 of prompts\[1\]\['prompt'\] has 1 frames of 61 x 97 pixels: must be at least 2 frames",
            ),
        ],
        ids=["placeholders", "no video", "a file", "rates", "a rate", "a frame"],
    )
    def test_prompts(self, prompt: Any, message: str, qwen: Checkpoint) -> None:
        with pytest.raises(ValueError, match=message):
            qwen.llm.generate(["Who?", prompt], qwen.params())
        assert not qwen.llm.has_unfinished_requests()

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (part([]), r"video 0 of messages\[1\] has no frames: must be a list of frames"),
            ({"type": "video"}, r"messages\[1\]\[0\] has the part .*: must have a video under 'video'"),
            (part("/etc/a.mp4"), r"video 0 of messages\[1\] is '/etc/a.mp4': no file of a video is decoded here"),
            (part(["/etc/a.png", "/etc/b.png"]), r"frame 0 of video 0 of messages\[1\] is '/etc/a.png': no file is"),
        ],
        ids=["no frames", "no video", "a file", "paths"],
    )
    def test_chats(self, content: dict[str, Any], message: str, qwen: Checkpoint) -> None:
        with pytest.raises(ValueError, match=message):
            qwen.llm.chat([[user("Who?")], [user(content)]], qwen.params())

    def test_videos_that_do_not_fit(self, qwen: Checkpoint) -> None:
        prompt = {"prompt": f"{IMAGE} {VIDEO_PROMPT}", "multi_modal_data": {"image": ONE, "video": FILM}}
        with qwen.make_llm(max_model_len=32) as llm, pytest.raises(ValueError) as caught:
            llm.generate([prompt], qwen.params())
        wanted = (
            r"prompts\[0\]\['prompt'\] has \d+ tokens, of which video 0 has 12: must be fewer than max_model_len=32"
        )
        assert re.match(wanted, str(caught.value))
        assert "image_options can make images and videos smaller" in str(caught.value)

    def test_limits(self, qwen: Checkpoint) -> None:
        with qwen.make_llm(limit_mm_per_prompt={"image": 0, "video": 1}) as llm:
            with pytest.raises(ValueError, match=r"has 2 videos: must have 1 to limit_videos_per_prompt=1"):
                llm.chat([user(part(FILM), part(FILM))])
            with pytest.raises(ValueError, match=r"has 1 images: must have limit_images_per_prompt=0"):
                llm.chat([user(ONE)])

    @pytest.mark.parametrize("name", ["gemma3", *whole_only(["mistral3"])])
    def test_classes_that_take_none(self, name: str, tmp_path: Path) -> None:
        SEEING[name].build(tmp_path)
        wanted = "has 1 videos: must have images alone, such as their frames: .* those that take videos are Qwen2VL"
        with LLM(str(tmp_path), device="cpu", max_model_len=256) as llm:
            for ask, given in (
                (llm.chat, [user(part(FILM))]),
                (llm.generate, {"prompt": "?", "multi_modal_data": {"video": FILM}}),
                (llm.score, {"prompt": "?", "multi_modal_data": {"video": FILM}}),
            ):
                with pytest.raises(ValueError, match=wanted):
                    ask(given, *(["!"] if ask == llm.score else []))
