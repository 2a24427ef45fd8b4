"""TextPairs: a query and a document as one prompt, in Qwen3-Reranker's form or as a classifier's tokenizer does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from nanoinfer.checks import as_list, short
from nanoinfer.config import Config
from nanoinfer.pooling.cross_encoder import CrossEncoder, read_cross_encoder
from nanoinfer.pooling.read import Read
from nanoinfer.requests.reading.model_texts import ModelTexts
from nanoinfer.requests.reading.outputs import ReadText, RerankOutput
from nanoinfer.requests.text.texts import TextTokenizer, check_characters

BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
ANSWERS = "yes", "no"
NEEDED = ("<|im_start|>", "<|im_end|>", *ANSWERS)  # tokens
MOST_SHOWN = 60  # characters of a text in an error message


class TextPairs:
    """Makes prompts of pairs, and scores of what steps read of them.

    sentence-transformers' files say how. Without them, a classifier's tokenizer joins a pair, and any other model gets
    the form of Qwen3-Reranker's model card: "yes" or "no" would follow, if it generated.
    """

    def __init__(self, config: Config, texts: TextTokenizer) -> None:
        self._config, self._texts = config, texts

    @cached_property
    def model(self) -> CrossEncoder:
        """How a pair becomes a score. Raises ValueError for what nobody computes here, or the tokenizer lacks."""
        known = self._config.description
        tokenizer = self._texts.known_tokenizer("rerank")
        saved = read_cross_encoder(self._config.model, known.labels is not None, known.vocab_size)
        has_types = known.token_types is not None and known.token_types.rows > 1
        if saved is not None and has_types and "token_type_ids" in tokenizer.model_input_names:
            saved = replace(saved, read=saved.read._replace(separator=tokenizer.sep_token_id))
        return saved or CrossEncoder(self._find_answers(), texts=None)

    @cached_property
    def _model_texts(self) -> ModelTexts | None:
        texts = self.model.texts
        return None if texts is None else ModelTexts(self._config, self._texts, texts)

    def _find_answers(self) -> Read:
        """Return the logits of "yes" and "no". Raises ValueError if the tokenizer lacks these or the form's tokens."""
        tokenizer = self._texts.known_tokenizer("rerank")
        known = tokenizer.get_vocab()
        if missing := [token for token in NEEDED if token not in known]:
            raise ValueError(
                f"rerank: the tokenizer has no token {', '.join(missing)}: must be a classifier's of one label, or that"
                " of a model which answers yes or no in Qwen3-Reranker's form"
            )
        return Read("tokens", tuple(known[token] for token in ANSWERS))

    def prompts(self, query: object, documents: Iterable[object], instruction: object) -> Iterator[dict[str, Any]]:
        """Yield the prompt of each document, as generate takes it. Raises ValueError for what is no text.

        instruction: what the form asks for, or a template's system message in place of the files' prompt; None: the
            usual one
        """
        query = _check_text("query", query)
        given = None if instruction is None else _check_text("instruction", instruction)
        for index, entry in enumerate(documents):
            name = f"documents[{index}]"
            document = _check_text(name, entry)
            yield {"prompt": document, "prompt_token_ids": self._tokens(name, query, document, given)}

    def _tokens(self, name: str, query: str, document: str, instruction: str | None) -> list[int]:
        own, model = self._model_texts, self.model
        if own is None or (instruction is not None and model.read.what == "labels" and not own.writes_chats):
            return self._in_form(query, document, INSTRUCTION if instruction is None else instruction)
        return own.read_pair(name, query, document, model.prompt if instruction is None else instruction)

    def _in_form(self, query: str, document: str, instruction: str) -> list[int]:
        """Return the tokens of a pair. Its three parts are tokenized by themselves, as the model card does."""
        pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        begin, end = self._ends
        return [*begin, *self._texts.tokenize("documents", pair, add_special_tokens=False), *end]

    @cached_property
    def _ends(self) -> tuple[list[int], list[int]]:
        begin, end = (self._texts.tokenize("rerank", text, add_special_tokens=False) for text in (BEGIN, END))
        return begin, end

    def output(self, text: ReadText, index: int) -> RerankOutput:
        """Return the output of the document at `index`, whose text is the prompt's."""
        score = None if text.pooled is None else float(self.model.score(text.pooled))
        facts = text.facts
        return RerankOutput(index=index, document=facts.pop("prompt"), score=score, **facts)


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
