"""Masks of tokens that may be drawn. Rows that want no more have theirs in `draw_lines`, without a copy of logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import cdiv, launch_options, wait_for_predecessor

BLOCK = 4096  # tokens in a slice of the vocabulary


def apply_masks(logits: Tensor, masks: Tensor) -> Tensor:
    """Return the logits, [rows, vocabulary], with -inf for each token that may not be drawn.

    masks: [rows, words] int32; bit i % 32 of word i // 32 says whether token i may be drawn
    """
    return (apply_masks_triton if logits.is_cuda else apply_masks_reference)(logits, masks)


def apply_masks_reference(logits: Tensor, masks: Tensor) -> Tensor:
    """apply_masks in torch."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = (masks[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(allowed == 0, float("-inf"))


def apply_masks_triton(logits: Tensor, masks: Tensor) -> Tensor:
    """apply_masks as one launch."""
    rows, vocabulary = logits.shape
    out = torch.empty((rows, vocabulary), dtype=logits.dtype, device=logits.device)
    _mask_kernel[(rows, cdiv(vocabulary, BLOCK))](
        logits, masks, out, vocabulary, logits.stride(0), masks.stride(0), BLOCK=BLOCK, **launch_options(logits)
    )
    return out


@triton.jit
def _mask_kernel(
    logits_ptr, masks_ptr, out_ptr, vocabulary, row_stride, mask_stride, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_predecessor(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < vocabulary
    x = tl.load(logits_ptr + row * row_stride + column, mask=exists, other=0.0)
    word = tl.load(masks_ptr + row * mask_stride + column // 32, mask=exists, other=0)
    out = tl.where((word >> column % 32) & 1 != 0, x, float("-inf"))
    tl.store(out_ptr + row * vocabulary + column, out, mask=exists)
