"""Copies between the host's memory and a GPU's, by threads with pinned buffers.

A GPU copies pinned memory several times as fast as other memory. But pinning takes half a second for each GiB. So only
small buffers are pinned, and threads copy between them and the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from nanoinfer.process.bar import Advance, ignore
from nanoinfer.process.interrupts import delayed_interrupt
from nanoinfer.weights.shards import Away, Filled, is_tensor
from nanoinfer.weights.together import write_all

BUFFER_BYTES = 16 << 20
NUM_THREADS = 16  # each with a buffer: while some wait for the device, others copy
BYTES_AT_ONCE = 4 << 30  # of tensors that wait for each other: they are in files, which are mapped
STAGED_AT_ONCE = 2 << 30  # bytes that take the GPU's memory twice, at most half of what is free
ALIGNED = 16  # bytes: in a buffer, numbers of any type may begin at a multiple
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numpy has no bfloat16
POLL_SECONDS = 0.05  # until an interrupt is seen

Part = TypeVar("Part")
Copy = tuple[Tensor, Tensor]  # of what is copied: where to, and from where
Job = tuple[Callable[[list[Copy], Tensor], None], list[Copy]]  # what copies, with a buffer, and what


def copy_parts(
    parts: Sequence[Part],
    copy: Callable[[Part, Tensor], object],
    num_bytes: int,
    device: torch.device,
    meanwhile: Callable[[], object] = lambda: None,
    pool: ThreadPoolExecutor | None = None,
) -> None:
    """Call `copy` with each part and a pinned buffer, [at most BUFFER_BYTES] uint8, on several threads.

    Each thread has a stream of its own. It uses its buffer again once the device has done what `copy` launched. PyTorch
    keeps the buffers for the next call. An error of one thread, or an interrupt, stops all behind their present parts.
    It comes through when they have stopped, because the memory in which they write may go then.

    num_bytes: of all parts together
    meanwhile: what this thread does as they copy; a second call, if parts are left behind an interrupt, does the rest
    pool: of NUM_THREADS threads, which start for the first call alone; None: they start for this one
    """
    torch.cuda.current_stream(device).synchronize()  # the threads' streams do not wait for it
    left, stopped = iter(parts), threading.Event()  # the threads share both

    def work() -> None:
        try:
            with torch.inference_mode(), torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream()):
                buffer = torch.empty(min(BUFFER_BYTES, num_bytes), dtype=torch.uint8, pin_memory=True)
                while not stopped.is_set() and (part := next(left, None)) is not None:
                    copy(part, buffer)
                    torch.cuda.current_stream().synchronize()
        except BaseException:
            stopped.set()
            raise

    is_whole = False
    while not is_whole:  # the handler of an interrupt may raise nothing: then the rest is copied
        stopped.clear()
        with delayed_interrupt() as delayed, nullcontext(pool) if pool else ThreadPoolExecutor(NUM_THREADS) as threads:
            copies = [threads.submit(work) for _ in range(min(NUM_THREADS, len(parts)))]
            try:
                meanwhile()
                while wait(copies, timeout=POLL_SECONDS).not_done:
                    if delayed:
                        stopped.set()
            except BaseException:
                stopped.set()
                raise
            finally:
                wait(copies)
        for copied in copies:
            copied.result()
        is_whole = not stopped.is_set()


class Uploads:
    """Copies from the host to where a model's weights are. On a GPU, tensors wait until they are many.

    Plain weights whose home is host memory are written there, and never come to the device for that.
    """

    def __init__(self, device: torch.device, advance: Advance = ignore) -> None:
        """advance: told the bytes that have been copied"""
        self._device, self._advance = device, advance
        self._pool = ThreadPoolExecutor(NUM_THREADS)  # its threads start with the first copy, and end with this object
        self._most_staged = 0 if device.type == "cpu" else min(STAGED_AT_ONCE, torch.cuda.mem_get_info(device)[0] // 2)
        self._parts: list[Copy] = []
        self._num_bytes = self._num_staged = 0
        self._filled: set[int] = set()  # the ids of targets that are tensors
        self._staged: list[tuple[Filled, Tensor]] = []  # targets that are no tensors, and where what fills them goes
        self._come: list[tuple[Filled, Tensor]] = []  # of these, those that have been copied there
        self._homes: list[tuple[Away, Tensor]] = []  # targets in host memory, and what fills them

    def add(self, target: Tensor | Filled, source: Tensor) -> None:
        """Copy a tensor of the target's shape, at once or later. Nobody may change it before `finish`."""
        home = target if isinstance(target, Away) and is_tensor(target) else None
        if home is not None and home.is_elsewhere:
            self._advance(source.nbytes)
            return
        if self._device.type == "cpu":
            (target if home is None else home.at_home()).copy_(source)
            self._advance(source.nbytes)
            return
        if isinstance(target, Tensor) or home is not None:
            own = target if home is None else home.target
            if id(own) in self._filled:  # a checkpoint may hold a tensor under two names: the later one counts
                self._copy()
            self._filled.add(id(own))
        else:
            if self._num_staged + source.nbytes > self._most_staged // 2:  # half is copied while half is written
                self._copy()
            staged = torch.empty(source.shape, dtype=source.dtype, device=self._device)
            self._staged.append((target, staged))
            self._num_staged += staged.nbytes
            target = staged
        if home is not None:
            self._homes.append((home, source))
        else:
            assert isinstance(target, Tensor)
            self._parts += _parts_of(target, source)
        self._num_bytes += _room(source)
        if self._num_bytes >= BYTES_AT_ONCE:
            self._copy()

    def finish(self) -> None:
        """Copy what waits, and write what is no tensor."""
        self._copy()
        self._write()

    def _copy(self) -> None:
        """Copy what waits, and meanwhile write what was copied before."""
        jobs: list[Job] = [(self._upload, bundle) for bundle in _bundled(self._parts)]
        if self._homes:
            self._write()  # it brings layers: not while the threads write at their homes
            at_home = [part for home, source in self._homes for part in _parts_of(home.at_home(), source)]
            jobs += [(self._write_home, bundle) for bundle in _bundled(at_home)]
        num_bytes, self._parts, self._homes = self._num_bytes, [], []
        self._num_bytes = self._num_staged = 0
        self._filled.clear()
        if jobs:
            copy_parts(jobs, _do, num_bytes, self._device, self._write, self._pool)
        self._come += self._staged
        self._staged = []

    def _write(self) -> None:
        come, self._come = self._come, []
        write_all(come)

    def _upload(self, bundle: list[Copy], buffer: Tensor) -> None:
        start = 0
        for target, source in bundle:
            staged = buffer[start : start + source.nbytes].view(source.dtype).view(source.shape)
            np.copyto(_as_array(staged), _as_array(source))
            target.copy_(staged, non_blocking=True)
            self._advance(source.nbytes)
            start += _room(source)

    def _write_home(self, bundle: list[Copy], _: Tensor) -> None:
        """Copy from the host to the host, by this thread alone unless numbers are converted."""
        for home, source in bundle:
            if home.dtype == source.dtype:
                np.copyto(_as_array(home), _as_array(source))
            else:
                home.copy_(source)
            self._advance(source.nbytes)


def _do(job: Job, buffer: Tensor) -> None:
    copy, bundle = job
    copy(bundle, buffer)


def _parts_of(target: Tensor, source: Tensor) -> Iterator[Copy]:
    """Yield rows of both tensors that fit a buffer. A row that does not fit is cut, too."""
    if source.nbytes <= BUFFER_BYTES:
        yield target, source
        return
    rows = BUFFER_BYTES // source[0].nbytes
    if rows == 0:
        for pair in zip(target, source, strict=True):
            yield from _parts_of(*pair)
    else:
        yield from zip(target.split(rows), source.split(rows), strict=True)


def _bundled(parts: list[Copy]) -> list[list[Copy]]:
    """Put small parts together, of which a thread copies several before it waits for the device."""
    bundles: list[list[Copy]] = []
    left = 0
    for part in parts:
        left -= _room(part[1])
        if left < 0 or not bundles:  # the first may be of no numbers
            bundles.append([])
            left = BUFFER_BYTES // 4 - _room(part[1])
        bundles[-1].append(part)
    return bundles


def _room(source: Tensor) -> int:
    """Return the bytes of a buffer that a tensor takes."""
    return -(-source.nbytes // ALIGNED) * ALIGNED


def _as_array(numbers: Tensor) -> np.ndarray:
    array: np.ndarray = numbers.view(INTEGERS[numbers.itemsize]).numpy()
    return array
