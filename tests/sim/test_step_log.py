"""The worker's step log, and the command that fits it, on modelled workers over the bus in memory."""

from __future__ import annotations

import asyncio
import io
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from cli.console import Console
from cli.exit_codes import CommandError
from cli.profile.command import ProfileSettings, describe_overhead, fit_steps, make_profile, measure
from cli.profile.driver import Driver, find_worker
from cli.profile.shapes import KV_SHARE, MAX_SHAPE_TOKENS, ProfileShape, plan_shapes
from cli.profile.steps import columns_of, groups_of, overheads_s
from services.worker.contract.batch import Batch, BatchOutput
from services.worker.cost.estimate import CostEstimate
from services.worker.serving.step_log import StepLog
from shared.cost import CostModel, load_profile, prefill_pairs, profile_toml
from shared.ids import WorkerId
from shared.messages.report import WorkerPhase, WorkerReport
from shared.messages.steps import StepLogPage
from shared.subjects import Subjects
from shared.transport.bus import BusError
from shared.wire import decode_json
from tests.support.lone_worker import LoneWorker, lone_worker

COST = CostModel(g0_s=0.006, b0_s=2e-5, g1_s=0.002, b1_s=5e-5, d_s=4e-7, a_s=3e-9)
SUBJECTS = Subjects()

pytestmark = pytest.mark.virtual_time
one_worker = partial(lone_worker, cost=COST, num_blocks=2000, max_model_len=2048, max_batch_tokens=512)


def driver_of(lone: LoneWorker) -> Driver:
    return Driver(lone.dispatcher.bus, SUBJECTS, WorkerId("w0"), np.random.default_rng(0))


async def test_every_step_is_logged_with_its_shape_and_duration() -> None:
    """Two prompts of 700 tokens, 512 tokens a step; every duration is what the cost model says of the shape."""
    async with one_worker() as lone:
        async with driver_of(lone) as driver:
            assert await driver.run(ProfileShape(2, 700, 5))
            steps, next_id = await driver.read_steps(0)
            assert await driver.read_steps(next_id) == ([], next_id)
            assert await driver.read_steps(next_id - 1) == (steps[-1:], next_id)
        assert len(steps) == lone.engine.totals.num_steps
        assert [step.step_id for step in steps] == list(range(len(steps)))
        for step in steps:
            pairs = sum(prefill_pairs(*chunk) for chunk in step.chunks)
            expected = COST.step_s(step.num_tokens, step.kv_decode_tokens, pairs)
            assert step.duration_s == pytest.approx(expected)
        assert sum(size for step in steps for _, size in step.chunks) == 1400
        assert sum(step.num_decodes for step in steps) == 8
        assert steps[0].chunks == ((0, 512),)
        assert (steps[-1].num_decodes, steps[-1].kv_decode_tokens) in ((1, 704), (2, 1408))


def step(step_id: int, num_chunks: int = 0) -> tuple[Batch, BatchOutput]:
    num_tokens = np.array([1, *[2] * num_chunks], dtype=np.int32)
    start = np.arange(5, 6 + num_chunks, dtype=np.int32)
    sample = np.ones(1 + num_chunks, dtype=np.bool_)
    batch = Batch(step_id, start, num_tokens, start, start, sample)
    return batch, BatchOutput(step_id, start, 0.5)


def step_log(max_steps: int) -> StepLog:
    """A log whose clock goes on by one second between two looks at it."""
    seconds = count()
    return StepLog(WorkerId("w0"), max_steps, lambda: float(next(seconds)), CostEstimate())


@pytest.mark.slow
def test_the_oldest_steps_are_forgotten_and_long_logs_come_in_pages() -> None:
    log = step_log(1500)
    for i in range(2000):
        log.note(*step(i, num_chunks=3))
    found: list[int] = []
    first, pages = 0, 0
    while (page := log.page(first)).steps:
        found += [record.step_id for record in page.steps]
        first, pages = page.next_step_id, pages + 1
    assert found == list(range(500, 2000))
    assert pages > 1
    assert page.next_step_id == 2000


async def test_the_log_is_asked_by_step_id() -> None:
    async with one_worker() as lone:
        ask = partial(lone.dispatcher.bus.request, SUBJECTS.steps(WorkerId("w0")), timeout_s=1)
        empty = decode_json(await ask(b""), StepLogPage)
        assert (empty.steps, empty.next_step_id, empty.max_steps) == ((), 0, 2048)
        for data in (b"-1", b"x", b"1" * 30):
            with pytest.raises(BusError):
                await ask(data)


def test_a_worker_that_keeps_no_log_keeps_nothing() -> None:
    log = step_log(0)
    log.note(*step(0))
    assert log.page(0) == StepLogPage(worker_id=WorkerId("w0"), max_steps=0, next_step_id=1)


def ready(**fields: int) -> WorkerReport:
    limits = {"max_model_len": 4096, "num_blocks": 2000, "block_size": 16, "max_sequences": 256} | fields
    return WorkerReport.model_validate(
        {"worker_id": "w0", "sequence_number": 0, "phase": WorkerPhase.READY, "model": "m", "device": "cpu"} | limits
    )


@pytest.mark.parametrize(
    "limits", [{}, {"num_blocks": 20}, {"max_model_len": 64}, {"max_sequences": 3}, {"block_size": 1, "num_blocks": 90}]
)
def test_shapes_fit_the_worker(limits: dict[str, int]) -> None:
    report = ready(**limits)
    shapes = plan_shapes(report, 128, 24, np.random.default_rng(0))
    assert shapes
    assert len({shape.num_prompt for shape in shapes}) >= 4
    for shape in shapes:
        blocks = shape.num_requests * -(-(shape.num_prompt + shape.num_output) // report.block_size)
        assert shape.num_prompt + shape.num_output <= report.max_model_len
        assert shape.num_requests == 1 or blocks <= KV_SHARE * report.num_blocks
        assert blocks <= report.num_blocks
        assert shape.num_requests <= report.max_sequences
        assert shape.num_requests * shape.num_prompt <= MAX_SHAPE_TOKENS


async def test_a_modelled_worker_is_profiled_back_to_its_own_coefficients(tmp_path: Path) -> None:
    """Nothing is noisy here, so the fit ends at what the executor was given, and the file says the same."""
    async with one_worker() as lone:
        bus, console = lone.dispatcher.bus, Console(io.StringIO(), {})
        report = await find_worker(bus, SUBJECTS)
        measured = await measure(bus, SUBJECTS, report, ProfileSettings(num_decodes=8), console)
    assert (measured.before, measured.after) == (COST, COST), "it is told what the worker itself prices by"
    fit = fit_steps(measured.steps, 0)
    assert asdict(fit.cost) == pytest.approx(asdict(COST), rel=1e-3)
    assert fit.p95_error_ratio < 1e-3
    path = tmp_path / "mine.toml"
    path.write_text(profile_toml(make_profile(report, fit, "mine")), encoding="utf-8")
    profile = load_profile(path)
    assert profile.model == "modelled"
    assert f"{fit.num_fitted} steps fitted" in profile.source
    assert asdict(profile.cost) == pytest.approx(asdict(COST), rel=1e-3)


async def test_the_time_limit_ends_the_measurement_early() -> None:
    stream = io.StringIO()
    async with one_worker() as lone:
        report = await find_worker(lone.dispatcher.bus, SUBJECTS)
        settings = ProfileSettings(num_decodes=2, limit_s=-1.0)
        assert (await measure(lone.dispatcher.bus, SUBJECTS, report, settings, Console(stream, {}))).steps == []
    assert stream.getvalue().startswith("0 of ")


async def test_a_worker_that_is_not_there_is_named() -> None:
    async with one_worker() as lone:
        with pytest.raises(CommandError, match="nothing is heard of worker 'w9' being ready"):
            await find_worker(lone.dispatcher.bus, SUBJECTS, "w9")


async def test_requests_are_cancelled_when_the_measurement_is_broken_off() -> None:
    async with one_worker() as lone:
        async with driver_of(lone) as driver:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(driver.run(ProfileShape(3, 100, 1500)), 1.0)
            assert lone.stats.num_running == 3
        await asyncio.sleep(0.1)
        assert lone.stats.num_used_blocks == 0


def test_columns_and_groups_follow_the_steps() -> None:
    log = step_log(10)
    for i, num_chunks in enumerate([0, 0, 2, 2, 0]):
        log.note(*step(i, num_chunks))
    steps = log.page(0).steps
    assert groups_of(steps).tolist() == [0, 0, 1, 1, 2]
    columns = columns_of(steps)
    assert columns.num_tokens.tolist() == [1, 1, 5, 5, 1]
    assert columns.kv_decode_tokens.tolist() == [6] * 5
    assert columns.prefill_pairs.tolist() == [0, 0, 6 * 2 + 3 + 7 * 2 + 3, 6 * 2 + 3 + 7 * 2 + 3, 0]


def test_a_period_is_the_time_from_step_to_step() -> None:
    """The clock shows 0, 1, 2 when the steps are noted, each of which took 0.5 s: the loop took the other half."""
    log = step_log(10)
    for i, num_chunks in enumerate([0, 0, 2]):
        log.note(*step(i, num_chunks))
    steps = log.page(0).steps
    assert [record.period_s for record in steps] == [None, 1.0, 1.0]
    assert overheads_s(steps).tolist() == [0.5, 0.5]
    assert describe_overhead(steps).startswith("between steps: 500 ms on average")


async def test_on_the_virtual_clock_nothing_is_between_steps_that_follow_each_other() -> None:
    """A pause before a prompt is no overhead: only steps with decodes count."""
    async with one_worker() as lone, driver_of(lone) as driver:
        for _ in range(2):
            assert await driver.run(ProfileShape(2, 100, 5))
            await asyncio.sleep(3)
        steps, _ = await driver.read_steps(0)
    overheads = overheads_s(steps)
    assert overheads.size == sum(record.num_decodes > 0 for record in steps) >= 8
    assert overheads.max() < 1e-9
    assert max((record.period_s or 0) - record.duration_s for record in steps) > 2.9
