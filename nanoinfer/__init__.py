"""nanoinfer: Hugging Face language models over many prompts, offline and fast."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from nanoinfer.process.collector import no_collection
from nanoinfer.process.first_launch import prepare_own

prepare_own()  # before the imports that take long
with no_collection():
    from nanoinfer.beam_search_params import BeamSearchParams
    from nanoinfer.engine.ranks.workers import WorkerError
    from nanoinfer.engine.stats import Stats
    from nanoinfer.llm import LLM
    from nanoinfer.logprob import LogProb
    from nanoinfer.requests.beam_search import BeamSearchOutput, BeamSequence
    from nanoinfer.requests.outputs import RequestOutput, SampleOutput, Score, StreamOutput, Timings
    from nanoinfer.sampling_params import SamplingParams
    from nanoinfer.trainer.reference import reference

BUNDLED_MODEL = str(Path(__file__).parent / "bundled" / "shakespeare-qwen3")
"""The folder of a small Qwen3 that ships with the package."""

try:
    __version__ = version("nanoinfer")
except PackageNotFoundError:  # a source tree on Python's path, which nobody installed
    __version__ = "0+source"

__all__ = [
    "BUNDLED_MODEL",
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSequence",
    "LogProb",
    "RequestOutput",
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
