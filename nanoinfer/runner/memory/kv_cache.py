"""The KV cache: its shape, its bytes, copies of its blocks."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from nanoinfer.kernels.fp8 import as_bytes
from nanoinfer.runner.transfer import upload

BLOCKS_AT_ONCE = 4  # in a copy


@dataclass(frozen=True)
class KVCacheSpec:
    """The shape of one rank's KV cache, but for the number of blocks.

    by_head: a block's keys of one head lie side by side in memory, as the CPU's products want; else a token's heads do
    """

    layers: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    by_head: bool

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of block_size tokens in every layer."""
        return 2 * self.layers * self.block_size * self.kv_heads * self.head_dim * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> Tensor:
        """Allocate a cache of zeros, [2, layers, blocks, block_size, kv_heads, head_dim], keys before values.

        Zeros, because a masked key has weight 0, and 0 times an uninitialised NaN is NaN.
        Raises ValueError when the memory does not hold it.
        """
        token_dims = (self.kv_heads, self.block_size) if self.by_head else (self.block_size, self.kv_heads)
        shape = (2, self.layers, num_blocks, *token_dims, self.head_dim)
        try:
            if device.type == "cuda":
                cache = torch.empty(shape, dtype=self.dtype, device=device)
                as_bytes(cache).zero_()
            else:  # NumPy's zeros cost no memory before they are written
                zeros = np.zeros(num_blocks * self.block_bytes, np.uint8)
                cache = torch.from_numpy(zeros).view(self.dtype).view(shape)
        except (MemoryError, torch.OutOfMemoryError, ValueError) as error:
            size = num_blocks * self.block_bytes / 2**30
            raise ValueError(
                f"num_kvcache_blocks={num_blocks}: a KV cache of {size:,.1f} GiB does not fit the memory, in blocks of"
                f" kvcache_block_size={self.block_size} tokens: {error}"
            ) from error
        return cache.transpose(3, 4) if self.by_head else cache


def copy_blocks(kv_cache: Tensor, copies: Tensor) -> None:
    """Copy some blocks of every layer, a few at a time: a copy under way takes as much memory again.

    copies: [2, blocks] int64, the blocks to copy, and their copies
    """
    if copies.numel():
        numbers = as_bytes(kv_cache)
        for source, destination in copies.split(BLOCKS_AT_ONCE, dim=1):
            numbers[:, :, destination] = numbers[:, :, source]


def copy_pairs(kv_cache: Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copy some blocks of every layer; pairs: of a block and its copy, in host memory."""
    if pairs:
        flat = array("q", chain.from_iterable(pairs))
        copy_blocks(kv_cache, upload(flat, kv_cache.device).view(-1, 2).T)
