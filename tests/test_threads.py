"""The number of threads: as many as make a step faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from nanoinfer import LLM
from nanoinfer.runner import threads as module
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


def test_a_callers_own_threads_stay(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(device="cpu")
    assert torch.get_num_threads() == 8
    llm.generate([[5, 6, 7]], use_tqdm=False)
    assert torch.get_num_threads() == 8
