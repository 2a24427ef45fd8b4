"""Guesses by suffixes: what followed, in a text, where it was last like the end of a row's text.

A row's text ends with some tokens; the longest match of these, in its own text and in those of its group, counts. The
tokens that followed there are the guesses (as in prompt lookup decoding and SuffixDecoding, arXiv 2411.04975).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import launch_options, next_power_of_2, wait_for_predecessor

SHORTEST, LONGEST = 3, 16  # tokens of a match
PROGRAMS = 128  # about as many search at once, where sources can be divided
MOST_PARTS = 8  # of a source
BLOCK = 1024  # tokens of a source that a program compares at a time
# A match is one number, of which the largest counts: its length, its source, and where it ends there.
LENGTH_BIT, SOURCE_BIT = tl.constexpr(40), tl.constexpr(32)


def propose_suffixes(
    tokens: Tensor, lengths: Tensor, members: Tensor, slots: Tensor, groups: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """Propose what followed the longest match of the last SHORTEST to LONGEST tokens of each row's text.

    Of equally long matches, those in the row's own text come before others, then those of the group's later members,
    then the later ones. A match may overlap the end of the row's own text. Where the tokens behind it end there, they
    begin again, as a text that repeats itself does.

    tokens: [slots, width] int32, a text in each slot; lengths: [slots] int32
    members: [groups, n] int32, the slots of the texts of each group; -1: none
    slots, groups: [rows] int32, a row's own text and its group; -1: an empty row, or no group
    most: guesses of a row
    Returns guesses, [rows, most] int32, and how many there are, [rows] int32; behind these come zeros.
    """
    function = propose_suffixes_triton if tokens.is_cuda else propose_suffixes_reference
    return function(tokens, lengths, members, slots, groups, most)


def propose_suffixes_reference(
    tokens: Tensor, lengths: Tensor, members: Tensor, slots: Tensor, groups: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """propose_suffixes in torch. Only places with the last token of a row's text are compared further."""
    others = members[groups.long()].where((groups >= 0)[:, None], -1)
    sources = torch.cat([others.where(others != slots[:, None], -1), slots[:, None]], dim=1).long()
    row, column = ((sources >= 0) & (slots >= 0)[:, None]).nonzero(as_tuple=True)
    source, back = sources[row, column], torch.arange(LONGEST)
    ends = tokens[slots[:, None].long(), (lengths[slots.long()][:, None] - 1 - back).clamp(min=0)]
    texts = tokens[source, : int(lengths.max())]
    pair, at = (texts == ends[row, :1]).nonzero(as_tuple=True)
    is_inside = at + 1 < lengths[source[pair]]
    pair, at = pair[is_inside], at[is_inside]
    before = at[:, None] - back
    own_length = lengths[slots[row[pair]].long()]
    same = (texts[pair[:, None], before.clamp(min=0)] == ends[row[pair]]) & (before >= 0) & (back < own_length[:, None])
    matched = same.long().cumprod(dim=1).sum(dim=1)
    long = matched >= SHORTEST
    if not long.any():  # the usual case of a text that does not repeat
        return tokens.new_zeros(len(slots), most), tokens.new_zeros(len(slots))
    keys = (matched << LENGTH_BIT.value) | (column[pair] << SOURCE_BIT.value) | (at + 1)
    keys = keys.where(long, 0)
    best = keys.new_zeros(len(slots)).scatter_reduce_(0, row[pair], keys, "amax")
    return _follow_reference(best, tokens, lengths, sources, most)


def _follow_reference(
    best: Tensor, tokens: Tensor, lengths: Tensor, sources: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """Return what followed the best match of each row; sources: [rows, n], by the numbers that matches have."""
    column, end = (best >> SOURCE_BIT.value) & 255, best & ((1 << SOURCE_BIT.value) - 1)
    source = sources.gather(1, column[:, None])[:, 0].clamp(min=0)
    is_own, behind = column == sources.shape[1] - 1, (lengths[source] - end).clamp(min=1)
    place = torch.arange(most).expand(len(best), -1)
    at = end[:, None] + place.where(~is_own[:, None], place % behind[:, None])
    counts = torch.where(is_own, most, behind.clamp(max=most)).where(best > 0, 0)
    guesses = tokens[source[:, None], at.clamp(max=tokens.shape[1] - 1)]
    return guesses.where(place < counts[:, None], 0), counts.int()


def propose_suffixes_triton(
    tokens: Tensor, lengths: Tensor, members: Tensor, slots: Tensor, groups: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """propose_suffixes as two launches: programs search, each in a part of a source; then one a row follows the best.

    `members` has at most 255 columns.
    """
    rows, others = len(slots), members.shape[1]
    parts = next_power_of_2(min(MOST_PARTS, max(1, PROGRAMS // rows)))
    best = torch.empty((rows, (others + 1) * parts), dtype=torch.int64, device=tokens.device)
    guesses = torch.empty((rows, most), dtype=torch.int32, device=tokens.device)
    counts = torch.empty(rows, dtype=torch.int32, device=tokens.device)
    texts = tokens, lengths, members, slots, groups
    width, options = tokens.stride(0), launch_options(tokens)
    lengths_of = {"SHORTEST": SHORTEST, "LONGEST": LONGEST}
    _search_kernel[(rows, others + 1, parts)](
        *texts, best, width, parts, OTHERS=others, **lengths_of, BLOCK=BLOCK, num_warps=8, **options
    )
    _follow_kernel[(rows,)](
        *texts,
        best,
        guesses,
        counts,
        width,
        best.shape[1],
        MOST=most,
        BLOCK_MOST=next_power_of_2(most),
        OTHERS=others,
        BLOCK_KEYS=next_power_of_2((others + 1) * MOST_PARTS),
        num_warps=1,
        **options,
    )
    return guesses, counts


@triton.jit
def _source_of(members_ptr, groups_ptr, row, number, slot, OTHERS: tl.constexpr):
    """Return the slot of a row's source; the last number is its own text's; -1: there is none."""
    group = tl.load(groups_ptr + row)
    is_other = (number < OTHERS) & (group >= 0)
    other = tl.load(members_ptr + group * OTHERS + number, mask=is_other, other=-1)
    return tl.where(number == OTHERS, slot, tl.where(other == slot, -1, other))


@triton.jit(do_not_specialize=["parts"])
def _search_kernel(
    tokens_ptr,
    lengths_ptr,
    members_ptr,
    slots_ptr,
    groups_ptr,
    best_ptr,
    width,
    parts,
    OTHERS: tl.constexpr,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    row, number, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + row)
    source = _source_of(members_ptr, groups_ptr, row, number, slot, OTHERS)
    best = tl.zeros([BLOCK], tl.int64)
    if (slot >= 0) & (source >= 0):
        length, source_length = tl.load(lengths_ptr + slot), tl.load(lengths_ptr + source)
        text_ptr, source_ptr = tokens_ptr + slot.to(tl.int64) * width, tokens_ptr + source.to(tl.int64) * width
        share = tl.cdiv(source_length, parts)
        last = tl.load(text_ptr + length - 1)
        behind = tl.minimum((part + 1) * share, source_length)
        for begin in range(part * share, behind, BLOCK):
            end = begin + tl.arange(0, BLOCK)  # of matches; the token at `end` would be the first guess
            same = (end > 0) & (end < behind)
            same &= tl.load(source_ptr + end - 1, mask=same, other=-1) == last
            matched = same.to(tl.int32)
            depth = 1
            while (depth < LONGEST) & (tl.max(same.to(tl.int32)) > 0):
                wanted = tl.load(text_ptr + length - 1 - depth, mask=depth < length, other=-1)
                before = tl.load(source_ptr + end - 1 - depth, mask=same & (end > depth), other=-2)
                same &= before == wanted
                matched += same.to(tl.int32)
                depth += 1
            key = (matched.to(tl.int64) << LENGTH_BIT) | (number.to(tl.int64) << SOURCE_BIT) | end.to(tl.int64)
            best = tl.maximum(best, tl.where(matched >= SHORTEST, key, 0))
    tl.store(best_ptr + (row * (OTHERS + 1) + number) * parts + part, tl.max(best))


@triton.jit(do_not_specialize=["keys"])
def _follow_kernel(
    tokens_ptr,
    lengths_ptr,
    members_ptr,
    slots_ptr,
    groups_ptr,
    best_ptr,
    guesses_ptr,
    counts_ptr,
    width,
    keys,
    MOST: tl.constexpr,
    BLOCK_MOST: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    row = tl.program_id(0)
    key_at = tl.arange(0, BLOCK_KEYS)
    best = tl.max(tl.load(best_ptr + row * keys + key_at, mask=key_at < keys, other=0))
    number, end = ((best >> SOURCE_BIT) & 255).to(tl.int32), (best & 0xFFFFFFFF).to(tl.int32)
    slot = tl.load(slots_ptr + row)
    source = tl.maximum(_source_of(members_ptr, groups_ptr, row, number, slot, OTHERS), 0)
    behind = tl.maximum(tl.load(lengths_ptr + source) - end, 1)
    is_own = number == OTHERS
    count = tl.where(best > 0, tl.where(is_own, MOST, tl.minimum(behind, MOST)), 0)
    place = tl.arange(0, BLOCK_MOST)
    at = end + tl.where(is_own, place % behind, place)
    guess = tl.load(tokens_ptr + source.to(tl.int64) * width + at, mask=place < count, other=0)
    tl.store(guesses_ptr + row * MOST + place, guess, mask=place < MOST)
    tl.store(counts_ptr + row, count)
