"""GET /v1/requests: the requests that this dispatcher serves now, those whose readers have the least text first.

All are counted, and `MAX_LISTED` are listed. The event loop has its turns between a few of them, so the answer tells
of a moment some milliseconds long.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import nsmallest
from math import inf, isinf
from typing import Final, NamedTuple

from aiohttp import web

from services.dispatcher.answers.live import Live
from services.dispatcher.http.front import Front
from services.dispatcher.session.session import Session
from services.dispatcher.session.standing import reader_qoe, slack_s, state_of
from shared.api_keys import Tier
from shared.ids import DispatcherId
from shared.open_requests import OpenCounts, OpenRequest, OpenRequests, RequestState

MAX_LISTED: Final = 200
CHOICES_AT_ONCE: Final = 256
"""That are looked at in one turn of the event loop."""
TOKENS_AT_ONCE: Final = 4096
"""Whose times are looked at in one turn, but for a longer answer's."""


class _Found(NamedTuple):
    """A choice; those that come first in order are listed first."""

    urgency_s: float
    """The slack of its reader; infinite without one."""
    arrival_s: float
    number: int
    """Of the choice among all: no two are equal."""
    answer_id: str
    choice: int
    session: Session
    state: RequestState


async def list_requests(front: Front, _request: web.BaseRequest, _public_id: str) -> web.Response:
    """Return what is served now, but for requests that are not admitted yet."""
    now_s = front.now()
    found, counts, num_late = list[_Found](), Counter[tuple[Tier, RequestState]](), 0
    for number, (answer_id, index, session) in enumerate(_choices(front.live.all()), start=1):
        if not session.is_over:
            request, state, slack = session.request, state_of(session, now_s), slack_s(session, now_s)
            urgency_s = inf if slack is None else slack
            found.append(_Found(urgency_s, request.arrival_s, number, answer_id, index, session, state))
            counts[request.tier, state] += 1
            num_late += urgency_s < 0
        if number % CHOICES_AT_ONCE == 0:
            await asyncio.sleep(0)
    listed = nsmallest(MAX_LISTED, found)
    await asyncio.sleep(0)
    content = OpenRequests(
        dispatcher_id=DispatcherId(front.settings.instance_id),
        counts=tuple(
            OpenCounts(tier=tier.label, **{state.value: counts[tier, state] for state in RequestState})
            for tier in reversed(Tier)
        ),
        num_late=num_late,
        waiting=front.sessions.waiting(),
        num_left_out=len(found) - len(listed),
        requests=tuple(await _describe(listed, now_s)),
    )
    return web.Response(body=content.model_dump_json().encode(), content_type="application/json")


def _choices(lives: Sequence[Live]) -> Iterator[tuple[str, int, Session]]:
    """Give each choice that has a session, with the id of its answer."""
    for live in lives:
        for choice in live.choices:
            if choice.session is not None:
                yield live.call.answer_id, choice.index, choice.session


async def _describe(listed: Sequence[_Found], now_s: float) -> list[OpenRequest]:
    rows, num_tokens = list[OpenRequest](), 0
    for each in listed:
        session, request = each.session, each.session.request
        num_tokens += len(session.tokens)
        if num_tokens > TOKENS_AT_ONCE:
            num_tokens = 0
            await asyncio.sleep(0)
        qoe = reader_qoe(session, now_s)
        rows.append(
            OpenRequest(
                id=each.answer_id,
                choice=each.choice,
                tier=request.tier.label,
                tenant=request.tenant,
                worker_id=session.worker_id or "",
                state=each.state,
                age_s=round(max(now_s - request.arrival_s, 0.0), 3),
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=len(session.tokens),
                num_preemptions=session.history.num_preemptions,
                qoe=None if qoe is None else round(qoe, 4),
                slack_s=None if isinf(each.urgency_s) else round(each.urgency_s, 3),
            )
        )
    return rows
