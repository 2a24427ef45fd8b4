"""How checkpoints name tensors, and what is in them beside a language model's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

LANGUAGE_MODEL = "language_model."  # stands in the tensor names of a multimodal checkpoint's language model
TOWER = (
    "vision_tower.",
    "multi_modal_projector.",
    "visual.",
    "embed_vision.",
    "vision_embedder.",
    "projector.",
    "mlp_AR.",
    "vision_model.",
    "connector.",
    "merger.",
    "image_newline",
)  # those of its tower
EARS = "audio_tower."
# These begin those of all its other tensors.
OTHER_MODELS = (
    *TOWER,
    EARS,
    "embed_audio.",
    "vision_tokenizer.",
    "audio_tokenizer.",
    "vision_adapter.",
    "vision_projection.",
    "mm_projector.",
    "density_router.",
)
SPELLINGS = (
    ("mlp_AR.", "projector."),
    (".vision_model.", "."),
    ("vision_embedder.", "embed_vision."),
    (".multimodal_embedder.", "."),
)


class Names(Protocol):
    """Tells which of a checkpoint's tensors a table may name, and how."""

    def known_name(self, name: str) -> str | None:
        """Return the name that the table has for a tensor of this name; None if the tensor belongs to another part."""
        ...

    def stored_name(self, name: str) -> str:
        """Return a name in the checkpoint for one in the table."""
        ...

    def is_turned(self, name: str) -> bool:
        """Return whether the matrix of this name in the table is stored as [in, out]."""
        ...


@dataclass(frozen=True)
class OfTower:
    """The names in the tower of a multimodal checkpoint, which older and newer checkpoints write differently.

    hears: the tower is the one for audio, which is not run beside one for images
    """

    hears: bool = False

    def known_name(self, name: str) -> str | None:
        """Return a tensor's name in the tower; None if the tensor belongs to another part."""
        known = name.removeprefix("model.")
        if not known.startswith((*TOWER, EARS) if self.hears else TOWER):
            return None
        for spelling, ours in SPELLINGS:
            known = known.replace(spelling, ours, 1)
        return known

    def stored_name(self, name: str) -> str:
        """Return the name that newer checkpoints have."""
        return f"model.{name}"

    def is_turned(self, name: str) -> bool:
        """Return that no matrix is."""
        return False


@dataclass(frozen=True)
class Spelling:
    """How checkpoints of a model write what others write as the table does.

    beginnings: of names in a checkpoint, and how they begin in the table; the first that fits counts
    turned: the ends of the names of matrices that are stored as [in, out]
    unread: the ends of the names of tensors that nobody reads
    unread_part: what further such names have somewhere
    parts: of names in some checkpoints, and how others and the table write them
    """

    beginnings: tuple[tuple[str, str], ...] = ()
    turned: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    unread_part: re.Pattern[str] | None = None
    parts: tuple[tuple[str, str], ...] = ()

    def known_name(self, name: str) -> str | None:
        """Return the name in the table; None if nobody reads the tensor."""
        for part, known in self.parts:
            name = name.replace(part, known)
        if name.endswith(self.unread) or (self.unread_part is not None and self.unread_part.search(name)):
            return None
        begin, ours = next((pair for pair in self.beginnings if name.startswith(pair[0])), ("", ""))
        return ours + name[len(begin) :]

    def stored_name(self, name: str) -> str:
        """Return a name in the checkpoint."""
        begin, ours = next((pair for pair in self.beginnings if name.startswith(pair[1])), ("", ""))
        return begin + name[len(ours) :]

    def is_turned(self, name: str) -> bool:
        """Return whether the matrix of this name in the table is stored as [in, out]."""
        return name.endswith(self.turned)


AS_STORED = Spelling()


@dataclass(frozen=True)
class Beside:
    """What a checkpoint holds beside the language model.

    is_multimodal: other models' tensors; the language model's have a prefix
    has_tower: of these, the tower's are read too; hears: as OfTower has it
    skipped: how the names of further tensors begin that nobody reads
    may_be_bare: names may lack the "model." with which those of a model with a head begin
    spelling: that of the language model's names
    """

    is_multimodal: bool = False
    has_tower: bool = False
    skipped: tuple[str, ...] = ()
    may_be_bare: bool = False
    spelling: Spelling = AS_STORED
    hears: bool = False

    def known_name(self, name: str) -> str | None:
        """Return a tensor's name in the language model or in the tower; None if nobody reads it."""
        if self.is_multimodal and name.removeprefix("model.").startswith(OTHER_MODELS):
            return OfTower(self.hears).known_name(name) if self.has_tower else None
        known = self.spelling.known_name(name.replace(LANGUAGE_MODEL, "", 1) if self.is_multimodal else name)
        if known is None or known.startswith(self.skipped):
            return None
        return f"model.{known}" if self.may_be_bare and not known.startswith("model.") else known

    def is_turned(self, name: str) -> bool:
        """Return whether the matrix of this name in the table is stored as [in, out]."""
        return self.spelling.is_turned(name)

    def stored_name(self, name: str) -> str:
        """Return the name that a new checkpoint has for a tensor of the language model or of the tower."""
        if not self.is_multimodal:
            return self.spelling.stored_name(name)
        if name.startswith(OTHER_MODELS):
            return f"model.{name}"
        part = next((own for own, known in self.spelling.parts if not known), LANGUAGE_MODEL)
        return name.replace("model.", f"model.{part}", 1)


NOTHING = Beside()


@dataclass(frozen=True)
class Part:
    """The names of a checkpoint's tensors that begin alike.

    names: those of the whole checkpoint
    beginnings: of names in the table
    unread: the ends of the names of those that nobody reads
    """

    names: Names
    beginnings: tuple[str, ...]
    unread: tuple[str, ...] = ()

    def known_name(self, name: str) -> str | None:
        """Return a tensor's name in the table; None if it is of another part, or nobody reads it."""
        known = self.names.known_name(name)
        is_own = known is not None and known.startswith(self.beginnings) and not known.endswith(self.unread)
        return known if is_own else None

    def stored_name(self, name: str) -> str:
        """Return a name in the checkpoint for one in the table."""
        return self.names.stored_name(name)

    def is_turned(self, name: str) -> bool:
        """Return whether the matrix of this name in the table is stored as [in, out]."""
        return self.names.is_turned(name)
