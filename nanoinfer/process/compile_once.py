"""One process compiles a kernel, and the others find it: those that start together need the same kernels."""

from __future__ import annotations

import fcntl
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from triton import knobs
from triton.runtime.cache import FileCacheManager

LOCK = "nanoinfer.lock"
PATIENCE = 300.0  # seconds; then whoever compiles the kernel is taken for stuck
POLL_SECONDS = 0.01


def compile_once() -> None:
    """Let this process, when it lacks a kernel, look whether another one is compiling it, and wait for that one.

    It can do so only for processes that call this, too. A cache that the user has chosen for Triton stays.
    """
    if knobs.cache.manager_class is None:
        knobs.cache.manager_class = OneCompiles


class OneCompiles(FileCacheManager):
    """Triton's cache on the disk, for one kernel. Whoever does not find it holds a lock until it is there.

    The lock ends with this object, if the compiler fails, and with the process.
    """

    _lock: IO[str] | None = None

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the kernel's files by name; None: this process is to compile it.

        filename: that of the file that is always among them
        """
        group = super().get_group(filename)
        if filename in (group or {}):
            return group
        self._lock = _lock(Path(self.cache_dir, LOCK))
        group = super().get_group(filename)  # as another process may have left it
        if filename in (group or {}):
            self._unlock()
        return group

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Let the others find the kernel's files."""
        try:
            return str(super().put_group(filename, group))
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _lock(path: Path) -> IO[str] | None:
    """Return an open file, which nobody else has open as long; None: it cannot be had."""
    with suppress(OSError):  # not every file system has locks
        file = path.open("w", encoding="utf-8")
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                time.sleep(POLL_SECONDS)
        file.close()
    return None
