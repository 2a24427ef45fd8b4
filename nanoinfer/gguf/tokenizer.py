"""The tokenizer in a GGUF file's metadata, which transformers builds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nanoinfer.gguf.header import read_header

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL, SPLIT = "tokenizer.ggml.model", "tokenizer.ggml.pre"
NONE = "no_vocab"
KNOWN = ("gpt2", "gpt-2", "default", "smollm")  # splits that are GPT-2's


def has_tokenizer_inside(path: str) -> bool:
    """Whether a file's metadata have a vocabulary."""
    return read_header(path).metadata.get(MODEL, NONE) != NONE


def load_tokenizer_of(path: str) -> PreTrainedTokenizerBase:
    """Build the tokenizer; raises ValueError, naming it, for a kind or a split of texts that is unknown."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, GGUF_TOKENIZER_TYPES

    metadata = read_header(path).metadata
    kind, split = metadata.get(MODEL), metadata.get(SPLIT, "default")
    if kind not in GGUF_TOKENIZER_TYPES:
        raise ValueError(
            f"{path}: {MODEL}={kind!r}: must be one of {', '.join(GGUF_TOKENIZER_TYPES)}; give tokenizer=..."
        )
    if kind == "gpt2" and split not in (*KNOWN, *GGUF_PRE_TOKENIZER_SPLITS):
        raise ValueError(
            f"{path}: {SPLIT}={split!r}: must be one of {', '.join((*KNOWN, *GGUF_PRE_TOKENIZER_SPLITS))}; give"
            " tokenizer=..., the original's folder"
        )
    file = Path(path)
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(str(file.parent), gguf_file=file.name)
    return tokenizer
