"""`sluice tap`: what passes over the bus, one JSON object per line."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from cli.cluster.broker import named_broker
from cli.cluster.settings import load_bus_settings
from cli.exit_codes import DONE, KILLED, CommandError
from cli.signals import StopSignals
from cli.tap.describe import describe
from shared.transport.bus import Message
from shared.transport.bus_rules import check_pattern
from shared.transport.nats_bus import NotPermittedError
from shared.wire import MAX_MESSAGE_BYTES


def decode_one() -> int:
    """Show the payload on stdin, as a filter for `nats sub --translate`; return the exit code."""
    sys.stdout.write(_line(describe(sys.stdin.buffer.read(MAX_MESSAGE_BYTES + 1))))
    return DONE


async def run_tap(subject: str, flags: Mapping[str, Any], *, count: int, with_tokens: bool) -> int:
    """Print messages until there were enough, or until Ctrl-C; return the exit code.

    Args:
        subject: which; empty: all of the cluster.
        flags: where the broker is.
        count: how many; 0: no end.
        with_tokens: show token ids too.

    Raises:
        StartupError: there is no broker, or it lets nobody in, or refuses the subject.
        CommandError: the subject is not one.
    """
    signals = StopSignals(lambda: sys.exit(KILLED))  # first of all: a Ctrl-C before is somebody else's
    try:
        settings = load_bus_settings(flags)
        all_of_it = f"sluice.{settings.cluster}"
        try:
            pattern = check_pattern(subject or f"{all_of_it}.>")
        except ValueError as error:
            hint = f"Examples: '{all_of_it}.event.>', '{all_of_it}.worker.*.submit'"
            raise CommandError(str(error), hint) from None
        tap = _Tap(signals.stop, count, with_tokens=with_tokens)
        async with named_broker(settings).connect("tap", tap.fail) as bus:
            await bus.subscribe(pattern, tap.take)
            await bus.flush()
            await signals.stop.wait()
    finally:
        signals.close()
    if tap.failure is not None:
        raise tap.failure
    return DONE


class _Tap:
    """Prints messages as they come."""

    def __init__(self, stop: asyncio.Event, count: int, *, with_tokens: bool) -> None:
        self._stop = stop
        self._count = count
        self._with_tokens = with_tokens
        self._num_shown = 0
        self.failure: BaseException | None = None

    def take(self, message: Message) -> None:
        """Print one message, unless there were enough."""
        if self._stop.is_set():
            return
        line = {"ts": datetime.now(UTC).isoformat(timespec="milliseconds"), "subject": message.subject}
        asked = {"is_request": True} if message.reply else {}
        body = describe(message.data, with_tokens=self._with_tokens)
        try:
            sys.stdout.write(_line({**line, **asked, "num_bytes": len(message.data), **body}))
            sys.stdout.flush()
        except BrokenPipeError:  # `sluice tap | head`
            self._stop.set()
            return
        self._num_shown += 1
        if self._num_shown == self._count:
            self._stop.set()

    def fail(self, error: BaseException) -> None:
        """End because the broker refuses the subject, or has closed the connection."""
        hint = "Sign in as operator: `sluice ps --json` has the URL" if isinstance(error, NotPermittedError) else ""
        self.failure = CommandError(str(error).removeprefix("sluice: ").partition(". ")[0], hint)
        self._stop.set()


def _line(fields: dict[str, Any]) -> str:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False) + "\n"
