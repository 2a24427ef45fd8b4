"""reference: a model's log-probabilities with gradients; on a GPU they have the bits of a deterministic engine's."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import CASES, VOCAB, build
from conftest import of_each_kind, write_random_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nanoinfer import BUNDLED_MODEL, LLM, RequestOutput, SamplingParams, reference
from nanoinfer.trainer.reference import Reference

FAMILIES = [
    "llama",
    "llama biases, llama3 rope",
    "qwen3",
    "qwen2 yarn, windows",
    "mistral window",
    "smollm3",
    "ernie4.5",
]


def sequences(count: int, longest: int = 90, vocab_size: int = VOCAB) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(rng.randint(2, longest))] for _ in range(count)]


def expected_logprobs(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    logprobs = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def weighted_sum(rows: list[torch.Tensor]) -> torch.Tensor:
    logprobs = torch.cat(rows)
    return logprobs @ torch.linspace(-1, 2, len(logprobs), device=logprobs.device)


class TestAgainstTransformers:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_logprobs_and_gradients(self, family: str, tmp_path: Path) -> None:
        build(CASES[family], tmp_path)
        ours = reference(str(tmp_path), device="cpu", dtype="float32")
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
        rows = sequences(5)
        found, expected = ours(rows), [expected_logprobs(theirs, row) for row in rows]
        for logprobs, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(logprobs, wanted, rtol=1e-4, atol=1e-4)
        weighted_sum(found).backward()
        weighted_sum(expected).backward()
        gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
        assert gradients.keys() == dict(ours.named_parameters()).keys()
        for name, parameter in ours.named_parameters():
            wanted = gradients[name]
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-3, atol=1e-4 * wanted.abs().max().item())

    def test_names_and_tensors_are_those_of_a_checkpoint(self) -> None:
        state = reference(BUNDLED_MODEL, device="cpu").state_dict()
        theirs = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).state_dict()
        assert state.keys() == theirs.keys()
        assert all(torch.equal(state[name], theirs[name]) for name in state)

    def test_other_weights(self, tmp_path: Path) -> None:
        """Then the model's own need not be there."""
        build(CASES["qwen3"], tmp_path)
        file = tmp_path / "model.safetensors"
        tensors = {name: tensor * 1.5 for name, tensor in load_file(file).items()}
        file.unlink()
        state = reference(str(tmp_path), tensors, device="cpu", dtype="float32").state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
        with pytest.raises(ValueError, match=r"checkpoint's tensors do not fit the model: unknown: other\."):
            reference(str(tmp_path), {"other": torch.zeros(3)}, device="cpu")
        tensors["model.norm.weight"][3] = torch.nan
        with pytest.raises(ValueError, match=r"checkpoint: model\.norm\.weight has numbers that are NaN"):
            reference(str(tmp_path), tensors, device="cpu")

    def test_a_head_of_its_own(self, tmp_path: Path) -> None:
        """Some configs call a head tied, and the weights hold another one."""
        build(CASES["llama tied, linear rope"], tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
        rows = sequences(2)
        (tmp_path / "other").mkdir()
        save_file(tensors, tmp_path / "other" / "model.safetensors")
        tied = reference(str(tmp_path), device="cpu", dtype="float32")
        by_folder = reference(str(tmp_path), tmp_path / "other", device="cpu", dtype="float32")
        by_tensors = reference(str(tmp_path), tensors, device="cpu", dtype="float32")
        for expected, found, other in zip(tied(rows), by_folder(rows), by_tensors(rows), strict=True):
            assert torch.equal(found, other)
            assert not torch.equal(found, expected)

    def test_nothing_is_drawn_and_no_table_is_rounded(self) -> None:
        torch.manual_seed(3)
        expected = torch.rand(4)
        torch.manual_seed(3)
        trainer = reference(BUNDLED_MODEL, device="cpu", dtype="float32")
        assert torch.equal(torch.rand(4), expected)
        before = trainer([[5, 6, 7]])[0]
        trainer.bfloat16().float()  # leaves the weights, which come from 16 bits
        assert torch.equal(trainer([[5, 6, 7]])[0], before)

    @pytest.mark.parametrize(
        "trained", ["model.norm", "layers.1.self_attn.q_norm", "layers.3", "lm_head", "layers.2.mlp"]
    )
    def test_some_parameters_are_frozen(self, trained: str, tmp_path: Path) -> None:
        build(CASES["qwen3"], tmp_path)
        trainer = reference(str(tmp_path), device="cpu", dtype="float32")
        weighted_sum(trainer(sequences(3))).backward()
        expected = {name: parameter.grad.clone() for name, parameter in trainer.named_parameters()}
        trainer.zero_grad()
        for name, parameter in trainer.named_parameters():
            parameter.requires_grad_(trained in name)
        weighted_sum(trainer(sequences(3))).backward()
        found = {name: parameter.grad for name, parameter in trainer.named_parameters() if parameter.grad is not None}
        assert found
        assert found.keys() == {name for name in expected if trained in name}
        assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())


def test_an_engine_takes_its_weights(make_llm: Callable[..., LLM]) -> None:
    trainer = reference(BUNDLED_MODEL, device="cpu", dtype="float32")
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter *= 1.1
    llm = make_llm(device="cpu")
    llm.update_weights(trainer.state_dict())
    prompt = list(range(30, 60))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    found = torch.tensor(
        [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
    )
    torch.testing.assert_close(found, trainer([prompt])[0].detach(), rtol=1e-4, atol=1e-4)


def logprobs_of(output: RequestOutput) -> torch.Tensor:
    """The log-probabilities of a prompt's tokens, but the first, and of the generated ones."""
    assert output.prompt_logprobs is not None
    assert output.logprobs is not None
    tokens = [*output.prompt_token_ids[1:], *output.token_ids]
    entries = [*output.prompt_logprobs[1:], *output.logprobs]
    return torch.tensor([entry[token].logprob for entry, token in zip(entries, tokens, strict=True)], device="cuda")


def largest_difference(llm: LLM, trainer: Reference, prompts: list[list[int]]) -> float:
    """Of a rollout's log-probabilities and those that the trainer recomputes."""
    params = SamplingParams(temperature=1.0, max_tokens=200, ignore_eos=True, logprobs=0, prompt_logprobs=0, seed=1)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    with torch.no_grad():
        found = trainer([[*output.prompt_token_ids, *output.token_ids] for output in outputs])
    return max((logprobs_of(output) - row).abs().max().item() for output, row in zip(outputs, found, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("family", [*of_each_kind(zip(FAMILIES), 2), pytest.param("0.6b", marks=pytest.mark.alone)])
def test_an_on_policy_ratio_is_exactly_one(family: str, tmp_path: Path) -> None:
    """Of 64 rollouts, before and after a step of the optimizer."""
    if family == "0.6b":
        write_random_checkpoint("0.6b", tmp_path)
    else:
        build(CASES[family], tmp_path)
    prompts = sequences(64, 90 if family != "0.6b" else 400)
    options = {"dtype": "bfloat16", "max_model_len": 640 if family == "0.6b" else 300}
    trainer = reference(str(tmp_path), **options)
    with LLM(str(tmp_path), deterministic=True, num_kvcache_blocks=64, **options) as llm:
        assert largest_difference(llm, trainer, prompts) == 0.0
        weighted_sum(trainer(prompts)).backward()
        before = trainer.model.norm.weight.clone()
        torch.optim.AdamW(trainer.parameters(), lr=1e-2).step()
        assert not torch.equal(trainer.model.norm.weight, before)
        llm.update_weights(trainer.state_dict())
        assert largest_difference(llm, trainer, prompts) == 0.0


class TestBadInput:
    @pytest.mark.parametrize(
        ("rows", "problem"),
        [
            ([], r"sequences=\[\]: must be a list of lists of token ids, at least one"),
            ("text", "sequences='text': must be a list of lists"),
            ([[1, 2], []], r"sequences\[1\]=\[\]: must be a list of token ids from 0 to 2047, at least one"),
            ([1, 2], r"sequences\[0\]=1: must be a list of token ids"),
            ([[1, 2048]], r"sequences\[0\]=\[1, 2048\]: must be a list of token ids from 0 to 2047"),
            ([[1, 2.5]], r"sequences\[0\]=\[1, 2.5\]: must be a list of token ids"),
            ([[1] * 33], r"sequences\[0\] has 33 tokens: max_model_len=32 is the most"),
        ],
    )
    def test_sequences(self, rows: object, problem: str) -> None:
        trainer = reference(BUNDLED_MODEL, device="cpu", max_model_len=32)
        with pytest.raises(ValueError, match=problem):
            trainer(rows)

    def test_ids_of_other_libraries(self) -> None:
        trainer = reference(BUNDLED_MODEL, device="cpu")
        expected = trainer([[5, 6, 7]])[0]
        for ids in (np.array([5, 6, 7]), torch.tensor([5, 6, 7]), [np.int64(5), 6, 7], (5, 6, 7)):
            assert torch.equal(trainer([ids])[0], expected)

    @pytest.mark.parametrize("checkpoint", [3, [("a", torch.zeros(1))], iter(()), {"a": 3}])
    def test_checkpoints(self, checkpoint: object) -> None:
        with pytest.raises(ValueError, match=r"checkpoint=.*: must be a folder of safetensors files, or tensors by"):
            reference(BUNDLED_MODEL, checkpoint, device="cpu")

    def test_a_checkpoint_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"checkpoint='.*': the folder has no \*.safetensors file"):
            reference(BUNDLED_MODEL, tmp_path, device="cpu")

    @pytest.mark.parametrize(
        ("family", "problem"),
        [
            ("gemma2", "reference has no soft caps"),
            ("qwen3moe", "reference has no experts"),
            ("lfm2", "reference has no layers that keep a state"),
            ("olmo2", "reference has no norms of all heads at once"),
            ("granite", "reference has no factors of its embeddings, branches, logits or queries"),
            ("phi3", "reference has no projections that share a tensor"),
            ("glm", "reference has no projections that share a tensor"),
            ("vaultgemma without caps", "reference has no norms whose weights are stored less one"),
            ("exaone4 without windows", "reference has no norms of a branch's result"),
        ],
    )
    def test_models(self, family: str, problem: str, tmp_path: Path) -> None:
        build(CASES[family], tmp_path)
        with pytest.raises(ValueError, match=problem):
            reference(str(tmp_path), device="cpu")
