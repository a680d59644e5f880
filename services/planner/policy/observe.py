"""From the monitor's view to what the policies know.

    view ─► alive and ready ─► alone, or leading ──────────────────► WorkerLoad       what the ladder looks at
                           └─► memory that is elastic, one model ──► InstanceFacts    what plans are made from

Best effort presses for nothing where the worker's policy has it give way, and nowhere while it waits in dispatchers:
no plan is made for it, none waits for it, and none is dearer for it. When groups change, its KV moves last, and is
given up where there is no room. Where it does not give way it counts as everything else that is at the worker.

A leader reports for its whole group; the other members report no sequences, and nothing is placed on them. All elastic
workers must agree on the model, its sizes and its parameters: those that do not agree with most of them are left out,
by name.

Pure. Source: the project's own design.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from services.planner.policy.levers.ladder import ClusterSnapshot, MemoryLoad
from services.planner.policy.plans.drop_facts import ClusterFacts, InstanceFacts, ModelFacts
from shared.api_keys import Tier
from shared.ids import Incarnation, WorkerId
from shared.layers import LayerRange
from shared.messages.report import (
    BestEffortPart,
    ClusterView,
    ElasticFacts,
    Liveness,
    WaitingRequests,
    WorkerPhase,
    WorkerReport,
    WorkerStatus,
)

NOTHING_GIVES_WAY: Final = BestEffortPart()


@dataclass(frozen=True, slots=True)
class ObserveParams:
    """What a view does not say."""

    throughput: tuple[float, ...]
    """Profile: throughput of a group of s instances at index s - 1; only their ratios count."""
    horizon_s: float = 1.0
    """How far ahead the growth of running requests is counted (v1, section 4.3); higher drops more."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a view means."""

    snapshot: ClusterSnapshot
    left_out: tuple[tuple[WorkerId, str], ...] = ()
    """Elastic workers that no plan counts on, and why; sorted by id."""


def linear_profile(max_size: int, loss_ratio: float) -> tuple[float, ...]:
    """Return a profile in which each further stage costs a group this share of what its instances do alone.

    Raises:
        ValueError: a group of that size would do nothing.
    """
    if max_size < 1 or not 0 <= loss_ratio * (max_size - 1) < 1:
        raise ValueError(f"groups of {max_size} that lose {loss_ratio:g} per stage would do nothing")
    return tuple(size * (1 - loss_ratio * (size - 1)) for size in range(1, max_size + 1))


def can_work(status: WorkerStatus) -> bool:
    """Return whether the worker is alive and ready."""
    return status.liveness is Liveness.ALIVE and status.report.phase is WorkerPhase.READY


def _stays(status: WorkerStatus) -> bool:
    """Return whether plans may name the worker: one that is told to stop is a stage only until that is restored."""
    return not status.report.is_leaving or bool(status.report.group)


def find_loss(view: ClusterView, worker_id: WorkerId, incarnation: Incarnation) -> str | None:
    """Return why this process of a worker will never answer; None while it may.

    One that the view does not show may answer: a monitor that has just started has not heard of everybody yet.
    """
    status = next((each for each in view.workers if each.report.worker_id == worker_id), None)
    if status is None:
        return None
    if status.liveness is Liveness.DEAD or status.report.phase is WorkerPhase.STOPPED:
        return "it is gone"
    return None if status.report.incarnation == incarnation else "it was started anew"


def observe(view: ClusterView, view_age_s: float, params: ObserveParams) -> Observation:
    """Return what the policies know of this view."""
    usable = _with_waiting([status for status in view.workers if can_work(status) and _stays(status)], view.waiting)
    loads = tuple(_load(status) for status in usable if takes_requests(status.report))
    models, left_out = _models(usable)
    model = _most_common(models)
    instances = []
    for status in usable:
        name = status.report.worker_id
        if name not in models:
            continue
        if models[name] != model:
            is_of_size = model is not None and models[name]._replace(digest=model.digest) == model
            what = "parameters" if is_of_size else "sizes"
            left_out[name] = f"the {what} of its model are not those of most workers"
            continue
        instances.append(_instance(status, models[name], params))
    instances.sort(key=lambda instance: instance.instance_id)
    facts = None if model is None else ClusterFacts(model.facts, tuple(instances), params.throughput)
    snapshot = ClusterSnapshot(view_age_s, loads, len(view.workers) - len(usable), facts)
    return Observation(snapshot, tuple(sorted(left_out.items())))


def _with_waiting(usable: Sequence[WorkerStatus], waiting: Sequence[WaitingRequests]) -> list[WorkerStatus]:
    """Return the workers as if what waits in dispatchers waited at them, in proportion to their memory.

    It counts as queued for memory at those that have requests queued for it already: at the others it waits for its
    turn. Best effort waits for what is left.
    """
    num_tokens, num_requests = Counter[str](), Counter[str]()
    for each in waiting:
        if each.tier == Tier.FLEX.label:
            continue
        num_tokens[each.model] += each.num_tokens
        num_requests[each.model] += each.num_requests
    taking = [status for status in usable if takes_requests(status.report) and num_requests[status.report.model]]
    sizes, queued_sizes = Counter[str](), Counter[str]()
    for report in (status.report for status in taking):
        sizes[report.model] += report.num_blocks
        queued_sizes[report.model] += report.num_blocks * bool(report.num_queued_for_memory)
    found = {status.report.worker_id: status for status in usable}
    for status in taking:
        report, model = status.report, status.report.model
        blocks = num_tokens[model] * report.num_blocks // max(sizes[model] * report.block_size, 1)
        queued = 0
        if report.num_queued_for_memory:
            queued = num_requests[model] * report.num_blocks // max(queued_sizes[model], 1)
        counts = {
            "num_demanded_blocks": report.num_demanded_blocks + blocks,
            "num_queued_for_memory": report.num_queued_for_memory + queued,
        }
        found[report.worker_id] = status.model_copy(update={"report": report.model_copy(update=counts)})
    return list(found.values())


def giving_way(report: WorkerReport) -> BestEffortPart:
    """Return what of a worker is best effort's and gives way: nothing, if its policy does not have it do so."""
    return report.best_effort if report.best_effort.gives_way else NOTHING_GIVES_WAY


def takes_requests(report: WorkerReport) -> bool:
    """Return whether sequences are the worker's own: it is alone, or leads."""
    return report.group in ("", report.worker_id)


def _load(status: WorkerStatus) -> MemoryLoad:
    report = status.report
    return MemoryLoad(
        report.worker_id,
        num_blocks=report.num_blocks,
        num_used_blocks=max(report.num_used_blocks - report.num_slack_blocks, 0),
        num_demanded_blocks=max(report.num_demanded_blocks - report.num_slack_demanded_blocks, 0),
        throttled=status.throttled,
    )


class _Model(NamedTuple):
    """What workers have to have in common."""

    name: str
    digest: str
    """See `ProcessFacts`."""
    facts: ModelFacts


def _models(usable: Sequence[WorkerStatus]) -> tuple[dict[WorkerId, _Model], dict[WorkerId, str]]:
    """Return the model of each elastic worker, and why others of them cannot be taken at their word."""
    models: dict[WorkerId, _Model] = {}
    left_out: dict[WorkerId, str] = {}
    for status in usable:
        report = status.report
        if report.elastic is None:
            continue
        try:
            models[report.worker_id] = _Model(report.model, report.model_digest, _model_facts(report, report.elastic))
        except ValueError as error:
            left_out[report.worker_id] = str(error)
    return models, left_out


def _model_facts(report: WorkerReport, elastic: ElasticFacts) -> ModelFacts:
    """Return the sizes of the worker's model.

    Raises:
        ValueError: they cannot be, or do not fit what else the worker says.
    """
    facts = ModelFacts(
        layer_bytes=elastic.layer_bytes,
        outer_bytes=elastic.outer_bytes,
        first_stage_end=elastic.first_stage_end,
        last_stage_begin=elastic.last_stage_begin,
        block_bytes=elastic.block_bytes,
        block_size=report.block_size,
        page_bytes=elastic.page_bytes,
    )
    if not facts.all_layers.covers(LayerRange(*report.layers)):
        raise ValueError(f"it holds the layers {report.layers} of a model of {facts.num_layers}")
    resident = _resident(report)
    if resident is not None and not (facts.all_layers.covers(resident) and resident.covers(LayerRange(*report.layers))):
        raise ValueError(f"it has parameters of the layers {report.resident}, and holds {report.layers}")
    rates = report.token_s, report.tokens_per_s
    if elastic.num_pages < 1 or elastic.max_blocks < 0 or not all(0 <= rate < float("inf") for rate in rates):
        raise ValueError("its budget cannot be")
    return facts


def _resident(report: WorkerReport) -> LayerRange | None:
    return None if report.resident == (0, 0) else LayerRange(*report.resident)


def _most_common(models: Mapping[WorkerId, _Model]) -> _Model | None:
    """Return the model that most workers have; of equally many the first worker's."""
    counts = Counter(models[name] for name in sorted(models))
    return max(counts, key=counts.__getitem__, default=None)


def _instance(status: WorkerStatus, model: _Model, params: ObserveParams) -> InstanceFacts:
    report, elastic, block_size = status.report, status.report.elastic, model.facts.block_size
    assert elastic is not None, "it has a model"
    reports, flex = takes_requests(report), giving_way(report)
    num_running = max(report.num_running - flex.num_running, 0)
    tokens_per_s = report.tokens_per_s * (num_running / report.num_running if report.num_running else 1.0)
    return InstanceFacts(
        instance_id=report.worker_id,
        layers=LayerRange(*report.layers),
        num_pages=elastic.num_pages,
        group_id=report.group,
        host=report.host,
        used_tokens=reports * max(report.num_used_blocks - flex.num_used_blocks, 0) * block_size,
        demanded_tokens=reports * max(report.num_demanded_blocks - flex.num_demanded_blocks, 0) * block_size,
        growth_tokens=reports * int(tokens_per_s * params.horizon_s),
        tokens_per_s=reports * tokens_per_s,
        max_request_tokens=report.max_model_len or None,
        num_running=reports * num_running,
        num_queued=reports * report.num_queued_for_memory,
        throttled=reports and status.throttled,
        token_s=report.token_s,
        link_bytes_per_s=elastic.link_bytes_per_s,
        host_copy=model.facts.all_layers if elastic.has_host_copy else None,
        max_blocks=elastic.max_blocks,
        num_blocks=report.num_blocks,
        resident=_resident(report),
        loaded_ratio=report.loaded_ratio,
        is_leaving=report.is_leaving,
    )
