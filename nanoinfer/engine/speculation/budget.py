"""Budget: for how many guesses the next decode step has places."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from itertools import pairwise
from math import log
from statistics import median
from typing import NamedTuple

SPENT = 0.003  # of the time of all steps, for trials
TRY_EVERY, TRY_WITHIN = 32, 64  # steps from one trial to the next, at least and at most
MOST_HELD = 0.8  # of a row's places: then more would have brought more
BUSY_STEPS = 5  # of a size, of which the median counts: two of these may have compiled something
TOOK_STEPS = 8  # of a size, whose mean counts without the slowest: where a row has no guess, a step takes less
FORGOTTEN = 512  # steps behind which one of these counts no more
NEWEST = 1 / 8  # the weight of the newest step in what guesses have brought lately

Size = tuple[int, int]  # rows, and places for guesses


class Busy(NamedTuple):
    """So many seconds the host was busy for the guided rows of a step."""

    step: int
    num_guided: int
    seconds: float

    def seconds_for(self, num_guided: int) -> float:
        """Return how long it may be busy for another number: half of it grows with the rows, but not for more."""
        return self.seconds * (1 + min(1, num_guided / self.num_guided)) / 2


class Budget:
    """Chooses the sizes of decode steps by the tokens that each is expected to give in its time.

    It knows a table of times and what guesses have brought, not the clock: ranks that plan each for itself choose
    alike, if they have the same table. A host that plans for all ranks also says how long it is busy for guided rows,
    or if it is the device, how long steps take: then the table counts for sizes that have not run.

    What guesses bring, tokens for each row, is known by the places that a row has. A step also says what fewer places
    would have brought. A size with more of them is tried now and then, if it could be the best.
    """

    def __init__(self, sizes: list[Size], times: Mapping[Size, float], max_guesses: int, may_decline: bool) -> None:
        """sizes: of the verifying steps that there are; a step takes the next larger number of rows.

        times: seconds of some sizes, and of plain steps, which have 0 places; others are estimated by their tokens, of
            which a plain step has one for each row
        may_decline: no guess is verified where plain steps are expected to be faster
        """
        self._rows = sorted({rows for rows, _ in sizes})
        self._options = {rows: sorted(guesses for own, guesses in sizes if own == rows) for rows in self._rows}
        plain = {rows: seconds for (rows, guesses), seconds in times.items() if guesses == 0}
        known = plain | {sum(size): seconds for size, seconds in times.items() if size[1]}
        verifying = _fill(known, max(map(sum, sizes), default=0))
        self._plain_times = _fill(plain, self._rows[-1] if self._rows else 0)
        self._times = {size: times.get(size, verifying[sum(size)]) for size in sizes}
        self._max_guesses = max_guesses
        self._may_decline = may_decline
        self._gains: dict[int, float] = {}  # tokens that guesses brought, by places; both for a row
        self._busy: defaultdict[Size, deque[Busy]] = defaultdict(lambda: deque(maxlen=BUSY_STEPS))  # the newest steps
        # Of the newest steps, their numbers and seconds; a plain one's rows are its own.
        self._took: dict[Size, deque[tuple[int, float]]] = {}
        self._ran: dict[int, int] = {}  # the number of the step that had so many places last
        self._noted: dict[int, int] = {}  # the number of the newest step when one with so many places was read back
        self._num_steps = 0
        self._tried = -TRY_WITHIN  # the step that was the last trial

    @property
    def counts_host(self) -> bool:
        """Whether it knows how long the host is busy for guided rows."""
        return bool(self._busy)

    def choose(self, num_rows: int, num_guided: int = 0) -> int:
        """Return the places for guesses of the next step; 0: it is to be a plain one.

        num_guided: so many of the rows are guided; where the host takes longer than the device, it may be a plain one
        """
        options = self._options_of(num_rows)
        self._num_steps += 1
        if not options:
            return 0
        times = {guesses: self._time_with_host(num_rows, guesses, num_guided) for guesses in (0, *options)}
        rates = {
            guesses: num_rows * (1 + self._gain(self._places(guesses, num_rows))) / times[guesses]
            for guesses in options
        }
        if self._may_decline or times[options[0]] > self._time(num_rows, options[0]):
            rates[0] = num_rows / times[0]
        best = max(rates, key=lambda guesses: (rates[guesses], -guesses))
        most = {guesses: num_rows + min(guesses, self._max_guesses * num_rows) for guesses in options}
        others = [guesses for guesses in options if guesses > best and most[guesses] / times[guesses] > rates[best]]
        if best and 0 in rates and self._took and not any(self._mean(size) for size in self._took if size[1] == 0):
            others.append(0)  # the table may be wrong, and only a plain step can tell
        if others:
            other = min(others, key=lambda guesses: self._ran.get(self._places(guesses, num_rows), 0))
            lost = times[other] / times[best] - 1
            if self._num_steps - self._tried >= min(max(TRY_EVERY, lost / SPENT), TRY_WITHIN):
                best, self._tried = other, self._num_steps
        if best:
            self._ran[self._places(best, num_rows)] = self._num_steps
        return best

    def least(self, num_rows: int) -> int:
        """Return the fewest places that a verifying step of so many rows has; 0: there is no such step."""
        return min(self._options_of(num_rows), default=0)

    def note(self, guesses: int, held: ListLike[int]) -> None:
        """Learn from a step that had places for guesses; held: of each row, how many of these held."""
        if not held:
            return
        most = self._places(guesses, len(held))
        for places in {*range(1, most), most}:
            kept = sum(held) if places == most else sum(min(count, places) for count in held)
            self._learn(places, kept / len(held))

    def note_host(self, guesses: int, num_rows: int, num_guided: int, seconds: float) -> None:
        """Learn how long the host was busy for a step with guided rows, from its plan to what it brought."""
        if self._options_of(num_rows):
            self._busy[self._size(num_rows, guesses)].append(Busy(self._num_steps, num_guided, seconds))

    def note_time(self, guesses: int, num_rows: int, seconds: float) -> None:
        """Learn how long a step has taken; guesses: 0 for a plain one."""
        if self._options_of(num_rows):
            size = self._size(num_rows, guesses) if guesses else (num_rows, 0)
            self._took.setdefault(size, deque(maxlen=TOOK_STEPS)).append((self._num_steps, seconds))

    def _learn(self, places: int, gain: float) -> None:
        before = self._gains.get(places, gain)
        is_old = self._num_steps - self._noted.get(places, 0) >= TRY_EVERY
        self._gains[places] = gain if is_old else before + NEWEST * (gain - before)
        self._noted[places] = self._num_steps

    def _options_of(self, num_rows: int) -> list[int]:
        index = bisect_left(self._rows, num_rows)
        return self._options[self._rows[index]] if num_rows > 0 and index < len(self._rows) else []

    def _places(self, guesses: int, num_rows: int) -> int:
        return min(self._max_guesses, guesses // num_rows)

    def _time(self, num_rows: int, guesses: int) -> float:
        size = self._size(num_rows, guesses) if guesses else (num_rows, 0)
        if (own := self._mean(size)) is not None:
            return own
        known = {other: mean for other in self._took if (mean := self._mean(other)) is not None}
        alike = [other for other in known if bool(other[1]) == bool(guesses)]
        if not alike:
            return self._in_table(size)
        nearest = min(alike, key=lambda other: (abs(other[0] - size[0]), abs(other[1] - size[1])))
        return self._in_table(size) * known[nearest] / self._in_table(nearest)  # as wrong as for that one

    def _mean(self, size: Size) -> float | None:
        """Return how long the newest steps of a size took; None: too few have run lately."""
        took = sorted(seconds for step, seconds in self._took.get(size, ()) if self._num_steps - step <= FORGOTTEN)
        return sum(took[:-1]) / (len(took) - 1) if len(took) > 1 else None

    def _in_table(self, size: Size) -> float:
        return self._times[size] if size[1] else self._plain_times[size[0]]

    def _size(self, num_rows: int, guesses: int) -> Size:
        return self._rows[bisect_left(self._rows, num_rows)], guesses

    def _time_with_host(self, num_rows: int, guesses: int, num_guided: int) -> float:
        """Return the time of a step beside which the host is busy for so many guided rows.

        A size of which it does not know lately how long takes as long as the nearest: less than it will, for more rows,
        so it is tried. If it knows of none, with or without guesses as this one, the host does not count.
        """
        time, own = self._time(num_rows, guesses), self._size(num_rows, guesses)
        if num_guided == 0:
            return time
        if lately := self._lately(own):
            return max(time, median(busy.seconds_for(num_guided) for busy in lately))
        alike = (size for size in self._busy if bool(size[1]) == bool(guesses))
        known = {size: lately for size in alike if (lately := self._lately(size))}
        if not known:
            return time
        nearest = min(known, key=lambda size: (abs(size[0] - own[0]), abs(size[1] - own[1])))
        return max(time, median(busy.seconds for busy in known[nearest]))

    def _lately(self, size: Size) -> list[Busy]:
        """Return how busy the host was for steps of a size; nothing if too few have run lately."""
        lately = [busy for busy in self._busy.get(size, ()) if self._num_steps - busy.step <= FORGOTTEN]
        return lately if len(lately) == BUSY_STEPS else []

    def _gain(self, places: int) -> float:
        """Return what so many places for a row are expected to bring, by what the nearest number of places did."""
        if not self._gains:
            return 0.0 if self._may_decline else float(places)
        nearest = min(self._gains, key=lambda known: abs(known - places))
        gain = self._gains[nearest]
        if places > nearest and gain > MOST_HELD * nearest:
            return gain * places / max(1, nearest)
        return min(gain, float(places))


def _fill(known: Mapping[int, float], most: int) -> list[float]:
    """Return the times for 0 to `most` of something, on straight lines between those that are known.

    Behind the last, they grow with a power of the number, that from the first to the last, in proportion at most.
    """
    if not known:
        return [1.0] * (most + 1)
    points = sorted(known.items())
    times = [points[0][1]] * (points[0][0] + 1)
    for (low, before), (high, after) in pairwise(points):
        times += [before + (after - before) * (place - low) / (high - low) for place in range(low + 1, high + 1)]
    (first, least), (last, longest) = points[0], points[-1]
    power = 1.0
    if 0 < first < last and least > 0:
        power = min(1.0, max(0.0, log(longest / least) / log(last / first)))
    times += [longest * (place / last) ** power for place in range(len(times), most + 1)]
    return times[: most + 1]
