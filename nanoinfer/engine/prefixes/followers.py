"""Followers: the continuations of one prompt wait until the first of them has computed what all begin with."""

from __future__ import annotations

from itertools import chain

from nanoinfer.attention.cache_layout import CacheLayout
from nanoinfer.engine.sequence import Sequence


class Followers:
    """Which scored sequences begin like an earlier one, their leader, up to the first logits that they need.

    A prompt seldom ends with a block. So its continuations could share its whole blocks alone, and each would compute
    the rest again. A follower waits for the step behind its leader's instead, and copies the leader's last blocks.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._leaders: dict[tuple[int, bytes], Sequence] = {}  # that let none go on yet, by what others may share
        self._followers: dict[Sequence, list[Sequence]] = {}  # of these leaders: they wait
        self._leader_of: dict[Sequence, Sequence] = {}  # of those that wait, and of those that are to begin now

    def add(self, seq: Sequence) -> bool:
        """Note a new sequence; returns whether it follows another, and has to wait for `release`."""
        if not (seq.is_only_scored and seq.wants_prompt_logprobs and seq.media is None):
            return False
        if self._layout.states:  # which cannot be copied from where their blocks end
            return False
        if seq.num_reusable % self._layout.prefix_size == 0:  # sequences of one step share whole nodes without a copy
            return False
        leader = self._leaders.setdefault(_shared(seq), seq)
        if leader is seq:
            self._followers[seq] = []
            return False
        self._followers[leader].append(seq)
        self._leader_of[seq] = leader
        return True

    def count(self, seq: Sequence) -> int:
        """Return how many wait for this one."""
        return len(self._followers.get(seq, ()))

    @property
    def waiting(self) -> list[Sequence]:
        """Those that wait for their leaders."""
        return [*chain.from_iterable(self._followers.values())]

    def release(self, leader: Sequence) -> list[Sequence]:
        """Return those that waited for a sequence, which has been planned up to what they share, or has ended."""
        if (released := self._followers.pop(leader, None)) is None:
            return []
        del self._leaders[_shared(leader)]
        return released

    def copy_tail(self, seq: Sequence, start: int, end: int) -> list[tuple[int, int]]:
        """Return the blocks to copy of a leader, and their copies, for a sequence that begins.

        start, end: of its first chunk, for which it has blocks; the copies hold what it has from `start` to the first
        token that it computes
        Returns none if it has no leader, or if its own has begun otherwise, or holds too little by now. So it does if
        the chunk ends with what is shared: a step without a chunk copies nothing.
        """
        leader, shared = self._leader_of.pop(seq, None), seq.num_reusable
        if leader is None or leader.node is None or leader.is_long != seq.is_long:
            return []
        if not start < shared < end or shared > leader.num_scheduled:
            return []
        copies = []
        for group, theirs, own, released in zip(
            self._layout.groups, leader.block_tables, seq.block_tables, leader.num_released, strict=True
        ):
            if start // group.block_size < released:
                return []
            columns = range(start // group.block_size, -(-shared // group.block_size))
            copies += [(theirs[column], own[column]) for column in columns]
        return copies

    def lose_leader(self, leader: Sequence) -> None:
        """Let none copy from a sequence that begins again."""
        if leader not in self._followers:  # else these still wait for it
            for seq in [seq for seq, own in self._leader_of.items() if own is leader]:
                del self._leader_of[seq]

    def drop(self, seq: Sequence) -> bool:
        """Forget a sequence that has ended; returns whether it still waited for its leader."""
        leader = self._leader_of.pop(seq, None)
        if leader is None or leader not in self._followers:
            return False
        self._followers[leader].remove(seq)
        return True

    def clear(self) -> None:
        """Forget all."""
        self._leaders.clear()
        self._followers.clear()
        self._leader_of.clear()


def _shared(seq: Sequence) -> tuple[int, bytes]:
    """Return what sequences share that have one leader."""
    return seq.adapter, seq.content(0, seq.num_reusable)
