"""What `/metrics` says of the cluster and of the bus: read when it is asked for, from the view and from counters."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Final

from services.dispatcher.session.sessions import Sessions
from services.dispatcher.session.standing import num_unread
from shared.api_keys import Tier
from shared.ids import WorkerId
from shared.messages.report import Liveness, WorkerPhase, WorkerReport, WorkerStatus, counts_by_tier
from shared.process.metrics import Counter, Metrics
from shared.transport.bus import Bus


class Growing:
    """A counter of ours for totals that somebody else counts, and may begin again from nothing."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._seen: dict[tuple[str, ...], int] = {}

    def follow(self, total: int, **labels: str) -> None:
        """Count what has come since the last look; a total that is smaller is that of a process started anew."""
        key = tuple(labels.values())
        before = self._seen.get(key, 0)
        self._counter.inc(total - before if total >= before else total, **labels)
        self._seen[key] = total


_WORKER: Final = ("model_name", "worker")


class ClusterMetrics:
    """The workers of this model, the requests of this dispatcher, and its connection to the broker."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._model = model
        self._declare_cluster(metrics)
        self._declare_own(metrics)

    def _declare_cluster(self, metrics: Metrics) -> None:
        gauge, counter, model = metrics.gauge, metrics.counter, ("model_name",)
        self._workers = gauge("sluice:workers", "Workers in the last view", (*model, "phase", "liveness"))
        of_view = "Seconds since the monitor's last view came; nothing before the first"
        self._view_age = gauge("sluice:view_age_seconds", of_view, model)
        of_restarts = "Times that another process of a worker came in place of one that had not stopped in order"
        self._restarts = Growing(counter("sluice:worker_restarts", of_restarts, _WORKER))
        self._running = gauge("vllm:num_requests_running", "Sequences that run on workers", model)
        self._waiting = gauge("vllm:num_requests_waiting", "Requests that wait, here or at workers", model)
        self._tier_requests = gauge("sluice:tier_requests", "Sequences of each tier", (*model, "tier", "state"))
        of_tier = "KV blocks that sequences of each tier hold; a block that several hold counts for each"
        self._tier_blocks = gauge("sluice:tier_kv_blocks", of_tier, (*model, "tier"))
        self._kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use", _WORKER)
        of_host = "KV blocks of host memory: those that are needed, and all"
        self._host_blocks = gauge("sluice:host_blocks", of_host, (*_WORKER, "state"))
        self._kv_bytes = gauge("sluice:kv_bytes", "Memory for KV, bytes", _WORKER)
        self._param_bytes = gauge("sluice:param_bytes", "Memory of parameters, bytes", (*_WORKER, "state"))
        moves = (*_WORKER, "kind")
        self._moves = {
            "left": gauge("sluice:move_left_bytes", "KV or parameters on their way to a worker, bytes", moves),
            "moved": gauge("sluice:move_moved_bytes", "Of the same move, what is there, bytes", moves),
            "rate": gauge("sluice:move_bytes_per_second", "Rate of the same move over the last second", moves),
            "waiting": gauge("sluice:move_waiting_requests", "Requests that wait for KV on its way", moves),
        }
        queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache", _WORKER)
        hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache", _WORKER)
        preemptions = counter("vllm:num_preemptions", "Sequences whose KV was taken away while they ran", _WORKER)
        self._queries, self._hits, self._preemptions = Growing(queries), Growing(hits), Growing(preemptions)
        pauses = "Times that a sequence kept its KV and was left out of steps that it could have been in"
        self._pauses = Growing(counter("sluice:pauses", pauses, _WORKER))
        of_fetches = "Running requests that were to come to a worker with their KV, by what came of it"
        self._fetches = Growing(counter("sluice:migration", of_fetches, (*_WORKER, "reason", "outcome")))
        migrated = {
            "bytes": "KV that has come to a worker with them, bytes",
            "as_tokens": "Requests that have come without KV, as a planner wanted it",
            "recomputed_tokens": "Tokens of requests that have come with KV, computed again",
            "recomputed": "Requests that have come with KV, more than two blocks of which were computed again",
        }
        self._migrated = {
            name: Growing(counter(f"sluice:migration_{name}", meaning, _WORKER)) for name, meaning in migrated.items()
        }
        of_preempted = "Tokens whose KV gave way, by what became of it"
        self._preempted = Growing(counter("sluice:preempted_tokens", of_preempted, (*_WORKER, "what")))

    def _declare_own(self, metrics: Metrics) -> None:
        gauge, counter, model = metrics.gauge, metrics.counter, ("model_name",)
        self._open = gauge("sluice:requests_open", "Requests of this dispatcher that run or wait", model)
        self._queued = gauge("sluice:requests_queued", "Of these, the ones for which no worker has room", model)
        unread = "Tokens that readers have and have not been shown yet, all together"
        self._unread = gauge("sluice:pacer_buffer_tokens", unread, model)
        self._bus = Growing(counter("sluice:bus", "Token traffic by what became of it", (*model, "what")))
        self._nats = {
            "reconnects": Growing(counter("sluice:nats_reconnects", "Connections to the broker made again", model)),
            "slow": Growing(counter("sluice:nats_slow_consumer", "Messages dropped before a full queue here", model)),
            "strays": Growing(counter("sluice:nats_strays", "Messages out of a stream, dropped unread", model)),
            "too_large": Growing(counter("sluice:nats_too_large", "Messages over the broker's limit, not sent", model)),
            "gaps": Growing(counter("sluice:nats_gaps", "Token messages of workers that never came", model)),
        }

    def read(self, sessions: Sessions, bus: Bus, now_s: float) -> None:
        """Look at everything once, at this time of the event loop's clock."""
        model, cluster = self._model, sessions.cluster
        reports = [status.report for status in cluster.statuses]
        self._read_workers(cluster.statuses, cluster.num_restarts)
        if cluster.view is not None:
            self._view_age.set(now_s - cluster.viewed_s, model_name=model)
        self._running.set(sum(report.num_running for report in reports), model_name=model)
        waiting = sum(report.num_waiting + report.num_preempted for report in reports)
        self._waiting.set(waiting + sessions.num_queued, model_name=model)
        for gauge in (self._kv_usage, self._host_blocks, self._kv_bytes, self._param_bytes, *self._moves.values()):
            gauge.clear()  # of a worker that is gone nothing is said
        for report in reports:
            self._read_worker(report)
        self._read_tiers(sessions, reports)
        self._open.set(len(sessions.table), model_name=model)
        self._queued.set(sessions.num_queued, model_name=model)
        self._unread.set(sum(num_unread(session, now_s) for session in sessions.table), model_name=model)
        self._read_bus(sessions, bus)

    def _read_workers(self, statuses: Sequence[WorkerStatus], num_restarts: Mapping[WorkerId, int]) -> None:
        """Count the workers, those of which there are none too, and how often each was another process."""
        counts = Tally((status.report.phase, status.liveness) for status in statuses)
        for phase, liveness in product(WorkerPhase, Liveness):
            labels = {"model_name": self._model, "phase": phase.value, "liveness": liveness.value}
            self._workers.set(counts[phase, liveness], **labels)
        for worker_id in {status.report.worker_id for status in statuses} | num_restarts.keys():
            self._restarts.follow(num_restarts.get(worker_id, 0), model_name=self._model, worker=worker_id)

    def _read_tiers(self, sessions: Sessions, reports: Sequence[WorkerReport]) -> None:
        """Say of every tier what it has, so that a series that a board shows never ends."""
        counts = [each for report in reports for each in counts_by_tier(report)]
        queued = {each.tier: each.num_requests for each in sessions.waiting()}
        for tier in (tier.label for tier in Tier):
            own = [each for each in counts if each.tier == tier]
            labels = {"model_name": self._model, "tier": tier}
            self._tier_requests.set(sum(each.num_running for each in own), state="running", **labels)
            self._tier_requests.set(sum(each.num_waiting for each in own), state="waiting", **labels)
            self._tier_requests.set(queued.get(tier, 0), state="queued", **labels)
            self._tier_blocks.set(sum(each.num_used_blocks for each in own), **labels)

    def _read_worker(self, report: WorkerReport) -> None:
        labels = {"model_name": self._model, "worker": report.worker_id}
        self._kv_usage.set(report.num_used_blocks / report.num_blocks if report.num_blocks else 0.0, **labels)
        self._host_blocks.set(report.num_used_host_blocks, state="used", **labels)
        self._host_blocks.set(report.num_host_blocks, state="all", **labels)
        self._kv_bytes.set(report.kv_bytes, **labels)
        self._param_bytes.set(report.param_bytes, state="resident", **labels)
        for move in report.moves:
            of_move = {**labels, "kind": move.kind.value}
            self._moves["left"].set(move.num_bytes - move.num_moved_bytes, **of_move)
            self._moves["moved"].set(move.num_moved_bytes, **of_move)
            self._moves["rate"].set(move.bytes_per_s, **of_move)
            self._moves["waiting"].set(move.num_waiting, **of_move)
        self._queries.follow(report.num_prefix_cache_queries_total, **labels)
        self._hits.follow(report.num_prefix_cache_hits_total, **labels)
        self._preemptions.follow(report.num_preemptions_total, **labels)
        self._pauses.follow(report.num_pauses_total, **labels)
        self._preempted.follow(report.num_recomputed_tokens_total, **labels, what="recomputed")
        self._preempted.follow(report.num_brought_back_tokens_total, **labels, what="brought_back")
        self._preempted.follow(report.num_given_up_tokens_total, **labels, what="given_up")

        migration = report.migration
        for each in migration.fetches_total:
            self._fetches.follow(each.count, **labels, reason=each.reason, outcome=each.outcome)
        self._migrated["bytes"].follow(migration.num_bytes_total, **labels)
        self._migrated["as_tokens"].follow(migration.num_as_tokens_total, **labels)
        self._migrated["recomputed_tokens"].follow(migration.num_recomputed_tokens_total, **labels)
        self._migrated["recomputed"].follow(migration.num_recomputed_total, **labels)

    def _read_bus(self, sessions: Sessions, bus: Bus) -> None:
        model, counters = self._model, sessions.table.counters
        for what, value in (
            ("messages", counters.num_batches),
            ("tokens", counters.num_tokens),
            ("ignored_rows", counters.num_ignored),
            ("lost_messages", counters.num_lost_messages),
            ("replays", sessions.replays.num_asked),
        ):
            self._bus.follow(value, model_name=model, what=what)
        self._nats["reconnects"].follow(bus.stats.reconnects, model_name=model)
        self._nats["slow"].follow(bus.stats.dropped_in, model_name=model)
        self._nats["strays"].follow(bus.stats.strays, model_name=model)
        self._nats["too_large"].follow(bus.stats.too_large, model_name=model)
        self._nats["gaps"].follow(counters.num_lost_messages, model_name=model)
