"""Faults: where logits are not finite, or there is no token or no image, the sequence ends."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nanoinfer.engine.sequence import Sequence
from nanoinfer.engine.step import PrefillStep, Step
from nanoinfer.kernels.sampling.draw import NO_TOKEN, NONE_LEFT
from nanoinfer.logits_processors import name_of
from nanoinfer.runner.logits.functions import NOT_FINITE
from nanoinfer.runner.results.extras import Extras

BANNING = ("allowed_token_ids", "bad_words", "structured_outputs")  # settings that may leave no token


def without_token(seqs: list[Sequence], token_ids: list[int], dtype: str) -> dict[Sequence, str]:
    """Return the running sequences for which a step has found no token, each with what is wrong.

    token_ids: the step's, one for each of the sequences; dtype: the model's
    """
    if NO_TOKEN not in token_ids and NONE_LEFT not in token_ids:
        return {}
    tokens = zip(seqs, token_ids, strict=True)
    return {
        seq: not_finite(dtype) if token_id == NO_TOKEN else none_left(seq)
        for seq, token_id in tokens
        if token_id < 0 and not seq.is_finished
    }


def without_media(step: Step) -> dict[Sequence, str]:
    """Return the sequences of a step that have an image which could not be made again, each with what is wrong."""
    if not isinstance(step, PrefillStep):
        return {}
    seqs = [*(chunk.seq for chunk in step.chunks), *(fork.seq for fork in step.forks)]
    seen = {seq: seq.media.fault for seq in seqs if seq.media is not None and not seq.is_finished}
    return {seq: fault for seq, fault in seen.items() if fault is not None}


def without_numbers(step: Step, extras: Extras, dtype: str) -> dict[Sequence, str]:
    """Return the sequences of a step that are read, and whose numbers are not finite, each with what is wrong."""
    if not isinstance(step, PrefillStep) or not extras.pooled:
        return {}
    entries = [entry for pooled in extras.pooled for entry in pooled.entries()]
    failed = [step.chunks[chunk].seq for chunk, numbers in entries if not np.isfinite(numbers).all()]
    return {seq: not_finite(dtype) for seq in failed if not seq.is_finished}


def processed_wrongly(seqs: list[Sequence], extras: Extras, classes: Iterable[type]) -> dict[Sequence, str]:
    """Return the running sequences of a step whose logits processors have failed, each with what is wrong.

    classes: those that change the logits of all rows
    """
    failed = {seqs[row]: why for row, why in extras.faults.items()}
    if extras.spoiled is not None and extras.spoiled.any():
        names = ", ".join(map(name_of, classes))
        spoiled = [row for row in extras.spoiled.nonzero()[:, 0].tolist() if row not in extras.faults]
        failed |= {seqs[row]: f"logits_processors: {names}: {NOT_FINITE}" for row in spoiled}
    return {seq: why for seq, why in failed.items() if not seq.is_finished}


def none_left(seq: Sequence) -> str:
    """Say which settings have left a sequence no token, and what would work."""
    names = [name for name in BANNING if getattr(seq.params, name)]
    if seq.num_output_tokens < seq.params.min_tokens:
        names.append("min_tokens")
    return f"no token may be drawn: {' and '.join(names)} leave none: let them allow more"


def not_finite(dtype: str) -> str:
    """Say what is wrong with such a sequence, and what would work."""
    if dtype == "float16":
        cause = (
            "; dtype='float16' is the likely cause, because it has no numbers above 65504: dtype='bfloat16' or"
            " dtype='float32' would work"
        )
    else:
        cause = f"; its weights or the numbers between its layers are too large for dtype={dtype!r}"
    return f"the model's logits are not finite: some are NaN or infinite{cause}"
