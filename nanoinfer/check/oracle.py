"""What transformers makes of a checkpoint: the LLM is compared with this, once transformers' model is gone."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from nanoinfer.check.texts import AWKWARD, CALL, CHATS, TEXTS, TOOL
from nanoinfer.hub import reason_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")
LONGEST = 128  # tokens of a text that the model gets
NEW_TOKENS = 16  # that follow a text
LIKELIEST = 8  # tokens whose log-probabilities are kept, to tell a near tie


class Chat(NamedTuple):
    """A chat as the template writes it, and its tokens."""

    text: str
    token_ids: list[int]


class Continuation(NamedTuple):
    """What the model computes for a text.

    token_ids: the text's first tokens; logprobs: the log-probability of each but the first
    new_ids: the likeliest next tokens; likeliest: in the place of each, tokens and their log-probabilities
    """

    token_ids: list[int]
    logprobs: list[float]
    new_ids: list[int]
    likeliest: list[dict[int, float]]


class Oracle(NamedTuple):
    """All that transformers makes of a checkpoint, by the names of chats and texts.

    chats: those that the template takes
    token_ids: of each text; decoded: what these are as text
    """

    chats: dict[str, Chat]
    token_ids: dict[str, list[int]]
    decoded: dict[str, str]
    continuations: dict[str, Continuation]


def ask_transformers(folder: str, device: str, advance: Callable[[], object]) -> Oracle:
    """Run transformers' tokenizer and model, in float32. advance: called after each text

    Raises ValueError if transformers cannot load them.
    """
    from transformers import AutoTokenizer

    with _named_errors(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = TEXTS | AWKWARD
    token_ids = {name: tokenizer(text).input_ids for name, text in texts.items()}
    decoded = {name: tokenizer.decode(ids, skip_special_tokens=True) for name, ids in token_ids.items()}

    def continue_all(model: PreTrainedModel) -> dict[str, Continuation]:
        continuations = {}
        for name in TEXTS:
            continuations[name] = continue_text(model, token_ids[name][:LONGEST])
            advance()
        return continuations

    return Oracle(render_chats(tokenizer), token_ids, decoded, run_model(folder, device, continue_all))


def ask_for_streams(folder: str, device: str, token_ids: list[int]) -> list[Tensor]:
    """Return the residual stream before each layer, and last what the output projection gets: each [tokens, size]."""

    def compute(model: PreTrainedModel) -> list[Tensor]:
        out = model(input_ids=torch.tensor([token_ids], device=device), output_hidden_states=True)
        return [stream[0].float().cpu() for stream in out.hidden_states]

    return run_model(folder, device, compute)


def run_model(folder: str, device: str, use: Callable[[PreTrainedModel], T]) -> T:
    """Return what `use` makes of the model, of the class that config.json names. The model's memory is free then."""
    import transformers

    with _named_errors(folder):
        (architecture, *_) = transformers.AutoConfig.from_pretrained(folder).architectures
        model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32)
    try:
        model.generation_config = transformers.GenerationConfig()  # the checkpoint's own may have penalties and ends
        with torch.inference_mode():
            return use(model.to(device).eval())
    finally:
        del model
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def _named_errors(folder: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ValueError(f"model={folder!r}: transformers cannot load it: {reason_of(error)}") from error


def continue_text(model: PreTrainedModel, token_ids: list[int]) -> Continuation:
    """Compute a text, and its likeliest next tokens, whether or not one of them ends it."""
    ids = torch.tensor([token_ids], device=model.device)
    logprobs = model(input_ids=ids).logits[0].float().log_softmax(dim=-1)
    of_text = logprobs[range(len(token_ids) - 1), token_ids[1:]].tolist()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    values, tokens = torch.cat(out.logits).float().log_softmax(dim=-1).topk(LIKELIEST)
    likeliest = [dict(zip(*pair, strict=True)) for pair in zip(tokens.tolist(), values.tolist(), strict=True)]
    return Continuation(token_ids, of_text, out.sequences[0, len(token_ids) :].tolist(), likeliest)


def render_chats(tokenizer: PreTrainedTokenizerBase) -> dict[str, Chat]:
    """Render the chats that the tokenizer's template takes; one that ignores tools takes none that has them."""
    if not tokenizer.chat_template:
        return {}
    texts = {name: _render(tokenizer, *chat) for name, chat in CHATS.items()}
    shows_tools = TOOL["function"]["name"] in (texts["tools"] or "")
    return {
        name: Chat(text, tokenizer(text, add_special_tokens=False).input_ids)
        for name, text in texts.items()
        if text is not None and (shows_tools or "tools" not in CHATS[name][1])
    }


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], arguments: dict[str, Any]
) -> str | None:
    """Return a chat's text, by the first form of its messages that the template shows right; None: by none."""
    for in_parts, as_json in product((False, True), repeat=2):
        formed = [_in_form(message, in_parts, as_json) for message in messages]
        try:
            text = tokenizer.apply_chat_template(formed, tokenize=False, **{"add_generation_prompt": True, **arguments})
        except Exception:  # a template raises what it wants
            continue
        if messages[-1]["content"].strip() in text and str(CALL["function"]["arguments"]) not in text:
            return str(text)
    return None


def _in_form(message: dict[str, Any], in_parts: bool, as_json: bool) -> dict[str, Any]:
    """Return a message with a list of parts as its content, and with JSON as the arguments of its tool calls."""
    content = message["content"]
    formed = {**message, "content": [{"type": "text", "text": content}] if in_parts else content}
    if as_json and "tool_calls" in message:
        functions = [call["function"] for call in message["tool_calls"]]
        written = [{**function, "arguments": json.dumps(function["arguments"])} for function in functions]
        calls = zip(message["tool_calls"], written, strict=True)
        formed["tool_calls"] = [{**call, "function": function} for call, function in calls]
    return formed
