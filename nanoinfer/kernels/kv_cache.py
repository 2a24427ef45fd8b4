"""Writing new keys and values into the paged cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def store_kvcache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's keys and values to its slot.

    k, v: [tokens, kv_heads, head_dim]
    k_cache, v_cache: [blocks, block_size, kv_heads, head_dim]; slot s is row s % block_size of block s // block_size
    slot_mapping: [tokens] int32; a token whose slot is -1 is written nowhere
    """
    function = store_kvcache_triton if k.is_cuda else store_kvcache_reference
    function(k, v, k_cache, v_cache, slot_mapping)


def store_kvcache_reference(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """store_kvcache in torch."""
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    k_cache.flatten(0, 1)[slots] = k[written]
    v_cache.flatten(0, 1)[slots] = v[written]


def store_kvcache_triton(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """store_kvcache as one launch."""
    tokens, kv_heads, head_dim = k.shape
    size = kv_heads * head_dim
    for x in (k, v):
        assert x.stride()[1:] == (head_dim, 1)
    _store_kvcache_kernel[(tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
    )


@triton.jit
def _store_kvcache_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    k_stride,
    v_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)  # a cache may have more than 2^31 elements
    if slot >= 0:
        i = tl.arange(0, BLOCK)
        mask = i < SIZE
        tl.store(k_cache_ptr + slot * SIZE + i, tl.load(k_ptr + token * k_stride + i, mask=mask), mask=mask)
        tl.store(v_cache_ptr + slot * SIZE + i, tl.load(v_ptr + token * v_stride + i, mask=mask), mask=mask)
