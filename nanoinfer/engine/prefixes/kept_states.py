"""KeptStates: states in host memory, and what blocks held of the tokens before them that fill no node."""

from __future__ import annotations

from itertools import chain

from nanoinfer.attention.cache_layout import CacheLayout
from nanoinfer.engine.prefixes.host_tier import HostTier
from nanoinfer.engine.prefixes.prefix_cache import CachedPrefix, PrefixCache
from nanoinfer.engine.prefixes.prefix_tree import NONE, Node
from nanoinfer.engine.prefixes.state_slots import StateSlots
from nanoinfer.engine.sequence import Sequence


class KeptStates:
    """Brings back what HostTier keeps of nodes with snapshots, and lets it keep what preempted sequences leave."""

    def __init__(self, layout: CacheLayout, prefixes: PrefixCache, states: StateSlots, tier: HostTier) -> None:
        self._size, self._has_windows = layout.prefix_size, any(group.window for group in layout.groups)
        self._prefixes, self._states, self._tier = prefixes, states, tier

    def bring_back(self, seq: Sequence, cached: CachedPrefix, lacks_states: bool) -> list[int]:
        """Let come back what a sequence that has a slot and blocks needs of a prefix, and the device lacks.

        lacks_states: it lacks the states
        Returns the sequence's blocks into which content comes.
        """
        holder, blocks, slot = cached.holder, list[int](), NONE
        if not any(cached.rest):
            blocks = [*chain(*self._prefixes.last_blocks(seq, cached.num_tokens))]
        if lacks_states:
            slot = self._states.bring_back(seq, holder if isinstance(holder, Node) else None)
        if blocks or slot != NONE:
            self._tier.restore_kept(holder, blocks, slot)
        if blocks and isinstance(holder, Node):
            self._prefixes.attach_tail(holder, seq, cached.num_tokens)
        return blocks

    def keep(self, seq: Sequence) -> None:
        """If host memory has room, let it keep what a sequence needs to go on later, which is about to be preempted.

        Its tokens are computed, but for the last, and recorded. Those that layers with windows have left behind would
        be computed again, and so nothing is kept.
        """
        node, position = seq.node, len(seq) - 1
        if not self._has_windows and node is not None and node.is_found and seq.num_nodes == position // self._size:
            last_blocks = [*chain(*self._prefixes.last_blocks(seq, position))]
            self._tier.keep(seq, node, last_blocks, chain(*seq.block_tables), seq.slot)
