"""One frame of `sluice top`: what was seen and what was chosen in, lines out. Pure: no clock, no terminal.

title, and how old it is                    a line about what is wrong, if something is
workers, memory, readers, queue, groups, moves
table of workers
table of readers                            both are cut to the height; the one that was chosen has more of it
keys
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from cli.status import STALE_AFTER_S, moves_under_way
from cli.top.columns import draw_table
from cli.top.controls import Controls
from cli.top.figures import count, gib, quality, rate, seconds, share
from cli.top.look import Look
from cli.top.tables import (
    REQUEST_COLUMNS,
    REQUEST_ORDERS,
    WORKER_COLUMNS,
    WORKER_ORDERS,
    WorkerRow,
    sorted_rows,
    worker_rows,
)
from cli.top.text import Line, Span, clean, cut_line, join_parts, pad, width_of
from shared.api_keys import Tier
from shared.messages.fetch import FetchOutcome
from shared.messages.report import ClusterView, Liveness, WaitingRequests, WorkerPhase, counts_by_tier
from shared.open_requests import OpenRequests, RequestState

MAX_MOVES: Final = 3
"""That have a line each."""
_LABEL: Final = 10
_BAR: Final = 8, 40
"""Cells of the bar of memory, at least and at most."""
_BAR_AT: Final = 80
"""Width of everything beside it, as far as it is wider than at least."""
_MIN_OTHER: Final = 3
"""Lines of the table that was not chosen."""
Parts = list[list[Span]]


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known at one moment."""

    url: str
    last: Look
    """The newest look that came to something."""
    age_s: float = 0.0
    """Since then."""
    trouble: str = ""
    """Why the one after it did not; empty: it did, or there is none yet."""
    interval_s: float = 1.0
    """Between two looks."""

    @property
    def data_age_s(self) -> float:
        """Age of what is shown of the workers."""
        return self.age_s + (self.last.view_age_s if self.last.view is not None else 0.0)

    @property
    def is_stale(self) -> bool:
        """Whether it is older than it should be."""
        return self.data_age_s > STALE_AFTER_S + self.interval_s


def render(seen: Seen, controls: Controls, width: int, height: int, *, has_keys: bool = True) -> list[Line]:
    """Return the frame: at most `height` lines of at most `width` cells, the keys in the last one.

    Args:
        seen: to be shown.
        controls: what was chosen.
        width: of the terminal, in cells.
        height: of the terminal, in lines.
        has_keys: somebody can press some; if not, nothing is said of them.
    """
    head = [_title(seen, width), *_wrong(seen, width)]
    keys = [_keys(seen, controls, width)] if has_keys else []
    left = height - len(head) - len(keys)
    body = [*_summary(seen.last, width), ()]
    body += _tables(seen.last, controls, width, left - len(body))
    if seen.trouble or seen.is_stale:
        body = [tuple(Span(span.text, "dim") for span in line) for line in body]
    lines = [*head, *body[: max(left, 0)]]
    lines += [()] * (left - len(body) if has_keys else 0)
    return [*lines[: max(height - len(keys), 0)], *keys][: max(height, 0)]


def _title(seen: Seen, width: int) -> Line:
    """Return what is looked at, and, at the right, how old it is."""
    if seen.trouble:
        state, style = f"disconnected, last data {seconds(seen.data_age_s)} ago", "red"
    elif seen.is_stale:
        state, style = f"stale, last data {seconds(seen.data_age_s)} ago", "yellow"
    elif seen.last.view is None:
        state, style = "loading", "yellow"
    else:
        state, style = "live", "green"
    name = seen.url.removeprefix("http://")
    left = cut_line([Span("sluice top", "bold"), Span(f"  {clean(seen.last.model)}  {clean(name)}")], width)
    room = width - sum(width_of(span.text) for span in left) - 2
    if room < width_of(state):
        left, room = cut_line(left, max(width - width_of(state) - 2, 0)), width_of(state)
    return cut_line([*left, Span("  "), Span(pad(state, room, is_right=True), style)], width)


def _wrong(seen: Seen, width: int) -> list[Line]:
    """Return a line about what is wrong, if something is."""
    view = seen.last.view
    if seen.trouble:
        text, style = f"trying again every {seen.interval_s:g} s: {clean(seen.trouble)}", "red"
    elif view is None:
        text, style = "the monitor has written no view yet; workers are shown once they report", "yellow"
    elif seen.is_stale:
        text, style = "the monitor is silent: what is shown of the workers is old", "yellow"
    elif not view.workers:
        text, style = "no worker reports to this cluster; start one with `sluice up`", "yellow"
    elif view.num_left_out:
        text, style = f"the monitor has no room for {view.num_left_out} more workers; raise its max_workers", "yellow"
    else:
        return []
    return [cut_line([Span(text, style)], width)]


def _summary(last: Look, width: int) -> list[Line]:
    view = last.view if last.view is not None else ClusterView(sequence_number=0)
    rows = worker_rows(view)
    return [
        _line("workers", _workers(rows), width),
        _line("memory", _memory(rows, width), width),
        _line("requests", _requests(view, last.requests), width),
        _line("queue", _queue(view, last.requests), width),
        _line("groups", _groups(view), width),
        *_moves(view, width),
    ]


def _line(label: str, parts: Parts, width: int) -> Line:
    return join_parts(Span(f"{label:<{_LABEL}}", "dim"), parts, width)


def _workers(rows: Sequence[WorkerRow]) -> Parts:
    alive = [row.report for row in rows if row.status.liveness is Liveness.ALIVE]
    num_ready = sum(report.phase is WorkerPhase.READY for report in alive)
    parts: Parts = [
        [Span(f"{num_ready} of {len(rows)} ready", "green" if num_ready == len(rows) else "yellow")],
        [Span(f"{count(sum(report.num_running for report in alive))} running")],
        [Span(f"{count(sum(report.num_waiting + report.num_preempted for report in alive))} waiting")],
        [Span(f"{rate(sum(report.tokens_per_s for report in alive))} tokens/s")],
    ]
    dead = sum(row.status.liveness is Liveness.DEAD for row in rows)
    throttled = sum(row.status.throttled and row.status.liveness is Liveness.ALIVE for row in rows)
    words = ((dead, "dead", "red"), (throttled, "short of memory", "yellow"))
    return [*parts, *([Span(f"{number} {word}", style)] for number, word, style in words if number)]


def _memory(rows: Sequence[WorkerRow], width: int) -> Parts:
    """Return KV memory of the workers that live, as a bar, in GiB and in tokens, and that of parameters."""
    alive = [row for row in rows if row.status.liveness is Liveness.ALIVE]
    all_bytes, used_bytes = (
        sum(row.report.kv_bytes * ratio(row) for row in alive) for ratio in (lambda _: 1.0, lambda row: row.used_ratio)
    )
    tokens, used = (
        sum(getattr(row.report, name) * row.report.block_size for row in alive)
        for name in ("num_blocks", "num_used_blocks")
    )
    parts: Parts = [
        [Span(f"{gib(used_bytes)}/{gib(all_bytes)} GiB")],
        [Span(f"{count(used)}/{count(tokens)} tokens")],
        [Span(f"params {gib(sum(row.report.param_bytes for row in alive))} GiB")],
    ]
    size = min(max(width - _BAR_AT, _BAR[0]), _BAR[1])
    filled = min(ceil(size * used / tokens), size) if tokens else 0
    style = "red" if filled > 0.95 * size else "yellow" if filled > 0.8 * size else "green"
    bar = [Span("KV ["), Span("|" * filled, style), Span(f"{' ' * (size - filled)}] {share(used, tokens):>4}")]
    return [bar, *parts]


def _requests(view: ClusterView, requests: OpenRequests | None) -> Parts:
    """Return how many requests there are by their state, and what their readers have, at all workers."""
    parts: Parts = []
    if requests is None:
        parts.append([Span("this server lists no requests", "yellow")])
    else:
        number = {state: sum(getattr(each, state.value) for each in requests.counts) for state in RequestState}
        words = ", ".join(f"{count(number[state])} {state.value}" for state in RequestState if number[state])
        parts.append([Span(f"{count(sum(number.values()))}{f': {words}' if words else ''}")])
        if requests.num_late:
            parts.append([Span(f"out of text: {count(requests.num_late)}", "red")])
    known = [
        (each.report.qoe, max(each.report.num_running + each.report.num_waiting + each.report.num_preempted, 1))
        for each in view.workers
        if each.liveness is Liveness.ALIVE and each.report.qoe is not None
    ]
    if known:
        mean = sum(qoe * weight for qoe, weight in known) / sum(weight for _, weight in known)
        parts.append([Span(f"QoE {quality(mean)}", "red" if mean < 0.8 else "")])
    return parts if requests is None else [*parts, [Span(f"at {clean(requests.dispatcher_id)}", "dim")]]


def _queue(view: ClusterView, requests: OpenRequests | None) -> Parts:
    """Return what waits in dispatchers, and at workers, by tier.

    The view knows all dispatchers, and the one that is asked knows its own queue sooner.
    """
    own = requests.waiting if requests is not None else ()
    parts: Parts = []
    reports = [each.report for each in view.workers if each.liveness is Liveness.ALIVE]
    for tier in reversed(Tier):
        number, num_tokens = max(_waiting(view.waiting, tier), _waiting(own, tier))
        at_workers = sum(
            each.num_waiting for report in reports for each in counts_by_tier(report) if each.tier == tier.label
        )
        tokens = f" ({count(num_tokens)} tok)" if number else ""
        more = f" + {count(at_workers)} at workers" if at_workers else ""
        parts.append([Span(f"{tier.label} {count(number)}{tokens}{more}", "yellow" if number else "")])
    return parts


def _waiting(rows: Sequence[WaitingRequests], tier: Tier) -> tuple[int, int]:
    """Return how many requests of a tier wait, and their tokens."""
    found = [each for each in rows if each.tier == tier.label]
    return sum(each.num_requests for each in found), sum(each.num_tokens for each in found)


def _groups(view: ClusterView) -> Parts:
    """Return who serves together, stage by stage, and by which plan."""
    members: dict[str, list[tuple[int, str, int]]] = defaultdict(list)
    for each in view.workers:
        if each.report.group:
            members[each.report.group].append((each.report.stage, each.report.worker_id, each.report.plan_id))
    if not members:
        return [[Span("none: every worker has the whole model")]] if view.workers else [[Span("none")]]
    parts: Parts = []
    for found in (sorted(members[leader]) for leader in sorted(members)):
        plan = max(plan_id for _, _, plan_id in found)
        parts.append([Span(f"{clean(' + '.join(name for _, name, _ in found))} (plan {plan})", "cyan")])
    return parts


def _moves(view: ClusterView, width: int) -> list[Line]:
    """Return a line for each of the first moves under way, and what has moved and given way since workers started."""
    words: Counter[str] = Counter()
    for report in (each.report for each in view.workers):
        fetches = report.migration.fetches_total
        words["migrated"] += sum(each.count for each in fetches if each.outcome == FetchOutcome.MOVED)
        words["preempted"] += report.num_preemptions_total
        words["pauses"] += report.num_pauses_total
    so_far: Parts = [[Span(f"so far: {', '.join(f'{count(number)} {word}' for word, number in words.items())}")]]
    found = [clean(text) for text in moves_under_way(view)]
    more = f"  and {len(found) - MAX_MOVES} more" if len(found) > MAX_MOVES else ""
    if not found:
        return [_line("moves", [[Span("none now")], *(so_far if view.workers else [])], width)]
    lines = [_line("" if number else "moves", [[Span(text, "cyan")]], width) for number, text in enumerate(found[:3])]
    return [*lines, _line("", [[Span(f"{so_far[0][0].text}{more}")]], width)]


def _tables(last: Look, controls: Controls, width: int, room: int) -> list[Line]:
    """Return both tables and a line between them; the chosen one first takes what it needs of the room."""
    workers = worker_rows(last.view) if last.view is not None else []
    readers = list(last.requests.requests) if last.requests is not None else []
    needs = {True: 1 + max(len(workers), 1), False: 1 + max(len(readers), 1)}
    other = min(needs[not controls.on_workers], max(room // 3, _MIN_OTHER))
    first = min(needs[controls.on_workers], max(room - 1 - other, 0))
    lines = {controls.on_workers: first, not controls.on_workers: max(room - 1 - first, 0)}
    return [
        *_worker_table(workers, controls, width, lines[True]),
        (),
        *_request_table(last, controls, width, lines[False]),
    ]


def _worker_table(rows: Sequence[WorkerRow], controls: Controls, width: int, room: int) -> list[Line]:
    order = WORKER_ORDERS[controls.worker_order]
    is_reversed = controls.is_reversed and controls.on_workers
    shown = sorted_rows(rows, order, is_reversed=is_reversed)[: max(room - 1, 0)]
    lines = draw_table(WORKER_COLUMNS, shown, width, order.title, len(rows))
    if not rows:
        lines.append(cut_line([Span("no worker reports", "dim")], width))
    return lines[: max(room, 0)]


def _request_table(last: Look, controls: Controls, width: int, room: int) -> list[Line]:
    order, rows = REQUEST_ORDERS[controls.request_order], last.requests.requests if last.requests is not None else ()
    is_reversed = controls.is_reversed and not controls.on_workers
    shown = sorted_rows(rows, order, is_reversed=is_reversed)[: max(room - 1, 0)]
    num_all = len(rows) + (last.requests.num_left_out if last.requests is not None else 0)
    lines = draw_table(REQUEST_COLUMNS, shown, width, order.title, num_all)
    if not rows:
        lines.append(cut_line([Span("nobody is served now", "dim")], width))
    return lines[: max(room, 0)]


def _keys(seen: Seen, controls: Controls, width: int) -> Line:
    """Return what can be pressed, and what it does now."""
    order = WORKER_ORDERS[controls.worker_order] if controls.on_workers else REQUEST_ORDERS[controls.request_order]
    table, other = ("workers", "requests") if controls.on_workers else ("requests", "workers")
    way = ", reversed" if controls.is_reversed else ""
    text = f"q quit   s sort {table}: {order.title.lower()}{way}   r reverse   tab {other}"
    every = f"every {seen.interval_s:g} s"
    room = width - width_of(text) - width_of(every)
    return cut_line([Span(text + (" " * room + every if room > 2 else ""), "dim")], width)
