"""The health file: who writes it is well, who stops writing it is not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.process.health import MAX_AGE_S, find_illness, write_health


def check(path: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "shared.process.health", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return done.returncode, done.stdout.strip()


def test_a_fresh_file_of_a_connected_process_is_well(tmp_path: Path) -> None:
    path = tmp_path / "health"
    write_health(path, connected=True, ready=True)
    write_health(path, connected=True, ready=True)
    assert check(path) == (0, "")
    assert [file.name for file in tmp_path.iterdir()] == ["health"]


def test_a_process_without_a_broker_one_that_stands_still_and_one_that_loads_are_not_well(tmp_path: Path) -> None:
    path = tmp_path / "health"
    write_health(path, connected=False, ready=True)
    assert check(path) == (1, "no connection to the broker")
    write_health(path, connected=True, ready=False)
    assert check(path) == (1, "it does not serve yet")
    path.write_text(json.dumps({"at_s": time.monotonic() - MAX_AGE_S - 2, "connected": True, "ready": True}))
    illness = re.fullmatch(r"the process has stood still for (\d+) s", find_illness(path) or "")
    assert illness is not None
    assert int(illness[1]) >= MAX_AGE_S + 2


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"at_s": "x", "connected": true, "ready": true}', '{"at_s": 1e9, "connected": true}']
)
def test_a_file_that_says_nothing_is_not_well(tmp_path: Path, text: str) -> None:
    path = tmp_path / "health"
    path.write_text(text)
    assert "says nothing" in (find_illness(path) or "")
    assert "says nothing" in (find_illness(tmp_path / "missing") or "")
