"""`sluice doctor`: each thing has its finding, and what a cluster cannot start without is an exit code of 1."""

from __future__ import annotations

import importlib.metadata
import json
import resource
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from cli.doctor import Finding, Health, describe, look_around
from cli.main import run_command
from shared.errors import StartupError

NAMES = ["python", "torch", "kernels", "device", "memory", "broker", "disk", "files", "port", "clusters"]


def found(**env: str) -> dict[str, Finding]:
    return {each.what: each for each in look_around(env)}


def test_every_thing_has_a_finding_and_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["doctor", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["what"] for row in rows] == NAMES
    assert all(set(row) == {"what", "health", "said", "hint"} for row in rows)
    assert run_command(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(any(row["said"] in line for line in out.splitlines()) for row in rows if row["what"] == "python")


def test_what_a_start_needs_and_is_not_there_is_missing_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Mock(side_effect=importlib.metadata.PackageNotFoundError("torch"))
    monkeypatch.setattr(importlib.metadata, "version", gone)
    monkeypatch.setattr(
        "shared.transport.nats_server.find_binary", Mock(side_effect=StartupError("no server", "Get it"))
    )
    seen = found()
    assert [what for what, each in seen.items() if each.health is Health.MISSING] == ["torch", "broker"]
    assert (seen["broker"].said, seen["broker"].hint) == ("no server", "Get it")
    assert "make install" in seen["torch"].hint
    assert run_command(["doctor"]) == 1


def test_a_named_broker_that_does_not_answer_is_missing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    broker = found(NATS_URL=f"nats://me:secret@127.0.0.1:{port}")["broker"]
    assert broker.health is Health.MISSING
    assert str(port) in broker.said
    assert "secret" not in broker.said


def test_what_can_be_done_without_is_poor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shared.host.free_memory", lambda: 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    is_taken = Mock(side_effect=StartupError("port 8000 is taken", "Use another"))
    monkeypatch.setattr("cli.cluster.checks.find_port", is_taken)
    monkeypatch.setattr("cli.cluster.children.CODE_ROOT", tmp_path)
    seen = found()
    assert [what for what, each in seen.items() if each.health is Health.POOR] == [
        "kernels",
        "memory",
        "disk",
        "files",
        "port",
    ]
    assert all(each.hint for each in seen.values() if each.health is Health.POOR)
    assert run_command(["doctor"]) == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight million parameters in bfloat16, and KV of 1 024 bytes a token in float32."""
    shape = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "llama", "vocab_size": 1000, "max_position_embeddings": 2000, "dtype": "bfloat16", **shape}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(bytes(16_000_000))
    return tmp_path


def model_finding(folder: Path, **env: str) -> Finding:
    return next(each for each in look_around(env, str(folder)) if each.what == "model")


def test_a_model_that_fits_is_said_to_with_figures(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 GiB of KV at least is taken: 2³⁰ + 32 MB, less the parameters and workspace of a step of 2 048."""
    monkeypatch.setattr("cli.cluster.cluster.free_memory", lambda: 8 * 2**30)
    seen = model_finding(folder)
    workspace = 4 * 2**20 + 4 * (24 * 2048 * 128 + 6 * 256 * 1000)
    num_tokens = (2**30 - workspace) // 1024
    assert seen.health is Health.OK
    assert seen.said.startswith(f"{folder.name} takes 30.5 MiB in float32 on cpu, of 1.0 GiB for a worker; there is")
    assert f"about {num_tokens} tokens, {num_tokens // 2000} contexts of 2000 at a time; a reader gets" in seen.said
    assert run_command(["doctor", str(folder)]) == 0
    assert f"model     {folder.name} takes" in capsys.readouterr().out


def test_a_model_for_which_little_is_left_is_poor_and_one_that_up_would_refuse_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_MEMORY", "64MiB")
    few = model_finding(folder)
    assert (few.health, few.hint.startswith("With --memory ")) == (Health.POOR, True)
    monkeypatch.delenv("SLUICE_MEMORY")
    monkeypatch.setattr("cli.cluster.cluster.free_memory", lambda: 2**30)
    none = model_finding(folder)
    assert none.health is Health.MISSING
    assert "besides room for KV" in none.said


@pytest.mark.parametrize(
    ("config", "file", "said"),
    [
        ({"model_type": "mamba"}, "model.safetensors", "of a kind that is not served"),
        ({"model_type": "llama"}, "pytorch_model.bin", "no weights as safetensors"),
    ],
)
def test_a_model_that_is_not_served_is_missing(config: dict[str, str], file: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / file).write_bytes(b"x" * 100)
    seen = model_finding(tmp_path)
    assert (seen.health, said in seen.said) == (Health.MISSING, True)


def test_a_folder_that_is_not_there_is_missing() -> None:
    assert model_finding(Path("/nowhere/at/all")).health is Health.MISSING


def test_the_next_step_stands_below_its_finding() -> None:
    told = describe([Finding("a", Health.OK, "fine"), Finding("longer", Health.MISSING, "gone", "Get it")])
    assert told.splitlines() == ["ok       a       fine", "missing  longer  gone", " " * 17 + "-> Get it"]
