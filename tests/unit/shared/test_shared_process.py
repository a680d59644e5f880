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


def test_a_refused_start_is_one_line_and_exit_code_2() -> None:
    body = (
        'async def main(stop):\n    raise ConfigError("port 80 is taken", "Choose another")\nrun_service("probe", main)'
    )
    assert run(body) == (2, "", "sluice: port 80 is taken. Choose another\n")


def test_a_refusal_before_the_loop_starts_looks_the_same() -> None:
    body = 'with refusing_start():\n    raise ConfigError("port 80 is taken", "Choose another")'
    assert run(body) == (2, "", "sluice: port 80 is taken. Choose another\n")


def test_a_crash_is_logged_with_its_traceback_and_exit_code_1() -> None:
    body = 'configure("probe", "p0")\nasync def main(stop):\n    raise KeyError("lost")\nrun_service("probe", main)'
    code, out, err = run(body)
    assert (code, out) == (1, "")
    event = json.loads(err)
    assert (event["level"], event["service"], event["event"]) == ("error", "probe", "crashed")
    assert "KeyError: 'lost'" in event["exception"]


def test_a_crash_before_logging_is_set_up_is_still_seen_on_stderr() -> None:
    code, out, err = run('async def main(stop):\n    raise KeyError("lost")\nrun_service("probe", main)')
    assert (code, out) == (1, "")
    assert "KeyError: 'lost'" in err


def test_an_exit_that_the_service_asks_for_keeps_its_code() -> None:
    assert run('async def main(stop):\n    sys.exit(5)\nrun_service("probe", main)') == (5, "", "")


def test_a_service_that_is_done_exits_with_0() -> None:
    assert run('async def main(stop):\n    print("x")\nrun_service("probe", main)') == (0, "x\n", "")


def test_events_logged_just_before_the_end_are_written() -> None:
    body = 'configure("probe", "p0")\nasync def main(stop):\n    for i in range(500):\n'
    body += '        get_logger().info("e", i=i)\nrun_service("probe", main)'
    code, _, err = run(body)
    assert code == 0
    assert [json.loads(line)["i"] for line in err.splitlines()] == list(range(500))
