"""Whether a GPU gives a token of a text the same bits in a prompt's chunk and alone, in layers with TokenRings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanoinfer.kernels.delta.chunks import CHUNK
from nanoinfer.kernels.states.in_order import Spans, TokenRings, spans_of_rows
from nanoinfer.kernels.states.memory import StateRows

TOKENS, AT_ONCE = 2 * CHUNK + 6, CHUNK + 6  # of a text; those between come alone: they end a chunk, and begin another
Compute = Callable[[Sequence[Tensor], TokenRings, Spans], Tensor]


def check_order(compute: Compute, terms: Sequence[Tensor], matrix: tuple[int, int, int], gates: int) -> None:
    """Raise ValueError if a text's tokens have other bits when some of them come one by one.

    compute: makes of some tokens what the layer's kernels do, [tokens, heads, dim]
    terms: what it gets of TOKENS tokens, each [TOKENS, numbers], the convolution's channels first
    matrix: a slot's matrices, [heads, key dim, value dim]; gates: numbers of a token beside its channels
    """
    first, device = terms[0], terms[0].device
    rings = TokenRings(
        torch.zeros((2, *matrix), device=device),
        first.new_zeros(2, CHUNK, first.shape[1]),
        first.new_zeros(2, CHUNK, gates),
    )
    expected = compute(terms, rings, _spans_of_prompt(TOKENS, 0, device))
    parts = [compute([x[:AT_ONCE] for x in terms], rings, _spans_of_prompt(AT_ONCE, 1, device))]
    for position in range(AT_ONCE, TOKENS):
        slot, at, boundary = (_ints([number], device) for number in (1, position, position // CHUNK * CHUNK))
        own = [x[position : position + 1] for x in terms]
        parts.append(compute(own, rings, spans_of_rows(StateRows(slot, at, boundary), CHUNK)))
    if not torch.equal(torch.cat(parts), expected):
        raise ValueError(
            "deterministic=True: this GPU adds up what layers remember in another order in prompts than token by token;"
            " device='cpu' does not"
        )


def _spans_of_prompt(tokens: int, slot: int, device: torch.device) -> Spans:
    """Return the spans of a step that computes a whole text; slot: that gets its states."""
    begins = range(0, tokens, CHUNK)
    seq = [0, tokens, tokens, 0, -1, slot, 0, 0, slot, 0, tokens // CHUNK * CHUNK, tokens]
    return Spans(
        _ints(seq, device)[None],
        bounds=_ints([*begins, tokens], device),
        chunks=_ints(range(len(begins)), device),
        first_tokens=_ints(begins, device),
        snapshots=_ints([-1] * len(begins), device),
        earlier=None,
        in_rings=False,
    )


def _ints(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)
