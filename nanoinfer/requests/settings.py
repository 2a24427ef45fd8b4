"""Settings of requests: checks them by the model's vocabulary and tokenizer, which SamplingParams does not know."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as ListLike
from copy import copy
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from nanoinfer.checks import as_list, short
from nanoinfer.config import Config
from nanoinfer.grammar.grammar import Grammar, Grammars
from nanoinfer.hidden_layers import resolve_layer
from nanoinfer.logits_processors import check_pickles, name_of
from nanoinfer.requests.bans import find_bans
from nanoinfer.requests.reasoning.reasoning import Reasoning
from nanoinfer.requests.reasoning.thoughts import find_thought
from nanoinfer.requests.text.spelling import TokenDecoder
from nanoinfer.requests.text.texts import TextTokenizer
from nanoinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ALL = -1  # log-probabilities
MOST_SHOWN = 60  # characters of a value in an error message

GivenSettings = SamplingParams | ListLike[SamplingParams] | None  # by a user
AdapterNames = str | list[str | None] | None  # one for all prompts, or one each


class CallAdapters(Protocol):
    """The adapters of a call's prompts."""

    @property
    def names(self) -> AdapterNames:
        """Their names."""

    @property
    def argument(self) -> str:
        """The argument by which the caller gave them."""

    def load(self, used: Collection[str | None]) -> None:
        """Load those that are missing, when the prompts are checked. used: adapters that the settings name"""


class NamedAdapters(NamedTuple):
    """Adapters that are loaded, or the call is refused when it begins."""

    names: AdapterNames = None
    argument: str = "adapter"

    def load(self, used: Collection[str | None]) -> None:
        """Load nothing."""


NO_ADAPTERS = NamedAdapters()


class Settings(NamedTuple):
    """The settings of a prompt that can run, and the grammar of its structured outputs."""

    params: SamplingParams
    grammar: Grammar | None


class SettingsReader:
    """Checks settings, and makes of them what an engine takes. Raises ValueError for those that cannot work."""

    def __init__(self, config: Config, texts: TextTokenizer, reasoning: Reasoning | None = None) -> None:
        """reasoning: the LLM's; None: it has no markers"""
        self._config = config
        self._texts = texts
        self._reasoning = reasoning
        self._grammars: Grammars | None = None  # made for the first request that needs it

    def check_one(self, given: SamplingParams | None) -> Settings:
        """Return the settings of one prompt."""
        if given is not None and not isinstance(given, SamplingParams):
            raise ValueError(
                f"sampling_params={short(given, MOST_SHOWN)}: must be a SamplingParams, for one prompt;"
                " generate and stream take lists"
            )
        (settings,) = self.check_all(1, given)
        return settings

    def check_all(self, count: int, given: GivenSettings, adapters: CallAdapters = NO_ADAPTERS) -> list[Settings]:
        """Return the settings of so many prompts, which are given one for all or one each."""
        settings = self._check_given(count, given)
        names = one_each(adapters, count)
        return [_adapted(one, name, adapters.argument) for one, name in zip(settings, names, strict=True)]

    def _check_given(self, count: int, given: GivenSettings) -> list[Settings]:
        check_generates(self._config)
        if given is None:
            given = SamplingParams()
        if isinstance(given, SamplingParams):
            return [self._check("sampling_params", given)] * count
        params = as_list(given)
        if params is None:
            raise ValueError(
                f"sampling_params={short(given, MOST_SHOWN)}: must be a SamplingParams, or a list of them, from"
                " nanoinfer"
            )
        if len(params) != count:
            raise ValueError(f"sampling_params has {len(params)} entries for {count} prompts: give one, or one each")
        for index, entry in enumerate(params):
            if not isinstance(entry, SamplingParams):
                raise ValueError(f"sampling_params[{index}] is {short(entry)}: must be a SamplingParams")
        settings: dict[int, Settings] = {}  # by the id of the user's object, which many prompts may share
        for index, entry in enumerate(params):
            if id(entry) not in settings:
                settings[id(entry)] = self._check(f"sampling_params[{index}]", entry)
        return [settings[id(entry)] for entry in params]

    def _check(self, name: str, params: SamplingParams) -> Settings:
        """Check settings, and return a copy of them."""
        vocab_size = self._config.description.vocab_size
        for field in ("logit_bias", "stop_token_ids"):  # find_bans checks allowed_token_ids, of which there may be many
            token_ids = getattr(params, field) or ()
            if token_ids and max(token_ids) >= vocab_size:
                too_large = next(token_id for token_id in token_ids if token_id >= vocab_size)
                raise ValueError(f"{name}.{field} has token id {short(too_large)}: must be from 0 to {vocab_size - 1}")
        for field in ("logprobs", "prompt_logprobs"):
            count = getattr(params, field)
            if count is not None and count > vocab_size:
                raise ValueError(f"{name}.{field}={short(count)}: the model has {vocab_size} tokens")
        self._check_processors(name, params)
        self.check_hidden_states(f"{name}.hidden_states", params.hidden_states or ())
        if params.stop:
            self._texts.check_detokenizer(f"{name}.stop={params.stop!r}")
        return Settings(self._resolve(name, params), self.compile(name, params))

    def _check_processors(self, name: str, params: SamplingParams) -> None:
        """Check what logits processors of the request and of the LLM are given."""
        config = self._config
        classes, functions = config.logits_processors or (), params.logits_processors or ()
        if params.extra_args is not None and not classes:
            raise ValueError(
                f"{name}.extra_args={short(params.extra_args)}: must be left out: this LLM has no logits_processors,"
                " which read them"
            )
        if functions and (where := config.named_processes) is not None:
            check_pickles(f"{name}.logits_processors", [*functions], where)
        for own in classes:
            try:
                if (validate := getattr(own, "validate_params", None)) is not None:
                    validate(params)
            except Exception as error:
                raise ValueError(f"{name}: {name_of(own)}: {error}") from error

    def check_hidden_states(self, name: str, layers: Iterable[int]) -> None:
        """Raise ValueError for hidden states that the model lacks, or that the LLM does not keep."""
        kept, last = self._config.hidden_layers, self._config.description.last_hidden_layer
        for layer in layers:
            if resolve_layer(name, layer, last) not in kept:
                given = self._config.hidden_state_layers
                raise ValueError(
                    f"{name} has {layer}: must be among LLM's hidden_state_layers={given}, planned at the start"
                )

    def _resolve(self, name: str, params: SamplingParams) -> SamplingParams:
        """Return a copy for the engine, which knows numbers of tokens and token ids alone."""
        params = _copy(params)
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(params, field) == ALL:
                vars(params)[field] = self._config.description.vocab_size
        if params.bad_words:
            self._texts.known_tokenizer(f"{name}.bad_words={short(params.bad_words)}")
        encode = partial(self._texts.tokenize, f"{name}.bad_words", add_special_tokens=False)
        if (bans := find_bans(name, params, self._config, encode)) is not None:
            vars(params)["bans"] = bans
        vars(params)["thought"] = find_thought(name, params, self._reasoning)
        return params

    def compile(self, name: str, params: SamplingParams) -> Grammar | None:
        """Compile the grammar of a request with structured outputs; `name` begins the messages of errors."""
        if params.structured_outputs is None:
            return None
        name = f"{name}.structured_outputs={short(params.structured_outputs)}"
        self._texts.check_detokenizer(name)
        assert self._texts.tokenizer is not None
        try:
            if self._grammars is None:
                self._grammars = self._make_grammars(self._texts.tokenizer)
            return self._grammars.compile(params.structured_outputs)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def _make_grammars(self, tokenizer: PreTrainedTokenizerBase) -> Grammars:
        spell = TokenDecoder(tokenizer, skip_special_tokens=True).bytes_of
        return Grammars(tokenizer, self._config.description.vocab_size, self._config.eos_token_ids, spell)


def check_generates(config: Config) -> None:
    """Raise RuntimeError for an LLM that only reads texts."""
    if not config.description.generates:
        raise RuntimeError(
            "this LLM reads texts, and has no logits of tokens: call llm.embed, llm.classify or llm.rerank; for a"
            f" checkpoint with a head, LLM({config.model!r}, runner='generate') generates"
        )


def one_each(adapters: CallAdapters, count: int) -> list[str | None]:
    """Return the names of so many prompts' adapters. Raises ValueError for another number of them."""
    names = adapters.names if isinstance(adapters.names, list) else [adapters.names] * count
    if len(names) != count:
        raise ValueError(f"{adapters.argument} has {len(names)} entries for {count} prompts: give one, or one each")
    return names


def _adapted(settings: Settings, adapter: str | None, argument: str) -> Settings:
    """Return settings with a call's adapter, if there is one. argument: that names it"""
    params = settings.params
    if adapter in (None, params.adapter):
        return settings
    if params.adapter is not None:
        raise ValueError(
            f"{argument} names {adapter!r}, and SamplingParams has adapter={params.adapter!r}: must be one of them"
        )
    params = copy(params)
    vars(params)["adapter"] = adapter
    return settings._replace(params=params)


def _copy(params: SamplingParams) -> SamplingParams:
    """Copy the fields into a plain SamplingParams: users may change theirs, and ranks may not know its subclass."""
    values = {field.name: getattr(params, field.name) for field in fields(SamplingParams)}
    allowed = values.pop("allowed_token_ids")  # half of a vocabulary would be checked for milliseconds
    copied = SamplingParams(**values)
    vars(copied)["allowed_token_ids"] = allowed
    return copied
