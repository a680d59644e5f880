"""How much load a worker has: by its report, and by what was sent there since, or has left.

A worker looks different to real-time work and to best effort, which waits apart from it:

                 real time                                      best effort
    waiting      real-time sequences                            best effort that waits or gave way
    KV, prompts  real time's, where best effort gives way       everybody's
                 everybody's elsewhere
    room         all                                            where it gives way: all; elsewhere while no real-time
                                                                work waits, and, if want of KV would drop parameters,
                                                                what it fits into at its full length

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.dispatcher.policy.placement import PlacementLoad
from shared.ids import WorkerId
from shared.messages.report import WorkerReport, WorkerStatus, cost_beside_prompts


@dataclass(frozen=True, slots=True)
class Counted:
    """A request, as it is counted at the worker that it was sent to."""

    worker_id: WorkerId
    at_s: float
    """When it was sent there."""
    num_prompt: int
    """Tokens; none of a fork, whose prompt is there already."""
    num_output: int
    """Tokens of output that it had then."""
    is_flex: bool = False
    """It is best effort."""


@dataclass(frozen=True, slots=True)
class PlacementChange:
    """A submission, a beginning or an ending that the report may not contain."""

    at_s: float
    num_sequences: int
    """1, -1, or 0 if one has begun."""
    num_tokens: int
    """That the request had when it was sent; negative if it has left."""
    num_waiting: int = 0
    """By how much those differ that wait there: 1, -1 or 0."""
    num_grown: int = 0
    """Tokens that one that has left had got since it was sent."""
    sent_s: float = 0.0
    is_flex: bool = False
    """See `Counted`."""
    num_cached: int = 0
    """Of the tokens of one that was sent, those that are there already."""

    def tokens_since(self, reported_s: float) -> int:
        """Return by how many tokens the worker's memory differs from what its report of that time says.

        Of what has left, the report has as much output as there was then: tokens come evenly, as far as is known here.
        """
        if reported_s <= self.sent_s or not self.num_grown:
            return self.num_tokens
        return self.num_tokens - int(self.num_grown * (reported_s - self.sent_s) / (self.at_s - self.sent_s))


def reported_loads(
    status: WorkerStatus, *, ready: bool, next_for: tuple[tuple[int, float], ...] = ()
) -> tuple[PlacementLoad, PlacementLoad]:
    """Return a worker's load by its report alone, as real-time work sees it, and best effort."""
    report, flex = status.report, status.report.best_effort
    flex_blocks = flex.num_used_blocks + max(flex.num_demanded_blocks, flex.num_uncomputed_blocks)
    every = PlacementLoad(
        worker_id=report.worker_id,
        ready=ready,
        num_sequences=report.num_running + report.num_waiting + report.num_preempted + report.migration.num_fetching,
        max_sequences=report.max_sequences,
        num_waiting=flex.num_waiting + flex.num_preempted,
        max_waiting=flex.max_parked,
        num_demanded_blocks=report.num_used_blocks + max(report.num_demanded_blocks, report.num_uncomputed_blocks),
        waiting_s=report.num_uncomputed_blocks * report.block_size * _token_s(report),
        token_s=_token_s(report),
        num_blocks=report.num_blocks,
        block_size=report.block_size,
        decode_cost=cost_beside_prompts(report),
        max_request_tokens=_max_request_tokens(status),
        is_closing=bool(report.migration.closing),
        pulled_token_s=report.migration.pulled_token_s,
        next_for=next_for,
    )
    real_time = replace(
        every,
        num_sequences=every.num_sequences - flex.num_running - every.num_waiting,
        num_waiting=max(report.num_waiting - flex.num_waiting, 0),
        max_waiting=report.max_waiting,
    )
    if flex.gives_way:
        others = report.num_uncomputed_blocks - flex.num_uncomputed_blocks
        real_time = replace(
            real_time,
            num_demanded_blocks=max(every.num_demanded_blocks - flex_blocks, 0),
            waiting_s=max(others, 0) * report.block_size * _token_s(report),
        )
    return real_time, every


def load_since(
    report: WorkerReport,
    loads: tuple[PlacementLoad, PlacementLoad],
    recent: Sequence[PlacementChange],
    reported_s: float,
    *,
    is_flex: bool,
) -> PlacementLoad:
    """Return a worker's load with what was placed there, or left it, since its report.

    Args:
        report: its last one.
        loads: by that alone, see `reported_loads`.
        recent: what has changed since.
        reported_s: when the report was made.
        is_flex: as best effort sees it.
    """
    load, gives_way = loads[is_flex], report.best_effort.gives_way
    num_real_time = loads[False].num_waiting + sum(change.num_waiting for change in recent if not change.is_flex)
    changes = [change for change in recent if is_flex or not (gives_way and change.is_flex)]
    own = [change for change in recent if change.is_flex == is_flex]
    num_tokens = sum(change.tokens_since(reported_s) for change in changes)
    num_sent = sum(change.num_tokens - change.num_cached for change in changes if change.num_sequences > 0)
    return replace(
        load,
        num_sequences=max(0, load.num_sequences + sum(each.num_sequences for each in (changes if is_flex else own))),
        num_waiting=max(0, load.num_waiting + sum(change.num_waiting for change in own)),
        num_demanded_blocks=max(0, load.num_demanded_blocks + -(-num_tokens // max(1, report.block_size))),
        waiting_s=load.waiting_s + num_sent * _token_s(report),
        is_crowded=is_flex and not gives_way and num_real_time > 0,  # it would come before the next of the others
    )


def _token_s(report: WorkerReport) -> float:
    """Return the seconds in which a worker, with its group, computes a token of a prompt; 0 if it does not say."""
    return report.token_s / max(report.num_stages, 1)


def _max_request_tokens(status: WorkerStatus) -> int:
    """Return the smaller of the context and the whole KV memory, in tokens; 0 if the worker has not said."""
    report = status.report
    limits = [limit for limit in (report.max_model_len, report.num_blocks * report.block_size) if limit]
    return min(limits, default=0)
