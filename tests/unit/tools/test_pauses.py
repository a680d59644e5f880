"""The tool that lets tests stand still: it stops what it says, for as long as it says, and nothing stays stopped."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.pauses import main, pause, processes_of
from tests.support.processes import wait_until

FAMILY = "import subprocess, sys, time; c = subprocess.Popen(['sleep', '60']); print(c.pid, flush=True); time.sleep(60)"


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """A process, and its child."""
    parent = subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    yield parent.pid, child
    parent.kill()
    os.kill(child, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()


def seen_while_paused(root: int, kind: str, num_stopped: int, seed: int = 0) -> dict[int, str]:
    """Return the states while processes stand still, once so many are shown as stopped; then all go on."""
    seen = dict[int, str]()

    def look() -> bool:
        seen.update(processes_of(root))
        return list(seen.values()).count("T") == num_stopped

    pause(root, kind, random.Random(seed), lambda: wait_until(look, f"{num_stopped} are stopped"))
    wait_until(lambda: "T" not in processes_of(root).values(), "they go on")
    return seen


def test_all_stand_still_and_go_on(family: tuple[int, int]) -> None:
    assert seen_while_paused(family[0], "all", 2) == dict.fromkeys(family, "T")


def test_one_stands_still_alone(family: tuple[int, int]) -> None:
    seen = [seen_while_paused(family[0], "one", 1, seed) for seed in range(10)]
    assert {pid for states in seen for pid, state in states.items() if state == "T"} == set(family), "any of them"


def test_the_tests_stand_still_without_what_they_have_started(family: tuple[int, int]) -> None:
    parent, child = family
    seen = seen_while_paused(parent, "tests", 1)
    assert (seen[parent], seen[child] == "T") == ("T", False)


def test_what_somebody_else_has_stopped_stays_stopped(family: tuple[int, int]) -> None:
    parent, child = family
    os.kill(child, signal.SIGSTOP)
    wait_until(lambda: processes_of(parent)[child] == "T", "the child is stopped")
    assert pause(parent, "all", random.Random(0), lambda: None) == 1
    assert processes_of(parent)[child] == "T"


def test_the_exit_code_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kind", "one", "--", sys.executable, "-c", "import sys; sys.exit(7)"]) == 7
    assert "stood still 0 times (one)" in capsys.readouterr().err
