"""What a caller has set for torch does not reach what an LLM computes, and stays as the caller has set it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from conftest import greedy, of_each_kind
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams, reference
from nanoinfer.process.torch_state import fresh_torch_state
from nanoinfer.runner.threads import num_threads

pytestmark = pytest.mark.filterwarnings("ignore:Anomaly Detection")

PROMPT = list(range(40, 90))
SETTINGS = [
    greedy(4, logprobs=3, prompt_logprobs=0),
    SamplingParams(max_tokens=4, seed=3, top_p=0.9, repetition_penalty=1.2, logprobs=1, kept_tokens=True),
]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_kvcache_blocks": 20,
    "kvcache_block_size": 256,
    "max_model_len": 256,
}


class NoFunction(TorchFunctionMode):
    """Refuses every function of torch, but for a look at a tensor's attributes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device or getattr(func, "__name__", "") == "__get__":
            return func(*args, **(kwargs or {}))
        raise AssertionError(func)


class NoOperation(TorchDispatchMode):
    """Refuses every operation of torch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(func)


@contextmanager
def set_until_the_end(set_it: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    set_it(value)
    try:
        yield
    finally:
        set_it(before)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast of CUDA": lambda: set_until_the_end(partial(torch.set_autocast_enabled, "cuda"), True, False),
    "default device": lambda: set_until_the_end(torch.set_default_device, "meta", None),  # torch 2.10 sets it first
    "device": lambda: torch.device("meta"),
    "default dtype": lambda: set_until_the_end(torch.set_default_dtype, torch.float64, torch.float32),
    "half as default dtype": lambda: set_until_the_end(torch.set_default_dtype, torch.float16, torch.float32),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "deterministic": lambda: set_until_the_end(torch.use_deterministic_algorithms, True, False),
    "anomaly": torch.autograd.detect_anomaly,
    "one kernel of attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "no kernel of attention": lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
    "function mode": NoFunction,
    "operation mode": NoOperation,
    "fake tensors": FakeTensorMode,
    "no modes": torch._C.DisableTorchFunction,
}


def state() -> list[Any]:
    """What the caller's thread has set."""
    c = torch._C
    return [
        *map(c._get_function_stack_at, range(c._len_torch_function_stack())),
        *map(c._get_dispatch_stack_at, range(c._len_torch_dispatch_stack())),
        c._is_torch_function_all_disabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_deterministic_debug_mode(),
        c._get_math_sdp_enabled(),
        c._get_flash_sdp_enabled(),
        c._get_cudnn_sdp_enabled(),
    ]


def generate(llm: LLM) -> list[Any]:
    """The tokens of two requests, and the bits of their log-probabilities."""
    llm.reset_prefix_cache()
    return [
        (output.token_ids, output.logprobs, output.prompt_logprobs, output.kept_tokens)
        for output in llm.generate([PROMPT] * len(SETTINGS), SETTINGS, use_tqdm=False)
    ]


@pytest.fixture(scope="module")
def llms() -> Iterator[list[tuple[LLM, list[Any]]]]:
    """One rank, and two, each with what it generates; two are on the CPU unless there are two GPUs."""
    ranks = {**OPTIONS, "tensor_parallel_size": 2, "device": "auto" if torch.cuda.device_count() > 1 else "cpu"}
    with num_threads(1), LLM(BUNDLED_MODEL, **OPTIONS) as one, LLM(BUNDLED_MODEL, **ranks) as two:
        yield [(llm, generate(llm)) for llm in (one, two)]


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in reference(BUNDLED_MODEL, dtype="float32").named_parameters()}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_call_has_the_same_bits(name: str, llms: list[tuple[LLM, list[Any]]]) -> None:
    for llm, expected in llms:
        with CONTEXTS[name]():
            before = state()
            found = generate(llm)
            assert state() == before
        assert found == expected


@pytest.mark.parametrize("name", of_each_kind(CONTEXTS, 0, 3, 6))
def test_so_do_new_weights_and_a_wake(
    name: str, llms: list[tuple[LLM, list[Any]]], tensors: dict[str, torch.Tensor]
) -> None:
    for llm, expected in llms:
        with CONTEXTS[name]():
            llm.sleep(level=2)
            llm.wake_up()
            llm.update_weights(tensors)
            assert generate(llm) == expected
            llm.load_weights(BUNDLED_MODEL)
        assert generate(llm) == expected


@pytest.mark.parametrize("name", of_each_kind(CONTEXTS, 0, 3, 4))
def test_so_does_an_llm_that_starts_there(name: str, llms: list[tuple[LLM, list[Any]]]) -> None:
    with CONTEXTS[name]():
        before = state()
        with LLM(BUNDLED_MODEL, **OPTIONS) as llm:
            found = generate(llm)
        assert state() == before
    assert found == llms[0][1]


def test_tensors_are_made_in_the_state_of_the_caller(
    llms: list[tuple[LLM, list[Any]]], tensors: dict[str, torch.Tensor]
) -> None:
    """An iterator of tensors is the caller's code: between two of our writes it finds what the caller has set."""
    seen = set()

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in tensors.items():
            seen.add((torch.is_autocast_enabled("cpu"), torch.get_default_dtype(), torch.is_grad_enabled()))
            yield pair

    for llm, expected in llms:
        with CONTEXTS["autocast"](), CONTEXTS["default dtype"](), torch.no_grad():
            llm.update_weights(made())
        assert generate(llm) == expected
    assert seen == {(True, torch.float64, False)}


def test_all_at_once() -> None:
    with ExitStack() as stack:
        for context in CONTEXTS.values():
            stack.enter_context(context())
        before = state()
        with fresh_torch_state():
            made = torch.ones(2) / 3
            with torch.device("meta"):  # which works as ever
                assert torch.empty(1).is_meta
            with fresh_torch_state():
                assert type(made) is torch.Tensor
                assert (made.dtype, made.device.type) == (torch.float32, "cpu")
                assert not made.is_inference()
        assert state() == before
        with pytest.raises(ZeroDivisionError), fresh_torch_state():
            raise ZeroDivisionError
        assert state() == before


def test_inside_a_transform(llms: list[tuple[LLM, list[Any]]]) -> None:
    """A function that torch differentiates may ask an LLM."""
    llm, expected = llms[0]
    found: list[Any] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append(generate(llm))
        return x * x

    assert torch.func.grad(function)(torch.tensor(3.0)) == 6
    assert found == [expected]


def test_the_reference_has_its_own_state() -> None:
    """Its gradients stay the caller's."""
    made = reference(BUNDLED_MODEL, dtype="float32")
    (expected,) = made([PROMPT])
    for name in ("autocast", "default device", "default dtype", "deterministic"):
        with CONTEXTS[name]():
            (found,) = reference(BUNDLED_MODEL, dtype="float32")([PROMPT])
        assert torch.equal(found, expected)
        assert found.requires_grad
