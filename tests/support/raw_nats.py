"""A NATS client of a few lines, over a plain socket: what any tool sees, and what only a hostile one would send."""

from __future__ import annotations

import json
import re
import socket
import time
from typing import Any, Self
from urllib.parse import unquote, urlsplit

WAIT_S = 5.0
_MESSAGE = re.compile(rb"H?MSG [^\r\n]+\r\n")


class RawNats:
    """One connection. Reads only what it waits for; errors of the server are kept in `errors`.

    Args:
        url: `nats://host:port`, with `user:password@` or without.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 4222), WAIT_S)
        self._buffer = b""
        self._num_inboxes = 0
        self.errors: list[str] = []
        self.closed = False
        login = {"user": unquote(parts.username), "pass": unquote(parts.password or "")} if parts.username else {}
        options = {"verbose": False, "pedantic": True, "headers": True, "no_responders": True, "name": "raw", **login}
        self.send(b"CONNECT " + json.dumps(options).encode() + b"\r\nPING\r\n")
        self._read_until(lambda: b"PONG\r\n" in self._buffer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        """Send bytes as they are; a connection that the server has closed is noted."""
        try:
            self._socket.sendall(data)
        except OSError:
            self.closed = True

    def publish(self, subject: str, data: bytes, reply: str = "") -> None:
        """Publish one message."""
        head = f"PUB {subject} {reply + ' ' if reply else ''}{len(data)}\r\n"
        self.send(head.encode() + data + b"\r\n")

    def subscribe(self, subject: str) -> None:
        """Subscribe; whether it was allowed shows in `errors` after `settle`."""
        self._num_inboxes += 1
        self.send(f"SUB {subject} {self._num_inboxes}\r\n".encode())

    def settle(self) -> None:
        """Return when the server has dealt with everything sent so far; its errors are in `errors` then."""
        self._buffer = self._buffer.replace(b"PONG\r\n", b"")
        self.send(b"PING\r\n")
        self._read_until(lambda: b"PONG\r\n" in self._buffer or self.closed)

    def ask(self, subject: str, data: bytes = b"", *, count: int = 1) -> list[bytes]:
        """Return the bodies of this many answers; fewer only if the time is over. Nobody answers with an empty one."""
        self._num_inboxes += 1
        inbox = f"_INBOX.raw{self._num_inboxes}{time.monotonic_ns()}"
        self.send(f"SUB {inbox} {self._num_inboxes}\r\n".encode())
        self.publish(subject, data, inbox)
        self._read_until(lambda: len(self.messages(inbox)) >= count or self.closed)
        return self.messages(inbox)

    def ask_json(self, subject: str, data: bytes = b"", *, count: int = 1) -> list[Any]:
        """Return the bodies of this many answers, as JSON."""
        return [json.loads(body) for body in self.ask(subject, data, count=count)]

    def messages(self, start: str) -> list[bytes]:
        """Return the bodies of what arrived on subjects that begin so."""
        found, position = [], 0
        while (match := _MESSAGE.search(self._buffer, position)) is not None:
            kind, subject, *_, size = match[0].decode().split()
            head = int(match[0].split()[-2]) if kind == "HMSG" else 0
            end = match.end() + int(size)
            if len(self._buffer) < end + 2:
                break
            if subject.startswith(start):
                found.append(self._buffer[match.end() + head : end])
            position = end + 2
        return found

    def _read_until(self, done: Any) -> None:
        deadline = time.monotonic() + WAIT_S
        while not done() and time.monotonic() < deadline:
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                return
            except OSError:
                data = b""
            if not data:
                self.closed = True
                return
            self._buffer += data
            if b"PING\r\n" in data:
                self._buffer = self._buffer.replace(b"PING\r\n", b"")
                self.send(b"PONG\r\n")
            for line in re.findall(rb"-ERR '([^']*)'\r\n", self._buffer):
                self.errors.append(line.decode())
            self._buffer = re.sub(rb"-ERR '[^']*'\r\n", b"", self._buffer)
