"""`sluice nats-config`: users, permissions and passwords for a broker, as files that its hosts and services read.

    DIR/nats/nats.conf            for nats-server -c; with --server one file per server, `<name>.conf`, which listens
                                  on that server's own address only
    DIR/<role>/password           for SLUICE_NATS_PASSWORD_FILE of that role's processes

Passwords that are there already are kept, so that the command can be run again after an update.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from shared.addresses import host_and_port, normal_host
from shared.errors import StartupError
from shared.process.config import read_password
from shared.subjects import check_token
from shared.transport.nats_config import ROUTE_PORT, BrokerConfig, ServerCluster, config_text, new_password
from shared.transport.nats_roles import BrokerRole
from shared.transport.nats_server import write_private


def parse_server(text: str) -> tuple[str, str]:
    """Return name and host of `NAME=HOST`.

    Raises:
        ValueError: it is not of this form.
    """
    name, equals, host = text.partition("=")
    if not equals:
        raise ValueError(f"'{text[:80]}' is not NAME=HOST, for example a=10.0.0.1")
    return check_token(name), normal_host(host)


def write_nats_config(out: Path, config: BrokerConfig, servers: Sequence[tuple[str, str]] = ()) -> list[Path]:
    """Write the files, and return those that a broker reads.

    Args:
        out: their folder.
        config: of each server, but for passwords, names and what a NATS cluster needs; with servers, only the port
            counts of where it listens.
        servers: name and host of each server of a NATS cluster; empty: one server by itself.

    Raises:
        StartupError: the folder cannot be written.
    """
    folder = out / "nats"
    try:
        config = replace(config, passwords={role: _password(out / role / "password") for role in BrokerRole})
        files = {f"{name}.conf": config_text(own) for name, own in _each(config, folder, servers)}
        for name, text in files.items():
            _write(folder / name, text)
    except OSError as error:
        raise StartupError(f"cannot write to {out} ({error.strerror})", "Name another folder with --out") from None
    return [folder / name for name in files]


def _each(config: BrokerConfig, folder: Path, servers: Sequence[tuple[str, str]]) -> Iterator[tuple[str, BrokerConfig]]:
    if not servers:
        yield "nats", replace(config, server_name="sluice")
        return
    route_password = _password(folder / "route-password")
    port = config.listen.rpartition(":")[2]
    for name, host in servers:
        others = tuple(host_and_port(other, ROUTE_PORT) for other_name, other in servers if other_name != name)
        cluster = ServerCluster(host_and_port(host, ROUTE_PORT), others, route_password)
        yield name, replace(config, listen=host_and_port(host, port), server_name=name, cluster=cluster)


def _password(path: Path) -> str:
    if os.path.lexists(path):
        return read_password(path, "Remove it, and one is made")
    password = new_password()
    _write(path, password + "\n")
    return password


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(path, text)
