"""ModelRunner: one rank's device. It loads the model, sizes the KV cache, captures the graphs and runs the steps."""

from __future__ import annotations

import gc
import os
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from nanoinfer.attention import make_backend
from nanoinfer.config import Config
from nanoinfer.layers.sampler import Sampler
from nanoinfer.models import find_model
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.cuda_graphs import MAX_GRAPH_ROWS, DecodeGraphs, graph_batch_sizes
from nanoinfer.runner.input_batch import InputBatch, PrefillInputs
from nanoinfer.runner.kv_cache import (
    BLOCKS_AT_ONCE,
    BYTES_PER_GRAPH,
    CPU_BUDGET,
    KVCacheSpec,
    blocks_that_fit,
    copy_blocks,
    cuda_budget,
)
from nanoinfer.runner.logits_processors import ROWS_AT_ONCE, LogitsProcessors
from nanoinfer.runner.logprobs import LogProbs
from nanoinfer.runner.message import ChunkMessage, DecodeMessage, JoinMessage, PrefillMessage, StepMessage
from nanoinfer.runner.transfer import to_host, upload
from nanoinfer.weights.loader import load_weights, random_weights

POLL_SECONDS = 50e-6
StepOutput = tuple[Tensor, list[LogProbs], list[LogProbs]]  # what PendingTokens brings to the host


class PendingTokens:
    """The tokens of a launched step, on their way to the host."""

    def __init__(self, token_ids: Tensor, logprobs: list[LogProbs], prompt_logprobs: list[LogProbs]) -> None:
        """token_ids: [rows] int32, empty when the step samples none.

        logprobs: those that were asked for, by place among the tokens; prompt_logprobs: by chunk
        """
        self._host = to_host(token_ids)
        self.logprobs = [entry.to_host() for entry in logprobs]  # to be read after `wait`
        self.prompt_logprobs = [entry.to_host() for entry in prompt_logprobs]
        self._event: torch.cuda.Event | None = None
        if token_ids.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()
        self.ready_at = time.perf_counter()  # when the step was done; on CUDA known only after `wait`

    def wait(self, check: Callable[[], None] | None = None) -> list[int]:
        """Wait for the step, and return its tokens in the order of its rows.

        check: called again and again meanwhile; it may raise, when what is waited for can no longer come
        """
        if self._event is not None:
            while check is not None and not self._event.query():
                check()
                time.sleep(POLL_SECONDS)
            self._event.synchronize()
            self.ready_at = time.perf_counter()
        return self._host.tolist()


class ModelRunner:
    """One rank: model, KV cache, rows and graphs. Rank 0's `call` makes the other ranks do the same."""

    def __init__(
        self, config: Config, tp: TensorParallel, send: Callable[[str, tuple[Any, ...]], None] | None = None
    ) -> None:
        """send: passes a method's name and arguments to the other ranks, on rank 0 of several."""
        self.config = config
        self.tp = tp
        self.send = send
        self.device = torch.device("cuda", tp.rank) if config.device == "cuda" else torch.device("cpu")
        self.max_blocks = -(-config.max_model_len // config.kvcache_block_size)
        self.graphs: DecodeGraphs | None = None
        if config.device == "cpu" and tp.size > 1:  # ranks that fight for cores spin more than they compute
            torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // tp.size)))
        try:
            with self._current_device():
                self._load_model()
                self.tp.connect(self._drop_graphs)
                rows = min(config.max_num_seqs, MAX_GRAPH_ROWS)
                self.tp.open_inbox(rows, config.hf_config.hidden_size, config.torch_dtype)
                self._allocate()
        except BaseException:
            self.close(failed=True)
            raise

    def call(self, method: str, *args: Any) -> Any:
        """Run a method on every rank; returns this rank's result."""
        if self.send is not None:
            self.send(method, args)
        return getattr(self, method)(*args)

    @torch.inference_mode()
    def run(self, message: StepMessage) -> PendingTokens | None:
        """Launch one step; returns its tokens, on rank 0."""
        with self._current_device():
            self.batch.update(message)
            self.logits_processors.update(message)
            step = self._prefill(message) if isinstance(message, PrefillMessage) else self._decode(message)
            return PendingTokens(*step) if self.tp.rank == 0 else None

    def _prefill(self, message: PrefillMessage) -> StepOutput:
        prompts = PrefillInputs(message.chunks, message.joins, self.kv_cache, self.max_blocks)
        hidden = self.model(prompts.token_ids, prompts.context)
        prompt_logprobs = self._prompt_logprobs(message.chunks, hidden)
        copy_blocks(self.kv_cache, prompts.copied_blocks)
        if not message.joins:
            return hidden.new_empty(0, dtype=torch.int32), [], prompt_logprobs
        logits = self.model.compute_logits(hidden[prompts.last_rows])
        how = prompts.temperatures, prompts.seeds, prompts.sample_positions
        token_ids = self.sampler(logits, *how)
        for row, join in enumerate(message.joins, message.num_rows):
            if join.logits is not None:
                self.logits_processors.join(row, join.logits)
        logprobs = self.logits_processors.redraw(message.num_rows, logits, token_ids, *how)
        self.batch.join(prompts, token_ids)
        return token_ids, logprobs, prompt_logprobs

    def _prompt_logprobs(self, chunks: list[ChunkMessage], hidden: Tensor) -> list[LogProbs]:
        """Those of the prompts' tokens, each but the first by the logits of the one before it; by chunk."""
        logprobs, end = [], 0
        for index, chunk in enumerate(chunks):
            start, end = end, end + len(chunk.token_ids)
            if chunk.num_logprobs is None:
                continue
            known = chunk.token_ids[1:] + array("i", [] if chunk.next_token is None else [chunk.next_token])
            if not known:
                continue
            on_device = upload(known, self.device)
            for some, tokens in zip(hidden[start:end].split(ROWS_AT_ONCE), on_device.split(ROWS_AT_ONCE), strict=False):
                logits = self.logits_processors.gather(self.model.compute_logits(some[: len(tokens)])).float()
                keys, counts = [index] * len(tokens), [chunk.num_logprobs] * len(tokens)
                logprobs.append(LogProbs.of(logits, tokens, counts, keys))
        return logprobs

    def _decode(self, message: DecodeMessage) -> StepOutput:
        num_rows, graphs, batch = message.num_rows, self.graphs, self.batch
        if graphs is None or num_rows > graphs.largest:
            self._decode_rows(num_rows, message.max_context_len)
        else:
            graphs.replay(num_rows)
        token_ids = batch.last_tokens[:num_rows]
        logprobs: list[LogProbs] = []
        if self.logits_processors.wanted:  # the rows are already advanced: to the positions of the tokens drawn
            how = batch.temperatures, batch.seeds, batch.positions
            logprobs = self.logits_processors.redraw(0, self.logits[:num_rows], token_ids, *how)
        return token_ids, logprobs, []

    def _decode_rows(self, num_rows: int, max_context_len: int) -> None:
        """One decode step over the first rows, all of it on the device."""
        batch = self.batch
        context = batch.decode_context(num_rows, self.kv_cache, max_context_len)
        self.backend.prepare_decode(context)
        hidden = self.model(batch.last_tokens[:num_rows], context)
        logits = self.model.compute_logits(hidden, self.logits[:num_rows])
        token_ids = self.sampler(logits, batch.temperatures[:num_rows], batch.seeds[:num_rows], context.context_lens)
        batch.advance(token_ids)

    def _load_model(self) -> None:
        config = self.config
        model_class = find_model(config.hf_config, config.tensor_parallel_size)
        self.backend = make_backend(config.attention_backend)
        with self.device, _default_dtype(config.torch_dtype):
            self.model = model_class(config.hf_config, config.max_model_len, self.backend, self.tp)
        if config.load_format == "dummy":
            random_weights(self.model, config.seed)
        else:
            load_weights(self.model, config.model, self.model.ignored_weights)
        head = self.model.lm_head
        self.sampler = Sampler(head.first_id, self.tp)
        # Where a decode step leaves them: [rows, this rank's token ids]
        self.logits = torch.empty((config.max_num_seqs, len(head.weight)), dtype=config.torch_dtype, device=self.device)

    @torch.inference_mode()
    def _allocate(self) -> None:
        """Size and allocate the KV cache, leaving room for the largest step, and capture the graphs."""
        config, model = self.config, self.model
        spec = KVCacheSpec(
            model.num_layers, config.kvcache_block_size, model.num_kv_heads, model.head_dim, config.torch_dtype
        )
        sizes = [] if config.enforce_eager or config.device == "cpu" else graph_batch_sizes(config.max_num_seqs)
        budget = CPU_BUDGET
        if config.device == "cuda":
            self._make_cache(spec, 1)
            reserved = self._warm_up(keep_decode=bool(sizes)) + self.logits_processors.working_bytes
            reserved += len(sizes) * BYTES_PER_GRAPH + BLOCKS_AT_ONCE * spec.block_bytes
            budget = cuda_budget(config, self.device, reserved)
        # The poorest rank decides for all, and all of them see that it is too poor.
        budget = self.tp.min(budget, self.device)
        self.num_blocks = config.num_kvcache_blocks or blocks_that_fit(config, spec, budget)
        self._make_cache(spec, self.num_blocks)
        if sizes:
            self.graphs = DecodeGraphs(sizes, lambda size: self._decode_rows(size, config.max_model_len))

    def _make_cache(self, spec: KVCacheSpec, num_blocks: int) -> None:
        config = self.config
        self.kv_cache = spec.allocate(num_blocks, self.device)
        self.batch = InputBatch(config.max_num_seqs, self.max_blocks, config.kvcache_block_size, self.device)
        self.logits_processors = LogitsProcessors(
            config.hf_config.vocab_size, config.max_num_seqs, config.max_model_len, self.device, self.tp
        )

    def _warm_up(self, keep_decode: bool) -> int:
        """Run the largest prefill and decode steps, over a cache of one block that every table names.

        keep_decode: the decode step's working memory will be held by graphs, beside the prefill step's
        Returns the bytes that the steps work in.
        """
        config = self.config
        tokens = config.max_num_batched_tokens
        prompts = min(config.max_num_seqs, tokens)
        lengths = [tokens // prompts + (i < tokens % prompts) for i in range(prompts)]
        table = [0] * self.max_blocks
        chunks = [ChunkMessage(array("i", [0]) * min(length, config.max_model_len - 1), 0, table) for length in lengths]
        joins = [JoinMessage(chunk, table, 1.0, 0) for chunk in range(prompts)]
        prefill = self._peak_bytes(lambda: self.run(PrefillMessage([], 0, chunks, joins)))
        decode = self._peak_bytes(lambda: self._decode_rows(config.max_num_seqs, config.max_model_len))
        return prefill + decode if keep_decode else max(prefill, decode)

    def _peak_bytes(self, step: Callable[[], object]) -> int:
        """The device memory that a step takes while it runs."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def close(self, failed: bool = False) -> None:
        """Give back the device memory and leave the group; after another rank's failure, without waiting for it."""
        with self._current_device():
            if not failed:
                self._drop_graphs()
            self.tp.close(failed)
            for name in ("graphs", "model", "sampler", "logits", "batch", "logits_processors", "kv_cache"):
                self.__dict__.pop(name, None)
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
                torch._C._cuda_clearCublasWorkspaces()
                torch.cuda.empty_cache()

    def _drop_graphs(self) -> None:
        """NCCL does not end a communicator that a graph holds."""
        self.graphs = None

    def _current_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
