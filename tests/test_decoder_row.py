"""All layers of a row in one launch: they compute what the layers' own kernels do, on shapes that fit the registers."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from conftest import DEVICE, HAS_CUDA, whole_only
from decoder_rows import BLOCK_SIZE, error, make_model, row_at, run_side_by_side

triton = pytest.importorskip("triton")

from nanoinfer.kernels.decoder.row import KEYS, DecoderRow
from nanoinfer.kernels.decoder.row_model import RowModel, RowShape, decoder_row_reference

# The interpreter runs one program, and so one KV head. A GPU runs Qwen3-0.6B's shape on 128 multiprocessors.
SHAPE = (1024, 16, 8, 128, 3072) if HAS_CUDA else (256, 4, 1, 64, 512)
DTYPES = [torch.bfloat16, torch.float16] if HAS_CUDA else [torch.float16]  # the interpreter rounds bfloat16 down
LAST = 20 * BLOCK_SIZE - 1
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))


def make(dtype: torch.dtype, layers: int = 2) -> RowModel:
    model = make_model(*SHAPE, layers, dtype, DEVICE)
    if not RowShape.of(model).divides():
        pytest.skip("the device has too few multiprocessors")
    return model


def copy_of(model: RowModel) -> RowModel:
    layers = [layer._replace(k_cache=layer.k_cache.clone(), v_cache=layer.v_cache.clone()) for layer in model.layers]
    return model._replace(layers=layers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", [0, KEYS - 1, LAST, *whole_only([1, KEYS, 2 * KEYS - 2, 200])])
def test_decoder_row(position: int, dtype: torch.dtype) -> None:
    """A row of one key, of a tile less one, of several tiles, and of a full block table."""
    model = make(dtype)
    other = copy_of(model)
    row = row_at(position, DEVICE)
    result = DecoderRow(model)(*row)
    expected = decoder_row_reference(other, *row)
    limit = 0.03 if dtype == torch.bfloat16 else 0.004
    assert error(result, expected) < limit
    for layer, as_expected in zip(model.layers, other.layers, strict=True):
        torch.testing.assert_close(layer.k_cache, as_expected.k_cache, atol=0.1, rtol=0.05)
        torch.testing.assert_close(layer.v_cache, as_expected.v_cache, atol=0.1, rtol=0.05)


def test_steps_follow_each_other() -> None:
    """Each step reads what those before have written; a word's byte begins anew behind 256 layers."""
    model = make(DTYPES[0], layers=3)
    other = copy_of(model)
    decoder = DecoderRow(model)
    decoder._turn.fill_(254)
    for position in (62, 63):
        row = row_at(position, DEVICE)
        assert error(decoder(*row), decoder_row_reference(other, *row)) < 0.03


def test_an_empty_row_writes_nothing() -> None:
    model = make(DTYPES[0])
    other = copy_of(model)
    token, position, slot, pages = row_at(0, DEVICE)
    DecoderRow(model)(token, position.fill_(-1), slot.fill_(-1), pages)
    for layer, before in zip(model.layers, other.layers, strict=True):
        assert layer.k_cache.equal(before.k_cache)
        assert layer.v_cache.equal(before.v_cache)


@pytest.mark.skipif(HAS_CUDA, reason="a GPU runs the programs of a kernel itself")
@pytest.mark.skipif(TRITON < (3, 9), reason="programs in processes agree by Triton 3.9's interpreter")
@pytest.mark.parametrize("programs", [2, *whole_only([4])])
def test_programs_side_by_side(programs: int) -> None:
    """Programs share the work, each in a process of its own, and none goes ahead of what it waits for."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # whose process has no other threads
        assert pool.submit(run_side_by_side, programs, position=70).result(timeout=280) < 0.004


def test_shapes_that_fit() -> None:
    """Qwen3-0.6B's does; a larger layer's shares need more registers than there are, a smaller one's are uneven."""
    assert RowShape(1024, 16, 8, 128, 3072, programs=128).fits(2)
    assert not RowShape(2048, 16, 8, 128, 6144, programs=128).fits(2)
    assert not RowShape(4096, 32, 8, 128, 12288, programs=128).fits(2)
    assert not RowShape(896, 14, 2, 64, 4864, programs=128).fits(2)
    assert not RowShape(1024, 16, 8, 128, 3072, programs=78).fits(2)


def test_float32_does_not_fit() -> None:
    """Words keep numbers of 16 bits as they are, and no longer ones."""
    assert not RowShape(1024, 16, 8, 128, 3072, programs=128).fits(torch.float32.itemsize)
