"""Steps that verify guesses give the tokens of plain steps, whatever the guesses are; driven without a scheduler."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import HAS_CUDA, whole_only
from torch import Tensor

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams
from nanoinfer.drafting.drafter import RowTexts
from nanoinfer.kernels.drafting.accept import NOTHING
from nanoinfer.runner import rank
from nanoinfer.runner.drafting import timing
from nanoinfer.runner.drafting.sizes import MOST_TOKENS, most_tokens, verify_sizes
from nanoinfer.runner.drafting.texts import num_texts
from nanoinfer.runner.message import (
    ChunkMessage,
    DecodeMessage,
    DraftingMessage,
    JoinMessage,
    LogitsMessage,
    PrefillMessage,
)
from nanoinfer.runner.start.trials import Trials
from nanoinfer.runner.steps.kinds import DecodeKind, graph_batch_sizes, sizes_by_kind

pytestmark = pytest.mark.usefixtures("one_thread")

MakeLLM = Callable[..., LLM]
MOST, TOKENS, BLOCKS = 4, 16, 8
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 6,
    "max_model_len": 128,
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 6 * BLOCKS,
    "max_guesses": MOST,
}
PROMPTS = [[7], list(range(20, 60)), [5, 6] * 10, [11, 12], [40] * 17, [7]]
TEMPERATURES = [0.0, 1.0, 0.6, 0.0, 0.9, 0.0]
MODES = ["right", "wrong", "alternating", "right, then wrong", "too many", "no tokens", "none"]


@dataclass
class Scripted:
    """A Drafter that knows how the texts go on, and says so, or does not."""

    mode: str
    texts: list[list[int]] = field(default_factory=list)  # by slot

    def propose(self, rows: RowTexts, most: int) -> tuple[Tensor, Tensor]:
        guesses, counts = torch.zeros(len(rows.slots), most, dtype=torch.int32), []
        for row, slot in enumerate(rows.slots.tolist()):
            known = int(rows.lengths[slot])
            own = self.change(self.texts[slot][known : known + most] if slot >= 0 else [], known, most)
            guesses[row, : len(own)] = torch.tensor(own)
            counts.append(len(own))
        return guesses, torch.tensor(counts, dtype=torch.int32)

    def change(self, right: list[int], known: int, most: int) -> list[int]:
        wrong = [0 if token else 255 for token in right]
        match self.mode:
            case "wrong":
                return wrong
            case "alternating":
                return right if known % 2 else wrong
            case "right, then wrong":
                return right[:2] + wrong[2:]
            case "no tokens":
                return [*right[:1], *[10**6, -1, *right][: len(right) - 1]]
            case "too many":
                return (right + [1] * most)[:most]
        return [] if self.mode == "none" else right


class Host:
    """Tells a runner what to do, as the engine does. Each row has all of its blocks from the start."""

    def __init__(self, llm: LLM) -> None:
        self.runner = llm.engine.ranks.runner
        self.tokens: list[list[int]] = []  # that each row has got
        self.slots: list[int] = []

    def join(
        self,
        slots: list[int],
        ends: list[int],
        settings: dict[int, SamplingParams] | None = None,
        members: dict[int, list[int]] | None = None,
    ) -> None:
        """Let sequences of PROMPTS join, whose numbers are those of their texts' slots; members: of the only group."""
        chunks, joins, settings, members = [], [], settings or {}, members or {}
        for number, (slot, end) in enumerate(zip(slots, ends, strict=True)):
            tables = [[slot * BLOCKS + block for block in range(BLOCKS)]]
            tokens = array("i", PROMPTS[slot])
            chunks.append(ChunkMessage(tokens, 0, tables))
            drafting = None
            if self.runner.verify_sizes:
                drafting = DraftingMessage(tokens, slot, end, max(members, default=-1))
            logits = None
            if slot in settings:
                logits = LogitsMessage(settings[slot], tokens, len(tokens), (), 0)
            joins.append(JoinMessage(number, tables, TEMPERATURES[slot], slot, logits, drafting=drafting))
        first = self.runner.call("run", PrefillMessage([], len(self.slots), chunks, joins, members=members))
        assert first is not None
        self.tokens += [[token] for token in first.wait()]
        self.slots += slots

    def plain(self, moves: list[tuple[int, int]] | None = None) -> None:
        message = DecodeMessage(moves or [], len(self.slots), [], 128)
        pending = self.runner.call("run", message)
        assert pending is not None
        for own, token in zip(self.tokens, pending.wait(), strict=True):
            own.append(token)

    def verify(self, guesses: int) -> list[tuple[int, int]]:
        """Run a verifying step; returns how many tokens each row kept, and how many guesses it had."""
        pending = self.runner.call("run", DecodeMessage([], len(self.slots), [], 128, guesses=guesses))
        assert pending is not None
        told = []
        for own, (*tokens, proposed) in zip(self.tokens, pending.wait(), strict=True):
            kept = [token for token in tokens if token != NOTHING]
            assert tokens == kept + [NOTHING] * (MOST + 1 - len(kept))
            own += kept
            told.append((len(kept), proposed))
        return told

    def leave(self, row: int) -> list[tuple[int, int]]:
        """Take a row away, and return the moves that the next message must have."""
        last = len(self.slots) - 1
        rows: list[Any]
        for rows in (self.tokens, self.slots):
            rows[row] = rows[last]
            rows.pop()
        return [(last, row)] if row < last else []


@cache
def expected(deterministic: bool) -> list[list[int]]:
    """What plain steps generate behind each prompt."""
    with LLM(BUNDLED_MODEL, deterministic=deterministic, **OPTIONS) as llm:
        host = Host(llm)
        host.join(list(range(len(PROMPTS))), [128] * len(PROMPTS))
        for _ in range(TOKENS + 8):
            host.plain()
    return host.tokens


def make_host(make_llm: MakeLLM, mode: str = "right", deterministic: bool = False, **options: Any) -> Host:
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected(deterministic), strict=True)]
    llm = make_llm(speculation=Scripted(mode, texts), deterministic=deterministic, **{**OPTIONS, **options})
    return Host(llm)


def ends_of(slots: list[int], tokens: int = TOKENS) -> list[int]:
    return [len(PROMPTS[slot]) + tokens for slot in slots]


@pytest.mark.parametrize(
    ("mode", "deterministic"),
    [
        *product(MODES, [False]),
        ("right, then wrong", True),
        *whole_only([(mode, True) for mode in MODES if mode != "right, then wrong"]),
    ],
)
def test_rows_get_the_tokens_of_plain_steps_up_to_their_ends(mode: str, deterministic: bool, make_llm: MakeLLM) -> None:
    host, rng = make_host(make_llm, mode, deterministic), random.Random(0)
    slots = list(range(len(PROMPTS)))
    ends = [end - slot for slot, end in enumerate(ends_of(slots))]
    host.join(slots, ends)
    for _ in range(4):
        host.plain()
        host.verify(rng.choice([1, 6, 20]))
    for _ in range(TOKENS // 2):
        host.verify(20)
    for slot, own in enumerate(host.tokens):
        assert own == expected(deterministic)[slot][: TOKENS - slot]
    assert host.verify(20) == [(0, 0)] * len(slots)  # all have ended


@pytest.mark.skipif(HAS_CUDA, reason="no kernel is interpreted where there is a GPU; the next test has its graphs")
def test_empty_places_change_nothing(make_llm: MakeLLM) -> None:
    """Where kernels are interpreted, steps have all places, as a GPU's graphs have."""
    host = make_host(make_llm, "alternating", attention_backend="triton")
    host.join([0, 2, 3], [len(PROMPTS[0]) + 3, 128, 128])
    told = [host.verify(guesses) for guesses in (12, 2, 12)]
    for slot, own in zip(host.slots, host.tokens, strict=True):
        assert own == expected(False)[slot][: len(own)]
    assert told[2][0] == (0, 0)  # has ended
    assert told[0] == [(1, 1), (5, 4), (5, 4)]  # limits count only where places do not suffice


def test_two_ranks_verify_alike(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    host = make_host(make_llm, "right, then wrong", tensor_parallel_size=2)
    host.join([0, 1, 2, 3], ends_of([0, 1, 2, 3]))
    host.plain()
    for _ in range(TOKENS):
        host.verify(12)
    for slot, own in enumerate(host.tokens):
        assert own == expected(False)[slot][:TOKENS]
    seconds = timing._seconds
    monkeypatch.setattr(timing, "_seconds", lambda *step: min(seconds(*step), 1e-6))  # of the first rank alone
    times = host.runner.call("time_steps")  # what the faster rank needs leaves time for all sizes, on both
    assert len(times) > 1
    assert set(times.values()) == {1e-6}


class Known:
    """A Drafter for graphs: it knows how texts go on, but for every third guess."""

    def __init__(self, texts: list[list[int]]) -> None:
        """texts: by slot"""
        self._texts = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)

    def propose(self, rows: RowTexts, most: int) -> tuple[Tensor, Tensor]:
        self._texts = self._texts.to(rows.slots.device)  # where no graph records it: in the first call
        slots, step = rows.slots.clamp(min=0).long(), torch.arange(most, device=rows.slots.device)
        at = rows.lengths[slots].long()[:, None] + step
        guesses = self._texts[slots[:, None], at.clamp(max=self._texts.shape[1] - 1)]
        return (guesses ^ (at % 3 == 0).long()).int(), torch.full_like(rows.slots, most)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"deterministic": True}], ids=repr)
def test_graphs_verify_as_plain_steps_decode(options: dict[str, Any], make_llm: MakeLLM) -> None:
    on_gpu = {**OPTIONS, **options, "device": "cuda", "dtype": "float32"}
    slots = list(range(len(PROMPTS)))
    more = SamplingParams(top_p=0.9, logprobs=2), SamplingParams(frequency_penalty=0.1), SamplingParams(logprobs=0)
    settings = dict(zip((1, 2, 4), more, strict=True))
    plain = Host(make_llm(**on_gpu))
    plain.join(slots, [128] * len(slots), settings)
    for _ in range(60):
        plain.plain()
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, plain.tokens, strict=True)]
    host = Host(make_llm(**on_gpu, speculation=Known(texts)))
    assert host.runner.call("time_steps").keys() >= {(1, 0), (1, 2), (1, 4), (6, 0), (6, 24)}
    host.join(slots[:5], [128] * 5, settings)  # one row of the graphs stays empty
    for step in range(12):
        host.plain() if step % 4 == 3 else host.verify([24, 12, 24][step % 4])
    assert min(map(len, host.tokens)) > 20
    for own, right in zip(host.tokens, plain.tokens, strict=False):
        assert own == right[: len(own)]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda guesses, counts: (guesses[:, :2], counts), r"guesses of torch.int32 and shape \[1, 4\] on cpu, not of"),
        (lambda guesses, counts: (guesses, counts.long()), "counts of torch.int32 .*, not of torch.int64"),
        (lambda guesses, counts: (guesses, counts.tolist()), r"counts of torch.int32 .*, not \[4\]$"),
        (lambda guesses, counts: None, r"guesses of .* and counts of torch.int32 and shape \[1\] on cpu, not None$"),
        (lambda guesses, counts: guesses, r"guesses of .* and counts of .*, not tensor\("),
        (lambda guesses, counts: (guesses, counts, 3), r"guesses of .* and counts of .*, not \(tensor\("),
    ],
    ids=["shape", "dtype", "no tensor", "nothing", "one", "three"],
)
def test_a_drafter_hears_what_its_guesses_must_be(change: Callable[..., Any], told: str, make_llm: MakeLLM) -> None:
    host = make_host(make_llm)
    host.join([0], [128])
    proposer = host.runner.steps.verifier.proposer
    drafter = proposer._drafter
    proposer._drafter = SimpleNamespace(propose=lambda *args: change(*drafter.propose(*args)))
    with pytest.raises(ValueError, match=f"^speculation: SimpleNamespace.propose must return {told}"):
        host.verify(4)


def test_a_row_that_guesses_right_has_twice_as_many_guesses_next(make_llm: MakeLLM) -> None:
    host = make_host(make_llm)
    host.join([0, 1], [128, 128])
    assert host.verify(8) == [(3, 2), (3, 2)]
    assert host.verify(8) == [(5, 4), (5, 4)]
    assert host.verify(5) == [(4, 3), (3, 2)]  # the places suffice for no more
    host.runner.steps.verifier.proposer._drafter.mode = "right, then wrong"
    assert host.verify(8) == [(3, 4), (3, 4)]
    assert host.verify(8) == [(3, 3), (3, 3)]
    host.runner.steps.verifier.proposer._drafter.mode = "wrong"
    assert host.verify(8) == [(1, 3), (1, 3)]
    assert host.verify(8) == [(1, 1), (1, 1)]


def test_rows_move_and_join_with_their_texts(make_llm: MakeLLM) -> None:
    host = make_host(make_llm)
    host.join([0, 1, 2], [128] * 3)
    host.verify(12)
    host.plain(host.leave(0))
    host.verify(12)
    host.join([3, 4], [128] * 2)
    told = host.verify(12)
    assert [proposed for _, proposed in told] == [4, 4, 2, 2]
    for slot, own in zip(host.slots, host.tokens, strict=True):
        assert own == expected(False)[slot][: len(own)]


INTERPRETED = pytest.mark.skipif(HAS_CUDA, reason="it is interpreted on the CPU")
BACKENDS = ["torch", pytest.param("triton", marks=[pytest.mark.whole, INTERPRETED])]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_want_more_are_drawn_again_behind_each_guess(backend: str, make_llm: MakeLLM) -> None:
    """Others' guesses are verified beside them, and steps of both kinds know their tokens."""
    penalty = SamplingParams(frequency_penalty=0.5, repetition_penalty=1.2)
    slots, settings = [0, 1, 4], {1: SamplingParams(top_k=2, logprobs=0), 4: penalty}
    plain = Host(make_llm(**OPTIONS))
    plain.join(slots, [128] * 3, settings)
    for _ in range(20):
        plain.plain()
    host = make_host(make_llm, attention_backend=backend)
    for slot, own in zip(slots, plain.tokens, strict=True):
        host.runner.steps.verifier.proposer._drafter.texts[slot] = PROMPTS[slot] + own
    host.join(slots, [128] * 3, settings)
    told = []
    for _ in range(2):
        host.plain()
        told.append(host.verify(12))
    assert told == [[(3, 2)] * 3, [(5, 4)] * 3] if backend == "torch" else [[(5, 4)] * 3] * 2
    for slot, own, wanted in zip(slots, host.tokens, plain.tokens, strict=True):
        assert own == wanted[: len(own)]
        assert (own == expected(False)[slot][: len(own)]) == (slot == 0)
    texts = host.runner.steps.verifier.texts
    assert texts.tokens[1, 40:48].tolist() == host.tokens[1][:8]


def test_a_text_of_the_group_is_found_again_when_its_sequence_has_ended(make_llm: MakeLLM) -> None:
    host = Host(make_llm(speculation="suffix", **OPTIONS))
    host.join([0], [128], members={3: [0]})
    for _ in range(12):
        host.plain()
    host.leave(0)
    host.join([5], [128], members={3: [0, 5]})  # the same prompt, at temperature 0, too
    host.plain()
    host.plain()
    assert host.verify(8) == [(3, 2)]
    assert host.verify(8) == [(5, 4)]
    assert host.tokens[0] == expected(False)[0][: len(host.tokens[0])]


def test_times_of_steps_leave_nothing_behind(make_llm: MakeLLM) -> None:
    host = Host(make_llm(speculation="suffix", **OPTIONS))
    times = host.runner.call("time_steps")
    assert {(1, 0), (1, 2)} <= set(times) <= {(1, 0), (1, 2), (1, 4), (4, 0), (4, 8), (4, 16)}
    assert min(times.values()) > 0
    steps = host.runner.steps
    assert steps.batch.positions.tolist() == steps.verifier.rows.texts.tolist() == [-1] * 6


def test_steps_are_tried_that_verify(make_llm: MakeLLM) -> None:
    """A GPU runs these before the first request, to compile their kernels and to measure their memory."""
    runner = make_llm(speculation="suffix", **OPTIONS, max_num_batched_tokens=64).engine.ranks.runner
    trials = Trials(runner.config, runner.steps.max_blocks, runner.device)
    decodes = trials.largest_decodes(runner.verify_sizes)
    assert decodes == [(6, DecodeKind()), (6, DecodeKind(guesses=24))]
    for step in trials.largest_prefills():
        runner.run(step)
    assert runner.steps.verifier.texts.lengths[:7].tolist() == [11, 11, 11, 11, 10, 10, 0]
    with torch.inference_mode():
        for rows, kind in decodes:
            runner._decode_rows(rows, kind)


def test_rows_stay_within_their_tables_while_steps_are_tried(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts as long as can be leave no room for two steps: kernels would read and write past the ends of tables."""
    options = {**OPTIONS, "max_model_len": 48, "max_num_batched_tokens": 512}
    runner, reached = make_llm(speculation="suffix", **options).engine.ranks.runner, list[int]()
    trials = Trials(runner.config, runner.steps.max_blocks, runner.device)

    def run(step: Callable[[], object]) -> int:
        step()
        reached.append(int(runner.steps.batch.positions.max()))
        return 0

    monkeypatch.setattr(rank, "peak_bytes", run)
    for step in trials.largest_prefills():
        runner.run(step)
    assert runner.steps.batch.positions.tolist() == [47] * 6
    with torch.inference_mode():
        runner._measure_decode(trials.largest_decodes(runner.verify_sizes))
    assert len(reached) == 2
    assert max(reached) < 48


class TestSizes:
    @pytest.mark.parametrize(("max_num_seqs", "most"), [(1, 1), (3, 8), (64, 8), (512, 8), (512, 15)])
    def test_each_number_of_rows_has_places(self, max_num_seqs: int, most: int) -> None:
        sizes = verify_sizes(max_num_seqs, most)
        assert {rows for rows, _ in sizes} >= {rows for rows in (1, 2, 4, 8, 16, 32, 64) if rows <= max_num_seqs}
        assert all(0 < guesses <= rows * most for rows, guesses in sizes)
        assert most_tokens(sizes) <= MOST_TOKENS

    def test_each_size_has_a_graph_of_each_kind(self) -> None:
        by_kind = sizes_by_kind(64, may_share=True, may_adapt=True, verifying=verify_sizes(64, 8))
        verifying = {kind: rows for kind, rows in by_kind.items() if kind.guesses}
        for how in product((False, True), repeat=2):
            own = [(rows, kind.guesses) for kind in verifying for rows in verifying[kind] if kind[:2] == how]
            assert sorted(own) == [size for size in verify_sizes(64, 8) if size[0] >= 4 or not how[0]]
        assert by_kind[DecodeKind()] == graph_batch_sizes(64)

    def test_texts_take_a_small_share_of_the_memory(self) -> None:
        assert num_texts(512, 32768, 80 << 30) == 1024
        assert num_texts(512, 32768, 1 << 30) == 512
        assert num_texts(512, 131072, 6 << 30) == 768


def test_an_llm_that_does_not_speculate_has_nothing_of_it(make_llm: MakeLLM) -> None:
    runner = make_llm(**OPTIONS).engine.ranks.runner
    assert runner.steps.verifier is None
    assert runner.verify_sizes == []
    assert len(runner.logits) == 6
