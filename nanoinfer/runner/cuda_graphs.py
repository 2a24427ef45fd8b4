"""CUDA graphs of the decode step, one for each of several batch sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch

from nanoinfer.kernels.launch import recording

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


class DecodeGraphs:
    """The captured decode step for each of several row counts, and likewise the one that reads shared prefixes once.

    A batch replays the graph of its size or the next larger one, whose further rows are empty.
    """

    def __init__(self, sizes: list[int], sharing_sizes: list[int], decode: Callable[[int, bool], object]) -> None:
        """Capture `decode(rows, shares)` for all sizes.

        The largest ones come first, so that the others fit into their memory pool.
        """
        self.sizes = {False: sorted(sizes), True: sorted(sharing_sizes)}
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        # Capture on a new stream: cuBLAS keeps a workspace for each stream, and the first capture's pool owns it.
        stream = torch.cuda.Stream()
        keys = sorted(((size, shares) for shares in self.sizes for size in self.sizes[shares]), reverse=True)
        with recording():
            decode(*keys[0])  # libraries set themselves up in their first call, which is no part of a graph
            torch.cuda.synchronize()
            for key in keys:
                self.graphs[key] = graph = torch.cuda.CUDAGraph()
                # "relaxed": a capture may load the kernels that it is the first to use.
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="relaxed"):
                    decode(*key)

    @property
    def largest(self) -> int:
        """The most rows that a graph takes."""
        return self.sizes[False][-1]

    def replay(self, num_rows: int, shares: bool) -> None:
        """Run the captured step that covers `num_rows`."""
        sizes = self.sizes[shares]
        self.graphs[sizes[bisect_left(sizes, num_rows)], shares].replay()
