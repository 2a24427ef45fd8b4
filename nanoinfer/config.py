"""Config: every option of LLM, its default, its check."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed import ProcessGroup

from nanoinfer.attention import block_unit, choose_backend
from nanoinfer.attention.cache_layout import (
    LEAST_BLOCK_SIZE,
    MAX_SLOTS,
    CacheLayout,
    lay_out,
    usual_block_size,
    usual_step,
)
from nanoinfer.checkpoint import DTYPES, GENERATE, POOLING, Checkpoint, dtype_name
from nanoinfer.checks import check_choice, check_flag, check_number, check_ranges, check_texts, ranged, short
from nanoinfer.draft import Draft
from nanoinfer.drafting.drafter import Drafter
from nanoinfer.drafting.options import MOST_GUESSES, MTP, check_speculating, check_speculation
from nanoinfer.hidden_layers import check_layers, resolve_layer
from nanoinfer.hints import hints_for
from nanoinfer.hub import CONFIG_FILES, find_folder, find_model, find_tokenizer
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.logits_processors import check_classes, check_pickles
from nanoinfer.media.options import can_see, check_image_folder, check_image_options, check_images
from nanoinfer.models.description import Description
from nanoinfer.models.ranks import check_in_order
from nanoinfer.parallel.devices import resolve_device
from nanoinfer.parallel.group import MAX_RANKS, size_of_group
from nanoinfer.process.host_memory import check_host_memory
from nanoinfer.process.torch_state import fresh_torch_state
from nanoinfer.weights.formats.table import ON_THE_FLY

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LOAD_FORMATS = ["safetensors", "dummy", "dummy_skewed"]
SAVE_FIRST = "; transformers' save_pretrained writes *.safetensors"
OWN_QUANTIZATION = "; leave it out if the checkpoint is quantized: its config.json says how"
AUTO_OFFLOAD = "auto"  # weight_offload_gib is what is needed
RAW, PROCESSED = "raw_logprobs", "processed_logprobs"
LONGEST_BY_TORCH = 4096  # of max_model_len if it is left out: on a GPU, each step reads so many keys of every row
MAX_REPLICAS, MAX_ADAPTERS, MAX_ADAPTER_RANK, MAX_STEERINGS = 64, 1024, 512, 1024


@hints_for("LLM")
@dataclass
class Config:
    """The checked options of LLM, and the settings that the checkpoint's own files give.

    model: a folder with config.json and *.safetensors, a Hugging Face Hub id, a GGUF file, or "bundled", nanoinfer's
        small model
    max_num_batched_tokens: one step computes at most this many prompt tokens; longer prompts go in chunks. None:
        16,384; of an encoder, which reads each text whole, up to 262,144 on CUDA, and on the CPU 4,096 or the longest
        text
    max_num_seqs: at most this many sequences run at once. Their rows (logits, block tables, up to 4,096 tokens so far)
        may take at most half of the memory that may be in use. Texts of an encoder have no rows, and no such limit
    max_model_len: a sequence has at most this many tokens, prompt and output. It may not exceed the model's own limit:
        max_position_embeddings, or with YaRN its original length times its factor, if that is more. None ("auto", -1):
        that limit, or the longest sequence that the KV cache holds, if that is shorter. The log says so then, and
        print(llm.memory) shows both. With attention_backend="torch" on CUDA, None is at most 4,096
    gpu_memory_utilization: once the engine is up, at most this share of the GPU's memory is in use, others' included
    tensor_parallel_size: this many ranks share the model, 1 to 8: one GPU each, or on the CPU one process each
    tensor_parallel_group: a group of torch.distributed, whose ranks share the model. Each of its processes, on one
        machine, makes an LLM with the same options, and calls the same methods with the same arguments. All return the
        results. tensor_parallel_size is left out then. None: the LLM starts the ranks itself
    enforce_eager: True: the host launches a decode step's kernels one by one instead of replaying a CUDA graph
    kvcache_block_size: a KV-cache block holds this many tokens, a multiple of 16 (with flash_attn, of 256). If some
        layers have windows and others not, each kind has its own number, and a shared prefix is at least so long. None:
        256 on CUDA; on the CPU 16, or 64 if layers keep states
    num_kvcache_blocks: the KV cache holds this many blocks of kvcache_block_size tokens, 2^31 tokens at most, or more
        tokens where some layers have windows. None: as many as the memory holds
    kv_offload_gib: so much host memory, over all ranks and replicas, keeps what KV-cache blocks held that others need:
        of sequences that lost theirs, and of cached prefixes; and their states, where layers keep some. It is copied
        back when it is needed. 0: none. None: a quarter of what is free, at most 32 GiB, if computing again takes three
        times as long as copying; none on a CPU
    weight_offload_gib: so many GiB of layers, over all ranks, lie in pinned host memory. Each step copies them to the
        GPUs while other layers compute. Replicas on one machine share them, those on Ray keep as many each. "auto": as
        many as give decode steps the most tokens a second beside the KV cache, none if all fit. 0: none; a CPU has no
        other value
    attention_backend: "triton", "flash_attn" or "torch"; "auto" is triton on CUDA and torch on the CPU
    dtype: "float32", "float16" ("half"), "bfloat16", or a torch.dtype; "auto": the checkpoint's on CUDA, else float32
    lm_head_dtype: "float32": the model computes its logits in float32, and keeps its output projection in float32. An
        embedding that is the same matrix keeps `dtype` beside it. "auto": all of this has `dtype`
    quantization: "fp8": a checkpoint of 16 or 32 bits is quantized to eight bits (e4m3) as it loads: its matrices, but
        not embeddings, head, norms, routers and tower. "int8": they are rounded to eight bits, with a scale for each
        group of neighbouring inputs: 128 of them, or 64 where 128 does not divide. "int4" and "mxfp4": those of
        attention have eight bits so, and the others four, in groups of 64 with a zero point, or of 32 in MXFP4. "nf4":
        all have four, in bitsandbytes' NF4. None: the weights stay as the checkpoint has them. See the README's limits
        for what multiplies them
    kv_cache_dtype: "fp8": the KV cache holds keys and values in eight bits (e4m3), by the checkpoint's own scales if it
        has some; flash_attn cannot read it, and GPUs before compute capability 8.9 cannot write it; "auto": the cache
        has `dtype`
    state_dtype: "float32" or "bfloat16": the dtype of a recurrence's states; "bfloat16" halves them, and loses digits
    logprobs_mode: "raw_logprobs": log-probabilities come from the model's own logits; "processed_logprobs": from the
        distribution that each token was drawn from, after penalties, bias, masks, temperature and filters. A token that
        could not be drawn has no entry then, and at temperature 0 the drawn token has 0.0. Nobody drew a prompt's
        tokens, so of the settings only the temperature changes theirs, and temperature 0 counts as 1
    deterministic: True: no bit of a request's results depends on what runs beside it, on caching, chunks, preemption or
        the number of ranks. On CUDA, sums then have one order. On the CPU, each token is computed alone, by one
        thread. Some models have it not on several ranks: those whose layers keep a state not on those of a CPU
    routed_experts: True: outputs have the experts that each token took, in a model that has experts. Those of cached
        tokens would be unknown, so prompts take nothing from the KV cache; samples that begin together share theirs
    hidden_state_layers: outputs may have these hidden states, numbered as transformers' output_hidden_states: 0 for the
        embeddings, -1 behind the last norm. A request names those that it wants, as SamplingParams(hidden_states=[-1]).
        Each number keeps memory for a step's tokens from the start; (): outputs have none
    max_steerings: llm.load_steering(...) loads at most this many, 0 to 1,024, into memory that is kept from the start
    max_adapters: llm.load_adapter(...) loads at most this many, 0 to 1,024, into memory that is kept from the start
    max_adapter_rank: an adapter's matrices have at most this rank, 1 to 512
    speculation: "suffix": decode steps also verify guesses of the next tokens: what followed where a text, or another
        one of its prompt, was last like its end. No guess changes a result. "draft": draft_model makes guesses. "mtp":
        the checkpoint's own heads do that predict further tokens. "auto": draft_model makes guesses, or without one
        "suffix" does, only where that should be faster. A Drafter makes guesses of its own. None: there are none
    draft_model: a folder or a Hub id: a small model of the same vocabulary, which guesses if speculation is "draft" or
        "auto". Its keys lie in the KV cache, too. None: there is none
    max_guesses: a step verifies at most this many guesses of a sequence, 1 to 15; becomes the number of prediction
        heads that a checkpoint has, if these are several and fewer
    remember_outputs: so many more texts that have ended stay for guesses, beside about as many as max_num_seqs
    images: "auto": the LLM sees images if the checkpoint has a tower for them and a processor that nanoinfer runs. With
        deterministic=True, Gemma's do not. True: a ValueError says why it cannot see. False: it takes text alone, with
        the speed and the memory of a text model. For a checkpoint that hears, the same holds of audio
    limit_images_per_prompt: a prompt has at most this many images; 0: none. None: as many as fit max_model_len
    limit_videos_per_prompt: a prompt has at most this many videos, as limit_images_per_prompt says of images
    image_options: how large images become, as the checkpoint's processor names it: {"max_pixels": 1048576} for Qwen,
        {"max_soft_tokens": 280} for Gemma 4, or {"size": {...}}. For videos, "fps" is how many of their frames are seen
        in a second, and "videos_kwargs" has "max_pixels" and "min_pixels" of their own. None: as its files say
    image_folder: images and audio may be read from files in this folder, by paths and file: URLs. None: no file is read
    device: "cuda" or "cpu", or a torch.device; "auto" is CUDA if there is a GPU; the environment's CUDA_VISIBLE_DEVICES
        chooses the GPUs; with tensor_parallel_group, "cuda" is the process's current device
    reasoning_markers: (opening, closing), the texts that stand around a thought in an output, which they divide into
        reasoning and answer. None: those of the model's family, if its tokenizer knows them as tokens or its chat
        template writes them. (): there are none
    logits_processors: classes, or texts "module:Class", with vLLM's interface of LogitsProcessor, as in
        nanoinfer.logits_processors: they change the logits of all rows, one class after the other, before each draw
    seed: a request without a seed of its own gets one that is made from this number
    runner: "pooling": the LLM only reads texts, without memory for logits and CUDA graphs. "generate": it generates,
        too. "auto" is pooling for classifiers, classes without a head, and a modules.json with a Pooling
    load_format: "safetensors" ("auto"), or "dummy" for random weights of the config's shapes, whose numbers depend on
        seed and the number of ranks. With "dummy_skewed", tokens also use some experts far more often than others
    revision: the branch, tag or commit of a Hub id; None: its main branch. A folder has none, or "main"
    gguf_file: the name of a GGUF file in the model's folder or Hub id, of a split one the first. None: model itself is
        the path of one, or a Hub id and a type such as "owner/model-GGUF:Q4_K_M", or there is none
    hf_config_path: a folder or a Hub id, whose config.json and generation_config.json count; None: the model's own, or
        what a GGUF file's metadata say
    tokenizer: a folder, a Hub id or a GGUF file, of which the tokenizer alone is taken; None: the checkpoint's own
    tokenizer_revision: as revision, for the tokenizer's Hub id
    trust_remote_code: True or False: no remote code runs, whatever it says
    data_parallel_size: this many replicas of the model share the requests, 1 to 64. Each is a process with an engine of
        its own, and takes tensor_parallel_size GPUs. max_num_seqs and all other options are those of each replica
    data_parallel_backend: "mp": replicas are processes of this machine. "ray": each is an actor in a Ray cluster, on
        any of its machines, and asks for a GPU for each rank. All of them need the model's folder at the same path
    placement_timeout: a replica waits this many seconds until the Ray cluster has room for it
    restart_replicas: True: a replica that dies starts again, while the others go on. If it dies before it is ready, it
        does not start again, nor does any replica once the weights have been changed
    worker_timeout: the engine ends when a rank's process does not run for this many seconds, because it is stopped or
        starved. On CUDA it also ends when a step takes that long. float("inf"): it waits for ever. With
        tensor_parallel_group it ends when a rank waits that long for another while requests run. Before they run, ranks
        wait for each other for half an hour. A replica ends likewise, and the others go on
    use_tqdm: True: on a terminal, a start of over two seconds shows bars, and then the line of repr(llm). Otherwise the
        logger "nanoinfer" gets the line, at level INFO. False, or a level of it above INFO, keeps the terminal silent

    None counts as an option's default. Options of vLLM's that are not here are left out at values that change nothing.
    Integers, numbers and booleans may come from any library; a boolean does not count as an integer.
    Raises a ValueError that names the option, its value and what would work.
    """

    model: str
    max_num_batched_tokens: int = ranged(cast(int, None), 1)  # None until the model's limit is known
    max_num_seqs: int = ranged(512, 1)
    max_model_len: int = ranged(cast(int, None), 2)  # None until the model's limit is known; a prompt token and another
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = ranged(1, 1, MAX_RANKS)
    enforce_eager: bool = False
    kvcache_block_size: int = ranged(cast(int, None), LEAST_BLOCK_SIZE, MAX_SLOTS)  # None until the model is known
    num_kvcache_blocks: int | None = ranged(None, 1)
    kv_offload_gib: float | None = None
    weight_offload_gib: float | str = 0.0
    attention_backend: str = "auto"
    dtype: str = "auto"
    lm_head_dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    state_dtype: str = "float32"
    logprobs_mode: str = RAW
    deterministic: bool = False
    routed_experts: bool = False
    hidden_state_layers: Iterable[int] = ()
    max_steerings: int = ranged(0, 0, MAX_STEERINGS)
    max_adapters: int = ranged(0, 0, MAX_ADAPTERS)
    max_adapter_rank: int = ranged(16, 1, MAX_ADAPTER_RANK)
    speculation: str | Drafter | None = None
    draft_model: str | None = None
    max_guesses: int = ranged(8, 1, MOST_GUESSES)
    remember_outputs: int = ranged(0, 0)
    images: bool | str = "auto"
    limit_images_per_prompt: int | None = ranged(None, 0)
    limit_videos_per_prompt: int | None = ranged(None, 0)
    image_options: Mapping[str, Any] | None = None
    image_folder: str | None = None
    device: str = "auto"
    reasoning_markers: Sequence[str] | None = None
    logits_processors: Sequence[Any] | None = None
    seed: int = ranged(0, 0, 2**63 - 1)
    runner: str = "auto"
    load_format: str = "safetensors"
    revision: str | None = None
    gguf_file: str | None = None
    hf_config_path: str | None = None
    tokenizer: str | None = None
    tokenizer_revision: str | None = None
    trust_remote_code: bool = False
    tensor_parallel_group: ProcessGroup | None = field(default=None, repr=False)
    data_parallel_size: int = ranged(1, 1, MAX_REPLICAS)
    data_parallel_backend: str = "mp"
    placement_timeout: float = 300.0
    restart_replicas: bool = False
    worker_timeout: float = 30.0
    use_tqdm: bool = True
    when_checked: InitVar[Callable[[Config], object] | None] = field(default=None, kw_only=True)

    began: float = field(default_factory=time.monotonic, init=False, repr=False, compare=False)  # when the start did
    fits_length: bool = field(init=False, repr=False)  # max_model_len was left out: it is what fits
    cache_layout: CacheLayout = field(init=False, repr=False)  # what a block of the KV cache holds
    fits_memory: bool = field(init=False, repr=False)  # num_kvcache_blocks was left out: it is what fits
    description: Description = field(init=False, repr=False)  # the model's structure
    hidden_layers: tuple[int, ...] = field(init=False, repr=False)  # hidden_state_layers, numbered from 0 on
    draft: Draft | None = field(init=False, repr=False)  # what guesses by weights of its own
    hf_config: PretrainedConfig | None = field(init=False, repr=False)  # of a model that sees, for processor and tower
    eos_token_ids: frozenset[int] = field(init=False, repr=False)  # the checkpoint's, and the tokenizer's once loaded
    generation_config: dict[str, Any] = field(init=False, repr=False)  # the checkpoint's file
    layer_files: tuple[str, ...] = field(default=(), init=False, repr=False)  # by rank, where replicas share layers

    def __post_init__(self, when_checked: Callable[[Config], object] | None) -> None:
        """Check the options and find the files, then read the checkpoint, which takes a second, and check the rest.

        when_checked: called in between; the devices and the number of processes are known by then
        """
        self._take_defaults()
        self._check_options()
        self._find_files()
        if when_checked is not None:
            when_checked(self)
        self._read_checkpoint()

    def _take_defaults(self) -> None:
        """Put the default for None."""
        for option in fields(self)[1:]:
            if option.init and getattr(self, option.name) is None:
                setattr(self, option.name, option.default)

    def _check_options(self) -> None:
        self._check_numbers()
        if self.tensor_parallel_group is not None:
            self.tensor_parallel_size = size_of_group(self.tensor_parallel_group, self.tensor_parallel_size)
        for name in [option.name for option in fields(self) if option.init and option.type == "bool"]:
            setattr(self, name, check_flag(name, getattr(self, name)))
        self.runner = check_choice("runner", self.runner, ["auto", GENERATE, POOLING])
        self.load_format = check_choice("load_format", self.load_format, LOAD_FORMATS, SAVE_FIRST)
        self.logprobs_mode = check_choice("logprobs_mode", self.logprobs_mode, [RAW, PROCESSED])
        self.data_parallel_backend = check_choice("data_parallel_backend", self.data_parallel_backend, ["mp", "ray"])
        if self.has_replicas and not self.starts_ranks:
            raise ValueError(
                f"{self.named_replicas}: must be {'1' if self.data_parallel_size > 1 else repr('mp')} with"
                " tensor_parallel_group: make an LLM in each group of processes instead"
            )
        ranks = self.tensor_parallel_size if self.starts_ranks else 1
        self.device = resolve_device(self.device, ranks, self.data_parallel_size, self.is_on_ray)
        self._check_offload()
        if self.quantization is not None:
            self.quantization = check_choice("quantization", self.quantization, list(ON_THE_FLY), OWN_QUANTIZATION)
        self.lm_head_dtype = check_choice("lm_head_dtype", dtype_name(self.lm_head_dtype), ["auto", "float32"])
        self.kv_cache_dtype = check_choice("kv_cache_dtype", self.kv_cache_dtype, ["auto", "fp8"])
        self.state_dtype = check_choice("state_dtype", self.state_dtype, ["float32", "bfloat16"])
        self.hidden_state_layers = check_layers("hidden_state_layers", self.hidden_state_layers)
        self.speculation = check_speculation(
            self.speculation, self.draft_model, self.named_replicas if self.has_replicas else None
        )
        self.images = check_images(self.images)
        self.image_options = check_image_options(self.image_options)
        self.image_folder = check_image_folder(self.image_folder)
        self.reasoning_markers = check_texts("reasoning_markers", self.reasoning_markers, 2)
        self._check_logits_processors()

    def _check_offload(self) -> None:
        """Refuse to keep layers in host memory if there is no other."""
        if self.weight_offload_gib and self.device == "cpu":
            raise ValueError(
                f"weight_offload_gib={self.weight_offload_gib!r}: must be 0 with device='cpu', which computes with what"
                " lies in host memory"
            )

    def _find_files(self) -> None:
        """Find the folders, or download them."""
        source, self.model = self.model, find_model("model", self.model, self.revision, self.gguf_file)
        if self.hf_config_path is not None:
            self.hf_config_path = find_folder("hf_config_path", self.hf_config_path, None, CONFIG_FILES)
        if self.tokenizer is not None or self.tokenizer_revision is not None:
            wanted = source if self.tokenizer is None else self.tokenizer
            self.tokenizer = find_tokenizer(wanted, self.tokenizer_revision)
        if self.draft_model is not None:
            self.draft_model = find_model("draft_model", self.draft_model, None)

    def _read_checkpoint(self) -> None:
        """Read the checkpoint's settings, and check what depends on them."""
        checkpoint = Checkpoint.open(self.model, self.hf_config_path)
        self.eos_token_ids = checkpoint.eos_token_ids
        self.generation_config = checkpoint.generation_config
        with fresh_torch_state():
            files = self.model, self.tokenizer or self.model, checkpoint.hf_config, self.is_loaded
            self.images = can_see(self.images, *files, self.deterministic and checkpoint.has_whole_images)
            how = self.runner, self.quantization, self.tensor_parallel_size, self.is_loaded, self.sees
            described = checkpoint.describe(*how)
            self.description = replace(described, joins_shared=not self.max_adapters)  # adapters name its matrices
        self.hf_config = checkpoint.hf_config if self.sees else None
        self.description.check_head(self.lm_head_dtype)
        model, self.draft = self.description, None
        check_speculating(self.speculation, self.draft_model, model.generates, self.sees)
        if self.draft_model is not None:
            own = model, self.tokenizer or self.model
            self.draft = Draft.open(self.draft_model, *own, self.tensor_parallel_size, self.is_loaded)
        elif self.speculation == MTP:
            is_rounded = self.quantization is not None
            self.draft = Draft.of_heads(self.model, model, self.max_guesses, self.is_loaded, is_rounded)
            self.max_guesses = self.draft.most_guesses or self.max_guesses
        if self.logits_processors and not model.generates:
            raise ValueError("logits_processors: must be left out: this LLM reads texts, and draws no token")
        if self.routed_experts and self.description.experts is None:
            raise ValueError(f"routed_experts={self.routed_experts}: must be False: the model has no experts")
        if self.max_steerings and not self.description.generates:
            raise ValueError(f"max_steerings={self.max_steerings}: must be 0: this LLM reads texts, and steers none")
        last = self.description.last_hidden_layer
        self.hidden_layers = tuple(
            sorted({resolve_layer("hidden_state_layers", layer, last) for layer in self.hidden_state_layers})
        )
        self.dtype = checkpoint.resolve_dtype(self.dtype, self.device)
        if cast("int | None", self.kvcache_block_size) is None:
            self.kvcache_block_size = usual_block_size(self.device, self.description.has_states)
        shape = self.torch_dtype, self.kvcache_block_size, self.largest_head
        has = any(any(model.sinks) for model in self.models), any(model.alibi for model in self.models)
        latents = any(model.latent is not None for model in self.models)
        other_values = any(model.has_other_values for model in self.models)
        wishes = self.kv_cache_dtype == "fp8", *has, self.is_in_order, latents, other_values
        self.attention_backend = choose_backend(self.attention_backend, self.device, *shape, *wishes)
        self.fits_memory = self.num_kvcache_blocks is None
        self._check_max_model_len()
        if self.deterministic:
            ranks = self.tensor_parallel_size, self.device == "cpu"
            check_in_order(self.description, *ranks)
            if self.draft is not None:
                self.draft.check_in_order(*ranks)

    def add_end(self, token_id: int) -> None:
        """Count the tokenizer's end of sequence as one, too; an id that the model lacks ends nothing."""
        if token_id < self.description.vocab_size:
            self.eos_token_ids |= {token_id}

    @property
    def models(self) -> list[Description]:
        """The models whose keys lie in the KV cache: the LLM's, then its draft."""
        return [self.description, *([] if self.draft is None else [self.draft.description])]

    @property
    def largest_head(self) -> int:
        """The numbers in a head, in the layer where they are the most."""
        return max(model.largest_head for model in self.models)

    @property
    def sees(self) -> bool:
        """Whether the LLM has a tower, for images or for audio."""
        return self.images is True

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are those of the checkpoint's files."""
        return self.load_format == "safetensors"

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch names it."""
        return DTYPES[self.dtype]

    @property
    def torch_head_dtype(self) -> torch.dtype:
        """The dtype of the logits, and of the matrix that computes them."""
        return self.torch_dtype if self.lm_head_dtype == "auto" else torch.float32

    @property
    def torch_cache_dtype(self) -> torch.dtype:
        """The dtype of the KV cache."""
        return self.torch_dtype if self.kv_cache_dtype == "auto" else FP8

    @property
    def torch_state_dtype(self) -> torch.dtype:
        """The dtype of the states of recurrences."""
        return DTYPES[self.state_dtype]

    @property
    def is_plain_cpu(self) -> bool:
        """Whether the CPU computes, and does not interpret the device's kernels."""
        return self.device == "cpu" and self.attention_backend == "torch"

    @property
    def is_one_by_one(self) -> bool:
        """Whether each token is computed alone, so that its bits do not depend on others."""
        return self.deterministic and self.device == "cpu"

    @property
    def is_in_order(self) -> bool:
        """Whether all sums have one order, so that a token's bits do not depend on those beside it."""
        return self.deterministic and self.device != "cpu"

    @property
    def shares_prefixes(self) -> bool:
        """Whether decode attention reads prefixes once that several rows share, in layers where a query sees all."""
        model, wishes = self.description, self.attention_backend == "triton" and not self.deterministic
        can_share = model.generates and None in model.attention_windows
        return wishes and can_share and self.max_num_seqs > 1

    @property
    def is_on_ray(self) -> bool:
        """Whether replicas are actors of a Ray cluster."""
        return self.data_parallel_backend == "ray"

    @property
    def has_replicas(self) -> bool:
        """Whether other processes have the engines, one or several."""
        return self.data_parallel_size > 1 or self.is_on_ray

    @property
    def named_replicas(self) -> str:
        """The option and the value that ask for replicas, for errors."""
        if self.data_parallel_size > 1:
            return f"data_parallel_size={self.data_parallel_size}"
        return f"data_parallel_backend={self.data_parallel_backend!r}"

    @property
    def named_processes(self) -> str | None:
        """The option and the value for which the LLM starts other processes, for errors; None: it starts none."""
        if self.has_replicas:
            return self.named_replicas
        has_ranks = self.tensor_parallel_size > 1 and self.starts_ranks
        return f"tensor_parallel_size={self.tensor_parallel_size}" if has_ranks else None

    @property
    def starts_ranks(self) -> bool:
        """Whether rank 0 starts the others; otherwise they are there already, and each has a host of its own."""
        return self.tensor_parallel_group is None

    def device_of(self, rank: int) -> torch.device:
        """Return the device of a rank; with tensor_parallel_group, only this process's own rank is asked for."""
        if self.device == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", rank if self.starts_ranks else torch.cuda.current_device())

    def _check_logits_processors(self) -> None:
        name = "logits_processors"
        self.logits_processors = check_classes(name, self.logits_processors)
        if not self.logits_processors:
            return
        for option in ("speculation", "deterministic"):
            if value := getattr(self, option):
                raise ValueError(f"{option}={short(value)}: must be left out beside {name}, which see a whole batch")
        if (where := self.named_processes) is not None:
            check_pickles(name, self.logits_processors, where)

    def _check_numbers(self) -> None:
        """Check the numbers that do not depend on the model, and convert them to Python's own types."""
        check_ranges(self)
        if self.kvcache_block_size is not None and self.kvcache_block_size % LEAST_BLOCK_SIZE:
            raise ValueError(f"kvcache_block_size={self.kvcache_block_size}: must be a multiple of 16")
        self.gpu_memory_utilization = check_number(
            "gpu_memory_utilization", self.gpu_memory_utilization, math.ulp(0), 1, "above 0, at most 1"
        )
        if self.kv_offload_gib is not None:
            self.kv_offload_gib = check_host_memory("kv_offload_gib", self.kv_offload_gib)
        is_auto = isinstance(self.weight_offload_gib, str) and self.weight_offload_gib == AUTO_OFFLOAD
        if not is_auto:
            self.weight_offload_gib = check_host_memory("weight_offload_gib", self.weight_offload_gib, "'auto', or ")
        seconds = 1, math.inf, "of seconds, at least 1"
        self.worker_timeout = check_number("worker_timeout", self.worker_timeout, *seconds)
        self.placement_timeout = check_number("placement_timeout", self.placement_timeout, *seconds)

    def _check_max_model_len(self) -> None:
        limit, why = self.description.max_position, "the longest sequence of this model"
        blocks = self.num_kvcache_blocks
        if cast("int | None", self.max_num_batched_tokens) is None:
            longest = min(limit, self.max_model_len or limit)
            text = longest if self.description.is_encoder else None
            self.max_num_batched_tokens = usual_step(self.device, text, self.description.widest)
        if self.description.is_encoder and self.max_num_batched_tokens < limit:
            limit, why = self.max_num_batched_tokens, "max_num_batched_tokens, as an encoder reads a text in one step"
        self.fits_length = cast("int | None", self.max_model_len) is None
        if self.fits_length:
            by_backend = LONGEST_BY_TORCH if (self.attention_backend, self.device) == ("torch", "cuda") else limit
            self.max_model_len = min(limit, by_backend)
        if self.max_model_len > limit:
            length = short(self.max_model_len)
            raise ValueError(f"max_model_len={length}: must be at most {limit}, {why}")
        self._lay_out_cache()
        longest = self.max_model_len
        if blocks is not None:
            longest = self.cache_layout.longest(self.cache_layout.pool_of(blocks), longest)
        if self.fits_length:
            self.max_model_len = longest
        elif blocks is not None and longest < self.max_model_len:
            raise self.cache_layout.too_few(blocks, self.max_model_len)

    def _lay_out_cache(self) -> None:
        """Decide what a block of the KV cache holds; raises ValueError if there are to be too many blocks."""
        self.description = self.description.within(self.max_model_len)
        if self.draft is not None:
            self.draft = self.draft.within(self.max_model_len, self.description.long_from)
        unit = block_unit(self.attention_backend, self.kvcache_block_size, self.largest_head)
        memory, *draft = [model.memory(self.tensor_parallel_size) for model in self.models]
        self.cache_layout = lay_out(memory, self.kvcache_block_size, unit, *draft)
        self.cache_layout.check(self.num_kvcache_blocks, self.max_num_batched_tokens)
