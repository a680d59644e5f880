"""`sluice nats-config`: users, permissions and passwords for a broker, as files that its hosts and services read.

    DIR/nats/nats.conf            for nats-server -c; with --server one file per server, `<name>.conf`, which listens
                                  on that server's own address only
    DIR/<role>/password           for SLUICE_NATS_PASSWORD_FILE of that role's processes

Passwords that are there already are kept, so that the command can be run again after an update.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from shared.errors import StartupError
from shared.subjects import check_token
from shared.transport.nats_config import ROUTE_PORT, BrokerConfig, ServerCluster, config_text, new_password
from shared.transport.nats_roles import Role
from shared.transport.nats_server import write_private


@dataclass(frozen=True, slots=True)
class NatsConfigOptions:
    """What the command was given."""

    out: Path
    clusters: tuple[str, ...]
    listen: str
    """`host:port` for clients; with servers, only its port counts."""
    store_dir: str
    http: str
    servers: tuple[tuple[str, str], ...] = ()
    """Name and host of each server of a NATS cluster; empty: one server by itself."""


def parse_server(text: str) -> tuple[str, str]:
    """Return name and host of `NAME=HOST`.

    Raises:
        ValueError: it is not of this form.
    """
    name, equals, host = text.partition("=")
    if not equals or not host or any(char.isspace() or char in "/@:" for char in host):
        raise ValueError(f"'{text[:80]}' is not NAME=HOST, for example a=10.0.0.1")
    return check_token(name), host


def write_nats_config(options: NatsConfigOptions) -> list[Path]:
    """Write the files, and return those that a broker reads.

    Raises:
        StartupError: the folder cannot be written.
    """
    try:
        passwords = {role: _password(options.out / role / "password") for role in Role}
        files = [(f"{name}.conf", text) for name, text in _texts(options, passwords)]
        folder = options.out / "nats"
        for name, text in files:
            _write(folder / name, text)
    except OSError as error:
        raise StartupError(
            f"cannot write to {options.out} ({error.strerror})", "Name another folder with --out"
        ) from None
    return [folder / name for name, _ in files]


def _texts(options: NatsConfigOptions, passwords: dict[Role, str]) -> list[tuple[str, str]]:
    if not options.servers:
        return [("nats", config_text(_config(options, passwords)))]
    route_password = _password(options.out / "nats" / "route-password")
    texts = []
    for name, host in options.servers:
        others = tuple(f"{other}:{ROUTE_PORT}" for other_name, other in options.servers if other_name != name)
        cluster = ServerCluster(f"{host}:{ROUTE_PORT}", others, route_password)
        own = replace(options, listen=f"{host}:{options.listen.rpartition(':')[2]}")
        texts.append((name, config_text(_config(own, passwords, name, cluster))))
    return texts


def _config(
    options: NatsConfigOptions, passwords: dict[Role, str], name: str = "sluice", cluster: ServerCluster | None = None
) -> BrokerConfig:
    return BrokerConfig(
        listen=options.listen,
        store_dir=options.store_dir,
        passwords=passwords,
        clusters=options.clusters,
        server_name=name,
        http=options.http,
        cluster=cluster,
    )


def _password(path: Path) -> str:
    if path.is_file():
        return path.read_text().strip()
    password = new_password()
    _write(path, password + "\n")
    return password


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(path, text)
