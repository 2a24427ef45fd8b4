"""Host memory as a second place for what KV-cache blocks held: what is copied there, what comes back, what is dropped.

Random operations come first, against a model that knows what each block and each slot of host memory would hold.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import test_scheduler
import torch
from cases import CASES, build
from conftest import CollidingBlockManager, alike, alive, greedy, layout_of, wait_until, whole_only
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from test_lifecycle import Interrupt
from test_random_blocks import (
    AMID_BLOCKS,
    MIXED,
    MOST_LIVE,
    ONLY_WINDOWS,
    PATTERNS,
    THREE,
    RandomOperations,
    Written,
    kind_of,
    operate,
    seldom,
    which_seq,
)
from test_scheduler import ENGINES, Content, Device, a_request, serve_random_requests
from test_tensor_parallel import Remains
from test_weights import weights_of

from nanoinfer import BUNDLED_MODEL, LLM, BeamSearchParams, SamplingParams
from nanoinfer.attention.cache_layout import CacheLayout, Matrices, Pages, State, lay_out
from nanoinfer.engine.admission.admission import Admission
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.prefixes.host_tier import HostTier
from nanoinfer.engine.prefixes.prefix_tree import NONE, Node
from nanoinfer.engine.row_map import RowMap
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence
from nanoinfer.engine.step import DecodeStep, PrefillStep, Step
from nanoinfer.process.host_memory import total_bytes
from nanoinfer.runner.memory.host_blocks import HostBlocks
from nanoinfer.runner.memory.kv_cache import KVCacheSpec
from nanoinfer.runner.memory.offload import Offload
from nanoinfer.runner.memory.state_pool import StateSpec
from nanoinfer.runner.memory.transfers import Transfers
from nanoinfer.runner.message import ChunkStates, PrefillMessage, StepMessage

BLOCK = 4
SLOTS_OF_STATES = 2  # of host memory
MOST_OF_A_TAIL = 3  # blocks, in the layouts here


class Room:
    """Slots of host memory, of which one more is there each time somebody asks."""

    def __init__(self, num_slots: int, num_ready: int = 0) -> None:
        self.num_slots, self._num_ready = num_slots, num_ready

    @property
    def is_whole(self) -> bool:
        """Whether all are there."""
        return self._num_ready == self.num_slots

    def num_ready(self) -> int:
        """Return how many slots there are by now."""
        self._num_ready = min(self._num_ready + 1, self.num_slots)
        return self._num_ready


def with_tier(
    num_blocks: int,
    layout: CacheLayout,
    num_states: int = 0,
    num_slots: int = 6,
    per_step: int = 3,
    kind: type[BlockManager] = BlockManager,
) -> BlockManager:
    """Return a BlockManager with slots of host memory, to which so many blocks may be copied with each step."""
    room = Room(num_slots)
    return kind(
        num_blocks,
        layout,
        num_states,
        partial(HostTier, offload=Offload(num_slots, per_step, 0, SLOTS_OF_STATES), room=room),
    )


class OperationsWithHost(RandomOperations):
    """The random operations of test_random_blocks.py, whose steps are launched with copies from and to host memory."""

    num_host_slots, per_step = 20, 3
    _is_planning = False

    def __init__(self) -> None:
        self.host: dict[int, Written | None] = {}  # what slots hold; None: nobody knows
        self.restored: list[tuple[int, int]] = []  # that the step is to copy, as planned so far
        self.restored_rests: list[tuple[int, int]] = []  # those of them that fill no node
        self.restored_states: set[int] = set()  # slots that get states likewise
        self.has_rest_back = False  # the newest sequence copies no blocks of a tail
        self.newest = Transfers()  # what the newest step has copied
        self.is_lost = False  # whether the step that is being planned is never launched
        super().__init__()
        self.restore, self.append = self.manager.tier.restore, self.manager.append
        self.restore_kept = self.manager.tier.restore_kept
        self.manager.tier.restore, self.manager.append = self.note_restored, self.append_and_launch
        self.manager.tier.restore_kept = self.note_kept_restored

    def kind(self, num_blocks: int, layout: CacheLayout, num_states: int) -> BlockManager:
        return with_tier(num_blocks, layout, num_states, self.num_host_slots, self.per_step, self.manager_kind)

    manager_kind = BlockManager

    @property
    def is_planning(self) -> bool:
        return self._is_planning

    @is_planning.setter
    def is_planning(self, value: bool) -> None:
        """A prefill step is launched when something else is to come."""
        was_planning, self._is_planning = self._is_planning, value
        if was_planning and not value and not self.is_lost:
            self.launch(self.planned)

    def note_restored(self, node: Node, place: int, block_id: int) -> None:
        """Chunks of the same step read what is restored, so it is here as soon as it is planned."""
        assert block_id not in self.touched
        slot = node.copies[place]
        self.restored.append((slot, block_id))
        self.blocks[block_id] = self.host[slot]
        self.restore(node, place, block_id)

    def note_kept_restored(self, holder: Node | Sequence, block_ids: list[int], state: int) -> None:
        assert not self.touched.intersection(block_ids)
        pairs = list(zip(holder.kept, block_ids, strict=False))
        self.restored += pairs
        self.restored_rests += pairs
        self.has_rest_back = bool(block_ids)
        for slot, block_id in pairs:
            self.blocks[block_id] = self.settled[block_id] = self.host[slot]  # others of the step may copy it
        if state != NONE:
            assert state not in self.read_slots | self.written_slots | self.restored_states
            self.restored_states.add(state)
            (self.slots[state],) = {self.host[slot] for slot in holder.kept[-SLOTS_OF_STATES:]}
        self.restore_kept(holder, block_ids, state)

    def num_copied(self, in_node: int) -> int:
        has_rest_back, self.has_rest_back = self.has_rest_back, False
        return 0 if has_rest_back else super().num_copied(in_node)

    def compute_states(self, seq: Sequence, start: int, end: int, planned: ChunkStates) -> None:
        assert not self.restored_states.intersection(planned.snapshots.values())
        super().compute_states(seq, start, end, planned)

    def longest_cached(self, seq: Sequence, with_fresh: bool = False, of_nodes: int | None = None) -> int:
        """A sequence that was preempted goes on from all of its tokens, if its nodes are there."""
        size = self.layout.prefix_size
        if seq.kept and seq.kept_behind is not None:
            nodes, node = [], seq.kept_behind
            while node.parent is not None and node.is_found:
                nodes.insert(0, node)
                node = node.parent
            is_root = node is self.tree.roots.get(kind_of(seq))
            if is_root and len(nodes) == (len(seq) - 1) // size and (not nodes or self.has_blocks(nodes)):
                return len(seq) - 1
        return super().longest_cached(seq, with_fresh, of_nodes)

    def has_snapshot(self, node: Node, with_fresh: bool) -> bool:
        return bool(node.kept) or super().has_snapshot(node, with_fresh)

    def is_whole(self, tail: Node, tokens: list[int], with_fresh: bool) -> bool:
        return bool(tail.kept) or super().is_whole(tail, tokens, with_fresh)

    @precondition(lambda self: self.live and self.states)
    @rule(which=which_seq, token=st.integers(0, 1))
    def preempt(self, which: int, token: int) -> None:
        """A sequence whose newest token is known, but not computed, loses what it has."""
        seq = self.choose(which)
        if seq.num_scheduled < len(seq) or len(self.waiting) == MOST_LIVE:
            return
        self.is_planning = False
        self.begin_step()
        seq.token_ids.append(token)
        held = self.blocks.copy(), self.slots.copy()
        before = self.manager.tier._planned.first or Transfers()
        known = len(before.saved), len(before.saved_states)
        self.manager.keep(seq)
        first = self.manager.tier._planned.first or Transfers()
        for block_id, slot in first.saved[known[0] :]:
            self.host[slot] = held[0][block_id]
        for state, slots in first.saved_states[known[1] :]:
            self.host.update(dict.fromkeys(slots, held[1][state]))
        self.manager.free(seq)
        self.live.remove(seq)
        seq.num_scheduled = 0
        self.waiting.append(seq)

    def append_and_launch(self, seq: Sequence) -> list[tuple[int, int]]:
        grown = self.append(seq)
        pairs = zip(self.layout.groups, seq.block_tables, strict=True)
        self.launch({table[len(seq) // group.block_size] for group, table in pairs})
        return grown

    def launch(self, written: set[int]) -> None:
        """Launch a step that writes these blocks. The content of blocks that it saves is that from before."""
        transfers = self.manager.take_transfers(1) or Transfers()
        assert transfers.restored == self.restored
        at_once = MOST_OF_A_TAIL + SLOTS_OF_STATES if self.states else 1
        most = self.per_step + (self.states is not None) * -(-self.per_step // 2) + at_once
        assert transfers.num_saved - (transfers.first or Transfers()).num_saved < most
        amid_blocks = {slot for node in self.tree if node.is_tail for slot in node.kept}
        saved = {block_id for block_id, slot in transfers.saved if slot not in amid_blocks}
        slots = {slot for _, slot in transfers.saved}
        assert len(slots) == len(transfers.saved)
        for state, own in transfers.saved_states:
            assert state not in self.written_slots | self.restored_states
            assert not slots.intersection(own)
            slots.update(own)
            self.host.update(dict.fromkeys(own, self.slots[state]))
        assert slots <= set(range(self.num_host_slots))
        assert not slots.intersection(slot for slot, _ in transfers.restored)
        assert not saved.intersection(written)
        assert not saved.intersection(block_id for _, block_id in transfers.restored)
        amid_blocks = {slot for slot, _ in self.restored_rests}  # prompts go on in these blocks
        assert not written.intersection(block_id for slot, block_id in transfers.restored if slot not in amid_blocks)
        for block_id, slot in transfers.saved:
            self.host[slot] = self.blocks[block_id]
        self.restored, self.newest = [], transfers
        self.restored_rests.clear()
        self.restored_states.clear()

    def begin_step(self) -> None:
        self.newest = Transfers()
        super().begin_step()

    @rule(prefixes=st.lists(st.tuples(st.integers(0, 3), st.integers(9, 40)), min_size=1, max_size=6))
    def serve(self, prefixes: list[tuple[int, int]]) -> None:
        """Compute prompts, one after the other."""
        for pattern, length in prefixes:
            self.is_planning = False
            before = len(self.live)
            self.allocate((PATTERNS[pattern] * 2)[:length], 50, False, False, 0)
            if len(self.live) > before:
                self.free(before, False)

    @rule(does=seldom)
    def fail(self, does: bool) -> None:
        """The newest step has not been launched, or not to its end, and so it is with its copies."""
        super().fail(does)
        if does:
            for _, slot in self.newest.saved:
                self.host[slot] = None
            for _, slots in self.newest.saved_states:
                self.host.update(dict.fromkeys(slots))
            self.restored_rests.clear()
            self.restored_states.clear()
            for _, block_id in [*self.newest.restored, *self.restored]:
                self.blocks[block_id] = None
            self.restored, self.newest = [], Transfers()

    @rule(does=seldom)
    def fail_while_planning(self, does: bool) -> None:
        self.is_lost = does
        self.fail(does)
        self.is_lost = False

    @rule(does=seldom)
    def sleep(self, does: bool) -> None:
        """The device's memory is lent while nobody runs. Host memory stays."""
        if not does:
            return
        self.is_planning = False
        for seq in self.live:
            self.manager.free(seq)
        self.live.clear()
        self.manager.prefixes.lose_blocks()
        self.blocks = dict.fromkeys(range(self.num_blocks))
        assert not any(block.node for block in self.manager.blocks)

    def has_blocks(self, nodes: list[Node]) -> bool:
        end, place = len(nodes) * self.layout.prefix_size, 0
        for group in self.layout.groups:
            count = self.layout.prefix_size // group.block_size
            places = [(node, at) for node in nodes for at in range(place, place + count)]
            place += count
            positions = range(0 if group.window is None else max(0, end - group.window + 1), end)
            needed = [places[position // group.block_size] for position in positions]
            if any(node.blocks[at] == node.copies[at] == NONE for node, at in needed):
                return False
        return True

    @invariant()
    def no_node_is_empty_and_parents_count_their_children(self) -> None:
        children = dict.fromkeys([*self.tree, *self.tree.roots.values()], 0)
        for node in self.tree:
            if node.parent in children:
                children[node.parent] += 1
        for node, count in children.items():
            assert node.num_children == count
            assert node.parent is None or not node.is_empty

    @invariant()
    def a_slot_holds_the_tokens_of_one_node(self) -> None:
        seen = set()
        for node in self.tree:
            prefix, place = self.prefix_of(node), 0
            for number, group in enumerate(self.layout.groups):
                for column in range(self.layout.prefix_size // group.block_size):
                    slot = node.copies[place]
                    if slot != NONE:
                        end = len(prefix) - self.layout.prefix_size + (column + 1) * group.block_size
                        assert slot not in seen
                        seen.add(slot)
                        written = self.host[slot]
                        assert (written.group, written.prefix) == (number, prefix[:end])
                    place += 1

    @invariant()
    def what_is_kept_has_states_and_the_tokens_that_fill_no_node(self) -> None:
        kept = [(node.kept, self.prefix_of(node)) for node in self.tree if node.kept]
        kept += [(seq.kept, tuple(seq.token_ids[:-1])) for seq in self.waiting if seq.kept]
        size = self.layout.prefix_size
        for slots, prefix in kept:
            rest = range(len(prefix) // size * size, len(prefix))
            columns = [
                (number, first, group.block_size)
                for number, group in enumerate(self.layout.groups)
                for first in rest[:: group.block_size]
            ]
            *blocks, own, same = slots
            assert self.host[own] == self.host[same]
            assert (self.host[own].group, self.host[own].prefix) == (NONE, prefix)
            for slot, (number, first, block_size) in zip(blocks, columns, strict=True):
                written, end = self.host[slot], min(first + block_size, len(prefix))
                assert (written.group, written.prefix[:end]) == (number, prefix[:end])
        used = [slot for slots, _ in kept for slot in slots]
        used += [slot for node in self.tree for slot in node.copies if slot != NONE]
        assert len(used) == len(set(used))

    def teardown(self) -> None:
        """Nothing has leaked: after all is forgotten, other sequences' blocks get every slot."""
        self.is_planning = False
        self.manager.free_all()
        self.manager.prefixes.forget_all([])
        assert len(self.tree) == 0
        slots: set[int] = set()
        self.manager.tier.restore, self.manager.tier.restore_kept = self.restore, self.restore_kept
        for first in range(2, 102):
            seq = Sequence([first] * 12 + [1], SamplingParams(), seed=0, max_model_len=1000)
            self.manager.begin_step()
            assert self.manager.allocate(seq, len(seq)) == 0
            assert self.manager.extend(seq, len(seq)) == len(seq)
            self.manager.plan(seq, 0, len(seq))
            transfers = self.manager.take_transfers(1) or Transfers()
            slots.update(slot for _, slot in transfers.saved)
            slots.update(*(own for _, own in transfers.saved_states))
            self.manager.free(seq)
            if len(slots) == self.num_host_slots:
                break
        slots.update(self.manager.tier._slots._free)  # too few for the states that come next
        assert slots == set(range(self.num_host_slots))


MACHINES = {
    "full": {"layout": alike(BLOCK)},
    "one slot": {"layout": alike(BLOCK), "num_host_slots": 1},
    "few slots": {"layout": alike(BLOCK), "num_host_slots": 5, "per_step": 14},
    "many slots": {"layout": alike(BLOCK), "num_host_slots": 40, "per_step": 40},
    "window": {"layout": alike(BLOCK, window=6)},
    "mixed": {"layout": MIXED, "num_blocks": 24, "num_host_slots": 40, "per_step": 8},
    "three": {"layout": THREE, "num_blocks": 30, "num_host_slots": 50, "per_step": 8},
    "only windows": {"layout": ONLY_WINDOWS, "num_blocks": 16},
    "mixed, states": {"layout": MIXED, "num_blocks": 24, "num_slots": 5, "num_host_slots": 40},
    "states": {"layout": alike(BLOCK), "num_slots": 6, "num_host_slots": 30},
    "states amid blocks": {"layout": AMID_BLOCKS, "num_blocks": 30, "num_slots": 8, "num_host_slots": 60},
    "states amid blocks, few slots": {"layout": AMID_BLOCKS, "num_blocks": 30, "num_slots": 6, "num_host_slots": 9},
    "colliding": {"layout": alike(BLOCK), "manager_kind": CollidingBlockManager},
}


@pytest.mark.parametrize("examples", [14, *whole_only([26])])
@pytest.mark.parametrize("name", MACHINES)
def test_random_operations(name: str, examples: int) -> None:
    operate(OperationsWithHost, examples, **MACHINES[name])


class DeviceWithHost(Device):
    """A device that copies blocks from and to host memory beside its steps."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.host: dict[int, Content | None] = {}

    def run(self, message: StepMessage) -> list[int]:
        """What a prefill step restores is there before it; a decode step runs beside the copies."""
        transfers = message.transfers or Transfers()
        saved = {block_id: deepcopy(self.cache.get(block_id)) for block_id, _ in transfers.saved}
        restored = {block_id: deepcopy(self.host[slot]) for slot, block_id in transfers.restored}
        assert not saved.keys() & restored.keys()
        for block_id, content in restored.items():
            self.cache[block_id] = content if isinstance(message, PrefillMessage) else Content(NONE)
        tokens = super().run(message)
        for block_id, content in restored.items():
            if isinstance(message, PrefillMessage):
                assert self.cache[block_id] == content
            else:
                assert self.cache[block_id] == Content(NONE)
                self.cache[block_id] = content
        for block_id, slot in transfers.saved:
            assert self.cache.get(block_id) == saved[block_id]
            self.host[slot] = saved[block_id]
        return tokens


class RowMapWithHost(RowMap):
    """A RowMap whose messages tell of copies, as those of LLMEngine do."""

    manager: BlockManager

    def describe(self, step: Step) -> tuple[StepMessage, list[Sequence]]:
        message, seqs = super().describe(step)
        message.transfers = self.manager.take_transfers(step.num_tokens)
        return message, seqs


@pytest.mark.parametrize("turn", [1, *whole_only([2, 3])])
@pytest.mark.parametrize("depth", [1, 2], ids=["in step", "one step ahead"])
@settings(max_examples=20, deadline=None)
@given(
    requests=st.lists(
        a_request(shortest=4),
        min_size=10,
        max_size=40,
    ),
    spare=st.integers(0, 10),
    num_slots=st.sampled_from([2, 20, 100]),
    per_step=st.sampled_from([1, 3, 50]),
    **ENGINES,
)
def test_every_request_ends_with_its_own_tokens(
    depth, turn, requests, groups, spare, rows, budget, worth, long_from, kind, foresight, num_slots, per_step, arrivals
) -> None:
    """The random requests of test_scheduler.py, whose blocks come back from host memory. Each turn draws others."""
    layout = layout_of(*groups)
    blocks = layout.blocks_of(40) + spare  # the longest sequence fits
    manager = with_tier(blocks, layout, num_slots=num_slots, per_step=per_step, kind=kind)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("MIN_PREFILL_TOKENS", "MAX_FREE_ROWS"), worth, strict=True):
            patch.setattr(f"nanoinfer.engine.scheduler.{name}", value)
        if not foresight:
            patch.setattr(Admission, "is_roomy", True)
        patch.setattr(test_scheduler, "RowMap", type("OwnRowMap", (RowMapWithHost,), {"manager": manager}))
        patch.setattr(test_scheduler, "Device", DeviceWithHost)
        serve_random_requests(Scheduler(manager, rows, budget, long_from), depth, requests, arrivals)
    assert manager.num_free == blocks


def sequence(tokens: list[int], max_tokens: int = 5) -> Sequence:
    return Sequence(tokens, SamplingParams(max_tokens=max_tokens), seed=0, max_model_len=200)


def run(manager: BlockManager, seq: Sequence) -> Transfers:
    """Compute a sequence that holds no blocks, in one step, and free it; returns what is copied beside the step."""
    manager.begin_step()
    start = manager.allocate(seq, len(seq))
    assert start is not None
    assert manager.extend(seq, len(seq)) == len(seq)
    manager.plan(seq, 0, len(seq))
    transfers = manager.take_transfers(len(seq) - start) or Transfers()
    manager.free(seq)
    return transfers


class TestByExample:
    """What is copied and when."""

    def test_nothing_is_copied_while_blocks_are_free(self) -> None:
        manager = with_tier(8, alike(BLOCK))
        assert [run(manager, sequence([first] * 9)) for first in range(2)] == [Transfers()] * 2

    def test_the_oldest_are_copied_first_and_come_back_when_they_are_gone(self) -> None:
        manager = with_tier(8, alike(BLOCK), per_step=2)
        saved = [run(manager, sequence([first] * 9)).saved for first in range(4)]
        assert [len(pairs) for pairs in saved] == [0, 0, 2, 2]
        run(manager, sequence([4] * 9))
        manager.begin_step()
        seq = sequence([0] * 9)
        assert manager.allocate(seq, 9) == 8
        assert manager.is_restoring
        transfers = manager.take_transfers(1)
        assert transfers.restored == [
            (slot, block_id) for (_, slot), block_id in zip(saved[2], seq.block_tables[0], strict=False)
        ]
        assert not manager.is_restoring

    def test_two_that_need_the_same_content_share_what_comes_back(self) -> None:
        manager = with_tier(8, alike(BLOCK), num_slots=20, per_step=8)
        for first in range(6):
            run(manager, sequence([first] * 9))
        seqs = sequence([0] * 9), sequence([0] * 10)
        manager.begin_step()
        assert [manager.allocate(seq, 9) for seq in seqs] == [8, 8]
        assert len(manager.take_transfers(1).restored) == 2
        assert seqs[0].block_tables[0][:2] == seqs[1].block_tables[0][:2]

    def test_no_step_overwrites_what_it_restores(self) -> None:
        manager = with_tier(8, alike(BLOCK), num_slots=2, per_step=8)
        assert [len(run(manager, sequence([first] * 9)).saved) for first in range(3)] == [0, 0, 2]
        manager.begin_step()
        other, again = sequence([3] * 16), sequence([0] * 9)
        assert manager.allocate(other, 16) == 0  # in the blocks that [0] * 8 had
        manager.plan(other, 0, 16)
        assert manager.allocate(again, 9) == 8
        transfers = manager.take_transfers(17)
        assert sorted(slot for slot, _ in transfers.restored) == [0, 1]
        assert transfers.saved == []

    def test_a_block_that_a_beam_filled_and_another_gets_before_the_next_step_is_not_copied(self) -> None:
        """Beams fork between two steps. The copy of a block is made with the next step, which may fill it."""
        manager = with_tier(4, alike(BLOCK), per_step=4)
        ended, goes_on = sequence([0] * 8), sequence([1] * 7)
        manager.begin_step()
        for seq in (ended, goes_on):
            assert manager.allocate(seq, len(seq)) == 0
            manager.plan(seq, 0, len(seq))
        assert manager.take_transfers(15) is None
        manager.free(ended)
        child = sequence([1] * 7)
        manager.fork(goes_on, child)
        child.token_ids.append(2)
        manager.begin_step()
        manager.extend(child, 8)
        manager.plan(child, 0, 8)
        transfers = manager.take_transfers(1) or Transfers()
        assert child.block_tables[0][1] not in [block_id for block_id, _ in transfers.saved]

    def test_states_do_not_outlive_the_devices_memory(self) -> None:
        manager = with_tier(8, alike(BLOCK), num_states=3)
        seq = sequence([0] * 9)
        manager.begin_step()
        assert manager.allocate(seq, 8) == 0
        manager.extend(seq, 8)
        assert manager.plan(seq, 0, 8).snapshots
        manager.free(seq)
        manager.prefixes.lose_blocks()
        assert not list(manager.tree)


class TestScheduled:
    """What the scheduler makes of it."""

    @staticmethod
    def scheduler(num_blocks: int, rows: int = 8) -> Scheduler:
        manager = with_tier(num_blocks, alike(BLOCK), num_slots=20, per_step=8)
        return Scheduler(manager, rows, max_num_batched_tokens=64)

    @staticmethod
    def step(sched: Scheduler, token: int = 0) -> tuple[Step, Transfers]:
        """Run a step and read its tokens at once."""
        step = sched.schedule(in_flight=False)
        transfers = sched.block_manager.take_transfers(step.num_tokens) or Transfers()
        seqs = step.seqs if isinstance(step, DecodeStep) else [chunk.seq for chunk in step.chunks]
        sched.postprocess(step, [(seq, token) for seq in seqs])
        return step, transfers

    def test_others_decode_while_content_comes_back(self) -> None:
        sched = self.scheduler(12)
        for first in range(6):  # the first one's blocks are others' in the end
            sched.add(sequence([first] * 13, max_tokens=1))
            self.step(sched)
        other, again = sequence([9] * 6, max_tokens=10), sequence([0] * 13, max_tokens=1)
        sched.add(other)
        self.step(sched)
        sched.add(again)
        step, transfers = self.step(sched)
        assert isinstance(step, DecodeStep)
        assert step.seqs == [other]
        assert len(transfers.restored) == 3
        step, transfers = self.step(sched)
        assert isinstance(step, PrefillStep)
        assert [(chunk.seq, chunk.start, chunk.end) for chunk in step.chunks] == [(again, 12, 13)]
        assert not transfers.restored
        assert again.num_cached_tokens == 12

    def test_nothing_waits_for_content_where_nobody_decodes(self) -> None:
        sched = self.scheduler(12)
        for first in range(6):
            sched.add(sequence([first] * 13, max_tokens=1))
            self.step(sched)
        sched.add(sequence([0] * 13, max_tokens=1))
        step, transfers = self.step(sched)
        assert isinstance(step, PrefillStep)
        assert (step.num_tokens, len(transfers.restored)) == (1, 3)

    @pytest.mark.usefixtures("no_foresight")
    def test_what_comes_back_goes_with_a_step_at_once(self) -> None:
        """If nobody can decode before the tokens in flight are known, the prompt runs. So no copy is ever left over."""
        sched = self.scheduler(12)
        for first in range(6):
            sched.add(sequence([first] * 13, max_tokens=1))
            self.step(sched)
        decoding = [sequence([first] * 4, max_tokens=10) for first in (11, 12, 13, 14, 15, 16, 17)]
        for seq in decoding:
            sched.add(seq)
        step = sched.schedule(in_flight=False)
        assert isinstance(step, PrefillStep)
        sched.block_manager.take_transfers(step.num_tokens)
        again = sequence([0] * 13, max_tokens=1)
        sched.add(again)  # it takes 4 of the 5 blocks that are left, and each of the others needs one
        step = sched.schedule(in_flight=True)
        assert isinstance(step, PrefillStep)
        assert [(chunk.seq, chunk.start) for chunk in step.chunks] == [(again, 12)]
        assert len(sched.block_manager.take_transfers(step.num_tokens).restored) == 3

    @pytest.mark.usefixtures("no_foresight")
    def test_a_preempted_one_comes_back_without_being_computed_again(self) -> None:
        sched = self.scheduler(9)
        seqs = [sequence([first] * 12, max_tokens=20) for first in range(3)]
        for seq in seqs:
            sched.add(seq)
        restored, num_computed = 0, 0
        while not sched.is_finished:
            step, transfers = self.step(sched)
            restored += len(transfers.restored)
            if isinstance(step, PrefillStep):
                num_computed += step.num_tokens
        assert sched.num_preemptions > 0
        assert restored > 0
        assert num_computed < 3 * 12 + 4 * sched.num_preemptions + 4


# An LLM on the CPU, whose cache holds a part of what is served. It has room in host memory for all of it.

SMALL = {
    "device": "cpu",
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 9,
    "max_model_len": 80,
    "max_num_batched_tokens": 60,
}
OPTIONS = {**SMALL, "kv_offload_gib": 0.05}
PROMPTS = [[30 + 7 * i, 31 + 5 * i, 40 + i] * 17 for i in range(7)]  # 51 tokens each, of which 48 fill blocks
HITS = 48 * len(PROMPTS)


def token_ids(llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams | None = None) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params or greedy(4), use_tqdm=False)]


def num_cached(llm: LLM) -> int:
    """Return how many tokens of the prompts need not be computed now."""
    return sum(output["num_cached_tokens"] for output in llm.generate(PROMPTS, greedy(1), use_tqdm=False))


def num_saved(llm: LLM) -> int:
    return llm.stats().num_saved_blocks


def num_restored(llm: LLM) -> int:
    return llm.stats().num_restored_blocks


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The tokens of an LLM that keeps nothing in host memory."""
    with LLM(BUNDLED_MODEL, dtype="float32", **SMALL) as llm:
        return token_ids(llm)


class TestLLM:
    """What a user notices."""

    @pytest.mark.parametrize(
        "options",
        [
            pytest.param({}, id="one rank"),
            pytest.param({"tensor_parallel_size": 2}, id="two ranks"),
            pytest.param({"data_parallel_size": 2}, id="two replicas"),
            pytest.param({"max_num_batched_tokens": 25}, id="chunks"),
            pytest.param({"device": "cuda"}, id="gpu", marks=pytest.mark.gpu),
            pytest.param({"device": "cuda", "tensor_parallel_size": 2}, id="two gpus", marks=pytest.mark.multi_gpu),
        ],
    )
    def test_the_tokens_are_those_of_an_llm_without(
        self, options: dict[str, object], expected: list[list[int]], make_llm: Callable[..., LLM]
    ) -> None:
        llm = make_llm(**{**OPTIONS, **options})
        for _ in range(2):
            assert token_ids(llm) == expected
        assert num_saved(llm) > 0
        assert num_restored(llm) > 0

    def test_a_second_pass_finds_most_of_it_on_the_device_or_in_host_memory(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(**OPTIONS)
        without = make_llm(**SMALL)
        for each in (llm, without):
            assert num_cached(each) == 0
        num_saved_first = num_saved(llm)
        assert num_cached(without) < HITS / 4
        assert num_cached(llm) > HITS / 2
        assert num_saved_first > 0
        assert num_restored(llm) > 0
        assert f"{num_saved(llm):,} saved, {num_restored(llm):,} restored" in str(llm.stats())

    def test_a_host_whose_memory_gets_full_keeps_what_it_has(
        self,
        expected: list[list[int]],
        make_llm: Callable[..., LLM],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """There is memory for three slots, which is what one block of this model takes at a time, and then no more."""
        free = iter([1 << 40] * 3)
        monkeypatch.setattr("nanoinfer.runner.memory.host_blocks.CHUNK_BYTES", 1)
        monkeypatch.setattr("nanoinfer.runner.memory.pinned_pages.free_bytes", lambda: next(free, 0))
        llm = make_llm(**OPTIONS)
        slots = llm.engine.ranks.runner.host_blocks
        assert token_ids(llm) == expected
        assert wait_until(lambda: slots.is_whole)
        assert slots.num_ready() == 3
        for _ in range(2):
            assert token_ids(llm) == expected
        assert "the KV cache has 3 blocks in host memory, and gets no more: 0.0 GiB are free" in caplog.text
        assert num_saved(llm) > 0

    @pytest.mark.usefixtures("no_foresight")
    def test_a_preempted_sequence_is_not_computed_again(self, make_llm: Callable[..., LLM]) -> None:
        params = SamplingParams(temperature=0.8, max_tokens=30, ignore_eos=True, seed=9)
        prompts = [prompt[:33] for prompt in PROMPTS]
        without, llm = make_llm(**SMALL), make_llm(**OPTIONS)
        assert token_ids(llm, prompts, params) == token_ids(without, prompts, params)
        assert llm.stats().num_preemptions > 0
        assert num_restored(llm) > 0
        assert llm.stats().num_recomputed_tokens < without.stats().num_recomputed_tokens

    def test_what_is_dropped_does_not_come_back(self, expected: list[list[int]], make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(**OPTIONS)
        drops = (
            llm.reset_prefix_cache,
            lambda: llm.load_weights(BUNDLED_MODEL),
            lambda: llm.update_weights(weights_of(BUNDLED_MODEL)),
        )
        for drop in drops:
            token_ids(llm)
            drop()
            before = num_restored(llm)
            assert num_cached(llm) == 0
            assert num_restored(llm) == before
            assert token_ids(llm) == expected

    def test_other_weights_give_other_tokens(self, expected: list[list[int]], make_llm: Callable[..., LLM]) -> None:
        """What older weights have computed is not read again, so a fresh LLM gets the same."""
        other = {name: weight * 1.2 for name, weight in weights_of(BUNDLED_MODEL).items()}
        llm, fresh = make_llm(**OPTIONS), make_llm(**SMALL)
        assert token_ids(llm) == expected
        for each in (llm, fresh):
            each.update_weights(other)
        assert token_ids(llm) == token_ids(fresh) != expected

    def test_host_memory_keeps_its_content_while_the_devices_is_lent(
        self, expected: list[list[int]], make_llm: Callable[..., LLM]
    ) -> None:
        llm = make_llm(**OPTIONS)
        token_ids(llm)
        num_saved_first = num_saved(llm)
        llm.sleep(level=1)
        llm.wake_up()
        assert 16 * num_saved_first >= num_cached(llm) > HITS / 2
        assert num_restored(llm) > 0
        assert token_ids(llm) == expected

    def test_with_the_weights_all_is_dropped(self, expected: list[list[int]], make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(**OPTIONS)
        token_ids(llm)
        llm.sleep(level=2)
        llm.wake_up()
        llm.load_weights(BUNDLED_MODEL)
        before = num_restored(llm)
        assert num_cached(llm) == 0
        assert num_restored(llm) == before
        assert token_ids(llm) == expected

    def test_beams_use_it_too(self, make_llm: Callable[..., LLM]) -> None:
        params = BeamSearchParams(beam_width=2, max_tokens=6)

        def search(llm: LLM) -> list[list[list[int]]]:
            outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
            return [[beam.tokens for beam in output.sequences] for output in outputs]

        llm = make_llm(**OPTIONS)
        wanted = search(make_llm(**SMALL))
        token_ids(llm)
        before = num_restored(llm)
        assert search(llm) == wanted
        assert num_restored(llm) > before
        assert search(llm) == wanted

    def test_no_bit_depends_on_it_if_results_are_deterministic(self, make_llm: Callable[..., LLM]) -> None:
        """The two prompts of three blocks do not fit the cache together."""

        def bits(llm: LLM) -> list[object]:
            outputs = llm.generate([prompt[:33] for prompt in PROMPTS[:2]], greedy(3, logprobs=2), use_tqdm=False)
            return [(output["token_ids"], output["logprobs"]) for output in outputs]

        options = {"dtype": "bfloat16", "deterministic": True, "num_kvcache_blocks": 4, "max_model_len": 48}
        wanted, llm = bits(make_llm(**{**SMALL, **options})), make_llm(**{**OPTIONS, **options})
        for _ in range(2):
            assert bits(llm) == wanted
        assert num_restored(llm) > 0

    @pytest.mark.parametrize("name", ["gemma2", "gemma3"])
    def test_layers_of_several_kinds(self, name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
        build(CASES[name], tmp_path)
        options = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 150, "max_num_batched_tokens": 140}
        prompts = [[2 + i, 3 + 2 * i, 5] * 44 for i in range(10)]
        wanted = token_ids(make_llm(str(tmp_path), **options), prompts)
        llm = make_llm(str(tmp_path), **options, num_kvcache_blocks=14, kv_offload_gib=0.05)
        for _ in range(3):
            assert token_ids(llm, prompts) == wanted
        assert num_restored(llm) > 0

    @pytest.mark.parametrize("part", [0, *whole_only([1, 2])])
    @pytest.mark.usefixtures("no_foresight")
    def test_an_interrupt_at_any_line_leaves_it_usable(
        self, part: int, expected: list[list[int]], make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each part interrupts at every third of the lines that are tried."""
        monkeypatch.setattr(
            "test_lifecycle.HOST_FILES", ("host_tier.py", "prefix_cache.py", "block_manager.py", "llm_engine.py")
        )
        llm = make_llm(**OPTIONS)
        manager = llm.engine.scheduler.block_manager

        def generate(trace: Interrupt) -> list[list[int]]:
            sys.settrace(trace)
            try:
                return token_ids(llm)
            finally:
                sys.settrace(None)

        assert token_ids(llm) == expected
        whole = Interrupt()
        assert generate(whole) == expected
        stride = whole.count // 40
        for line in range(1 + part * stride, whole.count // 2, 3 * stride):
            with pytest.raises(KeyboardInterrupt):
                generate(Interrupt(line))
            assert manager.num_free == len(manager.blocks), f"interrupted at line {line}"
            assert token_ids(llm) == expected, f"interrupted at line {line}"

    def test_one_that_is_aborted_while_its_content_comes_back(
        self, expected: list[list[int]], make_llm: Callable[..., LLM]
    ) -> None:
        llm = make_llm(**OPTIONS)
        token_ids(llm)
        for prompt in PROMPTS:
            stream = llm.stream([prompt], greedy(8))
            next(stream)
            stream.close()
        assert token_ids(llm) == expected

    def test_the_plan_of_the_memory_tells_of_it(self, make_llm: Callable[..., LLM]) -> None:
        memory = make_llm(**OPTIONS).memory
        assert memory.host_blocks == int(0.05 * 2**30) // memory.block_bytes
        assert f"{memory.host_blocks:,} blocks of " in str(memory)
        assert "in host memory" in str(memory)

    def test_replicas_and_ranks_divide_it(self, make_llm: Callable[..., LLM]) -> None:
        whole, half = make_llm(**OPTIONS).memory, make_llm(**OPTIONS, tensor_parallel_size=2).memory
        assert half.host_blocks * half.block_bytes <= whole.host_blocks * whole.block_bytes / 2

    @pytest.mark.parametrize("options", [{}, {"kv_offload_gib": None}, {"kv_offload_gib": 0}])
    def test_it_is_off_on_the_cpu_unless_it_is_asked_for(
        self, options: dict[str, object], make_llm: Callable[..., LLM]
    ) -> None:
        llm = make_llm(**SMALL, **options)
        token_ids(llm, PROMPTS[:4])  # one more than fit the cache together
        assert llm.memory.host_blocks == num_saved(llm) == 0
        assert "in host memory" not in str(llm.memory)

    @pytest.mark.parametrize(
        ("value", "told"),
        [
            (-1, "kv_offload_gib=-1: must be a number of GiB, at least 0"),
            (math.nan, "kv_offload_gib=nan: must be a number of GiB, at least 0"),
            ("4", "kv_offload_gib='4': must be a number of GiB, at least 0"),
            (True, "kv_offload_gib=True: must be a number of GiB, at least 0"),
            (1e6, rf"kv_offload_gib=1000000.0: the host has {total_bytes() / 2**30:,.1f} GiB of memory"),
            (1e-6, r"kv_offload_gib=1e-06: holds no block of \d+\.\d\d MiB for each rank; raise it, or set it to 0"),
        ],
    )
    def test_values_that_make_no_sense(self, value: object, told: str, make_llm: Callable[..., LLM]) -> None:
        with pytest.raises(ValueError, match=told):
            make_llm(**SMALL, kv_offload_gib=value)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_fill_several_slots_as_one_run_of_bytes(device: str, dtype: torch.dtype) -> None:
    """What a step is to write goes to host memory first. Then other content comes into its place."""
    convolution, recurrence = State(channels=6, width=3), State(channels=5, width=4, matrices=Matrices(1, 2, 7, 3))
    layout = lay_out([Pages(1, 2), convolution, recurrence, recurrence], 8, 8)
    spec = StateSpec(layout, dtype, torch.float32)
    cache = KVCacheSpec(layout, dtype, by_head=False).allocate(3, torch.device(device))
    states = spec.allocate(4, torch.device(device))
    for slot in range(4):
        for part in states.parts(slot):
            part.random_(256)
    before = [[part.clone() for part in states.parts(slot)] for slot in range(4)]
    assert sum(part.numel() for part in before[0]) == spec.slot_bytes
    count = -(-spec.slot_bytes // (cache.memory[:, 0].nbytes))
    assert count > 3
    slots = list(range(3 * count + 1))[::-1]
    first, second, third = slots[:count], slots[count : 2 * count], slots[2 * count : 3 * count]
    host = HostBlocks(len(slots), cache, is_lazy=False)
    host.begin(cache, states, Transfers(saved_states=[(0, first), (1, second)]), is_awaited=False)
    again = Transfers(restored_states=[(first, 2), (third, 1)], first=Transfers(saved_states=[(2, third)]))
    host.begin(cache, states, again, is_awaited=True)
    for slot, wanted in enumerate([0, 2, 0, 3]):
        for part, own in zip(states.parts(slot), before[wanted], strict=True):
            assert torch.equal(part, own)
    host.begin(cache, states, Transfers(restored_states=[(second, 1)]), is_awaited=True)
    assert all(map(torch.equal, states.parts(1), before[1]))
    host.close()


ON_CUDA = {**OPTIONS, "device": "cuda"}


class TestDeaths:
    """Copies are on their way at any moment of this workload."""

    @pytest.mark.parametrize(
        ("options", "seed"),
        [
            (OPTIONS, 1),
            pytest.param({**OPTIONS, "tensor_parallel_size": 2}, 1, marks=pytest.mark.whole),
            pytest.param(ON_CUDA, 1, marks=pytest.mark.gpu),
            pytest.param({**ON_CUDA, "tensor_parallel_size": 2}, 1, marks=pytest.mark.multi_gpu),
            *whole_only([(OPTIONS, 2), (OPTIONS, 3)]),
            *whole_only(pytest.param(ON_CUDA, seed, marks=pytest.mark.gpu) for seed in (2, 3)),
        ],
    )
    def test_ctrl_c_at_random_moments(
        self, options: dict[str, object], seed: int, make_llm: Callable[..., LLM]
    ) -> None:
        llm, chance = make_llm(**options), random.Random(seed)
        manager = llm.engine.scheduler.block_manager
        expected = token_ids(llm)
        began = time.perf_counter()
        assert token_ids(llm) == expected
        seconds, num_interrupted = time.perf_counter() - began, 0
        for _ in range(4):
            timer = threading.Timer(chance.random() * seconds, os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                token_ids(llm)
                timer.join()
                time.sleep(1)  # for an interrupt that comes behind the last step
            except KeyboardInterrupt:
                num_interrupted += 1
            assert manager.num_free == len(manager.blocks)
            assert token_ids(llm) == expected
        assert num_interrupted > 2
        assert num_restored(llm) > 0

    @pytest.mark.parametrize("options", [OPTIONS, pytest.param(ON_CUDA, marks=pytest.mark.multi_gpu)])
    def test_a_killed_rank(self, options: dict[str, object], make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(**options, tensor_parallel_size=2)
        remains = Remains.of(llm)
        token_ids(llm)
        assert num_saved(llm) > 0
        threading.Timer(0.05, os.kill, (remains.pids[0], signal.SIGKILL)).start()
        with pytest.raises(RuntimeError, match="tensor-parallel rank 1 died"):
            token_ids(llm, PROMPTS * 100)
        remains.check_gone()

    @pytest.mark.whole
    @pytest.mark.parametrize("options", [OPTIONS, pytest.param(ON_CUDA, marks=pytest.mark.multi_gpu)])
    def test_a_killed_parent_leaves_nothing(self, options: dict[str, object], tmp_path: Path) -> None:
        script = tmp_path / "killed.py"
        script.write_text(KILLED)
        done = subprocess.run(
            [sys.executable, str(script), json.dumps(options)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        pid, *names = done.stdout.split()
        assert len(names) == 2
        assert wait_until(lambda: not alive(int(pid)))
        assert wait_until(lambda: not any(Path(name).exists() for name in names))


KILLED = """
import json, os, signal, sys, threading
from nanoinfer import BUNDLED_MODEL, LLM
from test_host_tier import num_saved, token_ids
from test_tensor_parallel import shared_names

if __name__ == "__main__":
    llm = LLM(BUNDLED_MODEL, tensor_parallel_size=2, **json.loads(sys.argv[1]))
    token_ids(llm)
    assert num_saved(llm) > 0
    workers = llm.engine.ranks.workers
    print(workers.processes[0].pid, *shared_names(workers), flush=True)
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        token_ids(llm)
"""
