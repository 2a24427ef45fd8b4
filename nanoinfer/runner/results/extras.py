"""Extras: what a step gives beside its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from nanoinfer.runner.logits.line_values import LineValues
from nanoinfer.runner.logits.logprobs import LogProbs
from nanoinfer.runner.results.hidden_states import SentStates
from nanoinfer.runner.steps.pooling import Pooled
from nanoinfer.runner.transfer import to_host


@dataclass
class Extras:
    """What a step gives beside its tokens, because requests ask for it.

    logprobs: log-probabilities of the drawn tokens, by the token's place among them
    kept_tokens: how many tokens could have been drawn, by the drawn token's place: see count_kept
    entropies: those of the distributions that tokens were drawn from, by the drawn token's place
    prompt_logprobs: log-probabilities of prompts, by chunk
    pooled: what texts are read for, by chunk
    faults: what logits processors have done wrong, by the row whose sample that ends
    spoiled: [rows] bool, whose logits are not finite behind logits processors, but were before; None: there are none
    experts: [tokens, layers, used], the experts that all tokens of the step took; in a verifying step first those of
        the rows' last tokens, then those of all guesses; None: not asked for
    hidden: hidden states, of tokens in the same order, or of those of a prefill step that want some; None: none do
    """

    logprobs: list[LogProbs] = field(default_factory=list)
    kept_tokens: list[LineValues] = field(default_factory=list)
    entropies: list[LineValues] = field(default_factory=list)
    prompt_logprobs: list[LogProbs] = field(default_factory=list)
    pooled: list[Pooled] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    spoiled: Tensor | None = None
    experts: Tensor | None = None
    hidden: SentStates | None = None

    def to_host(self) -> Extras:
        """Copy to host memory; from a CUDA device the copy is complete with the stream's next event."""
        return Extras(
            [entry.to_host() for entry in self.logprobs],
            [entry.to_host() for entry in self.kept_tokens],
            [entry.to_host() for entry in self.entropies],
            [entry.to_host() for entry in self.prompt_logprobs],
            [entry.to_host() for entry in self.pooled],
            self.faults,
            None if self.spoiled is None else to_host(self.spoiled),
            None if self.experts is None else to_host(self.experts),
            None if self.hidden is None else self.hidden.to_host(),
        )
