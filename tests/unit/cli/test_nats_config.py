"""Configurations for nats-server: what is written, that the server itself takes it, and that passwords stay."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.main import cli
from cli.nats_config import parse_server, write_nats_config
from shared.errors import StartupError
from shared.transport.nats_config import BrokerConfig, config_text, new_passwords
from shared.transport.nats_roles import BrokerRole
from shared.transport.nats_server import find_binary

SERVERS = ("--server", "a=10.0.0.1", "--server", "b=10.0.0.2", "--server", "c=10.0.0.3")


def check(path: Path) -> str:
    """Return what `nats-server -t` says of a configuration that it takes."""
    done = subprocess.run([find_binary(), "-t", "-c", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def run(*argv: str) -> list[Path]:
    result = CliRunner().invoke(cli, ["nats-config", *argv], standalone_mode=False)
    assert result.exception is None, result.exception
    return [Path(line) for line in result.output.splitlines()]


def passwords(folder: Path) -> dict[str, str]:
    return {role: (folder / role / "password").read_text().strip() for role in BrokerRole}


def test_one_server_gets_a_user_per_role_and_files_that_only_their_owner_reads(tmp_path: Path) -> None:
    (path,) = run("--out", str(tmp_path), "--store", str(tmp_path / "store"))
    assert path == tmp_path / "nats" / "nats.conf"
    assert "is valid" in check(path)
    text = path.read_text()
    found = passwords(tmp_path)
    assert len(set(found.values())) == len(BrokerRole)
    for role, password in found.items():
        assert len(password) >= 32
        assert f'user: {role}, password: "{password}"' in text
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert "no_auth_user" not in text
    assert "websocket" not in text


def test_three_servers_know_each_other_and_share_the_users(tmp_path: Path) -> None:
    paths = run("--out", str(tmp_path), "--store", str(tmp_path / "store"), *SERVERS)
    assert [path.name for path in paths] == ["a.conf", "b.conf", "c.conf"]
    for path, own in zip(paths, ("10.0.0.1", "10.0.0.2", "10.0.0.3"), strict=True):
        check(path)
        text = path.read_text()
        assert f'server_name: "{path.stem}"' in text
        routes = {host for host in ("10.0.0.1", "10.0.0.2", "10.0.0.3") if f"@{host}:6222" in text}
        assert f'listen: "{own}:4222"' in text
        assert f'listen: "{own}:6222"' in text
        assert routes == {"10.0.0.1", "10.0.0.2", "10.0.0.3"} - {own}
        assert all(password in text for password in passwords(tmp_path).values())


def test_passwords_that_exist_are_kept_and_a_lost_one_is_made_anew(tmp_path: Path) -> None:
    run("--out", str(tmp_path))
    before = passwords(tmp_path)
    (tmp_path / "worker" / "password").unlink()
    (path,) = run("--out", str(tmp_path))
    after = passwords(tmp_path)
    assert {role for role in BrokerRole if before[role] != after[role]} == {"worker"}
    assert f'"{after["worker"]}"' in path.read_text()
    assert before["worker"] not in path.read_text()


def test_users_may_act_in_each_cluster_that_shares_the_broker(tmp_path: Path) -> None:
    (path,) = run("--out", str(tmp_path), "--cluster", "blue", "--cluster", "green")
    check(path)
    text = path.read_text()
    assert "sluice.blue.worker.*.report" in text
    assert "sluice.green.worker.*.report" in text
    assert "sluice.default." not in text


@pytest.mark.parametrize("text", ["a", "a=", "=h", "a=h:4222", "a=h h", "a b=h", "a=nats://h", "*=h"])
def test_a_server_is_a_name_and_a_host(text: str) -> None:
    with pytest.raises(ValueError, match=r"NAME=HOST|cannot be part|no address or name"):
        parse_server(text)


def test_servers_by_ipv6_stand_in_brackets(tmp_path: Path) -> None:
    paths = run("--out", str(tmp_path), "--server", "a=[fd00::1]", "--server", "b=fd00::2")
    for path, own, other in zip(paths, ("fd00::1", "fd00::2"), ("fd00::2", "fd00::1"), strict=True):
        check(path)
        text = path.read_text()
        assert f'"[{own}]:4222"' in text
        assert f"@[{other}]:6222" in text


def test_a_folder_that_cannot_be_written_is_one_clear_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=r"cannot write to .* Name another folder with --out"):
        write_nats_config(tmp_path / "file" / "x", BrokerConfig("0.0.0.0:4222", "/data"))


@pytest.mark.parametrize("with_users", [False, True])
def test_the_server_takes_what_sluice_up_writes(tmp_path: Path, *, with_users: bool) -> None:
    odd = tmp_path / 'a "quoted" $folder'
    odd.mkdir()
    users = new_passwords() if with_users else {}
    text = config_text(BrokerConfig("127.0.0.1:-1", str(odd / "store"), users, ports_file_dir=str(odd)))
    path = odd / "nats.conf"
    path.write_text(text)
    check(path)
    assert ("authorization" in text) == with_users
    for line in ("max_payload: 1MB", 'ping_interval: "1s"', "ping_max: 2"):
        assert line in text
