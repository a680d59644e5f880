"""A stand-in for the Hugging Face hub: the few paths that fetching a model asks for. Nothing leaves this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


@dataclass
class FakeHub:
    """What is on the hub, and what was asked for."""

    url: str = ""
    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files by name, by model id."""
    gated: set[str] = field(default_factory=set)
    tokens: set[str] = field(default_factory=set)
    """Authorization headers that were sent."""
    fetched: list[str] = field(default_factory=list)
    """Names of the files whose bytes were asked for."""
    is_down: bool = False
    cuts: dict[str, int] = field(default_factory=dict)
    """By a file's name: bytes after which its next connection breaks."""
    spoiled: set[str] = field(default_factory=set)
    """Names of files of which other bytes come than were put there."""


class HubHandler(BaseHTTPRequestHandler):
    hub: ClassVar[FakeHub]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.hub.tokens.add(self.headers.get("authorization", ""))
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if self.hub.is_down:
            self.answer(503, b"{}")
        elif parts[:2] == ["api", "models"]:
            self.answer_api("/".join(parts[2:4]), parts[4], parts[5])
        else:
            self.answer_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    def answer_api(self, name: str, verb: str, revision: str) -> None:
        if name not in self.hub.models:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", COMMIT):
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif verb == "revision":
            self.answer(200, json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode())
        else:
            files = [describe_file(path, data) for path, data in self.hub.models[name].items()]
            self.answer(200, json.dumps(files).encode())

    def answer_file(self, name: str, revision: str, path: str) -> None:
        assert revision == COMMIT
        data = self.hub.models[name][path]
        if name in self.hub.gated:
            self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return
        if self.command == "GET":
            self.hub.fetched.append(path)
        headers = {"ETag": f'"{digest_of(path, data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if path in self.hub.spoiled:
            data = bytes(255 - each for each in data)
        first = int(self.headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        self.answer(
            206 if first else 200,
            data[first:],
            headers,
            self.hub.cuts.pop(path, None) if self.command == "GET" else None,
        )

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
            self.close_connection = self.close_connection or cut is not None

    def log_message(self, *_: object) -> None:
        pass


def is_large(path: str) -> bool:
    """Whether the hub keeps a file apart, under its SHA-256."""
    return path.endswith((".safetensors", ".bin", ".pt"))


def digest_of(path: str, data: bytes) -> str:
    """Return what the hub calls a file's contents: their SHA-256, or git's name for them."""
    if is_large(path):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def describe_file(path: str, data: bytes) -> dict[str, object]:
    """Return a file as the hub lists it."""
    entry: dict[str, object] = {"type": "file", "path": path, "size": len(data), "oid": digest_of(path, data)}
    if is_large(path):
        entry["oid"] = hashlib.sha1(data).hexdigest()
        entry["lfs"] = {"oid": digest_of(path, data), "size": len(data), "pointerSize": 134}
    return entry


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Run a hub on a free port."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (HubHandler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
