"""Where a session stands at one moment: how far its answer is, and what its reader has. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np

from services.dispatcher.session.session import Session
from shared.open_requests import RequestState
from shared.qoe import qoe_by_now

PAUSED_AFTER_S: Final = 1.0
"""Without a token for so long an answer counts as paused."""


def state_of(session: Session, now_s: float) -> RequestState:
    """Return how far a session that has not ended has come, as far as is known here."""
    if not (session.is_running and session.history.has_started):
        return RequestState.QUEUED
    if not session.has_progressed:
        return RequestState.PREFILL
    is_paused = now_s - session.last_token_s > PAUSED_AFTER_S
    return RequestState.PAUSED if is_paused else RequestState.STREAMING


def slack_s(session: Session, now_s: float) -> float | None:
    """Return for how long its reader can go on without another token, in seconds; None without a reader.

    Below 0 the reader waits: for the first token since `ttft_s` is over, or since the newest one was read.
    """
    target = session.request.qoe
    return None if target is None else session.shown_s + 1 / target.speed_tokens_per_s - now_s


def reader_qoe(session: Session, now_s: float) -> float | None:
    """Return what its reader has experienced by now, in [0, 1]; None without a reader.

    Tokens that an earlier connection got count as shown on time.
    """
    target = session.request.qoe
    if target is None:
        return None
    arrival_s = session.request.arrival_s
    before = np.full(len(session.tokens) - len(session.token_s), -np.inf)
    delivered_s = np.concatenate([before, np.asarray(session.token_s) - arrival_s])
    return qoe_by_now(delivered_s, target.ttft_s, target.speed_tokens_per_s, now_s - arrival_s)
