"""After a fault: is anything left? Slots, leases, tasks, files, queue entries, KV blocks, endpoints that run."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from pprint import pformat
from typing import Any, Final

from shared.transport.bus import BusError
from shared.transport.nats_bus import NatsBus
from tests.support.fault_cluster import Cluster, Shape, run_apart, running, until
from tests.support.fault_streams import (
    Ask,
    Reader,
    all_read,
    answers,
    joined,
    long_prompts,
    mixed_load,
    reading,
    seen,
    undisturbed,
)
from tests.support.mapped_pages import MEMORY_NAME

CALM_LIMIT_S: Final = 20.0
"""Longest time until all is as before: renewals, cancellations and reports have to come by."""
WAVE_S: Final = 0.5
"""In which the prompts of a wave are computed."""
MAX_WAVES: Final = 30
MAX_LINES: Final = 40
"""Of what is shown of two answers that differ."""
_HELD_BY_DISPATCHER: Final = ("num_requests", "num_queued", "num_drops")
_HELD_BY_WORKER: Final = ("num_used_blocks", "num_running", "num_waiting", "num_preempted")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What an idle cluster holds, by instance id."""

    num_files: Mapping[str, int]
    num_tasks: Mapping[str, int]


def num_files(pid: int) -> int:
    """Return how many file descriptors the process holds, but for memory: pages of others may be its own by now."""
    count = 0
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed just now
            count += MEMORY_NAME not in os.readlink(each)  # noqa: PTH115  it may be no path
    return count


async def footprint(cluster: Cluster) -> Footprint:
    """Return what the services hold now, which should be idle."""
    names = [name for name in cluster.services if cluster.is_running(name)]
    async with cluster.bus() as bus:
        dumps = {name: await cluster.dump(bus, name) for name in names if _has_dump(name)}
    return Footprint(
        num_files={name: num_files(cluster.pid(name)) for name in names},
        num_tasks={name: dump["num_tasks"] for name, dump in dumps.items()},
    )


async def _left(cluster: Cluster, before: Footprint) -> list[str]:
    names = [name for name in cluster.services if cluster.is_running(name)]
    left = [
        f"{name}: {count} files, {before.num_files[name]} before"
        for name in names
        if (count := num_files(cluster.pid(name))) > before.num_files[name]
    ]
    async with cluster.bus() as bus:
        for name in names:
            try:
                left += await _left_in(cluster, bus, name, before)
            except BusError as error:
                left.append(f"{name}: {error}")
    return left + await _left_in_views(cluster)


async def _left_in(cluster: Cluster, bus: NatsBus, name: str, before: Footprint) -> list[str]:
    left: list[str] = []
    if _has_dump(name):
        dump = await cluster.dump(bus, name)
        left += [f"{name}: {key} = {dump[key]}" for key in _HELD_BY_DISPATCHER if dump.get(key)]
        left += [f"{name}: {sequence}" for sequence in dump.get("sequences", [])]
        left += [f"{name}: {lease}" for lease in dump.get("leases", []) if lease["sequences"] or lease["paused"]]
        if dump["num_tasks"] > before.num_tasks[name]:
            left.append(f"{name}: {dump['num_tasks']} tasks, {before.num_tasks[name]} before")
    stats = await cluster.stats(bus, name)
    busy = {end["name"]: end["data"] for end in stats["endpoints"] if end["data"]["running"] or end["data"]["waiting"]}
    return [*left, *([f"{name}: endpoints {busy}"] if busy else [])]


async def _left_in_views(cluster: Cluster) -> list[str]:
    """Return what the dispatchers still show: streams, and workers that hold something."""
    left: list[str] = []
    for name in cluster.dispatchers:
        if not cluster.is_running(name):
            continue
        status, view = await cluster.get("/v1/cluster", name)
        if status != 200:
            left.append(f"{name}: no view")
            continue
        left += [f"{name}: {key}" for key in ("num_requests", "num_queued", "num_streams") if view["dispatcher"][key]]
        left += [_held(worker) for worker in view["workers"] if _is_running(cluster, worker) and _held(worker)]
    return left


def _is_running(cluster: Cluster, worker: dict[str, Any]) -> bool:
    pids = [cluster.pid(name) for name in cluster.workers if cluster.is_running(name)]
    return worker["report"]["pid"] in pids


def _held(worker: dict[str, Any]) -> str:
    report = worker["report"]
    held = {key: report[key] for key in _HELD_BY_WORKER if report[key]}
    return f"{report['worker_id']} reports {held}" if held else ""


def _has_dump(name: str) -> bool:
    return name.startswith(("worker", "dispatcher"))


def assert_no_errors(cluster: Cluster) -> None:
    """Check that no service has logged an error, or that one ended by an exception."""
    for name in cluster.services:
        errors = [event for event in cluster.events(name) if event.get("level") in ("error", "critical")]
        assert not errors, f"{name} logged {errors}"


def assert_same(name: str, found: Mapping[str, Any], expected: Mapping[str, Any], broken_by: str = "") -> None:
    """Check that an answer is that of a run without a fault.

    Raises:
        AssertionError: it is not; the message says in what.
    """
    told = f"; the connection ended by {broken_by}" if broken_by else ""
    finish = f"it ended {_end_of(found)}, without a fault {_end_of(expected)}{told}"
    lines = difflib.unified_diff(pformat(expected).splitlines(), pformat(found).splitlines(), n=0, lineterm="")
    shown = "\n".join(islice(lines, MAX_LINES))
    assert found == expected, f"the answer to {name!r} is another: {finish}\n{shown}"


def _end_of(answer: Mapping[str, Any]) -> str:
    return f"{'whole' if answer['is_whole'] else 'early'} with {dict(answer['finish'])}"


class StagedCluster(Cluster):
    """A cluster, and what it answers and holds without faults. Made by `staged`.

    Attributes:
        expected: by name of the request.
        before: what it holds when it is idle.
        load: what is asked while something happens to it.
    """

    expected: dict[str, dict[str, Any]]
    before: Footprint
    load: Sequence[Ask]

    async def settle(self, load: Sequence[Ask], *more: Ask) -> None:
        """Note what is answered to these requests, and what is held then."""
        self.load, self.expected = load, await undisturbed(self, [*load, *more])
        guided = [asked for asked in load if "structured_outputs" in asked.body][:1]
        for name in self.dispatchers[1:]:  # the first form starts a process that tries it
            async with reading(self, guided, dispatcher=name) as readers:
                await answers(readers)
        await asyncio.sleep(1.0)  # what a first request leaves open in a process, such as its threads, is there now
        self.before = await footprint(self)

    @asynccontextmanager
    async def unchanged(self, num_seen: int = 0, load: Sequence[Ask] | None = None) -> AsyncIterator[list[Reader]]:
        """Send the load; after the body (a fault) wait for the answers, which must be those of a run without it.

        Then every fault is undone, and nothing may be left.

        Args:
            num_seen: events that every lasting reader has got before the body.
            load: another one.
        """
        load = self.load if load is None else load
        async with reading(self, load) as readers:
            try:
                await seen(readers, num_seen)
                yield readers
                found = await answers(readers)
            finally:
                broken = {r.asked.name: r.told.broken_by for r in readers if r.told.broken_by}
                await self.restore()
            for asked in load:
                assert_same(asked.name, found[asked.name], self.expected[asked.name], broken.get(asked.name, ""))
            for reader in readers:
                for told in reader.earlier:
                    assert_same(reader.asked.name, joined(told.answer()), self.expected[reader.asked.name])
        await self.assert_nothing_left()

    async def assert_nothing_left(self, limit_s: float = CALM_LIMIT_S) -> None:
        """Return when nothing of any request is left anywhere, and nobody holds more than before.

        Raises:
            AssertionError: something is still there after the limit; the message says what.
        """
        found: list[str] = []

        async def is_calm() -> bool:
            found[:] = await _left(self, self.before)
            return not found

        try:
            await until(is_calm, "nothing is left", limit_s)
        except AssertionError:
            raise AssertionError(f"left after {limit_s:g} s: {found}") from None

    async def check_answers(self, load: Sequence[Ask] | None = None) -> None:
        """Send the load, and check that texts are as ever."""
        async with reading(self, self.load if load is None else load) as readers:
            await self.check_texts(readers)

    async def check_texts(self, readers: Sequence[Reader]) -> None:
        """Wait for the answers, and check that texts are as ever."""
        await all_read(readers)
        for reader in readers:
            assert reader.told.texts == self.expected[reader.asked.name]["texts"], reader.told

    @asynccontextmanager
    async def among_prompts(self, is_met: Callable[[], Awaitable[bool]], count: int = 10) -> AsyncIterator[None]:
        """Send waves of `long_prompts` until a state is met that soon passes, and may pass unseen; the body finds it.

        Afterwards all answers must be as expected.

        Raises:
            AssertionError: they are not, or the state was not met in any wave.
        """
        readers: list[Reader] = []
        async with AsyncExitStack() as stack:
            for _ in range(MAX_WAVES):
                readers += await stack.enter_async_context(reading(self, long_prompts(count)))
                if await _is_met_in(WAVE_S, is_met):
                    break
            else:
                raise AssertionError(f"the state was not met in {MAX_WAVES} waves of prompts")
            yield
            await all_read(readers)
            for reader in readers:
                name = reader.asked.name
                assert_same(name, joined(reader.told.answer()), self.expected[name], reader.told.broken_by)


async def _is_met_in(limit_s: float, is_met: Callable[[], Awaitable[bool]]) -> bool:
    try:
        await until(is_met, "the state is met", limit_s)
    except AssertionError:
        return False
    return True


@contextmanager
def staged(
    folder: Path, shape: Shape, load: Sequence[Ask] | None = None, *, ready: list[str] | None = None
) -> Iterator[StagedCluster]:
    """Give a cluster that is ready and idle; see `running`.

    Args:
        folder: for its logs and the broker's store.
        shape: what it consists of.
        load: what is asked while something happens to it; None: `mixed_load`, and `long_prompts` are known as well.
        ready: see `running`.
    """
    with running(StagedCluster(folder, shape), ready=ready) as cluster:
        run_apart(cluster.settle(mixed_load(), *long_prompts()) if load is None else cluster.settle(load))
        yield cluster
