"""A checkpoint's generation_config.json is read to its last key, if a caller asks for its settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams
from nanoinfer.generation_config import find_sampling_params

HARMLESS = {  # as checkpoints have them
    "_from_model_config": True, "transformers_version": "4.51.0", "bos_token_id": 1, "pad_token_id": 0,
    "eos_token_id": [2, 3], "max_length": 4096, "cache_implementation": "hybrid", "use_cache": False, "num_beams": 1,
    "guidance_scale": 1.0, "no_repeat_ngram_size": 0, "typical_p": 1.0, "min_length": 0, "bad_words_ids": None,
    "suppress_tokens": [], "early_stopping": True, "renormalize_logits": True, "output_scores": True,
    "prompt_lookup_num_tokens": 4, "do_sample": True,
}  # fmt: skip


def test_what_changes_no_token() -> None:
    assert find_sampling_params("folder", {**HARMLESS, "temperature": 0.6}) == {"temperature": 0.6}


def test_what_sampling_params_have_too() -> None:
    own = {
        "num_return_sequences": 2,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "max_new_tokens": 7,
        "top_k": 9,
    }
    found = SamplingParams(**find_sampling_params("folder", own))
    assert found == SamplingParams(n=2, presence_penalty=1.5, frequency_penalty=0.5, max_tokens=7, top_k=9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 4}, "num_beams=4: must be 1"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5: must be 1"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size=3: must be 0"),
        ({"bad_words_ids": [[1, 2]]}, r"bad_words_ids=\[\[1, 2\]\]: must be left out"),
        ({"forced_eos_token_id": 2}, "forced_eos_token_id=2: must be left out"),
        ({"unheard_of": 1}, "unheard_of=1: nothing reads it here; known are temperature"),
    ],
)
def test_what_would_change_tokens(settings: dict[str, Any], message: str) -> None:
    told = f"model='folder': its generation_config.json has {message}.*; give requests SamplingParams of their own"
    with pytest.raises(ValueError, match=told):
        find_sampling_params("folder", {**HARMLESS, **settings})


@pytest.mark.parametrize("name", vars(GenerationConfig()))
def test_each_setting_of_transformers_is_known(name: str) -> None:
    """A number that none of them has by default is taken, or harmless, or known to change tokens."""
    unknown = False
    try:
        find_sampling_params("folder", {name: 12345})
    except ValueError as error:
        unknown = "nothing reads it" in str(error)
    assert not unknown


def test_only_who_asks_for_the_settings_hears_of_them(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    folder = shutil.copytree(BUNDLED_MODEL, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"num_beams": 4}))
    llm = make_llm(str(folder))
    assert llm.generate("ROMEO:", SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(ValueError, match=f"model='{folder}': its generation_config.json has num_beams=4: must be 1"):
        llm.default_sampling_params()
