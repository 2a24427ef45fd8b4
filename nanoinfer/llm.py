"""LLM: the facade. It takes text, returns text, and refuses bad input before it computes a token."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from collections.abc import Sequence as ListLike
from contextlib import closing
from typing import TYPE_CHECKING, Any

from nanoinfer.config import Config
from nanoinfer.engine.results.stats import Stats
from nanoinfer.generation_config import find_sampling_params
from nanoinfer.hints import hints_for, vocabulary
from nanoinfer.process.collector import no_full_collection
from nanoinfer.replicas.start import Start
from nanoinfer.requests.admin.adapters import GivenLora
from nanoinfer.requests.admin.memory import SleepMode
from nanoinfer.requests.admin.prefixes import KeepsPrefixes
from nanoinfer.requests.admin.steering import LoadsSteerings
from nanoinfer.requests.admin.weights import ChangesWeights
from nanoinfer.requests.beam_search import SearchesBeams
from nanoinfer.requests.inputs import Chats, Inputs, Prompt
from nanoinfer.requests.outputs import RequestOutput, StreamOutput
from nanoinfer.requests.progress import Stream, UseTqdm, check_use_tqdm, run_all, stream_all
from nanoinfer.requests.prompts.stages import CallPrompts, Prepared
from nanoinfer.requests.queueing import QueuesRequests
from nanoinfer.requests.reading.methods import ReadsTexts
from nanoinfer.requests.scoring import ScoresTexts
from nanoinfer.requests.text.tokenizer import load_tokenizer
from nanoinfer.requests.text.tokenizing import TokenizesTexts
from nanoinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LLM(
    QueuesRequests,
    SearchesBeams,
    ReadsTexts,
    ScoresTexts,
    TokenizesTexts,
    ChangesWeights,
    LoadsSteerings,
    KeepsPrefixes,
    SleepMode,
):
    """A Hugging Face language model, ready to generate.

    model: a folder with config.json and *.safetensors, a Hub id, or "bundled", nanoinfer's small model
    options: see Options of LLM (the fields of nanoinfer.config.Config), such as tensor_parallel_size=2

    An LLM has these attributes:

    config: the options after the checks, with numbers in place of the None of max_model_len and num_kvcache_blocks
    memory: a MemoryPlan, which says how the device's memory is divided: print(llm.memory). The logger "nanoinfer"
        reports it once, at level INFO. With several replicas it is that of the one with the fewest blocks
    tokenizer: the checkpoint's own, or that of the option; None if there is none: prompts are token ids, texts empty
    adapters: those that load_adapter has loaded, each a LoadedAdapter by its name
    steerings: those that load_steering has loaded, by name: the numbers of the hidden states that each adds to
    weights_version: how often update_weights and load_weights have changed the weights
    is_sleeping: whether weights or KV cache, or both, are given away, see `sleep`

    One thread at a time can use an LLM. close() gives memory and processes back, as do the end of `with` and deletion.

    The methods of an LLM raise these errors:

    ValueError: an option, an argument or a setting cannot work, or the LLM is closed. The message names the argument,
        its value and what would work. Nothing has run yet; but for an image that cannot be opened, prompts before it
        may have begun: they are dropped
    RuntimeError: the LLM is busy: another thread generates, a stream is open, or requests of add_request have not
        ended. Or the LLM sleeps. Or an update of the weights broke off, and they are incomplete
    WorkerError: a tensor-parallel rank died or hangs, or the ranks of tensor_parallel_group were not called alike, or
        no replica is left. The LLM is closed, and later calls raise the error again
    KeyboardInterrupt: Ctrl-C in generate, chat, stream or step drops every request and leaves the LLM usable. With
        several ranks it takes effect when the step is complete. A second Ctrl-C, more than a second after the first,
        ends the ranks and closes the LLM. With tensor_parallel_group the first one may do so
    """

    _line = "an LLM that has not started"

    def __init__(self, model: str, **options: Any) -> None:
        with Start() as start:
            self.config = Config(model, **options, when_checked=start.spawn)
            start.begin(self.config)
            self.tokenizer = load_tokenizer(self.config)
            self._inputs = Inputs(self.config, self.tokenizer)
            how = self.config, self.tokenizer, self._inputs.reasoning
            self.engine, self._requests, self._line = start.finish(*how)
        self.memory = self.engine.memory
        self.config.num_kvcache_blocks, self.config.max_model_len = self.memory.asked, self.memory.max_model_len
        self._busy = threading.Lock()

    @hints_for("generate")
    def generate(
        self,
        prompts: Prompt | ListLike[Prompt],
        sampling_params: SamplingParams | ListLike[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: GivenLora = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt; returns the outputs in the prompts' order.

        If not all prompts can run at once, those that may get more tokens begin first.

        prompts: strings, lists of token ids, or mappings: {"prompt": text}, {"prompt_token_ids": ids}, or for a chat
            {"messages": [...]}, beside which "chat_template_kwargs" may hold the template's arguments. Of a text beside
            its token ids, the ids count. A lone string or mapping counts as a list of one. Beside any of these
            "cache_salt" may hold a string: the prompt shares the KV cache with prompts of the same string alone. A
            prompt has images as {"prompt": text, "multi_modal_data": {"image": [...]}}, or with "prompt_token_ids". For
            each it holds what the model's chat template writes for one, such as
            <|vision_start|><|image_pad|><|vision_end|>. An image is a PIL image, the bytes of its file, a data: URL, an
            array of uint8, [height, width, 3], or a path or a file: URL in the option image_folder. Nothing is fetched.
            Under "video", some models take videos: each is a list of frames, or an array of uint8, [frames, height,
            width, 3], and (frames, {"fps": 2}) says their rate. {"prompt_embeds": tensor}, or a list of tensors, [n,
            hidden_size], and lists of token ids, holds embeddings in place of tokens
        sampling_params: one for all prompts, or one for each; None: SamplingParams()
        use_tqdm: show a bar with the tokens per second of prefill and decode; or a function that makes it, as tqdm does
        lora_request: a LoRARequest for all prompts, or one or None for each; SamplingParams(adapter=...) does without

        Raises ValueError, before anything runs, for a prompt or a setting that cannot work. For an image that cannot be
        opened it is raised while the first prompts run, which are dropped.
        """
        with self._door("ready"):
            use_tqdm = check_use_tqdm(use_tqdm)
            adapters = self._adapters_of(lora_request)
            prepared = self._inputs.check_prompts(prompts, sampling_params, adapters)
            self._load_adapters(adapters, prepared, {params.adapter for params in prepared.params})
        return self._generate(prepared, use_tqdm)

    @hints_for("chat")
    def chat(
        self,
        messages: Chats,
        sampling_params: SamplingParams | ListLike[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: GivenLora = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Generate the next message of a chat, or of each chat in a list, by the tokenizer's chat template.

        messages: one chat, a list of mappings with "role" and "content", which is a string or a list of parts; or a
            list of chats. The template gets content, and arguments of tool calls, in the form that it takes. A part is
            {"type": "text", "text": text}, {"type": "image", "image": image}, {"type": "image_url", "image_url":
            {"url": ...}} or {"type": "video", "video": frames, "fps": 2}, with an image or frames as for generate
        sampling_params: one for all chats, or one for each; None: SamplingParams()
        use_tqdm: as for generate
        lora_request: as for generate
        chat_template_kwargs: arguments of the template; a warning names those that it does not read
        template: the same, such as enable_thinking=False, tools=[...], continue_final_message=True; it must read them

        Raises ValueError, before anything runs, as generate does, and for a chat that the template refuses.
        """
        with self._door("ready"):
            use_tqdm = check_use_tqdm(use_tqdm)
            adapters = self._adapters_of(lora_request)
            given = template, chat_template_kwargs, adapters
            prepared = self._inputs.check_chats(messages, sampling_params, *given)
            self._load_adapters(adapters, prepared, {params.adapter for params in prepared.params})
        return self._generate(prepared, use_tqdm)

    @hints_for("stream")
    def stream(
        self,
        prompts: Prompt | ListLike[Prompt],
        sampling_params: SamplingParams | ListLike[SamplingParams] | None = None,
    ) -> Stream[StreamOutput]:
        """Generate for every prompt; yields a StreamOutput whenever a sample has something new.

        A sample's last StreamOutput has a finish_reason.

        prompts: as for generate
        sampling_params: one for all prompts, or one for each; None: SamplingParams()

        If you leave a loop over llm.stream(...), the LLM aborts the samples that have not ended. A stream that you keep
        in a variable stays open from its first output on. No call but abort and close can then use the LLM until you
        exhaust the stream, close it (stream.close()), or delete it.

        Raises ValueError, before anything runs, as generate does.
        """
        with self._door("ready"):
            prepared = self._inputs.check_prompts(prompts, sampling_params).take_prompts()
            self._inputs.texts.check_streams("stream", [prompt.params for prompt in prepared])
        self._check_adapters(prompt.params for prompt in prepared)
        return Stream(self._stream(prepared))

    def default_sampling_params(self) -> SamplingParams:
        """Return SamplingParams with the checkpoint's generation_config.json; other settings have our defaults.

        Raises ValueError, naming the setting, if that file has one that SamplingParams does not have, or out of its
        range.
        """
        found = find_sampling_params(self.config.model, self.config.generation_config)
        try:
            return SamplingParams(**found)
        except ValueError as error:
            raise ValueError(f"model={self.config.model!r}: its generation_config.json: {error}") from None

    @hints_for("stats")
    def stats(self) -> Stats:
        """Return what this LLM has done since it started, or since reset_stats; print it for a few lines of text.

        All that ran counts: generate, chat, stream, score, beam_search and step, whether requests ended or were
        dropped. With several replicas, it is the sum over all, without what they have not told yet. Several ranks of
        one engine count once. It also works while requests run or a stream is open, and after close.
        """
        return self.engine.counters.stats()

    @hints_for("reset_stats")
    def reset_stats(self) -> None:
        """Let `stats` begin anew. Requests that run go on, and their later tokens count."""
        self.engine.counters.reset()

    def close(self) -> None:
        """Give back all device memory, processes and shared memory. A second call does nothing."""
        self.engine.close()
        self._requests.abort_all()
        self._inputs.close()

    @property
    def knows_reasoning(self) -> bool:
        """Whether outputs have their reasoning apart: the LLM has markers of thoughts, see reasoning_markers."""
        return self._inputs.reasoning is not None

    def __repr__(self) -> str:
        """Return the line that says what has started."""
        return self._line

    if TYPE_CHECKING:  # a type checker would else miss these, or take every name for one that is there
        llm_engine: Any

        def get_tokenizer(self) -> PreTrainedTokenizerBase:
            """Return `tokenizer`. Raises ValueError if there is none."""

        def get_default_sampling_params(self) -> SamplingParams:
            """Return default_sampling_params()."""

    else:

        def __getattr__(self, name: str) -> Any:
            return vocabulary().attribute(self, name)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _generate(self, prompts: CallPrompts, use_tqdm: UseTqdm) -> list[RequestOutput]:
        self._check_adapters(prompts.params)
        most_tokens = self.config.max_num_batched_tokens * self.config.data_parallel_size  # of a step

        def take() -> list[Prepared]:
            with self._door("open"):
                return prompts.take_prompts(most_tokens)

        with closing(prompts), self._turn(alone=True), no_full_collection(), self._requests:
            self._check_adapters(prompts.params)  # another thread may have unloaded one
            requests = run_all(self._requests, prompts.count, take, use_tqdm)
            return [request.output() for request in requests]

    def _stream(self, prompts: list[Prepared]) -> Generator[StreamOutput, None, None]:
        with self._turn(alone=True), self._requests:
            self._check_adapters(prompt.params for prompt in prompts)  # one may have been unloaded since stream
            requests = [self._requests.add(prompt, streams=True) for prompt in prompts]
            yield from stream_all(self._requests, requests, self.engine.check_open)
            self._requests.take_finished()
