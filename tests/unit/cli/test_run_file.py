"""Which clusters run here: the files that say so, and who is believed."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cli.cluster.broker import BrokerAccess, named_broker
from cli.cluster.settings import load_bus_settings
from cli.exit_codes import REFUSED, UNREACHABLE, CommandError
from cli.processes import started
from cli.run_file import DEFAULT_URL, Run, RunFile, api_url, find_run, find_runs, runs_folder
from shared.transport.nats_bus import NoBrokerError
from tests.support.ports import free_port

NATS_URL = "nats://operator:secret@127.0.0.1:4000"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("NATS_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "sluice"


def run_at(port: int, cluster: str = "default", **changes: Any) -> Run:
    url = f"http://127.0.0.1:{port}"
    return replace(Run(url, cluster, NATS_URL, "tiny", 1, "/logs", since_s=float(port)), **changes)


@contextmanager
def told(*runs: Run) -> Iterator[None]:
    files = [RunFile() for _ in runs]
    for file, run in zip(files, runs, strict=True):
        file.write(run)
    try:
        yield
    finally:
        for file in files:
            file.end()
            file.end()


def test_a_cluster_is_found_as_long_as_it_runs(folder: Path) -> None:
    run = run_at(8000)
    assert (find_runs(), find_run(), api_url(None)) == ([], None, DEFAULT_URL)
    with told(run):
        assert (find_runs(), find_run(), api_url(None)) == ([run], run, run.url)
        assert api_url("http://elsewhere") == "http://elsewhere"
        assert (folder.stat().st_mode & 0o777, (folder / f"{run.id}.json").stat().st_mode & 0o777) == (0o700, 0o600)
    assert find_runs() == []
    assert list(folder.iterdir()) == []


def test_several_are_listed_and_never_guessed() -> None:
    first, second, third = run_at(8000), run_at(8001, "b"), run_at(8002, "b")
    with told(second, first, third):
        assert find_runs() == [first, second, third]
        for name in (first.id, "default", "8000", first.url):
            assert find_run(name) == first
        for ambiguous in (None, "b"):
            with pytest.raises(CommandError, match=rf"clusters run here: .*{second.id} \(b, {second.url}\)") as caught:
                find_run(ambiguous)
            assert caught.value.code == REFUSED
        with pytest.raises(CommandError, match=r"3 clusters run here.*\. Say which by --url"):
            api_url(None)
        with pytest.raises(CommandError, match="no cluster '9' runs here") as caught:
            find_run("9")
        assert caught.value.code == UNREACHABLE


def test_a_broker_that_is_not_named_is_that_of_the_cluster_that_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_bus_settings({}).nats_url == "nats://127.0.0.1:4222"
    with told(run_at(8000, "a")):
        found = load_bus_settings({})
        assert (found.nats_url, found.cluster, found.has_own_broker) == (NATS_URL, "a", False)
        assert load_bus_settings({"nats_url": "nats://b:1"}).nats_url == "nats://b:1"
        assert load_bus_settings({"cluster": "other"}).nats_url == "nats://127.0.0.1:4222"
        with told(run_at(8001, "b", nats_url="nats://b:2")):
            for name in ("b", "8001"):
                named = load_bus_settings({"cluster": name})
                assert (named.nats_url, named.cluster) == ("nats://b:2", "b")
            with pytest.raises(CommandError, match="2 clusters run here"):
                load_bus_settings({})
        monkeypatch.setenv("NATS_URL", "nats://c:3")
        assert load_bus_settings({}).nats_url == "nats://c:3"


async def test_without_a_cluster_and_a_name_it_is_the_cluster_that_is_missing_not_a_broker() -> None:
    nobody = f"nats://127.0.0.1:{free_port()}"
    for is_guess, kind, said in ((True, CommandError, "no cluster runs here"), (False, NoBrokerError, nobody)):
        with pytest.raises(kind, match=said):
            async with BrokerAccess(nobody, is_guess=is_guess).connect("test"):
                raise AssertionError
    assert named_broker(load_bus_settings({})).is_guess
    assert not named_broker(load_bus_settings({"nats_url": nobody})).is_guess


def test_a_file_of_a_process_that_is_gone_is_removed_and_what_is_no_such_file_is_left(folder: Path) -> None:
    with told(run_at(8000)):
        gone, odd = folder / "gone.json", folder / "odd.json"
        gone.write_text(json.dumps(asdict(run_at(8001))))
        odd.write_text("rubbish")
        link, pipe = folder / "link.json", folder / "pipe.json"
        link.symlink_to(next(folder.glob("*.json")))
        os.mkfifo(pipe)
        with odd.open() as locked:
            fcntl.flock(locked, fcntl.LOCK_EX)
            assert [run.url for run in find_runs()] == [run_at(8000).url]
        assert not gone.exists()
        assert link.is_symlink()
        assert pipe.exists()


def test_a_folder_that_others_may_write_to_is_neither_believed_nor_used(folder: Path, tmp_path: Path) -> None:
    with told(run_at(8000)):
        folder.chmod(0o770)
        assert find_runs() == []
        with pytest.raises(PermissionError, match="not a folder of this user alone"):
            RunFile().write(run_at(8001))
        folder.chmod(0o700)
        moved = folder.rename(tmp_path / "moved")
        folder.symlink_to(moved)
        assert find_runs() == []
        with pytest.raises(PermissionError):
            RunFile().write(run_at(8001))
        folder.unlink()
        moved.rename(folder)
        assert len(find_runs()) == 1


def test_the_home_folder_is_used_where_there_is_none_for_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert runs_folder() == tmp_path / "home/.cache/sluice/run"
    with told(run_at(8000)):
        assert len(find_runs()) == 1
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert runs_folder() == tmp_path / f"sluice-{os.geteuid()}", "of a user without a home"


def test_only_the_process_that_was_started_then_is_signalled() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        run = run_at(8000, pid=child.pid, started=started(child.pid))
        for other in (replace(run, started=run.started + "0"), replace(run, started=""), replace(run, pid=2**22 - 1)):
            with pytest.raises(CommandError, match=r"the cluster at http://127\.0\.0\.1:8000 has just ended"):
                other.signal(signal.SIGTERM)
        assert child.poll() is None
        os.close(run.signal(signal.SIGTERM))
        assert child.wait(10) == -signal.SIGTERM
        with pytest.raises(CommandError, match="has just ended"):
            run.signal(signal.SIGTERM)
