"""Compares prompts with images with transformers: its own tower, tokens and positions; our decoder and engine."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable

import pytest
import torch
from cases.case import build
from cases.seeing import IMAGE, SEEING, OracleTower, logprobs, make_image, make_prompt
from conftest import greedy, whole_only
from transformers import PreTrainedModel

from nanoinfer import LLM
from nanoinfer.engine.images import HeldImages, PromptImages
from nanoinfer.engine.sequence import Sequence
from nanoinfer.vision.spans import ImageSpan, VisionPrompt

MAX_TOKENS = 6


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, PreTrainedModel]]:
    """Return a function that makes a case's folder and transformers' model, once each."""

    @functools.cache
    def make(name: str) -> tuple[str, PreTrainedModel]:
        folder = tmp_path_factory.mktemp("seeing")
        return str(folder), build(SEEING[name], folder)

    return make


@pytest.fixture
def make_seeing_llm(
    seeing: Callable[[str], tuple[str, PreTrainedModel]], make_llm: Callable[..., LLM]
) -> Callable[..., LLM]:
    """Return a function that makes the LLM of a case, whose images transformers' tower encodes."""

    def make(name: str, **options: object) -> LLM:
        folder, model = seeing(name)
        llm = make_llm(folder, **options)
        llm.engine.ranks.call("holdings.see", OracleTower(model))
        return llm

    return make


def text(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(150, (count,), generator=generator).tolist()


def prompts(name: str, model: PreTrainedModel) -> list[VisionPrompt]:
    """One image or several of odd sizes, first, last and in between, some of them twice."""
    one, two, wide = (make_image(SEEING[name], *how) for how in ((3, 5, 0), (7, 2, 1), (11, 4, 2)))
    return [
        make_prompt(model, *parts)
        for parts in (
            [text(5, 0), one, text(9, 1)],
            [one, text(20, 2)],
            [text(30, 3), two, text(1, 4), wide, text(3, 5)],
            [text(17, 6), wide, wide, one, text(40, 7)],
            [text(2, 8), two],
        )
    ]


def generate(llm: LLM, prompts: list[VisionPrompt | list[int]], **settings: object) -> list[list[Sequence]]:
    """Run prompts, with images or without; returns the sequences of each.

    No placeholder is generated: transformers would look for an image.
    """
    how = {"max_tokens": MAX_TOKENS, **settings}
    params = greedy(ignore_eos=True, logprobs=0, logit_bias={IMAGE: -100.0}, **how)
    requests = []
    for prompt in prompts:
        requests.append(llm.engine.add_request(prompt, params))
    while not llm.engine.is_finished:
        llm.engine.step()
    return requests


def check(seq: Sequence, prompt: VisionPrompt, model: PreTrainedModel) -> None:
    """Check that each token is the likeliest after those before it, and that log-probabilities equal transformers'."""
    tokens = seq.output_token_ids
    assert len(tokens) == seq.params.max_tokens
    theirs = logprobs(model, prompt, tokens[:-1])
    rows = theirs[len(prompt.token_ids) - 1 :]
    ours = [entry[token] for entry, token in zip(seq.logprobs.logprobs(None), tokens, strict=True)]
    assert ours == pytest.approx(rows[range(len(tokens)), tokens].tolist(), abs=1e-4)
    assert tokens == rows.index_fill(1, torch.tensor(IMAGE), -torch.inf).argmax(dim=-1).tolist()
    if seq.params.prompt_logprobs is not None:
        given = prompt.token_ids[1:]
        ours = [entry[token] for entry, token in zip(seq.prompt_logprobs.logprobs(None), given, strict=True)]
        assert ours == pytest.approx(theirs[range(len(given)), given].tolist(), abs=1e-4)


@pytest.mark.parametrize("name", SEEING)
def test_images_equal_transformers(
    name: str, seeing: Callable[[str], tuple[str, PreTrainedModel]], make_seeing_llm: Callable[..., LLM]
) -> None:
    """Prompts are fresh, then prefix-cached, then in chunks in a cache so small that sequences are preempted."""
    model, case = seeing(name)[1], SEEING[name]
    given = prompts(name, model)
    llm = make_seeing_llm(name, **case.small)
    for settings in {"prompt_logprobs": 0}, {}:
        for (seq,), prompt in zip(generate(llm, given, **settings), given, strict=True):
            check(seq, prompt, model)
    assert sum(seq.num_cached_tokens for (seq,) in generate(llm, given)) > 0
    llm = make_seeing_llm(name, **case.tight)
    for (seq,), prompt in zip(generate(llm, given), given, strict=True):
        check(seq, prompt, model)


@pytest.mark.usefixtures("no_foresight")
@pytest.mark.parametrize("name", ["gemma3", *whole_only(["qwen2.5-vl"]), "qwen3-vl"])
def test_company_samples_and_preemption(
    name: str, seeing: Callable[[str], tuple[str, PreTrainedModel]], make_seeing_llm: Callable[..., LLM]
) -> None:
    """Prompts with images run beside text, with several samples, in too few blocks for all."""
    model = seeing(name)[1]
    texts = [make_prompt(model, text(count, count)) for count in (1, 30, 60)]
    given = [*prompts(name, model), *texts]
    llm = make_seeing_llm(name, **SEEING[name].small, num_kvcache_blocks=24)
    asked = [prompt if prompt.spans else prompt.token_ids for prompt in given]
    for seqs, prompt in zip(generate(llm, asked, max_tokens=24, n=2), given, strict=True):
        for seq in seqs:
            check(seq, prompt, model)
    assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("name", ["qwen3-vl", *whole_only(["gemma3", "mistral3", "qwen2.5-vl", "qwen3-vl-moe"])])
def test_two_ranks(
    name: str, seeing: Callable[[str], tuple[str, PreTrainedModel]], make_seeing_llm: Callable[..., LLM]
) -> None:
    model = seeing(name)[1]
    given = prompts(name, model)
    llm = make_seeing_llm(name, device="cpu", tensor_parallel_size=2, **SEEING[name].small)
    for (seq,), prompt in zip(generate(llm, given), given, strict=True):
        check(seq, prompt, model)


def test_equal_images_share_blocks_and_others_do_not(
    seeing: Callable[[str], tuple[str, PreTrainedModel]], make_seeing_llm: Callable[..., LLM]
) -> None:
    model = seeing("qwen3-vl")[1]
    llm = make_seeing_llm("qwen3-vl", **SEEING["qwen3-vl"].small)
    image, equal, other = (make_image(SEEING["qwen3-vl"], 6, 6, seed) for seed in (0, 0, 1))
    before, behind = text(20, 0), text(20, 1)
    for own, cached in ((image, 0), (equal, 64), (other, 16), (image, 64), (other, 64)):
        prompt = make_prompt(model, before, own, behind)
        ((seq,),) = generate(llm, [prompt])
        check(seq, prompt, model)
        assert seq.num_cached_tokens == cached


def test_an_image_that_one_step_cannot_hold(
    seeing: Callable[[str], tuple[str, PreTrainedModel]], make_seeing_llm: Callable[..., LLM]
) -> None:
    """Where an image's tokens see each other. Of other models, chunks cut images."""
    prompt = prompts("gemma3", seeing("gemma3")[1])[0]
    llm = make_seeing_llm("gemma3", **{**SEEING["gemma3"].small, "max_num_batched_tokens": 15})
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=15: must be at least 16 for a prompt with an image"):
        llm.engine.add_request(prompt, greedy())
    assert llm.engine.is_finished


def test_what_cannot_be_kept_is_refused(
    seeing: Callable[[str], tuple[str, PreTrainedModel]], make_seeing_llm: Callable[..., LLM]
) -> None:
    prompt = prompts("qwen3-vl", seeing("qwen3-vl")[1])[0]
    llm = make_seeing_llm("qwen3-vl", deterministic=True, **SEEING["qwen3-vl"].small)
    with pytest.raises(ValueError, match="deterministic=True: must be False for a prompt with images"):
        llm.engine.add_request(prompt, greedy())


A, B, TEXT = b"a" * 16, b"b" * 16, 7


def images_of(*spans: tuple[bytes, int, int], tokens: str, whole: bool = False) -> PromptImages:
    """Return the images of a prompt; tokens: "x" stands for a placeholder"""
    ids = [IMAGE if token == "x" else TEXT for token in tokens]
    pixels = tuple[dict[str, torch.Tensor], ...]({} for _ in spans)
    return PromptImages(VisionPrompt(ids, tuple(ImageSpan(*span) for span in spans), None, 0, pixels), whole)


def test_content_tells_images_and_places_apart() -> None:
    here = images_of((A, 1, 4), (B, 6, 2), tokens=".xxxx.xx..")
    same = images_of((A, 1, 4), (A, 6, 2), tokens=".xxxx.xx..")
    moved = images_of((A, 2, 4), (B, 6, 2), tokens="..xxxxxx..")
    assert here.content(0, 4) == same.content(0, 4) == images_of((A, 1, 4), tokens=".xxxx").content(0, 4)
    assert here.content(0, 1) == here.content(8, 10) == b""
    assert len({here.content(0, 8), same.content(0, 8), moved.content(0, 8), here.content(4, 8)}) == 4
    assert here.content(0, 4) != moved.content(0, 4)


def test_chunks_say_which_placeholders_of_an_image_they_have() -> None:
    """Between those of one image, other tokens may stand."""
    images = images_of((A, 1, 4), (B, 7, 2), tokens=".xx.xx.xx")
    whole, first, second = images.chunk(0, 9), images.chunk(0, 5), images.chunk(5, 8)
    assert whole
    assert first
    assert second
    assert whole.parts == [(A, 0, array("i", [1, 2, 4, 5])), (B, 0, array("i", [7, 8]))]
    assert first.parts == [(A, 0, array("i", [1, 2, 4]))]
    assert second.parts == [(A, 3, array("i", [0])), (B, 0, array("i", [2]))]
    assert images.chunk(6, 7) is None


def test_a_chunk_ends_before_an_image_that_it_would_cut() -> None:
    whole, causal = (images_of((A, 1, 4), tokens=".xxxx..", whole=whole) for whole in (True, False))
    assert [whole.last_end(end) for end in range(1, 8)] == [1, 1, 1, 1, 5, 6, 7]
    assert [causal.last_end(end) for end in range(1, 8)] == [1, 2, 3, 4, 5, 6, 7]
    assert (whole.largest, causal.largest) == (4, 1)


def test_ranks_keep_the_images_that_a_step_cuts() -> None:
    images = images_of((A, 1, 4), (B, 6, 2), tokens=".xxxx.xx..")
    held = HeldImages()

    def plan(*chunks: tuple[int, int]) -> tuple[list[bytes], list[bytes]] | None:
        message = held.plan((images, *chunk) for chunk in chunks)
        return None if message is None else ([key for key, _ in message.new], message.kept)

    assert plan((0, 1)) is None
    assert plan((0, 3)) == ([A], [A])
    assert plan((3, 7), (0, 10)) == ([B], [B])
    assert plan((8, 10)) == ([], [])  # somebody else's chunk: B goes, and comes again
    assert plan((7, 10)) == ([B], [])
    assert plan() is None
