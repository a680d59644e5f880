"""Whether a request may come in at all: early and plainly, instead of late and by time-out. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Admission(StrEnum):
    """The decision."""

    ADMIT = "admit"
    DRAINING = "draining"  # this dispatcher is shutting down; another one may serve
    LOADING = "loading"  # no worker is ready, some are loading
    NO_WORKER = "no_worker"  # no worker is alive
    TOO_MANY = "too_many"  # as many requests as the limits allow are here already


@dataclass(frozen=True, slots=True)
class AdmissionInput:
    """What the decision looks at."""

    draining: bool
    num_requests: int
    """Requests of this dispatcher that run or wait."""
    max_requests: int
    num_queued: int
    """Of these, the ones for which no worker had room yet and behind which this one would wait."""
    max_queued: int
    num_ready_workers: int
    num_loading_workers: int
    num_new: int = 1
    """Sequences that the request needs (`n` choices)."""


def decide_admission(state: AdmissionInput) -> Admission:
    """Return whether the request may come in; the first reason that holds refuses it."""
    if state.draining:
        return Admission.DRAINING
    if state.num_ready_workers == 0:
        return Admission.LOADING if state.num_loading_workers else Admission.NO_WORKER
    if state.num_requests + state.num_new > state.max_requests or state.num_queued >= state.max_queued:
        return Admission.TOO_MANY
    return Admission.ADMIT
