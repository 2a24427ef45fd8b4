"""TCP connections by which a replica on another machine reaches the LLM's process; both show that they know a key."""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType

KEY_BYTES = 32
GREETING_SECONDS = 5  # a client that has not shown the key by then is none of ours
CONNECT_SECONDS = 60  # others may come first
POLL_SECONDS = 0.5


class Listener:
    """Takes connections of whoever knows its key. It is a context.

    address: the machine's address and a free port
    key: random bytes
    """

    def __init__(self, host: str) -> None:
        self._socket = socket.create_server((host, 0))
        self._socket.settimeout(POLL_SECONDS)
        self.address: tuple[str, int] = (host, self._socket.getsockname()[1])
        self.key = os.urandom(KEY_BYTES)

    def __enter__(self) -> Listener:
        return self

    def accept(self, check: Callable[[], None]) -> Connection:
        """Wait for the next connection. check: called again and again meanwhile; it may raise"""
        while True:
            with suppress(OSError):  # nobody came, or it was none of ours
                other, _ = self._socket.accept()
                return self._greeted(other)
            check()

    def _greeted(self, other: socket.socket) -> Connection:
        """Return the connection of a client that knows the key. Raises OSError for others."""
        with other:
            other.settimeout(GREETING_SECONDS)
            nonce = os.urandom(KEY_BYTES)
            other.sendall(nonce)
            if not hmac.compare_digest(_read(other), _proof(self.key, nonce, b"client")):
                raise ConnectionRefusedError("it does not know the key")
            other.sendall(_proof(self.key, nonce, b"server"))
            return _connection(other)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()


def connect(address: tuple[str, int], key: bytes) -> Connection:
    """Connect to a Listener. Raises OSError if it cannot be reached, or does not know the key itself."""
    with socket.create_connection(address, CONNECT_SECONDS) as other:
        nonce = _read(other)
        other.sendall(_proof(key, nonce, b"client"))
        if not hmac.compare_digest(_read(other), _proof(key, nonce, b"server")):
            raise ConnectionRefusedError(f"{address[0]}:{address[1]} does not know the key")
        return _connection(other)


def shut(connection: Connection) -> None:
    """End a connection, so that whoever waits for it wakes up."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.shutdown(socket.SHUT_RDWR)


def _proof(key: bytes, nonce: bytes, who: bytes) -> bytes:
    return hmac.digest(key, nonce + who, "sha256")


def _read(other: socket.socket) -> bytes:
    data = b""
    while len(data) < KEY_BYTES:
        more = other.recv(KEY_BYTES - len(data))
        if not more:
            raise ConnectionResetError("the other side has closed the connection")
        data += more
    return data


def _connection(other: socket.socket) -> Connection:
    """Return what multiprocessing sends messages through. The socket is not to be used any more."""
    other.settimeout(None)
    other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a report waits for no other
    other.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(other.detach())
