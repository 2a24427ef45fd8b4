"""Products with a GroupWeight on the CPU, which makes float32 of some rows of the weight at a time.

A table has the numbers of each half word. As they come out of it, neighbours of a row are inputs two or eight apart.
The tokens' vectors, of which there are few, are brought into that order.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.groups import BITS, GroupWeight, Numbers, dequantize_reference, scale_groups

NUMBERS_AT_ONCE = 1 << 20  # of the weight; fewer make more calls, and more fit no cache


def cpu_linear(x: Tensor, weight: GroupWeight, bias: Tensor | None = None) -> Tensor:
    """Compute x @ weight.T + bias: [tokens, in_features] to [tokens, out_features], in x's dtype; summed in float32."""
    in_blocks = weight.group % (128 // BITS[weight.numbers]) == 0
    wide = x.float()
    if in_blocks:
        wide = _in_halves(wide, BITS[weight.numbers])
    parts = weight.split(max(NUMBERS_AT_ONCE // weight.in_features, 1))
    tiles = (_look_up(part) if in_blocks else dequantize_reference(part, torch.float32) for part in parts)
    out = torch.cat([F.linear(wide, tile) for tile in tiles], dim=1)
    return (out if bias is None else out + bias).to(x.dtype)


def _in_halves(x: Tensor, bits: int) -> Tensor:
    """Return the inputs in the order of the words' halves."""
    return x.unflatten(1, (-1, 16 // bits, 4, 2)).permute(0, 1, 3, 4, 2).reshape(x.shape)


def _look_up(weight: GroupWeight) -> Tensor:
    """Return the weight as float32, with the inputs in the order of the words' halves."""
    halves = weight.words.contiguous().view(torch.uint16).int()
    numbers = F.embedding(halves, _numbers_of_halves(weight.numbers)).view(len(halves), -1, weight.group)
    return scale_groups(numbers, weight).flatten(1)


@functools.cache
def _numbers_of_halves(numbers: Numbers) -> Tensor:
    """Return the numbers that each half of a word stands for, [2^16, 16 / bits] float32."""
    bits = BITS[numbers]
    # In the lower halves of these words; pack's first numbers of a block are in the lower half of its first word.
    words = F.pad(torch.arange(1 << 16, dtype=torch.int32).unsqueeze(1), (0, 3))
    scales = torch.ones(1 << 16, 1)
    block = dequantize_reference(GroupWeight(words, scales, None, None, numbers, 128 // bits), torch.float32)
    return block[:, ::8].contiguous()
