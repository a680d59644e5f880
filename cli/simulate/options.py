"""The commands `sluice simulate`, `compare` and `plan` as the command line knows them: options and their checks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from cli.bench.options import POSITIVE_INT, Positive
from cli.signals import ending_at_once
from cli.simulate import DEFAULT_SCENARIO
from shared.host import count_cores
from shared.systems import DEFAULT_SYSTEM

F = TypeVar("F", bound=Callable[..., Any])

_SIMULATE_EPILOG = """\b
Examples:
  sluice simulate                                          a burst that overruns the memory, on the default system
  sluice simulate --system fcfs --scenario kunserve-v2 --traces DIR
  sluice simulate --trace arrivals.csv --model qwen2.5-14b --gpu a800 --instances 8 --json out.json

The services' own code runs on a virtual clock, with modelled GPUs. The same flags and seed give the same bytes.
"""
_COMPARE_EPILOG = """\b
Examples:
  sluice compare --systems fcfs,fcfs-chunked,oracle
  sluice compare --scenario kunserve-v2 --traces DIR --seed 1 --seed 2 --json out.json --plot figures
  sluice compare --trace arrivals.csv --upscale 28 --lengths burstgpt-conversation --instances 8

The first system is the baseline of the factors and of the gaps that each system closes towards those whose memory never
runs out: of the TTFT to oracle, of QoE to andes-unlimited.
"""
_PLAN_EPILOG = """\b
Examples:
  sluice plan --model qwen2.5-14b --gpu a800 --trace arrivals.csv --slo ttft=1.0,tpot=0.1
  sluice plan --scenario burst-demo --slo ttft=2,tpot=0.1,share=0.95 --system fcfs

The number is doubled until enough requests are in time (share; 0.99 if it is not named), then the interval is halved;
one instance less than the answer was tried, too. The exit code is 1 if not even --max-instances suffice.
"""


def numbers(*needed: str, optional: tuple[str, ...] = ()) -> Callable[..., dict[str, float] | None]:
    """Return a callback that reads `name=number,name=number` with these names."""
    known = (*needed, *optional)

    def read(context: click.Context, parameter: click.Parameter, value: str | None) -> dict[str, float] | None:
        if value is None:
            return None
        found: dict[str, float] = {}
        for part in value.split(","):
            name, _, text = part.strip().partition("=")
            if name not in known or name in found:
                form = ", ".join(f"{each}=NUMBER" for each in known)
                raise click.BadParameter(f"'{part}' is not one of {form}", context, parameter)
            found[name] = Positive().convert(text, parameter, context)
        if missing := [name for name in needed if name not in found]:
            raise click.BadParameter(f"{missing[0]}=NUMBER is missing in '{value}'", context, parameter)
        if found.get("share", 1.0) > 1:
            raise click.BadParameter("share is a number up to 1", context, parameter)
        return found

    return read


def _number_or_auto(context: click.Context, parameter: click.Parameter, value: Any) -> int | str | None:
    if value is None or value == "auto":
        return None if value is None else "auto"
    return int(POSITIVE_INT.convert(value, parameter, context))


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_NEW_FOLDER = click.Path(file_okay=False, path_type=Path)
_NEW_FILE = click.Path(dir_okay=False, path_type=Path)

# flags of all three commands, in the order of the help
_LOAD: Final = (
    click.option("--scenario", metavar="NAME|FILE", help=f"What to run, and on what. [{DEFAULT_SCENARIO}]"),
    click.option(
        "--trace", metavar="FILE", type=_FILE, help="Arrivals and lengths: a .csv as docs/simulating.md says."
    ),
    click.option("--workload", metavar="NAME|FILE", help="Arrivals, lengths and readers of another scenario."),
    click.option("--traces", metavar="DIR", type=_FOLDER, help="Where the traces lie that scenarios name."),
    click.option("--upscale", metavar="F", type=Positive(), help="Load in multiples of the trace's own."),
    click.option("--rate", metavar="R", type=Positive(), help="Requests per second, where arrivals are drawn."),
    click.option("--lengths", metavar="NAME", help="Distribution of prompt and answer lengths."),
    click.option("--duration", "duration_s", metavar="S", type=Positive(), help="Seconds of arrivals."),
    click.option("--warm-up", "warm_up_s", metavar="S", type=click.FloatRange(0), help="Arrivals before do not count."),
    click.option("--model", metavar="NAME", help="Model of the catalogue."),
    click.option("--gpu", metavar="NAME", help="GPU of the catalogue."),
    click.option("--tp", metavar="N", type=POSITIVE_INT, help="GPUs of one instance."),
    click.option("--era-ms", metavar="MS", type=click.FloatRange(0), help="CPU time of the engine per step."),
    click.option(
        "--kv-tokens", metavar="N", type=POSITIVE_INT, help="Token slots of one instance. [what its memory holds]"
    ),
    click.option("--max-batch-tokens", metavar="N", type=POSITIVE_INT, help="Tokens of one step."),
    click.option("--max-batch-rows", metavar="N", type=POSITIVE_INT, help="Sequences of one step."),
    click.option("--reader", metavar="ttft=S,speed=R", callback=numbers("ttft", "speed"), help="What QoE expects."),
    click.option(
        "--thinking", metavar="share=S,tokens=N", callback=numbers("share", "tokens"), help="Whose answers think first."
    ),
    click.option(
        "--seed",
        "seeds",
        metavar="N",
        type=click.IntRange(min=0),
        multiple=True,
        default=(0,),
        help="May be given several times. [0]",
    ),
    click.option("--jobs", metavar="N", type=POSITIVE_INT, default=count_cores(), help="Runs at a time. [cores]"),
    click.option("--json", "json_file", metavar="FILE", type=_NEW_FILE, help="Write all figures here."),
    click.option("--quiet", is_flag=True, help="Show no progress."),
)
_slo = click.option(
    "--slo", metavar="ttft=S,tpot=S", callback=numbers("ttft", "tpot", optional=("share",)), help="What is in time."
)
_instances = click.option(
    "--instances", metavar="N|auto", callback=_number_or_auto, help="Instances; auto: as many as --slo needs."
)
_max_instances = click.option(
    "--max-instances", metavar="N", type=POSITIVE_INT, default=128, show_default=True, help="Most that are tried."
)
_plot = click.option(
    "--plot", metavar="DIR", type=_NEW_FOLDER, help="Draw figures into this folder (needs matplotlib)."
)
_system = click.option(
    "--system", metavar="NAME", default=DEFAULT_SYSTEM, show_default=True, help="Named set of policies."
)


def _with(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds options, the first one uppermost in the help."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.command(epilog=_SIMULATE_EPILOG)
@_with(_system, *_LOAD, _slo, _instances, _max_instances, _plot)
def simulate(*, system: str, **flags: Any) -> int:
    """Run a load on a simulated cluster, and say what its readers see."""
    with ending_at_once():
        from cli.simulate.command import run_compare

        return run_compare((system,), flags)


@click.command(epilog=_COMPARE_EPILOG)
@click.option("--systems", metavar="NAME,…", help="Systems, the baseline first. [the scenario's]")
@_with(*_LOAD, _slo, _instances, _max_instances, _plot)
def compare(*, systems: str | None, **flags: Any) -> int:
    """Run one load on several systems, and compare them."""
    names = () if systems is None else tuple(name.strip() for name in systems.split(",") if name.strip())
    if systems is not None and not names:
        raise click.UsageError("--systems names no system")
    with ending_at_once():
        from cli.simulate.command import run_compare

        return run_compare(names, flags)


@click.command(epilog=_PLAN_EPILOG)
@_with(_system, *_LOAD, _slo, _max_instances)
def plan(*, system: str, **flags: Any) -> int:
    """Find how many instances a load needs."""
    with ending_at_once():
        from cli.simulate.command import run_plan

        return run_plan(system, flags)
