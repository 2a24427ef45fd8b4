"""Holdings: the model and the KV cache of one rank, whose memory goes away while an LLM sleeps."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property, partial

import torch

from nanoinfer.attention import AttentionBackend
from nanoinfer.config import Config
from nanoinfer.draft import Draft
from nanoinfer.media.given import GivenTower
from nanoinfer.media.tower.tower import BATCH_BYTES, TransformersTower
from nanoinfer.models import build
from nanoinfer.models.causal_lm import CausalLM, Place, anywhere
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.process.torch_state import default_dtype
from nanoinfer.runner.adapters.adapters import AdapterSlots
from nanoinfer.runner.drafting.draft_weights import DraftWeights
from nanoinfer.runner.logits.batch_processors import BatchProcessors
from nanoinfer.runner.media import MediaEmbeddings
from nanoinfer.runner.memory.kv_cache import KVCache, KVCacheSpec
from nanoinfer.runner.memory.lender import Lender, Tag
from nanoinfer.runner.memory.plan import rough_step_bytes
from nanoinfer.runner.memory.room import what_frees_memory
from nanoinfer.runner.memory.state_pool import StatePool, StateSpec
from nanoinfer.runner.results.hidden_states import HiddenStateSlots
from nanoinfer.runner.results.routing import ExpertChoices
from nanoinfer.runner.start.voice import Voice
from nanoinfer.runner.steering import SteeringSlots
from nanoinfer.runner.streaming.choice import choose_layers, hint, host_lacks
from nanoinfer.runner.streaming.layer_memory import LayerMemory, count_layers
from nanoinfer.runner.streaming.plan import NOTHING, LayerSizes, StreamPlan
from nanoinfer.runner.streaming.shared_pages import SharedPages
from nanoinfer.runner.streaming.stream import LayerStream
from nanoinfer.runner.weight_writer import WeightWriter


class Holdings:
    """On a GPU, memory that comes back has its old addresses. On the CPU, a model that was dropped is built anew.

    model: built, and not filled
    model_bytes: its parameters and tables take this much, packed ones, the tower for images and slots for adapters too
    weights: writes into the model and the tower
    tower: the one for images; None: the LLM sees none
    adapters: those beside the model; None: the LLM has none
    media: the embeddings of images and videos in prompts that are being computed, and those that prompts have given
    stream: of the layers that lie in host memory; None: none does
    routing: where there is a host, if outputs are to have the experts
    batch_processors: classes that change the logits of all rows; None: the LLM has none
    hidden_states: likewise, if outputs may have some
    steering: the vectors that requests may name; None: the LLM has no room for any
    draft: this rank's share of the draft; None: there is none
    cache_spec, state_spec: the shapes of the KV cache and of the states
    kv_cache, states: the last ones that `make_cache` has made
    """

    model: CausalLM
    model_bytes: int
    tower: TransformersTower | None
    weights: WeightWriter
    kv_cache: KVCache
    states: StatePool

    def __init__(
        self,
        config: Config,
        backend: AttentionBackend,
        tp: TensorParallel,
        device: torch.device,
        most_tokens: int,
        has_host: bool,
    ) -> None:
        """most_tokens: in a step; has_host: somebody wants this rank's results."""
        self._config, self._backend, self._tp, self._device = config, backend, tp, device
        self._most_tokens, self._has_host = most_tokens, has_host
        self._lender = Lender(device) if device.type == "cuda" else None
        self.adapters: AdapterSlots | None = None
        self.media: MediaEmbeddings | None = None
        self.routing: ExpertChoices | None = None
        self.hidden_states: HiddenStateSlots | None = None
        self.steering: SteeringSlots | None = None
        self.stream: LayerStream | None = None
        self.cache_spec = KVCacheSpec(config.cache_layout, config.torch_cache_dtype, by_head=config.is_plain_cpu)
        guesses = 0 if config.speculation is None else config.max_guesses
        self.state_spec = StateSpec(
            config.cache_layout, config.torch_dtype, config.torch_state_dtype, guesses, config.is_in_order
        )
        self.batch_processors = BatchProcessors(config, device) if config.logits_processors else None
        self.weights = self._build()
        self.draft = None if config.draft is None else self._build_draft(config.draft)

    def _build(self) -> WeightWriter:
        """Build the model, whose weights hold any numbers; returns what writes into them."""
        config, description = self._config, self._config.description
        try:
            self._build_model()
        except torch.OutOfMemoryError as error:
            raise self._too_large(error) from error
        self.tower = self._build_tower()
        if config.is_one_by_one:
            self.model.fix_parts()
        if config.max_adapters:
            self._put_adapters()
        if config.routed_experts and self._has_host:
            assert description.experts is not None
            self.routing = ExpertChoices(self.model, self._most_tokens, getattr(torch, description.experts.number_type))
        if config.hidden_layers:
            self._keep_hidden_states()
        if config.max_steerings:
            self._put_steering()
        return WeightWriter(self.model, self.tower, self._tp, self._device, self.stream)

    def _build_model(self) -> None:
        plan = NOTHING
        if self._config.weight_offload_gib:
            sizes = self.layer_sizes
            plan = choose_layers(self._config, sizes, (self.cache_spec, self.state_spec), self._device)
        if (shared := self._open_shared()) is not None:
            plan = StreamPlan.of(shared.agree(plan.layers), sizes)
        with self._device, nullcontext() if self._lender is None else self._lender.for_weights():
            memory = LayerMemory(plan, self._device) if plan.layers else None
            self.model = self._new_model(anywhere if memory is None else memory.place)
        self.model_bytes = sum(tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers()))
        if memory is not None:
            try:
                self.stream = LayerStream(self.model, memory, shared)
            except (MemoryError, RuntimeError) as error:
                raise host_lacks(self._config, plan, sizes, error) from error
            self.model_bytes -= self.stream.saved_bytes
        elif shared is not None:
            shared.close()

    def _open_shared(self) -> SharedPages | None:
        """Return this rank's host memory that all replicas have; None: they do not share any."""
        config = self._config
        return SharedPages(config.layer_files[self._tp.rank], config.worker_timeout) if config.layer_files else None

    def _new_model(self, place: Place) -> CausalLM:
        config = self._config
        how = config.max_model_len, self._backend, self._tp, config.torch_head_dtype
        with default_dtype(config.torch_dtype):
            return build(config.description, *how, place)

    @cached_property
    def layer_sizes(self) -> LayerSizes:
        """The bytes of the model's layers on this rank, wherever they lie."""
        description = self._config.description
        with self._device:
            num_layers = description.num_layers // (2 if description.in_halves else 1)
            return count_layers(self._new_model, num_layers, self._device)

    def _too_large(self, error: torch.OutOfMemoryError) -> ValueError:
        """Return the error of a model whose weights the device does not hold."""
        if self._lender is not None:
            self._lender.close()  # of what is there by now
        free, total = torch.cuda.mem_get_info(self._device)
        lacking = self.layer_sizes.total - int(self._config.gpu_memory_utilization * total) + (total - free)
        streaming = hint(self._config, self.layer_sizes, lacking + rough_step_bytes(self._config))
        return ValueError(
            f"model: its weights take {self.layer_sizes.total / 2**30:,.1f} GiB of each GPU, of which"
            f" {free / 2**30:,.1f} are free: {what_frees_memory(self._config, streaming)}: {error}"
        )

    def rest(self) -> None:
        """Have the layers where a step expects them that steps bring from host memory."""
        if self.stream is not None:
            self.stream.rest()

    def _build_draft(self, draft: Draft) -> DraftWeights:
        memory = nullcontext() if self._lender is None else self._lender.for_weights()
        weights = DraftWeights(draft, self._config, self._tp, self._device, memory)
        self.model_bytes += weights.num_bytes
        return weights

    def load(self, voice: Voice) -> None:
        """Fill the weights of all that has just been built; raises ValueError as Source.fill does."""
        self.weights.load(self._config, voice)
        if self.draft is not None:
            self.draft.fill(partial(voice.bar, "Draft", "B"))

    def _put_adapters(self) -> None:
        """Put empty slots for adapters beside the model, which sleep gives back as it does weights."""
        with self._device, nullcontext() if self._lender is None else self._lender.for_weights():
            self.adapters = AdapterSlots(self.model, self._config, self._tp, self._device)
        self.model_bytes += self.adapters.num_bytes

    def _put_steering(self) -> None:
        """Make slots for steering vectors, which sleep keeps or gives back as it does weights."""
        config, model = self._config, self._config.description
        how = config.max_steerings, model.hidden_size, config.torch_dtype, self._device
        with nullcontext() if self._lender is None else self._lender.for_weights():
            self.steering = SteeringSlots(model.last_hidden_layer + 1, *how)
        self.model_bytes += self.steering.num_bytes

    def _keep_hidden_states(self) -> None:
        """Let the model keep hidden states, in slots which sleep gives back as it does weights."""
        config = self._config
        if self._has_host:
            how = config.description.hidden_size, config.torch_dtype, self._device
            with nullcontext() if self._lender is None else self._lender.for_weights():
                self.hidden_states = HiddenStateSlots(config.hidden_layers, self._most_tokens, *how)
            self.model_bytes += self.hidden_states.slots.nbytes
        self.model.keep_hidden_states({} if self.hidden_states is None else self.hidden_states.by_layer)

    def _build_tower(self) -> TransformersTower | None:
        config, model, tower = self._config, self._config.description, None
        if config.hf_config is not None:
            memory = None if self._lender is None else self._lender.for_weights()
            at_once = 0 if config.deterministic else BATCH_BYTES
            tower = TransformersTower(config.hf_config, config.torch_dtype, self._device, memory, at_once)
            self.model_bytes += tower.num_bytes
        how = self._device, config.torch_dtype
        given = GivenTower(tower, *how, model.embedding_scale if model.scales_given else 1.0)
        self.media = MediaEmbeddings(given, self._tp, *how, model.embedding_size or model.hidden_size)
        return tower

    def begin_weights(self, goes_on: bool) -> None:
        """Expect new weights; goes_on: as for WeightWriter.begin."""
        self.weights.begin(goes_on)
        if self.media is not None:
            self.media.forget()

    def make_cache(self, num_blocks: int, num_slots: int) -> None:
        """Make a KV cache and states in place of those before; raises ValueError when the memory does not hold them."""
        with nullcontext() if self._lender is None else self._lender.for_new_kv_cache():
            self.kv_cache = self.cache_spec.allocate(num_blocks, self._device)
            self.states = self.state_spec.allocate(num_slots, self._device)
        self._num_blocks, self._num_slots = num_blocks, num_slots

    @torch.inference_mode()
    def save_weights(self) -> str | None:
        """Copy the weights of a GPU to host memory; returns why some rank cannot, or None."""
        fault = None
        self.rest()
        if self._lender is not None:
            try:
                self._lender.save_weights()
            except (MemoryError, RuntimeError) as error:
                fault = str(error)
        return self._any_fault(fault)

    def lend(self, keep_weights: bool) -> None:
        """Give back the memory of the KV cache and of the weights.

        keep_weights: `save_weights` has been called before; the weights of the CPU stay where they are
        """
        if self._lender is not None:
            self.rest()
            if not keep_weights:
                self._lender.drop_copy()
            self._lender.lend("weights")
            self._lender.lend("kv_cache")
            torch.cuda.empty_cache()
            return
        self.__dict__.pop("kv_cache", None)
        self.__dict__.pop("states", None)
        if not keep_weights:
            self.routing = self.hidden_states = self.steering = self.media = self.tower = self.adapters = None
            self.__dict__.pop("model", None)
            self.__dict__.pop("weights", None)
            self._close_stream()

    def take_back(self, tag: Tag) -> str | None:
        """Have the memory of the weights or of the KV cache again; returns why some rank cannot, or None."""
        fault = None
        try:
            self._take_back(tag)
        except (MemoryError, ValueError, RuntimeError) as error:
            fault = str(error)
        fault = self._any_fault(fault)
        if fault is not None and self._lender is not None:
            self._lender.lend(tag)
        return fault

    def _take_back(self, tag: Tag) -> None:
        if self._lender is not None:
            with torch.inference_mode():
                self._lender.take_back(tag)
                if tag == "kv_cache":
                    self.kv_cache.zero()
                elif not self._lender.has_copy:
                    self._begin_anew()
        elif tag == "kv_cache":
            self.make_cache(self._num_blocks, self._num_slots)
        elif "weights" not in self.__dict__:
            weights = self._build()
            weights.finish()
            self.weights = weights  # last: an error before leaves them lent

    def _begin_anew(self) -> None:
        """Fill what nobody else fills, after a sleep that has kept no weights."""
        if self.stream is not None:
            self.stream.forget()
        if self.adapters is not None:
            self.adapters.clear()
        if self.draft is not None:
            self.draft.fill()

    def _any_fault(self, fault: str | None) -> str | None:
        """Return this rank's fault, or that another rank has one; all ranks call this together."""
        if self._tp.min(fault is None, self._device):
            return None
        return fault or "another rank has too little"

    def _close_stream(self) -> None:
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.close()

    def close(self) -> None:
        """Give all memory back for good."""
        self.routing = self.hidden_states = self.steering = self.media = self.tower = self.adapters = self.draft = None
        for name in ("model", "weights", "kv_cache", "states"):
            self.__dict__.pop(name, None)
        self._close_stream()
        if self._lender is not None:
            self._lender.close()
