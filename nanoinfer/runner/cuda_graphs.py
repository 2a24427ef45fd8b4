"""CUDA graphs of the decode step, one for each batch size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch

MAX_GRAPH_ROWS = 512


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then every 16 up to max_num_seqs, itself included; never beyond MAX_GRAPH_ROWS."""
    largest = min(max_num_seqs, MAX_GRAPH_ROWS)
    sizes = [size for size in (1, 2, 4, 8, *range(16, largest, 16)) if size < largest]
    return [*sizes, largest]


class DecodeGraphs:
    """The captured decode step for each of several row counts.

    A batch replays the graph of its size or the next larger one, whose further rows are empty.
    """

    def __init__(self, sizes: list[int], decode: Callable[[int], object]) -> None:
        """Capture `decode(rows)` for every size, the largest first, so that the others fit into its memory pool."""
        self.sizes = sorted(sizes)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        # Capture on a new stream: cuBLAS keeps a workspace for each stream, and the first capture's pool owns it.
        stream = torch.cuda.Stream()
        for size in reversed(self.sizes):
            decode(size)  # compiles kernels and creates handles, which a capture must not
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                decode(size)
            self.graphs[size] = graph

    @property
    def largest(self) -> int:
        """The most rows that a graph takes."""
        return self.sizes[-1]

    def replay(self, num_rows: int) -> None:
        """Run the captured step that covers `num_rows`."""
        self.graphs[self.sizes[bisect_left(self.sizes, num_rows)]].replay()
