"""The unit in `systemd/`: systemd takes it, and its command does what it promises when it is run as systemd would."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from cli.cluster.settings import UpSettings
from cli.run import STOP_LIMIT_S
from tests.support.ports import free_port
from tests.support.processes import wait_until

UNIT = Path(__file__).parents[2] / "systemd" / "sluice.service"
LIMIT_S = 60.0


def read_unit() -> dict[str, list[str]]:
    """Return the settings of the service: all values of a name, in order, as they stand."""
    found = defaultdict[str, list[str]](list)
    for line in UNIT.read_text().partition("[Service]\n")[2].partition("\n[Install]")[0].splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found[name].append(value)
    return found


SERVICE = read_unit()


def seconds(text: str) -> int:
    return 60 * int(text.removesuffix("min")) if text.endswith("min") else int(text)


class Manager:
    """Starts the unit's command as systemd would, in folders of its own, and hears what it says of itself."""

    def __init__(self, root: Path, more: str = "") -> None:
        self.root = root
        self.port = free_port()
        self.folders = {"%t": root / "run", "%S": root / "lib", "%C": root / "cache", "%L": root / "log"}
        for folder in self.folders.values():
            (folder / "sluice").mkdir(parents=True, mode=0o700)
        (root / "etc").mkdir()
        (root / "etc" / "sluice.toml").write_text(f'port = {self.port}\nmemory = "256MiB"\n{more}')
        self.said: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(root / "notify"))
        self._hearing = Thread(target=self._hear)
        self._hearing.start()
        path, *words = shlex.split(SERVICE["ExecStart"][0])
        assert Path(path).name == "sluice"
        with (root / "out").open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cli.main", *words],
                cwd=root / "etc",
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=int(SERVICE["UMask"][0], 8),
            )

    def environment(self) -> dict[str, str]:
        """Nothing of this process's, but where the code is, which is installed elsewhere."""
        given = dict(word.partition("=")[::2] for line in SERVICE["Environment"] for word in shlex.split(line))
        for specifier, folder in self.folders.items():
            given = {name: value.replace(specifier, str(folder)) for name, value in given.items()}
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        own = {"PATH": path, "PYTHONPATH": os.pathsep.join(sys.path), "NOTIFY_SOCKET": str(self.root / "notify")}
        return {**own, **given}

    def _hear(self) -> None:
        while text := self._socket.recv(4096).decode():
            self.said += text.splitlines()

    def hear(self, line: str) -> None:
        def is_said() -> bool:
            assert self.process.poll() is None or line in self.said, self.out
            return line in self.said

        wait_until(is_said, f"it says {line}", LIMIT_S)

    @property
    def out(self) -> str:
        """What it has printed."""
        return (self.root / "out").read_text()

    def ask(self, path: str, body: dict[str, object] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.load(answer)

    def end(self) -> None:
        """Kill what is left, and hear no more."""
        self.process.kill()
        self.process.wait()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", str(self.root / "notify"))
        self._hearing.join()
        self._socket.close()


@contextmanager
def started(more: str = "") -> Iterator[Manager]:
    """Start it, with more lines in its settings."""
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:  # the name of a socket has at most 107 bytes
        manager = Manager(Path(folder), more)
        try:
            yield manager
        finally:
            manager.end()


@pytest.mark.slow
def test_it_starts_serves_drains_and_ends_as_the_unit_promises() -> None:
    with started() as manager:
        manager.hear("READY=1")
        assert "STATUS=loading sluice-demo" in manager.said
        assert f"STATUS=serving sluice-demo at http://127.0.0.1:{manager.port}" in manager.said
        assert "STOPPING=1" not in manager.said
        answers: list[Any] = []
        body = {"model": "sluice-demo", "prompt": "Tell me a story.", "max_tokens": 900, "ignore_eos": True}
        reader = Thread(target=lambda: answers.append(manager.ask("/v1/completions", body)))
        reader.start()
        wait_until(lambda: bool(manager.ask("/v1/requests")["requests"]), "it answers", LIMIT_S)
        os.kill(manager.process.pid, getattr(signal, SERVICE["KillSignal"][0]))  # to it alone: KillMode=mixed
        manager.hear("STOPPING=1")
        assert manager.process.wait(LIMIT_S) == 0, manager.out
        reader.join(LIMIT_S)
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [900], "what ran came to its end"
        assert (manager.root / "log" / "sluice" / "worker-0.log").stat().st_size
        assert any((manager.root / "cache" / "sluice" / "costs").iterdir())
        assert not any((manager.root / "run" / "sluice" / "sluice").iterdir()), "the run file is gone"


@pytest.mark.slow
def test_settings_that_are_wrong_end_it_for_good() -> None:
    with started("prot = 8000\n") as manager:
        assert str(manager.process.wait(LIMIT_S)) in SERVICE["RestartPreventExitStatus"]
        assert "Did you mean port?" in manager.out
        assert "READY=1" not in manager.said


def test_it_has_the_time_that_it_takes_and_the_rights_that_it_needs() -> None:
    settings = UpSettings()
    assert seconds(SERVICE["TimeoutStartSec"][0]) > settings.start_limit_s
    assert seconds(SERVICE["TimeoutStopSec"][0]) >= STOP_LIMIT_S > settings.drain_limit_s
    assert SERVICE["Type"] == ["notify"]
    assert SERVICE["KillMode"] == ["mixed"]
    assert not {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "MemoryDenyWriteExecute"} & set(
        SERVICE
    )


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("there is no systemd-analyze here")
    command = tmp_path / "sluice"
    command.write_text("#!/bin/sh\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(shlex.split(SERVICE["ExecStart"][0])[0], str(command)))
    done = subprocess.run([program, "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
