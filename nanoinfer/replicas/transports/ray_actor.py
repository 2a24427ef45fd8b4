"""ReplicaActor: the Ray actor in which a replica lives."""

from __future__ import annotations

import os
import socket
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np

from nanoinfer.config import Config
from nanoinfer.hub import CHECKPOINT_FILES, find_folder, name_of
from nanoinfer.parallel.buckets import SharedSegment
from nanoinfer.parallel.channel import explained, make_segment
from nanoinfer.replicas.replica import run_replica
from nanoinfer.replicas.transports.tcp import connect

MEMORY = "memory"  # the group of methods that Ray runs beside the others


class ReplicaActor:
    """One of its methods is the replica's life. Those of the group MEMORY bring it tensors meanwhile."""

    def __init__(self) -> None:
        self._memory: SharedMemory | None = None

    def pid(self) -> int:
        """Return the number of this process."""
        return os.getpid()

    def live(self, address: tuple[str, int], key: bytes) -> None:
        """Live as one replica, which the LLM's process reaches by TCP. Raises OSError if it reaches none."""
        try:
            pipe, beats = connect(address, key), connect(address, key)
        except OSError as error:
            way = f"from {socket.gethostname()} to {address[0]}:{address[1]}, where the LLM's process listens"
            raise OSError(f"there is no way by TCP {way}: {error}") from None
        try:
            run_replica(pipe, beats, [], check_files)
        except SystemExit:
            os._exit(1)  # it has told why

    def open_segment(self, num_bytes: int) -> SharedSegment:
        """Make a segment of this machine's shared memory."""
        self.close_segment()
        with explained():
            self._memory = make_segment(num_bytes, num_bytes)
        return SharedSegment(self._memory.name, self._memory.size)

    def fill_segment(self, data: np.ndarray) -> None:
        """Write into the segment what Ray has brought here, [bytes] uint8."""
        assert self._memory is not None
        np.ndarray(data.shape, np.uint8, self._memory.buf)[:] = data

    def close_segment(self) -> None:
        """Give the segment back."""
        if self._memory is not None:
            self._memory.unlink()
            self._memory.close()
            self._memory = None


def check_files(config: Config) -> None:
    """Find the folders of the options on this machine, too; those of the Hub are downloaded.

    Raises ValueError if one is not here.
    """
    for option in ("model", "tokenizer", "draft_model"):
        folder = getattr(config, option)
        if folder is None or Path(folder).exists():
            continue
        if "/snapshots/" in folder:
            find_folder(option, name_of(folder), Path(folder).name, CHECKPOINT_FILES)
        if not Path(folder).exists():
            raise ValueError(
                f"{option}={folder!r}: the machine {socket.gethostname()} has no such folder; with"
                " data_parallel_backend='ray', all machines need it, such as on a disk that they share"
            )
