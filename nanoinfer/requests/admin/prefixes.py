"""KeepsPrefixes: an LLM keeps what it has computed of a prompt on disk, for another run."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path

from nanoinfer.checks import short
from nanoinfer.config import Config
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.hints import hints_for
from nanoinfer.requests.door import Door
from nanoinfer.requests.inputs import Inputs, Prompt
from nanoinfer.requests.outputs import RequestOutput
from nanoinfer.requests.progress import UseTqdm
from nanoinfer.requests.prompts.stages import CallPrompts
from nanoinfer.requests.settings import NO_ADAPTERS
from nanoinfer.sampling_params import SamplingParams


class KeepsPrefixes(Door, ABC):
    """The methods of LLM that save and load prefixes."""

    config: Config
    _inputs: Inputs

    @abstractmethod
    def _generate(self, prompts: CallPrompts, use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Run the prompts of a call; returns their outputs."""

    @hints_for("save_prefix")
    def save_prefix(self, prompt: Prompt, folder: str | Path) -> int:
        """Compute a prompt, and save what the KV cache holds of it, for load_prefix; returns how many of its tokens.

        prompt: a text, a chat or token ids, as for generate, without images
        folder: where the files go; it comes into being whole, or not at all

        Whole blocks are saved, and where layers keep a state the newest snapshot: kvcache_block_size says how many
        tokens a block has. Each rank writes its own file, in safetensors.

        Raises ValueError for a prompt shorter than a block, a folder that is there, and several replicas. Raises
        RuntimeError if the disk is full, and while requests of add_request have not ended.
        """
        with self._door("ready"):
            name = _check_folder(folder)
            if os.path.lexists(name):
                raise ValueError(f"folder={name!r}: is there already: name another, or remove it")
            if self.config.has_replicas:
                raise ValueError(f"{self.config.named_replicas}: save_prefix needs an LLM without replicas")
            prepared = self._inputs.check_prompts([prompt], SamplingParams(max_tokens=1, detokenize=False), NO_ADAPTERS)
        (output,) = self._generate(prepared, use_tqdm=False)
        assert isinstance(self.engine, LLMEngine)
        with self._turn(alone=True), self.engine.consistent():
            return self.engine.save_prefix(output.prompt_token_ids, name)

    @hints_for("load_prefix")
    def load_prefix(self, folder: str | Path) -> int:
        """Load a saved prefix into the KV cache; returns how many tokens it has.

        folder: what save_prefix has written

        Later requests that begin with these tokens find them, as if this LLM had computed them. They stay as other
        cached prefixes do, until their blocks are needed.

        Raises ValueError, by name, for a prefix of another model, other weights, another dtype, number of ranks, block
        size or version, and for a folder that holds none. Raises RuntimeError if the KV cache has too few blocks, and
        while requests of add_request have not ended.
        """
        with self._door("ready"):
            name = _check_folder(folder)
        with self._turn(alone=True), self.engine.consistent():
            return self.engine.load_prefix(name)


def _check_folder(folder: object) -> str:
    if not isinstance(folder, (str, Path)) or str(folder) == "":
        raise ValueError(f"folder={short(folder)}: must be the path of a folder")
    return os.path.abspath(folder)
