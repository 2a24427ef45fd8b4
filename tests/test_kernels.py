"""Every Triton kernel against its torch reference: interpreted on the CPU, compiled and in bfloat16 on a GPU.

The references are given float32 copies of the inputs, so a kernel may be off by its dtype's rounding and no more.
"""

from __future__ import annotations

import time

import pytest
import torch
from conftest import DEVICE, HAS_CUDA
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoinfer.kernels.attention.paged_decode import FEW_ROWS, paged_decode_reference, paged_decode_triton, plan_decode
from nanoinfer.kernels.attention.paged_prefill import paged_prefill_reference, paged_prefill_triton
from nanoinfer.kernels.attention.qkv import norm_rotate_store_reference, norm_rotate_store_triton
from nanoinfer.kernels.linear.activation import silu_mul_reference, silu_mul_triton
from nanoinfer.kernels.linear.one_row import one_row_linear, one_row_norm_linear
from nanoinfer.kernels.linear.one_wave import cut, one_wave_linear
from nanoinfer.kernels.norm.rms_norm import (
    add_rms_norm_reference,
    add_rms_norm_triton,
    rms_norm_reference,
    rms_norm_triton,
)
from nanoinfer.kernels.ranks.all_reduce_norm import all_reduce_add_rms_norm
from nanoinfer.kernels.ranks.best_of_ranks import best_of_ranks
from nanoinfer.kernels.rows import (
    advance_rows_reference,
    advance_rows_triton,
    locate_rows_reference,
    locate_rows_triton,
)
from nanoinfer.kernels.sampling.cutoff import Cutoff, find_cutoff_reference, find_cutoff_triton
from nanoinfer.kernels.sampling.draw import draw_reference, draw_triton, gumbel_noise

DTYPES = [torch.float32, torch.bfloat16] if HAS_CUDA else [torch.float32]
SHORT = torch.bfloat16 if HAS_CUDA else torch.float16  # the interpreter's products of bfloat16 are wrong
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Relative error of the whole tensor; NaN never passes."""
    assert out.shape == expected.shape
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    assert error <= TOLERANCE[out.dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 192, 1024, 5120])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    weight, x, residual = randn(size, dtype=dtype), randn(5, size, dtype=dtype), randn(5, size, dtype=dtype)
    assert_close(rms_norm_triton(x, weight, 1e-6), rms_norm_reference(x.float(), weight.float(), 1e-6))
    out, total = add_rms_norm_triton(x, residual, weight, 1e-6)
    expected, expected_total = add_rms_norm_reference(x.float(), residual.float(), weight.float(), 1e-6)
    assert_close(out, expected)
    assert_close(total, expected_total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [96, 1024, 3000])
def test_silu_mul(size: int, dtype: torch.dtype) -> None:
    gate_up = randn(7, 2 * size, dtype=dtype)
    assert_close(silu_mul_triton(gate_up), silu_mul_reference(gate_up.float()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 32), (96, 9), (2500, 50), (12288, 15)])
def test_one_row_linear(in_features: int, out_features: int, dtype: torch.dtype) -> None:
    """The last two shapes have more tiles than programs, when interpreted."""
    weight = randn(out_features, in_features, dtype=dtype)
    x, residual = (randn(1, in_features, dtype=dtype) for _ in range(2))
    norm_weight = randn(in_features, dtype=dtype)
    wide = weight.float()
    assert_close(one_row_linear(x, weight), x.float() @ wide.T)
    out, total = one_row_norm_linear(x, None, norm_weight, 1e-6, weight)
    assert_close(out, rms_norm_reference(x.float(), norm_weight.float(), 1e-6) @ wide.T)
    assert total is x
    out, total = one_row_norm_linear(x, residual, norm_weight, 1e-6, weight)
    normed, expected_total = add_rms_norm_reference(x.float(), residual.float(), norm_weight.float(), 1e-6)
    assert_close(out, normed @ wide.T)
    assert_close(total, expected_total)
    if out_features % 2 == 0:
        out, _ = one_row_norm_linear(x, residual, norm_weight, 1e-6, weight, gated=True)
        assert_close(out, silu_mul_reference(normed @ wide.T))
        assert_close(one_row_linear(x, weight, gated=True), silu_mul_reference(x.float() @ wide.T))


@pytest.mark.parametrize("tokens", [2, 17, 64, 100])
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 128), (100, 512), (128, 1152)])
def test_one_wave_linear(tokens: int, out_features: int, in_features: int) -> None:
    """Whole and in pieces, with and without gates; the last tile of tokens and of outputs may be cut short."""
    dtype = SHORT
    x, weight = randn(tokens, in_features, dtype=dtype), randn(2 * out_features, in_features, dtype=dtype)
    in_pieces = cut(tokens, out_features, in_features, 8, may_split=True)
    assert in_pieces.pieces == {128: 1, 512: 2 if tokens > 64 else 4, 1152: 1 if tokens > 64 else 3}[in_features]
    expected = x.float() @ weight.float().T
    out = one_wave_linear(x, weight[:out_features], in_pieces)
    assert out.dim() == (3 if in_pieces.pieces > 1 else 2)
    assert_close(out.view(-1, tokens, out_features).sum(dim=0), expected[:, :out_features])
    whole = cut(tokens, out_features, in_features, 8, may_split=False)
    assert whole.pieces == 1
    assert_close(one_wave_linear(x, weight, whole, gated=True), silu_mul_reference(expected))


def empty_inbox(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, -0.0, device=DEVICE, dtype=dtype)


def is_empty(inbox: torch.Tensor) -> torch.Tensor:
    return (inbox == 0) & inbox.signbit()


@pytest.mark.parametrize("one_owner", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, SHORT])
def test_all_reduce_add_rms_norm(dtype: torch.dtype, ranks: int, one_owner: bool) -> None:
    """One rank after the other, each with its inbox as the others would have filled it."""
    tokens, size = 6, 96
    parts, residual, weight = randn(ranks, tokens, size, dtype=dtype), randn(tokens, size), randn(size, dtype=dtype)
    parts[:, :, ::7], parts[:, :, 1::7], residual = -0.0, 0.0, residual.to(dtype)  # a zero is a message as well
    expected, expected_total = add_rms_norm_reference(parts.float().sum(dim=0), residual.float(), weight.float(), 1e-6)
    stop = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    owners = torch.arange(tokens, device=DEVICE) % ranks

    for rank in range(ranks):
        inboxes = [empty_inbox(ranks, tokens, size, dtype=dtype) for _ in range(ranks)]
        for peer in (peer for peer in range(ranks) if peer != rank):
            rows = owners == rank if one_owner else owners >= 0
            inboxes[rank][peer, rows] = parts[peer, rows] + 0.0
            if one_owner:
                inboxes[rank][peer, owners == peer] = expected[owners == peer].to(dtype) + 0.0
        addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=DEVICE)
        x = parts[rank].clone()
        out, total = all_reduce_add_rms_norm(x, residual, weight, 1e-6, addresses, rank, stop, one_owner)

        ours = owners == rank if one_owner else owners >= 0
        assert_close(out, expected)
        assert_close(total[ours], expected_total[ours])
        assert is_empty(inboxes[rank]).all()
        for peer in (peer for peer in range(ranks) if peer != rank):
            sent = inboxes[peer][rank]
            if one_owner:
                assert torch.equal(sent[owners == peer], parts[rank, owners == peer])
                assert torch.equal(sent[ours], out[ours])
                assert is_empty(sent[(owners != peer) & ~ours]).all()
            else:
                assert torch.equal(sent, parts[rank])
                assert not is_empty(sent).any()
            others = [source for source in range(ranks) if source != rank]
            assert is_empty(inboxes[peer][others]).all()


@pytest.mark.parametrize("one_owner", [False, True])
def test_all_reduce_and_norm_without_a_residual(one_owner: bool) -> None:
    """A rank's x is all zeros for a row that is another's, as the embedding leaves it."""
    x, weight = randn(6, 96), randn(96)
    x[1::2] = 0.0
    expected = rms_norm_reference(x, weight, 1e-6)
    inboxes = empty_inbox(2, 2, 6, 96, dtype=torch.float32)
    inboxes[0, 1] = expected + 0.0 if one_owner else 0.0
    if one_owner:
        inboxes[0, 1, ::2] = 0.0  # the other rank's part of our rows
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=DEVICE)
    stop = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out, total = all_reduce_add_rms_norm(x, None, weight, 1e-6, addresses, 0, stop, one_owner)
    assert_close(out, expected)
    assert_close(total[::2], x[::2])


@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("ranks", [2, 4])
def test_best_of_ranks(ranks: int, rows: int) -> None:
    """Scores of a few values only, so that there are ties: the lowest rank wins them, whoever asks."""
    scores = torch.randint(-1, 2, (ranks, rows), device=DEVICE).float() * -0.5  # -0.0 among them
    ids = torch.randint(0, 200_000, (ranks, rows), device=DEVICE, dtype=torch.int32)
    ids[0, 0] = 0
    winners = [scores[:, row].tolist().index(scores[:, row].max()) for row in range(rows)]
    expected = ids.gather(0, torch.tensor([winners], device=DEVICE))[0]
    stop = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for rank in range(ranks):
        inboxes = [empty_inbox(ranks, 2, rows, dtype=torch.float32) for _ in range(ranks)]
        for peer in (peer for peer in range(ranks) if peer != rank):
            inboxes[rank][peer] = torch.stack([scores[peer], ids[peer].float()]) + 0.0
        addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=DEVICE)
        assert torch.equal(best_of_ranks(scores[rank], ids[rank], addresses, rank, stop), expected)
        assert is_empty(inboxes[rank]).all()
        for peer in (peer for peer in range(ranks) if peer != rank):
            assert torch.equal(inboxes[peer][rank], torch.stack([scores[rank], ids[rank].float()]))
            assert not is_empty(inboxes[peer][rank]).any()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 20, 300])
def test_messages_that_come_late(rows: int) -> None:
    """However the moment falls between the looks of a kernel's threads, all of them see the message.

    They look at the same moments until they have asked the host whether to stop, which they do after about 1 ms.
    """
    inboxes = empty_inbox(2, 2, 2, rows, dtype=torch.float32)
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=DEVICE)
    scores, ids = torch.zeros(rows, device=DEVICE), torch.zeros(rows, device=DEVICE, dtype=torch.int32)
    message = torch.ones(2, rows, device=DEVICE)
    stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    peer = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(100):
        out = best_of_ranks(scores, ids, addresses, 0, stop)
        done = torch.cuda.Event()
        done.record()
        time.sleep(0.003)
        with torch.cuda.stream(peer):
            inboxes[0, 1].copy_(message)
        deadline = time.monotonic() + 5
        while not done.query() and stop[0] == 0:
            stop[0] = time.monotonic() > deadline
        assert stop[0] == 0
        assert (out == 1).all()
        peer.synchronize()
    assert is_empty(inboxes[0]).all()


@pytest.mark.parametrize("one_owner", [False, True])
def test_all_reduce_add_rms_norm_ends_when_told_that_nothing_will_come(one_owner: bool) -> None:
    x, weight = randn(1, 64), randn(64)
    inboxes = empty_inbox(2, 2, 1, 64, dtype=torch.float32)
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=DEVICE)
    stop = torch.ones(1, dtype=torch.int32, pin_memory=HAS_CUDA)
    out, _ = all_reduce_add_rms_norm(x, x, weight, 1e-6, addresses, 1, stop, one_owner)
    assert out.cpu().shape == (1, 64)


@pytest.mark.parametrize("dtype", [torch.float32, SHORT])
def test_add_rms_norm_of_pieces(dtype: torch.dtype) -> None:
    pieces, residual, weight = randn(4, 5, 96), randn(5, 96, dtype=dtype), randn(96, dtype=dtype)
    for out, expected in zip(
        add_rms_norm_triton(pieces, residual, weight, 1e-6),
        add_rms_norm_reference(pieces, residual.float(), weight.float(), 1e-6),
        strict=True,
    ):
        assert out.dtype == dtype
        assert_close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32), (16, 8, 128), (3, 1, 96), (5, 5, 64)])
def test_norm_rotate_store(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    qkv = randn(6, heads + 2 * kv_heads, head_dim, dtype=dtype)
    weights = [randn(head_dim, dtype=dtype) for _ in range(2)]
    angles = randn(40, head_dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.tensor([0, 1, 39, 5, -1, 7], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([0, 47, 15, 16, -1, 31], dtype=torch.int32, device=DEVICE)
    caches = [randn(3, 16, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    expected_caches = [cache.float() for cache in caches]
    q = norm_rotate_store_triton(qkv, *weights, 1e-6, cos_sin, positions, *caches, slots)
    wide = [weight.float() for weight in weights]
    assert_close(q, norm_rotate_store_reference(qkv.float(), *wide, 1e-6, cos_sin, positions, *expected_caches, slots))
    assert_close(caches[0], expected_caches[0])
    assert torch.equal(caches[1].float(), expected_caches[1])  # values are copied; nothing else is written


def test_rows_advance() -> None:
    positions = torch.tensor([5, 0, 31, -1, 16, -1], dtype=torch.int32, device=DEVICE)
    tables = torch.randint(0, 100, (6, 3), device=DEVICE).int()
    for out, expected in zip(
        locate_rows_triton(positions, tables, 16), locate_rows_reference(positions, tables, 16), strict=True
    ):
        assert torch.equal(out, expected)
    sampled = torch.arange(10, 16, device=DEVICE).int()
    for advance in (advance_rows_triton, advance_rows_reference):
        tokens, moved = torch.zeros_like(positions), positions.clone()
        advance(tokens, moved, sampled)
        assert torch.equal(tokens, sampled)
        assert moved.tolist() == [6, 1, 32, -1, 17, -1]


def paged(
    context_lens: list[int], heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches and block tables for the contexts, blocks in random order; what no context covers is NaN."""
    blocks = [-(-length // block_size) for length in context_lens]
    order = torch.randperm(sum(blocks), device=DEVICE).int()
    tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32, device=DEVICE)
    caches = [randn(sum(blocks), block_size, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    for row, (table, length) in enumerate(zip(order.split(blocks), context_lens, strict=True)):
        tables[row, : len(table)] = table
        if length % block_size:
            for cache in caches:
                cache[table[-1], length % block_size :] = float("nan")
    return caches[0], caches[1], tables


SHAPES = [(4, 4, 32, 16), (8, 4, 64, 256), (4, 1, 128, 48), (3, 3, 96, 32)]  # heads, kv_heads, head_dim, block_size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_paged_prefill(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    heads, _, head_dim, _ = shape
    query_lens, context_lens = [1, 16, 70, 3, 130], [1, 16, 100, 64, 130]
    k_cache, v_cache, tables = paged(context_lens, *shape, dtype)
    q = randn(sum(query_lens), heads, head_dim, dtype=dtype)
    cu_query_lens = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    out = paged_prefill_triton(q, k_cache, v_cache, tables, cu_query_lens, lens, max(query_lens), head_dim**-0.5)
    expected = paged_prefill_reference(
        q.float(), k_cache.float(), v_cache.float(), tables, query_lens, context_lens, head_dim**-0.5
    )
    assert_close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", [1, 3, 8, None])
@pytest.mark.parametrize("shape", SHAPES)
def test_paged_decode(shape: tuple[int, int, int, int], workers: int | None, dtype: torch.dtype) -> None:
    """Rows that one worker has, that several share, and that begin or end within a worker's share; one is empty."""
    heads, _, head_dim, _ = shape
    context_lens = [1, 16, 100, 300, 64, 0]
    k_cache, v_cache, tables = paged(context_lens, *shape, dtype)
    q = randn(len(context_lens), heads, head_dim, dtype=dtype)
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    plan = plan_decode(lens, k_cache, workers)
    k, v = (cache.float().nan_to_num() for cache in (k_cache, v_cache))
    expected = paged_decode_reference(q.float(), k, v, tables, lens, 300, head_dim**-0.5)
    for _ in range(2):  # two layers: the first leaves the plan as it was
        out = paged_decode_triton(q, k_cache, v_cache, tables, lens, head_dim**-0.5, plan)
        assert_close(out[:5], expected[:5])
        assert plan.arrivals.eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_decode_of_many_rows(dtype: torch.dtype) -> None:
    """Beyond FEW_ROWS the tiles are larger, and the loop over them shorter."""
    context_lens = [1 + 37 * row % 400 for row in range(FEW_ROWS + 8)]
    shape = (4, 2, 128, 256)
    k_cache, v_cache, tables = paged(context_lens, *shape, dtype)
    q = randn(len(context_lens), 4, 128, dtype=dtype)
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    out = paged_decode_triton(q, k_cache, v_cache, tables, lens, 0.1, plan_decode(lens, k_cache))
    k, v = (cache.float().nan_to_num() for cache in (k_cache, v_cache))
    assert_close(out, paged_decode_reference(q.float(), k, v, tables, lens, 400, 0.1))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 100), min_size=1, max_size=9), st.integers(1, 12))
def test_a_decode_plan_deals_out_every_tile_once(lens: list[int], workers: int) -> None:
    context_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    plan = plan_decode(context_lens, torch.empty(1, 16, 2, 32, device=DEVICE), workers)
    row_tiles = [-(-length // plan.tile) for length in lens]
    dealt = []
    for first_row, last_row, tile, left in plan.shares.tolist():
        assert left <= plan.share_tiles.item()
        for row in range(first_row, last_row + 1):
            took = min(row_tiles[row] - tile, left)
            dealt += [(row, tile + i) for i in range(took)]
            tile, left = 0, left - took
        assert left == 0
    assert dealt == [(row, tile) for row, tiles in enumerate(row_tiles) for tile in range(tiles)]


@pytest.mark.parametrize("vocabulary", [100, 4096, 10000])
def test_sample(vocabulary: int) -> None:
    logits = randn(8, vocabulary) * 3
    temperatures = torch.tensor([0, 0, 0.5, 1, 1, 2, 0.01, 1e-6], device=DEVICE)
    seeds = torch.tensor([0, 1, 2, 3, 2**63 - 1, 2**40, 5, 6], device=DEVICE)
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 2**20, 7], dtype=torch.int32, device=DEVICE)
    best, ids = draw_triton(logits, temperatures, seeds, positions, first_id=1000)
    expected_best, expected_ids = draw_reference(logits, temperatures, seeds, positions, first_id=1000)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(best, expected_best, rtol=1e-5, atol=1e-5)
    assert torch.equal(ids[:2], (logits[:2].argmax(dim=1) + 1000).int())


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("top_k", [1, 50, 4097, 2**31 - 1])
def test_find_cutoff(top_k: int, ties: bool) -> None:
    """Over several blocks of a vocabulary; -0.0, NaN and -inf among the logits."""
    rows = 4
    logits = randn(rows, 9001) * 3
    logits = (logits * 4).round() / 4 if ties else logits
    logits[:, 5], logits[:, 9000], logits[0, 4096] = float("nan"), float("-inf"), 20.0
    temperatures = torch.tensor([0.6, 1.0, 1.0, 1.7], device=DEVICE)
    columns = (
        torch.full((rows,), top_k, dtype=torch.int32, device=DEVICE),
        torch.tensor([0.9, 0.2, 1.0, 0.995], device=DEVICE),
        torch.tensor([0.0, 0.0, 0.01, 0.001], device=DEVICE),
    )
    expected, found = (f(logits, temperatures, *columns) for f in (find_cutoff_reference, find_cutoff_triton))
    assert torch.equal(above(expected, logits), above(found, logits))


@pytest.mark.parametrize(("top_k", "top_p"), [(7, 1.0), (2**31 - 1, 0.51)])
def test_find_cutoff_among_neighbours(top_k: int, top_p: float) -> None:
    """No number lies between these logits, nor always a pivot: each is the next of another in float32."""
    rows = 30
    neighbours = [-torch.rand(rows, 1, device=DEVICE) * 16]
    for _ in range(6):
        neighbours.append(torch.nextafter(neighbours[-1], torch.full_like(neighbours[-1], float("inf"))))
    logits = torch.cat(neighbours, dim=1).gather(1, torch.randint(7, (rows, 40)).to(DEVICE))
    settings = [torch.full((rows,), value, device=DEVICE) for value in (1.0, top_k, top_p, 0.0)]
    expected, found = (f(logits, *settings) for f in (find_cutoff_reference, find_cutoff_triton))
    assert torch.equal(above(expected, logits), above(found, logits))


def above(cutoff: Cutoff, logits: torch.Tensor) -> torch.Tensor:
    """Which tokens stay."""
    lowest, first_ids = (column[:, None] for column in cutoff)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (logits > lowest) | ((logits == lowest) & (ids >= first_ids))


def test_draw_takes_what_is_above_the_cutoff_alone() -> None:
    logits = randn(3, 9000)
    logits[:, 4000:4010] = 5.0
    cutoff = torch.tensor([5.0, 5.0, -9.0], device=DEVICE), torch.tensor([4003, 0, 0], device=DEVICE).int()
    temperatures, seeds = torch.full((3,), 100.0, device=DEVICE), torch.arange(3, device=DEVICE)
    for position in range(20):
        positions = torch.full((3,), position, dtype=torch.int32, device=DEVICE)
        ids = [f(logits, temperatures, seeds, positions, 0, cutoff)[1] for f in (draw_triton, draw_reference)]
        assert torch.equal(*ids)
        assert 4003 <= ids[0][0] < 4010
        assert 4000 <= ids[0][1] < 4010


def test_sample_takes_nan_for_impossible() -> None:
    """A row whose logits overflowed gets a token like any other; no id may leave the vocabulary."""
    logits = torch.full((3, 5000), float("nan"), device=DEVICE)
    logits[1, 4321] = -1.0
    temperatures, seeds = torch.tensor([0.0, 0.0, 1.0], device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    for function in (draw_triton, draw_reference):
        assert function(logits, temperatures, seeds, seeds.int())[1].tolist() == [0, 4321, 0]


def test_sample_takes_the_smallest_id_among_equals() -> None:
    logits = torch.zeros(1, 9000, device=DEVICE)
    logits[0, [4000, 5000, 8999]] = 1
    zeros = torch.zeros(1, device=DEVICE)
    for function in (draw_triton, draw_reference):
        assert function(logits, zeros, zeros.long(), zeros.int())[1].item() == 4000


def test_gumbel_noise_has_the_gumbel_distribution_and_no_memory_of_its_neighbours() -> None:
    seeds = torch.arange(4)[:, None, None]
    positions = torch.arange(50)[None, :, None]
    noise = gumbel_noise(seeds, positions, torch.arange(1000)).double()
    assert noise.mean().item() == pytest.approx(0.5772156649, abs=0.02)  # Euler's constant
    assert noise.var().item() == pytest.approx(torch.pi**2 / 6, abs=0.04)
    for dim in range(3):
        shifted = noise.roll(1, dim)
        correlation = torch.corrcoef(torch.stack([noise.flatten(), shifted.flatten()]))[0, 1]
        assert abs(correlation) < 0.015


def test_samples_follow_the_softmax() -> None:
    """Chi-squared over 20,000 draws from 8 tokens: the 99.99th percentile of 7 degrees of freedom is 29.9."""
    draws, temperature = 20_000, 0.7
    logits = torch.randn(8)
    rows = logits.expand(draws, -1)
    seeds = torch.arange(draws)
    _, ids = draw_reference(rows, torch.full((draws,), temperature), seeds, torch.full((draws,), 11).int())
    expected = torch.softmax(logits / temperature, dim=0) * draws
    chi_squared = ((torch.bincount(ids, minlength=8) - expected) ** 2 / expected).sum()
    assert chi_squared < 29.9
