"""torch's state on the caller's thread, which must not reach what is computed here.

A caller may be inside autocast, `with torch.device("meta")`, torch.inference_mode() or another mode of torch, and may
have set another default dtype, deterministic algorithms or the kernels of attention. Inside `fresh_torch_state` torch
computes as in a process that has set nothing. The other ranks live in such processes. Anomaly mode needs no entry: it
changes gradients alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

NOTHING: AbstractContextManager[None] = nullcontext()
AUTOCAST_DEVICES = ("cpu", "cuda")
ATTENTIONS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.OVERRIDEABLE,
]


def fresh_torch_state() -> AbstractContextManager[None]:
    """Return a context in which torch computes as if the caller had set nothing.

    Each decode step enters it. If nothing is set, it takes about a microsecond, and in torch.no_grad() little more.
    """
    c = torch._C
    is_fresh = (
        c._len_torch_function_stack() == 0
        and c._len_torch_dispatch_stack() == 0
        and c._functorch.peek_interpreter_stack() is None
        and not c._is_torch_function_all_disabled()
        and not c._is_any_autocast_enabled()
        and not c._get_deterministic_algorithms()
        and c._get_cudnn_sdp_enabled()
        and c._get_flash_sdp_enabled()
        and c._get_mem_efficient_sdp_enabled()
        and c._get_math_sdp_enabled()
        and c._get_overrideable_sdp_enabled()
        and torch.get_default_dtype() is torch.float32
    )
    if not is_fresh:
        return _cleared()
    has_gradients = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return NOTHING if has_gradients else torch.inference_mode(False)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let new tensors have this dtype inside the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _cleared() -> Iterator[None]:
    """Put aside whatever is set, and set it again behind the block."""
    with ExitStack() as stack:
        for context in (
            _no_function_modes(),
            _no_dispatch_modes(),
            _no_transforms(),
            _no_autocast(),
            _no_deterministic_algorithms(),
            sdpa_kernel(ATTENTIONS),  # torch chooses among all
            default_dtype(torch.float32),
            torch.inference_mode(False),  # ends torch.no_grad(), too
        ):
            stack.enter_context(context)
        yield


@contextmanager
def _no_function_modes() -> Iterator[None]:
    """Take away torch.device's contexts, torch.set_default_device and the like."""
    c = torch._C
    modes = [c._pop_torch_function_stack() for _ in range(c._len_torch_function_stack())]
    try:
        with c._EnableTorchFunction():
            yield
    finally:
        for mode in reversed(modes):
            c._push_on_torch_function_stack(mode)


@contextmanager
def _no_dispatch_modes() -> Iterator[None]:
    """Take away the modes that see each operation, such as FakeTensorMode."""
    if torch._C._len_torch_dispatch_stack() == 0:
        yield
        return
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


@contextmanager
def _no_transforms() -> Iterator[None]:
    """Take away torch.func's transforms, such as grad and vmap."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        yield
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        yield


@contextmanager
def _no_autocast() -> Iterator[None]:
    before = {device: torch.is_autocast_enabled(device) for device in AUTOCAST_DEVICES}
    try:
        for device in AUTOCAST_DEVICES:
            torch.set_autocast_enabled(device, False)
        yield
    finally:
        for device, is_enabled in before.items():
            torch.set_autocast_enabled(device, is_enabled)


@contextmanager
def _no_deterministic_algorithms() -> Iterator[None]:
    """Let operations choose as ever. torch.use_deterministic_algorithms would change the compiler's settings, too."""
    c = torch._C
    before, warns = c._get_deterministic_algorithms(), c._get_deterministic_algorithms_warn_only()
    try:
        c._set_deterministic_algorithms(False, warn_only=False)
        yield
    finally:
        c._set_deterministic_algorithms(before, warn_only=warns)
