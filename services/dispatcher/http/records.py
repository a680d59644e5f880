"""One line in the log and one set of observations per request; never any text of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from services.dispatcher.http.answers import usage_of
from services.dispatcher.http.call import Call, Choice
from services.dispatcher.http.front import Front
from services.dispatcher.http.shapes import Usage
from services.dispatcher.metrics import RequestRecord
from services.dispatcher.session.session import Session
from shared.log import get_logger

_log = get_logger()


def make_record(front: Front, call: Call, choices: Sequence[Choice], finish: str) -> RequestRecord:
    """Return what is known of a request that has ended; of several choices, their means and sums.

    Args:
        front: for the clock.
        call: what was asked.
        choices: without sessions if it was not admitted.
        finish: see `RequestRecord.finish`.
    """
    sessions = [choice.session for choice in choices if choice.session is not None]
    first = sessions[0] if sessions else None
    usage = usage_of(choices) if sessions else Usage(0, 0)
    admitted_s = [session.admitted_s for session in sessions if session.admitted_s is not None]
    first_s = [session.first_token_s for session in sessions if session.first_token_s is not None]
    qoe = [session.qoe.final() for session in sessions if session.qoe is not None]
    return RequestRecord(
        request_id=call.request_id,
        public_id=call.public_id,
        endpoint=call.endpoint,
        is_stream=call.params.stream,
        tier=call.params.service_tier,
        finish=finish,
        worker=(first.worker_id or "") if first is not None else "",
        attempts=first.attempt if first is not None else 0,
        num_choices=len(choices),
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_output_tokens=usage.num_output_tokens,
        queue_s=min(admitted_s) - call.arrival_s if admitted_s else None,
        ttft_s=min(first_s) - call.arrival_s if first_s else None,
        tpot_s=_mean([tpot_s for session in sessions if (tpot_s := _tpot_s(session)) is not None]),
        e2e_s=front.now() - call.arrival_s,
        qoe=_mean(qoe) if finish in ("stop", "length") else None,
    )


def _tpot_s(session: Session) -> float | None:
    if session.first_token_s is None or len(session.tokens) < 2:
        return None
    return (session.last_token_s - session.first_token_s) / (len(session.tokens) - 1)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def report_record(front: Front, record: RequestRecord) -> None:
    """Count the request and write its access line."""
    front.metrics.ended(record)
    fields = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in asdict(record).items()
        if value is not None and name != "request_id"
    }
    _log.info("request", rid=record.request_id, **fields)
