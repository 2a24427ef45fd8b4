"""GgufNames: which tensors of a file a checkpoint's are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from nanoinfer.gguf.architectures.families import family_of
from nanoinfer.gguf.header import Entry, Header, import_gguf
from nanoinfer.gguf.tensors.composed import WholeTensor
from nanoinfer.gguf.tensors.tensor import GgufTensor

ENDS = "", ".weight", ".bias"  # of names in the file, behind those that gguf's tables have
EXPERT = re.compile(r"\.experts\.(\d+)\.")
IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)$")
OUTSIDE = "model.embed_tokens", "backbone.embeddings", "lm_head"  # of layers
CORRECTION = "e_score_correction"
SPELLED = (
    (EXPERT, ".experts."),
    (re.compile(r"\.dt_bias$"), ".dt_proj.bias"),
    (re.compile(rf"{CORRECTION}_bias$"), f"{CORRECTION}.bias"),
    (re.compile(r"\.expert_bias$"), ".expert_bias.bias"),
)  # of names, what the converter has changed before it looks them up
FUSED = "ffn_gate_up_exps.weight"  # gates above ups, which some files have as one stack
HALVES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}
PROJECTION = re.compile(rf"\.({'|'.join(HALVES)})\.weight$")


class GgufNames:
    """Finds tensors by gguf's tables, and by what sets the family apart."""

    def __init__(self, header: Header) -> None:
        gguf = import_gguf()
        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        self._header, self._family = header, family_of(header)
        if header.architecture not in numbers:
            raise ValueError(
                f"{header.path}: general.architecture={header.architecture!r}: must be in the tables of the package"
                " gguf: pip install -U gguf"
            )
        self._table = gguf.get_tensor_name_map(numbers[header.architecture], header.needed("block_count"))

    def readers(self, names: Iterable[str]) -> dict[str, WholeTensor]:
        """Return what reads each tensor that is there, by its name in a checkpoint.

        Where experts are there one by one, nothing reads their stacks, which a table may have as well.
        """
        found = {name: reader for name in names if (reader := self._reader(name)) is not None}
        of_experts = {entry.name for name, reader in found.items() if EXPERT.search(name) for entry in reader.entries}
        return {
            name: reader
            for name, reader in found.items()
            if EXPERT.search(name) or of_experts.isdisjoint(entry.name for entry in reader.entries)
        }

    def _reader(self, name: str) -> WholeTensor | None:
        composed = self._composed(name)
        if composed is not None:
            return composed
        expert, entry = EXPERT.search(name), self._entry(name)
        if entry is None:
            return None if expert is None else self._half(name, int(expert[1]))
        tensor = self._tensor(entry)
        return tensor.of_expert(int(expert[1])) if expert is not None and len(entry.shape) == 3 else tensor

    def _tensor(self, entry: Entry) -> GgufTensor:
        return GgufTensor(entry, entry.shape, self._family.change_of(self._header, entry.name))

    def _entry(self, name: str) -> Entry | None:
        """Return the one that gguf's tables name so."""
        for spelled in self._spellings(name):
            found = self._table.get_name(spelled, try_suffixes=(".weight", ".bias"))
            for end in ENDS:
                if (entry := self._header.entries.get(f"{found}{end}")) is not None:
                    return entry
        return None

    def _spellings(self, name: str) -> Iterator[str]:
        """Yield names under which gguf's tables may have it."""
        for pattern, spelled in SPELLED:
            name = pattern.sub(spelled, name)
        yield name
        yield name.removeprefix("model.")
        prefix, experts, projection = name.partition(f".{self._family.experts}.")
        if experts:
            yield f"{prefix.replace('backbone.', 'model.')}.mlp.experts.{projection}"

    def _half(self, name: str, number: int) -> GgufTensor | None:
        """Return what reads an expert's gates or ups where a stack has both."""
        layer, projection = IN_LAYER.search(name), PROJECTION.search(name)
        if layer is None or projection is None:
            return None
        entry = self._header.entries.get(f"blk.{layer[1]}.{FUSED}")
        return None if entry is None else self._tensor(entry).of_expert(number, HALVES[projection[1]])

    def _composed(self, name: str) -> WholeTensor | None:
        layer = IN_LAYER.search(name)
        return None if layer is None else self._of_layer(layer[2], layer[1])

    def _of_layer(self, part: str, layer: str) -> WholeTensor | None:
        """part: a tensor's name in a layer of the checkpoint"""
        for composition in self._family.composed.get(part, ()):
            entries = [self._header.entries.get(f"blk.{layer}.{name}") for name in composition.parts]
            there = [self._tensor(entry) for entry in entries if entry is not None]
            if len(there) == len(entries):
                return composition.read(self._header, there)
        return None

    def matrices(self) -> Iterator[tuple[str, WholeTensor]]:
        """Yield all modules that a checkpoint may have a matrix of the file for, and what reads that.

        A tensor has the names of all classes whose files name it so; a model has but one of them. Of experts, the first
        stands for all.
        """
        for module, (_, name) in self._table.mapping.items():
            entry = self._header.entries.get(f"{name}.weight")
            if entry is not None and len(entry.shape) > 1 and (module in OUTSIDE or IN_LAYER.search(module)):
                is_stack = ".experts." in module and len(entry.shape) == 3
                reader = self._tensor(entry).of_expert(0) if is_stack else self._tensor(entry)
                for spelled in {module, module.replace(".mlp.experts.", f".{self._family.experts}.")}:
                    yield spelled.replace(".experts.", ".experts.0."), reader
        for layer in range(self._header.needed("block_count")):
            yield from self._of_family(layer)

    def _of_family(self, layer: int) -> Iterator[tuple[str, WholeTensor]]:
        """Yield a layer's matrices that gguf's tables do not have so."""
        prefix, family = f"model.layers.{layer}.", self._family
        for part in family.composed:
            reader = self._of_layer(part, str(layer)) if part.endswith(".weight") else None
            if reader is not None:
                yield f"{prefix}{part.removesuffix('.weight')}", reader
        if (fused := self._header.entries.get(f"blk.{layer}.{FUSED}")) is not None:
            for projection, half in HALVES.items():
                yield f"{prefix}{family.experts}.0.{projection}", self._tensor(fused).of_expert(0, half)
