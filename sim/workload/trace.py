"""Traces of requests from CSV files, and how a trace is made denser or thinner.

Columns: arrival_s (seconds), input_tokens, output_tokens (at least 1), and, if the file has it, log_type (any word).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from shared.errors import StartupError
from shared.reading import InputFile
from sim.workload.workload import F64, I32

COLUMNS: Final = ("arrival_s", "input_tokens", "output_tokens")
MAX_TOKENS: Final = 10_000_000
"""Most tokens of one prompt or answer; more is taken for a mistake in the file."""
MAX_TRACE_BYTES: Final = 2**28
MAX_REQUESTS: Final = 4_000_000
_COUNT: Final = f"a whole number from 1 to {MAX_TOKENS}"
_ALLOWED: Final[dict[str, tuple[Callable[[str], float], float, float, str]]] = {
    "arrival_s": (float, 0, 1e9, "a time in seconds, 0 or more"),
    "input_tokens": (int, 1, MAX_TOKENS, _COUNT),
    "output_tokens": (int, 1, MAX_TOKENS, _COUNT),
}
"""How a column is parsed, least and most, and this in words."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded requests in order of arrival; every column is [num_requests]."""

    name: str
    """The file's, without folder and `.csv`; of a window, with its ends: `burstgpt_1h[1084:1724]`."""
    arrival_s: F64
    """Seconds since the file's first one, or since the window began; ascending."""
    num_prompt: I32
    num_output: I32
    log_type: tuple[str, ...]
    """What the source calls the kind of request; empty where it says nothing."""
    has_whole_seconds: bool
    """Whether the source resolves no more than seconds (BurstGPT)."""

    def __len__(self) -> int:
        return int(self.arrival_s.size)

    def window(self, start_s: float, end_s: float) -> Trace:
        """Return the requests that arrive from `start_s` on and before `end_s`; `start_s` becomes 0.

        Raises:
            StartupError: none does.
        """
        kept = np.flatnonzero((self.arrival_s >= start_s) & (self.arrival_s < end_s))
        if not kept.size:
            hint = f"Its last one arrives at {self.arrival_s[-1]:g} s"
            raise StartupError(f"no request of trace {self.name} arrives from {start_s:g} to {end_s:g} s", hint)
        return Trace(
            name=f"{self.name}[{start_s:g}:{end_s:g}]",
            arrival_s=self.arrival_s[kept] - start_s,
            num_prompt=self.num_prompt[kept],
            num_output=self.num_output[kept],
            log_type=tuple(self.log_type[i] for i in kept.tolist()),
            has_whole_seconds=self.has_whole_seconds,
        )


def read_trace(path: Path) -> Trace:
    """Return the requests of a trace, the first one due at 0. Rows need not be in order.

    Raises:
        StartupError: the file cannot be read, or a line is no request; names the line and what is wrong with it.
    """
    rows = _read_rows(path)
    order = sorted(range(len(rows)), key=lambda i: rows[i][0])  # stable: rows at one instant stay in their order
    arrival_s = np.array([rows[i][0] for i in order])
    return Trace(
        name=path.stem,
        arrival_s=arrival_s - arrival_s[0],
        num_prompt=np.array([rows[i][1] for i in order], dtype=np.int32),
        num_output=np.array([rows[i][2] for i in order], dtype=np.int32),
        log_type=tuple(rows[i][3] for i in order),
        has_whole_seconds=bool(np.all(arrival_s == np.floor(arrival_s))),
    )


def _read_rows(path: Path) -> list[tuple[float, int, int, str]]:
    file = InputFile(path, MAX_TRACE_BYTES, "the trace", "Name a .csv file")
    try:
        with closing(file.lines()) as lines:
            rows = _parsed(file, lines)
    except csv.Error as error:
        raise file.error(f"is no CSV file: {error}") from error
    if not rows:
        raise StartupError(f"the trace {path} holds no request", "It needs a line for each request below its header")
    return rows


def _parsed(file: InputFile, lines: Iterable[str]) -> list[tuple[float, int, int, str]]:
    rows: list[tuple[float, int, int, str]] = []
    reader = csv.DictReader(lines, restval="")
    missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        hint = f"Its first line must name the columns {', '.join(COLUMNS)}"
        raise StartupError(f"{file.path} is no trace: it has no column {' or '.join(missing)}", hint)
    for row in reader:
        if len(rows) == MAX_REQUESTS:
            raise file.error(f"has more than {MAX_REQUESTS} requests")
        rows.append(_row(file.path, reader.line_num, row))
    return rows


def _row(path: Path, line: int, row: dict[str, str]) -> tuple[float, int, int, str]:
    arrival_s, num_input, num_output = (_value(path, line, column, row[column]) for column in COLUMNS)
    return arrival_s, int(num_input), int(num_output), row.get("log_type") or ""


def _value(path: Path, line: int, column: str, text: str) -> float:
    parse, least, most, what = _ALLOWED[column]
    try:
        value = parse(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise StartupError(f"{path}, line {line}: {column} is '{text[:40]}'", f"It must be {what}")
    return value


def upscaled(arrival_s: F64, factor: float, random: np.random.Generator) -> F64:
    """Return arrival times with `factor` times the load and the same pattern in time, ascending.

    Every time is emitted floor(factor) times, and once more with probability frac(factor). Requests are then dealt onto
    the new times in their original order (`dealt`). Dividing the times by the factor instead would shorten every ramp
    and burst by it.

    Args:
        arrival_s: [num_arrivals], ascending.
        factor: 0 or more; below 1 it thins the trace.
        random: decides the copies of the fraction.

    Source: TraceUpscaler (EuroSys 2024, DOI 10.1145/3627703.3629581); deviations: see `dealt`.
    """
    whole = math.floor(factor)
    copies = whole + (random.random(arrival_s.size) < factor - whole)
    return np.repeat(arrival_s, copies)


def dealt(num_records: int, num_arrivals: int) -> I32:
    """Return the index of the record that each arrival gets, [num_arrivals]: in order, again from 0 when they run out.

    Deviation from TraceUpscaler's tool, which stops when the records are used up and so covers 1/factor of the window.
    """
    return (np.arange(num_arrivals) % num_records).astype(np.int32)


def spread(arrival_s: F64, resolution_s: float, random: np.random.Generator) -> F64:
    """Return the times, each moved later by a random part of what the source's clock resolves; ascending."""
    return np.sort(arrival_s + resolution_s * random.random(arrival_s.size))


def repeated_window(arrival_s: F64, start_s: float, end_s: float, until_s: float) -> F64:
    """Return the times up to `end_s`, followed by those of [start_s, end_s) again and again, until `until_s`.

    Source: KunServe, version 2, section 5.5: the first burst is replayed until every system is out of memory.
    """
    window = arrival_s[(arrival_s >= start_s) & (arrival_s < end_s)]
    count = math.ceil(max(0.0, until_s - end_s) / (end_s - start_s))
    parts = [arrival_s[arrival_s < end_s], *(window + (i + 1) * (end_s - start_s) for i in range(count))]
    times = np.concatenate(parts)
    return times[times < until_s]
