"""Real child processes: restarts, refusals, the order of the end, and nothing left when the parent is killed."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.cluster.restart import RestartParams
from cli.cluster.run_dir import RunDir
from cli.cluster.supervisor import ChildSpec, RunFailure, Supervisor
from cli.exit_codes import CommandError
from cli.processes import is_running
from tests.support.leaks import whats_open
from tests.support.processes import wait_until
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
FAST = RestartParams(first_delay_s=0.01, max_delay_s=0.02, max_exits=3, window_s=60.0)
LIMIT_S = 10.0

SERVE = (
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True); signal.pause()"
)
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
)
REFUSE = "import sys; sys.stderr.write('sluice: no such model. Use another\\n'); sys.exit(2)"
CRASH = "raise RuntimeError('boom')"


def python(name: str, code: str, *args: str) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-I", "-S", "-c", code, *args))


@asynccontextmanager
async def supervised(
    folder: Path, *specs: ChildSpec, group: Callable[[], int] | None = None, params: RestartParams = FAST
) -> AsyncIterator[tuple[Supervisor, list[str]]]:
    """A supervisor with these children, and what it says of them."""
    shown: list[str] = []
    supervisor = Supervisor(folder, shown.append, group=group, params=params)
    try:
        for spec in specs:
            await supervisor.start(spec)
        yield supervisor, shown
    finally:
        await supervisor.close()


async def failure_of(supervisor: Supervisor) -> RunFailure:
    async with asyncio.timeout(LIMIT_S):
        return await supervisor.wait_failed()


async def wait_for_output(folder: Path, name: str, text: str) -> None:
    log = folder / f"{name}.log"
    await until(lambda: log.is_file() and text in log.read_text(), LIMIT_S)


async def test_a_child_that_dies_is_started_again_with_another_pid(tmp_path: Path) -> None:
    async with supervised(tmp_path, python("w", SERVE)) as (supervisor, shown):
        await wait_for_output(tmp_path, "w", "up")
        first = supervisor.pids()["w"]
        os.kill(first, signal.SIGKILL)
        await wait_for_output(tmp_path, "w", "up\nup")
        assert supervisor.pids()["w"] != first
        assert shown == ["w ended by SIGKILL; it starts again in 0.0 s"]
        assert supervisor.failure is None


async def test_an_orderly_end_is_not_blamed_on_an_old_warning(tmp_path: Path) -> None:
    code = f"""print('{{"level": "warning", "event": "old"}}'); {SERVE}"""
    async with supervised(tmp_path, python("w", code)) as (supervisor, shown):
        await wait_for_output(tmp_path, "w", "up")
        os.kill(supervisor.pids()["w"], signal.SIGTERM)
        await wait_for_output(tmp_path, "w", 'up\n{"level": "warning", "event": "old"}\nup')
        assert "w ended with exit code 0; it starts again in 0.0 s" in shown


async def test_the_supervisor_gives_up_with_one_line_that_names_the_cause(tmp_path: Path) -> None:
    async with supervised(tmp_path, python("w", CRASH)) as (supervisor, shown):
        failure = await failure_of(supervisor)
        assert failure.code == 1
        assert failure.line == (
            "sluice: w ended 3 times within 60 s, the last time with exit code 1: RuntimeError: boom. "
            "Use --log-dir DIR to keep the logs of a run; more: sluice explain keeps_ending"
        )
        assert len(shown) == 2
        assert supervisor.pids() == {}


async def test_a_refused_start_is_final_and_its_line_is_the_childs_own(tmp_path: Path) -> None:
    async with supervised(tmp_path, python("w", REFUSE)) as (supervisor, _):
        assert await failure_of(supervisor) == RunFailure("sluice: no such model. Use another", 2)
    assert (tmp_path / "w.log").read_text().count("sluice:") == 1


async def test_a_check_that_crashes_is_told_and_hinders_nothing(tmp_path: Path) -> None:
    async with supervised(tmp_path) as (supervisor, shown):
        await supervisor.check([python("w", CRASH), python("d", "pass")])
        assert shown == ["what w would refuse is not known: asked, it ended with exit code 1: RuntimeError: boom"]
        with pytest.raises(CommandError, match="no such model"):
            await supervisor.check([python("w", REFUSE)])


async def test_a_child_that_once_served_is_restarted_although_it_refuses(tmp_path: Path) -> None:
    """Memory may be short for a moment when a worker comes back; that must not end the whole cluster at once."""
    async with supervised(tmp_path, replace(python("w", REFUSE), needed_as="worker")) as (supervisor, _):
        supervisor.mark_ready()
        assert (await failure_of(supervisor)).code == 1
    assert (tmp_path / "w.log").read_text().count("sluice:") == 3


async def test_what_can_be_served_without_never_ends_the_run_once_all_was_ready(tmp_path: Path) -> None:
    """It is tried again for ever, and told of: the first times, then ever more rarely."""
    async with supervised(tmp_path, python("planner", CRASH)) as (supervisor, shown):
        supervisor.mark_ready()
        await until(lambda: len(shown) >= 5, LIMIT_S)
        assert supervisor.failure is None
    assert shown[1] == "planner ended with exit code 1: RuntimeError: boom; it starts again in 0.0 s"
    failed = "planner ended 3 times within 60 s, the last time with exit code 1: RuntimeError: boom"
    assert shown[2:5] == [f"{failed}; it is tried again every 0.0 s, and the others go on"] * 3
    assert (tmp_path / "planner.log").read_text().count("boom\n") >= 8, "told of the 3rd, 4th and 8th time"


async def test_the_run_ends_with_the_last_of_those_of_whom_one_is_needed(tmp_path: Path) -> None:
    ends = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\nraise RuntimeError('boom')"
    flag = tmp_path / "flag"
    workers = [replace(python("w0", CRASH), needed_as="w"), replace(python("w1", ends, str(flag)), needed_as="w")]
    async with supervised(tmp_path, *workers) as (supervisor, shown):
        supervisor.mark_ready()
        await until(lambda: any("w0 ended 3 times" in line for line in shown), LIMIT_S)
        assert supervisor.failure is None
        flag.touch()
        assert "boom" in (await failure_of(supervisor)).line


async def test_a_needed_child_with_an_excuse_is_tried_again_until_it_has_none(tmp_path: Path) -> None:
    excuses = ["its disk is full"]
    broker = replace(python("nats", CRASH), needed_as="nats", excuse=lambda: "".join(excuses))
    async with supervised(tmp_path, broker) as (supervisor, shown):
        supervisor.mark_ready()
        await until(lambda: any("boom (its disk is full); it is tried again" in line for line in shown), LIMIT_S)
        assert supervisor.failure is None
        excuses.clear()
        assert "nats ended 3 times" in (await failure_of(supervisor)).line


async def test_a_child_that_is_restarted_on_purpose_is_back_and_nothing_counts_against_it(tmp_path: Path) -> None:
    async with supervised(tmp_path, replace(python("w", SERVE), needed_as="w")) as (supervisor, shown):
        supervisor.mark_ready()
        for number in range(1, 6):
            await wait_for_output(tmp_path, "w", "up\n" * number)
            supervisor.restart("w")
        await wait_for_output(tmp_path, "w", "up\n" * 6)
        assert (supervisor.failure, shown) == (None, [])


async def test_a_restart_for_which_there_is_no_process_now_is_tried_again(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.symlink_to(sys.executable)
    spec = ChildSpec("w", (str(program), "-I", "-S", "-c", SERVE))
    slow = RestartParams(first_delay_s=0.01, max_delay_s=0.02, max_exits=100)
    async with supervised(tmp_path, spec, params=slow) as (supervisor, shown):
        await wait_for_output(tmp_path, "w", "up")
        program.unlink()
        os.kill(supervisor.pids()["w"], signal.SIGKILL)
        await until(lambda: any("because it could not be started ([Errno 2] No such file" in x for x in shown), LIMIT_S)
        program.symlink_to(sys.executable)
        await wait_for_output(tmp_path, "w", "up\nup")
        assert supervisor.failure is None


async def test_groups_stop_one_after_the_other_in_the_order_asked(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    code = (
        "import signal, sys, time\n"
        "def end(*_):\n"
        "    with open(sys.argv[1], 'a') as file: file.write(sys.argv[2] + ' asked\\n')\n"
        "    time.sleep(float(sys.argv[3]))\n"
        "    with open(sys.argv[1], 'a') as file: file.write(sys.argv[2] + ' ended\\n')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('up', flush=True)\n"
        "signal.pause()"
    )
    delays_s = {"last": 0.0, "middle": 0.05, "first": 0.2}
    specs = [python(name, code, str(trace), name, str(delay_s)) for name, delay_s in delays_s.items()]
    async with supervised(tmp_path, *specs) as (supervisor, _):
        for name in delays_s:
            await wait_for_output(tmp_path, name, "up")
        for name in ("first", "middle", "last"):
            assert await supervisor.stop([name], LIMIT_S) == []
        order = ["first asked", "first ended", "middle asked", "middle ended", "last asked", "last ended"]
        assert trace.read_text().splitlines() == order


async def test_a_child_that_ignores_the_request_is_killed_after_the_limit(tmp_path: Path) -> None:
    async with supervised(tmp_path, python("w", STUBBORN)) as (supervisor, _):
        await wait_for_output(tmp_path, "w", "up")
        pid = supervisor.pids()["w"]
        assert await supervisor.stop(["w"], 0.1) == ["w"]
        assert not is_running(pid)


async def test_stopping_ends_a_pending_restart(tmp_path: Path) -> None:
    slow = RestartParams(first_delay_s=60.0, max_delay_s=60.0)
    async with supervised(tmp_path, python("w", CRASH), params=slow) as (supervisor, shown):
        await until(lambda: shown, LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            assert await supervisor.stop(["w"], LIMIT_S) == []


async def test_a_program_that_cannot_be_started_leaves_nothing_open(tmp_path: Path) -> None:
    before = whats_open()
    with pytest.raises(FileNotFoundError):
        async with supervised(tmp_path, ChildSpec("w", (str(tmp_path / "nothing"),))):
            pass
    assert whats_open() == before


async def test_a_grandchild_that_keeps_the_pipe_does_not_hold_up_the_restart(tmp_path: Path) -> None:
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-I', '-S', '-c', {STUBBORN!r}])"
    with RunDir() as run_dir:
        async with supervised(tmp_path, python("w", code), group=run_dir.group) as (supervisor, _):
            assert "ended 3 times" in (await failure_of(supervisor)).line


PARENT = """
import asyncio, json, sys
from pathlib import Path
from cli.cluster.run_dir import RunDir
from cli.cluster.supervisor import ChildSpec, Supervisor

async def main():
    with RunDir() as run_dir:
        supervisor = Supervisor(run_dir.path, print, group=run_dir.group)
        for name, code in json.loads(sys.argv[1]).items():
            await supervisor.start(ChildSpec(name, (sys.executable, "-I", "-S", "-c", code)))
        while any("up" not in (run_dir.path / f"{name}.log").read_text() for name in supervisor.pids()):
            await asyncio.sleep(0.01)
        pids = [*supervisor.pids().values(), *map(int, (run_dir.path / "with-child.log").read_text().split()[1:])]
        print(json.dumps({"pids": pids, "guardian": run_dir.group(), "folder": str(run_dir.path)}), flush=True)
        await run_dir.keep_guarded(lambda _: print(json.dumps({"guardian": run_dir._guardian.pid}), flush=True))

asyncio.run(main())
"""
WITH_CHILD = (
    "import signal, subprocess, sys\n"
    f"child = subprocess.Popen([sys.executable, '-I', '-S', '-c', {STUBBORN!r}], stdout=subprocess.DEVNULL)\n"
    "print('up', child.pid, flush=True)\n"
    "signal.pause()"
)


@contextmanager
def parent_with_children() -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """One child serves, one ignores SIGTERM, one has a child of its own; the parent has no chance to tidy up."""
    children = json.dumps({"plain": SERVE, "stubborn": STUBBORN, "with-child": WITH_CHILD})
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, children], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        state = said_by(parent)
        assert len(state["pids"]) == 4
        assert all(is_running(pid) for pid in [*state["pids"], state["guardian"]])
        try:
            yield parent, state
        finally:
            parent.kill()


def said_by(parent: subprocess.Popen[str]) -> dict[str, Any]:
    assert parent.stdout is not None
    assert select.select([parent.stdout], [], [], LIMIT_S)[0], "it says nothing"
    said: dict[str, Any] = json.loads(parent.stdout.readline())
    return said


def wait_until_nothing_is_left(state: dict[str, Any]) -> None:
    pids = [*state["pids"], state["guardian"]]
    wait_until(lambda: not any(is_running(pid) for pid in pids), "every process is gone")
    wait_until(lambda: not Path(state["folder"]).exists(), "the folder is gone")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_and_no_file_is_left_when_the_parent_is_killed(number: signal.Signals) -> None:
    with parent_with_children() as (parent, state):
        parent.send_signal(number)
        parent.wait(LIMIT_S)
        wait_until_nothing_is_left(state)


def test_a_killed_guardian_is_replaced_as_often_as_it_takes_and_nothing_is_left_when_the_parent_is_killed() -> None:
    with parent_with_children() as (parent, state):
        for _ in range(3):
            os.kill(state["guardian"], signal.SIGKILL)
            state |= said_by(parent)
        assert all(is_running(pid) for pid in [*state["pids"], state["guardian"]]), "nobody noticed"
        parent.kill()
        parent.wait(LIMIT_S)
        wait_until_nothing_is_left(state)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_no_child_is_left_when_guardian_and_parent_are_killed_together() -> None:
    """What children of children do, and the folder, is nobody's business then: the kernel ends the children alone."""
    with parent_with_children() as (parent, state):
        os.kill(parent.pid, signal.SIGSTOP)
        os.kill(state["guardian"], signal.SIGKILL)
        parent.kill()
        parent.wait(LIMIT_S)
        *children, grandchild = state["pids"]
        wait_until(lambda: not any(is_running(pid) for pid in children), "every child is gone")
        os.kill(grandchild, signal.SIGKILL)
        shutil.rmtree(state["folder"])


def test_a_guardian_that_was_alone_in_its_group_is_replaced_in_another() -> None:
    with RunDir() as run_dir:
        first = run_dir.group()
        os.killpg(first, signal.SIGKILL)
        wait_until(lambda: run_dir.group() != first, "there is another group")
        assert os.getpgid(run_dir.group()) == run_dir.group()


async def test_a_child_starts_although_the_guardian_and_all_of_its_group_are_killed(tmp_path: Path) -> None:
    """In another group, or in the same one if the child was not reaped yet when the guardian was replaced."""
    with RunDir() as run_dir:
        async with supervised(tmp_path, python("w", SERVE), group=run_dir.group) as (supervisor, _):
            await wait_for_output(tmp_path, "w", "up")
            os.killpg(run_dir.group(), signal.SIGKILL)
            await wait_for_output(tmp_path, "w", "up\nup")
            assert os.getpgid(supervisor.pids()["w"]) == run_dir.group()
            assert supervisor.failure is None


def test_an_orderly_end_leaves_nothing_and_kills_what_was_forgotten() -> None:
    with RunDir() as run_dir:
        folder = run_dir.path
        (folder / "file").write_text("x")
        forgotten = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", STUBBORN], stdout=subprocess.DEVNULL, process_group=run_dir.group()
        )
        assert is_running(forgotten.pid)
    assert not folder.exists()
    assert forgotten.wait(LIMIT_S) == -signal.SIGKILL
