"""`sluice top` on a pseudo-terminal: against the stand-in that comes and goes, and against a cluster that serves."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from types import MappingProxyType

import pytest

from cli.exit_codes import DONE, REFUSED
from tests.integration.test_cli_runs import Shell
from tests.integration.test_cli_talk import LIMIT_S, Terminal, accepts
from tests.support.fake_services import start_fake_dispatcher, write_fake_services
from tests.support.ports import free_port
from tests.support.processes import sluice, state_of, wait_until
from tests.support.screens import ScreenImage, set_size

ENTERED = {"1049": True, "25": False, "7": False}
"""The other screen, no cursor, no wrapping."""
LEFT = {"1049": False, "25": True, "7": True}


class Watched(Terminal):
    """A command that has the whole screen."""

    def __init__(
        self, *argv: str, size: tuple[int, int] = (80, 24), env: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__(*argv, size=size, env=env)
        self.image = ScreenImage(*size)

    def until(self, condition: Callable[[list[str]], bool], what: str) -> list[str]:
        """Return the lines of the screen once they are as they should be."""
        deadline = time.monotonic() + LIMIT_S
        while not condition(self.image.lines):
            assert time.monotonic() < deadline, f"{what}:\n{self.image.text}"
            self.read(0.1)
        return self.image.lines

    def read(self, wait_s: float) -> None:
        """Take what is written within this time."""
        if select.select([self._fd], [], [], wait_s)[0]:
            with suppress(OSError):  # its end
                self.image.feed(os.read(self._fd, 65_536).decode())

    def resize(self, width: int, height: int) -> None:
        """Have another size, and tell the command."""
        self.image.resize(width, height)
        set_size(self._fd, width, height)
        self.process.send_signal(signal.SIGWINCH)

    def ended(self) -> int:
        """Return the exit code, once all is read that was written."""
        code = self.process.wait(LIMIT_S)
        while select.select([self._fd], [], [], 0)[0] and self.image.modes != LEFT:
            self.read(0)
        return code


class StandIn:
    """A stand-in for a dispatcher that is started and killed, always at one port."""

    def __init__(self, folder: Path) -> None:
        self._code = write_fake_services(folder / "code")
        self._trace = folder / "trace"
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Have it listen."""
        self._process = start_fake_dispatcher(self._code, self._port, self._trace)
        wait_until(lambda: accepts(self._port), "it listens", LIMIT_S)

    def kill(self) -> None:
        """Have it vanish."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StandIn]:
    made = StandIn(tmp_path)
    made.start()
    yield made
    made.kill()


def first_words(lines: list[str], head: str) -> list[str]:
    """Return the first word of each line of a table."""
    (start,) = [number for number, line in enumerate(lines) if line.startswith(head)]
    rows = lines[start + 1 :]
    return [row.split()[0] for row in rows[: rows.index("")]]


def is_live(lines: list[str]) -> bool:
    return lines[0].endswith("live") and lines[-1].startswith("q quit")


@pytest.mark.slow
def test_a_server_is_watched_through_its_absence(server: StandIn) -> None:
    with closing(Watched("top", "--url", server.url, "--interval", "0.2")) as terminal:
        lines = terminal.until(is_live, "a frame")
        assert terminal.image.modes == ENTERED
        assert terminal.modes() != terminal.modes_before
        assert first_words(lines, "WORKER") == ["worker-0"]
        assert first_words(lines, "REQUEST") == ["cmpl-alice", "cmpl-bob"]
        terminal.type("s")
        lines = terminal.until(lambda lines: "requests: qoe" in lines[-1], "another order")
        assert first_words(lines, "REQUEST") == ["cmpl-bob", "cmpl-alice"]
        server.kill()
        lines = terminal.until(lambda lines: "disconnected" in lines[0], "it is missed")
        assert lines[1].startswith("trying again every 0.2 s: nothing answers at ")
        assert first_words(lines, "REQUEST") == ["cmpl-bob", "cmpl-alice"], "the last that was seen"
        server.start()
        terminal.until(is_live, "it is there again")
        assert "nothing answers" not in terminal.image.text
        terminal.type("q")
        assert terminal.ended() == DONE
        assert terminal.image.modes == LEFT
        assert terminal.modes() == terminal.modes_before
        assert terminal.image.num_too_far == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_terminal_is_as_before_however_it_ends(server: StandIn, number: signal.Signals) -> None:
    with closing(Watched("status", "--watch", "--url", server.url, "--interval", "3600")) as terminal:
        terminal.until(is_live, "a frame")
        terminal.resize(120, 30)
        lines = terminal.until(is_live, "a frame of the other size")
        assert len(lines[-1]) == 120
        terminal.process.send_signal(number)
        assert terminal.ended() == DONE
        assert terminal.image.modes == LEFT
        assert terminal.modes() == terminal.modes_before
        assert terminal.image.num_too_far == 0


def test_it_gives_the_terminal_back_while_it_is_stopped(server: StandIn) -> None:
    with closing(Watched("top", "--url", server.url, "--interval", "3600")) as terminal:
        terminal.until(is_live, "a frame")
        terminal.process.send_signal(signal.SIGTSTP)
        wait_until(lambda: state_of(terminal.process.pid) == "T", "it stops", LIMIT_S)
        terminal.until(lambda _: terminal.image.modes == LEFT, "the screen is given back")
        assert terminal.modes() == terminal.modes_before
        terminal.process.send_signal(signal.SIGCONT)
        terminal.until(lambda lines: terminal.image.modes == ENTERED and is_live(lines), "a frame")
        terminal.type("q")
        assert terminal.ended() == DONE
        assert terminal.modes() == terminal.modes_before


@pytest.mark.slow
def test_where_no_terminal_is_one_frame_is_printed(server: StandIn) -> None:
    printed = sluice("top", "--url", server.url)
    assert printed.returncode == DONE, printed.stderr
    lines = printed.stdout.splitlines()
    assert lines[0].startswith("sluice top")
    assert "\x1b" not in printed.stdout
    assert "q quit" not in printed.stdout
    assert sum("cmpl-" in line for line in lines) == 2
    watched = sluice("status", "--watch", "--url", server.url)
    assert watched.stdout.splitlines() == lines
    refused = sluice("status", "--watch", "--json", "--url", server.url)
    assert (refused.returncode, refused.stdout) == (REFUSED, "")


@pytest.mark.slow
def test_a_cluster_that_serves_is_watched(tmp_path: Path) -> None:
    """Four readers of long answers, one of which is then seen with its worker, its tokens and its slack."""
    shell = Shell(tmp_path)
    started = shell.type("up", "-d", "--port", "0", "--memory", "256MiB")
    assert started.returncode == 0, started.stderr
    load = ["bench", "--num-prompts", "4", "--concurrency", "4", "--output-len", "900", "--input-len", "20"]
    env = {**shell.env, "PYTHONPATH": os.pathsep.join(sys.path)}
    asked: list[subprocess.Popen[bytes]] = []
    try:
        with closing(Watched("top", "--interval", "0.2", env=env)) as terminal:
            terminal.until(is_live, "a frame")
            command = [sys.executable, "-m", "cli.main", *load]
            silent = subprocess.DEVNULL
            asked.append(subprocess.Popen(command, env=env, cwd=tmp_path, stdout=silent, stderr=silent))
            lines = terminal.until(lambda lines: any("streaming" in line for line in lines[9:]), "readers")
            row = next(line for line in lines[9:] if "streaming" in line).split()
            assert row[1:4] == ["default", "worker-0", "streaming"]
            assert row[-1][0] in "+-"
            assert 0 <= float(row[-2]) <= 1
            assert any(line.startswith("worker-0 ") and "ready" in line for line in lines)
            assert " GiB" in terminal.image.text
            terminal.type("q")
            assert terminal.ended() == DONE
    finally:
        for process in asked:
            process.kill()
            process.wait()
        ended = shell.type("down")
    assert ended.returncode == 0, ended.stderr
