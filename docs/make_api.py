"""Write docs/api.md from the docstrings of the public API.

    python docs/make_api.py

A docstring documents fields and arguments as lines "name: text", with further lines of one entry indented. Types and
defaults come from the code. An argument or field without such a line is an error.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import nanoinfer
from nanoinfer import (
    LLM,
    AsyncLLM,
    BeamSearchOutput,
    BeamSearchParams,
    BeamSequence,
    ClassificationOutput,
    EmbeddingOutput,
    LogProb,
    LoRARequest,
    RequestOutput,
    RerankOutput,
    SampleOutput,
    SamplingParams,
    Score,
    Stats,
    StreamOutput,
    Timings,
    WorkerError,
    reference,
)
from nanoinfer.batch import run
from nanoinfer.batch.lines.adapters import Folders
from nanoinfer.config import Config
from nanoinfer.engine.client import InFlightPolicy, LoadedAdapter
from nanoinfer.engine.sequence import FinishReason
from nanoinfer.integrations.vllm.lora import GivenLora
from nanoinfer.requests.inputs import Chats, Prompt, Tokens
from nanoinfer.requests.progress import UseTqdm
from nanoinfer.runner.memory.plan import MemoryPlan

FILE = Path(__file__).with_name("api.md")
ENTRY = re.compile(r"(\w+): (.*)")
ALIASES = {
    "Tokens": Tokens,
    "Prompt": Prompt,
    "Chats": Chats,
    "UseTqdm": UseTqdm,
    "FinishReason": FinishReason,
    "InFlightPolicy": InFlightPolicy,
    "GivenLora": GivenLora,
    "Folders": Folders,
}

HEAD = """\
# Options and results

<!-- Written by docs/make_api.py from the docstrings: change those, and run it again. -->

Import `LLM`, `AsyncLLM`, `SamplingParams`, `BeamSearchParams`, `LoRARequest`, `reference`, `WorkerError`,
`BUNDLED_MODEL` and the types of the outputs from `nanoinfer`. The outputs are dictionaries, whose keys are attributes
too: write `output["text"]` or `output.text`. You need not import `MemoryPlan`, the type of `llm.memory`, and
`LoadedAdapter`, that of the values of `llm.adapters`. In the headings, `llm` is an `LLM`.
"""

VERSION = """\
The version of the installed package, such as "0.1.0". A source tree that lies on Python's path without an installation
has "0+source".
"""

OPTIONS_HEAD = """\
## Options of LLM

Pass options by name, as in `LLM(model, max_model_len=8192)`.
"""


class Typed(NamedTuple):
    """What the code says of an argument or a field; default: empty if it has none."""

    type: str
    default: str = ""


def render() -> str:
    """The whole page."""
    return "\n".join(
        [
            HEAD,
            *_section("LLM(model, **options)", LLM, _typed(_parameters(LLM.__init__))),
            *[line for name, method in _public_methods(LLM) for line in _method(f"llm.{name}", method)],
            OPTIONS_HEAD,
            *_options(),
            *_section("AsyncLLM(model, **options)", AsyncLLM, _typed(_parameters(AsyncLLM.__init__))),
            *[line for name, method in _public_methods(AsyncLLM) for line in _method(f"AsyncLLM.{name}", method)],
            *_section("SamplingParams", SamplingParams, _fields(SamplingParams)),
            *_section("BeamSearchParams", BeamSearchParams, _fields(BeamSearchParams)),
            *_section("LoRARequest", LoRARequest, _fields(LoRARequest)),
            *_section("RequestOutput", RequestOutput, _keys(RequestOutput)),
            *_section("SampleOutput", SampleOutput, _keys(SampleOutput)),
            *_section("LogProb", LogProb, {}),
            *_section("Timings", Timings, _keys(Timings)),
            *_section("StreamOutput", StreamOutput, _keys(StreamOutput)),
            *_section("Score", Score, _keys(Score)),
            *_section("EmbeddingOutput", EmbeddingOutput, _keys(EmbeddingOutput)),
            *_section("ClassificationOutput", ClassificationOutput, _keys(ClassificationOutput)),
            *_section("RerankOutput", RerankOutput, _keys(RerankOutput)),
            *_section("BeamSearchOutput", BeamSearchOutput, _keys(BeamSearchOutput)),
            *_section("BeamSequence", BeamSequence, _keys(BeamSequence)),
            *_section("LoadedAdapter", LoadedAdapter, _keys(LoadedAdapter)),
            *_section("Stats", Stats, _fields(Stats)),
            *_section("MemoryPlan", MemoryPlan, _fields(MemoryPlan)),
            *_section("WorkerError", WorkerError, {}),
            *_function("reference", reference),
            *_function("nanoinfer.batch.run", run),
            "## BUNDLED_MODEL\n",
            f"The folder of the small Qwen3 that ships with the package, `{_in_package(nanoinfer.BUNDLED_MODEL)}`."
            ' `LLM("bundled")` takes it too, unless the working directory has a folder named `bundled`.\n',
            "## \\_\\_version\\_\\_\n",
            VERSION,
            "## Types\n",
            *[f"- `{name}` is `{_plain(str(alias))}`" for name, alias in ALIASES.items()],
            "",
        ]
    )


def _section(title: str, documented: type, known: dict[str, Typed]) -> list[str]:
    return [f"## {_escape(title)}\n", *document(documented, known)]


def _options() -> list[str]:
    """Config's fields, but for the model, which LLM documents."""
    (entries,) = [entries for paragraph in _paragraphs(Config) if (entries := _parse(paragraph))]
    known = _fields(Config)
    del entries["model"], known["model"]
    return _table(entries, known)


def _method(name: str, method: Callable[..., Any]) -> list[str]:
    parameters = _parameters(method)
    return [f"### {_title(name, method, parameters)}\n", *document(method, _typed(parameters))]


def _function(name: str, function: Callable[..., Any]) -> list[str]:
    parameters = list(inspect.signature(function).parameters.values())
    return [f"## {_title(name, function, parameters)}\n", *document(function, _typed(parameters))]


def _title(name: str, function: Callable[..., Any], parameters: list[inspect.Parameter]) -> str:
    shown = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
    returned = _plain(inspect.signature(function).return_annotation)
    return _escape(f"{name}({shown}){'' if returned == 'None' else f' -> {returned}'}")


def document(documented: object, known: dict[str, Typed]) -> list[str]:
    """A docstring: its prose as it is, its entries as tables."""
    lines: list[str] = []
    seen: set[str] = set()
    for paragraph in _paragraphs(documented):
        entries = _parse(paragraph)
        if entries is None:
            lines.append(_escape(paragraph.replace("\n", " ")) + "\n")
        else:
            in_code = known if known.keys() & entries.keys() else dict.fromkeys(entries, Typed(""))
            seen |= in_code.keys()
            lines += _table(entries, in_code)
    if missing := known.keys() - seen:
        raise ValueError(f"{documented}: its docstring has no line for {', '.join(sorted(missing))}")
    return lines


def _table(entries: dict[str, str], known: dict[str, Typed]) -> list[str]:
    """The entries with what the code says of them, in the code's order; a column that would be empty is left out."""
    if unequal := entries.keys() ^ known.keys():
        raise ValueError(f"docstring and code differ in {', '.join(sorted(unequal))}")
    columns = [("", [f"`{name}`" for name in known])]
    for title, values in (("type", [t.type for t in known.values()]), ("default", [t.default for t in known.values()])):
        if any(values):
            columns.append((title, [f"`{value}`".replace("|", r"\|") if value else "" for value in values]))
    columns.append(("", [_escape(entries[name]).replace("|", r"\|") for name in known]))
    rows = [
        [title for title, _ in columns],
        ["---"] * len(columns),
        *zip(*(cells for _, cells in columns), strict=True),
    ]
    return [*("| " + " | ".join(row) + " |" for row in rows), ""]


def _paragraphs(documented: object) -> list[str]:
    return (inspect.getdoc(documented) or "").split("\n\n")


def _parse(paragraph: str) -> dict[str, str] | None:
    """The entries of a paragraph that consists of them; None for prose."""
    entries: dict[str, str] = {}
    for line in paragraph.splitlines():
        if line.startswith(" ") and entries:
            name, text = entries.popitem()
            entries[name] = f"{text} {line.strip()}"
        elif match := ENTRY.fullmatch(line):
            entries[match[1]] = match[2]
        else:
            return None
    return entries


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())[1:]  # without self


def _typed(parameters: list[inspect.Parameter]) -> dict[str, Typed]:
    return {p.name: Typed(_plain(p.annotation), "" if p.default is p.empty else _quoted(p.default)) for p in parameters}


def _fields(documented: Any) -> dict[str, Typed]:
    return {
        f.name: Typed(_plain(f.type), "" if f.default is dataclasses.MISSING else _quoted(f.default))
        for f in dataclasses.fields(documented)
        if f.init
    }


def _keys(documented: type) -> dict[str, Typed]:
    """The keys that an output's class annotates itself, as its source has them."""
    (statement,) = ast.parse(inspect.getsource(documented)).body
    assert isinstance(statement, ast.ClassDef)
    keys = [line for line in statement.body if isinstance(line, ast.AnnAssign)]
    return {ast.unparse(key.target): Typed(_plain(ast.unparse(key.annotation))) for key in keys}


def _public_methods(documented: type) -> list[tuple[str, Callable[..., Any]]]:
    """The methods of a class, and behind them those of its bases."""
    members = [member for owner in documented.__mro__ for member in vars(owner).items()]
    return [(name, m) for name, m in members if inspect.isfunction(m) and not name.startswith("_")]


def _plain(annotation: object) -> str:
    """A type as a reader writes it."""
    text = str(annotation).replace("collections.abc.", "").replace("typing.", "")
    text = text.replace("nanoinfer.integrations.vllm.lora.", "").replace("ListLike", "Sequence")
    return text.replace("'", '"')


def _quoted(value: object) -> str:
    return repr(value).replace("'", '"')


def _escape(text: str) -> str:
    """Docstring text as Markdown: outside of code, a star is a star."""
    return "`".join(part if index % 2 else part.replace("*", r"\*") for index, part in enumerate(text.split("`")))


def _in_package(path: str) -> str:
    return str(Path(path).relative_to(Path(nanoinfer.__file__).parents[1]))


if __name__ == "__main__":
    FILE.write_text(render(), "utf-8")
