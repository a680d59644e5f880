"""Who is meant: a service by its id, found by what it says of itself on the bus, or the broker, found by its port."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from cli.exit_codes import FAILED, REFUSED, UNREACHABLE, CommandError
from cli.processes import command_line, is_local_address, listener_on
from shared.reading import parse_json
from shared.transport.bus import Bus, BusError, BusTimeoutError

BROKER: Final = "nats"
SERVICES: Final = ("worker", "dispatcher", "monitor", "planner")
ASK_LIMIT_S: Final = 2.0
MAX_TRIES: Final = 5
"""Questions until one of this cluster answers: on a shared broker another cluster may have the same id."""
_ELSEWHERE: Final = "Run this command there; a container is stopped with `docker-compose kill`"


@dataclass(frozen=True, slots=True)
class Target:
    """One process of this machine."""

    name: str
    """Instance id, or `nats`."""
    pid: int


async def find_service(bus: Bus, cluster: str, name: str) -> Target:
    """Return the service's process.

    Raises:
        CommandError: nobody goes by this id here, or it does not answer, or it is not on this machine.
    """
    kind, metadata = await _ask_all(bus, cluster, name)
    host, pid = metadata.get("host", ""), metadata.get("pid", "")
    if not pid.isdigit():
        raise CommandError(f"{name} does not say which process it is", "Use the `sluice` of its version", FAILED)
    if host != socket.gethostname():
        raise CommandError(f"{name} runs on '{host}', and this is '{socket.gethostname()}'", _ELSEWHERE, REFUSED)
    if f"services.{kind}" not in command_line(int(pid)):
        raise CommandError(
            f"process {pid} of this machine is not {name}, so it runs in a container", _ELSEWHERE, REFUSED
        )
    return Target(name, int(pid))


async def current_pid(bus: Bus, cluster: str, name: str) -> int | None:
    """Return the process that now answers to this id; None if nobody does."""
    try:
        _, metadata = await _ask_all(bus, cluster, name)
    except CommandError:
        return None
    return int(metadata["pid"]) if metadata.get("pid", "").isdigit() else None


def find_broker(url: str) -> Target:
    """Return the broker's process; of several URLs, the first counts.

    Raises:
        CommandError: it is not on this machine, or nothing that could be it listens there.
    """
    parts = urlsplit(url.split(",")[0])
    host, port = parts.hostname or "", parts.port or 4222
    if not is_local_address(host):
        raise CommandError(f"the broker runs on '{host}', not on this machine", _ELSEWHERE, REFUSED)
    pid = listener_on(port)
    if pid is None or "nats-server" not in "".join(command_line(pid)[:1]):
        what = "nothing that is ours" if pid is None else f"process {pid}, which is no nats-server"
        raise CommandError(f"{what} listens on port {port} of this machine", _ELSEWHERE, REFUSED)
    return Target(BROKER, pid)


async def _ask_all(bus: Bus, cluster: str, name: str) -> tuple[str, dict[str, str]]:
    """Return kind and metadata of the service with this id."""
    is_silent = False
    for kind in SERVICES:
        try:
            metadata = await _ask(bus, kind, cluster, name)
        except TimeoutError:
            is_silent = True
            continue
        if metadata is not None:
            return kind, metadata
    if is_silent:
        hint = "It may hang: look for its process with `ps`, and let it go on with `kill -CONT`"
        raise CommandError(f"{name} is known to the broker but does not answer", hint, UNREACHABLE)
    hint = "`sluice status` and `nats micro ls` show who is there; the broker is called 'nats'"
    raise CommandError(f"nobody goes by '{name}' in cluster '{cluster}'", hint, UNREACHABLE)


async def _ask(bus: Bus, kind: str, cluster: str, name: str) -> dict[str, str] | None:
    """Return the metadata of this service, or None if there is none of this kind and id.

    Raises:
        TimeoutError: it does not answer.
    """
    for _ in range(MAX_TRIES):
        try:
            data = await bus.request(f"$SRV.INFO.sluice-{kind}.{name}", b"", timeout_s=ASK_LIMIT_S)
        except BusTimeoutError:
            raise TimeoutError from None
        except BusError:
            return None
        metadata = _metadata(data)
        if metadata.get("cluster") == cluster:
            return metadata
    return None


def _metadata(data: bytes) -> dict[str, str]:
    """Return what a service says of itself; nothing if its answer is none of ours."""
    try:
        return {str(name): str(value) for name, value in parse_json(data)["metadata"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
