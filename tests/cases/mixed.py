"""32 prompts of 1 to 300 tokens, and what the bundled model says behind them, in mixed.json.

PYTHONPATH=tests:tests/cases python tests/cases/mixed.py     # transformers makes them again, for a minute
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

FILE = Path(__file__).parent / "mixed.json"
Greedy = Callable[..., list[int]]  # of a prompt, the number of tokens, and ignore_eos


class Mixed(NamedTuple):
    """Prompts, and up to 32 greedy tokens of each in float32."""

    prompts: list[list[int]]
    expected: list[list[int]]

    @classmethod
    def read(cls) -> Mixed:
        return cls(**json.loads(FILE.read_text("utf-8")))

    @classmethod
    def make(cls, greedy: Greedy) -> Mixed:
        """Cut passages of the text that the bundled model knows, anywhere."""
        generator = torch.Generator().manual_seed(7)
        text = greedy([30, 31], 500, ignore_eos=True)
        lengths = [1, 2, 15, 16, 17, 255, 256, 257, 300, *torch.randint(1, 301, (23,), generator=generator).tolist()]
        starts = torch.randint(0, 200, (32,), generator=generator).tolist()
        prompts = [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        return cls(prompts, [greedy(prompt, 32) for prompt in prompts])


if __name__ == "__main__":
    from conftest import Oracle

    from nanoinfer import BUNDLED_MODEL

    FILE.write_text(json.dumps(Mixed.make(Oracle(BUNDLED_MODEL).greedy)._asdict()) + "\n", "utf-8")
