"""Whose steps a worker takes for its own: model, device, build and threads alike, whatever else differs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.worker.config import WorkerSettings
from services.worker.cost.fitting import CostFitting
from services.worker.cost.kept import KeptSteps
from services.worker.cost.steps import MeasuredStep, StepSample
from services.worker.executor.cost_key import cost_key
from services.worker.executor.step_threads import StepThreads
from services.worker.load import check_start, load_executor
from services.worker.models.spec import read_spec
from tests.support.checkpoints import CheckpointShape, stored_checkpoint
from tests.support.loading import close_loaded
from tests.support.peers import PASSWORD
from tests.support.runners import open_runner, runner_settings
from tests.unit.worker.executor.test_kept_steps import SLOW, noted, taken

pytestmark = [pytest.mark.kernels, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _named_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "A card")
    monkeypatch.setattr("services.worker.executor.cost_key.processor_name", lambda: "A processor")


def test_what_changes_the_cost_of_a_step_changes_the_key_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stored_checkpoint(CheckpointShape())[0]
    runner, spec, settings = open_runner(CheckpointShape()), read_spec(folder), runner_settings(folder)
    info = runner.info
    runner.close()
    assert info.threads == StepThreads(1, are_given=True)
    keys = [cost_key(spec, settings, info)]
    model: list[dict[str, Any]] = [{"num_layers": 3}, {"head_dim": 64}]
    modes: list[dict[str, Any]] = [{"block_size": 32}, {"deterministic": True}, {"fused": False}, {"graphs": False}]
    modes += [{"overlap": True}, {"page_bytes": 4096}]
    about: list[dict[str, Any]] = [{"dtype": "bfloat16"}, {"device": "cuda:0"}, {"build": f"{info.build}, or another"}]
    about += [{"threads": StepThreads(*threads)} for threads in ((2, True), (2, False), (1, False))]
    keys += [cost_key(replace(spec, **change), settings, info) for change in model]
    keys += [cost_key(spec, replace(settings, **change), info) for change in modes]
    keys += [cost_key(spec, settings, replace(info, **change)) for change in about]
    alike = replace(settings, memory_bytes=2**30, max_rows=99, model_dir=Path("/elsewhere"), max_model_len=7)
    assert cost_key(spec, alike, replace(info, num_parameters=1, max_model_len=7)) == keys[0]
    on_card = [replace(info, device=f"cuda:{index}") for index in (0, 1)]
    assert cost_key(spec, settings, on_card[0]) == cost_key(spec, settings, on_card[1])
    monkeypatch.setattr("services.worker.executor.cost_key.VERSION", "9.9")
    keys.append(cost_key(spec, settings, info))
    monkeypatch.setattr("services.worker.executor.cost_key.processor_name", lambda: "Another processor")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "Another card")
    keys += [cost_key(spec, settings, each) for each in (info, on_card[0])]
    assert len({key.model_dump_json() for key in keys}) == len(keys)


def test_the_build_names_the_library_with_its_sources_and_torch() -> None:
    runner = open_runner(CheckpointShape())
    assert "torch 2" in runner.info.build
    if runner.info.kernels != "torch":
        level = runner.info.kernels.split()[-1]
        assert f"libsluice-{level}-" in runner.info.build
    runner.close()


@pytest.mark.parametrize("system", ["fcfs-chunked", "kunserve"])
async def test_a_worker_that_starts_again_begins_with_what_it_knew(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the event loop neither reads nor writes."""
    threads: list[int] = []

    class Watched(KeptSteps):
        def read(self, tried: Sequence[MeasuredStep]) -> list[MeasuredStep]:
            threads.append(threading.get_ident())
            return super().read(tried)

        def write(self, steps: Iterable[MeasuredStep]) -> None:
            threads.append(threading.get_ident())
            super().write(steps)

    monkeypatch.setattr("services.worker.load.KeptSteps", Watched)
    monkeypatch.setattr("services.worker.executor.dry_steps.try_steps", lambda *_: taken())
    first = await _started(system, tmp_path)
    assert first.sample.steps == StepSample(taken()).steps
    assert _files(tmp_path) == [], "steps that were only tried will be tried again"
    await noted(first, SLOW)
    again = await _started(system, tmp_path)
    assert again.sample.steps == StepSample([*first.sample.steps, *taken()]).steps
    assert again.estimate.now == again.sample.fit()
    (file,) = _files(tmp_path)
    assert json.loads(file)["key"]["threads"] == "1"
    assert len(threads) == 3
    assert threading.get_ident() not in threads
    assert (await _started(system, None)).sample.steps == StepSample(taken()).steps, "nothing is kept if not told so"
    assert len(threads) == 3


def _files(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.iterdir()]


async def _started(system: str, costs_kept: Path | None) -> CostFitting:
    """Return what fits the costs of a worker that was loaded."""
    settings = WorkerSettings(
        instance_id="w0",
        nats_user="worker",
        nats_password=PASSWORD,
        model=stored_checkpoint(CheckpointShape())[0],
        system=system,
        memory=2**25,
        page_bytes=2**16,
        threads=1,
        costs_kept=costs_kept,
    )
    loaded = await load_executor(settings, check_start(settings), lambda _done, _what: None)
    await close_loaded(loaded)
    assert loaded.model.fitting is not None
    return loaded.model.fitting
