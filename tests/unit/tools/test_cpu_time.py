"""The plugin of `make test` that names what took long: by CPU time, in whichever process it ran."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = """
import subprocess, sys, time

BURN = "import time\\nend_s = time.process_time() + 1.1\\nwhile time.process_time() < end_s: pass"

def test_computes():
    exec(BURN)

def test_has_another_process_compute():
    subprocess.run([sys.executable, "-c", BURN], check=True)

def test_only_waits():
    time.sleep(1.1)
"""


@pytest.mark.slow
def test_what_took_more_than_a_cpu_second_is_named_and_what_waited_is_not(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    options = ["-p", "tests.support.cpu_time", "-p", "no:cacheprovider", "-n", "1", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", "-q", *options, str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = said[said.index("took more than 1 CPU second") :]
    assert "test_computes" in named
    assert "test_has_another_process_compute" in named
    assert "test_only_waits" not in named
