"""Steps that run side by side: all of them run, the first at the same time, and an error of one ends them."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from nanoinfer.runner.start.side_by_side import run_side_by_side

CPU = torch.device("cpu")


def test_the_first_steps_run_at_the_same_time_and_all_run_once() -> None:
    together, done = threading.Barrier(3), []

    def step(name: int) -> None:
        if name < 3:
            together.wait(10)  # wait for the other two
        assert torch.is_inference_mode_enabled()
        done.append(name)

    steps = [lambda name=name: step(name) for name in range(8)]
    run_side_by_side(steps[:3], steps[3:], CPU)
    assert sorted(done) == list(range(8))
    assert set(done[:3]) == {0, 1, 2}


def test_a_steps_error_is_raised() -> None:
    def fail() -> None:
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        run_side_by_side([fail, lambda: None], [lambda: None], CPU)


def test_every_thread_has_its_handle_before_a_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """So has the caller: else it would take one that the threads give back, and a second engine needed one more."""
    handles, done = [], []

    def take_handle() -> int:
        time.sleep(0.05 * len(handles))
        handles.append(threading.get_ident())
        return 0

    def step() -> None:
        assert len(set(handles)) == 4
        done.append(threading.get_ident())

    monkeypatch.setattr(torch.cuda, "current_blas_handle", take_handle)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.inference_mode())
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    run_side_by_side([step] * 3, [step] * 5, torch.device("cuda", 0))
    assert len(handles) == 4
    assert handles[0] == threading.get_ident()
    assert len(done) == 8
    assert set(done) <= set(handles[1:])


def test_a_thread_that_gets_no_handle_ends_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_handle() -> int:
        if threading.current_thread().name.endswith("_1"):
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")
        return 0

    monkeypatch.setattr(torch.cuda, "current_blas_handle", no_handle)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.inference_mode())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with pytest.raises(RuntimeError):
        run_side_by_side([lambda: None] * 3, [], torch.device("cuda", 0))
