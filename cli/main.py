"""The `sluice` command: what it offers, and the one place where a failure becomes a line and an exit code."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any, Final

import click

from cli.bench.options import bench
from cli.bus_options import drain, nats_config, nats_setup, tap
from cli.chaos.options import chaos
from cli.chat_options import api_key_option, chat
from cli.cluster.options import cluster_options, demo, run, up
from cli.doctor import doctor
from cli.exit_codes import FAILED, KILLED, REFUSED, CommandError
from cli.explain import explain
from cli.groups.options import drop, planner, restore
from cli.keys import keys
from cli.model_options import ls, pull
from cli.replay.options import replay
from cli.run_file import URL_DEFAULT, api_url
from cli.run_options import down, logs, ps
from cli.simulate.options import compare, plan, simulate
from cli.top.options import interval_option, top, watch
from shared.errors import SluiceError, StartupError
from shared.reading import check_text
from shared.version import VERSION

_LACKS = {
    errno.EMFILE: CommandError(
        "not as many files may be open as are needed",
        "Start it where `ulimit -n` says 1024 or more",
        REFUSED,
        "too_few_files",
    ),
    errno.ENFILE: CommandError(
        "this machine opens no more files",
        "End what holds many (`lsof` tells), or raise `fs.file-max`",
        FAILED,
        "too_few_files",
    ),
    errno.ENOSPC: CommandError("there is no room on the disk for what is written", "Free some", FAILED, "disk_full"),
}
"""What a command may lack wherever it is, by the error's number."""

EPILOG = """\b
Examples:
  sluice demo                                  a cluster and one answer, nothing needed
  sluice demo --burst                          see layers give way to the KV of many readers
  sluice run owner/name                        fetch a model, serve it, talk with it
  sluice doctor                                whether this machine has what that needs
  sluice up                                    serve the model that ships on port 8000
  sluice up ./llama --workers 2                serve a folder, two copies (`serve` is the same)
  sluice up owner/name --device cuda           fetch from the Hugging Face hub, serve on GPUs
  sluice up -d                                 in the background
  sluice ps                                    what runs here
  sluice logs -f                               what it says
  sluice down                                  stop it
  sluice chat                                  talk with it
  sluice status                                what the workers do
  sluice top                                   the same as it changes, with readers, memory and queues
  sluice explain queue_full                    what an error means, and what to do
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
  3    nothing answers at the URL (status, top, chat, bench, replay), under the id (chaos, drain, down), or no
       planner; or no cluster runs here
  130  stopped at once by a second Ctrl-C (bench, replay, pull, simulate, compare, plan: by the first)

Settings come from flags, then SLUICE_<NAME> in the environment, then ./sluice.toml, then defaults.
NO_COLOR turns colours off; NATS_URL names a broker to use instead of starting one.
"""

PROFILE_EPILOG = """\b
Examples:
  sluice profile --model ./llama --dtype bfloat16 --out llama.toml
  sluice profile --nats-url nats://127.0.0.1:4222 --worker worker-0

The formula: ms per step = max(g0 + b0·N, g1 + b1·N) + d·KVdec + a·P, with N tokens in the step, KVdec tokens of KV read
by decodes, P query-key pairs of prefill chunks. A quarter of the steps is held out, to tell the error.
"""


SECTIONS: Final = {
    "Serve": "up run demo chat down ps logs ls pull keys doctor",
    "Look": "top status explain planner tap",
    "Load and disturb": "bench replay profile chaos",
    "Simulate": "simulate compare plan",
    "Operate": "drain drop restore nats-config nats-setup completion version",
}
"""Of the list of commands, in order; who is in none is another name of one that is."""


class Sections(click.Group):
    """The whole command, whose help has the commands in sections."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a list for each section."""
        for title, names in SECTIONS.items():
            with formatter.section(title):
                limit = formatter.width - 18
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit)) for name in names.split()])


@click.group(
    cls=Sections,
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


@cli.command()
@api_key_option
@click.option("--url", metavar="URL", default=None, help=f"The API to ask. {URL_DEFAULT}")
@click.option("--json", "as_json", is_flag=True, help="The cluster view as one line of JSON.")
@click.option("--watch", "is_watched", is_flag=True, help="Go on, as `sluice top` does.")
@interval_option
def status(*, api_key: str, url: str | None, as_json: bool, is_watched: bool, interval_s: float) -> int:
    """Show the workers: phase, KV memory, requests, speed."""
    from cli.status import run_status

    if is_watched and as_json:
        raise click.UsageError("--watch is for people; ask again and again for --json")
    if is_watched:
        return watch(url, api_key, interval_s)
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


for _command in (up, run, demo, chat):
    cli.add_command(_command)
for _command in (bench, chaos, planner, drop, restore, keys, replay, simulate, compare, plan):
    cli.add_command(_command)
for _command in (doctor, explain, top, pull, ls, ps, down, logs, drain, tap, nats_config, nats_setup):
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
