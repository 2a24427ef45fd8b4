"""DecodeGraphs: the CUDA graphs of decode steps, for several batch sizes of each kind: its model, and its draw."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch

from nanoinfer.kernels.launch import recording
from nanoinfer.process.bar import Advance
from nanoinfer.runner.message import MaskMessage
from nanoinfer.runner.steps.kinds import FEW_ROWS, PLAIN, DecodeKind
from nanoinfer.runner.steps.launched import Launched
from nanoinfer.runner.steps.steps import Steps

Key = tuple[int, DecodeKind]  # rows of a kind of step


class DecodeGraphs:
    """The captured decode step of each kind, for each of several row counts.

    A batch replays the graphs of its size or the next larger one, whose further rows are empty: that of the model, and
    that of the draw, which is the same for all kinds with as many guesses.
    """

    def __init__(
        self, steps: Steps, sizes: dict[DecodeKind, list[int]], max_context_len: int, advance: Advance
    ) -> None:
        """Capture all sizes of all kinds; the largest ones come first, so that the others fit into their memory pool.

        advance: told of each size
        """
        self.steps, self._longest = steps, max_context_len
        self.sizes = {kind: sorted(of_kind) for kind, of_kind in sizes.items()}
        self._models: dict[Key, torch.cuda.CUDAGraph] = {}
        self._draws: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._wholes: dict[Key, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # Capture on a new stream: cuBLAS keeps a workspace for each stream, and the first capture's pool owns it.
        self._stream = torch.cuda.Stream()
        keys = sorted(((size, kind) for kind in self.sizes for size in self.sizes[kind]), reverse=True)
        with recording():
            self._forward(*keys[0])  # libraries set themselves up in their first call, which is no part of a graph
            torch.cuda.synchronize()
            for key in keys:
                size, kind = key
                self._models[key] = self._capture(key, self._forward)
                if (size, kind.guesses) not in self._draws:
                    self._draws[size, kind.guesses] = self._capture(key, self._draw)
                if size <= FEW_ROWS:
                    self._wholes[key] = self._capture(key, self._forward, self._draw)
                advance(1)

    def _capture(self, key: Key, *launches: Callable[[int, DecodeKind], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # "relaxed": a capture may load the kernels that it is the first to use.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="relaxed"):
            for launch in launches:
                launch(*key)
        return graph

    def _forward(self, rows: int, kind: DecodeKind) -> None:
        self.steps.forward(rows, kind, self._longest)

    def _draw(self, rows: int, kind: DecodeKind) -> None:
        self.steps.draw(self.steps.launched(rows, rows, kind))

    @property
    def largest(self) -> int:
        """The most rows that a graph takes."""
        return self.sizes[PLAIN][-1]

    def forward(self, num_rows: int, kind: DecodeKind) -> Launched:
        """Run the model of the captured step that covers `num_rows`, and its draw if both at once are faster."""
        sizes = self.sizes[kind]
        size = sizes[bisect_left(sizes, num_rows)]
        is_drawn = size <= FEW_ROWS and not self.steps.logits_processors.draws_anew
        (self._wholes if is_drawn else self._models)[size, kind].replay()
        launched = self.steps.launched(num_rows, size, kind)
        launched.is_drawn = is_drawn
        return launched

    def draw(self, launched: Launched, masks: MaskMessage | None = None) -> None:
        """Draw for all rows of a step that `forward` has run."""
        if self.steps.logits_processors.draws_anew:
            self.steps.draw(launched, masks)
        elif not launched.is_drawn:
            assert launched.size is not None
            self._draws[launched.size].replay()
