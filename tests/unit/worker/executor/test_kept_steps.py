"""What steps have cost, from one start to the next: whole files only, of workers alike, and no harm from any other."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from services.worker.contract.batch import Batch, BatchOutput
from services.worker.cost.fitting import FIRST_STEPS, CostFitting
from services.worker.cost.kept import MAX_BYTES, MAX_FILES, CostKey, KeptSteps
from services.worker.cost.steps import MAX_KINDS, MOST_APART, PER_KIND, MeasuredStep, StepSample, StepShape, shape_of
from shared.cost import CostModel

COST = CostModel(g0_s=4e-4, b0_s=2.5e-5, g1_s=0, b1_s=0, d_s=3e-7, a_s=8e-8)
SLOW = CostModel(*(2.0 * value for value in (4e-4, 2.5e-5, 0, 0, 3e-7, 8e-8)))
SHAPES = [StepShape(1, 1, 0), StepShape(1, 1024, 0), StepShape(16, 16, 0), StepShape(16, 16_384, 0)]
SHAPES += [StepShape(256, 0, 32_896), StepShape(64, 0, 2080), StepShape(256, 0, 229_504)]
KEY = CostKey(model="m", dtype="float32", device="cpu, x", build="torch", threads="1")
NAMES = list(CostKey.model_fields)


def taken(cost: CostModel = COST, factor: float = 1.0) -> list[MeasuredStep]:
    return [MeasuredStep(shape, factor * cost.step_s(*shape)) for shape in SHAPES]


def drawn(seed: int) -> list[MeasuredStep]:
    """Steps of all kinds, with noise; more than a sample has places for."""
    random = np.random.default_rng(seed)
    shapes = [StepShape(1 + int(2 ** random.uniform(0, 9)), *(int(2 ** random.uniform(0, 18)) for _ in "ab"))] * 2
    shapes += [StepShape(int(2 ** random.uniform(0, 9)), int(2 ** random.uniform(0, 18)), 0) for _ in range(400)]
    shapes += [StepShape(int(2 ** random.uniform(1, 9)), 0, int(2 ** random.uniform(2, 18))) for _ in range(200)]
    return [MeasuredStep(shape, COST.step_s(*shape) * float(random.lognormal(0, 0.1))) for shape in shapes]


def read(folder: Path, key: CostKey = KEY, tried: Sequence[MeasuredStep] = ()) -> tuple[list[MeasuredStep], list[Any]]:
    """Return what a worker that starts gets, and what it logs."""
    with structlog.testing.capture_logs() as logs:
        return KeptSteps(folder, key).read(tried), logs


def file_of(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


async def noted(fitting: CostFitting, cost: CostModel, count: int = FIRST_STEPS) -> None:
    """Let it see prompts and decodes of many sizes, and fit."""
    random = np.random.default_rng(count)
    for i in range(count):
        rows = 1 if i % 2 else int(random.integers(1, 40))
        start = random.integers(0, 900, rows).astype(np.int32)
        size = np.full(rows, random.integers(2, 400) if i % 2 else 1, dtype=np.int32)
        batch = Batch(0, start, size, start, np.zeros(int(size.sum()), dtype=np.int32), start >= 0)
        is_due = fitting.note(batch, BatchOutput(0, start, cost.step_s(*shape_of(start, size))))
    assert is_due
    await fitting.fit()


@pytest.mark.parametrize("seed", range(4))
def test_what_is_kept_is_the_sample_to_the_last_bit(seed: int, tmp_path: Path) -> None:
    """So the next start prices as this worker does, and forgets in the same order."""
    sample = StepSample(drawn(seed))
    KeptSteps(tmp_path / "a" / "b", KEY).write(sample.steps)
    found, logs = read(tmp_path / "a" / "b")
    assert found == sample.steps
    assert StepSample(found).fit() == sample.fit()
    assert [log["event"] for log in logs] == ["kept_steps_read"]


def test_the_largest_sample_can_be_read_again(tmp_path: Path) -> None:
    many = [MeasuredStep(StepShape(2**40 + i, 2**40 + i, 2**40 + i), 1 / 3 + i) for i in range(PER_KIND * MAX_KINDS)]
    KeptSteps(tmp_path, KEY).write(many)
    assert file_of(tmp_path).stat().st_size <= MAX_BYTES // 2


async def test_a_second_start_begins_with_what_the_first_one_knew(tmp_path: Path) -> None:
    """Its few steps alone would not say that under load all takes twice as long."""
    first = CostFitting(taken(), KeptSteps(tmp_path, KEY).write)
    await noted(first, SLOW)
    knew = first.estimate.now
    assert knew is not None
    tried = taken()
    again = CostFitting([*KeptSteps(tmp_path, KEY).read(tried), *tried])
    assert again.estimate.now is not None
    alone = CostFitting(tried).estimate.now
    assert alone is not None
    for shape in (StepShape(64, 0, 2080), StepShape(9, 4000, 0), StepShape(300, 0, 150_000)):
        assert again.estimate.now.step_s(*shape) == pytest.approx(knew.step_s(*shape), rel=0.1)
        assert alone.step_s(*shape) < 0.7 * knew.step_s(*shape)


def test_steps_that_are_tried_at_the_start_count_as_the_newest(tmp_path: Path) -> None:
    """A device that has become slower is followed as it is by a worker that runs: kind by kind."""
    KeptSteps(tmp_path, KEY).write(StepSample(taken() * PER_KIND).steps)
    tried = taken(factor=2.0)
    kept = KeptSteps(tmp_path, KEY).read(tried)
    assert kept == StepSample(taken() * PER_KIND).steps
    found = StepSample([*kept, *tried * PER_KIND]).fit()
    assert found is not None
    assert found.token_s == pytest.approx(2 * COST.token_s, rel=1e-6)
    assert StepSample([*kept, *tried]).steps[-1] == tried[-1]


@pytest.mark.parametrize("factor", [1.5 * MOST_APART, 1 / (1.5 * MOST_APART)])
def test_steps_of_other_days_are_left_out_where_those_tried_now_say_otherwise(factor: float, tmp_path: Path) -> None:
    KeptSteps(tmp_path, KEY).write(taken())
    found, (log,) = read(tmp_path, tried=taken(factor=factor))
    assert found == []
    assert "out of date" in log["problem"]
    one_odd = [*taken()[1:], *taken(factor=factor)[:1]]
    assert read(tmp_path, tried=one_odd)[0] == taken(), "one that was held up says nothing"


def test_nothing_is_kept_yet_is_no_news(tmp_path: Path) -> None:
    assert read(tmp_path) == ([], [])
    assert read(tmp_path / "none") == ([], [])


def changed(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda text: json.dumps({**json.loads(text), **changes}).encode()


def with_step(*step: Any) -> Callable[[bytes], bytes]:
    return lambda text: json.dumps({**json.loads(text), "steps": [*json.loads(text)["steps"], step]}).encode()


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "random": lambda text: np.random.default_rng(1).bytes(len(text)),
    "zeros": lambda text: bytes(len(text)),
    "huge": lambda text: text + b" " * MAX_BYTES,
    "no object": lambda _: b"[]",
    "deep": lambda _: b"[" * 20_000,
    "another version": changed(version=2),
    "another worker's": changed(key={**KEY.model_dump(), "threads": "2"}),
    "no key": changed(key=None),
    "more than is known": changed(more=1),
    "no steps": changed(steps=[]),
    "too many steps": changed(steps=[[1, 1, 0, 0.1]] * (MAX_KINDS * PER_KIND + 1)),
    "too few kinds": changed(steps=[[1, 1, 0, 0.1]]),
    "NaN": with_step(1, 1, 0, float("nan")),
    "infinite": with_step(1, 1, 0, float("inf")),
    "no time": with_step(1, 1, 0, 0.0),
    "time that runs back": with_step(1, 1, 0, -1.0),
    "hardly any time": with_step(1, 1, 0, 1e-300),
    "no token": with_step(0, 1, 0, 0.1),
    "less than no KV": with_step(1, -1, 0, 0.1),
    "a number of many digits": with_step(1, 10**400, 0, 0.1),
    "half a token": with_step(1.5, 1, 0, 0.1),
    "words": with_step("one", 1, 0, 0.1),
    "a step too short": with_step(1, 1, 0),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_file_that_is_not_of_use_is_left_out_with_one_line_and_replaced(
    damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    kept = KeptSteps(tmp_path, KEY)
    kept.write(taken())
    path = file_of(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    found, logs = read(tmp_path)
    assert found == []
    assert [(log["event"], log["log_level"]) for log in logs] == [("kept_steps_not_read", "warning")]
    assert str(path) in logs[0]["problem"]
    assert "\n" not in logs[0]["problem"]
    kept.write(taken())
    assert read(tmp_path)[0] == taken()


def test_no_beginning_of_a_file_is_taken_for_it(tmp_path: Path) -> None:
    KeptSteps(tmp_path, KEY).write(taken())
    path, whole = file_of(tmp_path), file_of(tmp_path).read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        assert read(tmp_path)[0] == []


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_holds_nobody_up(make: Callable[[Path], None], tmp_path: Path) -> None:
    KeptSteps(tmp_path, KEY).write(taken())
    path = file_of(tmp_path)
    path.unlink()
    make(path)
    assert read(tmp_path)[0] == []


@pytest.mark.parametrize("name", NAMES)
def test_workers_that_differ_have_files_of_their_own(name: str, tmp_path: Path) -> None:
    other = KEY.model_copy(update={name: "another"})
    KeptSteps(tmp_path, KEY).write(taken())
    assert read(tmp_path, other) == ([], [])
    KeptSteps(tmp_path, other).write(taken(SLOW))
    assert read(tmp_path)[0] == taken()
    assert read(tmp_path, other)[0] == taken(SLOW)


def test_readers_see_whole_files_while_two_workers_write(tmp_path: Path) -> None:
    """The last one wins; nobody sees a half, or steps of both."""
    versions = [StepSample(drawn(seed)).steps for seed in (1, 2)]
    KeptSteps(tmp_path, KEY).write(versions[0])
    is_over = threading.Event()

    def write(steps: list[MeasuredStep]) -> None:
        kept = KeptSteps(tmp_path, KEY)
        while not is_over.is_set():
            kept.write(steps)

    writers = [threading.Thread(target=write, args=(steps,)) for steps in versions]
    for writer in writers:
        writer.start()
    try:
        for _ in range(10):
            assert KeptSteps(tmp_path, KEY).read([]) in versions
    finally:
        is_over.set()
        for writer in writers:
            writer.join()
    assert len(list(tmp_path.iterdir())) == 1, "no draft is left"


def test_a_write_that_fails_leaves_what_there_was_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptSteps(tmp_path, KEY)
    kept.write(taken())

    def fail(*_: object) -> None:
        raise OSError(28, "no room")

    monkeypatch.setattr("services.worker.cost.kept.os.replace", fail)
    with structlog.testing.capture_logs() as logs:
        kept.write(taken(SLOW))
        kept.write(taken(SLOW))
    assert [log["event"] for log in logs] == ["steps_not_kept"]
    assert read(tmp_path)[0] == taken()
    assert len(list(tmp_path.iterdir())) == 1, "no draft is left"


@pytest.mark.parametrize("folder", ["/dev/null/costs", "/proc/costs", "~nobody-of-this-name/costs", "a\0b"])
def test_a_folder_that_cannot_be_written_is_one_warning_and_no_failure(folder: str) -> None:
    kept = KeptSteps(Path(folder), KEY)
    with structlog.testing.capture_logs() as logs:
        kept.read([])
        kept.write(taken())
        kept.write(taken())
    assert [log["event"] for log in logs if log["event"] != "kept_steps_not_read"] == ["steps_not_kept"]


def test_a_step_that_no_file_may_have_is_no_failure(tmp_path: Path) -> None:
    KeptSteps(tmp_path, KEY).write([MeasuredStep(StepShape(1, 1, 0), float("nan"))])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_holds_so_many_files_at_most_and_those_of_others_stay(tmp_path: Path) -> None:
    for name in ("mine.json", "0" * 32, f"{'0' * 32}.json.txt"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    for i in range(3):
        (tmp_path / f"{i:032x}.dead{i}.new").touch()
        os.utime(tmp_path / f"{i:032x}.dead{i}.new", (0, 0))
    keys = [KEY.model_copy(update={"model": str(i)}) for i in range(MAX_FILES + 5)]
    for i, key in enumerate(keys):
        before = set(tmp_path.iterdir())
        KeptSteps(tmp_path, key).write(taken())
        (written,) = set(tmp_path.iterdir()) - before
        os.utime(written, (i + 1, i + 1))
    KeptSteps(tmp_path, keys[-1]).write(taken())
    assert len(list(tmp_path.iterdir())) == MAX_FILES + 3
    assert not list(tmp_path.glob("*.new"))
    assert [bool(read(tmp_path, key)[0]) for key in keys] == [i >= 5 for i in range(MAX_FILES + 5)]


async def test_nothing_is_written_by_the_loop_and_a_disk_that_hangs_holds_up_no_fit() -> None:
    threads, goes_on, steps_told = list[int](), threading.Event(), list[list[MeasuredStep]]()

    def keep(steps: list[MeasuredStep]) -> None:
        threads.append(threading.get_ident())
        steps_told.append(steps)
        goes_on.wait(60)

    fitting = CostFitting(taken(), keep)
    hangs = asyncio.ensure_future(noted(fitting, SLOW))
    while not threads:
        await asyncio.sleep(0.001)
    before = fitting.estimate.now
    await noted(fitting, CostModel(*(3 * value for value in (4e-4, 2.5e-5, 0, 0, 3e-7, 8e-8))), 2 * FIRST_STEPS)
    assert fitting.estimate.now != before
    assert len(threads) == 1, "one at a time"
    hangs.cancel()
    async with asyncio.timeout(5):  # a worker that stops does not wait for the disk
        await asyncio.wait([hangs])
    goes_on.set()
    assert threading.get_ident() not in threads
    assert steps_told[0] != fitting.sample.steps, "what was to be kept is not changed by later fits"
    assert StepSample(steps_told[0]).fit() == before


async def test_nothing_is_kept_of_a_fit_that_says_too_little() -> None:
    told: list[object] = []
    await noted(CostFitting([], told.append), CostModel(0.01, 0, 0, 0, 0, 0))
    assert told == []
