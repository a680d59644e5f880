"""How near the simulator comes to a live cluster, with one command.

A live cluster (`sluice up`: broker, dispatcher, one worker on the CPU) gets two loads whose lengths, rates and arrivals
differ. The cost model's coefficients are fitted to the worker's step log of the first. Then the second load is replayed
in the simulator, with the live worker's limits, and both sides are compared: iteration time, end-to-end latency, TTFT.

    python -m benchmarks.fidelity [--model CHECKPOINT] [--json FILE] [--save FILE]
    python -m benchmarks.fidelity --load FILE          the figures again, from a measurement that was saved
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.fidelity.errors import (
    AIMS,
    Comparison,
    IterationParts,
    Residual,
    compare,
    iteration_parts,
    residuals,
    step_errors,
)
from benchmarks.fidelity.live import LiveSettings, measure
from benchmarks.fidelity.loads import COMPARED, FITTED, draw_load
from benchmarks.fidelity.measurement import LiveRun, Measurement
from benchmarks.fidelity.simulated import Calibration, calibrate, simulate
from benchmarks.harness import machine, print_table
from benchmarks.peers_model import make_checkpoint
from cli.profile.command import describe_fit


def main() -> None:
    """Measure, or take a saved measurement; print the comparison and write what was asked for."""
    chosen = _arguments()
    if chosen.load:
        measured = Measurement.load(chosen.load)
    else:
        measured = asyncio.run(_measure(chosen))
        if chosen.save:
            measured.save(chosen.save)
    found = analyse(measured)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


async def _measure(chosen: argparse.Namespace) -> Measurement:
    loads = [
        draw_load(replace(shape, rate_per_s=shape.rate_per_s * chosen.rate), chosen.duration, chosen.seed + i)
        for i, shape in enumerate((FITTED, COMPARED))
    ]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = chosen.model or Path(folder) / "small"
        make_checkpoint("small", checkpoint)
        log = Path(folder) / "cluster.log"
        settings = LiveSettings(checkpoint, chosen.dtype, chosen.threads, chosen.memory, log)
        return await measure(settings, *loads)


def analyse(measured: Measurement) -> dict[str, Any]:
    """Print how near the simulator comes, on the load that was fitted and on the other one; return the figures."""
    calibration = calibrate(measured)
    print(describe_fit(calibration.fit))
    print(
        f"steps take {calibration.stretch - 1:+.1%} on average: some are held up, and the fit goes by the typical one"
    )
    print(f"between steps: {1e3 * calibration.overhead_s:.3g} ms on average")
    print(f"one message, HTTP and text included: {1e3 * calibration.message_s:.3g} ms")
    return {
        "machine": machine(),
        "cost_s": asdict(calibration.cost),
        "stretch": calibration.stretch,
        "message_s": calibration.message_s,
        "loads": {
            title: _analyse_load(f"{title}: {run.workload.name}", run, measured, calibration)
            for title, run in (("fitted", measured.fitted), ("compared", measured.compared))
        },
    }


def _analyse_load(title: str, live: LiveRun, measured: Measurement, calibration: Calibration) -> dict[str, Any]:
    simulated = simulate(live.workload, measured.worker, calibration)
    rows = compare((live.records, live.steps), (simulated.records, simulated.steps))
    parts = iteration_parts(calibration.cost, live.steps, simulated.steps)
    kinds = residuals(calibration.cost, live.steps)
    errors = step_errors(calibration.cost, live.steps)
    _print_load(title, live, rows, parts, kinds)
    print(
        f"\nsteps: {len(live.steps)} live, {len(simulated.steps)} simulated; the formula's error step by step:", end=" "
    )
    print(f"mean {errors[0]:.1%}, 95th percentile {errors[1]:.1%}")
    return {
        "num_requests": len(live.workload),
        "foreign_ratio": live.foreign_ratio,
        "lateness_p99_s": live.lateness_p99_s,
        "num_steps": {"live": len(live.steps), "simulated": len(simulated.steps)},
        "figures": [{**asdict(row), "error_ratio": row.error_ratio, "verdict": row.verdict} for row in rows],
        "iteration_error": asdict(parts),
        "step_error": {"mean": errors[0], "p95": errors[1]},
        "residuals": [asdict(kind) for kind in kinds],
    }


def _print_load(
    title: str, live: LiveRun, rows: list[Comparison], parts: IterationParts, kinds: list[Residual]
) -> None:
    load = live.workload
    lengths = f"prompts {load.num_prompt.mean():.0f} tokens, answers {load.num_output.mean():.0f} on average"
    seconds = live.records.last_token_s.max()
    busy = sum(step.duration_s for step in live.steps) / seconds
    print(
        f"\n== {title}: {len(load)} requests in {seconds:.0f} s, {lengths}; the worker computes {busy:.0%} of the time"
    )
    print(f"others used {live.foreign_ratio:.1%} of the machine; sent late by {1e3 * live.lateness_p99_s:.1f} ms (p99)")
    cells = [
        [
            row.name,
            *(f"{1e3 * value:.2f}" for value in (row.live_s, row.simulated_s)),
            f"{row.error_ratio:+.1%}",
            _aim(row),
        ]
        for row in rows
    ]
    print_table("ms", ["figure", "live", "simulated", "error", "aim"], cells)
    shares = [f"{part:+.1%}" for part in (parts.batches, parts.formula, parts.loop, parts.total)]
    print_table("Error of the mean iteration, by cause", ["batches", "formula", "loop", "all"], [shares])
    steps = [[kind.kind, str(kind.num_steps), f"{kind.time_share:.1%}", f"{kind.error_ratio:+.1%}"] for kind in kinds]
    print_table("The formula on the live steps", ["kind", "steps", "share of time", "error"], steps)


def _aim(row: Comparison) -> str:
    return f"{AIMS[row.name]:.0%}: {row.verdict}" if row.verdict else ""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of the checkpoint; made if it is missing [25.7 M, random]")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1, help="of the worker; leave a core to the others [1]")
    parser.add_argument("--memory", default="2GiB", help="of the worker [2GiB]")
    parser.add_argument("--duration", type=float, default=240.0, help="seconds of each load [240]")
    parser.add_argument("--rate", type=float, default=1.0, help="load in multiples of its own [1]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--save", type=Path, help="write the measurement here")
    parser.add_argument("--load", type=Path, help="take a saved measurement instead of a live cluster")
    return parser.parse_args()


if __name__ == "__main__":
    main()
