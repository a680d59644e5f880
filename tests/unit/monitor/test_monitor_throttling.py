"""Throttling: seen when a rule holds, said once per epoch, forgotten when it is over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.monitor.policy.throttling import ThrottlingDetector, ThrottlingRule
from shared.ids import Incarnation, WorkerId
from shared.messages.report import WorkerPhase
from tests.support.statuses import make_report


class Source:
    """Reports of one worker to one detector."""

    def __init__(self, horizon_s: float = 1.0, worker: str = "w") -> None:
        self.detector = ThrottlingDetector(horizon_s)
        self.worker = WorkerId(worker)
        self.number = -1

    def say(
        self, at_s: float, used: int, head: int = 0, *, blocks: int = 100, epoch: int = 1, **fields: object
    ) -> str | None:
        self.number += 1
        common = {"num_blocks": blocks, "num_used_blocks": used, "num_head_blocks": head, "incarnation": 7}
        report = make_report(self.worker, sequence_number=self.number, **(common | fields))
        return self.detector.apply(report, at_s, epoch)

    def is_throttled(self) -> bool:
        return bool(self.detector.strain(self.worker))


@pytest.fixture
def source() -> Source:
    return Source()


def test_a_full_worker_with_nobody_in_line_is_not_throttled(source: Source) -> None:
    assert source.say(0.0, 100) is None
    assert source.say(0.5, 100) is None


def test_a_head_of_line_that_does_not_fit_is_throttling(source: Source) -> None:
    assert source.say(0.0, 90, 11) == "101 of 100 KV blocks wanted; in 1 s it would be 101 of 100"
    assert source.detector.rule(source.worker) is ThrottlingRule.RATE


def test_a_request_queued_for_memory_is_throttling_whatever_the_rates(source: Source) -> None:
    reason = source.say(0.0, 60, num_queued_for_memory=2)
    assert reason == "60 of 100 KV blocks wanted, and 2 requests are queued for lack of them"
    assert source.detector.rule(source.worker) is ThrottlingRule.QUEUED


@given(used=st.integers(0, 100), slack=st.integers(0, 100), head=st.integers(0, 50), growth=st.integers(0, 20))
def test_rows_with_slack_are_no_demand(used: int, slack: int, head: int, growth: int) -> None:
    """Whoever has none of the blocks that they have is as short as if these were free."""
    some, fewer, slack = Source(), Source(), min(slack, used)
    for tick in range(3):
        more = growth * tick
        said = some.say(0.5 * tick, used + more, head, num_slack_blocks=slack, blocks=160)
        assert said == fewer.say(0.5 * tick, used + more - slack, head, blocks=160)


@given(
    start=st.integers(0, 100),
    slope=st.integers(-20, 20),
    slowed=st.lists(st.integers(0, 100), min_size=6, max_size=6),
)
def test_who_was_slowed_is_no_demand_and_no_rise_when_counted_again(start: int, slope: int, slowed: list[int]) -> None:
    """On a straight line of all that is held, whoever of it counts at each moment."""
    source = Source()
    for tick, most in enumerate(slowed):
        used = min(max(start + slope * tick, 0), 200)
        if used in (0, 200):
            return  # the line has bent
        num = min(most, used)
        source.say(0.5 * tick, used, num_slack_blocks=num, num_slowed_blocks=num, blocks=200)
        assert source.is_throttled() == (used - num + 2 * slope * (tick > 0) > 200)


@given(
    start=st.integers(0, 60),
    slope=st.integers(-40, 60),
    loss=st.integers(-20, 30),
    horizon_s=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
)
def test_steady_rates_are_seen_at_the_first_report_from_which_a_second_would_not_suffice(
    start: int, slope: int, loss: int, horizon_s: float
) -> None:
    """On straight lines an average of slopes is the slope: the rule holds exactly when it does on paper."""
    source = Source(horizon_s)
    for tick in range(12):
        demand, capacity = start * 4 + slope * tick, 400 - loss * tick
        if demand < 0 or capacity <= 0:
            return
        event = source.say(tick * 0.25, min(demand, capacity), max(demand - capacity, 0), blocks=capacity)
        rates = tick > 0
        expected = demand + 4 * slope * horizon_s * rates > capacity - 4 * loss * horizon_s * rates
        assert source.is_throttled() == expected
        if event is not None or expected:
            assert expected
            assert event is not None
            return


def test_falling_capacity_is_as_good_a_reason_as_rising_demand(source: Source) -> None:
    assert source.say(0.0, 80) is None
    event = source.say(0.5, 80, blocks=95)  # 10 blocks a second less: 85 then
    assert event is None
    assert source.say(1.0, 80, blocks=85) is not None  # by now about 13 a second


def test_there_is_one_event_per_epoch_while_it_lasts(source: Source) -> None:
    events = [source.say(0.5 * i, 100, 20, epoch=1 + i // 4) for i in range(12)]
    assert [i for i, event in enumerate(events) if event is not None] == [0, 4, 8]


def test_flapping_at_the_limit_is_silent_and_calm_arms_it_again() -> None:
    source = Source(horizon_s=0.0)
    heads = [1, 0, 1, 0, 1]
    events = [source.say(0.5 * i, 100, head) for i, head in enumerate(heads)]
    assert [event is not None for event in events] == [True, False, False, False, False]
    assert source.say(3.0, 90) is None  # at the release ratio
    assert source.say(3.5, 100, 1) is not None


def test_a_worker_that_stays_full_is_calm_once_its_rates_have_faded(source: Source) -> None:
    source.say(0.0, 0)
    assert source.say(0.5, 100) is not None
    for tick in range(2, 20):
        source.say(0.5 * tick, 100)
    assert not source.is_throttled()


def test_what_changes_at_once_makes_no_rate_of_its_own(source: Source) -> None:
    """20 blocks within 10 ms are no 2 000 a second: they count over the half second to the next report."""
    source.say(0.0, 0)
    assert source.say(0.01, 20) is None
    assert source.say(0.5, 20) is None


def test_another_process_begins_without_rates(source: Source) -> None:
    source.say(0.0, 10)
    source.say(0.5, 60)  # 100 a second: in a second 160
    assert source.is_throttled()
    assert source.say(1.0, 70, incarnation=Incarnation(8)) is None
    assert not source.is_throttled()
    source.number = -1
    assert source.say(1.2, 99) is None  # a number that does not grow: again another


@pytest.mark.parametrize("fields", [{"plan_id": 4}, {"layers": (0, 4)}])
def test_what_a_plan_changes_makes_no_rates(source: Source, fields: dict[str, Any]) -> None:
    """A leader takes over the other's requests; later it has less memory again: no trend in either."""
    source.say(0.0, 60)
    assert source.say(0.5, 60) is None
    assert source.say(1.0, 120, blocks=250, **fields) is None
    assert source.say(1.5, 120, blocks=250, **fields) is None
    assert source.say(2.0, 60, blocks=100, plan_id=9) is None
    assert not source.is_throttled()


def test_workers_that_do_not_serve_are_forgotten(source: Source) -> None:
    assert source.say(0.0, 100, 5) is not None
    for fields in ({"phase": WorkerPhase.DRAINING}, {"num_blocks": 0}):
        assert source.say(0.5, 0, 5, **fields) is None
        assert not source.is_throttled()
    assert source.say(1.0, 100, 5) is not None
    source.detector.forget(WorkerId("w"))
    assert not source.is_throttled()


def test_two_reports_of_one_instant_make_no_rate(source: Source) -> None:
    source.say(0.0, 50)
    assert source.say(0.0, 60) is None
    event = source.say(1.0, 70)  # 20 in a second, from the first of the two
    assert event is None
    assert source.say(1.5, 85) is not None


@pytest.mark.parametrize("seed", range(20))
def test_an_event_is_raised_only_where_a_rule_holds_and_once_per_worker_and_epoch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sources = [Source(worker=f"w{i}") for i in range(3)]
    raised: dict[tuple[str, int], int] = {}
    calm_since: dict[str, bool] = {}
    epoch = 1
    for tick in range(80):
        epoch += int(rng.integers(12) == 0)
        source = sources[int(rng.integers(3))]
        used, head, queued = int(rng.integers(60, 101)), int(rng.integers(0, 15)), int(rng.integers(8) == 0)
        event = source.say(tick * 0.2, used, head, epoch=epoch, num_queued_for_memory=queued)
        is_throttled = source.is_throttled()
        assert is_throttled or not (queued or event)
        key = (source.worker, epoch)
        if event is not None:
            assert key not in raised or calm_since.get(source.worker, False)
            raised[key] = tick
            calm_since[source.worker] = False
        elif not is_throttled and used + head <= 90:
            calm_since[source.worker] = True
        else:
            assert not is_throttled or key in raised
