"""Texts: the texts of sequences, on the device, in which guesses are found."""

from __future__ import annotations

from array import array

import torch

from nanoinfer.runner.message import DraftingMessage
from nanoinfer.runner.steps.row_table import RowTable
from nanoinfer.runner.transfer import upload_all

MEMBERS = 16  # texts of a group that are searched, at most
MEMORY_SHARE = 1 / 16  # of the device's, for texts, at most, if each running sequence has one


def num_texts(max_num_seqs: int, max_model_len: int, memory: int) -> int:
    """Return for how many texts there is room: two for each row, as long as a share of the memory, in bytes, allows."""
    return max(max_num_seqs, min(2 * max_num_seqs, int(memory * MEMORY_SHARE) // (4 * max_model_len)))


class Texts:
    """The texts of running sequences, and of others of their groups that have ended. The host says which is where.

    A text may end with tokens that its sequence does not have: those that were drawn behind its end.

    tokens: [slots, max_model_len] int32; lengths: [slots] int32, of the texts
    members: [slots, MEMBERS] int32, the slots of the texts of each group, of which there are as many; -1: none
    """

    def __init__(self, num_slots: int, max_model_len: int, device: torch.device) -> None:
        self.tokens = torch.zeros((num_slots, max_model_len), dtype=torch.int32, device=device)
        self.lengths = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.members = torch.full((num_slots, MEMBERS), -1, dtype=torch.int32, device=device)

    def write(self, joining: list[DraftingMessage]) -> None:
        """Write the texts of sequences that join, in place of what was in their slots."""
        flat = array("i")
        for message in joining:
            flat += message.token_ids
        lens = array("i", [len(message.token_ids) for message in joining])
        slots = array("i", [message.text for message in joining])
        on_device = upload_all([flat, lens, slots], self.tokens.device)
        values, counts, own = on_device[0], on_device[1].long(), on_device[2].long()
        starts = own * self.tokens.shape[1] - (counts.cumsum(0) - counts)
        where = torch.repeat_interleave(starts, counts, output_size=len(flat))
        self.tokens.view(-1).index_copy_(0, where + torch.arange(len(flat), device=where.device), values)
        self.lengths.index_copy_(0, own, on_device[1])

    def regroup(self, members: dict[int, list[int]]) -> None:
        """Say which texts some groups have now; members: slots by group, at most MEMBERS, later ones come first."""
        flat = array("i")
        for slots in members.values():
            flat.extend(slots + [-1] * (MEMBERS - len(slots)))
        groups, rows = upload_all([array("i", members), flat], self.tokens.device)
        self.members.index_copy_(0, groups.long(), rows.view(-1, MEMBERS))


class DraftingRows:
    """What each row of the batch has beside the others' columns, if guesses are verified. All are [rows] int32.

    texts: the slot of its text; -1: an empty row
    groups: its group; -1: none
    ends: its sequence has at most so many tokens
    limits: how many guesses it may have in a step
    """

    def __init__(self, table: RowTable, max_guesses: int) -> None:
        self._first_limit = max(1, max_guesses // 2)
        self.texts, self.groups, self.ends, self.limits = (table.column(torch.int32, empty=-1) for _ in range(4))

    def join(self, start: int, joining: list[DraftingMessage]) -> None:
        """Fill the rows from start on."""
        columns = [
            array("i", [message.text for message in joining]),
            array("i", [message.group for message in joining]),
            array("i", [message.end for message in joining]),
        ]
        rows = slice(start, start + len(joining))
        self.texts[rows], self.groups[rows], self.ends[rows] = upload_all(columns, self.texts.device)
        self.limits[rows] = self._first_limit
