"""Has workers carry a plan out, all of them or none: prepare, commit, and abort where a single one cannot.

    begin ──► PREPARING ──every worker is prepared──► COMMITTING ──every worker is done, or lost──► DONE
                  │                                       ▲                                          ▲
                  └─refused, silent, too late: abort──────┼──────────────────────────────────────────┘
                                                          └─ no way back: driven on by whoever is the planner

Each arrow is a write of the plan key by compare-and-set, before anybody is told. So a planner that takes over knows
what may have been said: PREPARING is abandoned, COMMITTING is driven on. What a worker makes of it is idempotent, so
questions may be asked again. A worker that fails, or is lost, needs no repair from here: it, and the members of its
group, become whole instances by themselves.

A step says in which waves its workers are told (`shared.messages.plan`). Where those of one wave did not do it, the
others are told to go on as before, although the plan is committed.

Each question goes under the newest epoch that this planner holds: errands, and other plans, may be under way beside.

No decision is taken here. Source: the project's own design (KunServe says nothing of failures on the way).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter

from services.planner.book import PlanBook
from services.planner.orders import Orders
from services.planner.policy.plans.intent import Intent, PlanOutcome, names_of
from shared.ids import WorkerId
from shared.messages.base import ControlMessage
from shared.messages.plan import (
    AbortPlan,
    CommitPlan,
    Plan,
    PlanAnswer,
    PlannedWorker,
    PlanPhase,
    PlanState,
    PreparePlan,
    RestoreInstance,
    Step,
)
from shared.subjects import Subjects
from shared.transport.bus import Bus, BusError
from shared.wire import WireError

_R = TypeVar("_R")
_ANSWER: TypeAdapter[PlanAnswer] = TypeAdapter(PlanAnswer)
_Answer = PlanAnswer | str | None
"""What a worker said, or why it never will; None: it was not waited for."""
MAX_REASONS = 4
"""Workers whose troubles a reason tells."""


@dataclass(frozen=True, slots=True)
class ExecutionParams:
    """Limits, seconds."""

    prepare_limit_s: float = 2.0
    """For a worker to say that it is prepared; readers stand still meanwhile."""
    move_limit_s: float = 5.0
    """For the leader of a group that loads beside to say so, or for the members of one that dissolves: KV moves before,
    and they serve meanwhile."""
    prepared_limit_s: float = 5.0
    """After which a worker that was prepared goes on as it was, if it hears nothing."""
    ask_limit_s: float = 2.0
    """For one answer to a commit or an abort, before it is asked again."""
    retry_s: float = 0.1
    """Pause before it is asked again, where nobody answers."""
    commit_limit_s: float = 60.0
    """After which a worker that is alive but does not answer counts as failed."""

    def __post_init__(self) -> None:
        if self.prepared_limit_s <= self.prepare_limit_s:
            raise ValueError("prepared_limit_s must exceed prepare_limit_s: who is prepared waits for the others")


class PlanExecution:
    """Carries out one plan at a time.

    Args:
        bus: connected.
        subjects: of the cluster.
        book: claimed.
        params: limits.
        find_loss: returns why this process of a worker will never answer, or None while it may.
        announce: tells people the name of what happened, and the reason.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        book: PlanBook,
        params: ExecutionParams,
        find_loss: Callable[[PlannedWorker], str | None],
        announce: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._orders = Orders(bus, subjects, book)
        self._book = book
        self._params = params
        self._find_loss = find_loss
        self._announce = announce

    async def carry_out(self, intent: Intent) -> PlanOutcome:
        """Begin a plan and see it to its end.

        Raises:
            SupersededError: another planner took over, which sees to the rest.
            BusError: what the plan key holds is unknown; `take_up` after a claim.
        """
        began_s = _now_s()
        plan = await self._book.begin(intent.lever, intent.reason, intent.steps)
        await self._announce("plan_preparing", f"plan {plan.plan_id}: {names_of(plan)}: {plan.reason}")
        trouble = await self._prepare(plan)
        late_s = _now_s() - began_s
        move_s = max(map(self._move_s, plan.steps), default=0.0)
        if trouble is None and late_s >= self._params.prepared_limit_s + move_s:
            trouble = f"it took {late_s:.1f} s until all were prepared, who was first has given up"
        if trouble is not None:
            return await self._abort(plan, trouble, began_s)
        plan = await self._book.advance(PlanPhase.COMMITTING, plan.reason)
        count = len(plan.workers)
        await self._announce(
            "plan_committed", f"plan {plan.plan_id}: {count} workers are prepared after {late_s:.3f} s"
        )
        return await self._commit(plan, began_s)

    async def take_up(self, plan: Plan) -> PlanOutcome:
        """See a plan to its end that was begun before, by whomever.

        Raises:
            SupersededError, BusError: as `carry_out`.
        """
        assert plan.phase is not PlanPhase.DONE, "something is left to do"
        if plan.phase is PlanPhase.PREPARING:
            return await self._abort(plan, "its planner was lost before every worker was prepared", _now_s())
        await self._announce("plan_committed", f"plan {plan.plan_id}: taken up, it was being carried out")
        return await self._commit(plan, _now_s())

    async def _prepare(self, plan: Plan) -> str | None:
        """Return None once every worker is prepared, or the first trouble.

        Who moves KV first may take its time, and the other workers of the step wait for it.
        """
        asks = []
        for step in plan.steps:
            move_s = self._move_s(step)
            for worker in step.workers:
                own_s, others_s = (move_s, 0.0) if worker in step.movers else (0.0, move_s)
                prepared_s = self._params.prepared_limit_s + others_s
                question = PreparePlan(epoch=plan.epoch, plan_id=plan.plan_id, step=step, limit_s=prepared_s)
                limit_s = max(self._params.prepare_limit_s, own_s)
                asks.append(self._prepare_one(plan, worker, question, limit_s))
        troubles = await _together(asks, is_enough=lambda trouble: trouble is not None)
        return next((trouble for trouble in troubles if trouble is not None), None)

    def _move_s(self, step: Step) -> float:
        """Return how long KV may move before the workers of a step are prepared."""
        return self._params.move_limit_s if step.movers else 0.0

    async def _prepare_one(self, plan: Plan, worker: PlannedWorker, message: PreparePlan, limit_s: float) -> str | None:
        try:
            answer = await self._ask(plan, worker, message, limit_s)
        except (BusError, WireError) as error:
            return f"{worker.worker_id}: {error}"
        if answer.state is PlanState.PREPARED:
            return None
        return f"{worker.worker_id}: {answer.state}{_because(answer.reason)}"

    async def _abort(self, plan: Plan, trouble: str, began_s: float) -> PlanOutcome:
        """Tell every worker, and close the plan."""
        await self._end(plan, plan.workers, commits=False)
        reason = f"plan {plan.plan_id} abandoned: {trouble}"
        await self._book.advance(PlanPhase.DONE, reason)
        await self._announce("plan_aborted", f"{reason} ({plan.reason})")
        return _outcome(plan, reason, _now_s() - began_s, is_done=False)

    async def _commit(self, plan: Plan, began_s: float) -> PlanOutcome:
        by_step = await _together([self._commit_step(plan, step) for step in plan.steps])
        answers = {name: answer for answered in by_step for name, answer in (answered or {}).items()}
        latency_s = _now_s() - began_s
        names = [worker.worker_id for worker in plan.workers]
        done = tuple(name for name in names if _state(answers[name]) is PlanState.DONE)
        troubles = [f"{name}: {_trouble(answers[name])}" for name in names if name not in done]
        what = f"plan {plan.plan_id}: carried out by {len(done)} of {len(names)} workers in {latency_s:.3f} s"
        rooms = _rooms(plan, answers)
        reason = "; ".join([what, *troubles[:MAX_REASONS], *rooms[:MAX_REASONS]])
        await self._book.advance(PlanPhase.DONE, f"{reason}: {plan.reason}")
        await self._announce("plan_failed" if troubles else "plan_done", f"{reason}: {plan.reason}")
        return _outcome(plan, reason, latency_s, done, is_done=not troubles)

    async def _commit_step(self, plan: Plan, step: Step) -> dict[WorkerId, _Answer]:
        """Return what each worker of a step says at the end."""
        answers: dict[WorkerId, _Answer] = {}
        for workers in step.waves:
            are_done = all(_state(answer) is PlanState.DONE for answer in answers.values())
            said = await self._end(plan, workers, commits=are_done)
            answers |= {worker.worker_id: answer for worker, answer in zip(workers, said, strict=True)}
        return answers

    async def _end(self, plan: Plan, workers: Sequence[PlannedWorker], *, commits: bool) -> list[_Answer]:
        """Tell these workers to commit; or to abort, as long as one may still be prepared."""
        message = (CommitPlan if commits else AbortPlan)(epoch=plan.epoch, plan_id=plan.plan_id)
        limit_s = self._params.commit_limit_s if commits else self._params.prepared_limit_s
        return await _together([self._finish(plan, worker, message, limit_s) for worker in workers])

    async def _finish(
        self, plan: Plan, worker: PlannedWorker, message: CommitPlan | AbortPlan, limit_s: float
    ) -> PlanAnswer | str:
        """Ask until the worker has answered for good; return why it never will, if it is lost, or the time is over."""
        until_s = _now_s() + limit_s
        last = "no answer"
        while (left_s := until_s - _now_s()) > 0:
            loss = self._find_loss(worker)
            if loss is not None:
                return loss
            try:
                answer = await self._ask(plan, worker, message, min(self._params.ask_limit_s, left_s))
            except (BusError, WireError) as error:
                last = str(error)
            else:
                if answer.state is not PlanState.PREPARED:
                    return answer
                last = "it is prepared and does not go on"
            await asyncio.sleep(self._params.retry_s)
        return f"{last}, for {limit_s:g} s"

    async def _ask(self, plan: Plan, worker: PlannedWorker, message: ControlMessage, timeout_s: float) -> PlanAnswer:
        """Return the worker's answer.

        Raises:
            SupersededError, BusError: as `Orders.ask`.
            WireError: the answer is none, or to another question.
        """
        answer = await self._orders.ask(worker.worker_id, message, _ANSWER, timeout_s)
        if (answer.worker_id, answer.plan_id) != (worker.worker_id, plan.plan_id):
            raise WireError(f"the answer is {answer.worker_id}'s, about plan {answer.plan_id}")
        return answer


async def _together(
    asks: Sequence[Coroutine[Any, Any, _R]], is_enough: Callable[[_R], bool] = lambda _: False
) -> list[_R | None]:
    """Run all at once; return their results in order, None for those that were broken off because it was enough.

    An error of one ends the others, and is raised.
    """
    tasks = [asyncio.create_task(ask) for ask in asks]
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if any(is_enough(task.result()) for task in done):
                break
        return [task.result() if task.done() else None for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _outcome(
    plan: Plan, reason: str, latency_s: float, done: tuple[WorkerId, ...] = (), *, is_done: bool
) -> PlanOutcome:
    return PlanOutcome(is_done, reason, plan.plan_id, latency_s, plan.lever, plan.steps, done)


def _rooms(plan: Plan, answers: Mapping[WorkerId, _Answer]) -> list[str]:
    """Return what each group that claims room for KV has, in words: what the least of its stages says.

    Nothing of a group that did not come about, or whose workers do not say.
    """
    said = []
    for step in plan.steps:
        if isinstance(step, RestoreInstance) or not step.num_blocks:
            continue
        found = [answers[worker.worker_id] for worker in step.workers]
        room = min((each.num_blocks if isinstance(each, PlanAnswer) else 0 for each in found), default=0)
        if room and all(_state(each) is PlanState.DONE for each in found):
            names = "+".join(worker.worker_id for worker in step.workers)
            claimed = "as claimed" if room == step.num_blocks else f"{step.num_blocks} were claimed"
            said.append(f"{names} have {room} KV blocks, {claimed}")
    return said


def _state(answer: _Answer) -> PlanState | None:
    return answer.state if isinstance(answer, PlanAnswer) else None


def _trouble(answer: _Answer) -> str:
    return f"{answer.state}{_because(answer.reason)}" if isinstance(answer, PlanAnswer) else str(answer)


def _because(reason: str) -> str:
    return f", {reason}" if reason else ""


def _now_s() -> float:
    return asyncio.get_running_loop().time()
