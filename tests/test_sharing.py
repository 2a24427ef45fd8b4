"""Sharing: every sample is with one replica or waits, none is lost, and nobody idles while others have too many."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from nanoinfer.replicas.sharing import MOST_DEATHS, MOST_OVERTAKING, Sharing, Unit

AHEAD = 4


class World:
    """Replicas with a few rows each, which begin and end samples as `Sharing` gives them out."""

    def __init__(self, replicas: int, rows: int) -> None:
        self.sharing = Sharing(AHEAD, range(replicas))
        self.rows = rows
        self.unbegun: dict[int, list[Unit]] = {index: [] for index in range(replicas)}
        self.begun: dict[int, list[Unit]] = {index: [] for index in range(replicas)}
        self.waiting: set[Unit] = set()
        self.keys: dict[Unit, int] = {}
        self.deaths: Counter[Unit] = Counter()  # that the samples saw while they ran
        self.fate: Counter[Unit] = Counter()  # how often each has come to an end
        self.num_added = 0

    @property
    def alive(self) -> list[int]:
        return sorted(self.unbegun)

    def arrive(self, number: int, samples: int, key: int) -> None:
        for index in range(samples):
            self.sharing.add((number, index), key)
            self.waiting.add((number, index))
            self.keys[number, index] = key
        self.num_added += samples

    def deal(self) -> None:
        for index in self.alive:
            taken = self.sharing.deal(index)
            assert self.waiting.issuperset(taken)
            self.waiting.difference_update(taken)
            self.unbegun[index] += taken

    def begin(self, index: int) -> None:
        count = min(self.rows - len(self.begun[index]), len(self.unbegun[index]))
        self.begun[index] += self.unbegun[index][:count]
        del self.unbegun[index][:count]
        self.sharing.begin(index, count)

    def end(self, index: int, place: int) -> None:
        unit = self.begun[index].pop(place % len(self.begun[index]))
        assert self.sharing.end(index, unit)
        assert not self.sharing.end(index, unit)
        self.fate[unit] += 1

    def die(self, index: int) -> None:
        begun, unbegun = self.begun.pop(index), self.unbegun.pop(index)
        again, given_up = self.sharing.leave(index)
        self.deaths.update(begun)
        assert set(given_up) == {unit for unit in begun if self.deaths[unit] >= MOST_DEATHS}
        assert sorted(again + given_up) == sorted(begun + unbegun)
        self.waiting.update(again)
        self.fate.update(given_up)

    def join(self) -> None:
        index = max(self.alive, default=-1) + 1
        self.sharing.join(index)
        self.unbegun[index], self.begun[index] = [], []

    def discard(self, place: int) -> None:
        unit = sorted(self.keys)[place % len(self.keys)]
        assert self.sharing.discard(unit, self.keys[unit]) == (unit in self.waiting)
        if unit in self.waiting:
            self.waiting.remove(unit)
            self.fate[unit] += 1

    def check(self) -> None:
        assert self.sharing.num_waiting == len(self.waiting)
        held = {index: self.unbegun[index] + self.begun[index] for index in self.alive}
        everywhere = [*self.waiting, *self.fate, *(unit for units in held.values() for unit in units)]
        assert len(everywhere) == len(set(everywhere)) == self.num_added
        assert set(self.fate.values()) <= {1}
        assert {index: self.sharing.num_held(index) for index in self.alive} == {
            index: len(units) for index, units in held.items()
        }

    def check_fair(self) -> None:
        """After samples were dealt: whoever has room has its fair share, and nobody has nothing while others wait."""
        unfinished = self.num_added - len(self.fate)
        for index in self.alive:
            num_held = len(self.unbegun[index]) + len(self.begun[index])
            assert len(self.unbegun[index]) <= AHEAD
            if self.waiting and len(self.unbegun[index]) < AHEAD:
                assert num_held >= unfinished / len(self.alive)
            assert num_held or not self.waiting


ACTIONS = ("arrive", "begin", "begin", "end", "end", "end", "die", "join", "discard")


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_any_schedule_of_arrivals_completions_and_deaths_ends_every_sample_once(
    replicas: int, rows: int, data: st.DataObject
) -> None:
    world = World(replicas, rows)
    for number in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(ACTIONS))
        index = data.draw(st.sampled_from(world.alive)) if world.alive else None
        if action == "arrive":
            world.arrive(number, data.draw(st.integers(1, 20)), data.draw(st.integers(0, 3)))
        elif action == "join":
            world.join()
        elif action == "discard" and world.keys:
            world.discard(data.draw(st.integers(0, 999)))
        elif action == "begin" and index is not None:
            world.begin(index)
        elif action == "end" and index is not None and world.begun[index]:
            world.end(index, data.draw(st.integers(0, 99)))
        elif action == "die" and index is not None:
            world.die(index)
        world.check()
        world.deal()
        world.check_fair()
    if not world.alive:
        world.join()
    while len(world.fate) < world.num_added:
        world.deal()
        for index in world.alive:
            world.begin(index)
            if world.begun[index]:
                world.end(index, 0)
        world.check()


def drain(sharing: Sharing, order: list[int]) -> dict[int, list[Unit]]:
    """Let replicas take, begin and end in this order until nothing waits; returns what each has had."""
    had: dict[int, list[Unit]] = {index: [] for index in order}
    while sharing.num_waiting:
        for index in order:
            taken = sharing.deal(index)
            sharing.begin(index, len(taken))
            had[index] += taken
        for index in order:
            for unit in had[index]:
                sharing.end(index, unit)
    return had


def test_samples_go_in_the_order_in_which_they_came_whatever_their_numbers() -> None:
    sharing = Sharing(AHEAD, [0])
    for unit in [(7, 1), (7, 0), (2, 0)]:
        sharing.add(unit, unit[0])
    assert sharing.deal(0) == [(7, 1), (7, 0), (2, 0)]


def test_prompts_that_begin_alike_go_to_one_replica() -> None:
    sharing = Sharing(AHEAD, range(2))
    for number in range(40):
        sharing.add((number, 0), number % 2)
    had = drain(sharing, [0, 1])
    assert {frozenset(number % 2 for number, _ in units) for units in had.values()} == {frozenset({0}), frozenset({1})}


def test_later_prompts_find_the_replica_that_had_their_beginning() -> None:
    sharing = Sharing(AHEAD, range(2))
    for number in range(10):
        sharing.add((number, 0), number % 2)
    first = drain(sharing, [0, 1])
    for number in range(10, 20):
        sharing.add((number, 0), number % 2)
    later = drain(sharing, [1, 0])
    for index in (0, 1):
        assert {number % 2 for number, _ in first[index]} == {number % 2 for number, _ in later[index]}


def test_one_beginning_for_all_leaves_nobody_idle() -> None:
    sharing = Sharing(AHEAD, range(4))
    for index in range(16):
        sharing.add((0, index), "the same")
    assert [len(sharing.deal(replica)) for replica in range(4)] == [4] * 4


def test_a_steady_supply_of_one_beginning_does_not_hold_up_another() -> None:
    sharing = Sharing(1, range(1))
    sharing.add((0, 0), "common")
    sharing.add((1, 0), "rare")
    taken: list[Unit] = []
    while (1, 0) not in taken[-1:]:
        assert len(taken) <= MOST_OVERTAKING + 1
        sharing.add((len(taken) + 2, 0), "common")
        taken += sharing.deal(0)
        sharing.begin(0, 1)
        assert sharing.end(0, taken[-1])
    assert len(taken) > MOST_OVERTAKING
