"""One line in the log and one set of observations per request; never any text of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Final

from services.dispatcher.answers.shapes import usage_of
from services.dispatcher.endpoints.call import CheckedCall, Choice
from services.dispatcher.http.front import Front
from services.dispatcher.metrics import WHOLE, RequestRecord
from services.dispatcher.session.request import FailureCode
from services.dispatcher.session.session import Session
from services.dispatcher.session.standing import stall_s
from shared.process.log import get_logger
from shared.types import LatencyLimits

_log = get_logger()

_WANTED: Final = (FailureCode.CANCELLED.value, FailureCode.SUPERSEDED.value)
"""Ends that the client wanted: in records, the same as leaving."""
_LEFT: Final = ("cancelled", "slow_reader")
"""Ends that are the client's doing."""


def make_record(front: Front, call: CheckedCall, choices: Sequence[Choice]) -> RequestRecord:
    """Return what is known of a request that has ended.

    Of several choices it has the earliest time of all, the last of all, or their means and sums.

    Args:
        front: for the clock.
        call: what was asked.
        choices: without sessions if it was not admitted.
    """
    sessions = [choice.session for choice in choices if choice.session is not None]
    first = sessions[0] if sessions else None
    usage = usage_of(choices)
    finish = "cancelled" if call.fate.finish in _WANTED else call.fate.finish
    admitted_s = min((s.admitted_s for s in sessions if s.admitted_s is not None), default=None)
    first_s = min((s.first_token_s for s in sessions if s.first_token_s is not None), default=None)
    last_s = max((s.last_token_s for s in sessions if s.first_token_s is not None), default=None)
    ttft_s = _between(call.arrival_s, first_s)
    target, slo = call.params.qoe, call.params.slo or LatencyLimits()
    return RequestRecord(
        request_id=call.request_id,
        public_id=call.public_id,
        endpoint=call.endpoint,
        is_stream=call.params.stream,
        tenant=call.grant.tenant.name,
        tier=call.params.service_tier,
        finish=finish,
        worker=(first.history.worker_id or "") if first is not None else "",
        attempts=first.history.num_attempts if first is not None else 0,
        num_recoveries=sum(session.history.num_recoveries for session in sessions),
        num_preemptions=sum(session.history.num_preemptions for session in sessions),
        num_choices=len(choices),
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_output_tokens=usage.num_output_tokens,
        queue_s=_between(call.arrival_s, admitted_s),
        prefill_s=_between(admitted_s, first_s),
        ttft_s=ttft_s,
        decode_s=_between(first_s, last_s),
        tpot_s=_mean([_tpot_s(session) for session in sessions]),
        is_ttft_kept=_is_kept(slo.ttft_s, [_ttft_s(call, each) for each in sessions], finish),
        is_tpot_kept=_is_kept(slo.tpot_s, [_tpot_s(each) for each in sessions], finish),
        is_late=None if ttft_s is None or target is None else ttft_s > target.ttft_s,
        e2e_s=front.now() - call.arrival_s,
        qoe=_mean([session.qoe for session in sessions]) if finish in WHOLE else None,
        stall_s=_mean([stall_s(session) for session in sessions]) if finish in WHOLE else None,
    )


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s


def _is_kept(limit_s: float | None, times_s: Sequence[float | None], finish: str) -> bool | None:
    """Return `RequestRecord.is_ttft_kept`, or that of the TPOT.

    Args:
        limit_s: seconds; None: there is none.
        times_s: of each choice that was admitted, as far as it is known.
        finish: see `RequestRecord.finish`.
    """
    if limit_s is None or not times_s:
        return None
    if any(time_s is not None and time_s > limit_s for time_s in times_s):
        return False
    if finish in WHOLE:
        return True
    return None if finish in _LEFT and None in times_s else finish in _LEFT


def _ttft_s(call: CheckedCall, session: Session) -> float | None:
    return _between(call.arrival_s, session.first_token_s)


def _tpot_s(session: Session) -> float | None:
    if session.first_token_s is None or len(session.tokens) < 2:
        return None
    return (session.last_token_s - session.first_token_s) / (len(session.tokens) - 1)


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of those that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def report_record(front: Front, record: RequestRecord) -> None:
    """Count the request and write its access line."""
    front.metrics.ended(record)
    fields = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in asdict(record).items()
        if value is not None and name != "request_id"
    }
    _log.info("request", rid=record.request_id, **fields)
