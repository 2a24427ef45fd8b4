"""Whole engines by random requests: whatever runs beside a request, or is guessed, its tokens are those it has alone.

transformers computes the logits behind every token that an engine has drawn. The token must have the largest one, with
the noise of its seed if it was sampled. `pytest tests/test_fuzz.py --fuzz 4000` plays with 4,000 requests. Each test
plays one round, which its name repeats: `pytest "tests/test_fuzz.py::test_tokens[gemma2-7]" --fuzz 4000`.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import LONGROPE, Case, build
from cases.drafters import Babbler
from cases.states import DELTA, FALCON
from conftest import CollidingTree, whole_only
from safetensors.torch import load_file
from test_steering import hooked, vectors_of

from nanoinfer import LLM, BeamSearchParams, SamplingParams
from nanoinfer.benchmark.determinism import bits_of
from nanoinfer.config import Config
from nanoinfer.engine.admission.admission import Admission
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.new_sequences import seed_of
from nanoinfer.kernels.sampling.draw import gumbel_noise

TOLERANCE = 1e-4  # between logits of float32 that are added up in other orders
VOCAB = 160
ENDS = [1, 2, 3]  # end-of-sequence tokens
LONG_FROM = 42
USUAL = 500  # requests if --fuzz does not say how many
ROUND = 16  # requests in a round
BITS_ROUND = 3  # requests in a round whose tokens are computed one by one
BEAMS_ROUND = 4  # calls in a round of beam searches
SEEDS_APART = 0xA0761D6478BD642F  # those of a request's samples
PHI3_LONG = {"rope_parameters": LONGROPE, "original_max_position_embeddings": LONG_FROM, "hidden_size": 64}
SAMPLED: tuple[dict[str, Any], ...] = (
    {},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.3},
    {"min_tokens": 6},
    {"stop_token_ids": list(range(10, 30)), "min_tokens": 2},
    {"stop_token_ids": [7, 8, 9], "ignore_eos": True},
)


@dataclass(frozen=True)
class Subject:
    """A model whose layers remember in some way, and the longest sequence that its engines take."""

    case: Case
    max_model_len: int = 128


def subject(architecture: str, model_type: str, max_model_len: int = 128, **settings: Any) -> Subject:
    shape = {"tie_word_embeddings": False, "eos_token_id": ENDS, "sliding_window": None, **settings}
    return Subject(Case(architecture, model_type, shape), max_model_len)


def with_states(architecture: str, model_type: str, **settings: Any) -> Subject:
    """Blocks have at least 64 tokens here, and snapshots hang behind them."""
    drawn = subject(architecture, model_type, 288, **settings)
    return replace(drawn, case=replace(drawn.case, keeps_states=True))


def qwen3_windows(window: int, first: int) -> dict[str, Any]:
    return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": first}


SUBJECTS = {
    "qwen3": subject("Qwen3ForCausalLM", "qwen3"),
    "mistral": subject("MistralForCausalLM", "mistral", sliding_window=11),
    "gemma2": subject("Gemma2ForCausalLM", "gemma2", 144, sliding_window=24),
    "gemma3": subject(
        "Gemma3ForCausalLM",
        "gemma3_text",
        240,
        sliding_window=17,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        num_hidden_layers=6,
    ),
    "olmo3": subject("Olmo3ForCausalLM", "olmo3", 200, sliding_window=40),
    "phi3": subject("Phi3ForCausalLM", "phi3", 96, **PHI3_LONG),
    "phi3-window": subject("Phi3ForCausalLM", "phi3", 96, **PHI3_LONG, **{"sliding_window": 13}),
    "qwen3-window-1": subject("Qwen3ForCausalLM", "qwen3", **qwen3_windows(1, 1)),
    "qwen3-window-5": subject("Qwen3ForCausalLM", "qwen3", 112, **qwen3_windows(5, 3)),
    "qwen3.5": with_states("Qwen3_5ForCausalLM", "qwen3_5_text", **DELTA),
    "falconh1": with_states("FalconH1ForCausalLM", "falcon_h1", **FALCON),
    "lfm2": with_states("Lfm2ForCausalLM", "lfm2", layer_types=["conv", "full_attention"] * 2),
}


STEERING = "mine"


def vectors_for(model: Any) -> dict[int, torch.Tensor]:
    return vectors_of(0, 2, size=model.config.hidden_size)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make as many rounds as --fuzz asks for, of each model in turn. Without it, two thirds run with --whole alone."""
    total = metafunc.config.getoption("fuzz")
    counts = {"test_tokens": total // ROUND, "test_bits": total // 80, "test_beams": total // 60}
    names = list(SUBJECTS)
    rounds = [(names[i % len(names)], i // len(names)) for i in range(max(1, counts[metafunc.function.__name__]))]
    plain = math.ceil(len(rounds) / 3) if total == USUAL else len(rounds)
    metafunc.parametrize(
        ("name", "number"),
        [*rounds[:plain], *whole_only(rounds[plain:])],
        ids=[f"{name}-{number}" for name, number in rounds],
    )


@dataclass
class Sample:
    """What came of one sample of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None  # None: its stream was closed


@dataclass
class Request:
    """A request, and what came of it. request_id: the engine's number; number: its place in the round."""

    number: int
    prompt: list[int]
    params: SamplingParams
    request_id: int = -1
    samples: list[Sample] = field(default_factory=list)
    prompt_logprobs: list[Any] | None = None
    output: Any = None


class Player:
    """Draws requests, and gives them to an engine in one of a user's ways. Others depend on earlier ones' outputs."""

    def __init__(self, llm: LLM, rng: random.Random, weights: dict[str, torch.Tensor], longest: int) -> None:
        self.llm, self.rng, self.weights = llm, rng, weights
        self.longest = longest  # of a drawn prompt
        self.stems = [self._tokens(longest) for _ in range(rng.choice([1, 1, 2, 3]))]
        self.requests: list[Request] = []

    def play(self, count: int) -> list[Request]:
        """Run so many requests, and return them."""
        while len(self.requests) < count:
            most = min(count - len(self.requests), self.rng.choice([1, 4, 8, 16]))
            self.rng.choice([self._by_steps, self._by_steps, self._by_generate, self._by_stream])(most)
            if self.rng.random() < 0.15:
                self.llm.reset_prefix_cache()
        return self.requests

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def draw(self) -> Request:
        """Draw a request, whose prompt often begins as another's, or with another's output."""
        rng, most = self.rng, self.llm.config.max_model_len
        size = self.llm.config.cache_layout.prefix_size
        cut = rng.choice([0, 0, size, rng.randrange(self.longest), size * rng.randint(1, 3) + rng.randint(-1, 1)])
        prompt = rng.choice(self.stems)[:cut] + self._tokens(rng.choice([0, 1, 3, 20, rng.randrange(40)]))
        earlier = rng.choice(self.requests) if self.requests else None
        if earlier is not None and rng.random() < 0.3:
            prompt = earlier.prompt
            if earlier.samples and rng.random() < 0.7:
                prompt = prompt + earlier.samples[0].tokens + self._tokens(rng.randrange(5))
        scored = rng.random() < 0.05
        prompt = prompt[: most - (not scored)] or [5]
        request = Request(len(self.requests), prompt, self._params(scored, len(prompt)))
        self.requests.append(request)
        return request

    def draw_for_beams(self) -> list[int]:
        """Draw a prompt that leaves room for a token."""
        if self.rng.random() < 0.5:
            return self._tokens(self.rng.randrange(self.longest // 2, self.longest))
        return self.draw().prompt[: self.llm.config.max_model_len - 1]

    def _params(self, scored: bool, length: int) -> SamplingParams:
        rng = self.rng
        wishes: dict[str, Any] = {"prompt_logprobs": 0} if scored or rng.random() < 0.1 else {}
        if wishes:
            wishes["prompt_logprobs_start"] = min(rng.choice([0, 0, 1, 20, 50]), length - 1)
        if self.llm.config.hidden_layers and rng.random() < 0.4:
            wishes["hidden_states"] = rng.choice([[-1], [0, 2], [2, -1]])
            wishes["prompt_hidden_states"] = rng.random() < 0.6
        if self.llm.steerings and rng.random() < 0.3:
            wishes["steering"] = (STEERING, rng.choice([0.5, -1.0]))
        if scored:
            return SamplingParams(max_tokens=0, **wishes)
        if rng.random() < 0.5:
            wishes["logprobs"] = 0
        if rng.random() < 0.3:
            wishes.update(rng.choice(SAMPLED))
        if rng.random() < 0.5:
            wishes["ignore_eos"] = True
        wishes["max_tokens"] = max(wishes.get("min_tokens", 0), rng.choice([1, 2, rng.randint(3, 20), 20, 30, 50]))
        if rng.random() < 0.03:
            wishes["max_tokens"] = None
        if not self.llm.config.deterministic and rng.random() < 0.1:
            wishes["seed"] = None  # the engine makes one of the request's number
        return SamplingParams(
            **{
                "temperature": rng.choice([0, 0, 0.6, 1.0, 1.5]),
                "seed": rng.randrange(2**62),
                "n": rng.choice([1, 1, 1, 1, 2, 3]),
                **wishes,
            }
        )

    def _take(self, request: Request, output: Any) -> None:
        request.request_id, request.output = output.request_id, output
        request.prompt_logprobs = output.prompt_logprobs
        request.samples = [
            Sample(sample.token_ids, list(sample.logprobs or ()), sample.finish_reason) for sample in output.samples
        ]

    def _by_generate(self, count: int) -> None:
        requests = [self.draw() for _ in range(count)]
        prompts, params = [request.prompt for request in requests], [request.params for request in requests]
        for request, output in zip(requests, self.llm.generate(prompts, params, use_tqdm=False), strict=True):
            self._take(request, output)

    def _by_stream(self, count: int) -> None:
        """Read a stream, and often leave it in the middle."""
        requests = [self.draw() for _ in range(count)]
        for request in requests:
            request.samples = [Sample() for _ in range(request.params.n)]
        left = self.rng.choice([10**6, self.rng.randrange(1, 100)])
        stream = self.llm.stream([request.prompt for request in requests], [request.params for request in requests])
        for new in stream:
            request = requests[new.index]
            request.request_id = new.request_id
            sample = request.samples[new.sample]
            sample.tokens += new.token_ids
            sample.logprobs += new.logprobs or ()
            sample.finish_reason = new.finish_reason
            if new.prompt_logprobs is not None:
                request.prompt_logprobs = list(new.prompt_logprobs)
            left -= 1
            if left == 0:
                break
        stream.close()

    def _by_steps(self, count: int) -> None:
        """Add requests between steps, and abort some, forget the cache, or write the same weights again."""
        rng, llm = self.rng, self.llm
        running: dict[int, Request] = {}
        pace = rng.choice([0.1, 0.5, 0.9])
        while count or llm.has_unfinished_requests():
            while count and rng.random() < pace:
                request = self.draw()
                running[llm.add_request(request.prompt, request.params)] = request
                count -= 1
            if running and rng.random() < 0.02:
                llm.abort(rng.choice(list(running)))
            if rng.random() < 0.01:
                llm.reset_prefix_cache()
            if rng.random() < 0.007:
                llm.update_weights(self.weights, in_flight=rng.choice(["recompute", "recompute", "keep", "abort"]))
            for output in llm.step():
                self._take(running.pop(output.request_id), output)


class Checker:
    """Compares what came of requests with what transformers computes."""

    def __init__(self, model: Any, max_model_len: int, long_from: int | None) -> None:
        self.model, self.max_model_len = model, max_model_len
        self.long_from = max_model_len if long_from is None else long_from

    @torch.inference_mode()
    def _logits(self, texts: list[list[int]]) -> list[torch.Tensor]:
        """Return the logits after each token; later tokens do not change those of earlier ones."""
        if not texts:
            return []
        longest = max(map(len, texts))
        rows = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        return [logits[: len(text)] for logits, text in zip(self.model(rows).logits.float(), texts, strict=True)]

    def logits_behind(self, texts: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the logits after each token where a text grows by one token at a time, and where it comes as a whole.

        A short sequence that gets longer has other frequencies from there on.
        """
        short = self._logits([text[: self.long_from] for text in texts])
        long = iter(self._logits([text for text in texts if len(text) > self.long_from]))
        wholes = [next(long) if len(text) > self.long_from else rows for text, rows in zip(texts, short, strict=True)]
        return [(torch.cat([rows, whole[len(rows) :]]), whole) for rows, whole in zip(short, wholes, strict=True)]

    def check(self, requests: list[Request]) -> None:
        """Check all that came of the requests."""
        for steering in {request.params.steering for request in requests}:
            alike = [request for request in requests if request.params.steering == steering]
            with nullcontext() if steering is None else hooked(self.model, vectors_for(self.model), steering[1]):
                self._check(alike)

    def _check(self, requests: list[Request]) -> None:
        pairs = [(request, index) for request in requests for index in range(len(request.samples))]
        texts = [request.prompt + request.samples[index].tokens for request, index in pairs]
        for (request, index), (rows, whole) in zip(pairs, self.logits_behind(texts), strict=True):
            try:
                self._check_sample(request, index, rows)
                self._check_hidden_states(request, index)
                if index == 0:
                    self._check_prompt(request, whole if len(request.prompt) > self.long_from else rows)
            except AssertionError as error:
                raise AssertionError(f"{error}\nsample {index} of {request}") from error

    def _check_sample(self, request: Request, index: int, logits: torch.Tensor) -> None:
        sample, params = request.samples[index], request.params
        first = len(request.prompt)
        rows = logits[first - 1 : first - 1 + len(sample.tokens)]
        self._check_end(request, sample)
        if not sample.tokens:
            return
        scores = self._scores(request, sample, rows)
        if params.temperature > 0:
            seed = (seed_of(params, 0, request.request_id) + index * SEEDS_APART) % 2**63
            positions = torch.arange(first, first + len(scores), dtype=torch.int32)[:, None]
            scores = scores / params.temperature
            scores += gumbel_noise(torch.tensor([[seed]]), positions, torch.arange(VOCAB))
        best = scores.argmax(dim=1).tolist()
        for place, (token, likeliest) in enumerate(zip(sample.tokens, best, strict=True)):
            behind = float(scores[place, likeliest] - scores[place, token])
            assert behind <= TOLERANCE, (
                f"sample {index}, token {place} of {len(best)} is {token}, {behind} behind {likeliest}"
            )
        if params.logprobs is not None:
            ours = [entry[token] for entry, token in zip(sample.logprobs, sample.tokens, strict=True)]
            theirs = rows.log_softmax(dim=1)[range(len(rows)), sample.tokens].tolist()
            assert ours == pytest.approx(theirs, abs=TOLERANCE), f"sample {index}"

    @torch.inference_mode()
    def _check_hidden_states(self, request: Request, index: int) -> None:
        """Those of an aborted request may lack some. Of a text that has become a long one, all tokens are long."""
        params = request.params
        if not params.hidden_states or request.output is None:
            return
        sample, prompt = request.output.samples[index], request.prompt
        tokens = prompt + sample.token_ids[: max(0, len(sample.token_ids) - 1)]
        first = 0 if params.prompt_hidden_states else len(prompt) - 1
        states = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        for layer, ours in (sample.hidden_states or {}).items():
            assert len(ours) == len(tokens) - first or sample.finish_reason == "abort", "hidden states of each token"
            theirs = states[layer][0][first : first + len(ours)]
            torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE * float(states[layer].abs().max()))

    def _stop_ids(self, params: SamplingParams) -> list[int]:
        return [*([] if params.ignore_eos else ENDS), *(params.stop_token_ids or ())]

    def _check_end(self, request: Request, sample: Sample) -> None:
        params, tokens, stop_ids = request.params, sample.tokens, self._stop_ids(request.params)
        most = self.max_model_len - len(request.prompt)
        most = most if params.max_tokens is None else min(most, params.max_tokens)
        ends = bool(tokens) and tokens[-1] in stop_ids
        assert not set(tokens[:-1]).intersection(stop_ids), "it goes on behind a stop token"
        assert len(tokens) <= most, "it has too many tokens"
        if sample.finish_reason in ("stop", "length"):
            assert sample.finish_reason == ("stop" if ends else "length"), "it says so"
            assert ends or len(tokens) == most, "it ends too early"
        else:
            assert sample.finish_reason in ("abort", None), sample.finish_reason

    def _scores(self, request: Request, sample: Sample, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits as this request's settings change them."""
        params, rows = request.params, rows.clone()
        rows[: params.min_tokens, self._stop_ids(params)] = float("-inf")
        if params.has_penalties:
            for place, row in enumerate(rows):
                output = list(set(sample.tokens[:place]))
                seen = list({*request.prompt, *output})
                row[seen] = torch.where(
                    row[seen] > 0, row[seen] / params.repetition_penalty, row[seen] * params.repetition_penalty
                )
                row[output] -= params.presence_penalty
        return rows

    def _check_prompt(self, request: Request, logits: torch.Tensor) -> None:
        """Those of an aborted request may lack some, or all."""
        params, entries = request.params, request.prompt_logprobs
        has_ended = request.samples[0].finish_reason in ("stop", "length")
        if params.prompt_logprobs is None or (entries is None and not has_ended):
            return
        assert entries is not None
        assert len(entries) == len(request.prompt) or not has_ended
        first = max(1, params.prompt_logprobs_start)
        assert all(entry is None for entry in entries[:first])
        tokens = request.prompt[first : len(entries)]
        theirs = logits.log_softmax(dim=1)[range(first - 1, first - 1 + len(tokens)), tokens].tolist()
        ours = [entry[token] for entry, token in zip(entries[first:], tokens, strict=True)]
        assert ours == pytest.approx(theirs, abs=TOLERANCE), "log-probabilities of the prompt"


@dataclass
class Arena:
    """A model on disk, transformers' model of it, and engines."""

    subject: Subject
    folder: str
    model: Any
    make_llm: Callable[..., LLM]
    drafts: list[str]  # folders of models that may guess for it

    @functools.cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(Path(self.folder) / "model.safetensors")

    @functools.cached_property
    def roomy(self) -> LLM:
        return self.make_llm(self.folder, **self.options(max(self.least_tokens, 16)), num_kvcache_blocks=300)

    @functools.cached_property
    def alone(self) -> LLM:
        """An engine that computes each request's tokens one by one, and has room."""
        options = {**self.options(max(self.least_tokens, 16)), "hidden_state_layers": (0, 2, -1), "max_steerings": 1}
        llm = self.make_llm(self.folder, **options, num_kvcache_blocks=100, deterministic=True)
        llm.load_steering(STEERING, vectors_for(self.model))
        return llm

    @property
    def least_tokens(self) -> int:
        """How many a block and a step have at least."""
        return 64 if self.subject.case.keeps_states else 1

    def options(self, block_size: int) -> dict[str, Any]:
        shape = {"max_model_len": self.subject.max_model_len, "kvcache_block_size": block_size}
        return {"device": "cpu", "dtype": "float32", "use_tqdm": False, **shape}

    @functools.cache  # noqa: B019 - a module's tests share few of them
    def fewest_blocks(self, block_size: int, draft_model: str | None) -> int:
        """Return how many blocks the longest sequence needs."""
        drafting = {} if draft_model is None else {"speculation": "draft", "draft_model": draft_model}
        for blocks in range(1, self.subject.max_model_len):
            try:
                Config(self.folder, **self.options(block_size), **drafting, num_kvcache_blocks=blocks)
            except ValueError:
                continue
            return blocks
        raise AssertionError("no cache is large enough")

    __hash__ = object.__hash__


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Arena]]:
    """Return a function that makes a model and what stands around it, once each."""
    made, other = list[LLM](), str(tmp_path_factory.mktemp("draft"))
    build(subject("Qwen3ForCausalLM", "qwen3", num_hidden_layers=1, num_key_value_heads=1).case, Path(other))

    def make_llm(folder: str, **options: Any) -> LLM:
        made.append(LLM(folder, **options))
        return made[-1]

    @functools.cache
    def make(name: str) -> Arena:
        folder = tmp_path_factory.mktemp(name)
        model, own = build(SUBJECTS[name].case, folder), [str(folder)] if name in ("qwen3", "phi3") else []
        return Arena(SUBJECTS[name], str(folder), model, make_llm, [other, *own])

    yield make
    for llm in made:
        llm.close()


def open_engine(
    stage: Arena,
    rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
    spare_blocks: int | None = None,
    **options: Any,
) -> LLM:
    """Make an engine with few blocks. pytest shows what is printed here of a test that fails.

    spare_blocks: beside those that the longest sequence needs; None: some
    """
    has_foresight, nodes_collide = rng.random() < 0.4, rng.random() < 0.2
    if not has_foresight:
        monkeypatch.setattr(Admission, "is_roomy", True)
    if nodes_collide:
        monkeypatch.setattr(BlockManager, "make_tree", CollidingTree)
    slots_of_a_row = rng.choice([0.6, 4 / 3, 3])
    monkeypatch.setattr("nanoinfer.runner.memory.plan.SLOTS_OF_A_ROW", slots_of_a_row)
    least = stage.least_tokens
    block_size = rng.choice([16, 16, 32]) if least == 1 else rng.choice([64, 64, 128])
    drafters = [None, None, "suffix", "suffix", "auto", "draft", "draft", Babbler(VOCAB, rng.randrange(100))]
    drafting: dict[str, Any] = {"speculation": rng.choice(drafters), "max_guesses": rng.choice([1, 2, 4, 8, 15])}
    may_draft = drafting["speculation"] == "draft" or (drafting["speculation"] == "auto" and rng.random() < 0.5)
    drafting["draft_model"] = rng.choice(stage.drafts) if may_draft else None
    block_size = options.get("kvcache_block_size", block_size)
    fewest = stage.fewest_blocks(block_size, drafting.get("draft_model"))
    blocks = rng.choice([fewest, fewest, fewest + 1, fewest + 2, 2 * fewest])
    drawn = {
        "num_kvcache_blocks": blocks if spare_blocks is None else fewest + spare_blocks,
        "kv_offload_gib": rng.choice([0, 0.001, 0.05]),
        "max_num_batched_tokens": max(least, rng.choice([7, 16, 30, rng.randint(8, 100), 100])),
        "max_num_seqs": rng.choice([1, 2, 4, 6, 8, 8]),
        "hidden_state_layers": rng.choice([(), (0, 2, -1)]),
        "max_steerings": rng.choice([0, 2]),
    }
    options = {**stage.options(block_size), **drawn, **drafting, **options}
    print(f"engine: {options}, {has_foresight=}, {nodes_collide=}, {slots_of_a_row=}")
    llm = LLM(stage.folder, **options)
    if llm.config.max_steerings:
        llm.load_steering(STEERING, vectors_for(stage.model))
    return llm


def assert_nothing_is_held(llm: LLM) -> None:
    """No request leaves a block behind, nor a slot, nor a place in a queue."""
    scheduler, manager = llm.engine.scheduler, llm.engine.scheduler.block_manager
    assert not llm.has_unfinished_requests()
    assert scheduler.is_finished
    assert not scheduler.decoding.seqs
    assert not scheduler.decoding.full
    assert manager.num_free == len(manager.blocks)
    assert all(block.ref_count == 0 for block in manager.blocks)
    if (states := manager.states) is not None:
        snapshots = [node.snapshot for node in states._snapshots]
        assert sorted([*states._free, *states._late, *snapshots]) == list(range(states.num_slots))


def assert_nothing_is_left(llm: LLM) -> None:
    """No node stays when all is forgotten."""
    assert_nothing_is_held(llm)
    llm.reset_prefix_cache()
    manager = llm.engine.scheduler.block_manager
    assert len(manager.tree) == 0
    assert all(block.node is None for block in manager.blocks)


def test_tokens(
    name: str, number: int, arena: Callable[[str], Arena], monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    stage, rng = arena(name), random.Random(f"{name} {number}")
    with open_engine(stage, rng, monkeypatch) as llm:
        checker = Checker(stage.model, stage.subject.max_model_len, llm.config.description.long_from)
        requests = Player(llm, rng, stage.weights, stage.subject.max_model_len - 10).play(ROUND)
        assert_nothing_is_left(llm)
    checker.check(requests)


def test_bits(
    name: str, number: int, arena: Callable[[str], Arena], monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """With deterministic=True no bit of a result differs from those that the request has alone."""
    stage, rng = arena(name), random.Random(f"bits of {name} {number}")
    with open_engine(stage, rng, monkeypatch, deterministic=True) as llm:
        requests = Player(llm, rng, stage.weights, 60).play(BITS_ROUND)
        assert_nothing_is_left(llm)
    for request in requests:
        stage.alone.reset_prefix_cache()
        (alone,) = stage.alone.generate([request.prompt], request.params, use_tqdm=False)
        for sample, expected in zip(request.samples, alone.samples, strict=True):
            count = len(sample.tokens)
            assert sample.tokens == expected.token_ids[:count], request
            assert sample.logprobs == list(expected.logprobs or ())[:count], request
            if sample.finish_reason != "abort" and sample.finish_reason is not None:
                assert (count, sample.finish_reason) == (len(expected.token_ids), expected.finish_reason), request
        if request.output is not None and "abort" not in [sample.finish_reason for sample in request.samples]:
            assert bits_of(request.output) == bits_of(alone), request


def test_beams(
    name: str, number: int, arena: Callable[[str], Arena], monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """The scores of beams are those that each prompt's have alone, in a cache with room, and transformers'."""
    stage, rng = arena(name), random.Random(f"beams of {name} {number}")
    options = {
        "kvcache_block_size": max(stage.least_tokens, 16),
        "spare_blocks": rng.randrange(30),
        "max_num_batched_tokens": max(stage.least_tokens, rng.choice([7, 50, 1000, 1000])),
    }
    with open_engine(stage, rng, monkeypatch, **options) as llm:
        checker = Checker(stage.model, stage.subject.max_model_len, llm.config.description.long_from)
        player = Player(llm, rng, stage.weights, stage.subject.max_model_len - 10)
        for _ in range(BEAMS_ROUND):
            player.play(len(player.requests) + rng.choice([0, 2]))  # leaves prefixes in the cache
            prompts = [player.draw_for_beams() for _ in range(rng.choice([1, 3, 6]))]
            params = BeamSearchParams(rng.choice([2, 2, 3, 4]), rng.choice([1, 5, 5, 20]), rng.random() < 0.5)
            try:
                outputs = llm.beam_search(prompts, params)
            except ValueError as error:
                told = str(error)  # there are too few blocks, or slots for states, for so many beams
                if "of the KV cache's" not in told and "layers of this model keep states" not in told:
                    raise
                continue
            assert_nothing_is_held(llm)
            for prompt, output in zip(prompts, outputs, strict=True):
                stage.roomy.reset_prefix_cache()
                (alone,) = stage.roomy.beam_search([prompt], params)
                scores = [sequence.score for sequence in alone.sequences]
                assert [sequence.score for sequence in output.sequences] == pytest.approx(scores, abs=TOLERANCE)
                texts = [sequence.tokens for sequence in output.sequences]
                for sequence, (rows, _) in zip(output.sequences, checker.logits_behind(texts), strict=True):
                    drawn = rows[len(prompt) - 1 : -1].log_softmax(dim=1)
                    logprob = float(drawn[range(len(drawn)), sequence.token_ids].sum())
                    assert sequence.cum_logprob == pytest.approx(logprob, abs=20 * TOLERANCE)
