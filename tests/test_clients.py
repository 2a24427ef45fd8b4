"""Scripts that were written for vLLM and nano-vLLM run when their import is changed, and a type checker knows them."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from conftest import Oracle, greedy
from transformers import AutoTokenizer

import nanoinfer
from nanoinfer import BUNDLED_MODEL, LLM
from nanoinfer.config import Config

TOKENIZER = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
ROOT = Path(__file__).parent.parent
TEXT = "ROMEO:\nBut, soft!"

VLLM_SCRIPT = """
from nanoinfer import LLM, SamplingParams

llm = LLM(
    model=MODEL,
    tokenizer=None,
    trust_remote_code=False,
    tensor_parallel_size=1,
    dtype="float32",
    revision=None,
    tokenizer_revision=None,
    seed=0,
    gpu_memory_utilization=0.5,
    enforce_eager=True,
    max_model_len=None,
    max_num_seqs=None,
)
params = SamplingParams(n=1, temperature=0.0, top_p=1.0, max_tokens=8, logprobs=2, prompt_logprobs=1)
prompts = [{"prompt": TEXT}, {"prompt_token_ids": IDS}, TEXT]
outputs = llm.generate(prompts, sampling_params=params, use_tqdm=False, lora_request=None)

lines = []
for output in outputs:
    assert output.finished and output.prompt in (TEXT, None)
    completion = output.outputs[0]
    assert completion.index == 0 and completion.finish_reason == "length" and completion.stop_reason is None
    text = ""
    for i, token_id in enumerate(completion.token_ids):
        logprob = completion.logprobs[i][token_id]
        assert logprob.rank == 1
        text += logprob.decoded_token
    assert text == completion.text
    total = sum(completion.logprobs[i][token_id].logprob for i, token_id in enumerate(completion.token_ids))
    assert completion.cumulative_logprob == total
    prompt_logprobs = output.prompt_logprobs
    assert prompt_logprobs[0] is None
    assert all(t in entry for t, entry in zip(output.prompt_token_ids[1:], prompt_logprobs[1:]))
    lines.append((completion.text, list(completion.token_ids)))

(chat,) = llm.chat([{"role": "user", "content": "Good morrow"}], params, use_tqdm=False, lora_request=None)
assert "Good morrow" in chat.prompt and len(chat.prompt_token_ids) > 4
del llm
"""

NANO_VLLM_SCRIPT = """
from nanoinfer import LLM, SamplingParams

llm = LLM(MODEL, enforce_eager=True, tensor_parallel_size=1)
sampling_params = SamplingParams(temperature=0.6, max_tokens=8)
outputs = llm.generate([TEXT, TEXT], sampling_params, use_tqdm=False)
lines = [(output["text"], output["token_ids"]) for output in outputs]
del llm
"""

TYPED_SCRIPT = """
from nanoinfer import LLM, SamplingParams

llm = LLM("model")
outputs = llm.generate([{"prompt": "text"}], SamplingParams(logprobs=1), lora_request=None)
outputs += llm.generate([{"prompt_token_ids": [5]}, {"prompt_token_ids": [6]}])
for output in outputs:
    text: str = output["text"]
    text = output.outputs[0].text
    tokens: list[int] = output.outputs[0].token_ids
    total: float | None = output.cumulative_logprob
    for entry in output.logprobs or []:
        rank: int = entry[tokens[0]].rank
        value: float = entry[tokens[0]].logprob + entry[tokens[0]]
        token: str | None = entry[tokens[0]].decoded_token
llm.generate({"prompt": "text"})
llm.add_request({"prompt_token_ids": [5]})
wrong_name = output.txet
wrong_type: int = output.text
"""


def run(script: str) -> dict[str, Any]:
    names: dict[str, Any] = {"MODEL": BUNDLED_MODEL, "TEXT": TEXT, "IDS": TOKENIZER.encode(TEXT)}
    exec(script, names)
    return names


class TestScripts:
    def test_one_for_vllm(self, oracle: Oracle) -> None:
        expected = oracle.greedy(TOKENIZER.encode(TEXT), 8)
        assert run(VLLM_SCRIPT)["lines"] == [(TOKENIZER.decode(expected), expected)] * 3

    def test_one_for_nano_vllm(self) -> None:
        first, second = run(NANO_VLLM_SCRIPT)["lines"]
        assert first != second
        for text, token_ids in (first, second):
            assert len(token_ids) == 8 or token_ids[-1] == TOKENIZER.eos_token_id
            assert text == TOKENIZER.decode(token_ids, skip_special_tokens=True)

    @pytest.mark.whole
    def test_a_type_checker_knows_both_shapes(self, tmp_path: Path) -> None:
        pytest.importorskip("mypy", reason="types are checked by mypy")
        (tmp_path / "script.py").write_text(TYPED_SCRIPT)
        options = [
            f"--config-file={ROOT / 'pyproject.toml'}",
            f"--cache-dir={ROOT / '.mypy_cache'}",
            "--no-error-summary",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "mypy", *options, "script.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert [line.split(": error: ")[1] for line in done.stdout.splitlines()] == [
            '"RequestOutput" has no attribute "txet"  [attr-defined]',
            'Incompatible types in assignment (expression has type "str", variable has type "int")  [assignment]',
        ], done.stdout + done.stderr


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, device="cpu", max_model_len=64, num_kvcache_blocks=8) as llm:
        yield llm


class TestPrompts:
    def test_a_mapping_is_what_it_holds(self, llm: LLM) -> None:
        ids = llm.tokenizer.encode(TEXT)
        (expected,) = llm.generate(TEXT, greedy(4), use_tqdm=False)
        for prompt, text in (
            (TEXT, TEXT),
            ({"prompt": TEXT}, TEXT),
            ({"prompt_token_ids": ids}, None),
            ({"prompt": "not the ids'", "prompt_token_ids": ids}, "not the ids'"),
            ({"prompt": None, "prompt_token_ids": ids, "multi_modal_data": None, "cache_salt": None}, None),
            ({"prompt": TEXT, "prompt_token_ids": None, "mm_processor_kwargs": None}, TEXT),
        ):
            for prompts in ([prompt], prompt):
                (output,) = llm.generate(prompts, greedy(4), use_tqdm=False)
                assert (output.prompt, output.prompt_token_ids) == (text, ids)
                assert output.token_ids == expected.token_ids
                streamed = [token_id for new in llm.stream(prompts, greedy(4)) for token_id in new.token_ids]
                assert streamed == expected.token_ids
            llm.add_request(prompt, greedy(4))
            while not (outputs := llm.step()):
                pass
            assert (outputs[0].prompt, outputs[0].token_ids) == (text, expected.token_ids)

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ({}, r"is {}: must be text, a list of token ids, or a mapping with 'prompt' or 'prompt_token_ids'"),
            ({"text": "a"}, r"is {'text': 'a'}: must be text, .*'prompt' or 'prompt_token_ids', and nothing else"),
            ({"prompt": "a", "cache_salt": ""}, r"\['cache_salt'\] is '': must be a non-empty string"),
            ({"prompt_token_ids": [5], "cache_salt": 3}, r"\['cache_salt'\] is 3: must be a non-empty string"),
            ({"messages": [], "cache_salt": b"a"}, r"\['cache_salt'\] is b'a': must be a non-empty string"),
            ({"prompt": [5], "prompt_token_ids": [5]}, r"\['prompt'\] is \[5\]: must be a string"),
            ({"prompt": "a", "prompt_token_ids": "a"}, r"\['prompt_token_ids'\] is 'a': must be a list of token ids"),
            (
                {"prompt": "a", "multi_modal_data": {}},
                r"has 'multi_modal_data': this model is run as text only; .*; pass a",
            ),
            (
                {"prompt_token_ids": [5], "image": 1},
                r"has 'image': this model is run as text only; .*; pass a mapping with",
            ),
            ({"prompt": [5]}, r"\['prompt'\] is \[5\]: must be a string"),
            ({"prompt": None}, r"\['prompt'\] is None: must be a string"),
            ({"prompt": ""}, r"\['prompt'\] is empty"),
            ({"prompt_token_ids": "a"}, r"\['prompt_token_ids'\] is 'a': must be a list of token ids"),
            ({"prompt_token_ids": [2048]}, r"\['prompt_token_ids'\] has token id 2048: must be from 0 to 2047"),
            ({"prompt_token_ids": None}, r"\['prompt_token_ids'\] is None: must be a string or a list of token ids"),
        ],
        ids=str,
    )
    def test_a_mapping_that_holds_no_prompt(self, prompt: dict, message: str, llm: LLM) -> None:
        for call in (llm.generate, llm.stream):
            with pytest.raises(ValueError, match=rf"prompts\[1\] ?{message}"):
                call([[5], prompt])
        with pytest.raises(ValueError, match=rf"prompt ?{message}"):
            llm.add_request(prompt)
        with pytest.raises(ValueError, match=r"prompts(\[0\]|=.*'prompt_token_ids', and nothing else)"):
            llm.generate(prompt)
        assert llm.engine.is_finished

    def test_prompts_of_one_cache_salt_share_what_is_computed(self, llm: LLM) -> None:
        ids = list(range(5, 45))
        prompts = [{"prompt_token_ids": ids, "cache_salt": salt} for salt in ("a", "b", None)]
        llm.reset_prefix_cache()
        first, again = (llm.generate(prompts, greedy(2), use_tqdm=False) for _ in range(2))
        assert [output.num_cached_tokens for output in first] == [0, 0, 0]
        assert all(output.num_cached_tokens > 0 for output in again)
        assert len({tuple(output.token_ids) for output in first + again}) == 1
        (plain,) = llm.generate([ids], greedy(2), use_tqdm=False)
        assert plain.num_cached_tokens == again[2].num_cached_tokens
        chat = {"messages": [{"role": "user", "content": "But, soft!"}], "cache_salt": "a"}
        assert len(llm.generate(chat, greedy(1), use_tqdm=False)) == 1
        scores = llm.score({"prompt_token_ids": ids, "cache_salt": "c"}, [[5]]) + llm.score(ids, [[5]])
        assert scores[0].logprob == pytest.approx(scores[1].logprob)

    def test_lora_may_be_none(self, llm: LLM) -> None:
        for call, argument in ((llm.generate, [[5]]), (llm.chat, [{"role": "user", "content": "a"}])):
            assert len(call(argument, greedy(1), use_tqdm=False, lora_request=None)) == 1
            with pytest.raises(ValueError, match="lora_request='adapter': must be a LoRARequest"):
                call(argument, lora_request="adapter")


class TestOptions:
    @pytest.fixture
    def bare(self, tmp_path: Path) -> str:
        """The bundled model without its tokenizer."""
        for file in Path(BUNDLED_MODEL).iterdir():
            if not file.name.startswith("tokenizer"):
                (tmp_path / file.name).symlink_to(file)
        return str(tmp_path)

    def test_none_is_the_default(self) -> None:
        names = [option.name for option in fields(Config) if option.init and option.name != "model"]
        config, default = Config(BUNDLED_MODEL, **dict.fromkeys(names)), Config(BUNDLED_MODEL)
        assert config == default
        assert config.max_model_len == config.description.max_position
        assert config.max_num_seqs == Config.max_num_seqs

    @pytest.mark.parametrize(
        ("name", "theirs", "ours"),
        [
            ("load_format", "auto", "safetensors"),
            ("dtype", "half", "float16"),
            ("dtype", "float", "float32"),
            ("kv_cache_dtype", "fp8_e4m3", "fp8"),
            ("revision", "main", "main"),
        ],
    )
    def test_a_value_of_vllms_is_ours(self, name: str, theirs: str, ours: str) -> None:
        assert getattr(Config(BUNDLED_MODEL, **{name: theirs}), name) == ours

    def test_weights_of_another_format_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"load_format='pt': .*; transformers' save_pretrained writes \*.safetens"):
            Config(BUNDLED_MODEL, load_format="pt")

    def test_no_remote_code_runs(self, tmp_path: Path) -> None:
        for trusted in (True, False):
            assert Config(BUNDLED_MODEL, trust_remote_code=trusted).trust_remote_code is trusted
        file = tmp_path / "config.json"
        settings = json.loads((Path(BUNDLED_MODEL) / "config.json").read_text())
        theirs = {"model_type": "theirs", "auto_map": {"AutoConfig": "code.Config"}}
        for change, message in (
            ({"architectures": ["Theirs"]}, "'Theirs' is not supported; supported: .*; no remote code runs here"),
            (theirs, "cannot read its config.json: it needs code of its own, and no remote code runs here"),
        ):
            file.write_text(json.dumps({**settings, **change}))
            with pytest.raises(ValueError, match=message):
                Config(str(tmp_path), trust_remote_code=True)
        with pytest.raises(ValueError, match="trust_remote_code='no': must be True or False"):
            Config(BUNDLED_MODEL, trust_remote_code="no")

    def test_a_tokenizer_from_another_folder(self, bare: str, make_llm: Callable[..., LLM], llm: LLM) -> None:
        other = make_llm(bare, tokenizer=BUNDLED_MODEL)
        (output,), (expected,) = (some.generate(TEXT, greedy(4), use_tqdm=False) for some in (other, llm))
        assert (output.text, output.token_ids) == (expected.text, expected.token_ids)
        assert other.config.tokenizer == BUNDLED_MODEL

    def test_a_folder_without_a_tokenizer(self, bare: str) -> None:
        with pytest.raises(ValueError, match=f"tokenizer='{bare}': must have a tokenizer: one of tokenizer.json"):
            Config(BUNDLED_MODEL, tokenizer=bare)
        assert Config(bare).tokenizer is None

    def test_a_tokenizer_that_cannot_be_read(self, bare: str) -> None:
        (Path(bare) / "tokenizer.json").write_text("{")
        with pytest.raises(ValueError, match=f"tokenizer='{bare}': cannot load its tokenizer: "):
            LLM(BUNDLED_MODEL, tokenizer=bare)

    @pytest.mark.parametrize(
        ("tokenizer", "message"),
        [
            ("/no/such/folder", "tokenizer='/no/such/folder': no such folder, nor is it a Hugging Face Hub id"),
            (5, "tokenizer=5: must be a folder's path or a Hugging Face Hub id"),
            (
                f"{BUNDLED_MODEL}/tokenizer.json",
                r"tokenizer=.*: is a file; give the folder that holds the tokenizer's f",
            ),
            (
                "nobody/nothing-here",
                "tokenizer='nobody/nothing-here': no such folder, and the Hugging Face Hub did not",
            ),
        ],
    )
    def test_what_is_no_tokenizer(self, tokenizer: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(ValueError, match=message):
            Config(BUNDLED_MODEL, tokenizer=tokenizer)

    def test_a_folder_has_no_revision_but_main(self) -> None:
        message = "must be None or 'main', as '/.*' is a folder; only a Hugging Face Hub id has revisions"
        Config(BUNDLED_MODEL, revision="main", tokenizer_revision="main")
        with pytest.raises(ValueError, match=f"^revision='v1': {message}"):
            Config(BUNDLED_MODEL, revision="v1")
        for options in ({}, {"tokenizer": BUNDLED_MODEL}):
            with pytest.raises(ValueError, match=f"^tokenizer_revision='v1': {message}"):
                Config(BUNDLED_MODEL, tokenizer_revision="v1", **options)

    def test_bundled_is_the_model_that_ships_with_the_package(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A folder of that name comes first, as every folder does."""
        monkeypatch.chdir(tmp_path)
        config = Config("bundled", tokenizer="bundled")
        assert (config.model, config.tokenizer) == (BUNDLED_MODEL, BUNDLED_MODEL)
        (tmp_path / "bundled").mkdir()
        with pytest.raises(ValueError, match=r"bundled.*config\.json"):
            Config("bundled")
        with pytest.raises(ValueError, match=r"no such folder, .*; 'bundled' is the small model that ships with"):
            Config("bundle")

    def test_a_hub_ids_revisions_are_downloaded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def download(hub_id: str, revision: str | None, allow_patterns: list[str]) -> str:
            asked.append((hub_id, revision, "*.safetensors" in allow_patterns))
            return BUNDLED_MODEL

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        Config("some/model", revision="v1")
        Config("some/model", tokenizer_revision="v2")
        Config("some/model", tokenizer="some/tokenizer", tokenizer_revision="v3")
        model = ("some/model", None, True)
        assert asked == [
            ("some/model", "v1", True),
            model,
            ("some/model", "v2", False),
            model,
            ("some/tokenizer", "v3", False),
        ]
        with pytest.raises(ValueError, match="model='some/model', revision=5: must be a branch, a tag or a commit"):
            Config("some/model", revision=5)


class TestVersion:
    def test_it_is_the_installed_packages(self) -> None:
        try:
            assert nanoinfer.__version__ == importlib.metadata.version("nanoinfer")
        except importlib.metadata.PackageNotFoundError:
            assert nanoinfer.__version__ == "0+source"

    def test_a_source_tree_that_nobody_installed_has_one_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def find_nothing(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        with monkeypatch.context() as patch:
            patch.setattr("importlib.metadata.version", find_nothing)
            assert importlib.reload(nanoinfer).__version__ == "0+source"
        importlib.reload(nanoinfer)
