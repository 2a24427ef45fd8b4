"""GRPOTrainer of TRL generates with an LLM: GRPOTrainer(..., rollout_func=rollout_func(llm))."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft import get_peft_model_state_dict
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerState
from trl import GRPOTrainer

from nanoinfer.checks import short
from nanoinfer.engine.client import LoadedAdapter
from nanoinfer.llm import LLM
from nanoinfer.requests.outputs import SampleOutput, warn_of_errors
from nanoinfer.sampling_params import SamplingParams

ADAPTER = "trainer"  # the name of the trainer's in the LLM

Rollout = Callable[[list[Any], GRPOTrainer], dict[str, list[Any]]]


def rollout_func(llm: LLM, params: SamplingParams | None = None) -> Rollout:
    """Return the function that a GRPOTrainer takes as its rollout_func.

    llm: the trainer's model; each of several processes makes its own, on the first GPU that it sees
    params: the settings of every sample, but for n, seed and logprobs; None: the trainer's temperature, top_p, top_k,
        min_p, repetition_penalty, max_completion_length and generation_kwargs

    The function writes the trainer's weights into the LLM when the trainer's step has changed. If the trainer learns a
    LoRA, an LLM with max_adapters gets the LoRA alone, as an adapter. Its model must then be the trainer's. Without
    max_adapters, the LoRA comes merged into all weights.

    The trainer repeats each prompt num_generations times, and the function draws one completion for each repetition.
    Seeds come from torch's generator, which the trainer seeds differently in each process.

    The trainer computes log-probabilities of its own, from logits that it divides by the temperature. Best for GRPO is
    LLM(..., logprobs_mode="processed_logprobs") in the trainer's dtype: it returns the same, if no setting but the
    temperature changes the draw.

    Raises ValueError for params with n or a seed. The function raises it for a trainer with tools, with a processor of
    images or with adapters that are not plain LoRA. It also does for a model that FSDP or DeepSpeed's ZeRO 3 splits.
    """
    if params is not None:
        _check_params(params)
        params = params.clone()
    weights = _Weights(llm)

    def rollout(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        _check_trainer(trainer)
        shared = params or _trainers_params(trainer)
        groups = [(ids, len(list(same))) for ids, same in groupby(_tokenize(prompts, trainer))]
        seeds = torch.randint(2**63 - 1, (len(groups),)).tolist()
        shared = replace(shared, logprobs=0, adapter=weights.follow(trainer) or shared.adapter)
        own = [replace(shared, n=n, seed=seed) for (_, n), seed in zip(groups, seeds, strict=True)]
        outputs = llm.generate([ids for ids, _ in groups], own, use_tqdm=False)
        warn_of_errors(outputs)
        pairs = [(output.prompt_token_ids, sample) for output in outputs for sample in output.samples]
        return {
            "prompt_ids": [prompt for prompt, _ in pairs],
            "completion_ids": [sample.token_ids for _, sample in pairs],
            "logprobs": [_drawn_logprobs(sample) for _, sample in pairs],
        }

    return rollout


def _check_params(params: SamplingParams) -> None:
    if params.n != 1:
        raise ValueError(f"params has n={params.n}: must be 1, because the trainer's num_generations says how many")
    if params.seed is not None:
        raise ValueError(f"params has seed={params.seed}: must be None, or each step would draw alike")


def _check_trainer(trainer: GRPOTrainer) -> None:
    if trainer.tools:
        raise ValueError(f"tools={short(trainer.tools)}: must be None: TRL would generate what follows a tool's answer")
    if not isinstance(trainer.processing_class, PreTrainedTokenizerBase):
        raise ValueError(
            f"processing_class={short(trainer.processing_class)}: must be a tokenizer: no images are passed on"
        )
    deepspeed = trainer.accelerator.state.deepspeed_plugin
    if trainer.is_fsdp_enabled or (deepspeed is not None and deepspeed.zero_stage == 3):
        how = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed's ZeRO 3"
        raise ValueError(f"trainer: {how} splits its model: must be whole in each process, as with DDP, ZeRO 1 or 2")
    for config in getattr(trainer.model, "peft_config", {}).values():
        if config.peft_type != "LORA" or config.modules_to_save:
            raise ValueError(f"peft_config={short(config)}: must be a LoraConfig without modules_to_save")


def _trainers_params(trainer: GRPOTrainer) -> SamplingParams:
    settings = {
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "min_p": trainer.min_p or 0.0,
        "repetition_penalty": trainer.repetition_penalty,
        "max_tokens": trainer.max_completion_length,
        "stop_token_ids": [trainer.processing_class.eos_token_id],  # may differ from the checkpoint's
    }
    return SamplingParams(**{**settings, **(trainer.args.generation_kwargs or {})})


def _tokenize(prompts: list[Any], trainer: GRPOTrainer) -> list[list[int]]:
    """Return the tokens of texts or conversations, made as the trainer's own generation makes them."""
    tokenizer = trainer.processing_class
    if isinstance(prompts[0], str):
        return tokenizer(text=prompts)["input_ids"]
    template = {"add_generation_prompt": True, "return_dict": True, **trainer.chat_template_kwargs}
    return tokenizer.apply_chat_template(prompts, **template)["input_ids"]


def _drawn_logprobs(sample: SampleOutput) -> list[float]:
    assert sample.logprobs is not None
    return [float(entry[token_id]) for entry, token_id in zip(sample.logprobs, sample.token_ids, strict=True)]


class _Weights:
    """The trainer's weights in an LLM: all of them, or its adapter alone."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._run: TrainerState | None = None  # each call of train() has a state of its own
        self._written: tuple[int, Any] | None = None  # the step whose weights the LLM has, and their version

    def follow(self, trainer: GRPOTrainer) -> str | None:
        """Write the trainer's weights, unless those of its step are there; returns the name of their adapter."""
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        adapter = ADAPTER if is_peft_model(model) and self._llm.config.max_adapters else None
        step = trainer.state.global_step
        if trainer.state is not self._run or (step, self._version(adapter)) != self._written:
            self._send(model, adapter)
            self._run, self._written = trainer.state, (step, self._version(adapter))
        return adapter

    def _version(self, adapter: str | None) -> int | LoadedAdapter | None:
        return self._llm.weights_version if adapter is None else self._llm.adapters.get(adapter)

    def _send(self, model: Any, adapter: str | None) -> None:
        if adapter is None:
            with closing(_named_tensors(model)) as tensors:  # an error leaves no layer merged
                self._llm.update_weights(tensors)
            return
        name = model.active_adapter
        tensors = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        self._llm.load_adapter(adapter, tensors, model.peft_config[name])


def _named_tensors(model: Any) -> Generator[tuple[str, Tensor], None, None]:
    """Yield the model's tensors by their names in the checkpoint, each with its LoRA merged into it."""
    base = model.get_base_model() if is_peft_model(model) else model
    stored = base.state_dict().keys()
    yield from ((name, buffer) for name, buffer in base.named_buffers() if name in stored)  # corrections of routers
    adapted = {name: module for name, module in base.named_modules() if hasattr(module, "base_layer")}
    for name, layer in adapted.items():
        with _merged(layer):
            yield from ((f"{name}.{own}", tensor) for own, tensor in layer.base_layer.named_parameters())
    inside = tuple(f"{name}." for name in adapted)
    yield from ((name, tensor) for name, tensor in base.named_parameters() if not name.startswith(inside))


@contextmanager
def _merged(layer: Any) -> Iterator[None]:
    """Merge a layer's LoRA into its weights; afterwards they are what they were, to the last bit."""
    kept = [(parameter, parameter.detach().clone()) for parameter in layer.base_layer.parameters()]
    layer.merge()
    try:
        yield
    finally:
        layer.unmerge()
        for parameter, before in kept:
            parameter.data.copy_(before)
