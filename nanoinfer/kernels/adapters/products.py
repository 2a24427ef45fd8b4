"""The two products of adapters, for rows that are sorted by slot: h = a x, and y + b h.

All parts of a weight share x, so one launch multiplies it by all of their a. In a step of few rows several programs
divide the inputs; the second product, which reads h anyway, adds up their pieces. How the inputs are divided depends on
their number alone, and one program that multiplies all of them adds up in the same order. So a row has the same bits in
any company. The second product also applies the activation of gates and ups, which saves a launch behind it.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.adapters.pairs import AdapterRows, Pairs, SortedRows, load_tile, outputs_of
from nanoinfer.kernels.launch import (
    cdiv,
    fetch,
    fetch_rows,
    launch_options,
    load_complete,
    next_power_of_2,
    num_multiprocessors,
    start_successor,
    wait_for_predecessor,
)
from nanoinfer.kernels.linear.activation import Activation, gate_mul, gate_mul_block, gate_mul_reference
from nanoinfer.kernels.linear.operands.plain import add_product

MAX_PIECES = 8
MIN_SHARE = 512  # inputs of a piece
MAX_BUSY = 1 / 4  # of the multiprocessors; if more have a tile, pieces are more bytes than they save (not measured)
MAX_COLUMNS = 64  # of h, in a tile
BLOCK_N, BLOCK_R = 128, 32  # outputs in a tile, and numbers of h that are multiplied at a time, at most
BLOCK_N32, BLOCK_R32 = 32, 16  # in float32, which no tensor core multiplies
WARPS, MAX_SPAN = 24, 8  # of expand, on a multiprocessor; and blocks in a row of a program (not measured)
BLOCK_K = 128  # inputs that are multiplied at a time, of 16 bits
UNDER_WAY = 80 << 10  # bytes that a program of few rows loads ahead; two such fit on a multiprocessor (not measured)


def shrink(x: Tensor, pairs: Pairs, rows: AdapterRows, h: Tensor | None = None) -> Tensor:
    """Compute h = a[slot] @ x of each row that has an adapter; other rows of the result are any.

    x: [rows, in_features]
    h: of pieces_for, filled and returned; made before the last launch, a product of the same x, beside which this one
        runs. None: x may be what the last launch makes
    Returns pieces, [pieces, rows, parts * rank] float32, that add up to h.
    """
    return shrink_triton(x, pairs, rows, h) if x.is_cuda else shrink_reference(x, pairs, rows)


def shrink_reference(x: Tensor, pairs: Pairs, rows: AdapterRows) -> Tensor:
    """shrink in torch, of one piece: the host goes over the slots."""
    h = torch.zeros(1, len(x), pairs.a.shape[1], device=x.device)
    for slot in rows.named():
        own = rows.slots == slot
        h[0, own] = (x[own] @ pairs.a[slot].t()).float()
    return h


def pieces_for(x: Tensor, pairs: Pairs, rows: SortedRows) -> Tensor:
    """Return room for shrink's result."""
    count, columns = len(rows.groups.choices), pairs.a.shape[1]
    tiles = cdiv(columns, MAX_COLUMNS) * cdiv(count, rows.size)
    pieces = _shares(x)[1] if tiles <= MAX_BUSY * num_multiprocessors(x.device) else 1
    return torch.empty((pieces, count, columns), dtype=torch.float32, device=x.device)


def _shares(x: Tensor) -> tuple[int, int]:
    """Return how many inputs a share has, and how many shares there are: by the number of inputs alone."""
    share = max(cdiv(cdiv(x.shape[1], MAX_PIECES), BLOCK_K) * BLOCK_K, MIN_SHARE)
    return share, cdiv(x.shape[1], share)


def shrink_triton(x: Tensor, pairs: Pairs, rows: SortedRows, h: Tensor | None = None, used: int = 1) -> Tensor:
    """shrink as one launch. used: so many neighbouring rows share one of x; 0: x has the order of the groups"""
    in_features, columns = x.shape[1], pairs.a.shape[1]
    assert x.is_contiguous()
    assert pairs.a.is_contiguous()
    is_beside, h = h is not None, pieces_for(x, pairs, rows) if h is None else h
    block_n = min(next_power_of_2(columns), MAX_COLUMNS)
    share, shares = _shares(x)
    stages = min(share // BLOCK_K, UNDER_WAY // ((rows.size + block_n) * BLOCK_K * 2)) + 1
    _shrink_kernel[(cdiv(columns, block_n), len(h), len(rows.groups.tiles))](  # empty tiles come last
        x,
        pairs.a,
        *rows.groups,
        h,
        h.shape[1],
        in_features,
        columns,
        rows.max_adapters,
        share,
        shares,
        USED=used,
        WHOLE=in_features % share == 0,
        BESIDE=is_beside,
        FETCHED=MIN_SHARE,
        BLOCK_M=rows.size,
        BLOCK_N=block_n,
        BLOCK_K=BLOCK_K * 2 // x.itemsize,
        num_warps=4 if rows.size == 16 or x.itemsize == 2 else 8,
        num_stages=3 if rows.size > 16 else min(stages, 4) if is_beside else stages,  # beside it is little room
        **launch_options(x),
    )
    return h


@triton.jit(do_not_specialize=["tokens", "slots", "shares"])
def _shrink_kernel(
    x_ptr,
    a_ptr,
    choices_ptr,
    tiles_ptr,
    h_ptr,
    tokens,
    in_features,
    columns,
    slots,
    share,
    shares,
    USED: tl.constexpr,
    WHOLE: tl.constexpr,
    BESIDE: tl.constexpr,
    FETCHED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    TOKENS_LEFT: tl.constexpr = BLOCK_M >= 64
    CACHE: tl.constexpr = ".cg" if BESIDE else ""  # x is complete, but the L1 cache may hold older numbers
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    piece = tl.program_id(1)
    matrix, first, end = load_tile(tiles_ptr, tl.program_id(2), tl.num_programs(2), slots)
    position = first + tl.arange(0, BLOCK_M)
    exists = position < end
    row = load_complete(choices_ptr + position, exists, 0)
    if BESIDE:
        start_successor(EARLY)
    else:
        if (first < end) & (matrix >= 0):
            fetch_rows(a_ptr, matrix * columns + n, (matrix + 1) * columns, in_features, piece * share, FETCHED, EARLY)
        wait_for_predecessor(EARLY)
    if (first < end) & (matrix >= 0):
        source = row // USED if USED else position
        x_ptrs = x_ptr + source.to(tl.int64)[:, None] * in_features + k[None, :]
        a_ptrs = a_ptr + (matrix.to(tl.int64) * columns + n[:, None]) * in_features + k[None, :]
        has_row, has_column = exists[:, None], (n < columns)[:, None]
        h = tl.zeros([BLOCK_M, BLOCK_N] if TOKENS_LEFT else [BLOCK_N, BLOCK_M], tl.float32)
        for number in range(piece, shares, tl.num_programs(1)):  # its own, or all of them
            of_share = tl.zeros([BLOCK_M, BLOCK_N] if TOKENS_LEFT else [BLOCK_N, BLOCK_M], tl.float32)
            for start in range(number * share, (number + 1) * share, BLOCK_K):
                x_mask, a_mask = has_row, has_column
                if not WHOLE:
                    inside = (start + k < in_features)[None, :]
                    x_mask, a_mask = has_row & inside, has_column & inside
                x = tl.load(x_ptrs + start, mask=x_mask, other=0.0, cache_modifier=CACHE)
                a = tl.load(a_ptrs + start, mask=a_mask, other=0.0)
                of_share = add_product(of_share, x, a, TOKENS_LEFT)
            h += of_share
        if not TOKENS_LEFT:
            h = tl.trans(h)
        targets = h_ptr + (piece * tokens + row).to(tl.int64)[:, None] * columns + n[None, :]
        tl.store(targets, h, mask=has_row & (n < columns)[None, :])
    if BESIDE:
        wait_for_predecessor(EARLY, START_SUCCESSOR=False)  # its results are the successor's input, too


def expand(h: Tensor, pairs: Pairs, rows: AdapterRows, y: Tensor, activation: Activation | None = None) -> Tensor:
    """Add b[slot] @ h to each row of y that has an adapter, in place; with an activation, return its results instead.

    h: shrink's result; it is rounded to the dtype of b, then multiplied
    y: [rows, out_features], the product of the weight, or its first piece
    activation: y and b have gates in their first half and ups in their second: returns act(gate) * up of all rows,
        [rows, out_features // 2], and y is any afterwards
    """
    return (expand_triton if y.is_cuda else expand_reference)(h, pairs, rows, y, activation)


def expand_reference(
    h: Tensor,
    pairs: Pairs,
    rows: AdapterRows,
    y: Tensor,
    activation: Activation | None = None,
    cut: Sequence[int] | None = None,
) -> Tensor:
    """expand in torch: the host goes over the slots.

    cut: so many neighbouring outputs, of one part, are multiplied at once; None: all of a part
    """
    inputs, sizes = h.sum(dim=0).to(pairs.b.dtype).split(pairs.rank, dim=1), cut or pairs.parts
    ends = list(accumulate(pairs.parts))
    own_inputs = [inputs[bisect(ends, first)] for first in accumulate(sizes[:-1], initial=0)]
    for slot in rows.named():
        own = rows.slots == slot
        matrices = pairs.b[slot].split(list(sizes))
        delta = torch.cat([part[own] @ b.t() for part, b in zip(own_inputs, matrices, strict=True)], dim=1)
        y[own] = (y[own].float() + delta.float()).to(y.dtype)
    return y if activation is None else gate_mul_reference(y, activation)


def expand_triton(
    h: Tensor, pairs: Pairs, rows: SortedRows, y: Tensor | None = None, activation: Activation | None = None
) -> Tensor:
    """expand as one launch. y: None: zeros, which are neither made nor read"""
    (_, weight_rows, rank), tokens = pairs.b.shape, h.shape[1]
    assert y is None or y.is_contiguous()
    assert pairs.b.is_contiguous()
    assert sum(pairs.parts) == weight_rows
    gated = activation is not None
    if activation is not None and pairs.parts not in ((weight_rows,), (weight_rows // 2,) * 2):
        return gate_mul(expand_triton(h, pairs, rows, y), activation)
    out_features = weight_rows // 2 if gated else weight_rows
    out = (pairs.b if y is None else y).new_empty(tokens, out_features) if y is None or gated else y
    block_n, most = (BLOCK_N, BLOCK_R) if pairs.b.itemsize == 2 else (BLOCK_N32, BLOCK_R32)
    block_n //= 2 if gated and rows.size > 16 else 1  # each block is two: one of gates and one of ups
    parts = (out_features,) if gated else pairs.parts
    blocks = sum(cdiv(part, block_n) for part in parts)
    num_warps = 4 if rows.size == 16 and not gated else 8
    span, grid = _divide(blocks, rows, WARPS // num_warps * num_multiprocessors(h.device))
    _expand_kernel[grid](
        h,
        pairs.b,
        *rows.groups,
        y,
        out,
        out_features,
        tokens,
        h.shape[2],
        rows.max_adapters,
        len(rows.groups.tiles),
        blocks,
        span,
        PIECES=len(h),
        PARTS=parts,
        UP=(len(pairs.parts) - 1) * rank,
        ACTIVATION=activation,
        RANK=rank,
        BLOCK_R=math.gcd(rank, most),
        BLOCK_M=rows.size,
        BLOCK_N=block_n,
        num_warps=num_warps,
        num_stages=1,
        **launch_options(h),
    )
    return out


def _divide(blocks: int, rows: SortedRows, programs: int) -> tuple[int, tuple[int, int]]:
    """Return how many blocks of outputs in a row a program computes for each of its tiles of rows, and the grid.

    programs: that run at once; if there were more, the last ones would take as long again
    The L1 cache keeps h from one block to the next. This counts as many tiles as the rows fill if they name one slot.
    """
    span = min(cdiv(blocks * cdiv(len(rows.groups.choices), rows.size), programs), MAX_SPAN)
    spans = cdiv(blocks, span)
    return span, (spans, min(max(programs // spans, 1), len(rows.groups.tiles)))


@triton.jit(do_not_specialize=["tokens", "slots", "tiles", "blocks", "span"])
def _expand_kernel(
    h_ptr,
    b_ptr,
    choices_ptr,
    tiles_ptr,
    y_ptr,
    out_ptr,
    out_features,
    tokens,
    columns,
    slots,
    tiles,
    blocks,
    span,
    PIECES: tl.constexpr,
    PARTS: tl.constexpr,
    UP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION is not None
    ALL: tl.constexpr = GATED or y_ptr is None  # rows without an adapter are stored, too
    weight_rows = out_features * 2 if GATED else out_features
    first_block, tile = tl.program_id(0) * span, tl.program_id(1)
    matrix, first, end = load_tile(tiles_ptr, tile, tiles, slots)
    if (first < end) & (matrix >= 0):
        _, n, _ = outputs_of(first_block, PARTS, BLOCK_N)
        _fetch_b(b_ptr, matrix, n, out_features, RANK, GATED, EARLY)
    wait_for_predecessor(EARLY)
    of_piece, r = tokens.to(tl.int64) * columns, tl.arange(0, BLOCK_R)
    while first < end:
        tile += tl.num_programs(1)
        next_matrix, next_first, next_end = load_tile(tiles_ptr, tile, tiles, slots)
        is_other = (next_first < next_end) & (next_matrix >= 0) & (next_matrix != matrix)
        if ALL | (matrix >= 0):
            position = first + tl.arange(0, BLOCK_M)
            exists = (position < end)[:, None]
            has_adapter = (position < tl.where(matrix >= 0, end, first))[:, None]
            row = tl.load(choices_ptr + position, mask=position < end, other=0).to(tl.int64)[:, None]
            h_ptrs = h_ptr + row * columns + r[None, :]
            for block in tl.range(first_block, tl.minimum(first_block + span, blocks), disable_licm=True):
                part, n, stop = outputs_of(block, PARTS, BLOCK_N)
                mask = exists & (n < stop)[None, :]
                # What is loaded behind the products would wait for them.
                y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                if y_ptr is not None:
                    y_ptrs = y_ptr + row * weight_rows + n[None, :]
                    y = tl.load(y_ptrs, mask=mask, other=0.0)
                if GATED:
                    up = tl.load(y_ptrs + out_features, mask=mask, other=0.0)
                if is_other:  # its own loads would wait until this block is stored
                    _fetch_b(b_ptr, next_matrix, n, out_features, RANK, GATED, EARLY)
                b_ptrs = b_ptr + (matrix.to(tl.int64) * weight_rows + n)[:, None] * RANK + r[None, :]
                has_b = (n < tl.where(matrix >= 0, stop, 0))[:, None]
                added, up_added = _multiply(
                    h_ptrs + part * RANK,
                    h_ptrs + UP,
                    has_adapter,
                    of_piece,
                    b_ptrs,
                    b_ptrs + out_features * RANK,
                    has_b,
                    PIECES,
                    RANK,
                    GATED,
                )
                # Of a sum, Triton makes a product that begins with y, but only where TOKENS_LEFT: these are other bits.
                out = tl.fma(added, 1.0, y.to(tl.float32)).to(out_ptr.dtype.element_ty)
                if GATED:
                    up = tl.fma(up_added, 1.0, up.to(tl.float32)).to(out.dtype)
                    out = gate_mul_block(out, up, ACTIVATION)
                tl.store(out_ptr + row * out_features + n[None, :], out, mask=mask)
        matrix, first, end = next_matrix, next_first, next_end


@triton.jit
def _fetch_b(b_ptr, matrix, n, out_features, RANK: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr):
    """Let the L2 cache fetch the rows n of a matrix, and if GATED those of the ups."""
    weight_rows = out_features * 2 if GATED else out_features
    row = matrix.to(tl.int64) * weight_rows + tl.minimum(n, out_features - 1)
    fetch(b_ptr + row * RANK, EARLY)
    if GATED:
        fetch(b_ptr + (row + out_features) * RANK, EARLY)


@triton.jit
def _multiply(
    h_ptrs,
    up_h_ptrs,
    has_h,
    of_piece,
    b_ptrs,
    up_b_ptrs,
    has_b,
    PIECES: tl.constexpr,
    RANK: tl.constexpr,
    GATED: tl.constexpr,
):
    """Return b h of each row and output, [rows, outputs], and if GATED that of the ups; pieces are of_piece apart."""
    BLOCK_M: tl.constexpr = h_ptrs.shape[0]
    BLOCK_R: tl.constexpr = h_ptrs.shape[1]
    BLOCK_N: tl.constexpr = b_ptrs.shape[0]
    TOKENS_LEFT: tl.constexpr = BLOCK_M >= 64
    out = tl.zeros([BLOCK_M, BLOCK_N] if TOKENS_LEFT else [BLOCK_N, BLOCK_M], tl.float32)
    up = out
    for first in tl.static_range(0, RANK, BLOCK_R):
        h = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        up_h = h
        for piece in tl.static_range(PIECES):
            h += tl.load(h_ptrs + first + piece * of_piece, mask=has_h, other=0.0)
            if GATED:
                up_h += tl.load(up_h_ptrs + first + piece * of_piece, mask=has_h, other=0.0)
        b = tl.load(b_ptrs + first, mask=has_b, other=0.0)
        if GATED:
            up_b = tl.load(up_b_ptrs + first, mask=has_b, other=0.0)
            up = add_product(up, up_h.to(b.dtype), up_b, TOKENS_LEFT)
        out = add_product(out, h.to(b.dtype), b, TOKENS_LEFT)
    return (out, up) if TOKENS_LEFT else (tl.trans(out), tl.trans(up))
