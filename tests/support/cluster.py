"""A whole cluster as `sluice up` starts it: real processes, a real nats-server, HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 90.0
STOP_LIMIT_S = 30.0


@dataclass
class Cluster:
    """A running `sluice up`."""

    process: subprocess.Popen[str]
    url: str
    nats_url: str
    pids: dict[str, int]
    log: Path
    key: str = ""
    """Sent with every request; "" if the cluster asks for none."""

    def get(self, path: str) -> Any:
        """Return the JSON that `GET path` answers."""
        request = urllib.request.Request(self.url + path, headers=self._headers())
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float = 60) -> Any:
        """Return the JSON that `POST path` answers."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json", **self._headers()}
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.load(answer)

    def reports(self) -> list[dict[str, Any]]:
        """Return the workers' last reports, as the cluster view has them."""
        return [worker["report"] for worker in self.get("/v1/cluster")["workers"]]

    def total(self, name: str) -> int:
        """Return the sum of one number over all workers' last reports."""
        return sum(report[name] for report in self.reports())

    def wait_for_reports(self, limit_s: float = 10.0) -> None:
        """Return when the view has a report of every worker that was made after the call: the next but one.

        A suspect worker is waited for too; one that is dead, gone or replaced by another process is not.

        Raises:
            AssertionError: a worker does not report.
        """
        deadline = time.monotonic() + limit_s
        known = {(report["worker_id"], report["pid"]): report["sequence_number"] for report in self._living()}
        while late := [
            report["worker_id"]
            for report in self._living()
            if report["sequence_number"] < known.get((report["worker_id"], report["pid"]), -2) + 2
        ]:
            assert time.monotonic() < deadline, f"no report any more of {late}"
            time.sleep(0.05)

    def _living(self) -> list[dict[str, Any]]:
        """Return the last reports of the workers that are not dead."""
        return [worker["report"] for worker in self.get("/v1/cluster")["workers"] if worker["liveness"] != "dead"]

    def wait_until_idle(self, limit_s: float = 10.0) -> None:
        """Return when no worker holds a block or a sequence, by reports that were made after the call.

        Raises:
            AssertionError: something is still held after the limit.
        """
        self.wait_for_reports(limit_s)
        deadline = time.monotonic() + limit_s
        names = ("num_used_blocks", "num_running", "num_waiting", "num_preempted")
        while any(self.total(name) for name in names):
            assert time.monotonic() < deadline, f"still held: { {name: self.total(name) for name in names} }"
            time.sleep(0.05)

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_LIMIT_S)


@contextmanager
def cluster(
    *flags: str, env: dict[str, str] | None = None, root: Path = ROOT, prefix: Sequence[str] = ()
) -> Iterator[Cluster]:
    """Run `sluice up --json --port 0` with more flags; stop it at the end, and show its log if the test fails.

    Args:
        env: set beside the environment of the tests.
        root: where the code lies.
        prefix: a program, and arguments, that becomes the command which follows them.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "up.log"
        with log.open("w") as log_file:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "cli.main", "up", "--json", "--port", "0", *flags],
                cwd=root,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
            )
        try:
            line = _first_line(process)
            assert line, "sluice up did not start"
            ready = json.loads(line)
            yield Cluster(process, ready["url"].rstrip("/").removesuffix("/v1"), ready["nats_url"], ready["pids"], log)
        except BaseException:
            sys.stderr.write(log.read_text()[-8000:])
            raise
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_LIMIT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            if process.stdout is not None:
                process.stdout.close()


@contextmanager
def tiny_cluster(*flags: str) -> Iterator[Cluster]:
    """Run a cluster with one worker and a small model that is called `tiny`, with more flags."""
    from tests.support.checkpoints import CheckpointShape, stored_checkpoint  # loads torch, which others do not need

    folder, _ = stored_checkpoint(CheckpointShape(max_positions=256))
    own = ("--model", str(folder), "--served-model-name", "tiny", "--memory", "96MiB", "--threads", "1")
    with cluster(*own, *flags) as found:
        yield found


def _first_line(process: subprocess.Popen[str]) -> str:
    """Return the first line of stdout, or "" if the process ends or takes too long."""
    assert process.stdout is not None
    timer = threading.Timer(START_LIMIT_S, process.kill)
    timer.start()
    try:
        return process.stdout.readline()
    finally:
        timer.cancel()
        timer.join()
