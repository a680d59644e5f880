"""What it saves that only the end of a row goes to the host, against whole rows: both in the simulator.

    python -m benchmarks.whole_rows [--links 1 4 25] [--schedulers chunked round-robin] [--host-memory 64GiB]
    python -m benchmarks.whole_rows --schedulers andes --own --instances 1 --upscale 0.575

The twin asks the same policy, and then lets every row that goes to the host take all of its blocks along.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.harness import print_table
from services.worker.scheduling.registry import SCHEDULERS
from services.worker.scheduling.view import Scheduler, SchedulerOutput, SchedulerView
from shared.process.log import only_from
from sim.experiment.run import run_system
from sim.experiment.summary import summarise
from sim.scenarios.files import load_scenario
from sim.scenarios.scenario import Overrides, Scenario, validated

WHOLE = "whole-"
SHORT = Overrides(lengths="sharegpt", kv_tokens=60000, duration_s=120.0)
"""Of memory, for two minutes."""


class WholeRows:
    """A policy by which nobody keeps the beginning of a row on the device.

    Args:
        policy: makes the one whose decisions these are else.
    """

    def __init__(self, policy: Callable[[], Scheduler]) -> None:
        self._policy = policy()
        self.reorders = self._policy.reorders
        self.best_effort_gives_way = self._policy.best_effort_gives_way

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        """Choose the next step."""
        output = self._policy.schedule(view)
        return replace(output, preempt_kept=np.zeros_like(output.preempt_kept))


def variants(schedulers: Sequence[str], links: Sequence[float], host_memory: str) -> dict[str, dict[str, object]]:
    """Return what is compared: each scheduler and its twin, over each link."""
    found: dict[str, dict[str, object]] = {}
    for name in schedulers:
        SCHEDULERS[WHOLE + name] = partial(WholeRows, SCHEDULERS[name])
        for link in links:
            for scheduler in (name, WHOLE + name):
                found[f"{scheduler}, {link:g} GB/s"] = {
                    "system": "fcfs-chunked",
                    "scheduler": scheduler,
                    "host_memory": host_memory,
                    "host_link_gb_per_s": link,
                }
    return found


def figures(scenario: Scenario, system: str) -> list[str]:
    """Run one system, and return its line."""
    run = run_system(scenario, system, seed=1)
    told = summarise(run.records, run.facts)
    return [
        system,
        f"{told['preemptions']}",
        f"{told['swapped_out_bytes'] / 1e9:.2f}",
        f"{told['recomputed_tokens']}",
        f"{told['ttft_s']['mean']:.2f}",
        f"{told['ttft_s']['p99']:.2f}",
        f"{1000 * told['tpot_s']['p99']:.1f}",
        f"{told['throughput_tokens_per_s']:.0f}",
        f"{told['qoe']['mean']:.3f}",
        f"{told['qoe']['share_ge_0_95']:.1%}",
    ]


def main() -> None:
    """Run all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scenario", default="burst-demo")
    parser.add_argument("--own", action="store_true", help="its own lengths, duration and memory")
    parser.add_argument("--instances", type=int, help="so many, and not the scenario's")
    parser.add_argument("--upscale", type=float, help="of the rate, and not the scenario's")
    parser.add_argument("--links", type=float, nargs="+", default=[1, 4, 25], help="GB/s, each way")
    parser.add_argument("--schedulers", nargs="+", default=["chunked", "round-robin"])
    parser.add_argument("--host-memory", default="64GiB")
    chosen = parser.parse_args()
    scenario = load_scenario(chosen.scenario).with_overrides(instances=chosen.instances, upscale=chosen.upscale)
    scenario = scenario if chosen.own else scenario.with_overrides(**SHORT)
    compared = variants(chosen.schedulers, chosen.links, chosen.host_memory)
    scenario = validated({**scenario.model_dump(), "variants": compared}, chosen.scenario)
    header = "policy, link | preemptions | to the host, GB | computed again, tokens | TTFT mean, s | P99 | TPOT P99, ms"
    with only_from("error"):
        lines = [figures(scenario, name) for name in compared]
    title = f"{scenario.name}, host memory {chosen.host_memory}"
    print_table(title, [*header.split(" | "), "tokens/s", "QoE mean", ">= 0.95"], lines)


if __name__ == "__main__":
    main()
