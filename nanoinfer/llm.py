"""LLM: the facade. Text in, text out, and every mistake found before the first token is spent."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterable, Mapping, Set
from collections.abc import Sequence as ListLike
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict

from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nanoinfer.config import Config
from nanoinfer.engine.llm_engine import LLMEngine, StepResult
from nanoinfer.engine.sequence import Sequence
from nanoinfer.sampling_params import SamplingParams

Prompt = str | ListLike[int]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


class RequestOutput(TypedDict):
    """What came of one prompt. `token_ids` ends with the end-of-sequence token if there was one; `text` leaves out
    special tokens, and is empty when the model has no tokenizer."""

    text: str
    token_ids: list[int]


class LLM:
    """A Hugging Face language model, ready to generate.

    model: a folder with config.json and *.safetensors, or a Hub id; without a tokenizer it takes token-id prompts only
    options: the fields of nanoinfer.config.Config, such as tensor_parallel_size=2

    Holds its device memory and processes until close(), the end of its `with` block, or its deletion.
    Raises ValueError for an option or a model that cannot work, naming it and what would.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.config = Config.create(model, **options)
        self.tokenizer = _load_tokenizer(self.config.model)
        self.engine = LLMEngine(self.config)
        self._busy = threading.Lock()

    def generate(
        self,
        prompts: Prompt | ListLike[Prompt],
        sampling_params: SamplingParams | ListLike[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for every prompt; returns their outputs in the prompts' order.

        prompts: strings or lists of token ids; a lone string counts as a list of one
        sampling_params: one for all prompts, one for each, or None for the defaults
        use_tqdm: show a bar with the tokens per second of prefill and decode

        Raises ValueError, before anything runs, for a prompt or a setting that cannot work.
        """
        if self.engine.is_closed:
            raise ValueError("this LLM is closed: make another")
        token_ids, params = self._check(prompts, sampling_params)
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("another thread is generating with this LLM: pass all prompts in one call")
        try:
            seqs = [self.engine.add_request(*request) for request in zip(token_ids, params, strict=True)]
            self._run(len(seqs), use_tqdm)
        except BaseException:
            self.engine.abort_all()
            raise
        finally:
            self._busy.release()
        return [self._output(seq) for seq in seqs]

    def close(self) -> None:
        """Give back all device memory, processes and shared memory; safe to call twice."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, num_requests: int, use_tqdm: bool) -> None:
        with tqdm(total=num_requests, desc="Generating", dynamic_ncols=True, disable=not use_tqdm) as bar:
            rates = Rates()
            while not self.engine.is_finished:
                result = self.engine.step()
                if use_tqdm and (rates.update(result) or result.finished):
                    bar.set_postfix_str(str(rates), refresh=False)
                    bar.update(len(result.finished))

    def _check(
        self,
        prompts: Prompt | ListLike[Prompt],
        sampling_params: SamplingParams | ListLike[SamplingParams] | None,
    ) -> tuple[list[list[int]], list[SamplingParams]]:
        """The prompts as token ids, and each one's settings."""
        items = [prompts] if isinstance(prompts, str) else _as_list("prompts", prompts)
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            params = [sampling_params] * len(items)
        else:
            params = _as_list("sampling_params", sampling_params)
        if len(params) != len(items):
            raise ValueError(
                f"sampling_params has {len(params)} entries for {len(items)} prompts: give one, or one each"
            )
        for index, entry in enumerate(params):
            if not isinstance(entry, SamplingParams):
                raise ValueError(f"sampling_params[{index}] is {entry!r}: must be a SamplingParams")
        return [self._check_prompt(index, item) for index, item in enumerate(items)], params

    def _check_prompt(self, index: int, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    f"prompts[{index}] is text, but {self.config.model!r} has no tokenizer: pass a list of token ids"
                )
            try:
                token_ids = self.tokenizer.encode(prompt)
            except TypeError:  # such as half a surrogate pair
                raise ValueError(f"prompts[{index}] is {_short(prompt)}: the tokenizer does not take it") from None
        else:
            try:
                if isinstance(prompt, (bytes, bytearray, Mapping, Set)):
                    raise TypeError
                token_ids = array("q", prompt).tolist()  # type: ignore[call-overload]
            except (TypeError, ValueError, OverflowError):
                raise ValueError(
                    f"prompts[{index}] is {_short(prompt)}: must be a string or a list of token ids"
                ) from None
        if not token_ids:
            raise ValueError(f"prompts[{index}] is empty: it must have at least one token")
        vocab_size = self.config.hf_config.vocab_size
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"prompts[{index}] has token id {token_id}: must be from 0 to {vocab_size - 1}")
        if len(token_ids) >= self.config.max_model_len:
            raise ValueError(
                f"prompts[{index}] has {len(token_ids)} tokens: must be fewer than"
                f" max_model_len={self.config.max_model_len}, to leave room for a token"
            )
        return token_ids

    def _output(self, seq: Sequence) -> RequestOutput:
        token_ids = seq.output_token_ids
        text = "" if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return RequestOutput(text=text, token_ids=token_ids)


class Rates:
    """Tokens per second of prefill and of decode, each over the time that its steps took."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._prefill = [0, 0.0]  # tokens, seconds
        self._decode = [0, 0.0]

    def update(self, result: StepResult) -> bool:
        """Count one step, over the time since the one before it; returns whether it was a prefill step."""
        if result.ready_at is None:
            return False
        counter = self._prefill if result.num_prefill_tokens else self._decode
        counter[0] += result.num_prefill_tokens + result.num_decode_tokens
        counter[1] += result.ready_at - self._last
        self._last = result.ready_at
        return result.num_prefill_tokens > 0

    def __str__(self) -> str:
        prefill, decode = (tokens / max(seconds, 1e-9) for tokens, seconds in (self._prefill, self._decode))
        return f"prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s"


def _load_tokenizer(folder: str) -> PreTrainedTokenizerBase | None:
    if not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"model={folder!r}: cannot load its tokenizer: {error}") from error


def _as_list(name: str, value: Any) -> list[Any]:
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"{name}={_short(value)}: must be a list")
    return list(value)


def _short(value: object, most: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
