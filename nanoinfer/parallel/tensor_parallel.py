"""TensorParallel: one rank's view of the group that shares a model."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, _get_process_group_store

from nanoinfer.parallel.inbox import Inbox
from nanoinfer.parallel.peer_memory import can_reach_peers, uuid_of
from nanoinfer.process.environment import changed_environment

CPU = torch.device("cpu")
TIMEOUT = timedelta(minutes=30)
RENDEZVOUS_TIMEOUT = timedelta(seconds=30)  # short: it begins when all ranks have said that they are ready
POLL_SECONDS = 0.01
SIGNAL_DELAY = timedelta(seconds=0.25)  # until Python sees a Ctrl-C, while it waits for a collective
CLOSE_TIMEOUT = timedelta(seconds=5)  # short: all ranks have been told to end


class TensorParallel:
    """This process's rank among `size` ranks, and the collectives between them. A rank alone needs no process group.

    The group is an object of its own, not torch.distributed's default group, so that one process can hold several
    engines.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        store: dist.Store | None = None,
        device: torch.device = CPU,
        check: Callable[[], None] = lambda: None,
        meet: Callable[[], None] | None = None,
        timeout: timedelta = TIMEOUT,
        keeps_order: bool = False,
    ) -> None:
        """check: called while this rank waits for the others to start; it raises if one of them cannot.

        meet: waits for the others instead
        timeout: of a collective on the CPU
        keeps_order: no sum may depend on the number of ranks
        """
        self.rank = rank
        self.size = size
        self._store = store
        self._device = device
        self._check = check
        self._meet = meet
        self._timeout = timeout
        self.keeps_order = keeps_order
        self.inbox: Inbox | None = None  # for small sums on CUDA, by kernels.ranks
        self._drop_graphs: Callable[[], None] = lambda: None
        self._group: Any = None  # torch's stubs leave out the collectives
        self._lock = threading.RLock()  # held at the group's end, which any thread may cause, and the collector
        self._aborted = False
        # On CUDA a collective runs on the stream of the kernels around it, and the host does not wait.
        self._reduce_options, self._gather_options = AllreduceOptions(), AllgatherOptions()
        self._reduce_options.asyncOp = self._gather_options.asyncOp = device.type != "cuda"

    @classmethod
    def within(cls, group: dist.ProcessGroup, device: torch.device, **how: Any) -> TensorParallel:
        """Return this process's rank among those of an existing group, all of which call this; how: as for __init__.

        The ranks meet in the group's store, and form a group of their own. The existing one stays as it is.
        """
        rank, ranks = group.rank(), dist.get_process_group_ranks(group)
        store = dist.PrefixStore(f"nanoinfer on ranks {ranks}", _get_process_group_store(group))
        number = store.add(f"groups of rank {rank}", 1)  # equal on all ranks
        return cls(rank, len(ranks), dist.PrefixStore(f"group {number}", store), device, **how)

    @property
    def splits_outputs(self) -> bool:
        """Whether each rank computes a share of every product's outputs, from whole inputs: then no sum is cut."""
        return self.keeps_order and self.size > 1

    def connect(self, drop_graphs: Callable[[], None] = lambda: None) -> None:
        """Form the group, once every rank has come this far.

        drop_graphs: drops the CUDA graphs that hold collectives; any thread may call it
        """
        self._drop_graphs = drop_graphs
        if self.size == 1:
            return
        assert self._store is not None
        (self._meet or self._wait_for_all)()
        if self._device.type != "cuda":
            self._hold(_gloo_group(self._store, self.rank, self.size, self._timeout))
            return
        with changed_environment(_nccl_variables()):
            self._hold(_nccl_group(self._store, self.rank, self.size))
            # NCCL connects with the first collective, and until then cannot be aborted.
            self.all_reduce(torch.zeros(1, device=self._device))

    def _hold(self, group: Any) -> None:
        with self._lock:
            self._group = group
        if self._aborted:  # a rank died while there was no group to abort
            self._check()

    def _wait_for_all(self) -> None:
        """Wait until every rank has come this far. If one has failed before, `check` finds it."""
        assert self._store is not None
        names = self._announce("is ready")
        while not self._store.check(names):
            self._check()
            time.sleep(POLL_SECONDS)

    def make_inbox(self, max_rows: int, features: int, dtype: torch.dtype) -> None:
        """Make `inbox` for matrices of up to [max_rows, features]; until `open_inbox`, kernels only compile for it."""
        if self.size > 1 and self._device.type == "cuda":
            self.inbox = Inbox(self.rank, self.size, max_rows, features, dtype)

    def open_inbox(self) -> None:
        """Let the ranks open each other's inboxes, behind `connect`. If they cannot, `inbox` is None from here on."""
        if self.inbox is None:
            return
        device = self._device
        uuids = self.all_gather(uuid_of(device.index).to(device)).cpu()
        handles = self.all_gather(self.inbox.handle.to(device))
        is_open = bool(self.min(can_reach_peers(device.index, uuids), device))
        if is_open:
            try:
                self.inbox.open(handles)
            except RuntimeError as error:
                warnings.warn(f"sums over the ranks go through NCCL, slower for few rows: {error}", stacklevel=2)
                is_open = False
        if not self.min(is_open, device):
            self._close_inbox()

    def _announce(self, what: str) -> list[str]:
        """Tell the other ranks through the store; returns the names that it holds when all ranks have done so."""
        assert self._store is not None
        names = [f"rank {rank} {what}" for rank in range(self.size)]
        self._store.set(names[self.rank], "")
        return names

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over the ranks, in place; returns x."""
        if self._group is not None:
            _finish(self._group.allreduce([x], self._reduce_options))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather [n, ...] of each rank into [size, n, ...] on every rank, in rank order."""
        if self._group is None:  # until the ranks have met, this one's numbers stand for all
            return x.expand(self.size, *x.shape)
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        _finish(self._group._allgather_base(out, x.contiguous(), self._gather_options))
        return out.unflatten(0, (self.size, -1))

    def gather_features(self, x: Tensor) -> Tensor:
        """Gather [n, features] of each rank into [n, size * features] on every rank, in rank order."""
        return self.all_gather(x).transpose(0, 1).flatten(1)

    def min(self, value: int, device: torch.device) -> int:
        """Return the smallest of the ranks' values."""
        return int(self.all_gather(torch.tensor([value], device=device)).min())

    def abort(self) -> None:
        """End the sums and collectives that wait for a rank which will not come. Any thread may call this."""
        with self._lock:
            self._aborted = True
            if self.inbox is not None:
                self.inbox.give_up()
            if self._group is not None:
                # The group's kernels end at once, but abort returns only when no graph holds the communicator any more.
                aborting = threading.Thread(target=self._group.abort, name="nanoinfer-abort", daemon=True)
                aborting.start()
                self._drop_graphs()
                aborting.join()

    def close(self, failed: bool = False) -> None:
        """Leave the group, without waiting for the other ranks if one has failed."""
        if failed:
            self.abort()
        if self.inbox is not None:
            self._close_inbox(failed)
        with self._lock:
            group, self._group = self._group, None
            self._store = None
        if group is not None and not failed:
            group.shutdown()

    def _close_inbox(self, failed: bool = False) -> None:
        """Free the inbox when no other rank has it open; after failure the other ranks have ended, or are about to."""
        with self._lock:
            inbox, self.inbox = self.inbox, None
        assert inbox is not None
        torch.cuda.synchronize()
        inbox.close_others()
        if not failed and self._store is not None:
            with suppress(dist.DistError):
                self._store.wait(self._announce("has let go of the inboxes"), CLOSE_TIMEOUT)
        inbox.free()


def _finish(work: Any) -> None:
    try:
        if work is not None:  # None: the collective is on the stream already
            while not work.is_completed():
                with suppress(RuntimeError):  # at this timeout Python handles the signals that have come
                    work.wait(SIGNAL_DELAY)
            work.wait()  # raises the collective's error
    finally:
        del work  # or an error's traceback would keep it, and by it the group and the rendezvous' port


def _gloo_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = RENDEZVOUS_TIMEOUT
    group = gloo(store, rank, size, options)
    group._set_default_timeout(timeout)
    return group


def _nccl_variables() -> dict[str, str]:
    """Return what keeps NCCL to its collectives: this package itself watches the ranks."""
    return {
        # Behind a CUDA error the group's own thread would end this process before anyone has told of the error.
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        # NCCL's health service would listen on a port, and call the ranks of a closed group once a second.
        "NCCL_RAS_ENABLE": os.environ.get("NCCL_RAS_ENABLE", "0"),
    }


def _nccl_group(store: dist.Store, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, size, options)
