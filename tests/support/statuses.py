"""Reports of workers, and views of a cluster, with keyword defaults."""

from __future__ import annotations

from typing import Any

from shared.ids import Incarnation, WorkerId
from shared.messages.report import ClusterView, ElasticFacts, Liveness, WorkerPhase, WorkerReport, WorkerStatus


def make_report(worker_id: str = "w", **fields: Any) -> WorkerReport:
    """A worker that is ready."""
    common = {"worker_id": WorkerId(worker_id), "sequence_number": 0, "phase": WorkerPhase.READY}
    return WorkerReport.model_validate(common | fields)


def make_status(
    worker_id: str = "w", *, liveness: Liveness = Liveness.ALIVE, throttled: bool = False, **fields: Any
) -> WorkerStatus:
    """A worker of a view; `fields` are those of its report."""
    return WorkerStatus(liveness=liveness, age_s=0.1, throttled=throttled, report=make_report(worker_id, **fields))


def make_view(*statuses: WorkerStatus) -> ClusterView:
    """The view that shows these."""
    return ClusterView(sequence_number=1, workers=statuses)


def make_elastic_report(number: int, **fields: Any) -> WorkerReport:
    """A worker of many: 80 layers that can be dropped, sizes of its own, and names as they are in a data centre."""
    elastic = ElasticFacts(
        layer_bytes=tuple(range(1_744_846_848, 1_744_846_928)),
        outer_bytes=4_202_692_608,
        first_stage_end=2_101_346_304,
        last_stage_begin=2_101_346_304,
        block_bytes=32_768,
        page_bytes=2 * 1024**2,
        num_pages=100_000 + number,
        max_blocks=1_000_000,
        link_bytes_per_s=5e10 + number,
        has_host_copy=True,
    )
    common: dict[str, Any] = {
        "pid": 1 + number,
        "host": f"node-{number:05}.cluster.example",
        "incarnation": Incarnation(2**47 + number),
        "model": "a-model-of-seventy-billion-parameters",
        "device": "cuda:0 a device with a name",
        "kernels": "flashinfer",
        "system": "kunserve",
        "max_model_len": 131_072,
        "block_size": 16,
        "num_blocks": 123_456,
        "num_used_blocks": 1000 + number,
        "num_layers": 80,
        "layers": (0, 80),
        "resident": (0, 80),
        "stage_address": f"10.1.{number // 250}.{number % 250}:40001",
        "elastic": elastic,
        "num_running": 100,
        "max_sequences": 256,
        "num_steps": 1_234_567,
        "token_s": 0.000123,
        "tokens_per_s": 3123.3453,
        "memory_bytes": 80 * 1024**3,
        "num_prompt_tokens_total": 10**9,
        "num_generated_tokens_total": 10**8,
    }
    return make_report(f"worker-{number:05}", **common | fields)


def make_elastic_view(num_workers: int, sequence_number: int = 1, **fields: Any) -> ClusterView:
    """The view that shows so many of them."""
    reports = [make_elastic_report(number, **fields) for number in range(num_workers)]
    workers = tuple(WorkerStatus(liveness=Liveness.ALIVE, age_s=0.123, report=report) for report in reports)
    return ClusterView(sequence_number=sequence_number, workers=workers)
