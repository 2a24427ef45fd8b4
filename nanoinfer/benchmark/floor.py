"""The least time that a machine needs for a workload, from what its memory and its matrix units are measured to do."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from nanoinfer.benchmark.workloads import Workload


@dataclass
class Floor:
    """The least time a workload can take: bytes that must be read, operations that must be done."""

    decode_bytes: float
    prefill_flops: float

    @classmethod
    def of(cls, work: Workload, hf: PretrainedConfig, max_num_seqs: int, itemsize: int) -> Floor:
        """KV of every decode step and the weights once a step; the prompts' matrix products.

        A shared prefix is read once a step, whatever the rows, and computed once.
        """
        q_size, kv_size = hf.num_attention_heads * hf.head_dim, hf.num_key_value_heads * hf.head_dim
        layer = hf.hidden_size * (2 * q_size + 2 * kv_size + 3 * hf.intermediate_size)
        layers, head = hf.num_hidden_layers * layer, hf.vocab_size * hf.hidden_size
        prefix = work.prefix_len
        own = [len(prompt) - prefix for prompt in work.prompts]
        decoded = [out - 1 for out in work.output_lens]  # prefill samples each sequence's first token
        steps = max(max(decoded), math.ceil(sum(decoded) / max_num_seqs))
        contexts = sum(out * (n + 1) + out * (out - 1) // 2 for n, out in zip(own, decoded, strict=True))
        kv_token = 2 * hf.num_hidden_layers * kv_size * itemsize
        pairs = prefix**2 + sum(n * (2 * prefix + n) for n in own)  # twice those of a token and one it sees
        matrices = 2 * layers * (prefix + sum(own)) + 2 * head * len(own)
        return cls(
            decode_bytes=steps * ((layers + head) * itemsize + prefix * kv_token) + contexts * kv_token,
            prefill_flops=matrices + 2 * hf.num_hidden_layers * q_size * pairs,
        )

    def seconds(self, bandwidth: float, flops: float, devices: int) -> float:
        """On `devices` of this bandwidth, in bytes per second, and matrix rate, in operations per second."""
        return (self.decode_bytes / bandwidth + self.prefill_flops / flops) / devices


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
    return 2 * size**3 / median_seconds(lambda: a @ b, device)


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
