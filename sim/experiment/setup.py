"""From a scenario to the simulated cluster that runs it."""

from __future__ import annotations

from dataclasses import dataclass

from sim.cluster import ClusterParams
from sim.scenarios.scenario import Scenario
from sim.worker import SimWorkerParams
from sim.workload.workload import Workload

BLOCK_SIZE = 16
"""Token slots of a KV block, as vLLM's default."""
MAX_SEQUENCES = 4096
"""Taken by an instance, running and waiting: requests wait where they were sent on arrival, as in the papers' systems.
Only an overload beyond repair makes them wait in the dispatcher."""


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

    Raises:
        StartupError: the catalogue has no such model or GPU, or they do not fit.
    """
    instance = scenario.instance()
    longest = int((workload.num_prompt + workload.num_output).max()) if len(workload) else 1
    workers = tuple(
        SimWorkerParams(
            f"worker-{i}",
            instance.cost,
            num_blocks=instance.kv_tokens // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            system=system,
            max_model_len=longest,
            prefix_caching=False,
            max_sequences=max(MAX_SEQUENCES, scenario.max_batch_rows),
            max_batch_rows=scenario.max_batch_rows,
            max_batch_tokens=scenario.max_batch_tokens,
            kv_bytes_per_token=instance.kv_bytes_per_token,
            host_link_bytes_per_s=instance.host_link_bytes_per_s,
        )
        for i in range(scenario.instances)
    )
    return ExperimentCluster(ClusterParams(workers, system=system), instance.tp)
