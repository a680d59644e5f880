"""What the worker tells the monitor: a report by period, and at once when its phase changes or requests lack memory.

Rates are exponential moving averages over the reports, so they need no work in the step.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from services.worker.cost.estimate import CostEstimate
from services.worker.engine.readers import ReadersNow
from services.worker.engine.stats import EngineStats
from services.worker.roles.resident import Resident
from services.worker.roles.role import Role
from shared.ids import Incarnation, WorkerId
from shared.messages.event import Event
from shared.messages.report import ElasticFacts, TransferProgress, WorkerPhase, WorkerReport
from shared.messages.report_parts import MigrationPart, PrefixSketch
from shared.process.log import get_logger
from shared.subjects import Subjects
from shared.transport.bus import Bus, BusError
from shared.wire import encode_json

RATE_HALF_LIFE_S = 2.0
"""Age at which a report counts half in the moving averages."""
MIN_SHORTAGE_GAP_S = 0.1
"""Between two reports that are sent because memory runs short."""
SKETCH_PERIOD_S = 2.0
"""Between two looks at what is cached: those of a thousand workers take a dispatcher some time to take in."""

_log = get_logger()


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What does not change while a worker serves."""

    model: str
    model_digest: str
    device: str
    kernels: str
    system: str
    max_model_len: int
    block_size: int
    max_sequences: int
    param_bytes: int = 0
    kv_bytes: int = 0
    reserve_bytes: int = 0
    memory_bytes: int = 0
    num_layers: int = 0
    stage_address: str = ""
    elastic: ElasticFacts | None = None


class Reporter:
    """Owns the phase, and the sequence number of the reports."""

    def __init__(
        self, worker_id: WorkerId, subjects: Subjects, bus: Bus, period_s: float, incarnation: Incarnation
    ) -> None:
        self.incarnation = incarnation
        self.pid, self.host = os.getpid(), socket.gethostname()
        """As reported; set by the simulator, whose processes are not this one."""
        self.worker_id = worker_id
        self._subject = subjects.report(worker_id)
        self._event_subject = subjects.event("worker", worker_id)
        self._bus = bus
        self._period_s = period_s
        self._wake = asyncio.Event()
        self._number = 0
        self._phase = WorkerPhase.LOADING
        self._progress = (0.0, "starting")
        self._facts: WorkerFacts | None = None
        self._look: Callable[[], EngineStats] | None = None
        self._rates = _Rates()
        self._role: Role | None = None
        self._resident: Callable[[], Resident] | None = None
        self._moves: Callable[[], tuple[TransferProgress, ...]] | None = None
        self._readers: Callable[[], ReadersNow] | None = None
        self._migration: Callable[[], MigrationPart] | None = None
        self._prefixes: Callable[[], PrefixSketch | None] = lambda: None
        self._sketch: PrefixSketch | None = None
        self._sketched_s = float("-inf")
        self._holds: Callable[[], str] = str
        self._told_held = self._is_leaving = False
        self._cost, self._num_lanes = CostEstimate(), 1
        self._is_short = False
        self._short_again_s = 0.0

    @property
    def phase(self) -> WorkerPhase:
        """Where the worker is in its life."""
        return self._phase

    def progress(self, ratio: float, text: str) -> None:
        """Say how far the loading is; sent with the next report."""
        self._progress = (min(1.0, max(0.0, ratio)), text[:200])

    def serve(self, facts: WorkerFacts, look: Callable[[], EngineStats]) -> None:
        """From now on the worker is ready and reports the engine's numbers."""
        self._facts = facts
        self._look = look
        self._progress = (1.0, "")
        self.enter(WorkerPhase.READY)

    def enter(self, phase: WorkerPhase) -> None:
        """Change the phase, and report at once."""
        self._phase, self._is_leaving = phase, False
        self._wake.set()

    def will_leave(self) -> None:
        """Say that the worker is told to stop, and waits until its group is restored: report at once."""
        self._is_leaving = True
        self._wake.set()

    def take_role(self, role: Role) -> None:
        """The worker holds other layers, or is in another group: report at once."""
        self._role = role
        self._wake.set()

    def watch_memory(self, look: Callable[[], Resident]) -> None:
        """Say with each report which layers' parameters are here, how far they are loaded, and what takes how much."""
        self._resident = look

    def watch_cost(self, cost: CostEstimate, num_lanes: int) -> None:
        """Say with each report what a token costs: in one of so many lanes."""
        self._cost, self._num_lanes = cost, num_lanes

    def watch_moves(self, look: Callable[[], tuple[TransferProgress, ...]]) -> None:
        """Say with each report what is on its way here."""
        self._moves = look

    def watch_readers(self, look: Callable[[], ReadersNow]) -> None:
        """Say with each report how much text readers have."""
        self._readers = look

    def watch_migration(self, look: Callable[[], MigrationPart]) -> None:
        """Say with each report which requests have changed their worker."""
        self._migration = look

    def watch_prefixes(self, look: Callable[[], PrefixSketch | None]) -> None:
        """Say with each report whose KV is here."""
        self._prefixes = look

    def watch_holds(self, look: Callable[[], str]) -> None:
        """Say with each report why the worker makes no steps; empty: it does."""
        self._holds = look

    def goes_on(self) -> None:
        """Steps are made again: report at once if anybody has heard otherwise."""
        if self._told_held and not self._holds():
            self._wake.set()

    def look(self, *, is_short: bool) -> None:
        """Take whether requests are queued for KV memory; when it begins, report at once (KunServe v2, section 4.1).

        One that comes and goes is reported by `MIN_SHORTAGE_GAP_S`: who asks at every step may.
        """
        if not is_short or self._is_short:
            self._is_short = is_short
            return
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._short_again_s:
            self._is_short, self._short_again_s = True, now_s + MIN_SHORTAGE_GAP_S
            self._wake.set()

    async def leave(self) -> None:
        """Say that the worker is gone, now and once: the last report."""
        self._phase = WorkerPhase.STOPPED
        await self.report()

    async def announce(self, name: str, reason: str) -> None:
        """Tell people what happened; nothing depends on it."""
        event = Event(name=name, service="worker", instance_id=self.worker_id, reason=reason)
        try:
            await self._bus.publish(self._event_subject, encode_json(event))
        except BusError as error:
            _log.warning("event_not_sent", event_name=name, error=str(error))

    async def run(self) -> None:
        """Report until cancelled, or until the worker has left."""
        while self._phase is not WorkerPhase.STOPPED:
            await self.report()
            self._wake.clear()
            try:
                async with asyncio.timeout(self._period_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def report(self) -> None:
        """Send one report now."""
        report = self.make_report(asyncio.get_running_loop().time())
        self._told_held = bool(report.held)
        self._number += 1
        try:
            await self._bus.publish(self._subject, encode_json(report))
        except BusError as error:
            _log.warning("report_not_sent", error=str(error))

    def make_report(self, now_s: float) -> WorkerReport:
        """Return the report of this moment."""
        base = WorkerReport(
            worker_id=self.worker_id,
            sequence_number=self._number,
            phase=self._phase,
            pid=self.pid,
            host=self.host,
            incarnation=self.incarnation,
            progress_ratio=self._progress[0],
            progress_text=self._progress[1],
        )
        if self._facts is None or self._look is None:
            return base
        stats = self._look()
        self._rates.update(now_s, stats)
        if now_s >= self._sketched_s + SKETCH_PERIOD_S:
            self._sketch, self._sketched_s = self._prefixes(), now_s
        numbers = {
            "num_blocks": stats.num_blocks,
            "num_used_blocks": stats.num_used_blocks,
            "num_demanded_blocks": stats.num_demanded_blocks,
            "num_uncomputed_blocks": stats.num_uncomputed_blocks,
            "num_head_blocks": stats.num_head_blocks,
            "num_queued_for_memory": stats.num_queued_for_memory,
            "num_slack_blocks": stats.num_slack_blocks,
            "num_slowed_blocks": stats.num_slowed_blocks,
            "num_slack_demanded_blocks": stats.num_slack_demanded_blocks,
            "max_waiting": stats.max_waiting,
            "best_effort": stats.best_effort,
            "num_coming_blocks": stats.num_coming_blocks,
            "num_host_blocks": stats.num_host_blocks,
            "num_used_host_blocks": stats.num_used_host_blocks,
            "held": self._holds(),
            "is_leaving": self._is_leaving,
            "num_running": stats.num_running,
            "num_runnable": stats.num_runnable,
            "num_waiting": stats.num_waiting,
            "num_preempted": stats.num_preempted,
            "tiers": stats.tiers,
            "num_steps": stats.totals.num_steps,
            "num_preemptions_total": stats.totals.num_preemptions,
            "num_pauses_total": stats.totals.num_pauses,
            "num_recomputed_tokens_total": stats.totals.num_recomputed_tokens,
            "num_brought_back_tokens_total": stats.totals.num_brought_back_tokens,
            "num_given_up_tokens_total": stats.totals.num_given_up_tokens,
            "num_prompt_tokens_total": stats.totals.num_prompt_tokens,
            "num_generated_tokens_total": stats.totals.num_generated_tokens,
            "num_finished_total": stats.totals.num_finished,
            "num_prefix_cache_queries_total": stats.totals.num_prefix_cache_queries,
            "num_prefix_cache_hits_total": stats.totals.num_prefix_cache_hits,
            "token_s": self._cost.token_s / self._num_lanes,
            "decode_cost": self._cost.decode_cost,
            "step_time_s": self._rates.step_time_s,
            "tokens_per_s": self._rates.tokens_per_s,
            "prefixes": self._sketch,
        }
        facts = {field.name: getattr(self._facts, field.name) for field in fields(self._facts)}
        return base.model_copy(update={**facts, **numbers, **_place(self._role), **self._looks()})

    def _looks(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._resident is not None:
            here = self._resident()
            found |= {"resident": (here.layers.first, here.layers.end), "loaded_ratio": here.loaded_ratio}
            sizes = {"param_bytes": here.param_bytes, "kv_bytes": here.kv_bytes}
            found |= {name: size for name, size in sizes.items() if size is not None}
        if self._moves is not None:
            found["moves"] = self._moves()
        if self._migration is not None:
            found["migration"] = self._migration()
        if self._readers is not None:
            readers = self._readers()
            found |= {"slack_rows": readers.slack_rows, "slack_blocks": readers.slack_blocks, "qoe": readers.qoe}
        return found


def _place(role: Role | None) -> dict[str, Any]:
    if role is None:
        return {}
    return {
        "layers": (role.layers.first, role.layers.end),
        "group": role.group,
        "stage": role.stage,
        "num_stages": role.num_stages,
        "plan_id": role.plan_id,
    }


class _Rates:
    """Moving averages of step time and token rate, from the engine's running totals."""

    def __init__(self) -> None:
        self.step_time_s = 0.0
        self.tokens_per_s = 0.0
        self._last: tuple[float, int, int, float] | None = None

    def update(self, now_s: float, stats: EngineStats) -> None:
        present = (now_s, stats.totals.num_steps, stats.totals.num_generated_tokens, stats.totals.busy_s)
        if self._last is not None and now_s > self._last[0]:
            elapsed_s, steps, tokens, busy_s = (new - old for new, old in zip(present, self._last, strict=True))
            weight = 1 - 0.5 ** (elapsed_s / RATE_HALF_LIFE_S)
            self.tokens_per_s += weight * (tokens / elapsed_s - self.tokens_per_s)
            if steps:
                self.step_time_s += weight * (busy_s / steps - self.step_time_s) if self.step_time_s else busy_s / steps
        if self._last is None or now_s > self._last[0]:
            self._last = present
