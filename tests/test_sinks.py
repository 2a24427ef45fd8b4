"""Sinks: in every kernel and backend, a query's weights are those of a softmax over its keys and its head's sink."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, build
from conftest import DEVICE, HAS_CUDA, alike, greedy, of_each_kind, plan_ahead
from test_fp8 import quantized, scales
from test_in_order import decode as decode_in_order
from test_in_order import prefill as prefill_in_order
from test_kernels import DTYPES, SHORT, assert_close, attend_densely, forget, paged, randn
from test_long_prefill import packed_step
from test_shared_prefixes import find_shared, make_prefixes, nested_tables, on_device

from nanoinfer import LLM
from nanoinfer.attention import choose_backend, make_backend, triton_backend
from nanoinfer.attention.context import Scoring
from nanoinfer.engine.prefixes import shared_prefixes
from nanoinfer.kernels.attention.decode.cpu_decode import paged_decode_cpu, plan_runs
from nanoinfer.kernels.attention.decode.paged_decode import paged_decode_reference, paged_decode_triton
from nanoinfer.kernels.attention.prefill import long_prefill, prefill_plan
from nanoinfer.kernels.attention.prefill.paged_prefill import paged_prefill_reference, paged_prefill_triton
from nanoinfer.kernels.attention.prefixes.shared_prefix import SharedResults, attend_to_prefixes

Shape = tuple[int, int, int, int]  # heads, kv_heads, head_dim, block_size

SHAPES = [(8, 2, 64, 32), (4, 4, 32, 16), (6, 1, 96, 48)]
pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # of the lowest sink: the interpreter's goes to infinity

GPT_OSS = pytest.param((64, 8, 64, 256), marks=pytest.mark.gpu)
HOW = [(None, None), (50, None), (1, 2.0)]  # windows and soft caps


def make_scoring(heads: int, head_dim: int, window: int | None, softcap: float | None) -> Scoring:
    """Some sinks are above all scores and some below; one is as if it were not there."""
    sinks = 2 * randn(heads)
    sinks[0], sinks[1] = 12, torch.finfo(torch.bfloat16).min
    return Scoring(head_dim**-0.5, window, softcap, sinks=sinks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), of_each_kind(HOW, 1))
@pytest.mark.parametrize("shape", [*of_each_kind(zip(SHAPES), 0), GPT_OSS])
def test_prompts(
    shape: Shape, window: int | None, softcap: float | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole ones, and chunks behind a context; keys before a window are no numbers."""
    monkeypatch.setattr("nanoinfer.kernels.attention.prefill.paged_prefill.QUERIES_AT_ONCE", 60)
    heads, _, head_dim, _ = shape
    query_lens, context_lens = [1, 16, 70, 3, 130, 1], [1, 16, 100, 66, 130, 112]
    how = make_scoring(heads, head_dim, window, softcap)
    pages = paged(context_lens, *shape, dtype)
    q = randn(sum(query_lens), heads, head_dim, dtype=dtype)
    expected = attend_densely(q, *pages, query_lens, context_lens, how)
    starts = [
        0 if window is None else max(0, length - queries + 1 - window)
        for queries, length in zip(query_lens, context_lens, strict=True)
    ]
    k_cache, v_cache, tables = pages = forget(*pages, starts)
    ends = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    options = how.scale, window, softcap, None, how.sinks
    assert_close(paged_prefill_triton(q, *pages, ends, lens, max(query_lens), *options), expected)
    assert_close(prefill_in_order(q, pages, query_lens, context_lens, how), expected)
    k, v = k_cache.float(), v_cache.float()
    assert_close(paged_prefill_reference(q.float(), k, v, tables, query_lens, context_lens, *options), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), of_each_kind(HOW, 0))
@pytest.mark.parametrize("shape", [*of_each_kind(zip(SHAPES), 0), GPT_OSS])
def test_a_row_that_several_programs_share_counts_its_sinks_once(
    shape: Shape, window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    heads, _, head_dim, block_size = shape
    context_lens = [1, 16, 100, 300, 64, 112, 1100]
    how = make_scoring(heads, head_dim, window, softcap)
    pages = paged(context_lens, *shape, dtype)
    q = randn(len(context_lens), heads, head_dim, dtype=dtype)
    expected = attend_densely(q, *pages, [1] * len(q), context_lens, how)
    pages = forget(*pages, [0 if window is None else max(0, length - window) for length in context_lens])
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    for workers in (2, 7):
        plan = plan_ahead(lens, pages[0], workers, window)
        out = paged_decode_triton(q, *pages, lens, how.scale, plan, softcap, sinks=how.sinks)
        assert_close(out, expected)
        assert_close(decode_in_order(q, pages, context_lens, how, workers), expected)
    k_cache, v_cache, tables = pages
    options = how.scale, window, softcap, None, how.sinks
    out = paged_decode_reference(q.float(), k_cache.float(), v_cache.float(), tables, lens, 1100, *options)
    assert_close(out, expected)
    if not HAS_CUDA:
        plan = plan_runs(tables, lens, block_size, window)
        assert_close(paged_decode_cpu(q, k_cache, v_cache, plan, how.scale, softcap, sinks=how.sinks), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", of_each_kind([((8, 4, 64, 256),), ((14, 2, 128, 48),)], 0))
def test_rows_that_share_a_prefix_count_their_sinks_once(
    shape: Shape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MIN_ROWS", "MIN_TOKENS", "MIN_SAVED"):
        monkeypatch.setattr(shared_prefixes, name, 2)
    heads, kv_heads, head_dim, block_size = shape
    lists, context_lens = nested_tables(11, block_size)
    blocks = 1 + max(map(max, lists))
    pages = [randn(blocks, block_size, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    tables = torch.zeros(len(lists), max(map(len, lists)), dtype=torch.int32, device=DEVICE)
    for row, table in enumerate(lists):
        tables[row, : len(table)] = torch.tensor(table)
    q, lens = randn(len(lists), heads, head_dim, dtype=dtype), torch.tensor(context_lens, device=DEVICE).int()
    how = make_scoring(heads, head_dim, None, None)
    found = find_shared(lists, block_size)
    assert found is not None
    prefixes = make_prefixes(len(lists), heads, pages[0])
    prefixes.fill(on_device(prefixes.pack(found.order, found.runs)))
    expected = attend_densely(q, *pages, tables, [1] * len(q), context_lens, how)
    shared = attend_to_prefixes(q, *pages, tables, prefixes, how.scale)
    for workers in (None, 13):  # so few workers divide rows
        plan = plan_ahead(lens, pages[0], workers, prefixes=prefixes)
        out = paged_decode_triton(q, *pages, tables, lens, how.scale, plan, None, None, shared, how.sinks)
        assert_close(out, expected)


@pytest.mark.parametrize("window", of_each_kind(zip((50, None)), 1))
def test_a_cache_in_fp8(window: int | None) -> None:
    """The scale of the keys is none of the sinks'."""
    shape, query_lens, context_lens = SHAPES[0], [1, 1, 70, 1], [1, 100, 130, 1100]
    heads, _, head_dim, _ = shape
    k_cache, v_cache, tables = paged(context_lens, *shape, torch.float32)
    kv_scales, how = scales(), make_scoring(heads, head_dim, window, None)
    (k_cache, k), (v_cache, v) = quantized(k_cache, kv_scales[0]), quantized(v_cache, kv_scales[1])
    q = randn(sum(query_lens), heads, head_dim, dtype=SHORT)
    ends = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    expected = attend_densely(q, k, v, tables, query_lens, context_lens, how)
    options = how.scale, window, None, kv_scales, how.sinks
    assert_close(paged_prefill_triton(q, k_cache, v_cache, tables, ends, lens, 70, *options), expected)
    last, rows = ends[1:].long() - 1, (k_cache, v_cache, tables, lens, how.scale)
    plan = plan_ahead(lens, k_cache, 7, window)
    assert_close(paged_decode_triton(q[last], *rows, plan, None, kv_scales, sinks=how.sinks), expected[last])


def test_long_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts of a long prompt attend apart, and are put together; the sinks take their share at the end."""
    unit = prefill_plan.UNIT if HAS_CUDA else 16
    monkeypatch.setattr(prefill_plan, "UNIT", unit)
    monkeypatch.setattr(prefill_plan, "LONG", 2 * unit)
    monkeypatch.setattr(prefill_plan, "LONGEST", 3 * unit)
    monkeypatch.setattr(long_prefill, "MOST_KEYS", 2 * unit)
    shape, dtype = (8, 2, 64, 256), torch.bfloat16 if HAS_CUDA else torch.float32
    query_lens, context_lens = [2 * unit, 3, 4 * unit + 1], [2 * unit, 12, 9 * unit + 1]
    k_cache, v_cache, tables = paged(context_lens, *shape, dtype)
    q, how = randn(sum(query_lens), 8, 64, dtype=dtype), make_scoring(8, 64, None, None)
    context, group = packed_step(query_lens, context_lens, k_cache, v_cache, tables)
    out = make_backend("triton", alike(256, None)).prefill(q, k_cache, v_cache, context, group, how)
    assert_close(out, attend_densely(q, k_cache, v_cache, tables, query_lens, context_lens, how))


def test_tokens_of_a_model_by_both_backends(
    make_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts share a prefix, so that decode steps read it once, in layers without a window."""
    for name in ("MIN_ROWS", "MIN_TOKENS", "MIN_SAVED"):
        monkeypatch.setattr(shared_prefixes, name, 2)
    build(CASES["gptoss"], tmp_path)
    prefix = [7 * i % 150 for i in range(33)]
    prompts = [prefix + [3 * i % 150 for i in range(row + 1)] for row in range(3)]
    tokens, read = [], []

    def attend(*args: Any) -> SharedResults:
        read.append(args)
        return attend_to_prefixes(*args)

    monkeypatch.setattr(triton_backend, "attend_to_prefixes", attend)
    for backend in ("torch", "triton"):
        llm = make_llm(str(tmp_path), attention_backend=backend, kvcache_block_size=16, max_model_len=128)
        outputs = llm.generate(prompts, greedy(3, ignore_eos=True), use_tqdm=False)
        tokens.append([output.token_ids for output in outputs])
    assert tokens[0] == tokens[1]
    assert len(read) > 0


def test_flash_attn_names_the_backends_that_have_sinks() -> None:
    with pytest.raises(ValueError, match=r"attention_backend='flash_attn': .*sinks .*'triton' and 'torch' can"):
        choose_backend("flash_attn", "cuda", torch.bfloat16, 256, 64, has_sinks=True)
