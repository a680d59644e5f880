"""What can be known to fail before anything starts. Each check raises one `StartupError` with the next step."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import socket
import time
from collections.abc import Collection
from urllib.parse import urlsplit

from cli.cluster.settings import UpSettings
from shared.addresses import check_reachable, host_and_port
from shared.browsers import check_everybody
from shared.errors import StartupError
from shared.reading import is_file
from shared.sizes import describe_bytes
from shared.systems import UnknownSystemError, find_live_system

BROKER_LIMIT_S = 0.8
MAX_GREETING_BYTES = 64 * 1024
_OWN_BROKER_HINT = "Start it, or unset NATS_URL and --nats-url so that a broker is started here"
QUIET_PORTS = range(20_000, 32_000)
"""Below those from which systems choose for outgoing connections: one of them could take a port before it is used."""
_NUM_TRIES = 8
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")


def check_settings(settings: UpSettings) -> None:
    """Check what depends on the settings alone.

    Raises:
        StartupError: an unknown system or device, workers that do not come out even or want more memory than there is,
            an address that everybody could reach or a page that everybody could write without a key, or no file of
            keys where one is named.
    """
    try:
        num_stages = find_live_system(settings.system).num_stages
    except UnknownSystemError as error:
        raise StartupError(str(error), "Choose one with --system") from error
    if settings.workers % num_stages:
        counted = f"{num_stages} workers to a pipeline: {settings.workers} do not come out even"
        raise StartupError(f"system {settings.system} joins {counted}", f"Give a multiple of {num_stages} as --workers")
    if not _DEVICE.fullmatch(settings.device):
        raise StartupError(f"unknown device '{settings.device}'", "Use --device auto, cpu, cuda or cuda:<index>")
    check_memory(settings)
    check_reachable(settings.host, has_keys=settings.has_keys, allow_no_key=settings.allow_no_key)
    check_everybody(settings.allow_origin, has_keys=settings.has_keys)
    if settings.api_keys_file is not None and not is_file(settings.api_keys_file):
        hint = "Make one with `sluice keys create`"
        raise StartupError(f"there is no file of keys {settings.api_keys_file}", hint, "keys_file")


def check_memory(settings: UpSettings) -> None:
    """Check that this machine has what the workers are to have together; a budget that nobody gave is not asked for."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    num_workers, host_bytes = settings.workers, settings.host_memory or 0
    memory = (settings.memory or 0) if settings.device == "cpu" else 0
    wanted = host_bytes + memory
    if num_workers * wanted > there:
        counted = describe_bytes(wanted) + (f" for each of {num_workers} workers" if num_workers > 1 else "")
        flags = [*(["--memory"] if memory else []), *(["--host-memory"] if host_bytes else [])]
        most = f"{' and '.join(flags)} {there // num_workers // 2**20}MiB{' together' if flags[1:] else ''}"
        hint = f"Give at most {most}, or fewer workers"
        raise StartupError(f"{counted} is more memory than the {describe_bytes(there)} of this machine", hint, "memory")


def find_port(host: str, port: int, promised: Collection[int] = ()) -> int:
    """Return the port if it is free, or a free one for 0.

    Args:
        host: at which somebody will listen.
        port: at which; 0 = any.
        promised: ports that somebody will listen at, and does not yet: none of them is chosen.

    Raises:
        StartupError: it is taken or not allowed, or the address is not this machine's.
    """
    for candidate in random.sample(QUIET_PORTS, _NUM_TRIES) if port == 0 else ():
        if candidate not in promised:
            with contextlib.suppress(StartupError):
                return _probe(host, candidate)
    return _probe(host, port)


def _probe(host: str, port: int) -> int:
    """Return the port if it is free, or one of the system's choice for 0; raises as `find_port`."""
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
    """Check that a broker of the right kind greets where it should; of several URLs, the first is asked.

    Raises:
        StartupError: nothing listens there, or no NATS server, or one without JetStream.
    """
    parts = urlsplit(nats_url.split(",")[0])
    where = host_and_port(parts.hostname or "", parts.port or 4222)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 4222), BROKER_LIMIT_S) as connection:
            greeting = _greeting(connection) if parts.scheme == "nats" else None
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise StartupError(
            f"no NATS server answers at {where} ({reason})", _OWN_BROKER_HINT, "broker_unreachable"
        ) from error
    if greeting is None:  # TLS or WebSocket: the services find out
        return
    if not greeting.startswith(b"INFO "):
        raise StartupError(f"what listens at {where} is no NATS server", _OWN_BROKER_HINT, "broker_unreachable")
    if not any(
        word in greeting for word in (b'"jetstream":true', b'"cluster":')
    ):  # of a cluster, another one may have it
        raise StartupError(
            f"the NATS server at {where} runs without JetStream", "Start it with -js", "broker_unreachable"
        )


def _greeting(connection: socket.socket) -> bytes:
    """Return the first line that the server sends unasked, without its end; what came in time if it is no line."""
    line = b""
    deadline_s = time.monotonic() + BROKER_LIMIT_S
    while b"\n" not in line and len(line) < MAX_GREETING_BYTES and time.monotonic() < deadline_s:
        try:
            data = connection.recv(4096)
        except TimeoutError:
            break
        if not data:
            break
        line += data
    return line.split(b"\n")[0]


def _explain_bind(host: str, port: int, error: OSError) -> StartupError:
    if error.errno == errno.EADDRINUSE:
        return StartupError(
            f"port {port} on {host} is taken", "Choose another with --port, or --port 0 for a free one", "port_taken"
        )
    if error.errno == errno.EACCES:
        return StartupError(f"port {port} needs more rights than you have", "Choose one above 1023 with --port")
    return StartupError(f"cannot listen on {host}: {error.strerror}", "Use an address of this machine with --host")
