"""What the dispatcher counts: its own names (`sluice:`), and vLLM's, so that existing boards and scalers work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.dispatcher.session.gaps import BOUNDS_S, GapHistogram
from services.dispatcher.session.sessions import Sessions
from shared.metrics import CONTENT_TYPE, Metrics

_LONG_S: Final = (0.1, 0.25, 0.5, 1, 2, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_QOE: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
_GAP_NAME: Final = "vllm:inter_token_latency_seconds"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One ended request, for metrics and the access log. Times in seconds; None if it never came so far."""

    request_id: str
    public_id: str
    """What the client was told (`x-request-id`), and what a refusal is logged under."""
    endpoint: str
    is_stream: bool
    tier: str
    finish: str
    """`stop`, `length`, `cancelled` (by the client), or the code of an error."""
    worker: str
    attempts: int
    num_choices: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    qoe: float | None


class DispatcherMetrics:
    """Every metric of this dispatcher, with the label `model_name`."""

    def __init__(self, model: str) -> None:
        self.metrics = Metrics()
        self._model = model
        self._declare_counters()
        self._declare_histograms()
        self._declare_gauges()

    def _declare_counters(self) -> None:
        counter, model = self.metrics.counter, ("model_name",)
        self._success = counter("vllm:request_success", "Finished requests", (*model, "finished_reason"))
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of admitted requests", model)
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens of answers", model)
        self._requests = counter("sluice:requests", "Requests by endpoint and result", (*model, "endpoint", "finish"))
        self._shed = counter("sluice:shed", "Refused requests", (*model, "reason", "tier"))
        self._bus = counter("sluice:bus", "Token traffic by what became of it", (*model, "what"))
        self._bus_counted: dict[str, int] = {}
        self._cache = {
            "queries": counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache", (*model, "worker")),
            "hits": counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache", (*model, "worker")),
        }
        self._cache_counted: dict[tuple[str, str], int] = {}
        self._prompt_tokens.inc(0, model_name=self._model)
        self._generation_tokens.inc(0, model_name=self._model)

    def _declare_histograms(self) -> None:
        histogram, model = self.metrics.histogram, ("model_name",)
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token, seconds", model)
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per further token, seconds", model
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to end, seconds", model, buckets=_LONG_S)
        self._queue = histogram("vllm:request_queue_time_seconds", "Arrival to acceptance by a worker, seconds", model)
        self._qoe = histogram("sluice:qoe", "Estimated QoE of finished streams", model, buckets=_QOE)

    def _declare_gauges(self) -> None:
        gauge, model = self.metrics.gauge, ("model_name",)
        self._running = gauge("vllm:num_requests_running", "Sequences that run on workers", model)
        self._waiting = gauge("vllm:num_requests_waiting", "Requests that wait, here or at workers", model)
        self._kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use", (*model, "worker"))
        self._open = gauge("sluice:requests_open", "Requests of this dispatcher that run or wait", model)
        self._queued = gauge("sluice:requests_queued", "Of these, the ones for which no worker has room", model)

    def refused(self, reason: str, tier: str) -> None:
        """Count a request that was not admitted."""
        self._shed.inc(model_name=self._model, reason=reason, tier=tier)

    def ended(self, record: RequestRecord) -> None:
        """Count a request that has ended, admitted or not."""
        model = self._model
        self._requests.inc(model_name=model, endpoint=record.endpoint, finish=record.finish)
        self._prompt_tokens.inc(record.num_prompt_tokens, model_name=model)
        self._generation_tokens.inc(record.num_output_tokens, model_name=model)
        if record.finish in ("stop", "length"):
            self._success.inc(model_name=model, finished_reason=record.finish)
            self._e2e.observe(record.e2e_s, model_name=model)
        elif record.finish == "cancelled":
            self._success.inc(model_name=model, finished_reason="abort")
        for histogram, value in (
            (self._ttft, record.ttft_s),
            (self._tpot, record.tpot_s),
            (self._queue, record.queue_s),
            (self._qoe, record.qoe),
        ):
            if value is not None:
                histogram.observe(value, model_name=model)

    def render(self, sessions: Sessions) -> tuple[bytes, str]:
        """Return what `/metrics` answers: the text, and its content type."""
        self._read(sessions)
        text, _ = self.metrics.render()
        return text + _gap_lines(sessions.table.gaps, self._model), CONTENT_TYPE

    def _read(self, sessions: Sessions) -> None:
        model = self._model
        reports = [status.report for status in sessions.cluster.statuses]
        self._running.set(sum(report.num_running for report in reports), model_name=model)
        waiting = sum(report.num_waiting + report.num_preempted for report in reports)
        self._waiting.set(waiting + sessions.num_queued, model_name=model)
        self._kv_usage.clear()  # a worker that is gone has no usage
        for report in reports:
            used = report.num_used_blocks / report.num_blocks if report.num_blocks else 0.0
            self._kv_usage.set(used, model_name=model, worker=report.worker_id)
            self._count_cache("queries", report.worker_id, report.num_prefix_cache_queries_total)
            self._count_cache("hits", report.worker_id, report.num_prefix_cache_hits_total)
        self._open.set(len(sessions.table), model_name=model)
        self._queued.set(sessions.num_queued, model_name=model)
        counters = sessions.table.counters
        for what, value in (
            ("messages", counters.num_batches),
            ("tokens", counters.num_tokens),
            ("ignored_rows", counters.num_ignored),
            ("lost_messages", counters.num_lost_messages),
            ("replays", sessions.num_replays),
        ):
            self._bus.inc(value - self._bus_counted.get(what, 0), model_name=model, what=what)
            self._bus_counted[what] = value

    def _count_cache(self, what: str, worker: str, total: int) -> None:
        """Count what has come since the last look; a total that is smaller is that of a worker started anew."""
        before = self._cache_counted.get((what, worker), 0)
        self._cache[what].inc(total - before if total >= before else total, model_name=self._model, worker=worker)
        self._cache_counted[what, worker] = total


def _gap_lines(gaps: GapHistogram, model: str) -> bytes:
    """Return the histogram of gaps, which is counted outside of the library because it is counted per token."""
    cumulative, number, total_s = gaps.snapshot()
    escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    label = f'model_name="{escaped}"'
    lines = [f"# HELP {_GAP_NAME} Gap between two tokens of an answer, seconds", f"# TYPE {_GAP_NAME} histogram"]
    for bound, count in zip((*(f"{float(bound)}" for bound in BOUNDS_S), "+Inf"), (*cumulative, number), strict=True):
        lines.append(f'{_GAP_NAME}_bucket{{{label},le="{bound}"}} {count}')
    lines += [f"{_GAP_NAME}_sum{{{label}}} {total_s}", f"{_GAP_NAME}_count{{{label}}} {number}", ""]
    return "\n".join(lines).encode()
