"""vLLM's LoRARequest: the LLM loads an adapter when a request first asks for it, and makes room for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cases.tuned import ALPHA, Tuned
from conftest import greedy
from torch import Tensor

from nanoinfer import BUNDLED_MODEL, LLM, BeamSearchParams, LoRARequest, RequestOutput, SamplingParams
from nanoinfer.integrations.vllm.lora import LoRARequests

OPTIONS = {"dtype": "float32", "device": "cpu", "kvcache_block_size": 16, "max_model_len": 64}
PROMPT = "ROMEO:\n"
NAMES = ("law", "sql", "verse")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Adapters by their names."""
    root = tmp_path_factory.mktemp("adapters")
    return {name: Tuned(BUNDLED_MODEL, seed).save(root / name) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return Tuned(BUNDLED_MODEL, seed=9).tensors


@pytest.fixture
def lora(folders: dict[str, str]) -> dict[str, LoRARequest]:
    return {name: LoRARequest(name, number, folders[name]) for number, name in enumerate(NAMES, 1)}


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, max_adapters=2, max_adapter_rank=4, num_kvcache_blocks=64, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> LLM:
    """An LLM of two slots, which are empty."""
    for name in shared.adapters:
        shared.unload_adapter(name)
    shared._loras = LoRARequests()
    return shared


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoRARequest]:
    """Those of a folder that is not there, and of a rank that is too high for the slots."""
    high = Tuned(BUNDLED_MODEL, seed=5, rank=9).save(tmp_path_factory.mktemp("wrong") / "high")
    return {"nowhere": LoRARequest("nowhere", 8, "/nowhere"), "high": LoRARequest("high", 9, high)}


def of(adapter: str | None) -> SamplingParams:
    return greedy(1, adapter=adapter)


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.text for output in outputs]


class TestTheRequest:
    def test_vllms_arguments(self) -> None:
        known = LoRARequest(lora_name="a", lora_int_id=1, lora_path="here", load_inplace=True)
        assert known == LoRARequest("a", 1, "here", True)
        others = {"base_model_name": "Llama", "tensorizer_config_dict": None, "is_3d_lora_weight": False}
        assert LoRARequest("a", 1, Path("here"), **others) == LoRARequest("a", 1, lora_local_path="here")
        assert (known.lora_name, known.lora_int_id, known.lora_path) == ("a", 1, "here")

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"lora_name": ""}, "lora_name='': must be a name"),
            ({"lora_int_id": 0}, "lora_int_id=0: must be an integer of at least 1"),
            ({"lora_path": None}, "lora_path=None: must be a folder or a Hub id"),
            ({"load_inplace": "yes"}, "load_inplace='yes': must be True or False"),
            ({"tensorizer_config_dict": {"a": 1}}, "tensorizer_config_dict={'a': 1}: must be None or empty: docs"),
            ({"lora_weights": {}}, "unknown argument 'lora_weights'"),
        ],
        ids=str,
    )
    def test_what_it_cannot_be(self, wrong: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            LoRARequest(**{"lora_name": "a", "lora_int_id": 1, "lora_path": "here", **wrong})


class TestLoading:
    def test_each_prompt_gets_its_own(self, llm: LLM, lora: dict[str, LoRARequest]) -> None:
        asked = [lora["law"], None, lora["sql"]]
        found = texts(llm.generate([PROMPT] * 3, greedy(8), use_tqdm=False, lora_request=asked))
        expected = [greedy(8, adapter=name) for name in ("law", None, "sql")]
        assert found == texts(llm.generate([PROMPT] * 3, expected, use_tqdm=False))
        assert len(set(found)) == 3
        assert texts(llm.generate([PROMPT] * 2, greedy(8), use_tqdm=False, lora_request=lora["sql"])) == found[2:] * 2

    def test_chats_and_beams_name_them_too(self, llm: LLM, lora: dict[str, LoRARequest]) -> None:
        chat = [{"role": "user", "content": "Who goes there?"}]
        by_name = llm.chat(chat, greedy(8), use_tqdm=False, lora_request=lora["law"])
        assert texts(by_name) == texts(llm.chat(chat, greedy(8, adapter="law"), use_tqdm=False))
        beams = BeamSearchParams(2, 6)
        found = llm.beam_search([PROMPT], beams, lora_request=lora["law"])
        beams.adapter = "law"
        assert found[0].sequences == llm.beam_search([PROMPT], beams)[0].sequences
        beams.adapter = None
        assert found[0].sequences != llm.beam_search([PROMPT], beams)[0].sequences

    def test_a_folder_is_read_once(self, llm: LLM, lora: dict[str, LoRARequest], folders: dict[str, str]) -> None:
        def ask(request: LoRARequest) -> int:
            llm.generate([PROMPT], greedy(1), use_tqdm=False, lora_request=request)
            return llm.adapters["law"].version

        assert [ask(lora["law"]), ask(lora["law"])] == [1, 1]
        anew = LoRARequest("law", 1, folders["law"], load_inplace=True)
        assert anew == lora["law"]
        assert [ask(anew), ask(lora["law"]), ask(lora["law"]), ask(anew)] == [2, 2, 2, 3]
        assert ask(LoRARequest("law", 7, folders["sql"])) == 4
        llm.unload_adapter("law")
        assert ask(lora["law"]) == 1


class TestRoom:
    def ask(self, llm: LLM, *requests: LoRARequest) -> list[str]:
        llm.generate([PROMPT] * len(requests), greedy(1), use_tqdm=False, lora_request=list(requests))
        return sorted(llm.adapters)

    def test_the_least_recently_used_one_goes(self, llm: LLM, lora: dict[str, LoRARequest]) -> None:
        self.ask(llm, lora["law"], lora["sql"])
        self.ask(llm, lora["law"])
        assert self.ask(llm, lora["verse"]) == ["law", "verse"]
        assert self.ask(llm, lora["verse"], lora["sql"]) == ["sql", "verse"]

    def test_what_load_adapter_has_loaded_stays(
        self, llm: LLM, lora: dict[str, LoRARequest], tensors: dict[str, Tensor]
    ) -> None:
        llm.load_adapter("mine", tensors, alpha=ALPHA)
        self.ask(llm, lora["law"])
        assert self.ask(llm, lora["sql"]) == ["mine", "sql"]
        llm.unload_adapter("sql")
        llm.load_adapter("sql", tensors, alpha=ALPHA)
        with pytest.raises(ValueError, match=r"'law': max_adapters=2, and these must stay: 'mine', 'sql'; llm.unl"):
            self.ask(llm, lora["law"])
        with pytest.raises(ValueError, match=r"an adapter of this name; write SamplingParams\(adapter='sql'"):
            self.ask(llm, lora["sql"])

    def test_one_that_a_request_uses_stays(self, llm: LLM, lora: dict[str, LoRARequest]) -> None:
        self.ask(llm, lora["law"])
        llm.add_request(PROMPT, greedy(4, adapter="law"))
        for name in ("sql", "verse"):
            assert llm.llm_engine.add_lora(lora[name])
        assert sorted(llm.adapters) == ["law", "verse"]
        while llm.has_unfinished_requests():
            llm.step()

    def test_a_pinned_one_stays(self, llm: LLM, lora: dict[str, LoRARequest]) -> None:
        engine = llm.llm_engine
        self.ask(llm, lora["law"])
        assert engine.pin_lora(1)
        assert not engine.pin_lora(2)
        self.ask(llm, lora["sql"])
        assert self.ask(llm, lora["verse"]) == ["law", "verse"]

    def test_one_call_needs_them_all(self, llm: LLM, lora: dict[str, LoRARequest]) -> None:
        with pytest.raises(ValueError, match=r"lora_request has 3 adapters, and max_adapters=2: .*max_adapters=3$"):
            self.ask(llm, *lora.values())
        assert llm.adapters == {}

    def test_vllms_engine_lists_and_removes_them(self, llm: LLM, lora: dict[str, LoRARequest]) -> None:
        engine = llm.llm_engine
        assert engine.add_lora(lora["sql"])
        assert engine.add_lora(lora["law"])
        assert engine.list_loras() == {1, 2}
        assert engine.remove_lora(2)
        assert not engine.remove_lora(2)
        assert engine.list_loras() == {1}
        assert list(llm.adapters) == ["law"]


class TestErrors:
    @pytest.mark.parametrize(
        ("ask", "message"),
        [
            (lambda llm, lora: llm.generate([PROMPT, ""], lora_request=lora["verse"]), "is empty"),
            (lambda llm, lora: llm.generate([[5] * 64], lora_request=lora["verse"]), "has 64 tokens"),
            (lambda llm, lora: llm.generate([PROMPT], [greedy(1)] * 2, lora_request=lora["verse"]), "has 2 entries"),
            (lambda llm, lora: llm.generate([PROMPT], lora_request=[lora["verse"], None]), "has 2 entries"),
            (lambda llm, lora: llm.generate([PROMPT], of("law"), lora_request=lora["verse"]), "must be one of them"),
            (lambda llm, lora: llm.generate([PROMPT] * 2, lora_request=[lora["verse"], lora["nowhere"]]), "/nowhere"),
            (lambda llm, lora: llm.generate([PROMPT] * 2, lora_request=[lora["verse"], lora["high"]]), "rank 9"),
            (
                lambda llm, lora: llm.generate(
                    [PROMPT] * 3, [of("law"), of("sql"), of(None)], lora_request=[None, None, lora["verse"]]
                ),
                "these must stay: 'law', 'sql'",
            ),
            (
                lambda llm, lora: llm.generate([PROMPT] * 2, [of("x"), of(None)], lora_request=[None, lora["verse"]]),
                "'x': is not loaded",
            ),
            (lambda llm, lora: llm.chat([{"role": "user"}], lora_request=lora["verse"]), "must be mappings"),
            (lambda llm, lora: llm.embed([PROMPT], lora_request=lora["nowhere"]), "/nowhere"),
            (lambda llm, lora: llm.embed([PROMPT] * 2, lora_request=[lora["verse"]]), "has 1 entries"),
            (lambda llm, lora: llm.beam_search([""], BeamSearchParams(2, 4), lora["verse"]), "is empty"),
            (lambda llm, lora: llm.beam_search([PROMPT], BeamSearchParams(99, 40), lora["verse"]), "may need"),
            (lambda llm, lora: llm.llm_engine.add_lora(lora["high"]), "rank 9"),
        ],
    )
    def test_no_adapter_comes_or_goes_for_a_call_that_cannot_work(
        self,
        llm: LLM,
        lora: dict[str, LoRARequest],
        wrong: dict[str, LoRARequest],
        ask: Callable[[LLM, dict[str, LoRARequest]], object],
        message: str,
    ) -> None:
        llm.generate([PROMPT] * 2, greedy(1), use_tqdm=False, lora_request=[lora["law"], lora["sql"]])
        before = llm.adapters
        with pytest.raises(ValueError, match=message):
            ask(llm, lora | wrong)
        assert llm.adapters == before
        assert llm.llm_engine.list_loras() == {1, 2}

    def test_no_adapter_comes_or_goes_for_a_busy_llm(self, llm: LLM, lora: dict[str, LoRARequest]) -> None:
        llm.generate([PROMPT] * 2, greedy(1), use_tqdm=False, lora_request=[lora["law"], lora["sql"]])
        llm.add_request(PROMPT, greedy(4))
        for call in (llm.generate, llm.embed):
            with pytest.raises(RuntimeError, match="requests of add_request have not ended"):
                call([PROMPT], lora_request=lora["verse"])
        assert sorted(llm.adapters) == ["law", "sql"]
        while llm.has_unfinished_requests():
            llm.step()

    def test_of_replicas(self, lora: dict[str, LoRARequest], wrong: dict[str, LoRARequest]) -> None:
        slots = {"max_adapters": 1, "max_adapter_rank": 4, "num_kvcache_blocks": 8, "max_num_seqs": 1}
        with LLM(BUNDLED_MODEL, data_parallel_size=2, **slots, **OPTIONS) as llm:
            asked = [PROMPT], greedy(4), False
            law = texts(llm.generate(*asked, lora_request=lora["law"]))
            with pytest.raises(ValueError, match="rank 9"):
                llm.generate(*asked, lora_request=wrong["high"])
            assert list(llm.adapters) == ["law"]
            assert texts(llm.generate([PROMPT] * 4, greedy(4), False, lora["law"])) == law * 4
            assert texts(llm.generate(*asked, lora_request=lora["verse"])) != law
            assert list(llm.adapters) == ["verse"]

    def test_of_a_call(self, llm: LLM, lora: dict[str, LoRARequest]) -> None:
        law = lora["law"]
        for wrong, message in (
            ("law", "lora_request='law': must be a LoRARequest, from nanoinfer, or a list"),
            (["law"], r"lora_request=\['law'\]: must be a LoRARequest"),
            ([law], "lora_request has 1 entries for 2 prompts: give one, or one each"),
            ([law, LoRARequest("law", 2, law.lora_path)], "must be one of this name"),
            (LoRARequest("other", 1, "/nowhere"), "/nowhere"),
        ):
            with pytest.raises(ValueError, match=message):
                llm.generate([PROMPT] * 2, greedy(1), lora_request=wrong)

    def test_it_is_that_of_the_settings(
        self, llm: LLM, lora: dict[str, LoRARequest], tensors: dict[str, Tensor]
    ) -> None:
        llm.load_adapter("mine", tensors, alpha=ALPHA)
        with pytest.raises(ValueError, match="names 'law', and SamplingParams has adapter='mine': must be one of them"):
            llm.generate([PROMPT], greedy(1, adapter="mine"), lora_request=lora["law"])
        params = greedy(1, adapter="law")
        assert len(llm.generate([PROMPT], params, use_tqdm=False, lora_request=lora["law"])) == 1

    def test_an_llm_without_slots(self, lora: dict[str, LoRARequest]) -> None:
        with LLM(BUNDLED_MODEL, num_kvcache_blocks=8, **OPTIONS) as llm:
            for call in (llm.generate, llm.embed):
                with pytest.raises(ValueError, match=r"lora_request=.*: max_adapters=0: this LLM has no room for ada"):
                    call([PROMPT], lora_request=lora["law"])
