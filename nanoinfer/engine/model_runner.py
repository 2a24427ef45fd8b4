"""ModelRunner: one rank's device. It loads the model, sizes the KV cache, captures the graphs and runs the steps."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanoinfer.attention import choose_backend, make_backend
from nanoinfer.config import Config
from nanoinfer.engine.cuda_graphs import DecodeGraphs, graph_batch_sizes
from nanoinfer.engine.input_batch import InputBatch, Prompts
from nanoinfer.engine.kv_cache import KVCacheSpec, num_blocks_on_cpu, num_blocks_on_cuda
from nanoinfer.engine.message import ChunkMessage, DecodeMessage, Message, PrefillMessage
from nanoinfer.layers.sampler import Sampler
from nanoinfer.models import find_model
from nanoinfer.models.qwen3 import Qwen3ForCausalLM, head_dim
from nanoinfer.utils.loader import load_weights, random_weights
from nanoinfer.utils.tensor_parallel import TensorParallel


def choose_parts(config: Config) -> tuple[type[Qwen3ForCausalLM], str]:
    """The model class and the attention backend for a config; raises ValueError when there is none."""
    hf = config.hf_config
    model_class = find_model(hf, config.tensor_parallel_size)
    backend = choose_backend(
        config.attention_backend, config.device, config.torch_dtype, config.kvcache_block_size, head_dim(hf)
    )
    return model_class, backend


class PendingTokens:
    """The tokens of a launched step, on their way to the host."""

    def __init__(self, token_ids: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if token_ids.is_cuda:
            self._host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
            self._host.copy_(token_ids, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = token_ids

    def wait(self) -> list[int]:
        """Wait for the step, and return its tokens in the order of its rows."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


class ModelRunner:
    """One rank: model, KV cache, rows and graphs. Rank 0's `call` makes the other ranks do the same."""

    def __init__(
        self,
        config: Config,
        rank: int = 0,
        store: dist.Store | None = None,
        send: Callable[[str, tuple[Any, ...]], None] | None = None,
    ) -> None:
        """send: passes a method's name and arguments to the other ranks, on rank 0 of several."""
        self.config = config
        self.send = send
        self.device = torch.device("cuda", rank) if config.device == "cuda" else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.tp = TensorParallel(rank, config.tensor_parallel_size, store, config.device)
        self.max_blocks = -(-config.max_model_len // config.kvcache_block_size)
        self._load_model()
        self._allocate()

    def call(self, method: str, *args: Any) -> Any:
        """Run a method on every rank; returns this rank's result."""
        if self.send is not None:
            self.send(method, args)
        return getattr(self, method)(*args)

    @torch.inference_mode()
    def run(self, message: Message) -> PendingTokens | None:
        """Launch one step; returns its tokens, or None when no prompt was completed by it."""
        self.batch.update(message)
        token_ids = self._prefill(message) if isinstance(message, PrefillMessage) else self._decode(message)
        return None if token_ids is None else PendingTokens(token_ids)

    def _prefill(self, message: PrefillMessage) -> Tensor | None:
        prompts = Prompts(message.chunks, self.kv_cache, self.max_blocks)
        hidden = self.model(prompts.token_ids, prompts.context)
        if not len(prompts.sampled):
            return None
        logits = self.model.compute_logits(hidden[prompts.last_rows])
        token_ids = self.sampler(logits, prompts.temperatures, prompts.seeds, prompts.sample_positions)
        self.batch.join(prompts, token_ids)
        return token_ids

    def _decode(self, message: DecodeMessage) -> Tensor:
        num_rows = message.num_rows
        if self.graphs is None or num_rows > self.graphs.largest:
            return self._decode_rows(num_rows, message.max_context_len)
        self.graphs.replay(num_rows)
        return self.batch.last_tokens[:num_rows]

    def _decode_rows(self, num_rows: int, max_context_len: int) -> Tensor:
        """One decode step over the first rows, all of it on the device."""
        batch = self.batch
        context = batch.decode_context(num_rows, self.kv_cache, max_context_len)
        hidden = self.model(batch.last_tokens[:num_rows], context)
        logits = self.model.compute_logits(hidden)
        token_ids = self.sampler(logits, batch.temperatures[:num_rows], batch.seeds[:num_rows], context.context_lens)
        batch.advance(token_ids)
        return token_ids

    def _load_model(self) -> None:
        config = self.config
        model_class, backend = choose_parts(config)
        with self.device, _default_dtype(config.torch_dtype):
            self.model = model_class(config.hf_config, config.max_model_len, make_backend(backend), self.tp)
        if config.load_format == "dummy":
            random_weights(self.model, config.seed)
        else:
            load_weights(self.model, config.model, self.model.ignored_weights)
        self.sampler = Sampler(self.model.lm_head.first_id, self.tp)

    @torch.inference_mode()
    def _allocate(self) -> None:
        """Size and allocate the KV cache, leaving room for the largest step, and capture the graphs."""
        config = self.config
        spec = KVCacheSpec.of(config, self.tp.size)
        sizes = [] if config.enforce_eager or config.device == "cpu" else graph_batch_sizes(config.max_num_seqs)
        self.graphs: DecodeGraphs | None = None
        self._make_cache(spec, 1)
        num_blocks = config.num_kvcache_blocks
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._warm_up()
            if num_blocks is None:
                num_blocks = num_blocks_on_cuda(config, spec, self.device, num_graphs=len(sizes))
        elif num_blocks is None:
            num_blocks = num_blocks_on_cpu(config, spec)
        self.num_blocks = self.tp.min(num_blocks, self.device)
        self._make_cache(spec, self.num_blocks)
        if sizes:
            self.graphs = DecodeGraphs(sizes, lambda size: self._decode_rows(size, config.max_model_len))

    def _make_cache(self, spec: KVCacheSpec, num_blocks: int) -> None:
        config = self.config
        self.kv_cache = spec.allocate(num_blocks, self.device)
        self.batch = InputBatch(config.max_num_seqs, self.max_blocks, config.kvcache_block_size, self.device)

    def _warm_up(self) -> None:
        """Run the largest prefill and decode steps, over a cache of one block that every table names."""
        config = self.config
        tokens = config.max_num_batched_tokens
        prompts = min(config.max_num_seqs, tokens)
        lengths = [tokens // prompts + (i < tokens % prompts) for i in range(prompts)]
        table = [0] * self.max_blocks
        chunks = [
            ChunkMessage(array("i", [0]) * min(length, config.max_model_len - 1), 0, table, True, 1.0, 0)
            for length in lengths
        ]
        self.run(PrefillMessage([], 0, chunks))
        self._decode_rows(config.max_num_seqs, config.max_model_len)
        torch.cuda.synchronize()

    def close(self) -> None:
        """Give back the device memory and leave the group."""
        self.graphs = None
        for name in ("model", "sampler", "batch", "kv_cache"):
            if hasattr(self, name):
                delattr(self, name)
        self.tp.close()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
