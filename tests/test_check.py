"""python -m nanoinfer.check: what differs from transformers is found, and named."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, build
from conftest import safetensors_of, whole_only
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, Qwen3ForCausalLM

from nanoinfer import BUNDLED_MODEL, LLM
from nanoinfer.check import comparison
from nanoinfer.check.__main__ import main
from nanoinfer.check.cause import find_cause
from nanoinfer.check.comparison import CHECKS, PLAIN, compare, compare_chats
from nanoinfer.check.oracle import (
    Chat,
    Oracle,
    ask_for_streams,
    ask_transformers,
    continue_text,
    render_chats,
    run_model,
)
from nanoinfer.check.texts import CHATS
from nanoinfer.runner.threads import num_threads
from nanoinfer.runner.weight_writer import WeightWriter

WEIGHT = "model.layers.2.mlp.down_proj.weight"


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with num_threads(1):
        yield


@pytest.fixture(scope="module")
def computed() -> Oracle:
    with num_threads(1):
        return ask_transformers(BUNDLED_MODEL, "cpu", int)


@pytest.fixture
def expected(computed: Oracle, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let transformers be asked no more; returns what changes its answers."""

    def change(**fields: Any) -> None:
        monkeypatch.setattr(comparison, "ask_transformers", lambda *_: computed._replace(**fields))

    change()
    return change


def check(*arguments: str) -> int:
    return main([BUNDLED_MODEL, "--device", "cpu", *arguments])


def copied(folder: Path, change: Callable[[dict[str, Tensor]], object] = dict) -> str:
    """Copy the bundled model, with other tensors."""
    shutil.copytree(BUNDLED_MODEL, folder, dirs_exist_ok=True)
    (file,) = safetensors_of(str(folder))
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return str(folder)


def rows_of(printed: str) -> dict[str, str]:
    """Return the verdict of each row of a table."""
    lines = [line for line in printed.splitlines()[1:] if "  " in line]
    return {line.split("  ")[0]: line.split()[-1] for line in lines}


def test_a_checkpoint_that_equals_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    assert check() == 0
    assert rows_of(capsys.readouterr().out) == dict.fromkeys(CHECKS, "ok")


def test_each_value_of_an_option_has_its_perplexity(
    expected: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check("--quantization", "int8", "fp8", "--quantization", "int4") == 0
    names = ["quantization=int8", "quantization=fp8", "quantization=int4"]
    assert [*rows_of(capsys.readouterr().out)] == [*CHECKS, *names]


def test_a_perplexity_may_be_larger_by_so_much(
    expected: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    perplexities = iter([10.0, 15.1, 14.9])  # those of so few texts depend on the machine
    monkeypatch.setattr(comparison, "_perplexity", lambda outputs: next(perplexities))
    assert check("--quantization", "int8", "--kv-cache-dtype", "fp8", "--most-loss", "0.5") == 1
    verdicts = rows_of(capsys.readouterr().out)
    assert (verdicts["quantization=int8"], verdicts["kv_cache_dtype=fp8"]) == ("DIFFERS", "ok")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_numbers_that_are_not_finite_differ(
    dtype: str, expected: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = WeightWriter.load

    def load_large(self: WeightWriter, *arguments: Any) -> None:
        load(self, *arguments)
        (shard,) = self.table[WEIGHT]
        assert isinstance(shard.target, Tensor)
        if shard.target.dtype == getattr(torch, dtype):
            shard.target.fill_(torch.finfo(shard.target.dtype).max)

    monkeypatch.setattr(WeightWriter, "load", load_large)
    assert check("--dtype", "float16") == 1
    printed = capsys.readouterr().out
    differ = ["dtype=float16"] if dtype == "float16" else [*CHECKS[2:], "dtype=float16"]
    assert [name for name, verdict in rows_of(printed).items() if verdict == "DIFFERS"] == differ
    assert ("layer 2 is the first whose result differs" in printed) == (dtype == "float32")


def test_one_model_at_a_time_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[weakref.ref[Any]] = []
    load = Qwen3ForCausalLM.from_pretrained

    def load_noted(*arguments: Any, **options: Any) -> Any:
        model = load(*arguments, **options)
        models.append(weakref.ref(model))
        return model

    def start(folder: str, **options: Any) -> LLM:
        assert [model() for model in models] == [None]
        return LLM(folder, **options)

    monkeypatch.setattr(Qwen3ForCausalLM, "from_pretrained", load_noted)
    monkeypatch.setattr(comparison, "LLM", start)
    rows, _ = compare(BUNDLED_MODEL, "cpu")
    assert len(models) == 1
    assert len(rows) == len(CHECKS)


@pytest.mark.parametrize(
    ("tensor", "place"),
    [
        ("model.embed_tokens.weight", "the embedding "),
        ("model.layers.1.self_attn.k_norm.weight", "layer 1 "),
        ("model.layers.2.mlp.up_proj.weight", "layer 2 "),  # packed
        ("model.norm.weight", "layer 3, or the norm behind it, "),
    ],
)
def test_a_weight_that_is_not_the_files_is_named(
    tensor: str,
    place: str,
    expected: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = WeightWriter.load

    def load_otherwise(self: WeightWriter, *arguments: Any) -> None:
        load(self, *arguments)
        for shard in self.table[tensor]:
            target = shard.target
            numbers = target.clone() if isinstance(target, Tensor) else target.unpacked()
            target.copy_(numbers + 0.05)

    monkeypatch.setattr(WeightWriter, "load", load_otherwise)
    assert check() == 1
    *table, cause = capsys.readouterr().out.splitlines()
    verdicts = rows_of("\n".join(table))
    assert [verdicts[name] for name in CHECKS] == ["ok", "ok", "DIFFERS", "DIFFERS"]
    assert cause.startswith(f"{place}is the first whose result differs, at position ")
    assert cause.endswith(f"; {tensor} is not as in the checkpoint's files")


def test_a_layer_that_computes_otherwise_is_named(
    tmp_path: Path, expected: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a family would that is described wrongly: the files' weights are right."""
    other = copied(tmp_path, lambda tensors: tensors[WEIGHT].mul_(1.5))
    monkeypatch.setattr(comparison, "LLM", lambda folder, **options: LLM(other, **options))
    rows, cause = compare(BUNDLED_MODEL, "cpu")
    assert [row.is_fine for row in rows] == [True, True, False, False]
    assert cause is not None
    assert cause.startswith("layer 2 is the first whose result differs, at position 0, by ")
    assert cause.endswith("; its weights are those of the checkpoint's files")


LAST_OF_CLASSES = list({case.architecture: name for name, case in CASES.items()}.values())
# Norms behind branches, factors of their results, experts, states:
OF_KINDS = ["gemma2 low caps", "granite", "qwen2moe without biases", "qwen3.5"]


@pytest.mark.parametrize("name", [*OF_KINDS, *whole_only(name for name in LAST_OF_CLASSES if name not in OF_KINDS)])
def test_each_family_has_transformers_streams(name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """The comparison finds no layer, or the one behind which transformers' stream is another."""
    build(CASES[name], tmp_path)
    token_ids = list(range(1, 21))
    folder = str(tmp_path)
    wanted = run_model(folder, "cpu", lambda model: continue_text(model, token_ids))
    streams = ask_for_streams(folder, "cpu", wanted.token_ids + wanted.new_ids)
    options = {"device": "cpu", "enforce_eager": True, "max_model_len": 64, **PLAIN}
    assert find_cause(make_llm(folder, **options), wanted, streams).startswith("in eager steps, the layers' results")
    if name in OF_KINDS:
        moved = [*streams[:2], *(1.01 * stream for stream in streams[2:])]
        assert find_cause(make_llm(folder, **options), wanted, moved).startswith("layer 1 is the first ")


def test_a_difference_behind_the_layers_is_told(expected: Callable[..., None], computed: Oracle) -> None:
    french = computed.continuations["French"]
    moved = french._replace(logprobs=[value + 0.01 for value in french.logprobs])
    expected(continuations={**computed.continuations, "French": moved})
    rows, cause = compare(BUNDLED_MODEL, "cpu")
    assert [row.is_fine for row in rows] == [True, True, False, True]
    assert "in French; allowed are 0.001" in rows[2].found
    assert cause is not None
    assert "look at the output projection" in cause
    rows, cause = compare(BUNDLED_MODEL, "cpu", tolerance=0.02)
    assert all(row.is_fine for row in rows)
    assert cause is None


@pytest.mark.parametrize(("gap", "found"), [(1e-4, "equal; 1 differ at a near tie"), (1e-2, "other: Thai; 0 differ")])
def test_tokens_may_differ_at_a_near_tie(
    gap: float, found: str, expected: Callable[..., None], computed: Oracle
) -> None:
    thai = computed.continuations["Thai"]
    place, other = 5, 0
    likeliest = [*thai.likeliest]
    likeliest[place] = {other: -1.0, thai.new_ids[place]: -1.0 - gap}
    new_ids = [*thai.new_ids[:place], other, *thai.new_ids[place + 1 :]]
    expected(continuations={**computed.continuations, "Thai": thai._replace(new_ids=new_ids, likeliest=likeliest)})
    rows, _ = compare(BUNDLED_MODEL, "cpu")
    assert rows[3].found.startswith(found)
    assert rows[3].is_fine == (gap < 1e-3)


def test_chats_and_tokens_that_differ_are_named(expected: Callable[..., None], computed: Oracle) -> None:
    asked = computed.chats["one question"]
    chats = {**computed.chats, "one question": Chat(asked.text, [*asked.token_ids, 0])}
    expected(chats=chats, token_ids={**computed.token_ids, "emoji": [1]}, decoded={**computed.decoded, "tabs": ""})
    rows, cause = compare(BUNDLED_MODEL, "cpu")
    assert [row.is_fine for row in rows] == [False, False, True, True]
    assert rows[0].found.startswith("other: one question; the template does not take tools, ")
    assert rows[1].found.startswith("other: emoji; ")  # what comes back as it was is right
    assert cause is None


TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
CALLS = "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
MESSAGES = "{% for m in messages %}<{{ m.role }}>{{ CONTENT }}" + CALLS + "{% endfor %}"
TEMPLATES = {
    "strings": (TOOLS + MESSAGES.replace("CONTENT", "m.content"), [*CHATS]),
    "parts alone": (TOOLS + MESSAGES.replace("CONTENT", "m.content[0].text"), [*CHATS]),
    "no tools": (MESSAGES.replace("CONTENT", "m.content"), [name for name in CHATS if "tool" not in name]),
    "no system message": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        + TOOLS
        + MESSAGES.replace("CONTENT", "m.content"),
        [name for name in CHATS if "system" not in name],
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_that_a_template_takes_are_compared(name: str, make_llm: Callable[..., LLM]) -> None:
    template, taken = TEMPLATES[name]
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    tokenizer.chat_template = template
    chats = render_chats(tokenizer)
    assert [*chats] == taken
    llm = make_llm(device="cpu", **PLAIN)
    llm.tokenizer.chat_template = template
    row = compare_chats(llm, chats)
    assert row.is_fine, row.found
    assert row.compared == f"{len(taken)} of {len(CHATS)}"


def test_a_tokenizer_may_have_no_template(make_llm: Callable[..., LLM]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    tokenizer.chat_template = None
    assert compare_chats(make_llm(device="cpu", **PLAIN), render_chats(tokenizer)).compared == "none"


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def as_reader(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), "architectures": ["Qwen3Model"]}), "utf-8")


def cut(tensors: dict[str, Tensor]) -> None:
    tensors[WEIGHT] = tensors[WEIGHT][1:].clone()


@pytest.mark.parametrize(
    ("arguments", "change", "message"),
    [
        (["--quantization", "int3"], None, "quantization='int3': must be one of"),
        (["--kv-cache-dtype", "int8"], None, "kv_cache_dtype='int8': must be"),
        (["--dtype", "bfloat16", "float8"], None, "dtype='float8': must be"),
        (["--device", "tpu"], None, "device='tpu': must be"),
        (["--tolerance", "-1"], None, "--tolerance -1.0: must be a number of at least 0"),
        (["--most-loss", "nan"], None, "--most-loss nan: must be a number of at least 0"),
        ([], lambda folder: (folder / "config.json").unlink(), "no Hugging Face model"),
        ([], without_tokenizer, "has no tokenizer: must have one of tokenizer.json"),
        ([], as_reader, "generates none"),
        ([], lambda folder: (folder / "model.safetensors").write_bytes(b"no"), "model.safetensors: cannot be read: "),
        ([], lambda folder: copied(folder, cut), "transformers cannot load it: "),
        (
            [],
            lambda folder: copied(folder, lambda tensors: tensors.pop(WEIGHT)),
            f"does not fit the model: missing: {WEIGHT}",
        ),
    ],
)
def test_what_cannot_be_compared_is_named(
    arguments: list[str],
    change: Callable[[Path], object] | None,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = BUNDLED_MODEL
    if change is not None:
        model = copied(tmp_path)
        change(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([model, *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
