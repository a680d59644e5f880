"""One streamed answer over as many connections as it takes: the reader sees a pause, never a gap or a repetition."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from sluice_client.cursor import Cursor
from sluice_client.errors import (
    APIConnectionError,
    APIStatusError,
    APIStreamError,
    ConnectionLostError,
    IncompleteStreamError,
    SluiceClientError,
)
from sluice_client.pacer import Piece
from sluice_client.protocol import AnswerRecord
from sluice_client.retry import Resumes

RESUMED_CODES = frozenset({"draining", "no_capacity", "queue_full"})
"""Errors in a stream that say that this server cannot go on, not that nobody can."""
_INCOMPLETE = "the stream ended without a finish reason; the text is not the whole answer"


class EventSource(Protocol):
    """A way to a server: HTTP or a WebSocket."""

    def resumes(self) -> Resumes:
        """What may be done for an answer that loses its connections."""

    def events(
        self, path: str, body: dict[str, Any], cursor: Cursor, record: AnswerRecord
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of an answer over one connection, from the cursor on.

        Raises:
            ConnectionLostError: it broke; what came before was yielded.
        """

    async def cancel(self, cursor: Cursor) -> None:
        """Tell the server that has the request to stop it."""


async def stream_pieces(
    source: EventSource, path: str, body: dict[str, Any], cursor: Cursor, record: AnswerRecord
) -> AsyncGenerator[Piece, None]:
    """The pieces of a streamed answer; closing the generator ends it at the server.

    Raises:
        SluiceClientError: any of `errors.py`; every piece that came before it was yielded.
    """
    resumes = source.resumes()
    while True:
        num_events = cursor.num_events
        try:
            async with aclosing(source.events(path, body, cursor, record)) as chunks:
                async for chunk in chunks:
                    piece = record.take_chunk(chunk)
                    cursor.num_events += 1
                    if piece is not None:
                        yield piece
            loss: SluiceClientError = IncompleteStreamError(_INCOMPLETE)
        except (ConnectionLostError, APIStreamError) as error:
            loss = error
        except (APIConnectionError, APIStatusError) as error:
            if not cursor.has_begun:
                raise
            raise ConnectionLostError(f"the stream broke off, and could not be resumed: {error}") from error
        if record.finish_reason is not None and not isinstance(loss, APIStreamError):
            return
        delay_s = None
        if cursor.is_resumable and _is_resumed(loss):
            delay_s = resumes.next_delay_s(time.monotonic(), has_progressed=cursor.num_events > num_events)
        if delay_s is None:
            raise loss
        await asyncio.sleep(delay_s)


def _is_resumed(loss: SluiceClientError) -> bool:
    return not isinstance(loss, APIStreamError) or loss.code in RESUMED_CODES
