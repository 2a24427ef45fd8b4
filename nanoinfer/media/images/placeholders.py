"""What stands for an image in a prompt, and who makes its pixels, by the rules of each model's own processor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nanoinfer.media.images.anyres import count_anyres
from nanoinfer.media.pixels import GRIDS, MASK, SHAPES, SIZES, TARGETS, Pixels

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CROPS = {
    "do_pan_and_scan": False,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}  # Gemma 3's defaults, which its files leave out
ROW_END, IMAGE_END = "[IMG_BREAK]", "[IMG_END]"  # Mistral's


@dataclass(frozen=True)
class Placeholder:
    """What the processor of a class makes of an image.

    text: what a prompt has in the image's place
    image_processor: the class of transformers' that makes pixels; checkpoints name it variously
    expand: returns what the text becomes; it takes what the image processor made of the image
    inputs: what the tower takes of that, beside the pixel values
    number: returns what is written before an image of that number in its prompt; None: nothing
    options: of the image processor
    required: settings of the image processor, and the values that they must have
    fixed: settings of the class's processor, which is not run here, and the values that they must have
    ignored: those that change nothing of an image
    """

    text: str
    image_processor: str
    expand: Callable[[Pixels], str]
    inputs: tuple[str, ...] = ()
    number: Callable[[int], str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Collection[Any]] = field(default_factory=dict)
    fixed: Mapping[str, Collection[Any]] = field(default_factory=dict)
    ignored: Collection[str] = ()


def _gemma3(config: PretrainedConfig, tokenizer: Any) -> Placeholder:
    begin, image, end = tokenizer.boi_token, _image(config, tokenizer), tokenizer.eoi_token
    whole = f"\n\n{begin}{image * config.mm_tokens_per_image}{end}\n\n"

    def expand(made: Pixels) -> str:
        crops = int(made["num_crops"])
        if not crops:
            return whole
        text = f"Here is the original image {whole} and here are some crops to help you see better"
        return " ".join([text, *[whole] * crops])

    fixed = {"image_seq_length": (config.mm_tokens_per_image,)}
    return Placeholder(begin, "Gemma3ImageProcessor", expand, options=CROPS, fixed=fixed)


def _gemma4(config: PretrainedConfig, tokenizer: Any) -> Placeholder:
    begin, image, end = tokenizer.boi_token, _image(config, tokenizer), tokenizer.eoi_token

    def expand(made: Pixels) -> str:
        return f"{begin}{image * int(made['num_soft_tokens_per_image'])}{end}"

    ignored = "image_seq_length", "audio_seq_length", "audio_ms_per_token"
    return Placeholder(image, "Gemma4ImageProcessor", expand, ("image_position_ids",), ignored=ignored)


def _gemma4_unified(config: PretrainedConfig, tokenizer: Any) -> Placeholder:
    """Its own image processor needs torchvision. Gemma 4's makes the same, of patches as large as a token's."""
    options = {"patch_size": config.vision_config.model_patch_size, "pooling_kernel_size": 1}
    return replace(_gemma4(config, tokenizer), options=options)


def _idefics3(config: PretrainedConfig, tokenizer: Any) -> Placeholder:
    of = config.vision_config
    length = (of.image_size // of.patch_size) ** 2 // config.scale_factor**2
    image, begin = _image(config, tokenizer), "<fake_token_around_image>"
    whole = f"{begin}<global-img>{image * length}{begin}"

    def expand(made: Pixels) -> str:
        rows, columns = (int(made[name][0][0]) for name in ("rows", "cols"))
        if rows == columns == 0:
            return whole
        tiles = (
            "".join(f"{begin}<row_{row}_col_{column}>{image * length}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        )
        return "\n".join([*tiles, "", whole])

    options = {"return_row_col_info": True, "do_pad": False}  # its tiles are of one size: their mask would hide nothing
    fixed = {"image_seq_len": (length,)}
    return Placeholder(image, "Idefics3ImageProcessor", expand, options=options, fixed=fixed)


def _smolvlm(config: PretrainedConfig, tokenizer: Any) -> Placeholder:
    return replace(_idefics3(config, tokenizer), image_processor="SmolVLMImageProcessor")


def _granite_docling(config: PretrainedConfig, tokenizer: Any) -> Placeholder:
    """As Idefics 3's, but for an image of one tile; a page's finer tokens are not asked for."""
    of = config.vision_config
    length = (of.image_size // of.patch_size) ** 2 // of.scale_factor**2
    image, begin = _image(config, tokenizer), "<fake_token_around_image>"

    def expand(made: Pixels) -> str:
        rows, columns = (int(made[name][0][0]) for name in ("rows", "cols"))
        tiles = [
            "".join(f"{begin}<row_{row}_col_{column}>{image * length}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        whole = f"\n{begin}<global-img>{image * length}{begin}" if rows * columns > 1 else ""
        return "".join(tiles) + whole

    return Placeholder(
        image,
        "GraniteDoclingImageProcessor",
        expand,
        (MASK,),
        required={"fine_route": (False,)},
        fixed={"image_seq_len": (length,)},
    )


def _internvl(config: PretrainedConfig, tokenizer: Any) -> Placeholder:
    image, begin, end = _image(config, tokenizer), tokenizer.start_image_token, tokenizer.end_image_token

    def expand(made: Pixels) -> str:
        return f"{begin}{image * (config.image_seq_length * int(made['num_patches'][0]))}{end}"

    fixed = {"image_seq_length": (config.image_seq_length,)}
    options = {"crop_to_patches": True}
    return Placeholder(image, "GotOcr2ImageProcessor", expand, options=options, fixed=fixed)


def _lfm2_vl(config: PretrainedConfig, tokenizer: Any) -> Placeholder:
    image, factor = _image(config, tokenizer), config.downsample_factor
    begin, end = _named(tokenizer, "image_start"), _named(tokenizer, "image_end")
    thumbnail = str(getattr(tokenizer, "image_thumbnail_token", "<|img_thumbnail|>"))

    def expand(made: Pixels) -> str:
        rows, columns = (int(made[name][0]) for name in ("image_rows", "image_cols"))
        tiles = [image * int((shape // factor).prod()) for shape in made[SHAPES]]
        if rows * columns == 1:
            return f"{begin}{tiles[0]}{end}"
        marks = [f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(rows) for column in range(columns)]
        marks += [thumbnail] * (len(tiles) - len(marks))
        return "".join([begin, *(mark + tile for mark, tile in zip(marks, tiles, strict=True)), end])

    return Placeholder(
        image,
        "Lfm2VlImageProcessor",
        expand,
        (SHAPES, MASK),
        options={"return_row_col_info": True},
        required={"downsample_factor": (factor,), "do_pad": (True,)},
        fixed={"use_image_special_tokens": (True,)},
    )


def _llava_onevision(config: PretrainedConfig, tokenizer: Any) -> Placeholder:
    """Each image comes in tiles, also beside others."""
    from transformers.image_processing_utils import select_best_resolution

    of, grids = config.vision_config, config.image_grid_pinpoints
    side, most = of.image_size // of.patch_size, int(config.vision_aspect_ratio.removeprefix("anyres_max_"))
    image = _image(config, tokenizer)

    def expand(made: Pixels) -> str:
        size = tuple(made[SIZES][0].tolist())
        return image * count_anyres(size, select_best_resolution(size, grids), of.image_size, side, most)

    fixed = {
        "num_image_tokens": (side**2,),
        "vision_feature_select_strategy": (config.vision_feature_select_strategy,),
        "vision_aspect_ratio": (config.vision_aspect_ratio,),
    }
    ignored = "image_token", "video_token"
    required = {"image_grid_pinpoints": (grids,)}
    return Placeholder(
        image, "LlavaOnevisionImageProcessor", expand, (SIZES,), required=required, fixed=fixed, ignored=ignored
    )


def _minicpmv(config: PretrainedConfig, tokenizer: Any) -> Placeholder:
    image, merged = _image(config, tokenizer), 4 if config.downsample_mode == "4x" else 16
    begin, end = tokenizer.image_start_token, tokenizer.image_end_token
    slice_begin, slice_end = tokenizer.slice_start_token, tokenizer.slice_end_token

    def expand(made: Pixels) -> str:
        whole, *slices = (image * (int(size.prod()) // merged) for size in made[TARGETS])
        columns = int(made["grids"][0][1])
        parts = [f"{slice_begin}{own}{slice_end}" for own in slices]
        rows = ("".join(parts[first : first + columns]) for first in range(0, len(parts), columns or 1))
        return f"{begin}{whole}{end}" + "\n".join(rows)

    return Placeholder(
        image,
        "MiniCPMV4_6ImageProcessor",
        expand,
        (TARGETS,),
        lambda number: f"{tokenizer.image_id_start_token}{number}{tokenizer.image_id_end_token}",
        required={"downsample_mode": (config.downsample_mode,), "use_image_id": (True,)},
        fixed={"use_image_id": (True,)},
    )


def _mistral3(config: PretrainedConfig, tokenizer: Any) -> Placeholder:
    image, patch, merge = _image(config, tokenizer), config.vision_config.patch_size, config.spatial_merge_size
    side = patch * merge

    def expand(made: Pixels) -> str:
        height, width = (int(length) // side for length in made[SIZES][0])
        return ROW_END.join([image * width] * height) + IMAGE_END

    fixed = {
        "patch_size": (patch,),
        "spatial_merge_size": (merge,),
        "image_break_token": (ROW_END,),
        "image_end_token": (IMAGE_END,),
    }
    ignored = ("image_token",)  # for image_token_id in the config decides
    options = {"patch_size": side}
    return Placeholder(image, "PixtralImageProcessor", expand, (SIZES,), options=options, fixed=fixed, ignored=ignored)


def _qwen(config: PretrainedConfig, tokenizer: Any) -> Placeholder:
    image, merged = _image(config, tokenizer), config.vision_config.spatial_merge_size**2

    def expand(made: Pixels) -> str:
        return image * (int(made[GRIDS].prod()) // merged)

    return Placeholder(image, "Qwen2VLImageProcessor", expand, (GRIDS,))


def _glm4v(config: PretrainedConfig, tokenizer: Any) -> Placeholder:
    return replace(_qwen(config, tokenizer), image_processor="Glm4vImageProcessor")


def _glm46v(config: PretrainedConfig, tokenizer: Any) -> Placeholder:
    return replace(_qwen(config, tokenizer), image_processor="Glm46VImageProcessor")


def _paddleocr(config: PretrainedConfig, tokenizer: Any) -> Placeholder:
    return replace(_qwen(config, tokenizer), image_processor="PaddleOCRVLImageProcessor")


def _named(tokenizer: Any, name: str) -> str:
    """Return a token of LFM2-VL's by its name; files may not say which it is."""
    return str(getattr(tokenizer, f"{name}_token", f"<|{name}|>"))


def _image(config: PretrainedConfig, tokenizer: Any) -> str:
    """Return the token in whose place an embedding is put."""
    return str(tokenizer.convert_ids_to_tokens(config.image_token_id))


CLASSES: dict[str, Callable[[PretrainedConfig, Any], Placeholder]] = {
    "Exaone4_5_ForConditionalGeneration": _qwen,
    "Gemma3ForConditionalGeneration": _gemma3,
    "Gemma4ForConditionalGeneration": _gemma4,
    "Gemma4UnifiedForConditionalGeneration": _gemma4_unified,
    "Glm4vForConditionalGeneration": _glm4v,
    "Glm4vMoeForConditionalGeneration": _glm4v,
    "Glm46VForConditionalGeneration": _glm46v,
    "GraniteDoclingForConditionalGeneration": _granite_docling,
    "Idefics3ForConditionalGeneration": _idefics3,
    "InternVLForConditionalGeneration": _internvl,
    "Lfm2VlForConditionalGeneration": _lfm2_vl,
    "LlavaOnevisionForConditionalGeneration": _llava_onevision,
    "MiniCPMV4_6ForConditionalGeneration": _minicpmv,
    "Mistral3ForConditionalGeneration": _mistral3,
    "PaddleOCRVLForConditionalGeneration": _paddleocr,
    "Qwen2VLForConditionalGeneration": _qwen,
    "Qwen2_5_VLForConditionalGeneration": _qwen,
    "Qwen3VLForConditionalGeneration": _qwen,
    "Qwen3VLMoeForConditionalGeneration": _qwen,
    "Qwen3_5ForConditionalGeneration": _qwen,
    "Qwen3_5MoeForConditionalGeneration": _qwen,
    "SmolVLMForConditionalGeneration": _smolvlm,
}  # that see
BY_TORCHVISION = ("Lfm2VlForConditionalGeneration",)  # whose image processor PIL does not do
