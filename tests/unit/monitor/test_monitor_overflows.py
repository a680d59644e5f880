"""Overflows: what another worker had room for, for long enough; against one that remembers every report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.monitor.policy.overflows import ROOM_S, OverflowCounter
from shared.ids import WorkerId
from shared.messages.report import WorkerPhase, WorkerReport
from shared.messages.report_parts import MigrationPart
from tests.support.statuses import make_report


def report_of(name: str, used: int, preempted: int = 0, **fields: Any) -> WorkerReport:
    """Of a worker with ten sequences, 100 blocks."""
    common = {"num_blocks": 100, "num_running": 10, "model_digest": "m", "num_preemptions_total": preempted}
    return make_report(name, num_used_blocks=used, **(common | fields))


def heard(*rooms: tuple[str, dict[str, Any]], until_s: float = ROOM_S) -> OverflowCounter:
    """Return one that has heard of workers at the beginning, each second and at the end."""
    counter = OverflowCounter()
    for at_s in (0.0, 1.0, 2.0, 3.0, 4.0, until_s):
        for name, fields in rooms:
            assert counter.absorb(report_of(name, **fields), at_s) == 0
    return counter


@pytest.mark.parametrize(("used", "overflows"), [(90, 3), (91, 0)])
def test_a_preempted_sequence_counts_if_another_worker_had_room_for_one_of_average_size(
    used: int, overflows: int
) -> None:
    """Ten hold 95 blocks, so one holds 10."""
    counter = heard(("a", {"used": 95}), ("b", {"used": used}))
    assert counter.absorb(report_of("a", 95, preempted=3), 5.1) == overflows
    assert counter.absorb(report_of("a", 95, preempted=3), 5.2) == 0, "it was told of"


def test_room_that_has_come_lately_was_no_room() -> None:
    counter = heard(("a", {"used": 95}), ("b", {"used": 95}))
    counter.absorb(report_of("b", 20), 5.0)
    assert counter.absorb(report_of("a", 95, preempted=1), 9.9) == 0
    counter.absorb(report_of("b", 20), 10.1)
    assert counter.absorb(report_of("a", 95, preempted=2), 10.2) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"phase": WorkerPhase.DRAINING},
        {"held": "a plan"},
        {"stage": 1},
        {"migration": MigrationPart(closing="it is emptied")},
        {"step_time_s": 0.11},
        {"model_digest": "n"},
        {"num_demanded_blocks": 75},
        {"num_uncomputed_blocks": 75},
    ],
)
def test_who_cannot_take_anything_has_no_room(fields: dict[str, Any]) -> None:
    rooms: list[tuple[str, dict[str, Any]]] = [("a", {"used": 95}), ("b", {"used": 20, **fields})]
    assert heard(*rooms).absorb(report_of("a", 95, preempted=1), 5.1) == 0
    assert heard(*rooms, ("c", {"used": 20})).absorb(report_of("a", 95, preempted=1), 5.1) == 1


def test_a_worker_that_is_not_heard_any_more_or_is_gone_has_no_room() -> None:
    counter = heard(("a", {"used": 95}), ("b", {"used": 20}))
    assert counter.absorb(report_of("a", 95, preempted=1), 10.1) == 0
    counter = heard(("a", {"used": 95}), ("b", {"used": 20}))
    counter.forget(WorkerId("b"))
    assert counter.absorb(report_of("a", 95, preempted=1), 5.1) == 0


def test_who_waits_for_memory_counts_once_when_it_has_waited_as_long() -> None:
    counter = heard(("a", {"used": 95}), ("b", {"used": 20}))
    short = {"num_queued_for_memory": 2}
    told = []
    for at_s in range(5, 20):
        counter.absorb(report_of("b", 20), float(at_s))
        told.append(counter.absorb(report_of("a", 95, **(short if at_s != 17 else {})), float(at_s)))
    assert told == [0] * 5 + [1] + [0] * 9
    counter.absorb(report_of("b", 20), 23.0)
    assert counter.absorb(report_of("a", 95, **short), 23.0) == 1, "others wait since 18 s"


def test_another_process_begins_anew() -> None:
    counter = heard(("a", {"used": 95, "preempted": 7}), ("b", {"used": 20}))
    assert counter.absorb(report_of("a", 95, preempted=2, incarnation=9), 5.1) == 0
    assert counter.absorb(report_of("a", 95, preempted=3, incarnation=9), 5.2) == 1


@dataclass
class Naive:
    """Remembers all."""

    reports: list[tuple[float, WorkerReport]] = field(default_factory=list)

    def absorb(self, report: WorkerReport, now_s: float) -> int:
        before = [each for _, each in self.reports if each.worker_id == report.worker_id]
        num = report.num_preemptions_total - (before[-1].num_preemptions_total if before else 10**9)
        self.reports.append((now_s, report))
        size = -(-report.num_used_blocks // 10)
        others = {each.worker_id for _, each in self.reports} - {report.worker_id}
        return max(num, 0) if any(self._had_room(name, size, now_s) for name in others) else 0

    def _had_room(self, name: str, size: int, now_s: float) -> bool:
        own = [(at_s, 100 - each.num_used_blocks) for at_s, each in self.reports if each.worker_id == name]
        last_s = own[-1][0]
        recent = [free for at_s, free in own if at_s >= last_s - ROOM_S]
        return own[0][0] <= now_s - ROOM_S and now_s - last_s <= ROOM_S and min(recent) >= size


SAID = st.tuples(st.sampled_from("abc"), st.integers(0, 100), st.integers(0, 2), st.sampled_from([0.25, 0.5, 2.0]))


@settings(deadline=None)
@given(st.lists(SAID, max_size=60))
def test_it_counts_as_one_does_who_remembers_every_report(said: list[tuple[str, int, int, float]]) -> None:
    counter, naive, now_s, totals = OverflowCounter(), Naive(), 0.0, dict.fromkeys("abc", 0)
    for name, used, num_preempted, gap_s in said:
        now_s += gap_s
        totals[name] += num_preempted
        report = report_of(name, used, totals[name])
        assert counter.absorb(report, now_s) == naive.absorb(report, now_s)
