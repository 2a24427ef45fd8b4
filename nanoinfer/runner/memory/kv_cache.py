"""The KV cache: its memory, each layer's view of it, copies of its blocks."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from nanoinfer.attention.cache_layout import CacheGroup, CacheLayout
from nanoinfer.kernels.fp8 import as_bytes
from nanoinfer.runner.transfer import upload

BLOCKS_AT_ONCE = 4  # in a copy


class KVCache:
    """The memory of all blocks, [slices, blocks, numbers of a slice], and the layers' keys and values in it.

    layers: for each layer that has pages, its keys and its values, [pages, block_size, kv_heads, head_dim]; of latents,
        values are the keys' first numbers; values of another size lie behind each head's key
    steps: for each group, the pages from one block to the next: block b is page b * step
    """

    def __init__(self, memory: Tensor, layout: CacheLayout, by_head: bool) -> None:
        """by_head: see KVCacheSpec."""
        self.memory, self.layout = memory, layout
        self.steps = [layout.pages_of_a_slice(group) for group in layout.groups]
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        for group in layout.groups:
            for index, layer in enumerate(group.layers):
                self.layers[layer] = self._keys_and_values(group, index, by_head)

    def _keys_and_values(self, group: CacheGroup, index: int, by_head: bool) -> tuple[Tensor, Tensor]:
        """View those of a layer; index: among the group's."""
        pages, first = group.pages, self._view(group, index, by_head)
        if pages.latent is not None:
            return first, first[..., : pages.latent]
        if pages.value_dim is not None:
            return first[..., : pages.head_dim], first[..., pages.head_dim :]
        return first, self._view(group, len(group.layers) + index, by_head)

    def _view(self, group: CacheGroup, page: int, by_head: bool) -> Tensor:
        """View one page of all blocks, and those between."""
        number, first = divmod(page, self.layout.pages_of_a_slice(group))
        heads, size = group.pages.kv_heads, group.block_size
        dims = (heads, size) if by_head else (size, heads)
        pages = self.memory[number].view(-1, *dims, group.pages.head_numbers)[first:]
        return pages.transpose(1, 2) if by_head else pages

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.memory.device

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.memory.nbytes

    def zero(self) -> None:
        """Fill it with zeros, as a masked key has weight 0, and 0 times a NaN is NaN."""
        as_bytes(self.memory).zero_()

    def copy_blocks(self, copies: Tensor) -> None:
        """Copy some blocks, a few at a time: a copy under way takes as much memory again.

        copies: [2, blocks] int64, the blocks to copy, and their copies
        """
        if copies.numel():
            numbers = as_bytes(self.memory)
            for source, destination in copies.split(BLOCKS_AT_ONCE, dim=1):
                numbers[:, destination] = numbers[:, source]

    def copy_pairs(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy some blocks; pairs: of a block and its copy, in host memory."""
        flat = array("q", chain.from_iterable(pairs))
        if flat:
            self.copy_blocks(upload(flat, self.device).view(-1, 2).T)


@dataclass(frozen=True)
class KVCacheSpec:
    """One rank's KV cache, but for the number of blocks.

    by_head: a page's numbers of one head lie side by side in memory, as the CPU's products want; else a token's do
    """

    layout: CacheLayout
    dtype: torch.dtype
    by_head: bool

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.layout.block_numbers * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> KVCache:
        """Allocate a cache of zeros (see KVCache.zero). Raises ValueError when the memory does not hold it."""
        shape = (self.layout.slices, num_blocks, self.layout.slice_numbers)
        try:
            if device.type == "cuda" or not self.block_bytes:
                memory = torch.empty(shape, dtype=self.dtype, device=device)
                as_bytes(memory).zero_()
            else:  # NumPy's zeros cost no memory before they are written
                zeros = np.zeros(num_blocks * self.block_bytes, np.uint8)
                memory = torch.from_numpy(zeros).view(self.dtype).view(shape)
        except (MemoryError, torch.OutOfMemoryError, ValueError) as error:
            size = num_blocks * self.block_bytes / 2**30
            raise ValueError(
                f"num_kvcache_blocks={num_blocks}: a KV cache of {size:,.1f} GiB does not fit the memory, in blocks of"
                f" {self.block_bytes / 2**20:,.2f} MiB: {error}"
            ) from error
        return KVCache(memory, self.layout, self.by_head)
