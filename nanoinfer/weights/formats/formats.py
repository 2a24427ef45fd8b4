"""Formats: which format each of a model's matrices has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from nanoinfer.weights.formats.configs.settings import EXPRESSION, check_patterns
from nanoinfer.weights.formats.experts import Experts, ExpertSizes, ExpertTensors, OutputShare
from nanoinfer.weights.formats.format import Format
from nanoinfer.weights.formats.joined import JoinedMatrix
from nanoinfer.weights.formats.matrix import Matrix
from nanoinfer.weights.formats.plain.format import PLAIN
from nanoinfer.weights.formats.rotated.format import Rotation, rotated
from nanoinfer.weights.names import AS_STORED, LANGUAGE_MODEL, Spelling
from nanoinfer.weights.shards import Section

ALL = EXPRESSION  # the pattern of all names
# The output projection, and what decides a delta rule's strengths and decays.
KEPT = "lm_head", r"re:.*\b(in_proj_(a|b|ba)|linear_attn\.[ab]_proj)$"


@dataclass(frozen=True)
class Formats:
    """The formats of the matrices, but for routers, which have the model's dtype, as have most embeddings.

    rules: patterns of modules' names, and the format of those. The first rule that holds decides; without one, a matrix
        is PLAIN. A pattern is a name, the beginning or the end of one, or with "re:" a regular expression
    rotations: of the inputs and outputs of matrices, whatever their format
    spelling: patterns hold for names in the table, and for those that checkpoints of this spelling have instead
    mixes: matrices that are multiplied as one may have several formats, and embeddings have theirs
    """

    rules: tuple[tuple[tuple[str, ...], Format], ...] = ()
    rotations: tuple[Rotation, ...] = ()
    spelling: Spelling = AS_STORED
    mixes: bool = False

    def of(self, module: str) -> Format:
        """Return the format of a module's matrix; module: the name in the table, without ".weight\""""
        numbers = [number for name in {module, self.spelling.stored_name(module)} for number in self._numbers(name)]
        format = self.rules[min(numbers)][1] if numbers else PLAIN
        return rotated(format, self.rotations, module) if self.rotations else format

    def of_embedding(self, module: str) -> Format:
        """Return the format of an embedding."""
        return self.of(module) if self.mixes else PLAIN

    def _numbers(self, name: str) -> Iterator[int]:
        """Yield the numbers of the rules that hold for a module of this name."""
        parts = name.split(".")
        begins_and_ends = (".".join(some) for cut in range(len(parts)) for some in (parts[: cut + 1], parts[cut:]))
        yield from (self._by_name[part] for part in begins_and_ends if part in self._by_name)
        yield from (number for number, expression in self._expressions if expression.match(name))

    def rotates(self, module: str) -> bool:
        """Return whether the inputs or outputs of a module's matrix are rotated."""
        return any(rotation.holds(module) for rotation in self.rotations)

    @cached_property
    def _by_name(self) -> dict[str, int]:
        """The first rule for each pattern that is a name: a checkpoint may name each matrix of each expert."""
        patterns = [(number, pattern) for number, (some, _) in enumerate(self.rules) for pattern in some]
        return {pattern: number for number, pattern in reversed(patterns)}

    @cached_property
    def _expressions(self) -> list[tuple[int, re.Pattern[str]]]:
        """The other patterns, and the numbers of their rules."""
        return [
            (number, re.compile(pattern.removeprefix(EXPRESSION)))
            for number, (some, _) in enumerate(self.rules)
            for pattern in some
            if pattern.startswith(EXPRESSION)
        ]

    def check_patterns(self) -> None:
        """Raise ValueError, naming it, for a regular expression that is none."""
        check_patterns(pattern for patterns, _ in self.rules for pattern in patterns)

    def of_language_model(self) -> Formats:
        """Return those of a multimodal checkpoint's language model, whose names lose a part: see names.Beside."""
        part = re.escape(LANGUAGE_MODEL.removesuffix("."))

        def known(pattern: str) -> str:
            return re.sub(rf"{part}\\?\.", "", pattern, count=1)  # an expression has a backslash before the dot

        rules = tuple((tuple(map(known, patterns)), format) for patterns, format in self.rules)
        return replace(self, rules=rules, rotations=tuple(rotation.renamed(known) for rotation in self.rotations))

    @cached_property
    def quantized(self) -> tuple[Format, ...]:
        """The formats other than PLAIN, each once."""
        return tuple(dict.fromkeys(format for _, format in self.rules if format != PLAIN))

    def make_matrix(self, sections: list[Section], in_features: int, bias: bool) -> Matrix:
        """Make the matrix of these sections; raises ValueError, naming two of them, if formats differ that may not."""
        runs = [(format, list(run)) for format, run in groupby(sections, key=lambda section: self.of(section.name))]
        if self.mixes and len(runs) > 1:
            return JoinedMatrix([format.make_matrix(run, in_features, False) for format, run in runs], bias)
        format = self._of_all([section.name for section in sections])
        return format.make_matrix(sections, in_features, bias)

    def make_experts(
        self, tensors: ExpertTensors, sizes: ExpertSizes, output_share: OutputShare | None, biases: bool
    ) -> Experts:
        """Make a layer's experts; arguments: as for Format.make_experts.

        All their matrices have one format. Where formats mix, downs may have another; if gates and ups do not have the
        same one, or no kernels multiply both, all are PLAIN.
        """
        *above, down = [tensors.module(projection, 0) for projection in (*tensors.above, tensors.down)]
        if self.mixes:
            formats = {self.of(module) for module in above}
            format = formats.pop().with_downs(self.of(down)) if len(formats) == 1 else None
        else:
            format = self._of_all([*above, down])
        return (format or PLAIN).make_experts(tensors, sizes, output_share, biases)

    def _of_all(self, modules: list[str]) -> Format:
        """Return the format of modules that are multiplied as one; raises ValueError as make_matrix does."""
        first, *others = modules
        for other in others:
            self._check_alike(first, other)
        return self.of(first)

    def _check_alike(self, module: str, other: str) -> None:
        """Raise ValueError if two modules that are multiplied as one have different formats."""
        one, two = sorted((module, other), key=lambda name: self.of(name) == PLAIN)
        first, second = self.of(one), self.of(two)
        if first != second:
            what = "not" if second == PLAIN else f"in {second.name}"
            same = f"of the same bits and groups, not {first.details} and {second.details}"
            needed = "both or none" if first.name != second.name else same
            raise ValueError(f"model: its config says that {one} is in {first.name} and {two} {what}: must be {needed}")


PLAIN_FORMATS = Formats()


def all_in(format: Format, ignored: tuple[str, ...] = ()) -> Formats:
    """Return the formats of a model whose matrices have one, but for KEPT and those that are ignored, by patterns."""
    return Formats((((*KEPT, *ignored), PLAIN), ((ALL,), format)))
