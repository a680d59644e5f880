"""How one talks with a model, as the command line knows it: `sluice chat`, and what `run` and `demo` share with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

import click

from cli.run_file import URL_DEFAULT, api_url
from sluice_client.pacer import PaceMode
from sluice_client.qoe import QoeTarget

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Pacing:
    """How answers are shown in the terminal."""

    mode: PaceMode = "smooth"
    target: QoeTarget = field(default_factory=QoeTarget)
    """Of the reader: text is shown by it if the mode is `reading`, and QoE is measured against it."""


def pacing_options(pace: PaceMode) -> Callable[[F], F]:
    """Add `--pace`, with this default, and `--reading-speed`; `pacing_of` takes them out."""

    def add(command: F) -> F:
        speed = click.option(
            "--reading-speed",
            metavar="TOKENS_PER_S",
            type=click.FloatRange(min=0, min_open=True, max=10_000),
            default=QoeTarget().speed_tokens_per_s,
            show_default=True,
            help="Told to the server, shown so by --pace reading, and what QoE is measured against.",
        )
        mode = click.option(
            "--pace",
            type=click.Choice(get_args(PaceMode)),
            default=pace,
            show_default=True,
            help="Show the text at reading speed, evenly as fast as it comes, or as it comes.",
        )
        return mode(speed(command))

    return add


def pacing_of(flags: dict[str, Any]) -> Pacing:
    """Take these two out of the flags."""
    return Pacing(flags.pop("pace"), QoeTarget(speed_tokens_per_s=flags.pop("reading_speed")))


api_key_option = click.option(
    "--api-key", metavar="KEY", envvar="SLUICE_API_KEY", default="", help="Sent along. [SLUICE_API_KEY]"
)


@click.command()
@api_key_option
@click.option("--url", metavar="URL", default=None, help=f"The API to talk to. {URL_DEFAULT}")
@click.option("--model", metavar="NAME", default="", help="Model to talk to. [the first that is served]")
@pacing_options("smooth")
def chat(*, api_key: str, url: str | None, model: str, **flags: Any) -> int:
    """Talk with a model.

    Ctrl-C stops an answer; a second Ctrl-C, or Ctrl-D, leaves. From a pipe, each line is one message.
    """
    from cli.chat import Server, run_chat
    from cli.console import Console

    return run_chat(Server(api_url(url), model, api_key), Console(), pacing_of(flags))
