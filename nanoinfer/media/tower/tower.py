"""The vision tower: transformers' own, with weights that our loader fills."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nanoinfer.media.pixels import (
    COUNT,
    FEATURES,
    FRAMES,
    GRIDS,
    PIXEL_VALUES,
    SCALES,
    SIZES,
    TARGETS,
    Pixels,
    count_embeddings,
    count_values,
    join,
    normalised,
)
from nanoinfer.media.spans import Encoded
from nanoinfer.media.tower.fewer_passes import take_fewer_passes
from nanoinfer.media.tower.grids import derive
from nanoinfer.media.tower.hearing import hear
from nanoinfer.weights.names import OfTower
from nanoinfer.weights.shards import Shard, Table

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NO_INPUTS = (PIXEL_VALUES, FEATURES, SCALES, COUNT)  # what a tower takes otherwise, or not
LANGUAGE_MODELS = ("language_model", "text_model")  # parts of transformers' model
OTHER_PARTS = (*LANGUAGE_MODELS, "audio_tower", "embed_audio", "density_router")  # of one that sees
LIMITS = ("input_min", "input_max", "output_min", "output_max")  # of clipped products; infinite where nothing is
# Of pixels: ten images of a megapixel in 16 bits. To launch a batch takes the host up to 20 ms, whatever is in it, and
# more beside threads that make pixels; an H100 takes 9 ms for an image of Qwen3-VL-2B.
BATCH_BYTES = 128 << 20


class TransformersTower:
    """The vision tower and the projector of transformers' model of a multimodal checkpoint, in one dtype.

    config: the checkpoint's
    memory: a context in which torch.empty makes the weights
    batch_bytes: so many bytes of pixels, in this dtype, are encoded at once, or one image if it alone has more; 0:
        each image is encoded alone, so that no bit of it depends on others

    num_deep: see spans.Tower

    The weights hold any numbers until a source fills `table()`.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        memory: AbstractContextManager[object] | None = None,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        self.batch_bytes, self._is_alone = batch_bytes, batch_bytes == 0
        self._hears = not hasattr(config, "vision_config")
        of_vision = None if self._hears else config.vision_config
        self.num_deep = len(getattr(of_vision, "deepstack_visual_indexes", ()))
        self._dtype, self._device = dtype, device
        self._model = _build(config, dtype, device, memory or nullcontext())
        self._takes_tiles = hasattr(self._model, "vision_model")  # Idefics 3's, of all images of a prompt
        self._takes_row = hasattr(self._model, "merger")  # MiniCPM-V's, of patches side by side
        self._merges = getattr(config, "spatial_merge_size", None)  # as many patches in each direction: Mistral 3's
        self._scale = getattr(config.get_text_config(), "embedding_multiplier", 1)  # Granite's, of all embeddings
        self._derives = hasattr(getattr(self._model, "visual", None), "spatial_merge_size")
        if device.type == "cuda":
            take_fewer_passes(self._model)

    @property
    def num_bytes(self) -> int:
        """How much memory its weights and tables take."""
        return sum(tensor.nbytes for tensor in (*self._model.parameters(), *self._model.buffers()))

    def table(self) -> Table:
        """Return what fills the weights, by names as weights.sources.OfTower gives them."""
        tensors = {
            OfTower(self._hears).known_name(name): tensor
            for name, tensor in self._model.state_dict(keep_vars=True).items()
        }
        return {name: [_shard(name, tensor)] for name, tensor in tensors.items() if name is not None}

    @torch.inference_mode()
    def encode(self, pixels: Sequence[Pixels]) -> list[Encoded]:
        """Return what the decoder gets for each image, on the tower's device; see spans.Tower."""
        # Without TF32, or convolutions would round float32.
        with torch.backends.cudnn.flags(enabled=True, deterministic=self._is_alone, allow_tf32=False):
            return [encoded for batch in self._batches(pixels) for encoded in self._encode(batch)]

    def try_largest(self, image: Pixels) -> list[Encoded]:
        """Encode as many images like the largest one as are encoded at once."""
        return self.encode([image] * (1 if self._is_alone else max(1, self.batch_bytes // self._share(image))))

    def _batches(self, pixels: Sequence[Pixels]) -> Iterator[list[Pixels]]:
        """Cut images into batches of at most batch_bytes."""
        batch: list[Pixels] = []
        room = self.batch_bytes
        for given in pixels:
            image = dict(given)  # made now, if they are on demand
            size = self._share(image)
            if batch and (size > room or self._is_alone):
                yield batch
                batch, room = [], self.batch_bytes
            batch.append(image)
            room -= size
        if batch:
            yield batch

    def _share(self, image: Pixels) -> int:
        """Return how many of a batch's bytes an image takes: all, where a tower masks each pair of patches in it."""
        if SIZES in image and self._merges:
            return self.batch_bytes
        others = sum(tensor.nbytes for name, tensor in image.items() if name not in NO_INPUTS)
        return self._dtype.itemsize * count_values(image) + others

    def _encode(self, batch: list[Pixels]) -> list[Encoded]:
        if len(batch) == 1 and self._is_one_token(batch[0]):
            return self._encode(batch * 2)[:1]  # transformers' Mistral 3 cannot encode one token alone
        inputs, counts = self._inputs(batch), list(map(count_embeddings, batch))
        if self._hears:
            heard = hear(self._model, inputs[PIXEL_VALUES].to(self._dtype), inputs[FRAMES])
            return [Encoded(own[:count]) for own, count in zip(heard, counts, strict=True)]
        features = self._model.get_image_features(**inputs, **self._derived(inputs.get(GRIDS)), return_dict=True)
        embeddings = _by_image(features.pooler_output, counts)
        deep = [_by_image(layer, counts) for layer in getattr(features, "deepstack_features", None) or []]
        return [
            Encoded(own if self._scale == 1 else own * self._scale, tuple(layer[image] for layer in deep))
            for image, own in enumerate(embeddings)
        ]

    def _inputs(self, batch: list[Pixels]) -> dict[str, Tensor]:
        """Return what transformers' model takes of several images at once, by its names."""
        placed = [{name: self._placed(name, tensor) for name, tensor in image.items()} for image in batch]
        inputs = {name: join([image[name] for image in placed]) for name in batch[0] if name not in NO_INPUTS}
        values = [normalised(image) for image in placed]
        inputs[PIXEL_VALUES] = torch.cat(values, dim=-1) if self._takes_row else join(values)
        return {name: tensor[None] for name, tensor in inputs.items()} if self._takes_tiles else inputs

    def _is_one_token(self, image: Pixels) -> bool:
        if not self._merges:
            return False
        side = self._model.config.vision_config.patch_size * self._merges
        return image[SIZES].tolist() == [[side, side]]

    def _placed(self, name: str, tensor: Tensor) -> Tensor:
        """Return an input on the device, or in host memory where a tower reads its numbers: it would wait for them."""
        on_host = name in (COUNT, SIZES, TARGETS) or (name == GRIDS and self._derives)
        if on_host or self._device.type == "cpu":
            return tensor
        return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(self._device, non_blocking=True)

    def _derived(self, grids: Tensor | None) -> dict[str, Tensor]:
        """Return what towers of GRIDS would compute of these, where they lie."""
        if grids is None or not self._derives:
            return {}
        on_host, on_device = derive(self._model.visual, grids)
        return on_host | {name: self._placed(name, tensor) for name, tensor in on_device.items()}


def _by_image(rows: Iterable[Tensor], counts: list[int]) -> list[Tensor]:
    """Cut rows, which a tower returns by images, by tiles or all at once, [..., hidden_size], by images."""
    parts = [rows] if isinstance(rows, Tensor) else rows
    return list(torch.cat([part.flatten(0, -2) for part in parts]).split(counts))


def _shard(name: str, tensor: Tensor) -> Shard:
    is_limit, is_constant = name.endswith(LIMITS), not isinstance(tensor, nn.Parameter)
    values = tensor.detach()
    target = values if values.ndim else values.view(1)  # as ranks pass numbers on
    return Shard(name, target, tuple(target.shape), optional=is_limit, is_constant=is_constant, is_limit=is_limit)


def _build(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, memory: AbstractContextManager[object]
) -> Any:
    """Build the parts that see, without memory for the others; buffers that no checkpoint stores are computed."""
    from transformers import AutoModel  # here, for a model that cannot see does without

    with torch.device("meta"):
        model = AutoModel.from_config(config, dtype=dtype)
    for part in OTHER_PARTS if hasattr(config, "vision_config") else LANGUAGE_MODELS:
        if hasattr(model, part):
            setattr(model, part, None)
    stored = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}

    def with_memory(tensor: Tensor) -> Tensor:
        if id(tensor) in stored:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return torch.empty_like(tensor, device=device)

    with memory:
        model._apply(with_memory)
    model.requires_grad_(False).eval()
    for module in model.modules():
        module._is_hf_initialized = False  # on the meta device nothing was
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensor._is_hf_initialized = not name.endswith(LIMITS)  # else a source fills it
    model.initialize_weights()
    return model
