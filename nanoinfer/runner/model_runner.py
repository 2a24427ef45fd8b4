"""ModelRunner: what one rank does as messages say: it launches the model of each step, and its draw."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from nanoinfer.config import Config
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.process.torch_state import fresh_torch_state
from nanoinfer.runner.drafting.sizes import VerifySize
from nanoinfer.runner.drafting.timing import time_steps
from nanoinfer.runner.message import DecodeMessage, MaskMessage, PrefillMessage, StepMessage
from nanoinfer.runner.rank import Rank
from nanoinfer.runner.results.extras import Extras
from nanoinfer.runner.steps.kinds import DecodeKind
from nanoinfer.runner.steps.launched import Launched
from nanoinfer.runner.steps.pending_tokens import PendingTokens
from nanoinfer.runner.transfer import keep_for_ever

log = logging.getLogger("nanoinfer")


class ModelRunner(Rank):
    """Runs steps on one rank. Rank 0's `call` makes the other ranks do the same."""

    def __init__(
        self, config: Config, tp: TensorParallel, send: Callable[[str, tuple[Any, ...]], None] | None = None
    ) -> None:
        """send: on rank 0 of several, passes a method's name and arguments to the other ranks."""
        self.send = send
        self._launched: Launched | None = None  # a step with guided rows, until `draw_guided`
        self._sent: deque[PendingTokens] = deque()  # until the device has done their steps, without an error
        self._beside: torch.cuda.Stream | None = None
        if config.speculation is not None and config.device == "cuda":
            # Takes guesses to the host beside a step. Its kernels are tiny, and come between those of the step.
            self._beside = torch.cuda.Stream(config.device_of(tp.rank), priority=-1)
        super().__init__(config, tp)

    @property
    def text_slots(self) -> int:
        """For how many texts there is room, in which guesses are found; 0 if none are verified."""
        return 0 if self.steps.verifier is None else len(self.steps.verifier.texts.lengths)

    @torch.inference_mode()
    def time_steps(self) -> dict[VerifySize, float]:
        """Return the seconds of decode steps, by rows and places for guesses; no request runs. Ranks agree on them."""

        def run(rows: int, guesses: int) -> None:
            with self.threads.of(rows + guesses):
                self._draw(self._forward(rows, DecodeKind(guesses=guesses), self.config.max_model_len))

        def agree(seconds: float) -> float:
            return self.tp.min(int(seconds * 1e9), self.device) / 1e9

        return time_steps(self.config, self.steps, self.verify_sizes, run, agree)

    def call(self, method: str, *args: Any) -> Any:
        """Run a method on every rank, such as "run" or "holdings.lend"; returns this rank's result.

        What the caller has set for torch, such as autocast, does not reach it.
        """
        if self.send is not None:
            self.send(method, args)
        with fresh_torch_state(), self._current_device():
            return attrgetter(method)(self)(*args)

    @torch.inference_mode()
    def run(self, message: StepMessage) -> PendingTokens | None:
        """Launch one step; returns its tokens where there is a host, else None."""
        with self.threads.of(message.num_tokens):
            return self._pending(self._launch(message))

    @torch.inference_mode()
    def launch(self, message: StepMessage) -> PendingTokens | None:
        """Launch the model of a step that has guided rows. Its draw waits for `draw_guided`: the host makes the masks.

        Returns the guesses of a verifying step, Verifier.guesses, where there is a host, else None. They come to the
        host while the model runs.
        """
        with self.threads.of(message.num_tokens):
            self._launched = launched = self._launch(message)
            launched.sampled = self.steps.sample(launched)  # it needs no masks
            if launched.places is None or not self.has_host:
                return None
            verifier = self.steps.verifier
            assert verifier is not None
            with nullcontext() if self._beside is None else torch.cuda.stream(self._beside):
                if verifier.packed is not None:
                    verifier.packed.wait()
                return self._send(verifier.guesses(launched.places, message.num_rows), Extras())

    @torch.inference_mode()
    def draw_guided(self, masks: MaskMessage) -> PendingTokens | None:
        """Draw for the guided rows of the step that `launch` has launched; returns its tokens as `run` does."""
        launched, self._launched = self._launched, None
        assert launched is not None
        with self.threads.of_rest(len(launched.logits)):
            return self._pending(launched, masks)

    def _launch(self, message: StepMessage) -> Launched:
        if self.host_blocks is not None:
            is_prefill = isinstance(message, PrefillMessage)
            memory = self.holdings.kv_cache, self.holdings.states
            self.host_blocks.begin(*memory, message.transfers, is_awaited=is_prefill)
        self.steps.update(message)
        return self.steps.prefill(message) if isinstance(message, PrefillMessage) else self._decode(message)

    def _pending(self, launched: Launched, masks: MaskMessage | None = None) -> PendingTokens | None:
        """Draw for a step; returns its tokens where there is a host, else None."""
        self._draw(launched, masks)
        return self._send(self.steps.told(launched), launched.extras) if self.has_host else None

    def _draw(self, launched: Launched, masks: MaskMessage | None = None) -> None:
        if launched.size is not None and self.graphs is not None and launched.size[0] <= self.graphs.largest:
            self.graphs.draw(launched, masks)
        elif len(launched.logits):  # else no prompt is complete
            self.steps.draw(launched, masks)

    def _send(self, token_ids: Tensor, extras: Extras) -> PendingTokens:
        """Send numbers and extras on their way to the host."""
        while self._sent and self._sent[0].is_done:
            self._sent.popleft()
        self._sent.append(PendingTokens(token_ids, extras))
        return self._sent[-1]

    def _decode(self, message: DecodeMessage) -> Launched:
        kind = DecodeKind(message.shares, message.has_adapters, message.guesses)
        launched = self._forward(message.num_rows, kind, message.max_context_len)
        launched.extras = self.steps.extras_of(launched, message.hidden_layers)
        return launched

    def _forward(self, num_rows: int, kind: DecodeKind, max_context_len: int) -> Launched:
        """Replay the model of a decode step, or launch it if it was not captured."""
        if self.graphs is not None and num_rows <= self.graphs.largest:
            self.holdings.rest()
            return self.graphs.forward(num_rows, kind)
        self.steps.forward(num_rows, kind, max_context_len)
        return self.steps.launched(num_rows, num_rows, kind)

    def check_device(self) -> None:
        """Raise torch.AcceleratorError if a kernel has failed: a rank that waits for no results would not notice."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).query()

    def close(self, failed: bool = False) -> None:
        """Close as Rank does. Behind a CUDA error this process can use the device no more.

        It gives its memory back as it ends.
        """
        self._launched = None
        try:
            super().close(failed)
            self._sent.clear()
        except torch.AcceleratorError as error:
            keep_for_ever(self._sent)
            reason = str(error).partition("\n")[0]
            log.warning("the memory of %s comes back when this process ends, because of %s", self.device, reason)
