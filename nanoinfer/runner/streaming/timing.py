"""How long the copies of a step take, and which steps take as long."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nanoinfer.config import Config
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.memory.holdings import Holdings
from nanoinfer.runner.memory.plan import Streaming
from nanoinfer.runner.message import PrefillMessage
from nanoinfer.runner.streaming.choice import hint
from nanoinfer.runner.streaming.rates import seconds_of


def measure_streaming(
    config: Config,
    holdings: Holdings,
    tp: TensorParallel,
    run: Callable[[PrefillMessage], object],
    full: PrefillMessage,
) -> Streaming:
    """Say what is known of layers in host memory. On the CPU, no time is measured. All ranks call this together.

    full: a step of as many tokens of prompts as can be; run: runs it
    """
    stream, has_gpu = holdings.stream, config.device != "cpu"
    saved = 0 if stream is None else stream.saved_bytes

    def make_room(lacking: int) -> str:
        return hint(config, holdings.layer_sizes, lacking + saved) if has_gpu else ""

    if stream is None:
        return Streaming(hint=make_room)
    if not has_gpu:
        return Streaming(stream.num_bytes, hint=make_room)
    copying = stream.seconds_of_copies()
    computing = seconds_of(partial(run, full), stream.device) / full.num_tokens
    hiding = tp.min(int(copying / computing), stream.device)  # each rank's host may plan by it
    return Streaming(stream.num_bytes, copying, hiding, make_room)
