"""What the hidden states of texts add up to: the same in any order, and what float64 gives."""

from __future__ import annotations

import pytest
import torch

from nanoinfer.kernels.text_sums import sum_texts_reference, sum_texts_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENS = [1, 15, 16, 17, 1100, 3]


def made(texts: list[torch.Tensor], lens: list[int] = LENS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return packed hidden states with others around them, where the texts begin, and their lengths."""
    parts, begins, at = [], [], 0
    for text, length in zip(texts, lens, strict=True):
        between = torch.full((2, text.shape[1]), torch.inf, device=DEVICE, dtype=text.dtype)
        parts += [between, text]
        begins.append(at + 2)
        at += 2 + length
    places = (torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in (begins, lens))
    return torch.cat(parts), *places


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize(("size", "dtype"), [(100, torch.float32), (64, torch.bfloat16), (384, torch.float16)])
def test_sums(size: int, dtype: torch.dtype, is_weighted: bool) -> None:
    texts = [(torch.randn(length, size, device=DEVICE) * 10).to(dtype) for length in LENS]
    starts = [0, 7, 0, 100, 0, 2]
    given = torch.tensor(starts, dtype=torch.int32, device=DEVICE) if is_weighted else None
    expected = []
    for text, start in zip(texts, starts, strict=True):
        factors = torch.arange(len(text), device=DEVICE).unsqueeze(1) + start + 1
        expected.append((text.double() * (factors if is_weighted else 1)).sum(dim=0))
    hidden, begins, lens = made(texts)
    sums = [sum_them(hidden, begins, lens, given) for sum_them in (sum_texts_reference, sum_texts_triton)]
    assert torch.equal(*sums)
    torch.testing.assert_close(sums[0], torch.stack(expected), rtol=0, atol=2e-2 if is_weighted else 1e-4)


def test_no_order_of_tokens_or_texts_changes_a_sum() -> None:
    texts = [torch.randn(length, 70, device=DEVICE) * 1000 for length in LENS]
    for sum_them in (sum_texts_reference, sum_texts_triton):
        sums = sum_them(*made(texts))
        turned = sum_them(*made([text.flip(0) for text in reversed(texts)], LENS[::-1]))
        assert torch.equal(sums, turned.flip(0))


def test_what_is_not_finite_stays_in_its_text() -> None:
    texts = [torch.ones(length, 70, device=DEVICE) for length in LENS]
    texts[3][5, 9] = torch.nan
    texts[4][700, 3] = torch.inf
    for sum_them in (sum_texts_reference, sum_texts_triton):
        sums = sum_them(*made(texts))
        assert (~sums.isfinite()).nonzero().tolist() == [[3, 9], [4, 3]]
