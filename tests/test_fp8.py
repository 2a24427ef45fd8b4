"""A KV cache of FP8: kernels against float64 of what the cache holds, scales, and the text that comes of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from conftest import DEVICE, greedy, of_each_kind, plan_ahead, whole_only
from safetensors.torch import load_file, save_file
from test_kernels import (
    DTYPES,
    SHAPES,
    SHORT,
    WINDOWS_AND_SOFTCAPS,
    Norm,
    assert_close,
    attend_densely,
    forget,
    paged,
    randn,
)
from torch import Tensor

from nanoinfer import BUNDLED_MODEL, LLM, LogProb, RequestOutput, SamplingParams
from nanoinfer.attention.context import Scoring
from nanoinfer.kernels.attention.decode.cpu_decode import paged_decode_cpu, plan_runs
from nanoinfer.kernels.attention.decode.decode_plan import FEW_ROWS
from nanoinfer.kernels.attention.decode.paged_decode import paged_decode_reference, paged_decode_triton
from nanoinfer.kernels.attention.fp8 import LANES, can_split, narrow_queries
from nanoinfer.kernels.attention.prefill.paged_prefill import paged_prefill_reference, paged_prefill_triton
from nanoinfer.kernels.attention.projected.qkv import norm_rotate_store_reference, norm_rotate_store_triton
from nanoinfer.kernels.fp8 import FP8, LARGEST

PLAYS = "ROMEO:\nBut, soft! what light through yonder window breaks?\nIt is the east, and Juliet is the sun.\n"
KINDS = sorted({*DTYPES, SHORT}, key=str)  # of queries


def scales(k: float = 0.5, v: float = 3.0) -> Tensor:
    return torch.tensor([k, v], device=DEVICE)


def quantized(cache: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return a cache in FP8, and the numbers that it stands for."""
    in_fp8 = (cache.float() / scale).to(FP8)
    return in_fp8, in_fp8.double() * scale


class TestWriting:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_kernel_writes_the_references_bytes(self, dtype: torch.dtype) -> None:
        """Keys and values come near powers of two, where rounding carries, below FP8's range and above it."""
        heads, kv_heads, head_dim, tokens = 2, 3, 64, 70
        exponents = torch.randint(-14, 12, (tokens, heads + 2 * kv_heads, head_dim), device=DEVICE)
        qkv = (torch.exp2(exponents) * (1 + randn(*exponents.shape) / 16) * randn(*exponents.shape).sign()).to(dtype)
        slots = torch.randperm(96, device=DEVICE)[:tokens].int()
        slots[3] = -1
        written = []
        for function in (norm_rotate_store_triton, norm_rotate_store_reference):
            caches = [torch.zeros(6, 16, kv_heads, head_dim, device=DEVICE).to(FP8) for _ in range(2)]
            function(qkv, None, None, None, None, False, None, slots, *caches, slots, scales(0.5, 1.0))
            written.append([cache.float() for cache in caches])  # so that 0 equals -0
        for ours, reference in zip(*written, strict=True):
            assert torch.equal(ours, reference)
        keys, at = qkv[:, heads : heads + kv_heads].float() / 0.5, slots.long()
        read = written[0][0].flatten(0, 1)[at[at >= 0]]
        expected = keys[at >= 0].clamp(-LARGEST, LARGEST)
        assert ((read - expected).abs() <= expected.abs() / 16 + 2**-10).all()

    def test_norms_and_rotations_come_before(self) -> None:
        qkv, angles = randn(5, 8, 64), randn(9, 32)
        rotation = torch.cat([angles.cos(), angles.sin()], dim=-1)
        norm, places = Norm(randn(64), 1e-6), torch.arange(5, device=DEVICE).int()
        plain, in_fp8 = ([torch.zeros(1, 16, 2, 64, device=DEVICE).to(kind) for _ in range(2)] for kind in (None, FP8))
        arguments = qkv, norm, norm, None, rotation, False, None, places
        norm_rotate_store_reference(*arguments, *plain, places)
        norm_rotate_store_triton(*arguments, *in_fp8, places, scales(1.0, 1.0))
        for wide, narrow in zip(plain, in_fp8, strict=True):
            assert ((wide - narrow.float()).abs() <= wide.abs() / 16 + 2**-10).all()


MANY_ROWS_SHAPES = [
    (8, 1, 64, 48),
    *whole_only(zip([(4, 2, 128, 256), (4, 2, 256, 16)])),
    pytest.param((16, 8, 128, 256), marks=pytest.mark.gpu),  # whose KV heads are as many as more programs want
]


class TestTwoTerms:
    """A program of up to eight heads multiplies the keys in FP8 by two terms, which are its queries in bfloat16."""

    def test_they_are_the_query(self) -> None:
        q = randn(LANES.value, 64, dtype=torch.bfloat16) * torch.logspace(-30, 30, LANES.value, device=DEVICE)[:, None]
        q = q.bfloat16()
        terms, unit = torch.empty(2 * LANES.value, 64, device=DEVICE), torch.empty(LANES.value, device=DEVICE)
        _narrow_kernel[(1,)](q, terms, unit, SIZE=64)
        first, second = (terms * unit.repeat(2)[:, None]).chunk(2)
        error, largest = (first + second - q.float()).abs(), q.float().abs().amax(dim=1, keepdim=True)
        assert (error <= largest / 2**17).all()
        assert not error[q.abs() * 512 >= largest].any()

    @pytest.mark.parametrize("has_sinks", of_each_kind(zip((False, True)), 1))
    @pytest.mark.parametrize(("window", "softcap"), WINDOWS_AND_SOFTCAPS)
    @pytest.mark.parametrize("shape", [(4, 2, 128, 256), *whole_only(zip([(8, 1, 64, 64), (3, 3, 96, 64)]))])
    def test_decode(
        self, shape: tuple[int, int, int, int], window: int | None, softcap: float | None, has_sinks: bool
    ) -> None:
        heads, _, head_dim, _ = shape
        context_lens = [1, 64, 100, 300, 0, 400]
        k_cache, v_cache, tables = paged(context_lens, *shape, torch.float32)
        (k8, k), (v8, v) = quantized(k_cache, scales()[0]), quantized(v_cache, scales()[1])
        q = randn(len(context_lens), heads, head_dim, dtype=torch.bfloat16)
        lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
        how = Scoring(head_dim**-0.5, window, softcap, sinks=randn(heads) if has_sinks else None)
        expected = attend_densely(q.float(), k, v, tables, [1] * len(lens), context_lens, how)
        for workers in (None, 2, 7):
            plan = plan_ahead(lens, k8, workers, window)
            assert can_split(q, k8, plan.programs.tile)
            out = paged_decode_triton(q, k8, v8, tables, lens, how.scale, plan, softcap, scales(), sinks=how.sinks)
            assert_close(out[lens > 0], expected[lens > 0])

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter warns of NaN
    def test_a_number_that_is_none_stays_none(self) -> None:
        shape = 4, 2, 128, 64
        (k8, _), (v8, _) = (quantized(cache, scales()[0]) for cache in paged([100], *shape, torch.float32)[:2])
        for value in (math.inf, -math.inf, math.nan):
            q = randn(1, 4, 128, dtype=torch.bfloat16)
            q[0, 2, 5] = value
            lens, tables = (torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in ([60], [[0]]))
            plan = plan_ahead(lens, k8)
            out = paged_decode_triton(q, k8, v8, tables, lens, 0.1, plan, None, scales())
            assert out.isfinite().all(dim=2).tolist() == [[True, True, False, True]]


@triton.jit
def _narrow_kernel(q_ptr, terms_ptr, unit_ptr, SIZE: tl.constexpr):
    lane, d = tl.arange(0, 2 * LANES), tl.arange(0, SIZE)
    terms, unit = narrow_queries(tl.load(q_ptr + lane[:, None] % LANES * SIZE + d[None, :]), True)
    tl.store(terms_ptr + lane[:, None] * SIZE + d[None, :], terms.to(tl.float32))
    tl.store(unit_ptr + tl.arange(0, LANES), unit)


class TestReading:
    @pytest.mark.parametrize("dtype", KINDS)
    @pytest.mark.parametrize(("window", "softcap"), of_each_kind([(None, None), *WINDOWS_AND_SOFTCAPS[1:3]], 2))
    @pytest.mark.parametrize("shape", of_each_kind(zip(SHAPES), 0))
    def test_decode(
        self, shape: tuple[int, int, int, int], window: int | None, softcap: float | None, dtype: torch.dtype
    ) -> None:
        heads, _, head_dim, block_size = shape
        context_lens = [1, 16, 100, 300, 64, 112]
        k_cache, v_cache, tables = paged(context_lens, *shape, torch.float32)
        (_, k), (_, v) = quantized(k_cache, scales()[0]), quantized(v_cache, scales()[1])
        q = randn(len(context_lens), heads, head_dim, dtype=dtype)
        lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
        how = Scoring(head_dim**-0.5, window, softcap)
        expected = attend_densely(q, k, v, tables, [1] * len(lens), context_lens, how)
        starts = [0 if window is None else max(0, length - window) for length in context_lens]
        k_cache, v_cache, tables = forget(k_cache, v_cache, tables, starts)
        (k8, _), (v8, _) = quantized(k_cache, scales()[0]), quantized(v_cache, scales()[1])
        for workers in (2, 7):
            plan = plan_ahead(lens, k8, workers, window)
            assert_close(paged_decode_triton(q, k8, v8, tables, lens, how.scale, plan, softcap, scales()), expected)
        wide = q.float()
        assert_close(
            paged_decode_reference(wide, k8, v8, tables, lens, 300, how.scale, window, softcap, scales()), expected
        )
        if DEVICE == "cpu":
            runs = plan_runs(tables, lens, block_size, window)
            assert_close(paged_decode_cpu(wide, k8, v8, runs, how.scale, softcap, scales()), expected)

    @pytest.mark.parametrize("dtype", of_each_kind(KINDS, 0))
    @pytest.mark.parametrize("shape", MANY_ROWS_SHAPES)
    def test_decode_of_many_rows(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        """Beyond FEW_ROWS the programs have other shapes."""
        context_lens = [1 + 37 * row % 110 for row in range(FEW_ROWS + 8)]
        k_cache, v_cache, tables = paged(context_lens, *shape, torch.float32)
        (k8, k), (v8, v) = quantized(k_cache, scales()[0]), quantized(v_cache, scales()[1])
        q = randn(len(context_lens), shape[0], shape[2], dtype=dtype)
        lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
        expected = attend_densely(q, k, v, tables, [1] * len(lens), context_lens, Scoring(0.1))
        out = paged_decode_triton(q, k8, v8, tables, lens, 0.1, plan_ahead(lens, k8), None, scales())
        assert_close(out, expected)

    @pytest.mark.parametrize("dtype", KINDS)
    @pytest.mark.parametrize(("window", "softcap"), [(None, None), *of_each_kind(WINDOWS_AND_SOFTCAPS[1:3], 1)])
    @pytest.mark.parametrize("shape", of_each_kind(zip(SHAPES), 1))
    def test_prefill(
        self, shape: tuple[int, int, int, int], window: int | None, softcap: float | None, dtype: torch.dtype
    ) -> None:
        heads, _, head_dim, _ = shape
        query_lens, context_lens = [1, 16, 70, 3, 130], [1, 16, 100, 64, 130]
        k_cache, v_cache, tables = paged(context_lens, *shape, torch.float32)
        (k8, k), (v8, v) = quantized(k_cache, scales()[0]), quantized(v_cache, scales()[1])
        q = randn(sum(query_lens), heads, head_dim, dtype=dtype)
        cu_query_lens = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
        lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
        how = Scoring(head_dim**-0.5, window, softcap)
        expected = attend_densely(q, k, v, tables, query_lens, context_lens, how)
        rest = how.scale, window, softcap, scales()
        out = paged_prefill_triton(q, k8, v8, tables, cu_query_lens, lens, max(query_lens), *rest)
        assert_close(out, expected)
        out = paged_prefill_reference(q.float(), k8, v8, tables, query_lens, context_lens, *rest)
        assert_close(out, expected)

    @pytest.mark.parametrize("largest", [1e-6, 1.0, 1e6])
    def test_queries_of_any_size(self, largest: float) -> None:
        """The kernel takes queries of bfloat16 as float16, which holds no number of such a size."""
        dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
        k_cache, v_cache, tables = paged([90, 40], 4, 2, 64, 16, torch.float32)
        (k8, k), (v8, v) = quantized(k_cache, scales()[0]), quantized(v_cache, scales()[1])
        q = (randn(2, 4, 64) * largest).to(dtype)
        lens = torch.tensor([90, 40], dtype=torch.int32, device=DEVICE)
        expected = attend_densely(q, k, v, tables, [1, 1], [90, 40], Scoring(1 / largest))
        out = paged_decode_triton(q, k8, v8, tables, lens, 1 / largest, plan_ahead(lens, k8), None, scales())
        assert_close(out, expected)

    @pytest.mark.whole
    def test_a_needle_among_30_000_keys(self) -> None:
        """All keys but one are alike to the query, and their values add up to nothing, if no sum drops small terms."""
        length, head_dim = 30_000, 64
        k_cache, v_cache, tables = paged([length], 1, 1, head_dim, 256, torch.float32)
        q = randn(1, 1, head_dim)
        k_cache *= 0.1
        place = 20_011
        block, offset = tables[0, place // 256].item(), place % 256
        k_cache[block, offset, 0], v_cache[block, offset, 0] = q[0, 0] * 2, 8.0
        (k8, k), (v8, v) = quantized(k_cache, scales()[0]), quantized(v_cache, scales()[1])
        lens = torch.tensor([length], dtype=torch.int32, device=DEVICE)
        scale = 11 / (2 * q.square().sum().item())  # the needle weighs about as much as all others
        expected = attend_densely(q, k, v, tables, [1], [length], Scoring(scale))
        assert 1 < expected.mean() < 7
        short = q.to(SHORT)
        for out in (
            paged_decode_triton(short, k8, v8, tables, lens, scale, plan_ahead(lens, k8), None, scales()),
            paged_prefill_triton(
                short, k8, v8, tables, torch.tensor([0, 1], device=DEVICE).int(), lens, 1, scale, None, None, scales()
            ),
        ):
            assert_close(out, expected)


OPTIONS: dict[str, Any] = {"device": "cpu", "kv_cache_dtype": "fp8", "kvcache_block_size": 16, "max_model_len": 400}


def test_a_block_takes_half_the_bytes_of_16_bits(make_llm: Callable[..., LLM]) -> None:
    plain, in_fp8 = (
        make_llm(**{**OPTIONS, "dtype": "float16", "kv_cache_dtype": kind}).engine.ranks.runner
        for kind in ("auto", "fp8")
    )
    assert in_fp8.holdings.kv_cache.memory.dtype == FP8
    assert 2 * in_fp8.holdings.cache_spec.block_bytes == plain.holdings.cache_spec.block_bytes


@pytest.mark.usefixtures("no_foresight")
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"max_num_batched_tokens": 7},
        {"num_kvcache_blocks": 5, "max_model_len": 80},
    ],
    ids=["2 ranks", "chunks", "preemptions"],
)
def test_the_tokens_are_the_same_however_they_are_computed(
    make_llm: Callable[..., LLM], options: dict[str, Any]
) -> None:
    prompts = [PLAYS, PLAYS[:30], "JULIET:\n"]
    params = [greedy(12), greedy(9), SamplingParams(n=2, max_tokens=5, seed=3)]
    first, second = make_llm(**OPTIONS), make_llm(**{**OPTIONS, **options})
    expected = [output.token_ids for output in first.generate(prompts, params, use_tqdm=False)]
    for _ in range(2):  # the second time the prompts come from the cache
        assert [output.token_ids for output in second.generate(prompts, params, use_tqdm=False)] == expected
    assert (second.engine.scheduler.num_preemptions > 0) == ("num_kvcache_blocks" in options)


def of_tokens(recited: list[RequestOutput], **options: Any) -> list[LogProb]:
    """Return what a model says of each token of the speeches behind the same tokens before it."""
    prompts = [output.prompt_token_ids + output.token_ids for output in recited]
    starts = [len(output.prompt_token_ids) for output in recited]
    params = [SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=start) for start in starts]
    with LLM(BUNDLED_MODEL, **{**OPTIONS, "kv_cache_dtype": "auto", **options}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    places = [zip(output.prompt_token_ids, output.prompt_logprobs, strict=True) for output in outputs]
    return [entry[token] for of_prompt in places for token, entry in of_prompt if entry is not None]


@pytest.mark.parametrize(
    ("options", "most"),
    [
        *whole_only([({"kv_cache_dtype": "fp8"}, 0.06), ({"quantization": "fp8"}, 0.06)]),
        ({"kv_cache_dtype": "fp8", "quantization": "fp8"}, 0.15),
    ],
    ids=["KV cache", "weights", "both"],
)
def test_quality(options: dict[str, Any], most: float, recited: list[RequestOutput]) -> None:
    """Three bits of a mantissa cost this model some percent of perplexity: it is tiny, and knows its text by heart."""
    plain, in_fp8 = of_tokens(recited), of_tokens(recited, **options)
    difference = (sum(plain) - sum(in_fp8)) / len(plain)
    assert -0.01 < math.expm1(difference) < most
    assert sum(entry.rank == 1 for entry in in_fp8) >= (1 - 1.5 * most) * len(plain)


class TestScales:
    @pytest.fixture
    def scaled(self, tmp_path: Path) -> str:
        """A checkpoint with scales, under two names and in two shapes."""
        for file in Path(BUNDLED_MODEL).iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.25)
        tensors["model.layers.0.self_attn.v_scale"] = torch.tensor([0.5])
        tensors["model.layers.1.self_attn.k_proj.output_scale"] = torch.tensor(2.0)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        return str(tmp_path)

    def test_they_come_from_the_checkpoint(self, scaled: str) -> None:
        with LLM(scaled, **OPTIONS) as llm, LLM(BUNDLED_MODEL, **OPTIONS) as other:
            first, second = (
                layer.mixer.attention.scoring.kv_scales for layer in llm.engine.ranks.runner.steps.model.layers[:2]
            )
            assert (first.tolist(), second.tolist()) == ([0.25, 0.5], [2.0, 1.0])
            tokens = [one.generate(PLAYS, greedy(12), use_tqdm=False)[0].token_ids for one in (llm, other)]
            assert tokens[0] == tokens[1]  # these scales are powers of two
            llm.update_weights([("model.layers.1.self_attn.v_scale", torch.tensor(3.0))], partial=True)
            assert second.tolist() == [2.0, 3.0]
            llm.sleep(level=2)
            llm.wake_up()
            assert llm.load_weights(scaled) == 2

    def test_a_cache_of_another_dtype_ignores_them(self, scaled: str) -> None:
        with LLM(scaled, **{**OPTIONS, "kv_cache_dtype": "auto"}) as llm, LLM(BUNDLED_MODEL, device="cpu") as other:
            tokens = [one.generate(PLAYS, greedy(12), use_tqdm=False)[0].token_ids for one in (llm, other)]
            assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8': must be one of 'auto', 'fp8'"),
        ({"kv_cache_dtype": "fp8", "attention_backend": "flash_attn"}, "attention_backend='flash_attn': "),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(BUNDLED_MODEL, **options)
