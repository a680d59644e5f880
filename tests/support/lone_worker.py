"""One modelled worker on the virtual clock, and dispatchers that ask it over the bus in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from services.worker.engine.invariants import check_engine
from services.worker.engine.stats import EngineStats, take_stats
from services.worker.modelled.shadow_kv import expected_outputs
from shared.cost import CostModel
from shared.messages.report import WorkerReport
from shared.messages.request import Refused, Submit
from shared.transport.bus import Message
from shared.transport.memory_bus import MemoryBroker
from shared.wire import decode_json
from sim.worker import SimWorker, SimWorkerParams
from tests.support.fake_dispatcher import FakeDispatcher, Stream

STEP_S = 0.01
COST = CostModel(g0_s=STEP_S, b0_s=0.0, g1_s=0.0, b1_s=0.0, d_s=0.0, a_s=0.0)
"""Every step takes as long."""


class LoneWorker:
    """The worker `w0` and those who ask it; what it takes is asked by the first of them unless told otherwise."""

    def __init__(self, names: tuple[str, ...], **params: Any) -> None:
        self.broker = MemoryBroker()
        usual: dict[str, Any] = {"worker_id": "w0", "cost": COST, "num_blocks": 1000}
        self.worker = SimWorker(SimWorkerParams(**usual | params), self.broker.connect("w0"))
        self.engine = self.worker.service.engine
        self.dispatchers = [FakeDispatcher(self.broker.connect(name), name) for name in names]
        self.dispatcher = self.dispatchers[0]

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def stats(self) -> EngineStats:
        return take_stats(self.engine)

    async def accepted(self, submit: Submit, dispatcher: FakeDispatcher | None = None) -> Stream:
        stream = await (dispatcher or self.dispatcher).submit("w0", submit)
        assert isinstance(stream, Stream)
        return stream

    async def submitted(self, prompt: list[int], max_tokens: int, **values: Any) -> Stream:
        return await self.accepted(self.dispatcher.make(prompt, max_tokens, **values))

    async def refused(self, submit: Submit) -> Refused:
        answer = await self.dispatcher.submit("w0", submit)
        assert isinstance(answer, Refused)
        return answer

    async def reports(self) -> list[tuple[float, WorkerReport]]:
        """Return a list that grows with each report from now on, and when it comes."""
        reports: list[tuple[float, WorkerReport]] = []

        def on_report(message: Message) -> None:
            reports.append((self.now_s, decode_json(message.data, WorkerReport)))

        await self.dispatcher.bus.subscribe(self.dispatcher.subjects.all_reports(), on_report)
        return reports

    def undisturbed(self, stream: Stream) -> list[int]:
        """What the sequence says when nothing ever happens to its KV."""
        submit, sampling = stream.submit, stream.submit.sampling
        prompt, known = submit.prompt_ids().astype(np.int32), submit.generated_ids().astype(np.int32)
        tokens: list[int] = expected_outputs(
            prompt, known, sampling.max_tokens, sampling.seed, self.worker.draw
        ).tolist()
        return tokens


async def ended(streams: Iterable[Stream], limit_s: float = 60.0) -> None:
    """Return when all of them have ended."""
    async with asyncio.timeout(limit_s):
        await asyncio.gather(*(stream.ended.wait() for stream in streams))


@asynccontextmanager
async def lone_worker(*names: str, **params: Any) -> AsyncIterator[LoneWorker]:
    """Run a worker of these parameters inside the block, for dispatchers of these names, or one; nothing fails."""
    lone = LoneWorker(names or ("d0",), **params)
    for dispatcher in lone.dispatchers:
        await dispatcher.start()
    await lone.worker.start()
    try:
        yield lone
    finally:
        await lone.worker.stop()
    assert not lone.worker.failures
    assert not [fault for dispatcher in lone.dispatchers for fault in dispatcher.faults]
    check_engine(lone.engine)
