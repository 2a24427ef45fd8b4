"""What a user can get wrong: a ValueError that names the argument and what would work, before anything runs."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import greedy
from safetensors.torch import load_file, save_file

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams
from nanoinfer.checkpoint import Checkpoint
from nanoinfer.config import Config, _resolve_dtype


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, max_model_len=64, num_kvcache_blocks=8) as llm:
        yield llm


def copy_of(model: str, folder: Path, **changes: object) -> str:
    """A copy of a model with some of its config.json changed."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


class TestPrompts:
    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ("", r"prompts\[1\] is empty"),
            ([], r"prompts\[1\] is empty"),
            ([5, 2048], r"prompts\[1\] has token id 2048: must be from 0 to 2047"),
            ([-1], r"prompts\[1\] has token id -1"),
            ([5] * 64, r"prompts\[1\] has 64 tokens: must be fewer than max_model_len=64"),
            ([1.5], r"prompts\[1\] is \[1.5\]: must be a string or a list of token ids"),
            (7, r"prompts\[1\] is 7"),
            (None, r"prompts\[1\] is None"),
            ([2**70], r"prompts\[1\] has a token id of over 64 bits: must be from 0 to 2047"),
            (["a"], r"prompts\[1\] is \['a'\]"),
            ({5, 6}, r"prompts\[1\] is {5, 6}"),
            ("half a pair \udc80", r"prompts\[1\] is .*: the tokenizer does not take it"),
            (b"bytes", r"prompts\[1\] is b'bytes'"),
            ({1: 2}, r"prompts\[1\] is {1: 2}"),
        ],
        ids=repr,
    )
    def test_a_bad_prompt_is_found_by_its_index_before_the_first_token(
        self, llm: LLM, prompt: object, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            llm.generate([[5], prompt], greedy(1), use_tqdm=False)
        assert llm.engine.is_finished

    def test_no_prompts_give_no_outputs(self, llm: LLM) -> None:
        assert llm.generate([], greedy(1)) == []

    @pytest.mark.parametrize("prompts", [None, 5, {"prompt": "text"}])
    def test_prompts_that_are_no_list(self, llm: LLM, prompts: object) -> None:
        with pytest.raises(ValueError, match=f"prompts={prompts}: must be a string or a list of prompts"):
            llm.generate(prompts, greedy(1))

    def test_one_prompt_of_token_ids_is_not_taken_for_many(self, llm: LLM) -> None:
        for prompts in ([5, 6], np.array([5, 6])):
            with pytest.raises(ValueError, match=r"must be a list of prompts; of one prompt's token ids, \[\[...\]\]"):
                llm.generate(prompts, greedy(1))

    def test_add_request_takes_one(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="prompt is None: must be a string or a list of token ids"):
            llm.add_request(None)

    def test_a_lone_string_is_a_list_of_one(self, llm: LLM) -> None:
        assert len(llm.generate("ROMEO:", greedy(1), use_tqdm=False)) == 1

    def test_other_integer_types_are_token_ids_too(self, llm: LLM) -> None:
        tensor = torch.tensor([30, 31, 32])
        outputs = llm.generate([tensor, tensor.numpy(), (30, 31, 32), [30, 31, 32]], greedy(4), use_tqdm=False)
        assert len({tuple(output["token_ids"]) for output in outputs}) == 1

    def test_text_needs_a_tokenizer_and_token_ids_do_not(self, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
        folder = Path(copy_of(BUNDLED_MODEL, tmp_path / "bare"))
        for file in folder.glob("tokenizer*"):
            file.unlink()
        bare = make_llm(str(folder))
        (output,) = bare.generate([[30, 31]], greedy(4), use_tqdm=False)
        assert len(output["token_ids"]) == 4
        assert output["text"] == ""
        with pytest.raises(ValueError, match=r"prompts\[0\] is text.*has no tokenizer: pass a list of token ids"):
            bare.generate(["text"], greedy(4))
        with pytest.raises(ValueError, match=r"sampling_params.stop=\('a',\) needs text, but .* has no tokenizer"):
            bare.generate([[30]], greedy(4, stop="a"))
        assert [new["text"] for new in bare.stream([[30, 31]], greedy(2))] == ["", ""]


class TestSamplingParams:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"temperature": -0.1},
            {"temperature": float("nan")},
            {"temperature": float("inf")},
            {"temperature": "hot"},
            {"max_tokens": 0},
            {"max_tokens": 1.5},
            {"max_tokens": None},
            {"max_tokens": True},
            {"temperature": 10**400},
            {"temperature": 1e39},
            {"ignore_eos": "no"},
            {"seed": -1},
            {"seed": 2**63},
            {"seed": 0.5},
            {"n": 0},
            {"n": True},
            {"top_k": -2},
            {"top_k": 1.5},
            {"top_p": 0},
            {"top_p": 1.1},
            {"top_p": float("nan")},
            {"min_p": -0.1},
            {"min_p": 1.5},
            {"repetition_penalty": 0},
            {"repetition_penalty": float("inf")},
            {"repetition_penalty": 1e-300},
            {"presence_penalty": 2.5},
            {"frequency_penalty": -3},
            {"frequency_penalty": "some"},
            {"logit_bias": 3},
            {"stop_token_ids": 5},
            {"stop_token_ids": {5: 6}},
            {"stop": {"a": "b"}},
            {"include_stop_str_in_output": 1},
            {"min_tokens": -1},
            {"min_tokens": 65},
            {"logprobs": -1},
            {"prompt_logprobs": True},
            {"skip_special_tokens": None},
            {"detokenize": "yes"},
        ],
        ids=repr,
    )
    def test_a_setting_out_of_range_is_named_with_its_value(self, wrong: dict) -> None:
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: must be")):
            SamplingParams(**wrong)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"logit_bias": {-1: 2.0}}, r"logit_bias has -1: 2.0: must map token ids to numbers from -1e\+30"),
            ({"logit_bias": {1: float("nan")}}, "logit_bias has 1: nan"),
            ({"logit_bias": {1: 10**400}}, "logit_bias has 1: 1000"),
            ({"stop": ["a", ""]}, "stop has '': must be a list of non-empty strings"),
            ({"stop": 5}, "stop=5: must be a list"),
            ({"stop_token_ids": [3, "x"]}, "stop_token_ids has 'x': must be a list of token ids"),
            ({"stop": "a", "detokenize": False}, r"stop=\('a',\) needs detokenize=True"),
        ],
        ids=repr,
    )
    def test_an_entry_that_does_not_fit_is_named(self, wrong: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            SamplingParams(**wrong)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"logit_bias": {2048: 1.0}}, r"sampling_params\[1\].logit_bias has token id 2048: must be from 0 to 2047"),
            ({"stop_token_ids": [9999]}, r"sampling_params\[1\].stop_token_ids has token id 9999"),
            ({"logprobs": 2049}, r"sampling_params\[1\].logprobs=2049: the model has 2048 tokens"),
        ],
        ids=repr,
    )
    def test_what_the_model_does_not_have_is_found_before_anything_runs(
        self, llm: LLM, wrong: dict, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            llm.generate([[5], [6]], [greedy(1), SamplingParams(**wrong)])
        assert llm.engine.is_finished

    def test_lists_of_different_lengths(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
            llm.generate([[5], [6]], [greedy(1)])

    def test_something_else(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match=r"sampling_params\[1\] is 3: must be a SamplingParams"):
            llm.generate([[5], [6]], [greedy(1), 3])
        with pytest.raises(ValueError, match=r"sampling_params={'n': 2}: must be a SamplingParams, or a list of them"):
            llm.generate([[5]], {"n": 2})

    def test_numpys_numbers_are_numbers(self) -> None:
        params = SamplingParams(
            temperature=np.float32(0.5),
            max_tokens=np.int64(9),
            logit_bias={np.int32(4): np.float32(2)},
            stop_token_ids=np.array([7, 8]),
        )
        assert params == SamplingParams(temperature=0.5, max_tokens=9, logit_bias={4: 2.0}, stop_token_ids=[7, 8])
        assert all(type(token_id) is int for token_id in (*params.logit_bias, *params.stop_token_ids))

    def test_a_setting_can_be_a_key(self) -> None:
        assert {SamplingParams(logit_bias={4: 2.0}): 1}[SamplingParams(logit_bias={4: 2.0})] == 1


class TestConfig:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"max_num_batched_tokens": 0},
            {"max_num_seqs": 0},
            {"max_model_len": 1},
            {"gpu_memory_utilization": 0},
            {"gpu_memory_utilization": 1.5},
            {"tensor_parallel_size": 0},
            {"tensor_parallel_size": 9},
            {"kvcache_block_size": 40},
            {"kvcache_block_size": 0},
            {"num_kvcache_blocks": 0},
            {"num_kvcache_blocks": 7},
            {"attention_backend": "flash"},
            {"dtype": "int8"},
            {"device": "tpu"},
            {"seed": -1},
            {"load_format": "gguf"},
            {"worker_timeout": 0.5},
            {"worker_timeout": "never"},
            {"max_num_seqs": "many"},
            {"max_num_seqs": True},
            {"enforce_eager": "yes"},
        ],
        ids=repr,
    )
    def test_a_knob_out_of_range_is_named_with_its_value(self, wrong: dict) -> None:
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=rf"{name}={value!r}: "):
            LLM(BUNDLED_MODEL, **wrong)

    def test_an_unknown_argument_suggests_the_nearest_name(self) -> None:
        with pytest.raises(ValueError, match="unknown argument 'max_seq_len': did you mean 'max_model_len'"):
            LLM(BUNDLED_MODEL, max_seq_len=10)

    def test_a_backend_that_cannot_run_says_why(self) -> None:
        with pytest.raises(ValueError, match="attention_backend='flash_attn': needs device='cuda'"):
            LLM(BUNDLED_MODEL, attention_backend="flash_attn", device="cpu")

    def test_more_ranks_than_gpus(self) -> None:
        if (count := torch.cuda.device_count()) >= 8:
            pytest.skip("this machine has GPUs enough")
        with pytest.raises(ValueError, match="tensor_parallel_size=8: this machine has" if count else "no CUDA device"):
            LLM(BUNDLED_MODEL, tensor_parallel_size=8, device="cuda")

    @pytest.mark.parametrize(
        ("ranks", "shape", "reason"),
        [
            (3, {}, "num_attention_heads=4 is not divisible"),
            (4, {"intermediate_size": 90}, "intermediate_size=90 is not divisible"),
            (4, {"num_attention_heads": 12, "num_key_value_heads": 6}, "num_key_value_heads=6 neither divides it nor"),
            (4, {"vocab_size": 15}, "vocab_size=15 is too small"),
        ],
    )
    def test_what_the_ranks_cannot_share(
        self, ranks: int, shape: dict[str, int], reason: str, make_qwen3: Callable[..., str]
    ) -> None:
        with pytest.raises(ValueError, match=f"tensor_parallel_size={ranks}: {reason}"):
            LLM(make_qwen3(**shape), tensor_parallel_size=ranks, device="cpu")

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    def test_more_blocks_than_the_memory_holds(self, device: str) -> None:
        with pytest.raises(ValueError, match=r"num_kvcache_blocks=100000000: a KV cache of .* GiB does not fit"):
            LLM(BUNDLED_MODEL, device=device, num_kvcache_blocks=10**8)

    def test_torchs_own_dtype(self) -> None:
        assert Config(BUNDLED_MODEL, dtype=torch.bfloat16).dtype == "bfloat16"

    def test_a_cache_that_does_not_fit_the_cpus_budget(self) -> None:
        with pytest.raises(ValueError, match=r"MiB.*max_model_len=.*needs.*MiB.*num_kvcache_blocks"):
            LLM(BUNDLED_MODEL, device="cpu", kvcache_block_size=1 << 20)


class TestModel:
    def test_a_path_that_is_nothing(self) -> None:
        with pytest.raises(ValueError, match="model='/no/such/folder': no such folder"):
            LLM("/no/such/folder")

    def test_a_file_of_the_model(self) -> None:
        with pytest.raises(ValueError, match=r"config.json': is a file; give the folder"):
            LLM(f"{BUNDLED_MODEL}/config.json")

    def test_a_hub_id_that_cannot_be_fetched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(ValueError, match="model='nobody/nothing-here': no such folder, and the Hugging Face Hub"):
            LLM("nobody/nothing-here")

    def test_a_folder_that_is_no_model(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"has no config\.json"):
            LLM(str(tmp_path))

    def test_a_config_that_is_no_json(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ValueError, match=r"cannot read its config\.json"):
            LLM(str(tmp_path))

    @pytest.mark.parametrize(
        ("architecture", "model_type"),
        [("GPT2LMHeadModel", "gpt2"), ("T5ForConditionalGeneration", "t5"), ("FutureForCausalLM", "future")],
    )
    def test_an_unsupported_architecture_names_those_that_are(
        self, architecture: str, model_type: str, tmp_path: Path
    ) -> None:
        folder = copy_of(BUNDLED_MODEL, tmp_path / "m", architectures=[architecture], model_type=model_type)
        with pytest.raises(ValueError, match=rf"'{architecture}' is not supported; supported: .*Qwen3ForCausalLM"):
            LLM(folder)

    def test_a_config_that_names_no_architecture(self, tmp_path: Path) -> None:
        with pytest.raises(
            ValueError, match=r"without 'architectures' is not supported; supported: .*Qwen3ForCausalLM"
        ):
            LLM(copy_of(BUNDLED_MODEL, tmp_path / "m", architectures=None))
        with pytest.raises(ValueError, match=r"architectures='Qwen3ForCausalLM' .*must be a list of names"):
            LLM(copy_of(BUNDLED_MODEL, tmp_path / "m", architectures="Qwen3ForCausalLM"))

    def test_a_broken_generation_config(self, tmp_path: Path) -> None:
        folder = copy_of(BUNDLED_MODEL, tmp_path / "m")
        (Path(folder) / "generation_config.json").write_text("[")
        with pytest.raises(ValueError, match=r"cannot read its generation_config\.json"):
            LLM(folder)

    @pytest.mark.parametrize("eos", ["2", 2.0, [[2]], {"a": 1}], ids=repr)
    def test_an_end_of_sequence_id_that_is_no_integer(self, eos: object, tmp_path: Path) -> None:
        folder = copy_of(BUNDLED_MODEL, tmp_path / "m")
        (Path(folder) / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        with pytest.raises(ValueError, match=r"eos_token_id|generation_config"):
            LLM(folder)

    def test_an_end_of_sequence_id_that_is_no_tokens_ends_nothing(self, tmp_path: Path) -> None:
        folder = copy_of(BUNDLED_MODEL, tmp_path / "m", eos_token_id=-1)
        (Path(folder) / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 10**9]}))
        with LLM(folder, num_kvcache_blocks=16) as llm:
            assert llm.config.eos_token_ids == {2}
            (output,) = llm.generate([[30]], greedy(4, min_tokens=4), use_tqdm=False)
        assert len(output["token_ids"]) == 4

    def test_a_dtype_that_we_lack(self, tmp_path: Path) -> None:
        hf_config = Checkpoint.open(copy_of(BUNDLED_MODEL, tmp_path / "m", dtype="float64")).hf_config
        with pytest.raises(ValueError, match="dtype='auto': the checkpoint's is float64; choose one of float32"):
            _resolve_dtype("auto", "cuda", hf_config)

    @pytest.mark.parametrize(
        "changes",
        [
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
            {"quantization_config": {"quant_method": "fp8"}},
            {"layer_types": ["sliding_attention"] * 4},  # without use_sliding_window
            {"hidden_act": "gelu"},
            {"is_causal": False},
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_what_a_config_asks_for_and_we_lack_is_named(self, changes: dict, tmp_path: Path) -> None:
        name = "rope_type" if "rope_parameters" in changes else next(iter(changes))
        with pytest.raises(ValueError, match=f"{name}=.*is not supported"):
            LLM(copy_of(BUNDLED_MODEL, tmp_path / "m", **changes))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_key_value_heads": 3}, r"num_key_value_heads=3 .* must be a divisor of num_attention_heads="),
            ({"num_key_value_heads": 0}, "num_key_value_heads=0 .* must be an integer of at least 1"),
            ({"num_attention_heads": 0}, "num_attention_heads=0 .* must be"),
            ({"head_dim": 0}, "head_dim=0 .* must be"),
            ({"intermediate_size": 0}, "intermediate_size=0 .* must be"),
            ({"num_hidden_layers": 0, "layer_types": None}, "num_hidden_layers=0 .* must be"),
            ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta=0 .* must be"),
            ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": "8"}}, "factor='8' .* must be"),
        ],
        ids=str,
    )
    def test_a_number_in_a_config_that_makes_no_model_is_named(
        self, changes: dict, message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(ValueError, match=message):
            LLM(copy_of(BUNDLED_MODEL, tmp_path / "m", **changes))

    def test_no_weights(self, tmp_path: Path) -> None:
        folder = copy_of(BUNDLED_MODEL, tmp_path / "m")
        (Path(folder) / "model.safetensors").unlink()
        with pytest.raises(ValueError, match=r"has no \*\.safetensors file"):
            LLM(folder)

    def test_a_broken_weights_file(self, tmp_path: Path) -> None:
        folder = copy_of(BUNDLED_MODEL, tmp_path / "m")
        file = Path(folder) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
        with pytest.raises(ValueError, match=r"model\.safetensors: cannot be read"):
            LLM(folder)

    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            (lambda w: w.pop("model.norm.weight"), r"missing: model\.norm\.weight\."),
            (lambda w: w.update(extra=torch.zeros(1)), r"unknown: extra\."),
            (
                lambda w: w.update({"model.norm.weight": torch.zeros(3)}),
                r"model\.norm\.weight has shape \[3\], but the model needs \[192\]",
            ),
        ],
        ids=["missing", "extra", "mis-shaped"],
    )
    def test_a_weight_that_does_not_fit_is_named(self, edit: Callable, message: str, tmp_path: Path) -> None:
        folder = copy_of(BUNDLED_MODEL, tmp_path / "m")
        file = Path(folder) / "model.safetensors"
        weights = load_file(file)
        edit(weights)
        save_file(weights, file)
        with pytest.raises(ValueError, match=message):
            LLM(folder)


def test_two_threads_at_once(make_llm: Callable[..., LLM]) -> None:
    """The second is refused, and the first gets its tokens."""
    llm, outputs = make_llm(), []
    first = threading.Thread(target=lambda: outputs.extend(llm.generate([[5]], greedy(200, ignore_eos=True))))
    first.start()
    while not llm.engine.scheduler.running:
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match="another thread is generating"):
        llm.generate([[5]])
    first.join()
    assert len(outputs[0]["token_ids"]) == 200


def test_generate_after_close(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    llm.close()
    with pytest.raises(ValueError, match="closed"):
        llm.generate([[5]])
