"""AdapterLogitsProcessor: a class for a batch, of which each request gets a function of its own, as in vLLM."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from nanoinfer.logits_processors import BatchUpdate, Function, LogitsProcessor, MoveDirectionality, num_parameters


class AdapterLogitsProcessor(LogitsProcessor):
    """Calls a function for each row that has one. A subclass makes it, and says is_argmax_invariant."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        """The arguments are as for LogitsProcessor."""
        self.req_info: dict[int, Callable[[Tensor], Tensor]] = {}  # by row

    @abstractmethod
    def new_req_logits_processor(self, params: Any) -> Function | None:
        """Return the function of a request with these settings; None: it has none.

        It is f(output, logits), or f(prompt, output, logits), with tokens as lists, and a row's logits.
        """

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Take what has changed in the batch."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.req_info.pop(row, None)
        for row, params, prompt, output in batch_update.added:
            self.req_info.pop(row, None)
            if (function := self.new_req_logits_processor(params)) is not None:
                self.req_info[row] = _bound(function, prompt, output)
        for source, destination, direction in batch_update.moved:
            own, other = self.req_info.pop(source, None), self.req_info.pop(destination, None)
            if own is not None:
                self.req_info[destination] = own
            if other is not None and direction is MoveDirectionality.SWAP:
                self.req_info[source] = other

    def apply(self, logits: Tensor) -> Tensor:
        """Change the rows that have functions."""
        for row, function in self.req_info.items():
            logits[row] = function(logits[row])
        return logits


def _bound(function: Function, prompt: list[int], output: list[int]) -> Callable[[Tensor], Tensor]:
    if num_parameters(function) == 3:
        return lambda logits: function(prompt, output, logits)
    return lambda logits: function(output, logits)
