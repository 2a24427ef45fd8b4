"""The command nanoinfer-batch: its arguments, its messages and its exit status."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any

from nanoinfer.batch.job import DEFAULTS, run
from nanoinfer.config import Config
from nanoinfer.process.standard_error import say
from nanoinfer.process.version import own_version
from nanoinfer.sampling_params import SamplingParams

FAILED, WRONG, INTERRUPTED = 1, 2, 130  # exit status
NOT_HERE = ("model", "tensor_parallel_group", "trust_remote_code")  # options of LLM that a command line cannot use
GO_ON = "run the same command again to go on"

EPILOG = """\
Exit status: 0: all lines have results; 1: some have errors, or the job broke off; 2: an argument cannot work;
130: Ctrl-C. Run the same command again to go on, and to try lines with errors again.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = vars(make_parser().parse_args(argv))
    try:
        summary = run(**arguments)
    except ValueError as error:
        return _say(WRONG, f"error: {error}")
    except OSError as error:
        return _say(FAILED, f"error: {error.filename}: {error.strerror}; {GO_ON}")
    except RuntimeError as error:
        return _say(FAILED, f"error: {error}; {GO_ON}")
    except KeyboardInterrupt as error:
        return _say(INTERRUPTED, f"interrupted: {error}; {GO_ON}" if error.args else "interrupted")
    return _say(FAILED if summary.errors else 0, str(summary))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser: the arguments of `run`, each option of LLM and each setting of SamplingParams."""
    parser = argparse.ArgumentParser(
        prog="nanoinfer-batch",
        description="Generate for every line of a file; go on where an earlier run ended.",
        epilog=EPILOG,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=f"nanoinfer {own_version()}")
    parser.add_argument("input", metavar="INPUT", help="JSON lines, plain or OpenAI's; - is standard input")
    parser.add_argument("output", metavar="OUTPUT", help="the results, and earlier ones; - is standard output")
    parser.add_argument("--model", required=True, help="a folder, a Hub id, or bundled, a small model to try with")
    parser.add_argument("--keep-order", action="store_true", help="write results in the order of their lines")
    parser.add_argument("--max-errors", type=int, help="end once more lines than this have failed")
    parser.add_argument("--report", metavar="FILE", help="write a page of HTML there: speed, lengths, results, errors")
    parser.add_argument("--stats", action="store_true", help="print in the end what the LLM has done: see llm.stats")
    text = "an adapter, which lines name as their adapter or model; give one or several"
    parser.add_argument("--load-adapter", metavar="NAME=FOLDER", dest="adapters", action=_AddAdapter, help=text)
    options = parser.add_argument_group("options of LLM")
    for field, text in _documented(Config):
        if field.name not in NOT_HERE:
            _add(options, field, text)
    settings = parser.add_argument_group("settings of SamplingParams, for lines that do not say them")
    for field, text in _documented(SamplingParams):
        if field.name in DEFAULTS:
            _add(settings, field, text)
    return parser


def _documented(documented: Any) -> list[tuple[Field[Any], str]]:
    """Return the fields that a caller may pass, with their lines of the class's docstring."""
    entries = re.findall(r"^(\w+): (.+(?:\n    .+)*)", inspect.getdoc(documented) or "", re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in entries}
    return [(field, texts[field.name]) for field in fields(documented) if field.init]


def _add(group: argparse._ArgumentGroup, field: Field[Any], text: str) -> None:
    name, text = f"--{field.name.replace('_', '-')}", text.replace("%", "%%")
    if "bool" in str(field.type):
        group.add_argument(name, action=argparse.BooleanOptionalAction, help=text)
    else:
        group.add_argument(name, type=_reader(str(field.type)), metavar="VALUE", help=text)


def _reader(annotation: str) -> Callable[[str], Any]:
    """Return what makes a field's value from an argument: text as it is; JSON where the field takes more than text."""

    def read(text: str) -> Any:
        try:
            value = json.loads(text)
        except ValueError:
            return text  # the field's own check names it
        return value if isinstance(value, (list, dict)) or "str" not in annotation else text

    return str if annotation in ("str", "str | None") else read


class _AddAdapter(argparse.Action):
    """Adds an adapter to the folders of all, by their names."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        name, _, folder = values.partition("=")
        folders = vars(namespace).setdefault(self.dest, {})
        if not (name and folder):
            parser.error(f"{option} {values}: must be NAME=FOLDER, as in sql=adapters/sql")
        if folders.get(name, folder) != folder:
            parser.error(f"{option} {values}: must have another name, as {name}={folders[name]} has this one")
        folders[name] = folder


def _say(status: int, message: str) -> int:
    say(f"nanoinfer-batch: {message}")
    return status
