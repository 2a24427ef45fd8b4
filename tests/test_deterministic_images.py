"""With deterministic=True, what a tower makes of an image, of frames or of a sound has the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("PIL")

from cases import MULTIMODAL
from cases.pictures import film, picture
from cases.sounds import PROMPT, RATE, build_hearing, sound
from cases.vision import SEEING, VIDEO_PROMPT, processor_of
from conftest import of_each_kind

from nanoinfer import LLM, SamplingParams
from nanoinfer.benchmark.determinism import bits_of
from nanoinfer.media.tower.tower import TransformersTower

OPTIONS = {"device": "cpu", "dtype": "float32", "deterministic": True, "num_kvcache_blocks": 40}
ONE, TWO, THREE = picture(61, 97), picture(150, 40, 1), picture(33, 57, 2)
NAMES = ["qwen3-vl", "mistral3", "qwen3.5", "internvl", "qwen2.5-vl", "minicpm-v4.6", "smolvlm"]


def seen(prompt: str, *images: Any) -> dict[str, Any]:
    return {"prompt": f"Is {' or '.join([prompt] * len(images))}?", "multi_modal_data": {"image": list(images)}}


def params(count: int) -> list[SamplingParams]:
    """Some want what makes the head compute many tokens at once."""
    how = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0}
    return [
        SamplingParams(seed=i, max_tokens=3 + i, prompt_logprobs=[None, 1][i % 2], **how)  # type: ignore[arg-type]
        for i in range(count)
    ]


def assert_alike(make: Callable[..., LLM], prompts: list[Any], **tight: Any) -> None:
    """Check that prompts have the same bits alone and together, where all images are new at once."""
    how, alone = params(len(prompts)), make()
    wanted = [
        bits_of(alone.generate([prompt], own, use_tqdm=False)[0]) for prompt, own in zip(prompts, how, strict=True)
    ]
    for options in ({}, tight):
        outputs = make(**options).generate(prompts[::-1], how[::-1], use_tqdm=False)
        assert [bits_of(output) for output in outputs][::-1] == wanted


@pytest.mark.parametrize("name", of_each_kind(NAMES, 0, 1))
def test_images_and_videos_beside_others(name: str, tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    """Chunks cut some of them."""
    seeing = SEEING[name]
    seeing.build(tmp_path)
    small = MULTIMODAL[seeing.case].small
    prompts: list[Any] = [
        seen(seeing.prompt, ONE),
        seen(seeing.prompt, TWO, ONE),
        "But, soft!",
        seen(seeing.prompt, THREE),
    ]
    if seeing.takes_videos:
        video = film(4, 64, 64), {"fps": 2}
        prompts.append({"prompt": VIDEO_PROMPT, "multi_modal_data": {"video": [video]}})

    def make(**options: Any) -> LLM:
        return make_llm(str(tmp_path), **{**OPTIONS, **small, "images": True, **options})

    assert_alike(make, prompts, max_num_batched_tokens=64)


@pytest.mark.parametrize("name", ["mistral3", "qwen3-vl"])
def test_the_largest_batch_is_one_image(name: str, tmp_path: Path) -> None:
    """A GPU's memory is planned for it."""
    config = SEEING[name].build(tmp_path).config
    tower = TransformersTower(config, torch.float32, torch.device("cpu"), batch_bytes=0)
    image, *_ = processor_of(str(tmp_path), config).prepare("prompt", SEEING[name].prompt, [ONE]).pixels
    assert len(tower.try_largest(dict(image))) == 1


def test_sounds_beside_others(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    build_hearing(tmp_path)
    sounds = [[sound(3000 + 4000 * i, i), sound(9000, 7)][: 1 + i % 2] for i in range(3)]
    prompts: list[Any] = [
        {"prompt": f"Hear {PROMPT * len(own)}", "multi_modal_data": {"audio": [(one, RATE) for one in own]}}
        for own in sounds
    ]

    def make(**options: Any) -> LLM:
        return make_llm(str(tmp_path), **OPTIONS, max_model_len=256, **options)

    assert_alike(make, [*prompts, "But, soft!"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_images_beside_others_on_a_gpu(name: str, tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    """Blocks are few, so that prompts are preempted. States have no order on a GPU yet."""
    seeing = SEEING[name]
    if MULTIMODAL[seeing.case].keeps_states:
        pytest.skip("layers keep states")
    seeing.build(tmp_path)
    images = [picture(40 + 17 * i, 150 - 11 * i, i) for i in range(8)]
    prompts = [seen(seeing.prompt, *images[i : i + 1 + i % 3]) for i in range(8)]

    def make(**options: Any) -> LLM:
        how = {"device": "cuda", "dtype": "bfloat16", "max_model_len": 320, "kvcache_block_size": 16, "images": True}
        return make_llm(str(tmp_path), **{**OPTIONS, **how, **options})

    assert_alike(make, ["But, soft!", *prompts], max_num_batched_tokens=64, num_kvcache_blocks=25)
