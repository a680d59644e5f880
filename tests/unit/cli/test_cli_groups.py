"""`sluice drop` and `sluice restore`: whom they ask, and what they say; the services run in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from cli.exit_codes import FAILED, UNREACHABLE, CommandError
from cli.groups.command import ask_planner, describe
from shared.subjects import Subjects
from shared.transport.bus import Endpoint, Message, ServiceInfo
from tests.support.plan_cluster import clustered
from tests.support.plan_workers import SUBJECTS, PlanCluster


@clustered()
async def test_a_drop_and_a_restore_are_told_in_one_line(cluster: PlanCluster) -> None:
    cluster.start_planner()
    await asyncio.sleep(1.5)
    dropped = await ask_planner(cluster.bus, SUBJECTS, "drop", {"workers": ["w1", "w2"]}, 10)
    assert cluster.groups() == [("w1", "w2")]
    assert describe(dropped).startswith("w1+w2 in 0.0")
    await asyncio.sleep(1)
    restored = await ask_planner(cluster.bus, SUBJECTS, "restore", {"groups": ["w1"]}, 10)
    assert describe(restored).startswith("w1, w2 in 0.0")
    assert f"(plan {restored['plan_id']}): plan {restored['plan_id']}: carried out by 2 of 2" in describe(restored)


@clustered()
async def test_of_several_planners_the_one_in_charge_is_asked(cluster: PlanCluster) -> None:
    cluster.start_planner("a-was-first")
    await asyncio.sleep(1)
    cluster.start_planner("b-took-over")
    await asyncio.sleep(2)
    assert (await ask_planner(cluster.bus, SUBJECTS, "drop", {}, 10))["done"]


@pytest.mark.parametrize(
    ("verb", "question", "code", "line"),
    [
        ("restore", {}, FAILED, "sluice: no restore: no group has dropped anything"),
        ("drop", {"workers": ["w0", "x"]}, FAILED, "sluice: no drop: 'x' is no worker that is ready and can drop"),
    ],
)
@clustered()
async def test_what_is_not_done_is_one_line_with_the_reason(
    cluster: PlanCluster, verb: str, question: dict[str, list[str]], code: int, line: str
) -> None:
    cluster.start_planner()
    await asyncio.sleep(1.5)
    with pytest.raises(CommandError) as raised:
        await ask_planner(cluster.bus, SUBJECTS, verb, question, 10)
    assert str(raised.value).startswith(line)
    assert raised.value.code == code


@clustered()
async def test_a_cluster_without_a_planner_or_with_another_name_is_said(cluster: PlanCluster) -> None:
    with pytest.raises(CommandError, match="no planner answers in cluster 'default'") as nobody:
        await ask_planner(cluster.bus, SUBJECTS, "drop", {}, 10)
    cluster.start_planner()
    await asyncio.sleep(1.5)
    with pytest.raises(CommandError, match="no planner answers in cluster 'other'") as other:
        await ask_planner(cluster.bus, Subjects("other"), "drop", {}, 10)
    assert nobody.value.code == other.value.code == UNREACHABLE


@clustered()
async def test_a_limit_that_is_too_short_does_not_stop_the_planner(cluster: PlanCluster) -> None:
    for worker in cluster.workers.values():
        worker.change_s = 1.0
    cluster.start_planner()
    await asyncio.sleep(1.5)
    with pytest.raises(CommandError, match=r"the drop was not over within 0\.5 s\. The planner goes on with it"):
        await ask_planner(cluster.bus, SUBJECTS, "drop", {}, 0.5)
    await asyncio.sleep(2)
    assert len(cluster.groups()) == 1


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"done": true}', b"\xff"])
@clustered()
async def test_an_answer_of_another_kind_is_one_line(cluster: PlanCluster, data: bytes) -> None:
    async def plan(message: Message) -> bytes:
        del message
        return b'{"superseded": false}'

    async def drop(message: Message) -> bytes:
        del message
        return data

    info = ServiceInfo("sluice-planner", "1.0.0", "an odd one", {"cluster": "default"}, "odd")
    verbs = [("plan", plan), ("drop", drop)]
    await cluster.bus.serve(
        info, [Endpoint(verb, SUBJECTS.admin("planner", "odd", verb), answer) for verb, answer in verbs]
    )
    with pytest.raises(CommandError, match="planner 'odd' answers in an unknown way"):
        await ask_planner(cluster.bus, SUBJECTS, "drop", {}, 10)
