"""From what a client saw of its answers to the records that a summary takes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cli.bench.stream import EMPTY, BenchRecord
from cli.bench.workload import Planned
from sim.experiment.records import Recorder, Records
from sim.workload.workload import Workload


def records_of(
    workload: Workload,
    outcomes: Sequence[BenchRecord],
    beside: Sequence[BenchRecord] = (),
    requests: Sequence[Planned] = (),
) -> Records:
    """Return the records of the requests that were sent; a request arrives when its client sends it.

    Tokens without text (control tokens, as a model may say them when it has to go on past its end) come with the next
    text, and if none comes with the end of the answer.

    Args:
        workload: what was planned.
        outcomes: of its first requests, in order; further ones were not sent, and are left out.
        beside: of best effort; number i asked for `requests[i % len(requests)]`.
        requests: see there.
    """
    recorder = Recorder(workload)
    arrival_s = np.full(len(workload), np.nan)
    for outcome in outcomes:
        arrival_s[outcome.index] = outcome.sent_s
        _note(recorder, outcome.index, outcome)
    for outcome in beside:
        asked = requests[outcome.index % len(requests)]
        num_prompt = asked.num_input if outcome.num_input is None else outcome.num_input
        _note(recorder, recorder.add(outcome.sent_s, num_prompt, asked.num_output), outcome)
    return recorder.records(arrival_s)


def _note(recorder: Recorder, index: int, outcome: BenchRecord) -> None:
    for at_s, count in outcome.deliveries:
        recorder.tokens(index, at_s, count)
    if outcome.end_s is not None and is_silent(outcome):
        recorder.tokens(index, outcome.end_s, outcome.num_output)
        recorder.end(index)
    elif outcome.end_s is not None:
        recorder.end(index, outcome.failure)


def is_silent(outcome: BenchRecord) -> bool:
    """Return whether this is a whole answer of tokens that have no text."""
    return outcome.failure == EMPTY and outcome.is_counted and outcome.num_output > 0


def num_short(outcomes: Sequence[BenchRecord], records: Records) -> int:
    """Return how many complete answers are shorter than the trace wants: the server did not go on past end tokens."""
    counted = all(outcome.is_counted for outcome in outcomes if not outcome.failure)
    return int((records.is_complete & (records.num_tokens < records.num_output)).sum()) if counted else 0
