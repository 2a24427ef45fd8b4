"""SuffixDrafter: guesses that texts will go on as they, or their siblings, have gone on before."""

from __future__ import annotations

from torch import Tensor

from nanoinfer.drafting.drafter import RowTexts
from nanoinfer.kernels.drafting.suffix import propose_suffixes


class SuffixDrafter:
    """The Drafter that needs no model: see propose_suffixes."""

    def propose(self, rows: RowTexts, most: int) -> tuple[Tensor, Tensor]:
        """Propose what followed where a text was last like the end of a row's own."""
        return propose_suffixes(rows.tokens, rows.lengths, rows.members, rows.slots, rows.groups, most)
