"""Images: the processor and the tower make what transformers' own model makes of its processor's output."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import of_each_kind

pytest.importorskip("PIL")
pytest.importorskip("torchvision")

from cases.vision import SEEING
from PIL import Image
from transformers import AutoConfig, AutoProcessor, PreTrainedModel

from nanoinfer.vision.processor import VisionProcessor
from nanoinfer.vision.spans import Encoded, VisionPrompt
from nanoinfer.vision.tower import TransformersTower
from nanoinfer.weights.sources import FileSource, OfTower

CPU = torch.device("cpu")
SIZES = [(61, 97), (150, 40), (64, 64), (33, 200)]  # width and height: odd ones, too


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


class Checkpoint:
    """A small checkpoint that sees, by transformers and by us."""

    def __init__(self, name: str, folder: Path) -> None:
        self.seeing = SEEING[name]
        self.folder = str(folder)
        self.model: PreTrainedModel = self.seeing.build(folder)
        self.oracle: Any = AutoProcessor.from_pretrained(folder)
        self.config = AutoConfig.from_pretrained(folder)
        self.processor = VisionProcessor(self.folder, self.config)
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


def by_image(prompt: VisionPrompt) -> list[dict]:
    """The pixels of each image once, though several spans may share them."""
    return list({span.key: pixels for span, pixels in zip(prompt.spans, prompt.pixels, strict=True)}.values())


def embeddings_in(prompt: VisionPrompt, encoded: dict[bytes, Encoded]) -> torch.Tensor:
    """The embeddings that the placeholders of a prompt get, in its order."""
    return torch.cat([encoded[span.key].embeddings[span.first : span.first + span.count] for span in prompt.spans])


each_class = pytest.mark.parametrize("name", of_each_kind(SEEING, *range(len(SEEING))))


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
    inputs = {key: wanted[key] for key in prompt.pixels[0]}
    with torch.inference_mode():
        features = ours.model.model.get_image_features(**inputs, return_dict=True)
    expected = torch.cat(list(features.pooler_output))
    torch.testing.assert_close(embeddings_in(prompt, encoded), expected, atol=1e-5, rtol=1e-5)
    for layer, deep in enumerate(getattr(features, "deepstack_features", None) or []):
        found = torch.cat([one.deep[layer] for one in encoded.values()])
        torch.testing.assert_close(found, torch.cat(list(deep)), atol=1e-5, rtol=1e-5)
