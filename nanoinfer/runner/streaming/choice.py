"""Which layers of an LLM's model are streamed, by its options and what memory there is."""

from __future__ import annotations

import torch

from nanoinfer.config import AUTO_OFFLOAD, Config
from nanoinfer.process import host_memory
from nanoinfer.runner.memory.kv_cache import KVCacheSpec
from nanoinfer.runner.memory.plan import MEAN_TOKENS, SLOTS_OF_A_ROW, limit_bytes, rough_step_bytes, total_bytes
from nanoinfer.runner.memory.state_pool import StateSpec
from nanoinfer.runner.streaming.plan import (
    BUFFERS,
    LayerSizes,
    Resources,
    StreamPlan,
    least_gib,
    plan_bytes,
    plan_fastest,
)
from nanoinfer.runner.streaming.rates import link_rate, memory_rate

Specs = tuple[KVCacheSpec, StateSpec]


def choose_layers(config: Config, sizes: LayerSizes, specs: Specs, device: torch.device) -> StreamPlan:
    """Plan what weight_offload_gib asks for. Raises ValueError, saying what would do, if that saves or fits nothing.

    sizes: of this rank's weights
    """
    asked = config.weight_offload_gib
    plan = _fastest(config, sizes, specs, device) if asked == AUTO_OFFLOAD else _as_asked(config, sizes)
    in_host, total = plan.streamed_bytes(sizes) * _shares(config), host_memory.total_bytes()
    if in_host > total:
        raise ValueError(
            f"weight_offload_gib={asked!r}: {_gib(in_host)} GiB of layers would lie in host memory, which has"
            f" {_gib(total)}; {_smaller(config)}"
        )
    return plan


def host_lacks(config: Config, plan: StreamPlan, sizes: LayerSizes, error: Exception) -> ValueError:
    """Return the error for a host that has no room for the layers."""
    in_host, free = plan.streamed_bytes(sizes), host_memory.free_bytes()
    return ValueError(
        f"weight_offload_gib={config.weight_offload_gib!r}: the host has no room to pin {_gib(in_host)} GiB of layers"
        f" for each rank ({error}); {_gib(free)} GiB are free now: {_smaller(config)}"
    )


def hint(config: Config, sizes: LayerSizes, lacking: int) -> str:
    """Say which weight_offload_gib makes room for so many bytes on each rank; "": none does."""
    least = least_gib(sizes, lacking)
    if least is None:
        return ""
    other = "" if config.weight_offload_gib == AUTO_OFFLOAD else f", or {AUTO_OFFLOAD!r}"
    return f"set weight_offload_gib={least * config.tensor_parallel_size:g} or more{other}"


def _as_asked(config: Config, sizes: LayerSizes) -> StreamPlan:
    asked = float(config.weight_offload_gib)
    plan = plan_bytes(sizes, asked * 2**30 / config.tensor_parallel_size)
    if plan is not None:
        return plan
    least = least_gib(sizes, 1)
    buffers = BUFFERS * max(sizes.layers)
    what = "no number of its layers saves memory" if least is None else f"it must be more, from {least:g} on"
    raise ValueError(
        f"weight_offload_gib={asked:g}: layers come through {BUFFERS} buffers, which take {_gib(buffers)} GiB of each"
        f" GPU themselves: {what}; 0 keeps all layers on the device"
    )


def _fastest(config: Config, sizes: LayerSizes, specs: Specs, device: torch.device) -> StreamPlan:
    cache, states = specs
    free, total = torch.cuda.mem_get_info(device)
    room = limit_bytes(config, device, held=0) - (total - free) - rough_step_bytes(config)
    layout = cache.layout
    state_bytes = SLOTS_OF_A_ROW * states.slot_bytes

    def row_bytes(tokens: int) -> int:
        return int(state_bytes + layout.blocks_of(tokens) * cache.block_bytes)

    longest = min(config.max_model_len, layout.prefix_size) if config.fits_length else config.max_model_len
    resources = Resources(
        room,
        row_bytes(min(config.max_model_len, MEAN_TOKENS)),
        config.max_num_seqs,
        row_bytes(longest),
        link_rate(device),
        memory_rate(device),
    )
    plan = plan_fastest(sizes, resources)
    if plan is None:
        stays = sizes.rest + BUFFERS * max(sizes.layers)
        raise ValueError(
            f"weight_offload_gib='auto': without layers, the model and its buffers take {_gib(stays)} GiB of a GPU, and"
            f" one sequence {_gib(resources.least_bytes)}; of {_gib(total_bytes(device))}, {_gib(max(room, 0))} are"
            f" left for both: {_smaller(config)}, or max_num_batched_tokens={config.max_num_batched_tokens} or"
            " max_model_len lower"
        )
    return plan


def _shares(config: Config) -> int:
    """Return how many ranks of this machine have layers in host memory."""
    is_once = config.is_on_ray or config.layer_files  # replicas on other machines, or with one copy for all
    return config.tensor_parallel_size * (1 if is_once else config.data_parallel_size)


def _smaller(config: Config) -> str:
    """Say what makes the model smaller on each device."""
    quantized = "" if config.description.formats.quantized else "quantization='int4', or "
    return f"set {quantized}gpu_memory_utilization={config.gpu_memory_utilization:g} or tensor_parallel_size higher"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.3g}"
