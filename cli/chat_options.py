"""How one talks with a model, as the command line knows it: `sluice chat`, and what `run` and `demo` share with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import click

from cli.conversation import PACE_MODES, PARAMETERS, Pacing, Talk
from cli.run_file import URL_DEFAULT, api_url
from sluice_client.pacer import PaceMode
from sluice_client.params import ChatParams
from sluice_client.qoe import QoeTarget

F = TypeVar("F", bound=Callable[..., Any])

CHAT_EPILOG = """\b
Examples:
  sluice chat                                  a conversation; /help there tells more
  sluice chat "Tell me a story about a fox"    one answer
  sluice chat --pace reading                   as fast as one reads
  sluice chat --system-prompt "Answer in rhymes" --temperature 0.7
  echo "Tell me a story" | sluice chat --pace off

Ctrl-C stops an answer, the conversation stays; Ctrl-D leaves. From a pipe, each line is one message.
"""


def pacing_options(pace: PaceMode) -> Callable[[F], F]:
    """Add `--pace`, with this default, and `--reading-speed`; `pacing_of` takes them out."""

    def add(command: F) -> F:
        speed = click.option(
            "--reading-speed",
            metavar="TOKENS_PER_S",
            type=click.FloatRange(min=0, min_open=True, max=10_000),
            default=QoeTarget().speed_tokens_per_s,
            show_default=True,
            help="Of --pace reading, and what QoE is measured against; told to the server unless --pace is off.",
        )
        mode = click.option(
            "--pace",
            type=click.Choice(PACE_MODES),
            default=pace,
            show_default=True,
            help="Show the text at reading speed, evenly as fast as it comes, or as it comes.",
        )
        return mode(speed(command))

    return add


def pacing_of(flags: dict[str, Any]) -> Pacing:
    """Take these two out of the flags."""
    return Pacing(flags.pop("pace"), QoeTarget(speed_tokens_per_s=flags.pop("reading_speed")))


def talk_options(command: F) -> F:
    """Add what `chat` and `run` are told of a conversation; `talk_of` takes it out."""
    for name, kind in reversed(PARAMETERS.items()):
        option = f"--{name.replace('_', '-')}"
        command = click.option(option, type=kind, default=None, help="As in the API. [the model's own]")(command)
    text = "What the model is told before everything else. [nothing]"
    command = click.option("--system-prompt", metavar="TEXT", default="", help=text)(command)
    return pacing_options("smooth")(command)


def talk_of(flags: dict[str, Any]) -> Talk:
    """Take all of these out of the flags."""
    given = {name: flags.pop(name) for name in PARAMETERS}
    params = {name: value for name, value in given.items() if value is not None}
    return Talk(pacing_of(flags), flags.pop("system_prompt"), cast("ChatParams", params))


api_key_option = click.option(
    "--api-key", metavar="KEY", envvar="SLUICE_API_KEY", default="", help="Sent along. [SLUICE_API_KEY]"
)
any_api_key_option = click.option(
    "--api-key",
    metavar="KEY",
    envvar=["SLUICE_API_KEY", "OPENAI_API_KEY"],
    default="",
    help="Sent along. [SLUICE_API_KEY, else OPENAI_API_KEY]",
)
"""Of commands that speak with any OpenAI-compatible server."""


@click.command(epilog=CHAT_EPILOG)
@click.argument("question", required=False)
@api_key_option
@click.option("--url", metavar="URL", default=None, help=f"The API to talk to. {URL_DEFAULT}")
@click.option("--model", metavar="NAME", default="", help="Model to talk to. [the first that is served]")
@talk_options
def chat(*, question: str | None, api_key: str, url: str | None, model: str, **flags: Any) -> int:
    """Talk with a model, or ask it one QUESTION."""
    from cli.chat import Server, run_chat
    from cli.console import Console

    return run_chat(Server(api_url(url), model, api_key), Console(), talk_of(flags), question)
