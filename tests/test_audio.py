"""Audio: the processor, the tower and an LLM make what transformers' own model makes of its processor's output."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.pictures import picture
from cases.sounds import AUDIO, PROMPT, RATE, build_hearing, make_processor, sound
from conftest import greedy
from transformers import AutoConfig, AutoTokenizer, WhisperFeatureExtractor

from nanoinfer import LLM, RequestOutput
from nanoinfer.config import Config
from nanoinfer.media.audio.opening import read_audio
from nanoinfer.media.images.opening import Opener
from nanoinfer.media.messages import take_media
from nanoinfer.media.processor import MediaProcessor
from nanoinfer.media.tower.tower import TransformersTower
from nanoinfer.runner.start.trials import largest_pixels
from nanoinfer.weights.names import OfTower
from nanoinfer.weights.sources import FileSource

SMALL: dict[str, Any] = {"kvcache_block_size": 16, "max_model_len": 320}
LENGTHS = [9000, 16000, 700, 4801]  # of sounds, in samples: odd ones, too
ERROR = 5e-3


class Checkpoint:
    """A small checkpoint that hears, by transformers and by us."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model, self.oracle = str(folder), build_hearing(folder), make_processor()
        self.config = AutoConfig.from_pretrained(folder)
        self.processor = MediaProcessor(self.folder, self.config, AutoTokenizer.from_pretrained(folder))

    def wanted(self, text: str, sounds: list[np.ndarray]) -> dict[str, torch.Tensor]:
        """What transformers' model takes."""
        audio = {"audio": sounds, "audio_kwargs": {"sampling_rate": RATE}} if sounds else {}
        return self.oracle(text=text, return_tensors="pt", **audio)

    @torch.inference_mode()
    def check(self, output: RequestOutput, text: str, sounds: list[np.ndarray]) -> None:
        """Check that each token is the likeliest behind those before it, and that log-probabilities equal theirs."""
        inputs, tokens = self.wanted(text, sounds), output["token_ids"]
        assert output["prompt_token_ids"] == inputs["input_ids"][0].tolist()
        ids = torch.cat([inputs["input_ids"], torch.tensor([tokens[:-1]], dtype=torch.int64)], dim=1)
        inputs = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        rows = self.model(**inputs).logits[0].log_softmax(dim=-1)[-len(tokens) :]
        ours = [entry[token].logprob for entry, token in zip(output["logprobs"], tokens, strict=True)]
        assert ours == pytest.approx(rows[range(len(tokens)), tokens].tolist(), abs=ERROR)
        rows[:, self.config.audio_token_id] = -torch.inf
        assert tokens == rows.argmax(dim=-1).tolist()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp("hearing"))


def text_of(count: int) -> str:
    return "Hear " + " or is it ".join([PROMPT] * count) + "? Say so."


PROMPTS = [(text_of(len(some)), [sound(LENGTHS[seed], seed) for seed in some]) for some in ((0,), (1, 2), (3, 0))]
PROMPTS.append(("But, soft!", []))


def run(llm: LLM, own: Checkpoint, **settings: Any) -> list[RequestOutput]:
    """Generate from the prompts, check the results, and return them."""
    params = greedy(max_tokens=4, ignore_eos=True, logprobs=0, logit_bias={own.config.audio_token_id: -100}, **settings)
    given = [
        {"prompt": text, "multi_modal_data": {"audio": [(one, RATE) for one in sounds]}} if sounds else text
        for text, sounds in PROMPTS
    ]
    outputs = llm.generate(given, params, use_tqdm=False)
    for output, (text, sounds) in zip(outputs, PROMPTS, strict=True):
        own.check(output, text, sounds)
    return outputs


def test_prompts_and_embeddings_equal_those_of_transformers(own: Checkpoint) -> None:
    sounds = [sound(length, seed) for seed, length in enumerate(LENGTHS)]
    text = text_of(len(sounds))
    wanted = own.wanted(text, sounds)
    prompt = own.processor.prepare("prompt", text, audio=[(one, RATE) for one in sounds])
    assert prompt.token_ids == wanted["input_ids"][0].tolist()
    assert (
        prompt.token_ids
        == own.processor.prepare(
            "prompt", own.oracle.tokenizer.encode(text), audio=[(one.tolist(), RATE) for one in sounds]
        ).token_ids
    )
    tower = TransformersTower(own.config, torch.float32, torch.device("cpu"))
    FileSource(own.folder, OfTower(hears=True)).fill(tower.table())
    encoded = [one.embeddings for one in tower.encode(prompt.pixels)]
    assert [len(one) for one in encoded] == [span.count for span in prompt.spans]
    put = []
    hook = own.model.model.language_model.register_forward_pre_hook(
        lambda module, args, given: put.append(given["inputs_embeds"]), with_kwargs=True
    )
    with torch.inference_mode():
        own.model(**wanted)
    hook.remove()
    places = wanted["input_ids"][0] == own.config.audio_token_id
    torch.testing.assert_close(torch.cat(encoded), put[0][0, places], atol=1e-5, rtol=1e-5)


def test_an_llm_equals_transformers(own: Checkpoint, make_llm: Callable[..., LLM]) -> None:
    """Prompts are fresh, then prefix-cached, then in chunks, some of which cut a sound."""
    llm = make_llm(own.folder, **SMALL)
    assert ", hears audio, " in repr(llm)
    run(llm, own)
    assert all(output["num_cached_tokens"] for output in run(llm, own)[:3])
    run(make_llm(own.folder, **SMALL, max_num_batched_tokens=19), own, n=1)


def test_two_ranks(own: Checkpoint, make_llm: Callable[..., LLM]) -> None:
    run(make_llm(own.folder, device="cpu", tensor_parallel_size=2, **SMALL), own)


def test_a_chat(own: Checkpoint, make_llm: Callable[..., LLM]) -> None:
    llm, one = make_llm(own.folder, **SMALL), sound(5000)
    parts = [{"type": "text", "text": "Hear "}, {"type": "audio", "audio": (one, RATE)}]
    settings = greedy(max_tokens=4, ignore_eos=True, logprobs=0, logit_bias={own.config.audio_token_id: -100})
    (output,) = llm.chat([{"role": "user", "content": parts}], settings, use_tqdm=False)
    own.check(output, f"user:Hear {PROMPT}", [one])


def test_text_alone_has_no_tower(own: Checkpoint, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(own.folder, images=False, **SMALL)
    assert llm.engine.ranks.runner.holdings.tower is None
    (output,) = llm.generate(["But, soft!"], greedy(max_tokens=4, ignore_eos=True, logprobs=0), use_tqdm=False)
    own.check(output, "But, soft!", [])


def test_new_weights_of_the_tower(own: Checkpoint, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(own.folder, **SMALL)
    before = run(llm, own)[0]["logprobs"]
    name = "model.audio_tower.layer_norm.weight"
    llm.update_weights({name: 3 * dict(own.model.named_parameters())[name].detach()}, partial=True)
    given = {"prompt": PROMPTS[0][0], "multi_modal_data": {"audio": (PROMPTS[0][1][0], RATE)}}
    (output,) = llm.generate([given], greedy(max_tokens=4, ignore_eos=True, logprobs=0), use_tqdm=False)
    assert output["logprobs"] != before


def test_equal_sounds_have_equal_keys_and_are_read_again(own: Checkpoint) -> None:
    one, other = sound(5000).copy(), sound(5000, 1)
    prompt = own.processor.prepare("prompt", text_of(3), audio=[(one, RATE), (other, RATE), (one.copy(), RATE)])
    keys = [span.key for span in prompt.spans]
    assert keys[0] == keys[2] != keys[1]
    sent = pickle.loads(pickle.dumps(prompt.pixels[0]))
    sent.load = own.processor.load
    assert torch.equal(sent["input_features"], prompt.pixels[0]["input_features"])
    one[0] += 1
    with pytest.raises(ValueError, match="audio 0 of prompt has changed since it was first read"):
        prompt.pixels[0].in_bytes()


def test_the_longest_sound_is_known(own: Checkpoint) -> None:
    largest = largest_pixels(Config(own.folder))
    assert (int(largest["count"]), tuple(largest["input_features"].shape)) == (25, (1, 16, 100))
    assert own.processor.longest_span() == 25


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a.wav", "is 'a.wav': no file is read unless image_folder names the folder"),
        ("http://host/a.wav", "nothing is fetched; must be a pair"),
        (3, "is 3: must be a pair .*; or a path, or the bytes of a file"),
        (sound(5000), "must be a pair"),
        ((sound(5000), 8000), "has 8000 samples a second: must have 16000; resample it"),
        ((sound(5000), True), "has True samples a second"),
        ((np.zeros(5000, np.int16), RATE), r"has an array of int16, \[5000\]: must be a pair"),
        ((np.zeros((2, 5000)), RATE), r"has an array of float64, \[2, 5000\]"),
        (([], RATE), r"has an array of float64, \[0\]"),
        (([[1.0], [1.0, 2.0]], RATE), "must be a pair"),
        ((np.full(5000, np.nan), RATE), "has samples that are NaN or infinite"),
    ],
)
def test_what_is_no_audio_is_named(source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"sound .*{message}"):
        read_audio("sound", source, RATE, Opener())


def test_files_are_read_by_soundfile(own: Checkpoint, tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    one, file = sound(5000), tmp_path / "a.wav"
    soundfile.write(file, np.stack([one + 0.1, one - 0.1], axis=1), RATE, subtype="FLOAT")
    for source in ("a.wav", file, f"file://{file}", file.read_bytes()):
        assert np.allclose(read_audio("sound", source, RATE, Opener(tmp_path)), one, atol=1e-6)
    processor = MediaProcessor(own.folder, own.config, own.oracle.tokenizer, image_folder=tmp_path)
    (pixels,) = processor.prepare("prompt", PROMPT, audio=["a.wav"]).pixels
    wanted = own.processor.prepare("prompt", PROMPT, audio=[(one, RATE)]).pixels[0]
    torch.testing.assert_close(pixels["input_features"], wanted["input_features"], atol=1e-4, rtol=1e-4)
    soundfile.write(file, one, 8000)
    with pytest.raises(ValueError, match="sound has 8000 samples a second: must have 16000"):
        read_audio("sound", "a.wav", RATE, Opener(tmp_path))
    for source in (b"no sound", "a.wav\0"):
        with pytest.raises(ValueError, match="sound cannot be read as audio"):
            read_audio("sound", source, RATE, Opener(tmp_path))


def test_files_need_soundfile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ValueError, match=r"sound is a file: soundfile reads these: pip install 'nanoinfer\[audio\]'"):
        read_audio("sound", b"RIFF", RATE, Opener())


@pytest.mark.parametrize("samples", [320, 16001])
def test_sounds_are_of_some_length(samples: int, own: Checkpoint) -> None:
    with pytest.raises(ValueError, match=f"audio 0 of prompt has {samples} samples: must have 321 to 16000, 1 seconds"):
        own.processor.prepare("prompt", PROMPT, audio=[(sound(samples), RATE)])
    own.processor.prepare("prompt", PROMPT, audio=[(sound(321), RATE)])


def test_other_media_are_named(own: Checkpoint, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(own.folder, **SMALL)
    with pytest.raises(ValueError, match="has 1 images: must have audio alone, which this model hears"):
        llm.generate([{"prompt": PROMPT, "multi_modal_data": {"image": [picture(8, 8)]}}])
    with pytest.raises(ValueError, match=f"has 0 placeholders, {AUDIO!r}, for 1 audios".replace("|", r"\|")):
        llm.generate([{"prompt": "Hear", "multi_modal_data": {"audio": [(sound(5000), RATE)]}}])
    bare, media = take_media("messages", [{"role": "user", "content": [{"audio": (1, 2)}]}])
    assert (bare[0]["content"], list(media.audio)) == ([{"type": "audio"}], [(1, 2)])
    _, media = take_media("messages", [{"role": "user", "content": [{"type": "audio", "path": "a.wav"}]}])
    assert list(media.audio) == ["a.wav"]
    with pytest.raises(ValueError, match="must have a sound under 'audio'"):
        take_media("messages", [{"role": "user", "content": [{"type": "audio"}]}])


def test_options_and_files_are_read(own: Checkpoint, tmp_path: Path) -> None:
    tokenizer = own.oracle.tokenizer
    with pytest.raises(ValueError, match=r"image_options=\{'max_pixels': 9\}: must be left out: this model hears"):
        MediaProcessor(own.folder, own.config, tokenizer, {"max_pixels": 9})
    for setting, message in (
        ({"chunk_length": 2}, r"the feature extractor makes 16 x 200 numbers: must make \(16, 100\)"),
        ({"feature_size": 80}, "the feature extractor makes 80 x 100 numbers"),
    ):
        other = WhisperFeatureExtractor(**{"feature_size": 16, "chunk_length": 1, **setting})
        other.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=message):
            MediaProcessor(str(tmp_path), own.config, tokenizer)
    own.oracle.feature_extractor.save_pretrained(tmp_path)
    (tmp_path / "processor_config.json").write_text('{"audio_token": "|", "brand_new": 7}')
    with pytest.raises(ValueError, match=r"processor_config.json has brand_new=7: nothing reads it here"):
        MediaProcessor(str(tmp_path), own.config, tokenizer)
