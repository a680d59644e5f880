"""A step that never ends ends the worker; one that is merely slow does not."""

from __future__ import annotations

import asyncio
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.serving.watchdog import SLOW_FACTOR, AwakeAge, StuckStepError, step_limit, watch_steps
from shared.cost import CostModel
from shared.messages.lease import Renewed
from tests.support.fake_dispatcher import FakeDispatcher
from tests.support.lone_worker import LoneWorker

pytestmark = pytest.mark.virtual_time


def test_the_limit_follows_the_largest_step_where_steps_are_slow() -> None:
    assert step_limit(10.0, 0.0) == 10.0
    assert step_limit(10.0, 0.1) == 10.0
    assert step_limit(10.0, 13.0) == SLOW_FACTOR * 13.0


async def test_the_watch_ends_with_the_age_and_not_before_the_limit() -> None:
    now = asyncio.get_running_loop().time
    with pytest.raises(StuckStepError) as caught:
        await watch_steps(now, 10.0)
    assert 10.0 < caught.value.age_s <= 11.0
    assert now() == caught.value.age_s


@given(
    periods=st.lists(st.floats(0.0, 0.9), max_size=30),
    pauses=st.dictionaries(st.integers(0, 29), st.floats(3.0, 500.0), max_size=5),
    first=st.integers(0, 29),
    into=st.floats(0.0, 1.0),
)
def test_pauses_of_the_machine_are_no_age_and_all_else_is(
    periods: list[float], pauses: dict[int, float], first: int, into: float
) -> None:
    """A look comes nearly a period late, or a pause later still; a step begins somewhere between two of them."""
    awake = AwakeAge(period_s=1.0, now_s=0.0)
    now_s, began_s, paused_s = 0.0, math.inf, 0.0
    for index, late_s in enumerate(periods):
        pause_s = pauses.get(index, 0.0)
        if index == first:
            began_s, paused_s = now_s + into, 0.0
        now_s += 1.0 + late_s + pause_s
        paused_s += pause_s
        age_s = max(0.0, now_s - began_s)
        found_s = awake.look(now_s, age_s)
        num_pauses = sum(first <= each <= index for each in pauses)
        assert age_s - paused_s - (1.0 + 1e-9) * num_pauses <= found_s <= max(0.0, age_s - paused_s) + num_pauses + 1e-9


def test_a_step_after_a_pause_has_its_whole_age() -> None:
    awake = AwakeAge(period_s=1.0, now_s=0.0)
    assert awake.look(10.0, 0.5) == 0.0, "it may have begun before the pause"
    assert awake.look(11.0, 0.25) == 0.25
    assert awake.look(12.0, 1.25) == 1.25


def test_a_worker_that_is_stopped_in_a_step_is_not_stuck_when_it_goes_on() -> None:
    """A pause is one long turn of the loop, after which all timers are due at once."""

    async def main() -> None:
        now = asyncio.get_running_loop().time
        began_s = now()
        watching = asyncio.ensure_future(watch_steps(lambda: now() - began_s, 0.5))
        await asyncio.sleep(0.1)
        time.sleep(0.8)  # noqa: ASYNC251  nobody can look
        with pytest.raises(StuckStepError):
            await watching
        assert now() - began_s > 0.8 + 0.4

    asyncio.run(main())


@pytest.mark.parametrize(("step_s", "is_stuck"), [(9.0, False), (3600.0, True)])
async def test_a_worker_with_a_stuck_step_fails_and_leaves_the_bus(step_s: float, is_stuck: bool) -> None:
    lone = LoneWorker(
        ("d0",), cost=CostModel(g0_s=step_s, b0_s=0.0, g1_s=0.0, b1_s=0.0, d_s=0.0, a_s=0.0), num_blocks=100
    )
    await lone.dispatcher.start()
    await lone.worker.start()
    stream = await lone.submitted([300, 301], 3)
    renewed = [await _wait_and_renew(lone.dispatcher) for _ in range(30)]
    assert max(answer.step_age_s for answer in renewed) > min(step_s, 10.0) - 1.0
    failures = [(name, type(error)) for name, error in lone.worker.failures]
    assert failures == ([("watchdog", StuckStepError)] if is_stuck else [])
    assert bool(stream.finish) is not is_stuck
    began_s = lone.now_s
    await lone.worker.stop()
    assert lone.now_s - began_s < 11.0, "it does not wait for the step"


async def _wait_and_renew(dispatcher: FakeDispatcher) -> Renewed:
    await asyncio.sleep(1.0)
    return await dispatcher.renew("w0")
