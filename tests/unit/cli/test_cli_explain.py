"""`sluice explain`, and the lines that point to it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from cli.main import run_command
from shared.errors import StartupError
from shared.troubleshooting import sections
from tests.unit.cli.conftest import Refusal


def test_a_section_is_printed_and_without_a_name_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["explain", "queue_full"]) == 0
    shown, page = capsys.readouterr().out, sections()["queue_full"]
    assert "[how](operations.md#chats-and-batches-together)" in page
    assert shown == page.replace(
        "([how](operations.md#chats-and-batches-together))", "(how: docs/operations.md#chats-and-batches-together)"
    )
    assert run_command(["explain", "Queue_Full"]) == 0
    assert capsys.readouterr().out == shown
    assert run_command(["explain"]) == 0
    assert capsys.readouterr().out.split() == list(sections())
    assert run_command(["explain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == sections()
    assert run_command(["explain", "port_taken", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"port_taken": sections()["port_taken"]}


def test_of_an_unknown_name_the_nearest_are_named(refusal: Refusal) -> None:
    said = refusal("explain", "to_many_connection")
    assert said.startswith("sluice: no error is called 'to_many_connection'. Did you mean too_many_connections")
    assert "Did you mean" not in refusal("explain", "zzzzzz")
    assert "the answer's `code` says which one it is" in refusal("explain", "429")


def test_a_failure_that_has_a_section_ends_with_where_it_is(refusal: Refusal, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert refusal("up", "--port", port).endswith("for a free one; more: sluice explain port_taken\n")
    assert refusal("up", str(tmp_path / "gone")).endswith("; more: sluice explain no_such_model\n")
    assert refusal("up", "--host", "0.0.0.0").endswith("; more: sluice explain keys_needed\n")
    assert refusal("status", "--url", "http://127.0.0.1:1", code=3).endswith("; more: sluice explain nothing_answers\n")


def test_a_line_without_a_section_ends_as_before() -> None:
    assert str(StartupError("no", "Do")) == "sluice: no. Do"
    assert str(StartupError("no", topic="memory")) == "sluice: no; more: sluice explain memory"
