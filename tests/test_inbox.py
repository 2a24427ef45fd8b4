"""Two ranks on the CPU exchange data through inboxes: the kernels are interpreted, and the memory is shared files.

So every machine can test the order of the messages, their lanes and the tokens. test_tensor_parallel.py tests the same
on GPUs, with the driver's memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import HAS_CUDA, Oracle, greedy, whole_only

from nanoinfer import LLM, SamplingParams
from nanoinfer.engine.ranks import workers
from nanoinfer.kernels.linear import dispatch
from nanoinfer.layers import norm
from nanoinfer.parallel.inbox import Inbox
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.formats.plain import matrix as plain_matrix

pytestmark = pytest.mark.skipif(HAS_CUDA, reason="needs interpreted kernels, which a CUDA device rules out")
RANKS = 2
FOLDER = "NANOINFER_TEST_INBOXES"  # environment: where the ranks' files are
ONE_OWNER = "NANOINFER_TEST_ONE_OWNER"  # environment: the least number of rows for one_owner
LANES = "NANOINFER_TEST_LANES"  # environment: if set, products of one token add up the ranks' parts
run_worker = workers.run_worker


class FileInbox(Inbox):
    """An inbox in a file."""

    def __init__(self, rank: int, max_rows: int, features: int) -> None:
        self.rank = rank
        self.max_rows, self.features, self.dtype = max_rows, features, torch.float32
        self.stop = torch.zeros(1, dtype=torch.int32)
        self._shape = sum(self._measure(RANKS)) // 4
        self._map(rank, "w+")[:] = -0.0
        self.num_vectors = 0  # that products have added up

    def _map(self, rank: int, mode: str) -> np.memmap:
        return np.memmap(Path(os.environ[FOLDER]) / f"rank{rank}", np.float32, mode, shape=self._shape)

    def vector_lane(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.num_vectors += 1
        return super().vector_lane()

    def open_all(self) -> None:
        self._files = [self._map(rank, "r+") for rank in range(RANKS)]
        self._lanes = self._find_lanes([file.ctypes.data for file in self._files])


def use_file_inboxes() -> None:
    def make_inbox(tp: TensorParallel, max_rows: int, features: int, dtype: torch.dtype) -> None:
        if tp.size > 1:
            tp.inbox = FileInbox(tp.rank, max_rows, features)

    def open_inbox(tp: TensorParallel) -> None:
        if tp.size > 1:
            tp.min(1, torch.device("cpu"))
            tp.inbox.open_all()

    TensorParallel.make_inbox, TensorParallel.open_inbox = make_inbox, open_inbox
    TensorParallel._close_inbox = lambda tp, failed=False: setattr(tp, "inbox", None)
    add = norm.all_reduce_add_norm
    norm.all_reduce_add_norm = lambda x, *args: add(x, *args[:5], len(x) >= int(os.environ[ONE_OWNER]), *args[6:])
    if LANES in os.environ:
        dispatch.is_one_row = lambda x: len(x) == 1  # so that these kernels are interpreted too
        plain_matrix.can_pack = lambda *_: False


def run_worker_with_file_inboxes(
    rank: int, port: int, segment: str, semaphores: list[Semaphore], errors: Connection
) -> None:
    use_file_inboxes()
    run_worker(rank, port, segment, semaphores, errors)


@pytest.mark.parametrize(
    ("one_owner_from", "with_lanes", "in_order"),
    whole_only([(1, False, False), (3, True, False), (100, False, False), (100, False, True)]),
)
def test_tokens_are_those_of_one_rank(
    one_owner_from: int,
    with_lanes: bool,
    in_order: bool,
    make_llm: Callable[..., LLM],
    make_qwen3: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(ONE_OWNER, str(one_owner_from))
    if with_lanes:
        monkeypatch.setenv(LANES, "1")
    for owner, name in [
        (TensorParallel, "make_inbox"),
        (TensorParallel, "open_inbox"),
        (TensorParallel, "_close_inbox"),
        (norm, "all_reduce_add_norm"),
        (dispatch, "is_one_row"),
        (plain_matrix, "can_pack"),
    ]:
        monkeypatch.setattr(owner, name, getattr(owner, name))  # so that pytest restores it
    monkeypatch.setattr(workers, "run_worker", run_worker_with_file_inboxes)
    use_file_inboxes()
    folder = make_qwen3(vocab_size=256)  # interpreted kernels take seconds for the bundled model
    oracle = Oracle(folder)
    prompts = [[30], [31, 32, 33], [5, 6, 7, 8, 9], [100], [200, 30]]
    options = {"model": folder, "device": "cpu", "num_kvcache_blocks": 8, "deterministic": in_order}
    two = make_llm(**options, tensor_parallel_size=RANKS, max_num_seqs=4)
    outputs = two.generate(prompts, greedy(5, ignore_eos=True), use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == [oracle.greedy(prompt, 5, True) for prompt in prompts]
    params = SamplingParams(temperature=1.0, max_tokens=5, seed=3, ignore_eos=True)
    drawn = [output["token_ids"] for output in two.generate(prompts, params, use_tqdm=False)]
    inbox = two.engine.ranks.runner.tp.inbox
    assert (inbox.num_vectors > 0) == with_lanes
    ours = inbox._files[0]
    assert np.signbit(ours).all()  # every message was taken
    assert not ours.any()
    two.close()
    one = make_llm(**options)
    assert drawn == [output["token_ids"] for output in one.generate(prompts, params, use_tqdm=False)]
