"""Lines of OpenAI's /v1/embeddings: what they ask for, and their results."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import Any, NamedTuple

from nanoinfer.batch.lines.adapters import Models
from nanoinfer.checks import as_int, check_choice, short
from nanoinfer.llm import LLM
from nanoinfer.requests.prompts.stages import ComingRequest
from nanoinfer.requests.reading.outputs import EmbeddingOutput

KNOWN = ("input", "dimensions", "encoding_format", "prompt_name")
UNREAD = ("model", "user", "metadata")  # model is read elsewhere
FORMATS = ("float", "base64")
MOST_SHOWN = 60  # characters of a value in an error message


class Embedding(NamedTuple):
    """What a line asks LLM.embed for. texts: each a string or a list of token ids; format: one of FORMATS"""

    texts: list[Any]
    prompt_name: Any
    dimensions: Any
    format: str
    adapter: str | None

    @classmethod
    def read(cls, body: Mapping[str, Any], models: Models) -> Embedding:
        """Read a line's body. Raises ValueError for what it cannot have. models: those that a line may name"""
        given = {name: value for name, value in body.items() if value is not None}
        if unknown := given.keys() - {*KNOWN, *UNREAD}:
            raise ValueError(f"unknown argument {min(unknown)!r}: known: {', '.join((*KNOWN, *UNREAD))}")
        texts = given.get("input")
        if isinstance(texts, str) or (isinstance(texts, list) and texts and as_int(texts[0]) is not None):
            texts = [texts]
        if not isinstance(texts, list) or not texts:
            raise ValueError(
                f"input={short(texts, MOST_SHOWN)}: must be a text, a list of token ids, or a list of these"
            )
        kind = check_choice("encoding_format", given.get("encoding_format", FORMATS[0]), list(FORMATS))
        adapter = models.find(given["model"]) if "model" in given else None
        return cls(texts, given.get("prompt_name"), given.get("dimensions"), kind, adapter)

    def prepare(self, llm: LLM) -> list[ComingRequest]:
        """Return the requests of the texts. Raises ValueError as LLM.embed does."""
        how = self.prompt_name, self.dimensions, self.adapter
        return [llm.prepare_to_embed(text, *how) for text in self.texts]

    def body(self, outputs: list[EmbeddingOutput], model: str) -> dict[str, Any]:
        """Return the body of OpenAI's response. Raises ValueError if a text has none. model: the name that it tells"""
        for output in outputs:
            if output.error is not None:
                raise ValueError(output.error)
        used = sum(len(output.prompt_token_ids) for output in outputs)
        data = [
            {"object": "embedding", "index": index, "embedding": self._numbers(output)}
            for index, output in enumerate(outputs)
        ]
        usage = {"prompt_tokens": used, "total_tokens": used}
        return {"object": "list", "data": data, "model": model, "usage": usage}

    def _numbers(self, output: EmbeddingOutput) -> list[float] | str:
        assert output.embedding is not None
        if self.format == "float":
            return list(output.embedding.tolist())
        return b64encode(output.embedding.astype("<f4").tobytes()).decode()
