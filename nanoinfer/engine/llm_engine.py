"""LLMEngine: the loop that keeps the ranks busy until every request has its tokens."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from nanoinfer.config import Config
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.interrupts import delayed_interrupt
from nanoinfer.engine.matchers import Matchers
from nanoinfer.engine.peers import Peers
from nanoinfer.engine.record import record_extras
from nanoinfer.engine.routed_experts import RoutedExperts
from nanoinfer.engine.row_map import RowMap
from nanoinfer.engine.scheduler import PrefillStep, Scheduler, Step
from nanoinfer.engine.sequence import FinishReason, Sequence
from nanoinfer.engine.step_result import InFlight, StepResult
from nanoinfer.engine.workers import WorkerError, Workers
from nanoinfer.grammar import Grammar
from nanoinfer.models.description import EMBEDDING, HEAD
from nanoinfer.parallel.buckets import Bucket, SharedBuckets
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.model_runner import ModelRunner
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.weights.sources import FileSource, TensorSource


class LLMEngine:
    """Owns the scheduler, the RowMap and the ranks. It plans the next step while one is in flight."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._owner = os.getpid()
        self._failure: str | None = None  # why the ranks have ended
        are_several = config.tensor_parallel_size > 1
        self.workers = Workers(config) if are_several and config.starts_ranks else None
        self.peers = Peers(config) if are_several and not config.starts_ranks else None
        self._others = self.workers or self.peers
        self._finalizer = weakref.finalize(self, _close, self._owner, self._others, None)
        with self._one_fate():
            self.runner = self._make_runner()
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _close, self._owner, self._others, self.runner)
        self.scheduler = Scheduler(
            BlockManager(self.runner.memory.blocks, config.kvcache_block_size),
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.description.window,
            config.description.long_from,
        )
        self.row_map = RowMap()
        self.matchers = Matchers()
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
        self.note("prompt", prompt)
        self.note("settings", params)
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
        if reason == "abort":
            self.note("abort", seq.request_id, seq.sample_index)
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
            if self.peers is not None:
                self.peers.before_step(self.scheduler.running)
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
        table = self.runner.weights.table
        buckets = None if self.workers is None else SharedBuckets(self._send)
        is_begun = False
        self._compare("update_weights")
        try:
            with self.alike():
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
        with self.alike():
            source.check(self.runner.weights.table)
            if self.config.description.tied and source.has_own_head(f"{HEAD}.weight", f"{EMBEDDING}.weight"):
                raise ValueError(
                    f"{source.what}: has an output projection of its own, but this model's is the embedding"
                )
        self._compare("load_weights", source.what)
        self._begin_writing(begin)
        with self._undivided(), self._one_fate():
            self.runner.call("weights.read", source)
        return self._accept(source.what, self._end_writing())

    def _begin_writing(self, begin: Callable[[], None], buckets: SharedBuckets | None = None) -> None:
        """Forget what the old weights have computed. From here on the weights are a mixture."""
        begin()
        self.scheduler.reset_prefix_cache()
        with self._undivided():
            if buckets is not None:
                buckets.open()
            with self._one_fate():
                self.runner.call("weights.begin")
        self._is_whole = False

    def _write(self, name: str, tensor: Tensor, buckets: SharedBuckets | None) -> None:
        writer = self.runner.weights
        self.note("tensor", name)
        writer.write(name, tensor)
        if buckets is not None:
            with self._undivided():
                buckets.put(name, tensor, is_stack=writer.table[name][0].entry is not None)

    def _send(self, bucket: Bucket) -> None:
        assert self.workers is not None
        with self._one_fate():
            self.workers.send("weights.write_bucket", (bucket,))

    def _end_writing(self, buckets: SharedBuckets | None = None) -> str | None:
        """Wait until every rank has written what it got; returns what is wrong with the numbers, if anything is."""
        try:
            if self.is_closed:
                return None
            self._compare("end of weights")
            with self._undivided(), self._one_fate():
                return self.runner.call("weights.end")
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
        if self.peers is not None:
            return ModelRunner(config, self.peers.tensor_parallel(config.device_of(0)))
        if workers is None:
            return ModelRunner(config, TensorParallel())
        tp = TensorParallel(0, config.tensor_parallel_size, workers.store, config.device_of(0), workers.check)
        workers.watch(tp.abort)
        runner = ModelRunner(config, tp, workers.send)
        workers.end_start()  # by now every rank has built its model
        return runner

    def _undivided(self) -> AbstractContextManager[None]:
        """Return a context in which a Ctrl-C waits until several ranks are done together; a second one ends them.

        Peers may get it in different steps. So there it does not wait, and ends them.
        """
        if self.peers is not None:
            return self._one_fate()
        return nullcontext() if self.workers is None else delayed_interrupt()

    def note(self, what: str, *facts: object) -> None:
        """Note what all peers must be told alike; they compare it before they compute."""
        if self.peers is not None:
            self.peers.note(what, *facts)

    def _compare(self, what: str, *facts: object) -> None:
        """Note something, and wait until all peers have come to the same call."""
        if self.peers is not None and not self.is_closed:
            self.peers.note(what, *facts)
            with self._one_fate():
                self.peers.compare()

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Let peers compare an error of the block, which comes before they compute: no one must go on alone."""
        try:
            yield
        except Exception as error:
            self._compare("error", error)
            raise
        except BaseException as error:
            if self.peers is not None:
                self._fail(error)
            raise

    @contextmanager
    def _one_fate(self) -> Iterator[None]:
        """End all of several ranks if the block raises: otherwise those that are left would wait forever."""
        try:
            yield
        except BaseException as error:
            if self._others is None:
                raise
            cause = error
            try:
                cause = self._others.explain(error)
            finally:  # explain takes seconds, in which an interrupt may come
                self._fail(cause)
            if cause is error:
                raise
            raise cause from error

    def _fail(self, cause: BaseException) -> None:
        """End all ranks, and remember why."""
        self._failure = str(cause) or type(cause).__name__  # not the error: its traceback keeps what the ranks held
        if alive := self._finalizer.detach():
            _, _, (owner, others, runner), _ = alive
            _close(owner, others, runner, failed=True)

    def _read_back(self, done: InFlight) -> StepResult:
        assert done.tokens is not None
        with self._one_fate():
            token_ids = done.tokens.wait(None if self._others is None else self._others.patience())
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
        self.note("abort of all requests")
        self.in_flight.clear()
        self.matchers.clear()
        self.scheduler.abort_all()
        self.row_map.clear()

    def close(self) -> None:
        """End the other ranks and give back all memory; safe to call twice."""
        with delayed_interrupt():
            self._finalizer()

    def check_open(self) -> None:
        """Raise ValueError if close has been called, or WorkerError with the cause if the ranks have failed.

        With several ranks, raise RuntimeError in a fork of the process that made them.
        """
        if self._others is not None and self._owner != os.getpid():
            raise RuntimeError(f"this LLM's ranks serve process {self._owner}, and not its fork: make another LLM here")
        if self.is_closed and self._failure is not None:
            raise WorkerError(f"this LLM is closed, make another: {self._failure}")
        if self.is_closed:
            raise ValueError("this LLM is closed: make another")

    def check_ready(self) -> None:
        """Raise RuntimeError if the weights are a mixture of old and new ones, and as check_open does."""
        self.check_open()
        if not self._is_whole:
            raise RuntimeError(
                "the weights are incomplete: an update of them has not ended well; write all of them by"
                " update_weights(named_tensors) with partial=False, or by load_weights(model)"
            )

    @property
    def is_closed(self) -> bool:
        """Whether close has been called, or the ranks have failed."""
        return not self._finalizer.alive


def _close(owner: int, others: Workers | Peers | None, runner: ModelRunner | None, failed: bool = False) -> None:
    """End all ranks; after a failure, kill the other ranks, because they may not listen."""
    if owner != os.getpid():
        return  # this is a fork: the ranks belong to the process that made them
    if others is not None:
        failed = not others.stop(failed)
    if runner is not None:
        runner.close(failed)
    if others is not None:
        others.join()
