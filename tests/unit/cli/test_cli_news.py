"""What is said of a cluster that runs and of one that ends: lost workers, short memory, answers that are waited for."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cli.cluster.drain_count import DrainCount, describe_left
from cli.cluster.dump import DISPATCHER_ID, DispatcherDump, Losses, ask_dispatcher, read_dump
from cli.cluster.news import REPEAT_S, ClusterNews, WorkerReturn, describe_plan
from cli.console import Console
from shared.ids import WorkerId
from shared.messages.event import Event
from shared.messages.plan import FormGroup, LoadBeside, Plan, PlannedStage, PlannedWorker, RestoreInstance, Step
from shared.subjects import Subjects
from shared.transport.bus import Bus, Endpoint, Message, ServiceInfo
from shared.transport.memory_bus import MemoryBroker
from tests.support.terminals import Terminal


def event(name: str, about: str = "w", reason: str = "why") -> Event:
    return Event(name=name, service="monitor", instance_id="monitor", about=about, reason=reason)


def told(*names: str, news: ClusterNews | None = None) -> list[str | WorkerReturn | None]:
    """What is said of events that come a second apart, from 1 on."""
    news = news or ClusterNews()
    return [news.take(event(name), float(at_s)) for at_s, name in enumerate(names, start=1)]


def test_a_worker_whose_process_ended_is_not_said_to_be_silent_and_is_ready_again_once() -> None:
    """It ended at 0 and is ready at 4; what the supervisor says is not said again."""
    news = ClusterNews()
    news.ended("w", 0.0)
    said = told("worker_suspect", "worker_restarted", "worker_loading", "worker_ready", "worker_ready", news=news)
    assert said == [None, None, None, WorkerReturn("w", 4.0), None]


def test_a_silent_worker_is_slow_then_lost_then_ready_again() -> None:
    slow, lost, again, none = told("worker_suspect", "worker_dead", "worker_recovered", "worker_recovered")
    assert (slow, lost, again, none) == ("w is slow: why", "w is lost: why", WorkerReturn("w", 2.0), None)


def test_a_worker_that_was_only_slow_reports_again() -> None:
    assert told("worker_suspect", "worker_recovered") == ["w is slow: why", "w reports again: why"]


def test_a_worker_that_drains_says_so_and_comes_back() -> None:
    said = told("worker_draining", "worker_gone", "worker_loading", "worker_ready")
    assert said == ["w drains: why", None, None, WorkerReturn("w", 3.0)]


def test_of_all_others_only_memory_and_instances_are_told() -> None:
    assert told("worker_ready", "plan_preparing", "plan_none", "request_moved", "kv_exchange_begun") == [None] * 5
    assert told("plan_failed", "instances_wanted") == [
        "layers did not move as planned: why",
        "more workers are wanted: why",
    ]


def test_of_plans_groups_that_form_and_workers_that_are_whole_again_are_told() -> None:
    stages = tuple(PlannedStage(worker_id=WorkerId(name), held=(0, 4), layers=(0, 2)) for name in ("w0", "w1"))
    form = FormGroup(stages=stages)
    restored = tuple(RestoreInstance(worker=PlannedWorker(worker_id=each.worker_id, held=(0, 2))) for each in stages)
    load = LoadBeside(stages=stages, num_blocks=4)
    dropped, back = "layers are dropped for KV: w0+w1 serve together", "layers are back: whole again are w0, w1"
    cases: list[tuple[tuple[Step, ...], str | None]] = [
        ((form,), dropped),
        (restored, back),
        ((*restored, form), f"{dropped}; {back}"),
        ((load,), None),
    ]
    for steps, said in cases:
        assert describe_plan(Plan(epoch=1, steps=steps)) == said


def test_want_of_memory_is_said_once_in_a_while_of_each_worker() -> None:
    news, short = ClusterNews(), event("worker_throttled")
    said = [news.take(short, at_s) for at_s in (0.0, 1.0, REPEAT_S - 1, REPEAT_S)]
    assert said == ["memory is short at w: why", None, None, "memory is short at w: why"]
    assert news.take(event("worker_throttled", "v"), 1.0) == "memory is short at v: why"


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        (None, ""),
        (Losses(), "; it had no answer under way"),
        (Losses(4, 4), "; 4 answers went on, none was lost"),
        (Losses(3, 1, 2), "; 1 answer went on, 2 were lost"),
        (Losses(3, 1, 1, 1), "; 1 answer went on, 1 was lost, 1 still waits for a worker"),
        (Losses(2, 0, 0, 2), "; 0 answers went on, none was lost, 2 still wait for a worker"),
    ],
)
def test_a_worker_that_is_back_is_told_of_with_what_became_of_its_answers(losses: Losses | None, said: str) -> None:
    assert WorkerReturn("worker-1", 3.24).describe(losses) == f"worker-1 is ready again after 3.2 s{said}"


def test_what_a_worker_lost_since_a_look_begins_anew_with_the_dispatcher() -> None:
    before = Losses(4, 3, 1, 0)
    assert Losses(9, 6, 1, 2).since(before) == Losses(5, 3, 0, 2)
    assert Losses(2, 2).since(before) == Losses(2, 2)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"num_requests": 1}', b'{"num_requests": 1, "workers": {"w": {"x": 1}}}']
)
def test_a_dump_of_another_kind_is_none(data: bytes) -> None:
    assert read_dump(data) is None


@asynccontextmanager
async def dumping(counts: list[int]) -> AsyncIterator[Bus]:
    """A bus on which the dispatcher has each of these numbers of answers for a look, and the last one from then on."""
    bus = MemoryBroker().connect("test")

    async def dump(_message: Message) -> bytes:
        return json.dumps({"num_requests": counts.pop(0) if len(counts) > 1 else counts[0], "workers": {}}).encode()

    subject = Subjects("default").admin("dispatcher", DISPATCHER_ID, "dump")
    info = ServiceInfo(
        name="sluice-dispatcher",
        version="0.1.0",
        description="Says what it has",
        metadata={},
        instance_id=DISPATCHER_ID,
    )
    await bus.serve(info, [Endpoint("dump", subject, dump)])
    try:
        yield bus
    finally:
        await bus.close()


async def follow(counts: list[int], stream: io.StringIO, for_s: float) -> DrainCount:
    """Follow a drain of 30 s for a while."""
    async with dumping(counts) as bus:
        count = DrainCount(Console(stream, {}), 30.0, "again ends it")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(for_s):
                await count.follow(bus, "default")
    return count


@pytest.mark.virtual_time
async def test_without_a_terminal_a_line_is_written_when_the_number_changes_but_not_many_a_second() -> None:
    """Looks are 0.2 s apart: 5 at 0 s, then 4, 3, 3, 3, and at the first look that is a second after the line, 2."""
    stream = io.StringIO()
    count = await follow([5, 4, 3, 3, 3, 2, 2], stream, 4.0)
    assert stream.getvalue().splitlines() == [
        "stopping: waiting for 5 answers, at most 30 s; again ends it",
        "stopping: waiting for 2 answers, at most 29 s; again ends it",
    ]
    assert count.num_left == 2
    assert 25.5 < count.left_s < 26.5


@pytest.mark.virtual_time
async def test_on_a_terminal_the_line_is_written_over() -> None:
    stream = Terminal()
    await follow([2, 1, 0], stream, 1.0)
    assert "\n" not in stream.getvalue()
    lines = stream.getvalue().split("\r\x1b[K")
    assert [line.partition(";")[0] for line in lines if line][:3] == [
        "stopping: waiting for 2 answers, at most 30 s",
        "stopping: waiting for 1 answer, at most 30 s",
        "stopping: no answer is under way",
    ]


@pytest.mark.virtual_time
async def test_a_dispatcher_that_does_not_answer_is_no_count() -> None:
    async with dumping([3]) as bus:
        assert await ask_dispatcher(bus, "default") == DispatcherDump(3, {})
        assert await ask_dispatcher(bus, "other") is None
    assert describe_left(None, 7.0, "x") == "stopping: waiting for running answers, at most 7 s; x"
