"""The number of threads: as many as make a step faster."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams
from nanoinfer.runner import threads as module
from nanoinfer.runner.logits.processors import LogitsProcessors
from nanoinfer.runner.model_runner import ModelRunner
from nanoinfer.runner.threads import Threads, num_threads

Step = Callable[[], None]


@pytest.fixture(autouse=True)
def eight_threads() -> Iterator[None]:
    with num_threads(8):
        yield


@pytest.fixture
def step_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, float]], Step]:
    """Makes a step that takes so many seconds with so many threads, on a clock of its own."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def make(seconds: dict[int, float]) -> Step:
        def step() -> None:
            clock.now += seconds[torch.get_num_threads()]

        return step

    return make


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({8: 0.002, 4: 0.004, 2: 0.008, 1: 0.016}, 8),  # every thread helps
        ({8: 0.040, 4: 0.010, 2: 0.003, 1: 0.005}, 2),  # a core is busy
        ({8: 0.005, 4: 0.005, 2: 0.005, 1: 0.005}, 1),  # none helps
        ({8: 0.005, 4: 0.0051, 2: 0.006, 1: 0.0065}, 4),  # more than four help little
    ],
)
def test_the_fewest_threads_that_are_fast(
    seconds: dict[int, float], best: int, step_of: Callable[[dict[int, float]], Step]
) -> None:
    threads = Threads()
    threads.choose(1, step_of(seconds))
    assert torch.get_num_threads() == 8
    with threads.of(7):
        assert torch.get_num_threads() == best
    assert torch.get_num_threads() == 8


def test_a_user_is_told_the_threads_of_large_steps(step_of: Callable[[dict[int, float]], Step]) -> None:
    threads = Threads()
    assert str(threads) == "8 threads"  # torch's own number
    threads.choose(1, step_of({8: 3.0, 4: 2.0, 2: 1.0, 1: 1.0}))
    assert str(threads) == "1 thread"
    threads.choose(16, step_of({8: 3.0, 4: 1.0, 2: 2.0}))
    assert str(threads) == "4 threads"
    threads.fix(2)
    assert str(threads) == "2 threads"


def test_steps_of_many_tokens_have_a_number_of_their_own(step_of: Callable[[dict[int, float]], Step]) -> None:
    threads = Threads()
    threads.choose(1, step_of({8: 0.1, 4: 0.1, 2: 0.1, 1: 0.1}))
    threads.choose(16, step_of({8: 0.1, 4: 0.2}))
    for tokens, count in ((1, 1), (15, 1), (16, 8), (1000, 8)):
        with threads.of(tokens):
            assert torch.get_num_threads() == count


def test_without_a_choice_torchs_own_number_stays() -> None:
    with Threads().of(5):
        assert torch.get_num_threads() == 8


def test_a_step_that_takes_long_is_timed_once_each(step_of: Callable[[dict[int, float]], Step]) -> None:
    calls = []
    step = step_of({8: 0.25, 4: 0.5})

    def told() -> None:
        calls.append(torch.get_num_threads())
        step()

    Threads().choose(1, told)
    assert calls == [8, 4]


class TestContention:
    """Other work that begins after the choice."""

    @pytest.fixture
    def threads(self, step_of: Callable[[dict[int, float]], Step]) -> Threads:
        threads = Threads()
        threads.choose(1, step_of({8: 0.010, 4: 0.020}))
        return threads

    @pytest.fixture
    def run(self, threads: Threads, step_of: Callable[[dict[int, float]], Step]) -> Callable[..., list[int]]:
        """Runs steps, which take so many seconds with so many threads; returns the threads of each."""

        def run(seconds: dict[int, float], steps: int, tokens: int = 1) -> list[int]:
            step, counts = step_of(seconds), []
            for _ in range(steps):
                with threads.of(tokens):
                    counts.append(torch.get_num_threads())
                    step()
            return counts

        return run

    def test_halves_the_threads_until_steps_are_fast_again(self, run: Callable[..., list[int]]) -> None:
        assert run({8: 0.010}, 20) == [8] * 20
        assert run({8: 0.300, 4: 0.300, 2: 0.010}, 10) == [8, 4] + [2] * 8

    def test_notices_steps_that_take_three_times_as_long(self, run: Callable[..., list[int]]) -> None:
        run({8: 0.010}, 20)
        assert run({8: 0.030, 4: 0.012}, 10) == [8, 8] + [4] * 8

    def test_a_single_step_may_take_three_times_as_long(self, run: Callable[..., list[int]]) -> None:
        run({8: 0.010}, 20)
        for _ in range(20):
            assert run({8: 0.030}, 1) + run({8: 0.010}, 3) == [8] * 4

    def test_takes_all_threads_again_after_a_second(self, run: Callable[..., list[int]]) -> None:
        run({8: 0.010}, 20)
        run({8: 0.300}, 1)
        counts = run({8: 0.010, 4: 0.020}, 60)
        assert counts == [4] * 50 + [8] * 10

    def test_tries_more_and_more_seldom_while_the_other_work_lasts(self, run: Callable[..., list[int]]) -> None:
        run({8: 0.010}, 20)
        counts = run({8: 0.300, 4: 0.020}, 6000)
        tries = [step for step, count in enumerate(counts) if count == 8]
        waits = [after - before for before, after in pairwise(tries)]
        assert waits == sorted(waits)
        assert len(tries) == 7  # in two minutes: 1, 2, 4, 8, 16, 32 and 64 seconds apart
        run({8: 0.010, 4: 0.020}, 20_000)
        assert run({8: 0.300, 4: 0.020}, 60).count(8) == 2  # once the work is over, it forgets

    def test_larger_steps_are_not_slow(self, run: Callable[..., list[int]]) -> None:
        assert run({8: 0.010}, 20, tokens=16) == [8] * 20
        assert run({8: 1.000}, 20, tokens=2048) == [8] * 20

    def test_steps_may_become_slower_little_by_little(self, run: Callable[..., list[int]]) -> None:
        for step in range(100):
            assert run({8: 0.010 * 1.05**step}, 1) == [8]

    def test_one_thread_waits_for_none(self, step_of: Callable[[dict[int, float]], Step]) -> None:
        threads = Threads()
        threads.choose(1, step_of(dict.fromkeys((8, 4, 2, 1), 0.01)))
        for seconds in (0.01, 3.0, 0.01):
            with threads.of(1):
                assert torch.get_num_threads() == 1
                step_of({1: seconds})()

    def test_what_is_left_of_a_step_is_no_step(self, threads: Threads, run: Callable[..., list[int]]) -> None:
        """A step waits for the host in its middle, and then draws with the same threads: its seconds tell nothing."""
        run({8: 0.010}, 20)
        for _ in range(20):
            with threads.of_rest(1):
                assert torch.get_num_threads() == 8
        run({8: 0.300, 4: 0.300}, 2)
        with threads.of_rest(1):
            assert torch.get_num_threads() == 2


def test_guided_rows_are_drawn_with_the_threads_of_their_step(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance", reason="structured outputs need the llguidance package")
    llm, seen, draw = make_llm(device="cpu"), set[int](), LogitsProcessors.draw
    threads = llm.engine.ranks.runner.threads
    monkeypatch.setattr(threads, "_choices", [(1, 3)])

    def draw_and_see(*args: Any, **others: Any) -> torch.Tensor:
        seen.add(torch.get_num_threads())
        return draw(*args, **others)

    monkeypatch.setattr(LogitsProcessors, "draw", draw_and_see)
    params = SamplingParams(max_tokens=4, structured_outputs={"choice": ["rose", "thorn"]})
    llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert seen == {3}


def test_a_callers_own_threads_stay(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(device="cpu")
    assert torch.get_num_threads() == 8
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), use_tqdm=False)  # so many threads spin on few cores
    assert torch.get_num_threads() == 8


class FromMkl(TorchDispatchMode):
    """Counts the numbers of each operation that MKL's vector functions compute on the CPU."""

    names = ("cos", "sin", "tan", "tanh", "exp", "expm1", "log", "log1p", "log2", "erf")

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__.rstrip("_") in self.names:
            self.counts.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"deterministic": True}])
def test_one_thread_lets_mkl_find_the_type_of_the_processor(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mode of the caller's sees what is loaded, so that this one begins with it."""
    load, seen = ModelRunner._load, FromMkl()

    def load_and_count(runner: ModelRunner) -> None:
        with seen:
            load(runner)

    monkeypatch.setattr(ModelRunner, "_load", load_and_count)
    LLM(BUNDLED_MODEL, device="cpu", max_model_len=256, **options).close()
    first, *others = seen.counts
    assert first == 1  # so few numbers are not shared by threads
    assert max(others) == 256 * 32


def test_a_forked_child_computes_with_one_thread(make_llm: Callable[..., LLM]) -> None:
    """As the README's limits say: OpenMP's threads do not outlive a fork."""

    def generate() -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=2)
        return make_llm(device="cpu").generate(["ROMEO:"], params, use_tqdm=False)[0].token_ids

    with num_threads(2):
        torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # starts OpenMP's threads
        torch.ones(2_000_000).exp()
        expected = generate()

        def compute() -> None:
            signal.alarm(40)
            torch.set_num_threads(1)
            sys.exit(generate() != expected)

        process = multiprocessing.get_context("fork").Process(target=compute)
        process.start()
        process.join()
        assert process.exitcode == 0
