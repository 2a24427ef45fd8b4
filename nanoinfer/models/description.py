"""Description: a model's structure as data. The decoder is built from it, and no code asks for a family's name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

from nanoinfer.attention.cache_layout import Memory, Pages
from nanoinfer.kernels.linear.activation import Activation, AnyActivation, ClampedSwiGLU, ScaledGate, Ungated
from nanoinfer.layers.delta import GatedDelta
from nanoinfer.layers.head_norm import HeadNorms
from nanoinfer.layers.heads.head_transform import HeadTransform
from nanoinfer.layers.heads.text_head import TextHeadNames
from nanoinfer.layers.latent_attention import LatentSizes
from nanoinfer.layers.layer_inputs import LayerInputSizes
from nanoinfer.layers.mamba import Mamba2
from nanoinfer.layers.mamba_beside_attention import BesideAttention
from nanoinfer.layers.norm import RMS_NORM, NormKind
from nanoinfer.layers.positions import PositionTable
from nanoinfer.layers.rotary import Rope
from nanoinfer.layers.short_convolution import ShortConvolution
from nanoinfer.layers.text_attention import DistanceBiases
from nanoinfer.models.attention.heads import KVHeads, QueryScaling
from nanoinfer.models.module_names import USUAL_NAMES, ModuleNames, PredictionLayers
from nanoinfer.models.reading.experts import MoEConfig
from nanoinfer.pooling.read import LabelsOf
from nanoinfer.weights.formats.format import Format
from nanoinfer.weights.formats.formats import PLAIN_FORMATS, Formats
from nanoinfer.weights.formats.plain.format import PLAIN
from nanoinfer.weights.names import AS_STORED, Beside, Spelling

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"  # the two tensors' names in all checkpoints


@dataclass(frozen=True)
class NoMixer:
    """A layer that lets no token see another: it has an MLP alone, or experts."""

    divided: ClassVar[dict[str, int]] = {}

    def state(self, ranks: int) -> None:
        """Return what a layer remembers: nothing."""


# What a layer may have in place of attention, or beside it.
MixerSizes: TypeAlias = BesideAttention | GatedDelta | Mamba2 | NoMixer | ShortConvolution
# The norm of queries and keys goes over each head by itself, or over all heads at once, before they are rotated; or
# over each head by itself, afterwards.
QKNorm = Literal["head", "full", "rotated"]
Layout = Literal["stacked", "groups", "quarters"]  # how one tensor of queries, keys and values has them


@dataclass(frozen=True)
class Description:
    """A decoder-only transformer. Fields without a line below have names that explain them.

    intermediate_size: of the MLPs; 0: all layers have experts
    double_from: MLPs from this layer on are twice as wide; None: none is
    layer_inputs: what each layer gets beside the residual stream; None: nothing
    max_position: the most tokens that a sequence may have
    tied: the output projection is the embedding's matrix
    embedded_ids: how many ids have an embedding, if further ones than those that have a logit; None: vocab_size
    layer_names: for each layer, its names, where layers differ in those of norms, MLPs or latent attention; empty: all
        have `names`
    norm: what the norms are
    inner_norm: what those of embeddings, queries and keys are; None: as the others
    last_norm: what the last one is; None: as the others
    post_norm_eps: the number that the norms of branches' results add; None: norm_eps
    post_norm: the norms stand behind the sums, which go on normalised: attention_norm is that of the sum with
        attention's result, mlp_norm that of the sum with the MLP's
    is_parallel: attention and the MLP read the same stream; without mlp_norm, through one norm
    embedding_norm: the name of the norm of the embeddings; None: they have none
    embedding_size: numbers of an embedding, which embedding_projection turns into hidden_size; None: hidden_size
    embedding_projection: that matrix's name
    projects_last: it has a bias, and stands behind the embeddings' norm
    positions: vectors for positions, which are added to the embeddings; None: the model has none
    token_types: vectors for the first and the second text of a pair, added, too; None: the model has none
    is_encoder: a token sees those behind it, too, and nothing is remembered: texts are read, each in one step
    distance_biases: an encoder's biases of scores; None: it has none
    result_projection, result_size: what projects the result of the last norm, to so many numbers; None: nothing does
    text_head: the modules of an encoder's classifier; None: a classifier reads the last token, by one matrix
    kv_heads: for each layer, its heads of keys and values; where no layer attends, they mean nothing
    latent: the sizes of latent attention, in all layers; kv_heads is the one head that the cache then has; None: layers
        keep keys and values
    qk_norm: the norm of queries and keys, an RMSNorm; None: the model has none
    head_norms: their LayerNorms; None: the model has none
    qkv_layout: of one tensor: "stacked": all queries, then all keys, then all values; "groups": for each key head its
        queries, the key and the value; "quarters": for each quarter of the heads its queries, values and keys
    qkv_limit: queries, keys and values are clamped to this, and to its negative; None: they are not
    value_norm: each head of the values is normalised, too, without weights
    value_scale: factor of the values
    activation: the function of the MLP's gate, see kernels.linear.activation
    is_gated: MLPs and experts have gates; without them they are down(activation(up(x)))
    attention_scale: factor of a query's product with a key
    score_cap, logit_cap: a cap c turns a scaled score, or a logit, into c * tanh(it / c); None: no cap
    embedding_scale, logit_scale: factor of the embeddings, and of the logits
    scales_given: embeddings that a caller gives in place of tokens have the first factor, too
    given_normalised: and are normalised already, where others get a norm
    residual_scale: factor of each branch's result; instead, layers keep the residual stream divided by it
    mlp_scale: factor of a gated MLP's result
    windows: for each layer, how many tokens a query sees, its own the last; None: all, or the layer has no queries
    ropes: for each layer, how it rotates queries and keys; None: not at all
    mixers: for each layer, what it has in place of attention, or beside it; None: attention alone
    has_one_branch: a layer has its mixer alone, or where it has none, its MLP
    sinks: for each layer, whether each query head has a learned score beside those of its keys, for no value, see
        attention.context.Scoring; empty: in no layer
    alibi: the slopes of ALiBi's bias, one for each query head, see attention.context.Scoring; empty: the model has none
    output_gate: there is a second number for each of a query; sigmoid of it multiplies attention's result
    head_bias: the output projection has a bias
    head_transform: what stands before the output projection; None: nothing
    spelling: how checkpoints write the names of tensors, where they differ from other models'
    formats: those of the matrices, but for embeddings and routers
    joins_shared: a shared expert is parts of the other experts' stack, where models/shared_experts.py says so
    module: the class that computes the model, by its full name: a CausalLM (models/causal_lm.py)
    whole_images: for each layer, whether each token of an image sees the whole image; empty: no layer's does
    is_multimodal: the checkpoint holds other models beside this one
    has_tower: of these, nanoinfer runs the one for images; it does not read the others
    hears: that one is for audio
    skipped: how the names of other tensors begin that checkpoints may hold and the model does not read
    prediction: those of these that predict further tokens; None: nanoinfer knows of none
    labels: how many scores a text gets, in place of logits behind each token; 0: not even scores; None: logits
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    kv_heads: tuple[KVHeads, ...]
    max_position: int
    norm_eps: float
    tied: bool
    activation: Activation
    attention_scale: float
    windows: tuple[int | None, ...]
    ropes: tuple[Rope | None, ...]
    mixers: tuple[MixerSizes | None, ...]
    has_one_branch: bool = False
    names: ModuleNames = USUAL_NAMES
    layer_names: tuple[ModuleNames, ...] = ()
    embedded_ids: int | None = None
    norm: NormKind = RMS_NORM
    inner_norm: NormKind | None = None
    last_norm: NormKind | None = None
    post_norm_eps: float | None = None
    post_norm: bool = False
    is_parallel: bool = False
    embedding_norm: str | None = None
    embedding_size: int | None = None
    embedding_projection: str = ""
    projects_last: bool = False
    positions: PositionTable | None = None
    token_types: PositionTable | None = None
    is_encoder: bool = False
    distance_biases: DistanceBiases | None = None
    result_projection: str = ""
    result_size: int | None = None
    text_head: TextHeadNames | None = None
    latent: LatentSizes | None = None
    qk_norm: QKNorm | None = None
    head_norms: HeadNorms | None = None
    qkv_layout: Layout = "stacked"
    qkv_limit: float | None = None
    value_norm: bool = False
    value_scale: float = 1.0
    sinks: tuple[bool, ...] = ()
    alibi: tuple[float, ...] = ()
    output_gate: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    is_gated: bool = True
    head_bias: bool = False
    head_transform: HeadTransform | None = None
    embedding_scale: float = 1.0
    scales_given: bool = False
    given_normalised: bool = False
    residual_scale: float = 1.0
    mlp_scale: float = 1.0
    logit_scale: float = 1.0
    score_cap: float | None = None
    logit_cap: float | None = None
    query_scaling: QueryScaling | None = None
    experts: MoEConfig | None = None
    double_from: int | None = None
    layer_inputs: LayerInputSizes | None = None
    module: str = "nanoinfer.models.decoder.Decoder"
    whole_images: tuple[bool, ...] = ()
    is_multimodal: bool = False
    has_tower: bool = False
    hears: bool = False
    skipped: tuple[str, ...] = ()
    prediction: PredictionLayers | None = None
    labels: int | None = None
    spelling: Spelling = AS_STORED
    formats: Formats = PLAIN_FORMATS
    joins_shared: bool = True

    @property
    def beside(self) -> Beside:
        """What the model's checkpoints hold beside it."""
        return Beside(self.is_multimodal, self.has_tower, self.skipped, self.labels == 0, self.spelling, self.hears)

    @property
    def generates(self) -> bool:
        """Whether the model has logits; otherwise texts are only read."""
        return self.labels is None

    @property
    def labels_of(self) -> LabelsOf:
        """What of a text a classifier's head reads."""
        return "last" if self.text_head is None else self.text_head.reads

    def names_of(self, layer: int) -> ModuleNames:
        """Return the names of a layer's modules."""
        return self.layer_names[layer] if self.layer_names else self.names

    @property
    def in_halves(self) -> bool:
        """Whether each two layers are the halves of one."""
        return self.experts is not None and self.experts.beside == "halves"

    @property
    def last_hidden_layer(self) -> int:
        """The number of the hidden states behind the last norm (nanoinfer.hidden_layers); halves count as one layer."""
        return self.num_layers // 2 if self.in_halves else self.num_layers

    @property
    def different_layers(self) -> list[int]:
        """The first layer, which has nothing to add, and the first of each kind of the others; halves count as one."""
        experts = [False] * self.num_layers if self.experts is None else self.experts.layers
        mlps = zip(experts, self.mlp_sizes, strict=True)
        kinds = list(zip(self.windows, self.ropes, self.mixers, self.kv_heads, mlps, strict=True))
        firsts = [0, *(layer for layer in range(1, self.num_layers) if kinds.index(kinds[layer], 1) == layer)]
        return sorted({layer // 2 for layer in firsts}) if self.in_halves else firsts

    @property
    def mlp_sizes(self) -> list[int]:
        """The intermediate size of each layer's MLP; 0: the layer has none."""
        experts, double_from = self.experts, self.double_from or self.num_layers
        replaced = [False] * self.num_layers
        if experts is not None and experts.beside is None:
            replaced = list(experts.layers)
        sizes = [self.intermediate_size * (1 if layer < double_from else 2) for layer in range(self.num_layers)]
        if self.has_one_branch:
            sizes = [size * isinstance(mixer, NoMixer) for size, mixer in zip(sizes, self.mixers, strict=True)]
        return [0 if is_replaced else size for size, is_replaced in zip(sizes, replaced, strict=True)]

    @property
    def mlp_activation(self) -> AnyActivation:
        """The activation of MLPs and experts, which says whether they have gates."""
        if self.is_gated:
            return self.activation
        assert not isinstance(self.activation, (ClampedSwiGLU, ScaledGate))
        return Ungated(self.activation)

    @property
    def attends(self) -> list[bool]:
        """Whether each layer has attention."""
        return [mixer is None or isinstance(mixer, BesideAttention) for mixer in self.mixers]

    @property
    def attention_windows(self) -> list[int | None]:
        """The windows of the layers that attend."""
        return [window for window, attends in zip(self.windows, self.attends, strict=True) if attends]

    @property
    def has_states(self) -> bool:
        """Whether some layer's memory of the past is a state of fixed size."""
        return any(mixer is not None and mixer.state(1) is not None for mixer in self.mixers)

    @property
    def attending(self) -> list[KVHeads]:
        """The heads of the layers that attend."""
        return [heads for heads, attends in zip(self.kv_heads, self.attends, strict=True) if attends]

    @property
    def largest_head(self) -> int:
        """The numbers in a head, in the layer where they are the most."""
        return max(max(heads.dim, heads.value_size) for heads in self.attending)

    @property
    def has_other_values(self) -> bool:
        """Whether some layer's values have another size than its keys."""
        return any(heads.value_dim is not None for heads in self.attending)

    def latent_heads(self, ranks: int) -> int | None:
        """Return how many query heads see one latent, on one of so many ranks; None: no layer has latents."""
        return None if self.latent is None else self.num_heads // ranks

    def memory(self, ranks: int) -> list[Memory | None]:
        """Return what each layer remembers of the past, on one of so many ranks; None: nothing of its own."""

        def of(layer: int) -> Memory | None:
            mixer, heads = self.mixers[layer], self.kv_heads[layer]
            if mixer is not None and not isinstance(mixer, BesideAttention):
                return mixer.state(ranks)
            if heads.source is not None or self.is_encoder:
                return None
            latent = None if self.latent is None else self.latent.latent
            pages = Pages(max(heads.count // ranks, 1), heads.dim, self.windows[layer], latent, heads.value_dim)
            return pages if mixer is None else (pages, mixer.state(ranks))

        return [of(layer) for layer in range(self.num_layers)]

    def expert_format(self, layer: int) -> Format:
        """Return the format of the experts of a layer that has some."""
        names = self.names
        return self.formats.of(f"{names.prefix(layer)}{names.expert.format(0)}.{names.expert_up}")

    @property
    def head_inputs(self) -> int:
        """How many numbers of a token the output projection takes."""
        return self.hidden_size if self.head_transform is None else self.head_transform.size

    @property
    def head_modules(self) -> set[str]:
        """The names of the matrices that turn hidden states into logits."""
        return {HEAD} if self.head_transform is None else {HEAD, self.head_transform.name}

    @property
    def head_format(self) -> Format:
        """The format of the output projection, which may be the embedding."""
        return self.embedding_format if self.tied else self.formats.of(HEAD)

    @property
    def embedding_format(self) -> Format:
        """The format of the embedding; beside a bias of the output projection it has none."""
        return PLAIN if self.tied and self.head_bias else self.formats.of_embedding(EMBEDDING)

    def check_head(self, dtype: str) -> None:
        """Raise ValueError if the output projection cannot be computed in this dtype, the option lm_head_dtype."""
        if dtype != "auto" and self.head_format != PLAIN:
            raise ValueError(f"lm_head_dtype={dtype!r}: must be 'auto': the checkpoint's is in {self.head_format.name}")

    def check_formats(self, named: str) -> None:
        """Raise ValueError if experts have biases, and a format that has none. named: what asks for it; {}: its name"""
        sparse = self.experts.layers if self.experts is not None and self.experts.biases else ()
        for layer, is_sparse in enumerate(sparse):
            if is_sparse and not (format := self.expert_format(layer)).takes_expert_biases:
                raise ValueError(
                    f"{named.format(format.name)}: experts with biases, as this model has them, cannot be in"
                    f" {format.name}; leave it out"
                )

    @property
    def widest(self) -> int:
        """The most features of a token that ranks gather at once, if they split outputs."""
        is_full = self.qk_norm == "full"
        heads = max(
            (self.num_heads + 2 * heads.count * is_full) * max(heads.dim, heads.value_size) for heads in self.attending
        )
        most_used = 0
        if (experts := self.experts) is not None:
            most_used = experts.used * experts.size + (0 if experts.shared_gate else experts.shared_size or 0)
        return max(heads, most_used, *self.mlp_sizes, *self.intermediate_sizes.values())

    @property
    def has_sections(self) -> bool:
        """Whether a token of an image has three positions (see Rope.sections)."""
        return any(rope is not None and rope.sections is not None for rope in self.ropes)

    def without_media(self) -> Description:
        """Return this model without what only images need."""
        ropes = tuple(rope and replace(rope, sections=None) for rope in self.ropes)
        return replace(self, ropes=ropes, whole_images=(), has_tower=False)

    @property
    def long_from(self) -> int | None:
        """Sequences of more tokens than this are rotated by other frequencies; None: the model has no such length."""
        return next((rope.long_from for rope in self.ropes if rope is not None and rope.long_from), None)

    def within(self, max_len: int) -> Description:
        """Return this model without the windows and long_frequencies that only sequences of over max_len tokens use."""

        def shortened(rope: Rope | None) -> Rope | None:
            if rope is None or rope.long_from is None or rope.long_from < max_len:
                return rope
            return replace(rope, long_frequencies=None, long_from=None)

        windows = tuple(window if window and window < max_len else None for window in self.windows)
        return replace(self, windows=windows, ropes=tuple(map(shortened, self.ropes)))

    @property
    def intermediate_sizes(self) -> dict[str, int]:
        """The intermediate sizes that the model's layers have, as most configs name them."""
        experts = self.experts
        sizes = {"intermediate_size": self.intermediate_size} if any(self.mlp_sizes) else {}
        if experts is not None:
            sizes["moe_intermediate_size"] = experts.size
            sizes["shared_expert_intermediate_size"] = experts.shared_size or 0
        return sizes

    def unit_of(self, size: int, ranks: int) -> int:
        """Return how many neighbours of an intermediate size stay on one rank: with more than 1, shares may differ."""
        return max((format.inputs_together(size, ranks) for format in self.formats.quantized), default=1)
