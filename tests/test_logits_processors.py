"""Logits processors of callers: functions of one request, and classes of a whole batch, with vLLM's interface."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.processors import (
    MOST,
    Bias,
    Broken,
    Mirror,
    ban_newest,
    boost,
    cap,
    record,
)
from conftest import Oracle, assert_equal
from torch import Tensor
from transformers import LogitsProcessorList

from nanoinfer import BUNDLED_MODEL, LLM, BeamSearchParams, RequestOutput, SamplingParams
from nanoinfer.batch.__main__ import main as run_batch
from nanoinfer.config import Config

PROMPTS = ["ROMEO:\n", "JULIET:\nO", "First Citizen:\n"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, dtype="float32", max_num_seqs=16) as own:
        yield own


def run(llm: LLM, params: SamplingParams | list[SamplingParams], prompts: Any = None) -> list[RequestOutput]:
    return llm.generate(PROMPTS if prompts is None else prompts, params, use_tqdm=False)


def settings(**own: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 10, "seed": 3, "ignore_eos": True, **own})


class TestFunctions:
    def test_transformers_draws_the_same(self, llm: LLM, oracle: Oracle) -> None:
        """Its logits processors get the tokens so far and the logits, as ours do."""

        def theirs(token_ids: Tensor, logits: Tensor) -> Tensor:
            return torch.stack([ban_newest(*row) for row in zip(token_ids.tolist(), logits, strict=True)])

        prompt = llm.tokenize(PROMPTS[0])
        expected = oracle.model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, logits_processor=LogitsProcessorList([theirs])
        )
        own = settings(temperature=0, max_tokens=12, ignore_eos=False, logits_processors=[ban_newest])
        (output,) = run(llm, own, [PROMPTS[0]])
        assert output.token_ids == expected[0, len(prompt) :].tolist()

    def test_tokens_are_those_so_far(self, llm: LLM) -> None:
        seen: list[tuple[list[int], list[int], tuple[int, ...]]] = []
        (output,) = run(llm, settings(max_tokens=4, logits_processors=[partial(record, seen)]), [PROMPTS[1]])
        prompt = output.prompt_token_ids
        assert [(p, o) for p, o, _ in seen] == [(prompt, output.token_ids[:count]) for count in range(4)]
        assert {shape for *_, shape in seen} == {(llm.config.description.vocab_size,)}

    @pytest.mark.parametrize(
        "own",
        [
            {"temperature": 0},
            {"n": 2, "top_p": 0.9, "logprobs": 2},
            {"repetition_penalty": 1.3, "entropy": True, "kept_tokens": True},
            {"allowed_token_ids": list(range(60, 200)), "logprobs": 0},
            {"structured_outputs": {"regex": "[a-z ]{9}"}, "max_tokens": 12},
        ],
    )
    def test_a_bias_is_as_logit_bias(self, llm: LLM, own: dict[str, Any]) -> None:
        """In company, too, and beside every other setting."""
        bias = {70: 3.0, 90: -5.0, 200: 2.0}
        changed = settings(logits_processors=[partial(boost, bias)], **own)
        expected = run(llm, settings(logit_bias=bias, **own))
        assert_equal(run(llm, changed), expected)
        mixed = run(llm, [changed, settings(), settings(top_k=5)])
        assert_equal(mixed[:1], expected[:1])
        assert_equal(mixed[1:2], run(llm, settings())[1:2])

    @pytest.mark.parametrize(
        "options",
        [
            {"speculation": "suffix"},
            {"tensor_parallel_size": 2},
            {"data_parallel_size": 2},
            {"num_kvcache_blocks": 6, "max_num_seqs": 2, "max_model_len": 64},
        ],
    )
    def test_guesses_ranks_replicas_and_preemption(
        self, llm: LLM, make_llm: Callable[..., LLM], options: dict[str, Any]
    ) -> None:
        params = [settings(logits_processors=[ban_newest], max_tokens=20, logprobs=1), settings(), settings(n=2)]
        own = make_llm(dtype="float32", **options)
        outputs = run(own, params)
        assert_equal(outputs, run(llm, params))
        assert outputs[0].num_proposed_tokens == 0

    def test_processed_logprobs(self, make_llm: Callable[..., LLM]) -> None:
        own = make_llm(logprobs_mode="processed_logprobs")
        (output,) = run(own, settings(logits_processors=[cap], logprobs=-1, max_tokens=3), [PROMPTS[0]])
        for place in output.logprobs:
            assert {token_id for token_id, value in place.items() if value > float("-inf")} <= set(range(MOST))

    @pytest.mark.parametrize(
        ("function", "message"),
        [
            (
                lambda ids, logits: logits[:5],
                r"logits_processors: <lambda>: returned \[5\]: must return logits of shape",
            ),
            (lambda ids, logits: None, "logits_processors: <lambda>: returned NoneType: must return logits of shape"),
            (lambda ids, logits: logits / 0 * 0, "logits_processors: <lambda>: returned logits of which some are NaN"),
            (
                lambda ids, logits: logits.fill_(float("inf")),
                "of which some are NaN or infinite: must be finite, or -inf",
            ),
            (lambda ids, logits: ids[10_000], "logits_processors: <lambda>: list index out of range"),
        ],
    )
    def test_a_function_that_fails_ends_its_request_alone(
        self, llm: LLM, function: Callable[..., Any], message: str
    ) -> None:
        params = [settings(), settings(logits_processors=[ban_newest, function], logprobs=1, entropy=True), settings()]
        first, failed, last = run(llm, params)
        assert failed.finish_reason == "error"
        assert re.search(message, failed.stop_reason)
        assert_equal([first, last], [run(llm, settings())[place] for place in (0, 2)])

    @pytest.mark.parametrize("wrong", [5, [5], [len], [Bias], "f", [lambda a, b, c, d: a]])
    def test_no_functions(self, wrong: Any) -> None:
        with pytest.raises(
            ValueError, match=r"logits_processors.*: must be .*functions of \(token_ids, logits\), or of"
        ):
            SamplingParams(logits_processors=wrong)
        assert SamplingParams(logits_processors=[]) == SamplingParams()

    @pytest.mark.parametrize("option", ["tensor_parallel_size", "data_parallel_size"])
    def test_a_function_must_pickle_for_other_processes(self, make_llm: Callable[..., LLM], option: str) -> None:
        own = make_llm(**{option: 2})
        with pytest.raises(
            ValueError,
            match=rf"logits_processors\[0\] is <lambda>: must pickle, because {option}=2 has other processes",
        ):
            run(own, settings(logits_processors=[lambda ids, logits: logits]))


class TestClasses:
    @staticmethod
    def make(make_llm: Callable[..., LLM], *classes: Any, **options: Any) -> LLM:
        return make_llm(**{"dtype": "float32", "max_num_seqs": 16, "logits_processors": list(classes), **options})

    @pytest.mark.parametrize(
        "own", [{}, {"n": 3, "logprobs": 2, "top_p": 0.9}, {"frequency_penalty": 0.5, "entropy": True}]
    )
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"tensor_parallel_size": 2},
            {"data_parallel_size": 2},
            {"logprobs_mode": "processed_logprobs"},
            {"num_kvcache_blocks": 8, "max_num_seqs": 3, "max_model_len": 64, "max_num_batched_tokens": 16},
        ],
    )
    def test_a_bias_is_as_logit_bias(
        self, llm: LLM, make_llm: Callable[..., LLM], options: dict[str, Any], own: dict[str, Any]
    ) -> None:
        """Rows come and go, move, are preempted and begin again; the class checks that it is told all of it."""
        changed = self.make(make_llm, Bias, **options)
        plain = make_llm(dtype="float32", **options) if "logprobs_mode" in options else llm
        prompts = PROMPTS * 3
        params = [settings(max_tokens=3 + 5 * i, seed=i, **own) for i in range(len(prompts))]
        biased = [settings(max_tokens=3 + 5 * i, seed=i, logit_bias={70: 3.0}, **own) for i in range(len(prompts))]
        assert_equal(run(changed, params, prompts), run(plain, biased, prompts))
        assert_equal(run(changed, params[:2], prompts[:2]), run(plain, biased[:2], prompts[:2]))

    @pytest.mark.parametrize("options", [{}, {"num_kvcache_blocks": 8, "max_num_seqs": 3, "max_model_len": 64}])
    def test_lists_of_tokens_grow(self, llm: LLM, make_llm: Callable[..., LLM], options: dict[str, Any]) -> None:
        changed = self.make(make_llm, Mirror, **options)
        params = [settings(max_tokens=4 + 6 * i, seed=i) for i in range(3)]
        functions = [settings(max_tokens=4 + 6 * i, seed=i, logits_processors=[ban_newest]) for i in range(3)]
        assert_equal(run(changed, params), run(llm, functions))

    def test_requests_of_one_batch_may_differ(self, llm: LLM, make_llm: Callable[..., LLM]) -> None:
        changed = self.make(make_llm, "cases.processors:Target", Bias)
        params = [settings(extra_args={"target": 90}), settings(), settings(structured_outputs={"regex": "[a-z]{5}"})]
        first, second, third = run(changed, params)
        biased = [
            settings(logit_bias={70: 3.0}),
            settings(structured_outputs={"regex": "[a-z]{5}"}, logit_bias={70: 3.0}),
        ]
        assert set(first.token_ids) == {90}
        assert_equal([second, third], run(llm, biased, PROMPTS[1:]))
        with pytest.raises(ValueError, match=r"sampling_params\[0\]: Target: target='x': must be a token"):
            run(changed, [settings(extra_args={"target": "x"})] * 3)

    def test_raw_logprobs_are_the_models(self, llm: LLM, make_llm: Callable[..., LLM]) -> None:
        (changed,) = run(self.make(make_llm, Bias), settings(logprobs=3, max_tokens=1), [PROMPTS[0]])
        (plain,) = run(llm, settings(logprobs=-1, max_tokens=1), [PROMPTS[0]])
        for token_id, value in changed.logprobs[0].items():
            assert value == pytest.approx(plain.logprobs[0][token_id], abs=1e-4)

    def test_what_keeps_the_likeliest_token_is_left_out_for_greedy_rows(
        self, llm: LLM, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Bias, "is_argmax_invariant", lambda self: True)
        changed = self.make(make_llm, Bias)
        assert_equal(run(changed, settings(temperature=0)), run(llm, settings(temperature=0)))
        assert_equal(run(changed, settings()), run(llm, settings(logit_bias={70: 3.0})))

    @pytest.mark.parametrize(
        ("how", "message"),
        [
            ("shape", r"logits_processors: Broken: returned \[3, 5\]: must return logits of shape \[3, "),
            ("raises", "logits_processors: Broken: no such row"),
        ],
    )
    def test_a_class_that_fails_ends_the_requests_of_the_step(
        self, make_llm: Callable[..., LLM], how: str, message: str
    ) -> None:
        own = self.make(make_llm, Broken)
        for output in run(own, [settings(), settings(extra_args={"how": how}), settings()]):
            assert output.finish_reason == "error"
            assert re.search(message, str(output.stop_reason))
        assert [output.finish_reason for output in run(own, settings())] == ["length"] * 3

    def test_logits_that_are_not_finite_end_their_request_alone(self, llm: LLM, make_llm: Callable[..., LLM]) -> None:
        own = self.make(make_llm, Broken)
        first, failed, last = run(own, [settings(), settings(extra_args={"how": "nan"}), settings()])
        assert re.search("logits_processors: Broken: returned logits of which some are NaN", str(failed.stop_reason))
        assert_equal([first, last], [run(llm, settings())[place] for place in (0, 2)])

    def test_batch_files(self, tmp_path: Path) -> None:
        (tmp_path / "in").write_text(
            json.dumps({"id": 1, "prompt": "A", "extra_args": {"target": 90}, "max_tokens": 3})
        )
        files = [str(tmp_path / name) for name in ("in", "out")]
        for _ in range(2):  # the second run finds the first one's settings
            run_batch([*files, "--model", "bundled", "--logits-processors", '["cases.processors:Target"]'])
        assert json.loads((tmp_path / "out").read_text())["token_ids"] == [90] * 3

    @pytest.mark.parametrize("wrong", [5, "a", ["no.module:X"], ["cases.processors"], [cap], [int]])
    def test_no_classes(self, wrong: Any) -> None:
        with pytest.raises(ValueError, match=r"logits_processors.*: must be "):
            Config(BUNDLED_MODEL, logits_processors=wrong)

    @pytest.mark.parametrize("option", [{"speculation": "suffix"}, {"deterministic": True}])
    def test_options_that_do_not_go_with_them(self, option: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=f"{next(iter(option))}=.*must be left out beside logits_processors"):
            Config(BUNDLED_MODEL, logits_processors=[Bias], **option)

    def test_beams_and_arguments_that_nobody_reads(self, llm: LLM, make_llm: Callable[..., LLM]) -> None:
        with pytest.raises(ValueError, match="logits_processors=Bias: must be left out for beam_search"):
            self.make(make_llm, Bias).beam_search(["a"], BeamSearchParams(beam_width=2, max_tokens=2))
        with pytest.raises(
            ValueError, match=r"extra_args={'a': 1}: must be left out: this LLM has no logits_processors"
        ):
            run(llm, settings(extra_args={"a": 1}))


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize("own", [{}, {"logprobs": 2, "n": 2}, {"top_p": 0.9, "entropy": True}])
    def test_a_class_behind_graphs(self, make_llm: Callable[..., LLM], own: dict[str, Any]) -> None:
        changed, plain = make_llm(logits_processors=[Bias]), make_llm()
        for count in (1, 3, 40):
            prompts = (PROMPTS * 14)[:count]
            params = [settings(max_tokens=3 + i, seed=i, **own) for i in range(count)]
            biased = [settings(max_tokens=3 + i, seed=i, logit_bias={70: 3.0}, **own) for i in range(count)]
            assert_equal(run(changed, params, prompts), run(plain, biased, prompts), 0.02)

    def test_lists_of_tokens_grow_behind_graphs(self, make_llm: Callable[..., LLM]) -> None:
        params = [settings(max_tokens=4 + 6 * i, seed=i) for i in range(3)]
        functions = [settings(max_tokens=4 + 6 * i, seed=i, logits_processors=[ban_newest]) for i in range(3)]
        assert_equal(run(make_llm(logits_processors=[Mirror]), params), run(make_llm(), functions), 0.02)
