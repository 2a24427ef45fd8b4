"""NewSequences: makes the sequences of a request, with all that its settings and the engine's options give them."""

from __future__ import annotations

from array import array
from typing import TypeAlias

from nanoinfer.config import Config
from nanoinfer.engine.media import media_of
from nanoinfer.engine.ranks.adapters import RankAdapters
from nanoinfer.engine.ranks.ranks import Ranks
from nanoinfer.engine.ranks.steerings import RankSteerings
from nanoinfer.engine.ranks.updater import RankUpdater
from nanoinfer.engine.results.hidden_states import hidden_states_for
from nanoinfer.engine.results.routed_experts import RoutedExperts
from nanoinfer.engine.sequence import Sequence
from nanoinfer.grammar.grammar import Grammar
from nanoinfer.media.spans import MediaPrompt
from nanoinfer.pooling.read import PackedTexts
from nanoinfer.sampling_params import SamplingParams

NewPrompt: TypeAlias = "list[int] | array[int] | MediaPrompt | PackedTexts"
SEEDS_APART = 0xA0761D6478BD642F  # those of a request's samples


class NewSequences:
    """Makes sequences, and lets ranks with hosts of their own compare what they are made of."""

    def __init__(
        self, config: Config, ranks: Ranks, updater: RankUpdater, adapters: RankAdapters, steerings: RankSteerings
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.updater, self.adapters, self.steerings = updater, adapters, steerings

    def make(
        self,
        request_id: int,
        prompt: NewPrompt,
        params: SamplingParams,
        grammar: Grammar | None,
        seed: int | None,
        samples: range | None,
    ) -> list[Sequence]:
        """Return the sequences of a request; the arguments are those of LLMEngine.add_request."""
        media = media_of(prompt, self.config) if isinstance(prompt, MediaPrompt) else None
        text_lens = prompt.lens if isinstance(prompt, PackedTexts) else None
        if isinstance(prompt, MediaPrompt):
            self.ranks.record("media", *prompt.spans)
        elif text_lens is not None:
            self.ranks.record("texts", text_lens)
        token_ids = prompt.token_ids if isinstance(prompt, MediaPrompt | PackedTexts) else prompt
        self.ranks.record("prompt", token_ids)
        self.ranks.record("settings", params, params.read, params.cache_salt, params.thought)
        if seed is None:
            seed = seed_of(params, self.config.seed, request_id)
        stop_ids, limit = self._stop_ids(params, grammar), self.config.max_model_len
        adapter, seqs = self.adapters.slot_of(params.adapter), list[Sequence]()
        for index in samples or range(params.n):
            own_seed = (seed + index * SEEDS_APART) % 2**63
            seq = Sequence(token_ids, params, own_seed, limit, stop_ids, request_id, index, media, adapter)
            seq.text_lens = text_lens
            seq.use_weights(self.updater.version)
            if (experts := self.config.description.experts) is not None and self.config.routed_experts:
                seq.routed_experts = RoutedExperts(sum(experts.layers), experts.used, experts.number_type)
            seq.steering = self.steerings.named(params.steering)
            seq.hidden_states = hidden_states_for(params, len(token_ids), self.config)
            seqs.append(seq)
        return seqs

    def _stop_ids(self, params: SamplingParams, grammar: Grammar | None) -> frozenset[int]:
        """Return the tokens that end a request's sequences; mostly one set for all requests."""
        stop_ids = frozenset() if params.ignore_eos else self.config.eos_token_ids
        if params.stop_token_ids:
            stop_ids = stop_ids.union(params.stop_token_ids)
        return stop_ids if grammar is None else stop_ids | grammar.eos_token_ids


def seed_of(params: SamplingParams, engine_seed: int, request_id: int) -> int:
    """Return the seed of a request: its own, or one that is made from the engine's and the request's number."""
    if params.seed is not None:
        return params.seed
    # + 1: the first request's seed is not 0, which a user may choose
    return engine_seed * 0x9E3779B97F4A7C15 + (request_id + 1) * 0xD1B54A32D192ED03
