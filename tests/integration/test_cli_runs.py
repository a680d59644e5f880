"""Clusters that run here are found without a URL, shown, told apart and ended: `sluice ps`, `down`, `logs`, `up -d`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.exit_codes import DONE, REFUSED, UNREACHABLE
from cli.model import shipped_folder
from cli.processes import is_running
from cli.run_file import find_runs
from tests.integration.test_cli_up import Place, ready
from tests.support.fake_hub import fake_hub
from tests.support.processes import heed_signals, wait_until

pytestmark = pytest.mark.slow

LIMIT_S = 60.0
LIMITED = Path("/sys/fs/cgroup/memory/sluice-tests")


class Shell:
    """Types `sluice …` where no other clusters are known."""

    def __init__(self, folder: Path) -> None:
        self.runtime = folder / "runtime"
        self.runtime.mkdir(mode=0o700)
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("SLUICE_", "NATS_"))}
        self.env |= {"XDG_RUNTIME_DIR": str(self.runtime), "SLUICE_COSTS_KEPT": str(folder / "costs")}
        self.folder = folder

    def type(self, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return self.run([sys.executable, "-m", "cli.main", *words], text)

    def run(self, argv: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv,
            env={**self.env, "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=self.folder,
            input=text,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def runs(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = json.loads(self.type("ps", "--json").stdout)
        return found


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_one_in_the_background_is_found_by_every_command_until_it_is_ended(shell: Shell) -> None:
    started = shell.type("up", "-d", "--port", "0", "--api-key", "of-sixteen-letters")
    assert started.returncode == 0, started.stderr
    try:
        assert started.stderr.splitlines()[-1] == "`sluice down` stops it"
        (run,) = shell.runs()
        assert run["state"] == "ready"
        assert f"{run['url']}/v1, in the background" in started.stderr
        pid = int(str(run["pid"]))
        assert b"of-sixteen-letters" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert os.getsid(pid) == pid, "no terminal ends it"
        assert str(run["url"]) in shell.type("ps").stdout
        shell.env["SLUICE_API_KEY"] = "of-sixteen-letters"
        assert "worker-0" in shell.type("status").stdout
        assert shell.type("chat", "--pace", "off", text="hello\n").stdout
        assert "planner, epoch" in shell.type("planner").stdout
        assert len(shell.type("tap", "--count", "2").stdout.splitlines()) == 2
        assert shell.type("bench", "--num-prompts", "2", "--output-len", "4").returncode == 0
        assert '"event": "worker_ready"' in shell.type("logs", "worker-0").stdout
        assert "monitor " in shell.type("logs", "--tail", "1").stdout
        talked = shell.type("run", "--pace", "off", text="hello\n")
        assert talked.stdout
        assert f"sluice-demo is served at {run['url']} already" in talked.stderr
        assert len(shell.runs()) == 1
    finally:
        ended = shell.type("down")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.splitlines()[-1].endswith("has ended")
    assert not is_running(pid)
    assert shell.runs() == []
    assert list((shell.runtime / "sluice").iterdir()) == []
    for words in (("status",), ("planner",), ("logs",)):
        assert shell.type(*words).returncode in (UNREACHABLE, REFUSED)


def test_a_conversation_with_a_model_has_a_cluster_for_as_long_as_it_takes(shell: Shell) -> None:
    shutil.copytree(shipped_folder(), shell.folder / "tales")
    talked = shell.type("run", "tales", "--pace", "off", text="hello\n")
    assert talked.returncode == 0, talked.stderr
    assert talked.stdout
    assert "model tales" in talked.stderr
    assert talked.stderr.endswith("has ended\n")
    assert shell.runs() == []
    assert shell.type("run", "tales", "--model", "tales").returncode == REFUSED


def test_a_model_of_the_hub_is_fetched_served_and_asked_in_one_command(shell: Shell) -> None:
    with fake_hub() as hub:
        hub.models["owner/tales"] = {path.name: path.read_bytes() for path in shipped_folder().iterdir()}
        hub.cuts["model.safetensors"] = 1_000_000
        shell.env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(shell.folder / "hub"), "HF_HUB_DISABLE_XET": "1"}
        asked = ("run", "owner/tales", "Tell me a story about a fox.", "--pace", "off", "--temperature", "0")
        first = shell.type(*asked)
        assert first.returncode == 0, first.stderr
        assert len(first.stdout) > 100
        assert "owner/tales 100% of " in first.stderr
        assert hub.fetched.count("model.safetensors") == 2
        hub.is_down = True
        assert shell.type(*asked).stdout == first.stdout, "it is here now"
    assert shell.runs() == []


def test_two_are_told_apart_and_one_that_is_killed_leaves_nothing_that_is_believed(
    shell: Shell, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    runtime = {"XDG_RUNTIME_DIR": str(shell.runtime)}
    with (
        ready(Place(tmp_path / "a"), **runtime) as (first, _),
        ready(Place(tmp_path / "b"), "--cluster", "other", **runtime) as (second, _),
    ):
        runs = {run["pid"]: run for run in shell.runs()}
        assert set(runs) == {first.pid, second.pid}
        refused = shell.type("status")
        assert refused.returncode == REFUSED
        assert all(str(run["url"]) in refused.stderr for run in runs.values())
        assert shell.type("down").returncode == REFUSED
        assert shell.type("down", "nobody").returncode == UNREACHABLE
        done = shell.type("down", str(runs[first.pid]["url"]).rpartition(":")[2])
        assert done.returncode == 0, done.stderr
        assert first.wait(LIMIT_S) == 0
        assert [run["cluster"] for run in shell.runs()] == ["other"]
        second.kill()
        second.wait(LIMIT_S)
        assert shell.runs() == []
        assert list((shell.runtime / "sluice").iterdir()) == []
        assert shell.type("down", "--all").stderr == "no cluster runs here\n"


@pytest.mark.skipif(not os.access(LIMITED.parent, os.W_OK), reason="no control group of memory can be made here")
def test_a_control_group_s_limit_is_respected(shell: Shell) -> None:
    """Of 1.5 GiB half a one is the worker's process's, and half a one that of all others."""
    LIMITED.mkdir(exist_ok=True)
    try:
        (LIMITED / "memory.limit_in_bytes").write_text(str(3 * 2**29))
        typed = f'echo $$ > {LIMITED}/cgroup.procs; exec "$0" -m cli.main up -d --port 0'
        started = shell.run(["sh", "-c", typed, sys.executable])
        assert started.returncode == 0, started.stderr
        try:
            (chosen,) = re.findall(r"memory (\d+)\.\d MiB; .*, 1\.[45] GiB are free", started.stderr)
            assert 400 <= int(chosen) <= 512
            assert shell.type("chat", "--pace", "off", text="hello\n").stdout
        finally:
            assert shell.type("down").returncode == 0
        assert "oom_kill 0" in (LIMITED / "memory.oom_control").read_text()
    finally:
        wait_until(lambda: not (LIMITED / "cgroup.procs").read_text(), "all have left it", LIMIT_S)
        LIMITED.rmdir()


def test_what_is_refused_is_said_where_it_was_asked_for(shell: Shell) -> None:
    refused = shell.type("up", "-d", "--port", "0", "--model", str(shell.folder / "nowhere"))
    assert refused.returncode == REFUSED
    assert "nowhere" in refused.stderr
    assert shell.runs() == []


def test_a_start_that_is_broken_off_leaves_nothing(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is there before a worker has begun to load."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shell.runtime))
    with subprocess.Popen(
        [sys.executable, "-m", "cli.main", "up", "-d", "--port", "0"],
        env={**shell.env, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=shell.folder,
        stderr=subprocess.PIPE,
        preexec_fn=heed_signals,
    ) as starting:
        wait_until(lambda: bool(find_runs()), "it has begun", LIMIT_S)
        (run,) = find_runs()
        starting.send_signal(signal.SIGINT)
        assert starting.wait(LIMIT_S) == DONE
        wait_until(lambda: not is_running(run.pid), "it has ended", LIMIT_S)
    assert find_runs() == []
