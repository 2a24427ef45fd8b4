"""LLM with the arguments and defaults of vLLM's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoinfer import llm
from nanoinfer.checks import as_int, as_list, short
from nanoinfer.engine.beams.rules import VllmRules
from nanoinfer.generation_config import find_sampling_params
from nanoinfer.integrations.vllm.names.outputs import RequestOutput, all_renamed
from nanoinfer.integrations.vllm.names.params import SamplingParams

if TYPE_CHECKING:
    from nanoinfer.integrations.vllm.names.engine import EngineArgs


class LLM(llm.LLM):
    """nanoinfer's LLM. Without settings, generate and chat take those of the checkpoint's generation_config.json."""

    beam_rules = VllmRules

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
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
        if prompt_token_ids is not None:
            ids = as_list(prompt_token_ids)
            if ids is None:
                raise ValueError(
                    f"prompt_token_ids={short(prompt_token_ids)}: must be a list of token ids, or a list of such lists"
                )
            prompts = [ids] if ids and as_int(ids[0]) is not None else ids
        params = self.default_sampling_params() if sampling_params is None else sampling_params
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
        params = self.default_sampling_params() if sampling_params is None else sampling_params
        found = super().chat(messages, params, use_tqdm, **{**options, "lora_request": lora_request})
        return all_renamed(found, lora_request)

    def default_sampling_params(self) -> SamplingParams:
        """Return the settings of the checkpoint's generation_config.json; max_tokens is 16 if it does not say.

        Raises ValueError as nanoinfer.LLM's function does.
        """
        super().default_sampling_params()
        return SamplingParams(**find_sampling_params(self.config.model, self.config.generation_config))

    def score(self, *texts: Any, **options: Any) -> Any:
        """Raise ValueError: vLLM's score compares texts by a model for that; nanoinfer's is another function."""
        raise ValueError("score: vLLM's compares texts by a pooling model, and a model here generates; use generate")
