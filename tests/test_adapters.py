"""Adapters of each family: what each rank's slots hold is what PEFT itself merges into the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, build, save
from cases.adapters import Rank, adapt
from conftest import of_each_kind

from nanoinfer.weights.adapters.slots import write
from nanoinfer.weights.adapters.source import open_adapter

pytest.importorskip("peft", reason="needs peft: pip install -e '.[trl]'")

TOWER = r".*(vision|visual|projector|connector|embed_vision|merger|audio_tower).*"
NO_MATRIX = r".*(shared_expert_gate|router.*|gate\.wg|kv_b_proj)"  # of those that multiply what a layer gets
REFUSED = {"falcon_h1": r".*mamba\.out_proj", "nemotron_h": r".*mixer\.out_proj"}  # by PEFT itself
STACKS = [f"experts.{name}" for name in ("gate_up_proj", "up_proj", "down_proj")]
EXPERTS = {"target_modules": [], "target_parameters": STACKS}
KINDS = [list(CASES).index(name) for name in ("llama", "phi3", "qwen3.5", "gemma4 multimodal, layer inputs")]
MIXED = [
    name
    for name, case in CASES.items()
    if any("experts" in setting for setting in case.settings)
    and 0 not in (case.settings.get("num_experts"), case.settings.get("num_local_experts"))
]
KINDS_MIXED = [MIXED.index(name) for name in ("qwen3next", "mixtral", "gptoss", "qwen3-vl-moe", "nemotronh experts")]


@pytest.fixture
def unconverted(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT adapts linear layers, and not what layers of experts were before transformers 5."""
    monkeypatch.setattr("peft.utils.transformers_weight_conversion._MOE_TARGET_MODULE_MAPPING", {})


def check(family: str, folder: Path, **settings: Any) -> None:
    """Check each rank of one and of two, which split inputs of some matrices, or to keep the order all outputs."""
    base, saved, merged = (folder / name for name in ("base", "adapter", "merged"))
    wrapped = adapt(build(CASES[family], base), **settings)
    wrapped.save_pretrained(saved)
    save(wrapped.merge_and_unload(), merged)
    changes = []
    for rank in [(0, 1), (0, 2), (1, 2), (0, 2, True), (1, 2, True)]:
        ours = Rank(base, *rank)
        write(ours.reader.read(open_adapter("tuned", saved)), 1, ours.slots)
        before, after = ours.weights(base), ours.weights(merged)
        for old, new, added in zip(before, after, ours.added(1), strict=True):
            torch.testing.assert_close(old + added, new, atol=2e-5, rtol=1e-4)
            changes.append(added.any())
        assert ours.is_empty(0)
    assert any(changes)


@pytest.mark.parametrize("family", of_each_kind(zip(CASES), *KINDS))
@pytest.mark.usefixtures("unconverted")
def test_all_linear_layers(family: str, tmp_path: Path) -> None:
    excluded = [TOWER, NO_MATRIX, *filter(None, [REFUSED.get(CASES[family].model_type)])]
    check(family, tmp_path, target_modules="all-linear", exclude_modules="|".join(excluded))


@pytest.mark.parametrize("family", of_each_kind(zip(MIXED), *KINDS_MIXED))
@pytest.mark.usefixtures("unconverted")
def test_the_stacks_of_experts(family: str, tmp_path: Path) -> None:
    """PEFT adapts all experts of a layer at once, and does not name the stack."""
    check(family, tmp_path, **EXPERTS)


def test_what_peft_makes_of_the_names_of_experts_projections(tmp_path: Path) -> None:
    """It adapts the stacks instead, that of gates and ups with twice the rank."""
    check("qwen3moe", tmp_path, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
