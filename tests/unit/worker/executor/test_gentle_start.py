"""A worker that starts leaves the cores to those that serve, and torch's operators do not spin for each other."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker import __main__ as worker
from services.worker import load
from services.worker.config import KernelKind, WorkerSettings
from tests.support.checkpoints import CheckpointShape, stored_checkpoint
from tests.support.loading import close_loaded

MODEL = Path(__file__).parents[4] / "demo_model" / "model"


class SeenError(Exception):
    """Enough has been seen."""


def niceness() -> int:
    """Of this thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


async def niceness_while(monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> tuple[list[int], list[int]]:
    """Return the niceness of what loads and of a thread that it makes, and of what tries steps for their time."""
    loading, trying = list[int](), list[int]()

    def load_whole(*_: Any) -> tuple[SimpleNamespace, str]:
        helper = threading.Thread(target=lambda: loading.append(niceness()))
        helper.start()
        helper.join()
        loading.append(niceness())
        return SimpleNamespace(runner=None), ""

    def tried(*_: Any) -> None:
        trying.append(niceness())
        raise SeenError

    monkeypatch.setattr(load, "_load_whole", load_whole)
    monkeypatch.setattr(load, "_tried", tried)
    settings = WorkerSettings(model=MODEL, device=device)
    with pytest.raises(SeenError):
        await load.load_executor(settings, load.check_start(settings), lambda *_: None)
    return loading, trying


async def test_what_loads_yields_and_what_measures_steps_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before = niceness()
    loading, trying = await niceness_while(monkeypatch)
    assert loading == [min(before + load.NICENESS, 19)] * 2
    assert trying == [before] == [niceness()]


async def test_a_start_that_may_not_yield_loads_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox may refuse the call, also to whoever asks for no change."""

    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    loading, trying = await asyncio.wait_for(niceness_while(monkeypatch), 60)
    assert set(loading + trying) == {niceness()}


async def test_what_loads_for_a_gpu_does_not_yield(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_make_pool", lambda _: None)
    loading, _ = await niceness_while(monkeypatch, device="cuda")
    assert set(loading) == {niceness()}


async def test_threads_that_torch_keeps_have_the_priority_of_a_worker_that_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pool is made anew whenever it is asked for another number."""

    class Pool:
        size, made_at = 0, 100

        def set(self, size: int) -> None:
            if size != self.size:
                self.size, self.made_at = size, niceness()

    pool, before = Pool(), niceness()
    monkeypatch.setattr("torch.set_num_threads", pool.set)
    monkeypatch.setattr(load, "_tried", lambda *_: SimpleNamespace(estimate=None))
    folder = stored_checkpoint(CheckpointShape())[0]
    settings = WorkerSettings(model=folder, memory=64 * 2**20, kernels=KernelKind.TORCH, threads=3)
    loaded = await load.load_executor(settings, load.check_start(settings), lambda *_: None)
    await close_loaded(loaded)
    assert (pool.size, pool.made_at) == (3, before)


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "500"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, None)],
)
def test_threads_of_torchs_operators_sleep_soon_unless_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    """What checks the settings may import torch, whose threads read it."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen: list[str | None] = []
    monkeypatch.setattr(worker, "run_service_process", lambda *_: seen.append(os.environ.get("GOMP_SPINCOUNT")))
    worker.main()
    assert seen == [expected]
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # so that it goes with the test
