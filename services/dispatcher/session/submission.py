"""What a worker is told of a session: all that it needs to begin it, or to go on where other workers have left it."""

from __future__ import annotations

import numpy as np

from services.dispatcher.policy.placement import Placed
from services.dispatcher.session.request import Sender
from services.dispatcher.session.session import Session
from services.dispatcher.session.standing import wanted_s
from shared.messages.request import Submit, pack_token_ids
from shared.qoe import displayed


def next_submit(
    session: Session, sender: Sender, now_s: float, placed: Placed | None = None, *, reopens: bool = False
) -> Submit:
    """Return the submission of the next attempt, which goes on after the tokens so far; `begin` makes it count.

    Args:
        session: takes the attempt's number.
        sender: this process.
        now_s: the event loop's clock.
        placed: where it goes, and why; None: of that nothing is said.
        reopens: see `Submit.reopens`.
    """
    request, history = session.request, session.history
    age_s = max(0.0, now_s - request.arrival_s)
    return Submit(
        request_id=request.request_id,
        stream=session.stream,
        attempt=history.next_number(),
        dispatcher_id=sender.dispatcher_id,
        incarnation=sender.incarnation,
        prompt=request.prompt,
        generated=pack_token_ids(session.tokens),
        sampling=request.sampling,
        tier=request.tier,
        slo=request.slo,
        qoe=request.qoe,
        displayed=_displayed(session),
        thought_s=session.reading.thought_s,
        num_preemptions=history.num_preemptions,
        token_age_s=max(0.0, now_s - session.last_token_s) if session.token_s else None,
        age_s=age_s,
        remaining_s=max(0.001, request.limit_s - age_s),
        fork_of=None if session.parent is None else session.parent.request.request_id,
        cache_salt=request.cache_salt,
        reopens=reopens,
        needs_room=placed is not None and placed.needs_room,
        prefix=None if placed is None else placed.prefix,
    )


def _displayed(session: Session) -> tuple[float, float] | None:
    """Return what the reader has seen, as `Submit.displayed` says it."""
    reading, delivered_s = session.reading, wanted_s(session)
    if session.request.qoe is None or not np.isfinite(delivered_s[-1:]).any():
        return None
    return displayed(delivered_s, reading.ttft_s, 1 / reading.gap_s)
