"""ALiBi: in every kernel and backend, a query's scores fall with each key's distance, by the slope of its head."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, build
from cases.drafters import Prophet
from conftest import BUNDLED_MODEL, DEVICE, HAS_CUDA, alike, greedy, of_each_kind, plan_ahead, whole_only
from test_bundles import Step, check
from test_fp8 import quantized, scales
from test_in_order import GPU_DTYPES, check_bits
from test_in_order import decode as decode_in_order
from test_in_order import prefill as prefill_in_order
from test_kernels import DTYPES, SHORT, assert_close, attend_densely, forget, paged, randn
from test_long_prefill import packed_step
from test_mixers import rank
from test_shared_prefixes import find_shared, make_prefixes, nested_tables, on_device
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from nanoinfer import LLM
from nanoinfer.attention import choose_backend, make_backend, triton_backend
from nanoinfer.attention.context import Scoring
from nanoinfer.checkpoint import Checkpoint
from nanoinfer.engine.prefixes import shared_prefixes
from nanoinfer.kernels.attention.decode.bundles import bundle, queries_of_a_bundle
from nanoinfer.kernels.attention.decode.cpu_decode import paged_decode_cpu, plan_runs
from nanoinfer.kernels.attention.decode.paged_decode import paged_decode_reference, paged_decode_triton
from nanoinfer.kernels.attention.fp8 import can_split
from nanoinfer.kernels.attention.prefill import prefill_plan
from nanoinfer.kernels.attention.prefill.paged_prefill import paged_prefill_reference, paged_prefill_triton
from nanoinfer.kernels.attention.prefixes.shared_prefix import SharedResults, attend_to_prefixes
from nanoinfer.models import describe
from nanoinfer.models.attention.alibi import alibi_slopes
from nanoinfer.models.attention.parts import scoring_of
from nanoinfer.models.description import Description
from nanoinfer.models.families import llama
from nanoinfer.models.ranks import check_ranks_in_order
from nanoinfer.trainer.reference import _find_other

Shape = tuple[int, int, int, int]  # heads, kv_heads, head_dim, block_size

SHAPES = [(8, 2, 64, 32), (4, 4, 32, 16), (6, 1, 96, 48)]
BLOOM = pytest.param((32, 32, 128, 256), marks=pytest.mark.gpu)
WINDOWS = [None, 50, 1]


def make_scoring(heads: int, head_dim: int, window: int | None = None, kv_scales: Tensor | None = None) -> Scoring:
    """Of a model's slopes: near keys decide alone in some heads, and in others far ones count, too."""
    slopes = torch.tensor(alibi_slopes(heads), device=DEVICE)
    return Scoring(head_dim**-0.5, window, None, kv_scales, slopes=slopes)


class TestSlopes:
    def test_they_are_those_of_transformers(self) -> None:
        for heads in range(1, 81):
            bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
            torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), bloom)
            mpt = -build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
            torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), mpt)

    def test_each_rank_has_those_of_its_heads(self) -> None:
        model = replace(bundled(), alibi=alibi_slopes(bundled().num_heads))
        halves = [scoring_of(model, 0, rank(index, 2)).slopes for index in range(2)]
        assert torch.cat([half for half in halves if half is not None]).tolist() == pytest.approx(model.alibi)
        assert [half is not None and len(half) for half in halves] == [model.num_heads // 2] * 2
        assert scoring_of(bundled(), 0, rank(0, 2)).slopes is None


def bundled() -> Description:
    return describe(Checkpoint.open(BUNDLED_MODEL).hf_config)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", of_each_kind(zip(WINDOWS), 1))
@pytest.mark.parametrize("shape", [*of_each_kind(zip(SHAPES), 0), BLOOM])
def test_prompts(shape: Shape, window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole ones, and chunks behind a context; keys before a window are no numbers."""
    monkeypatch.setattr("nanoinfer.kernels.attention.prefill.paged_prefill.QUERIES_AT_ONCE", 60)
    heads, _, head_dim, _ = shape
    query_lens, context_lens = [1, 16, 70, 3, 130, 1], [1, 16, 100, 66, 130, 112]
    how = make_scoring(heads, head_dim, window)
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
    options = how.scale, window, None, None, None, None, how.slopes
    assert_close(paged_prefill_triton(q, *pages, ends, lens, max(query_lens), *options), expected)
    assert_close(prefill_in_order(q, pages, query_lens, context_lens, how), expected)
    k, v = k_cache.float(), v_cache.float()
    assert_close(paged_prefill_reference(q.float(), k, v, tables, query_lens, context_lens, *options), expected)


@pytest.mark.parametrize("window", [None, *whole_only([40])])
def test_tokens_that_see_beyond_themselves(window: int | None) -> None:
    """A key behind its query has a bias above 0."""
    heads, _, head_dim, _ = shape = SHAPES[0]
    query_lens, context_lens = [70, 3], [100, 66]
    ends = torch.tensor([*range(31, 61), *[90] * 30, *range(91, 101), 64, 66, 66], dtype=torch.int32, device=DEVICE)
    pages, q, how = paged(context_lens, *shape, DTYPES[0]), randn(73, heads, head_dim), make_scoring(heads, 64, window)
    expected = attend_densely(q, *pages, query_lens, context_lens, how, ends)
    cu_query_lens, lens = on_device(array("i", [0, 70, 73])), on_device(array("i", context_lens))
    options = how.scale, window, None, None, None, ends, how.slopes
    assert_close(paged_prefill_triton(q, *pages, cu_query_lens, lens, 70, *options), expected)
    assert_close(paged_prefill_reference(q, *pages, query_lens, context_lens, *options), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", of_each_kind(zip(WINDOWS), 0))
@pytest.mark.parametrize("shape", [*of_each_kind(zip(SHAPES), 0), BLOOM])
def test_rows_that_several_programs_share(shape: Shape, window: int | None, dtype: torch.dtype) -> None:
    """Each share of a row's keys counts positions from the row's first key."""
    heads, _, head_dim, block_size = shape
    context_lens = [1, 16, 100, 300, 64, 112, 1100]
    how = make_scoring(heads, head_dim, window)
    pages = paged(context_lens, *shape, dtype)
    q = randn(len(context_lens), heads, head_dim, dtype=dtype)
    expected = attend_densely(q, *pages, [1] * len(q), context_lens, how)
    k_cache, v_cache, tables = pages = forget(
        *pages, [0 if window is None else max(0, length - window) for length in context_lens]
    )
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    for workers in (2, 7):
        plan = plan_ahead(lens, k_cache, workers, window)
        out = paged_decode_triton(q, *pages, lens, how.scale, plan, slopes=how.slopes)
        assert_close(out, expected)
        assert_close(decode_in_order(q, pages, context_lens, how, workers), expected)
    k, v = k_cache.float(), v_cache.float()
    out = paged_decode_reference(q.float(), k, v, tables, lens, 1100, how.scale, window, slopes=how.slopes)
    assert_close(out, expected)
    if not HAS_CUDA:
        runs = plan_runs(tables, lens, block_size, window)
        assert_close(paged_decode_cpu(q, k_cache, v_cache, runs, how.scale, slopes=how.slopes), expected)


@pytest.mark.skipif(HAS_CUDA, reason="the helpers of test_kernels make CUDA tensors")
def test_rows_on_the_cpu_that_share_blocks() -> None:
    """Some are at another place of one row than of another, or hold what only some rows see."""
    k_cache, v_cache, _ = paged([160], *SHAPES[0], torch.float32)
    tables = torch.tensor([[0, 1, 2], [1, 0, 4], [0, 1, 3], [2, 3, 1]], dtype=torch.int32)
    q, context_lens = randn(4, 8, 64), [70, 90, 40, 96]
    lens = torch.tensor(context_lens, dtype=torch.int32)
    for window in (None, 45):
        how = make_scoring(8, 64, window)
        expected = attend_densely(q, k_cache, v_cache, tables, [1] * 4, context_lens, how)
        runs = plan_runs(tables, lens, 32, window)
        assert_close(paged_decode_cpu(q, k_cache, v_cache, runs, how.scale, slopes=how.slopes), expected)


@pytest.mark.parametrize("window", of_each_kind(zip([None, 30]), 1))
@pytest.mark.parametrize("shape", [(8, 4, 64, 256), *whole_only([((6, 1, 32, 16),)])])
def test_guesses(shape: Shape, window: int | None) -> None:
    """Each has a position of its own."""
    step, how = Step(shape, DTYPES[-1], window), make_scoring(shape[0], shape[2], window)
    for workers in (2, 7):
        check(step, how, step.expected(how), workers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "most"), of_each_kind([((8, 4, 64, 128), 0), ((6, 1, 32, 48), 5), ((14, 2, 128, 48), 5)], 0, 1)
)
@pytest.mark.filterwarnings("ignore:divide by zero")  # of what nobody reads, as rows without a token have it
def test_rows_that_share_a_prefix(shape: Shape, most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different lengths, with and without guesses, have other distances to the keys that they share."""
    for name in ("MIN_ROWS", "MIN_TOKENS", "MIN_SAVED"):
        monkeypatch.setattr(shared_prefixes, name, 2)
    heads, kv_heads, head_dim, block_size = shape
    lists, row_lens = nested_tables(11, block_size)
    counts = [row * 3 % (most + 1) for row in range(11)]
    first = [sum(counts[:row]) for row in range(11)]
    guesses = [(row, i) for row, count in enumerate(counts) for i in range(1, count + 1)]
    context_lens = [*(length - most for length in row_lens), *(row_lens[row] - most + i for row, i in guesses)]
    rows = [*range(11), *(row for row, _ in guesses)]
    pages = [randn(1 + max(map(max, lists)), block_size, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    width = max(map(len, lists))
    tables = torch.tensor([lists[row] + [0] * (width - len(lists[row])) for row in rows], device=DEVICE).int()
    q, lens = randn(len(rows), heads, head_dim, dtype=dtype), on_device(array("i", context_lens))
    how = make_scoring(heads, head_dim)
    expected = attend_densely(q, *pages, tables, [1] * len(q), context_lens, how)
    found = find_shared(lists, block_size)
    assert found is not None
    prefixes, bundles = make_prefixes(11, heads, pages[0]), None
    prefixes.fill(on_device(prefixes.pack(found.order, found.runs)))
    if most:
        own = on_device(array("i", first)), on_device(array("i", counts)), most
        bundles = bundle(lens, *own, queries_of_a_bundle(most, heads, pages[0]), prefixes, on_device(array("i", rows)))
    queries = None if bundles is None else bundles.shared
    shared = attend_to_prefixes(q, *pages, tables, prefixes, how.scale, None, None, queries, how.slopes, lens)
    for workers in (None, 13):  # so few workers divide rows
        plan = plan_ahead(lens, pages[0], workers, prefixes=prefixes, bundles=bundles)
        out = paged_decode_triton(q, *pages, tables, lens, how.scale, plan, shared=shared, slopes=how.slopes)
        assert_close(out, expected)


@pytest.mark.parametrize(("window", "dtype"), of_each_kind([(None, SHORT), (50, SHORT), (50, torch.bfloat16)], 1, 2))
def test_a_cache_in_fp8(window: int | None, dtype: torch.dtype) -> None:
    """The scale of the keys is none of the slopes'; nor is the unit of queries in two terms, as bfloat16 has them."""
    shape, query_lens, context_lens = (8, 2, 64, 64), [1, 1, 70, 1], [1, 100, 130, 1100]
    heads, _, head_dim, _ = shape
    k_cache, v_cache, tables = paged(context_lens, *shape, torch.float32)
    kv_scales, how = scales(), make_scoring(heads, head_dim, window, scales())
    (k_cache, k), (v_cache, v) = quantized(k_cache, kv_scales[0]), quantized(v_cache, kv_scales[1])
    q = randn(sum(query_lens), heads, head_dim, dtype=dtype)
    ends = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    expected = attend_densely(q, k, v, tables, query_lens, context_lens, how)
    if dtype == SHORT:  # whose products the interpreter computes
        options = how.scale, window, None, kv_scales, None, None, how.slopes
        assert_close(paged_prefill_triton(q, k_cache, v_cache, tables, ends, lens, 70, *options), expected)
    last, rows = ends[1:].long() - 1, (k_cache, v_cache, tables, lens, how.scale)
    plan = plan_ahead(lens, k_cache, 7, window)
    assert can_split(q, k_cache, plan.programs.tile) == (dtype == torch.bfloat16)
    assert_close(paged_decode_triton(q[last], *rows, plan, None, kv_scales, slopes=how.slopes), expected[last])


def test_long_prompts_attend_by_our_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN adds no bias."""
    monkeypatch.setattr(prefill_plan, "UNIT", 16)
    monkeypatch.setattr(prefill_plan, "LONG", 32)
    query_lens, context_lens = [32, 3, 65], [32, 12, 145]
    pages = paged(context_lens, 8, 2, 64, 256, SHORT)
    q, how = randn(100, 8, 64, dtype=SHORT), make_scoring(8, 64)
    context, group = packed_step(query_lens, context_lens, *pages)
    assert group.divided_tables is not None
    out = make_backend("triton", alike(256, None)).prefill(q, *pages[:2], context, group, how)
    assert_close(out, attend_densely(q, *pages, query_lens, context_lens, how))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_token_attends_alike_in_prompts_and_in_steps(window: int | None, dtype: torch.dtype) -> None:
    check_bits((32, 8, 128, 256), make_scoring(32, 128, window), dtype)


PREFIX = [7 * i % 150 for i in range(33)]
PROMPTS = [[7], [*PREFIX, 3, 6, 9], [*PREFIX, 5], PREFIX + [11 * i % 150 for i in range(7)]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Llama of random weights, which our engine gives ALiBi in place of rotations."""

    def describe_llama(config: object) -> Description:
        model = known(config)
        return replace(model, ropes=(None,) * model.num_layers, alibi=alibi_slopes(model.num_heads))

    known = llama.describe_llama
    monkeypatch.setattr(llama, "describe_llama", describe_llama)
    build(CASES["llama"], tmp_path)
    return str(tmp_path)


def expected_tokens(folder: str, prompt: list[int], count: int) -> list[int]:
    """What transformers draws, whose mask has the bias, and whose rotations turn nothing."""
    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    model.model.rotary_emb.forward = lambda x, position_ids: (torch.ones(1, 1, 16), torch.zeros(1, 1, 16))
    slopes, tokens = torch.tensor(alibi_slopes(4)), list(prompt)
    for _ in range(count):
        place = torch.arange(len(tokens))
        distances = (place - place[:, None]).float()
        bias = (slopes[:, None, None] * distances).masked_fill(distances > 0, torch.finfo(torch.float32).min)
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), attention_mask=bias[None], use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "options",
    [
        {"attention_backend": "torch"},
        {"attention_backend": "triton"},
        {"device": "cpu", "deterministic": True},
        *whole_only([{"attention_backend": "torch", "max_num_batched_tokens": 16}]),
        *whole_only([{"attention_backend": "torch", "tensor_parallel_size": 2, "device": "cpu"}]),
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers(options: dict, folder: str, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(folder, kvcache_block_size=16, max_model_len=128, **options)
    outputs = llm.generate(PROMPTS, greedy(4, ignore_eos=True), use_tqdm=False)
    assert [output.token_ids for output in outputs] == [expected_tokens(folder, prompt, 4) for prompt in PROMPTS]


def test_guesses_attend_to_a_prefix_with_their_rows(
    folder: str, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MIN_ROWS", "MIN_TOKENS", "MIN_SAVED"):
        monkeypatch.setattr(shared_prefixes, name, 2)
    had_guesses = []

    def attend(*args: Any) -> SharedResults:
        had_guesses.append(args[8] is not None)
        return attend_to_prefixes(*args)

    monkeypatch.setattr(triton_backend, "attend_to_prefixes", attend)
    expected = [expected_tokens(folder, prompt, 4) for prompt in PROMPTS]
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    for how in ({}, {"speculation": Prophet(texts, (True, False)), "max_guesses": 2, "enforce_eager": True}):
        llm = make_llm(folder, attention_backend="triton", kvcache_block_size=16, max_model_len=128, **how)
        outputs = llm.generate(PROMPTS, greedy(4, ignore_eos=True), use_tqdm=False)
        assert [output.token_ids for output in outputs] == expected
    assert set(had_guesses) == {False, True}


def test_a_token_has_the_same_bits_in_any_company(folder: str, make_llm: Callable[..., LLM]) -> None:
    found = []
    how, params = {"kvcache_block_size": 16, "max_model_len": 128}, greedy(4, ignore_eos=True, logprobs=3)
    for budget, together in ((128, len(PROMPTS)), (8, 1)):
        llm, outputs = make_llm(folder, deterministic=True, max_num_batched_tokens=budget, **how), []
        for begin in range(0, len(PROMPTS), together):
            outputs += llm.generate(PROMPTS[begin : begin + together], params, use_tqdm=False)
        found.append([output.outputs[0].logprobs for output in outputs])
    assert found[0] == found[1]


class TestWhatCannotBe:
    def test_flash_attn_names_the_backends_that_have_slopes(self) -> None:
        with pytest.raises(ValueError, match=r"attention_backend='flash_attn': .*slopes .*'triton' and 'torch' can"):
            choose_backend("flash_attn", "cuda", torch.bfloat16, 256, 64, has_slopes=True)

    def test_an_llm_names_them_too(self, folder: str) -> None:
        with pytest.raises(ValueError, match=r"attention_backend='flash_attn': .*slopes .*'triton' and 'torch' can"):
            LLM(folder, device="cpu", attention_backend="flash_attn")

    def test_soft_caps_beside_slopes(self) -> None:
        with pytest.raises(AssertionError):
            Scoring(1.0, softcap=2.0, slopes=torch.ones(4))

    def test_deterministic_ranks_on_the_cpu(self) -> None:
        model = replace(bundled(), alibi=alibi_slopes(bundled().num_heads))
        with pytest.raises(ValueError, match="the CPU computes ALiBi in another way for another number of heads"):
            check_ranks_in_order(model, 2, on_cpu=True)
        check_ranks_in_order(model, 2, on_cpu=False)

    def test_a_reference_for_trainers(self) -> None:
        assert _find_other(replace(bundled(), alibi=(0.5,))) == "ALiBi"
