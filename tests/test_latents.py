"""Latent attention: each kernel of it, both forms, formats of its matrices, and what a model with it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, build
from cases.latent import LATENT
from cases.layouts import PUBLISHED, Published
from conftest import DEVICE, Oracle, greedy, of_each_kind, whole_only
from safetensors.torch import load_file, save_file
from test_four_bits import write_checkpoint as write_in_four_bits
from test_fp8 import quantized
from test_kernels import DTYPES, assert_close, paged, randn
from test_quantization import FP8_CONFIG, write_checkpoint
from torch import Tensor
from transformers import AutoConfig

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention import latents, make_backend
from nanoinfer.attention.cache_layout import Pages, lay_out
from nanoinfer.attention.context import Context, GroupContext, PackedQueries
from nanoinfer.attention.latents import plan_prefill
from nanoinfer.checkpoint import Checkpoint
from nanoinfer.config import Config
from nanoinfer.kernels.attention.decode.bundles import bundle
from nanoinfer.kernels.attention.decode.decode_plan import DecodePlan
from nanoinfer.kernels.attention.decode.paged_decode import paged_decode_reference
from nanoinfer.kernels.attention.prefill.paged_prefill import paged_prefill_reference, paged_prefill_triton
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.kernels.latent import combine
from nanoinfer.kernels.latent.decode import meet_latents, parts_of, plan_latents, queries_at_once
from nanoinfer.kernels.latent.store import rotate_and_store_reference, rotate_and_store_triton
from nanoinfer.kernels.launch import launch_in_between
from nanoinfer.kernels.norm.norm import Norm
from nanoinfer.layers.rotary import Rope, RotaryEmbedding
from nanoinfer.models import check_architectures, describe
from nanoinfer.runner.start.trials import Trials
from nanoinfer.trainer.reference import reference
from nanoinfer.weights.formats.plain.format import PLAIN

Shape = tuple[int, int, int, int]  # query heads, numbers of a latent, of a rotated key, and tokens of a block

SHAPES = [(4, 40, 8, 16), (20, 64, 16, 32)]
LARGE = [(heads, 512, 64, 256) for heads in (16, 20, 64, 128)] + [(40, 256, 32, 256)]
BUNDLED: list[tuple[Shape, int, int | None]] = [(SHAPES[0], 2, 1), (SHAPES[0], 4, None), (SHAPES[1], 3, 8)]
OF_MODELS = [pytest.param(shape, marks=pytest.mark.gpu) for shape in LARGE]
BUNDLED_OF_MODELS = [
    pytest.param(LARGE[0], 4, None, marks=pytest.mark.gpu),
    pytest.param(LARGE[1], 3, 8, marks=pytest.mark.gpu),
]


def cached(context_lens: list[int], shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return latents in random blocks, with NaN where no context has a token, and block tables."""
    heads, latent, turning, block_size = shape
    cache, _, tables = paged(context_lens, heads, 1, latent + turning, block_size, dtype)
    return cache, tables


def plan_ahead(*args: Any) -> DecodePlan:
    """Call plan_latents. The kernel loads the plan early, so another kernel must run in between, as in a step."""
    plan = plan_latents(*args)
    launch_in_between(plan.shares.device)
    return plan


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", [3, *whole_only([1, 8, None])])
@pytest.mark.parametrize("shape", [*SHAPES, *OF_MODELS])
def test_rows_meet_latents(shape: Shape, workers: int | None, dtype: torch.dtype) -> None:
    """A tile of latents is the keys, and the values; some rows have one worker, some several, one no context."""
    heads, latent, turning, _ = shape
    context_lens = [1, 16, 100, 300, 64, 0]
    cache, tables = cached(context_lens, shape, dtype)
    q = randn(len(context_lens), heads, latent + turning, dtype=dtype)
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    plan = plan_ahead(lens, cache, heads, latent, workers)
    keys = cache.float().nan_to_num()
    expected = paged_decode_reference(q.float(), keys, keys[..., :latent], tables, lens, 300, 0.1)
    for _ in range(2):  # two layers: the first must leave the plan unchanged
        out = meet_latents(q, cache, latent, tables, lens, 0.1, plan)
        assert_close(out[:5], expected[:5])


def test_results_of_several_heads_are_put_together_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is so where there are many rows; here six heads, of which the last program has two."""
    monkeypatch.setattr(combine, "FEW_ROWS", 2)
    context_lens = [1, 16, 100, 300, 64, 0]
    cache, tables = cached(context_lens, (6, 40, 8, 16), torch.float32)
    q, keys = randn(len(context_lens), 6, 48), cache.nan_to_num()
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    expected = paged_decode_reference(q, keys, keys[..., :40], tables, lens, 300, 0.1)
    for workers in (3, 8):
        out = meet_latents(q, cache, 40, tables, lens, 0.1, plan_ahead(lens, cache, 6, 40, workers))
        assert_close(out[:5], expected[:5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*of_each_kind(zip(SHAPES), 0), *OF_MODELS])
def test_rows_meet_latents_in_fp8(shape: Shape, dtype: torch.dtype) -> None:
    heads, latent, turning, _ = shape
    context_lens, scale = [1, 100, 33], torch.tensor([0.5, 0.5], device=DEVICE)
    cache, tables = cached(context_lens, shape, torch.float32)
    in_fp8, numbers = quantized(cache.nan_to_num(), scale[0])
    q = randn(len(context_lens), heads, latent + turning, dtype=dtype)
    q[0, :, :latent] = 0
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    plan = plan_ahead(lens, in_fp8, heads, latent, 3)
    expected = paged_decode_reference(q.double(), numbers, numbers[..., :latent], tables, lens, 100, 0.1)
    out = meet_latents(q, in_fp8, latent, tables, lens, 0.1, plan, scale)
    assert_close(out, expected)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "queries", "workers"), [(SHAPES[0], 3, 3), *whole_only(BUNDLED), *BUNDLED_OF_MODELS])
def test_bundles_meet_latents(
    shape: Shape, queries: int, workers: int | None, dtype: torch.dtype, in_fp8: bool
) -> None:
    """A row's last token and its guesses read a tile once; some see fewer latents than others."""
    (heads, latent, turning, _), scale = shape, torch.tensor([0.5, 0.5], device=DEVICE)
    context_lens, counts = [1, 100, 0, 300, 64], [2, 0, 0, 3, 1]
    guesses = [(row, i) for row, count in enumerate(counts) for i in range(1, count + 1)]
    row_of = torch.tensor([*range(len(counts)), *(row for row, _ in guesses)], device=DEVICE)
    lens = [*context_lens, *(context_lens[row] + i for row, i in guesses)]
    cache, tables = cached([length + count for length, count in zip(context_lens, counts, strict=True)], shape, dtype)
    keys = cache.float().nan_to_num()
    if in_fp8:
        cache, numbers = quantized(keys, scale[0])
        keys = numbers.float()
    q, tables = randn(len(lens), heads, latent + turning, dtype=dtype), tables[row_of]
    of_tokens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    first = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    first, numbers = first.cumsum(0).int() - first, first
    bundles = bundle(of_tokens, first, numbers, max(counts), queries)
    plan = plan_ahead(of_tokens, cache, heads, latent, workers, None, bundles)
    expected = paged_decode_reference(q.float(), keys, keys[..., :latent], tables, of_tokens, 303, 0.1)
    out = meet_latents(q, cache, latent, tables, of_tokens, 0.1, plan, scale if in_fp8 else None)
    has = of_tokens > 0
    assert_close(out[has], expected[has])


def test_many_heads_are_divided_among_programs() -> None:
    heads, lens = 128, torch.tensor([40, 70], dtype=torch.int32, device=DEVICE)
    cache, tables = cached([40, 70], (heads, 32, 16, 16), torch.float32)
    few = [1, 16, 20, 40, 64, 96, 128]
    assert [parts_of(some, cache.half()) for some in few] == [1, 1, 1, 1, 1, 2, 2]
    assert [parts_of(some, cache) for some in few] == [1, 1, 1, 2, 2, 3, 4]
    assert [queries_at_once(8, some, cache.half()) for some in few] == [9, 4, 3, 1, 1, 1, 1]
    q = randn(2, heads, 48)
    plan = plan_latents(lens, cache, heads, 32, 2)
    keys = cache.nan_to_num()
    expected = paged_decode_reference(q, keys, keys[..., :32], tables, lens, 70, 0.1)
    assert_close(meet_latents(q, cache, 32, tables, lens, 0.1, plan), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", of_each_kind(zip([(24, 12), (192, 128)]), 0))
def test_prompts_attend_to_values_that_are_shorter_than_keys(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    (head_dim, value_dim), query_lens, context_lens = sizes, [1, 16, 70, 3], [1, 16, 100, 64]
    k_cache, _, tables = paged(context_lens, 3, 3, head_dim, 32, dtype)
    v_cache = randn(*k_cache.shape[:3], value_dim, dtype=dtype)
    q = randn(sum(query_lens), 3, head_dim, dtype=dtype)
    ends = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    out = paged_prefill_triton(q, k_cache, v_cache, tables, ends, lens, max(query_lens), 0.2)
    wide = q.float(), k_cache.float(), v_cache.float()
    assert_close(out, paged_prefill_reference(*wide, tables, query_lens, context_lens, 0.2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("shape", [*of_each_kind(zip(SHAPES), 0), *OF_MODELS])
def test_what_stands_in_the_cache(
    shape: Shape, in_fp8: bool, interleaved: bool, scales: bool, dtype: torch.dtype
) -> None:
    """A padding token writes nothing; a latent that is not finite leaves NaN to who sees it alone."""
    (heads, latent, turning, block_size), tokens, plain = shape, 5, 12
    rope = Rope(tuple((torch.rand(turning // 2) / 10).tolist()), 1.2, interleaved)
    cos_sin = RotaryEmbedding(rope, 100).cos_sin.to(DEVICE)
    q, both = randn(tokens, heads, plain + turning, dtype=dtype), randn(tokens, 7 + latent + turning, dtype=dtype)
    kv, norm = both[:, 7:], Norm(randn(latent, dtype=dtype), 1e-6)
    if not in_fp8:  # to which the interpreter converts NaN wrongly
        kv[2, 3], kv[3, latent + 1] = float("nan"), float("inf")
    positions = torch.tensor([7, -1, 0, 99, 41], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([block_size + 3, -1, 2, 5, 0], dtype=torch.int32, device=DEVICE)
    factors = torch.rand(100, device=DEVICE) + 0.5 if scales else None
    results = []
    for write in (rotate_and_store_reference, rotate_and_store_triton):
        own, cache = q.clone(), torch.full((2, block_size, 1, latent + turning), 9.0, dtype=dtype, device=DEVICE)
        cache, kv_scales = cache.to(FP8 if in_fp8 else dtype), torch.tensor([0.25, 0.25], device=DEVICE)
        write(own, own[..., plain:], kv, norm, cos_sin, interleaved, factors, positions, cache, slots, kv_scales)
        cache = cache.to(dtype)
        assert cache.eq(9).all(dim=-1).sum() == 2 * block_size - 4
        assert in_fp8 or cache[0, 2, 0, latent:].isnan().all()
        assert in_fp8 or not cache[0, 5, 0, latent:].isfinite().all()
        assert cache[..., :latent].isfinite().all()
        results.append((own, cache.nan_to_num(0, 0, 0)))
    for ours, expected in zip(results[1], results[0], strict=True):
        assert_close(ours, expected)


def packed_context(query_lens: list[int], context_lens: list[int], tables: Tensor, cache: Tensor) -> Context:
    def numbers(some: list[int]) -> Tensor:
        return torch.tensor(some, dtype=torch.int32, device=DEVICE)

    positions = [
        place for queries, keys in zip(query_lens, context_lens, strict=True) for place in range(keys - queries, keys)
    ]
    cu = [numbers([0, *lens]).cumsum(0).int() for lens in (query_lens, context_lens)]
    packed = PackedQueries(query_lens, context_lens, *cu, [False] * len(query_lens))
    own, lens = numbers(positions), numbers(context_lens)
    return Context({0: (cache, cache)}, [GroupContext(own, tables)], own, lens, max(context_lens), packed)


def test_few_queries_meet_latents_and_many_meet_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence decides for itself, and neighbours that decide alike are taken some at a time.

    What is made lies in pages of its own, in their order.
    """
    monkeypatch.setattr(latents, "LATENTS_AT_ONCE", 130)
    query_lens, context_lens = [60, 33, 70, 1, 9, 40], [60, 33, 70, 60, 70, 90]
    cache, tables = cached(context_lens, (2, 24, 8, 16), torch.float32)
    backend = make_backend("torch", lay_out([Pages(1, 32, None, 24)], 16, 16))
    context = packed_context(query_lens, context_lens, tables, cache)
    parts = plan_prefill(context, context.groups[0], 16, backend, 16)
    assert [part.tokens for part in parts] == [slice(0, 93), slice(93, 163), slice(163, 173), slice(173, 213)]
    for part, some in zip(parts, ([0, 1], [2], [3, 4], [5]), strict=True):
        own = part.context.groups[0].block_tables
        for row, sequence in enumerate(some):
            blocks = -(-context_lens[sequence] // 16)
            used = own[row, :blocks] if part.pages is None else part.pages[own[row, :blocks].long()]
            assert used.tolist() == tables[sequence, :blocks].tolist()
    assert [part.pages is None for part in parts] == [False, False, True, False]


def test_few_queries_are_rows_where_prefills_take_no_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is so on GPUs; a step of many sequences is divided."""
    monkeypatch.setattr(latents, "ROWS_AT_ONCE", 10)
    context_lens = [60, 33, 70, 90]
    cache, tables = cached(context_lens, (2, 24, 8, 16), torch.float32)
    backend = make_backend("torch", lay_out([Pages(1, 32, None, 24)], 16, 16))
    backend.prefills_latents = False
    context = packed_context([3, 1, 9, 1], context_lens, tables, cache)
    parts = plan_prefill(context, context.groups[0], 16, backend, 16)
    assert [part.tokens for part in parts] == [slice(0, 4), slice(4, 14)]
    assert [part.context.context_lens.tolist() for part in parts] == [[58, 59, 60, 33], [*range(62, 71), 90]]
    owners = [0, 0, 0, 1], [2] * 9 + [3]
    for part, own in zip(parts, owners, strict=True):
        assert part.pages is None
        assert part.context.groups[0].block_tables.tolist() == tables[own].tolist()


LATENT_CASES = ["deepseek-v2", "glm4moelite", "minicpm3 longrope", "longcat"]
PROMPTS = [list(range(3, 90)), [7] * 20, [9, 8, 7, 6, 5]]


@pytest.mark.parametrize("name", of_each_kind(zip(LATENT_CASES), 0))
def test_both_forms_give_the_same_tokens(
    name: str, make_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values may be made for one head at a time; cached prefixes, chunks and whole prompts are alike."""
    build(CASES[name], tmp_path)
    params = greedy(8, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    results = []
    for queries, room in ((0, 1), (0, 1 << 29), (10**9, 1)):
        monkeypatch.setattr("nanoinfer.layers.latent_attention.FEWER_QUERIES", queries)
        monkeypatch.setattr("nanoinfer.layers.latent_attention.MADE_BYTES", room)
        llm = make_llm(str(tmp_path), max_num_batched_tokens=50, **CASES[name].small)
        for _ in range(2):
            results.append(llm.generate(PROMPTS, params, use_tqdm=False))
    for outputs in results[1:]:
        for output, expected in zip(outputs, results[0], strict=True):
            assert output.token_ids == expected.token_ids
            assert output.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-4)


@pytest.mark.parametrize("queries", [0, 10**9], ids=["keys", "latents"])
def test_a_cached_prefix_may_end_anywhere(
    queries: int, make_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So may a chunk: prompts of all lengths share a step's tokens."""
    build(CASES["deepseek-v2"], tmp_path)
    text, how = PROMPTS[0], {"device": "cpu", "max_model_len": 128, "kvcache_block_size": 16}
    prompts, params = [[*text[:cut], 1, 2] for cut in range(40)], greedy(2, ignore_eos=True, logprobs=0)
    expected = make_llm(str(tmp_path), enable_prefix_caching=False, **how).generate(prompts, params, use_tqdm=False)
    monkeypatch.setattr("nanoinfer.layers.latent_attention.FEWER_QUERIES", queries)
    llm = make_llm(str(tmp_path), max_num_batched_tokens=24, max_num_seqs=5, **how)
    llm.generate([text], greedy(1), use_tqdm=False)
    for output, other in zip(llm.generate(prompts, params, use_tqdm=False), expected, strict=True):
        assert output.token_ids == other.token_ids
        assert output.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)
    assert llm.stats().num_cached_tokens > 0


@pytest.mark.parametrize("name", of_each_kind(zip(LATENT_CASES), 0))
def test_the_kernels_give_the_tokens_of_the_cpu(name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Guesses meet latents in bundles."""
    build(CASES[name], tmp_path)
    prompts, params = [prompt[:20] for prompt in PROMPTS[:2]], greedy(4, ignore_eos=True)
    how = {"dtype": "float32", "max_model_len": 128, "kvcache_block_size": 16}
    expected = make_llm(str(tmp_path), device="cpu", **how).generate(prompts, params, use_tqdm=False)
    llm = make_llm(str(tmp_path), device=DEVICE, attention_backend="triton", speculation="suffix", max_guesses=2, **how)
    for output, other in zip(llm.generate(prompts, params, use_tqdm=False), expected, strict=True):
        assert output.token_ids == other.token_ids


def test_a_start_tries_what_is_made_of_the_longest_context(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """A GPU measures its memory so."""
    build(CASES["youtu"], tmp_path)
    runner = make_llm(str(tmp_path), device="cpu", max_model_len=128, max_num_batched_tokens=40).engine.ranks.runner
    step = Trials(runner.config, runner.steps.max_blocks, runner.device).largest_prefills()[-1]
    (chunk,) = step.chunks
    assert (chunk.start, len(chunk.token_ids)) == (87, 40)
    runner.run(step)


def test_a_draft_reads_latents_of_its_own(
    make_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its latents have the model's numbers in another order, so that it guesses as the model does."""
    monkeypatch.setattr("nanoinfer.layers.latent_attention.FEWER_QUERIES", 10**9)
    model, draft = tmp_path / "model", tmp_path / "draft"
    for folder in (model, draft):
        build(CASES["youtu"], folder)
    weights, order = load_file(model / "model.safetensors"), torch.arange(40).roll(7)
    for name, weight in weights.items():
        if name.endswith("kv_a_proj_with_mqa.weight"):
            weights[name] = torch.cat([weight[order], weight[40:]])
        elif name.endswith("kv_a_layernorm.weight"):
            weights[name] = weight[order]
        elif name.endswith("kv_b_proj.weight"):
            weights[name] = weight[:, order].contiguous()
    save_file(weights, draft / "model.safetensors", {"format": "pt"})
    llm = make_llm(str(model), device="cpu", speculation="draft", draft_model=str(draft), **CASES["youtu"].small)
    for output in llm.generate(PROMPTS, greedy(16, ignore_eos=True), use_tqdm=False):
        (sample,) = output.samples
        assert sample.num_accepted_tokens == sample.num_proposed_tokens > 8


def test_latents_in_fp8_are_nearly_as_good(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """A checkpoint's scale is that of latents and of keys; both forms read what is rounded."""
    build(CASES["minicpm3"], tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for layer in range(4):
        weights[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(0.05)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    rows, plain = (
        make_llm(str(tmp_path), device="cpu", kv_cache_dtype=kind, max_model_len=128, kvcache_block_size=16)
        for kind in ("fp8", "auto")
    )
    of_block, of_plain = (llm.engine.ranks.runner.holdings.cache_spec.block_bytes for llm in (rows, plain))
    assert 4 * of_block == of_plain
    for output, expected in zip(
        rows.generate(PROMPTS, params, use_tqdm=False), plain.generate(PROMPTS, params, use_tqdm=False), strict=True
    ):
        ours, theirs = ([next(iter(one.values())) for one in some.prompt_logprobs[1:]] for some in (output, expected))
        errors = [abs(one.logprob - other.logprob) for one, other in zip(ours, theirs, strict=True)]
        assert 0 < sum(errors) / len(errors) < 0.05


@pytest.mark.parametrize("ranks", [1, *whole_only([2, 4])])
@pytest.mark.parametrize("blocks", of_each_kind(zip([[128, 128], [32, 16]]), 1))
def test_matrices_in_fp8(blocks: list[int], ranks: int, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Blocks are no multiples of heads' rows: each rank reads the whole matrix that makes keys and values."""
    build(CASES["deepseek-v3"], tmp_path / "source")
    dense = write_checkpoint(tmp_path / "source", tmp_path, {**FP8_CONFIG, "weight_block_size": blocks})
    llm, oracle = (
        make_llm(str(tmp_path), device="cpu", tensor_parallel_size=ranks, max_model_len=128),
        Oracle(str(dense)),
    )
    for output in llm.generate(PROMPTS, greedy(5, ignore_eos=True), use_tqdm=False):
        assert output.token_ids == oracle.greedy(output.prompt_token_ids, 5, ignore_eos=True)


KIMI = replace(
    PUBLISHED["int4 groups"],
    config={
        **PUBLISHED["int4 groups"].config,
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    },
    others=dict.fromkeys(["self_attn", "shared_experts", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]),
)
IN_GROUPS = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96} | {
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "v_head_dim": 16,
}


@pytest.mark.parametrize("ranks", [1, *whole_only([2, 4])])
@pytest.mark.parametrize("published", [KIMI, PUBLISHED["awq"]], ids=["experts alone, as in Kimi K2", "awq"])
def test_matrices_in_int4(published: Published, ranks: int, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    case = CASES["deepseek-v3"]
    build(replace(case, settings={**case.settings, **IN_GROUPS}), tmp_path / "source")
    dense = write_in_four_bits(tmp_path / "source", tmp_path, published)
    oracle = Oracle(str(dense))
    llm = make_llm(str(tmp_path), device="cpu", tensor_parallel_size=ranks, max_model_len=128)
    for output in llm.generate(PROMPTS, greedy(5, ignore_eos=True), use_tqdm=False):
        assert output.token_ids == oracle.greedy(output.prompt_token_ids, 5, ignore_eos=True)


def test_what_is_the_texts_may_say_how_its_matrices_are_stored(tmp_path: Path) -> None:
    build(CASES["kimi-k2.5 multimodal"], tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["text_config"]["quantization_config"] = KIMI.config
    (tmp_path / "config.json").write_text(json.dumps(settings))
    model = describe(Checkpoint.open(str(tmp_path)).hf_config)
    assert model.expert_format(1).name == "int4"
    assert model.formats.of("model.layers.1.self_attn.o_proj") == PLAIN


@pytest.mark.parametrize("quantization", of_each_kind(zip(["int4", "fp8", "int8", "mxfp4"]), 0))
def test_what_is_made_of_weights_follows_them(quantization: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Through updates, and a sleep that keeps no weights."""
    build(CASES["deepseek-v3"], tmp_path)
    llm = make_llm(str(tmp_path), device="cpu", quantization=quantization, max_model_len=128, kvcache_block_size=16)
    weights = load_file(tmp_path / "model.safetensors")
    others = {name: weight / 2 if "kv_b_proj" in name else weight for name, weight in weights.items()}

    def tokens() -> list[list[int]]:
        return [output.token_ids for output in llm.generate(PROMPTS, greedy(8, ignore_eos=True), use_tqdm=False)]

    before = tokens()
    llm.update_weights(others)
    assert tokens() != before
    llm.sleep(2)
    llm.wake_up()
    llm.update_weights(weights)
    assert tokens() == before


def test_no_bit_depends_on_company_or_on_guesses(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """On the CPU each token meets latents alone."""
    build(CASES["deepseek-v3"], tmp_path)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=10, logprobs=2, ignore_eos=True)
    how = {**CASES["deepseek-v3"].small, "device": "cpu", "deterministic": True}
    together = make_llm(str(tmp_path), **how).generate(PROMPTS, params, use_tqdm=False)
    llm = make_llm(str(tmp_path), **how, speculation="suffix", num_kvcache_blocks=24, max_num_batched_tokens=40)
    for prompt, expected in zip(PROMPTS, together, strict=True):
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("deepseek")
    build(CASES["deepseek-v3"], folder)
    return str(folder)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_adapters(quantization: str | None, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """They stand beside all projections but the one that is taken apart."""
    peft = pytest.importorskip("peft")
    model = build(CASES["deepseek-v3"], tmp_path)
    llm = make_llm(str(tmp_path), device="cpu", max_adapters=2, quantization=quantization, max_model_len=128)
    config = peft.LoraConfig(r=4, target_modules=["kv_b_proj"], init_lora_weights=False)
    peft.get_peft_model(build(CASES["deepseek-v3"], tmp_path), config).save_pretrained(tmp_path / "refused")
    with pytest.raises(ValueError, match="kv_b_proj is no matrix that may have an adapter"):
        llm.load_adapter("refused", str(tmp_path / "refused"))
    if quantization is None:
        names = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False)).eval()
        adapted.save_pretrained(tmp_path / "adapter")
        llm.load_adapter("adapter", str(tmp_path / "adapter"))
        for output in llm.generate(PROMPTS, greedy(5, ignore_eos=True, adapter="adapter"), use_tqdm=False):
            ids = torch.tensor([output.prompt_token_ids])
            how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            assert output.token_ids == adapted.generate(ids, max_new_tokens=5, **how)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_backend": "flash_attn"}, "cannot attend to latents"),
        ({"deterministic": True, "device": "cuda"}, "deterministic=True: .* on a GPU"),
        ({"deterministic": True, "tensor_parallel_size": 2}, "the CPU makes keys of latents in another way"),
    ],
)
def test_what_is_refused(deepseek: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=message):
        Config(deepseek, **{"device": "cpu", **options})


def test_a_reference_for_trainers_has_none(tmp_path: Path) -> None:
    build(CASES["youtu"], tmp_path)
    folder = str(tmp_path)
    with pytest.raises(ValueError, match="latent attention"):
        reference(folder, device="cpu")


@pytest.mark.parametrize(
    ("name", "lacking"),
    [("DeepseekV32ForCausalLM", "sparse indexers"), ("KimiLinearForCausalLM", "Kimi Delta Attention")],
)
def test_what_a_relative_has_that_is_missing(name: str, lacking: str) -> None:
    with pytest.raises(ValueError, match=f"{name!r} is not supported: nanoinfer has no {lacking}"):
        check_architectures([name])


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("deepseek_v2", {"topk_method": "noaux"}, "topk_method='noaux' in its config is not supported"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True in its config is not supported"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank=0 in its config"),
        ("deepseek_v3", {"n_group": 5}, "n_group=5 in its config: must divide 12 experts"),
        ("minicpm3", {"scale_depth": -1.0}, "scale_depth=-1.0 in its config"),
    ],
)
def test_settings_that_no_model_has(name: str, settings: dict[str, Any], message: str) -> None:
    case = next(case for case in LATENT.values() if case.model_type == name)
    config = AutoConfig.for_model(name, **{**case.text_settings, **settings})
    config.architectures = [case.architecture]
    with pytest.raises(ValueError, match=message):
        describe(config)


def test_a_kimi_k2_is_called_otherwise_by_its_authors(deepseek: str, tmp_path: Path) -> None:
    settings = json.loads((Path(deepseek) / "config.json").read_text())
    settings |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert describe(Checkpoint.open(str(tmp_path)).hf_config) == describe(Checkpoint.open(deepseek).hf_config)
