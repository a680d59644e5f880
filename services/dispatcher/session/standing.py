"""Where a session stands at one moment: how far its answer is, and what its reader has. Pure."""

from __future__ import annotations

from math import ceil
from typing import Final

import numpy as np

from services.dispatcher.session.session import Session
from shared.open_requests import RequestState
from shared.qoe import F64, qoe_by_now

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

    Below 0 the reader waits: for the first token since `ttft_s` is over, or since the newest one was read. While it
    thinks, as if its thinking were read at the speed at which it is wanted.
    """
    reading = session.reading
    return None if session.request.qoe is None else reading.shown_s + reading.gap_s - now_s


def reader_qoe(session: Session, now_s: float) -> float | None:
    """Return what its reader has experienced by now, in [0, 1]; None without a reader.

    Tokens that an earlier connection got count as shown on time. While it thinks nothing is expected: it is 1.
    """
    target, reading = session.request.qoe, session.reading
    if target is None:
        return None
    if session.thinks:
        return 1.0
    at_s = now_s - session.request.arrival_s
    return qoe_by_now(wanted_s(session), reading.ttft_s, target.speed_tokens_per_s, at_s)


def wanted_s(session: Session) -> F64:
    """Return when the tokens of its text came, seconds after the arrival, or while it thinks those of its thinking.

    Those that an earlier connection got came at minus infinity.
    """
    here_s = session.token_s if session.thinks else session.token_s[session.num_thought :]
    before = np.full(len(session.tokens) - session.reading.num_thought - len(here_s), -np.inf)
    return np.concatenate([before, np.asarray(here_s) - session.request.arrival_s])


def stall_s(session: Session) -> float | None:
    """Return for how long its reader had no text, from its first token on; None without a reader or any text."""
    reading, num_thought = session.reading, session.num_thought
    num_text = len(session.token_s) - num_thought
    if session.request.qoe is None or not num_text:
        return None
    num_before = len(session.tokens) - reading.num_thought - num_text
    ideal_s = session.request.arrival_s + reading.ttft_s + num_before * reading.gap_s
    first_s = max(session.token_s[num_thought], ideal_s)
    return max(0.0, reading.shown_s - first_s - (num_text - 1) * reading.gap_s)


def num_unread(session: Session, now_s: float) -> int:
    """Return how many tokens its reader has and has not been shown, as a reading pacer shows them."""
    reading = session.reading
    if not reading.shown_s > now_s or not session.token_s or session.thinks:
        return 0
    return min(ceil((reading.shown_s - now_s) / reading.gap_s), len(session.tokens) - reading.num_thought)
