"""LayerStream: brings layers from host memory while others compute, without Python in between in captured steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from nanoinfer.kernels.launch import launch_in_between
from nanoinfer.models.causal_lm import CausalLM
from nanoinfer.runner.memory.pinned_pages import PinnedPages
from nanoinfer.runner.streaming.layer_memory import LayerMemory
from nanoinfer.runner.streaming.shared_pages import SharedPages
from nanoinfer.weights.shards import Bring


@dataclass(frozen=True)
class StreamedLayer:
    """A layer whose numbers are in its buffer only while it computes.

    turn: among the streamed layers; buffer: the number of its buffer
    here: the part of the buffer that is the layer's, [bytes] uint8; there: its numbers in host memory, as many
    """

    module: nn.Module
    turn: int
    buffer: int
    here: Tensor
    there: Tensor

    def home_of(self, own: Tensor) -> Tensor:
        """Return what host memory has of a tensor in `here`."""
        if own.numel() == 0:
            return own.new_empty(own.shape, device=self.there.device)
        first = own.data_ptr() - self.here.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(own.shape, own.stride(), strict=True))
        span = self.there[first : first + (last + 1) * own.itemsize]
        return span.view(own.dtype).as_strided(own.shape, own.stride())


@dataclass(frozen=True)
class BringLayer:
    """Brings a streamed layer: see Bring."""

    stream: LayerStream
    layer: StreamedLayer

    @property
    def is_elsewhere(self) -> bool:
        """Whether another replica writes the layer."""
        return self.stream.drops

    def __call__(self, writes: bool) -> None:
        """Have the layer in its buffer."""
        self.stream.bring(self.layer, writes)

    def at_home(self, own: Tensor) -> Tensor:
        """Let the buffer no longer hold the layer; returns the part of its host memory that a tensor of it has."""
        self.stream.leave(self.layer)
        return self.layer.home_of(own) if self.stream.may_write() else own.new_empty(own.shape, device="cpu")


class LayerStream:
    """The streamed layers of a model, and which of them the buffers hold.

    A pass over the layers begins with the first of them in the buffers, and ends with these on their way again, for the
    next one, whatever that is: so passes follow one another in any order, eager or captured. In between, a layer's
    buffer gets the next layer that shares it as soon as the layer has computed. The copies run on a stream of their
    own. A capture must join it before it ends, and so a pass does: its last copies hide behind the layers that follow
    the last streamed one.

    Whoever reads or writes weights between passes brings the layers one by one. Those that are written go back to the
    host before another one comes. `rest` then makes the buffers ready for the next pass.

    All copies are in the order of the device's work: the host waits for none.
    """

    def __init__(self, model: CausalLM, memory: LayerMemory, shared: SharedPages | None = None) -> None:
        """model: built in this memory; shared: where the layers are, if replicas share them.

        Raises MemoryError or RuntimeError if the host has too little memory to pin.
        """
        self._buffers = memory.buffers
        self.device = memory.buffers[0].device
        sizes = [arena.num_bytes for arena in memory.arenas.values()]
        self._shared = shared
        if shared is not None:
            shared.open(sizes, self.device)
        self._pages = shared or PinnedPages(sizes, self.device)
        modules = list(model.each_layer)
        self._num_layers = len(modules)
        self._layers = []
        for turn, (number, there) in enumerate(zip(memory.arenas, self._pages.tensors, strict=True)):
            buffer = turn % len(self._buffers)
            here = self._buffers[buffer][: len(there)]
            self._layers.append(StreamedLayer(modules[number], turn, buffer, here, there))
        self._of_module = {layer.module: layer for layer in self._layers}
        self._held: list[StreamedLayer | None] = [None] * len(self._buffers)  # by each buffer
        self._is_changed = [False] * len(self._buffers)  # the layer there, and not yet its numbers in host memory
        self._coming: list[torch.cuda.Event | None] = [None] * len(self._buffers)  # behind a copy on the other stream
        self._copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        model.pass_over = self._pass_over
        self._check(model)

    def _check(self, model: nn.Module) -> None:
        """Assert that the buffers have the parameters of the streamed layers, and no others."""
        spans = [(buffer.data_ptr(), buffer.data_ptr() + len(buffer)) for buffer in self._buffers]
        streamed = {id(own) for layer in self._layers for own in layer.module.parameters()}
        for parameter in model.parameters():
            is_there = any(begin <= parameter.data_ptr() < end for begin, end in spans)
            assert parameter.numel() == 0 or is_there == (id(parameter) in streamed)

    @property
    def num_bytes(self) -> int:
        """The bytes of host memory."""
        return sum(len(layer.there) for layer in self._layers)

    @property
    def saved_bytes(self) -> int:
        """How many bytes of the device's memory the model takes less."""
        return self.num_bytes - sum(map(len, self._buffers))

    @cached_property
    def away(self) -> dict[nn.Module, Bring]:
        """The modules of streamed layers, and what brings each of these."""
        return {module: BringLayer(self, layer) for layer in self._layers for module in layer.module.modules()}

    def parts(self, model: nn.Module) -> Iterator[list[nn.Module]]:
        """Yield the modules that stay, then those of each streamed layer, which is brought and may be changed."""
        yield [module for module in model.modules() if module not in self.away]
        for layer in self._layers:
            self.bring(layer, True)
            yield list(layer.module.modules())

    def bring(self, layer: StreamedLayer, writes: bool) -> None:
        """Have a layer's numbers in its buffer. writes: they will change there"""
        if self._held[layer.buffer] is not layer:
            self._wait(layer.buffer)
            self._return(layer.buffer)
            self._held[layer.buffer] = None  # should this be interrupted
            layer.here.copy_(layer.there, non_blocking=True)
            self._held[layer.buffer] = layer
        self._is_changed[layer.buffer] |= writes

    def leave(self, layer: StreamedLayer) -> None:
        """Have a layer's numbers in host memory alone, as soon as the device has done its work."""
        if self._held[layer.buffer] is layer:
            self._wait(layer.buffer)
            self._return(layer.buffer)
            self._held[layer.buffer] = None

    def _return(self, buffer: int) -> None:
        """Copy what has changed in a buffer to host memory."""
        layer = self._held[buffer]
        if self._is_changed[buffer]:
            assert layer is not None
            if self.may_write():
                layer.there.copy_(layer.here, non_blocking=True)
            self._is_changed[buffer] = False

    @property
    def is_shared(self) -> bool:
        """Whether other replicas have the same host memory."""
        return self._shared is not None

    @property
    def drops(self) -> bool:
        """Whether another replica writes the layers: what is written here goes nowhere."""
        return self._shared is not None and not self._shared.is_writer

    def may_write(self) -> bool:
        """Whether this process writes the layers in host memory; waits until no other one reads them."""
        return self._shared is None or self._shared.may_write()

    def begin_change(self, is_first: bool) -> None:
        """Expect new numbers, as all replicas do that share the memory. is_first: they are the first ones"""
        if self._shared is not None:
            self._synchronize()
            self.forget()
            self._shared.begin(is_first)

    def end_change(self) -> str | None:
        """Have all numbers in host memory, once the writer has ended; returns why they are not there, or None."""
        if self._shared is None:
            return None
        for buffer in range(len(self._buffers)):
            self._return(buffer)
        self._synchronize()
        self.forget()
        return self._shared.end()

    def abandon_change(self) -> None:
        """Let the replicas know that this one writes no more."""
        if self._shared is not None:
            self._shared.abandon()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rest(self) -> None:
        """Have the first layers in the buffers, and all that has changed in host memory: a pass may begin."""
        for first in self._layers[: len(self._buffers)]:
            self._wait(first.buffer)
            self._return(first.buffer)
            self.bring(first, False)

    def forget(self) -> None:
        """Take no buffer to hold a layer: somebody else had the device's memory."""
        self._held = [None] * len(self._buffers)
        self._is_changed = [False] * len(self._buffers)

    def _pass_over(self, layers: nn.ModuleList) -> Iterator[nn.Module]:
        """Yield the layers that a forward pass runs, each when its numbers are there."""
        if len(layers) < self._num_layers:  # a trial, which runs one of each kind
            yield from self._one_by_one(layers)
            return
        self.rest()
        for module in layers:
            layer = self._of_module.get(module)
            if layer is None:
                yield module
                continue
            self._wait(layer.buffer)
            yield module
            self._send_next(layer)
        for buffer in range(len(self._buffers)):
            self._wait(buffer)

    def _one_by_one(self, layers: nn.ModuleList) -> Iterator[nn.Module]:
        for module in layers:
            if (layer := self._of_module.get(module)) is not None:
                self.bring(layer, False)
            yield module

    def _send_next(self, layer: StreamedLayer) -> None:
        """Launch the copy of the layer that has a buffer next, behind all that is launched by now."""
        later = layer.turn + len(self._buffers)
        following = self._layers[later if later < len(self._layers) else layer.buffer]
        if following is layer:  # the buffer is its own
            return
        self._held[layer.buffer] = None
        if self._copies is None:
            following.here.copy_(following.there)
        else:
            self._copies.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._copies):
                following.here.copy_(following.there, non_blocking=True)
                self._coming[layer.buffer] = self._copies.record_event()
        self._held[layer.buffer] = following

    def _wait(self, buffer: int) -> None:
        """Let what is launched from now on wait for the copy into a buffer."""
        if (copied := self._coming[buffer]) is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)
            self._coming[buffer] = None
            launch_in_between(self.device)  # an early kernel would load weights before the copy is done

    @torch.inference_mode()
    def seconds_of_copies(self) -> float:
        """Return how long the copies of a pass take by themselves; 0 on the CPU."""
        if self.device.type == "cpu":
            return 0.0
        for _ in range(2):  # the second time counts
            self.rest()
            torch.cuda.synchronize(self.device)
            began = time.perf_counter()
            for layer in self._layers:
                self._held[layer.buffer] = None
                self.bring(layer, False)
            torch.cuda.synchronize(self.device)
            seconds = time.perf_counter() - began
        self.rest()
        return seconds

    def close(self) -> None:
        """Give the host memory back, once the device has done its copies."""
        self._held = [None] * len(self._buffers)
        self._layers.clear()
        self._of_module.clear()
        self._pages.close()
