"""BeamSearches: computes the beams of several prompts, by forks of blocks, while the engine has no requests."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterable

from nanoinfer.attention.cache_layout import CacheGroup
from nanoinfer.engine.beams.hypotheses import Hypotheses, Likeliest
from nanoinfer.engine.beams.rules import Candidate, Rules
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.results.step_result import StepResult, planned
from nanoinfer.engine.sequence import Sequence
from nanoinfer.engine.step import Chunk, PrefillStep
from nanoinfer.process.torch_state import fresh_torch_state
from nanoinfer.runner.message import ChunkMessage, PrefillMessage
from nanoinfer.runner.steps.pending_tokens import PendingTokens

SLOTS_OF_A_BEAM = 2  # of states: its own, and at times the one from which it and others go on
ANY_TOKEN = 0  # stands for a beam's next token, which is not chosen yet: only the likeliest in its place count


class BeamSearch:
    """The search of one prompt.

    hypotheses: what it follows
    seqs: a sequence for each of the hypotheses' beams, in their order; none has a row
    width: so many there may be
    """

    def __init__(self, rules: Rules, prompt: Sequence) -> None:
        most_tokens = prompt.max_len - len(prompt)
        self.hypotheses = Hypotheses(rules, len(prompt), most_tokens, prompt.stop_ids)
        self.seqs = [prompt]
        self.width = 1 if most_tokens == 1 else rules.params.beam_width

    def num_blocks(self, groups: Iterable[CacheGroup]) -> int:
        """Return how many blocks it may need, before it has begun.

        Its sequences share the full blocks of the prompt. The last token that a sequence gets is not computed.
        """
        (prompt,) = self.seqs
        num_blocks = 0
        for group in groups:
            shared, whole = len(prompt) // group.block_size, -(-(prompt.max_len - 1) // group.block_size)
            blocks = shared + self.width * (whole - shared)
            num_blocks += blocks if group.most_blocks is None else min(blocks, self.width * group.most_blocks)
        return num_blocks


class BeamSearches:
    """Runs searches to their end. Each step computes the newest tokens of all beams, and prompts beside them.

    A step is a prefill step, whose chunks are one token long for a beam. The ranks' rows stay empty. A search begins
    when there are blocks for all that it may need, so that no beam is ever preempted.
    """

    def __init__(self, engine: LLMEngine, searches: list[BeamSearch], num_likeliest: int, most_searches: int) -> None:
        """num_likeliest: so many tokens are looked at behind each beam; most_searches: that run at once."""
        self._engine = engine
        self._blocks = engine.scheduler.block_manager
        self._num_likeliest, self._most_searches = num_likeliest, most_searches
        self._waiting = deque(searches)
        self._running: dict[BeamSearch, int] = {}  # each with the number of blocks that it may need
        self._likeliest: dict[Sequence, Likeliest] = {}  # the next tokens of the sequences that are computed whole
        self._copies: list[tuple[int, int]] = []  # (block, its copy), to be copied before the next step
        self._since = time.perf_counter()  # when the next step began
        engine.row_map.clear()  # it still has the rows of requests that have ended

    @property
    def is_finished(self) -> bool:
        """Whether all searches have ended."""
        return not (self._waiting or self._running)

    def step(self) -> tuple[int, StepResult]:
        """Run one step; returns how many searches have ended with it, and its figures."""
        self._engine.check_ready()
        self._admit()
        chunks = self._plan()
        with self._engine.ranks.uninterrupted():
            result = self._run(chunks)
        self._blocks.begin_step()  # a long chunk has held more than its search may need, until now: beams are to fork
        complete = [search for search in self._running if all(seq in self._likeliest for seq in search.seqs)]
        for search in complete:
            self._advance(search)
        ended = [search for search in complete if not search.seqs]
        for search in ended:
            del self._running[search]
        self._engine.counters.end_searches(len(ended))
        return len(ended), result

    def _admit(self) -> None:
        """Let searches begin while there are blocks for all their beams, and room for these in a step."""
        while self._waiting and len(self._running) < self._most_searches:
            search = self._waiting[0]
            num_blocks = search.num_blocks(self._blocks.groups)
            num_beams = search.width + sum(other.width for other in self._running)
            states = self._blocks.states
            if self._running and states is not None and num_beams * SLOTS_OF_A_BEAM > states.num_slots:
                break
            if num_blocks + sum(self._running.values()) > len(self._blocks.blocks):
                break
            if self._running and num_beams > self._engine.scheduler.max_num_seqs:
                break
            self._running[self._waiting.popleft()] = num_blocks

    def _plan(self) -> list[Chunk]:
        """Plan the next step: the tokens that are not computed yet, as many as it takes."""
        scheduler = self._engine.scheduler
        pending = [seq for search in self._running for seq in search.seqs if seq not in self._likeliest]
        chunks: list[Chunk] = []
        budget = scheduler.max_num_batched_tokens
        for seq in pending[: scheduler.max_num_seqs]:
            if budget == 0:
                break
            if not seq.block_tables and not self._begin(seq, budget):
                continue  # a chunk before it has the blocks for now
            start = seq.num_scheduled
            end = self._blocks.extend(seq, min(len(seq), start + budget))
            if seq.media is not None:
                end = seq.media.last_end(end)
            if end <= start:
                continue
            states = self._blocks.plan(seq, start, end)
            chunks.append(Chunk(seq, start, end, is_last=end == len(seq), states=states))
            seq.num_scheduled = end
            budget -= end - start
        return chunks

    def _begin(self, seq: Sequence, budget: int) -> bool:
        """Give a sequence its first blocks; returns whether there are enough."""
        seq.is_long = self._is_long(len(seq))
        num_cached = self._blocks.allocate(seq, budget)
        if num_cached is not None:
            seq.num_scheduled = seq.num_cached_tokens = num_cached
        return num_cached is not None

    def _is_long(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens is computed as a long one: see Scheduler."""
        long_from = self._engine.scheduler.long_from
        return long_from is not None and num_tokens > long_from

    def _run(self, chunks: list[Chunk]) -> StepResult:
        """Let the ranks run a step, and read what is likely behind each sequence that it has completed."""
        result = planned(PrefillStep(chunks, []), time.perf_counter())
        ranks, copies, self._copies = self._engine.ranks, self._blocks.take_copies() + self._copies, []
        if ranks.peers is not None:
            ranks.peers.before_step([chunk.seq for chunk in chunks])
        media = self._engine.row_map.new_media(chunks)
        for chunk in chunks:
            if chunk.seq.media is not None and chunk.seq.media.fault is not None:
                raise ValueError(chunk.seq.media.fault)
        messages = [self._describe(chunk) for chunk in chunks]
        transfers = self._blocks.take_transfers(result.num_prefill_tokens)
        result.note_transfers(transfers)
        pending: PendingTokens = ranks.call("run", PrefillMessage([], 0, messages, [], copies, transfers, media))
        with fresh_torch_state():
            ranks.wait(pending)
            for logprobs in pending.extras.prompt_logprobs:
                for index, (_, *token_ids), (_, *values), _ in logprobs.entries():
                    self._likeliest[chunks[index].seq] = Likeliest(array("i", token_ids), array("f", values))
        self._tell(result, chunks, pending.ready_at)
        return result

    def _describe(self, chunk: Chunk) -> ChunkMessage:
        seq = chunk.seq
        message = ChunkMessage(seq.token_ids[chunk.start : chunk.end], chunk.start, seq.block_tables)
        message.is_long, message.adapter, message.states = seq.is_long, seq.adapter, chunk.states
        if seq.media is not None:
            message.media = seq.media.chunk(chunk.start, chunk.end)
        if chunk.is_last:
            message.num_logprobs = self._num_likeliest
            message.num_unscored = len(message.token_ids) - 1
            message.next_tokens = array("i", [ANY_TOKEN])
        return message

    def _tell(self, result: StepResult, chunks: list[Chunk], ready_at: float) -> None:
        """Complete the step's figures, and tell them."""
        result.ready_at, result.blocks_used = ready_at, self._blocks.share_used
        result.seconds, self._since = ready_at - self._since, ready_at
        result.num_running = sum(len(search.seqs) for search in self._running)
        result.num_waiting = len(self._waiting)
        result.num_decode_tokens = sum(chunk.end - chunk.start for chunk in chunks if not chunk.seq.is_fresh)
        result.num_prefill_tokens -= result.num_decode_tokens
        result.num_generated_tokens = sum(chunk.is_last for chunk in chunks)
        self._engine.counters.note_step(result, self._engine.on_step)

    def _advance(self, search: BeamSearch) -> None:
        """Give a search's beams their next tokens, or end it."""
        likeliest = [self._likeliest.pop(seq) for seq in search.seqs]
        if all(own.is_finite for own in likeliest):
            going_on = search.hypotheses.advance(likeliest)
        else:
            search.hypotheses.fail()
            going_on = []
            for seq in search.seqs:
                self._blocks.prefixes.forget(seq)  # a NaN may have come to tokens before its own, by 0 * NaN
        search.seqs = self._descend(search.seqs, going_on)

    def _descend(self, seqs: list[Sequence], going_on: list[Candidate]) -> list[Sequence]:
        """Return the sequences of the beams that go on: the last child of each beam takes its blocks, others fork.

        Blocks of beams without children go back before any are handed out. So a search never needs more than it may.
        """
        heirs = {candidate.beam: candidate for candidate in going_on}
        starts_again = self._is_long(len(seqs[0]) + 1) and not seqs[0].is_long
        for beam, seq in enumerate(seqs):
            if starts_again or beam not in heirs:
                self._blocks.free(seq)
        children = []
        for candidate in going_on:
            seq = seqs[candidate.beam]
            children.append(seq if candidate is heirs[candidate.beam] else self._fork(seq))
            children[-1].token_ids.append(candidate.token_id)
        return children

    def _fork(self, seq: Sequence) -> Sequence:
        """Return another sequence of the same tokens, which shares the blocks that `seq` has, if it has any."""
        tokens, media, adapter = seq.token_ids.tolist(), seq.media, seq.adapter
        child = Sequence(tokens, seq.params, seq.seed, seq.max_len, seq.stop_ids, media=media, adapter=adapter)
        child.num_prompt_tokens, child.is_long, child.num_scheduled = seq.num_prompt_tokens, seq.is_long, len(seq)
        if seq.block_tables:
            self._copies += self._blocks.fork(seq, child, follows=True)
        return child
