"""From a scenario to the simulated cluster that runs it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shared.errors import StartupError
from shared.layers import even_split
from shared.messages.report import ElasticFacts
from shared.systems import Migrates, find_system
from sim.catalog.instance import CatalogInstance
from sim.cluster import ClusterParams
from sim.devices.channel import ModelledLink
from sim.scenarios.scenario import Scenario
from sim.worker import Pipeline, SimWorkerParams
from sim.workload.workload import Workload

BLOCK_SIZE = 16
"""Token slots of a KV block, as vLLM's default."""
PAGE_BYTES = 2 * 2**20
"""Of device memory that changes hands between parameters and KV (KunServe v2, section 4.1)."""
LINK_LATENCY_S = 50e-6
"""Of a message between the stages of a pipeline on two machines."""
MAX_SEQUENCES = 4096
"""Taken by an instance, running and waiting; of the latter no more than its `max_waiting`."""


@dataclass(frozen=True, slots=True)
class ExperimentCluster:
    """A cluster to simulate."""

    params: ClusterParams
    gpus_per_worker: int = 1
    """GPUs of one instance, or of all the instances that a worker leads as a pipeline."""


def build_cluster(scenario: Scenario, system: str, workload: Workload) -> ExperimentCluster:
    """Return the cluster: so many equal instances, each a worker, or joined to pipelines of the system's length.

    The KV of a finished request is not kept for others: prompts are random, and the papers' baselines have no prefix
    cache. A preempted request computes all of its KV again. Only where groups form, or requests change their instance
    while they run, is KV kept by what it holds, which is how it finds its way.

    Args:
        scenario: cluster and variants.
        system: name of a system, or of one of the scenario's variants.
        workload: what will be asked of it.

    Raises:
        StartupError: the catalogue has no such model or GPU, they do not fit, the pipelines do not come out even, or
            there is no such system.
    """
    variant = scenario.variant(system)
    facts = find_system(variant.system)
    instance, num_stages = scenario.instance(), facts.num_stages
    _check_even(scenario.instances, num_stages, system)
    ranges = even_split(instance.num_layers, num_stages)
    kv_tokens = min(instance.stage_kv_tokens(len(layers)) for layers in ranges)
    rate = variant.network_bytes_per_s or instance.network_bytes_per_s
    link = ModelledLink(LINK_LATENCY_S, rate, instance.activation_bytes_per_token)
    hosts = scenario.hosts
    workers = tuple(
        SimWorkerParams(
            f"worker-{i}",
            instance.cost,
            num_blocks=kv_tokens // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            system=variant.system,
            scheduler=variant.scheduler,
            policy=variant.policy,
            max_model_len=workload.longest,
            prefix_caching=facts.drops or facts.migrates is not Migrates.NEVER,
            max_sequences=max(MAX_SEQUENCES, scenario.max_batch_rows),
            max_batch_rows=scenario.max_batch_rows,
            max_batch_tokens=scenario.max_batch_tokens,
            kv_bytes_per_token=instance.kv_bytes_per_token,
            host_memory_bytes=variant.host_memory,
            host_link_bytes_per_s=1e9 * (variant.host_link_gb_per_s or 0) or instance.host_link_bytes_per_s,
            pipeline=None if num_stages == 1 else Pipeline(instance.num_layers, ranges, link),
            elastic=_elastic_facts(instance, rate if variant.exchange else 0.0) if facts.drops else None,
            host=None if hosts is None else f"host-{i // hosts.instances}",
        )
        for i in range(scenario.instances // num_stages)
    )
    params = ClusterParams(
        workers,
        system=variant.system,
        link=link,
        near_link=None if hosts is None else replace(link, bytes_per_s=hosts.bytes_per_s),
        exchange=variant.exchange,
        kv_exchange=variant.kv_exchange,
        planner=variant.planner,
    )
    return ExperimentCluster(params, instance.tp * num_stages)


def _check_even(instances: int, num_stages: int, system: str) -> None:
    if instances % num_stages:
        raise StartupError(
            f"system {system} joins {num_stages} instances to a pipeline: {instances} do not come out even",
            f"Give a multiple of {num_stages} as --instances",
        )


def _elastic_facts(instance: CatalogInstance, link_bytes_per_s: float) -> ElasticFacts:
    """Return an instance's memory in pages: embedding and head count as spread evenly over the layers."""
    num_layers, block_bytes = instance.num_layers, instance.kv_bytes_per_token * BLOCK_SIZE // (2 * instance.num_layers)
    layer_bytes = -(-instance.parameter_bytes // num_layers)
    layer_pages = -(-layer_bytes // PAGE_BYTES)
    kv_pages = 2 * num_layers * -(-(instance.kv_tokens // BLOCK_SIZE) * block_bytes // PAGE_BYTES)
    num_pages = layer_pages * num_layers + kv_pages
    return ElasticFacts(
        layer_bytes=(layer_bytes,) * num_layers,
        outer_bytes=0,
        first_stage_end=0,
        last_stage_begin=0,
        block_bytes=block_bytes,
        page_bytes=PAGE_BYTES,
        num_pages=num_pages,
        max_blocks=2 * num_pages * PAGE_BYTES // block_bytes,
        link_bytes_per_s=link_bytes_per_s,
        has_host_copy=True,
    )
