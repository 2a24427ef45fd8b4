"""LLMEngine: the loop that keeps the ranks busy until every request has its tokens."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from contextlib import AbstractContextManager
from functools import partial

from nanoinfer.config import Config
from nanoinfer.engine.assembly import make_row_map, make_scheduler
from nanoinfer.engine.client import EngineClient
from nanoinfer.engine.guided.matchers import Matchers
from nanoinfer.engine.media import MediaFeed
from nanoinfer.engine.new_sequences import NewPrompt, NewSequences
from nanoinfer.engine.prefixes.stored_prefixes import StoredPrefixes
from nanoinfer.engine.ranks.adapters import RankAdapters
from nanoinfer.engine.ranks.ranks import Ranks
from nanoinfer.engine.ranks.sleeper import Sleeper
from nanoinfer.engine.ranks.steerings import RankSteerings
from nanoinfer.engine.ranks.updater import RankUpdater
from nanoinfer.engine.ranks.workers import Workers
from nanoinfer.engine.results.faults import processed_wrongly, without_media, without_numbers, without_token
from nanoinfer.engine.results.record import record_prompts, record_tokens
from nanoinfer.engine.results.step_result import InFlight, StepResult, planned
from nanoinfer.engine.sequence import FinishReason, Sequence
from nanoinfer.engine.speculation.draws import read_guesses, read_plain, read_verified
from nanoinfer.engine.step import DecodeStep, Step
from nanoinfer.grammar.grammar import Grammar
from nanoinfer.media.spans import MediaPrompt
from nanoinfer.media.tower.tower import BATCH_BYTES
from nanoinfer.process.interrupts import delayed_interrupt
from nanoinfer.process.torch_state import fresh_torch_state
from nanoinfer.runner.results.extras import Extras
from nanoinfer.sampling_params import SamplingParams


class LLMEngine(EngineClient):
    """Owns the scheduler, the RowMap and the ranks. It plans the next step while one is in flight."""

    updater: RankUpdater
    adapters: RankAdapters
    steerings: RankSteerings

    def __init__(self, config: Config, workers: Workers | None = None) -> None:
        """workers: the processes of the other ranks, if these have started already"""
        super().__init__()
        self.config = config
        self.ranks = Ranks(config, workers)
        self.memory = self.ranks.runner.memory
        self.scheduler = make_scheduler(config, self.ranks)
        self._feed = MediaFeed(self._keeps_media, config.device == "cuda")
        self.row_map = make_row_map(config, self.ranks, self._feed)
        self.matchers = Matchers()
        self.updater = RankUpdater(self.ranks, self.scheduler, config.description.tied)
        self.adapters = RankAdapters(self.ranks, self.scheduler, config.max_adapters)
        self.steerings = RankSteerings(self.ranks, config.max_steerings)
        self._new_sequences = NewSequences(config, self.ranks, self.updater, self.adapters, self.steerings)
        self._stored = StoredPrefixes(config, self.ranks, self.scheduler.block_manager)
        self.sleeper = Sleeper(self.ranks.call, self.asleep)
        self.in_flight: deque[InFlight] = deque()
        self.num_requests = 0  # that have been added so far, ended ones included
        self._ready_at = 0.0  # when the device was done with the newest step that was read back
        self._has_media = False  # whether a prompt had some

    def _keeps_media(self, key: bytes) -> bool:
        media = self.ranks.runner.holdings.media
        return media is not None and media.keeps(key)

    def add_request(
        self,
        prompt: NewPrompt,
        params: SamplingParams,
        grammar: Grammar | None = None,
        seed: int | None = None,
        samples: range | None = None,
    ) -> list[Sequence]:
        """Queue a request; returns its params.n sequences, which hold their tokens once steps have finished them.

        grammar: that of params.structured_outputs, if there are any
        seed: the request's; None: params.seed, or one that is made from the request's number
        samples: the numbers of the samples to compute; None: all

        The sequences' request_id counts the requests, from 0. Raises ValueError for images that cannot be computed.
        """
        seqs = self._new_sequences.make(self.num_requests, prompt, params, grammar, seed, samples)
        self.num_requests += 1
        self._has_media |= isinstance(prompt, MediaPrompt)
        for seq in seqs:
            self.scheduler.add(seq)
            if grammar is not None:
                self.matchers.add(seq, grammar)
        return seqs

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence now, or change the reason of one that has ended."""
        if reason == "abort":
            self.ranks.record("abort", seq.request_id, seq.sample_index)
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

        The masks of guided rows need the tokens of the step before. The host makes them while the device computes. The
        step itself makes the guesses before it runs the model, so the masks behind these come in time, too.
        """
        self.check_ready()
        start = self._busy_clock()
        with self.ranks.uninterrupted():
            result, launched = StepResult(), None
            if self.ranks.peers is not None:
                self.ranks.peers.before_step(self.scheduler.running)
            preempted_before = self.scheduler.num_preemptions
            step = self.scheduler.schedule(in_flight=bool(self.in_flight))
            if step is not None:
                launched = self._launch(step)
                launched.result.num_preemptions = self.scheduler.num_preemptions - preempted_before
                self.in_flight.append(launched)
            if self._has_media:
                # Ranks that plan by themselves encode together, and would differ in what threads have made by now.
                self._look_ahead(beside_decode=isinstance(step, DecodeStep) and self.ranks.peers is None)
            before = self._busy_clock()
            if self.in_flight and (launched is None or len(self.in_flight) > 1):
                done = self.in_flight.popleft()
                result = self._read_back(done)
                done.busy += self._busy_clock() - before
                self._note_time(done)
            reading = self._busy_clock() - before
            if launched is not None and launched.guided:
                masks = self.matchers.masks(launched.guided, partial(self._read_guesses, launched))
                launched.tokens = self.ranks.call("draw_guided", masks)
                launched.busy = self._busy_clock() - start - reading
            return result

    def _busy_clock(self) -> float:
        """Return the time on a clock that stands still while the host waits for the device."""
        return time.perf_counter() - self.ranks.waited

    def _note_time(self, done: InFlight) -> None:
        """Tell how long a step took, or how long the host was busy for its guided rows, reading it back included."""
        speculation = self.scheduler.speculation
        if speculation is None or self.ranks.peers is not None:  # peers plan alike, and their clocks differ
            return
        if self.config.device == "cpu":  # the host is the device
            speculation.note_time(done.step, done.result.seconds)
        elif done.guided:
            speculation.note_host(done.step, len(done.guided), done.busy)

    def _look_ahead(self, beside_decode: bool) -> None:
        """Let images be prepared for the next step of prompts, and encoded beside a step that decodes."""
        self._feed.look_ahead(self.scheduler.waiting, self.config.max_num_batched_tokens)
        if beside_decode and (new := self._feed.take_made(BATCH_BYTES // self.config.torch_dtype.itemsize)):
            self.ranks.call("holdings.media.encode", new)

    def _launch(self, step: Step) -> InFlight:
        now = time.perf_counter()
        result = planned(step, now)
        message, seqs = self.row_map.describe(step)
        for seq in without_media(step):
            self.scheduler.block_manager.prefixes.forget(seq)  # no later step may share what this one computes
        message.transfers = self.scheduler.block_manager.take_transfers(step.num_tokens)
        result.note_transfers(message.transfers)
        guided = self.matchers.guided(seqs)
        told = self.ranks.call("launch" if guided else "run", message)
        tokens, guesses = (None, told) if guided else (told, None)
        return InFlight(step, seqs, guided, tokens, guesses, result, None if self.in_flight else now)

    def drain(self) -> list[StepResult]:
        """Read back every step in flight."""
        results = []
        with self.ranks.uninterrupted():
            while self.in_flight:
                results.append(self._read_back(self.in_flight.popleft()))
        return results

    def reset_prefix_cache(self) -> None:
        """Let no later request share what has been computed so far."""
        self.ranks.record("reset_prefix_cache")
        self.scheduler.reset_prefix_cache()

    def save_prefix(self, token_ids: list[int], folder: str) -> int:
        """Write what the prefix cache holds of a prompt, as StoredPrefixes does, while no request runs."""
        self.drain()
        return self._stored.save(token_ids, folder)

    def load_prefix(self, folder: str) -> int:
        """Let later requests find what a folder holds, as StoredPrefixes does, while no request runs."""
        self.drain()
        return self._stored.load(folder)

    def sleep(self, keep_weights: bool) -> None:
        """Offload the ranks' memory, while no request runs. Raises RuntimeError if kept weights have no room."""
        self.ranks.check_consistent("sleep", keep_weights)
        with delayed_interrupt():
            self.drain()
            self.scheduler.block_manager.prefixes.lose_blocks()
            if not keep_weights:
                self.scheduler.reset_prefix_cache()
                self.updater.drop()
                self.adapters.drop()
                self.steerings.drop()
            fault = self.sleeper.sleep(keep_weights)
        if fault is not None:
            raise RuntimeError(fault)

    def wake_up(self, tags: Collection[str]) -> None:
        """Take back what the tags name. Raises RuntimeError if a device has no room for it."""
        self.ranks.check_consistent("wake_up", *sorted(tags))
        with delayed_interrupt():
            fault = self.sleeper.wake_up(tags)
        if fault is not None:
            raise RuntimeError(fault)

    def _read_guesses(self, launched: InFlight) -> list[list[int]]:
        """Wait for the guesses of a step's guided sequences; returns those of each."""
        if launched.guesses is None:
            return [[] for _ in launched.guided]
        with fresh_torch_state():
            return read_guesses(launched.seqs, launched.guided, self.ranks.wait(launched.guesses))

    def _read_back(self, done: InFlight) -> StepResult:
        assert done.tokens is not None
        result = done.result
        done.note_load(self.scheduler)
        with fresh_torch_state():
            drawn = self.ranks.wait(done.tokens)
            draws = read_verified(done.seqs, drawn) if done.step.guesses else read_plain(drawn)
            faulty = without_token(done.seqs, draws.firsts, self.config.dtype) | without_media(done.step)
            faulty |= processed_wrongly(done.seqs, done.tokens.extras, self.config.logits_processors or ())
            failed = self._fail(faulty | self._without_numbers(done.step, done.tokens.extras))
            record_prompts(done.step, done.tokens.extras)
        self._ready_at = done.note_times(self._ready_at)
        num_cut = self.matchers.read(done.seqs, draws.tokens) if done.guided else 0
        ended, num_dropped = self.scheduler.postprocess(done.step, zip(done.seqs, draws.tokens, strict=True))
        ended += self._end_guided(done.guided)
        with fresh_torch_state():
            record_tokens(done.step, done.seqs, done.tokens.extras, draws.proposed)
        failed += self._fail(without_token(done.seqs, draws.lasts, self.config.dtype))
        done.note_ends([*failed, *ended], draws, num_dropped + num_cut)
        self.counters.note_step(result, self.on_step)
        return result

    def _without_numbers(self, step: Step, extras: Extras) -> dict[Sequence, str]:
        """Return what without_numbers does, but for packed texts: these end, and tell why some have no numbers."""
        found = without_numbers(step, extras, self.config.dtype)
        for seq, why in found.items():
            if seq.text_lens is not None:
                seq.stop_reason = why
        return {seq: why for seq, why in found.items() if seq.text_lens is None}

    def _fail(self, failed: dict[Sequence, str]) -> list[Sequence]:
        """End sequences by what is wrong with each; returns them."""
        for seq, why in failed.items():
            # A NaN may have come to tokens before its own, by 0 * NaN.
            self.scheduler.block_manager.prefixes.forget(seq)
            self.finish(seq, "error", why)
        return list(failed)

    def _end_guided(self, guided: list[Sequence]) -> list[Sequence]:
        """End the guided sequences whose matchers say so, behind their newest tokens; returns them."""
        ended = []
        for seq in guided:
            if (end := self.matchers.end_of(seq)) is not None:
                if not seq.is_finished:
                    ended.append(seq)
                self.finish(seq, *end)
        return ended

    def abort_all(self) -> None:
        """Drop every request, those in flight included; the engine is then ready for new ones."""
        self.ranks.record("abort of all requests")
        self.in_flight.clear()
        self.matchers.clear()
        self.scheduler.abort_all()
        self.row_map.clear()
        self._feed.look_ahead((), 0)

    def close(self) -> None:
        """End the other ranks and give back all memory; safe to call twice."""
        with delayed_interrupt():
            self.ranks.close()  # first, so that a call on another thread learns why it ends
            self.matchers.close()

    def consistent(self) -> AbstractContextManager[None]:
        """Return a context in which an error ends all peers' calls, if there are peers: see Ranks.consistent."""
        return self.ranks.consistent()

    def check_open(self) -> None:
        """Raise an error if this engine can make no steps any more: see Ranks.check_open."""
        self.ranks.check_open()
