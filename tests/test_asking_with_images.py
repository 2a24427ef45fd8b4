"""What callers write of images, in chats and beside prompts, compared with transformers."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from array import array
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import greedy, of_each_kind, whole_only

pytest.importorskip("PIL")

from cases import MULTIMODAL
from cases.pictures import picture
from cases.vision import IMAGE, SEEING
from PIL.Image import Image

from nanoinfer import BUNDLED_MODEL, LLM, BeamSearchParams, RequestOutput, SamplingParams, batch
from nanoinfer.media.spans import MediaPrompt
from nanoinfer.requests.prompts.media import WithMedia
from nanoinfer.requests.prompts.stages import Asked, CallPrompts, ComingRequest, Prepared
from nanoinfer.requests.settings import Settings

MAX_TOKENS = 5
ONE, TWO = picture(61, 97), picture(150, 40, 1)
EACH = of_each_kind(SEEING, list(SEEING).index("qwen3-vl"))


class Checkpoint:
    """A small checkpoint that sees, its LLM, and transformers' model and processor."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder, self.seeing = str(folder), SEEING[name]
        self.model = self.seeing.build(folder)
        self.model.generation_config.eos_token_id = None
        self.processor = self.seeing.make_processor()
        self.image_id: int = self.model.config.image_token_id
        self.llm = self.make_llm()

    def make_llm(self, **options: Any) -> LLM:
        return LLM(self.folder, device="cpu", **{**self.small, **options})

    @property
    def small(self) -> dict[str, int]:
        return MULTIMODAL[self.seeing.case].small

    def decode(self, token_ids: list[int]) -> str:
        return self.processor.tokenizer.decode(token_ids, skip_special_tokens=True)

    def params(self, **settings: Any) -> SamplingParams:
        """Greedy, without the image's token: transformers would look for an image."""
        return greedy(**{"max_tokens": MAX_TOKENS, "ignore_eos": True, "logit_bias": {self.image_id: -100}, **settings})

    def text(self, *parts: str | Image) -> str:
        return "".join(part if isinstance(part, str) else self.seeing.prompt for part in parts)

    @torch.inference_mode()
    def expected(self, inputs: Any) -> tuple[list[int], list[int]]:
        """Return the prompt's tokens and those that transformers generates, for its processor's inputs."""
        count = inputs["input_ids"].shape[1]
        how = {"do_sample": False, "max_new_tokens": MAX_TOKENS, "suppress_tokens": [self.image_id]}
        if "unified" in self.seeing.case:
            how["cache_implementation"] = "static"  # else it has other masks than Gemma 4 was trained with
        tokens = self.model.generate(**inputs, **how)[0].tolist()
        return tokens[:count], tokens[count:]

    def of_text(self, text: str, images: list[Image]) -> tuple[list[int], list[int]]:
        return self.expected(self.processor(text=text, images=images or None, return_tensors="pt"))

    def of_chat(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        if self.seeing.case == "llava-onevision":  # in chats, transformers leaves out the tiles of several images
            parts = [part for message in messages for part in message["content"] if isinstance(part, dict)]
            text = self.processor.apply_chat_template(messages, add_generation_prompt=True)
            return self.of_text(text, [part["image"] for part in parts if part["type"] == "image"])
        how = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
        return self.expected(self.processor.apply_chat_template(messages, **how))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Return a function that makes a case's checkpoint, once each."""
    return functools.cache(lambda name: Checkpoint(name, tmp_path_factory.mktemp("seeing")))


@pytest.fixture(scope="module")
def qwen(checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoint("qwen3-vl")


def tokens(output: RequestOutput) -> tuple[list[int], list[int]]:
    return output.prompt_token_ids, output.token_ids


def written(image: Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def url(image: Image) -> str:
    return "data:image/png;base64," + b64encode(written(image)).decode()


def user(*parts: str | Image | dict[str, Any]) -> dict[str, Any]:
    """Return a message of texts, images and other parts."""
    return {"role": "user", "content": [as_part(part) for part in parts]}


def as_part(part: str | Image | dict[str, Any]) -> dict[str, Any]:
    if isinstance(part, dict):
        return part
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}


@pytest.mark.parametrize("name", EACH)
def test_chats(name: str, checkpoint: Callable[[str], Checkpoint]) -> None:
    """One image, several in one message and in several, and a chat without any beside them."""
    own = checkpoint(name)
    chats = [
        [user(ONE, "What is it?")],
        [user("First ", TWO, " then ", ONE), {"role": "assistant", "content": "Noise."}, user("And ", TWO, "?")],
        [{"role": "user", "content": "Who is there?"}],
    ]
    outputs = own.llm.chat(chats, own.params(), use_tqdm=False)
    assert [tokens(output) for output in outputs] == [own.of_chat(chat) for chat in chats]


@pytest.mark.parametrize("name", EACH)
def test_prompts(name: str, checkpoint: Callable[[str], Checkpoint]) -> None:
    """As vLLM's callers write them: text or token ids, with one image or a list of them, beside others without."""
    own = checkpoint(name)
    one, two = own.text("It is ", ONE, "."), own.text(ONE, " or ", TWO, "?")
    ids = own.processor.tokenizer.encode(two)
    prompts = [
        {"prompt": one, "multi_modal_data": {"image": ONE}},
        {"prompt": two, "multi_modal_data": {"image": [ONE, TWO]}, "multi_modal_uuids": {"image": ["a", "b"]}},
        {"prompt_token_ids": ids, "multi_modal_data": {"image": [ONE, TWO]}, "mm_processor_kwargs": {"fps": []}},
        "But, soft!",
        {"prompt": "But, soft!", "multi_modal_data": {"image": []}},
    ]
    expected = [own.of_text(one, [ONE]), *[own.of_text(two, [ONE, TWO])] * 2, *[own.of_text("But, soft!", [])] * 2]
    outputs = own.llm.generate(prompts, own.params(), use_tqdm=False)
    assert [tokens(output) for output in outputs] == expected
    assert [output.prompt for output in outputs] == [one, two, None, "But, soft!", "But, soft!"]


def test_streams_and_steps(qwen: Checkpoint) -> None:
    text = qwen.text("It is ", ONE, ".")
    prompt = {"prompt": text, "multi_modal_data": {"image": ONE}}
    expected = qwen.of_text(text, [ONE])
    assert [token for new in qwen.llm.stream(prompt, qwen.params()) for token in new.token_ids] == expected[1]
    chat = [user(ONE, "What is it?")]
    qwen.llm.add_request({"messages": chat}, qwen.params())
    qwen.llm.add_request(prompt, qwen.params())
    outputs: list[RequestOutput] = []
    while qwen.llm.has_unfinished_requests():
        outputs += qwen.llm.step()
    outputs.sort(key=lambda output: output.request_id)
    assert [tokens(output) for output in outputs] == [qwen.of_chat(chat), expected]


def test_an_image_may_come_in_many_parts(qwen: Checkpoint, tmp_path: Path) -> None:
    """transformers', OpenAI's and vLLM's kinds of parts, with all that an image may be."""
    (tmp_path / "a b.png").write_bytes(written(ONE))
    sources = [ONE, written(ONE), url(ONE), np.asarray(ONE), "a b.png", tmp_path / "a b.png"]
    sources.append({"bytes": written(ONE), "path": None})
    parts: list[dict[str, Any]] = [{"type": "image", "image": source} for source in sources]
    parts += [
        {"type": "image", "url": url(ONE)},
        {"type": "image", "path": "a b.png"},
        {"image": ONE},
        {"type": "image_pil", "image_pil": ONE},
        {"type": "image_url", "image_url": {"url": url(ONE), "detail": "auto"}},
        {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/a%20b.png"}, "text": None},
        {"image_url": url(ONE)},
    ]
    with qwen.make_llm(image_folder=str(tmp_path)) as llm:
        chats = [[user("What is ", part, "?")] for part in parts]
        given = repr(chats)
        outputs = llm.chat(chats, qwen.params(max_tokens=1), use_tqdm=False)
        assert repr(chats) == given
        expected = qwen.of_chat([user("What is ", ONE, "?")])
        assert [output.prompt_token_ids for output in outputs] == [expected[0]] * len(parts)
        assert {output.token_ids[0] for output in outputs} == {expected[1][0]}
        prompt = {"prompt": qwen.text(ONE), "multi_modal_data": {"image": "a b.png"}}
        assert len(llm.generate(prompt, qwen.params(max_tokens=1), use_tqdm=False)) == 1


@pytest.mark.parametrize("as_ids", [(False, False), (True, True), (True, False), (False, True)])
def test_scores(qwen: Checkpoint, as_ids: tuple[bool, bool]) -> None:
    given, rest = qwen.text("See ", ONE, " and", TWO, ":"), " it is noise"
    inputs = qwen.processor(text=given + rest, images=[ONE, TWO], return_tensors="pt")
    with torch.inference_mode():
        logprobs = qwen.model(**inputs).logits[0].float().log_softmax(dim=-1)
    tokens = inputs["input_ids"][0, 1:].tolist()
    encode = qwen.processor.tokenizer.encode
    count = len(encode(rest))
    expected = [logprobs[place, token].item() for place, token in enumerate(tokens)][-count:]
    prompt: dict[str, Any] = {"prompt_token_ids": encode(given)} if as_ids[0] else {"prompt": given}
    continuation = encode(rest) if as_ids[1] else rest
    (score,) = qwen.llm.score({**prompt, "multi_modal_data": {"image": [ONE, TWO]}}, [continuation])
    assert [float(value) for value in score.logprobs] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["qwen3-vl", *whole_only(["gemma3", "qwen2.5-vl", "mistral3"])])
def test_beams(name: str, checkpoint: Callable[[str], Checkpoint]) -> None:
    """In one step, and in chunks."""
    own = checkpoint(name)
    text = own.text("See ", ONE, " and ", TWO, ".")
    inputs = own.processor(text=text, images=[ONE, TWO], return_tensors="pt")
    how = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 4, "do_sample": False}
    with torch.inference_mode():
        expected = own.model.generate(**inputs, **how)[:, inputs["input_ids"].shape[1] :].tolist()
    prompt = {"prompt": text, "multi_modal_data": {"image": [ONE, TWO]}}
    params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    for options in ({}, {"max_num_batched_tokens": 19}):
        with own.make_llm(**options) as llm:
            (output,) = llm.beam_search([prompt], params)
            assert [sequence.token_ids for sequence in output.sequences] == expected


def test_requests_are_prepared_beside_others(qwen: Checkpoint) -> None:
    text = qwen.text("It is ", ONE, ".")
    given = [{"prompt": text, "multi_modal_data": {"image": image}} for image in (ONE, b"no image")]
    good, bad = (qwen.llm.prepare(prompt, qwen.params()) for prompt in given)
    plain = qwen.llm.prepare("Who is there?", qwen.params())
    assert plain.is_ready
    with pytest.raises(ValueError, match=r"image 0 of prompt\['prompt'\] cannot be read as an image"):
        qwen.llm.add_request(bad)
    with pytest.raises(ValueError, match=r"^sampling_params=.*: must be None: llm.prepare has got those"):
        qwen.llm.add_request(good, qwen.params())
    assert bad.is_ready
    numbers = [qwen.llm.add_request(coming) for coming in (good, plain)]
    outputs: list[RequestOutput] = []
    while qwen.llm.has_unfinished_requests():
        outputs += qwen.llm.step()
    made = {output.request_id: tokens(output) for output in outputs}
    assert [made[number] for number in numbers] == [qwen.of_text(text, [ONE]), qwen.of_text("Who is there?", [])]
    with pytest.raises(ValueError, match="must be a SamplingParams"):
        qwen.llm.prepare("Who?", 7)


def prompts_of(qwen: Checkpoint, images: list[Any]) -> list[dict[str, Any]]:
    beside = ({"multi_modal_data": {"image": [image]}} for image in images)
    return [{"prompt": qwen.text("See ", ONE, f" {number}"), **own} for number, own in enumerate(beside)]


def test_the_first_prompts_run_while_the_images_of_others_are_opened(qwen: Checkpoint) -> None:
    images, params = [picture(61, 97, seed) for seed in range(12)], qwen.params(max_tokens=20, n=2)
    together = qwen.llm.generate(prompts_of(qwen, images), params, use_tqdm=False)
    with qwen.make_llm(max_num_batched_tokens=32) as llm:
        begun: list[int] = []
        llm.engine.on_step = lambda step: begun.append(llm.engine.num_requests)
        outputs = llm.generate(prompts_of(qwen, images), params, use_tqdm=False)
    assert [each.outputs for each in outputs] == [each.outputs for each in together]
    assert 0 < begun[0] < len(images) == begun[-1]


def test_prompts_of_a_call_come_by_steps_and_what_is_left_is_cancelled() -> None:
    settings, tokens = Settings(SamplingParams(), None), array("i", [5] * 10)
    coming = [ComingRequest(Asked("prompt", "", None), settings, Future()) for _ in range(9)]
    with closing(CallPrompts(coming, lambda request: Prepared(tokens, tokens.tolist(), None, *settings))) as prompts:
        counts = [len(prompts.take_prompts(most_tokens=20)) for _ in range(2)]
    assert counts == [2, 4]
    assert [request.seen.cancelled() for request in coming if request.seen] == [False] * 6 + [True] * 3


@pytest.mark.parametrize("replicas", [1, *whole_only([2])])
def test_an_image_that_cannot_be_opened_drops_the_prompts_before_it(qwen: Checkpoint, replicas: int) -> None:
    prompts = prompts_of(qwen, [picture(61, 97, seed) for seed in range(6)])
    broken = prompts_of(qwen, [*range(9), b"no image"])[-1]
    with qwen.make_llm(max_num_batched_tokens=32, data_parallel_size=replicas) as llm:
        with pytest.raises(ValueError, match=re.escape("image 0 of prompts[6]['prompt'] cannot be read as an image")):
            llm.generate([*prompts, broken], qwen.params(), use_tqdm=False)
        assert not llm.has_unfinished_requests()
        outputs = llm.generate(prompts, qwen.params(), use_tqdm=False)
    assert [tokens(output) for output in outputs] == [
        tokens(output) for output in qwen.llm.generate(prompts, qwen.params(), use_tqdm=False)
    ]


def test_replicas(qwen: Checkpoint) -> None:
    """And several samples of a prompt, whose images begin alike or not."""
    chats = [[user(image, f"What is {index}?")] for index, image in enumerate([ONE, TWO, ONE])]
    changing = np.asarray(picture(40, 60, 2)).copy()
    with qwen.make_llm(data_parallel_size=2) as llm:
        outputs = llm.chat(chats, qwen.params(n=2), use_tqdm=False)
        llm.add_request({"messages": [user({"type": "image", "image": changing}, "?")]})
        llm.add_request({"messages": chats[0]}, qwen.params())
        changing[0, 0] ^= 1
        made: list[RequestOutput] = []
        while llm.has_unfinished_requests():
            made += llm.step()
    failed, other = sorted(made, key=lambda output: output.request_id)
    assert (failed.finish_reason, other.finish_reason) == ("error", "length")
    assert "image 0 of prompt['messages'] has changed since it was first read" in str(failed.stop_reason)
    for chat, output in zip(chats, outputs, strict=True):
        expected = qwen.of_chat(chat)
        assert [(output.prompt_token_ids, sample.token_ids) for sample in output.samples] == [expected] * 2


def test_batch_files(qwen: Checkpoint, tmp_path: Path) -> None:
    """OpenAI's chats and plain lines, with images by data: URLs and by files in the folder."""
    (tmp_path / "two.png").write_bytes(written(TWO))
    first = {"type": "image_url", "image_url": {"url": url(ONE), "detail": "high"}}
    second = {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/two.png"}}
    plain, text = qwen.text(TWO, "?"), qwen.text("See ", ONE, " and ", TWO, ".")
    chat = {"messages": [user(first, " or ", second)]}
    lines: list[dict[str, Any]] = [
        {"custom_id": "openai", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"id": "chat", "messages": [user({"type": "image", "image": "two.png"}, "?")]},
        {"id": "one", "prompt": plain, "image": "two.png"},
        {"id": "two", "token_ids": qwen.processor.tokenizer.encode(text), "image": [url(ONE), "two.png"]},
        {"id": "outside", "prompt": plain, "image": "../secret.png"},
        {"id": "both", "messages": [user(first)], "image": "two.png"},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, "logit_bias": {qwen.image_id: -100}}
    options = {"device": "cpu", "image_folder": str(tmp_path), "keep_order": True, **qwen.small, **settings}
    summary = batch.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", qwen.folder, **options)
    assert (summary.done, summary.errors) == (4, 2)
    openai, *rows, outside, both = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    counts = [openai["response"]["body"]["usage"]["prompt_tokens"], *(row["num_prompt_tokens"] for row in rows)]
    expected = [
        qwen.of_chat([user(ONE, " or ", TWO)]),
        qwen.of_chat([user(TWO, "?")]),
        qwen.of_text(plain, [TWO]),
        qwen.of_text(text, [ONE, TWO]),
    ]
    assert counts == [len(prompt) for prompt, _ in expected]
    assert [row["token_ids"] for row in rows] == [generated for _, generated in expected[1:]]
    assert openai["response"]["body"]["choices"][0]["message"]["content"] == qwen.decode(expected[0][1])
    assert outside["error"]["message"].startswith("image 0 of prompt['prompt'] is '../secret.png': must be in image_fo")
    assert both["error"]["message"].startswith("has 'image' beside 'messages'")


def test_columns_of_ray_data(qwen: Checkpoint) -> None:
    """As tables hold images: bytes, lists of them, and the structures of the library datasets."""
    pytest.importorskip("ray.data")
    import pyarrow as pa

    from nanoinfer.integrations.ray_data import Generator

    one, two = {"bytes": written(ONE), "path": None}, {"bytes": written(TWO), "path": None}
    plain, text = qwen.text(ONE, "?"), qwen.text("See ", ONE, " and ", TWO, ".")
    messages = [user({"type": "image", "image": written(TWO)}, "?")]
    tables = [
        pa.Table.from_pylist([{"prompt": plain, "image": written(ONE)}, {"prompt": "But, soft!", "image": None}]),
        pa.Table.from_pylist([{"prompt": text, "image": [one, two]}]),
        pa.Table.from_pylist([{"messages": messages}]),
    ]
    expected = [
        [qwen.of_text(plain, [ONE])[1], qwen.of_text("But, soft!", [])[1]],
        [qwen.of_text(text, [ONE, TWO])[1]],
        [qwen.of_chat([user(TWO, "?")])[1]],
    ]
    generator = Generator(qwen.folder, vars(qwen.params()), device="cpu", **qwen.small)

    async def make(table: pa.Table) -> list[dict[str, Any]]:
        return (await anext(generator(table))).to_pylist()

    for table, rows in zip(tables, expected, strict=True):
        made = asyncio.run(make(table))
        assert [(row["error"], row["token_ids"]) for row in made] == [(None, row) for row in rows]
        assert [row.get("image") for row in made] == [row.get("image") for row in table.to_pylist()]
    generator = Generator(qwen.folder, vars(qwen.params()), device="cpu", images=False, **qwen.small)
    blind, text_alone = asyncio.run(make(tables[0]))
    assert "LLM(images=True) sees" in blind["error"]
    assert text_alone["error"] is None


def named(value: object) -> str:
    """Return what a test's name says of an argument: the same in every process."""
    return re.sub(" at 0x[0-9A-F]+", "", str(value))


def test_what_ends_early_lets_no_thread_prepare_further_images(
    qwen: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt while prompts are read, and close."""
    image = np.random.default_rng(0).integers(0, 256, (1000, 1000, 3), dtype=np.uint8)
    prompt = {"prompt": qwen.text(ONE), "multi_modal_data": {"image": image}}
    with qwen.make_llm() as llm:
        images, begun = llm._inputs._media, list[Future[MediaPrompt]]()
        assert images is not None
        begin = images.begin

        def begin_some(prompt: WithMedia) -> Future[MediaPrompt]:
            if len(begun) == 40:
                raise KeyboardInterrupt
            begun.append(begin(prompt))
            return begun[-1]

        monkeypatch.setattr(images, "begin", begin_some)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt] * 41)
        assert begun[-1].cancelled()
        monkeypatch.undo()
        coming = [llm.prepare(prompt, None) for _ in range(40)]
    assert coming[-1].is_ready
    with pytest.raises(ValueError, match=r"prompt\['prompt'\]: its images were cancelled, as close cancels them"):
        llm._inputs.finish(coming[-1])


class TestErrors:
    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            (
                {"prompt": "What?", "multi_modal_data": {"image": ONE}},
                r"prompts\[1\]\['prompt'\] has 0 placeholders, '<image>', for 1 images: must have one for each",
            ),
            (
                {"prompt": f"{IMAGE} or {IMAGE}", "multi_modal_data": {"image": [ONE]}},
                r"prompts\[1\]\['prompt'\] has 2 placeholders, '<image>', for 1 images",
            ),
            (
                {"prompt": f"{IMAGE}\ud83d", "multi_modal_data": {"image": ONE}},
                r"prompts\[1\]\['prompt'\] is .*: must have no half of a surrogate pair, as '\\ud83d' at \[7\]",
            ),
            (f"{IMAGE}?", r"prompts\[1\] has 1 placeholders, '<image>', and no image"),
            (
                {"prompt_token_ids": [5, 6], "multi_modal_data": {"image": [ONE, TWO]}},
                r"has 0 placeholders, token \d+, for 2 images",
            ),
            (
                {"prompt": f"{IMAGE} or {IMAGE}", "multi_modal_data": {"image": [ONE, b"no image"]}},
                r"image 1 of prompts\[1\]\['prompt'\] cannot be read as an image",
            ),
            (
                {"prompt": IMAGE, "multi_modal_data": {"image": "https://host/a.png"}},
                r"image 0 of prompts\[1\]\['prompt'\] is 'https://host/a.png': nothing is fetched",
            ),
            (
                {"prompt": IMAGE, "multi_modal_data": {"image": ONE}, "mm_processor_kwargs": {"max_pixels": 9}},
                r"prompts\[1\]\['mm_processor_kwargs'\] is {'max_pixels': 9}: must be left out: LLM\(image_options=",
            ),
            (
                {"prompt": "<audio>", "multi_modal_data": {"audio": [ONE]}},
                r"has 1 sounds: must have none: classes that hear are Qwen2AudioForConditionalGeneration",
            ),
            ({"prompt": IMAGE, "multi_modal_data": ONE}, r"\['multi_modal_data'\] is <PIL.*: must be a mapping with"),
            ({"prompt": IMAGE, "image": ONE}, r"must be text, .*, and nothing else but 'multi_modal_data'"),
        ],
        ids=named,
    )
    def test_prompts(self, prompt: Any, message: str, qwen: Checkpoint) -> None:
        with pytest.raises(ValueError, match=message):
            qwen.llm.generate(["Who?", prompt], qwen.params())
        assert not qwen.llm.has_unfinished_requests()

    @pytest.mark.parametrize(
        ("part", "message"),
        [
            ({"type": "image"}, r"messages\[1\]\[0\] has the part .*: must have an image under 'image'"),
            (
                {"type": "input_audio", "input_audio": {}},
                "has content of type 'input_audio': must be texts, images as",
            ),
            ({"type": "text", "text": IMAGE}, r"messages\[1\] has 1 placeholders, '<image>', and no image"),
            ({"type": "image", "image": "/etc/passwd"}, r"image 0 of messages\[1\] is '/etc/passwd': no file is read"),
        ],
        ids=named,
    )
    def test_chats(self, part: dict[str, Any], message: str, qwen: Checkpoint) -> None:
        with pytest.raises(ValueError, match=message):
            qwen.llm.chat([[user("Who?")], [user(part)]], qwen.params())

    def test_a_template_that_takes_no_images(self, qwen: Checkpoint) -> None:
        with pytest.raises(
            ValueError, match=r"messages\[0\]\[0\]: the chat template takes no images in .* role 'user'"
        ):
            qwen.llm.chat([user(ONE)], chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
        silent = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
        with pytest.raises(ValueError, match=r"messages\[0\] has 0 placeholders, '<image>', for 1 images"):
            qwen.llm.chat([user(ONE, "?")], chat_template=silent)

    def test_images_that_do_not_fit(self, qwen: Checkpoint) -> None:
        prompt = {"prompt": qwen.text(ONE, TWO), "multi_modal_data": {"image": [ONE, picture(128, 128)]}}
        with qwen.make_llm(max_model_len=16) as llm, pytest.raises(ValueError) as caught:
            llm.generate([prompt], qwen.params())
        wanted = (
            r"prompts\[0\]\['prompt'\] has \d+ tokens, of which image 1 has 16: must be fewer than max_model_len=16.*"
        )
        assert re.match(wanted + "image_options can make images and videos smaller", str(caught.value))

    def test_what_a_step_cannot_hold_is_known_at_the_start(self, checkpoint: Callable[[str], Checkpoint]) -> None:
        """Squares would fit; of a flat image more is made."""
        with pytest.raises(ValueError, match=r"max_num_batched_tokens=64: must be at least 70, the tokens of an image"):
            checkpoint("gemma4").make_llm(max_num_batched_tokens=64)

    def test_more_images_than_allowed(self, qwen: Checkpoint) -> None:
        with (
            qwen.make_llm(limit_images_per_prompt=1) as llm,
            pytest.raises(ValueError, match=r"messages\[0\] has 2 images: must have 1 to limit_images_per_prompt=1"),
        ):
            llm.chat([user(ONE, TWO)])

    def test_options_are_checked_at_the_start(self, qwen: Checkpoint) -> None:
        with pytest.raises(ValueError, match=r"image_options has 'max_pixel': 9: this model's are max_pixels"):
            LLM(qwen.folder, device="cpu", image_options={"max_pixel": 9})

    def test_an_argument_of_images(self, qwen: Checkpoint) -> None:
        with pytest.raises(
            ValueError, match=r"^unknown argument 'image': write {\"prompt\": text, \"multi_modal_data\":"
        ):
            qwen.llm.generate(IMAGE, image=ONE)

    def test_an_llm_that_does_not_see_names_the_option(self, qwen: Checkpoint) -> None:
        blind = r"this model is run as text only; LLM\(images=True\) sees, or says why it cannot"
        for folder, options in ((qwen.folder, {"images": False}), (BUNDLED_MODEL, {})):
            with LLM(folder, device="cpu", num_kvcache_blocks=16, **options) as llm:
                with pytest.raises(ValueError, match=rf"prompts\[0\] has 'multi_modal_data': {blind}"):
                    llm.generate({"prompt": IMAGE, "multi_modal_data": {"image": ONE}})
                with pytest.raises(ValueError, match=rf"messages\[0\] has content of type 'image': {blind}"):
                    llm.chat([user(ONE)])
