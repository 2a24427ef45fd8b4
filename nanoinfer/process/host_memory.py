"""How much memory the host has, and how much of it this process may still take."""

from __future__ import annotations

import math
import mmap
import os
from contextlib import suppress
from pathlib import Path

from nanoinfer.checks import check_number, short

CGROUPS = Path("/sys/fs/cgroup")
LIMITS = (  # what a container may take, and what it has taken; the second way is that of older systems
    (CGROUPS / "memory.max", CGROUPS / "memory.current"),
    (CGROUPS / "memory" / "memory.limit_in_bytes", CGROUPS / "memory" / "memory.usage_in_bytes"),
)


def free_bytes() -> int:
    """Return how many bytes are free, on this machine and within the limit of this process's container."""
    free = _of_machine("MemAvailable")
    for limit, used in LIMITS:
        if (most := _read(limit)) is not None:
            free = min(free, most - (_read(used) or 0))
    return max(free, 0)


def total_bytes() -> int:
    """Return how many bytes this machine has, or the limit of this process's container, if that is less."""
    limits = [_read(limit) for limit, _ in LIMITS]
    return min([_of_machine("MemTotal"), *(limit for limit in limits if limit is not None)])


def pages(num_bytes: int) -> mmap.mmap:
    """Return memory of zeros, in huge pages if it can be: they are there, and pinned, in a fifth of the time.

    Raises MemoryError if the host has no room.
    """
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the host has no {num_bytes / 2**30:,.1f} GiB: {error}") from error
    with suppress(OSError):  # not every kernel has huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def check_host_memory(name: str, gib: object, other: str = "") -> float:
    """Return an option's GiB of host memory as a float; raises ValueError if the host has less.

    other: begins what errors say that it must be, if it may be something else, too
    """
    checked = check_number(name, gib, 0, math.inf, "of GiB, at least 0", other)
    if checked * 2**30 > (total := total_bytes()):
        raise ValueError(
            f"{name}={short(checked)}: the host has {total / 2**30:,.1f} GiB of memory, a container's limit counted;"
            " ask for less"
        )
    return float(checked)


def _of_machine(name: str) -> int:
    """Return a figure of Linux, whose free memory includes files that it caches; elsewhere all of the memory."""
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    sizes = dict(line.split(":") for line in lines if ":" in line)
    return int(sizes[name].split()[0]) << 10


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text("utf-8"))
    except (OSError, ValueError):  # "max", or another kind of system
        return None
