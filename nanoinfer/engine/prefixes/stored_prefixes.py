"""StoredPrefixes: takes what the prefix cache holds of a prompt to disk, and back into the cache."""

from __future__ import annotations

import json
import re
from array import array
from hashlib import sha256
from pathlib import Path
from typing import Any

from nanoinfer.config import Config
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.prefixes.prefix_tree import NONE, Node
from nanoinfer.engine.ranks.ranks import Ranks
from nanoinfer.engine.sequence import Sequence
from nanoinfer.process.version import own_version
from nanoinfer.runner.memory.prefix_files import MANIFEST
from nanoinfer.sampling_params import SamplingParams

FORMAT = 1  # of the files
ADDRESS = re.compile("0x[0-9a-f]+")  # in an object's repr; it differs from process to process


class StoredPrefixes:
    """The prefixes of one engine, while no request runs. All ranks take part, each with its own file."""

    def __init__(self, config: Config, ranks: Ranks, manager: BlockManager) -> None:
        self._config, self._ranks, self._manager = config, ranks, manager
        self._size = manager.prefix_size

    def save(self, token_ids: list[int], folder: str) -> int:
        """Write what the cache holds of a prompt that has just been computed; returns how many of its tokens.

        Raises ValueError if it holds nothing of it, and RuntimeError if the disk does not take the files.
        """
        self._manager.begin_step()
        seq = self._begin(token_ids)
        cached = self._manager.prefixes.find(seq, with_tails=False)
        if cached.num_tokens == 0:
            raise ValueError(
                f"prompt has {len(token_ids)} tokens, of which the cache holds none: it must have at least {self._size}"
                " tokens of text, and no cache_salt"
            )
        slot = cached.holder.snapshot if self._manager.states is not None and isinstance(cached.holder, Node) else NONE
        if cached.lost or (self._manager.states is not None and slot == NONE):
            raise RuntimeError("prompt: the device has lost a part of its blocks: raise num_kvcache_blocks")
        counts = iter(range(sum(map(len, cached.tables))))
        manifest = {
            **self._facts,
            "token_ids": token_ids[: cached.num_tokens],
            "is_long": seq.is_long,
            "tables": [[next(counts) for _ in table] for table in cached.tables],
            "starts": cached.starts,
        }
        blocks = [block for table in cached.tables for block in table]
        self._ranks.record("save_prefix", folder, cached.num_tokens)
        self._check(self._ranks.call("prefix_files.save", folder, json.dumps(manifest), blocks, slot), folder)
        return cached.num_tokens

    def load(self, folder: str) -> int:
        """Let later requests find what a folder holds; returns how many tokens it has.

        Raises ValueError for a folder of another model or other settings, and RuntimeError if the cache has no room.
        """
        manifest = self._read(folder)
        self._ranks.record("load_prefix", folder)
        if (fault := self._ranks.call("prefix_files.check", folder)) is not None:
            raise ValueError(f"{folder}: {fault}")
        manager, token_ids = self._manager, manifest["token_ids"]
        manager.begin_step()
        seq = self._begin(token_ids)
        seq.is_long = manifest["is_long"]
        if manager.prefixes.find(seq, with_tails=False).num_tokens < len(token_ids):
            try:
                self._fill(seq, manifest, folder)
            except BaseException:
                manager.prefixes.forget(seq)
                raise
            finally:
                manager.free(seq)
        return len(token_ids)

    def _fill(self, seq: Sequence, manifest: dict[str, Any], folder: str) -> None:
        """Give a sequence blocks, let the ranks fill them, and record them."""
        manager, count = self._manager, len(manifest["token_ids"])
        known = manager.allocate(seq, count)
        if known is None or manager.extend(seq, count) < count:
            raise RuntimeError(f"{folder}: the KV cache has too few free blocks for {count} tokens")
        manager.release(seq, count)
        pairs = []
        groups = zip(manager.groups, seq.block_tables, manifest["tables"], manifest["starts"], strict=True)
        for group, table, places, start in groups:
            first = max(start, known // group.block_size)
            pairs += [(places[column - start], table[column]) for column in range(first, start + len(places))]
        manager.prefixes.make_path(seq, count)
        manager.record(seq, count)
        slot = NONE
        if manager.states is not None and (seq.node is None or (slot := manager.states.hang(seq.node)) == NONE):
            raise RuntimeError(f"{folder}: there is no slot for its states: raise max_num_seqs")
        self._check(self._ranks.call("prefix_files.load", folder, pairs, slot), folder)

    def _begin(self, token_ids: list[int]) -> Sequence:
        """Return a sequence that begins with these tokens, and needs none of their logits."""
        long_from = self._config.description.long_from
        count = len(token_ids) + 1
        seq = Sequence(array("i", [*token_ids, 0]), SamplingParams(max_tokens=1), 0, count + 1)
        seq.is_long = long_from is not None and len(token_ids) > long_from
        return seq

    def _check(self, fault: str | None, folder: str) -> None:
        if fault is not None:
            raise RuntimeError(f"{folder}: {fault}")

    def _read(self, folder: str) -> dict[str, Any]:
        """Return a folder's manifest. Raises ValueError, by its name, for what is not as here."""
        file = Path(folder) / MANIFEST
        try:
            manifest = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"folder={folder!r}: holds no saved prefix: {error}") from error
        for name, ours in self._facts.items():
            theirs = manifest.get(name) if isinstance(manifest, dict) else None
            if theirs != ours:
                raise ValueError(f"folder={folder!r}: was saved with {name}={theirs!r}, and this LLM has {ours!r}")
        assert isinstance(manifest, dict)
        return manifest

    @property
    def _facts(self) -> dict[str, Any]:
        """What must be as it was, by the names of options, so that saved blocks mean the same."""
        config = self._config
        return {
            "format": FORMAT,
            "nanoinfer": own_version(),
            "model": _digest(config.description),
            "dtype": config.dtype,
            "kv_cache_dtype": str(config.torch_cache_dtype),
            "state_dtype": config.state_dtype,
            "device": config.device,
            "tensor_parallel_size": config.tensor_parallel_size,
            "kvcache_block_size": config.kvcache_block_size,
            "layout": _digest(config.cache_layout),
            "is_plain_cpu": config.is_plain_cpu,
        }


def _digest(value: object) -> str:
    return sha256(ADDRESS.sub("", repr(value)).encode()).hexdigest()[:16]
