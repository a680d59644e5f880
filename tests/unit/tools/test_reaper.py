"""What a test run starts ends with it, also when it is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.processes import wait_until

RUN = """
import subprocess, sys
from tests.support.reaper import mark_this_process
mark_this_process()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def has_ended(process: Path) -> bool:
    """Whether it is gone, or nobody has asked yet how it ended."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_child_in_a_session_of_its_own_ends_when_the_run_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        child = Path("/proc") / run.stdout.readline().strip()
        assert not has_ended(child)
        run.kill()
    wait_until(lambda: has_ended(child), "the child has ended")
