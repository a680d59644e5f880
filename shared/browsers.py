"""Who may speak to an HTTP server: under which of its names, and the pages of which origins. Pure.

A browser sends what the script of any page has it send, also to servers that only this machine or this network reaches.
Three headers tell such a request from a program's; browsers write them, and scripts cannot:

    Host            the name in the address that was opened. It is a stranger's own if he lets it lead here (DNS
                    rebinding): then his page is of this server's origin
    Origin          the page's origin; only a plain GET or HEAD of the page's own choice goes without it
    Sec-Fetch-Site  how the page's origin and the address are related; sent to this machine and over TLS only

A key is sent by no browser of its own accord, so where one is asked for a stranger's name is harmless.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from enum import StrEnum
from typing import Final

from multidict import MultiMapping

from shared.addresses import read_address
from shared.errors import StartupError

EVERYBODY: Final = "*"
"""Stands for every origin."""
_HOST: Final = r"\[[0-9a-z:.%_-]+\]|[0-9a-z._-]+"
_AUTHORITY: Final = re.compile(rf"({_HOST})(?::[0-9]{{0,5}})?")
_ORIGIN: Final = re.compile(rf"([a-z][a-z0-9+.-]*)://({_HOST})(?::([0-9]{{1,5}}))?")
_NAME: Final = re.compile(r"[0-9a-z_-]+(\.[0-9a-z_-]+)*")
_OWN_SCHEMES: Final = ("http", "https")
"""Of this server's own pages; behind a proxy with TLS it is the second."""
_PORTS: Final = {"http": "80", "https": "443"}


class Foreign(StrEnum):
    """Why somebody may not speak to a server, as a code of its errors."""

    HOST = "foreign_host"
    ORIGIN = "foreign_origin"

    @property
    def message(self) -> str:
        """What to do about it, in a sentence."""
        if self is Foreign.HOST:
            return "Without keys, ask by address, as localhost, or by a name that --allow-host gives."
        return "Pages of other origins may not ask here; --allow-origin names those that may."


class BrowserRules:
    """Tells who may speak to a server.

    Args:
        names: under which it may be asked, besides addresses and localhost; None: under any.
        origins: whose pages may ask, besides its own, as `normal_origin` writes them; `*` among them: everybody's.
    """

    def __init__(self, names: Iterable[str] | None, origins: Collection[str] = ()) -> None:
        self._names = None if names is None else frozenset(name.lower() for name in names)
        self.origins = frozenset(origins)

    def judge(self, target: str, headers: MultiMapping[str]) -> Foreign | None:
        """Return why the request may not be looked at; None: it may.

        Args:
            target: of the request line, as it was sent.
            headers: their names in any case.
        """
        hosts = [*_authority(target), *headers.getall("Host", [])]
        if self._names is not None and not all(self._is_own(_host(each)) for each in hosts):
            return Foreign.HOST
        origins = headers.getall("Origin", [])
        if any(not self.allows(each) and not _is_of(each, hosts) for each in origins):
            return Foreign.ORIGIN
        is_welcome = EVERYBODY in self.origins or any(self.allows(each) for each in origins)
        is_cross_site = "cross-site" in headers.getall("Sec-Fetch-Site", [])
        return Foreign.ORIGIN if is_cross_site and not is_welcome else None

    def allows(self, origin: str) -> bool:
        """Return whether pages of this other origin may ask; `origin` is the header, whatever stands there."""
        return EVERYBODY in self.origins or normal_origin(origin) in self.origins

    def _is_own(self, host: str) -> bool:
        """Return whether no stranger can have made this name lead here."""
        assert self._names is not None, "somebody looks at names"
        if host in self._names or host == "localhost" or host.endswith(".localhost"):  # RFC 6761, section 6.3
            return True
        return read_address(host) is not None


def normal_origin(text: str) -> str | None:
    """Return `scheme://host` or `scheme://host:port` in lower case, without the scheme's own port; None: it is none."""
    match = _ORIGIN.fullmatch(text.lower())
    if match is None:
        return None
    scheme, host, port = match.groups()
    return f"{scheme}://{host}" if port in (None, _PORTS.get(scheme)) else f"{scheme}://{host}:{port}"


def check_origin(text: str) -> str:
    """Return an origin of the settings as `normal_origin` writes it, or `*`.

    Raises:
        ValueError: it is neither. `null` is not: it is the origin of pages from everywhere.
    """
    found = EVERYBODY if text == EVERYBODY else normal_origin(text)
    if found is None:
        raise ValueError(f"'{text[:80]}' is no origin (allowed: scheme://host or scheme://host:port, or *)")
    return found


def check_host_name(text: str) -> str:
    """Return a name of the settings in lower case, without the dot at its end.

    Raises:
        ValueError: it is none.
    """
    name = text.lower().removesuffix(".")
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"'{text[:80]}' is no host name (allowed: letters, digits, '.', '-', '_'; no port)")
    return name


def check_everybody(origins: Collection[str], *, has_keys: bool) -> None:
    """Refuse to let the pages of everybody use a server that everybody may use.

    Raises:
        StartupError: that is what the settings say.
    """
    if EVERYBODY in origins and not has_keys:
        raise StartupError(
            "--allow-origin '*' without keys would let every page that is opened use the model",
            "Name the origins, or give the API keys with --api-keys-file",
            "keys_needed",
        )


def _authority(target: str) -> list[str]:
    """Return what a target names besides a path: it counts before `Host` (RFC 9112, section 3.2.2)."""
    if target.startswith("/") or target == "*":
        return []
    return [re.split(r"[/?#]", target.partition("://")[2] or target, maxsplit=1)[0]]


def _host(authority: str) -> str:
    """Return the host of `host:port` in lower case, without brackets and the dot at its end; "" if it is none."""
    match = _AUTHORITY.fullmatch(authority.lower())
    return match[1].strip("[]").removesuffix(".") if match else ""


def _is_of(origin: str, hosts: Collection[str]) -> bool:
    """Return whether a page is of this server's own origin, by what the request says that this is."""
    own = normal_origin(origin)
    same = [own in [normal_origin(f"{scheme}://{host}") for scheme in _OWN_SCHEMES] for host in hosts]
    return own is not None and bool(same) and all(same)
