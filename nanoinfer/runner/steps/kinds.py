"""The kinds of decode steps, and the sizes of each that are captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nanoinfer.config import Config
from nanoinfer.kernels.attention.prefixes.prefix_plan import MIN_ROWS
from nanoinfer.runner.drafting.sizes import VerifySize

MAX_GRAPH_ROWS = 512
# Of so few rows, one graph holds the model and the draw, too: a second launch takes 10 us on an H200,
# 1.4% of a step of one row of Qwen3-0.6B.
FEW_ROWS = 8
SHARING_ROWS = (16, *range(32, 256, 32), *range(256, 512, 64))


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, every 16 up to 256, then every 32 up to max_num_seqs, itself included; at most MAX_GRAPH_ROWS."""
    largest = min(max_num_seqs, MAX_GRAPH_ROWS)
    sizes = [size for size in (1, 2, 4, 8, *range(16, 256, 16), *range(256, largest, 32)) if size < largest]
    return [*sizes, largest]


def sharing_batch_sizes(sizes: list[int]) -> list[int]:
    """Return some of the sizes, for which the step that reads shared prefixes once is captured, too.

    sizes: from graph_batch_sizes, or none
    """
    return [size for size in sizes if size in SHARING_ROWS or size == max(sizes)]


class DecodeKind(NamedTuple):
    """What a decode step does beside the plain one.

    shares: it reads shared prefixes once
    has_adapters: it adds what the adapters of its rows add
    guesses: it verifies guesses, for which it has so many places; 0: none
    """

    shares: bool = False
    has_adapters: bool = False
    guesses: int = 0


PLAIN = DecodeKind()


def captured_sizes(config: Config, verifying: Sequence[VerifySize]) -> dict[DecodeKind, list[int]]:
    """Return the sizes of each kind of decode step that an LLM captures, the plain one first; verifying: see below."""
    if config.enforce_eager or config.device == "cpu" or not config.description.generates:
        return {}
    return sizes_by_kind(config.max_num_seqs, config.shares_prefixes, config.max_adapters > 0, verifying)


def sizes_by_kind(
    max_num_seqs: int, may_share: bool, may_adapt: bool, verifying: Sequence[VerifySize] = ()
) -> dict[DecodeKind, list[int]]:
    """Return the kinds of steps to capture, and the sizes of each; verifying: those of verifying steps."""
    sizes = graph_batch_sizes(max_num_seqs)
    by_kind: dict[DecodeKind, list[int]] = {}
    for has_adapters in (False, True) if may_adapt else (False,):
        by_kind[DecodeKind(False, has_adapters)] = sizes
        if may_share:
            by_kind[DecodeKind(True, has_adapters)] = sharing_batch_sizes(sizes)
        for rows, guesses in verifying:
            for shares in (False, True) if may_share and rows >= MIN_ROWS else (False,):
                by_kind.setdefault(DecodeKind(shares, has_adapters, guesses), []).append(rows)
    return by_kind
