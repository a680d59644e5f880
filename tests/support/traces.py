"""The same program in processes that hash differently: whatever depends on the order of a set differs."""

from __future__ import annotations

import os
import subprocess
import sys


def outputs_of(program: str) -> set[str]:
    """Return what the program prints in processes with different hash seeds: one output if it depends on none."""
    return {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hash_seed in ("1", "4242")
    }
