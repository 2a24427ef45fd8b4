"""Inboxes: device memory of each rank that the others write to directly."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from nanoinfer.parallel.peer_memory import allocate, close_handle, free, handle_of, open_handle
from nanoinfer.process.driver import call

SUM_LANES = 3  # two for the layers' sums or gatherings, one for the embedding's sum
VECTOR_LANES = 4  # three would do in a step; a step's last one must also differ from the next step's first


class Inbox:
    """This rank's inbox, and the addresses of all inboxes once they are open.

    A message is a vector of numbers. An empty place holds negative zeros, which no sender sends, and the receiver makes
    its place empty again. So a message needs no flag beside it. An inbox has several lanes, and two successive calls
    take different ones. So a rank that is a call ahead does not disturb one that still reads.
    """

    def __init__(self, rank: int, size: int, max_rows: int, features: int, dtype: torch.dtype) -> None:
        """Make an inbox on the current device, outside inference mode, because any thread may write to `stop`.

        max_rows, features: the shape of the largest matrix that a call may sum or gather
        """
        assert not torch.is_inference_mode_enabled()
        self.rank = rank
        self.max_rows, self.features, self.dtype = max_rows, features, dtype
        self.stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)  # if not 0, kernels stop waiting for messages
        number_bytes, candidate_bytes = self._measure(size)
        self._memory = allocate(number_bytes + candidate_bytes)
        _clear(self._memory, number_bytes, dtype)
        _clear(self._memory + number_bytes, candidate_bytes, torch.float32)
        torch.cuda.synchronize()
        self._opened: list[int] = []
        self._lanes = self._find_lanes([self._memory] * size).cuda()  # until the other ranks' are open

    def _measure(self, size: int) -> tuple[int, int]:
        """Return how many bytes the lanes for sums take, and the lane for candidates, which comes last."""
        row_bytes = size * self.features * self.dtype.itemsize
        self._sum_bytes, self._vector_bytes = (-(-rows * row_bytes // 16) * 16 for rows in (self.max_rows, 1))
        self._layer = self._vector = 0
        self._stale: Tensor | None = None
        return SUM_LANES * self._sum_bytes + VECTOR_LANES * self._vector_bytes, size * self.max_rows * 2 * 4

    @property
    def handle(self) -> Tensor:
        """The handle by which other ranks open this inbox, [64] uint8."""
        return torch.tensor(list(handle_of(self._memory)), dtype=torch.uint8)

    def open(self, handles: Tensor) -> None:
        """Open all ranks' inboxes by the handles, [ranks, 64] uint8; raises RuntimeError if the driver refuses."""
        addresses = [self._memory if rank == self.rank else self._open(handle) for rank, handle in enumerate(handles)]
        self._lanes = self._find_lanes(addresses).cuda()

    def _find_lanes(self, addresses: list[int]) -> Tensor:
        """Return the address of each lane on each rank, [lanes, ranks] int64; the lane for candidates comes last."""
        sizes = [self._sum_bytes] * SUM_LANES + [self._vector_bytes] * VECTOR_LANES
        return torch.tensor([0, *sizes]).cumsum(0).unsqueeze(1) + torch.tensor(addresses)

    def can_sum(self, x: Tensor) -> bool:
        """Whether this inbox can sum x, by its shape and type."""
        return x.dim() == 2 and len(x) <= self.max_rows and x.shape[1] == self.features and x.dtype == self.dtype

    def can_gather(self, x: Tensor) -> bool:
        """Whether this inbox has room for every rank's x, by its shape and type."""
        return x.numel() <= self.max_rows * self.features and x.dtype == self.dtype

    def layer_lane(self) -> Tensor:
        """Return the lane of a layer's next sum or gathering: its address on each rank, [ranks] int64. Two take turns.

        Between steps, another exchange must keep a rank from being two calls ahead.
        """
        self._layer = 1 - self._layer
        return self._lanes[self._layer]

    def vector_lane(self) -> tuple[Tensor, Tensor | None]:
        """Return the lane of the next sum of a single vector, and the stale one; several take turns."""
        stale = self.take_stale()
        self._vector = (self._vector + 1) % VECTOR_LANES
        self._stale = self._lanes[SUM_LANES + self._vector]
        return self._stale, stale

    def take_stale(self) -> Tensor | None:
        """Return the lane of the last sum of a single vector, once: the next sum empties this rank's inbox there."""
        stale, self._stale = self._stale, None
        return stale

    @property
    def embedding_lane(self) -> Tensor:
        """The lane for the embedding's sum, before the first layer."""
        return self._lanes[SUM_LANES - 1]

    @property
    def candidates_lane(self) -> Tensor:
        """The lane for kernels.ranks.best_of_ranks, after the last layer."""
        return self._lanes[-1]

    def give_up(self) -> None:
        """Make kernels stop waiting for messages that will not come. Any thread may call this."""
        self.stop.fill_(1)

    def close_others(self) -> None:
        """Close the other ranks' inboxes, before those ranks free them."""
        while self._opened:
            close_handle(self._opened.pop())

    def free(self) -> None:
        """Free this rank's inbox, once no other rank has it open."""
        free(self._memory)

    def _open(self, handle: Tensor) -> int:
        self._opened.append(open_handle(bytes(handle.tolist())))
        return self._opened[-1]


def _clear(address: int, num_bytes: int, dtype: torch.dtype) -> None:
    """Fill memory with negative zeros."""
    word = 0x80000000 if dtype.itemsize == 4 else 0x80008000
    call("cuMemsetD32_v2", ctypes.c_uint64(address), ctypes.c_uint(word), ctypes.c_size_t(num_bytes // 4))
