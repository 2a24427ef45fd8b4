"""StopStrings: finds any of many strings in a growing text. The cost of a character does not grow with the text."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from functools import lru_cache

import numpy as np


class StopStrings:
    """The automaton of Aho and Corasick (1975) over a trie of the strings.

    A state is a node of the trie. It stands for the longest suffix of the text that some string begins with. The caller
    keeps the state, an int that is 0 at first, so that all texts share one automaton. Nodes are numbered level by
    level, and a node's children are neighbours, in the order of their characters. So a few flat arrays hold everything,
    in 20 bytes a node. Building takes time linear in the strings' total length, but for sorting them.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._beginnings = {string[0] for string in strings}
        codes, parents, depths, ends = _grow(sorted(set(strings)))
        self._codes = _as_array(codes)  # [n - 1]: the character that leads to node n
        self._children = _as_array(np.searchsorted(parents, np.arange(len(depths) + 1)))  # node n: from [n] to [n + 1]
        self._depths = _as_array(depths)
        self._found = _as_array(np.where(ends, depths, 0))  # the length of the longest string that ends here; 0: none
        self._fallback = array("i", bytes(self._found.itemsize * len(depths)))  # [n]: the next shorter suffix
        for node, parent in enumerate(_as_array(parents), 1):
            if parent:
                self._fallback[node] = self._next(self._fallback[parent], self._codes[node - 1])
                self._found[node] = self._found[node] or self._found[self._fallback[node]]

    def find(self, state: int, text: str) -> tuple[int, tuple[int, int] | None]:
        """Read `text`; returns the state behind it, and (begin, end) of a string that ends in it, or None.

        Of several strings, that is the one that begins first, and of those the shortest. begin and end count from the
        beginning of `text`: begin is negative if the string began in earlier text.
        """
        first = None
        for end, char in enumerate(text, 1):
            if state == 0 and char not in self._beginnings:
                continue
            state = self._next(state, ord(char))
            if (length := self._found[state]) and (first is None or end - length < first[0]):
                first = end - length, end
        return state, first

    def num_open(self, state: int) -> int:
        """Count the last characters that may become a string: the longest suffix that begins a longer string."""
        while state and self._children[state] == self._children[state + 1]:
            state = self._fallback[state]
        return self._depths[state]

    def _next(self, state: int, code: int) -> int:
        while True:
            start, end = self._children[state], self._children[state + 1]
            child = bisect_left(self._codes, code, start, end)
            if child < end and self._codes[child] == code:
                return child + 1
            if state == 0:
                return 0
            state = self._fallback[state]


@lru_cache(maxsize=8)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """Return the automaton of these strings; requests with the same strings share one."""
    return StopStrings(strings)


def _grow(words: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Grow the trie of sorted words.

    Returns characters and parents of all nodes but the root; of all nodes, depths and whether a word ends there.
    """
    lengths = np.array([len(word) for word in words])
    starts = np.cumsum(lengths) - lengths
    letters = np.frombuffer("".join(words).encode("utf-32-le", "surrogatepass"), np.uint32)
    nodes = np.zeros(len(words), np.int64)  # the node that each word has come to
    longer = np.arange(len(words))  # the words that have characters left
    codes: list[np.ndarray] = []  # one array for each level
    parents: list[np.ndarray] = []
    sizes, num_nodes = [1], 1
    while len(longer):
        code, parent = letters[starts[longer] + len(codes)], nodes[longer]
        is_new = np.append(True, (code[1:] != code[:-1]) | (parent[1:] != parent[:-1]))
        nodes[longer] = num_nodes - 1 + np.cumsum(is_new)
        codes.append(code[is_new])
        parents.append(parent[is_new])
        sizes.append(int(is_new.sum()))
        num_nodes += sizes[-1]
        longer = longer[lengths[longer] > len(codes)]
    depths = np.repeat(np.arange(len(sizes)), sizes)
    ends = np.zeros(len(depths), bool)
    ends[nodes] = True
    return np.concatenate(codes), np.concatenate(parents), depths, ends


def _as_array(values: np.ndarray) -> array[int]:
    """Convert to Python's own array, whose single elements are read faster than NumPy's."""
    return array("i", values.astype(np.int32).tobytes())
