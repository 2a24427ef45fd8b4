"""AdapterCarrier: brings adapters from this rank into the slots of all."""

from __future__ import annotations

from nanoinfer.engine.ranks.ranks import Ranks
from nanoinfer.parallel.buckets import Buckets, room_for
from nanoinfer.process.torch_state import fresh_torch_state
from nanoinfer.runner.adapters.receiver import parcel
from nanoinfer.weights.adapters.low_rank import Adapter


class AdapterCarrier:
    """Writes in step order: steps that are in flight still see what a slot held before."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def write(self, slot: int, adapter: Adapter) -> None:
        """Write an adapter into a slot, in place of what was there. adapter: as this rank's reader has read it

        Raises RuntimeError, before anything is written, if there is no room to pass it to other ranks.
        """
        adapters = self._ranks.runner.holdings.adapters
        assert adapters is not None
        with self._ranks.undivided(), fresh_torch_state():
            if (buckets := self._ranks.make_buckets("holdings.adapters.receive")) is not None:
                self._send(slot, adapter, buckets)
            adapters.write(slot, adapter)

    def _send(self, slot: int, adapter: Adapter, buckets: Buckets) -> None:
        tensors = parcel(adapter)
        try:
            buckets.open(sum(map(room_for, tensors.values())))
            for name, tensor in tensors.items():
                buckets.put(name, tensor, is_stack=False)
            buckets.flush()
            scales = {module: update.scale for module, update in adapter.items()}
            self._ranks.call("holdings.adapters.write_received", slot, scales)
        finally:
            buckets.close()
