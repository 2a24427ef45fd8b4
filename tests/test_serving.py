"""Requests of add_request stream; AsyncLLM runs those of many tasks together, and each task hears of its own alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch
from conftest import greedy, safetensors_of, whole_only
from safetensors.torch import load_file

from nanoinfer import BUNDLED_MODEL, LLM, AsyncLLM, SamplingParams, StreamOutput, WorkerError
from nanoinfer.engine.llm_engine import LLMEngine

OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "num_kvcache_blocks": 40, "kvcache_block_size": 16}
PROMPTS = [[30 + 7 * number, 31, 40 + number] * 3 for number in range(12)]


def settings(number: int, **more: Any) -> SamplingParams:
    return SamplingParams(seed=number, max_tokens=4 + number % 9, ignore_eos=True, **more)


def run(coroutine: Coroutine[Any, Any, Any], seconds: float = 60) -> Any:
    """Run a coroutine, and fail if it hangs."""
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "nanoinfer"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(BUNDLED_MODEL, **OPTIONS)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    """The tokens of each prompt with its settings."""
    outputs = llm.generate(PROMPTS, [settings(number) for number in range(len(PROMPTS))], use_tqdm=False)
    return [output.samples[0].token_ids for output in outputs]


class TestStreamsOfAddedRequests:
    def collect(self, llm: LLM) -> tuple[dict[tuple[int, int], list[StreamOutput]], list[Any]]:
        """Step to the end; returns the pieces of each request and sample, and the other outputs."""
        pieces, others = defaultdict(list), []
        while llm.has_unfinished_requests():
            for output in llm.step():
                if isinstance(output, StreamOutput):
                    pieces[output.request_id, output.sample].append(output)
                else:
                    others.append(output)
        return pieces, others

    def test_they_come_beside_those_that_end(self, llm: LLM, expected: list[list[int]]) -> None:
        ids = [llm.add_request(PROMPTS[number], settings(number), streams=number < 2) for number in range(4)]
        pieces, others = self.collect(llm)
        for number in (0, 1):
            own = pieces[ids[number], 0]
            assert [token for piece in own for token in piece.token_ids] == expected[number]
            assert [piece.finish_reason for piece in own] == [None] * (len(own) - 1) + ["length"]
            assert {piece.index for piece in own} == {0}
            assert len(own) > 1
        assert {output.request_id: output.samples[0].token_ids for output in others} == {
            ids[number]: expected[number] for number in (2, 3)
        }

    def test_samples_and_their_texts(self, llm: LLM) -> None:
        params = settings(3, n=3, logprobs=1, prompt_logprobs=0)
        (whole,) = llm.generate([PROMPTS[3]], params, use_tqdm=False)
        request_id = llm.add_request(PROMPTS[3], params, streams=True)
        pieces, others = self.collect(llm)
        assert others == []
        for number, sample in enumerate(whole.samples):
            own = pieces[request_id, number]
            assert "".join(piece.text for piece in own) == sample.text
            assert [entry for piece in own for entry in piece.logprobs] == sample.logprobs
            assert all(piece.prompt_logprobs is None for piece in own[1:])
        assert pieces[request_id, 0][0].prompt_logprobs == whole.prompt_logprobs

    def test_one_that_is_aborted_ends_with_what_it_has(self, llm: LLM) -> None:
        request_id = llm.add_request(PROMPTS[0], greedy(50), streams=True)
        while not (new := llm.step()):
            pass
        llm.abort(request_id)
        rest = llm.step()
        assert [piece.finish_reason for piece in new + rest][-1] == "abort"
        assert len(rest) == 1
        assert not llm.has_unfinished_requests()

    def test_replicas_stream_too(self, make_llm: Callable[..., LLM], expected: list[list[int]]) -> None:
        two = make_llm(**OPTIONS, data_parallel_size=2)
        ids = [two.add_request(prompt, settings(number), streams=True) for number, prompt in enumerate(PROMPTS[:4])]
        pieces, _ = self.collect(two)
        found = [[token for piece in pieces[one, 0] for token in piece.token_ids] for one in ids]
        assert found == expected[:4]

    def test_bad_input(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="streams='yes': must be True or False"):
            llm.add_request(PROMPTS[0], streams="yes")
        with pytest.raises(ValueError, match="streams=True: must be False for a request of prepare_to_embed"):
            llm.add_request(llm.prepare_to_embed(PROMPTS[0]), streams=True)
        assert not llm.has_unfinished_requests()


async def tokens_of(llm: AsyncLLM, number: int, streams: bool = False) -> list[int]:
    """Return the tokens of a prompt."""
    if not streams:
        return (await llm.generate(PROMPTS[number], settings(number))).samples[0].token_ids
    return [token async for new in llm.stream(PROMPTS[number], settings(number)) for token in new.token_ids]


async def is_empty(llm: AsyncLLM) -> bool:
    """Whether the LLM has no request, after a while for those that are being aborted."""
    for _ in range(100):
        if not await llm.call(lambda llm: llm.has_unfinished_requests()):
            return True
        await asyncio.sleep(0.01)
    return False


def raise_at_once(llm: LLM) -> None:
    raise GeneratorExit


class TestTasks:
    @pytest.mark.parametrize("streams", [False, True])
    def test_all_run_together(self, streams: bool, expected: list[list[int]]) -> None:
        async def main() -> None:
            async with AsyncLLM(BUNDLED_MODEL, **OPTIONS) as llm:
                tasks = [tokens_of(llm, number, streams) for number in range(len(PROMPTS))]
                assert await asyncio.gather(*tasks) == expected
                stats = await llm.call(lambda llm: llm.stats())
                assert stats.rows_per_decode_step > 2

        run(main())
        assert threads() == []

    def test_all_samples_of_a_stream(self, llm: LLM) -> None:
        (whole,) = llm.generate([PROMPTS[0]], settings(0, n=3), use_tqdm=False)

        async def main() -> None:
            async with AsyncLLM(BUNDLED_MODEL, **OPTIONS) as llm:
                texts = ["", "", ""]
                async for new in llm.stream(PROMPTS[0], settings(0, n=3)):
                    texts[new.sample] += new.text
                assert texts == [sample.text for sample in whole.samples]

        run(main())

    def test_more_turns_of_a_chat_find_the_earlier_ones_in_the_cache(self) -> None:
        async def talk(llm: AsyncLLM, first: str) -> int:
            messages, num_cached = [{"role": "user", "content": first}], 0
            for _ in range(3):
                output = await llm.generate({"messages": messages}, greedy(20))
                num_cached = output.num_cached_tokens
                messages += [{"role": "assistant", "content": output.samples[0].text}, {"role": "user", "content": "?"}]
            return num_cached

        async def main() -> None:
            async with AsyncLLM(BUNDLED_MODEL, **{**OPTIONS, "num_kvcache_blocks": 100}) as llm:
                assert min(await asyncio.gather(*(talk(llm, f"Tell me of {name}") for name in "xyz"))) >= 16

        run(main())

    def test_a_call_has_the_llm_between_two_steps(self) -> None:
        async def main() -> None:
            async with AsyncLLM(BUNDLED_MODEL, **OPTIONS) as llm:
                running = asyncio.create_task(llm.generate(PROMPTS[0], greedy(60, ignore_eos=True)))
                assert await llm.call(lambda llm: llm.load_weights(BUNDLED_MODEL)) == 1
                with pytest.raises(ValueError, match="level=3"):
                    await llm.call(lambda llm: llm.sleep(3))
                with pytest.raises(GeneratorExit):
                    await llm.call(raise_at_once)
                assert len((await running).samples[0].token_ids) == 60

        run(main())


class TestWhoLeaves:
    def test_a_cancelled_task_disturbs_no_other(self, expected: list[list[int]]) -> None:
        async def main() -> None:
            async with AsyncLLM(BUNDLED_MODEL, **OPTIONS) as llm:
                long = [asyncio.create_task(llm.generate(PROMPTS[0], greedy(400))) for _ in range(3)]
                others = [asyncio.create_task(tokens_of(llm, number)) for number in range(6)]
                await asyncio.sleep(0.02)
                for task in long:
                    task.cancel()
                assert await asyncio.gather(*others) == expected[:6]
                assert await is_empty(llm)
                for task in long:
                    with pytest.raises(asyncio.CancelledError):
                        await task
                assert (await llm.call(lambda llm: llm.stats())).finish_reasons.get("abort", 0) <= 3

        run(main())

    def test_a_stream_that_is_left_aborts_its_request(self) -> None:
        async def main() -> None:
            async with AsyncLLM(BUNDLED_MODEL, **OPTIONS) as llm:
                async for _ in llm.stream(PROMPTS[0], greedy(400, ignore_eos=True)):
                    break
                assert await is_empty(llm)
                assert (await llm.call(lambda llm: llm.stats())).finish_reasons == {"abort": 1}

        run(main())

    @pytest.mark.parametrize("seed", [0, *whole_only(range(1, 8))])
    def test_cancels_at_random_moments(self, seed: int, expected: list[list[int]]) -> None:
        draw = random.Random(seed)

        async def one(llm: AsyncLLM) -> None:
            number = draw.randrange(len(PROMPTS))
            work = tokens_of(llm, number, streams=draw.random() < 0.5)
            with contextlib.suppress(TimeoutError):
                assert await asyncio.wait_for(work, draw.choice([0, 0.001, 0.01, 0.05, 20])) == expected[number]

        async def main() -> None:
            async with AsyncLLM(BUNDLED_MODEL, **OPTIONS) as llm:
                for _ in range(4):
                    await asyncio.gather(*(one(llm) for _ in range(20)))
                assert await is_empty(llm)
                assert await tokens_of(llm, 0) == expected[0]

        run(main())


async def errors_of(tasks: list[asyncio.Task[Any]]) -> list[BaseException]:
    return list(await asyncio.gather(*tasks, return_exceptions=True))


class TestErrors:
    def test_bad_input_is_the_task_s_own(self, expected: list[list[int]]) -> None:
        async def main() -> None:
            async with AsyncLLM(BUNDLED_MODEL, **OPTIONS) as llm:
                good = asyncio.create_task(tokens_of(llm, 1))
                for bad in ([], [10**9], "\ud800", {"messages": 3}):
                    with pytest.raises(ValueError, match="prompt"):
                        await llm.generate(bad)
                with pytest.raises(ValueError, match="sampling_params=3"):
                    await llm.generate(PROMPTS[0], 3)  # type: ignore[arg-type]  # what a user may pass
                with pytest.raises(ValueError, match="adapter='red'"):
                    async for _ in llm.stream(PROMPTS[0], greedy(3, adapter="red")):
                        pass
                assert await good == expected[1]

        run(main())

    def test_an_option_that_cannot_work(self) -> None:
        async def main() -> None:
            with pytest.raises(ValueError, match="max_num_seqs=0"):
                async with AsyncLLM(BUNDLED_MODEL, max_num_seqs=0):
                    raise AssertionError

        run(main())
        assert threads() == []

    def test_before_it_has_started_and_behind_its_end(self) -> None:
        async def main() -> None:
            llm = AsyncLLM(BUNDLED_MODEL, **OPTIONS)
            with pytest.raises(RuntimeError, match="has not started: use `async with"):
                await llm.generate(PROMPTS[0])
            async with llm:
                tasks = [asyncio.create_task(llm.generate(prompt, greedy(400))) for prompt in PROMPTS]
                streams = [asyncio.create_task(anext(llm.stream(PROMPTS[0], greedy(400)))) for _ in range(2)]
                await asyncio.sleep(0.01)
                await llm.close()
                errors = await errors_of(tasks)
                assert {(type(error), str(error)) for error in errors} == {
                    (RuntimeError, "this LLM is closed: make another")
                }
                await errors_of(streams)
                with pytest.raises(RuntimeError, match="this LLM is closed"):
                    await llm.generate(PROMPTS[0])

        run(main())
        assert threads() == []

    def test_a_step_that_fails_ends_what_runs_with_its_error(
        self, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step, failures = LLMEngine.step, iter([ZeroDivisionError("once")])

        def fail_once(engine: LLMEngine) -> Any:
            if engine.scheduler.running and (error := next(failures, None)) is not None:
                raise error
            return step(engine)

        async def main() -> None:
            async with AsyncLLM(BUNDLED_MODEL, **OPTIONS) as llm:
                monkeypatch.setattr(LLMEngine, "step", fail_once)
                errors = await errors_of([asyncio.create_task(tokens_of(llm, number)) for number in range(4)])
                assert {(type(error), str(error)) for error in errors} == {(ZeroDivisionError, "once")}
                assert len({id(error) for error in errors}) == 4
                assert await tokens_of(llm, 0) == expected[0]

        run(main())

    def test_a_rank_that_dies(self, expected: list[list[int]]) -> None:
        async def main() -> None:
            async with AsyncLLM(BUNDLED_MODEL, **OPTIONS, tensor_parallel_size=2) as llm:
                assert await tokens_of(llm, 0) == expected[0]
                tasks = [asyncio.create_task(llm.generate(prompt, greedy(400))) for prompt in PROMPTS[:3]]
                await asyncio.sleep(0.05)
                await llm.call(lambda llm: llm.engine.ranks.workers.processes[0].kill())
                errors = await errors_of(tasks)
                assert {type(error) for error in errors} == {WorkerError}
                with pytest.raises(WorkerError, match="rank 1 died"):
                    await llm.generate(PROMPTS[0])

        run(main())
        assert threads() == []

    def test_a_call_that_breaks_off_leaves_nobody_waiting(self, expected: list[list[int]]) -> None:
        def half(llm: LLM) -> None:
            def tensors() -> Iterator[tuple[str, torch.Tensor]]:
                yield next(iter(weights.items()))
                raise ZeroDivisionError

            llm.update_weights(tensors())

        weights = {name: tensor for file in safetensors_of(BUNDLED_MODEL) for name, tensor in load_file(file).items()}

        async def main() -> None:
            async with AsyncLLM(BUNDLED_MODEL, **OPTIONS) as llm:
                tasks = [asyncio.create_task(llm.generate(prompt, greedy(400))) for prompt in PROMPTS[:3]]
                with pytest.raises(ZeroDivisionError):
                    await llm.call(half)
                for error in await errors_of(tasks):
                    assert isinstance(error, RuntimeError)
                    assert "the weights are incomplete" in str(error)
                before = time.process_time()
                await asyncio.sleep(0.3)
                assert time.process_time() - before < 0.1
                await llm.call(lambda llm: llm.update_weights(weights))
                assert await tokens_of(llm, 0) == expected[0]
                tasks = [asyncio.create_task(llm.generate(prompt, greedy(400))) for prompt in PROMPTS[:3]]
                await asyncio.sleep(0.02)
                await llm.call(lambda llm: llm.close())
                for error in await errors_of(tasks):
                    assert isinstance(error, (RuntimeError, ValueError))

        run(main())

    def test_an_error_that_cannot_be_copied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class TwoPartsError(Exception):
            def __init__(self, first: str, second: str) -> None:
                super().__init__(first + second)

        def fail(engine: LLMEngine) -> None:
            raise TwoPartsError("a", "b")

        async def main() -> None:
            async with AsyncLLM(BUNDLED_MODEL, **OPTIONS) as llm:
                monkeypatch.setattr(LLMEngine, "step", fail)
                with pytest.raises(RuntimeError, match="TwoPartsError: ab"):
                    await llm.generate(PROMPTS[0])

        run(main())


def test_what_a_task_changes_later_is_none_of_its_request(expected: list[list[int]]) -> None:
    async def ask(llm: AsyncLLM, params: SamplingParams, number: int) -> list[int]:
        params.seed, params.max_tokens, params.ignore_eos = number, 4 + number % 9, True
        return (await llm.generate(PROMPTS[number], params)).samples[0].token_ids

    async def main() -> None:
        async with AsyncLLM(BUNDLED_MODEL, **OPTIONS) as llm:
            params = SamplingParams()
            assert await asyncio.gather(*(ask(llm, params, number) for number in range(12))) == expected

    run(main())


def test_nobody_waits_busily() -> None:
    async def main() -> None:
        async with AsyncLLM(BUNDLED_MODEL, **OPTIONS) as llm:
            await tokens_of(llm, 0)
            before = time.process_time()
            await asyncio.sleep(0.5)
            assert time.process_time() - before < 0.1

    run(main())
