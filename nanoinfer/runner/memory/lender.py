"""Lender: the GPU memory of a rank's weights and KV cache, which goes back to the driver while an LLM sleeps."""

from __future__ import annotations

from typing import Literal

import torch

from nanoinfer.runner.memory.host_copy import HostCopy
from nanoinfer.runner.memory.region import FromRegion, Region

Tag = Literal["weights", "kv_cache"]  # what can be lent


class Lender:
    """Two regions, whose tensors keep their addresses. So captured graphs stay valid."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._most = torch.cuda.get_device_properties(device).total_memory
        self._regions: dict[Tag, Region] = {tag: Region(device, self._most) for tag in ("weights", "kv_cache")}
        self._copy: HostCopy | None = None  # of the weights

    def for_weights(self) -> FromRegion:
        """Return a context in which a new model takes this memory for its parameters."""
        return FromRegion(self._regions["weights"])

    def for_new_kv_cache(self) -> FromRegion:
        """Return a context in which a new KV cache takes this memory; the one before is gone."""
        self._regions["kv_cache"].close()
        self._regions["kv_cache"] = Region(self._device, self._most)
        return FromRegion(self._regions["kv_cache"])

    def save_weights(self) -> None:
        """Copy the weights to host memory, from which `take_back` restores them."""
        content = self._regions["weights"].content()
        try:
            self._copy = self._copy or HostCopy(len(content), self._device)
            self._copy.save(content)
        except BaseException:
            self.drop_copy()
            raise

    @property
    def has_copy(self) -> bool:
        """Whether the weights come back as they were."""
        return self._copy is not None

    def drop_copy(self) -> None:
        """Forget what `save_weights` has copied."""
        self._copy = None

    def lend(self, tag: Tag) -> None:
        """Give memory back to the driver."""
        self._regions[tag].lend()

    def take_back(self, tag: Tag) -> None:
        """Take memory back. Its content is lost, but for weights of which there is a copy.

        Raises torch.OutOfMemoryError if others have taken the memory meanwhile.
        """
        region = self._regions[tag]
        if region.is_lent:
            region.take_back()
            if tag == "weights" and self._copy is not None:
                try:
                    self._copy.restore(region.content())
                except BaseException:
                    region.lend()  # it holds nothing yet
                    raise

    def close(self) -> None:
        """Give everything back for good."""
        self.drop_copy()
        for region in self._regions.values():
            region.close()
