"""The texts of a call that reads them: those of a list, or as an iterator gives them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from nanoinfer.pooling.read import Read
from nanoinfer.requests.inputs import Inputs, Prompt, SomePrompts
from nanoinfer.requests.outputs import Output
from nanoinfer.requests.prompts.stages import Asked, ComingRequest, Prepared
from nanoinfer.requests.reading.outputs import ReadText, texts_read
from nanoinfer.requests.request import Request
from nanoinfer.requests.settings import CallAdapters, Settings, one_each
from nanoinfer.sampling_params import SamplingParams

CHECKED_AT_ONCE = 1024  # texts of a list at most, whose tokens all cores make
MEDIA_AHEAD = 16  # texts of an iterator whose images threads may prepare

SomeOutput = TypeVar("SomeOutput", bound=Output)
SomePrompt = TypeVar("SomePrompt", Asked, Prepared)


def settings_for(read: Read, adapter: str | None, hidden_states: tuple[int, ...] | None = None) -> Settings:
    """Return the settings of texts that get no token."""
    params = SamplingParams(max_tokens=1, detokenize=False, adapter=adapter, hidden_states=hidden_states)
    vars(params).update(max_tokens=0, read=read)  # which users cannot ask for
    return Settings(params, None)


def as_it_is(prompt: SomePrompt) -> SomePrompt:
    """Return a prompt unchanged."""
    return prompt


@dataclass(frozen=True)
class Reading(Generic[SomeOutput]):
    """What a call reads of each of its texts.

    read: what steps give
    outputs: makes texts' outputs of that
    ask: changes what a text was asked for as, before it gets tokens
    trim: leaves out tokens at the end that do not count
    name: of the argument that has the texts
    hidden_states: those that outputs have of all tokens, as SamplingParams names them; None: they have none
    """

    read: Read
    outputs: Callable[[list[ReadText]], list[SomeOutput]]
    ask: Callable[[Asked], Asked] = as_it_is
    trim: Callable[[Prepared], Prepared] = as_it_is
    name: str = "prompts"
    hidden_states: tuple[int, ...] | None = None

    def output(self, request: Request) -> SomeOutput:
        """Make the output of a request of one text."""
        return self.outputs(texts_read(request))[0]


def one_by_one(output: Callable[[ReadText], SomeOutput]) -> Callable[[list[ReadText]], list[SomeOutput]]:
    """Return a function that makes the outputs of several texts, each by itself."""
    return lambda texts: [output(text) for text in texts]


class SomeTexts(ABC):
    """The texts of a call. count: how many, if it is known"""

    count: int | None

    @abstractmethod
    def next_text(self) -> Prepared | None:
        """Return the next text, ready to run; None: there is none left. Raises ValueError for one that cannot work."""

    @abstractmethod
    def close(self) -> None:
        """Let no thread begin to prepare images of texts that have not been taken."""


class ListedTexts(SomeTexts):
    """Those of a list. Their tokens are checked beside the device, twice as fast as it takes them, many at once."""

    def __init__(
        self,
        coming: list[ComingRequest],
        finish_all: Callable[[list[ComingRequest]], list[Prepared]],
        trim: Callable[[Prepared], Prepared],
    ) -> None:
        """finish_all: Inputs'"""
        self.count = len(coming)
        self._coming, self._finish_all, self._trim = deque(coming), finish_all, trim
        self._ready: deque[Prepared] = deque()
        self._num_taken = 0

    def next_text(self) -> Prepared | None:
        """Return the next text, ready to run; None: there is none left. Raises ValueError for one that cannot work."""
        num_checked = self._num_taken + len(self._ready)
        self._num_taken += 1
        if self._coming and num_checked < 2 * self._num_taken:
            count = min(max(num_checked, 2), CHECKED_AT_ONCE, len(self._coming))
            coming = [self._coming.popleft() for _ in range(count)]
            self._ready.extend(map(self._trim, self._finish_all(coming)))
        return self._ready.popleft() if self._ready else None

    def close(self) -> None:
        """Let no thread begin to prepare images of texts that have not been taken."""
        for coming in self._coming:
            coming.cancel()


class ComingTexts(SomeTexts):
    """Those of an iterator, each checked when its turn comes; of a few further ones, threads prepare the images."""

    count = None

    def __init__(
        self, prompts: Iterator[Prompt], reading: Reading[SomeOutput], inputs: Inputs, adapter: str | None
    ) -> None:
        settings = settings_for(reading.read, adapter, reading.hidden_states)
        self._coming = (
            inputs.begin_text(f"{reading.name}[{index}]", prompt, settings, reading.ask)
            for index, prompt in enumerate(prompts)
        )
        self._finish, self._trim = inputs.finish, reading.trim
        self._most_ahead = MEDIA_AHEAD if inputs.config.sees else 1
        self._ahead: deque[ComingRequest] = deque()

    def next_text(self) -> Prepared | None:
        """Return the next text, ready to run; None: there is none left. Raises ValueError for one that cannot work."""
        while len(self._ahead) < self._most_ahead and (coming := next(self._coming, None)) is not None:
            self._ahead.append(coming)
        return self._trim(self._finish(self._ahead.popleft())) if self._ahead else None

    def close(self) -> None:
        """Let no thread begin to prepare images of texts that have not been taken."""
        for coming in self._ahead:
            coming.cancel()


def texts_of(
    prompts: SomePrompts | Iterator[Prompt],
    reading: Reading[SomeOutput],
    inputs: Inputs,
    adapters: CallAdapters,
) -> SomeTexts:
    """Return the texts of a call.

    Raises ValueError for what is no list of prompts. What a list's prompts hold is checked as they are taken.
    """
    if isinstance(prompts, Iterator):
        if isinstance(names := adapters.names, list):
            many = f"{adapters.argument} has {len(names)} entries"
            raise ValueError(f"{many}: must be one, if prompts come from an iterator")
        return ComingTexts(prompts, reading, inputs, names)

    def settings_of(count: int) -> list[Settings]:
        names = one_each(adapters, count)
        made = {name: settings_for(reading.read, name, reading.hidden_states) for name in set(names)}
        return [made[name] for name in names]

    coming = inputs.begin_texts(reading.name, prompts, settings_of, reading.ask)
    return ListedTexts(coming, inputs.finish_all, reading.trim)
