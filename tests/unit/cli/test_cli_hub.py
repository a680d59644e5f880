"""The parts of fetching a model that need no hub."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli import hub
from cli.console import Console
from cli.hub import HubModel, parse_source, stored_bytes
from cli.pull import show_progress
from shared.errors import StartupError
from tests.support.terminals import Terminal


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("a/b", HubModel("a/b")),
        ("Qwen/Qwen2.5-0.5B-Instruct", HubModel("Qwen/Qwen2.5-0.5B-Instruct")),
        ("a/b@v1.0", HubModel("a/b", "v1.0")),
        ("a/b@refs/pr/3", HubModel("a/b", "refs/pr/3")),
    ],
)
def test_ids_may_carry_a_revision(text: str, source: HubModel) -> None:
    assert parse_source(text) == source
    assert str(source) == text


@pytest.mark.parametrize("text", ["a", "/a/b", "a/b/c", "a/b@", "-a/b", "a b/c", "../b", "a/b\n"])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(StartupError, match="is no model id"):
        parse_source(text)


def test_a_disk_without_room_is_refused_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2e9) if path == tmp_path else None)
    with pytest.raises(StartupError, match=r"3\.00 GB are to be fetched, and .* has room for 2\.00\. Free some"):
        hub._check_room(tmp_path / "not" / "there", 3_000_000_000)
    hub._check_room(tmp_path / "not" / "there", 1_000_000_000)
    hub._check_room(tmp_path, 0)


def test_stored_bytes_count_parts_but_neither_links_nor_holes(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "one.incomplete").write_bytes(os.urandom(8192))
    (tmp_path / "link").symlink_to(tmp_path / "blobs" / "one.incomplete")
    with (tmp_path / "blobs" / "two").open("wb") as file:
        file.truncate(10**9)
    assert stored_bytes(tmp_path) == 8192
    assert stored_bytes(tmp_path / "none") == 0


def test_progress_says_share_speed_and_time_left() -> None:
    times = iter([0.0, 2.0, 10.0])
    stream = Terminal()
    show = show_progress(Console(stream, {"NO_COLOR": "1"}), "a/b", lambda: next(times))
    show(100_000_000, 400_000_000)
    assert "a/b [#####...............]  25% of 400.0 MB at 50.0 MB/s, 6 s left" in stream.getvalue()
    show(400_000_000, 400_000_000)
    assert "100% of 400.0 MB at 40.0 MB/s" in stream.getvalue()


def test_without_a_terminal_progress_is_a_line_now_and_then() -> None:
    times = iter([0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 12.0, 12.0, 12.0, 13.0, 13.0, 13.0])
    stream = io.StringIO()
    show = show_progress(Console(stream, {}), "a/b", lambda: next(times))
    for megabytes in (1, 2, 3, 4):
        show(megabytes * 1_000_000, 4_000_000)
    show(0, 0)
    assert [line.split("%")[0].split()[-1] for line in stream.getvalue().splitlines()] == ["25", "75", "100"]
