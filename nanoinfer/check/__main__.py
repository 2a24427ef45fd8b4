"""Compares a checkpoint with transformers on this machine, in float32.

python -m nanoinfer.check MODEL renders chats, tokenizes texts in several languages, and computes log-probabilities and
next tokens, first in transformers and then in an LLM. --quantization, --kv-cache-dtype and --dtype each take values:
for each value, another LLM computes the perplexity. A table has the results. If log-probabilities or tokens differ by
more than the tolerance, the last line names the first layer that does. The exit status is 1 if something differs, and 2
if nothing could be compared.
"""

from __future__ import annotations

import argparse
import sys
from math import inf

from nanoinfer.check.comparison import TOLERANCE, TableRow, compare, count_steps
from nanoinfer.process.bar import Bar

OPTIONS = ("quantization", "kv_cache_dtype", "dtype")  # of an LLM: each value given is tried by itself


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 1 if something differs. argv: its arguments; None: the process's"""
    parser = _parser()
    args = parser.parse_args(argv)
    for name in ("tolerance", "most_loss"):
        if not getattr(args, name) >= 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be a number of at least 0")
    variants = tuple((option, value) for option in OPTIONS for value in getattr(args, option))
    try:
        with Bar(total=count_steps(variants), desc="Comparing", disable=None, leave=False, dynamic_ncols=True) as bar:
            rows, cause = compare(args.model, args.device, variants, args.tolerance, args.most_loss, bar.update)
    except ValueError as error:
        parser.error(str(error))
    print(table(rows))
    if cause is not None:
        print(cause)
    return int(not all(row.is_fine for row in rows))


def table(rows: list[TableRow]) -> str:
    """Return the rows as lines of columns."""
    cells = [("", "compared", "found"), *((row.name, row.compared, row.found) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    verdicts = ["", *("ok" if row.is_fine else "DIFFERS" for row in rows)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=True)), verdict])
        for line, verdict in zip(cells, verdicts, strict=True)
    ]
    return "\n".join(line.rstrip() for line in lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nanoinfer.check", description=__doc__)
    parser.add_argument("model", help="a folder with config.json and *.safetensors, or a Hub id; first of all")
    parser.add_argument("--device", default="auto", help="as for LLM, default auto")
    how = "as for LLM, each value by itself"
    for option in OPTIONS:
        name = f"--{option.replace('_', '-')}"
        parser.add_argument(name, nargs="+", action="extend", default=[], metavar="VALUE", help=how)
    how = "log-probabilities may differ by so many nats, default %(default)g"
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help=how)
    how = "perplexities may be larger by this part of the plain one, such as 0.02; by default by any"
    parser.add_argument("--most-loss", type=float, default=inf, help=how)
    return parser


if __name__ == "__main__":
    sys.exit(main())
