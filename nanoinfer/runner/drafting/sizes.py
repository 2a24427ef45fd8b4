"""The sizes of verifying steps."""

from __future__ import annotations

import torch

from nanoinfer.config import Config

MOST_TOKENS = 192  # of a step: with more, products of 16-bit numbers are bound by arithmetic (8b on an H200: 183)
# Of a step whose layers come from host memory: it takes as long as their copies, whatever it computes. Logits of all
# tokens take no more than a share of the GPU's memory.
MOST_STREAMED, LOGITS_SHARE = 4096, 1 / 32
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)

VerifySize = tuple[int, int]  # rows, and places for guesses


def sizes_that_verify(config: Config) -> list[VerifySize]:
    """Return the sizes of an LLM's verifying steps; none if none verify."""
    if config.speculation is None:
        return []
    sizes = config.max_num_seqs, config.max_guesses
    if not config.weight_offload_gib or config.device == "cpu":
        return verify_sizes(*sizes)
    total = torch.cuda.get_device_properties(0).total_memory * config.gpu_memory_utilization
    numbers = config.description.vocab_size // config.tensor_parallel_size
    fit = int(total * LOGITS_SHARE) // (numbers * config.torch_head_dtype.itemsize)
    return verify_sizes(*sizes, max(MOST_TOKENS, min(MOST_STREAMED, fit)), (*ROWS, 256, 512))


def verify_sizes(
    max_num_seqs: int, max_guesses: int, most: int = MOST_TOKENS, some: tuple[int, ...] = ROWS
) -> list[VerifySize]:
    """Return the sizes of verifying steps, in ascending order.

    For each of some numbers of rows there are places for half of all guesses and for all, as far as `most` tokens
    allow. A step takes the next larger number of rows.
    """
    largest = min(max_num_seqs, some[-1])
    rows = [*(size for size in some if size < largest), largest]
    guesses = {(size, min(size * max_guesses // part, most - size)) for size in rows for part in (2, 1)}
    return sorted(size for size in guesses if size[1] > 0)


def most_tokens(sizes: list[VerifySize]) -> int:
    """Return how many tokens the largest step has; 0: there are no sizes."""
    return max(map(sum, sizes), default=0)
