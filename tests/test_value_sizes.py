"""Values of another size than keys: every kernel and backend reads both from one page, as dense attention would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_bundles
import torch
from cases import CASES, build
from conftest import DEVICE, HAS_CUDA, greedy, of_each_kind, plan_ahead, whole_only
from test_fp8 import quantized, scales
from test_in_order import decode as decode_in_order
from test_in_order import prefill as prefill_in_order
from test_kernels import DTYPES, SHORT, assert_close, attend_densely, forget, paged, randn
from test_long_prefill import packed_step
from test_shared_prefixes import find_shared, make_prefixes, nested_tables, on_device
from torch import Tensor

from nanoinfer import LLM
from nanoinfer.attention import choose_backend, make_backend, triton_backend
from nanoinfer.attention.cache_layout import Pages, lay_out
from nanoinfer.attention.context import Scoring
from nanoinfer.engine.prefixes import shared_prefixes
from nanoinfer.kernels.attention.decode.bundles import bundle
from nanoinfer.kernels.attention.decode.cpu_decode import paged_decode_cpu, plan_runs
from nanoinfer.kernels.attention.decode.paged_decode import paged_decode_reference, paged_decode_triton
from nanoinfer.kernels.attention.prefill import long_prefill, prefill_plan
from nanoinfer.kernels.attention.prefill.paged_prefill import paged_prefill_reference, paged_prefill_triton
from nanoinfer.kernels.attention.prefixes.shared_prefix import SharedResults, attend_to_prefixes
from nanoinfer.kernels.attention.projected.qkv import norm_rotate_store_reference, norm_rotate_store_triton
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.kernels.norm.norm import Norm
from nanoinfer.layers import attention
from nanoinfer.runner.memory.kv_cache import KVCacheSpec

Shape = tuple[int, int, int, int, int]  # heads, kv_heads, numbers of a key, of a value, block_size
Caches = tuple[Tensor, Tensor, Tensor]

SHAPES = [(8, 2, 24, 16, 32), (6, 1, 32, 80, 48), (4, 4, 48, 32, 16)]
MIMO = pytest.param((64, 4, 192, 128, 256), marks=pytest.mark.gpu)
WINDOWS = [None, 50]


def in_one_page(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same keys and values, each head's value behind its key, as in a cache."""
    k_cache, v_cache = torch.cat([k, v], dim=-1).split([k.shape[3], v.shape[3]], dim=-1)
    return k_cache, v_cache


def paged_together(lens: list[int], shape: Shape, dtype: torch.dtype, starts: list[int] | None = None) -> Caches:
    """Make caches and block tables; what lies before a row's start is NaN."""
    heads, kv_heads, key, value, block_size = shape
    both, _, tables = paged(lens, heads, kv_heads, key + value, block_size, dtype)
    if starts is not None:
        both, _, tables = forget(both, both, tables, starts)
    return both[..., :key], both[..., key:], tables


def starts_of(lens: list[int], window: int | None, query_lens: list[int] | None = None) -> list[int]:
    """Return the first key that a sequence's queries see."""
    if window is None:
        return [0] * len(lens)
    queries = query_lens or [1] * len(lens)
    return [max(0, length - count + 1 - window) for count, length in zip(queries, lens, strict=True)]


def scoring(heads: int, key: int, window: int | None) -> Scoring:
    """Layers with a window have sinks, as MiMo-V2's."""
    return Scoring(key**-0.5, window, sinks=None if window is None else randn(heads))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", [*of_each_kind(zip(SHAPES), 0, 1), MIMO])
def test_prompts(shape: Shape, window: int | None, dtype: torch.dtype) -> None:
    """Whole ones, and chunks behind a context."""
    heads, _, key, value, _ = shape
    query_lens, lens = [1, 16, 70, 3, 130], [1, 16, 100, 66, 130]
    how, starts = scoring(heads, key, window), starts_of(lens, window, query_lens)
    k_cache, v_cache, tables = pages = paged_together(lens, shape, dtype, starts)
    assert k_cache.stride() == v_cache.stride()
    q = randn(sum(query_lens), heads, key, dtype=dtype)
    expected = attend_densely(q, k_cache.nan_to_num(), v_cache.nan_to_num(), tables, query_lens, lens, how)
    ends = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    context_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    options = how.scale, window, None, None, how.sinks
    out = paged_prefill_triton(q, *pages, ends, context_lens, max(query_lens), *options)
    assert out.shape == (sum(query_lens), heads, value)
    assert_close(out, expected)
    assert_close(prefill_in_order(q, pages, query_lens, lens, how), expected)
    k, v = in_one_page(k_cache.float(), v_cache.float())
    assert_close(paged_prefill_reference(q.float(), k, v, tables, query_lens, lens, *options), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", [*of_each_kind(zip(SHAPES), 0, 1), MIMO])
def test_rows(shape: Shape, window: int | None, dtype: torch.dtype) -> None:
    """Some rows have one program, others several."""
    heads, _, key, _, block_size = shape
    lens = [1, 16, 100, 300, 64, 700]
    how = scoring(heads, key, window)
    k_cache, v_cache, tables = pages = paged_together(lens, shape, dtype, starts_of(lens, window))
    q, context_lens = randn(len(lens), heads, key, dtype=dtype), torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    expected = attend_densely(q, k_cache.nan_to_num(), v_cache.nan_to_num(), tables, [1] * len(lens), lens, how)
    for workers in (2, 7):
        plan = plan_ahead(context_lens, k_cache, workers, window)
        assert_close(paged_decode_triton(q, *pages, context_lens, how.scale, plan, sinks=how.sinks), expected)
        assert_close(decode_in_order(q, pages, lens, how, workers), expected)
    k, v = in_one_page(k_cache.float(), v_cache.float())
    options = how.scale, window, None, None, how.sinks
    assert_close(paged_decode_reference(q.float(), k, v, tables, context_lens, max(lens), *options), expected)
    if not HAS_CUDA:
        plan = plan_runs(tables, context_lens, block_size, window)
        assert_close(paged_decode_cpu(q, k_cache, v_cache, plan, how.scale, sinks=how.sinks), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [SHAPES[0], *whole_only(zip([SHAPES[1]])), MIMO])
def test_rows_that_share_a_prefix(shape: Shape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIN_ROWS", "MIN_TOKENS", "MIN_SAVED"):
        monkeypatch.setattr(shared_prefixes, name, 2)
    heads, kv_heads, key, value, block_size = shape
    lists, lens = nested_tables(11, block_size)
    both = randn(1 + max(map(max, lists)), block_size, kv_heads, key + value, dtype=dtype)
    tables = torch.zeros(len(lists), max(map(len, lists)), dtype=torch.int32, device=DEVICE)
    for row, table in enumerate(lists):
        tables[row, : len(table)] = torch.tensor(table)
    pages = both[..., :key], both[..., key:], tables
    q, context_lens = randn(len(lists), heads, key, dtype=dtype), torch.tensor(lens, device=DEVICE).int()
    how, found = scoring(heads, key, None), find_shared(lists, block_size)
    assert found is not None
    prefixes = make_prefixes(len(lists), heads, pages[0])
    prefixes.fill(on_device(prefixes.pack(found.order, found.runs)))
    expected = attend_densely(q, *pages, [1] * len(q), lens, how)
    shared = attend_to_prefixes(q, *pages, prefixes, how.scale)
    for workers in (None, 13):  # so few workers divide rows
        plan = plan_ahead(context_lens, pages[0], workers, prefixes=prefixes)
        assert_close(paged_decode_triton(q, *pages, context_lens, how.scale, plan, None, None, shared), expected)


@pytest.mark.parametrize("window", WINDOWS)
def test_guesses(window: int | None) -> None:
    """A program serves a row's last token and its guesses together."""
    heads, kv_heads, key, value, block_size = SHAPES[0]
    step = test_bundles.Step((heads, kv_heads, key + value, block_size), DTYPES[-1], window)
    step.whole = (*in_one_page(step.whole[0][..., :key], step.whole[1][..., key:]), step.whole[2])
    step.k_cache, step.v_cache = in_one_page(step.k_cache[..., :key], step.v_cache[..., key:])
    step.q, how = step.q[..., :key].contiguous(), scoring(heads, key, window)
    guesses = step.guesses()
    bundles = bundle(step.context_lens, guesses.first, guesses.counts, guesses.most, 4)
    plan = plan_ahead(step.context_lens, step.k_cache, 7, window, bundles=bundles)
    rows = step.k_cache, step.v_cache, step.tables, step.context_lens, how.scale
    out = paged_decode_triton(step.q, *rows, plan, sinks=how.sinks)
    assert_close(out[step.tokens], step.expected(how))


@pytest.mark.parametrize("dtype", [torch.float32, SHORT])  # terms of queries in 16 bits meet keys in FP8
@pytest.mark.parametrize("window", of_each_kind(zip(WINDOWS), 1))
def test_a_cache_in_fp8(window: int | None, dtype: torch.dtype) -> None:
    shape, query_lens, lens = (8, 2, 48, 32, 64), [1, 1, 70, 1], [1, 100, 130, 700]
    heads, _, key, _, _ = shape
    kv_scales, how = scales(), scoring(heads, key, window)
    k_cache, v_cache, tables = paged_together(lens, shape, torch.float32)
    (k_cache, k), (v_cache, v) = quantized(k_cache, kv_scales[0]), quantized(v_cache, kv_scales[1])
    pages = (*(cache.view(FP8) for cache in in_one_page(k_cache.view(torch.uint8), v_cache.view(torch.uint8))), tables)
    q = randn(sum(query_lens), heads, key, dtype=dtype)
    expected = attend_densely(q, k, v, tables, query_lens, lens, how)
    ends = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    context_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    options = how.scale, window, None, kv_scales, how.sinks
    assert_close(paged_prefill_triton(q, *pages, ends, context_lens, 70, *options), expected)
    last = ends[1:].long() - 1
    plan = plan_ahead(context_lens, pages[0], 7, window)
    out = paged_decode_triton(q[last], *pages, context_lens, how.scale, plan, None, kv_scales, sinks=how.sinks)
    assert_close(out, expected[last])
    if not HAS_CUDA:
        plan = plan_runs(tables, context_lens, shape[-1], window)
        out = paged_decode_cpu(q[last], *pages[:2], plan, how.scale, None, kv_scales, how.sinks)
        assert_close(out, expected[last])


def test_long_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference attends to parts of a long prompt; on a GPU, cuDNN gets no such values."""
    for module, name, value in (
        (prefill_plan, "UNIT", 16),
        (prefill_plan, "LONG", 32),
        (prefill_plan, "LONGEST", 48),
        (long_prefill, "MOST_KEYS", 32),
    ):
        monkeypatch.setattr(module, name, value)
    heads, kv_heads, key, value_dim, block_size = shape = SHAPES[0]
    query_lens, lens = [32, 3, 65], [32, 12, 145]
    pages = paged_together(lens, shape, DTYPES[-1] if HAS_CUDA else torch.float32)
    q, how = randn(sum(query_lens), heads, key, dtype=pages[0].dtype), scoring(heads, key, None)
    context, group = packed_step(query_lens, lens, *pages)
    layout = lay_out([Pages(kv_heads, key, value_dim=value_dim)], block_size, block_size)
    out = make_backend("triton", layout).prefill(q, *pages[:2], context, group, how)
    assert_close(out, attend_densely(q, *pages, query_lens, lens, how))


def heads_of(whole: Tensor, key: int, values: int, value: int) -> tuple[Tensor, Tensor]:
    """Return a projection's heads of queries and keys, and those of values, as a layer does."""
    qk, v = whole.tensor_split([-values * value], dim=-1)
    return qk.unflatten(-1, (-1, key)), v.unflatten(-1, (-1, value))


@pytest.mark.parametrize("dtype", [*DTYPES, *whole_only(zip([FP8]))], ids=str)
@pytest.mark.parametrize(("key", "value"), [(24, 16), (20, 34), (192, 128)])
def test_keys_are_rotated_and_values_scaled_on_their_way_to_the_cache(key: int, value: int, dtype: torch.dtype) -> None:
    """Nothing else is written. The sixth token has a value without a finite number, and its key says so."""
    heads, kv_heads, turned, tokens = 7, 2, 8, 6
    kind = SHORT if dtype == FP8 else dtype
    whole = randn(tokens, heads * key + kv_heads * (key + value), dtype=kind)
    if dtype != FP8:  # to which Triton's interpreter converts no NaN
        whole[5, -1] = torch.inf
    qk, values = heads_of(whole, key, kv_heads, value)
    angles = randn(40, turned // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.tensor([0, 1, 39, 5, -1, 7], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([0, 47, 15, 16, -1, 31], dtype=torch.int32, device=DEVICE)
    before = randn(3, 16, kv_heads, key + value).to(dtype)
    how = None, cos_sin, False, None, positions
    norm = Norm(randn(key, dtype=kind), 1e-6) if key == 24 else None
    results = []
    for function in (norm_rotate_store_triton, norm_rotate_store_reference):
        both = before.clone()
        caches = both[..., :key], both[..., key:]
        kv_scales = scales() if dtype == FP8 else None
        q = function(qk, norm, norm, *how, *caches, slots, kv_scales, values=values, value_scale=0.707)
        results.append((q, both))
    (q, both), (expected_q, expected) = results
    assert_close(q, expected_q)
    assert torch.equal(both[..., key:].float(), expected[..., key:].float())
    assert torch.equal(both.float().isnan(), expected.float().isnan())
    assert_close(both.float().nan_to_num(), expected.float().nan_to_num())
    written = torch.zeros(48, dtype=torch.bool, device=DEVICE).index_fill_(0, slots[slots >= 0].long(), True)
    assert torch.equal(both.flatten(0, 1)[~written].float(), before.flatten(0, 1)[~written].float())
    if dtype != FP8:
        wanted = (values[1] * 0.707).float()
        assert torch.equal(both.flatten(0, 1)[47, :, key:].float(), wanted)
        assert both.flatten(0, 1)[31, -1, :key].isnan().all()
    alone, (qk, values) = before.clone(), heads_of(whole[1:2], key, kv_heads, value)
    how, caches = (None, cos_sin, False, None, positions[1:2]), (alone[..., :key], alone[..., key:])
    own_q = norm_rotate_store_triton(
        qk, norm, norm, *how, *caches, slots[1:2], kv_scales, values=values, value_scale=0.707
    )
    assert torch.equal(own_q[0], q[1])
    assert torch.equal(alone.flatten(0, 1)[47].float(), both.flatten(0, 1)[47].float())


def test_a_page_holds_a_heads_key_and_its_value_side_by_side() -> None:
    """Its group's blocks have as many bytes as those of others, whose keys and values have pages of their own."""
    full, window = Pages(4, 192, value_dim=128), Pages(8, 192, 128, value_dim=128)
    layout = lay_out([full, *[window] * 5] * 8, 256, 64)
    assert [(group.pages, group.pages_of_a_block) for group in layout.groups] == [(full, 8), (window, 40)]
    assert (full.count, full.numbers) == (1, 4 * 320)
    assert layout.waste <= 0.05
    for by_head in (False, True):
        cache = KVCacheSpec(layout, torch.bfloat16, by_head).allocate(3, torch.device("cpu"))
        k_cache, v_cache = cache.layers[0]
        assert (k_cache.shape[2:], v_cache.shape[2:]) == ((4, 192), (4, 128))
        assert v_cache.data_ptr() - k_cache.data_ptr() == 2 * 192
        assert k_cache.stride() == v_cache.stride()
        assert k_cache.stride(1 if by_head else 2) == 320


def test_models_of_both_backends_give_the_same_tokens(
    make_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts share a prefix, so that decode steps read it once, in layers without a window. One is alone.

    Kernels write the keys and values that Triton's attends to, as on a GPU.
    """
    for name in ("MIN_ROWS", "MIN_TOKENS", "MIN_SAVED"):
        monkeypatch.setattr(shared_prefixes, name, 2)
    case = CASES["mimo-v2"]
    build(
        replace(
            case, settings={**case.settings, "num_hidden_layers": 2, "layer_types": case.settings["layer_types"][:2]}
        ),
        tmp_path,
    )
    prefix = [7 * i % 150 for i in range(33)]
    prompts = [prefix + [3 * i % 150 for i in range(row + 1)] for row in range(3)]
    tokens, read = [], []

    def attend(*args: Any) -> SharedResults:
        read.append(args)
        return attend_to_prefixes(*args)

    monkeypatch.setattr(triton_backend, "attend_to_prefixes", attend)
    for backend in ("torch", "triton"):
        if backend == "triton":
            monkeypatch.setattr(attention, "norm_rotate_store", norm_rotate_store_triton)
        llm = make_llm(str(tmp_path), attention_backend=backend, kvcache_block_size=16, max_model_len=128)
        outputs = llm.generate([[7, 8]], greedy(3, ignore_eos=True), use_tqdm=False)
        outputs += llm.generate(prompts, greedy(3, ignore_eos=True), use_tqdm=False)
        tokens.append([output.token_ids for output in outputs])
    assert tokens[0] == tokens[1]
    assert len(read) > 0


def test_flash_attn_names_the_backends_that_take_such_values() -> None:
    with pytest.raises(ValueError, match=r"attention_backend='flash_attn': .*values of another size .*'torch' can"):
        choose_backend("flash_attn", "cuda", torch.bfloat16, 256, 64, has_other_values=True)


@pytest.mark.parametrize("ranks", [1, *whole_only([2])])
def test_adapters(ranks: int, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """They stand beside the projections of values, and of results, which have the values' size."""
    peft = pytest.importorskip("peft")
    case = CASES["mimo-v2"]
    model = build(case, tmp_path)
    llm = make_llm(str(tmp_path), device="cpu", max_adapters=1, tensor_parallel_size=ranks, **case.small)
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False)).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    llm.load_adapter("adapter", str(tmp_path / "adapter"))
    params = greedy(5, ignore_eos=True, adapter="adapter")
    for output in llm.generate([[7, 8, 9], [5 * i % 150 for i in range(40)]], params, use_tqdm=False):
        ids = torch.tensor([output.prompt_token_ids])
        how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        assert output.token_ids == adapted.generate(ids, max_new_tokens=5, **how)[0, ids.shape[1] :].tolist()
