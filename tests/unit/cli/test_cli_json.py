"""Whoever prints a list or a state prints it as JSON when asked, under the keys that docs/design/cli.md names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import pytest

from cli.drain import DrainedWorker
from cli.main import cli, run_command
from cli.run_file import Run, RunFile

PAGE: Final = Path(__file__).parents[3] / "docs" / "design" / "cli.md"
NONE: Final = {
    "chaos hang": "does one thing, and says by its exit code whether",
    "chaos kill": "likewise",
    "chaos restart": "likewise",
    "chat": "a conversation",
    "completion": "a script for a shell",
    "demo": "a conversation, for people",
    "down": "does one thing; `ps` lists what runs",
    "keys revoke": "does one thing; `keys list` shows what is left",
    "profile": "writes a file of its own, --out",
    "pull": "prints one folder; `ls` lists them",
    "run": "a conversation",
    "tap": "prints nothing but JSON",
    "top": "for people; `status` says the same",
    "version": "prints one word",
}
"""Commands without `--json`, and why."""
TO_A_FILE: Final = frozenset({"bench", "compare", "plan", "replay", "simulate"})


def commands(group: click.Group = cli, before: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command by its words, but for other names of one."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")
        elif not command.hidden:
            yield before + name, command


COMMANDS: Final = dict(commands())


def documented() -> dict[str, set[str]]:
    """The keys of each command in the page's table."""
    section = PAGE.read_text().split("## For scripts (`--json`)")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \| .+? \| (.+) \|$", section, re.MULTILINE)
    keys = {names: set(re.findall(r"`([a-z_0-9]+)`", re.sub(r"\(.*?\)", "", listed))) for names, listed in rows}
    return {name: listed for names, listed in keys.items() for name in re.findall(r"`([a-z -]+)`", names)}


def test_every_command_has_json_or_a_reason_why_not() -> None:
    with_json = {name for name, command in COMMANDS.items() if any("--json" in each.opts for each in command.params)}
    assert COMMANDS.keys() - with_json == NONE.keys()


def test_every_command_with_json_has_its_keys_documented() -> None:
    switches = {
        name
        for name, command in COMMANDS.items()
        if any("--json" in each.opts and isinstance(each, click.Option) and each.is_flag for each in command.params)
    }
    assert switches | TO_A_FILE == COMMANDS.keys() - NONE.keys()
    assert documented().keys() == switches


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place with a cluster's file, logs of two processes and a file of keys."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "monitor.log").write_text('{"ts": "2026-01-01T00:00:01.000Z", "event": "x"}\n')
    (tmp_path / "logs" / "nats.log").write_text("[1] ready\n")
    file = RunFile()
    file.write(Run("http://127.0.0.1:1", "default", "nats://a:1", "tiny", 1, str(tmp_path / "logs")))
    run_command(["keys", "create", "--tenant", "acme", "--file", str(tmp_path / "keys.toml")])
    yield tmp_path
    file.end()


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> list[Any]:
    """What a command says with `--json`, line by line; those of a list one by one."""
    capsys.readouterr()
    run_command([*argv, "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return lines[0] if len(lines) == 1 and isinstance(lines[0], list) else lines


@pytest.mark.parametrize("name", ["ps", "ls", "doctor", "keys create", "keys list"])
def test_the_keys_are_those_of_the_page(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"keys create": ["--tenant", "acme"], "keys list": ["--file", str(folder / "keys.toml")]}
    found = told(capsys, *name.split(), *more.get(name, []))
    assert found
    assert all(each.keys() == documented()[name] for each in found)


def test_lines_of_logs_are_objects_with_whose_they_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "logs") == [
        {"process": "nats", "text": "[1] ready"},
        {"process": "monitor", "ts": "2026-01-01T00:00:01.000Z", "event": "x"},
    ]


def test_the_configurations_of_a_broker_are_a_list_of_paths(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "nats-config", "--out", str(folder / "out"))
    assert found == [str(folder / "out" / "nats" / "nats.conf")]


def test_a_drain_is_told_under_the_keys_of_the_page() -> None:
    assert set(DrainedWorker.__slots__) == documented()["drain"]
