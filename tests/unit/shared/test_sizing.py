"""What workers get where nobody says: never more than there is, and what the model takes."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.cluster.settings import load_up_settings
from shared.errors import StartupError
from shared.host import FreeMemory
from shared.model_sizes import read_sizes
from shared.process.config import parse_size
from shared.sizing import LEAST_BYTES, PROCESS_BYTES, Cards, Sizes, find_cards, size

GIB = 2**30
NONE = Cards()
HALF = "qwen-0.5b"
"""494 M parameters, stored in bfloat16."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, config, files in (
        (HALF, {"dtype": "bfloat16"}, {"model.safetensors": 988_000_000}),
        ("sharded", {"torch_dtype": "float16"}, {"a.safetensors": 4_000, "b.safetensors": 4_000, "old.safetensors": 1}),
        ("plain", {}, {"model.safetensors": 4_000}),
        ("empty", {}, {}),
    ):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
        for file, num_bytes in files.items():
            with (root / name / file).open("wb") as written:
                written.truncate(num_bytes)
    weight_map = {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}
    (root / "sharded" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return root


def sized(
    folder: Path,
    free: int,
    cards: Cards = NONE,
    *,
    workers: int = 1,
    own: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    memory: str = "",
) -> tuple[str, str, int, str]:
    named = Sizes(device, dtype, parse_size(memory) if memory else None)
    found, told = size(named, workers, read_sizes(folder), FreeMemory(free, own), cards)
    assert found.memory is not None
    return found.device, found.dtype, found.memory, told


def test_a_small_model_starts_without_a_flag_and_is_told(folders: Path) -> None:
    device, dtype, memory, told = sized(folders / HALF, 20 * GIB)
    assert (device, dtype, memory) == ("cpu", "float32", 2 * 4 * 494_000_000)
    assert told == (
        "chosen: device cpu (no card that torch can use), dtype float32, memory 3.7 GiB; "
        "the parameters take 1.8 GiB, 20.0 GiB are free"
    )
    assert "memory 3.7 GiB for each of 2 workers" in sized(folders / HALF, 20 * GIB, workers=2)[3]
    assert sized(folders / HALF, 4 * GIB)[1:3] == ("float32", 3 * GIB), "less than twice the parameters"
    assert sized(folders / HALF, 3 * GIB)[1:3] == ("bfloat16", 2 * 494_000_000 + GIB), "float32 would leave no room"


@pytest.mark.parametrize(("name", "num_bytes"), [("sharded", 2 * 8_000), ("plain", 4_000), ("empty", 0)])
def test_parameters_are_counted_by_the_files_that_are_loaded(folders: Path, name: str, num_bytes: int) -> None:
    assert sized(folders / name, 20 * GIB)[2] == GIB + num_bytes


def test_what_is_named_stays(folders: Path) -> None:
    assert sized(folders / HALF, GIB, device="cpu", dtype="float32", memory="5GiB") == ("cpu", "float32", 5 * GIB, "")
    assert sized(folders / HALF, 20 * GIB, memory="2GiB")[:3] == ("cpu", "bfloat16", 2 * GIB), "float32 would fill it"
    assert sized(folders / HALF, 20 * GIB, memory="2.5GiB")[1] == "float32"
    assert load_up_settings({"memory": "auto"}).memory is None


def test_a_card_is_used_where_there_is_one_and_shared(folders: Path) -> None:
    cards = Cards(2, 80 * GIB)
    assert sized(folders / HALF, 20 * GIB, cards)[:3] == ("cuda", "bfloat16", int(0.9 * 80 * GIB))
    assert sized(folders / HALF, 20 * GIB, cards, workers=3)[2] == int(0.9 * 80 * GIB) // 2
    assert sized(folders / HALF, 20 * GIB, cards, workers=3, device="cuda:1")[2] == int(0.9 * 80 * GIB) // 3
    assert sized(folders / HALF, 20 * GIB, cards, device="cpu")[0] == "cpu"
    assert sized(folders / HALF, 20 * GIB, Cards(1))[2] == GIB, "nobody says how much it has"
    assert "device cuda," in sized(folders / HALF, 20 * GIB, cards)[3]


def test_what_does_not_fit_is_refused_before_anything_starts(folders: Path) -> None:
    with pytest.raises(StartupError, match=r"qwen-0\.5b takes .* in bfloat16, .* each of 3 workers could have 512\.0"):
        sized(folders / HALF, 3 * GIB + 512 * 2**20, workers=3)
    with pytest.raises(StartupError, match="and a worker could have 0 B of what is free here"):
        sized(folders / HALF, GIB // 2)
    with pytest.raises(StartupError, match=r"Give its container more memory \(.*WORKER_LIMIT\), another"):
        sized(folders / HALF, 20 * GIB, own=GIB)
    with pytest.raises(StartupError, match="--memory and --dtype bfloat16 to try all the same"):
        sized(folders / HALF, 2 * GIB, dtype="float32")


def test_a_containers_limit_is_its_workers_own_and_the_machine_is_shared(folders: Path) -> None:
    assert sized(folders / HALF, 20 * GIB, workers=4, own=3 * GIB)[1:3] == ("bfloat16", 2 * 494_000_000 + GIB)
    assert sized(folders / HALF, 20 * GIB, workers=4, own=4 * GIB)[1:3] == ("float32", 3 * GIB)
    assert sized(folders / HALF, 8 * GIB, workers=4, own=8 * GIB)[2] == (8 * GIB - PROCESS_BYTES) // 4 - PROCESS_BYTES
    assert "4.0 GiB are free" in sized(folders / HALF, 20 * GIB, own=4 * GIB)[3]


@given(free=st.integers(GIB, 12 * GIB), workers=st.integers(1, 3))
def test_workers_together_never_get_more_than_is_free(folders: Path, free: int, workers: int) -> None:
    try:
        _, dtype, memory, _ = sized(folders / HALF, free, workers=workers)
    except StartupError:
        assert free < workers * (2 * 494_000_000 + LEAST_BYTES + PROCESS_BYTES) + PROCESS_BYTES + workers
        return
    assert workers * (memory + PROCESS_BYTES) + PROCESS_BYTES <= free
    assert memory >= 494_000_000 * (4 if dtype == "float32" else 2) + LEAST_BYTES


@pytest.mark.parametrize(
    ("version", "script", "expected"),
    [
        ("2.13.0", "echo 81000; echo 79000", Cards(2, 79_000 * 2**20)),
        ("2.13.0+cu130", "exit 9", Cards(2)),
        ("2.13.0", "echo '[N/A]'", Cards(2)),
        ("2.13.0+cpu", "echo 81000", Cards()),
    ],
)
def test_cards_are_those_that_torch_can_use(
    version: str, script: str, expected: Cards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("importlib.metadata.version", lambda _name: version)
    assert find_cards() == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_cards() == Cards()
