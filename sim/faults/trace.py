"""What was seen of a run: every message with its time in one digest, what happened how often, and lines for people."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog
from pydantic import TypeAdapter

from shared.messages.plan import PLAN_KEY, Plan
from shared.messages.request import Accepted, RequestMessage, Submit
from shared.transport.bus import KvEntry, Message
from shared.transport.memory_bus import MemoryBroker
from shared.wire import WireError, decode_json, decode_union

SPY = "spy"
"""Name of the connection that hears everything; no fault concerns it."""
_MESSAGES: TypeAdapter[RequestMessage] = TypeAdapter(RequestMessage)


class FaultTrace:
    """Hears the bus and the log.

    Args:
        print_line: told what a reader of one run wants to see; None: nobody reads.
    """

    def __init__(self, print_line: Callable[[str], None] | None = None) -> None:
        self.counts: Counter[str] = Counter()
        """What happened how often: `log …` by event, `sent …` by kind of message."""
        self.epochs: list[int] = []
        """Of the plans, in the order of their revisions."""
        self.attempts: dict[str, list[int]] = {}
        """Of the submissions of each session, in order."""
        self._digest = hashlib.sha256()
        self._print = print_line

    @property
    def digest(self) -> str:
        """Return a hash of everything that passed the broker, with its time."""
        return self._digest.hexdigest()

    def say(self, text: str) -> None:
        """Add a line for people."""
        if self._print is not None:
            self._print(f"{asyncio.get_running_loop().time():9.3f}  {text}")

    async def listen(self, broker: MemoryBroker, plan_bucket: str) -> None:
        """Hear every message from now on, and every plan."""
        spy = broker.connect(SPY)
        await spy.subscribe(">", self._on_message, max_pending=2**31)
        plans = await spy.key_value(plan_bucket)
        await plans.watch(PLAN_KEY, self._on_plan)

    @contextmanager
    def hear_log(self) -> Iterator[None]:
        """Count what services log instead of writing it."""
        before = structlog.get_config() if structlog.is_configured() else None
        structlog.configure(
            processors=[self._on_event],
            wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
            cache_logger_on_first_use=False,
        )
        try:
            yield
        finally:
            structlog.reset_defaults()
            if before is not None:
                structlog.configure(**before)

    def _on_event(self, _logger: Any, method: str, fields: MutableMapping[str, Any]) -> str:
        event = str(fields.get("event", ""))
        self.counts[f"log {event}"] += 1
        if self._print is not None:
            rest = " ".join(f"{key}={value}" for key, value in fields.items() if key != "event")
            self.say(f"{method:<8} {event}  {rest}")
        raise structlog.DropEvent

    def _on_message(self, message: Message) -> None:
        now_s = asyncio.get_running_loop().time()
        self._digest.update(f"{now_s:.9f} {message.subject} {message.reply} ".encode())
        self._digest.update(message.data)
        verb = message.subject.rsplit(".", 1)[-1]
        if verb in ("submit", "cancel", "replay", "renew") or message.subject.startswith("_INBOX."):
            self._note(message)

    def _note(self, message: Message) -> None:
        try:
            found = decode_union(message.data, _MESSAGES)
        except WireError:
            return  # an answer to another kind of question, or a token batch
        reason = getattr(found, "reason", None)
        name = found.kind if reason is None else f"{found.kind} {reason.value}"
        if isinstance(found, Submit):
            session = f"{found.request_id} of {found.dispatcher_id}, stream {found.stream}"
            self.attempts.setdefault(session, []).append(found.attempt)
            name += (" again" if found.attempt > 1 else "") + (" with tokens" if found.generated else "")
            name += " as a fork" if found.fork_of is not None else ""
        elif isinstance(found, Accepted) and found.num_output:
            name += " with tokens"
        self.counts[f"sent {name}"] += 1
        if self._print is not None:
            about = f"{found.request_id} " if hasattr(found, "request_id") else ""
            attempt = f"attempt {found.attempt}" if hasattr(found, "attempt") else ""
            self.say(f"message  {message.subject}  {name} {about}{attempt}")

    def _on_plan(self, entry: KvEntry) -> None:
        if entry.value is not None:
            self.epochs.append(decode_json(entry.value, Plan).epoch)
