"""Draft: what guesses tokens by weights of its own: a draft model, or the model's prediction heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nanoinfer.checkpoint import GENERATE, Checkpoint
from nanoinfer.drafting.options import MTP
from nanoinfer.drafting.tokens import check_tokens
from nanoinfer.models.description import Description
from nanoinfer.models.prediction_head import describe_heads, names_of_heads
from nanoinfer.models.ranks import check_in_order
from nanoinfer.weights.formats.formats import PLAIN_FORMATS
from nanoinfer.weights.roll import FILE_NAMES
from nanoinfer.weights.shards import FLOATS
from nanoinfer.weights.sources import FileSource


@dataclass(frozen=True)
class Draft:
    """What guesses the tokens that another model draws: see the options speculation and draft_model.

    option: what asks for it, as errors name it
    folder: where its files are
    layers: the numbers of its layers in the KV cache, behind those of the other model
    are_heads: it is that model's prediction heads, and reads its hidden states
    """

    option: str
    folder: str
    description: Description
    layers: range
    are_heads: bool = False

    @classmethod
    def open(cls, folder: str, model: Description, tokenizer: str, ranks: int, is_loaded: bool) -> Draft:
        """Read the folder of a draft model; raises ValueError if it holds none of this model.

        tokenizer: the folder of the model's; ranks, is_loaded: as for Checkpoint.describe
        """
        option = f"draft_model={folder!r}"
        try:
            draft = Checkpoint.open(folder).describe(GENERATE, None, ranks, is_loaded, sees=False)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from error
        if draft.vocab_size != model.vocab_size:
            raise ValueError(
                f"{option}: must have the model's vocabulary of {model.vocab_size} tokens, not one of"
                f" {draft.vocab_size}"
            )
        if draft.has_states:
            raise ValueError(
                f"{option}: some of its layers keep a state, which a draft model of nanoinfer cannot have; its heads"
                f" can guess, if the model has some: speculation={MTP!r}"
            )
        check_tokens(folder, tokenizer)
        return cls(option, folder, draft, range(model.num_layers, model.num_layers + draft.num_layers))

    @classmethod
    def of_heads(cls, folder: str, model: Description, most: int, is_loaded: bool, is_rounded: bool) -> Draft:
        """Describe the prediction heads of the model in a folder; raises ValueError if it has none.

        Files of quantized models may hold them in 16 bits, whatever the config says: so they stay.

        most: guesses of a sequence in a step; is_loaded: as for Checkpoint.describe
        is_rounded: the option `quantization` asks for a format
        """
        option, heads = f"speculation={MTP!r}", describe_heads(model, most)
        if heads is None:
            raise ValueError(
                f"{option}: must be left out for this model: its config names no layer that predicts further tokens"
            )
        layers = range(model.num_layers, model.num_layers + heads.num_layers)
        draft = cls(option, folder, heads, layers, are_heads=True)
        if is_loaded and draft.source().is_empty:
            raise ValueError(
                f"{option}: must be left out, or the checkpoint have the tensors of its prediction head,"
                f" {heads.names.prefix(0)}*: transformers saves models without them"
            )
        may_be_plain = is_loaded and not is_rounded and heads.formats.quantized
        if may_be_plain and draft.source().number_types <= {FILE_NAMES[dtype] for dtype in FLOATS}:
            return replace(draft, description=replace(heads, formats=PLAIN_FORMATS))
        return draft

    @property
    def most_guesses(self) -> int | None:
        """How many guesses it makes of a sequence in a step, at most; None: as many as are wanted, one by one."""
        return len(self.layers) if self.are_heads and len(self.layers) > 1 else None

    def source(self) -> FileSource:
        """Return the source of its weights. Raises ValueError if the folder has no files of any."""
        if self.are_heads:
            return FileSource(self.folder, names_of_heads(self.description))
        return FileSource(self.folder, self.description.beside, "draft_model")

    def within(self, max_len: int, long_from: int | None) -> Draft:
        """Return it for sequences of at most max_len tokens. Raises ValueError if it computes some of them otherwise.

        long_from: the model's
        """
        draft = self.description.within(max_len)
        if not self.are_heads and (window := max(window or 0 for window in draft.windows)):
            raise ValueError(
                f"{self.option}: its layers see {window} tokens at most: must see all; lower"
                f" max_model_len={max_len} to {window}"
            )
        if draft.long_from not in (None, long_from):
            raise ValueError(
                f"{self.option}: rotates sequences of over {draft.long_from} tokens otherwise: lower"
                f" max_model_len={max_len} to {draft.long_from}"
            )
        return replace(self, description=draft)

    def check_in_order(self, ranks: int, on_cpu: bool) -> None:
        """Raise ValueError if ranks cannot divide it as they divide a model with deterministic=True."""
        try:
            check_in_order(self.description, ranks, on_cpu)
        except ValueError as error:
            raise ValueError(f"{self.option}: {error}") from error
