"""`sluice up` by itself: what it prints, refuses and leaves. The services are stand-ins, the broker is real."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.exit_codes import FAILED, REFUSED
from cli.processes import is_running
from shared.version import VERSION
from tests.support.fake_services import DRIVER, ROOT, write_fake_services
from tests.support.processes import child_of, wait_until

LIMIT_S = 60.0


class Place:
    """A folder with stand-in services, a model and a temporary directory of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.services = write_fake_services(root / "code")
        self.model = root / "tiny"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        self.trace_file = root / "trace"
        self.tmp = root / "tmp"
        self.tmp.mkdir()
        self.cwd = root / "cwd"
        (self.cwd / "services").mkdir(parents=True)  # a folder of this name must not be taken for ours

    def start(self, *flags: str, **env: str) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLUICE_", "NATS_"))}
        return subprocess.Popen(
            [sys.executable, "-P", "-c", DRIVER, str(self.services), "up", *flags],
            cwd=self.cwd,
            env={**kept, "TRACE": str(self.trace_file), "TMPDIR": str(self.tmp), **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def trace(self) -> list[str]:
        return self.trace_file.read_text().splitlines() if self.trace_file.exists() else []

    def left_over(self) -> list[str]:
        return sorted(path.name for path in self.tmp.iterdir())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@contextmanager
def ready(place: Place, *flags: str, **env: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """A cluster that has said that it is ready; killed at the end if it still runs."""
    process = place.start("--model", str(place.model), "--port", "0", "--json", *flags, **env)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=LIMIT_S)[1]
        answer = json.loads(line)
        assert set(answer) == {"url", "nats_url", "pids"}
        yield process, answer["pids"]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=LIMIT_S)


@pytest.mark.slow
def test_one_line_of_json_once_ready_then_an_orderly_end_that_keeps_only_the_logs_asked_for(place: Place) -> None:
    logs = place.root / "logs"
    with ready(place, "--workers", "2", "--log-dir", str(logs)) as (process, pids):
        assert set(pids) == {"nats", "monitor", "planner", "worker-0", "worker-1", "dispatcher"}
        assert all(is_running(pid) for pid in pids.values())
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert out == "", "nothing but the one line on stdout"
    assert not any(is_running(pid) for pid in pids.values())
    assert place.left_over() == []
    ending = [line for line in place.trace() if not line.endswith(" up")]
    assert ending[:2] == ["dispatcher-0 asked", "dispatcher-0 ended"]
    assert sorted(ending[2:6]) == ["worker-0 asked", "worker-0 ended", "worker-1 asked", "worker-1 ended"]
    assert ending[6:] == ["planner asked", "planner ended", "monitor asked", "monitor ended"]
    assert {path.name for path in logs.iterdir()} == {f"{name}.log" for name in pids}
    assert "Server is ready" in (logs / "nats.log").read_text()


@pytest.mark.parametrize("num_files", [8, 12, 20])
def test_too_few_files_for_a_cluster_are_one_line_and_leave_nothing(place: Place, num_files: int) -> None:
    limited = ["/bin/sh", "-c", f'ulimit -n {num_files}; exec "$@"', "sh"]
    done = subprocess.run(
        [*limited, sys.executable, "-P", "-c", DRIVER, str(place.services), "up", "--model", str(place.model)],
        env={**os.environ, "TRACE": str(place.trace_file), "TMPDIR": str(place.tmp)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stdout) == (REFUSED, "")
    assert "Start it where `ulimit -n` says" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert place.left_over() == []


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--verbose",)])
def test_what_is_told_is_readable_without_a_terminal(place: Place, flags: tuple[str, ...]) -> None:
    """One line on what starts, what most people do next, and the end; snippets and processes only where asked for."""
    process = place.start("--model", str(place.model), "--port", "0", *flags)
    assert process.stdout is not None
    text, last = "", "print(chunk" if flags else "sluice logs -f"
    while last not in text:
        text += process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert "\x1b" not in text + out + err
    assert ("curl -N" in text) == bool(flags)
    starting, *others = err.splitlines()
    assert starting.startswith("starting 1 worker with model tiny; chosen: device ")
    processes, keys, stopping, stopped = others[0], *others[-3:]
    assert (processes == "processes: broker, monitor, planner, 1 worker, dispatcher") == bool(flags)
    assert any(re.fullmatch(r"ready after \d+\.\d s", line) for line in others)
    assert keys == "Ctrl-C stops it"
    assert re.fullmatch(
        r"stopping: waiting for running answers, at most 1[12]\d s; Ctrl-C again ends at once", stopping
    )
    assert stopped == "stopped"


def test_a_second_interrupt_stops_at_once_and_leaves_nothing(place: Place) -> None:
    with ready(place, STOP_S="60") as (process, pids):
        process.send_signal(signal.SIGINT)
        wait_until(lambda: "dispatcher-0 asked" in place.trace(), "the dispatcher was asked to stop")
        started_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
        assert time.monotonic() - started_s < 20, "it does not wait for the 60 s that the services would take"
    assert process.returncode == 130
    wait_until(lambda: not any(is_running(pid) for pid in pids.values()), "every process is gone")
    wait_until(lambda: place.left_over() == [], "no file is left")


def test_when_up_is_killed_no_process_and_no_file_is_left(place: Place) -> None:
    with ready(place, STOP_S="60") as (process, pids):
        process.kill()
        process.communicate(timeout=LIMIT_S)
        wait_until(lambda: not any(is_running(pid) for pid in pids.values()), "every process is gone")
        wait_until(lambda: place.left_over() == [], "no file is left")


def test_a_killed_guardian_is_replaced_and_nothing_is_left_when_up_is_killed_after_it(place: Place) -> None:
    with ready(place, STOP_S="60") as (process, pids):
        guardian = child_of(process.pid, "guardian.py")
        os.kill(guardian, signal.SIGKILL)
        wait_until(lambda: child_of(process.pid, "guardian.py") not in (0, guardian), "there is another guardian")
        assert all(is_running(pid) for pid in pids.values())
        process.kill()
        process.communicate(timeout=LIMIT_S)
        wait_until(lambda: not any(is_running(pid) for pid in pids.values()), "every process is gone")
        wait_until(lambda: place.left_over() == [], "no file is left")


def test_packages_of_others_that_are_called_like_ours_change_nothing(place: Place) -> None:
    """The command as it is installed: its place comes after PYTHONPATH. Its children are found before both."""
    foreign = place.root / "foreign"
    for folder in (foreign, place.cwd):
        for name in ("cli", "services", "shared", "sim"):
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "__init__.py").write_text(f"raise SystemExit('this is another {name}')")
    path = os.pathsep.join(map(str, (foreign, ROOT, ROOT / "client")))
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["sluice"].partition(":")
    told = subprocess.run(
        [sys.executable, "-P", "-c", f"from {module} import {function}; {function}()", "version"],
        env={**os.environ, "PYTHONPATH": path},
        cwd=place.cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (told.returncode, told.stdout) == (0, f"sluice {VERSION}\n"), told.stderr
    (place.services / "shared").symlink_to(ROOT / "shared")  # the stand-ins use it, and lie elsewhere
    with ready(place, PYTHONPATH=path) as (process, _):
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err


@pytest.mark.slow
def test_a_killed_broker_and_worker_are_started_again(place: Place) -> None:
    with ready(place) as (process, pids):
        for name in ("worker-0", "nats"):
            os.kill(pids[name], signal.SIGKILL)
        wait_until(lambda: place.trace().count("worker-0 up") >= 2, "the worker is up again", LIMIT_S)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    for name in ("worker-0", "nats"):
        assert re.search(rf"^\d\d:\d\d:\d\d  {name} ended by SIGKILL; it starts again", err, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "code", "line"),
    [
        ({"WORKER": "refuse"}, 2, "sluice: too little memory for one request. Use --memory 2GiB"),
        ({"WORKER": "crash"}, 1, "Use --log-dir DIR to keep the logs of a run; more: sluice explain keeps_ending"),
    ],
)
def test_a_worker_that_cannot_start_ends_everything(place: Place, env: dict[str, str], code: int, line: str) -> None:
    process = place.start("--model", str(place.model), "--port", "0", "--json", **env)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (code, "")
    assert err.splitlines()[-1].endswith(line)
    assert place.left_over() == []


@pytest.mark.parametrize("name", ["worker-0", "dispatcher-0"])
def test_a_service_that_would_refuse_says_so_before_anything_starts(place: Place, name: str) -> None:
    """Nor is any other waited for."""
    logs = place.root / "logs"
    process = place.start("--model", str(place.model), "--port", "0", "--log-dir", str(logs), REFUSES=name)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out, err) == (2, "", "sluice: not with these settings. Use others\n")
    assert (place.trace(), place.left_over(), list(logs.iterdir())) == ([], [], [])


def test_a_check_that_hangs_ends_with_the_start_limit(place: Place) -> None:
    process = place.start("--model", str(place.model), "--port", "0", "--start-limit-s", "1", REFUSES="nobody")
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out, err.count("\n")) == (FAILED, "", 1)
    assert err.startswith("sluice: the model was not checked within 1 s. See whether its disk and the device answer")
    assert (place.trace(), place.left_over()) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "start"),
    [
        (["--memory", "8"], "a memory budget of 0.01 MiB is too small"),
        (["--memory", "9MB", "--system", "kunserve", "--max-model-len", "500"], "a memory budget of 8.59 MiB is too"),
        (["--system", "swap", "--memory", "1kb"], "a memory budget of 0.01 MiB is too small"),
        (["--max-model-len", "1025"], "max_model_len 1025 is longer than the model's 1024 positions. Ask for at most"),
        (["--device", "cuda:99"], "device 'cuda:99' is not there"),
        (["--kernels", "flashinfer"], "FlashInfer's attention is not possible: the device is cpu"),
        (["--api-keys-file", "/etc/hostname"], "the file of keys /etc/hostname is wrong"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_real_services_refuse_is_told_before_anything_starts(place: Place, flags: list[str], start: str) -> None:
    place.services = ROOT
    process = place.start("--port", "0", *flags)
    out, err = process.communicate(timeout=4 * LIMIT_S)
    assert (process.returncode, out, len(err.splitlines())) == (2, "", 1), err
    assert err.startswith(f"sluice: {start}")
    assert place.left_over() == []


@pytest.mark.slow
def test_a_broker_that_runs_already_is_used_and_left_running(place: Place) -> None:
    from shared.transport.nats_server import EmbeddedNats

    with EmbeddedNats() as nats, tempfile.TemporaryDirectory() as store:
        url = nats.start(Path(store))
        with ready(place, NATS_URL=url) as (process, pids):
            assert "nats" not in pids
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 0
        assert nats.pid is not None
        assert is_running(nats.pid)


@pytest.mark.parametrize(
    ("flags", "env", "start"),
    [
        (["--model", "nowhere"], {}, "there is no folder nowhere. Give the folder"),
        (
            [],
            {"NATS_URL": "nats://127.0.0.1:1"},
            "no NATS server answers at 127.0.0.1:1 (Connection refused). Start it",
        ),
        (["--port", "TAKEN"], {}, "port TAKEN on 127.0.0.1 is taken. Choose another with --port"),
        (
            ["--log-dir", "/dev/null/logs"],
            {},
            "no log can be written to /dev/null/logs (Not a directory). Set --log-dir",
        ),
        (["--memory", "999TiB"], {}, "999.0 TiB is more memory than the "),
        ([], {"SLUICE_WORKRES": "2"}, "unknown environment variable SLUICE_WORKRES. Did you mean SLUICE_WORKERS?"),
    ],
)
def test_bad_starts_are_one_line_with_exit_code_2(
    place: Place, flags: list[str], env: dict[str, str], start: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        defaults = ["--model", str(place.model), "--port", "0"]
        process = place.start(*defaults, *(flag.replace("TAKEN", port) for flag in flags), **env)
        out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("sluice: " + start.replace("TAKEN", port))
    assert err.count("\n") == 1
    assert place.trace() == [], "nothing was started"
    assert place.left_over() == []
