"""Cases of checkpoints that see, and images for them: as their processors would make them, of random numbers."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from cases.case import Case
from cases.multimodal import MROPE, VISION
from cases.sparse import EXPERTS
from cases.states import DELTA
from nanoinfer.vision.spans import Encoded, ImageSpan, VisionPrompt

IMAGE, START, END, VIDEO, BREAK = 150, 151, 152, 153, 154  # text has tokens below these
QWEN_IDS = {
    "image_token_id": IMAGE,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "video_token_id": VIDEO,
}
PATCH = 4  # pixels on an edge; 2 x 2 patches make a placeholder
QWEN_VISION = {"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 2}

QWEN3_VISION = {
    **QWEN_VISION,
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 32,
    "out_hidden_size": 48,
    "num_position_embeddings": 64,
}

SEEING = {
    "qwen2.5-vl": Case(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        {"hidden_size": 64, "rope_parameters": MROPE},
        {
            **QWEN_VISION,
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 32,
            "out_hidden_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        outer=QWEN_IDS,
    ),
    "qwen3-vl": Case(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        {"rope_parameters": MROPE},
        {**QWEN3_VISION, "deepstack_visual_indexes": [0, 2]},
        outer=QWEN_IDS,
    ),
    "qwen3-vl-moe": Case(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        {**EXPERTS, "rope_parameters": MROPE},
        {**QWEN3_VISION, "deepstack_visual_indexes": [0, 2]},
        outer=QWEN_IDS,
    ),
    "qwen3.5": Case(
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        {**DELTA, "rope_parameters": {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
        QWEN3_VISION,
        keeps_states=True,
        outer=QWEN_IDS,
    ),
    "gemma3": Case(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {"sliding_window": 24},
        {**VISION, "image_size": 8 * PATCH, "patch_size": PATCH},
        outer={"image_token_index": IMAGE, "mm_tokens_per_image": 16, "boi_token_index": START, "eoi_token_index": END},
    ),
    "mistral3": Case(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False},
        {**VISION, "head_dim": 16, "image_size": 96, "patch_size": PATCH},
        outer={"image_token_index": IMAGE},
    ),
}


@dataclass(frozen=True)
class Image:
    """What a processor makes of an image: the tower's arguments, and the tokens in the prompt."""

    pixels: Mapping[str, Tensor]
    tokens: list[int]

    @property
    def key(self) -> bytes:
        digest = blake2b(digest_size=16)
        for name, tensor in self.pixels.items():
            digest.update(name.encode() + tensor.numpy().tobytes())
        return digest.digest()


def make_image(case: Case, width: int, height: int, seed: int) -> Image:
    """Return an image of so many placeholders in a row, and rows of them."""
    generator = torch.Generator().manual_seed(seed)
    if case.model_type == "gemma3":  # all images have one size
        pixels = torch.randn(1, 3, 8 * PATCH, 8 * PATCH, generator=generator)
        return Image({"pixel_values": pixels}, [START, *[IMAGE] * 16, END])
    if case.model_type == "mistral3":
        size = 2 * PATCH * height, 2 * PATCH * width
        row = [*[IMAGE] * width, BREAK]
        pixels = {"pixel_values": torch.randn(1, 3, *size, generator=generator), "image_sizes": torch.tensor([size])}
        return Image(pixels, [*(row * height)[:-1], END])
    patches = 4 * width * height
    values = torch.randn(patches, 3 * 2 * PATCH**2, generator=generator)
    grid = torch.tensor([[1, 2 * height, 2 * width]])
    return Image({"pixel_values": values, "image_grid_thw": grid}, [START, *[IMAGE] * (width * height), END])


def join(pixels: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return several images' arguments of the tower as one's; those of pictures get zeros to one width and height."""
    joined = {}
    for name in pixels[0]:
        tensors = [own[name] for own in pixels]
        if tensors[0].ndim == 4:
            height, width = (max(tensor.shape[side] for tensor in tensors) for side in (2, 3))
            tensors = [F.pad(x, (0, width - x.shape[3], 0, height - x.shape[2])) for x in tensors]
        joined[name] = torch.cat(tensors)
    return joined


class OracleTower:
    """transformers' own tower."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @torch.inference_mode()
    def encode(self, pixels: Sequence[Mapping[str, Tensor]]) -> list[Encoded]:
        """See Tower."""
        made = [self._model.model.get_image_features(**own, return_dict=True) for own in pixels]
        return [
            Encoded(
                torch.cat(list(own.pooler_output)),
                tuple(torch.cat(list(layer)) for layer in getattr(own, "deepstack_features", None) or ()),
            )
            for own in made
        ]


def is_image(tokens: Sequence[int]) -> Tensor:
    """Return, for each token, whether it is a placeholder, [1, tokens] int32."""
    return torch.tensor([[int(token == IMAGE) for token in tokens]], dtype=torch.int32)


def make_prompt(model: PreTrainedModel, *parts: list[int] | Image) -> VisionPrompt:
    """Put a prompt of text and images together, with the positions that transformers gives its tokens."""
    tokens: list[int] = []
    spans = []
    for part in parts:
        if isinstance(part, Image):
            spans.append(ImageSpan(part.key, len(tokens) + part.tokens.index(IMAGE), part.tokens.count(IMAGE)))
        tokens += part.tokens if isinstance(part, Image) else part
    pixels = tuple(part.pixels for part in parts if isinstance(part, Image))
    positions, delta = None, 0
    if pixels and hasattr(model.model, "get_rope_index"):
        grids = join(pixels)["image_grid_thw"]
        found, deltas = model.model.get_rope_index(torch.tensor([tokens]), is_image(tokens), image_grid_thw=grids)
        positions, delta = array("i", found.flatten().tolist()), int(deltas)
    return VisionPrompt(tokens, tuple(spans), positions, delta, pixels)


@torch.inference_mode()
def logprobs(model: PreTrainedModel, prompt: VisionPrompt, generated: Sequence[int]) -> Tensor:
    """Return transformers' log-probabilities after each token, [tokens, vocabulary]."""
    tokens = [*prompt.token_ids, *generated]
    own: dict[str, Any] = join(prompt.pixels) if prompt.pixels else {}
    if prompt.positions is not None:
        own["mm_token_type_ids"] = is_image(tokens)
    elif prompt.pixels and model.config.model_type == "gemma3":
        own["token_type_ids"] = is_image(tokens)
    return model(input_ids=torch.tensor([tokens]), **own).logits[0].float().log_softmax(dim=-1)
