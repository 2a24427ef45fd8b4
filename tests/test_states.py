"""Models some of whose layers remember a state of fixed size, as users meet them: caching, samples, sleep, errors.

test_models.py compares them with transformers, test_fuzz.py plays with them, test_random_blocks.py has the slots.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random
from types import FrameType, SimpleNamespace
from typing import cast

import pytest
import torch
from cases import CASES, VOCAB, build
from conftest import Oracle, alike, amid_blocks, greedy, of_each_kind, whole_only
from safetensors.torch import load_file
from test_beam_search import assert_as_transformers

from nanoinfer import LLM, BeamSearchParams, SamplingParams
from nanoinfer.attention.cache_layout import CacheLayout
from nanoinfer.config import Config
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.prefixes import state_slots
from nanoinfer.engine.results.step_result import StepResult
from nanoinfer.engine.sequence import Sequence
from nanoinfer.kernels.delta.chunks import CHUNK
from nanoinfer.runner.start.trials import Trials

OPTIONS = {"device": "cpu", "kvcache_block_size": 64, "max_model_len": 320}
NAMES = [
    "qwen3.5",
    *(pytest.param(name, marks=pytest.mark.whole) for name in ("lfm2", "bamba", "nemotronh", "falconh1")),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {}
    for name in ("qwen3.5", "lfm2", "bamba", "nemotronh", "falconh1"):
        made[name] = str(tmp_path_factory.mktemp("states"))
        build(CASES[name], Path(made[name]))
    return made


@pytest.fixture
def folder(folders: dict[str, str]) -> str:
    return folders["qwen3.5"]


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


STEM = random_tokens(200, 0)  # three blocks, and a part of a fourth one
PROMPTS = [STEM + random_tokens(5 + 3 * seed, seed) for seed in range(1, 9)]


def token_ids(llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams | None = None) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params or greedy(8), use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(folders: dict[str, str]) -> dict[str, list[list[int]]]:
    """The tokens of each prompt, computed alone from its beginning."""
    found = {}
    for name, folder in folders.items():
        with LLM(folder, dtype="float32", num_kvcache_blocks=20, **OPTIONS) as llm:
            found[name] = []
            for prompt in PROMPTS:
                llm.reset_prefix_cache()
                found[name] += token_ids(llm, [prompt])
    return found


class TestPrefixes:
    @pytest.mark.parametrize("name", NAMES)
    def test_what_waiting_prompts_share_is_computed_once(
        self, name: str, folders: dict[str, str], expected: dict[str, list[list[int]]], make_llm: Callable[..., LLM]
    ) -> None:
        llm = make_llm(folders[name], **OPTIONS)
        assert token_ids(llm) == expected[name]
        stats = llm.stats()
        assert stats.num_cached_tokens == (len(PROMPTS) - 1) * 192
        assert stats.num_prefill_tokens == sum(map(len, PROMPTS)) - stats.num_cached_tokens

    def test_a_prompt_that_parts_from_one_that_has_gone_by_is_computed_again_once(
        self, folder: str, expected: dict[str, list[list[int]]], make_llm: Callable[..., LLM]
    ) -> None:
        llm, cached = make_llm(folder, **OPTIONS), []
        assert token_ids(llm, [STEM[:100] + random_tokens(100, 99)])
        for prompt, tokens in zip(PROMPTS[:4], expected["qwen3.5"], strict=False):
            output = llm.generate([prompt], greedy(8), use_tqdm=False)[0]
            assert output.token_ids == tokens
            cached.append(output["num_cached_tokens"])
        assert cached == [0, 192, 192, 192]  # the second one finds the first one's last whole block

    @pytest.mark.parametrize("block_size", [64, 256])
    @pytest.mark.parametrize("name", NAMES)
    def test_prompts_that_part_amid_a_block_share_all_but_the_last_chunk(
        self, name: str, block_size: int, folders: dict[str, str], make_llm: Callable[..., LLM]
    ) -> None:
        """Together, and one by one, behind what all share and behind what the second one found to be shared."""
        llm = make_llm(folders[name], **{**OPTIONS, "kvcache_block_size": block_size, "max_model_len": 512})
        stem = random_tokens(369, 5)
        near = [[*stem, token] for token in range(6)]
        far = [[*stem, token, *random_tokens(90, token)] for token in range(6)]
        alone = []
        for prompt in [*near, *far]:
            llm.reset_prefix_cache()
            alone += token_ids(llm, [prompt])
        for prompts, expected, one_by_one in (
            (near, alone[:6], [0, 320, 320, 320, 320, 320]),
            (far, alone[6:], [0, 256, 320, 320, 320, 320] if block_size == 256 else [0, 0, 320, 320, 320, 320]),
        ):
            llm.reset_prefix_cache()
            together = llm.generate(prompts, greedy(8), use_tqdm=False)
            assert [output.token_ids for output in together] == expected
            assert [output["num_cached_tokens"] for output in together] == [0] + [320] * 5
            llm.reset_prefix_cache()
            outputs = [llm.generate([prompt], greedy(8), use_tqdm=False)[0] for prompt in prompts]
            assert [output.token_ids for output in outputs] == expected
            assert [output["num_cached_tokens"] for output in outputs] == one_by_one

    def test_a_chat_goes_on_behind_its_last_turn(self, folder: str, make_llm: Callable[..., LLM]) -> None:
        llm, prompt = make_llm(folder, **OPTIONS), list(STEM[:70])
        for turn in range(3):
            output = llm.generate([prompt], greedy(8), use_tqdm=False)[0]
            assert output["num_cached_tokens"] == 64 * ((len(prompt) - 50) // 64) if turn else True
            prompt = prompt + output.token_ids + random_tokens(50 - 8, turn)

    def test_a_slot_that_has_been_anybodys_is_begun_anew(
        self, folder: str, expected: dict[str, list[list[int]]], make_llm: Callable[..., LLM]
    ) -> None:
        llm = make_llm(folder, **OPTIONS)
        with torch.inference_mode():
            for inputs, recurrence, _ in llm.engine.ranks.runner.holdings.states.layers.values():
                for numbers in (inputs, *recurrence):
                    numbers.fill_(math.nan)
            llm.engine.ranks.runner.holdings.states.boundaries.fill_(7)
        assert token_ids(llm) == expected["qwen3.5"]

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.usefixtures("no_foresight")
    def test_who_is_preempted_goes_on_from_a_snapshot(
        self, name: str, folders: dict[str, str], make_llm: Callable[..., LLM]
    ) -> None:
        params = SamplingParams(temperature=0.8, max_tokens=60, ignore_eos=True, seed=3)
        roomy, tight = (
            make_llm(folders[name], **OPTIONS),
            make_llm(folders[name], **{**OPTIONS, "num_kvcache_blocks": 6}),
        )
        assert token_ids(tight, PROMPTS[:4], params) == token_ids(roomy, PROMPTS[:4], params)
        assert tight.stats().num_preemptions > 0
        assert roomy.stats().num_preemptions == 0

    def test_with_fewer_slots_than_rows_some_wait(
        self,
        folder: str,
        expected: dict[str, list[list[int]]],
        make_llm: Callable[..., LLM],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("nanoinfer.runner.memory.plan.SLOTS_OF_A_ROW", 0.5)
        llm = make_llm(folder, max_num_seqs=4, **OPTIONS)
        assert llm.memory.slots == 2
        assert token_ids(llm) == expected["qwen3.5"]
        assert llm.stats().num_cached_tokens > 0

    def test_what_is_reset_is_computed_again(
        self, folder: str, expected: dict[str, list[list[int]]], make_llm: Callable[..., LLM]
    ) -> None:
        llm = make_llm(folder, **OPTIONS)
        resets = (
            llm.reset_prefix_cache,
            lambda: llm.update_weights(load_file(Path(folder) / "model.safetensors")),
            lambda: (llm.sleep(level=1), llm.wake_up()),
            lambda: (llm.sleep(level=2), llm.wake_up(), llm.load_weights(folder)),
        )
        for reset in resets:
            assert token_ids(llm) == expected["qwen3.5"]
            reset()
            assert llm.generate(PROMPTS[:1], greedy(1), use_tqdm=False)[0]["num_cached_tokens"] == 0

    @pytest.mark.parametrize("together", [True, False])
    @pytest.mark.parametrize("block_size", [64, 256, *whole_only([128, 512])])
    def test_of_twenty_prompts_that_share_369_tokens_each_but_the_first_computes_its_own_and_a_chunk(
        self, block_size: int, together: bool, folder: str, make_llm: Callable[..., LLM]
    ) -> None:
        options = {**OPTIONS, "kvcache_block_size": block_size, "max_model_len": 512, "max_num_seqs": 8}
        llm, stem = make_llm(folder, **options), random_tokens(369, 5)
        prompts = [[*stem, token] for token in range(20)]
        batches = [prompts] if together else [[prompt] for prompt in prompts]
        outputs = [output for batch in batches for output in llm.generate(batch, greedy(2), use_tqdm=False)]
        computed = [len(output.prompt_token_ids) - output.num_cached_tokens for output in outputs]
        assert computed[0] == 370
        assert max(computed[1:]) <= 1 + CHUNK
        assert llm.stats().num_prefill_tokens == sum(computed)

    @pytest.mark.parametrize(("together", "first"), [(True, 1), (False, 2)])
    @pytest.mark.parametrize("block_size", [64, 256])
    def test_prompts_of_two_kinds_in_turn_part_where_those_before_did(
        self, block_size: int, together: bool, first: int, folder: str, make_llm: Callable[..., LLM]
    ) -> None:
        """One by one, nobody knows of the first where others will part from it. The second computes all, and knows."""
        options = {**OPTIONS, "kvcache_block_size": block_size, "max_num_seqs": 8}
        llm, stems = make_llm(folder, **options), [random_tokens(150, seed) for seed in range(2)]
        prompts = [[*stems[turn % 2], *random_tokens(70, 9 + turn)] for turn in range(12)]
        batches = [prompts] if together else [[prompt] for prompt in prompts]
        outputs = [output for batch in batches for output in llm.generate(batch, greedy(2), use_tqdm=False)]
        computed = [len(output.prompt_token_ids) - output.num_cached_tokens for output in outputs]
        assert computed[: 2 * first] == [220] * 2 * first
        assert max(computed[2 * first :]) <= 70 + CHUNK


class TestHostMemory:
    """What the device has no room for: snapshots, and the states of those that are preempted."""

    @pytest.mark.parametrize("name", NAMES)
    def test_prompts_go_on_from_snapshots_that_the_device_has_lost(
        self, name: str, folders: dict[str, str], expected: dict[str, list[list[int]]], make_llm: Callable[..., LLM]
    ) -> None:
        llm = make_llm(folders[name], **OPTIONS, num_kvcache_blocks=9, max_num_seqs=8, kv_offload_gib=0.01)
        others = [random_tokens(250, 20 + seed) for seed in range(6)]
        for _ in range(3):
            assert token_ids(llm, PROMPTS[:4]) == expected[name][:4]
            outputs = llm.generate(others, greedy(8), use_tqdm=False)
        assert sum(output["num_cached_tokens"] == 192 for output in outputs) >= 5
        assert llm.stats().num_restored_blocks > 0

    @pytest.mark.parametrize("sleeps", [False, True])
    def test_and_amid_blocks(self, sleeps: bool, folder: str, make_llm: Callable[..., LLM]) -> None:
        """A tail's blocks come back with its states, and others copy them."""
        options = {**OPTIONS, "kvcache_block_size": 256, "max_model_len": 512}
        plain = make_llm(folder, **options)
        llm = make_llm(folder, **options, num_kvcache_blocks=4, max_num_seqs=4, kv_offload_gib=0.01)
        stems = [random_tokens(340, seed) for seed in range(4)]
        prompts = [[*stem, token] for stem in stems for token in (1, 2)]
        wanted = token_ids(plain, prompts)
        for _ in range(2):
            assert token_ids(llm, prompts) == wanted
        if sleeps:
            llm.sleep(level=1)
            llm.wake_up()
        outputs = [output for prompt in prompts for output in llm.generate([prompt], greedy(8), use_tqdm=False)]
        assert [output.token_ids for output in outputs] == wanted
        assert sum(output.num_cached_tokens == 320 for output in outputs) >= 7

    @pytest.mark.parametrize(("block_size", "ranks"), [(64, 1), (128, 1), *whole_only([(64, 2)])])
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.usefixtures("no_foresight")
    def test_who_is_preempted_goes_on_from_its_own_states(
        self, name: str, block_size: int, ranks: int, folders: dict[str, str], make_llm: Callable[..., LLM]
    ) -> None:
        params = SamplingParams(temperature=0.8, max_tokens=60, ignore_eos=True, seed=3)
        options = {**OPTIONS, "kvcache_block_size": block_size}
        wanted = token_ids(make_llm(folders[name], **options), PROMPTS[:4], params)
        tight = {"num_kvcache_blocks": 384 // block_size, "kv_offload_gib": 0.02, "tensor_parallel_size": ranks}
        llm = make_llm(folders[name], **options, **tight)
        token_ids(llm, PROMPTS[:4], params)  # until then, host memory is not there
        llm.reset_stats()
        assert token_ids(llm, PROMPTS[:4], params) == wanted
        assert llm.stats().num_preemptions > 0
        assert llm.stats().num_recomputed_tokens == 0

    @pytest.mark.usefixtures("no_foresight")
    def test_new_weights_leave_nothing_of_who_is_preempted(self, folder: str, make_llm: Callable[..., LLM]) -> None:
        """It waits while weights come, and begins again with them."""
        other = {name: weight * 1.1 for name, weight in load_file(Path(folder) / "model.safetensors").items()}
        llm, fresh = make_llm(folder, **OPTIONS, num_kvcache_blocks=6, kv_offload_gib=0.01), make_llm(folder, **OPTIONS)
        params = SamplingParams(temperature=0.8, max_tokens=60, ignore_eos=True, seed=3)
        token_ids(llm, PROMPTS[:4], params)  # until then, host memory is not there
        for prompt in PROMPTS[:4]:
            llm.add_request(prompt, params)
        outputs, waiting = [], llm.engine.scheduler.waiting
        while not any(seq.kept for seq in waiting):
            outputs += llm.step()
        llm.update_weights(other)
        assert not any(seq.kept for seq in waiting)
        fresh.update_weights(other)
        while llm.has_unfinished_requests():
            outputs += llm.step()
        for output in outputs:
            start = output.weights_versions[-1][0]
            begun = output.prompt_token_ids + output.token_ids[:start]
            own = SamplingParams(temperature=0.8, max_tokens=60 - start, ignore_eos=True, seed=3)
            assert token_ids(fresh, [begun], own) == [output.token_ids[start:]]

    @pytest.mark.parametrize("seed", [1, *whole_only(range(2, 8))])
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.usefixtures("no_foresight")
    def test_tokens_are_those_of_a_plain_run(
        self, name: str, seed: int, folders: dict[str, str], make_llm: Callable[..., LLM]
    ) -> None:
        """Requests come at random, in a cache that holds few of them, and begin as earlier ones do."""
        random = Random(seed)
        block_size = random.choice([64, 128])
        options = {**OPTIONS, "kvcache_block_size": block_size, "max_num_seqs": random.choice([2, 3, 6])}
        tight = {"num_kvcache_blocks": 320 // block_size + random.randrange(3), "kv_offload_gib": 0.01}
        plain, llm = make_llm(folders[name], **OPTIONS), make_llm(folders[name], **options, **tight)
        stems = [random_tokens(250, number) for number in range(3)]
        prompts = [
            random.choice(stems)[: random.randrange(200)] + random_tokens(1 + random.randrange(40), number)
            for number in range(15)
        ]
        params = [
            SamplingParams(
                temperature=0.8, seed=number, n=random.choice([1, 1, 2, 3]), max_tokens=random.randrange(1, 50)
            )
            for number in range(15)
        ]
        ended: dict[int, list[list[int]]] = {}
        left = list(zip(prompts, params, strict=True))
        while left or llm.has_unfinished_requests():
            if left and random.random() < 0.3:
                llm.add_request(*left.pop(0))
            for output in llm.step():
                ended[output.request_id] = [sample.token_ids for sample in output.samples]
        wanted = plain.generate(prompts, params, use_tqdm=False)
        assert list(dict(sorted(ended.items())).values()) == [
            [sample.token_ids for sample in output.samples] for output in wanted
        ]
        assert llm.stats().num_restored_blocks > 0


class TestSamples:
    @pytest.mark.parametrize("name", NAMES)
    def test_samples_of_a_prompt_share_its_computation(
        self, name: str, folders: dict[str, str], make_llm: Callable[..., LLM]
    ) -> None:
        llm = make_llm(folders[name], **OPTIONS)
        alone = llm.generate([PROMPTS[0]], greedy(12), use_tqdm=False)[0].token_ids
        llm.reset_prefix_cache()
        llm.reset_stats()
        (output,) = llm.generate([PROMPTS[0]], greedy(12, n=6), use_tqdm=False)
        assert [sample.token_ids for sample in output.samples] == [alone] * 6
        assert llm.stats().num_prefill_tokens == len(PROMPTS[0])

    def test_samples_for_which_there_is_no_row_begin_at_the_snapshot(
        self, folder: str, make_llm: Callable[..., LLM]
    ) -> None:
        llm = make_llm(folder, max_num_seqs=2, **OPTIONS)
        params = SamplingParams(temperature=1, seed=5, max_tokens=10, ignore_eos=True, n=5)
        (output,) = llm.generate([PROMPTS[0]], params, use_tqdm=False)
        (wanted,) = make_llm(folder, **OPTIONS).generate([PROMPTS[0]], params, use_tqdm=False)
        assert [sample.token_ids for sample in output.samples] == [sample.token_ids for sample in wanted.samples]
        assert llm.stats().num_prefill_tokens < 2 * len(PROMPTS[0])


class Interrupt:
    """A trace function that raises KeyboardInterrupt at one of the lines that StateSlots executes."""

    def __init__(self, line: int) -> None:
        self.lines_left = line

    def __call__(self, frame: FrameType, event: str, arg: object) -> Interrupt | None:
        if event == "call" and frame.f_code.co_filename != state_slots.__file__:
            return None
        if event == "line":
            self.lines_left -= 1
            if not self.lines_left:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("layout", [alike(4), amid_blocks(alike(4))], ids=["nodes", "amid blocks"])
def test_an_interrupt_at_any_line_loses_no_slot(layout: CacheLayout) -> None:
    """Prompts come and go, and their snapshots push each other out. Then all slots can be had again, once each."""

    def sequence(*prompt: int) -> Sequence:
        return Sequence(list(prompt), SamplingParams(max_tokens=9), seed=0, max_model_len=20)

    def begin(manager: BlockManager, seq: Sequence) -> None:
        manager.begin_step()
        start = manager.allocate(seq, len(seq))
        assert start is not None
        manager.plan(seq, start, len(seq))

    for line in count(1):
        manager = BlockManager(30, layout, num_slots=3)
        sys.settrace(interrupt := Interrupt(line))
        try:
            for seq in (sequence(first, *range(8)) for first in (1, 2, 1, 3)):
                manager.expect(seq)
                begin(manager, seq)
                manager.fork(seq, other := sequence(0))
                manager.free(seq)
                manager.free(other)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        manager.free_all()
        seqs = [sequence(5) for _ in range(3)]  # too short for a snapshot
        for seq in seqs:
            begin(manager, seq)
        assert sorted(seq.slot for seq in seqs) == [0, 1, 2], f"interrupted at line {line}"
        assert not manager.can_fork(seqs[0]), f"interrupted at line {line}"
        if interrupt.lines_left > 0:
            break
    assert line > 100


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}])
def test_ranks_and_replicas(
    options: dict[str, int], folder: str, expected: dict[str, list[list[int]]], make_llm: Callable[..., LLM]
) -> None:
    llm = make_llm(folder, **OPTIONS, **options)
    for _ in range(2):
        assert token_ids(llm) == expected["qwen3.5"]
    assert llm.stats().num_cached_tokens > 0


def test_states_of_sixteen_bits_take_half_the_memory(folder: str, make_llm: Callable[..., LLM]) -> None:
    whole, half = make_llm(folder, **OPTIONS), make_llm(folder, **OPTIONS, state_dtype="bfloat16")
    sizes = [llm.memory.states / llm.memory.slots for llm in (whole, half)]
    matrices = 4 * 3 * (4 * 32 * 16)  # bytes of a number, layers, heads of values and keys
    assert sizes[0] - sizes[1] == matrices / 2

    def logprobs(llm: LLM) -> list[float]:
        outputs = llm.generate(PROMPTS, greedy(2, ignore_eos=True, allowed_token_ids=[7], logprobs=0), use_tqdm=False)
        return [output["logprobs"][1][7] for output in outputs]

    wanted = logprobs(whole)
    assert logprobs(half) == pytest.approx(wanted, abs=0.1)
    assert logprobs(half) != pytest.approx(wanted, abs=1e-4)


def test_the_plan_of_the_memory_tells_of_them(folder: str, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(folder, **OPTIONS, max_num_seqs=6)
    assert llm.memory.slots == 8  # a quarter of them for snapshots
    assert "states in 8 slots " in str(llm.memory)


def test_as_many_run_at_once_as_there_is_memory_for(
    folder: str,
    expected: dict[str, list[list[int]]],
    make_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roomy = make_llm(folder, **OPTIONS, max_num_seqs=6).memory
    assert (roomy.rows, roomy.slots) == (6, 8)
    row_bytes = 4 / 3 * roomy.states / roomy.slots + 5 * roomy.block_bytes  # five blocks hold 320 tokens
    monkeypatch.setattr("nanoinfer.runner.memory.plan.CPU_BUDGET", int(3.5 * row_bytes))
    llm = make_llm(folder, **OPTIONS, max_num_seqs=6)
    assert (llm.memory.rows, llm.memory.slots) == (3, 4)
    most = 0

    def note(result: StepResult) -> None:
        nonlocal most
        most = max(most, result.num_running)

    llm.engine.on_step = note
    assert token_ids(llm) == expected["qwen3.5"]
    assert most == 3


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kvcache_block_size": 16}, "kvcache_block_size=16: must be a multiple of 64, as layers of this model keep"),
        (
            {"max_num_batched_tokens": 63},
            "max_num_batched_tokens=63: must be at least 64, as layers of this model keep",
        ),
        ({"state_dtype": "float16"}, "state_dtype='float16': must be one of 'float32', 'bfloat16'"),
        ({"deterministic": True, "tensor_parallel_size": 2}, "deterministic=True with tensor_parallel_size=2: the CPU"),
    ],
)
def test_options_that_do_not_go_with_them(
    options: dict[str, object], told: str, folder: str, make_llm: Callable[..., LLM]
) -> None:
    with pytest.raises(ValueError, match=told):
        make_llm(folder, **{**OPTIONS, **options})


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name", of_each_kind(zip(["qwen3.5", "lfm2", "olmohybrid", "bamba", "nemotronh", "falconh1"]), 0)
)
def test_no_bit_depends_on_company(name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Fresh, from snapshots, and in chunks beside others: each token is computed alone."""
    build(CASES[name], tmp_path)
    long = [7 * place % 150 for place in range(70)]
    prompts = [long, [*long[:66], 3], [5, 6]]
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=4, n=2, logprobs=2, ignore_eos=True)
    how = {**OPTIONS, "deterministic": True}
    together = make_llm(str(tmp_path), **how, max_num_batched_tokens=64).generate(prompts, params, use_tqdm=False)
    tight = make_llm(str(tmp_path), **how, num_kvcache_blocks=6)
    outputs = [output for prompt in prompts for output in tight.generate([prompt], params, use_tqdm=False)]
    outputs += tight.generate(prompts, params, use_tqdm=False)
    assert sum(output.num_cached_tokens for output in outputs) > 0
    for output, expected in zip(outputs, [*together, *together], strict=True):
        for sample, own in zip(output.samples, expected.samples, strict=True):
            assert (sample.token_ids, sample.logprobs) == (own.token_ids, own.logprobs)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("ranks", [1, *whole_only([2])])
@pytest.mark.parametrize(
    "name", of_each_kind(zip(["qwen3.5", "lfm2", "olmohybrid", "bamba", "nemotronh", "falconh1"]), 0, 1)
)
def test_beams_take_copies_of_states(name: str, ranks: int, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """A beam's children go on from its state; prompts end before a boundary of chunks, there, and behind it."""
    oracle = SimpleNamespace(model=build(CASES[name], tmp_path))
    llm = make_llm(str(tmp_path), **{**OPTIONS, "max_num_seqs": 8}, tensor_parallel_size=ranks)
    random = Random(1)
    for width, length in ((4, 5), (3, 3)):
        prompts = [random.choices(range(3, 150), k=count) for count in (62, 64)]
        params = BeamSearchParams(width, length, length_penalty=0.5, ignore_eos=True)
        for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
            assert_as_transformers(output, cast(Oracle, oracle), prompt, params, [1])
    states = llm.engine.scheduler.block_manager.states
    assert states is not None
    states.begin_step()
    assert len(states._free) + len(states._snapshots) == states.num_slots
    with pytest.raises(ValueError, match=r"params.beam_width=40: must be at most \d+: layers of this model"):
        llm.beam_search(prompts, BeamSearchParams(40, 3))


@pytest.mark.parametrize("max_model_len", [4098, 20_100, 262_144])
def test_chunks_that_a_start_tries_begin_where_states_are_cut(max_model_len: int) -> None:
    config = SimpleNamespace(
        max_adapters=0,
        max_num_batched_tokens=16_384,
        max_num_seqs=512,
        max_model_len=max_model_len,
        description=SimpleNamespace(generates=True, latent=None, has_states=True),
        attention_backend="triton",
        is_in_order=False,
        speculation=None,
        hidden_layers=(),
    )
    trials = Trials(cast(Config, config), [1], torch.device("cpu"))
    *_, (behind_a_context,), (first,) = [step.chunks for step in trials.largest_prefills()]
    assert first.start == 0
    for chunk in (behind_a_context, first):
        assert len(chunk.token_ids) == min(16_384, max_model_len - 1)
        assert chunk.start % CHUNK == 0
        assert chunk.start + len(chunk.token_ids) < max_model_len
