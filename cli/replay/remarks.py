"""What a person should know of a replay besides its figures. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cli.bench.report import lateness_p99_s, remarks_on_lateness
from cli.bench.stream import BenchRecord
from cli.replay.records import is_silent, num_short
from sim.experiment.records import Records


def remarks_on(outcomes: Sequence[BenchRecord], records: Records, beside: Sequence[BenchRecord] = ()) -> list[str]:
    """Return lines: what failed, and what makes the figures less than they seem.

    Args:
        outcomes: of the trace's requests.
        records: of these.
        beside: of best effort.
    """
    lines = _failures(outcomes, "failed") + _failures(beside, "best effort failed")
    if not all(outcome.is_counted for outcome in outcomes if outcome.end_s is not None and not outcome.failure):
        lines.append("the server gives no usage: each chunk of text counts as one token")
    if silent := sum(map(is_silent, outcomes)):
        lines.append(f"{silent} answers had no text: their tokens count as come at their ends")
    if short := num_short(outcomes, records):
        lines.append(f"{short} answers are shorter than the trace's: the server does not go on past its end tokens")
    return [*lines, *remarks_on_lateness(lateness_p99_s(outcomes))]


def _failures(outcomes: Sequence[BenchRecord], what: str) -> list[str]:
    failed = [outcome for outcome in outcomes if outcome.failure and not is_silent(outcome)]
    details = {outcome.failure: outcome.detail for outcome in reversed(failed)}
    return [
        f"{what}: {count} × {kind}" + (f": {details[kind]}" if details[kind] else "")
        for kind, count in Counter(outcome.failure for outcome in failed).most_common()
    ]
