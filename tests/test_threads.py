"""The number of threads: as many as make a step faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from nanoinfer import LLM
from nanoinfer.runner.threads import choose_threads, num_threads


@pytest.fixture(autouse=True)
def eight_threads() -> Iterator[None]:
    with num_threads(8):
        yield


@pytest.mark.parametrize(
    ("milliseconds", "best"),
    [
        ({8: 2, 4: 4, 2: 8, 1: 16}, 8),  # every thread helps
        ({8: 40, 4: 10, 2: 3, 1: 5}, 2),  # a core is busy
        ({8: 5, 4: 5, 2: 5, 1: 5}, 1),  # none helps
    ],
)
def test_the_fewest_threads_that_are_fast(milliseconds: dict[int, int], best: int) -> None:
    assert choose_threads(lambda: time.sleep(milliseconds[torch.get_num_threads()] / 1000)) == best
    assert torch.get_num_threads() == 8


def test_a_step_that_takes_long_is_timed_once_each() -> None:
    calls = []

    def step() -> None:
        calls.append(torch.get_num_threads())
        time.sleep(0.25 if calls[-1] == 8 else 0.5)

    assert choose_threads(step) == 8
    assert calls == [8, 4]


def test_a_callers_own_threads_stay(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(device="cpu")
    assert torch.get_num_threads() == 8
    llm.generate([[5, 6, 7]], use_tqdm=False)
    assert torch.get_num_threads() == 8
