"""Tests that only a CUDA device can run: graphs, bfloat16, large caches, memory that is given back."""

from __future__ import annotations

import functools
import gc
import json
from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, build
from conftest import Oracle, greedy, of_each_kind, plan_ahead, whole_only

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams
from nanoinfer.attention import choose_backend, make_backend
from nanoinfer.attention.cache_layout import Pages, lay_out
from nanoinfer.engine.results.step_result import InFlight
from nanoinfer.kernels.attention.decode.decode_plan import FEW_ROWS
from nanoinfer.kernels.attention.decode.paged_decode import paged_decode_triton
from nanoinfer.kernels.attention.prefill.paged_prefill import paged_prefill_triton
from nanoinfer.kernels.attention.projected.qkv import norm_rotate_store
from nanoinfer.kernels.linear.activation import gate_mul_reference
from nanoinfer.kernels.linear.dispatch import linear, norm_linear
from nanoinfer.kernels.linear.one_wave import find_one_wave
from nanoinfer.kernels.norm.norm import Norm, normalize_reference
from nanoinfer.kernels.sampling.draw import draw_reference, draw_triton
from nanoinfer.runner.message import ChunkMessage, ChunkStates
from nanoinfer.runner.steps.prefill_inputs import PrefillInputs
from nanoinfer.runner.steps.steps import Steps

pytestmark = pytest.mark.gpu

BACKENDS = ["triton", "torch", "flash_attn"]


def available(backend: str, dtype: torch.dtype = torch.bfloat16, has_sinks: bool = False) -> str:
    try:
        return choose_backend(backend, "cuda", dtype, 256, 64, has_sinks=has_sinks)
    except ValueError as error:
        pytest.skip(str(error))


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize(
    ("backend", "temperature"),
    [*product(BACKENDS, [0.0]), ("triton", 0.7), *whole_only(product(BACKENDS[1:], [0.7]))],
)
def test_graph_equals_eager(
    backend: str, temperature: float, make_llm: Callable[..., LLM], mixed_prompts: list[list[int]]
) -> None:
    """Both run the same kernels, so bfloat16 tokens are equal. 20 rows make a graph pad its batch."""
    params = SamplingParams(temperature=temperature, max_tokens=48, ignore_eos=True)
    options = {"dtype": "bfloat16", "attention_backend": available(backend), "max_num_seqs": 32}
    graph = make_llm(**options)
    eager = make_llm(**options, enforce_eager=True)
    assert graph.engine.ranks.runner.graphs is not None
    assert eager.engine.ranks.runner.graphs is None
    assert tokens(graph, mixed_prompts[:20], params) == tokens(eager, mixed_prompts[:20], params)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_float32_graphs_equal_transformers(
    backend: str, make_llm: Callable[..., LLM], mixed_prompts: list[list[int]], mixed_expected: list[list[int]]
) -> None:
    llm = make_llm(attention_backend=backend, kvcache_block_size=16)
    assert tokens(llm, mixed_prompts, greedy()) == mixed_expected
    tight = make_llm(attention_backend=backend, kvcache_block_size=16, max_model_len=340, num_kvcache_blocks=48)
    assert tokens(tight, mixed_prompts, greedy()) == mixed_expected
    assert tight.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_logits_agree_with_float32(
    backend: str, make_llm: Callable[..., LLM], oracle: Oracle, mixed_prompts: list[list[int]]
) -> None:
    """Prompts come in two chunks, so that the second attends to the cache. transformers' own bfloat16 errs as much."""
    llm = make_llm(dtype="bfloat16", attention_backend=available(backend))
    prompt = mixed_prompts[8]
    assert len(prompt) == 300
    error = relative(logits_of(llm, prompt, 100), oracle.logits(prompt))
    assert error < 2e-2, f"relative error {error:.2e}"


def logits_of(llm: LLM, prompt: list[int], first: int) -> torch.Tensor:
    """Return the logits after each token of a prompt of up to 512 tokens, computed in two chunks."""
    steps, found = llm.engine.ranks.runner.steps, []
    tables = [list(range(3, 3 + -(-512 // group.block_size))) for group in steps.kv_cache.layout.groups]
    for first_block, table in enumerate(tables):  # of each group others, in no order
        table[:] = [first_block + len(tables) * block for block in reversed(table)]
    for start, end in ((0, first), (first, len(prompt))):
        states = ChunkStates(-1 if start == 0 else 0, 0) if steps.states else None
        chunk = ChunkMessage(array("i", prompt[start:end]), start, tables, states=states)
        packed = PrefillInputs([chunk], [], steps.kv_cache, steps.states)
        with torch.inference_mode():
            found.append(steps.model.compute_logits(steps.model(packed.token_ids, packed.context)).float().cpu())
    return torch.cat(found)


def relative(x: torch.Tensor, expected: torch.Tensor) -> float:
    return float((x - expected).norm() / expected.norm())


KINDS = [
    "llama biases, llama3 rope", "mistral window", "ministral3 window", "qwen2 yarn, windows", "qwen3", "phi3 partial",
    "gemma2", "gemma3", "olmo2", "olmo3", "granite", "smollm3 windows, biases", "glm4",
    "mixtral", "olmoe", "qwen2moe", "qwen3moe", "gptoss", "qwen3.5", "qwen3next", "lfm2",
    "gemma4", "gemma4 experts", "glm4moe", "minimax-m2", "lfm2moe",
]  # fmt: skip


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, torch.nn.Module]]:
    @functools.cache
    def make(name: str) -> tuple[str, torch.nn.Module]:
        case, folder = CASES[name], tmp_path_factory.mktemp("family")
        settings = {**case.settings, "head_dim": 64, "hidden_size": 256, "intermediate_size": 512}
        return str(folder), build(replace(case, settings=settings), folder)

    return make


class TestFamilies:
    """One model of each kind, with heads of a size that all backends support."""

    @pytest.mark.parametrize(
        ("name", "backend"),
        [
            *[(name, "triton") for name in KINDS],
            *[(KINDS[0], backend) for backend in BACKENDS[1:]],
            *whole_only(product(KINDS[1:], BACKENDS[1:])),
        ],
    )
    def test_bfloat16_logits_err_as_little_as_transformers(
        self, name: str, backend: str, family: Callable, make_llm: Callable[..., LLM]
    ) -> None:
        folder, model = family(name)
        backend = available(backend, has_sinks=name == "gptoss")
        llm = make_llm(folder, dtype="bfloat16", attention_backend=backend, max_model_len=512)
        prompt = torch.randint(160, (300,), generator=torch.Generator().manual_seed(2)).tolist()
        with torch.inference_mode():
            ids = torch.tensor([prompt], device="cuda")
            expected = model.cuda()(input_ids=ids).logits[0].cpu()
            # Not model.bfloat16(), which would round the rotary frequencies.
            short = type(model).from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").cuda().eval()
            theirs = short(input_ids=ids).logits[0].float().cpu()
        first = 128 if CASES[name].keeps_states else 100
        error, their_error = relative(logits_of(llm, prompt, first), expected), relative(theirs, expected)
        assert error < 1.3 * their_error + 2e-3, f"relative error {error:.2e}, transformers' {their_error:.2e}"

    @pytest.mark.parametrize("name", KINDS)
    def test_graph_equals_eager(self, name: str, family: Callable, make_llm: Callable[..., LLM]) -> None:
        generator = torch.Generator().manual_seed(3)
        prompts = [torch.randint(160, (length,), generator=generator).tolist() for length in (1, 17, 60, 200, 40)]
        folder, params = family(name)[0], SamplingParams(temperature=0.7, max_tokens=48, seed=1)
        options = {"dtype": "bfloat16", "max_num_seqs": 8, **CASES[name].small}
        graph, eager = make_llm(folder, **options), make_llm(folder, **options, enforce_eager=True)
        assert tokens(graph, prompts, params) == tokens(eager, prompts, params)


@pytest.mark.alone
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cache_of_more_than_two_to_the_31_elements(backend: str) -> None:
    """Blocks at both ends of a cache whose offsets do not fit 32 bits."""
    name = available(backend)
    torch.manual_seed(0)
    num_blocks, block_size, kv_heads, heads, head_dim = 8300, 256, 8, 16, 128
    assert num_blocks * block_size * kv_heads * head_dim > 2**31
    shape = (2, num_blocks, block_size, kv_heads, head_dim)
    k_cache, v_cache = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    table = torch.tensor([[num_blocks - 1, 0, num_blocks - 2]], dtype=torch.int32, device="cuda")
    length = 600
    at = torch.arange(length, device="cuda")
    slots = (table[0, at // block_size] * block_size + at % block_size).int()
    qkv = torch.randn(length, heads + 2 * kv_heads, head_dim, device="cuda").bfloat16()
    norm = Norm(torch.ones(head_dim, dtype=torch.bfloat16, device="cuda"), 1e-6)
    unrotated = torch.tensor([[1.0] * (head_dim // 2) + [0.0] * (head_dim // 2)], device="cuda")
    start = torch.zeros_like(slots)
    q = norm_rotate_store(qkv, norm, norm, None, unrotated, False, None, start, k_cache, v_cache, slots)
    k, v = (torch.rms_norm(qkv[:, heads : heads + kv_heads], (head_dim,), eps=1e-6), qkv[:, heads + kv_heads :])
    torch.testing.assert_close(k_cache.flatten(0, 1)[slots.long()], k)
    assert torch.equal(v_cache.flatten(0, 1)[slots.long()], v)

    wide = [x.float().transpose(0, 1)[None] for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    expected = expected[0].transpose(0, 1)
    lens = torch.tensor([length], dtype=torch.int32, device="cuda")
    cu = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    from nanoinfer.attention.context import Context, GroupContext, PackedQueries, Scoring

    packed = PackedQueries([length], [length], cu, cu, [False])
    group = GroupContext(slots, table)
    context = Context({0: (k_cache, v_cache)}, [group], lens, lens, length, packed)
    backend_object = make_backend(name, lay_out([Pages(kv_heads, head_dim)], block_size, block_size))
    prefilled = backend_object.prefill(q, k_cache, v_cache, context, group, Scoring(head_dim**-0.5))
    backend_object.prepare_decode(context)
    decoded = backend_object.decode(q[-1:], k_cache, v_cache, context, group, Scoring(head_dim**-0.5))
    for out, wanted in ((prefilled, expected), (decoded, expected[-1:])):
        assert (out.float() - wanted).norm() / wanted.norm() < 1e-2


def test_sampling_draws_the_references_tokens_over_a_large_vocabulary() -> None:
    logits = torch.randn(64, 151936, device="cuda").bfloat16() * 3
    temperatures = torch.full((64,), 0.8, device="cuda")
    seeds, positions = torch.arange(64, device="cuda"), torch.arange(64, device="cuda").int()
    _, ids = draw_triton(logits, temperatures, seeds, positions)
    _, expected = draw_reference(logits, temperatures, seeds, positions)
    assert torch.equal(ids, expected)


class TestStructuredOutputs:
    """Guided rows are drawn again behind the graph, among rows that are not."""

    PEOPLE = {  # noqa: RUF012
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 8},
                "age": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["name", "age"],
            "additionalProperties": False,
        },
        "minItems": 2,
        "maxItems": 3,
    }

    def params(self) -> list[SamplingParams]:
        pytest.importorskip("llguidance", reason="structured outputs need the llguidance package")
        guided = SamplingParams(max_tokens=400, structured_outputs={"json": self.PEOPLE})
        plain = SamplingParams(max_tokens=100, ignore_eos=True)
        return [replace(guided if row % 2 else plain, seed=row) for row in range(20)]

    def test_graph_equals_eager(self, make_llm: Callable[..., LLM], mixed_prompts: list[list[int]]) -> None:
        options = {"dtype": "bfloat16", "max_num_seqs": 32}
        graph, eager = make_llm(**options), make_llm(**options, enforce_eager=True)
        params = self.params()
        outputs = graph.generate(mixed_prompts[:20], params, use_tqdm=False)
        expected = eager.generate(mixed_prompts[:20], params, use_tqdm=False)
        assert [output["token_ids"] for output in outputs] == [output["token_ids"] for output in expected]
        for output in outputs[1::2]:
            assert output["finish_reason"] == "stop"
            assert 2 <= len(json.loads(output["text"])) <= 3

    def test_plain_rows_do_not_notice(self, make_llm: Callable[..., LLM], mixed_prompts: list[list[int]]) -> None:
        llm, params = make_llm(max_num_seqs=32), self.params()
        mixed = llm.generate(mixed_prompts[:20], params, use_tqdm=False)
        plain = llm.generate(mixed_prompts[:20:2], params[::2], use_tqdm=False)
        assert [output["token_ids"] for output in mixed[::2]] == [output["token_ids"] for output in plain]

    @pytest.mark.parametrize("speculation", [None, "suffix"])
    def test_the_host_does_not_wait_for_the_device_when_it_sends_masks(
        self, speculation: str | None, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm, params = make_llm(max_num_seqs=32, speculation=speculation), self.params()
        llm.generate([[30]] * 20, params, use_tqdm=False)
        call = llm.engine.ranks.runner.call

        def watched(method: str, *args: object) -> object:
            if method == "draw_guided":
                torch.cuda.set_sync_debug_mode("error")
            try:
                return call(method, *args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(llm.engine.ranks.runner, "call", watched)
        llm.generate([[31]] * 20, params, use_tqdm=False)

    @pytest.mark.alone
    @pytest.mark.parametrize("enforce_eager", [False, True])
    def test_guesses_come_to_the_host_while_the_model_runs(
        self, enforce_eager: bool, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_rows, is_early = Steps._run_rows, []

        def run_slowly(self: Steps, *args: Any) -> torch.Tensor:
            torch.cuda._sleep(50_000_000)  # cycles
            return run_rows(self, *args)

        monkeypatch.setattr(Steps, "_run_rows", run_slowly)
        llm, params = make_llm(max_num_seqs=2, speculation="suffix", enforce_eager=enforce_eager), self.params()[:2]
        read = llm.engine._read_guesses

        def watched(launched: InFlight) -> list[list[int]]:
            guesses = read(launched)
            if launched.guesses is not None:
                is_early.append(not torch.cuda.current_stream().query())
            return guesses

        monkeypatch.setattr(llm.engine, "_read_guesses", watched)
        llm.generate([[30]] * 2, [replace(own, max_tokens=20) for own in params], use_tqdm=False)
        assert len(is_early) > 1
        assert all(is_early[1:])  # before the first copy, the host allocates pinned memory, and waits for the device


def in_use(more: float) -> float:
    """Return the share of the device's memory that is in use, and more."""
    free, total = torch.cuda.mem_get_info()
    return 1 - free / total + more


@pytest.mark.alone
def test_all_device_memory_is_given_back(mixed_prompts: list[list[int]]) -> None:
    def used() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    def serve() -> LLM:
        llm = LLM(BUNDLED_MODEL, gpu_memory_utilization=in_use(0.1))
        llm.generate(mixed_prompts, greedy(4), use_tqdm=False)
        return llm

    serve().close()  # the first engine loads CUDA modules, which stay loaded
    before, free_before = used(), torch.cuda.mem_get_info()[0]
    for _ in range(5):
        serve().close()
    for _ in range(5):
        del_me = serve()
        del del_me
    assert used() == before
    assert torch.cuda.mem_get_info()[0] >= free_before - (8 << 20)


@pytest.mark.alone
def test_two_engines_share_a_device(make_llm: Callable[..., LLM], mixed_prompts: list[list[int]]) -> None:
    first = make_llm(gpu_memory_utilization=in_use(0.1), num_kvcache_blocks=None)
    second = make_llm(gpu_memory_utilization=in_use(0.1), num_kvcache_blocks=None)
    assert tokens(first, mixed_prompts[:4], greedy(8)) == tokens(second, mixed_prompts[:4], greedy(8))


def test_an_engine_outlives_another(make_llm: Callable[..., LLM], mixed_prompts: list[list[int]]) -> None:
    """An engine that closes must not give back memory that another engine's graphs work in."""
    first, second = make_llm(), make_llm()
    params = greedy(16, ignore_eos=True)
    before = tokens(second, mixed_prompts[:8], params)
    first.close()
    filler = [torch.full((64 << 20,), 255, dtype=torch.uint8, device="cuda") for _ in range(16)]
    fresh = [[*prompt, 5] for prompt in mixed_prompts[:8]]
    assert tokens(second, mixed_prompts[:8], params) == before
    after = tokens(second, fresh, params)
    assert all(block.eq(255).all() for block in filler)
    assert after == tokens(make_llm(enforce_eager=True), fresh, params)


@pytest.mark.alone
def test_a_cache_that_does_not_fit_says_what_would_help() -> None:
    with pytest.raises(ValueError, match=r"MiB.*needs.*MiB.*gpu_memory_utilization"):
        LLM(BUNDLED_MODEL, gpu_memory_utilization=0.001)


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    of_each_kind(product([torch.bfloat16, torch.float16, torch.float32], [32, 64, 96, 128, 256]), 0, 1, 2, 3, 4, 8, 13),
)
def test_the_kernels_compile_for_every_head_size(head_dim: int, dtype: torch.dtype) -> None:
    q = torch.randn(3, 4, head_dim, device="cuda").to(dtype)
    k_cache, v_cache = (torch.randn(2, 256, 2, head_dim, device="cuda").to(dtype) for _ in range(2))
    tables = torch.tensor([[1, 0]], dtype=torch.int32, device="cuda")
    lens = torch.tensor([400], dtype=torch.int32, device="cuda")
    cu = torch.tensor([0, 3], dtype=torch.int32, device="cuda")
    for window, softcap in ((None, None), (100, None), (None, 5.0), (100, 5.0)):
        prefilled = paged_prefill_triton(q, k_cache, v_cache, tables, cu, lens, 3, 0.1, window, softcap)
        for rows in (1, FEW_ROWS + 1):
            row_lens, row_tables = lens.expand(rows).contiguous(), tables.expand(rows, -1).contiguous()
            plan = plan_ahead(row_lens, k_cache, window=window)
            queries = q[-1:].expand(rows, -1, -1).contiguous()
            decoded = paged_decode_triton(queries, k_cache, v_cache, row_tables, row_lens, 0.1, plan, softcap)
            torch.testing.assert_close(prefilled[-1:].expand_as(decoded), decoded, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 40, 64, 128, 144, 200, 256, 300, 4100])
def test_linear_takes_the_right_product_whichever_kernel_is_chosen(tokens: int) -> None:
    for out_features, in_features in (
        (4096, 1024),
        (1024, 2048),
        (1024, 3072),
        (4096, 4096),
        (1000, 1152),
        (9000, 1152),
    ):
        x, weight, up = (
            torch.randn(rows, in_features, device="cuda").bfloat16() for rows in (tokens, out_features, out_features)
        )
        both = torch.cat([weight, up])
        out = linear(x, weight, may_split=True)
        wave = find_one_wave(x, weight, may_split=True)
        assert out.dim() == (3 if tokens > 1 and wave is not None and wave.pieces > 1 else 2)
        torch.testing.assert_close(
            out.view(-1, *out.shape[-2:]).sum(0).bfloat16(), F.linear(x, weight), rtol=0.02, atol=0.5
        )
        norm, bias = Norm(torch.ones_like(x[0]), 1e-6), torch.randn(len(both), device="cuda").bfloat16()
        with_bias = linear(x, weight, bias[:out_features], may_split=True)
        torch.testing.assert_close(
            with_bias.view(-1, *out.shape[-2:]).sum(0).bfloat16(),
            F.linear(x, weight, bias[:out_features]),
            rtol=0.02,
            atol=0.5,
        )
        for activation in ("silu", "gelu_tanh"):
            for bias_or_none in (None, bias):
                gated, total = norm_linear(x, None, norm, both, bias_or_none, activation)
                assert total is x
                expected = gate_mul_reference(F.linear(normalize_reference(x, norm), both, bias_or_none), activation)
                error = (gated.float() - expected.float()).norm() / expected.float().norm()
                assert error < 0.01
