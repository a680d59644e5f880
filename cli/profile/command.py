"""`sluice profile`: runs shapes on a worker, fits its step log, writes the profile, and says how good it is."""

from __future__ import annotations

import asyncio
import datetime as dt
import re
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from cli.cluster.broker import BrokerAccess, named_broker
from cli.cluster.checks import check_broker
from cli.cluster.cluster import Cluster, run_cluster
from cli.cluster.settings import UpSettings
from cli.console import Console
from cli.exit_codes import DONE, FAILED, CommandError
from cli.profile.driver import Driver, find_worker
from cli.profile.shapes import WARM_UP, plan_shapes
from cli.profile.steps import columns_of, groups_of, overheads_s, phases_of
from shared.cost import CostModel, Profile, profile_toml
from shared.cost_fit import Fit, TooFewStepsError, error_ratios, fit_held_out
from shared.errors import StartupError
from shared.host import processor_name
from shared.ids import WorkerId
from shared.messages.report import WorkerReport
from shared.messages.steps import StepRecord
from shared.phase_cost import fit_phase
from shared.process.tasks import ends_before
from shared.subjects import Subjects
from shared.transport.bus import Bus

_LEAST_PHASE_STEPS = 8
DEFAULTS = {"port": 0}
"""Where the cluster of `sluice profile` differs from that of `sluice up`."""


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """What `sluice profile` was told besides the cluster's settings."""

    out: str = ""
    """File to write; empty: named after model and device, in the present folder."""
    worker: str = ""
    """Worker of a running cluster; empty: the first one that is ready."""
    limit_s: float = 120.0
    """Seconds after which no further shape is begun."""
    max_batch: int = 128
    """Most sequences that decode together."""
    num_decodes: int = 24
    """Steps of decodes per batch size and context."""
    seed: int = 0
    force: bool = False
    """Write over a file that exists."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The steps that a worker did while shapes ran on it, and what it held them to cost."""

    steps: list[StepRecord]
    before: CostModel | None
    """Fitted by the worker itself to earlier steps than these; None: it did not know."""
    after: CostModel | None
    """By then these were among those that it had fitted it to."""


async def measure(
    bus: Bus, subjects: Subjects, report: WorkerReport, settings: ProfileSettings, console: Console
) -> Measured:
    """Run the shapes on the worker and return the steps that it did meanwhile, those of other requests too.

    Raises:
        CommandError: the worker is gone, or keeps no step log.
    """
    rng = np.random.default_rng(settings.seed)
    shapes = plan_shapes(report, settings.max_batch, settings.num_decodes, rng)
    steps: list[StepRecord] = []
    async with Driver(bus, subjects, WorkerId(report.worker_id), rng) as driver:
        await driver.run(WARM_UP)
        _, next_step_id = await driver.read_steps(0)
        before = await driver.read_cost()
        began_s = time.monotonic()
        for done, shape in enumerate(shapes):
            elapsed_s = time.monotonic() - began_s
            if elapsed_s > settings.limit_s:
                console.line(f"{done} of {len(shapes)} shapes measured within {settings.limit_s:g} s (--limit-s)")
                break
            console.show_status(f"{elapsed_s:4.0f} s  shape {done + 1} of {len(shapes)}, {len(steps)} steps")
            await driver.run(shape)
            new, next_step_id = await driver.read_steps(next_step_id)
            steps += new
        after = await driver.read_cost()
    console.end_status()
    return Measured([step for step in steps if step.duration_s > 0], before, after)


def fit_steps(steps: Sequence[StepRecord], seed: int) -> Fit:
    """Return the fit.

    Raises:
        CommandError: there are too few steps.
    """
    try:
        return fit_held_out(columns_of(steps), groups_of(steps), np.random.default_rng(seed))
    except TooFewStepsError as error:
        raise CommandError(
            f"the steps cannot be fitted: {error}", "Raise --limit-s or --num-decodes", FAILED
        ) from error


def make_profile(report: WorkerReport, fit: Fit, name: str, how: str = "") -> Profile:
    """Return the profile with its provenance, `how` the worker was started included."""
    day = dt.datetime.now(dt.UTC).date().isoformat()
    counts = f"{fit.num_fitted} steps fitted, {fit.num_held_out} held out"
    return Profile(
        name=name,
        model=report.model,
        gpu=_hardware(report),
        tp=1,
        cost=fit.cost,
        source=f"sluice profile, {day}, step log of a live worker ({report.system}{how}): {counts}",
        mean_error_ratio=fit.mean_error_ratio,
        p95_error_ratio=fit.p95_error_ratio,
    )


def _hardware(report: WorkerReport) -> str:
    """Return the device, with the processor's name if the worker runs on this machine's."""
    is_here = report.device == "cpu" and report.host == socket.gethostname()
    return f"cpu, {processor_name()}" if is_here else report.device


def describe_fit(fit: Fit) -> str:
    """Return what the person reads: the coefficients in milliseconds, and the errors."""
    lines = ["ms per step: max(g0 + b0·N, g1 + b1·N) + d·KVdec + a·P"]
    for name, seconds in asdict(fit.cost).items():
        if name != "era_s":  # what a measured step has no part of
            lines.append(f"  {name.removesuffix('_s'):<4}{1e3 * seconds:.5g}")
    errors = f"mean {fit.mean_error_ratio:.1%}, 95th percentile {fit.p95_error_ratio:.1%}"
    lines.append(f"error on the {fit.num_held_out} of {fit.num_held_out + fit.num_fitted} steps held out: {errors}")
    return "\n".join(lines)


def describe_own(measured: Measured) -> str:
    """Return what the person reads of the worker's own model: its error on the steps that were measured here."""
    columns = columns_of(measured.steps)
    said = []
    for when, cost in (("before them", measured.before), ("after them", measured.after)):
        if cost is None:
            said.append(f"{when} unknown")
            continue
        median, p90 = np.percentile(error_ratios(cost, columns), (50, 90))
        said.append(f"{when} median {median:.1%}, 90th percentile {p90:.1%}")
    return f"error of the worker's own model on these {len(columns)} steps: {'; '.join(said)}"


def describe_phases(steps: Sequence[StepRecord]) -> str:
    """Return what the person reads of BROS's cost functions, which the systems of that name schedule by."""
    lines = [
        "BROS's cost functions, ms: α0·N + α1·N·L + β for prompts, the same for decodes; error on the steps of each"
    ]
    for name, (num_tokens, num_context, duration_s) in zip(
        ("prompts", "decodes"), (phase.T for phase in phases_of(steps)), strict=True
    ):
        if num_tokens.size < _LEAST_PHASE_STEPS:
            lines.append(f"  {name:<9}too few steps of them alone")
            continue
        phase = fit_phase(num_tokens, num_context, duration_s)
        error = np.abs(phase.of(num_tokens, num_context) / duration_s - 1)
        found = (f"{1e3 * each:.5g}" for each in (phase.token_s, phase.product_s, phase.fixed_s))
        lines.append(
            f"  {name:<9}{'  '.join(found)}   mean {error.mean():.1%}, 95th percentile {np.percentile(error, 95):.1%}"
        )
    return "\n".join(lines)


def describe_overhead(steps: Sequence[StepRecord]) -> str:
    """Return what the person reads of the time between steps, which is no part of the fit."""
    overheads = overheads_s(steps)
    if not overheads.size:
        return "between steps: not seen, no step followed another at once"
    return f"between steps: {1e3 * overheads.mean():.3g} ms on average, not part of these; a simulation's --era-ms"


def out_path(settings: ProfileSettings, model: str, device: str) -> Path:
    """Return the file to write.

    Raises:
        StartupError: it exists, or is not named as a profile must be.
    """
    path = Path(settings.out or re.sub(r"[^A-Za-z0-9.]+", "-", f"{model}-tp1-{device}").strip("-.").lower() + ".toml")
    if path.suffix != ".toml":
        raise StartupError(f"a profile's file ends in .toml, not as {path}", "Name another with --out")
    if path.exists() and not settings.force:
        raise StartupError(f"{path} exists", "Name another file with --out, or write over it with --force")
    if not path.parent.is_dir():
        raise StartupError(f"there is no folder {path.parent}", "Name another file with --out")
    return path


async def run_profile(up: UpSettings, settings: ProfileSettings, console: Console) -> int:
    """Profile a worker of the running cluster that `up` names, or of one that is started; return the exit code.

    Raises:
        CommandError: the worker is gone, does not answer, or did too few steps.
        StartupError: a file or a setting is wrong.
    """
    if settings.out:
        out_path(settings, "", "")
    if "model" not in up.model_fields_set and not up.has_own_broker:
        check_broker(up.nats_url)
        await _profile(named_broker(up), up.cluster, settings, console)
        return DONE

    async def use(cluster: Cluster, stop: asyncio.Event) -> int:
        started = cluster.plan.settings
        threads = f", threads {up.threads or f'up to {up.cores_per_worker()}'}" if started.device == "cpu" else ""
        how = f", {started.dtype}{threads}"
        await ends_before(stop, _profile(cluster.plan.broker, up.cluster, settings, console, how))
        return DONE

    return await run_cluster(up, console, use)


async def _profile(
    access: BrokerAccess, cluster: str, settings: ProfileSettings, console: Console, how: str = ""
) -> None:
    async with access.connect("profile") as bus:
        subjects = Subjects(cluster)
        report = await find_worker(bus, subjects, settings.worker)
        path = out_path(settings, report.model, report.device)
        console.line(f"measuring {report.worker_id}: {report.model} on {report.device}")
        measured = await measure(bus, subjects, report, settings, console)
    fit = await asyncio.to_thread(fit_steps, measured.steps, settings.seed)
    path.write_text(profile_toml(make_profile(report, fit, path.stem, how)), encoding="utf-8")
    use = f"use it with `python -m services.worker --executor modelled --profile {path}`"
    own = describe_own(measured), describe_phases(measured.steps), describe_overhead(measured.steps)
    sys.stdout.write("\n".join([describe_fit(fit), *own, f"written to {path}; {use}", ""]))
