"""Whether a draft model's tokens are those of the model for which it guesses."""

from __future__ import annotations

from pathlib import Path

from nanoinfer.gguf.header import is_gguf
from nanoinfer.gguf.tokenizer import load_tokenizer_of
from nanoinfer.hub import has_tokenizer, reason_of
from nanoinfer.process.collector import no_collection

WHOLE = "tokenizer.json"  # has all tokens; folders whose files are equal need no further look


def check_tokens(draft_model: str, tokenizer: str) -> None:
    """Raise ValueError if an id stands for one token in a draft model's folder, and for another in a tokenizer's.

    An id that only one of them names counts for nothing, as does a folder without a tokenizer.
    """
    folders = draft_model, tokenizer
    if not all(map(has_tokenizer, folders)) or _are_equal(*folders):
        return
    drafts, others = map(_tokens_of, folders)
    differing = [token_id for token_id, token in drafts.items() if others.get(token_id, token) != token]
    if differing:
        first = min(differing)
        raise ValueError(
            f"draft_model={draft_model!r}: must have the tokens of {tokenizer!r}: {len(differing)} differ, such as"
            f" token {first}, which is {drafts[first]!r}, not {others[first]!r}"
        )


def _are_equal(*folders: str) -> bool:
    files = [Path(folder) / WHOLE for folder in folders]
    return all(file.is_file() for file in files) and len({file.read_bytes() for file in files}) == 1


def _tokens_of(folder: str) -> dict[int, str]:
    """Return the token of each id."""
    with no_collection():
        from transformers import AutoTokenizer  # here, for ranks need not import it
    try:
        if is_gguf(folder):
            tokenizer = load_tokenizer_of(folder)
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"draft_model: cannot load the tokenizer in {folder!r}: {reason_of(error)}") from error
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}
