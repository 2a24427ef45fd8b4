"""How large the KV cache may be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanoinfer.config import Config
from nanoinfer.models.qwen3 import head_dim

CPU_BYTES = 4 << 30
BYTES_PER_GRAPH = 16 << 20


@dataclass(frozen=True)
class KVCacheSpec:
    """One rank's share of the cache, but for the number of blocks."""

    layers: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Config, ranks: int) -> KVCacheSpec:
        """The cache that a config's model needs."""
        hf = config.hf_config
        return cls(
            hf.num_hidden_layers,
            config.kvcache_block_size,
            hf.num_key_value_heads // ranks,
            head_dim(hf),
            config.torch_dtype,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of block_size tokens in every layer."""
        return 2 * self.layers * self.block_size * self.kv_heads * self.head_dim * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> Tensor:
        """A cache of zeros, [2, layers, blocks, block_size, kv_heads, head_dim], keys before values.

        Zeros, because a masked key has weight 0, and 0 times an uninitialised NaN is NaN.
        """
        shape = (2, self.layers, num_blocks, self.block_size, self.kv_heads, self.head_dim)
        if device.type == "cuda":
            return torch.zeros(shape, dtype=self.dtype, device=device)
        # NumPy's zeros cost no memory before they are written.
        return torch.from_numpy(np.zeros(num_blocks * self.block_bytes, np.uint8)).view(self.dtype).view(shape)


def num_blocks_on_cuda(config: Config, spec: KVCacheSpec, device: torch.device, num_graphs: int) -> int:
    """Blocks for what the device has left, after the largest step has run.

    total * gpu_memory_utilization - used - (peak - current) - graphs, where `used` counts every process on the
    device, peak - current is what the largest step needs while it runs, and a graph's own memory is an estimate.
    Raises ValueError when not even one sequence of max_model_len fits.
    """
    stats = torch.cuda.memory_stats(device)
    transient = stats["allocated_bytes.all.peak"] - stats["allocated_bytes.all.current"]
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    budget = int(total * config.gpu_memory_utilization) - (total - free) - transient - num_graphs * BYTES_PER_GRAPH
    return _fit(config, spec, budget, "raise gpu_memory_utilization, or lower max_model_len or max_num_batched_tokens")


def num_blocks_on_cpu(config: Config, spec: KVCacheSpec) -> int:
    """Blocks for a fixed budget, but no more than all rows at their longest need."""
    blocks = _fit(config, spec, CPU_BYTES, "set num_kvcache_blocks, or lower max_model_len")
    return min(blocks, config.max_num_seqs * -(-config.max_model_len // spec.block_size))


def _fit(config: Config, spec: KVCacheSpec, budget: int, remedy: str) -> int:
    needed = -(-config.max_model_len // spec.block_size) * spec.block_bytes
    if budget < needed:
        raise ValueError(
            f"the KV cache has {max(budget, 0) / 2**20:,.0f} MiB, but one sequence of"
            f" max_model_len={config.max_model_len} needs {needed / 2**20:,.0f} MiB: {remedy}"
        )
    return budget // spec.block_bytes
