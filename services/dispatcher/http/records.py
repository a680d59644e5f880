"""One line in the log and one set of observations per request; never any text of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from services.dispatcher.metrics import RequestRecord
from services.dispatcher.session.session import Session
from shared.log import get_logger

if TYPE_CHECKING:  # generate imports this module
    from services.dispatcher.http.front import Front
    from services.dispatcher.http.generate import Call

_log = get_logger()


def make_record(front: Front, call: Call, session: Session | None, num_tokens: int, finish: str) -> RequestRecord:
    """Return what is known of a request that has ended.

    Args:
        front: for the clock.
        call: what was asked.
        session: None if it was not admitted.
        num_tokens: of the answer, as billed.
        finish: see `RequestRecord.finish`.
    """
    ttft_s = tpot_s = queue_s = qoe = None
    if session is not None and session.admitted_s is not None:
        queue_s = session.admitted_s - call.arrival_s
    if session is not None and session.first_token_s is not None:
        ttft_s = session.first_token_s - call.arrival_s
        if len(session.tokens) > 1:
            tpot_s = (session.last_token_s - session.first_token_s) / (len(session.tokens) - 1)
    if session is not None and session.qoe is not None and finish in ("stop", "length"):
        qoe = session.qoe.final()
    return RequestRecord(
        request_id=call.request_id,
        public_id=call.public_id,
        endpoint=call.endpoint,
        is_stream=call.params.stream,
        tier=call.params.service_tier,
        finish=finish,
        worker=(session.worker_id or "") if session is not None else "",
        attempts=session.attempt if session is not None else 0,
        num_prompt_tokens=session.request.num_prompt_tokens if session is not None else 0,
        num_output_tokens=num_tokens,
        queue_s=queue_s,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=front.now() - call.arrival_s,
        qoe=qoe,
    )


def report_record(front: Front, record: RequestRecord) -> None:
    """Count the request and write its access line."""
    front.metrics.ended(record)
    fields = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in asdict(record).items()
        if value is not None and name != "request_id"
    }
    _log.info("request", rid=record.request_id, **fields)
