"""A worker that is started by hand: what nobody names is chosen, what somebody names stays."""

from __future__ import annotations

import socket

import pytest

from services.worker.config import Dtype, WorkerSettings
from services.worker.memory import sizes
from services.worker.memory.sizes import with_sizes
from shared.errors import StartupError
from shared.host import FreeMemory
from shared.process import config
from shared.process.config import load
from tests.support.fault_cluster import DEMO_MODEL

GIB = 2**30


def chosen(monkeypatch: pytest.MonkeyPatch, free: FreeMemory, *flags: str) -> WorkerSettings:
    monkeypatch.setattr(sizes, "free_memory_here", lambda: free)
    return with_sizes(load(WorkerSettings, "worker", ["--model", str(DEMO_MODEL), *flags], {}))


def test_type_and_memory_are_chosen_where_nobody_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = chosen(monkeypatch, FreeMemory(64 * GIB, 2 * GIB), "--host-workers", "2")
    assert (found.dtype, found.memory) == (Dtype.FLOAT32, GIB)
    assert GIB < chosen(monkeypatch, FreeMemory(64 * GIB)).memory < 1.1 * GIB, "a GiB beside the parameters"
    assert chosen(monkeypatch, FreeMemory(64 * GIB), "--memory", "auto", "--dtype", "auto").memory > GIB
    with pytest.raises(StartupError, match="what is free here"):
        chosen(monkeypatch, FreeMemory(64 * GIB, GIB))


def test_what_is_named_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    found = chosen(monkeypatch, FreeMemory(GIB), "--memory", "3GiB", "--dtype", "bfloat16")
    assert (found.dtype, found.memory) == (Dtype.BFLOAT16, 3 * GIB)
    assert chosen(monkeypatch, FreeMemory(64 * GIB), "--memory", "1GiB").memory == GIB, "also where it is the default"
    assert chosen(monkeypatch, FreeMemory(GIB), "--executor", "modelled").memory == GIB, "none of the machine's"


def test_help_and_refusals_say_that_it_may_be_auto(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(WorkerSettings, "worker", ["--help"], {})
    text = capsys.readouterr().out
    assert "--dtype auto|float32|bfloat16" in text
    assert "(default: auto; SLUICE_WORKER_MEMORY)" in text
    with pytest.raises(StartupError, match="Use auto, or float32 or bfloat16"):
        load(WorkerSettings, "worker", ["--model", "m", "--dtype", "int4"], {})


def test_a_container_has_its_own_name_as_id_and_as_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "3f2a9c8d7e6f")
    assert config.default_instance_id().startswith("3f2a9c8d7e6f-")
    monkeypatch.setattr(config, "is_first_process", lambda: True)
    settings = load(WorkerSettings, "worker", ["--model", "m", "--stage-host", "0.0.0.0"], {})
    assert settings.instance_id == settings.stage_address() == "3f2a9c8d7e6f"
    assert settings.model_copy(update={"stage_advertise": "a"}).stage_address() == "a"
    assert settings.model_copy(update={"stage_host": "10.0.0.7"}).stage_address() == "10.0.0.7"
