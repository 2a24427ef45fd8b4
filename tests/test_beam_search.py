"""LLM.beam_search finds what transformers' generate finds with num_beams, and computes no token twice."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from types import FrameType
from typing import Any

import pytest
import torch
from cases import LONGROPE
from conftest import Oracle, greedy, of_each_kind
from transformers import Phi3Config, Phi3ForCausalLM

from nanoinfer import BUNDLED_MODEL, LLM, BeamSearchOutput, BeamSearchParams, SamplingParams
from nanoinfer.engine.beams.rules import VllmRules
from nanoinfer.engine.results.step_result import StepResult

pytestmark = pytest.mark.usefixtures("one_thread")  # the models are tiny

BLOCK = 16
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "kvcache_block_size": BLOCK,
    "num_kvcache_blocks": 48,
    "max_model_len": 96,
    "max_num_seqs": 16,
}
PROMPTS = [[30, 31], [5], [*range(40, 73)], [*range(40, 72)]]  # the last two share two blocks, and one fills them
ENDS = [1, 2, 3]  # the end-of-sequence tokens of the random model, so many of 48 that beams often end
VOCABULARY = 48


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def random_model(make_qwen3: Callable[..., str]) -> str:
    return make_qwen3(vocab_size=VOCABULARY, eos_token_id=ENDS, initializer_range=0.12)


@pytest.fixture(scope="module")
def random_llm(random_model: str) -> Iterator[LLM]:
    with LLM(random_model, **{**OPTIONS, "num_kvcache_blocks": 200}) as llm:
        yield llm


@pytest.fixture(scope="module")
def random_oracle(random_model: str) -> Oracle:
    return Oracle(random_model)


def assert_as_transformers(
    output: BeamSearchOutput, oracle: Oracle, prompt: list[int], params: BeamSearchParams, ends: list[int]
) -> None:
    ids, width = torch.tensor([prompt]), params.beam_width
    expected = oracle.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        do_sample=False,
        eos_token_id=None if params.ignore_eos else ends,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert len(output.sequences) == width
    for found, tokens, score in zip(
        output.sequences, expected.sequences.tolist(), expected.sequences_scores.tolist(), strict=True
    ):
        length = len(found.tokens)
        assert (found.tokens, set(tokens[length:]) <= {-1, ends[0]}) == (tokens[:length], True)
        assert found.score == pytest.approx(score, rel=1e-4, abs=1e-5)
        assert found.finish_reason == ("stop" if found.tokens[-1] in ends and not params.ignore_eos else "length")


@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(4, 20),
        BeamSearchParams(3, 1),
        BeamSearchParams(5, 17, length_penalty=-1.0, early_stopping=True),
        BeamSearchParams(2, 20, length_penalty=2.0, early_stopping="never", ignore_eos=True),
    ],
    ids=str,
)
def test_finds_what_transformers_finds(llm: LLM, oracle: Oracle, params: BeamSearchParams) -> None:
    prompts = PROMPTS[1:3]
    for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
        assert_as_transformers(output, oracle, prompt, params, [2])
    assert llm.engine.scheduler.block_manager.share_used == 0


@pytest.mark.parametrize("seed", of_each_kind(zip(range(4)), 0, 1))
def test_finds_what_transformers_finds_where_beams_often_end(random_llm: LLM, random_oracle: Oracle, seed: int) -> None:
    random = Random(seed)
    for _ in range(5):
        params = BeamSearchParams(
            beam_width=random.randint(2, 9),
            max_tokens=random.choice([1, 2, 5, 14, 30]),
            length_penalty=random.choice([-1.5, 0.0, 0.7, 1.0, 2.0]),
            early_stopping=random.choice([False, True, "never"]),
            ignore_eos=random.random() < 0.2,
        )
        prompts = [random.choices(range(4, VOCABULARY), k=random.randint(1, 40)) for _ in range(2)]
        for prompt, output in zip(prompts, random_llm.beam_search(prompts, params), strict=True):
            assert_as_transformers(output, random_oracle, prompt, params, ENDS)


def test_one_beam_is_greedy_generation(random_llm: LLM) -> None:
    prompts = [[token, 9] for token in range(4, 40)]
    outputs = random_llm.beam_search(prompts, BeamSearchParams(1, 12))
    expected = random_llm.generate(prompts, greedy(12, logprobs=0), use_tqdm=False)
    assert {output.finish_reason for output in expected} == {"stop", "length"}
    for output, wanted in zip(outputs, expected, strict=True):
        (found,) = output.sequences
        assert (found.token_ids, found.finish_reason) == (wanted.token_ids, wanted.finish_reason)
        assert found.cum_logprob == pytest.approx(wanted.cumulative_logprob, abs=1e-4)


def search_as_vllm(
    oracle: Oracle, prompt: list[int], params: BeamSearchParams, ends: list[int]
) -> list[tuple[list[int], float, float]]:
    """vLLM's definition in its shortest form: tokens, the sum of their log-probabilities, and the score."""

    def score(beam: tuple[list[int], float]) -> float:
        tokens, total = beam
        return total / (len(tokens) - (tokens[-1] in ends)) ** params.length_penalty

    beams, completed = [(prompt, 0.0)], []
    for _ in range(params.max_tokens):
        grown = []
        for tokens, total in beams:
            top = oracle.logits(tokens)[-1].log_softmax(-1).topk(2 * params.beam_width)
            for value, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                (completed if token in ends else grown).append(([*tokens, token], total + value))
        beams = sorted(grown, key=score, reverse=True)[: params.beam_width]
    best = sorted(completed + beams, key=score, reverse=True)[: params.beam_width]
    return [(*beam, score(beam)) for beam in best]


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_finds_what_vllm_finds_by_its_rules(
    random_llm: LLM, random_oracle: Oracle, monkeypatch: pytest.MonkeyPatch, length_penalty: float
) -> None:
    monkeypatch.setattr(LLM, "beam_rules", VllmRules)
    for width, max_tokens, prompt in ((4, 9, [7, 8, 9]), (2, 14, [30]), (3, 1, [*range(4, 24)])):
        params = BeamSearchParams(width, max_tokens, length_penalty=length_penalty)
        (output,) = random_llm.beam_search([prompt], params)
        expected = search_as_vllm(random_oracle, prompt, params, ENDS)
        found = [(sequence.tokens, sequence.cum_logprob, sequence.score) for sequence in output.sequences]
        assert [tokens for tokens, _, _ in found] == [tokens for tokens, _, _ in expected]
        assert [numbers for _, *numbers in found] == [pytest.approx(numbers, rel=1e-4) for _, *numbers in expected]


def test_computes_each_token_of_a_beam_once(llm: LLM) -> None:
    steps: list[tuple[int, int]] = []
    llm.engine.on_step = lambda step: steps.append((step.num_prefill_tokens, step.num_decode_tokens))
    llm.reset_prefix_cache()
    llm.beam_search([PROMPTS[2]], BeamSearchParams(4, 20, ignore_eos=True))
    llm.engine.on_step = None
    assert steps == [(len(PROMPTS[2]), 0)] + [(0, 4)] * 19  # nothing follows the last tokens


@pytest.mark.parametrize(
    "options",
    [
        {"num_kvcache_blocks": 6},  # one prompt at a time, which needs nearly all of them
        {"max_num_seqs": 3},  # fewer than the beams
        {"max_num_batched_tokens": 7},  # prompts in chunks
        {"tensor_parallel_size": 2},
        {"deterministic": True, "max_num_batched_tokens": 16},
    ],
    ids=str,
)
def test_results_do_not_depend_on_the_room(llm: LLM, make_llm: Callable[..., LLM], options: dict[str, Any]) -> None:
    params = BeamSearchParams(3, 6)
    prompts = [*PROMPTS, PROMPTS[3]]
    expected = llm.beam_search(prompts, params)
    other = make_llm(**{**OPTIONS, **options})
    outputs = other.beam_search(prompts, params)
    for output, wanted in zip(outputs, expected, strict=True):
        assert [found.tokens for found in output.sequences] == [found.tokens for found in wanted.sequences]
        scores = [found.score for found in output.sequences]
        assert scores == pytest.approx([found.score for found in wanted.sequences], rel=1e-4)
    assert other.engine.scheduler.block_manager.share_used == 0


@pytest.mark.parametrize("blocks", [12, 13])
def test_long_chunks_leave_blocks_to_beams_that_fork(
    blocks: int, make_qwen3: Callable[..., str], make_llm: Callable[..., LLM]
) -> None:
    """While a step computes a prompt, the prompt holds more blocks than its beams' windows see."""
    folder = make_qwen3(use_sliding_window=True, sliding_window=11, max_window_layers=0)
    llm = make_llm(folder, **{**OPTIONS, "num_kvcache_blocks": blocks})
    assert llm.config.cache_layout.groups[0].most_blocks == 3
    params, rng = BeamSearchParams(2, 6), Random(1)
    prompts = [[rng.randrange(512) for _ in range(90)] for _ in range(4)]
    outputs = llm.beam_search(prompts, params)
    alone = [llm.beam_search([prompt], params)[0] for prompt in prompts]
    for output, wanted in zip(outputs, alone, strict=True):
        assert [found.tokens for found in output.sequences] == [found.tokens for found in wanted.sequences]


@pytest.mark.gpu
def test_a_gpu_finds_what_the_cpu_finds(llm: LLM, make_llm: Callable[..., LLM]) -> None:
    params = BeamSearchParams(3, 10)
    outputs = make_llm(**{**OPTIONS, "device": "cuda"}).beam_search(PROMPTS, params)
    for output, wanted in zip(outputs, llm.beam_search(PROMPTS, params), strict=True):
        assert [found.tokens for found in output.sequences] == [found.tokens for found in wanted.sequences]
        scores = [found.score for found in output.sequences]
        assert scores == pytest.approx([found.score for found in wanted.sequences], rel=1e-3)


def test_as_many_prompts_run_at_once_as_are_allowed(llm: LLM) -> None:
    running: list[int] = []
    waiting: list[int] = []

    def note(step: StepResult) -> None:
        running.append(step.num_running)
        waiting.append(step.num_waiting)

    llm.engine.on_step = note
    params = BeamSearchParams(3, 6, ignore_eos=True)
    together = llm.beam_search(PROMPTS, params)
    assert (max(running), max(waiting)) == (12, 0)
    running.clear()
    alone = llm.beam_search(PROMPTS, params, concurrency_limit=1)
    llm.engine.on_step = None
    assert (max(running), max(waiting), waiting[-1]) == (3, 3, 0)
    assert [[found.tokens for found in output.sequences] for output in alone] == [
        [found.tokens for found in output.sequences] for output in together
    ]


def test_blocks_are_shared_with_requests_before_and_after(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = [*range(50, 90)]
    llm.generate([prompt], greedy(1), use_tqdm=False)
    steps: list[int] = []
    llm.engine.on_step = lambda step: steps.append(step.num_prefill_tokens)
    (output,) = llm.beam_search([prompt], BeamSearchParams(4, 30, ignore_eos=True))
    llm.engine.on_step = None
    assert sum(steps) == len(prompt) - 2 * BLOCK
    best = output.sequences[0].tokens
    (after,) = llm.generate([best], greedy(4), use_tqdm=False)
    assert after.num_cached_tokens == (len(best) - 1) // BLOCK * BLOCK
    llm.reset_prefix_cache()
    assert llm.generate([best], greedy(4), use_tqdm=False)[0].token_ids == after.token_ids


def test_a_sequence_has_vllms_attributes_and_ours(llm: LLM) -> None:
    prompt = "ROMEO:\nBut, soft!"
    (output,) = llm.beam_search(prompt, BeamSearchParams(3, 12, ignore_eos=True), use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == (prompt, llm.tokenize(prompt))
    scores = [found.score for found in output.sequences]
    assert scores == sorted(scores, reverse=True)
    for found in output.sequences:
        assert found.tokens == output.prompt_token_ids + found.token_ids
        assert found.text == llm.detokenize(found.tokens)
        assert found.text.startswith(prompt)
        assert (found.finish_reason, found.stop_reason) == ("length", None)
        entries = list(zip(found.logprobs, found.token_ids, strict=True))
        assert sum(entry[token].logprob for entry, token in entries) == pytest.approx(found.cum_logprob)
        assert all(entry[token].decoded_token in found.text for entry, token in entries if token != 2)
        assert found.score == pytest.approx(found.cum_logprob / 12)
        (score,) = llm.score(output.prompt_token_ids, [found.token_ids])
        assert score.logprob == pytest.approx(found.cum_logprob, abs=1e-3)
    assert pickle.loads(pickle.dumps(output)) == output


@pytest.mark.parametrize("kept", [False, True])
def test_the_text_has_the_end_of_sequence_only_if_asked(llm: LLM, kept: bool) -> None:
    end = llm.tokenizer.convert_ids_to_tokens(2)
    params = BeamSearchParams(5, 17, length_penalty=-1.0, skip_special_tokens=False, include_stop_str_in_output=kept)
    found = [sequence for output in llm.beam_search(PROMPTS, params) for sequence in output.sequences]
    ended = [sequence for sequence in found if sequence.finish_reason == "stop"]
    assert 0 < len(ended) < len(found)
    assert all(sequence.tokens[-1] == 2 and sequence.text.endswith(end) == kept for sequence in ended)


def test_an_empty_list_gives_an_empty_list(llm: LLM) -> None:
    assert llm.beam_search([], BeamSearchParams(2, 3)) == []


def test_max_model_len_ends_beams(llm: LLM) -> None:
    (output,) = llm.beam_search([[30, 31] * 46], BeamSearchParams(2, 50, ignore_eos=True))
    assert [len(found.tokens) for found in output.sequences] == [96, 96]


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose sequences of more than 20 tokens are computed as long ones."""
    torch.manual_seed(1)
    config = Phi3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        original_max_position_embeddings=20,
        rope_parameters={**LONGROPE, "original_max_position_embeddings": 20},
        initializer_range=0.2,
        eos_token_id=1,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("longrope")
    Phi3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def test_beams_that_become_long_are_computed_again(make_llm: Callable[..., LLM], longrope: str) -> None:
    llm = make_llm(longrope, **{**OPTIONS, "max_model_len": 60})
    (output,) = llm.beam_search([[5, 6, 7] * 5], BeamSearchParams(3, 12, ignore_eos=True))
    assert llm.engine.scheduler.block_manager.share_used == 0
    llm.reset_prefix_cache()
    found = output.sequences[-1]
    for place, (entry, token) in enumerate(zip(found.logprobs, found.token_ids, strict=True), 15):
        (fresh,) = llm.generate([found.tokens[:place]], greedy(1, logprobs=64), use_tqdm=False)
        assert entry[token] == pytest.approx(fresh.logprobs[0][token], abs=1e-4)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_error_leaves_the_llm_usable(llm: LLM, error: type[BaseException]) -> None:
    params = BeamSearchParams(4, 20)
    expected = llm.beam_search(PROMPTS, params)
    steps: list[object] = []

    def fail(step: object) -> None:
        steps.append(step)
        if len(steps) == 5:
            raise error

    llm.engine.on_step = fail
    with pytest.raises(error):
        llm.beam_search(PROMPTS, params)
    llm.engine.on_step = None
    assert llm.engine.scheduler.block_manager.share_used == 0
    assert [[found.tokens for found in output.sequences] for output in llm.beam_search(PROMPTS, params)] == [
        [found.tokens for found in output.sequences] for output in expected
    ]


class Interrupt:
    """A trace function that counts the lines that a search executes, and raises KeyboardInterrupt at one of them."""

    FILES = ("hypotheses.py", "search.py", "block_manager.py", "prefix_tree.py", "model_runner.py", "steps.py")

    def __init__(self, line: int | None = None) -> None:
        self.line, self.count = line, 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> Interrupt | None:
        if event == "line":
            self.count += 1
            if self.count == self.line:
                raise KeyboardInterrupt
        return self if frame.f_code.co_filename.endswith(self.FILES) else None


def test_an_interrupt_at_any_line_leaves_the_llm_usable(random_llm: LLM) -> None:
    prompts, params = [[*range(4, 36)], [*range(4, 35)]], BeamSearchParams(3, 5)

    def search(trace: Interrupt) -> list[list[list[int]]]:
        sys.settrace(trace)
        try:
            outputs = random_llm.beam_search(prompts, params)
        finally:
            sys.settrace(None)
        return [[found.tokens for found in output.sequences] for output in outputs]

    whole = Interrupt()
    expected = search(whole)
    manager = random_llm.engine.scheduler.block_manager
    for line in range(1, whole.count * 9 // 10, whole.count // 8):
        with pytest.raises(KeyboardInterrupt):
            search(Interrupt(line))
        assert manager.num_free == len(manager.blocks), f"interrupted at line {line}"
        assert search(Interrupt()) == expected, f"interrupted at line {line}"


def test_logits_that_are_not_finite_end_their_prompt_alone(make_llm: Callable[..., LLM], random_model: str) -> None:
    bad = 40  # its embedding is NaN
    llm = make_llm(random_model, **OPTIONS)
    with torch.inference_mode():
        llm.engine.ranks.runner.holdings.model.embedding.weight[bad] = float("nan")
    good, failed, again, late = llm.beam_search(
        [[5], [5, bad], [5], [5] * 20], BeamSearchParams(20, 3, ignore_eos=True)
    )
    assert {found.finish_reason for found in good.sequences} == {"length"}
    assert good == again
    (found,) = failed.sequences
    assert (found.token_ids, found.finish_reason) == ([], "error")
    assert "not finite" in found.stop_reason
    (late,) = llm.beam_search([[5]], BeamSearchParams(VOCABULARY, 3, ignore_eos=True))
    assert [bad] in [found.token_ids for found in late.sequences]
    assert {found.finish_reason for found in late.sequences} == {"error"}


def test_waits_for_requests_and_sleep(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(**OPTIONS)
    llm.add_request([5], greedy(3))
    with pytest.raises(RuntimeError, match="requests of add_request have not ended"):
        llm.beam_search([[5]], BeamSearchParams(2, 3))
    while llm.has_unfinished_requests():
        llm.step()
    expected = llm.beam_search([[5]], BeamSearchParams(2, 3))
    llm.sleep()
    with pytest.raises(RuntimeError, match="sleeps"):
        llm.beam_search([[5]], BeamSearchParams(2, 3))
    llm.wake_up()
    assert llm.beam_search([[5]], BeamSearchParams(2, 3)) == expected


class TestErrors:
    @pytest.mark.parametrize(
        ("params", "message"),
        [
            (None, "params=None: must be a BeamSearchParams"),
            (SamplingParams(), r"params=SamplingParams.*: must be a BeamSearchParams"),
            (BeamSearchParams(2048, 1), r"beam_width=2048: must be at most 2047, .* beside those that end a sequence"),
            (
                BeamSearchParams(20, 90),
                r"beam_width=20: the beams of prompts\[0\].* 48 blocks \(num_kvcache_.*max_tokens.*; or raise num_kv",
            ),
        ],
        ids=lambda value: str(value)[:30],
    )
    def test_of_params(self, llm: LLM, params: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            llm.beam_search([[5]], params)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"prompts": [[]]}, "prompts.0. is empty"),
            ({"prompts": [[9999]]}, "has token id 9999"),
            ({"prompts": [[5] * 96]}, "must be fewer than max_model_len=96"),
            ({"lora_request": 1}, "lora_request=1: must be a LoRARequest"),
            ({"priority": [1]}, "priority=.*: must be None or 0"),
            ({"concurrency_limit": 0}, "concurrency_limit=0"),
            ({"use_tqdm": "yes"}, "use_tqdm='yes'"),
            ({"sampling_params": None}, "unknown argument 'sampling_params'"),
        ],
        ids=str,
    )
    def test_of_a_call(self, llm: LLM, wrong: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            llm.beam_search(**{"prompts": [[5]], "params": BeamSearchParams(2, 3), **wrong})

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"beam_width": 0}, "beam_width=0: must be an integer from 1"),
            ({"beam_width": 2.5}, "beam_width=2.5"),
            ({"max_tokens": 0}, "max_tokens=0: must be an integer of at least 1"),
            ({"ignore_eos": 1}, "ignore_eos=1: must be True or False"),
            ({"temperature": 0.7}, "temperature=0.7: must be 0 or 1: beams are not drawn"),
            ({"length_penalty": float("nan")}, "length_penalty=nan: must be a number from -32 to 32"),
            ({"length_penalty": 33}, "length_penalty=33"),
            ({"early_stopping": "always"}, "early_stopping='always': must be True, False or 'never'"),
            ({"early_stopping": None}, "early_stopping=None"),
            ({"adapter": ""}, "adapter='': must be None, or the name of an adapter that is loaded"),
            ({"structured_outputs": {"regex": "a"}}, "structured_outputs=.*: must be None: beams have no grammar"),
            ({"allowed_token_ids": [5]}, "allowed_token_ids=.5.: must be None"),
            ({"watermarking": True}, "watermarking=True: must be None or False"),
            ({"num_return_sequences": 1}, "num_return_sequences=1: must be None or beam_width"),
            ({"num_beams": 2}, "unknown argument 'num_beams': did you mean 'beam_width'"),
            ({"top_k": 2}, r"unknown argument 'top_k': write SamplingParams\(top_k=...\)"),
        ],
        ids=str,
    )
    def test_of_settings(self, wrong: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **wrong})

    def test_of_an_llm_that_cannot(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        for option, value, hint in (
            ("data_parallel_size", 2, "tensor_parallel_size"),
            ("routed_experts", True, "without"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(llm.config, option, value)
                with pytest.raises(ValueError, match=f"{option}={value}: .*{hint}"):
                    llm.beam_search([[5]], BeamSearchParams(2, 3))


def test_arguments_that_change_nothing_are_accepted(llm: LLM) -> None:
    params = BeamSearchParams(2, 3)
    assert BeamSearchParams(2, 3, watermarking=False, num_return_sequences=2) == params
    for priority in (None, 0, [0]):
        assert llm.beam_search([[5]], params, priority=priority) == llm.beam_search([[5]], params)


def test_settings_are_checked_when_they_are_assigned() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3, temperature=1)
    params.length_penalty = 2
    assert replace(params, beam_width=4) == BeamSearchParams(4, 3, temperature=1.0, length_penalty=2.0)
    with pytest.raises(ValueError, match="beam_width=0"):
        params.beam_width = 0
    with pytest.raises(AttributeError, match="no setting 'width'; known: beam_width"):
        params.width = 3  # type: ignore[attr-defined]
