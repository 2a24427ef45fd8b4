"""deterministic=True: no bit of a request's results depends on its company."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path

import pytest
import torch
from cases import CASES, Case, build
from conftest import greedy, whole_only, write_random_checkpoint
from safetensors.torch import load_file

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams
from nanoinfer.attention.context import Context
from nanoinfer.benchmark import determinism
from nanoinfer.benchmark.determinism import LONGEST, Bits, bits_of, draw_cases, find_difference
from nanoinfer.checkpoint import Checkpoint
from nanoinfer.kernels.experts.route import Routing
from nanoinfer.models import describe
from nanoinfer.models.ranks import check_ranks_in_order
from nanoinfer.models.reading.experts import MoEConfig
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.logits.processors import LogitsProcessors
from nanoinfer.runner.message import LogitsMessage
from nanoinfer.runner.steps.one_by_one import OneByOne
from nanoinfer.weights.formats.formats import PLAIN_FORMATS, all_in
from nanoinfer.weights.formats.fp8.format import Fp8Format

SECONDS = 2.0
SHORT = 30, 6  # tokens of a prompt, and of an output
OPTIONS = {"device": "cpu", "max_model_len": 96, "deterministic": True}
ON_CUDA = {**OPTIONS, "device": "cuda", "dtype": "bfloat16"}
DEVICES = [OPTIONS, pytest.param(ON_CUDA, marks=pytest.mark.gpu)]
PROGRAM = """
import hashlib, sys
from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams
params = [SamplingParams(temperature=1.0, max_tokens=20, logprobs=2, seed=seed, ignore_eos=True) for seed in range(8)]
with LLM(BUNDLED_MODEL, device=sys.argv[1], dtype="bfloat16", deterministic=True, num_kvcache_blocks=16) as llm:
    outputs = llm.generate([[7, 8, 9] * (seed + 1) for seed in range(8)], params, use_tqdm=False)
told = repr([(output.token_ids, output.logprobs) for output in outputs])
print(hashlib.sha256(told.encode()).hexdigest())
"""
IN_BLOCKS = {  # sizes that blocks of weights in FP8 fill
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
RANKED = ["qwen3", "mistral window", "gemma2", "phi3 longrope", "qwen3moe", "qwen2moe", "olmo2", "olmoe"]
FAMILIES = ["qwen3", "mistral window", "gemma2", "qwen3moe", "phi3 longrope", "gptoss"]
ON_A_GPU = [*FAMILIES, "qwen2moe", "mixtral", "llama biases, llama3 rope", "gemma4", "gemma4 experts"]
IN_FLOAT32 = [(family, "float32") for family in ON_A_GPU if family != "qwen3"]


def maker(folder: str, deterministic: bool = True, device: str = "cpu", dtype: str = "auto") -> Callable[..., LLM]:
    def make(**options: int) -> LLM:
        options.setdefault("num_kvcache_blocks", 16)  # not all of a GPU's memory
        return LLM(folder, device=device, dtype=dtype, deterministic=deterministic, **options)

    return make


def bits(llm: LLM, count: int = 6) -> list[Bits]:
    cases = draw_cases(random.Random(1), 256, count, SHORT)
    return [bits_of(llm.generate([case.prompt], case.params, use_tqdm=False)[0]) for case in cases]


class TestInCompany:
    """Requests join at random times; chunks, blocks and rows are few or many."""

    @pytest.mark.whole
    @pytest.mark.parametrize("family", FAMILIES)
    def test_results_are_those_alone(self, family: str, tmp_path: Path) -> None:
        build(CASES[family], tmp_path)
        compared, difference = find_difference(maker(str(tmp_path)), SECONDS, FAMILIES.index(family), 10)
        assert difference is None, str(difference)
        assert compared > 5

    @pytest.mark.gpu
    @pytest.mark.parametrize(
        ("family", "dtype"), [*product(ON_A_GPU, ["bfloat16"]), ("qwen3", "float32"), *whole_only(IN_FLOAT32)]
    )
    def test_results_are_those_alone_on_a_gpu(self, family: str, dtype: str, tmp_path: Path) -> None:
        build(CASES[family], tmp_path)
        make = maker(str(tmp_path), device="cuda", dtype=dtype)
        compared, difference = find_difference(make, SECONDS, 3, 20)
        assert difference is None, str(difference)
        assert compared > 10

    @pytest.mark.gpu
    def test_a_cache_in_fp8_on_a_gpu(self) -> None:
        make = maker(BUNDLED_MODEL, device="cuda", dtype="bfloat16")
        compared, difference = find_difference(partial(make, kv_cache_dtype="fp8"), SECONDS, 1, 20, LONGEST["cuda"])
        assert difference is None, str(difference)
        assert compared > 10

    @pytest.mark.gpu
    @pytest.mark.parametrize(
        ("family", "kv_cache_dtype"),
        [
            *[("qwen3", "auto"), ("qwen3", "fp8"), ("qwen3moe", "fp8"), ("qwen2moe", "fp8")],
            *whole_only([("qwen3moe", "auto"), ("qwen2moe", "auto")]),
        ],
    )
    def test_weights_in_fp8_on_a_gpu(self, family: str, kv_cache_dtype: str, tmp_path: Path) -> None:
        case = CASES[family]
        build(replace(case, settings={**case.settings, **IN_BLOCKS}), tmp_path)
        make = maker(str(tmp_path), device="cuda", dtype="bfloat16")
        make = partial(make, quantization="fp8", kv_cache_dtype=kv_cache_dtype)
        compared, difference = find_difference(make, SECONDS, 3, 20)
        assert difference is None, str(difference)
        assert compared > 10

    @pytest.mark.gpu
    def test_eager_steps_and_graphs(self, make_llm: Callable[..., LLM]) -> None:
        options = {"device": "cuda", "dtype": "bfloat16", "deterministic": True}
        assert bits(make_llm(**options, enforce_eager=True)) == bits(make_llm(**options))

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_long_results_are_those_alone_on_a_gpu(self, dtype: str) -> None:
        """Rows have several chunks of keys, and programs share them."""
        make = maker(BUNDLED_MODEL, device="cuda", dtype=dtype)
        compared, difference = find_difference(make, 4 * SECONDS, 0, 20, LONGEST["cuda"])
        assert difference is None, str(difference)
        assert compared > 10

    def test_the_comparison_finds_what_differs(self) -> None:
        """Without the option, a prompt's tokens are multiplied together, and round otherwise than one by one."""
        _, difference = find_difference(maker(BUNDLED_MODEL, deterministic=False), SECONDS, 0, 6, SHORT)
        assert difference is not None
        assert difference.alone != difference.in_company
        assert "the first result that differs is that of layers.0." in str(difference)

    @pytest.mark.whole
    @pytest.mark.parametrize("family", ["qwen3", "gemma2"])
    def test_the_first_result_that_differs_is_named(
        self, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One module of a deterministic engine returns something else for a token that has company."""
        build(CASES[family], tmp_path)
        run = OneByOne._run_rows

        def disturbed(steps: OneByOne, tokens: torch.Tensor, context: Context, adapters: None) -> torch.Tensor:
            down_proj = steps.model.layers[1].mlp.down_proj
            factor = 1.00001 if len(tokens) > 2 else 1
            hook = down_proj.register_forward_hook(lambda module, inputs, out: out * factor, prepend=True)
            try:
                return run(steps, tokens, context, adapters)
            finally:
                hook.remove()

        monkeypatch.setattr(OneByOne, "_run_rows", disturbed)
        _, difference = find_difference(maker(str(tmp_path)), SECONDS, 0, 10)
        assert difference is not None
        assert "the first result that differs is that of layers.1.mlp.down_proj, at position" in difference.cause

    @pytest.mark.whole
    def test_a_first_engine_that_differs_is_told_from_company(self) -> None:
        engines = []

        def make(**options: int) -> LLM:
            engines.append(maker(BUNDLED_MODEL)(**options))
            if len(engines) == 1:
                engines[0].engine.ranks.runner.holdings.model.embedding.weight *= 1.001
            return engines[-1]

        _, difference = find_difference(make, SECONDS, 0, 10)
        assert difference is not None
        assert difference.cause.startswith("alone again, in an eager engine with tensor_parallel_size=1, ")
        assert difference.cause.endswith(f"is {difference.in_company}")

    def test_the_command(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        formats = ["--device", "cpu", "--quantization", "fp8", "--kv-cache-dtype", "fp8"]
        monkeypatch.setitem(LONGEST, "cpu", SHORT)
        limits = ["--seconds", "0", "--requests", "3"]
        monkeypatch.setattr(sys, "argv", ["determinism", BUNDLED_MODEL, *limits, *formats])
        status = determinism.main()
        told = capsys.readouterr()
        assert "results compared: all bits equal" in told.out, told.out + told.err
        assert "requests alone\nrequests in company\n" in told.err
        assert status == 0

    @pytest.mark.whole
    def test_the_command_has_a_process_of_its_own(self) -> None:
        command = [sys.executable, "-m", "nanoinfer.benchmark.determinism", BUNDLED_MODEL]
        limits = ["--seconds", "0", "--requests", "4"]
        ran = subprocess.run([*command, *limits], capture_output=True, text=True, check=False)
        assert "results compared: all bits equal" in ran.stdout, ran.stdout + ran.stderr
        assert "requests alone\nrequests in company\n" in ran.stderr
        assert ran.returncode == 0

    def test_engines_of_the_command_write_nothing_into_its_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An engine that starts for long would leave bars and a line of its own."""
        options: list[dict[str, object]] = []

        def find(make_llm: Callable[..., LLM], *_: object) -> tuple[int, None]:
            make_llm(max_num_seqs=2)
            return 0, None

        monkeypatch.setattr(determinism, "LLM", lambda model, **given: options.append(given))
        monkeypatch.setattr(determinism, "find_difference", find)
        monkeypatch.setattr(sys, "argv", ["determinism", BUNDLED_MODEL, "--device", "cpu"])
        assert determinism.main() == 0
        assert [(given["use_tqdm"], given["max_num_seqs"]) for given in options] == [(False, 2)]


class TestChanges:
    """What happens to an engine leaves no trace in later results."""

    @pytest.mark.whole
    @pytest.mark.parametrize("options", DEVICES)
    def test_sleep_and_updates(self, options: dict[str, object], make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(**options)
        before = bits(llm)
        tensors = load_file(f"{BUNDLED_MODEL}/model.safetensors")
        llm.update_weights({name: tensor * 1.5 for name, tensor in tensors.items()})
        assert bits(llm) != before
        llm.sleep(level=2)
        llm.wake_up()
        llm.update_weights(tensors)
        assert bits(llm) == before
        assert bits(make_llm(**options)) == before

    @pytest.mark.parametrize("options", DEVICES)
    def test_streams(self, options: dict[str, object], make_llm: Callable[..., LLM]) -> None:
        llm, prompts = make_llm(**options), [[5, 6, 7], [9] * 20, [8, 1]]
        params = SamplingParams(temperature=1.0, max_tokens=5, n=2, logprobs=3, ignore_eos=True, seed=4)
        expected = {
            (index, number): (sample.token_ids, sample.logprobs)
            for index, prompt in enumerate(prompts)
            for number, sample in enumerate(llm.generate([prompt], params, use_tqdm=False)[0].samples)
        }
        streamed = {key: ([], []) for key in expected}
        for piece in llm.stream(prompts, params):
            for told, new in zip(streamed[piece.index, piece.sample], (piece.token_ids, piece.logprobs), strict=True):
                told += new
        assert streamed == expected

    @pytest.mark.whole
    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    def test_starts_of_a_program(self, device: str, tmp_path: Path) -> None:
        """On a GPU, kernels are compiled, found from before, and compiled once more."""
        digests = set()
        for cache in ("a", "a", "b") if device == "cuda" else ("a", "a"):
            environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / cache)}
            command = [sys.executable, "-c", PROGRAM, device]
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            digests.add(ran.stdout.split()[-1])
        assert len(digests) == 1
        assert len(digests.pop()) == 64

    def test_threads(self, make_llm: Callable[..., LLM]) -> None:
        threads, found = torch.get_num_threads(), []
        try:
            for count in (1, 2):
                torch.set_num_threads(count)
                found.append(bits(make_llm(**OPTIONS), 3))
        finally:
            torch.set_num_threads(threads)
        assert found[0] == found[1]

    def test_guided_rows_are_drawn_by_one_thread(
        self, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are drawn while the host makes masks: torch adds up a large vocabulary otherwise by two threads."""
        threads, seen = torch.get_num_threads(), set()
        llm = make_llm(**OPTIONS)
        steps = llm.engine.ranks.runner.steps
        draw = steps.draw
        monkeypatch.setattr(steps, "draw", lambda *how: (seen.add(torch.get_num_threads()), draw(*how))[1])
        params = SamplingParams(max_tokens=4, structured_outputs={"choice": ["yes", "no"]})
        torch.set_num_threads(2)
        try:
            assert llm.generate(["Say"], params, use_tqdm=False)[0].text in ("yes", "no")
        finally:
            torch.set_num_threads(threads)
        assert seen == {1}

    @pytest.mark.parametrize("options", [OPTIONS, pytest.param(ON_CUDA, marks=pytest.mark.multi_gpu)])
    @pytest.mark.whole
    def test_replicas(self, options: dict[str, object], make_llm: Callable[..., LLM]) -> None:
        cases = draw_cases(random.Random(1), 256, 6, SHORT)
        prompts, params = [case.prompt for case in cases], [case.params for case in cases]
        together = make_llm(**options, data_parallel_size=2).generate(prompts, params, use_tqdm=False)
        assert [bits_of(output) for output in together] == bits(make_llm(**options))


class TestRanks:
    """Ranks that share a model give the bits that one rank gives."""

    @pytest.mark.parametrize(("ranks", "dtype"), [(2, "float32"), *whole_only([(2, "bfloat16"), (4, "float32")])])
    def test_on_the_cpu(self, ranks: int, dtype: str, make_llm: Callable[..., LLM]) -> None:
        one, several = (make_llm(**OPTIONS, dtype=dtype, tensor_parallel_size=count) for count in (1, ranks))
        assert bits(several, 2) == bits(one, 2)

    @pytest.mark.parametrize("ranks", [2, *whole_only([4])])
    def test_weights_in_fp8_on_the_cpu(self, ranks: int, make_llm: Callable[..., LLM]) -> None:
        options = {**OPTIONS, "quantization": "fp8", "kv_cache_dtype": "fp8", "dtype": "bfloat16"}
        one, several = (make_llm(**options, tensor_parallel_size=count) for count in (1, ranks))
        assert bits(several, 2) == bits(one, 2)

    @pytest.mark.whole
    def test_weights_in_fp8_in_company(self, tmp_path: Path) -> None:
        """Also experts, and shares that cut blocks."""
        case = CASES["qwen2moe"]
        build(replace(case, settings={**case.settings, "shared_expert_intermediate_size": 48}), tmp_path)
        make = partial(maker(str(tmp_path)), quantization="fp8")
        compared, difference = find_difference(make, 0, 0, 3, ranks=(2,))
        assert difference is None, str(difference)
        assert compared > 2

    @pytest.mark.multi_gpu
    @pytest.mark.parametrize("family", ["qwen3", "qwen3moe", "qwen2moe"])
    def test_weights_in_fp8_on_gpus(self, family: str, tmp_path: Path) -> None:
        case = CASES[family]
        sizes = {name: 256 if size < 256 else 512 for name, size in IN_BLOCKS.items() if name.endswith("size")}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
        build(replace(case, settings={**case.settings, **sizes, **heads}), tmp_path)
        make = partial(maker(str(tmp_path), device="cuda", dtype="bfloat16"), quantization="fp8")
        compared, difference = find_difference(make, SECONDS, 3, 20, ranks=(1, 2))
        assert difference is None, str(difference)
        assert compared > 10

    @pytest.mark.whole
    @pytest.mark.parametrize("family", ["olmo2 biases", "phi3 longrope", "qwen2moe"])
    def test_in_company(self, family: str, tmp_path: Path) -> None:
        """Of a model whose checkpoint fuses projections, one with a shared expert, and norms over all heads."""
        case = CASES[family]
        build(replace(case, settings={**case.settings, "shared_expert_intermediate_size": 48}), tmp_path)
        compared, difference = find_difference(maker(str(tmp_path)), 0, 0, 3, ranks=(2,))
        assert difference is None, str(difference)
        assert compared > 2

    @pytest.mark.multi_gpu
    @pytest.mark.parametrize(
        ("family", "dtype"),
        [*product(RANKED, ["bfloat16"]), ("qwen3", "float32"), *whole_only(product(RANKED[1:], ["float32"]))],
    )
    def test_in_company_on_gpus(self, family: str, dtype: str, tmp_path: Path) -> None:
        build(CASES[family], tmp_path)
        make = maker(str(tmp_path), device="cuda", dtype=dtype)
        compared, difference = find_difference(make, SECONDS, 3, 20, ranks=(2,))
        assert difference is None, str(difference)
        assert compared > 10

    @pytest.mark.multi_gpu
    def test_long_results_on_gpus(self) -> None:
        make = maker(BUNDLED_MODEL, device="cuda", dtype="bfloat16")
        compared, difference = find_difference(make, 4 * SECONDS, 0, 20, LONGEST["cuda"], ranks=(1, 2))
        assert difference is None, str(difference)
        assert compared > 10

    @pytest.mark.multi_gpu
    def test_a_thousand_requests_have_one_digest(self, tmp_path: Path) -> None:
        """In five orders, on one GPU and on two: of a random model of 0.6b."""
        write_random_checkpoint("0.6b", tmp_path)
        rng = random.Random(0)
        prompts = [[rng.randrange(1000) for _ in range(rng.randint(10, 300))] for _ in range(1000)]
        params = [
            SamplingParams(temperature=1.0, max_tokens=rng.randint(1, 200), ignore_eos=True, seed=number)
            for number in range(1000)
        ]
        digests = set()
        for ranks in (1, 2):
            with LLM(str(tmp_path), deterministic=True, tensor_parallel_size=ranks) as llm:
                for _ in range(5):
                    order = rng.sample(range(1000), 1000)
                    outputs = llm.generate([prompts[i] for i in order], [params[i] for i in order], use_tqdm=False)
                    tokens = dict(zip(order, (output.token_ids for output in outputs), strict=True))
                    digests.add(sha256(repr(sorted(tokens.items())).encode()).hexdigest())
        assert len(digests) == 1


def test_rows_for_which_torch_sums_or_selects_are_drawn_alone() -> None:
    """On a GPU the other rows are drawn together. Masks come for guided rows in ascending order."""
    shapes = 64, 8, 32, torch.device("cpu"), TensorParallel()
    processors = LogitsProcessors(*shapes, is_processed=False, is_deterministic=True)
    plain, chosen, guided = {"logprobs": 0}, {"logprobs": 2}, {"structured_outputs": {"choice": ["a"]}}
    settings = [plain, chosen, plain, {"kept_tokens": True}, {"logit_bias": {1: 1.0}}, guided, {**guided, **chosen}]
    for row, setting in enumerate(settings):
        processors.wanted[row] = LogitsMessage(SamplingParams(**setting), array("i"), 1, (), 0)
    groups = processors._divide(list(processors.wanted))
    assert [group.row_numbers.tolist() for group in groups] == [[1], [0, 2], [3], [4], [5], [6]]


def test_experts_are_those_alone(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    build(CASES["qwen3moe"], tmp_path)
    llm = make_llm(str(tmp_path), **OPTIONS, routed_experts=True)
    prompts, params = [[5, 6, 7], [9] * 20], SamplingParams(temperature=1.0, max_tokens=5, ignore_eos=True, seed=3)
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = llm.generate([prompt], params, use_tqdm=False)
        assert output.routed_experts.tolist() == alone.routed_experts.tolist()
        assert len(alone.routed_experts) == len(prompt) + 4


def test_an_interrupt_leaves_no_experts(
    tmp_path: Path, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    build(CASES["qwen3moe"], tmp_path)
    llm = make_llm(str(tmp_path), **OPTIONS, routed_experts=True)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    (expected,) = llm.generate([[9] * 6], params, use_tqdm=False)
    steps, calls = llm.engine.ranks.runner.steps, []
    run = steps._run_token

    def interrupted(*how: object, **options: object) -> object:
        calls.append(how)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run(*how, **options)

    monkeypatch.setattr(steps, "_run_token", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[8] * 6], params, use_tqdm=False)
    (found,) = llm.generate([[9] * 6], params, use_tqdm=False)
    assert found.routed_experts.tolist() == expected.routed_experts.tolist()


def test_tokens_are_the_usual_ones(make_llm: Callable[..., LLM]) -> None:
    prompts = [[7], list(range(20, 60)), [5, 6] * 20]
    expected = make_llm(device="cpu").generate(prompts, greedy(8), use_tqdm=False)
    found = make_llm(**OPTIONS).generate(prompts, greedy(8), use_tqdm=False)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]


class TestWhatCannotBe:
    @pytest.mark.parametrize(
        ("case", "ranks", "problem"),
        [
            (CASES["qwen2moe"], 2, "on the CPU, shared_expert_intermediate_size=40 must be a multiple of 16"),
            (CASES["gemma2"], 2, "the CPU computes soft caps in another way for another number of heads"),
            (CASES["gptoss"], 2, "the CPU computes sinks in another way for another number of heads"),
            (CASES["gemma4 layer inputs"], 2, "on the CPU, hidden_size_per_layer_input=12 must be a multiple of 64"),
            (CASES["qwen3"], 4, "num_key_value_heads=2 is not divisible by the number of ranks"),
            (replace(CASES["qwen3"], settings={"hidden_size": 40}), 2, "on the CPU, hidden_size=40 must be a multiple"),
        ],
    )
    def test_several_ranks(self, case: Case, ranks: int, problem: str, tmp_path: Path) -> None:
        build(case, tmp_path)
        told = f"deterministic=True with tensor_parallel_size={ranks}: {problem}.*; use another number of ranks"
        with pytest.raises(ValueError, match=told):
            LLM(str(tmp_path), **OPTIONS, tensor_parallel_size=ranks)

    def test_several_ranks_of_weights_in_fp8_on_gpus(self) -> None:
        """Where a rank's share cuts a block, the kernel applies scales in another place."""
        model = replace(describe(Checkpoint.open(BUNDLED_MODEL).hf_config), formats=all_in(Fp8Format()))
        with pytest.raises(ValueError, match="with weights in FP8, hidden_size=192 must be a multiple of 256; use"):
            check_ranks_in_order(model, 2, on_cpu=False)
        sparse = (*(False,) * (model.num_layers - 1), True)
        experts = MoEConfig(sparse, count=8, size=192, routing=Routing(used=2))
        check_ranks_in_order(replace(model, hidden_size=256, experts=experts), 2, on_cpu=False)
        for formats in (PLAIN_FORMATS, *map(all_in, (Fp8Format((64, 128)), Fp8Format((None, None))))):
            check_ranks_in_order(replace(model, formats=formats), 2, on_cpu=False)

    @pytest.mark.gpu
    def test_on_cuda(self) -> None:
        with pytest.raises(ValueError, match=r"attention_backend='torch' adds up in other orders .* must be 'triton'"):
            LLM(BUNDLED_MODEL, deterministic=True, attention_backend="torch")
        with pytest.raises(ValueError, match=r"weights in FP8.* dtype must have 16 bits.* here dtype is float32"):
            LLM(BUNDLED_MODEL, deterministic=True, quantization="fp8", dtype="float32")

    def test_no_flag(self) -> None:
        with pytest.raises(ValueError, match="deterministic='yes': must be True or False"):
            LLM(BUNDLED_MODEL, device="cpu", deterministic="yes")
