"""The families that see, whose shapes differ in the sizes of their towers."""

from __future__ import annotations

from nanoinfer.benchmark.eyes.eyes import SIDE, Eyes
from nanoinfer.benchmark.eyes.tower import Tower

CHANNELS = 3
HALVES = {"image_mean": [0.5] * CHANNELS, "image_std": [0.5] * CHANNELS}
OF_IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
LINE = 201  # the bundled tokenizer's token of a line's end


def qwen3_vl(size: int, inner: int, layers: int, heads: int, hidden_size: int, deep: list[int]) -> Eyes:
    """Return the eyes of a Qwen3-VL, which sees an image as a whole; each token is one of 2 x 2 patches.

    size, inner, layers, heads: of the tower; hidden_size: the language model's; deep: after these layers it also looks
    """
    patch, frames, merge = 16, 2, 2
    begin, end, image, video = 151652, 151653, 151655, 151656
    count = (SIDE // patch // merge) ** 2
    merged = merge**2 * size
    return Eyes(
        config={
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "image_token_id": image,
            "video_token_id": video,
            "vision_start_token_id": begin,
            "vision_end_token_id": end,
            "vision_config": {
                "hidden_size": size,
                "intermediate_size": inner,
                "depth": layers,
                "num_heads": heads,
                "out_hidden_size": hidden_size,
                "deepstack_visual_indexes": deep,
            },
        },
        preprocessor={
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": patch,
            "temporal_patch_size": frames,
            "merge_size": merge,
            "size": {"shortest_edge": 65536, "longest_edge": 16777216},
            **HALVES,
        },
        tokens={begin: "<|vision_start|>", end: "<|vision_end|>", image: "<|image_pad|>", video: "<|video_pad|>"},
        part='"<|vision_start|><|" + part.type + "_pad|><|vision_end|>"',
        given=[begin, image, end],
        seen=[begin, *[image] * count, end],
        tower=Tower(
            size=size,
            inner=inner,
            layers=layers,
            pixels=CHANNELS * frames * patch**2,
            tiles=1,
            patches=count * merge**2,
            embeddings=count,
            projector=(1 + len(deep)) * merged * (merged + hidden_size),
        ),
    )


def internvl3(size: int, inner: int, layers: int, heads: int, hidden_size: int) -> Eyes:
    """Return the eyes of an InternVL3, which cuts an image of SIDE x SIDE into 3 x 3 tiles, and sees a small one too.

    size, inner, layers, heads: of the tower; hidden_size: the language model's
    """
    side, patch, merge = 448, 14, 2
    tiles = 3 * 3 + 1
    patches = (side // patch) ** 2
    begin, end, image = 151665, 151666, 151667
    of_tile = patches // merge**2
    return Eyes(
        config={
            "architectures": ["InternVLForConditionalGeneration"],
            "model_type": "internvl",
            "image_token_id": image,
            "image_seq_length": of_tile,
            "downsample_ratio": 1 / merge,
            "vision_config": {
                "hidden_size": size,
                "intermediate_size": inner,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "attention_bias": True,
                "image_size": [side, side],
                "patch_size": [patch, patch],
            },
        },
        preprocessor={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": side, "width": side},
            "max_patches": 12,
            **OF_IMAGENET,
        },
        tokens={begin: "<img>", end: "</img>", image: "<IMG_CONTEXT>"},
        part='"<IMG_CONTEXT>"',
        given=[image],
        seen=[begin, *[image] * (tiles * of_tile), end],
        tower=Tower(
            size=size,
            inner=inner,
            layers=layers,
            pixels=CHANNELS * patch**2,
            tiles=tiles,
            patches=patches,
            others=1,
            embeddings=tiles * of_tile,
            projector=hidden_size * (merge**2 * size + hidden_size),
        ),
        named={"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"},
    )


def smolvlm(size: int, inner: int, layers: int, heads: int, hidden_size: int) -> Eyes:
    """Return the eyes of a SmolVLM, which makes an image 4 x 4 tiles large, cuts it, and sees a small one too.

    size, inner, layers, heads: of the tower; hidden_size: the language model's
    """
    side, patch, merge, rows, most_rows = 384, 14, 3, 4, 6
    patches = (side // patch) ** 2
    of_tile = patches // merge**2
    whole, first, begin, image = 49152, 49153, 49189, 49190
    places = [(row, column) for row in range(most_rows) for column in range(most_rows)]
    seen: list[int] = []
    for row in range(rows):
        for column in range(rows):
            seen += [begin, first + most_rows * row + column, *[image] * of_tile]
        seen.append(LINE)
    seen += [LINE, begin, whole, *[image] * of_tile, begin]
    return Eyes(
        config={
            "architectures": ["SmolVLMForConditionalGeneration"],
            "model_type": "smolvlm",
            "image_token_id": image,
            "scale_factor": merge,
            "vision_config": {
                "hidden_size": size,
                "intermediate_size": inner,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "image_size": side,
                "patch_size": patch,
            },
        },
        preprocessor={
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": rows * side},
            "max_image_size": {"longest_edge": side},
            **HALVES,
        },
        tokens={
            whole: "<global-img>",
            **{first + number: f"<row_{row + 1}_col_{column + 1}>" for number, (row, column) in enumerate(places)},
            begin: "<fake_token_around_image>",
            image: "<image>",
        },
        part='"<image>"',
        given=[image],
        seen=seen,
        tower=Tower(
            size=size,
            inner=inner,
            layers=layers,
            pixels=CHANNELS * patch**2,
            tiles=rows**2 + 1,
            patches=patches,
            embeddings=(rows**2 + 1) * of_tile,
            projector=hidden_size * merge**2 * size,
        ),
    )
