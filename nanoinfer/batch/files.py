"""Files: lines in and lines out, plain or compressed, so that a job that dies leaves whole lines."""

from __future__ import annotations

import os
import select
import stat
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

STANDARD = "-"  # stands for standard input or output
CHUNK = 1 << 16  # bytes that are read at once
GZIP = 31  # zlib's code for gzip's header and trailer


class Codec(NamedTuple):
    """How a file is compressed: zlib and zstandard have the same methods, and numbers of their own for a flush.

    flush: ends what a reader needs to see all that was written
    finish: ends the stream
    """

    compressor: Callable[[], Any]
    decompressor: Callable[[], Any]
    flush: int
    finish: int


def codec_of(name: str) -> Codec | None:
    """Return what a file's suffix asks for; None: the file is plain. Raises ValueError if a package is missing."""
    if name.endswith(".gz"):
        return Codec(
            lambda: zlib.compressobj(wbits=GZIP), lambda: zlib.decompressobj(GZIP), zlib.Z_SYNC_FLUSH, zlib.Z_FINISH
        )
    if not name.endswith(".zst"):
        return None
    try:
        import zstandard as zstd
    except ImportError:
        raise ValueError(f"{name}: needs zstandard: pip install 'nanoinfer[zstd]'") from None
    return Codec(
        lambda: zstd.ZstdCompressor().compressobj(),
        lambda: zstd.ZstdDecompressor().decompressobj(),
        zstd.COMPRESSOBJ_FLUSH_BLOCK,
        zstd.COMPRESSOBJ_FLUSH_FINISH,
    )


def is_regular(name: str) -> bool:
    """Whether a name is that of a file on a disk, or of none yet; not of a pipe or of standard input or output.

    Raises ValueError for a folder.
    """
    if name == STANDARD:
        return False
    try:
        mode = os.stat(name).st_mode
    except OSError:
        return True
    if stat.S_ISDIR(mode):
        raise ValueError(f"{name}: is a folder; give a file")
    return stat.S_ISREG(mode)


def write_all(fd: int, data: bytes) -> None:
    """Write all bytes: a disk that is nearly full takes some of them, and raises OSError for the rest."""
    while data:
        data = data[os.write(fd, data) :]


class FileLines(Iterator[bytes]):
    """The lines of a file, each with its newline; a last one that is torn has none.

    is_torn: such a line was the last, or a compressed file is broken off or damaged. EOFError says the latter, behind
        the last whole line
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._fd = os.dup(sys.stdin.fileno()) if name == STANDARD else os.open(name, os.O_RDONLY)
        self._chunks = self._read(codec_of(name))
        self._whole: deque[bytes] = deque()
        self._rest = b""
        self.is_torn = False

    def __next__(self) -> bytes:
        while not self._whole:
            chunk = next(self._chunks, None)
            if chunk is None:
                rest, self._rest = self._rest, b""
                self.is_torn = bool(rest)
                if not rest:
                    raise StopIteration
                return rest
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            self._whole.extend(line + b"\n" for line in whole)
        return self._whole.popleft()

    def is_ready(self) -> bool:
        """Whether the next line needs no waiting for whoever writes into a pipe."""
        return bool(self._whole or select.select([self._fd], [], [], 0)[0])

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _read(self, codec: Codec | None) -> Iterator[bytes]:
        """Yield the file's bytes, decompressed."""
        decompressor = None
        while chunk := os.read(self._fd, CHUNK):
            if codec is None:
                yield chunk
            while codec is not None and chunk:
                decompressor = decompressor or codec.decompressor()
                try:
                    yield decompressor.decompress(chunk)
                except Exception as error:  # each package has a class of its own for it
                    self.is_torn = True
                    raise EOFError(f"{self._name}: is damaged: {error}") from None
                chunk = decompressor.unused_data  # of the next compressed stream in the file
                if decompressor.eof:
                    decompressor = None
        if decompressor is not None:
            self.is_torn = True
            raise EOFError(f"{self._name}: is broken off")


class Writer:
    """Appends lines to a file. When `write` returns, the kernel has the line, and kill -9 cannot take it back."""

    def __init__(self, name: str, codec: Codec | None) -> None:
        """Open or make the file. Raises OSError."""
        is_standard = name == STANDARD
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._name = name
        self._fd = os.dup(sys.stdout.fileno()) if is_standard else os.open(name, flags, 0o666)
        self._codec = codec
        self._stream: Any = None  # the compressor's
        self._can_cut = not is_standard and is_regular(name)

    def write(self, line: bytes) -> None:
        """Append a line. Raises OSError, and cuts off what was written of the line, if the disk has no room for it."""
        if self._codec is None:
            self._append(line)
            return
        self._stream = self._stream or self._codec.compressor()
        self._append(self._stream.compress(line) + self._stream.flush(self._codec.flush))

    def close(self) -> None:
        """End the compressed stream, and wait until the disk has all lines."""
        try:
            if self._codec is not None and self._stream is not None:
                self._append(self._stream.flush(self._codec.finish))
            if self._can_cut:
                os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def _append(self, data: bytes) -> None:
        size = os.fstat(self._fd).st_size
        try:
            write_all(self._fd, data)
        except OSError as error:
            self._stream = None  # it counts bytes that the file does not have
            if self._can_cut:
                os.ftruncate(self._fd, size)
            why = f"{error.strerror}; all lines in it are whole" if self._can_cut else error.strerror
            raise OSError(error.errno, why, self._name) from None
