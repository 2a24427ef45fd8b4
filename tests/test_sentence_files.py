"""The files of sentence-transformers, each key of which is taken as it takes it, or refused by file and name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases.case import SHAPE
from cases.readers import PROMPTS, TEXTS, change_json, save_sentence_model, spread_norms
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from nanoinfer import BUNDLED_MODEL, LLM
from nanoinfer.pooling import text_settings
from nanoinfer.pooling.cross_encoder import read_cross_encoder
from nanoinfer.pooling.sentence_model import read_sentence_model
from nanoinfer.pooling.text_settings import TextSettings
from nanoinfer.requests.reading.model_texts import ModelTexts
from nanoinfer.requests.text.texts import TextTokenizer

sentence_transformers = pytest.importorskip("sentence_transformers")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
cross_encoder = pytest.importorskip("sentence_transformers.cross_encoder.modules")

TEXTS_FILE, MODEL_FILE, TOKENIZER = (
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "tokenizer_config.json",
)
MODULES, CONFIG, POOLING, DENSE = "modules.json", "config.json", "1_Pooling/config.json", "2_Dense/config.json"
NORMALIZE, LOGIT_SCORE = "3_Normalize/config.json", "1_LogitScore/config.json"
PAIR = ("Who is it?", TEXTS[2])

TEMPLATE = (
    "{% for message in messages %}"
    "[{{ message.role }}]{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}<{{ part.text }}>{% endfor %}{% endif %}"
    "{% endfor %}{% if mark is defined %}{{ mark }}{% endif %}{% if add_generation_prompt %}[answer]{% endif %} end"
)


def chats(form: str, output: str) -> dict[str, Any]:
    """Return a modality_config by which texts become chats."""
    how = {"method": "forward", "method_output_name": output}
    return {"modality_config": {"text": how, "message": {**how, "format": form}}}


def of_template(**arguments: Any) -> dict[str, Any]:
    return {"processing_kwargs": {"chat_template": arguments}}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for embeddings, with all modules; its tokenizer has a chat template."""
    torch.manual_seed(0)
    model = AutoModel.from_config(
        AutoConfig.for_model("qwen3", **{**SHAPE, "vocab_size": 2048, "initializer_range": 0.2})
    )
    spread_norms(model)
    dense = {"out_features": 20}
    folder = Path(save_sentence_model(model, tmp_path_factory.mktemp("embedder"), "mean", dense=dense, prompts=PROMPTS))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def scorers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that score pairs: a classifier, and one that generates "1" or "0"."""
    found = {}
    for task, make in (
        ("sequence-classification", AutoModelForSequenceClassification),
        ("text-generation", AutoModelForCausalLM),
    ):
        torch.manual_seed(0)
        settings = {**SHAPE, "vocab_size": 2048, "initializer_range": 0.2, "pad_token_id": 0, "num_labels": 1}
        model = make.from_config(AutoConfig.for_model("qwen3", **settings))
        spread_norms(model)
        bare, whole = tmp_path_factory.mktemp("bare"), tmp_path_factory.mktemp("scorer")
        model.save_pretrained(bare)
        tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
        tokenizer.chat_template, tokenizer.pad_token = None, tokenizer.convert_ids_to_tokens(0)
        tokenizer.save_pretrained(bare)
        parts = [modules.Transformer(str(bare), transformer_task=task)]
        if task == "text-generation":
            one, none = (tokenizer.encode(text)[-1] for text in "10")
            parts.append(cross_encoder.LogitScore(one, none))
        sentence_transformers.CrossEncoder(modules=parts, device="cpu").save(str(whole))
        (whole / "chat_template.jinja").write_text(TEMPLATE)
        found[task] = whole
    return found


def changed(folder: Path, target: Path, **files: dict[str, Any]) -> str:
    """Return a copy of a checkpoint whose files of JSON have other settings."""
    shutil.copytree(folder, target)
    for name, settings in files.items():
        change_json(str(target), name, **settings)
    return str(target)


def make_texts(folder: str, task: str, sees: bool = False) -> ModelTexts:
    config: Any = SimpleNamespace(model=folder, hf_config_path=None, tokenizer=None, sees=sees, max_model_len=512)
    texts = TextTokenizer(config, AutoTokenizer.from_pretrained(folder))
    return ModelTexts(config, texts, TextSettings.read(folder, task))


def tokens_of_theirs(folder: str, inputs: list[Any], prompt: str | None) -> list[list[int]]:
    """What sentence-transformers makes of texts or pairs, without padding."""
    made = modules.Transformer.load(folder).preprocess(inputs, prompt=prompt)
    return [ids[mask.bool()].tolist() for ids, mask in zip(made["input_ids"], made["attention_mask"], strict=True)]


OF_TEXTS: dict[str, dict[str, Any]] = {  # files' settings
    "as they are": {},
    "cut": {TEXTS_FILE: {"max_seq_length": 9}},
    "cut as the tokenizer says": {TOKENIZER: {"model_max_length": 9}},
    "cut as the model says, by versions from 3": {TEXTS_FILE: {"tokenizer_args": {"model_max_length": 9}}},
    "cut by arguments": {TEXTS_FILE: {"processing_kwargs": {"text": {"max_length": 9}}, "max_seq_length": 5}},
    "not cut": {TEXTS_FILE: {"processing_kwargs": {"text": {"truncation": False}}, "max_seq_length": 9}},
    "cut at the beginning": {TEXTS_FILE: {"max_seq_length": 9}, TOKENIZER: {"truncation_side": "left"}},
    "no more than positions": {CONFIG: {"max_position_embeddings": 16}},
    "in lower case": {TEXTS_FILE: {"do_lower_case": True}},
    "chats": {TEXTS_FILE: chats("flat", "OUTPUT")},
    "chats of parts": {TEXTS_FILE: chats("structured", "OUTPUT")},
    "chats with arguments": {
        TEXTS_FILE: {**chats("flat", "OUTPUT"), **of_template(add_generation_prompt=True, mark="!")}
    },
    "chats that are cut": {TEXTS_FILE: {**chats("flat", "OUTPUT"), "max_seq_length": 30, "do_lower_case": True}},
    "chats that are cut to less than their end": {TEXTS_FILE: {**chats("flat", "OUTPUT"), "max_seq_length": 2}},
    "chats whose end is cut": {
        TEXTS_FILE: {**chats("flat", "OUTPUT"), **of_template(restore_suffix=False), "max_seq_length": 30}
    },
}


class TestTexts:
    @pytest.mark.parametrize("how", OF_TEXTS)
    def test_tokens_of_texts(self, how: str, embedder: Path, tmp_path: Path) -> None:
        files = json.loads(json.dumps(OF_TEXTS[how]).replace("OUTPUT", "last_hidden_state"))
        folder = changed(embedder, tmp_path / "changed", **files)
        ours = make_texts(folder, text_settings.EMBEDS)
        for prompt in ("", "Find: "):
            assert [ours.read_text("text", text, prompt) for text in TEXTS] == tokens_of_theirs(folder, TEXTS, prompt)

    @pytest.mark.parametrize("how", OF_TEXTS)
    def test_tokens_of_pairs(self, how: str, scorers: dict[str, Path], tmp_path: Path) -> None:
        files = json.loads(json.dumps(OF_TEXTS[how]).replace("OUTPUT", "logits"))
        folder = changed(scorers["text-generation"], tmp_path / "changed", **files)
        ours = make_texts(folder, text_settings.GENERATES)
        for prompt in ("", "Find: "):
            assert [ours.read_pair("pair", *PAIR, prompt)] == tokens_of_theirs(folder, [PAIR], prompt)

    def test_no_other_text_is_cut_or_gets_lower_case(self, embedder: Path, tmp_path: Path) -> None:
        """Whoever uses the LLM's tokenizer meanwhile, such as threads that prepare images."""
        how = {TEXTS_FILE: {"max_seq_length": 9, "do_lower_case": True}}
        ours = make_texts(changed(embedder, tmp_path / "changed", **how), text_settings.EMBEDS, sees=True)
        tokenizer = ours._texts.tokenizer
        assert tokenizer is not None
        before = tokenizer.encode(TEXTS[2])
        assert len(ours.read_text("text", TEXTS[2], "")) == 9
        assert tokenizer.backend_tokenizer.truncation is None
        assert tokenizer.encode(TEXTS[2]) == before

    def test_the_log_says_once_that_texts_are_cut(
        self, embedder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        ours = make_texts(
            changed(embedder, tmp_path / "changed", **{TEXTS_FILE: {"max_seq_length": 9}}), text_settings.EMBEDS
        )
        assert len(ours.read_text("text", "a", "")) < 9
        assert not caplog.messages
        for _ in range(2):
            ours.read_text("text", TEXTS[2], "")
        (message,) = caplog.messages
        assert message.startswith("texts of over 9 tokens are cut, as the files of")

    def test_texts_that_the_tokenizer_does_not_take(self, scorers: dict[str, Path], tmp_path: Path) -> None:
        cut = {"processing_kwargs": {"text": {"truncation": "only_second", "max_length": 2}}}
        folder = changed(scorers["text-generation"], tmp_path / "changed", **{TEXTS_FILE: cut})
        ours = make_texts(folder, text_settings.GENERATES)
        for query, document in (PAIR, ("a", "\ud800")):
            with pytest.raises(ValueError, match=r"documents\[0\] is .*: the tokenizer does not take it"):
                ours.read_pair("documents[0]", query, document, "")

    def test_names_of_all_versions(self, embedder: Path, tmp_path: Path) -> None:
        folder = Path(changed(embedder, tmp_path / "changed"))
        (folder / TEXTS_FILE).write_text("{}")
        for name in text_settings.FILES[:0:-1]:
            (folder / name).write_text(json.dumps({"max_seq_length": len(name)}))
            assert TextSettings.read(str(folder), text_settings.EMBEDS).most_tokens == len(name)


class TestEmbeddings:
    def test_texts_and_numbers_of_an_llm(self, embedder: Path, tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
        """They are cut and in lower case, in chats whose system is the prompt, and keep the first numbers."""
        of_texts = {**chats("flat", "last_hidden_state"), "do_lower_case": True, "max_seq_length": 40}
        of_model = {"truncate_dim": 6, "default_prompt_name": "query", "similarity_fn_name": "dot"}
        folder = changed(embedder, tmp_path / "changed", **{TEXTS_FILE: of_texts, MODEL_FILE: of_model})
        llm, theirs = make_llm(folder, device="cpu"), sentence_transformers.SentenceTransformer(folder, device="cpu")
        outputs = llm.embed(TEXTS, use_tqdm=False)
        embeddings = np.stack([output.embedding for output in outputs])
        assert max(len(output.prompt_token_ids) for output in outputs) == 40
        np.testing.assert_allclose(embeddings, theirs.encode(TEXTS), atol=1e-4)
        assert np.linalg.norm(embeddings, axis=1).max() < 0.99
        longer = np.stack([output.embedding for output in llm.embed(iter(TEXTS), dimensions=12, use_tqdm=False)])
        expected = theirs.encode(TEXTS, truncate_dim=12, normalize_embeddings=True)
        np.testing.assert_allclose(longer, expected, atol=1e-4)
        (given,) = llm.embed([[*range(2, 60)]], use_tqdm=False)
        assert given.prompt_token_ids == [*range(2, 60)]
        with pytest.raises(ValueError, match=re.escape("prompts[0]['messages']: must be text alone")):
            llm.embed([{"messages": [{"role": "user", "content": "a"}]}])

    @pytest.mark.parametrize(
        ("kinds", "named"),
        [
            (["Transformer"], "has Transformer: must be"),
            (["Transformer", "Dense"], "has Transformer, Dense: must be"),
            (["Transformer", "WeightedLayerPooling", "Pooling"], "has Transformer, WeightedLayerPooling, Pooling"),
            (["Transformer", "SpladePooling"], "has Transformer, SpladePooling"),
            (["StaticEmbedding"], "begins with StaticEmbedding"),
        ],
        ids=str,
    )
    def test_modules_that_give_no_embedding(self, kinds: list[str], named: str, embedder: Path, tmp_path: Path) -> None:
        folder = changed(embedder, tmp_path / "changed")
        entries = [
            {"idx": index, "name": str(index), "path": "", "type": f"sentence_transformers.models.{kind}"}
            for index, kind in enumerate(kinds)
        ]
        (Path(folder) / MODULES).write_text(json.dumps(entries))
        with pytest.raises(ValueError, match=f"modules.json {named}"):
            read_sentence_model(folder)

    @pytest.mark.parametrize(
        "entry",
        [
            {"type": "custom_st.Transformer"},
            {"path": "0_Transformer"},
            {"kwargs": ["task"]},
            {"path": "../elsewhere"},
            {"unknown": 1},
        ],
        ids=str,
    )
    def test_entries_of_modules(self, entry: dict[str, Any], embedder: Path, tmp_path: Path) -> None:
        file = Path(changed(embedder, tmp_path / "changed")) / MODULES
        first, *others = json.loads(file.read_text())
        file.write_text(json.dumps([{**first, **entry}, *others]))
        with pytest.raises(ValueError, match=rf"modules\.json.*{next(iter(entry.values()))}"):
            read_sentence_model(str(file.parent))

    def test_real_files_are_known(self, embedder: Path, tmp_path: Path) -> None:
        """Those of all-MiniLM-L6-v2 and of Qwen3-Embedding."""
        folder = Path(changed(embedder, tmp_path / "changed"))
        names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
        old = {f"pooling_mode_{name}": name == "lasttoken" for name in names}
        files: dict[str, dict[str, Any]] = {
            TEXTS_FILE: {"max_seq_length": 256, "do_lower_case": False},
            POOLING: {"word_embedding_dimension": 48, **old, "include_prompt": True},
            MODEL_FILE: {
                "__version__": {"sentence_transformers": "2.0.0", "transformers": "4.6.1", "pytorch": "1.8.1"},
                "prompts": {"query": "Query:", "document": ""},
                "default_prompt_name": None,
                "similarity_fn_name": "cosine",
            },
        }
        for name, settings in files.items():
            (folder / name).write_text(json.dumps(settings))
        model = read_sentence_model(str(folder))
        assert (model.what, model.texts) == ("last", TextSettings(most_tokens=256))


UNKNOWN = {"brand_new": 7}
OF_EMBEDDERS: list[tuple[str, dict[str, Any], str]] = [  # a file, its settings, what the error says behind the file
    (TEXTS_FILE, UNKNOWN, " has brand_new=7"),
    (TEXTS_FILE, {"max_seq_length": "9"}, ": max_seq_length='9': must be an integer of at least 1"),
    (TEXTS_FILE, {"do_lower_case": "yes"}, ": do_lower_case='yes': must be True or False"),
    (TEXTS_FILE, {"transformer_task": "fill-mask"}, ": transformer_task='fill-mask': must be 'feature-extraction'"),
    (TEXTS_FILE, {"module_output_name": "scores"}, " has module_output_name='scores': must be 'token_embeddings'"),
    (TEXTS_FILE, {"query_length": 32}, " has query_length=32"),
    (TEXTS_FILE, {"tokenizer_args": UNKNOWN}, ": tokenizer_args has brand_new=7"),
    (TEXTS_FILE, {"tokenizer_args": {"add_eos_token": False}}, ": tokenizer_args has add_eos_token=False"),
    (TEXTS_FILE, {"config_kwargs": {"is_causal": False}}, ": config_kwargs has is_causal=False"),
    (TEXTS_FILE, {"processing_kwargs": {"text": {"add_special_tokens": False}}}, "has add_special_tokens=False"),
    (TEXTS_FILE, {"model_args": UNKNOWN}, ": model_args has brand_new=7"),
    (TEXTS_FILE, {"processing_kwargs": UNKNOWN}, ": processing_kwargs has brand_new=7"),
    (TEXTS_FILE, {"processing_kwargs": {"text": UNKNOWN}}, ": processing_kwargs: text has brand_new=7"),
    (
        TEXTS_FILE,
        {"processing_kwargs": {"text": {"truncation": "some"}}},
        ": processing_kwargs: text: truncation='some'",
    ),
    (TEXTS_FILE, of_template(tokenize=False), ": processing_kwargs: chat_template has tokenize"),
    (
        TEXTS_FILE,
        chats("auto", "last_hidden_state"),
        ": modality_config: message: format='auto': must be one of 'flat'",
    ),
    (
        TEXTS_FILE,
        chats("flat", "hidden_states"),
        " has method_output_name='hidden_states': must be 'last_hidden_state'",
    ),
    (TEXTS_FILE, {"modality_config": {"smell": {}}}, ": modality_config='smell': must be one of 'text'"),
    (
        TEXTS_FILE,
        {"modality_config": {"image+text": {}}},
        ": modality_config has image+text: must have text or message",
    ),
    (MODEL_FILE, UNKNOWN, " has brand_new=7"),
    (MODEL_FILE, {"truncate_dim": 0}, ": truncate_dim=0: must be an integer of at least 1"),
    (MODEL_FILE, {"model_type": "SparseEncoder"}, ": model_type='SparseEncoder': must be 'SentenceTransformer'"),
    (MODEL_FILE, {"default_prompt_name": "none"}, ": default_prompt_name='none': must be one of prompts, "),
    (MODEL_FILE, {"prompts": {"query": 7}}, ": prompts={'query': 7}: must be a mapping of names to strings"),
    (POOLING, UNKNOWN, " has brand_new=7"),
    (POOLING, {"pooling_mode": ["mean", "max"]}, ": pooling_mode=mean, max"),
    (DENSE, UNKNOWN, " has brand_new=7"),
    (DENSE, {"module_input_name": "token_embeddings"}, " has module_input_name='token_embeddings'"),
    (DENSE, {"activation_function": "mine.Tanh"}, ": activation_function='mine.Tanh': must be one of torch.nn's"),
    (DENSE, {"in_features": 7}, ": in_features=7: must be 48"),
    (NORMALIZE, UNKNOWN, " has brand_new=7"),
]


@pytest.mark.parametrize(("file", "settings", "said"), OF_EMBEDDERS, ids=str)
def test_what_no_embedding_is_made_by(
    file: str, settings: dict[str, Any], said: str, embedder: Path, tmp_path: Path
) -> None:
    folder = changed(embedder, tmp_path / "changed", **{file: settings})
    with pytest.raises(ValueError, match=re.escape(f"{file}")) as raised:
        read_sentence_model(folder)
    assert said in str(raised.value)


ACTIVATIONS = (
    "torch.nn.modules.linear.Identity",
    "torch.nn.modules.activation.Sigmoid",
    "torch.nn.modules.activation.Tanh",
)


class TestScores:
    @pytest.mark.parametrize("task", ["sequence-classification", "text-generation"])
    def test_scores_of_an_llm(
        self, task: str, scorers: dict[str, Path], tmp_path: Path, make_llm: Callable[..., LLM]
    ) -> None:
        """Pairs become chats, whose system is the prompt or an instruction; the tokens that count are LogitScore's."""
        of_texts = {**chats("flat", "logits"), **of_template(add_generation_prompt=True), "max_seq_length": 60}
        of_model = {
            "prompts": {"web": "Which is older?"},
            "default_prompt_name": "web",
            "activation_fn": ACTIVATIONS[2],
        }
        folder = changed(scorers[task], tmp_path / "changed", **{TEXTS_FILE: of_texts, MODEL_FILE: of_model})
        llm, theirs = make_llm(folder, device="cpu"), sentence_transformers.CrossEncoder(folder, device="cpu")
        pairs = [(PAIR[0], text) for text in TEXTS]
        for instruction in (None, "Which is true?"):
            scores = [output.score for output in llm.rerank(PAIR[0], TEXTS, instruction, use_tqdm=False)]
            assert scores == pytest.approx(theirs.predict(pairs, prompt=instruction).tolist(), abs=1e-4)

    @pytest.mark.parametrize("place", [MODEL_FILE, "config.json, version 4", "config.json, version 3"])
    def test_activations(self, place: str, scorers: dict[str, Path], tmp_path: Path) -> None:
        folder = changed(scorers["sequence-classification"], tmp_path / "changed")
        if place != MODEL_FILE:
            (Path(folder) / MODULES).unlink()  # as those versions have none
        x = np.array([0.3], np.float32)
        for path in ACTIVATIONS:
            _say(folder, place, path)
            theirs = sentence_transformers.CrossEncoder(folder, device="cpu").activation_fn
            assert _read(folder).score(x) == pytest.approx(theirs(torch.from_numpy(x)).item(), abs=1e-6)
        for wrong in ("torch.nn.modules.activation.GELU", "mine.Sigmoid"):
            _say(folder, place, wrong)
            with pytest.raises(
                ValueError, match=rf"{place.split(',')[0]}: .*(activation_fn|function)=.*must be one of"
            ):
                _read(folder)

    def test_a_classifier_without_modules(
        self, scorers: dict[str, Path], tmp_path: Path, make_llm: Callable[..., LLM]
    ) -> None:
        """Its pairs are cut as the tokenizer says, where versions before 6 have saved max_length."""
        tokenizer = {TOKENIZER: {"model_max_length": 9}}
        folder = changed(scorers["sequence-classification"], tmp_path / "changed", **tokenizer)
        for name in (MODULES, "chat_template.jinja"):
            (Path(folder) / name).unlink()
        outputs = make_llm(folder, device="cpu").rerank(PAIR[0], TEXTS, use_tqdm=False)
        assert max(len(output.prompt_token_ids) for output in outputs) == 9
        expected = sentence_transformers.CrossEncoder(folder, device="cpu").predict([(PAIR[0], text) for text in TEXTS])
        assert [output.score for output in outputs] == pytest.approx(expected.tolist(), abs=1e-4)

    def test_one_token_says_yes(self, scorers: dict[str, Path], tmp_path: Path) -> None:
        how = {LOGIT_SCORE: {"true_token_id": 5, "false_token_id": None}}
        model = _read(changed(scorers["text-generation"], tmp_path / "changed", **how))
        assert model.read.tokens == (5,)
        assert model.score(np.array([0.0], np.float32)) == 0.5

    def test_no_files(self, tmp_path: Path) -> None:
        """A sigmoid makes a classifier's score; any other model answers in a form of its own."""
        assert read_cross_encoder(str(tmp_path), False, 2048) is None
        model = read_cross_encoder(str(tmp_path), True, 2048)
        assert model is not None
        assert [model.score(np.array([x], np.float32)) for x in (-200, 0)] == [0, 0.5]

    @pytest.mark.parametrize(
        ("file", "settings", "said"),
        [
            (TEXTS_FILE, UNKNOWN, " has brand_new=7"),
            (
                TEXTS_FILE,
                {"transformer_task": "any-to-any"},
                ": transformer_task='any-to-any': must be 'text-generation'",
            ),
            (MODEL_FILE, UNKNOWN, " has brand_new=7"),
            (MODEL_FILE, {"model_type": None}, ": model_type='SentenceTransformer': must be 'CrossEncoder'"),
            (LOGIT_SCORE, UNKNOWN, " has brand_new=7"),
            (LOGIT_SCORE, {"true_token_id": 2048}, ": true_token_id=2048: must be an integer from 0 to 2047"),
            (LOGIT_SCORE, {"module_input_name": "scores"}, " has module_input_name='scores': must be 'causal_logits'"),
            (CONFIG, {"sentence_transformers": UNKNOWN}, ": sentence_transformers has brand_new=7"),
        ],
        ids=str,
    )
    def test_what_no_score_is_made_by(
        self, file: str, settings: dict[str, Any], said: str, scorers: dict[str, Path], tmp_path: Path
    ) -> None:
        folder = changed(scorers["text-generation"], tmp_path / "changed", **{file: settings})
        with pytest.raises(ValueError, match=re.escape(file)) as raised:
            _read(folder)
        assert said in str(raised.value)

    def test_modules_that_give_no_score(self, embedder: Path, scorers: dict[str, Path]) -> None:
        with pytest.raises(
            ValueError, match=r"has Transformer, Pooling, Dense, Normalize: must be Transformer, LogitScore"
        ):
            read_cross_encoder(str(embedder), False, 2048)
        with pytest.raises(ValueError, match="has Transformer, LogitScore: must be Transformer to score pairs"):
            read_cross_encoder(str(scorers["text-generation"]), True, 2048)

    def test_a_template_without_a_role(self, scorers: dict[str, Path], tmp_path: Path) -> None:
        folder = changed(scorers["text-generation"], tmp_path / "changed", **{TEXTS_FILE: chats("flat", "logits")})
        (Path(folder) / "chat_template.jinja").write_text("{{ messages[-1].content }}")
        texts = make_texts(folder, text_settings.GENERATES)
        with pytest.raises(ValueError, match="chat template leaves out messages of role 'query'"):
            texts.read_pair("pair", *PAIR, "")


def _read(folder: str) -> Any:
    is_classifier = not (Path(folder) / LOGIT_SCORE).exists()
    return read_cross_encoder(folder, is_classifier, 2048)


def _say(folder: str, place: str, path: str) -> None:
    """Name an activation as a version of sentence-transformers has saved it."""
    if place == MODEL_FILE:
        change_json(folder, MODEL_FILE, activation_fn=path)
    elif place.endswith("4"):
        change_json(folder, CONFIG, sentence_transformers={"activation_fn": path, "version": "4.1.0"})
    else:
        change_json(folder, CONFIG, sbert_ce_default_activation_function=path)
