"""The tables of workers and of requests: their columns, and by what each can be sorted. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Generic

from cli.top.columns import Column, Row
from cli.top.figures import NONE, count, gib, quality, rate, seconds, share, slack
from shared.api_keys import Tier
from shared.messages.report import ClusterView, Liveness, WorkerPhase, WorkerReport, WorkerStatus
from shared.open_requests import OpenRequest, RequestState

SOON_S: Final = 1.0
"""A reader with text for less is nearly out of it."""
_CALM: Final = ("ready", "green")


@dataclass(frozen=True, slots=True)
class Order(Generic[Row]):
    """A way to sort a table."""

    title: str
    """Of the column by which it sorts."""
    key: Callable[[Row], tuple[float | str, ...]]
    """What should be seen first is least; no two rows that differ are equal."""


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker, with what its group says for it."""

    status: WorkerStatus
    used_ratio: float
    """Of its KV memory; a member's is that of its group's leader."""

    @property
    def report(self) -> WorkerReport:
        """What it says."""
        return self.status.report


def worker_rows(view: ClusterView) -> list[WorkerRow]:
    """Return a row for each worker of the view."""
    ratio: dict[str, float] = {
        each.report.worker_id: each.report.num_used_blocks / each.report.num_blocks
        for each in view.workers
        if each.report.num_blocks
    }
    names = ((each, each.report.worker_id, each.report.group) for each in view.workers)
    return [WorkerRow(each, ratio.get(own, ratio.get(leader, 0.0))) for each, own, leader in names]


def _state(row: WorkerRow) -> tuple[str, str]:
    """Return what a worker does, in a word or two, and its style."""
    status, report = row.status, row.report
    found = _CALM
    if status.incompatible:
        found = f"protocol {status.incompatible}", "red"
    elif status.liveness is not Liveness.ALIVE:
        word, style = ("dead", "red") if status.liveness is Liveness.DEAD else ("silent", "yellow")
        found = f"{word} {seconds(status.age_s)}", style
    elif report.phase is WorkerPhase.LOADING:
        found = f"load {report.progress_ratio:.0%}", "yellow"
    elif report.phase is not WorkerPhase.READY:
        found = report.phase.value, "yellow"
    elif report.held:
        found = "held", "yellow"
    elif report.is_leaving:
        found = "leaving", "yellow"
    elif report.migration.closing:
        found = "closing", "yellow"
    elif status.throttled:
        found = "throttled", "yellow"
    return found


def _kv(report: WorkerReport, used_ratio: float) -> str:
    """Return KV memory in GiB: used, and all."""
    return f"{gib(used_ratio * report.kv_bytes)}/{gib(report.kv_bytes)}"


def _tokens(report: WorkerReport) -> str:
    """Return KV memory in tokens: used, and all; a member of a group has none of its own."""
    if not report.num_blocks:
        return NONE
    return f"{count(report.num_used_blocks * report.block_size)}/{count(report.num_blocks * report.block_size)}"


def _late(report: WorkerReport) -> str:
    return str(report.slack_rows[0]) if report.slack_rows else NONE


def _group(report: WorkerReport) -> str:
    return f"{report.group} {report.stage + 1}/{report.num_stages}" if report.group else NONE


def _layers(report: WorkerReport) -> str:
    first, end = report.layers
    return f"{first}-{end - 1}" if report.group and end > first else NONE


def _used_style(row: WorkerRow) -> str:
    return "red" if row.used_ratio > 0.95 else "yellow" if row.used_ratio > 0.8 else ""


WORKER_COLUMNS: Final[tuple[Column[WorkerRow], ...]] = (
    Column("WORKER", lambda row: row.report.worker_id, 0, is_right=False),
    Column("STATE", lambda row: _state(row)[0], 1, least=9, is_right=False, style=lambda row: _state(row)[1]),
    Column("GROUP", lambda row: _group(row.report), 7, is_right=False),
    Column("LAYERS", lambda row: _layers(row.report), 12),
    Column("KV%", lambda row: f"{row.used_ratio:.0%}", 3, least=4, style=_used_style),
    Column("KV GIB", lambda row: _kv(row.report, row.used_ratio), 4, least=11),
    Column("KV TOKENS", lambda row: _tokens(row.report), 5, least=11),
    Column("PARAM", lambda row: gib(row.report.param_bytes), 10, least=5),
    Column(
        "HOST",
        lambda row: (
            share(row.report.num_used_host_blocks, row.report.num_host_blocks) if row.report.num_host_blocks else NONE
        ),
        11,
    ),
    Column("RUN", lambda row: str(row.report.num_running), 2, least=3),
    Column("WAIT", lambda row: str(row.report.num_waiting + row.report.num_preempted), 6),
    Column("TOK/S", lambda row: rate(row.report.tokens_per_s), 8, least=6),
    Column("QOE", lambda row: quality(row.report.qoe), 9, least=4),
    Column(
        "LATE",
        lambda row: _late(row.report),
        13,
        style=lambda row: "red" if row.report.slack_rows and row.report.slack_rows[0] else "",
    ),
    Column("STEP MS", lambda row: f"{1000 * row.report.step_time_s:.1f}", 14),
    Column("PREEMPTED", lambda row: count(row.report.num_preemptions_total), 16),
    Column("DEVICE", lambda row: row.report.device or NONE, 15, is_right=False),
    Column("SYSTEM", lambda row: row.report.system or NONE, 17, is_right=False),
)
"""PARAM is GiB of parameters, HOST the share of host memory for KV, LATE how many readers are out of text."""

WORKER_ORDERS: Final[tuple[Order[WorkerRow], ...]] = (
    Order("WORKER", lambda row: (row.report.worker_id,)),
    Order("KV%", lambda row: (-row.used_ratio, row.report.worker_id)),
    Order("RUN", lambda row: (-row.report.num_running, row.report.worker_id)),
    Order("TOK/S", lambda row: (-row.report.tokens_per_s, row.report.worker_id)),
    Order("QOE", lambda row: (inf if row.report.qoe is None else row.report.qoe, row.report.worker_id)),
)

_STATE_STYLES: Final = {RequestState.QUEUED: "yellow", RequestState.PREFILL: "cyan", RequestState.PAUSED: "yellow"}


def _slack_style(row: OpenRequest) -> str:
    if row.slack_s is None or row.slack_s >= SOON_S:
        return ""
    return "red" if row.slack_s < 0 else "yellow"


REQUEST_COLUMNS: Final[tuple[Column[OpenRequest], ...]] = (
    Column("REQUEST", lambda row: row.id, 0, is_right=False, shorten=lambda text: text.partition("-")[2] or text),
    Column("CHOICE", lambda row: str(row.choice) if row.choice else NONE, 11),
    Column("TENANT", lambda row: row.tenant or NONE, 9, is_right=False),
    Column("TIER", lambda row: row.tier, 5, least=8, is_right=False),
    Column("WORKER", lambda row: row.worker_id or NONE, 6, least=8, is_right=False),
    Column(
        "STATE",
        lambda row: row.state.value,
        3,
        least=9,
        is_right=False,
        style=lambda row: _STATE_STYLES.get(row.state, ""),
    ),
    Column("AGE", lambda row: seconds(row.age_s), 7, least=5),
    Column("IN", lambda row: count(row.num_prompt_tokens), 8, least=4),
    Column("OUT", lambda row: count(row.num_output_tokens), 4, least=4),
    Column("PREEMPTED", lambda row: str(row.num_preemptions) if row.num_preemptions else NONE, 10),
    Column("QOE", lambda row: quality(row.qoe), 2, least=4, style=lambda row: "red" if (row.qoe or 1) < 0.8 else ""),
    Column("SLACK", lambda row: NONE if row.slack_s is None else slack(row.slack_s), 1, least=7, style=_slack_style),
)
"""IN and OUT are tokens of the prompt, and of the answer so far."""


_TIERS: Final = {tier.label: -tier for tier in Tier}


def _since(row: OpenRequest) -> tuple[float, str, int]:
    """Return what stays as it is from one look to the next: who came first is first."""
    return -row.age_s, row.id, row.choice


REQUEST_ORDERS: Final[tuple[Order[OpenRequest], ...]] = (
    Order("SLACK", lambda row: (inf if row.slack_s is None else row.slack_s, *_since(row))),
    Order("QOE", lambda row: (inf if row.qoe is None else row.qoe, *_since(row))),
    Order("AGE", lambda row: _since(row)),
    Order("OUT", lambda row: (-row.num_output_tokens, *_since(row))),
    Order("TIER", lambda row: (_TIERS.get(row.tier, 0), *_since(row))),
)


def sorted_rows(rows: Sequence[Row], order: Order[Row], *, is_reversed: bool) -> list[Row]:
    """Return the rows in this order."""
    return sorted(rows, key=order.key, reverse=is_reversed)
