"""A worker that starts leaves the cores to those that serve, and torch's operators do not spin for each other."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker import load
from services.worker.config import WorkerSettings

MODEL = Path(__file__).parents[4] / "demo_model" / "model"


class SeenError(Exception):
    """Enough has been seen."""


def niceness() -> int:
    """Of this thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


async def niceness_while(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Return the niceness of what loads and of a thread that it makes, and of what tries steps for their time."""
    loading, trying = list[int](), list[int]()

    def load_runner(*_: Any) -> SimpleNamespace:
        helper = threading.Thread(target=lambda: loading.append(niceness()))
        helper.start()
        helper.join()
        loading.append(niceness())
        return SimpleNamespace(info=None)

    def tried(*_: Any) -> None:
        trying.append(niceness())
        raise SeenError

    monkeypatch.setattr(load, "_load_runner", load_runner)
    monkeypatch.setattr(load, "_tried", tried)
    settings = WorkerSettings(model=MODEL)
    with pytest.raises(SeenError):
        await load.load_executor(settings, load.check_start(settings), lambda *_: None)
    return loading, trying


async def test_what_loads_yields_and_what_measures_steps_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "1")
    before = niceness()
    loading, trying = await niceness_while(monkeypatch)
    assert loading == [min(before + load.NICENESS, 19)] * 2
    assert trying == [before] == [niceness()]


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "500"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, None)],
)
async def test_threads_of_torchs_operators_sleep_soon_unless_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    await niceness_while(monkeypatch)
    assert os.environ.get("GOMP_SPINCOUNT") == expected
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # so that it goes with the test
