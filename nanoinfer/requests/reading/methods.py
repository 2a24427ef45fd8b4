"""ReadsTexts: what an LLM reads of texts that it does not continue."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from collections.abc import Sequence as ListLike
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from typing import Any, TypeVar, overload

from nanoinfer.checks import check_adapter, check_flag, check_none
from nanoinfer.hints import hints_for
from nanoinfer.pooling.cross_encoder import LABELS
from nanoinfer.process.collector import no_full_collection
from nanoinfer.requests.admin.adapters import GivenLora, LoadsAdapters
from nanoinfer.requests.inputs import Inputs, Prompt, SomePrompts
from nanoinfer.requests.outputs import Output
from nanoinfer.requests.progress import Stream, UseTqdm, check_use_tqdm
from nanoinfer.requests.prompts.stages import ComingRequest, Prepared
from nanoinfer.requests.reading.classes import Classes
from nanoinfer.requests.reading.embeddings import Embeddings
from nanoinfer.requests.reading.loop import Packs, read_all
from nanoinfer.requests.reading.outputs import ClassificationOutput, EmbeddingOutput, ReadText, RerankOutput
from nanoinfer.requests.reading.pairs import TextPairs, check_documents
from nanoinfer.requests.reading.texts import Reading, SomeTexts, as_it_is, one_by_one, settings_for, texts_of
from nanoinfer.requests.settings import NamedAdapters

SomeOutput = TypeVar("SomeOutput", bound=Output)


class ReadsTexts(LoadsAdapters):
    """The methods of LLM that read texts."""

    _inputs: Inputs

    @cached_property
    def _embeddings(self) -> Embeddings:
        return Embeddings(self.config, self._inputs.texts)

    @cached_property
    def _classes(self) -> Classes:
        return Classes(self.config)

    @cached_property
    def _pairs(self) -> TextPairs:
        return TextPairs(self.config, self._inputs.texts)

    @overload
    def embed(
        self,
        prompts: Iterator[Prompt],
        prompt_name: str | None = None,
        dimensions: int | None = None,
        use_tqdm: UseTqdm = True,
        adapter: str | None = None,
        lora_request: GivenLora = None,
        normalize: bool | None = None,
        hidden_states: Iterable[int] | None = None,
    ) -> Iterator[EmbeddingOutput]: ...

    @overload
    def embed(
        self,
        prompts: SomePrompts,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        use_tqdm: UseTqdm = True,
        adapter: str | None = None,
        lora_request: GivenLora = None,
        normalize: bool | None = None,
        hidden_states: Iterable[int] | None = None,
    ) -> list[EmbeddingOutput]: ...

    @hints_for("embed", ("prompt_name", "dimensions", "normalize"))
    def embed(
        self,
        prompts: Prompt | ListLike[Prompt] | Iterator[Prompt],
        prompt_name: str | None = None,
        dimensions: int | None = None,
        use_tqdm: UseTqdm = True,
        adapter: str | None = None,
        lora_request: GivenLora = None,
        normalize: bool | None = None,
        hidden_states: Iterable[int] | None = None,
    ) -> list[EmbeddingOutput] | Iterator[EmbeddingOutput]:
        """Compute each text's embedding; returns them in the texts' order.

        The checkpoint's modules.json says how, as sentence-transformers reads it and the files beside it: a text may
        get lower case, become a chat, and be cut. Token ids stay as they are. Without that file, the embedding is the
        hidden state of the last token behind the last norm, with length 1.

        prompts: as for generate. An iterator, such as a generator, gives an iterator of outputs: the LLM takes texts
            as it needs them, so that a million take little memory
        prompt_name: which of the checkpoint's prompts stands before each text, such as "query"; None: the checkpoint's
            default, if it has one
        dimensions: keep so many first numbers of each embedding, and give these length 1 if the whole one has it, as
            Matryoshka models allow; None: all, or as many as the checkpoint says
        use_tqdm: show a bar with the texts and their tokens; or a function that makes it, as tqdm does
        adapter: as in SamplingParams, for all texts
        lora_request: as for generate; for an iterator, one for all
        normalize: True: embeddings have length 1; False: they stay as they are; None: as the checkpoint says
        hidden_states: as in SamplingParams: each output has those of all tokens of its text; None: it has none

        Raises ValueError as generate does, and for what the checkpoint does not allow. Tokens are checked while the
        first texts run, so that the device need not wait: a text that cannot work ends the call, half-way at the
        latest. Of an iterator's texts the error is raised when their turn comes.
        """
        with self._door("ready"):
            reading = self._embedding(prompt_name, dimensions, normalize)
            reading = replace(reading, hidden_states=self._inputs.check_hidden_states(hidden_states))
        return self._read(prompts, reading, use_tqdm, adapter, lora_request)

    def _embedding(
        self, prompt_name: str | None, dimensions: int | None, normalize: bool | None = None
    ) -> Reading[EmbeddingOutput]:
        """Return how texts become embeddings. Raises ValueError for what the checkpoint does not allow."""
        made = self._embeddings
        kept, ask = made.check_dimensions(dimensions), made.find_prompt(prompt_name)
        length_1 = None if normalize is None else check_flag("normalize", normalize)
        return Reading(made.read, partial(made.outputs, dimensions=kept, normalize=length_1), ask)

    @hints_for("prepare_to_embed", ())
    def prepare_to_embed(
        self,
        prompt: Prompt,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        adapter: str | None = None,
    ) -> ComingRequest:
        """Check a text, as `prepare` does for one that generates; add_request takes it, and step returns its output.

        prompt: a string, a list of token ids, or a mapping, as for generate
        prompt_name: as for embed
        dimensions: as for embed
        adapter: as in SamplingParams

        Raises ValueError as embed does.
        """
        with self._door("open"):
            reading = self._embedding(prompt_name, dimensions)
            settings = settings_for(reading.read, check_adapter("adapter", adapter))
            return self._inputs.begin_text("prompt", prompt, settings, reading.ask, reading.output)

    @overload
    def classify(
        self,
        prompts: Iterator[Prompt],
        use_tqdm: UseTqdm = True,
        adapter: str | None = None,
        lora_request: GivenLora = None,
    ) -> Iterator[ClassificationOutput]: ...

    @overload
    def classify(
        self,
        prompts: SomePrompts,
        use_tqdm: UseTqdm = True,
        adapter: str | None = None,
        lora_request: GivenLora = None,
    ) -> list[ClassificationOutput]: ...

    @hints_for("classify", ())
    def classify(
        self,
        prompts: Prompt | ListLike[Prompt] | Iterator[Prompt],
        use_tqdm: UseTqdm = True,
        adapter: str | None = None,
        lora_request: GivenLora = None,
    ) -> list[ClassificationOutput] | Iterator[ClassificationOutput]:
        """Compute each text's labels by a classifier, a checkpoint of a class such as Qwen3ForSequenceClassification.

        prompts: as for embed, an iterator, too
        use_tqdm: as for embed
        adapter: as in SamplingParams, for all texts
        lora_request: as for embed

        Returns the outputs in the texts' order. The numbers are those of transformers' pipeline "text-classification".

        Raises ValueError as embed does, and for a checkpoint without a classifier's head.
        """
        with self._door("ready"):
            self._classes.check("classify")
        reading = Reading(LABELS, one_by_one(self._classes.classified), trim=self._classes.trim)
        return self._read(prompts, reading, use_tqdm, adapter, lora_request)

    @overload
    def rerank(
        self,
        query: str,
        documents: Iterator[str],
        instruction: str | None = None,
        use_tqdm: UseTqdm = True,
        adapter: str | None = None,
        lora_request: GivenLora = None,
    ) -> Iterator[RerankOutput]: ...

    @overload
    def rerank(
        self,
        query: str,
        documents: ListLike[str],
        instruction: str | None = None,
        use_tqdm: UseTqdm = True,
        adapter: str | None = None,
        lora_request: GivenLora = None,
    ) -> list[RerankOutput]: ...

    @hints_for("rerank", ())
    def rerank(
        self,
        query: str,
        documents: ListLike[str] | Iterator[str],
        instruction: str | None = None,
        use_tqdm: UseTqdm = True,
        adapter: str | None = None,
        lora_request: GivenLora = None,
    ) -> list[RerankOutput] | Iterator[RerankOutput]:
        """Compute how well each document answers a query; returns the outputs in the documents' order.

        The files that sentence-transformers' CrossEncoder has saved say how, which also cut pairs. Without a
        modules.json, a classifier of one label reads the pair as its tokenizer joins the two. Any other LLM that
        generates reads it in the form of Qwen3-Reranker, which asks for yes or no.

        query: a text
        documents: texts; of an iterator, the outputs are one, as for embed
        instruction: what the form says that the query asks for; None: "Given a web search query, retrieve relevant
            passages that answer the query". For a classifier, an instruction asks for this form. Where files make a
            chat of a pair, or name the tokens that count, it stands in place of their default prompt
        use_tqdm: as for embed
        adapter: as in SamplingParams, for all texts
        lora_request: as for embed

        Raises ValueError as embed does, for what is no text, and for a model that is neither of these.
        """
        is_classifier, numbers = self.config.description.labels is not None, count()
        trim = self._classes.trim if is_classifier else as_it_is

        def output(text: ReadText) -> RerankOutput:
            return self._pairs.output(text, next(numbers))

        with self._door("ready"):
            if is_classifier:
                self._classes.check("rerank", 1)
            read = self._pairs.model.read
            listed = documents if isinstance(documents, Iterator) else check_documents(documents)
            pairs = self._pairs.prompts(query, listed, instruction)
            prompts: Any = pairs if isinstance(documents, Iterator) else list(pairs)
        reading = Reading(read, one_by_one(output), trim=trim, name="documents")
        return self._read(prompts, reading, use_tqdm, adapter, lora_request)

    def _read(
        self,
        prompts: Prompt | ListLike[Prompt] | Iterator[Prompt],
        reading: Reading[SomeOutput],
        use_tqdm: UseTqdm,
        adapter: str | None,
        lora_request: GivenLora,
    ) -> list[SomeOutput] | Iterator[SomeOutput]:
        """Return the outputs of texts, or of an iterator's texts the outputs as they come."""
        is_listed = not isinstance(prompts, Iterator)
        with no_full_collection() if is_listed else nullcontext():
            with self._door("open"):
                use_tqdm = check_use_tqdm(use_tqdm)
                if lora_request is not None:
                    check_none("adapter", adapter, "lora_request names adapters")
                elif (adapter := check_adapter("adapter", adapter)) is not None:
                    self.engine.adapters.check_is_loaded(adapter)
                brought = self._adapters_of(lora_request, alone=is_listed)
                adapters = brought if adapter is None else NamedAdapters(adapter)
                texts = texts_of(prompts, reading, self._inputs, adapters)
                self._load_adapters(adapters, texts)
            outputs = self._stream_reads(texts, reading, use_tqdm)
            return list(outputs) if is_listed else Stream(outputs)

    def _stream_reads(
        self, texts: SomeTexts, reading: Reading[SomeOutput], use_tqdm: UseTqdm
    ) -> Generator[SomeOutput, None, None]:
        packs, check_open = Packs(texts, self.config), self.engine.check_open

        def take() -> list[Prepared]:
            with self._door("open"):
                taken = packs.take()
                self._check_adapters(prompt.params for prompt in taken)
                return taken

        with closing(texts), self._turn(alone=True), self._requests:
            for read in read_all(self._requests, packs, take, texts.count, use_tqdm, check_open):
                yield from reading.outputs(read)
