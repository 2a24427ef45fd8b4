"""The tokens of a row in a step that verifies guesses, inside kernels: the row's last token, and guesses behind it."""

from __future__ import annotations

import triton
import triton.language as tl

from nanoinfer.kernels.launch import load_complete

PLACES = 16  # of a row, at most, as tiles have them; see drafting.options.MOST_GUESSES


@triton.jit
def places_of(row, slot, rows, first_ptr, counts_ptr, PLACES: tl.constexpr):
    """Return the places of a row among a step's tokens, [PLACES], and how many it has; none if it is empty."""
    r = tl.arange(0, PLACES)
    count = tl.where(slot >= 0, 1 + tl.load(counts_ptr + row), 0)
    return tl.where(r == 0, row, rows + tl.load(first_ptr + row) + r - 1), count


@triton.jit
def convolve_places(
    where, tokens, channel, mask, is_mine, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, LENGTH: tl.constexpr
):
    """Convolve a row's tokens in some channels, as convolve_rows does with SiLU; returns [PLACES, channels] in float32.

    where: as for convolve_past, and the step's inputs; tokens: their places, how many there are, and a token's stride
    is_mine: [channels], those whose inputs this program remembers
    """
    inputs_ptr, weight_ptr, bias_ptr, slot, position, x_ptr = where
    place, count, x_stride = tokens
    r = tl.arange(0, place.shape[0])
    total = tl.zeros([place.shape[0], channel.shape[0]], tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(WIDTH - 1, 0, -1):
        at = position + r - back
        entry = slot * LENGTH + tl.maximum(at, 0) % LENGTH
        is_old = (r < back) & (r < count) & (at >= 0)
        old = load_complete(inputs_ptr + entry[:, None] * CHANNELS + channel, is_old[:, None] & mask, 0.0)
        before = tl.where(r == back, tl.min(place), place - back)
        is_new = (r >= back) & (r < count)
        new = tl.load(x_ptr + before[:, None] * x_stride + channel, mask=is_new[:, None] & mask, other=0.0)
        weight = tl.load(weight_ptr + channel * WIDTH + WIDTH - 1 - back, mask=mask, other=0.0)
        total += tl.where((r < back)[:, None], old, new).to(tl.float32) * weight.to(tl.float32)[None, :]
    x = tl.load(x_ptr + place[:, None] * x_stride + channel, mask=(r < count)[:, None] & mask, other=0.0)
    weight = tl.load(weight_ptr + channel * WIDTH + WIDTH - 1, mask=mask, other=0.0)
    total += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    entry = slot * LENGTH + tl.maximum(position + r, 0) % LENGTH
    tl.store(inputs_ptr + entry[:, None] * CHANNELS + channel, x, mask=(r < count)[:, None] & (mask & is_mine))
    return (total * tl.sigmoid(total)).to(x.dtype).to(tl.float32)


@triton.jit
def totals_of(log_decay, before, offset, is_token, TOKENS: tl.constexpr):
    """Return the logarithms of decays from the boundary up to each of a row's tokens, and as the ring has them.

    log_decay: [PLACES]; before: up to the token before these; offset: [PLACES], a token's from the boundary
    """
    total = before + tl.cumsum(tl.where(is_token, log_decay, 0.0), axis=0)
    at_boundary = tl.sum(tl.where(offset == TOKENS - 1, total, 0.0), axis=0)
    return total, tl.where(offset >= TOKENS, total - at_boundary, total)


@triton.jit
def times_matrix(x, matrix):
    """Return the product with a matrix of float32 numbers, each of which x's dtype has as a sum of two."""
    if x.dtype == tl.float32:
        return tl.dot(x, matrix, input_precision="ieee")
    else:
        upper = matrix.to(x.dtype)
        lower = (matrix - upper.to(tl.float32)).to(x.dtype)
        return tl.dot(x, lower, tl.dot(x, upper))
