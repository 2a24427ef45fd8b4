"""Engines come and go: closed, deleted, interrupted, several at once; nothing is left behind."""

from __future__ import annotations

import gc
import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Oracle, greedy

from nanoinfer import BUNDLED_MODEL, LLM
from nanoinfer.llm import Rates


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_close_is_safe_to_call_twice_and_with_closes() -> None:
    with LLM(BUNDLED_MODEL, num_kvcache_blocks=16) as llm:
        llm.generate([[30]], greedy(2), use_tqdm=False)
    assert llm.engine.is_closed
    llm.close()


def test_deletion_frees_the_cache_and_the_weights() -> None:
    llm = LLM(BUNDLED_MODEL, num_kvcache_blocks=16)
    llm.generate([[30]], greedy(2), use_tqdm=False)
    held = [weakref.ref(llm.engine.runner.kv_cache), weakref.ref(llm.engine.runner.model)]
    del llm
    gc.collect()
    assert [ref() for ref in held] == [None, None]


def test_a_forked_child_leaves_its_parents_engine_alone(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(device="cpu")
    pid = os.fork()
    if pid == 0:
        llm.close()
        os._exit(0 if hasattr(llm.engine.runner, "model") else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_two_engines_at_once_do_not_mix(make_llm: Callable[..., LLM], oracle: Oracle) -> None:
    first, second = make_llm(), make_llm(max_num_seqs=2)
    expected = [oracle.greedy([30], 12)]
    seqs = [seq for llm in (first, second) for seq in llm.engine.add_request([30], greedy(12))]
    while not (first.engine.is_finished and second.engine.is_finished):
        first.engine.step()
        second.engine.step()
    assert [seq.output_token_ids for seq in seqs] == expected * 2


def test_ten_engines_one_after_another_do_not_grow() -> None:
    def serve() -> None:
        with LLM(BUNDLED_MODEL, device="cpu") as llm:
            llm.generate([[30] * 100] * 8, greedy(4), use_tqdm=False)

    for _ in range(3):
        serve()
    before = resident_bytes()
    for _ in range(10):
        serve()
    assert resident_bytes() - before < 16 << 20  # one engine holds more than that


def test_an_interrupted_generate_leaves_the_engine_usable(
    make_llm: Callable[..., LLM], oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(kvcache_block_size=16)
    step, calls = llm.engine.step, 0

    def interrupted() -> object:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[40 + i] * 20 for i in range(5)], greedy(20), use_tqdm=False)
    manager = llm.engine.scheduler.block_manager
    assert manager.num_free == len(manager.blocks)
    prompts = [[30], [30, 31, 32]]
    outputs = llm.generate(prompts, greedy(12), use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == [oracle.greedy(prompt, 12) for prompt in prompts]


def test_each_steps_time_counts_for_its_own_kind(make_llm: Callable[..., LLM]) -> None:
    """A long prompt is prefilled many times faster, in tokens per second, than its few tokens are decoded."""
    llm, rates = make_llm(), Rates()
    llm.engine.add_request([30] * 1500, greedy(30, ignore_eos=True))
    while not llm.engine.is_finished:
        rates.update(llm.engine.step())
    prefill, decode = re.fullmatch(r"prefill ([\d,]+) tok/s, decode ([\d,]+) tok/s", str(rates)).groups()
    prefill_seconds, decode_seconds = 1500 / int(prefill.replace(",", "")), 29 / int(decode.replace(",", ""))
    assert decode_seconds > prefill_seconds / 10
    assert prefill_seconds > decode_seconds / 100


def test_the_progress_bar_counts_requests_and_rates(
    make_llm: Callable[..., LLM], capsys: pytest.CaptureFixture
) -> None:
    llm = make_llm()
    llm.generate([[30], [31]], greedy(3), use_tqdm=True)
    bar = capsys.readouterr().err
    assert "2/2" in bar
    assert "prefill" in bar
    assert "decode" in bar
    llm.generate([[30], [31]], greedy(3), use_tqdm=False)
    assert capsys.readouterr().err == ""
