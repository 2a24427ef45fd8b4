"""The processor of audio: what transformers' own feature extractor makes of it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nanoinfer.media.audio.opening import read_audio
from nanoinfer.media.files import check_whole
from nanoinfer.media.images.opening import Opener
from nanoinfer.media.pixels import FEATURES, FRAMES, PixelsOnDemand, PixelSource
from nanoinfer.media.prepared import Prepared

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

CLASSES = ("Qwen2AudioForConditionalGeneration",)  # that hear
EXTRACTOR = "WhisperFeatureExtractor"
TOKENS = ("audio_token", "audio_bos_token", "audio_eos_token")  # audio_token_id in the config decides
KEY_BYTES = 16
FLOAT_BYTES = 4
SILENCE = "the longest audio"


class AudioProcessor:
    """Prepares audio of at most some seconds, in any number of threads, as Qwen2-Audio takes it.

    text, token_id: what stands for one embedding in a prompt's text and in its tokens

    Raises ValueError if the extractor makes other features than the tower takes.
    """

    def __init__(
        self, extractor: Any, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, opener: Opener
    ) -> None:
        """extractor: transformers' feature extractor of the checkpoint; opener: finds files."""
        self._extractor, self._opener = extractor, opener
        self.token_id: int = config.audio_token_id
        self.text = str(tokenizer.convert_ids_to_tokens(self.token_id))
        self._settings = extractor.to_json_string().encode()
        of = config.audio_config
        shape, taken = (extractor.feature_size, extractor.nb_max_frames), (of.num_mel_bins, 2 * of.max_source_positions)
        if shape != taken:
            raise ValueError(f"the feature extractor makes {shape[0]} x {shape[1]} numbers: must make {taken}")

    def prepare(self, name: str, source: Any) -> Prepared:
        """Return what a prompt needs to know of audio.

        Its features are made each time that they are read: then ValueError is raised if it has changed.
        name: begins the messages of errors; source: as read_audio takes it, or what this has returned before
        Raises ValueError for what is no audio, and for too few or too many samples.
        """
        if isinstance(source, Prepared):
            return source
        own = self._extractor
        samples = read_audio(name, source, own.sampling_rate, self._opener)
        if not 2 * own.hop_length < len(samples) <= own.n_samples:
            room = f"{2 * own.hop_length + 1} to {own.n_samples}, {own.n_samples / own.sampling_rate:g} seconds"
            raise ValueError(f"{name} has {len(samples)} samples: must have {room}")
        frames = -(-len(samples) // own.hop_length)
        count = ((frames - 1) // 2 - 1) // 2 + 1  # a convolution of stride 2, and means of two
        key = self._key(samples)
        num_bytes = FLOAT_BYTES * own.feature_size * own.nb_max_frames
        made = PixelSource(name, bytes(source) if isinstance(source, memoryview) else source, key)
        pixels = PixelsOnDemand({FRAMES: torch.tensor([frames])}, num_bytes, None, count, made, self.load, FEATURES)
        return Prepared(key, self.text * count, [self.token_id] * count, count, pixels)

    def largest(self) -> Prepared:
        """Return what is made of the longest audio, for plans of memory."""
        samples = np.zeros(self._extractor.n_samples, np.float32)
        return self.prepare(SILENCE, (samples, self._extractor.sampling_rate))

    def load(self, source: PixelSource) -> Tensor:
        """Return the features, [1, bins, frames], of audio that was prepared before, here or in another process."""
        rate = self._extractor.sampling_rate
        samples = read_audio(source.name, source.given, rate, self._opener)
        if self._key(samples) != source.key:
            raise ValueError(f"{source.name} has changed since it was first read: must not before its prompt begins")
        made: Tensor = self._extractor(samples, sampling_rate=rate, return_tensors="pt", padding="max_length")[FEATURES]
        return made

    def _key(self, samples: np.ndarray) -> bytes:
        """Return the digest of samples and of the settings."""
        digest = hashlib.blake2b(self._settings, digest_size=KEY_BYTES)
        digest.update(samples.data)
        return digest.digest()


def read_extractor(folder: str) -> Any:
    """Return transformers' feature extractor of a checkpoint; raises ValueError for settings that are not known."""
    import transformers  # here, for a model that cannot hear does without

    check_whole(folder, TOKENS)
    return getattr(transformers, EXTRACTOR).from_pretrained(folder)
