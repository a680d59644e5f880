"""`sluice nats-setup` against a broker with users: it waits for it, makes the buckets, and makes them again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shared.subjects import Subjects
from shared.transport.nats_config import new_passwords
from shared.transport.nats_roles import BrokerRole
from shared.transport.nats_server import EmbeddedNats
from tests.support.ports import free_port
from tests.support.processes import sluice, wait_until
from tests.support.raw_nats import RawNats

BUCKETS = list(Subjects().buckets())
PASSWORDS = new_passwords()


def env_of(url: str, role: BrokerRole) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLUICE_", "NATS_"))}
    return {**kept, "NATS_URL": url, "SLUICE_NATS_USER": role, "SLUICE_NATS_PASSWORD": PASSWORDS[role]}


def found(url: str) -> list[str]:
    """The buckets that an operator sees."""
    with RawNats(url.replace("://", f"://operator:{PASSWORDS[BrokerRole.OPERATOR]}@")) as raw:
        return [one for one in BUCKETS if "config" in raw.ask_json(f"$JS.API.STREAM.INFO.KV_{one}")[0]]


@pytest.mark.slow
def test_the_buckets_of_a_broker_that_comes_late_are_made_and_made_again_when_it_lost_its_disk(tmp_path: Path) -> None:
    server, port = EmbeddedNats(), free_port()
    url = f"nats://127.0.0.1:{port}"
    command = [sys.executable, "-m", "cli.main", "nats-setup", "--keep"]
    process = subprocess.Popen(command, env=env_of(url, BrokerRole.SETUP), stdout=subprocess.PIPE, text=True)
    try:
        server.start(tmp_path / "one", port=port, passwords=PASSWORDS)
        assert process.stdout is not None
        assert [process.stdout.readline().strip() for _ in BUCKETS] == BUCKETS
        assert found(url) == BUCKETS
        server.stop()
        server.start(tmp_path / "two", port=port, passwords=PASSWORDS)
        wait_until(lambda: found(url) == BUCKETS, "they are made again", 30)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
        server.stop()


@pytest.mark.slow
def test_a_user_that_makes_no_buckets_is_told_which_one_does(tmp_path: Path) -> None:
    with EmbeddedNats() as server:
        url = server.start(tmp_path, passwords=PASSWORDS)
        done = sluice("nats-setup", env=env_of(url, BrokerRole.OPERATOR))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("sluice: this user of the broker makes no buckets. Sign in as 'setup': ")
        assert found(url) == []
