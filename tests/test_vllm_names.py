"""An LLM answers by vLLM's names, and vllm_names puts nanoinfer under the module name vllm."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib
import importlib.metadata
import json
import os
import pickle
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cases.tuned import Tuned
from conftest import assert_equal, greedy
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from nanoinfer import BUNDLED_MODEL, LLM, BeamSearchParams
from nanoinfer.engine.beams.rules import VllmRules

CPU = {"dtype": "float32", "kvcache_block_size": 16, "num_kvcache_blocks": 512}
PROMPTS = ["ROMEO:\nWhat is", "My lord,"]
CHAT = [{"role": "user", "content": "Who goes there?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, **CPU) as llm:
        yield llm


@pytest.fixture(scope="module")
def vllm() -> Iterator[ModuleType]:
    """The module vllm; afterwards it is there no longer."""
    path, environment = list(sys.path), os.environ.get("PYTHONPATH")
    import nanoinfer.integrations.vllm.names as names

    names.install()
    yield importlib.import_module("vllm")
    sys.path[:] = path
    os.environ.pop("PYTHONPATH")
    if environment is not None:
        os.environ["PYTHONPATH"] = environment
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def vllm_llm(vllm: ModuleType) -> Iterator[Any]:
    with vllm.LLM(model=BUNDLED_MODEL, **CPU) as llm:
        yield llm


def test_the_tokenizer_and_the_settings(llm: LLM) -> None:
    assert llm.get_tokenizer() is llm.tokenizer is llm.llm_engine.get_tokenizer() is llm.llm_engine.tokenizer
    assert llm.get_default_sampling_params() == llm.default_sampling_params()


def test_the_models_settings(llm: LLM) -> None:
    config = llm.llm_engine.model_config
    assert config.max_model_len == config.max_seq_len_to_capture == llm.config.max_model_len
    assert (config.model, config.tokenizer, config.dtype) == (llm.config.model, llm.config.model, torch.float32)
    assert config.hf_config.model_type == "qwen3"
    assert config.get_vocab_size() == config.hf_text_config.vocab_size == llm.config.description.vocab_size
    assert llm.llm_engine.cache_config.enable_prefix_caching
    assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == llm.config.num_kvcache_blocks
    assert llm.llm_engine.vllm_config.scheduler_config.max_num_seqs == llm.config.max_num_seqs
    assert llm.llm_engine.get_model_config().max_model_len == config.max_model_len == llm.model_config.max_model_len


def test_no_tokenizer(make_qwen3: Any) -> None:
    with LLM(make_qwen3(), **CPU) as llm, pytest.raises(ValueError, match=r"has no tokenizer: LLM\(tokenizer=\.\.\.\)"):
        llm.llm_engine.get_tokenizer()


def test_single_tensors_come_by_the_path_of_trainers(llm: LLM) -> None:
    name, version = "model.norm.weight", llm.weights_version
    before = llm.generate(PROMPTS, greedy(4), use_tqdm=False)
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    weight = torch.ones(llm.llm_engine.model_config.hf_config.hidden_size)
    model.load_weights([(name, weight * 3)])
    assert llm.weights_version == version + 1
    assert [output.token_ids for output in llm.generate(PROMPTS, greedy(4), use_tqdm=False)]
    llm.load_weights(BUNDLED_MODEL)
    assert_equal(llm.generate(PROMPTS, greedy(4), use_tqdm=False), before)


def test_to_delete_the_executor_closes_the_llm(make_qwen3: Any) -> None:
    llm = LLM(make_qwen3(), **CPU)
    del llm.llm_engine.model_executor
    with pytest.raises(ValueError, match="this LLM is closed"):
        llm.generate([[5]])
    llm.llm_engine.model_executor.shutdown()  # a second time does nothing


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("encode", "llm.embed, llm.classify and llm.rerank read texts"),
        ("enqueue", "llm.add_request, llm.step"),
        ("collective_rpc", "llm.update_weights"),
        ("start_profile", "torch.profiler"),
        ("get_world_size", "tensor_parallel_size"),
        ("from_engine_args", r"LLM\(model, \.\.\.\)"),
    ],
)
def test_names_that_stay_absent_say_what_to_use(name: str, instead: str, llm: LLM) -> None:
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=f"'LLM' object has no attribute '{name}': .*{instead}"):
        getattr(llm, name)


def test_the_engine_says_which_names_it_has(llm: LLM) -> None:
    with pytest.raises(AttributeError, match=r"llm\.llm_engine has no 'engine_core': it has model_config, .*llm's own"):
        _ = llm.llm_engine.engine_core


def test_other_names_are_just_absent(llm: LLM) -> None:
    with pytest.raises(AttributeError, match=r"^'LLM' object has no attribute 'temperature'$"):
        _ = llm.temperature


def test_programs_find_vllm_and_its_version(vllm: ModuleType) -> None:
    assert find_spec("vllm") is not None
    assert find_spec("vllm.lora.request") is not None
    assert find_spec("vllm.model_executor") is None
    assert importlib.metadata.version("vllm") == vllm.__version__ == "0.10.1"
    assert importlib.metadata.packages_distributions()["vllm"] == ["vllm"]


def test_every_module_has_its_names(vllm: ModuleType) -> None:
    from nanoinfer.integrations.vllm.names.modules import MODULES

    for suffix, names in MODULES.items():
        module = importlib.import_module(f"vllm{suffix}")
        assert all(getattr(module, name) is own for name, own in names.items())
        assert find_spec(f"vllm{suffix}") is not None


def test_an_absent_name_says_so_when_it_is_used(vllm: ModuleType) -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    with pytest.raises(RuntimeError, match="no NCCLWeightTransferEngine: there is no server here"):
        NCCLWeightTransferEngine()
    with pytest.raises(AttributeError, match="there is no server here"):
        NCCLWeightTransferEngine.trainer_init()


def test_settings_have_vllms_defaults(vllm: ModuleType) -> None:
    params = vllm.SamplingParams(2, temperature=0.5)
    assert (params.n, params.max_tokens) == (2, 16)
    assert vllm.SamplingParams(max_tokens=None).max_tokens is None
    assert "top_k" in vllm.SamplingParams.__annotations__
    every = {name: getattr(params, name) for name in params.__struct_fields__}
    assert vllm.SamplingParams(**every) == params == params.clone() == pickle.loads(pickle.dumps(params))
    params.n = 3
    assert params == vllm.SamplingParams(3, temperature=0.5)


def test_forms_by_both_of_vllms_names(vllm: ModuleType) -> None:
    from vllm.sampling_params import GuidedDecodingParams, StructuredOutputsParams

    new = vllm.SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    old = vllm.SamplingParams(guided_decoding=GuidedDecodingParams(choice=["a", "b"], backend="auto"))
    assert new == old
    assert new.structured_outputs == {"choice": ("a", "b")}
    assert GuidedDecodingParams.from_optional(json=None) is None
    assert GuidedDecodingParams.from_optional(regex="a+").regex == "a+"
    old.guided_decoding = GuidedDecodingParams(regex="a+")
    assert old.structured_outputs == {"regex": "a+"}
    with pytest.raises(ValueError, match=r"guided_decoding=.*: must be None beside structured_outputs"):
        vllm.SamplingParams(guided_decoding={"regex": "a+"}, structured_outputs={"regex": "b+"})


def test_without_settings_the_checkpoints_count(vllm: ModuleType, tmp_path: Path) -> None:
    folder = shutil.copytree(BUNDLED_MODEL, tmp_path / "model")
    (folder / "generation_config.json").write_text(
        '{"temperature": 0.0, "repetition_penalty": 1.2, "max_new_tokens": 4}'
    )
    with vllm.LLM(str(folder), **CPU) as llm:
        own = llm.get_default_sampling_params()
        assert (own.repetition_penalty, own.max_tokens) == (1.2, 4)
        assert_equal(llm.generate(PROMPTS), llm.generate(PROMPTS, own))
        assert_equal(llm.chat(CHAT), llm.chat(CHAT, own))


def test_without_settings_of_the_checkpoints_vllms_defaults_count(vllm_llm: Any, vllm: ModuleType) -> None:
    assert vllm_llm.get_default_sampling_params() == vllm.SamplingParams()


def test_outputs_have_vllms_attributes(vllm_llm: Any, vllm: ModuleType, llm: LLM) -> None:
    params = vllm.SamplingParams(temperature=0, logprobs=1)
    outputs = vllm_llm.generate(PROMPTS, params)
    assert_equal(outputs, llm.generate(PROMPTS, greedy(16, logprobs=1)))
    output = outputs[1]
    assert isinstance(output, vllm.RequestOutput)
    assert isinstance(output.outputs[0], vllm.CompletionOutput)
    assert isinstance(output.request_id, str)
    assert output.lora_request is output.encoder_prompt is output.outputs[0].lora_request is None
    times = output.metrics
    assert times.num_generation_tokens == len(output.token_ids)
    assert times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts
    assert times.first_token_latency == times.first_token_ts - times.queued_ts
    assert 0 <= time.time() - times.arrival_time < 60
    assert output.outputs[0].cumulative_logprob == pytest.approx(sum(max(d.values()) for d in output.logprobs))


def test_lora_requests(vllm: ModuleType, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("mine", 1, Tuned(BUNDLED_MODEL, seed=1).save(tmp_path))
    params = vllm.SamplingParams(temperature=0, max_tokens=8)
    args = vllm.EngineArgs(BUNDLED_MODEL, enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2, **CPU)
    with vllm.LLM.from_engine_args(args) as made:
        outputs = made.generate(PROMPTS[:1] * 2, params, lora_request=[lora, None])
        assert [output.lora_request for output in outputs] == [lora, None]
        assert outputs[0].outputs[0].lora_request == lora
        (chat,) = made.chat(CHAT, params, lora_request=lora)
        assert chat.lora_request == lora
        (ours,) = LLM.generate(made, PROMPTS[:1], greedy(8, adapter="mine"))
    assert outputs[0].token_ids == ours.token_ids != outputs[1].token_ids

    engine = vllm.AsyncLLMEngine.from_engine_args(args)

    async def use() -> list[Any]:
        found = []
        for name, request in (("with", lora), ("without", None)):
            async for output in engine.generate(PROMPTS[0], params, request_id=name, lora_request=request):
                last = output
            found.append(last)
        other = LoRARequest("other", 2, lora.lora_path)
        with pytest.raises(ValueError, match="prompt is empty"):
            await anext(engine.generate([], params, request_id="empty", lora_request=other))
        return found

    found = asyncio.run(use())
    assert list(engine._llm.adapters) == ["mine"]
    engine.shutdown()
    assert [output.outputs[0].token_ids for output in found] == [output.token_ids for output in outputs]
    assert [output.lora_request for output in found] == [lora, None]


def test_prompts_as_tokens(vllm_llm: Any, vllm: ModuleType) -> None:
    params = vllm.SamplingParams(temperature=0, max_tokens=4)
    ids = vllm_llm.tokenize(PROMPTS)
    expected = vllm_llm.generate(PROMPTS, params)
    for given, wanted in ((ids, expected), (ids[0], expected[:1])):
        with pytest.warns(DeprecationWarning, match="'prompt_token_ids'"):
            found = vllm_llm.generate(prompt_token_ids=given, sampling_params=params)
        assert_equal(found, wanted)
    with pytest.warns(DeprecationWarning, match="'prompt_token_ids'"):
        (read,) = vllm_llm.encode(prompt_token_ids=ids[0], pooling_task="embed")
    assert read.prompt_token_ids == ids[0]
    assert_equal(vllm_llm.generate([vllm.TokensPrompt(prompt_token_ids=own) for own in ids], params), expected)
    (output,) = vllm_llm.generate({"prompt": PROMPTS[0], "prompt_token_ids": ids[0]}, params)
    assert (output.prompt, output.token_ids) == (PROMPTS[0], expected[0].token_ids)


def test_wrong_arguments_are_refused_as_ever(vllm_llm: Any, vllm: ModuleType) -> None:
    from vllm.lora.request import LoRARequest

    with pytest.raises(ValueError, match="max_adapters=0: this LLM has no room for adapters"):
        vllm_llm.generate(PROMPTS, lora_request=LoRARequest("mine", 1, "/nowhere"))
    with pytest.raises(ValueError, match="max_new_tokens"):
        vllm.SamplingParams(max_new_tokens=3)
    with pytest.raises(ValueError, match="prompts=None"):
        vllm_llm.generate()
    wrong = pytest.raises(ValueError, match="prompt_token_ids='ROMEO': must be a list of token ids")
    with wrong, pytest.warns(DeprecationWarning, match="'prompt_token_ids'"):
        vllm_llm.generate(prompt_token_ids="ROMEO")


def test_beam_search_counts_as_vllm_does(vllm_llm: Any, llm: LLM) -> None:
    assert type(vllm_llm).beam_rules is VllmRules
    params = BeamSearchParams(beam_width=2, max_tokens=6)
    (output,) = vllm_llm.beam_search(PROMPTS[:1], params)
    best = output.sequences[0]
    ended = best.finish_reason == "stop"
    assert best.score == pytest.approx(best.cum_logprob / (len(best.tokens) - ended), abs=1e-5)
    with pytest.raises(ValueError, match="early_stopping=True: must be False by vLLM's names"):
        vllm_llm.beam_search(PROMPTS, BeamSearchParams(2, 6, early_stopping=True))


def test_the_template_and_the_tokenizer(vllm: ModuleType) -> None:
    from vllm.renderers.hf import resolve_chat_template
    from vllm.tokenizers import get_tokenizer

    tokenizer = get_tokenizer(BUNDLED_MODEL, tokenizer_mode="auto", trust_remote_code=True, revision=None)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(BUNDLED_MODEL).chat_template
    assert get_tokenizer("bundled").get_vocab() == tokenizer.get_vocab()
    assert resolve_chat_template(tokenizer, None, None, model_config=None) == tokenizer.chat_template
    assert resolve_chat_template(tokenizer, "{{ messages }}") == "{{ messages }}"
    tokenizer.chat_template = None
    assert resolve_chat_template(tokenizer) is None


def test_the_model_config_of_engine_args(vllm: ModuleType) -> None:
    assert vllm.EngineArgs(model=BUNDLED_MODEL, max_model_len=300).create_model_config().max_model_len == 300


async def collected(engine: Any, prompt: Any, params: Any, name: str) -> Any:
    """The last output of a request."""
    return [output async for output in engine.generate(prompt, params, request_id=name)][-1]


def test_the_asynchronous_engine(vllm: ModuleType, llm: LLM) -> None:
    engine = vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(BUNDLED_MODEL, enable_log_requests=False, **CPU))
    params = vllm.SamplingParams(temperature=0, max_tokens=8)
    assert engine.model_config.max_model_len == llm.config.max_model_len

    async def use() -> None:
        outputs = await asyncio.gather(*(collected(engine, prompt, params, prompt) for prompt in PROMPTS))
        assert_equal(outputs, llm.generate(PROMPTS, greedy(8)))
        with pytest.raises(ValueError, match="prompt is empty"):
            await collected(engine, [], params, "empty")

        long = vllm.SamplingParams(max_tokens=1000, ignore_eos=True)
        running = asyncio.create_task(collected(engine, PROMPTS[0], long, "long"))
        await asyncio.sleep(0.1)
        with pytest.raises(ValueError, match="request_id='long'"):
            await collected(engine, PROMPTS[0], params, "long")
        await engine.abort("long")
        assert (await running).finish_reason == "abort"

        left = asyncio.create_task(collected(engine, PROMPTS[0], long, "left"))
        await asyncio.sleep(0.1)
        left.cancel()
        assert (await collected(engine, PROMPTS[1], params, "after")).token_ids == outputs[1].token_ids

    asyncio.run(use())
    asyncio.run(use())  # another loop
    engine.shutdown()
    engine.shutdown()


def test_it_refuses_where_vllm_is_installed(vllm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanoinfer.integrations.vllm.names import install

    (tmp_path / "vllm").mkdir()
    monkeypatch.delitem(sys.modules, "vllm")
    monkeypatch.syspath_prepend(str(tmp_path))
    install()  # a mere folder of this name
    (tmp_path / "vllm" / "__init__.py").touch()
    importlib.invalidate_caches()
    with pytest.raises(ImportError, match=rf"vllm is installed, at {tmp_path}"):
        install()


SCRIPT = """
import sys
from multiprocessing import get_context

from beside import HERE
from vllm import LLM, SamplingParams

def read() -> str:
    return SamplingParams.__module__

if __name__ == "__main__":
    assert sys.argv[1:] == ["--size", "2"], sys.argv
    assert HERE
    with get_context("spawn").Pool(1) as pool:
        print(pool.apply(read))
    with LLM(sys.modules["nanoinfer"].BUNDLED_MODEL, tensor_parallel_size=int(sys.argv[2])) as llm:
        print(len(llm.generate("ROMEO:", SamplingParams(ignore_eos=True), use_tqdm=False)[0].token_ids))
"""


def command(*arguments: object, folder: Path, name: str = "vllm") -> subprocess.CompletedProcess[str]:
    told = [sys.executable, "-m", f"nanoinfer.integrations.{name}", *map(str, arguments)]
    path = os.pathsep.join([str(Path(__file__).parent.parent), str(folder)])
    return subprocess.run(told, capture_output=True, text=True, cwd=folder, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.whole  # three processes import, one after the other
@pytest.mark.parametrize(
    ("how", "name"), [(["sub/script.py"], "vllm_names"), (["-m", "sub.script"], "vllm")], ids=["script", "module"]
)
def test_a_script_runs_by_the_command_and_so_do_its_processes(how: list[str], name: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text(SCRIPT)
    for folder in (tmp_path, tmp_path / "sub"):
        (folder / "beside.py").write_text("HERE = True\n")
    result = command(*how, "--size", 2, folder=tmp_path, name=name)
    assert result.stdout.split() == ["nanoinfer.integrations.vllm.names.params", "16"], result.stderr


def test_the_command_refuses_a_vllm_beside_the_script(
    vllm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").touch()
    (tmp_path / "script.py").write_text("import vllm")
    monkeypatch.delitem(sys.modules, "vllm")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["vllm_names", str(tmp_path / "script.py")])
    with pytest.raises(ImportError, match=rf"vllm is installed, at {tmp_path}"):
        runpy.run_module("nanoinfer.integrations.vllm", run_name="__main__")


def test_the_command_without_a_script_says_how_to_use_it(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for told in ([], ["-m"], ["--help"]):
        monkeypatch.setattr(sys, "argv", ["vllm_names", *told])
        with pytest.raises(SystemExit, match=r"usage: python -m nanoinfer\.integrations\.vllm"):
            runpy.run_module("nanoinfer.integrations.vllm", run_name="__main__")


@pytest.mark.parametrize("n", [1, 2])
def test_outputs_while_requests_run(n: int, vllm: ModuleType, vllm_llm: Any) -> None:
    """CUMULATIVE ones have all so far, and DELTA ones what is new; FINAL_ONLY comes once."""
    from vllm.sampling_params import RequestOutputKind

    kinds = {kind.name: vllm.SamplingParams(n=n, seed=1, max_tokens=6, output_kind=kind) for kind in RequestOutputKind}
    assert kinds["DELTA"].clone().output_kind is RequestOutputKind.DELTA
    engine, told = vllm.LLMEngine(vllm_llm), {name: [] for name in kinds}
    for name, params in kinds.items():
        engine.add_request(name, PROMPTS[0], params)
    with pytest.raises(ValueError, match="request_id='DELTA': a request of this name runs"):
        engine.add_request("DELTA", PROMPTS[0], kinds["DELTA"])
    while engine.has_unfinished_requests():
        for output in engine.step():
            told[output.request_id].append(output)
    assert engine.get_num_unfinished_requests() == 0

    expected = vllm_llm.generate(PROMPTS[:1], kinds["DELTA"])
    assert_equal(told["FINAL_ONLY"], expected)
    assert_equal(told["CUMULATIVE"][-1:], expected)
    assert [output.finished for output in told["CUMULATIVE"]] == [False] * (len(told["CUMULATIVE"]) - 1) + [True]
    lengths = [len(output.outputs[0].token_ids) for output in told["CUMULATIVE"]]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]
    new = [sample for output in told["DELTA"] for sample in output.outputs]
    for sample in expected[0].outputs:
        own = [one for one in new if one.index == sample.index]
        assert "".join(one.text for one in own) == sample.text
        assert [token for one in own for token in one.token_ids] == sample.token_ids
        assert [one.finish_reason for one in own] == [None] * (len(own) - 1) + [sample.finish_reason]


def test_an_engine_ends_requests(vllm: ModuleType, vllm_llm: Any) -> None:
    engine, long = vllm.LLMEngine(vllm_llm), vllm.SamplingParams(max_tokens=1000, ignore_eos=True)
    for name in ("one", "other"):
        engine.add_request(name, PROMPTS[0], long)
    engine.step()
    engine.abort_request(["one", "other"])
    ended = {output.request_id: output for _ in range(2) for output in engine.step() if output.finished}
    assert [output.outputs[0].finish_reason for output in ended.values()] == ["abort"] * 2
    assert not engine.has_unfinished_requests()


def test_requests_wait_for_room_for_their_adapters(vllm: ModuleType, tmp_path: Path) -> None:
    """Those of LLMEngine, and of tasks; but not if nothing that runs will make room."""
    from vllm.lora.request import LoRARequest

    params = vllm.SamplingParams(temperature=0, max_tokens=8)
    folder = Tuned(BUNDLED_MODEL, seed=1).save(tmp_path)
    loras = [LoRARequest(name, number, folder) for number, name in enumerate(("a", "b", "c"), 1)]
    args = vllm.EngineArgs(BUNDLED_MODEL, enable_lora=True, max_loras=1, max_lora_rank=16, **CPU)
    engine = vllm.LLMEngine.from_engine_args(args)
    for lora in loras:
        engine.add_request(lora.lora_name, PROMPTS[0], params, lora_request=lora)
    ended = []
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finished]
    assert ended == ["a", "b", "c"]
    engine.model_executor.shutdown()

    engine = vllm.AsyncLLMEngine.from_engine_args(args)

    async def ask(lora: Any) -> Any:
        return [one async for one in engine.generate(PROMPTS[0], params, lora.lora_name, lora_request=lora)][-1]

    async def use() -> list[Any]:
        return await asyncio.gather(*map(ask, loras))

    outputs = asyncio.run(use())
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    engine._call(lambda llm: [llm.unload_adapter(name) for name in list(llm.adapters)])
    engine._call(lambda llm: llm.load_adapter("mine", folder))
    with pytest.raises(ValueError, match="these must stay: 'mine'"):
        asyncio.run(use())
    engine.shutdown()


class TestCommandLines:
    """EngineArgs on a command line, read by a FlexibleArgumentParser."""

    @pytest.fixture
    def parser(self, vllm: ModuleType) -> Any:
        from vllm.utils import FlexibleArgumentParser

        parser = FlexibleArgumentParser(description="a program")
        parser.add_argument("--own_count", type=int, default=2)
        return vllm.EngineArgs.add_cli_args(parser)

    def test_options(self, parser: Any, vllm: ModuleType) -> None:
        """Words have dashes or underscores; nobody has said the others, and LLM takes them so."""
        given = "--model bundled --max_model_len=300 --dtype float32 --enforce-eager -tp 1 --no-enable-chunked-prefill"
        args = parser.parse_args([*given.split(), "--swap-space", "4", "--limit-mm-per-prompt", '{"image": 2}'])
        assert (args.own_count, args.max_model_len, args.enforce_eager) == (2, 300, True)
        made = vllm.EngineArgs.from_cli_args(args)
        said = {name: value for name, value in dataclasses.asdict(made).items() if value is not None}
        assert said == {
            "model": "bundled",
            "max_model_len": 300,
            "dtype": "float32",
            "enforce_eager": True,
            "tensor_parallel_size": 1,
            "enable_chunked_prefill": False,
            "swap_space": 4,
            "limit_mm_per_prompt": {"image": 2},
        }

    def test_what_nobody_says_changes_nothing(self, parser: Any, vllm: ModuleType, llm: LLM) -> None:
        parser.set_defaults(model=BUNDLED_MODEL, runner="generate", **CPU)
        args = vars(parser.parse_args(["--own-count", "3"]))
        assert args.pop("own_count") == 3
        with vllm.LLM(**args) as made:
            assert_equal(made.generate(PROMPTS, greedy(4)), llm.generate(PROMPTS, greedy(4)))

    def test_wrong_ones(self, parser: Any, vllm: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(ValueError, match="unknown argument 'max_len': did you mean"):
            vllm.EngineArgs(BUNDLED_MODEL, max_len=3)
        with pytest.raises(SystemExit):
            parser.parse_args(["--colour", "red"])
        assert "unrecognized arguments: --colour red" in capsys.readouterr().err


class TestReadingTexts:
    """What models that read texts return, as vLLM's programs take it."""

    TEXTS = ("ROMEO:", "My lord, what is the time?")

    def test_embeddings(self, vllm: ModuleType, vllm_llm: Any, llm: LLM) -> None:
        expected = llm.embed(list(self.TEXTS))
        found = vllm_llm.embed(list(self.TEXTS), pooling_params=vllm.PoolingParams())
        for one, wanted in zip(found, expected, strict=True):
            assert isinstance(one, vllm.EmbeddingRequestOutput)
            assert isinstance(one.request_id, str)
            assert one.finished
            assert one.prompt_token_ids == wanted.prompt_token_ids
            assert one.outputs.embedding == pytest.approx(wanted.embedding.tolist(), abs=1e-6)
            assert one.outputs.hidden_size == len(wanted.embedding)
        encoded = vllm_llm.encode(list(self.TEXTS), pooling_task="embed")
        assert [one.outputs.data.tolist() for one in encoded] == [one.outputs.embedding for one in found]
        raw = vllm_llm.encode(list(self.TEXTS), vllm.PoolingParams(normalize=False), pooling_task="embed")
        for one, whole in zip(raw, encoded, strict=True):
            length = one.outputs.data.norm()
            assert length > 2
            assert torch.allclose(one.outputs.data / length, whole.outputs.data, atol=1e-6)

    def test_cosines(self, vllm_llm: Any, llm: LLM) -> None:
        one, other = (output.embedding for output in llm.embed(list(self.TEXTS)))
        found = vllm_llm.score(self.TEXTS[0], list(self.TEXTS))
        assert [output.outputs.score for output in found] == pytest.approx([1.0, float(one @ other)], abs=1e-5)
        with pytest.raises(ValueError, match=r"data_2=.*: must be a text and several, or as many texts as others"):
            vllm_llm.score(list(self.TEXTS), [self.TEXTS[0]] * 3)

    @pytest.mark.parametrize("labels", [1, 3])
    def test_classifiers(self, labels: int, vllm: ModuleType, tmp_path: Path) -> None:
        config = AutoConfig.from_pretrained(BUNDLED_MODEL, num_labels=labels, pad_token_id=0)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
        AutoTokenizer.from_pretrained(BUNDLED_MODEL).save_pretrained(tmp_path)
        own = {"dtype": "float32", "num_kvcache_blocks": 8}  # two share a GPU
        with LLM(str(tmp_path), **own) as ours, vllm.LLM(str(tmp_path), **own) as theirs:
            expected = ours.classify(list(self.TEXTS))
            found = theirs.classify(list(self.TEXTS))
            assert [one.outputs.probs for one in found] == [
                pytest.approx(one.probs.tolist(), abs=1e-6) for one in expected
            ]
            assert found[0].outputs.num_classes == labels
            scores = [pytest.approx(one.logits.tolist(), abs=1e-6) for one in expected]
            raw = vllm.PoolingParams(activation=False)
            rewards = theirs.reward(list(self.TEXTS), pooling_params=vllm.PoolingParams(softmax=False))
            assert [one.outputs.data.tolist() for one in rewards] == scores
            assert [one.outputs.data.tolist() for one in theirs.reward(list(self.TEXTS))] == [
                one.outputs.probs for one in found
            ]
            assert [one.outputs.probs for one in theirs.classify(list(self.TEXTS), pooling_params=raw)] == scores
            encoded = theirs.encode(list(self.TEXTS), raw, pooling_task="classify")
            assert [one.outputs.data.tolist() for one in encoded] == scores
            if labels == 1:
                wanted = [float(one.score) for one in ours.rerank(self.TEXTS[0], list(self.TEXTS))]
                scores = [one.outputs.score for one in theirs.score(self.TEXTS[0], list(self.TEXTS))]
                assert scores == pytest.approx(wanted, abs=1e-6)
                found = theirs.score(self.TEXTS[0], list(self.TEXTS), pooling_params=raw)
                logits = torch.tensor([one.outputs.score for one in found])
                assert logits.sigmoid().tolist() == pytest.approx(wanted, abs=1e-6)

    def test_what_cannot_be_read(self, vllm: ModuleType, vllm_llm: Any) -> None:
        with pytest.raises(ValueError, match="pooling_task='encode': must be 'embed' or 'classify'"):
            vllm_llm.encode(list(self.TEXTS))
        for name in ("normalize", "activation", "softmax"):
            with pytest.raises(ValueError, match=f"{name}='no': must be True or False"):
                vllm.PoolingParams(**{name: "no"})
        with pytest.raises(ValueError, match=r"pooling_params=.*: must be equal in one call"):
            vllm_llm.embed(list(self.TEXTS), pooling_params=[vllm.PoolingParams(dimensions=size) for size in (4, 8)])


def test_schemas_forbid_what_they_do_not_declare(vllm: ModuleType) -> None:
    """As xgrammar's strict mode does; a schema that says what else there may be keeps it, and values stay values."""
    inner = {"type": "object", "properties": {"properties": {"type": "string"}, "b": {"$ref": "#/$defs/open"}}}
    schema = {
        **{"type": "object", "properties": {"a": {"anyOf": [inner, {"const": {"properties": {}}}]}}},
        "$defs": {"open": {"properties": {"c": {}}, "additionalProperties": {"type": "integer"}}},
    }
    strict = {
        **{"type": "object", "additionalProperties": False, "$defs": schema["$defs"]},
        "properties": {"a": {"anyOf": [{**inner, "additionalProperties": False}, {"const": {"properties": {}}}]}},
    }
    forms = vllm.sampling_params.StructuredOutputsParams, vllm.sampling_params.GuidedDecodingParams, dict
    for form in forms:
        for given in (schema, json.dumps(schema)):
            made = vllm.SamplingParams(structured_outputs=form(json=given))
            assert json.loads(made.structured_outputs["json"]) == strict
    with pytest.raises(ValueError, match="'json' must be a JSON Schema"):
        vllm.SamplingParams(structured_outputs={"json": "{"})


@pytest.fixture(scope="module")
def ruled(vllm: ModuleType) -> Iterator[Any]:
    forms = vllm.config.StructuredOutputsConfig(backend="auto", disable_any_whitespace=True)
    with vllm.LLM(BUNDLED_MODEL, max_logprobs=2, structured_outputs_config=forms, **CPU) as llm:
        yield llm


class TestRules:
    """What options of an LLM say of all its requests."""

    @pytest.mark.parametrize("setting", ["logprobs", "prompt_logprobs"])
    def test_the_most_logprobs(self, setting: str, ruled: Any, vllm: ModuleType) -> None:
        assert len(ruled.generate(PROMPTS, vllm.SamplingParams(max_tokens=1, **{setting: 2}))) == 2
        for count in (3, -1):
            params = vllm.SamplingParams(max_tokens=1, **{setting: count})
            message = f"{setting}={count}: must be an integer from 0 to 2, as LLM(max_logprobs=...) says"
            for call in (
                lambda params=params: ruled.generate(PROMPTS, [vllm.SamplingParams(), params]),
                lambda params=params: ruled.chat(CHAT, params),
                lambda params=params: vllm.LLMEngine(ruled).add_request("a", PROMPTS[0], params),
            ):
                with pytest.raises(ValueError, match=re.escape(message)):
                    call()

    def test_json_without_white_space(self, ruled: Any, vllm: ModuleType, vllm_llm: Any) -> None:
        items = {"type": "array", "items": {"const": 1}, "minItems": 3, "maxItems": 3}
        (space,) = ruled.tokenize(" ")
        params = vllm.SamplingParams(structured_outputs={"json": items}, logit_bias={space: 50}, temperature=0)
        assert ruled.generate(PROMPTS[:1], params)[0].text == "[1,1,1]"
        assert params.structured_outputs == vllm.SamplingParams(structured_outputs={"json": items}).structured_outputs
        assert vllm_llm.generate(PROMPTS[:1], params)[0].text == "[ 1 , 1 , 1 ]"
        choice = vllm.SamplingParams(structured_outputs={"choice": ["a b"]})
        assert ruled.generate(PROMPTS[:1], choice)[0].text == "a b"

    def test_by_the_older_name_and_without_limits(self, vllm: ModuleType) -> None:
        rules = importlib.import_module("nanoinfer.integrations.vllm.names.rules").Rules
        old = {"guided_decoding_disable_any_whitespace": True, "max_logprobs": -1, "swap_space": 4}
        assert rules.take(old) == (None, True)
        assert old == {"swap_space": 4}
        for wrong in ({"max_logprobs": "a"}, {"guided_decoding_disable_any_whitespace": "a"}):
            with pytest.raises(ValueError, match="='a': must be"):
                rules.take(wrong)


def test_a_class_of_logits_processors_with_a_function_for_each_request(vllm: ModuleType) -> None:
    """As vLLM's own example wraps one: settings say by extra_args which token is drawn."""
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    def only(target: int, output: list[int], logits: torch.Tensor) -> torch.Tensor:
        mask = torch.full_like(logits, float("-inf"))
        mask[target + len(output)] = 0
        return mask

    class Wrapped(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            target = (params.extra_args or {}).get("target_token")
            return None if target is None else functools.partial(only, target)

    with vllm.LLM(BUNDLED_MODEL, logits_processors=[Wrapped], **CPU) as own, LLM(BUNDLED_MODEL, **CPU) as plain:
        targets = [{"target_token": 70}, None, {"target_token": 90}]
        params = [vllm.SamplingParams(temperature=0, max_tokens=3 + i, extra_args=a) for i, a in enumerate(targets)]
        first, second, third = own.generate([PROMPTS[0]] * 3, params)
        assert [first.outputs[0].token_ids, third.outputs[0].token_ids] == [[70, 71, 72], [90, 91, 92, 93, 94]]
        (expected,) = plain.generate([PROMPTS[0]], greedy(4), use_tqdm=False)
        assert second.outputs[0].token_ids == expected.token_ids


def test_metrics(vllm: ModuleType) -> None:
    from vllm.v1.metrics.reader import Counter, Metric

    with vllm.LLM(BUNDLED_MODEL, disable_log_stats=False, **CPU) as llm:
        outputs = llm.generate(PROMPTS * 2, vllm.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        metrics = llm.get_metrics()
    assert all(isinstance(metric, Metric) and isinstance(metric, Counter) for metric in metrics)
    told = {metric.name: metric.value for metric in metrics if not metric.labels}
    assert told["vllm:generation_tokens"] == 16
    assert told["vllm:prompt_tokens"] == sum(len(output.prompt_token_ids) for output in outputs)
    ends = {metric.labels["finished_reason"]: metric.value for metric in metrics if metric.labels}
    assert ends["length"] == 4


@pytest.mark.parametrize("priority", [[0], [0, 0, 0], [], [0, 1]])
def test_priorities_are_equal_and_one_for_each_prompt(priority: list[int], vllm_llm: Any) -> None:
    with pytest.raises(ValueError, match=r"priority=.*: must be None or 0, for all prompts or one for each"):
        vllm_llm.generate(PROMPTS, priority=priority)


def test_prompts_of_one_cache_salt_share_what_is_computed(vllm: ModuleType, vllm_llm: Any) -> None:
    salted = [vllm.TokensPrompt(prompt_token_ids=list(range(5, 45)), cache_salt=salt) for salt in ("a", "b")]
    params = vllm.SamplingParams(max_tokens=1)
    cached = [[output.num_cached_tokens for output in vllm_llm.generate(salted, params)] for _ in range(2)]
    assert cached == [[0, 0], [32, 32]]
    with pytest.raises(ValueError, match=r"prompts\[0\]\['cache_salt'\] is '': must be a non-empty string"):
        vllm_llm.generate({"prompt": "a", "cache_salt": ""})


def test_log_probabilities_are_plain_floats(vllm_llm: Any, vllm: ModuleType) -> None:
    (output,) = vllm_llm.generate(PROMPTS[:1], vllm.SamplingParams(max_tokens=1, logprobs=1))
    assert {type(entry.logprob) for entry in output.outputs[0].logprobs[0].values()} == {float}
    with vllm_llm.deprecate_legacy_api():
        pass


def test_what_programs_ask_of_the_machine(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs
    from vllm.platforms import current_platform

    has_cuda = torch.cuda.is_available()
    assert (current_platform.is_cuda(), current_platform.is_cpu(), current_platform.is_rocm()) == (
        has_cuda,
        not has_cuda,
        False,
    )
    assert current_platform.device_type == ("cuda" if has_cuda else "cpu")
    monkeypatch.setenv("VLLM_SOMETHING", "1")
    assert (envs.VLLM_SOMETHING, envs.VLLM_OTHER) == ("1", None)


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("config", "KVTransferConfig", "no other engine takes part in a prompt"),
        ("assets.image", "ImageAsset", "nothing is fetched"),
    ],
)
def test_what_is_not_here_says_what_to_use(module: str, name: str, instead: str, vllm: ModuleType) -> None:
    found = importlib.import_module(f"vllm.{module}")
    with pytest.raises(RuntimeError, match=f"nanoinfer has no {name}: {re.escape(instead)}"):
        getattr(found, name)("an argument")
    with pytest.raises(ImportError, match=r"cannot import name 'Nothing' from 'vllm\..*modules\.py"):
        exec(f"from vllm.{module} import Nothing")
