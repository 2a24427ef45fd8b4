"""Prefixes that running sequences share: how they are found, cut into work, and read once in decode attention."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from cases.drafters import Prophet
from conftest import DEVICE, HAS_CUDA, of_each_kind, plan_ahead, whole_only
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoinfer import LLM, SamplingParams
from nanoinfer.engine.prefixes import shared_prefixes
from nanoinfer.engine.prefixes.shared_prefixes import PrefixFinder
from nanoinfer.engine.results.step_result import StepResult
from nanoinfer.kernels.attention.decode.bundles import bundle, queries_of_a_bundle
from nanoinfer.kernels.attention.decode.decode_plan import FEW_ROWS
from nanoinfer.kernels.attention.decode.paged_decode import paged_decode_reference, paged_decode_triton
from nanoinfer.kernels.attention.prefixes.prefix_plan import (
    TILE_QUERIES,
    SharedPrefixes,
    max_parts,
    share_queries_reference,
    share_queries_triton,
)
from nanoinfer.kernels.attention.prefixes.shared_prefix import attend_to_prefixes
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.runner.message import PrefixMessage
from nanoinfer.runner.steps.kinds import DecodeKind, graph_batch_sizes, sharing_batch_sizes

BLOCK = 256
HEADER = list(range(1000, 1100))


def find_shared(tables: list[list[int]], block_size: int = BLOCK, tile_rows: int = 16) -> PrefixMessage | None:
    return PrefixFinder(block_size, tile_rows, token_bytes=4096).find(tables)


def own_blocks(row: int, count: int = 3) -> list[int]:
    return [10 * row + i for i in range(count)]


class TestFinding:
    def test_all_rows_share_a_header(self) -> None:
        found = find_shared([HEADER[:20] + own_blocks(row) for row in range(32)])
        assert found is not None
        assert found.runs == [(0, 32, 0, 20)]
        assert found.order == list(range(32))

    def test_groups_that_are_mixed_become_neighbours(self) -> None:
        tables = [HEADER[40 * (row % 2) :][:20] + own_blocks(row) for row in range(32)]
        found = find_shared(tables)
        assert found is not None
        assert sorted(found.runs) == [(0, 16, 0, 20), (16, 16, 0, 20)]
        assert found.order == [*range(0, 32, 2), *range(1, 32, 2)]

    def test_a_shared_prefix_goes_on_for_some(self) -> None:
        tables = [HEADER[: 20 if row < 24 else 50] + own_blocks(row) for row in range(32)]
        found = find_shared(tables)
        assert found is not None
        (outer, inner) = found.runs
        assert outer == (0, 32, 0, 20)
        assert inner[1:] == (8, 20, 50)
        assert sorted(found.order[inner.first : inner.first + 8]) == list(range(24, 32))

    @pytest.mark.parametrize(
        "tables",
        [
            [own_blocks(row) for row in range(64)],
            [HEADER[:1] + own_blocks(row) for row in range(32)],
            [HEADER[3 * (row // 3) :][: 3 if row < 60 else 0] + own_blocks(row) for row in range(99)],
            [HEADER[:20] + own_blocks(row) for row in range(5)],
            [own_blocks(row) + HEADER[:20] for row in range(32)],
            [HEADER],
        ],
        ids=["nothing", "few tokens", "groups of few rows", "few rows", "not from the first block on", "one row"],
    )
    def test_what_does_not_pay(self, tables: list[list[int]]) -> None:
        assert find_shared(tables) is None

    def test_a_short_header_is_not_worth_a_result(self) -> None:
        tables = [HEADER[:4] + own_blocks(row) for row in range(400)]
        assert find_shared(tables, block_size=16) is None
        assert find_shared([HEADER[:8] + table for table in tables], block_size=16) is not None

    def test_rows_with_many_heads_share_little(self) -> None:
        """Where each row fills a tile of work by itself, nothing is read once for several."""
        tables = [HEADER[:20] + own_blocks(row) for row in range(32)]
        assert find_shared(tables, tile_rows=1) is None


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=24),
    block_size=st.sampled_from([16, 48, 256]),
    heads=st.sampled_from([(4, 2), (14, 2), (3, 3), (128, 1)]),
    workers=st.integers(1, 40),
)
def test_every_token_is_read_once(rows: list[list[int]], block_size: int, heads: tuple[int, int], workers: int) -> None:
    """A row's tiles of work and its own tokens cover its context; tables share whatever a trie of three ways shares."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MIN_ROWS", "MIN_TOKENS", "MIN_SAVED"):
            patch.setattr(shared_prefixes, name, 2)
        names: dict[tuple[int, ...], int] = {}
        trie = [[names.setdefault(tuple(path[: i + 1]), len(names)) for i in range(len(path))] for path in rows]
        tables = [[*table, 10_000 + row] for row, table in enumerate(trie)]
        found = find_shared(tables, block_size, max(64 // (heads[0] // heads[1]), 2))
    if found is None:
        assert all(a[:1] != b[:1] for i, a in enumerate(trie) for b in trie[:i] if a and b)
        return
    prefixes = make_prefixes(len(rows), heads[0], torch.empty(1, block_size, heads[1], 8, device=DEVICE))
    prefixes.workers = workers
    prefixes.fill(on_device(prefixes.pack(found.order, found.runs)))
    read: list[list[tuple[int, int, int]]] = [[] for _ in rows]
    for first, count, start, end, part in prefixes.tiles[: int(prefixes.num_tiles)].tolist():
        members = found.order[first : first + count]
        assert 0 < count * heads[0] // heads[1] <= max(TILE_QUERIES, heads[0] // heads[1])
        for row in members:
            assert (
                tables[row][start // block_size : end // block_size]
                == (tables[members[0]][start // block_size : end // block_size])
            )
            read[row].append((part, start, end))
    for row, parts in enumerate(read):
        assert [part for part, _, _ in sorted(parts)] == list(range(int(prefixes.num_parts[row])))
        assert len(parts) <= max_parts(len(rows))
        ends = [0, *(end for _, _, end in sorted(parts))]
        assert [start for _, start, _ in sorted(parts)] == ends[:-1]
        assert ends[-1] == prefixes.own_starts[row] <= len(trie[row]) * block_size


@given(rows=st.integers(1, 600), most=st.integers(1, 600))
def test_a_captured_step_has_room_for_all_parts(rows: int, most: int) -> None:
    """It may have more rows than run."""
    sizes = sharing_batch_sizes(graph_batch_sizes(most))
    captured = next((size for size in sizes if size >= rows), rows)
    assert max_parts(captured) == max_parts(rows)


def test_a_captured_step_has_few_rows_too_many() -> None:
    sizes = graph_batch_sizes(400)
    assert sizes == [1, 2, 4, 8, *range(16, 257, 16), 288, 320, 352, 384, 400]
    assert sharing_batch_sizes(sizes) == [16, *range(32, 257, 32), 320, 384, 400]
    assert graph_batch_sizes(3) == [1, 2, 3]
    assert max(graph_batch_sizes(2000)) == 512


def make_prefixes(rows: int, heads: int, k_cache: Tensor) -> SharedPrefixes:
    return SharedPrefixes(rows + 3, heads, k_cache)


def on_device(numbers: array[int]) -> Tensor:
    return torch.tensor(numbers.tolist(), dtype=torch.int32, device=DEVICE)


DTYPES = [torch.float32, torch.bfloat16] if HAS_CUDA else [torch.float32, torch.float16]
SOME = 300 if HAS_CUDA else 160  # tokens of a header; the interpreter is slow
# heads, KV heads, numbers in a head, tokens in a block
SHAPES = [
    (4, 4, 32, 16),
    (8, 4, 64, 256 if HAS_CUDA else 128),
    (14, 2, 128, 48),
    (9, 3, 96, 32),
    (8, 2, 256, 16),
    (16, 1, 512, 32),
]


KINDS = [(torch.float32, False, None), (DTYPES[1], False, None), (DTYPES[1], True, None), (torch.float32, True, 5.0)]
OTHER_SHAPES = [shape for shape in SHAPES if shape != SHAPES[3]]


@pytest.mark.parametrize(
    ("shape", "dtype", "in_fp8", "softcap"),
    [
        *of_each_kind([(SHAPES[3], *kind) for kind in KINDS], 0, 3),
        *whole_only((shape, *KINDS[i % 2 + j]) for i, shape in enumerate(OTHER_SHAPES) for j in (0, 2)),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:divide by zero")  # of what nobody reads, as rows without a token have it
class TestAttention:
    def test_it_equals_attention_of_rows_alone(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        in_fp8: bool,
        softcap: float | None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.check(shape, dtype, in_fp8, softcap, 11, monkeypatch)

    @pytest.mark.gpu
    def test_many_rows(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        in_fp8: bool,
        softcap: float | None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Beyond FEW_ROWS the programs of decode attention have other shapes, and groups fill several tiles."""
        self.check(shape, dtype, in_fp8, softcap, FEW_ROWS * 3 + 8, monkeypatch)

    def check(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        in_fp8: bool,
        softcap: float | None,
        rows: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        for name in ("MIN_ROWS", "MIN_TOKENS", "MIN_SAVED"):
            monkeypatch.setattr(shared_prefixes, name, 2)
        heads, kv_heads, head_dim, block_size = shape
        tables, lens = nested_tables(rows, block_size)
        blocks = 1 + max(map(max, tables))
        caches = [torch.randn(blocks, block_size, kv_heads, head_dim, device=DEVICE).to(dtype) for _ in range(2)]
        kv_scales = torch.tensor([0.5, 2.0], device=DEVICE)  # which only a cache in FP8 has
        if in_fp8:
            caches = [cache.to(FP8) for cache in caches]
        q = torch.randn(rows, heads, head_dim, device=DEVICE).to(dtype)
        device_tables = torch.zeros(rows, max(map(len, tables)), dtype=torch.int32, device=DEVICE)
        for row, table in enumerate(tables):
            device_tables[row, : len(table)] = torch.tensor(table)
        device_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        how = head_dim**-0.5, softcap, kv_scales
        found = find_shared(tables, block_size)
        assert found is not None
        assert {run.start for run in found.runs} != {0}
        prefixes = make_prefixes(rows, heads, caches[0])
        prefixes.fill(on_device(prefixes.pack(found.order, found.runs)))
        shared = attend_to_prefixes(q, *caches, device_tables, prefixes, *how)
        wide = caches if in_fp8 else [cache.float() for cache in caches]
        expected = paged_decode_reference(
            q.float(), *wide, device_tables, device_lens, max(lens), how[0], None, softcap, kv_scales
        )
        for workers, head_start in ((None, None), (13, 0), (13, 40), (14, 1000)):  # so few workers divide rows
            if head_start is not None:
                prefixes.head_start.fill_(head_start)
            plan = plan_ahead(device_lens, caches[0], workers, prefixes=prefixes)
            out = paged_decode_triton(q, *caches, device_tables, device_lens, how[0], plan, softcap, kv_scales, shared)
            error = (out.float() - expected).norm() / expected.norm()
            assert error < (1e-5 if dtype == torch.float32 and not in_fp8 else 6e-3)

    def test_guesses_attend_with_their_rows(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        in_fp8: bool,
        softcap: float | None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Some rows have more queries than a tile, some none, as one that has ended."""
        for name in ("MIN_ROWS", "MIN_TOKENS", "MIN_SAVED"):
            monkeypatch.setattr(shared_prefixes, name, 2)
        heads, kv_heads, head_dim, block_size = shape
        rows, most = 11, 5
        tables, lens = nested_tables(rows, block_size)
        counts = [0 if row == 4 else row * 3 % (most + 1) for row in range(rows)]
        first = [sum(counts[:row]) for row in range(rows)]
        contexts = [0 if row == 4 else length - most for row, length in enumerate(lens)]
        guesses = [(row, i) for row, count in enumerate(counts) for i in range(1, count + 1)]
        row_of = on_device(array("i", [*range(rows), *(row for row, _ in guesses), 0, 0, 0]))
        token_lens = [*contexts, *(contexts[row] + i for row, i in guesses), 0, 0, 0]
        tokens = [token for token, length in enumerate(token_lens) if length]
        context_lens = on_device(array("i", token_lens))
        blocks, width = 1 + max(map(max, tables)), max(map(len, tables))
        caches = [torch.randn(blocks, block_size, kv_heads, head_dim, device=DEVICE).to(dtype) for _ in range(2)]
        kv_scales = torch.tensor([0.5, 2.0], device=DEVICE)
        if in_fp8:
            caches = [cache.to(FP8) for cache in caches]
        q = torch.randn(len(token_lens), heads, head_dim, device=DEVICE).to(dtype)
        padded = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)
        device_tables = padded.to(DEVICE)[row_of.long()]
        found = find_shared(tables, block_size)
        assert found is not None
        prefixes = make_prefixes(rows, heads, caches[0])
        prefixes.fill(on_device(prefixes.pack(found.order, found.runs)))
        queries = queries_of_a_bundle(most, heads, caches[0])
        if queries == 1:
            return
        own = on_device(array("i", first)), on_device(array("i", counts)), most
        bundles = bundle(context_lens, *own, queries, prefixes, row_of)
        assert bundles.shared is not None
        how = head_dim**-0.5, softcap, kv_scales
        shared = attend_to_prefixes(q, *caches, device_tables, prefixes, *how, bundles.shared)
        wide = caches if in_fp8 else [cache.float() for cache in caches]
        expected = paged_decode_reference(
            q.float(), *wide, device_tables, context_lens, max(lens), how[0], None, softcap, kv_scales
        )
        for workers in (None, 13, 40):
            plan = plan_ahead(context_lens, caches[0], workers, prefixes=prefixes, bundles=bundles)
            out = paged_decode_triton(q, *caches, device_tables, context_lens, how[0], plan, softcap, kv_scales, shared)
            error = (out.float() - expected)[tokens].norm() / expected[tokens].norm()
            assert error < (1e-5 if dtype == torch.float32 and not in_fp8 else 6e-3)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 8)), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
)
def test_queries_come_in_the_order_of_their_rows(rows: list[tuple[int, int]], rng) -> None:
    lens, counts = [length for length, _ in rows], [count if length else 0 for length, count in rows]
    row_of = [*range(len(rows)), *(row for row, count in enumerate(counts) for _ in range(count)), 0, 0]
    token_lens = [*lens, *(lens[row] + 1 for row in row_of[len(rows) : -2]), 0, 0]
    order, parts = rng.sample(range(len(rows)), len(rows)), [rng.randrange(9) for _ in rows]
    prefixes = make_prefixes(len(rows), 4, torch.empty(1, 16, 4, 8, device=DEVICE))
    prefixes.order[: len(rows)] = on_device(array("i", order))
    prefixes.num_parts[: len(rows)] = on_device(array("i", parts))
    expected: list[list[int]] = []
    for row in order:
        behind = len(rows) + sum(counts[:row])
        expected.append([row, *range(behind, behind + counts[row])] if lens[row] else [])
    first = [sum(counts[:row]) for row in range(len(rows))]
    args = [on_device(array("i", numbers)) for numbers in (token_lens, row_of, first, counts)]
    for function in (share_queries_reference, share_queries_triton):
        shared = function(prefixes, *args, 8)
        starts = shared.starts.tolist()
        assert [shared.order[a:b].tolist() for a, b in pairwise(starts)] == expected
        assert shared.num_parts.tolist() == [
            parts[row] if length else 0 for row, length in zip(row_of, token_lens, strict=True)
        ]


def nested_tables(rows: int, block_size: int) -> tuple[list[list[int]], list[int]]:
    """Two of three rows share a header; every second of these goes on with some 100 tokens that they share, too."""
    header, more = (list(range(1, 1 + tokens // block_size + 1)) for tokens in (SOME, 100))
    more = [len(header) + block for block in more]
    fresh = len(header) + len(more) + 1
    tables, lens = [], []
    for row in range(rows):
        table = [*header, *(more if row % 2 else [])] if row % 3 else []
        own = 1 + row % 2
        table += range(fresh, fresh + own)
        fresh += own
        tables.append(table)
        lens.append(len(table) * block_size - row % block_size)
    return tables, lens


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sharing pay for short prompts too."""
    for name, least in (("MIN_ROWS", 2), ("MIN_TOKENS", 16), ("MIN_SAVED", 16)):
        monkeypatch.setattr(shared_prefixes, name, least)


NEEDS_TWO_GPUS = [pytest.mark.multi_gpu] if HAS_CUDA else []
OPTIONS = {"attention_backend": "triton", "kvcache_block_size": 16, "max_model_len": 64, "max_num_seqs": 8}
HEAD = list(range(30, 60))
PROMPTS = [HEAD, [*HEAD, 70], [70, 71], HEAD, [*HEAD, 60, 61, 62, 63, 70]]


def outputs(llm: LLM, most: int) -> list[list[list[int]]]:
    """Generate for PROMPTS, two samples for every second one; some end after 3 tokens, the others after `most`."""
    lens = [3, most, most, 3, most]
    params = [SamplingParams(temperature=0.8, max_tokens=lens[i], n=1 + i % 2, ignore_eos=True) for i in range(5)]
    results = llm.generate(PROMPTS, params, use_tqdm=False)
    return [[list(sample.token_ids) for sample in result.outputs] for result in results]


@pytest.fixture(scope="module")
def model(make_qwen3: Callable[..., str]) -> str:
    """A small one, for kernels are interpreted."""
    return make_qwen3(vocab_size=96, num_hidden_layers=1)


@pytest.mark.usefixtures("cheap", "no_foresight")
class TestGenerate:
    """Tokens in float32 equal those of the engine that reads every prefix for each row."""

    @pytest.mark.parametrize(
        ("most", "blocks", "ranks"),
        [*whole_only([(5, 100, 1), (5, 7, 1)]), pytest.param(3, 100, 2, marks=NEEDS_TWO_GPUS)],
        ids=["rows come and go", "some are preempted", "two ranks"],
    )
    def test_eager(
        self,
        most: int,
        blocks: int,
        ranks: int,
        model: str,
        make_llm: Callable[..., LLM],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        expected = outputs(make_llm(model, **{**OPTIONS, "attention_backend": "torch"}), most)
        llm = make_llm(model, **OPTIONS, enforce_eager=True, num_kvcache_blocks=blocks, tensor_parallel_size=ranks)
        steps: list[bool] = []
        ours = llm.engine.ranks.runner.steps
        run = ours.forward
        monkeypatch.setattr(ours, "forward", lambda *how: (steps.append(how[1].shares), run(*how))[1])
        assert outputs(llm, most) == expected
        assert any(steps)
        assert (llm.engine.scheduler.num_preemptions > 0) == (blocks < 10)

    @pytest.mark.gpu
    def test_graphs(self, model: str, make_llm: Callable[..., LLM]) -> None:
        assert outputs(make_llm(model, **OPTIONS), 20) == outputs(make_llm(model, **OPTIONS, enforce_eager=True), 20)

    @pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.gpu)])
    def test_steps_that_verify_guesses(
        self, eager: bool, model: str, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        most = 20 if HAS_CUDA else 4
        plain = make_llm(model, **{**OPTIONS, "attention_backend": "torch"})
        expected = outputs(plain, most)
        texts = [prompt + tokens for prompt, own in zip(PROMPTS, expected, strict=True) for tokens in own]
        how = {"speculation": Prophet(texts, (True, True, False)), "max_guesses": 2, "enforce_eager": eager}
        llm, shared = make_llm(model, **OPTIONS, **how), list[bool]()
        steps = llm.engine.ranks.runner.steps
        run = steps.forward

        def note(rows: int, kind: DecodeKind, longest: int) -> None:
            shared.append(kind.shares and kind.guesses > 0)
            run(rows, kind, longest)

        monkeypatch.setattr(steps, "forward", note)
        assert outputs(llm, most) == expected
        assert not eager or any(shared)
        assert llm.stats().num_accepted_tokens > 0

    @pytest.mark.whole
    @pytest.mark.parametrize("step", [2, 4])
    def test_an_interrupt_leaves_nothing_shared(self, step: int, model: str, make_llm: Callable[..., LLM]) -> None:
        """The rows of the run behind it are others; sharing goes on for these alone."""
        llm = make_llm(model, **OPTIONS, enforce_eager=True)
        alone = make_llm(model, **{**OPTIONS, "attention_backend": "torch"})
        seen: list[StepResult] = []

        def interrupt(result: StepResult) -> None:
            seen.append(result)
            if len(seen) == step:
                raise KeyboardInterrupt

        llm.engine.on_step = interrupt
        with pytest.raises(KeyboardInterrupt):
            outputs(llm, 5)
        assert not llm.has_unfinished_requests()
        prompts = [[5, *HEAD], [6, *HEAD], [5, *HEAD, 7], [5, *HEAD, 8]]
        for engine in (llm, alone):
            engine._requests.num_added = 100  # so that their seeds are the same
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        first, second = (
            [output.outputs[0].token_ids for output in engine.generate(prompts, params, use_tqdm=False)]
            for engine in (llm, alone)
        )
        assert first == second
