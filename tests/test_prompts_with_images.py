"""Compares prompts with images with transformers: greedy tokens and log-probabilities, in float32."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import HAS_CUDA, greedy, of_each_kind, whole_only

pytest.importorskip("PIL")

from cases import MULTIMODAL, SHAPE
from cases.multimodal import MROPE
from cases.pictures import picture
from cases.vision import SEEING, processor_of
from PIL.Image import Image
from transformers import AutoConfig, AutoTokenizer

from nanoinfer import LLM, SamplingParams
from nanoinfer.engine.media import MediaFeed, PromptMedia
from nanoinfer.engine.sequence import Sequence
from nanoinfer.media.ahead import PixelsAhead
from nanoinfer.media.pixels import COUNT, Pixels, PixelsOnDemand, PixelSource, join, normalised
from nanoinfer.media.spans import Encoded, MediaPrompt, MediaSpan, Tower
from nanoinfer.models import describe
from nanoinfer.runner.media_messages import MediaPart

MAX_TOKENS = 6
ERROR = 3e-4 if HAS_CUDA else 1e-4  # of a log-probability


class Checkpoint:
    """A small checkpoint that sees, its processor, and transformers' model of it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder, self.case, self._seeing = str(folder), MULTIMODAL[SEEING[name].case], SEEING[name]
        self.model = self._seeing.build(folder)
        config = self.model.config
        self.processor = processor_of(self.folder, config)
        takes_videos = self.processor.videos is not None
        self.placeholders: list[int] = [config.image_token_id, *([config.video_token_id] if takes_videos else [])]
        self._image: list[int] = AutoTokenizer.from_pretrained(folder).encode(self._seeing.prompt)

    def prompt(self, *parts: list[int] | Image) -> MediaPrompt:
        """Put a prompt of text and images together."""
        tokens = [token for part in parts for token in (part if isinstance(part, list) else self._image)]
        return self.processor.prepare("prompt", tokens, [part for part in parts if not isinstance(part, list)])

    def prompts(self) -> list[MediaPrompt]:
        """One image or several of odd sizes, first, last and in between, some of them twice."""
        one, two, wide = picture(61, 97), picture(150, 40), picture(130, 120)
        mixtures = (
            [text(5, 0), one, text(9, 1)],
            [wide, text(20, 2)],
            [text(30, 3), two, text(1, 4), wide, text(3, 5)],
            [text(17, 6), wide, text(1, 7), wide, text(2, 8), one, text(40, 9)],
            [text(2, 10), two],
        )
        return [self.prompt(*parts) for parts in mixtures]

    @torch.inference_mode()
    def logprobs(self, prompt: MediaPrompt, generated: list[int]) -> torch.Tensor:
        """Return transformers' log-probabilities after each token, [tokens, vocabulary]."""
        types = torch.zeros(1, len(prompt.token_ids) + len(generated), dtype=torch.int64)
        for span in prompt.spans:
            types[0, span.start : span.start + span.count] = 1
        tokens = torch.tensor([[*prompt.token_ids, *generated]])
        # Spans of one image share their pixels.
        pixels = [own for span, own in zip(prompt.spans, prompt.pixels, strict=True) if span.first == 0]
        names = (pixels[0].keys() if pixels else set()) - {COUNT}
        inputs = {name: join([own[name] for own in pixels]) for name in names}
        if pixels and hasattr(self.model.model, "vision_model"):  # takes tiles of all images of a prompt
            inputs = {name: tensor[None] for name, tensor in inputs.items()}
        elif pixels and hasattr(self.model.model, "merger"):  # takes patches of all images side by side
            inputs["pixel_values"] = torch.cat([own["pixel_values"] for own in pixels], dim=-1)
        elif pixels and "mistral" not in self._seeing.case:
            inputs["token_type_ids" if "gemma3" in self._seeing.case else "mm_token_type_ids"] = types
        if pixels and "unified" in self._seeing.case:
            inputs["attention_mask"] = self._masks(types)
        return self.model(input_ids=tokens, **inputs).logits[0].float().log_softmax(dim=-1)

    def _masks(self, types: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the masks that transformers makes where it generates; without them its model lets an image's tokens
        see each other in all layers, which Gemma 4 was not trained for."""
        embeddings = torch.empty(*types.shape, 0)
        places = torch.arange(types.shape[1])[None]
        return self.model.create_masks_for_generate(
            self.model.config, embeddings, None, None, places, mm_token_type_ids=types
        )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Return a function that makes a case's checkpoint, once each."""
    return functools.cache(lambda name: Checkpoint(name, tmp_path_factory.mktemp("seeing")))


def text(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 2000, count).tolist()


def generate(
    llm: LLM, checkpoint: Checkpoint, prompts: list[MediaPrompt | list[int]], **settings: object
) -> list[list[Sequence]]:
    """Run prompts, with images or without; returns the sequences of each.

    No placeholder is generated: transformers would look for an image.
    """
    how = {"max_tokens": MAX_TOKENS, **settings}
    params = greedy(ignore_eos=True, logprobs=0, logit_bias=dict.fromkeys(checkpoint.placeholders, -100.0), **how)
    requests = [llm.engine.add_request(prompt, params) for prompt in prompts]
    while not llm.engine.is_finished:
        llm.engine.step()
    return requests


def check(seq: Sequence, prompt: MediaPrompt, checkpoint: Checkpoint) -> None:
    """Check that each token is the likeliest after those before it, and that log-probabilities equal transformers'."""
    tokens = seq.output_token_ids
    assert len(tokens) == seq.params.max_tokens
    theirs = checkpoint.logprobs(prompt, tokens[:-1])
    rows = theirs[len(prompt.token_ids) - 1 :]
    ours = [entry[token] for entry, token in zip(seq.logprobs.logprobs(None), tokens, strict=True)]
    assert ours == pytest.approx(rows[range(len(tokens)), tokens].tolist(), abs=ERROR)
    assert tokens == rows.index_fill(1, torch.tensor(checkpoint.placeholders), -torch.inf).argmax(dim=-1).tolist()
    if seq.params.prompt_logprobs is not None:
        given = prompt.token_ids[1:]
        ours = [entry[token] for entry, token in zip(seq.prompt_logprobs.logprobs(None), given, strict=True)]
        assert ours == pytest.approx(theirs[range(len(given)), given].tolist(), abs=ERROR)


def run(llm: LLM, checkpoint: Checkpoint, **settings: object) -> list[Sequence]:
    """Generate from the checkpoint's prompts, check the results, and return the sequences."""
    prompts = checkpoint.prompts()
    seqs = [seq for (seq,) in generate(llm, checkpoint, prompts, **settings)]
    for seq, prompt in zip(seqs, prompts, strict=True):
        check(seq, prompt, checkpoint)
    return seqs


OF_KINDS = ["gemma3", "mistral3", "qwen2.5-vl", "qwen3-vl", "qwen3.5"]
FURTHER = [name for name in SEEING if name not in OF_KINDS]


@pytest.mark.parametrize("name", [*OF_KINDS, *whole_only(FURTHER)])
def test_images_equal_transformers(
    name: str, checkpoint: Callable[[str], Checkpoint], make_llm: Callable[..., LLM]
) -> None:
    """Prompts are fresh, then prefix-cached, then in chunks, several of which cut an image of causal tokens."""
    own = checkpoint(name)
    llm = make_llm(own.folder, **own.case.small)
    run(llm, own, prompt_logprobs=0)
    assert sum(seq.num_cached_tokens for seq in run(llm, own)) > 0
    largest = own.processor.images.largest().count if any(llm.config.description.whole_images) else 1
    most = 64 if own.case.keeps_states else max(19, largest)
    run(make_llm(own.folder, **own.case.small, max_num_batched_tokens=most), own)


@pytest.mark.usefixtures("no_foresight")
@pytest.mark.parametrize("name", [*whole_only(["gemma3", "qwen2.5-vl"]), "qwen3-vl"])
def test_company_samples_and_preemption(
    name: str, checkpoint: Callable[[str], Checkpoint], make_llm: Callable[..., LLM]
) -> None:
    """Prompts with images run beside text, with several samples, in too few blocks for all."""
    own = checkpoint(name)
    texts = [MediaPrompt(text(count, count), (), None, 0, (), {}) for count in (1, 30, 60)]
    prompts = [*own.prompts(), *texts]
    llm = make_llm(own.folder, **own.case.small, num_kvcache_blocks=24)
    asked = [prompt if prompt.spans else prompt.token_ids for prompt in prompts]
    for seqs, prompt in zip(generate(llm, own, asked, max_tokens=24, n=2), prompts, strict=True):
        for seq in seqs:
            check(seq, prompt, own)
    assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.whole
def test_triton(checkpoint: Callable[[str], Checkpoint], make_llm: Callable[..., LLM]) -> None:
    own = checkpoint("gemma3")
    run(make_llm(own.folder, **own.case.small, attention_backend="triton"), own)


@pytest.mark.parametrize("name", ["qwen3-vl", *whole_only(name for name in SEEING if name != "qwen3-vl")])
def test_two_ranks(name: str, checkpoint: Callable[[str], Checkpoint], make_llm: Callable[..., LLM]) -> None:
    own = checkpoint(name)
    run(make_llm(own.folder, device="cpu", tensor_parallel_size=2, **own.case.small), own)


def test_equal_images_share_blocks_and_others_do_not(
    checkpoint: Callable[[str], Checkpoint], make_llm: Callable[..., LLM]
) -> None:
    own = checkpoint("qwen3-vl")
    llm = make_llm(own.folder, **own.case.small)
    image, equal, other = (picture(130, 120, seed) for seed in (0, 0, 1))
    before, behind = text(20, 0), text(20, 1)
    for picked, cached in ((image, 0), (equal, 48), (other, 16), (image, 48), (other, 48)):
        prompt = own.prompt(before, picked, behind)
        ((seq,),) = generate(llm, own, [prompt])
        check(seq, prompt, own)
        assert seq.num_cached_tokens == cached


class Watched:
    """An LLM's tower, and how many images it has encoded in each call."""

    def __init__(self, tower: Tower) -> None:
        self._tower = tower
        self.counts: list[int] = []

    def encode(self, pixels: Seq[Pixels]) -> list[Encoded]:
        if pixels:
            self.counts.append(len(pixels))
        return self._tower.encode(pixels)


def watch(llm: LLM) -> Watched:
    images = llm.engine.ranks.runner.holdings.media
    assert images is not None
    images._tower = tower = Watched(images._tower)
    return tower


@pytest.mark.usefixtures("no_foresight")
def test_embeddings_are_kept_for_images_that_come_again(
    checkpoint: Callable[[str], Checkpoint], make_llm: Callable[..., LLM]
) -> None:
    """For later chunks, after preemption, and for other prompts; until the tower changes."""
    own = checkpoint("qwen3-vl")
    llm = make_llm(own.folder, **own.case.small, max_num_batched_tokens=64, num_kvcache_blocks=24)
    tower = watch(llm)
    for seqs, prompt in zip(generate(llm, own, own.prompts(), max_tokens=40, n=2), own.prompts(), strict=True):
        check(seqs[0], prompt, own)
    assert llm.engine.scheduler.num_preemptions > 0
    llm.engine.reset_prefix_cache()
    run(llm, own)
    assert sum(tower.counts) == 3
    llm.engine.reset_prefix_cache()
    llm.engine.ranks.call("holdings.media.forget")
    run(llm, own)
    assert sum(tower.counts) == 6


def test_no_room_to_keep_embeddings(checkpoint: Callable[[str], Checkpoint], make_llm: Callable[..., LLM]) -> None:
    own = checkpoint("qwen3-vl")
    llm = make_llm(own.folder, **own.case.small, max_num_batched_tokens=19)
    images = llm.engine.ranks.runner.holdings.media
    assert images is not None
    images._kept.most_bytes = 0
    run(llm, own)


def test_embeddings_without_room_are_made_ahead_once(
    checkpoint: Callable[[str], Checkpoint], make_llm: Callable[..., LLM]
) -> None:
    """And again by the step that needs them."""
    own = checkpoint("qwen3-vl")
    llm = make_llm(own.folder, **own.case.small, max_num_seqs=1)
    images = llm.engine.ranks.runner.holdings.media
    assert images is not None
    images._kept.most_bytes = 0
    tower, prompts = watch(llm), own.prompts()[:2]
    for (seq,), prompt in zip(generate(llm, own, prompts, max_tokens=60), prompts, strict=True):
        check(seq, prompt, own)
    assert sum(tower.counts) == 3


def test_images_are_encoded_beside_decode(
    checkpoint: Callable[[str], Checkpoint], make_llm: Callable[..., LLM]
) -> None:
    """While prompts wait for a row."""
    own = checkpoint("qwen3-vl")
    llm = make_llm(own.folder, **own.case.small, max_num_seqs=1)
    tower = watch(llm)
    seen: list[tuple[bool, int]] = []  # for each step whether it computed a prompt, and the images encoded by then
    llm.engine.on_step = lambda step: seen.append((step.num_prefill_tokens > 0, sum(tower.counts)))
    prompts = own.prompts()[:2]
    for (seq,), prompt in zip(generate(llm, own, prompts, max_tokens=60), prompts, strict=True):
        check(seq, prompt, own)
    ((last_prefill, _),) = [(number, is_prefill) for number, (is_prefill, _) in enumerate(seen) if is_prefill][1:]
    assert seen[last_prefill - 2][1] == 2


@pytest.mark.parametrize("ranks", [1, *whole_only([2])])
def test_a_changed_image_ends_its_requests_alone(
    ranks: int, checkpoint: Callable[[str], Checkpoint], make_llm: Callable[..., LLM]
) -> None:
    own = checkpoint("qwen3-vl")
    llm = make_llm(own.folder, device="cpu", tensor_parallel_size=ranks, **own.case.small)
    image = np.asarray(picture(64, 64)).copy()
    good = own.prompts()[0]
    bad = own.processor.prepare("prompts[1]", own._image + text(5, 0), [image])
    image[0, 0] ^= 1
    (fine,), *faulty = generate(llm, own, [good, bad, bad])
    check(fine, good, own)
    for (seq,) in faulty:
        assert (seq.finish_reason, seq.num_output_tokens) == ("error", 0)
        assert "image 0 of prompts[1] has changed since it was first read" in str(seq.stop_reason)
    assert llm.engine.is_finished


def test_an_image_that_one_step_cannot_hold(
    checkpoint: Callable[[str], Checkpoint], make_llm: Callable[..., LLM]
) -> None:
    """Where an image's tokens see each other. Of other models, chunks cut images."""
    for name, most in (("gemma3", 4), ("gemma4", 70)):
        own = checkpoint(name)
        wanted = f"max_num_batched_tokens={most - 1}: must be at least {most}, the tokens of an image"
        with pytest.raises(ValueError, match=wanted):
            make_llm(own.folder, **own.case.small, max_num_batched_tokens=most - 1)


A, B, TEXT = b"a" * 16, b"b" * 16, 7


def media_of(*spans: tuple[bytes, int, int] | tuple[bytes, int, int, int], whole: bool = False) -> PromptMedia:
    """Return the images of a prompt of ten tokens."""
    pixels = tuple[dict[str, torch.Tensor], ...]({} for _ in spans)
    return PromptMedia(MediaPrompt([TEXT] * 10, tuple(MediaSpan(*span) for span in spans), None, 0, pixels, {}), whole)


def test_content_tells_images_and_places_apart() -> None:
    here, same, moved = (media_of((A, at, 4), (other, 6, 2)) for at, other in ((1, B), (1, A), (2, B)))
    assert here.content(0, 4) == same.content(0, 4) == media_of((A, 1, 4)).content(0, 4)
    assert here.content(0, 1) == here.content(8, 10) == b""
    assert len({here.content(0, 8), same.content(0, 8), moved.content(0, 8), here.content(4, 8)}) == 4
    assert here.content(0, 4) != moved.content(0, 4)
    assert media_of((A, 1, 2)).content(0, 4) != media_of((A, 1, 2, 2)).content(0, 4)


def test_chunks_say_which_placeholders_of_an_image_they_have() -> None:
    """Between those of one image, other tokens may stand."""
    images = media_of((A, 1, 2), (A, 4, 2, 2), (B, 7, 2))
    whole, first, second = images.chunk(0, 9), images.chunk(0, 5), images.chunk(5, 8)
    assert whole
    assert first
    assert second
    assert whole.parts == [MediaPart(A, 0, 1, 2), MediaPart(A, 2, 4, 2), MediaPart(B, 0, 7, 2)]
    assert first.parts == [MediaPart(A, 0, 1, 2), MediaPart(A, 2, 4, 1)]
    assert second.parts == [MediaPart(A, 3, 0, 1), MediaPart(B, 0, 2, 1)]
    assert images.chunk(6, 7) is None


def test_a_chunk_ends_before_an_image_that_it_would_cut() -> None:
    whole, causal = (media_of((A, 1, 4), whole=whole) for whole in (True, False))
    assert [whole.last_end(end) for end in range(1, 8)] == [1, 1, 1, 1, 5, 6, 7]
    assert [causal.last_end(end) for end in range(1, 8)] == [1, 2, 3, 4, 5, 6, 7]
    assert (whole.largest, causal.largest) == (4, 1)


def test_ranks_get_the_images_of_a_step_that_they_do_not_keep() -> None:
    images, kept = media_of((A, 1, 4), (B, 6, 2)), set[bytes]()
    feed = MediaFeed(kept.__contains__, is_pinned=False)

    def take(*chunks: tuple[int, int]) -> list[bytes]:
        return list(feed.take((images, *chunk) for chunk in chunks))

    assert take((0, 1)) == []
    assert take((0, 3)) == take((0, 5), (5, 6)) == [A]
    assert take((3, 7), (0, 10)) == [A, B]
    kept.add(A)
    assert take((0, 10)) == [B]


def test_no_pixels_are_made_ahead_for_later_steps() -> None:
    """Of a prompt that one step cannot hold, those of its next tokens alone."""
    feed = MediaFeed(lambda key: False, is_pinned=False)
    seq = Sequence([TEXT] * 10, SamplingParams(), 0, 64, media=media_of((A, 1, 4), (B, 6, 2)))
    wanted = [(0, 5, {A}), (0, 7, {A, B}), (4, 4, {A, B}), (5, 4, {B}), (8, 9, set())]
    for seq.num_scheduled, room, keys in wanted:
        feed.look_ahead([seq], room)
        assert feed._ahead._made.keys() == keys


def test_pixels_are_made_ahead_and_once() -> None:
    made: list[int] = []

    def load(source: PixelSource) -> torch.Tensor:
        made.append(source.given)
        return torch.full((2, 3), source.given, dtype=torch.uint8)

    scales = torch.tensor([[1.0] * 3, [2.0] * 3])[..., None].repeat(1, 1, 2)
    grid = {"grid": torch.ones(1, dtype=torch.int64)}
    sources = [PixelSource("image", number, bytes([number])) for number in range(3)]
    wanted = {source.key: PixelsOnDemand(grid, 56, scales, 1, source, load) for source in sources}
    ahead = PixelsAhead(is_pinned=False)
    ahead.look(wanted)
    ahead.look(wanted)
    for future in ahead._made.values():
        future.result()
    assert sorted(made) == [0, 1, 2]
    assert list(ahead.take_made(30)) == [b"\0", b"\1"]  # each has 12 values
    taken = ahead.take(wanted)
    assert sorted(made) == [0, 0, 1, 1, 2]
    for number, pixels in enumerate(taken.values()):
        assert isinstance(pixels, dict)
        assert pixels["pixel_values"].dtype == torch.uint8
        assert torch.equal(normalised(pixels), torch.full((2, 6), (number - 1) / 2))
    ahead.look(wanted)
    ahead.look({})
    assert not ahead._made


@pytest.mark.parametrize(
    ("name", "sections", "wanted"),
    [
        ("qwen2-vl", [2, 3, 4], "three counts that add up to 8"),
        ("qwen3-vl", [2, 3], "three counts"),
        ("qwen3-vl", [2, -1, 3], "three counts"),
    ],
)
def test_sections_that_no_rope_has(name: str, sections: list[int], wanted: str) -> None:
    case = MULTIMODAL[name]
    text_config = {**SHAPE, **case.settings, "rope_parameters": {**MROPE, "mrope_section": sections}}
    config = AutoConfig.for_model(
        case.model_type, architectures=[case.architecture], text_config=text_config, vision_config=case.vision
    )
    with pytest.raises(ValueError, match=re.escape(f"mrope_section={sections} in its config: must be {wanted}")):
        describe(config)


@pytest.mark.parametrize("name", of_each_kind(["gemma3", "qwen3-vl", "gemma4", "qwen2.5-vl", "qwen3.5"], 0, 1))
def test_beside_prompts_of_embeddings(name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Tokens of an image may see each other, and features go to inner layers; those of embeddings do neither."""
    SEEING[name].build(tmp_path)
    llm = make_llm(str(tmp_path), **MULTIMODAL[SEEING[name].case].small, device="cpu", num_kvcache_blocks=100)
    own = torch.randn(100, llm.config.description.hidden_size, generator=torch.Generator().manual_seed(0)) * 0.05
    seen = {"prompt": f"Is {SEEING[name].prompt}?", "multi_modal_data": {"image": picture(61, 97)}}
    prompts = [seen, {"prompt_embeds": own[:70]}, {"prompt_embeds": [[5, 6], own[:70], own]}, [5, 6, 7], seen]
    how = greedy(MAX_TOKENS, logprobs=0, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, how, use_tqdm=False), strict=True):
        llm.reset_prefix_cache()
        (alone,) = llm.generate([prompt], how, use_tqdm=False)
        assert alone.token_ids == output.token_ids
        ours, theirs = ([next(iter(entry.values())) for entry in one.logprobs] for one in (output, alone))
        assert ours == pytest.approx(theirs, abs=ERROR)
