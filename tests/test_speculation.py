"""The host's part in speculation: what is planned while only the device knows how many guesses hold, and for how many.

Random loads test that every request ends with its own tokens. Their device sees messages alone, and lets random numbers
of guesses hold.
"""

from __future__ import annotations

import random
from collections import deque
from itertools import chain

import pytest
from conftest import alike, layout_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import BLOCK, ENGINES, EOS, Device, a_request, check_blocks, expected_tokens, prefill, samples

from nanoinfer import SamplingParams
from nanoinfer.attention.cache_layout import CacheGroup, CacheLayout
from nanoinfer.engine.admission.admission import Admission
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.row_map import RowMap
from nanoinfer.engine.scheduler import DecodeStep, PrefillStep, Step
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.engine.speculation.budget import Budget
from nanoinfer.engine.speculation.scheduler import SpeculatingScheduler
from nanoinfer.engine.speculation.text_slots import TextSlots
from nanoinfer.runner.message import DecodeMessage, JoinMessage, PrefillMessage, StepMessage

MOST_GUESSES = 3
WRONG = -7  # a guess that does not hold
SLOW, FAST = 1.0, 0.5


class Places(Budget):
    """Gives each step the places that a test says."""

    def __init__(self, *places: int, rng: random.Random | None = None) -> None:
        super().__init__([(64, 8)], {}, MOST_GUESSES, may_decline=False)
        self.places, self.rng = deque(places), rng

    def choose(self, num_rows: int, num_guessing: int) -> int:
        if self.rng is not None:
            return self.rng.choice([0, 0, 1, 2, 8])
        return self.places.popleft() if self.places else 0

    def least(self, num_rows: int) -> int:
        return self.rng.choice([0, 2]) if self.rng is not None else 0


def scheduler(budget: Budget, blocks: int = 64, rows: int = 8, long_from: int | None = None) -> SpeculatingScheduler:
    return SpeculatingScheduler(BlockManager(blocks, alike(BLOCK)), rows, 32, long_from, budget, MOST_GUESSES)


def sequence(prompt_len: int, max_tokens: int, **params: object) -> Sequence:
    prompt = list(range(10, 10 + prompt_len))
    return Sequence(prompt, SamplingParams(max_tokens=max_tokens, **params), 0, 40, frozenset([EOS]))


def started(sched: SpeculatingScheduler, *seqs: Sequence) -> None:
    """Compute the prompts of sequences, and give each its first token."""
    for seq in seqs:
        sched.add(seq)
    step = sched.schedule(in_flight=False)
    assert [seq for seq, _, _ in prefill(step)] == list(seqs)
    sched.postprocess(step, [(seq, 5) for seq in seqs])


def decode(step: Step | None) -> tuple[list[Sequence], int]:
    assert isinstance(step, DecodeStep)
    return step.seqs, step.guesses


class TestScheduler:
    def test_a_step_that_verifies_has_blocks_for_all_guesses_and_for_no_more_than_the_end(self) -> None:
        sched = scheduler(Places(8))
        far, near, alone = sequence(3, 20), sequence(3, 3), sequence(3, 20, top_k=2)
        started(sched, far, near, alone)
        step = sched.schedule(in_flight=False)
        assert decode(step) == ([far, near, alone], 8)
        assert [seq.num_scheduled for seq in step.seqs] == [7, 5, 4]
        assert [(seq, column) for seq, _, column in step.grown] == [(far, 1), (near, 1)]
        assert step.max_context_len == 7

    def test_what_is_read_back_corrects_what_was_planned(self) -> None:
        sched = scheduler(Places(8, 8))
        seq = sequence(3, 20)
        started(sched, seq)
        first, second = sched.schedule(in_flight=False), sched.schedule(in_flight=True)
        assert seq.num_scheduled == 3 + 4 + 4
        assert sched.postprocess(first, [(seq, [6, 7])]) == ([], 0)
        assert (len(seq), seq.num_scheduled) == (6, 5 + 4)
        assert sched.postprocess(second, [(seq, [8])]) == ([], 0)
        assert (len(seq), seq.num_scheduled) == (7, 6)

    def test_one_that_may_have_ended_waits_for_what_is_read_back_before_a_plain_step(self) -> None:
        sched = scheduler(Places(8))
        seq = sequence(3, 5)
        started(sched, seq)
        step = sched.schedule(in_flight=False)
        assert sched.schedule(in_flight=True) is None
        sched.postprocess(step, [(seq, [6, 7])])
        assert decode(sched.schedule(in_flight=False)) == ([seq], 0)
        assert seq.status is SequenceStatus.RUNNING

    def test_one_that_may_have_ended_stays_in_steps_that_verify(self) -> None:
        sched = scheduler(Places(8, 8))
        seq = sequence(3, 5)
        started(sched, seq)
        first, second = sched.schedule(in_flight=False), sched.schedule(in_flight=True)
        assert decode(second) == ([seq], 8)
        assert sched.postprocess(first, [(seq, [6, 7, 8, 9])]) == ([seq], 0)
        assert sched.postprocess(second, [(seq, [])]) == ([], 0)
        assert (seq.output_token_ids, seq.finish_reason) == ([5, 6, 7, 8, 9], "length")
        assert sched.is_finished

    def test_what_follows_a_stop_token_is_dropped_and_no_prefix(self) -> None:
        sched = scheduler(Places(8, 8))
        seq = sequence(3, 20)
        started(sched, seq)
        first, second = sched.schedule(in_flight=False), sched.schedule(in_flight=True)
        assert sched.postprocess(first, [(seq, [6, EOS, 8, 9])]) == ([seq], 2)
        assert sched.postprocess(second, [(seq, [9, 9])]) == ([], 2)
        assert (seq.output_token_ids, seq.finish_reason) == ([5, 6, EOS], "stop")
        assert [node.tokens for node in sched.block_manager.tree if node.tokens] == []

    def test_blocks_that_are_filled_become_prefixes_once_their_tokens_are_known(self) -> None:
        sched = scheduler(Places(8))
        seq = sequence(3, 20)
        started(sched, seq)
        step = sched.schedule(in_flight=False)
        assert len(sched.block_manager.tree) == 0
        sched.postprocess(step, [(seq, [6, 7])])
        assert len(sched.block_manager.tree) == 1

    @pytest.mark.usefixtures("no_foresight")
    def test_where_blocks_are_short_a_step_is_plain_before_anyone_is_preempted(self) -> None:
        sched = scheduler(Places(8, 8), blocks=4)
        seqs = [sequence(6, 20), sequence(6, 20)]
        started(sched, *seqs)
        assert decode(sched.schedule(in_flight=False)) == (seqs, 0)
        assert sched.num_preemptions == 0

    def test_one_that_outgrows_short_contexts_starts_again_when_no_step_computes_it(self) -> None:
        sched = scheduler(Places(8, 8), long_from=7)
        seq = sequence(5, 9)
        started(sched, seq)
        first, second = sched.schedule(in_flight=False), sched.schedule(in_flight=True)
        assert seq.num_scheduled == 7  # no key behind the seventh is one of a short sequence
        sched.postprocess(first, [(seq, [6, 7])])
        assert (len(seq), seq.status) == (8, SequenceStatus.ENDING)
        sched.postprocess(second, [(seq, [])])
        assert prefill(sched.schedule(in_flight=False)) == [(seq, 0, 8)]
        assert seq.is_long


class GuessingDevice(Device):
    """A Device whose rows get random numbers of tokens from steps that verify."""

    def __init__(self, groups: tuple[CacheGroup, ...], long_from: int | None, rng: random.Random) -> None:
        super().__init__(groups, long_from)
        self.rng = rng
        self.queries: list[range] = []  # of each row of the newest decode step, those that hold
        self.members: dict[int, list[int]] = {}

    def run(self, message: StepMessage) -> list[int] | list[list[int]]:
        if isinstance(message, DecodeMessage) and message.guesses:
            return self.verify(message)
        drawn = super().run(message)
        if isinstance(message, PrefillMessage):
            for row, join in zip(self.rows[message.num_rows :], message.joins, strict=True):
                assert isinstance(join, JoinMessage)
                assert join.drafting is not None
                row |= {"end": join.drafting.end, "may_guess": join.drafting.may_guess, "text": join.drafting.text}
            self.members |= message.members
        else:
            assert all(row["len"] < row["end"] for row in self.rows), "a plain step takes a row behind its end"
        self.queries = [range(row["len"] - 1, row["len"]) for row in self.rows]
        return drawn

    def check_longest(self, message: DecodeMessage) -> None:
        assert message.max_context_len >= max(row["len"] for row in self.rows)

    def verify(self, message: DecodeMessage) -> list[list[int]]:
        for source, destination in message.moves:
            self.rows[destination] = dict(self.rows[source])
        del self.rows[message.num_rows :]
        for row, group, column, block in message.new_blocks:
            assert column == len(self.rows[row]["tables"][group])
            self.rows[row]["tables"][group].append(block)
        self.queries, places, drawn = [], message.guesses, []
        for row in self.rows:
            drawn.append(self.verify_row(row, places))
            places -= row["proposed"]
        self.check_longest(message)
        assert not message.shares
        return drawn

    def verify_row(self, row: dict, places: int) -> list[int]:
        start = row["len"]
        row["proposed"] = 0
        if start + 1 >= row["end"]:
            assert row["may_guess"]
            self.queries.append(range(0))
            return []
        if row["may_guess"]:
            most = min(MOST_GUESSES, places, row["end"] - start - 2)
            row["proposed"] = self.rng.choice([0, most, self.rng.randint(0, most)])
        num_held = self.rng.choice([0, row["proposed"], self.rng.randint(0, row["proposed"])])
        tokens = [self.token({**row, "len": start + 1 + place}) for place in range(num_held + 1)]
        computed = [row["last"], *tokens[:-1], *[WRONG] * (row["proposed"] - num_held)]
        for position, token in enumerate(computed, start):
            self.write(row["tables"], position, token, (row["adapter"], self.is_long(position + 1)))
        row["len"], row["last"] = start + len(tokens), tokens[-1]
        self.queries.append(range(start, row["len"]))
        return tokens


def check_reads(step: Step, device: GuessingDevice, seqs: list[Sequence]) -> None:
    """Check that each query that holds reads its own sequence's tokens."""
    if isinstance(step, PrefillStep):
        spans = [(chunk.seq, range(chunk.start, chunk.end), list(chunk.seq.token_ids)) for chunk in step.chunks]
    else:
        whole = [list(seq.token_ids[: seq.num_prompt_tokens]) + expected_tokens(seq) for seq in seqs]
        spans = list(zip(seqs, device.queries, whole, strict=True))
    for seq, queries, tokens in spans:
        for query in queries:
            for index, group in enumerate(device.groups):
                first = 0 if group.window is None else max(0, query - group.window + 1)
                if query < len(tokens):  # nobody reads tokens after the one that ends the sequence
                    read = device.read(index, seq.block_tables[index], first, query + 1)
                    assert [token for token, _, _ in read] == tokens[first : query + 1]


def check_state(sched: SpeculatingScheduler, in_flight: list[tuple[Step, list[Sequence]]]) -> None:
    """Check that what is counted step by step equals what follows from all steps in flight."""
    check_blocks(sched)
    for seq in sched.running:
        if seq.is_only_scored:
            continue
        own = seq.ahead
        assert own is not None
        steps = [step for step, seqs in in_flight if seq in seqs]
        assert own.num_steps == len(steps)
        reach = [own.reach(step.guesses if isinstance(step, DecodeStep) else 0) for step in steps]
        assert seq.num_scheduled == min(len(seq) - 1 + sum(reach), own.end - 1)
        has_ended = len(seq) + len(steps) >= own.end
        assert (seq in sched.decoding) != has_ended
        assert seq.status is (SequenceStatus.ENDING if has_ended else SequenceStatus.RUNNING)
        for group, table, released in zip(sched.block_manager.groups, seq.block_tables, seq.num_released, strict=True):
            assert len(table) * group.block_size >= seq.num_scheduled
            if group.window is not None:  # it keeps what the first of the queries to come sees
                assert released * group.block_size <= max(0, len(seq) - 1 + len(steps) - group.window + 1)


@pytest.mark.parametrize("depth", [1, 2], ids=["in step", "one step ahead"])
@settings(max_examples=150, deadline=None)
@given(requests=st.lists(a_request(shortest=1), min_size=1, max_size=20), spare=st.integers(0, 30), **ENGINES)
def test_every_request_ends_with_its_own_tokens(
    depth, requests, groups, spare, rows, budget, worth, long_from, kind, foresight, arrivals
) -> None:
    """Random requests, some with several samples, arrive and are aborted at random times, and start again."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("MIN_PREFILL_TOKENS", "MAX_FREE_ROWS"), worth, strict=True):
            patch.setattr(f"nanoinfer.engine.scheduler.{name}", value)
        if not foresight:
            patch.setattr(Admission, "is_roomy", True)
        layout: CacheLayout = layout_of(*groups)
        blocks = layout.blocks_of(40) + spare  # the longest sequence fits
        places = Places(rng=arrivals)
        manager = kind(blocks, layout)
        sched = SpeculatingScheduler(manager, rows, budget, long_from, places, MOST_GUESSES)
        serve(sched, depth, requests, arrivals)
    assert sched.block_manager.num_free == blocks


def serve(sched: SpeculatingScheduler, depth: int, requests, rng: random.Random) -> None:
    row_map = RowMap(texts=TextSlots(sched.max_num_seqs + rng.randrange(5), sched.max_num_seqs))
    device = GuessingDevice(sched.block_manager.groups, sched.long_from, rng)
    pending: deque[list[Sequence]] = deque()
    for i, (length, most, ignore, (first, num_first, then), n) in enumerate(requests):
        prompt = ([first] * num_first + [then] * length)[:length]
        pending.append(samples(n if most else 1, prompt, most, () if ignore else (EOS,), seed=10 * i))
        if most and rng.random() < 0.2:
            for seq in pending[-1]:
                seq.params = SamplingParams(top_k=2, max_tokens=most)
    seqs, in_flight = list(chain(*pending)), deque()

    def read_back() -> None:
        step, order, tokens = in_flight.popleft()
        sched.postprocess(step, zip(order, tokens, strict=True))

    while pending or not sched.is_finished or in_flight:
        while pending and (sched.is_finished or rng.random() < 0.3):
            for seq in pending.popleft():
                sched.add(seq)
        if (alive := [*sched.waiting, *sched.running]) and rng.random() < 0.03:
            sched.finish(rng.choice(alive), "abort")
        if rng.random() < 0.02:
            while in_flight:
                read_back()
            sched.restart(set(sched.unfinished))
        step = sched.schedule(in_flight=bool(in_flight))
        if step is not None:
            message, order = row_map.describe(step)
            assert [seq.row for seq in row_map.seqs] == list(range(len(row_map.seqs)))
            tokens = device.run(message)
            assert [row["tables"] for row in device.rows] == [seq.block_tables for seq in row_map.seqs]
            assert len({row["text"] for row in device.rows}) == len(device.rows)
            check_reads(step, device, row_map.seqs)
            in_flight.append((step, order, tokens))
        assert step is not None or in_flight or sched.is_finished, "nothing runs: the engine would hang"
        if in_flight and (step is None or len(in_flight) == depth):
            read_back()
        check_state(sched, [(step, order) for step, order, _ in in_flight])
    for seq in seqs:
        tokens, expected = seq.output_token_ids, expected_tokens(seq)
        if seq.finish_reason == "abort":
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
            assert seq.finish_reason == ("stop" if seq.stop_ids.intersection(tokens[-1:]) else "length")
