"""Runs texts that are read, some steps' worth at a time, so that a million of them need little memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing

from nanoinfer.config import Config
from nanoinfer.engine.results.stats import Rates
from nanoinfer.engine.results.step_result import StepResult
from nanoinfer.requests.progress import Shown, UseTqdm, make_bar
from nanoinfer.requests.prompts.stages import Prepared, pack
from nanoinfer.requests.reading.outputs import ReadText, texts_read
from nanoinfer.requests.reading.texts import SomeTexts
from nanoinfer.requests.request import Request
from nanoinfer.requests.requests import Requests

PARTS = 4  # of a step come for themselves, if there are replicas, so that each gets some of few texts
STEPS_AHEAD = 4  # so many steps' texts are on their way, that none waits for the caller or the tokenizer


class Packs:
    """Takes texts as they may be on their way: those that wait, that run, and whose turn to be returned has not come.

    An encoder's texts come packed, a step's worth at once, so that an engine has few sequences to look after.
    """

    def __init__(self, texts: SomeTexts, config: Config) -> None:
        self._texts = texts
        self._ahead: Prepared | None = None  # a text that had no room in the last pack
        self._are_left = True  # texts, as far as is known
        self._pack_tokens = 1
        if config.description.is_encoder:
            self._pack_tokens = config.max_num_batched_tokens // (PARTS if config.data_parallel_size > 1 else 1)
        self._most = STEPS_AHEAD * config.max_num_seqs * config.data_parallel_size
        self._tokens_at_once = config.max_num_batched_tokens * config.data_parallel_size
        self._num = self._num_tokens = 0

    @property
    def has_more(self) -> bool:
        """Whether there may be a text that has not been taken."""
        return self._are_left or self._ahead is not None

    def take(self) -> list[Prepared]:
        """Take the next texts while there is room, a step's worth for each replica: the first step need not wait."""
        taken: list[Prepared] = []
        left = min(self._tokens_at_once, STEPS_AHEAD * self._tokens_at_once - self._num_tokens)
        while left > 0 and self._num < self._most:
            if self._ahead is not None and len(self._ahead.prompt) > left:
                break  # a step is full, but for a rest
            if not (texts := self._take_pack()):
                break
            taken.append(pack(texts) if len(texts) > 1 else texts[0])
            left -= len(taken[-1].prompt)
            self._num += 1
            self._num_tokens += len(taken[-1].prompt)
        return taken

    def _take_pack(self) -> list[Prepared]:
        """Take the next texts that have the same settings, as many as a step of an encoder computes."""
        texts, room = list[Prepared](), self._pack_tokens
        while room > 0 and (text := self._take_text()) is not None:
            room -= len(text.prompt)
            if texts and (room < 0 or text.params is not texts[0].params):
                self._ahead = text
                break
            texts.append(text)
        return texts

    def _take_text(self) -> Prepared | None:
        text, self._ahead = self._ahead, None
        if text is None and self._are_left:
            text = self._texts.next_text()
            self._are_left = text is not None
        return text

    def give_back(self, prompt: Prepared) -> None:
        """Count texts out that go."""
        self._num -= 1
        self._num_tokens -= len(prompt.prompt)


class ShownTexts(Shown):
    """What a bar shows of texts: those that have been read, the tokens that have begun, and the rate."""

    def _count(self, result: StepResult) -> int:
        return result.num_prompt_tokens

    def _tell(self, rates: Rates) -> str:
        return f"{rates.prefill.tokens_per_second:,.0f} tok/s"


def read_all(
    requests: Requests,
    packs: Packs,
    take: Callable[[], list[Prepared]],
    count: int | None,
    use_tqdm: UseTqdm,
    check_open: Callable[[], None],
) -> Generator[list[ReadText], None, None]:
    """Queue texts while there is room, step, and yield those that have been read, in their order.

    take: calls that of the packs; count: of the texts, if known
    check_open: raises an error if the engine can make no steps any more
    """
    added: deque[Request] = deque()
    with closing(make_bar(count, use_tqdm, "Reading")) as bar:
        shown, num_left = ShownTexts(bar), 0
        while packs.has_more or added:
            new = requests.add_all(take(), longest_first=False)
            num_left += sum(request.num_texts for request in new)
            added += new
            results = requests.step() if requests.num_running else []
            if not requests.num_running and added and added[0].num_running:
                check_open()
                raise RuntimeError("these texts were dropped: an abort was interrupted")
            newly = sum(request.num_texts for request in requests.take_finished())
            num_left -= newly
            if use_tqdm:
                shown.update(newly, results, is_last=not packs.has_more and num_left == 0)
            if read := _take_read(added, packs):
                yield read


def _take_read(added: deque[Request], packs: Packs) -> list[ReadText]:
    """Take away the requests that have ended, up to the first that has not."""
    read: list[ReadText] = []
    while added and not added[0].num_running:
        request = added.popleft()
        packs.give_back(request.prompt)
        read += texts_read(request)
    return read
