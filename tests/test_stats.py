"""llm.stats() counts what an LLM has done, to the token; timings tell how long a request took; a bar shows rates."""

from __future__ import annotations

import io
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial

import pytest
from conftest import alike, greedy
from tqdm import tqdm

from nanoinfer import BUNDLED_MODEL, LLM, BeamSearchParams, SamplingParams, Stats
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.results.stats import Counters
from nanoinfer.engine.results.step_result import StepResult, planned
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence
from nanoinfer.engine.step import PrefillStep
from nanoinfer.process.bar import Bar
from nanoinfer.replicas.messages import Report, StepFigures
from nanoinfer.replicas.replicas import Replicas
from nanoinfer.requests.outputs import RequestOutput, Timings
from nanoinfer.requests.progress import make_bar
from nanoinfer.requests.tasks.messages import TaskProgress

BLOCK = 16


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, device="cpu", dtype="float32", kvcache_block_size=BLOCK, num_kvcache_blocks=128) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> LLM:
    """An LLM whose stats are empty, and whose cache is."""
    shared.reset_prefix_cache()
    shared.reset_stats()
    return shared


@pytest.fixture
def llm_of_one_row(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """An LLM in which the second request waits for the first."""
    monkeypatch.setattr(llm.engine.scheduler, "max_num_seqs", 1)
    return llm


@pytest.fixture(scope="module")
def tight() -> Iterator[LLM]:
    """An LLM of few blocks."""
    options = {"device": "cpu", "dtype": "float32", "kvcache_block_size": BLOCK, "num_kvcache_blocks": 12}
    with LLM(BUNDLED_MODEL, max_model_len=80, **options) as llm:
        yield llm


def counts(stats: Stats) -> dict[str, int]:
    """The numbers of things, without zeros and times."""
    return {name: value for name, value in vars(stats).items() if name.startswith("num_") and value}


def step_to_the_end(llm: LLM) -> list[RequestOutput]:
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    return outputs


class TestCounts:
    def test_nothing_has_run(self, llm: LLM) -> None:
        stats = llm.stats()
        assert counts(stats) == {}
        assert stats.finish_reasons == {}
        assert (stats.cached_share, stats.rows_per_decode_step) == (0, 0)
        assert (stats.prefill_tokens_per_second, stats.decode_tokens_per_second) == (0, 0)

    def test_a_prompt_and_again_when_it_is_cached(self, llm: LLM) -> None:
        llm.generate([[30] * 40], greedy(8, ignore_eos=True), use_tqdm=False)
        once = {"num_requests": 1, "num_prompt_tokens": 40, "num_generated_tokens": 8, "num_prefill_steps": 1}
        once |= {"num_prefill_tokens": 40, "num_decode_steps": 7, "num_decode_tokens": 7}
        assert counts(llm.stats()) == once
        llm.generate([[30] * 40], greedy(8, ignore_eos=True), use_tqdm=False)
        twice = {name: 2 * count for name, count in once.items()}
        stats = llm.stats()
        assert counts(stats) == twice | {"num_cached_tokens": 32, "num_prefill_tokens": 48}
        assert stats.finish_reasons == {"length": 2}
        assert (stats.cached_share, stats.rows_per_decode_step) == (0.4, 1)

    def test_the_sums_are_those_of_the_outputs(self, llm: LLM) -> None:
        """Whatever ends a sample, and whichever prompts share blocks."""
        params = [SamplingParams(seed=index, n=1 + index % 3, max_tokens=20, stop="e") for index in range(12)]
        outputs = llm.generate([[30, 31] * (8 * (index % 4) + 3) for index in range(12)], params, use_tqdm=False)
        stats = llm.stats()
        samples = [sample for output in outputs for sample in output.samples]
        reasons = [sample.finish_reason for sample in samples]
        assert stats.num_requests == 12
        assert stats.finish_reasons == {reason: reasons.count(reason) for reason in sorted(set(reasons))}
        assert stats.num_prompt_tokens == sum(len(output.prompt_token_ids) for output in outputs)
        assert stats.num_cached_tokens == sum(output.num_cached_tokens for output in outputs) > 0
        assert stats.num_generated_tokens == sum(len(sample.token_ids) for sample in samples)

    def test_samples_share_their_prompt(self, llm: LLM) -> None:
        llm.generate([[30] * 20], SamplingParams(n=3, max_tokens=5, ignore_eos=True), use_tqdm=False)
        stats = llm.stats()
        assert (stats.num_requests, stats.finish_reasons) == (1, {"length": 3})
        assert (stats.num_prompt_tokens, stats.num_prefill_tokens, stats.num_generated_tokens) == (20, 20, 15)
        assert (stats.num_decode_steps, stats.num_decode_tokens, stats.rows_per_decode_step) == (4, 12, 3)

    def test_a_prompt_in_chunks_counts_once(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(llm.engine.scheduler, "max_num_batched_tokens", 16)
        llm.generate([[30] * 40], greedy(1), use_tqdm=False)
        stats = llm.stats()
        assert (stats.num_prompt_tokens, stats.num_prefill_tokens, stats.num_prefill_steps) == (40, 40, 3)

    @pytest.mark.usefixtures("no_foresight")
    def test_what_preemption_computes_again(self, tight: LLM) -> None:
        """A sequence that starts again computes its newest token for the first time."""
        outputs = tight.generate([[30 + index] * 30 for index in range(6)], greedy(40, ignore_eos=True), use_tqdm=False)
        stats = tight.stats()
        assert stats.num_preemptions == tight.engine.scheduler.num_preemptions > 0
        assert stats.num_recomputed_tokens > 0
        computed = stats.num_prompt_tokens - stats.num_cached_tokens + stats.num_recomputed_tokens
        assert stats.num_prefill_tokens == computed + stats.num_preemptions
        assert stats.num_generated_tokens == sum(len(output.token_ids) for output in outputs) == 6 * 40

    def test_scores(self, llm: LLM) -> None:
        llm.score([30] * 20, [[31], [32, 33]])
        stats = llm.stats()
        assert (stats.num_requests, stats.finish_reasons) == (2, {"length": 2})
        assert (stats.num_prompt_tokens, stats.num_generated_tokens, stats.num_decode_steps) == (43, 0, 0)

    def test_a_beam_search(self, llm: LLM) -> None:
        prompts = [[30] * 20, [31] * 9]
        for _ in range(2):
            llm.beam_search(prompts, BeamSearchParams(4, 10, ignore_eos=True))
        stats = llm.stats()
        assert (stats.num_requests, stats.finish_reasons) == (4, {})
        assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (58, 16)
        assert (stats.num_prefill_steps, stats.num_prefill_tokens) == (2, 58 - 16)
        assert (stats.num_decode_steps, stats.num_decode_tokens) == (2 * 9, 2 * 2 * 4 * 9)
        assert stats.num_generated_tokens == 2 * 2 * (1 + 4 * 9)
        assert stats.decode_seconds > 0

    @pytest.mark.whole
    def test_rank_0_counts(self, llm: LLM, make_llm: Callable[..., LLM]) -> None:
        prompts = [[30 + index] * (5 + index) for index in range(5)]
        both = [llm, make_llm(tensor_parallel_size=2, kvcache_block_size=BLOCK)]
        for each in both:
            each.generate(prompts, greedy(6, ignore_eos=True), use_tqdm=False)
        assert counts(both[0].stats()) == counts(both[1].stats())


class TestEnds:
    """All that ran counts, however a request ends."""

    def test_aborts(self, llm_of_one_row: LLM) -> None:
        llm = llm_of_one_row
        running, waiting = (llm.add_request([30] * 5, greedy(9, ignore_eos=True)) for _ in range(2))
        for _ in range(4):
            llm.step()
        llm.abort(waiting)
        llm.abort(running)
        assert (llm.stats().num_requests, llm.stats().finish_reasons) == (2, {"abort": 2})
        outputs = step_to_the_end(llm)
        stats = llm.stats()
        assert stats.num_prompt_tokens == 5
        assert stats.num_generated_tokens == sum(len(output.token_ids) for output in outputs) == 3

    def test_ctrl_c(self, llm: LLM) -> None:
        steps: list[StepResult] = []

        def interrupt(step: StepResult) -> None:
            steps.append(step)
            if len(steps) == 3:
                raise KeyboardInterrupt

        llm.engine.on_step = interrupt
        try:
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[30], [31]], SamplingParams(n=2, max_tokens=9, ignore_eos=True), use_tqdm=False)
        finally:
            llm.engine.on_step = None
        stats = llm.stats()
        assert (stats.num_requests, stats.finish_reasons) == (2, {"abort": 4})
        assert stats.num_generated_tokens == 3 * 4
        llm.generate([[32]], greedy(2, ignore_eos=True), use_tqdm=False)
        assert llm.stats().finish_reasons == {"abort": 4, "length": 1}

    def test_a_text_that_cannot_be_made(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: object) -> str:
            raise LookupError("no such token")

        monkeypatch.setattr("nanoinfer.requests.tasks.sample.decode", fail)
        outputs = llm.generate([[30], [31]], greedy(3), use_tqdm=False)
        assert [output.finish_reason for output in outputs] == ["error", "error"]
        assert llm.stats().finish_reasons == {"error": 2}

    def test_while_a_stream_is_open(self, llm: LLM) -> None:
        stream = llm.stream([[30], [31]], greedy(9, ignore_eos=True))
        next(stream)
        assert (llm.stats().num_requests, llm.stats().num_generated_tokens) == (0, 2)
        stream.close()
        assert (llm.stats().num_requests, llm.stats().finish_reasons) == (2, {"abort": 2})

    def test_after_close(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm()
        llm.add_request([30], greedy(9, ignore_eos=True))
        llm.step()
        llm.step()
        llm.close()
        stats = llm.stats()
        assert (stats.num_requests, stats.finish_reasons, stats.num_generated_tokens) == (1, {"abort": 1}, 1)

    def test_reset_in_the_middle(self, llm: LLM) -> None:
        """What has been told is forgotten, and what comes counts."""
        llm.add_request([30] * 20, greedy(6, ignore_eos=True))
        for _ in range(4):
            llm.step()
        told = llm.stats().num_generated_tokens
        assert told == 3
        llm.reset_stats()
        assert counts(llm.stats()) == {}
        step_to_the_end(llm)
        assert counts(llm.stats()) == {
            "num_requests": 1, "num_generated_tokens": 3, "num_decode_steps": 3, "num_decode_tokens": 3,
        }  # fmt: skip


class TestTimes:
    def test_steps_take_the_time_that_passes_while_requests_run(self, llm: LLM) -> None:
        start = time.perf_counter()
        for _ in range(2):
            llm.generate([[30] * 40], greedy(20, ignore_eos=True), use_tqdm=False)
        busy = time.perf_counter() - start
        stats = llm.stats()
        assert 0.3 * busy < stats.prefill_seconds + stats.decode_seconds < busy
        assert stats.decode_tokens_per_second == pytest.approx(stats.num_decode_tokens / stats.decode_seconds)
        assert stats.prefill_tokens_per_second == pytest.approx(stats.num_prefill_tokens / stats.prefill_seconds)

    def test_a_steps_time_holds_what_the_host_does_in_between(self, llm: LLM) -> None:
        llm.engine.on_step = lambda step: time.sleep(0.02)
        llm.generate([[30]], greedy(20, ignore_eos=True), use_tqdm=False)
        llm.engine.on_step = None
        assert llm.stats().decode_seconds > 0.02 * 17

    def test_idle_time_counts_for_no_step(self, llm: LLM) -> None:
        for _ in range(3):
            time.sleep(0.2)
            llm.generate([[30]], greedy(2, ignore_eos=True), use_tqdm=False)
        stats = llm.stats()
        assert stats.prefill_seconds + stats.decode_seconds < stats.seconds - 0.6
        assert stats.seconds < 60

    def test_the_rates_of_replicas_add_up(self) -> None:
        counters = Counters()
        for replica, tokens in ((0, 30), (1, 10), (1, 10)):
            step = StepResult(num_decode_tokens=tokens, ready_at=1.0, seconds=0.5, replica=replica)
            counters.note_step(step)
        stats = counters.stats()
        assert (stats.num_decode_steps, stats.decode_seconds, stats.decode_tokens_per_second) == (3, 1.5, 60 + 20)


def test_it_prints_a_few_lines() -> None:
    stats = Stats(
        seconds=2.04, num_requests=1234, finish_reasons={"length": 1230, "stop": 4}, num_prompt_tokens=2000,
        num_cached_tokens=500, num_generated_tokens=5000, num_preemptions=2, num_recomputed_tokens=1001,
        num_saved_blocks=1200, num_restored_blocks=3,
        num_prefill_steps=3, num_prefill_tokens=2503, prefill_seconds=0.5, prefill_tokens_per_second=5006.0,
        num_decode_steps=40, num_decode_tokens=3766, decode_seconds=1.25, decode_tokens_per_second=3012.8,
        num_proposed_tokens=0, num_accepted_tokens=0,
    )  # fmt: skip
    assert str(stats).splitlines() == [
        "requests: 1,234 in 2.0 s; samples: 1,230 length, 4 stop",
        "prompts: 2,000 tokens, 25% from the KV cache",
        "outputs: 5,000 tokens",
        "prefill: 2,503 tokens in 0.50 s, 5,006 tok/s; steps: 3",
        "decode: 3,766 tokens in 1.25 s, 3,013 tok/s; steps: 40, with 94.2 rows each",
        "preemptions: 2; tokens computed again: 1,001",
        "blocks in host memory: 1,200 saved, 3 restored",
    ]
    without = replace(stats, num_saved_blocks=0, num_restored_blocks=0)
    assert str(without).splitlines() == str(stats).splitlines()[:-1]


def sequence(length: int, max_tokens: int, sample_index: int = 0) -> Sequence:
    return Sequence([5 + length] * length, SamplingParams(max_tokens=max_tokens), 0, 40, sample_index=sample_index)


class TestPlannedFigures:
    """A step's figures, from its plan: blocks of 4 tokens."""

    @pytest.mark.usefixtures("no_foresight")
    def test_a_preempted_sequence_computes_again_what_its_old_blocks_no_longer_hold(self) -> None:
        sched = Scheduler(BlockManager(4, alike(4)), max_num_seqs=8, max_num_batched_tokens=5)
        old, new = sequence(7, 3), sequence(8, 20)
        for seq in (old, new):
            sched.add(seq)
        told = []
        while not sched.is_finished:
            step = sched.schedule(in_flight=False)
            assert step is not None
            figures = planned(step, now=1.0)
            if isinstance(step, PrefillStep):
                told.append((figures.num_prefill_tokens, figures.num_prompt_tokens, figures.num_recomputed_tokens))
                seqs = [chunk.seq for chunk in step.chunks if chunk.is_last]
            else:
                seqs = step.seqs
            sched.postprocess(step, [(seq, 0) for seq in seqs])
            if new.num_output_tokens == 6:
                sched.finish(new, "abort")
        assert sched.num_preemptions == 1
        # The prompts, in chunks. Then `new`, of 8 and a first token, loses a block to `old` and finds the other.
        assert told == [(5, 7, 0), (5, 8, 0), (5, 0, 0), (5, 0, 4)]

    def test_a_prompt_begins_once_and_so_does_its_time(self) -> None:
        sched = Scheduler(BlockManager(8, alike(4)), max_num_seqs=8, max_num_batched_tokens=6)
        first, second = sequence(10, 3), sequence(10, 3, sample_index=1)
        for seq in (first, second):
            sched.add(seq)
        steps = deque(sched.schedule(in_flight=False) for _ in range(2))
        told = [planned(step, now) for step, now in zip(steps, (1.0, 2.0), strict=True) if step is not None]
        assert [figures.num_prompt_tokens for figures in told] == [10, 0]
        assert (first.started_at, second.started_at) == (1.0, 2.0)


class TestTimings:
    def test_a_request_waits_then_runs(self, llm_of_one_row: LLM) -> None:
        first, second = llm_of_one_row.generate([[30], [31]], greedy(8, ignore_eos=True), use_tqdm=False)
        for output in (first, second):
            timings = output.timings
            assert timings.queued <= timings.started <= timings.first_token <= timings.finished
            assert timings.queue_seconds == timings.started - timings.queued
            assert timings.first_token_seconds == timings.first_token - timings.queued
            total = timings.first_token_seconds + timings.generation_seconds
            assert total == pytest.approx(timings.finished - timings.queued)
        assert second.timings.queue_seconds > first.timings.generation_seconds
        assert first.timings.queue_seconds < first.timings.generation_seconds

    def test_what_never_happened_is_none(self, llm_of_one_row: LLM) -> None:
        llm = llm_of_one_row
        running, waiting = (llm.add_request([30], greedy(9)) for _ in range(2))
        llm.step()  # it launches the prompt, whose token is not read back
        for request in (running, waiting):
            llm.abort(request)
        began, never = (output.timings for output in step_to_the_end(llm))
        assert began.queue_seconds >= 0
        assert (began.first_token_seconds, began.generation_seconds) == (None, None)
        assert (never.started, never.queue_seconds, never.first_token_seconds) == (None, None, None)

    def test_a_scored_prompt_starts_and_has_no_first_token(self, llm: LLM) -> None:
        (output,) = llm.generate([[30, 31]], greedy(0, prompt_logprobs=0), use_tqdm=False)
        assert 0 <= output.timings.queue_seconds <= output.timings.finished - output.timings.queued
        assert (output.timings.first_token_seconds, output.timings.generation_seconds) == (None, None)

    @pytest.mark.usefixtures("no_foresight")
    def test_preemption_keeps_the_first_start(self, tight: LLM) -> None:
        tight.reset_stats()
        started: dict[int, float] = {}

        def note(step: StepResult) -> None:
            for seq in step.advanced:
                assert seq.started_at == started.setdefault(seq.request_id, seq.started_at) > 0

        tight.engine.on_step = note
        outputs = tight.generate([[40 + index] * 30 for index in range(6)], greedy(40, ignore_eos=True), use_tqdm=False)
        tight.engine.on_step = None
        assert tight.stats().num_preemptions > 0
        assert {output.request_id: output.timings.started for output in outputs} == started

    def test_the_seconds_are_no_keys(self) -> None:
        timings = Timings(queued=1.0, started=1.5, first_token=2.0, finished=5.0)
        assert (timings.queue_seconds, timings.first_token_seconds, timings.generation_seconds) == (0.5, 1.0, 3.0)
        assert dict(timings) == {"queued": 1.0, "started": 1.5, "first_token": 2.0, "finished": 5.0}


def test_a_replica_tells_the_figures_of_a_step_in_their_order() -> None:
    finished, advanced, *told, replica = (field.name for field in fields(StepResult))
    assert (finished, advanced, replica) == ("finished", "advanced", "replica")
    assert list(StepFigures._fields) == told


def test_what_replicas_did_before_a_reset_does_not_count_when_they_tell_it_later() -> None:
    replicas = Replicas.__new__(Replicas)
    replicas.counters, seen = Counters(), []
    replicas.on_step = seen.append
    now = time.perf_counter()
    for ready_at in (now - 1, now + 1):
        report = Report(
            0, 0, [StepFigures(0, 1, ready_at, 1, 0, 0.0, 0.1, 1, 0, 0, 0, 0, 0, 0, 0, 0)], TaskProgress([], [], [])
        )
        replicas._note_steps(0, report)
    assert counts(replicas.counters.stats()) == {
        "num_generated_tokens": 1, "num_decode_steps": 1, "num_decode_tokens": 1,
    }  # fmt: skip
    assert len(seen) == 2


class TestNarrowBar:
    """On a narrow terminal a bar shows whole figures, and the most important first."""

    @pytest.mark.parametrize(
        ("columns", "shown"),
        [
            (100, "Generating: 12/256 [00:08<02:52, 99,966 tokens, decode 4,100 tok/s, prefill 342 tok/s]"),
            (80, "Generating: 12/256 [00:08<02:52, 99,966 tokens, decode 4,100 tok/s]"),
            (50, "Generating: 12/256 [00:08<02:52, 99,966 tokens]"),
            (40, "Generating: 12/256, 99,966 tokens"),
            (20, "Generating: 12/256, "),
        ],
    )
    def test_parts_go_rather_than_halves(self, columns: int, shown: str) -> None:
        figures = "99,966 tokens, decode 4,100 tok/s, prefill 342 tok/s"
        assert Bar.format_meter(12, 256, 8.5, columns, prefix="Generating", postfix=figures) == shown

    @pytest.mark.parametrize("columns", [None, 80])
    def test_others_are_tqdms(self, columns: int | None) -> None:
        how = {"prefix": "Weights", "unit": "B", "unit_scale": True}
        assert Bar.format_meter(5e6, 6e6, 2.0, columns, **how) == tqdm.format_meter(5e6, 6e6, 2.0, columns, **how)

    @pytest.mark.parametrize("columns", [0, -1])
    def test_a_terminal_that_does_not_tell_its_width_has_a_whole_line(self, columns: int) -> None:
        line = Bar.format_meter(1, 2, 2.0, columns, prefix="Generating", postfix="9 tokens")
        assert line == Bar.format_meter(1, 2, 2.0, prefix="Generating", postfix="9 tokens")
        assert line.endswith(", 9 tokens]")

    def test_a_terminal_without_rows_shows_the_line(self) -> None:
        """So it is under programs that run a command on a terminal of their own, and leave its size at 0."""
        terminal = io.StringIO()
        with Bar(total=2, desc="Generating", file=terminal) as bar:
            bar.nrows = -1  # tqdm counts one less
            bar.refresh()
            bar.nrows = -1
        assert terminal.getvalue().count("Generating:   0%") == 3  # made, refreshed, closed


class RecordingBar:
    """A bar that does what a user's must, and records what it shows; it has no `refresh`. Its call returns it."""

    def __init__(self) -> None:
        self.postfix = ""
        self.shown: list[tuple[int, str]] = []
        self.is_closed = False

    def __call__(self, **options: object) -> RecordingBar:
        return self

    def update(self, newly: int) -> None:
        self.shown.append((newly, self.postfix))

    def close(self) -> None:
        self.is_closed = True


class Locked:
    """A bar that nothing can be set in."""

    __slots__ = ()

    def update(self, newly: int) -> None: ...
    def close(self) -> None: ...


class TestBar:
    def test_one_without_room_for_figures_is_refused(self) -> None:
        """Before anything runs, and not at its first figures."""
        with pytest.raises(ValueError, match=r"use_tqdm=.*must make a bar as tqdm does: .*'postfix'"):
            make_bar(1, lambda **options: Locked(), "Generating")

    def run(self, llm: LLM, make: Callable[..., object], max_tokens: int = 12) -> None:
        llm.generate([[30] * 20], greedy(max_tokens, ignore_eos=True), use_tqdm=make)

    def test_it_moves_while_nothing_ends(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each step's time has come here. A step's tokens are read back while the next one runs."""
        monkeypatch.setattr("nanoinfer.requests.progress.REFRESH_SECONDS", 0.0)
        bar = RecordingBar()
        self.run(llm, bar)
        assert [newly for newly, _ in bar.shown] == [0] * 12 + [1]
        assert [int(text.split()[0]) for _, text in bar.shown] == [*range(13)]
        assert bar.is_closed

    def test_rates_are_those_of_late_and_in_the_end_of_all_steps(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("nanoinfer.requests.progress.REFRESH_SECONDS", 0.0)
        bar = RecordingBar()
        self.run(llm, bar)
        rates = [re.sub("[1-9][0-9,]*", "N", text.split(", ", 1)[1]) for _, text in bar.shown]
        assert rates[1] == "decode 0 tok/s, prefill N tok/s"
        assert rates[2:-1] == ["decode N tok/s, prefill 0 tok/s"] * 10
        assert rates[-1] == "decode N tok/s, prefill N tok/s"

    def test_it_is_seldom_refreshed(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("nanoinfer.requests.progress.REFRESH_SECONDS", 1e6)
        bar = RecordingBar()
        self.run(llm, bar)
        assert [newly for newly, _ in bar.shown] == [1]
        assert bar.shown[0][1].startswith("12 tokens, decode ")

    def test_tqdms_own_bar_shows_the_tokens_of_a_long_request(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also when requests have ended so fast before that tqdm waits for many more."""
        monkeypatch.setattr("nanoinfer.requests.progress.REFRESH_SECONDS", 0.0)
        written = io.StringIO()
        self.run(llm, partial(tqdm, file=written, miniters=1000))
        assert all(f" {count} tokens, decode" in written.getvalue() for count in range(13))

    def test_a_beam_search_shows_its_tokens(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("nanoinfer.requests.progress.REFRESH_SECONDS", 0.0)
        bar = RecordingBar()
        llm.beam_search([[30] * 5], BeamSearchParams(3, 4, ignore_eos=True), use_tqdm=bar)
        assert [(newly, int(text.split()[0])) for newly, text in bar.shown] == [(0, 1), (0, 4), (0, 7), (1, 10)]
