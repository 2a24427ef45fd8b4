"""The model "nanoinfer" of lm-evaluation-harness.

python -m nanoinfer.integrations.lm_eval --tasks ... --model_args model=...,max_model_len=4096

This command is lm-eval's own, with our model as its default.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from nanoinfer.batch.lines.adapters import check_folders, load_all, with_slots
from nanoinfer.llm import LLM
from nanoinfer.requests.chat.renderer import ChatRenderer
from nanoinfer.requests.outputs import score_of, warn_of_errors
from nanoinfer.sampling_params import SamplingParams

ADAPTER = "peft"  # the name of the one that is evaluated

Pair = tuple[Any, list[int], list[int]]  # a key for lm-eval's cache, and the tokens of a context and its continuation


@register_model("nanoinfer")
class NanoInfer(TemplateLM):
    """An LLM as lm-eval calls its models.

    The LLM gets all requests of a kind in one call and batches them itself. Requests with the same
    context share it. Of contexts that begin alike, a small kvcache_block_size lets them share more.
    """

    def __init__(
        self,
        model: str,
        max_gen_toks: int = 256,
        enable_thinking: bool | None = None,
        device: str | None = None,
        batch_size: object = None,
        max_batch_size: object = None,
        peft: str | None = None,
        lora_local_path: str | None = None,
        **options: Any,
    ) -> None:
        """Load the model.

        model, device, options: as for LLM
        max_gen_toks: the most tokens to generate, for tasks that do not say it
        enable_thinking: an argument of the chat template; None: the template's own default
        batch_size, max_batch_size: lm-eval passes them; the LLM needs neither
        peft: the folder of an adapter, or its Hub id; None: the model alone
        lora_local_path: the same, as lm-eval's vLLM names it
        """
        super().__init__()
        folders = check_folders({ADAPTER: folder} if (folder := peft or lora_local_path) else None)
        self.llm = LLM(model, device=device or "auto", **with_slots(options, folders))
        load_all(self.llm, folders)
        self._adapter = ADAPTER if folders else None
        if self.llm.tokenizer is None:
            raise ValueError(f"model={model!r}: it has no tokenizer, which lm-eval needs; pass one as tokenizer=...")
        self.tokenizer = self.llm.tokenizer
        self._chats = ChatRenderer(self.tokenizer)
        self.max_gen_toks = max_gen_toks
        self._template = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    @property
    def max_length(self) -> int:
        """The most tokens that a context may have: one more is scored, or generated."""
        return self.llm.config.max_model_len - 1

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without a context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """The name by which lm-eval caches requests that a chat template wrote."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return a text's tokens; a text that begins with the prefix token, as chats do, gets no special ones."""
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a chat as its template writes it."""
        form = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return self._chats.render("chat_history", chat_history, {**form, **self._template})

    def _loglikelihood_tokens(
        self, requests: list[Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        prompts, params = [], []
        for _, context, continuation in requests:
            tokens = (context + continuation)[-(self.max_length + 1) :]
            start = len(tokens) - len(continuation)
            if start < 1:
                raise ValueError(f"a continuation has {len(continuation)} tokens: must be at most {self.max_length}")
            prompts.append(tokens)
            params.append(
                SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=start, adapter=self._adapter)
            )
        scores = map(score_of, self.llm.generate(prompts, params, use_tqdm=not disable_tqdm))
        results = [(score.logprob, score.is_greedy) for score in scores]
        self._cache("loglikelihood", [key for key, _, _ in requests], results)
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return each text's log-likelihood, computed in windows if it is longer than the model takes."""
        texts = [request.args for request in requests]
        windows = [self._windows(text) for (text,) in texts]
        scores = iter(self._loglikelihood_tokens([pair for pairs in windows for pair in pairs], disable_tqdm))
        sums = [sum(next(scores)[0] for _ in pairs) for pairs in windows]
        self._cache("loglikelihood_rolling", texts, sums)
        return sums

    def _windows(self, text: str) -> list[Pair]:
        windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1)
        return [(None, *make_disjoint_window(window)) for window in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the texts that follow the contexts, up to the tasks' stop strings."""
        prompts, params = [], []
        for context, settings in (request.args for request in requests):
            own = self._sampling_params(settings)
            assert own.max_tokens is not None
            tokens = self.tok_encode(context) or [self.prefix_token_id]
            prompts.append(tokens[-(self.max_length - own.max_tokens) :])
            params.append(own)
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        warn_of_errors(outputs)
        texts = [output.text for output in outputs]
        self._cache("generate_until", [request.args for request in requests], texts)
        return texts

    def _sampling_params(self, settings: dict[str, Any]) -> SamplingParams:
        known: dict[str, Any] = {
            "temperature": 0.0,
            "adapter": self._adapter,
            **normalize_gen_kwargs(settings, self.max_gen_toks),
        }
        del known["do_sample"]  # the temperature says it
        max_tokens, until = known.pop("max_gen_toks"), known.pop("until")
        if max_tokens >= self.max_length:
            raise ValueError(
                f"max_gen_toks={max_tokens}: must be less than {self.max_length}, to leave room for a context"
            )
        return SamplingParams(max_tokens=max_tokens, stop=[stop for stop in until if stop], **known)

    def _cache(self, kind: str, keys: Iterable[Any], results: Iterable[Any]) -> None:
        """Give lm-eval the results for its cache; windows of a text have no key."""
        for key, result in zip(keys, results, strict=True):
            if key is not None:
                self.cache_hook.add_partial(kind, key, result)


if __name__ == "__main__":
    sys.argv[1:1] = ["--model", "nanoinfer"]
    cli_evaluate()
