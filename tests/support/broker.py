"""Brokers for tests: a real nats-server, and one scenario run on every kind of bus.

A contract test is an async function that takes a `Net`, decorated with `contract`:

    @contract
    async def test_a_message_arrives(net: Net) -> None:
        bus, seen = await net.connect(), Seen()
        ...

It runs on the live bus (asyncio's loop and uvloop), on the bus in memory, and on that in virtual time. Afterwards no
task, no error that nobody caught, and no file descriptor may be left.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import uvloop

from shared.transport import memory_kv, nats_watch
from shared.transport.bus import Bus, Handler, Subscription
from shared.transport.memory_bus import Delivery, MemoryBroker, MemoryBus
from shared.transport.nats_bus import NatsBus
from shared.transport.nats_server import EmbeddedNats
from sim import virtual_time

WAIT_S = 5.0
"""Longest wait for something that must happen; never reached by a passing test."""

T = TypeVar("T")
_numbers = itertools.count(1)


class Seen(Generic[T]):
    """A handler that keeps what it gets, and lets a test wait for it."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self._changed = asyncio.Event()

    def __call__(self, item: T) -> None:
        self.items.append(item)
        self._changed.set()

    async def wait(self, count: int) -> list[T]:
        """Return the items when there are at least this many."""
        async with asyncio.timeout(WAIT_S):
            while len(self.items) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.items


class Net:
    """What a scenario gets: connections to one broker, all closed when it ends."""

    def __init__(
        self, kind: str, connect: Callable[[str], Awaitable[NatsBus | MemoryBus]], broker: MemoryBroker
    ) -> None:
        self.kind = kind
        self._connect = connect
        self._broker = broker
        self._buses: list[NatsBus | MemoryBus] = []

    async def connect(self, name: str = "test") -> NatsBus | MemoryBus:
        bus = await self._connect(name)
        self._buses.append(bus)
        return bus

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()

    @contextmanager
    def deaf_watches(self) -> Iterator[None]:
        """Let no watch that begins meanwhile hear a hint, and let each ask the store by itself 20 times a second."""

        def deaf(delivery: Delivery) -> Sequence[float]:
            return () if delivery.subject.startswith("$KV.") else (0.0,)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nats_watch, "WATCH_PERIOD_S", 0.05)
            patch.setattr(memory_kv, "WATCH_PERIOD_S", 0.05)
            patch.setattr(nats_watch.NatsWatch, "_on_hint", lambda _watch, _message: None)
            patch.setattr(self._broker.router, "deliver", deaf)
            yield

    @staticmethod
    def unique(prefix: str) -> str:
        """Return a name that no other test uses: the real broker is shared and keeps its buckets."""
        return f"{prefix}{next(_numbers)}"


async def listen(bus: Bus, subject: str, handler: Handler, *, queue: str = "", max_pending: int = 1000) -> Subscription:
    """Subscribe, and return when the broker knows it."""
    subscription = await bus.subscribe(subject, handler, queue=queue, max_pending=max_pending)
    await bus.flush()
    return subscription


Scenario = Callable[[Net], Coroutine[Any, Any, None]]


class World:
    """Runs scenarios on one kind of bus."""

    def __init__(self, kind: str, server: EmbeddedNats) -> None:
        self.kind = kind
        self._server = server

    def run(self, scenario: Scenario) -> None:
        descriptors = open_descriptors()
        runners: dict[str, Callable[[Coroutine[Any, Any, None]], None]] = {
            "nats": asyncio.run,
            "nats-uvloop": uvloop.run,
            "memory": asyncio.run,
            "memory-virtual": virtual_time.run,
        }
        runners[self.kind](self._checked(scenario))
        assert open_descriptors() == descriptors, "a file descriptor was left open"

    async def _checked(self, scenario: Scenario) -> None:
        uncaught: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: uncaught.append(context))
        broker = MemoryBroker()

        async def connect(name: str) -> NatsBus | MemoryBus:
            live = self.kind.startswith("nats")
            return await NatsBus.connect(self._server.url, name=name) if live else broker.connect(name)

        net = Net(self.kind, connect, broker)
        try:
            await scenario(net)
        finally:
            await net.close()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, f"tasks were left: {left}"
        assert not uncaught, f"errors that nobody caught: {uncaught}"


def contract(scenario: Scenario) -> Callable[[World], None]:
    """Make a test that runs the scenario on every kind of bus."""

    def test(world: World) -> None:
        world.run(scenario)

    test.__name__ = scenario.__name__
    test.__doc__ = scenario.__doc__
    test.__module__ = scenario.__module__
    return test


def open_descriptors() -> int:
    """Return how many file descriptors this process holds."""
    return len(list(Path("/dev/fd").iterdir()))


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNats]:
    """A real broker on a free port, shared by all tests of a run."""
    uvloop.run(asyncio.sleep(0))  # it opens descriptors once per process, which are no leak of a test's
    with EmbeddedNats() as server:
        server.start(tmp_path_factory.mktemp("nats"))
        yield server


@pytest.fixture(params=["nats", "nats-uvloop", "memory", "memory-virtual"])
def world(request: pytest.FixtureRequest, nats_server: EmbeddedNats) -> World:
    """Every kind of bus on every kind of loop that it runs on."""
    return World(request.param, nats_server)
