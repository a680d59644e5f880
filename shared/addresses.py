"""Which addresses only this machine can reach, and who may listen on the others."""

from __future__ import annotations

import ipaddress

from shared.errors import StartupError


def is_own_address(host: str) -> bool:
    """Return whether only this machine reaches what listens there; of names, only `localhost` is known to be so."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_reachable(host: str, *, has_keys: bool, allow_no_key: bool) -> None:
    """Refuse to let everybody in by accident.

    Args:
        host: where the API is to listen.
        has_keys: whether it asks for a key.
        allow_no_key: whether somebody has said that it need not.

    Raises:
        StartupError: other machines reach the address, and no key is asked for.
    """
    if has_keys or allow_no_key or is_own_address(host):
        return
    raise StartupError(
        f"{host} can be reached from other machines, and the API asks for no key",
        "Give it keys with --api-keys-file, listen on 127.0.0.1, or accept it with --allow-no-key",
    )
