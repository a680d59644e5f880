"""Refuses reports whose numbers cannot be true, so that one broken worker does not bend the picture of the cluster.

Types, signs of a few fields and finiteness are checked when the message is decoded; here is what depends on several
fields or on what a machine can be.
"""

from __future__ import annotations

from operator import attrgetter

from shared.messages.base import MAX_EPOCH
from shared.messages.report import DispatcherReport, ElasticFacts, WorkerReport

MAX_COUNT = 10**9
"""No worker holds, or waits for, more sequences, blocks or tokens of context than this."""
MAX_BYTES = 2**50
"""1 PiB: more than one device or host has."""
MAX_TOTAL = 2**53
"""Totals stay exact in JSON readers that use doubles."""
MAX_STEP_TIME_S = 3600.0
MAX_TOKENS_PER_S = 1e9
MAX_LINK_BYTES_PER_S = 1e13
MAX_TEXT_CHARS = 512
MAX_LAYERS = 512
"""No model has more; a planner's tables grow with the square."""

_COUNTS = (
    "max_model_len",
    "block_size",
    "num_blocks",
    "num_used_blocks",
    "num_demanded_blocks",
    "num_uncomputed_blocks",
    "num_head_blocks",
    "num_queued_for_memory",
    "num_slack_blocks",
    "num_slowed_blocks",
    "num_slack_demanded_blocks",
    "num_coming_blocks",
    "num_host_blocks",
    "num_used_host_blocks",
    "num_layers",
    "stage",
    "num_stages",
    "num_running",
    "num_runnable",
    "num_waiting",
    "num_preempted",
    "max_sequences",
    "max_waiting",
)
_BYTES = ("param_bytes", "kv_bytes", "reserve_bytes", "memory_bytes")
_TOTALS = (
    "sequence_number",
    "pid",
    "num_steps",
    "num_preemptions_total",
    "num_pauses_total",
    "num_recomputed_tokens_total",
    "num_brought_back_tokens_total",
    "num_given_up_tokens_total",
    "num_prompt_tokens_total",
    "num_generated_tokens_total",
    "num_finished_total",
    "num_prefix_cache_queries_total",
    "num_prefix_cache_hits_total",
)
_RATES = {"token_s": MAX_STEP_TIME_S, "step_time_s": MAX_STEP_TIME_S, "tokens_per_s": MAX_TOKENS_PER_S}
_TEXTS = ("host", "model", "model_digest", "device", "kernels", "system", "progress_text", "group", "stage_address")
_ELASTIC_BYTES = ("outer_bytes", "first_stage_end", "last_stage_begin", "block_bytes", "page_bytes")
_LIMITS: dict[str, float] = (
    dict.fromkeys(_COUNTS, MAX_COUNT)
    | dict.fromkeys(_BYTES, MAX_BYTES)
    | dict.fromkeys(_TOTALS, MAX_TOTAL)
    | _RATES
    | {"plan_id": MAX_EPOCH, "migration.bytes_per_s": MAX_LINK_BYTES_PER_S, "migration.seconds_total": MAX_TOTAL}
)


_limited = attrgetter(*_LIMITS)  # thousands of reports a second come by


def find_absurdity(report: WorkerReport) -> str | None:
    """Return what cannot be true in this report, in words, or None."""
    for (name, limit), value in zip(_LIMITS.items(), _limited(report), strict=True):
        if not 0 <= value <= limit:
            return f"{name} is {value}, outside 0 to {limit:g}"
    for name in _TEXTS:
        if len(getattr(report, name)) > MAX_TEXT_CHARS:
            return f"{name} has more than {MAX_TEXT_CHARS} characters"
    shares = (
        ("num_used_blocks", report.num_used_blocks, report.num_blocks),
        ("best_effort.num_used_blocks", report.best_effort.num_used_blocks, report.num_used_blocks),
        ("num_used_host_blocks", report.num_used_host_blocks, report.num_host_blocks),
    )
    for name, part, total in shares:
        if part > total:
            return f"{name} is {part}, of {total} in all"
    for move in report.moves:
        if not move.num_moved_bytes <= move.num_bytes <= MAX_BYTES:
            return f"{move.num_moved_bytes} bytes of {move.num_bytes} have moved"
    absurdity = _find_absurd_layers(report) or _find_absurd_tiers(report)
    if absurdity is not None or report.elastic is None:
        return absurdity
    return _find_absurd_memory(report.elastic)


def find_absurd_waiting(report: DispatcherReport) -> str | None:
    """Return what cannot be true in what a dispatcher says of its queue, in words, or None."""
    for each in report.waiting:
        if each.num_requests > MAX_COUNT or each.num_tokens > MAX_TOTAL:
            return f"{each.num_requests} requests wait for {each.num_tokens} tokens"
    names = [(each.model, each.tier) for each in report.waiting]
    return None if len(set(names)) == len(names) else "it names a tier twice"


def _find_absurd_layers(report: WorkerReport) -> str | None:
    """Return why the layers whose parameters have memory cannot be so: the own ones are among them."""
    (first, end), (own_first, own_end) = report.resident, report.layers
    if report.resident == (0, 0):
        return None
    num_layers = report.num_layers or MAX_LAYERS
    if first >= end or not 0 <= first <= own_first <= own_end <= end <= num_layers:
        return f"resident is {report.resident}, beside layers {report.layers} of {report.num_layers}"
    return None


def _find_absurd_tiers(report: WorkerReport) -> str | None:
    """Return why the counts by tier cannot be so: together they are those of all."""
    if not report.tiers:
        return None
    if len({each.tier for each in report.tiers}) < len(report.tiers):
        return "it names a tier twice"
    parked = report.num_waiting + report.num_preempted
    for name, number in (("num_running", report.num_running), ("num_waiting", parked)):
        if sum(getattr(each, name) for each in report.tiers) != number:
            return f"{name} of all tiers together is not {number}"
    return "a tier holds too many blocks" if any(each.num_used_blocks > MAX_COUNT for each in report.tiers) else None


def _find_absurd_memory(elastic: ElasticFacts) -> str | None:
    if not 1 <= len(elastic.layer_bytes) <= MAX_LAYERS:
        return f"the model has {len(elastic.layer_bytes)} layers, outside 1 to {MAX_LAYERS}"
    sizes = [getattr(elastic, name) for name in _ELASTIC_BYTES]
    if not all(0 <= size <= MAX_BYTES for size in (*elastic.layer_bytes, *sizes)):
        return f"a size of its model is outside 0 to {MAX_BYTES}"
    if not (1 <= elastic.num_pages <= MAX_BYTES // max(elastic.page_bytes, 1) and 0 <= elastic.max_blocks <= MAX_COUNT):
        return f"its memory has {elastic.num_pages} pages and up to {elastic.max_blocks} blocks"
    if not 0 <= elastic.link_bytes_per_s <= MAX_BYTES:
        return f"its link has {elastic.link_bytes_per_s:g} bytes/s, outside 0 to {MAX_BYTES}"
    return None
