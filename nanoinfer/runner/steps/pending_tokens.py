"""PendingTokens: the results of a launched step, on their way to the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanoinfer.runner.results.extras import Extras
from nanoinfer.runner.transfer import to_host

POLL_SECONDS = 50e-6


class PendingTokens:
    """The tokens of a launched step, on their way to the host."""

    def __init__(self, token_ids: Tensor, extras: Extras) -> None:
        """token_ids: [rows] int32, empty when the step samples none, or what a verifying step keeps: Verifier.kept."""
        self._host = to_host(token_ids)
        self.extras = extras.to_host()  # to be read after `wait`
        self._event: torch.cuda.Event | None = None
        if token_ids.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()
        self.ready_at = time.perf_counter()  # when the step was done; on CUDA known only after `wait`

    @property
    def is_done(self) -> bool:
        """Whether the device has done the step; raises torch.AcceleratorError behind a CUDA error."""
        return self._event is None or self._event.query()

    def wait(self, check: Callable[[], None] | None = None) -> list[Any]:
        """Wait for the step, and return its tokens in the order of its rows; of a verifying step, a list for each row.

        check: called repeatedly meanwhile; it raises when the step can no longer complete
        """
        if self._event is not None:
            while check is not None and not self.is_done:
                check()
                time.sleep(POLL_SECONDS)
            self._event.synchronize()
            self.ready_at = time.perf_counter()
        return self._host.tolist()
