"""`sluice demo`, `chat` and `status` against a stand-in that answers in OpenAI's format."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.support.fake_services import DRIVER, start_fake_dispatcher, write_fake_services
from tests.support.ports import free_port
from tests.support.processes import heed_signals, sluice, wait_until
from tests.support.screens import set_size
from tests.support.waiting import rounds

LIMIT_S = 30.0


@dataclass
class Server:
    url: str
    trace_file: Path
    code: Path

    def sluice(self, *argv: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return sluice(*argv, "--url", self.url, text=text)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("talk")
    port = free_port()
    trace = folder / "trace"
    process = start_fake_dispatcher(write_fake_services(folder / "code"), port, trace)
    wait_until(lambda: accepts(port), "the server listens")
    yield Server(f"http://127.0.0.1:{port}", trace, folder / "code")
    process.kill()
    process.wait()


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_chat_reads_messages_from_a_pipe_and_remembers_the_conversation(server: Server) -> None:
    result = server.sluice("chat", text="hello\n\nagain\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "0 before, then hello \n2 before, then again \n"
    lines = result.stderr.splitlines()
    assert len(lines) == 2
    expected = re.compile(r"QoE .* · 4 tokens · (no stall|stalled \d+\.\d s)")  # a busy machine may stall
    assert all(expected.fullmatch(line) for line in lines), lines


@pytest.mark.parametrize("pace", ["reading", "smooth", "off"])
def test_the_server_is_told_of_the_reader_that_text_is_paced_for(server: Server, pace: str) -> None:
    result = server.sluice("chat", "--pace", pace, "--reading-speed", "800", text="hello\nwhich qoe\n")
    assert result.returncode == 0, result.stderr
    hello, qoe = result.stdout.splitlines()
    assert hello == "0 before, then hello "
    assert json.loads(qoe) == (None if pace == "off" else {"ttft_s": 1.0, "speed_tokens_per_s": 800.0})


def test_reading_takes_as_long_as_the_speed_says(server: Server) -> None:
    """First token after a second, three more at one a second; what is paced ends later, never earlier."""
    began_s = time.monotonic()
    assert server.sluice("chat", "--pace", "reading", "--reading-speed", "1", text="hello\n").returncode == 0
    assert time.monotonic() - began_s > 1.0 + 3.0


@pytest.mark.parametrize(
    ("message", "line"),
    [("break", "sluice: the answer broke off: "), ("refuse", "sluice: the server refused: 400: The context is full")],
)
def test_an_answer_that_fails_is_one_line_and_exit_code_1(server: Server, message: str, line: str) -> None:
    result = server.sluice("chat", text=f"{message}\nnever sent\n")
    assert result.returncode == 1
    assert result.stderr.startswith(line)
    assert result.stderr.count("\n") == 1
    assert "never sent" not in result.stdout


def test_a_model_that_is_not_served_is_refused_with_those_that_are(server: Server) -> None:
    result = server.sluice("chat", "--model", "other", text="hello\n")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"sluice: {server.url} does not serve 'other'. It serves: tiny\n"


@pytest.mark.slow
def test_status_is_a_table_or_json(server: Server) -> None:
    table = server.sluice("status")
    assert table.returncode == 0
    assert table.stdout.splitlines()[1].split()[:3] == ["worker-0", "ready", "alive"]
    view = json.loads(server.sluice("status", "--json").stdout)
    assert view["workers"][0]["report"]["num_used_blocks"] == 2


def test_bench_prints_what_it_measured(server: Server, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    result = server.sluice("bench", "--num-prompts", "3", "--input-len", "9", "--json", str(figures))
    assert result.returncode == 0, result.stderr
    assert "3 done, 0 failed" in result.stdout
    assert json.loads(figures.read_text())["summary"]["num_complete"] == 3
    assert result.stderr.startswith(f"tiny at {server.url} (chat), data set synthetic\n")


def test_ctrl_c_makes_bench_print_what_it_has(server: Server, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "hello"}\n{"prompt": "slow"}\n{"prompt": "slow"}\n')
    command = [sys.executable, "-m", "cli.main", "bench", "--url", server.url, "--dataset", str(data)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, err
    assert "given up" in out or "0 done" in out
    assert "stopped by Ctrl-C" in out


class Terminal:
    """A `sluice` command on a pseudo-terminal.

    Args:
        *argv: what follows `sluice`.
        size: cells and lines; None: it does not say.
        env: besides this process's own.
    """

    def __init__(
        self, *argv: str, size: tuple[int, int] | None = None, env: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._fd, child_fd = pty.openpty()
        self.modes_before = self.modes()
        if size is not None:
            set_size(self._fd, *size)
        env = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", **env}
        env.pop("COLUMNS", None)  # it would come before what the terminal says of itself
        command = [sys.executable, "-m", "cli.main", *argv]
        self.process = subprocess.Popen(
            command,
            stdin=child_fd,
            stdout=child_fd,
            stderr=child_fd,
            env=env,
            start_new_session=True,
            preexec_fn=heed_signals,
        )
        os.close(child_fd)
        self.text = ""
        self._seen = 0

    def modes(self) -> list[Any]:
        """Return how the terminal treats what is typed."""
        return termios.tcgetattr(self._fd)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def read_until(self, text: str, limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while text not in self.text[self._seen :]:
            assert time.monotonic() < deadline, self.text
            if select.select([self._fd], [], [], 0.1)[0]:
                self.text += os.read(self._fd, 4096).decode(errors="replace")
        self._seen = self.text.index(text, self._seen) + len(text)

    def interrupt_until(self, text: str) -> None:
        """Press Ctrl-C as a person would, again if nothing happens, until this is shown.

        Python's line editing misses a signal that comes between the prompt and the first wait for a key.
        """
        for _ in rounds(f"Ctrl-C is answered by {text}"):
            self.process.send_signal(signal.SIGINT)
            with suppress(AssertionError):
                self.read_until(text, 5.0)
                return

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._fd)


def test_ctrl_c_stops_the_answer_and_never_ends_the_conversation(server: Server) -> None:
    with closing(Terminal("chat", "--url", server.url)) as terminal:
        terminal.read_until("> ")
        terminal.type("slow\n")
        terminal.read_until("tick tick")
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_until("> ")
        assert "stopped" in terminal.text
        wait_until(lambda: "client gone, 0 before" in server.trace_file.read_text(), "the server was told")
        terminal.type("hello\n")
        terminal.read_until("2 before, then hello")
        terminal.read_until("> ")
        terminal.interrupt_until("the conversation goes on")
        terminal.type("again\n")
        terminal.read_until("4 before, then again")
        terminal.read_until("> ")
        terminal.type("/bye\n")
        assert terminal.process.wait(LIMIT_S) == 0


def test_an_answer_that_fails_is_told_and_the_conversation_goes_on_without_it(server: Server) -> None:
    with closing(Terminal("chat", "--url", server.url)) as terminal:
        for message, said in (
            ("hello", "0 before"),
            ("refuse", "the server refused"),
            ("again", "2 before, then again"),
        ):
            terminal.read_until("> ")
            terminal.type(f"{message}\n")
            terminal.read_until(said)


def test_commands_change_what_is_sent_and_quotes_hold_several_lines(server: Server) -> None:
    with closing(Terminal("chat", "--url", server.url, "--seed", "7", "--system-prompt", "Be brief")) as terminal:
        for typed, said in (
            ("which seed", "7"),
            ("/set temperature 0.5", "temperature: 0.5"),
            ("which temperature", "0.5"),
            ("/clear", "4 messages are forgotten"),
            ('"""one\ntwo"""', "1 before, then one two"),
            ('"""/clear"""', "3 before, then /clear"),
            ("/nonsense", "/help shows"),
        ):
            terminal.read_until("> ")
            terminal.type(f"{typed}\n")
            terminal.read_until(said)


def test_a_word_is_not_broken_at_the_edge_of_the_terminal(server: Server) -> None:
    with closing(Terminal("chat", "--url", server.url, "--pace", "off", size=(20, 24))) as terminal:
        terminal.read_until("> ")
        terminal.type("aaaa bbbb cccc dddd eeee\n")
        terminal.read_until("QoE")
    shown = [line.rstrip() for line in terminal.text.splitlines()]
    assert shown[shown.index("0 before, then aaaa") + 1] == "bbbb cccc dddd eeee"


def test_one_question_is_asked_without_a_conversation(server: Server) -> None:
    result = server.sluice("chat", "hello there", "--max-tokens", "9", text="not read\n")
    assert (result.returncode, result.stdout) == (0, "0 before, then hello there \n"), result.stderr
    assert server.sluice("chat", "refuse").returncode == 1


def test_end_of_input_leaves(server: Server) -> None:
    with closing(Terminal("chat", "--url", server.url)) as terminal:
        terminal.read_until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(LIMIT_S) == 0


@pytest.mark.slow
def test_demo_streams_one_answer_and_ends_without_a_terminal(server: Server, tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text("{}")
    result = subprocess.run(
        [sys.executable, "-c", DRIVER, str(server.code), "demo", "--model", str(model), "--prompt", "hello"],
        env={**os.environ, "TRACE": str(tmp_path / "trace"), "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "tiny: 0 before, then hello \n" in result.stdout
    told = re.search(r"QoE (\d\.\d\d) · first token after (\d+\.\d\d) s · 4 tokens · (.*)", result.stdout)
    assert told is not None
    is_late = float(told[2]) >= 1 or told[3] != "no stall"  # as on a busy machine
    assert told[1] == "1.00" or is_late
    paced = re.search(
        r"generated in (\S+) s, shown in (\S+) s \((\S+) s are pacing\), at reading speed, 4.8 tok", result.stdout
    )
    assert paced is not None
    assert float(paced[3]) > 1.0
    assert float(paced[1]) + float(paced[3]) == pytest.approx(float(paced[2]), abs=0.11)
    for text in ("4 tokens", "/v1/chat/completions", "curl -N ", "from openai import OpenAI", "nats --server"):
        assert text in result.stdout
    assert result.stderr.startswith("starting 2 workers with model tiny; chosen: device ")
    assert "worker-1 ended" in (tmp_path / "trace").read_text()


def burst(*argv: str, before: str = "pass") -> subprocess.CompletedProcess[str]:
    """Run the demo's burst for readers who read so fast that it is soon over."""
    code = f"import cli.cluster.burst as burst; {before}; from cli.main import main; main()"
    command = [sys.executable, "-c", code, "demo", "--burst", "--reading-speed", "60", *argv]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=150, check=False)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_burst_has_layers_dropped_and_brought_back_and_says_what_readers_saw() -> None:
    result = burst()
    assert result.returncode == 0, result.stderr
    grown = re.search(r"dropped after \S+ s, KV memory from (\d+) to (\d+) tokens; restored after", result.stdout)
    assert grown is not None, result.stdout
    assert int(grown[2]) > int(grown[1])
    assert re.search(r"\d+ readers, \d+ tokens: QoE \d\.\d\d, at least ", result.stdout)
    assert re.search(r"longest gap: delivered \d+\.\d\d s, displayed \d+\.\d\d s; a token each 0.02 s", result.stdout)
    assert "got no whole answer" not in result.stdout
    for said in ("form 1 group", "of KV from worker-", "of parameters from the checkpoint", "become whole"):
        assert said in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_burst_without_a_drop_ends_with_1() -> None:
    result = burst("--system", "fcfs", before="burst.DROP_LIMIT_S = 3.0")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("sluice: no layers were dropped. See `sluice planner`")
    assert "longest gap: delivered " in result.stdout
