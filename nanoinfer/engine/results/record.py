"""Gives sequences what a step has told about their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from nanoinfer.engine.results.routed_experts import RoutedExperts
from nanoinfer.engine.sequence import Sequence
from nanoinfer.engine.step import PrefillStep, Step
from nanoinfer.runner.logits.lines import number_lines
from nanoinfer.runner.results.extras import Extras

States = Mapping[int, npt.NDArray[Any]]  # of each layer, the bytes of tokens, [tokens, bytes]


def record_prompts(step: Step, extras: Extras) -> None:
    """Give the sequences of a step of prompts what they want beside these; of another step, nothing."""
    if not isinstance(step, PrefillStep):
        return
    for logprobs in extras.prompt_logprobs:
        for chunk, ids, values, rank in logprobs.entries():
            step.chunks[chunk].seq.prompt_logprobs.append(ids, values, rank)
    for pooled in extras.pooled:
        for chunk, numbers in pooled.entries():
            step.chunks[chunk].seq.add_pooled(numbers)
    if extras.experts is not None:
        begin, taken = 0, extras.experts.numpy()
        for part in step.chunks:
            end = begin + part.end - part.start
            _experts_of(part.seq).put(part.start, taken[begin:end])
            begin = end
        for fork in step.forks:
            _experts_of(fork.seq).take_over(_experts_of(fork.source))
    if extras.hidden is not None:
        _record_hidden_states(step, extras.hidden.wait())


def _record_hidden_states(step: PrefillStep, states: States) -> None:
    """Give the sequences of a step of prompts their hidden states. states: of those tokens that want some"""
    begin = 0
    for part in step.chunks:
        own, start = part.seq.hidden_states, part.hidden_from
        if own is None or start is None:
            continue
        end = begin + part.end - start
        if not part.seq.is_finished:
            own.put(start, {layer: of_layer[begin:end] for layer, of_layer in states.items()})
        begin = end
    for fork in step.forks:
        if fork.seq.hidden_states is not None and not fork.seq.is_finished:
            assert fork.source.hidden_states is not None
            fork.seq.hidden_states.take_over(fork.source.hidden_states)


def record_tokens(step: Step, seqs: list[Sequence], extras: Extras, proposed: list[int] | None) -> None:
    """Give the sequences what they want beside the tokens that a step has just given them.

    seqs: those of its rows; proposed: how many guesses each had; None: the step verified none
    """
    for logprobs in extras.logprobs:
        for row, ids, values, rank in logprobs.entries(proposed):
            seq = seqs[row]
            if seq.params.logprobs is not None and len(seq.logprobs) < seq.num_output_tokens:
                seq.logprobs.append(ids, values, rank)
    for kept_tokens in extras.kept_tokens:
        for row, kept in kept_tokens.entries(proposed):
            seq = seqs[row]
            if seq.params.kept_tokens and len(seq.kept_tokens) < seq.num_output_tokens:
                seq.kept_tokens.append((int(kept[0]), kept[1]))
    for entropies in extras.entropies:
        for row, (entropy,) in entropies.entries(proposed):
            seq = seqs[row]
            if seq.params.entropy and len(seq.entropies) < seq.num_output_tokens:
                seq.entropies.append(entropy)
    if extras.experts is not None and not isinstance(step, PrefillStep):
        taken = extras.experts.numpy()
        for row, line in number_lines(list(range(len(seqs))), proposed):
            own = _experts_of(seqs[row])
            if len(own) < len(seqs[row]) - 1:  # the last token has taken none yet
                own.put(len(own), taken[line])
    if extras.hidden is not None and not isinstance(step, PrefillStep):
        states = extras.hidden.wait()
        for row, line in number_lines(list(range(len(seqs))), proposed):
            hidden = seqs[row].hidden_states
            if hidden is not None and hidden.num_known < len(seqs[row]) - 1:
                hidden.put(hidden.num_known, {layer: of_layer[line] for layer, of_layer in states.items()})


def _experts_of(seq: Sequence) -> RoutedExperts:
    assert seq.routed_experts is not None
    return seq.routed_experts
