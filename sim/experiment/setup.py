"""From a scenario to the simulated cluster that runs it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sim.catalog.instance import InstanceFacts, find_instance
from sim.cluster import ClusterParams
from sim.scenarios.scenario import Scenario
from sim.worker import SimWorkerParams
from sim.workload.workload import Workload

BLOCK_SIZE = 16
"""Token slots of a KV block, as vLLM's default."""


def instance_of(scenario: Scenario) -> InstanceFacts:
    """Return the facts of the scenario's instances.

    Raises:
        StartupError: the catalogue has no such model or GPU.
    """
    return find_instance(scenario.model, scenario.gpu, tp=scenario.tp)


@dataclass(frozen=True, slots=True)
class ExperimentCluster:
    """A cluster to simulate."""

    params: ClusterParams
    tp: int = 1
    """GPUs of one instance."""


def build_cluster(scenario: Scenario, system: str, workload: Workload) -> ExperimentCluster:
    """Return the cluster: so many equal instances, each a worker.

    The KV of a finished request is not kept for others: prompts are random, and the papers' baselines have no prefix
    cache. A preempted request computes all of its KV again.
    """
    instance = instance_of(scenario)
    num_tokens = instance.kv_tokens if scenario.kv_tokens is None else scenario.kv_tokens
    longest = int((workload.num_prompt + workload.num_output).max()) if len(workload) else 1
    workers = tuple(
        SimWorkerParams(
            f"worker-{i}",
            replace(instance.cost, era_s=scenario.era_ms / 1e3),
            num_blocks=num_tokens // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            system=system,
            max_model_len=longest,
            prefix_caching=False,
            max_batch_rows=scenario.max_batch_rows,
            max_batch_tokens=scenario.max_batch_tokens,
        )
        for i in range(scenario.instances)
    )
    return ExperimentCluster(ClusterParams(workers, system=system), instance.tp)
