"""`sluice logs`: the last lines, in order, and those that come, also of a file that begins anew."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.exit_codes import REFUSED, UNREACHABLE, CommandError
from cli.logs import run_logs
from cli.run_file import Run, RunFile


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


@pytest.fixture
def run_file(tmp_path: Path, log_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFile]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = RunFile()
    file.write(Run("http://127.0.0.1:8000", "default", "nats://a:1", "tiny", 1, str(log_dir)))
    yield file
    file.end()


def line(at_s: int, event: str) -> str:
    return json.dumps({"ts": f"2026-01-01T00:00:{at_s:02}.000Z", "event": event})


def write(path: Path, *lines: str, mode: str = "a") -> None:
    with path.open(mode) as file:
        file.writelines(f"{each}\n" for each in lines)


def test_lines_of_several_come_in_order_with_what_belongs_to_them(log_dir: Path, run_file: RunFile) -> None:
    write(log_dir / "worker-0.log", line(1, "a"), "Traceback", line(5, "b"))
    write(log_dir / "monitor.log", line(0, "x"), line(3, "y"))
    assert list(run_logs((), None, tail=9, follows=False)) == [
        f"monitor  | {line(0, 'x')}",
        f"worker-0 | {line(1, 'a')}",
        "worker-0 | Traceback",
        f"monitor  | {line(3, 'y')}",
        f"worker-0 | {line(5, 'b')}",
    ]
    assert list(run_logs(("worker-0",), "8000", tail=2, follows=False)) == ["Traceback", line(5, "b")]
    assert list(run_logs(("worker-0",), None, tail=0, follows=False)) == []


def test_what_comes_is_shown_once_it_is_whole_until_the_cluster_has_ended(log_dir: Path, run_file: RunFile) -> None:
    path = log_dir / "worker-0.log"
    write(path, line(0, "before"))
    lines = run_logs(("worker-0",), None, tail=1, follows=True)
    assert next(lines) == line(0, "before")
    write(path, line(1, "first"), line(2, "second"))
    with path.open("a") as file:
        file.write("half ")
    assert [next(lines), next(lines)] == [line(1, "first"), line(2, "second")]
    write(path, "of it", line(3, "last of this file"))
    path.rename(log_dir / "worker-0.log.old")
    write(path, line(4, "of the next one"))
    assert [next(lines) for _ in range(3)] == ["half of it", line(3, "last of this file"), line(4, "of the next one")]
    write(path, line(5, "the end"))
    run_file.end()
    assert list(lines) == [line(5, "the end")]


def test_what_is_not_there_is_said(log_dir: Path, run_file: RunFile) -> None:
    write(log_dir / "worker-0.log", line(0, "a"))
    with pytest.raises(CommandError, match=r"'worker-9' has no log\. There are worker-0") as caught:
        list(run_logs(("worker-9",), None, tail=1, follows=False))
    assert caught.value.code == REFUSED
    run_file.end()
    with pytest.raises(CommandError, match="no cluster runs here") as caught:
        list(run_logs((), None, tail=1, follows=False))
    assert caught.value.code == UNREACHABLE
