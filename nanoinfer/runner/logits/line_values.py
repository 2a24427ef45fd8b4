"""LineValues: numbers that a step tells of the tokens that it has drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.runner.logits.lines import number_lines
from nanoinfer.runner.transfer import to_host


@dataclass
class LineValues:
    """Some numbers for each of some drawn tokens.

    columns: each [tokens]; keys: the numbers of rows in the step, in the order of their lines
    """

    columns: list[Tensor]
    keys: list[int]

    @staticmethod
    def joined(parts: list[LineValues]) -> LineValues:
        """Put parts of the lines of some rows together; all have the rows' keys."""
        if len(parts) == 1:
            return parts[0]
        columns = [torch.cat(column) for column in zip(*(part.columns for part in parts), strict=True)]
        return LineValues(columns, parts[0].keys)

    def to_host(self) -> LineValues:
        """Copy to host memory; from a CUDA device the copy is complete with the stream's next event."""
        return LineValues(list(map(to_host, self.columns)), self.keys)

    def entries(self, proposed: list[int] | None = None) -> Iterator[tuple[int, tuple[float, ...]]]:
        """Yield the key and the numbers of each line; proposed: as for number_lines."""
        numbers = list(zip(*(column.tolist() for column in self.columns), strict=True))
        for place, line in number_lines(self.keys, proposed):
            yield self.keys[place], numbers[line]
