"""AdapterReceiver: the end of an adapter's way from rank 0 to another rank."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.parallel.buckets import Bucket, BucketReader, Piece
from nanoinfer.weights.adapters.low_rank import Adapter, LowRank


def parcel(adapter: Adapter) -> dict[str, Tensor]:
    """Return an adapter's tensors by names, as `AdapterReceiver` takes them."""
    return {f"{module}.{which}": getattr(update, which) for module, update in adapter.items() for which in "ab"}


class AdapterReceiver:
    """Gathers the tensors of one adapter at a time on this rank's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reader = BucketReader(device)
        self._pieces: dict[str, list[Tensor]] = {}

    def read(self, bucket: Bucket) -> None:
        """Copy what is in a bucket."""
        self._reader.read(bucket, self._take)

    def _take(self, piece: Piece, rows: Tensor) -> None:
        self._pieces.setdefault(piece.name, []).append(rows.to(self._device, copy=True))

    def take(self, scales: dict[str, float]) -> Adapter:
        """Return the adapter whose buckets have been read, and forget it. scales: LowRank.scale, by module"""
        pieces, self._pieces = self._pieces, {}
        self._reader.close()
        whole = {name: torch.cat(some) if len(some) > 1 else some[0] for name, some in pieces.items()}
        return {module: LowRank(whole[f"{module}.a"], whole[f"{module}.b"], scale) for module, scale in scales.items()}
