"""Where printed lines are typed: a folder with what they name, a shell that finds the programs, a live cluster."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.support.checkpoints import CheckpointShape, stored_checkpoint
from tests.support.fake_services import DRIVER, write_fake_services
from tests.support.processes import wait_until

ROOT: Final = Path(__file__).parents[2]
LIMIT_S: Final = 90.0
ARRIVALS: Final = "arrival_s,input_tokens,output_tokens\n0.0,20,4\n0.2,30,4\n0.3,20,6\n"
_UP: Final = """
import json, signal, subprocess, sys
driver, services, *flags = sys.argv[1:]
up = subprocess.Popen([sys.executable, "-P", "-c", driver, services, "up", *flags], stdout=subprocess.PIPE)
line = up.stdout.readline()
up.send_signal(signal.SIGINT)
code = up.wait(30)
sys.stdout.buffer.write(line)
sys.exit(code if not line or set(json.loads(line)) == {"url", "nats_url", "pids"} else 99)
"""


@dataclass
class Place:
    """A folder in which lines are typed."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        programs = self.folder / "bin"
        programs.mkdir(parents=True)
        python = shlex.quote(sys.executable)
        services = write_fake_services(self.folder / "stand-ins")
        run_up = shlex.join([sys.executable, "-c", _UP, DRIVER, str(services)])
        scripts = {
            "sluice": f'exec {python} -m sluice "$@"',
            "sluice-up": f'unset NATS_URL; exec {run_up} "$@" --port 0 --json',
            "python": f'exec {python} "$@"',
            "nats": f'exec {python} -m tests.support.nats_stand_in "$@"',
        }
        for name, text in scripts.items():
            (programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name).chmod(0o755)
        (self.folder / "llama").symlink_to(stored_checkpoint(CheckpointShape(num_layers=4, max_positions=512))[0])
        for name in ("arrivals.csv", "trace.csv"):
            (self.folder / name).write_text(ARRIVALS)
        (self.folder / "documents.jsonl").write_text('{"prompt": "What is this?", "max_tokens": 4}\n' * 3)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLUICE_", "NATS_"))}
        paths = [str(programs), str(Path(sys.executable).parent), kept["PATH"]]
        code = {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}", "TRACE": str(self.folder / "trace")}
        self.env = {**kept, **code, "PATH": ":".join(paths), "OMP_NUM_THREADS": "1", **self.env}

    def type(self, line: str, text: str = "", env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run one line in a shell to its end."""
        return subprocess.run(
            ["bash", "-c", line],
            input=text,
            cwd=self.folder,
            env={**self.env, **(env or {})},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def wait_until_ready(self) -> None:
        """Return when the cluster at `URL` takes requests: lines before may have ended workers of it."""
        wait_until(lambda: self.type("curl -sf $URL/ready").returncode == 0, "the cluster is ready", LIMIT_S)


def printed_table(text: str) -> dict[str, str]:
    """Return the rows that `sluice up` prints once it is ready, by their first word."""
    return dict(re.findall(r"^  (\w+) +(\S.*)$", text, re.MULTILINE))
