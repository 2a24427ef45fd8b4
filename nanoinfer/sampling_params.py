"""SamplingParams: how the tokens of one request are chosen, and when the request ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from nanoinfer.bans import Bans
from nanoinfer.checks import as_int, as_list, as_number, check_adapter, check_flag, check_int, check_number, short
from nanoinfer.hidden_layers import check_layers
from nanoinfer.hints import hints_for
from nanoinfer.logits_processors import Function, check_functions
from nanoinfer.pooling.read import Read
from nanoinfer.structured_outputs import check_structured_outputs
from nanoinfer.thought import Thought

MIN_TEMPERATURE = 1e-6  # a lower one is greedy: logits divided by it would overflow
LARGEST = 1e30  # no setting may be larger: the device computes in float32
OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "thinking_token_budget")  # may be None
FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "kept_tokens",
    "entropy",
    "prompt_hidden_states",
    "skip_special_tokens",
    "detokenize",
)
MOST_SAMPLES = 10**6  # each is a sequence of its own
MOST_BIAS = 100  # of OpenAI's logit_bias


@hints_for("SamplingParams")
@dataclass(unsafe_hash=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when the request ends.

    vLLM and Hugging Face's generation config use the same names. Settings may be assigned, as in params.n = 4. Each
    assignment is checked as the constructor checks, and changes nothing if it is refused. A request takes a copy when
    it is added. Equal settings have equal hashes, so change none that is the key of a mapping. params.clone() returns a
    copy. SamplingParams.from_optional(...) takes None for a default; it takes OpenAI's logit_bias, as vLLM does.

    temperature: the sampler divides the logits by this number before it draws; 0 always takes the most likely token
    max_tokens: a sample ends after this many generated tokens, or sooner where max_model_len is reached; None: only
        there; 0: the engine computes prompt_logprobs alone, and the prompt may fill max_model_len; n must be 1 then
    ignore_eos: True: a sample goes on after an end-of-sequence token, as benchmarks want; such are the tokens that
        config.json, generation_config.json and the tokenizer name
    seed: a request with a seed draws with the same randomness each time, whatever runs beside it; None or -1:
        the engine makes a seed from its own and the request's number, so that the same call twice on one LLM differs
    n: the engine generates this many samples of the prompt, which share the prompt's KV cache; each draws for itself
    top_k: the sampler draws among the k most likely tokens, and those as likely as the k-th; 0 or -1: among all
    top_p: the sampler draws among the most likely tokens whose probabilities first add up to top_p, after top_k
    min_p: the sampler leaves out tokens less likely than min_p times the most likely one, after top_p
    repetition_penalty: the sampler divides positive logits by this number, and multiplies negative ones with it, for
        every token so far, the prompt's included (Keskar, 2019)
    presence_penalty: the sampler subtracts this number, from -2 to 2, from the logit of each token generated so far
    frequency_penalty: the sampler subtracts this number, from -2 to 2, once for each time that a token was generated
    logit_bias: the sampler adds to the logit of each token id the number that stands beside the id
    allowed_token_ids: the sampler draws these tokens alone, an end-of-sequence token only if it is one of them; None:
        it draws any
    bad_words: the output does not spell these strings: the sampler leaves out the last token of a string where the
        output ends with its others. As in vLLM, the tokenizer makes the tokens of the string alone, and behind a space
        if these are as many. The prompt does not count, and other tokens may spell the string
    stop: one string, or several; a sample ends with the first of them, and its text ends before the string
    stop_token_ids: a sample ends with one of these tokens too, not only with an end-of-sequence token; its text ends
        before the token, its token_ids with the token
    include_stop_str_in_output: True: the text ends with the stop string or stop token; False: before it
    min_tokens: before this many generated tokens, no end-of-sequence token, stop token or stop string ends a sample
    logprobs: the output has the log-probability of each generated token, and of this many most likely ones; 0: of the
        generated token alone; -1: of all tokens; True: as 1; LLM's logprobs_mode says of which distribution
    prompt_logprobs: as logprobs, for each token of the prompt
    prompt_logprobs_start: the prompt's tokens before this position get no log-probabilities; the engine computes the
        token just before it, and may take the blocks before that token from the KV cache
    kept_tokens: True: the output says for each generated token how many tokens could have been drawn in its place, and
        how likely these were together before filters left out the others
    entropy: True: the output has for each generated token the entropy of the distribution that it was drawn from
    hidden_states: the output has the hidden states of these numbers, such as [0, 12, -1], for each token of prompt and
        output but the output's last. LLM's hidden_state_layers must have them. Those of cached tokens would be unknown,
        so the prompt takes nothing from the KV cache. None: the output has none
    prompt_hidden_states: False: of the prompt, hidden_states has the last token alone; the others may come from the KV
        cache
    skip_special_tokens: True: the text leaves out special tokens
    detokenize: False: the output has token ids alone, a little sooner
    structured_outputs: the text has the form that one of these asks for: {"json": a JSON Schema, as a mapping, a text
        or a pydantic class}, {"json_object": True}, {"regex": text}, {"choice": list of texts}, or {"grammar": text, in
        Lark or GBNF}; needs `pip install 'nanoinfer[structured]'`. A sample ends where its text can only end, and at
        an end-of-sequence token even with ignore_eos; max_tokens may cut it before. JSON has at most one space between
        its tokens, unless "disable_any_whitespace": True or a "whitespace_pattern" stands beside it. An object with
        attributes of these names will do, as vLLM's StructuredOutputsParams; an entry that is None counts as missing
        "reasoning" says whether the form binds what stands behind a thought alone: True: the sample thinks first, and
        the engine opens the thought if the prompt has not; False: it binds the first token, too; None: True where the
        prompt ends in an open thought
    thinking_token_budget: behind so many tokens of a thought, the engine puts the marker that closes it, whatever other
        settings say; these tokens count as the sample's. The thought begins behind the prompt, if that ends in an open
        one, or behind its marker in the output. None or -1: nobody closes it but the model. See LLM's reasoning_markers
    logits_processors: functions that change the logits before each draw, one after the other, before penalties and
        bans. Each is f(token_ids, logits), with the tokens of prompt and output so far, or f(prompt, output, logits).
        logits is [vocabulary] float32, on the model's device, and may be changed in place. A function that raises an
        error, or returns another shape, NaN or infinity, ends its sample with an error
    extra_args: a mapping that the classes of LLM's logits_processors read; nothing else does
    steering: (name, strength): vectors that llm.load_steering has loaded, times the strength, are added to the hidden
        states of the request's tokens; None: nothing is
    adapter: the name of the adapter that computes the request: see llm.load_adapter(...); None: the model alone does

    Raises a ValueError that names the setting, its value and the range, if a setting is out of its range.
    """

    temperature: float = 1.0
    max_tokens: int | None = 64
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Iterable[int] | None = field(default=None, hash=False)
    bad_words: Iterable[str] | None = field(default=None, hash=False)
    stop: str | Iterable[str] | None = field(default=None, hash=False)
    stop_token_ids: Iterable[int] | None = field(default=None, hash=False)
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    kept_tokens: bool = False
    entropy: bool = False
    hidden_states: Iterable[int] | None = field(default=None, hash=False)
    prompt_hidden_states: bool = True
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: Mapping[str, Any] | Any = field(default=None, hash=False)
    thinking_token_budget: int | None = None
    logits_processors: Iterable[Function] | None = field(default=None, hash=False)
    extra_args: Mapping[str, Any] | None = field(default=None, hash=False)
    steering: tuple[str, float] | None = None
    adapter: str | None = None

    bans: ClassVar[Bans | None] = None  # of a request's own copy: allowed_token_ids and bad_words, resolved
    thought: ClassVar[Thought | None] = None  # of a request's own copy: markers, budget, and whether a form waits
    read: ClassVar[Read | None] = None  # of a request's own copy: what its text is read for, in place of tokens
    cache_salt: ClassVar[str | None] = None  # of a request's own copy: it shares blocks with the same salt's alone

    def __post_init__(self) -> None:
        settings = self.__dict__
        for name in FLAGS:
            settings[name] = check_flag(name, settings[name])
        self._check_hidden_states()
        self._check_integers()
        self._check_prompt_logprobs()
        self._check_numbers()
        self._check_logit_bias()
        self._check_bans()
        self._check_stops()
        settings["structured_outputs"] = check_structured_outputs(self.structured_outputs)
        settings["logits_processors"] = check_functions("logits_processors", self.logits_processors)
        if self.extra_args is not None and not isinstance(self.extra_args, Mapping):
            raise ValueError(f"extra_args={short(self.extra_args)}: must be None or a mapping")
        settings["extra_args"] = dict(self.extra_args or {}) or None
        settings["steering"] = _check_steering(self.steering)
        settings["adapter"] = check_adapter("adapter", self.adapter)

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign a setting. Raises ValueError as the constructor does, and changes nothing then."""
        settings = self.__dict__
        if name in settings or name not in self.__match_args__:
            settings.update(vars(replace(self, **{name: value})))
        else:  # the constructor sets it
            settings[name] = value

    @classmethod
    def from_optional(cls, **settings: Any) -> SamplingParams:
        """Return SamplingParams in which None stands for a setting's default, as vLLM's function of this name does.

        max_tokens=None keeps its meaning. The keys of logit_bias may be integers as strings, and its numbers are
        brought to the range from -100 to 100. Raises ValueError as SamplingParams does.
        """
        known = {*cls.__match_args__} - {"max_tokens"}
        given = {name: value for name, value in settings.items() if value is not None or name not in known}
        if isinstance(bias := with_integer_keys(given.get("logit_bias")), Mapping):
            given["logit_bias"] = {key: _to_most_bias(value) for key, value in bias.items()}
        return cls(**given)

    def clone(self) -> SamplingParams:
        """Return a copy that shares nothing with this one."""
        return deepcopy(self)

    def _set(self, name: str, value: Any) -> None:
        """Set a field to its checked value, of Python's own types."""
        self.__dict__[name] = value

    def _check_integers(self) -> None:
        settings = self.__dict__
        if as_int(self.seed) == -1:
            settings["seed"] = None
        if as_int(self.thinking_token_budget) == -1:
            settings["thinking_token_budget"] = None
        for name in ("logprobs", "prompt_logprobs"):
            if settings[name] is True:
                settings[name] = 1
        for name, low, high, what in (
            ("max_tokens", 0, None, "None or an integer of at least 0"),
            ("min_tokens", 0, None, ""),
            ("n", 1, MOST_SAMPLES, ""),
            ("top_k", -1, None, "a positive integer, or 0 or -1 for all tokens"),
            ("seed", 0, 2**63 - 1, "None or an integer from 0 to 2**63 - 1"),
            ("logprobs", -1, None, "None, an integer of at least 0, or -1 for all tokens"),
            ("prompt_logprobs", -1, None, "None, an integer of at least 0, or -1 for all tokens"),
            ("prompt_logprobs_start", 0, None, ""),
            ("thinking_token_budget", 0, None, "None or -1 for no end, or an integer of at least 0"),
        ):
            if settings[name] is not None or name not in OPTIONAL:
                settings[name] = check_int(name, settings[name], low, high, what)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            least, most = short(self.min_tokens), short(self.max_tokens)
            raise ValueError(f"min_tokens={least}: must be at most max_tokens={most}")

    def _check_hidden_states(self) -> None:
        if self.hidden_states is not None:
            self._set("hidden_states", list(check_layers("hidden_states", self.hidden_states)) or None)
        if not (self.prompt_hidden_states or self.hidden_states):
            raise ValueError("prompt_hidden_states=False: must be True without hidden_states, which it restricts")

    def _check_prompt_logprobs(self) -> None:
        if self.max_tokens == 0 and self.n > 1:
            raise ValueError(f"n={short(self.n)}: must be 1 with max_tokens=0, because samples would be empty")
        if self.prompt_logprobs is not None:
            return
        if self.max_tokens == 0 and self.hidden_states is None:
            raise ValueError(
                "max_tokens=0: must be at least 1 with prompt_logprobs=None and hidden_states=None, or nothing is asked"
                " for; prompt_logprobs=0 scores the prompt"
            )
        if self.prompt_logprobs_start > 0:
            start = short(self.prompt_logprobs_start)
            raise ValueError(
                f"prompt_logprobs_start={start}: must be 0 without prompt_logprobs; pass prompt_logprobs=0 beside it"
            )

    def _check_numbers(self) -> None:
        settings = self.__dict__
        for name, low, high, what in (
            ("temperature", 0, LARGEST, f"0 (greedy) or positive, at most {LARGEST:g}"),
            ("top_p", math.ulp(0), 1, "above 0, at most 1"),
            ("min_p", 0, 1, "from 0 to 1"),
            ("repetition_penalty", 1 / LARGEST, LARGEST, f"from {1 / LARGEST:g} to {LARGEST:g}"),
            ("presence_penalty", -2, 2, "from -2 to 2"),
            ("frequency_penalty", -2, 2, "from -2 to 2"),
        ):
            settings[name] = check_number(name, settings[name], low, high, what)

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias={short(self.logit_bias)}: must be a mapping from token ids to numbers")
        biases: dict[int, float] = {}
        for key, value in self.logit_bias.items():
            token_id, bias = _as_token_id(key), as_number(value)
            if token_id is None or bias is None or not -LARGEST <= bias <= LARGEST:
                raise ValueError(
                    f"logit_bias has {short(key)}: {short(value)}: must map token ids to numbers from -{LARGEST:g} to"
                    f" {LARGEST:g}"
                )
            biases[token_id] = bias
        self._set("logit_bias", biases)

    def _check_bans(self) -> None:
        if self.allowed_token_ids is not None:
            allowed = _check_entries("allowed_token_ids", self.allowed_token_ids, "token ids", _as_token_id)
            if not allowed:
                raise ValueError("allowed_token_ids=[]: must be None for all tokens, or a list of token ids")
            self._set("allowed_token_ids", allowed)
        self._set("bad_words", _check_entries("bad_words", self.bad_words, "non-empty strings", _as_text))

    def _check_stops(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        self._set("stop", _check_entries("stop", stop, "non-empty strings", _as_text))
        self._set("stop_token_ids", _check_entries("stop_token_ids", self.stop_token_ids, "token ids", _as_token_id))
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={short(self.stop)} needs detokenize=True: the text is searched for it")

    @property
    def has_penalties(self) -> bool:
        """Whether the sampler makes tokens that occurred before less likely, or more likely."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def is_greedy(self) -> bool:
        """Whether the sampler always takes the most likely token."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def is_guided(self) -> bool:
        """Whether a mask says which tokens may be drawn."""
        return self.structured_outputs is not None


def with_integer_keys(bias: Any) -> Any:
    """Return a logit_bias with integers for keys that are integers as strings, as in JSON; all else as it is."""
    if not isinstance(bias, Mapping):
        return bias
    return {int(key) if isinstance(key, str) and key.isdecimal() else key: value for key, value in bias.items()}


def _to_most_bias(value: Any) -> Any:
    bias = as_number(value)
    return value if bias is None or math.isnan(bias) else max(-MOST_BIAS, min(MOST_BIAS, bias))


def _check_entries(name: str, value: Any, kind: str, convert: Callable[[Any], Any]) -> list[Any]:
    """Convert a list's entries; None counts as empty. Raises ValueError for an entry that `convert` turns into None."""
    if value is None:
        return []
    entries = as_list(value, ordered=False)
    if entries is None:
        raise ValueError(f"{name}={short(value)}: must be a list of {kind}")
    if convert is _as_token_id and {*map(type, entries)} == {int} and min(entries) >= 0:
        converted = list(entries)  # the usual case: half of a vocabulary takes a millisecond
    else:
        converted = list(map(convert, entries))
    if None in converted:
        raise ValueError(f"{name} has {short(entries[converted.index(None)])}: must be a list of {kind}")
    return sorted(converted) if isinstance(value, Set) else converted  # each process has its own order of a set


def _check_steering(value: Any) -> tuple[str, float] | None:
    """Return a name and a finite strength; None stays None. Raises ValueError for all else."""
    if value is None:
        return None
    entries = as_list(value) or []
    name, strength = entries if len(entries) == 2 else (None, None)
    number = as_number(strength)
    if not isinstance(name, str) or name == "" or number is None or not -LARGEST <= number <= LARGEST:
        raise ValueError(f"steering={short(value)}: must be None, or the name of loaded vectors and a number")
    return str.__str__(name), float(number)


def _as_text(value: Any) -> str | None:
    return str.__str__(value) if isinstance(value, str) and value != "" else None


def _as_token_id(value: Any) -> int | None:
    token_id = as_int(value)
    return None if token_id is None or token_id < 0 else token_id
