"""What bench.py runs: requests of random tokens, and models of published shapes with random weights."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

SHAPE_FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "tie_word_embeddings", "vocab_size",
)  # fmt: skip
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 32, True, 2048),
    "0.6b": (1024, 3072, 28, 16, 8, 128, True, 151936),
    "1.7b": (2048, 6144, 28, 16, 8, 128, True, 151936),
    "4b": (2560, 9728, 36, 32, 8, 128, True, 151936),
    "8b": (4096, 12288, 36, 32, 8, 128, False, 151936),
    "14b": (5120, 17408, 40, 40, 8, 128, False, 151936),
    "32b": (5120, 25600, 64, 64, 8, 128, False, 151936),
}
MAX_TOKEN = 10000  # of the prompts' random tokens, in a vocabulary that has it


@dataclass(frozen=True)
class Recipe:
    """What a workload consists of, and the engine's limits that suit it; lengths are (least, most) tokens."""

    num_seqs: int = 256
    prompt_lens: tuple[int, int] = (100, 1024)
    output_lens: tuple[int, int] = (100, 1024)
    prefix_len: int = 0  # tokens that come before every prompt, the same for all
    max_num_seqs: int = 512
    max_model_len: int = 4096

    def draw(self, vocab_size: int) -> Workload:
        """Prompts and output lengths from seed 0, in nano-vLLM's order; the shared prefix last."""
        rand = random.Random(0).randint
        top = min(MAX_TOKEN, vocab_size - 1)
        prompts = [[rand(0, top) for _ in range(rand(*self.prompt_lens))] for _ in range(self.num_seqs)]
        output_lens = [rand(*self.output_lens) for _ in range(self.num_seqs)]
        prefix = [rand(0, top) for _ in range(self.prefix_len)]
        return Workload([prefix + prompt for prompt in prompts], output_lens, self.prefix_len)

    def __str__(self) -> str:
        prompt, output = ("-".join(map(str, sorted(set(lens)))) for lens in (self.prompt_lens, self.output_lens))
        prefix = f"{self.prefix_len} + " if self.prefix_len else ""
        return f"{prefix}{prompt} in, {output} out"


WORKLOADS = {
    "nano": Recipe(),  # nano-vLLM's own
    "refill": Recipe(num_seqs=1024, max_num_seqs=256),  # rows that end are filled again
    "stream": Recipe(num_seqs=1, prompt_lens=(128, 128), output_lens=(512, 512)),
    "prefix": Recipe(prefix_len=1024),
    "long": Recipe(num_seqs=8, prompt_lens=(32768, 32768), output_lens=(256, 256), max_model_len=33024),
}


@dataclass
class Workload:
    """Prompts, the first prefix_len tokens of all of them the same, and how many tokens to generate for each."""

    prompts: list[list[int]]
    output_lens: list[int]
    prefix_len: int = 0

    def repeat(self, index: int, vocab_size: int) -> list[list[int]]:
        """The prompts with other tokens in each repeat, so that none finds the last one's prefixes cached."""
        top = min(MAX_TOKEN, vocab_size - 1) + 1
        return [[(token + index) % top for token in prompt] for prompt in self.prompts]

    @property
    def tokens_in(self) -> int:
        """Prompt tokens of one repeat."""
        return sum(map(len, self.prompts))

    @property
    def tokens_out(self) -> int:
        """Generated tokens of one repeat."""
        return sum(self.output_lens)


def write_config(name: str, folder: str) -> None:
    """Write the config.json of a published shape."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **dict(zip(SHAPE_FIELDS, SHAPES[name], strict=True)),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "torch_dtype": "bfloat16",
    }
    (Path(folder) / "config.json").write_text(json.dumps(config))
