"""A pytest plugin: says which tests took more than a CPU second and are not marked `slow`: `make test` stays short.

CPU time is that of this process and of all that it has started, those that have ended included. It says so and fails
nothing: how long a test takes depends on the machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from pathlib import Path

import pytest

LIMIT_S = 1.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_time_s() -> float:
    """Return what this process and all that it has started have used; it grows only, if those end as our children."""
    ended = os.times()
    seconds, alive = time.process_time() + ended.children_user + ended.children_system, _children(os.getpid())
    while alive:
        pid = alive.pop()
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        seconds += sum(map(int, fields[11:15])) / _TICKS_PER_S  # in user mode, in the kernel; likewise its children
        alive += _children(pid)
    return seconds


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return []  # it has ended, or this system does not say


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    before_s = cpu_time_s()
    try:
        return (yield)
    finally:
        if item.get_closest_marker("slow") is None:
            item.user_properties.append(("cpu_s", cpu_time_s() - before_s))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    taken = [
        (value, report.nodeid)
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, value in report.user_properties
        if name == "cpu_s" and value > LIMIT_S
    ]
    if taken:
        terminalreporter.section(f"took more than {LIMIT_S:g} CPU seconds: mark them slow, or make them shorter")
    for seconds, nodeid in sorted(taken, reverse=True):
        terminalreporter.line(f"{seconds:5.1f} s  {nodeid}")
