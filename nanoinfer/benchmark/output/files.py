"""The files that bench.py writes: --json and --plot."""

from __future__ import annotations

import argparse
import errno
import json
import os
from pathlib import Path
from typing import Any

from nanoinfer.benchmark.output.plot import check_plot, plot
from nanoinfer.benchmark.repeats import Repeat

OUTPUT_BYTES = 1 << 18  # more than a file of --json or --plot needs


def check_files(args: argparse.Namespace) -> None:
    """Raise ValueError for a --json or --plot file that cannot be written."""
    if args.plot:
        check_plot(args.plot)
    for option, file in (("json", args.json), ("plot", args.plot)):
        if file:
            check_writable(option, Path(file))


def check_writable(option: str, file: Path) -> None:
    """Raise ValueError if the file cannot be written or the disk is full; leave no file where none was."""
    try:
        existed = file.exists()
        with file.open("ab", buffering=0) as opened:
            if file.is_file():  # a terminal or a pipe cannot take back the test's bytes
                size = opened.tell()
                try:
                    if opened.write(bytes(OUTPUT_BYTES)) < OUTPUT_BYTES:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                finally:
                    opened.truncate(size)
                    if not existed:
                        file.unlink()
    except OSError as error:
        raise ValueError(f"--{option} {file}: {error.strerror}") from None


def write_files(args: argparse.Namespace, result: dict[str, Any], last: Repeat | None) -> None:
    """Write the files of --json and --plot. If one cannot be written, write the other, and exit with an error."""
    errors = []
    if args.json:
        figures = json.dumps(result, indent=2) + "\n"
        try:
            Path(args.json).write_text(figures, "utf-8")
        except OSError as error:
            print(figures, end="")
            errors.append(f"--json {args.json}: {error.strerror}: the figures were printed instead")
    if args.plot and last is not None:
        try:
            plot(last, f"{result['config']} on {result['device']}: {result['workload']}", args.plot)
        except OSError as error:
            errors.append(f"--plot {args.plot}: {error.strerror or error}")
    if errors:
        raise SystemExit(f"bench.py: error: {'; '.join(errors)}")
