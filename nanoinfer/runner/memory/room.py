"""Room: which options would let the KV cache hold a longer sequence, as things stand."""

from __future__ import annotations

from dataclasses import replace

import torch

from nanoinfer.attention import choose_backend
from nanoinfer.config import Config
from nanoinfer.models.ranks import check_ranks, check_ranks_in_order
from nanoinfer.parallel.group import MAX_RANKS
from nanoinfer.weights.formats.table import ON_THE_FLY


def room_for(config: Config, needed: int) -> str:
    """Say how many tokens fit, and what would make room for a sequence of `needed` tokens.

    config: of an LLM that has started; its max_model_len is less than `needed`
    """
    limit, blocks = config.description.max_position, config.num_kvcache_blocks
    assert blocks is not None
    held = config.cache_layout.longest(config.cache_layout.pool_of(blocks), limit)
    if needed > limit:
        return f"the model allows {limit} at most"
    if needed <= held:
        return f"{min(held, limit)} tokens fit: raise max_model_len"
    first = "" if config.max_model_len == held else "raise max_model_len, and "
    return f"{held} tokens fit: {first}{what_makes_room(config)}"


def what_makes_room(config: Config, streaming: str = "") -> str:
    """Say which options would let the KV cache hold more tokens; those that change no results come first.

    streaming: what makes room by keeping layers in host memory, if something does
    """
    if not config.fits_memory:
        return f"raise num_kvcache_blocks={config.num_kvcache_blocks}"
    if config.device == "cpu":
        return "set num_kvcache_blocks to more"
    return what_frees_memory(config, streaming)


def what_frees_memory(config: Config, streaming: str) -> str:
    """Say which options would leave more of a GPU for weights and the KV cache. streaming: as for what_makes_room"""
    parts = []
    share = config.gpu_memory_utilization
    raised = [f"gpu_memory_utilization={share:g}"] if share < 1 else []
    if _may_double_ranks(config):
        raised.append(f"tensor_parallel_size={config.tensor_parallel_size}")
    if raised:
        parts.append(f"raise {' or '.join(raised)}")
    if streaming:
        parts.append(streaming)
    adapters = f" or max_adapters={config.max_adapters}" if config.max_adapters else ""
    lowered = f"max_num_batched_tokens={config.max_num_batched_tokens} or max_num_seqs={config.max_num_seqs}"
    parts.append(f"lower {lowered}{adapters}")
    if config.sees:
        parts.append("make images smaller by image_options")
    smaller = ["kv_cache_dtype='fp8'"] if _may_cache_fp8(config) else []
    if formats := _quantizations(config):
        smaller.append(f"quantization={' or '.join(map(repr, formats))}")
    if smaller:
        parts.append(f"set {' or '.join(smaller)}")
    return ", or ".join(parts)


def _may_double_ranks(config: Config) -> bool:
    """Whether there are GPUs for twice as many ranks, and the model can be split over these."""
    ranks = 2 * config.tensor_parallel_size
    has_gpus = torch.cuda.device_count() >= ranks * config.data_parallel_size
    if not config.starts_ranks or ranks > MAX_RANKS or not has_gpus:
        return False
    try:
        check_ranks(config.description, ranks)
        if config.deterministic:
            check_ranks_in_order(config.description, ranks, on_cpu=False)
    except ValueError:
        return False
    return True


def _quantizations(config: Config) -> list[str]:
    """Return the values of `quantization` that would make the model's matrices smaller."""

    def is_possible(name: str) -> bool:
        try:
            replace(config.description, formats=ON_THE_FLY[name]).check_formats(name)
        except ValueError:
            return False
        return True

    return [] if config.description.formats.quantized else [name for name in ON_THE_FLY if is_possible(name)]


def _may_cache_fp8(config: Config) -> bool:
    """Whether the KV cache is not in FP8, and the backend could read such a one."""
    if config.kv_cache_dtype == "fp8":
        return False
    sizes = config.torch_dtype, config.kvcache_block_size, config.description.largest_head
    try:
        choose_backend(config.attention_backend, config.device, *sizes, in_fp8=True)
    except ValueError:
        return False
    return True
