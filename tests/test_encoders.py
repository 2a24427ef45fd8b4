"""Encoders read whole texts in both directions: compared with transformers' and sentence-transformers' own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import DEVICE, greedy, of_each_kind, whole_only
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    BertTokenizerFast,
    PreTrainedModel,
)

from nanoinfer import LLM
from nanoinfer.kernels.attention.prefill.texts import attend_to_texts_reference, attend_to_texts_triton
from nanoinfer.layers.text_attention import DistanceBiases
from nanoinfer.models.reading.classes import STEMS
from nanoinfer.process.torch_state import default_dtype

VOCAB = 120
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 300,
    "pad_token_id": 1,
}
LENGTHS = [1, 2, 17, 40, 150, 200, 5]
SMALL = {"device": "cpu", "dtype": "float32"}


@dataclass
class Encoder:
    """A class, by its stem, and the settings to try."""

    stem: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)


ENCODERS = {
    "bert": Encoder("Bert", "bert"),
    "bert relu": Encoder("Bert", "bert", {"hidden_act": "relu", "layer_norm_eps": 1e-5}),
    "roberta": Encoder("Roberta", "roberta", {"type_vocab_size": 1}),
    "xlm-roberta": Encoder("XLMRoberta", "xlm-roberta", {"layer_norm_eps": 1e-5}),
    "electra": Encoder("Electra", "electra", {"embedding_size": 64}),
    "electra small": Encoder("Electra", "electra", {"embedding_size": 24}),
    "distilbert": Encoder(
        "DistilBert", "distilbert", {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4, "activation": "relu"}
    ),
    "mpnet": Encoder("MPNet", "mpnet"),
    "modernbert": Encoder("ModernBert", "modernbert", {"local_attention": 32}),
    "modernbert biases": Encoder(
        "ModernBert",
        "modernbert",
        {
            "local_attention": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "classifier_pooling": "mean",
            "classifier_activation": "silu",
        },
    ),
}


def build(name: str, auto: Any, folder: Path, **own: Any) -> PreTrainedModel:
    """Save a checkpoint of random weights, norms and biases included; returns transformers' model of it."""
    torch.manual_seed(0)
    case = ENCODERS[name]
    config = AutoConfig.for_model(case.model_type, **{**SHAPE, **case.settings, **own})
    model = auto.from_config(config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            low, high = (0.5, 1.5) if parameter.min() == 1 else (-0.3, 0.3)
            torch.nn.init.uniform_(parameter, low, high)
        else:
            torch.nn.init.normal_(parameter, std=1.4 / parameter.shape[1] ** 0.5)
    model.save_pretrained(folder)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


@torch.inference_mode()
def means(model: PreTrainedModel) -> np.ndarray:
    """Return the mean of each prompt's hidden states, of length 1."""
    states = torch.stack([model(torch.tensor([prompt])).last_hidden_state[0].mean(dim=0) for prompt in prompts()])
    return torch.nn.functional.normalize(states).numpy()


def embed(llm: LLM, **how: Any) -> np.ndarray:
    return np.stack([output.embedding for output in llm.embed(prompts(), use_tqdm=False, **how)])


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_equals_transformers(name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """In any company: steps have room for the longest text alone, or for all."""
    model = build(name, AutoModel, tmp_path)
    assert type(model).__name__ == f"{ENCODERS[name].stem}Model"
    expected = means(model)
    for options in ({}, {"max_num_batched_tokens": 200, "max_model_len": 200}):
        np.testing.assert_allclose(embed(make_llm(str(tmp_path), **SMALL, **options)), expected, atol=2e-5)


@pytest.mark.parametrize(
    "name", ["bert", *whole_only(["roberta", "electra small", "distilbert", "mpnet", "modernbert"])]
)
def test_two_ranks(name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    model = build(name, AutoModel, tmp_path)
    llm = make_llm(str(tmp_path), **SMALL, tensor_parallel_size=2)
    np.testing.assert_allclose(embed(llm), means(model), atol=2e-5)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_masked_language_model_is_read_as_its_encoder(
    name: str, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    model = build(name, AutoModelForMaskedLM, tmp_path)
    assert type(model).__name__ == f"{ENCODERS[name].stem}ForMaskedLM"
    np.testing.assert_allclose(embed(make_llm(str(tmp_path), **SMALL)), means(model.base_model), atol=2e-5)


@pytest.mark.parametrize("name", ["bert", "electra"])
def test_what_was_pretrained_by_another_head(name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    model = build(name, AutoModelForPreTraining, tmp_path)
    assert type(model).__name__ == f"{ENCODERS[name].stem}ForPreTraining"
    np.testing.assert_allclose(embed(make_llm(str(tmp_path), **SMALL)), means(model.base_model), atol=2e-5)


@pytest.mark.parametrize("name", ["bert", *whole_only(["roberta", "electra", "distilbert"])])
def test_files_of_2018_name_the_numbers_of_norms_otherwise(
    name: str, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    model = build(name, AutoModel, tmp_path)
    file = tmp_path / "model.safetensors"
    old = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}
    save_file({re.sub("|".join(old), lambda part: old[part[0]], key): x for key, x in load_file(file).items()}, file)
    np.testing.assert_allclose(embed(make_llm(str(tmp_path), **SMALL)), means(model), atol=2e-5)


@pytest.mark.parametrize("name", ENCODERS)
def test_classifiers_read_the_first_token_or_the_mean(name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    model = build(name, AutoModelForSequenceClassification, tmp_path, num_labels=3)
    with torch.inference_mode():
        expected = torch.cat([model(torch.tensor([prompt])).logits for prompt in prompts()]).numpy()
    outputs = make_llm(str(tmp_path), **SMALL).classify(prompts(), use_tqdm=False)
    np.testing.assert_allclose(np.stack([output.logits for output in outputs]), expected, atol=2e-4)
    assert [output.label for output in outputs] == [f"LABEL_{label}" for label in expected.argmax(axis=1)]


GEMMA = {
    **{"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 6, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "global_head_dim": 32, "num_global_key_value_heads": 1},
    **{"sliding_window": 9, "sliding_window_pattern": 3, "hidden_size_per_layer_input": 12, "embedding_dim": 40},
    **{"max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
}


@pytest.mark.parametrize(
    ("kind", "ranks"), [("embedding_gemma2", 1), *whole_only([("embedding_gemma2", 2), ("embedding_gemma2_text", 1)])]
)
def test_embedding_gemma_2(kind: str, ranks: int, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Inputs of layers come from embeddings alone, heads differ by layer, and each token's result is projected."""
    torch.manual_seed(0)
    alone = {"text_config": GEMMA, "vision_config": None, "audio_config": None}
    config = AutoConfig.for_model(kind, **(GEMMA if kind.endswith("text") else alone))
    model = AutoModel.from_config(config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=1.4 / parameter.shape[1] ** 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    model.save_pretrained(tmp_path)
    llm = make_llm(str(tmp_path), **SMALL, tensor_parallel_size=ranks)
    np.testing.assert_allclose(embed(llm), means(model), atol=2e-5)
    assert len(llm.embed([[5]], dimensions=40, use_tqdm=False)[0].embedding) == 40


def test_every_class_is_tried() -> None:
    assert {case.stem for case in ENCODERS.values()} == set(STEMS)


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefgh")]
DOCUMENTS = ["a b c", "d", "e f a b [SEP] g h", "h g f e d c b a " * 9]


def save_tokenizer(folder: Path, has_types: bool = True) -> BertTokenizerFast:
    file = folder / "vocab.txt"
    file.write_text("\n".join(WORDS), "utf-8")
    inputs = ["input_ids", *["token_type_ids"] * has_types, "attention_mask"]
    tokenizer = BertTokenizerFast(str(file), model_max_length=64, model_input_names=inputs)
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("name", ["bert", "xlm-roberta", *whole_only(["electra", "distilbert"])])
def test_pairs_have_two_types_of_tokens(name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Pairs that are too long are cut, as a cross-encoder does."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    build(name, AutoModelForSequenceClassification, tmp_path, num_labels=1, pad_token_id=0)
    save_tokenizer(tmp_path, has_types=name in ("bert", "electra"))
    theirs = sentence_transformers.CrossEncoder(str(tmp_path), device="cpu")
    expected = theirs.predict([("a d", document) for document in DOCUMENTS])
    outputs = make_llm(str(tmp_path), **SMALL).rerank("a d", DOCUMENTS, use_tqdm=False)
    scores = {output.index: output.score for output in outputs}
    np.testing.assert_allclose([scores[index] for index in range(len(DOCUMENTS))], expected, atol=1e-5)


def test_texts_of_one_type_beside_pairs(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Whatever a text spells, it is one text."""
    model = build("bert", AutoModelForSequenceClassification, tmp_path, num_labels=2, pad_token_id=0)
    tokenizer = save_tokenizer(tmp_path)
    with torch.inference_mode():
        expected = [model(**tokenizer(text, return_tensors="pt")).logits[0].numpy() for text in DOCUMENTS[:3]]
    outputs = make_llm(str(tmp_path), **SMALL).classify(DOCUMENTS[:3], use_tqdm=False)
    np.testing.assert_allclose(np.stack([output.logits for output in outputs]), np.stack(expected), atol=1e-4)


class TestAttention:
    LENS = (1, 70, 5, 64, 130)

    def parts(self, heads: int, kv_heads: int, dim: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return queries, keys and values, side by side in one tensor, and where texts begin."""
        torch.manual_seed(0)
        qkv = torch.randn(sum(self.LENS), heads + 2 * kv_heads, dim, device=DEVICE)
        begins = torch.tensor([0, *self.LENS], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
        return list(qkv.split([heads, kv_heads, kv_heads], dim=1)), begins

    def expected(self, q: Any, k: Any, v: Any, window: int | None, biases: torch.Tensor | None) -> torch.Tensor:
        """Return attention in float64."""
        results = []
        for some in zip(*(part.double().split(list(self.LENS)) for part in (q, k, v)), strict=True):
            queries, keys, values = (part.transpose(0, 1) for part in some)
            group = len(queries) // len(keys)
            places = torch.arange(queries.shape[1], device=q.device)
            distances = places - places[:, None]
            scores = 0.3 * queries @ keys.repeat_interleave(group, 0).transpose(1, 2)
            if biases is not None:
                scores += biases.double()[:, distances + biases.shape[1] // 2]
            if window is not None:
                scores = scores.masked_fill(distances.abs() >= window, float("-inf"))
            results.append((scores.softmax(-1) @ values.repeat_interleave(group, 0)).transpose(0, 1))
        return torch.cat(results)

    @pytest.mark.parametrize(
        ("shape", "window", "has_biases"),
        of_each_kind(
            [
                ((2, 2, 32), None, False),
                ((4, 2, 16), 9, False),
                ((3, 1, 24), 65, True),
                ((2, 2, 64), None, True),
                ((1, 1, 128), 1, False),
            ],
            0,
            1,
            2,
        ),
    )
    def test_texts_attend_to_themselves(
        self, shape: tuple[int, int, int], window: int | None, has_biases: bool
    ) -> None:
        (q, k, v), begins = self.parts(*shape)
        biases = torch.randn(shape[0], 2 * max(self.LENS) - 1, device=DEVICE) if has_biases else None
        expected = self.expected(q, k, v, window, biases)
        results = [
            attend_to_texts_reference(q, k, v, list(self.LENS), 0.3, window, biases),
            attend_to_texts_triton(q, k, v, list(self.LENS), begins, 0.3, window, biases),
        ]
        for result in results:
            torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)

    def test_buckets_are_those_of_transformers(self) -> None:
        from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

        distances = torch.arange(-600, 601)
        theirs = MPNetEncoder.relative_position_bucket(distances, num_buckets=32)
        assert torch.equal(DistanceBiases("").numbers(distances), theirs)
        with default_dtype(torch.bfloat16):  # in which models are built
            assert torch.equal(DistanceBiases("").numbers(distances), theirs)


class TestOptions:
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("encoder")
        build("bert", AutoModel, folder)
        return folder

    @pytest.fixture(scope="class")
    def expected(self, folder: Path) -> np.ndarray:
        return means(AutoModel.from_pretrained(folder))

    def test_replicas(self, folder: Path, expected: np.ndarray, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(str(folder), **SMALL, data_parallel_size=2)
        np.testing.assert_allclose(embed(llm), expected, atol=2e-5)

    def test_matrices_in_eight_bits(self, folder: Path, expected: np.ndarray, make_llm: Callable[..., LLM]) -> None:
        ours = embed(make_llm(str(folder), **SMALL, quantization="int8"))
        assert 1e-5 < 1 - (ours * expected).sum(axis=1).min() < 0.02

    @pytest.mark.parametrize("level", [1, 2])
    def test_sleep(self, level: int, folder: Path, expected: np.ndarray, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(str(folder), **SMALL)
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.load_weights(str(folder))
        np.testing.assert_allclose(embed(llm), expected, atol=2e-5)

    def test_new_weights(self, folder: Path, expected: np.ndarray, make_llm: Callable[..., LLM]) -> None:
        """A trainer has a pooler, which nobody reads."""
        llm, model = make_llm(str(folder), **SMALL), AutoModel.from_pretrained(folder)
        for parameter in model.parameters():
            parameter.data *= 1.1
        llm.update_weights(model.named_parameters())
        np.testing.assert_allclose(embed(llm), means(model), atol=2e-5)

    def test_an_adapter(self, folder: Path, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=4, target_modules=["query", "value", "intermediate.dense"])
        model = peft.get_peft_model(AutoModel.from_pretrained(folder), config).eval()
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(tmp_path)
        llm = make_llm(str(folder), **SMALL, max_adapters=1)
        llm.load_adapter("mine", str(tmp_path))
        np.testing.assert_allclose(embed(llm, adapter="mine"), means(model), atol=2e-5)

    def test_tokens_alone_fill_a_step(self, folder: Path, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(str(folder), **SMALL, max_model_len=64, max_num_batched_tokens=64, max_num_seqs=2)
        steps: list[tuple[int, int]] = []
        llm.engine.on_step = lambda result: steps.append((result.num_prompt_tokens, result.num_decode_tokens))
        llm.embed([[5] * length for length in (20, 40, 5, 64, 4, 4, 4, 4)], use_tqdm=False)
        assert steps == [(60, 0), (5, 0), (64, 0), (16, 0)]

    def test_a_step_is_one_sequence(self, folder: Path, make_llm: Callable[..., LLM]) -> None:
        """Callers see texts all the same."""
        llm = make_llm(str(folder), **SMALL, max_model_len=64, max_num_batched_tokens=64)
        sequences: list[int] = []
        llm.engine.on_step = lambda result: sequences.append(len(result.finished))
        texts = [[5 + place] * length for place, length in enumerate((20, 40, 5, 64, 4, 4, 4, 4))]
        for given in (texts, iter(texts)):
            before, first = llm.stats(), llm._requests.num_added
            outputs = list(llm.embed(given, use_tqdm=False))
            assert [output.request_id - first for output in outputs] == list(range(8))
            assert [output.prompt_token_ids for output in outputs] == texts
            after = llm.stats()
            assert after.num_requests - before.num_requests == 8
            assert after.finish_reasons["length"] - before.finish_reasons.get("length", 0) == 8
            assert after.num_prompt_tokens - before.num_prompt_tokens == 145
        assert sequences == [1, 1, 1, 1] * 2
        alone = [llm.embed([text], use_tqdm=False)[0].embedding for text in texts]
        np.testing.assert_allclose(np.stack([output.embedding for output in outputs]), alone, atol=2e-6)

    def test_a_step_waits_for_its_own_texts_alone(self, folder: Path, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(str(folder), **SMALL, max_model_len=64, max_num_batched_tokens=64)
        taken, at_steps = [], list[int]()
        llm.engine.on_step = lambda result: at_steps.append(len(taken))

        def texts() -> Iterator[list[int]]:
            for _ in range(20):
                taken.append([5] * 30)
                yield taken[-1]

        assert len(list(llm.embed(texts(), use_tqdm=False))) == 20
        assert at_steps[:2] == [5, 7]  # those of the step, of the next one, and one for which this has no room

    def test_a_text_without_numbers_ends_alone(self, folder: Path, make_llm: Callable[..., LLM]) -> None:
        llm, model = make_llm(str(folder), device="cpu", dtype="float16"), AutoModel.from_pretrained(folder)
        model.embeddings.word_embeddings.weight.data[7] = 65000.0  # and a position's adds up to more than float16 has
        model.embeddings.position_embeddings.weight.data += 600.0
        llm.update_weights(model.named_parameters())
        texts = [[5, 6], [5, 7], [8] * 20, [7]]
        outputs = llm.embed(texts, use_tqdm=False)
        assert [output.embedding is None for output in outputs] == [False, True, False, True]
        assert [output.error is None for output in outputs] == [True, False, True, False]
        assert "not finite" in outputs[1].error
        right = llm.embed(texts[::2], use_tqdm=False)
        np.testing.assert_allclose(outputs[2].embedding, right[1].embedding, atol=2e-3)

    def test_replicas_share_few_texts(self, folder: Path, make_llm: Callable[..., LLM]) -> None:
        llm, replicas = make_llm(str(folder), **SMALL, data_parallel_size=2), set[int]()
        llm.engine.on_step = lambda result: replicas.add(result.replica)
        llm.embed([[5] * 100] * 40, use_tqdm=False)
        assert replicas == {0, 1}

    def test_nothing_is_kept_of_a_text(self, folder: Path, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(str(folder), **SMALL)
        for _ in range(2):
            outputs = llm.embed(prompts(), use_tqdm=False)
            assert {output.num_cached_tokens for output in outputs} == {0}
        assert llm.memory.blocks == llm.memory.tokens == 0
        assert "KV cache" not in repr(llm)

    def test_it_does_not_generate(self, folder: Path, make_llm: Callable[..., LLM]) -> None:
        with pytest.raises(RuntimeError, match="this LLM reads texts, and has no logits of tokens"):
            make_llm(str(folder), **SMALL).generate([[5, 6]], greedy(1))

    def test_a_text_that_is_too_long(self, folder: Path, make_llm: Callable[..., LLM]) -> None:
        with pytest.raises(ValueError, match=r"prompts\[1\] has 301 tokens"):
            make_llm(str(folder), **SMALL).embed([[5], [5] * 301])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"deterministic": True}, "deterministic=True: must be False for this model: encoders have no order"),
            ({"speculation": "suffix"}, "speculation='suffix'"),
            ({"max_model_len": 301}, "max_model_len=301: must be at most 300"),
            ({"max_model_len": 300, "max_num_batched_tokens": 299}, "must be at most 299, max_num_batched_tokens"),
            ({"tensor_parallel_size": 3}, "num_attention_heads=4 is not divisible by it"),
        ],
        ids=str,
    )
    def test_options_that_an_encoder_does_not_take(self, options: dict[str, Any], message: str, folder: Path) -> None:
        with pytest.raises(ValueError, match=message):
            LLM(str(folder), **SMALL, **options)

    @pytest.mark.parametrize(
        ("name", "settings", "message"),
        [
            ("bert", {"is_decoder": True}, "is_decoder=True in its config is not supported"),
            ("modernbert", {"norm_bias": True}, "norm_bias=True in its config is not supported"),
            ("modernbert", {"classifier_activation": "tanh"}, "classifier_activation='tanh' .*not supported"),
        ],
    )
    def test_settings_that_no_encoder_has_here(
        self, name: str, settings: dict[str, Any], message: str, tmp_path: Path
    ) -> None:
        build(name, AutoModel, tmp_path, **settings)
        with pytest.raises(ValueError, match=message):
            LLM(str(tmp_path), **SMALL)
