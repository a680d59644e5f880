"""A dispatcher without HTTP on the virtual clock, with fake workers: what tests of sessions are made of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Concatenate

import pytest

from services.dispatcher.config import DispatcherSettings
from services.dispatcher.service import DispatcherService
from services.dispatcher.session.request import FailureCode, NewRequest, RequestFailedError
from services.dispatcher.session.session import Session
from shared.ids import Incarnation, RequestId
from shared.messages.request import pack_token_ids
from shared.transport.memory_bus import MemoryBroker
from shared.types import FinishReason, ReaderTarget, SamplingParams
from tests.support.fake_worker import FakeWorker, make_status, publish_view
from tests.support.staged import P, played_in

ANSWER = list(range(100, 120))


class Taker:
    """A reader that keeps what it gets, stops when it has enough, and fails when it has too much."""

    def __init__(self, enough: int = 10**9, fails_at: int = 10**9) -> None:
        self.tokens: list[int] = []
        self.finish = FinishReason.NONE
        self.parts: list[tuple[list[int], FinishReason, float]] = []
        self._enough = enough
        self._fails_at = fails_at

    def on_tokens(self, token_ids: Sequence[int], finish: FinishReason, now_s: float) -> bool:
        if len(self.tokens) >= self._fails_at:
            raise ZeroDivisionError
        self.tokens += token_ids
        self.finish = finish
        self.parts.append((list(token_ids), finish, now_s))
        return len(self.tokens) < self._enough


class Cluster:
    """A dispatcher without HTTP, and its workers."""

    def __init__(self, service: DispatcherService, broker: MemoryBroker) -> None:
        self.service = service
        self.sessions = service.sessions
        self.broker = broker
        self.test_bus = broker.connect(f"test-{id(self)}")
        self.workers: dict[str, FakeWorker] = {}
        self._number = 0
        self._admitted: list[Session] = []

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return asyncio.get_running_loop().time()

    async def add(self, name: str = "w0", script: Sequence[int] | None = ANSWER, **fields: Any) -> FakeWorker:
        worker = FakeWorker(
            self.broker.connect(name), name, None if script is None else (lambda _: script), step_s=0.01, **fields
        )
        await worker.start()
        self.workers[name] = worker
        await self.view(*(make_status(each) for each in self.workers))
        return worker

    async def view(self, *statuses: Any) -> None:
        self._number += 1
        await publish_view(self.test_bus, *statuses, number=self._number)
        await asyncio.sleep(0.001)

    def request(self, name: str = "r", num_prompt: int = 5, **fields: Any) -> NewRequest:
        defaults: dict[str, Any] = {
            "request_id": RequestId(name),
            "prompt": pack_token_ids(list(range(num_prompt))),
            "sampling": SamplingParams(max_tokens=50),
            "arrival_s": self.now_s,
            "limit_s": 600.0,
            "qoe": ReaderTarget(),
        }
        return NewRequest(**{**defaults, **fields})

    async def admit(self, name: str = "r", **fields: Any) -> Session:
        """Return an admitted request, which the cluster's end releases if the test does not."""
        session = await self.sessions.admit(self.request(name, **fields))
        self._admitted.append(session)
        return session

    async def siblings(self, *requests: NewRequest) -> list[Session]:
        """Return sessions that were opened together; the first of them is placed, and is the parent of the others."""
        sessions = self.sessions.open(requests)
        self._admitted += sessions
        await self.sessions.place(sessions[0])
        return sessions

    async def refusal(self, name: str = "r", **fields: Any) -> FailureCode:
        """Return why a request is not admitted."""
        with pytest.raises(RequestFailedError) as caught:
            await self.sessions.admit(self.request(name, **fields))
        return caught.value.code

    async def release(self) -> None:
        """Release what `admit` and `siblings` have returned, and have the workers hear of it."""
        for session in self._admitted:
            self.sessions.release(session)
        await asyncio.sleep(0.01)

    async def serve(self, name: str = "r", reader: Taker | None = None, **fields: Any) -> tuple[Session, Taker]:
        """Admit a request, wait for its end, release it."""
        session = await self.sessions.admit(self.request(name, **fields))
        taker = reader or Taker()
        try:
            session.attach(taker, 0.0)
            await session.ended.wait()
        finally:
            self.sessions.release(session)
        return session, taker


@asynccontextmanager
async def cluster(
    broker: MemoryBroker | None = None, name: str = "d0", incarnation: int = 0, **settings_fields: Any
) -> AsyncIterator[Cluster]:
    """A dispatcher that places by load, and of equal workers on the first by name."""
    fields = {"model": Path("tiny"), "served_model_name": "tiny", "instance_id": name, "system": "fcfs-chunked"}
    settings = DispatcherSettings.model_validate(fields | settings_fields)
    broker = broker or MemoryBroker()
    bus = broker.connect(name)
    failures: list[object] = []
    service = DispatcherService(
        settings, bus, lambda name, error: failures.append((name, error)), incarnation=Incarnation(incarnation)
    )
    await service.start()
    made = Cluster(service, broker)
    yield made
    await made.release()
    for worker in made.workers.values():
        await worker.stop()
        await worker.bus.close()
    assert len(service.sessions.table) == 0
    assert service.sessions.num_queued == 0
    await service.stop()
    await bus.close()
    await made.test_bus.close()
    assert not failures


def with_cluster(
    **settings: Any,
) -> Callable[[Callable[Concatenate[Cluster, P], Awaitable[None]]], Callable[P, None]]:
    """Run a test on the virtual clock, with a cluster of its own as its first argument."""
    return played_in(partial(cluster, **settings))
