"""Changes of groups of live workers, by a planner that is asked by hand; and looks at what they do to requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from shared.messages.plan import PLAN_KEY, Plan, PlanPhase
from shared.messages.report import WorkerReport
from shared.transport.bus import BusError, Message
from shared.transport.nats_bus import NatsBus
from shared.wire import decode_json
from tests.support.fault_cluster import Cluster, Shape, until
from tests.support.fault_streams import Ask, Reader, long_prompts, seen
from tests.support.stage_tap import StageTap

HALF_BYTES: Final = 96 * 1024
"""After which KV is struck: beyond all messages, and before the end of what goes along."""
ENV: Final = {
    "SLUICE_WORKER_PAGE_BYTES": "16384",
    "SLUICE_WORKER_MAX_BATCH_TOKENS": "48",
    "SLUICE_WORKER_MAX_BATCH_ROWS": "32",
    "SLUICE_PLANNER_COOLDOWN_S": "0.1",
    "SLUICE_PLANNER_DROP_WAIT_S": "0",
    "SLUICE_PLANNER_RESTORE_RATIO": "0",
}
"""Dropped and restored by hand only: a drop that the planner thinks of itself is never worth its price."""
SYSTEM: Final = ("--system", "kunserve")
BY_ITSELF: Final = {
    **ENV,
    "SLUICE_PLANNER_RESTORE_RATIO": "0.95",
    "SLUICE_PLANNER_RESTORE_HOLD_S": "0.1",
    "SLUICE_PLANNER_COOLDOWN_S": "3600",
    "SLUICE_WORKER_OVERLAP": "true",
}
"""Dropped by hand only, and restored by the planner as soon as it can be; steps overlap in between."""
ANSWER_S: Final = 30.0
NOT_NOW: Final = ("no fresh view of the cluster", "a plan is being carried out")
"""Words of a planner that has not judged: somebody was late."""
BEGIN_S: Final = 1.5
"""In which KV is on its way after a drop is done, if any is."""
VIEW_S: Final = 1.5
"""In which a change of roles shows in the view: some of the monitor's periods."""


def flags_of(system: str) -> dict[str, tuple[str, ...]]:
    """Return the flags of every service of a cluster of small workers, whose system drops."""
    flags = ("--system", system)
    return {"worker": (*flags, "--memory", "22MiB"), "planner": flags, "dispatcher": flags}


FLAGS: Final = flags_of("kunserve")


def group_env(**settings: float) -> dict[str, str]:
    """Return the environment with other settings of the workers."""
    return {**ENV, **{f"SLUICE_WORKER_{name.upper()}": str(value) for name, value in settings.items()}}


def shape(num_workers: int, system: str = "kunserve", **settings: float) -> Shape:
    """Return a cluster of workers that drop, with other settings of theirs."""
    return Shape(num_workers=num_workers, env=group_env(**settings), flags=flags_of(system))


async def change(
    cluster: Cluster, bus: NatsBus, verb: str, names: Sequence[str] = (), planner: str = "planner"
) -> dict[str, Any]:
    """Have the planner drop or restore; return its answer, but for one that says it could not judge just now."""
    key = "workers" if verb == "drop" else "groups"
    question = json.dumps({key: list(names)}).encode() if names else b""
    subject = cluster.subjects.admin("planner", planner, verb)
    answer: dict[str, Any] = {}

    async def is_judged() -> bool:
        answer.update(json.loads(await bus.request(subject, question, timeout_s=ANSWER_S)))
        return answer["done"] or not any(words in answer["reason"] for words in NOT_NOW)

    await until(is_judged, f"the planner can {verb}", 20.0)
    return answer


async def change_until_done(
    cluster: Cluster, bus: NatsBus, verb: str, names: Sequence[str] = (), planner: str = "planner"
) -> dict[str, Any]:
    """As `change`; the planner may have to see the end of something first."""
    answer: dict[str, Any] = {}

    async def is_done() -> bool:
        answer.update(await change(cluster, bus, verb, names, planner))
        return bool(answer["done"])

    try:
        await until(is_done, "the planner has done it", 20.0)
    except AssertionError:
        raise AssertionError(f"{verb} {list(names)}: {answer}") from None
    return answer


async def struck(met: threading.Event, asking: asyncio.Future[Any]) -> bool:
    """Return whether KV was struck, once that is known: it may be nobody's any more when the change is made."""
    await until(lambda: met.is_set() or asking.done(), "KV is on its way", 20.0)
    if not met.is_set() and not asking.exception():  # what a drop moves may be on its way when it is done
        with contextlib.suppress(AssertionError):
            await until(met.is_set, "KV is on its way", BEGIN_S)
    return met.is_set()


async def reports_of(cluster: Cluster) -> dict[str, WorkerReport]:
    """Return the newest report of each worker in the view."""
    _, view = await cluster.get("/v1/cluster")
    reports = [WorkerReport.model_validate(worker["report"]) for worker in view["workers"]]
    return {report.worker_id: report for report in reports}


async def until_whole(cluster: Cluster, name: str) -> WorkerReport:
    """Return what a worker reports when it is a whole instance again."""
    reports: dict[str, WorkerReport] = {}

    async def is_whole() -> bool:
        reports.update(await reports_of(cluster))
        return reports[name].num_stages == 1 and reports[name].layers == (0, reports[name].num_layers)

    await until(is_whole, f"{name} is whole again", 20.0)
    return reports[name]


async def be_whole(cluster: Cluster, bus: NatsBus) -> None:
    """Restore what there is to restore; that there is nothing counts when views have had time to show it."""
    calm: list[float] = []

    async def is_whole() -> bool:
        answer = await change(cluster, bus, "restore")
        if "no group has dropped anything" not in answer["reason"]:
            calm.clear()
            return False
        calm.append(asyncio.get_running_loop().time())
        return calm[-1] - calm[0] > VIEW_S

    await until(is_whole, "all are whole", 20.0)


async def num_asked(cluster: Cluster, bus: NatsBus, endpoint: str) -> int:
    """Return how often the workers were asked something."""
    count = 0
    for name in cluster.workers:
        stats = await cluster.stats(bus, name)
        count += next(end["num_requests"] for end in stats["endpoints"] if end["name"] == endpoint)
    return count


async def held_requests(cluster: Cluster, bus: NatsBus) -> dict[str, list[dict[str, Any]]]:
    """Return the sequences that the workers hold."""
    return {name: (await cluster.dump(bus, name))["sequences"] for name in cluster.workers}


def leaving() -> list[Ask]:
    """Return requests whose readers will leave: their KV is much of what travels."""
    return [replace(each, body={**each.body, "max_tokens": 800}) for each in long_prompts(2, num_repeats=10)]


async def plan_now(cluster: Cluster, bus: NatsBus) -> Plan:
    """Return what the plan key holds."""
    entry = await (await bus.key_value(cluster.subjects.plan_bucket())).get(PLAN_KEY)
    assert entry is not None
    assert entry.value is not None
    return decode_json(entry.value, Plan)


async def service_answers(cluster: Cluster, bus: NatsBus, name: str = "planner") -> None:
    """Return when a service that was started anew, or stood still, can be asked."""

    async def is_up() -> bool:
        try:
            await cluster.stats(bus, name)
        except BusError:
            return False
        return True

    await until(is_up, f"{name} answers", 20.0)


async def kill_planner_amid_drop(cluster: Cluster, bus: NatsBus, phase: PlanPhase) -> Plan:
    """Have the planner drop, kill it in this phase of the plan, and return what it has left of the plan.

    It cannot leave PREPARING, since one of the workers stands still until it is dead. It can leave COMMITTING.
    """
    is_committed = asyncio.Event()

    def hear(message: Message) -> None:
        if json.loads(message.data)["name"] == "plan_committed":
            is_committed.set()

    num_before, frozen = await _num_plan_answers(cluster, bus), cluster.workers[1]
    listening = await bus.subscribe(cluster.subjects.event("planner", "planner"), hear)
    if phase is PlanPhase.PREPARING:
        cluster.freeze(frozen)
    asking = asyncio.ensure_future(change(cluster, bus, "drop"))
    try:
        if phase is PlanPhase.PREPARING:
            await until(lambda: _has_answered(cluster, bus, num_before), "a worker is prepared")
        else:
            await asyncio.wait_for(is_committed.wait(), ANSWER_S)
        cluster.kill("planner")
    finally:
        if phase is PlanPhase.PREPARING:
            cluster.thaw(frozen)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await listening.close()
    return await plan_now(cluster, bus)


async def _has_answered(cluster: Cluster, bus: NatsBus, num_before: int) -> bool:
    return await _num_plan_answers(cluster, bus) > num_before


async def _num_plan_answers(cluster: Cluster, bus: NatsBus) -> int:
    """Return how often the first worker has answered a planner."""
    stats = await cluster.stats(bus, cluster.workers[0])
    (end,) = [end for end in stats["endpoints"] if end["name"] == "plan"]
    return int(end["num_requests"] - end["data"]["running"] - end["data"]["waiting"])


async def change_while_readers_leave(
    cluster: Cluster, bus: NatsBus, verb: str, tap: StageTap, leavers: Sequence[Reader]
) -> bool:
    """Have a change done; while its KV is on its way, some readers leave. A drop is done before its KV has come.

    Returns:
        Whether there were any: answers may be over before KV is on its way.

    Raises:
        AssertionError: the workers did not hear of it in time, or keep what nobody reads any more.
    """
    await exchange_over(cluster)
    await seen(leavers, 1)
    num_cancels, met = await num_asked(cluster, bus, "cancel"), tap.hold(HALF_BYTES)
    num_arrived = len(cluster.told("kv_arrived"))
    asking = asyncio.ensure_future(change_until_done(cluster, bus, verb))
    is_struck = await struck(met, asking)
    if is_struck and verb == "drop":
        await asking
        await until(lambda: _is_expected(cluster), "the leader waits for KV", 20.0)
    num_before = await _settled_requests(cluster, bus)
    left = [leaver for leaver in leavers if not leaver.task.done()]
    for leaver in left:
        leaver.task.cancel()
    if not (is_struck and left):
        tap.go_on()
        await asking
        return False

    async def is_cancelled() -> bool:
        is_heard = await num_asked(cluster, bus, "cancel") >= num_cancels + len(left)
        return is_heard and sum(map(len, (await held_requests(cluster, bus)).values())) <= num_before - len(left)

    await until(is_cancelled, "the workers have given up what nobody reads")
    assert verb == "drop" or not asking.done(), "KV is still on its way"
    assert len(cluster.told("kv_arrived")) == num_arrived, "KV is still on its way"
    tap.go_on()
    await asking
    if verb == "drop":
        await until(lambda: len(cluster.told("kv_arrived")) > num_arrived, "the rest of the KV has come", 20.0)
        assert cluster.told("kv_arrived")[-1]["num_lost"] == 0
    return True


async def exchange_over(cluster: Cluster) -> None:
    """Return when KV of the last drop is on its way no more: a group to which some comes says so once, if it lives."""

    def num_left() -> int:
        formed = [event for event in cluster.told("role_changed") if event["group"] and event["stage"] == 0]
        return len(formed) - len(cluster.told("kv_arrived")) - len(cluster.told("kv_given_up"))

    with contextlib.suppress(AssertionError):
        await until(lambda: num_left() <= 0, "the KV of the last drop has come", 5.0)


async def _is_expected(cluster: Cluster) -> bool:
    return any(report.num_coming_blocks for report in (await reports_of(cluster)).values())


async def _settled_requests(cluster: Cluster, bus: NatsBus) -> int:
    """Return how many sequences workers hold, once those that were released have been brought to the leader."""
    counts: list[int] = []

    async def is_settled() -> bool:
        counts.append(sum(map(len, (await held_requests(cluster, bus)).values())))
        return len(counts) > 4 and len(set(counts[-4:])) == 1

    with contextlib.suppress(AssertionError):  # some end all the time: then it only becomes less
        await until(is_settled, "the number of requests stands still", 3.0)
    return counts[-1]
