"""A child's output: all of it in its file, warnings to the person, the last words when it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.cluster import child_log
from cli.cluster.child_log import ChildLog


def logged(folder: Path, *data: bytes) -> tuple[ChildLog, list[str]]:
    """The log of a child that has written this and ended, and what the person was shown of it."""
    shown: list[str] = []
    log = ChildLog("worker-0", folder / "worker-0.log", shown.append)
    for part in data:
        log.feed(part)
    log.close()
    return log, shown


def record(level: str, event: str, **fields: str) -> bytes:
    head = {"ts": "2026-01-01T00:00:00Z", "level": level, "service": "worker", "instance": "worker-0", "event": event}
    return json.dumps(head | fields).encode() + b"\n"


def test_only_warnings_and_worse_reach_the_person_and_all_reaches_the_file(tmp_path: Path) -> None:
    lines = [
        record("info", "worker_ready"),
        record("warning", "report_not_sent", error="gone"),
        b"plain text\n",
        record("error", "crashed", exception="Traceback …\n  line\nValueError: bad"),
    ]
    _, shown = logged(tmp_path, *lines)
    assert shown == ["worker-0: warning: report_not_sent error=gone", "worker-0: error: crashed ValueError: bad"]
    assert (tmp_path / "worker-0.log").read_bytes() == b"".join(lines)


@given(cuts=st.lists(st.integers(0, 400), max_size=8).map(sorted))
def test_lines_are_found_wherever_the_pipe_cuts_them(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    data = record("warning", "first") + record("info", "second") + record("error", "third ü")
    pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    _, shown = logged(tmp_path_factory.mktemp("log"), *pieces)
    assert shown == ["worker-0: warning: first", "worker-0: error: third ü"]


def test_the_refusal_is_the_line_of_the_child_itself(tmp_path: Path) -> None:
    log, _ = logged(tmp_path, b"sluice: too little memory. Use --memory 2GiB\n", record("info", "bye"))
    assert log.refusal() == "sluice: too little memory. Use --memory 2GiB"


def test_a_child_that_refuses_without_a_line_is_named_with_its_last_words(tmp_path: Path) -> None:
    log, _ = logged(tmp_path, b"usage: whatever\n")
    assert log.refusal() == "sluice: worker-0 refused to start: usage: whatever"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ""),
        (record("info", "all is well"), ""),
        (b"Traceback\nRuntimeError: boom\n", "RuntimeError: boom"),
        (record("error", "crashed", exception="Traceback\nRuntimeError: boom"), "RuntimeError: boom"),
        (record("error", "lost the broker") + record("info", "closing"), "lost the broker"),
        (b"no line end", "no line end"),
        (b"\x1b[31mred\x07\n", "[31mred"),
    ],
)
def test_last_words(tmp_path: Path, data: bytes, words: str) -> None:
    assert logged(tmp_path, data)[0].last_words() == words


def test_memory_and_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_log, "MAX_FILE_BYTES", 1000)
    monkeypatch.setattr(child_log, "MAX_LINE_BYTES", 100)
    log, _ = logged(tmp_path, *[b"x" * 150] * 50, *[b"a line\n"] * 200)
    assert len(log.tail) <= child_log.MAX_TAIL_LINES
    assert max(map(len, log.tail)) <= 100
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"worker-0.log", "worker-0.log.old"}
    assert max(sizes.values()) <= 1000
