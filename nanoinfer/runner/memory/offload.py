"""Offload: how many blocks host memory is to hold, and how many may be copied beside a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanoinfer.config import Config
from nanoinfer.kernels.fp8 import as_bytes
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.process.host_memory import free_bytes
from nanoinfer.runner.memory.kv_cache import KVCache
from nanoinfer.runner.memory.plan import MEAN_TOKENS

MOST_BYTES = 32 << 30  # of host memory, for the whole LLM, if nobody says how much
SHARE_OF_FREE = 1 / 4  # likewise
# Copies are so many times faster than computing, if nobody says how much: with less, a workload that needs nothing back
# pays more than others gain. Qwen3-0.6B had 6% fewer tokens a second with a short KV cache, Qwen3-8B as many as before.
LEAST_GAIN = 3
STEP_SECONDS = 2e-3  # for which copies may go on beside any step
BLOCKS_ON_CPU = 64  # with a step
TIMED_TOKENS = 2048
PART = 10**6  # paces are compared between ranks as whole numbers


@dataclass(frozen=True)
class Offload:
    """How host memory is used.

    slots: so many blocks it may hold, of each rank
    blocks_per_step: may be copied with any step, and is done by its end
    blocks_per_token: likewise, with each token that the step computes
    slots_of_states: the states of a sequence take the slots of so many blocks
    """

    slots: int
    blocks_per_step: int
    blocks_per_token: float
    slots_of_states: int = 0

    def most(self, num_tokens: int) -> int:
        """Return how many blocks may be copied with a step of so many tokens."""
        return self.blocks_per_step + int(self.blocks_per_token * num_tokens)


def plan_offload(
    config: Config,
    kv_cache: KVCache,
    block_bytes: int,
    state_bytes: int,
    tp: TensorParallel,
    prefill: Callable[[int], object],
) -> Offload | None:
    """Decide what host memory is to hold; None: nothing. All ranks decide alike.

    block_bytes, state_bytes: of a block, and of the states of a sequence, on this rank
    prefill: computes a prompt of so many tokens
    Raises ValueError if `kv_offload_gib` holds no block.
    """
    asked, device = config.kv_offload_gib, kv_cache.device
    is_default = device.type == "cuda" and config.starts_ranks  # a trainer wants its processes' memory itself
    if asked == 0 or (asked is None and not is_default) or not config.cache_layout.groups:
        return None
    num_bytes = min(free_bytes() * SHARE_OF_FREE, MOST_BYTES) if asked is None else asked * 2**30
    slots = tp.min(int(num_bytes / (config.tensor_parallel_size * config.data_parallel_size) // block_bytes), device)
    if slots == 0 and asked is not None:
        raise ValueError(
            f"kv_offload_gib={asked:g}: holds no block of {block_bytes / 2**20:,.2f} MiB for each rank; raise it, or"
            " set it to 0"
        )
    slots_of_states = -(-state_bytes // block_bytes)
    if device.type == "cpu":
        return Offload(slots, BLOCKS_ON_CPU, 0, slots_of_states)
    to_copy = _seconds_to_copy(kv_cache)
    to_compute = _seconds_of_a_token(config, prefill, device)
    layout = config.cache_layout
    slots_of_a_prompt = sum(layout.counts) * MEAN_TOKENS / layout.prefix_size + slots_of_states
    pays = tp.min(LEAST_GAIN * 2 * slots_of_a_prompt * to_copy < MEAN_TOKENS * to_compute, device)  # there and back
    if slots == 0 or not (pays or asked is not None):
        return None
    per_step = tp.min(max(1, int(STEP_SECONDS / to_copy)), device)
    return Offload(slots, per_step, tp.min(int(PART * to_compute / to_copy), device) / PART, slots_of_states)


def _seconds_to_copy(kv_cache: KVCache) -> float:
    """Return how long a block takes from pinned memory."""
    block = as_bytes(kv_cache.memory)[:, 0]
    host = torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
    return _seconds(lambda: block.copy_(host, non_blocking=True), kv_cache.device)


def _seconds_of_a_token(config: Config, prefill: Callable[[int], object], device: torch.device) -> float:
    tokens = min(TIMED_TOKENS, config.max_num_batched_tokens, config.max_model_len - 1)
    return _seconds(lambda: prefill(tokens), device) / tokens


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the time of the second call, which has nothing to set up."""
    for _ in range(2):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
    return seconds
