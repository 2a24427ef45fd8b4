"""The life of a rank that is not rank 0, in a process of its own."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import traceback
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Semaphore

import torch.distributed as dist

from nanoinfer.config import Config
from nanoinfer.parallel.channel import BEAT_SECONDS, Receiver
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.process.collector import frozen
from nanoinfer.runner.model_runner import ModelRunner


@frozen()  # what is imported stays
def run_worker(rank: int, port: int, segment: str, semaphores: list[Semaphore], errors: Connection) -> None:
    """Live as one rank: build a ModelRunner together with rank 0, then call the methods that arrive until "close".

    The first message is the Config.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 gets the Ctrl-C and ends the others
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked until now, see interrupts_blocked
    try:
        receiver = Receiver(segment, semaphores, rank - 1)
        threading.Thread(target=_live_with_parent, args=(receiver,), daemon=True).start()
        config: Config = receiver.receive()
        store = dist.TCPStore("127.0.0.1", port, config.tensor_parallel_size, is_master=False)
        tp = TensorParallel(
            rank, config.tensor_parallel_size, store, config.device_of(rank), keeps_order=config.deterministic
        )
        runner = ModelRunner(config, tp)
        method = ""
        while method != "close":
            method, args = receiver.receive(runner.check_device)
            runner.call(method, *args)
    except BaseException:
        traceback.print_exc()  # rank 0 may be unable to show it
        errors.send(traceback.format_exc())
        raise SystemExit(1) from None


def _live_with_parent(receiver: Receiver) -> None:
    """Show rank 0 that this process lives, and end this process when rank 0 is gone."""
    parent = mp.parent_process()
    assert parent is not None
    receiver.beat()
    while not wait([parent.sentinel], timeout=BEAT_SECONDS):
        receiver.beat()
    os._exit(1)
