"""Trials: the messages of steps that are run before the first request, and the memory that a step takes."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial

import torch

from nanoinfer.attention.cache_layout import lay_out
from nanoinfer.attention.in_order_backend import InOrderBackend
from nanoinfer.config import Config
from nanoinfer.kernels.attention.prefill.long_prefill import MOST_KEYS, is_faster
from nanoinfer.kernels.attention.prefill.prefill_plan import LONG
from nanoinfer.kernels.delta.chunks import CHUNK, STRETCH
from nanoinfer.media.pixels import Pixels
from nanoinfer.media.processor import MediaProcessor
from nanoinfer.media.spans import Encoded
from nanoinfer.media.tower.tower import TransformersTower
from nanoinfer.pooling.read import Read
from nanoinfer.runner.drafting.sizes import VerifySize
from nanoinfer.runner.memory.kv_cache import KVCacheSpec
from nanoinfer.runner.message import ChunkMessage, DraftingMessage, JoinMessage, PrefillMessage
from nanoinfer.runner.steps.kinds import DecodeKind

CHECKED_TOKENS = 300  # whose attention is compared: more than a chunk of keys has, so that some see more chunks
MANY_TOKENS = 1024  # more than such as attend to latents, and few beside a long context


class Trials:
    """Steps whose block tables name one block everywhere."""

    def __init__(self, config: Config, max_blocks: list[int], device: torch.device) -> None:
        """max_blocks: see Steps."""
        self._config, self._device = config, device
        self.adapters = (-1, 0) if config.max_adapters else (-1,)  # that all rows of a step have
        self._tables = [[0] * count for count in max_blocks]

    def prompt(self, tokens: int, start: int = 0, adapter: int = -1) -> PrefillMessage:
        """Return a step that computes a chunk of one prompt; start: the chunk's first position."""
        chunk = ChunkMessage(array("i", [0]) * tokens, start, self._tables, adapter=adapter)
        return PrefillMessage([], 0, [chunk], [])

    def prefills(self) -> list[PrefillMessage]:
        """Return steps of prompts of 1, 2, 4, ... tokens: by their number, products are left to other kernels."""
        most = min(self._config.max_model_len - 1, self._config.max_num_batched_tokens)
        sizes = [1 << power for power in range(most.bit_length())]
        return [self.prompt(size, adapter=adapter) for adapter in self.adapters for size in sizes]

    def largest_prefills(self) -> list[PrefillMessage]:
        """Return the prefill steps of which one takes the most memory, and which together run all kernels of such."""
        steps = [step for adapter in self.adapters for step in self._largest_prefills(adapter)]
        for step in steps:
            step.hidden_layers = [*self._config.hidden_layers]
            for chunk in step.chunks:
                chunk.hidden_from = 0
        return steps

    def _join(self, chunk: int, length: int) -> JoinMessage:
        """Let the prompt of a chunk join, whose text goes to the slot of the same number."""
        drafting = None
        if self._config.speculation is not None:
            drafting = DraftingMessage(array("i", [0]) * length, chunk, self._config.max_model_len)
        return JoinMessage(chunk, self._tables, 1.0, 0, drafting=drafting)

    def largest_decodes(self, verifying: list[VerifySize]) -> list[tuple[int, DecodeKind]]:
        """Return the rows and kinds of decode steps of which one takes the most memory.

        verifying: the sizes of steps that verify guesses
        """
        config, steps = self._config, list[tuple[int, DecodeKind]]()
        for adapter in self.adapters:
            steps.append((config.max_num_seqs, DecodeKind(config.shares_prefixes, adapter >= 0)))
            if verifying:
                rows, guesses = max(verifying, key=sum)
                steps.append((rows, DecodeKind(config.shares_prefixes, adapter >= 0, guesses)))
        return steps

    def _largest_prefills(self, adapter: int) -> list[PrefillMessage]:
        config = self._config
        tokens, most = config.max_num_batched_tokens, config.max_model_len - 1
        prompts = min(config.max_num_seqs, tokens)
        lengths = [min(tokens // prompts + (i < tokens % prompts), most) for i in range(prompts)]
        generates = config.description.generates
        read = None if generates else Read("mean")  # which needs more memory than others
        chunks = [
            ChunkMessage(array("i", [0]) * length, 0, self._tables, adapter=adapter, read=read) for length in lengths
        ]
        joins = [self._join(chunk, length) for chunk, length in enumerate(lengths if generates else [])]
        steps = [PrefillMessage([], 0, chunks, joins)]
        length = min(tokens, most)
        may_attend = config.attention_backend == "triton" and not config.is_in_order
        if length >= LONG and may_attend and is_faster(self._device):
            # cuDNN takes more memory. Behind a multiple of MOST_KEYS, our kernel and cuDNN both attend.
            start = min(MOST_KEYS + CHUNK, most - length) // CHUNK * CHUNK  # where states let chunks begin
            steps.append(self.prompt(length, start, adapter))
        if config.description.has_states and length > STRETCH * CHUNK:
            steps.append(self.prompt(length, 0, adapter))  # what its stretches add takes memory, too
        if config.description.latent is not None:
            # What is made of the longest context's latents takes as much memory, however many tokens attend to it.
            length = min(length, MANY_TOKENS)
            steps.append(self.prompt(length, most - length, adapter))
        return steps


def largest_pixels(config: Config) -> Pixels:
    """Return the pixels of an image, or of a video's frames at once, so large that of none more is made.

    config: of an LLM that sees
    """
    from transformers import AutoTokenizer  # here, for a model that cannot see does without

    assert config.hf_config is not None
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer or config.model, trust_remote_code=False)
    processor = MediaProcessor(config.model, config.hf_config, tokenizer, config.image_options)
    return dict(processor.largest())


def media_bytes(config: Config, tower: TransformersTower | None) -> int:
    """Encode the largest batch of images; returns the bytes that images take, beside a step's other memory.

    Returns 0 without a tower, and on the CPU, where the plan does not count this memory.
    """
    encoded = list[Encoded]()
    if tower is None or config.device == "cpu":
        return 0
    image = largest_pixels(config)
    peak = peak_bytes(lambda: encoded.extend(tower.try_largest(image)))
    token_bytes = encoded[0].num_bytes // len(encoded[0].embeddings)
    return peak + 2 * token_bytes * config.max_num_batched_tokens  # of all ranks' images, and of a step together


def check_attention(config: Config, backend: InOrderBackend, num_ranks: int, device: torch.device) -> None:
    """Let the backend compare bits, of random numbers in the shapes of one of so many ranks."""
    model = config.description
    heads = model.num_heads // num_ranks
    generator = torch.Generator(device).manual_seed(0)
    numbers = partial(torch.randn, generator=generator, device=device, dtype=config.torch_dtype)
    for group in config.cache_layout.part(range(model.num_layers)).groups:
        layout = lay_out([group.pages], group.block_size, group.block_size)
        cache = KVCacheSpec(layout, config.torch_cache_dtype, by_head=False).allocate(1, device)
        cache.memory.copy_(numbers(cache.memory.shape))
        q = numbers(CHECKED_TOKENS, heads, group.pages.head_dim)
        has_sinks = any(model.sinks[layer] for layer in group.layers if model.sinks)
        sinks = numbers(heads).float() if has_sinks else None
        slopes = torch.tensor(model.alibi[:heads], device=device) if model.alibi else None
        how = group.window, model.score_cap, sinks, slopes
        backend.check(q, cache.layers[0], *how)


def peak_bytes(step: Callable[[], object]) -> int:
    """Return the device memory, in bytes, that a step takes while it runs."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
