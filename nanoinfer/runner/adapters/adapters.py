"""AdapterSlots: those that a rank holds, and which of them the rows of a step name."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from nanoinfer.config import Config
from nanoinfer.kernels.adapters.in_order import check_order
from nanoinfer.kernels.adapters.pairs import AdapterRows, Pairs
from nanoinfer.layers.adapted import AdaptedExperts, AdaptedHead, AdaptedMatrix
from nanoinfer.models.causal_lm import CausalLM
from nanoinfer.models.description import HEAD
from nanoinfer.parallel.buckets import Bucket
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.process.host_memory import free_bytes
from nanoinfer.process.torch_state import default_dtype
from nanoinfer.runner.adapters.receiver import AdapterReceiver
from nanoinfer.weights.adapters.bases import Base, Bases, slot_rank
from nanoinfer.weights.adapters.low_rank import Adapter
from nanoinfer.weights.adapters.modules import Modules
from nanoinfer.weights.adapters.reading import AdapterReader
from nanoinfer.weights.adapters.slots import Slots, write
from nanoinfer.weights.formats.experts import Experts
from nanoinfer.weights.formats.matrix import Matrix
from nanoinfer.weights.shards import Section


class AdapterSlots:
    """The slots beside all matrices of a rank's model, numbered from 0; -1 stands for no adapter.

    reader: reads adapters for this model, and checks them
    """

    def __init__(self, model: CausalLM, config: Config, tp: TensorParallel, device: torch.device) -> None:
        """Put empty slots beside the matrices of a model that has just been built, on torch's default device."""
        self._tp, self._device = tp, device
        self._receiver = AdapterReceiver(device)
        self._count, self._rank = config.max_adapters, slot_rank(config.max_adapter_rank)
        self._slots: list[Slots] = []
        shape = config.description.vocab_size, config.description.head_inputs
        self._head_modules = config.description.head_modules
        head = Section(HEAD, model.num_ids, shape, model.first_id) if config.description.generates else None
        bases = Bases(model, head)
        _check_host_memory(bases, config, device)
        modules = Modules(model, bases, config.description.spelling)
        with default_dtype(config.torch_dtype):
            self._wrap(model, bases)
        if bases.head is not None:
            with default_dtype(config.torch_head_dtype):
                model.lm_head = AdaptedHead(model.lm_head, self._beside(bases.head))
        self.reader = AdapterReader(modules, config.max_adapter_rank, config.torch_dtype)
        # By slot, the slot if its adapter has matrices for the head, else -1; the last entry is that of no adapter.
        self._in_head = torch.full((self._count + 1,), -1, dtype=torch.int32)

    def _wrap(self, model: CausalLM, bases: Bases) -> None:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, Matrix) and child in bases.of_matrices:
                    setattr(parent, name, AdaptedMatrix(child, self._beside(bases.of_matrices[child])))
                elif isinstance(child, Experts):
                    gate_up, down = map(self._beside_experts, bases.of_experts[child])
                    setattr(parent, name, AdaptedExperts(child, gate_up, down))

    def _beside(self, base: Base) -> Pairs:
        slots = Slots.make(base, self._count, self._rank)
        self._slots.append(slots)
        return Pairs(slots.a, slots.b, base.part_rows)

    def _beside_experts(self, bases: list[Base]) -> Pairs:
        slots, a, b = Slots.make_alike(bases, self._count, self._rank)
        self._slots += slots
        return Pairs(a, b, bases[0].part_rows)

    @property
    def num_bytes(self) -> int:
        """How much memory the slots take."""
        return sum(slots.a.nbytes + slots.b.nbytes for slots in self._slots)

    def fix_order(self) -> None:
        """Let a GPU compare bits of the products with adapters; raises ValueError as check_order does."""
        for slots in self._slots:
            check_order(slots.base.inputs, slots.base.part_rows, self._rank, slots.a.dtype, self._device)

    @torch.inference_mode()
    def write(self, slot: int, adapter: Adapter) -> None:
        """Write this rank's share of an adapter, which `reader` has read, into a slot, in place of what was there."""
        write(adapter, slot, self._slots)
        self._in_head[slot] = slot if any(module in adapter for module in self._head_modules) else -1

    @torch.inference_mode()
    def receive(self, bucket: Bucket) -> None:
        """Copy the tensors of an adapter that rank 0 has read. The other ranks call this."""
        self._receiver.read(bucket)

    def end_receiving(self, slot: int, scales: dict[str, float] | None) -> None:
        """Write the adapter that has been received. All ranks call this together; rank 0 receives none.

        scales: LowRank.scale, by module; None: forget what has been received
        """
        if self._tp.rank > 0:
            adapter = self._receiver.take(scales or {})
            if scales is not None:
                self.write(slot, adapter)
        self._tp.min(0, self._device)  # from here on rank 0 may free the buckets

    def clear(self) -> None:
        """Empty all slots, whose memory may hold anything."""
        for slots in self._slots:
            slots.a.zero_()
            slots.b.zero_()
        self._in_head.fill_(-1)

    def beside_layers(self, slots: Tensor) -> AdapterRows:
        """Return which adapters a step's tokens name. slots: [tokens] int32"""
        return AdapterRows.of(slots, self._count)

    def beside_head(self, slots: Tensor) -> AdapterRows:
        """Return which adapters of the head rows name, for logits. slots: [rows] int32"""
        return AdapterRows.of(self._in_head[slots], self._count)


def _check_host_memory(bases: Iterable[Base], config: Config, device: torch.device) -> None:
    """Raise ValueError if the host has no room for the slots of a CPU's rank: Linux ends who takes more."""
    if device.type != "cpu":
        return
    shapes = [shape for base in bases for shape in base.shapes(slot_rank(config.max_adapter_rank))]
    needed = config.max_adapters * sum(map(math.prod, shapes)) * config.torch_dtype.itemsize
    if needed > (free := free_bytes()):
        raise ValueError(
            f"max_adapters={config.max_adapters}, max_adapter_rank={config.max_adapter_rank}: their slots take"
            f" {needed / 2**30:,.2f} GiB, and the host has {free / 2**30:,.2f} GiB free; lower one of them"
        )
