"""`sluice simulate`, `compare` and `plan`: check everything, run, write, print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from cli.console import Console
from cli.exit_codes import DONE, FAILED, CommandError
from cli.simulate.experiment import Experiment, describe, read_experiment
from cli.simulate.jobs import Job, run_jobs
from cli.simulate.progress import RunProgress
from shared.errors import StartupError
from shared.systems import DEFAULT_SYSTEM, find_system
from sim.experiment.alone import alone
from sim.experiment.compare import against_alone, compare, to_json
from sim.experiment.plan import InstancePlan, plan_instances
from sim.experiment.plots import check_matplotlib, write_plots
from sim.experiment.report import render
from sim.experiment.result import RunResult
from sim.experiment.slo_scales import Latencies, missed_by_scale
from sim.experiment.summary import Summary, rounded
from sim.scenarios.scenario import Scenario


def run_compare(systems: Sequence[str], flags: Mapping[str, Any]) -> int:
    """Run one load on every system; none: those that the scenario names. Returns the exit code.

    Raises:
        StartupError: something that was asked for does not exist.
        CommandError: a run failed, or a file cannot be written.
    """
    console = Console()
    experiment = read_experiment(flags)
    names = _checked(systems or experiment.scenario.systems or (DEFAULT_SYSTEM,), experiment.scenario)
    if experiment.plot_folder is not None:
        check_matplotlib()
    if experiment.instances_by_slo:
        experiment = _with_planned_instances(experiment, names[0], console)
    jobs = [
        Job(
            experiment.scenario,
            name,
            seed,
            experiment.traces,
            keep_result=experiment.plot_folder is not None and seed == experiment.seeds[0],
        )
        for seed in experiment.seeds
        for name in names
    ]
    runs, latencies, results = _run(jobs, experiment, console)
    comparison = compare(describe(experiment), runs)
    comparison["alone"] = rounded(_alone(experiment))
    bounds = [name for name in names if experiment.scenario.has_unlimited_memory(name)]
    if len(names) > 1:
        comparison["slo_scales"] = rounded(missed_by_scale(list(latencies.values()), bounds))
    without = [name for name in names if not experiment.scenario.variant(name).best_effort]
    if without and len(names) > 1:
        told = against_alone(comparison["systems"], list(latencies.values()), without[0])
        comparison["against_alone"] = rounded(told)
    if experiment.json_file is not None:
        _write(experiment.json_file, to_json(comparison))
    if experiment.plot_folder is not None:
        _plot(results, experiment, bounds)
    click.echo(f"{_title(experiment)}\n\n{render(comparison)}")
    return DONE


def run_plan(system: str, flags: Mapping[str, Any]) -> int:
    """Find how many instances a load needs on a system, and return the exit code.

    Raises:
        StartupError: something that was asked for does not exist.
        CommandError: no number up to the limit suffices; a run failed; the file cannot be written.
    """
    console = Console()
    experiment = read_experiment(flags)
    _checked([system], experiment.scenario)
    _needs_slo(experiment)
    found = _plan(experiment, system, console)
    if experiment.json_file is not None:
        _write(experiment.json_file, to_json(rounded(_plan_tree(experiment, system, found))))
    click.echo(_plan_text(experiment, system, found))
    if found.num_instances is None:
        raise CommandError(
            f"{experiment.max_instances} instances do not suffice",
            "Raise --max-instances, or allow more time with --slo",
            FAILED,
        )
    return DONE


def _alone(experiment: Experiment) -> dict[str, float | None]:
    scenario = experiment.scenario
    workloads = [scenario.workload(seed, experiment.traces) for seed in experiment.seeds]
    return alone(workloads, scenario.instance().cost, scenario.max_batch_tokens, warm_up_s=scenario.warm_up_s)


def _checked(names: Sequence[str], scenario: Scenario) -> tuple[str, ...]:
    """Return the names of systems and variants, each once.

    Raises:
        StartupError: one of them does not exist.
    """
    for name in names:
        scenario.variant(name)
    return tuple(dict.fromkeys(names))


def _run(
    jobs: Sequence[Job], experiment: Experiment, console: Console
) -> tuple[dict[int, dict[str, Summary]], dict[int, dict[str, Latencies]], dict[str, RunResult]]:
    """Return summaries and latencies by seed and system, and the results that were kept, by system."""
    several = len(experiment.seeds) > 1
    labels = [f"{job.system} (seed {job.seed})" if several else job.system for job in jobs]
    progress = RunProgress(labels, console, quiet=experiment.quiet)
    try:
        done = run_jobs(jobs, experiment.num_processes, progress.hear)
    finally:
        progress.end()
    runs: dict[int, dict[str, Summary]] = {}
    latencies: dict[int, dict[str, Latencies]] = {}
    for job, each in zip(jobs, done, strict=True):
        runs.setdefault(job.seed, {})[job.system] = each.summary
        latencies.setdefault(job.seed, {})[job.system] = each.latencies
    kept = {job.system: each.result for job, each in zip(jobs, done, strict=True) if each.result is not None}
    return runs, latencies, kept


def _plan(experiment: Experiment, system: str, console: Console) -> InstancePlan:
    """Try numbers of instances until the least that suffices is known; say each on a terminal."""

    def probe(count: int) -> float:
        scenario = experiment.scenario.model_copy(update={"instances": count})
        jobs = [Job(scenario, system, seed, experiment.traces) for seed in experiment.seeds]
        runs, _, _ = _run(jobs, replace(experiment, quiet=True), console)
        shares = [run[system]["slo"]["both_share"] or 0.0 for run in runs.values()]
        share = sum(shares) / len(shares)
        if not experiment.quiet:
            console.line(f"{_instances(count)}: {100 * share:.2f} % in time")
        return share

    step = find_system(experiment.scenario.variant(system).system).num_stages
    return plan_instances(probe, experiment.target_share, max(experiment.max_instances, step), step)


def _with_planned_instances(experiment: Experiment, system: str, console: Console) -> Experiment:
    _needs_slo(experiment)
    found = _plan(experiment, system, console)
    if found.num_instances is None:
        raise CommandError(
            f"{experiment.max_instances} instances do not suffice for {system}",
            "Raise --max-instances, allow more time with --slo, or name a number with --instances",
            FAILED,
        )
    return replace(experiment, scenario=experiment.scenario.model_copy(update={"instances": found.num_instances}))


def _needs_slo(experiment: Experiment) -> None:
    if experiment.scenario.slo is None:
        raise StartupError(
            "it is not said what is in time", "Say it with --slo ttft=SECONDS,tpot=SECONDS, for example ttft=1,tpot=0.1"
        )


def _plot(results: Mapping[str, RunResult], experiment: Experiment, bounds: Sequence[str]) -> None:
    assert experiment.plot_folder is not None
    seed = f", seed {experiment.seeds[0]}" if len(experiment.seeds) > 1 else ""
    try:
        write_plots(results, experiment.plot_folder, f"{_title(experiment)}{seed}", bounds)
    except OSError as error:
        raise CommandError(
            f"{experiment.plot_folder} cannot be written: {error.strerror}", "Name another with --plot"
        ) from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}", "Name another with --json") from error


def _title(experiment: Experiment) -> str:
    tree = describe(experiment)
    gpus = (
        f"{tree['instances']} × {tree['gpu']}"
        if tree["tp"] == 1
        else f"{tree['instances']} × {tree['tp']} {tree['gpu']}"
    )
    return f"{tree['name']}: {tree['model']} on {gpus}; {tree['workload']}"


def _instances(count: int) -> str:
    return "1 instance" if count == 1 else f"{count} instances"


def _plan_tree(experiment: Experiment, system: str, found: InstancePlan) -> dict[str, Any]:
    assert experiment.scenario.slo is not None
    return {
        "scenario": {**describe(experiment), "instances": None},
        "system": system,
        "seeds": list(experiment.seeds),
        "slo": {**experiment.scenario.slo.model_dump(), "share": experiment.target_share},
        "instances": found.num_instances,
        "share": found.share,
        "share_with_one_less": found.share_below,
        "tried": {str(count): found.shares[count] for count in sorted(found.shares)},
    }


def _plan_text(experiment: Experiment, system: str, found: InstancePlan) -> str:
    slo = experiment.scenario.slo
    assert slo is not None
    wish = f"{100 * experiment.target_share:g} % with TTFT ≤ {slo.ttft_s:g} s and TPOT ≤ {slo.tpot_s:g} s"
    rows = [f"{count:>9}  {100 * share:6.2f} %" for count, share in sorted(found.shares.items())]
    tree = describe(experiment)
    cards = f"an instance is {tree['tp']} × {tree['gpu']}"
    load = f"{tree['name']}: {tree['workload']}; {tree['model']} on {system}, {cards}"
    lines = [load, f"wanted: {wish}", "", "instances   in time", *rows, ""]
    if found.num_instances is None:
        lines.append(f"not enough with {_instances(max(found.shares))}")
    else:
        less = "" if found.share_below is None else f"; with one less it is {100 * found.share_below:.2f} %"
        verb = "suffices" if found.num_instances == 1 else "suffice"
        lines.append(f"{_instances(found.num_instances)} {verb}: {100 * (found.share or 0):.2f} % in time{less}")
    return "\n".join(lines)
