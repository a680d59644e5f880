"""The `sluice` command: what it offers, and the one place where a failure becomes a line and an exit code."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any, TypeVar

import click

from cli.bench.options import bench
from cli.bus_options import drain, nats_config, nats_setup, tap
from cli.chaos.options import chaos
from cli.exit_codes import FAILED, KILLED, REFUSED, CommandError
from cli.groups.options import drop, planner, restore
from cli.keys import keys
from cli.model_options import ls, pull
from cli.replay.options import replay
from cli.run_file import URL_DEFAULT, api_url
from cli.run_options import down, logs, ps
from cli.simulate.options import compare, plan, simulate
from shared.errors import SluiceError, StartupError
from shared.reading import check_text
from shared.version import VERSION

_LACKS = {
    errno.EMFILE: CommandError(
        "not as many files may be open as are needed", "Start it where `ulimit -n` says 1024 or more", REFUSED
    ),
    errno.ENFILE: CommandError(
        "this machine opens no more files", "End what holds many (`lsof` tells), or raise `fs.file-max`", FAILED
    ),
    errno.ENOSPC: CommandError("there is no room on the disk for what is written", "Free some", FAILED),
}
"""What a command may lack wherever it is, by the error's number."""

F = TypeVar("F", bound=Callable[..., Any])

EPILOG = """\b
Examples:
  sluice demo                                  a cluster and one answer, nothing needed
  sluice run owner/name                        fetch a model, serve it, talk with it
  sluice up                                    serve the model that ships on port 8000
  sluice up ./llama --workers 2                serve a folder, two copies (`serve` is the same)
  sluice up owner/name --device cuda           fetch from the Hugging Face hub, serve on GPUs
  sluice up -d                                 in the background
  sluice ps                                    what runs here
  sluice logs -f                               what it says
  sluice down                                  stop it
  sluice chat                                  talk with it
  sluice status                                what the workers do
  sluice pull owner/name                       fetch a model from the hub
  sluice keys create --tenant me               make an API key
  sluice bench --request-rate 4                put a load on a server and measure it
  sluice replay arrivals.csv --upscale 8       a trace of arrivals and lengths, on time
  sluice tap 'sluice.default.event.>'          watch what happens on the bus
  sluice profile --model ./llama               measure what a step costs, as a cost profile
  sluice chaos kill worker-0                   see that nobody notices
  sluice planner                               what the planner decided last, and why
  sluice drop                                  make room for KV: replicated parameters give way
  sluice simulate --system fcfs                a load on a cluster of modelled GPUs, in virtual time
  sluice compare --systems fcfs,oracle         the same load on several systems
  sluice plan --slo ttft=1.0,tpot=0.1          how many instances a load needs

\b
Exit codes:
  0    done, or stopped as asked
  1    something failed while it ran
  2    refused: bad usage, a wrong setting, a taken port, a missing model
  3    nothing answers at the URL (status, chat, bench, replay), or under the id (chaos, drain, down), or no planner
  130  stopped at once by a second Ctrl-C (bench, replay, pull, simulate, compare, plan: by the first)

Settings come from flags, then SLUICE_<NAME> in the environment, then ./sluice.toml, then defaults.
NO_COLOR turns colours off; NATS_URL names a broker to use instead of starting one.
"""

UP_EPILOG = """\b
Examples:
  sluice up -d                                 return once it is ready; sluice down stops it
  sluice up --port 0 --json                    for scripts: one line of JSON once ready
  sluice up --memory 4GiB --dtype bfloat16     a larger budget, half the bytes per value
  NATS_URL=nats://broker:4222 sluice up        use a broker that runs already

Ctrl-C finishes running answers (up to --drain-limit-s) and stops; a second Ctrl-C stops at once.
"""

RUN_EPILOG = """\b
Examples:
  sluice run                                   the model that ships
  sluice run ./llama                           a folder
  sluice run owner/name --device cuda          fetched from the hub if it is not here
  echo "Tell me a story" | sluice run --no-pace

A cluster that runs already and serves the model is talked with, and goes on afterwards.
"""

PROFILE_EPILOG = """\b
Examples:
  sluice profile --model ./llama --dtype bfloat16 --out llama.toml
  sluice profile --nats-url nats://127.0.0.1:4222 --worker worker-0

The formula: ms per step = max(g0 + b0·N, g1 + b1·N) + d·KVdec + a·P, with N tokens in the step, KVdec tokens of KV read
by decodes, P query-key pairs of prefill chunks. A quarter of the steps is held out, to tell the error.
"""

# name, metavar, help; the meaning and the check of each value are in cli.cluster.settings
_CLUSTER_OPTIONS = (
    ("model", "DIR|ID", "Checkpoint folder in Hugging Face format, or an id there. [the model that ships]"),
    ("served-model-name", "NAME,…", "Names under which it is served. [the id, or the folder's name]"),
    ("generation-config", "auto|none", "Default sampling from the model's generation_config.json, or none. [auto]"),
    ("workers", "N", "Worker processes, each with a whole copy of the model. [up: 1, demo: 2]"),
    ("device", "cpu|cuda", "Where the workers run: cpu, cuda, cuda:<index> or auto. [auto: a card if there is one]"),
    ("dtype", "auto|float32|bfloat16", "Type of parameters and KV. [auto: bfloat16 on a card, or to fit]"),
    ("memory", "SIZE", "Hard budget of each worker, e.g. 512MiB, 4GiB: parameters, KV, workspace. [auto]"),
    ("host-memory", "SIZE", "Of the host, beside it, for KV that gives way; 0: none. [a share of what is free]"),
    ("system", "NAME", "Named set of policies. [sluice]"),
    ("host", "ADDR", "Address to listen on. [127.0.0.1]"),
    ("api-keys-file", "FILE", "Keys that requests need (`sluice keys create`). [none: no key is asked for]"),
    ("api-key", "KEY", "One key, of 16 characters at least; better as SLUICE_API_KEY than as a flag. [none]"),
    ("port", "P", "Port of the API; 0 picks a free one. [up: 8000, demo: 0]"),
    ("allow-host", "NAME,…", "Names by which the API may be asked without keys. [--host, addresses, localhost]"),
    ("allow-origin", "URL,…", "Whose pages may use the API from a browser: https://chat.example. [nobody's]"),
    ("max-model-len", "N", "Most tokens of one request. [what the model and the memory allow]"),
    ("threads", "N", "CPU threads of each worker. [cores / workers]"),
    ("kernels", "KIND", "What computes the steps: auto, native, flashinfer or torch. [auto]"),
    ("cluster", "NAME", "Name of the cluster on a shared broker. [default]"),
    ("nats-url", "URL", "Broker to use. [NATS_URL, else one is started]"),
    ("log-dir", "DIR", "Keep the logs of every process here. [a temporary folder]"),
    ("log-level", "LEVEL", "debug, info, warning or error. [info]"),
    ("costs-kept", "DIR", "Where workers keep what their steps have cost. [~/.cache/sluice/costs]"),
    ("start-limit-s", "S", "Seconds that loading may take. [1800]"),
    ("drain-limit-s", "S", "Seconds that running answers get at the end. [120]"),
)
_CLUSTER_SWITCHES = (
    ("prefix-caching", "Keep KV until its memory is needed, for requests that begin alike. [on]"),
    ("graphs", "Record steps of decodes as CUDA graphs, where FlashInfer computes attention. [on]"),
    ("fused", "On CUDA compute norms, rotary embeddings, gates and samples by Triton's kernels. [on]"),
    ("overlap", "Launch steps of decodes before those before them have ended. [on a GPU]"),
    ("deterministic", "The same text whatever else is in the batch; somewhat slower."),
    ("allow-no-key", "Listen on another address than this machine's own although the API asks for no key."),
)


def cluster_options(command: F) -> F:
    """Add the options of `up` and `demo`; one that is not given arrives as None."""
    for name, text in reversed(_CLUSTER_SWITCHES):
        command = click.option(f"--{name}/--no-{name}", default=None, help=text)(command)
    for name, metavar, text in reversed(_CLUSTER_OPTIONS):
        command = click.option(f"--{name}", metavar=metavar, default=None, help=text)(command)
    return command


@click.group(
    invoke_without_command=True,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(VERSION, "--version", message="sluice %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Serve LLMs so that every reader's stream stays smooth."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _with_model(flags: dict[str, Any], model: str | None) -> dict[str, Any]:
    """Return the flags with the model that was named without one."""
    if model is not None and flags["model"] is not None:
        raise click.UsageError("the model is named twice")
    return flags if model is None else {**flags, "model": model}


@cli.command(epilog=UP_EPILOG)
@click.argument("named_model", metavar="[MODEL]", required=False)
@cluster_options
@click.option("--json", "as_json", is_flag=True, help='One line {"url", "nats_url", "pids"} on stdout once ready.')
@click.option("-d", "--detach", is_flag=True, help="Return once it is ready; `sluice down` stops it.")
@click.option("--in-background", is_flag=True, hidden=True)
def up(*, named_model: str | None, as_json: bool, detach: bool, in_background: bool, **flags: Any) -> int:
    """Serve a model on this machine: broker, monitor, planner, workers, dispatcher."""
    from cli.cluster.settings import load_up_settings
    from cli.console import Console

    flags = _with_model(flags, named_model)
    settings = load_up_settings(flags)
    if detach:
        from cli.cluster.background import run_in_background

        return run_in_background(flags, Console(), as_json=as_json)
    from cli.cluster.up import run_up

    return asyncio.run(run_up(settings, Console(), as_json=as_json or in_background, leaves=in_background))


@cli.command(epilog=RUN_EPILOG)
@click.argument("named_model", metavar="[MODEL]", required=False)
@cluster_options
@click.option("--no-pace", is_flag=True, help="Show the text as it arrives, not at reading speed.")
def run(*, named_model: str | None, no_pace: bool, **flags: Any) -> int:
    """Talk with a model: the cluster that serves it here, or one that is started for as long as that takes.

    Ctrl-C stops an answer; a second Ctrl-C, or Ctrl-D, leaves. From a pipe, each line is one message.
    """
    from cli.cluster.settings import load_up_settings
    from cli.console import Console
    from cli.run import run_model

    flags = _with_model(flags, named_model)
    return run_model(load_up_settings(flags), flags, Console(), paced=not no_pace)


@cli.command()
@cluster_options
@click.option("--prompt", metavar="TEXT", default=None, help="The question. [a story]")
def demo(*, prompt: str | None, **flags: Any) -> int:
    """Start a cluster and stream one answer at reading speed.

    In a terminal the cluster then stays up until Ctrl-C; otherwise the command ends after the answer.
    """
    from cli.cluster.demo import DEFAULTS, run_demo
    from cli.cluster.hints import EXAMPLE_PROMPT
    from cli.cluster.settings import load_up_settings
    from cli.console import Console

    settings = load_up_settings(flags, DEFAULTS)
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    return asyncio.run(run_demo(settings, Console(), prompt or EXAMPLE_PROMPT, is_interactive=is_interactive))


_api_key = click.option(
    "--api-key",
    metavar="KEY",
    envvar="SLUICE_API_KEY",
    default="",
    help="Sent along. [SLUICE_API_KEY]",
)


@cli.command()
@_api_key
@click.option("--url", metavar="URL", default=None, help=f"The API to talk to. {URL_DEFAULT}")
@click.option("--model", metavar="NAME", default="", help="Model to talk to. [the first that is served]")
@click.option("--no-pace", is_flag=True, help="Show the text as it arrives, not at reading speed.")
def chat(*, api_key: str, url: str | None, model: str, no_pace: bool) -> int:
    """Talk with a model at reading speed.

    Ctrl-C stops an answer; a second Ctrl-C, or Ctrl-D, leaves. From a pipe, each line is one message.
    """
    from cli.chat import Server, run_chat
    from cli.console import Console

    return run_chat(Server(api_url(url), model, api_key), Console(), paced=not no_pace)


@cli.command()
@_api_key
@click.option("--url", metavar="URL", default=None, help=f"The API to ask. {URL_DEFAULT}")
@click.option("--json", "as_json", is_flag=True, help="The cluster view as one line of JSON.")
def status(*, api_key: str, url: str | None, as_json: bool) -> int:
    """Show the workers: phase, KV memory, requests, speed."""
    from cli.status import run_status

    click.echo(asyncio.run(run_status(api_url(url), api_key, as_json=as_json)))
    return 0


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(*, shell: str) -> int:
    """Print what makes a shell complete the words of this command.

    It belongs into the file that the shell reads when it starts, as ~/.bashrc or ~/.zshrc.
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None, "one of those that click knows"
    click.echo(made(cli, {}, "sluice", "_SLUICE_COMPLETE").source())
    return 0


@cli.command(epilog=PROFILE_EPILOG)
@cluster_options
@click.option("--worker", metavar="NAME", default="", help="Worker of a running cluster. [the first that is ready]")
@click.option("--out", metavar="FILE.toml", default="", help="File to write. [<model>-tp1-<device>.toml]")
@click.option("--force", is_flag=True, help="Write over a file that exists.")
@click.option("--limit-s", type=click.IntRange(min=1), default=120, show_default=True, help="Begin nothing new after.")
@click.option("--max-batch", type=click.IntRange(min=1), default=128, show_default=True, help="Most decodes together.")
@click.option("--num-decodes", type=click.IntRange(2, 512), default=24, show_default=True, help="Steps per batch.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of prompts, order, held-out steps."
)
def profile(**flags: Any) -> int:
    """Measure what a step costs on this hardware, and write it as a cost profile.

    With a broker (--nats-url, NATS_URL) and no --model, a worker of the cluster there is measured; it need not be idle,
    but other work makes the figures worse. Otherwise a cluster is started for it.
    """
    from cli.cluster.settings import load_up_settings
    from cli.console import Console
    from cli.profile.command import DEFAULTS, ProfileSettings, run_profile

    settings = ProfileSettings(**{name: flags.pop(name) for name in ProfileSettings.__dataclass_fields__})
    return asyncio.run(run_profile(load_up_settings(flags, DEFAULTS), settings, Console()))


@cli.command()
def version() -> int:
    """Print the version."""
    click.echo(f"sluice {VERSION}")
    return 0


for _command in (bench, chaos, planner, drop, restore, keys, replay, simulate, compare, plan):
    cli.add_command(_command)
for _command in (pull, ls, ps, down, logs, drain, tap, nats_config, nats_setup):
    cli.add_command(_command)


for _name, _same in (("serve", up), ("stop", down), ("list", ls), ("models", ls)):
    _other = copy(_same)
    _other.hidden = True
    cli.add_command(_other, _name)


def run_command(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code; every failure is one line on stderr."""
    try:
        _check_arguments(sys.argv[1:] if argv is None else argv)
        return int(cli.main(args=argv, prog_name="sluice", standalone_mode=False) or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return REFUSED
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else _command_of(argv)
        return _fail(CommandError(error.format_message(), f"See `{command} --help`", REFUSED), REFUSED)
    except click.ClickException as error:
        return _fail(CommandError(error.format_message()), FAILED)
    except (StartupError, CommandError) as error:
        return _fail(error, error.code if isinstance(error, CommandError) else REFUSED)
    except SluiceError as error:
        return _fail(CommandError(str(error)), FAILED)
    except OSError as error:
        failure = _LACKS.get(error.errno or 0)
        if error.errno == errno.ENAMETOOLONG:
            failure = CommandError(f"{str(error.filename)[:80]}… is too long for the name of a file", code=REFUSED)
        if failure is None:
            raise
        return _fail(failure, failure.code)
    except (KeyboardInterrupt, click.Abort):
        return KILLED


def _check_arguments(argv: Sequence[str]) -> None:
    for argument in argv:
        try:
            check_text(argument)
        except ValueError as error:
            raise StartupError(
                f"'{argument}' cannot be used, {error}", "Give the file or folder another name"
            ) from None


def _command_of(argv: list[str] | None) -> str:
    words = sys.argv[1:] if argv is None else argv
    return f"sluice {words[0]}" if words and words[0] in cli.commands else "sluice"


def _fail(error: Exception, code: int) -> int:
    sys.stderr.write(f"{error}\n")
    return code


def main() -> None:
    """Entry point."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # whoever started this has closed it
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  for as long as this runs
    sys.exit(run_command())


if __name__ == "__main__":
    main()
