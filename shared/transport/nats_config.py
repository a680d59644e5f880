"""The configuration of a nats-server for Sluice, as text: limits, pings, users, JetStream, and a cluster of servers.

    BrokerConfig(listen="0.0.0.0:4222", store_dir="/data", passwords=new_passwords()) ─► config_text ─► nats-server -c

No file and no process is touched here; `shared.transport.nats_server` starts one, `sluice nats-config` writes files.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from shared.transport.nats_roles import BrokerRole, permissions

PASSWORD_BYTES: Final = 24
"""Randomness of a generated password."""
ROUTE_USER: Final = "route"
"""Name under which the servers of one cluster know each other."""
ROUTE_PORT: Final = 6222
MAX_FILE_STORE: Final = "1GB"
"""Of all buckets. Stated, because the server else takes it from what is free on the disk at its start: nothing, for as
long as it runs, if the disk was full then."""
MAX_MEMORY_STORE: Final = "64MB"

_HEAD = """\
listen: {listen}
max_payload: 1MB
# a frozen peer is noticed in about 3 s
ping_interval: "1s"
ping_max: 2
jetstream {{
  store_dir: {store}
  max_file_store: {max_file_store}
  max_memory_store: {max_memory_store}
}}
"""


@dataclass(frozen=True, slots=True)
class ServerCluster:
    """Several servers that act as one broker; with three, any one may be lost."""

    listen: str
    """`host:port` for the other servers."""
    routes: tuple[str, ...]
    """`host:port` of the other servers."""
    password: str
    """What the servers show each other."""
    name: str = "sluice"


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """One server."""

    listen: str
    """`host:port` for clients; port -1 takes a free one."""
    store_dir: str
    """JetStream's files."""
    passwords: Mapping[BrokerRole, str] = field(default_factory=dict)
    """One user per role, with its permissions; empty: whoever connects may do everything."""
    clusters: tuple[str, ...] = ("default",)
    """Names of the Sluice clusters that share the broker; the users may act in each."""
    server_name: str = ""
    """Unique among the servers of one cluster; empty: NATS makes one up."""
    http: str = ""
    """`host:port` of the HTTP monitoring; empty: none."""
    http_path: str = ""
    """Under which the monitoring is; one that nobody guesses keeps others on the machine out. Empty: `/`."""
    ports_file_dir: str = ""
    """Where the server says which ports it took; empty: nowhere."""
    cluster: ServerCluster | None = None


def new_password() -> str:
    """Return a password that nobody guesses, of letters, digits, `-` and `_`."""
    return secrets.token_urlsafe(PASSWORD_BYTES)


def new_passwords() -> dict[BrokerRole, str]:
    """Return a fresh password for each role."""
    return {role: new_password() for role in BrokerRole}


def config_text(config: BrokerConfig) -> str:
    """Return the text of the server's configuration file."""
    parts = [
        f"server_name: {_quoted(config.server_name)}\n" if config.server_name else "",
        f"http: {_quoted(config.http)}\n" if config.http else "",
        f"http_base_path: {_quoted(config.http_path)}\n" if config.http_path else "",
        f"ports_file_dir: {_quoted(config.ports_file_dir)}\n" if config.ports_file_dir else "",
        _HEAD.format(
            listen=_quoted(config.listen),
            store=_quoted(config.store_dir),
            max_file_store=MAX_FILE_STORE,
            max_memory_store=MAX_MEMORY_STORE,
        ),
        _cluster(config.cluster) if config.cluster is not None else "",
        _authorization(config) if config.passwords else "",
    ]
    return "".join(parts)


def _cluster(cluster: ServerCluster) -> str:
    routes = [f"nats://{ROUTE_USER}:{cluster.password}@{where}" for where in cluster.routes]
    return "\n".join(
        [
            "cluster {",
            f"  name: {_quoted(cluster.name)}",
            f"  listen: {_quoted(cluster.listen)}",
            f"  authorization {{ user: {ROUTE_USER}, password: {_quoted(cluster.password)}, timeout: 2 }}",
            f"  routes: {_list(routes)}",
            "}\n",
        ]
    )


def _authorization(config: BrokerConfig) -> str:
    users = [_user(role, password, config.clusters) for role, password in config.passwords.items()]
    return "authorization {\n  users: [\n" + "".join(users) + "  ]\n}\n"


def _user(role: BrokerRole, password: str, clusters: tuple[str, ...]) -> str:
    allowed = [permissions(role, cluster) for cluster in clusters]
    publish = dict.fromkeys(subject for one in allowed for subject in one.publish)
    subscribe = dict.fromkeys(subject for one in allowed for subject in one.subscribe)
    hidden = dict.fromkeys(subject for one in allowed for subject in one.hidden)
    deny = f", deny: {_list(hidden)}" if hidden else ""
    responds = any(one.responds for one in allowed)
    return "\n".join(
        [
            f"    {{ user: {role}, password: {_quoted(password)}, permissions: {{",
            f"      publish: {{ allow: {_list(publish)} }}",
            f"      subscribe: {{ allow: {_list(subscribe)}{deny} }}",
            *(["      allow_responses: true"] if responds else []),
            "    } }\n",
        ]
    )


def _list(texts: Mapping[str, None] | list[str]) -> str:
    lines = "".join(f"        {_quoted(text)}\n" for text in texts)
    return f"[\n{lines}      ]"


def _quoted(text: str) -> str:
    # a JSON string is a string of NATS's configuration language too
    return json.dumps(text)
