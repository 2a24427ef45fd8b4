"""vLLM's arguments are accepted at values that change nothing; for others an error says what to write instead."""

from __future__ import annotations

import inspect
import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import greedy
from tqdm import tqdm

from nanoinfer import BUNDLED_MODEL, LLM, BeamSearchParams, LoRARequest, SamplingParams
from nanoinfer.config import Config
from nanoinfer.integrations.vllm.arguments import ADVICE, ARGUMENTS, OURS, PAGE, SAME, _warn_once, check, reason_for
from nanoinfer.integrations.vllm.spellings import OTHER_NAMES
from nanoinfer.integrations.vllm.values import ANY, FLAG
from nanoinfer.integrations.words import ELSEWHERE
from nanoinfer.requests.chat.renderer import ChatRenderer
from nanoinfer.requests.chat.template_names import TemplateNames

OWN = {
    "LLM": set(inspect.signature(Config).parameters),
    "SamplingParams": set(inspect.signature(SamplingParams).parameters),
    "BeamSearchParams": set(inspect.signature(BeamSearchParams).parameters),
    "LoRARequest": set(inspect.signature(LoRARequest).parameters),
    "beam_search": set(inspect.signature(LLM.beam_search).parameters),
    "generate": set(inspect.signature(LLM.generate).parameters),
    "chat": set(inspect.signature(LLM.chat).parameters),
    "sleep": set(inspect.signature(LLM.sleep).parameters),
    "reset_prefix_cache": set(inspect.signature(LLM.reset_prefix_cache).parameters),
}
CHAT = [{"role": "user", "content": "But, soft!"}]


class OutputKind(Enum):
    """As vLLM's RequestOutputKind."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class UsersBar(tqdm):
    """A bar that leaves this process as it is: tqdm's own lock settles how processes start, and its monitor stays."""

    monitor_interval = 0


UsersBar.set_lock(threading.RLock())


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, device="cpu", max_model_len=128, num_kvcache_blocks=8) as llm:
        yield llm


class TestTable:
    def test_it_has_no_name_of_ours(self) -> None:
        for taker, arguments in ARGUMENTS.items():
            assert not OWN[taker] & arguments.keys()

    @pytest.mark.parametrize("groups", [*SAME.values(), {**OURS, **ADVICE}], ids=[*SAME, "reasons"])
    def test_a_name_is_in_one_list(self, groups: dict[Any, str]) -> None:
        names = [name for listed in groups.values() for name in listed.split()]
        assert len(names) == len(set(names))

    def test_what_its_reasons_tell_to_write_is_there(self) -> None:
        known = {name for arguments in ARGUMENTS.values() for name in arguments}
        assert {name for listed in [*OURS.values(), *ADVICE.values()] for name in listed.split()} <= known
        written = [
            (taker, name)
            for reason in (*OURS, *ADVICE)
            for taker, names in re.findall(r"\b(\w*LLM|\w+Params)\(([^)]*)\)", reason)
            for name in re.findall(r"(\w+)=", names)
        ]
        assert len(written) > 20
        assert [(taker, name) for taker, name in written if name not in OWN[taker]] == []
        calls = [call for reason in (*OURS, *ADVICE) for call in re.findall(r"\bllm\.(\w+)\(", reason)]
        assert {"chat", "score", "stream"} <= set(calls)
        assert [call for call in calls if not hasattr(LLM, call)] == []

    @pytest.mark.parametrize("taker", ARGUMENTS)
    def test_each_takes_none_and_says_why_not_more(self, taker: str) -> None:
        for name, same in ARGUMENTS[taker].items():
            check(taker, name, None, {})
            if same == ANY:
                check(taker, name, object(), {})
                continue
            with pytest.raises(ValueError, match=rf"^{name}=<object .*: must be None.*: \w") as error:
                check(taker, name, object(), {})
            assert str(error.value).endswith(f": {reason_for(name)}")

    def test_what_has_no_reason_of_its_own_leads_to_the_page(self) -> None:
        with pytest.raises(ValueError, match=f"^use_fp64_gumbel=True: must be None or False: {re.escape(PAGE)}$"):
            check("LLM", "use_fp64_gumbel", True, {})
        assert (Path(__file__).parent.parent / PAGE.split()[0]).exists()

    @pytest.mark.parametrize("taker", ARGUMENTS)
    def test_elsewhere_the_hint_is_the_reason(self, taker: str) -> None:
        """And no name that happens to look alike."""
        for other, call in (("LLM", partial(Config, BUNDLED_MODEL)), ("SamplingParams", SamplingParams)):
            taken = OWN[other] | ARGUMENTS[other].keys() | OTHER_NAMES.get(other, {}).keys()
            for name in ARGUMENTS[taker].keys() - taken - ELSEWHERE.keys():
                with pytest.raises(ValueError, match=f"^unknown argument '{name}': ") as error:
                    call(**{name: 5})
                assert str(error.value).endswith(f": {reason_for(name)}")


class TestOptions:
    def test_values_that_change_nothing(self) -> None:
        config = Config(
            BUNDLED_MODEL,
            convert="none",
            model_impl="vllm",
            tokenizer_mode="auto",
            skip_tokenizer_init=False,
            download_dir=None,
            hf_overrides={},
            generation_config="vllm",
            enable_prefix_caching=True,
            enable_chunked_prefill=False,
            disable_sliding_window=True,
            block_size=16,
            swap_space=4,
            cpu_offload_gb=0.0,
            enable_sleep_mode=True,
            num_gpu_blocks_override=None,
            max_num_batched_tokens=None,
            enforce_eager=None,
            seed=None,
            pipeline_parallel_size=1,
            distributed_executor_backend="mp",
            disable_custom_all_reduce=True,
            long_prefill_token_threshold_adaptive=False,
            max_model_len=-1,
            enable_expert_parallel=False,
            compilation_config={"level": 3},
            max_seq_len_to_capture=8192,
            enable_lora=False,
            max_lora_rank=16,
            logits_processors=[],
            max_logprobs=-1,
            disable_log_stats=True,
            enable_return_routed_experts=False,
        )
        assert config == Config(BUNDLED_MODEL)

    @pytest.mark.parametrize(
        ("theirs", "ours"),
        [
            (
                {"limit_mm_per_prompt": {"image": 4, "video": 1}},
                {"limit_images_per_prompt": 4, "limit_videos_per_prompt": 1},
            ),
            (
                {"limit_mm_per_prompt": {"image": 0, "video": {"count": 1}}},
                {"limit_images_per_prompt": 0, "limit_videos_per_prompt": 1},
            ),
            ({"limit_mm_per_prompt": {"video": 0}}, {"limit_videos_per_prompt": 0}),
            ({"limit_mm_per_prompt": {"image": 0, "video": 0}}, {"images": False}),
            ({"limit_mm_per_prompt": {"image": {"count": 4, "width": 64}}}, {"limit_images_per_prompt": 4}),
            ({"limit_mm_per_prompt": {"image": 0}}, {"images": False}),
            ({"limit_mm_per_prompt": {"audio": 0}}, {}),
            ({"limit_mm_per_prompt": None}, {}),
            (
                {"mm_processor_kwargs": {"max_pixels": 4096, "fps": 1, "do_sample_frames": False}},
                {"image_options": {"max_pixels": 4096, "fps": 1}},
            ),
            ({"allowed_local_media_path": BUNDLED_MODEL}, {"image_folder": BUNDLED_MODEL}),
            ({"allowed_local_media_path": ""}, {}),
            ({"language_model_only": True}, {"images": False}),
            ({"language_model_only": False}, {}),
            ({"task": "embed"}, {"runner": "pooling"}),
            ({"task": "generate"}, {"runner": "generate"}),
        ],
        ids=repr,
    )
    def test_options_by_their_names(self, theirs: dict, ours: dict) -> None:
        assert Config(BUNDLED_MODEL, **theirs) == Config(BUNDLED_MODEL, **ours)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"limit_mm_per_prompt": 4}, "limit_mm_per_prompt=4: must be a mapping, such as {'image': 4, 'video': 1}"),
            ({"limit_mm_per_prompt": {"image": -1}}, "limit_images_per_prompt=-1: must be an integer of at least 0"),
            ({"mm_processor_kwargs": 3}, "image_options=3: must be a mapping"),
            ({"allowed_local_media_path": "/nowhere"}, "image_folder='/nowhere': must be a folder"),
            ({"language_model_only": 3}, "language_model_only=3: must be True or False"),
            (
                {"allowed_local_media_path": "/", "image_folder": "."},
                "allowed_local_media_path='/': must be left out beside image_folder='.'",
            ),
        ],
        ids=repr,
    )
    def test_options_of_images_that_cannot_be(self, options: dict, message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            Config(BUNDLED_MODEL, **options)

    @pytest.mark.parametrize(
        ("theirs", "ours"),
        [
            ({"enable_lora": True}, {"max_adapters": 1}),
            ({"enable_lora": True, "max_loras": 4, "max_lora_rank": 32}, {"max_adapters": 4, "max_adapter_rank": 32}),
            ({"max_loras": 4, "max_cpu_loras": 8, "enable_lora": np.True_}, {"max_adapters": 4}),
            ({"enable_lora": False, "max_loras": 4}, {}),
            ({"enable_lora": None, "max_lora_rank": None, "lora_dtype": "auto", "fully_sharded_loras": True}, {}),
        ],
        ids=repr,
    )
    def test_options_of_adapters_by_their_names(self, theirs: dict, ours: dict) -> None:
        assert Config(BUNDLED_MODEL, **theirs) == Config(BUNDLED_MODEL, **ours)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"enable_lora": 1}, "enable_lora=1: must be True or False"),
            ({"enable_lora": True, "max_loras": 0}, "max_loras=0: must be"),
            ({"max_loras": 0}, "max_loras=0: must be None or a positive integer: write LLM(max_adapters=...)"),
            ({"max_lora_rank": 513}, "max_adapter_rank=513: must be an integer from 1 to 512"),
            ({"enable_lora": True, "max_adapters": 2}, "enable_lora=True: must be left out beside max_adapters=2"),
        ],
        ids=repr,
    )
    def test_options_of_adapters_that_cannot_be(self, options: dict, message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            Config(BUNDLED_MODEL, **options)

    @pytest.mark.parametrize("length", [None, "auto", -1, np.int64(-1)])
    def test_the_longest_sequence_that_fits(self, length: Any) -> None:
        assert Config(BUNDLED_MODEL, max_model_len=length) == Config(BUNDLED_MODEL)

    def test_a_group_of_settings_may_be_as_it_is_made(self) -> None:
        @dataclass
        class AttentionConfig:
            backend: str | None = None
            num_splits: int = 32

        unset = {
            "backend": "auto",
            "disable_any_whitespace": False,
            "reasoning_parser": "",
            "more": {"max_bytes": None},
        }
        expected = Config(BUNDLED_MODEL)
        assert expected == Config(BUNDLED_MODEL, attention_config=AttentionConfig(), structured_outputs_config=unset)
        for wrong in (
            AttentionConfig("FLASHINFER"),
            AttentionConfig,
            {"backend": "FLASHINFER"},
            {"num_splits": 0},
            "x",
        ):
            with pytest.raises(ValueError, match=r"must be None, empty or its default: write LLM\(attention_backend="):
                Config(BUNDLED_MODEL, attention_config=wrong)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"lora_dtype": "float16"}, r"must be None or 'auto': docs/coming-from-elsewhere.md says"),
            ({"enable_lora_bias": True}, r"must be None or False: merge such an adapter into its base"),
            ({"default_mm_loras": {"image": "here"}}, r"must be None or empty: .*SamplingParams\(adapter=...\)"),
            ({"enable_prefix_caching": "no"}, r"must be None or True: .*; llm.reset_prefix_cache\(\) forgets it"),
            (
                {"structured_outputs_config": {"reasoning_parser": "a"}},
                "must be None, empty or its default: llguidance",
            ),
            ({"kv_cache_memory_bytes": 2**30}, r"must be None: write LLM\(num_kvcache_blocks=...\)"),
            ({"num_gpu_blocks_override": 64}, r"must be None: write LLM\(num_kvcache_blocks=...\)"),
            (
                {"generation_config": "/here"},
                r"must be None, 'auto' or 'vllm': pass SamplingParams; see llm.default_sampling_params\(\)",
            ),
            ({"quantization_config": {"bits": 4}}, r"must be None or empty: .*LLM\(quantization=...\)"),
            ({"cpu_offload_gb": "4"}, "cpu_offload_gb='4': must be a number of GiB, at least 0"),
            ({"cpu_offload_params": {"a"}}, "must be None or empty: layers lie in host memory whole"),
            ({"pipeline_parallel_size": 2}, r"must be None or 1: write LLM\(tensor_parallel_size=...\)"),
            ({"model_impl": "transformers"}, "must be None, 'auto' or 'vllm': docs/coming-from-elsewhere.md says"),
            (
                {"convert": "classify"},
                r"must be None, 'auto', 'none' or 'embed': write LLM\(runner=...\)",
            ),
            ({"skip_tokenizer_init": True}, r"must be None or False: .*SamplingParams\(detokenize=False\)"),
            ({"enable_return_routed_experts": True}, r"must be None or False: write LLM\(routed_experts=True\)"),
            ({"block_size": 0}, "must be None or a positive integer"),
            ({"swap_space": -1}, "must be None or a number of at least 0"),
            ({"disable_log_stats": "no"}, "must be None, True or False"),
            (
                {"distributed_executor_backend": OutputKind},
                "an LLM starts its ranks itself, or has those of tensor_par",
            ),
            ({"speculative_model": "a"}, r"must be None or empty: write LLM\(speculation=...\)"),
            (
                {"speculative_config": {"method": "eagle"}},
                "its method must be 'ngram', 'suffix', 'mtp' or 'draft_model': nano",
            ),
        ],
        ids=repr,
    )
    def test_others_are_refused(self, wrong: dict, message: str) -> None:
        (name,) = wrong
        with pytest.raises(ValueError, match=f"^{name}=.*{message.removeprefix(f'{name}=')}"):
            Config(BUNDLED_MODEL, **wrong)

    @pytest.mark.parametrize(
        "given",
        [
            {"enable_prefix_caching": False},
            {"guided_decoding_backend": "xgrammar:no-fallback"},
            {"structured_outputs_config": {"backend": "outlines", "disable_fallback": True}},
        ],
        ids=repr,
    )
    def test_what_changes_speed_alone_is_taken_with_one_warning(
        self, given: dict, caplog: pytest.LogCaptureFixture
    ) -> None:
        ((name, value),) = given.items()
        _warn_once.cache_clear()
        for _ in range(2):
            check("LLM", name, value, {})
        (said,) = caplog.messages
        assert said.startswith(f"{name}={value!r} is left out: ")

    def test_ngrams_as_a_model(self) -> None:
        config = Config(BUNDLED_MODEL, speculative_config={"model": "[ngram]", "num_speculative_tokens": 3})
        assert (config.speculation, config.max_guesses) == ("suffix", 3)

    def test_a_launched_process_is_a_model_or_has_a_group(self) -> None:
        """As TRL starts vLLM: with external_launcher each process is a rank."""
        check_backend = partial(check, "LLM", "distributed_executor_backend")
        launched = "external_launcher"
        for beside in (
            {},
            {"tensor_parallel_size": 1},
            {"tensor_parallel_size": 2, "tensor_parallel_group": "a group"},
        ):
            check_backend(launched, beside)
        for beside in ({"tensor_parallel_size": 2}, {"data_parallel_size": 2}):
            with pytest.raises(ValueError, match=r"'external_launcher' with one process a model: .*tensor_parallel_g"):
                check_backend(launched, beside)

    @pytest.mark.parametrize("library", [np.array, torch.tensor])
    def test_values_may_come_from_any_library(self, library: Any) -> None:
        values = {
            "enable_fault_tolerance": False,
            "enable_prefix_caching": True,
            "pipeline_parallel_size": 1,
            "swap_space": 4.5,
        }
        for name, value in values.items():
            check("LLM", name, library(value), {})
            with pytest.raises(ValueError, match=f"{name}="):
                check("LLM", name, library([value, value]), {})

    def test_a_boolean_is_no_number(self) -> None:
        for name, wrong in (("pipeline_parallel_size", True), ("enable_dbo", 0), ("kv_offloading_size", False)):
            with pytest.raises(ValueError, match=f"{name}={wrong}: "):
                check("LLM", name, wrong, {})


class TestSamplingParams:
    @pytest.mark.parametrize("kind", [OutputKind.CUMULATIVE, OutputKind.FINAL_ONLY, 0, 2])
    def test_values_that_change_nothing(self, kind: object) -> None:
        params = SamplingParams(
            n=2,
            best_of=2,
            use_beam_search=False,
            length_penalty=1.0,
            early_stopping=False,
            logits_processors=[],
            guided_decoding=None,
            spaces_between_special_tokens=True,
            truncate_prompt_tokens=None,
            output_kind=kind,
            extra_args={},
            skip_clone=True,
            prompt_logprob_start=0,
        )
        assert params == SamplingParams(n=2)
        assert SamplingParams(spaces_between_special_tokens=False) == SamplingParams()

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"best_of": 2}, r"best_of=2: must be None or n: write SamplingParams\(n=...\)"),
            ({"n": 2, "best_of": 3}, "best_of=3: must be None or n: "),
            ({"use_beam_search": True}, "must be None or False: write llm.beam_search"),
            ({"length_penalty": 2}, "must be None or 1: write llm.beam_search"),
            ({"logits_processors": [len]}, r"must be a list of functions of \(token_ids, logits\)"),
            ({"guided_decoding": {"json": {}}}, r"write SamplingParams\(structured_outputs=...\)"),
            (
                {"output_kind": OutputKind.DELTA},
                "must be None, CUMULATIVE or FINAL_ONLY: write llm.stream",
            ),
            ({"output_kind": True}, "must be None, CUMULATIVE or FINAL_ONLY"),
            ({"truncate_prompt_tokens": -1}, "must be None: a prompt that is too long is refused: cut it before"),
            ({"prompt_logprob_start": 3}, r"write SamplingParams\(prompt_logprobs_start=...\)"),
            ({"skip_reading_prefix_cache": True}, "cache_salt"),
        ],
        ids=repr,
    )
    def test_others_are_refused(self, wrong: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            SamplingParams(**wrong)


class TestCalls:
    def test_values_that_change_nothing(self, llm: LLM) -> None:
        nothing = {"priority": None, "tokenization_kwargs": {}, "mm_processor_kwargs": None}
        (expected,) = llm.generate("But, soft!", greedy(2), use_tqdm=False)
        (output,) = llm.generate("But, soft!", greedy(2), use_tqdm=False, **nothing, guided_options_request=None)
        assert output.token_ids == expected.token_ids
        assert len(llm.generate([[5], [6]], greedy(1), use_tqdm=False, priority=[0, 0])) == 2
        (expected,) = llm.chat(CHAT, greedy(2), use_tqdm=False)
        others = {"chat_template": None, "tools": None, "chat_template_kwargs": None}
        (output,) = llm.chat(CHAT, greedy(2), False, **nothing, **others, chat_template_content_format="auto")
        assert (output.prompt, output.token_ids) == (expected.prompt, expected.token_ids)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (
                {"priority": [0, 1]},
                r"priority=\[0, 1\]: must be None or 0, for all prompts or one for each: requests begin",
            ),
            ({"priority": [0, 0, 0]}, r"priority=\[0, 0, 0\]: must be None or 0, for all prompts or one for each"),
            (
                {"tokenization_kwargs": {"truncation": True}},
                "must be None or empty: pass prompts of token ids to tokeni",
            ),
            ({"mm_processor_kwargs": {"fps": 2}}, r"must be None or empty: write LLM\(image_options="),
        ],
        ids=repr,
    )
    def test_others_are_refused(self, wrong: dict, message: str, llm: LLM) -> None:
        for call, argument in ((llm.generate, [[5], [6]]), (llm.chat, CHAT)):
            with pytest.raises(ValueError, match=message):
                call(argument, greedy(1), **wrong)
        with pytest.raises(ValueError, match="must be None, 'auto', 'string' or 'openai': docs/coming-from-else"):
            llm.chat(CHAT, chat_template_content_format="html")

    def test_a_function_may_make_the_bar(self, llm: LLM) -> None:
        """As vLLM calls it."""
        written = StringIO()
        made: list[tqdm] = []

        def make(**options: Any) -> tqdm:
            made.append(UsersBar(file=written, mininterval=0, **options))
            return made[0]

        llm.generate([[5], [6]], greedy(2), use_tqdm=make)
        assert (made[0].total, made[0].n, made[0].disable) == (2, 2, True)  # closed
        assert "2/2" in written.getvalue()
        assert "decode" in written.getvalue()
        llm.chat(CHAT, greedy(1), use_tqdm=partial(UsersBar, file=written, leave=False))

    def test_a_function_that_makes_no_bar(self, llm: LLM) -> None:
        for wrong in (int, lambda **options: None):
            with pytest.raises(ValueError, match=r"use_tqdm=.*: must make a bar as tqdm does: "):
                llm.generate([[5]], greedy(1), use_tqdm=wrong)
        assert llm.engine.is_finished


READS = [
    ("{{ messages }}{% if loud %}!{% endif %}", {"loud"}),
    ("{% if not date is defined %}{% set date = 'today' %}{% endif %}{{ date }}", {"date"}),
    ("{% set loud = loud if loud is defined else true %}{{ loud }}", {"loud"}),
    ("{% macro say(text) %}{{ text }}{{ end }}{% endmacro %}{{ say('a') }}", {"end"}),
    ("{% set own = 1 %}{{ own }}{% for m in messages %}{{ loop.index }}{% endfor %}", set()),
    ("{% set ns = namespace(found=first) %}{{ ns.found }}{{ raise_exception('a') }}", {"first"}),
    ("{% for m in messages %}{% generation %}{{ mark }}{% endgeneration %}{% break %}{% endfor %}", {"mark"}),
    ("{% set text %}{{ inner }}{% endset %}{{ text | upper }}", {"inner"}),
]
GIVEN = {"chat_template", "add_generation_prompt", "continue_final_message"}


class TestTemplates:
    @pytest.mark.parametrize(("template", "names"), READS)
    def test_a_template_takes_the_names_that_it_reads(self, template: str, names: set[str]) -> None:
        assert TemplateNames(template).known == names | GIVEN

    def test_nobody_knows_what_a_broken_template_reads(self) -> None:
        assert TemplateNames("{% if %}").unknown({"loud": 1}) == []

    def test_what_the_template_does_not_read_is_refused(self, llm: LLM) -> None:
        template = "{{ messages[0].content }}{% if loud %}!{% endif %}"
        call = partial(llm.chat, CHAT, greedy(1), use_tqdm=False, chat_template=template)
        assert call(loud=True, tools=[], documents=None)[0].prompt == "But, soft!!"
        for wrong, hint in ({"lout": 1}, "did you mean 'loud'"), ({"tools": [{}]}, "known: .*, loud$"):
            with pytest.raises(
                ValueError, match=f"unknown argument '{next(iter(wrong))}': the chat template .*; {hint}"
            ):
                call(**wrong)

    def test_chat_template_kwargs_are_read_or_warned_of_once(self, llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
        template = "{{ messages[0].content }}{{ loud }}"
        call = partial(llm.chat, CHAT, greedy(1), use_tqdm=False)
        given = {"chat_template": template, "loud": 1, "colour": 2, "tokenize": True}
        prompt = {"messages": CHAT, "chat_template_kwargs": given, "cache_salt": None}
        with caplog.at_level(logging.WARNING, "nanoinfer"):
            assert call(chat_template_kwargs=given)[0].prompt == "But, soft!1"
            assert call(chat_template_kwargs=given, loud=3, chat_template=None)[0].prompt == "But, soft!3"
            assert llm.generate(prompt, greedy(1), use_tqdm=False)[0].prompt == "But, soft!1"
        assert [record.getMessage() for record in caplog.records] == [
            f"chat_template_kwargs has {name!r}, which the chat template does not read: it is left out"
            for name in ("colour", "tokenize")
        ]
        of_nothing = {"chat_template": template, "loud": 1, "tokenize": None, "messages": [], "conversation": None}
        assert call(chat_template_kwargs=of_nothing)[0].prompt == "But, soft!1"
        with pytest.raises(ValueError, match=r"chat_template_kwargs=\[1\]: must be a mapping from the template's arg"):
            call(chat_template_kwargs=[1])

    def test_each_of_named_templates_has_names_of_its_own(self, llm: LLM) -> None:
        chats = ChatRenderer(llm.tokenizer)
        named = {"default": "{{ a }}", "tool_use": "{{ b }}{{ tools }}"}
        own, llm.tokenizer.chat_template = llm.tokenizer.chat_template, named
        try:
            chats.check_arguments({"a": 1}, {"a": 1})
            chats.check_arguments({"b": 1}, {"b": 1, "tools": [{}]})
            with pytest.raises(ValueError, match="unknown argument 'b'"):
                chats.check_arguments({"b": 1}, {"b": 1})
        finally:
            llm.tokenizer.chat_template = own


def test_a_flag_is_any_flag() -> None:
    for value in (True, False, np.True_, torch.tensor(False)):
        assert FLAG.has(value, {})
    assert not FLAG.has(1, {})
