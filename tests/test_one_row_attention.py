"""Attention of one row in one launch: it computes what other steps do in two, and leaves its room empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from conftest import DEVICE, HAS_CUDA, greedy
from test_kernels import DTYPES, SHORT, assert_close, randn
from torch import Tensor

from nanoinfer import LLM
from nanoinfer.attention import triton_backend
from nanoinfer.kernels.attention.decode_plan import plan_decode
from nanoinfer.kernels.attention.one_row.attend import Division, attend_to_one_row, is_one_row, room_of_one_row
from nanoinfer.kernels.attention.paged_decode import paged_decode_reference, paged_decode_triton
from nanoinfer.kernels.attention.qkv import norm_rotate_store, norm_rotate_store_reference
from nanoinfer.kernels.launch import launch_in_between
from nanoinfer.kernels.linear.dispatch import linear
from nanoinfer.kernels.norm.rms_norm import Norm
from nanoinfer.layers import attention

SHAPES = [(4, 4, 32, 16), (8, 4, 64, 256), (4, 1, 128, 48), (3, 3, 96, 32), (16, 1, 256, 64)]


class Layer(NamedTuple):
    """A layer of one row: its norms, rotation and cache."""

    norms: tuple[Norm | None, Norm | None]
    cos_sin: Tensor | None
    interleaved: bool
    caches: tuple[Tensor, Tensor]
    table: Tensor

    def to(self, dtype: torch.dtype) -> Layer:
        """Return a copy with numbers of this type."""
        norms = [None if norm is None else norm._replace(weight=norm.weight.to(dtype)) for norm in self.norms]
        caches = [cache.to(dtype, copy=True) for cache in self.caches]
        return self._replace(norms=(norms[0], norms[1]), caches=(caches[0], caches[1]))

    def where(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the position and the slot of the last of so many tokens, and their number."""
        size = self.caches[0].shape[1]
        slot = int(self.table[0, (length - 1) // size]) * size + (length - 1) % size
        position, slots, lens = (
            torch.tensor([x], dtype=torch.int32, device=DEVICE) for x in (length - 1, slot, length)
        )
        launch_in_between(lens.device)
        return position, slots, lens


def make_layer(
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    plus_one: bool | None = False,
) -> Layer:
    """Make a layer of 600 tokens or more, whose blocks lie anywhere. plus_one: None: it has no norms"""
    blocks = -(-600 // block_size)
    angles = randn(blocks * block_size, (head_dim if rotary_dim is None else rotary_dim) // 2)
    norms = [None if plus_one is None else Norm(randn(head_dim, dtype=dtype), 0.1, plus_one) for _ in range(2)]
    k_cache, v_cache = (randn(blocks, block_size, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    table = torch.randperm(blocks, device=DEVICE)[None].int()
    cos_sin = None if rotary_dim == 0 else torch.cat([angles.cos(), angles.sin()], dim=-1)
    return Layer((norms[0], norms[1]), cos_sin, interleaved, (k_cache, v_cache), table)


def forget_from(layer: Layer, length: int) -> None:
    """Leave no numbers where the last of so many tokens goes, and behind it."""
    size = layer.caches[0].shape[1]
    for place in range(length - 1, min(length + 2 * size, size * layer.table.shape[1])):
        for cache in layer.caches:
            cache[layer.table[0, place // size], place % size] = float("nan")


def attend(layer: Layer, qkv: Tensor, room: Tensor, length: int, window: int | None, softcap: float | None) -> Tensor:
    position, slot, lens = layer.where(length)
    how = room, qkv.shape[2] ** -0.5, window, softcap
    rotation = layer.cos_sin, layer.interleaved, position
    return attend_to_one_row(qkv, *layer.norms, *rotation, *layer.caches, slot, layer.table, lens, *how)


def attend_in_two(layer: Layer, qkv: Tensor, length: int, window: int | None, softcap: float | None) -> Tensor:
    """Do the same by the references of other steps' kernels."""
    position, slot, lens = layer.where(length)
    rotation = None, layer.cos_sin, layer.interleaved, None, position
    q = norm_rotate_store_reference(qkv, *layer.norms, *rotation, *layer.caches, slot)
    k, v = (cache.nan_to_num() for cache in layer.caches)
    return paged_decode_reference(q, k, v, layer.table, lens, length, qkv.shape[2] ** -0.5, window, softcap)


def check(
    layer: Layer, heads: int, lengths: list[int], window: int | None = None, softcap: float | None = None
) -> None:
    """Compare outputs and caches at contexts of these lengths, from the longest on; the room must be left as it was."""
    k_cache, _ = layer.caches
    _, _, kv_heads, head_dim = k_cache.shape
    room = room_of_one_row(k_cache, layer.table)
    assert room is not None
    for length in sorted(lengths, reverse=True):
        forget_from(layer, length)
        qkv = randn(1, heads + 2 * kv_heads, head_dim, dtype=k_cache.dtype)
        assert is_one_row(qkv, k_cache)
        wide = layer.to(torch.float32)
        expected = attend_in_two(wide, qkv.float(), length, window, softcap)
        assert_close(attend(layer, qkv, room, length, window, softcap), expected)
        for cache, expected_cache in zip(layer.caches, wide.caches, strict=True):
            assert torch.equal(cache.isnan(), expected_cache.isnan())
            assert_close(cache.nan_to_num(), expected_cache.nan_to_num())
        assert room.view(torch.int32).eq(-(2**31)).all()  # negative zeros


@pytest.mark.parametrize("dtype", [torch.float32, SHORT])
@pytest.mark.parametrize("shape", SHAPES)
def test_contexts_of_a_token_to_many_tiles(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Tiles and blocks begin and end at some of them; programs get no tile, one, and several."""
    heads, kv_heads, head_dim, block_size = shape
    layer = make_layer(kv_heads, head_dim, block_size, dtype)
    tile, programs = Division.of(layer.caches[0], layer.table)
    turns = programs * tile
    check(layer, heads, [1, 2, tile, tile + 1, tile + 2, block_size + 1, turns + 1, min(turns + tile + 7, 600), 600])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rotary_dim", "interleaved"), [(None, True), (32, True), (32, False), (0, False)])
@pytest.mark.parametrize("plus_one", [None, True])
def test_rotations_and_norms(rotary_dim: int, interleaved: bool, plus_one: bool | None, dtype: torch.dtype) -> None:
    check(make_layer(2, 64, 64, dtype, rotary_dim, interleaved, plus_one), 6, [1, 200])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(1, None), (50, 2.0), (64, None), (300, None), (None, 2.0)])
def test_windows_and_soft_caps(window: int | None, softcap: float | None, dtype: torch.dtype) -> None:
    """Keys before the window are not read: they are no numbers."""
    for length in (40, 129, 593):
        layer = make_layer(1, 64, 64, dtype)
        for place in range(max(length - (window or length), 0)):
            for cache in layer.caches:
                cache[layer.table[0, place // 64], place % 64] = float("nan")
        check(layer, 2, [length], window, softcap)


def test_an_empty_row_writes_nothing() -> None:
    """The runner tries steps before there are rows; they must end."""
    layer = make_layer(2, 64, 64, torch.float32)
    before = [cache.clone() for cache in layer.caches]
    room = room_of_one_row(layer.caches[0], layer.table)
    assert room is not None
    nowhere, no_context = (torch.tensor([x], dtype=torch.int32, device=DEVICE) for x in (-1, 0))
    launch_in_between(no_context.device)
    how = (layer.cos_sin, False, nowhere, *layer.caches, nowhere, layer.table, no_context, room, 0.1)
    attend_to_one_row(randn(1, 8, 64), *layer.norms, *how)
    assert all(torch.equal(*both) for both in zip(layer.caches, before, strict=True))
    assert room.view(torch.int32).eq(-(2**31)).all()


def test_what_it_cannot_attend_to() -> None:
    table = torch.zeros(1, 4, dtype=torch.int32, device=DEVICE)
    cache = torch.zeros(4, 64, 2, 64, device=DEVICE)
    assert room_of_one_row(cache, table) is not None
    assert room_of_one_row(cache.to(torch.float8_e4m3fn), table) is None
    assert room_of_one_row(torch.zeros(4, 64, 2, 512, device=DEVICE), table) is None
    assert room_of_one_row(torch.zeros(4, 8, 2, 64, device=DEVICE), table) is None
    assert is_one_row(torch.zeros(1, 2 * 16 + 4, 64), cache)
    assert not is_one_row(torch.zeros(1, 2 * 17 + 4, 64), cache)
    assert not is_one_row(torch.zeros(2, 8, 64), cache)
    assert not is_one_row(torch.zeros(1, 8, 64, dtype=torch.float16), cache)


@pytest.mark.skipif(HAS_CUDA, reason="it is interpreted on the CPU")
def test_steps_of_one_row_take_it(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request alone attends by it, two do not; the tokens are those of the two launches."""
    calls = []
    monkeypatch.setattr(attention, "attend_to_one_row", lambda *args: calls.append(1) or attend_to_one_row(*args))
    llm = make_llm(attention_backend="triton", kvcache_block_size=16, max_model_len=64)
    prompts = [list(range(3, 20)), list(range(40, 60))]
    alone = [llm.generate([prompt], greedy(6), use_tqdm=False)[0]["token_ids"] for prompt in prompts]
    assert len(calls) >= 2 * 5  # the first token is the prompt's
    calls.clear()
    together = [output["token_ids"] for output in llm.generate(prompts, greedy(6), use_tqdm=False)]
    assert not calls
    assert together == alone
    monkeypatch.setattr(triton_backend, "room_of_one_row", lambda *_: None)
    assert [llm.generate([prompt], greedy(6), use_tqdm=False)[0]["token_ids"] for prompt in prompts] == alone
    assert not calls


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (32, 4)])
def test_captured_layers_that_start_early(heads: int, kv_heads: int) -> None:
    """Every program loads keys while the product before still runs: each step's must be there for the next."""
    width, layers = 1024, [make_layer(kv_heads, 128, 256, torch.bfloat16) for _ in range(6)]
    weights = [randn((heads + 2 * kv_heads) * 128, width, dtype=torch.bfloat16) / 32 for _ in layers]
    outs = [randn(width, heads * 128, dtype=torch.bfloat16) / (heads * 128) ** 0.5 for _ in layers]
    first, (position, slot, lens) = randn(1, width, dtype=torch.bfloat16), layers[0].where(1)
    layers = [layer._replace(table=layers[0].table) for layer in layers]

    def step(in_one: bool) -> Tensor:
        x, plan = first, plan_decode(lens, layers[0].caches[0])
        room = room_of_one_row(layers[0].caches[0], layers[0].table)
        assert room is not None
        for layer, weight, out in zip(layers, weights, outs, strict=True):
            qkv, cos_sin = linear(x, weight).view(1, -1, 128), layer.cos_sin
            if in_one:
                how = cos_sin, False, position, *layer.caches, slot, layer.table, lens, room, 128**-0.5
                attended = attend_to_one_row(qkv, *layer.norms, *how)
            else:
                q = norm_rotate_store(qkv, *layer.norms, None, cos_sin, False, None, position, *layer.caches, slot)
                attended = paged_decode_triton(q, *layer.caches, layer.table, lens, 128**-0.5, plan)
            x = linear(attended.flatten(1), out)
        return x

    def run(in_one: bool) -> Tensor:
        """Return the outputs of 400 tokens."""
        for layer, caches in zip(layers, before, strict=True):
            for cache, old in zip(layer.caches, caches, strict=True):
                cache.copy_(old)
        step(in_one)
        torch.cuda.synchronize()
        graph, outputs = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            result = step(in_one)
        for length in range(1, 400):
            for tensor, now in zip((position, slot, lens), layers[0].where(length), strict=True):
                tensor.copy_(now)
            first.copy_(torch.sin(torch.arange(width, device=DEVICE) * length)[None])
            graph.replay()
            outputs.append(result.clone())
        return torch.cat(outputs).float()

    before = [[cache.clone() for cache in layer.caches] for layer in layers]
    expected = run(in_one=False)
    assert (run(in_one=True) - expected).norm() < 0.02 * expected.norm()
