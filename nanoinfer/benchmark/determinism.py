"""Compares the bits of requests that run in random company with those of the same requests alone.

python -m nanoinfer.benchmark.determinism MODEL runs it for a model. It draws requests. The first engine cuts prompts
into chunks, the second preempts sequences; then it draws further engines until the time is up. Each engine gets the
requests in a random order and at random times, some of them twice, and loses some on the way. With --ranks 1 2, engines
have one rank or two. If a result differs, the command runs the request again, and names the first tensor of the model
that differs. If the request alone now has other bits than at first, the command says so: then company is not the cause.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nanoinfer.benchmark.first_difference import Recorder, first_difference
from nanoinfer.benchmark.output.status_line import StatusLine
from nanoinfer.config import Config
from nanoinfer.llm import LLM
from nanoinfer.requests.outputs import RequestOutput
from nanoinfer.sampling_params import SamplingParams

Bits = list[tuple[str, Any]]  # what a result is made of, by name, in the order in which it is computed

PREFIX = 24  # tokens that many of the prompts share
LONGEST = {"cpu": (72, 24), "cuda": (600, 60)}  # tokens of a prompt, and of an output
BLOCK_SIZES = 16, 32
CHUNKS = 5, 16, 64, 4096  # prompt tokens of a step
ROWS = 1, 2, 5, 64
LEAST_ENGINES = 2
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"n": 3},
    {"top_k": 20, "top_p": 0.9},
    {"min_p": 0.02, "repetition_penalty": 1.2},
    {"prompt_logprobs": 2},
    {"logprobs": 5, "presence_penalty": 0.5},
    {"kept_tokens": True, "entropy": True, "top_p": 0.8, "logit_bias": {1: 2.0, 3: -1.0}, "min_tokens": 3},
)


@dataclass(frozen=True)
class Case:
    """A request."""

    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Difference:
    """The first thing of a request's result that is another in company.

    options: the engine's; cause: the first tensor that differs, or another finding
    """

    case: Case
    options: dict[str, int]
    place: str
    alone: Any
    in_company: Any
    cause: str

    def __str__(self) -> str:
        return (
            f"{self.place} is {self.in_company}, and alone {self.alone}; {self.cause}; engine: {self.options};"
            f" {self.case}"
        )


def draw_cases(
    rng: random.Random, vocab_size: int, count: int, longest: tuple[int, int] = LONGEST["cpu"]
) -> list[Case]:
    """Draw requests, half of which begin alike. longest: the tokens of a prompt, and of an output"""
    prefix = [rng.randrange(vocab_size) for _ in range(PREFIX)]
    cases = []
    for _ in range(count):
        own = [rng.randrange(vocab_size) for _ in range(rng.randint(1, longest[0] - PREFIX))]
        settings: dict[str, Any] = {"temperature": 1.0, "logprobs": 0, **rng.choice(SETTINGS)}
        params = SamplingParams(
            **settings, max_tokens=rng.randint(3, longest[1]), seed=rng.randrange(2**31), ignore_eos=True
        )
        cases.append(Case(prefix + own if rng.random() < 0.5 else own, params))
    return cases


def draw_options(rng: random.Random, max_model_len: int, ranks: Sequence[int] = (1,)) -> Iterator[dict[str, int]]:
    """Yield engines' limits without end: one with small chunks, one with few blocks for many rows, and drawn ones.

    ranks: numbers of ranks to draw from
    """

    def options(block_size: int, spare: int, chunk: int, rows: int) -> dict[str, int]:
        return {
            "tensor_parallel_size": rng.choice(ranks),
            "max_model_len": max_model_len,
            "kvcache_block_size": block_size,
            "num_kvcache_blocks": -(-max_model_len // block_size) + spare,
            "max_num_batched_tokens": chunk,
            "max_num_seqs": rows,
        }

    yield options(BLOCK_SIZES[0], 200, CHUNKS[0], ROWS[-1])
    yield options(BLOCK_SIZES[0], 3, CHUNKS[-1], ROWS[-1])
    while True:
        yield options(rng.choice(BLOCK_SIZES), rng.choice((0, 3, 200)), rng.choice(CHUNKS), rng.choice(ROWS))


def bits_of(output: RequestOutput) -> Bits:
    """Return the tokens and log-probabilities of a result; floats compare bit by bit, for none of them is NaN."""

    def of(name: str, entries: list[Mapping[int, Any] | None]) -> Iterator[tuple[str, Any]]:
        for place, entry in enumerate(entries):
            yield f"{name} {place}", None if entry is None else dict(entry)

    bits: Bits = list(of("prompt log-probability", list(output.prompt_logprobs or ())))
    for sample in output.samples:
        bits += of(f"sample {sample.index}, log-probability", list(sample.logprobs or ()))
        bits.append((f"sample {sample.index}, kept tokens", sample.kept_tokens))
        bits.append((f"sample {sample.index}, entropies", sample.entropies))
        bits.append((f"sample {sample.index}, tokens", sample.token_ids))
        for layer, states in (sample.hidden_states or {}).items():
            bits.append((f"sample {sample.index}, hidden states {layer}", states.view(torch.uint8).numpy().tobytes()))
    return bits


def run_alone(llm: LLM, cases: list[Case], status: StatusLine) -> dict[int, Bits]:
    """Run each request alone, with no prefix cached; returns the bits by the case's id()."""
    bits = {}
    for case in cases:
        llm.reset_prefix_cache()
        bits[id(case)] = bits_of(llm.generate([case.prompt], case.params, use_tqdm=False)[0])
        if status.is_due:
            status.tell(f"{len(bits)} of {len(cases)}")
    return bits


def run_in_company(llm: LLM, cases: list[Case], rng: random.Random) -> Iterator[tuple[Case, RequestOutput]]:
    """Run requests that come at random times, some of them twice and some to be aborted; yield the results."""
    waiting = cases + rng.sample(cases, len(cases) // 4)
    rng.shuffle(waiting)
    running: dict[int, Case] = {}
    while waiting or llm.has_unfinished_requests():
        while waiting and rng.random() < 0.6:
            case = waiting.pop()
            running[llm.add_request(case.prompt, case.params)] = case
        if running and rng.random() < 0.02:
            llm.abort(rng.choice(list(running)))
        for output in llm.step():
            case = running.pop(output.request_id)
            if all(sample.finish_reason != "abort" for sample in output.samples):
                yield case, output


def find_difference(
    make_llm: Callable[..., LLM],
    seconds: float,
    seed: int,
    count: int,
    longest: tuple[int, int] = LONGEST["cpu"],
    ranks: Sequence[int] = (1,),
) -> tuple[int, Difference | None]:
    """Run requests alone on one rank, and then in company by LEAST_ENGINES engines, and more while there is time.

    Returns how many results were compared, and the first difference, if there is one. Says on standard error how far
    it is.

    make_llm: makes an engine of the model with the options of draw_options; each engine is closed again
    seed: of all that is drawn; count: of the requests; longest: as for draw_cases; ranks: as for draw_options
    """
    rng = random.Random(seed)
    with StatusLine() as status:
        status.begin("requests alone")
        with make_llm(max_model_len=sum(longest)) as llm:
            cases = draw_cases(rng, llm.config.description.vocab_size, count, longest)
            expected = run_alone(llm, cases, status)
        status.begin("requests in company")
        compared, start = 0, time.monotonic()
        for number, options in enumerate(draw_options(rng, sum(longest), ranks)):
            if number >= LEAST_ENGINES and time.monotonic() - start > seconds:
                break
            drawn, difference = rng.getstate(), None
            if status.is_due:
                status.tell(f"{compared} results compared, engine {number + 1} starts")
            with make_llm(**options) as llm:
                for case, output in run_in_company(llm, cases, rng):
                    compared += 1
                    if status.is_due:
                        spent = f"{time.monotonic() - start:.0f} of {seconds:g} seconds"
                        status.tell(f"{compared} results compared, engine {number + 1}, {spent}")
                    alone = expected[id(case)]
                    if difference := _compare(alone, bits_of(output)):
                        break
            if difference is not None:
                status.begin("a result differs: the request runs again, to find the first tensor that does")
                rng.setstate(drawn)
                cause = find_cause(make_llm, options, cases, rng, case, output.request_id, alone)
                return compared, Difference(case, options, *difference, cause)
    return compared, None


def _compare(alone: Bits, other: Bits) -> tuple[str, Any, Any] | None:
    """Return the first place that differs, with what is there alone and in the other result; None: there is none."""
    assert len(alone) == len(other)
    for (place, wanted), (_, found) in zip(alone, other, strict=True):
        if wanted != found:
            return place, wanted, found
    return None


def find_cause(
    make_llm: Callable[..., LLM],
    options: dict[str, int],
    cases: list[Case],
    rng: random.Random,
    case: Case,
    request_id: int,
    expected: Bits,
) -> str:
    """Run a request again, alone and in the company that rng draws again, and say which tensor differs first.

    Both engines have the same number of ranks, so that the first rank holds the same share of each tensor.

    expected: the request's bits in its first run alone; if they do not come again, that is the cause
    """
    alone, in_company = Recorder(0), Recorder(request_id)
    like = {name: options[name] for name in ("max_model_len", "tensor_parallel_size")}
    with make_llm(**like, enforce_eager=True) as llm, alone.watching(llm):
        again = bits_of(llm.generate([case.prompt], case.params, use_tqdm=False)[0])
    if difference := _compare(expected, again):
        place, _, found = difference
        ranks = like["tensor_parallel_size"]
        return f"alone again, in an eager engine with tensor_parallel_size={ranks}, {place} is {found}"
    with make_llm(**options, enforce_eager=True) as llm, in_company.watching(llm):
        for _, output in run_in_company(llm, cases, rng):
            if output.request_id == request_id:
                break
    return first_difference(alone, in_company)


def main() -> int:
    """Run the command; returns its exit status: 1 if something differed."""
    parser = argparse.ArgumentParser(prog="python -m nanoinfer.benchmark.determinism", description=__doc__)
    parser.add_argument("model", help="a folder with config.json and *.safetensors, or a Hub id")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long engines are drawn, default 60")
    parser.add_argument("--requests", type=int, default=24, help="how many are drawn, default 24")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn, default 0")
    parser.add_argument("--device", default="auto", help="as for LLM, default auto")
    parser.add_argument("--dtype", default="auto", help="as for LLM, default auto")
    parser.add_argument("--quantization", help="as for LLM, default none")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as for LLM, default auto")
    ranks_help = "numbers of ranks that engines are drawn with, default 1"
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help=ranks_help)
    args = parser.parse_args()
    if args.requests < 1:
        parser.error(f"--requests {args.requests}: must be at least 1")

    formats = {"dtype": args.dtype, "quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype}

    def make_llm(**options: int) -> LLM:
        # The line of the status is all that a terminal shows.
        return LLM(args.model, device=args.device, deterministic=True, use_tqdm=False, **formats, **options)

    longest = LONGEST[Config(args.model, device=args.device).device]
    compared, difference = find_difference(make_llm, args.seconds, args.seed, args.requests, longest, args.ranks)
    print(f"{compared} results compared: " + ("all bits equal" if difference is None else str(difference)))
    return int(difference is not None)


if __name__ == "__main__":
    sys.exit(main())
