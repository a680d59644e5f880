"""How hosts and URLs are written, which of them only this machine can reach, and who may listen on the others."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Final
from urllib.parse import urlsplit

from shared.errors import StartupError

_BROKER_SCHEMES: Final = ("nats", "tls", "ws", "wss")
_NUMBER: Final = r"(0x[0-9a-f]+|[0-9]+)"
_OLD_IPV4: Final = re.compile(rf"{_NUMBER}(\.{_NUMBER}){{0,3}}", re.ASCII | re.IGNORECASE)
"""What the system takes for an IPv4 address besides four decimal numbers: `127.1`, `0x7f.0.0.1`, `2130706433`."""
_NAME: Final = re.compile(r"[^\s\[\]/:?#@%]+")
BY_FLAGS: Final = "Give it keys with --api-keys-file, listen on 127.0.0.1, or accept it with --allow-no-key"


def normal_host(text: str) -> str:
    """Return an address in its usual spelling, or a name as it is.

    IPv6 has no brackets then; an IPv4 address is one also if it came as `127.1` or, inside of IPv6, `::ffff:127.0.0.1`.

    Raises:
        ValueError: it is neither, but perhaps a URL, or has a port.
    """
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    address = read_address(bare)
    if isinstance(address, ipaddress.IPv6Address):
        return str(address.ipv4_mapped or address)
    if bare != text or _NAME.fullmatch(text) is None:
        raise ValueError(f"'{text[:80]}' is no address or name of a host (allowed: no scheme, no port)")
    return text if address is None else str(address)


def read_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that the system would take this for; None: it is a name, or nothing."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        if _OLD_IPV4.fullmatch(text) is None:
            return None
    try:
        return ipaddress.IPv4Address(socket.inet_aton(text))
    except OSError:
        return None


def host_and_port(host: str, port: int | str) -> str:
    """Return both as URLs have them: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_broker_urls(text: str) -> str:
    """Return one URL of a NATS server, or several with commas.

    Raises:
        ValueError: one of them is none. It may hold a password, so it is not repeated.
    """
    for url in text.split(","):
        try:
            parts = urlsplit(url)
            is_url = parts.scheme in _BROKER_SCHEMES and bool(parts.hostname) and parts.port != 0
        except ValueError:  # brackets or a port that are none
            is_url = False
        if not is_url or any(char.isspace() for char in url):
            raise ValueError(f"no URL of a NATS server (allowed: {', '.join(_BROKER_SCHEMES)}, as nats://host:4222)")
    return text


def is_own_address(host: str) -> bool:
    """Return whether only this machine reaches what listens there; of names, only `localhost` is known to be so."""
    try:
        return ipaddress.ip_address(normal_host(host)).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_reachable(host: str, *, has_keys: bool, allow_no_key: bool, next_step: str = BY_FLAGS) -> None:
    """Refuse to let everybody in by accident.

    Args:
        host: where the API is to listen.
        has_keys: whether it asks for a key.
        allow_no_key: whether somebody has said that it need not.
        next_step: what to do about it.

    Raises:
        StartupError: other machines reach the address, and no key is asked for.
    """
    if has_keys or allow_no_key or is_own_address(host):
        return
    raise StartupError(
        f"{host} can be reached from other machines, and the API asks for no key",
        next_step,
        "keys_needed",
    )
