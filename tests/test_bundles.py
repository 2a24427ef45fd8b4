"""Bundles: a row's last token and its guesses attend together, as the tokens of the step do one by one."""

from __future__ import annotations

import pytest
import torch
from conftest import DEVICE, alike, of_each_kind, plan_ahead, whole_only
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fp8 import quantized, scales
from test_kernels import DTYPES, SHAPES, SHORT, WINDOWS_AND_SOFTCAPS, assert_close, attend_densely, forget, paged, randn
from torch import Tensor

from nanoinfer.attention import make_backend, triton_backend
from nanoinfer.attention.context import Context, GroupContext, Guesses, Scoring
from nanoinfer.kernels.attention.decode.bundles import bundle, bundle_reference, bundle_triton, queries_of_a_bundle
from nanoinfer.kernels.attention.decode.paged_decode import paged_decode_reference, paged_decode_triton
from nanoinfer.kernels.launch import launch_in_between

CONTEXTS = [1, 0, 100, 300, 64, 112, 30, 0]  # of the rows' last tokens, by row; 0: the row is empty
COUNTS = [8, 0, 3, 8, 0, 1, 5, 0]
SPARE = 3  # places for guesses that no row has used
PARTS_SHAPES = [(16, 1, 64, 16), (16, 2, 256, 64)]  # as SHAPES, for which a row has several bundles
ALL_SHAPES = [SHAPES[1], *SHAPES[:1], *SHAPES[2:], *PARTS_SHAPES]
pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # of the lowest sink: the interpreter's goes to infinity


def numbers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Step:
    """A verifying step's tokens, of CONTEXTS and COUNTS: rows' last ones, guesses, and places without a token.

    row_of, context_lens: of each token; the pages hold nothing but what some token sees
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, window: int | None = None) -> None:
        heads, _, head_dim, _ = shape
        guesses = [(row, i) for row, count in enumerate(COUNTS) for i in range(1, count + 1)]
        self.row_of = numbers([*range(len(CONTEXTS)), *(row for row, _ in guesses), *[0] * SPARE]).long()
        lens = [*CONTEXTS, *(CONTEXTS[row] + i for row, i in guesses), *[0] * SPARE]
        self.lens, self.context_lens = lens, numbers(lens)
        self.first, self.counts = numbers([sum(COUNTS[:row]) for row in range(len(COUNTS))]), numbers(COUNTS)
        ends = [length + count for length, count in zip(CONTEXTS, COUNTS, strict=True)]
        self.whole = paged(ends, *shape, dtype)
        starts = [0 if window is None else max(0, length - window) for length in CONTEXTS]
        self.k_cache, self.v_cache, tables = forget(*self.whole, starts)
        self.tables = tables[self.row_of]
        self.q = randn(len(lens), heads, head_dim, dtype=dtype)
        self.tokens = [token for token, length in enumerate(lens) if length]

    def expected(self, how: Scoring, caches: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Attend from each token alone; caches: in place of the step's own."""
        k_cache, v_cache, tables = self.whole
        rows = tables[self.row_of]
        if caches is not None:
            k_cache, v_cache = caches
        return attend_densely(self.q, k_cache, v_cache, rows, [1] * len(self.lens), self.lens, how)[self.tokens]

    def guesses(self, most: int = max(COUNTS)) -> Guesses:
        return Guesses(self.row_of.int(), self.first, self.counts, most, self.q.shape[1])


def check(step: Step, how: Scoring, expected: Tensor, workers: int | None, queries: int | None = None) -> None:
    """Check the kernel in two layers: the first must leave the plan as it was."""
    guesses, k_cache = step.guesses(), step.k_cache
    queries = queries or queries_of_a_bundle(guesses.most, guesses.heads, k_cache)
    assert queries > 1
    bundles = bundle(step.context_lens, guesses.first, guesses.counts, guesses.most, queries)
    plan = plan_ahead(step.context_lens, k_cache, workers, how.window, bundles=bundles)
    rows = k_cache, step.v_cache, step.tables, step.context_lens, how.scale
    for _ in range(2):
        out = paged_decode_triton(step.q, *rows, plan, how.softcap, how.kv_scales, None, how.sinks, how.slopes)
        assert_close(out[step.tokens], expected)
        assert plan.arrivals.eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "workers"),
    [
        *((shape, 3) for shape in (ALL_SHAPES[0], ALL_SHAPES[4])),
        *whole_only((ALL_SHAPES[0], workers) for workers in (1, 40, None)),
        *whole_only(zip(ALL_SHAPES[1:4] + ALL_SHAPES[5:], [3, 40, None, 1], strict=False)),
    ],
)
def test_guesses(shape: tuple[int, int, int, int], workers: int | None, dtype: torch.dtype) -> None:
    """Rows have all guesses or some or none, one worker or several, whose keys some guesses do not see."""
    step, how = Step(shape, dtype), Scoring(shape[2] ** -0.5)
    check(step, how, step.expected(how), workers)
    k, v = (cache.float().nan_to_num() for cache in (step.k_cache, step.v_cache))
    out = paged_decode_reference(step.q.float(), k, v, step.tables, step.context_lens, 308, how.scale)
    assert_close(out[step.tokens], step.expected(how))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "window", "softcap"),
    [
        *of_each_kind([(ALL_SHAPES[0], *both) for both in WINDOWS_AND_SOFTCAPS], 0, 2),
        *whole_only((shape, *WINDOWS_AND_SOFTCAPS[1]) for shape in ALL_SHAPES[1:]),
    ],
)
def test_windows_and_soft_caps(
    shape: tuple[int, int, int, int], window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    """What lies before a row's first window is NaN; the windows of its guesses begin later."""
    step, how = Step(shape, dtype, window), Scoring(shape[2] ** -0.5, window, softcap)
    for workers in (2, 7):
        check(step, how, step.expected(how), workers)


@pytest.mark.parametrize("window", of_each_kind(zip([None, 30]), 1))
def test_sinks(window: int | None) -> None:
    """Each query counts its head's sink once, however many workers its row has."""
    heads, _, head_dim, _ = shape = SHAPES[1]
    sinks = 2 * randn(heads)
    sinks[0], sinks[1] = 12, torch.finfo(torch.bfloat16).min
    step, how = Step(shape, DTYPES[-1], window), Scoring(head_dim**-0.5, window, sinks=sinks)
    for workers in (2, 7):
        check(step, how, step.expected(how), workers)


@pytest.mark.parametrize(
    ("shape", "window"), of_each_kind([*((shape, 50) for shape in ALL_SHAPES), (ALL_SHAPES[0], None)], 0)
)
def test_a_cache_in_fp8(shape: tuple[int, int, int, int], window: int | None) -> None:
    step = Step(shape, torch.float32, window)
    how = Scoring(shape[2] ** -0.5, window, kv_scales=scales())
    (_, k), (_, v) = (quantized(cache, scale) for cache, scale in zip(step.whole[:2], scales(), strict=True))
    (step.k_cache, _), (step.v_cache, _) = (
        quantized(cache, scale) for cache, scale in zip((step.k_cache, step.v_cache), scales(), strict=True)
    )
    for dtype in (torch.float32, SHORT):
        step.q = step.q.to(dtype)
        check(step, how, step.expected(how, (k, v)), 7)


def test_bundles_of_any_size() -> None:
    step, how = Step(SHAPES[1], DTYPES[-1], 20), Scoring(0.1, 20)
    for queries in (2, 5):
        check(step, how, step.expected(how), 5, queries)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 8)), min_size=1, max_size=80),
    st.integers(8, 10),
    st.integers(1, 11),
)
def test_each_token_of_a_row_is_in_one_bundle(rows: list[tuple[int, int]], most: int, queries: int) -> None:
    lens, counts = (list(numbers) for numbers in zip(*rows, strict=True))
    counts = [count if length else 0 for length, count in rows]
    first = [sum(counts[:row]) for row in range(len(rows))]
    expected, context_lens = [], []
    for row, (length, count, own) in enumerate(zip(lens, counts, first, strict=True)):
        tokens = [row, *(len(rows) + own + i for i in range(count))] if length else []
        for begin in range(0, most + 1, queries):
            some = tokens[begin : begin + queries]
            expected.append(some + [-1] * (queries - len(some)))
            context_lens.append(length + begin + len(some) - 1 if some else 0)
    for function in (bundle_triton, bundle_reference):
        bundles = function(numbers([*lens, 7]), numbers(first), numbers(counts), most, queries)
        assert bundles.tokens.tolist() == expected
        assert bundles.context_lens.tolist() == context_lens


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "queries"),
    [(32, 8, 128, 9), (64, 8, 128, 8), (28, 4, 128, 9), (16, 8, 256, 9), (32, 8, 512, 4), (71, 1, 64, 1)],
)
def test_a_bundle_has_as_many_queries_as_four_warps_hold(
    heads: int, kv_heads: int, head_dim: int, queries: int
) -> None:
    assert queries_of_a_bundle(8, heads, torch.empty(1, 16, kv_heads, head_dim)) == queries


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("name", ["triton", "torch"])
def test_backends(name: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch backend attends from each token alone; the other has a step's bundles read their keys once."""
    step, how, bundled = Step(SHAPES[1], SHORT, window), Scoring(0.1, window), []

    def record(*args: int) -> int:
        bundled.append(args)
        return queries_of_a_bundle(*args)

    monkeypatch.setattr(triton_backend, "queries_of_a_bundle", record)
    caches = step.k_cache.nan_to_num(), step.v_cache.nan_to_num()
    group = GroupContext(step.context_lens, step.tables)
    context = Context({0: caches}, [group], step.context_lens - 1, step.context_lens, 308, guesses=step.guesses())
    backend = make_backend(name, alike(256, window))
    backend.prepare_decode(context)
    launch_in_between(step.q.device)
    assert_close(backend.decode(step.q, *caches, context, group, how)[step.tokens], step.expected(how))
    assert len(bundled) == (name == "triton")


def test_tokens_attend_one_by_one_where_two_would_not_fit() -> None:
    step = Step((71, 1, 32, 16), SHORT)
    group = GroupContext(step.context_lens, step.tables)
    caches = {0: (step.k_cache, step.v_cache)}
    context = Context(caches, [group], step.context_lens - 1, step.context_lens, 308, guesses=step.guesses())
    make_backend("triton", alike(256, None)).prepare_decode(context)
    assert group.plan.bundles is None
    assert len(group.plan.arrivals) == len(step.lens)
