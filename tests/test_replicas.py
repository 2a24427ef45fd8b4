"""Replicas give one engine's tokens, and lose no request when they die, hang or are interrupted."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Oracle, alive, assert_close, assert_equal, different_settings, greedy, wait_until, whole_only

from nanoinfer import BUNDLED_MODEL, LLM, RequestOutput, SamplingParams, WorkerError
from nanoinfer.batch import run
from nanoinfer.batch.job import Summary
from nanoinfer.config import Config
from nanoinfer.engine.ranks.workers import VERDICT_SECONDS
from nanoinfer.engine.results.step_result import StepResult
from nanoinfer.parallel.channel import BEAT_SECONDS
from nanoinfer.process.first_launch import VISIBLE
from nanoinfer.replicas import weight_transfer
from nanoinfer.replicas.replica import Life
from nanoinfer.replicas.transports.spawned import SpawnedProcess, gpus_of

OPTIONS = {"device": "cpu", "dtype": "float32", "kvcache_block_size": 16, "num_kvcache_blocks": 400}
LONG = greedy(300, ignore_eos=True)
FAULT = """
import json
import logging
import multiprocessing
import os
import sys

import torch

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams
from nanoinfer.runner.model_runner import ModelRunner

fault, options = sys.argv[1], json.loads(sys.argv[2])
device = options["device"]
healthy, calls = ModelRunner.run, []


class Pinned:  # host memory, which PyTorch cannot free behind a CUDA error
    def __del__(self):
        os.abort()


def fail():
    if fault == "memory":
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    elif fault == "error":
        torch.zeros(1, device=device)[torch.tensor([1], device=device)]
        torch.cuda.synchronize()
    elif fault == "abort":
        os.abort()
    elif fault == "rank":
        raise RuntimeError("rank 1 has a problem")
    elif fault == "hang":
        torch.cuda._sleep(1 << 60)


def run(self, message):
    calls.append(message)
    if len(calls) == 20 and must_fail():
        fail()
    tokens = healthy(self, message)
    if (device, fault, len(calls)) == ("cpu", "error", 19) and must_fail():
        tokens.pinned = Pinned()
    return tokens


def must_fail():
    processes = multiprocessing.parent_process(), multiprocessing.current_process()
    names = [process.name for process in processes if process]
    return "nanoinfer-replica-0" in names and ("nanoinfer-rank-1" in names) == (fault == "rank")


ModelRunner.run = run

if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    prompts = [[30 + i] for i in range(20)]
    params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)
    with LLM(BUNDLED_MODEL, **options) as one:
        expected = one.generate(prompts, params, use_tqdm=False)
    with LLM(BUNDLED_MODEL, data_parallel_size=2, max_num_seqs=16, worker_timeout=5.0, **options) as two:
        outputs = two.generate(prompts, params, use_tqdm=False)
        print([output.token_ids for output in outputs] == [output.token_ids for output in expected], two.engine.ready)
"""


def make(**options: object) -> LLM:
    return LLM(BUNDLED_MODEL, **{**OPTIONS, **options})


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def one(device: str) -> Iterator[LLM]:
    with make(device=device) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(device: str) -> Iterator[LLM]:
    """Two replicas, of which nobody dies for good."""
    with make(device=device, data_parallel_size=2, restart_replicas=True, max_num_seqs=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def many(device: str) -> Iterator[LLM]:
    """Seven replicas, some of which are dead when the tests have come to an end."""
    if device == "cuda" and torch.cuda.device_count() < 7:
        pytest.skip(f"needs 7 CUDA devices, found {torch.cuda.device_count()}")
    with make(device=device, data_parallel_size=7, max_num_seqs=4, worker_timeout=5.0) as llm:
        yield llm


def token_ids(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.samples] for output in outputs]


def step_to_the_end(llm: LLM) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    return outputs


class TestSameAsOne:
    """What replicas return is what one engine returns."""

    def test_mixed_settings(self, one: LLM, two: LLM, mixed_prompts: list[list[int]]) -> None:
        prompts = mixed_prompts[::2]
        params = different_settings(len(prompts))
        assert_equal(two.generate(prompts, params, use_tqdm=False), one.generate(prompts, params, False))

    def test_the_memory_of_one_of_them(self, one: LLM, two: LLM, device: str) -> None:
        if device == "cpu":  # on a GPU, other processes count
            assert two.memory.used == one.memory.used > 0

    def test_samples_of_one_prompt_whose_seeds_come_from_the_requests_number(self, two: LLM, device: str) -> None:
        params = SamplingParams(n=24, max_tokens=8)
        prompts = ["ROMEO:\n", "JULIET:\nAh me! what light through yonder window breaks? It is the east."]
        with make(
            device=device
        ) as fresh:  # its requests have other numbers than those of `two`, until it has had as many
            generate_nothing(fresh, two._requests.num_added)
            for _ in range(2):
                expected = fresh.generate(prompts, params, use_tqdm=False)
                outputs = two.generate(prompts, params, use_tqdm=False)
                assert_equal(outputs, expected)
                assert [output.request_id for output in outputs] == [output.request_id for output in expected]
                assert [output.prompt for output in outputs] == prompts

    def test_guided_text_and_chat(self, one: LLM, two: LLM) -> None:
        pytest.importorskip("llguidance")
        params = SamplingParams(temperature=0, max_tokens=20, structured_outputs={"choice": ["thou", "thee"]})
        for llm in (one, two):
            (output,) = llm.chat([{"role": "user", "content": "Good morrow"}], params, use_tqdm=False)
            assert output.text in ("thou", "thee")

    def test_score(self, one: LLM, two: LLM) -> None:
        choices = [" window breaks?", " door opens?", " is it"]
        scores = [llm.score("But, soft! what light through yonder", choices) for llm in (one, two)]
        assert [score.logprob for score in scores[1]] == pytest.approx([score.logprob for score in scores[0]], abs=1e-4)
        assert [score.token_ids for score in scores[1]] == [score.token_ids for score in scores[0]]

    def test_stream(self, one: LLM, two: LLM) -> None:
        prompts = ["GLOUCESTER:\nNow is the winter", "ROMEO:\n", "First Citizen:\n"]
        params = SamplingParams(temperature=0, max_tokens=24, n=2, logprobs=1, prompt_logprobs=0, stop="\nAnd")
        expected, told = collect(one, prompts, params), collect(two, prompts, params)
        assert told.keys() == expected.keys()
        assert len(told) == 6
        for key, (*facts, logprobs, prompt_logprobs) in told.items():
            *wanted_facts, wanted, wanted_prompts = expected[key]
            assert facts == wanted_facts
            assert_close(logprobs, wanted)
            assert_close(prompt_logprobs, wanted_prompts)

    def test_step_by_step(self, one: LLM, two: LLM) -> None:
        prompts = [[30 + i] * (1 + i) for i in range(10)]
        expected = one.generate(prompts, greedy(12), use_tqdm=False)
        ids = [two.add_request(prompt, greedy(12)) for prompt in prompts]
        outputs = {output.request_id: output for output in step_to_the_end(two)}
        assert two.step() == []
        assert_equal([outputs[id] for id in ids], expected)

    def test_steps_tell_their_figures(self, two: LLM) -> None:
        steps: list[StepResult] = []
        two.engine.on_step = steps.append
        two.generate([[30 + i] for i in range(8)], greedy(5, ignore_eos=True), use_tqdm=False)
        two.engine.on_step = None
        assert {step.replica for step in steps} == {0, 1}
        assert sum(step.num_prefill_tokens for step in steps) == 8
        assert sum(step.num_decode_tokens for step in steps) == 8 * 4

    def test_stats_count_what_all_do(self, one: LLM, two: LLM) -> None:
        told = []
        for llm in (one, two):
            llm.reset_prefix_cache()
            llm.reset_stats()
            params = SamplingParams(n=3, max_tokens=5, ignore_eos=True)
            outputs = llm.generate([[30 + i] * (i + 1) for i in range(20)], params, use_tqdm=False)
            stats = llm.stats()
            assert stats.num_cached_tokens == sum(output.num_cached_tokens for output in outputs)
            assert all(output.timings.queue_seconds >= 0 for output in outputs)
            told.append((stats.num_requests, stats.finish_reasons, stats.num_prompt_tokens, stats.num_generated_tokens))
        assert told == [(20, {"length": 60}, 210, 300)] * 2

    def test_stats_of_a_stream_that_is_left(self, two: LLM) -> None:
        two.reset_stats()
        stream = two.stream([[30], [31]], greedy(40, ignore_eos=True))
        next(stream)
        stream.close()
        stats = two.stats()
        assert (stats.num_requests, stats.finish_reasons) == (2, {"abort": 2})
        assert stats.num_generated_tokens > 0

    def test_the_progress_bar(self, two: LLM, capsys: pytest.CaptureFixture[str]) -> None:
        two.generate([[30], [31]], greedy(3))
        bar = capsys.readouterr().err
        assert re.search(r"2/2 .*prefill [1-9].*decode [1-9]", bar)


def test_a_batch_file(tmp_path: Path) -> None:
    """The job reads ahead for all replicas, and its report counts the rows of all."""
    (tmp_path / "in.jsonl").write_text("".join(f'{{"id": {i}, "token_ids": [{30 + i}, 31]}}\n' for i in range(24)))

    def results(name: str, **options: Any) -> dict[int, list[int]]:
        out = tmp_path / name
        assert run(tmp_path / "in.jsonl", out, BUNDLED_MODEL, **OPTIONS, max_tokens=6, **options) == Summary(24, 0)
        return {row["id"]: row["token_ids"] for row in map(json.loads, out.read_text().splitlines())}

    page = tmp_path / "report.html"
    assert results("two", data_parallel_size=2, max_num_seqs=4, report=page) == results("one", max_num_seqs=4)
    assert "Running rows" in page.read_text()


def generate_nothing(llm: LLM, count: int) -> None:
    llm.generate([[30]] * count, greedy(1), use_tqdm=False)


def collect(llm: LLM, prompts: list[str], params: SamplingParams) -> dict[tuple[int, int], tuple[Any, ...]]:
    """Return all that a stream tells, by prompt and sample."""
    told: dict[tuple[int, int], tuple[Any, ...]] = {}
    for new in llm.stream(prompts, params):
        key = new.index, new.sample
        text, ids, _, _, logprobs, prompt_logprobs = told.get(key, ("", [], None, None, [], None))
        ends = new.finish_reason, new.stop_reason
        prompt_logprobs = prompt_logprobs or new.prompt_logprobs
        told[key] = text + new.text, ids + new.token_ids, *ends, logprobs + new.logprobs, prompt_logprobs
    return told


class TestChanges:
    """What else an LLM can do."""

    def test_abort_ends_what_runs_and_what_waits(self, two: LLM) -> None:
        ids = [two.add_request([30 + i % 50], greedy(100, ignore_eos=True)) for i in range(60)]
        two.step()
        for id in ids[1:]:
            two.abort(id)
        outputs = step_to_the_end(two)
        assert sorted(output.request_id for output in outputs) == ids
        assert {output.request_id: output.finish_reason for output in outputs}[ids[0]] == "length"
        assert sum(output.finish_reason == "abort" for output in outputs) == 59
        with pytest.raises(ValueError, match="no request has it"):
            two.abort(10**6)

    def test_a_loop_that_is_left_aborts_its_stream(self, two: LLM, oracle: Oracle) -> None:
        for new in two.stream([[30], [31]], LONG):
            if new.token_ids:
                break
        del new
        gc.collect()
        (output,) = two.generate([[30]], greedy(5), use_tqdm=False)
        assert output.token_ids == oracle.greedy([30], 5)

    def test_ctrl_c_drops_all_requests(self, two: LLM, oracle: Oracle) -> None:
        timer = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            two.generate([[30 + i % 50] for i in range(400)], LONG, use_tqdm=False)
        timer.join()
        assert not two.has_unfinished_requests()
        (output,) = two.generate([[30]], greedy(5), use_tqdm=False)
        assert output.token_ids == oracle.greedy([30], 5)
        assert len(two.engine.ready) == 2

    def test_new_weights_and_sleep(
        self, device: str, make_qwen3: Callable[..., str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, other = make_qwen3(), make_qwen3(num_hidden_layers=3)  # make_qwen3 always draws alike
        with LLM(folder, device=device, data_parallel_size=2, num_kvcache_blocks=16) as llm:
            before = llm.generate([[30 + i] for i in range(8)], greedy(8), use_tqdm=False)
            llm.reset_prefix_cache()
            with pytest.raises(ValueError, match="does not fit"):
                llm.load_weights(other)
            assert llm.weights_version == 0
            assert token_ids(llm.generate([[30]], greedy(8), use_tqdm=False)) == token_ids(before[:1])
            llm.sleep(level=2)
            assert llm.is_sleeping
            with pytest.raises(RuntimeError, match="call wake_up"):
                llm.generate([[30]], greedy(8))
            llm.wake_up(["weights"])
            assert llm.load_weights(folder) == llm.weights_version == 1
            llm.wake_up()
            assert not llm.is_sleeping
            after = llm.generate([[30 + i] for i in range(8)], greedy(8), use_tqdm=False)
            assert token_ids(after) == token_ids(before)
            assert {version for output in after for _, version in output.weights_versions} == {1}

            trained = dict(Oracle(make_qwen3(initializer_range=0.3)).model.named_parameters())
            monkeypatch.setattr(weight_transfer, "SEGMENT_BYTES", 1 << 16)  # tensors are cut
            with pytest.raises(ValueError, match="do not fit"):
                llm.update_weights([*trained.items(), ("lost", torch.ones(3))])
            assert token_ids(llm.generate([[30]], greedy(8), use_tqdm=False)) == token_ids(before[:1])
            with pytest.raises(ValueError, match="do not fit"):
                llm.update_weights(iter([*trained.items(), ("lost", torch.ones(3))]))
            with pytest.raises(RuntimeError, match="the weights are incomplete"):
                llm.generate([[30]], greedy(8))
            assert llm.update_weights(iter(trained.items())) == 2
            with LLM(folder, device=device, num_kvcache_blocks=16) as single:
                single.update_weights(trained)
                expected = single.generate([[30 + i] for i in range(8)], greedy(8), use_tqdm=False)
            after = llm.generate([[30 + i] for i in range(8)], greedy(8), use_tqdm=False)
            assert token_ids(after) == token_ids(expected) != token_ids(before)

            ids = [llm.add_request([30 + i], greedy(200, ignore_eos=True)) for i in range(8)]
            llm.step()
            with pytest.raises(ValueError, match="do not fit"):
                llm.update_weights(iter([*trained.items(), ("lost", torch.ones(3))]))
            with pytest.raises(RuntimeError, match="the weights are incomplete"):
                llm.step()
            assert llm.update_weights(iter(trained.items())) == 3
            assert len(llm.engine.ready) == 2
            llm.step()
            assert llm.update_weights(trained, in_flight="abort") == 4
            outputs = step_to_the_end(llm)
            assert sorted(output.request_id for output in outputs) == ids
            assert {output.finish_reason for output in outputs} == {"abort"}


class TestDeaths:
    """Replicas that die or hang, one after another, until none is left."""

    @pytest.mark.whole
    def test_seven_replicas_keep_order_and_lose_nothing(self, many: LLM, one: LLM) -> None:
        prompts = [[30 + i % 100, 31 + i // 100] for i in range(500)]
        outputs = many.generate(prompts, greedy(3), use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == prompts
        assert token_ids(outputs) == token_ids(one.generate(prompts, greedy(3), use_tqdm=False))

    def test_one_that_raises(self, many: LLM, one: LLM, caplog: pytest.LogCaptureFixture) -> None:
        prompts = [[30 + i] for i in range(14)]
        victim = many.engine.ready[0]
        many.engine._processes[victim].send("no_such_method")
        with caplog.at_level(logging.WARNING, logger="nanoinfer"):
            outputs = many.generate(prompts, greedy(5), use_tqdm=False)
        assert token_ids(outputs) == token_ids(one.generate(prompts, greedy(5), use_tqdm=False))
        assert victim not in many.engine.ready
        assert re.search(f"replica {victim} died: AttributeError: .*no_such_method", caplog.text)

    def test_one_that_is_killed(self, many: LLM, one: LLM, caplog: pytest.LogCaptureFixture) -> None:
        params = SamplingParams(max_tokens=30, seed=5, n=2, ignore_eos=True)
        prompts = [[30 + i] for i in range(12)]
        victim = many.engine.ready[0]
        strike(many, victim, signal.SIGKILL)
        with caplog.at_level(logging.WARNING, logger="nanoinfer"):
            outputs = many.generate(prompts, params, use_tqdm=False)
        assert_equal(outputs, one.generate(prompts, params, use_tqdm=False))
        assert victim not in many.engine.ready
        (warning,) = [record.getMessage() for record in caplog.records]
        assert f"replica {victim} died: it ended with exit code -9" in warning

    def test_a_stream_goes_on_where_it_was(self, many: LLM, one: LLM) -> None:
        prompts = ["ROMEO:\n", "JULIET:\n", "GLOUCESTER:\nNow is"]
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        expected = one.generate(prompts, params, use_tqdm=False)
        texts, tokens = [""] * 3, [0] * 3
        for count, new in enumerate(many.stream(prompts, params)):
            texts[new.index] += new.text
            tokens[new.index] += len(new.token_ids)
            if count == 20:
                os.kill(many.engine.pids[busy(many)[0]], signal.SIGKILL)
        assert texts == [output.text for output in expected]
        assert tokens == [60] * 3

    def test_one_that_hangs(self, many: LLM, one: LLM, caplog: pytest.LogCaptureFixture) -> None:
        prompts = [[30 + i] for i in range(20)]
        victim = many.engine.ready[0]
        strike(many, victim, signal.SIGSTOP)
        with caplog.at_level(logging.WARNING, logger="nanoinfer"):
            outputs = many.generate(prompts, greedy(30), use_tqdm=False)
        assert token_ids(outputs) == token_ids(one.generate(prompts, greedy(30), use_tqdm=False))
        assert f"replica {victim} hangs: no sign of life for 5 s (worker_timeout)" in caplog.text

    def test_a_request_that_sees_two_die_is_given_up(self, many: LLM, oracle: Oracle) -> None:
        assert len(many.engine.ready) >= 3
        id = many.add_request([30], LONG)
        for _ in range(2):
            wait_for_step(many)
            (victim,) = busy(many)
            os.kill(many.engine.pids[victim], signal.SIGKILL)
            outputs: list[RequestOutput] = []
            while victim in many.engine.ready:
                outputs += many.step()
        (output,) = outputs
        assert (output.request_id, output.finish_reason) == (id, "error")
        assert output.stop_reason == "two replicas died while they computed this sample"
        assert id == many.add_request([30], greedy(5)) - 1
        assert [output.token_ids for output in step_to_the_end(many)] == [oracle.greedy([30], 5)]

    def test_with_no_replica_left_there_is_a_worker_error(self, many: LLM) -> None:
        many.add_request([30], LONG)
        many.step()
        pids = list(many.engine.pids.values())
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"no replica is left: replica . died: it ended with exit code -9"):
            step_to_the_end(many)
        with pytest.raises(WorkerError, match="this LLM is closed"):
            many.generate([[30]])
        assert not many.has_unfinished_requests()
        assert not any(map(alive, pids))

    def test_one_that_is_started_again(self, two: LLM, oracle: Oracle) -> None:
        before = two.engine.pids
        os.kill(before[1], signal.SIGKILL)
        prompts = [[30 + i] for i in range(8)]
        expected = [[oracle.greedy(prompt, 5)] for prompt in prompts]
        deadline = time.monotonic() + 60
        assert token_ids(two.generate(prompts, greedy(5), use_tqdm=False)) == expected
        os.kill(two.engine.pids[1], signal.SIGINT)  # as a Ctrl-C for the whole terminal, while it starts
        while two.engine.ready != [0, 1] and time.monotonic() < deadline:
            assert token_ids(two.generate(prompts, greedy(5), use_tqdm=False)) == expected
        assert two.engine.pids[1] != before[1]
        steps: list[StepResult] = []
        two.engine.on_step = steps.append
        assert token_ids(two.generate(prompts, greedy(5), use_tqdm=False)) == expected
        two.engine.on_step = None
        assert {step.replica for step in steps} == {0, 1}

    def test_one_that_dies_before_sleep_does_not_start_again(self, device: str, oracle: Oracle) -> None:
        with make(device=device, data_parallel_size=2, restart_replicas=True) as two:
            os.kill(two.engine.pids[1], signal.SIGKILL)
            two.sleep()
            assert two.is_sleeping
            two.wake_up()
            assert list(two.engine.pids) == [0]
            (output,) = two.generate([[30]], greedy(5), use_tqdm=False)
            assert output.token_ids == oracle.greedy([30], 5)

    def test_one_that_dies_in_the_middle_of_a_message(self) -> None:
        process = SpawnedProcess.__new__(SpawnedProcess)
        process.pipe, theirs = multiprocessing.Pipe()
        os.write(theirs.fileno(), struct.pack("!i", 1000) + b"half")
        theirs.close()
        assert process.receive() is None
        process.pipe.close()


FAULTS = {
    "memory": "replica 0 died: .*(can't allocate memory|CUDA out of memory)",
    "error": "replica 0 died: .*(out of bounds|CUDA error: device-side assert triggered)",
    "abort": "replica 0 died: it ended with exit code -6 and left no error; .*see its last words on stderr",
    "rank": "replica 0 died: WorkerError: tensor-parallel rank 1 died: Traceback.*rank 1 has a problem",
    "hang": r"replica 0 died: a step was not done after 5 s \(worker_timeout\)",
}


@pytest.mark.parametrize(
    ("device", "fault"),
    [
        *whole_only([("cpu", "memory"), ("cpu", "abort"), ("cpu", "rank")]),
        *(pytest.param("cuda", fault, marks=pytest.mark.multi_gpu) for fault in FAULTS if fault != "rank"),
    ],
)
def test_one_whose_device_fails(tmp_path: Path, device: str, fault: str) -> None:
    """Its requests go to the other, and the warning says what failed."""
    script = tmp_path / "fault.py"
    script.write_text(FAULT)
    options = {**OPTIONS, "device": device, "tensor_parallel_size": 2 if fault == "rank" else 1}
    command = [sys.executable, str(script), fault, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(f"(?s){FAULTS[fault]}", done.stdout)
    assert done.stdout.splitlines()[-1] == "True [1]"


def test_a_step_that_hangs_is_found_and_a_pause_of_the_process_is_not() -> None:
    """The device's thread watches by beats, which a stopped process does not count."""
    life = Life.__new__(Life)
    life._timeout, life._watched, life._waits = 3.0, None, 0

    def beats(steps: list[int | None]) -> bool:
        stuck = False
        for life.step in steps:
            stuck = life._is_stuck()
        return stuck

    enough = int((3.0 + 2 * VERDICT_SECONDS) / BEAT_SECONDS) + 3
    assert not beats([None] * enough)
    assert not beats(list(range(enough)))
    assert not beats([7] * 3)
    assert beats([7] * enough)


def strike(llm: LLM, victim: int, sent: signal.Signals) -> None:
    """Let a replica get a signal when it has told of a step."""

    def look(step: StepResult) -> None:
        if step.replica == victim:
            llm.engine.on_step = None
            os.kill(llm.engine.pids[victim], sent)

    llm.engine.on_step = look


def busy(llm: LLM) -> list[int]:
    """Return the replicas that hold samples."""
    return [index for index in llm.engine.ready if llm._requests._tasks.sharing.num_held(index)]


def wait_for_step(llm: LLM) -> None:
    """Step until a replica has told of a step."""
    steps: list[StepResult] = []
    llm.engine.on_step = steps.append
    while not steps:
        llm.step()
    llm.engine.on_step = None


def make_and_die(pipe: Connection) -> None:
    """Tell the replicas' process ids, and be killed."""
    llm = make(device="cpu", data_parallel_size=2)
    pipe.send(list(llm.engine.pids.values()))
    os.kill(os.getpid(), signal.SIGKILL)


class TestEnds:
    """Nothing stays behind."""

    def test_replicas_end_with_a_killed_parent(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        parent = context.Process(target=make_and_die, args=(theirs,))
        parent.start()
        pids = ours.recv()
        parent.join()
        assert parent.exitcode == -signal.SIGKILL
        assert len(pids) == 2
        assert wait_until(lambda: not any(map(alive, pids)))

    @pytest.mark.whole
    def test_a_killed_parent_leaves_nothing(self, tmp_path: Path) -> None:
        script = tmp_path / "killed.py"
        script.write_text(
            "import multiprocessing, os, re, signal\n"
            "from nanoinfer import LLM, BUNDLED_MODEL, SamplingParams\n"
            "if __name__ == '__main__':\n"
            "    options = dict(data_parallel_size=2, tensor_parallel_size=2, num_kvcache_blocks=8)\n"
            "    llm = LLM(BUNDLED_MODEL, device='cpu', **options)\n"
            "    output = llm.generate([[30]], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)[0]\n"
            "    multiprocessing.set_start_method('spawn')\n"  # the replicas' start has not settled it
            "    print(*output.token_ids, flush=True)\n"
            "    for pid in llm.engine.pids.values():\n"
            "        rank = open(f'/proc/{pid}/task/{pid}/children').read().strip()\n"
            "        print(pid, rank, *re.findall('/dev/shm/\\\\S+', open(f'/proc/{pid}/maps').read()), flush=True)\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        tokens, *replicas = done.stdout.splitlines()
        assert len(tokens.split()) == 3
        assert len(replicas) == 2
        for pid, rank, *segments in map(str.split, replicas):
            assert segments  # the ranks' channel, and its semaphore
            assert wait_until(lambda pid=pid, rank=rank: not alive(int(pid)) and not alive(int(rank)))
            assert wait_until(lambda segments=segments: not any(Path(segment).exists() for segment in segments))

    def test_deletion_ends_all_processes(self, device: str) -> None:
        llm = make(device=device, data_parallel_size=2)
        pids = list(llm.engine.pids.values())
        del llm
        gc.collect()
        assert not any(map(alive, pids))

    def test_a_fork_is_refused(self, two: LLM) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                two.generate([[30]])
            except RuntimeError as error:
                two.close()
                os._exit(0 if "and not its fork" in str(error) else 1)
            os._exit(1)
        id = two.add_request([30], greedy(5))
        assert os.waitpid(pid, 0)[1] == 0
        assert [output.request_id for output in step_to_the_end(two)] == [id]


class TestRefused:
    """What cannot be is said before a replica starts, or by the replica that cannot start."""

    def test_more_replicas_than_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
        with pytest.raises(ValueError, match=r"2 replicas of tensor_parallel_size=2 need 4 GPUs.*machine has 3 GPUs"):
            Config(BUNDLED_MODEL, data_parallel_size=2, tensor_parallel_size=2, device="cuda")

    @pytest.mark.parametrize("options", [{"data_parallel_size": 0}, {"data_parallel_size": 1.5}])
    def test_no_number_of_replicas(self, options: dict[str, object]) -> None:
        with pytest.raises(ValueError, match=r"data_parallel_size=.*must be an integer from 1 to 64"):
            Config(BUNDLED_MODEL, **options)

    def test_what_a_replica_refuses_comes_as_it_is(self) -> None:
        with pytest.raises(ValueError, match="max_num_seqs=50000000"):
            make(data_parallel_size=2, max_num_seqs=50_000_000)

    def test_a_group_of_processes(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            with pytest.raises(ValueError, match="data_parallel_size=2: must be 1 with tensor_parallel_group"):
                make(data_parallel_size=2, tensor_parallel_group=dist.group.WORLD)
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["0,1", "2,3"]),
        ("5,3,1,0", ["5,3", "1,0"]),
        ("GPU-ab, GPU-cd,GPU-ef,GPU-01", ["GPU-ab,GPU-cd", "GPU-ef,GPU-01"]),
    ],
)
def test_replicas_share_the_gpus_that_are_visible(
    visible: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = SimpleNamespace(device="cuda", tensor_parallel_size=2)
    assert [gpus_of(config, index) for index in range(2)] == expected
