"""Admission: who is let in when blocks are short. Whole workloads run against a device that takes no time."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import pytest
from conftest import alike, layout_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoinfer import SamplingParams
from nanoinfer.attention.cache_layout import CacheLayout
from nanoinfer.benchmark.least_steps import Limits, decode_steps
from nanoinfer.benchmark.workloads import WORKLOADS, Workload
from nanoinfer.engine.admission.lengths import Lengths
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence
from nanoinfer.engine.step import DecodeStep, PrefillStep

EOS, OTHER = 1, 5
LIMITS = Limits(rows=512, tokens=16384, blocks=430, groups=alike(256).groups)  # of bench.py: 110,080 tokens


@dataclass
class Run:
    """What a workload took: decode steps, and prompt tokens and output tokens that were prefilled again."""

    decode_steps: int = 0
    again: int = 0
    preemptions: int = 0


def sequence(prompt: list[int], most: int, number: int, sample: int = 0, is_known: bool = True) -> Sequence:
    params = SamplingParams(max_tokens=most, ignore_eos=is_known)
    return Sequence(prompt, params, 0, 10**6, frozenset() if is_known else frozenset([EOS]), number, sample)


def play(sched: Scheduler, lengths: dict[Sequence, int]) -> Run:
    """Run all sequences to the lengths of their outputs, one step ahead as the engine does.

    Each gets a token before it gives way. So steps are not many times those of one after another, a token a step.
    """
    run, in_flight, num_steps = Run(), deque(), 0
    enough = 20 + 8 * sum(seq.num_prompt_tokens + length for seq, length in lengths.items())
    for seq in lengths:
        sched.add(seq)
    sched.put_longest_first()
    while not sched.is_finished or in_flight:
        step = sched.schedule(in_flight=bool(in_flight))
        if isinstance(step, PrefillStep):
            run.again += sum(chunk.end - chunk.start for chunk in step.chunks if not chunk.seq.is_fresh)
            seqs = [chunk.seq for chunk in step.chunks if chunk.is_last] + [fork.seq for fork in step.forks]
            in_flight.append((step, seqs))
        elif isinstance(step, DecodeStep):
            run.decode_steps += 1
            in_flight.append((step, step.seqs))
        num_steps += 1
        assert num_steps < enough, "sequences take each other's blocks for ever"
        assert in_flight, "nothing runs: the engine would hang"
        if step is None or len(in_flight) > 1:
            done, seqs = in_flight.popleft()
            tokens = [EOS if seq.num_output_tokens + 1 == lengths[seq] else OTHER for seq in seqs]
            sched.postprocess(done, zip(seqs, tokens, strict=True))
    assert all(seq.num_output_tokens == length for seq, length in lengths.items())
    assert sched.block_manager.num_free == len(sched.block_manager.blocks)
    run.preemptions = sched.num_preemptions
    return run


def play_workload(work: Workload, limits: Limits, most: int | None = None) -> tuple[float, float]:
    """Return the share of the fewest steps, and the tokens prefilled again as a share of all prompt tokens.

    most: max_tokens of requests whose ends are unknown; None: all ends are known
    """
    lengths = {
        sequence(prompt, most or length, number, is_known=most is None): length
        for number, (prompt, length) in enumerate(zip(work.prompts, work.output_lens, strict=True))
    }
    manager = BlockManager(limits.blocks, alike(256))
    run = play(Scheduler(manager, limits.rows, limits.tokens), lengths)
    fewest = sum(steps.count for steps in decode_steps(work, limits, used=1))
    return fewest / run.decode_steps, run.again / work.tokens_in


def test_known_ends_nearly_reach_the_fewest_steps() -> None:
    """Letting in whoever's prompt fits reaches 65%, and prefills 42% again."""
    reached, again = play_workload(WORKLOADS["nano"].draw(10001), LIMITS)
    assert reached >= 0.85
    assert again < 0.03


def test_unknown_ends_are_learned_from_those_that_ended() -> None:
    """Ends are geometric, as by an end-of-sequence token of one probability. Without a forecast, 28% is done again."""
    rand = random.Random(1)
    work = replace(WORKLOADS["nano"], num_seqs=512, prompt_lens=(100, 1024)).draw(10001)
    work.output_lens = [min(1024, 1 + int(rand.expovariate(1 / 400))) for _ in work.prompts]
    half = replace(LIMITS, rows=LIMITS.rows // 2, tokens=LIMITS.tokens // 2, blocks=LIMITS.blocks // 2)
    reached, again = play_workload(work, half, most=1024)
    assert reached >= 0.80
    assert again < 0.08


def test_a_greatest_length_far_above_the_real_ones_keeps_nobody_out() -> None:
    rand = random.Random(1)
    work = WORKLOADS["nano"].draw(10001)
    work.output_lens = [1 + int(rand.expovariate(1 / 300)) for _ in work.prompts]
    reached, again = play_workload(work, LIMITS, most=32768)
    assert reached >= 0.90
    assert again < 0.08


def small(blocks: int = 12, rows: int = 8, layout: CacheLayout | None = None) -> Scheduler:
    return Scheduler(BlockManager(blocks, layout or alike(4)), rows, max_num_batched_tokens=64)


def begin(sched: Scheduler, *seqs: Sequence) -> list[Sequence]:
    """Queue sequences, and return those that the next step begins."""
    for seq in seqs:
        sched.add(seq)
    step = sched.schedule(in_flight=False)
    if not isinstance(step, PrefillStep):
        return []
    begun = [chunk.seq for chunk in step.chunks] + [fork.seq for fork in step.forks]
    sched.postprocess(step, [(seq, OTHER) for seq in begun])
    return begun


def prompt(number: int, length: int) -> list[int]:
    return [10 + number] * length


def test_one_is_let_in_if_it_fits_at_the_fullest_moment() -> None:
    """Each grows to five blocks, of which it needs two at first."""
    sched = small(blocks=10)
    seqs = [sequence(prompt(number, 8), 13, number) for number in range(3)]
    assert begin(sched, *seqs) == seqs[:2]
    assert sched.block_manager.num_free == 6


def test_one_is_let_in_if_another_ends_before_blocks_are_short() -> None:
    """When the second needs its fourth block, the first has given back its own."""
    sched = small(blocks=6)
    short, long = sequence(prompt(0, 8), 3, 0), sequence(prompt(1, 4), 20, 1)
    assert begin(sched, short, long) == [short, long]


def test_windows_let_more_sequences_in() -> None:
    """Each grows to 10 blocks of the layers without a window, and holds three of those with one."""
    seqs = [sequence(prompt(number, 8), 32, number) for number in range(4)]
    plain, mixed = (small(blocks=40, layout=layout_of((4, None), (4, window))) for window in (None, 4))
    assert begin(plain, *seqs) == seqs[:2]
    again = [sequence(prompt(number, 8), 32, number) for number in range(4)]
    assert begin(mixed, *again) == again[:3]


def test_windows_of_those_that_begin_in_the_same_step_count() -> None:
    """Each needs two blocks at first, and holds three later."""
    sched = small(blocks=10, layout=alike(4, window=4))
    seqs = [sequence(prompt(number, 8), 3, number) for number in range(4)]
    assert begin(sched, *seqs) == seqs[:3]


def test_the_first_is_let_in_if_nobody_runs() -> None:
    """Even if it may get longer than there are blocks: its text may end sooner."""
    sched = small(blocks=4)
    seqs = [sequence(prompt(number, 8), 100, number, is_known=False) for number in range(2)]
    assert begin(sched, *seqs) == seqs[:1]


def test_samples_count_the_blocks_of_their_prompt_once() -> None:
    """A prompt of six blocks, and four samples that grow by one block each."""
    sched = small(blocks=10)
    seqs = [sequence(prompt(0, 24), 5, 0, sample) for sample in range(4)] + [sequence(prompt(1, 4), 2, 1)]
    assert begin(sched, *seqs)[:4] == seqs[:1] + seqs[1:4]


def test_what_a_running_sequence_holds_of_a_prefix_counts_once() -> None:
    sched = small(blocks=10)
    first, second = (sequence([*prompt(0, 24), *prompt(number, 4)], 5, number) for number in (1, 2))
    assert begin(sched, first) == [first]
    assert begin(sched, second) == [second]


def test_a_smaller_one_passes_a_bigger_one_so_often_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoinfer.engine.admission.waiting.MOST_PASSES", 2)
    sched = small(blocks=10)
    running, big = sequence(prompt(0, 8), 21, 0), sequence(prompt(1, 24), 5, 1)
    assert begin(sched, running, big) == [running]
    small_ones = [sequence(prompt(number, 2), 2, number) for number in range(2, 5)]
    assert begin(sched, *small_ones) == small_ones[:2]
    assert list(sched.waiting) == [big, small_ones[2]]


def test_nobody_looks_again_before_something_ends() -> None:
    sched = small(blocks=10)
    seqs = [sequence(prompt(number, 8), 13, number) for number in range(3)]
    begin(sched, *seqs)
    assert begin(sched) == []
    assert sched.admission.is_shut
    sched.finish(seqs[0], "abort")
    assert begin(sched) == [seqs[2]]


@pytest.mark.usefixtures("no_foresight")
def test_who_loses_the_fewest_tokens_is_preempted_and_never_the_oldest() -> None:
    sched = small(blocks=7)
    seqs = [sequence(prompt(number, length), 13, number) for number, length in enumerate((4, 4, 12))]
    assert begin(sched, *seqs) == seqs
    assert isinstance(sched.schedule(in_flight=False), DecodeStep | None)
    assert list(sched.running) == [seqs[0], seqs[2]]
    assert sched.num_preemptions == 1


def output(length: int, request: int = 0, samples: int = 1) -> Sequence:
    """Return a sequence with an output of so many tokens, whose end is not known before."""
    params = SamplingParams(max_tokens=100, n=samples)
    seq = Sequence([OTHER], params, 0, 10**6, frozenset([EOS]), request)
    seq.token_ids.extend([OTHER] * length)
    return seq


def known(*ended: Sequence) -> Lengths:
    """Return what is learned from sequences that have ended."""
    lengths = Lengths()
    for seq in ended:
        seq.finish_reason = "stop"
        lengths.note(seq)
    return lengths


def test_those_that_run_tell_of_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four that got to 10 tokens, one ended there. Both that are known to have got to 20 ended there."""
    monkeypatch.setattr("nanoinfer.engine.admission.lengths.SUPPOSED", 0)
    survival = known(output(10), output(20), output(20)).outlook([output(12)], most=100).whole
    after_9, after_10, after_19, after_20 = survival.beyond(np.array([9, 10, 19, 20]))
    assert after_10 == pytest.approx(after_9 * 3 / 4)
    assert after_19 == after_10
    assert after_20 == 0


def test_samples_of_one_prompt_tell_of_each_other_the_more_have_ended() -> None:
    """All requests' outputs have 50 tokens, but those of request 1 have 10. Two are asked about that have 5 now."""
    others = [output(50) for _ in range(500)]

    def shares(num_ended: int) -> list[float]:
        """Return for request 1, which has ended so often, and for another, how many get 20 tokens more."""
        own = [output(10, request=1, samples=100) for _ in range(num_ended)]
        asked = [output(5, request=1, samples=100), output(5, request=2, samples=100)]
        outlook = known(*others, *own).outlook(asked, most=60)
        return outlook.later(asked, np.array([5, 5]), np.array([20]))[:, 0].tolist()

    few, some, many = shares(0), shares(8), shares(80)
    assert few[0] == few[1] > 0.9
    assert 0.4 < some[0] < 0.6  # eight of its own, and eight that stand for all
    assert many[0] < 0.1
    assert min(some[1], many[1]) > 0.7


GROUPS = st.one_of(  # a block size and a window of each group
    st.just([(4, None)]),
    st.tuples(st.tuples(st.just(4), st.integers(1, 20))),
    st.tuples(st.just((4, None)), st.tuples(st.sampled_from([2, 4, 8]), st.integers(1, 20))),
    st.tuples(st.just((2, None)), st.just((4, 3)), st.tuples(st.just(2), st.integers(4, 20))),
)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=30),
    groups=GROUPS,
    spare=st.integers(0, 30),
    rows=st.integers(1, 12),
    budget=st.integers(5, 60),
)
def test_known_ends_preempt_nobody(requests: list, groups: list, spare: int, rows: int, budget: int) -> None:
    layout = layout_of(*groups)
    seqs = {sequence(prompt(i, length), most, i): most for i, (length, most) in enumerate(requests)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanoinfer.engine.admission.forecast.OPTIMISM", 1)
        run = play(Scheduler(BlockManager(layout.blocks_of(40) + spare, layout), rows, budget), seqs)
    assert run.preemptions == 0


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 20), st.integers(1, 3), st.booleans()),
        min_size=1,
        max_size=30,
    ),
    groups=GROUPS,
    spare=st.integers(0, 30),
    rows=st.integers(1, 12),
    passes=st.integers(0, 5),
)
def test_all_end_and_nobody_is_passed_too_often(
    requests: list, groups: list, spare: int, rows: int, passes: int
) -> None:
    layout, seqs = layout_of(*groups), {}
    for number, (length, most, end, samples, is_known) in enumerate(requests):
        for sample in range(samples):
            seq = sequence(prompt(number % 3, length), most, number, sample, is_known)
            seqs[seq] = most if is_known else min(most, end)
    sched = Scheduler(BlockManager(layout.blocks_of(40) + spare, layout), rows, max_num_batched_tokens=30)
    most_passes = [0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanoinfer.engine.admission.waiting.MOST_PASSES", passes)
        remove = sched.waiting.remove
        patch.setattr(
            sched.waiting, "remove", lambda seq: (most_passes.extend(sched.waiting._passes.values()), remove(seq))[1]
        )
        play(sched, seqs)
    assert max(most_passes) <= passes


@pytest.mark.usefixtures("no_foresight")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 10), st.integers(1, 3)), min_size=2, max_size=20),
    groups=GROUPS,
    spare=st.integers(0, 3),
    rows=st.integers(1, 6),
    budget=st.integers(1, 40),
)
def test_with_blocks_for_little_more_than_one_all_end(
    requests: list, groups: list, spare: int, rows: int, budget: int
) -> None:
    layout, seqs = layout_of(*groups), {}
    for number, (length, most, samples) in enumerate(requests):
        seqs |= {sequence(prompt(number % 3, length), most, number, sample): most for sample in range(samples)}
    play(Scheduler(BlockManager(layout.blocks_of(40) + spare, layout), rows, budget), seqs)
