"""What becomes of reports: late ones, new processes, workers that stop, and silence that is not theirs."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.monitor.policy.liveness import LivenessParams
from services.monitor.state import MonitoredCluster, ReportVerdict
from shared.ids import DispatcherId, WorkerId
from shared.messages.report import DispatcherReport, Liveness, WaitingRequests, WorkerPhase, WorkerReport
from tests.support import statuses

PARAMS = LivenessParams()


def make_report(number: int, *, worker: str = "w", **fields: Any) -> WorkerReport:
    return statuses.make_report(worker, **({"sequence_number": number, "pid": 1, "host": "h"} | fields))


def make_state(max_workers: int = 8) -> MonitoredCluster:
    return MonitoredCluster(PARAMS, max_workers)


@pytest.fixture
def state() -> MonitoredCluster:
    return make_state()


def names(state: MonitoredCluster) -> list[str]:
    return [change.name for change in state.take_changes()]


def shown(state: MonitoredCluster, now_s: float) -> dict[str, tuple[Liveness, int]]:
    view = state.make_view(now_s, 0)
    return {status.report.worker_id: (status.liveness, status.report.sequence_number) for status in view.workers}


@given(st.permutations(range(8)))
def test_the_view_shows_the_newest_report_in_whatever_order_they_arrive(order: list[int]) -> None:
    state = make_state()
    verdicts = [state.absorb(make_report(number), 0.0) for number in order]
    newest = [max(order[: index + 1]) == number for index, number in enumerate(order)]
    assert verdicts == [ReportVerdict.ACCEPTED if is_newest else ReportVerdict.STALE for is_newest in newest]
    assert shown(state, 0.0) == {"w": (Liveness.ALIVE, 7)}


def test_the_same_report_twice_is_stale_and_does_not_prove_life(state: MonitoredCluster) -> None:
    state.absorb(make_report(5), 0.0)
    assert state.absorb(make_report(5), 2.0) is ReportVerdict.STALE
    state.judge(2.0)
    assert shown(state, 2.0) == {"w": (Liveness.SUSPECT, 5)}


def test_another_pid_is_a_new_process_and_late_reports_of_the_old_one_are_ignored(state: MonitoredCluster) -> None:
    state.absorb(make_report(900, pid=1), 0.0)
    names(state)
    assert state.absorb(make_report(0, pid=2, phase=WorkerPhase.LOADING), 0.5) is ReportVerdict.ACCEPTED
    assert names(state) == ["worker_restarted", "worker_loading"]
    assert state.absorb(make_report(901, pid=1), 0.6) is ReportVerdict.STALE
    assert shown(state, 0.6) == {"w": (Liveness.ALIVE, 0)}


def test_a_container_that_restarts_with_the_same_pid_is_recognised_once_its_predecessor_is_dead(
    state: MonitoredCluster,
) -> None:
    state.absorb(make_report(900), 0.0)
    assert state.absorb(make_report(0), 1.0) is ReportVerdict.STALE
    state.judge(3.0)
    names(state)
    assert state.absorb(make_report(4), 3.0) is ReportVerdict.ACCEPTED
    assert names(state) == ["worker_restarted", "worker_ready"]
    assert shown(state, 3.0) == {"w": (Liveness.ALIVE, 4)}


def test_a_worker_that_is_held_up_and_one_that_goes_on_are_told_of_once(state: MonitoredCluster) -> None:
    told = []
    for number, held in enumerate(["", "plan 3", "plan 3", "plan 4", "", ""]):
        state.absorb(make_report(number, held=held), 0.1 * number)
        told.append(names(state))
    assert told == [["worker_ready"], ["worker_held"], [], [], ["worker_goes_on"], []]


def test_silence_is_judged_step_by_step_and_a_report_ends_it(state: MonitoredCluster) -> None:
    state.absorb(make_report(0), 10.0)
    assert names(state) == ["worker_ready"]
    for now_s, expected in [(11.49, []), (11.5, ["worker_suspect"]), (12.9, []), (13.0, ["worker_dead"])]:
        state.judge(now_s)
        assert names(state) == expected, now_s
    state.absorb(make_report(1), 20.0)
    assert names(state) == ["worker_recovered"]
    state.judge(80.0)
    assert names(state) == ["worker_gone"]
    assert shown(state, 80.0) == {}


def test_a_stopped_worker_is_shown_until_everybody_has_seen_it_and_a_late_report_does_not_bring_it_back(
    state: MonitoredCluster,
) -> None:
    state.absorb(make_report(5), 0.0)
    state.absorb(make_report(6, phase=WorkerPhase.DRAINING), 0.1)
    state.absorb(make_report(8, phase=WorkerPhase.STOPPED), 0.2)
    assert names(state) == ["worker_ready", "worker_draining", "worker_gone"]
    assert state.absorb(make_report(7, phase=WorkerPhase.DRAINING), 0.3) is ReportVerdict.STALE
    assert list(shown(state, 3.1)) == ["w"]
    assert shown(state, 3.2) == {}
    state.judge(100.0)
    assert names(state) == [], "it went in order: its silence is no news"


def test_a_stopped_worker_may_come_back_as_a_new_process(state: MonitoredCluster) -> None:
    state.absorb(make_report(5, phase=WorkerPhase.STOPPED), 0.0)
    names(state)
    state.absorb(make_report(0, pid=2), 0.4)
    assert names(state) == ["worker_ready"]


def test_more_workers_than_allowed_are_refused_until_one_is_forgotten() -> None:
    state = make_state(max_workers=1)
    state.absorb(make_report(0, worker="a"), 0.0)
    assert state.absorb(make_report(0, worker="b"), 1.0) is ReportVerdict.FULL
    state.judge(60.0)
    assert state.absorb(make_report(1, worker="b"), 60.0) is ReportVerdict.ACCEPTED


def test_excused_silence_makes_no_judgement_worse_and_none_better(state: MonitoredCluster) -> None:
    state.absorb(make_report(0, worker="suspect"), 0.0)
    state.absorb(make_report(0, worker="alive"), 1.0)
    state.judge(2.0)
    state.excuse(50.0)
    state.judge(50.0)
    assert {name: liveness for name, (liveness, _) in shown(state, 50.0).items()} == {
        "alive": Liveness.ALIVE,
        "suspect": Liveness.SUSPECT,
    }
    state.judge(51.5)
    assert {name: liveness for name, (liveness, _) in shown(state, 51.5).items()} == {
        "alive": Liveness.SUSPECT,
        "suspect": Liveness.DEAD,
    }


def test_the_view_says_the_true_age_and_is_sorted(state: MonitoredCluster) -> None:
    order = [f"w{index}" for index in range(8)]
    random.Random(3).shuffle(order)
    for worker in order:
        state.absorb(make_report(0, worker=worker), 1.0)
    state.excuse(3.0)
    view = state.make_view(3.25, 7)
    assert [status.report.worker_id for status in view.workers] == sorted(order)
    assert {status.age_s for status in view.workers} == {2.25}
    assert view.sequence_number == 7


def test_the_next_judgement_is_that_of_the_longest_silent_worker(state: MonitoredCluster) -> None:
    assert state.next_judgement_s(0.0) is None
    state.absorb(make_report(0, worker="a"), 0.0)
    state.absorb(make_report(0, worker="b"), 1.0)
    assert state.next_judgement_s(1.0) == 1.5
    state.judge(1.5)
    assert state.next_judgement_s(1.5) == 2.5


def test_a_worker_of_another_protocol_is_shown_dead_by_name_until_it_is_silent(state: MonitoredCluster) -> None:
    state.absorb(make_report(5), 0.0)
    names(state)
    assert state.absorb_incompatible(WorkerId("w"), "2", 1.0) is ReportVerdict.ACCEPTED
    assert state.absorb_incompatible(WorkerId("w"), "2", 1.5) is ReportVerdict.ACCEPTED
    assert names(state) == ["worker_incompatible"]
    (status,) = state.make_view(1.5, 0).workers
    assert (status.incompatible, status.liveness, status.report.phase) == ("2", Liveness.DEAD, WorkerPhase.STOPPED)
    state.judge(4.6)
    assert shown(state, 4.6) == {}
    assert names(state) == []


def test_a_worker_that_speaks_our_protocol_again_is_used_again(state: MonitoredCluster) -> None:
    state.absorb_incompatible(WorkerId("w"), "2", 0.0)
    names(state)
    assert state.absorb(make_report(0), 0.5) is ReportVerdict.ACCEPTED
    assert names(state) == ["worker_ready"]
    (status,) = state.make_view(0.5, 0).workers
    assert (status.incompatible, status.liveness) == ("", Liveness.ALIVE)


def test_incompatible_workers_count_as_workers() -> None:
    state = make_state(max_workers=1)
    state.absorb(make_report(0), 0.0)
    assert state.absorb_incompatible(WorkerId("x"), "2", 0.0) is ReportVerdict.FULL
    assert state.absorb_incompatible(WorkerId("w"), "2", 0.0) is ReportVerdict.ACCEPTED


def test_what_waits_in_dispatchers_is_added_up_by_model_and_tier_and_forgotten_with_them(
    state: MonitoredCluster,
) -> None:
    def said(name: str, *rows: tuple[str, str, int, int]) -> DispatcherReport:
        waiting = [WaitingRequests(model=m, tier=t, num_requests=n, num_tokens=k) for m, t, n, k in rows]
        return DispatcherReport(dispatcher_id=DispatcherId(name), waiting=tuple(waiting))

    def waiting(now_s: float) -> list[tuple[str, str, int, int]]:
        rows = state.make_view(now_s, 0).waiting
        return [(row.model, row.tier, row.num_requests, row.num_tokens) for row in rows]

    state.absorb_waiting(said("d0", ("m", "flex", 3, 30), ("m", "default", 1, 10)), 0.0)
    state.absorb_waiting(said("d1", ("m", "flex", 2, 25), ("n", "flex", 1, 5)), 2.0)
    assert waiting(2.0) == [("m", "default", 1, 10), ("m", "flex", 5, 55), ("n", "flex", 1, 5)]
    state.judge(PARAMS.dead_after_s)
    assert waiting(3.0) == [("m", "flex", 2, 25), ("n", "flex", 1, 5)]
    state.absorb_waiting(said("d1"), 3.5)
    assert not waiting(3.5)
