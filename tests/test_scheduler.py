"""Scheduler and RowMap: examples test the order of steps; random loads test that every request ends correctly."""

from __future__ import annotations

import random
from collections import Counter, deque
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain, pairwise

import pytest
from conftest import CollidingBlockManager, alike, layout_of, whole_only
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoinfer import SamplingParams
from nanoinfer.attention.cache_layout import CacheGroup, CacheLayout
from nanoinfer.engine.admission.admission import Admission
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.prefixes.prefix_tree import NONE, Node
from nanoinfer.engine.prefixes.shared_prefixes import PrefixFinder
from nanoinfer.engine.row_map import RowMap
from nanoinfer.engine.scheduler import MIN_PREFILL_TOKENS, Scheduler
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.engine.step import DecodeStep, PrefillStep, Step
from nanoinfer.runner.message import DecodeMessage, PrefillMessage, PrefixMessage, StepMessage

BLOCK, EOS, ADAPTERS = 4, 1, 2


def scheduler(
    blocks: int = 64,
    rows: int = 8,
    budget: int = 32,
    layout: CacheLayout | None = None,
    long_from: int | None = None,
    kind: type[BlockManager] = BlockManager,
) -> Scheduler:
    return Scheduler(kind(blocks, layout or alike(BLOCK)), rows, budget, long_from)


def sequence(prompt_len: int, max_tokens: int = 5, ignore_eos: bool = False, start: int = 10) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    prompt = list(range(start, start + prompt_len))
    return Sequence(prompt, params, seed=0, max_model_len=40, stop_ids=frozenset() if ignore_eos else frozenset([EOS]))


def samples(
    n: int, prompt: list[int], max_tokens: int = 5, stop_ids: tuple[int, ...] = (), seed: int = 0
) -> list[Sequence]:
    """The sequences of one request; without tokens to generate, the second half of its prompt is scored."""
    scored = {} if max_tokens else {"prompt_logprobs": 0, "prompt_logprobs_start": len(prompt) // 2}
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_ids, **scored)
    return [
        Sequence(prompt, params, seed + i, 40, frozenset(stop_ids), request_id=seed, sample_index=i) for i in range(n)
    ]


def prefill(step: Step | None) -> list[tuple[Sequence, int, int]]:
    assert isinstance(step, PrefillStep)
    return [(chunk.seq, chunk.start, chunk.end) for chunk in step.chunks]


def decode(step: Step | None) -> list[Sequence]:
    assert isinstance(step, DecodeStep)
    return step.seqs


def run(sched: Scheduler) -> list[Sequence]:
    """Run a step and read its tokens at once; returns its sequences."""
    step = sched.schedule(in_flight=False)
    seqs = step.seqs if isinstance(step, DecodeStep) else [seq for seq, _, _ in prefill(step)]
    sched.postprocess(step, [(seq, 0) for seq in seqs])
    return seqs


def test_prompts_go_first_in_the_order_they_came_and_long_ones_in_chunks() -> None:
    sched = scheduler(budget=10)
    a, b, c = sequence(4), sequence(13, start=30), sequence(3, start=50)
    for seq in (a, b, c):
        sched.add(seq)
    assert prefill(sched.schedule(in_flight=False)) == [(a, 0, 4), (b, 0, 6)]
    assert prefill(sched.schedule(in_flight=False)) == [(b, 6, 13), (c, 0, 3)]
    assert decode(sched.schedule(in_flight=False)) == [a, b, c]


def test_a_sequence_leaves_when_its_last_token_is_planned_before_it_is_known() -> None:
    sched = scheduler()
    short, long = sequence(3, max_tokens=2), sequence(3, max_tokens=4)
    sched.add(short)
    sched.add(long)
    sched.schedule(in_flight=False)
    assert [decode(sched.schedule(in_flight=True)) for _ in range(3)] == [[short, long], [long], [long]]
    assert sched.schedule(in_flight=True) is None


def test_no_more_sequences_run_than_there_are_rows() -> None:
    sched = scheduler(rows=2)
    seqs = [sequence(3) for _ in range(3)]
    for seq in seqs:
        sched.add(seq)
    assert [seq for seq, _, _ in prefill(sched.schedule(in_flight=False))] == seqs[:2]
    assert decode(sched.schedule(in_flight=False)) == seqs[:2]


def test_waiting_sequences_that_may_get_more_tokens_can_go_first() -> None:
    """max_model_len, 40, may leave less room than max_tokens. Equal ones keep their order."""
    seqs = [sequence(4), sequence(4, 9), sequence(38, 30), sequence(6), sequence(4, 7)]
    for rows, order in ((4, (1, 4, 0, 3, 2)), (5, range(5))):  # there may be rows for all
        sched = scheduler(rows=rows)
        for seq in seqs:
            sched.add(seq)
        sched.put_longest_first()
        assert list(sched.waiting) == [seqs[index] for index in order]


def test_prompts_gather_while_others_decode() -> None:
    """Prompts gather until a sixteenth of the rows is free."""
    sched = scheduler(blocks=2000, rows=64, budget=16384)
    for max_tokens in [2, 3, 4, 5, *[30] * 66]:
        sched.add(sequence(10, max_tokens))
    assert len(run(sched)) == 64
    assert [len(run(sched)) for _ in range(4)] == [64, 63, 62, 61]
    assert len(prefill(sched.schedule(in_flight=False))) == 4


@pytest.mark.parametrize("prompt_len", [MIN_PREFILL_TOKENS - 1, MIN_PREFILL_TOKENS])
def test_a_prompt_that_is_worth_a_step_goes_at_once(prompt_len: int) -> None:
    sched = scheduler(blocks=5000, rows=64, budget=16384)
    for max_tokens in [1, *[30] * 63]:
        sched.add(sequence(10, max_tokens))
    run(sched)
    for length in (prompt_len, 10):
        sched.add(Sequence([5] * length, SamplingParams(), seed=0, max_model_len=2 * MIN_PREFILL_TOKENS))
    assert isinstance(sched.schedule(in_flight=False), PrefillStep) == (prompt_len == MIN_PREFILL_TOKENS)


@pytest.mark.parametrize("prompt_len", [3 * MIN_PREFILL_TOKENS - 1, 3 * MIN_PREFILL_TOKENS])
def test_prompts_gather_until_they_fill_the_time_of_a_step(prompt_len: int) -> None:
    sched = scheduler(blocks=5000, rows=64, budget=16384)
    sched.step_tokens = 3 * MIN_PREFILL_TOKENS
    for max_tokens in [1, *[30] * 63]:
        sched.add(sequence(10, max_tokens))
    run(sched)
    for length in (prompt_len, 10):
        sched.add(Sequence([5] * length, SamplingParams(), seed=0, max_model_len=4 * MIN_PREFILL_TOKENS))
    assert isinstance(sched.schedule(in_flight=False), PrefillStep) == (prompt_len == 3 * MIN_PREFILL_TOKENS)


def test_a_few_prompts_that_are_all_start_at_once() -> None:
    sched = scheduler(rows=64)
    sched.add(sequence(3, 50))
    sched.schedule(in_flight=False)
    sched.add(sequence(4, 50))
    assert len(prefill(sched.schedule(in_flight=True))) == 1


@pytest.mark.usefixtures("no_foresight")
def test_the_newest_is_preempted_once_nothing_is_in_flight_and_comes_back_first() -> None:
    sched = scheduler(blocks=4)
    old, new, later = sequence(7, 20), sequence(7, 20, start=30), sequence(7, 20, start=50)
    for seq in (old, new, later):
        sched.add(seq)
    steps = deque([sched.schedule(in_flight=False), sched.schedule(in_flight=True)])
    assert [seq for seq, _, _ in prefill(steps[0])] == [old, new]
    assert sched.schedule(in_flight=True) is None  # both need a third block, but steps are in flight
    for step in steps:
        sched.postprocess(step, [(old, 5), (new, 5)])
    assert decode(sched.schedule(in_flight=False)) == [old]
    assert list(sched.waiting) == [new, later]
    assert sched.num_preemptions == 1
    assert new.block_tables == []


def test_end_of_sequence_ends_a_request_unless_ignored_and_what_comes_after_is_dropped() -> None:
    sched = scheduler()
    ends, goes_on = sequence(3), sequence(3, ignore_eos=True)
    sched.add(ends)
    sched.add(goes_on)
    first, second = sched.schedule(in_flight=False), sched.schedule(in_flight=False)
    tokens = [(ends, EOS), (goes_on, EOS)]
    assert sched.postprocess(first, tokens) == ([ends], 0)
    assert sched.postprocess(second, tokens) == ([], 1)
    assert ends.output_token_ids == [EOS]
    assert goes_on.output_token_ids == [EOS, EOS]


def test_the_samples_of_a_prompt_share_its_blocks() -> None:
    sched = scheduler(blocks=8)
    group = samples(3, list(range(10, 16)))  # a full block, and half of one
    for seq in group:
        sched.add(seq)
    step = sched.schedule(in_flight=False)
    assert prefill(step) == [(group[0], 0, 6)]
    assert [(fork.seq, fork.source) for fork in step.forks] == [(group[1], group[0]), (group[2], group[0])]
    tables = [seq.block_tables[0] for seq in group]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 3
    assert [fork.copied_blocks for fork in step.forks] == [[(tables[0][1], table[1])] for table in tables[1:]]
    assert sched.block_manager.num_free == 4
    assert decode(sched.schedule(in_flight=True)) == group


def test_prompts_of_one_step_share_blocks() -> None:
    sched = scheduler()
    first, second, third = sequence(10), sequence(13), sequence(7)
    for seq in (first, second, third):
        sched.add(seq)
    assert prefill(sched.schedule(in_flight=False)) == [(first, 0, 10), (second, 8, 13), (third, 4, 7)]
    assert first.block_tables[0][:2] == second.block_tables[0][:2]
    assert first.block_tables[0][:1] == third.block_tables[0][:1]


def salted(prompt_len: int, salt: str | None, max_tokens: int = 5, prompt_logprobs: int | None = None) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    vars(params)["cache_salt"] = salt  # as requests do with their own copies
    return Sequence([10] * prompt_len, params, seed=0, max_model_len=40)


def test_prompts_of_one_cache_salt_share_blocks_with_each_other_alone() -> None:
    sched = scheduler(budget=40)
    seqs = [salted(10, salt) for salt in (None, "a", "b", "a", None)]
    for seq in seqs:
        sched.add(seq)
    planned = prefill(sched.schedule(in_flight=False))
    assert {seq: start for seq, start, _ in planned} == dict(zip(seqs, [0, 0, 0, 8, 8], strict=True))
    firsts = [seq.block_tables[0][0] for seq in seqs]
    assert firsts == [firsts[0], firsts[1], firsts[2], firsts[1], firsts[0]]
    assert len(set(firsts)) == 3


def test_continuations_copy_no_tail_of_another_cache_salt() -> None:
    sched = scheduler()
    seqs = [salted(8, salt, max_tokens=0, prompt_logprobs=0) for salt in ("a", "b")]
    for seq in seqs:
        seq.token_ids[-1] = 5
        sched.add(seq)
    assert prefill(sched.schedule(in_flight=False)) == [(seq, 0, 8) for seq in seqs]


@pytest.mark.parametrize("is_launched", [True, False])
def test_a_step_that_was_never_launched_leaves_no_names(is_launched: bool) -> None:
    sched = scheduler(budget=10)
    first, second, again = sequence(17), sequence(6, start=50), sequence(17)
    for seq in (first, second):
        sched.add(seq)
    launched = sched.schedule(in_flight=False)
    assert prefill(launched) == [(first, 0, 10)]
    if is_launched:
        assert prefill(sched.schedule(in_flight=True)) == [(first, 10, 17), (second, 0, 3)]
    sched.abort_all()
    sched.add(again)
    assert prefill(sched.schedule(in_flight=False))[0][1] == (8 if is_launched else 0)


def test_one_that_is_only_scored_ends_with_its_prompt_and_has_no_row() -> None:
    sched, row_map = scheduler(budget=6), RowMap()
    (scored,), plain = samples(1, list(range(10, 20)), max_tokens=0), sequence(2, start=50)
    for seq in (scored, plain):
        sched.add(seq)
    first, second = sched.schedule(in_flight=False), sched.schedule(in_flight=True)
    assert prefill(second) == [(scored, 6, 10), (plain, 0, 2)]
    assert [row_map.describe(step)[1] for step in (first, second)] == [[], [plain]]
    assert sched.postprocess(first, []) == ([], 0)
    assert decode(sched.schedule(in_flight=True)) == [plain]
    assert sched.postprocess(second, [(plain, 5)]) == ([scored], 0)
    assert (scored.finish_reason, scored.output_token_ids) == ("length", [])
    assert list(sched.running) == [plain]


def test_continuations_copy_the_tail_of_the_first_in_the_step_behind_its_own() -> None:
    sched, prompt = scheduler(), list(range(10, 17))
    first, second, other = (Sequence([*prompt, end], samples(1, prompt * 2, 0)[0].params, 0, 40) for end in (5, 6, 7))
    other.token_ids[0] = 9
    for seq in (first, second, other):
        sched.add(seq)
    step = sched.schedule(in_flight=False)
    assert prefill(step) == [(first, 0, 8), (other, 0, 8)]
    behind = sched.schedule(in_flight=True)
    assert prefill(behind) == [(second, 6, 8)]
    assert behind.copies == [(first.block_tables[0][1], second.block_tables[0][1])]
    assert first.block_tables[0][0] == second.block_tables[0][0]


def test_continuations_wait_for_no_more_firsts_than_leave_them_rows() -> None:
    sched = scheduler(rows=4)
    params = samples(1, [3] * 14, 0)[0].params
    seqs = [Sequence([*range(10 * i, 10 * i + 7), end], params, 0, 40) for i in (1, 2, 3) for end in (5, 6, 7)]
    for seq in seqs:
        sched.add(seq)
    assert [seq for seq, _, _ in prefill(sched.schedule(in_flight=False))] == seqs[:1]
    assert [seq for seq, _, _ in prefill(sched.schedule(in_flight=True))] == seqs[1:3]


def test_messages_say_whose_adapter_computes_what() -> None:
    sched, row_map = scheduler(), RowMap(may_adapt=True)
    params, ends = SamplingParams(max_tokens=4), frozenset([EOS])
    plain, adapted = (Sequence([10 + i] * 3, params, 0, 40, ends, adapter=i - 1) for i in range(2))
    for seq in (plain, adapted):
        sched.add(seq)
    step = sched.schedule(in_flight=False)
    message, _ = row_map.describe(step)
    assert isinstance(message, PrefillMessage)
    assert [chunk.adapter for chunk in message.chunks] == [-1, 0]
    for token_id, has_adapters in ((5, True), (EOS, False)):
        sched.postprocess(step, [(plain, 5), (adapted, token_id)])
        step = sched.schedule(in_flight=False)
        message, _ = row_map.describe(step)
        assert isinstance(message, DecodeMessage)
        assert message.has_adapters is has_adapters


def test_samples_that_find_no_room_start_later_from_the_cache() -> None:
    sched = scheduler(rows=2)
    group = samples(3, list(range(10, 19)), max_tokens=2)
    for seq in group:
        sched.add(seq)
    first, second = sched.schedule(in_flight=False), sched.schedule(in_flight=False)
    assert [fork.seq for fork in first.forks] == [group[1]]
    sched.postprocess(first, [(seq, 5) for seq in group[:2]])
    sched.postprocess(second, [(seq, 6) for seq in group[:2]])
    assert prefill(sched.schedule(in_flight=False)) == [(group[2], 8, 9)]


def test_one_that_is_finished_leaves_from_wherever_it_is() -> None:
    sched = scheduler(rows=1, budget=4)
    running, halfway, waiting = sequence(3), sequence(6, start=20), sequence(3, start=30)
    for seq in (running, halfway, waiting):
        sched.add(seq)
    step = sched.schedule(in_flight=False)
    for seq in (running, waiting, halfway):
        sched.finish(seq, "abort")
        assert seq.is_finished
        assert seq.finish_reason == "abort"
    assert sched.is_finished
    assert sched.block_manager.num_free == 64
    assert sched.postprocess(step, [(running, 5)]) == ([], 1)
    assert running.output_token_ids == []


def test_one_that_waits_is_finished_without_a_look_at_others(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(Sequence, "__eq__", lambda *pair: compared.append(pair) or pair[0] is pair[1])
    sched = scheduler(rows=2)
    seqs = [sequence(3) for _ in range(9)]
    for seq in seqs:
        sched.add(seq)
    sched.schedule(in_flight=False)
    for seq in reversed(seqs[2:]):
        sched.finish(seq, "abort")
    assert not sched.waiting
    assert not compared


def test_abort_all_gives_everything_back() -> None:
    sched = scheduler(rows=2)
    for _ in range(4):
        sched.add(sequence(6))
    for _ in range(2):
        sched.schedule(in_flight=False)
    sched.abort_all()
    assert sched.is_finished
    assert sched.schedule(in_flight=False) is None
    assert sched.block_manager.num_free == 64


def test_with_a_window_a_generation_may_be_much_longer_than_the_cache() -> None:
    sched = scheduler(blocks=5, layout=alike(BLOCK, 6))
    seq = Sequence([5] * 18, SamplingParams(max_tokens=400), seed=0, max_model_len=1000)
    sched.add(seq)
    assert run(sched) == [seq]
    assert seq.num_released == [3]  # the next query, at position 18, sees tokens from 13 on
    while not sched.is_finished:
        step = sched.schedule(in_flight=False)
        assert decode(step) == [seq]
        check_windows(sched, [seq])
        sched.postprocess(step, [(seq, 0)])
    assert seq.num_output_tokens == 400
    assert sched.num_preemptions == 0
    assert sched.block_manager.num_free == 5


def test_one_with_a_window_may_leave_before_the_next_step_is_planned() -> None:
    sched = scheduler(budget=10, layout=alike(BLOCK, 5))
    seq = sequence(25)
    sched.add(seq)
    assert prefill(sched.schedule(in_flight=False)) == [(seq, 0, 10)]
    sched.finish(seq, "abort")
    assert sched.schedule(in_flight=True) is None
    check_blocks(sched)


def test_chunks_leave_blocks_behind_the_window_and_forks_do_not_get_them() -> None:
    sched = scheduler(blocks=8, budget=10, layout=alike(BLOCK, 5))
    group = samples(2, list(range(10, 35)))
    for seq in group:
        sched.add(seq)
    first, second = sched.schedule(in_flight=False), sched.schedule(in_flight=True)
    sched.postprocess(first, [])
    assert group[0].num_released == [4]  # steps to be planned see tokens from 16 on; nobody overtakes the second chunk
    sched.postprocess(second, [])
    assert group[0].num_released == [4]
    third = sched.schedule(in_flight=False)
    assert [(fork.seq, fork.seq.num_released) for fork in third.forks] == [(group[1], [4])]
    check_blocks(sched)
    sched.postprocess(third, [(seq, 5) for seq in group])
    check_blocks(sched)
    assert [seq.num_released for seq in group] == [[5], [5]]


def test_the_prompt_of_a_mixed_model_runs_in_shorter_chunks_where_blocks_are_short() -> None:
    """Beside the 17 blocks of the layers without a window, the first chunk finds five, and each later one three."""
    sched = scheduler(blocks=21, budget=64, layout=layout_of((BLOCK, None), (BLOCK, 6)))
    seq = Sequence([5] * 64, SamplingParams(max_tokens=5), seed=0, max_model_len=100)
    sched.add(seq)
    ends = [0, 20, 32, 44, 56, 64]
    for start, end in pairwise(ends):
        assert prefill(sched.schedule(in_flight=True)) == [(seq, start, end)]
        check_blocks(sched)
    for _ in range(4):
        step = sched.schedule(in_flight=True)
        assert decode(step) == [seq]
        check_windows(sched, [seq])
    assert sched.num_preemptions == 0


def test_groups_with_windows_leave_each_other_blocks() -> None:
    """The first group must not take them all, for tokens for which the second finds none."""
    sched = scheduler(blocks=7, layout=layout_of((2, 3), (2, 1)))
    seq = sequence(25)
    sched.add(seq)
    assert prefill(sched.schedule(in_flight=True)) == [(seq, 0, 6)]
    while seq in sched.decoding.seqs or seq in sched.waiting:
        assert sched.schedule(in_flight=True) is not None
        check_blocks(sched)


@pytest.mark.usefixtures("no_foresight")
def test_a_half_done_prompt_that_finds_no_block_lets_others_decode_and_goes_on_later() -> None:
    sched = scheduler(blocks=8, budget=6, layout=layout_of((BLOCK, None), (BLOCK, 8)))
    runs, halfway = sequence(2, max_tokens=3), sequence(16, max_tokens=2, start=30)
    sched.add(runs)
    assert run(sched) == [runs]
    sched.add(halfway)
    for start, end in ((0, 6), (6, 8)):  # the second chunk ends where its blocks do
        step = sched.schedule(in_flight=False)
        assert prefill(step) == [(halfway, start, end)]
        sched.postprocess(step, [])
    assert [run(sched) for _ in range(2)] == [[runs]] * 2
    assert runs.is_finished
    assert prefill(sched.schedule(in_flight=False)) == [(halfway, 8, 14)]
    assert sched.num_preemptions == 0


@pytest.mark.usefixtures("no_foresight")
def test_the_only_one_that_runs_gives_its_blocks_to_a_half_done_prompt() -> None:
    sched = scheduler(blocks=8, budget=6, layout=layout_of((BLOCK, None), (BLOCK, 8)))
    runs, halfway = sequence(4, max_tokens=9), sequence(16, max_tokens=2, start=30)
    sched.add(runs)
    assert run(sched) == [runs]
    sched.add(halfway)
    for start, end in ((0, 6), (6, 8), (8, 14)):
        step = sched.schedule(in_flight=False)
        assert prefill(step) == [(halfway, start, end)]
        sched.postprocess(step, [])
    assert sched.num_preemptions == 1
    assert list(sched.waiting) == [halfway, runs]


def test_samples_of_a_long_prompt_share_what_its_windows_have_not_left_behind() -> None:
    sched = scheduler(blocks=30, budget=10, layout=layout_of((BLOCK, None), (2, 5)))
    group = samples(3, list(range(10, 35)))
    for seq in group:
        sched.add(seq)
    first, second, third = (sched.schedule(in_flight=True) for _ in range(3))
    assert prefill(third) == [(group[0], 20, 25)]
    assert [(fork.seq, fork.source) for fork in third.forks] == [(group[1], group[0]), (group[2], group[0])]
    assert [seq.num_released for seq in group] == [[0, 8]] * 3  # the third chunk still sees tokens from 16 on
    assert [len(fork.copied_blocks) for fork in third.forks] == [2, 2]  # of each group
    for step in (first, second, third):
        sched.postprocess(step, [(seq, 5) for seq in group] if step is third else [])
    check_blocks(sched)
    assert decode(sched.schedule(in_flight=False)) == group
    assert [seq.num_released for seq in group] == [[0, 10]] * 3
    check_windows(sched, group)


def test_one_that_outgrows_short_contexts_starts_again_once_its_tokens_are_known() -> None:
    sched, row_map = scheduler(long_from=7), RowMap()
    grows, stays = sequence(6), sequence(3, 9, start=30)
    for seq in (grows, stays):
        sched.add(seq)
    first = sched.schedule(in_flight=False)
    row_map.describe(first)
    second = sched.schedule(in_flight=True)
    row_map.describe(second)
    assert decode(second) == [grows, stays]  # the last step in which `grows` is short
    sched.postprocess(first, [(grows, 5), (stays, 5)])
    assert grows.status is SequenceStatus.OUTGROWN
    third = sched.schedule(in_flight=True)
    row_map.describe(third)
    assert decode(third) == [stays]
    sched.postprocess(second, [(grows, 6), (stays, 6)])
    assert (list(sched.waiting), grows.block_tables) == ([grows], [])
    again = sched.schedule(in_flight=True)
    assert prefill(again) == [(grows, 0, 8)]
    message, order = row_map.describe(again)
    assert (message.chunks[0].is_long, order, grows.row) == (True, [grows], 1)
    assert decode(sched.schedule(in_flight=True)) == [stays, grows]
    assert sched.num_preemptions == 0


def test_one_that_starts_again_in_the_next_step_leaves_its_row_and_joins() -> None:
    sched, row_map = scheduler(long_from=3), RowMap()
    grows, stays = sequence(3), sequence(10, start=30)
    for seq in (grows, stays):
        sched.add(seq)
    step = sched.schedule(in_flight=False)
    message, order = row_map.describe(step)
    assert [chunk.is_long for chunk in message.chunks] == [False, True]
    sched.postprocess(step, [(seq, 5) for seq in order])
    message, order = row_map.describe(sched.schedule(in_flight=False))
    assert (message.moves, message.num_rows, order) == ([(1, 0)], 1, [grows])
    assert row_map.seqs == [stays, grows]


def test_the_last_token_is_never_computed_and_makes_no_sequence_long() -> None:
    sched = scheduler(long_from=7)
    seq = sequence(6, max_tokens=2)
    sched.add(seq)
    assert [run(sched) for _ in range(2)] == [[seq]] * 2
    assert seq.finish_reason == "length"
    assert sched.is_finished


def test_one_that_starts_again_waits_behind_a_prompt_that_is_half_done() -> None:
    sched = scheduler(blocks=11, budget=8, long_from=7)
    grows, halfway = sequence(7), Sequence([5] * 30, SamplingParams(max_tokens=2), seed=0, max_model_len=40)
    sched.add(grows)
    steps = [sched.schedule(in_flight=False)]
    sched.add(halfway)
    steps.append(sched.schedule(in_flight=True))
    assert prefill(steps[1]) == [(halfway, 0, 8)]
    sched.postprocess(steps[0], [(grows, 5)])
    assert list(sched.waiting) == [halfway, grows]
    check_blocks(sched)


def test_all_that_have_begun_start_again_in_their_order() -> None:
    sched = scheduler(blocks=40, budget=10)
    first, second, halfway, later = (sequence(7, 9, start=start) for start in (10, 30, 50, 70))
    for seq in (first, second, halfway, later):
        sched.add(seq)
    for _ in range(2):
        step = sched.schedule(in_flight=False)
        sched.postprocess(step, [(chunk.seq, 5) for chunk in step.chunks if chunk.is_last])
    assert list(sched.running) == [first, second]
    assert halfway.num_scheduled == 6
    sched.restart(sched.unfinished)
    assert list(sched.waiting) == [first, second, halfway, later]
    assert [len(seq) for seq in sched.waiting] == [8, 8, 7, 7]
    assert sched.block_manager.num_free == 40
    check_blocks(sched)


def test_some_that_start_again_wait_behind_a_half_done_prompt_that_goes_on() -> None:
    sched = scheduler(blocks=40, budget=10)
    first, second, halfway = (sequence(7, 9, start=start) for start in (10, 30, 50))
    for seq in (first, second, halfway):
        sched.add(seq)
    for _ in range(2):
        step = sched.schedule(in_flight=False)
        sched.postprocess(step, [(chunk.seq, 5) for chunk in step.chunks if chunk.is_last])
    sched.restart({second})
    assert (list(sched.running), list(sched.waiting)) == ([first], [halfway, second])
    assert halfway.num_scheduled == 6
    check_blocks(sched)


Kind = tuple[int, bool]  # of a sequence: its adapter, and whether it is long


@dataclass
class Content:
    """What a block holds. With the first token that another group writes into it, all of it is lost.

    tokens: offset -> the token, the kind of sequence for which it was computed, and the version of the weights
    """

    group: int
    tokens: dict[int, tuple[int, Kind, int]] = field(default_factory=dict)


class Device:
    """A rank's rows, built from messages alone. Each row "samples" its tokens from what the messages said."""

    def __init__(self, groups: tuple[CacheGroup, ...], long_from: int | None = None) -> None:
        self.rows: list[dict] = []
        self.groups, self.long_from = groups, long_from
        self.cache: dict[int, Content] = {}  # of each block
        self.versions = Counter[int]()  # of the weights, by adapter
        self.kept: set[Sequence] = set()  # those that go on with keys of older weights
        self.prefixes: PrefixMessage | None = None

    def run(self, message: StepMessage) -> list[int]:
        for source, destination in message.moves:
            self.rows[destination] = dict(self.rows[source])
        del self.rows[message.num_rows :]
        assert len(self.rows) == message.num_rows
        if isinstance(message, PrefillMessage):
            for source, destination in message.copies:
                self.cache[destination] = deepcopy(self.cache[source])
            for chunk in message.chunks:
                for position, token in enumerate(chunk.token_ids, start=chunk.start):
                    self.write(chunk.block_tables, position, token, (chunk.adapter, chunk.is_long))
            for join in message.joins:
                chunk = message.chunks[join.chunk]
                for source, destination in join.copied_blocks:
                    self.cache[destination] = deepcopy(self.cache[source])
                end = chunk.start + len(chunk.token_ids)
                row = {"len": end, "tables": deepcopy(join.block_tables), "seed": join.seed, "adapter": chunk.adapter}
                self.rows.append(row)
            return [self.sample(row) for row in self.rows[message.num_rows :]]
        assert isinstance(message, DecodeMessage)
        for row, group, column, block in message.new_blocks:
            assert column == len(self.rows[row]["tables"][group])
            self.rows[row]["tables"][group].append(block)
        for row in self.rows:
            row["len"] += 1
            self.write(row["tables"], row["len"] - 1, row["last"], (row["adapter"], self.is_long(row["len"])))
        assert message.has_adapters == any(row["adapter"] != NONE for row in self.rows)
        self.check_longest(message)
        self.prefixes = message.new_prefixes or self.prefixes
        if message.shares:
            self.check_prefixes()
        return [self.sample(row) for row in self.rows]

    def check_longest(self, message: DecodeMessage) -> None:
        assert message.max_context_len == max(row["len"] for row in self.rows)

    def check_prefixes(self) -> None:
        """Check that the rows of a run hold the same blocks, which hold none of their newest tokens."""
        assert sorted(self.prefixes.order) == list(range(len(self.rows)))
        covered = [0] * len(self.rows)
        for first, count, start, end in self.prefixes.runs:
            members = self.prefixes.order[first : first + count]
            assert len(members) == count > 1
            for row in members:
                assert covered[row] == start < end
                assert self.rows[row]["tables"][0][start:end] == self.rows[members[0]]["tables"][0][start:end]
                assert end * self.groups[0].block_size < self.rows[row]["len"]
                covered[row] = end
        assert any(covered)

    def is_long(self, length: int) -> bool:
        return self.long_from is not None and length > self.long_from

    def write(self, tables: list[list[int]], position: int, token: int, kind: Kind) -> None:
        for index, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            block_id = table[position // group.block_size]
            content = self.cache.get(block_id)
            if content is None or content.group != index:
                content = self.cache[block_id] = Content(index)
            content.tokens[position % group.block_size] = token, kind, self.versions[kind[0]]

    def renew(self, sched: Scheduler, adapter: int | None) -> None:
        """Take new weights, of everything or of an adapter. No step is in flight."""
        sched.reset_prefix_cache(adapter)
        self.versions.update(range(NONE, ADAPTERS) if adapter is None else [adapter])
        affected = {seq for seq in sched.unfinished if adapter in (None, seq.adapter)}
        self.kept = self.kept - affected | {seq for seq in affected if seq.block_tables}

    def read(self, index: int, table: list[int], start: int, end: int) -> list[tuple[int, Kind, int]]:
        """Read the tokens from `start` to `end` as the layers of one group do."""
        size = self.groups[index].block_size
        contents = [self.cache[table[position // size]] for position in range(start, end)]
        assert all(content.group == index for content in contents)
        return [content.tokens[position % size] for position, content in enumerate(contents, start)]

    def sample(self, row: dict) -> int:
        row["last"] = self.token(row)
        return row["last"]

    @staticmethod
    def token(row: dict) -> int:
        """Return a token that depends on seed and position alone, as in sampling; one in 20 ends the sequence."""
        return (row["seed"] * 7919 + row["len"] * 104729) % 20


def expected_tokens(seq: Sequence) -> list[int]:
    tokens: list[int] = []
    while seq.num_prompt_tokens + len(tokens) < seq.max_len:
        tokens.append(Device.token({"seed": seq.seed, "len": seq.num_prompt_tokens + len(tokens)}))
        if tokens[-1] in seq.stop_ids:
            break
    return tokens


def check_blocks(sched: Scheduler) -> None:
    manager = sched.block_manager
    seqs = (*sched.waiting, *sched.running)
    used = Counter(block for seq in seqs for table in manager.held(seq) for block in table)
    for seq in seqs:
        assert not seq.is_finished
        for group, released in zip(manager.groups if seq.block_tables else (), seq.num_released, strict=True):
            if group.window is None:
                assert released == 0
            else:  # the sequence keeps the blocks that its next query sees
                assert released * group.block_size <= max(0, seq.num_scheduled - group.window + 1)
    for block_id, block in enumerate(manager.blocks):
        assert block.ref_count == used[block_id]
        assert (block_id in manager.free_blocks) == (block.ref_count == 0)
        assert block.node is None or (block.node.is_found and block.node.blocks[block.place] == block_id)
    for node in manager.tree:
        assert not node.is_empty
        assert all(manager.blocks[block_id].node is node for block_id in node.blocks if block_id != NONE)


def check_decoding(sched: Scheduler) -> None:
    """Check that the state that the scheduler updates step by step equals the state computed from all sequences."""
    manager = sched.block_manager
    groups = manager.groups
    exhausted = [seq for seq in sched.running if seq.num_scheduled + 1 >= seq.max_len]
    outgrown = [seq for seq in sched.running if seq.num_scheduled == sched.long_from and seq not in exhausted]
    assert sched.decoding.seqs == [seq for seq in sched.running if seq not in (*exhausted, *outgrown)]
    assert Counter(sched.decoding.full) == Counter(seq for seq in sched.decoding.seqs if manager.num_needed(seq))
    for seq in sched.running:
        if seq in outgrown:
            assert seq.status is SequenceStatus.OUTGROWN
        else:
            assert seq.status is (SequenceStatus.ENDING if seq in exhausted else SequenceStatus.RUNNING)
    for seq in sched.decoding.seqs:
        later = range(seq.num_scheduled + 1, seq.max_len)
        ends = (seq.max_len - 1, sched.long_from)
        assert seq.check_at == next(
            length for length in later if length in ends or any(length % group.block_size == 0 for group in groups)
        )


class Refused:
    """Notes the blocks that no node has because another block of the same tokens was the node's already."""

    def __init__(self, manager: BlockManager) -> None:
        self.blocks: set[int] = set()
        can_attach, detach = manager.tree.can_attach, manager.tree.detach

        def noted(block_id: int, node: Node, place: int) -> bool:
            can = can_attach(block_id, node, place)
            if not can:
                self.blocks.add(block_id)
            return can

        def handed_out(block_id: int) -> None:
            self.blocks.discard(block_id)
            detach(block_id)

        manager.tree.can_attach, manager.tree.detach = noted, handed_out


def postprocess(
    sched: Scheduler, step: Step, tokens: list[tuple[Sequence, int]], kept: set[Sequence], refused: Refused
) -> None:
    """Postprocess; then check that exactly the blocks are nodes' that planned prefill steps, or read decodes, fill.

    kept: sequences whose blocks nobody is to find
    """
    manager = sched.block_manager
    seqs = [chunk.seq for chunk in step.chunks] if isinstance(step, PrefillStep) else step.seqs
    before = [(seq.node, seq.num_released.copy(), manager.held(seq)) for seq in seqs]  # empty if it ended earlier
    ends = [min(seq.num_scheduled, len(seq)) for seq in seqs]
    sched.postprocess(step, tokens)
    if isinstance(step, DecodeStep):
        ends = [len(seq) - 1 for seq in seqs]
        check_windows(sched, step.seqs)
    for seq, (node, released, held), end in zip(seqs, before, ends, strict=True):
        if not held or seq in kept:
            continue
        filled = end // manager.prefix_size * manager.prefix_size
        if not (node.is_found and is_found(manager, seq, filled)):  # a node was lost before its child was filled
            assert refused.blocks.intersection(chain(*held)) or all(group.window for group in manager.groups)
            filled = 0
        for group, first, table in zip(manager.groups, released, held, strict=True):
            for column, block_id in enumerate(table, first):
                has_node = manager.blocks[block_id].node is not None
                if (column + 1) * group.block_size <= filled:
                    assert has_node or block_id in refused.blocks
                elif (column + 1) * group.block_size > end:
                    assert not has_node


def check_windows(sched: Scheduler, seqs: list[Sequence]) -> None:
    """Check that sequences that decode hold no more blocks than their windows need."""
    for seq in seqs:
        for group, table in zip(sched.block_manager.groups, sched.block_manager.held(seq), strict=False):
            assert group.most_blocks is None or len(table) <= group.most_blocks


def is_found(manager: BlockManager, seq: Sequence, end: int) -> bool:
    """Whether a lookup finds a node of the first tokens, up to `end`."""
    node, size = manager.tree.root(seq.adapter, seq.is_long), manager.prefix_size
    for start in range(0, end, size):
        if node is not None:
            node = manager.tree.find(node, seq.token_ids[start : start + size].tobytes())
    return node is not None


GROUPS = st.one_of(  # a block size and a window of each group
    st.just([(BLOCK, None)]),
    st.tuples(st.tuples(st.just(BLOCK), st.integers(1, 20))),
    st.lists(st.tuples(st.sampled_from([2, 3, 4, 6]), st.none() | st.integers(1, 20)), min_size=2, max_size=3).map(
        lambda groups: sorted(groups, key=lambda group: group[1] is not None)
    ),
)
ENGINES = {
    "groups": GROUPS,
    "rows": st.integers(1, 6),
    "budget": st.integers(1, 40),
    "worth": st.tuples(st.integers(1, 100), st.sampled_from([1 / 16, 1 / 2, 1])),
    "long_from": st.none() | st.integers(1, 38),
    "kind": st.sampled_from([BlockManager, CollidingBlockManager]),
    "foresight": st.booleans(),
    "arrivals": st.integers(0, 2**32).map(random.Random),  # st.randoms() seldom draws what is not close to 0
}


def a_request(shortest: int) -> st.SearchStrategy:
    """Draw what serve_random_requests takes for one request; shortest: tokens of its prompt."""
    return st.tuples(
        st.integers(shortest, 30),
        st.integers(0, 20),
        st.booleans(),
        st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 3)),
        st.sampled_from([1, 1, 2, 5]),
    )


@pytest.mark.parametrize("turn", [1, *whole_only([2, 3])])
@pytest.mark.parametrize("depth", [1, 2], ids=["in step", "one step ahead"])
@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(
        a_request(shortest=1),
        min_size=1,
        max_size=25,
    ),
    spare=st.integers(0, 30),
    **ENGINES,
)
def test_every_request_ends_with_its_own_tokens(
    depth, turn, requests, groups, spare, rows, budget, worth, long_from, kind, foresight, arrivals
) -> None:
    """Random requests, some with several samples, arrive and are aborted at random times. Weights and adapters change.

    Prompts share prefixes, and also have equal blocks after different ones. Some prompts are only scored. The device
    sees messages alone. Each turn draws others.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("MIN_PREFILL_TOKENS", "MAX_FREE_ROWS"), worth, strict=True):
            patch.setattr(f"nanoinfer.engine.scheduler.{name}", value)
        for name, value in (("MIN_ROWS", 2), ("MIN_TOKENS", 2), ("MIN_SAVED", 1)):
            patch.setattr(f"nanoinfer.engine.prefixes.shared_prefixes.{name}", value)
        if not foresight:
            patch.setattr(Admission, "is_roomy", True)
        layout = layout_of(*groups)
        blocks = layout.blocks_of(40) + spare  # the longest sequence fits
        sched = scheduler(blocks, rows, budget, layout, long_from, kind)
        serve_random_requests(sched, depth, requests, arrivals)
    assert sched.block_manager.num_free == blocks


def test_a_follower_for_which_a_step_has_no_more_room_than_what_it_shares() -> None:
    """Two prompts that are only scored share three tokens, and a step computes one."""
    sched = scheduler(10, 2, 1, alike(4), None, BlockManager)
    serve_random_requests(sched, 2, [(4, 0, False, (0, 0, 0), 2)], random.Random(0))


def check_what_is_read(step: Step, message: StepMessage, device: Device, seqs: list[Sequence]) -> None:
    """Check that each query reads its own sequence's tokens, and that all were computed as long or all as short."""
    if isinstance(message, PrefillMessage):
        for chunk, told in zip(step.chunks, message.chunks, strict=True):
            assert told.is_long == device.is_long(len(chunk.seq))
        spans = [(chunk.seq, chunk.start, chunk.end, list(chunk.seq.token_ids)) for chunk in step.chunks]
        spans += [(fork.seq, len(fork.seq) - 1, len(fork.seq), list(fork.seq.token_ids)) for fork in step.forks]
    else:
        lens = [row["len"] for row in device.rows]
        whole = [list(seq.token_ids[: seq.num_prompt_tokens]) + expected_tokens(seq) for seq in seqs]
        spans = [(seq, end - 1, end, tokens) for seq, end, tokens in zip(seqs, lens, whole, strict=True)]
    for seq, start, end, tokens in spans:
        is_long = device.is_long(len(seq) if isinstance(message, PrefillMessage) else end)
        if end > len(tokens):
            continue  # nobody reads tokens after the one that ends the sequence
        for index, group in enumerate(device.groups):
            first = 0 if group.window is None else max(0, start - group.window + 1)
            read = device.read(index, seq.block_tables[index], first, end)
            kind = seq.adapter, is_long
            assert [(token, own) for token, own, _ in read] == [(token, kind) for token in tokens[first:end]]
            assert seq in device.kept or {version for _, _, version in read} == {device.versions[seq.adapter]}


def serve_random_requests(sched: Scheduler, depth, requests, arrivals) -> None:
    first_group, *_ = groups = sched.block_manager.groups
    row_map = RowMap(None if first_group.window else PrefixFinder(first_group.block_size, 2, 1), may_adapt=True)
    device, refused = Device(groups, sched.long_from), Refused(sched.block_manager)
    rows, budget = sched.max_num_seqs, sched.max_num_batched_tokens
    pending: deque[list[Sequence]] = deque()
    for i, (length, most, ignore, (first, num_first, then), n) in enumerate(requests):
        prompt = ([first] * num_first + [then] * length)[:length]
        if most:
            pending.append(samples(n, prompt, most, () if ignore else (EOS,), seed=10 * i))
        else:
            ends = ([*prompt[1:], 5 + j] for j in range(n))
            pending.append([seq for j, end in enumerate(ends) for seq in samples(1, end, 0, seed=10 * i + j)])
        adapter = arrivals.choice([NONE, *range(NONE, ADAPTERS)])
        for seq in pending[-1]:
            seq.adapter = adapter
    seqs, in_flight = [seq for group in pending for seq in group], deque()
    forgotten: set[Sequence] = set()
    while pending or not sched.is_finished or in_flight:
        while pending and (sched.is_finished or arrivals.random() < 0.3):
            for seq in pending.popleft():
                sched.add(seq)
        if (alive := sched.unfinished) and arrivals.random() < 0.03:
            sched.finish(arrivals.choice(alive), "abort")
        if arrivals.random() < 0.01:
            forgotten.update(sched.unfinished)
            sched.abort_all()
            row_map.clear()
            in_flight.clear()
        if arrivals.random() < 0.02:
            while in_flight:
                postprocess(sched, *in_flight.popleft(), device.kept, refused)
            adapter = arrivals.choice([None, *range(ADAPTERS)])
            affected = [seq for seq in sched.unfinished if adapter in (None, seq.adapter)]
            if arrivals.random() < 0.5:
                sched.restart(affected)
                assert not any(seq.block_tables for seq in affected)
            device.renew(sched, adapter)
        step = sched.schedule(in_flight=bool(in_flight))
        if step is not None and arrivals.random() < 0.01:  # an interrupt comes before the step is launched
            forgotten.update(sched.unfinished)
            sched.abort_all()
            row_map.clear()
            in_flight.clear()
            continue
        if step is not None:
            if isinstance(step, PrefillStep):
                device.kept -= {chunk.seq for chunk in step.chunks if chunk.start == 0}  # it starts again
                device.kept |= {fork.seq for fork in step.forks if fork.source in device.kept}
            message, order = row_map.describe(step)
            assert len(row_map.seqs) <= rows
            assert [seq.row for seq in row_map.seqs] == list(range(len(row_map.seqs)))
            tokens = device.run(message)
            for seq, row in zip(row_map.seqs, device.rows, strict=True):
                assert row["tables"] == seq.block_tables
                assert row["seed"] == seq.seed
            if isinstance(step, PrefillStep):
                assert step.num_tokens <= budget
            else:
                check_windows(sched, step.seqs)
            check_what_is_read(step, message, device, row_map.seqs)
            in_flight.append((step, list(zip(order, tokens, strict=True))))
        assert step is not None or in_flight or sched.is_finished, "nothing runs: the engine would hang"
        if in_flight and (step is None or len(in_flight) == depth):
            postprocess(sched, *in_flight.popleft(), device.kept, refused)
        check_blocks(sched)
        check_decoding(sched)
    for seq in seqs:
        tokens, expected = seq.output_token_ids, expected_tokens(seq)
        if seq.finish_reason == "abort" or seq in forgotten:
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
            assert seq.finish_reason == ("stop" if seq.stop_ids.intersection(tokens[-1:]) else "length")
