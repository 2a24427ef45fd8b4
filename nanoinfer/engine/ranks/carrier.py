"""AdapterCarrier: brings adapters from this rank into the slots of all."""

from __future__ import annotations

from nanoinfer.engine.ranks.ranks import Ranks
from nanoinfer.parallel.buckets import Buckets, room_for
from nanoinfer.process.torch_state import fresh_torch_state
from nanoinfer.runner.adapters.adapters import AdapterSlots
from nanoinfer.runner.adapters.receiver import parcel
from nanoinfer.weights.adapters.low_rank import Adapter


class AdapterCarrier:
    """Writes in step order: steps that are in flight still see what a slot held before."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def write(self, slot: int, adapter: Adapter) -> None:
        """Write an adapter into a slot, in place of what was there. adapter: as this rank's reader has read it

        An error of this rank, such as a lack of memory, leaves all slots as they were; that of another ends all ranks.
        """
        adapters = self._ranks.runner.holdings.adapters
        assert adapters is not None
        with self._ranks.uninterrupted(), fresh_torch_state():
            buckets = self._ranks.make_buckets("holdings.adapters.receive")
            if buckets is None:
                adapters.write(slot, adapter)
            else:
                self._write_everywhere(slot, adapter, adapters, buckets)

    def _write_everywhere(self, slot: int, adapter: Adapter, adapters: AdapterSlots, buckets: Buckets) -> None:
        """Send an adapter to the other ranks, which write it when this one has done so."""
        tensors, scales = parcel(adapter), None
        try:
            buckets.open(sum(map(room_for, tensors.values())))
            for name, tensor in tensors.items():
                buckets.put(name, tensor, is_stack=False)
            buckets.flush()
            adapters.write(slot, adapter)
            scales = {module: update.scale for module, update in adapter.items()}
        finally:
            try:
                if not self._ranks.is_closed:
                    self._ranks.call("holdings.adapters.end_receiving", slot, scales)
            finally:
                buckets.close()
