"""Parts of a greeting over sockets that do not block."""

from __future__ import annotations

import socket

from services.worker.peers.door import MessageTooLongError, receive_message, send_message
from services.worker.peers.greeting import MAX_GREETING_BYTES, StageRefusedError
from shared.messages.base import ControlMessage
from shared.wire import encode


async def say(sock: socket.socket, message: ControlMessage) -> None:
    """Send a part of a greeting.

    Raises:
        OSError: the other side has gone.
    """
    await send_message(sock, encode(message))


async def hear(sock: socket.socket) -> bytes:
    """Return the next part of a greeting.

    Raises:
        StageRefusedError: it is longer than any greeting.
        OSError: the other side has gone.
    """
    try:
        return await receive_message(sock, MAX_GREETING_BYTES)
    except MessageTooLongError as error:
        raise StageRefusedError(str(error)) from None
