"""Processes on the virtual clock: they stand still, go on late, and die without a word."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shared.transport.bus import BusTimeoutError, Endpoint, Message, NoRespondersError, ServiceInfo
from shared.transport.memory_bus import MemoryBroker, MemoryBus
from sim.faults.process import ProcessState, SimProcess
from sim.virtual_time import VirtualTimeLoop

pytestmark = pytest.mark.virtual_time

INFO = ServiceInfo("sluice-test", "1.0.0", "test", {}, "t1")


def loop() -> VirtualTimeLoop:
    found = asyncio.get_running_loop()
    assert isinstance(found, VirtualTimeLoop)
    return found


async def ticks(note: Callable[[float], None]) -> None:
    while True:
        await asyncio.sleep(1.0)
        note(loop().time())


async def echo(message: Message) -> bytes:
    return message.data


async def serve(bus: MemoryBus) -> None:
    await bus.serve(INFO, [Endpoint("echo", "echo", echo)])


async def test_a_frozen_process_does_late_what_fell_due_and_goes_on() -> None:
    """Frozen from 1.5 s to 4.2 s: the tick of 2 s comes at 4.2 s, the next one a second later."""
    times: list[float] = []
    process = SimProcess("p", loop())
    process.start(ticks(times.append), name="ticks")
    await asyncio.sleep(1.5)
    process.freeze()
    await asyncio.sleep(2.7)
    assert times == [1.0]
    process.thaw()
    await asyncio.sleep(1.5)
    process.kill()
    assert times == pytest.approx([1.0, 4.2, 5.2])


async def test_what_descends_from_a_process_stands_still_with_it_and_nothing_else_does() -> None:
    inside: list[str] = []
    outside: list[str] = []

    async def family() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(1.0)).add_done_callback(lambda _task: inside.append("task"))
            loop().call_later(1.0, inside.append, "timer")

    process = SimProcess("p", loop())
    process.start(family(), name="family")
    loop().call_later(1.0, outside.append, "timer")
    await asyncio.sleep(0.5)
    process.freeze()
    await asyncio.sleep(2.0)
    assert inside == []
    process.thaw()
    await asyncio.sleep(0.1)
    assert outside == ["timer"]
    assert process.task_names == []
    assert inside == ["timer", "task"]


async def test_a_killed_process_leaves_no_task_and_runs_nothing_more() -> None:
    said: list[str] = []

    async def stubborn() -> None:
        try:
            await asyncio.sleep(10.0)
        finally:
            said.append("on its way out")
            loop().call_soon(said.append, "never")
            loop().create_task(ticks(lambda _now: said.append("never")), name="orphan")
            await asyncio.sleep(1.0)
            said.append("never")

    process = SimProcess("p", loop())
    process.start(stubborn(), name="stubborn")
    process.start(ticks(lambda _now: said.append("tick")), name="ticks")
    process.on_death[lambda: said.append("noticed")] = None
    await asyncio.sleep(1.5)
    process.kill()
    process.kill()
    await asyncio.sleep(5.0)
    assert process.state is ProcessState.DEAD
    assert loop().tasks_behind(process) == []
    assert said == ["tick", "on its way out", "noticed"]


async def test_a_frozen_server_answers_late_and_a_dead_one_is_nobody() -> None:
    """Frozen for 1 s, less than anybody notices: the request waits for it. Killed: there is nobody at once."""
    broker, times = MemoryBroker(latency_s=0.0), list[float]()
    bus, client = broker.connect("server"), broker.connect("client")
    process = SimProcess("server", loop())
    await process.start(serve(bus), name="serve")
    process.freeze()
    bus.link.stand_still(still=True)
    loop().call_later(1.0, process.thaw)
    loop().call_later(1.0, lambda: bus.link.stand_still(still=False))
    assert await client.request("echo", b"x", timeout_s=2.0) == b"x"
    times.append(loop().time())
    bus.abort()
    process.kill()
    with pytest.raises(NoRespondersError):
        await client.request("echo", b"x", timeout_s=2.0)
    times.append(loop().time())
    assert not broker.router.num_subscriptions("server")
    assert times == pytest.approx([1.0, 1.0])


async def test_the_broker_forgets_who_stands_still_for_three_seconds_until_it_is_back() -> None:
    broker = MemoryBroker()
    bus, client = broker.connect("server"), broker.connect("client")
    process = SimProcess("server", loop())
    await process.start(serve(bus), name="serve")
    process.freeze()
    bus.link.stand_still(still=True)
    with pytest.raises(BusTimeoutError):
        await client.request("echo", b"x", timeout_s=2.9)
    await asyncio.sleep(0.2)
    with pytest.raises(NoRespondersError):
        await client.request("echo", b"x", timeout_s=1.0)
    bus.link.stand_still(still=False)
    process.thaw()
    assert not bus.connected
    await asyncio.sleep(0.25)
    assert await client.request("echo", b"x", timeout_s=1.0) == b"x"
    process.kill()
    bus.abort()
