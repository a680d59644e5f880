"""What the dispatcher counts: its own names (`sluice:`), and vLLM's, so that existing boards and scalers work."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Final

from services.dispatcher.cluster_metrics import ClusterMetrics, Growing
from services.dispatcher.http.doorway import Doorway
from services.dispatcher.session.gaps import BOUNDS_S, GapHistogram
from services.dispatcher.session.sessions import Sessions
from shared.process.metrics import CONTENT_TYPE, Metrics
from shared.transport.bus import Bus
from shared.version import VERSION

_LONG_S: Final = (0.1, 0.25, 0.5, 1, 2, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_STALLS_S: Final = (0.001, 0.01, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
_QOE: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
_TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_CHOICES: Final = (1, 2, 5, 10, 20, 50, 100, 200)
WHOLE: Final = ("stop", "length")
"""How a request ends that has its whole answer."""
_GAPS: Final = "vllm:inter_token_latency_seconds", "Gap between two tokens of an answer, seconds"
_MOVED_GAPS: Final = "sluice:migration_gap_seconds", "Gap of an answer whose request changed its worker with its KV"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One ended request, for metrics and the access log. Times in seconds; None if it never came so far."""

    request_id: str
    public_id: str
    """What the client was told (`x-request-id`), and what a refusal is logged under."""
    endpoint: str
    is_stream: bool
    tenant: str
    """Whose key it was; "" where no key is asked for."""
    tier: str
    """The one that was used."""
    finish: str
    """`stop`, `length`, `cancelled` (by the client), `slow_reader` (it did not read), or the code of an error."""
    worker: str
    attempts: int
    """Submissions to workers of its first choice, those that were refused included."""
    num_recoveries: int
    """How often it went on at another worker, all choices together."""
    num_preemptions: int
    """How often workers preempted it, all choices together."""
    num_choices: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    queue_s: float | None
    """Until a worker had accepted it."""
    prefill_s: float | None
    """From then to the first token."""
    ttft_s: float | None
    decode_s: float | None
    """From the first token to the last."""
    tpot_s: float | None
    is_late: bool | None
    """Whether the first token came after the time that the reader asked for; None if no reader follows it."""
    is_ttft_kept: bool | None
    """Whether every choice kept the TTFT that the request asks for (`slo`); None if it asks for none, was not admitted,
    or left before that was known. An answer that failed kept nothing."""
    is_tpot_kept: bool | None
    """The same of the TPOT."""
    e2e_s: float
    qoe: float | None
    stall_s: float | None
    """For how long its reader had no text, from the first token on; None like `qoe`."""


class DispatcherMetrics:
    """Every metric of this dispatcher, with the label `model_name`, and those of its process.

    Args:
        model: whose name the label has.
        system: named set of policies.
    """

    def __init__(self, model: str, system: str) -> None:
        self.metrics = Metrics()
        self.metrics.add_process()
        self._model = model
        self._declare_state(system)
        self._cluster = ClusterMetrics(self.metrics, model)
        self._declare_requests()
        self._declare_refusals()
        self._declare_times()
        self._declare_sizes()

    def _declare_state(self, system: str) -> None:
        gauge, model = self.metrics.gauge, ("model_name",)
        info = gauge("sluice:build_info", "1; what runs is in the labels", (*model, "version", "python", "system"))
        info.set(1, model_name=self._model, version=VERSION, python=platform.python_version(), system=system)
        self._ready = gauge("sluice:ready", "1 if new requests are served here, as /ready says; else 0", model)
        self._draining = gauge("sluice:draining", "1 while running requests finish and no new ones come; else 0", model)

    def _declare_requests(self) -> None:
        counter, model = self.metrics.counter, ("model_name",)
        self._success = counter("vllm:request_success", "Finished requests", (*model, "finished_reason"))
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of admitted requests", model)
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens of answers", model)
        self._requests = counter("sluice:requests", "Requests by endpoint and result", (*model, "endpoint", "finish"))
        self._tier = counter("sluice:tier_tokens", "Tokens by tier", (*model, "tier", "kind"))
        self._tenant = counter("sluice:tenant_tokens", "Tokens by tenant", (*model, "tenant", "kind"))
        self._recoveries = counter("sluice:recoveries", "Times that a request went on at another worker", model)
        deadline = (*model, "tier", "limit")
        self._kept = counter("sluice:deadline_kept", "Requests that kept a limit on their times", deadline)
        self._misses = counter("sluice:deadline_miss", "Requests that missed a limit on their times", deadline)
        self._prompt_tokens.inc(0, model_name=self._model)
        self._generation_tokens.inc(0, model_name=self._model)

    def _declare_refusals(self) -> None:
        counter, model = self.metrics.counter, ("model_name",)
        self._shed = counter("sluice:shed", "Refused requests", (*model, "reason", "tier"))
        self._denied = counter("sluice:denied", "Requests without a key that may ask this", (*model, "reason"))
        self._limited = counter("sluice:limited", "Requests over their tenant's limits", (*model, "tenant", "limit"))
        about = "Requests for answers of a form, by what came of it"
        self._guided = counter("sluice:guided_requests", about, (*model, "result"))
        slow = counter("sluice:slow_readers_cut", "Connections that were cut because nobody read", model)
        self._slow_readers = Growing(slow)
        self._connections = self.metrics.gauge("sluice:connections_open", "Open connections of clients", model)
        refused = counter("sluice:connections_refused", "Connections that were turned away, over a limit", model)
        self._refused_connections = Growing(refused)

    def _declare_times(self) -> None:
        histogram, model = self.metrics.histogram, ("model_name",)
        self._times = {
            "ttft_s": histogram("vllm:time_to_first_token_seconds", "Arrival to first token, seconds", model),
            "tpot_s": histogram(
                "vllm:request_time_per_output_token_seconds", "Mean time per further token, seconds", model
            ),
            "queue_s": histogram("vllm:request_queue_time_seconds", "Arrival to acceptance, seconds", model),
            "prefill_s": histogram("vllm:request_prefill_time_seconds", "Acceptance to first token, seconds", model),
            "decode_s": histogram(
                "vllm:request_decode_time_seconds", "First to last token, seconds", model, buckets=_LONG_S
            ),
        }
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to end, seconds", model, buckets=_LONG_S)
        self._qoe = histogram("sluice:qoe", "Estimated QoE of finished streams", model, buckets=_QOE)
        stalls = "Seconds that readers of finished streams were without text after the first token"
        self._stalls = histogram("sluice:stall_seconds", stalls, model, buckets=_STALLS_S)

    def _declare_sizes(self) -> None:
        histogram, model = self.metrics.histogram, ("model_name",)
        self._sizes = {
            "num_prompt_tokens": histogram("vllm:request_prompt_tokens", "Tokens of prompts", model, buckets=_TOKENS),
            "num_output_tokens": histogram(
                "vllm:request_generation_tokens", "Tokens of answers", model, buckets=_TOKENS
            ),
            "num_choices": histogram("vllm:request_params_n", "Choices of a request", model, buckets=_CHOICES),
        }

    def refused(self, reason: str, tier: str) -> None:
        """Count a request that was not admitted."""
        self._shed.inc(model_name=self._model, reason=reason, tier=tier)

    def denied(self, reason: str) -> None:
        """Count a request whose sender may not ask it."""
        self._denied.inc(model_name=self._model, reason=reason)

    def limited(self, tenant: str, limit: str) -> None:
        """Count a request that is over one of its tenant's limits."""
        self._limited.inc(model_name=self._model, tenant=tenant, limit=limit)

    def guided(self, result: str) -> None:
        """Count a request for an answer of a form: `accepted`, `coerced`, or the code of its refusal."""
        self._guided.inc(model_name=self._model, result=result)

    def ended(self, record: RequestRecord) -> None:
        """Count a request that has ended, admitted or not."""
        model = self._model
        self._requests.inc(model_name=model, endpoint=record.endpoint, finish=record.finish)
        self._count_tokens(record)
        if record.finish in WHOLE:
            self._success.inc(model_name=model, finished_reason=record.finish)
            self._e2e.observe(record.e2e_s, model_name=model)
            for name, sizes in self._sizes.items():
                sizes.observe(getattr(record, name), model_name=model)
        elif record.finish == "cancelled":
            self._success.inc(model_name=model, finished_reason="abort")
        if record.num_recoveries:
            self._recoveries.inc(record.num_recoveries, model_name=model)
        self._count_deadlines(record)
        if record.qoe is not None:
            self._qoe.observe(record.qoe, model_name=model)
        if record.stall_s is not None:
            self._stalls.observe(record.stall_s, model_name=model)
        for name, times in self._times.items():
            value = getattr(record, name)
            if value is not None:
                times.observe(value, model_name=model)

    def _count_deadlines(self, record: RequestRecord) -> None:
        is_begun_in_time = None if record.is_late is None else not record.is_late
        kept = {"reader": is_begun_in_time, "ttft": record.is_ttft_kept, "tpot": record.is_tpot_kept}
        for limit, is_kept in kept.items():
            if is_kept is not None:
                counter = self._kept if is_kept else self._misses
                counter.inc(model_name=self._model, tier=record.tier, limit=limit)

    def _count_tokens(self, record: RequestRecord) -> None:
        for counter, kind, count in (
            (self._prompt_tokens, "prompt", record.num_prompt_tokens),
            (self._generation_tokens, "generation", record.num_output_tokens),
        ):
            counter.inc(count, model_name=self._model)
            self._tier.inc(count, model_name=self._model, tier=record.tier, kind=kind)
            if record.tenant and count:
                self._tenant.inc(count, model_name=self._model, tenant=record.tenant, kind=kind)

    def render(
        self, sessions: Sessions, bus: Bus, doorway: Doorway, num_cut_readers: int, now_s: float, *, is_ready: bool
    ) -> tuple[bytes, str]:
        """Return what `/metrics` answers at this time of the event loop's clock: the text, and its content type."""
        self._ready.set(is_ready, model_name=self._model)
        self._draining.set(sessions.draining, model_name=self._model)
        self._cluster.read(sessions, bus, now_s)
        self._connections.set(doorway.num_open, model_name=self._model)
        self._refused_connections.follow(doorway.num_refused, model_name=self._model)
        self._slow_readers.follow(num_cut_readers, model_name=self._model)
        text, _ = self.metrics.render()
        gaps = _gap_lines(*_GAPS, sessions.table.gaps, self._model)
        return text + gaps + _gap_lines(*_MOVED_GAPS, sessions.recovery.gaps, self._model), CONTENT_TYPE


def _gap_lines(name: str, about: str, gaps: GapHistogram, model: str) -> bytes:
    """Return the histogram of gaps, which is counted outside of the library because it is counted per token."""
    cumulative, number, total_s = gaps.snapshot()
    escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    label = f'model_name="{escaped}"'
    lines = [f"# HELP {name} {about}", f"# TYPE {name} histogram"]
    for bound, count in zip((*(f"{float(bound)}" for bound in BOUNDS_S), "+Inf"), (*cumulative, number), strict=True):
        lines.append(f'{name}_bucket{{{label},le="{bound}"}} {count}')
    lines += [f"{name}_sum{{{label}}} {total_s}", f"{name}_count{{{label}}} {number}", ""]
    return "\n".join(lines).encode()
