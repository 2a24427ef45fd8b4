"""Adapters as users meet them: loading, naming, replacing and unloading them beside one model, while requests run."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest
import test_lifecycle
import torch
from cases import CASES, build
from cases.tuned import ALPHA, Tuned
from conftest import Oracle, greedy, of_each_kind, wait_until, whole_only
from safetensors.torch import load_file
from test_lifecycle import Interrupt
from test_spmd import Trainer, rank, told
from test_spmd import make as make_with_peers
from test_torch_state import CONTEXTS

from nanoinfer import BUNDLED_MODEL, LLM, BeamSearchParams, RequestOutput, SamplingParams
from nanoinfer.engine.ranks.workers import WorkerError
from nanoinfer.parallel import buckets
from nanoinfer.replicas.replicas import Replicas
from nanoinfer.runner.adapters.adapters import AdapterSlots
from nanoinfer.weights.adapters import slots

OPTIONS: dict[str, Any] = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 200, "max_adapters": 2}
PROMPT = list(range(20, 60))  # two whole blocks and a half


@pytest.fixture(scope="module")
def base() -> Oracle:
    return Oracle(BUNDLED_MODEL)


@pytest.fixture(scope="module")
def red() -> Tuned:
    return Tuned(BUNDLED_MODEL, seed=1)


@pytest.fixture(scope="module")
def blue() -> Tuned:
    return Tuned(BUNDLED_MODEL, seed=2, rank=16, only="self_attn")


@pytest.fixture(scope="module")
def shared_llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, dtype="float32", **OPTIONS) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """An LLM of two slots, without adapters."""
    yield shared_llm
    shared_llm.reset_prefix_cache()
    for request_id in list(shared_llm._requests._running):
        shared_llm.abort(request_id)
    finish(shared_llm)
    for name in shared_llm.adapters:
        shared_llm.unload_adapter(name)


def load(llm: LLM, name: str, tuned: Tuned, **how: Any) -> int:
    return llm.load_adapter(name, tuned.tensors, alpha=ALPHA, **how)


def tokens(llm: LLM, prompt: list[int] = PROMPT, adapter: str | None = None, count: int = 12) -> list[int]:
    (output,) = llm.generate([prompt], greedy(count, adapter=adapter, ignore_eos=True), use_tqdm=False)
    return output.token_ids


def expected(oracle: Oracle, prompt: list[int] = PROMPT, count: int = 12) -> list[int]:
    return greedy_tokens(oracle, tuple(prompt), count)


@cache
def greedy_tokens(oracle: Oracle, prompt: tuple[int, ...], count: int) -> list[int]:
    return oracle.greedy(list(prompt), count, ignore_eos=True)


def finish(llm: LLM) -> list[RequestOutput]:
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    return sorted(outputs, key=lambda output: output.request_id)


class TestLoading:
    def test_from_a_folder_and_from_tensors(self, llm: LLM, base: Oracle, red: Tuned, tmp_path: Path) -> None:
        config = json.loads((Path(red.save(tmp_path)) / "adapter_config.json").read_text())
        in_double = {name: tensor.double() for name, tensor in red.tensors.items()}
        ways: list[tuple[Any, dict[str, Any]]] = [
            (str(tmp_path), {}),
            (tmp_path, {}),
            (red.tensors, {"alpha": ALPHA}),
            (iter(in_double.items()), {"config": config}),
        ]
        for version, (source, how) in enumerate(ways, 1):
            assert llm.load_adapter("red", source, **how) == version
            assert tokens(llm, adapter="red") == expected(red)
            assert tokens(llm) == expected(base)

    def test_from_what_peft_gives(self, llm: LLM, base: Oracle) -> None:
        peft = pytest.importorskip("peft", reason="needs peft: pip install -e '.[trl]'")
        from cases.adapters import adapt

        wrapped = adapt(Oracle(BUNDLED_MODEL).model, target_modules=["q_proj", "down_proj"], use_rslora=True)
        state = peft.get_peft_model_state_dict(wrapped)
        llm.load_adapter("mine", state, config=wrapped.peft_config["default"])
        merged = Oracle(BUNDLED_MODEL)
        merged.model = wrapped.merge_and_unload()
        assert tokens(llm, adapter="mine") == expected(merged) != expected(base)

    @pytest.mark.filterwarnings("ignore:Anomaly Detection")
    @pytest.mark.parametrize("name", of_each_kind(CONTEXTS, 0, 2, 13))
    def test_what_the_caller_has_set_for_torch_does_not_reach_it(
        self, name: str, llm: LLM, red: Tuned, tmp_path: Path
    ) -> None:
        red.save(tmp_path)
        for source, how in [(red.tensors, {"alpha": ALPHA}), (tmp_path, {})]:
            with CONTEXTS[name]():
                llm.load_adapter("red", source, **how)
            assert tokens(llm, adapter="red") == expected(red)

    def test_what_is_loaded(self, llm: LLM, red: Tuned, blue: Tuned) -> None:
        assert llm.adapters == {}
        for name, tuned in (("red", red), ("blue", blue), ("red", red)):
            load(llm, name, tuned)
        assert [(name, one.version, one.rank) for name, one in llm.adapters.items()] == [("red", 2, 4), ("blue", 1, 16)]
        assert llm.adapters["blue"].modules[:2] == (
            "model.layers.0.self_attn.k_proj",
            "model.layers.0.self_attn.o_proj",
        )
        llm.unload_adapter("red")
        assert list(llm.adapters) == ["blue"]
        assert load(llm, "red", red) == 1

    def test_a_slot_that_is_used_again_keeps_nothing(self, llm: LLM, red: Tuned, blue: Tuned) -> None:
        """The second adapter has other modules than the first."""
        for tuned in (red, blue, red):
            load(llm, "one", tuned)
            assert tokens(llm, adapter="one") == expected(tuned)
            llm.unload_adapter("one")


class TestRequests:
    def test_rows_of_one_step_name_any_adapter(self, llm: LLM, base: Oracle, red: Tuned, blue: Tuned) -> None:
        oracles: dict[str | None, Oracle] = {None: base, "red": red, "blue": blue}
        load(llm, "red", red)
        load(llm, "blue", blue)
        names = [None, "red", "blue", "red", None, "blue", "blue", "red"]
        prompts = [list(range(30 + i, 40 + 5 * i)) for i in range(len(names))]
        params = [greedy(10, adapter=name, ignore_eos=True) for name in names]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for prompt, name, output in zip(prompts, names, outputs, strict=True):
            assert output.token_ids == expected(oracles[name], prompt, 10), f"{name} behind {prompt}"

    def test_samples_streams_steps_scores_and_chats(self, llm: LLM, red: Tuned) -> None:
        load(llm, "red", red)
        wanted = expected(red)
        params = greedy(12, adapter="red", ignore_eos=True)
        (output,) = llm.generate([PROMPT], greedy(12, n=3, adapter="red", ignore_eos=True), use_tqdm=False)
        assert [sample.token_ids for sample in output.samples] == [wanted] * 3
        assert [token for new in llm.stream([PROMPT], params) for token in new.token_ids] == wanted
        llm.add_request(llm.prepare(PROMPT, params))
        assert [output.token_ids for output in finish(llm)] == [wanted]
        (score,) = llm.score(PROMPT, [wanted], adapter="red")
        logprobs = red.logits(PROMPT + wanted).log_softmax(1)[len(PROMPT) - 1 : -1]
        assert score.logprob == pytest.approx(float(logprobs.gather(1, torch.tensor([wanted]).T).sum()), abs=1e-3)
        (answer,) = llm.chat([{"role": "user", "content": "Who goes there?"}], params, use_tqdm=False)
        assert answer.token_ids == expected(red, answer.prompt_token_ids)

    def test_guided_rows(self, llm: LLM, base: Oracle, red: Tuned) -> None:
        """Each model prefers what it would write by itself."""
        load(llm, "red", red)
        own = [llm.tokenizer.decode(expected(oracle, count=4)) for oracle in (base, red)]
        assert own[0] != own[1]
        params = [greedy(12, adapter=name, structured_outputs={"choice": own}) for name in (None, "red")]
        outputs = llm.generate([PROMPT] * 3, [*params, greedy(12, adapter="red", ignore_eos=True)], use_tqdm=False)
        assert [output.text for output in outputs[:2]] == own
        assert outputs[2].token_ids == expected(red)

    def test_beams(self, llm: LLM, red: Tuned, base: Oracle) -> None:
        load(llm, "red", red)
        ids = torch.tensor([PROMPT])
        for adapter, oracle in ((None, base), ("red", red), (None, base)):
            (output,) = llm.beam_search([PROMPT], BeamSearchParams(3, 8, adapter=adapter))
            found = oracle.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, num_beams=3, pad_token_id=0
            )
            assert output.sequences[0].tokens == found[0].tolist()

    def test_preempted_ones_go_on_with_theirs(
        self, make_llm: Callable[..., LLM], base: Oracle, red: Tuned, no_foresight: None
    ) -> None:
        llm = make_llm(**{**OPTIONS, "num_kvcache_blocks": 12, "max_model_len": 128})
        load(llm, "red", red)
        prompts = [[30 + i] * 20 for i in range(5)]
        names = ["red", None, "red", "red", None]
        params = [greedy(26, adapter=name, ignore_eos=True) for name in names]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.engine.scheduler.num_preemptions > 0
        for prompt, name, output in zip(prompts, names, outputs, strict=True):
            assert output.token_ids == expected(red if name else base, prompt, 26)


class TestPrefixes:
    def test_each_adapter_and_the_model_cache_for_themselves(
        self, llm: LLM, base: Oracle, red: Tuned, blue: Tuned
    ) -> None:
        oracles: dict[str | None, Oracle] = {None: base, "red": red, "blue": blue}
        load(llm, "red", red)
        load(llm, "blue", blue)
        for cached in (0, 32):
            for name, oracle in oracles.items():
                (output,) = llm.generate([PROMPT], greedy(12, adapter=name, ignore_eos=True), use_tqdm=False)
                assert output.num_cached_tokens == cached
                assert output.token_ids == expected(oracle)

    def test_a_new_version_finds_nothing_of_the_old_one_and_others_find_theirs(
        self, llm: LLM, red: Tuned, blue: Tuned
    ) -> None:
        load(llm, "one", red)
        load(llm, "other", red)
        for name in (None, "one", "other"):
            tokens(llm, adapter=name)
        load(llm, "one", blue)
        outputs = llm.generate(
            [PROMPT] * 3, [greedy(12, adapter=name, ignore_eos=True) for name in (None, "one", "other")], use_tqdm=False
        )
        assert [output.num_cached_tokens for output in outputs] == [32, 0, 32]
        assert outputs[1].token_ids == expected(blue)
        llm.unload_adapter("one")
        load(llm, "one", red)  # in the same slot
        (output,) = llm.generate([PROMPT], greedy(12, adapter="one", ignore_eos=True), use_tqdm=False)
        assert (output.num_cached_tokens, output.token_ids) == (0, expected(red))

    def test_what_an_adapter_has_left_is_handed_out_first(self, llm: LLM, red: Tuned) -> None:
        load(llm, "red", red)
        tokens(llm)
        tokens(llm, adapter="red")
        manager = llm.engine.scheduler.block_manager
        kept = {block_id for node in manager.tree if node.content[:8] for block_id in node.blocks}
        llm.unload_adapter("red")
        left = {block_id for node in manager.tree for block_id in node.blocks}
        assert 0 < len(left) < len(kept)
        assert not left & set(list(manager.free_blocks)[: len(kept - left)])

    def test_rows_of_two_adapters_have_no_block_in_common(self, llm: LLM, red: Tuned) -> None:
        """So decode attention, which reads shared blocks once, never takes one's for the other's."""
        load(llm, "one", red)
        load(llm, "two", red)
        names = [None, "one", "two", "one", "two"]
        for name in names:
            llm.add_request(PROMPT, greedy(12, adapter=name, ignore_eos=True))
        llm.step()
        llm.step()
        held: dict[int, set[int]] = {}
        for seq in llm.engine.row_map.seqs:
            held.setdefault(seq.adapter, set()).update(seq.block_tables[0])
        assert len(held) == 3
        assert sum(map(len, held.values())) == len(set().union(*held.values()))
        assert [output.token_ids for output in finish(llm)[1:]] == [expected(red)] * 4


class TestReplacedWhileRequestsRun:
    NAMES = ("one", None, "other", "one")
    PROMPTS = ([40, 41], [50], [60, 61, 62], [70])

    @pytest.fixture
    def ids(self, llm: LLM, red: Tuned) -> list[int]:
        """Requests that have begun, of an adapter, of another that equals it, and of none."""
        load(llm, "one", red)
        load(llm, "other", red)
        params = [greedy(30, adapter=name, ignore_eos=True) for name in self.NAMES]
        ids = [llm.add_request(prompt, one) for prompt, one in zip(self.PROMPTS, params, strict=True)]
        for _ in range(10):
            llm.step()
        return ids

    def check_others(self, outputs: list[RequestOutput], base: Oracle, red: Tuned) -> None:
        """Check that the others have gone on as if nothing had happened."""
        _, plain, other, _ = outputs
        assert plain.token_ids == expected(base, self.PROMPTS[1], 30)
        assert other.token_ids == expected(red, self.PROMPTS[2], 30)

    def test_recompute(self, llm: LLM, ids: list[int], base: Oracle, red: Tuned, blue: Tuned) -> None:
        load(llm, "one", blue)
        outputs = finish(llm)
        self.check_others(outputs, base, red)
        for place in (0, 3):
            prompt, found = self.PROMPTS[place], outputs[place].token_ids
            assert found[:10] == expected(red, prompt, 10)
            assert found[10:] == expected(blue, prompt + found[:10], 20)

    def test_keep(self, llm: LLM, ids: list[int], base: Oracle, red: Tuned, blue: Tuned) -> None:
        load(llm, "one", blue, in_flight="keep")
        outputs = finish(llm)
        self.check_others(outputs, base, red)
        for place in (0, 3):
            prompt, found = self.PROMPTS[place], outputs[place].token_ids
            assert found[:10] == expected(red, prompt, 10)
            assert found != expected(red, prompt, 30)
            assert tokens(llm, prompt + found, "one") == expected(blue, prompt + found)  # finds nothing of it

    def test_abort(self, llm: LLM, ids: list[int], base: Oracle, red: Tuned, blue: Tuned) -> None:
        load(llm, "one", blue, in_flight="abort")
        outputs = finish(llm)
        self.check_others(outputs, base, red)
        for place in (0, 3):
            assert outputs[place].finish_reason == "abort"
            assert outputs[place].token_ids == expected(red, self.PROMPTS[place], len(outputs[place].token_ids))

    def test_new_weights_of_the_model_leave_adapters_loaded(
        self, llm: LLM, ids: list[int], base: Oracle, red: Tuned
    ) -> None:
        (file,) = Path(BUNDLED_MODEL).glob("*.safetensors")
        llm.update_weights(load_file(file))
        outputs = finish(llm)
        self.check_others(outputs, base, red)
        assert outputs[0].token_ids == expected(red, self.PROMPTS[0], 30)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_while_it_is_written_leaves_the_old_version(
    ranks: int, make_llm: Callable[..., LLM], red: Tuned, blue: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(**OPTIONS, tensor_parallel_size=ranks)
    load(llm, "one", red)
    llm.add_request(PROMPT, greedy(12, adapter="one", ignore_eos=True))
    llm.step()
    with monkeypatch.context() as patch:
        patch.setattr(slots, "_scale", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            load(llm, "one", blue)
    assert llm.adapters["one"].version == 1
    assert [output.token_ids for output in finish(llm)] == [expected(red)]
    assert load(llm, "one", blue) == 2
    assert tokens(llm, adapter="one") == expected(blue)


def test_a_rank_that_dies_meanwhile_leaves_no_memory_behind(
    make_llm: Callable[..., LLM], red: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(**OPTIONS, tensor_parallel_size=2)
    (process,) = llm.engine.ranks.workers.processes
    segments: list[Path] = []
    make, write = buckets.make_segment, AdapterSlots.write

    def note(num_bytes: int, least: int) -> Any:
        memory = make(num_bytes, least)
        segments.append(Path("/dev/shm", memory.name))
        return memory

    def die(self: AdapterSlots, slot: int, adapter: Any) -> None:
        process.kill()
        process.join()
        write(self, slot, adapter)

    monkeypatch.setattr(buckets, "make_segment", note)
    monkeypatch.setattr(AdapterSlots, "write", die)
    with pytest.raises(WorkerError, match="rank 1 died"):
        load(llm, "red", red)
    assert [segment.exists() for segment in segments] == [False]


class CtrlC(Interrupt):
    """Presses Ctrl-C at a line, which takes effect where the code lets it."""

    def __call__(self, frame: FrameType, event: str, arg: object) -> Interrupt | None:
        try:
            return super().__call__(frame, event, arg)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
            return self


def test_ctrl_c_at_any_line_leaves_the_old_version_or_the_new_one(
    llm: LLM, red: Tuned, blue: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_lifecycle, "HOST_FILES", ("adapters.py", "carrier.py", "slots.py", "source.py"))

    def replace(trace: Interrupt) -> None:
        sys.settrace(trace)
        try:
            load(llm, "one", blue)
        finally:
            sys.settrace(None)

    load(llm, "one", red)
    whole, found = Interrupt(), set()
    replace(whole)
    for line in range(1, whole.count - 2, 61):
        load(llm, "one", red)
        before = llm.adapters["one"].version
        llm.add_request(PROMPT, greedy(12, adapter="one", ignore_eos=True))
        with pytest.raises(KeyboardInterrupt):
            replace(CtrlC(line))
        is_new = llm.adapters["one"].version > before
        (output,) = finish(llm)
        assert output.token_ids == expected(blue if is_new else red), f"interrupted at line {line}"
        found.add(is_new)
    assert found == {False, True}


@pytest.mark.parametrize("first", [1, *whole_only([2, 3])])
def test_ctrl_c_at_any_line_unloads_an_adapter_or_leaves_it(
    first: int, llm: LLM, red: Tuned, blue: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        test_lifecycle, "HOST_FILES", ("adapters.py", "block_manager.py", "prefix_cache.py", "prefix_tree.py")
    )

    def unload(trace: Interrupt) -> None:
        tokens(llm, adapter="one", count=1)
        sys.settrace(trace)
        try:
            llm.unload_adapter("one")
        finally:
            sys.settrace(None)

    load(llm, "one", blue)
    load(llm, "two", blue)
    whole, found = Interrupt(), set()
    unload(whole)
    for line in range(first, whole.count - 2, 3):
        load(llm, "one", blue)
        with pytest.raises(KeyboardInterrupt):
            unload(CtrlC(line))
        is_gone = "one" not in llm.adapters
        name = "three" if is_gone else "one"
        load(llm, name, red)  # in the slot of the one that was unloaded
        for adapter, tuned in ((name, red), ("two", blue)):
            assert tokens(llm, adapter=adapter, count=3) == expected(tuned, count=3), f"interrupted at line {line}"
        llm.unload_adapter(name)
        found.add(is_gone)
    assert found == {False, True}


class TestUnloading:
    def test_fifty_times_without_growth(self, llm: LLM, red: Tuned) -> None:
        tree, sizes = llm.engine.scheduler.block_manager.tree, []
        tokens(llm, count=1)
        for number in range(27):
            for version in (1, 2):
                assert load(llm, f"name {number}", red) == version
                tokens(llm, adapter=f"name {number}", count=1)
            llm.unload_adapter(f"name {number}")
            if number in (1, 26):
                gc.collect()
                sizes.append(len(gc.get_objects()))
        assert abs(sizes[1] - sizes[0]) < 50
        assert (len(tree), len(tree.roots)) == (2, 1)  # the model's own

    def test_a_running_request_holds_its_adapter(self, llm: LLM, red: Tuned, blue: Tuned) -> None:
        load(llm, "red", red)
        load(llm, "blue", blue)
        request_id = llm.add_request(PROMPT, greedy(12, adapter="red", ignore_eos=True))
        message = "adapter='red': 1 of its requests have not ended: call step until they have, or abort them"
        with pytest.raises(RuntimeError, match=message):
            llm.unload_adapter("red")
        llm.step()
        with pytest.raises(RuntimeError, match=message):
            llm.unload_adapter("red")
        llm.unload_adapter("blue")
        llm.abort(request_id)
        llm.unload_adapter("red")
        load(llm, "blue", blue)  # in the slot of the request that a step in flight still computes
        llm.add_request(PROMPT, greedy(12, adapter="blue", ignore_eos=True))
        assert [output.token_ids for output in finish(llm)][1:] == [expected(blue)]


class TestSleep:
    @pytest.mark.parametrize("level", [1, 2])
    def test_level_1_keeps_them_and_level_2_drops_them(self, level: int, llm: LLM, base: Oracle, red: Tuned) -> None:
        load(llm, "red", red)
        wanted = tokens(llm, adapter="red")
        llm.sleep(level)
        with pytest.raises(RuntimeError, match=r"sleeps.*call wake_up"):
            load(llm, "red", red)
        llm.wake_up(["weights"])
        if level == 2:
            assert llm.adapters == {}
            llm.load_weights(BUNDLED_MODEL)
            load(llm, "red", red)
        llm.wake_up()
        assert tokens(llm) == expected(base)
        assert tokens(llm, adapter="red") == wanted == expected(red)


class TestBadInput:
    """What is wrong is named before anything is written."""

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda key, one: (key.replace("q_proj", "z_proj"), one), "z_proj is no matrix that may"),
            (lambda key, one: (key, torch.cat([one] * 5, dim=int("_B" in key))), "rank 20, but max_adapter_rank=16"),
            (lambda key, one: (key, one[:, :-1] if "_A" in key else one), "another model's"),
            (lambda key, one: (key, one * float("nan")), "numbers that are NaN or infinite"),
        ],
        ids=["module", "rank", "shape", "number"],
    )
    def test_tensors(self, change: Callable[..., Any], message: str, llm: LLM, red: Tuned) -> None:
        load(llm, "red", red)
        wrong = dict(change(key, one) for key, one in red.tensors.items())
        for name in ("red", "new"):
            with pytest.raises(ValueError, match=rf"adapter='{name}': .*{message}"):
                llm.load_adapter(name, wrong, alpha=1)
        assert {name: one.version for name, one in llm.adapters.items()} == {"red": 1}
        assert tokens(llm, adapter="red") == expected(red)

    def test_arguments(self, llm: LLM, red: Tuned) -> None:
        for name in ("", None, 3):
            with pytest.raises(ValueError, match=f"name={name!r}: must be a string"):
                load(llm, name, red)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=f"name={name!r}: must be a string"):
                llm.unload_adapter(name)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="in_flight='drop': must be one of 'recompute', 'keep', 'abort'"):
            load(llm, "red", red, in_flight="drop")
        with pytest.raises(ValueError, match="adapter='red': tensors need either config"):
            llm.load_adapter("red", red.tensors)
        with pytest.raises(ValueError, match="no such folder"):
            llm.load_adapter("red", "/no/folder")
        with pytest.raises(ValueError, match="adapter='red': source=7"):
            llm.load_adapter("red", 7, alpha=1)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("foreign", "ours"),
        [("lora_name", "name"), ("model_id", "source"), ("lora_path", "source"), ("lora_alpha", "alpha")],
    )
    def test_arguments_of_other_libraries(self, foreign: str, ours: str) -> None:
        with pytest.raises(ValueError, match=f"^unknown argument '{foreign}': did you mean '{ours}'"):
            LLM.load_adapter(Mock(), **{foreign: "mine"})

    def test_more_than_max_adapters(self, llm: LLM, red: Tuned) -> None:
        load(llm, "red", red)
        load(llm, "blue", red)
        with pytest.raises(ValueError, match=r"adapter='green': max_adapters=2, and so many are loaded: 'red', 'blue'"):
            load(llm, "green", red)

    def test_a_name_that_is_not_loaded(self, llm: LLM, red: Tuned) -> None:
        load(llm, "sql-large", red)
        calls: list[Callable[[SamplingParams], object]] = [
            lambda params: llm.generate([PROMPT], params),
            lambda params: llm.stream([PROMPT], params),
            lambda params: llm.add_request(PROMPT, params),
            lambda params: llm.score(PROMPT, [5], adapter=params.adapter),
            lambda params: llm.beam_search([PROMPT], BeamSearchParams(2, 2, adapter=params.adapter)),
            lambda params: llm.unload_adapter(str(params.adapter)),
        ]
        running = llm.add_request(PROMPT, greedy(3, adapter="sql-large"))
        for call in calls:
            with pytest.raises(ValueError, match="adapter='sql-larg': is not loaded; loaded are 'sql-large'"):
                call(greedy(3, adapter="sql-larg"))
        assert [output.request_id for output in finish(llm)] == [running]  # nobody has dropped it
        load(llm, "poems", red)
        for name, named in (("poem", "'poems'"), ("mathematics", "'poems', 'sql-large'")):
            with pytest.raises(ValueError, match=f"adapter='{name}': is not loaded; loaded are {named}$"):
                llm.unload_adapter(name)

    def test_one_that_is_unloaded_between_prepare_and_add_request(self, llm: LLM, red: Tuned) -> None:
        load(llm, "red", red)
        coming = llm.prepare(PROMPT, greedy(3, adapter="red"))
        llm.unload_adapter("red")
        with pytest.raises(ValueError, match="adapter='red': is not loaded; none is"):
            llm.add_request(coming)

    @pytest.mark.parametrize("replicas", [1, *whole_only([2])])
    def test_one_that_is_unloaded_between_stream_and_its_first_output(
        self, replicas: int, make_llm: Callable[..., LLM], red: Tuned, blue: Tuned
    ) -> None:
        llm = make_llm(**OPTIONS, data_parallel_size=replicas)
        load(llm, "red", red)
        stream = llm.stream([PROMPT], greedy(3, adapter="red"))
        llm.unload_adapter("red")
        load(llm, "blue", blue)  # in the same slot
        with pytest.raises(ValueError, match="adapter='red': is not loaded; loaded are 'blue'"):
            next(stream)
        assert tokens(llm, adapter="blue") == expected(blue)

    def test_one_that_another_thread_unloads_meanwhile(
        self, llm: LLM, red: Tuned, blue: Tuned, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load(llm, "blue", blue)
        running = llm.add_request(PROMPT, greedy(3, adapter="blue"))
        turn = llm._turn

        def late_turn(alone: bool = False) -> Any:
            llm.engine.adapters.unload("red")
            return turn()

        calls: list[Callable[[SamplingParams], object]] = [
            lambda params: llm.add_request(PROMPT, params),
            lambda params: llm.generate([PROMPT], params),
            lambda params: llm.beam_search([PROMPT], BeamSearchParams(2, 2, adapter=params.adapter)),
            lambda params: llm.unload_adapter(str(params.adapter)),
        ]
        for number, call in enumerate(calls):
            load(llm, "red", red)
            with monkeypatch.context() as patch:
                patch.setattr(llm, "_turn", late_turn)
                with pytest.raises(ValueError, match="adapter='red': is not loaded"):
                    call(greedy(3, adapter="red"))
            if number == 0:  # the others let nobody run beside them
                assert [output.request_id for output in finish(llm)] == [running]

    def test_an_llm_without_slots(self, make_llm: Callable[..., LLM], red: Tuned) -> None:
        llm = make_llm(**{**OPTIONS, "max_adapters": 0})
        told = "max_adapters=0: this LLM has no room for adapters; make it with"
        with pytest.raises(RuntimeError, match=f"^{told}"):
            load(llm, "red", red)
        named = greedy(3, adapter="red")
        for call in (
            lambda: llm.unload_adapter("red"),
            lambda: llm.generate([PROMPT], named),
            lambda: llm.chat([{"role": "user", "content": "Who?"}], named),
            lambda: llm.stream([PROMPT], named),
            lambda: llm.add_request(PROMPT, named),
            lambda: llm.score([5], [6], adapter="red"),
            lambda: llm.beam_search([PROMPT], BeamSearchParams(2, 2, adapter="red")),
            lambda: llm.embed([PROMPT], adapter="red"),
            lambda: llm.add_request(llm.prepare_to_embed(PROMPT, adapter="red")),
        ):
            with pytest.raises(ValueError, match=f"^adapter='red': {told}"):
                call()
        assert llm.adapters == {}

    def test_more_slots_than_the_host_has_memory_for(
        self, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("nanoinfer.runner.adapters.adapters.free_bytes", lambda: 30 << 30)
        message = (
            r"max_adapters=1024, max_adapter_rank=512: their slots take \d\d\.\d\d GiB, and the host has 30.00 GiB"
        )
        with pytest.raises(ValueError, match=message):
            make_llm(**{**OPTIONS, "max_adapters": 1024, "max_adapter_rank": 512}, dtype="float32")

    def test_a_stream_is_open(self, llm: LLM, red: Tuned) -> None:
        load(llm, "red", red)
        stream = llm.stream([PROMPT], greedy(5, adapter="red"))
        next(stream)
        for call in (lambda: load(llm, "red", red), lambda: llm.unload_adapter("red")):
            with pytest.raises(RuntimeError, match="a stream is open"):
                call()
        stream.close()


class Fuzz:
    """Requests that come, and adapters that are loaded, replaced and unloaded at random, all at once.

    It knows for each token which version of which adapter drew it.
    """

    def __init__(self, llm: LLM, base: Oracle, versions: list[Tuned], seed: int) -> None:
        self.llm, self.base, self.versions = llm, base, versions
        self.random = random.Random(seed)
        self.loaded: dict[str, Tuned] = {}
        self.asked: dict[int, tuple[str | None, list[tuple[int, Oracle]]]] = {}  # who draws from which token on
        self.outputs: list[RequestOutput] = []
        self.num_changes = 0

    def run(self, count: int) -> None:
        """Do `count` things, and check all that has been drawn."""
        for _ in range(count):
            self.random.choice([self.ask, self.ask, self.step, self.step, self.step, self.load, self.unload])()
        self.outputs += finish(self.llm)
        assert len(self.outputs) == len(self.asked)
        for output in self.outputs:
            _, drawers = self.asked[output.request_id]
            ends = [start for start, _ in drawers[1:]] + [len(output.token_ids)]
            prompt = output.prompt_token_ids
            for (start, oracle), end in zip(drawers, ends, strict=True):
                whole = Tuned.agrees(oracle, prompt + output.token_ids, len(prompt) + start, len(prompt) + end)
                assert whole, f"tokens {start} to {end} of {drawers}"

    def ask(self) -> None:
        name = self.random.choice([None, *self.loaded])
        prompt = PROMPT[: self.random.randint(1, 40)]
        request_id = self.llm.add_request(prompt, greedy(self.random.randint(1, 20), adapter=name, ignore_eos=True))
        self.asked[request_id] = name, [(0, self.base if name is None else self.loaded[name])]

    def step(self) -> None:
        for _ in range(self.random.randint(1, 8)):
            self.outputs += self.llm.step()

    def load(self) -> None:
        name, version = self.random.choice("abc"), self.random.choice(self.versions)
        if name not in self.loaded and len(self.loaded) == 2:
            with pytest.raises(ValueError, match="max_adapters=2"):
                load(self.llm, name, version)
            return
        load(self.llm, name, version, in_flight=self.random.choice(["recompute", "recompute", "abort"]))
        self.num_changes += name in self.loaded
        self.loaded[name] = version
        for request in self.llm._requests.of_adapter(name):
            (sample,) = self.llm._requests._tasks._by_request[request.id]
            self.asked[request.id][1].append((len(sample.seq.output_token_ids), version))

    def unload(self) -> None:
        if not self.loaded:
            return
        name = self.random.choice(list(self.loaded))
        if self.llm._requests.of_adapter(name):
            with pytest.raises(RuntimeError, match="of its requests have not ended"):
                self.llm.unload_adapter(name)
        else:
            self.llm.unload_adapter(name)
            del self.loaded[name]


@pytest.mark.parametrize("seed", [0, *whole_only(range(1, 8))])
def test_random_loads_and_versions_in_flight(
    seed: int, make_llm: Callable[..., LLM], base: Oracle, red: Tuned, blue: Tuned
) -> None:
    llm = make_llm(**{**OPTIONS, "num_kvcache_blocks": 30, "max_model_len": 128}, max_num_batched_tokens=48)
    fuzz = Fuzz(llm, base, [red, blue, Tuned(BUNDLED_MODEL, seed=3, only="mlp")], seed)
    fuzz.run(70)
    assert fuzz.num_changes > 0


def show(llm: LLM, red: Tuned, blue: Tuned) -> list[list[list[int]]]:
    """Load, mix, replace and unload adapters; returns the tokens of each call."""
    load(llm, "red", red)
    load(llm, "blue", blue)
    found = []
    for _ in range(2):
        params = [greedy(8, adapter=name, ignore_eos=True) for name in (None, "red", "blue")]
        found.append([output.token_ids for output in llm.generate([PROMPT] * 3, params, use_tqdm=False)])
        load(llm, "blue", red)
    asked = [("red", 1500), ("blue", 8), (None, 8)]
    ids = [llm.add_request(PROMPT, greedy(count, adapter=name, ignore_eos=True)) for name, count in asked]
    outputs = llm.step()
    assert load(llm, "red", blue, in_flight="abort") == 2
    by_id = {output.request_id: output for output in outputs + finish(llm)}
    assert [by_id[one].finish_reason for one in ids] == ["abort", "length", "length"]
    found.append([by_id[one].token_ids for one in ids[1:]])
    llm.unload_adapter("blue")
    with pytest.raises(ValueError, match="adapter='blue': is not loaded; loaded are 'red'"):
        tokens(llm, adapter="blue")
    with pytest.raises(ValueError, match=r"adapter='red': .* another model's"):
        llm.load_adapter("red", {name: one[:, :-1] for name, one in red.tensors.items()}, alpha=1)
    assert {name: one.version for name, one in llm.adapters.items()} == {"red": 2}
    found.append([tokens(llm, adapter="red", count=8)])
    return found


def shown(base: Oracle, red: Tuned, blue: Tuned) -> list[list[list[int]]]:
    """What `show` returns."""
    calls = [(base, red, blue), (base, red, red), (red, base), (blue,)]
    return [[expected(oracle, count=8) for oracle in call] for call in calls]


@pytest.mark.gpu
def test_on_a_gpu(make_llm: Callable[..., LLM], base: Oracle, red: Tuned, blue: Tuned) -> None:
    llm = make_llm(**{**OPTIONS, "device": "cuda"})
    assert show(llm, red, blue) == shown(base, red, blue)
    for device in ("cuda", "cpu"):
        moved = {name: tensor.to(device) for name, tensor in red.tensors.items()}
        llm.load_adapter("red", moved, alpha=ALPHA)
        llm.sleep()
        llm.wake_up()
        assert tokens(llm, adapter="red", count=8) == expected(red, count=8)
    llm.sleep(level=2)
    llm.wake_up()
    llm.load_weights(BUNDLED_MODEL)
    load(llm, "blue", blue)
    assert tokens(llm, adapter="blue", count=8) == expected(blue, count=8)


def test_two_ranks(make_llm: Callable[..., LLM], base: Oracle, red: Tuned, blue: Tuned) -> None:
    llm = make_llm(**OPTIONS, tensor_parallel_size=2)
    assert show(llm, red, blue) == shown(base, red, blue)


@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=pytest.mark.multi_gpu), pytest.param(1, marks=pytest.mark.gpu)]
)
def test_bits_on_gpus(ranks: int, make_llm: Callable[..., LLM], red: Tuned, blue: Tuned) -> None:
    """Of sequences so short that the trials of the start, one after another, would go past their ends."""
    how = {**OPTIONS, "device": "cuda", "deterministic": True, "max_model_len": 512, "max_num_seqs": 16}
    alone = show(make_llm(**how), red, blue)
    assert show(make_llm(**how, tensor_parallel_size=ranks, speculation="suffix"), red, blue) == alone


def show_with_peers() -> list[list[list[int]]]:
    red, blue = Tuned(BUNDLED_MODEL, seed=1), Tuned(BUNDLED_MODEL, seed=2, rank=16, only="self_attn")
    with make_with_peers(max_adapters=2) as llm:
        return show(llm, red, blue)


def load_otherwise() -> str:
    """Let the ranks give their adapters other names; returns the error."""
    red = Tuned(BUNDLED_MODEL, seed=1)
    with make_with_peers(max_adapters=1) as llm:
        kind, message, _ = told(lambda: load(llm, f"of {rank()}", red))
        return f"{kind}: {message}"


def load_with_other_alphas() -> str:
    """Let the ranks scale an adapter differently; returns the error."""
    red = Tuned(BUNDLED_MODEL, seed=1)
    with make_with_peers(max_adapters=1) as llm:
        kind, message, _ = told(lambda: llm.load_adapter("red", red.tensors, alpha=4 + 4 * rank()))
        return f"{kind}: {message}"


@pytest.mark.whole
def test_ranks_in_a_trainers_processes(base: Oracle, red: Tuned, blue: Tuned, tmp_path: Path) -> None:
    trainer = Trainer("cpu", tmp_path)
    assert trainer.run(show_with_peers) == shown(base, red, blue)
    differ = "rank 0 has load_adapter: 'of 0', 'recompute'; rank 1 has load_adapter: 'of 1', 'recompute'"
    assert trainer.run(load_otherwise).endswith(differ)
    assert "not called alike: rank 0 has adapter: [1.0], LoadedAdapter(" in trainer.run(load_with_other_alphas)
    trainer.end()


class TestReplicas:
    def test_each_gets_each(self, make_llm: Callable[..., LLM], base: Oracle, red: Tuned, blue: Tuned) -> None:
        llm = make_llm(**OPTIONS, data_parallel_size=2, max_num_seqs=8)
        assert show(llm, red, blue) == shown(base, red, blue)
        prompts = [[30 + i] for i in range(10)]
        params = [greedy(6, adapter=("red", None)[i % 2], ignore_eos=True) for i in range(10)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            assert output.token_ids == expected((blue, base)[i % 2], prompt, 6)

    def test_what_is_wrong_with_tensors_is_named_as_by_one_engine(
        self, make_llm: Callable[..., LLM], base: Oracle, red: Tuned, blue: Tuned, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = make_llm(**OPTIONS, data_parallel_size=2)
        load(llm, "red", red)
        (name, a), *others = red.tensors.items()
        with pytest.raises(ValueError, match=rf"adapter='red': {name} of shape \[0, 192\] .* another model's"):
            llm.load_adapter("red", dict([(name, a[:0]), *others]), alpha=ALPHA)
        llm.load_adapter("red", dict([(name, torch._neg_view(-a)), *others]), alpha=ALPHA)
        assert tokens(llm, adapter="red") == expected(red)

        ask = llm.engine.ask

        def interrupted(method: str, args: dict[int, Any]) -> None:
            ask(method, args)
            if method == "read_adapter":
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, "ask", interrupted)
            with pytest.raises(KeyboardInterrupt):  # when they wait for tensors
                load(llm, "red", blue)
        assert (tokens(llm, adapter="red"), tokens(llm)) == (expected(red), expected(base))

    def test_ctrl_c_keeps_none_of_those_that_have_waited_from_joining(self) -> None:
        replicas = Replicas.__new__(Replicas)
        replicas._processes = {index: Mock(is_ready=False) for index in range(2)}
        replicas._events, replicas.adapters = [], Mock(restore_on=lambda index: signal.raise_signal(signal.SIGINT))
        replicas.steerings = Mock()
        context = replicas.without_newcomers()
        context.__enter__()
        replicas._newcomers = [0, 1]
        with pytest.raises(KeyboardInterrupt):
            context.__exit__(None, None, None)
        assert replicas.ready == [0, 1]

    @pytest.mark.whole
    def test_one_that_starts_again_gets_them_again(self, make_llm: Callable[..., LLM], red: Tuned, blue: Tuned) -> None:
        llm = make_llm(**OPTIONS, data_parallel_size=2, restart_replicas=True)
        load(llm, "one", blue)
        for dying, tuned in ((0, red), (1, blue)):
            os.kill(llm.engine.pids[dying], signal.SIGKILL)
            load(llm, "one", tuned)  # the other has it before the new one is there
            assert tokens(llm, adapter="one") == expected(tuned)
            assert wait_until(lambda: tokens(llm) and len(llm.engine.ready) == 2, 60)
        os.kill(llm.engine.pids[0], signal.SIGKILL)
        assert tokens(llm, adapter="one") == expected(blue)
        assert llm.adapters["one"].version == 3

    @pytest.mark.whole
    def test_sleep(self, make_llm: Callable[..., LLM], red: Tuned) -> None:
        llm = make_llm(**OPTIONS, data_parallel_size=2)
        load(llm, "red", red)
        llm.sleep()
        llm.wake_up()
        assert tokens(llm, adapter="red") == expected(red)
        llm.sleep(level=2)
        llm.wake_up()
        llm.load_weights(BUNDLED_MODEL)
        assert llm.adapters == {}
        load(llm, "red", red)
        assert tokens(llm, adapter="red") == expected(red)


class TestOtherPlacesOfPrefixes:
    """Host memory and snapshots of states keep each adapter's for itself, and nothing of an old version."""

    @pytest.fixture
    def state_model(self, tmp_path: Path) -> str:
        build(CASES["qwen3.5"], tmp_path)
        return str(tmp_path)

    def test_host_memory(self, make_llm: Callable[..., LLM], base: Oracle, red: Tuned, blue: Tuned) -> None:
        llm = make_llm(**{**OPTIONS, "num_kvcache_blocks": 12, "max_model_len": 96}, kv_offload_gib=0.01)
        load(llm, "one", red)
        oracles: list[tuple[str | None, Oracle]] = [("one", red), (None, base)]

        def check(oracles: list[tuple[str | None, Oracle]], least: int) -> None:
            for name, oracle in oracles:
                (output,) = llm.generate([PROMPT], greedy(12, adapter=name, ignore_eos=True), use_tqdm=False)
                assert output.token_ids == expected(oracle)
                assert output.num_cached_tokens >= least

        check(oracles, least=0)
        for first in range(60, 76):
            tokens(llm, [first] * 60, count=2)
        check(oracles, least=32)  # their blocks have been handed out meanwhile
        load(llm, "one", blue)
        check([("one", blue)], least=0)

    @pytest.mark.whole
    def test_states(self, state_model: str, make_llm: Callable[..., LLM]) -> None:
        options = {**OPTIONS, **CASES["qwen3.5"].small, "max_adapters": 2}
        fresh, llm = make_llm(state_model, **options), make_llm(state_model, **options)
        versions = [Tuned(state_model, seed) for seed in range(3)]
        for number, name in [(0, "one"), (1, "two"), (2, "one"), (1, "one")]:
            load(llm, name, versions[number])
            load(fresh, name, versions[number])
            for adapter in (None, *llm.adapters):
                fresh.reset_prefix_cache()
                wanted = tokens(fresh, adapter=adapter)
                assert tokens(llm, adapter=adapter) == tokens(llm, adapter=adapter) == wanted
