"""Decode attention on the CPU: right for any blocks, and in few calls."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from test_kernels import assert_close, attend_densely, forget, paged, randn

from nanoinfer.attention.context import Scoring
from nanoinfer.kernels.attention.decode import cpu_decode
from nanoinfer.kernels.attention.decode.cpu_decode import paged_decode_cpu, plan_runs

BLOCK_SIZE = 32
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="the helpers of test_kernels make CUDA tensors")

pytestmark = CPU_ONLY


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (40, None), (32, 2.0), (None, 0.5)])
def test_equals_dense_attention(
    window: int | None, softcap: float | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks in random order; keys beyond a row's own, and before its window, are no numbers."""
    context_lens = [1, 32, 100, 300, 64, 112, 31, 33, 90, 95]
    pages = paged(context_lens, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, dtype)
    q = randn(len(context_lens), HEADS, HEAD_DIM, dtype=dtype)
    lens = torch.tensor(context_lens, dtype=torch.int32)
    how = Scoring(HEAD_DIM**-0.5, window, softcap)
    expected = attend_densely(q, *pages, [1] * len(lens), context_lens, how)
    k_cache, v_cache, tables = forget(*pages, [0 if window is None else max(0, n - window) for n in context_lens])
    num_copied = 0
    for spare_keys, copied_numbers in product((0, 64, 10_000), (0, 1 << 16, 1 << 30)):
        monkeypatch.setattr(cpu_decode, "SPARE_KEYS", spare_keys)
        monkeypatch.setattr(cpu_decode, "COPIED_NUMBERS", copied_numbers)
        plan = plan_runs(tables, lens, BLOCK_SIZE, window)
        assert_close(paged_decode_cpu(q, k_cache, v_cache, plan, how.scale, softcap), expected)
        num_copied += sum(run.copied is not None for run in plan.runs)
    assert num_copied > 0


def test_rows_that_see_other_keys_of_a_block_that_they_share() -> None:
    k_cache, v_cache, _ = paged([64], HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, torch.float32)
    tables, context_lens = torch.tensor([[0, 1], [0, 1]], dtype=torch.int32), [40, 45]
    q = randn(2, HEADS, HEAD_DIM, dtype=torch.float32)
    how = Scoring(0.1, window=20)
    expected = attend_densely(q, k_cache, v_cache, tables, [1, 1], context_lens, how)
    k_cache[0, :20] = v_cache[0, :20] = k_cache[1, 13:] = v_cache[1, 13:] = float("nan")
    plan = plan_runs(tables, torch.tensor(context_lens, dtype=torch.int32), BLOCK_SIZE, how.window)
    assert [run.rows.tolist() for run in plan.runs] == [[[0, 1]], [[0, 1]]]
    k_cache[0, 20:25] = v_cache[0, 20:25] = float("nan")  # the first row alone sees them
    out = paged_decode_cpu(q, k_cache, v_cache, plan, how.scale)
    assert out[0].isnan().all()
    assert_close(out[1], expected[1])


def test_rows_whose_blocks_are_neighbours_are_one_call() -> None:
    tables = torch.tensor([[7], [5], [6], [4]], dtype=torch.int32)
    plan = plan_runs(tables, torch.full((4,), 20, dtype=torch.int32), BLOCK_SIZE, None)
    assert [(run.first, run.begin, run.end, run.rows.tolist()) for run in plan.runs] == [
        (4, 0, 20, [[3], [1], [2], [0]])
    ]
    assert plan.runs[0].mask is None
    assert not plan.is_split


def test_a_block_that_rows_share_is_one_call() -> None:
    tables = torch.tensor([[3, 8], [3, 9], [3, 1]], dtype=torch.int32)
    plan = plan_runs(tables, torch.tensor([50, 50, 50], dtype=torch.int32), BLOCK_SIZE, None)
    assert [(run.first, run.rows.tolist()) for run in plan.runs] == [(1, [[2]]), (3, [[0, 1, 2]]), (8, [[0], [1]])]
    assert plan.is_split


def test_neighbours_that_are_shared_by_as_many_rows_are_one_call() -> None:
    tables = torch.tensor([[3], [4], [3], [4], [5]], dtype=torch.int32)
    plan = plan_runs(tables, torch.full((5,), 9, dtype=torch.int32), BLOCK_SIZE, None)
    assert [(run.first, run.rows.tolist()) for run in plan.runs] == [(3, [[0, 2], [1, 3]]), (5, [[4]])]


def test_blocks_that_lie_apart_are_copied_for_one_call_if_they_hold_little() -> None:
    tables = torch.tensor([[9], [1], [5], [3], [7]], dtype=torch.int32)
    lens = torch.tensor([20, 22, 20, 21, 9], dtype=torch.int32)
    few, many = (plan_runs(tables, lens, BLOCK_SIZE, None, key_numbers=n) for n in (64, cpu_decode.COPIED_NUMBERS))
    assert [run.rows.flatten().tolist() for run in few.runs] == [[4, 2, 0, 3, 1]]
    assert few.runs[0].copied is not None
    assert few.runs[0].copied.tolist() == [7, 5, 9, 3, 1]
    assert few.runs[0].mask is not None
    assert few.runs[0].mask.sum(-1).flatten().tolist() == [9, 20, 20, 21, 22]
    assert [(run.first, run.copied) for run in many.runs] == [(1, None), (3, None), (5, None), (7, None), (9, None)]


def test_lengths_that_are_far_apart_are_calls_of_their_own() -> None:
    tables = torch.tensor([[0], [1], [2], [3]], dtype=torch.int32)
    plan = plan_runs(tables, torch.tensor([2, 200, 210, 1], dtype=torch.int32), 256, None)
    assert [(run.rows.tolist(), run.end) for run in plan.runs] == [([[0]], 2), ([[1], [2]], 210), ([[3]], 1)]
    mask = plan.runs[1].mask
    assert mask is not None
    assert mask.sum(dim=-1).tolist() == [[200], [210]]


def test_a_row_in_whose_keys_is_no_number_harms_no_other() -> None:
    context_lens = [20, 25]
    k_cache, v_cache, _ = paged([32, 32], HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, torch.float32)
    tables = torch.tensor([[0], [1]], dtype=torch.int32)
    q = randn(2, HEADS, HEAD_DIM, dtype=torch.float32)
    expected = attend_densely(q, k_cache, v_cache, tables, [1, 1], context_lens, Scoring(0.1))
    k_cache[1, 3] = float("nan")
    plan = plan_runs(tables, torch.tensor(context_lens, dtype=torch.int32), BLOCK_SIZE, None)
    assert len(plan.runs) == 1
    out = paged_decode_cpu(q, k_cache, v_cache, plan, 0.1)
    assert_close(out[0], expected[0])
    assert out[1].isnan().all()
