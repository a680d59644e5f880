"""Plans carried out by workers whose every answer is written down here: what is believed, and for how long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from services.planner.book import PlanBook
from services.planner.execution import ExecutionParams, PlanExecution
from services.planner.policy.plans.intent import DROP, LOAD, RESTORE, Intent, PlanOutcome
from shared.ids import Incarnation, WorkerId
from shared.messages.plan import (
    FormGroup,
    LoadBeside,
    PlanAnswer,
    PlannedStage,
    PlannedWorker,
    PlanState,
    RestoreInstance,
)
from shared.subjects import Subjects
from shared.transport.bus import Endpoint, Message, ServiceInfo
from shared.transport.memory_bus import MemoryBroker
from shared.wire import encode_json
from sim.virtual_time import run

SUBJECTS = Subjects()
NAMES = (WorkerId("w0"), WorkerId("w1"))
HALVES = ((0, 4), (4, 8))
PLAN_ID = 2
"""The epoch of the claim is 1."""
PARAMS = ExecutionParams()
PREPARED, DONE, ABORTED = PlanState.PREPARED, PlanState.DONE, PlanState.ABORTED
Said = Callable[[WorkerId], PlanAnswer]


def says(state: PlanState, *, plan_id: int = PLAN_ID, by: str = "", epoch: int = 1) -> Said:
    """An answer; by the worker that is asked unless it says that it is another one."""
    return lambda name: PlanAnswer(
        worker_id=WorkerId(by) or name, plan_id=plan_id, state=state, newest_epoch=epoch, num_blocks=0
    )


def played(
    intent: Intent,
    answer: Callable[[PlanBook, WorkerId, dict[str, Any]], Awaitable[PlanAnswer]],
    announce_s: float = 0.0,
) -> tuple[PlanOutcome, float]:
    """Carry something out with workers that answer so; return what became of it, and the seconds that it took.

    Args:
        intent: for workers of `NAMES`.
        answer: given the planner's book, the worker that is asked, and the question.
        announce_s: until people have heard of the plan.
    """

    async def main() -> tuple[PlanOutcome, float]:
        broker = MemoryBroker()
        bus = broker.connect("planner")
        book = PlanBook(await bus.key_value(SUBJECTS.plan_bucket()))
        await book.claim("test")
        for name in NAMES:

            async def reply(message: Message, name: WorkerId = name) -> bytes:
                return encode_json(await answer(book, name, json.loads(message.data)))

            info = ServiceInfo("sluice-worker", "1.0.0", "answers by heart", {}, name)
            await broker.connect(name).serve(info, [Endpoint("plan", SUBJECTS.plan(name), reply)])

        async def announce(name: str, _reason: str) -> None:
            await asyncio.sleep(announce_s if name == "plan_preparing" else 0)

        execution = PlanExecution(bus, SUBJECTS, book, PARAMS, lambda _: None, announce)
        begun_s = asyncio.get_running_loop().time()
        outcome = await execution.carry_out(intent)
        took_s = asyncio.get_running_loop().time() - begun_s
        await asyncio.sleep(1.0)
        return outcome, took_s

    return run(main())


def carried_out(second: Sequence[Said], announce_s: float = 0.0) -> tuple[PlanOutcome, int, float]:
    """Carry out a plan of two workers: w0 does all, w1 says these things one after the other, the last for ever.

    Returns:
        The outcome, how often w1 was asked, and the seconds that it took.
    """
    script = {NAMES[0]: [says(PREPARED), says(DONE)], NAMES[1]: list(second)}
    asked = dict.fromkeys(NAMES, 0)

    async def answer(_book: PlanBook, name: WorkerId, _question: dict[str, Any]) -> PlanAnswer:
        number, asked[name] = asked[name], asked[name] + 1
        return script[name][min(number, len(script[name]) - 1)](name)

    stages = tuple(
        PlannedStage(worker_id=name, incarnation=Incarnation(0), address="", held=(0, 8), layers=layers)
        for name, layers in zip(NAMES, HALVES, strict=True)
    )
    outcome, took_s = played(Intent(DROP, "by heart", (FormGroup(stages=stages),)), answer, announce_s)
    return outcome, asked[NAMES[1]], took_s


def test_a_plan_is_done_when_all_have_said_so() -> None:
    outcome, num_asked, took_s = carried_out([says(PREPARED), says(DONE)])
    assert outcome.is_done
    assert (outcome.plan_id, outcome.done, num_asked) == (PLAN_ID, NAMES, 2)
    assert took_s < 0.1


def test_each_question_goes_under_the_newest_epoch_that_the_planner_holds() -> None:
    """An errand under a newer epoch comes between prepare and commit: whoever did it hears the commit all the same."""
    heard: list[int] = []

    async def answer(book: PlanBook, name: WorkerId, question: dict[str, Any]) -> PlanAnswer:
        heard.append(question["epoch"])
        if question["kind"] == "prepare_plan":
            return says(PREPARED)(name)
        epoch = (await book.want(None)).epoch if len(heard) == 2 else book.epoch
        return says(PREPARED if len(heard) == 2 else DONE, epoch=epoch)(name)

    step = RestoreInstance(worker=PlannedWorker(worker_id=NAMES[0], held=(0, 4)))
    assert played(Intent(RESTORE, "by heart", (step,)), answer)[0].is_done
    assert heard == [PLAN_ID, PLAN_ID + 1, PLAN_ID + 2]


def test_who_is_still_prepared_when_told_to_commit_is_asked_again() -> None:
    outcome, num_asked, _ = carried_out([says(PREPARED)] * 4 + [says(DONE)])
    assert outcome.is_done
    assert num_asked == 5


def test_an_answer_about_another_plan_or_of_another_worker_counts_for_nothing() -> None:
    for wrong, said in (
        (says(PREPARED, plan_id=PLAN_ID - 1), "w1: the answer is w1's, about plan 1"),
        (says(PREPARED, by="w7"), "w1: the answer is w7's, about plan 2"),
    ):
        outcome, _, _ = carried_out([wrong, says(ABORTED)])
        assert not outcome.is_done
        assert said in outcome.reason
    for wrong in (says(DONE, plan_id=PLAN_ID - 1), says(DONE, by="w0")):
        outcome, num_asked, took_s = carried_out([says(PREPARED), wrong, wrong, says(DONE)])
        assert outcome.is_done
        assert num_asked == 4
        assert took_s >= 2 * PARAMS.retry_s


def test_nothing_is_committed_when_who_was_prepared_may_have_given_up() -> None:
    """Until somebody hears of the plan 4.9 or 5.1 s pass; who is prepared waits for 5."""
    assert carried_out([says(PREPARED), says(DONE)], announce_s=4.9)[0].is_done
    outcome, _, _ = carried_out([says(PREPARED), says(ABORTED)], announce_s=5.1)
    assert not outcome.is_done
    assert "it took 5.1 s until all were prepared" in outcome.reason


def test_a_worker_that_never_ends_a_change_is_given_up_after_a_while() -> None:
    outcome, _, took_s = carried_out([says(PREPARED)])
    assert not outcome.is_done
    assert outcome.done == NAMES[:1]
    assert "w1: it is prepared and does not go on, for 60 s" in outcome.reason
    assert PARAMS.commit_limit_s <= took_s < PARAMS.commit_limit_s + 1


@pytest.mark.parametrize(("moves_s", "is_done"), [(4.9, True), (5.1, False)])
def test_a_leader_that_moves_kv_before_a_load_has_time_and_the_others_wait_for_it(
    moves_s: float, *, is_done: bool
) -> None:
    """A member is prepared at once and waits so much longer; nobody commits before the leader is prepared."""
    asked: list[tuple[str, str, float]] = []

    async def answer(_book: PlanBook, name: WorkerId, question: dict[str, Any]) -> PlanAnswer:
        asked.append((name, question["kind"], question.get("limit_s", asyncio.get_running_loop().time())))
        if question["kind"] == "prepare_plan":
            await asyncio.sleep(moves_s if name == NAMES[0] else 0.0)
            return says(PREPARED)(name)
        return says(DONE if question["kind"] == "commit_plan" else ABORTED)(name)

    stages = tuple(PlannedWorker(worker_id=name, held=layers) for name, layers in zip(NAMES, HALVES, strict=True))
    outcome, _ = played(Intent(LOAD, "by heart", (LoadBeside(stages=stages, num_blocks=9),)), answer)
    assert outcome.is_done is is_done
    prepares, ends = asked[:2], asked[2:]
    limits_s = {name: limit_s for name, kind, limit_s in prepares if kind == "prepare_plan"}
    assert limits_s == {"w0": PARAMS.prepared_limit_s, "w1": PARAMS.prepared_limit_s + PARAMS.move_limit_s}
    if is_done:
        assert [entry[:2] for entry in ends] == [(NAMES[0], "commit_plan"), (NAMES[1], "commit_plan")]
        assert ends[0][2] >= moves_s
    else:
        assert {entry[1] for entry in ends} == {"abort_plan"}
