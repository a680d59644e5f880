"""`sluice chaos`: whom it finds, whom it leaves alone, and what it says. The broker is real, the services are ours."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import click
import pytest

from cli import main as command
from cli.chaos.command import hang, kill
from cli.chaos.options import seconds_of
from cli.cluster.settings import UpSettings
from cli.console import Console
from cli.exit_codes import REFUSED, UNREACHABLE, CommandError
from cli.processes import is_local_address, is_running, listener_on
from shared.transport.bus import ServiceInfo
from shared.transport.nats_bus import NatsBus
from shared.transport.nats_server import EmbeddedNats, accepts_connections
from tests.support.processes import state_of
from tests.support.waiting import until

SLEEPER = "import time; time.sleep(60)"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose command line looks like a worker's."""
    process = subprocess.Popen([sys.executable, "-c", SLEEPER, "services.worker"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def serving(nats_url: str, name: str, **metadata: str) -> AsyncIterator[None]:
    bus = await NatsBus.connect(nats_url, name=name)
    info = ServiceInfo("sluice-worker", "0.1.0", "A stand-in", {"cluster": "default", **metadata}, name)
    try:
        await bus.serve(info, [])
        await bus.flush()
        yield
    finally:
        await bus.close()


async def test_a_worker_is_found_by_what_it_says_and_killed(
    nats_url: str, sleeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(nats_url, "w-here", host=socket.gethostname(), pid=str(sleeper.pid)):
        await kill(UpSettings(nats_url=nats_url), "w-here", Console())
    assert sleeper.wait(5) == -signal.SIGKILL
    said = capsys.readouterr().err
    assert said.startswith(f"killed w-here (process {sleeper.pid}) with SIGKILL\n")
    assert "to undo: " in said


async def test_a_process_that_stands_still_goes_on_afterwards(
    nats_url: str, sleeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    started_s = time.monotonic()
    async with serving(nats_url, "w-slow", host=socket.gethostname(), pid=str(sleeper.pid)):
        await hang(UpSettings(nats_url=nats_url), "w-slow", 0.3, Console())
    assert time.monotonic() - started_s >= 0.3
    assert sleeper.poll() is None
    assert state_of(sleeper.pid) != "T"
    said = capsys.readouterr().err
    assert f"kill -CONT {sleeper.pid}" in said
    assert said.endswith("w-slow goes on\n")


async def test_a_process_goes_on_if_whoever_stopped_it_is_interrupted_while_the_bus_closes(
    nats_url: str, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    closing, close = asyncio.Event(), NatsBus.close

    async def close_slowly(bus: NatsBus) -> None:
        await close(bus)
        if bus.name != "w-slow":
            closing.set()
            await asyncio.Event().wait()

    async with serving(nats_url, "w-slow", host=socket.gethostname(), pid=str(sleeper.pid)):
        monkeypatch.setattr(NatsBus, "close", close_slowly)
        hanging = asyncio.create_task(hang(UpSettings(nats_url=nats_url), "w-slow", 60.0, Console()))
        await closing.wait()
        hanging.cancel()
        await asyncio.wait([hanging])
        await asyncio.sleep(0.05)  # a signal takes effect a little later
        assert state_of(sleeper.pid) != "T"


@pytest.mark.parametrize(
    ("metadata", "code", "words"),
    [
        ({"host": "elsewhere", "pid": "1"}, REFUSED, "runs on 'elsewhere'"),
        ({"host": socket.gethostname(), "pid": str(os.getpid())}, REFUSED, "docker-compose kill"),
        ({"host": socket.gethostname()}, 1, "does not say which process it is"),
        ({"host": socket.gethostname(), "pid": "1", "cluster": "other"}, UNREACHABLE, "nobody goes by"),
    ],
)
async def test_what_is_not_a_process_of_this_machine_and_cluster_is_left_alone(
    nats_url: str, metadata: dict[str, str], code: int, words: str
) -> None:
    async with serving(nats_url, "w-not", **metadata):
        with pytest.raises(CommandError, match=words) as caught:
            await kill(UpSettings(nats_url=nats_url), "w-not", Console())
    assert caught.value.code == code


def test_an_unknown_name_is_one_line_with_exit_code_3(nats_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run_command(["chaos", "kill", "nobody", "--nats-url", nats_url]) == UNREACHABLE
    said = capsys.readouterr().err
    assert said.startswith("sluice: nobody goes by 'nobody' in cluster 'default'.")
    assert said.count("\n") == 1


async def test_the_broker_is_found_by_its_port_and_killed(tmp_path: Path) -> None:
    with EmbeddedNats() as server:
        server.start(tmp_path)
        pid = server.pid
        assert pid is not None
        assert listener_on(int(server.url.rpartition(":")[2])) == pid
        await kill(UpSettings(nats_url=server.url), "nats", Console())
        await until(lambda: not is_running(pid))


def test_a_broker_is_known_to_answer_also_by_a_url_with_a_user(nats_url: str) -> None:
    assert accepts_connections(nats_url.replace("nats://", "nats://operator:secret@"))
    assert not accepts_connections("nats://operator:secret@127.0.0.1:1")


async def test_a_broker_elsewhere_or_something_else_on_its_port_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"nats://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(CommandError, match="no nats-server"):
            await kill(UpSettings(nats_url=url), "nats", Console())
    with pytest.raises(CommandError, match="not on this machine"):
        await kill(UpSettings(nats_url="nats://192.0.2.1:4222"), "nats", Console())


def test_addresses_of_this_machine_are_known() -> None:
    assert is_local_address("127.0.0.1")
    assert is_local_address("localhost")
    assert not is_local_address("192.0.2.1")


@pytest.mark.parametrize(("text", "seconds"), [("5s", 5), ("500ms", 0.5), ("2m", 120), ("1.5", 1.5), ("1h", None)])
def test_durations_have_units(text: str, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(click.BadParameter, match="write 500ms, 5s or 2m"):
            seconds_of(None, None, text)
    else:
        assert seconds_of(None, None, text) == pytest.approx(seconds)


def test_a_bad_duration_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run_command(["chaos", "hang", "worker-0", "--for", "soon"]) == REFUSED
    assert "is no duration" in capsys.readouterr().err
