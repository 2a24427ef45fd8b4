"""CacheLayout: blocks of equal bytes for layers that remember in different ways, by example and for any layers."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from conftest import alike, layout_of
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoinfer.attention import block_unit
from nanoinfer.attention.cache_layout import (
    CacheLayout,
    Matrices,
    Memory,
    Pages,
    State,
    kinds_of,
    lay_out,
)
from nanoinfer.attention.packing import MOST_TIMES_LARGER, MOST_WASTE
from nanoinfer.runner.memory.kv_cache import KVCacheSpec

LONG = 16_384  # tokens


def every(count: int, full: Pages, window: Pages, num_layers: int) -> list[Memory]:
    """Return what layers remember of which each `count`-th, and no other, sees all tokens."""
    return [window if (layer + 1) % count else full for layer in range(num_layers)]


def same_heads(count: int, window: int, kv_heads: int, head_dim: int, num_layers: int) -> list[Memory]:
    return every(count, Pages(kv_heads, head_dim), Pages(kv_heads, head_dim, window), num_layers)


GEMMA_3_12B = same_heads(6, 1024, 8, 256, 48)
GEMMA_4_26B = every(6, Pages(2, 512), Pages(8, 256, 1024), 30)
# What layers remember, and the tokens in blocks of those that see all, and of those that have a window.
PUBLISHED = {
    "Gemma 3 1b": (same_heads(6, 512, 1, 256, 26), 352, 64),
    "Gemma 3 4b": (same_heads(6, 1024, 4, 256, 34), 384, 64),
    "Gemma 3 12b": (GEMMA_3_12B, 320, 64),
    "Gemma 3 27b": (same_heads(6, 1024, 16, 128, 62), 640, 128),
    "Gemma 2 9b": (same_heads(2, 4096, 8, 256, 42), 256, 256),
    "OLMo 3 7b": (same_heads(4, 4096, 32, 128, 32), 384, 128),
    "Gemma 4 26b": (GEMMA_4_26B, 640, 64),
    "Gemma 4 12b": (every(6, Pages(1, 512), Pages(8, 256, 1024), 48), 1280, 64),
    "Gemma 4 E2B": ([*every(5, Pages(1, 512), Pages(1, 256, 512), 15), *[None] * 20], 256, 128),
    "gpt-oss 20b": (same_heads(2, 128, 8, 64, 24), 256, 256),
    "gpt-oss 120b": (same_heads(2, 128, 8, 64, 36), 256, 256),
    "MiMo-V2-Flash": (every(6, Pages(4, 192, value_dim=128), Pages(8, 192, 129, value_dim=128), 48), 640, 64),
}


def laid_out(memory: list[Memory | None], block_size: int = 256) -> CacheLayout:
    """Lay out the cache as for the Triton kernels."""
    head_dim = max(pages.head_dim for pages in kinds_of(memory))
    return lay_out(memory, block_size, block_unit("triton", block_size, head_dim))


class TestPublishedShapes:
    @pytest.mark.parametrize("name", PUBLISHED)
    def test_blocks_of_both_kinds_are_nearly_full(self, name: str) -> None:
        memory, full_size, window_size = PUBLISHED[name]
        layout = laid_out(memory)
        assert [group.block_size for group in layout.groups] == [full_size, window_size]
        assert [group.window is None for group in layout.groups] == [True, False]
        assert layout.waste <= MOST_WASTE
        assert layout.block_size == 256

    @pytest.mark.parametrize("name", PUBLISHED)
    def test_a_layer_is_in_the_group_of_those_that_remember_alike(self, name: str) -> None:
        memory, _, _ = PUBLISHED[name]
        layout = laid_out(memory)
        remembering = [layer for layer, own in enumerate(memory) if own is not None]
        assert sorted(layer for group in layout.groups for layer in group.layers) == remembering
        assert all(memory[layer] == group.pages for group in layout.groups for layer in group.layers)

    def test_long_sequences_take_a_quarter_of_what_they_take_if_all_layers_see_all(self) -> None:
        layout, full = laid_out(GEMMA_3_12B), laid_out([Pages(8, 256)] * 48)
        num_bytes, all_bytes = (16 * each.blocks_of(LONG) * each.block_numbers for each in (layout, full))
        assert all_bytes == 16 * LONG * 48 * 2 * 8 * 256
        assert num_bytes <= all_bytes / 4

    def test_a_page_has_the_heads_of_its_own_group(self) -> None:
        full, window = laid_out(GEMMA_4_26B).groups
        assert (full.pages, len(full.layers)) == (Pages(2, 512), 5)
        assert (window.pages, len(window.layers)) == (Pages(8, 256, 1024), 25)

    @pytest.mark.parametrize("block_size", [16, 256, 4080, 4096, 65_552, 2**20 + 16, 2**31 - 16])
    @pytest.mark.parametrize("name", ["Gemma 3 1b", "Gemma 3 27b", "Gemma 4 26b"])
    def test_blocks_of_any_size_are_found_soon(self, name: str, block_size: int) -> None:
        memory, _, _ = PUBLISHED[name]
        before = time.process_time()
        layout = laid_out(memory, block_size)
        assert time.process_time() - before < 10
        assert block_size <= layout.prefix_size <= 2 * block_size * MOST_TIMES_LARGER


class TestOneGroup:
    @pytest.mark.parametrize("window", [None, 1024])
    def test_its_blocks_have_the_size_that_is_asked_for(self, window: int | None) -> None:
        layout = lay_out([Pages(8, 128, window)] * 36, 48, 16)
        assert (layout.block_size, layout.prefix_size, layout.waste) == (48, 48, 0)
        assert [group.block_size for group in layout.groups] == [48]
        assert layout.block_numbers == 48 * 36 * 2 * 8 * 128
        assert layout.pool_of(10) == layout.asked_by(10) == 10

    def test_states_take_bytes_of_a_sequence_and_no_pages(self) -> None:
        pages = [Pages(2, 64)] * 3
        delta, convolution = State(100, 4, Matrices(1, 2, 16, 8)), State(30, 3)
        layout = lay_out([pages[0], delta, delta, pages[1], convolution, pages[2]], 256, 128)
        assert layout.states == ((1, delta), (2, delta), (4, convolution))
        token = 2 * (16 + 2 * 8) + 4 * 2  # a key, an update of each head, and their decays
        assert [state.num_bytes(2, 4, 0) for state in (delta, convolution)] == [2 * 400 + 4 * 256 + 65 * token, 2 * 90]
        assert [state.num_bytes(2, 4, 3) for state in (delta, convolution)] == [2 * 700 + 4 * 256 + 71 * token, 2 * 180]
        assert [group.layers for group in layout.groups] == [(0, 3, 5)]
        without = lay_out(pages, 256, 128)
        assert (layout.grid, without.grid) == (64, 1)
        assert replace(layout, groups=without.groups, states=()) == without

    def test_a_layer_may_have_both(self) -> None:
        delta = State(100, 4, Matrices(1, 2, 16, 8))
        layout, without = (lay_out([one, Pages(2, 64)], 256, 128) for one in ((Pages(2, 64), delta), Pages(2, 64)))
        assert layout.states == ((0, delta),)
        assert replace(layout, states=()) == without


class TestTwoModels:
    def test_a_draft_models_layers_come_behind(self) -> None:
        """Those of the same shape share blocks with the model's; others have groups behind."""
        window, whole, small = Pages(8, 128, 64), Pages(8, 128), Pages(4, 64)
        layout = lay_out([window, whole], 256, 128, draft=[small, whole, small])
        assert [(group.pages, group.layers) for group in layout.groups] == [
            (whole, (1, 3)),
            (window, (0,)),
            (small, (2, 4)),
        ]
        model, draft = layout.part(range(2)), layout.part(range(2, 5))
        assert [(group.pages, group.layers) for group in model.groups] == [(whole, (1,)), (window, (0,))]
        assert [(group.pages, group.layers) for group in draft.groups] == [(small, (0, 2)), (whole, (1,))]
        assert [draft.pages_of_a_slice(group) for group in draft.groups] == [
            layout.pages_of_a_slice(layout.groups[number]) for number in (2, 0)
        ]

    def test_heads_keep_what_they_see_behind_the_model(self) -> None:
        """As many of them lag by so many tokens at most."""
        window, whole = Pages(8, 128, 64), Pages(8, 128)
        groups = lay_out([window, whole], 256, 128, draft=[window] * 3).groups
        assert [(group.layers, group.lag) for group in groups] == [((1,), 0), ((0, 2, 3, 4), 3)]
        assert [group.first_seen(200) for group in groups] == [0, 200 - 63 - 3]
        assert [group.first_seen(65) for group in groups] == [0, 0]
        assert lay_out([window], 64, 64).groups[0].first_seen(200) == 200 - 63
        assert [lay_out([window], 64, 64, draft=own).groups[0].most_blocks for own in ([], [window])] == [3, 4]


class TestLengths:
    def test_a_window_bounds_what_a_sequence_holds(self) -> None:
        full, window = layout_of((8, None), (2, 5)).groups
        assert (full.most_blocks, window.most_blocks) == (None, 3 + 2)
        assert [full.blocks_of(length) for length in (0, 1, 8, 9, 800)] == [0, 1, 1, 2, 100]
        assert [window.blocks_of(length) for length in (0, 1, 2, 9, 10, 800)] == [0, 1, 1, 5, 5, 5]

    def test_the_longest_sequence_grows_with_the_blocks_up_to_the_limit(self) -> None:
        layout = layout_of((8, None), (2, 5))
        assert [layout.longest(blocks, 1000) for blocks in (0, 1, 2, 5, 6, 7, 8)] == [0, 0, 2, 8, 8, 16, 24]
        assert layout.longest(8, 20) == 20

    def test_without_a_full_group_few_blocks_hold_any_length(self) -> None:
        layout = alike(4, window=6)
        assert layout.blocks_of(10**9) == 4
        assert layout.longest(4, 10**9) == 10**9
        assert layout.longest(3, 10**9) == 12

    def test_a_pool_holds_as_many_tokens_of_all_layers_as_the_option_says(self) -> None:
        layout = replace(layout_of((8, None), (2, 5)), block_size=4)
        assert [layout.pool_of(asked) for asked in range(4)] == [0, 1 + 2, 1 + 4, 2 + 6]
        assert [layout.asked_by(blocks) for blocks in (2, 3, 4, 5, 7, 8)] == [0, 1, 1, 2, 2, 3]

    def test_blocks_hold_more_tokens_of_sequences_that_outgrow_their_windows(self) -> None:
        layout = layout_of((8, None), (2, 5))
        assert layout.tokens_of(100, 8) == 100 * 8 // 5
        assert layout.tokens_of(100, 1) == layout.tokens_of(100, 8)
        assert layout.tokens_of(100, 800) == 100 * 800 // 105


pages = st.builds(
    Pages,
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, None, 1, 20, 64, 1000]),
    value_dim=st.sampled_from([None, None, 1, 6]),
)
kinds = st.lists(st.tuples(pages, st.integers(1, 7)), min_size=1, max_size=3)


@st.composite
def memories(draw: st.DrawFn) -> list[Memory]:
    """Layers of at most three kinds, and some with states, in any order."""
    memory: list[Memory] = [layer for layer, times in draw(kinds) for _ in range(times)]
    memory += [State(8, 3)] * draw(st.integers(0, 2))
    return draw(st.permutations(memory))


@st.composite
def layouts(draw: st.DrawFn) -> CacheLayout:
    return lay_out(draw(memories()), draw(st.sampled_from([16, 32, 48])), draw(st.sampled_from([16, 32])))


class TestAnyLayers:
    @given(memory=memories(), block_size=st.sampled_from([16, 32, 48]), unit=st.sampled_from([16, 32]))
    @settings(max_examples=60, deadline=None)
    def test_each_layer_with_pages_is_in_one_group_and_blocks_divide_a_prefix(
        self, memory: list[Memory], block_size: int, unit: int
    ) -> None:
        layout = lay_out(memory, block_size, unit)
        layers = [layer for group in layout.groups for layer in group.layers]
        assert sorted(layers) == [layer for layer, each in enumerate(memory) if isinstance(each, Pages)]
        assert len(layout.states) == sum(isinstance(each, State) for each in memory)
        assert len(layout.groups) == len({group.pages for group in layout.groups}) == len(kinds_of(memory))
        for group in layout.groups:
            assert all(memory[layer] == group.pages for layer in group.layers)
            assert layout.prefix_size % group.block_size == 0
        windows = [group.window is not None for group in layout.groups]
        assert windows == sorted(windows)
        if len(layout.groups) > 1:
            assert layout.prefix_size >= block_size
            assert all(group.block_size % 16 == 0 for group in layout.groups)

    @given(layout=layouts())
    @settings(max_examples=60, deadline=None)
    def test_the_pages_of_each_group_fit_a_block(self, layout: CacheLayout) -> None:
        used = []
        for group in layout.groups:
            page = group.block_size * group.pages.numbers
            assert layout.slice_numbers % page == 0
            assert group.pages_of_a_block == len(group.layers) * (2 if group.pages.value_dim is None else 1)
            assert group.pages_of_a_block <= layout.slices * layout.pages_of_a_slice(group)
            used.append(group.pages_of_a_block * page)
        assert layout.waste == 1 - min(used) / layout.block_numbers
        assert max(used) > layout.block_numbers - layout.slice_numbers  # no slice is empty in all groups

    @given(layout=layouts(), by_head=st.booleans(), data=st.data())
    @settings(max_examples=40, deadline=None)
    def test_no_two_numbers_are_at_one_place(self, layout: CacheLayout, by_head: bool, data: st.DataObject) -> None:
        """Whichever group has which block."""
        num_blocks = 5
        cache = KVCacheSpec(layout, torch.int32, by_head).allocate(num_blocks, torch.device("cpu"))
        assert cache.nbytes == num_blocks * layout.block_numbers * 4
        owners = data.draw(st.tuples(*[st.integers(0, len(layout.groups) - 1)] * num_blocks))
        views = [
            view[block_id * cache.steps[owner]]
            for block_id, owner in enumerate(owners)
            for layer in layout.groups[owner].layers
            for view in cache.layers[layer]
        ]
        first = 1
        for view in views:
            view.copy_(torch.arange(first, first + view.numel()).view_as(view))
            first += view.numel()
        assert cache.memory.count_nonzero() == first - 1
        first = 1
        for view in views:
            assert torch.equal(view, torch.arange(first, first + view.numel(), dtype=torch.int32).view_as(view))
            first += view.numel()

    @given(layout=layouts())
    @settings(max_examples=40, deadline=None)
    def test_a_view_has_the_shape_of_its_pages(self, layout: CacheLayout) -> None:
        cache = KVCacheSpec(layout, torch.int8, by_head=False).allocate(3, torch.device("cpu"))
        assert set(cache.layers) == {layer for group in layout.groups for layer in group.layers}
        for group, step in zip(layout.groups, cache.steps, strict=True):
            for layer in group.layers:
                sizes = group.pages.head_dim, group.pages.value_dim or group.pages.head_dim
                for view, size in zip(cache.layers[layer], sizes, strict=True):
                    assert view.shape[1:] == (group.block_size, group.pages.kv_heads, size)
                    assert len(view) > 2 * step

    @given(layout=layouts(), blocks=st.integers(0, 200), limit=st.integers(0, 5000))
    @settings(max_examples=200, deadline=None)
    def test_the_longest_sequence_fits_and_a_longer_one_does_not(
        self, layout: CacheLayout, blocks: int, limit: int
    ) -> None:
        longest = layout.longest(blocks, limit)
        assert 0 <= longest <= limit
        assert layout.blocks_of(longest) <= blocks
        assert longest == limit or layout.blocks_of(longest + 1) > blocks

    @given(layout=layouts(), asked=st.integers(0, 200), blocks=st.integers(0, 2000))
    @settings(max_examples=200, deadline=None)
    def test_who_asks_for_a_pool_gets_the_tokens(self, layout: CacheLayout, asked: int, blocks: int) -> None:
        tokens = asked * layout.block_size
        pool = layout.pool_of(asked)
        assert layout.blocks_of(tokens) <= pool  # windows may leave some over
        assert layout.longest(pool, tokens) == tokens
        assert layout.asked_by(pool) >= asked
        most = layout.asked_by(blocks)
        assert layout.pool_of(most) <= blocks < layout.pool_of(most + 1)

    @given(layout=layouts(), length=st.integers(1, 5000), count=st.integers(1, 20))
    @settings(max_examples=200, deadline=None)
    def test_the_blocks_of_some_sequences_hold_their_tokens(self, layout: CacheLayout, length: int, count: int) -> None:
        rounded = -(-length // layout.prefix_size) * layout.prefix_size
        assert layout.tokens_of(count * layout.blocks_of(rounded), length) == count * rounded
