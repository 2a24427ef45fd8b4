"""HostBlocks: one rank's room in host memory for the content of blocks, and for states; the copies there and back."""

from __future__ import annotations

import logging
import threading

import torch
from torch import Tensor

from nanoinfer.runner.memory.block_copy import copy_block, pair_parts
from nanoinfer.runner.memory.kv_cache import KVCache
from nanoinfer.runner.memory.pinned_pages import pinned, unpin
from nanoinfer.runner.memory.state_pool import StatePool
from nanoinfer.runner.memory.transfers import Transfers

CHUNK_BYTES = 128 << 20  # that are pinned at once: it takes milliseconds, in which no kernel may be launched
CHUNKS_AHEAD = 16  # pinned before they are needed, at least; later as many as there are

log = logging.getLogger("nanoinfer")


class HostBlocks:
    """Slots for the content of blocks, pinned as they are needed. Copies run on a stream of their own, beside a step.

    The states of a sequence fill several slots, as one run of bytes.

    num_slots: as many as there can be
    """

    def __init__(self, num_slots: int, kv_cache: KVCache, is_lazy: bool) -> None:
        """is_lazy: a thread pins the memory later, when it is asked for slots; else all of it is pinned now."""
        self.num_slots = num_slots
        self._device = kv_cache.device
        slices, _, numbers = kv_cache.memory.shape
        self._shape, self._dtype = (slices, numbers), kv_cache.memory.dtype
        self._slot_bytes = slices * numbers * self._dtype.itemsize
        self._per_chunk = max(1, min(CHUNK_BYTES // self._slot_bytes, num_slots))
        self._chunks: list[Tensor] = []  # [slots, slices, numbers of a slice]
        self._wanted = 0  # chunks
        self._state = threading.Condition()
        self._is_full = self._is_closed = False
        self._thread: threading.Thread | None = None
        self._copied: torch.cuda.Event | None = None  # behind the newest transfers, for which the next step waits
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        if not is_lazy:
            self._wanted = self._num_chunks
            self._grow()

    @property
    def _num_chunks(self) -> int:
        return -(-self.num_slots // self._per_chunk)

    @property
    def is_whole(self) -> bool:
        """Whether there will be no more slots than there are: all are there, or the host has no memory for more."""
        return self._is_full or len(self._chunks) >= self._num_chunks

    def num_ready(self) -> int:
        """Return how many slots there are by now, and let there be more soon."""
        self._want(len(self._chunks) + max(CHUNKS_AHEAD, len(self._chunks)))
        return min(len(self._chunks) * self._per_chunk, self.num_slots)

    def begin(self, kv_cache: KVCache, states: StatePool, transfers: Transfers | None, is_awaited: bool) -> None:
        """Launch the copies of a step, before the step itself. It waits for those of the steps before.

        is_awaited: the step reads what is restored, and waits for that, too
        """
        memory = kv_cache, states
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None
        if transfers is None:
            return
        if transfers.first is not None:
            self._save(*memory, transfers.first)
        if self._stream is None:
            self._restore(*memory, transfers)
            self._save(*memory, transfers)
            return
        step = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(step)
        with torch.cuda.stream(self._stream):
            self._restore(*memory, transfers)
            if is_awaited and (transfers.restored or transfers.restored_states):
                step.wait_event(self._stream.record_event())
            self._save(*memory, transfers)
            self._copied = self._stream.record_event()

    def _restore(self, kv_cache: KVCache, states: StatePool, transfers: Transfers) -> None:
        for slot, block_id in transfers.restored:
            copy_block(kv_cache.memory[:, block_id], self._slot(slot))
        for slots, state in transfers.restored_states:
            for part, own in pair_parts(states.parts(state), map(self._slot, slots)):
                copy_block(part, own)

    def _save(self, kv_cache: KVCache, states: StatePool, transfers: Transfers) -> None:
        for block_id, slot in transfers.saved:
            copy_block(self._slot(slot), kv_cache.memory[:, block_id])
        for state, slots in transfers.saved_states:
            for part, own in pair_parts(states.parts(state), map(self._slot, slots)):
                copy_block(own, part)

    def _slot(self, slot: int) -> Tensor:
        """Return a slot's memory. If it is not there yet, rank 0 was faster: wait for the thread."""
        chunk, index = divmod(slot, self._per_chunk)
        if chunk >= len(self._chunks):
            self._want(chunk + 1)
            with self._state:
                self._state.wait_for(lambda: len(self._chunks) > chunk or self._is_full)
            while chunk >= len(self._chunks):
                self._chunks.append(torch.empty(self._per_chunk, *self._shape, dtype=self._dtype))
        return self._chunks[chunk][index]

    def _want(self, num_chunks: int) -> None:
        """Let the thread make chunks until there are so many."""
        wanted = min(num_chunks, self._num_chunks)
        if wanted <= self._wanted:
            return
        with self._state:
            self._wanted = wanted
            self._state.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="nanoinfer-host-blocks", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._is_closed or len(self._chunks) < self._wanted)
                if self._is_closed:
                    return
            self._grow()
            if self._is_full:
                return

    def _grow(self) -> None:
        """Make chunks as long as some are wanted and the host has memory."""
        while len(self._chunks) < self._wanted and not self._is_closed:
            try:
                chunk = self._make_chunk()
            except (MemoryError, RuntimeError) as error:
                slots = len(self._chunks) * self._per_chunk
                log.warning("the KV cache has %d blocks in host memory, and gets no more: %s", slots, error)
                with self._state:
                    self._is_full = True
                    self._state.notify_all()
                return
            with self._state:
                self._chunks.append(chunk)
                self._state.notify_all()

    def _make_chunk(self) -> Tensor:
        """Return memory for more slots. Raises MemoryError or RuntimeError if the host has none, or pins none."""
        num_bytes = self._per_chunk * self._slot_bytes
        chunk = pinned(num_bytes, self._device)
        return chunk.view(self._dtype).view(self._per_chunk, *self._shape)

    def close(self) -> None:
        """Give all memory back, once the device has done its copies."""
        with self._state:
            self._is_closed = True
            self._state.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._stream is not None:
            self._stream.synchronize()
            for chunk in self._chunks:
                unpin(chunk)
        self._chunks.clear()
