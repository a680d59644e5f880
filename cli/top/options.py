"""`sluice top`, as the command line knows it, and the option that `sluice status --watch` shares with it."""

from __future__ import annotations

import asyncio
from typing import Final

import click

from cli.chat_options import api_key_option
from cli.run_file import URL_DEFAULT, api_url

DEFAULT_INTERVAL_S: Final = 1.0
_EPILOG: Final = """\b
Examples:
  sluice top                                   the cluster that runs here
  sluice top --url http://host:8000 --interval 5

Requests are those of the dispatcher that is asked. SLACK is for how long a request's reader has text; with a minus, for
how long it has waited for some. QOE is what the reader has experienced by now, 0 to 1. IN and OUT are tokens of prompt
and answer. PARAM is GiB of parameters, HOST the share of host memory for KV, LATE how many readers of a worker are out
of text. Where no terminal is, one frame is printed.
"""

interval_option = click.option(
    "--interval",
    "interval_s",
    metavar="S",
    type=click.FloatRange(min=0.1, max=3600),
    default=DEFAULT_INTERVAL_S,
    show_default=True,
    help="Seconds between two looks.",
)


def watch(url: str | None, api_key: str, interval_s: float) -> int:
    """Show a cluster until somebody quits, and return the exit code."""
    from cli.top.command import run_top

    return asyncio.run(run_top(api_url(url), api_key, interval_s))


@click.command(epilog=_EPILOG)
@api_key_option
@click.option("--url", metavar="URL", default=None, help=f"The API to ask. {URL_DEFAULT}")
@interval_option
def top(*, api_key: str, url: str | None, interval_s: float) -> int:
    """Watch the cluster: readers with QoE and slack, memory, groups, moves, queues.

    `q` or Ctrl-C ends it; `s` sorts by something else, and the last line says which keys there are.
    """
    return watch(url, api_key, interval_s)
