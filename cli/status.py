"""`sluice status`: the cluster view as a table, or as JSON."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import aiohttp

from cli.console import table
from cli.exit_codes import FAILED, UNREACHABLE, CommandError
from cli.http import MAX_VIEW_BYTES, ask, check_url, refusal_hint, topic_of
from shared.api_keys import Tier
from shared.messages.fetch import FetchOutcome
from shared.messages.report import (
    ClusterView,
    Liveness,
    TransferKind,
    TransferProgress,
    WorkerPhase,
    WorkerReport,
    WorkerStatus,
    counts_by_tier,
)
from shared.reading import parse_json
from shared.sizes import describe_bytes
from shared.wire import decode_json

STALE_AFTER_S = 3.0
ANSWER_LIMIT_S = 20.0
"""For the view of thousands of workers."""
_HEAD = ("WORKER", "PHASE", "LIVENESS", "MODEL", "DEVICE", "KV USED", "RUNNING", "WAITING", "TOKENS/S", "STEPS")
_HOST_HEAD = ("HOST KV",)
"""Of workers with host memory for KV: its blocks in use."""
_GROUP_HEAD = ("GROUP", "STAGE", "LAYERS", "PLAN")
"""Of workers whose parameters can be dropped."""
_MOVE_NAMES = {
    TransferKind.KV_EXCHANGE: "KV exchange",
    TransferKind.KV_COPY: "KV copy",
    TransferKind.PARAMETER_LOAD: "parameter load",
}


async def run_status(url: str, api_key: str = "", *, as_json: bool) -> str:
    """Return what to print; a key is sent along if there is one.

    Raises:
        CommandError: nothing answers there, or it is no dispatcher.
    """
    fields, view = await ask_cluster(url, api_key)
    if view is None:
        hint = "The monitor has written no view yet; try again in a second"
        raise CommandError(f"{url} does not know its cluster yet", hint, UNREACHABLE, "no_view")
    return json.dumps(fields) if as_json else render(view, fields.get("age_s"))


async def ask_cluster(
    url: str, api_key: str, *, limit_s: float = ANSWER_LIMIT_S, session: aiohttp.ClientSession | None = None
) -> tuple[dict[str, Any], ClusterView | None]:
    """Return what a dispatcher says of its cluster, and the view in it; None while there is none yet.

    Raises:
        CommandError: nothing answers there, or it is no dispatcher.
    """
    cluster_url = f"{check_url(url)}/v1/cluster"
    answer = await ask(cluster_url, api_key=api_key, limit_s=limit_s, max_bytes=MAX_VIEW_BYTES, session=session)
    if answer.status in (401, 403):
        said = answer.body.decode(errors="replace")
        hint = refusal_hint(said, "Give a key that has the scope 'metrics' with --api-key, or set SLUICE_API_KEY")
        raise CommandError(f"{url} does not show its cluster ({answer.status})", hint, FAILED, topic_of(said))
    if answer.status != 200:
        hint = "Name a sluice API with --url"
        raise CommandError(f"{url} answers {answer.status} to /v1/cluster; it is no sluice API", hint, FAILED)
    try:
        fields = parse_json(answer.body)
        if isinstance(fields, dict) and fields.get("kind") is None and fields.get("workers") == []:
            return fields, None
        return fields, decode_json(answer.body, ClusterView, MAX_VIEW_BYTES)
    except ValueError as error:  # WireError too
        hint = "Use the `sluice` of the same version"
        raise CommandError(f"{url} describes its cluster in an unknown way: {error}", hint, FAILED) from error


def render(view: ClusterView, age_s: float | None = None) -> str:
    """Return the table; a view whose age (seconds) says that the monitor is silent is marked as stale."""
    if not view.workers:
        return "no worker reports to this cluster; start one with `sluice up`"
    rows = [_HEAD, *(_row(status) for status in view.workers)]
    if any(status.report.num_host_blocks for status in view.workers):
        cells = [_HOST_HEAD, *(_host_cells(status.report) for status in view.workers)]
        rows = [(*row, *more) for row, more in zip(rows, cells, strict=True)]
    if any(status.report.elastic is not None or status.report.group for status in view.workers):
        cells = [_GROUP_HEAD, *(_group_cells(status.report) for status in view.workers)]
        rows = [(*row, *more) for row, more in zip(rows, cells, strict=True)]
    is_stale = age_s is not None and age_s > STALE_AFTER_S
    stale = [f"stale: the monitor wrote this {age_s:.0f} s ago"] if is_stale else []
    words = [
        *_tiers(view),
        *_waiting(view),
        *_left_out(view),
        *_held(view),
        *_leaving(view),
        *_closing(view),
        *_throttled(view),
        *_gave_way(view),
        *_paused(view),
        *_readers(view),
        *moves_under_way(view),
        *_migrated(view),
        *stale,
    ]
    return "\n".join([table(rows), "", _summary(view), *words])


def _row(status: WorkerStatus) -> tuple[str, ...]:
    report = status.report
    phase = report.phase.value
    if report.phase is WorkerPhase.LOADING:
        phase = f"loading {report.progress_ratio:.0%}"
    liveness = status.liveness.value
    if status.incompatible:
        phase, liveness = "incompatible", f"protocol {status.incompatible}"
    elif status.liveness is not Liveness.ALIVE:
        liveness = f"{liveness} ({status.age_s:.0f} s)"
    return (
        report.worker_id,
        phase,
        liveness,
        report.model or "-",
        report.device or "-",
        f"{report.num_used_blocks}/{report.num_blocks} ({_share(report.num_used_blocks, report.num_blocks)})",
        str(report.num_running),
        str(report.num_waiting + report.num_preempted),
        f"{report.tokens_per_s:.1f}",
        str(report.num_steps),
    )


def _host_cells(report: WorkerReport) -> tuple[str, ...]:
    return (f"{report.num_used_host_blocks}/{report.num_host_blocks}" if report.num_host_blocks else "-",)


def _group_cells(report: WorkerReport) -> tuple[str, ...]:
    """Return group, place in its pipeline, layers held, and the last plan that was carried out there."""
    return (
        report.group or "-",
        f"{report.stage + 1} of {report.num_stages}" if report.group else "-",
        _layers(report),
        str(report.plan_id) if report.plan_id else "-",
    )


def _layers(report: WorkerReport) -> str:
    """Return the layers that are computed there, and how far others are that are loaded beside."""
    first, end = report.layers
    if end <= first:
        return "-"
    computed = f"{first} to {end - 1} of {report.num_layers}"
    if report.resident in ((0, 0), report.layers):
        return computed
    if report.loaded_ratio < 1:
        return f"{computed}, loading {math.floor(100 * report.loaded_ratio)}%"
    return f"{computed}, all loaded"


def _held(view: ClusterView) -> list[str]:
    return [f"held: {status.report.worker_id}: {status.report.held}" for status in view.workers if status.report.held]


def _leaving(view: ClusterView) -> list[str]:
    told = "told to stop; the planner restores its group first"
    return [f"leaving: {each.report.worker_id}: {told}" for each in view.workers if each.report.is_leaving]


def _closing(view: ClusterView) -> list[str]:
    whys = (each.report.migration.closing for each in view.workers)
    return [f"closing: {why}; it takes no new requests" for why in whys if why]


def _tiers(view: ClusterView) -> list[str]:
    """Return what each tier has at the workers; nothing while all is of the default one."""
    reports = [status.report for status in view.workers if status.liveness is Liveness.ALIVE]
    if not any(report.tiers for report in reports):
        return []
    lines, num_blocks = [], sum(report.num_blocks for report in reports)
    for tier in reversed(Tier):
        found = [each for report in reports for each in counts_by_tier(report) if each.tier == tier.label]
        running, waiting, used = (
            sum(getattr(each, f"num_{name}") for each in found) for name in ("running", "waiting", "used_blocks")
        )
        if running or waiting:
            blocks = f"{used} KV blocks ({_share(used, num_blocks)})"
            lines.append(f"{tier.label}: {running} running, {waiting} waiting at workers, {blocks}")
    return lines


def _waiting(view: ClusterView) -> list[str]:
    rows = [f"{each.num_requests} {each.tier} of {each.model}" for each in view.waiting]
    return [f"waiting in dispatchers: {', '.join(rows)}"] if rows else []


def _left_out(view: ClusterView) -> list[str]:
    what = f"{view.num_left_out} more workers report, for which the monitor has no room; raise its max_workers"
    return [f"left out: {what}"] if view.num_left_out else []


def _throttled(view: ClusterView) -> list[str]:
    return [
        f"throttled: {status.report.worker_id}: {status.throttled_reason}"
        for status in view.workers
        if status.throttled and status.liveness is Liveness.ALIVE
    ]


def _gave_way(view: ClusterView) -> list[str]:
    """Return who gave way, and what became of KV that did or was forgotten, of each worker where some was."""
    lines = []
    for report in (status.report for status in view.workers):
        back, again = report.num_brought_back_tokens_total, report.num_recomputed_tokens_total
        lost = f", {report.num_given_up_tokens_total} given up" if report.num_given_up_tokens_total else ""
        who = f"{report.num_preemptions_total} preemptions, " if report.num_preemptions_total else ""
        if who or back or again or lost:
            lines.append(
                f"left the device: {report.worker_id}: {who}{back} tokens brought back, {again} computed again{lost}"
            )
    return lines


def _paused(view: ClusterView) -> list[str]:
    """Return how often somebody sat on memory and did not move, of each worker where anybody did."""
    totals = [(status.report.worker_id, status.report.num_pauses_total) for status in view.workers]
    return [
        f"paused: {name}: {count} times a sequence kept its KV and sat out steps" for name, count in totals if count
    ]


def _readers(view: ClusterView) -> list[str]:
    """Return what readers have, of each worker where some read: their experience by now, and who is out of text."""
    lines = []
    for report in (status.report for status in view.workers if status.liveness is Liveness.ALIVE):
        if report.qoe is None:
            continue
        rows = report.slack_rows
        text = f"; {rows[0]} of {sum(rows)} that run are out of text" if sum(rows) else ""
        lines.append(f"readers: {report.worker_id}: QoE {report.qoe:.3f} by now{text}")
    return lines


def moves_under_way(view: ClusterView) -> list[str]:
    """Return a line for each thing that moves to a worker now."""
    return [
        f"{_MOVE_NAMES[move.kind]}: {status.report.worker_id}: {_progress(move)}"
        for status in view.workers
        for move in status.report.moves
        if status.liveness is not Liveness.DEAD
    ]


def _migrated(view: ClusterView) -> list[str]:
    """Return what became of running requests that were to come to a worker, of each where some were."""
    lines = []
    for report in (status.report for status in view.workers if status.report.migration.fetches_total):
        migration = report.migration
        counts: Counter[str] = Counter()
        for each in migration.fetches_total:
            counts[each.outcome] += each.count
        came, others = counts.pop(FetchOutcome.MOVED, 0), sum(counts.values())
        why = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        not_moved = f"; {others} did not ({why})" if others else ""
        kv = f"{describe_bytes(migration.num_bytes_total)} of KV, {migration.num_recomputed_total} computed again"
        kv += f", {migration.num_as_tokens_total} as tokens" if migration.num_as_tokens_total else ""
        lines.append(f"migrated: {report.worker_id}: {came} running requests came, {kv}{not_moved}")
    return lines


def _progress(move: TransferProgress) -> str:
    """Return how far something is that moves, how fast, how long it will take, and who waits."""
    left = move.num_bytes - move.num_moved_bytes
    done = move.num_moved_bytes / move.num_bytes if move.num_bytes else 1.0
    sources = f" from {', '.join(move.sources)}" if move.sources else ""
    parts = [
        f"{math.floor(100 * done)}% of {describe_bytes(move.num_bytes)}{sources}",
        f"{describe_bytes(move.bytes_per_s)}/s after {move.elapsed_s:.1f} s",
    ]
    if left and move.bytes_per_s:
        parts.append(f"{left / move.bytes_per_s:.1f} s left")
    if move.mode:
        parts.append(move.mode)
    if move.kind is TransferKind.KV_EXCHANGE:
        parts.append(f"{move.num_waiting} requests wait for theirs")
    return ", ".join(parts)


def _takes_requests(status: WorkerStatus) -> bool:
    """Return whether requests are placed on it: it is alive, ready, and alone or the leader of its group."""
    report = status.report
    is_ready = status.liveness is Liveness.ALIVE and report.phase is WorkerPhase.READY
    return is_ready and report.group in ("", report.worker_id)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _summary(view: ClusterView) -> str:
    usable = [status.report for status in view.workers if _takes_requests(status)]
    rate = sum(report.tokens_per_s for report in usable)
    running = sum(report.num_running for report in usable)
    return f"{len(usable)} of {len(view.workers)} workers can take requests; {running} running, {rate:.1f} tokens/s"
