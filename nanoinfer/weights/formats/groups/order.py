"""InputOrder: the groups of a checkpoint that are no neighbours, as GPTQ's act order leaves them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

UNKNOWN = -1  # a group that has not come yet


class InputOrder(nn.Module):
    """Which group each input has, for each section; and in which order the inputs lie in a store.

    If all sections have the same groups, of one size, the store has a group's inputs side by side, and a product
    gathers its input's features. Otherwise the inputs stay in the checkpoint's order, and no kernel reads the store.
    """

    def __init__(self, sections: int, inputs: int, groups: int | None) -> None:
        """inputs: this rank's; groups: of all inputs, if this rank has all; None: it has not"""
        super().__init__()
        self.inputs, self._groups = inputs, groups
        self.g_idx = torch.full((sections, inputs), UNKNOWN, device="cpu")  # stays through sleep
        self.order = torch.arange(inputs, device="cpu")  # of the store's columns, as numbers of inputs
        self.is_one: bool | None = None  # whether a group's inputs are side by side; None: nobody knows yet
        self.columns = nn.Parameter(torch.empty(inputs, dtype=torch.int32), requires_grad=False)  # `order`
        self.groups = nn.Parameter(torch.empty(sections, inputs, dtype=torch.int32), requires_grad=False)  # `g_idx`

    def places(self, inputs: range) -> Tensor:
        """Return where some inputs lie in the store."""
        return self.order.argsort()[inputs.start : inputs.stop]

    def settle(self, name: str) -> Tensor | None:
        """Decide on the order, once g_idx has come; returns where the store's columns come from; None: they stay.

        name: of a matrix, which begins the message of the RuntimeError if products have been decided on otherwise
        """
        if (self.g_idx == UNKNOWN).any():
            return None
        is_one = self._can_be_one()
        if self.is_one not in (None, is_one):
            raise RuntimeError(
                f"{name}: its groups (g_idx) are {'of one size' if is_one else 'not of one size'}, which they were"
                f" {'not ' if is_one else ''}at the start: they need other products; start a new LLM"
            )
        self.is_one = is_one
        order = self.g_idx[0].argsort(stable=True) if is_one else torch.arange(self.inputs, device="cpu")
        self.columns.copy_(order)
        self.groups.copy_(self.g_idx)
        if torch.equal(order, self.order):
            return None
        moved = self.order.argsort()[order]
        self.order = order
        return moved

    def _can_be_one(self) -> bool:
        if self._groups is None or not (self.g_idx == self.g_idx[0]).all():
            return False
        sizes = self.g_idx[0].bincount(minlength=self._groups)
        return len(sizes) == self._groups and bool((sizes == sizes[0]).all())
