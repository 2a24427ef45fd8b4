"""Runs texts that are read, some steps' worth at a time, so that a million of them need little memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing

from nanoinfer.config import Config
from nanoinfer.engine.results.stats import Rates
from nanoinfer.engine.results.step_result import StepResult
from nanoinfer.requests.progress import Shown, UseTqdm, make_bar
from nanoinfer.requests.prompts import Prepared
from nanoinfer.requests.reading.texts import SomeTexts
from nanoinfer.requests.request import Request
from nanoinfer.requests.requests import Requests

STEPS_AHEAD = 4  # so many steps' texts are on their way, that none waits for the caller or the tokenizer


class Room:
    """How many texts may be on their way: those that wait, that run, and whose turn to be returned has not come."""

    def __init__(self, config: Config) -> None:
        of_a_step = config.max_num_batched_tokens if config.description.is_encoder else config.max_num_seqs
        self._most_texts = STEPS_AHEAD * of_a_step * config.data_parallel_size
        self._most_tokens = STEPS_AHEAD * config.max_num_batched_tokens * config.data_parallel_size
        self._texts = self._tokens = 0

    @property
    def is_left(self) -> bool:
        """Whether another text may come."""
        return self._texts < self._most_texts and self._tokens < self._most_tokens

    def take(self, texts: SomeTexts) -> list[Prepared]:
        """Take the next texts while there is room, and count them; fewer come if none is left."""
        taken: list[Prepared] = []
        while self.is_left and (prompt := texts.next_text()) is not None:
            taken.append(prompt)
            self._count(prompt, 1)
        return taken

    def give_back(self, prompt: Prepared) -> None:
        """Count a text out that goes."""
        self._count(prompt, -1)

    def _count(self, prompt: Prepared, sign: int) -> None:
        self._texts += sign
        self._tokens += sign * len(prompt.token_ids)


class ShownTexts(Shown):
    """What a bar shows of texts: those that have been read, the tokens that have begun, and the rate."""

    def _count(self, result: StepResult) -> int:
        return result.num_prompt_tokens

    def _tell(self, rates: Rates) -> str:
        return f"{rates.prefill.tokens_per_second:,.0f} tok/s"


def read_all(
    requests: Requests,
    room: Room,
    take: Callable[[], list[Prepared]],
    count: int | None,
    use_tqdm: UseTqdm,
    check_open: Callable[[], None],
) -> Generator[list[Request], None, None]:
    """Queue texts while there is room, step, and yield the requests that have ended, in the order of the texts.

    take: returns the next texts for which there is room, fewer behind the last one; count: of the texts, if known
    check_open: raises an error if the engine can make no steps any more
    """
    added: deque[Request] = deque()
    has_more = True
    with closing(make_bar(count, use_tqdm, "Reading")) as bar:
        shown, num_ended, num_added = ShownTexts(bar), 0, 0
        while has_more or added:
            if has_more and room.is_left:
                prompts = take()
                has_more = not room.is_left
                added += requests.add_all(prompts, longest_first=False)
                num_added += len(prompts)
            results = requests.step() if requests.num_running else []
            if not requests.num_running and added and added[0].num_running:
                check_open()
                raise RuntimeError("these texts were dropped: an abort was interrupted")
            newly = len(requests.take_finished())
            num_ended += newly
            if use_tqdm:
                shown.update(newly, results, is_last=not has_more and num_ended == num_added)
            if ended := _take_ended(added, room):
                yield ended


def _take_ended(added: deque[Request], room: Room) -> list[Request]:
    """Take away the requests that have ended, up to the first that has not."""
    ended: list[Request] = []
    while added and not added[0].num_running:
        ended.append(added.popleft())
        room.give_back(ended[-1].prompt)
    return ended
