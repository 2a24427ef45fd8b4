"""LLM with the arguments and defaults of vLLM's."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from nanoinfer import llm
from nanoinfer.checks import as_int, as_list, check_none, short
from nanoinfer.engine.beams.rules import VllmRules
from nanoinfer.generation_config import find_sampling_params
from nanoinfer.integrations.vllm.names.metrics import Metric, metrics_of
from nanoinfer.integrations.vllm.names.outputs import RequestOutput, all_renamed
from nanoinfer.integrations.vllm.names.params import SamplingParams
from nanoinfer.integrations.vllm.names.pooling import (
    ClassificationData,
    ClassificationRequestOutput,
    EmbeddingData,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringData,
    ScoringRequestOutput,
    all_read,
    as_pairs,
    cosines,
    data_of,
    pooling_of,
)
from nanoinfer.integrations.vllm.names.rules import Rules

CUT_BEFORE = "a text that is too long is refused: cut it before"

if TYPE_CHECKING:
    from nanoinfer.integrations.vllm.names.command_line import Options
    from nanoinfer.requests.reading.outputs import EmbeddingOutput


class LLM(llm.LLM):
    """nanoinfer's LLM. Without settings, generate and chat take those of the checkpoint's generation_config.json."""

    beam_rules = VllmRules

    def __init__(self, model: str, **options: Any) -> None:
        self.rules = Rules.take(options)
        super().__init__(model, **options)

    @classmethod
    def from_engine_args(cls, engine_args: Options) -> LLM:
        """Make an LLM with the options of an EngineArgs."""
        return cls(**vars(engine_args))

    def generate(  # type: ignore[override]  # the outputs are a list of a subclass
        self,
        prompts: Any = None,
        sampling_params: Any = None,
        use_tqdm: Any = True,
        lora_request: Any = None,
        prompt_token_ids: Any = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Generate, as nanoinfer.LLM does.

        prompts, use_tqdm, lora_request, options: as for nanoinfer.LLM.generate
        sampling_params: as there; None: default_sampling_params()
        prompt_token_ids: the prompts' tokens, which come before `prompts`, as in vLLM before 0.11
        """
        prompts = _prompts_of(prompts, prompt_token_ids)
        params = self.params_of(sampling_params)
        found = super().generate(prompts, params, use_tqdm, **{**options, "lora_request": lora_request})
        return all_renamed(found, lora_request)

    def chat(  # type: ignore[override]  # as above
        self,
        messages: Any,
        sampling_params: Any = None,
        use_tqdm: Any = True,
        lora_request: Any = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Generate the next message of each chat, as nanoinfer.LLM does.

        messages, use_tqdm, lora_request, options: as for nanoinfer.LLM.chat
        sampling_params: as there; None: default_sampling_params()
        """
        params = self.params_of(sampling_params)
        found = super().chat(messages, params, use_tqdm, **{**options, "lora_request": lora_request})
        return all_renamed(found, lora_request)

    def params_of(self, given: Any) -> Any:
        """Return the settings of a call, as the checkpoint and this LLM's options have them. Raises ValueError."""
        return self.rules.apply(self.default_sampling_params() if given is None else given)

    def get_metrics(self) -> list[Metric]:
        """Return what llm.stats() counts, as counters by vLLM's names."""
        return metrics_of(self.stats())

    @staticmethod
    def deprecate_legacy_api() -> AbstractContextManager[None]:
        """Return a context that changes nothing: no name here is about to go."""
        return nullcontext()

    def default_sampling_params(self) -> SamplingParams:
        """Return the settings of the checkpoint's generation_config.json; max_tokens is 16 if it does not say.

        Raises ValueError as nanoinfer.LLM's function does.
        """
        super().default_sampling_params()
        return SamplingParams(**find_sampling_params(self.config.model, self.config.generation_config))

    def embed(  # type: ignore[override]  # the outputs are vLLM's
        self,
        prompts: Any,
        *,
        truncate_prompt_tokens: None = None,
        use_tqdm: Any = True,
        pooling_params: Any = None,
        **options: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Compute each text's embedding, as nanoinfer.LLM does.

        pooling_params: PoolingParams for all texts, or one each with the same dimensions
        truncate_prompt_tokens: None: a text that is too long is refused
        """
        check_none("truncate_prompt_tokens", truncate_prompt_tokens, CUT_BEFORE)
        found = self._embedded(prompts, pooling_params, use_tqdm=use_tqdm, **options)
        return all_read(EmbeddingRequestOutput, found, lambda one: EmbeddingData(one.embedding.tolist()))

    def _embedded(self, prompts: Any, pooling_params: Any, **options: Any) -> list[EmbeddingOutput]:
        asked = pooling_of(pooling_params)
        return super().embed(prompts, dimensions=asked.dimensions, normalize=asked.normalize, **options)

    def classify(  # type: ignore[override]  # as above
        self, prompts: Any, *, use_tqdm: Any = True, pooling_params: Any = None, **options: Any
    ) -> list[ClassificationRequestOutput]:
        """Compute what a classifier makes of each text, as nanoinfer.LLM does."""
        key = "logits" if pooling_of(pooling_params).activation is False else "probs"
        found = super().classify(prompts, use_tqdm, **options)
        return all_read(ClassificationRequestOutput, found, lambda one: ClassificationData(one[key].tolist()))

    def reward(
        self, prompts: Any, *, use_tqdm: Any = True, pooling_params: Any = None, **options: Any
    ) -> list[PoolingRequestOutput]:
        """Compute what a classifier makes of each text, in outputs.data; softmax=False: the scores of its head."""
        key = "logits" if pooling_of(pooling_params).softmax is False else "probs"
        found = super().classify(prompts, use_tqdm, **options)
        return all_read(PoolingRequestOutput, found, lambda one: data_of(one[key]))

    def encode(
        self,
        prompts: Any = None,
        pooling_params: Any = None,
        prompt_token_ids: Any = None,
        *,
        use_tqdm: Any = True,
        pooling_task: str = "encode",
        **options: Any,
    ) -> list[PoolingRequestOutput]:
        """Read each text, and return numbers in outputs.data.

        pooling_task: "embed": its embedding; "classify": what a classifier makes of it. Each token's own numbers, which
            vLLM's other tasks return, cannot be had
        prompt_token_ids: as for generate
        """
        prompts = _prompts_of(prompts, prompt_token_ids)
        task = getattr(pooling_params, "task", None) or pooling_task
        if task not in ("embed", "classify"):
            raise ValueError(f"pooling_task={short(task)}: must be 'embed' or 'classify': a text is read as a whole")
        if task == "embed":
            found = self._embedded(prompts, pooling_params, use_tqdm=use_tqdm, **options)
            return all_read(PoolingRequestOutput, found, lambda one: data_of(one.embedding))
        key = "logits" if pooling_of(pooling_params).activation is False else "probs"
        classified = super().classify(prompts, use_tqdm, **options)
        return all_read(PoolingRequestOutput, classified, lambda one: data_of(one[key]))

    def score(  # type: ignore[override]  # nanoinfer's score is another function
        self,
        data_1: Any,
        data_2: Any,
        *,
        truncate_prompt_tokens: None = None,
        use_tqdm: Any = True,
        pooling_params: Any = None,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """Compute how well texts fit: by a model that scores pairs, or by the cosine of two embeddings.

        data_1, data_2: a text and several, or as many texts as there are others
        truncate_prompt_tokens: None: a text that is too long is refused
        """
        check_none("truncate_prompt_tokens", truncate_prompt_tokens, CUT_BEFORE)
        is_raw = pooling_of(pooling_params).activation is False
        firsts, seconds = as_pairs(data_1, data_2)
        if self.config.description.labels is None:
            return cosines(super().embed([*firsts, *seconds], use_tqdm=use_tqdm, **options))
        found: list[Any] = []
        for query, pairs in groupby(zip(firsts, seconds, strict=True), itemgetter(0)):
            documents = [document for _, document in pairs]
            if is_raw:
                self._classes.check("score", 1)
                found += super().classify(list(self._pairs.prompts(query, documents, None)), use_tqdm, **options)
            else:
                found += super().rerank(query, documents, use_tqdm=use_tqdm, **options)
        return all_read(
            ScoringRequestOutput, found, lambda one: ScoringData(float(one.logits[0] if is_raw else one.score))
        )


def _prompts_of(prompts: Any, prompt_token_ids: Any) -> Any:
    """Return the prompts of a call that may have tokens by their older name. Raises ValueError for what is none."""
    if prompt_token_ids is None:
        return prompts
    warnings.warn("'prompt_token_ids' is an older name of prompts", DeprecationWarning, stacklevel=3)
    if (ids := as_list(prompt_token_ids)) is None:
        raise ValueError(
            f"prompt_token_ids={short(prompt_token_ids)}: must be a list of token ids, or a list of such lists"
        )
    return [ids] if ids and as_int(ids[0]) is not None else ids
