"""Gives sequences what a step has told about their tokens."""

from __future__ import annotations

from nanoinfer.engine.results.routed_experts import ExpertIds, RoutedExperts
from nanoinfer.engine.sequence import Sequence
from nanoinfer.engine.step import PrefillStep, Step
from nanoinfer.runner.extras import Extras
from nanoinfer.runner.logits.lines import number_lines


def record_extras(step: Step, seqs: list[Sequence], extras: Extras) -> None:
    """Give the sequences what they want beside the tokens that they are about to get, and beside their prompts.

    seqs: those that get a token from the step, in the order of the tokens
    """
    for logprobs in extras.logprobs:
        for place, ids, values, rank in logprobs.entries():
            if not seqs[place].is_finished:
                seqs[place].logprobs.append(ids, values, rank)
    for kept_tokens in extras.kept_tokens:
        for place, kept in kept_tokens.entries():
            if not seqs[place].is_finished:
                seqs[place].kept_tokens.append(kept)
    if isinstance(step, PrefillStep):
        for logprobs in extras.prompt_logprobs:
            for chunk, ids, values, rank in logprobs.entries():
                step.chunks[chunk].seq.prompt_logprobs.append(ids, values, rank)
        for pooled in extras.pooled:
            for chunk, numbers in pooled.entries():
                step.chunks[chunk].seq.add_pooled(numbers)
    if extras.experts is not None:
        _record_experts(step, seqs, extras.experts.numpy())


def record_verified(seqs: list[Sequence], extras: Extras, proposed: list[int]) -> None:
    """Give the sequences what they want beside the tokens that a step has given them which verified guesses.

    seqs: those of its rows; proposed: how many guesses each had
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
                seq.kept_tokens.append(kept)
    if extras.experts is not None:
        taken = extras.experts.numpy()
        for row, line in number_lines(list(range(len(seqs))), proposed):
            own = _experts_of(seqs[row])
            if len(own) < len(seqs[row]) - 1:  # the last token has taken none yet
                own.put(len(own), taken[line])


def _record_experts(step: Step, seqs: list[Sequence], taken: ExpertIds) -> None:
    """Give the sequences the experts of their tokens. taken: [tokens, layers, used], of all tokens of the step"""
    if isinstance(step, PrefillStep):
        begin = 0
        for chunk in step.chunks:
            end = begin + chunk.end - chunk.start
            _experts_of(chunk.seq).put(chunk.start, taken[begin:end])
            begin = end
        for fork in step.forks:
            _experts_of(fork.seq).take_over(_experts_of(fork.source))
    else:
        for seq, own in zip(seqs, taken, strict=True):
            if not seq.is_finished:  # the step computed the last token that is known
                _experts_of(seq).put(len(seq) - 1, own)


def _experts_of(seq: Sequence) -> RoutedExperts:
    assert seq.routed_experts is not None
    return seq.routed_experts
