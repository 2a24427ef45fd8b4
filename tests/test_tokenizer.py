"""The tokenizer that an LLM loads: read as its file says, with the ends that it knows, and in any locale."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import greedy
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerBase

from nanoinfer import BUNDLED_MODEL, LLM
from nanoinfer.config import Config
from nanoinfer.requests.text import tokenizer as rooms
from nanoinfer.requests.text.bound_tokenizer import BoundTokenizer
from nanoinfer.requests.text.tokenizer import load_tokenizer

ROOT = Path(__file__).parent.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the bundled model, but for its weights, which lie where they are."""
    for file in Path(BUNDLED_MODEL).iterdir():
        if file.suffix == ".safetensors":
            (tmp_path / file.name).symlink_to(file)
        elif file.is_file():
            shutil.copy(file, tmp_path)
    return tmp_path


def change(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **settings}), "utf-8")


class TestReading:
    """A warning says if the tokenizer differs from its file."""

    @pytest.fixture
    def warnings(self, folder: Path, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
        def load() -> list[str]:
            with caplog.at_level(logging.WARNING, "nanoinfer"):
                caplog.clear()
                assert load_tokenizer(Config(str(folder), device="cpu")) is not None
            return [record.getMessage() for record in caplog.records if record.name == "nanoinfer"]

        return load

    def test_there_is_none_for_one_that_does_not(self, warnings: Callable[[], list[str]]) -> None:
        assert warnings() == []

    def test_the_first_version_that_reads_llamas_label_rightly_is_required(
        self, folder: Path, warnings: Callable[[], list[str]]
    ) -> None:
        """Byte-level tokenizers have the label of another kind."""
        for label in ("LlamaTokenizerFast", "LlamaTokenizer"):
            change(folder / "tokenizer_config.json", tokenizer_class=label)
            text = "Hello world, how are you?\nyes"
            tokenizer = load_tokenizer(Config(str(folder), device="cpu"))
            assert tokenizer is not None
            assert tokenizer.decode(tokenizer.encode(text)) == text
            assert warnings() == []
        assert f'"transformers>={rooms.NEEDED}"' in (ROOT / "pyproject.toml").read_text("utf-8")

    def test_a_class_that_does_not_fit(
        self, folder: Path, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: LlamaTokenizer.from_pretrained(folder))
        (warning,) = warnings()
        assert warning.startswith("transformers 5.")
        assert f"reads the tokenizer of '{folder}' otherwise than its tokenizer.json says" in warning
        assert "Helloworld,howareyou?" in warning
        assert f"transformers {rooms.NEEDED} or later" in warning

    @pytest.mark.parametrize(
        ("piece", "other"),
        [
            ("normalizer", normalizers.Lowercase()),
            ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
            ("pre_tokenizer", pre_tokenizers.Split(Regex("[^H]"), "isolated")),
            ("decoder", decoders.Sequence([decoders.ByteLevel(), decoders.Strip("H", 1, 0)])),
            ("post_processor", processors.TemplateProcessing("$A <|im_end|>", special_tokens=[("<|im_end|>", 2)])),
        ],
        ids=lambda value: value if isinstance(value, str) else type(value).__name__,
    )
    def test_each_piece_counts(
        self, piece: str, other: Any, folder: Path, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        setattr(tokenizer.backend_tokenizer, piece, other)
        monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
        assert len(warnings()) == 1

    def test_so_does_the_vocabularys_kind(
        self, folder: Path, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.backend_tokenizer.model.dropout = 1.0
        monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
        assert len(warnings()) == 1

    @pytest.mark.parametrize("option", ["add_bos_token", "add_eos_token", "add_prefix_space"])
    def test_what_options_change_is_no_difference(
        self, option: str, folder: Path, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if option == "add_prefix_space":
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        else:
            added = processors.TemplateProcessing("<|im_end|> $A", special_tokens=[("<|im_end|>", 2)])
            tokenizer.backend_tokenizer.post_processor = added
        monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
        assert len(warnings()) == 1
        change(folder / "tokenizer_config.json", **{option: True})
        assert warnings() == []

    def test_nor_is_a_length_that_the_file_pads_or_cuts_to(
        self, folder: Path, warnings: Callable[[], list[str]]
    ) -> None:
        written = Tokenizer.from_file(str(folder / "tokenizer.json"))
        for limit in (written.enable_padding, written.enable_truncation):
            limit(**{"length" if limit == written.enable_padding else "max_length": 5})
            written.save(str(folder / "tokenizer.json"))
            assert warnings() == []

    def test_a_large_vocabulary_is_not_read_again(
        self, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class WithoutFiles:
            from_str = Tokenizer.from_str

            def __new__(cls, *model: Any) -> Any:
                return Tokenizer(*model)

        monkeypatch.setattr("tokenizers.Tokenizer", WithoutFiles)
        assert warnings() == []


class TestEnd:
    """The tokenizer's end of sequence counts beside those of the checkpoint's configs."""

    def test_it_ends_a_text(self, folder: Path, make_llm: Callable[..., LLM]) -> None:
        change(folder / "config.json", eos_token_id=7)
        change(folder / "generation_config.json", eos_token_id=7)
        llm = make_llm(str(folder), device="cpu")
        assert llm.config.eos_token_ids == {2, 7}
        ends = {"logit_bias": {2: 1000.0}}
        plain, ignoring = greedy(5, **ends), greedy(5, ignore_eos=True, **ends)
        outputs = llm.generate([[30]] * 2, [plain, ignoring], use_tqdm=False)
        assert [output.token_ids for output in outputs] == [[2], [2] * 5]
        assert [output.finish_reason for output in outputs] == ["stop", "length"]

    @pytest.mark.parametrize("token", ["<nowhere>", None])
    def test_one_that_the_model_lacks_ends_nothing(self, token: str | None, folder: Path) -> None:
        change(folder / "tokenizer_config.json", eos_token=token)
        config = Config(str(folder), device="cpu")
        load_tokenizer(config)
        assert config.eos_token_ids == {2}

    def test_that_of_another_folder(self, folder: Path) -> None:
        change(folder / "tokenizer_config.json", eos_token="<|im_start|>")
        config = Config(BUNDLED_MODEL, tokenizer=str(folder), device="cpu")
        load_tokenizer(config, is_replica=True)
        assert config.eos_token_ids == {1, 2}


@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json"])
@pytest.mark.parametrize(("own", "wanted"), [(None, "{{ 1 }}"), ("{{ 2 }}", "{{ 2 }}")])
def test_a_processors_chat_template_counts_where_the_tokenizer_has_none(
    own: str | None, wanted: str, file: str, folder: Path
) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    change(folder / "tokenizer_config.json", chat_template=own)
    (folder / file).write_text('{"chat_template": "{{ 1 }}"}')
    tokenizer = load_tokenizer(Config(str(folder), device="cpu"))
    assert tokenizer is not None
    assert tokenizer.chat_template == wanted
    (folder / file).write_text("{")
    if own is None:
        with pytest.raises(ValueError, match="cannot load its tokenizer"):
            load_tokenizer(Config(str(folder), device="cpu"))


@pytest.mark.parametrize(
    ("content", "modules", "packages"),
    [
        (b"\n\x0e\n\x05<unk>", ["sentencepiece"], "sentencepiece"),
        (b"\n\x0e\n\x05<unk>", ["google.protobuf"], "protobuf"),
        (b"\n\x0e\n\x05<unk>", ["sentencepiece", "google.protobuf"], "sentencepiece protobuf"),
        (b"IQ== 0\nIg== 1\n", ["tiktoken"], "tiktoken"),
    ],
)
def test_a_package_that_a_tokenizer_needs_is_named(
    content: bytes, modules: list[str], packages: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(content)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    monkeypatch.setattr(rooms, "_is_installed", lambda module: module not in modules)
    if "tiktoken" in modules and find_spec("tiktoken"):
        pytest.skip("tiktoken is installed, and reads the file")
    with pytest.raises(ValueError, match=rf"cannot load its tokenizer: .* pip install {packages}$"):
        load_tokenizer(Config(str(folder), device="cpu"))


TEXTS = ["", "O Romeo", "O Romeo", "ROMEO:\nBut, soft! what light through yonder window breaks?", "…é漢字🙂"]


class TestTextsAtOnce:
    @pytest.fixture
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(BUNDLED_MODEL)

    @pytest.mark.parametrize("how", [{}, {"add_special_tokens": False}, {"truncation": True, "max_length": 5}], ids=str)
    def test_tokens_are_those_of_each_text(self, how: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
        bound, expected = BoundTokenizer(tokenizer, **how), [tokenizer.encode(text, **how) for text in TEXTS]
        with bound.at_once(TEXTS):
            tokenizer.encode = None  # nobody needs it
            found = [bound.encode(text) for text in TEXTS]
            assert found == expected
            found[1].append(0)  # nobody else's
            assert found[2] == bound.encode(TEXTS[2]) == expected[2]
        with pytest.raises(TypeError, match="not callable"):
            bound.encode(TEXTS[1])

    def test_one_that_cannot_be_encoded_is_found_in_its_turn(self, tokenizer: PreTrainedTokenizerBase) -> None:
        bound = BoundTokenizer(tokenizer)
        with bound.at_once(["a", "\ud800", "b"]):
            assert bound.encode("a") == tokenizer.encode("a")
            with pytest.raises(TypeError):
                bound.encode("\ud800")

    def test_calls_tokenize_their_texts_at_once(
        self, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The tokenizer is asked for all texts of a call, and for few of those that are embedded before it runs."""
        llm, texts = make_llm(), [f"text {number}" for number in range(40)]
        asked: list[int] = []

        @contextmanager
        def at_once(bound: BoundTokenizer, texts: list[str]) -> Iterator[None]:
            asked.append(len(texts))
            yield

        monkeypatch.setattr(BoundTokenizer, "at_once", at_once)
        llm.generate([*texts, [5, 6]], greedy(1), use_tqdm=False)
        assert asked == [40]
        asked.clear()
        llm.embed(texts, use_tqdm=False)
        assert asked == [2, 2, 4, 8, 16, 8]
