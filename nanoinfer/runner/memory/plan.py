"""MemoryPlan: how a device's memory is divided, and so how many blocks the KV cache has."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nanoinfer.attention.cache_layout import MAX_SLOTS, pages_of
from nanoinfer.checks import short
from nanoinfer.config import Config
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.drafting.sizes import sizes_that_verify
from nanoinfer.runner.logits.token_history import PLANNED_TOKENS
from nanoinfer.runner.memory.kv_cache import KVCacheSpec
from nanoinfer.runner.memory.room import what_makes_room
from nanoinfer.runner.memory.state_pool import StateSpec
from nanoinfer.runner.steps.kinds import FEW_ROWS, DecodeKind, captured_sizes

CPU_BUDGET = 4 << 30  # for the KV cache, whose pages cost memory only once they are written
SLOTS_OF_A_ROW = 4 / 3  # for states: its own, and a quarter of all for snapshots, which may take free ones, too
MEAN_TOKENS = 1024  # of a sequence, where states and blocks share what memory there is
MAX_ROWS_SHARE = 0.5  # of the limit: steps and the KV cache need the rest
BYTES_PER_GRAPH = 8 << 20  # a captured step of 28 or 36 layers took 6 to 8 MiB on an H200

log = logging.getLogger("nanoinfer")


@dataclass(frozen=True)
class MemoryPlan:
    """How one rank's device memory is divided. All sizes are bytes.

    blocks = (limit - used - steps - graphs - images - states) / block_bytes, unless num_kvcache_blocks is set. The rank
    with the least left decides for all, and the KV cache has at most 2^31 tokens.

    total: the device's memory; on the CPU, the machine's
    limit: at most this much may be in use once the engine is up; on the CPU, 4 GiB and what is used
    used: this much was in use before there was a KV cache, by every process together; on the CPU, by this rank's model
    steps: the largest step takes this much while it runs; on the CPU 0, because it is not measured there
    graphs: the CUDA graphs keep about this much
    images: the largest batch of images takes this much while the tower encodes it, and a step's embeddings; on the CPU
        0, as for steps
    states: the states of layers whose memory of the past has a fixed size take this much
    rows: at most so many sequences run at once: max_num_seqs, or fewer, for whose states there is memory
    slots: so many sequences and snapshots can have states
    block_bytes: one block of the KV cache takes this much
    blocks: the KV cache has this many blocks
    asked: the num_kvcache_blocks that asks for these
    tokens: so many tokens fill the blocks, in sequences of max_model_len
    waste: the share of a block that stays empty, of the kind of layers where it is the largest
    host_blocks: host memory may hold the content of so many further blocks, or states in their place
    max_model_len: a sequence has at most this many tokens, no more than the KV cache holds
    max_position: the model's own limit, which max_model_len may not exceed
    streamed: the weights of layers in host memory, from which they come in each step, take this much
    copy_seconds: the copies of a step take so long; on the CPU 0, as for steps
    hiding_tokens: a step that computes so many tokens, of prompts or one of each row, takes as long as its copies, by
        what a step of prompts took at the start; 0: nothing is streamed, or it was not measured
    """

    total: int
    limit: int
    used: int
    steps: int
    graphs: int
    images: int
    states: int
    rows: int
    slots: int
    block_bytes: int
    blocks: int
    asked: int
    tokens: int
    waste: float
    host_blocks: int
    max_model_len: int
    max_position: int
    streamed: int = 0
    copy_seconds: float = 0
    hiding_tokens: int = 0

    def __str__(self) -> str:
        sizes = {
            "total": self.total,
            "limit": self.limit,
            "used": self.used,
            "steps": self.steps,
            "graphs": self.graphs,
            **({"images": self.images} if self.images else {}),
            **({f"states in {self.slots:,} slots": self.states} if self.slots else {}),
            "KV cache": self.blocks * self.block_bytes,
        }
        told = ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items())
        size = self.host_blocks * self.block_bytes
        host = f", and {self.host_blocks:,} blocks of {_gib(size)} GiB in host memory" if size else ""
        waste = f", {self.waste:.1%} of it unused" if self.waste else ""
        streamed = f"; {_gib(self.streamed)} GiB of layers come from host memory" if self.streamed else ""
        if self.copy_seconds:
            streamed += f" in {self.copy_seconds:.3g} s of each step, which {self.hiding_tokens:,} tokens hide"
        return (
            f"memory in GiB: {told} ({self.blocks:,} blocks of {self.block_bytes / 2**20:,.2f} MiB{waste}, for"
            f" {self.tokens:,} tokens{host}){streamed};"
            f" max_model_len={self.max_model_len} of the model's {self.max_position}"
        )


@dataclass(frozen=True)
class Streaming:
    """What is known of layers in host memory before the memory is planned.

    num_bytes, copy_seconds, hiding_tokens: see MemoryPlan's streamed, and so on
    hint: takes bytes that are lacking, and says how streaming makes room for them; "": it does not
    """

    num_bytes: int = 0
    copy_seconds: float = 0
    hiding_tokens: int = 0
    hint: Callable[[int], str] = lambda lacking: ""


NOT_STREAMED = Streaming()


def _gib(size: int) -> str:
    """Show bytes in GiB: two decimals, or two digits of what is less than these show."""
    gib = size / 2**30
    return f"{gib:,.2f}" if gib >= 0.1 or not size else f"{gib:.2g}"


@contextmanager
def named_memory_errors(config: Config, device: torch.device) -> Iterator[None]:
    """Enclose everything that an engine allocates before its first request.

    Raises a ValueError that names the options to change, if the device's memory does not hold it.
    """
    _check_rows(config, limit_bytes(config, device, held=0))
    try:
        yield
    except torch.OutOfMemoryError as error:
        images = ", make images smaller by image_options" if config.sees else ""
        adapters = f", max_adapters={config.max_adapters}" if config.max_adapters else ""
        raise ValueError(
            f"max_num_batched_tokens={config.max_num_batched_tokens}, max_num_seqs={config.max_num_seqs}{adapters}: the"
            f" GPU's memory does not hold the model and its largest step; lower them{images}, or raise"
            f" tensor_parallel_size: {error}"
        ) from error


def _check_rows(config: Config, limit: int) -> None:
    """Refuse too many rows: each has logits, a block table, and room for tokens, which penalties and guesses need.

    Texts that are only read have none of these.
    """
    if not config.description.generates:
        return
    vocab_size = -(-config.description.vocab_size // config.tensor_parallel_size)
    tokens = min(config.max_model_len, PLANNED_TOKENS)
    blocks = sum(-(-tokens // group.block_size) for group in config.cache_layout.groups)
    texts = 0 if config.speculation is None else config.max_model_len
    row_bytes = vocab_size * config.torch_head_dtype.itemsize + 4 * (blocks + tokens + texts)
    most = int(limit * MAX_ROWS_SHARE) // row_bytes
    if config.max_num_seqs > most:
        raise ValueError(
            f"max_num_seqs={short(config.max_num_seqs)}: must be at most {most}, as rows of"
            f" max_model_len={config.max_model_len} may take {MAX_ROWS_SHARE:.0%} of {limit / 2**30:,.1f} GiB"
        )


def limit_bytes(config: Config, device: torch.device, held: int) -> int:
    """Return how many bytes may be in use; held: of these, the model's."""
    return held + CPU_BUDGET if device.type == "cpu" else int(total_bytes(device) * config.gpu_memory_utilization)


def shorten_on_cpu(config: Config) -> None:
    """Let max_model_len, if it was left out, be at most what the KV cache will hold: the model has tables so long."""
    layout = config.cache_layout
    if layout.groups and config.fits_length and config.num_kvcache_blocks is None:
        blocks = CPU_BUDGET // (layout.block_numbers * config.torch_cache_dtype.itemsize)
        config.max_model_len = max(layout.longest(blocks, config.max_model_len), 2)


def graph_bytes(config: Config, sizes: Mapping[DecodeKind, Collection[int]]) -> int:
    """Return about how many bytes the graphs keep of steps of these sizes, by kind.

    One that verifies has the layers of a draft once for each guess. Those of few rows are captured twice.
    """
    drafted = 0 if config.draft is None else config.max_guesses * len(config.draft.layers)
    verifying = 1 + drafted / config.description.num_layers
    graphs = 0.0
    for kind, of_kind in sizes.items():
        captured = len(of_kind) + sum(size <= FEW_ROWS for size in of_kind)
        graphs += captured * (verifying if kind.guesses else 1)
    return int(graphs * BYTES_PER_GRAPH)


def rough_step_bytes(config: Config) -> int:
    """Return about how many bytes the largest step and the graphs take on a GPU, before one has run."""
    model, ranks = config.description, config.tensor_parallel_size
    numbers = 6 * model.hidden_size + 3 * model.widest // ranks
    if model.experts is not None:
        numbers += model.experts.used * (2 * model.experts.size // ranks + model.hidden_size)
    step = config.max_num_batched_tokens * numbers * config.torch_dtype.itemsize
    logits = config.max_num_seqs * model.vocab_size // ranks * (config.torch_head_dtype.itemsize + 8)
    return step + logits + graph_bytes(config, captured_sizes(config, sizes_that_verify(config)))


def total_bytes(device: torch.device) -> int:
    """Return the device's memory; on the CPU, the machine's."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return torch.cuda.mem_get_info(device)[1]


def plan_memory(
    config: Config,
    spec: KVCacheSpec,
    state_spec: StateSpec,
    device: torch.device,
    tp: TensorParallel,
    held: int,
    steps: int,
    graphs: int,
    images: int = 0,
    host_blocks: int = 0,
    streaming: Streaming = NOT_STREAMED,
) -> MemoryPlan:
    """Divide the device's memory: what MemoryPlan says of blocks.

    steps, graphs, images, host_blocks: see MemoryPlan
    held: the bytes of the model; on a GPU, `used` counts these and all else, of every process
    streaming: what is known of layers in host memory
    The rank with the least left decides for all.
    Raises ValueError, on every rank, when not even one sequence of max_model_len fits.
    """
    total, limit, used = total_bytes(device), limit_bytes(config, device, held), held
    if device.type == "cuda":
        torch.cuda.empty_cache()
        used = total - torch.cuda.mem_get_info(device)[0]
    layout = spec.layout
    budget = tp.min(limit - used - steps - graphs - images, device)
    rows, slots = config.max_num_seqs, 0
    if layout.states:
        rows = _rows_that_fit(config, spec, state_spec.slot_bytes, budget)
        slots = math.ceil(SLOTS_OF_A_ROW * rows)
    states = slots * state_spec.slot_bytes
    asked = config.num_kvcache_blocks
    blocks = _blocks_that_fit(config, spec, budget - states, streaming) if asked is None else layout.pool_of(asked)
    longest = layout.longest(blocks, config.max_model_len)
    plan = MemoryPlan(
        total=total,
        limit=limit,
        used=used,
        steps=steps,
        graphs=graphs,
        images=images,
        states=states,
        rows=rows,
        slots=slots,
        block_bytes=spec.block_bytes,
        blocks=blocks,
        asked=layout.asked_by(blocks),
        tokens=layout.tokens_of(blocks, longest),
        waste=layout.waste,
        host_blocks=host_blocks,
        max_model_len=longest,
        max_position=config.description.max_position,
        streamed=streaming.num_bytes,
        copy_seconds=streaming.copy_seconds,
        hiding_tokens=streaming.hiding_tokens,
    )
    if tp.rank == 0 and not config.has_replicas:  # else the LLM's process tells, for all replicas
        tell(config, plan)
    return plan


def tell(config: Config, plan: MemoryPlan) -> None:
    """Log a plan, and why sequences are shorter than the model allows, if nobody asked for that."""
    log.info("%s", plan)
    if config.fits_length and plan.max_model_len < plan.max_position:
        log.info(
            "max_model_len=%d: the model allows %d, but %s", plan.max_model_len, plan.max_position, _why(config, plan)
        )


def _why(config: Config, plan: MemoryPlan) -> str:
    """Say what keeps sequences shorter than the model allows, and how they may be longer."""
    if config.cache_layout.longest(plan.blocks, plan.max_position) > plan.max_model_len:
        return f"attention_backend={config.attention_backend!r} reads as many keys of every row: set max_model_len"
    if not config.fits_memory:
        return f"num_kvcache_blocks={config.num_kvcache_blocks} hold no longer sequence: raise it"
    return f"the KV cache holds no longer sequence: {what_makes_room(config)}"


def _rows_that_fit(config: Config, spec: KVCacheSpec, slot_bytes: int, budget: int) -> int:
    """Return how many sequences can run at once, so that states and the blocks beside them are enough for all."""
    tokens = min(config.max_model_len, MEAN_TOKENS)
    row_bytes = SLOTS_OF_A_ROW * slot_bytes + spec.layout.blocks_of(tokens) * spec.block_bytes
    return min(config.max_num_seqs, max(1, int(budget / row_bytes)))


def _blocks_that_fit(config: Config, spec: KVCacheSpec, budget: int, streaming: Streaming = NOT_STREAMED) -> int:
    """Return how many blocks the budget holds; ValueError if these do not hold a sequence of max_model_len."""
    layout = spec.layout
    if not layout.groups:
        return 0
    length = min(config.max_model_len, layout.prefix_size) if config.fits_length else config.max_model_len
    needed = layout.blocks_of(length) * spec.block_bytes
    if budget < needed:
        fit = layout.longest(max(budget, 0) // spec.block_bytes, length)
        lowered = "max_model_len" if fit else "kvcache_block_size"
        room = what_makes_room(config, streaming.hint(needed - budget))
        raise ValueError(
            f"the KV cache has {max(budget, 0) / 2**20:,.0f} MiB, but one sequence of max_model_len={length} needs"
            f" {needed / 2**20:,.0f} MiB in blocks (kvcache_block_size={config.kvcache_block_size}"
            f"{_told_of_draft(config, needed)}); {fit} tokens fit: lower {lowered}, or {room}"
        )
    return min(budget // spec.block_bytes, MAX_SLOTS // layout.most_slots)


def _told_of_draft(config: Config, needed: int) -> str:
    """Say how many bytes of those that a sequence needs a draft takes, if there is one."""
    if config.draft is None:
        return ""
    numbers = [
        sum(
            pages.count * pages.numbers
            for own in model.memory(config.tensor_parallel_size)
            if (pages := pages_of(own)) is not None
        )
        for model in config.models
    ]
    taken = needed * numbers[-1] / sum(numbers)
    return f", {config.draft.option} takes {taken / 2**20:,.0f} MiB"
