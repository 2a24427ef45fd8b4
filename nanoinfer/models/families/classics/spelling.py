"""How the checkpoints of these families begin the names of tensors."""

from __future__ import annotations

from nanoinfer.models.description import EMBEDDING
from nanoinfer.weights.names import Spelling

MASKS = (  # older files have them
    ".attn.bias",
    ".attn.masked_bias",
    ".attn.causal_mask",
    ".attention.bias",
    ".attention.masked_bias",
)


def spelling(
    models: tuple[str, ...],
    embedding: str,
    layers: str,
    others: tuple[str, ...] = (),
    head: str | None = None,
    turned: tuple[str, ...] = (),
) -> Spelling:
    """Return the spelling of a family's names.

    models: what may begin the names
    embedding, layers: the modules behind that; others: the family's other modules, if files may have all of them bare
    head: the output projection; None: "lm_head"
    turned: as for Spelling
    """
    ours = [(f"{embedding}.", f"{EMBEDDING}."), (f"{layers}.", "model.layers.")]
    beginnings = [(f"{model}.{begin}", known) for model in models for begin, known in [*ours, ("", "model.")]]
    if others:
        beginnings += [*ours, *((f"{other}.", f"model.{other}.") for other in others)]
    if head is not None:
        beginnings.append((f"{head}.", "lm_head."))
    return Spelling(tuple(beginnings), turned, MASKS)
