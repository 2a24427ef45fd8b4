"""Images: the processor and the tower make what transformers' own model makes of its processor's output."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import of_each_kind

pytest.importorskip("PIL")

from cases.multimodal import MULTIMODAL
from cases.pictures import picture
from cases.vision import IMAGE, SEEING, processor_of
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.image_processing_utils import select_best_resolution

from nanoinfer import BUNDLED_MODEL
from nanoinfer.config import Config
from nanoinfer.media.images.anyres import count_anyres
from nanoinfer.media.images.placeholders import BY_TORCHVISION, CLASSES
from nanoinfer.media.messages import take_media
from nanoinfer.media.pixels import COUNT, bytes_of, count_embeddings
from nanoinfer.media.spans import Encoded, MediaPrompt
from nanoinfer.media.tower.fewer_passes import take_fewer_passes
from nanoinfer.media.tower.tower import TransformersTower
from nanoinfer.runner.start.trials import largest_pixels
from nanoinfer.weights.names import TOWER, OfTower
from nanoinfer.weights.sources import FileSource, RandomSource

CPU = torch.device("cpu")
SIZES = [(61, 97), (150, 40), (64, 64), (33, 200)]  # width and height: odd ones, too


class Checkpoint:
    """A small checkpoint that sees, by transformers and by us."""

    def __init__(self, name: str, folder: Path) -> None:
        self.seeing = SEEING[name]
        self.folder = str(folder)
        self.model: PreTrainedModel = self.seeing.build(folder)
        self.oracle: Any = self.seeing.make_processor()
        self.config = AutoConfig.from_pretrained(folder)
        self.processor = processor_of(self.folder, self.config)
        self.tower = self.make_tower()

    def make_tower(self, **options: int) -> TransformersTower:
        tower = TransformersTower(self.config, torch.float32, CPU, **options)
        FileSource(self.folder, OfTower()).fill(tower.table())
        return tower

    def text(self, images: int) -> str:
        """A prompt in which images stand between words."""
        return "What is " + " or is it ".join([self.seeing.prompt] * images) + "? Say so."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    return cache(lambda name: Checkpoint(name, tmp_path_factory.mktemp("seeing")))


def by_image(prompt: MediaPrompt) -> list[dict]:
    """The pixels of each image once, though several spans may share them."""
    return list({span.key: pixels for span, pixels in zip(prompt.spans, prompt.pixels, strict=True)}.values())


def embeddings_in(prompt: MediaPrompt, encoded: dict[bytes, Encoded]) -> torch.Tensor:
    """The embeddings that the placeholders of a prompt get, in its order."""
    return torch.cat([encoded[span.key].embeddings[span.first : span.first + span.count] for span in prompt.spans])


def scale_of(config: PreTrainedConfig) -> float:
    """By what a model multiplies embeddings, images' too."""
    return getattr(config.get_text_config(), "embedding_multiplier", 1.0)


each_class = pytest.mark.parametrize("name", of_each_kind(SEEING, 0, 1, 2, 3, 6, 7, 9))


@each_class
def test_prompts_and_embeddings_equal_those_of_transformers(name: str, checkpoint: Callable[[str], Checkpoint]) -> None:
    ours = checkpoint(name)
    images = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    text = ours.text(len(images))
    wanted = ours.oracle(text=text, images=images, return_tensors="pt")
    prompt = ours.processor.prepare("prompt", text, images)
    assert prompt.token_ids == wanted["input_ids"][0].tolist()
    places = [place for span in prompt.spans for place in range(span.start, span.start + span.count)]
    assert places == (wanted["input_ids"][0] == ours.config.image_token_id).nonzero().flatten().tolist()

    encoded = dict(zip([s.key for s in prompt.spans if s.first == 0], ours.tower.encode(by_image(prompt)), strict=True))
    counts = [count_embeddings(pixels.in_bytes()) for pixels in by_image(prompt)]
    assert [(len(one.embeddings), len(one.deep)) for one in encoded.values()] == [
        (count, ours.tower.num_deep) for count in counts
    ]
    inputs = {key: wanted[key] for key in prompt.pixels[0] if key != COUNT}
    with torch.inference_mode():
        features = ours.model.model.get_image_features(**inputs, return_dict=True)
    expected = torch.cat([rows.flatten(0, -2) for rows in features.pooler_output])
    expected *= scale_of(ours.config)
    torch.testing.assert_close(embeddings_in(prompt, encoded), expected, atol=1e-5, rtol=1e-5)
    for layer, deep in enumerate(getattr(features, "deepstack_features", None) or []):
        found = torch.cat([one.deep[layer] for one in encoded.values()])
        torch.testing.assert_close(found, torch.cat(list(deep)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", of_each_kind(SEEING, 0, 1, 4, 6))
def test_torchvision_makes_the_same_of_an_image_but_for_rounding(
    name: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    """Of a smooth one. In noise, PIL cuts off what overshoots between its two passes."""
    pytest.importorskip("torchvision")
    ours = checkpoint(name)
    (pil, other) = (AutoImageProcessor.from_pretrained(ours.folder, backend=name) for name in ("pil", "torchvision"))
    spread = min(pil.image_std) if pil.do_normalize else 1.0
    for size in SIZES:
        smooth = picture(9, 9).resize(size)
        made, wanted = (each([smooth], return_tensors="pt") for each in (pil, other))
        assert made.keys() == wanted.keys()
        for key, tensor in made.items():
            levels = 2.01 / 255 / spread if key == "pixel_values" else 0
            torch.testing.assert_close(tensor, wanted[key], atol=levels, rtol=0)


@each_class
def test_prompts_of_token_ids_are_those_of_their_text(name: str, checkpoint: Callable[[str], Checkpoint]) -> None:
    ours = checkpoint(name)
    text, images = ours.text(2), [picture(61, 97), picture(150, 40)]
    token_ids = ours.oracle.tokenizer.encode(text)
    prompt = ours.processor.prepare("prompt", token_ids, images)
    assert prompt.token_ids == ours.processor.prepare("prompt", text, images).token_ids


@pytest.mark.parametrize("name", of_each_kind([name for name in SEEING if "qwen" in name], 1, 2))
def test_positions_of_three_parts_are_the_models_own(name: str, checkpoint: Callable[[str], Checkpoint]) -> None:
    ours = checkpoint(name)
    images = [picture(61, 97), picture(150, 40)]
    prompt = ours.processor.prepare("prompt", ours.text(2), images)
    wanted = ours.oracle(text=ours.text(2), images=images, return_tensors="pt")
    positions, delta = ours.model.model.get_rope_index(
        wanted["input_ids"], wanted["mm_token_type_ids"], wanted["image_grid_thw"]
    )
    assert prompt.positions is not None
    assert list(prompt.positions) == positions[:, 0].flatten().tolist()
    assert prompt.delta == int(delta) < 0


def test_positions_of_one_part_are_places(checkpoint: Callable[[str], Checkpoint]) -> None:
    ours = checkpoint("gemma3")
    prompt = ours.processor.prepare("prompt", ours.text(1), [picture(61, 97)])
    assert (prompt.positions, prompt.delta) == (None, 0)


def test_rows_of_an_image_are_spans_where_tokens_end_them(checkpoint: Callable[[str], Checkpoint]) -> None:
    ours = checkpoint("mistral3")
    prompt = ours.processor.prepare("prompt", f"{IMAGE}?", [picture(84, 56)])
    assert [(span.start, span.count, span.first) for span in prompt.spans] == [(0, 3, 0), (4, 3, 3)]
    assert prompt.pixels[0] is prompt.pixels[1]


def test_equal_images_have_equal_keys(checkpoint: Callable[[str], Checkpoint]) -> None:
    ours = checkpoint("qwen3-vl")
    first, other = picture(64, 64), picture(64, 64, seed=1)
    prompt = ours.processor.prepare("prompt", ours.text(4), [first, other, np.asarray(first), first.rotate(90)])
    keys = [span.key for span in prompt.spans]
    assert keys[0] == keys[2]
    assert len(set(keys)) == 3
    assert {len(key) for key in keys} == {16}
    smaller = processor_of(ours.folder, ours.config, {"max_pixels": 64 * 64})
    assert smaller.prepare("prompt", ours.text(1), [first]).spans[0].key != keys[0]


def test_gemma_3_may_see_crops(checkpoint: Callable[[str], Checkpoint]) -> None:
    ours = checkpoint("gemma3")
    processor = processor_of(ours.folder, ours.config, {"do_pan_and_scan": True})
    images = [picture(61, 97), picture(300, 900), picture(900, 400)]
    wanted = ours.oracle(text=ours.text(3), images=images, return_tensors="pt", images_kwargs={"do_pan_and_scan": True})
    prompt = processor.prepare("prompt", ours.text(3), images)
    assert prompt.token_ids == wanted["input_ids"][0].tolist()
    assert len(prompt.spans) == 1 + (1 + 3) + (1 + 2)
    encoded = dict(zip(dict.fromkeys(s.key for s in prompt.spans), ours.tower.encode(by_image(prompt)), strict=True))
    with torch.inference_mode():
        features = ours.model.model.get_image_features(wanted["pixel_values"], return_dict=True)
    torch.testing.assert_close(embeddings_in(prompt, encoded), torch.cat(list(features.pooler_output)))
    assert processor.images.largest().count == (1 + 4) * ours.config.mm_tokens_per_image


def test_tiles_have_as_many_tokens_as_transformers_says(checkpoint: Callable[[str], Checkpoint]) -> None:
    """LLaVA-OneVision's, of published sizes."""
    oracle = checkpoint("llava-onevision").oracle
    grids = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
    sizes = np.random.default_rng(0).integers(20, 3000, (200, 2)).tolist()
    with (
        patch.object(oracle, "num_image_tokens", 27**2),
        patch.object(oracle.image_processor, "image_grid_pinpoints", grids),
    ):
        wanted = [oracle._get_number_of_features(*size, 384, 384) for size in sizes]
    found = [count_anyres(size, select_best_resolution(size, grids), 384, 27, 2) for size in sizes]
    assert found == wanted


@each_class
def test_the_largest_image_is_known(name: str, checkpoint: Callable[[str], Checkpoint]) -> None:
    ours = checkpoint(name)
    largest = ours.processor.images.largest()
    images = [picture(*size, seed) for seed, size in enumerate([*SIZES, (500, 500), (900, 850)])]
    prompt = ours.processor.prepare("prompt", ours.text(len(images)), images)
    counts = Counter[bytes]()
    for span in prompt.spans:
        counts[span.key] += span.count
    assert max(counts.values()) <= largest.count
    assert max(map(bytes_of, by_image(prompt))) <= largest.num_bytes


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("qwen3-vl", {"max_pixels": 280 * 32**2 + 9}, 14 * 20),
        ("qwen3-vl", {"max_pixels": 50 * 32**2}, 100),  # in one row: an image may be 200 times as wide as high
        ("qwen3-vl", {"max_pixels": 1, "min_pixels": 1}, 1),
        ("gemma4", {}, 7 * 10),
        ("gemma4", {"max_soft_tokens": 140}, 10 * 14),
        ("gemma4 unified", {}, 7 * 10),
        ("mistral3", {}, 5 * 5),
        ("internvl", {"max_patches": 2}, (2 + 1) * 4),
        ("minicpm-v4.6", {"max_slice_nums": 1}, 28),  # of an image 200 times as wide as high
    ],
)
def test_no_image_has_more_tokens(
    name: str, options: dict[str, int], count: int, checkpoint: Callable[[str], Checkpoint]
) -> None:
    ours = checkpoint(name)
    images = processor_of(ours.folder, ours.config, options).images
    assert images.largest().count == count
    for width in (1, 2, 9, 25):
        assert images.prepare("image", picture(5 * width, 5)).count <= count


def test_each_class_that_sees_has_a_case() -> None:
    found = {MULTIMODAL[seeing.case].architecture for seeing in SEEING.values()}
    assert sorted(found | set(BY_TORCHVISION)) == sorted(CLASSES)


def test_a_class_that_does_not_see_is_named() -> None:
    config = AutoConfig.from_pretrained(BUNDLED_MODEL)
    with pytest.raises(ValueError, match=r"architecture 'Qwen3ForCausalLM' takes no images .*: Exaone4_5"):
        processor_of(BUNDLED_MODEL, config)


def test_a_checkpoint_without_a_processor_is_named(checkpoint: Callable[[str], Checkpoint]) -> None:
    with pytest.raises(ValueError, match=r"must have a preprocessor_config.json"):
        processor_of(BUNDLED_MODEL, checkpoint("qwen3-vl").config)


def test_options_say_how_large_images_become(checkpoint: Callable[[str], Checkpoint]) -> None:
    ours = checkpoint("qwen3-vl")
    smaller = processor_of(ours.folder, ours.config, {"max_pixels": 64 * 64})
    (span,) = smaller.prepare("prompt", ours.text(1), [picture(200, 200)]).spans
    assert span.count == 4


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "qwen3-vl",
            {"max_pixel": 9},
            r"image_options has 'max_pixel': 9: this model's are max_pixels, min_pixels, size",
        ),
        ("qwen3-vl", {"max_pixels": -1}, r"image_options\['max_pixels'\]=-1: must be an integer of at least 1"),
        ("gemma4", {"max_soft_tokens": 71}, r"image_options=\{'max_soft_tokens': 71\}: .*cannot be processed"),
        (
            "gemma3",
            {"size": 56},
            r"image_options\['size'\]=56: must be a mapping, such as \{'height': 56, 'width': 56\}",
        ),
        ("gemma3", {"max_pixels": 9}, r"this model's are do_pan_and_scan, size"),
        ("gemma3", {"do_pan_and_scan": 7}, r"image_options=\{'do_pan_and_scan': 7\}: .*cannot be processed"),
    ],
)
def test_options_that_a_processor_does_not_take(
    name: str, options: dict[str, int], message: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    with pytest.raises(ValueError, match=message):
        processor_of(checkpoint(name).folder, checkpoint(name).config, options)


@pytest.mark.parametrize(
    ("text", "count", "message"),
    [
        ("no image", 1, "prompts\\[3\\] has 0 placeholders, '<image>', for 1 images: must have one for each"),
        ("<image> and <image>", 1, "has 2 placeholders, '<image>', for 1 images"),
        ([5, 6, 7], 2, r"has 0 placeholders, token \d+, for 2 images"),
        ("<image>" * 3, 3, "has 3 images: must have 1 to limit_images_per_prompt=2"),
    ],
)
def test_placeholders_are_as_many_as_images(
    text: str | list[int], count: int, message: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    ours = checkpoint("qwen3-vl")
    processor = processor_of(ours.folder, ours.config, most_images=2)
    with pytest.raises(ValueError, match=message):
        processor.prepare("prompts[3]", text, [picture(64, 64)] * count)


def test_an_error_names_the_prompt_and_the_image(checkpoint: Callable[[str], Checkpoint]) -> None:
    ours = checkpoint("qwen3-vl")
    with pytest.raises(ValueError, match=r"image 1 of prompts\[3\] cannot be read as an image"):
        ours.processor.prepare("prompts[3]", ours.text(2), [picture(64, 64), b"no image"])
    with pytest.raises(ValueError, match=r"image 0 of prompts\[3\], 400 x 1 pixels: cannot be processed: .*aspect"):
        ours.processor.prepare("prompts[3]", ours.text(1), [picture(400, 1)])


def test_the_models_own_token_must_not_stand_elsewhere(checkpoint: Callable[[str], Checkpoint]) -> None:
    ours = checkpoint("gemma3")
    with pytest.raises(ValueError, match=r"has token \d+, for images, where no image is"):
        ours.processor.prepare("prompt", f"{ours.text(1)}{IMAGE}", [picture(64, 64)])


def test_images_side_by_side_have_no_positions_of_three_parts(checkpoint: Callable[[str], Checkpoint]) -> None:
    with pytest.raises(
        ValueError, match="prompt has image 0 and image 1 side by side: this model needs a token between them"
    ):
        checkpoint("qwen3-vl").processor.prepare("prompt", IMAGE * 2, [picture(64, 64)] * 2)


def test_pixels_are_made_when_they_are_read(checkpoint: Callable[[str], Checkpoint]) -> None:
    ours = checkpoint("qwen3-vl")
    image = np.asarray(picture(64, 64)).copy()
    (pixels,) = ours.processor.prepare("prompt", ours.text(1), [image]).pixels
    first = dict(pixels)
    assert bytes_of(pixels) == bytes_of(first)
    sent = pickle.loads(pickle.dumps(pixels))
    sent.load = processor_of(ours.folder, ours.config).images.load  # that of another process
    torch.testing.assert_close(dict(sent), first, atol=0, rtol=0)
    image[0, 0] ^= 1
    with pytest.raises(ValueError, match="image 0 of prompt has changed since it was first read"):
        dict(pixels)


def test_images_of_one_size_are_processed_for_their_pixels_alone(
    checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = checkpoint("qwen3-vl")
    ours.processor.prepare("prompt", ours.text(1), [picture(70, 90)])
    monkeypatch.setattr(ours.processor.images, "_stand_in", None)
    ours.processor.prepare("prompt", ours.text(1), [picture(70, 90, seed=1)])


def test_threads_share_a_processor(checkpoint: Callable[[str], Checkpoint]) -> None:
    ours = checkpoint("gemma4")
    images = [picture(64 + seed, 80, seed) for seed in range(16)]
    wanted = [ours.processor.prepare("prompt", ours.text(1), [image]).token_ids for image in images]
    shared = processor_of(ours.folder, ours.config)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda image: shared.prepare("prompt", ours.text(1), [image]), images))
    assert [prompt.token_ids for prompt in found] == wanted


@pytest.mark.parametrize("name", of_each_kind(["qwen3-vl", "mistral3", "gemma4", "qwen2.5-vl"], 0, 1))
def test_embeddings_do_not_depend_on_the_batch(name: str, checkpoint: Callable[[str], Checkpoint]) -> None:
    ours = checkpoint(name)
    images = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    pixels = by_image(ours.processor.prepare("prompt", ours.text(len(images)), images))
    together = ours.tower.encode(pixels)
    for one, other in zip(together, ours.make_tower(batch_bytes=1).encode(pixels), strict=True):
        torch.testing.assert_close(one.embeddings, other.embeddings, atol=1e-5, rtol=1e-5)


def test_an_image_may_have_one_token(checkpoint: Callable[[str], Checkpoint]) -> None:
    ours = checkpoint("mistral3")
    tiny, other = by_image(ours.processor.prepare("prompt", ours.text(2), [picture(3, 5), picture(61, 97)]))
    (alone,), (beside, _) = ours.tower.encode([tiny]), ours.tower.encode([tiny, other])
    assert alone.embeddings.shape[0] == 1
    torch.testing.assert_close(alone.embeddings, beside.embeddings, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", of_each_kind(SEEING, *map(list(SEEING).index, ("qwen2.5-vl", "qwen3-vl", "smolvlm"))))
def test_fewer_passes_over_memory(
    name: str, checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where a product applies GELU by tanh: images of one size are neighbours, and others are not."""

    def with_tanh(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, use_gelu: bool) -> torch.Tensor:
        assert use_gelu
        return F.gelu(torch.addmm(bias, x, weight), approximate="tanh")

    monkeypatch.setattr(torch, "_addmm_activation", with_tanh)  # the CPU's has no tanh
    ours = checkpoint(name)
    images = [picture(*size, seed) for seed, size in enumerate([*SIZES, SIZES[-1]])]
    pixels = by_image(ours.processor.prepare("prompt", ours.text(len(images)), images))
    wanted, tower = ours.tower.encode(pixels), ours.make_tower()
    take_fewer_passes(tower._model)
    for one, other in zip(tower.encode(pixels), wanted, strict=True):
        torch.testing.assert_close((one.embeddings, *one.deep), (other.embeddings, *other.deep), atol=1e-5, rtol=1e-5)


def test_batches_have_at_most_so_many_bytes(checkpoint: Callable[[str], Checkpoint]) -> None:
    ours = checkpoint("gemma3")  # its images all become equally large
    images = [picture(64, 64, seed) for seed in range(5)]
    pixels = by_image(ours.processor.prepare("prompt", ours.text(5), images))
    tower = ours.make_tower(batch_bytes=2 * bytes_of(pixels[0]) + 1)
    assert [len(batch) for batch in tower._batches(pixels)] == [2, 2, 1]
    assert len(tower.encode(pixels)) == 5
    assert tower.encode([]) == []


@each_class
def test_the_largest_batch_is_tried(
    name: str, checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = checkpoint(name)
    image, batches = largest_pixels(Config(ours.folder)), list[Any]()
    tower = ours.make_tower(batch_bytes=2 * bytes_of(image))
    monkeypatch.setattr(tower, "_encode", lambda batch: batches.append(batch) or [])
    assert tower.try_largest(image) == []
    (batch,) = batches
    assert len(batch) == (1 if "istral" in name else 2)
    assert all(each.keys() == ours.processor.images.largest().pixels.keys() for each in batch)


@pytest.mark.parametrize("name", of_each_kind(SEEING, list(SEEING).index("qwen3-vl"), list(SEEING).index("gemma4")))
def test_a_tower_has_a_dtype_of_its_own(name: str, checkpoint: Callable[[str], Checkpoint]) -> None:
    ours = checkpoint(name)
    tower = TransformersTower(ours.config, torch.bfloat16, CPU)
    FileSource(ours.folder, OfTower()).fill(tower.table())
    pixels = by_image(ours.processor.prepare("prompt", ours.text(1), [picture(64, 64)]))
    (rounded,) = tower.encode(pixels)
    oracle = AutoModelForImageTextToText.from_pretrained(ours.folder, dtype=torch.bfloat16).eval()
    inputs = {key: tensor for key, tensor in pixels[0].items() if key != COUNT}
    if hasattr(oracle.model, "vision_model"):  # takes tiles of all images of a prompt
        inputs = {key: tensor[None] for key, tensor in inputs.items()}
    with torch.inference_mode():
        features = oracle.model.get_image_features(**inputs, return_dict=True)
    assert torch.equal(rounded.embeddings, features.pooler_output[0] * scale_of(ours.config))


def test_a_tower_has_no_memory_for_the_language_model(checkpoint: Callable[[str], Checkpoint]) -> None:
    for name in ("gemma4", "qwen3-vl"):
        tower = checkpoint(name).tower
        assert all(key.startswith(TOWER) for key in tower.table())
        assert all(not tensor.is_meta for tensor in tower._model.buffers())


@pytest.mark.parametrize(
    ("stored", "known"),
    [
        ("model.visual.blocks.0.norm1.bias", "visual.blocks.0.norm1.bias"),
        ("visual.merger.mlp.0.weight", "visual.merger.mlp.0.weight"),
        ("vision_tower.vision_model.post_layernorm.bias", "vision_tower.post_layernorm.bias"),
        ("model.vision_embedder.patch_ln1.bias", "embed_vision.patch_ln1.bias"),
        ("model.embed_vision.embedding_projection.weight", "embed_vision.embedding_projection.weight"),
        ("embed_vision.multimodal_embedder.embedding_projection.weight", "embed_vision.embedding_projection.weight"),
        ("model.vision_tower.patch_conv.weight", "vision_tower.patch_conv.weight"),
        ("multi_modal_projector.linear_1.weight", "multi_modal_projector.linear_1.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", None),
        ("model.audio_tower.layers.0.norm.weight", None),
        ("lm_head.weight", None),
    ],
)
def test_names_of_a_towers_tensors(stored: str, known: str | None) -> None:
    assert OfTower().known_name(stored) == known


def test_random_weights_fill_a_tower(checkpoint: Callable[[str], Checkpoint]) -> None:
    ours = checkpoint("qwen3-vl")
    RandomSource(0, CPU).fill(ours.make_tower().table())


def test_a_chat_is_what_its_template_writes(checkpoint: Callable[[str], Checkpoint]) -> None:
    ours = checkpoint("qwen3-vl")
    image = picture(64, 64)
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "what?"}]}]
    bare, (images, *_) = take_media("messages", messages)
    text = ours.oracle.tokenizer.apply_chat_template(bare, tokenize=False)
    wanted = ours.oracle.apply_chat_template(messages, tokenize=True, return_dict=True)
    assert (
        ours.processor.prepare("messages", text, images, add_special_tokens=False).token_ids == wanted["input_ids"][0]
    )
