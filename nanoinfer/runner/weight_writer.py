"""WeightWriter: writes into one rank's weights, in place, when the model is loaded and when its weights change."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from nanoinfer.config import Config
from nanoinfer.layers.experts import skew_routers
from nanoinfer.media.tower.tower import TransformersTower
from nanoinfer.parallel.buckets import Bucket, BucketReader, Piece
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.process.bar import MakeBar
from nanoinfer.runner.start.voice import Voice
from nanoinfer.runner.streaming.stream import LayerStream
from nanoinfer.weights.finite import describe_not_finite, find_not_finite
from nanoinfer.weights.formats.experts import Experts
from nanoinfer.weights.formats.matrix import Derived, Matrix
from nanoinfer.weights.shards import Table, Target, at_hand, is_elsewhere, table_of
from nanoinfer.weights.sources import FileSource, RandomSource, Source

MOST_WAITING = 1024  # copies; CUDA launches many small ones together in the time of a few
SMALL_BYTES = 16 << 20  # CUDA copies a larger tensor faster by itself


class WeightWriter:
    """Writes tensors where the table of shards says. Parameters stay where they are, so that CUDA graphs stay valid."""

    def __init__(
        self,
        model: nn.Module,
        tower: TransformersTower | None,
        tp: TensorParallel,
        device: torch.device,
        stream: LayerStream | None = None,
    ) -> None:
        """tower: the one for images, if there is one; stream: of the layers that lie in host memory, if some do"""
        self._model, self._tower, self._stream = model, tower, stream
        self._tp = tp
        self._device = device
        self._reader = BucketReader(device)
        self._written: dict[str, None] = {}  # tensors, since the last `begin`
        self._waiting: list[tuple[Tensor, Tensor]] = []  # targets and sources of copies that come together
        self._holders: dict[int, str] = {}  # the tensor that each target got, by the target's id
        self._unlike: list[tuple[str, Tensor]] = []  # a tensor whose target had been filled, and whether it differs

    @cached_property
    def table(self) -> Table:
        """The table of shards of model and tower, once the model's matrices are finished."""
        return self._make_table()

    def _make_table(self) -> Table:
        away = {} if self._stream is None else self._stream.away
        return table_of(self._model, away) | ({} if self._tower is None else self._tower.table())

    def _parts(self) -> Iterator[list[nn.Module]]:
        """Yield the model's modules in parts, each while its weights are where they are used."""
        if self._stream is None:
            yield list(self._model.modules())
        else:
            yield from self._stream.parts(self._model)

    def load(self, config: Config, voice: Voice) -> None:
        """Fill the weights of model and tower, which have just been built; raises ValueError as Source.fill does."""
        source: Source
        if self._stream is not None:
            self._stream.begin_change(is_first=True)
        if config.load_format == "safetensors":
            source = FileSource(config.model, config.description.beside)
        else:
            source = RandomSource(config.seed, self._device)
        self.fill(source, partial(voice.bar, "Weights", "B"))
        if config.load_format == "dummy_skewed":
            for modules in self._parts():
                skew_routers(modules)
        self.finish()
        if self._stream is not None and (fault := self._stream.end_change()) is not None:
            raise RuntimeError(fault)

    def fill(self, source: Source, bar: MakeBar) -> None:
        """Fill all weights; raises ValueError as Source.fill does. `finish` must follow. bar: as for Source.fill"""
        source.fill(self._make_table(), bar)

    def finish(self) -> None:
        """Let each matrix do what its format does with what has been written."""
        for modules in self._parts():
            for kinds in ((Matrix, Experts), Derived):
                for module in modules:
                    if isinstance(module, kinds):
                        module.finish()

    @cached_property
    def _twins(self) -> set[str]:
        """The names of tensors that a checkpoint may store under one name, under another, or under both."""
        firsts = [shards[0] for shards in self.table.values() if shards[0].entry is None]
        return {name for shard in firsts if shard.replaces for name in (shard.name, *shard.replaces)}

    def begin(self, goes_on: bool) -> None:
        """Forget what was written before. goes_on: remember which tensors came that may come under two names"""
        self._waiting.clear()  # an interrupt may have come before `end`
        self._written.clear()
        self._holders = {key: name for key, name in self._holders.items() if goes_on and name in self._twins}
        self._unlike.clear()
        if self._stream is not None:
            self._stream.begin_change(is_first=False)

    def write(self, name: str, tensor: Tensor, stays: bool) -> None:
        """Write what this rank needs of a whole tensor, from any device and dtype.

        stays: the tensor stays as it is until `end`, so that it can be copied together with others

        A mixture of experts has thousands of tensors: this takes few microseconds.
        """
        for shard in self.table[name]:
            target = shard.target
            holder = self._holders.setdefault(id(target), name)
            source = tensor if shard.takes_all else tensor[shard.index]
            if holder != name:
                self._copy_waiting()
                self._compare(name, target, source)
            elif stays and isinstance(target, Tensor) and target.nbytes <= SMALL_BYTES:
                self._waiting.append((target, source))
            else:
                target.copy_(source)
        self._written[name] = None
        if len(self._waiting) >= MOST_WAITING:
            self._copy_waiting()

    def _copy_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            targets, sources = zip(*waiting, strict=True)
            torch._foreach_copy_(targets, sources)

    def _compare(self, name: str, target: Target, source: Tensor) -> None:
        """Compare a tensor with another one that has filled the same target. The host does not wait for it."""
        if is_elsewhere(target):
            return
        held = at_hand(target)
        assert isinstance(held, Tensor)
        self._unlike.append((name, (held != source.to(held)).any()))

    @torch.inference_mode()
    def write_bucket(self, bucket: Bucket) -> None:
        """Write what this rank needs of the tensors in a bucket."""
        self._reader.read(bucket, self._write_piece)

    def _write_piece(self, piece: Piece, rows: Tensor) -> None:
        for shard in self.table[piece.name]:
            if shard.entry != piece.entry:
                continue
            holder = self._holders.setdefault(id(shard.target), piece.name)
            if (meeting := shard.meet(rows, piece.first)) is not None:
                target, source = meeting
                if holder == piece.name:
                    target.copy_(source)
                else:
                    self._compare(piece.name, target, source)
        self._written[piece.name] = None

    @torch.inference_mode()
    def read(self, source: FileSource) -> None:
        """Write the tensors of files that fit the table."""
        try:
            self._written.update(dict.fromkeys(source.copy(self.table)))
        except BaseException:
            if self._stream is not None:
                self._stream.abandon_change()
            raise
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # of what the copying threads needed to convert numbers

    def end(self) -> str | None:
        """Say what is wrong with the numbers that the ranks have written since `begin`; None: nothing.

        All ranks call this together.
        """
        fault = self._end()
        if self._stream is None or not self._stream.is_shared:
            return fault
        late = self._stream.end_change()
        if self._tp.min(late is None, self._device):
            return fault
        return fault or late or "another rank has not got its weights"

    def _end(self) -> str | None:
        self._copy_waiting()
        self._reader.close()  # before rank 0 frees what was read
        names, none = list(self.table), sys.maxsize
        unlike = (len(names) + names.index(name) for name, is_unlike in self._unlike if is_unlike)
        name = find_not_finite(self.table, self._written)
        first = self._tp.min(next(unlike, none) if name is None else names.index(name), self._device)
        if first == none:
            self.finish()
            return None
        if first < len(names):
            return describe_not_finite(self.table, names[first])
        name = names[first - len(names)]
        holder = self._holders[id(self.table[name][0].target)]
        return f"{name} and {holder} differ, but this model has one parameter for both"
