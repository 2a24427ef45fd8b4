"""LLM.beam_search: checks its arguments, runs the searches, and makes the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, ClassVar, cast

from nanoinfer.beam_search_params import BeamSearchParams
from nanoinfer.checks import check_int, short
from nanoinfer.config import Config
from nanoinfer.engine.beams.hypotheses import Finished, Hypotheses
from nanoinfer.engine.beams.rules import Rules, TransformersRules
from nanoinfer.engine.beams.search import SLOTS_OF_A_BEAM, BeamSearch, BeamSearches
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.media import media_of
from nanoinfer.engine.prefixes.prefix_tree import NONE
from nanoinfer.engine.results.faults import not_finite
from nanoinfer.engine.sequence import FinishReason, Sequence
from nanoinfer.hints import hints_for
from nanoinfer.logits_processors import name_of
from nanoinfer.logprob import LogProb
from nanoinfer.media.spans import MediaPrompt
from nanoinfer.process.collector import no_full_collection
from nanoinfer.requests.admin.adapters import GivenLora, LoadsAdapters
from nanoinfer.requests.inputs import Inputs, Prompt
from nanoinfer.requests.outputs import Later, Output
from nanoinfer.requests.progress import Shown, UseTqdm, check_use_tqdm, make_bar
from nanoinfer.requests.prompts.stages import Prepared
from nanoinfer.requests.text.spelling import TokenDecoder, whole_decoder
from nanoinfer.runner.memory.room import what_makes_room
from nanoinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class BeamSequence(Output):
    """A sequence that a beam search has found, a dictionary whose keys are attributes too.

    tokens: the tokens of prompt and output
    token_ids: the generated tokens; the last may be an end-of-sequence token
    text: the text of `tokens`, so that it begins with the prompt, without special tokens and without the
        end-of-sequence token, unless BeamSearchParams keeps them. It is empty without a tokenizer
    cum_logprob: the sum of the generated tokens' log-probabilities
    score: what BeamSearchParams makes of cum_logprob; the largest is the best
    finish_reason: "stop" for an end of sequence; "length" at max_tokens or max_model_len; "error" when the text could
        not be made, or the model's logits were not finite, which ends all beams of this prompt
    stop_reason: the error's message; otherwise None
    logprobs: for each generated token a mapping from token ids to a LogProb, of the tokens among which the search
        chose this one
    """

    __slots__ = ()

    tokens: list[int]
    token_ids: list[int]
    text: str
    cum_logprob: float
    score: float
    finish_reason: FinishReason
    stop_reason: str | None
    logprobs: list[Mapping[int, LogProb]]


class BeamSearchOutput(Output):
    """What a beam search has found for a prompt, a dictionary whose keys are attributes too.

    prompt: the prompt's text; None if the prompt was token ids
    prompt_token_ids: the prompt's tokens, as in RequestOutput
    sequences: the beam_width best sequences, the best first
    """

    __slots__ = ()

    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSequence]


class SearchesBeams(LoadsAdapters):
    """The beam search of LLM.

    beam_rules: whose definition of the best sequences it takes
    """

    beam_rules: ClassVar[type[Rules]] = TransformersRules

    config: Config
    tokenizer: PreTrainedTokenizerBase | None
    _inputs: Inputs

    @hints_for("beam_search", ("concurrency_limit",))
    def beam_search(
        self,
        prompts: Prompt | ListLike[Prompt],
        params: BeamSearchParams,
        lora_request: GivenLora = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Find likely sequences behind every prompt by beam search; returns the outputs in the prompts' order.

        The sequences and scores are those of transformers' generate with num_beams and num_return_sequences.

        prompts: as for generate
        params: the settings, for all prompts
        lora_request: as for generate
        use_tqdm: show a bar, or a function that makes one, as for generate
        concurrency_limit: at most so many prompts run at once; None: as many as the KV cache holds

        A prompt begins when the KV cache has room for all its beams at their full length.

        Raises ValueError, before anything runs, as generate does. Raises it too for more beams than the model has
        tokens or the KV cache has room for, and for an LLM of several replicas or with routed_experts.
        """
        with self._door("ready"):
            use_tqdm = check_use_tqdm(use_tqdm)
            if self.config.logits_processors:
                names = ", ".join(map(name_of, self.config.logits_processors))
                raise ValueError(
                    f"logits_processors={names}: must be left out for beam_search, whose beams change places"
                )
            if concurrency_limit is not None:
                concurrency_limit = check_int("concurrency_limit", concurrency_limit, 1)
            rules = self.beam_rules(self._check_beam_params(params))
            adapters = self._adapters_of(lora_request)
            prepared = self._inputs.check_prompts(prompts, _sampling_params(params), adapters).take_prompts()
            for index, prompt in enumerate(prepared):
                self._beams_of(index, prompt, rules, NONE)  # they must have room
            adapters.load({prompt.params.adapter for prompt in prepared})
            self._check_adapters(prompt.params for prompt in prepared)
        with self._turn(alone=True):
            self._check_adapters(prompt.params for prompt in prepared)  # another thread may have unloaded one
            with self._door("open"):
                slot_of = cast(LLMEngine, self.engine).adapters.slot_of
                searches = [
                    self._beams_of(index, prompt, rules, slot_of(prompt.params.adapter))
                    for index, prompt in enumerate(prepared)
                ]
            self._run_beams(rules, searches, concurrency_limit or len(searches), use_tqdm)
        return [
            self._beam_output(prompt, search.hypotheses, params)
            for prompt, search in zip(prepared, searches, strict=True)
        ]

    def _check_beam_params(self, params: object) -> BeamSearchParams:
        """Return the settings. Raises ValueError if this LLM cannot search by them."""
        config = self.config
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params={short(params)}: must be a BeamSearchParams, from nanoinfer")
        if config.has_replicas:
            raise ValueError(
                f"{config.named_replicas}: beam_search runs on an engine in this process; make the LLM without"
                " replicas, where tensor_parallel_size may divide the model"
            )
        if config.routed_experts:
            raise ValueError(
                "routed_experts=True: beam_search cannot tell the experts of beams; make the LLM without it"
            )
        states = cast(LLMEngine, self.engine).scheduler.block_manager.states
        if states is not None and params.beam_width > (widest := states.num_slots // SLOTS_OF_A_BEAM):
            raise ValueError(
                f"params.beam_width={params.beam_width}: must be at most {widest}: layers of this model keep states, of"
                f" which there are {states.num_slots}; a larger max_num_seqs makes more"
            )
        most = config.description.vocab_size - len(self._stop_ids(params))
        if params.beam_width > most:
            raise ValueError(
                f"params.beam_width={params.beam_width}: must be at most {most}, as many as the model has tokens beside"
                " those that end a sequence"
            )
        return params

    def _stop_ids(self, params: BeamSearchParams) -> frozenset[int]:
        """Return the tokens that end a beam."""
        return frozenset() if params.ignore_eos else self.config.eos_token_ids

    def _beams_of(self, index: int, prompt: Prepared, rules: Rules, adapter: int) -> BeamSearch:
        """Return the search of a prompt. Raises ValueError if the KV cache cannot hold its beams.

        adapter: the slot of its adapter
        """
        stop_ids = self._stop_ids(rules.params)
        media = media_of(prompt.prompt, self.config) if isinstance(prompt.prompt, MediaPrompt) else None
        seq = Sequence(prompt.token_ids, prompt.params, 0, self.config.max_model_len, stop_ids, 0, 0, media, adapter)
        search = BeamSearch(rules, seq)
        layout, asked = self.config.cache_layout, self.config.num_kvcache_blocks
        assert asked is not None  # since the engine has started
        needed, blocks = search.num_blocks(layout.groups), layout.pool_of(asked)
        if needed > blocks:
            raise ValueError(
                f"params.beam_width={rules.params.beam_width}: the beams of prompts[{index}], of up to {seq.max_len}"
                f" tokens, may need {needed} of the KV cache's {blocks} blocks (num_kvcache_blocks={asked});"
                f" fewer beams or less than max_tokens={rules.params.max_tokens} would work; or"
                f" {what_makes_room(self.config)}"
            )
        return search

    def _run_beams(self, rules: Rules, searches: list[BeamSearch], most_searches: int, use_tqdm: UseTqdm) -> None:
        """Run searches to their end. An error or Ctrl-C drops them, as it drops requests."""
        num_likeliest = rules.num_likeliest(len(self._stop_ids(rules.params)))
        num_likeliest = min(num_likeliest, self.config.description.vocab_size)
        engine = cast(LLMEngine, self.engine)
        with no_full_collection(), self._requests:
            engine.ranks.record(
                "beam_search", rules.params, most_searches, [search.seqs[0].token_ids for search in searches]
            )
            run = BeamSearches(engine, searches, num_likeliest, most_searches)
            with closing(make_bar(len(searches), use_tqdm, "Beam search")) as bar:
                shown = Shown(bar)
                while not run.is_finished:
                    newly, result = run.step()
                    if use_tqdm:
                        shown.update(newly, [result], is_last=run.is_finished)

    def _beam_output(self, prompt: Prepared, hypotheses: Hypotheses, params: BeamSearchParams) -> BeamSearchOutput:
        sequences = [self._beam_sequence(prompt, found, params) for found in hypotheses.finished]
        if hypotheses.has_failed:
            for sequence in sequences:
                sequence.update(finish_reason="error", stop_reason=not_finite(self.config.dtype))
        return BeamSearchOutput(prompt=prompt.text, prompt_token_ids=prompt.token_ids, sequences=sequences)

    def _beam_sequence(self, prompt: Prepared, found: Finished, params: BeamSearchParams) -> BeamSequence:
        hypothesis, tokenizer = found.hypothesis, self.tokenizer
        token_ids = hypothesis.token_ids
        tokens = prompt.token_ids + token_ids
        decode = None if tokenizer is None else TokenDecoder(tokenizer, skip_special_tokens=False)
        sequence = BeamSequence(
            tokens=tokens,
            token_ids=token_ids,
            text="",
            cum_logprob=hypothesis.logprob,
            score=found.score,
            finish_reason="stop" if found.is_stopped else "length",
            stop_reason=None,
            logprobs=Later(partial(hypothesis.logprobs, decode)),
        )
        if tokenizer is not None:
            shown = tokens[:-1] if found.is_stopped and not params.include_stop_str_in_output else tokens
            try:
                sequence["text"] = whole_decoder(tokenizer, params.skip_special_tokens)(shown)
            except Exception as error:
                sequence.update(finish_reason="error", stop_reason=f"{type(error).__name__}: {error}")
        return sequence


def _sampling_params(params: BeamSearchParams) -> SamplingParams:
    """Return settings by which a prompt is checked as for generate."""
    length, adapter = params.max_tokens, params.adapter
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=params.ignore_eos, adapter=adapter)
