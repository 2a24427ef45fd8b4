"""Sharing: which replica computes which samples. Plain data, which knows no process and no tensor."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable

Unit = tuple[int, int]  # a request's number, and a sample's among the request's

MOST_REMEMBERED = 1 << 14  # keys whose replica is remembered when none of their samples wait
MOST_DEATHS = 2  # of replicas that were computing a sample, before it is given up
MOST_OVERTAKING = 4096  # so many samples may come between one that waits and one that goes first for its key


class Sharing:
    """Deals samples out to replicas as these come to need them, so that none idles while another has too many.

    Samples with equal keys begin with the same tokens. They go to the replica that had the first of them, because its
    KV cache has these tokens. A replica takes samples of its own keys first, then those of keys that no replica has
    had, then those of other replicas' keys. But nobody waits while ever newer ones go first.

    A replica holds samples that it computes, and few that it has not begun. It never holds more than its fair share.
    """

    def __init__(self, most_unbegun: int, replicas: Iterable[int] = ()) -> None:
        """most_unbegun: of the samples that a replica holds, it has not begun so many at most."""
        self._most_unbegun = most_unbegun
        self._waiting: dict[Hashable, OrderedDict[Unit, None]] = {}  # by key; none is empty
        self._owners: OrderedDict[Hashable, int] = OrderedDict()  # of keys, the most recent last
        self._free: OrderedDict[Hashable, None] = OrderedDict()  # the waiting keys that no replica has had
        self._own: dict[int, OrderedDict[Hashable, None]] = {}  # by replica, its waiting keys
        self._held: dict[int, dict[Unit, Hashable]] = {}  # by replica, its samples and their keys
        self._unbegun: dict[int, deque[Unit]] = {}  # by replica, in the order in which it begins them
        self._turns: dict[Unit, int] = {}  # by sample that has not ended, how many came before it
        self._deaths: dict[Unit, int] = {}  # by sample, of replicas that were computing it
        self._num_added = 0
        self.num_waiting = 0  # samples that no replica holds
        for replica in replicas:
            self.join(replica)

    @property
    def replicas(self) -> list[int]:
        """The replicas that take samples."""
        return list(self._own)

    def num_held(self, replica: int) -> int:
        """Return how many samples a replica holds."""
        return len(self._held[replica])

    def join(self, replica: int) -> None:
        """Let a replica take samples."""
        self._own[replica] = OrderedDict()
        self._held[replica] = {}
        self._unbegun[replica] = deque()

    def leave(self, replica: int) -> tuple[list[Unit], list[Unit]]:
        """Take back what a dead replica held; returns the samples that wait again, and those that are given up."""
        held, unbegun = self._held.pop(replica), set(self._unbegun.pop(replica))
        for key in reversed(self._own.pop(replica)):
            self._free[key] = None
            self._free.move_to_end(key, last=False)
        again: list[Unit] = []
        given_up: list[Unit] = []
        for unit in held:
            self._deaths[unit] = self._deaths.get(unit, 0) + (unit not in unbegun)
            (again if self._deaths[unit] < MOST_DEATHS else given_up).append(unit)
        for unit in reversed(again):
            self._add(unit, held[unit], is_first=True)
        for unit in given_up:
            self._forget(unit)
        return again, given_up

    def add(self, unit: Unit, key: Hashable) -> None:
        """Let a sample wait behind the others."""
        self._turns[unit], self._num_added = self._num_added, self._num_added + 1
        self._add(unit, key, is_first=False)

    def _add(self, unit: Unit, key: Hashable, is_first: bool) -> None:
        self.num_waiting += 1
        if (units := self._waiting.get(key)) is None:
            units = self._waiting[key] = OrderedDict()
            keys = self._own.get(self._owners.get(key, -1), self._free)
            keys[key] = None
            if is_first:
                keys.move_to_end(key, last=False)
        units[unit] = None
        if is_first:
            units.move_to_end(unit, last=False)

    def discard(self, unit: Unit, key: Hashable) -> bool:
        """Forget a sample if it waits; returns whether it did."""
        if unit not in self._waiting.get(key, ()):
            return False
        del self._waiting[key][unit]
        self._forget(unit)
        self._took(key, 1)
        return True

    def deal(self, replica: int) -> list[Unit]:
        """Return samples, in their order, that a replica begins next, and has from now on; mostly none."""
        room = min(self._most_unbegun - len(self._unbegun[replica]), self._fair_share() - self.num_held(replica))
        taken: list[Unit] = []
        while self.num_waiting and len(taken) < room:
            key, is_own = self._next_key(replica)
            units = self._waiting[key]
            count = min(len(units), room - len(taken))
            # Another's key loses its last samples: the first ones are where its blocks are.
            some = [units.popitem(last=not is_own)[0] for _ in range(count)]
            self._held[replica].update(dict.fromkeys(some, key))
            self._took(key, count)
            taken += some
        taken.sort(key=self._turns.__getitem__)
        self._unbegun[replica].extend(taken)
        return taken

    def _fair_share(self) -> int:
        """Return how many samples each replica would have, of those that have not ended."""
        unfinished = self.num_waiting + sum(map(len, self._held.values()))
        return -(-unfinished // len(self._held))

    def _next_key(self, replica: int) -> tuple[Hashable, bool]:
        """Return the key whose samples a replica takes next, and whether it is its own."""
        own, free = self._own[replica], self._free
        if own and (not free or self._first_turn(own) - self._first_turn(free) <= MOST_OVERTAKING):
            return next(iter(own)), True
        if free:
            key, _ = free.popitem(last=False)
            own[key] = None
            self._owners[key] = replica
            self._owners.move_to_end(key)
            if len(self._owners) > MOST_REMEMBERED:
                self._owners.popitem(last=False)
            return key, True
        richest = max(self._own.values(), key=len)
        return next(reversed(richest)), False

    def _first_turn(self, keys: OrderedDict[Hashable, None]) -> int:
        """Return the turn of the sample that has waited longest under the first of the keys."""
        return self._turns[next(iter(self._waiting[next(iter(keys))]))]

    def _took(self, key: Hashable, count: int) -> None:
        self.num_waiting -= count
        if not self._waiting[key]:
            del self._waiting[key]
            for keys in (self._free, *self._own.values()):
                keys.pop(key, None)

    def begin(self, replica: int, count: int) -> None:
        """Note that a replica has begun so many more samples of those that it took."""
        for _ in range(count):
            self._unbegun[replica].popleft()

    def end(self, replica: int, unit: Unit) -> bool:
        """Note that a replica has ended a sample; returns whether it held it."""
        if self._held[replica].pop(unit, None) is None:
            return False
        self._forget(unit)
        return True

    def _forget(self, unit: Unit) -> None:
        del self._turns[unit]
        self._deaths.pop(unit, None)
