"""nanoinfer: Hugging Face language models over many prompts, offline and fast."""

from nanoinfer.process.collector import no_collection
from nanoinfer.process.first_launch import prepare_own

prepare_own()  # before the imports that take long
with no_collection():
    from nanoinfer.beam_search_params import BeamSearchParams
    from nanoinfer.engine.ranks.workers import WorkerError
    from nanoinfer.engine.results.stats import Stats
    from nanoinfer.hints import speak
    from nanoinfer.hub import BUNDLED_MODEL
    from nanoinfer.integrations.vllm.lora import LoRARequest
    from nanoinfer.integrations.words import Words
    from nanoinfer.llm import LLM
    from nanoinfer.logprob import LogProb
    from nanoinfer.process.version import own_version
    from nanoinfer.requests.beam_search import BeamSearchOutput, BeamSequence
    from nanoinfer.requests.outputs import RequestOutput, SampleOutput, Score, StreamOutput, Timings
    from nanoinfer.requests.reading.outputs import ClassificationOutput, EmbeddingOutput, RerankOutput
    from nanoinfer.sampling_params import SamplingParams
    from nanoinfer.serving.async_llm import AsyncLLM
    from nanoinfer.trainer.reference import reference

speak(Words())

__version__ = own_version()

__all__ = [
    "BUNDLED_MODEL",
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSequence",
    "ClassificationOutput",
    "EmbeddingOutput",
    "LoRARequest",
    "LogProb",
    "RequestOutput",
    "RerankOutput",
    "SampleOutput",
    "SamplingParams",
    "Score",
    "Stats",
    "StreamOutput",
    "Timings",
    "WorkerError",
    "__version__",
    "reference",
]
