"""Voice: what a start says on a terminal, once it has taken a while, and elsewhere in the log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from nanoinfer.config import Config
from nanoinfer.process.bar import Advance, Bar, no_bar
from nanoinfer.process.standard_error import is_terminal, replace_line, say
from nanoinfer.runner.threads import Threads

QUIET_SECONDS = 2.0  # a start that takes no longer says nothing on a terminal

log = logging.getLogger("nanoinfer")


class Voice:
    """One for all processes that start together: rank 0 has it, of several replicas that of the first.

    is_heard: the user wants it, a terminal watches, and the logger's own level lets INFO through
    """

    def __init__(self, config: Config, rank: int = 0) -> None:
        self._is_first = rank == 0
        self._began = config.began
        self.is_heard = self._is_first and config.use_tqdm and log.level <= logging.INFO and is_terminal(sys.stderr)
        processes = {"replica": config.data_parallel_size, "rank": config.tensor_parallel_size}
        self._who = "".join(f", {name} 0 of {count}" for name, count in processes.items() if count > 1)

    @property
    def seconds(self) -> float:
        """How long the start has taken so far."""
        return time.monotonic() - self._began

    def bar(self, what: str, unit: str, total: int | None) -> AbstractContextManager[Advance]:
        """Return a context that shows a bar, unless the work ends before the start has taken long.

        what: begins the bar; unit: "B" for bytes, which are shown in kB, MB and so on
        total: how many there are; None: nobody knows
        """
        return self._bar(what, unit, total) if self.is_heard else no_bar(total)

    @contextmanager
    def _bar(self, what: str, unit: str, total: int | None) -> Iterator[Advance]:
        delay = max(QUIET_SECONDS - self.seconds, 0.0)
        how = {"unit": unit, "unit_scale": unit == "B", "delay": delay, "miniters": 1, "dynamic_ncols": True}
        with Bar(total=total, desc=f"{what}{self._who}", **how) as bar:

            def advance(done: int) -> None:
                with Bar.get_lock():
                    bar.update(done)

            yield advance

    def tell(self, line: str) -> None:
        """Say a line in the end: in the log, and after a long start on the terminal, unless the log shows it there."""
        if self._is_first:
            log.info("%s", line)
        if self.is_heard and self.seconds > QUIET_SECONDS and not _log_is_shown():
            say(line)

    def clear(self) -> None:
        """Clear the terminal's line, in which a process that was killed may have left a bar."""
        if self.is_heard and self.seconds > QUIET_SECONDS:
            replace_line("")


def name_hardware(device: torch.device, threads: Threads) -> str:
    """Return what a rank computes with: the GPU's name, or the CPU and how many of its threads."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"the CPU with {threads}"


def _log_is_shown() -> bool:
    """Whether the log shows INFO on a terminal. Handlers without a stream of text, such as rich's, count as shown."""
    node: logging.Logger | None = log if log.isEnabledFor(logging.INFO) else None
    while node is not None:
        for handler in node.handlers:
            is_silent = handler.level > logging.INFO or isinstance(handler, (logging.NullHandler, logging.FileHandler))
            if not is_silent and (not hasattr(handler, "stream") or is_terminal(handler.stream)):
                return True
        node = node.parent if node.propagate else None
    return False
