"""Continuations: prompts with each of their continuations, as llm.score takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from nanoinfer.checks import as_int, as_list, short
from nanoinfer.media.spans import MediaPrompt
from nanoinfer.requests.inputs import Inputs, SomePrompts
from nanoinfer.requests.prompts.stages import Asked, CallPrompts, Prepared, Tokens, ids_of, list_of, salted
from nanoinfer.requests.prompts.token_ids import A_PROMPT, MOST_SHOWN, token_ids_of
from nanoinfer.requests.settings import check_generates
from nanoinfer.requests.text.texts import check_characters
from nanoinfer.sampling_params import SamplingParams


class Continuations:
    """Checks what llm.score takes. Raises ValueError if it cannot be scored."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs

    def check(
        self, prompt: SomePrompts, continuations: Any, adapter: str | None, hidden_states: Iterable[int] | None
    ) -> tuple[CallPrompts, list[int] | None]:
        """Return prompts with each of their continuations, ready to be scored.

        Returns also how many continuations each prompt of a list has; None: there is one prompt.
        """
        check_generates(self._inputs.config)
        layers = self._inputs.check_hidden_states(hidden_states)
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, adapter=adapter, hidden_states=layers)
        entries = None if isinstance(prompt, (str, Mapping)) else as_list(prompt)
        if not entries or as_int(entries[0]) is not None:
            one = prompt if entries is None else entries
            return CallPrompts(self._followed("", one, continuations, params), self._inputs.finish), None
        lists = list_of("continuations", continuations, "a list that has continuations for each prompt")
        if len(lists) != len(entries):
            raise ValueError(
                f"continuations has {len(lists)} entries for {len(entries)} prompts: give each its own list"
            )
        pairs = zip(entries, lists, strict=True)
        followed = [self._followed(f"[{i}]", entry, own, params) for i, (entry, own) in enumerate(pairs)]
        return CallPrompts([*chain.from_iterable(followed)], self._inputs.finish), list(map(len, followed))

    def _followed(self, index: str, prompt: Any, continuations: Any, params: SamplingParams) -> list[Prepared]:
        """Return a prompt with each of its continuations; index: where both stand in the lists of a call, if in such"""
        asked = self._inputs.reader.unwrap(f"prompt{index}", prompt)
        if not isinstance(asked.prompt, str):
            asked = asked._replace(prompt=token_ids_of(asked.name, asked.prompt))
        asked = self._inputs.opened(asked)
        items = [continuations] if isinstance(continuations, str) else continuations
        name = f"continuations{index}"
        entries = list_of(name, items, f"{A_PROMPT}, or a list of these")
        if entries and as_int(entries[0]) is not None:
            entries = [entries]
        return [self._follow(asked, f"{name}[{i}]", entry, params) for i, entry in enumerate(entries)]

    def _follow(self, asked: Asked, name: str, continuation: Tokens, params: SamplingParams) -> Prepared:
        """Return a prompt with one continuation. LLM.score says where the tokens of two texts are divided."""
        given = asked.prompt
        if isinstance(given, str) and isinstance(continuation, str):
            check_characters(name, continuation)  # the two are tokenized together
            both = asked._replace(name=name, prompt=given + continuation)
            asked = asked._replace(prompt=given.rstrip())
            first = self._inputs.tokens_of(asked, self._inputs.see(asked))
            rest = ids_of(self._inputs.tokens_of(both, self._inputs.see(both)))[len(ids_of(first)) :]
        else:
            first = self._inputs.tokens_of(asked, self._inputs.see(asked))
            rest = self._inputs.to_token_ids(name, continuation, add_special_tokens=False)
        if not first:
            raise ValueError(f"{asked.name} is empty: it must have at least one token")
        if not rest:
            raise ValueError(f"{name} is {short(continuation, MOST_SHOWN)}: must add a token to the prompt's")
        params = salted(replace(params, prompt_logprobs_start=len(ids_of(first))), asked.cache_salt)
        prompt = first.followed_by(rest) if isinstance(first, MediaPrompt) else first + rest
        packed = self._inputs.check_tokens(f"{asked.name} + {name}", prompt, params)
        return Prepared(packed, ids_of(prompt), None, params, None)
