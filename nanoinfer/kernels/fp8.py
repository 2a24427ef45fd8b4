"""Numbers of eight bits: the e4m3 of Micikevicius et al., 2022."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest number; those beyond become NaN, if nobody limits them before


def as_bytes(x: Tensor) -> Tensor:
    """View an FP8 tensor as uint8, which torch can index everywhere; others stay what they are."""
    return x.view(torch.uint8) if x.dtype == FP8 else x
