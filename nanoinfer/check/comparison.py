"""Compares an LLM with what transformers makes of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from math import exp, inf, isfinite, isnan
from typing import Any, NamedTuple

from nanoinfer.check.cause import find_cause
from nanoinfer.check.oracle import NEW_TOKENS, Chat, Continuation, Oracle, ask_for_streams, ask_transformers
from nanoinfer.check.texts import AWKWARD, CHATS, TEXTS
from nanoinfer.config import Config
from nanoinfer.hub import TOKENIZER_FILES, has_tokenizer
from nanoinfer.llm import LLM
from nanoinfer.requests.outputs import RequestOutput
from nanoinfer.sampling_params import SamplingParams

PLAIN: dict[str, Any] = {"dtype": "float32", "images": False, "use_tqdm": False}  # options of an LLM
CHECKS = ("chats", "tokens of texts", "log-probabilities", "greedy tokens")  # name the first rows
SHOWN = 3  # names of what differs
TOLERANCE = 1e-3  # of a log-probability, in nats: far above what float32's rounding does to one


class TableRow(NamedTuple):
    """A line of the table.

    compared: how much; found: what came of it
    worst: the name of the text that differs most, if it is the model that computes another result
    """

    name: str
    compared: str
    found: str
    is_fine: bool
    worst: str | None = None


def compare(
    model: str,
    device: str = "auto",
    variants: tuple[tuple[str, str], ...] = (),
    tolerance: float = TOLERANCE,
    most_loss: float = inf,
    advance: Callable[[], object] = int,
) -> tuple[list[TableRow], str | None]:
    """Compare a checkpoint with transformers; returns the rows, and if the model's results differ, the first that does.

    model, device: as for LLM
    variants: an option and its value each, of LLMs whose perplexities are compared with the plain one's
    tolerance: log-probabilities may differ by so much, in nats
    most_loss: a variant's perplexity may be larger by this part of the plain one's
    advance: called as often as count_steps says

    One model at a time is in memory. Raises ValueError if transformers or LLM cannot load it.
    """
    folder, device = _find(model, device, variants)
    expected = ask_transformers(folder, device, advance)
    with LLM(folder, device=device, **PLAIN) as llm:
        rows = [compare_chats(llm, expected.chats), compare_tokens(llm, expected)]
        outputs = _continue(llm, expected.continuations, NEW_TOKENS)
        rows += [_compare_logprobs(outputs, expected, tolerance), _compare_greedy(outputs, expected, tolerance)]
        plain = _perplexity(outputs)
    advance()
    for variant in variants:
        with LLM(folder, device=device, **{**PLAIN, **dict([variant])}) as llm:
            value = _perplexity(_continue(llm, expected.continuations, 0))
        rows.append(_compare_perplexity("=".join(variant), value, plain, most_loss))
        advance()
    worst = next((row.worst for row in rows if row.worst is not None), None)
    return rows, None if worst is None else _find_cause(folder, device, expected.continuations[worst])


def count_steps(variants: tuple[tuple[str, str], ...]) -> int:
    """Return how often `compare` advances: once for each text in transformers, and for each LLM."""
    return len(TEXTS) + 1 + len(variants)


def _find(model: str, device: str, variants: tuple[tuple[str, str], ...]) -> tuple[str, str]:
    """Return the model's folder, and "cpu" or "cuda". Raises ValueError for what an LLM would refuse."""
    config = Config(model, device=device, **PLAIN)
    if not config.description.generates:
        raise ValueError(f"model={model!r}: reads texts and generates none, so that there are no tokens to compare")
    if not has_tokenizer(config.model):
        raise ValueError(f"model={model!r}: the folder has no tokenizer: must have one of {', '.join(TOKENIZER_FILES)}")
    for variant in variants:
        Config(config.model, device=device, **{**PLAIN, **dict([variant])})
    return config.model, config.device


def _find_cause(folder: str, device: str, wanted: Continuation) -> str:
    streams = ask_for_streams(folder, device, wanted.token_ids + wanted.new_ids)
    with LLM(folder, device=device, enforce_eager=True, **PLAIN) as llm:
        return find_cause(llm, wanted, streams)


def compare_chats(llm: LLM, chats: dict[str, Chat]) -> TableRow:
    """Compare the texts of chats, and their tokens, with those that the LLM makes of the same messages."""
    if not chats:
        return TableRow(CHECKS[0], "none", "the tokenizer has no chat template that takes one", True)
    rendered = {name: _render(llm, name) for name in chats}
    unlike = [
        f"{name} ({ours})" if isinstance(ours, ValueError) else name
        for name, ours in rendered.items()
        if ours != chats[name]
    ]
    untaken = [name for name in CHATS if name not in chats]
    found = _list_unlike(unlike) + ("; the template does not take " + ", ".join(untaken) if untaken else "")
    return TableRow(CHECKS[0], f"{len(chats)} of {len(CHATS)}", found, not unlike)


def _render(llm: LLM, name: str) -> Chat | ValueError:
    """Return a chat as the LLM writes it, or why it refuses the chat."""
    messages, arguments = CHATS[name]
    try:
        (output,) = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False, **arguments)
    except ValueError as error:
        return error
    return Chat(output.prompt or "", output.prompt_token_ids)


def compare_tokens(llm: LLM, expected: Oracle) -> TableRow:
    """Compare the tokens of texts, and what these are as text: the text itself, or what transformers makes of it."""
    unlike, changed = list[str](), 0
    for name, text in (TEXTS | AWKWARD).items():
        token_ids = llm.tokenize(text)
        back = llm.detokenize(token_ids)
        changed += back != text
        if token_ids != expected.token_ids[name] or back not in (text, expected.decoded[name]):
            unlike.append(name)
    found = f"{_list_unlike(unlike)}; {changed} do not come back as they were"
    return TableRow(CHECKS[1], f"{len(expected.token_ids)} texts", found, not unlike)


def _continue(llm: LLM, continuations: dict[str, Continuation], new_tokens: int) -> dict[str, RequestOutput]:
    """Run all texts at once."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, prompt_logprobs=0)
    outputs = llm.generate([text.token_ids for text in continuations.values()], params, use_tqdm=False)
    return dict(zip(continuations, outputs, strict=True))


def _logprobs(output: RequestOutput) -> list[float]:
    """Return the log-probability of each token of the prompt but the first, which nothing precedes."""
    assert output.prompt_logprobs is not None
    pairs = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    return [entry[token] for entry, token in pairs if entry is not None]


def _compare_logprobs(outputs: dict[str, RequestOutput], expected: Oracle, tolerance: float) -> TableRow:
    texts = expected.continuations
    apart = {name: _distance(_logprobs(outputs[name]), text.logprobs) for name, text in texts.items()}
    worst = max(apart, key=apart.__getitem__)
    is_fine = apart[worst] <= tolerance
    count = sum(len(text.logprobs) for text in texts.values())
    found = f"{apart[worst]:.1e} apart at most, in {worst}; allowed are {tolerance:g}"
    return TableRow(CHECKS[2], f"{count} tokens", found, is_fine, None if is_fine else worst)


def _distance(ours: list[float], theirs: list[float]) -> float:
    """Return the largest difference of two numbers; infinity where one is not a number."""
    apart = [abs(our - their) for our, their in zip(ours, theirs, strict=True)]
    return max((inf if isnan(value) else value for value in apart), default=0.0)


def _compare_greedy(outputs: dict[str, RequestOutput], expected: Oracle, tolerance: float) -> TableRow:
    """Compare tokens up to the first that differs: behind it the texts are others."""
    unlike, ties = list[str](), 0
    for name, text in expected.continuations.items():
        pairs = zip_longest(outputs[name].token_ids, text.new_ids)  # logits that are not finite end ours early
        for place, (our, their) in enumerate(pairs):
            if our != their:
                likeliest = text.likeliest[place]
                is_tie = likeliest[their] - likeliest.get(our, -inf) <= tolerance
                ties += is_tie
                unlike += [] if is_tie else [name]
                break
    found = f"{_list_unlike(unlike)}; {ties} differ at a near tie"
    compared = f"{len(outputs)} texts of {NEW_TOKENS}"
    return TableRow(CHECKS[3], compared, found, not unlike, unlike[0] if unlike else None)


def _list_unlike(names: list[str]) -> str:
    """Say what differs, if anything."""
    others = f" and {len(names) - SHOWN} others" if len(names) > SHOWN else ""
    return f"other: {', '.join(names[:SHOWN])}{others}" if names else "equal"


def _perplexity(outputs: dict[str, RequestOutput]) -> float:
    """Return the perplexity of all texts together; infinity if it is too large for a float."""
    logprobs = [logprob for output in outputs.values() for logprob in _logprobs(output)]
    try:
        return exp(-sum(logprobs) / len(logprobs))
    except OverflowError:
        return inf


def _compare_perplexity(name: str, value: float, plain: float, most_loss: float) -> TableRow:
    loss = value / plain - 1
    allowed = "" if most_loss == inf else f"; allowed are {most_loss:+.2%}"
    is_fine = isfinite(value) and loss <= most_loss
    return TableRow(name, "perplexity", f"{value:#.4g}, {loss:+.2%} against {plain:#.4g}{allowed}", is_fine)
