"""Guesses: what is proposed, packed and accepted, against plain Python; the kernels against their references."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import DEVICE
from torch import Tensor

from nanoinfer.kernels.drafting import gather, suffix
from nanoinfer.kernels.drafting.accept import (
    NOTHING,
    AdvancedRows,
    accept_guesses_reference,
    accept_guesses_triton,
)
from nanoinfer.kernels.drafting.draft import (
    DraftedRows,
    last_two_tokens_reference,
    last_two_tokens_triton,
    next_tokens_reference,
    next_tokens_triton,
)
from nanoinfer.kernels.drafting.gather import RowColumns, gather_rows_reference, gather_rows_triton
from nanoinfer.kernels.drafting.lines import find_lines, find_lines_reference, find_lines_triton
from nanoinfer.kernels.drafting.pack import GuessingRows, Places, pack_guesses_reference, pack_guesses_triton
from nanoinfer.kernels.drafting.suffix import propose_suffixes_reference, propose_suffixes_triton
from nanoinfer.kernels.drafting.texts import write_last_tokens_reference, write_last_tokens_triton
from nanoinfer.runner.logits.lines import number_lines

WIDTH, SLOTS, MEMBERS, VOCABULARY = 64, 6, 3, 9
SEEDS = range(8)
PLACES = [(1, True), (4, False), (7, True), (33, False), (33, True)]


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def on_device(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function with copies of the tensors on the device; returns what it returns, and the copies."""

    def move(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.to(DEVICE, copy=True)
        return type(x)(*map(move, x)) if isinstance(x, tuple) else x

    copies = [move(x) for x in args]
    return function(*copies), copies


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left.cpu(), right.cpu())
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def random_texts(rng: random.Random, words: int) -> tuple[list[list[int]], Tensor, Tensor]:
    """Return texts of few words, so that they repeat, and these on the device; behind each stands what looks alike."""
    texts = [[rng.randrange(words) for _ in range(rng.randrange(1, WIDTH + 1))] for _ in range(SLOTS)]
    tokens = ints([text + text[-1:] * (WIDTH - len(text)) for text in texts])
    return texts, tokens, ints([len(text) for text in texts])


def guesses_by_hand(text: list[int], others: list[list[int]], most: int) -> list[int]:
    best, following = (0, 0, 0), list[int]()
    for number, source in enumerate([*others, text]):
        for end in range(1, len(source)):
            length = 0
            while length < min(end, len(text), 16) and source[end - 1 - length] == text[-1 - length]:
                length += 1
            if length >= 3 and (length, number, end) > best:
                best, following = (length, number, end), source[end:]
                if number == len(others):
                    following = following * most
    return following[:most]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_followed_the_longest_match_is_proposed(seed: int) -> None:
    rng = random.Random(seed)
    texts, tokens, lengths = random_texts(rng, 2 + seed // 2)
    members = [[rng.choice([-1, *range(SLOTS)]) for _ in range(MEMBERS)] for _ in range(2)]
    slots = [*range(SLOTS - 1), -1]
    groups = [rng.choice([-1, 0, 1]) for _ in slots]
    guesses, counts = propose_suffixes_reference(tokens, lengths, ints(members), ints(slots), ints(groups), 5)
    for slot, group, own, count in zip(slots, groups, guesses.tolist(), counts.tolist(), strict=True):
        others = members[group] if group >= 0 else []
        read = [texts[other] if other not in (-1, slot) else [] for other in others]
        assert own[:count] == (guesses_by_hand(texts[slot], read, 5) if slot >= 0 else [])
        assert not any(own[count:])


def test_a_text_that_repeats_itself_goes_on() -> None:
    tokens, members = ints([[7, 1, 2, 1, 2, 1, 2, 0, 0]]), ints([[-1]])
    guesses, counts = propose_suffixes_reference(tokens, ints([7]), members, ints([0]), ints([-1]), 5)
    assert (guesses.tolist(), counts.tolist()) == ([[1, 2, 1, 2, 1]], [5])


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_kernels_propose_as_the_reference(seed: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "BLOCK", 16)
    rng = random.Random(seed)
    _, tokens, lengths = random_texts(rng, 2 + seed // 2)
    members = ints([[rng.choice([-1, *range(SLOTS)]) for _ in range(MEMBERS)] for _ in range(2)])
    slots = ints(rng.sample([-1, *range(SLOTS)], rows))
    args = tokens, lengths, members, slots, ints([rng.choice([-1, 0, 1]) for _ in range(rows)]), 1 + seed
    assert same(on_device(propose_suffixes_triton, *args)[0], propose_suffixes_reference(*args))


def random_rows(rng: random.Random, rows: int, most: int) -> GuessingRows:
    positions = [rng.choice([-1, *range(20)]) for _ in range(rows)]
    ends = [position + rng.randrange(1, 12) for position in positions]
    limits = [rng.randrange(1, most + 1) for _ in range(rows)]
    counts = [rng.randrange(most + 1) for _ in range(rows)]
    guesses = torch.randint(0, 9, (rows, most), generator=torch.Generator().manual_seed(rng.randrange(99)))
    guesses[rng.randrange(rows), rng.randrange(most)] = rng.choice([-1, VOCABULARY])
    last = [rng.randrange(9) for _ in range(rows)]
    for row, position in enumerate(positions):
        if position == -1:  # an empty row, as RowTable leaves it
            ends[row] = limits[row] = -1
    return GuessingRows(guesses.int(), *map(ints, (counts, last, positions, ends, limits)))


def room(rows: int, places: int) -> Places:
    """Return Places with numbers of an earlier step."""
    return Places(*(torch.full_like(column, 77) for column in Places.room(rows, rows + places, torch.device("cpu"))))


def wanted_by_hand(args: GuessingRows, has_limits: bool) -> list[int]:
    """How many guesses each row would have if there were places for all."""
    wanted = []
    for guesses, count, _, position, end, limit in zip(*(x.tolist() for x in args), strict=True):
        count = next((i for i, guess in enumerate(guesses[:count]) if not 0 <= guess < VOCABULARY), count)
        most = min(count, end - position - 2, limit if has_limits else count)
        wanted.append(max(0, most) if position >= 0 else 0)
    return wanted


@pytest.mark.parametrize(("places", "are_free"), PLACES)
@pytest.mark.parametrize("seed", SEEDS)
def test_guesses_are_packed_in_the_order_of_the_rows(seed: int, places: int, are_free: bool) -> None:
    args = random_rows(random.Random(seed), 1 + seed, 4)
    packed = room(len(args[0]), places)
    pack_guesses_reference(args, packed, VOCABULARY, are_free)
    rows, wanted = len(args[0]), wanted_by_hand(args, has_limits=False)
    if not are_free or sum(wanted) > places:
        wanted = wanted_by_hand(args, has_limits=True)
    in_turn = [(nth, row) for nth in range(4) for row in range(rows) if nth < wanted[row]][:places]
    expected = [
        (int(args[0][row, nth]), int(args[3][row]) + 1 + nth, row) for row, nth in sorted((b, a) for a, b in in_turn)
    ]
    empty = [(0, -1, 0)] * (places - len(expected))
    tokens, positions, row_of, first, counts = (x.tolist() for x in packed)
    assert list(zip(tokens[rows:], positions[rows:], row_of[rows:], strict=True)) == expected + empty
    assert counts == [sum(row == own for _, own in in_turn) for row in range(rows)]
    assert first == [sum(counts[:row]) for row in range(rows)]
    goes_on = (args[3] >= 0) & (args[3] + 1 < args[4])
    assert (tokens[:rows], row_of[:rows]) == (args[2].tolist(), list(range(rows)))
    assert positions[:rows] == args[3].where(goes_on, -1).tolist()


@pytest.mark.parametrize(("places", "are_free"), PLACES)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_kernel_packs_as_the_reference(seed: int, places: int, are_free: bool) -> None:
    args = random_rows(random.Random(seed), 1 + seed, 1 + seed % 5), room(1 + seed, places), VOCABULARY, are_free
    _, copies = on_device(pack_guesses_triton, *args)
    pack_guesses_reference(*args)
    assert same(copies, list(args))


@pytest.mark.parametrize(("rows", "places"), [(150, 40), (20, 300), (300, 700)])
def test_the_kernels_of_large_steps(rows: int, places: int) -> None:
    """As layers have them that come from host memory."""
    args = random_rows(random.Random(rows), rows, 7), room(rows, places), VOCABULARY, True
    _, (_, packed, *_) = on_device(pack_guesses_triton, *args)
    pack_guesses_reference(*args)
    assert same(list(packed), list(args[1]))
    some = torch.arange(0, rows, 3)
    numbers = torch.full((rows,), -1, dtype=torch.int32).index_copy_(0, some, torch.arange(len(some)).int())
    asked = args[1], some, numbers, places
    assert same(on_device(find_lines_triton, *asked)[0], find_lines_reference(*asked))


def some_rows(seed: int) -> tuple[Places, Tensor, Tensor]:
    """Return a step's places, some of its rows, and each row's number among these."""
    rng, rows = random.Random(seed), 1 + seed
    args, places = random_rows(rng, rows, 4), room(rows, 7 + seed)
    pack_guesses_reference(args, places, VOCABULARY, False)
    own = sorted(rng.sample(range(rows), 1 + seed // 2))
    return places, torch.tensor(own), ints([own.index(row) if row in own else -1 for row in range(rows + 2)])


@pytest.mark.parametrize("has_all", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_some_rows_have_a_line_behind_each_of_their_tokens(seed: int, has_all: bool) -> None:
    places, rows, numbers = some_rows(seed)
    at, own = find_lines(places, rows, numbers, 7 + seed if has_all else None)
    lines, expected = list(zip(own.tolist(), at.tolist(), strict=True)), list[tuple[int, int]]()
    for number, row in enumerate(rows.tolist()):
        first = len(places.first) + int(places.first[row])
        expected += [(number, place) for place in (row, *range(first, first + int(places.counts[row])))]
    assert [lines[line] for _, line in number_lines(rows.tolist(), places.counts.tolist())] == expected
    assert len(lines) == (len(rows) + 7 + seed if has_all else len(expected))
    assert set(lines[len(expected) :]) <= {(0, int(rows[0]))}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_kernel_finds_lines_as_the_reference(seed: int) -> None:
    args = *some_rows(seed), 7 + seed
    assert same(on_device(find_lines_triton, *args)[0], find_lines_reference(*args))


def random_step(rng: random.Random, rows: int, most: int) -> tuple[Tensor, Places, AdvancedRows, Tensor]:
    """Return what accept_guesses takes; the draws often are the guesses."""
    args = random_rows(rng, rows, most)
    places = room(rows, 3 * rows)
    pack_guesses_reference(args, places, VOCABULARY, False)
    drawn = [rng.choice([-1, -2, 3]) if rng.random() < 0.1 else rng.randrange(9) for _ in places.tokens]
    for row, (first, count) in enumerate(zip(places.first.tolist(), places.counts.tolist(), strict=True)):
        for i in range(count):
            if rng.random() < 0.7:
                drawn[row if i == 0 else rows + first + i - 1] = int(places.tokens[rows + first + i])
    slots = ints(rng.sample(range(rows + 2), rows))
    texts = torch.full((rows + 2, 40), 99, dtype=torch.int32)
    lengths = torch.zeros(rows + 2, dtype=torch.int32)
    advanced = AdvancedRows(texts, lengths, slots, args[2], args[3], args[5])
    return ints(drawn), places, advanced, torch.zeros(rows, most + 2, dtype=torch.int32)


@pytest.mark.parametrize("seed", SEEDS)
def test_draws_are_kept_up_to_the_first_guess_that_fails(seed: int) -> None:
    rows, most = 1 + seed, 1 + seed % 5
    drawn, places, advanced, kept = random_step(random.Random(seed), rows, most)
    before = AdvancedRows(*(x.clone() for x in advanced))
    accept_guesses_reference(drawn, places, advanced, kept)
    texts, lengths = before.tokens.tolist(), before.lengths.tolist()
    for row in range(rows):
        position, first, count = (int(x[row]) for x in (places.positions, places.first, places.counts))
        expected, last, limit = list[int](), int(before.last_tokens[row]), int(before.limits[row])
        if position >= 0:
            at = [row, *range(rows + first, rows + first + count)]
            expected = [int(drawn[row])]
            while len(expected) <= count and int(places.tokens[at[len(expected)]]) == expected[-1]:
                expected.append(int(drawn[at[len(expected)]]))
            last, slot = max(0, expected[-1]), int(before.slots[row])
            texts[slot][position + 1 : position + 1 + len(expected)] = [max(0, token) for token in expected]
            lengths[slot] = position + 1 + len(expected)
            if count:
                limit = min(2 * limit, most) if len(expected) == count + 1 else len(expected)
        assert kept[row].tolist() == [*expected, *[NOTHING] * (most + 1 - len(expected)), count]
        assert (int(advanced.last_tokens[row]), int(advanced.limits[row])) == (last, limit)
        assert int(advanced.positions[row]) == int(before.positions[row]) + len(expected)
    assert (advanced.tokens.tolist(), advanced.lengths.tolist()) == (texts, lengths)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_kernel_accepts_as_the_reference(seed: int) -> None:
    args = random_step(random.Random(seed), 1 + seed, 1 + seed % 5)
    _, copies = on_device(accept_guesses_triton, *args)
    accept_guesses_reference(*args)
    assert same(copies, list(args))


@pytest.mark.parametrize("write", [write_last_tokens_reference, write_last_tokens_triton])
def test_last_tokens_come_into_the_texts(write: Callable[..., None]) -> None:
    texts, lengths = torch.zeros(4, 8, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    args = texts, lengths, ints([2, -1, 0, 1, -1]), ints([5, -1, 7, 8, 3]), ints([11, 12, 13, 14, 15])
    _, (tokens, lengths, *_) = on_device(write, *args)
    expected = torch.zeros(4, 8, dtype=torch.int32)
    expected[2, 5], expected[0, 7] = 11, 13
    assert torch.equal(tokens.cpu(), expected)
    assert lengths.tolist() == [8, 0, 6, 0]


@pytest.mark.parametrize("has_more", [False, True])
def test_places_have_what_their_rows_have(has_more: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "BLOCK", 16)
    tables, seeds = torch.arange(200, dtype=torch.int32).view(5, 40), torch.arange(5) << 40
    more = (ints([1, 2, 3, 4, 5]), ints([-1, 0, 1, 0, -1])) if has_more else (None, None)
    args = RowColumns(tables, torch.rand(5), seeds, *more), ints([0, 1, 4, 4, 2, 0])
    expected = gather_rows_reference(*args)
    assert expected.block_tables[3, 5] == 165
    columns = [None if column is None else column.to(DEVICE) for column in args[0]]
    assert same(gather_rows_triton(RowColumns(*columns), args[1].to(DEVICE)), expected)


def test_a_draft_model_computes_the_last_two_tokens_and_then_its_own() -> None:
    """Row 0 has room for guesses behind both tokens, rows 1 and 2 have none, and row 3 is empty."""
    rows = DraftedRows(ints([21, 22, 23, 24]), ints([2, 4, 2, -1]), ints([6, 6, 3, 9]))
    texts = torch.arange(40, dtype=torch.int32).view(4, 10)
    tokens, positions, row_of = last_two_tokens_reference(rows, texts, ints([3, 2, 1, -1]))
    assert tokens.tolist() == [31, 0, 0, 0, 21, 0, 0, 0]
    assert positions.tolist() == [1, -1, -1, -1, 2, -1, -1, -1]
    assert row_of.tolist() == [0, 1, 2, 3] * 2
    assert [x.tolist() for x in next_tokens_reference(rows, ints([5, -1, 6, 7]), 1)] == [[5, 0, 6, 7], [3, -1, -1, -1]]
    assert next_tokens_reference(rows, ints([5, 5, 6, 7]), 2)[1].tolist() == [-1] * 4


@pytest.mark.parametrize("seed", SEEDS)
def test_the_kernels_place_tokens_as_the_references(seed: int) -> None:
    rng, count = random.Random(seed), 1 + 40 * seed
    own = random_rows(rng, count, 3)
    rows = DraftedRows(own.last_tokens, own.positions, own.ends)
    slots = ints([rng.randrange(SLOTS) if position >= 0 else -1 for position in own.positions.tolist()])
    args = rows, random_texts(rng, 5)[1], slots
    assert same(on_device(last_two_tokens_triton, *args)[0], last_two_tokens_reference(*args))
    args = rows, own.guesses[:, 0].clone(), seed
    assert same(on_device(next_tokens_triton, *args)[0], next_tokens_reference(*args))
