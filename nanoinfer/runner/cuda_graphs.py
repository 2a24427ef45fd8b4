"""CUDA graphs of the decode step, one for each of several batch sizes, of each kind of step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from nanoinfer.kernels.attention.prefix_plan import MIN_ROWS
from nanoinfer.kernels.launch import recording
from nanoinfer.process.bar import Advance
from nanoinfer.runner.drafting.sizes import VerifySize

MAX_GRAPH_ROWS = 512
SHARING_ROWS = (16, *range(32, 256, 32), *range(256, 512, 64))


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, every 16 up to 256, then every 32 up to max_num_seqs, itself included; at most MAX_GRAPH_ROWS."""
    largest = min(max_num_seqs, MAX_GRAPH_ROWS)
    sizes = [size for size in (1, 2, 4, 8, *range(16, 256, 16), *range(256, largest, 32)) if size < largest]
    return [*sizes, largest]


def sharing_batch_sizes(sizes: list[int]) -> list[int]:
    """Return some of the sizes, for which the step that reads shared prefixes once is captured, too.

    sizes: from graph_batch_sizes, or none
    """
    return [size for size in sizes if size in SHARING_ROWS or size == max(sizes)]


class DecodeKind(NamedTuple):
    """What a decode step does beside the plain one.

    shares: it reads shared prefixes once
    has_adapters: it adds what the adapters of its rows add
    guesses: it verifies guesses, for which it has so many places; 0: none
    """

    shares: bool = False
    has_adapters: bool = False
    guesses: int = 0


PLAIN = DecodeKind()


def sizes_by_kind(
    max_num_seqs: int, may_share: bool, may_adapt: bool, verifying: Sequence[VerifySize] = ()
) -> dict[DecodeKind, list[int]]:
    """Return the kinds of steps to capture, and the sizes of each; verifying: those of verifying steps."""
    sizes = graph_batch_sizes(max_num_seqs)
    by_kind: dict[DecodeKind, list[int]] = {}
    for has_adapters in (False, True) if may_adapt else (False,):
        by_kind[DecodeKind(False, has_adapters)] = sizes
        if may_share:
            by_kind[DecodeKind(True, has_adapters)] = sharing_batch_sizes(sizes)
        for rows, guesses in verifying:
            for shares in (False, True) if may_share and rows >= MIN_ROWS else (False,):
                by_kind.setdefault(DecodeKind(shares, has_adapters, guesses), []).append(rows)
    return by_kind


class DecodeGraphs:
    """The captured decode step of each kind, for each of several row counts.

    A batch replays the graph of its size or the next larger one, whose further rows are empty.
    """

    def __init__(
        self, sizes: dict[DecodeKind, list[int]], decode: Callable[[int, DecodeKind], object], advance: Advance
    ) -> None:
        """Capture `decode(rows, kind)` for all sizes of all kinds; advance: told of each graph.

        The largest ones come first, so that the others fit into their memory pool.
        """
        self.sizes = {kind: sorted(of_kind) for kind, of_kind in sizes.items()}
        self.graphs: dict[tuple[int, DecodeKind], torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        # Capture on a new stream: cuBLAS keeps a workspace for each stream, and the first capture's pool owns it.
        stream = torch.cuda.Stream()
        keys = sorted(((size, kind) for kind in self.sizes for size in self.sizes[kind]), reverse=True)
        with recording():
            decode(*keys[0])  # libraries set themselves up in their first call, which is no part of a graph
            torch.cuda.synchronize()
            for key in keys:
                self.graphs[key] = graph = torch.cuda.CUDAGraph()
                # "relaxed": a capture may load the kernels that it is the first to use.
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="relaxed"):
                    decode(*key)
                advance(1)

    @property
    def largest(self) -> int:
        """The most rows that a graph takes."""
        return self.sizes[PLAIN][-1]

    def replay(self, num_rows: int, kind: DecodeKind) -> int:
        """Run the captured step that covers `num_rows`; returns how many rows it has."""
        sizes = self.sizes[kind]
        size = sizes[bisect_left(sizes, num_rows)]
        self.graphs[size, kind].replay()
        return size
