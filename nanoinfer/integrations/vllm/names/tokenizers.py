"""The functions by which vLLM's programs load a tokenizer and find its chat template."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nanoinfer.hub import BUNDLED, find_tokenizer


def get_tokenizer(
    tokenizer_name: str,
    *,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    **options: Any,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder, of a Hub id or of "bundled", nanoinfer's small model, by transformers.

    tokenizer_mode: "slow": the tokenizer in Python, if there is one
    trust_remote_code: not used: no remote code runs here
    revision, download_dir, options: as for AutoTokenizer.from_pretrained, where download_dir is cache_dir
    """
    if tokenizer_mode == "slow":
        options["use_fast"] = False
    if tokenizer_name == BUNDLED:
        tokenizer_name = find_tokenizer(BUNDLED, None)
    return AutoTokenizer.from_pretrained(
        tokenizer_name, revision=revision or "main", cache_dir=download_dir, trust_remote_code=False, **options
    )


def resolve_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None = None,
    tools: list[dict[str, Any]] | None = None,
    **options: Any,
) -> str | None:
    """Return the template that a chat takes: the one that is given, or the tokenizer's; None if there is none.

    options: model_config or trust_remote_code, which change nothing here
    """
    if chat_template is None and not tokenizer.chat_template:
        return None
    return tokenizer.get_chat_template(chat_template, tools=tools)
