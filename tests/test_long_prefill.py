"""Long prompts: which tokens cuDNN attends from, and that the results are those of one softmax over all keys."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from conftest import DEVICE, HAS_CUDA, alike, of_each_kind, whole_only
from hypothesis import given
from hypothesis import strategies as st
from test_fp8 import quantized, scales
from test_kernels import assert_close, attend_densely, paged, randn
from torch import Tensor

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention import make_backend
from nanoinfer.attention.context import Context, GroupContext, PackedQueries, Scoring
from nanoinfer.kernels.attention.prefill import long_prefill, prefill_plan
from nanoinfer.kernels.attention.prefill.long_prefill import (
    attend,
    attend_reference,
    can_attend,
    merge,
    merge_reference,
)
from nanoinfer.kernels.attention.prefill.prefill_plan import LONG, LONGEST, UNIT, DividedPrefill, divide

HALF = torch.bfloat16 if HAS_CUDA else torch.float16


@given(lens=st.lists(st.tuples(st.integers(1, 3 * LONGEST), st.integers(0, 5 * UNIT)), min_size=1, max_size=6))
def test_every_new_token_attends_once(lens: list[tuple[int, int]]) -> None:
    """The pieces are the new tokens in their order. Stretches begin and end at multiples of UNIT, in long prompts."""
    queries = [new for new, _ in lens]
    division = divide(queries, [new + cached for new, cached in lens])
    if division is None:
        assert all(new < LONG for new, _ in lens)
        return
    stretches = {stretch.first: stretch for stretch in division.stretches}
    begin, covered = 0, [0] * len(lens)
    for row, end, context in zip(division.rows, division.cu_query_lens[1:], division.context_lens, strict=True):
        new, cached = lens[row]
        position = cached + covered[row]
        covered[row] += end - begin
        if context == 0:
            assert stretches.pop(begin) == (row, begin, position, end - begin)
            assert position % UNIT == 0
            assert (end - begin) % UNIT == 0
            assert end - begin <= LONGEST
            assert new >= LONG
        else:
            assert context == cached + covered[row]
            assert end - begin <= division.max_query_len
        begin = end
    assert not stretches
    assert covered == queries
    assert list(division.rows) == sorted(division.rows)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("heads", [(16, 8), (14, 2), (8, 1), *whole_only(zip([(32, 8), (8, 8)]))], ids=str)
@pytest.mark.parametrize("head_dim", of_each_kind(zip((64, 128)), 1))
@pytest.mark.parametrize("dtype", of_each_kind(zip((torch.bfloat16, torch.float16)), 0), ids=str)
def test_cudnn_equals_the_reference(head_dim: int, heads: tuple[int, int], is_causal: bool, dtype: torch.dtype) -> None:
    tokens = 2048 if is_causal else 4096
    whole = randn(2048, heads[0] + 2, head_dim, dtype=dtype)
    q, k, v = whole[:, : heads[0]], *(randn(tokens, heads[1], head_dim, dtype=dtype) for _ in range(2))
    assert can_attend(q, v[None], None, None)
    out, log_total = attend(q, k, v, 0.1, is_causal)
    expected, expected_total = attend_reference(q.float(), k, v, 0.1, is_causal)
    assert_close(out, expected)
    torch.testing.assert_close(log_total, expected_total, rtol=1e-4, atol=2e-3)


def test_a_cudnn_that_cannot_leaves_long_prompts_to_our_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some versions have no plan for some GPUs. A lack of memory is another matter."""

    def fail(error: RuntimeError) -> bool:
        def attend(*args: object) -> None:
            raise error

        monkeypatch.setattr(long_prefill, "attend", attend)
        return long_prefill._has_plan.__wrapped__(torch.device("cpu"), torch.float16, 4, 2, 64)

    with caplog.at_level("WARNING", logger="nanoinfer"):
        assert not fail(RuntimeError("No valid execution plans built"))
    assert "by our own kernel, because cuDNN cannot: No valid execution plans built" in caplog.text
    with pytest.raises(torch.OutOfMemoryError):
        fail(torch.OutOfMemoryError("full"))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_merged_results_are_those_of_all_keys(head_dim: int) -> None:
    q, k, v = (randn(70, heads, head_dim, dtype=HALF) for heads in (4, 2, 2))
    k[40:] *= 3
    expected, expected_total = attend_reference(q, k, v, 0.2, is_causal=False)
    for put_together in (merge, merge_reference):
        out, log_total = attend_reference(q, k[:40], v[:40], 0.2, is_causal=False)
        put_together(out, log_total, *attend_reference(q, k[40:], v[40:], 0.2, is_causal=False))
        assert_close(out, expected.float())
        torch.testing.assert_close(log_total, expected_total)


@pytest.fixture
def unit(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let short prompts be long on the CPU, where the reference is slow; returns the unit of stretches."""
    if HAS_CUDA:
        monkeypatch.setattr(long_prefill, "MOST_KEYS", 2 * UNIT)
        monkeypatch.setattr(prefill_plan, "LONGEST", 3 * UNIT)
        return UNIT
    for module, name, value in (
        (prefill_plan, "UNIT", 16),
        (prefill_plan, "LONG", 32),
        (prefill_plan, "LONGEST", 48),
        (long_prefill, "MOST_KEYS", 32),
    ):
        monkeypatch.setattr(module, name, value)
    return 16


def packed_step(
    query_lens: list[int], context_lens: list[int], k_cache: Tensor, v_cache: Tensor, tables: Tensor
) -> tuple[Context, GroupContext]:
    """Return a step of prompts with stretches."""
    cu_query_lens = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    division = divide(query_lens, context_lens)
    assert division is not None
    rows, *pieces = (
        torch.tensor(numbers.tolist(), dtype=torch.int32, device=DEVICE)
        for numbers in (division.rows, division.cu_query_lens, division.context_lens)
    )
    divided = DividedPrefill(division.stretches, division.max_query_len, *pieces)
    packed = PackedQueries(query_lens, context_lens, cu_query_lens, cu_query_lens, [False] * len(lens), divided)
    group = GroupContext(lens, tables, tables[rows])
    return Context({0: (k_cache, v_cache)}, [group], cu_query_lens, lens, 0, packed), group


SHAPES = (4, 4, 64, 16), (8, 2, 128, 256), (4, 1, 128, 48)


@pytest.mark.parametrize(("in_fp8", "shape"), of_each_kind(product((False, True), SHAPES), 1, 5), ids=str)
def test_attention_of_a_step(in_fp8: bool, shape: tuple[int, int, int, int], unit: int) -> None:
    """Prompts with and without stretches, with and without a cached context, that begin and end anywhere."""
    heads, _, head_dim, _ = shape
    query_lens = [2 * unit, 3, 4 * unit - 5, 4 * unit + 1, unit + 1, 3 * unit]
    cached = [0, 9, 3, 5 * unit, 0, unit // 2 + 1]
    context_lens = [new + old for new, old in zip(query_lens, cached, strict=True)]
    k_cache, v_cache, tables = paged(context_lens, *shape, torch.float32 if in_fp8 else HALF)
    exact, kv_scales = (k_cache, v_cache), None
    if in_fp8:
        kv_scales = scales()
        (k_cache, k), (v_cache, v) = quantized(k_cache, kv_scales[0]), quantized(v_cache, kv_scales[1])
        exact = k, v
    q = randn(sum(query_lens), heads, head_dim, dtype=HALF)
    context, group = packed_step(query_lens, context_lens, k_cache, v_cache, tables)
    assert context.prefill is not None
    assert context.prefill.divided is not None
    assert len(context.prefill.divided.stretches) == 5  # one of 4 units is cut
    expected = {}
    for window in (None, unit):
        how = Scoring(head_dim**-0.5, window, None, kv_scales)
        out = make_backend("triton", alike(k_cache.shape[1], window)).prefill(q, k_cache, v_cache, context, group, how)
        expected[window] = attend_densely(q, *exact, tables, query_lens, context_lens, how)
        assert_close(out, expected[window])
    assert not torch.allclose(expected[None], expected[unit])


@pytest.mark.parametrize("options", [*whole_only([{}]), {"max_num_batched_tokens": 50}], ids=["whole", "in chunks"])
def test_tokens_of_long_prompts(
    options: dict[str, int], unit: int, make_qwen3: Callable[..., str], make_llm: Callable[..., LLM]
) -> None:
    """They equal those of the reference's attention, in float32; the second prompt goes on behind a cached one."""
    if HAS_CUDA:
        pytest.skip("cuDNN computes in 16 bits")
    folder = make_qwen3(head_dim=64, num_hidden_layers=1)
    prompts = [[i * 7 % 500 for i in range(length)] for length in (75, 110, 20)]
    tokens = []
    for backend in ("torch", "triton"):
        llm = make_llm(folder, attention_backend=backend, kvcache_block_size=16, max_model_len=128, **options)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        for prompt in prompts:
            tokens.append(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert tokens[:3] == tokens[3:]


@pytest.mark.gpu
def test_log_probabilities_of_a_long_prompt(make_qwen3: Callable[..., str], make_llm: Callable[..., LLM]) -> None:
    """They are those of our kernel, within what 16 bits round, in one chunk and in several."""
    folder = make_qwen3(head_dim=128, max_position_embeddings=20_000)
    prompt = torch.randint(0, 512, (11_000,)).tolist()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=10_000)
    sums = []
    for budget in (11_000, 4100, 4000):
        llm = make_llm(folder, dtype="bfloat16", max_model_len=12_000, max_num_batched_tokens=budget)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        chosen = [entry[prompt[i]].logprob for i, entry in enumerate(output.prompt_logprobs) if entry is not None]
        sums.append(torch.tensor(chosen))
    for computed in sums[:2]:
        assert (computed - sums[2]).abs().mean() < 0.01
