"""A pytest plugin of `make test`: says which tests took more than a CPU second, so that it stays short.

CPU time is that of this process and of all that it has started and that has ended. It says so and fails nothing: how
long a test takes depends on the machine.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

LIMIT_S = 1.0


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    before_s = _cpu_time_s()
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu_s", _cpu_time_s() - before_s))


def _cpu_time_s() -> float:
    return sum(os.times()[:4])  # in user mode and in the kernel: our own, and that of children


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    taken = [
        (value, report.nodeid)
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, value in report.user_properties
        if name == "cpu_s" and isinstance(value, float) and value > LIMIT_S
    ]
    if taken:
        terminalreporter.section(f"took more than {LIMIT_S:g} CPU second: mark them slow, or make them shorter")
    for seconds, nodeid in sorted(taken, reverse=True):
        terminalreporter.line(f"{seconds:5.1f} s  {nodeid}")
