"""Faults of a model: logits that are not finite give no token, and end their sequence."""

from __future__ import annotations

from nanoinfer.engine.sequence import Sequence
from nanoinfer.kernels.sampling.draw import NO_TOKEN


def without_token(seqs: list[Sequence], token_ids: list[int]) -> list[Sequence]:
    """Return the running sequences for which a step has found no token; token_ids: the step's, one for each."""
    if NO_TOKEN not in token_ids:
        return []
    tokens = zip(seqs, token_ids, strict=True)
    return [seq for seq, token_id in tokens if token_id == NO_TOKEN and not seq.is_finished]


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
