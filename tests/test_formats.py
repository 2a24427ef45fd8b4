"""A format in one file: what the room of formats asks of it, and what it gets for that.

Its numbers are whole ones of 16 bits, and stand for multiples of STEP. A checkpoint stores them as NAME.fixed, in place
of NAME.weight.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, build
from conftest import Oracle, greedy, whole_only
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nanoinfer import LLM
from nanoinfer.benchmark.floor import Floor, Machine
from nanoinfer.benchmark.least_steps import Limits
from nanoinfer.benchmark.workloads import Workload
from nanoinfer.kernels.experts.products import expert_mlps
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.linear.activation import Activation
from nanoinfer.kernels.linear.cpu.in_parts import WeightInParts
from nanoinfer.weights.formats import table
from nanoinfer.weights.formats.experts import Experts, ExpertSizes, ExpertTensors, OutputShare
from nanoinfer.weights.formats.format import Format
from nanoinfer.weights.formats.formats import ALL, PLAIN_FORMATS, Formats
from nanoinfer.weights.formats.fp8.format import Fp8Format
from nanoinfer.weights.formats.matrix import Matrix
from nanoinfer.weights.formats.plain.format import PLAIN
from nanoinfer.weights.formats.plain.matrix import PlainMatrix
from nanoinfer.weights.names import Spelling
from nanoinfer.weights.shards import Section, Shard, bias_shards, rows_and_outputs

pytestmark = pytest.mark.usefixtures("one_thread", "in_the_table")

STEP = 2.0**-8
MATRICES = ("_proj.weight", "lm_head.weight")  # end the names of those that checkpoints here have in this format
OPTIONS = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 160}
PROMPTS = [[7], list(range(20, 44)), [5, 6] * 9]
TOKENS = 5


def fixed(values: Tensor) -> Tensor:
    return (values.float() / STEP).round().to(torch.int16)


@dataclass(frozen=True)
class FixedRows:
    """Rows of a matrix, as a target of numbers of the checkpoints that have NAME.weight."""

    numbers: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def whole(self) -> FixedRows:
        return self

    def __getitem__(self, rows: slice) -> FixedRows:
        return FixedRows(self.numbers[rows])

    def copy_(self, values: Tensor) -> None:
        self.numbers.copy_(fixed(values))

    def unpacked(self) -> Tensor:
        return self.numbers * STEP


def make_numbers(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.int16), requires_grad=False)


def fixed_shards(section: Section, numbers: Tensor) -> Iterator[Shard]:
    which = section.shape, section.start, section.dim
    yield Shard(f"{section.name}.weight", FixedRows(numbers), *which)
    both = {"dtypes": frozenset({torch.int16}), "replaces": (f"{section.name}.weight",)}
    yield Shard(f"{section.name}.fixed", numbers, *which, **both)


class FixedMatrix(Matrix):
    def __init__(self, sections: list[Section], in_features: int, bias: bool) -> None:
        super().__init__(sections, in_features)
        self.numbers = make_numbers(sum(section.rows for section in sections), in_features)
        self.bias = nn.Parameter(torch.empty(len(self.numbers)), requires_grad=False) if bias else None
        self._is_in_parts = False
        self.times_finished = 0

    def operand(self) -> Tensor | WeightInParts:
        weight = self.numbers * STEP
        return WeightInParts(weight, rows_and_outputs(self.sections)) if self._is_in_parts else weight

    def fix_order(self, sizes: list[int]) -> None:
        raise ValueError("deterministic=True: no kernel adds up products in FIXED in one order; use device='cpu'")

    def fix_parts(self) -> None:
        self._is_in_parts = True

    def finish(self) -> None:
        self.times_finished += 1

    def shards(self) -> Iterator[Shard]:
        for section, rows in zip(self.sections, self.numbers.split([one.rows for one in self.sections]), strict=True):
            yield from fixed_shards(section, rows)
        if self.bias is not None:
            yield from bias_shards(self.bias, self.sections)


class FixedExperts(Experts):
    def __init__(self, tensors: ExpertTensors, sizes: ExpertSizes) -> None:
        super().__init__(tensors, sizes)
        self.gate_up = make_numbers(sizes.count, 2 * sizes.share, sizes.hidden_size)
        self.down = make_numbers(sizes.count, sizes.hidden_size, sizes.share)

    def forward(self, x: Tensor, routes: Routes, activation: Activation, may_split: bool = False) -> Tensor:
        return expert_mlps(x, routes, self.gate_up * STEP, self.down * STEP, activation, may_split)

    def fix_order(self, used: int, activation: Activation) -> None:
        self.fix_parts()

    def fix_parts(self) -> None:
        raise ValueError("deterministic=True: must be False with experts in FIXED")

    def shards(self) -> Iterator[Shard]:
        sizes, names = self.sizes, self.tensors
        inward, outward = (sizes.size, sizes.hidden_size), (sizes.hidden_size, sizes.size)
        for number in range(sizes.count):
            halves = zip((names.gate, names.up), self.gate_up[number].split(sizes.share), strict=True)
            for name, rows in halves:
                section = Section(names.module(name, number), sizes.share, inward, sizes.start)
                yield from fixed_shards(section, rows)
            section = Section(names.module(names.down, number), sizes.hidden_size, outward, sizes.start, dim=1)
            yield from fixed_shards(section, self.down[number])


@dataclass(frozen=True)
class Fixed(Format):
    @property
    def name(self) -> str:
        return "FIXED"

    def make_matrix(self, sections: list[Section], in_features: int, bias: bool) -> FixedMatrix:
        return FixedMatrix(sections, in_features, bias)

    def make_experts(
        self, tensors: ExpertTensors, sizes: ExpertSizes, output_share: OutputShare | None, biases: bool
    ) -> FixedExperts:
        return FixedExperts(tensors, sizes)

    def weight_bytes(self, itemsize: int) -> float:
        return 2


def read_fixed(config: dict[str, Any]) -> Formats:
    return Formats(((tuple(config["plain"]), PLAIN), ((ALL,), Fixed())))


@pytest.fixture
def in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.READERS, "fixed", read_fixed)
    monkeypatch.setitem(table.ON_THE_FLY, "fixed", Formats((((ALL,), Fixed()),)))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes a family's checkpoint in this format, and in "dense" beside it what it stands for."""

    def write(family: str, plain: tuple[str, ...] = ()) -> str:
        dense = tmp_path / "dense"
        build(CASES[family], dense)
        tensors = load_file(dense / "model.safetensors")
        stored = dict(tensors)
        config = {"quant_method": "fixed", "plain": plain}
        formats = read_fixed(config)
        for name in tensors:
            module = name.removesuffix(".weight")
            if name.endswith(MATRICES) and formats.of(module) != PLAIN:
                stored[f"{module}.fixed"] = fixed(stored.pop(name))
                tensors[name] = stored[f"{module}.fixed"] * STEP
        settings = json.loads((dense / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
        save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
        save_file(tensors, dense / "model.safetensors", {"format": "pt"})
        return str(tmp_path)

    return write


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, greedy(TOKENS, ignore_eos=True), use_tqdm=False)]


def expected_of(folder: str) -> list[list[int]]:
    oracle = Oracle(f"{folder}/dense")
    return [oracle.greedy(prompt, TOKENS, ignore_eos=True) for prompt in PROMPTS]


def matrices_of(llm: LLM) -> list[Matrix]:
    return [module for module in llm.engine.ranks.runner.steps.model.modules() if isinstance(module, Matrix)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", [*whole_only(["qwen3", "phi3"]), "qwen3moe"])
def test_a_checkpoint_gives_the_tokens_of_what_it_stands_for(
    family: str, ranks: int, write: Callable[..., str], make_llm: Callable[..., LLM]
) -> None:
    folder = write(family)
    llm = make_llm(folder, **OPTIONS, tensor_parallel_size=ranks)
    assert tokens_of(llm) == expected_of(folder)
    assert all(isinstance(matrix, FixedMatrix) for matrix in matrices_of(llm))


def test_some_modules_keep_the_models_dtype(write: Callable[..., str], make_llm: Callable[..., LLM]) -> None:
    folder = write("qwen3", ("model.layers.1.mlp", r"re:.*\.2\.self_attn\..*"))
    llm = make_llm(folder, **OPTIONS)
    assert tokens_of(llm) == expected_of(folder)
    *are_plain, head = [isinstance(matrix, PlainMatrix) for matrix in matrices_of(llm)]
    assert not head
    assert are_plain == [2 * layer + half in (3, 4) for layer in range(4) for half in (0, 1) for _ in range(2)]


@pytest.mark.parametrize("ranks", [*whole_only([1]), 2])
def test_deterministic_is_kept(ranks: int, write: Callable[..., str], make_llm: Callable[..., LLM]) -> None:
    folder = write("qwen3")
    llm = make_llm(folder, **OPTIONS, tensor_parallel_size=ranks, deterministic=True)
    assert tokens_of(llm) == expected_of(folder)


def test_or_it_is_refused(write: Callable[..., str], make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ValueError, match="deterministic=True: must be False with experts in FIXED"):
        make_llm(write("qwen3moe"), **OPTIONS, deterministic=True)
    decoder = make_llm(write("qwen3"), **OPTIONS).engine.ranks.runner.steps.model
    with pytest.raises(ValueError, match="deterministic=True: no kernel adds up products in FIXED"):
        decoder.fix_order([1], 16)


@pytest.mark.parametrize("ranks", [1, *whole_only([2])])
def test_weights_are_rounded_as_they_load_and_when_they_change(
    ranks: int, write: Callable[..., str], make_llm: Callable[..., LLM]
) -> None:
    folder = write("qwen3moe")
    expected = expected_of(folder)
    llm = make_llm(f"{folder}/dense", **OPTIONS, tensor_parallel_size=ranks, quantization="fixed")
    assert tokens_of(llm) == expected
    tensors = load_file(f"{folder}/dense/model.safetensors")
    llm.update_weights((name, tensor * 1.3) for name, tensor in tensors.items())
    assert tokens_of(llm) != expected
    llm.update_weights((name, tensor + 0.3 * STEP * name.endswith(MATRICES)) for name, tensor in tensors.items())
    assert tokens_of(llm) == expected
    llm.update_weights(load_file(f"{folder}/model.safetensors"))
    assert tokens_of(llm) == expected
    assert {matrix.times_finished for matrix in matrices_of(llm)} == {4}


def test_the_floor_counts_its_bytes(write: Callable[..., str], make_llm: Callable[..., LLM]) -> None:
    folder = write("qwen3", ("model.layers.1.mlp",))
    llm = make_llm(folder, **OPTIONS)
    limits = Limits(8, 100, 100, llm.config.cache_layout.groups)
    work = Workload([[1, 2, 3]], [1])

    def bytes_of(formats: Formats) -> float:
        model = llm.config.description
        floor = Floor.of(work, type(model)(**{**vars(model), "formats": formats}), limits, 4)
        return floor.seconds(Machine(bandwidth=1, rate=math.inf))

    in_fixed = sum(matrix.numbers.numel() for matrix in matrices_of(llm) if isinstance(matrix, FixedMatrix))
    assert bytes_of(PLAIN_FORMATS) - bytes_of(llm.config.description.formats) == 2 * in_fixed


class TestBadInput:
    def test_numbers_of_another_type(self, write: Callable[..., str]) -> None:
        folder = write("qwen3")
        file = Path(folder) / "model.safetensors"
        name = "model.layers.1.mlp.down_proj.fixed"
        tensors = load_file(file)
        save_file({**tensors, name: tensors[name].int()}, file, {"format": "pt"})
        with pytest.raises(ValueError, match=f"{name} has numbers of type I32: must be one of I16"):
            LLM(folder, **OPTIONS)

    def test_projections_that_are_multiplied_as_one(self, write: Callable[..., str]) -> None:
        told = r"k_proj is in FIXED and .*q_proj not: must be both or none"
        with pytest.raises(ValueError, match=told):
            LLM(write("qwen3", ("q_proj",)), **OPTIONS)
        with pytest.raises(ValueError, match=r"experts.0.gate_proj is in FIXED and .*experts.0.down_proj not"):
            LLM(write("qwen3moe", (r"re:.*experts\.\d+\.down_proj",)), **OPTIONS)
        formats = Formats(((("a",), Fixed()), (("b",), Fp8Format())))
        with pytest.raises(ValueError, match="a is in FIXED and b in FP8: must be both or none"):
            formats.make_matrix([Section("a", 4, (4, 4), 0), Section("b", 4, (4, 4), 0)], 4, bias=False)

    def test_a_head_in_float32(self, write: Callable[..., str]) -> None:
        with pytest.raises(ValueError, match="lm_head_dtype='float32': must be 'auto': the checkpoint's is in FIXED"):
            LLM(write("qwen3"), **OPTIONS, lm_head_dtype="float32")
        LLM(write("qwen3", ("lm_head",)), **OPTIONS, lm_head_dtype="float32").close()

    def test_a_checkpoint_that_is_in_another_format(self, write: Callable[..., str]) -> None:
        with pytest.raises(ValueError, match="quantization='fp8': the checkpoint's matrices are in FIXED already"):
            LLM(write("qwen3"), **OPTIONS, quantization="fp8")


@pytest.mark.parametrize(
    ("pattern", "module", "is_meant"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("up_proj", "model.layers.1.mlp.up_proj", True),
        ("proj", "model.layers.1.mlp.up_proj", False),
        (r"re:.*\.up_proj$", "model.layers.1.mlp.up_proj", True),
        (r"re:layers\.1", "model.layers.1.mlp.up_proj", False),
    ],
)
def test_a_pattern_is_a_name_or_an_end_of_one_or_an_expression(pattern: str, module: str, is_meant: bool) -> None:
    assert (Formats((((pattern,), Fixed()),)).of(module) == Fixed()) == is_meant


@pytest.mark.parametrize(
    "pattern", ["model.language_model.layers.1", "language_model.model.layers.1", r"re:.*language_model\.layers\.1\."]
)
def test_a_multimodal_checkpoints_patterns_mean_its_language_model(pattern: str) -> None:
    formats = Formats((((pattern,), Fixed()),)).of_language_model()
    assert [formats.of(f"model.layers.{layer}.mlp.up_proj") for layer in (0, 1)] == [PLAIN, Fixed()]


@pytest.mark.parametrize("pattern", ["backbone.layers.1", "model.layers.1", r"re:backbone\.layers\.1\..*"])
def test_patterns_may_spell_names_as_checkpoints_do(pattern: str) -> None:
    formats = Formats((((pattern,), Fixed()),), spelling=Spelling((("backbone.", "model."),)))
    assert [formats.of(f"model.layers.{layer}.mixer.up_proj") for layer in (0, 1)] == [PLAIN, Fixed()]


def test_the_first_rule_decides() -> None:
    formats = Formats(((("a",), PLAIN), (("b",), Fp8Format()), ((ALL,), Fixed()), (("c",), Fp8Format())))
    assert [formats.of(name) for name in ("a", "b", "c")] == [PLAIN, Fp8Format(), Fixed()]
    assert formats.quantized == (Fp8Format(), Fixed())


def test_among_rules_that_name_every_matrix() -> None:
    """As configs of mixed precision do: for each module the first of the rules decides, and ranks get them, too."""
    names = [f"layers.{layer}.experts.{expert}.{name}" for layer in range(3) for expert in range(4) for name in "ab"]
    own = [((name,), (Fixed(), Fp8Format(), PLAIN)[place % 3]) for place, name in enumerate(names)]
    rules = ((("layers.1.experts", r"re:.*\.3\.a$"), Fixed()), *own, (("b", "layers.2"), Fp8Format()))
    formats = pickle.loads(pickle.dumps(Formats(rules)))
    for place, name in enumerate(names):
        is_first = name.startswith("layers.1.") or name.endswith(".3.a")
        assert formats.of(name) == (Fixed() if is_first else own[place][1])
    assert formats.of("layers.0.b") == formats.of("layers.2.mlp") == Fp8Format()
    assert formats.of("layers.0.mlp") == formats.of("layers") == PLAIN
    assert formats == Formats(rules)
