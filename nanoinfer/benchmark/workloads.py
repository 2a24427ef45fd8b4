"""Workloads of bench.py: requests of random tokens."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

from nanoinfer.benchmark.eyes.eyes import SIDE, Eyes, draw_images

SPREAD = 1.0  # standard deviation of a log-normal length's logarithm
MAX_TOKEN = 10000  # the largest random token id in prompts, if the vocabulary has it


@dataclass(frozen=True)
class Recipe:
    """The recipe of a workload, and the engine's limits that suit it; lengths are (least, most) tokens."""

    num_seqs: int = 256
    prompt_lens: tuple[int, int] = (100, 1024)
    output_lens: tuple[int, int] = (100, 1024)
    prefix_len: int = 0  # tokens that come before every prompt, the same for all
    images: int = 0  # so many different ones come before the prompts, in turn
    samples: int = 1  # of each prompt
    mean_lens: tuple[int, int] | None = None  # lengths of prompts and outputs are log-normal with these means
    mean_output: int | None = (
        None  # outputs have geometric lengths of this mean, at most output_lens; None: output_lens
    )
    repeat_rate: float | None = None  # at which guesses of the next token hold, with random weights; None: by chance
    max_num_seqs: int = 512
    max_model_len: int = 4096
    kv_tokens: int | None = None  # the KV cache has the fewest blocks that hold so many; None: what the memory holds

    def draw(self, vocab_size: int, eyes: Eyes | None = None) -> Workload:
        """Draw prompts and output lengths from seed 0, in nano-vLLM's order; the shared prefix is drawn last.

        Images are drawn for each repeat.
        eyes: of the model, if the workload has images
        """
        source = random.Random(0)
        rand, (mean_in, mean_out) = source.randint, self.mean_lens or (None, None)
        top = min(MAX_TOKEN, vocab_size - 1)
        prompts = [
            [rand(0, top) for _ in range(draw_length(source, self.prompt_lens, mean_in))] for _ in range(self.num_seqs)
        ]
        output_lens = [draw_length(source, self.output_lens, mean_out) for _ in range(self.num_seqs)]
        prefix = [rand(0, top) for _ in range(self.prefix_len)]
        images = min(self.images, self.num_seqs)
        if images:
            assert eyes is not None
            prefix = eyes.seen
        shared = len(prefix) if images < self.num_seqs else 0
        prompts = [prefix + prompt for prompt in prompts]
        stop_ids = [] if self.mean_output is None else draw_stop_ids(self.mean_output, vocab_size)
        return Workload(prompts, output_lens, shared, self.samples, max(1, images), images, eyes, stop_ids)

    def __str__(self) -> str:
        prompt, output = ("-".join(map(str, sorted(set(lens)))) for lens in (self.prompt_lens, self.output_lens))
        prefix = f"{self.prefix_len} + " if self.prefix_len else ""
        prefix += f"one of {self.images} images of {SIDE} x {SIDE} + " if self.images else ""
        if self.mean_lens is not None:
            prompt, output = (
                f"{mean} on average ({lens})" for mean, lens in zip(self.mean_lens, (prompt, output), strict=True)
            )
        if self.mean_output is not None:
            output = f"{self.mean_output} on average (at most {output})"
        samples = f", {self.samples} samples" if self.samples > 1 else ""
        samples += f", guesses hold at rate {self.repeat_rate}" if self.repeat_rate is not None else ""
        cache = f", {self.kv_tokens:,} in the KV cache" if self.kv_tokens else ""
        return f"{prefix}{prompt} in, {'embedded' if self.only_reads else f'{output} out'}{samples}{cache}"

    @property
    def only_reads(self) -> bool:
        """Whether texts are embedded, and get no token."""
        return self.output_lens == (0, 0)

    def num_blocks(self, block_size: int) -> int | None:
        """Return how many blocks of so many tokens the KV cache has; None: as many as the memory holds."""
        return None if self.kv_tokens is None else -(-self.kv_tokens // block_size)


WORKLOADS = {
    "nano": Recipe(),  # nano-vLLM's own
    "refill": Recipe(num_seqs=1024, max_num_seqs=256),  # waiting requests fill the rows of those that end
    "tight": Recipe(kv_tokens=110_000),  # what 30b-a3b leaves of 80 GB
    "stream": Recipe(num_seqs=1, prompt_lens=(128, 128), output_lens=(512, 512)),
    "prefix": Recipe(prefix_len=1024),
    "samples": Recipe(num_seqs=32, prompt_lens=(1024, 1024), output_lens=(512, 512), samples=16),
    "window": Recipe(num_seqs=16, prompt_lens=(16384, 16384), output_lens=(256, 256), max_model_len=16640),
    "long": Recipe(num_seqs=8, prompt_lens=(32768, 32768), output_lens=(256, 256), max_model_len=33024),
    "chat": Recipe(num_seqs=1000, prompt_lens=(4, 2048), output_lens=(4, 2048), mean_lens=(215, 198)),
    "answers": Recipe(num_seqs=32, prompt_lens=(128, 128), output_lens=(8192, 8192), max_model_len=8320),
    "streamed": Recipe(prompt_lens=(512, 512), output_lens=(32, 32), max_num_seqs=256, max_model_len=1040),
    "embed": Recipe(num_seqs=10_000, prompt_lens=(200, 200), output_lens=(0, 0)),
    "images": Recipe(prompt_lens=(64, 64), output_lens=(128, 128), images=256),
    "same-images": Recipe(prompt_lens=(64, 64), output_lens=(128, 128), images=16),
    "repeat": Recipe(num_seqs=1, prompt_lens=(128, 128), output_lens=(512, 512), repeat_rate=0.7),
    "rollouts": Recipe(
        num_seqs=32,
        prompt_lens=(512, 512),
        output_lens=(4096, 4096),
        mean_output=512,
        samples=16,
        repeat_rate=0.7,
        max_model_len=4608,
    ),
}


@dataclass
class Workload:
    """Prompts, and how many tokens to generate for each sample; 0: they are embedded.

    prompts: their tokens, in which an image has all of its placeholders
    prefix_len: so many first tokens they share, with those of `prefixes` that have the same; in turn
    samples: of each prompt
    images: how many come before the prompts, in turn; eyes: of the model that sees them
    stop_ids: tokens that end a sample
    """

    prompts: list[list[int]]
    output_lens: list[int]
    prefix_len: int = 0
    samples: int = 1
    prefixes: int = 1
    images: int = 0
    eyes: Eyes | None = None
    stop_ids: list[int] = field(default_factory=list)

    def repeat(self, index: int, vocab_size: int) -> list[Any]:
        """Return the prompts as generate takes them.

        Each repeat has other tokens, and other images, so that none finds the last one's prefixes cached.
        """
        top = min(MAX_TOKEN, vocab_size - 1) + 1
        if not self.images:
            return [[(token + index) % top for token in prompt] for prompt in self.prompts]
        assert self.eyes is not None
        images, given, length = draw_images(self.images, index), self.eyes.given, len(self.eyes.seen)
        texts = [[(token + index) % top for token in prompt[length:]] for prompt in self.prompts]
        return [
            {"prompt_token_ids": given + text, "multi_modal_data": {"image": [images[number % self.images]]}}
            for number, text in enumerate(texts)
        ]

    def as_it_ended(self, output_lens: list[int]) -> Workload:
        """Return the workload of a repeat whose samples had these lengths, those of a prompt one after another.

        Each sample is a request then, which shares its prompt.
        """
        if not self.stop_ids:
            return self
        count, length = len(self.prompts), len(self.prompts[0])
        turns = [output_lens[start :: self.samples] for start in range(self.samples)]
        return Workload(self.prompts * self.samples, [out for turn in turns for out in turn], length, prefixes=count)

    @property
    def tokens_in(self) -> int:
        """Prompt tokens of one repeat."""
        return sum(map(len, self.prompts))

    @property
    def tokens_out(self) -> int:
        """Generated tokens of one repeat."""
        return self.samples * sum(self.output_lens)


def draw_length(source: random.Random, limits: tuple[int, int], mean: int | None) -> int:
    """Return a random length within limits; log-normal, if a mean is given, which holds for lengths without limits."""
    if mean is None:
        return source.randint(*limits)
    least, most = limits
    drawn = source.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)
    return min(most, max(least, round(drawn)))


def draw_stop_ids(mean: int, vocab_size: int) -> list[int]:
    """Return so many token ids that a text of random tokens ends after so many on average."""
    return random.Random(0).sample(range(vocab_size), max(1, round(vocab_size / mean)))
