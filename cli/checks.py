"""What can be known to fail before anything starts. Each check raises one `StartupError` with the next step."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from urllib.parse import urlsplit

from cli.settings import UpSettings
from shared.errors import StartupError
from shared.systems import UnknownSystemError, find_system

BROKER_LIMIT_S = 0.8
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")


def check_settings(settings: UpSettings) -> None:
    """Check what depends on the settings alone.

    Raises:
        StartupError: an unknown system or device, or an address that everybody could reach without a key.
    """
    try:
        find_system(settings.system)
    except UnknownSystemError as error:
        raise StartupError(str(error), "Choose one with --system") from error
    if not _DEVICE.fullmatch(settings.device):
        raise StartupError(f"unknown device '{settings.device}'", "Use --device cpu, cuda or cuda:<index>")
    if not settings.allow_no_key and not _is_own_address(settings.host):
        raise StartupError(
            f"{settings.host} can be reached from other machines, and the API asks for no key",
            "Listen on 127.0.0.1, or accept it with --allow-no-key",
        )


def find_port(host: str, port: int) -> int:
    """Return the port if it is free, or a free one for 0.

    Raises:
        StartupError: it is taken or not allowed, or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise StartupError(f"the address '{host}' is unknown", "Use --host 127.0.0.1") from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            raise _explain_bind(host, port, error) from error
        return int(probe.getsockname()[1])


def check_broker(nats_url: str) -> None:
    """Check that something listens where the broker should.

    Raises:
        StartupError: nothing does.
    """
    parts = urlsplit(nats_url.split(",")[0])
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 4222), BROKER_LIMIT_S):
            return
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise StartupError(
            f"no NATS server answers at {parts.hostname}:{parts.port or 4222} ({reason})",
            "Start it, or unset NATS_URL and --nats-url so that a broker is started here",
        ) from error


def _is_own_address(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _explain_bind(host: str, port: int, error: OSError) -> StartupError:
    if error.errno == errno.EADDRINUSE:
        return StartupError(f"port {port} on {host} is taken", "Choose another with --port, or --port 0 for a free one")
    if error.errno == errno.EACCES:
        return StartupError(f"port {port} needs more rights than you have", "Choose one above 1023 with --port")
    return StartupError(f"cannot listen on {host}: {error.strerror}", "Use an address of this machine with --host")
