"""Pairs: a query and a document as one prompt, in Qwen3-Reranker's form or as a classifier's tokenizer joins them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from nanoinfer.checks import as_list, short
from nanoinfer.config import Config
from nanoinfer.pooling.read import Read
from nanoinfer.requests.interface import AnyRequest
from nanoinfer.requests.reading.classes import rerank_output, softmax
from nanoinfer.requests.reading.outputs import RerankOutput
from nanoinfer.requests.text.texts import Texts, check_characters

BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
ANSWERS = "no", "yes"
NEEDED = ("<|im_start|>", "<|im_end|>", *ANSWERS)  # tokens
MOST_SHOWN = 60  # characters of a text in an error message


class Pairs:
    """Makes prompts of pairs.

    The form is that of Qwen3-Reranker's model card: "yes" or "no" would follow, if the model generated.
    """

    def __init__(self, config: Config, texts: Texts) -> None:
        self._config, self._texts = config, texts

    @cached_property
    def answers(self) -> Read:
        """What steps read of a pair in the form: the logits of "no" and "yes".

        Raises ValueError if the tokenizer lacks these or the form's tokens.
        """
        tokenizer = self._texts.known_tokenizer("rerank")
        known = tokenizer.get_vocab()
        if missing := [token for token in NEEDED if token not in known]:
            raise ValueError(
                f"rerank: the tokenizer has no token {', '.join(missing)}: must be a classifier's of one label, or that"
                " of a model which answers yes or no in Qwen3-Reranker's form"
            )
        return Read("tokens", tuple(known[token] for token in ANSWERS))

    def prompts(
        self, query: object, documents: Iterable[object], instruction: object, are_joined: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield the prompt of each document, as generate takes it. Raises ValueError for what is no text.

        instruction: None: the form's usual one; are_joined: the tokenizer joins a pair, unless there is an instruction
        """
        query = _check_text("query", query)
        asked = INSTRUCTION if instruction is None else _check_text("instruction", instruction)
        for index, given in enumerate(documents):
            document = _check_text(f"documents[{index}]", given)
            if are_joined and instruction is None:
                token_ids = self._texts.known_tokenizer("rerank").encode(query, document)
            else:
                token_ids = self._in_form(query, document, asked)
            yield {"prompt": document, "prompt_token_ids": token_ids}

    def _in_form(self, query: str, document: str, instruction: str) -> list[int]:
        """Return the tokens of a pair. Its three parts are tokenized by themselves, as the model card does."""
        pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        begin, end = self._ends
        return [*begin, *self._texts.tokenize("documents", pair, add_special_tokens=False), *end]

    @cached_property
    def _ends(self) -> tuple[list[int], list[int]]:
        begin, end = (self._texts.tokenize("rerank", text, add_special_tokens=False) for text in (BEGIN, END))
        return begin, end

    @staticmethod
    def answered(request: AnyRequest, index: int) -> RerankOutput:
        """Return the output of the document at `index`: how likely "yes" is, if only "no" could be in its place."""
        return rerank_output(request, index, lambda logits: softmax(logits)[1])


def check_documents(documents: object) -> list[Any]:
    """Return the documents of a call, of which a lone text counts as a list; raises ValueError for what is no list."""
    listed = [documents] if isinstance(documents, str) else as_list(documents)
    if listed is None:
        raise ValueError(f"documents={short(documents, MOST_SHOWN)}: must be a list of strings, or an iterator")
    return listed


def _check_text(name: str, text: object) -> str:
    """Return a text; raises ValueError for what is none, and for half a surrogate pair."""
    if not isinstance(text, str):
        raise ValueError(f"{name}={short(text, MOST_SHOWN)}: must be a string")
    check_characters(name, text)
    return text
