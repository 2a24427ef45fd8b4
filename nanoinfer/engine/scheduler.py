"""Scheduler: decides which sequences run in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Any

from nanoinfer.engine.admission.admission import Admission
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.decoding import Decoding
from nanoinfer.engine.prefixes.followers import Followers
from nanoinfer.engine.sequence import FinishReason, Sequence, SequenceStatus
from nanoinfer.engine.speculation.speculation import Speculation
from nanoinfer.engine.step import Chunk, DecodeStep, Fork, PrefillStep, Step

# While sequences decode, prompts gather until they are worth a step of their own. On an H200, the host needs longer to
# launch a step of a thousand tokens of a small model than the device needs to run it.
MIN_PREFILL_TOKENS = 4096
MAX_FREE_ROWS = 1 / 16  # of max_num_seqs; with so many free, prompts wait no longer


class Scheduler:
    """Gathered prompts before running sequences; who begins and who is preempted is Admission's to say.

    `schedule` plans a step from lengths alone, so it may be called again before the tokens of the last step are
    known. `postprocess` takes each step's tokens, in the order of the steps.

    In a decode step, `schedule` and `postprocess` each do little more than one short loop over the rows.

    A model's keys may depend on how long a sequence is: longrope rotates all positions of a long sequence by other
    angles. So a sequence is computed either as long or as short. A short one that outgrows `long_from` starts again.

    The device alone knows how many guesses hold that a step verifies. While such a step is in flight, a sequence has
    blocks for all of them, and windows keep what the first of the queries to come sees. It stays in verifying steps
    until it has certainly ended: the device gives a row that has ended no further token. A plain step, in which no row
    looks at its end, only comes while all its sequences certainly go on.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        long_from: int | None = None,
        speculation: Speculation | None = None,
        step_tokens: int = 0,
    ) -> None:
        """long_from: a sequence of more tokens is computed as a long one; None: all are short.

        speculation: says how many guesses a step verifies; None: none does
        step_tokens: a step of fewer tokens takes as long as one of so many
        """
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.long_from = long_from
        self.speculation = speculation
        self.step_tokens = min(step_tokens, max_num_batched_tokens)
        self.admission = Admission(block_manager)
        self.waiting = self.admission.waiting
        self.followers = Followers(block_manager.layout)
        self.running: deque[Sequence] = deque()
        self.decoding = Decoding(block_manager)  # those of `running` that get a token from the next decode step
        self.num_preemptions = 0

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence behind the others."""
        if self.followers.add(seq):
            return
        self.admission.add(seq)
        self.block_manager.expect(seq)

    def put_longest_first(self) -> None:
        """If there are too few rows or blocks for all, let those begin sooner that may get more tokens."""
        if len(self.waiting) > self.max_num_seqs or not self.admission.is_roomy:
            self.waiting.put_longest_first()

    @property
    def is_finished(self) -> bool:
        """Whether every sequence has its last token."""
        return not (self.waiting or self.running)

    @property
    def unfinished(self) -> list[Sequence]:
        """The sequences that wait or run."""
        return [*self.running, *self.waiting, *self.followers.waiting]

    def schedule(self, in_flight: bool) -> Step | None:
        """Plan the next step; None when nothing can run before the steps in flight have been postprocessed.

        in_flight: whether there are scheduled steps whose tokens are not known yet
        """
        if self.block_manager.begin_step():
            self.admission.is_shut = False
        step = (self._prefill_is_due() and self._schedule_prefill()) or self._schedule_decode(in_flight)
        if step is None and self.waiting and (not in_flight or self.block_manager.is_restoring):
            step = self._schedule_prefill()  # nobody decodes, for the blocks that a prompt has got
        return step

    def _prefill_is_due(self) -> bool:
        """Whether the next step is to prefill, while decoding waits.

        A prefill is due when nothing can decode, a prompt is half done, or there are free rows for all waiting prompts.
        It is also due when many rows are free, or the prompts that can start have many tokens.
        """
        if not self.waiting:
            return False
        if not self.decoding.seqs or self.waiting.first.block_tables:
            return True
        if self.admission.is_shut:
            return False
        free_rows = self.max_num_seqs - len(self.running)
        if free_rows >= min(len(self.waiting), max(1, int(self.max_num_seqs * MAX_FREE_ROWS))):
            return True
        return sum(map(len, islice(self.waiting, free_rows))) >= max(MIN_PREFILL_TOKENS, self.step_tokens)

    def _schedule_prefill(self) -> PrefillStep | None:
        self.admission.begin()
        chunks: list[Chunk] = []
        forks: list[Fork] = []
        copies: list[tuple[int, int]] = []
        budget, num_promised = self.max_num_batched_tokens, 0  # rows for followers
        while budget > 0 and len(self.running) < self.max_num_seqs and (seq := self.admission.choose(self.running)):
            if not seq.block_tables:
                seq.is_long = self.long_from is not None and len(seq) > self.long_from
                if chunks and self.block_manager.should_wait(seq):
                    break
                num_promised += self.followers.count(seq)
                if chunks and len(self.running) + num_promised >= self.max_num_seqs:
                    break
                num_cached = self.block_manager.allocate(seq, budget)
                if num_cached is None:
                    self.admission.is_shut = True
                    break
                self.admission.note_begun(seq)
                seq.num_scheduled = num_cached
                if seq.is_fresh:
                    seq.num_cached_tokens = num_cached
                if self.block_manager.is_restoring and self.decoding.seqs and not chunks:
                    return None  # others decode meanwhile
            start = seq.num_scheduled
            end = self.block_manager.extend(seq, min(len(seq), start + budget))
            if tail := self.followers.copy_tail(seq, start, end):
                copies += tail
                start = seq.num_scheduled = seq.num_cached_tokens = seq.num_reusable
            if seq.media is not None:
                end = seq.media.last_end(end)
            if end <= start:
                break
            states = self.block_manager.plan(seq, start, end)
            chunks.append(Chunk(seq, start, end, end == len(seq), states))
            seq.num_scheduled = end
            budget -= end - start
            if end == len(seq):
                self._start(seq)
                forks += self._fork(seq)
        for chunk in reversed(chunks):
            if chunk.end >= chunk.seq.num_reusable:
                self._let_follow(chunk.seq)
        return PrefillStep(chunks, forks, self.block_manager.take_copies() + copies) if chunks else None

    def _let_follow(self, leader: Sequence) -> None:
        """Let those begin that have waited for a sequence, before others."""
        for seq in reversed(self.followers.release(leader)):
            self.admission.add(seq)
            self.waiting.put_first(seq)

    def _fork(self, seq: Sequence) -> list[Fork]:
        """Start the further samples of a prompt that has just been scheduled whole, while rows and blocks are free."""
        forks: list[Fork] = []
        while self.waiting and len(self.running) < self.max_num_seqs and self.block_manager.can_fork(seq):
            other = self.waiting.first
            if other.sample_index == 0 or other.request_id != seq.request_id or not (other.is_fresh and seq.is_fresh):
                break
            if not self.admission.fits_beside(seq, other):
                break
            other.is_long = seq.is_long
            forks.append(Fork(other, seq, self.block_manager.fork(seq, other)))
            self.admission.note_begun(other)
            other.num_scheduled = other.num_cached_tokens = len(seq)
            self._start(other)
        return forks

    def _schedule_decode(self, in_flight: bool) -> DecodeStep | None:
        decoding, speculation, guesses = self.decoding, self.speculation, 0
        if speculation is not None and decoding.seqs:
            guesses = speculation.choose(decoding)
            if guesses and not decoding.find_full(speculation.reach(guesses)):
                guesses = 0  # there are not enough blocks
        if guesses == 0 and not (self._make_room(in_flight) and decoding.seqs and decoding.goes_on):
            return None  # what is read back tells who goes on; nobody can be preempted before that
        if speculation is None:
            return decoding.advance(0, 1, [])
        return decoding.advance(guesses, *speculation.begin(decoding.seqs, guesses))

    def _make_room(self, in_flight: bool) -> bool:
        """Preempt sequences until there are blocks for the next token of the others; returns whether there are.

        A preempted sequence starts again from its tokens, which must be known: none can be while a step is in flight.
        """
        while not self.decoding.has_room:
            if in_flight:
                return False
            seq = self.admission.cheapest(self.running)
            self.block_manager.keep(seq)
            self._requeue(seq)
            self.admission.is_shut = True  # who has lost blocks does not push out others in turn
            self.num_preemptions += 1
        return True

    def _start(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        seq.status = SequenceStatus.RUNNING
        # A long one has more tokens from its first step on.
        seq.end = seq.max_len if self.long_from is None or seq.is_long else min(seq.max_len, self.long_from + 1)
        self.running.append(seq)
        seq.drafted = len(seq)
        self.decoding.start(seq)

    def _requeue(self, seq: Sequence) -> None:
        """Let a sequence start again from its tokens, which are all known, before the others that wait."""
        self._stop(seq)
        self.followers.lose_leader(seq)
        seq.num_scheduled = 0
        seq.status = SequenceStatus.WAITING
        self.waiting.put_first(seq)

    def restart(self, seqs: Collection[Sequence]) -> None:
        """Let each of these sequences that has begun start again from its tokens. No step is in flight."""
        for seq in self.waiting:
            if seq.block_tables and seq in seqs:  # a half-done prompt
                self.block_manager.free(seq)
                seq.num_scheduled = 0
                seq.pooled = None
                if seq.wants_prompt_logprobs:  # one that has tokens does not compute them again
                    seq.prompt_logprobs.clear()
        for seq in reversed(self.running.copy()):
            if seq in seqs:
                self._requeue(seq)

    def reset_prefix_cache(self, adapter: int | None = None) -> None:
        """Let no later sequence share a block of any sequence that has begun so far.

        adapter: only of the sequences of the one in this slot
        """
        begun = [seq for seq in self.unfinished if seq.block_tables and adapter in (None, seq.adapter)]
        if adapter is None:
            self.block_manager.prefixes.forget_all(begun)
        else:
            self.block_manager.forget_adapter(adapter, begun)
        for seq in self.waiting:
            if not seq.block_tables and adapter in (None, seq.adapter):
                seq.forget_records()

    def _stop(self, seq: Sequence) -> None:
        """Take back a running sequence's blocks, and its place among those that run."""
        self.block_manager.free(seq)
        self.admission.is_shut = False
        self.decoding.drop(seq)
        if seq in self.running:
            self.running.remove(seq)

    def postprocess(self, step: Step, tokens: Iterable[tuple[Sequence, Any]]) -> tuple[list[Sequence], int]:
        """Take the tokens that the oldest step in flight sampled, in any order; of a verifying step, each row's list.

        Returns the sequences that ended with that step, and how many tokens were dropped because theirs had ended.
        """
        self._record(step)
        ended, num_dropped = self._end_scored(step), 0
        if step.guesses:
            assert self.speculation is not None
            self.decoding.num_verifying -= 1
            return self.speculation.read(step.guesses, tokens, self._take)
        running = SequenceStatus.RUNNING
        for seq, token_id in tokens:
            if seq.status is running and token_id not in seq.stop_ids:
                seq.token_ids.append(token_id)  # the usual case
            elif seq.is_finished:
                num_dropped += 1
            elif self._append(seq, token_id):
                ended.append(seq)
        return ended, num_dropped

    def _take(self, seq: Sequence, tokens: list[int]) -> int:
        """Append the tokens of a verifying step, one of which may end the sequence; returns how many it has got."""
        goes_on = seq.status is SequenceStatus.RUNNING and not self.decoding.ends(seq)
        if goes_on and seq.on_token is None and seq.stop_ids.isdisjoint(tokens):
            seq.token_ids.extend(tokens)  # the usual case
            return len(tokens)
        for count, token_id in enumerate(tokens, 1):
            is_ended = self._append(seq, token_id)
            if seq.on_token is not None:
                seq.on_token()
            if is_ended or seq.finish_reason is not None:
                return count
        self._restart_outgrown(seq)  # its last step may have had no token for it
        return len(tokens)

    def _end_scored(self, step: Step) -> list[Sequence]:
        scored = step.scored if isinstance(step, PrefillStep) else []
        ended = [seq for seq in scored if not seq.is_finished]
        for seq in ended:
            if len(seq.prompt_logprobs) and seq.prompt_logprobs.has_nan:
                self.block_manager.prefixes.forget(seq)
            self.finish(seq, "length", seq.stop_reason)
        return ended

    def _record(self, step: Step) -> None:
        """Record what a step has filled, and take back the blocks that windows have left behind.

        In a decode step, only the sequences in `due` can have such blocks.

        Steps in flight may still read the blocks that are taken back here. They run before any step of the blocks' next
        owners, because those are planned later. So a block may go when no step that is still to be planned sees it. The
        queries of such steps begin at num_certain.
        """
        if isinstance(step, PrefillStep):
            filled = [(chunk.seq, chunk.end) for chunk in step.chunks]
            filled += [(fork.seq, fork.seq.num_prompt_tokens) for fork in step.forks]
        else:  # it has computed the keys and values of the last known token
            filled = [(seq, min(len(seq), seq.end - 1)) for seq in step.due]
        for seq, end in filled:
            if not seq.is_finished:
                self._keep(seq, end)  # of a prompt, `schedule` has recorded it

    def _keep(self, seq: Sequence, end: int) -> None:
        """Record what a sequence's tokens up to `end` have filled, and take back what windows have left behind."""
        self.block_manager.record(seq, end)
        if self.block_manager.release(seq, seq.num_certain):
            self.admission.is_shut = False

    def _append(self, seq: Sequence, token_id: int) -> bool:
        """Append a token, which may end the sequence, or start it again as a long one; returns whether it ended."""
        seq.token_ids.append(token_id)
        if token_id in seq.stop_ids:
            self.finish(seq, "stop", token_id if token_id in (seq.params.stop_token_ids or ()) else None)
        elif len(seq) >= seq.max_len:
            self.finish(seq, "length")
        else:
            self._restart_outgrown(seq)
        return seq.is_finished

    def _restart_outgrown(self, seq: Sequence) -> None:
        """Let a sequence start again as a long one, if it has to, once no step in flight computes it."""
        if seq.status is SequenceStatus.OUTGROWN and len(seq) > seq.num_scheduled:
            self._requeue(seq)

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence that waits or runs, and take back its blocks and its place.

        A step in flight may still compute the sequence's next token. Its keys and values are written before those of
        the blocks' next owners, whose steps are launched later.
        """
        assert not seq.is_finished
        has_waited_alone = self.followers.drop(seq)
        if seq.status is not SequenceStatus.WAITING:
            self._stop(seq)
        elif not has_waited_alone:
            self.waiting.remove(seq)
            self.block_manager.free(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if not has_waited_alone:
            self.admission.note_ended(seq)
            self._let_follow(seq)

    def abort_all(self) -> None:
        """Drop every sequence, those in flight included, whatever state an interrupt left them in."""
        self.running.clear()
        self.decoding.clear()
        self.admission.clear()
        self.followers.clear()
        self.block_manager.free_all()
