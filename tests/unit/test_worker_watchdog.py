"""A step that never ends ends the worker; one that is merely slow does not."""

from __future__ import annotations

import asyncio

import pytest

from services.worker.watchdog import SLOW_FACTOR, StuckStepError, step_limit, watch_steps
from shared.cost import CostModel
from shared.memory_bus import MemoryBroker
from shared.messages.lease import Renewed
from sim.virtual_time import run
from sim.worker import SimWorker, SimWorkerParams
from tests.support.fake_dispatcher import FakeDispatcher, Stream


def test_the_limit_follows_the_largest_step_where_steps_are_slow() -> None:
    assert step_limit(10.0, 0.0) == 10.0
    assert step_limit(10.0, 0.1) == 10.0
    assert step_limit(10.0, 13.0) == SLOW_FACTOR * 13.0


def test_the_watch_ends_with_the_age_and_not_before_the_limit() -> None:
    async def main() -> None:
        now = asyncio.get_running_loop().time
        with pytest.raises(StuckStepError) as caught:
            await watch_steps(now, 10.0)
        assert 10.0 < caught.value.age_s <= 11.0
        assert now() == caught.value.age_s

    run(main())


@pytest.mark.parametrize(("step_s", "is_stuck"), [(9.0, False), (3600.0, True)])
def test_a_worker_with_a_stuck_step_fails_and_leaves_the_bus(step_s: float, is_stuck: bool) -> None:
    async def main() -> None:
        broker = MemoryBroker()
        cost = CostModel(g0_s=step_s, b0_s=0.0, g1_s=0.0, b1_s=0.0, d_s=0.0, a_s=0.0)
        worker = SimWorker(SimWorkerParams("w0", cost, 100), broker.connect("w0"))
        await worker.start()
        dispatcher = FakeDispatcher(broker.connect("d0"))
        await dispatcher.start()
        stream = await dispatcher.submit("w0", dispatcher.make([300, 301], 3))
        assert isinstance(stream, Stream)
        renewed = [await _wait_and_renew(dispatcher) for _ in range(30)]
        assert max(answer.step_age_s for answer in renewed) > min(step_s, 10.0) - 1.0
        failures = [(name, type(error)) for name, error in worker.failures]
        assert failures == ([("watchdog", StuckStepError)] if is_stuck else [])
        assert bool(stream.finish) is not is_stuck
        began_s = asyncio.get_running_loop().time()
        await worker.stop()
        assert asyncio.get_running_loop().time() - began_s < 11.0, "it does not wait for the step"

    run(main())


async def _wait_and_renew(dispatcher: FakeDispatcher) -> Renewed:
    await asyncio.sleep(1.0)
    return await dispatcher.renew("w0")
