"""Floor: the least time that a machine needs for a workload, from its measured memory bandwidth and matrix rate."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from nanoinfer.benchmark.workloads import Workload
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.models.description import Description


@dataclass
class Floor:
    """The least time a workload can take: bytes that must be read, operations that must be done.

    matrix_flops: those of prefill_flops that are the products with the layers' matrices
    """

    decode_bytes: float
    prefill_flops: float
    matrix_flops: float

    @classmethod
    def of(
        cls,
        work: Workload,
        model: Description,
        max_num_seqs: int,
        itemsize: int,
        cache_itemsize: int | None = None,
        matrix_itemsize: int | None = None,
    ) -> Floor:
        """Count each decode step's weights, keys and values, and the prompts' matrix products.

        itemsize: bytes of a weight; matrix_itemsize: of one in a layer's matrices, None: as many
        cache_itemsize: bytes of a number in the KV cache, None: as many as of a weight

        Of each layer's E experts, r rows that use k each, by even routing, read the share 1 - (1 - k / E)^r.
        A shared prefix counts once a step, for however many rows, and is computed once. So does a prompt of several
        samples. The count leaves out reads of both by layers with a window.
        """
        q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        head = model.vocab_size * model.hidden_size
        layers, experts = _layer_weights(model), _expert_weights(model)
        prefix = work.prefix_len
        own = [len(prompt) - prefix for prompt in work.prompts]
        firsts = own if work.samples == 1 else [0] * len(own)  # keys that a row shares with none, when it begins
        shared = [0] * len(own) if work.samples == 1 else own
        decoded = [out - 1 for out in work.output_lens] * work.samples  # prefill samples each sequence's first token
        steps = max(max(decoded), math.ceil(sum(decoded) / max_num_seqs))
        keys, pairs = 0, 0.0  # keys that decode reads; pairs of a prompt's token and one that it sees
        for window in model.windows:
            keys += sum(_seen(n + 1, out, window) for n, out in zip(firsts * work.samples, decoded, strict=True))
            if not window:
                keys += steps * prefix + sum(n * out for n, out in zip(shared, decoded, strict=False))
            pairs += _area(prefix, window) * (1 - len(own)) + sum(_area(prefix + n, window) for n in own)
        used = 0.0 if model.experts is None else model.experts.used / model.experts.count
        matrices = 2 * (layers + used * experts) * (prefix + sum(own))
        read = experts * sum(1 - (1 - used) ** rows for rows in _rows_of_steps(decoded, max_num_seqs))
        weight_bytes = (steps * layers + read) * (matrix_itemsize or itemsize) + steps * head * itemsize
        return cls(
            decode_bytes=weight_bytes + 2 * keys * kv_size * (cache_itemsize or itemsize),
            prefill_flops=matrices + 2 * head * len(own) + 4 * q_size * pairs,
            matrix_flops=matrices,
        )

    def seconds(self, bandwidth: float, rate: float, devices: int, matrix_rate: float | None = None) -> float:
        """Return the least time on `devices` of this bandwidth, in bytes a second, and rate, in operations a second.

        matrix_rate: that of the products with the layers' matrices; None: the same
        """
        matrices = self.matrix_flops / (matrix_rate or rate)
        return (self.decode_bytes / bandwidth + (self.prefill_flops - self.matrix_flops) / rate + matrices) / devices


def _layer_weights(model: Description) -> int:
    """Count the numbers in the weights that every token of a layer uses, over all layers."""
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = model.num_layers * (2 * q_size + 2 * kv_size)
    if (experts := model.experts) is None:
        return model.hidden_size * (attention + model.num_layers * 3 * model.intermediate_size)
    sparse = sum(experts.layers)
    shared = 3 * experts.shared_size if experts.shared_size is not None else 0
    dense = 3 * (model.num_layers - sparse) * model.intermediate_size
    return model.hidden_size * (attention + dense + sparse * (experts.count + shared))


def _expert_weights(model: Description) -> int:
    """Count the numbers in the weights of all experts of all layers."""
    if (experts := model.experts) is None:
        return 0
    return sum(experts.layers) * experts.count * 3 * experts.size * model.hidden_size


def _rows_of_steps(decoded: list[int], max_num_seqs: int) -> Iterator[int]:
    """Yield the rows of each decode step: of sequences that all run at once; else full steps, which read the least."""
    if len(decoded) <= max_num_seqs:
        yield from (sum(tokens > step for tokens in decoded) for step in range(max(decoded)))
    else:
        full, rest = divmod(sum(decoded), max_num_seqs)
        yield from [max_num_seqs] * full + [rest]


def _seen(first: int, count: int, window: int | None) -> int:
    """Count the keys that `count` queries see, at lengths first, first + 1, ...: the sum of min(length, window)."""
    last = first + count - 1
    whole = min(last, window or last)  # up to this length a query sees all keys
    return max(whole - first + 1, 0) * (first + whole) // 2 + min(last - whole, count) * (window or 0)


def _area(tokens: int, window: int | None) -> float:
    """Return the area that a causal mask leaves of tokens x tokens, within a band if there is a window."""
    width = min(tokens, window or tokens)
    return width * (tokens - width / 2)


def measure_bandwidth(device: str) -> float:
    """Bytes per second of a large copy, read and written bytes both counted."""
    size = min(1 << 32, torch.cuda.mem_get_info()[0] // 4) if device == "cuda" else 1 << 28
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    source.random_()
    return 2 * size / median_seconds(lambda: target.copy_(source), device)


def measure_flops(device: str, dtype: torch.dtype) -> float:
    """Operations per second of a large matrix product of random numbers."""
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    scale = torch.ones((), device=device)

    def multiply() -> torch.Tensor:
        return torch._scaled_mm(a, b.T, scale, scale, out_dtype=torch.bfloat16) if dtype == FP8 else a @ b

    return 2 * size**3 / median_seconds(multiply, device)


def median_seconds(run: Callable[[], object], device: str, times: int = 11) -> float:
    """The median time of one call, by the device's own clock."""
    run()
    return statistics.median(_seconds_on_cuda(run) if device == "cuda" else _seconds_on_cpu(run) for _ in range(times))


def _seconds_on_cuda(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _seconds_on_cpu(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
