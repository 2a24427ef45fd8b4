"""Launched: a step whose model runs, and whose tokens are to be drawn."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nanoinfer.kernels.drafting.pack import Places
from nanoinfer.runner.logits.lines import StepLines
from nanoinfer.runner.results.extras import Extras


@dataclass
class Launched:
    """A step whose model runs.

    rows: in the batch, for which tokens are to be drawn
    logits: [rows, this rank's token ids], in the order of the rows; of a verifying step, [places, this rank's ids]
    extras: what the step gave so far beside the tokens
    places: of a verifying step; None: another step
    size: of a decode step, its rows, empty ones too, and its places for guesses; None: another step
    sampled: all lines, and what the temperatures alone draw behind these, int32; None: that comes with the draw
    is_drawn: whether its tokens have been drawn, by temperature alone, and its rows have moved on
    """

    rows: slice
    logits: Tensor
    extras: Extras
    places: Places | None = None
    size: tuple[int, int] | None = None
    sampled: tuple[StepLines, Tensor] | None = None
    is_drawn: bool = False
