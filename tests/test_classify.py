"""LLM.classify and LLM.rerank: scores as transformers' classifiers and Qwen3-Reranker's model card compute them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases.case import SHAPE
from cases.readers import TEXTS, add_tokenizer, change_json, spread_norms
from conftest import of_each_kind
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

from nanoinfer import BUNDLED_MODEL, LLM
from nanoinfer.models.reading.classes import CLASSIFIERS
from nanoinfer.requests.reading.pairs import BEGIN, INSTRUCTION
from nanoinfer.requests.reading.pairs import END as ANSWER

TYPES = {
    "Gemma2": ("gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 16, "final_logit_softcapping": 2.0}),
    "Llama": ("llama", {}),
    "Mistral": ("mistral", {"sliding_window": 24}),
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {}),
}
SPREAD = [{}, {"max_num_batched_tokens": 50}, {"tensor_parallel_size": 2}]
SMALL = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 96}

Save = Callable[..., str]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Save a classifier of random weights, with a tokenizer; returns its folder."""

    def make(stem: str = "Qwen3", labels: int = 3, **settings: Any) -> str:
        torch.manual_seed(0)
        kind, own = TYPES[stem]
        shape = {**SHAPE, "vocab_size": 2048, "initializer_range": 0.2, **own}
        if stem == "Qwen2":
            shape.pop("head_dim")
        config = AutoConfig.for_model(kind, **{**shape, "pad_token_id": 0, **settings}, num_labels=labels)
        model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").float()
        assert type(model).__name__ in CLASSIFIERS
        spread_norms(model)
        folder = str(tmp_path_factory.mktemp("classifier"))
        model.save_pretrained(folder)
        add_tokenizer(folder)
        return folder

    return make


def logits_of(folder: str, prompts: list[list[int]]) -> np.ndarray:
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([prompt])).logits for prompt in prompts]).numpy()


def prompts_of_all_lengths() -> list[list[int]]:
    lengths = [1, 2, 15, 16, 17, 33, 95, 96]
    return [torch.randint(2, 2048, (length,)).tolist() for length in lengths]


@pytest.mark.parametrize(
    ("stem", "labels"), of_each_kind([(stem, labels) for stem in TYPES for labels in (1, 3)], 1, 8)
)
def test_each_class(stem: str, labels: int, save: Save, make_llm: Callable[..., LLM]) -> None:
    folder, prompts = save(stem, labels), prompts_of_all_lengths()
    llm = make_llm(folder, **SMALL)
    expected = logits_of(folder, prompts)
    for _ in range(2):
        outputs = llm.classify(prompts, use_tqdm=False)
        np.testing.assert_allclose(np.stack([output.logits for output in outputs]), expected, atol=1e-4)
    assert [output.num_classes for output in outputs] == [labels] * len(prompts)


@pytest.mark.parametrize("options", SPREAD[1:], ids=str)
def test_in_chunks_and_on_two_ranks(options: dict, save: Save, make_llm: Callable[..., LLM]) -> None:
    folder, prompts = save(), prompts_of_all_lengths()
    outputs = make_llm(folder, **SMALL, **options).classify(iter(prompts), use_tqdm=False)
    np.testing.assert_allclose(np.stack([each.logits for each in outputs]), logits_of(folder, prompts), atol=1e-4)


def test_bits_do_not_depend_on_company_or_chunks(save: Save, make_llm: Callable[..., LLM]) -> None:
    folder, prompts = save(), prompts_of_all_lengths()[:6]
    whole = make_llm(folder, **SMALL, deterministic=True)
    cut = make_llm(folder, **SMALL, deterministic=True, max_num_batched_tokens=7)
    alone = [llm.classify([prompt], use_tqdm=False)[0].logits for llm in (whole,) for prompt in prompts]
    for llm in (whole, cut):
        for output, expected in zip(llm.classify(prompts, use_tqdm=False), alone, strict=True):
            np.testing.assert_array_equal(output.logits, expected)


@pytest.mark.parametrize(
    ("labels", "problem"),
    [(3, None), (1, None), (3, "multi_label_classification"), (1, "regression"), (3, "single_label_classification")],
    ids=str,
)
def test_probabilities_are_those_of_the_pipeline(
    labels: int, problem: str | None, save: Save, make_llm: Callable[..., LLM]
) -> None:
    folder = save(labels=labels)
    names = {number: f"class {number}" for number in range(labels)}
    change_json(folder, "config.json", problem_type=problem, id2label=names, label2id={v: k for k, v in names.items()})
    outputs = make_llm(folder, device="cpu").classify(TEXTS, use_tqdm=False)
    classify = pipeline("text-classification", folder, top_k=None, device="cpu")
    for output, expected in zip(outputs, classify(TEXTS), strict=True):
        ours = {names[number]: float(prob) for number, prob in enumerate(output.probs)}
        assert ours == pytest.approx({entry["label"]: entry["score"] for entry in expected}, abs=1e-4)
        assert output.label == expected[0]["label"]
        assert output.outputs.probs is output["probs"]
        assert output.probs.dtype == output.logits.dtype == np.float32


def test_padding_at_the_end_does_not_count(save: Save, make_llm: Callable[..., LLM]) -> None:
    folder = save()
    prompts = [[5, 6, 0, 0], [0, 7, 0], [0, 0]]
    outputs = make_llm(folder, device="cpu").classify(prompts, use_tqdm=False)
    np.testing.assert_allclose(np.stack([each.logits for each in outputs]), logits_of(folder, prompts), atol=1e-4)
    assert [output.prompt_token_ids for output in outputs] == [[5, 6], [0, 7], [0]]


def test_new_weights_have_the_head(save: Save, make_llm: Callable[..., LLM]) -> None:
    folder = save()
    llm = make_llm(folder, device="cpu")
    (before,) = llm.classify([[5, 6]], use_tqdm=False)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    llm.update_weights([("score.weight", 2 * model.score.weight)], partial=True)
    (after,) = llm.classify([[5, 6]], use_tqdm=False)
    np.testing.assert_allclose(after.logits, 2 * before.logits, rtol=1e-6)


def test_an_adapter_beside_the_layers(save: Save, make_llm: Callable[..., LLM]) -> None:
    folder, prompts = save(), prompts_of_all_lengths()
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight"):
            a, b = torch.randn(4, weight.shape[1]) * 0.2, torch.randn(weight.shape[0], 4) * 0.2
            weight.data += b @ a
            module = name.removesuffix(".weight")
            tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
    with torch.inference_mode():
        changed = [model(torch.tensor([prompt])).logits[0].numpy() for prompt in prompts]
    llm = make_llm(folder, **SMALL, max_adapters=1)
    llm.load_adapter("mine", tensors, alpha=4)
    for adapter, expected in (("mine", changed), (None, logits_of(folder, prompts))):
        outputs = llm.classify(prompts, use_tqdm=False, adapter=adapter)
        np.testing.assert_allclose([output.logits for output in outputs], expected, atol=1e-4)


def test_a_checkpoint_without_a_head(save: Save, make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ValueError, match="classify: Qwen3ForCausalLM has no labels: must be one of Gemma2ForSeq"):
        make_llm(device="cpu").classify(["a"])
    with pytest.raises(ValueError, match="runner='generate': must be left out: Qwen3ForSequenceClassification"):
        LLM(save(), runner="generate", device="cpu")
    with pytest.raises(ValueError, match="rerank: the model has 3 labels: must have 1"):
        make_llm(save(), device="cpu").rerank("a", ["b"])


def test_a_classifier_of_one_label_reads_pairs(save: Save, make_llm: Callable[..., LLM]) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = save(labels=1)
    llm = make_llm(folder, device="cpu")
    scores = [output.score for output in llm.rerank("Who?", TEXTS, use_tqdm=False)]
    encoder = sentence_transformers.CrossEncoder(folder, device="cpu")
    expected = [encoder.predict([("Who?", text)])[0] for text in TEXTS]
    assert scores == pytest.approx(expected, abs=1e-4)
    streamed = llm.rerank("Who?", iter(TEXTS), use_tqdm=False)
    assert [(output.index, output.document, output.outputs.score) for output in streamed] == [
        (index, text, score) for index, (text, score) in enumerate(zip(TEXTS, scores, strict=True))
    ]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that generates, whose tokenizer knows yes and no."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **{**SHAPE, "vocab_size": 2050}, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config)
    spread_norms(model)
    folder = tmp_path_factory.mktemp("reranker")
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("options", SPREAD, ids=str)
def test_yes_or_no(options: dict, reranker: str, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(reranker, device="cpu", **options)
    tokenizer, model = AutoTokenizer.from_pretrained(reranker), AutoModelForCausalLM.from_pretrained(reranker)
    for instruction in (None, "Which is older?"):
        outputs = llm.rerank("Who?", TEXTS, instruction, use_tqdm=False)
        for output, text in zip(outputs, TEXTS, strict=True):
            pair = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: Who?\n<Document>: {text}"
            ids = [id for part in (BEGIN, pair, ANSWER) for id in tokenizer.encode(part, add_special_tokens=False)]
            assert output.prompt_token_ids == ids
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[0, -1]
            no, yes = (tokenizer.convert_tokens_to_ids(token) for token in ("no", "yes"))
            assert output.score == pytest.approx(logits[[no, yes]].softmax(0)[1].item(), abs=1e-4)


def test_what_is_no_pair(reranker: str, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(reranker, device="cpu")
    assert [output.index for output in llm.rerank("a", "b", use_tqdm=False)] == [0]
    assert llm.rerank("a", [], use_tqdm=False) == []
    for query, documents, message in (
        (3, ["b"], "query=3: must be a string"),
        ("a", ["b", 4], "documents[1]=4: must be a string"),
        ("a", 4, "documents=4: must be a list of strings"),
        ("a", ["b" * 3000], "documents[0]['prompt_token_ids'] has"),
        ("a", ["b", "\ud83d"], "documents[1] is '\\ud83d': must have no half of a surrogate pair, as '\\ud83d'"),
        ("\ude00", ["b"], "query is '\\ude00': must have no half of a surrogate pair, as '\\ude00'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            llm.rerank(query, documents)
    with pytest.raises(ValueError, match="rerank: the tokenizer has no token yes: must be"):
        make_llm(device="cpu").rerank("a", ["b"])


def test_a_head_of_other_labels(save: Save) -> None:
    folder = save()
    change_json(folder, "config.json", architectures=["Qwen3ForSequenceClassification"], id2label=None, num_labels=5)
    with pytest.raises(ValueError, match=r"score\.weight has shape"):
        LLM(folder, device="cpu")
