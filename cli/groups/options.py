"""The options of `sluice drop`, `sluice restore` and `sluice planner`."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import click

from cli.bus_options import BROKER_HELP, CLUSTER_HELP

MAX_LIMIT_S: Final = 600.0
_DROP_EPILOG: Final = """\b
Examples:
  sluice drop                                  what is needed now; if nothing is, the best pair
  sluice drop --workers worker-0,worker-1      one group of exactly these
  sluice status                                which groups there are

Workers of a group hold the model once between them; the memory of the other copies becomes KV memory. Running answers
pause for a moment and go on. Only workers whose system drops parameters can do it (`sluice up --system kunserve`).
"""
_RESTORE_EPILOG: Final = """\b
Examples:
  sluice restore                               every worker is a whole instance again
  sluice restore --group worker-0              only the group that worker-0 leads
"""


def _names(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    if value is None:
        return ()
    names = tuple(part.strip() for part in value.split(",") if part.strip())
    if len(names) < 2:
        raise click.BadParameter("a group takes two workers at least, with a comma between them")
    return names


_limit_option = click.option(
    "--timeout",
    "limit_s",
    metavar="S",
    type=click.FloatRange(min=0, min_open=True, max=MAX_LIMIT_S),
    default=60.0,
    show_default=True,
    help="Seconds to wait for the answer; the planner goes on with it all the same.",
)


def _bus_options(command: Any) -> Any:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="The planner's answer as one line of JSON."),
        click.option("--cluster", metavar="NAME", default=None, help=CLUSTER_HELP),
        click.option("--nats-url", metavar="URL", default=None, help=BROKER_HELP),
    ):
        command = option(command)
    return command


@click.command(name="planner")
@_bus_options
def planner(*, as_json: bool, **flags: Any) -> int:
    """Print what the planner decided last, why, and how many instances it wants."""
    from cli.groups.command import run_planner

    click.echo(asyncio.run(run_planner(flags, as_json=as_json)))
    return 0


@click.command(epilog=_DROP_EPILOG)
@click.option("--workers", metavar="A,B,…", default=None, callback=_names, help="Workers of one group. [by need]")
@_limit_option
@_bus_options
def drop(*, workers: tuple[str, ...], limit_s: float, as_json: bool, **flags: Any) -> int:
    """Have workers drop replicated parameters and serve as a pipeline group."""
    from cli.groups.command import run_verb

    click.echo(asyncio.run(run_verb("drop", {"workers": list(workers)}, flags, limit_s=limit_s, as_json=as_json)))
    return 0


@click.command(epilog=_RESTORE_EPILOG)
@click.option("--group", "groups", metavar="ID", multiple=True, help="A group, by its leader; repeat. [all]")
@_limit_option
@_bus_options
def restore(*, groups: tuple[str, ...], limit_s: float, as_json: bool, **flags: Any) -> int:
    """Make the workers of pipeline groups whole instances again."""
    from cli.groups.command import run_verb

    click.echo(asyncio.run(run_verb("restore", {"groups": list(groups)}, flags, limit_s=limit_s, as_json=as_json)))
    return 0
