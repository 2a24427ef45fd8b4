"""The modules of vLLM's that programs import, and the names that they have here."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType
from typing import Any

from nanoinfer.beam_search_params import BeamSearchParams
from nanoinfer.integrations.vllm.lora import LoRARequest
from nanoinfer.integrations.vllm.names import metrics, pooling
from nanoinfer.integrations.vllm.names.command_line import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser
from nanoinfer.integrations.vllm.names.engine import AsyncLLMEngine, LLMEngine
from nanoinfer.integrations.vllm.names.llm import LLM
from nanoinfer.integrations.vllm.names.outputs import CompletionOutput, RequestOutput
from nanoinfer.integrations.vllm.names.params import (
    GuidedDecodingParams,
    PromptType,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from nanoinfer.integrations.vllm.names.processors import AdapterLogitsProcessor
from nanoinfer.integrations.vllm.names.surroundings import (
    Absent,
    Environment,
    Platform,
    cleanup_dist_env_and_memory,
    convert_image_mode,
    destroy_distributed_environment,
    destroy_model_parallel,
    get_ip,
    get_open_port,
)
from nanoinfer.integrations.vllm.names.tokenizers import get_tokenizer, resolve_chat_template
from nanoinfer.logits_processors import BatchUpdate, LogitsProcessor, MoveDirectionality
from nanoinfer.logprob import LogProb

Names = dict[str, Any]


def _named(*objects: Any, **others: Any) -> Names:
    """Map each object's own name to the object."""
    return {**{own.__name__: own for own in objects}, **others}


NO_SERVER = "there is no server here: let the trainer generate in its own process, as with vllm_mode='colocate'"
SENDERS = ("NCCLTrainerSendWeightsArgs", "NCCLWeightTransferEngine", "trainer_init", "packed_nccl_broadcast_producer")
SENDING: Names = {name: Absent(name, NO_SERVER) for name in SENDERS}
ADDRESSES = _named(get_ip, get_open_port)
ENGINE_ARGS = _named(AsyncEngineArgs, EngineArgs)
GROUPS = _named(cleanup_dist_env_and_memory, destroy_distributed_environment, destroy_model_parallel)
LOGPROBS = _named(Logprob=LogProb, PromptLogprobs=list, SampleLogprobs=list)
OUTPUTS = _named(
    CompletionOutput,
    RequestOutput,
    pooling.ClassificationRequestOutput,
    pooling.EmbeddingRequestOutput,
    pooling.PoolingOutput,
    pooling.PoolingRequestOutput,
    pooling.ScoringRequestOutput,
    ClassificationOutput=pooling.ClassificationData,
    EmbeddingOutput=pooling.EmbeddingData,
    ScoringOutput=pooling.ScoringData,
)
NO_TRANSFER = "no other engine takes part in a prompt"
NO_ASSETS = "nothing is fetched: give images and frames of your own"
CONFIGS: Names = {
    **{name: Absent(name, NO_TRANSFER) for name in ("KVTransferConfig", "KVEventsConfig")},
    **{name: Absent(name, "LLM takes options one by one") for name in ("CompilationConfig", "VllmConfig")},
    "StructuredOutputsConfig": dict,  # LLM's options are mappings
}
PROCESSORS = _named(AdapterLogitsProcessor, BatchUpdate, LogitsProcessor, MoveDirectionality)
METRICS = _named(metrics.Counter, metrics.Gauge, metrics.Histogram, metrics.Metric, metrics.Vector)
POOLING = _named(pooling.PoolingParams)
PARSERS = _named(FlexibleArgumentParser)
PROMPTS = _named(TextPrompt, TokensPrompt, PromptType=PromptType)
SETTINGS = _named(BeamSearchParams, GuidedDecodingParams, RequestOutputKind, SamplingParams, StructuredOutputsParams)
TEMPLATES = _named(resolve_chat_template, resolve_hf_chat_template=resolve_chat_template)
TOKENIZERS = _named(get_tokenizer)

MODULES: dict[str, Names] = {
    "": {
        **_named(AsyncLLMEngine, LLM, LLMEngine, SamplingParams, __version__=version("vllm")),
        **POOLING,
        **PROMPTS,
        **OUTPUTS,
        **ENGINE_ARGS,
    },
    ".assets.audio": {"AudioAsset": Absent("AudioAsset", "of media there are images and frames of videos")},
    ".assets.image": {"ImageAsset": Absent("ImageAsset", NO_ASSETS)},
    ".assets.video": {"VideoAsset": Absent("VideoAsset", NO_ASSETS)},
    ".config": CONFIGS,
    ".distributed": GROUPS,
    ".distributed.parallel_state": GROUPS,
    ".distributed.weight_transfer.nccl_common": SENDING,
    ".distributed.weight_transfer.nccl_engine": SENDING,
    ".distributed.weight_transfer.packed_tensor": SENDING,
    ".engine.arg_utils": ENGINE_ARGS,
    ".engine.async_llm_engine": _named(AsyncLLMEngine),
    ".engine.llm_engine": _named(LLMEngine),
    ".entrypoints.chat_utils": TEMPLATES,
    ".entrypoints.llm": _named(LLM),
    ".inputs": PROMPTS,
    ".inputs.data": PROMPTS,
    ".logprobs": LOGPROBS,
    ".lora.request": _named(LoRARequest),
    ".multimodal.image": _named(convert_image_mode),
    ".multimodal.utils": {"fetch_image": Absent("fetch_image", NO_ASSETS)},
    ".outputs": OUTPUTS,
    ".platforms": {"current_platform": Platform()},
    ".pooling_params": POOLING,
    ".renderers.hf": TEMPLATES,
    ".sampling_params": SETTINGS,
    ".sequence": LOGPROBS,
    ".tokenizers": TOKENIZERS,
    ".transformers_utils.tokenizer": TOKENIZERS,
    ".utils": {**ADDRESSES, **PARSERS},
    ".utils.argparse_utils": PARSERS,
    ".utils.network_utils": ADDRESSES,
    ".v1.metrics.reader": METRICS,
    ".v1.metrics.stats": _named(metrics.RequestStateStats),
    ".v1.sample.logits_processor": PROCESSORS,
    ".v1.sample.logits_processor.interface": PROCESSORS,
    ".v1.engine.llm_engine": _named(LLMEngine),
    ".v1.engine.async_llm": {"AsyncLLM": AsyncLLMEngine, **ENGINE_ARGS},
}
"""Maps each module, behind "vllm", to its names."""


def fill(package: str) -> None:
    """Give a package that is being imported its names, and its modules."""
    for suffix, names in MODULES.items():
        vars(_module(package + suffix)).update(names)
    _module(f"{package}.envs", Environment)


def _module(name: str, kind: type[ModuleType] = ModuleType) -> ModuleType:
    """Return a module, which is made if there is none, as are those that hold it."""
    if name in sys.modules:
        return sys.modules[name]
    module = sys.modules[name] = kind(name)
    module.__file__ = __file__  # the error for a name that it lacks says so
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    holder, _, own = name.rpartition(".")
    setattr(_module(holder), own, module)
    return module
