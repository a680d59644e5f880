"""The options of `sluice chaos`."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final

import click

from cli.bus_options import BROKER_HELP

MAX_S: Final = 3600.0
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0}
_EPILOG: Final = """\b
Examples:
  sluice chaos kill worker-0                   its streams pause and go on elsewhere
  sluice chaos hang nats --for 10s             the broker stands still for a while
  sluice chaos restart dispatcher-0            it finishes what runs, and is started again by `sluice up`

TARGET is the id of a service (`nats micro ls` shows them) or `nats`, the broker. Only processes of this machine are
touched: a container is stopped with `docker-compose kill`.
"""


def seconds_of(_ctx: click.Context | None, _param: click.Parameter | None, value: str) -> float:
    """Return the seconds that `5s`, `500ms`, `2m`, or a number without a unit mean; at most an hour.

    Raises:
        BadParameter: it means none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)?", value.strip())
    seconds = float(found[1]) * _UNITS[found[2] or "s"] if found is not None else 0.0
    if not 0 < seconds <= MAX_S:
        raise click.BadParameter(f"'{value}' is no duration; write 500ms, 5s or 2m, at most an hour")
    return seconds


@click.group(epilog=_EPILOG)
def chaos() -> None:
    """Do to a process of this cluster what may happen to it: for tests by hand."""


def _where(command: Any) -> Any:
    command = click.argument("target", metavar="TARGET")(command)
    command = click.option("--cluster", metavar="NAME", default=None, help="Name of the cluster. [default]")(command)
    return click.option("--nats-url", metavar="URL", default=None, help=BROKER_HELP)(command)


@chaos.command()
@_where
def kill(target: str, **where: str | None) -> int:
    """End TARGET at once (SIGKILL)."""
    from cli.chaos import command
    from cli.cluster.settings import load_bus_settings
    from cli.console import Console

    asyncio.run(command.kill(load_bus_settings(where), target, Console()))
    return 0


@chaos.command()
@_where
@click.option(
    "--for", "duration_s", metavar="T", callback=seconds_of, default="5s", show_default=True, help="How long."
)
def hang(target: str, duration_s: float, **where: str | None) -> int:
    """Let TARGET stand still for a while (SIGSTOP, then SIGCONT)."""
    from cli.chaos import command
    from cli.cluster.settings import load_bus_settings
    from cli.console import Console

    asyncio.run(command.hang(load_bus_settings(where), target, duration_s, Console()))
    return 0


@chaos.command()
@_where
@click.option(
    "--within",
    "limit_s",
    metavar="T",
    callback=seconds_of,
    default="150s",
    show_default=True,
    help="To end and be back.",
)
def restart(target: str, limit_s: float, **where: str | None) -> int:
    """Ask TARGET to finish and end (SIGTERM), and wait until it is back."""
    from cli.chaos import command
    from cli.cluster.settings import load_bus_settings
    from cli.console import Console

    asyncio.run(command.restart(load_bus_settings(where), target, limit_s, Console()))
    return 0
