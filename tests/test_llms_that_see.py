"""LLMs that see, and those that could: options, weights and sleep, faults, and what goes with images."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from conftest import greedy
from safetensors.torch import load_file, save_file

pytest.importorskip("PIL")

from cases import MULTIMODAL
from cases.case import build
from cases.pictures import picture
from cases.vision import SEEING
from test_spmd import Trainer, make
from transformers import AutoTokenizer

from nanoinfer import BUNDLED_MODEL, LLM, RequestOutput, SamplingParams, WorkerError, reference
from nanoinfer.config import Config
from nanoinfer.hub import TOKENIZER_FILES
from nanoinfer.media import options
from nanoinfer.media.ahead import PixelsAhead
from nanoinfer.media.files import FILES
from nanoinfer.media.pixels import Pixels
from nanoinfer.media.spans import Encoded
from nanoinfer.media.tower.tower import TransformersTower
from nanoinfer.weights.names import OfTower

ONE, TWO = picture(61, 97), picture(150, 40, 1)
TEXT = list(range(30, 60))
Weights = dict[str, torch.Tensor]
Behind = Callable[[list[Encoded]], list[Encoded]]


class Checkpoint:
    """A small checkpoint that sees."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.options = name, str(folder), MULTIMODAL[SEEING[name].case].small
        self.seeing = SEEING[name]
        self.model = self.seeing.build(folder)
        self.prompt = {"prompt": f"What is {SEEING[name].prompt}?", "multi_modal_data": {"image": [ONE]}}
        self.image_id: int = self.model.config.image_token_id

    @property
    def weights(self) -> Weights:
        """All tensors, by their names in the file."""
        return load_file(Path(self.folder) / "model.safetensors")

    def of_tower(self, changed: bool = False) -> Weights:
        """The tower's tensors, or others of their shapes."""
        found = {name: tensor for name, tensor in self.weights.items() if OfTower().known_name(name)}
        return {name: tensor.flip(0) if changed else tensor for name, tensor in found.items()}

    def generate(self, llm: LLM, *prompts: Any, **settings: Any) -> list[RequestOutput]:
        """Generate by `params`; without prompts, from the one with an image."""
        return llm.generate(list(prompts or (self.prompt,)), self.params(**settings), use_tqdm=False)

    def params(self, **settings: Any) -> SamplingParams:
        """Greedy, without the image's token."""
        how = {"max_tokens": 4, "ignore_eos": True, "logit_bias": {self.image_id: -100}, "logprobs": 0, **settings}
        return greedy(**how)

    def expected(self, changed: Weights | None = None) -> list[int]:
        """The tokens that transformers generates, with some other weights."""
        before = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(changed or {}, strict=False)
        processor = self.seeing.make_processor()
        inputs = processor(text=self.prompt["prompt"], images=[ONE], return_tensors="pt")
        how = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4, "suppress_tokens": [self.image_id]}
        tokens = self.model.generate(**inputs, **how)[0, inputs["input_ids"].shape[1] :].tolist()
        self.model.load_state_dict(before)
        return tokens


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint("qwen3-vl", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint("gemma3", tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def blind(qwen: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function that makes a folder which lacks the files of some kind."""

    def make(lacks: str) -> str:
        folder = tmp_path_factory.mktemp("blind")
        shutil.copytree(qwen.folder, folder, dirs_exist_ok=True)
        if lacks in ("processor", "tokenizer"):
            for name in FILES if lacks == "processor" else TOKENIZER_FILES:
                (folder / name).unlink(missing_ok=True)
        elif lacks == "float":
            eight = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in qwen.of_tower().items()}
            save_file({**qwen.weights, **eight}, folder / "model.safetensors")
        else:
            text = {name: tensor for name, tensor in qwen.weights.items() if not OfTower().known_name(name)}
            save_file(text, folder / "model.safetensors")
        return str(folder)

    return make


def generate_with_peers(folder: str, prompts: list[Any], params: SamplingParams) -> list[list[list[int]]]:
    """Generate as one rank of a trainer's processes, fresh and cached, with a row for one prompt.

    Of the ranks, one is slow to make pixels.
    """
    make_pixels = PixelsAhead._make

    def make_slowly(self: PixelsAhead, pixels: Pixels) -> Pixels:
        time.sleep(0.5 * dist.get_rank())
        return make_pixels(self, pixels)

    with patch.object(PixelsAhead, "_make", make_slowly), make(folder, max_model_len=256, max_num_seqs=1) as llm:
        runs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
    return [[output["token_ids"] for output in outputs] for outputs in runs]


class TestOptions:
    def test_a_checkpoint_that_can_be_seen_is(self, qwen: Checkpoint) -> None:
        for images in ("auto", True):
            config = Config(qwen.folder, images=images)
            assert (config.images, config.sees) == (True, True)
        assert not Config(BUNDLED_MODEL).sees

    def test_text_alone_is_run_as_a_text_model(self, qwen: Checkpoint, gemma: Checkpoint) -> None:
        for own in (qwen, gemma):
            seeing, blind = (Config(own.folder, images=images).description for images in (True, False))
            assert seeing.has_sections or any(seeing.whole_images)
            assert (blind.has_sections, any(blind.whole_images), blind.has_tower) == (False, False, False)

    def test_text_alone_has_the_same_tokens_and_no_tower(self, qwen: Checkpoint, make_llm: Callable[..., LLM]) -> None:
        seeing, blind = (make_llm(qwen.folder, **qwen.options, images=images) for images in (True, False))
        assert qwen.generate(seeing, TEXT)[0]["token_ids"] == qwen.generate(blind, TEXT)[0]["token_ids"]
        assert (blind.memory.images, blind.memory.used) < (seeing.memory.images, seeing.memory.used)
        assert blind.engine.ranks.runner.holdings.tower is None
        assert [", sees images, " in repr(llm) for llm in (seeing, blind)] == [True, False]
        with pytest.raises(ValueError, match=r"multi_modal_data.* LLM\(images=True\) sees"):
            qwen.generate(blind)

    @pytest.mark.parametrize(
        ("lacks", "fault"),
        [
            ("processor", "the checkpoint has no processor of images"),
            ("tokenizer", "the checkpoint has no tokenizer"),
            ("tower", "the checkpoint's files hold no tower for images"),
            ("float", "the checkpoint's tower has numbers of type F8_E4M3; those of 16 bits or more are run"),
            ("pillow", r"images need pillow: pip install 'nanoinfer\[images\]'"),
            ("order", "with deterministic=True no token sees those behind it, as tokens of an image do"),
        ],
    )
    def test_what_it_takes_to_see(
        self,
        lacks: str,
        fault: str,
        qwen: Checkpoint,
        gemma: Checkpoint,
        blind: Callable[[str], str],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        whole = {"pillow": qwen.folder, "order": gemma.folder}
        folder = whole[lacks] if lacks in whole else blind(lacks)
        if lacks == "pillow":
            monkeypatch.setattr(options, "find_spec", lambda name: None)
        how = {"deterministic": True} if lacks == "order" else {}
        with pytest.raises(ValueError, match=f"images=True: must be 'auto' or False: {fault}"):
            Config(folder, images=True, **how)
        assert not caplog.records
        assert not Config(folder, **how).sees
        (warning,) = caplog.records
        assert "its language model is run, as text only: " in warning.getMessage()
        caplog.clear()
        assert not Config(folder, images=False, **how).sees
        assert not caplog.records

    def test_a_class_whose_images_need_torchvision_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        build(MULTIMODAL["lfm2-vl"], tmp_path)
        AutoTokenizer.from_pretrained(BUNDLED_MODEL).save_pretrained(tmp_path)
        (tmp_path / FILES[0]).write_text("{}")
        monkeypatch.setattr(options, "find_spec", lambda name: None if name == "torchvision" else name)
        fault = r"images of Lfm2VlForConditionalGeneration need torchvision: pip install 'nanoinfer\[torchvision\]'"
        with pytest.raises(ValueError, match=f"images=True: must be 'auto' or False: {fault}"):
            Config(str(tmp_path), images=True)
        assert not Config(str(tmp_path)).sees

    def test_a_model_without_a_tower_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"images=True: .* Qwen3ForCausalLM sees no images here; those that"):
            Config(BUNDLED_MODEL, images=True)

    @pytest.mark.parametrize(
        ("option", "value", "message"),
        [
            ("images", "yes", "images='yes': must be 'auto', True or False"),
            ("images", 1, "images=1: must be"),
            ("limit_images_per_prompt", -1, "limit_images_per_prompt=-1: must be an integer of at least 0"),
            ("image_options", [3], r"image_options=\[3\]: must be a mapping"),
            ("image_options", {3: 3}, "image_options={3: 3}: must be a mapping"),
            ("image_folder", "/nowhere", "image_folder='/nowhere': must be a folder"),
            ("image_folder", 3, "image_folder=3: must be a folder"),
        ],
    )
    def test_values_that_cannot_be(self, option: str, value: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Config(BUNDLED_MODEL, **{option: value})

    def test_random_weights_see(
        self, blind: Callable[[str], str], qwen: Checkpoint, make_llm: Callable[..., LLM]
    ) -> None:
        llm = make_llm(blind("tower"), load_format="dummy", images=True, **qwen.options)
        (output,) = qwen.generate(llm)
        assert len(output["token_ids"]) == 4


@pytest.mark.multi_gpu
def test_two_gpus_see_what_one_sees(qwen: Checkpoint, make_llm: Callable[..., LLM]) -> None:
    """Each encodes some of the images, and gets the embeddings of all."""
    seen = [[ONE], [TWO], [TWO, ONE], [picture(80, 80, 2), picture(33, 90, 3), ONE]]
    text = f"What is {qwen.seeing.prompt}?"
    prompts = [{"prompt": text * len(images), "multi_modal_data": {"image": images}} for images in seen]
    how: dict[str, Any] = {"device": "cuda", "dtype": "float32", **qwen.options}
    one, two = (qwen.generate(make_llm(qwen.folder, tensor_parallel_size=n, **how), *prompts) for n in (1, 2))
    assert [output.outputs[0].token_ids for output in one] == [output.outputs[0].token_ids for output in two]
    assert one[0].outputs[0].token_ids == qwen.expected()


@pytest.fixture
def llm(qwen: Checkpoint, make_llm: Callable[..., LLM]) -> LLM:
    return make_llm(qwen.folder, **qwen.options)


class TestWeights:
    """Names are the checkpoint's, as for the language model."""

    @pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.whole)])
    def test_a_new_tower(self, ranks: int, qwen: Checkpoint, make_llm: Callable[..., LLM]) -> None:
        """Neither cached keys nor kept embeddings are those of the old tower."""
        llm = make_llm(qwen.folder, device="cpu", tensor_parallel_size=ranks, **qwen.options)
        assert qwen.generate(llm)[0]["token_ids"] == qwen.expected()
        changed = qwen.of_tower(changed=True)
        assert llm.update_weights(changed, partial=True) == 1
        assert qwen.generate(llm)[0]["token_ids"] == qwen.expected(changed)
        assert llm.update_weights(qwen.weights) == 2
        assert qwen.generate(llm)[0]["token_ids"] == qwen.expected()

    @pytest.mark.whole
    def test_a_tower_with_lone_numbers_on_two_ranks(self, tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
        own = Checkpoint("gemma4", tmp_path)
        llm = make_llm(own.folder, device="cpu", tensor_parallel_size=2, **own.options)
        assert own.generate(llm)[0]["token_ids"] == own.expected()
        assert {tensor.ndim for tensor in own.of_tower().values()} >= {0, 2}
        assert llm.update_weights(own.weights) == 1
        assert own.generate(llm)[0]["token_ids"] == own.expected()

    def test_what_a_trainers_parameters_lack_stays(self, tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
        """Gemma 4's tower has buffers."""
        own = Checkpoint("gemma4", tmp_path)
        llm = make_llm(own.folder, device="cpu", **own.options)
        parameters = dict(own.model.named_parameters())
        assert {name.rpartition(".")[2] for name in own.of_tower().keys() - parameters.keys()} >= {"std_bias"}
        assert llm.update_weights(parameters) == 1
        assert own.generate(llm)[0]["token_ids"] == own.expected()

    @pytest.mark.parametrize(("in_flight", "is_new"), [("recompute", True), ("abort", False)])
    def test_a_new_tower_while_an_image_is_computed(
        self, in_flight: str, is_new: bool, qwen: Checkpoint, make_llm: Callable[..., LLM]
    ) -> None:
        llm = make_llm(qwen.folder, **{**qwen.options, "max_num_batched_tokens": 4})
        changed = qwen.of_tower(changed=True)
        llm.add_request(qwen.prompt, qwen.params())
        assert llm.step() == []
        llm.update_weights(changed, partial=True, in_flight=in_flight)
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
        assert [output["token_ids"] for output in outputs] == [qwen.expected(changed) if is_new else []]
        assert qwen.generate(llm)[0]["token_ids"] == qwen.expected(changed)

    def test_a_whole_update_has_the_tower(self, qwen: Checkpoint, llm: LLM) -> None:
        text = {name: tensor for name, tensor in qwen.weights.items() if not OfTower().known_name(name)}
        with pytest.raises(ValueError, match=r"missing: .*visual\.") as error:
            llm.update_weights(text)
        assert "unknown" not in str(error.value)
        assert llm.update_weights(text, partial=True) == 1

    def test_a_text_only_llm_takes_no_tower(self, qwen: Checkpoint, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(qwen.folder, images=False, **qwen.options)
        assert llm.update_weights(qwen.weights) == 1

    def test_load_weights(self, qwen: Checkpoint, llm: LLM, blind: Callable[[str], str], tmp_path: Path) -> None:
        changed = qwen.of_tower(changed=True)
        save_file({**qwen.weights, **changed}, tmp_path / "model.safetensors")
        assert llm.load_weights(str(tmp_path)) == 1
        assert qwen.generate(llm)[0]["token_ids"] == qwen.expected(changed)
        with pytest.raises(ValueError, match=r"missing: .*visual\."):
            llm.load_weights(blind("tower"))
        assert qwen.generate(llm)[0]["token_ids"] == qwen.expected(changed)

    def test_numbers_of_the_tower_are_finite(self, qwen: Checkpoint, llm: LLM) -> None:
        name, tensor = next(iter(qwen.of_tower().items()))
        with pytest.raises(ValueError, match=r"visual.* has numbers that are NaN or infinite"):
            llm.update_weights({name: torch.full_like(tensor, torch.nan)}, partial=True)
        with pytest.raises(RuntimeError, match="the weights are incomplete"):
            qwen.generate(llm)

    def test_it_sleeps_and_wakes_up(self, qwen: Checkpoint, llm: LLM) -> None:
        before = qwen.generate(llm)[0]["token_ids"]
        llm.sleep()
        llm.wake_up()
        assert qwen.generate(llm)[0]["token_ids"] == before
        llm.sleep(level=2)
        assert (llm.engine.ranks.runner.holdings.tower is None) == (llm.config.device == "cpu")  # a GPU lends its pages
        llm.wake_up()
        with pytest.raises(RuntimeError, match="the weights are incomplete"):
            qwen.generate(llm)
        llm.update_weights(qwen.weights)
        assert qwen.generate(llm)[0]["token_ids"] == before


class TestFaults:
    @pytest.fixture
    def tower(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Behind], None]:
        """Return a function that puts another function behind each tower."""
        encode = TransformersTower.encode

        def put(behind: Behind) -> None:
            monkeypatch.setattr(TransformersTower, "encode", lambda self, pixels: behind(encode(self, pixels)))

        return put

    @pytest.mark.parametrize("fault", [torch.OutOfMemoryError("no memory"), RuntimeError("no tower")])
    def test_a_tower_that_fails(
        self, fault: Exception, qwen: Checkpoint, llm: LLM, tower: Callable[[Behind], None]
    ) -> None:
        """Its step fails, all requests are dropped, and the LLM goes on."""

        def fail(encoded: list[Encoded]) -> list[Encoded]:
            raise fault

        before = qwen.generate(llm)[0]["token_ids"]
        llm.reset_prefix_cache()
        tower(fail)
        with pytest.raises(type(fault), match=str(fault)):
            qwen.generate(llm, {**qwen.prompt, "multi_modal_data": {"image": [TWO]}}, TEXT)
        assert not llm.has_unfinished_requests()
        assert qwen.generate(llm, TEXT)
        tower(lambda encoded: encoded)
        assert qwen.generate(llm)[0]["token_ids"] == before

    def test_a_tower_of_two_ranks_that_fails(
        self, qwen: Checkpoint, make_llm: Callable[..., LLM], tower: Callable[[Behind], None]
    ) -> None:
        """As any step that fails on one of several ranks."""

        def fail(encoded: list[Encoded]) -> list[Encoded]:
            raise RuntimeError("no tower")

        llm = make_llm(qwen.folder, device="cpu", tensor_parallel_size=2, **qwen.options)
        tower(fail)
        with pytest.raises(RuntimeError, match="no tower"):
            qwen.generate(llm)
        with pytest.raises(WorkerError):
            qwen.generate(llm, TEXT)

    def test_embeddings_that_are_not_finite_end_their_request_alone(
        self, qwen: Checkpoint, llm: LLM, tower: Callable[[Behind], None]
    ) -> None:
        def spoil(encoded: list[Encoded]) -> list[Encoded]:
            return [Encoded(torch.full_like(one.embeddings, torch.nan), one.deep) for one in encoded]

        before = qwen.generate(llm, TEXT)[0]["token_ids"]
        tower(spoil)
        seeing, text = qwen.generate(llm, qwen.prompt, TEXT)
        assert seeing["finish_reason"] == "error"
        assert "not finite" in seeing["stop_reason"] or "NaN" in seeing["stop_reason"]
        assert (text["finish_reason"], text["token_ids"]) == ("length", before)


class TestCompany:
    """What else a request or an LLM may ask for."""

    def test_samples_and_log_probabilities(self, qwen: Checkpoint, llm: LLM) -> None:
        (alone,) = qwen.generate(llm)
        (several,) = qwen.generate(llm, n=3, prompt_logprobs=1)
        assert [sample["token_ids"] for sample in several["samples"]] == [alone["token_ids"]] * 3
        assert len(several["prompt_logprobs"]) == len(several["prompt_token_ids"])

    def test_guided(self, qwen: Checkpoint, llm: LLM) -> None:
        (output,) = qwen.generate(llm, structured_outputs={"choice": ["yes", "no"]}, ignore_eos=False, max_tokens=8)
        assert output["text"] in ("yes", "no")

    def test_experts(self, tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
        own = Checkpoint("qwen3-vl-moe", tmp_path)
        (output,) = own.generate(make_llm(own.folder, routed_experts=True, **own.options))
        assert len(output["routed_experts"]) == len(output["prompt_token_ids"]) + len(output["token_ids"]) - 1

    def test_a_trainers_reference_sees_nothing(self, qwen: Checkpoint) -> None:
        with pytest.raises(ValueError, match="reference has no images"):
            reference(qwen.folder)

    @pytest.mark.whole
    def test_ranks_of_a_trainer(self, qwen: Checkpoint, tmp_path: Path) -> None:
        """Each plans by itself, and has the tower. They encode together, also images of prompts that wait."""
        two = f"{qwen.prompt['prompt']} {qwen.prompt['prompt']}"
        prompts = [qwen.prompt, TEXT, {"prompt": two, "multi_modal_data": {"image": [TWO, ONE]}}, qwen.prompt]
        trainer = Trainer("cpu", tmp_path)
        try:
            fresh, cached = trainer.run(generate_with_peers, qwen.folder, prompts, qwen.params())
        finally:
            trainer.end()
        assert fresh == cached
        assert fresh[0] == fresh[3] == qwen.expected()

    @pytest.mark.whole
    def test_replicas(self, qwen: Checkpoint, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(qwen.folder, device="cpu", data_parallel_size=2, **qwen.options)
        outputs = qwen.generate(llm, *[qwen.prompt] * 8)
        assert [output["token_ids"] for output in outputs] == [qwen.expected()] * 8
