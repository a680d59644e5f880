"""Whether a request may come in at all: early and plainly, instead of late and by time-out. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.dispatcher.session.request import FailureCode


@dataclass(frozen=True, slots=True)
class AdmissionInput:
    """What the decision looks at."""

    draining: bool
    num_requests: int
    """Real-time requests of this dispatcher that run or wait."""
    max_requests: int | None
    """None for best effort: what of it runs is what workers take, and the rest waits."""
    num_queued: int
    """Of these, the ones for which no worker had room yet and behind which this one would wait."""
    max_queued: int
    """Real-time requests and best effort each have their own limit."""
    num_ready_workers: int
    num_loading_workers: int
    num_new: int = 1
    """Sequences that the request needs (`n` choices)."""
    has_memory: bool = True
    """The prompts of those that wait leave room for more."""


def decide_admission(state: AdmissionInput) -> FailureCode | None:
    """Return the first reason that holds against the request; None: it may come in.

    `QUEUE_FULL`: as many requests as the limits allow are here already.
    """
    if state.draining:
        return FailureCode.DRAINING
    if state.num_ready_workers == 0:
        return FailureCode.MODEL_LOADING if state.num_loading_workers else FailureCode.NO_CAPACITY
    too_many = state.max_requests is not None and state.num_requests + state.num_new > state.max_requests
    if too_many or state.num_queued >= state.max_queued or not state.has_memory:
        return FailureCode.QUEUE_FULL
    return None
