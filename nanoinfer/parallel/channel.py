"""The shared-memory channel by which rank 0 tells the other ranks what to run."""

from __future__ import annotations

import errno
import multiprocessing as mp
import os
import pickle
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.synchronize import Semaphore
from typing import Any

FOLDER = "/dev/shm"  # where Linux keeps segments and semaphores
SEGMENT_BYTES = 1 << 20
LEAST_SEGMENT_BYTES = 1 << 12  # a page
HEADER = struct.Struct("<QQ?")  # packets written so far, length of the last packet, whether its message goes on
COUNT = struct.Struct("<Q")  # each worker has two: packets read, heartbeats
BEAT_SECONDS = 0.25


class Sender:
    """Rank 0's end of the channel. A message is pickled once, and passes through the segment in packets that fit it."""

    def __init__(self, num_workers: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Raises RuntimeError when /dev/shm has no room, saying why and what would help.

        segment_bytes: the segment's size, which is halved until /dev/shm has room, down to a page
        """
        context = mp.get_context("spawn")
        self.semaphores: list[Semaphore] = []
        try:
            with explained():
                self.semaphores += [context.Semaphore(0) for _ in range(num_workers)]
                self.memory = make_segment(segment_bytes, LEAST_SEGMENT_BYTES)
        except RuntimeError:
            self.semaphores.clear()
            raise
        self._bytes = _view(self.memory)
        self._linked = True
        self._data_at = HEADER.size + 2 * COUNT.size * num_workers
        self._bytes[: self._data_at] = bytes(self._data_at)
        self._written = 0

    def send(self, message: object, check: Callable[[], None]) -> None:
        """Write a message for every worker, when all have received the one before.

        Calls `check`, which may raise, while a worker is behind.
        """
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        capacity = len(self._bytes) - self._data_at
        for start in range(0, len(data), capacity):
            packet = data[start : start + capacity]
            self._wait_until_read(check)
            self._bytes[self._data_at : self._data_at + len(packet)] = packet
            self._written += 1
            HEADER.pack_into(self._bytes, 0, self._written, len(packet), start + capacity < len(data))
            for semaphore in self.semaphores:
                semaphore.release()

    def _wait_until_read(self, check: Callable[[], None]) -> None:
        for worker in range(len(self.semaphores)):
            while not self.has_read(worker):
                check()
                time.sleep(20e-6)

    def has_read(self, worker: int) -> bool:
        """Whether the worker has read everything that was written."""
        return self._count(2 * worker) == self._written

    def heartbeats(self, worker: int) -> int:
        """How often the worker has shown that it is alive; 0 before it has attached."""
        return self._count(2 * worker + 1)

    def _count(self, index: int) -> int:
        return COUNT.unpack_from(self._bytes, HEADER.size + COUNT.size * index)[0]

    def unlink(self) -> None:
        """Remove the segment's name, which only the attaching workers need; safe to repeat."""
        if self._linked:
            self._linked = False
            self.memory.unlink()

    def close(self) -> None:
        """Give the segment and the semaphores back."""
        self.unlink()
        self.semaphores.clear()  # a semaphore has a name too, which goes with its last reference
        self._bytes.release()
        self.memory.close()


class Receiver:
    """A worker's end of the channel. Nobody closes it: the heart beats until the worker's process ends."""

    def __init__(self, name: str, semaphores: list[Semaphore], worker: int) -> None:
        self.memory = SharedMemory(name)
        self._bytes = _view(self.memory)
        self.semaphore = semaphores[worker]
        self._data_at = HEADER.size + 2 * COUNT.size * len(semaphores)
        self._counts_at = HEADER.size + 2 * COUNT.size * worker
        self._beats = 0

    def receive(self, check: Callable[[], None] = lambda: None) -> Any:
        """Wait for the next message, and return it. check: called again and again meanwhile; it may raise"""
        data = bytearray()
        goes_on = True
        while goes_on:
            while not self.semaphore.acquire(timeout=BEAT_SECONDS):
                check()
            written, length, goes_on = HEADER.unpack_from(self._bytes)
            data += self._bytes[self._data_at : self._data_at + length]
            COUNT.pack_into(self._bytes, self._counts_at, written)
        return pickle.loads(data)

    def beat(self) -> None:
        """Show rank 0 that this process is alive."""
        self._beats += 1
        COUNT.pack_into(self._bytes, self._counts_at + COUNT.size, self._beats)


@contextmanager
def explained() -> Iterator[None]:
    """Turn an OSError of the block, which makes shared memory, into a RuntimeError that says what would help."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"processes share memory in {FOLDER}, but {_explain(error)}") from error


def make_segment(num_bytes: int, least: int) -> SharedMemory:
    """Make a segment and reserve its pages. A write to a page that is not there would end the process by SIGBUS.

    If /dev/shm has no room, the segment is halved until it has, down to `least` bytes.
    """
    memory = SharedMemory(create=True, size=num_bytes)
    try:
        _reserve(memory)
    except OSError as error:
        memory.unlink()
        memory.close()
        if error.errno != errno.ENOSPC or num_bytes // 2 < least:
            raise
    else:
        return memory
    return make_segment(num_bytes // 2, least)


def _reserve(memory: SharedMemory) -> None:
    file = os.open(f"{FOLDER}/{memory.name}", os.O_RDWR)
    try:
        os.posix_fallocate(file, 0, memory.size)
    finally:
        os.close(file)


def _explain(error: OSError) -> str:
    """Say why there is no shared memory, and what would help."""
    try:
        state = os.statvfs(FOLDER)
    except OSError as missing:
        return f"it cannot be used: {missing.strerror}"
    if state.f_flag & os.ST_RDONLY:
        reason = f"it is read-only; try `mount -o remount,rw {FOLDER}`"
    elif error.errno != errno.ENOSPC:
        reason = f"it cannot be used: {error.strerror}"
    elif state.f_files and state.f_favail < 2:  # a semaphore is made under another name first
        reason = f"it is out of inodes; delete unused files, or try `mount -o remount,nr_inodes=1m {FOLDER}`"
    else:
        reason = (
            f"it is full; delete unused files, or try `mount -o remount,size=1g {FOLDER}`,"
            " in a container `docker run --shm-size=1g`"
        )
    free, size = (blocks * state.f_frsize >> 10 for blocks in (state.f_bavail, state.f_blocks))
    return f"{reason} (free: {free:,} of {size:,} KiB, {state.f_favail:,} of {state.f_files:,} inodes)"


def _view(memory: SharedMemory) -> memoryview:
    assert memory.buf is not None
    return memory.buf
