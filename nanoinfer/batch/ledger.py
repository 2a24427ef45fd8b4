"""Ledger: what an output file has already, whose job it is, and that one process at a time writes it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from typing import Any

from nanoinfer.batch.files import Codec, FileLines, Writer, codec_of, write_all
from nanoinfer.batch.lines.requests import digest
from nanoinfer.checks import short


class Ledger:
    """Holds an output file for one job, until `close`, and knows what is done.

    done: the digests of the ids that have a result
    writer: of further results
    """

    def __init__(self, output: str, settings: Mapping[str, Any]) -> None:
        """Take the output, drop its errors and a torn end, or write the manifest if it has no lines.

        settings: what makes the job this one; the same settings may go on with its output

        Raises ValueError for an output that cannot be written, of another job, or in use.
        """
        manifest = manifest_of(output)
        try:
            self._lock = _lock(manifest)
            try:
                codec = codec_of(output)
                if os.path.exists(output) and os.path.getsize(output):
                    _check_same(output, manifest, settings)
                    self.done = _tidy(output, codec)
                else:
                    self.done = set()
                    _write(self._lock, settings)
                self.writer = Writer(output, codec)
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise ValueError(f"{error.filename or manifest}: {error.strerror}") from None

    def close(self) -> None:
        """Let another process have the output."""
        try:
            self.writer.close()
        finally:
            os.close(self._lock)


def manifest_of(output: str) -> str:
    """Return the name of the file that lies beside an output, and has its job's settings."""
    return f"{output}.manifest.json"


def _lock(manifest: str) -> int:
    """Return a file descriptor of the manifest, which no other process has."""
    fd = os.open(manifest, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise ValueError(f"{manifest}: another process writes this output; wait for it, or give another") from None
    return fd


def _write(manifest: int, settings: Mapping[str, Any]) -> None:
    """Write the settings. If this breaks off, the output has no lines yet, and the next run writes them anew."""
    os.ftruncate(manifest, 0)
    write_all(manifest, json.dumps(settings, indent=2).encode() + b"\n")
    os.fsync(manifest)


def _check_same(output: str, manifest: str, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if an output that has lines is not this job's."""
    remedy = "give another output, or move this one away"
    try:
        with open(manifest, "rb") as opened:
            known = dict(json.load(opened))
    except (ValueError, TypeError):
        raise ValueError(f"{output}: has lines, but {manifest} names no job of theirs: {remedy}") from None
    for name in {**known, **settings}:
        theirs, ours = known.get(name), settings.get(name)
        if theirs != ours:
            raise ValueError(f"{output}: is another job's: {name} was {short(theirs)}, and is {short(ours)}: {remedy}")


def _tidy(output: str, codec: Codec | None) -> set[bytes]:
    """Drop errors and a torn end from an output; returns the digests of the ids that have a result."""
    done: set[bytes] = set()
    size, has_errors, part = 0, False, f"{output}.part"
    with suppress(FileNotFoundError):  # a killed process may have left it
        os.unlink(part)
    with closing(FileLines(output)) as lines:
        for data, row in _whole_rows(output, lines):
            size += len(data)
            if _is_error(row):
                has_errors = True
            else:
                done.add(digest(row["custom_id"] if "custom_id" in row else row["id"]))
    if has_errors or (lines.is_torn and codec is not None):
        _rewrite(output, part, codec)
    elif lines.is_torn:
        os.truncate(output, size)
    return done


def _rewrite(output: str, part: str, codec: Codec | None) -> None:
    """Write an output's results alone into a new file, `part`, and put it in the output's place."""
    with closing(FileLines(output)) as lines, closing(Writer(part, codec)) as writer:
        for data, row in _whole_rows(output, lines):
            if not _is_error(row):
                writer.write(data)
    os.replace(part, output)


def _whole_rows(output: str, lines: FileLines) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the whole lines of an output, as they are and as JSON."""
    with suppress(EOFError):
        for number, data in enumerate(lines, 1):
            if not data.endswith(b"\n"):
                return
            try:
                row = json.loads(data)
                row["id"]
            except (ValueError, TypeError, KeyError):
                raise ValueError(f"{output}: line {number} is no result of a batch: move the file away") from None
            yield data, row


def _is_error(row: Mapping[str, Any]) -> bool:
    return row.get("error") is not None
