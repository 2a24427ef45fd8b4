"""Cases of checkpoints that see: small models of random weights, with processors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import transformers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import is_torchvision_available

from cases.case import Case, build
from cases.multimodal import (
    DOCLING_VISION,
    EXAONE_VISION,
    GLM_VISION,
    INTERN_VISION,
    LFM2_VISION,
    MINICPM_VISION,
    MULTIMODAL,
    ONEVISION_VISION,
    QWEN2_VISION,
    QWEN3_5_VISION,
    QWEN3_VISION,
    VISION,
)
from nanoinfer import BUNDLED_MODEL
from nanoinfer.media.processor import MediaProcessor
from nanoinfer.media.videos.kinds import CLASSES

VOCAB = 2080  # the bundled tokenizer's, and further special tokens
IMAGE, VIDEO, BEGIN, END = "<image>", "<video>", "<begin>", "<end>"
VIDEO_PROMPT = f"{BEGIN}{VIDEO}{END}"  # what stands for a video in a prompt
VIDEO_SETTINGS = {"size": {"shortest_edge": 56 * 56, "longest_edge": 96 * 96 * 4}}  # of a frame, or of all
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}PLACEHOLDER"
    "{% elif part.type == 'video' %}VIDEO{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)


@dataclass
class Seeing:
    """A case of MULTIMODAL with vision.

    case: its name there; vision, outer, text: settings of the config
    processor: makes its processor from a tokenizer
    prompt: what stands for an image in a prompt
    """

    case: str
    vision: dict[str, Any]
    processor: Callable[[PreTrainedTokenizerBase], Any]
    prompt: str = IMAGE
    outer: dict[str, Any] | None = None
    text: dict[str, Any] = field(default_factory=dict)

    @property
    def takes_videos(self) -> bool:
        """Whether the class does."""
        return MULTIMODAL[self.case].architecture in CLASSES

    def make_processor(self) -> Any:
        """Return transformers' processor, which takes no videos here: those need torchvision."""
        tokenizer = _tokenizer()
        tokenizer.chat_template = CHAT_TEMPLATE.replace("PLACEHOLDER", self.prompt).replace("VIDEO", VIDEO_PROMPT)
        with patch.object(transformers.ProcessorMixin, "check_argument_for_proper_class"):
            processor = self.processor(tokenizer)
        processor.chat_template = tokenizer.chat_template
        return processor

    def build(self, folder: Path) -> PreTrainedModel:
        """Save a checkpoint with an image processor; returns transformers' model of it."""
        processor = self.make_processor()
        processor.image_processor.save_pretrained(folder)
        processor.tokenizer.save_pretrained(folder)
        tokenizer = processor.tokenizer
        outer = {"image_token_id": tokenizer.image_token_id, **(self.outer or {})}
        if self.takes_videos:
            outer["video_token_id"] = tokenizer.video_token_id
            (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEO_SETTINGS))
        case: Case = MULTIMODAL[self.case]
        settings = {**case.settings, "vocab_size": VOCAB, **self.text}
        return build(replace(case, settings=settings, vision={**self.vision}, outer=outer), folder)


def _tokenizer() -> PreTrainedTokenizerBase:
    tokens = {
        "image_token": IMAGE,
        "boi_token": BEGIN,
        "eoi_token": END,
        "audio_token": "<audio>",
        "boa_token": "<begin_audio>",
        "eoa_token": "<end_audio>",
        "video_token": VIDEO,
        "vision_start_token": BEGIN,
        "vision_end_token": END,
        "start_image_token": BEGIN,
        "end_image_token": END,
        "context_image_token": IMAGE,
        "image_start_token": BEGIN,
        "image_end_token": END,
        "slice_start_token": "<slice>",
        "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>",
        "image_id_end_token": "</image_id>",
        "break_token": "[IMG_BREAK]",
        "end_token": "[IMG_END]",
    }
    return AutoTokenizer.from_pretrained(BUNDLED_MODEL, extra_special_tokens=tokens)


def _backend(name: str) -> Any:
    """Return the class of an image processor, as transformers would take it."""
    return getattr(transformers, name if is_torchvision_available() else f"{name}Pil")


def _qwen(name: str, patch_size: int) -> Callable[[PreTrainedTokenizerBase], Any]:
    def make(tokenizer: PreTrainedTokenizerBase) -> Any:
        size = {"shortest_edge": 56 * 56, "longest_edge": 128 * 128}
        image_processor = _backend("Qwen2VLImageProcessor")(patch_size=patch_size, size=size)
        return getattr(transformers, name)(image_processor, tokenizer, None)

    return make


def _gemma3(tokenizer: PreTrainedTokenizerBase) -> Any:
    image_processor = _backend("Gemma3ImageProcessor")(size={"height": 56, "width": 56})
    return transformers.Gemma3Processor(image_processor, tokenizer, image_seq_length=4)


def _gemma4(tokenizer: PreTrainedTokenizerBase) -> Any:
    return transformers.Gemma4Processor(
        transformers.Gemma4AudioFeatureExtractor(),
        _backend("Gemma4ImageProcessor")(max_soft_tokens=70),
        tokenizer,
        None,
    )


def _gemma4_unified(tokenizer: PreTrainedTokenizerBase) -> Any:
    return transformers.Gemma4UnifiedProcessor(
        transformers.Gemma4UnifiedAudioFeatureExtractor(),
        transformers.Gemma4UnifiedImageProcessor(max_soft_tokens=70, patch_size=4)
        if is_torchvision_available()  # else that which makes the same of larger patches
        else transformers.Gemma4ImageProcessorPil(max_soft_tokens=70, patch_size=12, pooling_kernel_size=1),
        tokenizer,
        None,
    )


def _pixtral(tokenizer: PreTrainedTokenizerBase) -> Any:
    image_processor = _backend("PixtralImageProcessor")(size={"longest_edge": 140}, patch_size=14)
    rooms = "transformers.models.pixtral"
    if not is_torchvision_available():  # the processor's module imports the class that needs it
        sys.modules[f"{rooms}.image_processing_pixtral"] = import_module(f"{rooms}.image_processing_pil_pixtral")
    processor = import_module(f"{rooms}.processing_pixtral").PixtralProcessor
    return processor(image_processor, tokenizer, patch_size=14, spatial_merge_size=2, image_token=IMAGE)


def _internvl(tokenizer: PreTrainedTokenizerBase) -> Any:
    image_processor = _backend("GotOcr2ImageProcessor")(
        size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=4
    )
    return transformers.InternVLProcessor(image_processor, tokenizer, None, image_seq_length=4)


def _idefics3(kind: str) -> Callable[[PreTrainedTokenizerBase], Any]:
    def make(tokenizer: PreTrainedTokenizerBase) -> Any:
        sizes = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
        image_processor = _backend(f"{kind}ImageProcessor")(**sizes)
        return transformers.Idefics3Processor(image_processor, tokenizer, image_seq_len=4)  # SmolVLM's wants num2words

    return make


def _docling(tokenizer: PreTrainedTokenizerBase) -> Any:
    sizes = {"size": {"height": 56, "width": 56}, "max_patches": 2}
    image_processor = _backend("GraniteDoclingImageProcessor")(**sizes)
    return transformers.GraniteDoclingProcessor(image_processor, tokenizer, image_seq_len=4)


def _lfm2_vl(tokenizer: PreTrainedTokenizerBase) -> Any:
    sizes = {"tile_size": 56, "encoder_patch_size": 14, "max_tiles": 4, "min_image_tokens": 1, "max_image_tokens": 4}
    return transformers.Lfm2VlProcessor(transformers.Lfm2VlImageProcessor(**sizes), tokenizer)


def _llava_onevision(tokenizer: PreTrainedTokenizerBase) -> Any:
    sizes = {"size": {"height": 56, "width": 56}, "image_grid_pinpoints": ONEVISION_GRIDS}
    image_processor = _backend("LlavaOnevisionImageProcessor")(**sizes)
    return transformers.LlavaOnevisionProcessor(
        image_processor, tokenizer, None, num_image_tokens=16, vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_2",
    )  # fmt: skip


def _minicpm(mode: str) -> Callable[[PreTrainedTokenizerBase], Any]:
    def make(tokenizer: PreTrainedTokenizerBase) -> Any:
        sizes = {"scale_resolution": 112, "max_slice_nums": 4, "downsample_mode": mode}
        image_processor = _backend("MiniCPMV4_6ImageProcessor")(**sizes)
        of_videos = SimpleNamespace(slice_mode=False, downsample_mode=mode)  # the class itself needs torchvision
        return transformers.MiniCPMV4_6Processor(image_processor, of_videos, tokenizer)

    return make


def _paddleocr(tokenizer: PreTrainedTokenizerBase) -> Any:
    size = {"shortest_edge": 56 * 56, "longest_edge": 128 * 128}
    return transformers.PaddleOCRVLProcessor(_backend("PaddleOCRVLImageProcessor")(size=size), tokenizer)


def _glm(kind: str) -> Callable[[PreTrainedTokenizerBase], Any]:
    def make(tokenizer: PreTrainedTokenizerBase) -> Any:
        size = {"shortest_edge": 56 * 56, "longest_edge": 2 * 128 * 128}
        return getattr(transformers, f"{kind}Processor")(_backend(f"{kind}ImageProcessor")(size=size), tokenizer, None)

    return make


CLIPPED = {"use_clipped_linears": True, "standardize": True}
ONEVISION_GRIDS = [[56, 56], [56, 112], [112, 56], [112, 112], [56, 168]]
PIXTRAL = {**VISION, "head_dim": 16, "image_size": 140, "patch_size": 14}
QWEN = f"{BEGIN}{IMAGE}{END}"
QWEN2_5_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
    "fullatt_block_indexes": [1], "window_size": 56, "tokens_per_second": 2}  # fmt: skip
DEEP = {**QWEN3_VISION, "depth": 3, "deepstack_visual_indexes": [0, 2]}
QWEN3_PROCESSOR = _qwen("Qwen3VLProcessor", 16)

SEEING = {
    "gemma3": Seeing(
        "gemma3 multimodal", {**VISION, "image_size": 56, "patch_size": 14}, _gemma3, BEGIN, {"mm_tokens_per_image": 4}
    ),
    "gemma4 layer inputs": Seeing(
        "gemma4 multimodal, layer inputs",
        {**VISION, "head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 64},
        _gemma4,
        text={"vocab_size_per_layer_input": VOCAB},
    ),
    "gemma4": Seeing(
        "gemma4 multimodal, experts",
        {**VISION, "head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 64, **CLIPPED},
        _gemma4,
    ),
    "gemma4 unified": Seeing(
        "gemma4unified multimodal",
        {"patch_size": 4, "mm_embed_dim": 48, "mm_posemb_size": 70, "output_proj_dims": 48},
        _gemma4_unified,
    ),
    "mistral3": Seeing("mistral3 multimodal", PIXTRAL, _pixtral),
    "ministral3": Seeing("ministral3 multimodal", PIXTRAL, _pixtral),
    "qwen2-vl": Seeing("qwen2-vl", QWEN2_VISION, _qwen("Qwen2VLProcessor", 14), QWEN),
    "qwen2.5-vl": Seeing("qwen2.5-vl", QWEN2_5_VISION, _qwen("Qwen2_5_VLProcessor", 14), QWEN),
    "qwen3-vl": Seeing("qwen3-vl", DEEP, QWEN3_PROCESSOR, QWEN),
    "qwen3-vl-moe": Seeing("qwen3-vl-moe", DEEP, QWEN3_PROCESSOR, QWEN),
    "qwen3.5": Seeing("qwen3.5 multimodal", QWEN3_5_VISION, QWEN3_PROCESSOR, QWEN),
    "qwen3.5-moe": Seeing("qwen3.5moe multimodal", QWEN3_5_VISION, QWEN3_PROCESSOR, QWEN),
    "internvl": Seeing("internvl", INTERN_VISION, _internvl, outer={"image_seq_length": 4}),
    "internvl3.5": Seeing("internvl3.5", INTERN_VISION, _internvl, outer={"image_seq_length": 4}),
    "exaone4.5": Seeing("exaone4.5", EXAONE_VISION, _qwen("Exaone4_5_Processor", 14), QWEN),
    "idefics3": Seeing(
        "idefics3", {**VISION, "image_size": 56, "patch_size": 14}, _idefics3("Idefics3"), outer={"scale_factor": 2}
    ),
    "smolvlm": Seeing(
        "smolvlm", {**VISION, "image_size": 56, "patch_size": 14}, _idefics3("SmolVLM"), outer={"scale_factor": 2}
    ),
    "granite-docling": Seeing("granite-docling", DOCLING_VISION, _docling),
    "minicpm-v4.6": Seeing("minicpm-v4.6", MINICPM_VISION, _minicpm("16x"), outer={"insert_layer_id": 0}),
    "minicpm-v4.6 fine": Seeing("minicpm-v4.6", MINICPM_VISION, _minicpm("4x"), outer={"downsample_mode": "4x"}),
    "llava-onevision": Seeing(
        "llava-onevision",
        ONEVISION_VISION,
        _llava_onevision,
        outer={"image_grid_pinpoints": ONEVISION_GRIDS, "vision_aspect_ratio": "anyres_max_2"},
    ),
    "glm4v": Seeing("glm4v", GLM_VISION, _glm("Glm4v"), QWEN),
    "glm46v": Seeing("glm46v", GLM_VISION, _glm("Glm46V"), QWEN),
    "glm4v-moe": Seeing("glm4v-moe", GLM_VISION, _glm("Glm4v"), QWEN),
    "paddleocr-vl": Seeing(
        "paddleocr-vl", {**VISION, "image_size": 56, "patch_size": 14}, _paddleocr, f"{BEGIN}{IMAGE}{END}"
    ),
}


if is_torchvision_available():  # by which alone its images are processed
    SEEING["lfm2-vl"] = Seeing("lfm2-vl", LFM2_VISION, _lfm2_vl, outer={"projector_hidden_size": 32})


def processor_of(folder: str, config: Any, *options: Any, **others: Any) -> MediaProcessor:
    """Return our processor of a checkpoint, with its own tokenizer."""
    return MediaProcessor(folder, config, AutoTokenizer.from_pretrained(folder), *options, **others)
