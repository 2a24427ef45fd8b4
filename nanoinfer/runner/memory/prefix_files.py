"""PrefixFiles: one rank's share of a prefix on disk: what its blocks hold, and the states behind it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.memory.holdings import Holdings
from nanoinfer.weights.pinned import Uploads

MANIFEST = "prefix.json"
PART = ".part"  # of the name of a folder that is not whole
NO_SLOT = -1


class PrefixFiles:
    """Writes and reads rank-*.safetensors: blocks, [blocks, slices, bytes of a slice], and states, [bytes], in uint8.

    All ranks call each method together. It returns why some rank cannot, or None, on all of them alike.
    """

    def __init__(self, holdings: Holdings, tp: TensorParallel, device: torch.device) -> None:
        self._holdings, self._tp, self._device = holdings, tp, device

    def save(self, folder: str, manifest: str, blocks: list[int], slot: int) -> str | None:
        """Write a folder, which comes into being whole or not at all.

        manifest: the text of its file MANIFEST; blocks: to be saved; slot: of the states; NO_SLOT: there are none
        """
        part = Path(folder + PART)

        def begin() -> None:
            shutil.rmtree(part, ignore_errors=True)  # one that a process left behind which died
            part.mkdir(parents=True)
            _write(part / MANIFEST, manifest)

        def end() -> None:
            part.rename(folder)  # fails if a folder of the name has files

        fault = self._agreed(begin, is_first=True)
        fault = fault or self._agreed(lambda: self._save(part, blocks, slot))
        fault = fault or self._agreed(end, is_first=True)
        if fault is not None and self._tp.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        return fault

    @torch.inference_mode()
    def _save(self, part: Path, blocks: list[int], slot: int) -> None:
        memory = self._holdings.kv_cache.memory.view(torch.uint8)
        held = torch.empty(len(blocks), memory.shape[0], memory.shape[2], dtype=torch.uint8)
        for own, block in zip(held, blocks, strict=True):
            own.copy_(memory[:, block])
        tensors = {"blocks": held}
        if slot != NO_SLOT:
            parts = self._holdings.states.parts(slot)
            tensors["states"] = torch.cat([part.flatten() for part in parts]).cpu()
        file = self._file(part)
        save_file(tensors, file, {"weights": self._weights()})
        _sync(file)

    def check(self, folder: str) -> str | None:
        """Look whether this rank's file is whole, and of the weights that the model has."""

        def look() -> None:
            with safe_open(self._file(Path(folder)), framework="pt") as opened:
                if (opened.metadata() or {}).get("weights") != self._weights():
                    raise ValueError("its prefix was computed with other weights")

        return self._agreed(look)

    @torch.inference_mode()
    def load(self, folder: str, pairs: list[tuple[int, int]], slot: int) -> str | None:
        """Fill blocks, and a slot of states; pairs: the place of a block in the file, and the block that gets it."""

        def read() -> None:
            uploads, memory = Uploads(self._device), self._holdings.kv_cache.memory.view(torch.uint8)
            with safe_open(self._file(Path(folder)), framework="pt") as opened:
                held = opened.get_tensor("blocks")
                for place, block, count in _runs_of(pairs):
                    sources = held[place : place + count].transpose(0, 1)
                    for target, source in zip(memory[:, block : block + count], sources, strict=True):
                        uploads.add(target, source)
                uploads.finish()
                if slot != NO_SLOT:
                    parts = self._holdings.states.parts(slot)
                    states = opened.get_tensor("states").split([part.numel() for part in parts])
                    for part, own in zip(parts, states, strict=True):
                        part.copy_(own.view(part.shape))

        return self._agreed(read)

    def _file(self, folder: Path) -> Path:
        return folder / f"rank-{self._tp.rank}.safetensors"

    def _weights(self) -> str:
        """Return what tells this rank's weights from others: sums of their bits, by name."""
        digest = sha256()
        for name, tensor in self._holdings.model.named_parameters():
            bits = tensor.detach().reshape(-1).view(torch.uint8)
            words = bits.view(torch.int32) if len(bits) % 4 == 0 else bits
            sums = int(words.sum(dtype=torch.int64)), int(words[::7].sum(dtype=torch.int64))
            digest.update(f"{name} {list(tensor.shape)} {tensor.dtype} {sums};".encode())
        return digest.hexdigest()

    def _agreed(self, work: Callable[[], None], is_first: bool = False) -> str | None:
        """Do something, and return what goes wrong with it on any rank. is_first: rank 0 does it for all"""
        fault = None
        try:
            if self._tp.rank == 0 or not is_first:
                work()
        except (OSError, ValueError, SafetensorError, MemoryError) as error:
            fault = str(error)
        return None if self._tp.min(fault is None, self._device) else fault or "another rank could not do it"


def _runs_of(pairs: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield pairs whose neighbours are their followers as one: the first pair, and how many they are."""
    first = 0
    for end in range(1, len(pairs) + 1):
        place, block = pairs[first]
        if end == len(pairs) or pairs[end] != (place + end - first, block + end - first):
            yield place, block, end - first
            first = end


def _write(file: Path, text: str) -> None:
    file.write_text(text, "utf-8")
    _sync(file)


def _sync(file: Path) -> None:
    """Wait until a file is on the disk, which may be full."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
