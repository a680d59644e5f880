"""A move between live workers is held in one of its states, and struck there: texts are as ever, and nothing is left.

States that last a step only are met by chance in `test_migration.py`, and all of them by all faults on the virtual
clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from shared.ids import RequestId, WorkerId
from shared.messages.fetch import Fetch, Fetched, FetchOutcome, FetchReason
from shared.transport.bus import BusError
from shared.transport.nats_bus import NatsBus
from shared.wire import decode, encode
from tests.support.fault_checks import StagedCluster, staged
from tests.support.fault_cluster import until
from tests.support.fault_streams import Ask, long_prompts, reading, seen
from tests.support.group_changes import HALF_BYTES, be_whole, change, change_until_done, reports_of, shape, struck
from tests.support.seeds import first_of
from tests.support.stage_tap import StageTap
from tests.support.waiting import rounds

pytestmark = pytest.mark.timeout(180)

ANSWER_S = 10.0
"""More than a lost connection takes to be noticed."""
STATES = {"asked": 0, "copying": HALF_BYTES}
"""After how many bytes in one direction a move is held."""
ENDS: dict[str, set[FetchOutcome | None]] = {
    "source killed": {FetchOutcome.LOST},
    "target killed": {None},
    "cancel": {FetchOutcome.GONE},
    "drop": {FetchOutcome.REFUSED, FetchOutcome.LOST},
}
"""What may be answered when it is over; None: nobody answers. In a drop the source may be the first to end it."""


@pytest.fixture(scope="module")
def cluster(tap: StageTap, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagedCluster]:
    """Two workers, shared by the tests of this module; each leaves them whole."""
    with staged(tmp_path_factory.mktemp("cluster"), tap.before(shape(2)), load()) as cluster:
        yield cluster


def load() -> list[Ask]:
    """Return requests of which nothing is in a cache, and whose answers last."""
    return [replace(each, body={**each.body, "max_tokens": 400}) for each in long_prompts(6, num_repeats=10)]


async def question(cluster: StagedCluster, bus: NatsBus) -> tuple[Fetch, WorkerId] | None:
    """Return what has the worker that has less fetch a request that decodes at the other one; None: none does."""
    reports = await reports_of(cluster)
    source, target = sorted(reports.values(), key=lambda report: -report.num_running)
    sequences = (await cluster.dump(bus, source.worker_id))["sequences"]
    for one in sequences:
        if one["num_output_tokens"] > 0:
            asked = Fetch(
                request_id=RequestId(one["request_id"]),
                attempt=one["attempt"],
                source=source.worker_id,
                source_address=source.stage_address,
                reason=FetchReason.BALANCE,
            )
            return asked, target.worker_id
    return None


async def has_ended(cluster: StagedCluster, bus: NatsBus, asked: Fetch) -> bool:
    """Return whether its worker runs the request no more."""
    sequences = (await cluster.dump(bus, asked.source))["sequences"]
    return all(one["request_id"] != asked.request_id for one in sequences)


async def fetch(cluster: StagedCluster, bus: NatsBus, asked: Fetch, target: WorkerId) -> FetchOutcome | None:
    """Return what came of it; None: nobody answered."""
    try:
        data = await bus.request(cluster.subjects.fetch(target), encode(asked), timeout_s=ANSWER_S)
    except BusError:
        return None
    return decode(data, Fetched).outcome


async def strike(fault: str, cluster: StagedCluster, bus: NatsBus, asked: Fetch, target: WorkerId) -> None:
    """Do to a move what a test is about, but for what its reader does."""
    if fault == "source killed":
        cluster.kill(asked.source)
    elif fault == "target killed":
        cluster.kill(target)
    elif fault == "drop":
        await change(cluster, bus, "drop")


@pytest.mark.parametrize("state", first_of(["copying", "asked"], in_ci=1))
@pytest.mark.parametrize("fault", ENDS)
async def test_a_move_that_is_struck_changes_no_text(
    cluster: StagedCluster, tap: StageTap, fault: str, state: str
) -> None:
    for _ in rounds("a move was struck"):
        asked = load()
        leaves = fault == "cancel"
        async with (
            cluster.bus() as bus,
            cluster.unchanged(load=[] if leaves else asked) as stayers,
            reading(cluster, asked if leaves else []) as leavers,
        ):
            await seen([*stayers, *leavers], 2)
            found = await question(cluster, bus)
            if found is None:
                continue
            met = tap.hold(STATES[state])
            moving = asyncio.ensure_future(fetch(cluster, bus, *found))
            is_struck = await struck(met, moving)
            if is_struck:
                await strike(fault, cluster, bus, *found)
                for reader in leavers:
                    reader.task.cancel()
                if leavers:
                    await until(partial(has_ended, cluster, bus, found[0]), "the source has heard of it", 5.0)
            tap.go_on()
            outcome = await moving
            await be_whole(cluster, bus)
        if is_struck:
            assert outcome in ENDS[fault]
            break


@pytest.mark.parametrize("act", ["cut", "flip"])
async def test_kv_that_is_cut_or_spoiled_is_not_taken(cluster: StagedCluster, tap: StageTap, act: str) -> None:
    for _ in rounds("KV was struck"):
        async with cluster.bus() as bus, cluster.unchanged(2, load()):
            found = await question(cluster, bus)
            if found is None:
                continue
            met = getattr(tap, act)(HALF_BYTES)
            outcome = await fetch(cluster, bus, *found)
            tap.go_on()
        if met.is_set():
            assert outcome is FetchOutcome.LOST
            break


async def test_a_target_that_is_full_refuses_and_the_request_goes_on_where_it_is(cluster: StagedCluster) -> None:
    """Others' prompts fill both workers, and more of them wait for memory."""
    for _ in rounds("a target was full"):
        async with (
            cluster.bus() as bus,
            cluster.unchanged(2, load()) as readers,
            reading(cluster, long_prompts(60)),
        ):
            outcomes: list[FetchOutcome | None] = []
            while FetchOutcome.FULL not in outcomes and not all(reader.task.done() for reader in readers):
                found = await question(cluster, bus)
                if found is not None:
                    outcomes.append(await fetch(cluster, bus, *found))
                await asyncio.sleep(0.02)
        if FetchOutcome.FULL in outcomes:
            break


async def test_nobody_moves_in_a_group_nor_while_its_layers_come_back(cluster: StagedCluster) -> None:
    for _ in rounds("somebody was asked for before, and moved afterwards"):
        outcomes: list[FetchOutcome | None] = []
        async with cluster.bus() as bus, cluster.unchanged(2, load()):
            await change_until_done(cluster, bus, "drop")
            found = await question(cluster, bus)
            in_group = None if found is None else await fetch(cluster, bus, *found)
            restoring = asyncio.ensure_future(change_until_done(cluster, bus, "restore"))
            while found is not None and not restoring.done():
                outcomes.append(await fetch(cluster, bus, *found))
            await restoring
            again = await question(cluster, bus)
            moved = None if again is None else await fetch(cluster, bus, *again)
            await be_whole(cluster, bus)
        if in_group is not None and outcomes and moved is FetchOutcome.MOVED:
            assert in_group in {FetchOutcome.REFUSED, FetchOutcome.GONE}
            assert outcomes[0] in {FetchOutcome.REFUSED, FetchOutcome.GONE}
            if FetchOutcome.REFUSED in {in_group, outcomes[0]}:
                break
