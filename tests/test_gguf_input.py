"""What GGUF files say besides weights: tokenizers, as their originals, and what is refused, with its place."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

gguf = pytest.importorskip("gguf", reason="GGUF files need the package gguf: pip install 'nanoinfer[gguf]'")

from cases import CASES, build
from cases.gguf_files import write_gguf
from conftest import greedy
from tokenizers import ByteLevelBPETokenizer, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from transformers import Qwen2Tokenizer

from nanoinfer import LLM
from nanoinfer.gguf.config import config_of
from nanoinfer.gguf.header import read_header
from nanoinfer.gguf.tokenizer import load_tokenizer_of

pytestmark = pytest.mark.usefixtures("one_thread")

MakeLLM = Callable[..., LLM]
Write = Callable[..., Path]
OPTIONS: dict[str, Any] = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 320}
ODD = [
    "Hello world, how are you?", "  two  spaces\n\n\nlines", "naïve 日本 🤗 don't", "1234567 x", " ", "\tWE'LL  ",
    "Привет, мир! ١٢٣", "$x_1^2 = 3.14;", "你好世界。1999年", "ça coûte 3€ ½",
]  # fmt: skip
TEXTS = sorted(Path(__file__).parent.glob("test_*.py"))
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"
    "\r\n"
    r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+["
    "\r\n"
    r"]*|\s*["
    "\r\n"
    r"]+|\s+(?!\S)|\s+",
]  # as the tokenizer.json of DeepSeek-V3 has them
SPLITS: dict[str, PreTokenizer] = {
    "gpt-2": ByteLevel(add_prefix_space=False),
    "qwen2": Qwen2Tokenizer(vocab={"a": 0}, merges=[]).backend_tokenizer.pre_tokenizer,
    "smollm": pre_tokenizers.Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    "deepseek-v3": pre_tokenizers.Sequence(
        [
            *(Split(Regex(expression), "isolated") for expression in DEEPSEEK),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """10,000 lines."""
    found = [line for file in TEXTS for line in file.read_text("utf-8").splitlines()]
    return [*(ODD * 50), *found][:10_000]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes the file of a Qwen3 with further metadata, or others; returns its path."""

    def write(vocab_size: int = 160, **metadata: Any) -> Path:
        build(replace(CASES["qwen3"], settings={"vocab_size": vocab_size}), tmp_path / "source")
        write_gguf(tmp_path / "source", tmp_path / "model.gguf", metadata=metadata)
        return tmp_path / "model.gguf"

    return write


def write_vocabulary(file: Path, **metadata: Any) -> str:
    """Write a file without tensors."""
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        add[type(value)](f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return str(file)


@pytest.mark.parametrize("split", SPLITS)
def test_a_vocabulary_of_bytes(split: str, lines: list[str], tmp_path: Path) -> None:
    """It splits texts as the name of its split says."""
    original = Tokenizer(models.BPE())
    original.pre_tokenizer, original.decoder = SPLITS[split], decoders.ByteLevel()
    alphabet = ByteLevel.alphabet()
    original.train_from_iterator(
        lines[:2000], trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    settings = json.loads(original.to_str())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in settings["merges"]]
    tokens = sorted(settings["vocab"], key=settings["vocab"].get)
    own = {"model": "gpt2", "pre": split, "tokens": tokens, "merges": merges, "token_type": [1] * len(tokens)}
    tokenizer = load_tokenizer_of(write_vocabulary(tmp_path / "model.gguf", **own))
    found = [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch(lines, add_special_tokens=False)]
    assert found == [encoding.ids for encoding in original.encode_batch(lines)]
    assert tokenizer.backend_tokenizer.decode_batch(found) == lines


@pytest.mark.parametrize("has_prefix", [True, False])
def test_a_vocabulary_of_sentencepiece(has_prefix: bool, lines: list[str], tmp_path: Path) -> None:
    """Its scores say which pieces come first; what it lacks is in bytes. A text may begin with a space more."""
    space = "\u2581"
    spaces: normalizers.Normalizer = normalizers.Replace(" ", space)
    prepend = normalizers.Sequence([normalizers.Prepend(space), spaces])
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        lines[:2000], trainers.BpeTrainer(vocab_size=500, limit_alphabet=90, show_progress=False)
    )
    settings = json.loads(trained.to_str())["model"]
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in settings["merges"]]
    known = sorted(settings["vocab"], key=settings["vocab"].get)
    singles = [token for token in known if len(token) == 1]
    pieces = [*("".join(pair) for pair in merges), *singles]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    original = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    original.normalizer = prepend if has_prefix else spaces
    own = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-float(number) for number in range(len(pieces))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_space_prefix": has_prefix,
    }
    tokenizer = load_tokenizer_of(write_vocabulary(tmp_path / "model.gguf", **own))
    found = [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch(lines, add_special_tokens=False)]
    assert found == [encoding.ids for encoding in original.encode_batch(lines)]
    assert tokenizer.backend_tokenizer.decode_batch(found) == lines


def test_a_tokenizer_and_its_chat_template(write: Write, make_llm: MakeLLM) -> None:
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([*ODD, Path(__file__).read_text()], vocab_size=400)
    vocabulary = trained.get_vocab()
    merges = [tuple(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    tokens = [*sorted(vocabulary, key=lambda token: vocabulary[token]), "<|end|>"]
    original = Qwen2Tokenizer(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
    original.add_special_tokens({"eos_token": "<|end|>"})
    template = "{% for message in messages %}{{ message.content }}<|end|>{% endfor %}"
    inside = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.chat_template": template,
    }
    llm = make_llm(str(write(len(tokens), **inside)), **OPTIONS)
    assert llm.tokenizer.eos_token_id == len(tokens) - 1
    assert llm.config.eos_token_ids == {len(tokens) - 1}
    assert llm.tokenizer.chat_template == template
    for line in ODD:
        ids = llm.tokenizer.encode(line)
        assert ids == original.encode(line)
        assert llm.tokenizer.decode(ids) == line
    assert llm.chat([{"role": "user", "content": "Hello"}], greedy(2), use_tqdm=False)[0].prompt_token_ids == (
        original.encode("Hello<|end|>")
    )


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ({"tokenizer.ggml.pre": "own"}, r"tokenizer\.ggml\.pre='own': must be one of .*qwen2.*; give tokenizer="),
        ({"tokenizer.ggml.model": "bert"}, r"tokenizer\.ggml\.model='bert': must be one of gpt2, llama"),
        ({"rope.scaling.type": "own"}, r"rope\.scaling\.type='own': must be none, linear, yarn"),
        (
            {"general.architecture": "own"},
            r"general\.architecture='own' is not supported in GGUF: must be one of .*gemma",
        ),
        ({"general.architecture": "clip"}, r"is a tower \(mmproj\), which nobody reads: give the language model's"),
        ({"general.type": "mmproj"}, r"is a tower \(mmproj\)"),
        ({"general.type": "adapter"}, r"general\.type in its metadata is 'adapter': must be 'model'"),
        ({"general.alignment": 33}, r"general\.alignment in its metadata is 33: must be a power of two"),
        ({"block_count": "four"}, r"qwen3\.block_count in its metadata is 'four': must be an integer"),
        ({"block_count": 2**30}, r"qwen3\.block_count in its metadata is 1073741824: must be at most its \d+ tensors"),
        ({"attention.head_count": 0}, r"qwen3\.attention\.head_count in its metadata is 0: must be above 0"),
        ({"attention.head_count": [4, 4]}, r"attention\.head_count in its metadata is an array of 2: must be one"),
        ({"attention.head_count_kv": [2]}, r"head_count_kv in its metadata has 1 values: must have one for each of"),
        ({"rope.freq_base": True}, r"qwen3\.rope\.freq_base in its metadata is True: must be a finite number"),
        ({"rope.freq_base": math.nan}, r"qwen3\.rope\.freq_base in its metadata is nan: must be a finite number"),
        (
            {"split.count": 3},
            r"split\.count in its metadata is 3, and 1 of them are given: must be named NAME-0",
        ),
        ({"tokenizer.ggml.tokens": [1, 2]}, r"ggml\.tokens in its metadata is an array of 2 numbers: must be an array"),
        ({"tokenizer.ggml.merges": "a b"}, r"ggml\.merges in its metadata is 'a b': must be an array of strings"),
        (
            {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": ["a a"]},
            r"ggml\.merges in its metadata do not fit tokenizer\.ggml\.tokens",
        ),
        ({"tokenizer.ggml.token_type": [1, 1]}, r"token_type in its metadata is an array of 2 numbers: must be an ar"),
        ({"tokenizer.ggml.eos_token_id": 7}, r"ggml\.eos_token_id in its metadata is 7: must be a number from 0 to 2"),
    ],
)
def test_what_is_unknown(inside: dict[str, Any], message: str, write: Write, make_llm: MakeLLM) -> None:
    known: dict[str, Any] = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab"]}
    known["tokenizer.ggml.merges"] = ["a b"]
    file = write(**{**known, **inside})
    with pytest.raises(ValueError, match=rf"model='.*model\.gguf.*{message}"):
        make_llm(str(file), **OPTIONS)


def test_a_file_that_is_cut_off(write: Write, make_llm: MakeLLM) -> None:
    file = write()
    whole = file.read_bytes()
    for size, message in (
        (len(whole) - 5000, r"is cut off: \S+ in F32 lies at the bytes \d+ to \d+, and the file has \d+"),
        (60, "is cut off: it ends within its header, behind byte"),
        (3, "does not begin with 'GGUF'"),
    ):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=rf"model\.gguf: {message}"):
            make_llm(str(file), **OPTIONS)
    file.write_bytes(whole[:4] + b"\x01" + whole[5:])
    with pytest.raises(ValueError, match=r"is in version 1 of GGUF: must be 2 or 3"):
        make_llm(str(file), **OPTIONS)


def test_a_type_that_nobody_knows(write: Write, make_llm: MakeLLM) -> None:
    file = write()
    content = bytearray(file.read_bytes())
    place = content.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8  # behind its dimensions
    content[place] = 200
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.gguf: output_norm\.weight, at the byte \d+, has the type 200, which"):
        make_llm(str(file), **OPTIONS)


def test_a_byte_of_the_header_that_is_wrong(write: Write) -> None:
    """A file is read, or a ValueError names it: whatever its bytes are, and wherever it ends."""
    file = write(**{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"] * 160})
    whole, wrong = file.read_bytes(), file.with_name("wrong.gguf")
    begin = min(entry.offset for entry in read_header(file).entries.values())
    generator, refused = random.Random(1), []
    for _ in range(400):
        content, place = bytearray(whole), generator.randrange(begin)
        content[place] = generator.choice([0, 1, 127, 255, content[place] ^ 1])
        wrong.write_bytes(content[: generator.choice([len(whole), generator.randrange(len(whole))])])
        read_header.__globals__["_read"].cache_clear()
        try:
            config_of(read_header(wrong))
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 200
    assert all("wrong.gguf" in message for message in refused)


def test_what_is_there_twice(write: Write) -> None:
    """A tensor, or a key."""
    file = write()
    content = bytearray(file.read_bytes())
    for old, new, message in (
        (
            b"blk.1.attn_q.weight",
            b"blk.0.attn_q.weight",
            r"blk\.0\.attn_q\.weight, at the byte \d+, is there already",
        ),
        (b"qwen3.embedding_length", b"qwen3.context_length\0\0", r"its metadata lack qwen3\.embedding_length"),
    ):
        file.write_bytes(content.replace(old, new, 1))
        with pytest.raises(ValueError, match=rf"model\.gguf: {message}"):
            config_of(read_header(file))


def test_several_parts_that_are_missing(tmp_path: Path) -> None:
    first = tmp_path / "m-00001-of-00006.gguf"
    first.touch()
    with pytest.raises(ValueError, match=r"part m-00002\S+, m-00003\S+, m-00004-of-00006\.gguf, and 2 more is not"):
        read_header(first)


def test_a_type_without_numbers(write: Write) -> None:
    """The package gguf knows it, and makes no numbers of it."""
    file = write()
    content = bytearray(file.read_bytes())
    place = content.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    struct.pack_into("<I", content, place, gguf.GGMLQuantizationType.Q8_1)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"output_norm\.weight, at the byte \d+, has the type Q8_1, of which the pack"):
        read_header(file)
