"""`sluice simulate`, `compare` and `plan`: check everything, run, write, print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from cli.console import Console
from cli.exit_codes import DONE, FAILED, CommandError
from cli.simulate.jobs import Job, run_jobs
from cli.simulate.load import Load, describe_load, read_load
from cli.simulate.progress import RunProgress
from shared.errors import StartupError
from shared.systems import UnknownSystemError, find_system
from sim.experiment.compare import compare, to_json
from sim.experiment.plan import InstancePlan, plan_instances
from sim.experiment.plots import check_matplotlib, write_plots
from sim.experiment.report import render
from sim.experiment.result import RunResult
from sim.experiment.summary import Summary, rounded


def run_compare(systems: Sequence[str], flags: Mapping[str, Any]) -> int:
    """Run one load on every system; none: those that the scenario names. Returns the exit code.

    Raises:
        StartupError: something that was asked for does not exist.
        CommandError: a run failed, or a file cannot be written.
    """
    console = Console()
    load = read_load(flags)
    names = _checked(systems or load.scenario.systems)
    if load.plot_folder is not None:
        check_matplotlib()
    if load.instances_by_slo:
        load = _with_planned_instances(load, names[0], console)
    jobs = [
        Job(load.scenario, name, seed, load.traces, keep_result=load.plot_folder is not None and seed == load.seeds[0])
        for seed in load.seeds
        for name in names
    ]
    runs, results = _run(jobs, load, console)
    comparison = compare(describe_load(load), runs)
    if load.json_file is not None:
        _write(load.json_file, to_json(comparison))
    if load.plot_folder is not None:
        _plot(results, load)
    click.echo(f"{_title(load)}\n\n{render(comparison)}")
    return DONE


def run_plan(system: str, flags: Mapping[str, Any]) -> int:
    """Find how many instances a load needs on a system, and return the exit code.

    Raises:
        StartupError: something that was asked for does not exist.
        CommandError: no number up to the limit suffices; a run failed; the file cannot be written.
    """
    console = Console()
    load = read_load(flags)
    _checked([system])
    _needs_slo(load)
    found = _plan(load, system, console)
    if load.json_file is not None:
        _write(load.json_file, to_json(rounded(_plan_tree(load, system, found))))
    click.echo(_plan_text(load, found))
    if found.num_instances is None:
        raise CommandError(
            f"{load.max_instances} instances do not suffice",
            "Raise --max-instances, or allow more time with --slo",
            FAILED,
        )
    return DONE


def _checked(names: Sequence[str]) -> tuple[str, ...]:
    """Return the systems' names, each once.

    Raises:
        StartupError: one of them does not exist.
    """
    for name in names:
        try:
            find_system(name)
        except UnknownSystemError as error:
            raise StartupError(str(error), "") from None
    return tuple(dict.fromkeys(names))


def _run(
    jobs: Sequence[Job], load: Load, console: Console
) -> tuple[dict[int, dict[str, Summary]], dict[str, RunResult]]:
    """Return summaries by seed and system, and the results that were kept, by system."""
    several = len(load.seeds) > 1
    labels = [f"{job.system} (seed {job.seed})" if several else job.system for job in jobs]
    progress = RunProgress(labels, console, quiet=load.quiet)
    try:
        done = run_jobs(jobs, load.num_processes, progress.hear)
    finally:
        progress.end()
    runs: dict[int, dict[str, Summary]] = {}
    for job, each in zip(jobs, done, strict=True):
        runs.setdefault(job.seed, {})[job.system] = each.summary
    kept = {job.system: each.result for job, each in zip(jobs, done, strict=True) if each.result is not None}
    return runs, kept


def _plan(load: Load, system: str, console: Console) -> InstancePlan:
    """Try numbers of instances until the least that suffices is known; say each on a terminal."""

    def probe(count: int) -> float:
        scenario = replace(load.scenario, instances=count)
        jobs = [Job(scenario, system, seed, load.traces) for seed in load.seeds]
        runs, _ = _run(jobs, replace(load, quiet=True), console)
        shares = [run[system]["slo"]["both_share"] or 0.0 for run in runs.values()]
        share = sum(shares) / len(shares)
        if not load.quiet:
            console.line(f"{_instances(count)}: {100 * share:.2f} % in time")
        return share

    return plan_instances(probe, load.target_share, load.max_instances)


def _with_planned_instances(load: Load, system: str, console: Console) -> Load:
    _needs_slo(load)
    found = _plan(load, system, console)
    if found.num_instances is None:
        raise CommandError(
            f"{load.max_instances} instances do not suffice for {system}",
            "Raise --max-instances, allow more time with --slo, or name a number with --instances",
            FAILED,
        )
    return replace(load, scenario=replace(load.scenario, instances=found.num_instances))


def _needs_slo(load: Load) -> None:
    if load.scenario.slo is None:
        raise StartupError(
            "it is not said what is in time", "Say it with --slo ttft=SECONDS,tpot=SECONDS, for example ttft=1,tpot=0.1"
        )


def _plot(results: Mapping[str, RunResult], load: Load) -> None:
    assert load.plot_folder is not None
    seed = f", seed {load.seeds[0]}" if len(load.seeds) > 1 else ""
    try:
        write_plots(results, load.plot_folder, f"{_title(load)}{seed}")
    except OSError as error:
        raise CommandError(
            f"{load.plot_folder} cannot be written: {error.strerror}", "Name another with --plot"
        ) from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}", "Name another with --json") from error


def _title(load: Load) -> str:
    tree = describe_load(load)
    gpus = (
        f"{tree['instances']} × {tree['gpu']}"
        if tree["tp"] == 1
        else f"{tree['instances']} × {tree['tp']} {tree['gpu']}"
    )
    return f"{tree['name']}: {tree['model']} on {gpus}; {tree['workload']}"


def _instances(count: int) -> str:
    return "1 instance" if count == 1 else f"{count} instances"


def _plan_tree(load: Load, system: str, found: InstancePlan) -> dict[str, Any]:
    assert load.scenario.slo is not None
    return {
        "scenario": {**describe_load(load), "instances": None},
        "system": system,
        "seeds": list(load.seeds),
        "slo": {**asdict(load.scenario.slo), "share": load.target_share},
        "instances": found.num_instances,
        "share": found.share,
        "share_with_one_less": found.share_below,
        "tried": {str(count): found.shares[count] for count in sorted(found.shares)},
    }


def _plan_text(load: Load, found: InstancePlan) -> str:
    slo = load.scenario.slo
    assert slo is not None
    wish = f"{100 * load.target_share:g} % with TTFT ≤ {slo.ttft_s:g} s and TPOT ≤ {slo.tpot_s:g} s"
    rows = [f"{count:>9}  {100 * share:6.2f} %" for count, share in sorted(found.shares.items())]
    lines = [f"wanted: {wish}", "", "instances   in time", *rows, ""]
    if found.num_instances is None:
        lines.append(f"not enough with {_instances(max(found.shares))}")
    else:
        less = "" if found.share_below is None else f"; with one less it is {100 * found.share_below:.2f} %"
        verb = "suffices" if found.num_instances == 1 else "suffice"
        lines.append(f"{_instances(found.num_instances)} {verb}: {100 * (found.share or 0):.2f} % in time{less}")
    return "\n".join(lines)
