"""What bench.py needs of models that see: published shapes of towers, files beside a config.json, images."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoinfer.hub import BUNDLED_MODEL

if TYPE_CHECKING:
    from PIL.Image import Image

BEGIN, END, IMAGE = 151652, 151653, 151655  # tokens of Qwen3-VL: before an image, behind it, and in its place
VIDEO = 151656  # in a video's place
NAMES = {BEGIN: "<|vision_start|>", END: "<|vision_end|>", IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>"}
SIDE = 1024  # of an image in pixels
TOKENS = (SIDE // 32) ** 2  # of an image: one for 2 x 2 patches of 16 x 16 pixels
TEXT = {
    "model_type": "qwen3_vl_text", "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
    },
}  # fmt: skip
TOWER_FIELDS = ("hidden_size", "intermediate_size", "depth", "num_heads", "out_hidden_size", "deepstack_visual_indexes")
TOWERS: dict[str, tuple[int | list[int], ...]] = {
    "tiny-vl": (64, 128, 2, 2, 64, [0]),
    "qwen3-vl-2b": (1024, 4096, 24, 16, 2048, [5, 11, 17]),
    "qwen3-vl-8b": (1152, 4304, 27, 16, 4096, [8, 16, 24]),
}
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip


CHAT_TEMPLATE = """\
{% for message in messages %}{{ message.role }}:
{% for part in message.content %}\
{{ part.text if part.type == "text" else "<|vision_start|><|" + part.type + "_pad|><|vision_end|>" }}\
{% endfor %}

{% endfor %}"""


def with_tower(name: str, text: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a model that sees; text: that of its language model."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": BEGIN,
        "vision_end_token_id": END,
        "text_config": {name: value for name, value in text.items() if name != "architectures"},
        "vision_config": dict(zip(TOWER_FIELDS, TOWERS[name], strict=True)),
    }


def write_processor(folder: str) -> None:
    """Write what processes images; the bundled tokenizer with the tokens around them, and a chat template."""
    target, source = Path(folder), Path(BUNDLED_MODEL)
    (target / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR), "utf-8")
    tokenizer = json.loads((source / "tokenizer.json").read_text("utf-8"))
    how = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for token_id, name in NAMES.items():
        tokenizer["model"]["vocab"][name] = token_id
        tokenizer["added_tokens"].append({"id": token_id, "content": name, **how})
    (target / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    shutil.copy(source / "tokenizer_config.json", target)
    (target / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")


def draw_images(count: int, repeat: int) -> list[Image]:
    """Return images of SIDE x SIDE random pixels, decoded: others in each repeat."""
    from PIL.Image import fromarray  # here, for it comes with an extra

    generator = np.random.default_rng(repeat)
    return [fromarray(generator.integers(0, 256, (SIDE, SIDE, 3), np.uint8)) for _ in range(count)]


def tower_products(vision: Any, images: int) -> tuple[int, int]:
    """Return the numbers in a tower's matrices, and its operations for so many images; vision: its config."""
    size, inner = vision.hidden_size, vision.intermediate_size
    merge = vision.spatial_merge_size**2
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2 * size
    layers = vision.depth * (4 * size * size + 2 * size * inner)
    merger = merge * size * (merge * size + vision.out_hidden_size)
    mergers = (1 + len(vision.deepstack_visual_indexes)) * merger
    patches = TOKENS * merge
    attention = 4 * patches * patches * size * vision.depth
    operations = 2 * (patches * (patch + layers) + TOKENS * mergers) + attention
    return patch + layers + mergers, images * operations
