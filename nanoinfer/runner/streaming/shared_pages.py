"""SharedPages: pinned host memory that the replicas of one machine share, each rank with the same rank of the others.

It is a file without a name, which the LLM's process holds open: the system frees it with the last process that has it,
however these end. Its locks go likewise with the process that holds them.

All replicas compute by the same numbers, and all are told of new ones. The first that begins a change is its writer,
and writes as soon as no other one reads; these drop what they have made of the same tensors, and wait for its end.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from nanoinfer.runner.memory.pinned_pages import check_room, pin, unpin

PAGE = 1 << 12
LAYERS_AT = 64  # bytes from the beginning; before them is the number of changes that have ended
CHANGES = struct.Struct("<Q")
LOCK = struct.Struct("hhqqi0q")  # flock of fcntl
READS, WRITES, SIZE = range(3)  # the bytes of the file that stand for what is locked
POLL_SECONDS = 1e-3
GONE = "the replica that wrote the layers in host memory has not come to the end: update all weights again"


class SharedPages:
    """One rank's streamed layers, in memory that other processes have, too. On the CPU, it is memory as any.

    tensors: [bytes] uint8 each, once `open` has been called
    is_writer: a change has begun, and this process writes its numbers
    """

    def __init__(self, path: str, patience: float) -> None:
        """path: of the file; patience: for so many seconds, a writer waits until no other replica reads"""
        self.tensors: list[Tensor] = []
        self.is_writer = False
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._patience = patience
        self._is_alone = False  # no other process reads
        self._ends_at = 1  # so many changes are there when this one has ended
        self._fault: str | None = None
        self._whole: Tensor | None = None

    def agree(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the layers that all replicas stream: those that the first one asks for."""
        with self._locked(SIZE):
            known = os.pread(self._file, PAGE - LAYERS_AT, LAYERS_AT)
            if not any(known[:2]):
                known = np.array([len(layers) + 1, *layers], np.uint16).tobytes()
                os.pwrite(self._file, known, LAYERS_AT)
        count, *agreed = np.frombuffer(known, np.uint16).tolist()
        return tuple(agreed[: count - 1])

    def open(self, sizes: list[int], device: torch.device) -> None:
        """Have the memory. Raises MemoryError or RuntimeError if the host has no room, or pins no more."""
        starts = [*accumulate((-(-size // PAGE) * PAGE for size in sizes), initial=PAGE)]
        with self._locked(SIZE):
            self._reserve(starts[-1])
        self._whole = torch.from_numpy(np.frombuffer(mmap.mmap(self._file, starts[-1]), np.uint8))
        self._device = device
        pin(self._whole, device)
        if self._num_changes:  # until a change begins, a replica reads: no other one ends a change before that
            self._lock(READS, fcntl.F_RDLCK, waits=True)
        self.tensors += [self._whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def _reserve(self, num_bytes: int) -> None:
        """Let the file have its pages, if no other replica has done so."""
        if os.fstat(self._file).st_size >= num_bytes:
            return
        check_room(num_bytes)
        try:
            os.posix_fallocate(self._file, 0, num_bytes)
        except OSError as error:
            raise MemoryError(f"the host has no {num_bytes / 2**30:,.1f} GiB: {error}") from error

    def begin(self, is_first: bool) -> None:
        """Begin a change, which all replicas begin: this one reads no more. is_first: there are no numbers yet"""
        self.is_writer = self._lock(WRITES, fcntl.F_WRLCK)  # before others see that this one reads no more
        self._ends_at = 1 if is_first else self._num_changes + 1
        if is_first and self._num_changes:  # another replica has been faster, or this one is there again
            self._put_down()
        self._is_alone, self._fault = False, None
        self._unlock(READS)

    def may_write(self) -> bool:
        """Whether this process writes now. The writer waits until no other one reads."""
        if self.is_writer and not self._is_alone and self._fault is None:
            self._is_alone = self._await(lambda: self._lock(READS, fcntl.F_WRLCK), self._patience)
            if not self._is_alone:
                self._fault = f"another replica still reads the layers after {self._patience:g} s (worker_timeout)"
        return self.is_writer and self._is_alone

    def end(self) -> str | None:
        """End a change, and read again; returns why the numbers are not what they should be, or None."""
        fault = self._fault
        if self.is_writer:
            if fault is None:
                os.pwrite(self._file, CHANGES.pack(self._num_changes + 1), 0)
        else:
            self._await(lambda: self._is_ended or self._has_no_writer)
            fault = None if self._is_ended else GONE
        self._lock(READS, fcntl.F_RDLCK, waits=True)
        self._put_down()
        return fault

    def abandon(self) -> None:
        """Leave a change without coming to its end: if this is the writer, the others learn of it."""
        self._lock(READS, fcntl.F_RDLCK, waits=True)
        self._put_down()

    def _put_down(self) -> None:
        if self.is_writer:
            self.is_writer = False
            self._unlock(WRITES)

    @property
    def _num_changes(self) -> int:
        known = os.pread(self._file, CHANGES.size, 0)
        return CHANGES.unpack(known)[0] if known else 0

    @property
    def _is_ended(self) -> bool:
        return self._num_changes >= self._ends_at

    @property
    def _has_no_writer(self) -> bool:
        if not self._lock(WRITES, fcntl.F_WRLCK):
            return False
        self._unlock(WRITES)
        return True

    def _await(self, is_so: Callable[[], bool], seconds: float = float("inf")) -> bool:
        """Wait, at most so long; returns whether it is so."""
        until = time.monotonic() + seconds
        while not (found := is_so()) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        return found

    def _lock(self, part: int, kind: int, waits: bool = False) -> bool:
        command = fcntl.F_OFD_SETLKW if waits else fcntl.F_OFD_SETLK
        try:
            fcntl.fcntl(self._file, command, LOCK.pack(kind, os.SEEK_SET, part, 1, 0))
        except (BlockingIOError, PermissionError):  # as systems say that another process has the lock
            return False
        return True

    def _unlock(self, part: int) -> None:
        self._lock(part, fcntl.F_UNLCK)

    @contextmanager
    def _locked(self, part: int) -> Iterator[None]:
        self._lock(part, fcntl.F_WRLCK, waits=True)
        try:
            yield
        finally:
            self._unlock(part)

    def close(self) -> None:
        """Give all back, once the device has done its copies."""
        self.tensors.clear()
        if self._whole is not None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            unpin(self._whole)
            self._whole = None
        self._unlock(READS)
        if not self.is_writer:  # else a change has failed: the others learn of it when this process has told its error
            os.close(self._file)
