"""The commands about the clusters that run here, as the command line knows them: `sluice ps`, `down` and `logs`."""

from __future__ import annotations

import asyncio

import click

PS_EPILOG = """\b
Examples:
  sluice ps                                    which clusters run here
  sluice ps --json                             for scripts, with the URL of each broker

Clusters of this user that `sluice up` and `sluice demo` started on this machine.
"""

DOWN_EPILOG = """\b
Examples:
  sluice down                                  the only one that runs here
  sluice down 8000                             the one at this port
  sluice down --all                            all of them

CLUSTER is an id, a name, a URL or a port, as `sluice ps` shows them. It does what Ctrl-C does where `sluice up` runs.
"""

LOGS_EPILOG = """\b
Examples:
  sluice logs                                  the last lines of every process
  sluice logs worker-0 -f                      of one, and what it logs from now on
  sluice logs --tail 1000 --json | jq 'select(.level == "error")'

`up` is what `sluice up -d` said. `sluice up --log-dir` keeps logs after the end.
"""


@click.command(epilog=PS_EPILOG)
@click.option(
    "--json", "as_json", is_flag=True, help="One line of JSON; it has the password of each broker's operator."
)
def ps(*, as_json: bool) -> int:
    """Show the clusters that run here."""
    from cli.runs import run_ps

    click.echo(asyncio.run(run_ps(as_json=as_json)))
    return 0


@click.command(epilog=DOWN_EPILOG)
@click.argument("cluster", required=False)
@click.option("--all", "is_all", is_flag=True, help="All that run here.")
@click.option(
    "--timeout",
    "limit_s",
    metavar="S",
    type=click.FloatRange(min=0, min_open=True),
    default=200.0,
    show_default=True,
    help="Seconds to wait for the end of each; what was begun goes on all the same.",
)
def down(*, cluster: str | None, is_all: bool, limit_s: float) -> int:
    """Have a cluster that runs here finish running answers and end."""
    from cli.console import Console
    from cli.runs import run_down

    if is_all and cluster is not None:
        raise click.UsageError("--all names all of them already")
    asyncio.run(run_down(cluster, Console(), is_all=is_all, limit_s=limit_s))
    return 0


@click.command(epilog=LOGS_EPILOG)
@click.argument("names", metavar="[NAME]…", nargs=-1)
@click.option("--cluster", metavar="CLUSTER", default=None, help="Id, name, URL or port. [the only one that runs here]")
@click.option("--tail", metavar="N", type=click.IntRange(min=0), default=100, show_default=True, help="Lines of each.")
@click.option("--json", "as_json", is_flag=True, help="An object a line: whose it is, and what it logs.")
@click.option("-f", "--follow", "follows", is_flag=True, help="Go on, until Ctrl-C or the end of the cluster.")
def logs(*, names: tuple[str, ...], cluster: str | None, tail: int, follows: bool, as_json: bool) -> int:
    """Show what the processes of a cluster here have logged."""
    from cli.logs import run_logs

    try:
        for line in run_logs(names, cluster, tail=tail, follows=follows, as_json=as_json):
            click.echo(line)
    except KeyboardInterrupt:
        pass  # the end of --follow
    return 0
