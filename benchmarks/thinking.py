"""Readers beside answers that think: whether those who think cost the others anything, and whether anybody starves.

    python -m benchmarks.thinking [SCENARIO] [--systems fcfs,andes,sluice] [--share 0.5] [--tokens 300] [--seeds 0 1]

Some of the readers get an answer that thinks first. Every system runs the load twice, with the same arrivals, prompts
and numbers of tokens: once its workers are told where the thinking ends, and once not, so that it is text to them.
Both runs are judged alike: the text of who thinks is expected from the end of the thinking on. Below the table of each
seed: the worst readers of all beside those of the first system, and by how many points the share of the others with a
good experience differs from where workers are not told.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.harness import print_table
from sim.experiment.records import Records
from sim.experiment.run import run_workload
from sim.experiment.setup import build_cluster
from sim.experiment.summary import GOOD_QOE
from sim.scenarios.files import load_scenario
from sim.scenarios.parts import ThinkingLoad
from sim.scenarios.scenario import Scenario
from sim.workload.workload import F64, Bool

GROUPS = ("all", "others", "thinking")


@dataclass(frozen=True, slots=True)
class Told:
    """What came of one load on one system."""

    records: Records
    preemptions: int

    def qoe(self, group: str, warm_up_s: float) -> F64:
        """Return the QoE of each reader of a group who came after the warm-up; 0 without a whole answer."""
        thinks: Bool = self.records.num_thinking > 0
        chosen = {"all": thinks | ~thinks, "thinking": thinks, "others": ~thinks}[group]
        found = self.records.qoe[chosen & (self.records.arrival_s >= warm_up_s)]
        return found[~np.isnan(found)]

    def thinking_s(self) -> F64:
        """Return for how long each answer thought, from its request's arrival on."""
        records = self.records
        rows = np.flatnonzero(records.is_complete & (records.num_thinking > 0))
        ends: F64 = records.token_s[records.token_begin[rows] + records.num_thinking[rows] - 1]
        return ends - records.arrival_s[rows]


def measure(scenario: Scenario, system: str, seed: int, *, is_told: bool) -> Told:
    """Return what came of a scenario's load.

    Args:
        scenario: some of whose answers think.
        system: what runs it.
        seed: of the load.
        is_told: workers are told what is thinking; else it is text to them.
    """
    workload = scenario.workload(seed)
    nothing = np.zeros_like(workload.num_thinking)
    load = workload if is_told else replace(workload, num_thinking=nothing)
    result = run_workload(build_cluster(scenario, system, load), load)
    return Told(replace(result.records, num_thinking=workload.num_thinking), result.facts.preemptions or 0)


def report(scenario: Scenario, systems: Sequence[str], seed: int) -> None:
    """Run all systems, and print what became of the readers."""
    rows, worst, shares = [], {}, {}
    for system in systems:
        for is_told in (True, False):
            told = measure(scenario, system, seed, is_told=is_told)
            known = {group: told.qoe(group, scenario.warm_up_s) for group in GROUPS}
            worst[system, is_told] = float(np.percentile(known["all"], 1))
            shares[system, is_told] = _share(known["others"])
            rows.append([system, "told" if is_told else "not told", *_cells(known), *_times(told)])
    titles = [f"{group}: mean, P1, ≥ {GOOD_QOE:g}" for group in GROUPS]
    head = ["system", "workers are", *titles, "thinking: mean, P99, s", "preemptions"]
    print_table(f"QoE, {scenario.name}, seed {seed}", head, rows)
    first = systems[0]
    for system in systems[1:]:
        more = 100 * (shares[system, True] - shares[system, False])
        print(f"{system}: P1 of all {worst[system, True]:.3f}, {first}'s is {worst[first, True]:.3f}; ", end="")
        print(f"others ≥ {GOOD_QOE:g}: {more:+.1f} points by being told")


def _share(qoe: F64) -> float:
    return float((qoe >= GOOD_QOE).mean())


def _cells(known: dict[str, F64]) -> list[str]:
    return [
        f"{qoe.mean():.3f}, {np.percentile(qoe, 1):.3f}, {100 * _share(qoe):.1f} %"
        for qoe in (known[group] for group in GROUPS)
    ]


def _times(told: Told) -> list[str]:
    thinking_s = told.thinking_s()
    return [f"{thinking_s.mean():.1f}, {np.percentile(thinking_s, 99):.0f}", str(told.preemptions)]


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("scenario", nargs="?", default="burst-demo", help="name or file; no trace [burst-demo]")
    parser.add_argument("--systems", type=lambda text: text.split(","), default=["fcfs", "andes", "sluice"])
    parser.add_argument("--share", type=float, default=0.5, help="of the answers, those that think")
    parser.add_argument("--tokens", type=float, default=300.0, help="mean of what they think")
    parser.add_argument("--upscale", type=float, help="load in multiples of the scenario's own")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    chosen = parser.parse_args()
    load = ThinkingLoad(share=chosen.share, tokens=chosen.tokens)
    scenario = load_scenario(chosen.scenario).with_overrides(upscale=chosen.upscale)
    for seed in chosen.seeds:
        report(scenario.model_copy(update={"thinking": load}), chosen.systems, seed)


if __name__ == "__main__":
    main()
