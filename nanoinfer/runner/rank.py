"""Rank: how one rank starts. It loads the model, plans the memory, captures the graphs, and gives all back."""

from __future__ import annotations

import gc
import logging
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanoinfer.attention import AttentionBackend, make_backend
from nanoinfer.attention.in_order_backend import InOrderBackend
from nanoinfer.config import Config
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.process.collector import no_collection
from nanoinfer.process.first_launch import read_triton
from nanoinfer.process.torch_state import fresh_torch_state
from nanoinfer.runner.cuda_graphs import DecodeGraphs
from nanoinfer.runner.drafting.sizes import most_tokens, sizes_that_verify
from nanoinfer.runner.memory.holdings import Holdings
from nanoinfer.runner.memory.host_blocks import HostBlocks
from nanoinfer.runner.memory.kv_cache import BLOCKS_AT_ONCE
from nanoinfer.runner.memory.offload import Offload, plan_offload
from nanoinfer.runner.memory.plan import (
    MemoryPlan,
    graph_bytes,
    named_memory_errors,
    plan_memory,
    shorten_on_cpu,
)
from nanoinfer.runner.memory.prefix_files import PrefixFiles
from nanoinfer.runner.message import StepMessage
from nanoinfer.runner.start.compiling import compile_steps
from nanoinfer.runner.start.cpu_threads import choose_threads, share_threads
from nanoinfer.runner.start.trials import Trials, check_attention, media_bytes, peak_bytes
from nanoinfer.runner.start.voice import Voice
from nanoinfer.runner.steps.kinds import MAX_GRAPH_ROWS, DecodeKind, captured_sizes, graph_batch_sizes
from nanoinfer.runner.steps.one_by_one import OneByOne
from nanoinfer.runner.steps.steps import Steps
from nanoinfer.runner.streaming.timing import measure_streaming
from nanoinfer.runner.threads import Threads

log = logging.getLogger("nanoinfer")


class Rank(ABC):
    """One rank's device: model, KV cache, steps and graphs.

    steps: made anew when the KV cache gets another size; the first ones are only tried
    memory: how the device's memory is divided
    verify_sizes: of steps that verify guesses; none if none do
    """

    holdings: Holdings
    backend: AttentionBackend
    logits: Tensor  # where decode steps write
    steps: Steps
    graphs: DecodeGraphs | None
    memory: MemoryPlan

    def __init__(self, config: Config, tp: TensorParallel) -> None:
        self.config = config
        self.tp = tp
        self.device = config.device_of(tp.rank)
        self.has_host = tp.rank == 0 or not config.starts_ranks  # which wants this rank's results
        self.verify_sizes = sizes_that_verify(config)
        self.graphs = None
        self.offload: Offload | None = None
        self.host_blocks: HostBlocks | None = None
        self.threads = Threads()
        self._voice = Voice(config, tp.rank)
        share_threads(config, tp)
        if config.device == "cuda":
            read_triton()
        else:
            shorten_on_cpu(config)
        try:
            with fresh_torch_state(), self._current_device(), named_memory_errors(config, self.device):
                self._load()
                self._make_inbox()
                self._compile()
                self._connect()
                with torch.inference_mode():
                    choose_threads(self.threads, config, tp, self.holdings.cache_spec.block_bytes, self._make_cache)
                    self._size(self._measure(), media_bytes(config, self.holdings.tower))
                    self._capture()
        except BaseException:
            self.close(failed=True)
            raise

    @abstractmethod
    def run(self, message: StepMessage) -> object:
        """Launch one step."""

    def _load(self) -> None:
        """Build the model and fill its weights."""
        config, model = self.config, self.config.description
        if model.has_states and config.kv_cache_dtype == "fp8" and self.tp.rank == 0:
            kept = config.state_dtype
            log.info("kv_cache_dtype='fp8': keys and values are in FP8; the states of other layers stay in %s", kept)
        layout = config.cache_layout.part(range(model.num_layers))
        latent_heads = model.latent_heads(self.tp.size)
        self.backend = make_backend(config.attention_backend, layout, config.is_in_order, latent_heads)
        most = max(config.max_num_batched_tokens, config.max_num_seqs, most_tokens(self.verify_sizes))
        self.holdings = Holdings(config, self.backend, self.tp, self.device, most, self.has_host)
        self.holdings.load(self._voice)
        if config.device == "cuda":
            read_triton().join()
        shape = max(config.max_num_seqs, most_tokens(self.verify_sizes)), self.holdings.model.num_ids
        self.logits = torch.empty(shape, dtype=config.torch_head_dtype, device=self.device)
        self.prefix_files = PrefixFiles(self.holdings, self.tp, self.device)
        if config.is_in_order:  # after what stays: it leaves free memory that goes back whole
            sizes = {*graph_batch_sizes(config.max_num_seqs), *map(sum, self.verify_sizes)}
            self.holdings.model.fix_order(sorted(sizes), config.max_num_batched_tokens)
            if self.holdings.adapters is not None:
                self.holdings.adapters.fix_order()
            assert isinstance(self.backend, InOrderBackend)
            check_attention(config, self.backend, self.tp.size, self.device)

    def _make_inbox(self) -> None:
        """Make this rank's inbox, for what the ranks add up or gather in a captured step."""
        config, tp = self.config, self.tp
        max_rows = max(min(config.max_num_seqs, MAX_GRAPH_ROWS), most_tokens(self.verify_sizes))
        features = config.description.hidden_size
        if tp.keeps_order:  # then ranks gather the inputs of projections, too
            features = max(features, config.description.widest // tp.size)
        tp.make_inbox(max_rows, features, config.torch_dtype)

    @torch.inference_mode()
    def _compile(self) -> None:
        """Compile the kernels of steps. It asks no other rank for anything, and so need not wait until all have loaded.

        The steps' block tables name one block everywhere.
        """
        if self.config.device == "cpu":
            return
        self._make_cache(1)
        trials = Trials(self.config, self.steps.max_blocks, self.device)
        captured = [(rows, kind) for kind, sizes in self._graph_sizes.items() for rows in sizes]
        tried = trials, self._largest_decodes(trials), captured
        with no_collection(), self._voice.bar("Kernels", " kernels", None) as advance:
            compile_steps(self.steps, *tried, self._decode_rows, advance)

    def _connect(self) -> None:
        """Join the other ranks, once all have loaded."""
        has_inbox = self.tp.inbox is not None
        self.tp.connect(self._drop_graphs)
        self.tp.open_inbox()
        if has_inbox and self.tp.inbox is None:
            self._compile()  # without inboxes, other kernels run

    def _measure(self) -> int:
        """Run the largest steps, whose block tables name one block everywhere; returns the bytes that they work in.

        Returns 0 on the CPU, where the plan does not count this memory.
        """
        self._make_cache(1)
        config, trials = self.config, Trials(self.config, self.steps.max_blocks, self.device)
        step_bytes = 0
        if config.device == "cuda":
            decodes = self._largest_decodes(trials)
            prefill = max(peak_bytes(partial(self.run, step)) for step in trials.largest_prefills())
            decode, drawn = self._measure_decode(decodes) if decodes else (0, 0)
            # A captured decode step keeps the memory that it works in, so a prefill step needs its own beside it.
            step_bytes = prefill + decode if self._graph_sizes else max(prefill, decode)
            step_bytes += drawn + BLOCKS_AT_ONCE * self.holdings.cache_spec.block_bytes
        sizes = self.holdings.cache_spec.block_bytes, self.holdings.state_spec.slot_bytes
        self.offload = plan_offload(
            config, self.holdings.kv_cache, *sizes, self.tp, lambda tokens: self.steps.prefill(trials.prompt(tokens))
        )
        return step_bytes

    def _largest_decodes(self, trials: Trials) -> list[tuple[int, DecodeKind]]:
        return trials.largest_decodes(self.verify_sizes) if self.config.description.generates else []

    def _measure_decode(self, steps: list[tuple[int, DecodeKind]]) -> tuple[int, int]:
        """Run the largest decode steps; returns the bytes that they work in, and those to draw what rows want."""
        peaks = []
        for step in steps:
            self.steps.batch.positions.zero_()  # each step moves its rows on, at last past the ends of their tables
            peaks.append(peak_bytes(partial(self._decode_rows, *step)))
        return max(peaks), self.steps.logits_processors.working_bytes

    def _decode_rows(self, rows: int, kind: DecodeKind, max_context_len: int | None = None) -> None:
        """Launch a decode step that any rows of this number may take, up to some length."""
        self.steps.forward(rows, kind, max_context_len or self.config.max_model_len)
        self.steps.draw(self.steps.launched(rows, rows, kind))

    def _size(self, step_bytes: int, media_bytes: int) -> None:
        """Plan the memory, and allocate the KV cache."""
        specs, held = (self.holdings.cache_spec, self.holdings.state_spec), self.holdings.model_bytes
        slots = 0 if self.offload is None else self.offload.slots
        needs = held, step_bytes, graph_bytes(self.config, self._graph_sizes), media_bytes, slots
        full = Trials(self.config, self.steps.max_blocks, self.device).largest_prefills()[0]
        streaming = measure_streaming(self.config, self.holdings, self.tp, self.run, full)
        self.memory = plan_memory(self.config, *specs, self.device, self.tp, *needs, streaming)
        self.config.max_model_len = self.memory.max_model_len
        self._make_cache(self.memory.blocks, self.memory.slots)
        if slots:
            self.host_blocks = HostBlocks(slots, self.holdings.kv_cache, is_lazy=self.config.starts_ranks)
            if not self.config.starts_ranks:  # each rank plans by itself, and all must plan alike
                self.host_blocks.num_slots = self.tp.min(self.host_blocks.num_ready(), self.device)

    def _capture(self) -> None:
        """Capture the decode steps."""
        if sizes := self._graph_sizes:
            num_graphs = sum(map(len, sizes.values()))
            with no_collection(), self._voice.bar("Graphs", " graphs", num_graphs) as advance:
                self.graphs = DecodeGraphs(self.steps, sizes, self.config.max_model_len, advance)

    @property
    def _graph_sizes(self) -> dict[DecodeKind, list[int]]:
        """The sizes of each kind of decode step that is captured, the plain one first."""
        return captured_sizes(self.config, self.verify_sizes)

    def _make_cache(self, num_blocks: int, num_slots: int = 1) -> Steps:
        """Make a KV cache, in place of the one before; returns the steps over it."""
        self.holdings.make_cache(num_blocks, num_slots)
        self.__dict__.pop("steps", None)  # their texts go first
        make_steps = OneByOne if self.config.is_one_by_one else Steps
        self.steps = make_steps(self.config, self.tp, self.holdings, self.backend, self.logits)
        return self.steps

    def close(self, failed: bool = False) -> None:
        """Give back the device memory and leave the group, without waiting for the other ranks if one has failed."""
        with fresh_torch_state(), self._current_device():
            if not failed:
                self._drop_graphs()
            self.tp.close(failed)
            if self.host_blocks is not None:
                self.host_blocks.close()
            if (holdings := self.__dict__.pop("holdings", None)) is not None:
                holdings.close()
            for name in ("graphs", "steps", "logits", "backend", "prefix_files"):
                self.__dict__.pop(name, None)
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
                torch._C._cuda_clearCublasWorkspaces()
                torch.cuda.empty_cache()

    def _drop_graphs(self) -> None:
        """Drop the CUDA graphs: NCCL does not end a communicator that a graph holds."""
        self.graphs = None

    def _current_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
