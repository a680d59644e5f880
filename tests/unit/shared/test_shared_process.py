from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HEAD = """
import asyncio, sys, time
from shared.errors import ConfigError
from shared.process.log import configure, get_logger
from shared.process.run import refusing_start, run_service
"""


def start(body: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + body],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(body: str) -> tuple[int, str, str]:
    """Return (exit code, stdout, stderr)."""
    process = start(body)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


WAITING = """
async def main(stop):
    print(type(asyncio.get_running_loop()).__module__, flush=True)
    await stop.wait()
    print("draining", flush=True)
{after}
run_service("probe", main)
"""
SERVICE = """
async def main(stop):
    {}
run_service("probe", main)
"""
REFUSAL = "sluice: port 80 is taken. Choose another\n"


STUCK = """
    while True:
        try:
            print("stuck", flush=True)
            time.sleep(60)
        except BaseException:
            pass
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_the_service_drain_and_exit_with_0(number: signal.Signals) -> None:
    process = start(WAITING.format(after="    await asyncio.sleep(0)\n    print('done')"))
    assert first_line(process) == "uvloop"
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out.split(), err) == (0, ["draining", "done"], "")


def test_the_second_interrupt_kills_even_a_stuck_loop() -> None:
    process = start(WAITING.format(after=STUCK))
    first_line(process)
    process.send_signal(signal.SIGINT)
    assert [first_line(process), first_line(process)] == ["draining", "stuck"]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    ("body", "ended"),
    [
        (SERVICE.format('raise ConfigError("port 80 is taken", "Choose another")'), (2, "", REFUSAL)),
        ('with refusing_start():\n    raise ConfigError("port 80 is taken", "Choose another")', (2, "", REFUSAL)),
        (SERVICE.format("sys.exit(5)"), (5, "", "")),
        (SERVICE.format('print("x")'), (0, "x\n", "")),
    ],
    ids=["refused", "refused before the loop starts", "exit as asked for", "done"],
)
def test_how_a_service_ends_is_its_exit_code_and_one_line_if_it_was_refused(
    body: str, ended: tuple[int, str, str]
) -> None:
    assert run(body) == ended


def test_an_interrupt_ends_a_check_that_stands() -> None:
    body = (
        "from shared.process.config import ServiceSettings\n"
        "from shared.process.service_process import run_service_process\n"
        "def check(settings):\n"
        "    print('checking', flush=True)\n"
        "    time.sleep(60)\n"
        "sys.argv[1:] = ['--check-only']\n"
        "run_service_process('planner', ServiceSettings, None, check)"
    )
    process = start(body)
    assert first_line(process) == "checking"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == -signal.SIGINT


def test_a_crash_is_logged_with_its_traceback_and_exit_code_1() -> None:
    code, out, err = run('configure("probe", "p0")' + SERVICE.format('raise KeyError("lost")'))
    assert (code, out) == (1, "")
    event = json.loads(err)
    assert (event["level"], event["service"], event["event"]) == ("error", "probe", "crashed")
    assert "KeyError: 'lost'" in event["exception"]


def test_a_crash_before_logging_is_set_up_is_still_seen_on_stderr() -> None:
    code, out, err = run(SERVICE.format('raise KeyError("lost")'))
    assert (code, out) == (1, "")
    assert "KeyError: 'lost'" in err


def test_events_logged_just_before_the_end_are_written() -> None:
    body = 'configure("probe", "p0")\nasync def main(stop):\n    for i in range(500):\n'
    body += '        get_logger().info("e", i=i)\nrun_service("probe", main)'
    code, _, err = run(body)
    assert code == 0
    assert [json.loads(line)["i"] for line in err.splitlines()] == list(range(500))
