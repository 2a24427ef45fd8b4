"""Random decoders for kernels.decoder; and a script that runs the programs of one side by side.

    python tests/cases/decoder_rows.py

Triton's interpreter runs programs one after another, but these wait for each other: so here each is a process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from nanoinfer.kernels.decoder.row import DecoderRow
from nanoinfer.kernels.decoder.row_model import RowLayer, RowModel, decoder_row_reference, is_faster

BLOCK_SIZE = 64
LIMIT = 250  # seconds of a program


def make_model(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    inter: int,
    layers: int,
    dtype: torch.dtype,
    device: str,
    blocks: int = 20,
) -> RowModel:
    """Make a decoder whose KV cache is full of random keys and values."""
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale + mean).to(dtype)

    def layer() -> RowLayer:
        attended = heads * head_dim
        return RowLayer(
            random(attended + 2 * kv_heads * head_dim, hidden, scale=hidden**-0.5),
            random(hidden, attended, scale=attended**-0.5),
            random(2 * inter, hidden, scale=hidden**-0.5),
            random(hidden, inter, scale=inter**-0.5),
            *(random(size, scale=0.1, mean=1.0) for size in (hidden, hidden, head_dim, head_dim)),
            *(random(blocks, BLOCK_SIZE, kv_heads, head_dim) for _ in "kv"),
        )

    angles = torch.arange(blocks * BLOCK_SIZE).outer(10_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
    ends = random(16, hidden), random(hidden, scale=0.1, mean=1.0)
    return RowModel([layer() for _ in range(layers)], *ends, cos_sin, 1e-6, head_dim**-0.5)


def launch_row(dtype: torch.dtype) -> None:
    """Launch Qwen3-0.6B's layers, whose numbers may be any, if a step would."""
    hidden, heads, kv_heads, head_dim, inter = 1024, 16, 8, 128, 3072
    sizes = [((heads + 2 * kv_heads) * head_dim, hidden), (hidden, heads * head_dim), (2 * inter, hidden)]
    sizes += [(hidden, inter), (hidden,), (hidden,), (head_dim,), (head_dim,), *[(9, 256, kv_heads, head_dim)] * 2]
    layers = [RowLayer(*(torch.empty(size, dtype=dtype) for size in sizes)) for _ in range(28)]
    ends = torch.empty(16, hidden, dtype=dtype), torch.empty(hidden, dtype=dtype)
    model = RowModel(layers, *ends, torch.empty(4096, head_dim), 1e-6, head_dim**-0.5)
    one = torch.empty(1, dtype=torch.int32)
    if is_faster(model):
        DecoderRow(model)(one, one, one, torch.empty(1, 16, dtype=torch.int32))


def row_at(position: int, device: str, blocks: int = 20) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a row's token, its position, its slot, and the row's block table, which has the blocks backwards."""
    pages = torch.arange(blocks - 1, -1, -1, dtype=torch.int32, device=device)[None]
    block = blocks - 1 - position // BLOCK_SIZE
    numbers = 7, position, block * BLOCK_SIZE + position % BLOCK_SIZE
    token, place, slot = (torch.tensor([number], dtype=torch.int32, device=device) for number in numbers)
    return token, place, slot, pages


def error(result: Tensor, expected: Tensor) -> float:
    """Return ||result - expected|| / ||expected||."""
    return ((result.float() - expected.float()).norm() / expected.float().norm()).item()


def wait_in_peace() -> None:
    """Leave the processor to others before each load of a word, which a program repeats until it has come."""
    load = interpreter_builder.create_load

    def load_later(ptr: Any, cache_policy: Any, is_volatile: bool) -> Any:
        if is_volatile:
            time.sleep(0.001)
        return load(ptr, cache_policy, is_volatile)

    interpreter_builder.create_load = load_later


def run_side_by_side(programs: int = 4, position: int = 150) -> float:
    """Return the error of two steps of a row whose programs are processes: two KV heads, two programs for each."""
    torch.set_num_threads(1)  # before the forks, which have no other threads
    model = make_model(256, 4, 2, 64, 512, 2, torch.float16, "cpu")
    expected = [decoder_row_reference(model, *row_at(place, "cpu")) for place in (position, position + 1)]
    row = DecoderRow(model, programs)
    out = torch.zeros(2, 256, dtype=torch.float16).share_memory_()
    for tensor in (row._words, row._turn, *(part for layer in model.layers for part in layer[-2:])):
        tensor.share_memory_()
    row = DecoderRow(model, programs, row._words, row._turn)  # the caches have moved

    def run(program: int) -> None:
        signal.alarm(LIMIT)  # nobody else would end it if this script were killed
        wait_in_peace()
        for step in range(2):
            result = row(*row_at(position + step, "cpu"), first_program=program)
            if program == 0:
                out[step] = result
            barrier.wait()  # as a GPU begins a launch when the one before has ended

    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(programs)
    workers = [fork.Process(target=run, args=(program,)) for program in range(programs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(error(out[step], expected[step]) for step in range(2))


if __name__ == "__main__":
    print(run_side_by_side())
