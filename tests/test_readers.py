"""Texts that are read get what generation has: replicas, formats, adapters, images, sleep, new weights, Ctrl-C."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.pictures import picture
from cases.tuned import ALPHA, Tuned
from conftest import greedy, of_each_kind, whole_only
from test_spmd import Trainer
from test_spmd import make as make_with_peers
from torch.nn.functional import normalize
from transformers import AutoModel

from nanoinfer import BUNDLED_MODEL, LLM, EmbeddingOutput, LoRARequest

OPTIONS: dict[str, Any] = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 128}
PROMPTS = [[7], list(range(20, 60)), [5, 6] * 30, list(range(20, 70))]
RUNNERS = of_each_kind([("pooling",), ("generate",)], 0)


def embed(llm: LLM, prompts: Any = PROMPTS, **how: Any) -> np.ndarray:
    return np.stack([output.embedding for output in llm.embed(prompts, use_tqdm=False, **how)])


def expected(model: Any, prompts: list[list[int]] = PROMPTS) -> np.ndarray:
    """The hidden states of the prompts' last tokens, by transformers' decoder without its head."""
    with torch.inference_mode():
        states = [model(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in prompts]
    return normalize(torch.stack(states)).numpy()


@pytest.fixture(scope="module")
def bundled() -> np.ndarray:
    return expected(AutoModel.from_pretrained(BUNDLED_MODEL).float())


@pytest.mark.parametrize("runner", RUNNERS)
def test_replicas(runner: str, make_llm: Callable[..., LLM], bundled: np.ndarray) -> None:
    llm = make_llm(**OPTIONS, runner=runner, data_parallel_size=2)
    np.testing.assert_allclose(embed(llm), bundled, atol=1e-4)
    many = [PROMPTS[i % len(PROMPTS)] + [i] for i in range(60)]
    outputs = list(llm.embed(iter(many), use_tqdm=False))
    assert [output.prompt_token_ids for output in outputs] == many
    assert llm.stats().num_requests == len(PROMPTS) + len(many)


@pytest.mark.parametrize("quantization", of_each_kind([("fp8",), ("int4",), ("int8",), ("mxfp4",)], 0, 1))
def test_quantized_weights_are_read_as_they_generate(quantization: str, make_llm: Callable[..., LLM]) -> None:
    only, both = (make_llm(**OPTIONS, quantization=quantization, runner=runner) for runner in ("pooling", "generate"))
    np.testing.assert_allclose(embed(only), embed(both), atol=1e-4)


@pytest.mark.parametrize("runner", RUNNERS)
def test_adapters(runner: str, make_llm: Callable[..., LLM], bundled: np.ndarray, tmp_path: Path) -> None:
    tuned = Tuned(BUNDLED_MODEL, seed=1)
    llm = make_llm(**OPTIONS, runner=runner, max_adapters=2)
    bare = {name.replace("model.model.", "model.", 1): tensor for name, tensor in tuned.tensors.items()}
    llm.load_adapter("red", bare if runner == "pooling" else tuned.tensors, alpha=ALPHA)
    changed = expected(tuned.model.model)
    for _ in range(2):
        np.testing.assert_allclose(embed(llm, adapter="red"), changed, atol=1e-4)
        np.testing.assert_allclose(embed(llm), bundled, atol=1e-4)
    blue = LoRARequest("blue", 1, tuned.save(tmp_path / "blue"))
    mixed = embed(llm, lora_request=[None, blue, None, blue])
    np.testing.assert_allclose(mixed[::2], bundled[::2], atol=1e-4)
    np.testing.assert_allclose(mixed[1::2], changed[1::2], atol=1e-4)
    with pytest.raises(ValueError, match="lora_request has 2 entries for 4 prompts"):
        embed(llm, lora_request=[None, blue])
    with pytest.raises(ValueError, match="lora_request has 1 entries: must be one, if prompts come from an iterator"):
        llm.embed(iter(PROMPTS), lora_request=[blue])
    with pytest.raises(ValueError, match="adapter='red': must be None"):
        llm.embed(PROMPTS, adapter="red", lora_request=blue)
    with pytest.raises(ValueError, match="adapter='green'"):
        llm.embed(PROMPTS, adapter="green")


@pytest.mark.parametrize("runner", RUNNERS)
def test_images(runner: str, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    from test_asking_with_images import Checkpoint

    seeing = Checkpoint("qwen3-vl", tmp_path)
    images = picture(61, 97), picture(150, 40, 1)
    texts = [seeing.text("one ", image, " and more") for image in images]
    prompts = [
        {"prompt": text, "multi_modal_data": {"image": image}} for text, image in zip(texts, images, strict=True)
    ]
    rows = []
    for text, image in zip(texts, images, strict=True):
        inputs = seeing.processor(text=text, images=[image], return_tensors="pt")
        with torch.inference_mode():
            rows.append(seeing.model.model(**inputs).last_hidden_state[0, -1])
    theirs = normalize(torch.stack(rows)).numpy()
    with seeing.llm, seeing.make_llm(runner=runner) as llm:
        np.testing.assert_allclose(embed(llm, prompts), theirs, atol=1e-4)
        np.testing.assert_allclose(
            [each.embedding for each in llm.embed(iter(prompts), use_tqdm=False)], theirs, atol=1e-4
        )


def embed_in_peers(runner: str) -> tuple[bool, list[list[float]], list[str]]:
    """Embed in each process of a trainer; returns whether an iterator gives the same, the embeddings, and errors."""
    errors = []
    with make_with_peers(runner=runner, max_num_batched_tokens=50) as llm:
        outputs = llm.embed(PROMPTS, use_tqdm=False)
        streamed = list(llm.embed(iter(PROMPTS), use_tqdm=False))
        for wrong in (lambda: llm.embed([[]]), lambda: llm.classify(PROMPTS), lambda: llm.embed(["a"], dimensions=0)):
            with pytest.raises(ValueError) as error:
                wrong()
            errors.append(str(error.value))
        same = all(np.array_equal(one.embedding, two.embedding) for one, two in zip(outputs, streamed, strict=True))
    return same, [output.embedding.tolist() for output in outputs], errors


@pytest.mark.parametrize("runner", RUNNERS)
def test_in_a_trainers_processes(runner: str, tmp_path: Path, bundled: np.ndarray) -> None:
    trainer = Trainer("cpu", tmp_path)
    try:
        _, embeddings, errors = trainer.run(embed_in_peers, runner)
    finally:
        trainer.end()
    np.testing.assert_allclose(embeddings, bundled, atol=1e-4)
    assert [error.partition(":")[0] for error in errors] == ["prompts[0] is empty", "classify", "dimensions=0"]


def test_beside_guesses(make_llm: Callable[..., LLM], bundled: np.ndarray) -> None:
    np.testing.assert_allclose(embed(make_llm(**OPTIONS, speculation="suffix")), bundled, atol=1e-4)
    with pytest.raises(ValueError, match="speculation='suffix': must be left out: this LLM reads texts"):
        make_llm(**OPTIONS, speculation="suffix", runner="pooling")


def test_sleep_and_new_weights(make_llm: Callable[..., LLM], bundled: np.ndarray) -> None:
    llm = make_llm(**OPTIONS, runner="pooling")
    llm.sleep(2)
    with pytest.raises(RuntimeError, match="sleeps"):
        llm.embed(PROMPTS)
    llm.wake_up()
    assert llm.load_weights(BUNDLED_MODEL) == 1
    np.testing.assert_allclose(embed(llm), bundled, atol=1e-4)
    model = AutoModel.from_pretrained(BUNDLED_MODEL).float()
    model.norm.weight.data *= 1.5
    model.norm.weight.data[:8] *= -1
    llm.update_weights(model.named_parameters())
    np.testing.assert_allclose(embed(llm), expected(model), atol=1e-4)


def test_beside_streams_and_requests(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(**OPTIONS)
    request = llm.add_request(PROMPTS[0], greedy(3))
    with pytest.raises(RuntimeError, match="requests of add_request have not ended"):
        llm.embed(PROMPTS)
    llm.abort(request)
    llm.step()
    outputs = llm.embed(iter(PROMPTS), use_tqdm=False)
    next(outputs)
    with pytest.raises(RuntimeError, match="a stream is open"):
        llm.generate(PROMPTS, use_tqdm=False)
    outputs.close()
    assert len(llm.generate(PROMPTS, greedy(1), use_tqdm=False)) == len(PROMPTS)


def test_texts_that_are_aborted_and_an_llm_that_is_closed(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(**OPTIONS, max_num_batched_tokens=32, max_num_seqs=2)
    outputs = llm.embed(iter(PROMPTS * 20), use_tqdm=False)
    first = next(outputs)
    llm.abort(first.request_id + 2)
    rest = [next(outputs) for _ in range(10)]
    assert [output.error for output in rest if output.error] == ["the request has ended: abort"]
    llm.close()
    with pytest.raises(ValueError, match="is closed"):
        list(outputs)


def test_ctrl_c_leaves_the_llm_usable(make_llm: Callable[..., LLM], bundled: np.ndarray) -> None:
    llm = make_llm(**OPTIONS, max_num_batched_tokens=32)

    def texts() -> Iterator[list[int]]:
        for number in range(1000):
            if number == 40:
                os.kill(os.getpid(), signal.SIGINT)
            yield PROMPTS[number % len(PROMPTS)]

    with pytest.raises(KeyboardInterrupt):
        list(llm.embed(texts(), use_tqdm=False))
    np.testing.assert_allclose(embed(llm), bundled, atol=1e-4)


class Bar:
    """What tqdm makes, as far as it is used."""

    def __init__(self, **how: Any) -> None:
        self.how, self.count, self.postfix = how, 0, ""

    def update(self, newly: int) -> None:
        self.count += newly

    def close(self) -> None:
        pass


def test_a_bar_counts_texts_and_tokens(make_llm: Callable[..., LLM]) -> None:
    made: list[Bar] = []

    def make(**how: Any) -> Bar:
        made.append(Bar(**how))
        return made[-1]

    llm = make_llm(**OPTIONS, runner="pooling")
    llm.embed(PROMPTS, use_tqdm=make)
    list(llm.embed(iter(PROMPTS), use_tqdm=make))
    assert [(bar.how["desc"], bar.how["total"], bar.count) for bar in made] == [("Reading", 4, 4), ("Reading", None, 4)]
    assert all(bar.postfix.startswith(f"{sum(map(len, PROMPTS))} tokens, ") for bar in made)


@pytest.mark.parametrize("options", [{}, *whole_only([{"tensor_parallel_size": 2}])], ids=str)
def test_a_million_texts_take_no_more_memory_than_some_steps(options: dict, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(**OPTIONS, **options, runner="pooling", max_num_seqs=8, max_num_batched_tokens=64)
    most, taken = 0, 0

    def texts() -> Iterator[list[int]]:
        nonlocal most
        for number in range(400):
            most = max(most, number - taken)
            yield [5, number % 50, 7]

    for output in llm.embed(texts(), use_tqdm=False):
        assert isinstance(output, EmbeddingOutput)
        taken += 1
        assert len(llm._requests._running) <= 4 * 8
    assert taken == 400
    assert most <= 4 * 8
    assert not llm._requests.finished
