"""Docker's engine over its socket: enough to pause, kill and look into containers, without a client program."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0


def compose_program() -> list[str] | None:
    """Return how `docker-compose` is called here, in either generation; None: it is not installed."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker") is None:
        return None
    found = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0
    return ["docker", "compose"] if found else None


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
        """Return the containers of the project: id by name of the compose service, for workers with their number."""
        filters = quote(json.dumps({"label": [f"com.docker.compose.project={self._project}"]}))
        found = self.ask("GET", f"/containers/json?all=1&filters={filters}")
        return {_name_of(one["Labels"]): one["Id"] for one in found if not _is_one_off(one["Labels"])}

    def compose(self, *arguments: str, **variables: str) -> str:
        """Return what `docker-compose` prints, with these variables of the compose file besides the environment's."""
        program = compose_program()
        assert program is not None, "whoever started the project has it"
        done = subprocess.run(
            [*program, "-p", self._project, "-f", str(ROOT / "docker-compose.yml"), *arguments],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def inspect(self, service: str) -> dict[str, Any]:
        """Return all that the engine says of a container."""
        found: dict[str, Any] = self.ask("GET", f"/containers/{self.containers()[service]}/json")
        return found

    def act(self, verb: str, service: str) -> None:
        """`pause`, `unpause`, `kill`, `stop`, `start` or `restart` a container."""
        self.ask("POST", f"/containers/{self.containers()[service]}/{verb}")

    def run(self, service: str, *command: str) -> tuple[int, str]:
        """Return exit code and output of a command inside a container."""
        options = {"AttachStdout": True, "AttachStderr": True, "Tty": True, "Cmd": list(command)}
        made = self.ask("POST", f"/containers/{self.containers()[service]}/exec", options)["Id"]
        output = self.ask("POST", f"/exec/{made}/start", {"Detach": False, "Tty": True})
        text = output.decode() if isinstance(output, bytes) else json.dumps(output)
        return int(self.ask("GET", f"/exec/{made}/json")["ExitCode"]), text.strip()


def _name_of(labels: dict[str, str]) -> str:
    service = labels["com.docker.compose.service"]
    return f"{service}-{labels['com.docker.compose.container-number']}" if service == "worker" else service


def _is_one_off(labels: dict[str, str]) -> bool:
    return labels.get("com.docker.compose.oneoff") == "True"
