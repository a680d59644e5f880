"""Docker's engine over its socket: enough to pause, kill and look into containers, without a client program."""

from __future__ import annotations

import http.client
import json
import os
import socket
from typing import Any
from urllib.parse import quote

LIMIT_S = 60.0


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=LIMIT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(LIMIT_S)
        self.sock.connect(self._path)


class Engine:
    """The engine at `DOCKER_HOST`, and the containers of one compose project.

    Args:
        project: name of the compose project.
    """

    def __init__(self, project: str) -> None:
        host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        assert host.startswith("unix://"), f"DOCKER_HOST={host} is no socket of this machine"
        self._path = host.removeprefix("unix://")
        self._project = project
        self._ids: dict[str, str] = {}

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the JSON that the engine answers, or its bytes if they are none; an error is an AssertionError."""
        connection = _UnixConnection(self._path)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        assert answer.status < 400, f"{method} {path}: {answer.status} {content!r}"
        try:
            return json.loads(content)
        except ValueError:
            return content

    def containers(self) -> dict[str, str]:
        """Return the containers of the project: id by name of the compose service. They are looked up once."""
        if not self._ids:
            self._ids = self._find()
        return self._ids

    def _find(self) -> dict[str, str]:
        filters = quote(json.dumps({"label": [f"com.docker.compose.project={self._project}"]}))
        found = self.ask("GET", f"/containers/json?all=1&filters={filters}")
        return {one["Labels"]["com.docker.compose.service"]: one["Id"] for one in found}

    def inspect(self, service: str) -> dict[str, Any]:
        """Return all that the engine says of a container."""
        found: dict[str, Any] = self.ask("GET", f"/containers/{self.containers()[service]}/json")
        return found

    def act(self, verb: str, service: str) -> None:
        """`pause`, `unpause`, `kill`, `stop` or `start` a container."""
        self.ask("POST", f"/containers/{self.containers()[service]}/{verb}")

    def run(self, service: str, *command: str) -> tuple[int, str]:
        """Return exit code and output of a command inside a container."""
        options = {"AttachStdout": True, "AttachStderr": True, "Tty": True, "Cmd": list(command)}
        made = self.ask("POST", f"/containers/{self.containers()[service]}/exec", options)["Id"]
        output = self.ask("POST", f"/exec/{made}/start", {"Detach": False, "Tty": True})
        text = output.decode() if isinstance(output, bytes) else json.dumps(output)
        return int(self.ask("GET", f"/exec/{made}/json")["ExitCode"]), text.strip()
