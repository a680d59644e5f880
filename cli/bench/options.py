"""The command `sluice bench` as the command line knows it: its options and their checks."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Final

import click

from cli.chat_options import any_api_key_option
from cli.run_file import URL_DEFAULT, api_url

POSITIVE_INT = click.IntRange(min=1)
IN_FLIGHT: Final = 32
"""Requests of best effort under way where only their data set is named."""

EPILOG = """\b
Examples:
  sluice bench                                             100 requests at once to port 8000
  sluice bench --url http://host:8000 --request-rate 4     Poisson arrivals, 4 per second
  sluice bench --concurrency 8 --output-len 64             at most 8 under way
  sluice bench --dataset trace.csv --scale 2               a trace's own times, twice its load
  sluice bench --endpoint completions --vocab 4096         exact lengths: random token ids below 4096
  sluice bench --readers 4.8                               readers of 4.8 tokens per second: see QoE
  sluice bench --request-rate 2 --best-effort 32           beside it 32 requests of best effort, always
  sluice bench --best-effort 8,documents.jsonl             8 at a time, of a data set

\b
Data sets: synthetic; a .csv trace (arrival_s, input_tokens, output_tokens); a .json list of conversations as
ShareGPT has them; a .jsonl file of {"prompt": …, "completion": …} or {"prompt": …, "max_tokens": n}.

Best effort is asked with service_tier "flex" of our own server, and as plain requests of others, which may know no such
tier. It goes on until the load has ended; what is under way then is cancelled. It has a line of its own in the report.

Times count from when a request is sent. QoE is measured here, from when tokens arrive, of any server; it counts failed
requests as 0. Ctrl-C prints what there is.
The exit code is 1 if a request failed, 3 if nothing answers, 130 after Ctrl-C.
"""


class Positive(click.FloatRange):
    """A number above 0, not NaN; infinite only where that has a meaning."""

    def __init__(self, *, allow_inf: bool = False) -> None:
        super().__init__(min=0, min_open=True)
        self._allow_inf = allow_inf

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number) or (math.isinf(number) and not self._allow_inf):
            self.fail(f"{value!r} is not allowed here.", param, ctx)
        return number


def best_effort(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, str] | None:
    """Return what `N`, `FILE` or `N,FILE` asks: requests under way, and the file of their data set or "" for none."""
    if not value:
        return None
    number, _, file = value.partition(",")
    return (POSITIVE_INT(number, param, ctx), file) if number.isdecimal() else (IN_FLIGHT, value)


@click.command(epilog=EPILOG)
@click.option("--url", metavar="URL", default=None, help=f"The API to load. {URL_DEFAULT}")
@click.option("--model", metavar="NAME", default="", help="Model to ask for. [the first that is served]")
@click.option("--endpoint", type=click.Choice(["chat", "completions"]), default="chat", show_default=True)
@click.option("--dataset", metavar="synthetic|FILE", default="synthetic", show_default=True, help="See below.")
@click.option("--num-prompts", metavar="N", type=POSITIVE_INT, default=100, show_default=True, help="Requests at most.")
@click.option(
    "--request-rate",
    metavar="R|inf",
    type=Positive(allow_inf=True),
    help="Requests per second, with Poisson gaps; inf: all at once. [inf; of a trace: its own times]",
)
@click.option("--concurrency", metavar="C", type=POSITIVE_INT, help="Requests under way at most. [no limit]")
@click.option("--scale", metavar="F", type=Positive(), default=1.0, help="Load of a trace in multiples of its own. [1]")
@click.option("--input-len", metavar="N", type=POSITIVE_INT, default=128, show_default=True, help="Prompt tokens.")
@click.option("--output-len", metavar="N", type=POSITIVE_INT, help="Answer tokens. [128, or what the data set says]")
@click.option("--prefix-len", metavar="N", type=click.IntRange(min=0), default=0, help="Of these, shared by all. [0]")
@click.option("--vocab", metavar="N", type=POSITIVE_INT, help="Prompts of random ids below N (completions only).")
@click.option("--temperature", metavar="T", type=click.FloatRange(0, 2), default=0.0, help="Of every request. [0]")
@click.option("--ignore-eos/--no-ignore-eos", default=True, help="Ask for answers of full length. [on, but for texts]")
@click.option("--seed", metavar="N", type=click.IntRange(min=0), default=0, help="Of lengths, words, arrivals. [0]")
@click.option("--timeout-s", metavar="S", type=Positive(), default=600.0, help="Limit of a request. [600]")
@click.option(
    "--readers",
    "reader_speed",
    metavar="R",
    type=Positive(),
    help="QoE: readers of R tokens per second. Only our own server is told of them. [4.8, and nobody is told]",
)
@click.option("--ttft-target-s", metavar="S", type=Positive(), default=1.0, help="QoE: the first token's time. [1]")
@click.option(
    "--best-effort",
    metavar="N|FILE|N,FILE",
    callback=best_effort,
    help="Beside the load N requests of best effort always under way: as long as the load's, or of a data set. [N: 32]",
)
@any_api_key_option
@click.option("--json", "json_file", metavar="FILE", default="", help="Write figures and every request here.")
def bench(*, vocab: int | None, **options: Any) -> int:
    """Put a load on any OpenAI-compatible server, and measure what its readers see."""
    from cli.bench.command import BenchSettings, run_bench
    from cli.console import Console

    if vocab and options["endpoint"] != "completions":
        raise click.UsageError("--vocab sends token ids, which only --endpoint completions takes")
    options["url"] = api_url(options["url"])
    code, text = asyncio.run(run_bench(BenchSettings(vocab=vocab or 0, **options), Console()))
    click.echo(text)
    return code
