"""The host's part in speculation: what is planned while only the device knows how many guesses hold, and for how many.

Random loads test that every request ends with its own tokens. Their device sees messages alone, and lets random numbers
of guesses hold.
"""

from __future__ import annotations

import random
from collections import deque
from itertools import chain, pairwise

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
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.engine.speculation.budget import TRY_EVERY, Budget
from nanoinfer.engine.speculation.draws import read_verified
from nanoinfer.engine.speculation.speculation import Speculation
from nanoinfer.engine.speculation.text_slots import TextSlots
from nanoinfer.engine.step import DecodeStep, PrefillStep, Step
from nanoinfer.kernels.drafting.accept import NOTHING
from nanoinfer.kernels.sampling.draw import NO_TOKEN
from nanoinfer.runner.drafting.texts import MEMBERS
from nanoinfer.runner.message import DecodeMessage, JoinMessage, PrefillMessage, StepMessage

MOST_GUESSES = 3
WRONG = -7  # a guess that does not hold


class Places(Budget):
    """Gives each step the places that a test says."""

    def __init__(self, *places: int, rng: random.Random | None = None) -> None:
        super().__init__([(64, 8)], {}, MOST_GUESSES, may_decline=False)
        self.places, self.rng = deque(places), rng

    def choose(self, num_rows: int, num_guided: int = 0) -> int:
        if self.rng is not None:
            return self.rng.choice([0, 0, 1, 2, 8])
        return self.places.popleft() if self.places else 0

    def least(self, num_rows: int) -> int:
        return self.rng.choice([0, 2]) if self.rng is not None else 2


def scheduler(budget: Budget, blocks: int = 64, rows: int = 8, long_from: int | None = None) -> Scheduler:
    return Scheduler(BlockManager(blocks, alike(BLOCK)), rows, 32, long_from, Speculation(budget, MOST_GUESSES))


def sequence(prompt_len: int, max_tokens: int, **params: object) -> Sequence:
    prompt = list(range(10, 10 + prompt_len))
    return Sequence(prompt, SamplingParams(max_tokens=max_tokens, **params), 0, 40, frozenset([EOS]))


def started(sched: Scheduler, *seqs: Sequence) -> None:
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
        far, near = sequence(3, 20), sequence(3, 3)
        started(sched, far, near)
        step = sched.schedule(in_flight=False)
        assert decode(step) == ([far, near], 8)
        assert [seq.num_scheduled for seq in step.seqs] == [7, 7]
        assert [(seq, column) for seq, _, column in step.grown] == [(far, 1), (near, 1)]
        sched = scheduler(Places(8))
        started(sched, sequence(3, 2))
        assert sched.schedule(in_flight=False).grown == []
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

    def test_one_that_may_have_ended_stays_in_steps_that_verify_until_that_is_known(self) -> None:
        sched = scheduler(Places(8))
        seq = sequence(3, 5)
        started(sched, seq)
        first, second = sched.schedule(in_flight=False), sched.schedule(in_flight=True)
        assert [decode(step) for step in (first, second)] == [([seq], 8), ([seq], 2)]
        sched.postprocess(first, [(seq, [6, 7])])
        sched.postprocess(second, [(seq, [8])])
        assert decode(sched.schedule(in_flight=False)) == ([seq], 0)

    @pytest.mark.usefixtures("no_foresight")
    def test_it_waits_for_what_is_read_back_where_blocks_are_short(self) -> None:
        sched = scheduler(Places(8), blocks=4)
        ends, goes_on = sequence(3, 5), sequence(3, 20)
        started(sched, ends, goes_on)
        step = sched.schedule(in_flight=False)
        assert sched.schedule(in_flight=True) is None
        sched.postprocess(step, [(ends, [6]), (goes_on, [6])])
        assert decode(sched.schedule(in_flight=False)) == ([ends, goes_on], 0)

    def test_one_that_has_ended_gets_nothing(self) -> None:
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
        assert len(sched.block_manager.tree) == 1  # of the prompt and the first token

    def test_blocks_that_are_filled_become_prefixes_once_their_tokens_are_known(self) -> None:
        sched = scheduler(Places(8, 8, 8, 8))
        seq = sequence(3, 20)
        started(sched, seq)
        for tokens, num_nodes in (([6, 7], 1), ([8], 1), ([9], 1), ([10], 2)):
            step = sched.schedule(in_flight=False)
            sched.postprocess(step, [(seq, tokens)])
            assert len(sched.block_manager.tree) == num_nodes

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
        assert second.max_context_len == 7  # no key behind the seventh is one of a short sequence
        sched.postprocess(first, [(seq, [6, 7])])
        assert (len(seq), seq.status) == (8, SequenceStatus.OUTGROWN)
        sched.postprocess(second, [(seq, [])])
        assert prefill(sched.schedule(in_flight=False)) == [(seq, 0, 8)]
        assert seq.is_long


SIZES = [(1, 2), (1, 4), (8, 16), (8, 32)]
TIMES = {(1, 0): 1.0, (8, 0): 1.1, (1, 4): 1.1, (8, 32): 1.4}


def budget(may_decline: bool, times: dict[tuple[int, int], float] | None = None) -> Budget:
    return Budget(SIZES, TIMES if times is None else times, max_guesses=4, may_decline=may_decline)


def choices(own: Budget, count: int, rows: int = 1, share: float = 0.0, busy: float = 0.0) -> list[int]:
    """Let steps run whose guesses hold to a share; returns the places that each had.

    busy: the rows are guided, and the host takes so many seconds for each mask; 0: they are not
    """
    chosen = []
    for _ in range(count):
        chosen.append(own.choose(rows, rows if busy else 0))
        if busy:
            own.note_host(chosen[-1], rows, rows, busy * (rows + chosen[-1]))
        if chosen[-1]:
            own.note(chosen[-1], [int(share * min(chosen[-1] // rows, 4))] * rows)
    return chosen


class TestBudget:
    def test_larger_steps_than_those_timed_go_on_as_the_timed_ones_do(self) -> None:
        """A step of more tokens takes less than so many times as long: it reads the weights once for all."""
        sizes = [(1, 4), (1, 19), (1, 64)]
        own = Budget(sizes, {(1, 0): 0.10, (1, 4): 0.10 * 5**0.5}, max_guesses=64, may_decline=False)
        assert own._times[1, 19] == pytest.approx(0.10 * 20**0.5)
        own = Budget(sizes, {(1, 0): 0.10, (1, 4): 0.09}, max_guesses=64, may_decline=False)
        assert own._times[1, 64] == 0.09
        own = Budget(sizes, {(1, 0): 0.10, (1, 4): 0.90}, max_guesses=64, may_decline=False)
        assert own._times[1, 64] == pytest.approx(13 * 0.90)
        own = Budget(sizes, {(1, 4): 0.15}, max_guesses=64, may_decline=False)
        assert own._times[1, 64] == pytest.approx(13 * 0.15)

    def test_guesses_that_bring_nothing_are_tried_now_and_then(self) -> None:
        chosen = choices(budget(may_decline=True), 1000)
        tried = [step for step, guesses in enumerate(chosen) if guesses]
        assert tried[0] == 0
        assert all(later - earlier >= TRY_EVERY for earlier, later in pairwise(tried))
        assert {chosen[step] for step in tried} == {2, 4}

    def test_a_step_that_takes_longer_is_tried_less_often(self) -> None:
        slow = {(1, 0): 1.0, (1, 4): 1.6, (1, 2): 1.4}
        assert sum(map(bool, choices(budget(may_decline=True, times=slow), 1000))) <= 16

    def test_guesses_that_hold_are_verified_until_they_do_so_no_more(self) -> None:
        own = budget(may_decline=True)
        chosen = choices(own, 100, share=1)
        assert chosen.count(0) == 0
        assert chosen[-20:] == [4] * 20
        assert choices(own, 60)[-20:].count(0) >= 19

    def test_luck_of_fewer_places_is_luck_of_more(self) -> None:
        """Guesses hold by chance: what a step with more places has brought says what fewer would have."""
        own, rng, chosen = budget(may_decline=False), random.Random(0), []
        for _ in range(1000):
            chosen.append(own.choose(1))
            own.note(chosen[-1], [next((n for n in range(chosen[-1]) if rng.random() > 0.7), chosen[-1])])
        assert chosen.count(4) > 950

    def test_what_cannot_pay_is_never_tried(self) -> None:
        slow = {(1, 0): 1.0, (1, 2): 3.1, (1, 4): 5.2}
        assert choices(budget(may_decline=True, times=slow), 100, share=1) == [0] * 100

    def test_without_a_choice_guesses_are_always_verified_where_sizes_allow(self) -> None:
        own = budget(may_decline=False)
        assert choices(own, 100).count(0) == 0
        assert choices(own, 10, rows=9) == [0] * 10
        assert [own.least(rows) for rows in (0, 1, 2, 8, 9)] == [0, 2, 16, 16, 0]

    def test_what_is_known_of_some_rows_serves_others(self) -> None:
        own = budget(may_decline=True)
        choices(own, 50, share=1)
        assert choices(own, 1, rows=7)[0] > 0

    @pytest.mark.parametrize("may_decline", [False, True])
    def test_a_host_that_takes_longer_than_guesses_save_declines_them(self, may_decline: bool) -> None:
        """Of 8 rows a step takes 1.1 to 1.4 seconds, beside which the host is busy with a mask of each place."""
        for busy, share, verifies in ((0.03, 0.5, True), (0.1, 0.0, False), (0.1, 0.5, False), (0.1, 1.0, True)):
            chosen = choices(budget(may_decline), 200, rows=8, share=share, busy=busy)
            assert (chosen[100:].count(0) < 20) == verifies, (busy, share)
            assert any(chosen), "they are tried"

    def test_guided_rows_do_not_count_where_there_are_none(self) -> None:
        own = budget(may_decline=True)
        choices(own, 100, rows=8, share=1.0, busy=2.0)
        assert choices(own, 50, rows=8, share=1.0).count(0) == 0

    def test_the_host_counts_for_steps_that_decode_and_once_a_few_have_run(self) -> None:
        own = budget(may_decline=True)
        sched, seq = scheduler(own), sequence(3, 8)
        sched.speculation.note_host(PrefillStep([], []), 1, 100.0)
        assert not own.counts_host
        for _ in range(2):  # these may have compiled something
            sched.speculation.note_host(DecodeStep([seq], [], [], 1, guesses=4), 1, 100.0)
        assert own.counts_host
        assert choices(own, 100, share=1, busy=0.1).count(0) == 0

    def test_the_host_may_be_as_busy_for_one_row_as_for_many(self) -> None:
        own = budget(may_decline=False)
        for rows, share, verifies in ((1, 1.0, True), (8, 0.0, False), (8, 1.0, True), (1, 0.0, False)):
            chosen = []
            for _ in range(1500):
                chosen.append(own.choose(rows, rows))
                own.note_host(chosen[-1], rows, rows, 3 + 0.1 * (rows + chosen[-1]))
                if chosen[-1]:
                    own.note(chosen[-1], [int(share * min(chosen[-1] // rows, 4))] * rows)
            assert (chosen[-500:].count(0) < 20) == verifies, (rows, share)
            assert any(chosen[-500:]), "guesses are tried"

    def test_how_busy_the_host_is_with_some_rows_tells_of_others(self) -> None:
        """Steps of 8 rows show that guesses cost more than they bring. So steps of one row need not show it, too."""
        own = budget(may_decline=True)
        assert choices(own, 100, rows=8, share=0.5, busy=0.2)[50:].count(0) > 45
        assert choices(own, 20, share=0.5, busy=0.8).count(0) == 20

    @pytest.mark.parametrize("may_decline", [False, True])
    def test_a_plain_step_of_many_rows_is_tried_where_one_of_a_single_row_is_known(self, may_decline: bool) -> None:
        """A plain step of 8 rows is not taken to last eight times as long as that of one, so it is soon tried."""
        own = budget(may_decline)

        def run(rows: int, held: int) -> int:
            guesses = own.choose(rows, rows)
            own.note_host(guesses, rows, rows, 5.0 + 0.1 * rows + 0.3 * guesses)
            if guesses:
                own.note(guesses, [min(held, guesses // rows)] * rows)
            return guesses

        assert [run(1, 0) for _ in range(50)][20:].count(0) > 25
        assert [run(1, 4) for _ in range(200)][150:].count(0) < 5
        assert [run(8, 1) for _ in range(100)][50:].count(0) > 45

    @pytest.mark.parametrize("share", [1.0, 0.0])
    @pytest.mark.parametrize("wrong", [{(1, 2): 2.4, (1, 4): 2.5}, {(1, 0): 2.4}, {(1, 2): 0.5, (1, 4): 0.5}], ids=str)
    def test_steps_that_run_set_right_what_was_timed_wrongly(self, wrong: dict, share: float) -> None:
        """On a CPU, which shares its caches with others, one step at the start may have taken twice its time."""
        times = {(1, 0): 1.0, (1, 2): 1.05, (1, 4): 1.1}
        own, chosen = budget(may_decline=True, times={**times, **wrong}), list[int]()
        for _ in range(400):
            chosen.append(own.choose(1))
            own.note_time(chosen[-1], 1, times[1, chosen[-1]])
            if chosen[-1]:
                own.note(chosen[-1], [int(share * chosen[-1])])
        assert chosen[200:].count(4 if share else 0) > 180

    def test_the_newest_steps_count_but_for_the_slowest(self) -> None:
        own = budget(may_decline=True)
        own.note_time(0, 1, 3.0)
        assert own._time(1, 0) == TIMES[1, 0]  # one may have been slow
        for seconds in (0.5, 9.0, *[2.0, 4.0] * 3, 9.0):
            own.note_time(0, 1, seconds)
        own.note_time(2, 9, 0.1)  # more rows than steps that verify have
        assert own._time(1, 0) == (9.0 + 3 * 2.0 + 3 * 4.0) / 7
        choices(own, 600)
        assert own._time(1, 0) == TIMES[1, 0]  # that was long ago

    def test_one_slow_step_does_not_end_guesses(self) -> None:
        own, chosen = budget(may_decline=True), list[int]()
        for step in range(600):
            chosen.append(own.choose(1))
            own.note_time(chosen[-1], 1, 1.0 if chosen[-1] == 0 else 7.0 if step == 0 else 1.1)
            if chosen[-1]:
                own.note(chosen[-1], [chosen[-1]])
        assert chosen[200:].count(4) > 380

    def test_no_sizes_are_no_guesses(self) -> None:
        assert Budget([], {}, 4, may_decline=False).choose(1) == 0


class TestTextSlots:
    def test_samples_of_a_prompt_are_a_group_and_one_that_ended_stays_findable(self) -> None:
        texts, group = TextSlots(4), samples(3, [5, 6])
        told = [texts.join(seq) for seq in group[:2]]
        assert told[0].group == told[1].group
        texts.leave(group[0])
        told.append(texts.join(group[2]))
        assert texts.take_changed() == {told[0].group: [own.text for own in told]}
        assert texts.take_changed() == {}

    def test_a_later_request_of_the_same_prompt_finds_what_has_ended(self) -> None:
        texts, (first,), (again,) = TextSlots(4), samples(1, [5, 6]), samples(1, [5, 6], seed=10)
        told = [texts.join(first)]
        texts.leave(first)
        told.append(texts.join(again))
        assert texts.take_changed() == {told[0].group: [own.text for own in told]}

    def test_a_slot_that_is_needed_comes_from_a_prompt_that_has_no_row_before_others(self) -> None:
        texts = TextSlots(4)
        (first, runs), (other,), (new,) = samples(2, [5]), samples(1, [6], seed=10), samples(1, [7], seed=20)
        told = {seq: texts.join(seq) for seq in (first, runs, other)}
        texts.take_changed()
        texts.leave(first)
        texts.leave(other)
        assert texts.join(new).text not in [own.text for own in told.values()]
        (newer,), (newest,) = samples(1, [8], seed=30), samples(1, [9], seed=40)
        assert texts.join(newer).text == told[other].text
        assert texts.join(newest).text == told[first].text
        assert texts.take_changed()[told[runs].group] == [told[runs].text]

    def test_what_a_prompt_has_from_before_goes_before_what_others_need(self) -> None:
        """Three prompts come over and over: with four slots, each finds its text again."""
        texts = TextSlots(4)
        for epoch in range(3):
            for token_id in (5, 6, 7):
                (seq,) = samples(1, [token_id])
                group = texts.join(seq).group
                assert len(texts.take_changed()[group]) == (2 if epoch else 1)
                texts.leave(seq)

    @settings(max_examples=50, deadline=None)
    @given(rng=st.integers(0, 2**32).map(random.Random), num_slots=st.integers(4, 40), rows=st.integers(1, 4))
    def test_running_sequences_have_slots_and_groups_of_their_own(self, rng, num_slots, rows) -> None:
        texts, running, seed = TextSlots(num_slots), {}, 0
        waiting: list[Sequence] = []
        for _ in range(200):
            if not waiting:
                seed += 100
                waiting = samples(rng.choice([1, 2, 40]), [seed], seed=seed)
            if len(running) < rows and rng.random() < 0.5:
                seq = waiting.pop()
                running[seq] = texts.join(seq)
                members = texts.take_changed()[running[seq].group]
                assert members[-1] == running[seq].text
                assert len(set(members)) == len(members) <= MEMBERS
            elif running:
                seq = rng.choice(list(running))
                del running[seq]
                texts.leave(seq)
            assert len({own.text for own in running.values()}) == len(running)
            groups = {(own.group, seq.request_id) for seq, own in running.items()}
            assert len({group for group, _ in groups}) == len(groups)


def test_draws_are_told_apart_from_faults_and_empty_places() -> None:
    seqs = samples(5, [5, 6])
    seqs[4].finish_reason, seqs[4].status = "abort", SequenceStatus.FINISHED
    drawn = [
        [7, 8, 9, 2],
        [7, NO_TOKEN, NOTHING, 2],
        [NO_TOKEN, NOTHING, NOTHING, 1],
        [NOTHING] * 3 + [0],
        [7, 8, 9, 2],
    ]
    draws = read_verified(seqs, drawn)
    assert draws.firsts == [7, 7, NO_TOKEN, 0, 7]
    assert draws.tokens == [[7, 8, 9], [7], [], [], [7, 8, 9]]
    assert draws.lasts == [0, NO_TOKEN, NO_TOKEN, 0, 0]
    assert (draws.num_tokens, draws.num_first, draws.num_proposed) == (7, 2, 5)
    assert [seq.num_proposed_tokens for seq in seqs] == [2, 2, 1, 0, 0]


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
                row |= {"end": join.drafting.end, "text": join.drafting.text}
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
            self.queries.append(range(0))
            return []
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


def check_state(sched: Scheduler, in_flight: list[tuple[Step, list[Sequence]]]) -> None:
    """Check that what is counted step by step equals what follows from all steps in flight."""
    check_blocks(sched)
    for seq in sched.running:
        if seq.is_only_scored:
            continue
        steps = [step for step, seqs in in_flight if seq in seqs]
        reach = [min(step.guesses, MOST_GUESSES) + 1 for step in steps]
        assert seq.num_scheduled == len(seq) - 1 + sum(reach)
        assert seq.num_unsure == sum(reach) - len(steps)
        has_ended = len(seq) + len(steps) >= seq.end
        assert (seq in sched.decoding.seqs) != has_ended
        assert (seq.status is SequenceStatus.RUNNING) != has_ended
        for group, table, released in zip(sched.block_manager.groups, seq.block_tables, seq.num_released, strict=True):
            assert len(table) * group.block_size >= min(seq.num_scheduled, seq.end - 1)
            assert len(table) <= -(-max(seq.end - 1, len(seq)) // group.block_size)
            if group.window is not None:  # it keeps what the first of the queries to come sees
                assert released * group.block_size <= max(0, len(seq) - 1 + len(steps) - group.window + 1)


@pytest.mark.parametrize("depth", [1, 2], ids=["in step", "one step ahead"])
@settings(max_examples=60, deadline=None)
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
        sched = Scheduler(manager, rows, budget, long_from, Speculation(places, MOST_GUESSES))
        serve(sched, depth, requests, arrivals)
    assert sched.block_manager.num_free == blocks


def serve(sched: Scheduler, depth: int, requests, rng: random.Random) -> None:
    row_map = RowMap(texts=TextSlots(sched.max_num_seqs + rng.randrange(5)))
    device = GuessingDevice(sched.block_manager.groups, sched.long_from, rng)
    pending: deque[list[Sequence]] = deque()
    for i, (length, most, ignore, (first, num_first, then), n) in enumerate(requests):
        prompt = ([first] * num_first + [then] * length)[:length]
        pending.append(samples(n if most else 1, prompt, most, () if ignore else (EOS,), seed=10 * i))
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
