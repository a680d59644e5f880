"""Requests under way, by the names under which their senders cancel them or send them again.

A sender may ask twice for one answer (`Idempotency-Key`): the newest connection gets it, and goes on from the tokens
that the one before had, with what that one had taken of its tenant's limits. The tokens are kept for a while after a
connection has gone, although the work itself stops at once: the next connection costs a prompt pass, not the answer.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from services.dispatcher.answers.shapes import usage_of
from services.dispatcher.endpoints.call import CheckedCall, Choice, Prompt
from services.dispatcher.http.errors import ApiError, failure_error
from services.dispatcher.limits.tenants import Permit
from services.dispatcher.session.request import FailureCode
from services.dispatcher.session.sessions import Sessions
from shared.ids import RequestId

KEEP_S: Final = 120.0
"""Seconds for which it is known what came of a request that has ended."""
MAX_ENDED: Final = 4096
"""Requests of which that is known; of more, the oldest are forgotten."""
MAX_KEPT_TOKENS: Final = 1 << 20
"""Tokens of answers that are kept for another connection; beyond, the oldest are forgotten."""


class CancelState(StrEnum):
    """What a cancellation met."""

    CANCELLED = "cancelled"  # now, or by an earlier one
    ENDED = "ended"  # it had ended by itself


@dataclass(frozen=True, slots=True)
class Start:
    """Where a choice goes on."""

    tokens: Sequence[int] = ()
    num_attempts: int = 0
    """Submissions so far: a worker knows their numbers."""


@dataclass(slots=True)
class Live:
    """A request under way."""

    call: CheckedCall
    choices: Sequence[Choice]
    starts: Sequence[Start]
    num_paid: int
    """Output tokens that permits of earlier connections, which have ended, were charged."""
    permit: Permit | None = None
    """What it takes of its tenant's limits: that of the connection that it replaced, if that was open."""
    prompts: Sequence[Prompt] | None = None
    """As tokenised, by this connection or the one that it replaced."""
    has_replaced: bool = False
    """It goes on in place of another connection: whatever let that one in holds for it."""

    @property
    def num_used(self) -> int:
        """Tokens that its permit is charged for: of prompts and outputs, but for what others have paid."""
        usage = usage_of(self.choices)
        return usage.num_prompt_tokens + usage.num_output_tokens - self.num_paid

    def names(self) -> list[tuple[str, str]]:
        """Return what it can be cancelled by."""
        return [(self.call.caller, name) for name in dict.fromkeys((self.call.answer_id, self.call.public_id))]


@dataclass(slots=True)
class _Kept:
    """What is left of a request with a key."""

    request_id: RequestId
    starts: Sequence[Start]
    was_cancelled: bool
    left_s: float

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(len(start.tokens) for start in self.starts)


class LiveCalls:
    """The only writer of what is under way.

    Args:
        sessions: where the work of a request that is stopped is released.
        now: the event loop's clock.
    """

    def __init__(self, sessions: Sessions, now: Callable[[], float]) -> None:
        self._sessions = sessions
        self._now = now
        self._by_name: dict[tuple[str, str], dict[int, Live]] = {}
        self._by_key: dict[str, Live] = {}
        self._ended: OrderedDict[tuple[str, str], tuple[CancelState, float]] = OrderedDict()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._num_kept_tokens = 0

    def __len__(self) -> int:
        return len(self.all())

    def all(self) -> list[Live]:
        """Return what is under way, in the order in which it came."""
        return list({id(live): live for group in self._by_name.values() for live in group.values()}.values())

    def enter(self, call: CheckedCall, choices: Sequence[Choice]) -> Live:
        """Note a request; the caller must let it `leave`, and close its permit.

        One with the same key that is still under way ends at once with `SUPERSEDED`, and its permit is handed over.

        Raises:
            ApiError: its key was used with another body, the request was cancelled, or it goes on over another
                connection while the server drains.
        """
        live = self._begin(call, choices)
        if call.retry is not None:
            self._by_key[call.retry.name] = live
        for name in live.names():
            self._by_name.setdefault(name, {})[id(call)] = live
        return live

    def leave(self, call: CheckedCall) -> None:
        """Forget a request whose sessions are released, but what came of it."""
        live = self._by_name[call.caller, call.answer_id][id(call)]
        state = CancelState.CANCELLED if call.stopper.code is FailureCode.CANCELLED else CancelState.ENDED
        for name in live.names():
            group = self._by_name[name]
            del group[id(call)]
            if not group:
                del self._by_name[name]
            self._ended.pop(name, None)
            self._ended[name] = (state, self._now())
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        if call.retry is not None and self._by_key.get(call.retry.name) is live:
            del self._by_key[call.retry.name]
            self._keep(call.retry.name, live)

    def cancel(self, caller: str, name: str) -> CancelState | None:
        """Stop the caller's requests of this name; None if there is none, nor was one lately.

        Args:
            caller: who asks.
            name: id of the answer, or `x-request-id`.
        """
        found = list(self._by_name.get((caller, name), {}).values())
        for live in found:
            self._stop(live, FailureCode.CANCELLED)
        if found:
            return CancelState.CANCELLED
        state, ended_s = self._ended.get((caller, name), (None, 0.0))
        return state if self._now() - ended_s <= KEEP_S else None

    def _stop(self, live: Live, code: FailureCode) -> None:
        """End a request wherever it is; its work is gone from the workers within a step."""
        live.call.stopper.stop(code)
        for choice in live.choices:
            if choice.session is not None:
                choice.session.fail(code)
                self._sessions.release(choice.session)

    def _begin(self, call: CheckedCall, choices: Sequence[Choice]) -> Live:
        """Return the request with what is known of its answer, and with what another connection for it had."""
        if call.retry is None:
            return Live(call, choices, [Start()] * len(choices), num_paid=0)
        name = call.retry.name
        self._forget_old()
        live, kept = self._by_key.get(name), self._kept.get(name)
        known = live.call if live is not None else kept
        if known is not None and known.request_id != call.retry.request_id:
            message = "This Idempotency-Key was used for another request. Use a new key for each request."
            raise ApiError(422, "idempotency_mismatch", message, headers={"x-should-retry": "false"})
        if live is not None:
            if live.call.stopper.code is FailureCode.CANCELLED:
                raise failure_error(FailureCode.CANCELLED)
            return self._replace(live, call, choices)
        if kept is None:
            return Live(call, choices, [Start()] * len(choices), num_paid=0)
        if kept.was_cancelled:
            raise failure_error(FailureCode.CANCELLED)
        self._drop(name)
        return Live(call, choices, kept.starts, num_paid=kept.num_tokens)

    def _replace(self, old: Live, call: CheckedCall, choices: Sequence[Choice]) -> Live:
        """End a connection for the same answer, and return what goes on in its place."""
        if self._sessions.draining:  # nothing new begins here, and what runs may end
            raise failure_error(FailureCode.DRAINING)
        self._stop(old, FailureCode.SUPERSEDED)
        permit = None if old.permit is None else old.permit.hand_over(old.num_used)
        return Live(call, choices, _starts(old), old.num_paid, permit, old.prompts, has_replaced=True)

    def _keep(self, name: str, live: Live) -> None:
        was_cancelled = live.call.stopper.code is FailureCode.CANCELLED
        kept = _Kept(live.call.request_id, () if was_cancelled else _starts(live), was_cancelled, self._now())
        self._drop(name)
        self._kept[name] = kept
        self._num_kept_tokens += kept.num_tokens
        self._forget_old()

    def _forget_old(self) -> None:
        while self._kept:
            name, oldest = next(iter(self._kept.items()))
            is_over = len(self._kept) > MAX_ENDED or self._num_kept_tokens > MAX_KEPT_TOKENS
            if not is_over and self._now() - oldest.left_s <= KEEP_S:
                return
            self._drop(name)

    def _drop(self, name: str) -> None:
        kept = self._kept.pop(name, None)
        if kept is not None:
            self._num_kept_tokens -= kept.num_tokens


def _starts(live: Live) -> list[Start]:
    """Return where the choices of a request that was stopped would go on.

    Answers with log-probabilities begin anew: the numbers of tokens that were sent are gone.
    """
    has_logprobs = live.call.params.sampling.common.logprobs is not None
    starts: list[Start] = []
    for choice, before in zip(live.choices, live.starts, strict=True):
        session = choice.session
        if session is None:
            starts.append(before)
        else:
            starts.append(Start(() if has_logprobs else array("I", session.tokens), session.history.num_attempts))
    return starts
