"""The files by which published checkpoints say how images are processed, old and new ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")

from cases.pictures import picture
from cases.vision import SEEING, processor_of

PREPROCESSOR, PROCESSOR, VIDEO = "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"
MEAN = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
QWEN = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, **MEAN}
PIXELS = {"min_pixels": 56 * 56, "max_pixels": 112 * 112}
QWEN3 = {
    **QWEN,
    "processor_class": "Qwen3VLProcessor",
    "patch_size": 16,
    "size": {"longest_edge": 128 * 128, "shortest_edge": 64 * 64},
}
GEMMA3 = {
    **MEAN,
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_pan_and_scan": None,
    "do_rescale": True,
    "do_resize": True,
    "image_processor_type": "Gemma3ImageProcessor",
    "image_seq_length": 4,
    "pan_and_scan_max_num_crops": None,
    "pan_and_scan_min_crop_size": None,
    "pan_and_scan_min_ratio_to_activate": None,
    "processor_class": "Gemma3Processor",
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 56, "width": 56},
}
GEMMA4 = {
    "do_convert_rgb": True,
    "do_normalize": False,
    "do_rescale": True,
    "do_resize": True,
    "image_processor_type": "Gemma4ImageProcessor",
    "image_seq_length": 280,
    "max_soft_tokens": 70,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "resample": 3,
}
PIXTRAL = {
    "do_convert_rgb": True,
    "do_resize": True,
    "image_processor_type": "PixtralImageProcessorFast",
    "patch_size": {"height": 14, "width": 14},
    "processor_class": "PixtralProcessor",
    "size": {"longest_edge": 140},
}
TOKENS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}

FORMS: dict[str, tuple[str, dict[str, Any], int]] = {  # of a class: files, the tokens of a square image
    "pixels, an old name": (
        "qwen2-vl",
        {
            PREPROCESSOR: {**QWEN, **PIXELS, "image_processor_type": "Qwen2VLImageProcessor"},
        },
        16,
    ),
    "pixels beside a size": (
        "qwen2.5-vl",
        {
            PREPROCESSOR: {
                **QWEN,
                **PIXELS,
                "size": {"shortest_edge": 9, "longest_edge": 10**9},
                "image_processor_type": "Qwen2_5_VLImageProcessor",  # which transformers does not know any more
                "processor_class": "Qwen2_5_VLProcessor",
            }
        },
        16,
    ),
    "edges, beside videos": (
        "qwen3-vl",
        {
            PREPROCESSOR: {**QWEN3, "image_processor_type": "Qwen2VLImageProcessorFast"},
            VIDEO: {**QWEN3, "video_processor_type": "Qwen3VLVideoProcessor"},
        },
        16,
    ),
    "no type": ("qwen3.5", {PREPROCESSOR: {**QWEN3}}, 16),
    "nulls": ("gemma3", {PREPROCESSOR: GEMMA3, PROCESSOR: {"image_seq_length": 4}}, 4),
    "one file": (
        "gemma4",
        {PROCESSOR: {"image_processor": GEMMA4, "image_seq_length": 280, "processor_class": "Gemma4Processor"}},
        64,
    ),
    "one file, unified": (
        "gemma4 unified",
        {
            PROCESSOR: {
                "image_processor": {**GEMMA4, "patch_size": 4, "image_processor_type": "Gemma4UnifiedImageProcessor"}
            }
        },
        64,
    ),
    "two files": (
        "mistral3",
        {
            PREPROCESSOR: PIXTRAL,
            PROCESSOR: {**TOKENS, "patch_size": 14, "spatial_merge_size": 2, "processor_class": "PixtralProcessor"},
        },
        25,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_published_files_say_how_images_are_processed(form: str, tmp_path: Path) -> None:
    name, files, count = FORMS[form]
    seeing = SEEING[name]
    config = seeing.build(tmp_path).config
    (tmp_path / PREPROCESSOR).unlink()
    for file, content in files.items():
        (tmp_path / file).write_text(json.dumps(content))
    processor = processor_of(str(tmp_path), config)
    prompt = processor.prepare("prompt", seeing.prompt, [picture(200, 200)])
    assert sum(span.count for span in prompt.spans) == count
    assert processor.images.largest().count >= count


@pytest.mark.parametrize(
    ("form", "settings", "said"),
    [
        ("no type", {"brand_new": 7}, " has brand_new=7: nothing reads it here"),
        ("nulls", {"image_seq_length": 256}, " has image_seq_length=256: must be 4"),
        ("two files", {"spatial_merge_size": 1}, " has spatial_merge_size=1: must be 2"),
        ("two files", {"image_break_token": "|"}, r" has image_break_token='\|': must be '\[IMG_BREAK\]'"),
    ],
)
def test_settings_by_which_a_prompt_would_be_another(
    form: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    name, files, _ = FORMS[form]
    config = SEEING[name].build(tmp_path).config
    for file, content in {PROCESSOR: {}, **files}.items():
        (tmp_path / file).write_text(json.dumps({**content, **settings} if file == PROCESSOR else content))
    with pytest.raises(ValueError, match=f"{PROCESSOR}{said}"):
        processor_of(str(tmp_path), config)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("granite-docling", {"fine_route": True}, "fine_route=True: must be False"),
        ("minicpm-v4.6", {"downsample_mode": "4x"}, "downsample_mode='4x': must be '16x'"),
        ("minicpm-v4.6", {"use_image_id": False}, "use_image_id=False: must be True"),
    ],
)
def test_settings_of_an_image_processor_that_cannot_be(
    name: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config, file = SEEING[name].build(tmp_path).config, tmp_path / PREPROCESSOR
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    with pytest.raises(ValueError, match=f"{PREPROCESSOR} has {said}"):
        processor_of(str(tmp_path), config)
