"""Failures at the boundaries: what a person or another service did, as opposed to our own bugs (those are assertions).

    SluiceError
    ├── StartupError            a process refuses to start; one line on stderr, exit code 2
    │   ├── ConfigError         a flag, variable or key is unknown, or its value is not allowed
    │   └── ProfileError        a cost profile does not exist or is malformed
    └── WireError (ValueError)  bytes from another process are not the message they should be
        ├── WireSizeError       a message is over the size limit
        └── WireVersionError    a message of another major version of the protocol

Kept elsewhere, beside what they are about: `transport.bus.BusError`, `shared.systems.UnknownSystemError`.
"""

from __future__ import annotations

from typing import Final

MAX_MESSAGE_CHARS: Final = 600
"""Longest sentence: it may repeat what stands in somebody's file."""


def pointer(topic: str) -> str:
    """Return the end of an error's line that says where to read more of it; "" of none."""
    return f"; more: sluice explain {topic}" if topic else ""


class SluiceError(Exception):
    """Anything that may go wrong at a boundary of a process."""


class StartupError(SluiceError):
    """A process cannot start; the text says what is wrong and what to do about it.

    Args:
        message: what is wrong, as one sentence without its full stop; what is longer than `MAX_MESSAGE_CHARS` is cut.
        hint: what to do, as one sentence; empty if the message says it already.
        topic: section of `docs/troubleshooting.md` that says more; "": none does.
    """

    def __init__(self, message: str, hint: str = "", topic: str = "") -> None:
        message = message.rstrip(".")
        self.message = message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}…"
        self.hint = hint.rstrip(".")
        text = f"sluice: {self.message}. {self.hint}" if self.hint else f"sluice: {self.message}"
        one_line = " ".join(text.split()) + pointer(topic)
        super().__init__("".join(char if char.isprintable() else repr(char)[1:-1] for char in one_line))


class ConfigError(StartupError):
    """A setting is unknown or not allowed; the message names where it stands (flag, variable, or file and line)."""


class ProfileError(StartupError):
    """A cost profile cannot be read."""


class WireError(SluiceError, ValueError):
    """Bytes are not a message that this process accepts; nothing of them was used.

    The reason never repeats the contents, because messages carry people's prompts.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class WireVersionError(WireError):
    """The sender speaks another major version of the protocol; nothing of its message can be trusted to mean the same.

    Args:
        version: the sender's, as a text of at most 40 characters; it may be any number.
        own_version: this process's.
    """

    def __init__(self, version: str, own_version: int) -> None:
        super().__init__(f"the sender speaks protocol {version}, this process {own_version}")
        self.version = version


class WireSizeError(WireError):
    """A message is larger than the limit; it was neither sent nor read."""

    def __init__(self, what: str, size_bytes: int, max_bytes: int) -> None:
        super().__init__(f"{what} of {size_bytes} bytes is over the limit of {max_bytes}")
        self.size_bytes = size_bytes
        self.max_bytes = max_bytes
