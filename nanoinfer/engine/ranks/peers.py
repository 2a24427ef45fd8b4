"""Peers: the other ranks of an existing group. Each has an engine of its own, and all are called alike (SPMD)."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields
from datetime import timedelta
from hashlib import blake2b
from itertools import zip_longest

import torch
from torch.nn import functional as F

from nanoinfer.config import Config
from nanoinfer.engine.ranks.workers import WorkerError
from nanoinfer.engine.sequence import Sequence
from nanoinfer.parallel.patience import patience
from nanoinfer.parallel.tensor_parallel import CPU, TIMEOUT, TensorParallel
from nanoinfer.process.torch_state import fresh_torch_state

STEPS = 100  # from one comparison to the next, at most
MOST_SHOWN = 600  # characters of a line in an error message
OWN = ("tensor_parallel_group", "use_tqdm")  # options that ranks may have unlike each other
ADDRESS = re.compile("0x[0-9a-f]+")  # in an object's repr; it differs from rank to rank


class Peers:
    """Compares what the ranks' engines are told, and what they plan, so that they compute together or not at all.

    Nobody tells a rank what to do. An engine notes what it is told, line by line, and the ranks compare their notes
    before they compute. They do so through a group of their own on the CPU, which also tells when one of them dies.
    """

    def __init__(self, config: Config) -> None:
        """Raises WorkerError if the ranks have different options."""
        assert config.tensor_parallel_group is not None
        self._group = config.tensor_parallel_group
        self._timeout = config.worker_timeout
        self._notes: list[str] = []  # since the last comparison
        self._num_steps = 0
        check = patience(TIMEOUT.total_seconds(), lambda: WorkerError("not all ranks of tensor_parallel_group came"))
        self._hosts = TensorParallel.within(self._group, CPU, check=check)
        try:
            self._hosts.connect()
            for option in fields(config):
                if option.init and option.name not in OWN:
                    self.record(option.name, getattr(config, option.name))
            self.compare()
        except BaseException:
            self.stop(failed=True)
            self.join()
            raise

    def tensor_parallel(self, device: torch.device, keeps_order: bool) -> TensorParallel:
        """Return this process's rank of the group that computes, which forms when all ranks have loaded."""
        timeout = timedelta(seconds=min(self._timeout, TIMEOUT.total_seconds()))
        return TensorParallel.within(self._group, device, meet=self.compare, timeout=timeout, keeps_order=keeps_order)

    def record(self, what: str, *facts: object) -> None:
        """Note something that must be equal on all ranks."""
        told = ", ".join(repr([*fact] if isinstance(fact, array) else fact) for fact in facts)
        line = ADDRESS.sub("0x", f"{what}: {told}" if facts else what).replace("\n", " ")
        self._notes.append(line if len(line) <= MOST_SHOWN else f"{line[:MOST_SHOWN]}... (hash {_hash(line):x})")

    def before_step(self, running: Iterable[Sequence]) -> None:
        """Compare notes if there are any, and at times the running sequences, before the next step is planned."""
        self._num_steps += 1
        if self._notes or self._num_steps % STEPS == 0:
            rows = [
                (
                    *(seq.request_id, seq.sample_index, len(seq), *seq.token_ids[-1:]),
                    *(table[-1] for table in seq.block_tables),
                )
                for seq in running
            ]
            self.record("step", self._num_steps, rows)
            self.compare()

    def compare(self) -> None:
        """Wait for the other ranks to come to the same call; raise WorkerError if their notes are others."""
        with fresh_torch_state():
            self._compare()

    def _compare(self) -> None:
        notes, self._notes = "\n".join(self._notes), []
        hashes = self._hosts.all_gather(torch.tensor([_hash(notes)]))
        if (hashes == hashes[0]).all():
            return
        notes_of_ranks = [text.splitlines() for text in self._gather(notes)]
        with suppress(RuntimeError):  # a rank that leaves at once may cut off others, which still read
            self._hosts.min(0, CPU)
        for lines in zip_longest(*notes_of_ranks, fillvalue="nothing"):
            if len(set(lines)) > 1:
                told = "; ".join(f"rank {rank} has {line}" for rank, line in enumerate(lines))
                raise WorkerError(f"the ranks of tensor_parallel_group were not called alike: {told}")

    def _gather(self, text: str) -> list[str]:
        """Return each rank's text."""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        sizes = self._hosts.all_gather(torch.tensor([len(data)])).flatten().tolist()
        padded = self._hosts.all_gather(F.pad(data, (0, max(sizes) - len(data))))
        return [bytes(row[:size].tolist()).decode() for row, size in zip(padded, sizes, strict=True)]

    def patience(self) -> Callable[[], None]:
        """Return a check to repeat while waiting for one step. It raises WorkerError if that takes too long."""
        problem = f"a step was not done after {self._timeout:g} s (worker_timeout)"
        return patience(self._timeout, lambda: WorkerError(f"a rank of tensor_parallel_group hangs: {problem}"))

    def explain(self, error: BaseException) -> BaseException:
        """Return the cause of an error that ends this rank."""
        if isinstance(error, WorkerError) or not isinstance(error, RuntimeError):
            return error  # it names its cause itself
        return WorkerError(f"a rank of tensor_parallel_group died, hangs, or has ended: {error}")

    def stop(self, failed: bool = False) -> bool:
        """After a failure, let ranks that wait for this one get an error; return whether there was none."""
        if failed:
            self._hosts.abort()
        return not failed

    def join(self) -> None:
        """Leave the group of the hosts."""
        self._hosts.close()


def _hash(text: str) -> int:
    """Return 63 bits of a hash that is equal in all processes."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
