"""The checkers notice what they are there for: each law broken by hand, and the same run unbroken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from services.dispatcher.session.request import FailureCode
from services.worker.modelled.shadow_kv import TokenDraw
from shared.cost import CostModel
from shared.types import FinishReason, ReaderTarget
from sim.faults.checkers import Checker, judge_numbers, judge_peaks
from sim.faults.cluster import CallOutcome, ClientCall, Peaks
from sim.faults.kinds import Fault, FaultKind, FaultPlan
from sim.faults.nodes import POISON_SEED
from sim.faults.scenario import Ask, FaultScenario
from sim.requests import SimAnswer, SimRequest, undisturbed_text
from sim.worker import SimWorkerParams
from sluice_client.qoe import QoeTarget, final_qoe

DRAW = TokenDraw.of_vocabulary(500, (2,), 256)
READER = QoeTarget(1.0, 4.8)
COST = CostModel(0.06, 0.0, 0.0, 0.0, 0.0, 0.0)


def ask(*, seed: int = 1, stop_after: int | None = None) -> Ask:
    request = SimRequest(
        "r", np.arange(300, 320), 20, seed=seed, stop_after=stop_after, qoe=ReaderTarget(), limit_s=60.0
    )
    return Ask(1.0, request, 1, 0, None)


def scenario(*faults: Fault, asks: tuple[Ask, ...] = ()) -> FaultScenario:
    workers = tuple(SimWorkerParams(f"w{i}", COST, 50) for i in range(2))
    return FaultScenario(0, workers, ("d0",), ("planner0",), asks, FaultPlan(faults, 0))


def whole_call(asked: Ask | None = None, *, begun_s: float = 101.0) -> ClientCall:
    """An answer of 20 tokens, one every 60 ms."""
    asked = ask() if asked is None else asked
    text = undisturbed_text(asked.request, DRAW)
    times = [0.06 * (i + 1) for i in range(len(text))]
    answer = SimAnswer(asked.request, begun_s, text, times, FinishReason.LENGTH, qoe=1.0, num_counted=len(text))
    return ClientCall(asked, "d0", begun_s, [answer], CallOutcome.ANSWERED, ended_s=begun_s + 1.2)


def judge(call: ClientCall, *faults: Fault) -> list[str]:
    """Faults begin at 100 s."""
    return [line.partition(":")[0] for line in Checker(scenario(*faults), 100.0, DRAW).judge([call])]


def test_a_whole_answer_is_right() -> None:
    assert judge(whole_call()) == []


def _change_token(call: ClientCall) -> None:
    call.answers[0].tokens[7] += 1


def _send_twice(call: ClientCall) -> None:
    call.answers[0].tokens.insert(7, call.answers[0].tokens[7])
    call.answers[0].num_counted = 21


def _end_early(call: ClientCall) -> None:
    del call.answers[0].tokens[15:]
    call.answers[0].num_counted = 15


def _pause(call: ClientCall) -> None:
    answer = call.answers[0]
    answer.delivered_s[10:] = [at_s + 9.0 for at_s in answer.delivered_s[10:]]
    answer.qoe = final_qoe(READER, answer.delivered_s)
    call.ended_s += 9.0


def _overrun(call: ClientCall) -> None:
    call.ask = replace(call.ask, request=replace(call.ask.request, limit_s=0.05))


def _refuse(call: ClientCall) -> None:
    call.outcome, call.code = CallOutcome.REFUSED, FailureCode.NO_CAPACITY


def on_call(name: str, value: object) -> Callable[[ClientCall], None]:
    return lambda call: setattr(call, name, value)


def on_answer(name: str, value: object) -> Callable[[ClientCall], None]:
    return lambda call: setattr(call.answers[0], name, value)


_cut = on_call("outcome", CallOutcome.CUT)


@pytest.mark.parametrize(
    ("damage", "law"),
    [
        (_change_token, "I2"),
        (_send_twice, "I2"),
        (on_answer("num_counted", 19), "I3"),
        (_end_early, "I2"),
        (_pause, "I7"),
        (on_answer("qoe", 0.9), "I3"),
        (on_answer("qoe", None), "I3"),
        (_overrun, "I1"),
        (on_answer("failure", FailureCode.TIMED_OUT), "I1"),
        (on_answer("failure", FailureCode.INTERNAL), "I1"),
        (on_call("outcome", CallOutcome.OPEN), "I1"),
        (_refuse, "I1"),
        (_cut, "I1"),
    ],
)
def test_each_broken_law_is_named(damage: Callable[[ClientCall], None], law: str) -> None:
    call = whole_call()
    damage(call)
    assert set(judge(call)) == {law}


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (_pause, Fault(1.5, FaultKind.CRASH, "w0", 1.0)),
        (_refuse, Fault(0.5, FaultKind.PARTITION, "monitor", 5.0)),
        (_cut, Fault(1.5, FaultKind.CRASH, "d0", 1.0)),
    ],
)
def test_what_a_fault_explains_is_no_violation(damage: Callable[[ClientCall], None], fault: Fault) -> None:
    call = whole_call()
    damage(call)
    assert judge(call, fault) == []
    assert judge(call, replace(fault, at_s=60.0)) != [], "a fault that came later explains nothing"


def test_no_capacity_needs_that_every_worker_was_struck() -> None:
    call = whole_call()
    _refuse(call)
    one, other = (Fault(0.5, FaultKind.CRASH, name, 5.0) for name in ("w0", "w1"))
    assert judge(call, one) == ["I1"]
    assert judge(call, one, other) == []


def test_no_capacity_is_explained_by_a_fault_that_every_worker_feels() -> None:
    """They are one group, and its leader leaves; a fault of which nothing is said is its target's alone."""
    call = whole_call()
    _refuse(call)
    fault = Fault(0.5, FaultKind.RESTART, "w0", 5.0)
    for felt, laws in (({"w0", "w1"}, []), ({"w0"}, ["I1"])):
        checker = Checker(scenario(fault), 100.0, DRAW, {fault: frozenset(felt)})
        assert [line.partition(":")[0] for line in checker.judge([call])] == laws


def test_only_poison_and_what_was_at_two_lost_workers_may_be_blamed() -> None:
    blamed = whole_call()
    blamed.answers[0].failure = FailureCode.REQUEST_FAILED
    crash = Fault(0.5, FaultKind.CRASH, "w0", 5.0)
    assert judge(blamed, crash) == ["I1"]
    assert judge(blamed, crash, replace(crash, target="w1")) == []
    poison = whole_call(ask(seed=POISON_SEED))
    poison.answers[0].failure = FailureCode.REQUEST_FAILED
    assert judge(poison) == []


def test_a_reader_that_has_enough_ends_its_answer() -> None:
    call = whole_call(ask(stop_after=7))
    call.answers[0].finish = FinishReason.STOP
    assert judge(call) == []
    call.answers[0].request = replace(call.answers[0].request, stop_after=None)
    call.answers[0].tokens.pop()
    call.answers[0].num_counted = 6
    assert judge(call) == ["I2"]


def test_numbers_and_sizes() -> None:
    assert list(judge_numbers([1, 2, 5], {"a": [1, 2], "b": [1]})) == []
    assert len(list(judge_numbers([1, 1], {"a": [2, 2], "b": [1]}))) == 2
    assert list(judge_peaks(Peaks({"w0": 20}, 50), 10)) == []
    assert len(list(judge_peaks(Peaks({"w0": 2000}, 50_000), 10))) == 2
