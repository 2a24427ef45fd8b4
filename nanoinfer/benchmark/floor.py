"""Floor: the least time that a machine needs for a workload, from its measured memory bandwidth and matrix rate."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from nanoinfer.benchmark.least_steps import Limits, StepSum, decode_steps, prefill_steps
from nanoinfer.benchmark.workloads import Workload
from nanoinfer.config import Config
from nanoinfer.kernels.delta.chunks import CHUNK
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.layers.mamba_beside_attention import BesideAttention
from nanoinfer.models.description import Description, NoMixer
from nanoinfer.weights.formats.format import Format
from nanoinfer.weights.formats.plain.format import PLAIN


@dataclass(frozen=True)
class Load:
    """What a device reads and computes at the same time: some steps' products with one kind of matrix, or attention.

    num_bytes: that it reads; operations: that it does
    format: the matrix's, which may have a rate of its own; None: the model's dtype
    """

    num_bytes: float
    operations: float
    format: Format | None = None


@dataclass(frozen=True)
class Floor:
    """The least time a workload can take: for each load the longer of reading and computing.

    decoding, prompts: the loads of decode steps, and of those of prompts
    decode_steps, prompt_steps: the fewest that the workload needs
    """

    decoding: list[Load]
    prompts: list[Load]
    decode_steps: int
    prompt_steps: int

    @classmethod
    def of(
        cls,
        work: Workload,
        model: Description,
        limits: Limits,
        itemsize: int,
        cache_itemsize: int | None = None,
        state_itemsize: int = 4,
    ) -> Floor:
        """Count each step's products, the keys, values and states that decode reads, and the prompts' attention.

        itemsize: bytes of a number of the model's dtype; cache_itemsize: in the KV cache, None: as many;
            state_itemsize: in states

        All matrices of one format take as many bytes and operations for a weight, so that their loads add up.
        Each decode step reads each row's states once, and writes one of CHUNK times; prompts only compute with them.
        A shared prefix counts once a step, for however many rows, and is computed once. So does a prompt of several
        samples. The count leaves out reads of both by layers with a window.
        """
        experts = model.experts
        used = 0.0 if experts is None else experts.used / experts.choices
        router_itemsize = 4 if experts is not None and experts.float32_router else itemsize
        decode, prefill = decode_steps(work, limits, used), prefill_steps(work, limits, used)
        last = StepSum(1, len(work.prompts), 0)  # prompts may come to their ends, and need logits, in one step
        with_logits = (*decode, last) if model.generates else ()
        head, routers = model.vocab_size * model.hidden_size, _router_weights(model)
        dense, expert = _layer_weights(model), _expert_weights(model)
        num_steps = sum(steps.count for steps in decode)
        rows = sum(steps.rows for steps in decode)
        in_decode, in_prompts = _state_loads(model, rows, prefill.rows, (itemsize, state_itemsize))
        decoding = [Load(_numbers_read(work, model, num_steps) * (cache_itemsize or itemsize), 0), in_decode]
        prompts = [*_tower_loads(work, itemsize), Load(0, 2 * model.num_heads * _pairs(work, model)), in_prompts]
        for steps, loads in (*((steps, decoding) for steps in decode), (prefill, prompts)):
            for format, count in dense.items():
                num_bytes = steps.count * count * format.weight_bytes(itemsize)
                loads.append(Load(num_bytes, 2 * steps.rows * count, format))
            for format, count in expert.items():
                num_bytes = steps.expert_reads * count * format.weight_bytes(itemsize)
                loads.append(Load(num_bytes, 2 * steps.rows * used * count, format))
            loads.append(Load(steps.count * routers * router_itemsize, 2 * steps.rows * routers))
        in_head = model.head_format.weight_bytes(itemsize)
        for steps in with_logits:
            own = prompts if steps is last else decoding
            own.append(Load(steps.count * head * in_head, 2 * steps.rows * head, model.head_format))
        return cls(decoding, prompts, num_steps, prefill.count)

    def seconds(self, machine: Machine) -> float:
        """Return the least time on a machine that reads and computes at once within each load, one load after another.

        The steps of a model whose layers come from host memory take no less than these copies.
        """
        return sum(
            max(sum(map(machine.seconds, loads)) / machine.devices, steps * machine.copying)
            for loads, steps in ((self.decoding, self.decode_steps), (self.prompts, self.prompt_steps))
        )

    def overlapped_seconds(self, machine: Machine) -> float:
        """Return the least time if prompts run beside decode steps: all reading, or all computing, or all copies."""
        loads = [*self.decoding, *self.prompts]
        reading, computing = sum(map(machine.reading, loads)), sum(map(machine.computing, loads))
        copying = (self.decode_steps + self.prompt_steps) * machine.copying
        return max(reading / machine.devices, computing / machine.devices, copying)


@dataclass(frozen=True)
class Machine:
    """What some devices reach.

    bandwidth: bytes a second of one; rate: its operations a second
    rates: those of the products with matrices of some formats, if they have others
    copying: the seconds in which each step's layers come from host memory
    """

    bandwidth: float
    rate: float
    devices: int = 1
    rates: Mapping[Format, float] = field(default_factory=dict)
    copying: float = 0

    def reading(self, load: Load) -> float:
        """Return the seconds in which one device reads a load."""
        return load.num_bytes / self.bandwidth

    def computing(self, load: Load) -> float:
        """Return the seconds in which one device computes a load."""
        return load.operations / (self.rate if load.format is None else self.rates.get(load.format, self.rate))

    def seconds(self, load: Load) -> float:
        """Return the longer of both."""
        return max(self.reading(load), self.computing(load))


def _tower_loads(work: Workload, itemsize: int) -> list[Load]:
    """Count what a tower reads, its matrices once, and computes: each different image once."""
    if not work.images:
        return []
    assert work.eyes is not None
    tower = work.eyes.tower
    return [Load(tower.weights * itemsize, work.images * tower.operations)]


def _numbers_read(work: Workload, model: Description, num_steps: int) -> int:
    """Count the numbers in the keys and values, or latents, that so many decode steps read, over all layers."""
    own = [len(prompt) - work.prefix_len for prompt in work.prompts]
    firsts = own if work.samples == 1 else [0] * len(own)  # keys that a row shares with none, when it begins
    shared = [0] * len(own) if work.samples == 1 else own
    decoded = [max(0, out - 1) for out in work.output_lens]
    numbers = 0
    for window, heads in zip(model.attention_windows, model.attending, strict=True):
        keys = work.samples * sum(_seen(n + 1, out, window) for n, out in zip(firsts, decoded, strict=True))
        if not window:
            keys += num_steps * work.prefixes * work.prefix_len + sum(
                n * out for n, out in zip(shared, decoded, strict=True)
            )
        numbers += keys * heads.count * (heads.dim if model.latent is not None else heads.dim + heads.value_size)
    return numbers


def _pairs(work: Workload, model: Description) -> float:
    """Count the pairs of a prompt's token and one that it sees, over all layers, times the numbers of key and value.

    An encoder's token sees as many behind it as before.
    """
    latent = model.latent
    areas = (
        (heads.dim + heads.value_size if latent is None else latent.plain + latent.turning + latent.value)
        * (
            _area(work.prefix_len, window) * (work.prefixes - len(work.prompts))
            + sum(_area(len(prompt), window) for prompt in work.prompts)
        )
        for window, heads in zip(model.attention_windows, model.attending, strict=True)
    )
    return sum(areas) * (2 if model.is_encoder else 1)


def _state_loads(model: Description, decoded: int, prefilled: int, sizes: tuple[int, int]) -> list[Load]:
    """Count what so many decoded and prefilled tokens read, write and compute of the layers' states.

    A matrix is read. Each CHUNK tokens it is read once more and written, as it takes these in. Before that they stand
    beside it: half of so many are read on average, and one is written. A convolution reads all but one of its inputs,
    and writes that one. A number of a matrix takes six operations: it gives a part of what the key recalls, is updated,
    and answers the query.
    sizes: the bytes of a number beside matrices, and of one of theirs
    """
    states = [state for mixer in model.mixers if mixer is not None and (state := mixer.state(1)) is not None]
    size, matrix_size = sizes
    num_bytes = float(sum(state.channels * state.width for state in states) * size)
    operations = 0
    for matrices in (state.matrices for state in states if state.matrices is not None):
        num_bytes += (1 + 2 / CHUNK) * matrices.numbers * matrix_size + (CHUNK / 2 + 1) * matrices.token_bytes(size)
        operations += 6 * matrices.numbers
    return [Load(decoded * num_bytes, decoded * operations), Load(0, prefilled * operations)]


def _layer_weights(model: Description) -> Counter[Format]:
    """Count the numbers in the matrices that every token uses, over all layers, but for routers, by their formats.

    All matrices of a branch count as of the last one's format.
    """
    names, experts, inputs = model.names, model.experts, model.layer_inputs
    parts, gates = _mlp_matrices(model), int(model.output_gate)
    attending = iter(model.attending)
    counts: Counter[Format] = Counter()

    def add(last: str, widths: int) -> None:
        counts[model.formats.of(last)] += model.hidden_size * widths

    for layer, (mixer, mlp_size) in enumerate(zip(model.mixers, model.mlp_sizes, strict=True)):
        prefix = names.prefix(layer)
        if model.latent is not None:
            add(prefix + names.o, model.latent.projected)
            counts[model.formats.of(prefix + names.o)] += model.latent.query_weights
            counts[PLAIN] += model.latent.made_weights
        elif mixer is None or isinstance(mixer, BesideAttention):
            heads = next(attending)
            keys = model.num_heads * (1 + gates) + heads.count * ("k" in heads.parts)
            values = model.num_heads + heads.count * ("v" in heads.parts)
            add(prefix + names.o, keys * heads.dim + values * heads.value_size)
        if mixer is not None and not isinstance(mixer, NoMixer):
            add(f"{prefix}{mixer.module}.out_proj", mixer.projected)
        add(prefix + names.down, parts * mlp_size)
        if experts is not None and experts.layers[layer]:
            if experts.shared_size is not None:
                add(f"{prefix}{names.shared_experts[0]}.down_proj", parts * experts.shared_size)
            if experts.latent_size is not None:
                add(prefix + names.expert_latents[1], 2 * experts.latent_size)
        if inputs is not None:
            add(prefix + inputs.output, 3 * inputs.size)
    return +counts


def _mlp_matrices(model: Description) -> int:
    """Return how many matrices an MLP has, or an expert."""
    return 3 if model.is_gated else 2


def _router_weights(model: Description) -> int:
    """Count the numbers in all routers, which keep their dtype whatever the format of the other matrices."""
    return 0 if model.experts is None else sum(model.experts.layers) * model.experts.choices * model.hidden_size


def _expert_weights(model: Description) -> Counter[Format]:
    """Count the numbers in the weights of all experts of all layers, by their formats."""
    counts: Counter[Format] = Counter()
    if (experts := model.experts) is not None:
        of_one = _mlp_matrices(model) * experts.size * (experts.latent_size or model.hidden_size)
        for layer in (number for number, is_sparse in enumerate(experts.layers) if is_sparse):
            counts[model.expert_format(layer)] += experts.count * of_one
    return counts


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


def measure_rates(config: Config) -> dict[Format, float]:
    """Measure the matrix rates of the formats that a device multiplies in another type than the model's dtype."""
    own = config.torch_dtype
    types = {format: format.multiplied_in(own, config.device) for format in config.description.formats.quantized}
    return {format: measure_flops(config.device, kind) for format, kind in types.items() if kind != own}


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
