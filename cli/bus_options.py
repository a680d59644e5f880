"""The commands by way of the bus as the command line knows them: `sluice drain`, `tap`, `nats-config`, `nats-setup`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

CLUSTER_HELP = "One that runs here, by name, id or port; or its name on a shared broker. [the one here, else default]"
BROKER_HELP = "Broker. [NATS_URL, else that of the cluster that runs here, else nats://127.0.0.1:4222]"

_json_option = click.option("--json", "as_json", is_flag=True, help="One line of JSON.")

DRAIN_EPILOG = """\b
Examples:
  sluice drain worker-0                        its requests go on elsewhere with their KV, and it ends
  sluice drain worker-0 worker-1 worker-2      a rolling restart: the next one once the one before is back
  sluice status                                which workers there are

Readers see about a step's pause. What finds no room elsewhere ends where it runs, within the worker's --drain-limit-s.
Who started the worker starts it again: `sluice up` and docker-compose do. If it serves as a stage of a pipeline group,
the planner restores the group first.
"""

TAP_EPILOG = """\b
Examples:
  sluice tap                                               all of the messages of the cluster
  sluice tap 'sluice.default.event.>'                      what happens
  sluice tap 'sluice.default.worker.*.submit' | jq .message
  nats sub 'sluice.default.>' --translate 'sluice tap --decode'

Prompts and answers are token ids: counted, and shown only with --tokens. Answers to requests go to inboxes that only
who asked can read. NATS_URL, or SLUICE_NATS_USER and SLUICE_NATS_PASSWORD, sign in elsewhere.
"""

NATS_CONFIG_EPILOG = """\b
Examples:
  sluice nats-config --out ./nats --store /var/lib/nats
  sluice nats-config --out ./nats --server a=10.0.0.1 --server b=10.0.0.2 --server c=10.0.0.3
  nats-server -c ./nats/nats/nats.conf
  SLUICE_NATS_USER=setup SLUICE_NATS_PASSWORD_FILE=./nats/setup/password sluice nats-setup
  SLUICE_NATS_USER=worker SLUICE_NATS_PASSWORD_FILE=./nats/worker/password python -m services.worker …

Give each host the folders of the roles that run there, and no other. Passwords that exist are kept.
"""

NATS_SETUP_EPILOG = """\b
Examples:
  SLUICE_NATS_USER=setup SLUICE_NATS_PASSWORD_FILE=./nats/setup/password sluice nats-setup
  SLUICE_NATS_REPLICAS=3 sluice nats-setup                 for a NATS cluster of three servers

The roles' users may not make buckets: services wait until they are there. `sluice up` makes those of its own broker.
"""


@click.command(epilog=TAP_EPILOG)
@click.argument("subject", default="")
@click.option("--nats-url", metavar="URL", default=None, help=BROKER_HELP)
@click.option("--cluster", metavar="NAME", default=None, help=CLUSTER_HELP)
@click.option("--count", metavar="N", type=click.IntRange(min=0), default=0, help="End after N messages. [no end]")
@click.option("--tokens", "with_tokens", is_flag=True, help="Show the ids of prompts and answers.")
@click.option("--decode", is_flag=True, help="Show one payload from stdin, and end.")
def tap(*, subject: str, decode: bool, count: int, with_tokens: bool, **flags: Any) -> int:
    """Show messages of the bus, one JSON object per line. SUBJECT may have wildcards."""
    from cli.tap.command import decode_one, run_tap

    if decode:
        return decode_one()
    return asyncio.run(run_tap(subject, flags, count=count, with_tokens=with_tokens))


@click.command("nats-config", epilog=NATS_CONFIG_EPILOG)
@click.option("--out", metavar="DIR", required=True, help="Folder for configuration and passwords.")
@click.option("--cluster", "clusters", metavar="NAME", multiple=True, help="Sluice cluster on the broker. [default]")
@click.option("--listen", metavar="ADDR", default="0.0.0.0:4222", show_default=True, help="Where clients connect.")
@click.option("--store", "store_dir", metavar="DIR", default="/data", show_default=True, help="JetStream's files.")
@click.option("--http", metavar="ADDR", default="127.0.0.1:8222", show_default=True, help="Monitoring of the server.")
@click.option("--server", "servers", metavar="NAME=HOST", multiple=True, help="A server of a NATS cluster; repeat.")
@_json_option
def nats_config(*, out: str, clusters: tuple[str, ...], servers: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Make users per role for a broker: a configuration for nats-server, and a password file for each role."""
    from cli.nats_config import parse_server, write_nats_config
    from shared.subjects import check_token
    from shared.transport.nats_config import BrokerConfig

    try:
        named = tuple(parse_server(text) for text in servers)
        checked = tuple(check_token(name) for name in clusters or ("default",))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if len({name for name, _ in named}) < len(named):
        raise click.UsageError("two servers have the same name")
    paths = [str(path) for path in write_nats_config(Path(out), BrokerConfig(clusters=checked, **options), named)]
    click.echo(json.dumps(paths) if as_json else "\n".join(paths))
    return 0


@click.command("nats-setup", epilog=NATS_SETUP_EPILOG)
@click.option("--nats-url", metavar="URL", default=None, help="Broker. [NATS_URL, else nats://127.0.0.1:4222]")
@click.option("--cluster", metavar="NAME", default=None, help="Name of the cluster on the broker. [default]")
@click.option("--keep", is_flag=True, help="Stay, and make them again if the broker loses its disk.")
@_json_option
def nats_setup(*, keep: bool, as_json: bool, **flags: Any) -> int:
    """Make the key-value buckets of a cluster at a broker that runs, or will within a minute; print their names."""
    from cli.cluster.settings import load_up_settings
    from cli.nats_setup import run_nats_setup

    return asyncio.run(run_nats_setup(load_up_settings(flags), keep=keep, as_json=as_json))


def _ids(_context: click.Context, _parameter: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    from shared.subjects import check_token

    try:
        return tuple(map(check_token, names))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command(epilog=DRAIN_EPILOG)
@click.argument("workers", metavar="WORKER…", nargs=-1, required=True, callback=_ids)
@click.option(
    "--timeout",
    "limit_s",
    metavar="S",
    type=click.FloatRange(min=0, min_open=True, max=3600),
    default=180.0,
    show_default=True,
    help="Seconds that each may take to end, and to be back; what was begun goes on all the same.",
)
@click.option("--cluster", metavar="NAME", default=None, help=CLUSTER_HELP)
@click.option("--nats-url", metavar="URL", default=None, help=BROKER_HELP)
@_json_option
def drain(*, workers: tuple[str, ...], limit_s: float, as_json: bool, **flags: Any) -> int:
    """Have workers give their requests to others and end; several of them one after the other."""
    from cli.drain import run_drain

    drained = asyncio.run(run_drain(workers, flags, limit_s, (lambda _line: None) if as_json else click.echo))
    if as_json:
        click.echo(json.dumps([asdict(each) for each in drained]))
    return 0
