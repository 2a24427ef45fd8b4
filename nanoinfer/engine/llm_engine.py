"""LLMEngine: the loop that keeps the ranks busy until every request has its tokens."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from nanoinfer.config import Config
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.interrupts import delayed_interrupt
from nanoinfer.engine.matchers import Matchers
from nanoinfer.engine.record import record_extras
from nanoinfer.engine.routed_experts import RoutedExperts
from nanoinfer.engine.row_map import RowMap
from nanoinfer.engine.scheduler import PrefillStep, Scheduler, Step
from nanoinfer.engine.sequence import FinishReason, Sequence
from nanoinfer.engine.sleeper import Sleeper
from nanoinfer.engine.workers import WorkerError, Workers
from nanoinfer.grammar import Grammar
from nanoinfer.models.description import EMBEDDING, HEAD
from nanoinfer.parallel.buckets import Bucket, Buckets, DeviceBuckets, SharedBuckets
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.model_runner import ModelRunner
from nanoinfer.runner.pending_tokens import PendingTokens
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.weights.sources import FileSource, TensorSource


@dataclass
class InFlight:
    """A launched step whose tokens have not been read back."""

    step: Step
    seqs: list[Sequence]  # in the order of the tokens
    guided: list[Sequence]  # those of them that are guided
    tokens: PendingTokens | None  # None until guided rows have their masks


@dataclass
class StepResult:
    """The step that one call of LLMEngine.step read back; without one, all is empty or 0.

    num_running and blocks_used still count the sequences that ended with the step.
    """

    finished: list[Sequence]
    advanced: list[Sequence] = field(default_factory=list)  # those that the step computed a token for
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0  # a token after an end-of-sequence token does not count
    ready_at: float | None = None  # when the device was done with the step, on time.perf_counter's clock
    num_running: int = 0  # sequences whose prompts are scheduled whole and whose last token is not read back yet
    blocks_used: float = 0.0  # the share of the KV cache's blocks that sequences hold


class LLMEngine:
    """Owns the scheduler, the RowMap and the ranks. It plans the next step while one is in flight."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._owner = os.getpid()
        self._failure: str | None = None  # why the ranks have ended
        self.workers = Workers(config) if config.tensor_parallel_size > 1 else None
        self._finalizer = weakref.finalize(self, _close, self._owner, self.workers, None)
        with self._one_fate():
            self.runner = self._make_runner()
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _close, self._owner, self.workers, self.runner)
        self.scheduler = Scheduler(
            BlockManager(self.runner.memory.blocks, config.kvcache_block_size),
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.description.window,
            config.description.long_from,
        )
        self.row_map = RowMap()
        self.matchers = Matchers()
        self.sleeper = Sleeper(self.runner.call)
        self.in_flight: deque[InFlight] = deque()
        self.on_step: Callable[[StepResult], None] | None = None  # called with each step that is read back
        self.weights_version = 0  # the updates that have ended well
        self._is_whole = True  # otherwise an update is under way or broke off, and the weights are a mixture
        self.num_requests = 0  # that have been added so far, ended ones included

    def add_request(self, prompt: list[int], params: SamplingParams, grammar: Grammar | None = None) -> list[Sequence]:
        """Queue a request; returns its params.n sequences, which hold their tokens once steps have finished them.

        grammar: that of params.structured_outputs, if there are any

        The sequences' request_id counts the requests, from 0.
        """
        request_id, self.num_requests = self.num_requests, self.num_requests + 1
        seed = params.seed
        if seed is None:  # + 1: the first request's seed is not 0, which a user may choose
            seed = self.config.seed * 0x9E3779B97F4A7C15 + (request_id + 1) * 0xD1B54A32D192ED03
        stop_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_ids |= self.config.eos_token_ids
        if grammar is not None:
            stop_ids |= grammar.eos_token_ids
        seqs: list[Sequence] = []
        for index in range(params.n):
            own_seed = (seed + index * 0xA0761D6478BD642F) % 2**63
            seq = Sequence(prompt, params, own_seed, self.config.max_model_len, stop_ids, request_id, index)
            seq.queued_at = time.perf_counter()
            seq.use_weights(self.weights_version)
            if (experts := self.config.description.experts) is not None and self.config.routed_experts:
                seq.routed_experts = RoutedExperts(sum(experts.layers), experts.used, experts.number_type)
            seqs.append(seq)
            self.scheduler.add(seq)
            if grammar is not None:
                self.matchers.add(seq, grammar)
        return seqs

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence now, or change the reason of one that has ended."""
        if seq.is_finished:
            seq.finish_reason, seq.stop_reason = reason, stop_reason
        else:
            self.scheduler.finish(seq, reason, stop_reason)
            seq.finished_at = time.perf_counter()
        self.matchers.drop(seq)

    @property
    def is_finished(self) -> bool:
        """Whether no request waits or runs."""
        return self.scheduler.is_finished and not self.in_flight

    def step(self) -> StepResult:
        """Launch the next step, if one can be planned, and read back the one before it.

        The masks of guided rows need the tokens of the step before. The host makes them while the device computes.
        """
        self.check_ready()
        with self._undivided():
            result, launched = StepResult([]), None
            step = self.scheduler.schedule(in_flight=bool(self.in_flight))
            if step is not None:
                launched = self._launch(step)
                self.in_flight.append(launched)
            if self.in_flight and (launched is None or len(self.in_flight) > 1):
                result = self._read_back(self.in_flight.popleft())
            if launched is not None and launched.guided:
                masks = self.matchers.masks(launched.guided)
                with self._one_fate():
                    launched.tokens = self.runner.call("finish", masks)
            return result

    def _launch(self, step: Step) -> InFlight:
        message, seqs = self.row_map.describe(step)
        guided = self.matchers.guided(seqs)
        with self._one_fate():
            tokens = self.runner.call("launch" if guided else "run", message)
        return InFlight(step, seqs, guided, tokens)

    def drain(self) -> list[StepResult]:
        """Read back every step in flight."""
        results = []
        with self._undivided():
            while self.in_flight:
                results.append(self._read_back(self.in_flight.popleft()))
        return results

    def update_weights(self, source: TensorSource, begin: Callable[[], None]) -> int:
        """Write a trainer's tensors into the weights; returns the new version.

        begin: called before the first write; leaves no step in flight
        """
        table = self.runner.holdings.weights.table
        buckets = self._make_buckets()
        is_begun = False
        try:
            for name, tensor in source.tensors(table):
                self.check_open()  # the source runs code that is not ours
                if not is_begun:
                    is_begun = True
                    self._begin_writing(begin, buckets)
                self._write(name, tensor, buckets)
                del tensor  # so that it can go before the next one comes
            self.check_open()
            if buckets is not None:
                with self._undivided():
                    buckets.flush()
        finally:
            fault = self._end_writing(buckets) if is_begun else None
        return self._accept(source.what, fault)

    def load_weights(self, source: FileSource, begin: Callable[[], None]) -> int:
        """Write the tensors of files into the weights; returns the new version. begin: as for update_weights."""
        source.check(self.runner.holdings.weights.table)
        if self.config.description.tied and source.has_own_head(f"{HEAD}.weight", f"{EMBEDDING}.weight"):
            raise ValueError(f"{source.what}: has an output projection of its own, but this model's is the embedding")
        self._begin_writing(begin)
        with self._undivided(), self._one_fate():
            self.runner.call("holdings.weights.read", source)
        return self._accept(source.what, self._end_writing())

    def sleep(self, keep_weights: bool) -> None:
        """Lend the ranks' memory, while no request runs. Raises RuntimeError if there is no room for kept weights."""
        with delayed_interrupt():
            self.drain()
            self.scheduler.reset_prefix_cache()
            self._is_whole &= keep_weights
            with self._one_fate():
                fault = self.sleeper.sleep(keep_weights)
        if fault is not None:
            raise RuntimeError(fault)

    def wake_up(self, tags: Collection[str]) -> None:
        """Take back what the tags name. Raises RuntimeError if a device has no room for it."""
        with delayed_interrupt(), self._one_fate():
            fault = self.sleeper.wake_up(tags)
        if fault is not None:
            raise RuntimeError(fault)

    def _begin_writing(self, begin: Callable[[], None], buckets: Buckets | None = None) -> None:
        """Forget what the old weights have computed. From here on the weights are a mixture."""
        begin()
        self.scheduler.reset_prefix_cache()
        with self._undivided():
            if buckets is not None:
                buckets.open()
            with self._one_fate():
                self.runner.call("holdings.weights.begin")
        self._is_whole = False

    def _write(self, name: str, tensor: Tensor, buckets: Buckets | None) -> None:
        writer = self.runner.holdings.weights
        writer.write(name, tensor)
        if buckets is not None:
            with self._undivided():
                buckets.put(name, tensor, is_stack=writer.table[name][0].entry is not None)

    def _make_buckets(self) -> Buckets | None:
        if self.workers is None:
            return None
        # Ranks that have inboxes can read each other's memory.
        return (
            SharedBuckets(self._send) if self.runner.tp.inbox is None else DeviceBuckets(self._send, self.runner.device)
        )

    def _send(self, bucket: Bucket) -> None:
        assert self.workers is not None
        with self._one_fate():
            self.workers.send("holdings.weights.write_bucket", (bucket,))

    def _end_writing(self, buckets: Buckets | None = None) -> str | None:
        """Wait until every rank has written what it got; returns what is wrong with the numbers, if anything is."""
        try:
            if self.is_closed:
                return None
            with self._undivided(), self._one_fate():
                return self.runner.call("holdings.weights.end")
        finally:
            if buckets is not None:
                buckets.close()

    def _accept(self, what: str, fault: str | None) -> int:
        """Count new weights, if nothing is wrong with them; returns their version."""
        if fault is not None:
            raise ValueError(f"{what}: {fault}")
        version = self.weights_version + 1
        for seq in self.scheduler.unfinished:
            seq.use_weights(version)
        self.weights_version = version
        self._is_whole = True
        return version

    def _make_runner(self) -> ModelRunner:
        config, workers = self.config, self.workers
        if workers is None:
            return ModelRunner(config, TensorParallel())
        tp = TensorParallel(0, config.tensor_parallel_size, workers.store, config.device, workers.check)
        workers.watch(tp.abort)
        runner = ModelRunner(config, tp, workers.send)
        workers.end_start()  # by now every rank has built its model
        return runner

    def _undivided(self) -> AbstractContextManager[None]:
        """Return a context in which a Ctrl-C waits until several ranks are done together; a second one ends them."""
        return nullcontext() if self.workers is None else delayed_interrupt()

    @contextmanager
    def _one_fate(self) -> Iterator[None]:
        """End all of several ranks if the block raises: otherwise those that are left would wait forever."""
        try:
            yield
        except BaseException as error:
            if self.workers is None:
                raise
            cause = error
            try:
                cause = self.workers.explain(error)
            finally:  # explain takes seconds, in which an interrupt may come
                self._fail(cause)
            if cause is error:
                raise
            raise cause from error

    def _fail(self, cause: BaseException) -> None:
        """End all ranks, and remember why."""
        self._failure = str(cause) or type(cause).__name__  # not the error: its traceback keeps what the ranks held
        if alive := self._finalizer.detach():
            _, _, (owner, workers, runner), _ = alive
            _close(owner, workers, runner, failed=True)

    def _read_back(self, done: InFlight) -> StepResult:
        assert done.tokens is not None
        with self._one_fate():
            token_ids = done.tokens.wait(None if self.workers is None else self.workers.patience())
        result = StepResult(
            finished=[],
            ready_at=done.tokens.ready_at,
            num_running=len(self.scheduler.running),
            blocks_used=self.scheduler.block_manager.share_used,
            advanced=done.seqs,
        )
        record_extras(done.step, done.seqs, done.tokens.extras)
        if isinstance(done.step, PrefillStep):
            for seq in done.seqs:
                if not seq.is_finished:
                    seq.first_token_at = seq.first_token_at or done.tokens.ready_at
        result.finished, num_dropped = self.scheduler.postprocess(done.step, zip(done.seqs, token_ids, strict=True))
        result.finished += self._advance_matchers(done.guided)
        for seq in result.finished:
            seq.finished_at = done.tokens.ready_at
        if isinstance(done.step, PrefillStep):
            result.num_prefill_tokens = done.step.num_tokens
        else:
            result.num_decode_tokens = done.step.num_tokens - num_dropped
        if self.on_step is not None:
            self.on_step(result)
        return result

    def _advance_matchers(self, guided: list[Sequence]) -> list[Sequence]:
        """Let the matchers read their sequences' newest tokens; returns the sequences that end by that."""
        ended = []
        for seq in guided:
            if (end := self.matchers.advance(seq)) is not None:
                if not seq.is_finished:
                    ended.append(seq)
                self.finish(seq, *end)
        return ended

    def abort_all(self) -> None:
        """Drop every request, those in flight included; the engine is then ready for new ones."""
        self.in_flight.clear()
        self.matchers.clear()
        self.scheduler.abort_all()
        self.row_map.clear()

    def close(self) -> None:
        """End the other ranks and give back all memory; safe to call twice."""
        with delayed_interrupt():
            self.matchers.close()
            self._finalizer()

    def check_open(self) -> None:
        """Raise ValueError if close has been called, or WorkerError with the cause if the ranks have failed.

        With several ranks, raise RuntimeError in a fork of the process that made them.
        """
        if self.workers is not None and self._owner != os.getpid():
            raise RuntimeError(f"this LLM's ranks serve process {self._owner}, and not its fork: make another LLM here")
        if self.is_closed and self._failure is not None:
            raise WorkerError(f"this LLM is closed, make another: {self._failure}")
        if self.is_closed:
            raise ValueError("this LLM is closed: make another")

    def check_writable(self) -> None:
        """Raise RuntimeError if the weights are lent, and as check_open does."""
        self.check_open()
        self.sleeper.check_awake("weights")

    def check_ready(self) -> None:
        """Raise RuntimeError if this engine sleeps, and as check_whole and check_open do."""
        self.check_open()
        self.sleeper.check_awake("weights", "kv_cache")
        self.check_whole()

    def check_whole(self) -> None:
        """Raise RuntimeError if the weights are a mixture of old and new ones, or lost."""
        if not self._is_whole:
            raise RuntimeError(
                "the weights are incomplete: an update of them has not ended well, or sleep(level=2) has dropped them;"
                " write all of them by update_weights(named_tensors) with partial=False, or by load_weights(model)"
            )

    @property
    def is_closed(self) -> bool:
        """Whether close has been called, or the ranks have failed."""
        return not self._finalizer.alive


def _close(owner: int, workers: Workers | None, runner: ModelRunner | None, failed: bool = False) -> None:
    """End all ranks; after a failure, kill the other ranks, because they may not listen."""
    if owner != os.getpid():
        return  # this is a fork: the ranks belong to the process that made them
    if workers is not None:
        failed = not workers.stop(failed)
    if runner is not None:
        runner.close(failed)
    if workers is not None:
        workers.join()
