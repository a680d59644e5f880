"""What must hold of a run whatever failed: the invariants of the design, apart from the workload. Pure.

I1  each admitted request ends exactly once, legally and in time      I5  no request changes another one's tokens
I2  its text is the fault-free one, and nothing is sent twice         I6  epochs and attempts only grow
I3  usage is what was delivered                                       I7  recovery time and memory are bounded
I4  nothing is left anywhere when all is over                         I8  see the campaign: every path was reached
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType

from services.dispatcher.session.request import FailureCode
from services.worker.modelled.shadow_kv import TokenDraw
from shared.types import FinishReason
from sim.faults.cluster import CallOutcome, ClientCall, Peaks, describe_call
from sim.faults.kinds import BROKER, GROUP_KINDS, MAX_DELAY_S, MESSAGE_KINDS, Fault, FaultKind
from sim.faults.nodes import POISON_SEED
from sim.faults.scenario import MONITOR, FaultScenario
from sim.requests import SimAnswer, undisturbed_text
from sluice_client.qoe import QoeTarget, final_qoe

CALM_GAP_S = 4.0
"""Longest pause that a reader sees while nothing fails; the clusters are small and often full."""
FULL_S = 10.0
"""And beyond that where requests are moved at random, and little fails, so that all of them are there at a time, and
one worker is filled by others' requests: 13.1 s once in 2 000 seeds, where without moves somebody waits for 7.7 s."""
RECOVERY_S = 12.0
"""What a fault may cost beyond its own duration."""
CLOCK_SLACK_S = 1.1
"""By how much a worker and a dispatcher may differ about the end of a request's time; the sweep comes by period."""
QOE_TOLERANCE = 1e-6
QUEUE_S = 30.0
"""How long a request waits for room before it is refused."""
MAX_TASKS_PER_REQUEST = 8
MAX_IDLE_TASKS = 24
MAX_ON_THE_WAY = 20_000


class Checker:
    """Judges the calls of one run.

    Args:
        scenario: what was to happen.
        begun_s: when the faults' clock began.
        draw: how the modelled device chooses tokens.
        felt: the processes that a fault is felt by; the target alone where nothing is said.
    """

    def __init__(
        self,
        scenario: FaultScenario,
        begun_s: float,
        draw: TokenDraw,
        felt: Mapping[Fault, frozenset[str]] = MappingProxyType({}),
    ) -> None:
        self._scenario = scenario
        self._begun_s = begun_s
        self._draw = draw
        self._felt = felt
        self._has_poison = any(ask.request.seed == POISON_SEED for ask in scenario.asks)

    def judge(self, calls: Sequence[ClientCall]) -> list[str]:
        """Return what is wrong with the calls, in words."""
        return [fault for call in calls for fault in self._judge_call(call)]

    def _judge_call(self, call: ClientCall) -> Iterator[str]:
        name = describe_call(call)
        if call.outcome is CallOutcome.OPEN:
            yield f"I1: {name} never ended"
        if call.outcome is CallOutcome.REFUSED and not self._may_fail(call, call.code):
            yield f"I1: {name} was refused without a cause"
        if call.outcome is CallOutcome.CUT and not self._troubles(
            {call.dispatcher, BROKER}, call.begun_s, call.ended_s, QUEUE_S
        ):
            yield f"I1: {name} lost its connection, but its dispatcher was well"
        for answer in call.answers:
            yield from self._judge_answer(call, answer)

    def _judge_answer(self, call: ClientCall, answer: SimAnswer) -> Iterator[str]:
        name, text = describe_call(call), undisturbed_text(replace(answer.request, stop_after=None), self._draw)
        if answer.tokens != text[: len(answer.tokens)]:
            wrong = next(i for i, (a, b) in enumerate(zip(answer.tokens, [*text, None], strict=False)) if a != b)
            yield f"I2: {name} differs from the fault-free text at token {wrong}"
        if answer.num_counted is not None and answer.num_counted != len(answer.tokens):
            yield f"I3: {name} counts {answer.num_counted} tokens"
        yield from self._judge_logprobs(name, answer)
        yield from _judge_qoe(name, answer)
        if call.outcome is not CallOutcome.ANSWERED:
            return
        yield from self._judge_gaps(call, answer)
        yield from self._judge_end(call)
        if answer.failure is not None:
            if not self._may_fail(call, answer.failure, answer):
                yield f"I1: {name} failed without a cause"
        elif not _is_whole(answer, text):
            yield f"I2: {name} ended before its text did"

    def _judge_logprobs(self, name: str, answer: SimAnswer) -> Iterator[str]:
        if answer.logprobs is None or answer.request.logprobs is None:
            return
        if len(answer.logprobs) != len(answer.tokens):
            yield f"I3: {name} has {len(answer.logprobs)} log-probabilities"
        for token, found in zip(answer.tokens, answer.logprobs, strict=False):
            if found is not None and found != self._draw.logprob(token, answer.request.logprobs):
                yield f"I2: {name} has another token's log-probability"

    def _may_fail(self, call: ClientCall, code: FailureCode | None, answer: SimAnswer | None = None) -> bool:
        """Return whether the plan gives a cause for this end."""
        begun_s, ended_s = call.begun_s, call.ended_s
        match code:
            case FailureCode.NO_CAPACITY | FailureCode.MODEL_LOADING | FailureCode.QUEUE_FULL:
                return _is_late(call) or self._had_no_worker(call.dispatcher, begun_s, ended_s)
            case FailureCode.DRAINING:
                restarts = [fault for fault in self._scenario.plan.faults if fault.kind is FaultKind.RESTART]
                return any(fault.target == call.dispatcher for fault in restarts)
            case FailureCode.REQUEST_FAILED:
                return self._may_be_blamed(answer)
            case FailureCode.TIMED_OUT:
                return _is_late(call)
            case FailureCode.RESOURCE_UNAVAILABLE:
                return _is_late(call) and call.ask.request.tier.is_best_effort
        return False

    def _had_no_worker(self, dispatcher: str, begun_s: float, ended_s: float) -> bool:
        if self._has_poison or self._troubles({dispatcher, MONITOR, BROKER}, begun_s, ended_s, RECOVERY_S):
            return True
        faults = self._overlapping(begun_s, ended_s, RECOVERY_S)
        struck = {name for fault in faults for name in self._felt.get(fault, {fault.target})}
        return struck.issuperset(worker.worker_id for worker in self._scenario.workers)

    def _may_be_blamed(self, answer: SimAnswer | None) -> bool:
        """A poison request, a step that failed by chance, or one that was there when two workers were lost."""
        if answer is not None and answer.request.seed == POISON_SEED:
            return True
        names = {worker.worker_id for worker in self._scenario.workers}
        faults = self._scenario.plan.faults
        struck = [fault for fault in faults if fault.target in names and fault.kind not in GROUP_KINDS]
        failing = any(fault.kind is FaultKind.FAILING_STEP for fault in struck)
        return failing or len(struck) + 2 * self._has_poison >= 2

    def _judge_gaps(self, call: ClientCall, answer: SimAnswer) -> Iterator[str]:
        """I7: each fault costs a reader at most its own duration and the time to recover."""
        if call.ask.request.tier.is_best_effort:
            return  # it waits as long as others need
        times = [call.begun_s, *(call.answers[0].arrival_s + at_s for at_s in answer.delivered_s), call.ended_s]
        for before_s, after_s in pairwise(times):
            calm_s = CALM_GAP_S + (FULL_S if self._scenario.plan.moves else 0.0)
            allowed_s = calm_s + sum(
                RECOVERY_S + fault.duration_s + (MAX_DELAY_S if fault.kind in MESSAGE_KINDS else 0.0)
                for fault in self._overlapping(before_s, after_s, RECOVERY_S)
            )
            if after_s - before_s > allowed_s + (QUEUE_S if self._has_poison else 0.0):
                yield f"I7: {describe_call(call)} paused for {after_s - before_s:.1f} s from {before_s:.1f} s on"

    def _judge_end(self, call: ClientCall) -> Iterator[str]:
        """I1: it ended in its time, unless its dispatcher stood still meanwhile."""
        struck = self._overlapping(call.begun_s, call.ended_s, 0.0)
        still_s = sum(fault.duration_s for fault in struck if fault.target == call.dispatcher)
        if call.ended_s - call.begun_s > call.ask.request.limit_s + CLOCK_SLACK_S + still_s:
            yield f"I1: {describe_call(call)} ended after its limit of {call.ask.request.limit_s:g} s"

    def _troubles(self, names: set[str], begun_s: float, ended_s: float, after_s: float) -> bool:
        return any(fault.target in names for fault in self._overlapping(begun_s, ended_s, after_s))

    def _overlapping(self, begun_s: float, ended_s: float, after_s: float) -> Iterator[Fault]:
        """Return the faults that may still be felt in this time."""
        for fault in self._scenario.plan.faults:
            late_s = after_s + (MAX_DELAY_S if fault.kind in MESSAGE_KINDS else 0.0)
            if self._begun_s + fault.at_s <= ended_s and begun_s <= self._begun_s + fault.end_s + late_s:
                yield fault


def _judge_qoe(name: str, answer: SimAnswer) -> Iterator[str]:
    """I3: the dispatcher's estimate is that of the tokens as they came."""
    target = answer.request.qoe
    if answer.num_counted is None or answer.num_before_reader:
        return
    if (answer.qoe is None) != (target is None):
        yield f"I3: {name} has QoE {answer.qoe}, its request names {target}"
    elif answer.qoe is not None and target is not None:
        expected = final_qoe(QoeTarget(target.ttft_s, target.speed_tokens_per_s), answer.delivered_s)
        if abs(answer.qoe - expected) > QOE_TOLERANCE:
            yield f"I3: {name} has QoE {answer.qoe:.3f}, its tokens give {expected:.3f}"


def _is_late(call: ClientCall) -> bool:
    """Return whether the call's time was over when it ended."""
    return call.ended_s - call.begun_s >= call.ask.request.limit_s - CLOCK_SLACK_S


def _is_whole(answer: SimAnswer, text: Sequence[int]) -> bool:
    """Return whether the answer ended where it should: at its length, or when its reader had enough."""
    if answer.finish is FinishReason.LENGTH:
        return len(answer.tokens) == len(text)
    enough = answer.request.stop_after
    return answer.finish is FinishReason.STOP and enough is not None and len(answer.tokens) >= enough


def judge_numbers(epochs: Sequence[int], attempts: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """I6: return which numbers did not grow.

    Args:
        epochs: of the plans, by revision.
        attempts: of the submissions of each session, in the order in which the broker saw them.
    """
    if any(after <= before for before, after in pairwise(epochs)):
        yield f"I6: the epochs of the plans do not grow: {list(epochs)}"
    for session, numbers in attempts.items():
        if any(after <= before for before, after in pairwise(numbers)):
            yield f"I6: the attempts of {session} do not grow: {list(numbers)}"


def judge_peaks(peaks: Peaks, num_requests: int) -> Iterator[str]:
    """I7: return what grew beyond its bound."""
    most = MAX_IDLE_TASKS + MAX_TASKS_PER_REQUEST * num_requests
    for name, num_tasks in peaks.num_tasks.items():
        if num_tasks > most:
            yield f"I7: {name} had {num_tasks} tasks, for {num_requests} requests"
    if peaks.num_on_the_way > MAX_ON_THE_WAY:
        yield f"I7: {peaks.num_on_the_way} messages were on their way"
