"""How the tokens of one request are chosen and when it ends."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling settings.

    temperature: logits are divided by it before the draw; 0 takes the most likely token.
    max_tokens: the most tokens to generate; the model's length may end a request sooner.
    ignore_eos: generate past end-of-sequence tokens, as benchmarks do.
    seed: makes the request's draws reproducible whatever runs beside it; None derives one from the engine's seed.

    Raises ValueError for a setting out of its range.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, (int, float)) or not 0 <= self.temperature <= sys.float_info.max:
            raise ValueError(f"temperature={self.temperature!r}: must be 0 (greedy) or a positive finite number")
        if not isinstance(self.max_tokens, int) or isinstance(self.max_tokens, bool) or self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens!r}: must be an integer of at least 1")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={self.ignore_eos!r}: must be True or False")
        if self.seed is not None and (not isinstance(self.seed, int) or not 0 <= self.seed < 2**63):
            raise ValueError(f"seed={self.seed!r}: must be None or an integer from 0 to 2**63 - 1")
