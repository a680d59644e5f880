"""The command `sluice replay` as the command line knows it: its options and their checks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import click

from cli.bench.options import POSITIVE_INT, Positive, best_effort
from cli.chat_options import any_api_key_option
from cli.run_file import URL_DEFAULT, api_url
from cli.simulate.options import numbers

_EPILOG: Final = """\b
Examples:
  sluice replay arrivals.csv                               to port 8000, as the trace was recorded
  sluice replay arrivals.csv --url http://host:8000 --upscale 8 --duration 300
  sluice replay arrivals.csv --lengths sharegpt --seed 1 --json live.json --plot figures
  sluice replay arrivals.csv --best-effort 32              beside it 32 requests of best effort, always

Every request is sent when it is due, however slow the answers are, and counts from when it was sent; a load that was
late itself is told so. Prompts are random token ids of exactly the trace's lengths where the server takes ids, else
words of about these lengths. Table and JSON are those of `sluice compare --trace`, which simulates the same arrivals
and lengths; what the server does not tell of itself (/metrics, /v1/cluster) is left out.

Best effort is as of `sluice bench`: it goes on until the trace's last answer has ended, and what is under way then is
cancelled. All other figures are the trace's; best effort has its own.

The exit code is 1 if a request failed, 2 if the trace is none, 3 if nothing answers, 130 after Ctrl-C.
"""


@click.command(epilog=_EPILOG)
@click.argument("trace", metavar="TRACE", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--url", metavar="URL", default=None, help=f"The API to load. {URL_DEFAULT}")
@click.option("--model", metavar="NAME", default="", help="Model to ask for. [the first that is served]")
@click.option("--name", metavar="NAME", default="", help="Of the server in the report. [what it calls itself]")
@click.option("--upscale", metavar="F", type=Positive(), default=1.0, help="Load in multiples of the trace's own. [1]")
@click.option("--lengths", metavar="NAME", default="", help="Distribution of lengths. [the trace's own lengths]")
@click.option("--duration", "duration_s", metavar="S", type=Positive(), help="Seconds of arrivals. [the whole trace]")
@click.option("--warm-up", "warm_up_s", metavar="S", type=click.FloatRange(0), default=0.0, help="Do not count. [0]")
@click.option(
    "--reader", metavar="ttft=S,speed=R", callback=numbers("ttft", "speed"), help="For QoE. [ttft=1,speed=4.8]"
)
@click.option("--slo", metavar="ttft=S,tpot=S", callback=numbers("ttft", "tpot"), help="What is in time.")
@click.option(
    "--best-effort",
    metavar="N|FILE|N,FILE",
    callback=best_effort,
    help="Beside the trace N requests of best effort always under way: as long as its own, or of a data set. [N: 32]",
)
@click.option("--vocab", metavar="N", type=POSITIVE_INT, help="Prompts are of token ids below N. [100]")
@click.option("--seed", metavar="N", type=click.IntRange(min=0), default=0, help="Of lengths and prompts. [0]")
@click.option("--timeout-s", metavar="S", type=Positive(), default=600.0, help="Limit of a request. [600]")
@any_api_key_option
@click.option("--json", "json_file", metavar="FILE", default="", help="Write all figures here.")
@click.option(
    "--plot",
    "plot_folder",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Draw figures into this folder (needs matplotlib).",
)
def replay(*, reader: dict[str, float] | None, slo: dict[str, float] | None, vocab: int | None, **options: Any) -> int:
    """Replay a trace of arrivals and lengths against any OpenAI-compatible server."""
    from cli.console import Console
    from cli.replay.command import ReplaySettings, run_replay

    if reader is not None:
        options["reader"] = reader["ttft"], reader["speed"]
    if slo is not None:
        options["slo"] = slo["ttft"], slo["tpot"]
    if vocab is not None:
        options["vocab"] = vocab
    options["url"] = api_url(options["url"])
    code, text = asyncio.run(run_replay(ReplaySettings(**options), Console()))
    click.echo(text)
    return code
