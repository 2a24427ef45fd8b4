"""Compares prompts with videos with transformers: greedy tokens and log-probabilities, in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import whole_only

pytest.importorskip("PIL")

from cases.pictures import film, picture
from cases.vision import SEEING, VIDEO_PROMPT
from test_prompts_with_images import Checkpoint as SeeingCheckpoint
from test_prompts_with_images import check, generate, text, watch
from transformers import AutoTokenizer

from nanoinfer import LLM
from nanoinfer.engine.sequence import Sequence
from nanoinfer.media.messages import Media
from nanoinfer.media.pixels import PixelsOnDemand
from nanoinfer.media.spans import MediaPrompt

IMAGE_TYPE, VIDEO_TYPE = 1, 2  # transformers' numbers of placeholders
LONG, FLAT, TWO = film(5, 61, 97), film(4, 150, 40, 1), film(2, 64, 64, 2)  # frames: an odd number, too
SLOW = (FLAT, {"fps": 2})


class Checkpoint(SeeingCheckpoint):
    """One that takes videos."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        self._video: list[int] = AutoTokenizer.from_pretrained(folder).encode(VIDEO_PROMPT)

    def with_videos(self, *parts: Any) -> MediaPrompt:
        """Put a prompt of text, images and videos together."""
        tokens, media = list[int](), Media([], [])
        for part in parts:
            if isinstance(part, list) and isinstance(part[0], int):
                tokens += part
            elif isinstance(part, (list, tuple)):
                tokens += self._video
                media = Media(media.images, [*media.videos, part])
            else:
                tokens += self._image
                media = Media([*media.images, part], media.videos)
        return self.processor.prepare("prompt", tokens, media.images, videos=media.videos)

    def prompts(self) -> list[MediaPrompt]:
        """One video or several, beside images, some of them twice."""
        image = picture(61, 97)
        mixtures = (
            [text(5, 0), LONG, text(9, 1)],
            [SLOW, text(20, 2)],
            [text(30, 3), image, text(1, 4), TWO, text(3, 5), LONG, text(2, 9)],
            [text(17, 6), LONG, text(1, 7), image, text(2, 8), SLOW, text(1, 7), image, text(4, 9)],
        )
        return [self.with_videos(*parts) for parts in mixtures]

    @torch.inference_mode()
    def logprobs(self, prompt: MediaPrompt, generated: list[int]) -> torch.Tensor:
        """Return transformers' log-probabilities after each token, [tokens, vocabulary]."""
        types = torch.zeros(1, len(prompt.token_ids) + len(generated), dtype=torch.int64)
        inputs: dict[str, list[torch.Tensor]] = {}
        for (name, _), parts in self._by_medium(prompt):
            is_video = name.startswith("video")
            for span, pixels in parts:
                types[0, span.start : span.start + span.count] = VIDEO_TYPE if is_video else IMAGE_TYPE
                inputs.setdefault("pixel_values_videos" if is_video else "pixel_values", []).append(
                    pixels["pixel_values"]
                )
            grid = parts[0][1]["image_grid_thw"].clone()
            grid[0, 0] = len(parts)
            inputs.setdefault("video_grid_thw" if is_video else "image_grid_thw", []).append(grid)
            if is_video and "qwen2.5" in self.case.model_type.replace("2_5", "2.5"):
                interval = parts[0][1]._source.given.interval
                inputs.setdefault("second_per_grid_ts", []).append(torch.tensor([interval]))
        joined = {name: torch.cat(own) for name, own in inputs.items()}
        tokens = torch.tensor([[*prompt.token_ids, *generated]])
        return self.model(input_ids=tokens, mm_token_type_ids=types, **joined).logits[0].float().log_softmax(dim=-1)

    @staticmethod
    def _by_medium(prompt: MediaPrompt) -> list[tuple[tuple[str, int], list[tuple[Any, PixelsOnDemand]]]]:
        """Each image and each video of a prompt, with its spans and their pixels."""
        owners = [medium for medium in prompt.counts.items() for _ in range(medium[1])]
        done, owned = 0, []
        for span, pixels in zip(prompt.spans, prompt.pixels, strict=True):
            assert isinstance(pixels, PixelsOnDemand)
            owned.append((owners[done], (span, pixels)))
            done += span.count
        return [(medium, [own for _, own in group]) for medium, group in groupby(owned, lambda entry: entry[0])]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Return a function that makes a case's checkpoint, once each."""
    return functools.cache(lambda name: Checkpoint(name, tmp_path_factory.mktemp("seeing")))


def run(llm: LLM, checkpoint: Checkpoint, **settings: object) -> list[Sequence]:
    """Generate from the checkpoint's prompts, check the results, and return the sequences."""
    prompts = checkpoint.prompts()
    seqs = [seq for (seq,) in generate(llm, checkpoint, prompts, **settings)]
    for seq, prompt in zip(seqs, prompts, strict=True):
        check(seq, prompt, checkpoint)
    return seqs


TAKING = [name for name, seeing in SEEING.items() if seeing.takes_videos]
OF_KINDS = ["qwen2.5-vl", "qwen3-vl", "qwen3.5"]


@pytest.mark.parametrize("name", [*OF_KINDS, *whole_only(name for name in TAKING if name not in OF_KINDS)])
def test_videos_equal_transformers(
    name: str, checkpoint: Callable[[str], Checkpoint], make_llm: Callable[..., LLM]
) -> None:
    """Prompts are fresh, then prefix-cached, then in chunks that cut videos."""
    own = checkpoint(name)
    llm = make_llm(own.folder, **own.case.small)
    run(llm, own, prompt_logprobs=0)
    assert sum(seq.num_cached_tokens for seq in run(llm, own)) > 0
    run(make_llm(own.folder, **own.case.small, max_num_batched_tokens=64 if own.case.keeps_states else 19), own)


@pytest.mark.usefixtures("no_foresight")
@pytest.mark.parametrize("name", ["qwen3-vl", *whole_only(["qwen2.5-vl"])])
def test_samples_and_preemption(
    name: str, checkpoint: Callable[[str], Checkpoint], make_llm: Callable[..., LLM]
) -> None:
    own = checkpoint(name)
    llm = make_llm(own.folder, **own.case.small, num_kvcache_blocks=28)
    prompts = own.prompts()
    for seqs, prompt in zip(generate(llm, own, prompts, max_tokens=40, n=2), prompts, strict=True):
        for seq in seqs:
            check(seq, prompt, own)
    assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("name", ["qwen2.5-vl", *whole_only(name for name in TAKING if name != "qwen2.5-vl")])
def test_two_ranks(name: str, checkpoint: Callable[[str], Checkpoint], make_llm: Callable[..., LLM]) -> None:
    own = checkpoint(name)
    run(make_llm(own.folder, device="cpu", tensor_parallel_size=2, **own.case.small), own)


def test_videos_that_begin_alike_share_blocks_and_embeddings(
    checkpoint: Callable[[str], Checkpoint], make_llm: Callable[..., LLM]
) -> None:
    """As far as their frames are the same, and are seen at the same seconds."""
    own = checkpoint("qwen2.5-vl")
    llm = make_llm(own.folder, **own.case.small)
    tower, before = watch(llm), text(20, 0)
    frames = film(6, 112, 112)
    other_end = [*frames[:4], *film(2, 112, 112, 9)]
    for video, cached, encoded in (
        (frames, 0, 3),
        (frames, 64, 0),
        (other_end, 48, 1),
        ((frames, {"fps": 6}), 16, 3),
    ):
        tower.counts.clear()
        prompt = own.with_videos(before, video, text(5, 1))
        ((seq,),) = generate(llm, own, [prompt])
        check(seq, prompt, own)
        assert (seq.num_cached_tokens, sum(tower.counts)) == (cached, encoded)


def test_a_changed_frame_ends_its_request_alone(
    checkpoint: Callable[[str], Checkpoint], make_llm: Callable[..., LLM]
) -> None:
    own = checkpoint("qwen3-vl")
    llm = make_llm(own.folder, **own.case.small)
    good, frames = own.prompts()[0], torch.zeros(4, 64, 64, 3, dtype=torch.uint8).numpy()
    bad = own.with_videos(([*frames], {"fps": 2}), text(5, 0))
    frames[2, 0, 0] ^= 1
    (fine,), (faulty,) = generate(llm, own, [good, bad])
    check(fine, good, own)
    assert (faulty.finish_reason, faulty.num_output_tokens) == ("error", 0)
    assert "frame 2 of video 0 of prompt, or one beside it, has changed" in str(faulty.stop_reason)
