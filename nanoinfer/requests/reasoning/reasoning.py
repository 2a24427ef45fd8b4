"""Reasoning: finds the markers of an LLM's thoughts, and divides outputs by them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from nanoinfer.checks import short
from nanoinfer.config import Config
from nanoinfer.requests.reasoning.parts import Parts
from nanoinfer.requests.reasoning.stages import HARMONY, Markers, pair
from nanoinfer.requests.text.spelling import TokenDecoder
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.thought import Thought

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FAMILIES: dict[tuple[str, str], Markers] = {
    ("<|channel|>", "<|message|>"): HARMONY,  # gpt-oss
    ("<|channel>", "<channel|>"): pair("<|channel>thought\n", "<channel|>"),  # Gemma 4
    ("<mm:think>", "</mm:think>"): pair("<mm:think>", "</mm:think>"),  # MiniMax M3
    ("<seed:think>", "</seed:think>"): pair("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("[THINK]", "[/THINK]"): pair("[THINK]", "[/THINK]"),  # Mistral
    ("<think>", "</think>"): pair("<think>", "</think>"),  # Qwen, DeepSeek, GLM, MiniMax M2, Nemotron and others
}
"""What a tokenizer knows as tokens, or its chat template writes -> the markers of the family."""

LAST = 64  # tokens of a prompt, among which the marker at its end stands


class Reasoning:
    """The thoughts of an LLM, in the tokens of its tokenizer. markers: those that stand around them"""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, markers: Markers, vocab_size: int) -> None:
        """vocab_size: the model's"""
        self._tokenizer, self.markers, self._vocab_size = tokenizer, markers, vocab_size
        self._spell = cache(TokenDecoder(tokenizer, skip_special_tokens=False).bytes_of)
        self._decoders = {skip: TokenDecoder(tokenizer, skip_special_tokens=skip) for skip in (True, False)}

    @staticmethod
    def find(config: Config, tokenizer: PreTrainedTokenizerBase | None) -> Reasoning | None:
        """Return the reasoning of an LLM; None: it has no markers. Raises ValueError for an option that cannot work."""
        given, size = config.reasoning_markers, config.description.vocab_size
        if tokenizer is None:
            if given:
                raise ValueError(f"reasoning_markers={short(given)}: needs a tokenizer, which {config.model!r} lacks")
            return None
        markers = _known(tokenizer) if given is None else pair(*given) if given else None
        return None if markers is None else Reasoning(tokenizer, markers, size)

    def is_open(self, prompt: list[int]) -> bool:
        """Whether a prompt ends in an open thought."""
        return self.markers.stages[self._first(prompt)].part == "reasoning"

    def _first(self, prompt: list[int]) -> int:
        """Return the stage in which the output of a prompt begins. White space behind a marker does not count."""
        end = b"".join(map(self._spell, prompt[-LAST:])).rstrip()
        return next((stage for mark, stage in self.markers.ends if end.endswith(mark.rstrip())), 0)

    def parts(self, prompt: list[int], params: SamplingParams) -> Parts:
        """Return what divides the output of a prompt while it grows."""
        decode = self._decoders[params.skip_special_tokens]
        return Parts(self.markers.stages, self._first(prompt), self._spell, lambda tokens: len(decode(tokens)))

    def split(self, prompt: list[int], params: SamplingParams, token_ids: list[int], text: str) -> tuple[str, str]:
        """Return the reasoning and the answer of a whole output."""
        parts = self.parts(prompt, params).read(token_ids, text, is_finished=True)
        return parts["reasoning"], parts["answer"]

    def thought(self, budget: int | None, has_form: bool | None) -> Thought | None:
        """Return a request's Thought, of which its prompt is not known; the arguments are as Thought has them.

        Returns None if a marker cannot be written in the model's tokens.
        """
        markers = self.markers
        opening, closing, leaving = map(self._write, (markers.opening, markers.closing, markers.leaving))
        return (
            Thought(opening, closing, leaving, budget, has_form=has_form) if opening and closing and leaving else None
        )

    def _write(self, marker: str) -> tuple[int, ...]:
        """Return the tokens of a marker; none, if the model lacks one."""
        token_ids = self._tokenizer.encode(marker, add_special_tokens=False)
        while token_ids and b"".join(map(self._spell, token_ids)) != marker.encode():
            token_ids = token_ids[1:]  # a space, which some tokenizers put before a text
        return tuple(token_ids) if max(token_ids, default=0) < self._vocab_size else ()


def _known(tokenizer: PreTrainedTokenizerBase) -> Markers | None:
    """Return the markers that a tokenizer knows as tokens, or that its chat template writes; None: there are none."""
    tokens, template = tokenizer.get_added_vocab(), tokenizer.chat_template or ""
    if isinstance(template, dict):
        template = "".join(template.values())
    for names, markers in FAMILIES.items():
        if all(name in tokens for name in names) or all(name in template for name in names):
            return markers
    return None
