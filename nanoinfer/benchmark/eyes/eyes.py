"""How a published shape sees, and the files that say so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoinfer.benchmark.eyes.tower import Tower
from nanoinfer.hub import BUNDLED_MODEL

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 1024  # of an image in pixels
CHAT_TEMPLATE = """\
{% for message in messages %}{{ message.role }}:
{% for part in message.content %}\
{{ part.text if part.type == "text" else PART }}\
{% endfor %}

{% endfor %}"""


@dataclass(frozen=True)
class Eyes:
    """How a shape sees images of SIDE x SIDE.

    config: the model's config.json, but for the language model's
    preprocessor: its preprocessor_config.json
    tokens: the names of tokens around images and in their places, by their ids
    part: Jinja's expression for the text of a message's `part` that is an image, or a video if the model takes any
    given: the tokens that stand for an image in a prompt as generate takes it; those that it becomes: `seen`
    tower: what is multiplied for an image
    named: tokens that the tokenizer's files name
    """

    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any]
    tokens: Mapping[int, str]
    part: str
    given: list[int]
    seen: list[int]
    tower: Tower
    named: Mapping[str, str] = field(default_factory=dict)

    def around(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config of a model that sees; text: that of its language model."""
        inner = {name: value for name, value in text.items() if name != "architectures"}
        return {**self.config, "tie_word_embeddings": text["tie_word_embeddings"], "text_config": inner}

    def write_processor(self, folder: str) -> None:
        """Write what processes images; the bundled tokenizer with this shape's tokens, and a chat template."""
        target, source = Path(folder), Path(BUNDLED_MODEL)
        (target / "preprocessor_config.json").write_text(json.dumps(self.preprocessor), "utf-8")
        tokenizer = json.loads((source / "tokenizer.json").read_text("utf-8"))
        how = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for token_id, name in self.tokens.items():
            tokenizer["model"]["vocab"][name] = token_id
            tokenizer["added_tokens"].append({"id": token_id, "content": name, **how})
        (target / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
        settings = json.loads((source / "tokenizer_config.json").read_text("utf-8"))
        if self.named:
            settings["extra_special_tokens"] = self.named
        (target / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
        (target / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("PART", self.part), "utf-8")


def draw_images(count: int, repeat: int) -> list[Image]:
    """Return images of SIDE x SIDE random pixels, decoded: others in each repeat."""
    from PIL.Image import fromarray  # here, for it comes with an extra

    generator = np.random.default_rng(repeat)
    return [fromarray(generator.integers(0, 256, (SIDE, SIDE, 3), np.uint8)) for _ in range(count)]
