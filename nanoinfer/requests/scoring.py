"""ScoresTexts: how likely an LLM finds texts behind prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from itertools import islice
from typing import overload

from nanoinfer.hints import hints_for
from nanoinfer.requests.door import Door
from nanoinfer.requests.inputs import Inputs, ManyPrompts, Prompt, SomePrompts
from nanoinfer.requests.outputs import RequestOutput, Score, score_of
from nanoinfer.requests.progress import UseTqdm, check_use_tqdm
from nanoinfer.requests.prompts.continuations import Continuations
from nanoinfer.requests.prompts.stages import CallPrompts, Tokens


class ScoresTexts(Door, ABC):
    """The method of LLM that scores continuations."""

    _inputs: Inputs

    @abstractmethod
    def _generate(self, prompts: CallPrompts, use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Run the prompts of a call; returns their outputs."""

    @overload
    def score(
        self,
        prompt: Prompt,
        continuations: Tokens | ListLike[Tokens],
        adapter: str | None = None,
        use_tqdm: UseTqdm = True,
        hidden_states: Iterable[int] | None = None,
    ) -> list[Score]: ...

    @overload
    def score(
        self,
        prompt: ManyPrompts,
        continuations: ListLike[Tokens | ListLike[Tokens]],
        adapter: str | None = None,
        use_tqdm: UseTqdm = True,
        hidden_states: Iterable[int] | None = None,
    ) -> list[list[Score]]: ...

    @hints_for("score")
    def score(
        self,
        prompt: SomePrompts,
        continuations: Tokens | ListLike[Tokens | ListLike[Tokens]],
        adapter: str | None = None,
        use_tqdm: UseTqdm = True,
        hidden_states: Iterable[int] | None = None,
    ) -> list[Score] | list[list[Score]]:
        """Compute how likely the model finds each continuation of a prompt; returns a Score for each.

        Of a list of prompts, it returns a list of scores for each.

        prompt: a string, a list of token ids, or a mapping with one of these, also with images, as for generate; or a
            list of such prompts
        continuations: strings or lists of token ids; a lone one counts as a list of one. For a list of prompts, a list
            that has these for each
        adapter: as in SamplingParams
        use_tqdm: as for generate; a lone prompt has no bar
        hidden_states: as in SamplingParams: each Score has those of all tokens of prompt and continuation

        The LLM tokenizes prompt and continuation together, if both are text. The first part, as long as the prompt's
        own tokens, is the prompt, and the rest is the continuation. Spaces at the prompt's end count as the
        continuation's. A text beside token ids is tokenized by itself, a continuation without special tokens.

        Raises ValueError as generate does, and for a continuation that adds no token to the prompt's.
        """
        with self._door("ready"):
            use_tqdm = check_use_tqdm(use_tqdm)
            prepared, counts = Continuations(self._inputs).check(prompt, continuations, adapter, hidden_states)
        scores = map(score_of, self._generate(prepared, use_tqdm if counts is not None else False))
        return [*scores] if counts is None else [[*islice(scores, count)] for count in counts]
